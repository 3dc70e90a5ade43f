"""The exercises of notebook 04.

Kernels are replayed, on every device: a verdict does not depend on what lies past the end of an array, where a
replay puts NaN, and then a number.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from helpers.exercises.exercise import Case, Complaint, Exercise, shaped
from helpers.exercises.whole import check_ends
from helpers.instruments.products import equations
from helpers.instruments.traffic import replay


def _call(kernel, grid, in_specs, out_spec, shape, **options):
    out_shape = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pl.pallas_call(kernel, grid=grid, in_specs=in_specs, out_specs=out_spec, out_shape=out_shape, **options)


def read_block(i, j):
    """(row, column) of the block of x that program (i, j) reads, counted in blocks."""
    return j // 2, i


def blocks_of(index_map, grid, axes):
    """Block indices of all programs of a grid, integers (programs, axes). An index map is traced, as Pallas does it."""

    def traced(*program):
        block = [jnp.asarray(index) for index in shaped(index_map(*program), dict.fromkeys(axes, ()))]
        if not all(jnp.issubdtype(index.dtype, jnp.integer) for index in block):
            raise Complaint("every block index must be an integer: divide with //, not with /")
        return block

    return np.stack(jax.vmap(traced)(*np.indices(grid).reshape(len(grid), -1)), axis=1)


AXES = "row", "column"

INDEX_MAP = Exercise(
    read_block, "The index map", outputs=("the block of each program",),
    run=lambda answer, R, C: blocks_of(answer, (C, 2 * R), AXES),
).with_cases("R C", (1, 2), (2, 3), (3, 2), (4, 5)).with_mistakes(
    ("j is not halved", "j // 2, i", "j, i", "Neighbours in j share a block of x: see the picture of the exercise."),
    ("i is halved instead of j", "j // 2, i", "j, i // 2",
     "Neighbours in j share a block, neighbours in i do not: see the picture of the exercise."),
)  # fmt: skip


def softmax_tail_kernel(s_ref, out_ref, *, T, S):
    """Softmax along the rows of a (T, S) table; both refs may hang over its end."""
    inside = jnp.arange(s_ref.shape[1]) < S
    s = jnp.where(inside, s_ref[...], -jnp.inf)
    p = jnp.exp(s - s.max(axis=1, keepdims=True))
    out_ref[...] = p / p.sum(axis=1, keepdims=True)


def _written(launched):
    if not all(operand.writes.all() for operand in launched.operands.values() if operand.is_output):
        raise Complaint("a part of out was never written: store with out_ref[...] = ..., in every program")


def _softmax_cases():
    random = np.random.default_rng(42)

    def case(label, s, *blocks):
        label = f"T={len(s)}, S={s.shape[1]}, block {blocks[0]} × {blocks[1]}{label}"
        return Case(label, (s.astype(np.float32), *blocks))

    largest_first = np.sort(3 * random.standard_normal((6, 7)) - 2, axis=1)[:, ::-1].copy()
    rows_apart = np.linspace(-2000, 2000, 9)[:, None]
    return [
        case(", logits below 0", np.log([[1.0, 3.0, 4.0]]) - 5, 2, 4),
        case("", random.standard_normal((5, 6)), 2, 8),
        case(", largest logit first", largest_first, 4, 8),
        case(", rows of logits from −2000 to 2000", random.standard_normal((9, 3)) + rows_apart, 8, 4),
    ]


def _run_softmax(kernel, s, block_q, block_s):
    T, S = s.shape
    spec = pl.BlockSpec((block_q, block_s), lambda i: (i, 0))
    call = _call(functools.partial(kernel, T=T, S=S), (pl.cdiv(T, block_q),), [spec], spec, (T, S))
    (launched,), out = replay(call, s)
    _written(launched)
    check_ends(call, [s], out)
    return out


MASKED_TAIL = Exercise(
    softmax_tail_kernel, "A masked tail", outputs=("out",),
    cases=_softmax_cases, run=_run_softmax,
    tolerance=5e-4,  # the task says so: a logit near 2000 times log2(e), or plus log l, is off by up to 1.2e-4
).with_mistakes(
    ("what stands in the columns past S makes the rows NaN: nothing replaces it, or NaN or +∞ does, or the maximum "
     "is taken before or along axis 0", "jnp.where(inside, s_ref[...], -jnp.inf)", "s_ref[...]",
     "Put −∞ into the columns past S, and then take the maximum with axis=1: see section 7."),
    ("the columns are compared with T instead of with S", "< S", "< T",
     "S counts the columns of the table, T its rows: see the text of the exercise."),
    ("the largest logit is not subtracted", " - s.max(axis=1, keepdims=True)", "",
     "The exponential overflows for large logits: see section 4."),
)  # fmt: skip


def matmul_tail_kernel(p_ref, v_ref, out_ref, *, S, block_k):
    """out = p v, summed over tiles of block_k keys; the last may be partial."""

    def add_tile(j, acc):
        tile = pl.ds(j * block_k, block_k)
        inside = j * block_k + jnp.arange(block_k) < S
        p = jnp.where(inside[None, :], p_ref[:, tile], 0)
        v = jnp.where(inside[:, None], v_ref[tile, :], 0)
        return acc + lax.dot(p, v, preferred_element_type=jnp.float32)

    acc = jnp.zeros(out_ref.shape, jnp.float32)
    out_ref[...] = lax.fori_loop(0, pl.cdiv(S, block_k), add_tile, acc)


def _matmul_cases():
    random = np.random.default_rng(43)

    def case(T, S, H, block_q, block_h, block_k, dtype=np.float32):
        p, v = (random.standard_normal(shape).astype(dtype) for shape in ((T, S), (S, H)))
        label = f"T={T}, S={S}, H={H}, block_q={block_q}, block_h={block_h}, block_k={block_k}, {p.dtype.name}"
        return Case(label, (p, v, block_q, block_h, block_k))

    shapes = [(2, 3, 2, 2, 2, 2), (2, 3, 4, 2, 2, 4), (4, 6, 8, 4, 4, 4), (4, 8, 2, 4, 2, 4), (8, 21, 4, 4, 2, 4)]
    return [*(case(*shape) for shape in shapes), case(8, 200, 8, 8, 8, 16, np.float16)]


def _run_matmul(kernel, p, v, block_q, block_h, block_k):
    (T, S), H = p.shape, v.shape[1]
    padded = pl.cdiv(S, block_k) * block_k
    strip_of_p = pl.BlockSpec((block_q, padded), lambda i, h: (i, 0))
    strip_of_v = pl.BlockSpec((padded, block_h), lambda i, h: (0, h))
    out_spec = pl.BlockSpec((block_q, block_h), lambda i, h: (i, h))
    with_sizes = functools.partial(kernel, S=S, block_k=block_k)
    call = _call(with_sizes, (T // block_q, H // block_h), [strip_of_p, strip_of_v], out_spec, (T, H))
    keys = sorted(_keys_in_products(jax.make_jaxpr(call)(p, v).jaxpr))
    if keys and keys[-1] > block_k:
        raise Complaint(f"one product takes {keys[-1]} keys at once; load and add one tile of block_k keys at a time")
    if keys and keys[0] < block_k:
        raise Complaint(f"one product takes {keys[0]} of {block_k} keys; load the last tile whole, and mask its tail")
    if not keys:
        raise Complaint("no product of tiles was found: multiply block_k keys at a time")
    (launched,), out = replay(call, p, v)
    _written(launched)
    if any(operand.past_block for operand in launched.operands.values()):
        raise Complaint("a slice reaches past the last tile: count the tiles with pl.cdiv(S, block_k)")
    check_ends(call, [p, v], out)
    return out


def _keys_in_products(jaxpr):
    """The length of the sum in each matrix product of a jaxpr, also of one written as a multiplication and a sum."""
    multiplied = set()
    for equation in equations(jaxpr):
        if equation.primitive.name == "mul":
            multiplied.update(map(id, equation.outvars))
        kind, options = equation.primitive.name, equation.params
        if kind == "pallas_call":
            yield from _keys_in_products(options["jaxpr"])
        elif kind == "dot_general" or (kind == "reduce_sum" and id(equation.invars[0]) in multiplied):
            summed = options["axes"] if kind == "reduce_sum" else options["dimension_numbers"][0][0]
            if summed:
                yield math.prod(equation.invars[0].aval.shape[axis] for axis in summed)


ACCUMULATE = Exercise(
    matmul_tail_kernel, "Accumulate over k", outputs=("out",), cases=_matmul_cases, run=_run_matmul, slow=True,
).with_mistakes(
    ("the output block is added to before anything was stored in it",
     ("return acc + ", "acc = jnp.zeros(out_ref.shape, jnp.float32)\n    out_ref[...] = ", "add_tile, acc"),
     ("out_ref[...] += ", "", "add_tile, None"),
     "An output starts with whatever is in memory; start from jnp.zeros: see section 5."),
    ("the accumulator has 16 bits", ("(out_ref.shape, jnp.float32", "float32)\n\n"),
     ("(out_ref.shape, p_ref.dtype", "float32).astype(acc.dtype)\n\n"),
     "Sum in float32 whatever the inputs are: see section 5."),
    ("the last, partial tile is left out", "pl.cdiv(S, block_k)", "S // block_k",
     "S // block_k rounds down; pl.cdiv(S, block_k) counts the partial tile too."),
    ("what lies past the end enters the products: p or v is left as it is, or gets NaN or an infinity",
     "jnp.where(inside[:, None], v_ref[tile, :], 0)", "v_ref[tile, :]",
     "A missing key must add nothing, so both operands need 0; 0 · NaN and 0 · ∞ are NaN: see section 7."),
    ("the mask hides nothing of the last tile, in either operand", "j * block_k + jnp.arange", "jnp.arange",
     "Compare j * block_k + jnp.arange(block_k) with S, not the places within a tile: see section 6."),
    ("a product is returned in the dtype of the inputs", ", preferred_element_type=jnp.float32", "",
     "Ask for preferred_element_type=jnp.float32: see section 5."),
)  # fmt: skip

EXERCISES = (INDEX_MAP, MASKED_TAIL, ACCUMULATE)
