"""The Hopper forward kernel in the Mosaic GPU interpreter: right, without races, and lowered for CUDA."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_forward, in_tiers, relative_error

from helpers.attention.hopper import forward as hopper
from helpers.attention.hopper import ladder, tile_scheduler
from helpers.attention.hopper.tile_scheduler import Assignment
from helpers.attention.hopper.warpgroup import REGISTERS
from helpers.attention.masking import Band
from helpers.attention.problem import Call, Problem, check_call
from helpers.attention.reference import oracle
from helpers.dev.measuring import shapes_of
from helpers.instruments.races import DETECTING, races

# Interpreted warpgroups wait for each other in the threads of XLA's pool, which must not be fewer.
# The pool is made with the first use of JAX, so conftest.py or the caller sets this.
if max(os.cpu_count(), int(os.environ.get("PJRT_NPROC", 0))) < 6:
    raise RuntimeError("with fewer than six cores, set PJRT_NPROC=16 in the environment, or these tests would hang")

FULL = pytest.mark.full
CAUSAL = {"is_causal": True}
SMALL = hopper.Tiles(block_k=64, programs=2)


def interpreted(forward, **options):
    """forward as `check_forward` wants it: on the CPU, with an AssertionError of what the race detector finds."""

    def attention(query, key, value, **arguments):
        found = []
        run = functools.partial(forward, check_call(query, key, value, **arguments), interpret=DETECTING, **options)
        assert races(lambda: found.extend(jax.block_until_ready(run()))) == []
        out, lse = found
        return out, jnp.swapaxes(lse, 1, 2)

    return attention


FORWARD = {
    "small: 256, causal": (AttentionCase(113, 130, H=256, N=1, dtype="bfloat16", arguments=CAUSAL), None),
    "small: three warpgroups, one stage, several turns": (AttentionCase(200, 150, H=64, N=3, dtype="bfloat16", arguments=CAUSAL), SMALL._replace(stages=1, warpgroups=3)),
    "small: several turns, rows of the last tile are missing": (AttentionCase(200, 130, H=64, N=4, K=2, B=2, dtype="float16"), SMALL._replace(programs=3)),
    "small: dynamic, turns are done again, and rows of the last tile are missing": (AttentionCase(310, 384, H=64, N=1, dtype="bfloat16", logits="rising", arguments=CAUSAL), SMALL._replace(dynamic=True)),
    "small: guesses fail under a mask": (AttentionCase(130, 150, H=64, N=1, dtype="bfloat16", logits="rising", arguments=CAUSAL), SMALL._replace(programs=1)),
    "small: a padded head": (AttentionCase(100, 130, H=80, dtype="bfloat16", arguments=CAUSAL), None),
    "small: some guesses fail, in some heads": (AttentionCase(130, 150, H=64, N=3, dtype="float16", logits="rising", arguments={"scale": 0.06}), SMALL._replace(programs=1)),
    "tails, 128": (AttentionCase(100, 130, H=128, dtype="float16"), None),
    "the ring goes round": (AttentionCase(300, 300, H=64, dtype="float16", arguments=CAUSAL), SMALL),
    "four warpgroups": (AttentionCase(300, 300, H=64, dtype="bfloat16", arguments=CAUSAL), hopper.Tiles(block_k=64, warpgroups=4)),
    "last huge": (AttentionCase(65, 300, H=64, dtype="float16", logits="last huge"), SMALL),
    "one guess fails, late": (AttentionCase(500, 500, H=64, N=1, dtype="float16", logits="last huge", arguments=CAUSAL), SMALL._replace(programs=1, warpgroups=3)),
    "guesses fail without a tile ahead": (AttentionCase(300, 300, H=256, dtype="bfloat16", logits="rising", arguments=CAUSAL), hopper.Tiles(block_k=64, ahead=False)),
    "dynamic, turns of one key tile": (AttentionCase(64, 64, H=64, N=9, dtype="bfloat16", arguments=CAUSAL), SMALL._replace(dynamic=True)),
    "dynamic, without a tile ahead": (AttentionCase(113, 130, H=256, N=3, dtype="bfloat16", arguments=CAUSAL), hopper.Tiles(block_k=64, ahead=False, programs=2, dynamic=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", in_tiers(FORWARD, lambda name: name in [*FORWARD][:5]))
def test_forward(name):
    case, tiles = FORWARD[name]
    check_forward(interpreted(hopper.forward, tiles=tiles), case)


@pytest.mark.parametrize("scale", [-0.3, 0.0, -1e-39])
def test_a_scale_becomes_positive(scale):
    """With the same logits, and never so small that float32 has but subnormal numbers for it."""
    query = jnp.arange(6.0).reshape(1, 1, 1, 6)
    call = check_call(query.astype(jnp.bfloat16), *[jnp.ones((1, 1, 1, 6), jnp.bfloat16)] * 2, scale=scale)
    mine, problem = hopper._with_positive_scale(call.query, call.problem)
    assert problem.scale > 1e-37
    np.testing.assert_allclose(problem.scale * mine.astype(jnp.float32), scale * query, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(
    ("heads", "group", "cached_heads", "q_tiles"),
    [(1, 1, 9, 7), (13, 1, 3, 7), (13, 1, 3, 1), (12, 1, 4, 2), (12, 4, 1, 7), (6, 1, 0, 2)],
)
def test_the_causal_order_has_every_pair_once(heads, group, cached_heads, q_tiles, monkeypatch):
    problem = Problem(1, 256, 256, heads, heads // group, 128, jnp.dtype(jnp.bfloat16), 1.0, Band(right=0))
    monkeypatch.setattr(tile_scheduler, "L2_BUDGET", cached_heads * 2 * 256 * 128 * 2)
    tiles, order = tile_scheduler.causal_order(jnp.arange(q_tiles * heads), q_tiles, problem)
    assert len({*zip(tiles.tolist(), order.tolist(), strict=True)}) == q_tiles * heads
    assert set(tiles.tolist()) == set(range(q_tiles)) and set(order.tolist()) == set(range(heads))


ASSIGNMENTS = [Assignment(backward, shift) for backward in (None, 0, 1) for shift in (0, 1, 8)]


@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
@pytest.mark.parametrize(("count", "programs"), [(2048, 132), (100, 8), (21, 5), (3, 3), (1, 1)])
def test_every_tile_is_assigned_once(assignment, count, programs):
    """To the programs that the kernel expects it from: those before the end of the last round."""
    turns, mine = np.arange(-(-count // programs))[:, None], np.arange(programs)
    places = tile_scheduler.assigned(turns, mine, programs, count, assignment, np)
    np.testing.assert_array_equal(places, np.asarray(tile_scheduler.assigned(turns, mine, programs, count, assignment)))
    has_turn = turns * programs + mine < count
    np.testing.assert_array_equal(np.sort(places[has_turn]), np.arange(count))


@pytest.mark.parametrize(("H", "options"), [(128, {}), (256, {"block_k": 64, "ahead": False, "guess": False})], ids=str)
def test_out_and_low_bits_have_left_before_the_next_queries_come(H, options):
    """Where constants beside the values leave them no place of their own."""
    arrays = (jnp.ones((1, length, 3, H), jnp.bfloat16) for length in (256, 128, 128))
    tiles = hopper.Tiles(programs=1, stages=2, warpgroups=2, **options)
    run = functools.partial(hopper.forward, check_call(*arrays), tiles=tiles, keeps_low_bits=True, interpret=DETECTING)
    assert races(run) == []


@pytest.mark.parametrize("rung", [5, 6, *(pytest.param(rung, marks=FULL) for rung in ladder.NAMES if rung < 5)])
def test_every_rung(rung):
    """With more tiles of keys than the ring has slots, also under a mask. The last is the kernel of all other tests."""
    case = AttentionCase(384, 384, H=64, N=2, K=1, dtype="bfloat16", arguments=CAUSAL if rung % 2 else {})
    check_forward(interpreted(ladder.forward, rung=rung), case)


# Guesses


@pytest.mark.parametrize(
    ("T", "S", "is_causal", "huge", "poisoned"),
    [
        pytest.param(128, 200, False, {199: slice(None)}, ("query", 5), marks=FULL),  # the same tile of queries
        pytest.param(128, 128, True, {90: slice(None)}, ("key", 120), marks=FULL),  # only the last rows see it
        # Later turns: rows 131 and 579 fail, of either warpgroup. After row 387 each third and last turn is judged.
        (768, 66, False, {64: 131, 65: 579}, ("query", 387)),
    ],
)
def test_nan_does_not_hide_a_failed_guess(T, S, is_causal, huge, poisoned):
    """A row that has a NaN spoils no other."""
    case = AttentionCase(T, S, H=64, N=1, dtype="float16", seed=4)  # with no other row that fails
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


def test_a_guess_costs_lse_no_precision():
    """Its headroom of 40 powers of two is taken away before anything is added: 6e-8, and 2.4e-7 otherwise."""
    case = AttentionCase(64, 65, H=64, N=1, dtype="bfloat16", arguments={"scale": 0.001})
    (query, key, value), arguments = case.inputs()
    _, lse = interpreted(hopper.forward, tiles=SMALL)(query, key, value, **arguments)
    _, right = oracle(query, key, value, **arguments)
    assert relative_error(lse, right) < 1.2e-7


def test_long_float16_sequences_are_not_guessed():
    """Their sum may exceed what float16 holds without any large score."""
    problem = problem_of(128, 2**17, 64, "float16", False)
    assert hopper.tiles_of_many_turns(problem).guess and not hopper.default_tiles(problem).guess
    assert hopper.default_tiles(problem_of(128, 2**17, 64, "bfloat16", False)).guess
    assert hopper.default_tiles(problem_of(128, 2**16, 64, "float16", False)).guess


# Lowering


def problem_of(T, S, H, dtype, causal, N=2, K=1):
    return Problem(2, T, S, N, K, H, jnp.dtype(dtype), H**-0.5, Band.of(causal))


def lower(forward, problem, **options):
    """The text of a forward for CUDA, on a machine that has none."""
    run = lambda *arrays: forward(Call(problem, *arrays, None, None), **options)
    return jax.jit(run).trace(*shapes_of(problem, "forward")).lower(lowering_platforms=("cuda",)).as_text()


LOWERED = [(24, 100, True, "float16"), (128, 4096, False, "bfloat16"), (256, 1024, True, "bfloat16")]
LOWERED += [(64, length, causal, "bfloat16") for length in (1, 16384) for causal in (False, True)]


@pytest.mark.parametrize(("H", "length", "causal", "dtype"), in_tiers(LOWERED, lambda H, *_: H != 64))
def test_the_defaults_lower_for_cuda(H, length, causal, dtype):
    text = lower(hopper.forward, problem_of(length, length, H, dtype, causal))
    assert text.count("@mosaic_gpu_v2") == 1
    copies = [word for word in ("pad", "slice", "transpose") if f"stablehlo.{word}" in text]
    assert length < 1000 or not copies


def test_a_dynamic_scheduler_lowers_for_cuda():
    tiles = hopper.Tiles(dynamic=True)
    assert lower(hopper.forward, problem_of(256, 256, 128, "bfloat16", True), tiles=tiles).count("@mosaic_gpu_v2") == 1


@FULL
@pytest.mark.parametrize("rung", ladder.NAMES)
def test_the_rungs_lower_for_cuda(rung):
    assert "@mosaic_gpu_v2" in lower(ladder.forward, problem_of(256, 256, 128, "bfloat16", rung % 2), rung=rung)


@pytest.mark.parametrize("warpgroups", REGISTERS)
def test_the_registers_suffice(warpgroups):
    """Warpgroups that ask for more registers than their program has wait for ever, and only on the GPU."""
    compute, memory = REGISTERS[warpgroups]
    at_start = 65536 // (128 * (warpgroups + 1)) // 8 * 8  # of each thread
    assert warpgroups * compute + memory <= (warpgroups + 1) * at_start
    assert memory <= at_start <= compute
