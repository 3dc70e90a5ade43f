"""The line under a cell that takes long."""

import time

import pytest

from helpers import clock


@pytest.fixture
def shown(monkeypatch):
    """What stands under a cell, one text after another."""
    texts = []

    class Handle:
        def update(self, line):
            texts.append(line.data)

    def display(line, display_id):
        texts.append(line.data)
        return Handle()

    monkeypatch.setattr(clock, "display", display)
    return texts


def test_a_slow_cell_says_for_how_long_and_then_nothing(shown):
    one = clock.Clock(patience_s=0.05, period_s=0.05)
    one.start(None)
    time.sleep(0.5)
    assert 2 < len(shown) < 11 and set(shown) <= {"still running, 0 s", "still running, 1 s"}
    one.stop(None)
    assert shown[-1] == ""
    count = len(shown)
    time.sleep(0.2)
    assert len(shown) == count
