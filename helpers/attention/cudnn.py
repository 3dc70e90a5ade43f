"""cuDNN's attention, which `jax.nn` calls: what it can serve as `flash_attention` promises, and the call."""

import jax
import jax.numpy as jnp

from helpers.attention.differentiate import reverse_mode_only
from helpers.attention.reference import what_counts


def why_not(call, return_residual):
    """Why cuDNN cannot keep the contract of `flash_attention` on every GPU, or None where it can."""
    problem = call.problem
    right = problem.band.right
    if problem.H % 8 or problem.H > 128:
        return f"it takes head_dim in multiples of 8, on every GPU up to 128, and this is {problem.H}"
    if (right is not None and right != 0) or (problem.band.left is not None and right is None):
        return "it takes a local window only with nothing to the right"
    if problem.band.left is not None and problem.T > problem.S:
        return f"with a local window it takes no more queries than keys, not {problem.T} and {problem.S}"
    if problem.scale <= 0:
        return f"it takes a positive scale only, and this is {problem.scale}"
    return "jax.nn rounds its lse to the dtype of key and stops its gradient" if return_residual else None


def attention(call):
    """(out, None) of a checked `Call`."""
    band = call.problem.band
    arrays = query, key, value = call.arrays[:3]
    is_query, is_key, _ = what_counts(call)
    if call.may_have_blind_rows:
        arrays = jnp.where(is_query, query, 0), jnp.where(is_key, key, 0), jnp.where(is_key, value, 0)
    out = jax.nn.dot_product_attention(
        *map(reverse_mode_only, arrays),
        scale=call.problem.scale,
        is_causal=band.right == 0,
        query_seq_lengths=call.query_lengths,
        key_value_seq_lengths=call.key_lengths,
        local_window_size=None if band.left is None else (band.left, 0),
        implementation="cudnn",
    )
    return jnp.where(is_query, out, 0) if call.may_have_blind_rows else out, None
