"""Scores become logits in the Hopper forward kernel: which keys a query sees, the soft cap, and sinks.

Most calls are full or causal: `Logits`. Windows, an offset, lengths and segments hide keys in `WalkedLogits`.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.forward_kernel import Part, RunningMaximum
from helpers.attention.hopper.guess import Guess
from helpers.attention.hopper.tile_scheduler import TileScheduler, WalkScheduler
from helpers.attention.hopper.walks import View, capped
from helpers.attention.hopper.warpgroup import MATRIX, ROWS, anew
from helpers.attention.portable.tiles import LOG2_E

LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class Logits(Part):
    """The end of the keys hides some, and perhaps a causal mask."""

    @staticmethod
    def scheduler(refs, *own):
        return TileScheduler(*own)

    @property
    def is_causal(self):
        return self.problem.band.right == 0

    @property
    def has_masks(self):
        """Whether some tile needs a mask."""
        return self.is_causal or self.problem.S % self.tiles.block_k

    def of_first_tile(self, turn, s):
        """The logits of the first key tile of a turn."""
        return self.first_hidden(turn, capped(s, self.problem)[0])

    def of_tile(self, turn, s, j, is_masked):
        """The logits of key tile j of a turn."""
        s, _ = capped(s, self.problem)
        return self.hidden(turn, s, j) if is_masked else s

    def first_hidden(self, turn, s):
        """`hidden` of the first tile, where some query does not see all of its keys."""
        block_k = self.tiles.block_k
        if self.problem.S < block_k:
            return self.hidden(turn, s, 0)
        if self.is_causal:
            return self.perhaps_hidden(turn, s, turn.q_start + 1 < block_k)
        return s

    def perhaps_hidden(self, turn, s, is_cut):
        """Known when the kernel runs. A loop takes fewer registers than a cond."""
        return lax.fori_loop(0, jnp.int32(is_cut), lambda _, s: self.hidden(turn, s, 0), s)

    def hidden(self, turn, s, j):
        """The logits of key tile j, -inf where a query does not see the key."""
        block_q, block_k = self.tiles[:2]
        visible = self.problem.S - j * block_k  # how many of these keys a row sees
        if self.is_causal:
            rows = plgpu.broadcasted_iota(jnp.int32, (block_q,), 0, layout=ROWS)
            seen = turn.q_start + 1 - j * block_k + anew(rows)
            visible = lax.broadcast_in_dim(jnp.minimum(visible, seen), s.shape, [0])
        cols = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
        return jnp.where(cols < visible, s, -jnp.inf)

    def at_the_end(self, turn, out, lse):
        """out, and lse as a function, of a turn. A sink leaves the keys sigmoid(lse - sink) of the weight."""
        if self.refs.sinks is None:
            return out, lse
        sink, of_keys = self.refs.sinks[turn.n], lse()
        above = LOG2_E * (sink - jnp.maximum(of_keys, LOWEST))
        left = 1 / (1 + jnp.exp2(above))
        with_sink = jnp.maximum(of_keys, sink) + jnp.log2(1 + jnp.exp2(-jnp.abs(above))) / LOG2_E
        return out * lax.broadcast_in_dim(left, out.shape, [0]), lambda: with_sink


@dataclass(frozen=True)
class WalkedLogits(Logits):
    """Queries go walks through the key tiles that they see, and are hidden from others there by a `View`."""

    has_masks = True

    @staticmethod
    def scheduler(refs, *own):
        return WalkScheduler(*own, refs.walks)

    def first_hidden(self, turn, s):
        return self.perhaps_hidden(turn, s, turn.walk.whole == 0)

    def hidden(self, turn, s, j):
        view, tile = View.of_queries(turn.walk, self.problem, self.refs), turn.walk.at(j)
        return view.hidden(s, -jnp.inf, turn.q_start, tile * self.tiles.block_k, turn.walk.is_mixed(tile))

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

    def in_turn(self, turns, turn, kept):
        return dataclasses.replace(super().in_turn(turns, turn, kept), is_whole=turn.walk.whole > 0)

    def after(self, l):
        return dataclasses.replace(self, kept=jnp.where(self.is_whole & (l > self.kept), l, self.kept))

    def rules(self):
        (guess, holds), _ = super().rules()
        holds &= self.is_whole
        return [(guess, holds), (self, ~holds)]
