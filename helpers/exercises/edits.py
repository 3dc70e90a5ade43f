"""Source code with a slip in it: a known mistake is an edit of the solution, a seeded fault one of a kernel."""

import functools
import inspect
import textwrap

EDITED = "/an edited solution"  # in place of a file's name, so that a check takes it for a learner's code


def changed(text, *changes, once=False):
    """Text in which each `old` is replaced by its `new`, wherever it stands or, with once, where it stands once.

    ValueError where it stands nowhere, or with once in several places.
    """
    for old, new in changes:
        count = text.count(old)
        if not count or (once and count > 1):
            raise ValueError(f"{old!r} stands in it {count} times: {text[:80]!r} …")
        text = text.replace(old, new)
    return text


@functools.cache
def edited(function, *changes):
    """A function of a module with changed source, (old, new) each."""
    return written(function, changed(source_of(function), *changes))


def source_of(function):
    """The source of a function, as if it stood at the top of a module."""
    return textwrap.dedent(inspect.getsource(function))


def written(function, source):
    """What source, which defines it anew, makes of a function: the names that it uses are those of its module."""
    names = dict(function.__globals__)
    exec(compile(source, EDITED, "exec"), names)
    return names[function.__name__]
