"""The portable backward kernels: the gradients of attention without ever storing a table.

FlashAttention-2 (arXiv 2307.08691), algorithm 2, for one query head (ds of FlashAttention's
appendix B.4, arXiv 2205.14135, with the gradient of lse added):

    p      = exp(scale q k^T - lse)         the weights again, from the residual lse
    dp     = do v^T
    delta  = rowsum(out * do) - dlse
    ds     = p * (dp - delta)
    dv     = p^T do,   dq = scale ds k,   dk = scale ds^T q

A gradient has one owner, the program that writes it, and that decides the order of the loops:

    delta_kernel   a tile of queries
    dq_kernel      a tile of queries; loops over the tiles of keys that it sees
    dkv_kernel     a tile of keys of one key/value head; loops over the tiles of queries that see
                   it, and over the query heads that share the head, so that their sum stays on chip
    fused_kernel   dkv_kernel that also adds its part of dq to memory, atomically: 5 products for
                   each pair of tiles instead of 7, at the price of a dq whose rounding depends on
                   the order in which programs arrive

Where logits are more than scaled products, ds goes back to those before it meets k and q. A sink is a key without a
value, whose weight is missing in p and counts in lse.

The rows of ds add up to dlse. With a delta made from an out that was rounded, to 16 bits or to the TF32 of
a GPU's float32 products, they miss it by the error of delta, and dq_kernel mends delta by that much wherever
it would be seen: where the softmax is sharp, or values have a part in common, so that delta is large beside
dp - delta. dkv_kernel then gets the mended delta.

Refs, as one program sees them (H' is head_padded: head_dim rounded up to a power of two, G the query heads of
one key/value head). In dkv_kernel and fused_kernel the queries' side has an axis for the group:

    q_ref, do_ref     (block_q, H')   or (T, G, H')
    k_ref, v_ref      (S, H')         or (block_k, H')
    lse_ref, delta_ref, dlse_ref  (block_q,)  or (G, T), float32
    query_length_ref, key_length_ref  (), or None
    extras, lists     what few calls have, see `pairs`, or None
    dq_ref (block_q, H'); dk_ref, dv_ref (block_k, H')
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from helpers.attention.masking import for_kernel, key_tiles, query_tiles
from helpers.attention.portable.pairs import Pair, bounds_of, over_tiles, sink_of, specs
from helpers.attention.portable.tiles import LOG2_E, dot, exp2, length_of, padded_head_dim, select_tiles

ROUNDINGS = 0.5  # times eps and the norm of a row of ds, of which rounding it adds .3 to its sum
TF32_EPS = 2.0**-10  # of the operands of float32 products on a GPU, unless a higher precision is asked for


def delta_kernel(out_ref, do_ref, lse_ref, dlse_ref, delta_ref, *, problem, block_q):
    rows = pl.program_id(0) * block_q + jnp.arange(block_q)
    row_mask = rows < problem.T
    mask = row_mask[:, None] & (jnp.arange(out_ref.shape[-1])[None, :] < problem.H)
    out = plt.load(out_ref, mask=mask, other=0).astype(jnp.float32)
    do = plt.load(do_ref, mask=mask, other=0).astype(jnp.float32)
    lse = plt.load(lse_ref, mask=row_mask, other=0)
    dlse = plt.load(dlse_ref, mask=row_mask, other=0)
    delta = (out * do).sum(axis=1) - dlse
    # A row that sees no key passes no gradient, whatever arrives at its lse of -inf.
    plt.store(delta_ref, jnp.where(lse == -jnp.inf, 0, delta), mask=row_mask)


def p_and_ds(q, k, v, do, lse, delta, pair, interpret):
    """Weights of two tiles, gradient of their logits: (block_q, block_k) float32.

    Third, a function that takes such a gradient back to the scaled products.
    """
    s = (pair.problem.scale * LOG2_E) * dot(q, k.T)
    s, pull_back = pair.logits(s)
    p = pair.hidden(exp2(s - (LOG2_E * lse)[:, None], interpret), 0)
    dp = dot(do, v.T)
    return p, p * (dp - delta[:, None]), pull_back


def dkv_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    query_length_ref,
    key_length_ref,
    extras,
    lists,
    *gradient_refs,
    problem,
    block_q,
    block_k,
    interpret,
):
    """Writes dk and dv of one tile of keys; with a third gradient ref, adds to dq as well."""
    dk_ref, dv_ref, dq_ref = (*gradient_refs, None)[:3]
    query_length = length_of(query_length_ref, problem.T)
    key_length = length_of(key_length_ref, problem.S)
    lengths = query_length, key_length
    k_start = pl.program_id(0) * block_k
    k_stop = k_start + block_k
    cols = k_start + jnp.arange(block_k)
    in_head = jnp.arange(k_ref.shape[-1])[None, :] < problem.H
    k_mask = (cols < key_length)[:, None] & in_head
    k = plt.load(k_ref, mask=k_mask, other=0)
    v = plt.load(v_ref, mask=k_mask, other=0)

    def one_query_tile(head, i, is_full, gradients):
        dk, dv = gradients
        rows = i * block_q + jnp.arange(block_q)
        tile = pl.ds(i * block_q, block_q)
        q_mask = (rows < query_length)[:, None] & in_head
        q = plt.load(q_ref.at[tile, head, :], mask=q_mask, other=0)
        do = plt.load(do_ref.at[tile, head, :], mask=q_mask, other=0)
        lse = plt.load(lse_ref.at[head, tile], mask=rows < query_length, other=0)
        delta = plt.load(delta_ref.at[head, tile], mask=rows < query_length, other=0)

        starts = i * block_q, k_start
        pair = Pair(problem, lengths, extras, head, rows, cols, starts, is_full)
        p, ds, pull_back = p_and_ds(q, k, v, do, lse, delta, pair, interpret)
        dv += dot(p.astype(do.dtype).T, do)
        ds = pull_back(ds).astype(q.dtype)
        dk += dot(ds.T, q)
        if dq_ref is not None:
            plt.atomic_add(dq_ref, (tile, head, slice(None)), problem.scale * dot(ds, k))
        return dk, dv

    in_band = query_tiles(k_start, k_stop, block_q, problem.band, *lengths, xp=jnp)

    def one_head(head, gradients):
        one_tile = functools.partial(one_query_tile, head)
        bounds = bounds_of(lists, head, in_band)
        return over_tiles(lists, head, bounds, one_tile, gradients)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, problem.group, one_head, (zeros, zeros))
    store_mask = (cols < problem.S)[:, None] & in_head
    plt.store(dk_ref, (problem.scale * dk).astype(dk_ref.dtype), mask=store_mask)
    plt.store(dv_ref, dv.astype(dv_ref.dtype), mask=store_mask)


def dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dlse_ref,
    query_length_ref,
    key_length_ref,
    extras,
    lists,
    dq_ref,
    mended_delta_ref,
    *,
    problem,
    block_q,
    block_k,
    interpret,
    mends_delta,
):
    """Writes dq of one tile of queries, and with mends_delta a delta without the error that a rounded out left in."""
    query_length = length_of(query_length_ref, problem.T)
    key_length = length_of(key_length_ref, problem.S)
    q_start = pl.program_id(0) * block_q
    rows = q_start + jnp.arange(block_q)
    row_mask = rows < query_length
    in_head = jnp.arange(q_ref.shape[-1])[None, :] < problem.H
    q_mask = row_mask[:, None] & in_head
    q = plt.load(q_ref, mask=q_mask, other=0)
    do = plt.load(do_ref, mask=q_mask, other=0)
    lse = plt.load(lse_ref, mask=row_mask, other=0)
    delta = plt.load(delta_ref, mask=row_mask, other=0)

    def one_key_tile(delta, j, is_full, state):
        dq, ds_sum, ds_size, ds_most = state
        cols = j * block_k + jnp.arange(block_k)
        tile = pl.ds(j * block_k, block_k)
        k_mask = (cols < key_length)[:, None] & in_head
        k = plt.load(k_ref.at[tile, :], mask=k_mask, other=0)
        v = plt.load(v_ref.at[tile, :], mask=k_mask, other=0)
        pair = Pair(problem, (query_length, key_length), extras, 0, rows, cols, (q_start, j * block_k), is_full)
        _, ds, pull_back = p_and_ds(q, k, v, do, lse, delta, pair, interpret)
        dq += dot(pull_back(ds).astype(k.dtype), k)
        size = jnp.abs(ds)
        return dq, ds_sum + ds.sum(axis=1), ds_size + size.sum(axis=1), jnp.maximum(ds_most, size.max(axis=1))

    def all_key_tiles(state, delta, stop):
        return over_tiles(lists, 0, (first, stop), functools.partial(one_key_tile, delta), state)

    in_band = key_tiles(q_start, q_start + block_q, block_k, problem.band, query_length, key_length, xp=jnp)
    first, stop = bounds_of(lists, 0, in_band)
    no_sums = 3 * (jnp.zeros(block_q, jnp.float32),)
    dq, ds_sum, ds_size, ds_most = all_key_tiles((jnp.zeros(q.shape, jnp.float32), *no_sums), delta, stop)

    if mends_delta:
        # A row of ds adds up to dlse, and to what a sink takes; what it misses is the
        # error of delta.
        dlse = plt.load(dlse_ref, mask=row_mask, other=0)
        sink = sink_of(extras)
        if sink is not None:
            dlse += exp2(LOG2_E * (sink - lse), interpret) * delta
        error = jnp.where(lse == -jnp.inf, 0, ds_sum - dlse)
        dtype = problem.dtype
        eps = TF32_EPS if dtype.itemsize == 4 else float(jnp.finfo(dtype).eps)
        # All keys have their share of this error, of one sign, so that what keys have in
        # common adds up; the rounding of ds has both signs. Where the error is as small
        # as that, as a rule where values have nothing in common, the second sweep is
        # empty. (norm, which cannot overflow, is at least that of the row.)
        norm = jnp.sqrt(ds_size) * jnp.sqrt(ds_most)
        again = (jnp.abs(error) - ROUNDINGS * eps * norm).max() > 0
        delta += error
        dq = jnp.where(again, 0, dq)
        stop *= again.astype(jnp.int32)
        dq, *_ = all_key_tiles((dq, *no_sums), delta, stop)
    in_array = rows < problem.T
    store_mask = in_array[:, None] & in_head
    plt.store(dq_ref, (problem.scale * dq).astype(dq_ref.dtype), mask=store_mask)
    plt.store(mended_delta_ref, delta, mask=in_array)


def backward(call, out, lse, dout, dlse, *, fused=False, mends_delta=True, interpret=False, **tiles):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    out (B, T, N, H) and lse (B, N, T) float32 are what `forward` returned; dout and dlse are their
    gradients. Beyond inputs and outputs it allocates delta (B, N, T) in float32, and with `fused` a
    float32 dq whose sides are rounded up to whole blocks. `fused` does not mend delta. Without it the
    same input gives the same bits each time.

    mends_delta: False where out and lse are those of more keys than the call has, as in `ring`: rows of ds add up to
    dlse over all of the keys only.

    tiles: block_q, block_k, num_warps and num_stages of all its kernels, as for `forward`.
    """
    problem = call.problem
    dkv_tiles, dq_tiles = select_tiles("dkv", problem, **tiles), select_tiles("dq", problem, **tiles)
    delta = _delta(problem, out, lse, dout, dlse, dq_tiles, interpret)
    if call.changes_logits:
        lse = jnp.where(lse == -jnp.inf, 0, lse)  # a logit may be -inf without being hidden, and its weight must be 0
    arrays = (call.query, call.key, call.value, dout, lse, delta)
    lengths = call.query_lengths, call.key_lengths
    of_keys = *lengths, *for_kernel(call, dkv_tiles.block_q, dkv_tiles.block_k, outer="keys")
    if fused:
        return _fused(problem, (*arrays, *of_keys), dkv_tiles, interpret)
    of_queries = *lengths, *for_kernel(call, dq_tiles.block_q, dq_tiles.block_k)
    dq, delta = _dq(problem, arrays, dlse, of_queries, dq_tiles, interpret, mends_delta)
    return dq, *_dkv(problem, (*arrays[:5], delta, *of_keys), dkv_tiles, interpret)


def _parameters(problem, tiles, interpret):
    return {"problem": problem, "block_q": tiles.block_q, "block_k": tiles.block_k, "interpret": interpret}


def _launch(kernel, name, tiles, interpret, **options):
    return pl.pallas_call(
        kernel,
        name=f"flash_attention_{name}",
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        **options,
    )


def _query_specs(problem, block_q):
    """Specs of a tile of queries, of its statistics, and of all keys, for programs (i, n, b)."""
    head_padded = padded_head_dim(problem.H)
    return (
        pl.BlockSpec((None, block_q, None, head_padded), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, None, block_q), lambda i, n, b: (b, n, i)),
        pl.BlockSpec((None, problem.S, None, head_padded), lambda i, n, b: (b, 0, n // problem.group, 0)),
    )


def _mask_specs(masks, heads):
    """Specs of two lengths, extras and lists, each of which may be None; the batch is the last axis of the grid."""
    *lengths, extras, lists = masks
    spec = pl.BlockSpec((None,), lambda i, n, b: (b,))
    return [*(None if length is None else spec for length in lengths), specs(extras, heads), specs(lists, heads)]


def _delta(problem, out, lse, dout, dlse, tiles, interpret):
    q_spec, row_spec, _ = _query_specs(problem, tiles.block_q)
    return _launch(
        functools.partial(delta_kernel, problem=problem, block_q=tiles.block_q),
        "delta",
        tiles,
        interpret,
        grid=(pl.cdiv(problem.T, tiles.block_q), problem.N, problem.B),
        in_specs=[q_spec, q_spec, row_spec, row_spec],
        out_specs=row_spec,
        out_shape=jax.ShapeDtypeStruct((problem.B, problem.N, problem.T), jnp.float32),
    )(out, dout, lse, dlse)


def _dq(problem, arrays, dlse, masks, tiles, interpret, mends_delta=True):
    """(dq, delta), the second in place of the one that came in."""
    # Interpreted float32 products are exact enough as they are; a GPU rounds their operands to TF32.
    mends_delta = mends_delta and (problem.dtype.itemsize == 2 or not interpret)
    q_spec, row_spec, all_keys_spec = _query_specs(problem, tiles.block_q)
    return _launch(
        functools.partial(dq_kernel, mends_delta=mends_delta, **_parameters(problem, tiles, interpret)),
        "dq",
        tiles,
        interpret,
        grid=(pl.cdiv(problem.T, tiles.block_q), problem.N, problem.B),
        in_specs=[
            *[q_spec, all_keys_spec, all_keys_spec, q_spec, row_spec, row_spec, row_spec],
            *_mask_specs(masks, heads=1),
        ],
        out_specs=[q_spec, row_spec],
        out_shape=[
            jax.ShapeDtypeStruct((problem.B, problem.T, problem.N, problem.H), problem.dtype),
            jax.ShapeDtypeStruct((problem.B, problem.N, problem.T), jnp.float32),
        ],
        input_output_aliases={5: 1},
    )(*arrays, dlse, *masks)


def _dkv_options(problem, arrays, block_k):
    """Programs (j, kv, b): one tile of keys of one key/value head, with all queries of its group."""
    B, T, S, K, H, group = problem.B, problem.T, problem.S, problem.K, problem.H, problem.group
    head_padded = padded_head_dim(H)
    k_spec = pl.BlockSpec((None, block_k, None, head_padded), lambda j, kv, b: (b, j, kv, 0))
    group_spec = pl.BlockSpec((None, T, group, head_padded), lambda j, kv, b: (b, 0, kv, 0))
    rows_spec = pl.BlockSpec((None, group, T), lambda j, kv, b: (b, kv, 0))
    return {
        "grid": (pl.cdiv(S, block_k), K, B),
        "in_specs": [group_spec, k_spec, k_spec, group_spec, rows_spec, rows_spec, *_mask_specs(arrays[-4:], group)],
        "out_specs": [k_spec, k_spec],
        "out_shape": [jax.ShapeDtypeStruct((B, S, K, H), problem.dtype)] * 2,
    }


def _dkv(problem, arrays, tiles, interpret):
    kernel = functools.partial(dkv_kernel, **_parameters(problem, tiles, interpret))
    return _launch(kernel, "dkv", tiles, interpret, **_dkv_options(problem, arrays, tiles.block_k))(*arrays)


def _fused(problem, arrays, tiles, interpret):
    """dkv_kernel with dq added atomically to zeros; tiles of dq are whole, so that no add needs a mask."""
    T_padded = pl.cdiv(problem.T, tiles.block_q) * tiles.block_q
    head_padded = padded_head_dim(problem.H)
    zeros = jnp.zeros((problem.B, T_padded, problem.N, head_padded), jnp.float32)
    dq_spec = pl.BlockSpec((None, T_padded, problem.group, head_padded), lambda j, kv, b: (b, 0, kv, 0))
    options = _dkv_options(problem, arrays, tiles.block_k)
    options["in_specs"] += [dq_spec]
    options["out_specs"] += [dq_spec]
    options["out_shape"] += [jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)]
    position_of_zeros = len(jax.tree.leaves(arrays))

    def fused_kernel(*refs):
        inputs, (_, *gradient_refs) = refs[: len(arrays)], refs[len(arrays) :]
        dkv_kernel(*inputs, *gradient_refs, **_parameters(problem, tiles, interpret))

    aliases = {position_of_zeros: 2}  # dq is added to the zeros in place
    launch = _launch(fused_kernel, "fused_backward", tiles, interpret, input_output_aliases=aliases, **options)
    dk, dv, dq = launch(*arrays, zeros)
    return dq[:, : problem.T, :, : problem.H].astype(problem.dtype), dk, dv
