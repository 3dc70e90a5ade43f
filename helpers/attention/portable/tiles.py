"""What the portable kernels share: block sizes, the padded head, the product of two tiles."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LOG2_E = math.log2(math.e)
MIN_BLOCK = 16  # the smallest side that a tensor core product accepts


def dot(a, b):
    """a @ b with 16-bit operands left as they are and a float32 sum."""
    return lax.dot(a, b, preferred_element_type=jnp.float32)


def padded_head_dim(H):
    """head_dim rounded up to what a block may have on a GPU: a power of two of at least 16."""
    return max(MIN_BLOCK, pl.next_power_of_2(H))


def cut_blocks(blocks, lengths):
    """Blocks no larger than their sequences need."""
    needed = (max(MIN_BLOCK, pl.next_power_of_2(length)) for length in lengths)
    return tuple(min(block, need) for block, need in zip(blocks, needed, strict=True))


def check_blocks(block_q, block_k):
    """Raise ValueError unless both block sizes are powers of two of at least 16."""
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if not isinstance(block, int) or block < MIN_BLOCK or block & (block - 1):
            raise ValueError(f"{name} must be a power of two of at least {MIN_BLOCK}, got {block!r}")


def length_of(length_ref, longest):
    """How many positions are real: a static length, or the one that a ref holds, cut to the array."""
    return longest if length_ref is None else jnp.minimum(length_ref[...], longest)
