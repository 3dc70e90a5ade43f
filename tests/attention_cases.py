"""Random attention problems, and the comparison with the oracle that every kernel test uses.

Nothing here is lenient: out and lse are compared each by itself, and the bounds are those of a
correct kernel, not of a plausible one.
"""

import functools
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import flash_attention
from helpers.attention.problem import check_call
from helpers.attention.public import registry
from helpers.attention.reference import oracle, oracle_gradients

SHAPES = [(1, 1), (1, 7), (7, 1), (63, 65), (100, 130), (113, 203), (128, 128), (239, 1), (799, 3), (1023, 1024)]
HEAD_DIMS = [1, 24, 64, 80, 128, 256]
# Every shape meets every other head_dim; dtypes, groups and masks take turns. The first turn comes twice a
# round, so that a round has no factor in common with the number of head_dims.
DTYPES = ["float32", "bfloat16", "float16"]
GROUPS = [1, 2, 8]
TURNS = list(itertools.product(DTYPES, GROUPS, [False, True]))
PAIRS = [(SHAPES[i], H) for i in range(len(SHAPES)) for H in HEAD_DIMS[i % 2 :: 2]]
WINDOWS_AND_SCALES = [
    {"local_window_size": (5, 3)},
    {"local_window_size": 0},
    {"local_window_size": (40, 0)},
    {"local_window_size": (0, 50), "is_causal": True},
    {"local_window_size": (10, 10**12)},
    {"local_window_size": 17, "is_causal": True},
    {"scale": 0.5},
    {"scale": -1.0},
    {"scale": 0.0},
    {"scale": 1e-30},
]
FLOAT32_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 5e-6


def pretend_device(monkeypatch, platform, capability="", kind="some device"):
    """Let calls, whatever their arrays, be on a device, an NVIDIA GPU of a capability such as "9.0" for example."""
    device = SimpleNamespace(platform=platform, compute_capability=capability, device_kind=kind)
    monkeypatch.setattr(registry, "device_of", lambda _: device)


def in_tiers(parameters, is_quick):
    """Parameters of a test, of which those that are not quick are left to the full tier.

    is_quick: a function of a parameter, or of each part of one that is a tuple. Combinations are thinned out
    so that each value, and nearly every pair of values, stays in the quick tier.
    """
    found = []
    for parameter in parameters:
        parts = parameter if isinstance(parameter, tuple) else (parameter,)
        found.append(pytest.param(*parts, marks=() if is_quick(*parts) else pytest.mark.full))
    return found


@dataclass(frozen=True)
class AttentionCase:
    """Shapes, dtype and arguments of a call, and how its random inputs are drawn.

    logits: "plain", "large" (100 times), "low" (every logit far below zero), "one huge" or "last huge"
      (at the key in the middle or at the end), "rising" (larger from key to key), or "equal".
    value_size: values are this many times as large, and positive unless it is 1.
    common: a part that keys, and values, have in common, in standard deviations, or 0; common_to: "all" of them,
      "runs" of them (four, each with its own), or "drift" (from one common part to another).
    query_lengths, key_lengths: tuples of B integers, or None.
    """

    T: int
    S: int
    H: int = 16
    N: int = 2
    K: int = 1
    B: int = 1
    dtype: str = "float32"
    logits: str = "plain"
    query_lengths: tuple | None = None
    key_lengths: tuple | None = None
    arguments: dict = field(default_factory=dict)
    batched: bool = True
    seed: int = 0
    value_size: float = 1.0
    common: float = 0.0
    common_to: str = "all"

    def inputs(self):
        """(query, key, value) and the keyword arguments of the call."""
        random = np.random.default_rng([self.seed, self.T, self.S, self.H])
        query = random.standard_normal((self.B, self.T, self.N, self.H))
        key = random.standard_normal((self.B, self.S, self.K, self.H))
        value = random.standard_normal((self.B, self.S, self.K, self.H))
        match self.logits:
            case "large":
                query *= 100
            case "low":  # all of one sign, so that no logit comes near zero
                query, key = np.abs(query) + 1, -30 * (np.abs(key) + 1)
            case "one huge":
                key[:, self.S // 2] *= 300
            case "last huge":
                key[:, -1] *= 300
            case "rising":
                key *= np.linspace(0, 40, self.S)[:, None, None]
            case "equal":
                key[...] = 0
        if self.value_size != 1:
            value = self.value_size * np.abs(value)
        if self.common:
            key, value = (array + self.common * self._common_part(random) for array in (key, value))
        arrays = [array.astype(jnp.dtype(self.dtype)) for array in (query, key, value)]
        if not self.batched:
            arrays = [array[0] for array in arrays]
        arguments = dict(self.arguments)
        if self.query_lengths is not None:
            arguments["query_seq_lengths"] = np.array(self.query_lengths, np.int32)
        if self.key_lengths is not None:
            arguments["key_value_seq_lengths"] = np.array(self.key_lengths, np.int32)
        return arrays, arguments

    def _common_part(self, random):
        """What each key, or value, has of it: (B, S, K, H)."""
        parts = random.standard_normal((4, self.B, self.K, self.H))
        position = np.arange(self.S) / self.S
        if self.common_to == "drift":
            of_part = np.stack([1 - position, position, 0 * position, 0 * position], axis=1)
        else:
            of_part = np.eye(4)[(4 * position).astype(int) if self.common_to == "runs" else 0 * np.arange(self.S)]
        return np.einsum("sp,pbkh->bskh", of_part, parts)


GRID = [
    AttentionCase(*shape, H, N=group, dtype=dtype, arguments={"is_causal": is_causal})
    for (shape, H), (dtype, group, is_causal) in zip(PAIRS, itertools.cycle([*TURNS, TURNS[0]]))
]
OF_GROUPS = [
    AttentionCase(50, 70, 64, N=2 * group, K=2, B=2, dtype=dtype, arguments={"is_causal": is_causal})
    for dtype, group, is_causal in TURNS
]
OF_LOGITS = [
    AttentionCase(63, 203, 64, dtype=dtype, logits=logits)
    for dtype, logits in itertools.product(DTYPES, ["large", "low", "one huge"])
]
OF_WINDOWS = [
    AttentionCase(*(100, 60)[:: (-1) ** place], arguments=arguments)
    for place, arguments in enumerate(WINDOWS_AND_SCALES)
]


def relative_error(mine, right):
    """Frobenius norm of the difference over that of the right answer; NaN counts as infinite."""
    mine, right = np.asarray(mine, np.float64), np.asarray(right, np.float64)
    assert mine.shape == right.shape, f"shape {mine.shape}, expected {right.shape}"
    error, size = np.linalg.norm(mine - right), np.linalg.norm(right)
    if np.isnan(error):
        return np.inf
    return error / size if size else error


def largest_logit(case):
    """Magnitude of the largest logit, masked ones included."""
    (query, key, _), arguments = case.inputs()
    scale = arguments.get("scale") or 1 / np.sqrt(case.H)
    norms = [np.linalg.norm(np.asarray(array, np.float64), axis=-1).max() for array in (query, key)]
    return abs(scale) * norms[0] * norms[1]


def check_forward(attention, case):
    """Assert that attention(query, key, value, **arguments) -> (out, lse) is right for a case."""
    arrays, arguments = case.inputs()
    _check_forward(attention(*arrays, **arguments), case, lambda: naive_attention_of(*arrays, **arguments))


def _check_forward(results, case, naive):
    (query, key, value), arguments = case.inputs()
    right_out, right_lse = oracle(query, key, value, **arguments)
    out, lse = results
    assert out.dtype == query.dtype and lse.dtype == jnp.float32
    assert out.shape == right_out.shape and lse.shape == right_lse.shape

    # float32 rounds a logit by up to 2^-24 of its size, and exp turns that into a relative error.
    # And out is a mean of S values that cancel: it shrinks with the root of S, its rounding does not.
    float32_bound = FLOAT32_TOLERANCE * max(1.0, largest_logit(case) / 20) * max(1.0, (case.S / 4096) ** 0.5)
    empty = np.isneginf(right_lse)
    lse = np.asarray(lse, np.float64)
    assert np.array_equal(np.isneginf(lse), empty), "lse must be -inf exactly where a query sees no key"
    lse_error = relative_error(lse[~empty], right_lse[~empty])
    assert lse_error <= float32_bound, f"lse: relative error {lse_error:.1e} above {float32_bound:.1e}"

    assert not np.asarray(out, np.float64)[empty].any(), "out must be 0 where a query sees no key"
    out_error = relative_error(out, right_out)
    if query.dtype == np.float32:
        bound = float32_bound
    else:
        bound = 2 * relative_error(naive()[0], right_out) + float(jnp.finfo(query.dtype).eps) / 4
    assert out_error <= bound, f"out: relative error {out_error:.1e} above {bound:.1e}"


def cotangents(case):
    """Random gradients of out and lse: dout in the dtype of the case, dlse in float32."""
    random = np.random.default_rng([case.seed, 7])
    (query, _, _), _ = case.inputs()
    dout = random.standard_normal(query.shape).astype(query.dtype)
    return dout, random.standard_normal(query.shape[:-1]).astype(np.float32)


def results_of(attention, case):
    """(out, lse), (dq, dk, dv) of attention(query, key, value, **arguments) -> (out, lse), by `jax.vjp`."""
    arrays, arguments = case.inputs()
    return differentiated(attention, arguments)(arrays, cotangents(case))


def differentiated(attention, arguments):
    """The function of arrays and cotangents: one program, for nearly all of the time goes into compiling."""

    @jax.jit
    def run(arrays, cotangents):
        results, pull_back = jax.vjp(functools.partial(attention, **arguments), *arrays)
        return results, pull_back(cotangents)

    return run


def by_kernels(arguments, forward, backward):
    """Like `differentiated`: forward(call) -> (out, lse, *low), backward(call, out, lse, dout, dlse, *low)."""

    @jax.jit
    def run(arrays, cotangents):
        call, (dout, dlse) = check_call(*arrays, **arguments).prepared(), cotangents
        out, lse, *low = forward(call)
        return (out, lse.swapaxes(1, 2)), backward(call, out, lse, dout, dlse.swapaxes(1, 2), *low)

    return run


def gradients_of(attention, case):
    """(dq, dk, dv) of attention(query, key, value, **arguments) -> (out, lse)."""
    return results_of(attention, case)[1]


def naive_attention_of(query, key, value, **arguments):
    """(out, lse) of naive attention in the dtype of its arguments."""
    attention = functools.partial(flash_attention, implementation="reference", return_residual=True)
    return jax.jit(functools.partial(attention, **arguments))(query, key, value)


def cancellation(case):
    """How much larger than ds the terms are that cancel in it, where no query sees more than one key; else 1.

    There dp is delta, and ds is dlse alone: the roundings of dp and delta stay, and how they fall depends on the
    processor.
    """
    (_, _, value), arguments = case.inputs()
    if case.S > 1 and (case.T > 1 or not arguments.get("is_causal")):
        return 1.0
    dout, dlse = (np.asarray(array, np.float64) for array in cotangents(case))
    largest = np.abs(np.asarray(value, np.float64)[..., :1, :, :]).max(axis=-2, keepdims=True)
    return float(np.linalg.norm((np.abs(dout) * largest).sum(axis=-1)) / np.linalg.norm(dlse))


def check_gradients(gradients, case):
    """Assert that dq, dk and dv, each by itself, are right for a case.

    gradients: a function of the case, by which the tests try kernels that are not public.
    """
    _check_gradients(gradients(case), case, lambda: gradients_of(naive_attention_of, case), mends_delta=False)


def _check_gradients(mine, case, naive, mends_delta):
    """mends_delta: whether they correct a delta that was made from a rounded out. Without that, where the softmax is
    saturated, ds is a small difference of large numbers and shows the rounding."""
    arrays, arguments = case.inputs()
    right = oracle_gradients(*arrays, *cotangents(case), **arguments)
    bound = GRADIENT_TOLERANCE * max(1.0, largest_logit(case) / 20)
    bounds = [bound * max(1.0, cancellation(case) / 20)] * 2 + [bound]
    if case.dtype != "float32":
        rounding = float(jnp.finfo(case.dtype).eps) / (4 if mends_delta or case.logits == "plain" else 1)
        bounds = [2 * relative_error(n, r) + rounding for n, r in zip(naive(), right, strict=True)]
    for name, gradient, correct, bound in zip(("dq", "dk", "dv"), mine, right, bounds, strict=True):
        assert gradient.dtype == jnp.dtype(case.dtype), f"{name}: dtype {gradient.dtype}"
        error = relative_error(gradient, correct)
        assert error <= bound, f"{name}: relative error {error:.1e} above {bound:.1e}"


def check_results(results, case, *, mends_delta=True):
    """Assert that all five of ((out, lse), (dq, dk, dv)) are right for a case."""
    naive = functools.cache(lambda: results_of(naive_attention_of, case))
    _check_forward(results[0], case, lambda: naive()[0])
    _check_gradients(results[1], case, lambda: naive()[1], mends_delta)


def check_padding(attention, case):
    """Assert that what lies past the lengths of a batch is never used, not even multiplied by zero."""
    (arrays, arguments), gradients = case.inputs(), cotangents(case)
    run = differentiated(attention, arguments)
    clean = run(arrays, gradients)
    check_results(clean, case)
    query, key, value, dout, dlse = *arrays, *gradients
    for b in range(case.B):
        query[b, case.query_lengths[b] :] = dout[b, case.query_lengths[b] :] = dlse[b, case.query_lengths[b] :] = np.nan
        key[b, case.key_lengths[b] :], value[b, case.key_lengths[b] :] = np.nan, np.inf
    jax.tree.map(np.testing.assert_array_equal, run(arrays, gradients), clean)


def check_attention(attention, case, **options):
    """Assert that results and gradients of attention(query, key, value, **arguments) -> (out, lse) are right."""
    check_results(results_of(attention, case), case, **options)
