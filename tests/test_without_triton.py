"""JAX as it will be without its lowering of Pallas by Triton: all modules load, and all calls but triton's run."""

import subprocess
import sys

import pytest

WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["jax.experimental.pallas.triton"] = None
from jax.experimental import pallas
vars(pallas).pop("triton", None)

import helpers
for module in pkgutil.walk_packages(helpers.__path__, "helpers."):
    if module.name.split(".")[1] in ("attention", "exercises", "instruments", "dev"):
        importlib.import_module(module.name)

import jax, numpy as np
from helpers import flash_attention, paged_attention
from helpers.environment import backend

assert backend() == {"interpret": True}
x = np.ones((1, 20, 1, 16), "bfloat16")
for name in (None, "reference", "portable"):
    attend = jax.jit(jax.grad(lambda x: flash_attention(x, x, x, implementation=name).astype("float32").sum()))
    assert np.isfinite(np.float32(attend(x))).all()
    traced = attend.trace(x)
    assert "triton" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    pages = np.ones((2, 16, 1, 16), "bfloat16")
    table, lengths = np.array([[0, 1]], np.int32), np.array([20], np.int32)
    assert paged_attention(x[:, :2], pages, pages, table, lengths, implementation=name).shape == (1, 2, 1, 16)
from helpers.attention import registry
assert "by Triton" in registry.TABLE["triton"].limits(None, False)
"""


@pytest.mark.full
def test_without_the_triton_lowering():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)
