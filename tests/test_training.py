"""The transformer of notebook 08 has the same gradients with flash attention as with naive; notebook 08 trains it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers import flash_attention, transformer

CONFIG = transformer.Config(vocabulary=11, N=2, H=16, layers=1)
TOLERANCE = 1e-5  # relative, of a gradient
naive = functools.partial(flash_attention, implementation="reference")
flash = functools.partial(flash_attention, implementation="portable")


def batch_of(B=2, T=70, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocabulary, (B, T + 1))


def loss_and_gradients(attention):
    function = jax.jit(jax.value_and_grad(functools.partial(transformer.loss, attention=attention)))
    return function(transformer.init(CONFIG), batch_of())


def test_a_step_has_the_loss_and_the_gradients_of_naive_attention():
    """On a batch whose 70 positions are more than one tile of keys, and end inside a tile."""
    (right_loss, right), (loss, gradients) = map(loss_and_gradients, (naive, flash))
    assert abs(loss - right_loss) < 1e-6 * right_loss
    errors = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), gradients, right)
    assert max(jax.tree.leaves(errors)) < TOLERANCE


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
