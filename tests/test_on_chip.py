"""What `helpers.instruments.on_chip` sees of the Hopper backward kernels agrees with counts made by hand."""

import pytest

from helpers.attention.hopper.backward_schedule import Tiles
from helpers.exercises.exercise import exercise
from helpers.instruments import on_chip


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("H", "block_q", "stages"), [(64, 64, 3), (64, 128, 2), (128, 64, 2)])
def test_shared_memory_is_the_budget_of_the_exercise(H, block_q, stages, delayed):
    kernel = on_chip.watch(H, (Tiles(block_q, 128, stages, delayed=delayed), None))["fused"]
    assert kernel.smem == exercise("12.2").solution(H, block_q, stages, 2, delayed)
    assert (kernel.smem <= on_chip.SMEM_LIMIT) or (H, stages) != (128, 2)
