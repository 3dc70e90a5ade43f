"""The CUDA kernels against the float64 oracle, on a CPU by the system's C++ compiler."""

import re
from dataclasses import replace

import attention_cases as cases
import numpy as np
import pytest
from attention_cases import AttentionCase, in_tiers

from helpers.dialects import cuda_launch
from helpers.dialects.cuda_launch import RUNGS, SOURCE, SharedMemoryError
from helpers.dialects.cuda_shown import without_barrier

if not cuda_launch.is_installed():
    pytest.skip(cuda_launch.MISSING, allow_module_level=True)


CAUSAL = {"is_causal": True}
ELEMENTS, KEYS_OUTER, ROWS, TENSOR_CORES = RUNGS


def attention(rung, source=None):
    def run(query, key, value, **arguments):
        out, lse = cuda_launch.forward(query, key, value, rung=rung, source=source, **arguments)
        return out, lse.swapaxes(1, 2)

    return run


def gradients(case, source=None):
    """(dq, dk, dv) from the residuals of the CUDA kernels themselves."""
    (query, key, value), arguments = case.inputs()
    dout, dlse = cases.cotangents(case)
    out, lse = cuda_launch.forward(query, key, value, **arguments)
    dlse = dlse.swapaxes(1, 2)
    return cuda_launch.backward(query, key, value, out, lse, dout, dlse, source=source, **arguments)


def check(case, rungs=RUNGS):
    for rung in rungs:
        if rung != TENSOR_CORES or case.dtype != "float32":
            cases.check_forward(attention(rung), case)
    cases.check_gradients(gradients, case)


@pytest.mark.full
@pytest.mark.parametrize("case", cases.GRID[::3], ids=str)
def test_shapes_and_head_dims(case):
    case = replace(case, T=min(case.T, 150), S=min(case.S, 151))  # as many tiles as matter; every thread is emulated
    # A logit for each query, key and dimension is too much where T, S and H are large.
    check(case, RUNGS if case.T * case.S * case.H**2 * case.N < 2e8 else RUNGS[1:])


CASES = [
    *[AttentionCase(37, 75, 24, dtype=dtype, arguments=CAUSAL) for dtype in ("float32", "bfloat16")],
    *cases.OF_LOGITS[::2],
    *[AttentionCase(63, 65, arguments={"scale": scale, "is_causal": True}) for scale in (0.0, -0.5)],
    *cases.OF_GROUPS[::5],
]


@pytest.mark.parametrize("case", in_tiers(CASES, lambda case: case.T == 37), ids=str)
def test_logits_scales_and_groups(case):
    check(case)


BARRIERS = list(zip(range(9), [KEYS_OUTER] * 2 + [ROWS] * 2 + [TENSOR_CORES] * 2 + ["backward"] * 3, strict=True))


def test_every_barrier_is_listed():
    assert len(re.findall(r"__syncthreads\(\);", SOURCE.read_text())) == len(BARRIERS)


@pytest.mark.parametrize(("number", "kernel"), in_tiers(BARRIERS[::2], lambda number, _: number == 4))
def test_a_missing_barrier_is_found(number, kernel):
    case = AttentionCase(130, 130, 24, dtype="bfloat16")
    source = without_barrier(number)
    arrays, arguments = case.inputs()
    with pytest.raises(SharedMemoryError, match=kernel):
        gradients(case, source) if kernel == "backward" else attention(kernel, source)(*arrays, **arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fragments_are_rounded_as_numpy_rounds(dtype):
    """One key: out is its value, which a conversion there and back must leave as it is."""
    random = np.random.default_rng(0)
    value = random.standard_normal((1, 1, 1, 64)) * 10.0 ** random.integers(-7, 4, 64)
    value[..., :3] = 0, -0.0, 65504
    arrays = [np.zeros((1, 1, 1, 64)), np.zeros((1, 1, 1, 64)), value]
    arrays = [array.astype(AttentionCase(1, 1, 64, dtype=dtype).inputs()[0][0].dtype) for array in arrays]
    for rung in RUNGS:
        assert np.array_equal(cuda_launch.forward(*arrays, rung=rung)[0], arrays[2])
