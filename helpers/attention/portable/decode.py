"""The portable kernel for decoding: few queries, many keys, in plain Pallas.

With one query a head there is one tile of queries and little arithmetic: the time goes into reading keys
and values once. So three things differ from `forward`.

1. The keys are split over programs (Flash-Decoding, Dao et al. 2023), so that all processors read.
2. All query heads that share a key head are rows of one tile, and the keys are read once for all of them.
3. Each program writes its own out and lse, in float32, and they are merged as parts of a sum:

    lse = log sum_i exp lse_i        out = sum_i exp(lse_i - lse) out_i

The keys may also lie in pages (PagedAttention, arXiv 2309.06180): a table says in which page the keys
j page to (j + 1) page - 1 of a sequence are.

Refs, as program (split, key head, batch entry) sees them. A row r is query r // group of query head r % group
of the group; R is the number of rows, T group, and R' and H' are R and H rounded up to powers of two:

    q_ref    (R', H')
    k_ref    (S, H')          all keys of the head; with pages (P, page, H'), all pages
    v_ref    as k_ref
    table_ref  (pages of a sequence,)  int32, or None
    query_length_ref, key_length_ref  ()  or None
    out_ref  (R', H')         float32
    lse_ref  (R',)            float32
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from helpers.attention.device import core_count
from helpers.attention.masking import key_tiles, visible
from helpers.attention.portable.tiles import LOG2_E, check_blocks, dot, exp2, length_of, padded_head_dim

PROCESSORS = 132  # of an H200, where the device does not say
FEWEST_KEYS = 256  # of one program; chosen by reasoning, not yet measured


class Splits(NamedTuple):
    """How a call is launched: keys of a tile, tiles of a program, warps of a program and tiles in flight."""

    block_k: int
    tiles: int
    num_warps: int
    num_stages: int


def decode_kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    query_length_ref,
    key_length_ref,
    out_ref,
    lse_ref,
    *,
    problem,
    splits,
    interpret,
):
    """Writes out and lse of one group of query heads over one part of the keys."""
    query_length = length_of(query_length_ref, problem.T)
    key_length = length_of(key_length_ref, problem.S)
    rows = jnp.arange(q_ref.shape[0])
    positions = rows // problem.group
    is_row = rows < problem.T * problem.group
    in_head = jnp.arange(q_ref.shape[1])[None, :] < problem.H
    q = plt.load(q_ref, mask=is_row[:, None] & in_head, other=0)

    def one_key_tile(j, state):
        m, l, acc = state
        start = j * splits.block_k
        cols = start + jnp.arange(splits.block_k)
        is_key = cols < key_length
        k, v = (_keys(ref, table_ref, start, cols, is_key, in_head) for ref in (k_ref, v_ref))
        s = (problem.scale * LOG2_E) * dot(q, k.T)
        s = jnp.where(visible(positions[:, None], cols[None, :], problem.band, query_length, key_length), s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1))
        reference = jnp.where(m_new == -jnp.inf, 0, m_new)  # a row may have seen no key yet
        alpha = exp2(m - reference, interpret)
        p = exp2(s - reference[:, None], interpret)
        l = alpha * l + p.sum(axis=1)
        acc = alpha[:, None] * acc + dot(p.astype(v.dtype), v)
        return m_new, l, acc

    state = (
        jnp.full(rows.shape, -jnp.inf, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
        jnp.zeros(q_ref.shape, jnp.float32),
    )
    first, stop = key_tiles(0, problem.T, splits.block_k, problem.band, query_length, key_length, xp=jnp)
    mine = pl.program_id(0) * splits.tiles
    first, stop = jnp.maximum(first, mine), jnp.minimum(stop, mine + splits.tiles)
    m, l, acc = lax.fori_loop(first, stop, one_key_tile, state)

    empty = l == 0
    l = jnp.where(empty, 1, l)
    lse = jnp.where(empty, -jnp.inf, (m + jnp.log2(l)) / LOG2_E)
    plt.store(out_ref, acc / l[:, None], mask=is_row[:, None] & in_head)
    plt.store(lse_ref, lse, mask=is_row)


def _keys(ref, table_ref, start, cols, is_key, in_head):
    """The tile of keys or values at the positions cols, start and following, zeros where there is none."""
    mask = is_key[:, None] & in_head
    if table_ref is None:
        return plt.load(ref.at[pl.ds(start, cols.size), :], mask=mask, other=0)
    pages, page, head_padded = ref.shape
    number = plt.load(table_ref.at[cols // page], mask=is_key, other=0)
    # A wrong table must not lead to somebody else's memory.
    number = jnp.clip(number, 0, pages - 1)
    dims = jnp.arange(head_padded)
    return plt.load(ref.at[number[:, None], (cols % page)[:, None], dims[None, :]], mask=mask, other=0)


def select_splits(problem, *, block_k=None, tiles=None, num_warps=4, num_stages=3):
    """The `Splits` of a problem: two programs for each processor, if each has `FEWEST_KEYS` keys."""
    block_k = block_k or min(64 if padded_head_dim(problem.H) <= 128 else 32, max(16, pl.next_power_of_2(problem.S)))
    check_blocks(block_k, block_k)
    if tiles is None:
        programs = pl.cdiv(2 * core_count(PROCESSORS), problem.B * problem.K)
        tiles = pl.cdiv(max(FEWEST_KEYS, pl.cdiv(problem.S, programs)), block_k)
    return Splits(block_k, tiles, num_warps, num_stages)


def partial_bytes(problem, splits):
    """Bytes of the partial results: H + 1 float32 numbers for each query, head and part of the keys."""
    parts = pl.cdiv(problem.S, splits.tiles * splits.block_k)
    return 4 * parts * problem.B * problem.T * problem.N * (problem.H + 1)


def decode(call, table=None, *, interpret=False, **options):
    """Attention of a checked `Call` with T <= 16: out (B, T, N, H) in the dtype of query and lse (B, N, T) float32.

    With a table, int32 (B, pages of a sequence), the key and value of the call are pages (P, page, K, H), and its
    S is the number of keys that a row of the table can hold. The kernel writes `partial_bytes` beyond its inputs.
    options: fields of `Splits`.
    """
    problem = call.problem
    splits = select_splits(problem, **options)
    B, T, S, N, K, H, group = *(getattr(problem, name) for name in "BTSNKH"), problem.group
    rows, head_padded = T * group, padded_head_dim(H)
    rows_padded, parts = padded_head_dim(rows), pl.cdiv(S, splits.tiles * splits.block_k)
    query = call.query.reshape(B, T, K, group, H).swapaxes(1, 2).reshape(B, K, rows, H)

    of_head = lambda *sides: pl.BlockSpec(sides, lambda i, kv, b: (b, kv, 0, 0))
    part = lambda *sides: pl.BlockSpec((None, None, None, *sides), lambda i, kv, b: (b, kv, i, *(0 for _ in sides)))
    if table is None:
        kv_spec = pl.BlockSpec((None, S, None, head_padded), lambda i, kv, b: (b, 0, kv, 0))
    else:
        kv_spec = pl.BlockSpec((*call.key.shape[:2], None, head_padded), lambda i, kv, b: (0, 0, kv, 0))
    row_of_table = pl.BlockSpec((None, None if table is None else table.shape[1]), lambda i, kv, b: (b, 0))
    length_spec = pl.BlockSpec((None,), lambda i, kv, b: (b,))
    optional = ((table, row_of_table), (call.query_lengths, length_spec), (call.key_lengths, length_spec))
    out, lse = pl.pallas_call(
        functools.partial(decode_kernel, problem=problem, splits=splits, interpret=interpret),
        grid=(parts, K, B),
        in_specs=[
            of_head(None, None, rows_padded, head_padded),
            kv_spec,
            kv_spec,
            *(None if array is None else spec for array, spec in optional),
        ],
        out_specs=[part(rows_padded, head_padded), part(rows_padded)],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, parts, rows, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, parts, rows), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=splits.num_warps, num_stages=splits.num_stages),
        interpret=interpret,
        name="flash_attention_decode",
    )(query, call.key, call.value, *(array for array, _ in optional))
    out, lse = merge(out, lse)
    out = out.reshape(B, K, T, group, H).swapaxes(1, 2).reshape(B, T, N, H).astype(problem.dtype)
    return out, lse.reshape(B, K, T, group).swapaxes(2, 3).reshape(B, N, T)


def merge(out, lse):
    """(out, lse) of all keys from those of parts of them: out (…, parts, R, H), lse (…, parts, R)."""
    m = lse.max(axis=-2, keepdims=True)
    weight = jnp.exp(lse - jnp.where(m == -jnp.inf, 0, m))
    total = weight.sum(axis=-2, keepdims=True)
    empty = total == 0
    weight = weight / jnp.where(empty, 1, total)
    merged = jnp.where(empty, -jnp.inf, m + jnp.log(jnp.where(empty, 1, total)))
    return (weight[..., None] * out).sum(axis=-3), merged[..., 0, :]
