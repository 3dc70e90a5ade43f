"""How an exercise is checked: run the answer on every case, compare, and name the misconception.

A notebook's exercises stand in ``helpers/exercises/notebook_NN.py`` as a tuple EXERCISES. Each
knows how to compute the right result and a list of known mistakes. A mistake is itself an answer,
a wrong one: an answer that agrees with it on every case is recognised by its results, whatever
the code looks like.

Answers are judged by what they are worth, whatever library and container they come from, and a
verdict is reached whatever they do: raise, exit, write into their arguments, or, where `_limited` can stop
them, loop for ever.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import linecache
import math
import numbers
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
from tqdm import tqdm

from helpers.exercises import record

SECONDS = 10  # that an answer may take for one case
ITEMS = 10_000  # of a generator or a range that is returned
STATES = {"wrong": record.TRIED, "correct": record.SOLVED}
OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer.

    name: completes the sentence "This is what you get when …".
    answer: a callable that makes the mistake, with the signature of the learner's function.
    advice: what leads on, as a rule with the section to reread.
    variants: more answers that make the same mistake with other results, for example the last of
      several equally good choices instead of the first.
    """

    name: str
    answer: Callable
    advice: str
    variants: tuple[Callable, ...] = ()


@dataclass(frozen=True)
class Case:
    """One set of arguments and how the verdict describes it, for example "T=3, S=5, H=2"."""

    label: str
    arguments: tuple


@dataclass(frozen=True)
class Exercise:
    """Everything that is needed to judge an answer.

    number, title: as in the heading, "2.1" and "The update".
    cases: a function without arguments that returns the cases, a small one first. It is called for
      each check, so that importing stays quick; it must be deterministic.
    expected: the right result for the arguments of a case: an array or number, a string, a tuple
      of those, or a dict of those. A float64 result may make a verdict say that float32 is too little.
    outputs: names of the parts of a tuple result, in order; the name of the result otherwise.
    mistakes: known wrong answers.
    tried: what the cases cover, completes "correct on N cases: …".
    run: how an answer is applied to the arguments of a case; by default it is called with them.
      May raise `Complaint` where what the answer returned cannot be used.
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


class Complaint(Exception):  # noqa: N818
    """What is wrong with a result, in words for the learner. For the `run` of an exercise."""


class _TooSlow(BaseException):
    """Not an Exception, so that the `except Exception` of an answer lets it pass."""


@dataclass(frozen=True)
class _Raised:
    """In place of a result: the answer raised. kind: name of the exception's type; text: what to say."""

    kind: str
    text: str


@dataclass(frozen=True)
class _Outcome:
    """What an answer did with a case. changed: name of an argument that it wrote into, or None."""

    result: object
    changed: str | None = None


def check(number, answer):
    """Print the verdict on an answer to exercise `number`, for example ``check("2.1", update)``.

    Never raises, and prints the same text whenever the answer is the same. A bar shows the
    progress of a check that takes more than a second, and goes away at its end. In a workbook
    the `record` keeps what was tried and solved.
    """
    try:
        found = exercise(number)
    except BaseException:
        print(f"✗ There is no exercise {_describe(number)}. CHANGES.md lists those that have moved.")
        return
    bar = functools.partial(tqdm, desc=f"Exercise {found.number}", file=sys.stdout, leave=False, delay=1, unit="case")
    judged = verdict(found, answer, bar)
    print(_in_colour(judged))
    if judged.status in STATES:
        record.note(found.number, STATES[judged.status])


def _in_colour(judged):
    """The text of a verdict, its mark green or red in a notebook. "Not attempted", which is committed, stays plain."""
    colour = {"correct": "32", "wrong": "31"}.get(judged.status)
    if colour is None or not type(sys.stdout).__module__.startswith("ipykernel"):
        return judged.text
    return f"\x1b[1;{colour}m{judged.text[0]}\x1b[0m{judged.text[1:]}"


def exercise(number):
    """The exercise with a number such as "2.1". LookupError if there is none."""
    number = str(number).strip()
    if not re.fullmatch(r"\d{1,2}\.\d{1,2}", number):
        raise LookupError(number)
    try:
        module = importlib.import_module(f"helpers.exercises.notebook_{int(number.split('.')[0]):02d}")
    except ModuleNotFoundError as error:
        raise LookupError(number) from error
    for found in module.EXERCISES:
        if found.number == number:
            return found
    raise LookupError(number)


def verdict(exercise, answer, progress=iter):
    """The `Verdict` on an answer. progress: takes the cases and gives them one by one, as tqdm does."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return _verdict(exercise, answer, progress)
    except BaseException as error:  # an answer that goes to lengths, or an interrupt between two cases
        return Verdict("wrong", f"✗ Exercise {exercise.number}: could not be checked: {_name_of(error)}.")


def _verdict(exercise, answer, progress):
    name = f"Exercise {exercise.number}"
    if not callable(answer):
        text = f"✗ {name}: expected a function, got {_describe(answer)}."
        return Verdict("wrong", text)
    cases, outcomes = exercise.cases(), []
    for case in progress(cases):
        outcome = _apply(exercise, answer, case)
        outcomes.append(outcome)
        if isinstance(outcome.result, _Raised) and outcome.result.kind == "not attempted":
            return Verdict("not attempted", f"○ {name}: not attempted yet. Your turn, in the cell above.")
        if isinstance(outcome.result, _Raised) and outcome.result.kind in ("_TooSlow", "KeyboardInterrupt"):
            break

    results = [outcome.result for outcome in outcomes]
    for case, outcome in zip(cases, outcomes, strict=False):
        result = outcome.result
        if isinstance(result, _Raised):
            text = f"✗ {name}: {result.text.replace('{case}', case.label)}"
        elif complaint := _complaint(exercise, case, result):
            text = f"✗ {name}: wrong for {case.label}.\n{_indent(complaint)}"
        elif outcome.changed:
            text = (
                f"✗ {name}: the result is right, but your function writes into its argument {outcome.changed}.\n"
                "  It belongs to the caller, who may need it as it was: make a new array, or copy it first."
            )
            return Verdict("wrong", text, "an argument is changed")
        else:
            continue
        mistake = _mistake_behind(exercise, results)
        if not mistake and (of_entry := _mistake_in_an_entry(exercise, cases, results)):
            mistake, case, complaint = of_entry  # say what is wrong with that entry: others may have other reasons
            text = f"✗ {name}: wrong for {case.label}.\n{_indent(complaint)}"
        mistake = mistake or _general_slip(exercise, cases, results, answer)
        if mistake:
            text += f"\n  This is what you get when {mistake.name}.\n  {mistake.advice}"
        if outcome.changed:
            text += (
                f"\n  Besides, your function writes into its argument {outcome.changed}: make a new array, or copy it."
            )
        return Verdict("wrong", text, mistake.name if mistake else None)
    plural = "s" if len(cases) > 1 else ""
    return Verdict("correct", f"✓ {name}: correct on {len(cases)} case{plural}: {exercise.tried}.")


# Running an answer


def _apply(exercise, answer, case):
    """The `_Outcome` of an answer for a case."""
    changed = []

    def watched(*arguments, **options):
        before = [_snapshot(argument) for argument in arguments]
        try:
            return answer(*arguments, **options)
        finally:
            for place, (old, now) in enumerate(zip(before, arguments, strict=True)):
                if not _unchanged(old, now):
                    changed.append(_name_of_argument(answer, place))

    with contextlib.suppress(BaseException):  # for the names of its parameters
        functools.update_wrapper(watched, answer)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), _limited(SECONDS):
            warnings.simplefilter("ignore")
            # A deep copy, so that an answer that writes into its arguments cannot spoil the next case.
            result = plain(exercise.run(watched, *copy.deepcopy(case.arguments)))
    except Complaint as complaint:
        return _Outcome(_Raised("Complaint", f"wrong for {{case}}.\n{_indent(str(complaint))}"))
    except BaseException as error:
        return _Outcome(_raised(error, answer))
    return _Outcome(result, changed[0] if changed else None)


@contextlib.contextmanager
def _limited(seconds):
    """Raise _TooSlow in the body after so many seconds, where that can be done: on POSIX, in the main thread.

    On a machine that is busy with other things, up to three times as many. Compiled code is not
    interrupted; the exception comes when it returns to Python.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    running, began, began_cpu = True, time.monotonic(), time.process_time()

    def stop(*_):
        waited, ran = time.monotonic() - began, time.process_time() - began_cpu
        starved = 0.01 * waited < ran < 0.6 * waited
        if running and (not starved or waited > 3 * seconds):
            raise _TooSlow

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 10)  # again, should the first be caught
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


def _snapshot(value):
    """A copy of what an answer could write into; None for anything else."""
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, list | tuple):
        return [_snapshot(item) if isinstance(item, np.ndarray | list | tuple | dict) else item for item in value]
    return dict(value) if isinstance(value, dict) else None


def _unchanged(before, now):
    if isinstance(before, np.ndarray):
        return before.shape == now.shape and np.array_equal(before, now, equal_nan=before.dtype.kind == "f")
    if isinstance(before, list):
        return len(before) == len(now) and all(map(_unchanged, before, now))
    if isinstance(before, dict):
        return before == now
    return before is None or before is now or isinstance(now, np.ndarray | list | tuple | dict)


def _name_of_argument(answer, place):
    with contextlib.suppress(BaseException):
        return f"`{list(inspect.signature(answer).parameters)[place]}`"
    return f"number {place + 1}"


# What went wrong in an answer

_TRACED = {
    "TracerArrayConversionError": "a value inside a kernel or a traced function is not there yet: use jnp, not np",
    "TracerBoolConversionError": "a traced value is neither true nor false yet: no Python `if`, `while`, "
    "`and`, `max` or `min` on it, but jnp.where, jnp.maximum",
    "TracerIntegerConversionError": "a traced value is no Python integer: no int(), range() or list index with it",
    "ConcretizationTypeError": "a traced value is no Python number: no int(), float(), bool() or `if` on it",
    "NonConcreteBooleanIndexError": "a traced mask cannot select entries: use jnp.where",
    "UnexpectedTracerError": "a traced value was kept after its function had ended: return it instead",
}


def _raised(error, answer):
    """The `_Raised` of an exception that came out of an answer."""
    kind = _name_of(error)
    if kind == "_TooSlow":
        return _Raised(
            kind,
            f"stopped: more than {SECONDS} seconds for {{case}}.\n"
            "  Either a loop never ends, or many small steps are slow: let one operation work on a whole array.",
        )
    if kind == "KeyboardInterrupt":
        return _Raised(kind, "interrupted, for {case}.")
    frames = _frames(error)
    code = _code_of(answer)
    if isinstance(error, NotImplementedError) and not error.args and frames:
        last, line = frames[-1]
        if last.f_code is code:
            lines = {number for _, _, number in code.co_lines() if number} - {code.co_firstlineno}
            if len(lines) <= 1:
                return _Raised("not attempted", "")
            text = (
                f"raised NotImplementedError for {{case}}.\n  Delete line {line} of your function's cell, the stub's."
            )
            return _Raised(kind, text)
        text = f"`{last.f_code.co_name}`, which your function calls, is not written yet."
        return _Raised(kind, text)
    message = _TRACED.get(kind) or _message(error)
    text = f"raised {kind} for {{case}}." + (f"\n  {message}" if message else "")
    yours = [(frame, line) for frame, line in frames if is_learners(frame.f_code, code)]
    if yours:
        frame, line = yours[-1]
        source = linecache.getline(frame.f_code.co_filename, line).strip()
        where = "" if frame.f_code is code else f" of `{frame.f_code.co_name}`"
        text += f"\n  In line {line}{where}" + (f": {source[:120]}" if source else ".")
    return _Raised(kind, text)


def _frames(error):
    """(frame, line number) from the outermost to the innermost."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _code_of(answer):
    """The code object of a function, also behind functools.partial, jax.jit or a decorator; None without one."""
    for _ in range(10):
        inner = getattr(answer, "func", None) if isinstance(answer, functools.partial) else None
        inner = inner or getattr(answer, "__wrapped__", None) or getattr(answer, "__func__", None)
        if inner is None:
            break
        answer = inner
    return getattr(answer, "__code__", None)


def is_learners(code, own=None):
    """Whether code was written by the learner: own, the answer's, or any that lies in no library and not in here."""
    path = code.co_filename
    if code is own:
        return True
    return not path.startswith((OURS, sys.prefix, sys.base_prefix, "<")) and "site-packages" not in path


def _message(error):
    """The first line of an exception's message, without what differs from run to run or is the checker's own."""
    try:
        line = (str(error).strip().splitlines() or [""])[0]
    except Exception:
        return ""
    if line.startswith("JAX arrays are immutable"):
        return "a JAX array cannot be written into: compute a new one and return it"
    if "captures constants" in line:
        return (
            "a kernel takes no array from outside, and np.arange, jnp.array of a list, or an array's .at[...] "
            "(not a ref's) can bring one along: use jnp.arange, + and jnp.where"
        )
    line = re.sub(r" at 0x[0-9a-f]+", "", line)
    line = re.sub(r"(\S*/)?helpers/exercises/\S+", "the check", line)
    line = re.sub(r"_apply\.<locals>\.watched", "your function", line)
    return line[:200]


def _name_of(error):
    return type(error).__name__


# What results are worth


def plain(value):
    """A result as str, NumPy numbers and arrays, tuples and dicts of those; anything else is left as it is.

    On the host, so that asynchronous errors surface here.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(plain(item) for item in value)
    if isinstance(value, Iterator | range):
        return tuple(plain(item) for item in itertools.islice(value, ITEMS))
    if isinstance(value, Fraction | Decimal):
        return plain(int(value) if value == int(value) else float(value))
    if isinstance(value, numbers.Number) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind == "V":  # bfloat16
            array = array.astype(np.float32)
        if array.dtype.kind in "biufc":
            return array[()]
        if array.dtype.kind in "OU" and not (array.shape == () and array.item() is value):
            return plain(array.tolist())
    return value


def _numbers(value):
    """A plain value as an array of numbers, or None."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, tuple):
        parts = [_numbers(part) for part in value]
        if any(part is None for part in parts) or len({part.shape for part in parts}) > 1:
            return None
        return np.array(parts)
    return None


def _parts(result, names, expected):
    """The parts of a result in the order of `names`, or None if it has others. May be given as an array or in pairs."""
    if isinstance(expected, dict):
        return tuple(result[name] for name in names) if isinstance(result, dict) and set(names) <= set(result) else None
    if not isinstance(expected, tuple):
        return (result,)
    if isinstance(result, np.ndarray) and all(np.shape(right) == result.shape[1:] for right in expected):
        result = tuple(result)
    return result if isinstance(result, tuple) and len(result) == len(expected) else None


def _from_pairs(result, expected):
    """Parts of a result that lists (a, b), (a, b), … where (a's, b's) was asked; None if it does not."""
    if not isinstance(expected, tuple) or not isinstance(result, tuple):
        return None
    if not all(isinstance(row, tuple) and len(row) == len(expected) for row in result):
        return None
    return tuple(zip(*result, strict=True)) or None


def _complaint(exercise, case, result):
    """What is wrong with a result, or None."""
    if exercise.judge:
        try:
            said = exercise.judge(result, case)
            return f"{said}, got {_got(result)}" if said and result is None else said
        except Complaint as complaint:
            return str(complaint)
        except BaseException:  # the result was not of the kind that the judge looks into
            return f"{exercise.outputs[0]}: this cannot be judged: {_got(result)}"
    expected, names = _expected(exercise, case)
    parts = _parts(result, names, expected)
    if parts is None:
        pairs = _from_pairs(result, expected)
        if pairs and not _first_difference(exercise, names, pairs, expected):
            return None
        if isinstance(expected, dict):
            if not isinstance(result, dict):
                return f"expected a dict with the keys {', '.join(map(str, names))}, got {_got(result)}"
            return f"the dict lacks the key {next(name for name in names if name not in result)!r}"
        count = "one number, " if isinstance(result, numbers.Number) else ""  # a lone 4 reads like four results
        return f"expected {len(expected)} results ({', '.join(names)}), got {count}{_got(result)}"
    complaint = _first_difference(exercise, names, parts, expected)
    if (
        complaint
        and (pairs := _from_pairs(result, expected))
        and not _first_difference(exercise, names, pairs, expected)
    ):
        return None
    return complaint


def _expected(exercise, case):
    """The right result and the names of its parts."""
    expected = plain(exercise.expected(*copy.deepcopy(case.arguments)))
    return expected, tuple(expected) if isinstance(expected, dict) else exercise.outputs


def _values(expected):
    return (
        tuple(expected.values())
        if isinstance(expected, dict)
        else expected
        if isinstance(expected, tuple)
        else (expected,)
    )


def _first_difference(exercise, names, parts, expected):
    for name, mine, right in zip(names, parts, _values(expected), strict=True):
        complaint = _compare(mine, right, exercise.tolerance, exercise.exact_dtype)
        if complaint:
            return f"{name}: {complaint}"
    return None


def _compare(mine, right, tolerance, exact_dtype=False):
    """What distinguishes a value from the right one, or None if they agree."""
    if isinstance(right, str):
        return None if isinstance(mine, str) and mine == right else f"expected {right!r}, got {_got(mine)}"
    right = _numbers(right)
    array = _numbers(mine)
    if array is None:
        return f"expected {_describe(right)}, got {_got(mine)}"
    if array.shape != right.shape:
        if right.shape == ():
            return f"expected a number, got {_got(mine)}"
        return f"expected shape {right.shape}, got {array.shape if array.shape else _got(array)}"
    if exact_dtype and array.dtype != right.dtype:
        return f"expected dtype {right.dtype}, got {array.dtype}"
    if np.iscomplexobj(array):
        return f"expected real numbers, got dtype {array.dtype}"
    note = ""
    if right.dtype.kind in "bi":
        wrong = array != right
        mine, whole = array, True
    else:
        wide = right.dtype.itemsize == 8
        mine, right, whole = array.astype(np.float64), right.astype(np.float64), False
        if np.isnan(mine).any() and not np.isnan(right).any():
            count = int(np.isnan(mine).sum())
            return "yours is NaN" if mine.size == 1 else f"{count} of {mine.size} entries are NaN, expected none"
        if _close(mine, right, tolerance):
            return None
        scale = np.abs(right[np.isfinite(right)]).max(initial=0) or 1
        wrong = ~np.isclose(mine, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        if not wrong.any():  # spread thinly: show the worst
            wrong = np.abs(mine - right) == np.nanmax(np.abs(mine - right))
        if wide and array.dtype.kind == "f" and array.dtype.itemsize < 8 and _close(mine, right, 100 * tolerance):
            needed = "float64" if array.dtype.itemsize == 4 else "a wider dtype"
            note = f"\nYour result is {array.dtype}; if the method is right, this case needs {needed}."
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at {list(index)}" if index else ""
    yours, expected = _apart(mine[index].item(), right[index].item())
    exactly = ", exactly" if whole and array.dtype.kind == "f" and expected == f"{round(mine[index].item())}" else ""
    return f"yours{where} {yours}, expected {expected}{exactly}{note}"


def _close(mine, right, tolerance):
    finite = np.isfinite(right)
    if not np.array_equal(mine[~finite], right[~finite], equal_nan=True):
        return False
    largest = np.abs(right[finite]).max(initial=0) or 1  # by which both are divided, lest a square overflow
    mine, right = mine[finite] / largest, right[finite] / largest
    error, size = np.linalg.norm(mine - right), np.linalg.norm(right)
    return bool(error <= tolerance * size) if size else bool(error <= tolerance)


# Naming a mistake


def _mistake_in_an_entry(exercise, cases, results):
    """For results that are dicts of the same keys: the known mistake behind the first wrong entry that has one.

    With the first case in which that entry is wrong, and how. None if no entry has one.
    """
    if exercise.judge or not all(isinstance(result, dict) for result in results):
        return None
    rights = [_expected(exercise, case)[0] for case, _ in zip(cases, results, strict=False)]
    if not isinstance(rights[0], dict) or any(right.keys() != rights[0].keys() for right in rights):
        return None
    for name in rights[0]:
        mine = [result.get(name) for result in results]
        wrong = [
            (case, f"{name}: {said}")
            for case, one, right in zip(cases, mine, rights, strict=False)
            if (said := _compare(one, right[name], exercise.tolerance, exercise.exact_dtype))
        ]
        if wrong:
            mistake = _mistake_behind(exercise, mine, lambda result, name=name: result[name])
            if mistake:
                return mistake, *wrong[0]
            if any(isinstance(right, str) for right in rights[0].values()):
                return None  # a name among numbers follows from them, and may be wrong by many a mistake
    return None


def _mistake_behind(exercise, results, part=lambda result: result):
    """The known mistake of which this part agrees with results on every case, or None."""
    if all(isinstance(result, _Raised) for result in results):
        return None
    for mistake in exercise.mistakes:
        for answer in (mistake.answer, *mistake.variants):
            with contextlib.suppress(Exception):  # where the mistake does not apply to results of this kind
                if all(
                    _same(result, part(_mistaken(exercise, answer, number)), 10 * exercise.tolerance)
                    for number, result in enumerate(results)
                ):
                    return mistake
    return None


@functools.cache
def _mistaken(exercise, answer, case_number):
    """What a wrong answer returns for a case: the same each time, so computed once."""
    return _apply(exercise, answer, exercise.cases()[case_number]).result


def _same(a, b, tolerance):
    """Whether two results are equal; whoever raises in the same case counts as doing the same, a complaint apart."""
    if isinstance(a, _Raised) or isinstance(b, _Raised):
        return isinstance(a, _Raised) and isinstance(b, _Raised) and (a.kind == "Complaint") == (b.kind == "Complaint")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
        return a is b or (isinstance(a, str) and a == b)
    if isinstance(a, tuple) and isinstance(b, tuple):  # one by one: beside a large number a small one could be anything
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    a, b = _numbers(a), _numbers(b)
    if a is None or b is None or a.shape != b.shape:
        return False
    if a.dtype.kind != b.dtype.kind and {a.dtype.kind, b.dtype.kind} - set("iuf"):
        return False
    if b.dtype.kind in "iu":  # a count: one more or less is another
        tolerance = min(tolerance, 1e-9)
    return _close(a.astype(np.float64), b.astype(np.float64), tolerance)


def _general_slip(exercise, cases, results, answer):
    """A slip that can be told in any exercise by its results, as a `Mistake` without an answer; or None."""
    if exercise.judge or len(results) < 2 or any(isinstance(result, _Raised) for result in results):
        return None
    table, names = [], None  # table: of (parts, right parts)
    for case, result in zip(cases, results, strict=False):
        expected, names_here = _expected(exercise, case)
        parts = _parts(result, names_here, expected)
        if parts is None or names not in (None, names_here):
            return None
        names = names_here
        table.append((parts, _values(expected)))
    agree = lambda mine, right: _compare(mine, right, 10 * exercise.tolerance) is None
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
            return Mistake(f"the results come as {yours}", None, f"The order asked for is {asked}.")
    found = []
    for place in places:
        if not all(agree(mine[place], right[place]) for mine, right in table):
            columns = [(_numbers(mine[place]), right[place]) for mine, right in table]
            if any(mine is None or isinstance(right, str) for mine, right in columns):
                return None
            columns = [(mine, _numbers(right)) for mine, right in columns]
            slip = _slip_of_shape(columns, agree) or _slip_of_factor(columns, agree)
            slip = slip or _slip_of_count(columns, _amounts(answer, cases))
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
    if abs(factor) > 1e-3 and all(agree(m, np.where(np.isfinite(r), factor * r, r)) for m, r in columns):
        known = {
            -1.0: "has the wrong sign",
            math.log2(math.e): "is too large by log2(e) = 1.4427: it is in base two",
            math.log(2): "is too small by ln 2 = 0.6931: it was divided by log2(e)",
        }
        says = next((says for value, says in known.items() if math.isclose(factor, value, rel_tol=1e-4)), None)
        says = says or f"is {factor:.4g} times what it should be"
        return f"{says}, in every case", "Look for a factor that is missing, or counted twice."
    if abs(offset) > 1e-3 and all(agree(m, r + offset) for m, r in columns):
        size = "large" if offset > 0 else "small"
        return (
            f"is too {size} by {abs(offset):.4g}, in every case",
            "Look for a term that is missing, or counted twice.",
        )
    return None


def _amounts(answer, cases):
    """{name: values over the cases} of the arguments that are numbers, larger than 0."""
    with contextlib.suppress(BaseException):
        names = list(inspect.signature(answer).parameters)
        columns = zip(*(case.arguments for case in cases), strict=True)
        return {
            name: np.array(column, float)
            for name, column in zip(names, columns, strict=False)
            if all(isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in column)
        }
    return {}


def _slip_of_count(columns, amounts):
    """The same for a count that lacks a factor, or a term that is a product of arguments."""
    if any(mine.shape or right.shape for mine, right in columns):
        return None
    mine, right = (np.array([float(pair[side]) for pair in columns]) for side in (0, 1))
    if not np.isfinite(mine).all() or not (mine * right > 0).all():
        return None
    same = lambda a: np.ptp(a) <= 1e-9 * np.abs(a).max()
    for name, values in amounts.items():
        if not same(values) and same(right / mine / values):
            times = f" and {constant:.4g}" if not math.isclose(constant := (right / mine / values)[0], 1) else ""
            return f"lacks the factor {name}{times}", "Look at what is multiplied."
        if not same(values) and same(mine / right / values):
            times = f" and {constant:.4g}" if not math.isclose(constant := (mine / right / values)[0], 1) else ""
            return f"has the factor {name}{times} once too often", "Look at what is multiplied."
    for count in range(1, 6):
        for chosen in itertools.combinations_with_replacement(amounts, count):
            product = math.prod(amounts[name] for name in chosen)
            terms = (mine - right) / product
            if same(terms) and not same(product) and abs(terms[0]) < 65:
                size = f"{abs(terms[0]):.4g} · " if not math.isclose(abs(terms[0]), 1) else ""
                what = f"{size}{' · '.join(chosen)}"
                return f"{'has' if terms[0] > 0 else 'lacks'} {what}" + (" too much" if terms[0] > 0 else ""), (
                    "Look for a term that is missing, or counted twice."
                )
    return None


# Words


def _apart(mine, right):
    """Two different numbers with as many digits as it takes to tell them apart."""
    for digits in (6, 9, 12, 17):
        texts = _number(mine, digits), _number(right, digits)
        if texts[0] != texts[1]:
            return texts
    return f"{texts[0]} ({mine!r})", texts[1]


def _number(value, digits=6):
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() < 200 else f"an integer of {value.bit_length()} bits"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _got(value):
    """`_describe`, and what may have led to it."""
    return "None: is a `return` missing?" if value is None else _describe(value)


def _describe(value):
    """A short, deterministic description of any value."""
    try:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, int | float):
            return _number(value)
        if value is None or isinstance(value, str):
            return repr(value)[:80]
        if isinstance(value, tuple | list | dict):
            return f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, np.ndarray):
            return _number(value.item()) if value.shape == () else f"an array of shape {value.shape}"
    except BaseException:
        pass
    return f"an object of type {type(value).__name__}"


def _indent(text):
    return "\n".join("  " + line for line in text.splitlines())
