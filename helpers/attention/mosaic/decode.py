"""Decoding by `mma`: few queries, many keys, in one piece or in pages, on every NVIDIA GPU from Ampere on.

There is little arithmetic: the time goes into reading keys and values once. So

1. the keys are split over programs (Flash-Decoding, Dao et al. 2023), so that all SMs read, and in a program over its
   four warps, each with a softmax of its own (see `own_keys`): no warp waits for another;
2. the query heads that share a key head are rows of one tile, 16 or 32, and the keys are read once for a tile;
3. copies run ahead: a ring in shared memory holds tiles of keys and values in turn, k_0 v_0 k_1 v_1 ..., and when one
   was used, that which is `slots` further takes its place;
4. every warp of every program writes its own out and log2 of the sum, in float32, and a second kernel merges these
   parts, with that of a sink, which takes weight and gives no value, where there is one:

    L = log2 sum_i 2^L_i        out = sum_i 2^(L_i - L) out_i        lse = L ln 2

The keys may also lie in pages (PagedAttention, arXiv 2309.06180): a table says in which page the keys j page to
(j + 1) page - 1 of a sequence are. Where a row is, every lane finds for itself, so pages may have any number of rows.

Refs, as every program sees them; H' is H rounded up to 128 bytes:

    q_ref       (B, T, N, H)
    k_ref       (B, S, K, H), with pages (P, page, K, H); v_ref alike
    table_ref   (B, pages of a sequence)  int32, or None
    query_lengths_ref, key_lengths_ref  (B,)  int32, or None
    parts_ref   (B, K, R, parts, H')  float32: out of part i for row r, query r // group of head r % group
    logs_ref    (B, K, R, parts)      float32: L_i
    sinks_ref   (B or 1, N)           float32, or None
    q_smem      (block_r, H')
    ring        (slots, block_k, H')
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention import online_softmax
from helpers.attention.device import core_count, shared_memory
from helpers.attention.extras import Extras
from helpers.attention.masking import key_tiles, keys_seen, share, visible
from helpers.attention.mosaic import own_keys
from helpers.attention.mosaic.own_keys import PARTS, WARP_ROWS, WARPS, padded_head_dim, row_of, swizzled, warp_of
from helpers.attention.mosaic.warp import ACC, ROWS, along, as_operand, full, operand_dtype, pieces_of, split
from helpers.attention.online_softmax import LOG2_E

FEWEST_KEYS = 256  # of a program
MERGED = 2**14  # numbers of parts that are merged in one step: 128 for each thread
MOST_SLOTS = 12
NUM_SMS = 132  # of an H100 and an H200, where the device does not say


class Splits(NamedTuple):
    """How a call is launched: rows and keys of a tile, tiles of the ring, and programs that share the keys."""

    block_r: int
    block_k: int
    slots: int
    programs: int


def decode_kernel(
    q_ref, k_ref, v_ref, table_ref, query_lengths_ref, key_lengths_ref, parts_ref, logs_ref, q_smem, ring,
    *, problem, splits, interpret
):  # fmt: skip
    """Writes out and logs of one tile of rows for the four parts of one program."""
    b, program, head_and_rows = (lax.axis_index(name) for name in ("batch", "program", "head"))
    row_tiles = tiles_of_rows(problem, splits)
    head, first_row = lax.div(head_and_rows, row_tiles), lax.rem(head_and_rows, row_tiles) * splits.block_r
    lengths = length_of(query_lengths_ref, b, problem.T), length_of(key_lengths_ref, b, problem.S)
    count, dtype, own = pieces_of(problem.dtype), operand_dtype(problem.dtype), splits.block_k // WARPS
    in_pieces = lambda x: [x] if interpret else split(x, count, dtype)

    offset = problem.first_position(lengths[1])
    stops = offset + lengths[0], lengths[1]
    tiles = key_tiles(offset, offset + problem.T, splits.block_k, problem.band, *stops, xp=jnp)
    first, stop = share(tiles, program, splits.programs, xp=jnp)

    in_one_page = table_ref is None or k_ref.shape[1] % own == 0
    stride = problem.K if in_one_page else None

    def fetch(i, which):
        """Begin to copy tile i of the ring, which is 0 for keys and 1 for values."""
        tile = first + lax.div(i, 2)
        stop_key = jnp.where(tile < stop, lengths[1], 0)
        slot, start = ring.at[lax.rem(i, splits.slots)], tile * splits.block_k
        keys = (k_ref, v_ref)[which], slot, place_of_key(problem, k_ref, table_ref)
        own_keys.copy(*keys, b, head, start, stop_key, table_ref, stride=stride, interpret=interpret)

    group_rows = jnp.int32(problem.T * problem.group)
    place = place_of_query(problem)
    own_keys.copy(q_ref, q_smem, place, b, head, first_row, group_rows, interpret=interpret)
    for i in range(splits.slots):
        fetch(jnp.int32(i), i % 2)

    shape = WARPS * splits.block_r, own
    rows = first_row + row_of(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ACC))
    own_cols = warp_of(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ACC)) * own
    own_cols += plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ACC)
    positions = offset + lax.div(rows, jnp.int32(problem.group))

    own_keys.wait(splits.slots, interpret=interpret, for_others=True)
    q = in_pieces(plgpu.load(q_smem, layout=own_keys.QUERIES, optimized=False))
    k_layout = own_keys.keys_layout(splits.block_k)
    v_layout = own_keys.values_layout(splits.block_k, problem.dtype.itemsize)

    def one_key_tile(j, state):
        m, l, acc = state
        i = 2 * (j - first)
        own_keys.wait(splits.slots - 1, interpret=interpret)
        k = in_pieces(plgpu.load(ring.at[lax.rem(i, splits.slots)], layout=k_layout, optimized=False))
        s = own_keys.scores(q, k, interpret=interpret) * (problem.scale * LOG2_E)
        fetch(i + splits.slots, splits.slots % 2)
        if problem.soft_cap is not None:
            cap = LOG2_E * problem.soft_cap
            s = cap * jnp.tanh(s / cap)
        s = jnp.where(visible(positions, own_cols + j * splits.block_k, problem.band, *stops), s, -jnp.inf)
        m, l, alpha, p = online_softmax.step(m, l, s, lambda row: along(row, s.shape, 0))
        own_keys.wait(splits.slots - 1, interpret=interpret)
        v = in_pieces(plgpu.load(ring.at[lax.rem(i + 1, splits.slots)], layout=v_layout, optimized=False))
        p = [p.astype(problem.dtype)] if interpret else as_operand(p, count, dtype, interpret=False)
        acc = own_keys.add_weighted(acc * along(alpha, acc.shape, 0), p, v, v_layout, interpret=interpret)
        fetch(i + 1 + splits.slots, 1 - splits.slots % 2)
        return m, l, acc

    columns = ring.shape[-1]
    state = full(shape[:1], -jnp.inf, ROWS), full(shape[:1], 0, ROWS), full((shape[0], columns), 0)
    m, l, acc = lax.fori_loop(first, stop, one_key_tile, state)
    own_keys.wait(0, interpret=interpret)
    acc, logs = online_softmax.finish(m, l, acc, along=lambda row: along(row, acc.shape, 0), log_e=1)
    if interpret:
        places = pl.ds(first_row, splits.block_r), pl.ds(WARPS * program, WARPS)
        parts_ref[b, head, *places] = own_keys.of_warps(acc, splits.block_r).swapaxes(0, 1)
        logs_ref[b, head, *places] = own_keys.of_warps(logs[:, None], splits.block_r)[..., 0].swapaxes(0, 1)
        return

    def place_of_log(i, b, head, first_row, program):
        _, K, R, _ = logs_ref.shape
        row = first_row + row_of(i)
        return (b * K + head) * R + row, program * WARPS + warp_of(i), row < problem.T * problem.group

    def place_of_part(i, column, *scalars):
        row, part, is_row = place_of_log(i, *scalars)
        return row * logs_ref.shape[-1] + part, column, is_row

    own_keys.store(parts_ref, acc, ACC, place_of_part, b, head, first_row, program)
    own_keys.store(logs_ref, logs, ROWS, place_of_log, b, head, first_row, program)


def merge_kernel(parts_ref, logs_ref, sinks_ref, out_ref, lse_ref, *, problem, interpret):
    """Writes out and lse of one row from its sink and from its parts, of which every warp reads a quarter."""
    b, t, n = (lax.axis_index(name) for name in ("batch", "query", "head"))
    head, row = lax.div(n, problem.group), t * problem.group + lax.rem(n, problem.group)
    count, columns = logs_ref.shape[-1], parts_ref.shape[-1]
    chunk = next(
        WARPS * programs for programs in range(merged_programs(columns), 0, -1) if count % (WARPS * programs) == 0
    )
    shape, a_row = (chunk, columns), functools.partial(full, (columns,), layout=PARTS.reduce(0))

    def one_chunk(i, state):
        m, l, acc = state
        index = b, head, row, pl.ds(i * chunk, chunk)
        logs = plgpu.load(logs_ref.at[index], layout=PARTS.reduce(1), optimized=False)
        parts = plgpu.load(parts_ref.at[index], layout=PARTS, optimized=False)
        own = m, l, along(logs, shape, 0), lambda row: along(row, shape, 1)
        m, l, alpha, weights = online_softmax.step(*own, axis=0)
        return m, l, alpha * acc + (weights * parts).sum(axis=0)

    has_sink = sinks_ref is not None
    sink = a_row(Extras.sink_of(sinks_ref, b, n) if has_sink else -jnp.inf)
    m_start = LOG2_E * sink
    state = m_start, a_row(float(has_sink)), a_row(0)
    m, l, acc = lax.fori_loop(0, count // chunk, one_chunk, state)
    out, lse = online_softmax.finish(m, l, acc)
    if has_sink:
        lse = jnp.where((l == 1) & (m == m_start), sink, lse)  # as it was given, not via base 2 and back
    out = out.astype(out_ref.dtype)
    if interpret:
        out_ref[b, t, n], lse_ref[b, n, t] = out[: problem.H], lse[0]
        return

    def place_of_out(column, b, t, n):
        return (b * problem.T + t) * problem.N + n, column, column < problem.H

    def place_of_lse(column, b, t, n):
        return b * problem.N + n, column + t, column < 1

    own_keys.store(out_ref, out, PARTS.reduce(0), place_of_out, b, t, n)
    own_keys.store(lse_ref, lse, PARTS.reduce(0), place_of_lse, b, t, n)


def place_of_query(problem):
    """Where row r of a head is in queries that are taken for rows, as `own_keys.copy` asks."""
    T, N, group = problem.T, problem.N, problem.group
    return lambda r, b, head, entry: (b * T + r // group) * N + head * group + r % group


def place_of_key(problem, k_ref, table_ref):
    """The same for the key at a position, in one piece or in pages."""
    S, K = problem.S, problem.K
    if table_ref is None:
        return lambda position, b, head, entry: (b * S + position) * K + head
    page, width = k_ref.shape[1], table_ref.shape[1]
    number = lambda position, b, entry: entry(b * width + position // page)
    return lambda position, b, head, entry: (number(position, b, entry) * page + position % page) * K + head


def length_of(lengths_ref, b, longest):
    """How many positions are real: a static length, or the one that a ref holds, cut to the array."""
    return longest if lengths_ref is None else jnp.clip(lengths_ref[b], 0, longest)


def tiles_of_rows(problem, splits):
    """How many tiles the rows of a key head are."""
    return pl.cdiv(problem.T * problem.group, splits.block_r)


def select_splits(problem, in_pages=False, memory=None, **overrides):
    """The `Splits` of a problem. memory: bytes of shared memory of a program, by default of the GPU that computes.

    One program with a long ring is enough for an SM, unless there are more heads than SMs, or pages to be looked for:
    then two share it, if their rings fit. Each head gets an equal share of the programs for which all SMs have room,
    rounded down, but one at least, as long as each has `FEWEST_KEYS` keys. overrides: fields of Splits to be taken as
    given.
    """
    memory = memory or shared_memory()
    H, itemsize = padded_head_dim(problem.H, problem.dtype), problem.dtype.itemsize
    rows = problem.T * problem.group
    block_r, block_k = overrides.get("block_r", WARP_ROWS * (1 + (rows > WARP_ROWS and H <= 128))), 64
    block_k = overrides.get("block_k", block_k)
    fitting = lambda programs: (memory // programs - 2048 - block_r * H * itemsize) // (block_k * H * itemsize)
    heads, sms = problem.B * problem.K * pl.cdiv(rows, block_r), core_count(NUM_SMS)
    of_an_sm = 2 if (in_pages or heads > sms) and fitting(2) >= 2 else 1
    slots = min(MOST_SLOTS, max(1, fitting(of_an_sm)))
    programs = max(1, min(of_an_sm * sms // heads, keys_seen(problem) // FEWEST_KEYS))
    programs = programs // merged_programs(H) * merged_programs(H) or programs
    return Splits(block_r, block_k, slots, programs)._replace(**overrides)


def merged_programs(columns):
    """The parts of how many programs are merged in one step, at most."""
    return MERGED // (WARPS * columns)


def decode(call, *, interpret=False, **options):
    """Attention of a checked `Call` with few queries: out (B, T, N, H) in the dtype of query, lse (B, N, T) float32.

    Its keys may lie in pages. Beyond its inputs and outputs it needs H' + 1 float32 numbers for each row of every tile
    and each warp of every program. options: fields of `Splits`.
    """
    problem, of_both = call.problem, {"problem": call.problem, "interpret": bool(interpret)}
    splits = select_splits(problem, call.page_table is not None, **options)
    B, T, N, K = problem.B, problem.T, problem.N, problem.K
    columns, dtype = padded_head_dim(problem.H, problem.dtype), problem.dtype
    row_tiles, parts = tiles_of_rows(problem, splits), WARPS * splits.programs
    smem = lambda *shape: plgpu.SMEM((*shape, columns), dtype, transforms=swizzled(dtype))

    # Neighbours read other heads of the same keys, which lie side by side.
    out, logs = plgpu.kernel(
        functools.partial(decode_kernel, splits=splits, **of_both),
        out_type=[
            jax.ShapeDtypeStruct((B, K, row_tiles * splits.block_r, parts, columns), jnp.float32),
            jax.ShapeDtypeStruct((B, K, row_tiles * splits.block_r, parts), jnp.float32),
        ],
        scratch_types=[smem(splits.block_r), smem(splits.slots, splits.block_k)],
        grid=(B, splits.programs, K * row_tiles),
        grid_names=("batch", "program", "head"),
        kernel_name="flash_attention_decode",
        # What shared memory needs in order, the waits for copies have. Reductions stay within a warp.
        # The approximate tanh has eleven bits, too few for a cap.
        compiler_params=plgpu.CompilerParams(
            approx_math=problem.soft_cap is None, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret or None,
    )(call.query, call.key, call.value, call.page_table, call.query_lengths, call.key_lengths)
    return plgpu.kernel(
        functools.partial(merge_kernel, **of_both),
        out_type=[jax.ShapeDtypeStruct(call.query.shape, dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        grid=(B, T, N),
        grid_names=("batch", "query", "head"),
        kernel_name="flash_attention_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )(out, logs, call.extras.sinks)
