"""The running state of a softmax-weighted sum: what one pass over the keys must remember.

A row of logits arrives in pieces. The state keeps, for the keys seen so far,

    m    the largest logit
    l    the sum of exp(s - m)
    acc  the sum of exp(s - m) v

so that out = acc / l and lse = m + log l at any time. Milakov and Gimelshein (arXiv 1805.02867)
gave the recurrence for (m, l); FlashAttention (arXiv 2205.14135) carries acc along, as acc / l.

`step` and `finish` serve kernels, in base 2 and with JAX, and the NumPy twins, in base e: pass
``xp=numpy`` and its exp and log there.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

LOG2_E = math.log2(math.e)  # what s is multiplied with, for exp(s) = exp2(LOG2_E s)


def step(m, l, s, along=None, *, axis=1, exp=jnp.exp2, xp=jnp):
    """(m, l, alpha, p) of one more tile of keys: alpha is what sums so far are to be
    multiplied with, acc among them, and p the exponentials of the tile.

    m, l: one number a row. s: logits, -inf where masked, whose keys lie along an axis.
    along(row): such numbers, to be broadcast to s; chosen unless given.
    """
    keepdims = m.ndim == s.ndim
    along = along or (lambda row: row if keepdims else xp.expand_dims(row, axis))
    m_new = xp.maximum(m, s.max(axis=axis, keepdims=keepdims))
    reference = finite(m_new, xp)
    alpha = exp(m - reference)
    p = exp(s - along(reference))
    l = alpha * l + p.sum(axis=axis, keepdims=keepdims)
    return m_new, l, alpha, p


def step_of_scores(m, l, s, scale):
    """`step` for scores that are not scaled yet: p takes one multiply-add a score.

    s: products of queries and keys, -inf where masked; each row has seen a key. scale:
    that of the logits, above 0, times log2 e, so that m is measured in base two.
    """
    m_new = jnp.maximum(m, scale * s.max(axis=1))
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(scale * s - lax.broadcast_in_dim(m_new, s.shape, [0]))
    l = alpha * l + p.sum(axis=1)
    return m_new, l, alpha, p


def finite(m, xp):
    """m, or 0 where no key was seen yet.

    Any reference is right there, and -inf - (-inf) is NaN.
    """
    return xp.where(m == -xp.inf, 0, m)


def finish(m, l, acc, w=None, along=None, *, log=jnp.log2, log_e=LOG2_E, xp=jnp):
    """(out, lse): acc / l and (m + log l) / log e, 0 and -inf for a row without keys.

    w: what acc is divided by, where that is not l. along: as for `step`, to acc.
    """
    empty = l == 0
    l, w = (xp.where(empty, 1, total) for total in (l, l if w is None else w))
    along = along or (lambda row: row if row.ndim == acc.ndim else row[:, None])
    return acc / along(w), xp.where(empty, -xp.inf, (m + log(l)) / log_e)


# The same for a tile of rows, in NumPy


class State(NamedTuple):
    """m (rows,), l (rows,), acc (rows, H): see the module docstring."""

    m: np.ndarray
    l: np.ndarray
    acc: np.ndarray


def init(rows, head_dim, dtype=np.float64):
    """The state before any key: the neutral element of `merge`."""
    return State(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, head_dim), dtype))


def update(state, s, v):
    """The state after one more tile of keys.

    s: logits of the tile, shape (rows, block_k), -inf where masked.
    v: values of the tile, shape (block_k, H).
    """
    m, l, alpha, p = step(state.m, state.l, s, exp=np.exp, xp=np)
    return State(m, l, alpha[:, None] * state.acc + p @ v)


def merge(a, b):
    """The state of two disjoint sets of keys. Associative and commutative, up to rounding."""
    m = np.maximum(a.m, b.m)
    reference = finite(m, np)
    alpha, beta = np.exp(a.m - reference), np.exp(b.m - reference)
    return State(m, alpha * a.l + beta * b.l, alpha[:, None] * a.acc + beta[:, None] * b.acc)


def finalize(state):
    """(out, lse) of a state, shapes (rows, H) and (rows,).

    A row without keys gives 0 and -inf.
    """
    return finish(*state, log=np.log, log_e=1, xp=np)
