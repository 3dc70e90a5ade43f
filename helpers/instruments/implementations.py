"""What the benchmark compares: this package's kernels, naive attention, cuDNN, and public peers that are installed.

Each entry makes a function of (query, key, value), shaped (B, T, N, H), for a case. A peer that is not
installed raises ImportError. Nothing here is needed to use the kernels.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from helpers import flash_attention
from helpers.instruments.timing import Timed


def ours(implementation, case):
    return functools.partial(flash_attention, is_causal=case.is_causal, implementation=implementation)


def jax_triton(case):
    """The Pallas-Triton example that JAX carries, forward with the fastest of 16 settings tried on an H200."""
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
    block_q, block_k, num_warps, num_stages = 64, 128, 4, 2
    if case.H > 64:
        block_q, block_k, num_warps, num_stages = (64, 64, 4, 3) if case.is_causal else (128, 128, 8, 3)
    blocks = module.BlockSizes(block_q, block_k, 64, 64, 64, 64)  # two forward, four backward
    options = {"sm_scale": case.H**-0.5, "causal": case.is_causal, "block_sizes": blocks}
    options |= {"num_warps": num_warps, "num_stages": num_stages}
    return lambda query, key, value: module.mha(query, key, value, None, **options)


def jax_mosaic(case):
    """The Mosaic GPU example that JAX carries; it takes float16 only."""
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    blocks = {"block_q": 64, "block_kv": 128 if case.H <= 64 else 64}
    if not case.is_causal:
        blocks |= dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = module.TuningConfig(max_concurrent_steps=2, causal=case.is_causal, **blocks)

    def attention(query, key, value):
        # Its logits are not scaled.
        return module.attention((query * case.H**-0.5).astype(query.dtype), key, value, config)

    return attention


class OfTorch(NamedTuple):
    """An implementation that PyTorch runs. JAX cannot differentiate it, so its passes are functions of their own.

    forward(query, key, value) -> out; residuals(query, key, value) -> what backward(kept, dout) -> (dq, dk, dv) wants.
    to_torch and to_jax hand an array (B, T, N, H) over where it lies.
    """

    forward: Callable
    residuals: Callable
    backward: Callable
    to_torch: Callable
    to_jax: Callable

    def programs(self, sets):
        """{pass: Timed} of sets of JAX's (query, key, value, dout)."""
        wait = lambda _: importlib.import_module("torch").cuda.synchronize()
        sets = [tuple(map(self.to_torch, arrays)) for arrays in sets]
        forward = Timed(self.forward, [arrays[:3] for arrays in sets], wait)
        kept = [(self.residuals(*arrays[:3]), arrays[3]) for arrays in sets]
        return {"forward": forward, "backward": Timed(self.backward, kept, wait)}


def _by_autograd(attention, to_torch, to_jax):
    """An implementation that PyTorch differentiates."""
    torch = importlib.import_module("torch")

    def forward(*arrays):
        with torch.no_grad():
            return attention(*arrays)

    def residuals(*arrays):
        arrays = [array.detach().requires_grad_() for array in arrays]
        return arrays, attention(*arrays)

    def backward(kept, dout):
        arrays, out = kept
        return torch.autograd.grad(out, arrays, dout, retain_graph=True)

    return OfTorch(forward, residuals, backward, to_torch, to_jax)


def torch_sdpa(case):
    """PyTorch's FlashAttention-2."""
    torch = importlib.import_module("torch")
    backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION

    def attention(*arrays):
        with torch.nn.attention.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=case.is_causal)

    to_torch = lambda array: torch.from_dlpack(array).transpose(1, 2)  # it wants heads before positions
    return _by_autograd(attention, to_torch, lambda array: jnp.from_dlpack(array.transpose(1, 2).contiguous()))


def flash_attention_4(case):
    """FlashAttention-4, of the package flash-attn-4."""
    attention = importlib.import_module("flash_attn.cute").flash_attn_func
    torch = importlib.import_module("torch")

    def first(*arrays):
        out = attention(*arrays, causal=case.is_causal)
        return out[0] if isinstance(out, tuple) else out  # some releases return lse, too

    return _by_autograd(first, torch.from_dlpack, jnp.from_dlpack)


@functools.cache
def operators_of_flash_attention_3():
    """The operators of FlashAttention-3's own library, which FLASH_ATTENTION_3 names or its package brings."""
    torch = importlib.import_module("torch")
    if path := os.environ.get("FLASH_ATTENTION_3"):
        torch.ops.load_library(path)
    else:
        importlib.import_module("flash_attn_3._C")
    return torch.ops.flash_attn_3


def flash_attention_3(case):
    operators = operators_of_flash_attention_3()
    torch = importlib.import_module("torch")
    options = {"softmax_scale": case.H**-0.5, "is_causal": case.is_causal}

    def residuals(*arrays):
        out, lse, *_ = operators.fwd(*arrays, **options)
        return *arrays, out, lse

    forward = lambda *arrays: operators.fwd(*arrays, **options)[0]
    backward = lambda kept, dout: operators.bwd(dout, *kept, **options)[:3]
    return OfTorch(forward, residuals, backward, torch.from_dlpack, jnp.from_dlpack)


# In the order of the report.
OF_JAX = {"naive": "reference"} | {name: name for name in ("portable", "triton", "hopper", "cudnn")}
OF_JAX = {name: functools.partial(ours, of) for name, of in OF_JAX.items()}  # no closures: they go to other processes
OF_JAX |= {"jax_triton": jax_triton, "jax_mosaic": jax_mosaic}
OF_TORCH = {"torch_sdpa": torch_sdpa, "flash_attention_3": flash_attention_3, "flash_attention_4": flash_attention_4}
