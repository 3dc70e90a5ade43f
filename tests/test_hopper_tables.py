"""The tiles of the Hopper kernels: where they come from, and every configuration of the tables on a machine without a GPU."""

from pathlib import Path

import pytest
from test_hopper_forward import problem_of

from helpers.attention.hopper import backward_schedule, forward, serve, table
from helpers.dev import ptxas
from helpers.instruments import results

# The table


FORWARD, FUSED = forward.Tiles(block_k=64, stages=3), backward_schedule.Tiles(64, 128, 3)
SPLIT = backward_schedule.Tiles(64, 128, 3), backward_schedule.Tiles(128, 64, 3)


def row(which, longest, tiles):
    where = {"pass": which, "head_padded": 128, "is_causal": True, "up_to": longest}
    return where | {"tiles": serve.fields_of(tiles)}


TABLE = [
    row("forward", None, FORWARD._replace(programs=None)),
    row("forward", 8192, FORWARD),
    row("backward", 2048, (FUSED, None)),
    row("backward", 8192, SPLIT),
    row("deterministic backward", 2048, SPLIT),
]


@pytest.fixture
def with_a_table(monkeypatch, tmp_path):
    """On a GPU with the table above."""
    monkeypatch.setattr(table, "TUNED", tmp_path)
    monkeypatch.setattr(table, "this_gpu", lambda: "NVIDIA Test")
    header = {"gpu": "NVIDIA Test", "versions": {}, "commit": "abc", "date": "2026-01-01"}
    results.write(header | {"hopper": TABLE}, tmp_path / "nvidia_test.json")
    yield
    table.rows_of.cache_clear()


def test_a_gpu_with_a_table_uses_it(with_a_table):
    problem = lambda length, H=100, causal=True: problem_of(length, length, H, "float16", causal, N=2, K=2)
    assert forward.default_tiles(problem(8192)) == FORWARD
    assert forward.default_tiles(problem(8193)) == FORWARD._replace(programs=None)
    assert backward_schedule.default_tiles(problem(2048)) == (FUSED, None)
    assert backward_schedule.default_tiles(problem(2049)) == SPLIT
    assert backward_schedule.default_tiles(problem(2048), deterministic=True) == SPLIT
    assert serve.tiles_used(problem(2048), "backward") == {"fused": FUSED._asdict()}
    for other in (problem(1000, H=256), problem(1000, causal=False), problem(1000)):
        assert forward.default_tiles(other) == forward.untuned_tiles(other)._replace(dynamic=False)
    for call in ((problem(10000), deterministic) for deterministic in (False, True)):
        assert backward_schedule.default_tiles(*call) == backward_schedule.untuned_tiles(*call)


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
