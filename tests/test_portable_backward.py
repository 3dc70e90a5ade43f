"""The portable backward kernels against the float64 oracle, wherever the tests run: CPU or GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from attention_cases import AttentionCase, check_gradients, cotangents, gradients_of, in_tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_portable_forward import (
    GRID,
    LOGITS,
    TURNS,
    WINDOWS_AND_SCALES,
    cases,
    each_pair,
    low_or_one_each,
    on_the_diagonal,
)

from helpers import flash_attention
from helpers.attention.portable.backward import backward
from helpers.attention.portable.forward import forward
from helpers.attention.problem import check_call
from helpers.attention.reference import oracle_gradients

portable_attention = functools.partial(flash_attention, implementation="portable", return_residual=True)
portable_gradients = functools.partial(gradients_of, portable_attention)


def gradients_with(case, **options):
    """(dq, dk, dv) of the kernels at given block sizes or in the fused form."""
    arrays, arguments = case.inputs()
    interpret = jax.default_backend() == "cpu"
    call = check_call(*arrays, **arguments)
    dout, dlse = (gradient if case.batched else gradient[None] for gradient in cotangents(case))
    out, lse = forward(call, interpret=interpret)
    found = backward(call, out, lse, dout, dlse.swapaxes(1, 2), interpret=interpret, **options)
    return found if case.batched else tuple(gradient[0] for gradient in found)


# Every shape meets every other head_dim, in a chequerboard: the forward kernel meets them all.
CHEQUERBOARD = [GRID[6 * row + column] for row in range(10) for column in range(6) if (row + column) % 2 == 0]


@pytest.mark.parametrize(("shape_and_head_dim", "turn"), in_tiers(CHEQUERBOARD, on_the_diagonal))
def test_shapes_and_head_dims(shape_and_head_dim, turn):
    ((T, S), H), (dtype, group, is_causal) = shape_and_head_dim, turn
    case = AttentionCase(T, S, H, N=group, dtype=dtype, arguments={"is_causal": is_causal})
    check_gradients(portable_gradients, case)


def largest_group(dtype, group, is_causal):
    return each_pair(dtype, group, is_causal) and is_causal and group == 8


@pytest.mark.parametrize(("dtype", "group", "is_causal"), in_tiers(TURNS, largest_group))
def test_groups_and_dtypes(dtype, group, is_causal):
    case = AttentionCase(100, 130, 64, N=2 * group, K=2, B=2, dtype=dtype, arguments={"is_causal": is_causal})
    check_gradients(portable_gradients, case)


@pytest.mark.parametrize(("dtype", "logits"), in_tiers(LOGITS, low_or_one_each))
def test_size_of_logits(dtype, logits):
    check_gradients(portable_gradients, AttentionCase(63, 203, 64, dtype=dtype, logits=logits))


def a_mask_of_each_kind(shape, arguments):
    """The backward kernels take their masks and ranges of tiles from the functions that the forward kernel uses."""
    return (shape, WINDOWS_AND_SCALES.index(arguments)) in (
        ((100, 60), 0),
        ((60, 100), 7),
    )


SHARP = [("bfloat16", 1.0), ("bfloat16", 8.0), ("float16", 3.0), ("float32", 3.0)]


@pytest.mark.parametrize(
    ("dtype", "scale", "value_size"),
    in_tiers(
        [(*sharp, value_size) for sharp in SHARP for value_size in (1.0, 10.0)],
        lambda dtype, scale, value_size: (dtype, value_size) == ("float16", 10.0),
    ),
)
def test_sharp_softmax(dtype, scale, value_size):
    """Where a query puts nearly all weight on a few keys, ds is a small difference of large numbers."""
    case = AttentionCase(113, 70, 24, N=4, K=2, dtype=dtype, value_size=value_size, arguments={"scale": scale})
    check_gradients(portable_gradients, case)


@pytest.mark.parametrize(
    ("shape", "arguments"),
    in_tiers(itertools.product([(100, 60), (60, 100)], WINDOWS_AND_SCALES), a_mask_of_each_kind),
    ids=str,
)
def test_windows_and_scales(shape, arguments):
    check_gradients(portable_gradients, AttentionCase(*shape, arguments=arguments))


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(50, 70, B=4, key_lengths=(0, 1, 33, 70)),
        AttentionCase(50, 70, B=4, query_lengths=(0, 1, 33, 50)),
        AttentionCase(50, 70, B=3, query_lengths=(0, 50, 17), key_lengths=(70, 0, 20), arguments={"is_causal": True}),
        AttentionCase(200, 70, B=2, query_lengths=(150, 200), arguments={"local_window_size": (4, 4)}),
        AttentionCase(64, 64, B=2, K=2, key_lengths=(0, 0), dtype="bfloat16"),
        AttentionCase(130, 130, B=2, dtype="float16", key_lengths=(64, 65), arguments={"is_causal": True}),
        AttentionCase(50, 70, 24, N=4, K=2, batched=False),
    ],
    ids=str,
)
def test_lengths_and_rows_that_see_nothing(case):
    check_gradients(portable_gradients, case)


FORMS = list(itertools.product([(16, 64), (64, 16), (32, 32)], [False, True], [False, True]))


@pytest.mark.parametrize(
    ("blocks", "is_causal", "fused"),
    in_tiers(FORMS, lambda blocks, is_causal, fused: (blocks[0] > blocks[1]) == (is_causal == fused)),
)
def test_blocks_and_the_fused_form(blocks, is_causal, fused):
    case = AttentionCase(113, 203, 24, N=4, K=2, arguments={"is_causal": is_causal})
    block_q, block_k = blocks
    check_gradients(
        functools.partial(gradients_with, block_q=block_q, block_k=block_k, fused=fused), case, mends_delta=not fused
    )


@pytest.mark.full  # as the forward kernel's random calls, which are quick, at four times the price
@settings(max_examples=8, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([16, 32]), st.sampled_from([16, 32, 64]), st.booleans())
def test_any_legal_call(case, block_q, block_k, fused):
    check_gradients(
        functools.partial(gradients_with, block_q=block_q, block_k=block_k, fused=fused), case, mends_delta=not fused
    )


def test_fused_in_16_bits_with_lengths():
    case = AttentionCase(50, 70, B=2, N=4, K=2, dtype="bfloat16", query_lengths=(50, 20), key_lengths=(0, 70))
    check_gradients(functools.partial(gradients_with, fused=True), case)


def test_padding_gets_and_passes_no_gradient():
    case = AttentionCase(40, 50, B=2, query_lengths=(40, 20), key_lengths=(50, 30))
    (query, key, value), arguments = case.inputs()
    dout, dlse = cotangents(case)
    clean = oracle_gradients(query, key, value, dout, dlse, **arguments)
    query[1, 20:] = key[1, 30:] = value[1, 30:] = np.nan
    _, pull_back = jax.vjp(lambda *arrays: portable_attention(*arrays, **arguments), query, key, value)
    for mine, right in zip(pull_back((dout, dlse)), clean, strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5)


def test_what_arrives_at_rows_that_see_nothing_is_ignored():
    """Their lse is -inf, and whoever computes with that may send back a gradient of NaN."""
    case = AttentionCase(32, 16, dtype="bfloat16", N=1, arguments={"local_window_size": (2, 2)})
    arrays, arguments = case.inputs()
    dout, dlse = cotangents(case)
    _, pull_back = jax.vjp(lambda *arrays: portable_attention(*arrays, **arguments), *arrays)
    clean = pull_back((dout, dlse))
    dlse[:, 18:] = np.nan  # query 18 would see keys 16 to 20, and there are 16
    for mine, right in zip(pull_back((dout, dlse)), clean, strict=True):
        np.testing.assert_array_equal(mine, right)


def test_small_differences():
    """`jax.test_util` compares with finite differences, without our oracle."""
    (query, key, value), _ = AttentionCase(20, 24, 16).inputs()
    attention = lambda *arrays: portable_attention(*arrays, is_causal=True)
    jax.test_util.check_grads(attention, (query, key, value), order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-2)


AS_JAX_NN = [{"is_causal": True, "scale": 0.3}, {"local_window_size": (3, 9)}]


@pytest.mark.parametrize("arguments", in_tiers(AS_JAX_NN, lambda arguments: "scale" in arguments), ids=str)
def test_agreement_with_jax_nn(arguments):
    """jax.nn stops the gradient of lse, so only that of out is compared."""
    (query, key, value), _ = AttentionCase(40, 50, 16, N=4, K=2, B=2).inputs()
    dout = np.random.default_rng(0).standard_normal(query.shape).astype(np.float32)

    def gradients(attention):
        gradient = jax.grad(lambda *arrays: (dout * attention(*arrays, **arguments)).sum(), (0, 1, 2))
        return jax.jit(gradient)(query, key, value)

    ours = gradients(functools.partial(flash_attention, implementation="portable"))
    for mine, theirs in zip(ours, gradients(jax.nn.dot_product_attention), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def loss(query, key, value, **arguments):
    out, lse = portable_attention(query, key, value, **arguments)
    return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum() + jnp.sin(lse).sum()


@pytest.mark.full
def test_jit_checkpoint_and_repetition_give_the_same_bits():
    (query, key, value), _ = AttentionCase(113, 70, 24, N=4, K=2).inputs()
    gradient = jax.grad(functools.partial(loss, is_causal=True), (0, 1, 2))
    checkpointed = jax.grad(jax.checkpoint(functools.partial(loss, is_causal=True)), (0, 1, 2))
    first = gradient(query, key, value)
    for other in (gradient, jax.jit(gradient), jax.jit(checkpointed)):
        for a, b in zip(first, other(query, key, value), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.full
def test_vmap():
    random = np.random.default_rng(0)
    query, key = (
        random.standard_normal((3, 2, length, heads, 24)).astype(np.float32) for length, heads in ((40, 4), (50, 2))
    )
    lengths = np.array([[50, 0], [7, 50], [1, 33]], np.int32)

    @jax.jit
    def gradient(query, key, lengths):
        return jax.grad(lambda q, k: loss(q, k, k, key_value_seq_lengths=lengths)[None].sum(), (0, 1))(query, key)

    lengths = np.maximum(lengths, 1)  # sin(-inf) is NaN
    together = jax.vmap(gradient)(query, key, lengths)
    for i in range(3):
        for mine, right in zip(together, gradient(query[i], key[i], lengths[i]), strict=True):
            np.testing.assert_allclose(mine[i], right, rtol=1e-5, atol=1e-6)


def test_what_is_not_supported_says_so():
    arrays, _ = AttentionCase(20, 24).inputs()
    with pytest.raises(NotImplementedError, match="reverse mode only"):
        jax.jvp(loss, arrays, arrays)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        jax.grad(lambda query: jax.grad(loss)(query, *arrays[1:]).sum())(arrays[0])


def test_residuals_are_inputs_and_results_only():
    """Between forward and backward, attention keeps its inputs, out and lse, and nothing else."""
    (query, key, value), _ = AttentionCase(64, 64, 16).inputs()
    _, pull_back = jax.vjp(portable_attention, query, key, value)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull_back) if hasattr(leaf, "size"))
    out_and_lse = query.size + query.size // 16
    assert kept <= query.size + key.size + value.size + out_and_lse
