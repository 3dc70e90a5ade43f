"""The simulated GPU does what the lesson says of it, and the benchmark's own timing finds its truth."""

import functools

import pytest

from helpers.instruments.simulated import SimulatedGPU
from helpers.instruments.timing import Program, time_together


@pytest.mark.parametrize("slower", [1.0, 1.03])
def test_the_benchmark_finds_the_truth_on_the_worst_gpu(slower):
    vices = dict(compile_s=1.5, launch_s=2e-5, wait_s=3e-4, cached=0.4, disturbed={8: range(40, 64)}, warming=0.15)
    gpu = SimulatedGPU(2e-3, **vices)
    programs = {
        name: Program(functools.partial(gpu.run, program=name, slower=factor), list("abcd"), gpu.wait)
        for name, factor in (("plain", 1.0), ("other", slower))
    }
    found = time_together(programs, clock=gpu.clock, device_samples=lambda program: [])
    assert found["other"].wall_ms / found["plain"].wall_ms == pytest.approx(slower, rel=0.01)
