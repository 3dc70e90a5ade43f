"""What exercises 5.1 and 7.5 share: the range of tiles that a loop over keys, or over queries, must visit."""

from dataclasses import dataclass

import numpy as np

from helpers.attention.masking import Band, visible
from helpers.exercises.exercise import Case, Complaint


@dataclass(frozen=True)
class Loop:
    """One of the two loops: over the tiles of "key"s that a tile of "query"s sees, or the other way round.

    The phrases complete a verdict; {} is a tile.
    """

    over: str
    inside: str
    reaches: str
    reaches_not: str
    reaches_nothing: str

    def cases(self, shapes):
        """Cases from (number of the outer tile, T, S, block_q, block_k, left)."""
        return [
            Case(f"{self.inside} tile {i}, T={T}, S={S}, block_q={block_q}, block_k={block_k}, left={left}", shape)
            for shape in shapes
            for i, T, S, block_q, block_k, left in [shape]
        ]

    def needed(self, i, T, S, block_q, block_k, left):
        """The tiles to visit, found by looking at every pair."""
        rows, cols = np.arange(T), np.arange(S)
        if self.over == "key":
            rows = np.arange(i * block_q, (i + 1) * block_q)
        else:
            cols = np.arange(i * block_k, (i + 1) * block_k)
        seen = visible(rows[:, None], cols[None, :], Band(left=left, right=0), T, S)
        found = np.flatnonzero(seen.any(axis=0 if self.over == "key" else 1))
        return sorted({int(position) // (block_k if self.over == "key" else block_q) for position in found})

    def judge(self, result, case):
        """A complaint about the range (first, stop), or None."""
        first, stop = (int(bound) for bound in result)
        needed = self.needed(*case.arguments)
        if first >= stop:
            return f"yours visits no tile, but {self.reaches.format(needed[0])}" if needed else None
        yours = f"yours visits {self.over} tiles {first} to {stop - 1}"
        if not needed:
            return f"{yours}, but {self.reaches_nothing}"
        _, T, S, block_q, block_k, _ = case.arguments
        last = -(-S // block_k) - 1 if self.over == "key" else -(-T // block_q) - 1
        if first > needed[0]:
            return f"{yours}: too few, {self.reaches.format(needed[0])}"
        if stop - 1 < needed[-1]:
            return f"{yours}: too few, {self.reaches.format(needed[-1])}"
        if first < 0:
            return f"{yours}: there is no tile {first}"
        if stop - 1 > last:
            return f"{yours}: too many, the last {self.over} is in tile {last}"
        if first < needed[0]:
            return f"{yours}: too many, {self.reaches_not.format(first)}"
        if stop - 1 > needed[-1]:
            return f"{yours}: too many, {self.reaches_not.format(stop - 1)}"
        return None


OVER_KEYS = Loop(
    "key",
    "query",
    "these queries see keys in tile {}",
    "these queries see nothing in tile {}",
    "these queries see no key at all",
)
OVER_QUERIES = Loop(
    "query",
    "key",
    "queries in tile {} see these keys",
    "no query in tile {} sees these keys",
    "no query sees these keys",
)


def run(answer, *arguments):
    """The learner's (first, stop) as integers; an empty range is (0, 0)."""
    result = answer(*arguments)
    if result is None:
        raise Complaint("expected two integers, (first, stop), got None: is a `return` missing?")
    if isinstance(result, range):
        raise Complaint("expected two integers, (first, stop), got a range")
    try:
        bounds = [float(bound) for bound in result]
    except (TypeError, ValueError):
        bounds = []
    if len(bounds) != 2:
        raise Complaint("expected two integers, (first, stop)")
    for name, bound in zip(("first", "stop"), bounds, strict=True):
        if not bound.is_integer():
            raise Complaint(f"{name} is {bound:g}, expected an integer: divide with //, not with /")
    first, stop = map(int, bounds)
    return (first, stop) if first < stop else (0, 0)
