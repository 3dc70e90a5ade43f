"""The exercises of notebook 06."""

import math

import numpy as np

from helpers.attention import tiled
from helpers.exercises import oracles
from helpers.exercises.comparing import plain
from helpers.exercises.exercise import Case, Complaint, Exercise, shaped
from helpers.exercises.watched import by_formulas, exceeds, kept, watch, without


def _normal(random, *shape):
    """Normal numbers that float32 holds exactly, as float64."""
    return random.standard_normal(shape, np.float32).astype(np.float64)


def softmax_backward(p, dp):
    """The gradient of the logits. p, dp: (T, S). Returns ds (T, S)."""
    delta = (p * dp).sum(axis=1, keepdims=True)
    return p * (dp - delta)


def _ds_cases():
    random = np.random.default_rng(61)

    def case(label, T, S, spread, shift=0.0):
        p = np.exp(spread * random.standard_normal((T, S)))
        return Case(f"{label}T={T}, S={S}", (p / p.sum(axis=1, keepdims=True), random.standard_normal((T, S)) + shift))

    return [
        Case("the case worked by hand", (np.array([[0.25, 0.75]]), np.array([[2.0, 6.0]]))),
        case("", 2, 3, 1),
        case("", 4, 7, 3),
        case("nearly all weight on one key, ", 6, 9, 30),
        case("a large constant in dp, ", 3, 5, 1, shift=50.0),
        case("one key, ", 3, 1, 1),
    ]


DS = Exercise(
    softmax_backward, "From dp to ds", outputs=("ds",), cases=_ds_cases,
    tolerance=1e-4,  # the large constant leaves float32 five digits
).with_mistakes(
    ("only the diagonal of the Jacobian is used, p (1 - p)", "(dp - delta)", "(1 - p) * dp",
     "A softmax has a whole matrix of derivatives, a sigmoid has only a diagonal: see the slip in section 2."),
)  # fmt: skip


def row_delta(out, dout, dlse):
    """What is subtracted from dp in each row. out, dout: (T, H); dlse: (T,)."""
    return (out * dout).sum(axis=1) - dlse


def _delta_cases():
    random = np.random.default_rng(62)
    yield Case("the case worked by hand", (np.array([[5.0]]), np.ones((1, 1)), np.array([2.0])))
    for T, H, into_lse in [(3, 2, 0), (3, 2, 1), (6, 8, 1), (4, 4, 1), (7, 1, 1), (400, 3, 1)]:
        out, dout = _normal(random, 2, T, H)
        label = f"T={T}, H={H}, {'a' if into_lse else 'no'} gradient into lse"
        yield Case(label, (out, dout, into_lse * _normal(random, T)))


def _run_delta(answer, out, dout, dlse):
    """The result; a `Complaint` where NumPy made a table of all pairs of queries for it, as if for its diagonal."""
    (T, H), (out, shapes) = dout.shape, watch(out)
    delta, is_large = exceeds(max(4 * T * T, 2**19), lambda: plain(answer(out, dout, dlse)))
    if T != H and ((T, T) in shapes or is_large) and np.shape(delta) == (T,):
        raise Complaint(f"a table of {T} × {T} numbers was made: multiply entry by entry, and sum along axis 1")
    return delta


DELTA = Exercise(
    row_delta, "delta without a table", outputs=("delta",), cases=_delta_cases, run=_run_delta,
).with_mistakes(
    ("the sum runs over the queries instead of the components", "axis=1", "axis=0",
     "There is one delta for each query, so sum along axis 1: see section 4."),
    ("a (T, 1) and a (T,) array meet and make a (T, T) table", "axis=1", "axis=1, keepdims=True",
     "dlse has shape (T,), so the row sum must have it as well: leave keepdims out."),
)  # fmt: skip


def gradients(p, ds, q, k, dout, scale):
    """p, ds: (N, T, S); q, dout: (N, T, H); k: (K, S, H).

    Returns dq (N, T, H), dk and dv (K, S, H).
    """
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(k)
    group = len(q) // len(k)
    for n in range(len(q)):
        kv = n // group
        dq[n] = scale * ds[n] @ k[kv]
        dk[kv] += scale * ds[n].T @ q[n]
        dv[kv] += p[n].T @ dout[n]
    return dq, dk, dv


def _product_cases():
    random = np.random.default_rng(63)

    def case(T, S, H, N=1, K=1, scale=0.5):
        shapes = (N, T, S), (N, T, S), (N, T, H), (K, S, H), (N, T, H)
        label = f"T={T}, S={S}, H={H}, N={N}, K={K}, scale={scale}"
        return Case(label, (*(_normal(random, *shape) for shape in shapes), scale))

    return [case(3, 3, 2), case(3, 3, 2, 4, 2), case(2, 5, 3), case(4, 7, 4, 6, 2), case(5, 2, 8, 3, 1, scale=0.7)]


PRODUCTS = Exercise(gradients, "dq, dk and dv", ("dq", "dk", "dv"), _product_cases, run=by_formulas).with_mistakes(
    ("p is not transposed in dv, and only dv is wrong", "p[n].T", "p[n]",
     "A value collects from all queries that looked at it, a column of p: see section 3."),
    ("ds is not transposed in dk, and only dk is wrong", "ds[n].T", "ds[n]",
     "A key collects from all queries, a column of ds: see section 3."),
    ("only the last query head of each group counts", "+=", "=",
     "Add instead of assigning; dk[kv] += … adds only once where an index repeats: see section 6."),
    ("the query heads take turns at the key heads", "n // group", "n % len(k)",
     "Neighbours share a key head, n // group: see section 6."),
)  # fmt: skip


def residual_bytes(T, S, N, K, H, itemsize):
    """Bytes kept for the backward pass: (with the table p, without it)."""
    inputs = itemsize * (N * T * H + 2 * K * S * H)
    with_table = inputs + itemsize * N * T * S
    without_table = inputs + itemsize * N * T * H + 4 * N * T
    return with_table, without_table


SAVE = Exercise(
    residual_bytes, "What to save", outputs=("with the table", "without the table"),
).with_cases(  # the last has more bytes than 32 bits can count
    "T S N K H itemsize", (2, 3, 1, 1, 4, 2), (5, 7, 4, 2, 8, 4), (4096, 4096, 1, 1, 128, 2),
    (1000, 3000, 8, 2, 64, 2), (65536, 65536, 16, 4, 128, 2),
).with_mistakes(
    ("lse is stored in the dtype of q", "4 * N * T", "itemsize * N * T",
     "In 16 bits lse makes the gradients several times worse, so it takes 4 bytes: see section 10."),
)  # fmt: skip


def flash_backward(q, k, v, out, lse, dout, scale, block_q, block_k):
    """q, out, dout: (T, H); k, v: (S, H); lse: (T,).

    Returns dq (T, H), dk and dv (S, H).
    """
    delta = (out * dout).sum(axis=1)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in range(0, len(k), block_k):
        cols = slice(j, j + block_k)
        for i in range(0, len(q), block_q):
            rows = slice(i, i + block_q)
            p = np.exp(scale * q[rows] @ k[cols].T - lse[rows, None])
            dp = dout[rows] @ v[cols].T
            ds = p * (dp - delta[rows, None])
            dv[cols] += p.T @ dout[rows]
            dk[cols] += scale * ds.T @ q[rows]
            dq[rows] += scale * ds @ k[cols]
    return dq, dk, dv


def _tiled_cases():
    random = np.random.default_rng(65)

    def case(label, T, S, H, block_q, block_k, scale, spread=1.0, shift=0.0):
        q, k, v, dout = (_normal(random, n, H) for n in (T, S, S, T))
        q, k = oracles.even(spread * q), oracles.even(k)  # their logits are exact in float32
        if shift:  # the first component moves every logit of a row
            q[:, 0], k[:, 0] = shift / scale / 2, 2
        return Case(
            f"{label}T={T}, S={S}, H={H}, scale={scale:g}, block_q={block_q}, block_k={block_k}",
            (q, k, v, dout, scale, block_q, block_k),
        )

    by_hand = np.ones((1, 1)), np.log([[1.0], [3.0]]).astype(np.float32).astype(np.float64)
    by_hand += np.array([[2.0], [6.0]]), np.ones((1, 1))
    return [
        Case("the case worked by hand", (*by_hand, 1.0, 1, 1)),
        case("", 5, 8, 3, 2, 3, 0.5),
        case("", 5, 8, 3, 2, 3, 1.0),
        case("more queries than keys, ", 10, 4, 2, 4, 3, 0.25),
        case("a single tile, ", 3, 5, 2, 8, 8, 0.5),
        case("peaked weights, ", 5, 8, 3, 2, 3, 0.25, spread=20.0),
        case("logits near 1000, ", 5, 8, 3, 2, 3, 0.5, shift=1000.0),
        case("logits near -1000, ", 5, 8, 3, 2, 3, 0.25, shift=-1000.0),
        case("long, ", LONG, LONG, 2, 16, 24, 0.5),
    ]


LONG = 110  # enough for whole tables to show in the memory that an answer takes, and soon done by loops over pairs


def _run_tiled(answer, q, k, v, dout, scale, block_q, block_k):
    """The results, and how they were built as far as NumPy's arrays tell."""
    T = len(q)
    out, lse = oracles.attention(q, k, v, scale=scale)
    lse, shapes = watch(lse)
    k, of_keys = watch(k, second=True)
    run = lambda: answer(q, k, v, out, lse, dout, scale, block_q, block_k)
    if T == LONG:
        run()  # what JAX compiles is not watched
        # Of all queries and keys, or of a tile of the one and all of the other, made by any library.
        is_table = lambda shape: math.prod(shape) >= T * T or (len(shape) == 2 and max(shape) >= T and min(shape) > 10)
        (result, whole), seen = kept(lambda: exceeds(10 * T * T, run), is_table)
    else:
        result, whole, seen = without(tiled, by_formulas, run), False, False
    whole = whole or seen or (LONG,) in of_keys  # the logits of one query and all keys, or of one key and all queries
    dq, dk, dv = shaped(result, {"dq": q.shape, "dk": k.shape, "dv": v.shape})
    return dq, dk, dv, _built(shapes, block_q, block_k, whole) if T == LONG else "tiles"


def _built(shapes, block_q, block_k, whole):
    """What the shapes of the arrays made from lse tell of the tiles; where there are none, they tell nothing."""
    rows = {max(shape) for shape in shapes if shape and math.prod(shape) == max(shape) < LONG}
    tables = {tuple(sorted(shape)) for shape in shapes if len(shape) == 2 and min(shape) > 3}  # 3: head_dim
    tables -= {table for table in tables if math.prod(table) == LONG}  # lse itself, cut into tiles
    longest = max(map(max, tables), default=0)
    sizes_tell = tables and longest < LONG and tuple(sorted((block_q, block_k))) not in tables
    if sizes_tell or (rows and not rows & {block_q, block_k}):
        return "other tiles"
    if whole or longest >= LONG:
        return "more than a tile at once"
    return "tiles of block_k queries and block_q keys" if block_k in rows and block_q not in rows else "tiles"


TILED = Exercise(
    flash_backward, "The whole backward pass, tile by tile",
    outputs=("dq", "dk", "dv", "what was built"), cases=_tiled_cases, run=_run_tiled,
    tolerance=1e-4,  # float32 rounds an lse near 1000 to four digits behind the point
).with_mistakes(
    ("p is the softmax of one tile", " - lse[rows, None])\n", ")\n            p = p / p.sum(axis=1, keepdims=True)\n",
     "All three are wrong, so look at p: a tile does not know the sum of its row, but lse does, see section 7."),
    ("dk and dv are overwritten by each tile of queries instead of added to", "[cols] +=", "[cols] =",
     "Only dq is right: dk and dv are sums over all queries, so add to them, see section 8."),
    ("dq and dk are not multiplied by the scale", ("= scale * ds @", "= scale * ds.T"), ("= ds @", "= ds.T"),
     "s = scale q kᵀ, so the scale appears once more in both: see section 3."),
    ("tiles of other sizes are used than block_q queries by block_k keys",
     "    delta =", "    block_q = block_k = 32\n    delta =",
     "The numbers are right, but the sizes of the tiles are arguments: see the text of the exercise."),
    ("more than a tile is held at once: whole rows, whole columns, or all of the (T, S) table",
     "    delta =", "    block_q, block_k = len(q), len(k)\n    delta =",
     "The numbers are right, but the memory grows with the lengths: loop over tiles of both, see section 8."),
)  # fmt: skip

EXERCISES = (DS, DELTA, PRODUCTS, SAVE, TILED)
