"""The matrix products of Pallas kernels, read off the operations that JAX lists for them."""

import math
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Product:
    """One matrix product: the shape of its result, and its FLOPs, a multiplication and an addition for each term."""

    shape: tuple[int, ...]
    flops: int


def products(function, *arguments):
    """{name of the kernel: [Product, ...]} for every `pallas_call` in function(*arguments).

    A product stands in the list once for each place in the kernel's source, in a loop or not, however
    often it runs.
    """
    found = {}
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        if equation.primitive.name == "pallas_call":
            inside = equations(equation.params["jaxpr"])
            found[equation.params["name"]] = [product(each) for each in inside if each.primitive.name == "dot_general"]
    return found


def equations(jaxpr, in_kernels=False):
    """Every operation of a jaxpr, and of the loops and functions inside it; of kernels only the call, if not asked."""
    for equation in jaxpr.eqns:
        yield equation
        if in_kernels or equation.primitive.name != "pallas_call":
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                if hasattr(value, "eqns"):
                    yield from equations(value, in_kernels)


def product(equation):
    """The `Product` of a dot_general, carried out once."""
    left = equation.invars[0].aval.shape
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.outvars[0].aval.shape
    return Product(shape, 2 * math.prod(shape) * math.prod(left[axis] for axis in contracted))
