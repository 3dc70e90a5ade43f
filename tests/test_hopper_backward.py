"""The Hopper backward kernels in the Mosaic GPU interpreter: against the oracle, with races looked for."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, by_kernels, check_gradients, cotangents, in_tiers, relative_error
from jax.experimental.pallas import mosaic_gpu as plgpu
from seeded import seeded

from helpers.attention.extras import Extras
from helpers.attention.hopper import backward as hopper
from helpers.attention.hopper import backward_fused, backward_split
from helpers.attention.hopper import backward_schedule as schedule
from helpers.attention.low_bits import low_bits
from helpers.attention.masking import Band
from helpers.attention.problem import Call, Problem, check_call
from helpers.attention.public import registry
from helpers.attention.reference import naive_attention, oracle_gradients
from helpers.dev.measuring import shapes_of
from helpers.instruments.races import DETECTING, in_use_until_awaited, races

FULL = pytest.mark.full
CAUSAL = {"is_causal": True}
# Of one stage, so that every ring goes round with the second tile.
SMALL = {
    "split": (schedule.Tiles(64, 128, 1), schedule.Tiles(128, 64, 1)),
    "fused": (schedule.Tiles(64, 128, 1), None),
    "fused, dq delayed": (schedule.Tiles(64, 128, 1, delayed=True), None),
}


def backward_of(case, tiles, **options):
    """A function that runs the interpreted kernels with these tiles, from naive out and lse: (dq, dk, dv)."""
    arrays, arguments = case.inputs()

    def backward(call, out, lse, dout, dlse):
        is_blind = lse == -jnp.inf  # and what arrives there may be anything
        dout = jnp.where(is_blind.swapaxes(1, 2)[..., None], jnp.nan, dout)
        dlse = jnp.where(is_blind, jnp.nan, dlse)
        return hopper.backward(call, out, lse, dout, dlse, tiles=tiles, interpret=DETECTING, **options)

    run = by_kernels(arguments, naive_attention, backward)
    return lambda: jax.block_until_ready(run(arrays, cotangents(case))[1])


def gradients_of_kernels(case, tiles, **options):
    """(dq, dk, dv) of kernels that must not race."""
    found = []
    assert races(lambda: found.extend(backward_of(case, tiles, **options)())) == []
    return found


def check(case, tiles, **options):
    check_gradients(functools.partial(gradients_of_kernels, tiles=tiles, **options), case)


CASES = [
    (AttentionCase(150, 70, 80, K=2, dtype="bfloat16", arguments=CAUSAL), SMALL["split"]),
    (AttentionCase(130, 203, 64, dtype="float16", arguments={"scale": -0.3}), SMALL["fused"]),
    (AttentionCase(200, 130, 64, dtype="bfloat16", arguments=CAUSAL), SMALL["fused, dq delayed"]),
    (AttentionCase(1, 7, 24, N=1, dtype="bfloat16"), SMALL["fused"]),
    (AttentionCase(70, 100, 256, N=1, dtype="bfloat16"), schedule.forms(256)["split"]),
    (AttentionCase(140, 130, 64, N=1, B=2, dtype="float16", arguments=CAUSAL), schedule.forms(64)["fused"]),
    (AttentionCase(140, 70, 100, K=1, dtype="bfloat16", arguments=CAUSAL), schedule.forms(128)["fused"]),
]


@pytest.mark.parametrize(("case", "tiles"), in_tiers(CASES, lambda *case: case in CASES[:3]), ids=str)
def test_gradients(case, tiles):
    """Of a size that sends every ring round, with tiles that the mask cuts, grouped heads and a padded head_dim."""
    check(case, tiles)


@pytest.mark.parametrize("form", ["fused", pytest.param("split", marks=FULL)])
@pytest.mark.parametrize(
    ("T", "logits", "arguments"),
    [(110, "low", CAUSAL), pytest.param(63, "large", {}, marks=FULL)],
    ids=["low, the last queries would see keys past the end", "large"],
)
def test_size_of_logits(T, logits, arguments, form):
    """Far from 0 as well. delta is made from a rounded out, for these calls keep no low bits of it,
    and low logits of one sign show that rounding: four times the error of naive attention and more."""
    case = AttentionCase(T, 100, 64, N=1, dtype="bfloat16", logits=logits, arguments=arguments)
    arrays, arguments = case.inputs()
    right = oracle_gradients(*arrays, *cotangents(case), **arguments)
    for mine, correct in zip(gradients_of_kernels(case, SMALL[form]), right, strict=True):
        assert relative_error(mine, correct) < 2 * float(jnp.finfo(jnp.bfloat16).eps)


# Seeded faults


@contextlib.contextmanager
def faulty(module, *changes):
    """A context in which kernels with changes in the source of their module are launched."""
    copy = vars(seeded(module, *changes))
    with mock.patch.multiple(hopper, **{name: copy[name] for name in KERNELS if name in copy}):
        yield


KERNELS = "immediate_kernel", "delayed_kernel", "dkv_kernel", "dq_kernel"
READ = "values = [operand if isinstance(operand, jax.Array) else operand[...] for operand in operands]"
IN_USE = {  # what another warpgroup or TMA writes over operands in use: (tiles, module, changes, what writes)
    "keys, before all are done with them": (
        SMALL["fused, dq delayed"],
        backward_fused,
        [("barrier_arrive(scratch.ds_ready)  # the other", "is_done = True  # the other"), ("barrier_wait(scratch.ds_ready)\n        store", "is_done = True\n        store")],
        "k_mine[...] = (program.problem.scale * dk).astype(program.problem.dtype)",
    ),
    "queries, given back with do, before dk is awaited": (
        SMALL["split"],
        backward_split,
        [("plgpu.wgmma_wait(0)\n    scratch.q.release(step)", "scratch.q.release(step)\n    plgpu.wgmma_wait(0)")],
        "plgpu.copy_gmem_to_smem(columns, part, self.filled.at[slot])",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", IN_USE)
def test_operands_written_over_are_found(fault):
    """In each of 40 runs of each fault, and nothing in 40 runs of each right kernel."""
    tiles, module, changes, write = IN_USE[fault]
    case = AttentionCase(192, 128, 64, N=1, dtype="bfloat16")
    with faulty(module, *changes):
        read, found = sorted(races(backward_of(case, tiles)))
    assert read in ("read: issue(acc, a, b)", f"read: {READ}") and found == f"write: {write}"


def test_accumulators_read_too_early_are_found():
    """While the kernel is traced, for a GPU."""
    early = faulty(backward_split, ("awaited(dp, 0)", "awaited(dp, 1)"))
    with early, pytest.raises(RuntimeError, match="read before its products are awaited"):
        trace_for_a_gpu(problem_of(64, 64, 2, 1, causal=False), schedule.forms(64)["split"])


@pytest.mark.parametrize("H", [64, 128, 256])
def test_no_accumulator_is_read_too_early(H):
    for causal, tiles in itertools.product((False, True), schedule.forms(H).values()):
        trace_for_a_gpu(problem_of(1000, 1000, 2, 1, H=H, causal=causal), tiles)


# Loops


def problem_of(T, S, N, K, B=1, H=64, causal=True):
    return Problem(B, T, S, N, K, H, jnp.dtype(jnp.bfloat16), 1.0, Band.of(causal))


@FULL
def test_heads_in_sections(monkeypatch):
    """Two of four heads before the next two, where one SM makes many of these programs."""
    case, tiles = AttentionCase(140, 210, 64, N=4, K=4, dtype="bfloat16", arguments=CAUSAL), schedule.forms(64)["fused"]
    monkeypatch.setattr(schedule, "NUM_SMS", 1)
    monkeypatch.setattr(schedule, "L2_BUDGET", 2 * case.T * 64 * 8)
    arrays, arguments = case.inputs()
    assert schedule.grid_of_keys(check_call(*arrays, **arguments).problem, tiles[0])["section"] == 2
    check(case, tiles)


def loop_of(problem, monkeypatch, tiles=None, **place):
    """[(query head, tile of queries, masked)] of the program at a place of the grid, outside of a kernel."""
    tiles = tiles or schedule.Tiles(64, 128, 2)
    monkeypatch.setattr(schedule.lax, "axis_index", place.__getitem__)
    steps = []

    def note(masked, head, i, step, _):
        assert step == len(steps)
        steps.append((int(head), int(i), masked))

    bodies = (functools.partial(note, masked) for masked in (False, True))
    with jax.disable_jit():  # then a loop is one of Python
        k_start = place["tile"] * tiles.block_k
        count, _ = schedule.for_each_query_tile(problem, tiles, place["kv_head"], k_start, *bodies, None)
    assert count == len(steps)
    return steps


def test_places_are_counted_in_each_batch_entry(monkeypatch):
    """Where batch entries come one by one; there are three programs in each here."""
    monkeypatch.setattr(schedule, "NUM_SMS", 1)
    loop = functools.partial(loop_of, problem_of(320, 320, N=2, K=1, B=2), monkeypatch, part=0, kv_head=0)
    assert loop(batch=0, tile=0) == loop(batch=1, tile=0) and loop(batch=0, tile=1) == loop(batch=1, tile=1)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_every_loop_passes_each_tile_once(causal, group, monkeypatch):
    problem = problem_of(330, 470, N=group, K=1, causal=causal)
    for num_sms, tile in itertools.product((1, 132), range(4)):
        monkeypatch.setattr(schedule, "NUM_SMS", num_sms)
        loop = loop_of(problem, monkeypatch, part=0, batch=0, kv_head=0, tile=tile)
        wanted = {(head, i) for head in range(group) for i in range(min(2 * tile, 5) if causal else 0, 6)}
        assert len(loop) == len(wanted) and {(head, i) for head, i, _ in loop} == wanted
        if causal:  # only tiles that see all keys go without a mask
            assert all(masked or i >= 2 * tile + 2 for _, i, masked in loop)


def test_more_heads_than_a_grid_can_hold(monkeypatch):
    """They are served in pieces: a GPU takes 65535 programs along an axis. All entries share segments and sinks."""
    monkeypatch.setattr(hopper, "GRID_LIMIT", 8)  # two batch entries of two heads
    sizes = []

    def kernels(problem, arrays, *_):
        sizes.append(problem.B)
        assert all(len(array) == problem.B for array in jax.tree.leaves(arrays))
        return arrays[3], arrays[1], arrays[2]

    monkeypatch.setattr(hopper, "_fused", kernels)
    case = AttentionCase(8, 8, 64, N=2, K=2, B=5, dtype="bfloat16")
    query, key, value = case.inputs()[0]
    dout, lse = cotangents(case)[0], np.zeros((5, 2, 8), np.float32)
    dout[4, 0] = np.nan  # of a query whose lse is its sink
    ids = np.zeros((1, 8), np.int32)
    shared = Extras(query_segment_ids=ids, key_segment_ids=ids, sinks=np.zeros((1, 2), np.float32))
    call = dataclasses.replace(check_call(query, key, value), extras=shared)
    gradients = hopper.backward(call, query, lse, dout, lse, tiles=SMALL["fused"])
    dout[4, 0] = 0
    assert sizes == [2, 2, 1]
    jax.tree.map(np.testing.assert_array_equal, tuple(gradients), (dout, key, value))


# Keys with a part in common

WIDE = AttentionCase(40, 100, 256, N=1, dtype="float16", common=30)
OF_64, DELAYED = schedule.forms(64)["fused"], schedule.forms(128)["fused, dq delayed"]
COMMON = {  # (case, tiles, the weight of dlse, which makes dq so large that it hides an error)
    "fused": (AttentionCase(130, 150, 64, dtype="float16", common=30), OF_64, 1),
    "delayed": (AttentionCase(70, 140, 128, N=1, B=2, dtype="float16", common=30, key_lengths=(140, 33)), DELAYED, 0),
    "ordered": (AttentionCase(130, 203, 64, N=1, dtype="float16", common=30), OF_64, 0),
    "split": (WIDE, schedule.forms(256)["split"], 0),
    "split, dlse": (dataclasses.replace(WIDE, arguments=CAUSAL, T=100), schedule.forms(256)["split"], 1),
    "few queries": (AttentionCase(7, 80, 64, dtype="bfloat16", common=10), OF_64, 0),
}


@pytest.mark.parametrize("name", in_tiers(COMMON, lambda name: name in ("fused", "few queries")))
def test_keys_with_a_part_in_common(name):
    """dq is as exact as 16 bits are, and there is no race."""
    case, tiles, weight = COMMON[name]
    arrays, arguments = case.inputs()
    dout, dlse = cotangents(case)
    found, gradients = [], (dout, weight * dlse)

    def keeping(call):
        exact, lse = registry.kernels("reference").exact_forward_of_part(call)
        out = exact.astype(case.dtype)
        return out, lse, low_bits(exact, out)

    options = {"tiles": tiles, "deterministic": name == "ordered", "interpret": DETECTING}
    run = by_kernels(arguments, keeping, functools.partial(hopper.backward, **options))
    assert races(lambda: found.extend(run(arrays, gradients)[1])) == []
    for mine, right in zip(found, oracle_gradients(*arrays, *gradients, **arguments), strict=True):
        assert relative_error(mine, right) < float(jnp.finfo(case.dtype).eps)


# The ordered form

ORDERED = [
    AttentionCase(150, 270, 80, N=4, K=2, dtype="bfloat16", arguments=CAUSAL),
    AttentionCase(130, 203, 64, dtype="float16", arguments={"scale": -0.3}),
    AttentionCase(70, 300, 64, N=1, B=2, dtype="bfloat16", arguments=CAUSAL),
]


@pytest.mark.parametrize("form", ["fused", "fused, dq delayed"])
@pytest.mark.parametrize("case", in_tiers(ORDERED, lambda case: case in ORDERED[:1]), ids=str)
def test_ordered(case, form):
    """Right without a race, and twice the same bits."""
    check(case, SMALL[form], deterministic=True)
    run = backward_of(case, SMALL[form], deterministic=True)
    jax.tree.map(np.testing.assert_array_equal, run(), run())


@pytest.mark.parametrize("lengths", [(330, 470), (470, 330), (64, 900)])
@pytest.mark.parametrize(("N", "K"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_nobody_waits_for_a_program_that_starts_later(lengths, N, K, causal, monkeypatch):
    """Of each tile of dq, the place of a program is how many that drew before it add to it."""
    problem, tiles = problem_of(*lengths, N, K, B=2, causal=causal), schedule.Tiles(64, 128, 2, ordered=True)
    monkeypatch.setattr(schedule, "L2_BUDGET", problem.T * 64 * 8)
    for num_sms in (1, 132):
        monkeypatch.setattr(schedule, "NUM_SMS", num_sms)
        grid, added = schedule.grid_of_keys(problem, tiles), Counter()
        for number in range(math.prod(grid.values())):
            place = {name: int(index) for name, index in schedule.place_in(grid, number).items()}
            assert np.ravel_multi_index(tuple(place[name] for name in grid), tuple(grid.values())) == number
            tile = grid["tile"] - 1 - place["tile"]
            for head, i, _ in loop_of(problem, monkeypatch, tiles, **place | {"tile": tile}):
                tile_of_dq = place["batch"], head + problem.group * place.get("section", 0) * grid["kv_head"], i
                assert schedule.place_in_turn(problem, tiles, i, tile * 128) == added[tile_of_dq]
                added[tile_of_dq] += 1


def turns_of(*changes):
    """What a program does in each of its turns, traced for a GPU with changes in the source."""
    copy, done = seeded(backward_fused, *changes), []

    def noted(module, name, what):
        """The function of a module, which writes down what it does."""
        act = getattr(module, name)
        return lambda *args, **options: (done.append(what), act(*args, **options))[1]

    copy.await_count, copy.count_on = noted(copy, "await_count", "turn:"), noted(copy, "count_on", "passed on")
    of_tma = {"copy_smem_to_gmem": "adds", "wait_smem_to_gmem": "waits"}
    noted_of_tma = {name: noted(plgpu, name, what) for name, what in of_tma.items()}
    with (
        mock.patch.multiple(plgpu, **noted_of_tma),
        mock.patch.object(hopper, "immediate_kernel", copy.immediate_kernel),
    ):
        hopper._fused.clear_cache()
        traced_for_a_gpu(problem_of(300, 300, 1, 1), tiles=SMALL["fused"], deterministic=True)
        hopper._fused.clear_cache()
    return {turn.partition("passed on")[0] for turn in " ".join(done).split("turn: ")[1:]}


def test_a_turn_is_passed_on_after_the_addition():
    release = "    if not program.interpret:\n        count_on(turn)\n"
    early = ("    for wg in range", f"{release}    for wg in range")
    assert turns_of() == {"adds adds waits "}
    assert turns_of(early) == {""}
    assert turns_of(("    plgpu.wait_smem_to_gmem(0)\n", "")) == {"adds adds "}


def test_the_ordered_form_is_for_full_and_causal_calls():
    case = AttentionCase(40, 50, 64, dtype="bfloat16", key_lengths=(30,))
    arrays, arguments = case.inputs()
    call, rows = check_call(*arrays, **arguments), np.zeros((1, 2, 40), np.float32)
    with pytest.raises(ValueError, match="the ordered form is for full and causal calls"):
        hopper.backward(call, call.query, rows, call.query, rows, tiles=schedule.forms(64)["fused"], deterministic=True)


# Lowering


def traced_for_a_gpu(problem, **options):
    gradients = lambda q, k, v, *residuals: hopper.backward(Call(problem, q, k, v, None, None), *residuals, **options)
    return jax.jit(gradients).trace(*shapes_of(problem, "backward"))


def trace_for_a_gpu(problem, tiles):
    """Raises if an accumulator is read before its products are awaited."""
    with in_use_until_awaited():
        traced_for_a_gpu(problem, tiles=tiles)


@pytest.mark.parametrize(("T", "is_hidden"), [(128, True), (257, False)])
def test_the_compiler_does_not_see_where_few_tiles_begin(T, is_hidden, monkeypatch):
    """What tests/one_turn_or_two.ptx shows on a GPU; long sequences keep the code that was measured."""
    hidden = []
    monkeypatch.setattr(schedule, "opaque", lambda number: hidden.append(number.shape) or number)
    problem, tiles, nothing = problem_of(T, 512, 1, 1, H=128), schedule.forms(128)["fused"][0], lambda *_: None
    steps = lambda k_start: schedule.for_each_query_tile(problem, tiles, 0, k_start, nothing, nothing, None)
    jax.eval_shape(steps, jax.ShapeDtypeStruct((), jnp.int32))
    assert hidden == [()] * is_hidden
