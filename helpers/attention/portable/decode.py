"""The portable kernels for decoding: few queries, many keys, in plain Pallas.

With one query a head there is one tile of queries and little arithmetic: the time goes into reading keys
and values once. So three things differ from `forward`.

1. The keys are split over programs (Flash-Decoding, Dao et al. 2023), so that all SMs read.
2. The query heads that share a key head are rows of one tile, up to 64 of them, and the keys are read once for a tile.
3. Each program writes its own out and lse in float32, and a second kernel merges them as parts of a sum. A sink, which
   takes weight and gives no value, is one part more:

    lse = log sum_i exp lse_i        out = sum_i exp(lse_i - lse) out_i

The keys may also lie in pages (PagedAttention, arXiv 2309.06180): a table says in which page the keys
j page to (j + 1) page - 1 of a sequence are.

Refs, as program (key head and tile of rows, part of the keys, batch entry) sees them. A row r is query r // group
of query head r % group of the group; there are T group rows, in tiles of block_r, and H' is H rounded up to a power
of two:

    q_ref    (block_r, H')
    k_ref    (S, H')          all keys of the head; with pages (P, page, H'), all pages
    v_ref    as k_ref
    table_ref  (pages of a sequence,)  int32, or None
    query_length_ref, key_length_ref  ()  or None
    out_ref  (block_r, H')    of this part, float32
    lse_ref  (block_r,)       of this part, float32

and as program (query head, query, batch entry) of the second kernel sees them:

    parts_ref  (parts, H')    out of every part, float32
    logs_ref   (parts',)      lse of every part; parts' is their number rounded up to a power of two
    sink_ref   ()             float32, or None
    out_ref    (1, H')
    lse_ref    ()             float32
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from helpers.attention import tables
from helpers.attention.device import core_count
from helpers.attention.masking import key_tiles, keys_seen, share, visible
from helpers.attention.portable.tiles import (
    LOG2_E,
    MIN_BLOCK,
    Tiles,
    check_blocks,
    dot,
    exp2,
    fitting,
    length_of,
    padded_head_dim,
    this_gpu,
)

MOST_ROWS = 64  # of a tile
FEWEST_KEYS = 256  # of a part
MERGED = 32  # parts that are merged in one step
NUM_SMS = 132  # of an H200, where the device does not say


class Launch(NamedTuple):
    """What the tuner finds: keys of a tile, warps of a program, tiles in flight, and programs for each SM."""

    block_k: int
    num_warps: int
    num_stages: int
    per_processor: int


class Splits(NamedTuple):
    """How a call is launched: rows and keys of a tile, warps of a program, tiles in flight, and parts of the keys."""

    block_r: int
    block_k: int
    num_warps: int
    num_stages: int
    parts: int


# For GPUs without a table of their own, by bytes of an element and whether the keys lie in pages: then a program
# waits for the table as well, and more of them are needed.
DEFAULTS = {
    (2, False): Launch(64, 2, 3, 2),
    (4, False): Launch(32, 2, 2, 2),
    (2, True): Launch(64, 2, 2, 4),
    (4, True): Launch(32, 2, 2, 4),
}


def decode_kernel(
    q_ref, k_ref, v_ref, table_ref, query_length_ref, key_length_ref, out_ref, lse_ref, *, problem, splits, interpret
):  # fmt: skip
    """Writes out and lse of one tile of rows over one part of the keys."""
    query_length = length_of(query_length_ref, problem.T)
    key_length = length_of(key_length_ref, problem.S)
    tile_of_rows = pl.program_id(0) % _tiles_of_rows(problem, splits)
    rows = tile_of_rows * splits.block_r + jnp.arange(splits.block_r)
    first = problem.first_position(key_length)
    positions, stop_position = first + rows // problem.group, first + query_length
    is_row = rows < problem.T * problem.group
    in_head = jnp.arange(q_ref.shape[1])[None, :] < problem.H
    q = plt.load(q_ref, mask=is_row[:, None] & in_head, other=0)

    def one_key_tile(j, state):
        m, l, acc = state
        start = j * splits.block_k
        cols = start + jnp.arange(splits.block_k)
        is_key = cols < key_length
        k, v = (_keys(ref, table_ref, start, cols, is_key, in_head) for ref in (k_ref, v_ref))
        s = (problem.scale * LOG2_E) * dot(q, k.T)
        if problem.soft_cap is not None:
            cap = LOG2_E * problem.soft_cap
            s = cap * jnp.tanh(s / cap)
        s = jnp.where(visible(positions[:, None], cols[None, :], problem.band, stop_position, key_length), s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1))
        reference = jnp.where(m_new == -jnp.inf, 0, m_new)  # a row may have seen no key yet
        alpha = exp2(m - reference, interpret)
        p = exp2(s - reference[:, None], interpret)
        l = alpha * l + p.sum(axis=1)
        acc = alpha[:, None] * acc + dot(p.astype(v.dtype), v)
        return m_new, l, acc

    state = (
        jnp.full(rows.shape, -jnp.inf, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
        jnp.zeros(q_ref.shape, jnp.float32),
    )
    tiles = key_tiles(first, first + problem.T, splits.block_k, problem.band, stop_position, key_length, xp=jnp)
    m, l, acc = lax.fori_loop(*share(tiles, pl.program_id(1), splits.parts, xp=jnp), one_key_tile, state)

    empty = l == 0
    l = jnp.where(empty, 1, l)
    lse = jnp.where(empty, -jnp.inf, (m + jnp.log2(l)) / LOG2_E)
    plt.store(out_ref, (acc / l[:, None]).astype(out_ref.dtype), mask=is_row[:, None] & in_head)
    plt.store(lse_ref, lse, mask=is_row)


def merge_kernel(parts_ref, logs_ref, sink_ref, out_ref, lse_ref, *, problem, parts):
    """Writes out and lse of one row from those of every part, and its sink."""
    in_head = jnp.arange(parts_ref.shape[1])[None, :] < problem.H

    def log_sums(start, count):
        index = start + jnp.arange(count)
        return plt.load(logs_ref.at[pl.ds(start, count)], mask=index < parts, other=-jnp.inf)

    logs = log_sums(0, logs_ref.shape[0])
    m = logs.max() if sink_ref is None else jnp.maximum(logs.max(), sink_ref[...])
    m = jnp.where(m == -jnp.inf, 0, m)  # there may be no key for this row
    total = jnp.exp(logs - m).sum()
    if sink_ref is not None:
        total += jnp.exp(sink_ref[...] - m)

    def add(i, acc):
        weight = jnp.exp(log_sums(i * MERGED, MERGED) - m)
        is_part = i * MERGED + jnp.arange(MERGED) < parts
        out = plt.load(parts_ref.at[pl.ds(i * MERGED, MERGED), :], mask=is_part[:, None] & in_head, other=0)
        return acc + (weight[:, None] * out).sum(axis=0)

    acc = lax.fori_loop(0, pl.cdiv(parts, MERGED), add, jnp.zeros(parts_ref.shape[1], jnp.float32))
    out = acc / jnp.where(total == 0, 1, total)
    plt.store(out_ref, out[None].astype(out_ref.dtype), mask=in_head)
    lse_ref[...] = m + jnp.log(total)


def _tiles_of_rows(problem, splits):
    return pl.cdiv(problem.T * problem.group, splits.block_r)


def _keys(ref, table_ref, start, cols, is_key, in_head):
    """The tile of keys or values at the positions cols, start and following, zeros where there is none."""
    mask = is_key[:, None] & in_head
    if table_ref is None:
        return plt.load(ref.at[pl.ds(start, cols.size), :], mask=mask, other=0)
    pages, page, head_padded = ref.shape
    number = plt.load(table_ref.at[cols // page], mask=is_key, other=0)
    # A wrong table must not lead to somebody else's memory.
    number = jnp.clip(number, 0, pages - 1)
    dims = jnp.arange(head_padded)
    return plt.load(ref.at[number[:, None], (cols % page)[:, None], dims[None, :]], mask=mask, other=0)


def select_splits(problem, in_pages=False, gpu=None, **overrides):
    """The `Splits` of a problem, from the tuner's table of the GPU where there is one, otherwise from `DEFAULTS`.

    in_pages: whether the keys lie in pages. gpu: a `tiles.Gpu`, by default the one that computes. overrides:
    fields of Splits to be taken as given.
    """
    gpu = gpu or this_gpu()
    itemsize, head_padded = problem.dtype.itemsize, max(64, padded_head_dim(problem.H))
    tuned = tables.rows_by(gpu.name, "decode", "in_pages", "itemsize", "head_padded", "block_r")
    row = tuned.get((in_pages, itemsize, head_padded, _rows_of_a_tile(problem)))
    launch = Launch(*(row[name] for name in Launch._fields)) if row else DEFAULTS[itemsize, in_pages]
    splits = splits_of(problem, gpu, launch)._replace(**overrides)
    check_blocks(splits.block_r, splits.block_k)
    return splits


def splits_of(problem, gpu, launch):
    """The `Splits` of a problem with a `Launch`, whose tiles are cut to what there is and what the GPU holds.

    There are parts enough for the programs that it wants, as long as each has `FEWEST_KEYS` keys.
    """
    block_k = min(launch.block_k, max(MIN_BLOCK, pl.next_power_of_2(problem.S)))
    tiles = Tiles(_rows_of_a_tile(problem), block_k, launch.num_warps, launch.num_stages)
    tiles = fitting("decode", tiles, problem, gpu)
    heads = problem.B * problem.K * pl.cdiv(problem.T * problem.group, tiles.block_q)
    programs = launch.per_processor * core_count(NUM_SMS)
    parts = max(1, min(programs // heads, keys_seen(problem) // FEWEST_KEYS))
    return Splits(*tiles, parts)


def _rows_of_a_tile(problem):
    return min(MOST_ROWS, max(MIN_BLOCK, pl.next_power_of_2(problem.T * problem.group)))


def partial_bytes(problem, splits):
    """Bytes of the partial results: H + 1 float32 numbers for each query, head and part."""
    return 4 * splits.parts * problem.B * problem.T * problem.N * (problem.H + 1)


def decode(call, *, interpret=False, **options):
    """Attention of a checked `Call` with few queries: out (B, T, N, H) in the dtype of query, lse (B, N, T) float32.

    Its keys may lie in pages. Beyond its inputs and outputs it needs `partial_bytes`. options: fields of `Splits`.
    """
    problem, table = call.problem, call.page_table
    splits = select_splits(problem, table is not None, **options)
    B, T, S, K, H, group = *(getattr(problem, name) for name in "BTSKH"), problem.group
    rows, head_padded = T * group, padded_head_dim(H)
    row_tiles = _tiles_of_rows(problem, splits)
    query = call.query.reshape(B, T, K, group, H).swapaxes(1, 2).reshape(B, K, rows, H)

    # Neighbours read other heads of the same keys, which lie side by side.
    q_spec = pl.BlockSpec(
        (None, None, splits.block_r, head_padded), lambda i, j, b: (b, i // row_tiles, i % row_tiles, 0)
    )

    def of_part(*sides):
        rest = (0,) * (len(sides) - 1)
        return pl.BlockSpec((None, None, None, *sides), lambda i, j, b: (b, i // row_tiles, j, i % row_tiles, *rest))

    if table is None:
        kv_spec = pl.BlockSpec((None, S, None, head_padded), lambda i, j, b: (b, 0, i // row_tiles, 0))
    else:
        kv_spec = pl.BlockSpec((*call.key.shape[:2], None, head_padded), lambda i, j, b: (0, 0, i // row_tiles, 0))
    row_of_table = pl.BlockSpec((None, None if table is None else table.shape[1]), lambda i, j, b: (b, 0))
    length_spec = pl.BlockSpec((None,), lambda i, j, b: (b,))
    optional = ((table, row_of_table), (call.query_lengths, length_spec), (call.key_lengths, length_spec))
    out, lse = pl.pallas_call(
        functools.partial(decode_kernel, problem=problem, splits=splits, interpret=interpret),
        grid=(K * row_tiles, splits.parts, B),
        in_specs=[q_spec, kv_spec, kv_spec, *(None if array is None else spec for array, spec in optional)],
        out_specs=[of_part(splits.block_r, head_padded), of_part(splits.block_r)],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, splits.parts, rows, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, splits.parts, rows), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=splits.num_warps, num_stages=splits.num_stages),
        interpret=interpret,
        name="flash_attention_decode",
    )(query, call.key, call.value, *(array for array, _ in optional))
    return merge(problem, out, lse, call.extras.sinks if call.has_sinks else None, interpret=interpret)


def merge(problem, out, lse, sinks=None, *, interpret=False):
    """(out, lse) of `decode` from those of parts of the keys, (B, K, parts, T group, H) and (B, K, parts, T group).

    sinks: float32 (B or 1, N), or None.
    """
    B, T, N, H, group = *(getattr(problem, name) for name in "BTNH"), problem.group
    parts, head_padded = out.shape[2], padded_head_dim(H)
    parts_padded = max(MERGED, pl.next_power_of_2(parts))
    row_of = lambda n, t: (n // group, 0, t * group + n % group)
    return pl.pallas_call(
        functools.partial(merge_kernel, problem=problem, parts=parts),
        grid=(N, T, B),
        in_specs=[
            pl.BlockSpec((None, None, parts, None, head_padded), lambda n, t, b: (b, *row_of(n, t), 0)),
            pl.BlockSpec((None, None, parts_padded, None), lambda n, t, b: (b, *row_of(n, t))),
            None if sinks is None else pl.BlockSpec((None, None), lambda n, t, b: (b % sinks.shape[0], n)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, 1, head_padded), lambda n, t, b: (b, t, n, 0)),
            pl.BlockSpec((None, None, None), lambda n, t, b: (b, n, t)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, T, N, H), problem.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="flash_attention_merge",
    )(out, lse, sinks)
