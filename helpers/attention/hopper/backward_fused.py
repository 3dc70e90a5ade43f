"""The fused form of the Hopper backward pass: a kernel that owns keys writes dk and dv, and adds its part of dq.

A warpgroup's part of ds k needs the ds of all warpgroups, so they meet once in a step. There are two orders of it:

    immediate_kernel  A step does its own five products. ds is published before dv is issued: the tensor core has
                      that product to do while the warpgroups wait for one another.
    delayed_kernel    dv goes before ds. A step first issues its own s and then finishes the step before, whose ds
                      the others have had time to publish.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.backward_parts import (
    Program,
    ds_of,
    exp2_of_logits,
    load_keys_then_queries,
    lse_and_awaited,
    store_dk_and_dv,
    wait_for_keys,
)
from helpers.attention.hopper.backward_schedule import ROWS_OF_WGMMA, place_in_turn
from helpers.attention.hopper.ptx import MATRIX, await_count, count_on
from helpers.attention.hopper.warpgroup import COLUMNS, awaited, issue, multiply_add, opaque, take_registers


def immediate_kernel(gmem, scratch, problem, tiles, interpret):
    """Writes dk and dv of block_k keys and adds their part of dq, in each step that of its own tile.

    gmem: a `Gmem`, whose dq is float32 and holds zeros; scratch: a `Scratch`.
    """
    run(Program.here(gmem, scratch, problem, tiles, interpret), immediate_loop)


def delayed_kernel(gmem, scratch, problem, tiles, interpret):
    """As immediate_kernel, but dq and dk of a tile come in the step after; scratch.q has a slot more."""
    run(Program.here(gmem, scratch, problem, tiles, interpret), delayed_loop)


class Own(NamedTuple):
    """What a compute warpgroup owns: 64 keys, and of each tile of dq 64 rows, or all rows and some columns.

    start: the first of the keys; dk, dv: their sums, ACC refs (64, H).
    row, columns: the first of those rows of dq, and those columns.
    """

    start: jax.Array
    dk: jax.Array
    dv: jax.Array
    row: jax.Array
    columns: slice


class Published(NamedTuple):
    """A tile of queries whose ds is published: its query head and number, and the slots of its q and of its ds."""

    head: jax.Array
    i: jax.Array
    q_slot: jax.Array
    ds_slot: jax.Array


def run(program, loop):
    """The fused kernel in the order of loop(program, own), which adds up dk, dv and dq."""
    scratch, problem, tiles, me = program.scratch, program.problem, program.tiles, program.me

    def compute():
        take_registers(tiles, memory=0)
        start = program.k_start + me * ROWS_OF_WGMMA
        scratch.q.open()
        scratch.do.open()
        row, columns = part_of_dq(program, me)

        def accumulate(dk_acc, dv_acc):
            loop(program, Own(start, dk_acc, dv_acc, row, columns))
            return dk_acc[...], dv_acc[...]

        acc = plgpu.ACC((ROWS_OF_WGMMA, problem.H), jnp.float32)
        dk, dv = pl.run_scoped(accumulate, acc, acc)
        plgpu.barrier_arrive(scratch.ds_ready)  # the other warpgroups are done with the keys of this one
        plgpu.barrier_wait(scratch.ds_ready)
        store_dk_and_dv(program, dk, dv, start)
        if tiles.ordered:
            plgpu.barrier_wait(scratch.dq_free)

    def load():
        if tiles.ordered:
            plgpu.barrier_arrive(scratch.dq_free)
        load_keys_then_queries(program, functools.partial(add_in_turn, program) if tiles.ordered else None)

    pl.when(me < tiles.warpgroups)(compute)
    pl.when(me == tiles.warpgroups)(load)


def part_of_dq(program, wg):
    """(first row, columns) of the part of a tile of dq that a warpgroup computes."""
    width = program.scratch.dq.shape[-1]
    row = wg * ROWS_OF_WGMMA if program.tiles.block_q > ROWS_OF_WGMMA else 0
    return row, pl.ds(wg * width if width < program.problem.H else 0, width)


def immediate_loop(program, own):
    wait_for_keys(program, own.start)
    program.for_each_tile(*(functools.partial(immediate_step, program, own, masked) for masked in (False, True)), None)


def delayed_loop(program, own):
    """Before the first step there is a ds of zeros, which adds nothing to dk; after the last, its dq and dk."""
    scratch, problem = program.scratch, program.problem
    shape = ROWS_OF_WGMMA, program.tiles.block_q
    begin = [
        lambda: publish(program, plgpu.layout_cast(jnp.zeros(shape, problem.dtype), MATRIX), 1),
        lambda: wait_for_keys(program, own.start),
    ]
    # What is published lets the others read these keys: with `visible`, they are complete before.
    for act in begin if program.visible is None else begin[::-1]:
        act()
    nothing = Published(program.kv * problem.group, jnp.int32(0), jnp.int32(0), jnp.int32(1))
    steps = (functools.partial(delayed_step, program, own, masked) for masked in (False, True))
    step, last = program.for_each_tile(*steps, nothing)
    dk_and_dq_before(program, own, last, step)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(scratch.q.consumed.at[last.q_slot])


def immediate_step(program, own, masked, head, i, step, _):
    """dk, dv and dq of a tile of queries, all in this step."""
    scratch, problem, interpret = program.scratch, program.problem, program.interpret
    wg = number_in_step(program)
    (q, lse), (do, delta) = scratch.q.at(step), scratch.do.at(step)
    ds_slot = lax.rem(step, 2)

    scratch.q.wait(step)
    s = issue([(scratch.k.at[0, wg], q)], 1, interpret)
    scratch.do.wait(step)
    dp = issue([(scratch.v.at[0, wg], do)], 1, interpret)
    lse, s = lse_and_awaited(s, 1, lse)
    p, slope = exp2_of_logits(s, lse, 1, problem)
    if masked:
        p = program.hidden(p, i * program.tiles.block_q, own.start)
    p_16 = p.astype(problem.dtype)
    dp = awaited(dp, 0)
    ds = ds_of(p, slope, dp, plgpu.load(delta, layout=COLUMNS), 1, problem)
    publish(program, ds, ds_slot)
    multiply_add(own.dv, p_16, do, spare_of(program), interpret)
    dq = dk_and_dq(program, own, Published(head, i, scratch.q.slot(step), ds_slot), ds)
    add_to_dq(program, own, dq, head, i)
    plgpu.wgmma_wait(0)
    scratch.do.release(step)
    scratch.q.release(step)


def delayed_step(program, own, masked, head, i, step, before):
    """dv of a tile of queries, and dk and dq of the one before.

    Returns this tile, as a `Published` one.
    """
    scratch, problem, interpret = program.scratch, program.problem, program.interpret
    wg = number_in_step(program)
    (q, lse), (do, delta) = scratch.q.at(step), scratch.do.at(step)
    ds_slot = lax.rem(step, 2)

    # -- the delayed order
    scratch.q.wait(step)
    s = issue([(scratch.k.at[0, wg], q)], 1, interpret)
    dk_and_dq_before(program, own, before, step)
    scratch.do.wait(step)
    dp = issue([(scratch.v.at[0, wg], do)], 1, interpret)
    lse, s = lse_and_awaited(s, 2, lse)
    p, slope = exp2_of_logits(s, lse, 1, problem)
    if masked:
        p = program.hidden(p, i * program.tiles.block_q, own.start)
    multiply_add(own.dv, p.astype(problem.dtype), do, spare_of(program), interpret)
    dp = awaited(dp, 1)  # and so is dk of the step before
    release = lambda: plgpu.barrier_arrive(scratch.q.consumed.at[before.q_slot])
    pl.when(step > 0)(release)
    ds = ds_of(p, slope, dp, plgpu.load(delta, layout=COLUMNS), 1, problem)
    publish(program, ds, ds_slot)
    plgpu.wgmma_wait(0)
    scratch.do.release(step)
    return Published(head, i, scratch.q.slot(step), ds_slot)


def number_in_step(program):
    """The number of the warpgroup; unless tiles.keeps_addresses, hidden from the compiler in each step: see `Tiles`."""
    keeps = program.tiles.keeps_addresses and program.problem.group == 1
    return program.me if keeps else opaque(program.me)


def spare_of(program):
    return None if program.scratch.spare is None else program.scratch.spare.at[program.me]


def publish(program, ds, slot):
    """Let the other warpgroups read this one's ds^T."""
    program.scratch.ds.at[slot, program.me][...] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(program.scratch.ds_ready)


def dk_and_dq_before(program, own, before, step):
    """`dk_and_dq` of the tile before. In step 0 there is none, but a ds of zeros for dk."""
    dq = dk_and_dq(program, own, before)
    pl.when(step > 0)(lambda: add_to_dq(program, own, dq, before.head, before.i))


def dk_and_dq(program, own, tile, ds=None):
    """This warpgroup's part of ds k of a `Published` tile; that of dk is issued only.

    ds: what it published itself, where it still has that in registers.
    """
    scratch, interpret = program.scratch, program.interpret
    plgpu.barrier_wait(scratch.ds_ready)

    def ds_and_k(wg):
        rows = pl.ds(own.row, ROWS_OF_WGMMA)
        ds_of_wg = scratch.ds.at[tile.ds_slot, wg, :, rows]
        return ds_of_wg, scratch.k.at[0, wg, :, own.columns]

    warpgroups = range(program.tiles.warpgroups)
    dq = issue([ds_and_k(wg) for wg in warpgroups], 0, interpret)
    if ds is None or interpret:
        ds = scratch.ds.at[tile.ds_slot, program.me]
    q = scratch.q.buffers[0].at[tile.q_slot]
    multiply_add(own.dk, ds, q, None, interpret)
    return awaited(dq, 1)


def add_to_dq(program, own, dq, head, i):
    """Send this warpgroup's part of a tile of dq on its way, to be added there."""
    scratch = program.scratch
    if program.tiles.ordered:  # the memory warpgroup adds
        plgpu.barrier_wait(scratch.dq_free)
    else:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    scratch.dq.at[program.me][...] = dq
    plgpu.commit_smem()
    if program.tiles.ordered:
        plgpu.barrier_arrive(scratch.dq_ready)
    else:
        copy_to_dq(program, program.me, head, i)


def copy_to_dq(program, wg, head, i):
    """TMA adds a warpgroup's part of a tile of dq to memory."""
    row, columns = part_of_dq(program, wg)
    rows = pl.ds(i * program.tiles.block_q + row, ROWS_OF_WGMMA)
    part = program.b, rows, head, columns
    mine = program.scratch.dq.at[wg]
    if program.interpret:  # no addition: each tile of keys has a plane of its own
        plane = lax.div(program.k_start, program.tiles.block_k)
        plgpu.copy_smem_to_gmem(mine, program.gmem.dq.at[plane].at[part])
    else:
        plgpu.copy_smem_to_gmem(mine, program.gmem.dq.at[part], reduction_op="add")


def add_in_turn(program, head, i):
    """What the memory warpgroup does in the ordered form, with a whole tile of dq."""
    scratch, turn = program.scratch, program.gmem.turns.at[program.b, head, i]
    plgpu.barrier_wait(scratch.dq_ready)
    if not program.interpret:  # there, those before have ended
        place = place_in_turn(program.problem, program.tiles, i, program.k_start)
        await_count(turn, place)
    for wg in range(program.tiles.warpgroups):
        copy_to_dq(program, wg, head, i)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(scratch.dq_free)
    if not program.interpret:
        count_on(turn)
