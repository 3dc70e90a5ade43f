"""Names the mistake behind a wrong answer: a known one that gives the same results, or a slip that results betray."""

import contextlib
import functools
import itertools
import math

import numpy as np

from helpers.exercises.comparing import as_numbers, close, compare, complaint_about, expected_of, parts_of, values_of
from helpers.exercises.exercise import Mistake
from helpers.exercises.running import Raised, apply


def mistake_behind(exercise, results):
    """The known mistake that agrees with results on every case, or None."""
    if all(isinstance(result, Raised) for result in results):
        return None
    return _first_alike(exercise, exercise.known, results)


def slip_behind(exercise, results):
    """The same for a slip in any place of the solution: one of the `Exercise.slips`. NaN alone can come of many."""
    if any(isinstance(result, Raised) for result in results):
        return None
    slip = _first_alike(exercise, exercise.slips, results)
    right = lambda case, number: not complaint_about(exercise, case, _mistaken(exercise, slip.answer, number))
    if slip and all(right(case, number) for number, case in enumerate(exercise.cases())):
        return None  # another way to the right result
    said = map(functools.partial(complaint_about, exercise), exercise.cases(), results) if slip else ()
    return slip if any("NaN" not in complaint for complaint in said if complaint) else None


def _first_alike(exercise, mistakes, results):
    for mistake in mistakes:
        with contextlib.suppress(Exception):  # where the mistake does not apply to results of this kind
            if all(
                _same(result, _mistaken(exercise, mistake.answer, number), 10 * exercise.tolerance)
                for number, result in enumerate(results)
            ):
                return mistake
    return None


@functools.cache
def _mistaken(exercise, answer, case_number):
    """What a wrong answer returns for a case: the same each time, so computed once."""
    return apply(exercise, answer, list(exercise.cases())[case_number])[0]


def _same(a, b, tolerance):
    """Whether two results are equal; errors of one kind in the same case count as equal."""
    if isinstance(a, Raised) or isinstance(b, Raised):
        return isinstance(a, Raised) and isinstance(b, Raised) and a.kind == b.kind
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
        return a is b or (isinstance(a, str) and a == b)
    if isinstance(a, tuple) and isinstance(b, tuple):  # one by one: beside a large number a small one could be anything
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    a, b = as_numbers(a), as_numbers(b)
    if a is None or b is None or a.shape != b.shape:
        return False
    if a.dtype.kind != b.dtype.kind and {a.dtype.kind, b.dtype.kind} - set("iuf"):
        return False
    if b.dtype.kind in "iu":  # a count: one more or less is another
        tolerance = min(tolerance, 1e-9)
    return close(a.astype(np.float64), b.astype(np.float64), tolerance)


def general_slip(exercise, cases, results):
    """A slip that can be told in any exercise by its results, as a `Mistake` without an answer; or None."""
    if exercise.judge or len(results) < 2 or any(isinstance(result, Raised) for result in results):
        return None
    table, names = [], None  # table: of (parts, right parts)
    for case, result in zip(cases, results, strict=False):
        expected, names_here = expected_of(exercise, case)
        parts = parts_of(result, names_here, expected)
        shown = tuple(map(repr, names_here)) if isinstance(expected, dict) else names_here
        if parts is None or names not in (None, shown):
            return None
        names = shown
        table.append((parts, values_of(expected)))
    agree = lambda mine, right: compare(mine, right, 10 * exercise.tolerance) is None
    places = range(len(names))
    if all(agree(mine[place], right[place]) for mine, right in table for place in places):
        return None  # nearly right, and in order: two counts of 0 look exchanged, and are not
    for order in itertools.permutations(places) if len(names) <= 4 else ():
        if order != tuple(places) and all(
            agree(mine[i], right[j]) for mine, right in table for i, j in enumerate(order)
        ):
            # A string that stays in its place may be what `run` adds, about how the answer was made.
            told = [place for place in places if order[place] != place or not isinstance(table[0][1][place], str)]
            yours = ", ".join(str(names[order[place]]) for place in told)
            asked = ", ".join(str(names[place]) for place in told)
            if isinstance(expected, dict):
                return Mistake(f"the values of {asked} are those of {yours}", None, "See which value has which name.")
            return Mistake(f"the results come as {yours}", None, f"The order asked for is {asked}.")
    found = []
    for place in places:
        if not all(agree(mine[place], right[place]) for mine, right in table):
            columns = [(as_numbers(mine[place]), right[place]) for mine, right in table]
            if any(mine is None or isinstance(right, str) for mine, right in columns):
                return None
            columns = [(mine, as_numbers(right)) for mine, right in columns]
            slip = _slip_of_shape(columns, agree) or _slip_of_factor(columns, agree)
            if slip is None:
                return None
            found.append((f"{names[place]} {slip[0]}", slip[1]))
    return Mistake(" and ".join(name for name, _ in found), None, found[0][1]) if found else None


def _slip_of_shape(columns, agree):
    """(what is wrong, advice) in one output, given (mine, right) for each case; or None."""
    if all(agree(np.squeeze(mine), np.squeeze(right)) for mine, right in columns):
        return "has an axis of length one too many, or too few", "Look at keepdims and [:, None]."
    if all(mine.ndim == 2 and agree(mine.T, right) for mine, right in columns):
        return "is transposed", "Look at which axis comes first."
    return None


def _slip_of_factor(columns, agree):
    """The same for a factor or a difference that is the same everywhere."""
    if any(mine.shape != right.shape for mine, right in columns):
        return None
    mine, right = (np.concatenate([np.ravel(pair[side]).astype(float) for pair in columns]) for side in (0, 1))
    finite = np.isfinite(right)
    if not np.array_equal(mine[~finite], right[~finite], equal_nan=True) or not np.isfinite(mine[finite]).all():
        return None
    mine, right = mine[finite], right[finite]
    if len(set(right.tolist())) < 3:
        return None
    factor, offset = float(mine @ right / (right @ right)), float((mine - right).mean())
    is_other = abs(factor) > 1e-3 and not math.isclose(factor, 1.0, rel_tol=1e-4)
    if is_other and all(agree(m, np.where(np.isfinite(r), factor * r, r)) for m, r in columns):
        known = {
            -1.0: "has the wrong sign",
            math.log2(math.e): "is too large by log2(e) = 1.4427: it is in base two",
            math.log(2): "is too small by ln 2 = 0.6931: it was divided by log2(e)",
        }
        says = next((says for value, says in known.items() if math.isclose(factor, value, rel_tol=1e-4)), None)
        says = says or f"is {factor:.4g} times what it should be"
        advice = "Look for a factor that is missing, or counted twice."
        return f"{says}, in every case", "Look at which term is subtracted from which." if factor < 0 else advice
    if abs(offset) > 1e-3 and all(agree(m, r + offset) for m, r in columns):
        size = "large" if offset > 0 else "small"
        said = f"is too {size} by {abs(offset):.4g}, in every case"
        return said, "Look for a term that is missing, or counted twice."
    return None
