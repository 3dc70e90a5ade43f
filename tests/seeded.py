"""Seeded faults: a copy of a module with a line of its source changed."""

import inspect
import types

from helpers.exercises.edits import changed


def seeded(module, *changes):
    """A copy of a module in which, for each (old, new), the one place that reads `old` reads `new`."""
    source = changed(inspect.getsource(module), *changes, once=True)
    copy = types.ModuleType(module.__name__)
    copy.__file__ = module.__file__
    exec(compile(source, module.__file__, "exec"), copy.__dict__)
    return copy
