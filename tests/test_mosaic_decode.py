"""Decoding by mma: interpreted against the oracle, and lowered for a GPU from Ampere on."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_forward, in_tiers
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_decode import BANDS, CAPPED, CASES, check_pages
from test_lowering import lower_for_cuda

from helpers.attention.extras import Extras
from helpers.attention.masking import NO_BAND, Band
from helpers.attention.mosaic import own_keys
from helpers.attention.mosaic.decode import decode, select_splits
from helpers.attention.mosaic.warp import RHS
from helpers.attention.problem import Call, Problem, check_call, check_paged_call
from helpers.instruments.layouts import registers
from helpers.instruments.races import DETECTING, races

INTERPRET = plgpu.InterpretGPUParams()


def decoded(*arrays, slots=3, programs=2, interpret=INTERPRET, **arguments):
    """(out, lse) by the kernels, interpreted."""
    out, lse = decode(check_call(*arrays, **arguments), interpret=interpret, slots=slots, programs=programs)
    return out, lse.swapaxes(1, 2)


OPTIONS = {}, {"slots": 1}, {}, {"slots": 2, "programs": 1}, {}, {}


@pytest.mark.parametrize(
    ("case", "options"), in_tiers(list(zip(CASES, OPTIONS, strict=True)), lambda case, _: case in CASES[1::2]), ids=str
)
def test_agrees_with_the_oracle(case, options):
    check_forward(functools.partial(decoded, **options), case)


@pytest.mark.parametrize(("causal_offset", "arguments"), in_tiers(BANDS, lambda *band: band in BANDS[1::2]))
def test_a_band_in_pages(causal_offset, arguments):
    def attend(*arrays, **arguments):
        out, lse = decode(check_paged_call(*arrays, **arguments), interpret=INTERPRET, slots=2, programs=2)
        return out, lse.swapaxes(1, 2)

    check_pages(attend, causal_offset, arguments)


def test_there_are_no_races():
    (arrays, arguments) = AttentionCase(1, 130, 16, dtype="bfloat16", N=4, arguments=CAPPED).inputs()
    assert races(lambda: decoded(*arrays, interpret=DETECTING, **arguments)) == []


@pytest.mark.parametrize(("keys", "H"), [(64, 128), (128, 64), (64, 256)])
def test_a_warp_has_its_keys_as_a_right_operand(keys, H):
    """So a permuted relayout is noticed."""
    tile, n = np.arange(keys * H).reshape(keys, H), keys // own_keys.WARPS
    mine = registers(own_keys.keys_layout(keys), tile)
    values = {itemsize: registers(own_keys.values_layout(keys, itemsize), tile) for itemsize in (2, 4)}
    for warp, quarter in enumerate(tile.reshape(own_keys.WARPS, n, H)):
        right = registers(RHS, quarter.T)[warp]
        np.testing.assert_array_equal(mine[warp], right)
        right = registers(RHS, quarter)[warp]
        for numbers in values.values():  # of 32 bits one by one
            for lane in range(32):
                pairs = numbers[warp, lane].reshape(-1, 2)
                ordered = [own_keys.row_by_row(pairs[:, i], n).ravel() for i in range(2)]
                np.testing.assert_array_equal(np.stack(ordered, axis=1), right[lane])


@pytest.mark.parametrize(
    ("arch", "H", "dtype", "page"),
    [((9, 0), 128, "bfloat16", 0), ((8, 0), 72, "float16", 16), ((10, 0), 40, "float32", 0)],
)
def test_lowers_for_a_gpu(arch, H, dtype, page, monkeypatch):
    monkeypatch.setattr(utils, "_infer_arch", lambda: arch)
    B, T, S, N, K, dtype = 2, 3, 64 * 7, 8, 2, jnp.dtype(dtype)
    band = Band.of(is_causal=True, window=(100, 0))
    problem = Problem(B, T, S, N, K, H, dtype, 1.0, band, soft_cap=50.0, is_at_end=True)
    shaped = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    key = shaped(600, page, K, H) if page else shaped(B, S, K, H)
    table = shaped(B, S // page, dtype=jnp.int32) if page else None
    run = functools.partial(decode, slots=2)
    attend = lambda query, key, table, lengths, sinks: run(
        Call(problem, query, key, key, None, lengths, table, Extras(sinks=sinks))
    )
    integers, sinks = shaped(B, dtype=jnp.int32), shaped(1, N, dtype=jnp.float32)
    text = lower_for_cuda(attend, shaped(B, T, N, H), key, table, integers, sinks)
    assert text.count("custom_call @mosaic_gpu") == 2 and "triton" not in text
    assert "stablehlo.copy" not in text and "stablehlo.pad" not in text  # nothing is copied for a token


@pytest.mark.parametrize("memory", [163 * 1024, 99 * 1024, 227 * 1024])  # of a program, at 8.0, 8.6 and 9.0
@pytest.mark.parametrize("dtype", [jnp.dtype("bfloat16"), jnp.dtype("float32")])
def test_tiles_fit_every_gpu(memory, dtype):
    for H, rows in itertools.product((1, 64, 128, 256), (1, 16, 64, 1000)):
        splits = select_splits(Problem(1, 16, 4096, rows, 1, H, dtype, 1.0, NO_BAND), memory=memory)
        row = own_keys.padded_head_dim(H, dtype) * dtype.itemsize
        assert (splits.block_r + splits.slots * splits.block_k) * row + 1024 <= memory
