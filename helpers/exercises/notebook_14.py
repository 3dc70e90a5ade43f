"""The exercises of notebook 14: merge parts, turn the ring, who has work and what, gradients of a part, hidden hops."""

import functools
from dataclasses import replace

import numpy as np

from helpers.attention.public import ring
from helpers.exercises.comparing import plain
from helpers.exercises.exercise import Case, Complaint, Exercise
from helpers.exercises.notebook_02 import MERGE_BY_LSE
from helpers.exercises.watched import without


def merge_shares(out_a, lse_a, out_b, lse_b):
    """(out, lse) of two disjoint sets of keys together: (T, H) and (T,)."""
    lse = np.logaddexp(lse_a, lse_b)
    reference = np.where(lse == -np.inf, 0.0, lse)
    w_a, w_b = np.exp(lse_a - reference), np.exp(lse_b - reference)
    return w_a[:, None] * out_a + w_b[:, None] * out_b, lse


MERGE = replace(MERGE_BY_LSE, solution=merge_shares, title="Two parts of a sum")


def turn_the_ring(queries, keys, values, attend, merge):
    """The result of every device: a list of D arrays (rows, H)."""
    D = len(queries)
    results = []
    for i in range(D):
        out, lse = attend(queries[i], keys[i], values[i])
        for r in range(1, D):
            j = (i - r) % D
            out, lse = merge(out, lse, *attend(queries[i], keys[j], values[j]))
        results.append(out)
    return results


def _attend(query, key, value):
    """(out, lse) of attention of one head, unscaled."""
    s = query @ key.T
    lse = np.logaddexp.reduce(s, axis=1)
    return np.exp(s - lse[:, None]) @ value, lse


def _ring_cases():
    for D, T, S, H in ((1, 2, 2, 2), (2, 2, 2, 2), (3, 2, 4, 3), (4, 3, 2, 5), (5, 1, 3, 2), (8, 2, 2, 4)):
        random = np.random.default_rng([14, 2, D])
        shares = tuple(list(random.standard_normal((D, rows, H))) for rows in (T, S, S))
        yield Case(f"{D} device{'s' * (D > 1)}, {T} queries and {S} keys each, H={H}", shares)


def _run_ring(answer, queries, keys, values):
    calls = []

    def attend(query, key, value):
        if not len(key) == len(value) == len(keys[0]):
            raise Complaint(f"keys and values of length {len(key)} and {len(value)}; a share has {len(keys[0])}")
        calls.append(len(key))
        return _attend(np.asarray(query) / 2, *map(np.asarray, (key, value)))  # halved: no attention but this

    results = plain(answer(queries, keys, values, attend, merge_shares))
    if len(calls) < len(queries):
        raise Complaint("`attend` was hardly called: through it alone a device sees keys, one share at a time")
    return results


RING = Exercise(
    turn_the_ring, "Turn the ring", outputs=("out of every device",), cases=_ring_cases, run=_run_ring,
    expected=lambda *shares: np.array(_run_ring(turn_the_ring, *shares)),
).with_mistakes(
    ("a step is missing: one share of the keys is never seen", "range(1, D)", "range(1, D - 1)",
     "D devices need D steps, their own keys among them: see section 3."),
    ("the values stay at home", "values[j]", "values[i]", "A value travels with its key: see section 3."),
    ("the parts are averaged", ("out, lse = merge(out, lse, *", "[j]))", "append(out)"),
     ("out = out + ", "[j])[0]", "append(out / D)"),
     "Parts of different weight are merged by their lse: see section 2."),
    ("a share is overwritten before it is handed on", "(i - r) % D", "0",
     "All devices send at the same time: make a new list, such as keys[-1:] + keys[:-1]."),
    ("a device counts its own share twice", "range(1, D)", "range(D)",
     "D devices need D steps, their own keys among them: see section 3."),
    ("nothing travels", "(i - r) % D", "i", "Hand keys and values on after each step: see section 3."),
)  # fmt: skip


def count_pairs(owned):
    """(D, D) integers: pairs in step r (row) of device i (column)."""
    D = len(owned)
    table = np.zeros((D, D), int)
    for r in range(D):
        for i in range(D):
            queries, keys = owned[i], owned[(i - r) % D]
            table[r, i] = (keys[None, :] <= queries[:, None]).sum()
    return table


WORK = Exercise(count_pairs, "Who has work", outputs=("pairs",)).with_cases(
    "owned", *(
        (f"{layout}, {D} devices, {share} positions each", [ring.positions(layout, D, share, i) for i in range(D)])
        for layout, D, share in (("contiguous", 2, 2), ("contiguous", 3, 2), ("contiguous", 4, 5),
                                 ("striped", 3, 4), ("striped", 5, 3), ("zigzag", 3, 4), ("zigzag", 4, 6))
    ),
    ("three devices, positions at random", list(np.random.default_rng(14).permutation(12).reshape(3, 4))),
).with_mistakes(
    ("queries see the keys behind them", "<=", ">=", "A query at a sees the key at b if b ≤ a: see hint 1."),
    ("nothing is masked", "(keys[None, :] <= queries[:, None]).sum()", "keys.size * queries.size",
     "Count only the pairs in which the query may see the key: see section 5."),
    ("the steps are added up", "return table", "return table.sum(axis=0)",
     "Devices wait for each other in every step, so each step has a row of its own: return (D, D)."),
    ("every step is masked like the first", "owned[(i - r) % D]", "owned[i]",
     "Compare with the positions of the keys that visit, those of device i - r: see hint 2."),
)  # fmt: skip


def zigzag(devices, share, device):
    """The positions of a device, rising: integers (share,)."""
    half = share // 2
    early, late = device, 2 * devices - 1 - device
    within = np.arange(half)
    return np.concatenate([early * half + within, late * half + within])


ZIGZAG = Exercise(zigzag, "Zigzag", outputs=("positions",), run=functools.partial(without, ring)).with_cases(
    "devices share device",
    *((D, share, device) for D, share in ((4, 4), (1, 6), (2, 2), (3, 8), (4, 10), (8, 4))
      for device in sorted({0, D // 2, D - 1})),
).with_mistakes(
    ("every device has a contiguous share",
     "np.concatenate([early * half + within, late * half + within])", "device * share + np.arange(share)",
     "That is the contiguous layout: two pieces of half the share, see section 5."),
    ("the second piece is the i-th of the second half", "2 * devices - 1 - device", "devices + device",
     "Then the last device has the last piece of each half, and the most work: it is mirrored, see section 5."),
    ("pieces begin at multiples of `share`, not of half as many", "* half", "* share",
     "There are 2D pieces for D shares, so a piece is half a share: see section 5."),
)  # fmt: skip


def part_gradients(q, k, v, do, lse, delta, scale):
    """(dq, dk, dv) of a share of the keys; lse and delta are of all."""
    p = np.exp(scale * q @ k.T - lse[:, None])
    dp = do @ v.T
    ds = p * (dp - delta[:, None])
    return scale * ds @ k, scale * ds.T @ q, p.T @ do


def _gradient_cases():
    for number, (T, S, keys, H, scale, level) in enumerate([
        (2, 1, 3, 1, 1.0, 0), (3, 2, 6, 2, 0.7, 0), (5, 4, 8, 4, 0.5, 0), (4, 6, 7, 3, 1.3, 0), (4, 3, 9, 4, 0.5, 800),
        (3, 4, 8, 2, 0.7, -800), (2, 3, 3, 2, 0.9, 0),
    ]):  # fmt: skip
        random = np.random.default_rng([14, 5, number])
        q, do = random.standard_normal((2, T, H))
        k, v = random.standard_normal((2, keys, H))
        if level:  # all logits are about that
            q[:, 0], k[:, 0] = level, 1 / scale
        out, lse = _attend(scale * q, k, v)
        label = f"T={T}, S={S} of {keys} keys, H={H}, logits near {level}"
        yield Case(label, (q, k[:S], v[:S], do, lse, (out * do).sum(axis=1), scale))


GRADIENTS = Exercise(
    part_gradients, "Gradients of a part", outputs=("dq", "dk", "dv"), cases=_gradient_cases, tolerance=1e-4,
).with_mistakes(
    ("the weights are those of a softmax over the part",
     "    p = ", "    lse = np.logaddexp.reduce(scale * q @ k.T, axis=1)\n    p = ",
     "They must be those over all keys: p = exp(s - lse) with the final lse, see section 6."),
    ("delta is made from the part", "    ds = ", "    delta = (p * dp).sum(axis=1)\n    ds = ",
     "delta is a sum of p * dp over all keys, not over the part: take the delta that was given, see section 6."),
    ("exp(s) is divided by exp(lse)", " - lse[:, None])", ") / np.exp(lse)[:, None]",
     "Both overflow or vanish: subtract before the exponential, see section 6."),
    ("dq and dk lack the factor scale", ("scale * ds @ k", "scale * ds.T @ q"), ("ds @ k", "ds.T @ q"),
     "The logits are scale times q kᵀ, and so are their slopes: see section 6."),
    ("p and delta are both made from the part, as if there were no other keys", ("    p = ", "    ds = "),
     ("    lse = np.logaddexp.reduce(scale * q @ k.T, axis=1)\n    p = ",
      "    delta = (p * dp).sum(axis=1)\n    ds = "),
     "Take the lse and the delta that were given, those over all keys: see section 6."),
)  # fmt: skip


def shortest_share(N, K, itemsize, flops, bandwidth):
    """The least number of positions of a share that hides a hop."""
    t = itemsize * K * flops / (2 * N * bandwidth)
    return int(-(-t // 1))


SHARE = Exercise(shortest_share, "How long must a share be?", outputs=("positions",)).with_cases(
    "N K itemsize flops bandwidth", (1, 1, 2, 100.0, 10.0), (16, 16, 2, 700e12, 150e9), (32, 8, 2, 700e12, 150e9),
    (8, 1, 2, 400e12, 25e9), (12, 4, 4, 60e12, 49e9), (16, 16, 1, 1.3e15, 400e9), (5, 5, 2, 123e12, 7e9),
    (1, 1, 2, 10.0, 100.0),
).with_mistakes(
    ("only the keys travel", "2 * N", "4 * N", "Values travel too: two arrays, see section 7."),
    ("work is half of what it is, or a hop twice", "2 * N", "N",
     "Two products of 2H operations a pair, all pairs: see section 7."),
)  # fmt: skip

EXERCISES = (MERGE, RING, WORK, ZIGZAG, GRADIENTS, SHARE)
