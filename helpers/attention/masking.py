"""Which keys a query may see, and which tiles a kernel may skip.

Every mask of this package is a *band* cut by two lengths. Query ``i`` sees key ``j`` when

    i - left <= j <= i + right    and    i < query_length    and    j < key_length

Causal attention is the band ``right = 0``; a local window is a band with both edges.
The same functions serve the NumPy twins and the Pallas kernels: pass ``xp=jax.numpy``
where the arguments are traced.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Band:
    """How far query i sees to the left and to the right of key i; None means without limit."""

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, is_causal=False, window=None):
        """The band of a causal flag and a ``(left, right)`` window, either of which may be absent."""
        left, right = (None, None) if window is None else window
        if is_causal:
            right = 0 if right is None else min(right, 0)
        return cls(left, right)


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
    if band.left is not None:
        first_key = xp.maximum(q_start - band.left, 0)
        sees_some &= first_key < stop_key
    # A product and not `where`: the GPU lowering mistakes where(…, 1, 0) for a boolean.
    stop_key = stop_key * sees_some.astype(np.int32)
    return first_key // block_k, (stop_key + block_k - 1) // block_k


def query_tiles(k_start, k_stop, block_q, band, query_length, key_length, xp=np):
    """The range ``(first, stop)`` of the query tiles that see keys k_start..k_stop-1.

    The mirror image of `key_tiles`, for kernels whose outer loop runs over keys.
    """
    mirrored = Band(left=band.right, right=band.left)
    return key_tiles(k_start, k_stop, block_q, mirrored, key_length, query_length, xp)


def share(tiles, part, parts, xp=np):
    """Half-open range of the tiles of one of the parts into which 0..tiles-1 are split, as even as can be."""
    each, left = tiles // parts, tiles % parts
    first = part * each + xp.minimum(part, left)
    return first, first + each + (part < left) * 1


def tile_kind(rows, cols, band, query_length, key_length):
    """``"skipped"``, ``"partial"`` or ``"full"``: whether no, some or every pair of a tile is visible.

    rows, cols: the positions that the tile covers, two ranges or one-dimensional integer arrays.
    Positions past the lengths count as not visible.
    """
    seen = visible(np.asarray(rows)[:, None], np.asarray(cols)[None, :], band, query_length, key_length)
    if not seen.any():
        return "skipped"
    return "full" if seen.all() else "partial"
