"""From products to logits: what is added to them, what changes them, and what hides them.

For batch entry b, head n, query i and key j, of which a caller may give any:

    s = scale q k^T + bias
    s = score_mod(s, b, n, i, j, *score_arrays)
    s = c tanh(s / c)                               c is the soft cap
    s = -inf                                        unless band, lengths, mask, segments and mask_mod all let i see j
    l = sum over j of exp(s) + exp(sink)            a sink takes weight and gives no value; it is not capped or hidden

The first three are `logits`, and the fourth, but for band and lengths, is `visible_by`. They serve whole tables and the
tiles of a kernel.
"""

import jax.numpy as jnp


def logits(s, problem, b, n, i, j, bias=None, score_arrays=None, seen=True):
    """The logits of scaled products s, float32.

    b, n, i, j: int32 that broadcasts to s, and so do the tables. seen: booleans, where the
    bias is added; its NaN elsewhere reaches no derivative.
    """
    if bias is not None:
        s = s + (bias if seen is True else jnp.where(seen, bias, 0)).astype(s.dtype)
    if problem.score_mod is not None:
        s = problem.score_mod(s, b, n, i, j, *(score_arrays or ()))
    if problem.soft_cap is not None:
        s = problem.soft_cap * jnp.tanh(s / problem.soft_cap)
    return s


def changes_logits(problem, extras):
    """Whether logits are more than scaled products. extras: `Extras`, of arrays or refs."""
    return extras.bias is not None or problem.soft_cap is not None or problem.score_mod is not None


def visible_by(problem, b, n, i, j, mask=None, query_ids=None, key_ids=None):
    """Booleans that broadcast to (…, T, S): whether all of these let a query see a key.

    The arrays broadcast to that too; at least one of mask, both ids and mask_mod is there.
    """
    seen = []
    if mask is not None:
        seen.append(mask)
    if query_ids is not None:
        seen.append(query_ids == key_ids)
    if problem.mask_mod is not None:
        seen.append(problem.mask_mod(b, n, i, j))
    first, *others = seen
    for other in others:
        first = first & other
    return first


def whole(problem, extras, i=None):
    """(`logits`' arguments after problem, those of `visible_by`) for whole tables, (B, N, T, S), or queries i only.

    extras: the `Extras` of a call; with i, those of these queries.
    """
    b = jnp.arange(problem.B, dtype=jnp.int32) if extras.batch is None else extras.batch
    n = jnp.arange(problem.N, dtype=jnp.int32)[None] if extras.heads is None else extras.heads
    i = jnp.arange(problem.T, dtype=jnp.int32) if i is None else i
    j = jnp.arange(problem.S, dtype=jnp.int32)
    place = b[:, None, None, None], n[:, :, None, None], i[:, None], j
    query_ids, key_ids = extras.query_segment_ids, extras.key_segment_ids
    if query_ids is not None:
        query_ids, key_ids = query_ids[:, None, :, None], key_ids[:, None, None]
    return (*place, extras.bias, extras.score_arrays), (*place, extras.mask, query_ids, key_ids)
