"""What Pallas has no word for, in PTX: sums that overwrite, right operands in two places, counters, early loads, 1 / d.

It runs on a GPU only. `warpgroup` has what the interpreter does instead, if anything. The sums are wgmma.mma_async of
the PTX ISA.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

MATRIX = plgpu.Layout.WGMMA  # how a warpgroup holds a (rows, columns) array in registers
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # how wgmma wants 16-bit SMEM


def overwriting_sum(products, axis):
    """What `issue` does on a GPU: Pallas has no word for a product that overwrites."""
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
    return _array([llvm.extractvalue(f32, sums, [i]) for i in range(count)], shape)


def descriptor(ref, axis, leading=None):
    """(the descriptor of a SWIZZLED operand, what to add to it for each 16 of the contracted axis).

    PTX ISA, "matrix descriptor" of wgmma: where the operand begins, and how far apart its tiles of 8 x 64
    are across and down, each in units of 16 bytes, and which swizzle. leading: that across, if ref has one tile.
    """
    kind = ir.MemRefType(ref.type)
    rows_of_tiles, tiles_in_a_row, *_ = kind.shape
    (down, across, *_), _ = kind.get_strides_and_offset()  # in elements of two bytes
    down, across, swizzle_128 = down // 8, across // 8, 1
    if axis == 1:  # 16 columns are a quarter of a tile's row of 128 bytes
        leading, steps = 0, [tile * across + 2 * quarter for tile in range(tiles_in_a_row) for quarter in range(4)]
    else:  # 16 rows are two tiles
        leading, steps = leading or across, [2 * pair * down for pair in range(rows_of_tiles // 2)]
    i64 = ir.IntegerType.get_signless(64)
    number = functools.partial(arith.constant, i64)
    begins = llvm.lshr(llvm.and_(llvm.ptrtoint(i64, utils.memref_ptr(ref)), number(0x3FFFF)), number(4))
    return llvm.or_(begins, number(leading << 16 | down << 32 | swizzle_128 << 62)), steps


def wide_sum(acc, a, values):
    """acc (64, columns) + a @ the first columns of values, (parts, keys, 64): in flight, for `awaited` alone."""

    @plgpu.inline_mgpu(
        arg_types=(MATRIX, MATRIX, plgpu.RefType(SWIZZLED)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=MATRIX),
    )
    def instructions(_, *operands):
        return wide_instructions(*operands)

    return instructions(acc, a, values)


def wide_instructions(acc, a, values):
    """The registers of acc + a @ values, by one block of PTX. An instruction has up to 256 columns."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    kind, columns = ir.MemRefType(values.type), acc.shape[1]
    apart = kind.get_strides_and_offset()[0][0] // 8
    begins, steps = descriptor(utils.memref_slice(values, 0), 0, apart)
    sums = [vector.extract(pair, [], [i]) for pair in acc.registers.ravel() for i in range(2)]
    lefts = [utils.bitcast(pair, i32) for pair in a.registers.ravel()]  # four for each 16 keys, as wgmma wants them
    count, dtype = len(sums), kind.element_type
    at = 2 * count  # outputs, and the same as inputs
    text = ""
    parts = itertools.pairwise((0, columns) if columns <= 256 else (0, 128, columns))
    for (number, step), (start, stop) in itertools.product(enumerate(steps), parts):
        registers = ",".join(f"${i}" for i in range(start // 2, stop // 2))
        left = ",".join(f"${at + 4 * number + i}" for i in range(4))
        text += f"add.s64 b, ${at + len(lefts)}, {step + start // 64 * apart}; "
        text += f"wgmma.mma_async.sync.aligned.m64n{stop - start}k16.f32.{dtype}.{dtype} "
        text += f"{{{registers}}}, {{{left}}}, b, 1, 1, 1, 1; "
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * len(lefts) + ["l"]
    sums = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*sums, *lefts, begins],
        f"{{ .reg .b64 b; wgmma.fence.sync.aligned; {text}wgmma.commit_group.sync.aligned; }}",
        ",".join(constraints),
        has_side_effects=True,
    )
    return _array([llvm.extractvalue(f32, sums, [i]) for i in range(count)], acc.shape)


def plain_reciprocal(d):
    """1 / d of an array in the layout of wgmma: what `warpgroup.reciprocal` does on a GPU."""

    @plgpu.inline_mgpu(arg_types=(MATRIX,), return_type=plgpu.ShapeDtypeStruct(d.shape, jnp.float32, layout=MATRIX))
    def instructions(_, d):
        inverse = lambda number: llvm.inline_asm(number.type, [number], "rcp.approx.ftz.f32 $0, $1;", "=f,f")
        numbers = [vector.extract(pair, [], [i]) for pair in d.registers.ravel() for i in range(2)]
        return _array([inverse(number) for number in numbers], d.shape)

    return instructions(d)


def loaded_early(ref):
    """The numbers of a ref (count,) of int32 in GMEM that nothing writes while the kernel runs.

    Such a load waits for no barrier: ptxas moves it ahead of those with which a kernel begins.
    """
    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(number,) * ref.shape[0])
    def instructions(_, row):
        i32, place = ir.IntegerType.get_signless(32), utils.memref_ptr(row)
        load = lambda i: llvm.inline_asm(i32, [place], f"ld.global.nc.b32 $0, [$1 + {4 * i}];", "=r,l")
        return tuple(mgpu.FragmentedArray.splat(load(i), (), is_signed=True) for i in range(ref.shape[0]))

    return instructions(ref)


def by_threads(which, text, *operands):
    """PTX that some threads of a warpgroup run: `which` compares their numbers, t. operands: refs, or an int32."""
    kinds = (plgpu.Layout.WG_SPLAT if isinstance(one, jax.Array) else plgpu.RefType() for one in operands)

    @plgpu.inline_mgpu(arg_types=tuple(kinds))
    def instructions(_, *refs):
        value = lambda one: one.registers.item() if isinstance(one, mgpu.FragmentedArray) else utils.memref_ptr(one)
        values = list(map(value, refs))
        places = ",".join("l" if str(one.type) == "!llvm.ptr" else "r" for one in values)
        mine = f".reg .pred mine; .reg .b32 t, n; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.{which};"
        llvm.inline_asm(None, values, f"{{ {mine} @!mine bra end; {text} end: }}", places, has_side_effects=True)

    instructions(*operands)


def counted_up(counter, place, first):
    """What `warpgroup.count_up` does on a GPU: a thread of the second warp, since one of the first asks for copies."""
    number = f"add.u32 n, n, {first}; cvt.rn.f32.u32 number, n;"
    text = f"{{ .reg .f32 number; atom.relaxed.gpu.global.add.u32 n, [$0], 1; {number} st.shared.f32 [$1], number; }}"
    by_threads("eq.u32 mine, t, 32", text, counter, place)


def draw(counter, number):
    """Put the next number of a counter, a ref of one int32 in GMEM, into one in SMEM."""
    text = "atom.relaxed.gpu.global.add.u32 n, [$0], 1; st.shared.b32 [$1], n;"
    by_threads("eq.u32 mine, t, 0", text, counter, number)


def await_count(ref, count):
    """The first warp, which starts copies, waits until an int32 in GMEM is count. The fence is for TMA's own path."""
    text = "again: ld.acquire.gpu.global.b32 n, [$0]; setp.ne.b32 mine, n, $1; @mine bra again; "
    by_threads("lt.u32 mine, t, 32", text + "fence.proxy.async.global;", ref, count)


def count_on(ref):
    """Add one to an int32 in GMEM, for all to see after what was awaited; by the second warp, for it takes time."""
    by_threads("eq.u32 mine, t, 32", "red.release.gpu.global.add.u32 [$0], 1;", ref)


def _array(numbers, shape):
    """An array in the layout of wgmma, of the numbers that a thread has of it."""
    pairs = [
        vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), pair) for pair in itertools.batched(numbers, 2)
    ]
    layout = MATRIX.to_mgpu()
    pairs = np.array(pairs, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=pairs, _layout=layout, _is_signed=None)
