"""The Hopper backward kernels: the gradients of attention by TMA, wgmma and warp specialisation.

The equations are those of the portable backward (FlashAttention-2, arXiv 2307.08691, algorithm 2).
With L = log2(e), p is computed by exp2, and delta comes from outside, of an out with all of its float32 bits:

    delta  = rowsum(out * do) - dlse
    p      = exp2(scale L q k^T - L lse)
    dp     = do v^T
    ds     = p * (dp - delta)
    dv     = p^T do,   dk = scale ds^T q,   dq = scale ds k

A row of ds adds up to dlse, and dq is a sum of keys with these weights. So an error of delta comes back in dq, times
the mean of the keys that the row sees. An out that was rounded to 16 bits has such an error wherever values have a
part in common, and so has one whose weights were rounded for the product with v but not for their sum: see `forward`.

dkv_kernel and fused_kernel (FlashAttention-3, arXiv 2407.08608) own block_k keys of one key/value
head, 64 for each compute warpgroup, and run over the tiles of queries that see them. They compute the
*transposed* tiles, s^T = k q^T and dp^T = v do^T: then p^T and ds^T lie in the registers just as the
products p^T do and ds^T q want their left operand. dq is the difference:

    split  dkv_kernel leaves it to dq_kernel, which owns tiles of queries and computes s and dp once
           more: 7 products for each pair of tiles, and the same bits every time.
    fused  fused_kernel puts ds^T into shared memory, its warpgroups share out ds k between them, and
           TMA adds the product to a float32 dq in memory: 5 products, and a dq whose rounding
           depends on the order in which the additions arrive. The zeros that it adds to are written
           by XLA or, with `zeros_ahead`, by the programs of earlier heads (see heads_ahead).

One more warpgroup, the memory warpgroup, computes nothing: it keeps a ring of `stages` tiles filled.

Refs in GMEM (G is the group, N // K query heads of one key/value head; T' is T rounded up):

    q_ref, do_ref, dq_ref           (B, T, N, H); dq_ref is float32 in the fused form
    k_ref, v_ref, dk_ref, dv_ref    (B, S, K, H)
    lse_ref, delta_ref              (B, N, T') float32: L lse and delta

T and S are rounded up to a multiple of 8 and H to 64, 128 or 256 (see _padded). Positions past the
end are zeros in every tile: a query of zeros with do = delta = lse = 0 adds nothing to dk and dv,
and a key of zeros is masked, for its p could overflow.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.device import core_count
from helpers.attention.hopper.table import tuned_tiles
from helpers.attention.hopper.warpgroup import (
    CACHED,
    COLUMNS,
    MATRIX,
    NUM_SMS,
    REGISTERS,
    ROWS,
    SWIZZLED,
    anew,
    awaited,
    issue,
    multiply_add,
    padded_head_dim,
)
from helpers.attention.low_bits import with_low_bits
from helpers.attention.masking import NO_BAND, key_tiles, query_tiles
from helpers.attention.portable.tiles import LOG2_E
from helpers.attention.problem import Call

GRID_LIMIT = 65535  # programs along the axis into which Mosaic folds all but the last two of a grid
WIDEST = 128  # columns of dk and dv that the registers of a warpgroup hold beside s and dp
# With so few tiles of queries LLVM may see that a loop over them has one step or two, and count the steps by
# a predicate. ptxas before CUDA 13.2 then computes `first` in each step from the predicate of that step (see
# tests/one_turn_or_two.ptx): it got queries 64 to 127 wrong. LLVM does not see through the barrier of `anew`.
FEW_TILES = 4
WAVES_AHEAD = 2  # of programs, between one that writes zeros and those that add to them
ROWS_OF_WGMMA = 64  # rows of a product that one warpgroup owns
SWIZZLED_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # SWIZZLED for float32


def exp2_of_logits(s, lse, axis, problem):
    """p of a tile of logits: exp2(scale L s - L lse), with one lse for each index of an axis."""
    return jnp.exp2((problem.scale * LOG2_E) * s - lax.broadcast_in_dim(lse, s.shape, [axis]))


def lse_and_awaited(s, wait_n, lse_ref):
    """The lse of each column of s, and s when it is done: lse is on its way meanwhile, but in wide tiles: slower so."""
    early = lse_ref.shape[0] <= 64
    if early:
        lse = plgpu.load(lse_ref, layout=COLUMNS)
    s = awaited(s, wait_n)
    return lse if early else plgpu.load(lse_ref, layout=COLUMNS), s


def hide(p, q_start, k_start, keys_axis, problem, tiles):
    """p masked: zeros where the query does not see the key, or where there is no key.

    `masking.visible` in a form that needs few registers: it compares columns with a
    number for each row. An optimization barrier keeps that number in the step, where
    the compiler would keep a difference of positions for each entry of p.
    """
    rows = anew(plgpu.broadcasted_iota(jnp.int32, p.shape[:1], 0, layout=ROWS))
    cols = plgpu.broadcasted_iota(jnp.int32, p.shape, 1, layout=MATRIX)
    wide = lambda row: lax.broadcast_in_dim(row, p.shape, [0])
    if problem.band.right is not None:
        ahead = q_start + problem.band.right - k_start
        by_keys = keys_axis == 0
        seen = cols >= wide(rows - ahead) if by_keys else cols <= wide(rows + ahead)
        p = jnp.where(seen, p, 0.0)
    if problem.S % tiles.block_k:
        keys = wide(rows) if keys_axis == 0 else cols
        p = jnp.where(keys < problem.S - k_start, p, 0.0)
    return p


def for_each_query_tile(problem, tiles, kv, k_start, body, masked_body, carry):
    """Run carry = body(head, i, step, carry) over the tiles of queries that see these keys, in all heads of a group.

    masked_body serves the tiles that see some of the keys only, and the keys that end within them.
    There is at least one step a head, so that a pipeline has something to do: a tile that sees nothing.
    It is one loop (or two). A loop in a loop made ptxas serialise the products of the delayed order, before `issue`.
    """
    block_q, block_k, band, group = tiles.block_q, tiles.block_k, problem.band, problem.group
    first, stop = query_tiles(k_start, k_start + block_k, block_q, band, problem.T, problem.S, xp=jnp)
    first = jnp.minimum(first, pl.cdiv(problem.T, block_q) - 1)
    stop = jnp.maximum(stop, first + 1)
    if band != NO_BAND and pl.cdiv(problem.T, block_q) <= FEW_TILES:
        first = anew(first)
    partial = band.right is not None or problem.S % block_k != 0
    all_from = first
    if band.right is not None:
        last_key = k_start + block_k - 1
        all_from = jnp.clip(pl.cdiv(last_key - band.right, block_q), first, stop)
    if problem.S % block_k:
        all_from = jnp.where(k_start + block_k > problem.S, stop, all_from)

    def turned(i):
        """Without a mask, programs start at different tiles of queries.

        So they do not add to one tile of dq at once.
        """
        return lax.rem(i + k_start // block_k, stop) if band == NO_BAND else i

    def tile_by_tile(n, start, end):
        """(query head, tile of queries) of step n, all heads of a tile before the next.

        For causal calls. Who reads a tile at the same time as others finds it in the L2
        cache. After the tiles that the mask cuts, the programs that start first walk
        down, side by side. They end one after the other, the shortest first, and those
        that take their places walk up: each begins at its own keys, just when those
        before it come by.
        """
        up = lax.rem(lax.div(place_in_line(problem, tiles), core_count(NUM_SMS)), 2) == 1
        i = lax.div(n, group)
        return kv * group + lax.rem(n, group), jnp.where(up, start + i, end - 1 - i)

    def all_heads(body, start, end, state):
        """The tiles from start to end, in all heads of the group; state: (step, carry)."""
        steps = group * (end - start)

        def loop(place):
            one_step = lambda n, state: (state[0] + 1, body(*place(n), *state))
            return lax.fori_loop(0, steps, one_step, state)

        if group == 1:
            return loop(lambda n: (kv, turned(start + n)))
        if band != NO_BAND:
            return loop(lambda n: tile_by_tile(n, start, end))

        # One head after the other. With head and tile computed from n, in fewer
        # instructions, one of these calls took a tenth longer on an H200 (H = 128,
        # T = 4096, 8:1).
        def one_step(_, state):
            g, i, *state = state
            last = i + 1 == end
            place = jnp.where(last, g + 1, g), jnp.where(last, start, i + 1)
            return *place, state[0] + 1, body(kv * group + g, turned(i), *state)

        place = jnp.int32(0), jnp.asarray(start, jnp.int32)
        return lax.fori_loop(0, steps, one_step, (*place, *state))[2:]

    state = (jnp.int32(0), carry)
    if partial:
        state = all_heads(masked_body, first, all_from, state)
    return all_heads(body, all_from, stop, state)


def load_keys_then_queries(refs, smems, loaded, free, problem, tiles, me_b_kv_k_start):
    """What the memory warpgroup of dkv_kernel and fused_kernel does."""
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref = refs
    q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem = smems
    (kv_loaded, q_loaded, do_loaded), (q_free, do_free) = loaded, free
    b, kv, k_start = me_b_kv_k_start
    plgpu.set_max_registers(REGISTERS[tiles.warpgroups][1], action="decrease")
    parts, warpgroups, _, width = k_smem.shape
    for part, wg in itertools.product(range(parts), range(warpgroups)):
        keys = b, pl.ds(k_start + wg * ROWS_OF_WGMMA, ROWS_OF_WGMMA), kv, pl.ds(part * width, width)
        plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[part, wg], kv_loaded)
        plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[part, wg], kv_loaded)
    q_slots, do_slots = q_smem.shape[0], do_smem.shape[0]

    def one_step(head, i, step, _):
        rows = pl.ds(i * tiles.block_q, tiles.block_q)
        slot = lax.rem(step, q_slots)
        plgpu.barrier_wait(q_free.at[slot])
        plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[slot], q_loaded.at[slot])
        plgpu.copy_gmem_to_smem(lse_ref.at[b, head, rows], lse_smem.at[slot], q_loaded.at[slot])
        slot = lax.rem(step, do_slots)
        plgpu.barrier_wait(do_free.at[slot])
        plgpu.copy_gmem_to_smem(do_ref.at[b, rows, head], do_smem.at[slot], do_loaded.at[slot])
        plgpu.copy_gmem_to_smem(delta_ref.at[b, head, rows], delta_smem.at[slot], do_loaded.at[slot])

    for_each_query_tile(problem, tiles, kv, k_start, one_step, one_step, None)
    for slot in range(q_slots):
        plgpu.barrier_wait(q_free.at[slot])
    for slot in range(do_slots):
        plgpu.barrier_wait(do_free.at[slot])


def store_dk_and_dv(dk, dv, k_mine, v_mine, dk_mine, dv_mine, problem):
    """Write a warpgroup's rows of dk and dv by way of the shared memory that held its keys and values."""
    k_mine[...] = (problem.scale * dk).astype(problem.dtype)
    v_mine[...] = dv.astype(problem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k_mine, dk_mine)
    plgpu.copy_smem_to_gmem(v_mine, dv_mine)
    plgpu.wait_smem_to_gmem(0)


def dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref,
    q_smem, do_smem, lse_smem, delta_smem, k_smem, v_smem, spare,
    kv_loaded, q_loaded, do_loaded, q_free, do_free,
    *, problem, tiles, interpret,
):  # fmt: skip
    """Writes dk and dv of block_k keys, or of a head of 256 the 128 columns that registers have room for.

    q_smem, do_smem        (stages, block_q, H), the ring that the memory warpgroup fills
    lse_smem, delta_smem   (stages, block_q)
    k_smem, v_smem         (parts, warpgroups, 64, H / parts): 64 keys for each compute warpgroup
    spare                  see multiply_add
    """
    b, kv, me = lax.axis_index("batch"), kv_head_here(problem, tiles), lax.axis_index("warpgroup")
    k_start = lax.axis_index("tile") * tiles.block_k
    parts, _, _, width = k_smem.shape
    columns = pl.ds(lax.axis_index("part") * width if parts > 1 else 0, width)
    multiply_add_ = functools.partial(multiply_add, interpret=interpret)

    def compute():
        plgpu.set_max_registers(REGISTERS[tiles.warpgroups][0], action="increase")
        my_start = k_start + me * ROWS_OF_WGMMA
        for slot in range(tiles.stages):
            plgpu.barrier_arrive(q_free.at[slot])
            plgpu.barrier_arrive(do_free.at[slot])
        plgpu.barrier_wait(kv_loaded)

        def accumulate(dk_acc, dv_acc):
            def one_step(masked, head, i, step, _):
                wg, slot = anew(me), lax.rem(step, tiles.stages)
                q_tile, do_tile = q_smem.at[slot], do_smem.at[slot]
                p_spare, ds_spare = (None, None) if spare is None else (spare.at[wg, 0], spare.at[wg, 1])

                def pairs(own, tile):
                    return [(own.at[part, wg], tile.at[:, pl.ds(part * width, width)]) for part in range(parts)]

                plgpu.barrier_wait(q_loaded.at[slot])
                s = issue(pairs(k_smem, q_tile), 1, interpret)
                plgpu.barrier_wait(do_loaded.at[slot])
                dp = issue(pairs(v_smem, do_tile), 1, interpret)
                lse, s = lse_and_awaited(s, 1, lse_smem.at[slot])
                p = exp2_of_logits(s, lse, 1, problem)
                if masked:
                    # without `anew` ptxas of CUDA 13.0 serialised the products at H = 64, before `issue` overwrote sums
                    p = hide(p, anew(i * tiles.block_q), my_start, 0, problem, tiles)
                multiply_add_(dv_acc, p.astype(problem.dtype), do_tile.at[:, columns], p_spare)
                dp = awaited(dp, 1)
                delta = plgpu.load(delta_smem.at[slot], layout=COLUMNS)
                ds = (p * (dp - lax.broadcast_in_dim(delta, dp.shape, [1]))).astype(problem.dtype)
                multiply_add_(dk_acc, ds, q_tile.at[:, columns], ds_spare)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(do_free.at[slot])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(q_free.at[slot])

            steps = (functools.partial(one_step, masked) for masked in (False, True))
            for_each_query_tile(problem, tiles, kv, k_start, *steps, None)
            return dk_acc[...], dv_acc[...]

        acc = plgpu.ACC((ROWS_OF_WGMMA, width), jnp.float32)
        dk, dv = pl.run_scoped(accumulate, acc, acc)
        mine = b, pl.ds(my_start, ROWS_OF_WGMMA), kv, columns
        store_dk_and_dv(dk, dv, k_smem.at[0, me], v_smem.at[0, me], dk_ref.at[mine], dv_ref.at[mine], problem)

    def load():
        refs = q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref
        smems = q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem
        loaded, free = (kv_loaded, q_loaded, do_loaded), (q_free, do_free)
        load_keys_then_queries(refs, smems, loaded, free, problem, tiles, (b, kv, k_start))

    pl.when(me < tiles.warpgroups)(compute)
    pl.when(me == tiles.warpgroups)(load)


def fused_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref,
    q_smem, do_smem, lse_smem, delta_smem, k_smem, v_smem, ds_smem, dq_smem, spare,
    kv_loaded, q_loaded, do_loaded, q_free, do_free, ds_ready,
    *, dq_ref, problem, tiles, interpret,
):  # fmt: skip
    """Writes dk and dv of block_k keys and adds their part of dq.

    As dkv_kernel, with parts = 1, and
    q_smem    (stages + delayed, block_q, H)
    ds_smem   (2, warpgroups, 64, block_q): ds^T of two steps
    dq_smem   (warpgroups, 64, H or H / warpgroups): the part of dq that a warpgroup computes

    A warpgroup's ds k needs the ds of all. So ds is published before dv is issued, and the tensor core has
    that product to do while the warpgroups wait for one another. With tiles.delayed, dv goes before ds: a step
    first issues its own s and then finishes the step before, whose ds the others have had time to publish.

    With tiles.zeros_ahead a program first sends zeros on their way to its share of the dq of a later head. At its
    end, where it waits for its stores in any case, it says so to the programs of that head.
    """
    b, kv, me = lax.axis_index("batch"), kv_head_here(problem, tiles), lax.axis_index("warpgroup")
    k_start = lax.axis_index("tile") * tiles.block_k
    block_q, stages, warpgroups, delayed = tiles.block_q, tiles.stages, tiles.warpgroups, tiles.delayed
    keeps_addresses = tiles.keeps_addresses and problem.group == 1
    multiply_add_ = functools.partial(multiply_add, interpret=interpret)
    ahead, heads = heads_ahead(problem, tiles), problem.B * problem.K
    this_head = b * problem.K + kv
    zeroed = None  # for each key/value head of the batch, how many warpgroups have written their zeros to its dq
    if ahead and not interpret:
        zeroed = pl.get_global(plgpu.SemaphoreType.REGULAR((heads,)))  # called again, it makes another array

    def compute():
        plgpu.set_max_registers(REGISTERS[warpgroups][0], action="increase")
        k_mine, v_mine, my_start = k_smem.at[0, me], v_smem.at[0, me], k_start + me * ROWS_OF_WGMMA
        for slot in range(stages + delayed):
            plgpu.barrier_arrive(q_free.at[slot])
        for slot in range(stages):
            plgpu.barrier_arrive(do_free.at[slot])
        # This warpgroup's part of a tile of dq: 64 of its rows, or all of them and some columns.
        width = dq_smem.shape[-1]
        my_rows = me * ROWS_OF_WGMMA if block_q > ROWS_OF_WGMMA else 0
        my_columns = pl.ds(me * width if width < problem.H else 0, width)
        key_tiles_in_all = pl.cdiv(problem.S, tiles.block_k)

        def part_of_dq(b, i, head, plane):
            ref = dq_ref.at[plane] if interpret else dq_ref  # see _zeros
            return ref.at[b, pl.ds(i * block_q + my_rows, ROWS_OF_WGMMA), head, my_columns]

        def write_zeros():
            """To every key_tiles_in_all-th tile of the queries of a later head; not awaited."""
            dq_smem.at[me][...] = plgpu.layout_cast(jnp.zeros((ROWS_OF_WGMMA, width), jnp.float32), MATRIX)
            plgpu.commit_smem()
            later_b, later_kv = lax.div(this_head + ahead, problem.K), lax.rem(this_head + ahead, problem.K)
            mine, tiles_in_all = lax.axis_index("tile"), pl.cdiv(problem.T, block_q)

            def one_tile(n, _):
                for g in range(problem.group):
                    head, i = later_kv * problem.group + g, mine + n * key_tiles_in_all
                    plgpu.copy_smem_to_gmem(dq_smem.at[me], part_of_dq(later_b, i, head, key_tiles_in_all))

            count = lax.div(tiles_in_all - mine + key_tiles_in_all - 1, key_tiles_in_all)
            lax.fori_loop(0, count, one_tile, None)

        def await_zeros():
            writers = key_tiles_in_all * warpgroups
            plgpu.semaphore_wait(zeroed.at[this_head], writers, decrement=False, memory_scope="gpu")

        def say_zeros_are_there():
            plgpu.semaphore_signal(zeroed.at[this_head + ahead], memory_scope="gpu")

        def publish_ds(ds, slot):
            ds_smem.at[slot, me][...] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(ds_ready)

        def accumulate(dk_acc, dv_acc):
            def finish(work, step, ds=None):
                """Add ds k of a published tile to dq, and issue its part of dk, not awaited."""
                head, i, q_slot, ds_slot = work
                plgpu.barrier_wait(ds_ready)

                def ds_and_k(wg):
                    rows = pl.ds(my_rows, ROWS_OF_WGMMA)
                    return ds_smem.at[ds_slot, wg, :, rows], k_smem.at[0, wg, :, my_columns]

                dq = issue([ds_and_k(wg) for wg in range(warpgroups)], 0, interpret)
                mine = ds_smem.at[ds_slot, me] if ds is None or interpret else ds
                multiply_add_(dk_acc, mine, q_smem.at[q_slot], None)
                dq = awaited(dq, 1)
                pl.when(step > 0)(lambda: add_to_dq(dq, head, i))

            def add_to_dq(dq, head, i):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_smem.at[me][...] = dq
                plgpu.commit_smem()
                mine = part_of_dq(b, i, head, lax.axis_index("tile"))
                if interpret:  # it knows no addition: each tile of keys has a plane of its own
                    plgpu.copy_smem_to_gmem(dq_smem.at[me], mine)
                else:
                    plgpu.copy_smem_to_gmem(dq_smem.at[me], mine, reduction_op="add")

            def one_step(masked, head, i, step, before):
                wg = me if keeps_addresses else anew(me)
                q_slot, do_slot = lax.rem(step, stages + delayed), lax.rem(step, stages)
                ds_slot = lax.rem(step, 2)
                q_tile, do_tile = q_smem.at[q_slot], do_smem.at[do_slot]
                p_spare = None if spare is None else spare.at[me]

                plgpu.barrier_wait(q_loaded.at[q_slot])
                s = issue([(k_smem.at[0, wg], q_tile)], 1, interpret)
                if delayed:
                    finish(before, step)
                plgpu.barrier_wait(do_loaded.at[do_slot])
                dp = issue([(v_smem.at[0, wg], do_tile)], 1, interpret)
                lse, s = lse_and_awaited(s, 2 if delayed else 1, lse_smem.at[q_slot])
                p = exp2_of_logits(s, lse, 1, problem)
                if masked:
                    p = hide(p, i * block_q, my_start, 0, problem, tiles)
                p_16 = p.astype(problem.dtype)
                if delayed:
                    multiply_add_(dv_acc, p_16, do_tile, p_spare)
                dp = awaited(dp, 1 if delayed else 0)
                if delayed:  # dk of the step before is done as well
                    pl.when(step > 0)(lambda: plgpu.barrier_arrive(q_free.at[before[2]]))
                delta = plgpu.load(delta_smem.at[do_slot], layout=COLUMNS)
                ds = (p * (dp - lax.broadcast_in_dim(delta, dp.shape, [1]))).astype(problem.dtype)
                publish_ds(ds, ds_slot)
                work = head, i, q_slot, ds_slot
                if not delayed:
                    multiply_add_(dv_acc, p_16, do_tile, p_spare)
                    finish(work, step + 1, ds)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(do_free.at[do_slot])
                if not delayed:
                    plgpu.barrier_arrive(q_free.at[q_slot])
                return work

            if delayed:  # before the first step there is a ds of zeros, which adds nothing to dk
                publish_ds(plgpu.layout_cast(jnp.zeros((ROWS_OF_WGMMA, block_q), problem.dtype), MATRIX), 1)
            if ahead:
                pl.when(this_head + ahead < heads)(write_zeros)
            if zeroed is not None:
                pl.when(this_head >= ahead)(await_zeros)
            plgpu.barrier_wait(kv_loaded)
            nothing = kv * problem.group, jnp.int32(0), jnp.int32(0), jnp.int32(1)
            steps = (functools.partial(one_step, masked) for masked in (False, True))
            step, last = for_each_query_tile(problem, tiles, kv, k_start, *steps, nothing)
            if delayed:
                finish(last, step)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(q_free.at[last[2]])
            return dk_acc[...], dv_acc[...]

        acc = plgpu.ACC((ROWS_OF_WGMMA, problem.H), jnp.float32)
        dk, dv = pl.run_scoped(accumulate, acc, acc)
        plgpu.barrier_arrive(ds_ready)  # the other warpgroups are done with k_mine
        plgpu.barrier_wait(ds_ready)
        mine = b, pl.ds(my_start, ROWS_OF_WGMMA), kv
        store_dk_and_dv(dk, dv, k_mine, v_mine, dk_ref.at[mine], dv_ref.at[mine], problem)
        if zeroed is not None:
            pl.when(this_head + ahead < heads)(say_zeros_are_there)

    def load():
        refs = q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref
        smems = q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem
        loaded, free = (kv_loaded, q_loaded, do_loaded), (q_free, do_free)
        load_keys_then_queries(refs, smems, loaded, free, problem, tiles, (b, kv, k_start))

    pl.when(me < warpgroups)(compute)
    pl.when(me == warpgroups)(load)


def dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    q_smem,
    do_smem,
    lse_smem,
    delta_smem,
    k_smem,
    v_smem,
    spare,
    q_loaded,
    k_loaded,
    v_loaded,
    k_free,
    v_free,
    *,
    problem,
    tiles,
    interpret,
):
    """Writes dq of block_q queries.

    q_smem, do_smem        (warpgroups, 64, H): 64 queries for each compute warpgroup
    lse_smem, delta_smem   (warpgroups, 64)
    k_smem, v_smem         (stages, block_k, H), the ring that the memory warpgroup fills
    """
    block_k, stages, warpgroups = tiles.block_k, tiles.stages, tiles.warpgroups
    block_q = warpgroups * ROWS_OF_WGMMA
    T, S, band = problem.T, problem.S, problem.band
    b, head, me = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
    # Under a causal mask the last queries see the most keys: they go first.
    q_start = (pl.cdiv(T, block_q) - 1 - lax.axis_index("tile")) * block_q
    first, stop = key_tiles(q_start, q_start + block_q, block_k, band, T, S, xp=jnp)
    all_until = S // block_k
    if band.right is not None:
        all_until = jnp.minimum(all_until, lax.div(q_start + 1 + band.right, block_k))
    multiply_add_ = functools.partial(multiply_add, interpret=interpret)

    def compute():
        plgpu.set_max_registers(REGISTERS[warpgroups][0], action="increase")
        q_mine = q_smem.at[me]
        for slot in range(stages):
            plgpu.barrier_arrive(k_free.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
        plgpu.barrier_wait(q_loaded)
        lse = plgpu.load(lse_smem.at[me], layout=ROWS)
        delta = plgpu.load(delta_smem.at[me], layout=ROWS)

        def accumulate(dq_acc):
            def one_step(masked, j, _):
                wg, slot = anew(me), lax.rem(j - first, stages)
                k_tile, v_tile = k_smem.at[slot], v_smem.at[slot]

                plgpu.barrier_wait(k_loaded.at[slot])
                s = issue([(q_smem.at[wg], k_tile)], 1, interpret)
                plgpu.barrier_wait(v_loaded.at[slot])
                dp = issue([(do_smem.at[wg], v_tile)], 1, interpret)
                s = awaited(s, 1)
                p = exp2_of_logits(s, lse, 0, problem)
                if masked:
                    p = hide(p, q_start + me * ROWS_OF_WGMMA, j * block_k, 1, problem, tiles)
                dp = awaited(dp, 0)
                plgpu.barrier_arrive(v_free.at[slot])
                ds = (p * (dp - lax.broadcast_in_dim(delta, s.shape, [0]))).astype(problem.dtype)
                multiply_add_(dq_acc, ds, k_tile, None if spare is None else spare.at[me])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(k_free.at[slot])

            loop = lambda start, end, masked: lax.fori_loop(start, end, functools.partial(one_step, masked), None)
            middle = jnp.clip(all_until, first, stop)
            loop(first, middle, False)
            if band.right is not None or S % block_k:
                loop(middle, stop, True)
            return dq_acc[...]

        dq = pl.run_scoped(accumulate, plgpu.ACC((ROWS_OF_WGMMA, problem.H), jnp.float32))
        q_mine[...] = (problem.scale * dq).astype(problem.dtype)
        plgpu.commit_smem()
        rows = pl.ds(q_start + me * ROWS_OF_WGMMA, ROWS_OF_WGMMA)
        plgpu.copy_smem_to_gmem(q_mine, dq_ref.at[b, rows, head])
        plgpu.wait_smem_to_gmem(0)

    def load():
        plgpu.set_max_registers(REGISTERS[warpgroups][1], action="decrease")
        for part in range(warpgroups):
            rows = pl.ds(q_start + part * ROWS_OF_WGMMA, ROWS_OF_WGMMA)
            plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[part], q_loaded)
            plgpu.copy_gmem_to_smem(do_ref.at[b, rows, head], do_smem.at[part], q_loaded)
            plgpu.copy_gmem_to_smem(lse_ref.at[b, head, rows], lse_smem.at[part], q_loaded)
            plgpu.copy_gmem_to_smem(delta_ref.at[b, head, rows], delta_smem.at[part], q_loaded)
        kv = lax.div(head, problem.group)

        def one_step(j, _):
            slot = lax.rem(j - first, stages)
            keys = b, pl.ds(j * block_k, block_k), kv
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[slot], k_loaded.at[slot])
            plgpu.barrier_wait(v_free.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[slot], v_loaded.at[slot])

        lax.fori_loop(first, stop, one_step, None)
        for slot in range(stages):
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])

    pl.when(me < warpgroups)(compute)
    pl.when(me == warpgroups)(load)


class Tiles(NamedTuple):
    """How one kernel is launched: tile sizes, tiles in flight, and for fused_kernel three choices more.

    delayed          see fused_kernel
    zeros_ahead      see fused_kernel
    keeps_addresses  the compiler may make the addresses of k and v ahead of the loop, and keep them in
                     registers. Never with groups, where some would be spilled.

    A compute warpgroup owns 64 rows of the kernel's own side: block_k is 64 * warpgroups in dkv_kernel
    and fused_kernel, block_q is in dq_kernel.
    """

    block_q: int
    block_k: int
    stages: int
    warpgroups: int = 2
    delayed: bool = False
    keeps_addresses: bool = False
    zeros_ahead: bool = False


def forms(H):
    """{name: (tiles of fused_kernel, None) or (tiles of dkv_kernel, tiles of dq_kernel)} for a head_dim.

    Up to H = 128 the tiles of each form are the fastest of those tried by hand on an NVIDIA H200 (JAX
    0.11.2), where the tuner has found better ones since; for H = 256 they merely fit.
    """
    if H > 128:
        return {"split": (Tiles(64, 128, 1), Tiles(128, 64, 1))}
    own = Tiles(128 if H <= 64 else 64, 128, 2)
    return {
        "split": (own, Tiles(128, 128, 2)),
        "fused": (own, None),
        "fused, dq delayed": (own._replace(delayed=True), None),
    }


def named(tiles):
    """{kernel: its `Tiles`} of a pair as `forms` has them: "fused" alone, or "dkv" and "dq"."""
    first, second = tiles
    return {"fused": first} if second is None else {"dkv": first, "dq": second}


def pair(fields):
    """The inverse of `named`, from {kernel: fields of its `Tiles`}."""
    tiles = {kernel: Tiles(**own) for kernel, own in fields.items()}
    return (tiles["fused"], None) if "fused" in tiles else (tiles["dkv"], tiles["dq"])


def default_tiles(problem, deterministic=False):
    """The fastest tiles for a problem, a pair as `forms` has them, with `deterministic` of the split form.

    From the tuner's table of this GPU, or `untuned_tiles`.
    """
    tuned = tuned_tiles("deterministic backward" if deterministic else "backward", problem, problem.T)
    return untuned_tiles(problem, deterministic) if tuned is None else pair(tuned)


def untuned_tiles(problem, deterministic=False):
    """The one of `forms` for a problem on a GPU without a table; with `deterministic`, the split form."""
    if deterministic or problem.H > 128:
        return forms(problem.H)["split"]
    return forms(problem.H)["fused" if problem.H <= 64 else "fused, dq delayed"]


def backward(call, out, lse, dout, dlse, low=None, *, tiles=None, deterministic=False, interpret=False):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    out (B, T, N, H), lse (B, N, T) float32 and low (int16, as out) are what `forward` returned; dout and dlse are
    the gradients of the first two. Without low, dq feels what the keys that a row sees have in common.
    16-bit types, full or causal, no lengths. With `deterministic` the same input gives the
    same bits each time. tiles: a pair as `forms` has them. interpret: False, or InterpretGPUParams.
    Beyond inputs and outputs it allocates lse and delta in float32, a float32 dq in the fused form, and
    padded copies where T, S or H ask for them (see _padded).
    """
    problem = call.problem
    at_once = max(1, GRID_LIMIT // (2 * problem.N))
    if problem.B > at_once:
        return _in_pieces(call, (out, lse, dout, dlse, low), at_once, tiles, deterministic, interpret)
    dkv_tiles, dq_tiles = default_tiles(problem, deterministic) if tiles is None else tiles
    if deterministic and dq_tiles is None:
        raise ValueError("the fused form is not deterministic, give tiles of the split form")
    delta = (with_low_bits(out, low) * dout.astype(jnp.float32)).sum(axis=-1).swapaxes(1, 2) - dlse
    head_dim = padded_head_dim(problem.H)
    arrays = (
        *(_padded(array, (1, 8), (3, head_dim)) for array in (call.query, call.key, call.value, dout)),
        *(_padded(array, (2, 128)) for array in (LOG2_E * lse, delta)),
    )
    padded = dataclasses.replace(problem, H=head_dim)
    if dq_tiles is None:
        dq, dk, dv = _fused(padded, arrays, dkv_tiles, interpret)
    else:
        dk, dv = _dkv(padded, arrays, dkv_tiles, interpret)
        dq = _dq(padded, arrays, dq_tiles, interpret)
    dk, dv = (array[:, : problem.S, :, : problem.H] for array in (dk, dv))
    return dq[:, : problem.T, :, : problem.H], dk, dv


def _in_pieces(call, residuals, at_once, tiles, deterministic, interpret):
    """`backward` of some batch entries after others, for more than one grid can hold."""
    arrays, pieces = (call.query, call.key, call.value, *residuals), []
    for start in range(0, call.problem.B, at_once):
        part = slice(start, start + at_once)
        query, key, value, *others = (None if array is None else array[part] for array in arrays)
        problem = dataclasses.replace(call.problem, B=len(query))
        piece = Call(problem, query, key, value, None, None)
        pieces.append(backward(piece, *others, tiles=tiles, deterministic=deterministic, interpret=interpret))
    return tuple(map(jnp.concatenate, zip(*pieces, strict=True)))


def _padded(array, *axes):
    """The array with zeros after it, so that the size of each (axis, multiple) is a multiple of that.

    TMA itself fills with zeros what lies past the end, but a swizzled copy of it takes whole groups
    of 8 positions and of 64 elements of a head.
    """
    after = dict((axis, -array.shape[axis] % multiple) for axis, multiple in axes)
    return jnp.pad(array, [(0, after.get(axis, 0)) for axis in range(array.ndim)]) if any(after.values()) else array


def _zeros(problem, shape, tiles, interpret):
    """A float32 dq with zeros where no program writes them: in the first key/value heads, or in all.

    The interpreter knows no addition: there each tile of keys has a plane of its own, and the zeros the last.
    """
    ahead = heads_ahead(problem, tiles)
    if not ahead:
        dq = jnp.zeros(shape, jnp.float32)
    else:
        dq = jnp.full(shape, jnp.nan, jnp.float32) if interpret else lax.empty(shape, jnp.float32)
        entries, heads = divmod(ahead, problem.K)
        if entries:
            dq = dq.at[:entries].set(0.0)
        if heads:
            dq = dq.at[entries, :, : heads * problem.group].set(0.0)
    if not interpret:
        return dq
    return jnp.concatenate([jnp.zeros((pl.cdiv(problem.S, tiles.block_k), *shape), jnp.float32), dq[None]])


# A ref can be indexed in a traced function only.
@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _fused(problem, arrays, tiles, interpret):
    dq_ref = jax.new_ref(_zeros(problem, arrays[0].shape, tiles, interpret))
    dk, dv = _dkv(problem, arrays, tiles, interpret, dq_ref)
    dq = jax.freeze(dq_ref)
    if interpret:
        dq = dq.sum(axis=0)
    return (problem.scale * dq).astype(problem.dtype), dk, dv


def _launch(kernel, name, out_type, scratch, grid, tiles, interpret, **options):
    return plgpu.kernel(
        lambda *refs: kernel(*refs, tiles=tiles, interpret=bool(interpret), **options),
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"flash_attention_{name}",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret or None,
    )


def _grid(problem, head_axis, tile_count, parts=1, together=None):
    """The programs, the last axis fastest. Full: the tiles of a head together, for they read the same memory.
    Causal: a tile of every head of a section together, longest first, so that short ones fill up the end. A section
    has `together` heads of a batch entry, or all. Where there are few programs in all, a tile of all batch entries
    together: no long one may start late."""
    name, heads = head_axis
    if problem.band == NO_BAND:
        return {"batch": problem.B, name: heads, "part": parts, "tile": tile_count}
    if problem.B * parts * tile_count * heads < 4 * core_count(NUM_SMS):
        return {"part": parts, "tile": tile_count, "batch": problem.B, name: heads}
    sections = {"section": heads // together} if together else {}
    return {"batch": problem.B, "part": parts, **sections, "tile": tile_count, name: together or heads}


def _grid_of_keys(problem, tiles):
    """The programs of dkv_kernel and fused_kernel."""
    parts, together = pl.cdiv(problem.H, WIDEST), heads_together(problem)
    return _grid(problem, ("kv_head", problem.K), pl.cdiv(problem.S, tiles.block_k), parts, together)


def heads_together(problem):
    """How many heads the programs of a causal call work at before the next: a divisor of all, or None for all.

    As many as the cache holds q, do and the float32 dq of. All in calls with groups: there the walks see to the
    cache (`tile_by_tile`).
    """
    if problem.group > 1:
        return None
    cached = max(1, CACHED // (problem.T * problem.H * (2 * problem.dtype.itemsize + 4)))
    return max(count for count in range(1, problem.K + 1) if problem.K % count == 0 and count <= cached)


def heads_ahead(problem, tiles):
    """How many key/value heads after its own a program of fused_kernel writes zeros to dq, 0 where it writes none.

    The programs of that head start two waves later at the soonest, so they hardly wait. They wait for programs
    that a GPU starts before them, and so for none that needs their place.
    """
    grid = _grid_of_keys(problem, tiles)
    few = problem.band != NO_BAND and next(iter(grid)) != "batch"
    if few or not tiles.zeros_ahead:
        return 0
    side_by_side = 1 if problem.band == NO_BAND else grid["kv_head"]  # heads whose programs start together
    sets = 1 + pl.cdiv(WAVES_AHEAD * core_count(NUM_SMS), side_by_side * grid["tile"])
    ahead = sets * side_by_side
    return ahead if ahead < problem.B * problem.K else 0


def kv_head_here(problem, tiles):
    """The key/value head of this program of that grid."""
    grid, within = _grid_of_keys(problem, tiles), lax.axis_index("kv_head")
    return lax.axis_index("section") * grid["kv_head"] + within if "section" in grid else within


def place_in_line(problem, tiles):
    """How many programs of that grid start before this one; where batch entries come one by one, of this entry."""
    first, *others = _grid_of_keys(problem, tiles).items()
    place = 0
    for name, size in others if first[0] == "batch" else (first, *others):
        place = place * size + lax.axis_index(name)
    return place


def _dkv(problem, arrays, tiles, interpret, dq_ref=None):
    H, dtype = problem.H, problem.dtype
    block_q, stages, warpgroups = tiles.block_q, tiles.stages, tiles.warpgroups
    fused = dq_ref is not None
    q_slots, own = stages + tiles.delayed, (warpgroups, ROWS_OF_WGMMA)
    grid = _grid_of_keys(problem, tiles)
    parts = grid["part"]
    kv = plgpu.SMEM((parts, *own, H // parts), dtype, transforms=SWIZZLED)
    scratch = [
        plgpu.SMEM((q_slots, block_q, H), dtype, transforms=SWIZZLED),
        plgpu.SMEM((stages, block_q, H), dtype, transforms=SWIZZLED),
        plgpu.SMEM((q_slots, block_q), jnp.float32),
        plgpu.SMEM((stages, block_q), jnp.float32),
        kv,
        kv,
    ]
    barriers = [
        plgpu.Barrier(num_arrivals=2 * parts * warpgroups),
        plgpu.Barrier(num_arrivals=2, num_barriers=q_slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=q_slots),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    ]
    options = {"problem": problem}
    if fused:
        width = H if block_q > ROWS_OF_WGMMA else H // warpgroups
        scratch += [
            plgpu.SMEM((2, *own, block_q), dtype, transforms=SWIZZLED),
            plgpu.SMEM((*own, width), jnp.float32, transforms=SWIZZLED_32),
            plgpu.SMEM((*own, block_q), dtype) if interpret else None,
        ]
        barriers += [plgpu.Barrier(num_arrivals=warpgroups)]
        options["dq_ref"] = dq_ref
    else:
        scratch += [plgpu.SMEM((warpgroups, 2, ROWS_OF_WGMMA, block_q), dtype) if interpret else None]
    out_type = [jax.ShapeDtypeStruct(array.shape, dtype) for array in arrays[1:3]]
    kernel, name = (fused_kernel, "fused_backward") if fused else (dkv_kernel, "dkv")
    return _launch(kernel, name, out_type, scratch + barriers, grid, tiles, interpret, **options)(*arrays)


def _dq(problem, arrays, tiles, interpret):
    H, dtype = problem.H, problem.dtype
    block_k, stages, warpgroups = tiles.block_k, tiles.stages, tiles.warpgroups
    own = (warpgroups, ROWS_OF_WGMMA)
    mine = plgpu.SMEM((*own, H), dtype, transforms=SWIZZLED)
    numbers = plgpu.SMEM(own, jnp.float32)
    ring = plgpu.SMEM((stages, block_k, H), dtype, transforms=SWIZZLED)
    scratch = [
        mine,
        mine,
        numbers,
        numbers,
        ring,
        ring,
        plgpu.SMEM((*own, block_k), dtype) if interpret else None,
        plgpu.Barrier(num_arrivals=4 * warpgroups),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    ]
    grid = _grid(problem, ("head", problem.N), pl.cdiv(problem.T, tiles.block_q))
    out_type = jax.ShapeDtypeStruct(arrays[0].shape, dtype)
    return _launch(dq_kernel, "dq", out_type, scratch, grid, tiles, interpret, problem=problem)(*arrays)
