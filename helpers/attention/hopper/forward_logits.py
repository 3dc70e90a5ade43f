"""Scores become logits in the Hopper forward kernel: which keys a query sees, the soft cap, and sinks.

Most calls are full or causal: `Logits`. Windows, an offset, lengths and segments hide keys in `BlockSparseLogits`.

A cap c makes of products s the logits

    c tanh(scale s / c)  =  2 c g - c        g = 1 / (1 + e^(-2 scale s / c))

and the softmax does not feel the constant. So the kernel goes on with 2 c log2(e) g in the place of s. These are logits
in base two, which no factor scales (`in_base_two`), and m is c log2(e) less in the end. A `Guess` knows m beforehand,
and then the last product of g and the subtraction of m are one instruction. By g, tanh is off by 2^-21 at most, by
tanh.approx by 2^-11.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.extras import Extras
from helpers.attention.hopper.forward_kernel import Part, RunningMaximum
from helpers.attention.hopper.guess import Guess
from helpers.attention.hopper.tile_scheduler import (
    BlockSparseScheduler,
    DynamicBlockSparseScheduler,
    DynamicScheduler,
    TileScheduler,
)
from helpers.attention.hopper.visible_tiles import View
from helpers.attention.hopper.warpgroup import MATRIX, ROWS, opaque, reciprocal
from helpers.attention.online_softmax import LOG2_E

LOWEST = float(jnp.finfo(jnp.float32).min)


def in_base_two(problem):
    """The problem as the kernel works at it: with a soft cap c, scale_2 is 1, and soft_cap is (c, c / scale)."""
    if problem.soft_cap is None:
        return problem
    return dataclasses.replace(problem, scale=1 / LOG2_E, soft_cap=(problem.soft_cap, problem.soft_cap / problem.scale))


def capped_in_base_two(s, cap, cap_of_products, interpret):
    """2 c log2(e) g of products s, (rows, columns).

    In a cycle an SM multiplies 128 pairs of numbers, and takes 16 exponentials or reciprocals. So four columns share a
    reciprocal, and a NaN: hidden products have to be numbers. 31: float32 holds what four of them multiply to, and a g
    of 2^-31 is 0 beside the others.
    """
    d = 1 + jnp.exp2(jnp.minimum((-2 * LOG2_E / cap_of_products) * s, 31))
    width = s.shape[1] // 4
    d = [d[:, start : start + width] for start in range(0, s.shape[1], width)]
    pairs = d[0] * d[1], d[2] * d[3]
    of_all = (2 * LOG2_E * cap) * reciprocal(pairs[0] * pairs[1], interpret)
    of_pairs = of_all * pairs[1], of_all * pairs[0]
    return jnp.concatenate([of_pairs[i // 2] * d[i ^ 1] for i in range(4)], axis=1)


@dataclass(frozen=True)
class Logits(Part):
    """The end of the keys hides some, and perhaps a causal mask."""

    @staticmethod
    def scheduler(refs, smem, interpret, *own):
        if refs.counter is None:
            return TileScheduler(*own)
        return DynamicScheduler(*own, refs.counter, smem.lse, smem.places_known, interpret)

    @property
    def is_causal(self):
        return self.problem.band.right == 0

    @property
    def has_masks(self):
        """Whether some tile needs a mask."""
        return self.is_causal or self.problem.S % self.tiles.block_k

    def of_first_tile(self, turn, s):
        """The logits of the first key tile of a turn."""
        return self.logits(s, functools.partial(self.first_hidden, turn))

    def of_tile(self, turn, s, j, is_masked):
        """The logits of key tile j of a turn."""
        return self.logits(s, functools.partial(self.hidden, turn, j) if is_masked else lambda s, filler: s)

    def logits(self, s, hidden):
        """Those of products s, from a function that hides numbers: hidden(s, filler)."""
        if self.problem.soft_cap is not None:
            s = capped_in_base_two(hidden(s, 0.0), *self.problem.soft_cap, self.interpret)
        return hidden(s, -jnp.inf)

    def first_hidden(self, turn, s, filler):
        """`hidden` of the first tile, where some query does not see all of its keys."""
        block_k = self.tiles.block_k
        if self.problem.S < block_k:
            return self.hidden(turn, 0, s, filler)
        if self.is_causal:
            return self.perhaps_hidden(turn, s, filler, turn.q_start + 1 < block_k)
        return s

    def perhaps_hidden(self, turn, s, filler, is_cut):
        """Known when the kernel runs. A loop takes fewer registers than a cond."""
        return lax.fori_loop(0, jnp.int32(is_cut), lambda _, s: self.hidden(turn, 0, s, filler), s)

    def hidden(self, turn, j, s, filler):
        """Of key tile j, with the filler where a query does not see the key."""
        block_q, block_k = self.tiles[:2]
        visible = self.problem.S - j * block_k  # how many of these keys a row sees
        if self.is_causal:
            rows = plgpu.broadcasted_iota(jnp.int32, (block_q,), 0, layout=ROWS)
            seen = turn.q_start + 1 - j * block_k + opaque(rows)
            visible = lax.broadcast_in_dim(jnp.minimum(visible, seen), s.shape, [0])
        cols = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
        return jnp.where(cols < visible, s, filler)

    @property
    def constant(self):
        """How far the logits are above the caller's, in base two."""
        return 0.0 if self.problem.soft_cap is None else LOG2_E * self.problem.soft_cap[0]

    def at_the_end(self, turn, out, lse):
        """out, and lse as a function, of a turn. A sink leaves the keys sigmoid(lse - sink) of the weight."""
        if self.refs.sinks is None:
            return out, lse
        sink, of_keys = Extras.sink_of(self.refs.sinks, turn.b, turn.n), lse()
        above = LOG2_E * (sink - jnp.maximum(of_keys, LOWEST))
        left = 1 / (1 + jnp.exp2(above))
        with_sink = jnp.maximum(of_keys, sink) + jnp.log2(1 + jnp.exp2(-jnp.abs(above))) / LOG2_E
        return out * lax.broadcast_in_dim(left, out.shape, [0]), lambda: with_sink


@dataclass(frozen=True)
class BlockSparseLogits(Logits):
    """Queries go through the `VisibleTiles` of keys, and are hidden from others there by a `View`."""

    has_masks = True

    @staticmethod
    def scheduler(refs, smem, interpret, *own):
        if refs.counter is None:
            return BlockSparseScheduler(*own, refs.visible_tiles)
        return DynamicBlockSparseScheduler(
            *own, refs.counter, smem.lse, smem.places_known, interpret, refs.visible_tiles
        )

    def first_hidden(self, turn, s, filler):
        return self.perhaps_hidden(turn, s, filler, turn.visible.whole == 0)

    def hidden(self, turn, j, s, filler):
        view, tile = View.of_queries(turn.visible, self.problem, self.refs, self.tiles.block_k), turn.visible.at(j)
        return view.hidden(s, filler, turn.q_start, tile * self.tiles.block_k, turn.visible.is_mixed(tile))

    def at_the_end(self, turn, out, lse):
        """A row that sees nothing has out = 0, and its lse is -inf, or its sink."""
        of_keys = lse()
        sees_some = lax.broadcast_in_dim(of_keys, out.shape, [0]) > -jnp.inf
        return super().at_the_end(turn, jnp.where(sees_some, out, 0), lambda: of_keys)


@dataclass(frozen=True)
class MaximumOfSeen(RunningMaximum):
    """A maximum that is finite also where a row has seen nothing yet."""

    def maximum(self, s):
        return jnp.maximum(super().maximum(s), LOWEST)

    first_maximum = maximum


@dataclass(frozen=True)
class GuessOfWhole(Guess):
    """A guess in turns that begin with a tile that all rows see whole; in the others, the maximum.

    is_whole: whether this is such a turn.
    """

    is_whole: jax.Array | None = None

    def maximum(self, s):
        return jnp.maximum(super().maximum(s), LOWEST)

    def in_turn(self, turns, turn, *more):
        return dataclasses.replace(super().in_turn(turns, turn, *more), is_whole=turn.visible.whole > 0)

    def after(self, l):
        return dataclasses.replace(self, kept=jnp.where(self.is_whole & (l > self.kept), l, self.kept))

    def rules(self):
        (guess, holds), _ = super().rules()
        holds &= self.is_whole
        return [(guess, holds), (self, ~holds)]
