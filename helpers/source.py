"""Show the source of a helper in a notebook, with colours, as a whole or some of its lines."""

import inspect
import textwrap


class Source(str):
    """Python code, which a notebook shows as such."""

    def __repr__(self):
        return str(self)

    def _repr_markdown_(self):
        return f"```python\n{self}\n```"


def show(function, *parts):
    """The source of a function or class, or the lines of its parts.

    A part is a pair of texts: it goes from the first line that holds the one to the next line that holds the
    other. A single text is a part of one line. ValueError where no line holds a text.
    """
    return cut(inspect.getsource(function), *parts)


def cut(source, *parts):
    """What `show` makes of a source: all of it, or the lines of its parts."""
    lines, found = source.splitlines(), []
    for part in parts:
        first, last = (part, part) if isinstance(part, str) else part
        start = _line_with(first, lines, 0)
        found.append(textwrap.dedent("\n".join(lines[start : _line_with(last, lines, start) + 1])))
    return Source("\n\n".join(found) if parts else textwrap.dedent(source).rstrip())


def _line_with(text, lines, start):
    for number, line in enumerate(lines[start:], start):
        if text in line:
            return number
    raise ValueError(f"no line from {start} on holds {text!r}")
