"""The kernels by `plgpu.mma`: interpreted, against the oracle and without races; lowered for Ampere and Hopper."""

import functools
import itertools
from unittest import mock

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_padding, in_tiers
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from seeded import seeded

from helpers import flash_attention
from helpers.attention.low_bits import with_low_bits
from helpers.attention.masking import Band, key_tiles, tile_kind, whole_tiles
from helpers.attention.mosaic import backward, forward, warp
from helpers.attention.mosaic.warp import Tiles
from helpers.attention.problem import check_call
from helpers.instruments.layouts import registers
from helpers.instruments.races import DETECTING, races

mosaic = functools.partial(flash_attention, implementation="mosaic", return_residual=True)
CAUSAL = {"is_causal": True}
SMALL = Tiles(64, 32, 2)
IS_GPU = jax.default_backend() == "gpu"
INTERPRETED = not IS_GPU and plgpu.InterpretGPUParams()


def kernels(arguments, interpret=False):
    """The function of arrays and cotangents by small tiles."""

    def small(call):
        keeps_low_bits = call.problem.dtype.itemsize == 2
        return forward.forward(call, keeps_low_bits=keeps_low_bits, tiles=SMALL, interpret=interpret)

    small_backward = functools.partial(backward.backward, tiles=(SMALL, Tiles(32, 64, 2)), interpret=interpret)
    return cases.by_kernels(arguments, small, small_backward)


def attention_of(case, interpret=False):
    arrays, arguments = case.inputs()
    return functools.partial(kernels(arguments, interpret), arrays, cases.cotangents(case))


# Against the oracle

CASES = [
    AttentionCase(100, 200, 40, N=4, K=2, dtype="bfloat16", arguments=CAUSAL),
    AttentionCase(130, 70, 64, B=3, dtype="float16", query_lengths=(0, 130, 70), key_lengths=(70, 0, 33)),
    AttentionCase(200, 130, 128, N=1, dtype="bfloat16", arguments={"local_window_size": (40, 3)}),
    AttentionCase(70, 130, 24, dtype="float32", arguments={"local_window_size": 17, "is_causal": True}),
    AttentionCase(130, 66, 1, N=3, dtype="float16", batched=False),
    AttentionCase(30, 70, 256, dtype="float32", arguments=CAUSAL),  # shared memory has no room for what stays
    AttentionCase(1, 7, 64, dtype="float32", arguments=CAUSAL),
    AttentionCase(130, 140, 16, B=1, N=1, dtype="float16", logits="rising"),  # the first maximum is too low
    AttentionCase(63, 203, 192, dtype="float32", logits="low"),
    AttentionCase(130, 130, 16, dtype="bfloat16", arguments={"scale": 0.0, "local_window_size": (0, 50)}),
    AttentionCase(200, 70, B=2, query_lengths=(150, 200), arguments={"local_window_size": (4, 4)}, dtype="bfloat16"),
    AttentionCase(113, 70, 24, N=4, K=2, dtype="float16", value_size=10.0, arguments={"scale": -3.0}),
    AttentionCase(64, 300, 64, dtype="bfloat16", common=10.0, common_to="runs"),
    AttentionCase(150, 33, 64, B=1, N=4, K=1, dtype="bfloat16", arguments=CAUSAL),  # fewer tiles than stages
]


@pytest.mark.parametrize("case", in_tiers(CASES, lambda case: case in CASES[:2]), ids=str)
def test_results(case):
    cases.check_attention(mosaic, case)


def test_the_mean_of_equal_values_is_that_value():
    """By out and its low bits: weights that were rounded for the product are divided by their own sum."""
    (query, key, value), arguments = AttentionCase(16, 40, 64, B=1, N=1, dtype="bfloat16").inputs()
    call = check_call(query, key, np.full_like(value, 3), **arguments)
    out, _, low = forward.forward(call, keeps_low_bits=True, interpret=INTERPRETED)
    np.testing.assert_allclose(with_low_bits(out, low), 3, rtol=1e-6)


def test_delta_takes_up_what_rows_of_ds_miss():
    """An error of out, put in here for that which the tensor core makes of dp, leaves no trace in float32."""
    arrays, arguments = AttentionCase(16, 16, 16, B=1, N=1, dtype="float32", arguments=CAUSAL).inputs()
    call = check_call(*arrays, **arguments)
    dout, dlse = np.ones_like(arrays[0]), np.zeros((1, 1, 16), np.float32)
    out, lse = forward.forward(call, interpret=INTERPRETED)
    right = backward.backward(call, out, lse, dout, dlse, mends_delta=False, interpret=INTERPRETED)
    mended = backward.backward(call, 1.01 * out, lse, dout, dlse, interpret=INTERPRETED)
    assert all(cases.relative_error(*pair) < 1e-4 for pair in zip(mended, right, strict=True))


@pytest.mark.full
def test_padding_may_hold_anything():
    check_padding(mosaic, AttentionCase(70, 90, B=2, dtype="bfloat16", query_lengths=(70, 20), key_lengths=(90, 30)))


def test_pieces_add_up():
    """To the array; numbers near the ends of float32 included."""
    x = np.float32([0, 1, -1 / 3, 1 + 2**-23, 1.2345678e-5, 3.4028235e38, -3.4e38, 1.2345678e-20])
    split = warp.split(jnp.asarray(x), warp.pieces_of("float32"), warp.operand_dtype("float32"))
    pieces = [np.asarray(piece, np.float64) for piece in split]
    np.testing.assert_array_equal(sum(pieces), np.asarray(x, np.float64))
    assert len(pieces) == 3 and cases.relative_error(sum(pieces[:2]), x) < 2**-15


# Races, and faults


def found_races(case):
    results = []
    found = races(lambda: results.extend(attention_of(case, interpret=DETECTING)()))
    return found, results


@pytest.mark.skipif(IS_GPU, reason="interpreted")
def test_no_races():
    case = AttentionCase(100, 130, 64, N=2, dtype="bfloat16", arguments=CAUSAL)
    found, results = found_races(case)
    assert found == []
    cases.check_results(results, case)


@pytest.mark.skipif(IS_GPU, reason="interpreted")
def test_a_race_is_found():
    """Of a ring with a stage too few."""
    fetch = "        pl.when(step + stages < steps)(lambda: fetch(step + stages, following))\n"
    rings = "tiles in rings], state)\n"
    wrong = seeded(warp, ("        arrive(step)\n", f"        arrive(step)\n{fetch}"), (rings + fetch, rings))
    with mock.patch.multiple(warp, stay=wrong.stay, streamed=wrong.streamed):
        found, _ = found_races(AttentionCase(64, 130, 64, N=1, dtype="bfloat16"))
    assert found and any("copy_gmem_to_smem" in text or "barrier" in text.lower() for text in found)


BANDS = Band(None, 0), Band(None, 6), Band(20, None), Band(20, 0), Band(5, 40)
LENGTHS = (64, 64), (64, 50), (40, 64)


def test_each_tile_comes_once_and_only_full_ones_without_a_mask(block=8):
    for band, lengths, first_row in itertools.product(BANDS, LENGTHS, range(0, 64, 16)):
        start, stop = jnp.int32(first_row), jnp.int32(first_row + 16)
        needed = key_tiles(start, stop, block, band, *lengths, xp=jnp)
        order = warp.tile_order(needed, whole_tiles(needed, start, stop, block, band, *lengths))
        done = [(int(order.place(step)[1]), step >= int(order.whole)) for step in range(int(order.steps))]
        rows, tiles = range(first_row, first_row + 16), range(*map(int, needed))
        kinds = [tile_kind(rows, range(j * block, (j + 1) * block), band, *lengths) for j in tiles]
        assert sorted(done) == [(j, kind != "full") for j, kind in zip(tiles, kinds, strict=True)]


# What an interpreter cannot see


def test_a_sum_is_handed_on_as_an_operand():
    """Every register of a left operand has the numbers that the same thread has in the register of the sum."""
    shape = 128, 32
    lefts, sums = (registers(layout, np.arange(128 * 32).reshape(shape)) for layout in (warp.LHS, warp.ACC))
    of_left, of_sum = (layout.to_mgpu().registers_shape(shape) for layout in (warp.LHS, warp.ACC))

    def handed_on(place_in_sum):
        return [np.ravel_multi_index(place_in_sum(place, len(of_sum)), of_sum) for place in np.ndindex(of_left)]

    np.testing.assert_array_equal(sums[:, :, handed_on(warp.place_in_sum)], lefts)
    swapped = seeded(warp, ("2 * column_tile + half", "column_tile + half"))
    assert (sums[:, :, handed_on(swapped.place_in_sum)] != lefts).any()


AMPERE, HOPPER = (8, 0), (9, 0)
LOWERED = [
    (AMPERE, AttentionCase(100, 130, 64, N=4, K=2, dtype="bfloat16", query_lengths=(9,), arguments=CAUSAL)),
    (HOPPER, AttentionCase(130, 70, 64, B=2, dtype="float16", query_lengths=(9, 130), key_lengths=(70, 0))),
    (HOPPER, AttentionCase(100, 130, 256, dtype="float32", arguments={"local_window_size": (8, 9)})),
]


@pytest.mark.parametrize(("capability", "case"), in_tiers(LOWERED, lambda _, case: case.dtype != "float32"), ids=str)
def test_lowering_for_cuda(capability, case):
    """By TMA and by cp.async, with nothing of Triton."""
    with mock.patch.object(utils, "_infer_arch", lambda: capability):
        attend = attention_of(case)
        text = attend.func.trace(*attend.args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 3 and "triton" not in text.lower()


@pytest.mark.parametrize("H", [64, 160, 192, 256])
def test_tiles_that_cp_async_can_share_out(H):
    """Blocks of 8 x 64 numbers: four rows of them, or two of two columns, or one of four."""
    call = check_call(*AttentionCase(100, 130, H, dtype="float32").inputs()[0])
    with mock.patch.object(utils, "_infer_arch", lambda: AMPERE), jax.default_matmul_precision("highest"):
        dq, dkv = backward.backward_tiles(call.problem)
        streaming = forward.forward_tiles(call.problem).block_k, dq.block_k, dkv.block_q
    columns = warp.padded_head_dim(H) // 64
    assert all(rows % 32 == 0 or (rows % 16 == 0 and columns % 2 == 0) for rows in streaming)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 4), (2, 16, 3)])
def test_each_tile_of_each_head_has_one_program(shape, is_causal):
    def place(index):
        with mock.patch.object(jax.lax, "axis_index", lambda name: index):
            return warp.of_program(*shape, Band.of(is_causal))

    places = zip(*map(np.ravel, jax.vmap(place)(jnp.arange(np.prod(shape)))), strict=True)
    assert sorted(places) == sorted(np.ndindex(shape))
