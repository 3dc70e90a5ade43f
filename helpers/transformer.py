"""A small character-level transformer in plain JAX: functions on dicts of arrays, and no framework.

A decoder of the usual kind, normalised before each layer, on vectors of width C = N H:

    x = embedding[token]
    x = x + merge(attention(rotate(q), rotate(k), v))     q, k, v from norm(x); in each block
    x = x + gelu(norm(x) up) down                         in each block
    logits = norm(x) embedding^T                          the embedding serves at both ends

Attention is an argument of every function that needs it, and is called as
``attention(query, key, value, is_causal=True)`` on arrays (B, T, N, H). So two versions of it can
be compared inside the same model. Positions enter by rotation (arXiv 2104.09864), so that T may
be any length, and `start` says at which position of a text the first token stands.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Config:
    """The size of a model: number of different tokens, N heads of H each (H even), number of blocks."""

    vocabulary: int
    N: int = 2
    H: int = 32
    layers: int = 2


def init(config, seed=0):
    """Parameters for a `Config`: a dict of float32 arrays, drawn by NumPy; equal seeds give equal arrays."""
    random = np.random.default_rng(seed)
    N, H, layers = config.N, config.H, config.layers
    C = N * H

    def normal(*shape, inputs):
        """Weights that sum up `inputs` numbers of size one to a result of size one."""
        return jnp.asarray(random.standard_normal(shape) / np.sqrt(inputs), jnp.float32)

    def block():
        # merge and down are 2 * layers summands of x: each starts smaller, so that their sum does not grow.
        return {
            "attention_norm": jnp.ones(C),
            "qkv": normal(C, 3, N, H, inputs=C),
            "merge": normal(N, H, C, inputs=2 * layers * C),
            "mlp_norm": jnp.ones(C),
            "up": normal(C, 4 * C, inputs=C),
            "down": normal(4 * C, C, inputs=2 * layers * 4 * C),
        }

    return {
        "embedding": normal(config.vocabulary, C, inputs=C),
        "blocks": [block() for _ in range(layers)],
        "norm": jnp.ones(C),
    }


def rms_norm(x, gain):
    """x divided by the root of its mean square along the last axis, times gain (C,)."""
    return gain * x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def rotate(x, start=0):
    """Turn each pair of numbers by an angle that grows with the position. x (B, T, N, H), same shape back.

    The product of two turned vectors depends on how far apart they stand, not on where. start: the position of
    the first of the T, an integer or integers (B,).
    """
    half = x.shape[-1] // 2
    positions = jnp.asarray(start)[..., None] + jnp.arange(x.shape[1])
    angle = positions[..., None, None] * 100.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention_layer(block, x, attention, start=0):
    """Positions exchange what they know. x (B, T, C); returns what is added to it."""
    x = rms_norm(x, block["attention_norm"])
    query, key, value = jnp.einsum("btc,cinh->ibtnh", x, block["qkv"])
    out = attention(rotate(query, start), rotate(key, start), value, is_causal=True)
    return jnp.einsum("btnh,nhc->btc", out, block["merge"])


def mlp_layer(block, x):
    """Each position works by itself. x (B, T, C); returns what is added to it."""
    return jax.nn.gelu(rms_norm(x, block["mlp_norm"]) @ block["up"]) @ block["down"]


def predict(parameters, tokens, attention, start=0):
    """Logits (B, T, vocabulary) of the token after each of tokens (B, T)."""
    x = parameters["embedding"][tokens]
    for block in parameters["blocks"]:
        x = x + attention_layer(block, x, attention, start)
        x = x + mlp_layer(block, x)
    return rms_norm(x, parameters["norm"]) @ parameters["embedding"].T


def loss(parameters, batch, attention):
    """Mean of -log softmax at the next tokens, in nats. batch (B, T + 1) integers."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = predict(parameters, inputs, attention)
    lse = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (lse - right).mean()
