"""The source of an answer, and of what it needs from other cells: imports, functions, classes and constants."""

import ast
import builtins
import linecache
import symtable
import types
from dataclasses import dataclass, field

import jax
import numpy as np

from helpers.exercises.running import code_of, is_learners


@dataclass
class Gathered:
    """imports: {name: statement}; definitions: {name: source}, each after what it needs; missing: names without any."""

    imports: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def gather(name, names):
    """What defines `name` in a notebook, and what that needs. names: the variables of the notebook."""
    gathered, seen = Gathered(), set()

    def visit(name):
        if name in seen or (name not in names and hasattr(builtins, name)):
            return
        seen.add(name)
        value = names.get(name)
        home = getattr(value, "__module__", None) if isinstance(value, types.FunctionType) else None
        if home == "mine" and value.__name__ == name:
            return  # it stands in the learner's module already
        if home and home.startswith("helpers.") and value.__name__ == name:
            gathered.imports[name] = f"from {home} import {name}"
            return
        kind, source = _definition(name, value, names.get("In", ()))
        if not source or (isinstance(value, np.ndarray | jax.Array) and value.ndim):
            gathered.missing.append(name)
        elif kind == "import":
            if source != f"from mine import {name}":
                gathered.imports[name] = source
        else:
            for needed in free_names(source):
                visit(needed)
            if source not in gathered.definitions.values():  # one statement may define several names
                gathered.definitions[name] = source

    visit(name)
    return gathered


def _definition(name, value, cells):
    """("import" or "code", source) of the statement that defined a name last; the source is None where there is none.

    A function knows the text of its own cell, even if that cell was edited and run again since.
    """
    code = code_of(value)
    own = ["".join(linecache.getlines(code.co_filename))] if code and is_learners(code) else []
    for text in [*own, *reversed(cells)]:
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        for node in reversed(body):
            if name in bound(node):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    return "import", import_of(name, node)
                return "code", source_of(node, text)
    return None, None


def bound(node):
    """The names that a statement at the top of a module defines."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name.split(".")[0] for alias in node.names}
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign() | ast.AnnAssign():
            names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
            return {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return set()


def import_of(name, node):
    """The part of an import that defines a name, as a statement of its own."""
    alias = next(alias for alias in node.names if name == (alias.asname or alias.name.split(".")[0]))
    if isinstance(node, ast.ImportFrom):
        return ast.unparse(ast.ImportFrom(node.module, [alias], node.level))
    return ast.unparse(ast.Import([alias]))


def first_line(node):
    """The number of the line on which a statement begins, its decorators included."""
    return min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))])


def source_of(node, text):
    """The lines of a statement; where it shares one with another, only its own part."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return ast.get_source_segment(text, node)
    return "\n".join(text.split("\n")[first_line(node) - 1 : node.end_lineno])


def free_names(source):
    """The names that a statement takes from around it, in the order of the alphabet."""
    found = set()

    def look(table, at_top):
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (at_top or symbol.is_global()):
                found.add(symbol.get_name())
        for inner in table.get_children():
            look(inner, at_top=False)

    look(symtable.symtable(source, "a cell", "exec"), at_top=True)
    return sorted(found)
