"""The portable kernels once more, in Triton: forward, delta, dkv and dq, with the names of `attention.portable`.

The equations are those of `portable.forward` and `portable.backward`. Arrays lie in memory as there, without
gaps: query, out, do, dq (B, T, N, H); key, value, dk, dv (B, S, K, H); lse, delta, dlse (B, N, T) in float32.
What Pallas keeps in BlockSpecs is arithmetic with pointers here. Shapes are constants of a compiled kernel.

A tile of logits is one of three:

    full      every query of it sees every key of it: no mask but, for the loads, that of a padded head
    partial   on the diagonal or over the end of an array: masked
    skipped   no query sees a key: not in the range of any loop

There are no windows and no lengths. So every query sees key 0, m is finite after the first tile, and no row is empty.

Importing this module needs Triton. It decides on the way in whether it compiles or interprets, by TRITON_INTERPRET;
`triton_launch` sets that, and is what to import.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, precision: tl.constexpr, interpret: tl.constexpr):
    """a @ b with 16-bit operands left as they are and a float32 sum."""
    if interpret:  # its products take the bits of a bfloat16 for a whole number
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def rounded(tile, dtype: tl.constexpr, interpret: tl.constexpr):
    """A float32 tile as dtype, to the nearest."""
    if interpret:
        if dtype == tl.bfloat16:  # the interpreter cuts the last 16 bits off, so half of them are added first
            bits = tile.to(tl.int32, bitcast=True)
            bits += 0x7FFF + ((bits >> 16) & 1)
            tile = bits.to(tl.float32, bitcast=True)
    return tile.to(dtype)


@triton.jit
def load_tile(
        start, rows, length, row_size: tl.constexpr, H: tl.constexpr,
        head_padded: tl.constexpr, masked: tl.constexpr):  # fmt: skip
    """Rows of a head that begins at `start`. What is masked is not read, and is 0."""
    in_row = tl.arange(0, head_padded)[None, :]
    pointers = start + rows[:, None] * row_size + in_row
    if masked:
        inside = (rows < length)[:, None] & (in_row < H)
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif H < head_padded:
        tile = tl.load(pointers, mask=in_row < H, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
        start, tile, rows, length, row_size: tl.constexpr, H: tl.constexpr,
        head_padded: tl.constexpr, interpret: tl.constexpr):  # fmt: skip
    """The counterpart of `load_tile`, rounded to the array's dtype."""
    in_row = tl.arange(0, head_padded)[None, :]
    mask = (rows < length)[:, None] & (in_row < H)
    tl.store(start + rows[:, None] * row_size + in_row, rounded(tile, start.dtype.element_ty, interpret), mask=mask)


@triton.jit
def full_and_all_key_tiles(
        q_start, S: tl.constexpr, is_causal: tl.constexpr, block_q: tl.constexpr,
        block_k: tl.constexpr):  # fmt: skip
    """Tiles 0 to full - 1 need no mask, full to stop - 1 do, the rest is skipped."""
    full, stop = S // block_k, (S + block_k - 1) // block_k
    if is_causal:
        full = tl.minimum(full, (q_start + 1) // block_k)
        stop = tl.minimum(stop, (q_start + block_q + block_k - 1) // block_k)
    return full, stop


@triton.jit
def online_softmax(
        q, k, v, rows, cols, m, l, acc, scale_2, S: tl.constexpr,
        is_causal: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr,
        interpret: tl.constexpr):  # fmt: skip
    """One step: the state after one more tile of keys."""
    s = scale_2 * dot(q, tl.trans(k), precision, interpret)
    if masked:
        seen = (cols < S)[None, :]
        if is_causal:
            seen = seen & (cols[None, :] <= rows[:, None])
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    l = alpha * l + tl.sum(p, axis=1)
    p = rounded(p, v.dtype, interpret)
    acc = alpha[:, None] * acc + dot(p, v, precision, interpret)
    return m_new, l, acc


@triton.jit
def one_key_tile(
        j, m, l, acc, q, rows, key, value, scale_2, S: tl.constexpr, K: tl.constexpr,
        H: tl.constexpr, head_padded: tl.constexpr, is_causal: tl.constexpr,
        block_k: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr,
        interpret: tl.constexpr):  # fmt: skip
    """Load tile j of the keys and take the step."""
    cols = j * block_k + tl.arange(0, block_k)
    k = load_tile(key, cols, S, K * H, H, head_padded, masked)
    v = load_tile(value, cols, S, K * H, H, head_padded, masked)
    return online_softmax(
        q, k, v, rows, cols, m, l, acc, scale_2, S, is_causal, masked, precision,
        interpret)  # fmt: skip


@triton.jit
def forward_kernel(
        query, key, value, out, lse, scale, T: tl.constexpr, S: tl.constexpr,
        N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, head_padded: tl.constexpr,
        is_causal: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
        precision: tl.constexpr, interpret: tl.constexpr):  # fmt: skip
    """Program (i, n, b): out and lse of one tile of queries."""
    # -- the head of a program
    n, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query += b * T * N * H + n * H
    out += b * T * N * H + n * H
    lse += (b * N + n) * T
    # Grouped queries read the same head, in place.
    shared = b * S * K * H + n // (N // K) * H
    key += shared
    value += shared

    q_start = tl.program_id(0) * block_q
    rows = q_start + tl.arange(0, block_q)
    q = load_tile(query, rows, T, N * H, H, head_padded, True)
    m = tl.full([block_q], float("-inf"), tl.float32)
    l = tl.zeros([block_q], tl.float32)
    acc = tl.zeros([block_q, head_padded], tl.float32)
    scale_2 = scale * LOG2_E

    # -- two loops
    full, stop = full_and_all_key_tiles(q_start, S, is_causal, block_q, block_k)
    for j in range(0, full):
        m, l, acc = one_key_tile(
            j, m, l, acc, q, rows, key, value, scale_2, S, K, H, head_padded, is_causal,
            block_k, False, precision, interpret)  # fmt: skip
    for j in range(full, stop):
        m, l, acc = one_key_tile(
            j, m, l, acc, q, rows, key, value, scale_2, S, K, H, head_padded, is_causal,
            block_k, True, precision, interpret)  # fmt: skip

    # --
    store_tile(out, acc / l[:, None], rows, T, N * H, H, head_padded, interpret)
    tl.store(lse + rows, (m + tl.log2(l)) / LOG2_E, mask=rows < T)


@triton.jit
def forward_by_descriptors(
        query, key, value, out, lse, scale, T: tl.constexpr, S: tl.constexpr,
        N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, head_padded: tl.constexpr,
        is_causal: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
        precision: tl.constexpr, interpret: tl.constexpr):  # fmt: skip
    """`forward_kernel` with tensor descriptors, which know where a head ends.

    What is loaded over the end is 0, what is stored there is dropped. Rows must begin at multiples of 16 bytes.
    """
    n, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    q_head = b * T * N * H + n * H
    shared = b * S * K * H + n // (N // K) * H
    # -- descriptors
    queries = tl.make_tensor_descriptor(
        query + q_head, [T, H], [N * H, 1], [block_q, head_padded])  # fmt: skip
    outs = tl.make_tensor_descriptor(
        out + q_head, [T, H], [N * H, 1], [block_q, head_padded])  # fmt: skip
    keys = tl.make_tensor_descriptor(
        key + shared, [S, H], [K * H, 1], [block_k, head_padded])  # fmt: skip
    values = tl.make_tensor_descriptor(
        value + shared, [S, H], [K * H, 1], [block_k, head_padded])  # fmt: skip

    # --
    q_start = tl.program_id(0) * block_q
    rows = q_start + tl.arange(0, block_q)
    q = queries.load([q_start, 0])
    m = tl.full([block_q], float("-inf"), tl.float32)
    l = tl.zeros([block_q], tl.float32)
    acc = tl.zeros([block_q, head_padded], tl.float32)
    scale_2 = scale * LOG2_E

    full, stop = full_and_all_key_tiles(q_start, S, is_causal, block_q, block_k)
    # -- a loop with descriptors
    for j in range(0, full):
        cols = j * block_k + tl.arange(0, block_k)
        k, v = keys.load([j * block_k, 0]), values.load([j * block_k, 0])
        m, l, acc = online_softmax(
            q, k, v, rows, cols, m, l, acc, scale_2, S, is_causal, False, precision,
            interpret)  # fmt: skip
    # --
    for j in range(full, stop):
        cols = j * block_k + tl.arange(0, block_k)
        k, v = keys.load([j * block_k, 0]), values.load([j * block_k, 0])
        m, l, acc = online_softmax(
            q, k, v, rows, cols, m, l, acc, scale_2, S, is_causal, True, precision,
            interpret)  # fmt: skip

    outs.store([q_start, 0], rounded(acc / l[:, None], out.dtype.element_ty, interpret))
    tl.store(lse + (b * N + n) * T + rows, (m + tl.log2(l)) / LOG2_E, mask=rows < T)


@triton.jit
def delta_kernel(
        out, do, dlse, delta, T: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
        head_padded: tl.constexpr, block_q: tl.constexpr):  # fmt: skip
    """Program (i, n, b): delta of one tile of queries."""
    n, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * T * N * H + n * H
    row = (b * N + n) * T
    rows = tl.program_id(0) * block_q + tl.arange(0, block_q)
    out_tile = load_tile(out + head, rows, T, N * H, H, head_padded, True)
    do_tile = load_tile(do + head, rows, T, N * H, H, head_padded, True)
    dlse_tile = tl.load(dlse + row + rows, mask=rows < T, other=0.0)
    product = out_tile.to(tl.float32) * do_tile.to(tl.float32)
    delta_tile = tl.sum(product, axis=1) - dlse_tile
    tl.store(delta + row + rows, delta_tile, mask=rows < T)


@triton.jit
def p_and_ds(
        q, k, v, do, lse, delta, rows, cols, scale_2, S: tl.constexpr,
        is_causal: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr,
        interpret: tl.constexpr):  # fmt: skip
    """Weights of two tiles, gradient of their logits: (block_q, block_k) float32."""
    s = scale_2 * dot(q, tl.trans(k), precision, interpret)
    p = tl.exp2(s - (lse * LOG2_E)[:, None])
    if masked:
        seen = (cols < S)[None, :]
        if is_causal:
            seen = seen & (cols[None, :] <= rows[:, None])
        p = tl.where(seen, p, 0.0)
    dp = dot(do, tl.trans(v), precision, interpret)
    return p, p * (dp - delta[:, None])


@triton.jit
def one_query_tile(
        i, dk, dv, k, v, cols, query, do, lse, delta, scale_2, T: tl.constexpr,
        S: tl.constexpr, N: tl.constexpr, H: tl.constexpr, head_padded: tl.constexpr,
        is_causal: tl.constexpr, block_q: tl.constexpr, masked: tl.constexpr,
        precision: tl.constexpr, interpret: tl.constexpr):  # fmt: skip
    rows = i * block_q + tl.arange(0, block_q)
    q = load_tile(query, rows, T, N * H, H, head_padded, masked)
    do_tile = load_tile(do, rows, T, N * H, H, head_padded, masked)
    if masked:
        lse_tile = tl.load(lse + rows, mask=rows < T, other=0.0)
        delta_tile = tl.load(delta + rows, mask=rows < T, other=0.0)
    else:
        lse_tile = tl.load(lse + rows)
        delta_tile = tl.load(delta + rows)
    p, ds = p_and_ds(
        q, k, v, do_tile, lse_tile, delta_tile, rows, cols, scale_2, S, is_causal,
        masked, precision, interpret)  # fmt: skip
    dv += dot(tl.trans(rounded(p, do_tile.dtype, interpret)), do_tile, precision, interpret)
    dk += dot(tl.trans(rounded(ds, q.dtype, interpret)), q, precision, interpret)
    return dk, dv


@triton.jit
def dkv_kernel(
        query, key, value, do, lse, delta, dk_out, dv_out, scale, T: tl.constexpr,
        S: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
        head_padded: tl.constexpr, is_causal: tl.constexpr, block_q: tl.constexpr,
        block_k: tl.constexpr, precision: tl.constexpr, interpret: tl.constexpr):  # fmt: skip
    """Program (j, kv, b): dk and dv of one tile of keys, summed over the query heads that share it.

    Keys over the end need no mask of their logits: what they add stays in rows of dk and dv that are not stored.
    """
    kv, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * S * K * H + kv * H
    k_start = tl.program_id(0) * block_k
    cols = k_start + tl.arange(0, block_k)
    k = load_tile(key + head, cols, S, K * H, H, head_padded, True)
    v = load_tile(value + head, cols, S, K * H, H, head_padded, True)
    dk = tl.zeros([block_k, head_padded], tl.float32)
    dv = tl.zeros([block_k, head_padded], tl.float32)
    scale_2 = scale * LOG2_E

    # -- three kinds of tiles
    first, after_diagonal = 0, 0
    full, stop = T // block_q, (T + block_q - 1) // block_q
    if is_causal:
        first = k_start // block_q
        after_diagonal = tl.minimum((k_start + block_k - 1 + block_q - 1) // block_q, stop)
    for one in range(0, N // K):
        n = kv * (N // K) + one
        q_head = b * T * N * H + n * H
        row = (b * N + n) * T
        of_query, of_do = query + q_head, do + q_head
        of_lse, of_delta = lse + row, delta + row
        if is_causal:
            for i in range(first, after_diagonal):
                dk, dv = one_query_tile(
                    i, dk, dv, k, v, cols, of_query, of_do, of_lse, of_delta, scale_2, T,
                    S, N, H, head_padded, is_causal, block_q, True, precision, interpret)  # fmt: skip
        for i in range(after_diagonal, full):
            dk, dv = one_query_tile(
                i, dk, dv, k, v, cols, of_query, of_do, of_lse, of_delta, scale_2, T,
                S, N, H, head_padded, is_causal, block_q, False, precision, interpret)  # fmt: skip
        if T % block_q:
            for i in range(tl.maximum(after_diagonal, full), stop):
                dk, dv = one_query_tile(
                    i, dk, dv, k, v, cols, of_query, of_do, of_lse, of_delta, scale_2, T,
                    S, N, H, head_padded, is_causal, block_q, True, precision, interpret)  # fmt: skip

    # --
    store_tile(dk_out + head, scale * dk, cols, S, K * H, H, head_padded, interpret)
    store_tile(dv_out + head, dv, cols, S, K * H, H, head_padded, interpret)


@triton.jit
def one_key_tile_of_dq(
        j, dq, q, do, lse, delta, rows, key, value, scale_2, S: tl.constexpr,
        K: tl.constexpr, H: tl.constexpr, head_padded: tl.constexpr,
        is_causal: tl.constexpr, block_k: tl.constexpr, masked: tl.constexpr,
        precision: tl.constexpr, interpret: tl.constexpr):  # fmt: skip
    cols = j * block_k + tl.arange(0, block_k)
    k = load_tile(key, cols, S, K * H, H, head_padded, masked)
    v = load_tile(value, cols, S, K * H, H, head_padded, masked)
    _, ds = p_and_ds(q, k, v, do, lse, delta, rows, cols, scale_2, S, is_causal, masked, precision, interpret)
    return dq + dot(rounded(ds, k.dtype, interpret), k, precision, interpret)


@triton.jit
def dq_kernel(
        query, key, value, do, lse, delta, dq_out, scale, T: tl.constexpr,
        S: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
        head_padded: tl.constexpr, is_causal: tl.constexpr, block_q: tl.constexpr,
        block_k: tl.constexpr, precision: tl.constexpr, interpret: tl.constexpr):  # fmt: skip
    """Program (i, n, b): dq of one tile of queries."""
    n, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    q_head = b * T * N * H + n * H
    row = (b * N + n) * T
    shared = b * S * K * H + n // (N // K) * H
    q_start = tl.program_id(0) * block_q
    rows = q_start + tl.arange(0, block_q)
    q = load_tile(query + q_head, rows, T, N * H, H, head_padded, True)
    do_tile = load_tile(do + q_head, rows, T, N * H, H, head_padded, True)
    lse_tile = tl.load(lse + row + rows, mask=rows < T, other=0.0)
    delta_tile = tl.load(delta + row + rows, mask=rows < T, other=0.0)
    dq = tl.zeros([block_q, head_padded], tl.float32)
    scale_2 = scale * LOG2_E

    full, stop = full_and_all_key_tiles(q_start, S, is_causal, block_q, block_k)
    for j in range(0, full):
        dq = one_key_tile_of_dq(
            j, dq, q, do_tile, lse_tile, delta_tile, rows, key + shared, value + shared,
            scale_2, S, K, H, head_padded, is_causal, block_k, False, precision,
            interpret)  # fmt: skip
    for j in range(full, stop):
        dq = one_key_tile_of_dq(
            j, dq, q, do_tile, lse_tile, delta_tile, rows, key + shared, value + shared,
            scale_2, S, K, H, head_padded, is_causal, block_k, True, precision,
            interpret)  # fmt: skip
    store_tile(dq_out + q_head, scale * dq, rows, T, N * H, H, head_padded, interpret)
