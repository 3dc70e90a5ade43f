"""What the notebooks define, to run it without them."""

import ast
import builtins
import functools
import symtable

import lessons


def defined(path, name):
    """What a notebook defines under a name, with all that it needs of the notebook."""
    names = dict(_imports(path))
    _define(name, names, _definitions(path))
    return names[name]


def _define(source, names, definitions):
    """Run source in names, after those statements of the notebook that define what it needs."""
    for name in _globals(symtable.symtable(source, "solution", "exec")):
        if name not in names and name in definitions and not hasattr(builtins, name):
            names[name] = None  # on its way: it may need itself
            _define(definitions[name], names, definitions)
    exec(compile(source, "solution", "exec"), names)


def _globals(scope):
    """Names that a scope, and those inside it, take from the module."""
    own = {name.get_name() for name in scope.get_symbols() if name.is_referenced() and name.is_global()}
    return own.union(*map(_globals, scope.get_children()))


@functools.cache
def _imports(path):
    names = {}
    for statement in _statements(path):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            exec(ast.unparse(statement), names)
    return names


@functools.cache
def _definitions(path):
    """{name: source} of the functions and simple assignments at the top of a notebook's cells, the first of a name."""
    found = {}
    for statement in _statements(path):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found.setdefault(statement.name, ast.unparse(statement))
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found.setdefault(statement.targets[0].id, ast.unparse(statement))
    return found


@functools.cache
def _statements(path):
    cells = [cell.source for cell in lessons.read(path).cells if cell.cell_type == "code"]
    return [statement for source in cells for statement in ast.parse(source).body]
