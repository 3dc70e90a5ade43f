"""The exercise of notebook 00."""

import numpy as np

from helpers.attention.reference import oracle
from helpers.exercises.checking import Case, Exercise, Mistake


def _cases():
    random = np.random.default_rng(0)
    by_hand = Case("the case worked by hand", (np.ones(1), np.log([[1.0], [3.0]]), np.array([[2.0], [6.0]])))
    shapes = [(1, 1), (2, 3), (7, 4), (5, 64)]
    return [by_hand] + [
        Case(
            f"S={S}, H={H}",
            (random.standard_normal(H), random.standard_normal((S, H)), random.standard_normal((S, H))),
        )
        for S, H in shapes
    ]


def _expected(q, k, v):
    as_head = (array.astype(np.float32).reshape(-1, 1, len(q)) for array in (q, k, v))
    out, _ = oracle(*as_head)
    return out[0, 0]


def _attend(q, k, v, scale=None, weigh=np.exp):
    s = k @ q * (1 / np.sqrt(len(q)) if scale is None else scale)
    w = weigh(s)
    return w @ v / w.sum()


def _weights(q, k):
    w = np.exp(k @ q / np.sqrt(len(q)))
    return w / w.sum()


EXERCISES = (
    Exercise(
        number="0.1",
        title="Attention for one query",
        outputs=("out",),
        cases=_cases,
        expected=_expected,
        tried="1 to 7 keys, head_dim 1 to 64",
        mistakes=(
            Mistake(
                "the logits are not scaled",
                lambda q, k, v: _attend(q, k, v, scale=1.0),
                "Divide q · k by the square root of H: see the formula of the exercise.",
            ),
            Mistake(
                "the logits are divided by H instead of its square root",
                lambda q, k, v: _attend(q, k, v, scale=1 / len(q)),
                "See the formula of the exercise.",
            ),
            Mistake(
                "the logits are divided by the square root of S instead of H",
                lambda q, k, v: _attend(q, k, v, scale=1 / np.sqrt(len(k))),
                "len(k) is the number of keys; H is the length of q.",
            ),
            Mistake(
                "the logits are multiplied by the square root of H instead of divided",
                lambda q, k, v: _attend(q, k, v, scale=np.sqrt(len(q))),
                "The square root stands below the line: see the formula of the exercise.",
            ),
            Mistake(
                "the exponential is taken to base two",
                lambda q, k, v: _attend(q, k, v, weigh=np.exp2),
                "Here it is e to the power of s, np.exp: see the formula of the exercise.",
            ),
            Mistake(
                "the exponential is missing, so that the logits themselves are the weights",
                lambda q, k, v: _attend(q, k, v, weigh=lambda s: s),
                "w is e to the power of s, divided by the sum: see the formula of the exercise.",
            ),
            Mistake(
                "the weights are divided by their number instead of their sum",
                lambda q, k, v: np.exp(k @ q / np.sqrt(len(q))) @ v / len(k),
                "The weights of a query must add up to one: divide by w.sum(), see section 1.",
            ),
            Mistake(
                "only the likeliest key counts, as with argmax",
                lambda q, k, v: v[np.argmax(k @ q)],
                "A softmax gives every key some weight: see the formula of the exercise.",
            ),
            Mistake(
                "the keys are added up instead of the values",
                lambda q, k, v: _attend(q, k, k),
                "The weights multiply v: see the formula of the exercise.",
            ),
            Mistake(
                "the exponentials are not divided by their sum",
                lambda q, k, v: np.exp(k @ q / np.sqrt(len(q))) @ v,
                "The weights of a query must add up to one: see section 1.",
            ),
            Mistake(
                "every key gets the same weight",
                lambda q, k, v: v.mean(axis=0),
                "The weights must depend on q · k: see the formula of the exercise.",
            ),
            Mistake(
                "the weights are returned, before they mix the values",
                lambda q, k, v: _weights(q, k),
                "The result is the sum of w_j v_j, as long as a value: see the formula of the exercise.",
            ),
            Mistake(
                "each value is multiplied by its weight, but the products are not added up",
                lambda q, k, v: _weights(q, k)[:, None] * v,
                "Sum over the keys, axis 0, or let w @ v do both: see the formula of the exercise.",
            ),
            Mistake(
                "the weighted values are added up over the numbers of a value instead of over the keys",
                lambda q, k, v: (_weights(q, k)[:, None] * v).sum(axis=1),
                "Sum over the keys, axis 0: the result is as long as a value.",
            ),
            Mistake(
                "the largest logit is subtracted, but the exponentials are not divided by their sum",
                lambda q, k, v: _weights(q, k) / _weights(q, k).max() @ v,
                "Subtracting the maximum keeps exponentials small; the weights must still add up to one.",
            ),
            Mistake(
                "the result is divided by the square root of H instead of the logits",
                lambda q, k, v: _attend(q, k, v, scale=1.0) / np.sqrt(len(q)),
                "The square root belongs to s, before the exponential: see the formula of the exercise.",
            ),
            Mistake(
                "the square root is applied after the exponential instead of inside it",
                lambda q, k, v: np.exp(k @ q) / np.sqrt(len(q)) @ v,
                "s is scaled first, then comes e to the power of s, then the sum: see the formula of the exercise.",
            ),
        ),
    ),
)
