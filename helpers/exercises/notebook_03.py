"""The exercises of notebook 03."""

import functools
import itertools
import math

import numpy as np

from helpers.attention import masking, online_softmax
from helpers.attention.tiled import SlowMemory
from helpers.exercises.comparing import plain
from helpers.exercises.exercise import Case, Complaint, Exercise
from helpers.exercises.watched import exceeds, kept, watch, without
from helpers.instruments import cost

KIB = 1024
LONG = 1024  # keys: enough for rows of logits to show in the memory that an answer takes


def _inputs(T, S, H, seed, scale, peak=None, gap=12.0, shift=0.0, mixed=False):
    """q, k, v in float64, whole multiples of 1/8, so that float32 holds them, and logits near 1000 too.

    peak: a key whose logits lie about gap above the others, for every query. shift: added to every
    logit; with mixed, added for even queries and subtracted for odd ones.
    """
    random = np.random.default_rng(seed)
    q, k, v = (np.round(8 * random.standard_normal((rows, H))) / 8 for rows in (T, S, S))
    q[:, 0], q[1::2, 0] = 4, -4 if mixed else 4
    k[:, 0] = shift / 4 / scale
    if peak is not None:
        k[peak, 0] += gap / 4 / scale
    return q, k, v


def _attention_cases():
    """Arguments (q, k, v, scale, block_q, block_k)."""

    def case(seed, note, T, S, H, block_q, block_k, scale, **options):
        label = f"T={T}, S={S}, H={H}, scale={scale:g}, block_q={block_q}, block_k={block_k}{note}"
        return Case(label, (*_inputs(T, S, H, seed, scale, **options), scale, block_q, block_k))

    by_hand = np.log([[1.0], [3.0], [2.0], [8.0]]).astype(np.float32).astype(np.float64)
    by_hand = np.ones((1, 1)), by_hand, np.array([[1.0], [2.0], [3.0], [4.0]]), 1.0, 1, 2
    small = 6, 10, 4, 3, 4
    return [
        Case("the case worked by hand", by_hand),
        case(0, "", 4, 6, 2, 2, 3, 0.5),
        case(1, ", largest logits first", *small, 0.5, peak=1),
        case(2, ", largest logits last", *small, 0.25, peak=9),
        case(3, ", ragged tails, largest logits in the middle", 9, 11, 5, 2, 4, 2.0, peak=7),
        case(4, ", logits near 1000", *small, 0.5, shift=1000.0),
        case(5, ", logits near -1000", *small, 0.25, shift=-1000.0),
        case(6, ", the first logit 2000 above the others", *small, -0.5, peak=0, gap=2000.0),
        case(7, ", the last logit 2000 above the others", *small, 0.5, peak=9, gap=2000.0),
        case(8, ", logits near 1000 and -1000, by query", *small, 0.25, shift=1000.0, mixed=True),
        case(9, ", more queries than keys", 11, 6, 4, 2, 4, 0.5),
        case(10, "", 128, LONG, 1, 128, 32, 1.0),
    ]


def tiled_attention(q, k, v, scale, block_q, block_k):
    """out (T, H) and lse (T,) of one head. q: (T, H), k and v: (S, H)."""
    out, lse = np.empty(q.shape), np.empty(len(q))
    for q_start in range(0, len(q), block_q):
        rows = slice(q_start, q_start + block_q)
        size = len(q[rows])
        m, l, acc = np.full(size, -np.inf), np.zeros(size), np.zeros((size, q.shape[1]))
        for k_start in range(0, len(k), block_k):
            cols = slice(k_start, k_start + block_k)
            s = scale * (q[rows] @ k[cols].T)
            m_new = np.maximum(m, s.max(axis=1))
            alpha = np.exp(m - m_new)
            p = np.exp(s - m_new[:, None])
            l = alpha * l + p.sum(axis=1)
            acc = alpha[:, None] * acc + p @ v[cols]
            m = m_new
        out[rows] = acc / l[:, None]
        lse[rows] = m + np.log(l)
    return out, lse


def _run_in_tiles(answer, q, k, v, scale, block_q, block_k):
    """What the answer returns, and how it was built as far as NumPy's arrays tell."""
    S, reads = len(k), []
    q, shapes = watch(q, reads=reads if S < LONG else None, name="q")
    if S < LONG:
        k, v = (watch(array, True, reads, name)[0] for name, array in (("k", k), ("v", v)))
    run = lambda: without(online_softmax, answer, q, k, v, scale, block_q, block_k)
    whole = seen = False
    if S == LONG:
        (result, whole), seen = kept(lambda: exceeds(6 * block_q * S, run), lambda shape: {S, len(q)} <= set(shape))
    else:
        result = run()
    result = plain(result)
    if not isinstance(result, tuple) or len(result) != 2:
        raise Complaint("expected two results, (out, lse)" + (", got None" if result is None else ""))
    others = [part.dtype.name for part in result if getattr(part, "dtype", q.dtype) != q.dtype]
    built = _built(shapes, reads, *q.shape, S, block_q, block_k, whole or seen)
    return *result, f"{others[0]} numbers" if others else built


def _built(shapes, reads, T, H, S, block_q, block_k, whole):
    """What the shapes of the arrays made of q, and the parts read, tell of the tiles; where there are none, nothing."""
    either_way = lambda rows, columns: {(rows, columns), (columns, rows)} & shapes
    if S == LONG:
        # Nothing but logits is made of q and as long as the keys: those of all queries, or of one at a time.
        if any(S in shape for shape in shapes):
            return f"whole rows of {S} logits"
        tables = {shape for shape in shapes if len(shape) == 2 and min(shape) > 1}
        keys = {max(shape) for shape in shapes if math.prod(shape) == max(shape, default=1) not in (1, T)}
        if not either_way(block_q, block_k) if tables else keys and block_k not in keys:
            return "tiles of other sizes"
    if whole or (H == 5 and any(S in shape for shape in shapes)):
        return f"whole rows of {S} logits"
    if T > block_q and S > block_k and either_way(T, S):
        return "all logits at once"
    if T > block_q and H != block_k and either_way(T, block_k):
        return "a tile of keys for all queries at once"
    # H is the length of nothing else there. Where queries come one by one, theirs may be a tile of products with keys.
    if H == 5 and (block_k, H) in shapes and not {(block_q, H), (H,)} & shapes:
        return "tiles of block_k queries"
    if H == 5:
        runs, key_tiles = lambda parts: len([*itertools.groupby(parts)]), -(-S // block_k)
        # Keys of a tile may be read one by one, but then its values are read behind all of them.
        made = any(block_k in shape for shape in shapes)
        if not made and runs(name for name, _, n in reads if name != "q" and n == 1) > 2 * T * key_tiles:
            return "one key at a time"
        if runs(row // block_q for name, row, n in reads if name == "q" and n <= block_q) >= T / block_q * key_tiles:
            return "all tiles of queries for one tile of keys after the other"
    return "tiles"


QUERY_OUTER = Exercise(
    tiled_attention, "Query tiles outside", outputs=("out", "lse", "what was built"), cases=_attention_cases,
    run=_run_in_tiles,
).with_mistakes(
    ("alpha multiplies the columns of acc, where it should multiply the rows", "alpha[:, None]", "alpha",
     "NumPy lines up (block_q,) with the H of (block_q, H); give alpha a second axis: alpha[:, None] * acc."),
    ("the tiles of keys are not used: the softmax takes a whole row of logits at once",
     "    out, lse =", "    block_k = len(k)\n    out, lse =",
     "The numbers are right, but a long row fits no chip: visit block_k keys at a time, as in section 2."),
    ("no tiles are used: all logits are computed at once",
     "    out, lse =", "    block_q, block_k = len(q), len(k)\n    out, lse =",
     "The numbers are right, but the whole table fits no chip: block_q queries meet block_k keys, see section 2."),
    ("the tiles are not block_q queries by block_k keys", "    out, lse =", "    block_k = 2 * block_k\n    out, lse =",
     "The numbers are right, but the sizes are arguments: cut block_q queries and block_k keys."),
    ("the last, shorter key tile is left out", "len(k), block_k", "len(k) // block_k * block_k, block_k",
     "range(0, S, block_k) reaches the tail, S // block_k tiles do not: see section 4."),
)  # fmt: skip


def kind_of_tile(q_start, q_stop, k_start, k_stop, T, S):
    """The kind of a tile of causal attention: "skipped", "partial" or "full"."""
    last_query = min(q_stop, T) - 1
    if k_start > last_query:
        return "skipped"
    if k_stop - 1 <= q_start and q_stop <= T and k_stop <= S:
        return "full"
    return "partial"


def _run_kinds(answer, T, S, block_q, block_k):
    """The answer's word for every tile of a causal problem. Complaint where it builds the mask of a large one."""
    run = lambda: {
        f"queries {i}–{i + block_q - 1}, keys {j}–{j + block_k - 1}": without(
            masking, answer, i, i + block_q, j, j + block_k, T, S
        )
        for i in range(0, T, block_q)
        for j in range(0, S, block_k)
    }
    result, has_mask = exceeds(block_q * block_k // 2, run) if S == LONG else (run(), False)
    if has_mask:
        raise Complaint("a mask of the tile was built; compare its corners instead")
    return result


CLASSIFY = Exercise(kind_of_tile, "Skipped, partial or full", outputs=("kind",), run=_run_kinds).with_cases(
    "T S block_q block_k", (4, 4, 2, 2), (5, 8, 4, 2), (6, 9, 3, 4), (9, 5, 2, 3), (13, 11, 4, 4), (7, 7, 1, 1),
    (8, 20, 8, 4), (900, LONG, 512, 512),
).with_mistakes(
    ("a tile is skipped as soon as its first query does not see it", "k_start > last_query", "k_start > q_start",
     "The last query of the tile sees the most keys: see section 5."),
    ("a tile is called full if only its last query sees every key", "k_stop - 1 <= q_start", "k_stop <= q_stop",
     "The first query of the tile sees the fewest keys: see section 5."),
    ("a tile that sticks out past S is called full", " and k_stop <= S", "",
     "Positions past S count as not visible: see the text of the exercise."),
    ("a tile that sticks out past T is called full", " and q_stop <= T", "",
     "Positions past T count as not visible: see the text of the exercise."),
    ("the diagonal ends at the lower right corner, as if query T - 1 stood beside key S - 1",
     ("> last_query", "<= q_start"), ("> last_query + S - T", "<= q_start + S - T"),
     "Query i sees the keys j ≤ i, whatever S and T are: see section 5."),
)  # fmt: skip


def key_outer_attention(memory, scale, block_q, block_k):
    """Fill out (T, H), m and l (T,) of a memory that holds q (T, H), k and v (S, H)."""
    T, S = len(memory.arrays["q"]), len(memory.arrays["k"])
    for k_start in range(0, S, block_k):
        k = memory.load("k", k_start, k_start + block_k)
        v = memory.load("v", k_start, k_start + block_k)
        for q_start in range(0, T, block_q):
            q_stop = q_start + block_q
            names = ("q", "m", "l", "out")
            q, m, l, out = (memory.load(name, q_start, q_stop) for name in names)
            s = scale * (q @ k.T)
            m_new = np.maximum(m, s.max(axis=1))
            alpha = np.exp(m - m_new)
            p = np.exp(s - m_new[:, None])
            l_new = alpha * l + p.sum(axis=1)
            acc = (l * alpha)[:, None] * out + p @ v
            memory.store("out", q_start, acc / l_new[:, None])
            memory.store("m", q_start, m_new)
            memory.store("l", q_start, l_new)


class _WatchedMemory(SlowMemory):
    """Keeps a copy of out as the first key tile left it. queries: most rows of q, m, l or out in one load."""

    snapshot, queries, stored = None, 0, 0

    def load(self, name, start, stop):
        if name == "k" and self.stored and self.snapshot is None:
            self.snapshot = self.arrays["out"].copy()
        rows = super().load(name, start, stop)
        if name in ("q", "m", "l", "out"):
            self.queries = max(self.queries, len(rows))
        return rows

    def store(self, name, start, rows):
        super().store(name, start, rows)
        self.stored += len(rows) * (name == "out")
        if self.snapshot is None and self.stored >= len(self.arrays["q"]):
            self.snapshot = self.arrays["out"].copy()


def _run_on_memory(answer, q, k, v, scale, block_q, block_k):
    memory = _WatchedMemory(q=q, k=k, v=v)
    memory.allocate("out", q.shape, np.float64, 0)
    memory.allocate("m", len(q), np.float64, -np.inf)
    memory.allocate("l", len(q), np.float64, 0)
    result = answer(memory, scale, block_q, block_k)
    out = memory.arrays["out"]
    if not out.any() and result is not None:
        raise Complaint("nothing was stored in out: the results belong into memory, by memory.store")
    first = out if memory.snapshot is None else memory.snapshot
    return first, out, memory.arrays["m"], memory.arrays["l"], memory.bytes_moved, memory.queries


KEY_OUTER = Exercise(
    key_outer_attention, "Key tiles outside",
    outputs=("out after the first key tile", "out", "m", "l", "bytes moved", "queries loaded at once"),
    cases=_attention_cases, run=_run_on_memory,
).with_mistakes(
    ("out is stored without the division by l", ("(l * alpha)", "acc / l_new[:, None]"), ("alpha", "acc"),
     "Whenever out is stored it must be normalised: divide by the new l, see the equation of section 6."),
    ("out is kept unnormalised and divided in a pass of its own at the end",
     ("(l * alpha)", "acc / l_new[:, None]", "l_new)"), ("alpha", "acc",
      'l_new)\n    memory.store("out", 0, memory.load("out", 0, T) / memory.load("l", 0, T)[:, None])'),
     "The result is right, but the task is to store a normalised out at every visit: see section 6."),
    ("the loop over query tiles is outside",
     ("    for k_start", "        k =", "        v =", "        for q_start in range(0, T, block_q):\n"),
     ("    for q_start in range(0, T, block_q):\n        for k_start", "            k =", "            v =", ""),
     "Here each key tile meets every query tile before the next key tile comes: see the picture of section 6."),
)  # fmt: skip


def traffic_table(T, S, H, itemsize, block_q, block_k):
    """Bytes moved: {"naive": …, "query-outer": …, "key-outer": …}."""
    query_tiles, key_tiles = -(-T // block_q), -(-S // block_k)
    visit = 3 * itemsize * T * H + 16 * T
    filling = itemsize * T * H + 8 * T
    return {
        "naive": itemsize * (4 * T * S + 2 * T * H + 2 * S * H),
        "query-outer": itemsize * (2 * T * H + 2 * S * H * query_tiles) + 4 * T,
        "key-outer": 2 * itemsize * S * H + filling + key_tiles * visit,
    }


TRAFFIC_TABLE = Exercise(
    traffic_table, "The traffic table", outputs=("bytes",), run=functools.partial(without, cost), tolerance=1e-9,
).with_cases(
    "T S H itemsize block_q block_k", (2, 3, 1, 2, 1, 2), (8, 16, 4, 4, 4, 4), (10, 13, 8, 2, 4, 5),
    (1000, 700, 64, 2, 128, 32), (4096, 4096, 128, 2, 128, 128),
).with_mistakes(
    ("query-outer reads k and v only once", " * query_tiles", "",
     "Every query tile reads all of k and v: see section 3."),
    ("naive moves a table three times", "4 * T * S", "3 * T * S", "Each is written and read: see section 7."),
    ("statistics are counted in the element size of q instead of 4 bytes", ("+ 4", "16", "+ 8"),
     ("+ itemsize", "4 * itemsize", "+ 2 * itemsize"),
     "lse, m and l are float32 whatever q is: see the text of the exercise."),
    ("key-outer reads q only once", ("3 * ", "filling = "), ("2 * ", "filling = 2 * "),
     "Each key tile meets every query tile, so q is read again for each: see section 6."),
)  # fmt: skip


def least_traffic_blocks(T, S, H, itemsize, budget, sizes):
    """The (block_q, block_k) that fits in budget and moves the fewest bytes."""
    fitting = [
        (block_q, block_k)
        for block_q in sizes
        for block_k in sizes
        if itemsize * (block_q * H + 2 * block_k * H + block_q * block_k) <= budget
    ]
    moved = lambda pair: cost.query_outer_bytes(T, S, H, itemsize, *pair)
    return min(fitting, key=moved)


POWERS = (16, 32, 64, 128, 256, 512, 1024)


def _judge_least_traffic(result, case):
    """What is wrong with a pair that should fit and move the fewest bytes."""
    T, S, H, itemsize, budget, sizes = case.arguments
    moved = lambda pair: cost.query_outer_bytes(T, S, H, itemsize, *pair)
    if not np.shape(result) == (2,) or not all(float(size).is_integer() for size in result):
        return "expected two integers (block_q, block_k)"
    blocks = int(result[0]), int(result[1])
    for name, size in zip(("block_q", "block_k"), blocks, strict=True):
        if size not in sizes:
            return f"{name} = {str(size)[:20]} is not one of the allowed sizes"
    needed = itemsize * (blocks[0] * H + 2 * blocks[1] * H + blocks[0] * blocks[1])
    if needed > budget:
        return f"block_q, block_k = {blocks} need {needed} bytes on chip, the budget is {budget}"
    best = moved(least_traffic_blocks(*case.arguments))
    if moved(blocks) > best:
        return f"block_q, block_k = {blocks} fit, and move {moved(blocks)} bytes; other sizes that fit move {best}"
    return None


LEAST_TRAFFIC = Exercise(
    least_traffic_blocks, "The tile that moves the fewest bytes", outputs=("block_q, block_k",),
    judge=_judge_least_traffic,
).with_cases(
    "T S H itemsize budget sizes",
    ("the case worked by hand", 4, 4, 2, 2, 64, (2, 4)),
    ("T=1000, S=700, H=64, 2 bytes, 163 KiB", 1000, 700, 64, 2, 163 * KIB, POWERS[2:]),
    ("T=S=4096, H=64, 2 bytes, 163 KiB", 4096, 4096, 64, 2, 163 * KIB, POWERS[2:]),
    ("T=S=4096, H=128, 2 bytes, 163 KiB", 4096, 4096, 128, 2, 163 * KIB, POWERS[2:]),
    ("T=5000, S=300, H=96, 2 bytes, 227 KiB", 5000, 300, 96, 2, 227 * KIB, POWERS),
    ("T=3000, S=9000, H=64, 4 bytes, 163 KiB", 3000, 9000, 64, 4, 163 * KIB, POWERS),
    ("T=S=4096, H=64, 2 bytes, 164 KiB, which two pairs fill exactly", 4096, 4096, 64, 2, 164 * KIB, POWERS),
    ("T=S=4096, H=64, 100 KiB, sizes in no order", 4096, 4096, 64, 2, 100 * KIB, (128, 16, 512, 32, 64, 256)),
    ("T=10, below all sizes", 10, 500, 64, 2, 100 * KIB, (16, 32, 64)),
    ("T=500, S=10, 40 KiB", 500, 10, 64, 2, 40 * KIB, (16, 32, 64, 128)),
    ("T=96, S=500, H=64, 100 KiB", 96, 500, 64, 2, 100 * KIB, (16, 48, 64, 96)),
    ("T=S=4096, H=64, 150,000 bytes", 4096, 4096, 64, 2, 150_000, POWERS[:-1]),
    ("T=S=1000, H=32, 20 KiB, other sizes", 1000, 1000, 32, 2, 20 * KIB, (24, 40, 56, 88, 120)),
    ("T=S=1000, H=32, 14 KiB, other sizes", 1000, 1000, 32, 2, 14 * KIB, (24, 40, 56, 88, 120)),
    ("T=S=1000, H=32, 17 KiB, sizes close to each other", 1000, 1000, 32, 2, 17 * KIB, (40, 56, 60)),
).with_mistakes(
    ("the tile of v is left out of the budget", "2 * block_k * H", "block_k * H",
     "A key tile brings its values along, so it counts twice: see the sum in section 8."),
    ("the weights p are counted with 4 bytes an entry", " + block_q * block_k)", ") + 4 * block_q * block_k",
     "In this budget all tiles have `itemsize` bytes an element: see the first sum in section 8."),
    ("the largest tile is taken for the one with the least traffic", "cost.query_outer_bytes(T, S, H, itemsize, *pair)",
     "-pair[0] * pair[1]", "Query-outer traffic does not depend on the product of the block sizes: see section 7."),
)  # fmt: skip

EXERCISES = (QUERY_OUTER, CLASSIFY, KEY_OUTER, TRAFFIC_TABLE, LEAST_TRAFFIC)
