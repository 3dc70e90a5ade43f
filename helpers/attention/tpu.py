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
from helpers.attention.low_bits import delta_of, low_bits
from helpers.attention.masking import key_tiles, query_tiles
from helpers.attention.portable.tiles import LOG2_E
from helpers.attention.problem import Problem

LANES = 128
LARGEST_BLOCK = 512


def product(a, b, over_a, over_b):
    """Products of a and b summed over one axis of each, in float32.

    The matrix unit takes b either way round. Mosaic transposes an a that is summed over its first axis before it.
    """
    # Those of 16-bit numbers are exact, and Mosaic refuses to be asked for more.
    precision = None if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (((over_a,), (over_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


@dataclass(frozen=True)
class Walk:
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
        """The index of the block to have in VMEM: after the last needed one still that one, so that nothing moves."""
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
    query_lengths, key_lengths, q_ref, k_ref, v_ref, out_ref, lse_ref, m_ref, l_ref, w_ref, acc_ref, *, walk
):
    """Program (b, n, i, step): one step of query tile i."""
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    lengths = query_lengths[b], key_lengths[b]
    j, stop = walk.tile(i, step, lengths)

    @pl.when(step == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        w_ref[...] = jnp.zeros_like(w_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(j < stop)
    def _():
        v = v_ref[...]
        s = (walk.problem.scale * LOG2_E) * product(k_ref[...], q_ref[...], 1, 1)
        s = jnp.where(walk.seen(i, j, lengths), s, -jnp.inf)
        m_ref[...], l_ref[...], alpha, p = online_softmax.step(m_ref[...], l_ref[...], s, axis=0)
        weights = p.astype(v.dtype)
        w_ref[...] = alpha * w_ref[...] + weights.astype(jnp.float32).sum(axis=0, keepdims=True)
        acc_ref[...] = alpha * acc_ref[...] + product(v, weights, 0, 0)

    @pl.when(step == walk.steps - 1)
    def _():
        out, lse_ref[...] = online_softmax.finish(m_ref[...], l_ref[...], acc_ref[...], w_ref[...])
        out_ref[...] = out.T.astype(out_ref.dtype)


def p_and_ds(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, seen, scale):
    """Weights of a pair of tiles, gradient of its logits: (block_k, block_q) float32."""
    s = (scale * LOG2_E) * product(k_ref[...], q_ref[...], 1, 1)
    p = jnp.where(seen, jnp.exp2(s - LOG2_E * lse_ref[...]), 0)
    dp = product(v_ref[...], do_ref[...], 1, 1)
    return p, p * (dp - delta_ref[...])


def dq_kernel(query_lengths, key_lengths, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, sum_ref, *, walk):
    """Program (b, n, i, step): one step of query tile i."""
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    lengths = query_lengths[b], key_lengths[b]
    j, stop = walk.tile(i, step, lengths)

    @pl.when(step == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(j < stop)
    def _():
        seen, k = walk.seen(i, j, lengths), k_ref[...]
        _, ds = p_and_ds(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, seen, walk.problem.scale)
        sum_ref[...] += product(ds.astype(k.dtype), k, 0, 0)

    @pl.when(step == walk.steps - 1)
    def _():
        dq_ref[...] = (walk.problem.scale * sum_ref[...]).astype(dq_ref.dtype)


def dkv_kernel(
    query_lengths,
    key_lengths,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    dk_sum_ref,
    dv_sum_ref,
    *,
    walk,
):
    """Program (b, kv, j, head, step): one step of key tile j, for one query head of the group that shares it."""
    b, j, head, step = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)
    lengths = query_lengths[b], key_lengths[b]
    i, stop = walk.tile(j, step, lengths)

    @pl.when((head == 0) & (step == 0))
    def _():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    @pl.when(i < stop)
    def _():
        seen, q, do = walk.seen(i, j, lengths), q_ref[...], do_ref[...]
        p, ds = p_and_ds(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, seen, walk.problem.scale)
        dv_sum_ref[...] += product(p.astype(do.dtype), do, 1, 0)
        dk_sum_ref[...] += product(ds.astype(q.dtype), q, 1, 0)

    @pl.when((head == walk.problem.group - 1) & (step == walk.steps - 1))
    def _():
        dk_ref[...] = (walk.problem.scale * dk_sum_ref[...]).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)


def forward(call, *, block_q=None, block_k=None, keeps_low_bits=False, interpret=False):
    """Attention of a checked `Call`: out (B, T, N, H) in the dtype of query and lse (B, N, T) in float32.

    With keeps_low_bits also those of out, int16 and of its shape. block_q, block_k: multiples of 128, chosen unless
    given. interpret: False on a TPU, `pltpu.InterpretParams` elsewhere.
    """
    problem = call.problem
    walk = Walk(problem, *_blocks(problem, block_q, block_k), key_tiles)
    q, k, v = _laid_out(call, walk)
    q_spec, k_spec, row_spec = _query_outer_specs(walk, q.shape[-1])
    rows = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)
    scratch = [(1, walk.block_q)] * 3 + [(q.shape[-1], walk.block_q)]
    in_specs, out_specs = [q_spec, k_spec, k_spec], [q_spec, row_spec]
    grid = problem.B, problem.N, q.shape[2] // walk.block_q, walk.steps
    like = [jax.ShapeDtypeStruct(q.shape, jnp.float32 if keeps_low_bits else q.dtype), rows]
    exact, lse = _launch(forward_kernel, walk, grid, in_specs, out_specs, like, scratch, interpret)(
        *_lengths(call), q, k, v
    )
    out, lse = _given_back(exact, problem.T, problem), lse[:, :, 0, : problem.T]
    if not keeps_low_bits:
        return out, lse
    return out, lse, low_bits(_given_back(exact, problem.T, problem, jnp.float32), out)


def backward(call, out, lse, dout, dlse, low=None, *, block_q=None, block_k=None, interpret=False):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    out (B, T, N, H), lse (B, N, T) float32 and low (int16, as out) are what `forward` returned; dout and dlse are the
    gradients of the first two. Without low, dq feels what the keys that a row sees have in common. The same input
    gives the same bits each time.
    """
    problem = call.problem
    blocks = _blocks(problem, block_q, block_k)
    delta = delta_of(out, lse, dout, dlse, low)
    walk = Walk(problem, *blocks, key_tiles)
    q, k, v = _laid_out(call, walk)
    do = _padded(dout, call.query_lengths, walk.block_q)
    rows = [jnp.pad(x, [(0, 0), (0, 0), (0, q.shape[2] - problem.T)])[:, :, None] for x in (lse, delta)]
    inputs = *_lengths(call), q, k, v, do, *rows

    q_spec, k_spec, row_spec = _query_outer_specs(walk, q.shape[-1])
    in_specs = [q_spec, k_spec, k_spec, q_spec, row_spec, row_spec]
    grid = problem.B, problem.N, q.shape[2] // walk.block_q, walk.steps
    scratch = [(walk.block_q, q.shape[-1])]
    (dq,) = _launch(dq_kernel, walk, grid, in_specs, [q_spec], [q], scratch, interpret)(*inputs)

    walk = Walk(problem, *blocks, query_tiles)
    q_spec, k_spec, row_spec = _key_outer_specs(walk, q.shape[-1])
    in_specs = [q_spec, k_spec, k_spec, q_spec, row_spec, row_spec]
    grid = problem.B, problem.K, k.shape[2] // walk.block_k, problem.group, walk.steps
    scratch = [(walk.block_k, q.shape[-1])] * 2
    dk, dv = _launch(dkv_kernel, walk, grid, in_specs, [k_spec] * 2, [k, v], scratch, interpret)(*inputs)
    return (
        _given_back(dq, problem.T, problem),
        _given_back(dk, problem.S, problem),
        _given_back(dv, problem.S, problem),
    )


def _query_outer_specs(walk, H):
    """Specs of a tile of queries, of keys and of statistics, for programs (b, n, i, step)."""
    group = walk.problem.group
    return (
        pl.BlockSpec((None, None, walk.block_q, H), lambda b, n, i, step, *_: (b, n, i, 0)),
        # Grouped queries: `group` query heads read the same key/value head, in place.
        pl.BlockSpec(
            (None, None, walk.block_k, H),
            lambda b, n, i, step, *lengths: (b, n // group, walk.fetched(b, i, step, *lengths), 0),
        ),
        pl.BlockSpec((None, None, 1, walk.block_q), lambda b, n, i, step, *_: (b, n, 0, i)),
    )


def _key_outer_specs(walk, H):
    """The same for programs (b, kv, j, head, step)."""
    group = walk.problem.group

    def queries(b, kv, j, head, step, *lengths):
        return b, kv * group + head, walk.fetched(b, j, step, *lengths)

    return (
        pl.BlockSpec((None, None, walk.block_q, H), lambda *program: (*queries(*program), 0)),
        pl.BlockSpec((None, None, walk.block_k, H), lambda b, kv, j, *_: (b, kv, j, 0)),
        pl.BlockSpec((None, None, 1, walk.block_q), lambda *program: (*queries(*program)[:2], 0, queries(*program)[2])),
    )


def _launch(kernel, walk, grid, in_specs, out_specs, like, scratch, interpret):
    """The kernel over a grid of which the first three axes may go in any order; like: the outputs' shapes."""
    return pl.pallas_call(
        functools.partial(kernel, walk=walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,  # both lengths, which the index maps read
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)),
        interpret=interpret,
        name=f"flash_attention_tpu_{kernel.__name__.removesuffix('_kernel')}",
    )


def _blocks(problem, block_q, block_k):
    """block_q and block_k as given, or as few as hold the sequences, of about the same size."""

    def block(length):
        return LANES * pl.cdiv(pl.cdiv(length, pl.cdiv(length, LARGEST_BLOCK)), LANES)

    return block_q or block(problem.T), block_k or block(problem.S)


def _lengths(call):
    """How many queries and keys of each batch entry are real, int32 (B,) each, cut to the arrays."""
    problem = call.problem
    return [
        jnp.full(problem.B, longest, jnp.int32) if lengths is None else jnp.clip(lengths, 0, longest)
        for lengths, longest in ((call.query_lengths, problem.T), (call.key_lengths, problem.S))
    ]


def _laid_out(call, walk):
    return (
        _padded(call.query, call.query_lengths, walk.block_q),
        _padded(call.key, call.key_lengths, walk.block_k),
        _padded(call.value, call.key_lengths, walk.block_k),
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
