"""A guess instead of the maximum, for the Hopper forward kernel: a step without a maximum and without a rescaling.

out and lse are the same for every m, as long as nothing leaves the range of its dtype. (And up to rounding: with
h = 40, p and e^lse have a relative error of 1e-6.) The maximum of all tiles is one choice, which takes a maximum and
two multiplications in every tile. The guess is made from the first tile alone, with h = HEADROOM, and stays:

    m      = scale_2 rowmax s_0 + h
    p_j    = 2^(scale_2 s_j - m)             l = l + rowsum p_j
    acc    = acc + p_{j-1} v_{j-1}

It is too low only where a later score of a row is far above all of its first tile. Then l says so: with the true
maximum it is at most S. A warpgroup that finds l above min(S, MOST) in some row goes by `RunningMaximum` from there
on. When a program is done with its list of turns, it does the turns again in which a guess failed. (On Blackwell,
FlashAttention-4 also leaves an old m where it can, and decides that in every tile.)
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.forward_kernel import RunningMaximum, exponentials
from helpers.attention.hopper.tile_scheduler import Turns
from helpers.attention.hopper.warpgroup import COLUMNS, ROWS
from helpers.attention.problem import Problem

# How far a guess is above the maximum that it was made from, in powers of two, and what
# l may not exceed by guess. float16 ends at 2^16 and has few small numbers. In bfloat16
# p v loses digits for v below 1e-20, say.
HEADROOM, MOST = {"bfloat16": 40, "float16": 1}, 2**15


@dataclass(frozen=True)
class FixedMaximum:
    """The rule of a step with an m that stays, in the words of `RunningMaximum`."""

    problem: Problem

    def carried(self, m, l):
        return l

    def softmax(self, s, m, l):
        return exponentials(self.problem, s, m, l)

    def rescaled(self, acc, m, l):
        return acc, m, l


@dataclass(frozen=True)
class Guess(RunningMaximum):
    """m is a guess, and where one fails the maximum.

    A row of the lse in SMEM, `again`, says for each warpgroup i what is to be done again:
    at [2 i] the first turn, and at [2 i + 1] the one after the last, 0 if none is.

    kept: (block_q,), the largest l that each of my rows has had in this list.
    guesses: whether I still guess in this turn. is_last(): whether it is the last.
    """

    kept: jax.Array | None = None
    turns: Turns | None = None
    i: jax.Array | None = None
    is_last: Callable | None = None
    guesses: jax.Array | None = None

    @property
    def headroom(self):
        return HEADROOM[self.problem.dtype.name]

    @property
    def again(self):
        return self.smem.lse.at[self.tiles.warpgroups]

    def begin(self, turns):
        self.request_redo(turns, 0)

    def request_redo(self, start, stop):
        self.again[2 * self.me] = jnp.asarray(start, jnp.float32)
        self.again[2 * self.me + 1] = jnp.asarray(stop, jnp.float32)

    def kept_at_first(self):
        zeros = jnp.zeros((self.tiles.block_q,), jnp.float32)
        return plgpu.layout_cast(zeros, ROWS)

    def in_turn(self, turns, turn, kept, is_last):
        guesses = self.again[2 * self.me + 1] == 0
        mine = {"i": turn.i, "is_last": is_last, "guesses": guesses}
        return dataclasses.replace(self, kept=kept, turns=turns, **mine)

    def after(self, l):
        return dataclasses.replace(self, kept=jnp.where(l > self.kept, l, self.kept))

    def first_maximum(self, s):
        return self.maximum(s) + self.headroom

    def rules(self):
        return [(FixedMaximum(self.problem), self.guesses), (self, ~self.guesses)]

    def lse(self, m, l, constant):
        """lse of my rows, inf in those whose guess has failed, now or before."""
        lse = super().lse(m - self.headroom, l * 2.0**self.headroom, constant)
        most = jnp.float32(min(self.problem.S, MOST))
        failed = self.kept > jnp.where(self.guesses, most, jnp.inf)
        return jnp.where(failed, jnp.inf, lse)

    def check_guess(self):
        """See if a guess of mine has failed, and note the turns that it spoils.

        A thread knows the sums of two rows, and all must agree: through SMEM. That
        takes time. So it is done after the turns 0, 3, 7, 11, ... and the last, for all
        since the time before.
        """
        (start, _), i = self.turns, self.i

        @pl.when(self.guesses & ((i == 0) | (i % 4 == 3) | self.is_last()))
        def _():
            lse = plgpu.load(self.smem.lse.at[self.me], layout=COLUMNS)
            # Not the maximum of lse: a NaN beside it must not hide it.
            failed = jnp.where(lse == jnp.inf, 1.0, 0.0).max() > 0
            since = jnp.where(i < 4, jnp.minimum(i, 1), i - i % 4)
            pl.when(failed)(lambda: self.request_redo(start + since, start + i + 1))

    def for_each_list(self, turns, one_list):
        """All turns, and then those that are to be done again."""
        me, warpgroups = self.me, self.tiles.warpgroups

        def body(state):
            which, start, count, step = state
            step = one_list(start, count, step)
            # Now all have checked their guesses. And nobody reads the stale operands
            # of the last scores any more.
            pl.when(me < warpgroups)(lambda: plgpu.barrier_arrive(self.smem.guess_checked))
            plgpu.barrier_wait(self.smem.guess_checked)
            return *self.next_list(which), step

        # which: 0 for the whole list, i + 1 for what warpgroup i wants again.
        first = jnp.int32(0), jnp.int32(0), turns, jnp.int32(0)
        lax.while_loop(lambda state: state[0] <= warpgroups, body, first)

    def next_list(self, which):
        """(which, start, count) of the next list, `which` above all if there is none.

        It is that of the next warpgroup that wants one, unless one before it asked for
        the same.
        """
        each = range(self.tiles.warpgroups)
        starts = [self.again[2 * i].astype(jnp.int32) for i in each]
        stops = [self.again[2 * i + 1].astype(jnp.int32) for i in each]
        following = jnp.int32(len(each) + 1), jnp.int32(0), jnp.int32(0)
        for i in reversed(each):
            wanted = (which <= i) & (stops[i] > 0)
            for other in range(i):
                wanted &= starts[i] != starts[other]
            mine = jnp.int32(i + 1), starts[i], stops[i] - starts[i]
            pairs = zip(mine, following, strict=True)
            following = [jnp.where(wanted, *pair) for pair in pairs]
        return following
