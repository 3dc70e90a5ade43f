"""What few calls ask of the Hopper kernels: the tiles that masks leave, what is hidden there, soft caps.

Windows, an offset, lengths and segments hide whole tiles. Before a kernel starts, `visible_tiles` makes of the kinds
of tiles (see `masking`) a list of the `VisibleTiles` of all tiles of queries, or of keys, and the programs take them
from there. The memory warpgroup and the compute warpgroups of a program go through the same tiles, each by itself.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.extras import Extras
from helpers.attention.hopper.ptx import loaded_early
from helpers.attention.hopper.warpgroup import COLUMNS, MATRIX, ROWS, opaque
from helpers.attention.masking import FULL, HIDDEN, NO_BAND, Band, segment_kinds, tile_kinds
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.problem import MAX_LENGTH


class VisibleTiles(NamedTuple):
    """The tiles of keys that a tile of queries visits, or of queries that a tile of keys visits, in their order.

    b, tile: the batch entry and the number of the tile itself. It visits `length` tiles, from `first` on. The order
    begins at `start` with `whole` ones of which every pair is seen; then come those before them, then those after.
    mixed: a bit for those before the whole ones, 1, and one for those after, 2, where segments hide some pair.
    query_length, key_length: of the batch entry; integers where all entries are as long as the arrays.
    """

    b: jax.Array
    tile: jax.Array
    first: jax.Array
    start: jax.Array
    length: jax.Array
    whole: jax.Array
    mixed: jax.Array
    query_length: jax.Array | int
    key_length: jax.Array | int

    @classmethod
    def read(cls, ref, row, problem, early=False):
        """Those of a row of `visible_tiles`, or None of None. early: before the kernel's first barrier, on a GPU."""
        if ref is None:
            return None
        columns = loaded_early(ref.at[row]) if early else [ref[row, column] for column in range(ref.shape[1])]
        return cls(*columns) if len(columns) == len(cls._fields) else cls(*columns, problem.T, problem.S)

    def at(self, place):
        """The tile at a place of their order."""
        rest = place - self.whole
        tile = jnp.where(rest < self.start - self.first, rest, place) + self.first
        return jnp.where(rest < 0, self.start + place, tile)

    def is_mixed(self, tile):
        """1 where segments may hide some pair in a tile, else 0."""
        return jnp.where(tile < self.start, self.mixed, self.mixed >> 1) & 1


def is_block_sparse(call):
    """Whether a call hides keys in another way than causally."""
    has_lengths = not (call.query_lengths is None and call.key_lengths is None)
    return call.problem.band not in (NO_BAND, Band(right=0)) or has_lengths or call.hides_keys


def visible_tiles(call, block_q, block_k, own="queries"):
    """int32 (B tiles, 9, or 7 without lengths): a `VisibleTiles` of each tile of queries, or with own="keys" of keys.

    Those that see most tiles come first. What sees nothing has a list of one, for a pipeline has to have something to
    do. In a short call XLA's kernels for this list take a good part of the time, so there are few.
    """
    if own == "keys":
        call, block_q, block_k = mirrored(call), block_k, block_q
    problem, extras = call.problem, call.extras
    kinds, of_segments = tile_kinds(call, block_q, block_k)[:, 0], FULL
    if extras.query_segment_ids is not None:
        of_segments = segment_kinds(extras.query_segment_ids, extras.key_segment_ids, block_q, block_k)[:, 0]
    xp = np if isinstance(kinds, np.ndarray) else jnp
    batch, (_, tiles, others) = problem.B, kinds.shape
    place = xp.arange(others, dtype=np.int32)
    seen, whole = kinds > HIDDEN, kinds == FULL
    cut = seen & (of_segments < FULL)
    ends = [xp.where(wanted, at, others) for wanted in (seen, whole, cut) for at in (place, -1 - place)]
    ends, (unseen, whole) = _least_and_sums(ends, [-1 * seen, 1 * whole], xp)
    (first, start, cut), (stop, stop_whole, stop_cut) = ends[::2], (-end for end in ends[1::2])
    first = xp.minimum(first, others - 1)
    length = xp.maximum(stop - first, 1)
    whole = xp.where(whole == stop_whole - start, whole, xp.minimum(whole, 1))  # without a gap
    start = xp.where(whole > 0, start, first)
    has_gaps = -unseen < length  # by segments
    mixed = ((cut < start) | has_gaps) + 2 * ((stop_cut > start) | has_gaps)

    columns = [xp.arange(batch)[:, None], xp.arange(tiles), first, start, length, whole, mixed]
    if not (call.query_lengths is None and call.key_lengths is None):
        lengths = [length[:, None] for length in call.real_lengths()]
        columns += lengths if own == "queries" else lengths[::-1]
    in_order = xp.argsort(xp.broadcast_to(unseen, (batch, tiles)).reshape(-1), stable=True)
    columns = xp.stack([xp.broadcast_to(column, (batch, tiles)) for column in columns], axis=-1)
    return jnp.asarray(columns.reshape(batch * tiles, -1)[in_order].astype(np.int32))


def mirrored(call):
    """What `visible_tiles` reads of a call, with its keys in the place of its queries."""
    problem, extras = call.problem, call.extras
    band = Band(problem.band.right, problem.band.left)
    return dataclasses.replace(
        call,
        problem=dataclasses.replace(problem, T=problem.S, S=problem.T, band=band),
        query_lengths=call.key_lengths,
        key_lengths=call.query_lengths,
        extras=Extras(query_segment_ids=extras.key_segment_ids, key_segment_ids=extras.query_segment_ids),
    )


def _least_and_sums(these, those, xp):
    """The smallest numbers of these tables (B, tiles, others) along the last axis, and the sums of those."""
    if xp is np:
        return [table.min(axis=-1) for table in these], [table.sum(axis=-1) for table in those]
    how = [lax.min] * len(these) + [lax.add] * len(those)
    tables = [table.astype(jnp.int32) for table in (*these, *those)]
    starts = [jnp.int32(2**30 if one is lax.min else 0) for one in how]
    merged = lambda some, more: [one(*pair) for one, *pair in zip(how, some, more, strict=True)]
    found = lax.reduce(tables, starts, merged, (2,))
    return found[: len(these)], found[len(these) :]


def padded(array, sizes):
    """The array with zeros after it, where an axis has a larger one in sizes, {axis: size}."""
    after = {axis: size - array.shape[axis] for axis, size in sizes.items()}
    return jnp.pad(array, [(0, after.get(axis, 0)) for axis in range(array.ndim)]) if any(after.values()) else array


def padded_ids(call, block_q, block_k):
    """{name: segment numbers of all tiles} of queries and of keys, or nothing."""
    extras = call.extras
    if extras.query_segment_ids is None:
        return {}
    of_each = lambda ids: jnp.broadcast_to(ids, (call.problem.B, ids.shape[1]))  # in vmap, all may share them
    whole = lambda ids, block: jnp.pad(of_each(ids), ((0, 0), (0, -ids.shape[1] % block)))
    ids = whole(extras.query_segment_ids, block_q), whole(extras.key_segment_ids, block_k)
    return dict(zip(("query_ids", "key_ids"), ids, strict=True))


def last_tiles(array, lengths, block):
    """(B, block, K, H): of each batch entry the tile of `array` (B, S, K, H) where it ends, and zeros from there on."""
    lengths = jnp.clip(lengths, 0, array.shape[1])[:, None]
    rows = lengths // block * block + jnp.arange(block)
    tiles = jnp.take_along_axis(array, rows[:, :, None, None], axis=1, mode="clip")
    return jnp.where((rows < lengths)[:, :, None, None], tiles, 0)


def without_padding(array, lengths):
    """array (B, S, K, H) with zeros from the lengths (B,) on, whatever is there: a weight of 0 does not hide a NaN."""
    if lengths is None:
        return array
    return jnp.where(jnp.arange(array.shape[1])[:, None, None] < lengths[:, None, None, None], array, 0)


def capped(s, problem):
    """Scaled by problem.scale, c tanh(scale s / c) for a soft cap c, and its slope 1 - tanh^2, of products s.

    The slope is None where there is no cap. By 1 - 2 / (1 + e^2x), tanh x is off by 2^-21 at most, by tanh.approx by
    2^-11.
    """
    cap, scale = problem.soft_cap, problem.scale
    if cap is None or scale == 0:
        return s, None
    rest = 1 / (1 + jnp.exp2((2 * LOG2_E * scale / cap) * s))
    return cap / scale - (2 * cap / scale) * rest, 4 * rest * (1 - rest)


class View(NamedTuple):
    """How rows of a tile in registers see its columns.

    band: that of rows against columns; lengths: of rows and of columns, or None where no tile has a position past the
    end that could do harm; ids: refs of their segment numbers, in GMEM, of this batch entry, or None.
    """

    band: Band
    lengths: tuple | None
    ids: tuple | None

    @classmethod
    def of_queries(cls, visible, problem, refs, block_k):
        """Rows are queries, columns keys. refs: has query_ids (B, T') and key_ids (B, S'), or None in their place."""
        ids = None if refs.query_ids is None else (refs.query_ids.at[visible.b], refs.key_ids.at[visible.b])
        # What queries past the end make of the keys, nobody stores.
        are_whole = isinstance(visible.key_length, int) and problem.S % block_k == 0
        return cls(problem.band, None if are_whole else (visible.query_length, visible.key_length), ids)

    @classmethod
    def of_keys(cls, visible, problem, refs, block_k):
        """Rows are keys, columns queries."""
        band, lengths, ids = cls.of_queries(visible, problem, refs, block_k)
        return cls(Band(band.right, band.left), lengths and lengths[::-1], ids and ids[::-1])

    def hidden(self, table, filler, row_start, col_start, is_mixed):
        """The table (rows, columns) of the tile that begins at these positions, the filler where a key is not seen.

        As `masking.visible`, with segments where is_mixed is 1 and not 0. It compares columns with a number for each
        row, which takes few registers. So does a loop, compared with a cond.
        """
        rows = row_start + opaque(plgpu.broadcasted_iota(jnp.int32, table.shape[:1], 0, layout=ROWS))
        cols = plgpu.broadcasted_iota(jnp.int32, table.shape, 1, layout=MATRIX)
        wide = lambda row: lax.broadcast_in_dim(row, table.shape, [0])
        left, right = self.band.left, self.band.right
        if right is not None or self.lengths is not None:
            row_length, col_length = self.lengths or (MAX_LENGTH, MAX_LENGTH)
            stop = col_length if right is None else jnp.minimum(col_length, rows + right + 1)
            table = jnp.where(cols < wide(jnp.where(rows < row_length, stop - col_start, 0)), table, filler)
        if left is not None:
            table = jnp.where(cols >= wide(rows - left - col_start), table, filler)
        if self.ids is None:
            return table

        def of_own_segment(_, table):
            load = functools.partial(plgpu.load, optimized=False)
            row_ids = load(self.ids[0].at[pl.ds(row_start, table.shape[0])], layout=ROWS)
            col_ids = load(self.ids[1].at[pl.ds(col_start, table.shape[1])], layout=COLUMNS)
            return jnp.where(wide(row_ids) == lax.broadcast_in_dim(col_ids, table.shape, [1]), table, filler)

        return lax.fori_loop(0, is_mixed, of_own_segment, table)
