"""What the Hopper backward kernels share: a program with its memory, how tiles come in, and pieces of a step."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.backward_schedule import (
    ROWS_OF_WGMMA,
    Tiles,
    for_each_query_tile,
    for_each_visible_tile,
    grid_of_keys,
    kv_head_at,
    place_in,
)
from helpers.attention.hopper.ptx import MATRIX, draw
from helpers.attention.hopper.ring import Ring
from helpers.attention.hopper.visible_tiles import View, VisibleTiles, capped
from helpers.attention.hopper.warpgroup import COLUMNS, ROWS, awaited, opaque, take_registers
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.problem import Problem


class Gmem(NamedTuple):
    """Refs of the arrays of a call, see `backward`; of the gradients those that a kernel writes.

    visible_tiles of the tiles that programs own, and segment numbers, are None in calls that are full or causal.
    last_q, last_do: (B, block_q, N, H) each, in the fused kernels of calls with lengths: in place of the tile in which
    the queries of a batch entry end, with zeros from there on.
    c: (B, K, H + 8), or None, see `common_part`: in the fused kernels c is taken off the keys, as it has been off lse.
    In the ordered form, counter (1,) int32 counts the programs that have started, and turns (B, N, tiles) int32 those
    that have added to a tile of dq.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    do: jax.Array
    lse: jax.Array
    delta: jax.Array
    visible_tiles: jax.Array | None = None
    query_ids: jax.Array | None = None
    key_ids: jax.Array | None = None
    last_q: jax.Array | None = None
    last_do: jax.Array | None = None
    c: jax.Array | None = None
    dq: jax.Array | None = None
    dk: jax.Array | None = None
    dv: jax.Array | None = None
    counter: jax.Array | None = None
    turns: jax.Array | None = None


class Scratch(NamedTuple):
    """Shared memory and barriers of a program that owns keys.

    q, do      rings of tiles of queries, (slots, block_q, H) with lse or delta (slots, block_q) in float32
    k, v       (parts, warpgroups, 64, H / parts): 64 keys for each compute warpgroup
    kv_loaded  a barrier: k and v are there, and what the keys have in common is taken off
    spare      (warpgroups, 64, block_q), in dkv_kernel (warpgroups, 2, 64, block_q); see multiply_add

    In the fused kernels alone

    ds         (2, warpgroups, 64, block_q): ds^T of two steps
    ds_ready   a barrier: all warpgroups have published their ds
    dq         (warpgroups, 64, H or H / warpgroups) float32: the part of dq that a warpgroup computes
    c          (H + 8,), or None: that of `Gmem`
    k_loaded   a barrier: k and c are there

    In the ordered form alone

    number     (1,) int32: the number that the program drew
    drawn      a barrier: it is there
    dq_ready   a barrier: all warpgroups have written their part of dq
    dq_free    a barrier: these are added
    """

    q: Ring
    do: Ring
    k: jax.Array
    v: jax.Array
    kv_loaded: jax.Array
    spare: jax.Array | None
    ds: jax.Array | None = None
    ds_ready: jax.Array | None = None
    dq: jax.Array | None = None
    c: jax.Array | None = None
    k_loaded: jax.Array | None = None
    number: jax.Array | None = None
    drawn: jax.Array | None = None
    dq_ready: jax.Array | None = None
    dq_free: jax.Array | None = None


class Program(NamedTuple):
    """A program that owns block_k keys of one key/value head, 64 for each compute warpgroup, as a warpgroup sees it.

    b, kv, k_start: its batch entry, key/value head and first key; me: the number of the warpgroup.
    visible: the `VisibleTiles` of its keys, or None where the call is full or causal.
    """

    gmem: Gmem
    scratch: Scratch
    problem: Problem
    tiles: Tiles
    interpret: bool
    b: jax.Array
    kv: jax.Array
    me: jax.Array
    k_start: jax.Array
    visible: VisibleTiles | None = None

    @classmethod
    def here(cls, gmem, scratch, problem, tiles, interpret):
        visible = VisibleTiles.read(gmem.visible_tiles, lax.axis_index("tile"), problem, not interpret)
        grid, me = grid_of_keys(problem, tiles, gmem.visible_tiles), lax.axis_index("warpgroup")
        at = drawn_place(gmem, scratch, grid, me == tiles.warpgroups, interpret) if tiles.ordered else lax.axis_index
        # From the last batch entry to the first: the cache may still have what XLA begins to round.
        b = problem.B - 1 - at("batch") if visible is None else visible.b
        kv, tile = kv_head_at(grid, at), at("tile") if visible is None else visible.tile
        if tiles.ordered:
            tile = grid["tile"] - 1 - tile
        return cls(gmem, scratch, problem, tiles, interpret, b, kv, me, tile * tiles.block_k, visible)

    def for_each_tile(self, body, masked_body, carry):
        """`for_each_query_tile` of this program, or `for_each_visible_tile`."""
        if self.visible is not None:
            return for_each_visible_tile(self.visible, self.problem.group, self.kv, body, masked_body, carry)
        return for_each_query_tile(self.problem, self.tiles, self.kv, self.k_start, body, masked_body, carry)

    def hidden(self, p, q_start, k_start):
        """p (keys, queries) with zeros where the query does not see the key."""
        return hidden(self, self.visible, p, q_start, k_start, 0)


def drawn_place(gmem, scratch, grid, is_memory, interpret):
    """A function of the name of an axis of the grid: where this program is there, by a number that it draws.

    A program of the ordered form waits only for programs with smaller numbers. CUDA promises no order in which thread
    blocks start, but who drew a smaller number has started; the one with the smallest of those that run waits for
    nobody. So nobody waits for ever, however many programs the GPU holds at a time. In the interpreter each program
    has ended before the next one starts.
    """
    if interpret:
        return lax.axis_index

    @pl.when(is_memory)
    def _():
        draw(gmem.counter, scratch.number)
        plgpu.barrier_arrive(scratch.drawn)

    plgpu.barrier_wait(scratch.drawn)
    return place_in(grid, scratch.number[0]).__getitem__


def wait_for_keys(program, start):
    """Until the keys and values of the program are there. A warpgroup's own, from `start` on, end in zeros."""
    scratch, visible = program.scratch, program.visible
    plgpu.barrier_wait(scratch.kv_loaded)
    if visible is None or isinstance(visible.key_length, int):  # TMA brings zeros from behind the array
        return

    @pl.when(start + ROWS_OF_WGMMA > visible.key_length)
    def _():
        for part, array in itertools.product(range(scratch.k.shape[0]), (scratch.k, scratch.v)):
            own = array.at[part, program.me]
            rows = start + plgpu.broadcasted_iota(jnp.int32, own.shape, 0, layout=MATRIX)
            numbers = plgpu.load(own, layout=MATRIX).astype(jnp.float32)
            own[...] = jnp.where(rows < visible.key_length, numbers, 0).astype(array.dtype)
        plgpu.commit_smem()


def load_keys_then_queries(program, send_dq=None):
    """What the memory warpgroup of a program that owns keys does.

    send_dq: what it does besides with each tile of dq, of a query head and number, when it has refilled the ring.
    """
    gmem, scratch, tiles, b, kv = program.gmem, program.scratch, program.tiles, program.b, program.kv
    take_registers(tiles, memory=1)
    parts, warpgroups, _, width = scratch.k.shape
    k_loaded = scratch.kv_loaded if scratch.c is None else scratch.k_loaded
    for part, wg in itertools.product(range(parts), range(warpgroups)):
        keys = b, pl.ds(program.k_start + wg * ROWS_OF_WGMMA, ROWS_OF_WGMMA), kv, pl.ds(part * width, width)
        plgpu.copy_gmem_to_smem(gmem.k.at[keys], scratch.k.at[part, wg], k_loaded)
        plgpu.copy_gmem_to_smem(gmem.v.at[keys], scratch.v.at[part, wg], scratch.kv_loaded)
    if scratch.c is not None:
        plgpu.copy_gmem_to_smem(gmem.c.at[b, kv], scratch.c, k_loaded)

    def one_step(head, i, step, before):
        rows = pl.ds(i * tiles.block_q, tiles.block_q)

        def fetch(q, do):
            scratch.q.fetch(step, q, gmem.lse.at[b, head, rows])
            scratch.do.fetch(step, do, gmem.delta.at[b, head, rows])

        whole = gmem.q.at[b, rows, head], gmem.do.at[b, rows, head]
        if gmem.last_q is None:
            fetch(*whole)
        else:
            is_last = (i + 1) * tiles.block_q > program.visible.query_length
            pl.when(is_last)(lambda: fetch(gmem.last_q.at[b, :, head], gmem.last_do.at[b, :, head]))
            pl.when(~is_last)(lambda: fetch(*whole))
        if scratch.c is not None:
            pl.when(step == 0)(lambda: take_off_common_part(scratch))
        if send_dq is not None:
            pl.when(step >= tiles.stages)(lambda: send_dq(*before[0]))
            return *before[1:], (head, i)

    before = None if send_dq is None else ((jnp.int32(0), jnp.int32(0)),) * tiles.stages
    steps, before = program.for_each_tile(one_step, one_step, before)
    for n, tile in enumerate(before or ()):
        pl.when(steps + n >= tiles.stages)(functools.partial(send_dq, *tile))
    scratch.q.drain()
    scratch.do.drain()


def take_off_common_part(scratch):
    """What the memory warpgroup does with the keys, as soon as they are there. Behind c stands whether it is not 0."""
    plgpu.barrier_wait(scratch.k_loaded)
    _, warpgroups, _, H = scratch.k.shape

    @pl.when(scratch.c[H].astype(jnp.float32) > 0)
    def _():
        for wg, first in itertools.product(range(warpgroups), range(0, H, 64)):
            columns = pl.ds(first, 64)
            k, c = scratch.k.at[0, wg, :, columns], plgpu.load(scratch.c.at[columns], layout=COLUMNS)
            k[...] = plgpu.load(k, layout=MATRIX) - lax.broadcast_in_dim(c, k.shape, [1])
        plgpu.commit_smem()

    plgpu.barrier_arrive(scratch.kv_loaded)


def store_dk_and_dv(program, dk, dv, start, columns=slice(None)):
    """Write a warpgroup's dk and dv by way of the shared memory that held its keys and values.

    start: the first of its 64 keys; columns: those of a head that dk and dv have.
    """
    k_mine, v_mine = program.scratch.k.at[0, program.me], program.scratch.v.at[0, program.me]
    k_mine[...] = (program.problem.scale * dk).astype(program.problem.dtype)
    v_mine[...] = dv.astype(program.problem.dtype)
    plgpu.commit_smem()
    mine = program.b, pl.ds(start, ROWS_OF_WGMMA), program.kv, columns
    plgpu.copy_smem_to_gmem(k_mine, program.gmem.dk.at[mine])
    plgpu.copy_smem_to_gmem(v_mine, program.gmem.dv.at[mine])
    plgpu.wait_smem_to_gmem(0)


def exp2_of_logits(s, lse, axis, problem):
    """p of a tile of products, exp2(scale L s - L lse), with one lse for each index of an axis; and the cap's slope."""
    s, slope = capped(s, problem)
    return jnp.exp2((problem.scale * LOG2_E) * s - lax.broadcast_in_dim(lse, s.shape, [axis])), slope


def lse_and_awaited(s, wait_n, lse_ref):
    """The lse of each column of s, and s when it is done: lse is on its way meanwhile, but in wide tiles: slower so."""
    early = lse_ref.shape[0] <= 64
    if early:
        lse = plgpu.load(lse_ref, layout=COLUMNS)
    s = awaited(s, wait_n)
    return lse if early else plgpu.load(lse_ref, layout=COLUMNS), s


def hidden(program, visible, p, q_start, k_start, keys_axis):
    """p with zeros where the query does not see the key. visible: those of the tile of rows, or None."""
    problem, tiles = program.problem, program.tiles
    if visible is None:
        return hide(p, q_start, k_start, keys_axis, problem, tiles)
    if keys_axis == 0:
        view, starts, block = View.of_keys, (k_start, q_start), tiles.block_q
    else:
        view, starts, block = View.of_queries, (q_start, k_start), tiles.block_k
    is_mixed = visible.is_mixed(lax.div(starts[1], block))
    return view(visible, problem, program.gmem, tiles.block_k).hidden(p, 0.0, *starts, is_mixed)


def hide(p, q_start, k_start, keys_axis, problem, tiles):
    """p masked: zeros where the query does not see the key, or where there is no key.

    `masking.visible` in a form that needs few registers: it compares columns with a
    number for each row. An optimization barrier keeps that number in the step, where
    the compiler would keep a difference of positions for each entry of p.
    """
    rows = opaque(plgpu.broadcasted_iota(jnp.int32, p.shape[:1], 0, layout=ROWS))
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


def ds_of(p, slope, dp, delta, axis, problem):
    """ds, rounded, with one delta for each index of an axis, and the slope of a soft cap or None."""
    ds = p * (dp - lax.broadcast_in_dim(delta, dp.shape, [axis]))
    return (ds if slope is None else slope * ds).astype(problem.dtype)
