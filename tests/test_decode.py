"""Attention of few queries over many keys, in place and in pages, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_forward
from test_lowering import lower_for_cuda

from helpers.attention.masking import NO_BAND
from helpers.attention.paged import paged_attention
from helpers.attention.portable.decode import decode, merge, partial_bytes, select_splits
from helpers.attention.problem import Call, Problem, check_call
from helpers.attention.reference import oracle


def decoding(*arrays, block_k=16, tiles=2, **arguments):
    """(out, lse) by the interpreted kernel, with small tiles, so that there are several parts."""
    out, lse = decode(check_call(*arrays, **arguments), interpret=True, block_k=block_k, tiles=tiles)
    return out, lse.swapaxes(1, 2)


CASES = [
    AttentionCase(1, 100, 64, N=4, K=2, B=2),
    AttentionCase(3, 70, 24, N=6, K=2, B=2, dtype="bfloat16", key_lengths=(70, 0), query_lengths=(2, 3)),
    AttentionCase(5, 50, 128, N=2, K=1, dtype="float16", arguments={"is_causal": True}),
    AttentionCase(16, 200, 40, N=2, K=2, dtype="float16", logits="large", arguments={"local_window_size": (1, 70)}),
    AttentionCase(1, 33, 256, N=7, K=1, logits="low"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_oracle(case):
    check_forward(decoding, case)


def test_a_part_without_visible_keys_has_no_weight():
    out = np.array([[[1.0, 2.0]], [[np.pi, np.pi]], [[3.0, 4.0]]])  # (parts, rows, H)
    lse = np.array([[0.0], [-np.inf], [np.log(3)]])
    merged, total = merge(jnp.array(out), jnp.array(lse))
    np.testing.assert_allclose(merged, [[2.5, 3.5]], rtol=1e-6)
    np.testing.assert_allclose(total, [np.log(4)], rtol=1e-6)
    merged, total = merge(jnp.zeros((2, 1, 3)), jnp.full((2, 1), -jnp.inf))
    assert not merged.any() and np.isneginf(total).all()


@pytest.mark.parametrize(("B", "S"), [(1, 100), (1, 8192), (8, 8192), (1, 131072)])
def test_parts_fill_the_processors_and_are_not_tiny(B, S):
    splits = select_splits(Problem(B, 1, S, 32, 8, 128, jnp.dtype("bfloat16"), 1.0, NO_BAND))
    keys = splits.block_k * splits.tiles
    parts = -(-S // keys)
    assert keys >= 256 or parts == 1
    assert parts == 1 or B * 8 * parts >= 132 or keys <= 320
    assert B * 8 * parts <= 2 * 132 + B * 8


def test_the_memory_of_the_parts_is_the_formula():
    case = AttentionCase(2, 100, 32, N=4, K=2, B=3)
    call = check_call(*case.inputs()[0])
    options = {"block_k": 16, "tiles": 2}
    jaxpr = jax.make_jaxpr(lambda *arrays: decode(Call(call.problem, *arrays), interpret=True, **options))(*call.arrays)
    (kernel,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call")
    allocated = sum(v.aval.size * v.aval.dtype.itemsize for v in kernel.outvars)
    assert allocated == partial_bytes(call.problem, select_splits(call.problem, **options))


@pytest.mark.parametrize("pages", [False, True])
def test_lowers_for_a_gpu(pages):
    B, S, N, K, H, page = 2, 4096, 8, 2, 72, 16
    problem = Problem(B, 3, S, N, K, H, jnp.dtype("bfloat16"), 1.0, NO_BAND)
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    key = shaped(600, page, K, H) if pages else shaped(B, S, K, H)
    attend = lambda query, key, table, lengths: decode(Call(problem, query, key, key, lengths, lengths), table)
    table = integers(B, S // page) if pages else None
    assert lower_for_cuda(attend, shaped(B, 3, N, H), key, table, integers(B)).count("@__gpu$xla.gpu.triton") == 1


# Pages


def cache(page, lengths, *, dtype="float32", pages=24, K=2, H=24, N=4, T=2, seed=0):
    """(query, key_pages, value_pages, table, lengths), the entries of the table past a sequence's end wrong."""
    random = np.random.default_rng(seed)
    B, per_sequence = len(lengths), -(-max(lengths) // page)
    key_pages, value_pages = random.standard_normal((2, pages, page, K, H)).astype(dtype)
    table = random.integers(0, pages, (B, per_sequence)).astype(np.int32)  # some pages serve several sequences
    for row, length in enumerate(lengths):
        table[row, -(-length // page) :] = -7
    query = random.standard_normal((B, T, N, H)).astype(dtype)
    return query, key_pages, value_pages, table, np.array(lengths, np.int32)


def gathered(key_pages, table):
    return np.asarray(key_pages)[np.clip(table, 0, None)].reshape(len(table), -1, *key_pages.shape[2:])


@pytest.mark.parametrize("implementation", ["reference", "portable"])
@pytest.mark.parametrize(
    ("page", "lengths", "dtype"),
    [(16, (0, 33, 80), "float32"), (48, (96, 1), "bfloat16"), (64, (65, 130, 128), "float16")],
)
def test_pages_equal_the_gathered_cache(page, lengths, dtype, implementation):
    query, key_pages, value_pages, table, lengths = cache(page, lengths, dtype=jnp.dtype(dtype))
    key_pages[0] = value_pages[0] = 3  # so that what is read instead of a wrong page is not by chance nothing
    arguments = {"key_value_seq_lengths": lengths}
    right = oracle(query, gathered(key_pages, table), gathered(value_pages, table), **arguments)
    attention = functools.partial(paged_attention, implementation=implementation, return_residual=True)
    out, lse = attention(query, key_pages, value_pages, table, lengths)
    tolerance = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), right[0], atol=tolerance)
    np.testing.assert_allclose(lse, right[1], rtol=1e-5, atol=1e-5)
    assert out.dtype == query.dtype and not np.asarray(out, np.float32)[np.isneginf(right[1])].any()


def test_padding_in_a_page_may_hold_anything():
    query, key_pages, value_pages, table, lengths = cache(16, (20,), pages=2)
    table[0] = [1, 0]
    right = paged_attention(query, key_pages, value_pages, table, lengths)
    key_pages[0, 4:] = value_pages[0, 4:] = np.nan
    for implementation in ("reference", "portable"):
        out = paged_attention(query, key_pages, value_pages, table, lengths, implementation=implementation)
        np.testing.assert_allclose(out, right, atol=1e-6)


def test_a_wrong_table_under_jit_reads_some_page():
    query, key_pages, value_pages, table, lengths = cache(16, (20, 32))
    table[0, 1], table[1, 0] = 1000, -5
    attention = jax.jit(functools.partial(paged_attention, implementation="portable"))
    assert np.isfinite(attention(query, key_pages, value_pages, table, lengths)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"page_table": np.array([[0, 24, 1], [0, 1, 2]], np.int32)},
            r"page_table\[0\] must name pages from 0 to 23, got 24",
        ),
        ({"page_table": np.zeros((2, 3), np.int64)}, "page_table must have dtype int32, got int64"),
        ({"page_table": np.zeros((1, 3), np.int32)}, r"page_table must have shape \(2, pages of a sequence\)"),
        ({"lengths": np.array([49, 3], np.int32)}, "lengths must lie between 0 and 48"),
        ({"lengths": None}, "lengths must be an int32 array"),
        ({"query": np.zeros((2, 17, 4, 24), np.float32)}, "query must have at most 16 positions, got 17"),
        ({"query": np.zeros((2, 1, 3, 24), np.float32)}, "query heads must be a multiple"),
        ({"query": np.zeros((2, 1, 4, 25), np.float32)}, "key_pages must have the head_dim of query"),
        ({"value_pages": np.zeros((24, 16, 2, 24), np.float16)}, "must share one dtype"),
        ({"implementation": "hopper"}, "implementation must be None or one of reference, portable"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    names = ("query", "key_pages", "value_pages", "page_table", "lengths")
    arguments = dict(zip(names, cache(16, (40, 48)), strict=True)) | change
    with pytest.raises((TypeError, ValueError), match=message):
        paged_attention(**arguments)


def test_a_derivative_is_refused_where_there_is_none():
    query, *rest = cache(16, (20, 32))
    loss = lambda query, implementation: paged_attention(query, *rest, implementation=implementation).sum()
    assert np.isfinite(jax.grad(loss)(query, "reference")).all()
    with pytest.raises(NotImplementedError, match='use implementation="reference"'):
        jax.grad(loss)(query, "portable")
