"""What a notebook runs on: its first output, and how its kernels run there."""

import functools
import platform

import jax
import matplotlib
import numpy

from helpers import clock
from helpers.attention.device import BOUNDS_BLOCKS, compute_capability, default_device
from helpers.attention.portable.tiles import how_it_runs

TOO_OLD = (
    "Device: CPU. Pallas kernels run in interpret mode, since JAX compiles them for NVIDIA GPUs "
    "from compute capability 8.0 (Ampere) on, and this {kind} is none."
)
# There a store past the end of an array goes into what lies behind it.
OLD_JAX = (
    "Device: {kind}. Pallas kernels run in interpret mode, since JAX {version} compiles kernels that "
    "write past the end of an array; install JAX 0.12 to compile them."
)


def interprets():
    """Whether a notebook interprets its kernels: on a CPU, and on a GPU for which JAX cannot compile them rightly."""
    device = default_device()
    return device.platform != "tpu" and (compute_capability(device) < (8, 0) or _jax_is_old())


def _jax_is_old():
    return jax.__version_info__ < BOUNDS_BLOCKS


def backend():
    """The keyword arguments of `pl.pallas_call` that say how a kernel runs here: interpreted, or compiled.

    For a GPU Triton compiles it, as long as JAX has it, for four warps and without pipelines.
    """
    if default_device().platform == "tpu":
        return {}
    return how_it_runs(interprets(), num_warps=4, num_stages=1)


def on_gpu(kernel, otherwise):
    """A forward kernel: `kernel` for 16-bit arrays and heads of at most 256, on a GPU from Ampere on; or the other one.

    Both take (q, k, v, is_causal), the other one the sizes of its tiles besides. `plain` is the one without any GPU's.
    """
    return _in_place(kernel, otherwise, lambda capability: capability >= (8, 0), 256)


def on_hopper(kernel, otherwise):
    """The same on a Hopper GPU alone, for heads of at most 128."""
    return _in_place(kernel, otherwise, lambda capability: capability == (9, 0), 128)


def _in_place(kernel, otherwise, serves, widest):
    @functools.wraps(otherwise)
    def forward(q, k, v, is_causal=False, *tiles, **named_tiles):
        device = default_device()
        is_served = device.platform == "gpu" and serves(compute_capability(device))
        if is_served and q.dtype.itemsize == 2 and q.shape[-1] <= widest:
            return kernel(q, k, v, is_causal)
        return otherwise(q, k, v, is_causal, *tiles, **named_tiles)

    forward.plain = getattr(otherwise, "plain", otherwise)
    return forward


def show_environment():
    """Print the versions in use and the device that JAX computes on; from here on, slow cells say that they run.

    A GPU for which JAX cannot compile the kernels is left alone: the notebook computes on the CPU.
    """
    clock.watch()
    device = default_device()
    print(
        f"Python {platform.python_version()} · JAX {jax.__version__} · NumPy {numpy.__version__} · "
        f"Matplotlib {matplotlib.__version__}"
    )
    if device.platform == "cpu":
        print("Device: CPU. Pallas kernels run in interpret mode.")
    elif device.platform == "gpu" and compute_capability(device) >= (8, 0) and _jax_is_old():
        print(OLD_JAX.format(kind=device.device_kind, version=jax.__version__))
    elif interprets():
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
        print(TOO_OLD.format(kind=device.device_kind))
    else:
        print(f"Device: {device.device_kind}. Pallas kernels are compiled for it, unless a cell interprets them.")
