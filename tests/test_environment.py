"""What a notebook runs on, with stand-ins for devices: on a GPU that is too old for the kernels, it takes the CPU."""

import re
import time
import types

import jax
import pytest

from helpers import clock, environment

DEVICES = [
    # platform, compute capability, version of JAX; what is said, and the device that JAX is told to compute on,
    # none where the finished kernels can keep to their arrays
    ("cpu", None, (0, 12, 0), "CPU. Pallas kernels run in interpret mode", None),
    ("gpu", "7.5", (0, 12, 0), r"CPU.* interpret mode.* 8\.0 \(Ampere\) on, and this Tesla is none", "cpu"),
    ("gpu", "9.0", (0, 11, 2), "Tesla.* interpret mode.*install JAX 0.12", None),
    ("gpu", "8.0", (0, 12, 0), "Tesla. Pallas kernels are compiled", None),
    ("tpu", None, (0, 12, 0), "Tesla. Pallas kernels are compiled", None),
]


@pytest.mark.parametrize(("platform", "capability", "version", "said", "default"), DEVICES)
def test_kernels_are_interpreted_where_they_cannot_be_compiled(
    platform, capability, version, said, default, capsys, monkeypatch
):
    devices, found = jax.devices, types.SimpleNamespace(platform=platform, device_kind="Tesla")
    found.compute_capability = capability
    monkeypatch.setattr(clock, "watch", lambda: None)
    monkeypatch.setattr(jax, "devices", lambda backend=None: devices(backend) if backend else [found])
    monkeypatch.setattr(jax, "__version_info__", version)
    before = jax.config.jax_default_device
    jax.config.update("jax_default_device", None)
    try:
        environment.show_environment()
        assert re.search(said, capsys.readouterr().out.splitlines()[-1])
        assert environment.interprets() is ("interpret mode" in said)
        assert getattr(jax.config.jax_default_device, "platform", None) == default
    finally:
        jax.config.update("jax_default_device", before)


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
