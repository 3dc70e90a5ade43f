"""How an exercise is checked: run the answer on every case, compare, and name the misconception.

A notebook's exercises stand in ``helpers/exercises/notebook_NN.py`` as a tuple EXERCISES. Each
knows how to compute the right result and a list of known mistakes. A mistake is itself an answer,
a wrong one: an answer that agrees with it on every case is recognised by its results, whatever
the code looks like.
"""

import copy
import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer.

    name: completes the sentence "This is what you get when …".
    answer: a callable that makes the mistake, with the signature of the learner's function.
    advice: one sentence that leads on, naming the section to reread.
    """

    name: str
    answer: Callable
    advice: str


@dataclass(frozen=True)
class Case:
    """One set of arguments and how the verdict describes it, for example "T=3, S=5, H=2"."""

    label: str
    arguments: tuple


@dataclass(frozen=True)
class Exercise:
    """Everything that is needed to judge an answer.

    number, title: as in the heading, "2.1" and "The update".
    cases: a function without arguments that returns the cases, smallest first. It is called for
      each check, so that importing stays quick; it must be deterministic.
    expected: the right result for the arguments of a case: an array or number, a string, a tuple
      of those, or a dict of those.
    outputs: names of the parts of a tuple result, in order; the name of the result otherwise.
    mistakes: known wrong answers.
    tried: what the cases cover, completes "correct on N cases: …".
    run: how an answer is applied to the arguments of a case; by default it is called with them.
    judge: for exercises with many right answers. Takes the result and the case and returns None if
      it is right, otherwise a sentence that says why it is not. Replaces `expected`.
    tolerance: largest relative error of a right answer, in the Frobenius norm.
    exact_dtype: whether each output must have the dtype of the expected one.
    """

    number: str
    title: str
    cases: Callable
    outputs: tuple[str, ...]
    mistakes: tuple[Mistake, ...]
    tried: str
    expected: Callable | None = None
    run: Callable = lambda answer, *arguments: answer(*arguments)
    judge: Callable | None = None
    tolerance: float = 1e-5
    exact_dtype: bool = False


@dataclass(frozen=True)
class Verdict:
    """status "not attempted", "correct" or "wrong"; the text to print; the name of a known mistake."""

    status: str
    text: str
    mistake: str | None = None


def check(number, answer):
    """Print the verdict on an answer to exercise `number`, for example ``check("2.1", update)``.

    Never raises because of the answer, and prints the same text whenever the answer is the same.
    """
    print(verdict(exercise(number), answer).text)


def exercise(number):
    """The exercise with a number such as "2.1"."""
    chapter = int(number.split(".")[0])
    module = importlib.import_module(f"helpers.exercises.notebook_{chapter:02d}")
    return next(exercise for exercise in module.EXERCISES if exercise.number == number)


def verdict(exercise, answer):
    """The `Verdict` on an answer."""
    name = f"Exercise {exercise.number}"
    if not callable(answer):
        text = f"✗ {name}: expected a function, got {_describe(answer)}."
        return Verdict("wrong", text)
    cases = exercise.cases()
    results = []
    for case in cases:
        try:
            results.append(_apply(exercise, answer, case))
        except NotImplementedError as error:
            if not str(error):  # the stub's own; libraries say what is not implemented
                return Verdict("not attempted", f"○ {name}: not attempted yet. Your turn, in the cell above.")
            return Verdict("wrong", _raised(name, case, error))
        except Exception as error:
            return Verdict("wrong", _raised(name, case, error))

    for case, result in zip(cases, results, strict=True):
        complaint = _complaint(exercise, case, result)
        if complaint:
            text = f"✗ {name}: wrong for {case.label}.\n{_indent(complaint)}"
            mistake = _recognise(exercise, results)
            if mistake:
                text += f"\n  This is what you get when {mistake.name}.\n  {mistake.advice}"
            return Verdict("wrong", text, mistake.name if mistake else None)
    plural = "s" if len(cases) > 1 else ""
    return Verdict("correct", f"✓ {name}: correct on {len(cases)} case{plural}: {exercise.tried}.")


def _apply(exercise, answer, case):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        # A deep copy, so that an answer that writes into its arguments cannot spoil the next case.
        return _to_numpy(exercise.run(answer, *copy.deepcopy(case.arguments)))


def _to_numpy(result):
    """The result with its arrays on the host, so that asynchronous errors surface here."""
    if isinstance(result, dict):
        return {key: _to_numpy(value) for key, value in result.items()}
    if isinstance(result, tuple | list):
        return tuple(_to_numpy(value) for value in result)
    return np.asarray(result) if hasattr(result, "__array__") else result


def _raised(name, case, error):
    first_line = (str(error).strip().splitlines() or [""])[0][:200]
    return f"✗ {name}: raised {type(error).__name__} for {case.label}.\n  {first_line}".rstrip()


def _complaint(exercise, case, result):
    """What is wrong with a result, or None."""
    if exercise.judge:
        try:
            return exercise.judge(result, case)
        except Exception:  # the result was not of the kind that the judge looks into
            return f"{exercise.outputs[0]}: this cannot be judged: {_describe(result)}"
    expected = _to_numpy(exercise.expected(*copy.deepcopy(case.arguments)))
    if isinstance(expected, dict):
        names = tuple(expected)
        if not isinstance(result, dict):
            return f"expected a dict with the keys {', '.join(map(str, names))}, got {_describe(result)}"
        missing = [name for name in names if name not in result]
        if missing:
            return f"the dict lacks the key {missing[0]!r}"
        expected, result = tuple(expected.values()), tuple(result[name] for name in names)
    else:
        names = exercise.outputs
    if not isinstance(expected, tuple):
        expected, result = (expected,), (result,)
    if not isinstance(result, tuple) or len(result) != len(expected):
        return f"expected {len(expected)} results ({', '.join(names)}), got {_describe(result)}"
    for name, mine, right in zip(names, result, expected, strict=True):
        complaint = _compare(mine, right, exercise.tolerance, exercise.exact_dtype)
        if complaint:
            return f"{name}: {complaint}"
    return None


def _compare(mine, right, tolerance, exact_dtype):
    """What distinguishes a value from the right one, or None if they agree."""
    if isinstance(right, str):
        return None if isinstance(mine, str) and mine == right else f"yours {_describe(mine)}, expected {right!r}"
    right = np.asarray(right)
    try:
        mine = np.asarray(mine)
    except ValueError:  # nested lists of uneven lengths
        mine = np.asarray(None)
    if mine.dtype.kind in "OUS":
        return f"expected {_describe(right)}, got {_describe(mine.item() if mine.shape == () else mine)}"
    if mine.shape != right.shape:
        return f"expected shape {right.shape}, got {mine.shape}"
    if exact_dtype and mine.dtype != right.dtype:
        return f"expected dtype {right.dtype}, got {mine.dtype}"
    if np.iscomplexobj(mine):
        return f"expected real numbers, got dtype {mine.dtype}"
    if right.dtype.kind in "bi":
        wrong = mine != right
    else:
        mine, right = mine.astype(np.float64), right.astype(np.float64)
        if np.isnan(mine).any() and not np.isnan(right).any():
            return f"{int(np.isnan(mine).sum())} of {mine.size} entries are NaN, expected none"
        if _close(mine, right, tolerance):
            return None
        scale = np.abs(right[np.isfinite(right)]).max(initial=0) or 1
        wrong = ~np.isclose(mine, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        if not wrong.any():  # spread thinly: show the worst
            wrong = np.abs(mine - right) == np.nanmax(np.abs(mine - right))
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at {list(index)}" if index else ""
    return f"yours{where} {_number(mine[index])}, expected {_number(right[index])}"


def _close(mine, right, tolerance):
    finite = np.isfinite(right)
    if not np.array_equal(mine[~finite], right[~finite], equal_nan=True):
        return False
    error, size = np.linalg.norm(mine[finite] - right[finite]), np.linalg.norm(right[finite])
    return bool(error <= tolerance * size) if size else bool(error <= tolerance)


def _recognise(exercise, results):
    """The known mistake whose results agree with these on every case, or None."""
    for mistake in exercise.mistakes:
        try:
            if all(
                _same(result, _mistaken(exercise, mistake, number), 10 * exercise.tolerance)
                for number, result in enumerate(results)
            ):
                return mistake
        except Exception:  # the mistake does not apply to results of this kind
            continue
    return None


@functools.cache
def _mistaken(exercise, mistake, case_number):
    """What a mistake returns for a case: the same each time, so computed once."""
    return _apply(exercise, mistake.answer, exercise.cases()[case_number])


def _same(a, b, tolerance):
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
        return a is b or (isinstance(a, str) and a == b)
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or (a.dtype.kind != b.dtype.kind and {a.dtype.kind, b.dtype.kind} - set("if")):
        return False
    return _close(a.astype(np.float64), b.astype(np.float64), tolerance)


def _number(value):
    return f"{float(value):.6g}" if value.dtype.kind == "f" else str(value.item())


def _describe(value):
    """A short, deterministic description of any value."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return _number(value) if value.shape == () and value.dtype.kind in "bif" else f"an array of shape {value.shape}"
    return f"an object of type {type(value).__name__}"


def _indent(text):
    return "\n".join("  " + line for line in text.splitlines())
