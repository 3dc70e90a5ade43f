"""Every exercise: its solution passes, its stub is not attempted, its known mistakes are named."""

import importlib

import lessons
import numpy as np
import pytest
from nbclient import NotebookClient

from helpers.exercises.checking import exercise, verdict

NUMBERS = [lesson.number for lesson in lessons.ALL]
MISTAKES = [(number, mistake) for number in NUMBERS for mistake in exercise(number).mistakes]


@pytest.mark.parametrize("lesson", lessons.ALL, ids=NUMBERS)
def test_the_notebook_shows_a_complete_exercise(lesson):
    cells = lessons.read(lesson.path).cells
    heading, stub, _, folded = cells[lesson.stub - 1 : lesson.check + 2]
    assert exercise(lesson.number).title == lesson.title
    assert "minute" in heading.source and "line" in heading.source and "★" in heading.source
    assert "**By hand.**" in heading.source
    assert "raise NotImplementedError" in stub.source and '"""' in stub.source
    assert [f"<summary>{name}</summary>\n\n" in folded.source for name in ("Hint 1", "Hint 2", "Solution")] == [
        True
    ] * 3
    assert folded.source.count("<details>") == folded.source.count("</details>")


@pytest.mark.parametrize("path", lessons.PATHS, ids=lambda path: path.stem)
def test_a_module_holds_exactly_the_exercises_of_its_notebook(path):
    module = importlib.import_module(f"helpers.exercises.notebook_{path.stem[:2]}")
    assert [exercise.number for exercise in module.EXERCISES] == [lesson.number for lesson in lessons.lessons(path)]


@pytest.mark.parametrize("path", lessons.PATHS, ids=lambda path: path.stem)
def test_unsolved_and_solved(path):
    """As committed every check says "not attempted"; with the solutions pasted in, every one says ✓."""
    notebook = lessons.read(path)
    found = lessons.lessons(path)
    for lesson in found:
        (output,) = notebook.cells[lesson.check].outputs
        assert output.text.startswith("○") and "not attempted" in output.text
        notebook.cells[lesson.stub].source = lesson.solution
    # Pictures, and what comes after the last check, cannot change a verdict; nbval runs them anyway.
    for cell in notebook.cells:
        if cell.source.startswith("plots."):
            cell.source = "pass"
    notebook.cells = notebook.cells[: found[-1].check + 1]
    # A busy machine may deliver one print in two parts.
    NotebookClient(
        notebook, timeout=120, coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    for lesson in found:
        (output,) = notebook.cells[lesson.check].outputs
        assert output.text.startswith("✓"), output.text


@pytest.mark.parametrize("number", NUMBERS)
def test_at_least_three_mistakes_are_known(number):
    names = [mistake.name for mistake in exercise(number).mistakes]
    assert len(set(names)) == len(names) >= 3


@pytest.mark.parametrize(("number", "mistake"), MISTAKES, ids=[f"{n}-{m.name}".replace(" ", "_") for n, m in MISTAKES])
def test_a_known_mistake_is_rejected_under_its_own_name(number, mistake):
    judged = verdict(exercise(number), mistake.answer)
    assert judged.status == "wrong"
    assert judged.mistake == mistake.name, judged.text
    assert mistake.advice in judged.text


def _raise(*_):
    raise ValueError("something went wrong here")


def _read_past_the_end(*arguments):
    for argument in arguments:
        argument[len(argument)]


STRANGE = {
    "raises": _raise,
    "loops too far": _read_past_the_end,
    "None": lambda *_: None,
    "a tuple": lambda *_: (1, 2, 3, 4, 5, 6, 7),
    "NaN": lambda *_: float("nan"),
    "a string": lambda *_: "attention",
    "an uneven list": lambda *_: [[1], [2, 3]],
    "an object": lambda *_: object(),
    "an empty array": lambda *_: np.zeros(0),
    "complex numbers": lambda *_: np.ones(3, complex),
    "too few parameters": lambda: 0,
    "not a function": 3.14,
}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_strange_answer_gets_a_readable_verdict(number, capsys):
    for name, answer in STRANGE.items():
        judged = verdict(exercise(number), answer)
        assert judged.status == "wrong", name
        assert judged.text.startswith(f"✗ Exercise {number}: "), name
        assert " at 0x" not in judged.text and len(judged.text) < 1200, name
        assert judged == verdict(exercise(number), answer), f"{name}: the verdict must not change"
