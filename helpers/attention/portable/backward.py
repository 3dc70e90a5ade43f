"""The plain backward kernels: the gradients of attention without ever storing a table.

FlashAttention-2 (arXiv 2307.08691), algorithm 2, for one query head (ds of FlashAttention's
appendix B.4, arXiv 2205.14135, with the gradient of lse added):

    p      = exp(scale q k^T - lse)         the weights again, from the residual lse
    dp     = do v^T
    delta  = rowsum(out * do) - dlse
    ds     = p * (dp - delta)
    dv     = p^T do,   dq = scale ds k,   dk = scale ds^T q

A gradient has one owner, the program that writes it, and that decides the order of the loops:

    dq_kernel      a tile of queries; loops over the tiles of keys that it sees
    dkv_kernel     a tile of keys of one key/value head; loops over the tiles of queries that see
                   it, and over the query heads that share the head, so that their sum stays on chip
    fused_kernel   dkv_kernel that also adds its part of dq to memory, atomically: 5 products for
                   each pair of tiles instead of 7, at the price of a dq whose rounding depends on
                   the order in which programs arrive

Where logits are more than scaled products, ds goes back to those before it meets k and q. A sink is a key without a
value, whose weight is missing in p and counts in lse.

delta is made outside of the kernels, of an out that keeps the low bits which rounding to 16 took off (see `low_bits`).
What delta misses is in ds of every key, with one sign, and comes back in dq times what the keys have in common.

Refs, as one program sees them (H' is head_padded: head_dim rounded up to a power of two, G the query heads of
one key/value head). In dkv_kernel and fused_kernel the queries' side has an axis for the group:

    q_ref, do_ref     (block_q, H')   or (T', G, H'), T' in whole tiles
    k_ref, v_ref      (S', H')        or (block_k, H')
    lse_ref, delta_ref  (block_q,)    or (G, T'), float32
    query_length_ref, key_length_ref  (), or None
    extras, lists     what few calls have, see `pairs`, or None
    dq_ref (block_q, H'); dk_ref, dv_ref (block_k, H')
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention.low_bits import with_low_bits
from helpers.attention.masking import for_kernel, key_tiles, query_tiles
from helpers.attention.portable.pairs import Pair, bounds_of, over_tiles, specs
from helpers.attention.portable.tiles import (
    LOG2_E,
    dot,
    how_it_runs,
    length_of,
    padded_head_dim,
    real,
    select_tiles,
    whole,
)


def p_and_ds(q, k, v, do, lse, delta, pair):
    """Weights of two tiles, gradient of their logits: (block_q, block_k) float32.

    Third, a function that takes such a gradient back to the scaled products.
    """
    s = (pair.problem.scale * LOG2_E) * dot(q, k.T)
    s, pull_back = pair.logits(s)
    p = pair.hidden(jnp.exp2(s - (LOG2_E * lse)[:, None]), 0)
    dp = dot(do, v.T)
    return p, p * (dp - delta[:, None]), pull_back


def add_atomically(ref, index, value):
    """ref[index] += value, in a step that nothing comes between. Of plain Pallas only Triton's module has it."""
    from jax.experimental.pallas import triton

    triton.atomic_add(ref, index, value)


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
):
    """Writes dk and dv of one tile of keys; with a third gradient ref, adds to dq as well."""
    dk_ref, dv_ref, dq_ref = (*gradient_refs, None)[:3]
    query_length = length_of(query_length_ref, problem.T)
    key_length = length_of(key_length_ref, problem.S)
    lengths = query_length, key_length
    k_start = pl.program_id(0) * block_k
    k_stop = k_start + block_k
    cols = k_start + jnp.arange(block_k)
    k, v = (real(ref[...], cols < key_length, problem.H) for ref in (k_ref, v_ref))

    def one_query_tile(head, i, is_full, gradients):
        dk, dv = gradients
        rows = i * block_q + jnp.arange(block_q)
        tile = pl.ds(i * block_q, block_q)
        is_row = rows < query_length
        q = real(q_ref[tile, head, :], is_row, problem.H)
        do = real(do_ref[tile, head, :], is_row, problem.H)
        lse = jnp.where(is_row, lse_ref[head, tile], 0)
        delta = jnp.where(is_row, delta_ref[head, tile], 0)

        starts = i * block_q, k_start
        pair = Pair(problem, lengths, extras, head, rows, cols, starts, is_full)
        p, ds, pull_back = p_and_ds(q, k, v, do, lse, delta, pair)
        dv += dot(p.astype(do.dtype).T, do)
        ds = pull_back(ds).astype(q.dtype)
        dk += dot(ds.T, q)
        if dq_ref is not None:
            add_atomically(dq_ref, (tile, head, slice(None)), problem.scale * dot(ds, k))
        return dk, dv

    in_band = query_tiles(k_start, k_stop, block_q, problem.band, *lengths, xp=jnp)

    def one_head(head, gradients):
        one_tile = functools.partial(one_query_tile, head)
        bounds = bounds_of(lists, head, in_band)
        return over_tiles(lists, head, bounds, one_tile, gradients)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, problem.group, one_head, (zeros, zeros))
    dk_ref[...] = (problem.scale * dk).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def dq_kernel(
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
    dq_ref,
    *,
    problem,
    block_q,
    block_k,
):
    """Writes dq of one tile of queries."""
    query_length = length_of(query_length_ref, problem.T)
    key_length = length_of(key_length_ref, problem.S)
    lengths = query_length, key_length
    q_start = pl.program_id(0) * block_q
    rows = q_start + jnp.arange(block_q)
    q, do = (real(ref[...], rows < query_length, problem.H) for ref in (q_ref, do_ref))
    lse, delta = (jnp.where(rows < query_length, ref[...], 0) for ref in (lse_ref, delta_ref))

    def one_key_tile(j, is_full, dq):
        cols = j * block_k + jnp.arange(block_k)
        tile = pl.ds(j * block_k, block_k)
        k, v = (real(ref[tile, :], cols < key_length, problem.H) for ref in (k_ref, v_ref))
        pair = Pair(problem, lengths, extras, 0, rows, cols, (q_start, j * block_k), is_full)
        _, ds, pull_back = p_and_ds(q, k, v, do, lse, delta, pair)
        return dq + dot(pull_back(ds).astype(k.dtype), k)

    in_band = key_tiles(q_start, q_start + block_q, block_k, problem.band, *lengths, xp=jnp)
    dq = over_tiles(lists, 0, bounds_of(lists, 0, in_band), one_key_tile, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (problem.scale * dq).astype(dq_ref.dtype)


def backward(call, out, lse, dout, dlse, low=None, *, fused=False, interpret=False, **tiles):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    out (B, T, N, H), lse (B, N, T) float32 and low, the `low_bits` of out, are what the forward pass returned; dout
    and dlse are the gradients of the first two. Beyond inputs and outputs it allocates delta (B, N, T) in float32,
    and with `fused` a float32 dq whose sides are rounded up to whole blocks. Without `fused` the same input gives the
    same bits each time.

    interpret and tiles: as for `forward`.
    """
    problem = call.problem
    dkv_tiles, dq_tiles = select_tiles("dkv", problem, **tiles), select_tiles("dq", problem, **tiles)
    exact = with_low_bits(out, low)
    delta = (exact * dout.astype(jnp.float32)).sum(axis=-1).swapaxes(1, 2) - dlse
    # A row that sees no key passes no gradient, whatever arrives at its lse of -inf.
    delta = jnp.where(lse == -jnp.inf, 0, delta)
    if call.changes_logits:
        lse = jnp.where(lse == -jnp.inf, 0, lse)  # a logit may be -inf without being hidden, and its weight must be 0
    arrays = (call.query, call.key, call.value, dout, lse, delta, call.query_lengths, call.key_lengths)
    of_keys = *arrays, *for_kernel(call, dkv_tiles.block_q, dkv_tiles.block_k, outer="keys")
    if fused:
        return _fused(problem, of_keys, dkv_tiles, interpret)
    of_queries = *arrays, *for_kernel(call, dq_tiles.block_q, dq_tiles.block_k)
    return _dq(problem, of_queries, dq_tiles, interpret), *_dkv(problem, of_keys, dkv_tiles, interpret)


def _parameters(problem, tiles):
    return {"problem": problem, "block_q": tiles.block_q, "block_k": tiles.block_k}


def _launch(kernel, name, tiles, interpret, **options):
    options |= how_it_runs(interpret, tiles.num_warps, tiles.num_stages)
    return pl.pallas_call(kernel, name=f"flash_attention_{name}", **options)


def _mask_specs(masks, heads, tiles):
    """Specs of two lengths, extras and lists, each of which may be None; the batch is the last axis of the grid."""
    *lengths, extras, lists = masks
    spec = pl.BlockSpec((None,), lambda i, n, b: (b,))
    blocks = heads, tiles.block_q, tiles.block_k
    return [*(None if length is None else spec for length in lengths), specs(extras, *blocks), specs(lists, *blocks)]


def _dq(problem, arrays, tiles, interpret):
    """Programs (i, n, b): one tile of queries of one head, with all keys that it may see."""
    B, T, S, N, H = problem.B, problem.T, problem.S, problem.N, problem.H
    head_padded = padded_head_dim(H)
    q_spec = pl.BlockSpec((None, tiles.block_q, None, head_padded), lambda i, n, b: (b, i, n, 0))
    row_spec = pl.BlockSpec((None, None, tiles.block_q), lambda i, n, b: (b, n, i))
    keys = (None, whole(S, tiles.block_k), None, head_padded)
    keys_spec = pl.BlockSpec(keys, lambda i, n, b: (b, 0, n // problem.group, 0))
    return _launch(
        functools.partial(dq_kernel, **_parameters(problem, tiles)),
        "dq",
        tiles,
        interpret,
        grid=(pl.cdiv(T, tiles.block_q), N, B),
        in_specs=[q_spec, keys_spec, keys_spec, q_spec, row_spec, row_spec, *_mask_specs(arrays[-4:], 1, tiles)],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct((B, T, N, H), problem.dtype),
    )(*arrays)


def _dkv_options(problem, arrays, tiles):
    """Programs (j, kv, b): one tile of keys of one key/value head, with all queries of its group."""
    B, T, S, K, H, group = problem.B, problem.T, problem.S, problem.K, problem.H, problem.group
    head_padded, T_padded = padded_head_dim(H), whole(T, tiles.block_q)
    k_spec = pl.BlockSpec((None, tiles.block_k, None, head_padded), lambda j, kv, b: (b, j, kv, 0))
    group_spec = pl.BlockSpec((None, T_padded, group, head_padded), lambda j, kv, b: (b, 0, kv, 0))
    rows_spec = pl.BlockSpec((None, group, T_padded), lambda j, kv, b: (b, kv, 0))
    masks = _mask_specs(arrays[-4:], group, tiles)
    return {
        "grid": (pl.cdiv(S, tiles.block_k), K, B),
        "in_specs": [group_spec, k_spec, k_spec, group_spec, rows_spec, rows_spec, *masks],
        "out_specs": [k_spec, k_spec],
        "out_shape": [jax.ShapeDtypeStruct((B, S, K, H), problem.dtype)] * 2,
    }


def _dkv(problem, arrays, tiles, interpret):
    kernel = functools.partial(dkv_kernel, **_parameters(problem, tiles))
    return _launch(kernel, "dkv", tiles, interpret, **_dkv_options(problem, arrays, tiles))(*arrays)


def _fused(problem, arrays, tiles, interpret):
    """dkv_kernel with dq added atomically to zeros; tiles of dq are whole, so that no add needs a mask."""
    head_padded, T_padded = padded_head_dim(problem.H), whole(problem.T, tiles.block_q)
    zeros = jnp.zeros((problem.B, T_padded, problem.N, head_padded), jnp.float32)
    dq_spec = pl.BlockSpec((None, T_padded, problem.group, head_padded), lambda j, kv, b: (b, 0, kv, 0))
    options = _dkv_options(problem, arrays, tiles)
    options["in_specs"] += [dq_spec]
    options["out_specs"] += [dq_spec]
    options["out_shape"] += [jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)]
    position_of_zeros = len(jax.tree.leaves(arrays))

    def fused_kernel(*refs):
        inputs, (_, *gradient_refs) = refs[: len(arrays)], refs[len(arrays) :]
        dkv_kernel(*inputs, *gradient_refs, **_parameters(problem, tiles))

    aliases = {position_of_zeros: 2}  # dq is added to the zeros in place
    launch = _launch(fused_kernel, "fused_backward", tiles, interpret, input_output_aliases=aliases, **options)
    dk, dv, dq = launch(*arrays, zeros)
    return dq[:, : problem.T, :, : problem.H].astype(problem.dtype), dk, dv
