"""The portable forward kernel against the float64 oracle, wherever the tests run: CPU or GPU."""

import functools
import itertools

import jax
import numpy as np
import pytest
from attention_cases import HEAD_DIMS, SHAPES, AttentionCase, check_forward, in_tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import flash_attention
from helpers.attention.portable import forward as portable
from helpers.attention.problem import check_call
from helpers.attention.reference import oracle_gradients

portable_attention = functools.partial(flash_attention, implementation="portable", return_residual=True)
GROUPS = [1, 2, 8]
DTYPES = ["float32", "bfloat16", "float16"]


def with_blocks(block_q, block_k):
    """The kernel at given block sizes, called like `flash_attention`."""

    def attention(query, key, value, **arguments):
        call = check_call(query, key, value, **arguments)
        out, lse = portable.forward(call, block_q=block_q, block_k=block_k, interpret=jax.default_backend() == "cpu")
        lse = lse.swapaxes(1, 2)
        return (out, lse) if query.ndim == 4 else (out[0], lse[0])

    return attention


# Every shape meets every head_dim; dtypes, groups and masks take turns. The first turn comes twice a
# round, so that a round has no factor in common with the number of head_dims.
TURNS = list(itertools.product(DTYPES, GROUPS, [False, True]))
GRID = list(zip(itertools.product(SHAPES, HEAD_DIMS), itertools.cycle([*TURNS, TURNS[0]])))


def on_the_diagonal(shape_and_head_dim, turn):
    """Each shape once, and each head_dim."""
    shape, head_dim = shape_and_head_dim
    return SHAPES.index(shape) % len(HEAD_DIMS) == HEAD_DIMS.index(head_dim)


def each_pair(dtype, group, is_causal):
    """Of dtype and mask, of group and mask."""
    return (DTYPES.index(dtype) + is_causal) % 3 == GROUPS.index(group)


def low_or_one_each(dtype, logits):
    """Low logits in every dtype: there a sum of small exponentials shows how it is rounded."""
    return logits == "low" or (dtype, logits) in (("bfloat16", "large"), ("float16", "one huge"))


@pytest.mark.parametrize(("shape_and_head_dim", "turn"), in_tiers(GRID, on_the_diagonal))
def test_shapes_and_head_dims(shape_and_head_dim, turn):
    ((T, S), H), (dtype, group, is_causal) = shape_and_head_dim, turn
    check_forward(portable_attention, AttentionCase(T, S, H, N=group, dtype=dtype, arguments={"is_causal": is_causal}))


@pytest.mark.parametrize(("dtype", "group", "is_causal"), in_tiers(TURNS, each_pair))
def test_groups_and_dtypes(dtype, group, is_causal):
    case = AttentionCase(100, 130, 64, N=2 * group, K=2, B=2, dtype=dtype, arguments={"is_causal": is_causal})
    check_forward(portable_attention, case)


LOGITS = list(itertools.product(DTYPES, ["large", "low", "one huge"]))


@pytest.mark.parametrize(("dtype", "logits"), in_tiers(LOGITS, low_or_one_each))
def test_size_of_logits(dtype, logits):
    check_forward(portable_attention, AttentionCase(63, 203, 64, dtype=dtype, logits=logits))


@pytest.mark.parametrize(("dtype", "value_size"), [("float32", 1e30), ("bfloat16", 1e30), ("float16", 300.0)])
def test_size_of_values(dtype, value_size):
    """Sums of values leave the range of float16, though out does not."""
    check_forward(portable_attention, AttentionCase(20, 1000, 24, dtype=dtype, logits="equal", value_size=value_size))


def test_hidden_keys_with_huge_logits():
    """The maximum is over visible keys only: a huge hidden logit must not push the others to zero."""
    check_forward(portable_attention, AttentionCase(60, 60, logits="one huge", arguments={"is_causal": True}))
    check_forward(portable_attention, AttentionCase(40, 60, logits="last huge", key_lengths=(50,)))


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


def shapes_take_turns(shape, arguments):
    return WINDOWS_AND_SCALES.index(arguments) % 2 == (shape[0] < shape[1])


@pytest.mark.parametrize(
    ("shape", "arguments"),
    in_tiers(itertools.product([(100, 60), (60, 100)], WINDOWS_AND_SCALES), shapes_take_turns),
    ids=str,
)
def test_windows_and_scales(shape, arguments):
    check_forward(portable_attention, AttentionCase(*shape, arguments=arguments))


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(50, 70, B=4, key_lengths=(0, 1, 33, 70)),
        AttentionCase(50, 70, B=4, query_lengths=(0, 1, 33, 50)),
        AttentionCase(50, 70, B=3, query_lengths=(0, 50, 17), key_lengths=(70, 0, 20), arguments={"is_causal": True}),
        AttentionCase(200, 70, B=2, query_lengths=(150, 200), arguments={"local_window_size": (4, 4)}),
        AttentionCase(200, 70, B=1, arguments={"local_window_size": (4, 0)}),
        AttentionCase(64, 64, B=2, K=2, key_lengths=(0, 0), dtype="bfloat16"),
        AttentionCase(130, 130, B=2, dtype="float16", key_lengths=(64, 65), arguments={"is_causal": True}),
    ],
    ids=str,
)
def test_lengths_and_rows_that_see_nothing(case):
    check_forward(portable_attention, case)


BLOCKS = [(16, 64), (64, 16), (32, 32), (128, 16), (16, 128)]


@pytest.mark.parametrize(
    ("blocks", "is_causal"),
    in_tiers(itertools.product(BLOCKS, [False, True]), lambda blocks, is_causal: BLOCKS.index(blocks) % 2 == is_causal),
)
def test_unequal_blocks(blocks, is_causal):
    case = AttentionCase(113, 203, 24, arguments={"is_causal": is_causal})
    check_forward(with_blocks(*blocks), case)


@st.composite
def cases(draw):
    B, K, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    T, S = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    arguments = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        arguments["local_window_size"] = (draw(st.integers(0, 160)), draw(st.integers(0, 160)))
    lengths = {}
    for name, longest in (("query_lengths", T), ("key_lengths", S)):
        if draw(st.booleans()):
            lengths[name] = tuple(draw(st.integers(0, longest)) for _ in range(B))
    return AttentionCase(
        T,
        S,
        H=draw(st.integers(1, 80)),
        N=K * group,
        K=K,
        B=B,
        dtype=draw(st.sampled_from(DTYPES)),
        logits=draw(st.sampled_from(["plain", "large", "low", "one huge"])),
        arguments=arguments,
        batched=B > 1 or draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
        **lengths,
    )


@pytest.mark.full
@settings(max_examples=12, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]))
def test_any_legal_call(case, block_q, block_k):
    check_forward(with_blocks(block_q, block_k), case)


def test_padding_may_hold_anything():
    """What lies past the lengths is never used, not even multiplied by zero."""
    case = AttentionCase(40, 50, B=2, query_lengths=(40, 20), key_lengths=(50, 30))
    (query, key, value), arguments = case.inputs()
    clean = portable_attention(*case.inputs()[0], **arguments)
    query[1, 20:] = key[1, 30:] = np.nan
    value[1, 30:] = np.inf
    for implementation in ("portable", "reference"):
        dirty = flash_attention(query, key, value, implementation=implementation, return_residual=True, **arguments)
        for mine, right in zip(dirty, clean, strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)
    for gradient in oracle_gradients(query, key, value, np.ones_like(query), **arguments):
        assert np.isfinite(gradient).all()


def test_lengths_past_the_end_under_jit():
    """Under jit the values of lengths cannot be checked; too long means all, negative means none."""
    (query, key, value), _ = AttentionCase(40, 50, B=2).inputs()
    attention = jax.jit(lambda *arrays, lengths: portable_attention(*arrays, key_value_seq_lengths=lengths))
    out, lse = attention(query, key, value, lengths=np.array([1000, -5], np.int32))
    right_out, right_lse = portable_attention(query, key, value, key_value_seq_lengths=np.array([50, 0], np.int32))
    np.testing.assert_array_equal(out, right_out)
    np.testing.assert_array_equal(lse, right_lse)


def test_without_a_batch_axis():
    check_forward(portable_attention, AttentionCase(50, 70, 24, N=4, K=2, batched=False))


def test_jit_gives_the_same_bits():
    (query, key, value), _ = AttentionCase(50, 70, 24).inputs()
    eager = portable_attention(query, key, value, is_causal=True)
    jitted = jax.jit(functools.partial(portable_attention, is_causal=True))(query, key, value)
    for a, b in zip(eager, jitted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (None, 0, 0, 0), (1, 2, 0, None)])
def test_vmap(axes):
    random = np.random.default_rng(0)
    shapes = [(2, 40, 4, 24), (2, 50, 2, 24), (2, 50, 2, 24)]
    arrays = [
        random.standard_normal(shape if axis is None else (*shape[:axis], 3, *shape[axis:])).astype(np.float32)
        for shape, axis in zip(shapes, axes[:3], strict=True)
    ]
    lengths = random.integers(0, 51, (2,) if axes[3] is None else (3, 2)).astype(np.int32)

    def attention(query, key, value, lengths):
        return portable_attention(query, key, value, is_causal=True, key_value_seq_lengths=lengths)

    out, lse = jax.vmap(attention, in_axes=axes)(*arrays, lengths)
    for i in range(3):
        picked = [
            array if axis is None else np.take(array, i, axis)
            for array, axis in zip([*arrays, lengths], axes, strict=True)
        ]
        right_out, right_lse = attention(*picked)
        np.testing.assert_allclose(out[i], right_out, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(lse[i], right_lse, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_a_second_call_compiles_nothing(implementation):
    (query, key, value), _ = AttentionCase(33, 35, 24).inputs()
    attention = functools.partial(flash_attention, implementation=implementation)
    attention(query, key, value)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr("jax._src.compiler.compile_or_get_cached", lambda *a, **k: compiled.append(a))
        attention(query, key, value)
    assert compiled == []


def test_twice_the_same_bits():
    (query, key, value), _ = AttentionCase(113, 203, 64, dtype="bfloat16").inputs()
    first, second = (portable_attention(query, key, value) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
