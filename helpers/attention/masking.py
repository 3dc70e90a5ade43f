"""Which keys a query may see, and which tiles a kernel may skip.

Most masks of this package are a *band* cut by two lengths. Query ``i`` sees key ``j`` when

    i - left <= j <= i + right    and    i < query_length    and    j < key_length

Causal attention is the band ``right = 0``; a local window is a band with both edges.
Segments and functions and arrays of the caller hide more. Of those a kernel learns by the kinds
of tiles: of each, whether no, some or every pair is visible.
The same functions serve the NumPy twins and the Pallas kernels: pass ``xp=jax.numpy``
where the arguments are traced.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Band:
    """How far query i sees to the left and to the right of key i; None means without limit.

    A band that lies to one side of the diagonal has a negative edge.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, is_causal=False, window=None, offset=0):
        """The band of a causal flag and a ``(left, right)`` window, either of which may be absent.

        With an offset, query i has key i + offset in its place.
        """
        left, right = (None, None) if window is None else window
        if is_causal:
            right = 0 if right is None else min(right, 0)
        return cls(None if left is None else left - offset, None if right is None else right + offset)

    @property
    def mirrored(self):
        """How far a key is seen."""
        return Band(self.right, self.left)


NO_BAND = Band()  # every query sees every key


def visible(rows, cols, band, query_length, key_length):
    """Boolean mask of ``rows`` against ``cols`` (broadcast together): True where the key is seen.

    rows, cols: integer positions, for example of shapes (block_q, 1) and (1, block_k).
    """
    seen = (rows < query_length) & (cols < key_length)
    if band.left is not None:
        seen &= cols >= rows - band.left
    if band.right is not None:
        seen &= cols <= rows + band.right
    return seen


def sees_some(rows, band, query_length, key_length):
    """Boolean mask of the ``rows`` that see any key: a band that holds a key of a query holds the first it could see.

    rows: integer positions; the lengths are broadcast to them.
    """
    sees = (rows < query_length) & (key_length > 0)
    if band.right is not None and band.right < 0:
        sees &= rows + band.right >= 0
    return sees if band.left is None else sees & (rows - band.left < key_length)


def key_tiles(q_start, q_stop, block_k, band, query_length, key_length, xp=np):
    """Half-open range ``(first, stop)`` of the key tiles that queries q_start..q_stop-1 need.

    Tiles outside the range hold no visible key, so a kernel never loads them. The range is
    empty (first >= stop) when these queries see nothing.
    """
    q_stop = xp.minimum(q_stop, query_length)
    sees_some = q_start < q_stop
    first_key, stop_key = 0, key_length
    if band.right is not None:
        stop_key = xp.minimum(stop_key, q_stop + band.right)
        if band.right < 0:
            stop_key = xp.maximum(stop_key, 0)
    if band.left is not None:
        first_key = xp.maximum(q_start - band.left, 0)
        sees_some &= first_key < stop_key
    # A product and not `where`: the GPU lowering mistakes where(…, 1, 0) for a boolean.
    stop_key = stop_key * sees_some.astype(np.int32)
    return first_key // block_k, (stop_key + block_k - 1) // block_k


def keys_seen(problem):
    """How many keys of a `Problem` some query may see, at most: those before the first and after the last are none."""
    first = problem.first_position(problem.S)
    start, stop = key_tiles(first, first + problem.T, 1, problem.band, first + problem.T, problem.S)
    return max(0, int(stop - start))


def query_tiles(k_start, k_stop, block_q, band, query_length, key_length, xp=np):
    """The range ``(first, stop)`` of the query tiles that see keys k_start..k_stop-1.

    The mirror image of `key_tiles`, for kernels whose outer loop runs over keys.
    """
    return key_tiles(k_start, k_stop, block_q, band.mirrored, key_length, query_length, xp)


def whole_tiles(needed, start, stop, block, band, own_length, other_length):
    """The range, within the range `needed`, of the tiles that positions start..stop-1 all see whole.

    The positions are queries and the tiles keys, as in `key_tiles`; mirror the band for the other way round.
    """
    first, last = needed[0], other_length // block
    if band.left is not None:
        first = jnp.minimum(jnp.maximum(first, (stop - 1 - band.left + block - 1) // block), needed[1])
    if band.right is not None:
        last = jnp.minimum(last, jnp.maximum(start + band.right + 1, 0) // block)
    last *= (stop <= own_length).astype(jnp.int32)
    return first, jnp.clip(last, first, needed[1])


def share(tiles, part, parts, xp=np):
    """Half-open range of the tiles of one of the parts into which such a range is split, as even as can be."""
    first, stop = tiles
    count = xp.maximum(stop - first, 0)
    each, left = count // parts, count % parts
    begin = lambda part: first + part * each + xp.minimum(part, left)
    return begin(part), begin(part + 1)


def tile_kind(rows, cols, band, query_length, key_length):
    """``"skipped"``, ``"partial"`` or ``"full"``: if no, some or every pair is visible.

    rows, cols: the positions that the tile covers, two ranges or one-dimensional
    integer arrays. Positions past the lengths count as not visible.
    """
    rows, cols = np.asarray(rows)[:, None], np.asarray(cols)[None, :]
    seen = visible(rows, cols, band, query_length, key_length)
    if not seen.any():
        return "skipped"
    return "full" if seen.all() else "partial"


# Kinds of tiles as arrays: int8, of a grid of tiles of queries and tiles of keys. The kind of a tile under several
# masks is at most the smallest, so that a kernel may take that for it: it hides no pair that is seen.

HIDDEN, PARTIAL, FULL = range(3)
BLOCK = 64  # queries, and keys, of a tile of a block mask
MOST_PAIRS = 2**26  # that `block_mask` looks at together


class TileLists(NamedTuple):
    """For each tile of one side the tiles of the other that it sees, those that it sees whole first.

    tiles: int32 (B or 1, N or 1, tiles, other tiles), of which the first `seen` are seen and the first `full` whole;
    both int32 (B or 1, N or 1, tiles).
    """

    tiles: jax.Array
    seen: jax.Array
    full: jax.Array


def for_kernel(call, block_q, block_k, outer="queries", joins_groups=False):
    """The `Extras` and the `TileLists` that a kernel gets for a `Call`, or no lists. outer: whose tiles have lists.

    joins_groups: where heads differ, one list for all heads that share a key/value head, (B or 1, K, tiles, other tiles
    of the first head, then those of the next).
    """
    call = call.prepared()
    if not call.hides_keys:
        return call.extras, None
    kinds = tile_kinds(call, block_q, block_k)
    kinds = kinds if outer == "queries" else kinds.swapaxes(-1, -2)
    B, heads, tiles, others = kinds.shape
    if joins_groups and heads > 1:
        of_groups = kinds.reshape(B, call.problem.K, -1, tiles, others).swapaxes(2, 3)
        kinds = of_groups.reshape(B, call.problem.K, tiles, -1)
    in_order = jnp.argsort(-kinds, axis=-1, stable=True).astype(jnp.int32)
    count = lambda least: (kinds >= least).sum(axis=-1, dtype=jnp.int32)
    return call.extras._replace(block_mask=None), TileLists(in_order, count(PARTIAL), count(FULL))


def block_mask(T, S, *, mask=None, mask_mod=None, batch=1, heads=1):
    """Kinds of tiles of 64 queries and 64 keys, from an array, from a function, or from both together.

    Returns int8 (B or 1, N or 1, ceil(T / 64), ceil(S / 64)): 0 where a tile is hidden, 1 where it is seen in part and
    2 where it is seen whole. mask: booleans that broadcast to (B, N, T, S). mask_mod: a function (b, n, i, j) ->
    booleans, as for `flash_attention`; batch, heads: for how many it is asked, or the int32 arrays (B,) and (1, N) of
    their numbers. Meanwhile it stores at most 5 bytes of each of `MOST_PAIRS` pairs, or of those of 64 queries.
    """
    if mask is not None and mask.dtype != bool:
        raise TypeError(f"mask must have booleans, got {mask.dtype}")
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else jnp.asarray(mask)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    place = ()
    if mask_mod is not None:
        b = jnp.arange(batch, dtype=jnp.int32) if isinstance(batch, int) else batch
        n = jnp.arange(heads, dtype=jnp.int32)[None] if isinstance(heads, int) else heads
        place = b[:, None, None, None], n[:, :, None, None]

    def seen(start):
        """Whether the pairs of 64 queries are seen, (B or 1, N or 1, 64, S)."""
        i = start + jnp.arange(BLOCK, dtype=jnp.int32)
        seen = mask[:, :, jnp.minimum(i, mask.shape[2] - 1)] & (i < T)[:, None]
        if mask_mod is not None:
            seen = seen & mask_mod(*place, i[:, None], jnp.arange(S, dtype=jnp.int32))
        return jnp.broadcast_to(seen, (*seen.shape[:3], S))

    def count(start):
        """How many of them are, (B or 1, N or 1, tiles of keys)."""
        # A thread of a GPU adds up eight rows by itself: in XLA's reductions it exchanges each number with others.
        rows = functools.reduce(jnp.add, jnp.split(seen(start).astype(jnp.int8), 8, axis=2))
        rows = jnp.pad(rows, (*[(0, 0)] * 3, (0, -S % BLOCK))).reshape(*rows.shape[:3], -1, BLOCK)
        return rows.sum(axis=4, dtype=jnp.int32).sum(axis=2)

    starts = jnp.arange(0, T, BLOCK, dtype=jnp.int32)
    at_once = max(1, MOST_PAIRS // math.prod(jax.eval_shape(seen, starts[0]).shape))
    counts = jax.vmap(count)(starts) if len(starts) <= at_once else lax.map(count, starts, batch_size=at_once)
    counts = jnp.moveaxis(counts, 0, 2)
    rows, cols = (np.diff(np.minimum(np.arange(0, length + BLOCK, BLOCK), length)) for length in (T, S))
    return _kind(counts > 0, counts == rows[:, None] * cols)


def tile_kinds(call, block_q, block_k):
    """Kinds of the tiles of a `Call` that hides keys, int8 (B or 1, N or 1, tiles of queries, tiles of keys)."""
    problem, extras = call.problem, call.extras
    kinds = [_band_kinds(problem, call.query_lengths, call.key_lengths, block_q, block_k)]
    if extras.query_segment_ids is not None:
        kinds.append(segment_kinds(extras.query_segment_ids, extras.key_segment_ids, block_q, block_k))
    if extras.block_mask is not None:
        in_rows = _of_other_size(extras.block_mask, block_q, problem.T)
        kinds.append(_of_other_size(in_rows.swapaxes(-1, -2), block_k, problem.S).swapaxes(-1, -2))
    return functools.reduce(jnp.minimum, kinds)


def _kind(some, every):
    return some.astype(jnp.int8) + every.astype(jnp.int8)


def _band_kinds(problem, query_lengths, key_lengths, block_q, block_k):
    """Those of the band and of the lengths: two corners of a tile decide. Without lengths they are NumPy's."""
    T, S, band = problem.T, problem.S, problem.band
    xp = np if query_lengths is None and key_lengths is None else jnp
    length = lambda lengths, longest: longest if lengths is None else jnp.minimum(lengths, longest)[:, None, None, None]
    query_length, key_length = length(query_lengths, T), length(key_lengths, S)
    q_start, k_start = xp.arange(0, T, block_q)[None, None, :, None], xp.arange(0, S, block_k)
    q_last, k_last = (xp.minimum(q_start + block_q, query_length) - 1, xp.minimum(k_start + block_k, key_length) - 1)
    some = (q_start <= q_last) & (k_start <= k_last)
    every = (q_start + block_q <= query_length) & (k_start + block_k <= key_length)
    if band.right is not None:
        some &= k_start <= q_last + band.right
        every &= k_last <= q_start + band.right
    if band.left is not None:
        some &= k_last >= q_start - band.left
        every &= k_start >= q_last - band.left
    return _kind(some, some & every)


def segment_kinds(query_ids, key_ids, block_q, block_k):
    """Those of segments alone, from the smallest and the largest number in a tile."""

    def ends(ids, block):
        info, padding = jnp.iinfo(jnp.int32), ((0, 0), (0, -ids.shape[1] % block))
        tiles = lambda filler: jnp.pad(ids, padding, constant_values=filler).reshape(ids.shape[0], 1, -1, block)
        return tiles(info.max).min(axis=-1), tiles(info.min).max(axis=-1)

    q_least, q_most = (end[..., :, None] for end in ends(query_ids, block_q))
    k_least, k_most = (end[..., None, :] for end in ends(key_ids, block_k))
    some = (q_least <= k_most) & (k_least <= q_most)
    return _kind(some, some & (q_least == q_most) & (k_least == k_most))


def _of_other_size(kinds, block, length):
    """Kinds (B, N, tiles, other tiles) where tiles have `block` of the `length` positions instead of BLOCK."""
    if block < BLOCK:
        return jnp.repeat(kinds, BLOCK // block, axis=2)[:, :, : -(-length // block)]
    parts = block // BLOCK
    padding = ((0, 0), (0, 0), (0, -kinds.shape[2] % parts), (0, 0))
    of_tile = lambda filler: jnp.pad(kinds, padding, constant_values=filler).reshape(
        *kinds.shape[:2], -1, parts, kinds.shape[3]
    )
    return _kind((of_tile(HIDDEN) > HIDDEN).any(axis=3), (of_tile(FULL) == FULL).all(axis=3))
