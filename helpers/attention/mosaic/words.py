"""A caller's functions in the words of Mosaic GPU: what it lacks, or takes too lightly, is said in those that it has.

mask_mod and score_mod come with whatever JAX has. `in_words` traces a function, takes it apart into primitives, and
puts them together again by `RULES` where Mosaic GPU has no such word, or a coarse one: its tanh has eleven bits, its
sine is one of small angles, and its integers become booleans by their last bit. `why_not` says what is in no
dictionary, before anything is compiled.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from helpers.attention.device import settings
from helpers.attention.extras import tile_shape

# Of numbers and of tiles alike.
KNOWN = """
    abs add and bitcast_convert_type broadcast_in_dim clamp div eq exp exp2 ge gt le log logistic lt max min mul ne neg
    one_minus_square or rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sqrt square
    sub xor
""".split()
CALLS = "jit closed_call core_call custom_jvp_call custom_vjp_call checkpoint remat2".split()  # no loops
# What makes of one element another one.
BEYOND = re.compile(
    "arg|concat|conv_|cum|dot|dynamic|gather|iota|pad|random|reduce_(?!precision)|rev|scatter|slice|sort|split|top|trans"
)
TWO_PI = 6.28125, 2 * math.pi - 6.28125  # the first with few digits, so that a multiple of it is exact


def _fine_tanh(x, **_):
    """By the quotient of Padé where x is small, and (e - 1) / (e + 1) with e = exp(2 x) elsewhere."""
    x2, e = x * x, jnp.exp(2 * jnp.minimum(x, 20))
    is_small = jnp.abs(x) < 1
    above = jnp.where(is_small, x * (945 + x2 * (105 + x2)), e - 1)
    return above / jnp.where(is_small, 945 + x2 * (420 + 15 * x2), e + 1)


def _tanh(x, **_):
    """1 - 2 / (1 + exp(2 |x|)) with the sign of x, to 2^-21, and better where it is flat, as its derivative wants.

    Of two instructions beside those of sums; a division would take many.
    """
    root = lax.rsqrt(1 + jnp.exp(2 * jnp.abs(x)))
    size = 1 - 2 * root * root
    return jnp.where(x < 0, -size, size)


def _log1p(x, **_):
    """Where x is small by the series of log((1 + z) / (1 - z)) with z = x / (2 + x)."""
    z = x / (2 + x)
    z2 = z * z
    series = 2 * z * (1 + z2 * (1 / 3 + z2 * (1 / 5 + z2 * (1 / 7 + z2 / 9))))
    return jnp.where(jnp.abs(x) < 0.25, series, jnp.log(1 + x))


def _expm1(x, **_):
    t = _fine_tanh(jnp.clip(x / 2, -0.5, 0.5))
    return jnp.where(jnp.abs(x) < 1, 2 * t / (1 - t), jnp.exp(x) - 1)


def _floor(x):
    near = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return near - jnp.where(near > x, 1.0, 0.0)


def _pow(x, y):
    """x**y, of negative x where y is whole."""
    y = y.astype(x.dtype)
    size = jnp.exp2(y * jnp.log2(jnp.abs(x)))
    of_negative = jnp.where(_floor(y / 2) == y / 2, size, jnp.where(_floor(y) == y, -size, jnp.nan))
    return jnp.where(y == 0, 1.0, jnp.where(x < 0, of_negative, size))


def _of_angle(primitive):
    """A sine or cosine, of the angle brought between -pi and pi."""

    def rule(x, **params):
        turns = lax.round(x / sum(TWO_PI), lax.RoundingMethod.TO_NEAREST_EVEN)
        return primitive.bind(x - turns * TWO_PI[0] - turns * TWO_PI[1], **params)

    return rule


def _convert(x, *, new_dtype, **params):
    if new_dtype == jnp.bool_:
        return x != jnp.zeros((), x.dtype)
    if x.dtype == jnp.bool_:
        return jnp.where(x, jnp.ones((), new_dtype), jnp.zeros((), new_dtype))
    return lax.convert_element_type_p.bind(x, new_dtype=new_dtype, **params)


RULES = {
    "add_any": lambda x, y: x + y,
    "ceil": lambda x: -_floor(-x),
    "convert_element_type": _convert,
    "cos": _of_angle(lax.cos_p),
    "expm1": _expm1,
    "floor": _floor,
    "integer_pow": lambda x, y: lax.integer_pow(x, y) if y > 1 else 1 / lax.integer_pow(x, -y),
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "log1p": _log1p,
    "not": lambda x: x ^ (True if x.dtype == jnp.bool_ else -1),
    "pow": _pow,
    "select_n": lambda which, *cases: lax.select_n(jnp.broadcast_to(which, jnp.shape(cases[0])), *cases),
    "sin": _of_angle(lax.sin_p),
    "stop_gradient": lambda x: x,
    "tanh": _tanh,
}


@dataclass(frozen=True)
class Late:
    """An argument that is made where a function needs it. Mosaic GPU finds no layout for what nobody reads."""

    shape: tuple
    make: Callable


def in_words(function, is_exact=False):
    """The function in words of Mosaic GPU, its arguments and results any trees. is_exact: as exact as float32.

    Arguments may be `Late` int32 arrays, and what leads to no result is left out.
    """
    rules = {**RULES, "tanh": _fine_tanh} if is_exact else RULES

    def spelled(*arguments):
        leaves, tree = jax.tree.flatten(arguments)
        shapes = [jax.ShapeDtypeStruct(one.shape, jnp.int32) if isinstance(one, Late) else one for one in leaves]
        traced, result = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(tree, shapes))
        jaxpr, is_used = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
        read = [one for one, is_read in zip(leaves, is_used, strict=True) if is_read]
        used = [one.make() if isinstance(one, Late) else one for one in read]
        results = _evaluate(rules, jaxpr, traced.consts, used)
        return jax.tree.unflatten(jax.tree.structure(result), results)

    return spelled


def _inner(equation):
    """The program that an equation calls once, (jaxpr, its constants), or None."""
    if equation.primitive.name not in CALLS:
        return None
    found = next((equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params), None)
    return (found.jaxpr, found.consts) if isinstance(found, ClosedJaxpr) else found and (found, ())


def _evaluate(rules, jaxpr, constants, arguments):
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        operands = list(map(read, equation.invars))
        if inner := _inner(equation):
            results = _evaluate(rules, *inner, operands)
        else:
            say = rules.get(equation.primitive.name, equation.primitive.bind)
            results = say(*operands, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def why_not(call):
    """Why mask_mod or score_mod of a `Call` cannot be said in the words that are known here, or None."""
    found = _first_with(call, lambda own, back: {*own, *back} - {*KNOWN, *RULES, *CALLS})
    return found and "its kernels have no word for {}, which {} uses".format(*found)


def why_not_by_tiles(call):
    """Why mask_mod or score_mod of a `Call` cannot be told tile by tile, or None."""
    found = _first_with(call, lambda own, back: set(filter(BEYOND.match, own)))
    return found and "its kernels know one tile at a time, beyond which {} looks, in {}".format(*found)


def _first_with(call, chosen):
    """(primitives, the name of the function) of a `Call` that has some that are chosen(its own, its derivative's)."""
    problem, arrays = call.problem, call.extras.score_arrays or ()
    tables = tuple((tile_shape(array.shape, 8, 8), array.dtype) for array in arrays)
    for name, function in (("mask_mod", problem.mask_mod), ("score_mod", problem.score_mod)):
        words = chosen(*_primitives(name == "score_mod", function, tables)) if function else ()
        if words:
            return " and ".join(sorted(words)), name
    return None


@functools.lru_cache(maxsize=256)
def _primitives(is_score, function, tables):
    """Names of the primitives of a function, and of its derivative by logits."""
    tile = lambda dtype: jax.ShapeDtypeStruct((8, 8), dtype)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    places = number, number, tile(jnp.int32), tile(jnp.int32)
    tables = [jax.ShapeDtypeStruct(shape and (8, 8), dtype) for shape, dtype in tables]
    back = lambda s, *others: jax.vjp(lambda s: function(s, *others), s)[1](s)
    arguments = *[tile(jnp.float32)][:is_score], *places, *(tables if is_score else ())
    with settings():
        own = tuple(_names(jax.make_jaxpr(function)(*arguments).jaxpr))
        has_derivative = is_score and "while" not in own
        return own, tuple(_names(jax.make_jaxpr(back)(*arguments).jaxpr)) if has_derivative else ()


def _names(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from _names(inner)
