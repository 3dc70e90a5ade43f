"""The low-order bits of a float32 result that is returned in 16 bits.

A kernel computes out in float32 and returns it rounded. Its backward pass needs more of it, for delta = rowsum(out *
do) is large where values have a part in common, and an error of delta comes back in dq, times what the keys have in
common. So the forward pass of a gradient keeps another 16 bits: how many float32 numbers there are from the rounded
out to the exact one,

    low = bits(exact) - bits(float32(rounded))        at most 2^15 in size for bfloat16, 2^12 for float16 from 2^-14 on

where bits are read as integers, which for numbers of one sign are in the order of their sizes.
"""

import jax.numpy as jnp
from jax import lax


def low_bits(exact, rounded):
    """int16 array, from float32 `exact` and the same rounded to 16 bits."""
    bits, start = (lax.bitcast_convert_type(array, jnp.int32) for array in (exact, rounded.astype(jnp.float32)))
    return jnp.minimum(bits - start, 2**15 - 1).astype(jnp.int16)  # 2^15 itself, a tie, is one float32 number less


def rounded_with_low_bits(exact, dtype):
    """(float32 `exact` in 16 bits, its `low_bits`), outside of kernels."""
    # XLA for GPUs would take away a conversion and the way back, and so the difference, unless something is between.
    rounded = lax.optimization_barrier(exact.astype(dtype))
    return rounded, low_bits(exact, rounded)


def with_low_bits(rounded, low):
    """The float32 array whose `low_bits` these are; where low is None, `rounded` in float32.

    Of float16 numbers below 2^-17 the bits do not fit; there it is about as far off as `rounded`.
    """
    rounded = rounded.astype(jnp.float32)
    if low is None:
        return rounded
    bits = lax.bitcast_convert_type(rounded, jnp.int32) + low.astype(jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def delta_of(out, lse, dout, dlse, low=None):
    """delta = rowsum(out * dout) - dlse, (B, N, T) float32.

    out, dout: (B, T, N, H); lse, dlse: (B, N, T), lse None where each row sees a key; low: the `low_bits` of out or
    None.
    """
    exact = with_low_bits(out, low)
    delta = (exact * dout.astype(jnp.float32)).sum(axis=-1).swapaxes(1, 2) - dlse
    # A row that sees no key passes no gradient, whatever arrives at its lse of -inf.
    return delta if lse is None else jnp.where(lse == -jnp.inf, 0, delta)
