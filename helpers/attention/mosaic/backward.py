"""The backward kernels by `plgpu.mma`: two, of which each writes what it owns, from Ampere to Blackwell.

The equations are those of `portable.backward` (FlashAttention-2, arXiv 2307.08691, algorithm 2), in base 2:
p = 2^(scale_2 q k^T - lse_2), with scale_2 = scale log2 e and lse_2 = lse log2 e.

    dq_kernel   a tile of queries; loops over the tiles of keys that it sees. Before it, in float32, another run of it
                adds up the rows of ds
    dkv_kernel  a tile of keys of one key/value head; loops over the tiles of queries that see it, and over the query
                heads that share the head, so that their sum stays in registers. It makes p and ds transposed, for
                what a sum holds can be the left operand of the next product, and no right one

The rows of ds add up to dlse, as exactly as delta is. So out has all of its float32 bits here (see `low_bits`), and is
a mean by the weights as they were rounded for p v (see `forward`). In float32 that is not enough: the tensor core cuts
off bits of dp, for all keys in the same direction, of which delta knows nothing. So delta takes up what the sums of the
rows of ds are off by.

Refs are those of `forward`, do_ref like q_ref, and

    lse_ref (B, N, T') lse_2, or lse where logits are more than scaled products    delta_ref (B, N, T'), both float32
    blind_ref (1,), int32: whether some query sees no key; None where such queries hold zeros, or there are none
    out_ref (B, T', N H') for dq, or (B, N, T') float32 for the sums of rows of ds
    dk_ref, dv_ref (B, S', K H')
    staying: of `warp.stay`, q and do in dq_kernel, k and v in dkv_kernel; rings: of `warp.streamed`, the other two

Where registers have room, they hold what stays as operands.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.extras import Extras
from helpers.attention.low_bits import delta_of
from helpers.attention.masking import NO_BAND, query_tiles, whole_tiles
from helpers.attention.mosaic import warp
from helpers.attention.mosaic.pairs import Pair, changes_logits, extras_and_lists, listed_order, order_of_keys
from helpers.attention.online_softmax import LOG2_E


def weights(pair, s, lse, masked):
    """p of a `Pair` from its products s, and what takes ds back to the scaled products. lse: `of_weights` of each."""
    if pair.changes_logits:
        s, pull_back = pair.logits_and_derivative(pair.problem.scale * s)
        p = jnp.exp2(LOG2_E * (s - lse))
    else:
        p, pull_back = jnp.exp2((pair.problem.scale * LOG2_E) * s - lse), lambda ds: ds
    if not masked:
        return p, pull_back
    seen = pair.seen()
    hide = lambda array: jnp.where(seen, array, 0)
    return hide(p), lambda ds: hide(pull_back(ds)) if pair.changes_logits else ds


def dq_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, blind_ref, lengths_ref, extras, lists, out_ref, staying, rings,
    *, problem, tiles, interpret, adds_up=False,
):  # fmt: skip
    """Writes dq of one tile of queries to out_ref, or, where it `adds_up`, the sums of their rows of ds."""
    block_q, block_k, _ = tiles
    pieces, head_padded = q_ref.shape[0], warp.padded_head_dim(problem.H)
    b, n, i = warp.of_program(problem.B, problem.N, q_ref.shape[2] // block_q, problem.band)
    if problem.band.right is not None:  # the programs with the most keys come first
        i = q_ref.shape[2] // block_q - 1 - i
    q_start = i * block_q
    rows, head = pl.ds(q_start, block_q), pl.ds(n * head_padded, head_padded)
    lengths = warp.real_lengths(lengths_ref, b, problem)
    in_registers = warp.row_bytes(problem) <= 128
    ready = warp.stay([q_ref, do_ref], (b, rows, head), staying, in_registers=in_registers, interpret=interpret)
    lse, delta = (warp.load_rows(ref.at[b, n, rows], warp.ROWS) for ref in (lse_ref, delta_ref))
    order = order_of_keys(problem, lists, lengths, b, n, i, tiles, k_ref.shape[2])

    def k_start(step):
        return order.place(step)[1] * block_k

    def one_key_tile(masked, step, staying, operands, total):
        keys, values = operands
        transposed = lambda refs: warp.load([ref.T for ref in refs], warp.RHS, interpret=interpret)
        queries, gradients = (load_again() for load_again in staying)
        s = warp.product(queries, transposed(keys), interpret=interpret)
        pair = Pair(problem, extras, lengths, b, n, (q_start, k_start(step)), s.shape, query_axis=0)
        p, pull_back = weights(pair, s, warp.along(lse, s.shape, 0), masked)
        dp = warp.product(gradients, transposed(values), interpret=interpret)
        ds = p * (dp - warp.along(delta, dp.shape, 0))
        if adds_up:
            return total + warp.sums_by_thread(ds)
        ds = pull_back(ds)
        ds = warp.as_operand(ds, pieces, q_ref.dtype, interpret=interpret)
        return warp.product(ds, warp.load(keys, warp.RHS, interpret=interpret), total, interpret=interpret)

    kv_head = pl.ds((n // problem.group) * head_padded, head_padded)
    place = lambda step: (b, pl.ds(k_start(step), block_k), kv_head)
    zeros = warp.full((block_q, 8 if adds_up else head_padded), 0)
    total = warp.streamed([k_ref, v_ref], place, order.steps, rings, ready, order.loops(one_key_tile), zeros)
    if adds_up:
        warp.store(out_ref.at[b, n, rows], total.sum(axis=1), interpret=interpret)
    else:
        total = problem.scale * total
        if blind_ref is not None:
            total = jnp.where(warp.along(lse, total.shape, 0) == -jnp.inf, 0, total)
        warp.store(out_ref.at[b, rows, head], total.astype(out_ref.dtype), interpret=interpret)


def clear_blind(operands, lse_ref, interpret):
    """Write zeros over queries in shared memory that see no key: a NaN would survive the weight of zero that they have.

    operands: the tiles of `warp.streamed`. lse_ref: of these queries, in GMEM.
    """
    is_blind = warp.load_rows(lse_ref, warp.RHS.reduce(1)) == -jnp.inf

    @pl.when(jnp.where(is_blind, 1.0, 0.0).max() > 0)
    def _():
        for start in range(0, lse_ref.shape[0], 16):  # at a time, for registers are scarce
            rows, cleared = pl.ds(start, 16), is_blind[start : start + 16]
            for ref in itertools.chain(*operands):
                (piece,) = warp.load([ref.at[rows]], warp.RHS, interpret=interpret)
                ref[rows] = jnp.where(warp.along(cleared, piece.shape, 0), 0, piece)
        plgpu.commit_smem()


def dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, blind_ref, lengths_ref, extras, lists, dk_ref, dv_ref, staying,
    rings, *, problem, tiles, interpret,
):  # fmt: skip
    block_q, block_k, _ = tiles
    pieces, head_padded = q_ref.shape[0], warp.padded_head_dim(problem.H)
    b, kv, j = warp.of_program(problem.B, problem.K, k_ref.shape[2] // block_k, problem.band)
    k_start = j * block_k
    rows, head = pl.ds(k_start, block_k), pl.ds(kv * head_padded, head_padded)
    lengths = warp.real_lengths(lengths_ref, b, problem)
    in_registers = warp.row_bytes(problem) <= 256  # so are both sums; 16 queries at once leave room for that
    part = 16 if in_registers else block_q
    ready = warp.stay([k_ref, v_ref], (b, rows, head), staying, in_registers=in_registers, interpret=interpret)

    k_stop = k_start + block_k
    if lists is None:
        needed = whole = query_tiles(k_start, k_stop, block_q, problem.band, *lengths, xp=jnp)
        # What a function makes of queries that are padding may be no number.
        has_tail = problem.T % block_q and changes_logits(problem, extras)
        if problem.band != NO_BAND or lengths_ref is not None or has_tail:
            whole = whole_tiles(needed, k_start, k_stop, block_q, problem.band.mirrored, *reversed(lengths))
        order = warp.tile_order(needed, whole, problem.group)
    else:
        order = listed_order(lists, b, kv, j, q_ref.shape[2] // block_q, problem.group)

    def head_and_start(step):
        member, i = order.place(step)
        return kv * problem.group + member, i * block_q

    def within(step):
        """head_and_start of a step, or of the last one where there is no such step."""
        n, q_start = head_and_start(jnp.maximum(jnp.minimum(step, order.steps - 1), 0))
        return n, jnp.minimum(q_start, q_ref.shape[2] - block_q)

    # From far, so asked for early: lists a step ahead, lse and delta a part ahead. The rest would only hold registers.
    listed = (lambda step: None) if lists is None else within

    def rows_of(step, start, found):
        """lse and delta of some queries. found: what `listed` found for the step."""
        n, q_start = found or within(step)
        columns = b, n, pl.ds(q_start + start, part)
        return [warp.load_rows(ref.at[columns], warp.COLUMNS) for ref in (lse_ref, delta_ref)]

    def one_query_tile(masked, step, staying, operands, state):
        found, *state = state
        next_found = listed(step + 1)
        if masked and blind_ref is not None:
            n, q_start = found or head_and_start(step)
            of_tile = lse_ref.at[b, n, pl.ds(q_start, block_q)]
            pl.when(blind_ref[0] > 0)(lambda: clear_blind(operands, of_tile, interpret))
        for start in range(0, block_q, part):
            parts = [[ref.at[pl.ds(start, part)] for ref in refs] for refs in operands]
            following = (step, start + part, found) if start + part < block_q else (step + 1, 0, next_found)
            state = some_queries(masked, found or head_and_start(step), start, following, staying, parts, state)
        return next_found, *state

    def some_queries(masked, place, start, following, staying, operands, state):
        (queries, gradients), (lse, delta, dk, dv) = operands, state
        load_keys, load_values = staying
        n, q_start = place
        transposed = lambda refs: warp.load([ref.T for ref in refs], warp.RHS, interpret=interpret)
        following = rows_of(*following)
        s = warp.product(load_keys(), transposed(queries), interpret=interpret)
        pair = Pair(problem, extras, lengths, b, n, (k_start, q_start + start), s.shape, query_axis=1)
        p, pull_back = weights(pair, s, warp.along(lse, s.shape, 1), masked)
        # dv first: fewer registers hold something at the same time.
        rounded = warp.as_operand(p, pieces, k_ref.dtype, interpret=interpret)
        dv = warp.product(rounded, warp.load(gradients, warp.RHS, interpret=interpret), dv, interpret=interpret)
        dp = warp.product(load_values(), transposed(gradients), interpret=interpret)
        ds = pull_back(p * (dp - warp.along(delta, dp.shape, 1)))
        ds = warp.as_operand(ds, pieces, k_ref.dtype, interpret=interpret)
        dk = warp.product(ds, warp.load(queries, warp.RHS, interpret=interpret), dk, interpret=interpret)
        return *following, dk, dv

    def place(step):
        n, q_start = head_and_start(step)
        return b, pl.ds(q_start, block_q), pl.ds(n * head_padded, head_padded)

    zeros = warp.full((block_k, head_padded), 0)
    first = listed(jnp.int32(0))
    loops, state = order.loops(one_query_tile), (first, *rows_of(jnp.int32(0), 0, first), zeros, zeros)
    *_, dk, dv = warp.streamed([q_ref, do_ref], place, order.steps, rings, ready, loops, state)
    warp.store(dk_ref.at[b, rows, head], (problem.scale * dk).astype(dk_ref.dtype), interpret=interpret)
    warp.store(dv_ref.at[b, rows, head], dv.astype(dv_ref.dtype), interpret=interpret)


def clears_blind(call):
    """Whether the kernels see to queries that see no key: those that masks alone blind are in tiles with a mask only.

    GPUs before Hopper have no store from RHS.
    """
    return warp.by_tma() and call.may_have_blind_rows and not call.changes_logits and call.extras.sinks is None


def backward(call, out, lse, dout, dlse, low=None, *, mends_delta=True, tiles=None, interpret=False):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    The arguments are those of `portable.backward`. Unless `clears_blind`, queries that see no key hold zeros, and so
    does dout there. Beyond inputs and outputs it allocates lse_2, delta and, for float32 calls, what mends it,
    (B, N, T) in float32, and what `forward` says of arrays that are not laid out yet, here with dout and the three
    gradients, and of key as of value, twice where the tiles of the kernels differ. The same input gives the same bits
    each time.

    mends_delta: False where out and lse are those of more keys than the call has, as in `ring`: rows of ds add up to
    dlse over all of the keys only. tiles: two `warp.Tiles`, of dq_kernel and of dkv_kernel, chosen for the problem
    unless given. interpret: what interprets the kernels on a CPU.
    """
    problem = call.problem
    blind = (lse == -jnp.inf).any()[None].astype(jnp.int32) if clears_blind(call) else None
    delta = delta_of(out, lse, dout, dlse, low)
    dq_tiles, dkv_tiles = tiles or backward_tiles(problem)
    q_shape = problem.B, problem.T, problem.N, problem.H
    k_shape = problem.B, problem.S, problem.K, problem.H
    # A logit may be -inf without being hidden, and its weight must be 0.
    of_weights = jnp.where(lse == -jnp.inf, 0, lse) if call.changes_logits else LOG2_E * lse
    launch = functools.partial(_launch, call, dout, of_weights, blind, interpret)
    of_queries = "queries", dq_tiles, dq_tiles.block_q, dq_tiles.block_k, [q_shape]
    if mends_delta and problem.dtype == jnp.float32:
        (sums,) = launch(delta, functools.partial(dq_kernel, adds_up=True), *of_queries, adds_up=True)
        if call.extras.sinks is not None:
            sums -= jnp.exp(call.extras.sinks[:, :, None] - lse) * delta
        delta += jnp.where(lse == -jnp.inf, 0, sums - dlse)
    (dq,) = launch(delta, dq_kernel, *of_queries)
    dk, dv = launch(delta, dkv_kernel, "keys", dkv_tiles, dkv_tiles.block_k, dkv_tiles.block_q, 2 * [k_shape])
    return dq, dk, dv


def _launch(call, dout, lse, blind, interpret, delta, kernel, outer, tiles, block, streaming, shapes, adds_up=False):
    """What a kernel writes: arrays of `shapes`, of which each program writes `block` rows of one head.

    streaming: rows of the tiles that pass by. adds_up: whether it writes one number a row, (B, heads, length) float32.
    """
    problem = call.problem
    (B, length, heads, H), head_padded = shapes[0], warp.padded_head_dim(problem.H)
    query, do = (warp.laid_out(array, tiles.block_q) for array in (call.query, dout))
    key, value = (warp.laid_out(array, tiles.block_k, call.key_lengths) for array in (call.key, call.value))
    extras, lists = extras_and_lists(call, *tiles[:2], outer=outer)
    rows = [jnp.pad(array, ((0, 0), (0, 0), (0, -problem.T % tiles.block_q))) for array in (lse, delta)]
    whole_length = length + -length % block
    written = jax.ShapeDtypeStruct((B, whole_length, heads * head_padded), problem.dtype)
    if adds_up:
        written = jax.ShapeDtypeStruct((B, heads, whole_length), jnp.float32)
    results = plgpu.kernel(
        functools.partial(kernel, problem=problem, tiles=tiles, interpret=bool(interpret)),
        out_type=[written for _ in shapes],
        grid=(B * heads * (whole_length // block),),
        grid_names=("program",),
        scratch_types=[
            warp.staying_tiles(2, block, 2 * tiles.stages * streaming, problem),
            warp.ring(2, streaming, tiles.stages, problem),
        ],
        compiler_params=warp.COMPILER_PARAMS,
        interpret=interpret,
    )(query, key, value, do, *rows, blind, warp.lengths_of(call), extras, lists)
    if adds_up:
        return [sums[:, :, :length] for sums in results]
    return [warp.taken_up(gradient, length, heads, H) for gradient in results]


def backward_tiles(problem):
    """The `Tiles` of dq_kernel and of dkv_kernel for a problem.

    dkv_kernel waits for shared memory, which its right operands come from: where registers have room for the sums of
    32 keys for each warp, a right operand serves two products. A group, a window, a soft cap or a score_mod leaves no
    such room. Where tiles of queries are short, it wants three in flight.
    """
    head_padded, bytes_of_row = warp.padded_head_dim(problem.H), warp.row_bytes(problem)
    dq = warp.Tiles(128 if head_padded <= 128 and problem.T > 64 else 64, 32, 2)
    if head_padded <= 64:
        is_simple = problem.group == 1 and problem.band.left is None and not changes_logits(problem, Extras())
        dkv = warp.Tiles(64, 128 if bytes_of_row <= 128 and is_simple and problem.S > 64 else 64, 2)
    elif head_padded <= 128:
        dkv = warp.Tiles(32, 64, 3 if bytes_of_row <= 256 else 2)
    else:
        dkv = warp.Tiles(warp.fewest_rows(problem), 64, 2)
    return warp.fitting(dq, 2 * dq.block_q, "block_k", problem), warp.fitting(dkv, 2 * dkv.block_k, "block_q", problem)
