"""An out as exact as float32 allows, for the Hopper forward kernel of a gradient.

An error of out comes back in dq, times what the keys of a row have in common (see `low_bits`). Up to what rounding p to
16 bits does at random, two things are in the way. The product acc + p v takes p rounded, so its weights add up to
something else than l, the sum of p as it was. And the tensor core drops the bits of each p v that lie below those of a
large acc, so acc is short by 1e-5 after 4096 keys. Here the product has eight columns more, of constants c_i beside v,
which both of these befall as they befall v, and

    out    = acc sum_i c_i / sum_i (what became of c_i)

is free of them. lse stays what it is. What rounding takes off this out leaves as an array of its own, see `low_bits`.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.forward_kernel import RoundedOut
from helpers.attention.low_bits import low_bits

# The constants beside v: eight of [1, 2), in which all endings of three bits occur, as they do among values.
CONSTANTS = {"bfloat16": [1 + 17 * i / 2**7 for i in range(8)], "float16": [1 + 145 * i / 2**10 for i in range(8)]}


@dataclass(frozen=True)
class ExactOut(RoundedOut):
    """out by way of constants beside the values, and its low bits.

    Values are in SMEM as (H / 64 + 1, keys, 64), and the constants are the first columns of the last part.
    """

    @property
    def constants(self):
        return CONSTANTS[self.problem.dtype.name]

    def begin(self):
        smem, (values,) = self.smem, self.smem.values.buffers

        @pl.when(self.me == 0)
        def _():
            for slot in range(values.shape[0]):
                part = values.at[slot, values.shape[1] - 1]
                plgpu.copy_gmem_to_smem(self.refs.constants, part, smem.constants_loaded)

        plgpu.barrier_wait(smem.constants_loaded)

    def zeros(self):
        return super().zeros(len(self.constants))

    def divided(self, acc, l):
        head_dim = self.smem.q.shape[-1]
        weight = sum(self.constants) / acc[:, head_dim:].sum(axis=1)
        return acc[:, :head_dim] * lax.broadcast_in_dim(weight, (acc.shape[0], head_dim), [0])

    def low_bits(self, out):
        """Those of out, in the dtype of the places that SMEM has for an out."""
        # Without a barrier the compiler rounds one number at a time, by the unit that takes exponentials.
        low = low_bits(out, lax.optimization_barrier(out.astype(self.problem.dtype)))
        return lax.bitcast_convert_type(low, self.problem.dtype)

    def put_beside(self, out):
        if self.smem.low is not None:
            self.smem.low.at[self.me][...] = self.low_bits(out)

    def put_more(self, turn, out):
        """The low bits. From H = 128 on SMEM has room for them only where out was, when it has left."""
        place = turn.q if self.smem.low is None else self.smem.low.at[self.me]
        if self.smem.low is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            place[...] = self.low_bits(out)
            plgpu.commit_smem()

        @pl.when(turn.q_start < self.problem.T)
        def _():
            rows = pl.ds(turn.q_start, self.tiles.block_q)
            plgpu.copy_smem_to_gmem(place, self.refs.low.at[turn.b, rows, turn.n])


def constants_beside(problem, tiles):
    """The array of constants that `ExactOut` reads: (block_k, 64), and each row begins with CONSTANTS."""
    constants = np.tile(CONSTANTS[problem.dtype.name], (tiles.block_k, 1))
    return jnp.asarray(np.pad(constants, ((0, 0), (0, 56))), problem.dtype)


def with_room_for_constants(tiles, problem):
    """The tiles, or others that leave registers for the sums of constants, and SMEM: tried on an H100 (JAX 0.11.2)."""
    if problem.H > 128:
        return tiles._replace(programs=None)
    if problem.H <= 64 and tiles.block_k >= 128:  # constants are as large as values
        tiles = tiles._replace(stages=min(tiles.stages, 3))
    if tiles.warpgroups < 4 or problem.S <= 2048:
        return tiles
    if tiles.dynamic and problem.S > 4096:
        return tiles._replace(block_k=128, stages=2, warpgroups=3)
    return tiles._replace(warpgroups=3) if problem.S <= 8192 else tiles
