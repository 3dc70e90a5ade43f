"""The plain forward kernel: one program for each tile of queries, in Pallas that any device interprets.

FlashAttention-2 (arXiv 2307.08691), algorithm 1. For one tile of block_q queries, over tiles j of
block_k keys, with everything base 2 (scale_2 = scale log2 e, so that exp2 does the work of exp):

    s      = scale_2 q k_j^T          masked to -inf
    m'     = max(m, rowmax s)
    alpha  = 2^(m - m')
    p      = 2^(s - m')
    l      = alpha l + rowsum p
    w      = alpha w + rowsum r       r = p, rounded to the dtype of v
    acc    = alpha acc + r v_j
    out    = acc / w                  once, after the last tile, so S max|v| must fit float32
    lse    = ln 2 (m + log2 l)

So out is a mean, by weights that add up to one whatever rounding did to them, as its gradient needs (see `backward`).

Refs, as one program sees them (H' is head_padded: head_dim rounded up to a power of two):

    q_ref    (block_q, H')  this tile of queries
    k_ref    (S', H')       all keys of the head that serves this query head, in whole tiles
    v_ref    (S', H')       its values
    masks    lengths, and what few calls have, see `pairs.Masks`
    out_ref  (block_q, H')
    lse_ref  (block_q,)     float32
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from helpers.attention import online_softmax
from helpers.attention.masking import key_tiles, whole_tiles
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.portable.pairs import Pair, masks_and_specs, over_tiles
from helpers.attention.portable.tiles import dot, how_it_runs, padded_head_dim, real, select_tiles, whole


def forward_kernel(q_ref, k_ref, v_ref, masks, out_ref, lse_ref, *, problem, tiles):
    # -- the tile of queries
    block_q, block_k = tiles.block_q, tiles.block_k
    lengths = _, key_length = masks.lengths(problem)
    q_start = pl.program_id(0) * block_q
    rows = q_start + jnp.arange(block_q)
    q = real(q_ref[...], rows < problem.T, problem.H)

    # -- a tile of keys
    def one_key_tile(j, is_full, state):
        m, l, w, acc = state
        cols = j * block_k + jnp.arange(block_k)
        tile = pl.ds(j * block_k, block_k)
        k = real(k_ref[tile, :], cols < key_length, problem.H)
        v = real(v_ref[tile, :], cols < key_length, problem.H)

        # -- its logits
        starts = q_start, j * block_k
        pair = Pair(problem, lengths, masks.extras, 0, rows, cols, starts, is_full)
        s = (problem.scale * LOG2_E) * dot(q, k.T)
        s, _ = pair.logits(s)
        s = pair.hidden(s, -jnp.inf)
        # -- the step
        m, l, alpha, p = online_softmax.step(m, l, s)
        rounded = p.astype(v.dtype)
        w = alpha * w + rounded.astype(jnp.float32).sum(axis=1)
        acc = alpha[:, None] * acc + dot(rounded, v)
        return m, l, w, acc

    # -- the start
    # A sink is a key without a value, seen before all others.
    sink = masks.sink
    m_start, l_start = (-jnp.inf, 0) if sink is None else (LOG2_E * sink, 1)
    state = (
        jnp.full(block_q, m_start, jnp.float32),
        jnp.full(block_q, l_start, jnp.float32),
        jnp.full(block_q, l_start, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    # -- the walk
    q_stop = q_start + block_q
    needed = key_tiles(q_start, q_stop, block_k, problem.band, *lengths, xp=jnp)
    whole = whole_tiles(needed, q_start, q_stop, block_k, problem.band, *lengths)
    m, l, w, acc = over_tiles(masks.lists, 0, needed, whole, one_key_tile, state)

    # -- the end
    out, lse = online_softmax.finish(m, l, acc, w)
    if sink is not None:  # the lse of a row without keys is its sink, to the last bit
        lse = jnp.where((l == 1) & (m == m_start), sink, lse)
    out_ref[...] = out.astype(out_ref.dtype)
    lse_ref[...] = lse


def forward(call, *, dtype=None, interpret=False, **tiles):
    """Attention of a checked `Call` by the kernel above.

    Returns out (B, T, N, H) in the dtype of query, or `dtype`, and lse (B, N, T) in float32. Beyond its inputs
    and outputs it allocates at most what `masks_and_specs` makes. interpret: run the kernel's operations one by one on
    any device, for learning and testing; otherwise Triton compiles it for an NVIDIA GPU. tiles: fields of `Tiles`, each
    chosen unless given: block_q, block_k, powers of two of at least 16, and for a GPU num_warps, num_stages.
    """
    problem = call.problem
    tiles = block_q, block_k, *_ = select_tiles("forward", problem, **tiles)
    B, T, S, N, H = problem.B, problem.T, problem.S, problem.N, problem.H
    head_padded = padded_head_dim(H)

    # -- blocks
    q_spec = pl.BlockSpec((None, block_q, None, head_padded), lambda i, n, b: (b, i, n, 0))
    # Grouped queries: `group` query heads read the same key/value head, in place.
    shared = lambda i, n, b: (b, 0, n // problem.group, 0)
    kv_spec = pl.BlockSpec((None, whole(S, block_k), None, head_padded), shared)
    lse_spec = pl.BlockSpec((None, None, block_q), lambda i, n, b: (b, n, i))
    # -- the launch
    masks, mask_specs = masks_and_specs(call, tiles)
    return pl.pallas_call(
        functools.partial(forward_kernel, problem=problem, tiles=tiles),
        grid=(pl.cdiv(T, block_q), N, B),
        in_specs=[q_spec, kv_spec, kv_spec, mask_specs],
        out_specs=[q_spec, lse_spec],
        out_shape=[
            jax.ShapeDtypeStruct((B, T, N, H), dtype or problem.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
        name="flash_attention_forward",
        **how_it_runs(interpret, *tiles[2:]),
    )(call.query, call.key, call.value, masks)
