"""Run, compare and time the CUDA kernels on an NVIDIA GPU that has PyTorch and JAX, and record the figures.

    python -m helpers.dialects.cuda_card --commit HASH        writes $OUT/cuda.json

    resources    registers, spilled bytes and shared memory of every kernel, from the NVRTC found beside the GPU
    correct      errors of every rung and of the backward against the float64 oracle and against PyTorch
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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from helpers.dialects import cuda_compile, cuda_launch
from helpers.dialects.cuda_launch import ELEMENTS, HEADS, RUNGS, Problem, grid_of, head_of

SHAPES = [(1, 1), (1, 7), (7, 1), (63, 65), (100, 130), (113, 203), (128, 128), (239, 1), (799, 3), (1023, 1024)]
HEAD_DIMS = [1, 24, 64, 80, 128, 256]
TURNS = list(itertools.product(ELEMENTS, (1, 2, 8), (False, True)))
RESULTS = ("out", "lse", "dq", "dk", "dv")
TOKENS, T, WIDTH = 16384, 4096, 2048
SLOWEST = RUNGS[0]
TOO_SMALL = "The CUDA kernels are made for NVIDIA GPUs of compute capability 8.0 and above; there is none here."


def cases():
    """(T, S, H, N, K, dtype, is_causal): every shape with every other head_dim, in turns of dtype, group and mask."""
    turns = itertools.cycle([*TURNS, TURNS[0]])
    grid = [(*shape, H, *next(turns)) for shape, H in itertools.product(SHAPES, HEAD_DIMS)]
    chosen = [row for i, row in enumerate(grid) if (i // len(HEAD_DIMS) + i) % 2 == 0]
    return [(T, S, H, 2 * group, 2, dtype, is_causal) for T, S, H, dtype, group, is_causal in chosen]


class Card:
    """The kernels as the GPU has them: loaded when first used, launched on PyTorch's stream."""

    def __init__(self):
        import torch

        torch.zeros(1, device="cuda")  # makes the context in which modules are loaded
        self.driver = ctypes.CDLL("libcuda.so.1")
        major, minor = torch.cuda.get_device_capability()
        self.architecture = f"sm_{major}{minor}"
        self.binaries, self.functions, self.resources = {}, {}, []

    def check(self, status):
        if status:
            raise RuntimeError(f"CUDA driver: error {status}")

    def compile(self):
        """Compile for every dtype and head_dim, beside each other."""
        keys = list(itertools.product(ELEMENTS, HEADS))
        with ThreadPoolExecutor(12) as pool:
            done = pool.map(lambda key: cuda_compile.compile_for_card(*key, self.architecture), keys)
            for (dtype, head), (cubin, log) in zip(keys, done, strict=True):
                self.binaries[dtype, head] = cubin
                for kernel, row in cuda_compile.resources(log).items():
                    self.resources.append({"kernel": kernel, "dtype": dtype, "head": head, **row})

    def function(self, kernel, dtype, head):
        key = kernel, dtype, head
        if key not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.check(self.driver.cuModuleLoadData(ctypes.byref(module), self.binaries[dtype, head]))
            self.check(self.driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()))
            self.functions[key] = function
        return self.functions[key]

    def launch(self, kernel, problem, dtype):
        import torch

        head = head_of(problem.H)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(problem), ctypes.c_void_p))
        grid, block = grid_of(kernel, problem, dtype, head), (cuda_launch.THREADS, 1, 1)
        sizes = [ctypes.c_uint(size) for size in (*grid, *block, 0)]
        self.check(self.driver.cuLaunchKernel(self.function(kernel, dtype, head), *sizes, stream, arguments, None))

    def problem(self, query, key, is_causal, tensors):
        (B, T, N, H), (_, S, K, _) = query.shape, key.shape
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        return Problem(**pointers, B=B, T=T, S=S, N=N, K=K, H=H, scale=H**-0.5, is_causal=is_causal)

    def forward(self, query, key, value, rung, is_causal):
        """(out, lse) of tensors on the GPU; results are NaN before, so that what is not written is seen."""
        import torch

        B, T, N, H = query.shape
        empty = functools.partial(torch.full, fill_value=float("nan"), device="cuda")
        out, lse = torch.full_like(query, float("nan")), empty((B, N, T))
        work = empty((B, N, T, H + 2) if rung == "forward_keys_outer" else (1,))
        tensors = {"query": query, "key": key, "value": value, "out": out, "lse": lse, "work": work}
        self.launch(rung, self.problem(query, key, is_causal, tensors), str(query.dtype).removeprefix("torch."))
        return out, lse

    def backward(self, query, key, value, out, lse, dout, dlse, is_causal):
        """(dq, dk, dv)"""
        import torch

        tensors = dict(query=query, key=key, value=value, out=out, lse=lse, dout=dout, dlse=dlse)
        tensors |= {"delta": torch.full_like(lse, float("nan")), "dq": torch.zeros_like(query, dtype=torch.float32)}
        tensors |= {"dk": torch.full_like(key, float("nan")), "dv": torch.full_like(value, float("nan"))}
        problem, dtype = self.problem(query, key, is_causal, tensors), str(query.dtype).removeprefix("torch.")
        self.launch("delta", problem, dtype)
        self.launch("backward", problem, dtype)
        return tensors["dq"].to(query.dtype), tensors["dk"], tensors["dv"]


def relative_error(mine, right):
    mine, right = (np.asarray(array, np.float64) for array in (mine, right))
    error, size = np.linalg.norm(mine - right), np.linalg.norm(right)
    return float(error / size if size else error)


def to_numpy(tensor):
    return tensor.detach().double().cpu().numpy()


def on_card(array):
    """A NumPy array as a tensor on the GPU; bfloat16 by way of float32, which holds it exactly."""
    import torch

    return torch.from_numpy(np.asarray(array, np.float32)).cuda().to(getattr(torch, str(array.dtype)))


def torch_attention(query, key, value, dout, is_causal):
    """[out, dq, dk, dv] of PyTorch, arrays (B, T, N, H)."""
    import torch

    arrays = [array.detach().clone().requires_grad_() for array in (query, key, value)]
    heads_first = [array.transpose(1, 2) for array in arrays]
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(*heads_first, is_causal=is_causal, enable_gqa=True).transpose(1, 2)
    return [out, *torch.autograd.grad(out, arrays, dout)]


def check_case(card, case):
    """Rows of the record: each rung's out and lse, and the gradients from the residuals of `forward_rows`."""
    import jax.numpy as jnp

    from helpers.attention.reference import oracle, oracle_gradients

    T, S, H, N, K, dtype, is_causal = case
    random = np.random.default_rng([17, T, S, H])
    shapes = (1, T, N, H), (1, S, K, H), (1, S, K, H), (1, T, N, H)
    arrays = [random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]
    dlse = random.standard_normal((1, N, T)).astype(np.float32)
    *inputs, dout = arrays
    right_out, right_lse = oracle(*inputs, is_causal=is_causal)
    gradients = oracle_gradients(*inputs, dout, dlse.swapaxes(1, 2), is_causal=is_causal)
    *q_k_v, dout = [on_card(array) for array in arrays]
    theirs = torch_attention(*q_k_v, dout, is_causal)

    # In 16 bits half a unit in the last place, at most: in the norm, rounding the result and the weights stays below.
    bound = {"float32": 5e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    about = {**dict(zip("TSHNK", case[:5], strict=True)), "dtype": dtype, "is_causal": is_causal}
    rows = []

    def add(kernel, errors, against_torch):
        worst = max(error for name, error in errors.items() if name != "lse")
        is_right = worst <= bound and errors.get("lse", 0) <= 2e-6
        rows.append({**about, "kernel": kernel, "errors": errors, "against_torch": against_torch, "right": is_right})

    for rung in RUNGS:
        if rung == "forward_tensor_cores" and dtype == "float32":
            continue
        out, lse = card.forward(*q_k_v, rung, is_causal)
        found = {"out": relative_error(to_numpy(out), right_out)}
        found["lse"] = relative_error(to_numpy(lse.transpose(1, 2)), right_lse)
        add(rung, found, {"out": relative_error(to_numpy(out), to_numpy(theirs[0]))})
    out, lse = card.forward(*q_k_v, "forward_rows", is_causal)
    mine = card.backward(*q_k_v, out, lse, dout, on_card(dlse), is_causal)
    errors = {name: relative_error(to_numpy(a), b) for name, a, b in zip(RESULTS[2:], mine, gradients, strict=True)}
    mine = card.backward(*q_k_v, out, lse, dout, 0 * lse, is_causal)  # PyTorch's attention has no gradient of lse
    pairs = zip(RESULTS[2:], mine, theirs[1:], strict=True)
    add("backward", errors, {name: relative_error(to_numpy(a), to_numpy(b)) for name, a, b in pairs})
    return rows


def event_ms(run, calls):
    """Milliseconds of a call by the GPU's own clock: the best of `calls`."""
    import torch

    found = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found)


def timed(card, H, dtype, is_causal):
    """Rows of the record, for one head_dim."""
    import jax
    import jax.numpy as jnp
    import torch

    from helpers import flash_attention
    from helpers.instruments.timing import Program, time_together

    B, N = TOKENS // T, WIDTH // H
    keys = jax.random.split(jax.random.key(17), 4)
    arrays = [jax.random.normal(key, (B, T, N, H), jnp.dtype(dtype)) for key in keys]
    *q_k_v, dout = tensors = [torch.from_dlpack(array) for array in jax.block_until_ready(arrays)]
    rows = []

    def add(name, batch, ms, clock, times=1):
        flops = times * 4 * T * T * H * N * batch / (2 if is_causal else 1)
        row = {"kernel": name, "H": H, "T": T, "B": batch, "N": N, "dtype": dtype, "is_causal": is_causal}
        rows.append({**row, "ms": ms, "clock": clock, "tflops": flops / ms / 1e9})

    rungs = [rung for rung in RUNGS if rung != "forward_tensor_cores" or dtype != "float32"]
    for rung in rungs:
        if rung == SLOWEST and is_causal:
            continue
        batch = 1 if rung == SLOWEST else B
        part = [tensor[:batch] for tensor in q_k_v]
        card.forward(*(tensor[:1, :256].contiguous() for tensor in q_k_v), rung, is_causal)  # loads the module
        torch.cuda.synchronize()
        run = functools.partial(card.forward, *part, rung, is_causal)
        first = event_ms(run, 1)
        ms = first if first > 1000 else event_ms(run, 3 if first > 50 else 20)
        add(rung, batch, ms, "events")
    out, lse = card.forward(*q_k_v, "forward_rows", is_causal)
    backward = functools.partial(card.backward, *q_k_v, out, lse, dout, 0 * lse, is_causal)
    backward()
    add("backward", B, event_ms(backward, 2), "events", times=2.5)

    wait = lambda _: torch.cuda.synchronize()
    programs = {}
    for name, implementation in (("portable", "portable"), ("flash_attention", None)):
        options = {"implementation": implementation} if implementation else {}
        attend = jax.jit(functools.partial(flash_attention, is_causal=is_causal, **options))
        programs[name] = Program(attend, [tuple(arrays[:3])])
    attention = torch.nn.functional.scaled_dot_product_attention
    theirs = lambda *arrays: attention(*(array.transpose(1, 2) for array in arrays), is_causal=is_causal)
    programs["scaled_dot_product_attention"] = Program(theirs, [tuple(q_k_v)], wait)
    if dtype != "float32":
        mine = lambda *arrays: card.forward(*arrays, "forward_tensor_cores", is_causal)
        programs["forward_tensor_cores"] = Program(mine, [tuple(q_k_v)], wait)
    for name, timing in time_together(programs, sample_ms=20).items():
        add(name, B, timing.wall_ms, "wall")
    del tensors
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", required=True, help="the commit that is measured")
    limits = "no new comparison starts after so long, and no new timing after 70 %% of it"
    parser.add_argument("--seconds", type=float, default=100, help=limits)
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        sys.exit(TOO_SMALL)
    began = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    target = Path(os.environ.get("OUT", ".")) / "cuda.json"
    record = {
        "commit": arguments.commit,
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "versions": {"jax": jax.__version__, "torch": torch.__version__, "cuda": torch.version.cuda},
        "notes": [],
        "correct": [],
        "times": [],
    }

    def write():
        record["seconds"] = round(time.perf_counter() - began, 1)
        target.write_text(json.dumps(record, indent=1) + "\n")

    def attempt(what, run):
        try:
            return run()
        except Exception as error:
            record["notes"].append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return []

    card = Card()
    card.compile()
    record["resources"] = card.resources
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)
    # Groups with the last rung first: what is most wanted is there if time runs out.
    for dtype, H, is_causal in [
        ("bfloat16", 64, False),
        ("bfloat16", 128, False),
        ("bfloat16", 64, True),
        ("bfloat16", 128, True),
        ("float32", 64, False),
    ]:
        if time.perf_counter() - began < arguments.seconds * 0.7:
            rows = attempt(f"{dtype} H{H}", functools.partial(timed, card, H, dtype, is_causal))
            record["times"] += rows
            for row in rows:
                print(
                    f"{row['kernel']:30}{dtype:10}H{H:<4}{row['ms']:10.3f} ms{row['tflops']:8.1f} TFLOP/s", flush=True
                )
            write()
    for case in cases():
        if time.perf_counter() - began > arguments.seconds:
            record["notes"].append(f"no time for case {case}")
            continue
        record["correct"] += attempt(str(case), functools.partial(check_case, card, case))
    write()
    wrong = [row for row in record["correct"] if not row["right"]]
    print(f"{len(record['correct'])} comparisons, {len(wrong)} wrong, {record['seconds']} s; {record['notes']}")
    for row in wrong[:20]:
        print(row)


if __name__ == "__main__":
    main()
