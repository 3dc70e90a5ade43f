"""What `api` calls: which problems the Hopper kernels serve, and the kernels as functions that can be vmapped."""

import dataclasses
import os

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.device import default_device
from helpers.attention.hopper import backward as backward_kernels
from helpers.attention.hopper import forward as forward_kernel
from helpers.attention.problem import Call

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


def forward(call):
    """(out, lse) of a checked `Call`, see `hopper.forward`; a vmapped axis joins the batch."""

    def run(problem, *arrays):
        return forward_kernel.forward(Call(problem, *arrays, None, None), interpret=_interpreter())

    return _batched(run, call.problem)(*call.arrays[:3])


def backward(call, *residuals):
    """(dq, dk, dv) of a checked `Call` and (out, lse, dout, dlse), see `hopper.backward`."""

    def run(problem, query, key, value, *residuals):
        call = Call(problem, query, key, value, None, None)
        return backward_kernels.backward(call, *residuals, interpret=_interpreter())

    return _batched(run, call.problem)(*call.arrays[:3], *residuals)


def _interpreter():
    """Unlike the portable kernels', decided when tracing: the interpreter has side effects, which JAX
    would not let into `vmap` and `checkpoint` even where it is not used. (So on a CPU, where it is
    used, these kernels cannot be checkpointed.)"""
    return plgpu.InterpretGPUParams() if default_device().platform == "cpu" else False


def _batched(run, problem):
    """run(problem, *arrays), all with a leading batch axis, as a function that knows how to be vmapped."""

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return run(problem, *arrays)

    @call.def_vmap
    def _(size, is_batched, *arrays):
        arrays = [
            array if batched else jnp.broadcast_to(array, (size, *array.shape))
            for array, batched in zip(arrays, is_batched, strict=True)
        ]
        flat = [array.reshape(-1, *array.shape[2:]) for array in arrays]
        results = _batched(run, dataclasses.replace(problem, B=size * problem.B))(*flat)
        results = tuple(result.reshape(size, problem.B, *result.shape[1:]) for result in results)
        return results, (True,) * len(results)

    return call
