"""Memory of forward and backward together grows with T, not with T squared."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from test_lowering import lower_for_cuda

from helpers import flash_attention

B, T, N, H = 1, 4096, 2, 64
ARRAY = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)


def gradients(query, key, value, dout):
    _, pull_back = jax.vjp(lambda *a: flash_attention(*a, is_causal=True, implementation="portable"), query, key, value)
    return pull_back(dout)


def bytes_of_results(text):
    """Bytes of what the kernels of a lowered program return, by summing their array types."""
    sizes, total = {"bf16": 2, "f32": 4, "i16": 2}, 0
    for line in text.splitlines():
        if "stablehlo.custom_call @mosaic_gpu" in line:
            for shape, kind in re.findall(r"tensor<((?:\d+x)+)(\w+)>", line.rsplit("->", 1)[1]):
                total += sizes[kind] * int(np.prod([int(n) for n in shape.split("x")[:-1]]))
    return total


def test_what_the_kernels_of_the_gpu_program_return():
    """Without a GPU: out, its low bits, lse, and three gradients."""
    assert bytes_of_results(lower_for_cuda(gradients, *[ARRAY] * 4)) == B * N * T * (2 * 2 * H + 4 + 3 * 2 * H)
