"""Tiles of which every warp has keys of its own: their copies to shared memory, layouts, and products by mma.

A kernel for decoding has few rows of queries and many keys. The four warps of a program share the keys: warp w copies
the w-th quarter of each tile, multiplies it, and keeps a softmax of its own, so that it waits for its own copies and
never for another warp. In an array of rows,

    row 64 i + 16 w + r    is row 16 i + r of the queries, as warp w sees it,

which is how the left operand and the sum of an mma are laid out over four warps. In the right operands, which
Pallas has in every warp alike, each warp here has its own quarter.

Copies are by cp.async (PTX ISA, cp.async), which all NVIDIA GPUs from Ampere on have: every lane says where its 4, 8
or 16 bytes are and how many of them are real, so that a row may lie anywhere, as those of a page do, and what is past
the end is filled with zeros. Rows of 16-bit numbers whose bytes are no multiple of 4 are read by plain loads.
The interpreter on a CPU knows none of this: there, a copy is complete at once.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from helpers.attention.mosaic.warp import ACC, LHS, RHS, pairs

WARPS, LANES, WARP_ROWS = 4, 32, 16
SCALAR = plgpu.Layout.WG_SPLAT(())
QUERIES = plgpu.Layout.MMA_LHS(jnp.bfloat16, m_warps=1)  # the left operand of one warp, the same in all


def swizzled(dtype):
    """How tiles of a dtype lie in shared memory: rows of 128 bytes, eight of them swizzled."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def padded_head_dim(H, dtype):
    """head_dim rounded up to whole rows of shared memory, and to whole products."""
    elements = 128 // jnp.dtype(dtype).itemsize
    return -(-H // elements) * elements


def width(H, dtype):
    """How many bytes of a row of H numbers a lane copies at once: they have to lie at a multiple of themselves."""
    size = H * jnp.dtype(dtype).itemsize
    return next(count for count in (16, 8, 4, 2) if size % count == 0)


def copy(source, target, place, b, head, start, stop, table=None, *, stride=None, interpret):
    """Begin to copy rows to target, a ref (R, H') in shared memory, each warp a quarter of them.

    Row i of it is row place(start + i, b, head, entry) of source, a ref in GMEM that is taken for rows of H numbers.
    It is zeros from H on, and all of it where start + i >= stop. place is made of +, *, // and %; entry(j) is number j
    of table, a ref in GMEM, cut to the pages that there are: a wrong table must not lead to somebody else's memory.
    stride: how far apart in source the rows of a warp are, where that is the same: only the first is then looked for.
    First the lanes of a warp wait for one another: then all have read what was there.
    """
    H, dtype, R = source.shape[-1], jnp.dtype(source.dtype), target.shape[0]
    if interpret:
        position = start + jnp.arange(R)
        is_inside = position < stop
        entry = lambda j: jnp.clip(table[...].reshape(-1)[j], 0, source.shape[0] - 1)
        rows = source[...].reshape(-1, H)[place(jnp.where(is_inside, position, 0), b, head, entry)]
        target[...] = jnp.pad(jnp.where(is_inside[:, None], rows, 0), ((0, 0), (0, target.shape[1] - H)))
        return
    count, row_bytes, own_rows = width(H, dtype), target.shape[1] * dtype.itemsize, R // WARPS
    last = source.shape[0] - 1

    def copies(_, b, head, start, stop, source, target, *tables):
        b, head, start, stop = map(_unsigned, (b, head, start, stop))
        entry = lambda j: _unsigned(_load(tables[0], j).max(0).min(last))
        begin, end = _address(source), _address(target)
        thread = _number(utils.thread_idx())
        warp, lane = thread // LANES, thread % LANES
        utils.warp_barrier()
        look = lambda position: place((position < stop).select(position, position * 0), b, head, entry)
        first = None if stride is None else look(start + warp * own_rows)
        places = []
        for step in range(own_rows * row_bytes // (count * LANES)):
            own = lane + step * LANES
            row, byte = own // (row_bytes // count), own % (row_bytes // count) * count
            number = look(start + warp * own_rows + row) if stride is None else first + row * stride
            places.append((number, warp * own_rows + row, byte))
        for number, row, byte in places:  # by now all that is read of a table is on its way
            at = _wide(number) * (H * dtype.itemsize) + _wide(byte)
            is_real = (start + row < stop) & (byte < H * dtype.itemsize)
            _copy_bytes(begin + at, end + _swizzled(row, byte, row_bytes), is_real, count)
        _instruction("cp.async.commit_group;")

    refs = plgpu.RefType(), plgpu.RefType(swizzled(dtype)), *[plgpu.RefType()] * (table is not None)
    arrays = source, target, *([] if table is None else [table])
    plgpu.inline_mgpu(arg_types=(SCALAR,) * 4 + refs)(copies)(b, head, start, stop, *arrays)


def wait(in_flight, *, interpret, for_others=False):
    """Wait until at most so many of the last copies of this warp, or of all warps, are not complete."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=())
    def await_copies(_):
        _instruction(f"cp.async.wait_group {in_flight};")
        (utils.warpgroup_barrier if for_others else utils.warp_barrier)()

    await_copies()


def store(ref, value, layout, place, *scalars):
    """On a GPU, write an array in registers of a layout to a ref in GMEM.

    place(*index, *scalars) -> (number of a row of the ref, number in the row, whether to write the element there).
    """
    width = ref.shape[-1]

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), *[SCALAR] * len(scalars)))
    def write(_, value, ref, *scalars):
        begin, dtype = _address(ref), value.mlir_dtype
        bits = ir.IntegerType.get_signless(utils.bitwidth(dtype))
        for register, index in zip(value.registers.flat, value.layout.thread_idxs(value.shape), strict=True):
            *index, last = (_number(arith.index_cast(ir.IntegerType.get_signless(32), one)) for one in index)
            for i in range(value.layout.vector_length):
                row, column, is_real = place(*index, last + i, *map(_unsigned, scalars))
                address = begin + (_wide(row) * width + _wide(column)) * (bits.width // 8)
                element = utils.bitcast(vector.extract(register, [], [i]), bits)
                _instruction(f"@$2 st.global.b{bits.width} [$0], $1;", address, element, is_real)

    write(value, ref, *scalars)


def _number(x):
    """An integer that each thread has one of, with the operators of arrays."""
    return mgpu.FragmentedArray.splat(x, (), is_signed=False)


def _unsigned(x):
    return _number(x.registers.item())


def _wide(x):
    return _number(arith.extui(ir.IntegerType.get_signless(64), x.registers.item()))


def _address(ref):
    bits = ir.IntegerType.get_signless(32 if utils.is_smem_ref(ref) else 64)
    return _number(llvm.ptrtoint(bits, utils.memref_ptr(ref)))


def _load(ref, index):
    """The number at an index of a ref to int32 in GMEM."""
    i32 = ir.IntegerType.get_signless(32)
    address = (_address(ref) + _wide(index) * 4).registers.item()
    number = llvm.load(i32, llvm.inttoptr(llvm.PointerType.get(1), address))
    return mgpu.FragmentedArray.splat(number, (), is_signed=True)


def _swizzled(row, byte, row_bytes):
    """Where a byte of a row is in a tile of `swizzled` layout; it is the first of at most 16."""
    eight_rows = row // 8 * (row_bytes // 128) + byte // 128
    return eight_rows * 1024 + row % 8 * 128 + ((byte % 128) ^ (row % 8 * 16))


def _copy_bytes(begin, end, is_real, count):
    """Copy 2, 4, 8 or 16 bytes, or write zeros. Two are too few for cp.async."""
    if count == 2:
        text = "{ .reg .b16 x; mov.b16 x, 0; @$2 ld.global.nc.b16 x, [$1]; st.shared.b16 [$0], x; }"
        _instruction(text, end, begin, is_real)
        return
    real = is_real.select(_number(utils.c(count, ir.IntegerType.get_signless(32))), end * 0)
    _instruction(f"cp.async.{'cg' if count == 16 else 'ca'}.shared.global [$0], [$1], {count}, $2;", end, begin, real)


def _instruction(text, *operands):
    """An instruction of PTX that the compiler keeps in order with others that use memory."""
    operands = [one.registers.item() if isinstance(one, mgpu.FragmentedArray) else one for one in operands]
    letters = {1: "b", 16: "h", 32: "r", 64: "l"}
    constraints = [letters[utils.bitwidth(one.type)] for one in operands]
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, text, ",".join([*constraints, "~{memory}"]), has_side_effects=True)


# Layouts. Of a tile (4 n, H), a warp has the registers that it would have of its n rows as a right operand


def _tiled(warp_dim, lane_dims, vector_dim, *tiles):
    canonical = mgpu.TiledLayout(
        fragmented_array.Tiling(tiles), (warp_dim,), lane_dims, vector_dim, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(canonical.tiling, canonical.warp_dims, canonical.lane_dims, canonical.vector_dim)


def keys_layout(keys):
    """Of a tile of keys whose transpose is a right operand: a lane has pairs along a row."""
    return _tiled(-7, (-3, -2), -1, (keys, 16), (keys // WARPS, 16), (8, 8), (2,))


def row_of(i):
    """Which row of the queries is row i of an array."""
    return ((i >> 6) << 4) | (i & 15)


def warp_of(i):
    """Whose row i of an array is."""
    return (i >> 4) & 3


def values_layout(keys, itemsize):
    """Of a tile of values, a right operand: a lane has pairs along a column, of 32-bit numbers one by one."""
    tiles = (keys, 8), (keys // WARPS, 8), (16, 8), (8, 8), (2, 1)
    return _tiled(-10, (-3, -4), -2, *tiles) if itemsize == 2 else _tiled(-12, (-5, -6), -1, *tiles, (1, 1))


def _operand(registers, shape, layout=RHS):
    registers = registers.reshape(layout.to_mgpu().registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)


def row_by_row(registers, count):
    """The registers of a tile of values, which go down column by column, in the order of a right operand."""
    return registers.reshape(-1, count // 16, 2).swapaxes(0, 1)


def _paired(registers):
    """Registers of pairs of 16-bit numbers, from those of single ones that follow one another."""
    first, second = (registers.ravel()[i::2] for i in range(2))
    kind = ir.VectorType.get((2,), ir.VectorType(first[0].type).element_type)
    numbers = ([vector.extract(one, [], [0]) for one in both] for both in zip(first, second, strict=True))
    return np.array([vector.from_elements(kind, both) for both in numbers], dtype=object)


# One row of numbers for each warp
PARTS = _tiled(-6, (-3,), -1, (WARPS, LANES), (1, LANES), (1, 1))


def scores(queries, keys, *, interpret):
    """q @ k.T of rows (R, H) in QUERIES and each warp's own keys, a tile (4 n, H): (4 R, n) float32 in ACC.

    queries, keys: lists of pieces, as of `warp.split`.
    """
    (rows, H), count = queries[0].shape, keys[0].shape[0] // WARPS
    if interpret:
        blocks = jnp.broadcast_to(queries[0].astype(jnp.float32), (WARPS, rows, H))
        return _by_warp(blocks @ jnp.swapaxes(_quarters(keys[0]), 1, 2).astype(jnp.float32))

    def product(_, *pieces):
        lefts, rights = pieces[: len(queries)], pieces[len(queries) :]
        lefts = [_operand(one.registers, (WARPS * rows, H), LHS) for one in lefts]
        rights = [_operand(one.registers, (H, count)) for one in rights]
        zero = utils.c(0.0, ir.F32Type.get())
        acc = mgpu.FragmentedArray.splat(zero, (WARPS * rows, count), ACC.to_mgpu())
        return _summed(acc, lefts, rights)

    layouts = (QUERIES,) * len(queries) + (keys_layout(WARPS * count),) * len(keys)
    result = plgpu.ShapeDtypeStruct((WARPS * rows, count), jnp.float32, layout=ACC)
    return plgpu.inline_mgpu(arg_types=layouts, return_type=result)(product)(*queries, *keys)


def add_weighted(acc, weights, values, layout, *, interpret):
    """acc + p @ v of rows, acc (4 R, H) in ACC and weights (4 R, n) in LHS, and each warp's own values.

    weights, values: lists of pieces; a piece of values is a tile (4 n, H) in layout, a `values_layout`.
    """
    count, H = weights[0].shape[1], acc.shape[1]
    if interpret:
        rows = acc.shape[0] // WARPS
        return acc + _by_warp(of_warps(weights[0], rows) @ _quarters(values[0]).astype(jnp.float32))

    def product(_, acc, *pieces):
        lefts, rights = pieces[: len(weights)], pieces[len(weights) :]
        registers = [one.registers if one.layout.vector_length == 2 else _paired(one.registers) for one in rights]
        return _summed(acc, lefts, [_operand(row_by_row(one, count), (count, H)) for one in registers])

    layouts = (ACC,) + (LHS,) * len(weights) + (layout,) * len(values)
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=ACC)
    return plgpu.inline_mgpu(arg_types=layouts, return_type=result)(product)(acc, *weights, *values)


def _summed(acc, lefts, rights):
    for i, j in reversed(pairs(len(lefts))):  # small ones first
        acc = mgpu.mma(acc, lefts[i], rights[j])
    return acc


# In the interpreter


def _quarters(tile):
    return tile.reshape(WARPS, -1, tile.shape[1])


def of_warps(array, rows):
    """(4 R, n) as (4, R, n): as each warp has it."""
    return array.reshape(rows // WARP_ROWS, WARPS, WARP_ROWS, -1).swapaxes(0, 1).reshape(WARPS, rows, -1)


def _by_warp(array):
    """The inverse of `of_warps`."""
    rows = array.shape[1]
    return array.reshape(WARPS, rows // WARP_ROWS, WARP_ROWS, -1).swapaxes(0, 1).reshape(WARPS * rows, -1)
