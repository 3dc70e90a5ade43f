"""The first output of every notebook: what it runs on."""

import platform

import jax
import matplotlib
import numpy

from helpers import clock


def show_environment():
    """Print the versions in use and the device that JAX computes on; from here on, slow cells say that they run."""
    clock.watch()
    device = jax.devices()[0]
    print(
        f"Python {platform.python_version()} · JAX {jax.__version__} · NumPy {numpy.__version__} · "
        f"Matplotlib {matplotlib.__version__}"
    )
    if device.platform == "cpu":
        print("Device: CPU. Pallas kernels run in interpret mode.")
    else:
        print(f"Device: {device.device_kind}. Pallas kernels are compiled for it, unless a cell interprets them.")
