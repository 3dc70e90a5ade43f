"""The measuring tools, without a GPU: statistics on a fake clock, refusals, the tables of tiles."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from attention_cases import in_tiers
from test_lowering import lower_for_cuda

from helpers.attention.portable import backward, forward, tiles
from helpers.attention.problem import check_call
from helpers.dev import benchmark
from helpers.dev.benchmark import Case
from helpers.instruments import implementations, ladder, timing
from helpers.instruments.simulated import SimulatedGPU
from helpers.instruments.timing import Program, Timing

SMALL = Case(1, 128, 128, 2, 2, 64, "bfloat16", True)


@pytest.fixture(autouse=True)
def few_inputs(monkeypatch):
    """A case as small as ours would need a thousand sets of inputs to fill a cache."""
    monkeypatch.setattr(benchmark, "rotation", lambda _: 2)


def timed(gpu, *names, inputs=((),), device_samples=lambda program: [], **options):
    """What `time_together` finds of programs of a simulated GPU, and the calls that it made: [(name, inputs)]."""
    calls = []

    def program(name):
        run = lambda *inputs: calls.append((name, inputs)) or gpu.run()
        return Program(run, list(inputs), gpu.wait)

    programs = {name: program(name) for name in names}
    return timing.time_together(programs, clock=gpu.clock, device_samples=device_samples, **options), calls


def test_a_time_is_the_device_s_not_that_of_queueing_and_a_sample_lasts_long_enough():
    measured, _ = timed(SimulatedGPU(2e-3), "a")
    assert measured["a"].wall_ms == pytest.approx(2.0)
    assert measured["a"].spread == pytest.approx(0.0, abs=1e-9)
    assert measured["a"].device_ms is None
    _, calls = timed(SimulatedGPU(1e-5), "a", rounds=2, sample_ms=1.0)
    assert len(calls) == 1 + 3 + 2 * 100  # the warm-up, a first estimate, and two samples of a millisecond


def test_programs_take_turns_and_inputs_rotate():
    _, calls = timed(SimulatedGPU(1.0), "a", "b", rounds=4)
    assert [name for name, _ in calls[-8:]] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    _, calls = timed(SimulatedGPU(1e-4), "c", inputs=[(0,), (1,)], rounds=1)
    assert {inputs for _, inputs in calls} == {(0,), (1,)}
    assert timing.rotation(10 * timing.L2_BYTES) == 1
    assert timing.rotation(timing.L2_BYTES // 4) * (timing.L2_BYTES // 4) >= 3 * timing.L2_BYTES


def test_the_time_of_the_device_is_the_median_of_its_turns_and_a_turn_the_mean_of_its_calls():
    samples = iter([[0.0, 2.0], [2.0, 2.0], [3.0, 15.0]])
    measured, _ = timed(SimulatedGPU(1.0), "a", rounds=3, device_samples=lambda program: next(samples))
    assert measured["a"].device_samples == (1.0, 2.0, 9.0) and measured["a"].device_ms == 2.0
    found = timing.summary([1.0, 2.0, 3.0, 4.0, 100.0], [7.0, 5.0, 6.0])
    samples = (7.0, 5.0, 6.0)  # in their order, for that of another program has their partners
    assert found == Timing(wall_ms=3000.0, spread=2 / 3, device_ms=6.0, device_samples=samples)


def fixed_times(programs):
    return {name: Timing(wall_ms=2.0, spread=0.01, device_ms=1.0) for name in programs}


def slightly_wrong(case):
    attention = implementations.ours("reference")(case)
    return lambda *arrays: 1.05 * attention(*arrays)


def wrong_gradient(case):
    """Right forward; dv alone is wrong."""
    attention = implementations.ours("reference")(case)
    doubled = lambda value: 1.05 * value - 0.05 * jax.lax.stop_gradient(value)
    return lambda query, key, value: attention(query, key, doubled(value)).astype(query.dtype)


def test_a_wrong_kernel_is_reported_and_never_timed():
    timed, notes = [], []
    time_programs = lambda programs: timed.append(list(programs)) or fixed_times(programs)
    made = {"right": implementations.ours("reference"), "wrong": slightly_wrong, "wrong_dv": wrong_gradient}
    records = benchmark.measure_case(SMALL, made, note=notes.append, time_programs=time_programs)
    assert timed == [["right", "wrong_dv"], ["right"]]
    assert {(r["implementation"], r["pass"]) for r in records} == {
        ("right", "forward"),
        ("wrong_dv", "forward"),
        ("right", "backward"),
    }
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


def about_masks_where_causal(rung, is_causal):
    return is_causal == (rung.name in ("hidden tiles skipped", "masks on the diagonal only"))


@pytest.mark.parametrize(
    ("rung", "is_causal"),
    in_tiers(itertools.product(ladder.RUNGS, [False, True]), about_masks_where_causal),
    ids=lambda part: getattr(part, "name", str(part)),
)
def test_every_rung_of_the_ladder_is_right(rung, is_causal):
    case = dataclasses.replace(SMALL, T=256, S=256, is_causal=is_causal)
    arrays = benchmark.inputs_of(case)
    out = ladder.attention(*arrays[:3], rung=rung, is_causal=is_causal, interpret=True)
    assert benchmark.complaint(case, "forward", [out], benchmark.right_answer(case, arrays)) is None
