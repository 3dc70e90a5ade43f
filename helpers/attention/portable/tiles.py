"""What the plain kernels share: the choice of tiles, what lies past the end of an array, products, how they run."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

MIN_BLOCK = 16  # the smallest side that is whole products of the tensor cores, 16 x 8 x 16 in 16 bits


class Tiles(NamedTuple):
    """How a kernel is launched: tile sizes, and where Triton compiles it warps of a program and tiles in flight."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# By bytes of an element and padded head_dim: what the 99 KiB of shared memory hold that every GPU from Ampere on has.
DEFAULTS = {
    ("forward", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(32, 32, 4, 2)},
    ("forward", 4): {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(16, 16, 4, 2)},
    ("dkv", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 2), 256: Tiles(32, 32, 4, 1)},
    ("dkv", 4): {64: Tiles(32, 64, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("dq", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    ("dq", 4): {64: Tiles(64, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}


def select_tiles(kernel, problem, **overrides):
    """The `Tiles` of a kernel ("forward", "dkv" or "dq") for a problem: no larger than the sequences need.

    overrides: fields of Tiles to be taken as given, where they are not None.
    """
    tiles = DEFAULTS[kernel, problem.dtype.itemsize][max(64, padded_head_dim(problem.H))]
    tiles = Tiles(*cut_blocks(tiles[:2], (problem.T, problem.S)), *tiles[2:])
    tiles = tiles._replace(**{name: value for name, value in overrides.items() if value is not None})
    check_blocks(tiles.block_q, tiles.block_k)
    return tiles


def how_it_runs(interpret, num_warps, num_stages):
    """The arguments of `pl.pallas_call` that say how a kernel runs: interpreted, or compiled by Triton."""
    if interpret:
        return {"interpret": True}
    from jax.experimental.pallas import triton  # deprecated: whoever interprets does without

    return {"compiler_params": triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)}


def dot(a, b):
    """a @ b with 16-bit operands left as they are and a float32 sum."""
    return lax.dot(a, b, preferred_element_type=jnp.float32)


def real(tile, is_row, H):
    """A tile (block, H') with zeros where there is no such row, and past the H columns of a head.

    What a block has past the end of its array may be anything.
    """
    in_head = jnp.arange(tile.shape[1]) < H
    return jnp.where(is_row[:, None] & in_head[None, :], tile, 0)


def whole(length, block):
    """A length rounded up to whole blocks."""
    return pl.cdiv(length, block) * block


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
