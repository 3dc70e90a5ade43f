"""The simulated card does what the lesson says of it, and the benchmark's own timing finds its truth."""

import functools

import pytest

from helpers.instruments.simulated import SimulatedCard
from helpers.instruments.timing import Program, time_together


def test_calls_are_queued_and_worked_off_one_after_another():
    card = SimulatedCard(2.0, launch_s=0.5, wait_s=0.25)
    tickets = [card.run(name) for name in "ab"]
    assert card.clock() == 1.0 and tickets == [2.5, 4.5]
    card.wait(tickets[0])
    assert card.clock() == 2.75
    card.wait(tickets[0])  # done long ago: only the asking costs
    assert card.clock() == 3.0


def test_compiling_caching_disturbing_and_warming():
    card = SimulatedCard(1.0, compile_s=10.0, cached=0.5, disturbed={3: [2]}, warming=0.5, warming_s=1e9)
    done = [card.run(name) for name in ("a", "a", "b")]
    assert done == pytest.approx([11.0, 11.5, 14.5])
    warm = SimulatedCard(1.0, warming=0.5, warming_s=1e-9)
    assert [warm.run("a"), warm.run("b")] == pytest.approx([1.0, 2.5])


@pytest.mark.parametrize("slower", [0.9, 1.0, 1.03])
def test_the_benchmark_finds_the_truth_on_the_worst_card(slower):
    vices = dict(compile_s=1.5, launch_s=2e-5, wait_s=3e-4, cached=0.4, disturbed={8: range(40, 64)}, warming=0.15)
    card = SimulatedCard(2e-3, **vices)
    programs = {
        name: Program(functools.partial(card.run, program=name, slower=factor), list("abcd"), card.wait)
        for name, factor in (("plain", 1.0), ("other", slower))
    }
    found = time_together(programs, clock=card.clock, device_samples=lambda program: [])
    assert found["other"].wall_ms / found["plain"].wall_ms == pytest.approx(slower, rel=0.01)
