"""The machinery of the exercises, on a small exercise of its own."""

import numpy as np
import pytest

from helpers.exercises.checking import Case, Exercise, Mistake, verdict

RIGHT = np.array([[1.0, 2.0], [3.0, 4.0]])

DOUBLE = Exercise(
    number="9.9",
    title="Double it",
    outputs=("double", "total"),
    cases=lambda: [Case("the small case", (np.array([1.0]),)), Case("the large case", (RIGHT,))],
    expected=lambda x: (2 * x, x.sum()),
    tried="one entry and four",
    mistakes=(
        Mistake("it is squared", lambda x: (x * x, x.sum()), "Reread section 1."),
        Mistake("the total is of the result", lambda x: (2 * x, 2 * x.sum()), "Reread section 2."),
        Mistake("the shape is lost", lambda x: (2 * x.ravel(), x.sum()), "Reread section 3."),
        Mistake("it is not a number", lambda x: (np.nan * x, x.sum()), "Reread section 4."),
    ),
)


def judged(answer, exercise=DOUBLE):
    return verdict(exercise, answer)


def test_right_answers_of_any_container():
    for answer in (
        lambda x: (2 * x, x.sum()),
        lambda x: [2 * x, float(x.sum())],
        lambda x: (x + x, np.float32(x.sum())),
    ):
        assert judged(answer).status == "correct"
    assert judged(lambda x: (2 * x, x.sum())).text == "✓ Exercise 9.9: correct on 2 cases: one entry and four."


def test_the_smallest_failing_case_is_shown():
    text = judged(lambda x: (2 * x if x.size == 1 else 3 * x, x.sum())).text
    assert "wrong for the large case" in text and "double: yours at [0, 0] 3, expected 2" in text


@pytest.mark.parametrize("mistake", DOUBLE.mistakes, ids=lambda mistake: mistake.name)
def test_mistakes_are_named(mistake):
    result = judged(mistake.answer)
    assert result.mistake == mistake.name
    assert f"This is what you get when {mistake.name}.\n  {mistake.advice}" in result.text


def test_a_mistake_must_agree_on_every_case():
    assert judged(lambda x: (x * x if x.size > 1 else x + 7, x.sum())).mistake is None


def test_wrong_kinds_are_described():
    assert "expected 2 results (double, total), got None" in judged(lambda x: None).text
    assert "expected 2 results (double, total), got an array of shape (1,)" in judged(lambda x: 2 * x).text
    assert "expected 2 results (double, total), got a tuple of 3" in judged(lambda x: (1, 2, 3)).text
    assert (
        "double: expected shape (2, 2), got (4,)"
        in judged(lambda x: (2 * x.reshape(x.shape if x.size == 1 else -1), x.sum())).text
    )
    assert "double: expected 2, got" not in judged(lambda x: ("2", x.sum())).text
    assert judged(lambda x: ("2", x.sum())).status == "wrong"
    assert "entries are NaN, expected none" in judged(lambda x: (np.sqrt(-x), x.sum())).text
    assert "expected a function, got 3" in judged(3).text


def test_errors_are_reported_in_one_line():
    text = judged(lambda x: x[5]).text
    assert text.splitlines()[0] == "✗ Exercise 9.9: raised IndexError for the small case."
    assert len(text.splitlines()) == 2


def test_only_the_stub_is_not_attempted():
    def stub(x):
        raise NotImplementedError

    def library(x):
        raise NotImplementedError("this dtype is not supported")

    assert judged(stub).status == "not attempted"
    assert judged(library).status == "wrong" and "this dtype is not supported" in judged(library).text


def test_an_answer_cannot_spoil_the_next_case():
    def answer(x):
        result = 2 * x, x.sum()
        x[...] = 99
        return result

    assert judged(answer).status == "correct"
    assert judged(answer).status == "correct"


def test_warnings_do_not_reach_the_reader(recwarn, capsys):
    judged(lambda x: (2 * x + 0 * np.log(-x) / 0, x.sum()))
    assert len(recwarn) == 0 and capsys.readouterr().err == ""


def exercise(expected, **options):
    return Exercise(
        number="9.8",
        title="t",
        outputs=("x",),
        cases=lambda: [Case("the case", ())],
        expected=lambda: expected,
        tried="it",
        mistakes=(),
        **options,
    )


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("partial", "partial", "full"),
        (3, 3, 4),
        (3, 3.0, 3.001),
        (True, True, False),
        (np.array([1, -np.inf]), np.array([1.0, -np.inf]), np.array([1.0, np.inf])),
        (np.zeros(2), np.zeros(2), np.full(2, 1e-3)),
        (np.array([0.0, 1e6]), np.array([0.0, 1e6]), np.array([200.0, 1e6])),
        ({"a": 1, "b": 2.0}, {"b": 2.0, "a": 1}, {"a": 1}),
        ({"a": 1}, {"a": 1, "more": 5}, {"a": 2}),
    ],
)
def test_values_of_every_kind(expected, right, wrong):
    assert judged(lambda: right, exercise(expected)).status == "correct"
    assert judged(lambda: wrong, exercise(expected)).status == "wrong"


def test_dtypes_matter_where_they_are_said_to():
    strict = exercise(np.zeros(2, np.float32), exact_dtype=True)
    assert judged(lambda: np.zeros(2, np.float32), strict).status == "correct"
    assert "expected dtype float32, got float64" in judged(lambda: np.zeros(2), strict).text


def test_a_judge_decides_and_never_raises():
    even = exercise(None, judge=lambda result, case: None if result % 2 == 0 else f"{result} is odd")
    assert judged(lambda: 4, even).status == "correct"
    assert "3 is odd" in judged(lambda: 3, even).text
    assert "cannot be judged: None" in judged(lambda: None, even).text
