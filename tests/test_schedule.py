"""What the notebooks say of schedules is what the Hopper forward kernel does."""

import dataclasses

import numpy as np
import pytest

from helpers.attention.hopper import forward, tile_scheduler
from helpers.instruments.hopper_figures import problem_of
from helpers.instruments.schedule import SNAKE, dealt, in_parts, key_tiles_of


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
