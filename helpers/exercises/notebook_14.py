"""The exercises of notebook 14: merge parts, turn the ring, who has work and what, gradients of a part, hidden hops."""

import functools
import math

import numpy as np

from helpers.attention.ring import positions
from helpers.exercises.checking import Case, Complaint, Exercise, Mistake

# 14.1 Two parts of a sum


def _merge(out_a, lse_a, out_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    reference = np.where(lse == -np.inf, 0, lse)
    weight_a, weight_b = (np.exp(part - reference)[:, None] for part in (lse_a, lse_b))
    return weight_a * out_a + weight_b * out_b, lse


def _weighted(out_a, lse_a, out_b, lse_b, weigh, lse=None):
    """A merge with other weights of the parts, and another lse."""
    weight_a, weight_b = weigh(lse_a, lse_b)
    lse = np.logaddexp(lse_a, lse_b) if lse is None else lse(lse_a, lse_b)
    return np.asarray(weight_a)[..., None] * out_a + np.asarray(weight_b)[..., None] * out_b, lse


def _right_weights(lse_a, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    reference = np.where(lse == -np.inf, 0, lse)
    return np.exp(lse_a - reference), np.exp(lse_b - reference)


def _by_lse(lse_a, lse_b):
    """As if lse were the sum and not its logarithm."""
    return lse_a / (lse_a + lse_b), lse_b / (lse_a + lse_b)


def _with(weigh, **options):
    return functools.partial(_weighted, weigh=weigh, **options)


def _of_parts(T, H, parts, seed):
    """(out, lse) for each part: parts are what its logits lie near, of all rows or of each, or None without a key."""
    random = np.random.default_rng([14, seed])
    for height in parts:
        out, lse = random.standard_normal((T, H)), random.standard_normal(T)
        lse = np.full(T, -np.inf) if height is None else lse + height
        yield np.where(lse[:, None] == -np.inf, 0, out), lse


def _merge_cases():
    hand = (np.array([[7 / 4]]), np.log([4.0]), np.array([[3.8]]), np.log([10.0]))
    cases = [Case("the case worked by hand", hand)]
    for label, T, H, heights in (
        ("T=3, H=2", 3, 2, (0, 0)),
        ("T=5, H=4, the second part heavier", 5, 4, (0, 3)),
        ("T=5, H=4, the first part heavier", 5, 4, (2, -1)),
        ("T=4, H=3, logits near 1000", 4, 3, (1000, 1001)),
        ("T=4, H=3, logits near -1000", 4, 3, (-1000, -999)),
        ("T=4, H=3, logits near -1000 and near 1000", 4, 3, (-1000, 1000)),
        ("T=3, H=2, no key in the first part", 3, 2, (None, 0)),
        ("T=3, H=2, no key in the second part", 3, 2, (0, None)),
        ("T=3, H=2, no key at all", 3, 2, (None, None)),
    ):
        (out_a, lse_a), (out_b, lse_b) = _of_parts(T, H, heights, len(cases))
        cases.append(Case(label, (out_a, lse_a, out_b, lse_b)))
    levels = np.array([1000.0, 0, -1000, 1000, -1000])
    (out_a, lse_a), (out_b, lse_b) = _of_parts(5, 2, (levels, levels + 1), 98)
    cases.append(Case("T=5, H=2, logits near 1000, 0 and -1000 in different rows", (out_a, lse_a, out_b, lse_b)))
    (out_a, lse_a), (out_b, lse_b) = _of_parts(4, 2, (0, 0), 99)
    out_a[0], lse_a[0], out_b[1], lse_b[1] = 0, -np.inf, 0, -np.inf
    out_a[2], lse_a[2], out_b[2], lse_b[2] = 0, -np.inf, 0, -np.inf
    cases.append(
        Case("T=4, H=2, rows without a key in the first part, in the second, in both", (out_a, lse_a, out_b, lse_b))
    )
    return cases


def _unguarded(out_a, lse_a, out_b, lse_b):
    with np.errstate(all="ignore"):
        lse = np.logaddexp(lse_a, lse_b)
        return np.exp(lse_a - lse)[:, None] * out_a + np.exp(lse_b - lse)[:, None] * out_b, lse


def _unguarded_maximum(out_a, lse_a, out_b, lse_b):
    m = np.maximum(lse_a, lse_b)
    weight_a, weight_b = np.exp(lse_a - m), np.exp(lse_b - m)
    l = weight_a + weight_b
    return (weight_a / l)[:, None] * out_a + (weight_b / l)[:, None] * out_b, m + np.log(l)


def _one_maximum(out_a, lse_a, out_b, lse_b, guarded=True):
    m = max(lse_a.max(), lse_b.max())
    m = 0 if m == -np.inf else m
    a, b = np.exp(lse_a - m), np.exp(lse_b - m)
    total = np.where(a + b == 0, 1, a + b) if guarded else a + b
    with np.errstate(all="ignore"):
        return (a / total)[:, None] * out_a + (b / total)[:, None] * out_b, m + np.log(a + b)


def _overflows(out_a, lse_a, out_b, lse_b, guarded=True):
    with np.errstate(all="ignore"):
        a, b = np.exp(lse_a), np.exp(lse_b)
        total = np.where(a + b == 0, 1, a + b) if guarded else a + b
        return (a / total)[:, None] * out_a + (b / total)[:, None] * out_b, np.log(a + b)


MERGE = Exercise(
    number="14.1",
    title="Two parts of a sum",
    outputs=("out", "lse"),
    cases=_merge_cases,
    expected=_merge,
    tolerance=1e-4,
    tried="parts of different weight, logits near 1000 and -1000, rows without a key in one part and in both",
    mistakes=(
        Mistake(
            "-inf is subtracted from -inf in a row that sees no key in either part",
            _unguarded,
            "Where both lse are -inf, subtract 0 instead: see section 2.",
            variants=(_unguarded_maximum,),
        ),
        Mistake(
            "exp(lse) is computed as it is",
            _overflows,
            "Near 1000 it overflows, near -1000 it is 0: subtract the merged lse first, see section 2.",
            variants=(
                functools.partial(_overflows, guarded=False),
                _with(_right_weights, lse=lambda a, b: np.log(np.exp(a) + np.exp(b))),
            ),
        ),
        Mistake(
            "one maximum serves all rows",
            _one_maximum,
            "Every row has a level of its own, and far below the maximum exp is 0: subtract row by row, see section 2.",
            variants=(functools.partial(_one_maximum, guarded=False),),
        ),
        Mistake(
            "both parts count alike",
            _with(lambda a, b: (np.full(a.shape, 0.5), np.full(a.shape, 0.5))),
            "A part with a larger sum weighs more: exp(lse_a - lse), see section 2.",
        ),
        Mistake(
            "the parts are added without weights",
            _with(lambda a, b: (np.ones(a.shape), np.ones(a.shape))),
            "Each out is divided by its own sum already, so it must be weighted: see section 2.",
        ),
        Mistake(
            "the part with the larger lse is taken alone",
            _with(lambda a, b: (np.where(a > b, 1.0, 0.0), np.where(a > b, 0.0, 1.0))),
            "Both count, each by its share of the sum: see section 2.",
        ),
        Mistake(
            "each part gets the weight of the other",
            _with(lambda a, b: _right_weights(a, b)[::-1]),
            "out_a belongs to exp(lse_a - lse): see section 2.",
        ),
        Mistake(
            "lse is the larger of the two",
            _with(_right_weights, lse=np.maximum),
            "Sums add up: lse is the logarithm of exp(lse_a) + exp(lse_b), see section 2.",
        ),
        Mistake(
            "the two lse are added",
            _with(_right_weights, lse=np.add),
            "Sums add up, their logarithms do not: see section 2.",
        ),
        Mistake(
            "lse is taken for the sum itself",
            _with(_by_lse),
            "It is the logarithm of the sum: the weights are exponentials, see section 2.",
        ),
        Mistake(
            "lse is in base two",
            _with(_right_weights, lse=lambda a, b: np.logaddexp(a, b) / math.log(2)),
            "These are natural logarithms, in and out.",
            variants=(_with(_right_weights, lse=np.logaddexp2),),
        ),
        Mistake(
            "the larger lse is subtracted, and nothing is divided",
            _with(
                lambda a, b: tuple(
                    np.exp(x - np.where(np.maximum(a, b) == -np.inf, 0, np.maximum(a, b))) for x in (a, b)
                )
            ),
            "With the larger lse as reference the weights do not add up to 1: subtract the merged lse, see section 2.",
        ),
    ),
)


# 14.2 Turn the ring


def _attend(query, key, value):
    """(out, lse) of attention of one head, unscaled."""
    s = query @ key.T
    lse = np.logaddexp.reduce(s, axis=1)
    return np.exp(s - lse[:, None]) @ value, lse


def _ring_cases():
    cases = []
    for devices, queries, keys, H in (
        (1, 2, 2, 2),
        (2, 2, 2, 2),
        (3, 2, 4, 3),
        (4, 3, 2, 5),
        (5, 1, 3, 2),
        (8, 2, 2, 4),
    ):
        random = np.random.default_rng([14, 2, devices])
        draw = lambda rows, H=H, devices=devices, random=random: [
            random.standard_normal((rows, H)) for _ in range(devices)
        ]
        label = f"{devices} device{'s' * (devices > 1)}, {queries} queries and {keys} keys each, H={H}"
        cases.append(Case(label, (draw(queries), draw(keys), draw(keys))))
    return cases


def _run_ring(answer, queries, keys, values):
    rows = {len(key) for key in keys}

    def attend(query, key, value):
        if len(np.asarray(key)) not in rows or len(np.asarray(value)) not in rows:
            sizes = len(np.asarray(key)), len(np.asarray(value))
            raise Complaint(f"`attend` was given {sizes[0]} keys and {sizes[1]} values: it takes one share of each")
        return _attend(*(np.asarray(array, float) for array in (query, key, value)))

    return answer(queries, keys, values, attend, lambda *parts: _merge(*map(np.asarray, parts)))


def _whole(queries, keys, values):
    """Every device's queries over all keys: the right answer."""
    return np.array([_attend(query, np.concatenate(keys), np.concatenate(values))[0] for query in queries])


def _ring(queries, keys, values, attend, merge, *, held=lambda i, step, n: (i - step) % n, steps=range, of_values=None):
    devices = len(queries)
    outs = []
    for i in range(devices):
        parts = []
        for step in steps(devices):
            other = held(i, step, devices)
            parts.append(attend(queries[i], keys[other], values[of_values(i, step, devices) if of_values else other]))
        out, lse = parts[0]
        for part in parts[1:]:
            out, lse = merge(out, lse, *part)
        outs.append(out)
    return outs


def _ring_with(**options):
    return functools.partial(_ring, **options)


def _ring_not_merged(queries, keys, values, attend, merge, join=np.mean):
    devices = len(queries)
    return [join([attend(queries[i], keys[j], values[j])[0] for j in range(devices)], axis=0) for i in range(devices)]


def _ring_last_only(queries, keys, values, attend, merge, onward=1):
    others = [(i + onward) % len(queries) for i in range(len(queries))]
    return [attend(query, keys[j], values[j])[0] for query, j in zip(queries, others, strict=True)]


def _ring_overwritten(queries, keys, values, attend, merge):
    n, keys, values = len(queries), list(keys), list(values)
    states = [attend(*own) for own in zip(queries, keys, values, strict=True)]
    for _ in range(n - 1):
        for i in range(n):
            keys[(i + 1) % n], values[(i + 1) % n] = keys[i], values[i]
        states = [merge(*states[i], *attend(queries[i], keys[i], values[i])) for i in range(n)]
    return [out for out, _ in states]


def _ring_lse_forgotten(queries, keys, values, attend, merge):
    """lse of the last part stands for that of all before."""
    outs = []
    for i in range(len(queries)):
        out, lse = attend(queries[i], keys[i], values[i])
        for step in range(1, len(queries)):
            part, lse_part = attend(queries[i], keys[i - step], values[i - step])
            out, _ = merge(out, lse, part, lse_part)
            lse = lse_part
        outs.append(out)
    return outs


RING = Exercise(
    number="14.2",
    title="Turn the ring",
    outputs=("out of every device",),
    cases=_ring_cases,
    run=_run_ring,
    expected=_whole,
    tried="one to eight devices, more keys than queries and fewer",
    mistakes=(
        Mistake(
            "a step is missing: one share of the keys is never seen",
            _ring_with(steps=lambda n: range(max(1, n - 1))),
            "D devices need D steps, their own keys among them: see section 3.",
            variants=(_ring_with(steps=lambda n: range(max(1, n - 1)), held=lambda i, step, n: (i + step) % n),),
        ),
        Mistake(
            "the device's own keys are left out",
            _ring_with(steps=lambda n: range(1, n) or range(1)),
            "Step 0 is the device's own share: see section 3.",
        ),
        Mistake(
            "there is one step too many, and a share counts twice",
            _ring_with(steps=lambda n: range(n + 1)),
            "After D - 1 hops every share has been everywhere: see section 3.",
        ),
        Mistake(
            "each device stays with its own keys",
            _ring_with(held=lambda i, step, n: i),
            "Keys travel: in step r device i has those of device i - r, see section 3.",
        ),
        Mistake(
            "the keys go two devices on in each step",
            _ring_with(held=lambda i, step, n: (i - 2 * step) % n),
            "With an even number of devices that misses half of the shares: one device on, see section 3.",
        ),
        Mistake(
            "the keys travel and the values stay at home",
            _ring_with(of_values=lambda i, step, n: i),
            "A value belongs to its key, and travels with it: see section 3.",
        ),
        Mistake(
            "keys and values travel in opposite directions",
            _ring_with(of_values=lambda i, step, n: (i + step) % n),
            "A value belongs to its key, and travels with it: see section 3.",
        ),
        Mistake(
            "the parts are averaged",
            _ring_not_merged,
            "Parts of different weight are merged by their lse: see section 2.",
        ),
        Mistake(
            "the parts are added up",
            functools.partial(_ring_not_merged, join=np.sum),
            "Each part is divided by its own sum already: merge by lse, see section 2.",
        ),
        Mistake(
            "a share is overwritten before it is handed on",
            _ring_overwritten,
            "All devices send at the same time: make a new list, such as keys[-1:] + keys[:-1].",
        ),
        Mistake(
            "the results stand in reverse order",
            lambda *arguments: _ring(*arguments)[::-1],
            "Device 0 comes first.",
        ),
        Mistake(
            "only the last share is left",
            _ring_last_only,
            "Each step must be merged into what the steps before found: see section 2.",
            variants=(functools.partial(_ring_last_only, onward=-1),),
        ),
        Mistake(
            "lse is overwritten by that of the last part",
            _ring_lse_forgotten,
            "`merge` returns the lse of both: carry that one on, see section 2.",
        ),
    ),
)


# 14.3 Who has work


def _pairs(owned, *, held=lambda i, step, n: (i - step) % n, sees=np.less_equal, whole=False, turned=False):
    n = len(owned)
    table = np.zeros((n, n), int)
    for step in range(n):
        for i in range(n):
            seen = sees(owned[held(i, step, n)][None, :], owned[i][:, None])
            table[step, i] = (seen.size if seen.any() else 0) if whole else seen.sum()
    return table.T if turned else table


def _pairs_cases():
    random = np.random.default_rng(14)
    cases = [Case("the case worked by hand", ([np.array([0, 1]), np.array([2, 3])],))]
    for layout, devices, share in (
        ("contiguous", 3, 2),
        ("striped", 3, 4),
        ("zigzag", 3, 4),
        ("zigzag", 4, 6),
        ("contiguous", 4, 5),
        ("striped", 5, 3),
    ):
        owned = [positions(layout, devices, share, device) for device in range(devices)]
        cases.append(Case(f"{layout}, {devices} devices, {share} positions each", (owned,)))
    cases.append(Case("three devices, positions at random", ([*random.permutation(12).reshape(3, 4)],)))
    return cases


def _pairs_mistake(**options):
    return functools.partial(_pairs, **options)


WORK = Exercise(
    number="14.3",
    title="Who has work",
    outputs=("pairs",),
    cases=_pairs_cases,
    expected=_pairs,
    tried="three layouts, two to five devices, positions in any order",
    mistakes=(
        Mistake(
            "a query does not see its own position",
            _pairs_mistake(sees=np.less),
            "Causal attention sees keys j ≤ i: see section 5.",
        ),
        Mistake(
            "queries see the keys behind them",
            _pairs_mistake(sees=np.greater_equal),
            "A query at position a sees the key at position b if b ≤ a: in the table of hint 1 rows are queries and "
            "columns are keys.",
        ),
        Mistake(
            "nothing is masked",
            _pairs_mistake(sees=lambda cols, rows: np.ones(np.broadcast_shapes(cols.shape, rows.shape), bool)),
            "Count only the pairs in which the query may see the key: see section 5.",
        ),
        Mistake(
            "a pair of shares counts whole if any of it is seen",
            _pairs_mistake(whole=True),
            "Of a share that is partly hidden only the visible pairs count: see section 5.",
        ),
        Mistake(
            "the keys come from the device after",
            _pairs_mistake(held=lambda i, step, n: (i + step) % n),
            "In step r device i has the keys of device i - r: see section 3.",
        ),
        Mistake(
            "keys are listed by their owner, not by the step",
            _pairs_mistake(held=lambda i, step, n: step),
            "Row r is step r, in which device i has the keys of device i - r: see section 3.",
        ),
        Mistake(
            "rows are devices and columns are steps",
            _pairs_mistake(turned=True),
            "A row for each step, a column for each device.",
        ),
        Mistake(
            "the steps are added up",
            lambda owned: _pairs(owned).sum(axis=0),
            "Devices wait for each other in every step, so each step has a row of its own: return (D, D).",
            variants=(lambda owned: _pairs(owned).sum(axis=1), lambda owned: _pairs(owned).sum()),
        ),
        Mistake(
            "every step counts like the first, in which each device has its own keys",
            _pairs_mistake(held=lambda i, step, n: i),
            "Keys travel, and what is compared are positions in the whole sequence, not within a share: see section 5.",
        ),
    ),
)


# 14.4 Zigzag


def _zigzag(devices, share, device):
    return positions("zigzag", devices, share, device)


def _zigzag_with(
    devices, share, device, first=lambda n, i: i, second=lambda n, i: 2 * n - 1 - i, back=False, swap=False
):
    half = share // 2
    pieces = [np.arange(half) + half * piece(devices, device) for piece in (first, second)]
    if back:
        pieces[1] = pieces[1][::-1]
    return np.concatenate(pieces[::-1] if swap else pieces)


def _zigzag_whole_pieces(devices, share, device):
    within = np.arange(share // 2)
    return np.concatenate([device * share + within, (2 * devices - 1 - device) * share + within])


def _zigzag_mistake(**options):
    return functools.partial(_zigzag_with, **options)


ZIGZAG = Exercise(
    number="14.4",
    title="Zigzag",
    outputs=("positions",),
    cases=lambda: [
        Case(f"devices={devices}, share={share}, device={device}", (devices, share, device))
        for devices, share in ((4, 4), (1, 6), (2, 2), (3, 8), (4, 10), (8, 4))
        for device in sorted({0, devices // 2, devices - 1})
    ],
    expected=_zigzag,
    tried="one to eight devices, first, middle and last",
    mistakes=(
        Mistake(
            "every device has a contiguous share",
            lambda devices, share, device: device * share + np.arange(share),
            "That is the contiguous layout: two pieces of half the share, see section 5.",
        ),
        Mistake(
            "every device has each D-th position",
            lambda devices, share, device: device + devices * np.arange(share),
            "That is the striped layout: two pieces of half the share, see section 5.",
        ),
        Mistake(
            "the second piece is counted from 1",
            _zigzag_mistake(second=lambda n, i: 2 * n - i),
            "There are 2D pieces, 0 to 2D - 1, and the last is 2D - 1 - 0: see section 5.",
        ),
        Mistake(
            "the second piece is the i-th of the second half",
            _zigzag_mistake(second=lambda n, i: n + i),
            "Then the last device has the last piece of each half, and the most work: it is mirrored, see section 5.",
        ),
        Mistake(
            "the mirror image of piece i is taken to be -i",
            _zigzag_mistake(second=lambda n, i: -i % (2 * n)),
            "Counted from the end, pieces begin with -1: the mirror image of i is -1 - i, see section 5.",
        ),
        Mistake(
            "pieces begin at multiples of `share`, not of half as many",
            _zigzag_whole_pieces,
            "There are 2D pieces for D shares, so a piece is half a share: see section 5.",
            variants=(lambda devices, share, device: _zigzag_with(devices, 2 * share, device),),
        ),
        Mistake(
            "the second piece runs backwards",
            _zigzag_mistake(back=True),
            "Pieces are mirrored, the positions inside them are not: they rise, see section 5.",
        ),
        Mistake(
            "the late piece comes first",
            _zigzag_mistake(swap=True),
            "The positions of a device rise, so that its own keys need the usual causal mask: see section 5.",
        ),
        Mistake(
            "the second piece is mirrored among D pieces, not 2D",
            _zigzag_mistake(second=lambda n, i: n - 1 - i),
            "D devices with two pieces each: there are 2D of them, see section 5.",
        ),
    ),
)


# 14.5 Gradients of a part


def _part_gradients(
    q, k, v, do, lse, delta, scale, *, p_of=None, delta_of=None, of_q=1, of_k=1, out_scale=0, scale_of_s=1
):
    s = scale**scale_of_s * q @ k.T
    p = np.exp(s - lse[:, None]) if p_of is None else p_of(s, lse)
    dp = do @ v.T
    delta = delta if delta_of is None else delta_of(p, dp, do)
    ds = p * (dp - delta[:, None])
    dv = (p if out_scale == 0 else scale * p).T @ do
    dq, dk = scale**of_q * ds @ k, scale**of_k * ds.T @ q
    return dq, dk, dv


def _softmax(s, _):
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def _gradient_cases():
    cases = []
    for label, T, S, H, scale, keys in (
        ("T=2, S=1 of 3 keys, H=1", 2, 1, 1, 1.0, 3),
        ("T=3, S=2 of 6 keys, H=2", 3, 2, 2, 0.7, 6),
        ("T=5, S=4 of 8 keys, H=4", 5, 4, 4, 0.5, 8),
        ("T=4, S=6 of 7 keys, H=3", 4, 6, 3, 1.3, 7),
        ("T=4, S=3 of 9 keys, H=4, logits near 800", 4, 3, 4, 0.5, 9),
        ("T=3, S=4 of 8 keys, H=2, logits near -800", 3, 4, 2, 0.7, 8),
        ("T=2, S=3, which are all keys, H=2", 2, 3, 2, 0.9, 3),
    ):
        random = np.random.default_rng([14, 5, len(cases)])
        q, do = random.standard_normal((2, T, H))
        k, v = random.standard_normal((2, keys, H))
        if "near" in label:  # all logits the same number higher
            q[:, 0], k[:, 0] = 800 if "near 800" in label else -800, 1 / scale
        out, lse = _attend(scale * q, k, v)
        cases.append(Case(label, (q, k[:S], v[:S], do, lse, (out * do).sum(axis=1), scale)))
    return cases


def _gradient_mistake(**options):
    return functools.partial(_part_gradients, **options)


GRADIENTS = Exercise(
    number="14.5",
    title="Gradients of a part",
    outputs=("dq", "dk", "dv"),
    cases=_gradient_cases,
    expected=_part_gradients,
    tried="a third of the keys to all of them, several scales, logits near 800 and -800",
    tolerance=1e-4,
    mistakes=(
        Mistake(
            "the weights are those of a softmax over the part",
            _gradient_mistake(p_of=_softmax),
            "They must be those over all keys: p = exp(s - lse) with the final lse, see section 6.",
        ),
        Mistake(
            "delta is made from the part",
            _gradient_mistake(delta_of=lambda p, dp, do: (p * dp).sum(axis=1)),
            "delta is a sum of p * dp over all keys, not over the part: take the delta that was given, see section 6.",
        ),
        Mistake(
            "delta is missing",
            _gradient_mistake(delta_of=lambda p, dp, do: np.zeros(len(p))),
            "ds = p * (dp - delta): see section 6.",
        ),
        Mistake(
            "delta is added",
            functools.partial(lambda *a: _part_gradients(*a[:5], -a[5], a[6])),
            "ds = p * (dp - delta): see section 6.",
        ),
        Mistake(
            "the scale is missing in dq and dk",
            _gradient_mistake(of_q=0, of_k=0),
            "The logits are scale q kᵀ, so dq and dk have the scale as a factor: see section 6.",
        ),
        Mistake(
            "the scale is missing in dk",
            _gradient_mistake(of_k=0),
            "The logits are scale q kᵀ: dk has the scale as a factor like dq, see section 6.",
        ),
        Mistake(
            "the scale is missing in dq",
            _gradient_mistake(of_q=0),
            "The logits are scale q kᵀ: dq has the scale as a factor like dk, see section 6.",
        ),
        Mistake(
            "the scale is a factor of dv",
            _gradient_mistake(out_scale=1),
            "dv = pᵀ do: the scale is in p already, see section 6.",
        ),
        Mistake(
            "exp(s) is divided by exp(lse)",
            _gradient_mistake(p_of=lambda s, lse: np.exp(s) / np.exp(lse)[:, None]),
            "Both overflow or vanish: subtract before the exponential, see section 6.",
        ),
        Mistake(
            "the logits are not scaled",
            _gradient_mistake(scale_of_s=0),
            "The logits are scale times q kᵀ, in the exponent too: see section 6.",
        ),
        Mistake(
            "the scale is a factor of dq and dk twice",
            _gradient_mistake(of_q=2, of_k=2),
            "The logits are scale q kᵀ, so dq and dk have the scale as a factor once: see section 6.",
        ),
        Mistake(
            "p is a power of two",
            _gradient_mistake(p_of=lambda s, lse: np.exp2(s - lse[:, None])),
            "lse is a natural logarithm: p = exp(s - lse), see section 6.",
        ),
        Mistake(
            "lse is added",
            _gradient_mistake(p_of=lambda s, lse: np.exp(s + lse[:, None])),
            "p = exp(s - lse): see section 6.",
        ),
        Mistake(
            "lse is not subtracted",
            _gradient_mistake(p_of=lambda s, lse: np.exp(s)),
            "p = exp(s - lse): see section 6.",
        ),
        Mistake(
            "lse is taken for the sum, not for its logarithm",
            _gradient_mistake(p_of=lambda s, lse: np.exp(s) / lse[:, None]),
            "lse is a logarithm: p = exp(s - lse), see section 6.",
        ),
    ),
)


# 14.6 How long must a share be?


def _shortest_share(N, K, itemsize, flops, bandwidth, *, products=2, arrays=2, of_heads=None, whole=math.ceil):
    ratio = K / N if of_heads is None else of_heads(N, K)
    return whole(arrays * itemsize * ratio * flops / (2 * products * bandwidth))


def _share_cases():
    sizes = [
        (1, 1, 2, 100.0, 10.0),
        (16, 16, 2, 700e12, 150e9),
        (32, 8, 2, 700e12, 150e9),
        (8, 1, 2, 400e12, 25e9),
        (12, 4, 4, 60e12, 49e9),
        (16, 16, 1, 1.3e15, 400e9),
        (5, 5, 2, 123e12, 7e9),
        (1, 1, 2, 10.0, 100.0),
    ]
    return [
        Case(f"N={N}, K={K}, itemsize={e}, flops={flops:g}, bandwidth={rate:g}", (N, K, e, flops, rate))
        for N, K, e, flops, rate in sizes
    ]


def _share_mistake(**options):
    return functools.partial(_shortest_share, **options)


SHARE = Exercise(
    number="14.6",
    title="How long must a share be?",
    outputs=("positions",),
    cases=_share_cases,
    expected=_shortest_share,
    tried="MHA, GQA and MQA, 8, 16 and 32 bits, fast and slow links",
    mistakes=(
        Mistake(
            "only the keys travel",
            _share_mistake(arrays=1),
            "Values travel too: two arrays, see section 7.",
        ),
        Mistake(
            "only half of the operations is counted",
            _share_mistake(products=1),
            "Two products, each with a multiplication and an addition: 4 H for each pair and head, see section 7.",
        ),
        Mistake(
            "elements are counted, not bytes",
            functools.partial(lambda N, K, itemsize, *a: _shortest_share(N, K, 1, *a)),
            "An element has `itemsize` bytes: see section 7.",
        ),
        Mistake(
            "the heads do not matter",
            _share_mistake(of_heads=lambda N, K: 1),
            "All N query heads compute, K heads travel: see section 7.",
        ),
        Mistake(
            "the heads are upside down",
            _share_mistake(of_heads=lambda N, K: N / K),
            "K heads travel and N compute: fewer key heads make a shorter share do, see section 7.",
        ),
        Mistake(
            "it is rounded down",
            _share_mistake(whole=math.floor),
            "One position less, and the transfer takes longer than the work: round up.",
            variants=(_share_mistake(whole=lambda x: max(1, math.floor(x))),),
        ),
        Mistake(
            "it is rounded to the nearest",
            _share_mistake(whole=round),
            "The next smaller number would be too short: round up.",
        ),
        Mistake(
            "it is not rounded",
            _share_mistake(whole=float),
            "A share is a whole number of positions: round up.",
        ),
        Mistake(
            "a share that comes out whole is given one position more",
            _share_mistake(whole=lambda x: math.floor(x) + 1),
            "Where both times are equal nothing is waited for: a share that comes out whole is long enough.",
        ),
        Mistake(
            "the ratio of operations to bandwidth is taken as it is",
            lambda N, K, itemsize, flops, bandwidth: math.ceil(flops / bandwidth),
            "That holds for 16 bits and as many key heads as query heads: see section 7.",
        ),
        Mistake(
            "the query heads do not matter",
            _share_mistake(of_heads=lambda N, K: K),
            "All N query heads compute while K heads travel: see section 7.",
        ),
        Mistake(
            "bandwidth and operations are swapped",
            functools.partial(lambda N, K, e, flops, rate: _shortest_share(N, K, e, rate, flops)),
            "Time is operations / flops and bytes / bandwidth: see section 7.",
        ),
    ),
)

EXERCISES = (MERGE, RING, WORK, ZIGZAG, GRADIENTS, SHARE)
