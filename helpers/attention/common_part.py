"""What errors of ds make, in dq, of all that the keys of a row have in common.

The exact gradient ds of a row's logits adds up to dlse, the gradient of its lse, for its weights add up to 1. A kernel
has ds rounded to 16 bits, and made with a delta whose out was summed of rounded p. Such a row adds up to something
else, and in

    dq_i = scale sum_j ds_ij k_j

the difference comes times what all k_j have in common. So the Hopper kernels also add up the ds that they multiply, and

    dq_i = scale (sum_j ds_ij k_j - (sum_j ds_ij - dlse_i) c)

is still exact for exact ds, whatever c is, and feels of the keys k_j - c only.
"""

import jax.numpy as jnp


def common_part(call):
    """c, float32 (B, 1, K, H): in the middle of the keys of a batch entry, but no further from any of them than 0 is.

    For a row may see any of the keys. So c lies between 0 and twice the smallest, and is 0 where they differ in sign.
    """
    is_real = (jnp.arange(call.problem.S) < call.real_lengths()[1][:, None])[..., None, None]
    key = call.key.astype(jnp.float32)
    least = jnp.where(is_real, key, jnp.inf).min(axis=1, keepdims=True)
    most = jnp.where(is_real, key, -jnp.inf).max(axis=1, keepdims=True)
    middle = least / 2 + most / 2
    c = jnp.where(least > 0, jnp.minimum(middle, 2 * least), jnp.where(most < 0, jnp.maximum(middle, 2 * most), 0))
    return jnp.where(jnp.isfinite(c), c, 0)


def mended(dq, excess, call):
    """dq, float32 (B, T, N, H), without what keys have in common times the excess (B, N, T) of rows of ds."""
    c = jnp.repeat(common_part(call), call.problem.group, axis=2)
    too_much = call.problem.scale * (excess.swapaxes(1, 2)[..., None] * c)
    return jnp.where(c == 0, dq, dq - too_much)  # an infinite excess, too, is none without c
