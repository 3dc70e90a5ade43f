"""The model of warpgroups and barriers, beyond what the mistakes of exercises 10.1 and 10.4 show of it."""

import pytest

from helpers.instruments.timeline import Arrive, Drain, Issue, OrderError, Wait, Work, simulate


def test_a_missed_phase_and_an_endless_program():
    hasty, slow = [Arrive("turn")] * 3, [Wait("turn"), Work("unit", 50, "p"), Wait("turn")]
    with pytest.raises(OrderError, match="may complete a phase before slow"):
        simulate({"hasty": hasty, "slow": slow}, {"turn": 1})
    with pytest.raises(OrderError, match="still not at the end"):
        simulate({"endless": iter(lambda: Arrive("turn"), None)}, {"turn": 1}, most=100)


def test_a_unit_does_one_thing_at_a_time_and_drain_awaits_the_oldest():
    issued = Issue("tensor", 100, "s0"), Issue("tensor", 30, "pv0")
    run = simulate({"group": [*issued, Drain(1), Work("exponentials", 10, "p0"), Drain(0)]}, {})
    assert [(span.start, span.stop) for span in run.spans if span.who == "exponentials"] == [(100, 110)]
    assert run.end == 130
