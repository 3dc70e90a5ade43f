"""The kernels for a TPU against the float64 oracle, in Pallas's interpreter for TPUs; compiling is for make tpu-compile.

Nearly all of the time goes into compiling interpreted kernels, so a case is compiled once: out, lse and the gradients
come from one program, and each is compared by itself.
"""

import functools

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_masks
from attention_cases import AttentionCase, in_tiers
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from helpers import flash_attention
from helpers.attention import tpu
from helpers.attention.masking import Band, key_tiles, query_tiles, visible
from helpers.attention.problem import Problem

tpu_attention = functools.partial(flash_attention, implementation="tpu", return_residual=True)
DETECTING = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


def by_the_kernels(case, block_q=128, block_k=128):
    """(out, lse), (dq, dk, dv) of the kernels in small blocks, so that small cases have many.

    Two cores share the axes that may go in any order, and neither may read or write what the other writes.
    """
    arrays, arguments = case.inputs()
    blocks = {"block_q": block_q, "block_k": block_k, "interpret": DETECTING}
    passes = (functools.partial(one_pass, **blocks) for one_pass in (tpu.forward, tpu.backward))
    return cases.by_kernels(arguments, *passes)(arrays, cases.cotangents(case))


CASES = [
    AttentionCase(200, 140, B=2, query_lengths=(200, 7), key_lengths=(120, 140), arguments={"is_causal": True}),
    AttentionCase(290, 150, 24, N=4, K=2, dtype="bfloat16", arguments={"is_causal": True}),
    AttentionCase(150, 290, N=4, K=2, B=2, query_lengths=(150, 7), key_lengths=(120, 290)),
    AttentionCase(600, 300, N=1, arguments={"local_window_size": (20, 100)}),
    AttentionCase(300, 600, 64, N=1, arguments={"local_window_size": (100, 20)}),
    AttentionCase(290, 400, 136, B=2, dtype="float16", key_lengths=(0, 300)),
    AttentionCase(150, 400, 24, N=1, arguments={"is_causal": True, "causal_offset": 250}),
    AttentionCase(300, 150, 24, N=1, arguments={"is_causal": True, "causal_offset": -140}),
    AttentionCase(600, 500, 24, N=2, arguments={"local_window_size": (200, 0)}),  # in unequal blocks
]


@pytest.mark.parametrize("case", in_tiers(CASES, lambda case: case == CASES[0]), ids=str)
def test_many_blocks(case):
    cases.check_results(by_the_kernels(case, block_k=384 if case == CASES[-1] else 128), case)
    assert not interpret_pallas_call.races.races_found


def test_masks_and_scores_of_many_blocks():
    """Each head has a list of tiles of its own, in the order of both kernels."""
    arrays, arguments = test_masks.drawn(8, 300, 390, N=3, K=1, only=test_masks.ALL)
    arguments["mask_mod"] = lambda b, n, i, j: (i // 128 + j // 128) % 3 != n
    options = {"block_q": 128, "block_k": 128, "interpret": DETECTING}
    passes = (functools.partial(one_pass, **options) for one_pass in (tpu.forward, tpu.backward))
    mine = jax.tree.leaves(cases.by_kernels(arguments, *passes)(arrays[:3], arrays[3:]))
    test_masks.compare(mine, test_masks.right(arrays, arguments)[:5])
    assert not interpret_pallas_call.races.races_found


FULL_TIER = [AttentionCase(50, 70, 24, N=4, K=2, batched=False)]
FULL_TIER += [*cases.GRID[::3], *cases.OF_LOGITS[::2], *cases.OF_WINDOWS[::2]]


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_TIER, ids=str)
def test_the_function(case):
    cases.check_attention(tpu_attention, case)


def test_padding_may_hold_anything():
    """In float16, which becomes float32 on the way."""
    lengths = {"query_lengths": (40, 20), "key_lengths": (50, 30)}
    cases.check_padding(tpu_attention, AttentionCase(40, 50, 24, B=2, dtype="float16", **lengths))


BANDS = [Band(), Band(None, 0), Band(30, 40), Band(100, 0), Band(0, 300), Band(None, 50), Band(50, None)]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_what_is_fetched_is_what_is_needed(band):
    """An index that stays fetches nothing. So an outer tile fetches as many inner ones as hold a visible pair."""
    for T, S, query_length, key_length in [(640, 640, 640, 640), (300, 900, 300, 900), (900, 300, 700, 200)]:
        problem = Problem(1, T, S, 1, 1, 128, np.dtype(np.float32), 1.0, band)
        seen = visible(np.arange(T)[:, None], np.arange(S), band, query_length, key_length)
        places = lambda tile: slice(128 * tile, 128 * (tile + 1))
        for tiles_of, pairs in ((key_tiles, seen), (query_tiles, seen.T)):
            loop = tpu.InnerLoop(problem, 128, 128, tiles_of)
            for outer in range(-(-len(pairs) // 128)):
                part = pairs[places(outer)].any(axis=0)
                needed = [tile for tile in range(-(-len(part) // 128)) if part[places(tile)].any()]
                scalars = tpu.Scalars(np.array([query_length]), np.array([key_length]))
                steps = [loop.tile(0, 0, outer, step, scalars) for step in range(loop.steps)]
                fetched = [int(tile) for tile, *_ in steps]
                assert list(dict.fromkeys(fetched)) == (needed or fetched[:1])
                assert [tile for tile, (_, is_needed, _) in zip(fetched, steps, strict=True) if is_needed] == needed
                assert min(fetched) >= 0
                full = [int(tile) for tile, is_needed, is_full in steps if is_needed and is_full]
                assert full == [tile for tile in needed if pairs[places(outer), places(tile)].sum() == 128**2]


@pytest.mark.parametrize(("H", "dtype"), in_tiers([(24, "float16"), (256, "float32")], lambda H, _: H == 24))
def test_lowers_for_a_tpu_without_one(H, dtype):
    """Pallas has an instruction of a TPU for each operation, and accepts the shapes of all blocks."""
    query, key = (jax.ShapeDtypeStruct((2, length, heads, H), dtype) for length, heads in ((300, 4), (700, 2)))
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def gradients(query, key, lengths):
        loss = lambda *arrays: tpu_attention(*arrays, is_causal=True, key_value_seq_lengths=lengths)[0].sum()
        return jax.grad(loss, (0, 1, 2))(query, key, key)

    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(gradients).trace(query, key, lengths).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_only_products_of_float32_follow_the_precision(dtype, precision):
    """Those of 16 bits are exact, and Mosaic does not compile them where more is asked for."""
    tile = jax.ShapeDtypeStruct((8, 8), dtype)
    with jax.default_matmul_precision("highest"):
        (equation,) = jax.make_jaxpr(lambda a: tpu.product(a, a, 1, 1))(tile).eqns
    assert set(equation.params["precision"]) == {jax.lax.Precision[precision]}
