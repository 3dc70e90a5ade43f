"""The exercises of notebook 01."""

import functools
import math

import numpy as np

from helpers.exercises import oracles
from helpers.exercises.exercise import Case, Exercise
from helpers.exercises.watched import without
from helpers.instruments import cost, roofline
from helpers.instruments.cost import naive_footprint


def causal_attention(q, k, v, is_causal):
    """Attention of one head: (T, H). q: (T, H), k and v: (S, H), is_causal: bool."""
    s = q @ k.T / np.sqrt(q.shape[-1])
    if is_causal:
        seen = np.arange(len(k))[None, :] <= np.arange(len(q))[:, None]
        s = np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True)


def _attention_cases():
    random = np.random.default_rng(11)
    by_hand = (np.array([[5.0], [1.0]]), np.log([[1.0], [3.0]]), np.array([[2.0], [6.0]]), True)
    yield Case("the case worked by hand", by_hand)
    # Few shapes, because an answer in jax.numpy is compiled for each of them.
    for T, S, H, is_causal in [(3, 5, 2, False), (3, 5, 2, True), (6, 4, 3, True), (5, 5, 64, True)]:
        q, k, v = (random.standard_normal(shape) for shape in ((T, H), (S, H), (S, H)))
        yield Case(f"T={T}, S={S}, H={H}, {'causal' if is_causal else 'no mask'}", (q, k, v, is_causal))

    # Multiples of 1/4, so that these logits are exact in float32 too.
    q, v = np.zeros((5, 64)), random.standard_normal((5, 64))
    q[:, 0] = -400
    down, rising = np.zeros((5, 64)), np.zeros((5, 64))
    down[:, 0] = [40, 39.75, 40.25, 39.5, 40.5]
    rising[:, 0] = [-22, 20, 0.25, 0.5, 60]
    steep = q * np.array([[1.0], [-1.0], [0.0], [0.125], [-0.125]])
    equal, values = random.standard_normal((3, 2)), math.sqrt(2) * random.standard_normal((5, 2))
    yield Case("every logit near -2000, causal", (q, down, v, True))
    yield Case("the largest logit, 3000, masked", (-q, rising, v, True))
    yield Case("rows of very different size", (steep, down, v, False))
    yield Case("equal keys", (equal, np.ones((5, 2)), values, True))


ATTENTION = Exercise(
    causal_attention, "Attention with scale and causal mask", outputs=("out",), cases=_attention_cases,
    expected=lambda q, k, v, is_causal: oracles.attention(q, k, v, is_causal=is_causal)[0],
).with_mistakes(
    ("a query sees one key too many, the one after its own position", "[:, None]", "[:, None] + 1",
     "Query i sees keys j ≤ i; np.triu with k=1 begins right after the diagonal: reread section 3."),
    ("the mask is aligned with the last query and the last key", "[:, None]", "[:, None] + len(k) - len(q)",
     "Query i sees keys j ≤ i, both counted from the start, whatever T and S are: reread section 3."),
    ("the weights are masked after the softmax, so that they no longer sum to one",
     ("        s = np.where(seen, s, -np.inf)\n", "return p @ v / p.sum(axis=-1, keepdims=True)"),
     ("", "p = p / p.sum(axis=-1, keepdims=True)\n    return (np.where(seen, p, 0) if is_causal else p) @ v"),
     "Mask the logits, before the exponentials are summed: reread section 3."),
    ("the softmax runs over the queries instead of the keys",
     ("axis=-1", "p @ v / p.sum(axis=0, keepdims=True)"), ("axis=0", "p / p.sum(axis=0, keepdims=True) @ v"),
     "The weights of one query, a row, must sum to one: reread section 1."),
    *((f"the scale is made of the number of {rows} instead of H", "q.shape[-1]", f"len({rows[0]})",
       "H is the length of one of them: reread section 1.") for rows in ("queries", "keys")),
    ("the largest logit is not subtracted, and large exponentials overflow or vanish",
     " - s.max(axis=-1, keepdims=True)", "", "Subtract each row's maximum before the exponential: reread section 1."),
)  # fmt: skip


def bill(T, S, H, itemsize):
    """What naive attention costs: {"flops": operations, "bytes": bytes moved}."""
    tables = 4 * T * S
    matrices = 2 * T * H + 2 * S * H
    return {"flops": 4 * T * S * H, "bytes": itemsize * (tables + matrices)}


BILL = Exercise(
    bill, "FLOPs and bytes by hand", outputs=("the bill",), run=functools.partial(without, cost),
).with_cases(
    "T S H itemsize", ("the case worked by hand", 2, 3, 4, 2), (1, 5, 3, 4), (6, 2, 8, 1), (1024, 384, 64, 4),
    (4096, 4096, 128, 2),
).with_mistakes(
    ("only the tables are multiplied by itemsize", "(tables + matrices)", "tables + matrices",
     "Every array has elements of itemsize bytes: put brackets around the sum."),
    ("each table is counted once, as if what was written came back for nothing", "tables = 4", "tables = 2",
     "What one step writes, the next one must read: reread section 5."),
)  # fmt: skip


def longest(memory, heads, H, itemsize):
    """The largest T = S for which naive attention fits in memory bytes, or 0."""
    T = 0
    while heads * (8 * (T + 1) ** 2 + 4 * itemsize * (T + 1) * H) <= memory:
        T += 1
    return T


FIT = Exercise(longest, "The longest sequence that fits", outputs=("T",)).with_cases(
    "memory heads H itemsize", ("the case worked by hand", 64, 1, 2, 2),
    ("one byte less than the case worked by hand", 63, 1, 2, 2), ("less than one query needs", 10, 1, 2, 2),
    (1000, 2, 3, 4), (21490815, 16, 64, 2),
    ("just enough for T=100 with 3 heads", 3 * naive_footprint(100, 100, 64, 2), 3, 64, 2),
    (roofline.T4.memory, 1, 64, 4), (roofline.RTX_4090.memory, 32, 128, 2), (roofline.H200.memory, 128, 256, 2),
).with_mistakes(
    ("q, k, v and out are forgotten", " + 4 * itemsize * (T + 1) * H", "",
     "The four small matrices must fit too: reread section 6."),
    ("the footprint of one head is taken for that of all of them", "heads * (", "(",
     "All heads are in memory at once: multiply by their number, see the exercise."),
    ("one table is counted instead of two", "8 * (T", "4 * (T",
     "A step reads one table while it writes the next, so two are alive: reread section 6."),
    ("the tables are given elements of itemsize bytes, like q, k and v", "8 * (T", "2 * itemsize * (T",
     "The helper keeps both tables in float32, whatever the inputs are: reread section 6."),
)  # fmt: skip

EXERCISES = (ATTENTION, BILL, FIT)
