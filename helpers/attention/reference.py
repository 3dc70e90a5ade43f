"""Attention by its definition: the naive JAX version, and the float64 oracle that the tests trust.

    s = scale q k^T      w = softmax(s)      out = w v      lse = log sum exp s

Gradients of the oracle follow FlashAttention (arXiv 2205.14135), appendix B.2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from helpers.attention.masking import sees_some, visible
from helpers.attention.problem import check_call


def naive_attention(call):
    """Attention with the whole (T, S) matrix of logits in memory, for a checked `Call`.

    Returns out (B, T, N, H) in the dtype of query and lse (B, N, T) float32. Logits and softmax
    are float32; the weights are rounded to the dtype of value for the second product, as
    in `jax.nn.dot_product_attention`.
    """
    call, problem = call.gathered(), call.problem
    B, T, N, K, H = problem.B, problem.T, problem.N, problem.K, problem.H
    is_query, is_key, seen = what_counts(call)
    # Padding may hold anything, NaN included, and 0 * NaN is NaN: replace it by zeros.
    query = jnp.where(is_query, call.query, 0).reshape(B, T, K, problem.group, H)
    key = jnp.where(is_key, call.key, 0)
    value = jnp.where(is_key, call.value, 0)

    s = problem.scale * jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)
    s = jnp.where(seen, s, -jnp.inf)

    m = jax.lax.stop_gradient(s.max(axis=-1, keepdims=True))
    m = jnp.where(m == -jnp.inf, 0, m)  # a row without a key: -inf - (-inf) would be NaN
    p = jnp.exp(s - m)
    l = p.sum(axis=-1, keepdims=True)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = jnp.einsum("bkgts,bskh->btkgh", (p / l).astype(value.dtype), value, preferred_element_type=jnp.float32)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))
    out = out.astype(problem.dtype).reshape(B, T, N, H)
    if call.may_have_blind_rows:
        out = jnp.where(is_query, out, 0)  # what it is already, but no gradient that arrives there goes on
    return out, lse.reshape(B, N, T)


def what_counts(call):
    """Which queries (B, T, 1, 1) see a key, which keys (B, S, 1, 1) are no padding, and which of them each query sees.

    The last has shape (B, 1, 1, T, S).
    """
    problem = call.problem
    B, T, S = problem.B, problem.T, problem.S
    query_lengths = jnp.full((B,), T) if call.query_lengths is None else call.query_lengths
    key_lengths = jnp.full((B,), S) if call.key_lengths is None else call.key_lengths
    of_entry = lambda lengths: lengths[:, None, None, None]
    rows = jnp.arange(T)[None, :, None, None]
    is_query = sees_some(rows, problem.band, of_entry(query_lengths), of_entry(key_lengths))
    is_key = jnp.arange(S)[None, :, None, None] < of_entry(key_lengths)
    seen = visible(
        jnp.arange(T)[None, :, None],
        jnp.arange(S)[None, None, :],
        problem.band,
        query_lengths[:, None, None],
        key_lengths[:, None, None],
    )
    return is_query, is_key, seen[:, None, None]


def naive_gradients(call, out, lse, dout, dlse):
    """(dq, dk, dv) of `naive_attention`, whose out and lse are not needed: it is computed again."""

    def attention(query, key, value):
        return naive_attention(dataclasses.replace(call, query=query, key=key, value=value))

    _, pull_back = jax.vjp(attention, *call.arrays[:3])
    return pull_back((dout, dlse))


def naive_gradients_of_part(call, out, lse, dout, dlse):
    """(dq, dk, dv) of a `Call` that has some of the keys only, where out and lse are those of all of them.

    The sum of dq over parts that make up the keys is dq, and dk and dv of a part are final. The equations are those
    of `oracle_gradients` with delta = rowsum(out * dout), in float32.
    """
    problem = call.problem
    B, T, N, K, H = problem.B, problem.T, problem.N, problem.K, problem.H
    is_query, is_key, seen = what_counts(call)
    exact = lambda array, is_real: jnp.where(is_real, array.astype(jnp.float32), 0)
    q, o, do = (exact(array, is_query).reshape(B, T, K, problem.group, H) for array in (call.query, out, dout))
    k, v = (exact(array, is_key) for array in (call.key, call.value))

    lse, dlse = (array.reshape(B, K, problem.group, T, 1) for array in (lse, dlse))
    seen &= lse != -jnp.inf
    s = problem.scale * jnp.einsum("btkgh,bskh->bkgts", q, k)
    p = jnp.exp(jnp.where(seen, s, -jnp.inf) - jnp.where(lse == -jnp.inf, 0, lse))
    dp = jnp.einsum("btkgh,bskh->bkgts", do, v)
    delta = jnp.einsum("btkgh,btkgh->bkgt", o, do)[..., None] - dlse
    ds = jnp.where(seen, p * (dp - delta), 0)
    dq = problem.scale * jnp.einsum("bkgts,bskh->btkgh", ds, k).reshape(B, T, N, H)
    dk = problem.scale * jnp.einsum("bkgts,btkgh->bskh", ds, q)
    dv = jnp.einsum("bkgts,btkgh->bskh", p, do)
    return tuple(gradient.astype(problem.dtype) for gradient in (dq, dk, dv))


def oracle(query, key, value, **arguments):
    """Attention in NumPy float64: the answer that every other implementation is compared with.

    Takes the arrays and keyword arguments of `flash_attention` and returns (out, lse) as float64
    arrays of shapes (B, T, N, H) and (B, T, N), or without B.
    """
    _, _, value_heads, p, lse, _ = oracle_softmax(query, key, value, arguments)
    out = (p @ value_heads).transpose(0, 2, 1, 3)
    lse = lse.transpose(0, 2, 1)
    return (out, lse) if query.ndim == 4 else (out[0], lse[0])


def oracle_gradients(query, key, value, dout, dlse=None, **arguments):
    """Gradients in NumPy float64 of ``sum(dout * out) + sum(dlse * lse)``.

    dout has the shape of query, dlse the shape of lse. Returns (dq, dk, dv) as float64 arrays of
    the shapes of query, key and value. With p = exp(s - lse) and delta = rowsum(p * dp):
    dv = p^T do, dp = do v^T, ds = p * (dp - delta + dlse), dq = scale ds k, dk = scale ds^T q.
    """
    q, k, v, p, _, problem = oracle_softmax(query, key, value, arguments)
    B, T, S, N, K, H = problem.B, problem.T, problem.S, problem.N, problem.K, problem.H
    do = np.asarray(dout, np.float64).reshape(B, T, N, H).transpose(0, 2, 1, 3)
    dv = p.swapaxes(-1, -2) @ do
    dp = do @ v.swapaxes(-1, -2)
    delta = (p * dp).sum(axis=-1, keepdims=True)
    ds = p * (dp - delta)
    if dlse is not None:
        ds += p * np.asarray(dlse, np.float64).reshape(B, T, N).transpose(0, 2, 1)[..., None]
    dq = problem.scale * ds @ k
    dk = problem.scale * ds.swapaxes(-1, -2) @ q
    # Each key/value head serves a group of query heads, so its gradient is their sum.
    dk, dv = (gradient.reshape(B, K, problem.group, S, H).sum(axis=2) for gradient in (dk, dv))
    dq, dk, dv = (gradient.transpose(0, 2, 1, 3) for gradient in (dq, dk, dv))
    return (dq, dk, dv) if query.ndim == 4 else (dq[0], dk[0], dv[0])


def oracle_softmax(query, key, value, arguments):
    """q (B, N, T, H), k and v (B, N, S, H), p (B, N, T, S), lse (B, N, T), all float64; and the problem."""
    call = check_call(query, key, value, **arguments)
    problem = call.problem
    q, k, v = (np.asarray(array, np.float64).transpose(0, 2, 1, 3) for array in (call.query, call.key, call.value))
    query_lengths = np.full(problem.B, problem.T) if call.query_lengths is None else np.asarray(call.query_lengths)
    key_lengths = np.full(problem.B, problem.S) if call.key_lengths is None else np.asarray(call.key_lengths)

    q = np.where(np.arange(problem.T)[None, None, :, None] < query_lengths[:, None, None, None], q, 0)
    is_key = np.arange(problem.S)[None, None, :, None] < key_lengths[:, None, None, None]
    k, v = (np.repeat(np.where(is_key, array, 0), problem.group, axis=1) for array in (k, v))
    seen = visible(
        np.arange(problem.T)[None, :, None],
        np.arange(problem.S)[None, None, :],
        problem.band,
        query_lengths[:, None, None],
        key_lengths[:, None, None],
    )[:, None]
    s = np.where(seen, problem.scale * (q @ k.swapaxes(-1, -2)), -np.inf)
    m = s.max(axis=-1, keepdims=True)
    m = np.where(m == -np.inf, 0, m)
    p = np.exp(s - m)
    l = p.sum(axis=-1, keepdims=True)
    empty = l == 0
    l = np.where(empty, 1, l)
    lse = np.where(empty, -np.inf, m + np.log(l))
    return q, k, v, p / l, lse[..., 0], problem
