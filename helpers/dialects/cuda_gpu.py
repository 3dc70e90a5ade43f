"""Run, compare and time the CUDA kernels on an NVIDIA GPU that has PyTorch and JAX, and record the figures.

    python -m helpers.dialects.cuda_gpu --commit HASH        writes $OUT/cuda.json

    resources    registers, spilled bytes and shared memory of every kernel, from the NVRTC found beside the GPU
    correct      errors of every rung and of the backward against the float64 oracle
    times        the rungs, and the backward, beside the portable Pallas kernel and `flash_attention`

The kernels are compiled by NVRTC and launched by the driver, both by ctypes: what PyTorch and JAX bring is enough.
`make cuda` compiles the same file, maybe by another version of NVRTC. The arrays that are timed are JAX's, handed to
PyTorch by DLPack. Events of the GPU time the rungs and the backward; the wall clock times the rest, and the last rung
once more. The rung that computes logits for every dimension is timed on a quarter of the batch, and without a causal
mask only.
"""

import argparse
import ctypes
import datetime
import functools
import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tqdm import tqdm

from helpers import flash_attention
from helpers.attention.reference import oracle, oracle_gradients
from helpers.dialects import cuda_compile, cuda_launch
from helpers.dialects.cuda_launch import ELEMENTS, HEADS, RUNGS, THREADS, grid_of, head_of
from helpers.instruments.timing import Program, time_together

SHAPES = [(1, 1), (1, 7), (7, 1), (63, 65), (100, 130), (113, 203), (128, 128), (239, 1), (799, 3), (1023, 1024)]
HEAD_DIMS = [1, 24, 64, 80, 128, 256]
TURNS = list(itertools.product(("float32", "bfloat16", "float16"), (1, 2, 8), (False, True)))
RESULTS = ("out", "lse", "dq", "dk", "dv")
# In 16 bits half a unit in the last place, at most: in the norm, rounding the result and the weights stays below.
BOUNDS = {"float32": 5e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}
BOUND_OF_LSE = 2e-6
SLOWEST, *_, LAST = RUNGS
TOKENS, T, WIDTH = 16384, 4096, 2048  # of what is timed: all tokens, those of a sequence, and N H
TIMED = [
    ("bfloat16", 64, False),
    ("bfloat16", 128, False),
    ("bfloat16", 64, True),
    ("bfloat16", 128, True),
    ("float32", 64, False),
]


def cases():
    """The calls that are compared: every shape with every other head_dim, in turns of dtype, group and mask."""
    turns = itertools.cycle([*TURNS, TURNS[0]])
    found = []
    for (row, (T, S)), (column, H) in itertools.product(enumerate(SHAPES), enumerate(HEAD_DIMS)):
        dtype, group, is_causal = next(turns)
        if (row + column) % 2 == 0:
            found.append(dict(T=T, S=S, H=H, N=2 * group, K=2, dtype=dtype, is_causal=is_causal))
    return found


def inputs_of(case):
    """query, key, value and dout of a batch entry in the case's dtype, and dlse (1, N, T); NumPy arrays."""
    T, S, H, N, K = (case[name] for name in "TSHNK")
    random = np.random.default_rng([17, T, S, H])
    shapes = (1, T, N, H), (1, S, K, H), (1, S, K, H), (1, T, N, H)
    arrays = [random.standard_normal(shape).astype(jnp.dtype(case["dtype"])) for shape in shapes]
    return arrays, random.standard_normal((1, N, T)).astype(np.float32)


def right_answers(case, arrays, dlse):
    """{name: float64 array} of `RESULTS`, lse as (B, N, T)."""
    *inputs, dout = arrays
    out, lse = oracle(*inputs, is_causal=case["is_causal"])
    gradients = oracle_gradients(*inputs, dout, dlse.swapaxes(1, 2), is_causal=case["is_causal"])
    return dict(zip(RESULTS, (out, lse.swapaxes(1, 2), *gradients), strict=True))


def to_gpu(array):
    """A NumPy array as a tensor on the GPU; bfloat16 by way of float32, which holds it exactly."""
    return torch.from_numpy(np.asarray(array, np.float32)).cuda().to(getattr(torch, str(array.dtype)))


def to_numpy(array):
    """A tensor, or an array, as float64 of NumPy."""
    return array.detach().double().cpu().numpy() if torch.is_tensor(array) else np.asarray(array, np.float64)


def errors_of(mine, right):
    """{name: relative error} of those results that both have."""
    found = {}
    for name in mine.keys() & right.keys():
        one, other = to_numpy(mine[name]), to_numpy(right[name])
        error, size = np.linalg.norm(one - other), np.linalg.norm(other)
        found[name] = float(error / size if size else error)
    return {name: found[name] for name in RESULTS if name in found}


def row_of(case, kernel, mine, right):
    """A row of `correct` in the record: the errors of a kernel's results."""
    errors = errors_of(mine, right)
    bounds = {name: BOUND_OF_LSE if name == "lse" else BOUNDS[case["dtype"]] for name in errors}
    is_right = all(errors[name] <= bounds[name] for name in errors)
    return {**case, "kernel": kernel, "errors": errors, "right": is_right}


def event_ms(run, calls=1, rounds=3):
    """Milliseconds of a call by the GPU's own clock: the best of some rounds of queued calls."""
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / calls)
    return min(found)


def tflops(which, ms, H, N, B, is_causal):
    """TFLOP/s of a pass over sequences of T; only the operations that attention needs are counted."""
    return (1 if which == "forward" else 2.5) * 4 * T * T * H * N * B / (2 if is_causal else 1) / ms / 1e9


class Loaded:
    """The kernels as the GPU has them: compiled at once, loaded when first used, launched on PyTorch's stream."""

    def __init__(self):
        torch.zeros(1, device="cuda")  # makes the context in which modules are loaded
        self.driver = ctypes.CDLL("libcuda.so.1")
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
        self.binaries, self.functions, self.resources = {}, {}, []
        keys = list(itertools.product(ELEMENTS, HEADS))
        with ThreadPoolExecutor(12) as pool:
            done = pool.map(lambda key: cuda_compile.compile_for_gpu(*key, architecture), keys)
            for (dtype, head), (cubin, log) in zip(keys, done, strict=True):
                self.binaries[dtype, head] = cubin
                for kernel, row in cuda_compile.resources(log).items():
                    self.resources.append({"kernel": kernel, "dtype": dtype, "head": head, **row})

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
        head = head_of(problem.H)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(problem), ctypes.c_void_p))
        sizes = [ctypes.c_uint(size) for size in (*grid_of(kernel, problem, dtype, head), THREADS, 1, 1, 0)]
        self.call("cuLaunchKernel", self.function(kernel, dtype, head), *sizes, stream, arguments, None)

    def forward(self, *arrays, **options):
        """As `cuda_launch.forward`, of tensors on the GPU."""
        return cuda_launch.forward(*arrays, **options, run=self.launch)

    def backward(self, *arrays, **options):
        return cuda_launch.backward(*arrays, **options, run=self.launch)


def rungs_of(dtype):
    return [rung for rung in RUNGS if rung != LAST or dtype != "float32"]


def compared(kernels, case):
    """Rows of the record: each rung's out and lse, and the gradients from the residuals of `forward_rows`."""
    arrays, dlse = inputs_of(case)
    right, is_causal = right_answers(case, arrays, dlse), case["is_causal"]
    *q_k_v, dout = map(to_gpu, arrays)
    rows = []
    for rung in rungs_of(case["dtype"]):
        found = dict(zip(RESULTS, kernels.forward(*q_k_v, rung=rung, is_causal=is_causal), strict=False))
        rows.append(row_of(case, rung, found, right))
    residuals = kernels.forward(*q_k_v, is_causal=is_causal)
    gradients = kernels.backward(*q_k_v, *residuals, dout, to_gpu(dlse), is_causal=is_causal)
    return [*rows, row_of(case, "backward", dict(zip(RESULTS[2:], gradients, strict=True)), right)]


def timed(kernels, dtype, H, is_causal):
    """Rows of the record, for one head_dim."""
    B, N = TOKENS // T, WIDTH // H
    keys = jax.random.split(jax.random.key(17), 4)
    arrays = jax.block_until_ready([jax.random.normal(key, (B, T, N, H), jnp.dtype(dtype)) for key in keys])
    *q_k_v, dout = map(torch.from_dlpack, arrays)
    rows = []

    def add(name, batch, ms, clock, which="forward"):
        row = {"kernel": name, "H": H, "T": T, "B": batch, "N": N, "dtype": dtype, "is_causal": is_causal}
        rows.append({**row, "ms": ms, "clock": clock, "tflops": tflops(which, ms, H, N, batch, is_causal)})

    for rung in rungs_of(dtype):
        if rung == SLOWEST and is_causal:
            continue
        batch, options = 1 if rung == SLOWEST else B, {"rung": rung, "is_causal": is_causal}
        kernels.forward(*(tensor[:1, :256] for tensor in q_k_v), **options)  # loads the module
        run = functools.partial(kernels.forward, *(tensor[:batch] for tensor in q_k_v), **options)
        first = event_ms(run, rounds=1)
        add(rung, batch, first if first > 1000 else event_ms(run, rounds=3 if first > 50 else 20), "events")
    out, lse = kernels.forward(*q_k_v, is_causal=is_causal)
    backward = functools.partial(kernels.backward, *q_k_v, out, lse, dout, 0 * lse, is_causal=is_causal)
    add("backward", B, event_ms(backward), "events", "backward")

    wait = lambda _: torch.cuda.synchronize()
    attend = functools.partial(flash_attention, is_causal=is_causal)
    attention = torch.nn.functional.scaled_dot_product_attention
    theirs = lambda *arrays: attention(*(array.transpose(1, 2) for array in arrays), is_causal=is_causal)
    programs = {
        "portable": Program(jax.jit(functools.partial(attend, implementation="portable")), [tuple(arrays[:3])]),
        "flash_attention": Program(jax.jit(attend), [tuple(arrays[:3])]),
        "scaled_dot_product_attention": Program(theirs, [tuple(q_k_v)], wait),
    }
    last = functools.partial(kernels.forward, rung=LAST, is_causal=is_causal)
    if dtype != "float32":
        programs[LAST] = Program(last, [tuple(q_k_v)], wait)
    for name, timing in time_together(programs, sample_ms=20).items():
        add(name, B, timing.wall_ms, "wall")
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", required=True, help="the commit that is measured, for the record")
    commit = parser.parse_args(arguments).commit
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        parser.exit(1, "The kernels need an NVIDIA GPU of compute capability 8.0 or above, and there is none here.\n")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    kernels = Loaded()
    versions = {"jax": jax.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    found = {"card": torch.cuda.get_device_name(), "versions": versions, "commit": commit}
    found |= {"date": datetime.date.today().isoformat(), "resources": kernels.resources}
    found["times"] = [row for group in tqdm(TIMED) for row in timed(kernels, *group)]
    found["correct"] = [row for case in tqdm(cases()) for row in compared(kernels, case)]
    Path(os.environ.get("OUT", "."), "cuda.json").write_text(json.dumps(found, indent=1) + "\n")
    wrong = [row for row in found["correct"] if not row["right"]]
    print(f"{len(found['correct'])} comparisons, {len(wrong)} wrong: {wrong[:20]}")


if __name__ == "__main__":
    sys.exit(main())
