"""Which problems the Hopper kernels serve, and where."""

import os

from helpers.attention.hopper import backward as backward_kernels
from helpers.attention.hopper import forward as forward_kernel

THREADS = 16  # of a CPU, with which the interpreter can let all warpgroups wait for one another


def why_not_here():
    """Why a CPU cannot interpret the kernels as it is set up, or None where it can."""
    if int(os.environ.get("PJRT_NPROC", os.cpu_count())) < THREADS:
        return f"to interpret it, set the environment variable PJRT_NPROC to {THREADS} before JAX starts"
    return None


def why_not(call):
    """Why the kernels cannot serve a checked `Call`, or None where they can."""
    if call.query_lengths is not None or call.key_lengths is not None:
        return "it takes no sequence lengths"
    return forward_kernel.why_not(call.problem)


def fields_of(tiles):
    """{kernel: {field: value}} of a `forward.Tiles`, or of a pair as `backward.forms` has them."""
    is_forward = isinstance(tiles, forward_kernel.Tiles)
    named = {"forward": tiles} if is_forward else backward_kernels.named(tiles)
    return {kernel: own._asdict() for kernel, own in named.items()}


def tiles_used(problem, which):
    """The tiles of a pass ("forward" or "backward") for a problem, as nested dictionaries."""
    kernels = forward_kernel if which == "forward" else backward_kernels
    return fields_of(kernels.default_tiles(problem))
