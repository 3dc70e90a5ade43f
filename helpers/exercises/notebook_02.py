"""The exercises of notebook 02, what a state is, and the ways to choose a reference that it compares."""

import math

import numpy as np

from helpers.attention import online_softmax
from helpers.exercises.comparing import got
from helpers.exercises.exercise import Case, Complaint, Exercise
from helpers.exercises.oracles import even
from helpers.exercises.watched import without


def lse_by_tiles(s, block_k, choose, m):
    """lse of one row of logits in float32, tile by tile.

    m: the reference before the first tile. choose(m, tile): the next reference.
    """
    s, m, l = np.float32(s), np.float32(m), np.float32(0)
    for start in range(0, len(s), block_k):
        tile = s[start : start + block_k]
        m_new = np.float32(choose(m, tile))
        alpha = np.exp(m - m_new)
        p = np.exp(tile - m_new)
        l = alpha * l + p.sum()
        m = m_new
    return float(m + np.log(l))


RUNNING_MAX = {"choose": lambda m, tile: max(m, tile.max()), "m": -np.inf}
SHORTCUTS = {
    "no max": {"choose": lambda m, tile: 0.0, "m": 0.0},
    "m starts at 0": {"choose": lambda m, tile: max(m, tile.max()), "m": 0.0},
    "tile max": {"choose": lambda m, tile: tile.max(), "m": -np.inf},
}


def state_of(s, v):
    """(m, l, acc) by their definition. s: (…, keys), -inf where masked; v: (keys, H)."""
    m = s.max(axis=-1, initial=-np.inf)
    p = np.exp(s - np.where(m == -np.inf, 0, m)[..., None])
    return m, p.sum(axis=-1), p @ v


def _out_and_lse(s, v):
    """(out, lse), from the definition. No visible key gives 0 and -inf."""
    m, l, acc = state_of(s, v)
    empty = l == 0
    l = np.where(empty, 1, l)
    return acc / l[..., None], np.where(empty, -np.inf, m + np.log(l))


HAND_S = np.log([1.0, 3.0, 2.0, 8.0])
HAND_V = np.array([[1.0], [2.0], [3.0], [4.0]])
LEVELS = np.array([[-1000.0], [0.0], [1000.0]])


def update(m, l, acc, s, v):
    """The new (m, l, acc). m, l: numbers, acc: (H,); s: (block_k,), v: (block_k, H)."""
    m_new = max(m, s.max())
    alpha = np.exp(m - m_new)
    p = np.exp(s - m_new)
    return m_new, alpha * l + p.sum(), alpha * acc + p @ v


def _update_cases():
    random = np.random.default_rng(21)

    def case(label, before, block_k, H, s=None):
        s = random.standard_normal(before + block_k) if s is None else s
        v = random.standard_normal((before + block_k, H))
        return Case(f"{label}, block_k={block_k}, H={H}", (*state_of(s[:before], v[:before]), s[before:], v[before:]))

    return [
        Case("tile 2 of the hand case", (*state_of(HAND_S[:2], HAND_V[:2]), HAND_S[2:], HAND_V[2:])),
        case("the first tile of a row", 0, 3, 2),
        case("the first tile of a row, logits near -1000", 0, 4, 2, -1000 + np.arange(4.0)),
        case("3 keys before", 3, 2, 4),
        case("the largest logit in the middle of the tile", 5, 3, 2, np.array([1.0, 0, 2, -1, 1, 0, 6, 1])),
        case("logits near 1000", 6, 4, 3, even(1000 + 3 * random.standard_normal(10))),
        case("logits near -1000", 6, 4, 3, even(-1000 + 3 * random.standard_normal(10))),
        case("a rise from 0 to 1000", 3, 3, 2, np.array([0.0, 0.5, -1, 999.5, 1000, 998])),
    ]


UPDATE = Exercise(update, "The update", outputs=("m", "l", "acc"), cases=_update_cases).with_mistakes(
    ("p uses the old m", "s - m_new", "s - m",
     "The new exponentials must be in the new units, e^(s - m_new): see section 3."),
    ("acc is divided by l half-way", "alpha * acc + p @ v", "(alpha * acc + p @ v) / (alpha * l + p.sum())",
     "Divide once, after the last tile: see the common slip in section 4."),
)  # fmt: skip


def merge(a, b):
    """The merged (m, l, acc) of a and b, with shapes (rows,), (rows,) and (rows, H)."""
    (m_a, l_a, acc_a), (m_b, l_b, acc_b) = a, b
    m = np.maximum(m_a, m_b)
    alpha, beta = np.exp(m_a - m), np.exp(m_b - m)
    return m, alpha * l_a + beta * l_b, alpha[:, None] * acc_a + beta[:, None] * acc_b


def _two_parts():
    """(label, (s, v) of a, (s, v) of b), the logits and values of the keys of two parts."""
    random = np.random.default_rng(22)

    def case(label, rows, a, b, H, shift_a=0.0, shift_b=0.0, spread=1.0, hidden=False):
        s_a = even(spread * random.standard_normal((rows, a)) + shift_a)
        s_b = even(spread * random.standard_normal((rows, b)) + shift_b)
        if hidden:
            s_a[0] = s_b[1] = -np.inf
        v = random.standard_normal((a + b, H))
        return f"{label}, rows={rows}, H={H}", (s_a, v[:a]), (s_b, v[a:])

    hand_a, hand_b = (HAND_S[None, :2], HAND_V[:2]), (HAND_S[None, 2:], HAND_V[2:])
    return [
        ("the hand case", hand_a, hand_b),
        case("3 and 5 keys", 4, 3, 5, 2, spread=2.0),
        case("nothing and 4 keys", 3, 0, 4, 2),
        case("4 keys and nothing", 3, 4, 0, 2),
        case("larger logits in a", 5, 2, 7, 3, shift_a=4.0),
        case("larger logits in b", 5, 7, 2, 3, shift_b=4.0),
        case("one part far above the other", 3, 3, 2, 2, LEVELS, -LEVELS),
        case("logits near 1000", 2, 3, 4, 5, 1000.0, 1000.0, 3.0),
        case("logits near -1000", 2, 3, 4, 5, -1000.0, -1000.0, 3.0),
        case("rows near -1000, 0 and 1000", 3, 3, 2, 2, LEVELS, LEVELS, 3.0),
        case("nothing in row 0 of a and in row 1 of b", 3, 3, 4, 2, hidden=True),
        case("nothing in one row of each, logits near -1000", 3, 3, 4, 2, -1000.0, -1000.0, hidden=True),
    ]


MERGE = Exercise(
    merge, "Merge two states", outputs=("m", "l", "acc"), run=lambda *states: without(online_softmax, *states),
    cases=lambda: [Case(label, (state_of(*a), state_of(*b))) for label, a, b in _two_parts()],
).with_mistakes(
    ("the sums are added as they are", ("alpha * ", "beta * ", "alpha[:, None] * ", "beta[:, None] * "), ("",) * 4,
     "The two parts are in different units, e^m_a and e^m_b: see section 5."),
    ("acc is added as it is", ("alpha[:, None] * ", "beta[:, None] * "), ("", ""),
     "acc needs the same two factors as l: see section 5."),
    ("only a is rescaled", ("beta * ", "beta[:, None] * "), ("", ""),
     "Either part may hold the larger maximum, so each has its own factor: see section 5."),
    ("the factors are inverted", ("m_a - m)", "m_b - m)"), ("m - m_a)", "m - m_b)"),
     "The factor of a part is e^(m_part - m), which is at most 1: see section 5."),
    ("one comparison decides for all rows", "np.maximum(m_a, m_b)", "m_a if (m_a >= m_b).all() else m_b",
     "Which part holds the larger maximum may differ from row to row: np.maximum, see hint 1."),
)  # fmt: skip


def rows_that_break(block_k):
    """Rows of finite logits, one for each shortcut: a dict of arrays of shape (S,)."""
    first, second = np.zeros(block_k), np.full(block_k, -100.0)
    return {
        "no max": np.full(block_k, 100.0),
        "m starts at 0": np.full(block_k, -200.0),
        "tile max": np.concatenate([first, second]),
    }


def _run_break(answer, block_k):
    """Which rows break which shortcuts: {row: {shortcut: True where it breaks}}.

    The pattern, and not the rows, is the result, so that a misunderstanding is recognised
    whatever numbers it comes with.
    """
    rows = answer(block_k)
    if not isinstance(rows, dict):
        raise Complaint(f"expected a dict of three rows, got {got(rows)}")
    pattern = {}
    for name in SHORTCUTS:
        if name not in rows:
            raise Complaint(f"the dict lacks the key {name!r}")
        try:
            row = np.asarray(rows[name], np.float32)
        except (TypeError, ValueError):
            raise Complaint(f"{name!r}: expected a row of numbers") from None
        if row.ndim != 1 or not 1 <= row.size <= 10_000:
            raise Complaint(f"{name!r}: expected a row of 1 to 10000 logits, shape (S,), got shape {row.shape}")
        if not np.isfinite(row).all():
            raise Complaint(f"{name!r}: {np.sum(~np.isfinite(row))} of {row.size} logits are not finite in float32")
        pattern[name] = {shortcut: _breaks(row, block_k, **options) for shortcut, options in SHORTCUTS.items()}
    return pattern


def _breaks(row, block_k, choose, m):
    row = row.astype(np.float64)
    right = row.max() + np.log(np.exp(row - row.max()).sum())
    mine = lse_by_tiles(row, block_k, choose, m)
    return not math.isclose(mine, right, rel_tol=1e-4, abs_tol=1e-4)


SPARED = {
    "no max": ("m starts at 0", "tile max"),
    "m starts at 0": ("tile max",),
    "tile max": ("no max", "m starts at 0"),
}


def _judge_break(result, case):
    for name, spared in SPARED.items():
        if not result[name][name]:
            return f'row "{name}": the shortcut "{name}" still gives the right lse for it'
        for other in spared:
            if result[name][other]:
                return f'row "{name}": it breaks the shortcut "{other}" as well, and should not'
    return None


BREAK = Exercise(
    rows_that_break, "Break the shortcuts", outputs=("rows",), run=_run_break, judge=_judge_break,
).with_cases("block_k", (2,), (3,), (32,), (500,)).with_mistakes(
    ("no row breaks any shortcut, as with numbers from N(0, 1)", ("100.0", "200.0"), ("1.0", "1.0"),
     "No reference matters until an exponential leaves the range of float32: see the picture in section 6."),
    ("the row for “no max” is not far enough above zero", 'max": np.full(block_k, 100', 'max": np.full(block_k, 50',
     "The sum of its e^s must exceed the largest float32: a logit of 89 or more does it, see section 1."),
    ("the row for “tile max” never falls from one tile to a later one, or not far enough",
     "[first, second]", "[second, first]",
     "Only a fall makes alpha or l exceed the largest float32; 89 between two tiles are enough: see section 6."),
    ("the row for “tile max” is so low that a reference of 0 fails as well",
     "[first, second]", "[first - 200, second - 200]",
     "What matters is the fall from one tile to a later one: let the first tile stay near 0, see section 6."),
    ("the row for “m starts at 0” is not far enough below zero, or not in all of its logits", "200.0", "50.0",
     "Let every e^s in it vanish in float32, which is sure below -104: see section 1."),
)  # fmt: skip


def merge_by_lse(out_a, lse_a, out_b, lse_b):
    """(out, lse) of two results over disjoint keys. out: (rows, H), lse: (rows,)."""
    lse = np.logaddexp(lse_a, lse_b)
    reference = np.where(lse == -np.inf, 0.0, lse)
    w_a, w_b = np.exp(lse_a - reference), np.exp(lse_b - reference)
    return w_a[:, None] * out_a + w_b[:, None] * out_b, lse


def _lse_cases():
    """The same parts, and rows in which neither saw a key."""
    v = np.arange(12.0).reshape(4, 3)
    none, some = np.full((3, 2), -np.inf), np.array([[2.0, 1.0], [-np.inf, -np.inf], [0.25, 3.0]])
    more = [("neither saw a key, rows=3, H=3", (none, v[:2]), (none, v[2:]))]
    more += [("neither saw a key in row 1 alone, rows=3, H=3", (some[::-1], v[:2]), (some, v[2:]))]
    more += [("only b saw keys, none of them in row 1, rows=3, H=3", (none, v[:2]), (some, v[2:]))]
    return [Case(label, (*_out_and_lse(*a), *_out_and_lse(*b))) for label, a, b in [*_two_parts(), *more]]


MERGE_BY_LSE = Exercise(
    merge_by_lse, "Merge by lse", outputs=("out", "lse"), cases=_lse_cases,
    tolerance=2e-4,  # float32 rounds an lse near 1000 to four digits behind the point
).with_mistakes(
    ("the two outputs are averaged", "np.exp(lse_a - reference), np.exp(lse_b - reference)",
     "np.full((2, len(lse_a)), 0.5)",
     "A part counts by the size of its exponentials, e^lse: see section 8 of notebook 02."),
    ("the two outputs are added", ("w_a[:, None] * ", "w_b[:, None] * "), ("", ""),
     "Each output is already divided by its own sum; weigh it before you add: see section 8 of notebook 02."),
    ("the weights do not add up to one", "lse)\n    w_a", "np.maximum(lse_a, lse_b))\n    w_a",
     "Subtract the lse of the whole row, not the larger of the two: see section 8 of notebook 02."),
    ("-inf is subtracted from -inf where neither part saw a key", "np.where(lse == -np.inf, 0.0, lse)", "lse",
     "Use 0 as the reference there: see section 7 of notebook 02."),
    ("the weights are safe, but lse comes from e^lse itself, which overflows or vanishes", ", lse\n",
     ", np.log(np.exp(lse_a) + np.exp(lse_b))\n", "np.logaddexp works with the difference only: see hint 1."),
)  # fmt: skip

EXERCISES = (UPDATE, MERGE, BREAK, MERGE_BY_LSE)
