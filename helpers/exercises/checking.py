"""How an exercise is checked: run the answer on every case, compare, and name the misconception.

An answer that agrees with a known mistake on every case is recognised by its results, whatever the code looks like.
"""

import functools
import sys
import types
import warnings

import numpy as np
from tqdm import tqdm

from helpers.exercises import mine, record
from helpers.exercises.comparing import complaint_about, describe, indent
from helpers.exercises.exercise import Verdict, exercise, numbers_of_names
from helpers.exercises.naming import general_slip, mistake_behind, slip_behind
from helpers.exercises.running import Raised, apply, name_of

STATES = {"wrong": record.TRIED, "correct": record.SOLVED}


def check(answer, *more):
    """Print the verdict on an answer to the exercise of its name, for example ``check(update)``.

    Never raises, and prints the same text whenever the answer is the same. A bar shows the
    progress of a check that takes more than a second, and goes away at its end. In a workbook
    the `record` keeps what was tried and solved, and `mine` the source of a building block.
    Older workbooks name the number: ``check("2.1", update)``.
    """
    names = sys._getframe(1).f_globals
    try:
        number, answer = (answer, *more) if more else (None, answer)
        found = exercise(_today(number, answer) if more else _number_of(answer, names))
    except BaseException:
        which = number if more else getattr(answer, "__name__", answer)
        print(f"✗ There is no exercise {describe(which)}. CHANGES.md lists those that have moved.")
        return
    bar = functools.partial(tqdm, desc=f"Exercise {found.number}", file=sys.stdout, leave=False, delay=1, unit="case")
    judged = verdict(found, answer, bar)
    print(_in_colour(judged))
    if judged.status == "correct" and (said := mine.keep(found, names)):
        print(said)
    if judged.status in STATES:
        record.note(found.number, STATES[judged.status])


def _in_colour(judged):
    """The text of a verdict, its mark green or red in a notebook. "Not attempted", which is committed, stays plain."""
    colour = {"correct": "32", "wrong": "31"}.get(judged.status)
    if colour is None or not type(sys.stdout).__module__.startswith("ipykernel"):
        return judged.text
    return f"\x1b[1;{colour}m{judged.text[0]}\x1b[0m{judged.text[1:]}"


def _number_of(answer, names):
    """The number of the exercise that an answer is for: by its own name, or by one that it has among `names`."""
    own = [getattr(answer, "__name__", None), *(name for name, value in names.items() if value is answer)]
    return next(numbers_of_names()[name] for name in own if name in numbers_of_names())


def _today(number, answer):
    """The number that an older workbook has, or that of the answer's name where exercises of that notebook moved."""
    by_name = numbers_of_names().get(answer.__name__, "") if isinstance(answer, types.FunctionType) else ""
    return by_name if by_name.split(".")[0] == str(number).split(".")[0] else number


def verdict(exercise, answer, progress=iter):
    """The `Verdict` on an answer. progress: takes the cases and gives them one by one, as tqdm does."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return _verdict(exercise, answer, progress)
    except BaseException as error:  # an answer that goes to lengths, or an interrupt between two cases
        return Verdict("wrong", f"✗ Exercise {exercise.number}: could not be checked: {name_of(error)}.")


def _verdict(exercise, answer, progress):
    name = f"Exercise {exercise.number}"
    if not callable(answer):
        return Verdict("wrong", f"✗ {name}: expected a function, got {describe(answer)}.")
    cases, outcomes = list(exercise.cases()), []
    for case in progress(cases):
        outcomes.append(apply(exercise, answer, case))
        result, _ = outcomes[-1]
        if isinstance(result, Raised) and result.kind == "not attempted":
            return Verdict("not attempted", f"○ {name}: not attempted yet. Your turn, in the cell above.")
        if isinstance(result, Raised) and result.kind in ("TooSlow", "KeyboardInterrupt"):
            break

    results = [result for result, _ in outcomes]
    for case, (result, changed) in zip(cases, outcomes, strict=False):
        if isinstance(result, Raised):
            text = f"✗ {name}: {result.text.replace('{case}', case.label)}"
        elif complaint := complaint_about(exercise, case, result):
            text = f"✗ {name}: wrong for {case.label}.\n{indent(complaint)}"
        elif changed:
            text = (
                f"✗ {name}: the result is right, but your function writes into its argument {changed}.\n"
                "  It belongs to the caller, who may need it as it was: make a new array, or copy it first."
            )
            return Verdict("wrong", text, "an argument is changed")
        else:
            continue
        mistake = mistake_behind(exercise, results) or general_slip(exercise, cases, results)
        mistake = mistake or slip_behind(exercise, results)
        if mistake:
            text += f"\n  This is what you get when {mistake.name}.\n  {mistake.advice}"
        if changed:
            text += f"\n  Besides, your function writes into its argument {changed}: copy it first."
        return Verdict("wrong", text, mistake.name if mistake else None)
    plural = "s" if len(cases) > 1 else ""
    return Verdict("correct", f"✓ {name}: correct on {len(cases)} case{plural}.")
