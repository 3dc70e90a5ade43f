"""What portable means where the tests run, and the plain kernels themselves, against the float64 oracle."""

import functools
import itertools

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_forward, in_tiers

from helpers import flash_attention
from helpers.attention.low_bits import low_bits
from helpers.attention.portable.backward import backward
from helpers.attention.portable.forward import forward

portable_attention = functools.partial(flash_attention, implementation="portable", return_residual=True)
CAUSAL = {"is_causal": True}


def check_kernels(case, fused=False, **blocks):
    """The kernels at given block sizes, and in the fused form."""
    arrays, arguments = case.inputs()
    blocks["interpret"] = True

    def keeping(call):
        exact, lse = forward(call, dtype=jnp.float32, **blocks)
        out = exact.astype(case.dtype)
        return out, lse, *([low_bits(exact, out)] if case.dtype != "float32" else [])

    run = cases.by_kernels(arguments, keeping, functools.partial(backward, fused=fused, **blocks))
    cases.check_results(run(arrays, cases.cotangents(case)), case)


def on_the_diagonal(case):
    """Each head_dim once."""
    return cases.SHAPES.index((case.T, case.S)) == cases.HEAD_DIMS.index(case.H)


SOME = [case for place, case in enumerate(cases.GRID) if place % 2 or on_the_diagonal(case)]


@pytest.mark.parametrize("case", in_tiers(SOME, on_the_diagonal), ids=str)
def test_shapes_and_head_dims(case):
    cases.check_attention(portable_attention, case)


@pytest.mark.parametrize(("dtype", "value_size"), [("float32", 1e30), ("bfloat16", 1e30), ("float16", 300.0)])
def test_size_of_values(dtype, value_size):
    """Sums of values leave the range of float16, though out does not."""
    check_forward(portable_attention, AttentionCase(20, 1000, 24, dtype=dtype, logits="equal", value_size=value_size))


SHARP = [  # where a query puts nearly all weight on a few keys, ds is a small difference of large numbers
    AttentionCase(113, 70, 24, N=4, K=2, dtype=dtype, value_size=value_size, arguments={"scale": scale})
    for dtype, scale, value_size in [("bfloat16", 1, 10), ("bfloat16", 8, 1), ("float16", 3, 10), ("float32", 3, 1)]
]
LENGTHS = [
    AttentionCase(50, 70, B=3, query_lengths=(0, 50, 17), key_lengths=(70, 0, 20), arguments=CAUSAL),
    AttentionCase(130, 130, B=2, dtype="float16", key_lengths=(64, 65), arguments=CAUSAL),
    AttentionCase(50, 70, 24, N=4, K=2, batched=False),
    AttentionCase(60, 60, logits="one huge", arguments=CAUSAL),  # which is hidden, and must not push others to zero
    AttentionCase(40, 60, logits="last huge", key_lengths=(50,)),
    AttentionCase(200, 70, B=2, query_lengths=(150, 200), arguments={"local_window_size": (4, 4)}),
    AttentionCase(64, 64, B=2, K=2, key_lengths=(0, 0), dtype="bfloat16"),
]
CASES = [*cases.OF_GROUPS[1::2], *cases.OF_LOGITS, *SHARP, *cases.OF_WINDOWS, *LENGTHS]
# Of low logits a sum of small exponentials shows how it is rounded.
QUICK = [*(cases.OF_GROUPS[i] for i in (3, 11, 13)), *(cases.OF_LOGITS[i] for i in (1, 3, 7)), SHARP[2]]
QUICK += [*(cases.OF_WINDOWS[i] for i in (0, 5, 7)), *LENGTHS[:3]]


@pytest.mark.parametrize("case", in_tiers(CASES, lambda case: case in QUICK), ids=str)
def test_agrees_with_the_oracle(case):
    cases.check_attention(portable_attention, case)


FORMS = [
    (AttentionCase(113, 203, 24, N=4, K=2, arguments={"is_causal": is_causal}), fused, blocks)
    for blocks, is_causal, fused in itertools.product([(16, 64), (64, 16), (32, 32)], [False, True], [False, True])
]
LENGTHS_16 = {"dtype": "bfloat16", "query_lengths": (50, 20), "key_lengths": (0, 70)}
FORMS += [(AttentionCase(50, 70, B=2, N=4, K=2, **LENGTHS_16), True, (None, None))]


@pytest.mark.parametrize(("case", "fused", "blocks"), in_tiers(FORMS, lambda *form: form in FORMS[1:11:6]), ids=str)
def test_blocks_and_the_fused_form(case, fused, blocks):
    check_kernels(case, fused, block_q=blocks[0], block_k=blocks[1])


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_padding_may_hold_anything(implementation):
    case = AttentionCase(40, 50, B=2, query_lengths=(40, 20), key_lengths=(50, 30))
    attention = functools.partial(flash_attention, implementation=implementation, return_residual=True)
    cases.check_padding(attention, case)


def test_lengths_past_the_end_under_jit():
    """Under jit the values of lengths cannot be checked; too long means all, negative means none."""
    (query, key, value), _ = AttentionCase(40, 50, B=2).inputs()
    attention = jax.jit(lambda lengths: portable_attention(query, key, value, key_value_seq_lengths=lengths))
    results, right = (attention(np.array(lengths, np.int32)) for lengths in ([1000, -5], [50, 0]))
    jax.tree.map(np.testing.assert_array_equal, results, right)
