"""What all keys of a head have in common, taken off them ahead of the Hopper backward pass.

Softmax does not feel it where one vector c is taken off all keys. Each logit of a query loses the same number, and

    p_ij = exp2(scale L q_i (k_j - c) - (L lse_i - scale L q_i c))        L = log2(e)
    dq_i = scale (sum_j ds_ij (k_j - c) + dlse_i c)

for exact rows of ds add up to dlse. A kernel has ds rounded to 16 bits, and made with a delta whose out was summed of
rounded p. Its rows add up to something else, and dq is off by the difference times what the keys have in common: c at
most, and without c all of it.

Here k - c is exact, and no larger than k, whichever keys a row sees. c lies in the middle of the keys, or at twice the
smallest if that is nearer to 0, and is 0 in channels in which keys differ in sign. And it is a multiple of the distance
of two neighbouring numbers near the largest key: k - c is then one of neighbours near k.

But a tensor core cuts bits off the sums q k that lse is made of, and scale q c has them. p is off by the difference,
which grows with the logits: near 2^10, dv was off by 2^-10. So c is 0 in heads in which some |lse| is above FAR.

Where keys differ in sign in each channel, their first tile nearly always says so. Only where it does not, the kernel
reads all keys of the head, and the queries. Meanwhile TMA writes the zeros that a fused kernel adds dq to, which takes
longer. For a ring, `taken_off` does the same by XLA.
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

WIDTH = HEIGHT = 64  # channels and positions of a tile
SLOTS = 4
FAR = 2.0**8


class Scratch(NamedTuple):
    """ring: tiles of keys, then of queries; c (H + 8,); in float32 lse (queries,), there when `loaded`, and zeros."""

    ring: Ring
    lse: jax.Array
    c: jax.Array
    zeros: jax.Array
    loaded: jax.Array


def common_part(problem, q, k, lse, key_lengths, shape, interpret):
    """(c, L lse - scale L q c, zeros). q (B, T, N, H), k (B, S, K, H), lse (B, N, T'), T' in whole 128s.

    c: (B, K, H + 8), in the dtype of keys; behind c itself, 0 if nothing has to be taken off, else 1. zeros: float32,
    of this shape, in all of some rows of H. key_lengths: (B,), or None.
    """
    (B, N, rows), H = lse.shape, q.shape[3]
    queries = 128 * max(count for count in range(1, 9) if rows // 128 % count == 0)

    def body(q, k, lse, *refs):
        *lengths, c, log2_sums, zeros, scratch = refs
        kernel(q, k, lse, lengths, c, log2_sums, zeros, scratch, problem)

    barriers = plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS)
    scratch = Scratch(
        ring=Ring((plgpu.SMEM((SLOTS, HEIGHT, WIDTH), q.dtype, transforms=SWIZZLED),), barriers, barriers),
        lse=plgpu.SMEM((queries,), jnp.float32),
        c=plgpu.SMEM((H + 8,), k.dtype),
        zeros=plgpu.SMEM((HEIGHT, H), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=queries // 128),
    )
    c, log2_sums, zeros = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((B, problem.K, H + 8), k.dtype),
            jax.ShapeDtypeStruct(lse.shape, jnp.float32),
            jax.ShapeDtypeStruct((math.prod(shape) // H, H), jnp.float32),
        ],
        scratch_types=[scratch],
        grid=(B, N, rows // queries),
        grid_names=("batch", "head", "part"),
        kernel_name="flash_attention_common_part",
        interpret=interpret,
    )(q, k, lse, *([] if key_lengths is None else [key_lengths]))
    return c, log2_sums, zeros.reshape(shape)


def taken_off(problem, query, key, lse, is_key, axis_name):
    """(k - c, lse - scale q c, c) by XLA, c in float32 (B, 1, N, H), of the keys that is_key says, (B, S, 1, 1).

    The keys are all those of the devices along axis_name of the mesh. c is 0 in heads in which some |scale q c| is
    above FAR.
    """
    everywhere = functools.partial(lax.pmax, axis_name=axis_name)
    keys, (small, large) = key.astype(jnp.float32), factors(problem.scale)
    ends = [jnp.where(is_key, one, -jnp.inf).max(axis=1, keepdims=True) for one in (keys, -keys)]
    c = middle(*everywhere(ends), key.dtype, axis=1)[:, None]
    of_heads = lambda array: jnp.repeat(array, problem.group, axis=2)
    by = large * ((small * query.astype(jnp.float32)) * of_heads(c)).sum(axis=3, keepdims=True)
    far = jnp.where(by != by, 0, jnp.abs(by)).max(axis=1).reshape(-1, 1, problem.K, problem.group).max(axis=3)
    is_near = (everywhere(far) <= FAR)[..., None]
    c, by = jnp.where(is_near, c, 0), jnp.where((by == by) & of_heads(is_near), by, 0)
    return key - c.astype(key.dtype), lse - by[..., 0].swapaxes(1, 2), of_heads(c)


def factors(scale):
    """Two factors of scale, one for x and one for x c. No part of scale x c then overflows, unless all of it does."""
    return (scale, 1.0) if abs(scale) <= 1 else (1.0, scale)


def given_back(dq, dlse, c, scale):
    """dq (B, T, N, H) with scale dlse c. c: (B, 1, N, H)."""
    (small, large), dlse = factors(scale), dlse.swapaxes(1, 2)[..., None]
    return jnp.where((dlse != 0) & (jnp.abs(dlse) < jnp.inf), dq + large * ((small * dlse) * c), dq)


def kernel(q_ref, k_ref, lse_ref, lengths, c_ref, log2_sums_ref, zeros_ref, scratch, problem):
    """Writes c of a head of keys, L lse without scale L q c of some queries of a query head, and some of the zeros."""
    place = b, n, part = tuple(lax.axis_index(axis) for axis in ("batch", "head", "part"))
    kv, H = lax.div(n, problem.group), q_ref.shape[3]
    length = lengths[0][b] if lengths else problem.S
    ring, widths, count = scratch.ring, H // WIDTH, scratch.lse.shape[0]
    parts, blocks = lse_ref.shape[2] // count, [pl.ds(i, 128) for i in range(0, count, 128)]
    queries = lambda block: (b, n, pl.ds(part * count + block.start, 128))
    keys_at = lambda w, j: k_ref.at[b, pl.ds(j * HEIGHT, HEIGHT), kv, pl.ds(w * WIDTH, WIDTH)]
    columns = [pl.ds(w * WIDTH, WIDTH) for w in range(widths)]
    ring.open()
    for w in range(widths):
        ring.fetch(w, keys_at(w, jnp.int32(0)))
    for block in blocks:
        plgpu.copy_gmem_to_smem(lse_ref.at[queries(block)], scratch.lse.at[block], scratch.loaded)
    scratch.zeros[...] = jnp.zeros(scratch.zeros.shape, jnp.float32)
    plgpu.commit_smem()
    own = pl.cdiv(zeros_ref.shape[0], problem.B * problem.N * parts * HEIGHT)

    def write_zeros(i, _):
        row = (((b * problem.N + n) * parts + part) * own + i) * HEIGHT
        copy = lambda: plgpu.copy_smem_to_gmem(scratch.zeros, zeros_ref.at[pl.ds(row, HEIGHT)])
        pl.when(row < zeros_ref.shape[0])(copy)

    lax.fori_loop(0, own, write_zeros, None)
    plgpu.barrier_wait(scratch.loaded)
    scratch.lse[...] = LOG2_E * scratch.lse[...]
    largest, lowest = jnp.float32(0), plgpu.layout_cast(jnp.full((HEIGHT, WIDTH), -jnp.inf, jnp.float32), MATRIX)
    for w in range(widths):
        ring.wait(w)
        c = middle(*extremes(length, ring.at(w)[0], 0, (lowest, lowest)), problem.dtype)
        plgpu.commit_smem()  # read before TMA writes there
        ring.release(w)
        largest = jnp.maximum(largest, jnp.abs(c).max())
        scratch.c.at[columns[w]][...] = plgpu.layout_cast(jnp.zeros(WIDTH, problem.dtype), COLUMNS)

    def find_and_take_off():
        seen, tiles = functools.partial(extremes, length), pl.cdiv(problem.S, HEIGHT)
        for w in range(widths):
            step, source = widths + w * tiles, functools.partial(keys_at, w)
            ends = scan(ring, step, tiles, source, seen, (lowest, lowest))
            scratch.c.at[columns[w]][...] = middle(*ends, problem.dtype).astype(problem.dtype)
        take_off(q_ref, scratch, problem, place, widths * (1 + tiles))

    @pl.when(largest > 0)
    def _():
        heads = pl.ds(kv * problem.group, problem.group)
        pl.when(largest_lse(lse_ref, b, heads, count) <= FAR)(find_and_take_off)

    @pl.when((lax.rem(n, problem.group) == 0) & (part == 0))
    def _():
        for i in range(8):
            scratch.c[H + i] = jnp.where(largest > 0, 1.0, 0.0).astype(problem.dtype)
        plgpu.commit_smem()
        for columns_of_c in (*columns, pl.ds(H, 8)):
            plgpu.copy_smem_to_gmem(scratch.c.at[columns_of_c], c_ref.at[b, kv, columns_of_c])

    plgpu.commit_smem()
    for block in blocks:
        plgpu.copy_smem_to_gmem(scratch.lse.at[block], log2_sums_ref.at[queries(block)])
    ring.drain()
    plgpu.wait_smem_to_gmem(0)


def largest_lse(lse_ref, b, heads, count):
    """The largest |lse| of the queries of some heads, read `count` at a time. That of a row without keys is none."""
    parts = lse_ref.shape[2] // count

    def larger(i, most):
        size = jnp.abs(lse_ref[b, heads.start + lax.div(i, parts), pl.ds(lax.rem(i, parts) * count, count)])
        return jnp.maximum(most, jnp.where(size < jnp.inf, size, 0).max())

    return lax.fori_loop(0, heads.size * parts, larger, jnp.float32(0))


def take_off(q_ref, scratch, problem, place, step):
    """Takes scale L q c off L lse of the queries of a program. step: the next of the ring."""
    (b, n, part), count, widths = place, scratch.lse.shape[0], q_ref.shape[3] // WIDTH
    start = part * count
    small, large = factors(problem.scale)

    def queries_at(i):
        rows, columns = start + lax.div(i, widths) * HEIGHT, lax.rem(i, widths) * WIDTH
        return q_ref.at[b, pl.ds(rows, HEIGHT), n, pl.ds(columns, WIDTH)]

    def shift(tile, i, _):
        lse = scratch.lse.at[pl.ds(lax.div(i, widths) * HEIGHT, HEIGHT)]
        c = plgpu.load(scratch.c.at[pl.ds(lax.rem(i, widths) * WIDTH, WIDTH)], layout=COLUMNS).astype(jnp.float32)
        q = plgpu.load(tile, layout=MATRIX).astype(jnp.float32)
        by = (LOG2_E * large) * ((small * q) * lax.broadcast_in_dim(c, q.shape, [1])).sum(axis=1)
        # Only behind the end of the queries, or where logits overflow, it is not finite.
        lse[...] = plgpu.load(lse, layout=ROWS) - jnp.where(jnp.abs(by) < jnp.inf, by, 0)

    scan(scratch.ring, step, widths * (count // HEIGHT), queries_at, shift, None)


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


def extremes(length, tile, j, ends):
    """(largest key, largest of -key) of each place of a tile, with those so far: those before `length` count."""
    real = j * HEIGHT + plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=MATRIX) < length
    key = plgpu.load(tile, layout=MATRIX).astype(jnp.float32)
    return tuple(jnp.maximum(end, jnp.where(real, one, -jnp.inf)) for end, one in zip(ends, (key, -key), strict=True))


def middle(largest, largest_negated, dtype, axis=0):
    """c in float32, from what `extremes` has along an axis."""
    most, least = largest.max(axis=axis), -largest_negated.max(axis=axis)
    half = least / 2 + most / 2
    c = jnp.where(least > 0, jnp.minimum(half, 2 * least), jnp.where(most < 0, jnp.maximum(half, 2 * most), 0))
    size = jnp.maximum(jnp.abs(least), jnp.abs(most))
    bits = lax.bitcast_convert_type(size, jnp.int32) & 0x7F800000  # of a power of 2
    distance = lax.bitcast_convert_type(bits, jnp.float32) * float(jnp.finfo(dtype).eps)
    c = (c / distance).astype(jnp.int32).astype(jnp.float32) * distance
    # Smaller ones may be subnormal, and products with larger ones overflow.
    return jnp.where((size >= max(2.0**-60, float(jnp.finfo(dtype).tiny))) & (size <= 2.0**60), c, 0)
