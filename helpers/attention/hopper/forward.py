"""Attention by the Hopper forward kernel: what it serves, which tiles it takes, and its launch.

The kernel stands in `forward_kernel`, what can be exchanged in it in `guess`, `exact_out` and `forward_logits`, and who
works at what and when in `tile_scheduler`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.device import core_count
from helpers.attention.hopper.exact_out import ExactOut, constants_beside, with_room_for_constants
from helpers.attention.hopper.forward_kernel import Refs, RoundedOut, RunningMaximum, Scratch, forward_kernel
from helpers.attention.hopper.forward_logits import BlockSparseLogits, GuessOfWhole, Logits, MaximumOfSeen, in_base_two
from helpers.attention.hopper.guess import HEADROOM, MOST, Guess
from helpers.attention.hopper.ptx import SWIZZLED
from helpers.attention.hopper.ring import Ring
from helpers.attention.hopper.visible_tiles import is_block_sparse, last_tiles, padded, padded_ids, visible_tiles
from helpers.attention.hopper.warpgroup import NUM_SMS, padded_head_dim
from helpers.attention.masking import NO_BAND, Band


class Tiles(NamedTuple):
    """How the work is cut; SMEM and registers bound the sizes.

    block_q: queries of one compute warpgroup, a multiple of 64.
    block_k: keys of a tile, a multiple of 64.
    stages: slots of the rings of keys and of values.
    warpgroups: compute warpgroups of a program, 2 to 4.
    programs: how many persistent programs share the work; None means one for each tile of queries.
    ahead: fetch the next queries while these are at work, and issue their first scores together with the
      last product of these. Otherwise there is SMEM for one tile of queries, and out leaves through it.
    guess: guess the maximum. It saves time in every step, and takes some for every tile of queries.
    dynamic: by a `DynamicScheduler`, unless a call is full, where its programs have room for the places.
    """

    block_q: int = 64
    block_k: int = 128
    stages: int = 2
    warpgroups: int = 2
    programs: int | None = NUM_SMS
    ahead: bool = True
    guess: bool = True
    dynamic: bool = False


def tiles_for(call, keeps_low_bits=False):
    """The `Tiles` for a call: `default_tiles`; those of block-sparse and capped calls were tried by hand."""
    problem = call.problem
    is_sparse, is_capped = is_block_sparse(call), problem.soft_cap is not None
    if not (is_sparse or is_capped):
        tiles = default_tiles(problem)
    elif problem.H > 64:
        full = default_tiles(dataclasses.replace(problem, band=NO_BAND))
        tiles = full._replace(guess=full.guess and not is_sparse and problem.band == NO_BAND)
        tiles = tiles._replace(dynamic=is_sparse and tiles.ahead and suits_dynamic(problem, tiles))
        # While two warpgroups take the many exponentials of a soft cap, a third one multiplies. With low bits it
        # would have too few registers.
        if problem.H <= 128 and min(problem.T, problem.S) >= 2048 and not (is_sparse or keeps_low_bits):
            tiles = full._replace(block_k=64, warpgroups=3)
    elif is_sparse:
        may_guess = problem.S <= longest_guessed(problem)
        tiles = Tiles(stages=4, programs=core_count(NUM_SMS), guess=may_guess and problem.S > 1024)
        wide = tiles._replace(block_k=64, warpgroups=4, guess=may_guess)
        # Four warpgroups and 64 keys were 3 to 9 % faster in full calls with lengths, and slower with low bits.
        has_lengths_only = problem.band == NO_BAND and not (is_capped or call.hides_keys)
        if has_lengths_only and not keeps_low_bits and problem.T >= 512 and suits_dynamic(problem, wide):
            tiles = wide
        tiles = tiles._replace(dynamic=suits_dynamic(problem, tiles))
    else:
        tiles = default_tiles(dataclasses.replace(problem, band=Band(right=0)))._replace(dynamic=False)
    return with_room_for_constants(tiles, problem) if keeps_low_bits else tiles


def default_tiles(problem):
    """`tiles_of_many_turns`, and what suits a problem besides.

    With fewer queries in a turn where a program would have less than four turns: one turn more or less is much
    then. Without a guess where equal logits alone could bring l above MOST.
    """
    tiles = tiles_of_many_turns(problem)
    if turns_of(problem, tiles) < 4 and tiles.warpgroups > 2 and padded_head_dim(problem.H) == 64:
        tiles = tiles._replace(block_k=128, stages=4, warpgroups=2, guess=True)
    dynamic = tiles.dynamic and suits_dynamic(problem, tiles)
    return tiles._replace(guess=tiles.guess and problem.S <= longest_guessed(problem), dynamic=dynamic)


def turns_of(problem, tiles):
    """How many turns a program has, in the mean."""
    return _count(problem, tiles) / core_count(NUM_SMS)


def suits_dynamic(problem, tiles):
    """Whether places are worth taking: not where a program has few turns, for a short call feels that XLA zeroes the
    counter, nor where a fast one could have more than its list has room for."""
    return 8 <= turns_of(problem, tiles) <= tiles.block_q // 2


def longest_guessed(problem):
    """How many keys there may be, so that equal logits alone do not bring l above MOST."""
    return MOST * 2 ** HEADROOM.get(problem.dtype.name, 0)


def tiles_of_many_turns(problem):
    """The fastest `Tiles` of those that were tried on an NVIDIA H200 and on an H100 (JAX 0.11.2)."""
    programs, is_causal, is_long = core_count(NUM_SMS), problem.band.right == 0, problem.S > 2048
    if problem.H <= 64:
        if is_causal:
            return Tiles(block_k=64, stages=4, warpgroups=4, programs=programs, guess=is_long, dynamic=is_long)
        return Tiles(warpgroups=3, programs=programs)
    if problem.H <= 128:
        return Tiles(programs=programs, guess=is_long or not is_causal, dynamic=is_causal)
    if problem.S > (8192 if is_causal else 2048):
        programs = None
    return Tiles(block_k=64, ahead=False, programs=programs, guess=False)


def forward(call, *, tiles=None, is_persistent=True, keeps_low_bits=False, interpret=False):
    """Attention of a checked `Call` by the Hopper kernel.

    Returns out (B, T, N, H) in the dtype of query and lse (B, N, T) in float32; with keeps_low_bits also those of out,
    see `low_bits`. Where T and S are multiples of eight and of at least one tile, H is one of HEAD_DIMS and the scale
    is positive, the arrays are not copied, and lse only where T is no multiple of block_q. With key lengths the tile of
    values in which a batch entry ends is copied; the `VisibleTiles` are 28 or 36 bytes a tile of queries. tiles: a
    `Tiles`, or None for the fastest known. is_persistent: False gives each tile of queries a program of its own. A
    program that waits for an SM, because a transfer from another GPU occupies it, is then one of many; a persistent one
    with a static list would begin all of it late. interpret: False, or a `plgpu.InterpretGPUParams` that says how to
    run on a CPU.
    """
    problem = call.problem
    tiles = tiles or tiles_for(call, keeps_low_bits)
    if not is_persistent:
        tiles = tiles._replace(programs=None)
    is_even = problem.band == NO_BAND and not is_block_sparse(call)
    dynamic = tiles.dynamic and tiles.programs is not None and not is_even
    tiles = tiles._replace(dynamic=dynamic and _count(problem, tiles) < tiles.programs * tiles.block_q)
    query, problem = _with_positive_scale(call.query, problem)
    problem = in_base_two(problem)
    T, S, H, head_dim = problem.T, problem.S, problem.H, padded_head_dim(problem.H)
    # TMA cuts GMEM into rows of eight, and a tile must fit the array.
    padded_T, padded_S = (
        max(pl.cdiv(length, 8) * 8, block) for length, block in ((T, tiles.block_q), (S, tiles.block_k))
    )
    inputs = {
        "q": padded(query, {1: padded_T, 3: head_dim}),
        "k": padded(call.key, {1: padded_S, 3: head_dim}),
        "v": padded(call.value, {1: padded_S, 3: head_dim}),
    }
    if keeps_low_bits:
        inputs["constants"] = constants_beside(problem, tiles)
    if is_block_sparse(call):
        blocks = tiles.block_q * tiles.warpgroups, tiles.block_k
        inputs |= {"visible_tiles": visible_tiles(call, *blocks), **padded_ids(call, *blocks)}
    if call.key_lengths is not None:
        inputs["last_values"] = padded(last_tiles(call.value, call.key_lengths, tiles.block_k), {3: head_dim})
    if call.extras.sinks is not None:
        inputs["sinks"] = call.extras.sinks
    if tiles.dynamic:
        inputs["counter"] = jax.new_ref(jnp.zeros((1,), jnp.int32))
    out, lse, *low = _launch(problem, tiles, inputs, interpret)
    low = [lax.bitcast_convert_type(array, jnp.int16)[:, :T, :, :H] for array in low]
    return out[:, :T, :, :H], lse[:, :, :T], *low


def _launch(problem, tiles, inputs, interpret):
    """[out, lse] of {field of `Refs`: array}, and the low bits of out where there are constants among these."""
    keeps_low_bits, is_sparse = "constants" in inputs, "visible_tiles" in inputs
    count = _count(problem, tiles)
    guesses = tiles.guess and problem.S > tiles.block_k
    softmaxes = (MaximumOfSeen, GuessOfWhole) if is_sparse else (RunningMaximum, Guess)
    options = {
        "problem": problem,
        "tiles": tiles,
        "programs": count if tiles.programs is None else min(tiles.programs, count),
        "softmax": softmaxes[guesses],
        "out": ExactOut if keeps_low_bits else RoundedOut,
        "logits": BlockSparseLogits if is_sparse else Logits,
        "interpret": bool(interpret),
    }
    rows = pl.cdiv(problem.T, tiles.block_q) * tiles.block_q
    out_type = jax.ShapeDtypeStruct(inputs["q"].shape, problem.dtype)
    outputs = {"out": out_type, "lse": jax.ShapeDtypeStruct((problem.B, problem.N, rows), jnp.float32)}
    if keeps_low_bits:
        outputs["low"] = out_type

    def body(*refs):
        *refs, smem = refs
        forward_kernel(Refs(**dict(zip((*inputs, *outputs), refs, strict=True))), smem, **options)

    return plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=[_scratch(problem, tiles, keeps_low_bits)],
        grid=(options["programs"],),
        grid_names=("program",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        # Every SMEM access is ordered by barriers, and reductions of rows need no SMEM.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret or None,
    )(*inputs.values())


def _count(problem, tiles):
    """How many tiles of queries there are, in all heads."""
    return pl.cdiv(problem.T, tiles.block_q * tiles.warpgroups) * problem.B * problem.N


def _scratch(problem, tiles, keeps_low_bits):
    """The types of the `Scratch` of a program."""
    block_q, block_k, stages, warpgroups = tiles[:4]
    head_dim = padded_head_dim(problem.H)

    def smem(*shape):
        return plgpu.SMEM((*shape, head_dim), problem.dtype, transforms=SWIZZLED)

    own_rows = warpgroups, block_q
    ring = Ring(
        buffers=(smem(stages, block_k),),
        filled=plgpu.Barrier(num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    )
    values = ring
    if keeps_low_bits:
        parts = plgpu.SMEM((stages, head_dim // 64 + 1, block_k, 64), problem.dtype, transforms=SWIZZLED)
        filled = plgpu.Barrier(num_arrivals=head_dim // 64, num_barriers=stages)
        values = ring._replace(buffers=(parts,), filled=filled)
    has_room = tiles.ahead and (head_dim == 64 or not keeps_low_bits)
    return Scratch(
        q=smem(2, *own_rows) if tiles.ahead else smem(*own_rows),
        keys=ring,
        values=values,
        out=smem(*own_rows) if has_room else None,
        low=smem(*own_rows) if has_room and keeps_low_bits else None,
        lse=plgpu.SMEM((warpgroups + 1 + tiles.dynamic, block_q), jnp.float32),
        q_loaded=plgpu.Barrier(num_barriers=warpgroups),
        guess_checked=plgpu.Barrier(num_arrivals=warpgroups),
        constants_loaded=plgpu.Barrier(num_arrivals=stages) if keeps_low_bits else None,
        places_known=plgpu.Barrier(num_barriers=stages + 1) if tiles.dynamic else None,
    )


def _with_positive_scale(query, problem):
    """The same logits from a positive scale, which lets the kernel scale the largest score."""
    if problem.scale > 0:
        return query, problem
    if problem.scale == 0:
        return jnp.zeros_like(query), dataclasses.replace(problem, scale=1.0)
    return -query, dataclasses.replace(problem, scale=-problem.scale)
