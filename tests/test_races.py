"""What the race detector says, in words: of kernels, and of operations of the model written out as one."""

import pytest

from helpers.measure.races import ring_kernel_races
from helpers.measure.timeline import Arrive, Fetch, Read, Wait


def memory(steps, stages, wait=True):
    for j in range(steps):
        if wait and j >= stages:
            yield Wait("free", j % stages)
        yield Fetch("tile", j % stages, j, "loaded")


def compute(steps, stages, wait=True, early=False):
    for j in range(steps):
        yield from [Wait("loaded", j % stages)] if wait else []
        yield from [Arrive("free", j % stages)] if early else []
        yield Read("tile", j % stages)
        yield from [Arrive("free", j % stages)] if not early else []


@pytest.mark.parametrize(("steps", "stages", "readers"), [(1, 1, 1), (5, 2, 1), (7, 3, 2), (2, 4, 1)])
def test_a_right_ring_has_no_races(steps, stages, readers):
    assert ring_kernel_races(memory(steps, stages), [compute(steps, stages) for _ in range(readers)], stages) == []


@pytest.mark.parametrize(
    ("loading", "computing", "words"),
    [({"wait": False}, {}, "copy_gmem_to_smem"), ({}, {"wait": False}, "read: "), ({}, {"early": True}, "read: ")],
)
def test_a_race_is_named(loading, computing, words):
    steps = 4 if computing.get("wait", True) else 2  # or loaded may complete a phase that nobody has seen
    found = ring_kernel_races(memory(steps, 2, **loading), [compute(steps, 2, **computing)], 2)
    assert len(found) == 2 and words in found[0] and "write: " in found[1]
