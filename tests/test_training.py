"""The transformer of notebook 08 learns the same with flash attention as with naive, and faults in attention show."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import flash_attention, transformer

pytestmark = pytest.mark.xdist_group("training")  # these keep what the next of them would compute again

CONFIG = transformer.Config(vocabulary=11, N=2, H=16, layers=1)
TOLERANCE = 1e-5  # relative, of a gradient; the faults below are off by at least 100 times as much
naive = functools.partial(flash_attention, implementation="reference")
flash = functools.partial(flash_attention, implementation="portable")


def batch_of(B=2, T=70, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocabulary, (B, T + 1))


@functools.cache
def loss_and_gradients(attention):
    """On a batch whose 70 positions are more than one tile of keys, and end inside a tile."""
    function = jax.jit(jax.value_and_grad(functools.partial(transformer.loss, attention=attention)))
    return function(transformer.init(CONFIG), batch_of())


def worst_error(gradients, right):
    errors = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), gradients, right)
    return max(jax.tree.leaves(errors))


def by_definition(query, key, value, is_causal, keep=lambda lse: lse):
    s = jnp.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(query.shape[-1])
    s = jnp.where(jnp.tri(query.shape[1], dtype=bool), s, -jnp.inf)
    lse = keep(jax.nn.logsumexp(s, axis=-1, keepdims=True))
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - lse), value)


def not_causal(query, key, value, is_causal):
    return naive(query, key, value)


def unscaled(query, key, value, is_causal):
    return naive(query, key, value, is_causal=True, scale=1.0)


def last_key_forgotten(query, key, value, is_causal):
    lengths = jnp.full(query.shape[0], query.shape[1] - 1, jnp.int32)
    return naive(query, key, value, is_causal=True, key_value_seq_lengths=lengths)


no_delta = functools.partial(by_definition, keep=jax.lax.stop_gradient)
lse_in_16_bit = functools.partial(
    by_definition, keep=lambda lse: lse + jax.lax.stop_gradient(lse.astype(jnp.bfloat16).astype(lse.dtype) - lse)
)


@pytest.mark.parametrize("attention", [flash, by_definition], ids=["flash", "by definition"])
def test_a_step_has_the_loss_and_the_gradients_of_naive_attention(attention):
    right_loss, right = loss_and_gradients(naive)
    loss, gradients = loss_and_gradients(attention)
    assert abs(loss - right_loss) < 1e-6 * right_loss
    assert worst_error(gradients, right) < TOLERANCE


@pytest.mark.parametrize(
    "attention",
    [not_causal, unscaled, last_key_forgotten, no_delta, lse_in_16_bit],
    ids=["not causal", "unscaled", "last key forgotten", "no delta", "lse in 16 bit"],
)
def test_a_fault_in_attention_shows_in_the_gradients(attention):
    _, right = loss_and_gradients(naive)
    _, gradients = loss_and_gradients(attention)
    assert worst_error(gradients, right) > 100 * TOLERANCE


def changed_positions(attention, place, T=20):
    """Which logits change when the token at a place is replaced."""
    parameters = transformer.init(CONFIG)
    tokens = batch_of(B=1, T=T)[:, :T]
    replaced = tokens.copy()
    replaced[0, place] = (replaced[0, place] + 1) % CONFIG.vocabulary
    before, after = (transformer.predict(parameters, each, attention) for each in (tokens, replaced))
    return np.asarray((before != after).any(axis=-1))[0]


@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_token_changes_its_own_and_later_logits_only(place):
    for attention in (naive, flash):
        changed = changed_positions(attention, place)
        assert not changed[:place].any() and changed[place:].all()
    assert changed_positions(not_causal, place).all(), "this test would not notice a leak"


def test_rotation_leaves_only_the_distance():
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, 8))
    rotated_q, rotated_k = (transformer.rotate(jnp.broadcast_to(x, (1, 30, 1, 8)))[0, :, 0] for x in (q, k))
    products = np.asarray(rotated_q @ rotated_k.T)
    for distance in (-9, 0, 4):
        assert np.ptp(np.diagonal(products, distance)) < 1e-4
    assert np.ptp(products[:, 0]) > 0.1
    assert np.allclose(rotated_q[0], q) and np.allclose(np.linalg.norm(rotated_q, axis=-1), np.linalg.norm(q))


def test_the_loss_is_the_mean_surprise_at_the_next_token():
    parameters, batch = transformer.init(CONFIG), batch_of(B=3, T=9)
    logits = np.asarray(transformer.predict(parameters, batch[:, :-1], naive), np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    surprise = [-math.log(p[b, t, batch[b, t + 1]]) for b in range(3) for t in range(9)]
    assert transformer.loss(parameters, batch, naive) == pytest.approx(np.mean(surprise), rel=1e-5)

    parameters["embedding"] = jnp.zeros_like(parameters["embedding"])
    assert transformer.loss(parameters, batch, naive) == pytest.approx(math.log(CONFIG.vocabulary), rel=1e-6)


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize(("N", "H"), [(2, 16), (3, 8)])
def test_number_of_parameters(layers, N, H):
    C = N * H
    parameters = transformer.init(transformer.Config(vocabulary=11, N=N, H=H, layers=layers))
    count = sum(array.size for array in jax.tree.leaves(parameters))
    assert count == 11 * C + layers * (3 * C * C + C * C + 8 * C * C + 2 * C) + C
    assert {array.dtype for array in jax.tree.leaves(parameters)} == {jnp.dtype("float32")}


def test_a_seed_decides_the_parameters():
    one, same, other = (transformer.init(CONFIG, seed) for seed in (1, 1, 2))
    equal = functools.partial(jax.tree.map, lambda a, b: bool((a == b).all()))
    assert all(jax.tree.leaves(equal(one, same)))
    assert not equal(one, other)["embedding"] and not equal(one, other)["blocks"][0]["down"]


@functools.cache
def compiled_step(attention):
    optimiser = optax.adam(3e-3)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        parameters, remembered = state
        loss, gradients = jax.value_and_grad(transformer.loss)(parameters, batch, attention)
        updates, remembered = optimiser.update(gradients, remembered, parameters)
        return (optax.apply_updates(parameters, updates), remembered), loss

    return optimiser, step


def trained(attention, steps=30):
    """Losses on one batch that is shown again and again."""
    optimiser, step = compiled_step(attention)
    parameters = transformer.init(CONFIG)
    state, losses = (parameters, optimiser.init(parameters)), []
    for _ in range(steps):
        state, loss = step(state, batch_of(T=40))
        losses.append(float(loss))
    return np.array(losses)


@pytest.mark.full
def test_training_repeats_itself_and_does_not_depend_on_the_attention():
    losses = trained(naive)
    assert losses[-1] < losses[0] / 2
    assert np.array_equal(losses, trained(naive))
    assert np.abs(losses - trained(flash)).max() < 1e-4


def test_only_naive_attention_keeps_a_table_for_the_backward_pass():
    B, T, N, H = 2, 48, 2, 16
    x = jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)

    def kept(attention):
        _, pull_back = jax.eval_shape(lambda *x: jax.vjp(functools.partial(attention, is_causal=True), *x), x, x, x)
        return [leaf.shape for leaf in jax.tree.leaves(pull_back)]

    assert sorted(kept(flash)) == sorted([(B, T, N, H)] * 4 + [(B, N, T)])
    assert any(shape[-2:] == (T, T) for shape in kept(naive))


def test_a_text_may_be_read_in_pieces():
    """With `start`, and keys and values of the pieces before at hand, the logits are those of the whole text."""
    parameters, tokens = transformer.init(CONFIG), batch_of(B=2, T=9)
    whole, kept = transformer.predict(parameters, tokens, naive), []

    def remembering(query, key, value, is_causal):
        kept.append((key, value))
        key, value = (jnp.concatenate(pieces, axis=1) for pieces in zip(*kept, strict=True))
        # The queries of a piece stand at the end of the keys, so empty ones stand before them.
        before = jnp.zeros((2, key.shape[1] - query.shape[1], *query.shape[2:]))
        return naive(jnp.concatenate([before, query], axis=1), key, value, is_causal=True)[:, before.shape[1] :]

    for start, piece in ((0, tokens[:, :6]), (np.array([6, 6]), tokens[:, 6:9])):
        logits = transformer.predict(parameters, piece, remembering, start)
        first = int(np.max(start))
        np.testing.assert_allclose(logits, whole[:, first : first + piece.shape[1]], atol=1e-5)
