"""The public function: every illegal argument is refused in words, every legal one agrees with jax.nn."""

import functools
import re
import traceback
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import differentiated, pretend_device
from jax import lax
from jax.experimental import pallas as pl

from helpers import flash_attention
from helpers.attention import device
from helpers.attention.masking import key_tiles
from helpers.attention.portable import forward
from helpers.attention.problem import MAX_LENGTH, check_call
from helpers.attention.public import registry
from helpers.attention.reference import naive_attention

B, T, S, N, K, H = 2, 20, 24, 4, 2, 16


def arrays(dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H)]
    return dict(zip(("query", "key", "value"), (random.standard_normal(s).astype(dtype) for s in shapes), strict=True))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


IDS = zeros(2, 20, dtype=np.int32)
ILLEGAL = [
    # what is passed instead, the error, the words it must hold
    ({"query": zeros(B, T, N, H, dtype=np.float64)}, TypeError, "query must have dtype float32 or bfloat16 or float16, got float64"),
    ({"key": zeros(B, S, K, H, dtype=np.float16)}, TypeError, "must share one dtype, got query float32, key float16, value float32"),
    ({"query": zeros(T, H)}, ValueError, "query must have shape (batch, length, heads, head_dim) or"),
    ({"value": zeros(B, S + 1, K, H)}, ValueError, "value must have the shape of key, (2, 24, 2, 16), got (2, 25, 2, 16)"),
    ({"value": zeros(B, S, K, H + 1)}, ValueError, "value must have the shape of key, (2, 24, 2, 16), got (2, 24, 2, 17)"),
    ({"query": zeros(B, T, N, H + 1)}, ValueError, "key must have the head_dim of query, 17"),
    ({"query": zeros(B, T, 3, H)}, ValueError, "query heads must be a multiple of key/value heads, got 3 and 2"),
    ({"query": zeros(B, T, N, 257), "key": zeros(B, S, K, 257), "value": zeros(B, S, K, 257)}, ValueError, "head_dim must be at most 256, got 257"),
    ({"scale": float("nan")}, ValueError, "scale must be at most 2.36e+38 in size, got nan"),
    ({"scale": np.float16("inf")}, ValueError, "scale must be at most 2.36e+38 in size, got inf"),
    ({"local_window_size": -1}, ValueError, "local_window_size must not be negative, got -1"),
    ({"query_seq_lengths": np.array([1, 2], np.int16)}, TypeError, "query_seq_lengths must have dtype int32, got int16"),
    ({"key_value_seq_lengths": np.array([1], np.int32)}, ValueError, "key_value_seq_lengths must have shape (2,), got (1,)"),
    ({"key_value_seq_lengths": np.array([1, S + 1], np.int32)}, ValueError, "key_value_seq_lengths must lie between 0 and 24, got [1, 25]"),
    ({"implementation": "rocm"}, ValueError, "implementation must be None or one of reference, portable, mosaic, hopper, tpu, triton, cudnn, got 'rocm'"),
    ({"return_residual": 1}, TypeError, "return_residual must be True or False, got 1"),
    ({"keeps_low_bits": 1}, TypeError, "keeps_low_bits must be True or False, got 1"),
    ({"implementation": "hopper"}, NotImplementedError, 'use implementation="portable"'),
    ({"bias": zeros(20, 24, dtype=np.float64)}, TypeError, "bias must have dtype float32 or bfloat16 or float16, got float64"),
    ({"bias": zeros(3, 20, 24)}, ValueError, "bias must broadcast to (batch, heads, queries, keys), (2, 4, 20, 24), got shape (3, 20, 24)"),
    ({"query_segment_ids": IDS}, ValueError, "query_segment_ids and key_value_segment_ids go together, and key_value_segment_ids is None"),
    ({"query_segment_ids": IDS, "key_value_segment_ids": IDS}, ValueError, "key_value_segment_ids must have shape (2, 24), got (2, 20)"),
    ({"logits_soft_cap": 1e-31}, ValueError, "logits_soft_cap must be between 1e-30 and 200, got 1e-31"),
    ({"logits_soft_cap": 201}, ValueError, "logits_soft_cap must be between 1e-30 and 200, got 201"),
    ({"logits_soft_cap": 1e-9, "scale": 1e22}, ValueError, "scale / logits_soft_cap must be between 1e-30 and 1e30 in size, got 1e+22 / 1e-09"),
    ({"sinks": zeros(2)}, ValueError, "sinks must have shape (4,), one for each query head, got (2,)"),
    ({"causal_offset": 3}, ValueError, "causal_offset shifts is_causal and local_window_size, and 3 is given without either"),
    ({"causal_offset": True, "is_causal": True}, TypeError, "causal_offset must be an integer, got True"),
    ({"mask_mod": lambda b, n, i, j: i >= j if i > 0 else j > 0}, TypeError, "mask_mod must be a function of b, n, i, j that JAX can trace; it raises ValueError: The truth value"),
    ({"mask_mod": lambda b, n, i, j: lax.cond(n > 0, lambda: i >= j, lambda: i <= j)}, TypeError, "mask_mod must be a function of b, n, i, j that JAX can trace; it raises TypeError: Pred must be a scalar"),
    ({"score_mod": lambda s, b, n, i, j: s - s.max(axis=-1, keepdims=True), "implementation": "portable"}, NotImplementedError, 'portable cannot serve this call: its kernels know one tile at a time, beyond which reduce_max looks, in score_mod; use implementation="reference"'),
    ({"mask_mod": lambda b, n, i, j: i - j}, TypeError, "mask_mod must return bool of a shape that broadcasts to i against j; for (2, 1) and (1, 3) it gave int32 (2, 3)"),
    ({"mask_mod": lambda b, n, i, j: jnp.arange(24)[j] > i + jnp.asarray(IDS)[0, 0]}, TypeError, "mask_mod must not hold arrays, which a kernel could not reach: give them as mask or segment ids"),
    ({"score_mod": lambda s, b, n, i, j: s, "score_arrays": ((zeros(4), "n"),)}, TypeError, "score_mod must be a function of s, b, n, i, j and score_arrays that JAX can trace"),
    ({"block_mask": zeros(1, 1, 1, 1, dtype=np.int8)}, ValueError, "block_mask tells of mask and mask_mod, and both are None"),
    ({"mask": zeros(20, 24, dtype=bool), "block_mask": zeros(1, 1, 2, 1, dtype=np.int8)}, ValueError, "block_mask must have shape (batch or 1, heads or 1, *(1, 1)), got (1, 1, 2, 1)"),
    ({"score_mod": lambda s, b, n, i, j, slope: s + slope, "score_arrays": ((zeros(4), "j"),)}, ValueError, 'score_arrays[0] must have shape (24,) for the axes "j", got (4,)'),
    (arrays(np.float16) | {"sinks": zeros(4), "implementation": "cudnn"}, NotImplementedError, 'cudnn cannot serve this call: it takes no sinks; use implementation="portable"'),
    (arrays(np.float16) | {"mask": zeros(20, 24, dtype=bool), "implementation": "hopper"}, NotImplementedError, "hopper cannot serve this call: it takes no mask"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), ILLEGAL, ids=[f"{m[:50]}" for _, _, m in ILLEGAL])
def test_illegal_arguments_are_refused(wrong, error, message, monkeypatch):
    def no_kernel(*_, **__):
        raise AssertionError("a kernel ran before the arguments were checked")

    monkeypatch.setattr("jax.experimental.pallas.pallas_call", no_kernel)
    monkeypatch.setattr("helpers.attention.public.api.run", no_kernel)
    with pytest.raises(error, match=re.escape(message)):
        flash_attention(**{**arrays(), **wrong})


def test_illegal_arguments_are_refused_under_jit():
    for name, value in (("scale", 1.0), ("is_causal", True), ("local_window_size", 3)):
        with pytest.raises(TypeError, match=f"{name} must be known when the function is traced"):
            jax.jit(lambda value, name=name: flash_attention(**arrays(), **{name: value}))(value)


@pytest.mark.parametrize(("T", "S"), [(2**30, 8), (8, 2**30)])
def test_too_many_positions_are_refused(T, S):
    query, key = (jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float16) for length in (T, S))
    with pytest.raises(ValueError, match=rf"at most 2\*\*30 - 1 positions, got {T} and {S}"):
        jax.eval_shape(flash_attention, query, key, key)


def test_positions_stay_within_int32():
    """At the largest length with the largest window, where a kernel's numbers are those of a traced program."""
    problems = []
    note = lambda *arrays: problems.append(check_call(*arrays, local_window_size=2**40).problem)
    jax.eval_shape(note, *[jax.ShapeDtypeStruct((1, MAX_LENGTH, 1, 16), jnp.float16)] * 3)
    problem, last = problems[0], jnp.int32(MAX_LENGTH - 63)
    tiles = key_tiles(last, last + 64, 64, problem.band, problem.T, problem.S, xp=jnp)
    assert tuple(map(int, tiles)) == (0, 2**24)


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_a_second_call_compiles_nothing(implementation, monkeypatch):
    attention = functools.partial(flash_attention, implementation=implementation)
    attention(**arrays())
    compiled = []
    monkeypatch.setattr("jax._src.compiler.compile_or_get_cached", lambda *a, **k: compiled.append(a))
    attention(**arrays())
    assert compiled == []


def test_a_plain_call_takes_few_steps_to_its_kernel(monkeypatch):
    """A query on one device, forward alone: what stands between a reader and the kernel."""
    call, ours = pl.pallas_call, []

    def pallas_call(*arguments, **options):
        frames = traceback.walk_stack(None)
        ours.extend(frame.f_code.co_name for frame, _ in frames if "/helpers/" in frame.f_code.co_filename)
        return call(*arguments, **options)

    monkeypatch.setattr(pl, "pallas_call", pallas_call)
    flash_attention(**{name: array[:, :19] for name, array in arrays().items()}, implementation="portable")
    assert "flash_attention" in ours and len(ours) <= 8, ours


@pytest.mark.parametrize("block", [0, 24, -16, 16.0])
def test_illegal_block_sizes_are_refused(block):
    with pytest.raises(ValueError, match=f"block_q must be a power of two of at least 16, got {block}"):
        forward.forward(check_call(**arrays()), block_q=block, interpret=True)


HALF, GPU = np.float16, ("gpu", "9.0")
REFUSED = [
    # the device, the implementation, dtype and arguments of the call, the reason
    (("cpu",), "cudnn", HALF, {}, 'it needs an NVIDIA GPU.*"portable"'),
    (("gpu", "7.5"), "portable", np.float32, {}, r'capability 8\.0.*this is some device; use implementation="reference"'),
    (("gpu", "10.0"), "hopper", HALF, {}, r"capability 9\.0 \(Hopper\) or a CPU, this is some device"),
    (GPU, "cudnn", np.float32, {}, "it takes no float32"),
    (GPU, "cudnn", HALF, {"return_residual": True}, "rounds its lse"),
    (GPU, "cudnn", HALF, {"scale": -0.3}, "a positive scale only"),
    (GPU, "cudnn", HALF, {"query": zeros(B, 30, N, H, dtype=HALF), "local_window_size": (3, 0)}, "no more queries than keys"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "implementation", "dtype", "arguments", "reason"), REFUSED)
def test_what_a_device_cannot_serve_is_refused(device, implementation, dtype, arguments, reason, monkeypatch):
    pretend_device(monkeypatch, *device)
    with pytest.raises(NotImplementedError, match=f"{implementation} cannot serve this call.*{reason}"):
        flash_attention(**{**arrays(dtype), **arguments}, implementation=implementation)


@pytest.mark.parametrize(
    ("scale", "arguments", "window", "is_causal"),  # each scale is traced here alone: what it computes is nothing
    [
        (0.123, {"local_window_size": (3, 0)}, (3, 0), True),
        (0.124, {"local_window_size": (3, 9), "is_causal": True}, (3, 0), True),
        (0.126, {"is_causal": True}, None, True),
        (0.127, {}, None, False),
    ],
)
def test_cudnn_gets_the_mask_of_the_call(scale, arguments, window, is_causal, monkeypatch):
    """It takes a window with an edge to the left only, and only causal."""
    got = {}

    def cudnn(query, *_, **arguments):
        got.update(arguments)
        return query

    pretend_device(monkeypatch, *GPU)
    monkeypatch.setattr("jax.nn.dot_product_attention", cudnn)
    flash_attention(**arrays(np.float16), implementation="cudnn", scale=scale, **arguments)
    assert got["local_window_size"] == window and got["is_causal"] is is_causal
    assert got["scale"] == scale and got["implementation"] == "cudnn"


@pytest.mark.parametrize(
    ("device", "dtype", "arguments", "expected"),
    [
        (("cpu",), "bfloat16", {}, "reference"),
        (("rocm", "9.4"), "bfloat16", {}, "reference"),
        (("gpu", "gfx942"), "bfloat16", {}, "reference"),  # of AMD, too
        (("gpu", "7.5"), "bfloat16", {}, "reference"),
        (("gpu", "8.6"), "bfloat16", {}, "portable"),
        (("tpu",), "float32", {}, "tpu"),
        (GPU, "bfloat16", {"is_causal": True}, "hopper"),
        (GPU, "float32", {}, "portable"),
        (GPU, "float16", {"local_window_size": 3}, "hopper"),
        (GPU, "float16", {"query_seq_lengths": np.array([3, 5], np.int32)}, "hopper"),
        (GPU, "float16", {"mask_mod": lambda b, n, i, j: j <= i}, "portable"),
    ],
)
def test_the_default_implementation_follows_the_device_and_the_call(device, dtype, arguments, expected, monkeypatch):
    pretend_device(monkeypatch, *device)
    chosen = registry.choose(None, check_call(**arrays(dtype), **arguments))
    kernels = naive_attention if expected == "reference" else registry.kernels_by_platform(expected, interpreted=False)
    assert chosen == kernels


def test_the_default_follows_the_arrays_and_not_the_machine(monkeypatch):
    """On a machine with a GPU, arrays on the CPU are computed there."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    monkeypatch.setattr("helpers.attention.device.default_device", lambda: gpu)
    cpu = jax.devices("cpu")[0]
    array = jax.device_put(jnp.zeros((1, 8, 1, 16), jnp.bfloat16), cpu)
    assert device.device_of(array) == cpu and device.compute_capability(device.device_of(array)) == (0, 0)
    assert device.device_of(np.zeros(3)) == gpu and device.compute_capability() == (9, 0)
    assert registry.choose(None, check_call(array, array, array)) is naive_attention
    traced = []
    jax.make_jaxpr(lambda x: traced.append(device.device_of(x)) or x)(array)
    assert traced == [gpu]


LENGTHS = {
    "query_seq_lengths": [None, np.array([20, 7], np.int32)],
    "key_value_seq_lengths": [None, np.array([5, 24], np.int32)],
}
MASKS = [{}, {"is_causal": True}, {"local_window_size": 6}, {"local_window_size": (3, 9), "is_causal": True}]
normal = np.random.default_rng(0).standard_normal
MASKS += [  # some of which broadcast
    {"bias": normal(bias, np.float32), "mask": normal(mask) < 0.5} | more
    for bias, mask, more in (
        ((B, 1, 1, S), (B, 1, 1, S), {}),
        ((1, N, T, S), (B, 1, T, S), {"is_causal": True}),
        ((1, 1, T, S), (1, N, T, S), {}),
    )
]


@pytest.mark.parametrize(("mask", "scale"), [*zip(MASKS, [None, 0.3] * 4, strict=False), (None, None)])
def test_agreement_with_jax_nn(mask, scale):
    """Every argument that both functions take means the same; rows that see no key are ours alone."""
    named, lengths = arrays(), [dict(zip(LENGTHS, each, strict=True)) for each in zip(*LENGTHS.values(), strict=True)]
    if mask is None:  # without a batch axis
        mask, named, lengths = MASKS[1], {name: array[0] for name, array in named.items()}, [{}]
    for of_call in lengths:
        arguments = {**mask, **of_call, "scale": scale, "return_residual": True}
        results = flash_attention(**named, **arguments, implementation="reference")
        sees = np.isfinite(np.asarray(results[1]))
        for mine, theirs in zip(results, jax.nn.dot_product_attention(**named, **arguments), strict=True):
            assert mine.shape == theirs.shape
            np.testing.assert_allclose(np.asarray(mine)[sees], np.asarray(theirs)[sees], rtol=1e-4, atol=1e-5)


BLIND = {
    # name: T, S, the arguments of a call of batch 2 or 1, and which of its queries see a key
    "lengths of the queries": (2, 1, {"query_seq_lengths": np.array([1, 2], np.int32)}, [[1, 0], [1, 1]]),
    "lengths of the keys": (2, 1, {"key_value_seq_lengths": np.array([1, 0], np.int32)}, [[1, 1], [0, 0]]),
    "a window": (18, 17, {"local_window_size": 0}, [[1] * 17 + [0]]),
    "both": (3, 3, {"local_window_size": (0, 1), "key_value_seq_lengths": np.array([3, 2], np.int32)}, [[1, 1, 1], [1, 1, 0]]),
}  # fmt: skip


def blind_and_right(name, dtype, with_lse=True, **arguments):
    """Results and gradients where queries that see no key hold NaN or inf and get such gradients, and where 0."""
    T, S, own, sees = BLIND[name]
    sees, random = np.array(sees, bool), np.random.default_rng(0)
    shapes = [(len(sees), length, 1, 8) for length in (T, S, S, T)]
    query, key, value, dout = (random.standard_normal(shape).astype(dtype) for shape in shapes)
    dlse = random.standard_normal((len(sees), T, 1)).astype(np.float32)

    run = differentiated(flash_attention, {"return_residual": with_lse, **own, **arguments})

    def everything(filler):
        where = lambda array: sees.reshape(*sees.shape, *[1] * (array.ndim - 2))
        fill = lambda array: np.where(where(array), array, array.dtype.type(filler))
        return run((fill(query), key, value), (fill(dout), fill(dlse)) if with_lse else fill(dout))

    return [everything(np.nan), everything(np.inf)], everything(0)


def test_one_array_of_segment_ids_leaves_no_query_without_a_key():
    """Nothing has to be cleared then: query and dout are not written once more."""
    ids = np.array([[0, 0, 1, 1]], np.int32)

    def may_have_blind_rows(key_ids, **others):
        arrays = np.zeros((3, 1, 4, 1, 8), np.float32)
        call = check_call(*arrays, query_segment_ids=ids, key_value_segment_ids=key_ids, **others)
        return call.may_have_blind_rows

    assert not may_have_blind_rows(ids) and not may_have_blind_rows(ids, is_causal=True, local_window_size=1)
    assert may_have_blind_rows(ids.copy())
    hiding = {"mask": np.zeros((4, 4), bool)}, {"mask_mod": lambda b, n, i, j: j < i}, {"causal_offset": -1}
    for others in (*hiding, {"key_value_seq_lengths": np.array([2], np.int32)}):
        assert may_have_blind_rows(ids, is_causal=True, **others)


EACH_WAY = [("both", "reference"), ("both", "portable"), ("both", "tpu"), ("lengths of the keys", "portable")]


@pytest.mark.parametrize(("name", "implementation"), [*EACH_WAY, ("a window", "portable")])
def test_a_query_that_sees_no_key_passes_nothing(name, implementation):
    blind, right = blind_and_right(name, np.float32, implementation=implementation)
    assert all(np.isfinite(gradient).all() for gradient in right[1])
    for results in blind:
        jax.tree.map(np.testing.assert_array_equal, results, right)


@pytest.mark.parametrize("name", ["lengths of the queries", "lengths of the keys"])
def test_cudnn_is_kept_from_queries_that_see_no_key(name, monkeypatch):
    theirs = jax.nn.dot_product_attention
    in_xla = lambda *arrays, **arguments: theirs(*arrays, **arguments | {"implementation": "xla"})
    monkeypatch.setattr("helpers.attention.public.registry.compute_capability", lambda *_: (9, 0))
    monkeypatch.setattr("jax.nn.dot_product_attention", in_xla)
    blind, right = blind_and_right(name, jnp.bfloat16, False, implementation="cudnn")
    for results in blind:
        jax.tree.map(np.testing.assert_array_equal, results, right)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(right))
