"""What a result is worth, whatever library and container it comes from, and how it differs from the right one."""

import copy
import itertools
import numbers
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction

import numpy as np

from helpers.exercises.exercise import Complaint

ITEMS = 10_000  # of a generator or a range that is returned


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


def as_numbers(value):
    """A plain value as an array of numbers, or None."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, tuple):
        parts = [as_numbers(part) for part in value]
        if any(part is None for part in parts) or len({part.shape for part in parts}) > 1:
            return None
        return np.array(parts)
    return None


def parts_of(result, names, expected):
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


def complaint_about(exercise, case, result):
    """What is wrong with a result, or None."""
    if exercise.judge:
        try:
            said = exercise.judge(result, case)
            return f"{said}, got {got(result)}" if said and result is None else said
        except Complaint as complaint:
            return str(complaint)
        except BaseException:  # the result was not of the kind that the judge looks into
            return f"{exercise.outputs[0]}: this cannot be judged: {got(result)}"
    expected, names = expected_of(exercise, case)
    if (pairs := _from_pairs(result, expected)) and not _first_difference(exercise, names, pairs, expected):
        return None
    parts = parts_of(result, names, expected)
    if parts is not None:
        return _first_difference(exercise, names, parts, expected)
    if isinstance(expected, dict):
        if not isinstance(result, dict):
            return f"expected a dict with the keys {', '.join(map(str, names))}, got {got(result)}"
        return f"the dict lacks the key {next(name for name in names if name not in result)!r}"
    count = "one number, " if isinstance(result, numbers.Number) else ""  # a lone 4 reads like four results
    return f"expected {len(expected)} results ({', '.join(names)}), got {count}{got(result)}"


def expected_of(exercise, case):
    """The right result and the names of its parts."""
    arguments = copy.deepcopy(case.arguments)
    right = exercise.expected(*arguments) if exercise.expected else exercise.run(exercise.solution, *arguments)
    expected = plain(right)
    return expected, tuple(expected) if isinstance(expected, dict) else exercise.outputs


def values_of(expected):
    if isinstance(expected, dict):
        return tuple(expected.values())
    return expected if isinstance(expected, tuple) else (expected,)


def _first_difference(exercise, names, parts, expected):
    for name, mine, right in zip(names, parts, values_of(expected), strict=True):
        complaint = compare(mine, right, exercise.tolerance)
        if complaint:
            return f"{name}: {complaint if len(names) == 1 else complaint.removesuffix(': is a `return` missing?')}"
    return None


def compare(mine, right, tolerance):
    """What distinguishes a value from the right one, or None if they agree."""
    if isinstance(right, str):
        return None if isinstance(mine, str) and mine == right else f"expected {right!r}, got {got(mine)}"
    right = as_numbers(right)
    array = as_numbers(mine)
    if array is None:
        return f"expected {describe(right)}, got {got(mine)}"
    if array.shape != right.shape:
        if right.shape == ():
            return f"expected {'True or False' if right.dtype.kind == 'b' else 'a number'}, got {got(mine)}"
        return f"expected shape {right.shape}, got {array.shape if array.shape else got(array)}"
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
        if close(mine, right, tolerance):
            return None
        scale = np.abs(right[np.isfinite(right)]).max(initial=0) or 1
        wrong = ~np.isclose(mine, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        if not wrong.any():  # spread thinly: show the worst
            wrong = np.abs(mine - right) == np.nanmax(np.abs(mine - right))
        if wide and array.dtype.kind == "f" and array.dtype.itemsize < 8 and close(mine, right, 100 * tolerance):
            needed = "float64" if array.dtype.itemsize == 4 else "a wider dtype"
            note = f"\nYour result is {array.dtype}; if the method is right, this case needs {needed}."
    if not wrong.any():
        of_floats = right.dtype.kind in "iu" and right.shape and array.dtype.kind == "f"  # no index, whatever its value
        return f"expected integers, got dtype {array.dtype}" if of_floats else None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at {list(index)}" if index else ""
    yours, expected = _apart(mine[index].item(), right[index].item())
    exactly = ", exactly" if whole and array.dtype.kind == "f" and expected == f"{round(mine[index].item())}" else ""
    return f"yours{where} {yours}, expected {expected}{exactly}{note}"


def close(mine, right, tolerance):
    finite = np.isfinite(right)
    if not np.array_equal(mine[~finite], right[~finite], equal_nan=True):
        return False
    largest = np.abs(right[finite]).max(initial=0) or 1  # by which both are divided, lest a square overflow
    mine, right = mine[finite] / largest, right[finite] / largest
    error, size = np.linalg.norm(mine - right), np.linalg.norm(right)
    return bool(error <= tolerance * size) if size else bool(error <= tolerance)


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


def got(value):
    """`describe`, and what may have led to it."""
    return "None: is a `return` missing?" if value is None else describe(value)


def describe(value):
    """A short, deterministic description of any value."""
    try:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, int | float):
            return _number(value)
        if value is None or isinstance(value, str):
            return repr(value)[:300]
        if isinstance(value, tuple | list | dict):
            return f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, np.ndarray):
            return _number(value.item()) if value.shape == () else f"an array of shape {value.shape}"
    except BaseException:
        pass
    return f"an object of type {type(value).__name__}"


def indent(text):
    return "\n".join("  " + line for line in text.splitlines())
