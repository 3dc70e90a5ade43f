"""What an exercise is, and where to find one.

A notebook's exercises stand in ``helpers/exercises/notebook_NN.py`` as a tuple EXERCISES. Each has its solution, cases
to try an answer on, and a list of known mistakes, which are edits of the solution.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from helpers.exercises.edits import edited, source_of, written
from helpers.exercises.slips import slips

OF_A_SLIP = "Your code may look otherwise, but its results are those of such a slip. Follow the case above by hand."


@dataclass(frozen=True)
class Case:
    """One set of arguments and how the verdict describes it, for example "T=3, S=5, H=2"."""

    label: str
    arguments: tuple


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer.

    name: completes the sentence "This is what you get when …". answer: a callable that makes the mistake. advice: what
    leads on, as a rule with the section to reread.
    """

    name: str
    answer: Callable
    advice: str


@dataclass(frozen=True)
class Exercise:
    """Everything that is needed to judge an answer.

    solution: a right answer, as the notebook shows it. Its name is the exercise's.
    title: as in the heading, "The update".
    outputs: names of the parts of a tuple result, in order; the name of the result otherwise.
    cases: a function without arguments that gives the cases, a small one first; or see `with_cases`. It is called for
      each check, so that importing stays quick; it must be deterministic.
    mistakes: known wrong answers, see `with_mistakes`. Each is an edit of the solution, (when, old, new, advice), or,
      where an edit cannot say it, (when, answer, advice). old and new may be tuples of as many parts. At most twelve,
      twenty of a whole kernel: those that teach something. A slip of any code has a name without that, see `slips`.
    expected: the right result for the arguments of a case: an array or number, a string, a tuple
      of those, or a dict of those. A float64 result may make a verdict say that float32 is too little.
      By default the solution's.
    run: how an answer is applied to the arguments of a case; by default it is called with them.
      May raise `Complaint` where what the answer returned cannot be used.
    judge: for exercises with many right answers. Takes the result and the case and returns None if
      it is right, otherwise a sentence that says why it is not. Replaces `expected`.
    tolerance: largest relative error of a right answer, in the Frobenius norm.
    building_block: the part of the learner's own module that the answer is, such as "forward" or "gradients"; by
      default it is none.
    in_place: where the answer runs in place of a building block, a function of `helpers.environment`, and its name,
      such as ("on_gpu", "forward").
    slow: whether one answer takes so long that `slips` are not tried.
    number: "2.1" for the first of notebook 02, by its place in EXERCISES. `exercises_of` fills it in.
    """

    solution: Callable
    title: str
    outputs: tuple[str, ...]
    cases: Callable = tuple
    mistakes: tuple[tuple, ...] = ()
    expected: Callable | None = None
    run: Callable = lambda answer, *arguments: answer(*arguments)
    judge: Callable | None = None
    tolerance: float = 1e-5
    building_block: str = ""
    in_place: tuple = ()
    slow: bool = False
    number: str = ""

    def with_cases(self, names, *rows):
        """The exercise with a `Case` for each row of arguments, labelled by their names, such as "T=2, S=3".

        names: of the arguments, with spaces between. A row that has one entry more begins with its label.
        """
        names, cases = names.split(), []
        for row in rows:
            label, arguments = (row[0], row[1:]) if len(row) > len(names) else ("", row)
            named = (f"{name}={value}" for name, value in zip(names, arguments, strict=True))
            cases.append(Case(label or ", ".join(named), arguments))
        return replace(self, cases=lambda: cases)

    def with_mistakes(self, *mistakes):
        """The exercise that knows these."""
        return replace(self, mistakes=mistakes)

    @functools.cached_property
    def known(self):
        """The mistakes, as a tuple of `Mistake`."""
        return tuple(self._mistake(*row) for row in self.mistakes)

    @functools.cached_property
    def slips(self):
        """What may be wrong in any code, in each place of the solution, as a tuple of `Mistake`."""
        if self.slow or "while " in source_of(self.solution):  # which may then never end
            return ()
        # "`2` is left out" says little to a learner who left out something else.
        found = (slip for slip in slips(source_of(self.solution)) if not slip[1][1].isdigit())
        return tuple(Mistake(wrong, written(self.solution, text), OF_A_SLIP) for _, wrong, text in found)

    def _mistake(self, name, what, *rest):
        *new, advice = rest
        if not new:
            return Mistake(name, what, advice)
        pairs = zip(what, *new, strict=True) if isinstance(what, tuple) else [(what, *new)]
        return Mistake(name, edited(self.solution, *pairs), advice)


@dataclass(frozen=True)
class Verdict:
    """status "not attempted", "correct" or "wrong"; the text to print; the name of a known mistake."""

    status: str
    text: str
    mistake: str | None = None


class Complaint(Exception):  # noqa: N818
    """What is wrong with a result, in words for the learner. For the `run` of an exercise."""


def shaped(values, shapes):
    """The parts of a result as a tuple, or a `Complaint` about those that are missing or have a wrong shape.

    shapes: {name: shape}.
    """
    wanted = ", ".join(shapes)
    if values is None:
        raise Complaint(f"expected {wanted}, got None: is a `return` missing?")
    values = tuple(values) if isinstance(values, tuple | list | Iterator) else (values,)
    if len(values) != len(shapes):
        raise Complaint(f"expected {wanted}, got {len(values)} result{'s' * (len(values) != 1)}")
    for (name, shape), value in zip(shapes.items(), values, strict=True):
        if (got := getattr(value, "shape", None)) != shape and (got := np.shape(value)) != shape:
            raise Complaint(f"{name}: expected shape {shape}, got {got}")
    return values


@functools.cache
def exercises_of(lesson):
    """The exercises of a notebook such as "02", in the order that it has them in. LookupError where there is none."""
    try:
        module = importlib.import_module(f"helpers.exercises.notebook_{lesson}")
    except ModuleNotFoundError as error:
        raise LookupError(lesson) from error
    order = getattr(module, "ORDER", range(1, len(module.EXERCISES) + 1))
    return tuple(replace(module.EXERCISES[place - 1], number=f"{int(lesson)}.{place}") for place in order)


def exercise(number):
    """The exercise with a number such as "2.1". LookupError if there is none."""
    number = str(number).strip()
    return {found.number: found for found in exercises_of(f"{number.split('.')[0]:0>2}")}[number]


@functools.cache
def numbers_of_names():
    """{name of the function that an exercise asks for: its number}."""
    lessons = sorted(path.stem.removeprefix("notebook_") for path in Path(__file__).parent.glob("notebook_*.py"))
    return {found.solution.__name__: found.number for lesson in lessons for found in exercises_of(lesson)}
