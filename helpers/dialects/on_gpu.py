"""What `cuda_gpu` and `triton_gpu` share: cases, comparisons with the float64 oracle and PyTorch, times, a record."""

import argparse
import datetime
import itertools
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

from helpers.attention.reference import oracle, oracle_gradients

SHAPES = [(1, 1), (1, 7), (7, 1), (63, 65), (100, 130), (113, 203), (128, 128), (239, 1), (799, 3), (1023, 1024)]
HEAD_DIMS = [1, 24, 64, 80, 128, 256]
TURNS = list(itertools.product(("float32", "bfloat16", "float16"), (1, 2, 8), (False, True)))
RESULTS = ("out", "lse", "dq", "dk", "dv")
# In 16 bits half a unit in the last place, at most: in the norm, rounding the result and the weights stays below.
BOUNDS = {"float32": 5e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}
BOUND_OF_LSE = 2e-6
torch.backends.cuda.matmul.allow_tf32 = False  # also in the processes that compare
TOKENS, T, WIDTH = 16384, 4096, 2048  # of what is timed: all tokens, those of a sequence, and N H


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


def of_torch(arrays, is_causal):
    """{name: tensor} of out and the gradients by PyTorch; arrays as of `inputs_of`, on the GPU."""
    *inputs, dout = arrays
    inputs = [array.detach().clone().requires_grad_() for array in inputs]
    heads_first = [array.transpose(1, 2) for array in inputs]
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(*heads_first, is_causal=is_causal, enable_gqa=True).transpose(1, 2)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, inputs, dout)), strict=True))


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


def row_of(case, mine, right, against_torch, **more):
    """A row of `correct` in the record: errors of results against the oracle, and of some against PyTorch."""
    errors = errors_of(mine, right)
    bounds = {name: BOUND_OF_LSE if name == "lse" else BOUNDS[case["dtype"]] for name in errors}
    is_right = all(errors[name] <= bounds[name] for name in errors)
    return {**case, **more, "errors": errors, "against_torch": against_torch, "right": is_right}


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


def wait(_):
    """For `timing.Program`: until PyTorch's queue is empty."""
    torch.cuda.synchronize()


def tflops(which, ms, H, N, B, is_causal):
    """TFLOP/s of a pass over sequences of T; only the operations that attention needs are counted."""
    return (1 if which == "forward" else 2.5) * 4 * T * T * H * N * B / (2 if is_causal else 1) / ms / 1e9


class Record:
    """The figures of one run, and where they are written: to $OUT/<name>.json, as far as they are."""

    def __init__(self, name, commit, versions):
        self.path = Path(os.environ.get("OUT", ".")) / f"{name}.json"
        self.began = time.perf_counter()
        self.found = {"card": torch.cuda.get_device_name(), "versions": versions, "commit": commit}
        self.found |= {"date": datetime.date.today().isoformat(), "notes": [], "correct": [], "times": []}

    @property
    def seconds(self):
        return round(time.perf_counter() - self.began, 1)

    def note(self, what, error):
        self.found["notes"].append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def attempt(self, what, run, *arguments):
        """What run(*arguments) returns, or [] and a note."""
        try:
            return run(*arguments)
        except Exception as error:
            self.note(what, error)
            return []

    def save(self, said):
        self.path.write_text(json.dumps(self.found | {"seconds": self.seconds}, indent=1) + "\n")
        print(f"{self.seconds:6.1f} s: {said}", flush=True)


def parse(arguments, about):
    """The commit that a program is told, where there is a GPU that serves; SystemExit where there is none."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--commit", required=True, help="the commit that is measured, for the record")
    commit = parser.parse_args(arguments).commit
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        parser.exit(1, "The kernels need an NVIDIA GPU of compute capability 8.0 or above, and there is none here.\n")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return commit


def versions(**more):
    return {"jax": jax.__version__, "torch": torch.__version__, **more}
