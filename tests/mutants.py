"""Mutants of a solution: its source with one small slip in it, of each kind that people make."""

import ast
import copy

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
SYMMETRIC = {"max", "min", "maximum", "minimum", "logaddexp"}
NAMES = {
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "logaddexp": "maximum",
    "log": "log2",
    "log2": "log",
    "exp": "exp2",
    "median": "mean",
    "mean": "sum",
    "sum": "max",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "float32": "float16",
    "inf": "pi",
    "sqrt": "square",
    "True": "False",
}


def mutants(source):
    """(what was changed, source) of each mutant; source defines one function."""
    tree = ast.parse(source)
    seen = {ast.unparse(tree)}
    for place, node in enumerate(ast.walk(tree)):
        for variant in _variants(node):
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed))[place]
            replaced = _Replace(target, variant).visit(changed)
            text = ast.unparse(ast.fix_missing_locations(replaced))
            if text not in seen:
                seen.add(text)
                yield f"{_short(node)} → {_short(variant)}", text


class _Replace(ast.NodeTransformer):
    def __init__(self, target, variant):
        self.target, self.variant = target, variant

    def visit(self, node):
        return self.variant if node is self.target else self.generic_visit(node)


def _short(node):
    text = " ".join(ast.unparse(node).split()) if not isinstance(node, list) else "nothing"
    return text if len(text) < 90 else text[:40] + " … " + text[-40:]


def _with(node, **fields):
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _swaps(items):
    """Each pair of neighbours exchanged."""
    for i in range(len(items) - 1):
        yield [*items[:i], items[i + 1], items[i], *items[i + 2 :]]


def _variants(node):
    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS.get(type(op), ()):
                yield _with(node, ops=[other()])
        case ast.BinOp(left, op, right):
            if type(op) in OPERATORS:
                yield _with(node, op=OPERATORS[type(op)]())
            if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.BitAnd | ast.FloorDiv):
                yield left
                if not isinstance(op, ast.FloorDiv):
                    yield right
            if isinstance(op, ast.MatMult | ast.Sub | ast.Div | ast.FloorDiv):
                yield _with(node, left=right, right=left)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.BoolOp(op, values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield from values
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse, _with(node, body=orelse, orelse=body))
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()) if abs(node.value) > 1e6:
            yield from (ast.Constant(10 * node.value), ast.Constant(node.value / 10))
        case ast.Constant(value=int() | float()):
            yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
        case ast.Constant(value=None):
            pass
        case ast.Attribute(value, "T"):
            yield value
        case ast.Attribute(attr=attr) if attr in NAMES:
            yield _with(node, attr=NAMES[attr])
        case ast.Name(id=name) if name in NAMES and isinstance(node.ctx, ast.Load):
            yield _with(node, id=NAMES[name])
        case ast.Call(func, args, keywords):
            for swapped in _swaps(args) if ast.unparse(func).split(".")[-1] not in SYMMETRIC else ():
                yield _with(node, args=swapped)
            for place, keyword in enumerate(keywords):
                yield _with(node, keywords=[*keywords[:place], *keywords[place + 1 :]])
                if keyword.arg == "axis":
                    for axis in {-1: (0,), 0: (1,), 1: (0,)}.get(ast.literal_eval(keyword.value), ()):
                        other = _with(keyword, value=ast.Constant(axis))
                        yield _with(node, keywords=[*keywords[:place], other, *keywords[place + 1 :]])
        case ast.Subscript(value, slice=ast.Tuple(elts=[first, second])) if isinstance(node.ctx, ast.Load):
            yield _with(node, slice=ast.Tuple([second, first], ast.Load()))
        case ast.Slice(lower, upper) if lower and upper:
            yield _with(node, lower=None)
            yield _with(node, upper=None)
        case ast.Tuple(elts=elements) if isinstance(node.ctx, ast.Load) and len(elements) > 1:
            for swapped in _swaps(elements):
                yield _with(node, elts=swapped)
        case ast.Dict(values=values):
            for swapped in _swaps(values):
                yield _with(node, values=swapped)
        case ast.AugAssign(target, op, value):
            yield ast.Assign([target], value)
            yield _with(node, op=OPERATORS[type(op)]())
        case ast.If(body=body):
            yield body[0] if len(body) == 1 else _with(node, test=ast.Constant(True))
            yield _with(node, test=ast.Constant(False))
        case ast.Expr(ast.Yield()):
            yield ast.Pass()
