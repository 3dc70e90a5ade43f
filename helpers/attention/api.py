"""The public function: check the call, choose an implementation, return what was asked for."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas.fuser  # the interpreter would import it with the first kernel, and that compile again
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from helpers.attention import sharding, tpu
from helpers.attention.device import by_platform, compute_capability, device_of
from helpers.attention.hopper import backward as hopper_backward
from helpers.attention.hopper import forward as hopper_forward
from helpers.attention.hopper import serve as hopper
from helpers.attention.low_bits import with_low_bits
from helpers.attention.portable import backward as portable_backward
from helpers.attention.portable import decode as portable_decode
from helpers.attention.portable import forward as portable_forward
from helpers.attention.problem import FEW_QUERIES, Call, check_call
from helpers.attention.reference import naive_attention, naive_gradients, naive_gradients_of_part, what_counts
from helpers.attention.reverse_mode import reverse_mode_only

# Their names for `jax.checkpoint`; the last is there for 16-bit types in hopper, tpu and rings.
RESIDUALS = ("flash_attention_out", "flash_attention_lse", "flash_attention_low_bits")
IMPLEMENTATIONS = ("reference", "portable", "hopper", "tpu", "cudnn")


def flash_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    return_residual=False,
):
    """Exact attention, softmax(scale query key^T) value; called like `jax.nn.dot_product_attention`.

    Args:
      query: (B, T, N, H) or (T, N, H); float32, bfloat16 or float16. H is at most 256.
      key, value: (B, S, K, H) or (S, K, H), same dtype. N is a multiple of K: each key/value head
        serves N // K query heads (MHA, GQA, MQA).
      bias, mask: None. They are here for callers of `jax.nn.dot_product_attention`; masks are given by
        the arguments below.
      scale: a Python number; None means 1 / sqrt(H).
      is_causal: query i sees keys j <= i, counted from the start of both.
      query_seq_lengths, key_value_seq_lengths: int32 (B,); positions from there on are padding and may hold anything.
        Under jit their values cannot be checked; there, more than the length means all of it.
      local_window_size: (left, right), or one integer for both: query i sees keys i - left <= j <= i + right.
      implementation: "reference" (naive, the whole matrix in memory), "portable" (the Pallas kernels: compiled on an
        NVIDIA GPU from Ampere on, interpreted on a CPU), "hopper" (kernels for NVIDIA's Hopper cards, 16-bit inputs
        without lengths or windows; a CPU of 16 cores or with PJRT_NPROC=16 interprets them, for one device), "tpu"
        (kernels for Google's TPUs, which have been compiled for v5e and v6e and run nowhere but in the interpreter; a
        CPU interprets them, for one device), "cudnn" (handed to `jax.nn`, where it can serve the call), or None:
        hopper on such a card for what it serves, otherwise portable on an NVIDIA GPU from Ampere on, tpu on a TPU,
        reference elsewhere. Some things are better in portable than in hopper. Its dq is the same in each run, to the
        last bit. Its forward pass takes as long for all inputs, hopper's takes longer where scores are far above those
        of the first keys. And bfloat16 values below 1e-20 keep all of their digits.
      return_residual: also return the log-sum-exp of the scaled logits.

    Returns:
      out, with the shape and dtype of query; with return_residual, (out, lse), where lse is a
      natural logarithm, float32, of shape (B, T, N) or (T, N). Sums are float32 whatever the
      dtype, so logits and `S * max|value|` must stay within the range of float32. A query that sees
      no key gets out = 0 and lse = -inf (at which `jax.debug_infs` stops where lse is asked for).

    Raises:
      TypeError, ValueError: an argument is not as described; the message names it.
      NotImplementedError: the chosen implementation cannot serve this call, or has no such derivative; it says why.

    Up to 16 queries, as when text is generated, portable and hopper share one forward pass: the keys are split over
    programs, which write 4 (H + 1) bytes for each part of the keys, query and head, to be merged (`portable.decode`).

    Gradients flow into query, key and value from out and from lse, and a query that sees no key passes none. The
    kernels have reverse-mode first derivatives; the reference has all. The algorithm is FlashAttention-2, arXiv
    2307.08691. Where keys and values have a part in common, dq of cudnn in 16 bits is off
    by much more than itself. Here it is as exact as naive attention's, within a factor of two (of six in float16 after
    4096 keys with a mean of 30 standard deviations). For that the forward pass of hopper and tpu, where it is
    differentiated, keeps 2 B T N H bytes more, the low bits of out. In `jax.checkpoint` the residuals can be saved by
    name, so that this pass runs once (the reference has no such names):
    `policy=jax.checkpoint_policies.save_only_these_names(*helpers.attention.api.RESIDUALS)`.

    Precision: on a GPU the factors of float32 products are rounded to TF32, 11 significant bits, as everywhere in JAX,
    unless `jax.default_matmul_precision("highest")` is set around the call or the jit that traces it. With TF32, dq
    and dk of a row that sees one key only are not quite the zero that they should be: what is left is the rounding of
    dout value^T. The kernels multiply logits by log2 e before the largest is subtracted, which rounds float32 logits
    once more: beside the error of the logits themselves, out has a relative error of up to 5e-8 times the largest
    logit (4e-5 near 2000), and dq, where the keys of a row have much in common, one of up to 5e-5 times it.

    Many devices: under jit a call is split over the batch and the heads as its arrays are, and no array is gathered
    for that; where there are fewer key heads than devices to split them, every device needs all of its batch's.
    Sequences are gathered; `ring_attention` leaves them split. On a mesh with explicit axes the result is split as
    query is, and in `jax.shard_map` each device attends to its own part. (The reference's split is XLA's choice.)

    Platforms: which kernels run is settled when a program is compiled, so one trace serves a CPU and a GPU. For
    `jax.export` say disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name)], name "__gpu$xla.gpu.triton"
    for portable and "mosaic_gpu_v2" for hopper, since JAX does not promise that later versions run them. From a
    machine without a GPU, name the implementation: None is the reference there. Of these, hopper can be exported for
    "cuda" alone; and what is split under jit cannot be exported, unlike a `jax.shard_map`. Where B, T or S are
    symbols, None is the reference too, which alone serves them.
    """
    call = check_call(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    if not isinstance(return_residual, bool):
        raise TypeError(f"return_residual must be True or False, got {return_residual!r}")
    attend = _choose(implementation, call, return_residual)
    with settings():
        out, lse = _compiled(attend, call.problem, return_residual, *call.arrays)
    if query.ndim == 3:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_residual else out


def _choose(implementation, call, return_residual):
    """The function that serves this call: it takes the call and returns out and lse (B, N, T)."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if call.problem.is_symbolic and implementation not in (None, "reference"):
        raise NotImplementedError(f'{implementation} serves no symbolic shapes; use implementation="reference"')
    device = device_of(call.query)
    if implementation is None:
        if call.problem.is_symbolic:
            return naive_attention
        if device.platform == "tpu":
            return TPU_OR_REFERENCE
        capability = compute_capability(device_of(call.query))
        if capability == (9, 0) and hopper.why_not(call) is None:
            return HOPPER_OR_REFERENCE
        return PORTABLE_OR_REFERENCE if capability >= (8, 0) else naive_attention
    check = {"portable": _check_portable, "hopper": _check_hopper, "tpu": _check_tpu, "cudnn": _check_cudnn}.get(
        implementation
    )
    if check and (reason := check(call, return_residual)):
        raise NotImplementedError(reason)
    if implementation in INTERPRETED:
        alone = device.platform == "cpu" and jax.typeof(call.query).sharding.mesh.empty
        if not alone:
            return OR_REFERENCE[implementation]
        too_few_threads = implementation == "hopper" and _check_threads()
        return _refusing("cpu", too_few_threads) if too_few_threads else INTERPRETED[implementation]
    return {"reference": naive_attention, "portable": PORTABLE, "cudnn": _cudnn}[implementation]


def kernels_of(implementation, call):
    """The `KernelsOf` that serve a call, for those who call single passes, as `ring` does."""
    chosen = _choose(implementation, call, return_residual=True)
    return REFERENCE_EVERYWHERE if chosen is naive_attention else chosen


@contextlib.contextmanager
def settings():
    """JAX's settings in which kernels are traced and run, whatever the caller's."""
    with jax.enable_x64(False), jax.disable_jit(False):
        yield


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that a second call compiles nothing
def _compiled(attend, problem, return_residual, *arrays):
    """out, and lse (B, T, N) or None."""

    def of_arrays(problem, *arrays):
        return attend(Call(problem, *arrays))

    out, lse = sharding.over_explicit_axes(of_arrays, problem, sharding.vary_alike(arrays))
    return out, jnp.swapaxes(lse, 1, 2) if return_residual else None


class Kernels(NamedTuple):
    """forward(call) -> (out, lse) and backward(call, out, lse, dout, dlse, low) -> (dq, dk, dv), on one device.

    forward_with_low_bits(call) -> (out, lse, low) is for a call that will be differentiated, see `low_bits`; None
    where backward needs no more than out. The others are for a call that has some of the keys only, while others
    travel: they leave room for a transfer that occupies a part of a GPU. exact_forward_of_part has out in float32 with
    all of its bits, and for backward_of_part out, lse and low are those of all keys.
    """

    forward: Callable
    backward: Callable
    forward_with_low_bits: Callable | None
    forward_of_part: Callable
    exact_forward_of_part: Callable
    backward_of_part: Callable


@dataclass(frozen=True)
class KernelsOf:
    """Attention by the kernels for the platform that a program is compiled for, as a function of a call.

    Decided so late, one trace serves them all. platforms: pairs of a platform, or "default", and its Kernels, or the
    words with which it is refused.
    splits: whether XLA may split a call over devices.
    """

    platforms: tuple
    splits: bool = True

    def keeps_low_bits(self, problem):
        """Whether the backward pass of a problem wants the low bits of out."""
        served = [kernels for _, kernels in self.platforms if isinstance(kernels, Kernels)]
        return problem.dtype.itemsize == 2 and all(kernels.forward_with_low_bits for kernels in served)

    def __call__(self, call):
        query, key, value = map(reverse_mode_only, call.arrays[:3])
        return _attention(self, call.problem, query, key, value, call.query_lengths, call.key_lengths)

    def run(self, which, problem, *arrays):
        """The pass which, a field of `Kernels`, of (query, key, value, both lengths, *residuals)."""
        precision = jax.config.jax_default_matmul_precision

        def one_device(problem, *arrays):
            def on(kernels):
                if isinstance(kernels, str):
                    return kernels
                one_pass = getattr(kernels, which)
                return lambda *arrays: tuple(one_pass(Call(problem, *arrays[:5]), *arrays[5:]))

            # Perhaps traced anew when XLA splits a call, long after the caller's settings are gone.
            with settings(), jax.default_matmul_precision(precision):
                return by_platform(*arrays, **{name: on(kernels) for name, kernels in self.platforms})

        letters = {
            "forward_with_low_bits": sharding.FORWARD_WITH_LOW_BITS,
            "backward": sharding.BACKWARD,
            "backward_of_part": sharding.BACKWARD,
        }.get(which, sharding.FORWARD)
        return sharding.one_device_at_a_time(one_device, *letters, self.splits)(problem, *arrays)


def _forward(many_queries, interpret):
    """The forward pass by many_queries(call, interpret=…), and that of few queries by kernels of its own."""

    def forward(call):
        if call.problem.T <= FEW_QUERIES:
            return portable_decode.decode(call, interpret=bool(interpret))
        return many_queries(call, interpret=interpret)

    return forward


def _exact(forward):
    """A forward pass with out in float32, from one that keeps its low bits."""

    def exact_forward(call):
        out, lse, low = forward(call)
        return with_low_bits(out, low), lse

    return exact_forward


def _portable(interpret):
    forward = _forward(portable_forward.forward, interpret)

    def exact_forward_of_part(call):
        exact = functools.partial(portable_forward.forward, dtype=jnp.float32, interpret=interpret)
        out, lse = exact(call)
        # The weights of the product are rounded, and add up to what they make of ones.
        sums, _ = exact(dataclasses.replace(call, value=jnp.ones_like(call.value)))
        return out / jnp.where(sums == 0, 1, sums), lse

    def backward(call, out, lse, dout, dlse, low, mends_delta=True):
        out = out if low is None else with_low_bits(out, low)
        return portable_backward.backward(call, out, lse, dout, dlse, mends_delta=mends_delta, interpret=interpret)

    of_part = functools.partial(backward, mends_delta=False)
    return Kernels(forward, backward, None, forward, exact_forward_of_part, of_part)


def _hopper(interpret):
    forward = _forward(hopper_forward.forward, interpret)
    of_part = _forward(functools.partial(hopper_forward.forward, is_persistent=False), interpret)
    keeping = functools.partial(hopper_forward.forward, keeps_low_bits=True, interpret=interpret)
    exact_of_part = _exact(functools.partial(keeping, is_persistent=False))
    backward = functools.partial(hopper_backward.backward, interpret=interpret)
    return Kernels(forward, backward, keeping, of_part, exact_of_part, backward)


def _tpu(interpret):
    forward = functools.partial(tpu.forward, interpret=interpret)
    keeping = functools.partial(forward, keeps_low_bits=True)
    backward = functools.partial(tpu.backward, interpret=interpret)
    return Kernels(forward, backward, keeping, forward, _exact(keeping), backward)


def _reference():
    def keeping(call):
        return *naive_attention(call), jnp.zeros(call.query.shape, jnp.int16)  # backward computes out again

    def backward(call, out, lse, dout, dlse, low):
        return naive_gradients(call, out, lse, dout, dlse)

    def exact_forward_of_part(call):
        query, key, value = (array.astype(jnp.float32) for array in call.arrays[:3])
        problem = dataclasses.replace(call.problem, dtype=jnp.dtype(jnp.float32))
        return naive_attention(dataclasses.replace(call, problem=problem, query=query, key=key, value=value))

    def backward_of_part(call, out, lse, dout, dlse, low):
        return naive_gradients_of_part(call, with_low_bits(out, low), lse, dout, dlse)

    return Kernels(naive_attention, backward, keeping, naive_attention, exact_forward_of_part, backward_of_part)


REFERENCE = _reference()
PORTABLE = KernelsOf((("cpu", _portable(True)), ("cuda", _portable(False))))
PORTABLE_OR_REFERENCE = KernelsOf((("cuda", _portable(False)), ("default", REFERENCE)))
REFERENCE_EVERYWHERE = KernelsOf((("default", REFERENCE),))
HOPPER_OR_REFERENCE = KernelsOf((("cuda", _hopper(False)), ("default", REFERENCE)))
TPU_OR_REFERENCE = KernelsOf((("tpu", _tpu(False)), ("default", REFERENCE)))
OR_REFERENCE = {"hopper": HOPPER_OR_REFERENCE, "tpu": TPU_OR_REFERENCE}
# Mosaic's interpreters have side effects, which JAX would not let into `checkpoint` even where they are not used, and
# they know one device only. So they are chosen when tracing: on a CPU these kernels cannot be checkpointed, nor split
# by XLA.
INTERPRETED = {
    "hopper": KernelsOf((("cpu", _hopper(plgpu.InterpretGPUParams())), ("cuda", _hopper(False))), splits=False),
    "tpu": KernelsOf((("cpu", _tpu(pltpu.InterpretParams())), ("tpu", _tpu(False))), splits=False),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(kernels, problem, *arrays):
    return kernels.run("forward", problem, *arrays)


def _attention_forward(kernels, problem, *arrays):
    keeps_low_bits = kernels.keeps_low_bits(problem)
    attention = _keeping_low_bits if keeps_low_bits else _attention
    results = attention(kernels, problem, *arrays)
    out, lse, *low = map(checkpoint_name, results, RESIDUALS)
    return (out, lse), (*arrays, out, lse, *(low or [None]))


def _attention_backward(kernels, problem, residuals, gradients):
    *residuals, low = residuals
    call, lse = Call(problem, *residuals[:5]), residuals[6]
    query, *gradients = call.of_seeing_rows(lse, call.query, *gradients)
    arrays = query, *residuals[1:], *gradients, low
    # Lengths are integers and have no gradient.
    return *_gradients(kernels, problem, *arrays), None, None


_attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _keeping_low_bits(kernels, problem, *arrays):
    return kernels.run("forward_with_low_bits", problem, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(kernels, problem, *arrays):
    return kernels.run("backward", problem, *arrays)


def _no_second_derivative(*_):
    raise NotImplementedError(
        'the kernels have a first derivative only; use implementation="reference" for second derivatives'
    )


for function in (_keeping_low_bits, _gradients):
    function.defvjp(_no_second_derivative, _no_second_derivative)


def _check_portable(call, _):
    """Why the portable kernels cannot serve a call here, or None where they can."""
    device = device_of(call.query)
    if device.platform != "cpu" and compute_capability(device) < (8, 0):
        return (
            "the portable kernel needs a CPU or an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, this is "
            f'{device.device_kind}; use implementation="reference"'
        )
    return None


def _check_tpu(call, _):
    """Why the kernels for a TPU cannot serve a call here, or None where they can."""
    device = device_of(call.query)
    if device.platform not in ("tpu", "cpu"):
        return f'the tpu kernel needs a TPU or a CPU, this is {device.device_kind}; use implementation="portable"'
    return None


def _check_hopper(call, _):
    """Why the Hopper kernels cannot serve a call here, or None where they can."""
    device = device_of(call.query)
    reason = hopper.why_not(call)
    if device.platform != "cpu" and compute_capability(device) != (9, 0):
        reason = f"it needs an NVIDIA GPU of compute capability 9.0 (Hopper) or a CPU, this is {device.device_kind}"
    if reason:
        return f'the hopper kernel cannot serve this call: {reason}; use implementation="portable"'
    # A traced call may be on its way to a GPU: that is known when its program is lowered.
    return _check_threads() if device.platform == "cpu" and not isinstance(call.query, jax.core.Tracer) else None


def _check_threads():
    """Why this CPU cannot interpret the Hopper kernels, or None where it can."""
    reason = hopper.why_not_here()
    return reason and f'the hopper kernel cannot serve this call: {reason}; use implementation="portable"'


def _refusing(platform, words):
    """Hopper's kernels for a GPU, and words for those who compile them for another platform."""
    return KernelsOf(((platform, words), ("cuda", dict(INTERPRETED["hopper"].platforms)["cuda"])), splits=False)


def _check_cudnn(call, return_residual):
    """Why cuDNN cannot keep the contract of `flash_attention`, or None where it can."""
    problem = call.problem
    right = problem.band.right
    reason = None
    if compute_capability(device_of(call.query)) < (8, 0):
        reason = "it needs an NVIDIA GPU of compute capability 8.0 or newer"
    elif problem.dtype == jnp.float32:
        reason = "it takes bfloat16 and float16 only"
    elif problem.H % 8 or problem.H > 128:
        reason = f"it takes head_dim up to 128 in multiples of 8, and this is {problem.H}"
    elif (right is not None and right != 0) or (problem.band.left is not None and right is None):
        reason = "it takes a local window only with nothing to the right"
    elif problem.band.left is not None and problem.T > problem.S:
        reason = f"with a local window it takes no more queries than keys, not {problem.T} and {problem.S}"
    elif problem.scale <= 0:
        reason = f"it takes a positive scale only, and this is {problem.scale}"
    elif return_residual:
        reason = "jax.nn rounds its lse to the dtype of key and stops its gradient"
    return reason and f'cudnn cannot serve this call: {reason}; use implementation="portable"'


def _cudnn(call):
    band = call.problem.band
    arrays = query, key, value = call.arrays[:3]
    is_query, is_key, _ = what_counts(call)
    if call.may_have_blind_rows:
        arrays = jnp.where(is_query, query, 0), jnp.where(is_key, key, 0), jnp.where(is_key, value, 0)
    out = jax.nn.dot_product_attention(
        *map(reverse_mode_only, arrays),
        scale=call.problem.scale,
        is_causal=band.right == 0,
        query_seq_lengths=call.query_lengths,
        key_value_seq_lengths=call.key_lengths,
        local_window_size=None if band.left is None else (band.left, 0),
        implementation="cudnn",
    )
    return jnp.where(is_query, out, 0) if call.may_have_blind_rows else out, None
