"""The measuring tools, without a GPU: times of a simulated one, refusals, the tables of tiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from test_lowering import lower_for_cuda

from helpers.attention.portable import backward, forward, tiles
from helpers.attention.problem import check_call
from helpers.dev import benchmark
from helpers.dev.benchmark import Case
from helpers.instruments import implementations, ladder
from helpers.instruments.simulated import SimulatedGPU
from helpers.instruments.timing import Timed, Timing, time_together

SMALL = Case(1, 128, 128, 2, 2, 64, "bfloat16", True)


@pytest.fixture(autouse=True)
def few_inputs(monkeypatch):
    """A case as small as ours would need a thousand sets of inputs to fill a cache."""
    monkeypatch.setattr(benchmark, "rotation", lambda _: 2)


@pytest.mark.parametrize("slower", [1.0, 1.03])
def test_the_benchmark_finds_the_truth_on_the_worst_gpu(slower):
    vices = dict(compile_s=1.5, launch_s=2e-5, wait_s=3e-4, cached=0.4, disturbed={8: range(40, 64)}, warming=0.15)
    gpu = SimulatedGPU(2e-3, **vices)
    programs = {
        name: Timed(functools.partial(gpu.run, program=name, slower=factor), list("abcd"), gpu.wait)
        for name, factor in (("plain", 1.0), ("other", slower))
    }
    found = time_together(programs, clock=gpu.clock, device_samples=lambda program: [])
    assert found["other"].wall_ms / found["plain"].wall_ms == pytest.approx(slower, rel=0.01)


def wrong_gradient(case):
    """Right forward; dv alone is wrong."""
    attention = implementations.ours("reference", case)
    doubled = lambda value: 1.05 * value - 0.05 * jax.lax.stop_gradient(value)
    return lambda query, key, value: attention(query, key, doubled(value)).astype(query.dtype)


def test_a_wrong_kernel_is_reported_and_never_timed():
    timed, notes, timing = [], [], Timing(wall_ms=2.0, spread=0.01, device_ms=1.0)
    time_programs = lambda programs: timed.append(list(programs)) or dict.fromkeys(programs, timing)
    made = {
        "right": functools.partial(implementations.ours, "reference"),
        "wrong": lambda case: lambda query, *_: 0 * query,
        "wrong_dv": wrong_gradient,
    }
    records = benchmark.measure_case(SMALL, made, note=notes.append, time_programs=time_programs)
    assert timed == [["right", "wrong_dv"], ["right"]]
    recorded = {(record["implementation"], record["pass"]) for record in records}
    assert recorded == {("right", "forward"), ("wrong_dv", "forward"), ("right", "backward")}
    assert any("forward: wrong: wrong: out has a relative error" in note for note in notes)
    assert any("backward: wrong_dv: wrong: dv has a relative error" in note for note in notes)


KERNELS = [(*kernel, H) for kernel, by_head in tiles.DEFAULTS.items() for H in by_head]


@pytest.mark.parametrize(("kernel", "itemsize", "H"), KERNELS)
def test_the_plain_kernels_lower_for_triton(kernel, itemsize, H):
    shape = jax.ShapeDtypeStruct((1, 500, 2, H), {2: jnp.bfloat16, 4: jnp.float32}[itemsize])
    call = lambda q: check_call(q, q, q, is_causal=True)
    if kernel == "forward":
        text = lower_for_cuda(lambda q: forward.forward(call(q)), shape)
    else:
        rows = jax.ShapeDtypeStruct((1, 2, 500), jnp.float32)
        gradients = lambda q, lse: backward.backward(call(q), q, lse, q, lse, fused=kernel == "dkv")
        text = lower_for_cuda(gradients, shape, rows)
    assert "__gpu$xla.gpu.triton" in text


@pytest.mark.parametrize("rung", ladder.RUNGS, ids=lambda rung: rung.name)
def test_every_rung_of_the_ladder_is_right(rung):
    is_causal = rung.name in ("hidden tiles skipped", "masks on the diagonal only")
    case = dataclasses.replace(SMALL, T=256, S=256, is_causal=is_causal)
    arrays = benchmark.inputs_of(case)
    out = ladder.attention(*arrays[:3], rung=rung, is_causal=is_causal, interpret=True)
    assert benchmark.complaint(case, "forward", [out], benchmark.right_answer(case, arrays)) is None
