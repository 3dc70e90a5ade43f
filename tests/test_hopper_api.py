"""`implementation="hopper"`: what it serves, what it refuses, and that it works under JAX's transformations."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from attention_cases import AttentionCase

from helpers import flash_attention
from helpers.attention.hopper import serve
from helpers.attention.public import api

hopper_attention = functools.partial(flash_attention, implementation="hopper", return_residual=True)
SMALL = AttentionCase(70, 90, 64, N=4, K=2, dtype="bfloat16", arguments={"is_causal": True})


@pytest.fixture
def few_threads(monkeypatch):
    """As if JAX had started with two threads."""
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(serve, "threads_of_jax", lambda: 2)


TOO_FEW = r"16 threads.* started with 2: set the environment variable PJRT_NPROC to 16 before JAX starts.*restart"


def test_a_cpu_with_too_few_threads_is_refused(few_threads, monkeypatch):
    """Its interpreter would wait for ever. A call is refused at once, a traced one when its program is lowered."""
    arrays, _ = SMALL.inputs()
    with pytest.raises(NotImplementedError, match=TOO_FEW):
        jax.jit(jax.grad(lambda *arrays: hopper_attention(*arrays)[0].sum()))(*arrays)
    monkeypatch.setattr(api, "run", None)
    with pytest.raises(NotImplementedError, match=TOO_FEW):
        hopper_attention(*arrays)


@pytest.mark.parametrize("H", [24, 192])
def test_lowering_for_a_gpu_needs_no_threads(few_threads, H):
    """What stands for a CPU returns arrays of the same shapes, low bits too."""
    types = jax.eval_shape(lambda: tuple(map(jnp.asarray, replace(SMALL, H=H).inputs()[0])))
    traced = jax.jit(jax.grad(lambda *arrays: hopper_attention(*arrays)[0].sum())).trace(*types)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux only")
def test_the_threads_are_those_that_jax_has_started(monkeypatch):
    """And not those that the environment asks for later."""
    jax.devices("cpu")
    found = serve.why_not_here()
    for asked in ("2", "64"):
        monkeypatch.setenv("PJRT_NPROC", asked)
        assert serve.why_not_here() == found
    monkeypatch.setattr(serve, "THREADS_ASKED_FOR", 3)
    assert serve.why_not_here() == found
    monkeypatch.setattr(serve, "THREAD_NAME", "none is called so")
    assert "started with 3" in serve.why_not_here()
