"""How the kernels by `plgpu.mma` see what few calls have: the logits of a pair of tiles, and which pairs there are.

Refs of the `Extras` of a call and of the `TileLists` of `masking` are all in GMEM, T and S rounded up to whole tiles,
and a mask as int8. Where rows of a kernel's tiles are keys, the last two axes of tables have changed places. A tile of
a table is read as the registers of the sum hold it, from where it is.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention import scores
from helpers.attention.extras import Extras, own_index
from helpers.attention.masking import NO_BAND, for_kernel, key_tiles, whole_tiles
from helpers.attention.mosaic.warp import ACC, COLUMNS, ROWS, along, load_rows, tile_order
from helpers.attention.mosaic.words import Late, in_words
from helpers.attention.problem import Problem
from helpers.attention.scores import changes_logits


def extras_and_lists(call, block_q, block_k, outer="queries"):
    """The `Extras` and the `TileLists` of a call for a kernel with tiles of one side, "queries" or "keys", or no lists.

    They are rounded up to whole tiles, in zeros, and masks become int8: a copy of each array, unless its lengths are
    whole tiles, it is no mask, and the tiles are of queries.
    """
    extras, lists = for_kernel(call, block_q, block_k, outer, joins_groups=outer == "keys")
    to_whole = lambda size, block: (0, -size % block if size > 1 else 0)

    def table(array):
        array = array.astype(jnp.int8) if array.dtype == jnp.bool_ else array
        _, _, T, S = array.shape
        array = jnp.pad(array, ((0, 0), (0, 0), to_whole(T, block_q), to_whole(S, block_k)))
        return array if outer == "queries" else array.swapaxes(2, 3)

    ids = lambda array, block: jnp.pad(array, ((0, 0), (0, -array.shape[1] % block)))
    changed = {name: jax.tree.map(table, getattr(extras, name)) for name in ("bias", "mask", "score_arrays")}
    if extras.query_segment_ids is not None:
        changed["query_segment_ids"] = ids(extras.query_segment_ids, block_q)
        changed["key_segment_ids"] = ids(extras.key_segment_ids, block_k)
    return extras._replace(**changed), lists


def listed_order(lists, b, head, tile, others, group=1):
    """The `TileOrder` through the tiles in the list of one tile. others: how many tiles the other side has."""
    of_tile = own_index(b, lists.seen, 0), own_index(head, lists.seen, 1), tile
    seen, full = (lax.max(counts[of_tile], 0) for counts in (lists.seen, lists.full))
    joined = lists.tiles.shape[3] > others  # a list of all heads of the group
    zero = jnp.int32(0)
    order = tile_order((zero, seen), (zero, full), 1 if joined else group)

    def place(step):
        member, turn = order.place(step)
        entry = lists.tiles[(*of_tile, turn)]
        return (lax.div(entry, others), lax.rem(entry, others)) if joined else (member, entry)

    return order._replace(place=place)


def order_of_keys(problem, lists, lengths, b, n, i, tiles, length):
    """The `TileOrder` through the tiles of keys that tile i of queries sees. length: of all keys, in whole tiles."""
    block_q, block_k, _ = tiles
    if lists is not None:
        return listed_order(lists, b, n, i, others=length // block_k)
    queries = i * block_q, i * block_q + block_q
    needed = whole = key_tiles(*queries, block_k, problem.band, *lengths, xp=jnp)
    if problem.band != NO_BAND or not isinstance(lengths[0], int) or problem.S % block_k:
        whole = whole_tiles(needed, *queries, block_k, problem.band, *lengths)
    return tile_order(needed, whole)


@dataclass(frozen=True)
class Pair:
    """A tile of queries of one head and a tile of keys, whose scores are in registers (ACC).

    lengths: how many queries and keys are real. extras: refs, or None. starts: the first position of rows and of
    columns. shape: of the tile. query_axis: 0 where its rows are queries, 1 where they are keys.
    """

    problem: Problem
    extras: Extras | None
    lengths: tuple
    b: jax.Array
    n: jax.Array
    starts: tuple
    shape: tuple
    query_axis: int

    @property
    def changes_logits(self):
        return changes_logits(self.problem, self.extras)

    def logits(self, s):
        """Natural logits of scaled products."""
        return self._in_words(lambda s, *others: scores.logits(s, self.problem, *others))(s, *self._of_logits())

    def logits_and_derivative(self, s):
        """The same, and a function that takes the gradient of these logits back to the scaled products."""
        logits = lambda s, *others: jax.vjp(lambda s: scores.logits(s, self.problem, *others), s)
        s, pull_back = self._in_words(logits)(s, *self._of_logits())
        return s, lambda ds: self._in_words(lambda pull_back, ds: pull_back(ds)[0])(pull_back, ds)

    def seen(self):
        """Booleans: which query sees which key."""
        extras, seen = self.extras or Extras(), self._within_band()
        if self.problem.mask_mod is None and not extras.hides_keys:
            return seen
        mask = None if extras.mask is None else self._tile(extras.mask) != 0
        ids = [
            None if ref is None else self._along(ref.at[own_index(self.b, ref, 0)], axis)
            for ref, axis in (
                (extras.query_segment_ids, self.query_axis),
                (extras.key_segment_ids, 1 - self.query_axis),
            )
        ]
        visible_by = lambda *arguments: scores.visible_by(self.problem, *arguments)
        return seen & self._in_words(visible_by)(*self._numbers(self.problem.mask_mod), mask, *ids)

    def _in_words(self, function):
        return in_words(function, is_exact=self.problem.dtype == jnp.float32)

    def _within_band(self):
        """As `masking.visible`, but for each query the last key that it sees is found once."""
        i, j = (self._positions(axis) for axis in (self.query_axis, 1 - self.query_axis))
        band, (query_length, key_length) = self.problem.band, self.lengths
        stop = key_length if band.right is None else jnp.minimum(i + (band.right + 1), key_length)
        stop = self._by_query(jnp.where(i < query_length, stop, 0))
        seen = self._by_key(j) < stop
        return seen if band.left is None else seen & (self._by_key(j) >= self._by_query(i - band.left))

    def _positions(self, axis):
        """A vector in registers."""
        layout = (ROWS, COLUMNS)[axis]
        return self.starts[axis] + plgpu.broadcasted_iota(jnp.int32, (self.shape[axis],), 0, layout=layout)

    def _by_query(self, vector):
        return along(vector, self.shape, self.query_axis)

    def _by_key(self, vector):
        return along(vector, self.shape, 1 - self.query_axis)

    def _of_logits(self):
        extras = self.extras or Extras()
        bias = None if extras.bias is None else self._tile(extras.bias)
        arrays = None if extras.score_arrays is None else [self._tile(ref) for ref in extras.score_arrays]
        return *self._numbers(self.problem.score_mod), bias, arrays

    def _numbers(self, function):
        """b, n, i and j, as a function gets them, if there is one."""
        if function is None:
            return None, None, None, None
        batch, heads = self.extras.batch, self.extras.heads
        own = batch[own_index(self.b, batch, 0)], heads[0, own_index(self.n, heads, 1)]
        # The barrier makes them read: the compiler sees that 0 * i is 0, and then has no layout for i.
        positions = lambda axis: along(lax.optimization_barrier(self._positions(axis)), self.shape, axis)
        wide = lambda axis: Late(self.shape, lambda: plgpu.layout_cast(positions(axis), ACC))
        return *own, wide(self.query_axis), wide(1 - self.query_axis)

    def _tile(self, table):
        """The tile of a table that these queries and keys meet; a number where it has neither."""
        table = table.at[own_index(self.b, table, 0), own_index(self.n, table, 1)]
        rows, columns = (pl.ds(start, size) for start, size in zip(self.starts, self.shape, strict=True))
        if table.shape[0] == 1 and table.shape[1] == 1:
            return table[0, 0]
        if table.shape[0] == 1:
            return self._along(table.at[0], 1)
        if table.shape[1] == 1:
            return self._along(table.at[:, 0], 0)
        return plgpu.load(table.at[rows, columns], layout=ACC, optimized=False)

    def _along(self, vector, axis):
        """What a ref has for the positions of an axis, repeated to the tile."""
        part = vector.at[pl.ds(self.starts[axis], self.shape[axis])]
        return along(load_rows(part, (ROWS, COLUMNS)[axis]), self.shape, axis)
