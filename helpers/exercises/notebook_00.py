"""The exercise of notebook 00."""

import numpy as np

from helpers.exercises.exercise import Case, Exercise


# 0.1
def attend(q, k, v):
    """Attention of one query. q: (H,), k and v: (S, H). Returns (H,)."""
    s = k @ q / np.sqrt(len(q))
    p = np.exp(s)
    return p @ v / p.sum()


def _cases():
    random = np.random.default_rng(0)
    cases = [Case("the case worked by hand", (np.ones(1), np.log([[1.0], [3.0]]), np.array([[2.0], [6.0]])))]
    for S, H in [(1, 1), (2, 3), (7, 4), (5, 64)]:
        arguments = tuple(random.standard_normal(shape) for shape in (H, (S, H), (S, H)))
        cases.append(Case(f"S={S}, H={H}", arguments))
    return cases


ATTEND = Exercise(
    solution=attend, title="Attention for one query", outputs=("out",), cases=_cases,
    mistakes=(
        ("the weights are divided by their number instead of their sum", "p.sum()", "len(p)",
         "The weights of a query must add up to one: divide each exponential by the sum of all, see section 1."),
        ("the weights are returned, before they mix the values", "p @ v", "p",
         "The result is the sum of w_j v_j, as long as a value: see the formula of the exercise."),
        ("each value is multiplied by its weight, but the products are not added up", "p @ v", "p[:, None] * v",
         "Sum over the keys, axis 0, or let w @ v do both: see the formula of the exercise."),
    ),
)  # fmt: skip

EXERCISES = (ATTEND,)
