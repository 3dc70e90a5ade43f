"""Seeded faults: a copy of a module with a line of its source changed."""

import inspect
import types


def seeded(module, *changes):
    """A copy of a module in which, for each (old, new), the one place that reads `old` reads `new`."""
    source = inspect.getsource(module)
    for old, new in changes:
        assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} times {old!r}"
        source = source.replace(old, new)
    copy = types.ModuleType(module.__name__)
    copy.__file__ = module.__file__
    exec(compile(source, module.__file__, "exec"), copy.__dict__)
    return copy
