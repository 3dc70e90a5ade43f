"""What exercises 5.1 and 7.5 share: the range of tiles that a loop over keys, or over queries, must visit."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from helpers.attention import masking
from helpers.attention.masking import Band, visible
from helpers.exercises.exercise import Complaint, shaped
from helpers.exercises.watched import without


def key_tiles_needed(i, T, S, block_q, block_k, left):
    """The key tiles that query tile i needs, found by looking at every pair."""
    rows, cols = np.arange(i * block_q, (i + 1) * block_q), np.arange(S)
    seen = visible(rows[:, None], cols[None, :], Band(left=left, right=0), T, S)
    return sorted({int(key) // block_k for key in np.flatnonzero(seen.any(axis=0))})


def query_tiles_needed(j, T, S, block_q, block_k, left):
    """The query tiles that key tile j needs, found by looking at every pair."""
    rows, cols = np.arange(T), np.arange(j * block_k, (j + 1) * block_k)
    seen = visible(rows[:, None], cols[None, :], Band(left=left, right=0), T, S)
    return sorted({int(query) // block_q for query in np.flatnonzero(seen.any(axis=1))})


@dataclass(frozen=True)
class Loop:
    """One of the two loops: over the tiles of "key"s that a tile of "query"s needs, or the other way round.

    needed: a function that finds these tiles.
    """

    over: str
    inside: str
    needed: Callable

    def judge(self, result, case):
        """A complaint about the range (first, stop), or None."""
        first, stop = (int(bound) for bound in result)
        needed = self.needed(*case.arguments)
        yours = f"yours visits {self.over} tiles {first} to {stop - 1}" if first < stop else "yours visits no tile"
        seen = f"seen between {self.inside} tile {case.arguments[0]} and {self.over} tile"
        if missing := [tile for tile in needed if not first <= tile < stop]:
            return f"{yours}: too few, something is {seen} {missing[0]}"
        if first < stop and (first not in needed or stop - 1 not in needed):
            return f"{yours}: too many, nothing is {seen} {first if first not in needed else stop - 1}"
        return None


OVER_KEYS = Loop("key", "query", key_tiles_needed)
OVER_QUERIES = Loop("query", "key", query_tiles_needed)


def run(answer, *arguments):
    """The learner's (first, stop) as integers; an empty range is (0, 0)."""
    result = without(masking, answer, *arguments)
    if isinstance(result, range):
        raise Complaint("expected two integers, (first, stop), got a range")
    bounds = dict(zip(("first", "stop"), shaped(result, {"first": (), "stop": ()}), strict=True))
    for name, bound in bounds.items():
        if not float(bound).is_integer():
            raise Complaint(f"{name} is {float(bound):g}, expected an integer: divide with //, not with /")
    first, stop = map(int, bounds.values())
    return (first, stop) if first < stop else (0, 0)
