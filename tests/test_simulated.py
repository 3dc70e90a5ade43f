"""The simulated GPU does what the lesson says of it, and the benchmark's own timing finds its truth."""

import functools

import pytest

from helpers.instruments.simulated import SimulatedGPU
from helpers.instruments.timing import Program, time_together


def test_calls_are_queued_and_worked_off_one_after_another():
    gpu = SimulatedGPU(2.0, launch_s=0.5, wait_s=0.25)
    tickets = [gpu.run(name) for name in "ab"]
    assert gpu.clock() == 1.0 and tickets == [2.5, 4.5]
    gpu.wait(tickets[0])
    assert gpu.clock() == 2.75
    gpu.wait(tickets[0])  # done long ago: only the asking costs
    assert gpu.clock() == 3.0


def test_compiling_caching_disturbing_and_warming():
    gpu = SimulatedGPU(1.0, compile_s=10.0, cached=0.5, disturbed={3: [2]}, warming=0.5, warming_s=1e9)
    done = [gpu.run(name) for name in ("a", "a", "b")]
    assert done == pytest.approx([11.0, 11.5, 14.5])
    warm = SimulatedGPU(1.0, warming=0.5, warming_s=1e-9)
    assert [warm.run("a"), warm.run("b")] == pytest.approx([1.0, 2.5])


@pytest.mark.parametrize("slower", [0.9, 1.0, 1.03])
def test_the_benchmark_finds_the_truth_on_the_worst_gpu(slower):
    vices = dict(compile_s=1.5, launch_s=2e-5, wait_s=3e-4, cached=0.4, disturbed={8: range(40, 64)}, warming=0.15)
    gpu = SimulatedGPU(2e-3, **vices)
    programs = {
        name: Program(functools.partial(gpu.run, program=name, slower=factor), list("abcd"), gpu.wait)
        for name, factor in (("plain", 1.0), ("other", slower))
    }
    found = time_together(programs, clock=gpu.clock, device_samples=lambda program: [])
    assert found["other"].wall_ms / found["plain"].wall_ms == pytest.approx(slower, rel=0.01)
