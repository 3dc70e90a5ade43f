"""Run, compare and time the CUDA kernels on an NVIDIA GPU that has PyTorch and JAX, and record the figures.

    python -m helpers.dialects.cuda_gpu --commit HASH        writes $OUT/cuda.json

    resources    registers, spilled bytes and shared memory of every kernel, from the NVRTC found beside the GPU
    correct      errors of every rung and of the backward against the float64 oracle and against PyTorch
    times        the rungs, and the backward, beside the portable Pallas kernel and `flash_attention`

The kernels are compiled by NVRTC and launched by the driver, both by ctypes: what PyTorch and JAX bring is enough.
`make cuda` compiles the same file, maybe by another version of NVRTC. The arrays that are timed are JAX's, handed to
PyTorch by DLPack. Events of the GPU time the rungs and the backward; the wall clock times the rest, and the last rung
once more. The rung that computes logits for every dimension is timed on a quarter of the batch, and without a causal
mask only.
"""

import ctypes
import functools
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import torch

from helpers import flash_attention
from helpers.dialects import cuda_compile, cuda_launch, on_gpu
from helpers.dialects.cuda_launch import ELEMENTS, HEADS, RUNGS, THREADS, grid_of, head_of
from helpers.dialects.on_gpu import RESULTS, TOKENS, WIDTH, T, event_ms, to_gpu
from helpers.instruments.timing import Program, time_together

SLOWEST, *_, LAST = RUNGS
SECONDS = 100  # no new comparison starts after so long, and no new timing after 70 % of it
TIMED = [  # what is most wanted first
    ("bfloat16", 64, False),
    ("bfloat16", 128, False),
    ("bfloat16", 64, True),
    ("bfloat16", 128, True),
    ("float32", 64, False),
]


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
    arrays, dlse = on_gpu.inputs_of(case)
    right, is_causal = on_gpu.right_answers(case, arrays, dlse), case["is_causal"]
    *q_k_v, dout = tensors = [*map(to_gpu, arrays)]
    theirs = on_gpu.of_torch(tensors, is_causal)
    rows = []
    for rung in rungs_of(case["dtype"]):
        found = dict(zip(RESULTS, kernels.forward(*q_k_v, rung=rung, is_causal=is_causal), strict=False))
        rows.append(on_gpu.row_of(case, found, right, on_gpu.errors_of(found, theirs), kernel=rung))
    out, lse = kernels.forward(*q_k_v, is_causal=is_causal)
    gradients = lambda dlse: dict(
        zip(RESULTS[2:], kernels.backward(*q_k_v, out, lse, dout, dlse, is_causal=is_causal), strict=True)
    )
    against = on_gpu.errors_of(gradients(0 * lse), theirs)  # PyTorch's attention has no gradient of lse
    return [*rows, on_gpu.row_of(case, gradients(to_gpu(dlse)), right, against, kernel="backward")]


def timed(kernels, dtype, H, is_causal):
    """Rows of the record, for one head_dim."""
    B, N = TOKENS // T, WIDTH // H
    keys = jax.random.split(jax.random.key(17), 4)
    arrays = jax.block_until_ready([jax.random.normal(key, (B, T, N, H), jnp.dtype(dtype)) for key in keys])
    *q_k_v, dout = map(torch.from_dlpack, arrays)
    rows = []

    def add(name, batch, ms, clock, which="forward"):
        row = {"kernel": name, "H": H, "T": T, "B": batch, "N": N, "dtype": dtype, "is_causal": is_causal}
        rows.append({**row, "ms": ms, "clock": clock, "tflops": on_gpu.tflops(which, ms, H, N, batch, is_causal)})

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

    attend = functools.partial(flash_attention, is_causal=is_causal)
    attention = torch.nn.functional.scaled_dot_product_attention
    theirs = lambda *arrays: attention(*(array.transpose(1, 2) for array in arrays), is_causal=is_causal)
    programs = {
        "portable": Program(jax.jit(functools.partial(attend, implementation="portable")), [tuple(arrays[:3])]),
        "flash_attention": Program(jax.jit(attend), [tuple(arrays[:3])]),
        "scaled_dot_product_attention": Program(theirs, [tuple(q_k_v)], on_gpu.wait),
    }
    last = functools.partial(kernels.forward, rung=LAST, is_causal=is_causal)
    if dtype != "float32":
        programs[LAST] = Program(last, [tuple(q_k_v)], on_gpu.wait)
    for name, timing in time_together(programs, sample_ms=20).items():
        add(name, B, timing.wall_ms, "wall")
    return rows


def main(arguments=None):
    commit = on_gpu.parse(arguments, __doc__)
    record = on_gpu.Record("cuda", commit, on_gpu.versions(cuda=torch.version.cuda))
    kernels = Loaded()
    record.found["resources"] = kernels.resources
    for group in TIMED:
        if record.seconds < 0.7 * SECONDS:
            rows = record.attempt(group, timed, kernels, *group)
            record.found["times"] += rows
            record.save(f"{group}: " + ", ".join(f"{row['kernel']} {row['tflops']:.1f} TFLOP/s" for row in rows))
    left_out = 0
    for case in on_gpu.cases():
        if record.seconds < SECONDS:
            record.found["correct"] += record.attempt(case, compared, kernels, case)
        else:
            left_out += 1
    record.found["notes"] += [f"no time for {left_out} cases"] * bool(left_out)
    wrong = [row for row in record.found["correct"] if not row["right"]]
    record.save(f"{len(record.found['correct'])} comparisons, {len(wrong)} wrong: {wrong[:20]} {record.found['notes']}")


if __name__ == "__main__":
    sys.exit(main())
