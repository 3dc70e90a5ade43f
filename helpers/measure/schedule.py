"""How the work of a causal call is dealt to the programs of the Hopper forward kernel, in NumPy."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from helpers.attention.hopper import forward
from helpers.attention.hopper.warpgroup import PROCESSORS


def key_tiles_of(problem, tiles):
    """How many tiles of keys each tile of queries sees under a causal mask, over all heads and batch entries."""
    rows = tiles.warpgroups * tiles.block_q
    stops = [min((i + 1) * rows, problem.T) for i in range(math.ceil(problem.T / rows))]
    return np.repeat([math.ceil(stop / tiles.block_k) for stop in stops], problem.N * problem.B)


def dealt(work, programs=PROCESSORS, backwards=False):
    """The sum of work of each program, dealt in turns; every other full turn backwards if asked."""
    ends = np.zeros(programs, int)
    for turn in range(math.ceil(len(work) / programs)):
        part = work[turn * programs : (turn + 1) * programs]
        turned = backwards and turn % 2 == 1 and len(part) == programs
        ends[: len(part)] += part[::-1] if turned else part
    return ends


def in_parts(problem, tiles):
    """Tiles of keys that each tile of queries sees, in the order in which the kernel deals them."""
    one_head = key_tiles_of(dataclasses.replace(problem, N=1, B=1), tiles)
    places = jnp.arange(len(one_head) * problem.N * problem.B)
    return one_head[np.asarray(forward.causal_order(places, len(one_head), problem)[0])]
