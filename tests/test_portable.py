"""What portable means where the tests run, and the plain kernels themselves, against the float64 oracle."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    DTYPES,
    GRID,
    GROUPS,
    HEAD_DIMS,
    LOGITS,
    SHAPES,
    TURNS,
    WINDOWS_AND_SCALES,
    AttentionCase,
    check_forward,
    check_results,
    cotangents,
    in_tiers,
    results_of,
)

from helpers import flash_attention
from helpers.attention.low_bits import low_bits
from helpers.attention.portable.backward import backward
from helpers.attention.portable.forward import forward
from helpers.attention.problem import check_call
from helpers.attention.reference import oracle_gradients

portable_attention = functools.partial(flash_attention, implementation="portable", return_residual=True)
CAUSAL = {"is_causal": True}


def check(case):
    check_results(results_of(portable_attention, case), case)


def check_kernels(case, fused=False, **blocks):
    """The same of the kernels at given block sizes, and in the fused form."""
    arrays, arguments = case.inputs()
    blocks["interpret"] = True
    call = check_call(*arrays, **arguments)
    dout, dlse = (gradient if case.batched else gradient[None] for gradient in cotangents(case))
    exact, lse = forward(call, dtype=jnp.float32, **blocks)
    out = exact.astype(case.dtype)
    low = low_bits(exact, out) if case.dtype != "float32" else None
    gradients = backward(call, out, lse, dout, dlse.swapaxes(1, 2), low, fused=fused, **blocks)
    results = (out, lse.swapaxes(1, 2)), gradients
    check_results(results if case.batched else jax.tree.map(lambda array: array[0], results), case)


def on_the_diagonal(shape_and_head_dim, turn):
    """Each head_dim once."""
    shape, head_dim = shape_and_head_dim
    return SHAPES.index(shape) == HEAD_DIMS.index(head_dim)


SOME = [turn for place, turn in enumerate(GRID) if place % 2 or on_the_diagonal(*turn)]


@pytest.mark.parametrize(("shape_and_head_dim", "turn"), in_tiers(SOME, on_the_diagonal))
def test_shapes_and_head_dims(shape_and_head_dim, turn):
    ((T, S), H), (dtype, group, is_causal) = shape_and_head_dim, turn
    check(AttentionCase(T, S, H, N=group, dtype=dtype, arguments={"is_causal": is_causal}))


def each_causal_pair(dtype, group, is_causal):
    return is_causal and (DTYPES.index(dtype) + 1) % 3 == GROUPS.index(group)


@pytest.mark.parametrize(("dtype", "group", "is_causal"), in_tiers(TURNS[1::2], each_causal_pair))
def test_groups_and_dtypes(dtype, group, is_causal):
    check(AttentionCase(50, 70, 64, N=2 * group, K=2, B=2, dtype=dtype, arguments={"is_causal": is_causal}))


def low_or_one_each(dtype, logits):
    """Of low logits a sum of small exponentials shows how it is rounded."""
    return (dtype, logits) in (("float32", "low"), ("float16", "low"), ("bfloat16", "large"))


@pytest.mark.parametrize(("dtype", "logits"), in_tiers(LOGITS, low_or_one_each))
def test_size_of_logits(dtype, logits):
    check(AttentionCase(63, 203, 64, dtype=dtype, logits=logits))


@pytest.mark.parametrize(("dtype", "value_size"), [("float32", 1e30), ("bfloat16", 1e30), ("float16", 300.0)])
def test_size_of_values(dtype, value_size):
    """Sums of values leave the range of float16, though out does not."""
    check_forward(portable_attention, AttentionCase(20, 1000, 24, dtype=dtype, logits="equal", value_size=value_size))


SHARP = [("bfloat16", 1.0, 10.0), ("bfloat16", 8.0, 1.0), ("float16", 3.0, 10.0), ("float32", 3.0, 1.0)]


@pytest.mark.parametrize(("dtype", "scale", "value_size"), in_tiers(SHARP, lambda *sharp: sharp == ("float16", 3, 10)))
def test_sharp_softmax(dtype, scale, value_size):
    """Where a query puts nearly all weight on a few keys, ds is a small difference of large numbers."""
    check(AttentionCase(113, 70, 24, N=4, K=2, dtype=dtype, value_size=value_size, arguments={"scale": scale}))


@pytest.mark.parametrize(
    "arguments", in_tiers(WINDOWS_AND_SCALES, lambda each: WINDOWS_AND_SCALES.index(each) in (0, 5, 7)), ids=str
)
def test_windows_and_scales(arguments):
    """The masks and ranges of tiles have quick tests of their own."""
    shape = (100, 60)[:: -1 if WINDOWS_AND_SCALES.index(arguments) % 2 else 1]
    check(AttentionCase(*shape, arguments=arguments))


CASES = [
    AttentionCase(50, 70, B=3, query_lengths=(0, 50, 17), key_lengths=(70, 0, 20), arguments=CAUSAL),
    AttentionCase(130, 130, B=2, dtype="float16", key_lengths=(64, 65), arguments=CAUSAL),
    AttentionCase(50, 70, 24, N=4, K=2, batched=False),
    AttentionCase(60, 60, logits="one huge", arguments=CAUSAL),  # which is hidden, and must not push others to zero
    AttentionCase(40, 60, logits="last huge", key_lengths=(50,)),
    AttentionCase(200, 70, B=2, query_lengths=(150, 200), arguments={"local_window_size": (4, 4)}),
    AttentionCase(64, 64, B=2, K=2, key_lengths=(0, 0), dtype="bfloat16"),
]


@pytest.mark.parametrize("case", in_tiers(CASES, lambda case: case in CASES[:3]), ids=str)
def test_lengths_and_rows_that_see_nothing(case):
    check(case)


FORMS = list(itertools.product([(16, 64), (64, 16), (32, 32)], [False, True], [False, True]))


@pytest.mark.parametrize(("blocks", "is_causal", "fused"), in_tiers(FORMS, lambda *form: form in FORMS[1:11:6]))
def test_blocks_and_the_fused_form(blocks, is_causal, fused):
    case = AttentionCase(113, 203, 24, N=4, K=2, arguments={"is_causal": is_causal})
    check_kernels(case, fused, block_q=blocks[0], block_k=blocks[1])


@pytest.mark.full
def test_fused_in_16_bits_with_lengths():
    lengths = {"query_lengths": (50, 20), "key_lengths": (0, 70)}
    check_kernels(AttentionCase(50, 70, B=2, N=4, K=2, dtype="bfloat16", **lengths), fused=True)


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_padding_may_hold_anything(implementation):
    """What lies past the lengths is never used, not even multiplied by zero."""
    case = AttentionCase(40, 50, B=2, query_lengths=(40, 20), key_lengths=(50, 30))
    arrays, arguments = case.inputs()
    attend = functools.partial(flash_attention, implementation=implementation, return_residual=True, **arguments)

    @jax.jit
    def everything(*arrays):
        results, pull_back = jax.vjp(attend, *arrays)
        return results, pull_back(cotangents(case))

    clean = everything(*arrays)
    check_results(clean, case)
    for array, length, filler in zip(arrays, (20, 30, 30), (np.nan, np.nan, np.inf), strict=True):
        array[1, length:] = filler
    jax.tree.map(np.testing.assert_array_equal, everything(*arrays), clean)
    for gradient in oracle_gradients(*arrays, np.ones_like(arrays[0]), **arguments):
        assert np.isfinite(gradient).all()


def test_lengths_past_the_end_under_jit():
    """Under jit the values of lengths cannot be checked; too long means all, negative means none."""
    (query, key, value), _ = AttentionCase(40, 50, B=2).inputs()
    attention = jax.jit(lambda *arrays, lengths: portable_attention(*arrays, key_value_seq_lengths=lengths))
    results, right = (
        attention(query, key, value, lengths=np.array(lengths, np.int32)) for lengths in ([1000, -5], [50, 0])
    )
    jax.tree.map(np.testing.assert_array_equal, results, right)
