"""The learner's own module, mine.py: what a check accepted goes into it, and notebooks run what it holds.

It lies where the notebooks lie. Above what a check wrote stands a line with the number of the exercise and a digest of
what follows. As long as the digest fits, the next right answer to that exercise replaces it; what the learner edited or
added is left as it is, but that an import may gain names.
"""

import ast
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import itertools
import os
import re
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

import jax
import numpy as np
from IPython import get_ipython

from helpers import clock
from helpers.exercises import record
from helpers.exercises.exercise import exercise, numbers_of_names
from helpers.exercises.gathering import bound, first_line, gather, import_of, source_of
from helpers.exercises.running import SECONDS, limited, name_of
from helpers.workbook import replace

FILE = "mine.py"
HEADER = '''"""Flash attention of your own: what checks accepted, and whatever you add.

A line such as "# Exercise 5.5, digest 0a1b2c3d" stands above what a check wrote. Your next right answer to that
exercise replaces it, unless you have edited it here. Of all else, only an import may gain names.
"""
'''
ON_GPU = "# On a GPU a kernel runs in place of another. Without its line, it does not.\n"
IN_PLACE = re.compile(rf"\n\n\n{ON_GPU}((?:\w+ = on_\w+\(\w+, \w+\)\n)+)")
MARK = re.compile(r"# Exercise (\d+\.\d+), digest (\w{8})$")
TRIAL_S = 60


class NotKept(Exception):  # noqa: N818
    """Why an answer was not written into mine.py, in words that follow "Not kept in mine.py: "."""


# Writing


def keep(found, names):
    """Write an accepted answer to a building block, and what it needs, into mine.py. Returns what to say of it.

    found: its `Exercise`; names: the variables of the notebook. Never raises. Where no notebook runs, nothing is
    written or said.
    """
    if not (found.building_block and (record.in_a_workbook() or get_ipython())):
        return ""
    name, path = found.solution.__name__, Path(os.path.realpath(FILE))
    try:
        gathered = gather(name, names)
        if gathered.missing:
            missing = ", ".join(f"`{each}`" for each in gathered.missing)
            raise NotKept(f"it takes {missing} from another cell. Make it an argument, or define it inside.")
        in_place = []
        if found.in_place:
            where, plain = found.in_place
            gathered.imports[where] = f"from helpers.environment import {where}"
            home = exercise(numbers_of_names()[plain]).solution.__module__
            gathered.imports[plain] = f"from {home} import {plain}"  # until the learner has one
            in_place = [f"{plain} = {where}({name}, {plain})\n"]
        with _locked(path):
            text = path.read_bytes().decode() if path.exists() else HEADER
            changed = merged(text, gathered, found.number, in_place)
            if changed != text:
                _try_out(changed)
                replace(path, lambda temporary: temporary.write_bytes(changed.encode()))
        refresh()
    except NotKept as reason:
        return f"  Not kept in {FILE}: {reason}"
    except OSError as error:
        return f"  Not kept in {FILE}: this folder cannot be written ({error.strerror or error})."
    except BaseException as error:
        return f"  Not kept in {FILE}: {name_of(error)}."
    lost = ", which Colab forgets with this session: download it" if "google.colab" in sys.modules else ""
    return f"  Kept: `{name}` is in your {FILE}{lost}."


def merged(text, gathered, number, in_place=()):
    """The text of mine.py with what was gathered for an exercise. `NotKept` where the learner's own code forbids it.

    in_place: lines that put a kernel in place of another, which stand at the end, behind both.
    """
    in_place = [*in_place, *itertools.chain(*(found.splitlines(keepends=True) for found in IN_PLACE.findall(text)))]
    text = IN_PLACE.sub("\n", text)
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", "?")
        raise NotKept(f"it cannot be read as Python (line {line}). Mend it, and check again.") from None
    holders = {name: node for node in body for name in bound(node)}
    new_imports, replaced, added = [], {}, []
    for name, statement in gathered.imports.items():
        holder, node = holders.get(name), ast.parse(statement).body[0]
        if holder is None:
            new_imports.append(node)
        elif _is_stand_in(node):
            continue  # the learner has one
        elif not isinstance(holder, ast.Import | ast.ImportFrom) or import_of(name, holder) != statement:
            raise NotKept(f"`{name}` is something else there than here. Rename one of them.")
    for name, source in gathered.definitions.items():
        block = f"# Exercise {number}, digest {_digest(source)}\n{source}".splitlines()
        holder = holders.get(name)
        if holder is None:
            added += ["", "", *block]
        elif _is_stand_in(holder):
            added += ["", "", *block]
            replaced[holder.lineno - 1, holder.end_lineno] = []
        elif source_of(holder, text) != source:
            owner = _exercise_of(holder, text)
            if owner is None:
                raise NotKept(f"it has a `{name}` that you wrote or edited there. Rename one of them.")
            if owner != number:
                raise NotKept(f"its `{name}` is another, of exercise {owner}. Check that one again first.")
            replaced[first_line(holder) - 2, holder.end_lineno] = block
    if replaced and any(replaced.values()):
        # What is new goes before the last of what is replaced, which may need it.
        last = max(place for place, block in replaced.items() if block)
        replaced[last], added = [*added[2:], *["", ""][: len(added)], *replaced[last]], []
    if new_imports:
        head = list(itertools.takewhile(lambda node: isinstance(node, ast.Import | ast.ImportFrom | ast.Expr), body))
        top = max((node.end_lineno for node in head), default=0)
        gap = [""] if top and isinstance(body[0], ast.Expr) and top == body[0].end_lineno else []
        homes = {node.module: node for node in head if _may_grow(node, text)}  # a line for all names of a module
        for node in new_imports:
            home = homes.setdefault(node if _is_stand_in(node) else getattr(node, "module", node), node)
            if home is not node:
                home.names += node.names
        replaced |= {(node.lineno - 1, node.lineno): [ast.unparse(node)] for node in homes.values() if node in head}
        apart = [ast.unparse(node) for node in homes.values() if node not in head]
        replaced[top, top] = gap + sorted(apart, key=lambda each: (each.startswith("from"), each))
    lines = text.removesuffix("\n").split("\n")
    for (begin, end), block in sorted(replaced.items(), reverse=True):
        lines[begin:end] = block
    text = "\n".join(lines + added) + "\n"
    in_order = sorted(set(in_place))  # by names: what is for a Hopper GPU alone comes last, and is asked first
    return text + "\n\n" + ON_GPU + "".join(in_order) if in_order else text


def _may_grow(node, text):
    """Whether a statement imports names from a module, and nothing else stands on its line."""
    is_plain = isinstance(node, ast.ImportFrom) and source_of(node, text) == ast.unparse(node)
    return is_plain and node.names[0].name != "*" and not _is_stand_in(node)


def _is_stand_in(node):
    """Whether a statement imports a solution of the series, for want of the learner's own."""
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helpers.exercises.")


def _exercise_of(node, text):
    """The number of the exercise whose check wrote a statement of mine.py; None if the learner wrote or edited it."""
    begin = first_line(node)
    mark = MARK.match(text.split("\n")[begin - 2].rstrip()) if begin > 1 else None
    return mark[1] if mark and mark[2] == _digest(source_of(node, text)) else None


def _digest(source):
    return hashlib.sha256("\n".join(line.rstrip() for line in source.splitlines()).encode()).hexdigest()[:8]


def _try_out(text):
    """Run what is to become mine.py, as an import would."""
    module, before = types.ModuleType("mine"), sys.modules.get("mine")
    sys.modules["mine"] = module  # it may import itself
    try:
        with limited(SECONDS):
            exec(compile(text, FILE, "exec"), module.__dict__)
    except BaseException as error:
        raise NotKept(f"with it, the module could not be imported ({name_of(error)}: {str(error)[:100]}).") from None
    finally:
        sys.modules.pop("mine")
        if before:
            sys.modules["mine"] = before


@contextlib.contextmanager
def _locked(path):
    """One process at a time: the lock is on the folder, and goes with the process that has it."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# Running


class _Loader(SourceFileLoader):
    """Compiles anew each time: the time stamp of compiled code cannot tell two versions of the same second apart."""

    def get_code(self, name):
        return self.source_to_code(self.get_data(self.path), self.path)


class _Finder:
    """Finds mine.py in the folder of the notebook."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mine" and os.path.isfile(FILE):
            file = os.path.abspath(FILE)
            return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file))
        return None


def refresh(*_):
    """Bring the module that this process imported up to date with its file. One that fails stays as it was."""
    module = sys.modules.get("mine")
    with contextlib.suppress(Exception):
        if module and getattr(module, "_stamp", None) != (stamp := _stamp()):
            module._stamp = stamp
            with limited(SECONDS):
                importlib.reload(module)


def _stamp():
    found = os.stat(FILE)
    return found.st_mtime_ns, found.st_size


def load():
    """The learner's module, as its file is now. Whatever an import may raise, and TooSlow."""
    with limited(SECONDS):
        refresh()
        return importlib.import_module("mine")


def yours(name, trial):
    """The learner's function of a name, from mine.py, if it has one that does in a trial what that of the series does.

    Otherwise that of the series, the solution of the exercise. Prints which of the two it is.

    trial: calls the function that it is given, and returns an array, or a tuple of them.
    """
    series = exercise(numbers_of_names()[name]).solution
    found, why = _usable(name, trial, series)
    print(f"{name}: yours, from {FILE}." if found else f"{name}: the series' own, for {why}.")
    return found or series


def _usable(name, trial, series):
    """(function, None), or (None, why not)."""
    if clock.OFF in os.environ or not os.path.isfile(FILE):
        return None, f"exercise {numbers_of_names()[name]} has not put one into {FILE}"
    try:
        found = getattr(load(), name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, f"{FILE} cannot be imported: {name_of(error)}"
    if found is None:
        return None, f"{FILE} has none"
    found = getattr(found, "plain", found)  # not what runs in its place on a GPU
    try:
        with limited(TRIAL_S):
            pairs = zip(jax.tree.leaves(trial(found)), jax.tree.leaves(trial(series)), strict=True)
            same = all(map(_agree, *zip(*pairs, strict=True)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, f"yours raises {name_of(error)} here"
    return (found, None) if same else (None, "yours gives something else")


def _agree(one, other):
    one, other = (np.asarray(each, np.float64) for each in (one, other))
    return one.shape == other.shape and np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)


# What the learner's module can do

PARTS = {  # {what is said of a part: the function of mine.py that does it}
    "forward": "forward",
    "causal": "forward",
    "gradients": "flash_attention",
    "trains": "flash_attention",
    "decodes": "decode_attention",
    "masks": "masked_forward",
    "on a GPU": "mma_forward",
}
SHOWN = ("trains",)  # parts that a notebook has to show, too, and then records


def reach(part, function):
    """Record that the learner's module can do something, if the function that did it is the learner's."""
    if getattr(function, "__module__", None) == "mine":
        record.note(part, record.SOLVED)


def parts():
    """{part: whether the learner's module can do it}."""
    names = set()
    with contextlib.suppress(Exception):
        body = ast.parse(IN_PLACE.sub("\n", Path(FILE).read_text("utf-8"))).body
        names = {name for node in body if not _is_stand_in(node) for name in bound(node)}
    done = record.done()
    return {part: name in names and (part not in SHOWN or part in done) for part, name in PARTS.items()}


sys.meta_path.insert(0, _Finder)
if shell := get_ipython():
    shell.events.register("pre_run_cell", refresh)
