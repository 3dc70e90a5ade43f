"""What the notebooks say of lists and walks is what the Hopper kernels do."""

import dataclasses
import itertools

import numpy as np
import pytest

from helpers.attention.hopper import forward, tile_scheduler
from helpers.instruments.hopper_figures import problem_of
from helpers.instruments.schedule import SNAKE, dealt, in_parts, key_tiles_of
from helpers.instruments.walks import from_memory, in_step, walks


def test_no_work_is_lost():
    work = np.array([5, 4, 3, 2, 1, 1, 1])
    np.testing.assert_array_equal(dealt(work, programs=3), [5 + 2 + 1, 4 + 1, 3 + 1])
    np.testing.assert_array_equal(dealt(work, SNAKE, 3), [5 + 1 + 1, 4 + 1, 3 + 2])
    np.testing.assert_array_equal(dealt(work, tile_scheduler.Deal(None, 1), 3), [5 + 1 + 1, 4 + 1, 3 + 2])
    np.testing.assert_array_equal(dealt(work, tile_scheduler.Deal(0, 1), 3), [3 + 1 + 1, 4 + 1, 5 + 2])


@pytest.mark.parametrize(("T", "H"), [(1024, 128), (1000, 128), (600, 64)])
def test_parts_hold_each_tile_once(T, H):
    problem = dataclasses.replace(problem_of(H, 1024, is_causal=True), B=3, T=T, S=T)
    tiles = forward.default_tiles(problem)
    assert sorted(in_parts(problem, tiles)) == sorted(key_tiles_of(problem, tiles))


@pytest.mark.parametrize("order", ["head by head", "down, up", "up, down"])
def test_every_walk_reads_what_its_keys_see(order):
    programs = walks(1024, heads=4, group=2, order=order, processors=3)
    starts = [first for first in range(0, 16, 2) for _ in range(2)]
    for number, (walk, first) in enumerate(zip(programs, starts, strict=True)):
        heads = (0, 1) if number % 2 == 0 else (2, 3)
        assert sorted(walk) == sorted(itertools.product(heads, range(first, 16)))
    done = [now for step in in_step(programs, 3) for now in step]
    assert sorted(done) == sorted((number, tile) for number, walk in enumerate(programs) for tile in walk)


def test_a_cache_forgets_what_was_used_longest_ago():
    steps = [[(0, tile)] for tile in "abacb"]
    assert (from_memory(steps, 3), from_memory(steps, 2), from_memory(steps, 1)) == (3, 4, 5)
