"""Attention by its definition: the naive JAX version, and the float64 oracle that the tests trust.

    s = scale q k^T      w = softmax(s)      out = w v      lse = log sum exp s

Gradients of the oracle follow FlashAttention (arXiv 2205.14135), appendix B.2.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helpers.attention import scores
from helpers.attention.low_bits import delta_of
from helpers.attention.masking import sees_some, visible
from helpers.attention.problem import Problem, check_call


def naive_attention(call):
    """Attention with the whole (T, S) matrix of logits in memory, for a checked `Call`.

    Returns out (B, T, N, H) in the dtype of query and lse (B, N, T) float32. Logits and softmax
    are float32; the weights are rounded to the dtype of value for the second product, as
    in `jax.nn.dot_product_attention`.
    """
    call = call.gathered()
    problem = call.problem
    B, T, N, K, H = problem.B, problem.T, problem.N, problem.K, problem.H
    is_query, is_key, seen = what_counts(call)
    # Padding may hold anything, NaN included, and 0 * NaN is NaN: replace it by zeros.
    query = jnp.where(is_query, call.query, 0).reshape(B, T, K, problem.group, H)
    key = jnp.where(is_key, call.key, 0)
    value = jnp.where(is_key, call.value, 0)

    def logits(query):
        s = problem.scale * jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)
        if call.changes_logits:
            of_logits, _ = scores.whole(problem, call.extras)
            s = scores.logits(s.reshape(B, N, T, problem.S), problem, *of_logits, seen.reshape(B, -1, T, problem.S))
            s = s.reshape(B, K, problem.group, T, problem.S)
        return jnp.where(seen, s, -jnp.inf)

    s = logits(query)
    m = s.max(axis=-1, keepdims=True)
    if call.changes_logits:
        is_query &= (m != -jnp.inf).reshape(B, N, T).swapaxes(1, 2)[..., None]
    if problem.score_mod is not None:  # it may hide all keys of a query, whose NaN must not reach them
        s = jnp.where(m == -jnp.inf, -jnp.inf, logits(jnp.where(is_query.reshape(B, T, K, -1, 1), query, 0)))
    if call.extras.sinks is not None:
        sinks = call.extras.sinks.reshape(-1, K, problem.group, 1, 1)
        m = jnp.maximum(m, sinks)
    m = jax.lax.stop_gradient(m)
    m = jnp.where(m == -jnp.inf, 0, m)  # a row without a key: -inf - (-inf) would be NaN
    p = jnp.exp(s - m)
    l = p.sum(axis=-1, keepdims=True)
    if call.extras.sinks is not None:
        l += jnp.exp(sinks - m)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = jnp.einsum("bkgts,bskh->btkgh", (p / l).astype(value.dtype), value, preferred_element_type=jnp.float32)
    lse = jnp.where(empty, -jnp.inf if call.extras.sinks is None else sinks, m + jnp.log(l))
    out = out.astype(problem.dtype).reshape(B, T, N, H)
    # What is put in place is there already, but no gradient that arrives there goes on.
    if call.may_have_blind_rows:
        out = jnp.where(is_query, out, 0)
    lse = lse.reshape(B, N, T)
    if call.extras.sinks is not None and call.query_lengths is not None:
        lse = jnp.where(call.is_padding, jax.lax.stop_gradient(lse), lse)
    return out, lse


def what_counts(call):
    """Which queries (B, T, 1, 1) see a key, which keys (B, S, 1, 1) are no padding, and which of them each query sees.

    The last has shape (B, 1, 1, T, S). Where heads differ, the first has shape (B, T, N, 1), the last (B, K, G, T, S)
    for G query heads of each key head.
    """
    problem = call.problem
    B, T, S = problem.B, problem.T, problem.S
    query_lengths, key_lengths = call.real_lengths()
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
    if not call.hides_keys:
        return is_query, is_key, seen[:, None, None]
    _, of_visible = scores.whole(problem, call.extras)
    seen = seen[:, None] & scores.visible_by(problem, *of_visible)
    is_query &= seen.any(axis=-1).swapaxes(1, 2)[..., None]
    by_group = (1, 1) if seen.shape[1] == 1 else (problem.K, problem.group)
    return is_query, is_key, seen.reshape(B, *by_group, T, S)


def naive_gradients(call, out, lse, dout, dlse, low):
    """(dq, dk, dv) of `naive_attention`, whose results are not needed: it is computed again."""

    def attention(query, key, value):
        return naive_attention(dataclasses.replace(call, query=query, key=key, value=value))

    _, pull_back = jax.vjp(attention, *call.arrays[:3])
    return pull_back((dout, dlse))


def naive_gradients_of_part(call, out, lse, dout, dlse, low):
    """(dq, dk, dv) of a `Call` that has some of the keys only, where out, lse and low are those of all of them.

    The sum of dq over parts that make up the keys is dq, and dk and dv of a part are final. The equations are those
    of `oracle_gradients` with delta = rowsum(out * dout), in float32.
    """
    problem = call.problem
    B, T, N, K, H = problem.B, problem.T, problem.N, problem.K, problem.H
    is_query, is_key, seen = what_counts(call)
    exact = lambda array, is_real: jnp.where(is_real, array.astype(jnp.float32), 0)
    q, do = (exact(array, is_query).reshape(B, T, K, problem.group, H) for array in (call.query, dout))
    k, v = (exact(array, is_key) for array in (call.key, call.value))

    delta = delta_of(out, lse, dout, dlse, low)
    lse, delta = (array.reshape(B, K, problem.group, T, 1) for array in (lse, delta))
    seen &= lse != -jnp.inf
    s = problem.scale * jnp.einsum("btkgh,bskh->bkgts", q, k)
    p = jnp.exp(jnp.where(seen, s, -jnp.inf) - jnp.where(lse == -jnp.inf, 0, lse))
    dp = jnp.einsum("btkgh,bskh->bkgts", do, v)
    ds = jnp.where(seen, p * (dp - delta), 0)
    dq = problem.scale * jnp.einsum("bkgts,bskh->btkgh", ds, k).reshape(B, T, N, H)
    dk = problem.scale * jnp.einsum("bkgts,btkgh->bskh", ds, q)
    dv = jnp.einsum("bkgts,btkgh->bskh", p, do)
    return tuple(gradient.astype(problem.dtype) for gradient in (dq, dk, dv))


def oracle(query, key, value, **arguments):
    """Attention in NumPy float64: the answer that every other implementation is compared with.

    Takes the arrays and keyword arguments of `flash_attention`, but for implementation and return_residual, and
    returns (out, lse) as float64 arrays of shapes (B, T, N, H) and (B, T, N), or without B.
    """
    found = oracle_softmax(query, key, value, arguments)
    out = (found.p @ found.v).transpose(0, 2, 1, 3)
    lse = found.lse.transpose(0, 2, 1)
    return (out, lse) if query.ndim == 4 else (out[0], lse[0])


def oracle_gradients(query, key, value, dout, dlse=None, **arguments):
    """Gradients in NumPy float64 of ``sum(dout * out) + sum(dlse * lse)``.

    dout has the shape of query, dlse the shape of lse. Returns (dq, dk, dv) as float64 arrays of
    the shapes of query, key and value. With p = exp(s - lse) and delta = rowsum(p * dp):
    dv = p^T do, dp = do v^T, ds = p * (dp - delta + dlse), dq = scale ds k, dk = scale ds^T q,
    where ds goes back through soft cap and score_mod first. Those of bias, sinks and score_arrays
    follow, as far as they are given: arrays of their shapes, for score_arrays a tuple.
    """
    found = oracle_softmax(query, key, value, arguments)
    problem, p = found.problem, found.p
    B, T, S, N, K, H = problem.B, problem.T, problem.S, problem.N, problem.K, problem.H
    dlse = np.zeros((B, T, N)) if dlse is None else dlse
    do = np.asarray(dout, np.float64).reshape(B, T, N, H).transpose(0, 2, 1, 3)
    dlse = np.asarray(dlse, np.float64).reshape(B, T, N).transpose(0, 2, 1)[..., None]
    dv = p.swapaxes(-1, -2) @ do
    dp = do @ found.v.swapaxes(-1, -2)
    delta = (p * dp).sum(axis=-1, keepdims=True) - dlse
    ds, of_bias, of_score_arrays = found.pull_back(p * (dp - delta))
    dq = problem.scale * ds @ found.k
    dk = problem.scale * ds.swapaxes(-1, -2) @ found.q
    # Each key/value head serves a group of query heads, so its gradient is their sum.
    dk, dv = (gradient.reshape(B, K, problem.group, S, H).sum(axis=2) for gradient in (dk, dv))
    gradients = [gradient.transpose(0, 2, 1, 3) for gradient in (dq, dk, dv)]
    if query.ndim == 3:
        gradients = [gradient[0] for gradient in gradients]
    if arguments.get("bias") is not None:
        gradients.append(of_bias.reshape(arguments["bias"].shape))
    if arguments.get("sinks") is not None:
        gradients.append(np.where(found.is_query, -found.weight_of_sink * delta, 0).sum(axis=(0, 2, 3)))
    if arguments.get("score_arrays"):
        axes = [axes for _, axes in arguments["score_arrays"]]
        gradients.append(tuple(map(_in_order, of_score_arrays, axes)))
    return tuple(gradients)


class Softmax(NamedTuple):
    """What the oracle knows on its way, float64.

    q (B, N, T, H), k and v (B, N, S, H), logits, -inf where hidden, and p (B, N, T, S), lse (B, N, T), weight_of_sink
    (B, N, T, 1); the problem; is_query, which queries (B, 1, T, 1) are no padding; pull_back(ds) -> gradients of
    scaled products, bias and score arrays.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    logits: np.ndarray
    p: np.ndarray
    lse: np.ndarray
    weight_of_sink: np.ndarray
    problem: Problem
    is_query: np.ndarray
    pull_back: Callable


def oracle_softmax(query, key, value, arguments):
    """The `Softmax` of a call of `flash_attention`."""
    call = check_call(query, key, value, **arguments)
    problem, extras = call.problem, call.extras
    q, k, v = (np.asarray(array, np.float64).transpose(0, 2, 1, 3) for array in (call.query, call.key, call.value))
    query_lengths, key_lengths = map(np.asarray, call.real_lengths())

    is_query = np.arange(problem.T)[None, None, :, None] < query_lengths[:, None, None, None]
    is_key = np.arange(problem.S)[None, None, :, None] < key_lengths[:, None, None, None]
    q = np.where(is_query, q, 0)
    k, v = (np.repeat(np.where(is_key, array, 0), problem.group, axis=1) for array in (k, v))
    seen = _oracle_seen(call, query_lengths, key_lengths)
    s, pull_back = _oracle_logits(call, problem.scale * (q @ k.swapaxes(-1, -2)), seen)
    s = np.where(seen, s, -np.inf)
    sink = np.full((1, 1, 1, 1), -np.inf) if extras.sinks is None else np.asarray(extras.sinks, np.float64)
    sink = sink.reshape(1, -1, 1, 1)
    m = np.maximum(s.max(axis=-1, keepdims=True), sink)
    m = np.where(m == -np.inf, 0, m)
    p = np.exp(s - m)
    l = p.sum(axis=-1, keepdims=True) + np.exp(sink - m)
    empty = l == 0
    l = np.where(empty, 1, l)
    lse = np.where(empty, -np.inf, m + np.log(l))
    weight_of_sink = np.where(empty, 1, np.exp(sink - m) / l)
    return Softmax(q, k, v, s, p / l, lse[..., 0], weight_of_sink, problem, is_query, pull_back)


def _oracle_seen(call, query_lengths, key_lengths):
    """Which keys queries see, for (B, N, T, S)."""
    problem, extras = call.problem, call.extras
    rows, cols = np.arange(problem.T, dtype=np.int32)[:, None], np.arange(problem.S, dtype=np.int32)
    seen = visible(
        rows, cols, problem.band, *(lengths[:, None, None, None] for lengths in (query_lengths, key_lengths))
    )
    if extras.mask is not None:
        seen = seen & np.asarray(extras.mask)
    if extras.query_segment_ids is not None:
        ids, key_ids = np.asarray(extras.query_segment_ids), np.asarray(extras.key_segment_ids)
        seen = seen & (ids[:, None, :, None] == key_ids[:, None, None])
    if problem.mask_mod is not None:
        seen = seen & np.asarray(problem.mask_mod(*_oracle_numbers(problem)))
    return seen


def _oracle_numbers(problem):
    """b, n, i and j as mask_mod and score_mod get them, for (B, N, T, S)."""
    sizes = problem.B, problem.N, problem.T, problem.S
    return [np.arange(size, dtype=np.int32).reshape([-1] + [1] * (3 - axis)) for axis, size in enumerate(sizes)]


def _oracle_logits(call, s, seen):
    """The logits of scaled products, and how a gradient goes back; score_mod is evaluated by JAX in float64."""
    problem, extras = call.problem, call.extras
    tables = extras.score_arrays or ()
    if extras.bias is not None:
        s = s + np.where(seen, np.asarray(extras.bias, np.float64), 0)
    slope = 1
    if problem.score_mod is not None:
        with jax.enable_x64(True):
            wide = [
                jnp.asarray(table, jnp.float64 if jnp.issubdtype(table.dtype, jnp.floating) else None)
                for table in tables
            ]
            numbers = [jnp.asarray(number) for number in _oracle_numbers(problem)]
            of_mod = lambda s, *tables: problem.score_mod(s, *numbers, *tables)
            s, pull_back_mod = jax.vjp(of_mod, jnp.asarray(s), *wide)
        s = np.asarray(s)
    if problem.soft_cap is not None:
        ratio = np.tanh(s / problem.soft_cap)
        s = problem.soft_cap * ratio
        slope = 1 - ratio**2

    def pull_back(ds):
        ds, of_tables = slope * ds, ()
        if problem.score_mod is not None:
            with jax.enable_x64(True):
                ds, *of_tables = (np.asarray(gradient) for gradient in pull_back_mod(jnp.asarray(ds)))
        of_bias = None
        if extras.bias is not None:
            broadcast = tuple(axis for axis, size in enumerate(extras.bias.shape) if size != ds.shape[axis])
            of_bias = ds.sum(axis=broadcast, keepdims=True)
        return ds, of_bias, of_tables

    return s, pull_back


def _in_order(table, axes):
    """A table (B, N, T, S), some of which are 1, with the axes that it was given with, in their order."""
    inner = "".join(axis for axis in "bnij" if axis in axes)
    own = table.reshape([size for axis, size in zip("bnij", table.shape, strict=True) if axis in axes])
    return own.transpose([inner.index(axis) for axis in axes])
