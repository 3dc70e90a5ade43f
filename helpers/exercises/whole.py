"""Judges whole kernels, of 05, 07, 13 and 18: replays what an answer launches, and says how it went about it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from helpers.exercises.exercise import Complaint, shaped
from helpers.instruments.products import equations
from helpers.instruments.traffic import replay

AS_ASKED = "from tiles alone, each read once by a program that needs it"
MOVES = ("transpose", "pad", "concatenate", "gather")
OF_16_BITS = 8e-3  # relative error that rounding to bfloat16 may bring, of an output and of the table before it


def results(answer, ours, arguments, dtypes, right, blocks):
    """(*results as float64, how they were made) of a kernel: of the answer, whose launches are replayed.

    ours: the solution, whose programs read no byte too many. arguments: of both, the arrays first. dtypes: of the
    results, {name: dtype}. right: the right ones; one of 16 bits that rounding alone sets apart from it is right too.
    blocks: the sizes of the two tiles. Without them the answer runs as in a notebook, on the device that there is.
    """
    arrays, launch = _launches(arguments)
    if blocks:
        *found, way = watched(launch(answer), arrays, dtypes, right, blocks, lambda: bytes_read(launch(ours), arrays))
        return *found, "with a copy of an array around the kernel" if _copies(launch(answer), arrays) else way
    with jax.default_matmul_precision("highest"):
        found = jax.jit(launch(answer))(*arrays)
    check_results(found, dtypes, right)
    return *as_float64(found, right, dtypes), AS_ASKED


def watched(function, arrays, dtypes, right, blocks, ours):
    """The same of function(*arrays). ours: a function that counts the bytes that our kernel reads."""
    with jax.default_matmul_precision("highest"):
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arrays)
        check_results(shapes, dtypes, right)
        calls, found = replay(function, *arrays, by_program=True)
        if not calls:
            raise Complaint("no `pl.pallas_call` was made: write a kernel, and launch it")
        check_ends(function, arrays, found)
    return *as_float64(found, right, dtypes), _way(jaxpr.jaxpr, calls, arrays, blocks, ours)


def check_ends(function, arrays, found):
    """Replay once more, with a number past the ends of arrays. `Complaint` where that changes what was found.

    A kernel may look for the NaN of a replay, and on a GPU other numbers lie there. Where it let the NaN in, the result
    says so by itself.
    """
    found = [np.asarray(one, np.float64) for one in jax.tree.leaves(found)]
    if any(np.isnan(one).any() for one in found):
        return
    _, other = replay(function, *arrays, past_the_end=1000.0)
    for one, again in zip(found, jax.tree.leaves(other), strict=True):
        if not np.allclose(one, np.asarray(again, np.float64), rtol=1e-2, atol=1e-2):
            raise Complaint("with 1000 instead of NaN past the ends of arrays, the results change: mask by position")


def _launches(arguments):
    """The arrays among the arguments, and what makes of a kernel a function of these alone."""
    arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
    options = arguments[len(arrays) :]
    return arrays, lambda kernel: lambda *arrays: kernel(*arrays, *options)


def bytes_read(function, arrays):
    """Bytes that all programs of all kernels of function(*arrays) load."""
    calls, _ = replay(function, *arrays)
    return sum(one.bytes_read for call in calls for one in call.operands.values())


def first_kernel(kernel, arguments):
    """(most bytes that a program of the first kernel loads, bytes of a number of each output, whether keys are runs).

    They are if no program leaves out a key between two that it loads: axis 1 of arrays of four axes.
    """
    arrays, launch = _launches(arguments)
    (call, *_), _ = replay(launch(kernel), *arrays, by_program=True)
    operands = call.operands.values()
    read = ([int(reads.sum()) * one.values.itemsize for reads in one.reads_by_program] for one in operands)
    keys = (reads.any(axis=(0, 2, 3)) for one in operands for reads in one.reads_by_program if reads.ndim == 4)
    runs = all((np.diff(np.flatnonzero(found)) == 1).all() for found in keys)
    return max(map(sum, zip(*read, strict=True))), [one.values.itemsize for one in operands if one.is_output], runs


def as_float64(found, right, dtypes):
    """The results, of which one of 16 bits that rounding alone sets apart from the right one is taken for it."""
    found = found if isinstance(found, tuple | list) else (found,)
    return list(map(_rounded_alike, found, right, dtypes.values()))


def check_results(found, dtypes, right):
    """A `Complaint` where results have other shapes than the right ones, or other dtypes."""
    shapes = {name: expected.shape for name, expected in zip(dtypes, right, strict=True)}
    for one, (name, dtype) in zip(shaped(found, shapes), dtypes.items(), strict=True):
        if one.dtype != dtype:
            raise Complaint(f"{name}: expected dtype {jnp.dtype(dtype).name}, got {one.dtype.name}")


def _rounded_alike(mine, right, dtype):
    mine = np.asarray(mine).astype(np.float64)
    is_narrow = jnp.dtype(dtype).itemsize == 2
    return right if is_narrow and np.linalg.norm(mine - right) <= OF_16_BITS * np.linalg.norm(right) else mine


def _way(jaxpr, calls, arrays, blocks, ours):
    """How an answer went about it: `AS_ASKED`, or the first thing that was not."""
    within, around, sums = _sizes(jaxpr)
    if around > max(array.size for array in arrays):
        return "with an array in memory that is larger than any input"
    if within > max(blocks) * max(*blocks, 16, pl.next_power_of_2(arrays[0].shape[-1])):
        return "with more than a tile at once in a program"
    if any(dtype.itemsize == 2 for dtype in sums):
        return "with sums of 16 bits"
    operands = [operand for call in calls for operand in call.operands.values()]
    if max(reads.max(initial=0) for one in operands for reads in one.reads_by_program) > 1:
        return "with elements that a program reads more than once"
    if any(one.past_block for one in operands):
        return "with slices past the end of a block"
    if any(one.writes.max(initial=0) > 1 for one in operands):
        return "with outputs that are written more than once"
    dtypes, is_shaped = _operand_dtypes(jaxpr), any(array.ndim == 4 for array in arrays)
    if any(len(of_product) > 1 for of_product in dtypes):
        return "with a product of operands of two dtypes"
    if is_shaped and any(of_product != {arrays[0].dtype} for of_product in dtypes):
        return "with a product of operands that are wider than the inputs"
    multiplying = [operand for call in calls if call.flops for operand in call.operands.values()]
    of_heads = [one for one in multiplying if one.values.ndim == 4 and one.values.shape[-1] == arrays[0].shape[-1]]
    if is_shaped and any((one.block_shape[-1] or 1) < 16 for one in of_heads):
        return "with a block that is too narrow for a GPU"
    enough = sum(one.bytes_read for one in operands) <= ours()
    return AS_ASKED if enough else "with more bytes read than these tiles need"


def _operand_dtypes(jaxpr):
    """The dtypes of the operands, a set for each product in a kernel. Triton refuses two."""
    kernels = [equation.params["jaxpr"] for equation in equations(jaxpr) if equation.primitive.name == "pallas_call"]
    products = [one for kernel in kernels for one in equations(kernel) if one.primitive.name == "dot_general"]
    products = [one for one in products if one.params["dimension_numbers"][0][0]]
    return [{operand.aval.dtype for operand in product.invars} for product in products]


def _copies(function, arrays):
    """Whether function(*arrays) moves all of an array of four axes or more: heads first, or padded."""
    moves = (one for one in equations(jax.make_jaxpr(function)(*arrays).jaxpr) if one.primitive.name in MOVES)
    least = min(array.size for array in arrays if array.ndim == 4)
    return any(len(one.outvars[0].aval.shape) > 3 and one.outvars[0].aval.size >= least for one in moves)


def _sizes(jaxpr):
    """(elements of the largest value in a kernel, of the largest around it, dtypes of sums and products)."""
    around = list(equations(jaxpr))
    kernels = [equation.params["jaxpr"] for equation in around if equation.primitive.name == "pallas_call"]
    inside = [equation for kernel in kernels for equation in equations(kernel)]
    is_value = lambda aval: hasattr(aval, "dtype") and not hasattr(aval, "inner_aval")  # and no ref
    values_of = lambda equation: [v.aval for v in equation.outvars if is_value(v.aval)]
    largest = lambda of: max((math.prod(v.shape) for equation in of for v in values_of(equation)), default=0)
    summing = [equation for equation in inside if equation.primitive.name in ("while", "scan", "dot_general")]
    sums = [v for equation in summing for v in values_of(equation) if v.shape]
    return largest(inside), largest(around), {v.dtype for v in sums if jnp.issubdtype(v.dtype, jnp.floating)}
