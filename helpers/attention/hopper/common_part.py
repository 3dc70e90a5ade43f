"""What all keys of a head have in common, taken off them ahead of the Hopper backward pass.

Softmax does not feel it where one vector c is taken off all keys. Each logit of a query loses the same number, and

    p_ij = exp2(scale L q_i (k_j - c) - (L lse_i - scale L q_i c))        L = log2(e)
    dq_i = scale (sum_j ds_ij (k_j - c) + dlse_i c)

for exact rows of ds add up to dlse. A kernel has ds rounded to 16 bits, and made with a delta whose out was summed of
rounded p. Its rows add up to something else, and dq is off by the difference times what the keys have in common: c at
most, and without c all of it.

Here k - c is exact, and no larger than k, so that no row is worse off, whichever keys it sees. c lies in the middle of
the keys, or at twice the smallest if that is nearer to 0, and is 0 in channels in which keys differ in sign. And it is
a multiple of the distance of two neighbouring numbers near the largest key: k - c is then one of neighbours near k.

Where keys differ in sign in each channel, their first tile nearly always says so. Only where it does not, the kernel
reads all keys of the head, and the queries. Meanwhile TMA writes the zeros that a fused kernel adds dq to, which takes
longer.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.ptx import SWIZZLED
from helpers.attention.hopper.ring import Ring
from helpers.attention.hopper.warpgroup import COLUMNS, MATRIX, ROWS
from helpers.attention.online_softmax import LOG2_E

WIDTH = 64  # channels at a time
HEIGHT = 64  # positions of a tile
SLOTS = 4


class Refs(NamedTuple):
    """Arrays of `backward.Gmem`, and key_lengths (B,) or None.

    lse: L lse, and after the kernel L lse - scale L q c. c: (B, K, H + 8), in the dtype of keys; behind c itself, 0 if
    nothing has to be taken off, else 1. zeros: (rows, H) float32, or None.
    """

    q: jax.Array
    k: jax.Array
    key_lengths: jax.Array | None
    lse: jax.Array
    c: jax.Array
    zeros: jax.Array | None


class Scratch(NamedTuple):
    """ring: tiles (HEIGHT, WIDTH) of keys, then of queries; c (H + 8,). In float32: lse (queries,), zeros (HEIGHT, H).

    loaded: a barrier, lse is there.
    """

    ring: Ring
    lse: jax.Array
    c: jax.Array
    zeros: jax.Array | None
    loaded: jax.Array


# A ref can be indexed in a traced function only.
@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def common_part(problem, q, k, lse, key_lengths, zeros, interpret):
    """(c, L lse without it, zeros), see `Refs`. q (B, T, N, H), k (B, S, K, H), lse (B, N, T'), T' in whole 128s.

    zeros: the shape of an array of zeros in float32, rows of H in all, or None.
    """
    (B, N, rows), H = lse.shape, q.shape[3]
    queries = 128 * max(count for count in range(1, 9) if rows // 128 % count == 0)
    lse_ref = jax.new_ref(LOG2_E * lse)
    inputs = (q, k) if key_lengths is None else (q, k, key_lengths)
    outputs = [jax.ShapeDtypeStruct((B, problem.K, H + 8), k.dtype)]
    if zeros is not None:
        outputs.append(jax.ShapeDtypeStruct((math.prod(zeros) // H, H), jnp.float32))

    def body(*refs):
        *refs, scratch = refs
        lengths = None if key_lengths is None else refs.pop(2)
        q, k, c, *zeros = refs
        kernel(Refs(q, k, lengths, lse_ref, c, *(zeros or [None])), scratch, problem)

    barriers = plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS)
    tiles = (plgpu.SMEM((SLOTS, HEIGHT, WIDTH), q.dtype, transforms=SWIZZLED),)
    scratch = Scratch(
        ring=Ring(tiles, barriers, barriers),
        lse=plgpu.SMEM((queries,), jnp.float32),
        c=plgpu.SMEM((H + 8,), k.dtype),
        zeros=None if zeros is None else plgpu.SMEM((HEIGHT, H), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=queries // 128),
    )
    c, *zero = plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=[scratch],
        grid=(B, N, rows // queries),
        grid_names=("batch", "head", "part"),
        kernel_name="flash_attention_common_part",
        interpret=interpret,
    )(*inputs)
    return c, jax.freeze(lse_ref), zero[0].reshape(zeros) if zero else None


def kernel(refs, scratch, problem):
    """Writes c of a head of keys and some of the zeros, and takes c off lse of some queries of a query head."""
    b, n, part = (lax.axis_index(axis) for axis in ("batch", "head", "part"))
    kv, H = lax.div(n, problem.group), refs.q.shape[3]
    length = problem.S if refs.key_lengths is None else refs.key_lengths[b]
    ring, widths = scratch.ring, H // WIDTH
    keys_at = lambda w, j: refs.k.at[b, pl.ds(j * HEIGHT, HEIGHT), kv, pl.ds(w * WIDTH, WIDTH)]
    ring.open()
    for w in range(widths):
        ring.fetch(w, keys_at(w, jnp.int32(0)))
    if refs.zeros is not None:
        parts = refs.lse.shape[2] // scratch.lse.shape[0]
        share = pl.cdiv(refs.zeros.shape[0], problem.B * problem.N * parts * HEIGHT) * HEIGHT
        write_zeros(refs.zeros, scratch.zeros, ((b * problem.N + n) * parts + part) * share, share)
    largest = jnp.float32(0)
    for w in range(widths):
        ring.wait(w)
        c = middle(*extremes(length, ring.at(w)[0], 0, nothing()), problem.dtype)
        plgpu.commit_smem()  # read before TMA writes there
        ring.release(w)
        largest = jnp.maximum(largest, jnp.abs(c).max())
    first_program = (lax.rem(n, problem.group) == 0) & (part == 0)

    @pl.when(largest > 0)
    def _():
        seen, tiles = functools.partial(extremes, length), pl.cdiv(problem.S, HEIGHT)
        for w in range(widths):
            ends = scan(ring, widths + w * tiles, tiles, functools.partial(keys_at, w), seen, nothing())
            scratch.c.at[pl.ds(w * WIDTH, WIDTH)][...] = middle(*ends, problem.dtype).astype(problem.dtype)
        take_off(refs, scratch, problem, (b, n, part), widths * (1 + tiles))

    @pl.when((largest == 0) & first_program)
    def _():
        for w in range(widths):
            nought = plgpu.layout_cast(jnp.zeros(WIDTH, problem.dtype), COLUMNS)
            scratch.c.at[pl.ds(w * WIDTH, WIDTH)][...] = nought

    @pl.when(first_program)
    def _():
        for i in range(8):
            scratch.c[H + i] = jnp.where(largest > 0, 1.0, 0.0).astype(problem.dtype)
        plgpu.commit_smem()
        for place in (*(pl.ds(w * WIDTH, WIDTH) for w in range(widths)), pl.ds(H, 8)):
            plgpu.copy_smem_to_gmem(scratch.c.at[place], refs.c.at[b, kv, place])

    ring.drain()
    plgpu.wait_smem_to_gmem(0)


def write_zeros(zeros, tile, start, count):
    """`count` rows of zeros, by TMA: they leave while the program goes on."""
    tile[...] = jnp.zeros(tile.shape, jnp.float32)
    plgpu.commit_smem()

    def one(i, _):
        row = start + i * HEIGHT
        pl.when(row < zeros.shape[0])(lambda: plgpu.copy_smem_to_gmem(tile, zeros.at[pl.ds(row, HEIGHT)]))

    lax.fori_loop(0, count // HEIGHT, one, None)


def take_off(refs, scratch, problem, place, step):
    """lse of the queries of a program, without scale L q c. step: the next of the ring."""
    (b, n, part), count, widths = place, scratch.lse.shape[0], refs.q.shape[3] // WIDTH
    start = part * count
    rows_at = lambda i: refs.lse.at[b, n, pl.ds(start + i, 128)]
    for i in range(0, count, 128):
        plgpu.copy_gmem_to_smem(rows_at(i), scratch.lse.at[pl.ds(i, 128)], scratch.loaded)
    plgpu.barrier_wait(scratch.loaded)

    def queries_at(i):
        rows, columns = start + lax.div(i, widths) * HEIGHT, lax.rem(i, widths) * WIDTH
        return refs.q.at[b, pl.ds(rows, HEIGHT), n, pl.ds(columns, WIDTH)]

    def shift(tile, i, _):
        lse = scratch.lse.at[pl.ds(lax.div(i, widths) * HEIGHT, HEIGHT)]
        c = plgpu.load(scratch.c.at[pl.ds(lax.rem(i, widths) * WIDTH, WIDTH)], layout=COLUMNS).astype(jnp.float32)
        q = plgpu.load(tile, layout=MATRIX).astype(jnp.float32)
        by = (problem.scale * LOG2_E) * (q * lax.broadcast_in_dim(c, q.shape, [1])).sum(axis=1)
        # Only what stands behind the end of the queries, or overflows without c too, is not finite.
        lse[...] = plgpu.load(lse, layout=ROWS) - jnp.where(jnp.abs(by) < jnp.inf, by, 0)

    scan(scratch.ring, step, widths * (count // HEIGHT), queries_at, shift, None)
    plgpu.commit_smem()
    for i in range(0, count, 128):
        plgpu.copy_smem_to_gmem(scratch.lse.at[pl.ds(i, 128)], rows_at(i))


def scan(ring, first, count, source, body, carry):
    """carry = body(tile, j, carry) for `count` tiles, copied from source(j), as steps of a ring from `first` on."""
    for j in range(min(count, SLOTS)):
        ring.fetch(first + j, source(jnp.int32(j)))

    def one(j, carry):
        ring.wait(first + j)
        carry = body(ring.at(first + j)[0], j, carry)
        plgpu.commit_smem()  # read before TMA writes there
        ring.release(first + j)
        pl.when(j + SLOTS < count)(lambda: ring.fetch(first + j + SLOTS, source(j + SLOTS)))
        return carry

    return lax.fori_loop(0, count, one, carry)


def nothing():
    """`extremes` of no keys."""
    lowest = plgpu.layout_cast(jnp.full((HEIGHT, WIDTH), -jnp.inf, jnp.float32), MATRIX)
    return lowest, lowest


def extremes(length, tile, j, ends):
    """(largest key, largest of -key) of each place of a tile, with those so far: those before `length` count."""
    rows = j * HEIGHT + plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=MATRIX)
    key = plgpu.load(tile, layout=MATRIX).astype(jnp.float32)
    return tuple(
        jnp.maximum(end, jnp.where(rows < length, one, -jnp.inf)) for end, one in zip(ends, (key, -key), strict=True)
    )


def middle(largest, largest_negated, dtype):
    """c (WIDTH,) of `extremes`."""
    most, least = largest.max(axis=0), -largest_negated.max(axis=0)
    half = least / 2 + most / 2
    c = jnp.where(least > 0, jnp.minimum(half, 2 * least), jnp.where(most < 0, jnp.maximum(half, 2 * most), 0))
    size = jnp.maximum(jnp.abs(least), jnp.abs(most))
    # As far apart as its neighbours are: a power of 2.
    bits = lax.bitcast_convert_type(size, jnp.int32) & 0x7F800000
    distance = lax.bitcast_convert_type(bits, jnp.float32) * float(jnp.finfo(dtype).eps)
    c = (c / distance).astype(jnp.int32).astype(jnp.float32) * distance
    is_normal = (size >= float(jnp.finfo(dtype).tiny)) & (size < jnp.inf)
    return jnp.where(is_normal, c, 0)
