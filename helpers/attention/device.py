"""Where a program will run."""

import functools

import jax


def default_device():
    """The device that computes unless arrays say otherwise."""
    device = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


def compute_capability():
    """(major, minor) of the default device where that is an NVIDIA GPU, otherwise (0, 0)."""
    device = default_device()
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or "." not in capability:
        return (0, 0)
    major, minor = capability.split(".")[:2]
    return int(major), int(minor)


def on_device(run, *arrays):
    """run(interpret, *arrays): interpreted on a CPU, compiled for an NVIDIA GPU.

    Decided when the program is compiled for a device, so that one trace serves them all.
    """
    return jax.lax.platform_dependent(*arrays, cpu=functools.partial(run, True), cuda=functools.partial(run, False))
