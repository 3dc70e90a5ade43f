"""The Hopper backward kernels in the Mosaic GPU interpreter: against the oracle, with races looked for."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_gradients, cotangents, relative_error
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper import backward as hopper
from helpers.attention.problem import check_call
from helpers.attention.reference import naive_attention, oracle_gradients

FORMS = list(hopper.forms(64))


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def gradients_of_kernels(case, form=None, races=False, tiles=None):
    """(dq, dk, dv) of the interpreted kernels, in one of `forms` or with these tiles, from naive out and lse."""
    arrays, arguments = case.inputs()
    call = check_call(*arrays, **arguments)
    out, lse = naive_attention(call)
    dout, dlse = cotangents(case)
    interpret = plgpu.InterpretGPUParams(detect_races=races)
    tiles = tiles or hopper.forms(case.H)[form]
    found = hopper.backward(call, out, lse, dout, dlse.swapaxes(1, 2), interpret=interpret, tiles=tiles)
    found = jax.block_until_ready(found)
    if races:
        races_found = interpret_pallas_call.get_races().races_found
        assert not races_found, "races_found"
    return found


CAUSAL = {"is_causal": True}
FOUND = "races_found|RACE DETECTED|observed|already at phase|Computation failed"  # how the interpreter complains, by its version
CASES = [
    AttentionCase(1, 7, 24, dtype="bfloat16"),
    AttentionCase(130, 203, 64, N=1, B=2, dtype="float16"),
    AttentionCase(150, 70, 80, N=2, K=2, dtype="bfloat16", arguments=CAUSAL),
    AttentionCase(65, 270, 64, N=2, dtype="float16", arguments=CAUSAL),
    AttentionCase(100, 129, 128, N=1, dtype="bfloat16", arguments={"scale": -0.3}),
]


# The order of the steps of the fused form matters to masks, which two cases have.
CASES_AND_FORMS = [(case, form) for case in CASES for form in FORMS if "delayed" not in form or case in CASES[2:4]]


@pytest.mark.parametrize(("case", "form"), CASES_AND_FORMS, ids=str)
def test_gradients(case, form):
    check_gradients(functools.partial(gradients_of_kernels, form=form), case, mends_delta=False)


@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("logits", ["large", "low"])
def test_size_of_logits(logits, form):
    """Far from 0 as well. delta is made from a rounded out, as everywhere but in the portable kernels,
    and low logits of one sign show that rounding: four times the error of naive attention and more."""
    case = AttentionCase(63, 100, 64, N=1, dtype="bfloat16", logits=logits)
    arrays, arguments = case.inputs()
    right = oracle_gradients(*arrays, *cotangents(case), **arguments)
    for mine, correct in zip(gradients_of_kernels(case, form), right, strict=True):
        assert relative_error(mine, correct) < 2 * float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.parametrize("form", FORMS)
def test_no_races(form):
    """Enough tiles for every ring to go round: 4 of queries for the first keys, of each of two heads."""
    case = AttentionCase(230, 130, 128, dtype="bfloat16", arguments=CAUSAL)
    check_gradients(functools.partial(gradients_of_kernels, races=True, form=form), case, mends_delta=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_forgotten_fence_is_found(form, monkeypatch):
    """Without commit_smem, TMA and wgmma may read shared memory before it is written."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(Exception, match=FOUND):
        gradients_of_kernels(AttentionCase(130, 70, 64, dtype="bfloat16"), races=True, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_a_forgotten_wait_is_found(form, monkeypatch):
    """Without its waits for free slots, the memory warpgroup overwrites tiles that are in use."""
    wait = plgpu.barrier_wait

    def forgetful(barrier):
        if sys._getframe(1).f_code.co_qualname != "load_keys_then_queries.<locals>.one_step":
            wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", forgetful)
    with pytest.raises(Exception, match=FOUND):
        gradients_of_kernels(AttentionCase(400, 70, 64, dtype="bfloat16"), races=True, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_many_causal_programs_walk_in_another_order(form, monkeypatch):
    """Batch entry by batch entry; here one program is many."""
    case = AttentionCase(140, 210, 64, N=2, B=2, dtype="bfloat16", arguments=CAUSAL)
    problem = check_call(*case.inputs()[0], **CAUSAL).problem
    assert list(hopper._grid(problem, ("head", 2), 2)) == ["part", "tile", "batch", "head"]
    monkeypatch.setattr(hopper, "PROCESSORS", 1)
    assert list(hopper._grid(problem, ("head", 2), 2)) == ["batch", "part", "tile", "head"]
    check_gradients(functools.partial(gradients_of_kernels, form=form), case, mends_delta=False)


@pytest.mark.parametrize("form", FORMS)
def test_causal_walks_through_a_group_go_down_and_up(form, monkeypatch):
    """In turns, with one processor."""
    monkeypatch.setattr(hopper, "PROCESSORS", 1)
    case = AttentionCase(330, 400, 64, N=6, K=2, dtype="bfloat16", arguments=CAUSAL)
    check_gradients(functools.partial(gradients_of_kernels, form=form, races=True), case, mends_delta=False)


def walk_of(problem, tiles, monkeypatch, **place):
    """[(query head, tile of queries, masked)] of the program at a place of the grid, outside of a kernel."""
    monkeypatch.setattr(hopper.lax, "axis_index", place.__getitem__)
    steps = problem.group * -(-problem.T // tiles.block_q)

    def walk():
        note = lambda masked, head, i, step, found: found.at[step].set(jnp.array([head, i, masked]))
        bodies = (functools.partial(note, masked) for masked in (False, True))
        nothing = jnp.full((steps, 3), -1)
        return hopper.for_each_query_tile(
            problem, tiles, place["kv_head"], place["tile"] * tiles.block_k, *bodies, nothing
        )

    count, found = jax.jit(walk)()
    return [(int(head), int(i), bool(masked)) for head, i, masked in found[:count]]


def test_a_causal_walk_through_a_group_goes_down_and_the_next_up(monkeypatch):
    """The mask cuts the tiles 2 and 3 of the second program; with one processor, it walks up."""
    monkeypatch.setattr(hopper, "PROCESSORS", 1)
    (query, key, value), _ = AttentionCase(320, 320, 64, N=4, K=2, B=1, dtype="bfloat16").inputs()
    problem, tiles = check_call(query, key, value, is_causal=True).problem, hopper.Tiles(64, 128, 2)
    walk = functools.partial(walk_of, problem, tiles, monkeypatch, part=0, batch=0)
    cut = lambda *tiles: [(head, i, True) for i in tiles for head in (0, 1)]
    whole = lambda *tiles: [(head, i, False) for i in tiles for head in (0, 1)]
    assert walk(kv_head=0, tile=0) == cut(1, 0) + whole(4, 3, 2)
    of_other_heads = [(head - 2, i, masked) for head, i, masked in walk(kv_head=1, tile=0)]
    assert of_other_heads == cut(0, 1) + whole(2, 3, 4)
    monkeypatch.setattr(hopper, "PROCESSORS", 2)
    assert walk(kv_head=0, tile=1) == cut(2, 3) + whole(4)
    monkeypatch.setattr(hopper, "PROCESSORS", 132)
    assert walk(kv_head=0, tile=1) == cut(3, 2) + whole(4)


def test_walks_are_counted_anew_in_each_batch_entry(monkeypatch):
    """Where batch entries come one by one; there are three programs in each here."""
    monkeypatch.setattr(hopper, "PROCESSORS", 1)
    (query, key, value), _ = AttentionCase(320, 320, 64, N=2, K=1, B=2, dtype="bfloat16").inputs()
    problem, tiles = check_call(query, key, value, is_causal=True).problem, hopper.Tiles(64, 128, 2)
    walk = functools.partial(walk_of, problem, tiles, monkeypatch, part=0, kv_head=0)
    assert walk(batch=0, tile=0) == walk(batch=1, tile=0) and walk(batch=0, tile=1) == walk(batch=1, tile=1)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_every_walk_passes_each_tile_once(causal, group, monkeypatch):
    (query, key, value), _ = AttentionCase(330, 470, 64, N=group, K=1, B=1, dtype="bfloat16").inputs()
    problem, tiles = check_call(query, key, value, is_causal=causal).problem, hopper.Tiles(64, 128, 2)
    for processors, tile in itertools.product((1, 132), range(4)):
        monkeypatch.setattr(hopper, "PROCESSORS", processors)
        walk = walk_of(problem, tiles, monkeypatch, part=0, batch=0, kv_head=0, tile=tile)
        wanted = {(head, i) for head in range(group) for i in range(min(2 * tile, 5) if causal else 0, 6)}
        assert len(walk) == len(wanted) and {(head, i) for head, i, _ in walk} == wanted
        if causal:  # only tiles that see all keys go without a mask
            assert all(masked or i >= 2 * tile + 2 for _, i, masked in walk)


def test_more_heads_than_a_grid_can_hold(monkeypatch):
    """They are served in pieces: a card takes 65535 programs along an axis."""
    monkeypatch.setattr(hopper, "GRID_LIMIT", 8)  # two batch entries of two heads
    case = AttentionCase(40, 50, 64, N=2, B=5, dtype="bfloat16")
    check_gradients(functools.partial(gradients_of_kernels, form="split"), case, mends_delta=False)


def test_the_fused_form_is_not_deterministic():
    case = AttentionCase(40, 50, 64, dtype="bfloat16")
    call = check_call(*case.inputs()[0])
    with pytest.raises(ValueError, match="the fused form is not deterministic"):
        rows = np.zeros((1, 2, 40), np.float32)
        hopper.backward(call, call.query, rows, call.query, rows, tiles=hopper.forms(64)["fused"], deterministic=True)


def test_the_split_form_gives_the_same_bits():
    case = AttentionCase(150, 70, 64, dtype="bfloat16", arguments=CAUSAL)
    once, again = (gradients_of_kernels(case, form="split") for _ in range(2))
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("H", [40, 64, 80, 128, 256])
def test_default_tiles_lower_for_a_gpu(H, deterministic):
    """Shared memory, layouts and copies fit, whatever the lengths and the grouping of heads."""
    dtype = jnp.bfloat16 if H % 64 else jnp.float16
    for (T, S), (N, K), causal in [((1023, 1024), (4, 1), True), ((1, 7), (1, 1), False), ((4096, 333), (2, 2), True)]:

        def gradients(query, key, value, out, lse, dout, dlse, causal=causal):
            call = check_call(query, key, value, is_causal=causal)
            return hopper.backward(call, out, lse, dout, dlse, deterministic=deterministic)

        query, key = jax.ShapeDtypeStruct((2, T, N, H), dtype), jax.ShapeDtypeStruct((2, S, K, H), dtype)
        rows = jax.ShapeDtypeStruct((2, N, T), jnp.float32)
        traced = jax.jit(gradients).trace(query, key, key, query, rows, query, rows)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
