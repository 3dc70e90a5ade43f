"""PyTorch as a second oracle, written by others: each dialect beside its attention and its autograd.

It is no package of the series, so these tests run where it happens to be installed. On a machine without a GPU all
kernels are interpreted or emulated; on one with a GPU all but those for a TPU use it.
"""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from attention_cases import AttentionCase, cotangents, relative_error

from helpers import flash_attention
from helpers.dialects import cuda_launch, triton_launch

torch = pytest.importorskip("torch", reason="PyTorch is not installed here", exc_type=ImportError)
from helpers.dialects import on_gpu  # noqa: E402
from helpers.dialects.cuda_gpu import Loaded  # noqa: E402

pytestmark = pytest.mark.full  # the float64 oracle finds the same faults

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# In units of epsilon. Sums in float32 take turns in another order; of 16 bits the last rounding is what shows.
FARTHEST = {"float32": 12, "float16": 2, "bfloat16": 2}
NAMES = "out", "dq", "dk", "dv"
CASES = [
    AttentionCase(T, S, H, N=4, K=K, B=2, dtype=dtype, arguments={"is_causal": is_causal})
    for (T, S, H), K, dtype, is_causal in [
        ((100, 130, 64), 4, "float32", False),
        ((130, 100, 80), 2, "float32", True),
        ((128, 128, 64), 4, "bfloat16", True),
        ((70, 200, 128), 1, "bfloat16", False),
        ((200, 70, 24), 2, "float16", True),
        ((65, 65, 64), 1, "float16", False),
    ]
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.T}-{case.S}-{case.H}")


def of_torch(case):
    """out, dq, dk, dv of `scaled_dot_product_attention` and its autograd, in the dtype of the case."""
    arrays, arguments = case.inputs()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arrays = [np.asarray(array, np.float32).swapaxes(1, 2) for array in (*arrays, cotangents(case)[0])]
    *inputs, dout = (torch.tensor(array, device=device, dtype=getattr(torch, case.dtype)) for array in arrays)
    inputs = [array.requires_grad_() for array in inputs]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=True, **arguments)
    results = [out, *torch.autograd.grad(out, inputs, dout)]
    return [result.detach().double().cpu().numpy().swapaxes(1, 2) for result in results]


def in_jax(case, implementation=None):
    """out, dq, dk, dv of `flash_attention`. Kernels for a TPU are interpreted on the CPU, wherever the test runs."""
    inputs, arguments = case.inputs()

    @jax.jit
    def run(inputs, dout):
        attend = functools.partial(flash_attention, implementation=implementation, **arguments)
        out, pull_back = jax.vjp(attend, *inputs)
        return out, *pull_back(dout)

    device = jax.devices("cpu")[0] if implementation == "tpu" else jax.devices()[0]
    with jax.default_matmul_precision("highest"), jax.default_device(device):
        return run(inputs, cotangents(case)[0])


cuda_kernels = functools.cache(Loaded)


def by_launches(dialect, case):
    """The same of Triton's kernels or CUDA's: compiled for the GPU where PyTorch has one, else interpreted or
    emulated."""
    if not dialect.is_installed():
        pytest.skip(dialect.MISSING)
    (*inputs, dout), arguments = (*case.inputs()[0], cotangents(case)[0]), case.inputs()[1]
    forward, backward = dialect.forward, dialect.backward
    if has_gpu := torch.cuda.is_available():
        inputs, dout = [*map(on_gpu.to_gpu, inputs)], on_gpu.to_gpu(dout)
        if dialect is cuda_launch:
            forward, backward = cuda_kernels().forward, cuda_kernels().backward
        else:
            arguments["precision"] = "ieee"
    out, lse = forward(*inputs, **arguments)
    results = out, *backward(*inputs, out, lse, dout, 0 * lse, **arguments)
    return [*map(on_gpu.to_numpy, results)] if has_gpu else results


DIALECTS = {
    "flash_attention": in_jax,
    "portable": functools.partial(in_jax, implementation="portable"),
    "tpu": functools.partial(in_jax, implementation="tpu"),
    "triton": functools.partial(by_launches, triton_launch),
    "cuda": functools.partial(by_launches, cuda_launch),
}


def distances(case, results):
    """{name: relative distance from PyTorch, in units of the dtype's epsilon}."""
    pairs = zip(NAMES, results, of_torch(case), strict=True)
    return {name: relative_error(mine, theirs) / EPSILON[case.dtype] for name, mine, theirs in pairs}


@each_case
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_agrees_with_pytorch(dialect, case):
    found = distances(case, DIALECTS[dialect](case))
    assert max(found.values()) < FARTHEST[case.dtype], found


@each_case
def test_a_mask_forgotten_or_invented_would_be_seen(case):
    """In each result by itself: the bound means something."""
    other = replace(case, arguments={"is_causal": not case.arguments["is_causal"]})
    assert min(distances(case, in_jax(other)).values()) > 10 * FARTHEST[case.dtype]
