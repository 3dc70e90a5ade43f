"""The Hopper forward kernel in the Mosaic GPU interpreter: right, without races, and lowered for CUDA."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_forward, relative_error
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper import forward as hopper
from helpers.attention.hopper import ladder
from helpers.attention.masking import Band
from helpers.attention.problem import Call, Problem, check_call
from helpers.attention.reference import oracle

# Interpreted warpgroups wait for each other in the threads of XLA's pool, which must not be fewer.
# The pool is made with the first use of JAX, so conftest.py or the caller sets this.
if max(os.cpu_count(), int(os.environ.get("PJRT_NPROC", 0))) < 6:
    raise RuntimeError("with fewer than six cores, set PJRT_NPROC=16 in the environment, or these tests would hang")

CAUSAL = {"is_causal": True}
SMALL = hopper.Tiles(block_k=64, programs=2)


class RaceError(AssertionError):
    pass


def interpreted(forward, **options):
    """forward as `check_forward` wants it: on the CPU, and an error where the detector saw a race."""

    def attention(query, key, value, **arguments):
        params = plgpu.InterpretGPUParams(detect_races=True)
        try:
            out, lse = forward(check_call(query, key, value, **arguments), interpret=params, **options)
            jax.block_until_ready((out, lse))
        except Exception as error:  # JAX 0.12 raises at once
            gpu_callbacks.reset_gpu_interpret_mode_state()
            if "RACE DETECTED" in str(error):
                raise RaceError from None
            raise
        if interpret_pallas_call.get_races().races_found:
            gpu_callbacks.reset_gpu_interpret_mode_state()
            raise RaceError
        return out, jnp.swapaxes(lse, 1, 2)

    return attention


LATE = (
    AttentionCase(500, 500, H=64, N=1, dtype="float16", logits="last huge", arguments=CAUSAL),
    SMALL._replace(programs=1, warpgroups=3),
)
CASES = {
    "one row, one key": (AttentionCase(1, 1, H=64, dtype="bfloat16"), None),
    "fewer keys than a TMA row": (AttentionCase(1, 7, H=64, dtype="float16"), None),
    "one key": (AttentionCase(239, 1, H=64, dtype="bfloat16"), None),
    "one key, causal": (AttentionCase(239, 1, H=64, dtype="float16", arguments=CAUSAL), None),
    "fewer keys than a tile, causal": (AttentionCase(200, 100, H=128, dtype="bfloat16", arguments=CAUSAL), None),
    "more keys than queries": (AttentionCase(63, 65, H=64, dtype="bfloat16", arguments=CAUSAL), None),
    "tails, 128": (AttentionCase(100, 130, H=128, dtype="float16"), None),
    "tails, 256, causal": (AttentionCase(113, 203, H=256, dtype="bfloat16", arguments=CAUSAL), None),
    "padded head": (AttentionCase(100, 130, H=80, dtype="bfloat16", arguments=CAUSAL), None),
    "no tails": (AttentionCase(128, 128, H=64, dtype="bfloat16", arguments=CAUSAL), None),
    "the ring goes round": (AttentionCase(300, 300, H=64, dtype="float16", arguments=CAUSAL), SMALL),
    "rows of the last tile are missing": (AttentionCase(300, 200, H=64, dtype="bfloat16"), SMALL),
    "three warpgroups": (AttentionCase(300, 400, H=64, dtype="bfloat16"), hopper.Tiles(warpgroups=3)),
    "four warpgroups": (AttentionCase(300, 300, H=64, dtype="bfloat16", arguments=CAUSAL), hopper.Tiles(block_k=64, warpgroups=4)),
    "three warpgroups, one stage, several turns": (AttentionCase(700, 300, H=64, N=2, dtype="bfloat16", arguments=CAUSAL), SMALL._replace(stages=1, warpgroups=3)),
    "grouped heads": (AttentionCase(128, 256, H=128, N=4, K=2, B=2, dtype="bfloat16"), None),
    "one program a tile": (AttentionCase(200, 200, H=64, dtype="bfloat16", arguments=CAUSAL), SMALL._replace(programs=None)),
    "large logits": (AttentionCase(130, 300, H=64, dtype="bfloat16", logits="large"), SMALL),
    "large logits, causal": (AttentionCase(130, 130, H=64, dtype="float16", logits="large", arguments=CAUSAL), SMALL),
    "low logits": (AttentionCase(130, 300, H=64, dtype="bfloat16", logits="low", arguments=CAUSAL), SMALL),
    "last huge": (AttentionCase(65, 300, H=64, dtype="float16", logits="last huge"), SMALL),
    "guesses fail at once": (AttentionCase(500, 500, H=64, dtype="float16", logits="rising", arguments=CAUSAL), SMALL._replace(programs=1)),
    "guesses fail in bfloat16": (AttentionCase(300, 400, H=64, N=4, K=2, dtype="bfloat16", logits="rising"), SMALL),
    "one guess fails, late": LATE,
    "some guesses fail, in some heads": (AttentionCase(200, 300, H=64, N=4, B=2, dtype="float16", logits="rising", arguments={"scale": 0.06}), SMALL._replace(programs=1)),
    "guesses fail without a tile ahead": (AttentionCase(300, 300, H=256, dtype="bfloat16", logits="rising", arguments=CAUSAL), hopper.Tiles(block_k=64, ahead=False)),
    "guesses fail, one program a tile": (AttentionCase(200, 300, H=128, dtype="float16", logits="large"), hopper.Tiles(programs=None)),
    "equal logits": (AttentionCase(130, 300, H=64, dtype="float16", logits="equal"), SMALL),
    "negative scale": (AttentionCase(65, 130, H=64, dtype="bfloat16", arguments={"scale": -0.2}), SMALL),
    "scale of zero": (AttentionCase(65, 130, H=64, dtype="bfloat16", arguments={"scale": 0, **CAUSAL}), SMALL),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    case, tiles = CASES[name]
    check_forward(interpreted(hopper.forward, tiles=tiles), case)


@pytest.mark.parametrize(("heads", "group", "cached_heads"), [(1, 1, 9), (13, 1, 3), (12, 1, 4), (12, 4, 1), (6, 1, 0)])
@pytest.mark.parametrize("q_tiles", [1, 2, 7])
def test_the_causal_order_has_every_pair_once(heads, group, cached_heads, q_tiles, monkeypatch):
    """And never more heads together than the cache holds, but at least those that share keys."""
    H, S = 128, 256
    problem = Problem(1, S, S, heads, heads // group, H, jnp.dtype(jnp.bfloat16), 1.0, Band(right=0))
    monkeypatch.setattr(hopper, "CACHED", cached_heads * 2 * S * H * 2)
    tiles, order = hopper.causal_order(jnp.arange(q_tiles * heads), q_tiles, problem)
    assert len({*zip(tiles.tolist(), order.tolist(), strict=True)}) == q_tiles * heads
    assert set(tiles.tolist()) == set(range(q_tiles)) and set(order.tolist()) == set(range(heads))
    width = min(heads, group * max(1, cached_heads))
    parts = [set(order[start : start + width * q_tiles].tolist()) for start in range(0, len(order), width * q_tiles)]
    assert sum(map(len, parts)) == heads
    last = tiles[-len(parts[-1]) * q_tiles :]
    assert (jnp.diff(last) <= 0).all()  # the longest tiles of the last part first


@pytest.mark.parametrize(("N", "K", "cached_heads"), [(5, 5, 2), (4, 4, 2), (6, 3, 1), (2, 2, 0)])
def test_causal_calls_take_the_heads_in_parts(N, K, cached_heads, monkeypatch):
    """Of two heads and a rest of one, of two without a rest, of the heads of one key head, and of one."""
    S, H = 200, 128
    monkeypatch.setattr(hopper, "CACHED", cached_heads * 2 * S * H * 2)
    case = AttentionCase(300, S, H=H, N=N, K=K, dtype="bfloat16", arguments=CAUSAL)
    check_forward(interpreted(hopper.forward, tiles=SMALL._replace(programs=3)), case)


@pytest.mark.parametrize("rung", ladder.NAMES)
def test_every_rung(rung):
    case = AttentionCase(256, 256, H=64, N=2, K=1, dtype="bfloat16", arguments=CAUSAL if rung % 2 else {})
    check_forward(interpreted(ladder.forward, rung=rung), case)


def test_a_rung_says_what_it_takes():
    with pytest.raises(ValueError, match=r"rung 4 takes .* T in multiples of 128"):
        ladder.forward(check_call(*AttentionCase(64, 128, H=64, dtype="bfloat16").inputs()[0]), rung=4)


# Seeded faults


@pytest.mark.parametrize("fault", ["commit_smem", "wait_smem_to_gmem"])
def test_a_dropped_step_of_the_epilogue_is_found(fault, monkeypatch):
    """As a race; JAX 0.11 also says of a store that nobody awaits that it had not ended."""

    class Faulty:
        def __getattr__(self, name):
            attribute = getattr(plgpu, name)
            if name != fault:
                return attribute
            return lambda *arguments, **named: None

    monkeypatch.setattr(hopper, "plgpu", Faulty())
    case = AttentionCase(300, 64, H=64, dtype="bfloat16")
    with pytest.raises((RaceError, jax.errors.JaxRuntimeError), match=r"^$|Not all|already at phase"):
        check_forward(interpreted(hopper.forward, tiles=SMALL._replace(programs=1)), case)


@pytest.mark.parametrize("fault", ["trusted", "not done again"])
def test_a_failed_guess_without_consequences_is_found(fault, monkeypatch):
    if fault == "trusted":
        least = lambda *numbers: float("inf") if hopper.MOST in numbers else min(*numbers)
        monkeypatch.setattr(hopper, "min", least, raising=False)
    else:
        while_loop = jax.lax.while_loop
        once = lambda condition, body, start: while_loop(lambda state: state[0] == 1, body, start)
        monkeypatch.setattr(jax.lax, "while_loop", once)
    case = AttentionCase(300, 400, H=64, dtype="float16", logits="rising", arguments={"scale": 0.06})
    with pytest.raises(AssertionError, match="relative error"):
        check_forward(interpreted(hopper.forward, tiles=SMALL), case)


@pytest.mark.parametrize(
    ("T", "S", "is_causal", "huge", "poisoned"),
    [
        (128, 200, False, {199: slice(None)}, ("query", 5)),  # the same tile of queries
        (128, 128, True, {90: slice(None)}, ("key", 120)),  # only the last rows see it
        (512, 130, False, {129: 131}, ("query", 391)),  # another turn: row 131 alone fails
    ],
)
def test_nan_does_not_hide_a_failed_guess(T, S, is_causal, huge, poisoned):
    """A row that has a NaN spoils no other."""
    case = AttentionCase(T, S, H=64, N=1, dtype="float16", seed=3)
    (query, key, value), _ = case.inputs()
    for j, row in huge.items():
        # Along a query, so that its logit is large for that query; or along all, where the sign decides.
        key[0, j] = 300 * key[0, j] if isinstance(row, slice) else 2 * query[0, row]
    which, place = poisoned
    {"query": query, "key": key}[which][0, place] = np.nan
    spoiled = np.arange(T) >= place if which == "key" else np.arange(T) == place
    clean = {"query": query.copy(), "key": key.copy()}
    clean[which][0, place] = 0
    right_out, right_lse = oracle(clean["query"], clean["key"], value, is_causal=is_causal)
    tiles = SMALL._replace(programs=1)
    out, lse = interpreted(hopper.forward, tiles=tiles)(query, key, value, is_causal=is_causal)
    for mine, right, bound in ((out, right_out, 1e-3), (lse, right_lse, 1e-5)):
        assert relative_error(np.asarray(mine)[0, ~spoiled], np.asarray(right)[0, ~spoiled]) < bound


def test_a_guess_costs_lse_little_precision():
    """And none where there is one tile of keys, whose maximum is no guess."""
    for S, bound in ((1, 1e-6), (300, 2e-6)):
        case = AttentionCase(100, S, H=64, N=1, dtype="bfloat16", arguments={"scale": 0.001})
        (query, key, value), arguments = case.inputs()
        _, lse = interpreted(hopper.forward, tiles=SMALL)(query, key, value, **arguments)
        _, right = oracle(query, key, value, **arguments)
        assert relative_error(lse, right) < bound


def test_long_float16_sequences_are_not_guessed():
    """Their sum may exceed what float16 holds without any large score."""
    problem = problem_of(128, 2**17, 64, "float16", False)
    assert hopper.untuned_tiles(problem).guess and not hopper.default_tiles(problem).guess
    assert hopper.default_tiles(problem_of(128, 2**17, 64, "bfloat16", False)).guess
    assert hopper.default_tiles(problem_of(128, 2**16, 64, "float16", False)).guess


def test_ranges_of_failed_guesses_read_too_early_are_a_race(monkeypatch):
    """Without the barrier that every warpgroup passes when it has judged its guesses."""
    wait, arrive = plgpu.barrier_wait, plgpu.barrier_arrive
    single = lambda barrier: not hasattr(barrier, "transforms")  # all others are one of several

    class Faulty:
        def __getattr__(self, name):
            return getattr(plgpu, name)

        def barrier_wait(self, barrier):
            return None if single(barrier) else wait(barrier)

        def barrier_arrive(self, barrier):
            return None if single(barrier) else arrive(barrier)

    monkeypatch.setattr(hopper, "plgpu", Faulty())
    with pytest.raises(RaceError):
        for _ in range(8):  # who comes first differs from run to run, and not every order shows
            check_forward(interpreted(hopper.forward, tiles=LATE[1]), LATE[0])


def test_the_next_scores_ordered_before_their_operands_are_there_are_a_race(monkeypatch):
    accumulate_then = hopper.accumulate_then

    def hasty(last, ready, following, meanwhile, *, interpret):
        early = hopper.product(*following, interpret=interpret)
        return (early + accumulate_then(last, ready, following, meanwhile, interpret=interpret)) / 2

    monkeypatch.setattr(hopper, "accumulate_then", hasty)
    with pytest.raises(RaceError):
        check_forward(interpreted(hopper.forward, tiles=SMALL), AttentionCase(400, 128, H=64, dtype="bfloat16"))


def test_a_slot_freed_too_early_is_a_race(monkeypatch):
    """The values are declared free before the product that reads them."""
    overlapped = hopper.overlapped

    def hasty(first, second, meanwhile, state, *, interpret):
        c, p, state = overlapped(first, second, meanwhile, state, interpret=interpret)
        c2, *_ = overlapped(first, second, lambda s, state: (s, state), state, interpret=interpret)
        return (c + c2) / 2, p, state  # reads k again, after meanwhile has freed it

    monkeypatch.setattr(hopper, "overlapped", hasty)
    with pytest.raises(RaceError):
        check_forward(interpreted(hopper.forward, tiles=SMALL), AttentionCase(64, 400, H=64, dtype="bfloat16"))


# Lowering


def problem_of(T, S, H, dtype, causal, N=2, K=1):
    return Problem(
        B=2, T=T, S=S, N=N, K=K, H=H, dtype=jnp.dtype(dtype), scale=H**-0.5, band=Band.of(causal)
    )  # fmt: skip


def lower(forward, problem, **options):
    """The text of a forward for CUDA, on a machine that has none."""
    query = jax.ShapeDtypeStruct((problem.B, problem.T, problem.N, problem.H), problem.dtype)
    key = jax.ShapeDtypeStruct((problem.B, problem.S, problem.K, problem.H), problem.dtype)

    def run(query, key, value):
        return forward(Call(problem, query, key, value, None, None), **options)

    return jax.jit(run).trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("length", [1, 100, 1024, 4096, 16384])
@pytest.mark.parametrize("H", [24, 64, 128, 256])
def test_the_defaults_lower_for_cuda(H, length):
    for causal, dtype in ((False, "bfloat16"), (True, "float16")):
        text = lower(hopper.forward, problem_of(length, length, H, dtype, causal))
        assert text.count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize("rung", ladder.NAMES)
def test_the_rungs_lower_for_cuda(rung):
    for H, causal, dtype in ((64, True, "bfloat16"), (128, False, "float16")):
        assert "@mosaic_gpu_v2" in lower(ladder.forward, problem_of(256, 256, H, dtype, causal), rung=rung)


def test_nothing_is_copied():
    text = lower(hopper.forward, problem_of(1024, 1024, 128, "bfloat16", True, N=8, K=1))
    assert "stablehlo.pad" not in text and "stablehlo.slice" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize("warpgroups", hopper.REGISTERS)
def test_the_registers_suffice(warpgroups):
    """Warpgroups that ask for more registers than their program has wait for ever, and only on the card."""
    compute, memory = hopper.REGISTERS[warpgroups]
    at_start = 65536 // (128 * (warpgroups + 1)) // 8 * 8  # of each thread
    assert warpgroups * compute + memory <= (warpgroups + 1) * at_start
    assert memory <= at_start <= compute


def test_what_it_cannot_serve():
    assert hopper.why_not(problem_of(8, 8, 64, "bfloat16", True)) is None
    assert "bfloat16 and float16 only" in hopper.why_not(problem_of(8, 8, 64, "float32", True))
    arrays = AttentionCase(8, 8, H=64, dtype="bfloat16").inputs()[0]
    call = check_call(*arrays, local_window_size=3)
    with pytest.raises(NotImplementedError, match="no local window"):
        hopper.forward(call)
