"""Which tiles of queries the programs of a causal Hopper backward pass read, and when, on a GPU whose SMs keep pace."""

import itertools


def walks(T, heads, group, order, processors, block_q=64, block_k=128):
    """[(query head, tile of queries), ...] of each program of a causal call.

    In the order of their start, which is longest first.
    order: "head by head", "down, up" or "up, down".
    """
    programs = []
    for first in range(0, T // block_q, block_k // block_q):
        for kv in range(heads // group):
            tiles = range(first, T // block_q)
            mine = range(kv * group, (kv + 1) * group)
            if order == "head by head":
                walk = itertools.product(mine, tiles)
            else:
                up = order.split(", ")[len(programs) // processors % 2] == "up"
                in_turn = tiles if up else reversed(tiles)
                walk = ((head, i) for i in in_turn for head in mine)
            programs.append(list(walk))
    return programs


def in_step(programs, processors):
    """The steps of a GPU whose SMs keep pace: lists of (program, (query head, tile of queries))."""
    waiting = iter(enumerate(programs))  # who is done with a program takes the next
    each = [((number, tile) for number, walk in waiting for tile in walk) for _ in range(processors)]
    return [[now for now in step if now] for step in itertools.zip_longest(*each)]


def from_memory(steps, slots):
    """How many tiles a call fetches from memory, if the cache holds the `slots` tiles that were used last."""
    cache, fetched = {}, 0  # the keys of a dict keep the order in which they came
    for step in steps:
        for _, tile in step:
            fetched += cache.pop(tile, None) is None
            cache[tile] = True
            if len(cache) > slots:
                del cache[next(iter(cache))]
    return fetched
