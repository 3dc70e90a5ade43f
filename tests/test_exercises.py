"""Every exercise: its stub is not attempted, its known mistakes are named. (conftest.py has its solution checked.)"""

import inspect
import sys

import lessons
import numpy as np
import pytest
from attention_cases import in_tiers

from helpers.exercises import checking, naming, running
from helpers.exercises.checking import verdict
from helpers.exercises.exercise import exercise, exercises_of, numbers_of_names

NUMBERS = [lesson.number for lesson in lessons.ALL]
# Each mistake of these is a kernel, or several, to be compiled.
OF_KERNELS = ("4.2", "4.3", "5.5", "7.1", "7.2", "7.3", "7.7", "7.8", "7.9", "8.1", "10.6", "10.7", "13.7", "18.8")
KERNELS_IN_THE_FULL_TIER = in_tiers(NUMBERS, lambda number: number not in OF_KERNELS)


@pytest.mark.parametrize("lesson", lessons.ALL, ids=NUMBERS)
def test_the_notebook_shows_a_complete_exercise(lesson):
    cells = lessons.read(lesson.path).cells
    heading, stub, check, folded = cells[lesson.stub - 1 : lesson.check + 2]
    assert exercise(lesson.number).title == lesson.title
    assert inspect.getsource(exercise(lesson.number).solution) == lesson.solution
    assert "minute" in heading.source and "line" in heading.source and "★" in heading.source
    assert "**By hand.**" in heading.source
    assert "raise NotImplementedError" in stub.source and '"""' in stub.source
    (output,) = check.outputs
    assert output.text.startswith("○") and "not attempted" in output.text
    assert all(f"<summary>{name}</summary>\n\n" in folded.source for name in ("Hint 1", "Hint 2", "Solution"))
    assert folded.source.count("<details>") == folded.source.count("</details>")


@pytest.mark.parametrize("path", lessons.PATHS, ids=lambda path: path.stem)
def test_a_module_holds_exactly_the_exercises_of_its_notebook(path):
    # Not always in the order of their numbers: these stay when a lesson moves, for the sake of workbooks.
    expected = [(lesson.number, lesson.answer_name) for lesson in lessons.lessons(path)]
    assert [(found.number, found.solution.__name__) for found in exercises_of(path.stem[:2])] == expected


def test_an_exercise_is_found_by_the_name_of_its_function():
    assert numbers_of_names() == {lesson.answer_name: lesson.number for lesson in lessons.ALL}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_few_mistakes_are_known_and_cases_can_be_told_apart(number):
    names = [mistake.name for mistake in exercise(number).known]
    labels = [case.label for case in exercise(number).cases()]
    least, most = 15 if number in ("5.5", "7.7", "7.8", "13.7", "18.8") else 1, 20 if exercise(number).slow else 12
    assert len(set(names)) == len(names) and least <= len(names) <= most and len(set(labels)) == len(labels)


@pytest.fixture
def each_answer_runs_once(monkeypatch):
    """A mistake is judged as an answer, and as a mistake it is what the answer is compared with: one result for both."""
    run_anew = running.apply

    def apply(exercise, answer, case):
        key = exercise.number, answer, case.label
        if key not in RESULTS:
            RESULTS[key] = run_anew(exercise, answer, case)
        return RESULTS[key]

    for module in (checking, naming):
        monkeypatch.setattr(module, "apply", apply)


RESULTS = {}


@pytest.mark.parametrize("number", KERNELS_IN_THE_FULL_TIER)
def test_known_mistakes_are_rejected_under_their_own_names(number, each_answer_runs_once):
    for mistake in exercise(number).known:
        judged = verdict(exercise(number), mistake.answer)
        assert judged.status == "wrong", mistake.name
        assert judged.mistake == mistake.name, judged.text
        assert mistake.advice in judged.text


def _unprintable(*_):
    class UnprintableError(Exception):
        __str__ = None

    raise UnprintableError


STRANGE = {
    "loops too far": lambda *arguments: [argument[len(argument)] for argument in arguments],
    "exits": lambda *_: sys.exit(3),
    "an error without words": _unprintable,
    "None": lambda *_: None,
    "NaN": lambda *_: float("nan"),
    "a string": lambda *_: "attention",
    "an empty array": lambda *_: np.zeros(0),
    "too few parameters": lambda: 0,
    "not a function": 3.14,
    "no answer": None,
    "a type": type,
    "a large number instead": 10**5000,
    "a large number": lambda *_: (10**5000, np.zeros(2)),
    "dates": lambda *_: np.zeros(3, "M8[s]"),
    "a set": lambda *_: {1, 2},
    "a complex number": lambda *_: 1j,
}


@pytest.mark.parametrize("number", KERNELS_IN_THE_FULL_TIER)
def test_a_strange_answer_gets_a_readable_verdict(number, capsys):
    for name, answer in STRANGE.items():
        judged = verdict(exercise(number), answer)
        assert judged.status == "wrong", name
        assert judged.text.startswith(f"✗ Exercise {number}: "), name
        assert " at 0x" not in judged.text and len(judged.text) < 1200, name
        assert judged == verdict(exercise(number), answer), f"{name}: the verdict must not change"
