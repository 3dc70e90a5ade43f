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

Refs, as one program sees them (H' is head_padded: head_dim rounded up to a power of two, G the query heads of
one key/value head). In dkv_kernel and fused_kernel the queries' side has an axis for the group:

    q_ref, do_ref     (block_q, H')   or (T', G, H'), T' in whole tiles
    k_ref, v_ref      (S', H')        or (block_k, H')
    lse_ref, delta_ref  (block_q,)    or (G, T'), float32
    masks             lengths, and what few calls have, see `pairs.Masks`
    dq_ref (block_q, H'); dk_ref, dv_ref (block_k, H')
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention.low_bits import delta_of
from helpers.attention.masking import key_tiles, query_tiles, whole_tiles
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.portable.pairs import Pair, masks_and_specs, over_tiles
from helpers.attention.portable.tiles import dot, how_it_runs, padded_head_dim, real, select_tiles, whole


def p_and_ds(q, k, v, do, lse, delta, pair):
    """Weights of two tiles, gradient of their logits: (block_q, block_k) float32.

    Third, a function that takes such a gradient back to the scaled products.
    """
    s = (pair.problem.scale * LOG2_E) * dot(q, k.T)
    s, pull_back = pair.logits(s)
    # At most 1, also where a large lse has lost digits.
    p = pair.hidden(jnp.exp2(jnp.minimum(s - (LOG2_E * lse)[:, None], 0)), 0)
    dp = dot(do, v.T)
    return p, p * (dp - delta[:, None]), pull_back


def add_atomically(ref, index, value):
    """ref[index] += value, in a step that nothing comes between. Of plain Pallas only Triton's module has it."""
    from jax.experimental.pallas import triton

    triton.atomic_add(ref, index, value)


def dkv_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, masks, *gradient_refs, problem, tiles):
    """Writes dk and dv of one tile of keys; with a third gradient ref, adds to dq as well."""
    dk_ref, dv_ref, dq_ref = (*gradient_refs, None)[:3]
    block_q, block_k = tiles.block_q, tiles.block_k
    lengths = query_length, key_length = masks.lengths(problem)
    k_start = pl.program_id(0) * block_k
    k_stop = k_start + block_k
    cols = k_start + jnp.arange(block_k)
    k, v = (real(ref[...], cols < key_length, problem.H) for ref in (k_ref, v_ref))

    # -- a tile of queries
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
        pair = Pair(problem, lengths, masks.extras, head, rows, cols, starts, is_full)
        p, ds, pull_back = p_and_ds(q, k, v, do, lse, delta, pair)
        dv += dot(p.astype(do.dtype).T, do)
        ds = pull_back(ds).astype(q.dtype)
        dk += dot(ds.T, q)
        if dq_ref is not None:
            add_atomically(dq_ref, (tile, head, slice(None)), problem.scale * dot(ds, k))
        return dk, dv

    # -- the two walks
    needed = query_tiles(k_start, k_stop, block_q, problem.band, *lengths, xp=jnp)
    mirrored = problem.band.mirrored
    whole = whole_tiles(needed, k_start, k_stop, block_q, mirrored, *reversed(lengths))

    def one_head(head, gradients):
        one_tile = functools.partial(one_query_tile, head)
        return over_tiles(masks.lists, head, needed, whole, one_tile, gradients)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, problem.group, one_head, (zeros, zeros))
    dk_ref[...] = (problem.scale * dk).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, masks, dq_ref, *, problem, tiles):
    """Writes dq of one tile of queries."""
    block_q, block_k = tiles.block_q, tiles.block_k
    lengths = query_length, key_length = masks.lengths(problem)
    q_start = pl.program_id(0) * block_q
    rows = q_start + jnp.arange(block_q)
    q, do = (real(ref[...], rows < query_length, problem.H) for ref in (q_ref, do_ref))
    lse, delta = (jnp.where(rows < query_length, ref[...], 0) for ref in (lse_ref, delta_ref))

    def one_key_tile(j, is_full, dq):
        cols = j * block_k + jnp.arange(block_k)
        tile = pl.ds(j * block_k, block_k)
        k, v = (real(ref[tile, :], cols < key_length, problem.H) for ref in (k_ref, v_ref))
        pair = Pair(problem, lengths, masks.extras, 0, rows, cols, (q_start, j * block_k), is_full)
        _, ds, pull_back = p_and_ds(q, k, v, do, lse, delta, pair)
        return dq + dot(pull_back(ds).astype(k.dtype), k)

    needed = key_tiles(q_start, q_start + block_q, block_k, problem.band, *lengths, xp=jnp)
    whole = whole_tiles(needed, q_start, q_start + block_q, block_k, problem.band, *lengths)
    dq = over_tiles(masks.lists, 0, needed, whole, one_key_tile, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (problem.scale * dq).astype(dq_ref.dtype)


def backward(call, out, lse, dout, dlse, low=None, *, fused=False, interpret=False, **tiles):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    out (B, T, N, H), lse (B, N, T) float32 and low, the `low_bits` of out, are what the forward pass returned; dout
    and dlse are the gradients of the first two. Beyond inputs and outputs it allocates what `forward` does, delta and
    where logits are changed lse, (B, N, T) in float32, and with `fused` a float32 dq whose sides are rounded up to
    whole blocks. Without `fused` the same input gives the same bits each time.

    interpret and tiles: as for `forward`.
    """
    problem = call.problem
    dkv_tiles, dq_tiles = select_tiles("dkv", problem, **tiles), select_tiles("dq", problem, **tiles)
    delta = delta_of(out, lse, dout, dlse, low)
    if call.changes_logits:
        lse = jnp.where(lse == -jnp.inf, 0, lse)  # a logit may be -inf without being hidden, and its weight must be 0
    arrays = call.query, call.key, call.value, dout, lse, delta
    if fused:
        dk, dv, dq = _dkv(call, arrays, dkv_tiles, interpret, fused)
        return dq[:, : problem.T, :, : problem.H].astype(problem.dtype), dk, dv
    return _dq(call, arrays, dq_tiles, interpret), *_dkv(call, arrays, dkv_tiles, interpret)


def _dq(call, arrays, tiles, interpret):
    """Programs (i, n, b): one tile of queries of one head, with all keys that it may see."""
    problem = call.problem
    B, T, S, N, H = problem.B, problem.T, problem.S, problem.N, problem.H
    head_padded = padded_head_dim(H)
    q_spec = pl.BlockSpec((None, tiles.block_q, None, head_padded), lambda i, n, b: (b, i, n, 0))
    row_spec = pl.BlockSpec((None, None, tiles.block_q), lambda i, n, b: (b, n, i))
    keys = (None, whole(S, tiles.block_k), None, head_padded)
    keys_spec = pl.BlockSpec(keys, lambda i, n, b: (b, 0, n // problem.group, 0))
    masks, mask_specs = masks_and_specs(call, tiles)
    return pl.pallas_call(
        functools.partial(dq_kernel, problem=problem, tiles=tiles),
        grid=(pl.cdiv(T, tiles.block_q), N, B),
        in_specs=[q_spec, keys_spec, keys_spec, q_spec, row_spec, row_spec, mask_specs],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct((B, T, N, H), problem.dtype),
        name="flash_attention_dq",
        **how_it_runs(interpret, *tiles[2:]),
    )(*arrays, masks)


def _dkv(call, arrays, tiles, interpret, fused=False):
    """Programs (j, kv, b): one tile of keys of one key/value head, with all queries of its group.

    fused: also dq, float32, added atomically to zeros; its tiles are whole, so that no add needs a mask.
    """
    problem = call.problem
    B, T, S, N, K, H, group = *(getattr(problem, name) for name in "BTSNKH"), problem.group
    head_padded, T_padded = padded_head_dim(H), whole(T, tiles.block_q)
    k_spec = pl.BlockSpec((None, tiles.block_k, None, head_padded), lambda j, kv, b: (b, j, kv, 0))
    group_spec = pl.BlockSpec((None, T_padded, group, head_padded), lambda j, kv, b: (b, 0, kv, 0))
    rows_spec = pl.BlockSpec((None, group, T_padded), lambda j, kv, b: (b, kv, 0))
    masks, mask_specs = masks_and_specs(call, tiles, "keys")
    inputs, in_specs = [*arrays, masks], [group_spec, k_spec, k_spec, group_spec, rows_spec, rows_spec, mask_specs]
    out_specs, out_shape = [k_spec] * 2, [jax.ShapeDtypeStruct((B, S, K, H), problem.dtype)] * 2
    kernel = dkv = functools.partial(dkv_kernel, problem=problem, tiles=tiles)
    aliases = {}
    if fused:
        aliases = {len(jax.tree.leaves(inputs)): 2}  # dq is added to the zeros in place
        zeros = jnp.zeros((B, T_padded, N, head_padded), jnp.float32)
        inputs, in_specs, out_specs = [*inputs, zeros], [*in_specs, group_spec], [*out_specs, group_spec]
        out_shape = [*out_shape, jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)]
        kernel = lambda *refs: dkv(*refs[:7], *refs[8:])
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(S, tiles.block_k), K, B),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=aliases,
        name="flash_attention_fused_backward" if fused else "flash_attention_dkv",
        **how_it_runs(interpret, *tiles[2:]),
    )(*inputs)
