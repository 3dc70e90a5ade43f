"""The running state of a softmax-weighted sum, in NumPy: what one pass over the keys must remember.

A row of logits arrives in pieces. The state keeps, for the keys seen so far,

    m    the largest logit
    l    the sum of exp(s - m)
    acc  the sum of exp(s - m) v

so that out = acc / l and lse = m + log l at any time. Milakov and Gimelshein (arXiv 1805.02867)
gave the recurrence for (m, l); FlashAttention (arXiv 2205.14135) carries acc along, as acc / l.
"""

from typing import NamedTuple

import numpy as np


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
    m_new = np.maximum(state.m, s.max(axis=-1))
    reference = _finite(m_new)
    alpha = np.exp(state.m - reference)
    p = np.exp(s - reference[:, None])
    l = alpha * state.l + p.sum(axis=-1)
    acc = alpha[:, None] * state.acc + p @ v
    return State(m_new, l, acc)


def merge(a, b):
    """The state of two disjoint sets of keys. Associative and commutative, up to rounding."""
    m = np.maximum(a.m, b.m)
    reference = _finite(m)
    alpha, beta = np.exp(a.m - reference), np.exp(b.m - reference)
    return State(m, alpha * a.l + beta * b.l, alpha[:, None] * a.acc + beta[:, None] * b.acc)


def finalize(state):
    """(out, lse) of a state, shapes (rows, H) and (rows,).

    A row without keys gives 0 and -inf.
    """
    empty = state.l == 0
    l = np.where(empty, 1, state.l)
    lse = np.where(empty, -np.inf, state.m + np.log(l))
    return state.acc / l[:, None], lse


def _finite(m):
    """m, or 0 where no key was seen yet.

    Any reference is right there, and -inf - (-inf) is NaN.
    """
    return np.where(m == -np.inf, 0, m)
