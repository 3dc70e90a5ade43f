"""The exercises of notebook 02, and the ways to choose a reference that it compares."""

import math

import numpy as np

from helpers.exercises.checking import Case, Exercise, Mistake


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


def _definition(s, v):
    """(m, l, acc) of logits s (…, keys) and values v (keys, H), from their definition; -inf is masked."""
    if s.shape[-1] == 0:
        s, v = np.full((*s.shape[:-1], 1), -np.inf), np.zeros((1, v.shape[1]))
    m = s.max(axis=-1)
    p = np.exp(s - np.where(m == -np.inf, 0, m)[..., None])
    return m, p.sum(axis=-1), p @ v


def _out_and_lse(s, v):
    """(out, lse), from the definition. No visible key gives 0 and -inf."""
    m, l, acc = _definition(s, v)
    empty = l == 0
    l = np.where(empty, 1, l)
    return acc / l[..., None], np.where(empty, -np.inf, m + np.log(l))


def _even(array):
    """Rounded to eighths: float32 then holds logits near 1000, and their differences, exactly."""
    return np.round(8 * array) / 8


HAND_S = np.log([1.0, 3.0, 2.0, 8.0])
HAND_V = np.array([[1.0], [2.0], [3.0], [4.0]])


# 2.1


def _update_cases():
    random = np.random.default_rng(21)

    def case(label, before, block_k, H, s=None):
        s = random.standard_normal(before + block_k) if s is None else s
        v = random.standard_normal((before + block_k, H))
        return Case(f"{label}, block_k={block_k}, H={H}", (s[:before], v[:before], s[before:], v[before:]))

    rising, falling = np.arange(9.0), np.arange(9.0)[::-1]
    return [
        Case("tile 2 of the hand case", (HAND_S[:2], HAND_V[:2], HAND_S[2:], HAND_V[2:])),
        case("the first tile of a row", 0, 3, 2),
        case("the first tile of a row, logits near -1000", 0, 4, 2, -1000 + np.arange(4.0)),
        case("3 keys before", 3, 2, 4),
        case("rising logits", 4, 5, 3, rising),
        case("falling logits", 4, 5, 3, falling),
        case("the largest logit in the middle of the tile", 5, 3, 2, np.array([1.0, 0, 2, -1, 1, 0, 6, 1])),
        case("logits near 1000", 6, 4, 3, _even(1000 + 3 * random.standard_normal(10))),
        case("logits near -1000", 6, 4, 3, _even(-1000 + 3 * random.standard_normal(10))),
        case("a rise from 0 to 1000", 3, 3, 2, np.array([0.0, 0.5, -1, 999.5, 1000, 998])),
    ]


def _run_update(answer, s_before, v_before, s, v):
    return answer(*_definition(s_before, v_before), s, v)


def _expected_update(s_before, v_before, s, v):
    return _definition(np.concatenate([s_before, s]), np.concatenate([v_before, v]))


def _update(
    m,
    l,
    acc,
    s,
    v,
    rescale_l=1,
    rescale_acc=1,
    inverted=False,
    old_max_in_p=False,
    tile_max=False,
    keep_m=False,
    halfway=False,
    forget=False,
    rescale_new=False,
    own_unit=False,
    no_reference=False,
    exp=np.exp,
):
    """The update with the mistakes that people make in it; rescale_* are powers of alpha."""
    m_new = s.max() if tile_max else max(m, s.max())
    alpha = exp(m_new - m if inverted else m - m_new)
    unit = 0 if no_reference else m if old_max_in_p else s.max() if own_unit else m_new
    p = exp(s - unit) * (alpha if rescale_new else 1)
    l_new = alpha**rescale_l * l + p.sum()
    acc_new = alpha**rescale_acc * acc + p @ v
    if forget:
        l_new, acc_new = p.sum(), p @ v
    return (m if keep_m else m_new), l_new, acc_new / l_new if halfway else acc_new


def _wrong_update(**options):
    return lambda m, l, acc, s, v: _update(m, l, acc, s, v, **options)


def _divided_update(m, l, acc, s, v):
    m_new, l_new, acc_new = _update(m, l, l * acc, s, v)
    return m_new, l_new, acc_new / l_new


def _rescaled_afterwards(m, l, acc, s, v):
    unit = s.max() if m == -np.inf else m
    m_new, p = max(m, s.max()), np.exp(s - unit)
    alpha = np.exp(unit - m_new)
    return m_new, alpha * (l + p.sum()), alpha * (acc + p @ v)


UPDATE_MISTAKES = (
    Mistake(
        "neither l nor acc is rescaled",
        _wrong_update(rescale_l=0, rescale_acc=0),
        "Both are measured in units of e^m, so both change when m does: see section 3.",
    ),
    Mistake(
        "acc is not rescaled",
        _wrong_update(rescale_acc=0),
        "acc is a sum of the same exponentials as l and needs the same alpha: see section 4.",
    ),
    Mistake(
        "l is not rescaled",
        _wrong_update(rescale_l=0),
        "l needs the same alpha as acc, or their ratio is off: see section 3.",
    ),
    Mistake(
        "alpha is inverted",
        _wrong_update(inverted=True),
        "alpha = e^(m - m_new) is at most 1, because m never falls: see section 3.",
    ),
    Mistake(
        "p uses the old m",
        _wrong_update(old_max_in_p=True),
        "The new exponentials must be in the new units, e^(s - m_new): see section 3.",
    ),
    Mistake(
        "alpha is applied twice",
        _wrong_update(rescale_l=2, rescale_acc=2),
        "One change of m asks for one correction: see section 3.",
    ),
    Mistake(
        "acc is divided by l half-way",
        _wrong_update(halfway=True),
        "Divide once, after the last tile: see the common slip in section 4.",
    ),
    Mistake(
        "only the last tile is kept",
        _wrong_update(forget=True),
        "The old l and acc stand for all the keys before this tile: see section 4.",
    ),
    Mistake(
        "m is the maximum of the tile instead of the running maximum",
        _wrong_update(tile_max=True),
        "m_new is the larger of m and the largest logit of the tile: see section 3.",
    ),
    Mistake(
        "a first m of -inf is replaced by 0, and no logit of the tile is that large",
        lambda m, l, acc, s, v: _update(0.0 if m == -np.inf else m, l, acc, s, v),
        "Nothing has to be replaced, since e^(-inf) is 0 already: see section 3.",
    ),
    Mistake(
        "p is measured from the tile's own maximum, in another unit than the sums that it is added to",
        _wrong_update(own_unit=True),
        "p = e^(s - m_new), with the maximum of all keys so far: see section 3.",
    ),
    Mistake(
        "the exponentials are taken to base two",
        _wrong_update(exp=np.exp2),
        "m, l and acc here are in base e, so use np.exp: see section 3.",
    ),
    Mistake(
        "the old sums are dropped whenever the maximum grows",
        lambda m, l, acc, s, v: _update(m, l * (s.max() <= m), acc * (s.max() <= m), s, v),
        "The old sums shrink by alpha, they do not vanish: see section 3.",
    ),
    Mistake(
        "the larger of the two sums is kept instead of their total",
        lambda m, l, acc, s, v: (
            _update(m, l, acc, s, v)[0],
            max(np.exp(m - max(m, s.max())) * l, np.exp(s - max(m, s.max())).sum()),
            _update(m, l, acc, s, v)[2],
        ),
        "Only m is a maximum; l and acc are sums: see section 3.",
    ),
    Mistake(
        "alpha multiplies the new exponentials too",
        _wrong_update(rescale_new=True),
        "Only the old sums are in old units; p is in the new ones already: see section 3.",
    ),
    Mistake(
        "the old m is returned",
        _wrong_update(keep_m=True),
        "l and acc are now in units of e^(m_new), so m_new is what belongs to them: see section 3.",
    ),
    Mistake(
        "p = e^s is taken without subtracting m_new",
        _wrong_update(no_reference=True),
        "Old and new terms must be in the same unit, e^(s - m_new): see section 3.",
    ),
    Mistake(
        "acc is carried divided by l, as the first FlashAttention did",
        _divided_update,
        "Here acc is the undivided sum, and the only division comes after the last tile: see section 4.",
    ),
    Mistake(
        "the tile is added in the old unit, and the whole is rescaled afterwards",
        _rescaled_afterwards,
        "e^(s - m) overflows where the tile lies far above m; e^(s - m_new) is at most 1: see section 3.",
    ),
    Mistake(
        "a tile is added only where it raises the maximum",
        lambda m, l, acc, s, v: _update(m, l, acc, s, v) if s.max() > m else (m, l, acc),
        "Every key counts, also where m stays as it is and alpha is 1: see section 3.",
    ),
    Mistake(
        "the old state is dropped, and the tile is summed from its own maximum",
        lambda m, l, acc, s, v: _update(-np.inf, 0.0, np.zeros_like(acc), s, v),
        "The old l and acc stand for all the keys before this tile: see section 4.",
    ),
    Mistake(
        "l is averaged over the tile instead of summed",
        lambda m, l, acc, s, v: (
            max(m, s.max()),
            np.exp(m - max(m, s.max())) * l + np.exp(s - max(m, s.max())).mean(),
            _update(m, l, acc, s, v)[2],
        ),
        "l is a sum over all keys so far, p.sum(): see section 3.",
    ),
)


# 2.2


def _merge_cases():
    random = np.random.default_rng(22)

    def case(label, rows, a, b, H, shift_a=0.0, shift_b=0.0, spread=1.0, hidden=False):
        s_a = _even(spread * random.standard_normal((rows, a)) + shift_a)
        s_b = _even(spread * random.standard_normal((rows, b)) + shift_b)
        if hidden:
            s_a[0] = s_b[1] = -np.inf
        v = random.standard_normal((a + b, H))
        return Case(f"{label}, rows={rows}, H={H}", (s_a, v[:a], s_b, v[a:]))

    return [
        Case("the hand case", (HAND_S[None, :2], HAND_V[:2], HAND_S[None, 2:], HAND_V[2:])),
        Case("the hand case the other way round", (HAND_S[None, 2:], HAND_V[2:], HAND_S[None, :2], HAND_V[:2])),
        case("3 and 5 keys", 4, 3, 5, 2, spread=2.0),
        case("nothing and 4 keys", 3, 0, 4, 2),
        case("4 keys and nothing", 3, 4, 0, 2),
        case("larger logits in a", 5, 2, 7, 3, shift_a=4.0),
        case("larger logits in b", 5, 7, 2, 3, shift_b=4.0),
        case("logits near 1000", 2, 3, 4, 5, 1000.0, 1000.0, 3.0),
        case("logits near -1000", 2, 3, 4, 5, -1000.0, -1000.0, 3.0),
        case("rows near -1000, 0 and 1000", 3, 3, 2, 2, LEVELS, LEVELS, 3.0),
        case("nothing in row 0 of a and in row 1 of b", 3, 3, 4, 2, hidden=True),
        case("nothing in one row of each, logits near -1000", 3, 3, 4, 2, -1000.0, -1000.0, hidden=True),
    ]


LEVELS = np.array([[-1000.0], [0.0], [1000.0]])


def _run_merge(answer, s_a, v_a, s_b, v_b):
    return answer(_definition(s_a, v_a), _definition(s_b, v_b))


def _expected_merge(s_a, v_a, s_b, v_b):
    return _definition(np.concatenate([s_a, s_b], axis=-1), np.concatenate([v_a, v_b]))


def _merge(a, b, choose=np.maximum, factor_l=None, factor_acc=None, average=False):
    """Merge of (m, l, acc) with the mistakes that people make in it. factor_*(m_part, m, part)."""
    (m_a, l_a, acc_a), (m_b, l_b, acc_b) = a, b
    m = choose(m_a, m_b)
    right = lambda m_part, m, part: np.exp(m_part - m)
    factor_l, factor_acc = factor_l or right, factor_acc or right
    l = factor_l(m_a, m, "a") * l_a + factor_l(m_b, m, "b") * l_b
    if average:
        acc_a, acc_b = (acc / np.where(l_part == 0, 1, l_part)[:, None] for acc, l_part in ((acc_a, l_a), (acc_b, l_b)))
    acc = factor_acc(m_a, m, "a")[:, None] * acc_a + factor_acc(m_b, m, "b")[:, None] * acc_b
    return m, l, acc


def _wrong_merge(both=None, **options):
    if both:
        options |= {"factor_l": both, "factor_acc": both}
    return lambda a, b: _merge(a, b, **options)


def _one(m_part, m, part):
    return np.ones_like(m)


def _swapped_factors(a, b):
    m = np.maximum(a[0], b[0])
    alpha, beta = np.exp(b[0] - m), np.exp(a[0] - m)
    return m, alpha * a[1] + beta * b[1], alpha[:, None] * a[2] + beta[:, None] * b[2]


def _winner(a, b):
    """In each row the state with the larger m, and nothing of the other."""
    first = a[0] >= b[0]
    return tuple(np.where(first if x.ndim == 1 else first[:, None], x, y) for x, y in zip(a, b, strict=True))


def _dropped_for_one_row(a, b):
    if np.isinf(a[0]).any():
        return b
    return a if np.isinf(b[0]).any() else _merge(a, b)


def _one_comparison(a, b):
    m = a[0] if (a[0] >= b[0]).all() else b[0]
    alpha, beta = np.exp(a[0] - m), np.exp(b[0] - m)
    return m, alpha * a[1] + beta * b[1], alpha[:, None] * a[2] + beta[:, None] * b[2]


def _only_a_to_the_maximum_of_b(a, b):
    alpha = np.exp(a[0] - b[0])
    return np.maximum(a[0], b[0]), alpha * a[1] + b[1], alpha[:, None] * a[2] + b[2]


def _normalised_merge(a, b):
    m, l, acc = _merge(a, b)
    return m, l, acc / l[:, None]


def _weighed_by_l(a, b):
    m, l, _ = _merge(a, b)
    return m, l, sum((np.exp(m_part - m) * l_part)[:, None] * acc for m_part, l_part, acc in (a, b))


MERGE_MISTAKES = (
    Mistake(
        "the sums are added as they are",
        _wrong_merge(both=_one),
        "The two parts are in different units, e^m_a and e^m_b: see section 5.",
    ),
    Mistake(
        "acc is added as it is",
        _wrong_merge(factor_acc=_one),
        "acc needs the same two factors as l: see section 5.",
    ),
    Mistake(
        "l is added as it is",
        _wrong_merge(factor_l=_one),
        "l needs the same two factors as acc: see section 5.",
    ),
    Mistake(
        "only a is rescaled",
        _wrong_merge(both=lambda m_part, m, part: np.exp(m_part - m) if part == "a" else np.ones_like(m)),
        "Either part may hold the larger maximum, so each has its own factor: see section 5.",
    ),
    Mistake(
        "only b is rescaled",
        _wrong_merge(both=lambda m_part, m, part: np.exp(m_part - m) if part == "b" else np.ones_like(m)),
        "Either part may hold the larger maximum, so each has its own factor: see section 5.",
    ),
    Mistake(
        "the maximum of b is taken for the common one",
        _wrong_merge(choose=lambda m_a, m_b: m_b),
        "Either part may hold the larger maximum, so take the larger of the two: see section 5.",
    ),
    Mistake(
        "the factors are inverted",
        _wrong_merge(both=lambda m_part, m, part: np.exp(m - m_part)),
        "The factor of a part is e^(m_part - m), which is at most 1: see section 5.",
    ),
    Mistake(
        "acc is divided by l before it is merged",
        _wrong_merge(average=True),
        "A state holds sums, not averages; the only division comes after the last merge: see section 4.",
    ),
    Mistake(
        "each acc is multiplied by its l, as if it were an average",
        _weighed_by_l,
        "acc is a sum already, not divided by l: its factor is that of l, see section 5.",
    ),
    Mistake(
        "the two factors are swapped",
        _swapped_factors,
        "The sums of a are in units of e^m_a, so their factor is e^(m_a - m): see section 5.",
    ),
    Mistake(
        "the factors are powers of two",
        _wrong_merge(both=lambda m_part, m, part: np.exp2(m_part - m)),
        "m, l and acc are in base e, so use np.exp: see section 5.",
    ),
    Mistake(
        "the smaller maximum is taken for the common one",
        _wrong_merge(choose=np.minimum),
        "Both factors are at most 1 only for the larger of the two: see section 5.",
    ),
    Mistake(
        "the state with the larger maximum is kept and the other one dropped",
        _winner,
        "Both parts hold keys of the row, so both sums count: see section 5.",
    ),
    Mistake(
        "acc is divided by l after the merge",
        _normalised_merge,
        "A merged state is a state again, with sums; the division comes after the last merge: see section 4.",
    ),
    Mistake(
        "the two maxima are added",
        _wrong_merge(choose=lambda m_a, m_b: m_a + m_b),
        "The unit of the merged state is the larger of the two maxima: see section 5.",
    ),
    Mistake(
        "the maximum of a is taken for the common one",
        _wrong_merge(choose=lambda m_a, m_b: m_a),
        "Either part may hold the larger maximum, so take the larger of the two: see section 5.",
    ),
    Mistake(
        "the factors are e^m_a and e^m_b, without the common maximum",
        _wrong_merge(both=lambda m_part, m, part: np.exp(m_part)),
        "The result must be in units of e^m: its factors are e^(m_a - m) and e^(m_b - m), see section 5.",
    ),
    Mistake(
        "a is rescaled to the maximum of b, also where that of a is the larger",
        lambda a, b: (np.maximum(a[0], b[0]), *_merge(a, b, choose=lambda m_a, m_b: m_b)[1:]),
        "Both parts are converted to the larger of the two maxima: see section 5.",
        variants=(_only_a_to_the_maximum_of_b,),
    ),
    Mistake(
        "a whole part is dropped because it saw no key in one of the rows",
        _dropped_for_one_row,
        "Which part is empty may differ from row to row: e^(-inf) = 0 takes it out of those rows by itself.",
    ),
    Mistake(
        "an m of -inf is replaced by 0, and no logit of the other part is that large",
        lambda a, b: _merge((_safe(a[0]), *a[1:]), (_safe(b[0]), *b[1:])),
        "Nothing has to be replaced, since e^(-inf) is 0 already: see section 5.",
    ),
    Mistake(
        "one comparison decides for all rows",
        _one_comparison,
        "Which part holds the larger maximum may differ from row to row: np.maximum, see hint 1.",
    ),
    Mistake(
        "the larger of the two sums is kept instead of their total",
        lambda a, b: (
            _merge(a, b)[0],
            np.maximum(np.exp(a[0] - np.maximum(a[0], b[0])) * a[1], np.exp(b[0] - np.maximum(a[0], b[0])) * b[1]),
            _merge(a, b)[2],
        ),
        "Only m is a maximum; l and acc are sums: see section 5.",
    ),
    Mistake(
        "all rows share one maximum",
        _wrong_merge(choose=lambda m_a, m_b: np.full_like(m_a, max(m_a.max(), m_b.max()))),
        "Each row is a softmax of its own, with its own m: see the shapes in the exercise.",
    ),
)


# 2.3


def _break_cases():
    return [Case(f"block_k={block_k}", (block_k,)) for block_k in (2, 3, 32, 100)]


def _run_break(answer, block_k):
    """Which rows break which shortcuts: {row: {shortcut: True where it breaks}}, or a complaint.

    The pattern, and not the rows, is the result, so that a misunderstanding is recognised
    whatever numbers it comes with.
    """
    rows = answer(block_k)
    if not isinstance(rows, dict):
        return "expected a dict of three rows" + (", got None: is a `return` missing?" if rows is None else "")
    pattern = {}
    for name in SHORTCUTS:
        if name not in rows:
            return f"the dict lacks the key {name!r}"
        try:
            row = np.asarray(rows[name], np.float32)
        except (TypeError, ValueError):
            return f"{name!r}: expected a row of numbers"
        if row.ndim != 1 or not 1 <= row.size <= 10_000:
            return f"{name!r}: expected a row of 1 to 10000 logits, shape (S,), got shape {row.shape}"
        if not np.isfinite(row).all():
            return f"{name!r}: {int((~np.isfinite(row)).sum())} of {row.size} logits are not finite in float32"
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
    if isinstance(result, str):
        return result
    for name, spared in SPARED.items():
        if not result[name][name]:
            return f'row "{name}": the shortcut "{name}" still gives the right lse for it'
        for other in spared:
            if result[name][other]:
                return f'row "{name}": it breaks the shortcut "{other}" as well, and should not'
    return None


def _rows(no_max, starts_at_0, tile_max):
    """An answer: each argument lists the constant logits of consecutive tiles."""

    def answer(block_k):
        rows = (np.repeat(np.array(tiles, float), block_k) for tiles in (no_max, starts_at_0, tile_max))
        return dict(zip(SHORTCUTS, rows, strict=True))

    return answer


BREAK_MISTAKES = (
    Mistake(
        "no row breaks any shortcut, as with numbers from N(0, 1)",
        _rows([1, -1], [-1, 1], [1, -1]),
        "No reference matters until an exponential leaves the range of float32: see the picture in section 6.",
    ),
    Mistake(
        "every row breaks “no max” alone, by large logits",
        _rows([500], [500], [500]),
        "A large logit replaces a reference of 0 and a constant row never lets m fall: see section 6.",
    ),
    Mistake(
        "the row for “m starts at 0” falls, but not all of its logits are far below zero",
        _rows([100], [0, -200], [0, -100]),
        "An m of 0 is harmless as long as some logit is near it or above: see section 6.",
    ),
    Mistake(
        "the row for “no max” is low instead of high",
        _rows([-200], [-200], [0, -100]),
        "A low row breaks two shortcuts; find what hurts “no max” alone: see the picture in section 6.",
    ),
    Mistake(
        "the row for “tile max” never falls from one tile to a later one, or not far enough",
        _rows([100], [-200], [-100, 0]),
        "Only a fall makes alpha or l exceed the largest float32, and 89 between two tiles are enough: see section 6.",
    ),
    Mistake(
        "the row for “tile max” holds logits so large that “no max” overflows too",
        _rows([100], [-200], [200, 0]),
        "What matters is the fall from one tile to a later one, not the height: see section 6.",
    ),
    Mistake(
        "the row for “tile max” is so low that a reference of 0 fails as well",
        _rows([100], [-200], [-200, -300]),
        "What matters is the fall from one tile to a later one: let the first tile stay near 0, see section 6.",
    ),
    Mistake(
        "the rows for “no max” and “m starts at 0” are exchanged",
        _rows([-200], [100], [0, -100]),
        "Large logits hurt “no max” alone, and low ones hurt “m starts at 0”: see the picture in section 6.",
    ),
    Mistake(
        "the rows for “m starts at 0” and “tile max” are exchanged",
        _rows([100], [0, -100], [-200]),
        "Low logits throughout hurt “m starts at 0”, and a fall from near 0 hurts “tile max”: see section 6.",
    ),
    Mistake(
        "the logits of the row for “no max” are not large enough",
        _rows([50], [-200], [0, -100]),
        "The sum of all e^s must exceed the largest float32, about e^88.7: see section 6.",
    ),
    Mistake(
        "the row for “m starts at 0” is not far enough below zero, or not in all of its logits",
        _rows([100], [-50], [0, -100]),
        "Let every e^s in it vanish in float32, which is sure below -104: see section 1.",
    ),
    Mistake(
        "the row for “tile max” has the same length whatever block_k is, and may lie in a single tile",
        lambda block_k: _rows([100], [-200], [0, -100])(block_k) | {"tile max": np.repeat([0.0, -100.0], 8)},
        "A fall from one tile to the next takes two tiles: let the length depend on block_k.",
    ),
    Mistake(
        "every row is large somewhere and falls somewhere, which breaks “no max” and “tile max” together",
        _rows([200, -200], [200, -200], [200, -200]),
        "Each row needs one thing only: height, depth, or a fall that begins near 0; see the picture in section 6.",
    ),
    Mistake(
        "every row is low and then falls, which breaks all three shortcuts together",
        _rows([-200, -300], [-200, -300], [-200, -300]),
        "Each row needs one thing only: height, depth, or a fall that begins near 0; see the picture in section 6.",
    ),
)


# 2.4


def _attend_cases():
    random = np.random.default_rng(24)

    def case(label, s, block_k, H):
        s = np.asarray(s, float)
        return Case(f"{label}, S={len(s)}, block_k={block_k}, H={H}", (s, random.standard_normal((len(s), H)), block_k))

    # Few shapes, because an answer in jax.numpy is compiled for each of them.
    masked = random.standard_normal(7)
    masked[[0, 1, 2, 5]] = -np.inf
    return [
        Case("the hand case", (HAND_S, HAND_V, 2)),
        case("a ragged last tile", random.standard_normal(5), 2, 3),
        case("the largest logit first", [5.0, 1, 0, 2, -1, 3, 1], 3, 2),
        case("the largest logit last", [-1.0, 1, 0, 2, 1, 3, 7], 3, 2),
        case("the largest logit in the middle", [0.0, 1, 2, 9, 1, 0, -1, 3, 2], 3, 2),
        case("tiles of one key", 2 * random.standard_normal(4), 1, 2),
        case("first tile fully masked", masked, 3, 2),
        case("a fully masked tile after a visible one", [1.0, 0, -np.inf, -np.inf, 2, -1, -np.inf, -np.inf], 2, 2),
        case("a fully masked tile before logits near -1000", [-np.inf, -np.inf, -1000, -1001, -999], 2, 2),
        case("masked tiles between logits near -1000", [-1000, -np.inf, -np.inf, -np.inf, -1002, -1001], 2, 2),
        case("every key masked", np.full(4, -np.inf), 2, 2),
        case("logits near 1000", _even(1000 + 2 * random.standard_normal(7)), 3, 2),
        case("logits near -1000", _even(-1000 + 2 * random.standard_normal(7)), 3, 2),
        case("a rise from 0 to 1000", _even(np.repeat([0.0, 1000.0], 3) + random.standard_normal(6)), 3, 2),
        case("a fall from 1000 to 0", _even(np.repeat([1000.0, 0.0], 3) + random.standard_normal(6)), 3, 2),
    ]


def _expected_attend(s, v, block_k):
    stops = [min(start + block_k, len(s)) for start in range(0, len(s), block_k)]
    prefixes = [_out_and_lse(s[:stop], v[:stop]) for stop in stops]
    return np.stack([out for out, _ in prefixes]), np.stack([lse for _, lse in prefixes])


def _attend(
    s,
    v,
    block_k,
    start_m=-np.inf,
    choose=max,
    rescale_l=1,
    rescale_acc=1,
    inverted=False,
    old_max_in_p=False,
    halfway=False,
    forget=False,
    divide=True,
    guard=True,
    guard_division=True,
    guard_old=True,
    mask_value=None,
    own_unit=False,
    exp=np.exp,
    values_of=lambda v, start, stop: v[start:stop],
    lse_of=lambda m, l: m + np.log(l),
):
    """One pass over a row with the mistakes that people make in it; rescale_* are powers of alpha."""
    if mask_value is not None:
        s = np.where(s == -np.inf, mask_value, s)
    m, l, acc = start_m, 0.0, np.zeros(v.shape[1])
    outs, lses = [], []
    for start in range(0, len(s), block_k):
        tile, values = s[start : start + block_k], values_of(v, start, start + block_k)
        m_new = choose(m, tile.max())
        reference = 0.0 if guard and m_new == -np.inf else m_new
        old = 0.0 if guard and guard_old and m == -np.inf and old_max_in_p else m
        alpha = exp(reference - m if inverted else m - reference)
        if inverted == "later" and m == -np.inf:
            alpha = 1.0
        own = tile.max() if np.isfinite(tile.max()) else 0.0
        p = exp(tile - (old if old_max_in_p else own if own_unit else reference))
        l = p.sum() if forget else alpha**rescale_l * l + p.sum()
        acc = p @ values if forget else alpha**rescale_acc * acc + p @ values
        m = m_new
        out = acc if not divide else acc / (1 if guard_division and l == 0 else l)
        if halfway:
            acc = out
        outs.append(out)
        lses.append(lse_of(m, l))
    return np.stack(outs), np.array(lses)


def _wrong_attend(**options):
    return lambda s, v, block_k: _attend(s, v, block_k, **options)


def _tiles_apart(s, v, block_k):
    """Each tile as if it were a row of its own."""
    parts = [
        _attend(s[start : start + block_k], v[start : start + block_k], block_k) for start in range(0, len(s), block_k)
    ]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _where_masked(s, v, block_k, record):
    """(out, lse) with this record for tiles of masked keys, or without one for them."""
    out, lse = _attend(s, v, block_k)
    masked = np.array([np.isinf(s[start : start + block_k]).all() for start in range(0, len(s), block_k)])
    if record is None:
        return out[~masked], lse[~masked]
    out[masked], lse[masked] = record
    return out, lse


def _nan_to_zero(s, v, block_k):
    out, lse = _attend(s, v, block_k, guard=False, guard_division=False)
    return np.nan_to_num(out), lse


ATTEND_MISTAKES = (
    Mistake(
        "neither l nor acc is rescaled",
        _wrong_attend(rescale_l=0, rescale_acc=0),
        "Both are measured in units of e^m, so both change when m does: see section 3.",
    ),
    Mistake(
        "acc is not rescaled",
        _wrong_attend(rescale_acc=0),
        "acc needs the same alpha as l, or out can exceed every value: see section 4.",
    ),
    Mistake(
        "l is not rescaled",
        _wrong_attend(rescale_l=0),
        "l needs the same alpha as acc: see section 3.",
    ),
    Mistake(
        "alpha is inverted",
        _wrong_attend(inverted="later"),
        "alpha = e^(m - m_new) is at most 1: see section 3.",
    ),
    Mistake(
        "alpha is inverted, which makes it infinite where m is still -inf",
        _wrong_attend(inverted=True),
        "alpha = e^(m - m_new) is at most 1, and 0 for the first tile: see section 3.",
    ),
    Mistake(
        "p uses the old m",
        _wrong_attend(old_max_in_p=True),
        "The new exponentials must be in the new units, e^(s - m_new): see section 3.",
    ),
    Mistake(
        "alpha is applied twice",
        _wrong_attend(rescale_l=2, rescale_acc=2),
        "One change of m asks for one correction: see section 3.",
    ),
    Mistake(
        "acc is divided by l half-way and then rescaled again",
        _wrong_attend(halfway=True),
        "Keep acc undivided from tile to tile and divide a copy of it: see the common slip in section 4.",
    ),
    Mistake(
        "out is never divided by l",
        _wrong_attend(divide=False),
        "out = acc / l: see section 4.",
    ),
    Mistake(
        "only the last tile is kept",
        _wrong_attend(forget=True),
        "l and acc stand for all keys so far, not for those of one tile: see section 4.",
    ),
    Mistake(
        "lse is log l, without m",
        _wrong_attend(lse_of=lambda m, l: np.log(l)),
        "l is in units of e^m, so lse = m + log l: see section 4.",
    ),
    Mistake(
        "lse is m + l, without the logarithm",
        _wrong_attend(lse_of=lambda m, l: m + l),
        "lse = m + log l: see section 4.",
    ),
    Mistake(
        "m is the maximum of the tile instead of the running maximum",
        _wrong_attend(choose=lambda m, largest: largest),
        "It is right until m falls so far that alpha or l overflows, or to -inf in a masked tile: see section 6.",
    ),
    Mistake(
        "m starts at 0",
        _wrong_attend(start_m=0.0),
        "The neutral element has m = -inf; 0 fails when every logit is far below it: see section 6.",
    ),
    Mistake(
        "no maximum is subtracted",
        _wrong_attend(start_m=0.0, choose=lambda m, largest: 0.0),
        "e^s overflows for large logits and vanishes for low ones: see section 6.",
    ),
    Mistake(
        "-inf is subtracted from -inf in a masked tile",
        _wrong_attend(guard=False),
        "Use 0 as the reference while m is still -inf: see section 7.",
    ),
    Mistake(
        "0 is divided by 0 while no key was visible",
        _wrong_attend(guard_division=False),
        "Divide by 1 where l is 0, so that out is 0 there: see the end of section 7.",
    ),
    Mistake(
        "the maximum of the whole row is used from the first tile on",
        lambda s, v, block_k: _attend(s, v, block_k, choose=lambda m, largest: s.max()),
        "That takes a pass of its own, and makes early tiles vanish where the maximum comes late: see section 3.",
    ),
    Mistake(
        "lse is m - log l",
        _wrong_attend(lse_of=lambda m, l: m - np.log(l)),
        "lse = m + log l: see section 4.",
    ),
    Mistake(
        "the last, shorter tile is left out",
        lambda s, v, block_k: _attend(s[: len(s) // block_k * block_k], v, block_k),
        "range(0, len(s), block_k) reaches the tail, len(s) // block_k tiles do not.",
    ),
    Mistake(
        "the answer for the whole row alone is returned",
        lambda s, v, block_k: tuple(part[-1] for part in _attend(s, v, block_k)),
        "One row of out and one lse are asked for each tile: record them inside the loop.",
    ),
    Mistake(
        "lse is m alone, without log l",
        _wrong_attend(lse_of=lambda m, l: m),
        "lse = m + log l: see section 4.",
    ),
    Mistake(
        "lse takes a logarithm in base two of l",
        _wrong_attend(lse_of=lambda m, l: m + np.log2(l)),
        "lse is a natural logarithm, np.log: see section 4.",
    ),
    Mistake(
        "lse is 0 instead of -inf while no key was visible",
        _wrong_attend(lse_of=lambda m, l: m + np.log(l) if l > 0 else 0.0),
        "The logarithm of an empty sum is -inf, and m + np.log(l) gives it: see the end of section 7.",
    ),
    Mistake(
        "p is measured from the tile's own maximum, in another unit than the sums that it is added to",
        _wrong_attend(own_unit=True),
        "p = e^(s - m_new), with the maximum of all keys so far: see section 3.",
    ),
    Mistake(
        "the exponentials are taken to base two",
        _wrong_attend(exp=np.exp2),
        "A softmax takes e to the power of s, np.exp: see section 1.",
    ),
    Mistake(
        "every tile takes its values from the first rows of v",
        _wrong_attend(values_of=lambda v, start, stop: v[: min(stop, len(v)) - start]),
        "The slice of v is that of s: start to start + block_k.",
    ),
    Mistake(
        "p uses the old m, which is -inf before the first tile",
        _wrong_attend(old_max_in_p=True, guard_old=False),
        "The new exponentials must be in the new units, e^(s - m_new): see section 3.",
    ),
    Mistake(
        "each tile is answered on its own, without the keys before it",
        _tiles_apart,
        "l, acc and m stand for all keys so far: start them before the loop, and rescale them in it.",
    ),
    Mistake(
        "a tile of masked keys is recorded as an empty row, although earlier keys were visible",
        lambda s, v, block_k: _where_masked(s, v, block_k, (0.0, -np.inf)),
        "Such a tile changes nothing, so the answer stays that of the tile before: see section 7.",
    ),
    Mistake(
        "a tile of masked keys leaves no record",
        lambda s, v, block_k: _where_masked(s, v, block_k, None),
        "One row of out and one lse are asked for each tile, masked or not.",
    ),
    Mistake(
        "m itself becomes 0 in a masked tile, and later logits near -1000 vanish",
        _wrong_attend(choose=lambda m, largest: 0.0 if max(m, largest) == -np.inf else max(m, largest)),
        "Only the reference is replaced; m stays -inf until a key is visible: see section 7.",
    ),
    Mistake(
        "NaN is turned into 0 at the end, and with it the keys that come after a masked tile",
        _nan_to_zero,
        "Once l and acc are NaN they stay so: keep NaN out with a reference of 0, see section 7.",
    ),
    Mistake(
        "lse is m · log l, a product instead of a sum",
        _wrong_attend(lse_of=lambda m, l: m * np.log(l)),
        "lse = m + log l: see section 4.",
    ),
    Mistake(
        "lse is e^m · l, without the logarithm",
        _wrong_attend(lse_of=lambda m, l: np.exp(m) * l),
        "lse = m + log l, the logarithm of that product: see section 4.",
    ),
    Mistake(
        "masked keys get a large negative logit instead of -inf",
        _wrong_attend(mask_value=-1e9),
        "A tile with nothing but masked keys then counts as a tile of equal keys: see section 7.",
        variants=tuple(_wrong_attend(mask_value=-(10.0**power)) for power in (4, 5, 6, 10, 20, 30)),
    ),
)


# 2.5


def _lse_cases():
    random = np.random.default_rng(25)

    def case(label, rows, a, b, H, shift_a=0.0, shift_b=0.0, hidden=((), ())):
        s_a = 2 * random.standard_normal((rows, a)) + shift_a
        s_b = 2 * random.standard_normal((rows, b)) + shift_b
        for s, empty in zip((s_a, s_b), hidden, strict=True):
            s[list(empty)] = -np.inf
        v = random.standard_normal((a + b, H))
        return Case(f"{label}, rows={rows}, H={H}", (s_a, v[:a], s_b, v[a:]))

    return [
        Case("the hand case", (HAND_S[None, :2], HAND_V[:2], HAND_S[None, 2:], HAND_V[2:])),
        case("1 and 6 keys", 3, 1, 6, 2),
        case("6 and 1 keys", 4, 6, 1, 3),
        case("larger logits in a", 3, 2, 5, 4, shift_a=5.0),
        case("logits near 1000", 2, 3, 4, 3, 1000.0, 1000.0),
        case("logits near -1000", 2, 3, 4, 3, -1000.0, -1000.0),
        case("a saw no key", 3, 0, 4, 2),
        case("neither saw a key", 2, 0, 0, 3),
        case("rows near -1000, 0 and 1000", 3, 3, 2, 2, LEVELS, LEVELS),
        case("row 0 of a and row 1 of b saw no key", 3, 3, 4, 2, hidden=[(0,), (1,)]),
        case("rows 0 and 1 of a and row 1 of b saw no key", 3, 3, 4, 2, hidden=[(0, 1), (1,)]),
    ]


def _run_lse(answer, s_a, v_a, s_b, v_b):
    return answer(*_out_and_lse(s_a, v_a), *_out_and_lse(s_b, v_b))


def _expected_lse(s_a, v_a, s_b, v_b):
    return _out_and_lse(np.concatenate([s_a, s_b], axis=-1), np.concatenate([v_a, v_b]))


def _safe(lse):
    return np.where(lse == -np.inf, 0, lse)


def _by_weights(weights, lse=lambda lse_a, lse_b: np.logaddexp(lse_a, lse_b)):
    """An answer that weighs the two outputs by weights(lse_a, lse_b)."""

    def answer(out_a, lse_a, out_b, lse_b):
        w_a, w_b = weights(lse_a, lse_b)
        return w_a[:, None] * out_a + w_b[:, None] * out_b, lse(lse_a, lse_b)

    return answer


def _softmax_pair(lse_a, lse_b):
    lse = _safe(np.logaddexp(lse_a, lse_b))
    return np.exp(lse_a - lse), np.exp(lse_b - lse)


def _not_normalised(lse_a, lse_b):
    m = _safe(np.maximum(lse_a, lse_b))
    return np.exp(lse_a - m), np.exp(lse_b - m)


def _plain_pair(lse_a, lse_b):
    w_a, w_b = np.exp(lse_a), np.exp(lse_b)
    return w_a / (w_a + w_b), w_b / (w_a + w_b)


def _unguarded(lse_a, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    return np.exp(lse_a - lse), np.exp(lse_b - lse)


def _ratio(lse_a, lse_b):
    return lse_a / (lse_a + lse_b), lse_b / (lse_a + lse_b)


def _unguarded_lse(lse_a, lse_b):
    m = np.maximum(lse_a, lse_b)
    return m + np.log(np.exp(lse_a - m) + np.exp(lse_b - m))


def _part_dropped_for_one_row(out_a, lse_a, out_b, lse_b):
    if np.isinf(lse_a).any():
        return out_b, lse_b
    return (out_a, lse_a) if np.isinf(lse_b).any() else _by_weights(_softmax_pair)(out_a, lse_a, out_b, lse_b)


LSE_MISTAKES = (
    Mistake(
        "the two outputs are averaged",
        _by_weights(lambda a, b: (np.full_like(a, 0.5), np.full_like(b, 0.5))),
        "A part counts by the size of its exponentials, e^lse: see section 8.",
    ),
    Mistake(
        "the two outputs are added",
        _by_weights(lambda a, b: (np.ones_like(a), np.ones_like(b))),
        "Each output is already divided by its own sum; weigh it before you add: see section 8.",
    ),
    Mistake(
        "the weights are swapped",
        _by_weights(lambda a, b: _softmax_pair(b, a)),
        "The part with the larger lse has the larger weight: see section 8.",
    ),
    Mistake(
        "the weights are the lse themselves, without the exponential",
        _by_weights(_ratio),
        "lse is a logarithm; the weights are in proportion to e^lse: see section 8.",
    ),
    Mistake(
        "the weights do not add up to one",
        _by_weights(_not_normalised),
        "Subtract the lse of the whole row, not the larger of the two: see section 8.",
    ),
    Mistake(
        "e^lse is taken without subtracting anything",
        _by_weights(_plain_pair, lse=lambda a, b: np.log(np.exp(a) + np.exp(b))),
        "e^lse overflows exactly as e^s does; only differences are safe: see section 1.",
    ),
    Mistake(
        "the larger part wins: the smaller one is dropped",
        _by_weights(lambda a, b: (np.where(a >= b, 1.0, 0.0), np.where(b > a, 1.0, 0.0))),
        "Both parts count, in proportion to e^lse: see section 8.",
    ),
    Mistake(
        "the weights are powers of two",
        _by_weights(
            lambda a, b: (np.exp2(a - _safe(np.logaddexp(a, b))), np.exp2(b - _safe(np.logaddexp(a, b)))),
        ),
        "lse is a natural logarithm, so the weights are e^(lse_part - lse), np.exp: see section 8.",
    ),
    Mistake(
        "everything is in base two",
        _by_weights(
            lambda a, b: (np.exp2(a - _safe(np.logaddexp2(a, b))), np.exp2(b - _safe(np.logaddexp2(a, b)))),
            lse=np.logaddexp2,
        ),
        "lse is a natural logarithm: np.exp and np.logaddexp, see section 8.",
    ),
    Mistake(
        "the two lse are averaged",
        _by_weights(_softmax_pair, lse=lambda a, b: (a + b) / 2),
        "lse = log(e^lse_a + e^lse_b) is never below the larger of the two: see section 8.",
    ),
    Mistake(
        "the two lse are added",
        _by_weights(_softmax_pair, lse=lambda a, b: a + b),
        "Sums of exponentials add, their logarithms do not: see section 8.",
    ),
    Mistake(
        "the larger lse is taken for the lse of the row",
        _by_weights(_softmax_pair, lse=np.maximum),
        "lse = log(e^lse_a + e^lse_b) is larger than both where both saw a key: see section 8.",
    ),
    Mistake(
        "-inf is subtracted from -inf where neither part saw a key",
        _by_weights(_unguarded),
        "Use 0 as the reference there: see section 7.",
        variants=(_by_weights(_unguarded, lse=_unguarded_lse),),
    ),
    Mistake(
        "the weights are e^lse, not divided by their sum",
        _by_weights(lambda a, b: (np.exp(a), np.exp(b))),
        "Subtract the lse of the whole row, so that the weights add up to one: see section 8.",
    ),
    Mistake(
        "the weights are safe, but lse comes from e^lse itself, which overflows or vanishes",
        _by_weights(_softmax_pair, lse=lambda a, b: np.log(np.exp(a) + np.exp(b))),
        "np.logaddexp works with the difference only: see hint 1.",
    ),
    Mistake(
        "lse is safe, but the weights come from e^lse itself, which overflows or vanishes",
        _by_weights(_plain_pair),
        "Subtract the lse of the whole row before the exponential: see section 8.",
    ),
    Mistake(
        "the larger lse is taken for that of the row, in the weights too",
        _by_weights(_not_normalised, lse=np.maximum),
        "lse = log(e^lse_a + e^lse_b), and the weights then add up to one: see section 8.",
    ),
    Mistake(
        "out is right and lse is in base two",
        _by_weights(_softmax_pair, lse=np.logaddexp2),
        "lse is a natural logarithm: np.logaddexp, see section 8.",
    ),
    Mistake(
        "lse is e^lse_a + e^lse_b, without the logarithm",
        _by_weights(_softmax_pair, lse=lambda a, b: np.exp(a) + np.exp(b)),
        "lse is the logarithm of that sum, and np.logaddexp takes it without overflow: see hint 1.",
    ),
    Mistake(
        "lse is 0 instead of -inf where neither part saw a key",
        _by_weights(_softmax_pair, lse=lambda a, b: _safe(np.logaddexp(a, b))),
        "0 is a reference for the weights only; np.logaddexp gives the right lse: see section 7.",
    ),
    Mistake(
        "lse is NaN where neither part saw a key, from -inf - (-inf)",
        _by_weights(_softmax_pair, lse=_unguarded_lse),
        "Use 0 as the reference there: see section 7.",
    ),
    Mistake(
        "a whole part is dropped because it saw no key in one of the rows",
        _part_dropped_for_one_row,
        "Which part is empty may differ from row to row: np.where decides for each row, see hint 2.",
    ),
)


EXERCISES = (
    Exercise(
        number="2.1",
        title="The update",
        outputs=("m", "l", "acc"),
        cases=_update_cases,
        run=_run_update,
        expected=_expected_update,
        tried="tiles of 2 to 5 keys, maximum first, in the middle and last, logits near 1000 and -1000, a steep rise",
        mistakes=UPDATE_MISTAKES,
    ),
    Exercise(
        number="2.2",
        title="Merge two states",
        outputs=("m", "l", "acc"),
        cases=_merge_cases,
        run=_run_merge,
        expected=_expected_merge,
        tried="1 to 5 rows, either part the larger, either part empty, logits near 1000 and -1000",
        mistakes=MERGE_MISTAKES,
    ),
    Exercise(
        number="2.3",
        title="Break the shortcuts",
        outputs=("rows",),
        cases=_break_cases,
        run=_run_break,
        judge=_judge_break,
        tried="each row breaks its shortcut, and no other that it could spare",
        mistakes=BREAK_MISTAKES,
    ),
    Exercise(
        number="2.4",
        title="One pass, and the answer after every tile",
        outputs=("out", "lse"),
        cases=_attend_cases,
        expected=_expected_attend,
        tried="ragged and masked tiles, maximum first, in the middle and last, jumps of 1000 up and down",
        mistakes=ATTEND_MISTAKES,
    ),
    Exercise(
        number="2.5",
        title="Merge by lse",
        outputs=("out", "lse"),
        cases=_lse_cases,
        run=_run_lse,
        expected=_expected_lse,
        tolerance=2e-4,  # float32 rounds an lse near 1000 to four digits behind the point
        tried="uneven parts, logits near 1000 and -1000, parts that saw no key",
        mistakes=LSE_MISTAKES,
    ),
)
