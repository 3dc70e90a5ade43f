"""Show the source of a helper in a notebook, with colours, as a whole or by named regions."""

import inspect
import re
import textwrap

MARK = re.compile(r"\s*(?:#|//) --(?: (.+))?")  # begins a region, and ends the one before


class Source(str):
    """Python code, which a notebook shows as such."""

    def __repr__(self):
        return str(self)

    def _repr_markdown_(self):
        return f"```python\n{self}\n```"


def show(function, *regions):
    """The source of a function or class, or regions of it by name.

    A region begins below a comment `# -- name`. It ends at the next such comment, which may have no name, or with the
    block in which it begins. These comments are not shown. ValueError where no region has a name.
    """
    return cut(inspect.getsource(function), *regions)


def cut(source, *regions):
    """What `show` makes of a source: all of it, or regions."""
    lines = source.splitlines()
    parts = [_region(lines, name) for name in regions] or [lines]
    shown = ["\n".join(line for line in part if not MARK.fullmatch(line)) for part in parts]
    return Source("\n\n".join(textwrap.dedent(text).strip("\n") for text in shown))


def _region(lines, name):
    names = [mark and mark[1] for mark in map(MARK.fullmatch, lines)]
    if name not in names:
        raise ValueError(f"no region is called {name!r}")
    start = names.index(name) + 1
    indent = lambda line: len(line) - len(line.lstrip())
    is_outside = lambda line: line.strip() and indent(line) < indent(lines[start - 1]) and not line.startswith("#")
    ends = (n for n in range(start, len(lines)) if MARK.fullmatch(lines[n]) or is_outside(lines[n]))
    return lines[start : next(ends, len(lines))]
