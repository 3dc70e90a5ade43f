"""Attention of few queries over many keys, in place and in pages, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_forward

from helpers import flash_attention
from helpers.attention.public.paged import paged_attention
from helpers.attention.reference import oracle

decoded = functools.partial(flash_attention, implementation="portable", return_residual=True)

CAPPED = {"scale": 0.5, "logits_soft_cap": 2.0, "sinks": np.array([2, 0, -3, 1], np.float32)}
CASES = [
    AttentionCase(1, 100, 64, N=4, K=2, B=2),
    AttentionCase(3, 100, 25, N=6, K=2, B=2, key_lengths=(100, 0), query_lengths=(2, 3)),
    AttentionCase(5, 50, 128, N=2, K=1, dtype="float16", arguments={"is_causal": True}),
    AttentionCase(16, 200, 64, N=3, dtype="float16", logits="large", arguments={"local_window_size": (1, 70)}),
    AttentionCase(2, 70, 24, N=4, K=2, B=2, dtype="bfloat16", key_lengths=(70, 0), common=4.0, arguments=CAPPED),
    AttentionCase(9, 90, 24, N=4, K=2, arguments=CAPPED | {"local_window_size": (7, 0), "causal_offset": 60}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_oracle(case):
    check_forward(decoded, case)


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


@pytest.mark.parametrize("implementation", ["reference", "portable", "mosaic"])
@pytest.mark.parametrize(
    ("page", "lengths", "dtype"),
    [(16, (0, 33, 80), "float32"), (48, (96, 1), "bfloat16"), (64, (65, 130, 128), "float16")],
)
def test_pages_equal_the_gathered_cache(page, lengths, dtype, implementation):
    query, key_pages, value_pages, table, lengths = cache(page, lengths, dtype=jnp.dtype(dtype))
    key_pages[0] = value_pages[0] = 3  # so that what is read instead of a wrong page is not by chance nothing
    arguments = {"key_value_seq_lengths": lengths, "scale": 0.3}
    right = oracle(query, gathered(key_pages, table), gathered(value_pages, table), **arguments)
    attention = functools.partial(paged_attention, scale=0.3, implementation=implementation, return_residual=True)
    out, lse = attention(query, key_pages, value_pages, table, lengths)
    tolerance = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), right[0], atol=tolerance)
    np.testing.assert_allclose(lse, right[1], rtol=1e-5, atol=1e-5)
    assert out.dtype == query.dtype and not np.asarray(out, np.float32)[np.isneginf(right[1])].any()


BANDS = [
    (None, {"is_causal": True}),
    (None, {"is_causal": True, "local_window_size": (20, 5)}),
    (9, {"is_causal": True}),
    (260, {"local_window_size": (3, 1)}),
]


def check_pages(attend, causal_offset, arguments):
    """Each sequence as by the oracle, with the queries at its end or where they are said to be; of page 0, only sinks.

    attend(*arrays, **arguments) -> (out, lse). What lies well before a window is not read, so it may hold anything.
    """
    query, key_pages, value_pages, table, lengths = cache(16, (300, 2, 0), T=3, pages=40)
    table[0] = 1 + np.random.default_rng(0).permutation(len(table[0]))
    common = {"logits_soft_cap": 1.5, "sinks": np.random.default_rng(0).standard_normal(4).astype(np.float32)}
    keys, values = (gathered(pages, table) for pages in (key_pages, value_pages))
    if "local_window_size" in arguments:
        key_pages[table[0, :8]] = value_pages[table[0, :8]] = np.nan
    arrays = query, key_pages, value_pages, table, lengths
    mine = jax.tree.map(np.asarray, attend(*arrays, causal_offset=causal_offset, **arguments, **common))
    for b, length in enumerate(lengths):
        shift = int(length) - 3 if causal_offset is None else causal_offset
        cut = {"key_value_seq_lengths": lengths[b : b + 1], "causal_offset": shift}
        right = oracle(query[b : b + 1], keys[b : b + 1], values[b : b + 1], **cut, **arguments, **common)
        for one, other in zip(mine, right, strict=True):
            np.testing.assert_allclose(one[b], other[0], atol=3e-6)
    np.testing.assert_array_equal(mine[1][2], np.broadcast_to(common["sinks"], (3, 4)))


@pytest.mark.parametrize(("causal_offset", "arguments"), BANDS)
def test_a_band_in_pages(causal_offset, arguments):
    attend = functools.partial(paged_attention, implementation="portable", return_residual=True)
    check_pages(attend, causal_offset, arguments)


def test_padding_in_a_page_may_hold_anything():
    query, key_pages, value_pages, table, lengths = cache(16, (20,), pages=2)
    table[0] = [1, 0]
    right = paged_attention(query, key_pages, value_pages, table, lengths)
    key_pages[0, 4:] = value_pages[0, 4:] = np.nan
    for implementation in ("reference", "portable", "mosaic"):
        out = paged_attention(query, key_pages, value_pages, table, lengths, implementation=implementation)
        np.testing.assert_allclose(out, right, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "portable", "mosaic"])
def test_a_wrong_table_under_jit_reads_some_page(implementation):
    query, key_pages, value_pages, table, lengths = cache(16, (20, 32))
    table[0, 1], table[1, 0] = 1000, -5
    attention = functools.partial(paged_attention, implementation=implementation)
    out = jax.jit(attention)(query, key_pages, value_pages, table, lengths)
    right = attention(query, key_pages, value_pages, table.clip(0, len(key_pages) - 1), lengths)
    np.testing.assert_allclose(out, right, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": np.array([[0, 24, 1], [0, 1, 2]], np.int32)}, r"must name pages from 0 to 23, got 24"),
        ({"page_table": np.zeros((2, 3), np.int64)}, "page_table must have dtype int32, got int64"),
        ({"page_table": np.zeros((1, 3), np.int32)}, r"page_table must have shape \(2, pages of a sequence\)"),
        ({"lengths": np.array([49, 3], np.int32)}, "lengths must lie between 0 and 48"),
        ({"query": np.zeros((2, 17, 4, 24), np.float32)}, "query must have at most 16 positions, got 17"),
        ({"value_pages": np.zeros((24, 16, 2, 24), np.float16)}, "must share one dtype"),
        ({"is_causal": True, "causal_offset": ""}, "causal_offset must be an integer, got ''"),
        ({"return_residual": 1}, "return_residual must be True or False, got 1"),
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
    with pytest.raises(NotImplementedError, match=r'hopper cannot serve .* it takes no pages; use .*="portable"'):
        paged_attention(*cache(16, (20, 32), dtype="bfloat16"), implementation="hopper")
