"""What a notebook runs on, with stand-ins for devices: on a GPU that is too old for the kernels, it takes the CPU."""

import time
import types

import jax
import pytest

from helpers import clock, environment
from helpers.attention import device


def stand_in(platform, capability):
    return types.SimpleNamespace(platform=platform, device_kind="Tesla T4", compute_capability=capability)


@pytest.fixture
def on(monkeypatch):
    """Makes a device the one that JAX computes on, unless it is told another."""
    monkeypatch.setattr(clock, "watch", lambda: None)

    def on(found):
        devices = jax.devices
        monkeypatch.setattr(jax, "devices", lambda backend=None: devices(backend) if backend else [found])

    before = jax.config.jax_default_device
    jax.config.update("jax_default_device", None)
    yield on
    jax.config.update("jax_default_device", before)


@pytest.mark.parametrize(
    ("platform", "capability", "interpreted"),
    [("cpu", None, True), ("gpu", "7.5", True), ("gpu", "8.0", False), ("tpu", None, False)],
)
def test_kernels_are_interpreted_where_they_cannot_be_compiled(platform, capability, interpreted, on, monkeypatch):
    on(stand_in(platform, capability))
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert environment.interprets() is interpreted


def test_a_gpu_is_no_use_to_kernels_that_jax_lets_write_past_the_end(on, capsys, monkeypatch):
    on(stand_in("gpu", "9.0"))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    environment.show_environment()
    assert environment.interprets() and "interpret mode" in capsys.readouterr().out.splitlines()[-1]
    assert jax.config.jax_default_device is None, "the finished kernels keep to their arrays"


def test_on_an_old_gpu_a_notebook_computes_on_the_cpu_and_says_why(on, capsys):
    on(stand_in("gpu", "7.5"))
    environment.show_environment()
    said = capsys.readouterr().out.splitlines()[-1]
    assert "CPU" in said and "interpret mode" in said and "8.0 (Ampere)" in said and "Tesla T4" in said
    assert device.default_device().platform == "cpu" and environment.interprets()


# The line under a cell that takes long


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
