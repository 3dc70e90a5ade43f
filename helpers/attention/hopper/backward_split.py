"""The split form of the Hopper backward pass: one kernel owns keys and writes dk and dv, another queries and dq."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.backward_parts import (
    Gmem,
    Program,
    ds_of,
    exp2_of_logits,
    hidden,
    load_keys_then_queries,
    lse_and_awaited,
    store_dk_and_dv,
    wait_for_keys,
)
from helpers.attention.hopper.backward_schedule import ROWS_OF_WGMMA, Tiles
from helpers.attention.hopper.ring import Ring
from helpers.attention.hopper.visible_tiles import VisibleTiles
from helpers.attention.hopper.warpgroup import COLUMNS, ROWS, awaited, issue, multiply_add, opaque, take_registers
from helpers.attention.masking import key_tiles
from helpers.attention.problem import Problem


def dkv_kernel(gmem, scratch, problem, tiles, interpret):
    """Writes dk and dv of block_k keys, or of a head of 256 the 128 columns that registers have room for.

    gmem: a `Gmem`; scratch: a `Scratch`.
    """
    program = Program.here(gmem, scratch, problem, tiles, interpret)
    parts, _, _, width = scratch.k.shape
    columns = pl.ds(lax.axis_index("part") * width if parts > 1 else 0, width)

    def compute():
        take_registers(tiles, memory=0)
        start = program.k_start + program.me * ROWS_OF_WGMMA
        scratch.q.open()
        scratch.do.open()
        wait_for_keys(program, start)

        def accumulate(dk_acc, dv_acc):
            one_step = functools.partial(dkv_step, program, start, columns, dk_acc, dv_acc)
            program.for_each_tile(*(functools.partial(one_step, masked) for masked in (False, True)), None)
            return dk_acc[...], dv_acc[...]

        acc = plgpu.ACC((ROWS_OF_WGMMA, width), jnp.float32)
        store_dk_and_dv(program, *pl.run_scoped(accumulate, acc, acc), start, columns)

    pl.when(program.me < tiles.warpgroups)(compute)
    pl.when(program.me == tiles.warpgroups)(lambda: load_keys_then_queries(program))


def dkv_step(program, start, columns, dk_acc, dv_acc, masked, head, i, step, _):
    """Add a tile of queries to dk_acc and dv_acc, (64, width). start: the first of the warpgroup's keys."""
    scratch, problem, tiles, interpret = program.scratch, program.problem, program.tiles, program.interpret
    wg, (q, lse), (do, delta) = opaque(program.me), scratch.q.at(step), scratch.do.at(step)
    p_spare, ds_spare = (None, None) if scratch.spare is None else (scratch.spare.at[wg, 0], scratch.spare.at[wg, 1])
    parts, _, _, width = scratch.k.shape

    def pairs(own, tile):
        return [(own.at[part, wg], tile.at[:, pl.ds(part * width, width)]) for part in range(parts)]

    scratch.q.wait(step)
    s = issue(pairs(scratch.k, q), 1, interpret)
    scratch.do.wait(step)
    dp = issue(pairs(scratch.v, do), 1, interpret)
    lse, s = lse_and_awaited(s, 1, lse)
    p, slope = exp2_of_logits(s, lse, 1, problem)
    if masked:
        # without `opaque` ptxas of CUDA 13.0 serialised the products at H = 64, before `issue` overwrote sums
        p = program.hidden(p, opaque(i * tiles.block_q), start)
    multiply_add(dv_acc, p.astype(problem.dtype), do.at[:, columns], p_spare, interpret)
    dp = awaited(dp, 1)
    ds = ds_of(p, slope, dp, plgpu.load(delta, layout=COLUMNS), 1, problem)
    multiply_add(dk_acc, ds, q.at[:, columns], ds_spare, interpret)
    plgpu.wgmma_wait(1)
    scratch.do.release(step)
    plgpu.wgmma_wait(0)
    scratch.q.release(step)


class DqScratch(NamedTuple):
    """Shared memory and barriers of dq_kernel.

    q, do       (warpgroups, 64, H): 64 queries for each compute warpgroup
    lse, delta  (warpgroups, 64) float32
    q_loaded    a barrier: all four are there
    k, v        rings of tiles of keys, (stages, block_k, H)
    spare       (warpgroups, 64, block_k), for the interpreter only: see multiply_add
    """

    q: jax.Array
    do: jax.Array
    lse: jax.Array
    delta: jax.Array
    q_loaded: jax.Array
    k: Ring
    v: Ring
    spare: jax.Array | None


class DqProgram(NamedTuple):
    """A program that owns block_q queries from q_start on, 64 for each compute warpgroup, as a warpgroup sees it.

    b, head: their batch entry and query head; me: the number of the warpgroup.
    first, stop: the tiles of keys that the queries see; with `visible`, places in that.
    """

    gmem: Gmem
    scratch: DqScratch
    problem: Problem
    tiles: Tiles
    interpret: bool
    b: jax.Array
    head: jax.Array
    me: jax.Array
    q_start: jax.Array
    first: jax.Array
    stop: jax.Array
    visible: VisibleTiles | None = None

    @classmethod
    def here(cls, gmem, scratch, problem, tiles, interpret):
        visible = VisibleTiles.read(gmem.visible_tiles, lax.axis_index("tile"), problem, not interpret)
        b = lax.axis_index("batch") if visible is None else visible.b
        head, me = lax.axis_index("head"), lax.axis_index("warpgroup")
        block_q, block_k = tiles.warpgroups * ROWS_OF_WGMMA, tiles.block_k
        if visible is not None:
            place = b, head, me, visible.tile * block_q, jnp.int32(0), visible.length
            return cls(gmem, scratch, problem, tiles, interpret, *place, visible)
        # Under a causal mask the last queries see the most keys: they go first.
        q_start = (pl.cdiv(problem.T, block_q) - 1 - lax.axis_index("tile")) * block_q
        seen = key_tiles(q_start, q_start + block_q, block_k, problem.band, problem.T, problem.S, xp=jnp)
        return cls(gmem, scratch, problem, tiles, interpret, b, head, me, q_start, *seen)

    def k_start(self, j):
        """The first key of tile j, of all or of those that are visible."""
        return (j if self.visible is None else self.visible.at(j)) * self.tiles.block_k


def dq_kernel(gmem, scratch, problem, tiles, interpret):
    """Writes dq of block_q queries. gmem: a `Gmem`; scratch: a `DqScratch`."""
    program = DqProgram.here(gmem, scratch, problem, tiles, interpret)
    all_until = problem.S // tiles.block_k  # so many tiles of keys have none that some query does not see
    if program.visible is not None:
        all_until = program.visible.whole
    elif problem.band.right is not None:
        all_until = jnp.minimum(all_until, lax.div(program.q_start + 1 + problem.band.right, tiles.block_k))
    pl.when(program.me < tiles.warpgroups)(lambda: compute_dq(program, all_until))
    pl.when(program.me == tiles.warpgroups)(lambda: load_queries_then_keys(program))


def compute_dq(program, all_until):
    """What a compute warpgroup of dq_kernel does, for 64 queries."""
    gmem, scratch, problem, tiles = program.gmem, program.scratch, program.problem, program.tiles
    first, stop, me = program.first, program.stop, program.me
    take_registers(tiles, memory=0)
    scratch.k.open()
    scratch.v.open()
    plgpu.barrier_wait(scratch.q_loaded)
    lse = plgpu.load(scratch.lse.at[me], layout=ROWS)
    delta = plgpu.load(scratch.delta.at[me], layout=ROWS)

    def accumulate(dq_acc):
        one_step = functools.partial(dq_step, program, lse, delta, dq_acc)
        loop = lambda start, end, masked: lax.fori_loop(start, end, functools.partial(one_step, masked), None)
        middle = jnp.clip(all_until, first, stop)
        loop(first, middle, False)
        if problem.band.right is not None or problem.S % tiles.block_k or program.visible is not None:
            loop(middle, stop, True)
        return dq_acc[...]

    dq = pl.run_scoped(accumulate, plgpu.ACC((ROWS_OF_WGMMA, problem.H), jnp.float32))
    q_mine = scratch.q.at[me]
    q_mine[...] = (problem.scale * dq).astype(problem.dtype)
    plgpu.commit_smem()
    rows = pl.ds(program.q_start + me * ROWS_OF_WGMMA, ROWS_OF_WGMMA)
    plgpu.copy_smem_to_gmem(q_mine, gmem.dq.at[program.b, rows, program.head])
    plgpu.wait_smem_to_gmem(0)


def dq_step(program, lse, delta, dq_acc, masked, j, _):
    """Add what tile j of the keys gives to dq_acc, (64, H)."""
    scratch, problem, interpret = program.scratch, program.problem, program.interpret
    me, step = program.me, j - program.first
    wg, (k,), (v,) = opaque(me), scratch.k.at(step), scratch.v.at(step)

    scratch.k.wait(step)
    s = issue([(scratch.q.at[wg], k)], 1, interpret)
    scratch.v.wait(step)
    dp = issue([(scratch.do.at[wg], v)], 1, interpret)
    s = awaited(s, 1)
    p, slope = exp2_of_logits(s, lse, 0, problem)
    if masked:
        p = hidden(program, program.visible, p, program.q_start + me * ROWS_OF_WGMMA, program.k_start(j), 1)
    dp = awaited(dp, 0)
    scratch.v.release(step)
    ds = ds_of(p, slope, dp, delta, 0, problem)
    multiply_add(dq_acc, ds, k, None if scratch.spare is None else scratch.spare.at[me], interpret)
    plgpu.wgmma_wait(0)  # until then, nobody may read the registers of ds
    scratch.k.release(step)


def load_queries_then_keys(program):
    """What the memory warpgroup of dq_kernel does."""
    gmem, scratch, problem, tiles = program.gmem, program.scratch, program.problem, program.tiles
    b, head, first = program.b, program.head, program.first
    take_registers(tiles, memory=1)
    for part in range(tiles.warpgroups):
        rows = pl.ds(program.q_start + part * ROWS_OF_WGMMA, ROWS_OF_WGMMA)
        plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, head], scratch.q.at[part], scratch.q_loaded)
        plgpu.copy_gmem_to_smem(gmem.do.at[b, rows, head], scratch.do.at[part], scratch.q_loaded)
        plgpu.copy_gmem_to_smem(gmem.lse.at[b, head, rows], scratch.lse.at[part], scratch.q_loaded)
        plgpu.copy_gmem_to_smem(gmem.delta.at[b, head, rows], scratch.delta.at[part], scratch.q_loaded)
    kv = lax.div(head, problem.group)

    def one_step(j, _):
        keys = b, pl.ds(program.k_start(j), tiles.block_k), kv
        scratch.k.fetch(j - first, gmem.k.at[keys])
        scratch.v.fetch(j - first, gmem.v.at[keys])

    lax.fori_loop(first, program.stop, one_step, None)
    scratch.k.drain()
    scratch.v.drain()
