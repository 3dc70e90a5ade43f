"""Runs an answer, whatever it does: raise, exit, write into its arguments, or never end, where that can be stopped."""

import contextlib
import copy
import functools
import inspect
import linecache
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helpers.exercises.comparing import indent, plain
from helpers.exercises.exercise import Complaint

SECONDS = 10  # that an answer may take for one case
OURS = str(Path(__file__).parents[1])


class TooSlow(BaseException):
    """Not an Exception, so that the `except Exception` of an answer lets it pass."""


@dataclass(frozen=True)
class Raised:
    """In place of a result: the answer raised. kind: name of the exception's type; text: what to say."""

    kind: str
    text: str


def apply(exercise, answer, case):
    """(result of an answer for a case, name of an argument that it wrote into or None)."""
    changed = []

    def watched(*arguments, **options):
        before = [_snapshot(argument) for argument in arguments]
        try:
            return answer(*arguments, **options)
        finally:
            for place, (old, now) in enumerate(zip(before, arguments, strict=True)):
                if old != _snapshot(now):
                    changed.append(_name_of_argument(answer, place))

    with contextlib.suppress(BaseException):  # for the names of its parameters
        functools.update_wrapper(watched, answer)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), limited(SECONDS):
            warnings.simplefilter("ignore")
            # A deep copy, so that an answer that writes into its arguments cannot spoil the next case.
            result = plain(exercise.run(watched, *copy.deepcopy(case.arguments)))
    except Complaint as complaint:
        return Raised("Complaint", f"wrong for {{case}}.\n{indent(str(complaint))}"), None
    except BaseException as error:
        return _raised(error, answer), None
    return result, changed[0] if changed else None


@contextlib.contextmanager
def limited(seconds):
    """Raise TooSlow in the body after so many seconds, where that can be done: on POSIX, in the main thread.

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
            raise TooSlow

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 10)  # again, should the first be caught
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


def _snapshot(value):
    """Bytes that tell whether an answer wrote into an argument; None where it could not, or where nothing tells."""
    if isinstance(value, np.ndarray | list | tuple | dict):
        with contextlib.suppress(Exception):  # of functions there are none
            return pickle.dumps(value)
    return None


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
    """The `Raised` of an exception that came out of an answer."""
    kind = name_of(error)
    if kind == "TooSlow":
        return Raised(
            kind,
            f"stopped: more than {SECONDS} seconds for {{case}}.\n"
            "  Either a loop never ends, or many small steps are slow: let one operation work on a whole array.",
        )
    if kind == "KeyboardInterrupt":
        return Raised(kind, "interrupted, for {case}.")
    frames = list(traceback.walk_tb(error.__traceback__))  # from the outermost to the innermost
    code = code_of(answer)
    if isinstance(error, NotImplementedError) and not error.args and frames:
        last, line = frames[-1]
        if last.f_code is code:
            lines = {number for _, _, number in code.co_lines() if number} - {code.co_firstlineno}
            if len(lines) <= 1:
                return Raised("not attempted", "")
            said = f"Delete line {line} of your function's cell, the stub's."
            return Raised(kind, f"raised NotImplementedError for {{case}}.\n  {said}")
        return Raised(kind, f"`{last.f_code.co_name}`, which your function calls, is not written yet.")
    message = _TRACED.get(kind) or _message(error)
    text = f"raised {kind} for {{case}}." + (f"\n  {message}" if message else "")
    yours = [(frame, line) for frame, line in frames if is_learners(frame.f_code, code)]
    if yours:
        frame, line = yours[-1]
        source = linecache.getline(frame.f_code.co_filename, line).strip()
        where = "" if frame.f_code is code else f" of `{frame.f_code.co_name}`"
        text += f"\n  In line {line}{where}" + (f": {source[:120]}" if source else ".")
    return Raised(kind, text)


def code_of(answer):
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
    line = re.sub(r"apply\.<locals>\.watched", "your function", line)
    line = re.sub(r"\w+\.<locals>\.", "", line)
    return line[:200]


def name_of(error):
    return type(error).__name__
