"""Which program of the Hopper forward kernel takes which work of a causal call, in NumPy."""

import math

import numpy as np

from helpers.attention.hopper import tile_scheduler
from helpers.attention.hopper.warpgroup import NUM_SMS

ROUND_ROBIN = tile_scheduler.Assignment(backward=None, shift=0)
BACK_AND_FORTH = tile_scheduler.Assignment(backward=1, shift=0)  # every other full turn backwards


def key_tiles_of(problem, tiles):
    """How many tiles of keys each tile of queries sees under a causal mask, over all heads and batch entries."""
    rows = tiles.warpgroups * tiles.block_q
    stops = [min((i + 1) * rows, problem.T) for i in range(math.ceil(problem.T / rows))]
    return np.repeat([math.ceil(stop / tiles.block_k) for stop in stops], problem.N * problem.B)


def per_sm(work, assignment=ROUND_ROBIN, programs=NUM_SMS):
    """The sum of work of each program."""
    return tile_scheduler.work_of_programs(work, programs, assignment)
