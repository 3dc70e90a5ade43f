"""The exercises of notebook 03."""

import math

import numpy as np

from helpers.attention.masking import Band, tile_kind
from helpers.attention.reference import oracle
from helpers.attention.tiled import SlowMemory
from helpers.exercises.checking import Case, Complaint, Exercise, Mistake, plain
from helpers.exercises.watched import called, exceeds, watch
from helpers.measure import cost

KIB = 1024
LONG = 1024  # keys: enough for rows of logits to show in the memory that an answer takes


def _inputs(T, S, H, seed, scale, peak=None, gap=12.0, shift=0.0, mixed=False):
    """q, k, v in float64, whole multiples of 1/8, so that float32 holds them, and logits near 1000 too.

    peak: a key whose logits lie about gap above the others, for every query. shift: added to every
    logit; with mixed, added for even queries and subtracted for odd ones.
    """
    random = np.random.default_rng(seed)
    q, k, v = (np.round(8 * random.standard_normal((rows, H))) / 8 for rows in (T, S, S))
    q[:, 0] = 4
    if mixed:
        q[1::2, 0] = -4
    k[:, 0] = shift / 4 / scale
    if peak is not None:
        k[peak, 0] += gap / 4 / scale
    return q, k, v


def _attention_cases():
    """Arguments (q, k, v, scale, block_q, block_k)."""
    by_hand = np.log([[1.0], [3.0], [2.0], [8.0]]).astype(np.float32).astype(np.float64)
    cases = [
        Case(
            "the case worked by hand",
            (np.ones((1, 1)), by_hand, np.array([[1.0], [2.0], [3.0], [4.0]]), 1.0, 1, 2),
        )
    ]
    settings = [
        (4, 6, 2, 2, 3, 0.5, {}, ""),
        (6, 10, 4, 3, 4, 0.5, {"peak": 1}, ", largest logits first"),
        (6, 10, 4, 3, 4, 0.25, {"peak": 9}, ", largest logits last"),
        (9, 11, 5, 2, 4, 2.0, {"peak": 7}, ", ragged tails, largest logits in the middle"),
        (6, 10, 4, 3, 4, 0.5, {"shift": 1000.0}, ", logits near 1000"),
        (6, 10, 4, 3, 4, 0.25, {"shift": -1000.0}, ", logits near -1000"),
        (6, 10, 4, 3, 4, -0.5, {"peak": 0, "gap": 2000.0}, ", the first logit 2000 above the others"),
        (6, 10, 4, 3, 4, 0.5, {"peak": 9, "gap": 2000.0}, ", the last logit 2000 above the others"),
        (6, 10, 4, 3, 4, 0.25, {"shift": 1000.0, "mixed": True}, ", logits near 1000 and -1000, by query"),
        (128, LONG, 1, 128, 64, 1.0, {}, ""),
    ]
    for seed, (T, S, H, block_q, block_k, scale, options, note) in enumerate(settings):
        label = f"T={T}, S={S}, H={H}, scale={scale:g}, block_q={block_q}, block_k={block_k}{note}"
        cases.append(Case(label, (*_inputs(T, S, H, seed, scale, **options), scale, block_q, block_k)))
    return cases


def _oracle(q, k, v, scale):
    out, lse = oracle(*(array.astype(np.float32)[:, None] for array in (q, k, v)), scale=float(scale))
    return out[:, 0], lse[:, 0]


# 3.1, and a wrong answer for each thing that can be forgotten


def _run_in_tiles(answer, q, k, v, scale, block_q, block_k):
    """What the answer returns, and how it was built as far as NumPy's arrays tell."""
    S = len(k)
    q, shapes = watch(q)
    run = lambda: answer(q, k, v, scale, block_q, block_k)
    result, whole = exceeds(4 * block_q * S, run) if S == LONG else (run(), False)
    result = plain(result)
    if not isinstance(result, tuple) or len(result) != 2:
        raise Complaint("expected two results, (out, lse)" + (", got None" if result is None else ""))
    return *result, _built(shapes, *q.shape, S, block_q, block_k, whole)


def _built(shapes, T, H, S, block_q, block_k, whole):
    """What the shapes of the arrays made of q tell of the tiles; where there are none, they tell nothing."""
    either_way = lambda rows, columns: {(rows, columns), (columns, rows)} & shapes
    if S == LONG:
        # Nothing but logits is made of q and as long as the keys: those of all queries, or of one at a time.
        if whole or any(S in shape for shape in shapes):
            return f"whole rows of {S} logits"
        tables = {shape for shape in shapes if len(shape) == 2 and min(shape) > 1}
        keys = {max(shape) for shape in shapes if math.prod(shape) == max(shape, default=1) not in (1, T)}
        if not either_way(block_q, block_k) if tables else keys and block_k not in keys:
            return "tiles of other sizes"
    if T > block_q and S > block_k and either_way(T, S):
        return "all logits at once"
    if T > block_q and H != block_k and either_way(T, block_k):
        return "a tile of keys for all queries at once"
    # H is the length of nothing else there. Where queries come one by one, theirs may be a tile of products with keys.
    if H == 5 and (block_k, H) in shapes and not {(block_q, H), (H,)} & shapes:
        return "tiles of block_k queries"
    return "tiles"


def _query_outer(
    q,
    k,
    v,
    scale,
    block_q,
    block_k,
    *,
    rescale_l=True,
    rescale_acc=True,
    keep_l=True,
    keep_acc=True,
    keep_m=True,
    add_first=False,
    normalise_early=False,
    divide=True,
    lse_of=lambda m, l: m + np.log(l),
    whole_tiles_only=False,
    whole_query_tiles_only=False,
    pad_keys=False,
    causal=False,
    start=-np.inf,
    exp=np.exp,
    reference=lambda m, m_new, s: m_new,
    sum_of=lambda p: p.sum(axis=1),
    new_maximum=lambda m, s: np.maximum(m, s.max(axis=1)),
    alpha_of=lambda m, m_new: np.exp(m - m_new),
    alpha_along_columns=False,
):
    T, S = len(q), len(k)
    out, lse = np.zeros(q.shape), np.zeros(T)
    if pad_keys:
        missing = -S % block_k
        k, v = np.pad(k, ((0, missing), (0, 0))), np.pad(v, ((0, missing), (0, 0)))
        S += missing
    if whole_tiles_only:
        S = S // block_k * block_k
    for q_start in range(0, T // block_q * block_q if whole_query_tiles_only else T, block_q):
        rows = slice(q_start, q_start + block_q)
        m, l, acc = np.full(len(q[rows]), start), 0.0, 0.0
        for k_start in range(0, S, block_k):
            cols = slice(k_start, k_start + block_k)
            s = scale * (q[rows] @ k[cols].T)
            if causal:
                s = np.where(np.arange(S)[None, cols] <= np.arange(T)[rows, None], s, -np.inf)
            m_new = new_maximum(m, s)
            alpha = alpha_of(m, m_new)
            p = exp(s - reference(m, m_new, s)[:, None])
            l, acc = keep_l * l, keep_acc * acc
            if add_first:
                l, acc = l + sum_of(p), acc + p @ v[cols]
            l = (alpha if rescale_l else 1) * l
            acc = (alpha if alpha_along_columns else alpha[:, None] if rescale_acc else 1) * acc
            if not add_first:
                l, acc = l + sum_of(p), acc + p @ v[cols]
            if normalise_early:
                acc = acc / (l * np.ones(len(m)))[:, None]
            m = m_new if keep_m else m
        l = l * np.ones(len(m))
        out[rows] = acc / l[:, None] if divide else acc
        lse[rows] = lse_of(m, l)
    return out, lse


def _separate_softmaxes(combine):
    """A softmax of its own for each key tile, the results combined; lse as it should be."""

    def answer(q, k, v, scale, block_q, block_k):
        _, lse = _query_outer(q, k, v, scale, block_q, block_k)
        parts = []
        for k_start in range(0, len(k), block_k):
            cols = slice(k_start, k_start + block_k)
            parts.append(_query_outer(q, k[cols], v[cols], scale, block_q, block_k)[0])
        return combine(parts), lse

    return answer


def _with(**options):
    return lambda *arguments: _query_outer(*arguments, **options)


def _in_tiles_of(*sizes):
    return lambda q, k, v, scale, *_: _query_outer(q, k, v, scale, *sizes)


def _rescaled(change):
    return lambda q, k, v, scale, *blocks: _query_outer(q, k, v, change(scale), *blocks)


QUERY_OUTER = Exercise(
    number="3.1",
    title="Query tiles outside",
    outputs=("out", "lse", "what was built"),
    cases=_attention_cases,
    expected=lambda q, k, v, scale, *_: (*_oracle(q, k, v, scale), "tiles"),
    run=_run_in_tiles,
    tried="T ≠ S, ragged tails, unequal blocks, largest logits first, last and in the middle, or near ±1000, scale < 0",
    mistakes=(
        Mistake(
            "acc is not multiplied by alpha when the maximum grows",
            _with(rescale_acc=False),
            "What was added under the old maximum must shrink too: see the equation of section 1.",
        ),
        Mistake(
            "alpha multiplies the columns of acc, where it should multiply the rows",
            _with(alpha_along_columns=True),
            "NumPy lines up (block_q,) with the H of (block_q, H); give alpha a second axis: alpha[:, None] * acc.",
        ),
        Mistake(
            "l is not multiplied by alpha when the maximum grows",
            _with(rescale_l=False),
            "l and acc are sums with the same reference, so both need alpha: see the equation of section 1.",
        ),
        Mistake(
            "neither l nor acc is multiplied by alpha",
            _with(rescale_l=False, rescale_acc=False),
            "Terms added under different maxima do not mix: see the equation of section 1.",
        ),
        Mistake(
            "alpha is not finite in the first visit: turned round, e^(m_new - m), no exponential, or from an m_new "
            "that is not the larger of the two",
            _with(alpha_of=lambda m, m_new: np.exp(m_new - m)),
            "alpha = e^(m - m_new), with the larger m_new, is at most 1, and 0 in the first visit: see section 1.",
        ),
        Mistake(
            "p is measured from the old maximum, which is minus infinity in the first visit",
            _with(reference=lambda m, m_new, s: m),
            "Compute m_new first, then p = exp(s - m_new): see the equation of section 1.",
        ),
        Mistake(
            "acc is replaced by what the current tile adds",
            _with(keep_acc=False),
            "The earlier tiles stay part of the sum, times alpha: see the equation of section 1.",
        ),
        Mistake(
            "l is replaced by the sum of the current tile",
            _with(keep_l=False),
            "The earlier tiles stay part of the sum, times alpha: see the equation of section 1.",
        ),
        Mistake(
            "l and acc are both replaced by what the current tile adds",
            _with(keep_l=False, keep_acc=False),
            "The earlier tiles stay part of the sums, times alpha: see the equation of section 1.",
        ),
        Mistake(
            "alpha multiplies l and acc after the current tile was added",
            _with(add_first=True),
            "alpha is for what was there before the tile came: see the equation of section 1.",
        ),
        Mistake(
            "l is one sum over the whole tile instead of one for each query",
            _with(sum_of=lambda p: p.sum()),
            "Each query has a sum of its own, p.sum(axis=1): see section 1.",
        ),
        Mistake(
            "m is the largest logit of the current tile only, not the largest so far",
            _with(new_maximum=lambda m, s: s.max(axis=1)),
            "If the old maximum was far larger, alpha overflows: keep the larger of the two, as in section 1.",
        ),
        Mistake(
            "one maximum is taken over the whole tile instead of one for each query",
            _with(new_maximum=lambda m, s: np.maximum(m, s.max())),
            "A query far below the others loses all its exponentials: m has one entry for each row, see section 1.",
        ),
        Mistake(
            "m keeps its first value during the loop, so that alpha is 0 and only the last tile counts",
            _with(keep_m=False),
            "At the end of each visit m becomes m_new: see the equation of section 1.",
        ),
        Mistake(
            "m starts at 0, or at another number that all logits may lie far below, instead of minus infinity",
            _with(start=0.0),
            "If every logit is far below 0, every exponential vanishes: see init in section 1.",
        ),
        Mistake(
            "each key tile gets a softmax of its own and the results are added",
            _separate_softmaxes(sum),
            "The tiles share one denominator: see the equation of section 1.",
        ),
        Mistake(
            "each key tile gets a softmax of its own and the results are averaged",
            _separate_softmaxes(lambda parts: sum(parts) / len(parts)),
            "A tile with large logits must weigh more than others: see the equation of section 1.",
        ),
        Mistake(
            "acc is divided by l after every tile, then updated as if it had not been",
            _with(normalise_early=True, divide=False),
            "Divide once, after the last key tile: see the loop of section 1. Section 6 shows the other convention.",
        ),
        Mistake(
            "acc is divided by l after every tile, and once more at the end",
            _with(normalise_early=True),
            "Divide once, after the last key tile: see the loop of section 1. Section 6 shows the other convention.",
        ),
        Mistake(
            "the final division by l is missing",
            _with(divide=False),
            "finalize divides acc by l once: see the end of the loop in section 1.",
        ),
        Mistake(
            "the tiles of keys are not used: the softmax takes a whole row of logits at once",
            lambda q, k, v, scale, block_q, block_k: _query_outer(q, k, v, scale, block_q, len(k)),
            "The numbers are right, but a long row fits no chip: visit block_k keys at a time, as in section 2.",
            variants=(lambda q, k, v, scale, block_q, block_k: _query_outer(q, k, v, scale, len(q), len(k)),),
        ),
        Mistake(
            "the queries are not cut into tiles",
            lambda q, k, v, scale, block_q, block_k: _query_outer(q, k, v, scale, len(q), block_k),
            "The numbers are right, but a state for all queries fits no chip: take block_q at a time, as in section 2.",
        ),
        Mistake(
            "the two block sizes are exchanged",
            lambda q, k, v, scale, block_q, block_k: _query_outer(q, k, v, scale, block_k, block_q),
            "The numbers are right, but block_q belongs to the queries and block_k to the keys: see section 2.",
        ),
        Mistake(
            "block_q and block_k are not used: the tiles have sizes of their own",
            _in_tiles_of(128, 64),
            "The numbers are right, but the caller chooses the tiles, to fit the chip: step by block_q and block_k.",
            variants=tuple(_in_tiles_of(*sizes) for sizes in ((2, 2), (4, 4), (8, 8), (16, 16), (64, 64), (16, 64))),
        ),
        Mistake(
            "p is measured from the tile's own maximum, in another unit than the sums that it is added to",
            _with(reference=lambda m, m_new, s: s.max(axis=1)),
            "p = exp(s - m_new), with the largest logit so far: see the equation of section 1.",
        ),
        Mistake(
            "the exponentials are taken to base two",
            _with(exp=np.exp2, alpha_of=lambda m, m_new: np.exp2(m - m_new)),
            "Nothing is in base two yet: use np.exp, as in section 1.",
        ),
        Mistake(
            "p is taken to base two, and alpha to base e",
            _with(exp=np.exp2),
            "Nothing is in base two yet: use np.exp, as in section 1.",
        ),
        Mistake(
            "lse is m alone, without log l",
            _with(lse_of=lambda m, l: m),
            "lse = m + log l: see section 1.",
        ),
        Mistake(
            "scale is ignored and 1 / sqrt(H) is used instead",
            lambda q, k, v, scale, *blocks: _query_outer(q, k, v, 1 / np.sqrt(q.shape[1]), *blocks),
            "scale is an argument, and need not be one over the square root of H.",
        ),
        Mistake(
            "scale is used, and 1 / sqrt(H) besides",
            lambda q, k, v, scale, *blocks: _query_outer(q, k, v, scale / np.sqrt(q.shape[1]), *blocks),
            "scale is all that the products are multiplied by: see the equation of section 1.",
        ),
        Mistake(
            "a causal mask is applied",
            _with(causal=True),
            "Here every query sees every key; causal attention comes in section 5.",
        ),
        Mistake(
            "lse is m minus log l",
            _with(lse_of=lambda m, l: m - np.log(l)),
            "lse = m + log l: see section 1.",
        ),
        Mistake(
            "lse is l, neither as a logarithm nor with m",
            _with(lse_of=lambda m, l: l),
            "lse = m + log l: see section 1.",
        ),
        Mistake(
            "the logarithm in lse is taken to base two",
            _with(lse_of=lambda m, l: m + np.log2(l)),
            "lse is a natural logarithm, np.log: see section 1.",
        ),
        Mistake(
            "lse is log l, without m",
            _with(lse_of=lambda m, l: np.log(l)),
            "The exponentials were taken relative to m, so m must be added back: see section 1.",
        ),
        Mistake(
            "lse is m + l, without the logarithm",
            _with(lse_of=lambda m, l: m + l),
            "lse = m + log l: see section 1.",
        ),
        Mistake(
            "the logits are not scaled",
            _rescaled(lambda scale: 1.0),
            "s = scale * q k^T: see the equation of section 1.",
        ),
        Mistake(
            "the scale multiplies the result instead of the logits",
            lambda q, k, v, scale, *blocks: (lambda out, lse: (scale * out, lse))(*_query_outer(q, k, v, 1.0, *blocks)),
            "s = scale * q k^T, before the exponential: see the equation of section 1.",
        ),
        Mistake(
            "the scale is applied twice",
            _rescaled(lambda scale: scale**2),
            "s = scale * q k^T, once: see the equation of section 1.",
        ),
        Mistake(
            "the logits are divided by scale",
            _rescaled(lambda scale: 1 / scale),
            "The logits are multiplied by scale: see the equation of section 1.",
        ),
        Mistake(
            "the last, shorter key tile is left out",
            _with(whole_tiles_only=True),
            "range(0, S, block_k) reaches the tail, S // block_k tiles do not: see section 4.",
        ),
        Mistake(
            "the last, shorter query tile is left out",
            _with(whole_query_tiles_only=True),
            "range(0, T, block_q) reaches the tail, T // block_q tiles do not: see section 4.",
        ),
        Mistake(
            "the last, shorter tiles are left out, of keys and of queries",
            _with(whole_tiles_only=True, whole_query_tiles_only=True),
            "range(0, S, block_k) and range(0, T, block_q) reach the tails: see section 4.",
        ),
        Mistake(
            "the last key tile is filled up with zeros and not masked",
            _with(pad_keys=True),
            "A key of zeros has logit 0 and takes weight: see section 4.",
        ),
    ),
)


# 3.2


def _kinds(answer, T, S, block_q, block_k):
    """The answer's word for every tile of a causal problem."""
    return {
        f"queries {i}–{i + block_q - 1}, keys {j}–{j + block_k - 1}": answer(i, i + block_q, j, j + block_k, T, S)
        for i in range(0, T, block_q)
        for j in range(0, S, block_k)
    }


def _right_kind(q_start, q_stop, k_start, k_stop, T, S):
    return tile_kind(range(q_start, q_stop), range(k_start, k_stop), Band(right=0), T, S)


def _word(skipped, full):
    return "skipped" if skipped else "full" if full else "partial"


def _kind_cases():
    settings = [(4, 4, 2, 2), (5, 8, 4, 2), (6, 9, 3, 4), (9, 5, 2, 3), (13, 11, 4, 4), (7, 7, 1, 1), (8, 20, 8, 4)]
    return [
        Case(f"T={T}, S={S}, block_q={block_q}, block_k={block_k}", (T, S, block_q, block_k))
        for T, S, block_q, block_k in settings
    ]


CLASSIFY = Exercise(
    number="3.2",
    title="Skipped, partial or full",
    outputs=("kind",),
    cases=_kind_cases,
    run=_kinds,
    expected=lambda *arguments: _kinds(_right_kind, *arguments),
    tried="every tile of seven causal problems, T < S, T = S and T > S, ragged tails, unequal blocks",
    mistakes=(
        Mistake(
            "tiles that stick out past the end are called full",
            lambda i, i_stop, j, j_stop, T, S: _word(j > min(i_stop, T) - 1, j_stop - 1 <= i),
            "Positions past T or S count as not visible, so a tile that holds some is at most partial: see section 5.",
        ),
        Mistake(
            "a tile counts as seen if only a query past the end would see it",
            lambda i, i_stop, j, j_stop, T, S: _word(j > i_stop - 1, j_stop - 1 <= i and i_stop <= T and j_stop <= S),
            "The last query that exists is min(q_stop, T) - 1: see section 5.",
        ),
        Mistake(
            "T and S are not looked at: a tile is judged as if every position in it existed",
            lambda i, i_stop, j, j_stop, T, S: _word(j > i_stop - 1, j_stop - 1 <= i),
            "Queries from T on and keys from S on do not exist, and no pair with them is visible: see section 5.",
        ),
        Mistake(
            "a tile is skipped as soon as its first query does not see it",
            lambda i, i_stop, j, j_stop, T, S: _word(j > i, j_stop - 1 <= i and i_stop <= T and j_stop <= S),
            "The last query of the tile sees the most keys: see section 5.",
        ),
        Mistake(
            "a tile is called full if only its last query sees every key",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j > min(i_stop, T) - 1, j_stop <= i_stop and i_stop <= T and j_stop <= S
            ),
            "The first query of the tile sees the fewest keys: see section 5.",
        ),
        Mistake(
            "a tile that sticks out past the end is called skipped",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j > min(i_stop, T) - 1 or i_stop > T or j_stop > S, j_stop - 1 <= i
            ),
            "It holds at least one real query and one real key, so look at those: see section 5.",
        ),
        Mistake(
            "k_stop is compared as if it belonged to the tile, so that tiles just below the diagonal are not full",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j > min(i_stop, T) - 1, j_stop <= i and i_stop <= T and j_stop <= S
            ),
            "The last key of the tile is k_stop - 1: see section 5.",
        ),
        Mistake(
            "q_stop is compared as if it belonged to the tile, so that tiles just above the diagonal are not skipped",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j > min(i_stop, T), j_stop - 1 <= i and i_stop <= T and j_stop <= S
            ),
            "The last query of the tile is q_stop - 1: see section 5.",
        ),
        Mistake(
            "only queries past T are looked at, not keys past S",
            lambda i, i_stop, j, j_stop, T, S: _word(j > min(i_stop, T) - 1, j_stop - 1 <= i and i_stop <= T),
            "Keys from S on do not exist either, so a tile that holds some is at most partial: see section 5.",
        ),
        Mistake(
            "only keys past S are looked at, not queries past T",
            lambda i, i_stop, j, j_stop, T, S: _word(j > min(i_stop, T) - 1, j_stop - 1 <= i and j_stop <= S),
            "Queries from T on do not exist either, so a tile that holds some is at most partial: see section 5.",
        ),
        Mistake(
            "a tile that reaches the end exactly is taken to stick out",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j > min(i_stop, T) - 1, j_stop - 1 <= i and i_stop < T and j_stop < S
            ),
            "q_stop = T and k_stop = S are still inside: compare with <=.",
        ),
        Mistake(
            "a tile counts as full where only its first key is visible to its first query",
            lambda i, i_stop, j, j_stop, T, S: _word(j > min(i_stop, T) - 1, j <= i and i_stop <= T and j_stop <= S),
            "The last key of the tile, k_stop - 1, is the hardest to see: see section 5.",
        ),
        Mistake(
            "a tile is skipped as soon as its last query misses the last key",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j_stop - 1 > min(i_stop, T) - 1, j_stop - 1 <= i and i_stop <= T and j_stop <= S
            ),
            "The first key of the tile, k_start, is the easiest to see: see section 5.",
        ),
        Mistake(
            "the mask is not causal: only what sticks out past the end is looked at",
            lambda i, i_stop, j, j_stop, T, S: _word(False, i_stop <= T and j_stop <= S),
            "A query sees itself and what came before, j ≤ i: see section 5.",
        ),
        Mistake(
            "a tile is skipped although its last query sees its first key, which stands at the same position",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j >= min(i_stop, T) - 1, j_stop - 1 <= i and i_stop <= T and j_stop <= S
            ),
            "Causal means j ≤ i, the diagonal included: see section 5.",
        ),
        Mistake(
            "the diagonal ends at the lower right corner, as if query T - 1 stood beside key S - 1",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j > min(i_stop, T) - 1 + S - T, j_stop - 1 <= i + S - T and i_stop <= T and j_stop <= S
            ),
            "Query i sees the keys j ≤ i, whatever S and T are: see section 5.",
        ),
        Mistake(
            "no tile is called partial",
            lambda i, i_stop, j, j_stop, T, S: _word(j > min(i_stop, T) - 1, True),
            "A tile of which some pairs are visible is neither full nor skipped: see section 5.",
        ),
        Mistake(
            "no tile is called skipped",
            lambda i, i_stop, j, j_stop, T, S: _word(False, j_stop - 1 <= i and i_stop <= T and j_stop <= S),
            "Where the last query does not see the first key, no pair is visible: see section 5.",
        ),
        Mistake(
            "no tile is called full",
            lambda i, i_stop, j, j_stop, T, S: _word(j > min(i_stop, T) - 1, False),
            "Where the first query sees the last key, every pair is visible: see section 5.",
        ),
        Mistake(
            "full and skipped are exchanged",
            lambda i, i_stop, j, j_stop, T, S: {"full": "skipped", "skipped": "full"}.get(
                _right_kind(i, i_stop, j, j_stop, T, S), "partial"
            ),
            "Full: every pair is visible. Skipped: none is. See the text of the exercise.",
        ),
        Mistake(
            "a query is not allowed to see its own position",
            lambda i, i_stop, j, j_stop, T, S: _word(
                j >= min(i_stop, T) - 1, j_stop - 1 < i and i_stop <= T and j_stop <= S
            ),
            "Causal means j ≤ i, the diagonal included: see section 5.",
        ),
        Mistake(
            "the mask is upside down: keys that come later are the visible ones",
            lambda i, i_stop, j, j_stop, T, S: tile_kind(range(i, i_stop), range(j, j_stop), Band(left=0), T, S),
            "A query sees itself and what came before, j ≤ i: see section 5.",
        ),
    ),
)


# 3.3


class _WatchedMemory(SlowMemory):
    """Keeps a copy of out at the moment when the second key tile is first asked for. queries: most of q in one load."""

    snapshot, queries = None, 0

    def load(self, name, start, stop):
        if name == "k" and start > 0 and self.snapshot is None:
            self.snapshot = self.arrays["out"].copy()
        rows = super().load(name, start, stop)
        if name == "q":
            self.queries = max(self.queries, len(rows))
        return rows


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


def _expected_on_memory(q, k, v, scale, block_q, block_k):
    (T, H), S = q.shape, len(k)
    first, _ = _oracle(q, k[:block_k], v[:block_k], scale)
    visits = -(-S // block_k)
    elements = 2 * S * H + visits * (3 * T * H + 4 * T) + T * H + 2 * T
    out, lse = _oracle(q, k, v, scale)
    m = (scale * (q @ k.T)).max(axis=1)
    return first, out, m, np.exp(lse - m), 8 * elements, min(block_q, T)


def _key_outer(
    memory,
    scale,
    block_q,
    block_k,
    *,
    combine=None,
    rescale_l=True,
    store=("out", "m", "l"),
    k_inside=False,
    v_inside=False,
    swapped=False,
    whole_tiles_only=False,
    whole_query_tiles_only=False,
    exp=np.exp,
    new_maximum=lambda m, s: np.maximum(m, s.max(axis=1)),
    alpha_of=lambda m, m_new: np.exp(m - m_new),
    reference=lambda m, m_new, s: m_new,
    scaled=lambda scale, H: scale,
):
    """combine(out, acc_new, alpha, l, l_new) returns the out to store; store: the arrays that are stored."""
    (T, H), S = memory.arrays["q"].shape, len(memory.arrays["k"])
    if whole_tiles_only:
        S = S // block_k * block_k
    if whole_query_tiles_only:
        T = T // block_q * block_q
    if combine is None:
        combine = _normalised
    pairs = [(i, j) for j in range(0, S, block_k) for i in range(0, T, block_q)]
    loaded = None
    for q_start, k_start in sorted(pairs) if swapped else pairs:
        if k_inside or swapped or loaded != k_start:
            k, v = (memory.load(name, k_start, k_start + block_k) for name in "kv")
        elif v_inside:
            v = memory.load("v", k_start, k_start + block_k)
        loaded = k_start
        q, m, l, out = (memory.load(name, q_start, q_start + block_q) for name in ("q", "m", "l", "out"))
        s = scaled(scale, H) * (q @ k.T)
        m_new = new_maximum(m, s)
        alpha = alpha_of(m, m_new)
        p = exp(s - reference(m, m_new, s)[:, None])
        l_new = (alpha if rescale_l else 1) * l + p.sum(axis=1)
        columns = (column[:, None] for column in (alpha, l, l_new))
        new = {"out": combine(out, p @ v, *columns), "m": m_new, "l": l_new}
        for name in store:
            memory.store(name, q_start, new[name])


def _normalised(out, new, alpha, l, l_new):
    return (l * alpha * out + new) / l_new


def _divide_at_the_end(memory, scale, block_q, block_k):
    _key_outer(memory, scale, block_q, block_k, combine=lambda out, new, alpha, l, l_new: alpha * out + new)
    for q_start in range(0, len(memory.arrays["q"]), block_q):
        out, l = (memory.load(name, q_start, q_start + block_q) for name in ("out", "l"))
        memory.store("out", q_start, out / l[:, None])


def _past_the_memory(names):
    """The right loops, but the arrays with these names are read and written without load and store."""

    class Half:
        def __init__(self, memory):
            self.memory, self.arrays = memory, memory.arrays

        def load(self, name, start, stop):
            return self.arrays[name][start:stop] if name in names else self.memory.load(name, start, stop)

        def store(self, name, start, rows):
            if name in names:
                self.arrays[name][start : start + len(rows)] = rows
            else:
                self.memory.store(name, start, rows)

    return lambda memory, *arguments: _key_outer(Half(memory), *arguments)


def _state_on_chip(memory, scale, block_q, block_k):
    """The order of 3.1, through memory: each query tile is finished before the next."""
    T, S = len(memory.arrays["q"]), len(memory.arrays["k"])
    for q_start in range(0, T, block_q):
        q = memory.load("q", q_start, q_start + block_q)
        m, l, acc = np.full(len(q), -np.inf), 0.0, 0.0
        for k_start in range(0, S, block_k):
            k, v = (memory.load(name, k_start, k_start + block_k) for name in "kv")
            s = scale * (q @ k.T)
            m_new = np.maximum(m, s.max(axis=1))
            alpha, p = np.exp(m - m_new), np.exp(s - m_new[:, None])
            m, l, acc = m_new, alpha * l + p.sum(axis=1), alpha[:, None] * acc + p @ v
        for name, rows in (("out", acc / l[:, None]), ("m", m), ("l", l)):
            memory.store(name, q_start, rows)


def _visit(**options):
    return lambda *arguments: _key_outer(*arguments, **options)


KEY_OUTER = Exercise(
    number="3.3",
    title="Key tiles outside",
    outputs=("out after the first key tile", "out", "m", "l", "bytes moved", "queries loaded at once"),
    cases=_attention_cases,
    run=_run_on_memory,
    expected=_expected_on_memory,
    tried="out after the first key tile, out, m, l and bytes, with T ≠ S, ragged tails and logits near ±1000",
    mistakes=(
        Mistake(
            "the old out is never multiplied by the old l",
            _visit(combine=lambda out, new, alpha, l, l_new: (alpha * out + new) / l_new),
            "out is stored divided by l, so l must come back before anything is added: see the equation of section 6.",
        ),
        Mistake(
            "only what the current tile adds is divided by the new l; the old out is multiplied by no l, or by the new",
            _visit(combine=lambda out, new, alpha, l, l_new: alpha * out + new / l_new),
            "Multiply out by the old l and alpha, add, and divide it all by the new l: see the equation of section 6.",
        ),
        Mistake(
            "out is stored without the division by l",
            _visit(combine=lambda out, new, alpha, l, l_new: alpha * out + new),
            "Whenever out is stored it must be normalised: divide by the new l, see the equation of section 6.",
        ),
        Mistake(
            "the old out is multiplied by the old l, and nothing is divided",
            _visit(combine=lambda out, new, alpha, l, l_new: l * alpha * out + new),
            "Whenever out is stored it must be normalised: divide by the new l, see the equation of section 6.",
        ),
        Mistake(
            "the division is by the old l",
            _visit(combine=lambda out, new, alpha, l, l_new: (l * alpha * out + new) / l),
            "Multiply by the old l, divide by the new one: see the equation of section 6.",
        ),
        Mistake(
            "the division is by the sum of the current tile alone",
            _visit(combine=lambda out, new, alpha, l, l_new: (l * alpha * out + new) / (l_new - alpha * l)),
            "The new l holds the earlier tiles too, times alpha: see the equation of section 6.",
        ),
        Mistake(
            "alpha is applied twice to the old out",
            _visit(combine=lambda out, new, alpha, l, l_new: (l * alpha**2 * out + new) / l_new),
            "The old out is multiplied by the old l and by alpha once: see the equation of section 6.",
        ),
        Mistake(
            "each key tile gets a softmax of its own and the results are added",
            _visit(combine=lambda out, new, alpha, l, l_new: out + new / (l_new - alpha * l)),
            "The tiles share one denominator: see the equation of section 6.",
        ),
        Mistake(
            "the old out is thrown away at each visit",
            _visit(combine=lambda out, new, alpha, l, l_new: new / l_new),
            "The keys of earlier tiles stay part of the result: see the equation of section 6.",
        ),
        Mistake(
            "the old out is not multiplied by alpha",
            _visit(combine=lambda out, new, alpha, l, l_new: (l * out + new) / l_new),
            "The old sum has the old maximum as its reference: see the equation of section 6.",
        ),
        Mistake(
            "m is not stored, so that every visit takes the state for empty",
            _visit(store=("out", "l")),
            "out, m and l belong together, and all three go back to memory: see section 6.",
        ),
        Mistake(
            "l is not stored, so that every visit begins with l = 0",
            _visit(store=("out", "m")),
            "out, m and l belong together, and all three go back to memory: see section 6.",
        ),
        Mistake(
            "only out is stored, and m and l are not",
            _visit(store=("out",)),
            "out, m and l belong together, and all three go back to memory: see section 6.",
        ),
        Mistake(
            "out is not stored",
            _visit(store=("m", "l")),
            "out, m and l belong together, and all three go back to memory: see section 6.",
        ),
        Mistake(
            "l is not multiplied by alpha",
            _visit(rescale_l=False),
            "The old l has the old maximum as its reference: see the equation of section 6.",
        ),
        Mistake(
            "alpha is not finite in the first visit: turned round, e^(m_new - m), no exponential, or from an m_new "
            "that is not the larger of the two",
            _visit(alpha_of=lambda m, m_new: np.exp(m_new - m)),
            "alpha = e^(m - m_new), with the larger m_new, is at most 1, and 0 in the first visit: see section 1.",
        ),
        Mistake(
            "m is the largest logit of the current tile only, not the largest so far",
            _visit(new_maximum=lambda m, s: s.max(axis=1)),
            "If the old maximum was far larger, alpha overflows: keep the larger of the two, as in section 1.",
        ),
        Mistake(
            "one maximum is taken over the whole tile instead of one for each query",
            _visit(new_maximum=lambda m, s: np.maximum(m, s.max())),
            "A query far below the others loses all its exponentials: m has one entry for each row, see section 1.",
        ),
        Mistake(
            "p is measured from the old maximum, which is minus infinity in the first visit",
            _visit(reference=lambda m, m_new, s: m),
            "Compute m_new first, then p = exp(s - m_new): see the equation of section 1.",
        ),
        Mistake(
            "p is measured from the tile's own maximum, in another unit than the sums that it is added to",
            _visit(reference=lambda m, m_new, s: s.max(axis=1)),
            "p = exp(s - m_new), with the largest logit so far: see the equation of section 1.",
        ),
        Mistake(
            "the exponentials are taken to base two",
            _visit(exp=np.exp2, alpha_of=lambda m, m_new: np.exp2(m - m_new)),
            "Nothing is in base two yet: use np.exp, as in section 1.",
        ),
        Mistake(
            "the logits are not scaled",
            _visit(scaled=lambda scale, H: 1.0),
            "s = scale * q k^T: see the equation of section 1.",
        ),
        Mistake(
            "the logits are divided by scale",
            _visit(scaled=lambda scale, H: 1 / scale),
            "The logits are multiplied by scale: see the equation of section 1.",
        ),
        Mistake(
            "scale is ignored and 1 / sqrt(H) is used instead",
            _visit(scaled=lambda scale, H: 1 / np.sqrt(H)),
            "scale is an argument, and need not be one over the square root of H.",
        ),
        Mistake(
            "the last, shorter key tile is left out",
            _visit(whole_tiles_only=True),
            "range(0, S, block_k) reaches the tail, S // block_k tiles do not: see section 4.",
        ),
        Mistake(
            "the last, shorter query tile is left out",
            _visit(whole_query_tiles_only=True),
            "range(0, T, block_q) reaches the tail, T // block_q tiles do not: see section 4.",
        ),
        Mistake(
            "the two block sizes are exchanged",
            lambda memory, scale, block_q, block_k: _key_outer(memory, scale, block_k, block_q),
            "block_q belongs to the queries and block_k to the keys: see section 2.",
        ),
        Mistake(
            "a key tile meets all queries at once, or one by one, instead of block_q at a time",
            lambda memory, scale, block_q, block_k: _key_outer(memory, scale, len(memory.arrays["q"]), block_k),
            "The numbers are right, but the inner loop goes over tiles of queries: see the picture of section 6.",
            variants=(lambda memory, scale, block_q, block_k: _key_outer(memory, scale, 1, block_k),),
        ),
        Mistake(
            "tiles are read from memory.arrays, past the counter: q, k and v",
            _past_the_memory("qkv"),
            "All data comes and goes by memory.load and memory.store, which count: see section 3.",
        ),
        Mistake(
            "tiles are read and written in memory.arrays, past the counter: out, m and l",
            _past_the_memory(("out", "m", "l")),
            "All data comes and goes by memory.load and memory.store, which count: see section 3.",
        ),
        Mistake(
            "out is kept unnormalised and divided in a pass of its own at the end",
            _divide_at_the_end,
            "The result is right, but the task is to store a normalised out at every visit: see section 6.",
        ),
        Mistake(
            "k and v are loaded again for each query tile",
            _visit(k_inside=True),
            "Load a key tile once, before the inner loop: see the picture of section 6.",
        ),
        Mistake(
            "v is loaded again for each query tile",
            _visit(v_inside=True),
            "Load the tiles of k and of v once, before the inner loop: see the picture of section 6.",
        ),
        Mistake(
            "each query tile is finished before the next, with its state on chip, as in exercise 3.1",
            _state_on_chip,
            "Here each key tile meets every query tile before the next key tile comes: see the picture of section 6.",
        ),
        Mistake(
            "the loop over query tiles is outside",
            _visit(swapped=True),
            "Here each key tile meets every query tile before the next key tile comes: see the picture of section 6.",
        ),
    ),
)


# 3.4


def _table(T, S, H, itemsize, block_q, block_k):
    return {
        "naive": cost.naive_bytes(T, S, H, itemsize),
        "query-outer": cost.query_outer_bytes(T, S, H, itemsize, block_q, block_k),
        "key-outer": cost.key_outer_bytes(T, S, H, itemsize, block_q, block_k),
    }


def _wrong_table(naive=None, query_outer=None, key_outer=None):
    """The right table with some entries computed by others."""

    def answer(*arguments):
        changed = {"naive": naive, "query-outer": query_outer, "key-outer": key_outer}
        return _table(*arguments) | {name: wrong(*arguments) for name, wrong in changed.items() if wrong}

    return answer


def _tiles(length, block):
    return -(-length // block)


def _run_without_cost(answer, *arguments):
    result, name = called(cost, lambda: answer(*arguments))
    if name:
        raise Complaint(f"`{name}` of helpers.measure.cost was called; here the formulas are yours to write.")
    return result


def _table_cases():
    settings = [
        (2, 3, 1, 2, 1, 2),
        (8, 16, 4, 4, 4, 4),
        (10, 13, 8, 2, 4, 5),
        (1000, 700, 64, 2, 128, 32),
        (4096, 4096, 128, 2, 128, 128),
    ]
    return [
        Case(f"T={T}, S={S}, H={H}, {e} bytes, block_q={block_q}, block_k={block_k}", (T, S, H, e, block_q, block_k))
        for T, S, H, e, block_q, block_k in settings
    ]


TRAFFIC_TABLE = Exercise(
    number="3.4",
    title="The traffic table",
    outputs=("bytes",),
    cases=_table_cases,
    run=_run_without_cost,
    expected=_table,
    tolerance=1e-9,
    tried="T ≠ S, ragged tails, unequal blocks, 2 and 4 bytes, up to T = S = 4096",
    mistakes=(
        Mistake(
            "one of the four trips of the T × S tables is forgotten, for example reading the logits for the softmax",
            _wrong_table(naive=lambda T, S, H, e, bq, bk: e * (3 * T * S + 2 * T * H + 2 * S * H)),
            "The logits are written and read, and so are the weights: see the three steps in section 7.",
        ),
        Mistake(
            "q, k, v and out of naive attention are forgotten",
            _wrong_table(naive=lambda T, S, H, e, bq, bk: e * 4 * T * S),
            "The inputs are read and the output is written besides the tables: see the three steps in section 7.",
        ),
        Mistake(
            "the two T × S tables of naive attention have 4 bytes an entry",
            _wrong_table(naive=lambda T, S, H, e, bq, bk: 16 * T * S + e * (2 * T * H + 2 * S * H)),
            "Here the tables have `itemsize` bytes an entry: see the text of the exercise.",
        ),
        Mistake(
            "elements are counted, not bytes",
            lambda T, S, H, e, bq, bk: {
                "naive": 4 * T * S + 2 * T * H + 2 * S * H,
                "query-outer": 2 * T * H + 2 * S * H * _tiles(T, bq) + T,
                "key-outer": 2 * S * H + T * H + 2 * T + _tiles(S, bk) * (3 * T * H + 4 * T),
            },
            "Multiply by `itemsize`, and the statistics by 4: see the text of the exercise.",
        ),
        Mistake(
            "`itemsize` is forgotten, and the statistics have 4 bytes",
            lambda T, S, H, e, bq, bk: _table(T, S, H, 1, bq, bk),
            "Multiply the elements of q, k, v, out and the tables by `itemsize`: see the text of the exercise.",
        ),
        Mistake(
            "query-outer reads k again for each query tile, and v not",
            _wrong_table(query_outer=lambda T, S, H, e, bq, bk: e * (2 * T * H + S * H * _tiles(T, bq)) + 4 * T),
            "A key tile brings its values along, so both are read again: see section 3.",
        ),
        Mistake(
            "a tile is added also where the block size divides the length",
            _wrong_table(
                query_outer=lambda T, S, H, e, bq, bk: e * (2 * T * H + 2 * S * H * (T // bq + 1)) + 4 * T,
                key_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * S * H + T * H) + 8 * T + (S // bk + 1) * (e * 3 * T * H + 16 * T)
                ),
            ),
            "Round up: T // block_q + 1 is one too many where there is no tail, -(-T // block_q) is right.",
        ),
        Mistake(
            "the number of tiles is not rounded to a whole number",
            _wrong_table(
                query_outer=lambda T, S, H, e, bq, bk: e * (2 * T * H + 2 * S * H * T / bq) + 4 * T,
                key_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * S * H + T * H) + 8 * T + S / bk * (e * 3 * T * H + 16 * T)
                ),
            ),
            "A shorter last tile costs a turn like the others, so round up: see section 4.",
        ),
        Mistake(
            "T and S are exchanged",
            lambda T, S, H, e, bq, bk: _table(S, T, H, e, bq, bk),
            "q and out have T rows, k and v have S: see section 1.",
        ),
        Mistake(
            "T is taken for the number of keys too",
            lambda T, S, H, e, bq, bk: _table(T, T, H, e, bq, bk),
            "There are S keys: the tables have T rows and S columns, k and v have S rows, see section 1.",
        ),
        Mistake(
            "query-outer reads q again for each key tile",
            _wrong_table(
                query_outer=lambda T, S, H, e, bq, bk: (
                    _table(T, S, H, e, bq, bk)["query-outer"] + e * T * H * (_tiles(S, bk) - 1)
                )
            ),
            "With query tiles outside, a tile of q is loaded before the inner loop, once: see section 3.",
        ),
        Mistake(
            "query-outer counts key tiles, or key-outer query tiles",
            _wrong_table(
                query_outer=lambda T, S, H, e, bq, bk: e * (2 * T * H + 2 * S * H * _tiles(S, bk)) + 4 * T,
                key_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * S * H + T * H) + 8 * T + _tiles(T, bq) * (e * 3 * T * H + 16 * T)
                ),
            ),
            "What the inner loop walks over is read again for each tile outside: see sections 3 and 6.",
        ),
        Mistake(
            "every length is rounded up to whole tiles",
            lambda T, S, H, e, bq, bk: _table(_tiles(T, bq) * bq, _tiles(S, bk) * bk, H, e, bq, bk),
            "The memory hands out the rows that are there, so only the number of tiles is rounded up: see section 4.",
        ),
        Mistake(
            "each of the two T × S tables is counted once",
            _wrong_table(naive=lambda T, S, H, e, bq, bk: e * (2 * T * S + 2 * T * H + 2 * S * H)),
            "What one step writes the next one reads back, so each table moves twice: see section 7.",
        ),
        Mistake(
            "the last, shorter key tile is charged like a whole one",
            _wrong_table(
                query_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * T * H + 2 * H * bk * _tiles(S, bk) * _tiles(T, bq)) + 4 * T
                )
            ),
            "The memory hands out the rows that are there, S of them for each query tile: see section 4.",
        ),
        Mistake(
            "lse is forgotten",
            _wrong_table(query_outer=lambda T, S, H, e, bq, bk: e * (2 * T * H + 2 * S * H * _tiles(T, bq))),
            "Query-outer writes one float32 for each query besides out: see its bill in section 3.",
        ),
        Mistake(
            "lse is counted in the element size of q instead of 4 bytes",
            _wrong_table(query_outer=lambda T, S, H, e, bq, bk: e * (2 * T * H + 2 * S * H * _tiles(T, bq) + T)),
            "Statistics are float32 whatever q is: see the text of the exercise.",
        ),
        Mistake(
            "query-outer reads k and v only once",
            _wrong_table(query_outer=lambda T, S, H, e, bq, bk: e * (2 * T * H + 2 * S * H) + 4 * T),
            "Every query tile reads all of k and v: see section 3.",
        ),
        Mistake(
            "the number of tiles is rounded down",
            _wrong_table(
                query_outer=lambda T, S, H, e, bq, bk: e * (2 * T * H + 2 * S * H * (T // bq)) + 4 * T,
                key_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * S * H + T * H) + 8 * T + (S // bk) * (e * 3 * T * H + 16 * T)
                ),
            ),
            "A shorter last tile is a tile too, so round up: see section 4.",
        ),
        Mistake(
            "the two block sizes are swapped",
            lambda T, S, H, e, bq, bk: _table(T, S, H, e, bk, bq),
            "What is read again is what the inner loop walks over, once for each tile outside: see sections 3 and 6.",
        ),
        Mistake(
            "key-outer does not read out back before it updates it",
            _wrong_table(
                key_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * S * H + T * H) + 8 * T + _tiles(S, bk) * (e * 2 * T * H + 16 * T)
                )
            ),
            "At each visit q, out, m and l come in, and out, m and l go back: see section 6.",
        ),
        Mistake(
            "key-outer moves no m and l",
            _wrong_table(key_outer=lambda T, S, H, e, bq, bk: e * (2 * S * H + T * H) + _tiles(S, bk) * e * 3 * T * H),
            "m and l travel with out, four bytes each, there and back: see section 6.",
        ),
        Mistake(
            "m and l are filled, and do not travel in the visits of key-outer",
            _wrong_table(
                key_outer=lambda T, S, H, e, bq, bk: e * (2 * S * H + T * H) + 8 * T + _tiles(S, bk) * e * 3 * T * H
            ),
            "m and l travel with out, four bytes each, there and back: see section 6.",
        ),
        Mistake(
            "m and l of key-outer travel one way only, or only one of the two travels",
            _wrong_table(
                key_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * S * H + T * H) + 8 * T + _tiles(S, bk) * (e * 3 * T * H + 8 * T)
                )
            ),
            "m and l are both read and written at each visit, four bytes each: see section 6.",
        ),
        Mistake(
            "m and l are counted in the element size of q instead of 4 bytes",
            _wrong_table(
                key_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * S * H + T * H + 2 * T) + _tiles(S, bk) * e * (3 * T * H + 4 * T)
                )
            ),
            "Statistics are float32 whatever q is: see the text of the exercise.",
        ),
        Mistake(
            "key-outer reads q only once",
            _wrong_table(
                key_outer=lambda T, S, H, e, bq, bk: (
                    e * (2 * S * H + 2 * T * H) + 8 * T + _tiles(S, bk) * (e * 2 * T * H + 16 * T)
                )
            ),
            "Each key tile meets every query tile, so q is read again for each: see section 6.",
        ),
        Mistake(
            "key-outer reads k and v again for each query tile",
            _wrong_table(
                key_outer=lambda T, S, H, e, bq, bk: (
                    _table(T, S, H, e, bq, bk)["key-outer"] + e * 2 * S * H * (_tiles(T, bq) - 1)
                )
            ),
            "With key tiles outside, k and v are read once: see section 6.",
        ),
        Mistake(
            "the filling of out, m and l before key-outer starts is forgotten",
            _wrong_table(key_outer=lambda T, S, H, e, bq, bk: e * 2 * S * H + _tiles(S, bk) * (e * 3 * T * H + 16 * T)),
            "Someone must write the zeros and the minus infinity first: see the text of the exercise.",
        ),
    ),
)


# 3.5 and 3.6

POWERS = (16, 32, 64, 128, 256, 512, 1024)
LARGE_POWERS = (64, 128, 256, 512, 1024)


def _needed(block_q, block_k, H, itemsize):
    """Bytes on chip: tiles of q, k, v and the logits between them."""
    return itemsize * (block_q * H + 2 * block_k * H + block_q * block_k)


def _pairs(sizes, fits):
    return [(block_q, block_k) for block_q in sizes for block_k in sizes if fits(block_q, block_k)]


def _fitting(H, itemsize, budget, sizes):
    return _pairs(sizes, lambda *blocks: _needed(*blocks, H, itemsize) <= budget)


def _as_blocks(result):
    """The result as a pair of integers, or None."""
    if isinstance(result, np.ndarray) and result.ndim:
        result = tuple(result)
    if not isinstance(result, tuple) or len(result) != 2:
        return None
    if not all(isinstance(size, np.integer | np.floating) and float(size).is_integer() for size in result):
        return None
    return int(result[0]), int(result[1])


def _cannot_be_used(result, H, itemsize, budget, sizes):
    """Why a result is no pair of block sizes that fits, or None."""
    blocks = _as_blocks(result)
    if blocks is None:
        return "expected two integers (block_q, block_k)"
    for name, size in zip(("block_q", "block_k"), blocks, strict=True):
        if size not in sizes:
            return f"{name} = {str(size)[:20]} is not one of the allowed sizes"
    needed = _needed(*blocks, H, itemsize)
    if needed > budget:
        return f"block_q, block_k = {blocks} need {needed} bytes on chip, the budget is {budget}"
    return None


def _judge_largest(result, case):
    H, itemsize, budget, sizes = case.arguments
    complaint = _cannot_be_used(result, H, itemsize, budget, sizes)
    if complaint:
        return complaint
    block_q, block_k = _as_blocks(result)
    best = max(q * k for q, k in _fitting(H, itemsize, budget, sizes))
    if block_q * block_k < best:
        return (
            f"block_q, block_k = {block_q, block_k} fit, and their product is {block_q * block_k}; "
            f"other sizes that fit reach {best}"
        )
    return None


def _wrong_choice(name, advice, score, *, needed=_needed, among=lambda block_q, block_k: True):
    """The mistake of taking the best score(block_q, block_k, *arguments) of the pairs that seem to fit.

    Of several best pairs it may take the first, the last, the largest or the smallest.
    """

    def choosing(pick):
        def answer(*arguments):
            *_, H, itemsize, budget, sizes = arguments
            pairs = _pairs(sizes, lambda *blocks: needed(*blocks, H, itemsize) <= budget and among(*blocks))
            scores = [score(*pair, *arguments) for pair in pairs]
            return pick([pair for pair, mine in zip(pairs, scores, strict=True) if mine == max(scores)])

        return answer

    picks = (lambda pairs: pairs[0], lambda pairs: pairs[-1], max, min)
    first, *others = map(choosing, picks[:2] if score is _any else picks)
    return Mistake(name, first, advice, tuple(others))


def _any(*_):
    return 0


def _wrong_budgets(score, queries_twice="the tile of queries is counted twice and that of keys once"):
    """The mistakes of either exercise in what fits."""
    return (
        _wrong_choice(
            "the tile of v is left out of the budget",
            "A key tile brings its values along, so it counts twice: see the sum in section 8.",
            score,
            needed=lambda q, k, H, e: e * (q * H + k * H + q * k),
        ),
        _wrong_choice(
            "the tile of weights is left out of the budget",
            "block_q times block_k weights p may pass through shared memory as well: see the first sum in section 8.",
            score,
            needed=lambda q, k, H, e: e * (q * H + 2 * k * H),
        ),
        _wrong_choice(
            "elements are compared with a budget in bytes",
            "Multiply the number of elements by the bytes of one: see the sum in section 8.",
            score,
            needed=lambda q, k, H, e: _needed(q, k, H, 1),
        ),
        _wrong_choice(
            "a tile that fills the budget exactly is turned away",
            "Exactly full still fits: see the ≤ in section 8.",
            score,
            needed=lambda q, k, H, e: _needed(q, k, H, e) + 1,
        ),
        _wrong_choice(
            queries_twice,
            "block_q comes first, and it is keys that bring values along: see the sum in section 8.",
            score,
            needed=lambda q, k, H, e: e * (2 * q * H + k * H + q * k),
        ),
        _wrong_choice(
            "every tile is counted twice, that of queries as well, or the accumulator is counted in the same budget",
            "Queries come alone, and the accumulator lies in registers: see the sums in section 8.",
            score,
            needed=lambda q, k, H, e: e * (2 * q * H + 2 * k * H + q * k),
        ),
        _wrong_choice(
            "the weights p are counted with 4 bytes an entry",
            "In this budget all tiles have `itemsize` bytes an element: see the first sum in section 8.",
            score,
            needed=lambda q, k, H, e: e * (q * H + 2 * k * H) + 4 * q * k,
        ),
        _wrong_choice(
            "the registers limit the choice as well",
            "Here the budget is the first of the two alone: see the text of exercise 3.5.",
            score,
            needed=lambda q, k, H, e: _needed(q, k, H, e) if 4 * (q * k + q * H) < 256 * KIB else math.inf,
        ),
        _wrong_choice(
            "the budget is ignored",
            "Only sizes that fit count: see the sum in section 8.",
            score,
            needed=lambda *_: 0,
        ),
        _wrong_choice(
            "only square tiles are tried",
            "block_q and block_k may differ: see the map in section 8.",
            score,
            among=lambda q, k: q == k,
        ),
    )


def _budget_cases():
    settings = [
        (2, 2, 64, (2, 4), "the case worked by hand"),
        (2, 2, 80, (2, 4), "the same with 80 bytes, which all four pairs fit in"),
        (64, 2, 128 * KIB, POWERS, "H=64, 2 bytes, 128 KiB"),
        (64, 2, 164 * KIB, POWERS, "H=64, 2 bytes, 164 KiB"),
        (128, 2, 164 * KIB, POWERS, "H=128, 2 bytes, 164 KiB"),
        (128, 2, 100 * KIB, POWERS, "H=128, 2 bytes, 100 KiB"),
        (64, 4, 96 * KIB, POWERS, "H=64, 4 bytes, 96 KiB"),
        (64, 2, 48 * KIB, POWERS, "H=64, 2 bytes, 48 KiB, which one pair fills exactly"),
        (64, 2, 100 * KIB, (512, 16, 128, 32, 64, 256), "H=64, 2 bytes, 100 KiB, sizes in no order"),
        (64, 2, 227 * KIB, POWERS, "H=64, 2 bytes, 227 KiB"),
        (32, 2, 20 * KIB, (24, 40, 56, 88, 120), "H=32, 2 bytes, 20 KiB, other sizes"),
        (16, 4, 6 * KIB, (8, 16, 24, 48), "H=16, 4 bytes, 6 KiB, small sizes"),
        (256, 2, 228 * KIB, POWERS, "H=256, 2 bytes, 228 KiB"),
    ]
    return [Case(label, arguments) for *arguments, label in settings for arguments in [tuple(arguments)]]


LARGEST_BLOCKS = Exercise(
    number="3.5",
    title="The largest tile that fits",
    outputs=("block_q, block_k",),
    cases=_budget_cases,
    judge=_judge_largest,
    tried="H from 2 to 256, 2 and 4 bytes, up to 228 KiB, sizes in any order; of several largest tiles any one counts",
    mistakes=(
        *_wrong_budgets(
            lambda q, k, *_: q * k,
            "the tile of queries is counted twice and that of keys once, or the pair is returned the other way round",
        ),
        _wrong_choice(
            "only pairs of two different sizes are tried",
            "block_q and block_k may be equal: try all pairs, see the map in section 8.",
            lambda q, k, *_: q * k,
            among=lambda q, k: q != k,
        ),
        _wrong_choice(
            "only pairs with block_q ≤ block_k are tried",
            "A tile of queries may be the larger one: try all pairs, see the map in section 8.",
            lambda q, k, *_: q * k,
            among=lambda q, k: q <= k,
        ),
        _wrong_choice(
            "the largest block_q is taken first, and then the largest block_k that still fits",
            "It is the product that shall be large: see the text of the exercise.",
            lambda q, k, *_: (q, k),
        ),
        _wrong_choice(
            "the largest block_k is taken first, and then the largest block_q that still fits",
            "It is the product that shall be large: see the text of the exercise.",
            lambda q, k, *_: (k, q),
        ),
        _wrong_choice(
            "block_q + block_k is made large instead of the product",
            "The tile of logits has block_q times block_k entries: see section 8.",
            lambda q, k, *_: q + k,
        ),
        _wrong_choice(
            "as many bytes as possible are used, instead of the largest product",
            "It is the product that shall be large: see the text of the exercise.",
            lambda q, k, H, itemsize, *_: _needed(q, k, H, itemsize),
        ),
        _wrong_choice(
            "the smallest product is taken",
            "It is the product that shall be large: see the text of the exercise.",
            lambda q, k, *_: -q * k,
        ),
        _wrong_choice(
            "some pair that fits is returned, such as the first or the last",
            "Keep the best of all that fit: see the first hint.",
            _any,
        ),
    ),
)


def _judge_least_traffic(result, case):
    T, S, H, itemsize, budget, sizes = case.arguments
    complaint = _cannot_be_used(result, H, itemsize, budget, sizes)
    if complaint:
        return complaint
    block_q, block_k = _as_blocks(result)
    mine = cost.query_outer_bytes(T, S, H, itemsize, block_q, block_k)
    best = min(cost.query_outer_bytes(T, S, H, itemsize, *pair) for pair in _fitting(H, itemsize, budget, sizes))
    if mine > best:
        return f"block_q, block_k = {block_q, block_k} fit, and move {mine} bytes; other sizes that fit move {best}"
    return None


def _by_traffic(q, k, T, S, H, itemsize, *_):
    return -cost.query_outer_bytes(T, S, H, itemsize, q, k)


def _traffic_cases():
    settings = [
        (4, 4, 2, 2, 64, (2, 4), "the case worked by hand"),
        (1000, 700, 64, 2, 164 * KIB, LARGE_POWERS, "T=1000, S=700, H=64, 2 bytes, 164 KiB"),
        (4096, 4096, 64, 2, 164 * KIB, LARGE_POWERS, "T=S=4096, H=64, 2 bytes, 164 KiB"),
        (4096, 4096, 128, 2, 164 * KIB, LARGE_POWERS, "T=S=4096, H=128, 2 bytes, 164 KiB"),
        (5000, 300, 64, 2, 228 * KIB, POWERS, "T=5000, S=300, H=64, 2 bytes, 228 KiB"),
        (3000, 9000, 64, 4, 164 * KIB, POWERS, "T=3000, S=9000, H=64, 4 bytes, 164 KiB"),
        (4096, 4096, 64, 2, 164 * KIB, POWERS, "T=S=4096, H=64, 2 bytes, 164 KiB, which two pairs fill exactly"),
        (4096, 4096, 64, 2, 100 * KIB, (128, 16, 512, 32, 64, 256), "T=S=4096, H=64, 100 KiB, sizes in no order"),
        (10, 500, 64, 2, 100 * KIB, (16, 32, 64), "T=10, below all sizes"),
        (500, 10, 64, 2, 40 * KIB, (16, 32, 64, 128), "T=500, S=10, 40 KiB"),
        (96, 500, 64, 2, 100 * KIB, (16, 48, 64, 96), "T=96, S=500, H=64, 100 KiB"),
        (4096, 4096, 64, 2, 150_000, POWERS[:-1], "T=S=4096, H=64, 150,000 bytes"),
        (1000, 1000, 32, 2, 20 * KIB, (24, 40, 56, 88, 120), "T=S=1000, H=32, 20 KiB, other sizes"),
        (1000, 1000, 32, 2, 17 * KIB, (40, 56, 60), "T=S=1000, H=32, 17 KiB, sizes close to each other"),
    ]
    return [Case(label, arguments) for *arguments, label in settings for arguments in [tuple(arguments)]]


LEAST_TRAFFIC = Exercise(
    number="3.6",
    title="The tile that moves the fewest bytes",
    outputs=("block_q, block_k",),
    cases=_traffic_cases,
    judge=_judge_least_traffic,
    tried="T ≠ S, H from 2 to 128, 2 and 4 bytes, up to 228 KiB, sizes in any order; of several best any one counts",
    mistakes=(
        *_wrong_budgets(_by_traffic),
        _wrong_choice(
            "the pair is returned the other way round",
            "block_q comes first: see the text of the exercise.",
            lambda q, k, *others: _by_traffic(k, q, *others),
            needed=lambda q, k, H, e: _needed(k, q, H, e),
        ),
        _wrong_choice(
            "the largest tile is taken for the one with the least traffic",
            "Query-outer traffic does not depend on the product of the block sizes: see section 7.",
            lambda q, k, *_: q * k,
        ),
        _wrong_choice(
            "block_k is made as large as it can be",
            "k and v are read once for each query tile, however they are cut: see section 7.",
            lambda q, k, *_: k,
        ),
        _wrong_choice(
            "the bytes of key-outer are made small",
            "It is query-outer that is asked for: see the text of the exercise.",
            lambda q, k, T, S, *_: -_tiles(S, k),
        ),
        _wrong_choice(
            "the two block sizes are exchanged in the formula",
            "block_q comes before block_k: see the text of the exercise.",
            lambda q, k, T, *_: -_tiles(T, k),
        ),
        _wrong_choice(
            "T and S are exchanged in the formula",
            "The number of query tiles is T / block_q, rounded up: see the formula of section 7.",
            lambda q, k, T, S, H, itemsize, *_: -cost.query_outer_bytes(S, T, H, itemsize, q, k),
        ),
        _wrong_choice(
            "the number of query tiles is rounded down",
            "A shorter last tile is a tile too, so round up: see section 4.",
            lambda q, k, T, *_: -(T // q),
        ),
        _wrong_choice(
            "block_q + block_k is made large",
            "Query-outer traffic depends on block_q alone: see section 8.",
            lambda q, k, *_: q + k,
        ),
        _wrong_choice(
            "the number of tiles of logits is made small",
            "What counts is how often k and v are read, once for each query tile: see section 7.",
            lambda q, k, T, S, *_: -_tiles(T, q) * _tiles(S, k),
        ),
        _wrong_choice(
            "as many bytes on chip as possible are used",
            "It is the bytes that move that count: see the text of the exercise.",
            lambda q, k, T, S, H, itemsize, *_: _needed(q, k, H, itemsize),
        ),
        _wrong_choice(
            "as few bytes on chip as possible are used",
            "It is the bytes that move that count: see the text of the exercise.",
            lambda q, k, T, S, H, itemsize, *_: -_needed(q, k, H, itemsize),
        ),
        _wrong_choice(
            "the most bytes are moved instead of the fewest: block_q is as small as it can be",
            "Each query tile reads all of k and v again, so fewer and larger ones are better: see section 7.",
            lambda q, k, *_: -q,
        ),
        _wrong_choice(
            "some pair that fits is returned, such as the first or the last",
            "Keep the best of all that fit: see the first hint.",
            _any,
        ),
    ),
)

EXERCISES = (QUERY_OUTER, CLASSIFY, KEY_OUTER, TRAFFIC_TABLE, LARGEST_BLOCKS, LEAST_TRAFFIC)
