"""The transformer of notebook 08, beyond what its training there shows."""

import functools

import jax.numpy as jnp
import numpy as np

from helpers import flash_attention, transformer

CONFIG = transformer.Config(vocabulary=11, N=2, H=16, layers=1)
naive = functools.partial(flash_attention, implementation="reference")


def test_a_text_may_be_read_in_pieces():
    """With `start`, and keys and values of the pieces before at hand, the logits are those of the whole text."""
    parameters, tokens = transformer.init(CONFIG), np.random.default_rng(0).integers(0, CONFIG.vocabulary, (2, 9))
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
