"""What only a GPU can show: long sequences, and cuDNN behind the same function. Skipped elsewhere."""

import functools
from dataclasses import replace

import attention_cases as cases
import jax
import numpy as np
import pytest
from attention_cases import AttentionCase, check_forward
from test_ring import attention_on

from helpers import flash_attention
from helpers.attention.device import compute_capability
from helpers.attention.hopper import backward, backward_schedule
from helpers.attention.hopper import forward as hopper
from helpers.attention.problem import check_call
from helpers.attention.reference import oracle, oracle_gradients
from helpers.dev import ptxas

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="this machine has no GPU that JAX can use")

portable_attention = functools.partial(flash_attention, implementation="portable", return_residual=True)


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_a_weight_of_one_gives_no_gradient(precision):
    """A row that sees one key: dp and delta must cancel, though TF32 rounds the operands of the one and not of the other."""
    case = AttentionCase(100, 100, 64, arguments={"local_window_size": 0})
    arrays, arguments = case.inputs()
    dout, _ = cases.cotangents(case)
    with jax.default_matmul_precision(precision):
        _, pull_back = jax.vjp(lambda *arrays: portable_attention(*arrays, **arguments)[0], *arrays)
        dq, dk, dv = pull_back(dout)
    assert max(np.abs(dq).max(), np.abs(dk).max()) < 1e-4
    np.testing.assert_allclose(dv[:, :, 0], dout.sum(axis=2), atol=1e-2)


on_hopper = pytest.mark.skipif(compute_capability() != (9, 0), reason="this machine has no Hopper GPU")
hopper_attention = functools.partial(flash_attention, implementation="hopper", return_residual=True)


@on_hopper
@pytest.mark.parametrize("case", [case for case in cases.GRID if case.dtype != "float32"], ids=str)
def test_hopper_shapes_and_head_dims(case):
    case = replace(case, N=2 * case.N, K=2)
    cases.check_attention(hopper_attention, case, mends_delta=False)


@on_hopper
@pytest.mark.parametrize(
    ("T", "H", "dtype"),
    [
        (7, 64, "bfloat16"),
        (1000, 64, "bfloat16"),
        (1000, 128, "bfloat16"),
        (1000, 64, "float16"),
        (100, 256, "float16"),
    ],
)
def test_keys_with_a_part_in_common(T, H, dtype):
    """dq is as exact as 16 bits are."""
    case = AttentionCase(T, 4096, H, dtype=dtype)
    (query, key, value), _ = case.inputs()
    arrays = query, key + 30, value + 30  # in no channel do keys differ in sign
    dout, _ = cases.cotangents(case)
    _, pull_back = jax.vjp(lambda *arrays: hopper_attention(*arrays)[0], *arrays)
    right = oracle_gradients(*arrays, dout)
    for mine, one in zip(pull_back(dout), right, strict=True):
        assert cases.relative_error(mine, one) < 2 * float(jax.numpy.finfo(dtype).eps)


@pytest.mark.parametrize("implementation", ["portable", pytest.param("hopper", marks=on_hopper)])
def test_a_ring_keeps_low_bits_from_one_program_to_another(implementation):
    """In one program XLA may leave out the rounding between the passes."""
    case = AttentionCase(512, 512, 64, dtype="bfloat16", common=10)
    arrays, _ = case.inputs()
    dout, _ = cases.cotangents(case)
    attention = attention_on(jax.device_count(), implementation=implementation, layout="contiguous", is_causal=True)
    _, pull_back = jax.jit(lambda *arrays: jax.vjp(lambda *arrays: attention(*arrays)[0], *arrays))(*arrays)
    dq, _, _ = jax.jit(lambda pull_back, dout: pull_back(dout))(pull_back, dout)
    assert cases.relative_error(dq, oracle_gradients(*arrays, dout, is_causal=True)[0]) < 0.01


@pytest.mark.parametrize("attention", [portable_attention, pytest.param(hopper_attention, marks=on_hopper)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("T", "S", "H"), [(4096, 4096, 128), (16384, 4000, 64), (5000, 16384, 64)])
def test_long_sequences(T, S, H, dtype, attention):
    is_hopper = attention is hopper_attention
    case = AttentionCase(T, S, H, N=1, K=1, dtype=dtype, arguments={"is_causal": T == S})
    if dtype != "float32" or not is_hopper:
        cases.check_attention(attention, case, mends_delta=not is_hopper)


def forward_by(tiles_of, keeps_low_bits=False):
    """Attention by the forward kernel of Hopper with the tiles tiles_of(problem)."""

    def attention(query, key, value, **arguments):
        call = check_call(query, key, value, **arguments)
        out, lse, *_ = hopper.forward(call, tiles=tiles_of(call.problem), keeps_low_bits=keeps_low_bits)
        return out, np.swapaxes(lse, 1, 2)

    return attention


@on_hopper
@pytest.mark.parametrize("configuration", ptxas.configurations(), ids=str)
def test_hopper_configurations(configuration, monkeypatch):
    """With several turns for each forward program, and backward programs that walk up through a group."""
    tiles, arguments = configuration.tiles, {"is_causal": configuration.is_causal}
    N, H = 2 * configuration.group, configuration.H
    case = AttentionCase(1100, 1300, H, N=N, K=2, dtype="bfloat16", arguments=arguments)
    if configuration.which == "forward":
        check_forward(forward_by(lambda _: tiles._replace(programs=tiles.programs and 4)), case)
        return

    def gradients(case):
        (query, key, value), _ = case.inputs()
        dout, dlse = cases.cotangents(case)
        call = check_call(query, key, value, **arguments)
        return backward.backward(call, *hopper.forward(call), dout, dlse.swapaxes(1, 2), tiles=tiles)

    monkeypatch.setattr(backward_schedule, "core_count", lambda _: 8)
    cases.check_gradients(gradients, case)


@on_hopper
@pytest.mark.parametrize("logits", ["rising", "large", "last huge", "equal"])
@pytest.mark.parametrize(("dtype", "H"), [("bfloat16", 64), ("float16", 128), ("float16", 64), ("bfloat16", 256)])
def test_hopper_guesses_that_fail(dtype, H, logits):
    """In several turns of a program: eight programs share the work."""
    for is_causal in (False, True):
        case = AttentionCase(1000, 1500, H, N=4, K=2, dtype=dtype, logits=logits, arguments={"is_causal": is_causal})
        check_forward(forward_by(lambda problem: hopper.default_tiles(problem)._replace(programs=8, guess=True)), case)


@on_hopper
@pytest.mark.parametrize(
    ("H", "tiles"),
    [
        (64, hopper.Tiles(block_k=64, warpgroups=4, programs=8)),
        (64, hopper.Tiles(warpgroups=3, programs=8, dynamic=True)),
        (128, hopper.Tiles(programs=8)),
        (128, hopper.Tiles(programs=8, dynamic=True)),
        (256, hopper.Tiles(block_k=64, programs=None, ahead=False, guess=False)),
    ],
)
def test_constants_beside_values(H, tiles):
    """Of 72 or 136 columns in one instruction, of 264 in two: no interpreter reads them by a descriptor."""
    case = AttentionCase(1100, 1300, H, N=4, K=2, dtype="bfloat16", arguments={"is_causal": True})
    check_forward(forward_by(lambda _: tiles, keeps_low_bits=True), case)


@on_hopper
def test_hopper_repeats_itself():
    """The forward pass gives the same bits each time; gradients are added in any order, so they are close."""
    arrays, _ = AttentionCase(1000, 1300, 64, N=4, K=2, dtype="bfloat16").inputs()
    gradient = jax.jit(jax.grad(lambda *a: hopper_attention(*a)[0].astype(np.float32).sum(), (0, 1, 2)))
    first, first_gradients = hopper_attention(*arrays), gradient(*arrays)
    for _ in range(100):
        for a, b in zip(first, hopper_attention(*arrays), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(first_gradients, gradient(*arrays), strict=True):
            assert cases.relative_error(a, b) < 1e-2


@on_hopper
@pytest.mark.parametrize(
    ("T", "S", "H"), [(65, 257, 80), (66, 513, 128), (128, 384, 128), (192, 640, 128), (128, 513, 160), (66, 513, 256)]
)
def test_hopper_few_queries_and_many_keys(T, S, H):
    """Loops of one step or two, which ptxas compiled wrongly: see FEW_TILES of the backward kernels."""
    for dtype in ("bfloat16", "float16"):
        case = AttentionCase(T, S, H, N=2, K=2, dtype=dtype, arguments={"is_causal": True})
        cases.check_gradients(functools.partial(cases.gradients_of, hopper_attention), case)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(130, 100, 128, N=2, K=2, dtype="float16", arguments={"is_causal": True}),
        AttentionCase(64, 128, 64, dtype="bfloat16", arguments={"local_window_size": (9, 0), "is_causal": True}),
        AttentionCase(50, 70, 64, B=3, dtype="float16", query_lengths=(50, 20, 0), key_lengths=(70, 33, 5)),
    ],
    ids=str,
)
def test_cudnn_keeps_the_contract(case):
    (query, key, value), arguments = case.inputs()
    out = flash_attention(query, key, value, implementation="cudnn", **arguments)
    right, _ = oracle(query, key, value, **arguments)
    assert cases.relative_error(out, right) < 4e-3 * (1 if case.dtype == "bfloat16" else 0.25)


@pytest.mark.parametrize(("precision", "most"), [("highest", 1e-5), (None, 2e-4)])
def test_float32_has_the_precision_that_is_asked_for(precision, most):
    """Better than TF32 unless it is asked for more, of out and of every gradient."""
    case = AttentionCase(200, 300, 64, N=4, K=2)
    arrays, _ = case.inputs()
    right = *oracle(*arrays), *oracle_gradients(*arrays, *cases.cotangents(case))
    with jax.default_matmul_precision(precision):
        found = *portable_attention(*arrays), *cases.gradients_of(portable_attention, case)
    for mine, other in zip(found, right, strict=True):
        assert cases.relative_error(mine, other) <= most
