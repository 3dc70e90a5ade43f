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
from helpers.attention.hopper.warpgroup import Beside
from helpers.attention.low_bits import low_bits

# The constants beside v: eight of [1, 2), in which all endings of three bits occur, as they do among values.
CONSTANTS = {"bfloat16": [1 + 17 * i / 2**7 for i in range(8)], "float16": [1 + 145 * i / 2**10 for i in range(8)]}


@dataclass(frozen=True)
class ExactOut(RoundedOut):
    """out by way of constants beside the values, and its low bits.

    The constants in GMEM and SMEM are as a `Beside` wants them, see `constants_beside`. The low bits leave from where
    the queries were.
    """

    @property
    def constants(self):
        return CONSTANTS[self.problem.dtype.name]

    @property
    def is_wide(self):
        return one_product_serves(self.tiles, self.smem.q.shape[-1])

    def begin(self):
        refs, smem = self.refs, self.smem
        pl.when(self.me == 0)(lambda: plgpu.copy_gmem_to_smem(refs.constants, smem.constants, smem.constants_loaded))
        plgpu.barrier_wait(smem.constants_loaded)

    def beside(self, v):
        return Beside(v, self.smem.constants if self.is_wide else self.smem.constants.T)

    def zeros(self):
        head_dim, more = self.smem.q.shape[-1], len(self.constants)
        return self.zeros_of(head_dim + more) if self.is_wide else (self.zeros_of(head_dim), self.zeros_of(more))

    def await_queries(self):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the low bits of the turn before have left

    def divided(self, acc, l):
        head_dim = self.smem.q.shape[-1]
        acc, of_constants = (acc[:, :head_dim], acc[:, head_dim:]) if self.is_wide else acc
        weight = sum(self.constants) / of_constants.sum(axis=1)
        return acc * lax.broadcast_in_dim(weight, acc.shape, [0])

    def put(self, turn, out):
        copies = super().put(turn, out)
        if not self.tiles.ahead:  # out is where the low bits go
            return copies
        self.put_low(turn, out)
        return [*copies, (turn.q, self.refs.low)]

    def put_low(self, turn, out):
        """In SMEM, where the queries were: nobody needs them any more."""
        # Without a barrier the compiler rounds one number at a time, by the unit that takes exponentials.
        rounded = lax.optimization_barrier(out.astype(self.problem.dtype))
        turn.q[...] = lax.bitcast_convert_type(low_bits(out, rounded), self.problem.dtype)

    def put_later(self, turn, out):
        if self.tiles.ahead:
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.put_low(turn, out)
        plgpu.commit_smem()

        @pl.when(turn.q_start < self.problem.T)
        def _():
            rows = pl.ds(turn.q_start, self.tiles.block_q)
            plgpu.copy_smem_to_gmem(turn.q, self.refs.low.at[turn.b, rows, turn.n])


def constants_beside(problem, tiles, head_dim):
    """The array of constants that `ExactOut` reads.

    Where `one_product_serves`, (16, 64), and each row begins with CONSTANTS; else (8, 64), row i 64 times CONSTANTS[i].
    """
    constants = np.array([[number] * 64 for number in CONSTANTS[problem.dtype.name]], problem.dtype)
    if one_product_serves(tiles, head_dim):
        constants = np.pad(np.tile(constants[:, 0], (16, 1)), ((0, 0), (0, 56)))
    return jnp.asarray(constants)


def one_product_serves(tiles, head_dim):
    """Whether p is multiplied with values and constants at once, see `Beside`: not in short tiles of 3 warpgroups."""
    return head_dim == 64 and (tiles.block_k >= 128 or tiles.warpgroups == 4)


def with_room_for_constants(tiles, problem):
    """The tiles, or others that leave registers for the sums of constants: tried by hand on an H100 (JAX 0.11.2)."""
    if problem.H > 128:
        return tiles._replace(programs=None)
    if tiles.warpgroups < 4 or problem.S <= 2048:
        return tiles
    if tiles.dynamic and problem.S > 4096:
        return tiles._replace(block_k=128, stages=2, warpgroups=3)
    return tiles._replace(warpgroups=3) if problem.S <= 8192 else tiles
