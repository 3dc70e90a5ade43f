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


@pytest.mark.parametrize("off", [False, True])
def test_it_watches_a_notebook_once_and_none_that_is_executed_for_its_outputs(off, monkeypatch):
    class Shell:
        def __init__(self):
            self.events, self.registered = self, []

        def register(self, name, function):
            self.registered.append(name)

    shell = Shell()
    monkeypatch.setattr(clock, "get_ipython", lambda: shell)
    monkeypatch.setenv(clock.OFF, "1")
    if not off:
        monkeypatch.delenv(clock.OFF)
    clock.watch()
    clock.watch()
    assert shell.registered == ([] if off else ["pre_run_cell", "post_run_cell"])
    monkeypatch.setattr(clock, "get_ipython", lambda: None)
    clock.watch()
