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

Where logits are more than scaled products, ds goes back to those before it meets k and q.

Arrays are laid out (B, heads, length, H'), where H' is head_dim in whole rows of 128 lanes and lengths are whole
blocks; rows of statistics are (B, N, 1, length), and tables on their side too, (B, N, S, T). What is added is zero, and
in the arrays what lies past a length.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from helpers.attention import online_softmax, scores
from helpers.attention.extras import Extras, own_index
from helpers.attention.low_bits import delta_of, rounded_with_low_bits
from helpers.attention.masking import TileLists, for_kernel, key_tiles, query_tiles, whole_tiles
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


class Scalars(NamedTuple):
    """Single numbers, int32, which index maps read: arrays, or refs in a memory of their own.

    query_lengths, key_lengths: how many are real, (B,). lists: of tiles, where something hides more keys than these and
    the band. batch (B,), heads (1, N): the numbers of batch entries and heads, for functions.
    """

    query_lengths: jax.Array
    key_lengths: jax.Array
    lists: TileLists | None = None
    batch: jax.Array | None = None
    heads: jax.Array | None = None


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

    def tile(self, b, n, outer, step, scalars):
        """The inner tile of a step, if it is needed, and if it needs no mask. After the
        last one that is needed it stays that one.
        """
        if scalars.lists is None:
            block, inner = self.sizes
            ends = outer * block, (outer + 1) * block
            band = self.problem.band
            lengths = scalars.query_lengths[b], scalars.key_lengths[b]
            needed = first, stop = self.tiles_of(*ends, inner, band, *lengths, xp=jnp)
            if self.tiles_of is query_tiles:
                band, lengths = band.mirrored, lengths[::-1]
            whole_first, whole_stop = whole_tiles(needed, *ends, inner, band, *lengths)
            tile = jnp.maximum(jnp.minimum(first + step, stop - 1), 0)
            return tile, first + step < stop, (whole_first <= tile) & (tile < whole_stop)
        tiles, seen, full = scalars.lists
        place = own_index(b, seen, 0), own_index(n, seen, 1), outer
        last = jnp.maximum(seen[place] - 1, 0)
        tile = tiles[(*place, jnp.minimum(step, last))]
        return tile, step < seen[place], step < full[place]


@dataclass(frozen=True)
class Pair:
    """A tile of keys and a tile of queries: tables (block_k, block_q).

    place: b, n and the numbers i and j of the tiles. extras: refs of the tiles of tables. is_masked: whether some key
    may be hidden from a query.
    """

    loop: InnerLoop
    place: tuple
    scalars: Scalars
    extras: Extras
    is_masked: bool

    @property
    def changes_logits(self):
        return scores.changes_logits(self.loop.problem, self.extras)

    def logits(self, s):
        """The logits of scaled products, both in base 2, and a function that takes a gradient of natural logits back to
        the natural scaled products."""
        problem, extras = self.loop.problem, self.extras
        if not self.changes_logits:
            return s, lambda ds: ds
        bias, arrays = jax.tree.map(lambda ref: ref[...], (extras.bias, extras.score_arrays))
        of_natural = lambda s: scores.logits(s, problem, *self._numbers(), bias, arrays)
        s, pull_back = jax.vjp(of_natural, s / LOG2_E)
        return LOG2_E * s, lambda ds: self.hidden(pull_back(ds)[0], 0)

    def hidden(self, table, filler):
        """The table with the filler where a query does not see a key."""
        return jnp.where(self._seen(), table, filler) if self.is_masked else table

    def _seen(self):
        (b, _, _, j), problem, extras = self.place, self.loop.problem, self.extras
        lengths = self.scalars.query_lengths[b], self.scalars.key_lengths[b]
        _, _, queries, _ = self._numbers()
        # What one query sees is a range of tiles of one key: a row of bounds, so little is left to do for each pair.
        first, stop = key_tiles(queries, queries + 1, 1, problem.band, *lengths, xp=jnp)
        keys = lax.broadcasted_iota(jnp.int32, (self.loop.block_k, self.loop.block_q), 0)
        start = j * self.loop.block_k
        seen = keys < stop - start
        if problem.band.left is not None:
            seen &= keys >= first - start
        if problem.mask_mod is None and not extras.hides_keys:
            return seen
        mask = None if extras.mask is None else extras.mask[...] != 0
        ids = jax.tree.map(lambda ref: ref[...], (extras.query_segment_ids, extras.key_segment_ids))
        return seen & scores.visible_by(problem, *self._numbers(), mask, *ids)

    def _numbers(self):
        """b, n, i and j, as mask_mod and score_mod get them."""
        (b, n, i, j), (*_, batch, heads) = self.place, self.scalars
        queries = i * self.loop.block_q + lax.broadcasted_iota(jnp.int32, (1, self.loop.block_q), 1)
        keys = j * self.loop.block_k + lax.broadcasted_iota(jnp.int32, (self.loop.block_k, 1), 0)
        own = (b, n) if batch is None else (batch[own_index(b, batch, 0)], heads[0, n])
        return *own, queries, keys


def for_pair(loop, b, n, outer, step, scalars, extras):
    """A decorator: runs body(pair) if a step is needed, without a mask if its tile is
    seen whole. So a kernel holds two forms of its step.
    """
    inner, is_needed, is_full = loop.tile(b, n, outer, step, scalars)
    place = (b, n, outer, inner) if loop.tiles_of is key_tiles else (b, n, inner, outer)

    def run(body):
        for is_masked, holds in ((False, is_full), (True, ~is_full)):
            pair = Pair(loop, place, scalars, extras, is_masked)
            pl.when(is_needed & holds)(functools.partial(body, pair))

    return run


def forward_kernel(scalars, q_ref, k_ref, v_ref, extras, out_ref, lse_ref, m_ref, l_ref, w_ref, acc_ref, *, loop):
    """Program (b, n, i, step): one step of query tile i."""
    # -- which step
    b, n, i, step = (pl.program_id(axis) for axis in range(4))

    # -- the first step
    sink = None if extras.sinks is None else extras.sinks[...]

    @pl.when(step == 0)
    def _():
        # A sink is a key without a value, seen before all others.
        m_start, l_start = (-jnp.inf, 0) if sink is None else (LOG2_E * sink, 1)
        m_ref[...] = jnp.broadcast_to(m_start, m_ref.shape)
        l_ref[...] = jnp.full_like(l_ref, l_start)
        w_ref[...] = jnp.full_like(w_ref, l_start)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @for_pair(loop, b, n, i, step, scalars, extras)
    def _(pair):
        # -- logits on their side
        v = v_ref[...]
        s = (loop.problem.scale * LOG2_E) * product(k_ref[...], q_ref[...], 1, 1)
        s, _ = pair.logits(s)
        s = pair.hidden(s, -jnp.inf)
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
        out, lse = online_softmax.finish(*state)
        if sink is not None:  # the lse of a row without keys is its sink, to the last bit
            lse = jnp.where((state[1] == 1) & (state[0] == LOG2_E * sink), sink, lse)
        out_ref[...] = out.T.astype(out_ref.dtype)
        lse_ref[...] = lse


def p_and_ds(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, pair):
    """Weights of a pair of tiles, gradient of its scaled products: (block_k, block_q) float32."""
    s = (pair.loop.problem.scale * LOG2_E) * product(k_ref[...], q_ref[...], 1, 1)
    s, pull_back = pair.logits(s)
    log2_p = s - LOG2_E * lse_ref[...]
    if pair.changes_logits:
        log2_p = jnp.minimum(log2_p, 0)  # also where a large lse has lost digits
    p = pair.hidden(jnp.exp2(log2_p), 0)
    dp = product(v_ref[...], do_ref[...], 1, 1)
    return p, pull_back(p * (dp - delta_ref[...]))


def dq_kernel(scalars, *refs, loop):
    """Program (b, n, i, step): one step of query tile i."""
    *of_pair, extras, dq_ref, sum_ref = refs  # q, k, v, do, lse and delta come first
    b, n, i, step = (pl.program_id(axis) for axis in range(4))

    @pl.when(step == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @for_pair(loop, b, n, i, step, scalars, extras)
    def _(pair):
        _, ds = p_and_ds(*of_pair, pair)
        k = of_pair[1][...]
        sum_ref[...] += product(ds.astype(k.dtype), k, 0, 0)

    @pl.when(step == loop.steps - 1)
    def _():
        dq_ref[...] = (loop.problem.scale * sum_ref[...]).astype(dq_ref.dtype)


def dkv_kernel(scalars, *refs, loop):
    """Program (b, kv, j, head, step): one step of key tile j, for one query head of
    the group that shares it.
    """
    *of_pair, extras, dk_ref, dv_ref, dk_sum_ref, dv_sum_ref = refs  # as in dq_kernel
    b, kv, j, head, step = (pl.program_id(axis) for axis in range(5))
    n = kv * loop.problem.group + head

    @pl.when((head == 0) & (step == 0))
    def _():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    @for_pair(loop, b, n, j, step, scalars, extras)
    def _(pair):
        p, ds = p_and_ds(*of_pair, pair)
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
    exact, lse = _launch(forward_kernel, call, loop, "qkk", "qr", like, scratch, interpret)(q, k, v)
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
    if call.changes_logits:
        lse = jnp.where(lse == -jnp.inf, 0, lse)  # a logit may be -inf without being hidden, and its weight must be 0
    rows = [jnp.pad(x, [(0, 0), (0, 0), (0, q.shape[2] - problem.T)])[:, :, None] for x in (lse, delta)]
    inputs = q, k, v, do, *rows
    scratch = [(loop.block_q, q.shape[-1])]
    (dq,) = _launch(dq_kernel, call, loop, "qkkqrr", "q", [q], scratch, interpret)(*inputs)
    loop = InnerLoop(problem, *blocks, query_tiles)
    scratch = [(loop.block_k, q.shape[-1])] * 2
    dk, dv = _launch(dkv_kernel, call, loop, "qkkqrr", "kk", [k, v], scratch, interpret)(*inputs)
    lengths = (dq, problem.T), (dk, problem.S), (dv, problem.S)
    return tuple(_given_back(gradient, length, problem) for gradient, length in lengths)


def _specs(loop, H):
    """Specs of a tile of queries, keys and statistics, by a letter, and of a table, which
    a function makes.

    For programs (b, n, i, step), or (b, kv, j, head, step) where outer tiles are keys.
    """
    group = loop.problem.group

    def place(b, heads, outer, *rest):
        """b, n, i and j of a program."""
        *head, step, scalars = rest
        n = heads * group + head[0] if head else heads
        inner, *_ = loop.tile(b, n, outer, step, scalars)
        return (b, n, inner, outer) if head else (b, n, outer, inner)

    def spec(*block, at):
        return pl.BlockSpec((None, None, *block), lambda *program: at(*place(*program)))

    def of_table(array):
        own = lambda *numbers: tuple(own_index(number, array, axis) for axis, number in enumerate(numbers))
        blocks = zip(array.shape[2:], (loop.block_k, loop.block_q), strict=True)
        block = (min(size, block) for size, block in blocks)
        return spec(*block, at=lambda b, n, i, j: own(b, n, j, i))

    return {
        "q": spec(loop.block_q, H, at=lambda b, n, i, j: (b, n, i, 0)),
        # Grouped queries: `group` query heads read the same key/value head, in place.
        "k": spec(loop.block_k, H, at=lambda b, n, i, j: (b, n // group, j, 0)),
        "r": spec(1, loop.block_q, at=lambda b, n, i, j: (b, n, 0, i)),
    }, of_table


def _launch(kernel, call, loop, reads, writes, like, scratch, interpret):
    """The kernel, as a function of arrays, over a grid of which the first three axes may go in any order.

    reads, writes: letters of `_specs`. like: the outputs' shapes.
    """
    problem, (specs, of_table) = loop.problem, _specs(loop, like[0].shape[-1])
    scalars, extras = _masks(call, loop)
    grid = problem.B, problem.N, pl.cdiv(problem.T, loop.block_q), loop.steps
    if loop.tiles_of is query_tiles:
        tiles = pl.cdiv(problem.S, loop.block_k)
        grid = problem.B, problem.K, tiles, problem.group, loop.steps
    semantics = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    run = pl.pallas_call(
        functools.partial(kernel, loop=loop),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,  # the `Scalars`, which the index maps read
            grid=grid,
            in_specs=[*(specs[letter] for letter in reads), jax.tree.map(of_table, extras)],
            out_specs=[specs[letter] for letter in writes],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=interpret,
        name=f"flash_attention_tpu_{kernel.__name__.removesuffix('_kernel')}",
    )
    return lambda *arrays: run(scalars, *arrays, extras)


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


def _masks(call, loop):
    """The `Scalars` of a call, and its `Extras` as tables on their side: a copy of each array."""
    extras, lists = for_kernel(call, loop.block_q, loop.block_k, "queries" if loop.tiles_of is key_tiles else "keys")

    def table(array):
        array = array.astype({"bool": "int8", "float16": "float32"}.get(array.dtype.name, array.dtype)).swapaxes(2, 3)
        blocks = zip(array.shape[2:], (loop.block_k, loop.block_q), strict=True)
        return jnp.pad(array, [(0, 0), (0, 0), *((0, -size % block if size > 1 else 0) for size, block in blocks)])

    with_axes = {"query_segment_ids": (1, 3), "key_segment_ids": (1, 2), "sinks": (2, 3)}
    given = {name: getattr(extras, name) for name in with_axes if getattr(extras, name) is not None}
    as_tables = {name: jnp.expand_dims(array, with_axes[name]) for name, array in given.items()}
    tables = extras._replace(batch=None, heads=None, **as_tables)
    return Scalars(*call.real_lengths(), lists, extras.batch, extras.heads), jax.tree.map(table, tables)


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
