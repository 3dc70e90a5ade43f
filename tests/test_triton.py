"""The Triton kernels against the float64 oracle, in Triton's interpreter; make triton has what they need."""

import functools
import itertools
import subprocess
import sys

import numpy as np
import pytest
from attention_cases import GRID, LOGITS, SHAPES, TURNS, AttentionCase, check_forward, check_gradients, cotangents

from helpers.dialects import triton_launch
from helpers.dialects.triton_launch import Launch

if not triton_launch.is_installed():
    pytest.skip(triton_launch.MISSING, allow_module_level=True)

kernels = triton_launch.kernels(interpret=True)

pytestmark = pytest.mark.full  # the quick tier needs no Triton
CAUSAL, FULL = {"is_causal": True}, {"is_causal": False}


def attention(query, key, value, **arguments):
    out, lse = triton_launch.forward(query, key, value, **arguments)
    return out, lse.swapaxes(1, 2)


def gradients(case, launch):
    """(dq, dk, dv) from the residuals of the Triton kernels themselves."""
    (query, key, value), arguments = case.inputs()
    dout, dlse = cotangents(case)
    out, lse = triton_launch.forward(query, key, value, launch=launch, **arguments)
    dlse = np.ascontiguousarray(dlse.swapaxes(1, 2))
    launches = {"dkv_launch": launch, "dq_launch": launch}
    return triton_launch.backward(query, key, value, out, lse, dout, dlse, **launches, **arguments)


def check(case, launch=None):
    """The kernels with their own tiles, or with these."""
    check_forward(functools.partial(attention, launch=launch), case)
    check_gradients(functools.partial(gradients, launch=launch), case, mends_delta=False)


@pytest.mark.parametrize(("shape_and_head_dim", "turn"), GRID)
def test_shapes_and_head_dims(shape_and_head_dim, turn):
    ((T, S), H), (dtype, group, is_causal) = shape_and_head_dim, turn
    # The interpreter takes its time for every tile, whatever the size.
    launch = Launch(256, 256) if T > 500 else None
    check(AttentionCase(T, S, H, N=group, dtype=dtype, arguments={"is_causal": is_causal}), launch)


CASES = [
    *[AttentionCase(63, 203, 64, dtype=dtype, logits=logits) for dtype, logits in LOGITS],
    *[AttentionCase(63, 65, arguments={"scale": scale, "is_causal": True}) for scale in (0.0, -0.5, 1.0)],
    *[
        AttentionCase(70, 130, 64, N=2 * group, K=2, B=2, dtype=dtype, arguments={"is_causal": is_causal})
        for dtype, group, is_causal in TURNS[::5]  # all of them meet in the shapes above
    ],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_scales_and_groups(case):
    check(case)


BLOCKS = [(16, 64), (64, 16), (32, 32)]


@pytest.mark.parametrize(("block_q", "block_k"), BLOCKS)
@pytest.mark.parametrize(("T", "S"), [(100, 130), (130, 60)])
def test_tiles_of_any_size(T, S, block_q, block_k):
    check(AttentionCase(T, S, arguments=CAUSAL), Launch(block_q, block_k))


@pytest.mark.parametrize(
    ("shape", "H", "turn"), list(zip(SHAPES, itertools.cycle([24, 64, 80, 128, 256, 8]), TURNS[1:])), ids=str
)
def test_descriptors(shape, H, turn):
    (T, S), (dtype, group, is_causal) = shape, turn
    case = AttentionCase(T, S, H, N=group, B=2, dtype=dtype, arguments={"is_causal": is_causal})
    launch = Launch(256, 256) if T > 500 else None
    check_forward(functools.partial(attention, launch=launch, kernel="forward_by_descriptors"), case)


def test_arrays_with_gaps_are_refused():
    gaps = np.zeros((1, 8, 4, 16), np.float32)[:, :, ::2]
    with pytest.raises(ValueError, match="without gaps"):
        triton_launch.forward(gaps, gaps, gaps)


def test_kernels_compile_for_a_gpu_without_one():
    said = subprocess.run(
        [sys.executable, "-m", "helpers.dialects.triton_compile"], capture_output=True, text=True, check=True
    )
    assert "All compile" in said.stdout
