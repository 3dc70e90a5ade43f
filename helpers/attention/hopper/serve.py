"""Where the Hopper kernels can be interpreted, and the tiles that they take."""

import os
from pathlib import Path

from helpers.attention.hopper import forward as forward_kernel

THREADS_ASKED_FOR = int(os.environ.get("PJRT_NPROC") or os.cpu_count())
THREAD_NAME = "tf_XLAEigen"  # of the threads of JAX's client for a CPU
THREADS = 16  # of a CPU, with which the interpreter can let all warpgroups wait for one another


def why_not_here():
    """Why a CPU cannot interpret the kernels as JAX has been started, or None where it can."""
    threads = threads_of_jax()
    if threads < THREADS:
        return (
            f"to interpret it JAX needs {THREADS} threads, and it has started with {threads}: set the environment "
            f"variable PJRT_NPROC to {THREADS} before JAX starts, in a notebook after a restart of the kernel"
        )
    return None


def threads_of_jax():
    """How many threads run JAX's programs on the CPU, once it has started.

    By then PJRT_NPROC may say something else. On Linux the threads are counted, elsewhere that variable is believed
    as it was when this module was imported.
    """
    return sum(_name_of(thread) == THREAD_NAME for thread in Path("/proc/self/task").glob("*")) or THREADS_ASKED_FOR


def _name_of(thread):
    try:
        return (thread / "comm").read_text().strip()
    except OSError:  # it has ended
        return None


def fields_of(tiles):
    """{kernel: {field: value}} of a `forward.Tiles`, or of a pair as `backward_schedule.forms` has them."""
    if isinstance(tiles, forward_kernel.Tiles):
        return {"forward": tiles._asdict()}
    names = ("fused",) if tiles[1] is None else ("dkv", "dq")
    return {kernel: own._asdict() for kernel, own in zip(names, tiles, strict=False)}
