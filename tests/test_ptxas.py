"""What is compiled without a GPU: every configuration of the Hopper kernels lowers, and what ptxas says is read."""

from pathlib import Path

import pytest

from helpers.dev import ptxas

# Every configuration


@pytest.mark.full
@pytest.mark.parametrize("configuration", [one for one in ptxas.configurations() if one.group == 1], ids=str)
def test_every_configuration_lowers_for_cuda(configuration):
    assert "@mosaic_gpu_v2" in configuration.lowered().as_text()


# What ptxas says


def test_selects_that_ptxas_mistakes_are_found():
    ptx = Path(__file__).with_name("one_turn_or_two.ptx").read_text()
    assert ptxas.mistaken_selects(ptx) == ["selp.b32 %first, 1, 0, %more"]
    in_place = ptx.replace("selp.b32 %first, 1, 0, %more;", "min.u32 %first, %program, 1;")
    assert in_place != ptx and ptxas.mistaken_selects(in_place) == []


@pytest.mark.parametrize("which", ["decode", pytest.param("pages", marks=pytest.mark.full)])
def test_the_mosaic_kernels_fit_the_gpu_that_they_are_compiled_for(which):
    for gpu in ("8.6", "9.0"):
        _, memory = ptxas.GPUS[gpu]
        with ptxas.compiling_for(tuple(map(int, gpu.split("."))), memory) as sizes:
            assert "mosaic_gpu_v2" in ptxas.lowered_by_mosaic(which, 128, "float32", 0.1).as_text()
        assert memory // 4 < max(sizes) <= memory
