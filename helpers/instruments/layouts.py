"""Which thread of a warpgroup holds which numbers of an array in a layout of Mosaic GPU."""

import itertools

import numpy as np


def registers(layout, numbers):
    """(warp, lane, register, vector): which of the numbers each lane has of an array in a layout, in order."""
    layout = layout.to_mgpu()
    for tile in layout.tiling.tiles:
        outer = numbers.shape[: numbers.ndim - len(tile)]
        pairs = [(size // side, side) for size, side in zip(numbers.shape[-len(tile) :], tile, strict=True)]
        numbers = numbers.reshape(*outer, *itertools.chain(*pairs))
        axes = range(len(outer), numbers.ndim)
        numbers = numbers.transpose(*range(len(outer)), *axes[::2], *axes[1::2])
    warps = [dim for dim in layout.warp_dims if isinstance(dim, int)]
    places = [numbers.ndim + dim for dim in (*warps, *layout.lane_dims, layout.vector_dim)]
    rest = [axis for axis in range(numbers.ndim) if axis not in places]
    numbers = numbers.transpose(*places[:-1], *rest, places[-1])
    numbers = numbers.reshape(4 if warps else 1, 32, -1, layout.vector_length)
    return np.broadcast_to(numbers, (4, *numbers.shape[1:]))
