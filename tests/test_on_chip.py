"""What `helpers.instruments.on_chip` sees of the Hopper backward kernels agrees with counts made by hand."""

import pytest

from helpers.attention.hopper.backward_schedule import Tiles, forms
from helpers.exercises.exercise import exercise
from helpers.instruments import on_chip

KIB = 1024
FORMS = forms(128)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("H", "block_q", "stages"), [(64, 64, 3), (64, 128, 2), (128, 64, 2)])
def test_shared_memory_is_the_budget_of_the_exercise(H, block_q, stages, delayed):
    kernel = on_chip.watch(H, (Tiles(block_q, 128, stages, delayed=delayed), None))["fused"]
    assert kernel.smem == exercise("12.2").solution(H, block_q, stages, 2, delayed)
    assert (kernel.smem <= on_chip.SMEM_LIMIT) or (H, stages) != (128, 2)


def test_traffic_of_a_pair_of_tiles():
    fused = on_chip.watch(128, FORMS["fused"])["fused"]
    split = on_chip.watch(128, FORMS["split"])
    assert sum(on_chip.traffic(fused, 128).values()) == 368 * KIB
    assert sum(on_chip.traffic(split["dkv"], 128).values()) == 224 * KIB
    assert sum(on_chip.traffic(split["dq"], 128).values()) == 2 * 160 * KIB
