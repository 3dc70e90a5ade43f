"""The model of warpgroups and barriers: it lets right orders through and names what is wrong with others."""

import pytest

from helpers.instruments.timeline import Arrive, Drain, Fetch, Issue, OrderError, Read, Wait, Work, simulate

BARRIERS = {"loaded": 1, "free": 1}


def memory(steps=4, stages=2, wait=True):
    for j in range(steps):
        if wait and j >= stages:
            yield Wait("free", j % stages)
        yield Fetch("tile", j % stages, j, "loaded", cycles=100)


def compute(steps=4, stages=2, wait=True, arrive=True, early=False):
    for j in range(steps):
        slot = j % stages
        if wait:
            yield Wait("loaded", slot)
        if early:
            yield Arrive("free", slot)
        yield Read("tile", slot)
        if arrive and not early:
            yield Arrive("free", slot)


def test_a_ring_passes_every_tile_in_order():
    run = simulate({"memory": memory(), "compute": compute()}, BARRIERS, latency=500)
    assert run.tiles["compute"] == [0, 1, 2, 3]
    assert run.phases["loaded", 0] == [600.0, 1200.0]  # tile 2 is ordered once tile 0 has been read


@pytest.mark.parametrize(
    ("loading", "computing", "message"),
    [
        ({}, {"arrive": False}, "nobody can go on: waiting for ever are memory at free"),
        ({"wait": False}, {}, "tile 2 is written into tile"),
        ({}, {"wait": False}, "compute reads tile.* before tile 0 has surely arrived"),
        ({}, {"early": True}, "before tile 2 has surely arrived"),
    ],
)
def test_a_wrong_order_is_named(loading, computing, message):
    with pytest.raises(OrderError, match=message):
        simulate({"memory": memory(**loading), "compute": compute(**computing)}, BARRIERS, latency=500)


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
