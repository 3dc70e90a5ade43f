"""The oracle is right by an independent computation; naive attention is right by the oracle."""

import jax
import numpy as np
import pytest
from attention_cases import AttentionCase, naive_attention_of
from test_lowering import products

from helpers.attention.reference import oracle, oracle_gradients

CASES = [
    AttentionCase(5, 7, 3, N=4, K=2, B=2),
    AttentionCase(7, 5, 4, N=2, K=1, arguments={"is_causal": True}),
    AttentionCase(6, 6, 2, B=2, query_lengths=(6, 3), key_lengths=(0, 4), arguments={"scale": 0.7}),
    AttentionCase(9, 8, 2, arguments={"local_window_size": (2, 1)}, batched=False),
]


def by_the_definition(case):
    """Attention with Python loops and sums over the visible keys only, for one query at a time."""
    (query, key, value), arguments = case.inputs()
    query, key, value = (np.asarray(a, np.float64).reshape(case.B, -1, *a.shape[-2:]) for a in (query, key, value))
    scale = arguments.get("scale", case.H**-0.5)
    left, right = arguments.get("local_window_size", (np.inf, np.inf))
    out, lse = np.zeros(query.shape), np.full(query.shape[:3], -np.inf)
    for b, i, n in np.ndindex(*query.shape[:3]):
        if case.query_lengths is not None and i >= case.query_lengths[b]:
            continue
        last = case.S if case.key_lengths is None else case.key_lengths[b]
        seen = [j for j in range(last) if i - left <= j <= i + right and not (arguments.get("is_causal") and j > i)]
        kv = n // (case.N // case.K)
        weights = [np.exp(scale * query[b, i, n] @ key[b, j, kv]) for j in seen]
        if seen:
            out[b, i, n] = sum(w * value[b, j, kv] for w, j in zip(weights, seen, strict=True)) / sum(weights)
            lse[b, i, n] = np.log(sum(weights))
    return (out, lse) if case.batched else (out[0], lse[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_follows_the_definition(case):
    (query, key, value), arguments = case.inputs()
    for mine, right in zip(oracle(query, key, value, **arguments), by_the_definition(case), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_the_oracle_are_finite_differences(case):
    arrays, arguments = case.inputs()
    random = np.random.default_rng(1)
    # The oracle reads float32 inputs; a step of 2^-8 is exact there, and its error is of fourth order.
    step = 2.0**-8
    arrays = [np.round(array * 2**8) / 2**8 for array in arrays]
    arrays = [array.astype(np.float32) for array in arrays]
    out, lse = oracle(*arrays, **arguments)
    dout, dlse = random.standard_normal(out.shape), random.standard_normal(lse.shape)

    def loss(*arrays):
        out, lse = oracle(*arrays, **arguments)
        return (dout * out).sum() + (dlse * np.where(np.isneginf(lse), 0, lse)).sum()

    for number, gradient in enumerate(oracle_gradients(*arrays, dout, dlse, **arguments)):
        direction = random.choice([-1, 1], arrays[number].shape)

        def along(t, number=number, direction=direction):
            moved = list(arrays)
            moved[number] = (arrays[number] + t * direction).astype(np.float32)
            return loss(*moved)

        slope = (8 * (along(step) - along(-step)) - (along(2 * step) - along(-2 * step))) / (12 * step)
        assert gradient.shape == arrays[number].shape
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-6)


def test_naive_attention_rounds_its_weights():
    """The yardstick of 16-bit results is what `jax.nn` computes, whose second product has 16-bit operands too."""
    query = jax.ShapeDtypeStruct((1, 8, 1, 4), "bfloat16")
    of_logits, of_values = products(jax.make_jaxpr(naive_attention_of)(query, query, query).jaxpr)
    for product in (of_logits, of_values):
        assert [variable.aval.dtype for variable in product.invars] == ["bfloat16"] * 2
