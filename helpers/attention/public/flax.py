"""`flash_attention` in Flax: `nnx.MultiHeadAttention(…, attention_fn=attention)`. Flax itself is not imported."""

import contextlib
import math

import jax
import jax.numpy as jnp

from helpers.attention.public.api import flash_attention


def attention(
    query, key, value, bias=None, mask=None, *, dropout_rng=None, dropout_rate=0.0, broadcast_dropout=True,
    deterministic=False, dtype=None, precision=None, module=None, **options
):  # fmt: skip
    """softmax(query key^T / sqrt(H)) value, called as `flax.nnx.dot_product_attention` is.

    query: (..., T, N, H); key, value: (..., S, K, H), with any batch axes; they are promoted to dtype, or to the one
    that they have in common. bias, mask: broadcast to (..., N, T, S); a key is seen where mask is not 0, be it of
    booleans or, as `nnx.make_causal_mask` and `nnx.make_attention_mask` make it, of float32. options: others of
    `flash_attention` but return_residual: is_causal, which needs no mask, or by `functools.partial` implementation.

    Returns out (..., T, N, H). A query that sees no key gets zeros, where Flax gives the mean of all values.

    Raises NotImplementedError for dropout that is active and for a module that asks for the weights, ValueError for a
    precision that is none of `jax.lax.Precision`; otherwise as `flash_attention` does.
    """
    if dropout_rate > 0 and not deterministic:
        raise NotImplementedError(f"dropout_rate must be 0, or deterministic True, got {dropout_rate}")
    if module is not None:
        raise NotImplementedError("sow_weights must be False: no table of weights is made")
    batch = query.shape[:-3]
    if not batch == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"key and value must have the batch axes of query, {batch}, got {key.shape}, {value.shape}")

    def flat(array):
        if array is None or len(batch) < 2:
            return array
        array = array.reshape((1,) * (3 - array.ndim) + array.shape)
        return jnp.broadcast_to(array, (*batch, *array.shape[-3:])).reshape(math.prod(batch), *array.shape[-3:])

    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    arrays = (flat(array.astype(dtype)) for array in (query, key, value))
    mask = None if mask is None else mask.astype(bool)
    exactly = contextlib.nullcontext()
    if precision is not None:
        exactly = jax.default_matmul_precision(jax.lax.Precision(precision).name.lower())
    with exactly:
        return flash_attention(*arrays, flat(bias), flat(mask), **options).reshape(query.shape)
