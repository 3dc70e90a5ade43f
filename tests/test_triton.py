"""The Triton kernels against the float64 oracle, in Triton's interpreter; make triton has what they need."""

import functools
import subprocess
import sys

import numpy as np
import pytest
from attention_cases import GRID, LOGITS, AttentionCase, check_forward, check_gradients, cotangents

from helpers.dialects import triton_launch
from helpers.dialects.triton_launch import Launch

if not triton_launch.is_installed():
    pytest.skip(triton_launch.MISSING, allow_module_level=True)

kernels = triton_launch.kernels(interpret=True)

pytestmark = pytest.mark.full  # the quick tier needs no Triton
CAUSAL = {"is_causal": True}


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


@pytest.mark.parametrize(("shape_and_head_dim", "turn"), GRID[::3])
def test_shapes_and_head_dims(shape_and_head_dim, turn):
    ((T, S), H), (dtype, group, is_causal) = shape_and_head_dim, turn
    # The interpreter takes its time for every tile, whatever the size.
    launch = Launch(256, 256) if T > 500 else None
    check(AttentionCase(T, S, H, N=group, dtype=dtype, arguments={"is_causal": is_causal}), launch)


CASES = [
    *[(AttentionCase(63, 203, 64, dtype=dtype, logits=logits), None) for dtype, logits in LOGITS[::2]],
    *[(AttentionCase(63, 65, arguments=CAUSAL | {"scale": scale}), None) for scale in (0.0, -0.5)],
    (AttentionCase(70, 130, 64, N=8, K=2, B=2, dtype="bfloat16", arguments=CAUSAL), None),
    *[(AttentionCase(100, 130, arguments=CAUSAL), Launch(*blocks)) for blocks in ((16, 64), (64, 16), (32, 32))],
    (AttentionCase(130, 60, arguments=CAUSAL), Launch(16, 64)),
]


@pytest.mark.parametrize(("case", "launch"), CASES, ids=str)
def test_logits_scales_groups_and_tiles(case, launch):
    check(case, launch)


@pytest.mark.parametrize(("shape_and_head_dim", "turn"), GRID[1::5])
def test_descriptors(shape_and_head_dim, turn):
    ((T, S), H), (dtype, group, is_causal) = shape_and_head_dim, turn
    case = AttentionCase(T, S, max(H, 8), N=group, B=2, dtype=dtype, arguments={"is_causal": is_causal})
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
