"""The exercises of notebook 04.

Kernels are replayed, on every device: a verdict does not depend on what lies behind the end of an
array, and loads and stores past that end are counted.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from helpers.exercises.checking import Case, Complaint, Exercise, Mistake
from helpers.measure.traffic import replay

# 4.1 The index map


def _index_map_cases():
    random = np.random.default_rng(41)
    shapes = [(1, 2, 1, 2), (2, 3, 2, 4), (3, 2, 4, 2), (4, 5, 2, 8)]
    return [
        Case(
            f"{R} × {C} blocks of {rows} × {columns}",
            (random.standard_normal((R * rows, C * columns)).astype(np.float32), rows, columns),
        )
        for R, C, rows, columns in shapes
    ]


def _run_index_map(read_block, x, rows, columns):
    R, C = x.shape[0] // rows, x.shape[1] // columns

    def checked(i, j):
        block = read_block(i, j)
        if not isinstance(block, tuple | list) or len(block) != 2:
            raise Complaint("an index map of two axes returns a pair (row, column)")
        if not all(jnp.issubdtype(jnp.result_type(index), jnp.integer) and jnp.ndim(index) == 0 for index in block):
            raise Complaint("block indices are whole numbers: divide with //, not with /")
        return tuple(block)

    call = pl.pallas_call(
        _copy_kernel,
        grid=(C, 2 * R),
        in_specs=[pl.BlockSpec((rows, columns), checked)],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((C * rows, 2 * R * columns), jnp.float32),
    )
    return replay(call, x)[1]


def _copy_kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def _index_map_expected(x, rows, columns):
    R, C = x.shape[0] // rows, x.shape[1] // columns
    blocks = x.reshape(R, rows, C, columns).transpose(2, 1, 0, 3)
    return np.repeat(blocks, 2, axis=2).reshape(C * rows, 2 * R * columns)


INDEX_MAP = Exercise(
    number="4.1",
    title="The index map",
    outputs=("out",),
    cases=_index_map_cases,
    run=_run_index_map,
    expected=_index_map_expected,
    tried="1 to 4 rows and 2 to 5 columns of blocks, four block shapes",
    mistakes=(
        Mistake(
            "the axes are not swapped",
            lambda i, j: (i, j // 2),
            "Program (i, j) reads from column i of x: see the picture of the exercise, and section 3.",
        ),
        Mistake(
            "each program reads a block of its own instead of sharing it with its neighbour",
            lambda i, j: (j, i),
            "Programs (i, 0) and (i, 1) read the same block: see the picture of the exercise.",
        ),
        Mistake(
            "i is halved instead of j, and the axes are not swapped",
            lambda i, j: (i // 2, j),
            "Neighbours in j share a block, neighbours in i do not: see the picture of the exercise.",
        ),
        Mistake(
            "j % 2 stands where j // 2 should",
            lambda i, j: (j % 2, i),
            "The remainder makes programs alternate; the quotient makes neighbours share.",
        ),
        Mistake(
            "the map counts elements of 2 × 4 blocks instead of blocks",
            lambda i, j: (j // 2 * 2, i * 4),
            "An index map counts in blocks: see section 3.",
            variants=(lambda i, j: (j // 2 * 2, i), lambda i, j: (j // 2, i * 4)),
        ),
        Mistake(
            "each program reads the block of its own number",
            lambda i, j: (i, j),
            "Follow one program from `out` to `x`: see the picture of the exercise.",
        ),
        Mistake(
            "both numbers are halved",
            lambda i, j: (j // 2, i // 2),
            "Neighbours in j share a block, neighbours in i do not: see the picture of the exercise.",
        ),
        Mistake(
            "j is divided by 4 instead of 2",
            lambda i, j: (j // 4, i),
            "Two programs share a block, however many columns the grid has: see the picture of the exercise.",
        ),
        Mistake(
            "the map holds for the 2 × 3 blocks of the picture only",
            lambda i, j: (jnp.where(j < 2, 0, 1), i),
            "The check uses the same rule on arrays with other numbers of blocks: compute with i and j alone.",
            variants=(
                lambda i, j: (j // 2 % 2, i),
                lambda i, j: (j // 2, i % 3),
                lambda i, j: (j // 2 % 2, i % 3),
            ),
        ),
        Mistake(
            "every program reads from the first row of blocks",
            lambda i, j: (0, i),
            "Programs with j = 2 and j = 3 read the second row: see the picture of the exercise.",
        ),
        Mistake(
            "the columns are counted from the right",
            lambda i, j: (j // 2, 2 - i),
            "Program (0, 0) reads the first block: see the picture of the exercise.",
        ),
        Mistake(
            "j is doubled instead of halved",
            lambda i, j: (2 * j, i),
            "The grid has twice as many columns as x has rows of blocks, so j has to shrink.",
        ),
        Mistake(
            "i is halved instead of j",
            lambda i, j: (j, i // 2),
            "Neighbours in j share a block, neighbours in i do not: see the picture of the exercise.",
        ),
        Mistake(
            "the halves are rounded up, (j + 1) // 2",
            lambda i, j: ((j + 1) // 2, i),
            "Programs with j = 0 and j = 1 share a row: see the picture of the exercise.",
        ),
    ),
)

# 4.2 A masked tail


def _softmax_cases():
    random = np.random.default_rng(42)

    def logits(T, S, scale=1.0, shift=0.0):
        return (scale * random.standard_normal((T, S)) + shift).astype(np.float32)

    largest_first = np.sort(logits(6, 7, 3.0, -2.0), axis=1)[:, ::-1].copy()
    rows_apart = np.linspace(-2000, 2000, 9, dtype=np.float32)[:, None]
    by_hand = np.log(np.array([[1.0, 3.0, 4.0]])).astype(np.float32) - 5
    return [
        Case("T=1, S=3, block 2 × 4, logits below 0", (by_hand, 2, 4)),
        Case("T=5, S=6, block 2 × 8", (logits(5, 6), 2, 8)),
        Case("T=6, S=7, block 4 × 8, largest logit first", (largest_first, 4, 8)),
        Case("T=9, S=3, block 8 × 4, rows of logits from −2000 to 2000", (logits(9, 3) + rows_apart, 8, 4)),
    ]


def _run_softmax(kernel, s, block_q, block_s):
    T, S = s.shape
    spec = pl.BlockSpec((block_q, block_s), lambda i: (i, 0))
    call = pl.pallas_call(
        functools.partial(kernel, T=T, S=S),
        grid=(pl.cdiv(T, block_q),),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((T, S), jnp.float32),
        name="exercise",
    )
    (watched,), out = replay(call, s)
    s_seen, out_seen = watched.operands.values()
    return s_seen.outside, out_seen.outside_writes, out


def _softmax_expected(s, block_q, block_s):
    e = np.exp(s.astype(np.float64) - s.max(axis=1, keepdims=True))
    return 0, 0, (e / e.sum(axis=1, keepdims=True)).astype(np.float32)


def _softmax_kernel(
    s_ref,
    out_ref,
    *,
    T,
    S,
    other=-jnp.inf,
    mask_rows=True,
    mask_columns=True,
    number_rows=True,
    height_axis=0,
    number_columns=False,
    sum_axis=1,
    exp=jnp.exp,
    mask_load=True,
    mask_store=True,
    extra_column=0,
    extra_row=0,
    subtract_max=True,
    max_axis=1,
    select=False,
    clear=False,
    divide=True,
):
    rows = number_rows * pl.program_id(0) * s_ref.shape[height_axis] + jnp.arange(s_ref.shape[0])
    columns = number_columns * pl.program_id(0) * s_ref.shape[1] + jnp.arange(s_ref.shape[1])
    inside = (rows < T + extra_row) | (not mask_rows), (columns < S + extra_column) | (not mask_columns)
    mask = inside[0][:, None] & inside[1][None, :]
    if select:
        s = jnp.where(mask, s_ref[...], -jnp.inf)
    else:
        s = plt.load(s_ref, mask=mask, other=other) if mask_load else s_ref[...]
    m = s.max(axis=max_axis, keepdims=True) if subtract_max else 0
    p = jnp.where(mask | (not clear), exp(s - m), 0)
    p = p / p.sum(axis=sum_axis, keepdims=True) if divide else p
    if mask_store:
        plt.store(out_ref, p, mask=mask)
    else:
        out_ref[...] = p


MASKED_TAIL = Exercise(
    number="4.2",
    title="A masked tail",
    outputs=("elements loaded past the end", "elements stored past the end", "out"),
    cases=_softmax_cases,
    run=_run_softmax,
    expected=_softmax_expected,
    tolerance=5e-4,  # the task says so: a logit near 2000 times log2(e), or plus log l, is off by up to 1.2e-4
    tried="ragged rows and columns, the largest logit first, all below 0, rows from −2000 to 2000",
    mistakes=(
        Mistake(
            "nothing is masked, or the mask is turned round",
            functools.partial(_softmax_kernel, mask_load=False, mask_store=False),
            "The block hangs over the end of the array on two sides; the mask is true inside: see section 6.",
        ),
        Mistake(
            "masked logits are read as 0 instead of −∞",
            functools.partial(_softmax_kernel, other=0),
            "A logit of 0 adds e to the power of −m to the sum: see “Which other?” in section 7.",
        ),
        Mistake(
            "masked logits are read as a finite number, and that is not low enough",
            functools.partial(_softmax_kernel, other=-1000.0),
            "A logit of the table can be lower still; -jnp.inf never is: see “Which other?” in section 7.",
            variants=(functools.partial(_softmax_kernel, other=-100.0),),
        ),
        Mistake(
            "masked logits are read as 0 and left out of the sum, but not of the maximum",
            functools.partial(_softmax_kernel, other=0, clear=True),
            "Where all logits lie far below 0, a maximum of 0 makes them vanish: see “Which other?” in section 7.",
        ),
        Mistake(
            "the columns are masked and the rows are not",
            functools.partial(_softmax_kernel, mask_rows=False),
            "The last block may hold rows past T: mask both axes.",
        ),
        Mistake(
            "the rows are masked and the columns are not",
            functools.partial(_softmax_kernel, mask_columns=False),
            "The block may be wider than S: mask both axes.",
        ),
        Mistake(
            "T and S are exchanged in the mask",
            lambda s_ref, out_ref, *, T, S: _softmax_kernel(s_ref, out_ref, T=S, S=T),
            "T counts rows and S counts columns: see the text of the exercise.",
        ),
        Mistake(
            "the rows of a program are numbered with the width of the block instead of its height",
            functools.partial(_softmax_kernel, height_axis=1),
            "Program i begins at row i times s_ref.shape[0]: see the first hint.",
        ),
        Mistake(
            "the rows are numbered from 0 in every program, or from the number of the program",
            functools.partial(_softmax_kernel, number_rows=False),
            "Add program_id times the height of the block: see “Mask first, not afterwards” in section 7.",
        ),
        Mistake(
            "the load is masked and the store is not",
            functools.partial(_softmax_kernel, mask_store=False),
            "On a GPU an unmasked store may overwrite whatever lies behind the array: see section 7.",
        ),
        Mistake(
            "the block is loaded whole and masked afterwards",
            functools.partial(_softmax_kernel, select=True),
            "jnp.where hides the values but the load has happened; give the mask to plt.load: see section 7.",
        ),
        Mistake(
            "the block is loaded whole, masked afterwards, and stored whole",
            functools.partial(_softmax_kernel, select=True, mask_store=False),
            "jnp.where hides the values; give the mask to plt.load and to plt.store: see section 7.",
        ),
        Mistake(
            "the store is masked and the load is not",
            functools.partial(_softmax_kernel, mask_load=False),
            "What lies past the end must not be read, nor enter the sum: give the mask to plt.load, see section 7.",
        ),
        Mistake(
            "the mask keeps one row too many",
            functools.partial(_softmax_kernel, extra_row=1),
            "Row T is the first one past the end: compare with <, not with <=.",
        ),
        Mistake(
            "the mask keeps one row and one column too many",
            functools.partial(_softmax_kernel, extra_row=1, extra_column=1),
            "Row T and column S are the first ones past the end: compare with <, not with <=.",
        ),
        Mistake(
            "the mask leaves out the last column",
            functools.partial(_softmax_kernel, extra_column=-1),
            "Column S - 1 is inside: compare with columns < S.",
        ),
        Mistake(
            "the mask keeps one column too many",
            functools.partial(_softmax_kernel, extra_column=1),
            "Column S is the first one past the end: compare with <, not with <=.",
        ),
        Mistake(
            "the exponentials are not divided by their sum",
            functools.partial(_softmax_kernel, divide=False),
            "Divide p by l, the sum of each row: see section 4.",
        ),
        Mistake(
            "what stands in the masked columns makes the rows NaN: no `other`, +∞, NaN, or a maximum along axis 0",
            functools.partial(_softmax_kernel, other=None),
            "Ask plt.load for other=-jnp.inf, and take the maximum with axis=1: see “Which other?” in section 7.",
        ),
        Mistake(
            "the columns are numbered on from program to program, as if the blocks lay side by side",
            functools.partial(_softmax_kernel, number_columns=True),
            "Every block begins at column 0; only the rows go on: see the text of the exercise.",
        ),
        Mistake(
            "the sum runs over the whole block instead of each row",
            functools.partial(_softmax_kernel, sum_axis=None),
            "Each row has a sum of its own, axis=1: see section 4.",
        ),
        Mistake(
            "the softmax runs down the columns",
            functools.partial(_softmax_kernel, sum_axis=0, max_axis=0),
            "The logits of one query stand in one row, axis=1: see section 4.",
        ),
        Mistake(
            "the exponential is taken to base two",
            functools.partial(_softmax_kernel, exp=jnp.exp2),
            "A softmax takes e to the power of s, jnp.exp: see section 4.",
        ),
        Mistake(
            "the largest logit of the whole block is subtracted, instead of that of each row",
            functools.partial(_softmax_kernel, max_axis=None),
            "Far below the maximum every exponential is 0, and 0 / 0 is NaN; max takes axis=1: see section 4.",
        ),
        Mistake(
            "the largest logit is not subtracted",
            functools.partial(_softmax_kernel, subtract_max=False),
            "The exponential overflows for large logits: see section 4.",
        ),
    ),
)

# 4.3 Accumulate over k


def _matmul_cases():
    random = np.random.default_rng(43)
    shapes = [
        (2, 3, 2, 2, 2, 2, np.float32),
        (2, 3, 4, 2, 2, 4, np.float32),
        (4, 6, 8, 4, 4, 4, np.float32),
        (4, 8, 2, 4, 2, 4, np.float32),
        (8, 21, 4, 4, 2, 4, np.float32),
        (8, 200, 8, 8, 8, 16, np.float16),
    ]
    return [
        Case(
            f"T={T}, S={S}, H={H}, block_q={block_q}, block_h={block_h}, block_k={block_k}, {np.dtype(dtype).name}",
            (
                random.standard_normal((T, S)).astype(dtype),
                random.standard_normal((S, H)).astype(dtype),
                block_q,
                block_h,
                block_k,
            ),
        )
        for T, S, H, block_q, block_h, block_k, dtype in shapes
    ]


def _run_matmul(kernel, p, v, block_q, block_h, block_k):
    (T, S), H = p.shape, v.shape[1]
    call = pl.pallas_call(
        functools.partial(kernel, S=S, block_k=block_k),
        grid=(T // block_q, H // block_h),
        in_specs=[
            pl.BlockSpec((block_q, S), lambda i, h: (i, 0)),
            pl.BlockSpec((S, block_h), lambda i, h: (0, h)),
        ],
        out_specs=pl.BlockSpec((block_q, block_h), lambda i, h: (i, h)),
        out_shape=jax.ShapeDtypeStruct((T, H), jnp.float32),
        name="exercise",
    )
    try:
        keys = sorted(_keys_in_products(jax.make_jaxpr(call)(p, v).jaxpr))
    except ValueError as error:
        if "Out of bound slice" not in str(error):
            raise
        raise Complaint(
            "the last tile starts at a Python number, so Pallas sees that it runs past the end, and allows no mask;\n"
            "loop with lax.fori_loop, where the start is traced, and give the mask to plt.load: see sections 5 and 6"
        ) from error
    if keys and keys[-1] > block_k:
        raise Complaint(f"one product takes {keys[-1]} keys at once; load and add one tile of block_k keys at a time")
    if keys and keys[0] < block_k:
        raise Complaint(f"one product takes {keys[0]} of {block_k} keys; load the last tile whole, and mask its tail")
    (watched,), out = replay(call, p, v)
    p_seen, v_seen, _ = watched.operands.values()
    return p_seen.outside, v_seen.outside, out


def _keys_in_products(jaxpr):
    """The length of the sum in each matrix product of a jaxpr, those in its loops and kernels too.

    A product may also be written as a multiplication and a sum.
    """
    for equation in jaxpr.eqns:
        summed = ()
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
        elif equation.primitive.name == "reduce_sum":
            summed = equation.params["axes"]
        if summed:
            yield math.prod(equation.invars[0].aval.shape[axis] for axis in summed)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _keys_in_products(inner)


def _matmul_expected(p, v, block_q, block_h, block_k):
    return 0, 0, (p.astype(np.float64) @ v.astype(np.float64)).astype(np.float32)


def _matmul_kernel(
    p_ref,
    v_ref,
    out_ref,
    *,
    S,
    block_k,
    mask_p=True,
    mask_v=True,
    offset_in_mask=True,
    slices=False,
    select=False,
    element_start=False,
    element_load=False,
    first_tile=0,
    use_result=True,
    drop_tail=False,
    keep=1,
    acc_16_bit=False,
    product_16_bit=False,
    other=0,
    extra_key=0,
):
    acc_dtype = p_ref.dtype if acc_16_bit else jnp.float32
    product_dtype = p_ref.dtype if product_16_bit else jnp.float32

    def add_tile(j, acc):
        start = j if element_start else j * block_k
        tile = pl.ds(j if element_load else start, block_k)
        positions = (start if offset_in_mask else 0) + jnp.arange(block_k)
        inside = positions < S + extra_key
        if slices:
            p, v = p_ref[:, tile], v_ref[tile, :]
            if select:
                p, v = jnp.where(inside[None, :], p, 0), jnp.where(inside[:, None], v, 0)
        else:
            p = plt.load(p_ref.at[:, tile], mask=inside[None, :] | (not mask_p), other=other)
            v = plt.load(v_ref.at[tile, :], mask=inside[:, None] | (not mask_v), other=other)
        product = lax.dot(p, v, preferred_element_type=product_dtype)
        return keep * acc + product.astype(acc_dtype)

    tiles = S // block_k if drop_tail else pl.cdiv(S, block_k)
    start = jnp.zeros(out_ref.shape, acc_dtype)
    acc = lax.fori_loop(first_tile, tiles, add_tile, start)
    out_ref[...] = (acc if use_result else start).astype(out_ref.dtype)


def _matmul_without_start(p_ref, v_ref, out_ref, *, S, block_k):
    def add_tile(j, _):
        tile = pl.ds(j * block_k, block_k)
        inside = j * block_k + jnp.arange(block_k) < S
        p = plt.load(p_ref.at[:, tile], mask=jnp.broadcast_to(inside, (p_ref.shape[0], block_k)), other=0)
        v = plt.load(v_ref.at[tile, :], mask=inside[:, None], other=0)
        out_ref[...] += lax.dot(p, v, preferred_element_type=jnp.float32)

    lax.fori_loop(0, pl.cdiv(S, block_k), add_tile, None)


def _matmul_with_a_short_tile(p_ref, v_ref, out_ref, *, S, block_k):
    acc = jnp.zeros(out_ref.shape, jnp.float32)
    for start in range(0, S, block_k):
        stop = min(start + block_k, S)
        acc += lax.dot(p_ref[:, start:stop], v_ref[start:stop, :], preferred_element_type=jnp.float32)
    out_ref[...] = acc


ACCUMULATE = Exercise(
    number="4.3",
    title="Accumulate over k",
    outputs=("elements of p loaded past the end", "elements of v loaded past the end", "out"),
    cases=_matmul_cases,
    run=_run_matmul,
    expected=_matmul_expected,
    tried="S from 3 to 200, below block_k, above it and a multiple of it, unequal block sizes, float32 and float16",
    mistakes=(
        Mistake(
            "the output block is added to before anything was stored in it",
            _matmul_without_start,
            "An output starts with whatever is in memory; start from jnp.zeros: see section 5.",
        ),
        Mistake(
            "the accumulator has 16 bits",
            functools.partial(_matmul_kernel, acc_16_bit=True),
            "Sum in float32 whatever the inputs are: see section 5.",
        ),
        Mistake(
            "each product is rounded to 16 bits",
            functools.partial(_matmul_kernel, product_16_bit=True),
            "Ask lax.dot for preferred_element_type=jnp.float32: see section 5.",
        ),
        Mistake(
            "each tile replaces the accumulator instead of being added to it",
            functools.partial(_matmul_kernel, keep=0),
            "Return acc + product from the loop body: see section 5.",
        ),
        Mistake(
            "the last, partial tile is left out",
            functools.partial(_matmul_kernel, drop_tail=True),
            "S // block_k rounds down; pl.cdiv(S, block_k) counts the partial tile too.",
        ),
        Mistake(
            "the last tile is loaded with a slice that runs past the end",
            functools.partial(_matmul_kernel, slices=True),
            "In interpret mode it is moved back and some products count twice; on a GPU it reads what lies there: "
            "see section 6.",
        ),
        Mistake(
            "the last tile is loaded with a slice that runs past the end, and masked afterwards",
            functools.partial(_matmul_kernel, slices=True, select=True),
            "Interpret mode moves it back, and the mask hides the wrong keys: give it to plt.load, see section 6.",
        ),
        Mistake(
            "the last tile is cut short instead of masked",
            _matmul_with_a_short_tile,
            "A tile has one size, which a GPU wants to be a power of two: load block_k keys with a mask: section 6.",
        ),
        Mistake(
            "the tail of p is masked and the tail of v is not",
            functools.partial(_matmul_kernel, mask_v=False),
            "Zero times NaN is NaN, so both operands need the mask: see section 7.",
        ),
        Mistake(
            "the tail of v is masked and the tail of p is not",
            functools.partial(_matmul_kernel, mask_p=False),
            "NaN times zero is NaN, so both operands need the mask: see section 7.",
        ),
        Mistake(
            "the mask hides nothing of the last tile, in either operand",
            functools.partial(_matmul_kernel, offset_in_mask=False),
            "Compare j * block_k + jnp.arange(block_k) with S, not the places within a tile: see section 6.",
        ),
        Mistake(
            "plt.load has a mask, and no `other`, or NaN or an infinity for it, in one operand or in both",
            functools.partial(_matmul_kernel, other=None),
            "A missing key must add nothing, so both operands need other=0; 0 · NaN and 0 · ∞ are NaN: see section 7.",
        ),
        Mistake(
            "masked places hold 1 instead of 0",
            functools.partial(_matmul_kernel, other=1),
            "A missing key must add nothing, so its place holds 0: see “Which other?” in section 7.",
        ),
        Mistake(
            "the mask keeps one key too many",
            functools.partial(_matmul_kernel, extra_key=1),
            "Key S is the first one past the end: compare with <, not with <=.",
        ),
        Mistake(
            "the mask leaves out the last key",
            functools.partial(_matmul_kernel, extra_key=-1),
            "Key S - 1 is inside: compare with < S.",
        ),
        Mistake(
            "tile j begins at element j instead of element j * block_k",
            functools.partial(_matmul_kernel, element_start=True),
            "pl.ds counts elements, unlike an index map, which counts blocks: see section 5.",
            variants=(functools.partial(_matmul_kernel, element_load=True),),
        ),
        Mistake(
            "the first tile is left out",
            functools.partial(_matmul_kernel, first_tile=1),
            "Tiles are numbered from 0: see the loop of section 5.",
        ),
        Mistake(
            "what the loop returns is not used, so that zeros are stored",
            functools.partial(_matmul_kernel, use_result=False),
            "lax.fori_loop returns the last state: acc = lax.fori_loop(…), see section 5.",
        ),
    ),
)

# 4.4 The grid, in NumPy


def _minus_mean(block):
    return block - block.mean(axis=1, keepdims=True)


def _minus_max(block):
    return block - block.max()


def _doubled(block):
    return 2 * block


def _as_is(i, j):
    return i, j


def _across(i, j):
    return j, i


def _same_column(i, j):
    return i, 0


# body, shape of x, grid, block_shape, in_map, out_map
GRIDS = {
    "x 2 × 4, grid (2, 2), block 1 × 2, doubled": (_doubled, (2, 4), (2, 2), (1, 2), _as_is, _as_is),
    "x 4 × 6, grid (2, 3), block 2 × 2, out_map (i, 2 − j)": (
        _minus_mean,
        (4, 6),
        (2, 3),
        (2, 2),
        _as_is,
        lambda i, j: (i, 2 - j),
    ),
    "x 6 × 6, grid (3, 2), block 2 × 3, in_map (i, 0)": (_minus_max, (6, 6), (3, 2), (2, 3), _same_column, _as_is),
    "x 5 × 7, grid (3, 2), block 2 × 4, rows minus their mean": (_minus_mean, (5, 7), (3, 2), (2, 4), _as_is, _as_is),
    "x 5 × 7, grid (3, 3), block 2 × 3, in_map (2 − i, j), out_map (i, 2 − j)": (
        _doubled,
        (5, 7),
        (3, 3),
        (2, 3),
        lambda i, j: (2 - i, j),
        lambda i, j: (i, 2 - j),
    ),
    "x 6 × 8, grid (2, 1), block 2 × 4, which does not cover x": (_doubled, (6, 8), (2, 1), (2, 4), _as_is, _as_is),
    "x 4 × 9, grid (3, 2), block 2 × 3, both maps (j, i)": (_minus_mean, (4, 9), (3, 2), (2, 3), _across, _across),
    "x 7 × 7, grid (2, 3), block 3 × 3, both maps (j, i)": (_minus_max, (7, 7), (2, 3), (3, 3), _across, _across),
}


def _grid_input(name):
    shape = GRIDS[name][1]
    values = np.random.default_rng(len(name)).standard_normal(shape) - 4  # all below 0
    return values.astype(np.float32)


def _grid_cases():
    cases = []
    for name, (body, _, grid, block_shape, in_map, out_map) in GRIDS.items():
        cases.append(Case(name, (name, body, _grid_input(name), grid, block_shape, in_map, out_map)))
    return cases


@functools.cache
def _grid_by_pallas(name):
    body, shape, grid, block_shape, in_map, out_map = GRIDS[name]

    def kernel(x_ref, out_ref):
        out_ref[...] = body(x_ref[...])

    return np.asarray(
        pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[pl.BlockSpec(block_shape, in_map)],
            out_specs=pl.BlockSpec(block_shape, out_map),
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
            interpret=True,
        )(_grid_input(name))
    )


def _run_grid(
    body,
    x,
    grid,
    block_shape,
    in_map,
    out_map,
    *,
    fill=np.nan,
    start=np.nan,
    whole=False,
    step=None,
    clamp=False,
    ragged=True,
    programs=None,
):
    rows, columns = block_shape
    out = np.full(x.shape, start)
    for i, j in itertools.islice(np.ndindex(*grid), programs):
        r, c = (index * size for index, size in zip(in_map(i, j), step or block_shape, strict=True))
        if clamp:
            r, c = min(r, x.shape[0] - rows), min(c, x.shape[1] - columns)
        seen = x[r : r + rows, c : c + columns]
        block = np.full(block_shape, fill)
        block[: seen.shape[0], : seen.shape[1]] = seen
        if seen.shape != block_shape and not ragged:
            continue
        result = body(seen if whole else block)
        r, c = (index * size for index, size in zip(out_map(i, j), step or block_shape, strict=True))
        if clamp:
            r, c = min(r, x.shape[0] - rows), min(c, x.shape[1] - columns)
        target = out[r : r + rows, c : c + columns]
        target[...] = result[: target.shape[0], : target.shape[1]]
    return out


def _run_by_hand(answer, name, body, *arguments):
    """What the answer returns; a `Complaint` where `pallas_call`, or another transformation, has traced the body."""

    def each_time(block):
        if isinstance(block, jax.core.Tracer):
            raise Complaint("`body` got a traced block, as under pallas_call; write the two loops yourself, in NumPy")
        return body(block)

    return answer(each_time, *arguments)


def _strictly(answer):
    """The same answer where a block that begins past the end raises, as lengths below 0 make it."""

    def strict(body, x, grid, block_shape, in_map, out_map):
        def inside(index_map):
            def checked(i, j):
                index = index_map(i, j)
                if any(
                    number * size > length for number, size, length in zip(index, block_shape, x.shape, strict=True)
                ):
                    raise IndexError
                return index

            return checked

        return answer(body, x, grid, block_shape, inside(in_map), inside(out_map))

    return strict


def _run_grid_swapped(body, x, grid, block_shape, in_map, out_map):
    return _run_grid(body, x, grid, block_shape, lambda i, j: in_map(j, i), lambda i, j: out_map(j, i))


def _with_turned_grid(body, x, grid, block_shape, in_map, out_map):
    return _run_grid(body, x, grid[::-1], block_shape, in_map, out_map)


def _zeros_like(block):
    return np.zeros(block.shape)


def _run_grid_covering(body, x, grid, block_shape, in_map, out_map):
    grid = tuple(-(-length // size) for length, size in zip(x.shape, block_shape, strict=True))
    return _run_grid(body, x, grid, block_shape, in_map, out_map)


def _run_grid_exchanged(body, x, grid, block_shape, in_map, out_map):
    return _run_grid(body, x, grid, block_shape, out_map, in_map)


def _run_grid_on_zeros(*arguments):
    return np.nan_to_num(_run_grid(*arguments), nan=0.0)


def _run_grid_in_place(body, x, grid, block_shape, in_map, out_map):
    return _run_grid(body, x, grid, block_shape, in_map, in_map)


def _run_grid_from_out_map(body, x, grid, block_shape, in_map, out_map):
    return _run_grid(body, x, grid, block_shape, out_map, out_map)


GRID = Exercise(
    number="4.4",
    title="The grid, in NumPy",
    outputs=("out",),
    cases=_grid_cases,
    run=_run_by_hand,
    expected=lambda name, *_: _grid_by_pallas(name),
    tried="the same kernels under pallas_call, index maps that swap, share and mirror, blocks over the end",
    mistakes=(
        Mistake(
            "nothing reaches the output, which stays NaN",
            lambda body, x, *_: np.full(x.shape, np.nan),
            "`target = …` only gives a value a name, and `+=` adds to NaN; `target[...] = …` writes into the array.",
        ),
        Mistake(
            "block indices are used as element indices",
            functools.partial(_run_grid, step=(1, 1)),
            "Multiply each index by the block's size on that axis: see section 3.",
        ),
        Mistake(
            "both maps are ignored: program (i, j) reads and writes block (i, j)",
            lambda body, x, grid, block_shape, in_map, out_map: _run_grid(body, x, grid, block_shape, _as_is, _as_is),
            "Reading goes by in_map and storing by out_map: see section 3.",
            variants=(
                _strictly(
                    lambda body, x, grid, block_shape, in_map, out_map: _run_grid(
                        body, x, grid, block_shape, _as_is, _as_is
                    )
                ),
            ),
        ),
        Mistake(
            "in_map is ignored: program (i, j) reads block (i, j)",
            lambda body, x, grid, block_shape, in_map, out_map: _run_grid(body, x, grid, block_shape, _as_is, out_map),
            "Reading goes by in_map: see section 3.",
        ),
        Mistake(
            "out_map is ignored: program (i, j) writes block (i, j)",
            lambda body, x, grid, block_shape, in_map, out_map: _run_grid(body, x, grid, block_shape, in_map, _as_is),
            "Storing goes by out_map: see section 3.",
        ),
        Mistake(
            "body is not called",
            lambda body, *arguments: _run_grid(lambda block: block, *arguments),
            "What is stored is body(block): see the text of the exercise.",
        ),
        Mistake(
            "blocks that hang over the end are left out",
            functools.partial(_run_grid, ragged=False),
            "They are filled with NaN, and what fits of the result is stored: see section 6.",
        ),
        Mistake(
            "the function returns after its first program, or after the first row of programs",
            functools.partial(_run_grid, programs=1),
            "`return` stands outside both loops: look at its indentation.",
            variants=(lambda body, x, grid, *arguments: _run_grid(body, x, grid, *arguments, programs=grid[1]),),
        ),
        Mistake(
            "the height and the width of a block are exchanged",
            lambda body, x, grid, block_shape, *maps: _run_grid(body, x, grid, block_shape[::-1], *maps),
            "block_shape is (rows, columns): see the text of the exercise.",
        ),
        Mistake(
            "the result is stored where the block was read",
            _run_grid_in_place,
            "Reading goes by in_map and storing by out_map: see section 3.",
        ),
        Mistake(
            "the block is read where the result will be stored",
            _run_grid_from_out_map,
            "Reading goes by in_map and storing by out_map: see section 3.",
        ),
        Mistake(
            "blocks at the end are cut short instead of filled with NaN",
            functools.partial(_run_grid, whole=True),
            "A block always has its full shape, also where it hangs over the end: see section 6.",
        ),
        Mistake(
            "blocks at the end are filled with zeros instead of NaN",
            functools.partial(_run_grid, fill=0.0),
            "A kernel must not be able to rely on what lies past the end: see section 6.",
        ),
        Mistake(
            "blocks at the end are moved back until they fit",
            functools.partial(_run_grid, clamp=True),
            "That is what a slice of a ref does; a BlockSpec's block hangs over: see section 6.",
        ),
        Mistake(
            "the two maps are exchanged",
            _run_grid_exchanged,
            "in_map says where to read, out_map where to store: see section 3.",
        ),
        Mistake(
            "the loops follow the shape of x instead of the grid",
            _run_grid_covering,
            "The grid says how many programs there are; they need not cover x: see the text of the exercise.",
        ),
        Mistake(
            "what nobody stores is 0 instead of NaN",
            functools.partial(_run_grid, start=0.0),
            "An output starts with whatever is in memory, here NaN: see the text of the exercise.",
        ),
        Mistake(
            "what nobody stores is 0 instead of NaN, and blocks at the end are filled with zeros",
            functools.partial(_run_grid, start=0.0, fill=0.0),
            "Neither may be relied on, so both are NaN: see the text of the exercise.",
        ),
        Mistake(
            "NaN in the result is replaced by 0",
            _run_grid_on_zeros,
            "A result that used what lies past the end must show it: leave NaN as it is, see section 6.",
        ),
        Mistake(
            "what nobody stores is as it was in x instead of NaN",
            lambda body, x, *arguments: np.where(
                np.isnan(_run_grid(_zeros_like, x, *arguments)), x, _run_grid(body, x, *arguments)
            ),
            "An output is an array of its own, here full of NaN: see the text of the exercise.",
        ),
        Mistake(
            "the index maps are called with j before i, or the two axes of the grid are exchanged",
            _run_grid_swapped,
            "i counts along the first axis of the grid, and is the first argument of a map: see section 3.",
            variants=(_with_turned_grid, _strictly(_run_grid_swapped), _strictly(_with_turned_grid)),
        ),
    ),
)

EXERCISES = (INDEX_MAP, MASKED_TAIL, ACCUMULATE, GRID)
