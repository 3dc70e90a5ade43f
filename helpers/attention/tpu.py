"""Attention on a TPU: one kernel forward, two backward, each a walk over a grid in order.

A TPU core runs the programs of a grid one after another, and what it keeps in VMEM between them is not lost. So the
loop over tiles is the last axis of the grid, and what a tile of queries gathers on its way, m, l and acc, stands in
scratch memory from one step to the next. Blocks come and go while the core computes: the next ones are on their way
before they are needed. One whose index is that of the step before is not fetched again, and what a program writes is
sent to memory when the index of its block changes.

Tables lie on their side, keys down and queries across, so that what belongs to a query (m, l, lse, delta) is a row,
as wide as memory wants it, and a sum over keys adds whole registers. With scale_2 = scale log2 e, for tiles i and j:

    s      = scale_2 k_j q_i^T        (block_k, block_q), masked to -inf
    m'     = max(m, max over keys of s)
    alpha  = 2^(m - m'),   p = 2^(s - m')
    l      = alpha l + sum over keys of p
    acc    = alpha acc + v_j^T p      (H', block_q)
    w      = alpha w + sum over keys of p as the product has it, rounded to the dtype of v
    out_i  = (acc / w)^T,   lse = ln 2 (m + log2 l)

and on the way back, of lse and delta = rowsum(out * do) - dlse (FlashAttention-2, arXiv 2307.08691, algorithm 2):

    p      = 2^(s - log2 e lse),   dp = v_j do_i^T,   ds = p * (dp - delta)
    dq_i   = scale sum over j of ds^T k_j
    dv_j   = sum over i of p do_i,   dk_j = scale sum over i of ds q_i

Arrays are laid out (B, heads, length, H'), where H' is head_dim in whole rows of 128 lanes and lengths are whole
blocks; rows of statistics are (B, N, 1, length). What is added is zero, and in the arrays what lies past a length.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from helpers.attention import online_softmax
from helpers.attention.low_bits import delta_of, rounded_with_low_bits
from helpers.attention.masking import key_tiles, query_tiles
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.problem import Problem

LANES = 128
LARGEST_BLOCK = 512


def product(a, b, over_a, over_b):
    """Products of a and b summed over one axis of each, in float32.

    The matrix unit takes b either way round. Mosaic transposes an a that is summed over its first axis before it,
    since no kernel here sets `fuse_transposed_lhs_in_matmul`.
    """
    # Those of 16-bit numbers are exact, and Mosaic refuses to be asked for more.
    precision = None if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (((over_a,), (over_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


@dataclass(frozen=True)
class InnerLoop:
    """The order of a kernel: for each outer tile, the steps over the inner tiles that it needs.

    tiles_of: `key_tiles` where the outer tiles are queries, `query_tiles` where they are keys.
    """

    problem: Problem
    block_q: int
    block_k: int
    tiles_of: Callable

    @property
    def sizes(self):
        """Sizes of an outer and of an inner tile."""
        sizes = self.block_q, self.block_k
        return sizes if self.tiles_of is key_tiles else sizes[::-1]

    @property
    def steps(self):
        """As many as the outer tile that needs most of them; a window makes it few."""
        problem, (block, inner) = self.problem, self.sizes
        starts = np.arange(0, problem.T if self.tiles_of is key_tiles else problem.S, block)
        first, stop = self.tiles_of(starts, starts + block, inner, problem.band, problem.T, problem.S)
        return max(1, int((stop - first).max()))

    def tile(self, outer, step, lengths):
        """The inner tile of a step, and the first one that is not needed."""
        block, inner = self.sizes
        first, stop = self.tiles_of(outer * block, (outer + 1) * block, inner, self.problem.band, *lengths, xp=jnp)
        return first + step, stop

    def fetched(self, b, outer, step, query_lengths, key_lengths):
        """The block to have in VMEM, which stays after the last one that is needed."""
        tile, stop = self.tile(outer, step, (query_lengths[b], key_lengths[b]))
        return jnp.maximum(jnp.minimum(tile, stop - 1), 0)

    def seen(self, i, j, lengths):
        """Which keys of tile j the queries of tile i see: (block_k, block_q)."""
        queries = i * self.block_q + lax.broadcasted_iota(jnp.int32, (1, self.block_q), 1)
        keys = lax.broadcasted_iota(jnp.int32, (self.block_k, self.block_q), 0)
        # What one query sees is a range of tiles of one key: a row of bounds, so little is left to do for each pair.
        first, stop = key_tiles(queries, queries + 1, 1, self.problem.band, *lengths, xp=jnp)
        start = j * self.block_k
        seen = keys < stop - start
        return seen if self.problem.band.left is None else seen & (keys >= first - start)


def forward_kernel(
    query_lengths, key_lengths, q_ref, k_ref, v_ref, out_ref, lse_ref, m_ref, l_ref, w_ref, acc_ref, *, loop
):
    """Program (b, n, i, step): one step of query tile i."""
    # -- which step
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    lengths = query_lengths[b], key_lengths[b]
    j, stop = loop.tile(i, step, lengths)

    # -- the first step
    @pl.when(step == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        w_ref[...] = jnp.zeros_like(w_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(j < stop)
    def _():
        # -- logits on their side
        v = v_ref[...]
        s = (loop.problem.scale * LOG2_E) * product(k_ref[...], q_ref[...], 1, 1)
        s = jnp.where(loop.seen(i, j, lengths), s, -jnp.inf)
        # -- the step in scratch
        state = m_ref[...], l_ref[...]
        m_ref[...], l_ref[...], alpha, p = online_softmax.step(*state, s, axis=0)
        weights = p.astype(v.dtype)
        w_ref[...] = alpha * w_ref[...] + weights.astype(jnp.float32).sum(axis=0, keepdims=True)
        acc_ref[...] = alpha * acc_ref[...] + product(v, weights, 0, 0)

    # -- the last step
    @pl.when(step == loop.steps - 1)
    def _():
        state = m_ref[...], l_ref[...], acc_ref[...], w_ref[...]
        out, lse_ref[...] = online_softmax.finish(*state)
        out_ref[...] = out.T.astype(out_ref.dtype)


def p_and_ds(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, seen, scale):
    """Weights of a pair of tiles, gradient of its logits: (block_k, block_q) float32."""
    s = (scale * LOG2_E) * product(k_ref[...], q_ref[...], 1, 1)
    p = jnp.where(seen, jnp.exp2(s - LOG2_E * lse_ref[...]), 0)
    dp = product(v_ref[...], do_ref[...], 1, 1)
    return p, p * (dp - delta_ref[...])


def dq_kernel(query_lengths, key_lengths, *refs, loop):
    """Program (b, n, i, step): one step of query tile i."""
    *of_pair, dq_ref, sum_ref = refs  # q, k, v, do, lse and delta come first
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    lengths = query_lengths[b], key_lengths[b]
    j, stop = loop.tile(i, step, lengths)

    @pl.when(step == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(j < stop)
    def _():
        _, ds = p_and_ds(*of_pair, loop.seen(i, j, lengths), loop.problem.scale)
        k = of_pair[1][...]
        sum_ref[...] += product(ds.astype(k.dtype), k, 0, 0)

    @pl.when(step == loop.steps - 1)
    def _():
        dq_ref[...] = (loop.problem.scale * sum_ref[...]).astype(dq_ref.dtype)


def dkv_kernel(query_lengths, key_lengths, *refs, loop):
    """Program (b, kv, j, head, step): one step of key tile j, for one query head of
    the group that shares it.
    """
    *of_pair, dk_ref, dv_ref, dk_sum_ref, dv_sum_ref = refs  # as in dq_kernel
    b, j, head, step = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    lengths = query_lengths[b], key_lengths[b]
    i, stop = loop.tile(j, step, lengths)

    @pl.when((head == 0) & (step == 0))
    def _():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    @pl.when(i < stop)
    def _():
        p, ds = p_and_ds(*of_pair, loop.seen(i, j, lengths), loop.problem.scale)
        q, do = of_pair[0][...], of_pair[3][...]
        dv_sum_ref[...] += product(p.astype(do.dtype), do, 1, 0)
        dk_sum_ref[...] += product(ds.astype(q.dtype), q, 1, 0)

    @pl.when((head == loop.problem.group - 1) & (step == loop.steps - 1))
    def _():
        dk_ref[...] = (loop.problem.scale * dk_sum_ref[...]).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)


def forward(call, *, block_q=None, block_k=None, keeps_low_bits=False, interpret=False):
    """Attention of a checked `Call`: out (B, T, N, H) in the dtype of query and lse (B, N, T) in float32.

    With keeps_low_bits also those of out, int16 and of its shape. block_q, block_k: multiples of 128, chosen unless
    given. interpret: False on a TPU, `pltpu.InterpretParams` elsewhere.
    """
    problem = call.problem
    loop = InnerLoop(problem, *_blocks(problem, block_q, block_k), key_tiles)
    q, k, v = _laid_out(call, loop)
    rows = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)
    like = [jax.ShapeDtypeStruct(q.shape, jnp.float32 if keeps_low_bits else q.dtype), rows]
    scratch = [(1, loop.block_q)] * 3 + [(q.shape[-1], loop.block_q)]
    exact, lse = _launch(forward_kernel, loop, "qkk", "qr", like, scratch, interpret)(*call.real_lengths(), q, k, v)
    lse = lse[:, :, 0, : problem.T]
    if not keeps_low_bits:
        return _given_back(exact, problem.T, problem), lse
    out, low = rounded_with_low_bits(_given_back(exact, problem.T, problem, jnp.float32), problem.dtype)
    return out, lse, low


def backward(call, out, lse, dout, dlse, low=None, *, block_q=None, block_k=None, interpret=False):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    The arguments are those of `portable.backward`. The same input gives the same bits each time.
    """
    problem = call.problem
    blocks = _blocks(problem, block_q, block_k)
    delta = delta_of(out, lse, dout, dlse, low)
    loop = InnerLoop(problem, *blocks, key_tiles)
    q, k, v = _laid_out(call, loop)
    do = _padded(dout, call.query_lengths, loop.block_q)
    rows = [jnp.pad(x, [(0, 0), (0, 0), (0, q.shape[2] - problem.T)])[:, :, None] for x in (lse, delta)]
    inputs = *call.real_lengths(), q, k, v, do, *rows

    scratch = [(loop.block_q, q.shape[-1])]
    (dq,) = _launch(dq_kernel, loop, "qkkqrr", "q", [q], scratch, interpret)(*inputs)
    loop = InnerLoop(problem, *blocks, query_tiles)
    scratch = [(loop.block_k, q.shape[-1])] * 2
    dk, dv = _launch(dkv_kernel, loop, "qkkqrr", "kk", [k, v], scratch, interpret)(*inputs)
    lengths = (dq, problem.T), (dk, problem.S), (dv, problem.S)
    return tuple(_given_back(gradient, length, problem) for gradient, length in lengths)


def _specs(loop, H):
    """Specs of a tile of queries, of keys and of statistics, by a letter.

    For programs (b, n, i, step), or (b, kv, j, head, step) where outer tiles are keys.
    """
    group, fetched = loop.problem.group, loop.fetched
    if loop.tiles_of is key_tiles:
        query = lambda b, n, i, step, *_: (b, n, i)
        # Grouped queries: `group` query heads read the same key/value head, in place.
        key = lambda b, n, i, *at: (b, n // group, fetched(b, i, *at))
    else:
        head_of = lambda kv, head: kv * group + head
        query = lambda b, kv, j, head, *at: (b, head_of(kv, head), fetched(b, j, *at))
        key = lambda b, kv, j, *_: (b, kv, j)
    row = lambda *program: (*query(*program)[:2], 0, query(*program)[2])
    tile = lambda place: lambda *program: (*place(*program), 0)  # all of a head
    return {
        "q": pl.BlockSpec((None, None, loop.block_q, H), tile(query)),
        "k": pl.BlockSpec((None, None, loop.block_k, H), tile(key)),
        "r": pl.BlockSpec((None, None, 1, loop.block_q), row),
    }


def _launch(kernel, loop, reads, writes, like, scratch, interpret):
    """The kernel over a grid of which the first three axes may go in any order.

    reads, writes: letters of `_specs`. like: the outputs' shapes.
    """
    problem, specs = loop.problem, _specs(loop, like[0].shape[-1])
    grid = problem.B, problem.N, pl.cdiv(problem.T, loop.block_q), loop.steps
    if loop.tiles_of is query_tiles:
        tiles = pl.cdiv(problem.S, loop.block_k)
        grid = problem.B, problem.K, tiles, problem.group, loop.steps
    semantics = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    return pl.pallas_call(
        functools.partial(kernel, loop=loop),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,  # both lengths, which the index maps read
            grid=grid,
            in_specs=[specs[letter] for letter in reads],
            out_specs=[specs[letter] for letter in writes],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=interpret,
        name=f"flash_attention_tpu_{kernel.__name__.removesuffix('_kernel')}",
    )


def _blocks(problem, block_q, block_k):
    """block_q and block_k as given, or as few as hold the sequences, of about the same size."""

    def block(length):
        return LANES * pl.cdiv(pl.cdiv(length, pl.cdiv(length, LARGEST_BLOCK)), LANES)

    return block_q or block(problem.T), block_k or block(problem.S)


def _laid_out(call, loop):
    return (
        _padded(call.query, call.query_lengths, loop.block_q),
        _padded(call.key, call.key_lengths, loop.block_k),
        _padded(call.value, call.key_lengths, loop.block_k),
    )


def _padded(array, lengths, block):
    """(B, length, heads, H) as (B, heads, whole blocks, whole lanes), with zeros for what is no part of it.

    A TPU has no float16: its place takes float32.
    """
    if lengths is not None:
        positions = jnp.arange(array.shape[1])[None, :, None, None]
        array = jnp.where(positions < lengths[:, None, None, None], array, 0)
    if array.dtype == jnp.float16:
        array = array.astype(jnp.float32)
    array = array.swapaxes(1, 2)
    return jnp.pad(array, [(0, 0), (0, 0), (0, -array.shape[2] % block), (0, -array.shape[3] % LANES)])


def _given_back(array, length, problem, dtype=None):
    """(B, length, heads, H) of an array as `_padded` laid it out, in the dtype of the problem unless given."""
    return array[:, :, :length, : problem.H].swapaxes(1, 2).astype(dtype or problem.dtype)
