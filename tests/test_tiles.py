"""Masks, NumPy twins, the cost model and the replay: what they say of tiles and bytes agrees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from helpers.attention import online_softmax, tiled
from helpers.attention.masking import Band, key_tiles, query_tiles, share, visible
from helpers.attention.portable import forward as portable
from helpers.attention.portable.tiles import cut_blocks, padded_head_dim
from helpers.attention.problem import check_call
from helpers.attention.reference import oracle, oracle_gradients
from helpers.instruments import cost
from helpers.instruments.traffic import replay

edges = st.none() | st.integers(0, 40)
lengths = st.integers(1, 40)
blocks = st.integers(1, 17)
bands = st.builds(Band, edges, edges)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths, lengths, blocks, blocks, bands, st.integers(0, 40), st.integers(0, 40))
def test_tile_ranges_hold_every_visible_key_and_no_empty_end(T, S, block_q, block_k, band, query_length, key_length):
    query_length, key_length = min(query_length, T), min(key_length, S)
    mask = visible(np.arange(T)[:, None], np.arange(S)[None, :], band, query_length, key_length)
    for q_start in range(0, T, block_q):
        first, stop = key_tiles(q_start, q_start + block_q, block_k, band, query_length, key_length)
        needed = np.flatnonzero(mask[q_start : q_start + block_q].any(axis=0)) // block_k
        assert (first, stop) == (needed[0], needed[-1] + 1) if len(needed) else first >= stop
    for k_start in range(0, S, block_k):
        first, stop = query_tiles(k_start, k_start + block_k, block_q, band, query_length, key_length)
        needed = np.flatnonzero(mask[:, k_start : k_start + block_k].any(axis=1)) // block_q
        assert (first, stop) == (needed[0], needed[-1] + 1) if len(needed) else first >= stop


def test_parts_share_all_tiles_evenly():
    for count, parts in itertools.product(range(8), range(1, 4)):
        shares = [range(*share((2, 2 + count), part, parts)) for part in range(parts)]
        assert [*itertools.chain(*shares)] == [*range(2, 2 + count)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lengths, lengths, st.integers(1, 9), blocks, blocks, bands, st.sampled_from([np.float32, np.float16]))
def test_twins_are_right_and_move_the_bytes_of_the_formula(T, S, H, block_q, block_k, band, dtype):
    random = np.random.default_rng(T * 100 + S)
    q, k, v = (random.standard_normal((length, H)).astype(dtype) for length in (T, S, S))
    window = (2**20 if band.left is None else band.left, 2**20 if band.right is None else band.right)
    heads = [a[:, None] for a in (q, k, v)]
    right_out, right_lse = oracle(*heads, scale=0.5, local_window_size=window)
    # Positive and negative values may cancel; rounding is relative to what is summed.
    summed, _ = oracle(*heads[:2], np.abs(heads[2]), scale=0.5, local_window_size=window)
    seen = np.isfinite(right_lse[:, 0])
    for twin, formula in ((tiled.query_outer, cost.query_outer_bytes), (tiled.key_outer, cost.key_outer_bytes)):
        memory = tiled.SlowMemory(q=q, k=k, v=v)
        out, lse = twin(memory, scale=0.5, block_q=block_q, block_k=block_k, band=band)
        # The key-outer twin rounds out to the dtype of memory at each of its visits.
        visits = -(-S // block_k) if twin is tiled.key_outer else 1
        error = np.linalg.norm(out - right_out[:, 0]) / max(np.linalg.norm(summed), 1e-30)
        assert error < visits * np.finfo(dtype).eps * (8 if dtype == np.float32 else 1)
        assert relative_error(lse[seen], right_lse[seen, 0]) < 1e-6
        assert np.isneginf(lse[~seen]).all() and not out[~seen].any()
        assert memory.bytes_moved == formula(T, S, H, np.dtype(dtype).itemsize, block_q, block_k, band)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(lengths, lengths, st.integers(1, 9), blocks, blocks, bands)
def test_the_twin_of_the_backward_kernels_is_right(T, S, H, block_q, block_k, band):
    random = np.random.default_rng(T * 100 + S)
    q, do, k, v = (random.standard_normal((length, H)).astype(np.float32) for length in (T, T, S, S))
    dlse = random.standard_normal(T).astype(np.float32)
    window = (2**20 if band.left is None else band.left, 2**20 if band.right is None else band.right)
    arrays, arguments = [a[:, None] for a in (q, k, v)], {"scale": 0.5, "local_window_size": window}
    out, lse = oracle(*arrays, **arguments)
    right = oracle_gradients(*arrays, do[:, None], dlse[:, None], **arguments)
    residuals = {"out": out[:, 0].astype(np.float32), "lse": lse[:, 0].astype(np.float32)}
    memory = tiled.SlowMemory(q=q, k=k, v=v, do=do, dlse=dlse, **residuals)
    found = tiled.backward(memory, scale=0.5, block_q=block_q, block_k=block_k, band=band)
    for mine, correct in zip(found, right, strict=True):
        np.testing.assert_allclose(mine, correct[:, 0], rtol=1e-4, atol=2e-5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 10**6))
def test_states_merge_in_any_order(sizes, seed):
    random = np.random.default_rng(seed)
    tiles = [(random.standard_normal((3, size)) * 20, random.standard_normal((size, 2))) for size in sizes]
    tiles[0][0][1] = -np.inf
    empty = online_softmax.init(3, 2)
    states = [online_softmax.update(empty, s, v) for s, v in tiles]
    one_by_one = empty
    for s, v in tiles:
        one_by_one = online_softmax.update(one_by_one, s, v)
    merged = empty
    for index in random.permutation(len(states)):
        merged = online_softmax.merge(states[index], merged)
    for a, b in zip(online_softmax.finalize(merged), online_softmax.finalize(one_by_one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


REPLAYS = [
    (AttentionCase(50, 70, 16, N=4, K=2, arguments={"is_causal": True}), 32),
    (AttentionCase(70, 50, 24, N=1, dtype="float16", arguments={"is_causal": True, "local_window_size": (20, 0)}), 16),
]


@pytest.mark.parametrize(("case", "block_q"), REPLAYS, ids=str)
def test_the_kernel_moves_the_bytes_of_the_formula(case, block_q):
    arrays, arguments = case.inputs()
    problem = check_call(*arrays, **arguments).problem

    def attention(*arrays):
        return portable.forward(check_call(*arrays, **arguments), block_q=block_q, block_k=16, interpret=True)

    (kernel,), (out, _) = replay(attention, *arrays, by_program=True)
    of_head = case.T, case.S, case.H, problem.dtype.itemsize
    assert kernel.bytes_moved == case.N * cost.query_outer_bytes(*of_head, block_q, 16, problem.band)
    for operand in kernel.operands.values():
        assert len(operand.reads_by_program) == len(kernel.programs)
        np.testing.assert_array_equal(sum(operand.reads_by_program), operand.reads)
    assert (kernel.operands["out"].writes == 1).all() and (kernel.operands["lse"].writes == 1).all()
    right, _ = attention(*arrays)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(right, np.float32), atol=2e-3)


def test_the_blocks_of_a_head_are_powers_of_two_of_at_least_16():
    assert [padded_head_dim(H) for H in (1, 8, 16, 17, 64, 65, 256)] == [16, 16, 16, 32, 64, 128, 256]
    assert cut_blocks((128, 64), (5, 70)) == (16, 64)


def test_replay_sees_a_tail():
    """Loads and stores that hang over the end are counted as outside."""

    def total(x):
        def kernel(x_ref, out_ref):
            out_ref[...] = 2 * x_ref[...]

        spec = pl.BlockSpec((8,), lambda i: (i,))
        shape = jax.ShapeDtypeStruct((20,), x.dtype)
        return pl.pallas_call(kernel, grid=(3,), in_specs=[spec], out_specs=spec, out_shape=shape, interpret=True)(x)

    x = np.arange(20, dtype=np.float32)
    (kernel,), result = replay(total, x)
    assert kernel.operands["x"].outside == kernel.operands["out"].outside_writes == 4
    np.testing.assert_array_equal(result, 2 * x)


def test_replay_counts_no_masked_load():
    by_triton = pytest.importorskip("jax.experimental.pallas.triton")

    def kernel(x_ref, out_ref):
        out_ref[...] = by_triton.load(x_ref, mask=jnp.arange(8) < 3, other=0.0)

    (call,), result = replay(lambda x: pl.pallas_call(kernel, out_shape=x, interpret=True)(x), np.ones(8, np.float32))
    assert call.operands["x"].reads.tolist() == result.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
