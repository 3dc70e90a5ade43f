"""What attention costs by formula: floating-point operations, bytes moved and footprint, for one head.

T queries, S keys, H head_dim; itemsize is the number of bytes of one element of q, k, v and out.
The formulas count every byte that crosses between the large memory and the chip, and ignore
caches. Statistics (lse, m, l) are float32. Sources: FlashAttention (arXiv 2205.14135, theorem 2)
and FlashAttention-2 (arXiv 2307.08691); the exact counts are derived in notebooks 01 and 03.
"""

from helpers.attention.masking import NO_BAND, key_tiles, query_tiles

STATISTIC_BYTES = 4
TABLE_BYTES = 4  # of one entry of the (T, S) tables that `reference.naive_attention` keeps: float32


def forward_flops(T, S, H, is_causal=False):
    """Multiplications and additions of both matrix products: 4 T S H, half if causal.

    This is the convention of the papers and of every benchmark here. It leaves the
    softmax out, and the half is meant for T = S.
    """
    return 4 * T * S * H // (2 if is_causal else 1)


def naive_bytes(T, S, H, itemsize):
    """Bytes moved if q k^T, softmax and w v each read their inputs once and write their result.

    The logits s and the weights w are written and read: itemsize (4 T S + 2 T H + 2 S H).
    """
    return itemsize * (4 * T * S + 2 * T * H + 2 * S * H)


def naive_footprint(T, S, H, itemsize):
    """Most bytes that naive attention holds at once: itemsize (2 T H + 2 S H) + 8 T S.

    q, k, v, out, and two (T, S) tables in float32, because each step reads one table while it
    writes the next. A CPU's compiler reports the same for `reference.naive_attention` in float32
    and bfloat16 where T = S, up to one statistic for each row; elsewhere up to a copy of k in float32 more.
    """
    return itemsize * (2 * T * H + 2 * S * H) + 2 * TABLE_BYTES * T * S


def flash_footprint(T, S, H, itemsize):
    """Most bytes that flash attention holds in the large memory at once: q, k, v, out and the lse."""
    return itemsize * (2 * T * H + 2 * S * H) + STATISTIC_BYTES * T


def query_outer_bytes(T, S, H, itemsize, block_q, block_k, band=NO_BAND):
    """Bytes moved with query tiles outside (`tiled.query_outer` and the plain forward kernel).

    q is read and out written once; k and v are read again for each query tile, as far as the band
    lets that tile see. Without a mask: itemsize (2 T H + 2 S H ceil(T / block_q)) + 4 T.
    """
    total = itemsize * 2 * T * H + STATISTIC_BYTES * T
    for q_start in range(0, T, block_q):
        first, stop = key_tiles(q_start, min(q_start + block_q, T), block_k, band, T, S)
        total += itemsize * 2 * H * _rows(first, stop, block_k, S)
    return total


def key_outer_bytes(T, S, H, itemsize, block_q, block_k, band=NO_BAND):
    """Bytes moved with key tiles outside (`tiled.key_outer`).

    k and v are read once; each visit of a query tile reads q, out, m and l and writes out, m and l
    back. Without a mask:
    itemsize 2 S H + ceil(S / block_k) (itemsize 3 T H + 16 T) + (itemsize T H + 8 T).
    """
    initial = itemsize * T * H + 2 * STATISTIC_BYTES * T
    total = itemsize * 2 * S * H + initial
    for k_start in range(0, S, block_k):
        first, stop = query_tiles(k_start, min(k_start + block_k, S), block_q, band, T, S)
        total += (itemsize * 3 * H + 4 * STATISTIC_BYTES) * _rows(first, stop, block_q, T)
    return total


def _rows(first, stop, block, length):
    """How many rows the tiles first..stop-1 hold, the last of them cut at length."""
    return max(0, min(int(stop) * block, length) - int(first) * block)
