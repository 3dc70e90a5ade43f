"""The forward kernel by `plgpu.mma`: one program for each tile of queries, from Ampere to Blackwell.

FlashAttention-2 (arXiv 2307.08691), algorithm 1. For one tile of block_q queries, over tiles j of block_k keys, base 2
(scale_2 = scale log2 e):

    s      = q k_j^T                          masked to -inf
    m'     = max(m, rowmax s)
    alpha  = 2^(scale_2 m - scale_2 m')
    p      = 2^(scale_2 s - scale_2 m')       one multiply-add a score
    l      = alpha l + rowsum p
    acc    = alpha acc + p v_j
    out    = acc / l                          once, after the last tile
    lse    = ln 2 (scale_2 m + log2 l)

Every m gives the same out and lse, as long as no p leaves its range. So m rises only where a score is far above it, and
a warp of whose rows none has a new m rescales nothing (as in FlashAttention-4). That is where head_dim is above 64: at
64 the question costs more than it saves (records/NOTES.md).

Where logits are more than scaled products, s becomes those (`Pair.logits`), log2 e takes the place of scale_2, and p
is 2^(log2 e (s - m')). A sink takes its share of the weights after the last tile (`beside_sink`). Tiles of keys that
are hidden are not read.

For a gradient, out must be as exact as float32 allows (see `backward`). With `keeps_low_bits` the product has eight
columns more beside v, each a constant c, and out = acc c / (what became of c), as in `hopper.exact_out`.

A program is one warpgroup, whose four warps share out the queries. It keeps acc and p in registers, where p becomes
the left operand of the second product without a detour; k_j and v_j come through shared memory, `stages` tiles ahead.
The tiles that need a mask have a loop of their own, after the others: a choice within one loop would keep the compiler
from ordering its instructions. Of l a thread has what it summed itself; the sum over threads comes last.

Refs, laid out as in `warp` (T' and S' are whole tiles, H' a multiple of 64):

    q_ref (pieces, B, T', N H')   k_ref, v_ref (pieces, B, S', K H')   lengths_ref (2, B) int32, or None
    extras, lists     what few calls have, see `pairs`, or None
    out_ref (B, T', N H')         lse_ref (B, N, T') float32          low_ref (B, T', N H') int16, or None
    staying: of `warp.stay`, for the queries   rings: of `warp.streamed`, for keys and values
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.low_bits import low_bits
from helpers.attention.mosaic import warp
from helpers.attention.mosaic.pairs import Pair, changes_logits, extras_and_lists, order_of_keys
from helpers.attention.online_softmax import LOG2_E

RISE = 8  # of which p is at most two to the power
SMALLEST_FACTOR = 1e-30  # so that a factor times infinity is infinity
CONSTANT = {"bfloat16": 1 + 49 / 2**7, "float16": 1 + 395 / 2**10}  # beside v: in all of its digits, as values are


def forward_kernel(
    q_ref, k_ref, v_ref, lengths_ref, extras, lists, out_ref, lse_ref, low_ref, staying, rings, *,
    problem, tiles, interpret,
):  # fmt: skip
    block_q, block_k, _ = tiles
    pieces, head_padded = q_ref.shape[0], warp.padded_head_dim(problem.H)
    band, scale_2 = problem.band, problem.scale * LOG2_E
    # The maximum is that of the scores as they are, where scaling keeps their order.
    early, late = (None, scale_2) if scale_2 > SMALLEST_FACTOR else (scale_2, 1)
    is_changed = changes_logits(problem, extras)
    if is_changed:
        early, late = problem.scale, LOG2_E
    b, n, i = warp.of_program(problem.B, problem.N, out_ref.shape[1] // block_q, band)
    if band.right is not None:  # the programs with the most keys come first, so that no long one is the last
        i = out_ref.shape[1] // block_q - 1 - i
    q_start = i * block_q
    rows = pl.ds(q_start, block_q)
    head = pl.ds(n * head_padded, head_padded)
    lengths = warp.real_lengths(lengths_ref, b, problem)
    rises_rarely = head_padded > 64
    ready = warp.stay([q_ref], (b, rows, head), staying, interpret=interpret)
    constant = CONSTANT.get(problem.dtype.name)
    beside = [] if low_ref is None else [[plgpu.layout_cast(jnp.full((block_k, 8), constant, q_ref.dtype), warp.RHS)]]
    order = order_of_keys(problem, lists, lengths, b, n, i, tiles, k_ref.shape[2])

    def k_start(step):
        return order.place(step)[1] * block_k

    def one_key_tile(masked, step, staying, operands, state):
        (keys, values), (m, l, *sums) = operands, state
        (load_queries,) = staying  # again in each step: registers are scarcer than time
        queries, transposed = load_queries(), warp.load([ref.T for ref in keys], warp.RHS, interpret=interpret)
        s = warp.product(queries, transposed, interpret=interpret)
        if early is not None:
            s *= early
        pair = Pair(problem, extras, lengths, b, n, (q_start, k_start(step)), s.shape, query_axis=0)
        if is_changed:
            s = pair.logits(s)
        if masked:
            s = jnp.where(pair.seen(), s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1))
        if rises_rarely:
            m_new = jnp.where(late * (m_new - m) > RISE, m_new, m)
        # A row may have seen no key yet.
        reference = jnp.where(m_new == -jnp.inf, 0, m_new) if masked or is_changed else m_new
        alpha = jnp.exp2(late * (m - reference))
        if is_changed:  # a logit may be -1e10, of which a warp.product rounds off hundreds
            p = jnp.exp2(late * (s - warp.along(reference, s.shape, 0)))
        else:
            p = jnp.exp2(late * s - warp.along(late * reference, s.shape, 0))
        l, *sums = warp.rescaled(alpha, [l, *sums], rarely=rises_rarely, interpret=interpret)
        l += warp.sums_by_thread(p)
        p = warp.as_operand(p, pieces, q_ref.dtype, interpret=interpret)
        rights = [warp.load(values, warp.RHS, interpret=interpret), *beside]
        sums = [warp.product(p, right, total, interpret=interpret) for right, total in zip(rights, sums, strict=True)]
        return m_new, l, *sums

    sums = [warp.full((block_q, columns), 0) for columns in (head_padded, *len(beside) * [8])]
    state = warp.full((block_q,), -jnp.inf, warp.ROWS), warp.full((block_q, 8), 0), *sums
    kv_head = pl.ds((n // problem.group) * head_padded, head_padded)
    place = lambda step: (b, pl.ds(k_start(step), block_k), kv_head)
    loops = order.loops(one_key_tile)
    m, l, acc, *weights = warp.streamed([k_ref, v_ref], place, order.steps, rings, ready, loops, state)

    l = l.sum(axis=1)
    empty = l == 0
    # Of large logits, too, about the largest one or more, so that no weight of the backward pass overflows.
    lse = jnp.where(empty, -jnp.inf, late / LOG2_E * m + jnp.log2(jnp.where(empty, 1, l)) / LOG2_E)
    if weights:  # the eight columns are the same
        l = weights[0].max(axis=1) / constant
    exact = acc * warp.along(1 / jnp.where(empty, 1, l), acc.shape, 0)
    if extras is not None and extras.sinks is not None:
        share, lse = beside_sink(lse, extras.sink_of(extras.sinks, b, n))
        exact *= warp.along(share, exact.shape, 0)
    out = exact.astype(out_ref.dtype)
    warp.store(out_ref.at[b, rows, head], out, interpret=interpret)
    warp.store(lse_ref.at[b, n, rows], lse, interpret=interpret)
    if low_ref is not None:
        warp.store(low_ref.at[b, rows, head], low_bits(exact, out), interpret=interpret)


def beside_sink(lse, sink):
    """(what weight of 1 the keys have beside a sink, lse with it), from the lse of the keys of each row.

    The sink is a key without a value, so that out shrinks by exp(lse) / (exp(lse) + exp(sink)). A row that sees no key
    has the lse of its sink, to the last bit.
    """
    lse_2, sink_2 = LOG2_E * lse, LOG2_E * sink
    is_blind = lse == -jnp.inf
    top = jnp.maximum(lse_2, sink_2)
    own, other = jnp.exp2(lse_2 - top), jnp.exp2(sink_2 - top)
    both = jnp.where(is_blind, 1, own + other)
    return jnp.where(is_blind, 0, own / both), jnp.where(is_blind, sink, (top + jnp.log2(both)) / LOG2_E)


def forward(call, *, keeps_low_bits=False, tiles=None, interpret=False):
    """Attention of a checked `Call` by the kernel above.

    Returns out (B, T, N, H) in the dtype of query and lse (B, N, T) in float32; with `keeps_low_bits`, which is for
    calls in 16 bits, also the `low_bits` of out, int16 of its shape. Beyond these it allocates what is not laid out
    yet: copies of query, key, value and out, rounded up to whole tiles, where a length is no multiple of its tile or
    head_dim none of 64; a copy of value where keys have lengths; in float32 the pieces of all three, of 4 or 6 bytes a
    number; and what `extras_and_lists` says of other arrays. tiles: a `warp.Tiles`, chosen for the problem unless
    given. interpret: what interprets the kernel on a CPU.
    """
    problem = call.problem
    tiles = tiles or forward_tiles(problem)
    query = warp.laid_out(call.query, tiles.block_q)
    key, value = warp.laid_out(call.key, tiles.block_k), warp.laid_out(call.value, tiles.block_k, call.key_lengths)
    extras, lists = extras_and_lists(call, tiles.block_q, tiles.block_k)
    _, B, T, _ = query.shape
    N, head_padded = problem.N, warp.padded_head_dim(problem.H)
    out_shape = B, T, N * head_padded
    out, lse, low = plgpu.kernel(
        functools.partial(forward_kernel, problem=problem, tiles=tiles, interpret=bool(interpret)),
        out_type=[
            jax.ShapeDtypeStruct(out_shape, problem.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
            jax.ShapeDtypeStruct(out_shape, jnp.int16) if keeps_low_bits else None,
        ],
        grid=(B * N * (T // tiles.block_q),),
        grid_names=("program",),
        scratch_types=[
            warp.staying_tiles(1, tiles.block_q, 2 * tiles.stages * tiles.block_k, problem),
            warp.ring(2, tiles.block_k, tiles.stages, problem),
        ],
        compiler_params=warp.COMPILER_PARAMS,
        interpret=interpret,
    )(query, key, value, warp.lengths_of(call), extras, lists)
    results = warp.taken_up(out, problem.T, N, problem.H), lse[:, :, : problem.T]
    return (*results, warp.taken_up(low, problem.T, N, problem.H)) if keeps_low_bits else results


def forward_tiles(problem):
    """The `Tiles` of a problem: 32 queries for each warp, where registers have room for their sum, or 16."""
    head_padded = warp.padded_head_dim(problem.H)
    block_q = 128 if head_padded <= 128 and problem.T > 64 else 64
    return warp.fitting(warp.Tiles(block_q, 64 if head_padded <= 64 else 32, 2), block_q, "block_k", problem)
