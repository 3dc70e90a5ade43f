"""The Triton kernels against the float64 oracle, in Triton's interpreter; make triton has what they need."""

import functools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from attention_cases import GRID, OF_LOGITS, AttentionCase, check_forward, check_gradients, cotangents

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
    check_gradients(functools.partial(gradients, launch=launch), case)


def launch_of(case):
    """The interpreter takes its time for every tile, whatever the size."""
    return Launch(256, 256) if case.T > 500 else None


@pytest.mark.parametrize("case", GRID[::3], ids=str)
def test_shapes_and_head_dims(case):
    check(case, launch_of(case))


CASES = [
    *[(case, None) for case in OF_LOGITS[::2]],
    *[(AttentionCase(63, 65, arguments=CAUSAL | {"scale": scale}), None) for scale in (0.0, -0.5)],
    (AttentionCase(70, 130, 64, N=8, K=2, B=2, dtype="bfloat16", arguments=CAUSAL), None),
    *[(AttentionCase(100, 130, arguments=CAUSAL), Launch(*blocks)) for blocks in ((16, 64), (64, 16), (32, 32))],
    (AttentionCase(130, 60, arguments=CAUSAL), Launch(16, 64)),
]


@pytest.mark.parametrize(("case", "launch"), CASES, ids=str)
def test_logits_scales_groups_and_tiles(case, launch):
    check(case, launch)


@pytest.mark.parametrize("case", GRID[1::5], ids=str)
def test_descriptors(case):
    case, kernel = replace(case, H=max(case.H, 8), B=2), "forward_by_descriptors"
    check_forward(functools.partial(attention, launch=launch_of(case), kernel=kernel), case)


def test_arrays_with_gaps_are_refused():
    gaps = np.zeros((1, 8, 4, 16), np.float32)[:, :, ::2]
    with pytest.raises(ValueError, match="without gaps"):
        triton_launch.forward(gaps, gaps, gaps)


def test_kernels_compile_for_a_gpu_without_one():
    command = [sys.executable, "-m", "helpers.dialects.triton_compile"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "All compile" in said.stdout
