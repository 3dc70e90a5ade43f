"""What the portable kernels share: the choice of tiles, the padded head, products and powers of tiles."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention import tables
from helpers.attention.device import compute_capability, shared_memory

LOG2_E = math.log2(math.e)
MIN_BLOCK = 16  # the smallest side that is whole products of the tensor cores, 16 x 8 x 16 in 16 bits


class Tiles(NamedTuple):
    """How a kernel is launched: tile sizes, and on a GPU warps of a program and tiles in flight."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class Gpu(NamedTuple):
    """What decides which tiles a GPU gets: its name, compute capability, and bytes of shared memory of a program."""

    name: str | None
    capability: tuple[int, int]
    shared_memory: int


# For GPUs without a table of their own, by bytes of an element and padded head_dim: no larger than those
# of an H200's table, for GPUs with less shared memory. The tuner finds better ones.
DEFAULTS = {
    ("forward", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(32, 32, 4, 2)},
    ("forward", 4): {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(16, 16, 4, 2)},
    ("dkv", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 2), 256: Tiles(32, 32, 4, 1)},
    ("dkv", 4): {64: Tiles(32, 64, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("dq", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    ("dq", 4): {64: Tiles(64, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}


def select_tiles(kernel, problem, gpu=None, **overrides):
    """The `Tiles` of a kernel ("forward", "dkv" or "dq") for a problem.

    From the tuner's table of the GPU where there is one, otherwise `DEFAULTS`; no larger than the
    sequences need and shared memory holds. gpu: a `Gpu`, by default the one that computes.
    overrides: fields of Tiles to be taken as given, where they are not None.
    """
    gpu = gpu or this_gpu()
    itemsize, head_padded = problem.dtype.itemsize, max(64, padded_head_dim(problem.H))
    tuned = tables.rows_by(gpu.name, "tiles", "kernel", "itemsize", "head_padded", "is_causal")
    row = tuned.get((kernel, itemsize, head_padded, problem.band.right == 0))
    tiles = Tiles(*(row[name] for name in Tiles._fields)) if row else DEFAULTS[kernel, itemsize][head_padded]
    tiles = Tiles(*cut_blocks(tiles[:2], (problem.T, problem.S)), *tiles[2:])
    tiles = fitting(kernel, tiles, problem, gpu)
    tiles = tiles._replace(**{name: value for name, value in overrides.items() if value is not None})
    check_blocks(tiles.block_q, tiles.block_k)
    return tiles


def this_gpu():
    """The `Gpu` that computes; its name is None where that is no GPU."""
    return Gpu(tables.this_gpu(), compute_capability(), shared_memory())


def fitting(kernel, tiles, problem, gpu):
    """The tiles, or, where shared memory would not hold them, the next smaller ones that it holds."""
    while shared_bytes(kernel, tiles, problem, gpu.capability) > gpu.shared_memory:
        if tiles.num_stages > 1:
            tiles = tiles._replace(num_stages=tiles.num_stages - 1)
        elif tiles.block_q >= tiles.block_k:
            tiles = tiles._replace(block_q=tiles.block_q // 2)
        else:
            tiles = tiles._replace(block_k=tiles.block_k // 2)
    return tiles


def shared_bytes(kernel, tiles, problem, capability):
    """At most how many bytes of shared memory Triton gives a kernel ("forward", "decode", "dkv" or "dq").

    Room for the operands that stay, for as many of those that stream by as there are stages, and for p and ds.
    It may need less, where some of them stay in registers. `make gpu-compile` compares this bound with what the
    compiler reports.
    """
    itemsize, head_padded = problem.dtype.itemsize, padded_head_dim(problem.H)
    queries, keys = (block * head_padded * itemsize for block in (tiles.block_q, tiles.block_k))
    table = tiles.block_q * tiles.block_k * itemsize
    barriers = 1024
    copies = tiles.num_stages
    if kernel in ("forward", "decode"):
        # p stays in registers, unless it is float32 and its product is not the tensor cores', or its few rows are
        # spread over warps by their keys.
        return queries + (table if itemsize == 4 or kernel == "decode" else 0) + copies * 2 * keys + barriers
    # Two kinds of instruction may want an operand in two layouts: on Blackwell always, on Hopper where one side of a
    # tile is too short for wgmma and nothing is ahead. And the loop of a single tile of queries may be unrolled.
    if capability[0] in (10, 11) or (capability[0] == 9 and (tiles.num_stages == 1 or problem.T <= tiles.block_q)):
        copies += 1
    stay, stream = (queries, keys) if kernel == "dq" else (keys, queries)
    return 2 * stay + copies * 2 * stream + 2 * table + barriers


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
    from jax.experimental.pallas import triton as plt  # here, for JAX will lose it, and all kernels read this module

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
