"""Where a program will run."""

import functools

import jax


def default_device():
    """The device that computes unless arrays say otherwise."""
    device = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


def device_of(array):
    """Where an array is, or where a traced one will be unless its program is told otherwise."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    return default_device()


def compute_capability(device=None):
    """(major, minor) of a device, by default the default one, if that is an NVIDIA GPU, otherwise (0, 0)."""
    device = device or default_device()
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or "." not in capability:
        return (0, 0)
    major, minor = capability.split(".")[:2]
    return int(major), int(minor)


def core_count(otherwise):
    """How many processors the default device says that it has; `otherwise` where it says nothing."""
    return getattr(default_device(), "core_count", None) or otherwise


def on_device(run, *arrays):
    """run(interpret, *arrays): interpreted on a CPU, compiled for an NVIDIA GPU.

    Decided when the program is compiled for a device, so that one trace serves them all.
    """
    return jax.lax.platform_dependent(*arrays, cpu=functools.partial(run, True), cuda=functools.partial(run, False))
