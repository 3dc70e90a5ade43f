"""Attention of few queries over many keys, in place and in pages, against the oracle."""

import functools
import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import lessons
import numpy as np
import pytest
from attention_cases import AttentionCase, check_forward
from test_lowering import lower_for_cuda

from helpers.attention import tables
from helpers.attention.masking import NO_BAND, Band
from helpers.attention.paged import paged_attention
from helpers.attention.portable.decode import (
    DEFAULTS,
    MERGED,
    Launch,
    Splits,
    decode,
    merge,
    partial_bytes,
    select_splits,
)
from helpers.attention.portable.tiles import Gpu, Tiles, shared_bytes
from helpers.attention.problem import Call, Problem, check_call
from helpers.attention.reference import oracle
from helpers.dev import tune

INTERPRET = jax.default_backend() == "cpu"
UNTUNED = Gpu(None, (9, 0), 227 * 1024)


def decoded(*arrays, block_r=16, block_k=16, parts=3, **arguments):
    """(out, lse) by the kernels, with small tiles and several parts."""
    sizes = {"block_r": block_r, "block_k": block_k, "parts": parts}
    out, lse = decode(check_call(*arrays, **arguments), interpret=INTERPRET, **sizes)
    return out, lse.swapaxes(1, 2)


CAPPED = {"scale": 0.5, "logits_soft_cap": 2.0, "sinks": np.array([2, 0, -3, 1], np.float32)}
CASES = [
    AttentionCase(1, 100, 64, N=4, K=2, B=2),
    AttentionCase(3, 70, 24, N=6, K=2, B=2, dtype="bfloat16", key_lengths=(70, 0), query_lengths=(2, 3)),
    AttentionCase(5, 50, 128, N=2, K=1, dtype="float16", arguments={"is_causal": True}),
    AttentionCase(16, 200, 40, N=2, K=2, dtype="float16", logits="large", arguments={"local_window_size": (1, 70)}),
    AttentionCase(1, 33, 256, N=7, K=1, logits="low"),
    AttentionCase(2, 70, 24, N=4, K=2, B=2, dtype="bfloat16", key_lengths=(70, 0), common=4.0, arguments=CAPPED),
    AttentionCase(9, 90, 24, N=4, K=2, arguments=CAPPED | {"local_window_size": (7, 0), "causal_offset": 60}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_oracle(case):
    check_forward(decoded, case)


@pytest.mark.parametrize(("parts", "block_r"), [(1, 16), (40, 16), (2, 64)])
def test_any_number_of_parts_and_tiles_of_rows(parts, block_r):
    window = {"local_window_size": (1, 290)}  # so that rows differ
    case = AttentionCase(9, 320, 40, N=20, K=2, dtype="float16", key_lengths=(310,), arguments=window)  # 90 rows a head
    check_forward(functools.partial(decoded, parts=parts, block_r=block_r), case)


def test_a_part_without_visible_keys_has_no_weight():
    problem = Problem(1, 1, 100, 2, 2, 2, jnp.dtype("float32"), 1.0, NO_BAND)
    parts = MERGED + 2  # of which one head has keys in the first, second and last
    out, lse = np.full((1, 2, parts, 1, 2), np.pi, np.float32), np.full((1, 2, parts, 1), -np.inf, np.float32)
    out[0, 0, [0, 1, -1], 0] = [[1, 2], [3, 4], [5, 6]]
    lse[0, 0, [0, 1, -1], 0] = np.log([1, 3, 4])
    merged, total = merge(problem, jnp.array(out), jnp.array(lse), interpret=INTERPRET)
    np.testing.assert_allclose(merged[0, 0, 0], [30 / 8, 38 / 8], rtol=1e-6)
    np.testing.assert_allclose(total[0, :, 0], [np.log(8), -np.inf], rtol=1e-6)
    assert not merged[0, 0, 1].any()


@pytest.mark.parametrize(
    ("B", "S", "parts"), [(1, 100, 1), (1, 8192, 32), (8, 8192, 4), (1, 131072, 33), (32, 8192, 1)]
)
def test_parts_fill_the_processors_and_are_not_tiny(B, S, parts):
    """And keys that no query sees make none."""
    problem = Problem(B, 1, S, 32, 8, 128, jnp.dtype("bfloat16"), 1.0, NO_BAND)
    assert select_splits(replace(problem, band=Band.of(is_causal=True)), gpu=UNTUNED).parts == 1
    last = replace(problem, band=Band.of(is_causal=True, window=(500, 0)), is_at_end=True)
    assert select_splits(last, gpu=UNTUNED).parts == 1
    assert select_splits(problem, gpu=UNTUNED).parts == parts  # 2 x 132 programs at most, of 256 keys at least


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_fit_every_gpu(capability, dtype):
    gpu = Gpu(None, capability, {(8, 0): 163, (9, 0): 227}.get(capability, 99) * 1024)
    for H, rows in itertools.product((64, 128, 256), (1, 16, 64, 1000)):
        problem = Problem(1, 16, 4096, rows, 1, H, jnp.dtype(dtype), 1.0, NO_BAND)
        splits = select_splits(problem, gpu=gpu)
        tiles = Tiles(splits.block_r, splits.block_k, splits.num_warps, splits.num_stages)
        assert shared_bytes("decode", tiles, problem, capability) <= gpu.shared_memory


@pytest.mark.parametrize("parts", [1, 3])
def test_the_memory_of_the_parts_is_the_formula(parts):
    case = AttentionCase(2, 100, 32, N=4, K=2, B=3)
    call = check_call(*case.inputs()[0])
    options = {"block_k": 16, "parts": parts}
    run = lambda *arrays: decode(Call(call.problem, *arrays), interpret=INTERPRET, **options)
    kernels = [eqn for eqn in jax.make_jaxpr(run)(*call.arrays).eqns if eqn.primitive.name == "pallas_call"]
    allocated = [sum(v.aval.size * v.aval.dtype.itemsize for v in kernel.outvars) for kernel in kernels]
    assert sum(allocated[:-1]) == partial_bytes(call.problem, select_splits(call.problem, **options))


@pytest.mark.parametrize("pages", [False, True])
def test_lowers_for_a_gpu(pages):
    B, S, N, K, H, page = 2, 4096, 8, 2, 72, 16
    problem = Problem(B, 3, S, N, K, H, jnp.dtype("bfloat16"), 1.0, NO_BAND)
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    key = shaped(600, page, K, H) if pages else shaped(B, S, K, H)
    attend = lambda query, key, table, lengths: decode(Call(problem, query, key, key, lengths, lengths, table))
    table = integers(B, S // page) if pages else None
    assert lower_for_cuda(attend, shaped(B, 3, N, H), key, table, integers(B)).count("@__gpu$xla.gpu.triton") == 2


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


def test_the_reference_takes_a_band_in_pages():
    attend = functools.partial(paged_attention, implementation="reference", return_residual=True)
    check_pages(attend, *BANDS[0])


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
        ({"implementation": "triton"}, "implementation must be None or one of reference, portable"),
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


# What the tuner and the benchmark make of it


def test_rows_of_the_tuner_are_the_fastest(monkeypatch):
    best = Launch(64, 4, 2, 3)

    def compile_all(function, choices, arrays):
        jax.eval_shape(functools.partial(function, choices[0]), *arrays)
        return {choice: lambda query, *_: query for choice in choices}

    times = lambda programs: {launch: 1.0 + (launch != best) for launch in programs}
    arrays = lambda shapes, dtype, seed=0: [np.ones(shape, jnp.dtype(dtype)) for shape in shapes]
    monkeypatch.setattr(tune, "rotation", lambda _: 1)
    for name, value in {"compile_all": compile_all, "device_times": times, "random_arrays": arrays}.items():
        monkeypatch.setattr(tune, name, value)
    monkeypatch.setattr(tune, "DECODED", ((1, 48), (2, 48)))
    table, _ = tune.tune_decode((64,), (jnp.bfloat16,))
    assert [(row["block_r"], row["in_pages"]) for row in table] == [(16, False), (32, False), (64, False), (16, True)]
    assert table[0] == {"in_pages": False, "itemsize": 2, "head_padded": 64, "block_r": 16} | best._asdict()
    assert table[1]["per_processor"] == 2 and table[3]["per_processor"] == 3


def test_a_gpu_with_a_table_uses_it(monkeypatch, tmp_path):
    row = {"in_pages": False, "itemsize": 2, "head_padded": 128, "block_r": 16} | Launch(32, 1, 4, 3)._asdict()
    monkeypatch.setattr(tables, "TUNED", tmp_path)
    (tmp_path / "nvidia_unheard_of.json").write_text(json.dumps({"decode": [row]}))
    gpu = Gpu("NVIDIA Unheard-of", (9, 0), 227 * 1024)
    problem = Problem(1, 1, 10**6, 32, 8, 128, jnp.dtype("bfloat16"), 1.0, NO_BAND)
    other = replace(problem, H=64)
    assert select_splits(problem, gpu=gpu) == Splits(16, 32, 1, 4, 3 * 132 // 8)
    assert select_splits(problem, True, gpu)[1:4] == DEFAULTS[2, True][:3]
    assert select_splits(other, gpu=gpu)[1:4] == DEFAULTS[2, False][:3]


@pytest.mark.parametrize("start", [3, np.int32(3), jnp.int32(0)], ids=["later", "NumPy", "traced or an array"])
def test_the_notebook_refuses_several_tokens_where_its_masks_would_be_wrong(start):
    scope, cells = {}, lessons.read(lessons.PATHS[13]).cells
    exec(next(cell.source for cell in cells if cell.source.startswith("def read(")), scope)
    with pytest.raises(ValueError, match="from position 0 only"):
        scope["read"](None, None, np.zeros((1, 2), int), start, None)
