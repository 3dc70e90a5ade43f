"""What the notebooks say of schedules is what the Hopper forward kernel does."""

import dataclasses

import pytest

from helpers.attention.hopper import forward
from helpers.instruments.hopper_figures import problem_of
from helpers.instruments.schedule import in_parts, key_tiles_of


@pytest.mark.parametrize(("T", "H"), [(1024, 128), (1000, 128), (600, 64)])
def test_parts_hold_each_tile_once(T, H):
    problem = dataclasses.replace(problem_of(H, 1024, is_causal=True), B=3, T=T, S=T)
    tiles = forward.default_tiles(problem)
    assert sorted(in_parts(problem, tiles)) == sorted(key_tiles_of(problem, tiles))
