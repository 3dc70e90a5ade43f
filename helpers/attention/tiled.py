"""NumPy twins of the kernels: the same tiles in the same loops, one head at a time.

`query_outer` is the loop order of FlashAttention-2 (arXiv 2307.08691, algorithm 1), `key_outer`
that of FlashAttention-1 (arXiv 2205.14135, algorithm 1); `backward` is the gradient. All read their inputs from a
`SlowMemory`, which counts every byte that crosses, so that the traffic of an algorithm is a
measurement and not a claim.
"""

import numpy as np

from helpers.attention import online_softmax
from helpers.attention.masking import NO_BAND, key_tiles, query_tiles, visible


class SlowMemory:
    """Named arrays in a large, slow memory. Loading or storing rows copies them and counts bytes.

    read and written: bytes moved so far, by name of the array.
    """

    def __init__(self, **arrays):
        self.arrays = arrays
        self.read = dict.fromkeys(arrays, 0)
        self.written = dict.fromkeys(arrays, 0)

    def allocate(self, name, shape, dtype, fill):
        """A new array; filling it writes each of its bytes once."""
        self.reserve(name, shape, dtype)
        self.arrays[name][...] = fill
        self.written[name] += self.arrays[name].nbytes

    def reserve(self, name, shape, dtype):
        """A new array that nothing has written yet: every entry is NaN."""
        self.arrays[name] = np.full(shape, np.nan, dtype)
        self.read[name] = self.written[name] = 0

    def load(self, name, start, stop):
        """A copy of rows start..stop-1; rows past the end are not there."""
        rows = self.arrays[name][start:stop].copy()
        self.read[name] += rows.nbytes
        return rows

    def store(self, name, start, rows):
        """Write rows from position start on, rounded to the dtype of the array."""
        target = self.arrays[name][start : start + len(rows)]
        target[...] = rows
        self.written[name] += target.nbytes

    @property
    def bytes_moved(self):
        """All bytes read and written so far."""
        return sum(self.read.values()) + sum(self.written.values())


def query_outer(memory, *, scale, block_q, block_k, band=NO_BAND):
    """Attention of one head with the loop over query tiles outside.

    memory holds q (T, H), k (S, H) and v (S, H) and receives out (T, H) in the dtype
    of q and lse (T,) in float32. Each query tile keeps its state on chip until it has
    seen all its keys; tiles of keys that the band masks are never loaded.
    """
    T, H = memory.arrays["q"].shape
    S = len(memory.arrays["k"])
    memory.reserve("out", (T, H), memory.arrays["q"].dtype)
    memory.reserve("lse", T, np.float32)
    for q_start in range(0, T, block_q):
        q = _widen(memory.load("q", q_start, q_start + block_q))
        rows = np.arange(q_start, q_start + len(q))
        state = online_softmax.init(len(q), H, q.dtype)
        first, stop = key_tiles(q_start, q_start + len(q), block_k, band, T, S)
        for k_start in range(first * block_k, stop * block_k, block_k):
            k = _widen(memory.load("k", k_start, k_start + block_k))
            v = _widen(memory.load("v", k_start, k_start + block_k))
            cols = np.arange(k_start, k_start + len(k))
            seen = visible(rows[:, None], cols[None, :], band, T, S)
            s = np.where(seen, scale * (q @ k.T), -np.inf)
            state = online_softmax.update(state, s, v)
        out, lse = online_softmax.finalize(state)
        memory.store("out", q_start, out)
        memory.store("lse", q_start, lse)
    return memory.arrays["out"], memory.arrays["lse"]


def key_outer(memory, *, scale, block_q, block_k, band=NO_BAND):
    """Attention of one head with the loop over key tiles outside.

    memory holds q, k and v as in `query_outer`, and receives out and, in float32, m and l
    (T,); lse is returned only. A key tile is loaded once and meets every query tile that
    sees it; so out, m and l travel back and forth. What is stored as out is normalised by
    the sum so far: each visit multiplies it by the old sum, adds, and divides by the new one.
    """
    T, H = memory.arrays["q"].shape
    S = len(memory.arrays["k"])
    memory.allocate("out", (T, H), memory.arrays["q"].dtype, 0)
    memory.allocate("m", T, np.float32, -np.inf)
    memory.allocate("l", T, np.float32, 0)
    for k_start in range(0, S, block_k):
        k = _widen(memory.load("k", k_start, k_start + block_k))
        v = _widen(memory.load("v", k_start, k_start + block_k))
        cols = np.arange(k_start, k_start + len(k))
        first, stop = query_tiles(k_start, k_start + len(k), block_q, band, T, S)
        for q_start in range(first * block_q, stop * block_q, block_q):
            q = _widen(memory.load("q", q_start, q_start + block_q))
            m = memory.load("m", q_start, q_start + block_q)
            l = memory.load("l", q_start, q_start + block_q)
            out = _widen(memory.load("out", q_start, q_start + block_q))
            rows = np.arange(q_start, q_start + len(q))
            seen = visible(rows[:, None], cols[None, :], band, T, S)
            s = np.where(seen, scale * (q @ k.T), -np.inf)
            state = online_softmax.update(online_softmax.State(m, l, out * l[:, None]), s, v)
            out, _ = online_softmax.finalize(state)
            memory.store("out", q_start, out)
            memory.store("m", q_start, state.m)
            memory.store("l", q_start, state.l)
    state = online_softmax.State(memory.arrays["m"], memory.arrays["l"], memory.arrays["out"])
    return state.acc, online_softmax.finalize(state)[1]


def backward(memory, *, scale, block_q, block_k, band=NO_BAND):
    """Gradients of one head, in the loops of the portable backward kernels, after delta.

    memory holds q, out, do (T, H), k, v (S, H), lse (T,) and dlse (T,), and receives delta (T,) in
    float32, dk and dv (S, H) and dq (T, H). Each tile of keys keeps dk and dv on chip while the
    queries that see it stream by; then each tile of queries keeps dq while the keys do. Returns
    (dq, dk, dv). The equations are those of FlashAttention-2 (arXiv 2307.08691, algorithm 2).
    """
    T, S = len(memory.arrays["q"]), len(memory.arrays["k"])
    memory.reserve("delta", T, np.float32)
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        memory.reserve(name, memory.arrays[like].shape, memory.arrays[like].dtype)

    def load(name, start, block):
        return _widen(memory.load(name, start, start + block))

    def load_queries(start):
        return [load(name, start, block_q) for name in ("q", "do", "lse", "delta")]

    # -- p and ds of two tiles
    def p_and_ds(q, k, v, do, lse, delta, q_start, k_start):
        rows = np.arange(q_start, q_start + len(q))
        cols = np.arange(k_start, k_start + len(k))
        seen = visible(rows[:, None], cols[None, :], band, T, S)
        s = np.where(seen, scale * (q @ k.T), -np.inf)
        p = np.exp(s - np.where(lse == -np.inf, 0, lse)[:, None])
        dp = do @ v.T
        return p, p * (dp - delta[:, None])

    # --
    for q_start in range(0, T, block_q):
        out, do, lse, dlse = (load(name, q_start, block_q) for name in ("out", "do", "lse", "dlse"))
        memory.store("delta", q_start, np.where(lse == -np.inf, 0, (out * do).sum(axis=1) - dlse))

    # -- keys outside
    for k_start in range(0, S, block_k):
        k, v = load("k", k_start, block_k), load("v", k_start, block_k)
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        first, stop = query_tiles(k_start, k_start + len(k), block_q, band, T, S)
        for q_start in range(first * block_q, stop * block_q, block_q):
            q, do, lse, delta = load_queries(q_start)
            p, ds = p_and_ds(q, k, v, do, lse, delta, q_start, k_start)
            dv += p.T @ do
            dk += scale * ds.T @ q
        memory.store("dk", k_start, dk)
        memory.store("dv", k_start, dv)

    # --
    for q_start in range(0, T, block_q):
        q, do, lse, delta = load_queries(q_start)
        dq = np.zeros_like(q)
        first, stop = key_tiles(q_start, q_start + len(q), block_k, band, T, S)
        for k_start in range(first * block_k, stop * block_k, block_k):
            k, v = load("k", k_start, block_k), load("v", k_start, block_k)
            _, ds = p_and_ds(q, k, v, do, lse, delta, q_start, k_start)
            dq += scale * ds @ k
        memory.store("dq", q_start, dq)
    return memory.arrays["dq"], memory.arrays["dk"], memory.arrays["dv"]


def _widen(tile):
    """At least float32: what the arithmetic units hold, whatever the memory stores."""
    return tile.astype(np.result_type(tile.dtype, np.float32))
