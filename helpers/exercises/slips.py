"""Slips of any code: a solution with one of them in it. They name wrong answers, and no check may accept them."""

import ast
import copy
from collections import defaultdict

COMPARISONS = {  # the other side of the border, and the other way round
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
    ast.Add: (ast.Sub, "something is subtracted that should be added"),
    ast.Sub: (ast.Add, "something is added that should be subtracted"),
    ast.Mult: (ast.Div, "something is divided by that should be multiplied by"),
    ast.Div: (ast.Mult, "something is multiplied by that should be divided by"),
    ast.FloorDiv: (ast.Mod, "% stands where // belongs"),
    ast.Mod: (ast.FloorDiv, "// stands where % belongs"),
    ast.Pow: (ast.Mult, "a power is taken for a product"),
}
ALONE = {"sqrt", "exp", "log", "log2"}  # functions of one number
SYMMETRIC = {"max", "min", "maximum", "minimum", "logaddexp"}
SWAPPED = (
    "max min, min max, maximum minimum, logaddexp maximum, log log2, log2 log, exp exp2, median mean, mean sum, "
    "sum mean, zeros ones, zeros_like ones_like, float32 float16, sqrt square, True False"
)
NAMES = dict(pair.split() for pair in SWAPPED.split(", "))  # {what is written: what stands in its place}
TAKEN_FOR_ANOTHER = ("T", "S"), ("N", "K"), ("q", "k"), ("k", "v"), ("block_q", "block_k")


def slips(source):
    """(what is changed, what is wrong, source) of each slip. source defines one function.

    What is wrong completes the sentence "This is what you get when …", and gives no more of the solution away than
    what is missing. A slip is made in one place, and in every place where it is possible.
    """
    tree = ast.parse(source)
    nodes, seen = list(ast.walk(tree)), {ast.unparse(tree)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    everywhere = defaultdict(dict)
    for place, node in enumerate(nodes):
        for wrong, variant in [*_variants(node), *_of_names(node, names)]:
            everywhere[wrong].setdefault(place, variant)
            yield from _changed(tree, {place: variant}, f"{_short(node)} → {_short(variant)}", wrong, seen)
    for wrong, variants in everywhere.items():
        yield from _changed(tree, variants, f"everywhere: {wrong}", wrong, seen)
    for pair in TAKEN_FOR_ANOTHER:
        wrong, other = "`{}` and `{}` have changed places".format(*pair), dict(zip(pair, pair[::-1], strict=True))
        reads = [(place, node) for place, node in enumerate(nodes) if getattr(node, "id", None) in pair]
        reads = [(place, node) for place, node in reads if isinstance(node.ctx, ast.Load) and names.issuperset(pair)]
        swapped = {place: _with(node, id=other[node.id]) for place, node in reads}
        yield from _changed(tree, swapped, wrong, wrong, seen)


def _changed(tree, variants, what, wrong, seen):
    """The slip with variants in some places of the tree, if it is new. variants: {place in `ast.walk`: node}."""
    tree = copy.deepcopy(tree)
    of_node = {node: variants[place] for place, node in enumerate(ast.walk(tree)) if place in variants}
    text = ast.unparse(ast.fix_missing_locations(_Replace(of_node).visit(tree)))
    if text not in seen:
        seen.add(text)
        yield what, wrong, text


class _Replace(ast.NodeTransformer):
    def __init__(self, variants):
        self.variants = variants

    def visit(self, node):
        return self.variants[node] if node in self.variants else self.generic_visit(node)


def _short(node):
    text = " ".join(ast.unparse(ast.fix_missing_locations(node)).split())
    return text if len(text) < 90 else text[:40] + " … " + text[-40:]


def _with(node, **fields):
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _swaps(items):
    """(what is wrong, items) with each pair of neighbours exchanged."""
    for i in range(len(items) - 1):
        swapped = [*items[:i], items[i + 1], items[i], *items[i + 2 :]]
        yield f"`{_short(items[i])}` and `{_short(items[i + 1])}` are exchanged", swapped


def _variants(node):
    """(what is wrong, what stands in place of a node) of each slip that is possible there."""
    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS.get(type(op), ()):
                border = {type(op), other} in ({ast.Lt, ast.LtE}, {ast.Gt, ast.GtE})
                wrong = "a comparison is wrong where both sides are equal" if border else "a comparison is turned round"
                yield wrong, _with(node, ops=[other()])
        case ast.BinOp():
            yield from _of_operators(node)
        case ast.UnaryOp(ast.USub(), ast.BinOp(left, ast.FloorDiv()) as quotient) if _without_minus(left):
            down = _with(quotient, left=_without_minus(left))
            yield "a quotient is rounded down instead of up", down
            yield "an exact quotient is rounded up as well", ast.BinOp(down, ast.Add(), ast.Constant(1))
        case ast.UnaryOp(operand=operand):
            yield "a minus or a `not` is left out", operand
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "`and` and `or` are exchanged", _with(node, op=other)
            for value in values:
                yield f"nothing but `{_short(value)}` is asked", value
        case ast.IfExp(body=body, orelse=orelse):
            yield "two cases are not told apart", body
            yield "two cases are not told apart", orelse
            yield "two cases are exchanged", _with(node, body=orelse, orelse=body)
        case ast.Constant(value=bool()):
            yield "True and False are exchanged", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()) if abs(node.value) > 1e6:
            yield "a unit is ten times too large", ast.Constant(10 * node.value)
            yield "a unit is ten times too small", ast.Constant(node.value / 10)
        case ast.Constant(value=int() | float()):
            yield "a number is off by one", ast.Constant(node.value + 1)
            yield "a number is off by one", ast.Constant(node.value - 1)
            if abs(node.value) > 1:
                yield "a number is twice what it should be", ast.Constant(2 * node.value)
                yield "a number is half of what it should be", ast.Constant(node.value // 2)
        case ast.Attribute(value, "T"):
            yield f"`{_short(value)}` is not transposed", value
        case ast.Attribute(attr="inf"):
            yield "0 stands where an infinity belongs", ast.Constant(0.0)
        case ast.Attribute(attr=attr) if attr in NAMES:
            yield f"`{NAMES[attr]}` stands where `{attr}` belongs", _with(node, attr=NAMES[attr])
        case ast.Name(id=name) if name in NAMES and isinstance(node.ctx, ast.Load):
            yield f"`{NAMES[name]}` stands where `{name}` belongs", _with(node, id=NAMES[name])
        case ast.Call():
            yield from _of_calls(node)
        case ast.Subscript(value, slice=ast.Tuple(elts=[first, second])) if isinstance(node.ctx, ast.Load):
            yield "two indices are exchanged", _with(node, slice=ast.Tuple([second, first], ast.Load()))
        case ast.Slice(lower, upper) if lower and upper:
            yield "a slice begins too early", _with(node, lower=None)
            yield "a slice ends too late", _with(node, upper=None)
        case ast.Tuple(elts=elements) if isinstance(node.ctx, ast.Load) and len(elements) > 1:
            for wrong, swapped in _swaps(elements):
                yield wrong, _with(node, elts=swapped)
        case ast.Dict(values=values):
            for wrong, swapped in _swaps(values):
                yield wrong, _with(node, values=swapped)
        case ast.AugAssign(target, op, value):
            yield f"`{_short(target)}` is overwritten instead of added to", ast.Assign([target], value)
            yield OPERATORS[type(op)][1], _with(node, op=OPERATORS[type(op)][0]())
            yield f"`{_short(node)}` is left out", ast.Pass()
        case ast.If(test, body):
            always = body[0] if len(body) == 1 else _with(node, test=ast.Constant(True))
            yield f"it is not asked whether `{_short(test)}`", always
            yield f"the case `{_short(test)}` is left out", _with(node, test=ast.Constant(False))
        case ast.Expr(ast.Yield()):
            yield "an operation is left out, or is in another place", ast.Pass()
        case ast.Expr(ast.Call()) | ast.Assign(targets=[ast.Subscript()]):
            yield f"`{_short(node)}` is left out", ast.Pass()


def _without_minus(node):
    """What stands behind the minus that a node begins with; None where it begins with none."""
    if isinstance(node, ast.BinOp) and _without_minus(node.left):
        return _with(node, left=_without_minus(node.left))
    return node.operand if isinstance(node, ast.UnaryOp) else None


def _of_names(node, names):
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for one, other in [pair for pair in TAKEN_FOR_ANOTHER if node.id in pair and names.issuperset(pair)]:
            wrong = other if node.id == one else one
            yield f"`{wrong}` stands where `{node.id}` belongs", _with(node, id=wrong)


def _of_operators(node):
    left, op, right = node.left, node.op, node.right
    if type(op) in OPERATORS:
        other, wrong = OPERATORS[type(op)]
        yield wrong, _with(node, op=other())
    if isinstance(op, ast.FloorDiv):
        yield "a quotient is not rounded", _with(node, op=ast.Div())
    if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.BitAnd | ast.FloorDiv):
        yield f"`{_short(right)}` is left out", left
        if not isinstance(op, ast.FloorDiv):
            yield f"`{_short(left)}` is left out", right
    for factor in (left, right) if isinstance(op, ast.Mult) else [right] * isinstance(op, ast.Div):
        yield f"`{_short(factor)}` enters twice", _with(node, left=node, right=factor)
    if isinstance(op, ast.MatMult | ast.Sub | ast.Div | ast.FloorDiv):
        yield "the two sides of an operation are exchanged", _with(node, left=right, right=left)


def _of_calls(node):
    args, keywords, name = node.args, node.keywords, ast.unparse(node.func).split(".")[-1]
    if name in ALONE:
        yield f"`{name}` is left out", args[0]
    for wrong, swapped in _swaps(args) if name not in SYMMETRIC else ():
        yield wrong, _with(node, args=swapped)
    for arg in args if name in SYMMETRIC and len(args) == 2 else ():
        yield f"nothing but `{_short(arg)}` is asked for", arg
    for place, keyword in enumerate(keywords):
        yield f"`{_short(keyword)}` is left out", _with(node, keywords=[*keywords[:place], *keywords[place + 1 :]])
        if keyword.arg == "axis":
            for axis in {-1: (0,), 0: (1,), 1: (0,)}.get(ast.literal_eval(keyword.value), ()):
                other = _with(keyword, value=ast.Constant(axis))
                wrong = f"`{_short(node.func)}` goes along the wrong axis"
                yield wrong, _with(node, keywords=[*keywords[:place], other, *keywords[place + 1 :]])
