"""Watches what an answer builds or calls, for exercises that forbid whole tables, or a helper."""

import contextlib
import sys
import tracemalloc

import numpy as np
from jax._src.interpreters import ad

from helpers.exercises.exercise import Complaint
from helpers.exercises.running import is_learners


class _Watched(np.ndarray):
    """An array that notes the shape of every array made from it, and shows each to `note`."""

    __array_priority__ = 2
    shapes = note = None

    def __array_finalize__(self, source, is_noted=True):
        self.shapes, self.note = getattr(source, "shapes", None), getattr(source, "note", None)
        if self.shapes is not None and is_noted:
            self.shapes.add(self.shape)
        if self.note is not None:
            self.note(self)


class _Second(_Watched):
    """The same, but what is made from a first one and this one is noted by the first alone, and parts of it by none."""

    __array_priority__ = 1

    def __array_finalize__(self, source):
        super().__array_finalize__(source, self.base is None or self.base.base is None)  # a part's base is a view


def watch(array, second=False, reads=None, name=""):
    """A view of a NumPy array, and a set that will hold the shape of every array that NumPy makes from it.

    second: leave to another watched array what is made from both, and do not count slices of the array as made.
    reads: a list that gets (name, first row, rows) of each part of the array, copies of parts left out.
    """
    view = array.view(_Second if second else _Watched)
    view.shapes = set()

    def note(made):
        row = (made.__array_interface__["data"][0] - array.__array_interface__["data"][0]) // array.strides[0]
        if 0 <= row < len(array):
            reads.append((name, row, made.size * len(array) // array.size))

    view.note = None if reads is None else note
    return view, view.shapes


def exceeds(limit, run):
    """(what run() returns, whether Python and NumPy allocated more than limit bytes for it at one moment).

    Runs a second time before it says so, since libraries allocate more on a first call.
    """
    for _ in range(2):
        if tracemalloc.is_tracing():  # somebody else is watching
            return run(), False
        tracemalloc.start()
        try:
            result, most = run(), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if most <= limit:
            return result, False
    return result, True


@contextlib.contextmanager
def _profiled(note):
    """Within, Python tells note(frame, event, _) of every call and return."""
    before = sys.getprofile()
    sys.setprofile(note if before is None else lambda *seen: (before(*seen), note(*seen)))
    try:
        yield
    finally:
        sys.setprofile(before)


def kept(run, unwanted):
    """(what run() returns, whether a variable of the learner's functions was unwanted(shape) when one returned).

    Sees arrays of any library, and those of a function that JAX traces.
    """
    found = []

    def note(frame, event, _):
        if event == "return" and is_learners(frame.f_code):
            shapes = [getattr(value, "shape", None) for value in frame.f_locals.values()]
            found.extend(shape for shape in shapes if isinstance(shape, tuple) and unwanted(shape))

    with _profiled(note):
        result = run()
    return result, bool(found)


def without(module, answer, *arguments, said=None):
    """What an answer returns. Complaint, about `said`, where it calls a function of the module, or a helper does."""
    names = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename == module.__file__:
            names.append(frame.f_code.co_name)

    with _profiled(note):
        result = answer(*arguments)
    if names:
        raise Complaint(f"{said or f'`{names[0]}` of {module.__name__}'} was called; here you write the formulas.")
    return result


def by_formulas(answer, *arguments):
    """`without` what JAX differentiates by."""
    return without(ad, answer, *arguments, said="`jax.grad`, or its like,")
