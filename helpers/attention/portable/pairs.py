"""How the plain kernels see what few calls have: the logits of a pair of tiles, and which pairs there are to see.

Refs of the `Extras` of a call, as one program sees them, with the G query heads that it has, 1 or those of a key head
(an axis that serves all is 1):

    bias, mask, score arrays    (G, T', S'), in whole tiles
    query_segment_ids, key_segment_ids  (T',), (S',)
    sinks, heads    (G,)
    batch           ()

and of the `TileLists` of `masking`, for the one tile that it has, of queries or of keys:

    tiles           (G, other tiles)  those that it sees, the full ones first
    seen, full      (G,)    how many it sees, and how many of them have nothing to hide

`Masks` has both, and two lengths, (): how many queries and keys of this batch entry are real.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention import scores
from helpers.attention.extras import AXES, Extras
from helpers.attention.masking import TileLists, for_kernel, visible
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.portable.tiles import whole
from helpers.attention.problem import Problem


class Masks(NamedTuple):
    """What a program sees of masks and scores: refs, each of which may be None."""

    query_length: jax.Array | None
    key_length: jax.Array | None
    extras: Extras
    lists: TileLists | None

    def lengths(self, problem):
        """How many queries and keys are real: all, or as many as the refs hold, cut to the arrays."""
        lengths = (self.query_length, problem.T), (self.key_length, problem.S)
        return [longest if length is None else jnp.minimum(length[...], longest) for length, longest in lengths]

    @property
    def sink(self):
        """The sink of the only head of a program, or None."""
        return None if self.extras.sinks is None else self.extras.sinks[0]


@dataclass(frozen=True)
class Pair:
    """A tile of queries of one head and a tile of keys.

    lengths: of queries and keys. extras: refs. head: its number among those of the program. rows, cols:
    positions, (block_q,) and (block_k,), and starts, the first of each. is_full: whether all queries see all keys.
    """

    problem: Problem
    lengths: tuple
    extras: Extras
    head: jax.Array | int
    rows: jax.Array
    cols: jax.Array
    starts: tuple
    is_full: jax.Array

    def logits(self, s):
        """The logits of scaled products, both float32 in base 2, and a function that
        takes a gradient of natural logits back to the natural scaled products.
        """
        if not scores.changes_logits(self.problem, self.extras):
            return s, lambda ds: ds
        others = *self._numbers(), self._tile(self.extras.bias), list(map(self._tile, self.extras.score_arrays or ()))
        of_natural = lambda s: scores.logits(s, self.problem, *others)
        s, pull_back = jax.vjp(of_natural, s / LOG2_E)
        # Where it is hidden, a bias may be NaN, and then a cap's slope is, too.
        return LOG2_E * s, lambda ds: self.hidden(pull_back(ds)[0], 0)

    def hidden(self, table, filler):
        """The table (block_q, block_k) with the filler where a query does not see a key."""
        hide = lambda table: jnp.where(self._seen(), table, filler)
        return lax.cond(self.is_full, lambda table: table, hide, table)

    def _seen(self):
        problem, extras = self.problem, self.extras
        rows, cols = self.rows[:, None], self.cols[None, :]
        seen = visible(rows, cols, problem.band, *self.lengths)
        if problem.mask_mod is None and not extras.hides_keys:
            return seen
        query_ids = key_ids = None
        if extras.query_segment_ids is not None:
            of = lambda ref, start, size: ref[pl.ds(start, size)] if ref.shape[0] > 1 else ref[...]
            query_ids = of(extras.query_segment_ids, self.starts[0], rows.size)[:, None]
            key_ids = of(extras.key_segment_ids, self.starts[1], cols.size)[None, :]
        return seen & scores.visible_by(problem, *self._numbers(), self._tile(extras.mask), query_ids, key_ids)

    def _numbers(self):
        """b, n, i and j, as mask_mod and score_mod get them."""
        if self.problem.mask_mod is None and self.problem.score_mod is None:
            return None, None, None, None
        b, n = self.extras.batch[...], self.extras.heads[_own(self.head, self.extras.heads)]
        return b, n, self.rows[:, None], self.cols[None, :]

    def _tile(self, ref):
        """The tile of a table that rows and cols meet, zeros past its end; a number where it has neither."""
        if ref is None:
            return None
        _, T, S = ref.shape
        head = _own(self.head, ref)
        if T == S == 1:
            return ref[head, 0, 0]
        rows = pl.ds(self.starts[0], self.rows.size) if T > 1 else pl.ds(0, 1)
        cols = pl.ds(self.starts[1], self.cols.size) if S > 1 else pl.ds(0, 1)
        is_pair = (self.rows < self.problem.T)[:, None] & (self.cols < self.problem.S)[None, :]
        return jnp.where(is_pair, ref[head, rows, cols], jnp.zeros((), ref.dtype))


def over_tiles(lists, head, needed, whole, one_tile, state):
    """The state after one_tile(tile, is_full, state) for the tiles in the list of a head, or in the range `needed`, of
    which those in the range `whole` are seen whole."""

    def of_list(at, state):
        tile, full = lists.tiles[_own(head, lists.tiles), at], lists.full[_own(head, lists.full)]
        return one_tile(tile, at < full, state)

    of_range = lambda tile, state: one_tile(tile, (whole[0] <= tile) & (tile < whole[1]), state)
    if lists is None:
        return lax.fori_loop(*needed, of_range, state)
    return lax.fori_loop(0, lists.seen[_own(head, lists.seen)], of_list, state)


def _own(head, ref):
    """Where a ref has what belongs to a head of the program: 0 where it has the same for all."""
    return jnp.asarray(head if ref.shape[0] > 1 else 0, jnp.int32)  # a load takes no Python number


def masks_and_specs(call, tiles, outer="queries"):
    """The `Masks` of a call and their specs, for programs (tile, head or key head, batch entry). outer: whose tiles."""
    sizes = 1 if outer == "queries" else call.problem.group, tiles.block_q, tiles.block_k
    extras, lists = for_kernel(call, tiles.block_q, tiles.block_k, outer)
    masks = Masks(call.query_lengths, call.key_lengths, extras, lists)
    spec = pl.BlockSpec((None,), lambda i, n, b: (b,))
    lengths = [None if length is None else spec for length in masks[:2]]
    return masks, Masks(*lengths, _specs(extras, *sizes), _specs(lists, *sizes))


def _specs(tree, heads, block_q, block_k):
    """Specs of `Extras` or `TileLists` for programs (tile, head or key head, batch entry), which have `heads` heads."""

    def spec(array, axes):
        """axes: a letter for each: "B", "N", "O" for the outer tile, "T", "S" or "-" for what a program has all of."""
        axes_and_sizes = list(zip(axes, array.shape, strict=True))
        all_of = lambda axis, size: whole(size, {"T": block_q, "S": block_k}.get(axis, 1)) if size > 1 else 1
        sizes = {"B": None, "N": min(heads, array.shape[1]) if array.ndim > 1 else None, "O": None}
        block = tuple(sizes.get(axis, all_of(axis, size)) for axis, size in axes_and_sizes)

        def index(tile, n, b):
            numbers = {"B": b, "N": n, "O": tile}
            return tuple(0 if size == 1 else numbers.get(axis, 0) for axis, size in axes_and_sizes)

        return pl.BlockSpec(block, index)

    if tree is None:
        return None
    axes = {**AXES, "tiles": "BNO-", "seen": "BNO", "full": "BNO"}
    of_field = lambda name, field: jax.tree.map(lambda array: spec(array, axes.get(name, "BNTS")), field)
    return type(tree)(*(of_field(name, field) for name, field in tree._asdict().items()))
