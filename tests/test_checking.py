"""The machinery of the exercises, on a small exercise of its own."""

import dataclasses
import functools
import itertools
import re
import signal
import time
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.exercises import check, running
from helpers.exercises.checking import verdict
from helpers.exercises.exercise import Case, Exercise

RIGHT = np.array([[1.0, 2.0], [3.0, 4.0]])


def double(x):
    return 2 * x, x.sum()


DOUBLE = Exercise(
    solution=double,
    number="9.9",
    title="Double it",
    outputs=("double", "total"),
    cases=lambda: [Case("the small case", (np.array([1.0]),)), Case("the large case", (RIGHT,))],
    mistakes=(("it is squared", "2 * x", "x * x", "Reread section 1."),),
)


def judged(answer, exercise=DOUBLE):
    return verdict(exercise, answer)


def test_the_smallest_failing_case_is_shown():
    text = judged(lambda x: (2 * x if x.size == 1 else 3 * x, x.sum())).text
    assert "wrong for the large case" in text and "double: yours at [0, 0] 3, expected 2" in text


def test_a_mistake_must_agree_on_every_case():
    assert judged(lambda x: (x * x if x.size > 1 else x + 7, x.sum())).mistake is None


def test_a_slip_is_named_where_no_mistake_is_known():
    named = judged(lambda x: (2 * x, x.mean()))
    assert named.mistake == "`mean` stands where `sum` belongs" and "results are those of such a slip" in named.text
    assert judged(lambda x: (2 * x, x.mean()), dataclasses.replace(DOUBLE, slow=True)).mistake is None
    by_logarithm = dataclasses.replace(DOUBLE, solution=logarithms, mistakes=())
    assert judged(lambda x: (np.log(x), x.sum()), by_logarithm).mistake is None, "`0.5` may not stand in an answer"
    assert "something is added" in judged(lambda x: (np.log(x + 0.5), x.sum()), by_logarithm).text
    assert judged(lambda x: (np.log(0.5 - x), x.sum()), by_logarithm).mistake is None, "NaN is all that is known"


def logarithms(x):
    return np.log(x - 0.5), x.sum()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: None, "expected 2 results (double, total), got None: is a `return` missing?"),
        (lambda x: (None, x.sum()), "got None\n"),
        (lambda x: (1, 2, 3), "expected 2 results (double, total), got a tuple of 3"),
        (lambda x: (2 * x.reshape(x.shape if x.size == 1 else -1), x.sum()), "double: expected shape (2, 2), got (4,)"),
        (lambda x: (2 * x, x[:1]), "total: expected a number, got an array of shape (1,)"),
        (lambda x: (np.sqrt(-x), x.sum()), "NaN"),
        (3, "expected a function, got 3"),
    ],
)
def test_wrong_kinds_are_described(answer, said):
    assert said in judged(answer).text + "\n"


def spoil(x):
    result = 2 * x, x.sum()
    x[...] = 99
    return result


def test_changed_arguments_are_noticed():
    first = judged(spoil)
    assert first.status == "wrong" and first == judged(spoil), "an answer cannot spoil what comes after"
    assert "the result is right, but your function writes into its argument `x`" in first.text
    assert "writes into its argument `x`" in judged(lambda x: (x.fill(5), 3)).text

    sort = exercise(np.array([2, 1]), cases=lambda: [Case("the case", ([2, 1], {"a": 1}))])
    assert judged(lambda x, d: list(x), sort).status == "correct"
    assert "argument `d`" in judged(lambda x, d: (x, d.clear())[0], sort).text


# Exceptions


def test_an_error_is_reported_with_the_line_of_the_learner():
    def answer(x):
        y = 2 * x
        return np.take(y, 5)

    lines = judged(answer).text.splitlines()
    assert lines[0] == "✗ Exercise 9.9: raised IndexError for the small case."
    assert lines[1] == "  index 5 is out of bounds for axis 0 with size 1"
    assert lines[2] == f"  In line {answer.__code__.co_firstlineno + 2}: return np.take(y, 5)"
    assert len(lines) == 3


def stub(*_):
    """As in a notebook."""
    raise NotImplementedError


def test_only_the_stub_is_not_attempted():
    def library(x):
        raise NotImplementedError("this dtype is not supported")

    def calls_a_stub(x):
        return stub(x)

    def still_there(x):
        y = 2 * x
        raise NotImplementedError
        return y, x.sum()

    for unwritten in (stub, functools.partial(stub), jax.jit(stub)):
        assert judged(unwritten).status == "not attempted"
    assert judged(library).status == "wrong" and "this dtype is not supported" in judged(library).text
    assert "`stub`, which your function calls, is not written yet" in judged(calls_a_stub).text
    assert "Delete line" in judged(still_there).text and judged(still_there).status == "wrong"


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        (lambda x: np.exp(x), "use jnp, not np"),
        (lambda x: x if x > 0 else -x, "no Python `if`"),
        (lambda x: jnp.ones(3)[: int(x)], "no int()"),
        (lambda x: [1, 2, 3][x.astype(int)], "no int(), range()"),
    ],
)
def test_tracer_errors_are_translated(body, advice):
    text = judged(lambda: jax.jit(body)(1.0), exercise(1.0)).text
    assert advice in text and "In line" in text


def test_a_number_without_an_exercise_is_said(capsys):
    for number in ("9.9", 99.1, None, 10**5000, []):
        check(number, stub)
        assert capsys.readouterr().out.startswith("✗ There is no exercise ")
    check("0.1", None)
    assert "✗ Exercise 0.1: " in capsys.readouterr().out


def test_an_endless_answer_is_stopped(monkeypatch):
    def catches(*_):
        while True:
            try:
                time.sleep(10)
            except Exception:
                pass

    monkeypatch.setattr(running, "SECONDS", 0.1)
    began = time.perf_counter()
    for answer in (catches, lambda x: (sum(i for i in itertools.count()), 1)):
        assert "stopped: more than 0.1 seconds for the small case." in judged(answer).text
    assert time.perf_counter() - began < 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert judged(lambda x: (2 * x, x.sum())).status == "correct"


def exercise(expected, **options):
    """One case without arguments, and no known mistakes."""
    of_one = {"outputs": ("x",), "cases": lambda: [Case("the case", ())], "expected": lambda *_: expected}
    return dataclasses.replace(DOUBLE, solution=None, slow=True, mistakes=(), **of_one | options)


def named(*results):
    """An exercise with these results, one case for each, whose answers get the number of the case."""
    cases = [Case(f"case {n}", (n,)) for n in range(len(results))]
    return dataclasses.replace(exercise(None), outputs=("a", "b"), cases=lambda: cases, expected=lambda n: results[n])


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("partial", "partial", "full"),
        (3, Fraction(9, 3), Fraction(10, 3)),
        (3, np.int8(3), np.array([3])),
        (0.5, Fraction(1, 2), Fraction(1, 3)),
        (np.array([1, -np.inf]), np.array([1.0, -np.inf]), np.array([1.0, np.inf])),
        (np.ones((2, 2)), [[1, 1], (1.0, np.float32(1))], [[1, 1], [1, 2]]),
        (np.array([0.0, 1e6]), np.array([0.0, 1e6]), np.array([200.0, 1e6])),
        ({"a": 1}, {"a": 1, "more": 5}, {"a": 2}),
        ((1.0, "x"), np.array([1.0, "x"], object), np.array([1.0, "x"])),
        ((np.ones(3), np.zeros(3)), np.stack([np.ones(3), np.zeros(3)]), np.zeros((2, 3))),
        ((np.ones(3), np.zeros(3)), [(1, 0), (1, 0), (1, 0)], [(1, 0), (1, 0), (1, 1)]),
    ],
)
def test_results_are_judged_by_what_they_are_worth(expected, right, wrong):
    asked = exercise(expected, outputs=("a", "b")[: len(expected) if isinstance(expected, tuple) else 1])
    assert judged(lambda: right, asked).status == "correct"
    assert judged(lambda: wrong, asked).status == "wrong"


@pytest.mark.parametrize(
    ("expected", "mine"),
    [(1000000, 1000000.2), (3, np.nextafter(3.0, 4)), (np.array([1e-30, 1.0]), np.array([1e-30, 1.0001]))],
)
def test_two_equal_numbers_are_never_shown_as_different(expected, mine):
    text = judged(lambda: mine, exercise(expected)).text
    yours, wanted = re.search(r"yours(?: at \[\d+\])? (\S+), expected (\S+)", text).groups()
    assert yours != wanted and "np." not in text


RESULTS = [(1.0, np.array([2.0, 5.0])), (3.0, np.array([7.0, 1.0])), (4.0, np.array([0.0, -2.0]))]


@pytest.mark.parametrize(
    ("slip", "name"),
    [
        (lambda a, b: (b, a), "the results come as b, a"),
        (lambda a, b: (a, 2 * b), "b is 2 times what it should be, in every case"),
        (lambda a, b: (a, b / np.log(2)), "b is too large by log2(e) = 1.4427: it is in base two, in every case"),
        (lambda a, b: (a, b[:, None]), "b has an axis of length one too many, or too few"),
        (lambda a, b: (a, b * [1, 2]), None),
        (lambda a, b: (a, b * [1, 1e200]), None),  # too large to be squared
    ],
)
def test_slips_of_any_exercise_have_a_name(slip, name):
    assert judged(lambda n: slip(*RESULTS[n]), named(*RESULTS)).mistake == name
