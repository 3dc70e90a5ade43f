"""Run the CUDA kernels on an NVIDIA GPU, for a machine with PyTorch, and compare them with the float64 oracle.

    python -m helpers.dialects.cuda_gpu

The kernels are compiled by NVRTC and launched by the driver, both by ctypes: what PyTorch brings is enough.
`make cuda` compiles the same file, maybe by another version of NVRTC.
"""

import ctypes
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import torch
from tqdm import tqdm

from helpers.attention.reference import oracle, oracle_gradients
from helpers.dialects import cuda_compile, cuda_launch
from helpers.dialects.cuda_launch import ELEMENTS, HEADS, RUNGS, THREADS, grid_of, head_of

SHAPES = [(1, 1), (1, 7), (7, 1), (63, 65), (100, 130), (113, 203), (128, 128), (239, 1), (799, 3), (1023, 1024)]
HEAD_DIMS = [1, 24, 64, 80, 128, 256]
TURNS = list(itertools.product(ELEMENTS, (1, 2, 8), (False, True)))
NAMES = ("out", "lse", "dq", "dk", "dv")
# In 16 bits half a unit in the last place, at most: in the norm, rounding the result and the weights stays below.
BOUNDS = {"float32": 5e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}
BOUND_OF_LSE = 2e-6


class Loaded:
    """The kernels as the GPU has them: compiled at once, loaded when first used, launched on PyTorch's stream."""

    def __init__(self):
        torch.zeros(1, device="cuda")  # makes the context in which modules are loaded
        self.driver = ctypes.CDLL("libcuda.so.1")
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
        keys = list(itertools.product(ELEMENTS, HEADS))
        with ThreadPoolExecutor(12) as pool:
            done = pool.map(lambda key: cuda_compile.compile_for_gpu(*key, architecture), keys)
            self.binaries = {key: cubin for key, (cubin, _) in zip(keys, done, strict=True)}
        self.functions = {}

    def call(self, name, *arguments):
        if status := getattr(self.driver, name)(*arguments):
            raise RuntimeError(f"CUDA driver: {name}: error {status}")

    def function(self, kernel, dtype, head):
        key = kernel, dtype, head
        if key not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), self.binaries[dtype, head])
            self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
            self.functions[key] = function
        return self.functions[key]

    def launch(self, kernel, problem, dtype, _):
        """As `cuda_launch.launch`, of a problem whose arrays are tensors on the GPU."""
        head = head_of(problem.H)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(problem), ctypes.c_void_p))
        sizes = [ctypes.c_uint(size) for size in (*grid_of(kernel, problem, dtype, head), THREADS, 1, 1, 0)]
        self.call("cuLaunchKernel", self.function(kernel, dtype, head), *sizes, stream, arguments, None)


def cases():
    """(T, S, H, dtype, group, is_causal): every shape with every other head_dim, in turns of the rest."""
    turns = itertools.cycle([*TURNS, TURNS[0]])
    for (row, shape), (column, H) in itertools.product(enumerate(SHAPES), enumerate(HEAD_DIMS)):
        turn = next(turns)
        if (row + column) % 2 == 0:
            yield *shape, H, *turn


def to_gpu(array):
    """A NumPy array as a tensor on the GPU; bfloat16 by way of float32, which holds it exactly."""
    return torch.from_numpy(np.asarray(array, np.float32)).cuda().to(getattr(torch, str(array.dtype)))


def wrong(found, right, dtype):
    """Names and relative errors of the tensors that are farther from the right arrays than rounding explains."""
    for (name, one), other in zip(found.items(), right, strict=True):
        error, size = np.linalg.norm(one.double().cpu().numpy() - other), np.linalg.norm(other)
        if not (error / size if size else error) <= (BOUND_OF_LSE if name == "lse" else BOUNDS[dtype]):
            yield f"{name} {error / size if size else error:.1e}"


def compared(launch, T, S, H, dtype, group, is_causal):
    """(kernel, what is wrong with its results) of each rung, and of the backward kernels behind `forward_rows`."""
    random, N, K = np.random.default_rng([17, T, S, H]), 2 * group, 2
    shapes = (1, T, N, H), (1, S, K, H), (1, S, K, H), (1, T, N, H)
    *inputs, dout = (random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)
    dlse = random.standard_normal((1, N, T)).astype(np.float32)
    out, lse = oracle(*inputs, is_causal=is_causal)
    gradients = oracle_gradients(*inputs, dout, dlse.swapaxes(1, 2), is_causal=is_causal)
    tensors = [*map(to_gpu, inputs)]
    for rung in RUNGS[: len(RUNGS) - (dtype == "float32")]:
        found = cuda_launch.forward(*tensors, rung=rung, is_causal=is_causal, run=launch)
        yield rung, [*wrong(dict(zip(NAMES, found, strict=False)), (out, lse.swapaxes(1, 2)), dtype)]
    residuals = cuda_launch.forward(*tensors, is_causal=is_causal, run=launch)
    found = cuda_launch.backward(*tensors, *residuals, to_gpu(dout), to_gpu(dlse), is_causal=is_causal, run=launch)
    yield "backward", [*wrong(dict(zip(NAMES[2:], found, strict=True)), gradients, dtype)]


def main():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        print("The kernels need an NVIDIA GPU of compute capability 8.0 or above, and there is none here.")
        return 1
    kernels, count, failed = Loaded(), 0, 0
    for case in tqdm(list(cases())):
        for kernel, faults in compared(kernels.launch, *case):
            count, failed = count + 1, failed + bool(faults)
            if faults:
                print(f"{kernel} {case}: {', '.join(faults)}")
    print(f"{count} comparisons, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
