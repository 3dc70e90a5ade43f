"""Gradients of sinks, of bias and of the arrays of score_mod, which need no kernel of their own.

With delta = rowsum(out * do) - dlse and ds as in `portable.backward`, the gradient of logits:

    dsink of a head  = - sum over its queries of exp(sink - lse) delta
    dbias, darrays   = ds, back through the soft cap and score_mod, summed where an array serves all

The second is made from some rows of tables of logits at a time, all keys of all heads, in the order of queries: the
same input gives the same bits each time. It needs memory for `MOST_LOGITS` logits a few times, or for those of one
query of each head if there are more, and for each array the sum in float32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from helpers.attention import scores
from helpers.attention.extras import Extras
from helpers.attention.low_bits import delta_of
from helpers.attention.masking import visible
from helpers.attention.sharding import vary_alike

MOST_LOGITS = 2**24


def gradients_of_extras(call, out, lse, dout, dlse, low=None):
    """`Extras` with the gradients of a call's sinks, bias and score arrays, and None in place of the others.

    out (B, T, N, H), lse (B, N, T) and low are what the forward pass returned, dout and dlse the gradients of the first
    two. A query that sees no key passes what arrives at its lse to its sink, unless it is padding.
    """
    extras, is_float = call.extras, lambda array: jnp.issubdtype(array.dtype, jnp.floating)
    gradients = Extras()
    if extras.sinks is not None:
        sinks = extras.sinks[:, :, None]
        # Of a query that sees no key it is -dlse, or 0 where its lse is -inf.
        delta = delta_of(out, lse, *call.of_seeing_rows(lse, dout), dlse, low)
        gradient = jnp.where(lse == -jnp.inf, dlse, -jnp.exp(sinks - lse) * delta)
        if call.query_lengths is not None:
            gradient = jnp.where(call.is_padding, 0, gradient)
        gradients = gradients._replace(sinks=gradient.sum(axis=(0, 2))[None])
    arrays = extras.score_arrays or ()
    wanted = [array for array in (extras.bias, *arrays) if array is not None and is_float(array)]
    if wanted:
        found = iter(_of_tables(call, wanted, lse, *call.of_seeing_rows(lse, dout, dlse)))
        of = lambda array: next(found) if array is not None and is_float(array) else None
        gradients = gradients._replace(bias=of(extras.bias), score_arrays=tuple(map(of, arrays)) or None)
    return gradients


def _of_tables(call, wanted, lse, dout, dlse):
    """Gradients of the tables `wanted`, those of bias and the score arrays that are float, in that order."""
    problem = call.problem
    rows = max(1, min(problem.T, MOST_LOGITS // (problem.B * problem.N * problem.S)))

    def add(step, sums):
        # The last rows begin where the others end, or before; what was there already is masked.
        start = jnp.minimum(step * rows, problem.T - rows)
        of_rows = lambda array, axis: lax.dynamic_slice_in_dim(array, start, rows, axis)
        cut = lambda table: of_rows(table, 2) if table.shape[2] > 1 else table
        ds, pull_back = _ds_of_rows(
            call, [cut(table) for table in wanted], start, step * rows, of_rows, lse, dout, dlse
        )
        parts = pull_back(ds)

        def sum_of(total, part):
            part = part.astype(jnp.float32)
            if total.shape[2] == 1:
                return total + part
            return lax.dynamic_update_slice_in_dim(total, of_rows(total, 2) + part, start, 2)

        return tuple(map(sum_of, sums, parts))

    zeros = tuple(jnp.zeros(table.shape, jnp.float32) for table in wanted)
    _, *zeros = vary_alike((lse, *zeros))
    sums = lax.fori_loop(0, -(-problem.T // rows), add, tuple(zeros))
    return [total.astype(table.dtype) for total, table in zip(sums, wanted, strict=True)]


def _ds_of_rows(call, tables, start, new, of_rows, lse, dout, dlse):
    """ds (B, N, rows, S) of the rows from start on, 0 before the row new, and how it goes back to the tables there."""
    problem, extras = call.problem, call.extras
    B, N, K, H, S, group = *(getattr(problem, name) for name in "BNKHS"), problem.group
    cut = lambda array, axis: None if array is None else of_rows(array, axis) if array.shape[axis] > 1 else array
    arrays = extras.score_arrays or ()
    part = extras._replace(
        bias=cut(extras.bias, 2),
        mask=cut(extras.mask, 2),
        query_segment_ids=cut(extras.query_segment_ids, 1),
        score_arrays=tuple(cut(array, 2) for array in arrays) or None,
    )
    q, do = (of_rows(array, 1) for array in (call.query, dout))
    rows = q.shape[1]
    by_group = lambda array: array.reshape(B, rows, K, group, H)
    lengths = [
        longest if length is None else length[:, None, None, None]
        for length, longest in ((call.query_lengths, problem.T), (call.key_lengths, S))
    ]
    i = start + jnp.arange(rows, dtype=jnp.int32)
    of_logits, of_visible = scores.whole(problem, part, i)
    seen = visible(i[:, None], jnp.arange(S), problem.band, *lengths) & (i >= new)[:, None]
    if call.hides_keys:
        seen = seen & scores.visible_by(problem, *of_visible)
    is_key = (jnp.arange(S) < lengths[1]).reshape(-1, S, 1, 1)
    k, v = (jnp.where(is_key, array, 0) for array in (call.key, call.value))
    product = lambda a, b: jnp.einsum("btkgh,bskh->bkgts", by_group(a), b, preferred_element_type=jnp.float32)
    s, dp = (product(a, b).reshape(B, N, rows, S) for a, b in ((q, k), (do, v)))

    def logits(*tables):
        given = iter(tables)
        own = lambda array: next(given) if array is not None and jnp.issubdtype(array.dtype, jnp.floating) else array
        bias, arrays = own(part.bias), tuple(map(own, part.score_arrays or ()))
        return scores.logits(problem.scale * s, problem, *of_logits[:4], bias, arrays, seen)

    s, pull_back = jax.vjp(logits, *tables)
    lse, dlse = (of_rows(array, 2)[..., None] for array in (lse, dlse))
    p = jnp.where(seen & (s > -jnp.inf), jnp.exp(s - lse), 0)
    delta = (p * dp).sum(axis=-1, keepdims=True) - dlse
    return p * (dp - delta), pull_back
