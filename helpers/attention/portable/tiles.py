"""What the portable kernels share: the choice of tiles, the padded head, products and powers of tiles."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from helpers.attention import tables

LOG2_E = math.log2(math.e)
MIN_BLOCK = 16  # the smallest side that a tensor core product accepts


class Tiles(NamedTuple):
    """How a kernel is launched: tile sizes, and on a GPU warps of a program and tiles in flight."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# For cards without a table of their own, by bytes of an element and padded head_dim: smaller than those
# of an H200's table, for cards with less shared memory. The tuner finds better ones.
DEFAULTS = {
    ("forward", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(32, 32, 4, 2)},
    ("forward", 4): {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(16, 16, 4, 2)},
    ("dkv", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 2), 256: Tiles(32, 32, 4, 1)},
    ("dkv", 4): {64: Tiles(32, 64, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("dq", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    ("dq", 4): {64: Tiles(64, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}


def select_tiles(kernel, problem, **overrides):
    """The `Tiles` of a kernel ("forward", "dkv" or "dq") for a problem.

    From the tuner's table of this card where there is one, otherwise `DEFAULTS`; no larger than the
    sequences need. overrides: fields of Tiles to be taken as given, where they are not None.
    """
    itemsize, head_padded = problem.dtype.itemsize, max(64, padded_head_dim(problem.H))
    tuned = tables.rows_by(tables.this_card(), "tiles", "kernel", "itemsize", "head_padded", "is_causal")
    row = tuned.get((kernel, itemsize, head_padded, problem.band.right == 0))
    tiles = Tiles(*(row[name] for name in Tiles._fields)) if row else DEFAULTS[kernel, itemsize][head_padded]
    tiles = Tiles(*cut_blocks(tiles[:2], (problem.T, problem.S)), *tiles[2:])
    tiles = tiles._replace(**{name: value for name, value in overrides.items() if value is not None})
    check_blocks(tiles.block_q, tiles.block_k)
    return tiles


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


def exp2(x, interpret):
    """2**x of a float32 array, on a GPU by its instruction for that, `ex2.approx.ftz`.

    It has a relative error of 2**-22 and gives 0 where the result is below 2**-126. jnp.exp2 would add
    three instructions to each, to be exact there too, and a weight that small adds nothing to a row.
    """
    if interpret:
        return jnp.exp2(x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (result,) = plt.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )
    return result


def check_blocks(block_q, block_k):
    """Raise ValueError unless both block sizes are powers of two of at least 16."""
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if not isinstance(block, int) or block < MIN_BLOCK or block & (block - 1):
            raise ValueError(f"{name} must be a power of two of at least {MIN_BLOCK}, got {block!r}")


def length_of(length_ref, longest):
    """How many positions are real: a static length, or the one that a ref holds, cut to the array."""
    return longest if length_ref is None else jnp.minimum(length_ref[...], longest)
