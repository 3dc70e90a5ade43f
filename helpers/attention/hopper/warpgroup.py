"""Products of one warpgroup: wgmma on a Hopper card, plain matrix products in the interpreter.

The Mosaic GPU interpreter runs barriers, TMA copies and SMEM on a CPU, but not a wgmma whose left
operand lives in registers, nor one whose accumulator begins as a given array. The functions here
stand in for both, so that a kernel is one source for the card and for the interpreter: compiled,
they issue asynchronous wgmmas; interpreted, they read the same operands through the same refs (so
that the race detector sees the reads) and multiply at once. `accumulate_then` and `overlapped` read the
operands of their second product once more after the work beside it, for they are in use until then.

Operands: a is a ref in SMEM or an array in registers, b is a ref in SMEM, an accumulator is a
float32 array in registers in the layout WGMMA. All products are 16-bit with a float32 sum.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

HEAD_DIMS = (64, 128, 256)  # others are padded to the next
PROCESSORS = 132  # of an H100 SXM and an H200; on other cards the programs queue or leave some idle
CACHED = 24 * 2**20  # bytes that stay in the L2 cache of a Hopper card, with all else that passes through it
MATRIX = plgpu.Layout.WGMMA  # how a warpgroup holds a (rows, columns) array in registers
ROWS = MATRIX.reduce(1)  # and one number a row of it
COLUMNS = MATRIX.reduce(0)  # or a column, all of them in each of the four warps
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # how wgmma wants 16-bit SMEM
# Registers of a thread, (compute, memory), by the number of compute warpgroups. A program starts with
# as many for every thread as fit; asking for more in all than it started with waits for ever.
REGISTERS = {2: (240, 24), 3: (160, 24), 4: (112, 24)}


def padded_head_dim(H):
    """head_dim rounded up to one of HEAD_DIMS."""
    return next(size for size in HEAD_DIMS if size >= H)


def anew(numbers):
    """The same number or array, of which the compiler knows nothing before this point.

    What a loop makes of it in every step, such as addresses of operands, is then made
    in every step. The compiler would rather make all of it ahead of the loop, and has
    no registers left in which to keep it.
    """
    return lax.optimization_barrier(numbers)


def read(*operands):
    """The values of operands, in the interpreter. Its race detector sees these reads, and none of a wgmma."""
    values = [operand if isinstance(operand, jax.Array) else operand[...] for operand in operands]
    # These were ordinary reads; wgmma's are of the async proxy, like TMA's writes that may follow.
    plgpu.commit_smem()
    return values


def _dot(a, b):
    """a @ b in the interpreter."""
    return lax.dot(*read(a, b), preferred_element_type=jnp.float32)


def multiply_add(acc, a, b, spare, interpret):
    """Issue acc += a @ b on the tensor core.

    a: a ref, or an array in registers; acc: an ACC ref. The interpreter knows no
    register operand: there it goes through `spare`, a ref of its shape. And it does not
    tell its race detector what a wgmma reads: there the operands are read once more,
    to be seen.
    """
    if interpret and isinstance(a, jax.Array):
        spare[...] = a
        plgpu.commit_smem()
        a = spare
    plgpu.wgmma(acc, a, b)
    if interpret:
        read(a, b)


def issue(products, axis, interpret):
    """Issue the sum of `products` on the tensor core; returns it in flight, for `awaited` and nothing else.

    products: pairs (a, b) of refs in SMEM, SWIZZLED, contracted along `axis` of both: each adds a @ b.T with
    axis 1 and a.T @ b with axis 0. To a wait, the sum is one product.

    `plgpu.wgmma` adds to what the registers of its sum hold, so somebody has to put zeros there first, in every
    step. Here the first instruction overwrites what they hold.
    """
    return (interpreted_sum if interpret else overwriting_sum)(products, axis)


def awaited(in_flight, wait_n):
    """What `issue` returned, when at most wait_n of the products issued after it still run."""
    plgpu.wgmma_wait(wait_n)
    return anew(in_flight)  # the compiler sees no instruction change these registers: it might use them earlier


def interpreted_sum(products, axis):
    """What `issue` does in the interpreter."""
    rows, columns = (ref.shape[1 - axis] for ref in products[0])

    def body(acc):
        for a, b in products:
            multiply_add(acc, *((a, b.T) if axis == 1 else (a.T, b)), None, interpret=True)
        return plgpu.wgmma_accumulator_load(acc, wait_n=None)

    return pl.run_scoped(body, plgpu.ACC((rows, columns), jnp.float32))


def overwriting_sum(products, axis):
    """What `issue` does on a card: Pallas has no word for a product that overwrites."""
    shape = tuple(ref.shape[1 - axis] for ref in products[0])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(SWIZZLED),) * (2 * len(products)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=MATRIX),
    )
    def instructions(_, *operands):
        return wgmma_instructions(operands, axis, shape)

    return instructions(*itertools.chain.from_iterable(products))


def wgmma_instructions(operands, axis, shape):
    """The registers of a sum of products, a and b of each among operands, by one block of PTX.

    PTX ISA, wgmma.mma_async: each instruction contracts 16. Its operand scale-d says if it adds to what the
    registers hold, and is false in the first.
    """
    count = shape[1] // 2  # of the registers of a thread; $0, $1, ... name them, and the descriptors after them
    registers = ",".join(f"${i}" for i in range(count))
    dtype = ir.MemRefType(operands[0].type).element_type
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{shape[1]}k16.f32.{dtype}.{dtype}"
    descriptors, steps_of = zip(*(descriptor(operand, axis) for operand in operands), strict=True)
    places = [
        (pair, *steps) for pair in range(0, len(operands), 2) for steps in zip(*steps_of[pair : pair + 2], strict=True)
    ]
    text = " ".join(
        f"add.s64 a, ${count + pair}, {a}; add.s64 b, ${count + pair + 1}, {b}; setp.ne.b32 adds, {number > 0:d}, 0; "
        f"{wgmma} {{{registers}}}, a, b, adds, 1, 1, {1 - axis}, {1 - axis};"
        for number, (pair, a, b) in enumerate(places)
    )
    f32 = ir.F32Type.get()
    sums = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        descriptors,
        f"{{ .reg .pred adds; .reg .b64 a, b; wgmma.fence.sync.aligned; {text} wgmma.commit_group.sync.aligned; }}",
        ",".join(["=f"] * count + ["l"] * len(descriptors)),
        has_side_effects=True,
    )
    sums = [llvm.extractvalue(f32, sums, [i]) for i in range(count)]
    pairs = [vector.from_elements(ir.VectorType.get((2,), f32), pair) for pair in itertools.batched(sums, 2)]
    layout = MATRIX.to_mgpu()
    pairs = np.array(pairs, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=pairs, _layout=layout, _is_signed=None)


def descriptor(ref, axis):
    """(the descriptor of a SWIZZLED operand, what to add to it for each 16 of the contracted axis).

    PTX ISA, "matrix descriptor" of wgmma: where the operand begins, and how far apart its tiles of 8 x 64
    are across and down, each in units of 16 bytes, and which swizzle.
    """
    kind = ir.MemRefType(ref.type)
    rows_of_tiles, tiles_in_a_row, *_ = kind.shape
    (down, across, *_), _ = kind.get_strides_and_offset()  # in elements of two bytes
    down, across, swizzle_128 = down // 8, across // 8, 1
    if axis == 1:  # 16 columns are a quarter of a tile's row of 128 bytes
        leading, steps = 0, [tile * across + 2 * quarter for tile in range(tiles_in_a_row) for quarter in range(4)]
    else:  # 16 rows are two tiles
        leading, steps = across, [2 * pair * down for pair in range(rows_of_tiles // 2)]
    i64 = ir.IntegerType.get_signless(64)
    number = functools.partial(arith.constant, i64)
    begins = llvm.lshr(llvm.and_(llvm.ptrtoint(i64, utils.memref_ptr(ref)), number(0x3FFFF)), number(4))
    return llvm.or_(begins, number(leading << 16 | down << 32 | swizzle_128 << 62)), steps


def product(a, b, *, interpret):
    """a @ b."""
    if interpret:
        return _dot(a, b)

    def body(c_ref):
        plgpu.wgmma(c_ref, a, b)
        return c_ref[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _add_products(refs, a, bs):
    """Issue refs[i] += a @ bs[i] for each i, a short b once for each part of a as long as it; returns how many."""
    count = 0
    for ref, b in zip(refs, bs, strict=True):
        for start in range(0, a.shape[1], b.shape[0]):
            plgpu.wgmma(ref, a if b.shape[0] == a.shape[1] else a[:, start : start + b.shape[0]], b)
            count += 1
    return count


def _added(c, a, bs):
    """c[i] + a @ bs[i] in the interpreter."""
    sums = []
    for one, b in zip(c, bs, strict=True):
        (values,) = read(b)
        repeated = jnp.tile(values, (a.shape[1] // len(values), 1))
        sums.append(one + lax.dot(a, repeated, preferred_element_type=jnp.float32))
    return tuple(sums)


def accumulate(c, a, b, *, interpret):
    """c + a @ b."""
    return accumulate_all((c,), a, (b,), interpret=interpret)[0]


def accumulate_all(c, a, bs, *, interpret):
    """c[i] + a @ bs[i] for each i: tuples of accumulators and of refs with one left operand."""
    if interpret:
        return _added(c, a, bs)
    return pl.run_state(lambda refs: _add_products(refs, a, bs) and None)(tuple(map(plgpu.ACC.init, c)))


def accumulate_then(last, ready, following, meanwhile, *, interpret):
    """Two products in flight at once, and work on the first while the second runs.

    last: (c, a, bs) as for `accumulate_all`; following: (a, b). Issues c + a @ b, calls ready(), issues a @ b of the
    second, awaits the first product alone and calls meanwhile(c + a @ b) while the tensor core is busy with the second.
    Returns a @ b of the second.
    """
    (c, a, bs), (a2, b2) = last, following
    if interpret:
        c = _added(c, a, bs)
        ready()
        s = _dot(a2, b2)
        meanwhile(c)
        read(a2, b2)
        return s

    def body(refs):
        c_refs, s_ref = refs
        _add_products(c_refs, a, bs)
        ready()
        plgpu.wgmma(s_ref, a2, b2)
        meanwhile(tuple(plgpu.wgmma_accumulator_load(c_ref, wait_n=1) for c_ref in c_refs))

    s = plgpu.layout_cast(jnp.zeros((a2.shape[0], b2.shape[1]), jnp.float32), MATRIX)
    return pl.run_state(body)((tuple(map(plgpu.ACC.init, c)), plgpu.ACC.init(s)))[1]


def overlapped(first, second, meanwhile, state, *, interpret):
    """Two products in flight at once, and work on the first while the second runs.

    first: (a, b); second: (c, a, bs) as for `accumulate_all`. Issues a @ b and then c + a @ b, awaits the first
    product, s, alone, and computes p, state = meanwhile(s, state) while the tensor core is
    busy with the second. p has the shape of s, and state keeps its shapes. ptxas likes to await the
    second before most of that work, unless meanwhile ends with a loop, such as a barrier_wait.
    Returns (c + a @ b of the second, p, the new state).
    """
    (a, b), (c, a2, bs) = first, second
    if interpret:
        s, c = _dot(a, b), _added(c, a2, bs)
        p, state = meanwhile(s, state)
        read(a2, *bs)
        return c, p, state
    shape = a.shape[0], b.shape[1]
    leaves, tree = jax.tree.flatten(state)

    def body(refs):
        c_refs, p_ref, *state_refs = refs

        def with_first(s_ref):
            plgpu.wgmma(s_ref, a, b)
            later = _add_products(c_refs, a2, bs)
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=later)  # the oldest of them
            p, new = meanwhile(s, jax.tree.unflatten(tree, [ref[...] for ref in state_refs]))
            values = p, *jax.tree.leaves(new)
            for ref, value in zip((p_ref, *state_refs), values, strict=True):
                ref[...] = value

        pl.run_scoped(with_first, plgpu.ACC(shape, jnp.float32))

    # run_state awaits the second product, and is how values leave its body; p starts as anything.
    p = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)
    c, p, *leaves = pl.run_state(body)((tuple(map(plgpu.ACC.init, c)), p, *leaves))
    return c, p, jax.tree.unflatten(tree, leaves)
