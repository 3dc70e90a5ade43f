"""What errors of ds make, in dq, of all that the keys of a row have in common.

The exact gradient ds of a row's logits adds up to dlse, the gradient of its lse, for its weights add up to 1. A kernel
has ds rounded to 16 bits, and made with a delta whose out was summed of rounded p. Such a row adds up to something
else, and in

    dq_i = scale sum_j ds_ij k_j

the difference comes times what all k_j have in common. So the Hopper kernels also add up the ds that they multiply, and

    dq_i = scale (sum_j ds_ij k_j - (sum_j ds_ij - dlse_i) c)

is still exact for exact ds, whatever c is, and feels of the keys k_j - c only. c is a mean of keys: of each segment by
itself, for a row sees none of another.
"""

import jax
import jax.numpy as jnp
import numpy as np

SEGMENTS = 64  # those whose numbers leave the same rest by it share one c
SAMPLES, SAMPLES_OF_SEGMENTS = 32, 512  # keys that stand for all
LARGE = 4  # standard deviations: a smaller mean does little harm, and rows that see few of the keys may have another


def common_part(call):
    """c, float32 (B, 1, K, H), or with segments (B, SEGMENTS, K, H): 0 in a channel whose mean is not `LARGE`."""
    key, ids = call.key, call.extras.key_segment_ids
    B, S = key.shape[:2]
    count = min(S, SAMPLES if ids is None else SAMPLES_OF_SEGMENTS)
    lengths = call.real_lengths()[1][:, None]
    place = np.arange(count)
    places = jnp.broadcast_to(lengths // count * place + lengths % count * place // count, (B, count))
    groups = jnp.zeros_like(places)
    if ids is not None:
        groups = _group(jnp.take_along_axis(jnp.broadcast_to(ids, (B, S)), places, axis=1))
    is_of = (groups[..., None] == jnp.arange(1 if ids is None else SEGMENTS)) & (lengths > 0)[..., None]
    some = jnp.take_along_axis(key, places[..., None, None], axis=1).astype(jnp.float32)
    some = jnp.where((lengths > 0)[..., None, None], some, 0)
    counts = is_of.sum(axis=1)[..., None, None]
    means = jnp.einsum("bsg,bskh->bgkh", is_of.astype(jnp.float32), some, precision="highest") / jnp.maximum(counts, 1)
    squares = (some**2).sum(axis=1) - (counts * means**2).sum(axis=1)
    variance = squares / jnp.maximum(counts.sum(axis=1) - (counts > 0).sum(axis=1), 1)
    return jnp.where(means**2 > LARGE**2 * variance[:, None], means, 0)  # 0 for NaN, too


def _group(ids):
    return ids & (SEGMENTS - 1)


def mended(dq, excess, call):
    """dq, float32 (B, T, N, H), without what keys have in common times the excess (B, N, T) of rows of ds."""
    problem, ids, c = call.problem, call.extras.query_segment_ids, common_part(call)
    if ids is not None:
        ids = jnp.broadcast_to(ids, (problem.B, problem.T))
        c = jax.vmap(lambda table, ids: table[_group(ids)])(c, ids)
    return dq - problem.scale * excess.swapaxes(1, 2)[..., None] * jnp.repeat(c, problem.group, axis=2)
