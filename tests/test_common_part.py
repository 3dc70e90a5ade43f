"""Gradients where keys, and values, have a part in common: dq must not feel it, see `helpers.attention.low_bits`."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_attention, cotangents, differentiated, in_tiers, relative_error
from test_hopper_masks import DOCUMENTS
from test_ring import attention_on

from helpers import flash_attention
from helpers.attention.hopper.common_part import common_part, taken_off
from helpers.attention.low_bits import low_bits, with_low_bits
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.problem import check_call
from helpers.attention.public import registry
from helpers.attention.reference import oracle_gradients
from helpers.instruments.products import equations

IMPLEMENTATIONS = ("reference", "portable", "hopper", "tpu")


def attention(implementation):
    if implementation.startswith("ring"):
        return attention_on(4, implementation=implementation.split()[1], layout="contiguous", is_causal=False)
    return functools.partial(flash_attention, implementation=implementation, return_residual=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_smallest_input(implementation):
    """One query, two keys, one head_dim: dq is .00389, where an out rounded to bfloat16 makes it -.94."""
    one = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    keys = jnp.array([16, 16.125], jnp.bfloat16).reshape(1, 2, 1, 1)
    attend = functools.partial(flash_attention, implementation=implementation)
    loss = lambda query, attend: attend(query, keys, keys).astype(jnp.float32).sum()
    dq_of = lambda attend: float(jax.grad(loss)(one, attend).squeeze())
    (right, _, _) = oracle_gradients(*map(np.asarray, (one, keys, keys, one)))
    assert dq_of(attend) == pytest.approx(float(right.squeeze()), rel=0.01)
    if implementation != "reference":  # which makes out anew
        assert dq_of(functools.partial(attend, keeps_low_bits=False)) == pytest.approx(-0.94, rel=0.01)


SMALL = {"N": 2, "K": 1, "H": 64, "dtype": "bfloat16", "arguments": {"is_causal": True}}
CASES = [
    *[(name, AttentionCase(64, 64, **SMALL, common=10)) for name in IMPLEMENTATIONS],
    *[(name, AttentionCase(70, 64, **SMALL, common=4, common_to="runs")) for name in ("hopper", "tpu")],
    *[(name, AttentionCase(64, 90, **SMALL, common=30, common_to="drift")) for name in ("hopper", "tpu")],
    *[(name, AttentionCase(5, 80, 40, dtype="float16", common=30)) for name in ("hopper", "tpu", "portable")],
    ("ring portable", AttentionCase(64, 64, 16, dtype="bfloat16", common=10)),
    ("ring reference", AttentionCase(64, 64, 16, dtype="bfloat16", common=10, key_lengths=(50,))),
    # Where a query sees one key, dp and delta cancel: what is left of ds is the gradient of lse.
    *[(name, AttentionCase(3, 1, **SMALL | {"arguments": {}}, common=30)) for name in ("hopper", "tpu")],
    ("hopper", replace(DOCUMENTS, common=10.0, common_to="runs")),
    # Each of many keys has a little of the error.
    ("portable", AttentionCase(2, 800, 64, dtype="bfloat16", common=1.5)),
]
QUICK = *CASES[:4], CASES[11], CASES[-1]


@pytest.mark.parametrize(("implementation", "case"), in_tiers(CASES, lambda *case: case in QUICK), ids=str)
def test_gradients(implementation, case):
    """Within twice naive attention's error, each by itself."""
    check_attention(attention(implementation), case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_one_query(implementation):
    """No ds is rounded: gradients are as exact as 16 bits let them be, whatever keys and values have in common."""
    case = AttentionCase(1, 300, 64, N=4, K=2, dtype="bfloat16", key_lengths=(200,), common=10)
    arrays, arguments = case.inputs()
    dout, dlse = cotangents(case)
    gradients = differentiated(attention(implementation), arguments)
    for given in ((dout, dlse), (dout, 0 * dlse)):
        right = oracle_gradients(*map(np.asarray, (*arrays, *given)), **arguments)
        assert max(map(relative_error, gradients(arrays, given)[1], right)) < 2.0**-8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_taken_off_the_keys(dtype):
    """k - c is exact and no larger than k. Padding does not count, and where keys differ in sign, c is 0."""
    random = np.random.default_rng(0)
    key = random.normal(np.tile([30, 2, -30, -7, 9000, 3e-3, 0, -30], 8), size=(3, 90, 1, 64)).astype(dtype)
    key[0, 80, :, :4], key[..., 5] = [1, 1, -2, 6e4], np.abs(key[..., 5])  # one unlike the others, behind the first 64
    key[1, 85:], key[2] = np.nan, -np.abs(key[2]) - 1
    lengths = np.array([90, 85, 0], np.int32)
    query = random.normal(size=(3, 70, 2, 64)).astype(dtype)
    query[1, 60:], lse = np.nan, np.zeros((3, 2, 128), np.float32)
    problem = check_call(query, key, key).problem
    arrays = query, np.pad(key, ((0, 0), (0, 6), (0, 0), (0, 0))), lse, jnp.asarray(lengths)
    c, shifted, zeros = common_part(problem, *arrays, (1, 3, 70, 2, 64), registry.TABLE["hopper"].interpreter)
    c = np.asarray(c, np.float64)
    assert np.all(c[:, 0, 64] == [1, 1, 0]) and not c[2].any()
    assert not np.any(zeros) and zeros.shape == (1, 3, 70, 2, 64)
    for b in (0, 1):
        k = key[b, : lengths[b], 0].astype(np.float64)
        rest = k - c[b, 0, :64]
        np.testing.assert_array_equal(rest, rest.astype(dtype).astype(np.float64))
        assert np.all(np.abs(rest) <= np.abs(k))
    np.testing.assert_allclose(c[1, 0, [0, 2, 4, 7]], [30, -30, 9000, -30], rtol=0.05)
    np.testing.assert_array_equal(c[0, 0, [0, 1, 2, 3, 6]], [2, 0, -4, 0, 0])
    qc = np.einsum("btnh,bh->bnt", query[:, :60].astype(np.float64), c[:, 0, :64])
    np.testing.assert_allclose(shifted[:, :, :60], -problem.scale * LOG2_E * qc, rtol=1e-5, atol=1e-3)
    assert np.all(np.isfinite(shifted))
    lse[0, 1, 69], lse[1, 0, 3] = -300, -np.inf  # large, and that of a query without a key
    fewer, of_large, _ = common_part(problem, *arrays, (1, 3, 70, 2, 64), registry.TABLE["hopper"].interpreter)
    assert not np.any(fewer[0, :, :64]) and np.array_equal(fewer[1:], c[1:].astype(dtype))
    np.testing.assert_array_equal(of_large[0], np.float32(LOG2_E) * lse[0])
    is_key = np.arange(90)[:, None, None] < lengths[:, None, None, None]
    arguments = query, key, np.zeros((3, 2, 70), np.float32), is_key

    def on_one_device(problem):
        run = jax.vmap(lambda *arrays: taken_off(problem, *arrays, "device"), axis_name="device")
        return [array[0] for array in run(*(array[None] for array in arguments))]

    _, moved, same = on_one_device(replace(problem, scale=1e-4))
    np.testing.assert_array_equal(same[:, 0, 0], c[:, 0, :64])
    np.testing.assert_allclose(moved[:, :, :60], -1e-4 * qc, rtol=1e-5, atol=1e-6)
    assert not np.any(on_one_device(problem)[2])  # logits would lose thousands


def test_some_of_the_keys_are_not_taken_for_all():
    """As in a ring: rows of ds of a part add up to anything, and parts of dq to dq."""
    case = AttentionCase(7, 128, 64, N=1, K=1, dtype="bfloat16", common=10)
    (query, key, value), _ = case.inputs()
    dout, dlse = cotangents(case)
    kernels = registry.kernels("hopper", interpreted=True)
    arguments = [jnp.asarray(array) for array in (query, key, value)]
    whole = check_call(*arguments)
    exact, lse = registry.kernels("reference").exact_forward_of_part(whole)
    out = exact.astype(query.dtype)
    dq = 0
    for half in (slice(0, 64), slice(64, 128)):
        part = check_call(query, key[:, half], value[:, half])
        dq += kernels.backward_of_part(part, out, lse, dout, dlse.swapaxes(1, 2), low_bits(exact, out))[0].astype(
            jnp.float32
        )
    (right, _, _) = oracle_gradients(query, key, value, dout, dlse)
    assert relative_error(dq, right) < 0.01


@pytest.mark.parametrize("name", ["portable", "tpu", "ring reference"])
def test_xla_does_not_see_a_conversion_and_the_way_back(name):
    """XLA for GPUs takes both away, and with them all that `low_bits` has."""
    array = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    if name.startswith("ring"):
        forward = lambda *arrays: jax.vjp(attention(name), *arrays)
    else:
        forward = lambda *arrays: registry.kernels(name, True).forward_with_low_bits(check_call(*arrays))
    found = list(equations(jax.make_jaxpr(forward)(array, array, array).jaxpr))
    conversions = [one for one in found if one.primitive.name == "convert_element_type"]
    to_16_bits = {id(one.outvars[0]) for one in conversions if one.invars[0].aval.dtype == jnp.float32}
    assert to_16_bits and not any(id(one.invars[0]) in to_16_bits for one in conversions)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_bits(dtype):
    """Every float32 comes back, also where it is rounded to a power of two, to zero, or to infinity."""
    numbers = np.float32(
        np.concatenate([np.random.default_rng(0).standard_normal(4000), [0, -0.0, 1 - 2**-24, -(2**-30)]])
    )
    rounded = jnp.asarray(numbers).astype(dtype)
    again = with_low_bits(rounded, low_bits(jnp.asarray(numbers), rounded))
    kept = np.abs(numbers) >= (0 if dtype == "bfloat16" else 2.0**-14)  # float16 has few numbers below
    np.testing.assert_array_equal(np.asarray(again)[kept], numbers[kept])
    assert np.all(np.abs(again - numbers) <= np.abs(np.float32(rounded) - numbers))
