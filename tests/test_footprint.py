"""Memory of forward and backward together grows with T, not with T squared."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from test_lowering import lower_for_cuda

from helpers import flash_attention

LENGTHS = (1024, 4096)
B, N, H = 1, 2, 64


def gradients(query, key, value, dout):
    _, pull_back = jax.vjp(lambda *a: flash_attention(*a, is_causal=True, implementation="portable"), query, key, value)
    return pull_back(dout)


def shapes(T):
    return [jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)] * 4


def bytes_of_results(text):
    """Bytes of what the operations of a lowered program return, by summing their array types.

    A result that takes the place of an argument needs none.
    """
    sizes = {"bf16": 2, "f32": 4}
    total = 0
    for line in text.splitlines():
        if re.search(r"= (\"?stablehlo\.custom_call|stablehlo\.broadcast_in_dim)", line):
            in_place = {int(number) for number in re.findall(r"output_tuple_indices = \[(\d+)\]", line)}
            results = re.findall(r"tensor<((?:\d+x)+)(\w+)>", line.rsplit("->", 1)[1])
            for shape, kind in (result for number, result in enumerate(results) if number not in in_place):
                total += sizes[kind] * int(np.prod([int(n) for n in shape.split("x")[:-1]]))
    return total


def test_arrays_of_the_gpu_program_are_linear_in_the_length():
    """Without a GPU: what the kernels return, less the three gradients, is out in the dtype of query and three statistics.

    And less the mended delta, which takes the place of the first.
    """
    for T in LENGTHS:
        intermediate = bytes_of_results(lower_for_cuda(gradients, *shapes(T))) - 3 * 2 * B * T * N * H
        assert intermediate == B * N * T * (H * 2 + 3 * 4)
