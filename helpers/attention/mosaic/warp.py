"""What kernels by `plgpu.mma` share: layouts, products, copies, and how a caller's arrays are laid out for them.

`plgpu.mma` is the matrix product that every NVIDIA GPU from Ampere on has (PTX ISA, mma.sync m16n8k16). A warp holds
both operands and the sum in registers, each in a layout of its own:

    LHS    a left operand, whose rows the four warps of a program share out
    RHS    a right operand, all of it in every warp
    ACC    the sum; like a left operand, its rows are shared out

Tiles come to shared memory by TMA from Hopper on, and by cp.async before: `stay` and `streamed` know both.
(`plgpu.emit_pipeline` does, too, but it could neither begin before the tiles that stay have come, nor go on from tiles
that need no mask to those that do.) The interpreter on a CPU runs the form for TMA, and knows no mma: there `product`
multiplies what was read from the same refs, so that its race detector sees the reads.

mma takes 16-bit operands. A float32 array is a sum of `pieces` in bfloat16, which are laid out one after another, and
a product of two such arrays is the sum of the products of their pieces, without those below the last bit:

    two pieces     a0 b0 + a0 b1 + a1 b0                          relative error 2^-16, for TF32's 2^-11
    three pieces   these + a1 b1 + a0 b2 + a2 b0                  as float32 rounds

Refs and arrays that are called *laid out* have shape (pieces, B, T', N H'), with T rounded up to whole tiles and
head_dim to a multiple of 64, in zeros: the 128 bytes that a row of a tile has in swizzled shared memory.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from helpers.attention.device import shared_memory

# The same for both dtypes of 16 bits.
LHS, RHS, ACC = (layout(jnp.bfloat16) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC))
ROWS, COLUMNS = ACC.reduce(1), ACC.reduce(0)  # one number a row, or a column
# ACC, but with four numbers side by side where a thread of ACC has two: so GMEM is written in whole sectors.
FOURS = mgpu.TiledLayout(
    mgpu.fragmented_array.Tiling(((64, 16), (16, 16), (8, 16), (8, 8), (8, 4))),
    warp_dims=(-10,), lane_dims=(-2, -3, -5), vector_dim=-1, _check_canonical=False,
).canonicalize()  # fmt: skip
HEADS_TOGETHER = 16
HEAD_MULTIPLE = 64  # elements of a row of swizzled shared memory
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
OTHER_SHARED_MEMORY = 4096  # bytes of barriers, and of what reductions over warps take
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


# The caller's arrays


def padded_head_dim(H):
    """head_dim rounded up to whole rows of swizzled shared memory."""
    return -(-H // HEAD_MULTIPLE) * HEAD_MULTIPLE


def operand_dtype(dtype):
    """The dtype that arrays of a dtype have once they are laid out."""
    return jnp.dtype(jnp.bfloat16) if dtype == jnp.float32 else jnp.dtype(dtype)


def pieces_of(dtype):
    """How many pieces an array of a dtype is laid out in, by `jax.default_matmul_precision`."""
    exact = jax.config.jax_default_matmul_precision in ("highest", "float32")
    return 1 if jnp.dtype(dtype).itemsize == 2 else 3 if exact else 2


def laid_out(array, block, lengths=None):
    """An array (B, T, N, H) laid out in tiles of `block` rows: a copy, unless it is so already.

    lengths: int32 (B,) or None; rows from there on become zeros, whatever they hold.
    """
    B, T, _, H = array.shape
    if lengths is not None:
        array = jnp.where(jnp.arange(T)[:, None, None] < lengths[:, None, None, None], array, 0)
    array = jnp.pad(array, ((0, 0), (0, -T % block), (0, 0), (0, padded_head_dim(H) - H)))
    pieces = split(array, pieces_of(array.dtype), operand_dtype(array.dtype))
    return jnp.stack(pieces).reshape(len(pieces), B, array.shape[1], -1)


def taken_up(array, T, N, H):
    """(B, T, N, H) of what a kernel wrote, (B, T', N H')."""
    return array.reshape(*array.shape[:2], N, -1)[:, :T, :, :H]


# Registers


def split(x, count, dtype):
    """`count` arrays of a 16-bit dtype with the sum x, as exactly as they can; with count 1, x rounded.

    All but the last have the leading bits of what is left, cut off, so that none is beyond the range of x.
    """
    pieces = []
    for _ in range(count - 1):
        leading = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -(2**16), jnp.float32)
        pieces.append(leading.astype(dtype))
        x = x - leading
    return [*pieces, x.astype(dtype)]


def pairs(count):
    """Which pieces of two arrays of so many pieces are multiplied with one another, the largest products first."""
    return sorted([pair for pair in itertools.product(range(count), repeat=2) if sum(pair) < count], key=sum)


def full(shape, value, layout=ACC):
    """A float32 array in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along(vector, shape, axis):
    """A vector in registers, repeated to a shape of which it is the axis."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def load(refs, layout, *, interpret):
    """The pieces that refs hold, as registers of a layout."""
    pieces = [plgpu.load(ref, layout=layout, optimized=False) for ref in refs]
    if interpret:
        plgpu.commit_smem()  # its race detector wants a fence between a read and what TMA writes there later
    return pieces


def sums_by_thread(x):
    """(rows, 8) of an array in ACC: columns 8 apart are a thread's own, and added up without an exchange of threads."""
    parts = [x[:, start : start + 8] for start in range(0, x.shape[1], 8)]
    while len(parts) > 1:
        parts = [functools.reduce(jnp.add, pair) for pair in itertools.batched(parts, 2)]
    return parts[0]


def load_rows(ref, layout):
    """A vector in GMEM, as registers of a layout. cp.async has no copy for so little."""
    return plgpu.load(ref, layout=layout, optimized=False)


def product(lefts, rights, acc=None, *, interpret):
    """acc + a @ b, of the pieces of a (LHS) and of b (RHS); float32 in ACC. acc: zeros where it is None.

    A tensor core cuts off the last bits of a sum where float32 rounds: errors of one sign, which add up over many
    tiles. So a product in pieces, which is to be as exact as float32, has a sum of its own before acc is added.
    """
    if acc is not None and len(lefts) > 1:
        return acc + product(lefts, rights, interpret=interpret)
    if acc is None:
        acc = full((lefts[0].shape[0], rights[0].shape[1]), 0)
    for i, j in reversed(pairs(len(lefts))):  # small ones first
        if interpret:
            acc += lax.dot(lefts[i], rights[j], preferred_element_type=jnp.float32)
        else:
            acc = plgpu.mma(acc, lefts[i], rights[j])
    return acc


def as_operand(x, count, dtype, *, interpret):
    """The pieces of a float32 sum (ACC), as a left operand: what a thread has of both is the same."""
    pieces = split(x, count, dtype)
    return pieces if interpret else [_handed_on(piece) for piece in pieces]


def _handed_on(x):
    """An array in ACC as the same in LHS: each register as it is, in another place.

    Pallas infers no such change of layout. Without the round trip through an integer, the compiler of Mosaic GPU
    folds all of this away, and then finds two layouts where there should be one.
    """

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LHS))
    def hand_on(_, x):
        layout, i32 = LHS.to_mgpu(), ir.IntegerType.get_signless(32)
        registers = np.empty(layout.registers_shape(x.shape), dtype=object)
        for place in np.ndindex(registers.shape):
            register = x.registers[place_in_sum(place, x.registers.ndim)]
            registers[place] = utils.bitcast(utils.bitcast(register, i32), register.type)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return hand_on(x)


def place_in_sum(place, axes):
    """Where among the registers of an array in ACC the numbers are that LHS has in the register at `place`."""
    row_tile, column_tile, _, half, row_half = place[:5]  # 16 columns of an operand are twice 8 of a sum
    return row_tile, 2 * column_tile + half, 0, 0, row_half, *[0] * (axes - 5)


def rescaled(alpha, sums, *, rarely, interpret):
    """sums times alpha, row by row. rarely: whether a warp first asks its threads if any of them has not 1 in alpha."""
    if interpret or not rarely:
        return [along(alpha, total.shape, 0) * total for total in sums]

    shapes = [plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=ACC) for total in sums]

    @plgpu.inline_mgpu(arg_types=(ROWS, *len(sums) * [ACC]), return_type=shapes)
    def multiply(_, alpha, *sums):
        numbers = [vector.extract(register, [], [0]) for register in alpha.registers.flat]
        one = utils.c(1.0, ir.F32Type.get())
        others = [arith.cmpf(arith.CmpFPredicate.UNE, number, one) for number in numbers]
        boolean, vote = ir.IntegerType.get_signless(1), "vote.sync.any.pred $0, $1, 0xffffffff;"
        has_other = llvm.inline_asm(boolean, [functools.reduce(arith.ori, others)], vote, "=b,b", has_side_effects=True)
        registers = [register for total in sums for register in total.registers.flat]
        choice = scf.IfOp(has_other, [register.type for register in registers], has_else=True)
        with ir.InsertionPoint(choice.then_block):
            scaled = [total * alpha.broadcast_in_dim(total.shape, (0,), total.layout) for total in sums]
            scf.yield_([register for total in scaled for register in total.registers.flat])
        with ir.InsertionPoint(choice.else_block):
            scf.yield_(registers)
        results = iter(choice.results)
        return [_like(total, [next(results) for _ in total.registers.flat]) for total in sums]

    return multiply(alpha, *sums)


def _like(array, registers, layout=None):
    """An array of Mosaic GPU with other registers."""
    layout = layout or array.layout
    grid = np.empty(layout.registers_shape(array.shape), dtype=object)
    grid.flat = registers
    return mgpu.FragmentedArray(_registers=grid, _layout=layout, _is_signed=array.is_signed)


# Which tiles, and which pairs of them


class Tiles(NamedTuple):
    """How the work of a kernel is cut: queries and keys of a tile, and tiles in flight.

    The side that a program stays with is a multiple of 64, 16 rows for each warp; the other one is a multiple of 16.
    """

    block_q: int
    block_k: int
    stages: int


def row_bytes(problem):
    """Bytes of shared memory of a row of a tile, in all of its pieces."""
    return 2 * pieces_of(problem.dtype) * padded_head_dim(problem.H)


def fewest_rows(problem):
    """The fewest rows of a tile that streams by.

    By cp.async four warps share out its blocks of 8 x 64 numbers: where their columns are no even number, their rows
    must be a multiple of four.
    """
    return 16 if by_tma() or padded_head_dim(problem.H) // HEAD_MULTIPLE % 2 == 0 else 32


def fitting(tiles, staying, field, problem):
    """The tiles, or, where shared memory has no room for two of each stage, smaller ones for which it has.

    staying: rows in shared memory beside them, which stay where they are if need be. field: of Tiles, the side that
    streams by.
    """

    def cut(room):
        one = tiles
        while 2 * one.stages * getattr(one, field) > room:
            if one.stages == 1 and getattr(one, field) == fewest_rows(problem):
                return None
            smaller = {"stages": 1} if one.stages > 1 else {field: getattr(one, field) // 2}
            one = one._replace(**smaller)
        return one

    room = (shared_memory() - OTHER_SHARED_MEMORY) // row_bytes(problem)
    return cut(room - staying) or cut(room)


def staying_tiles(count, rows, streaming, problem):
    """Scratch for `stay`, as a tuple: `count` tiles of so many rows, and a barrier where copies need one.

    streaming: rows in shared memory beside them. Where it has no room for those that stay, there are None for them.
    """
    room = (shared_memory() - OTHER_SHARED_MEMORY) // row_bytes(problem)
    if count * rows + streaming > room:
        return None
    shape = pieces_of(problem.dtype), rows, padded_head_dim(problem.H)
    tile = plgpu.SMEM(shape, operand_dtype(problem.dtype), transforms=SWIZZLED)
    return *count * [tile], *([plgpu.Barrier(num_arrivals=count * shape[0])] if by_tma() else [])


def stay(refs, place, scratch, *, in_registers=False, interpret):
    """The `ready` of `streamed` for tiles that a program reads again and again, as left operands.

    It waits for them, and returns for each of refs a function that returns the pieces of its tile. They are in shared
    memory, or where they are, or in registers from then on. refs: laid out arrays in GMEM. place: (b, rows, columns) of
    their tiles. scratch: of `staying_tiles`.
    """
    parts = [[ref.at[piece, *place] for piece in range(ref.shape[0])] for ref in refs]
    loaded = None
    if scratch is not None:
        sources, tiles, loaded = parts, scratch[: len(refs)], (*scratch[len(refs) :], None)[0]
        parts = [[tile.at[piece] for piece in range(tile.shape[0])] for tile in tiles]
        for source, target in zip(itertools.chain(*sources), itertools.chain(*parts), strict=True):
            copy(source, target, loaded)

    def ready():
        if scratch is not None:
            plgpu.wait_gmem_to_smem(0) if loaded is None else plgpu.barrier_wait(loaded)
        loads = [functools.partial(load, one, LHS, interpret=interpret) for one in parts]
        return [functools.partial(list, one()) for one in loads] if in_registers else loads

    return ready


def lengths_of(call):
    """int32 (2, B): how many queries and keys of each batch entry are real; None where all are."""
    if call.query_lengths is None and call.key_lengths is None:
        return None
    problem = call.problem
    pairs = (call.query_lengths, problem.T), (call.key_lengths, problem.S)
    return jnp.stack([jnp.full(problem.B, n) if length is None else jnp.clip(length, 0, n) for length, n in pairs])


def real_lengths(lengths_ref, b, problem):
    """How many queries and keys of batch entry b are real."""
    return (problem.T, problem.S) if lengths_ref is None else (lengths_ref[0, b], lengths_ref[1, b])


class TileOrder(NamedTuple):
    """The order in which a program sees tiles: first those that need no mask, of all members of a group, then the rest.

    place(step): (member, tile). whole, steps: how many steps need no mask, and how many there are. masks: whether any
    may need one.
    """

    place: Callable
    whole: jax.Array
    steps: jax.Array
    masks: bool

    def loops(self, one_tile):
        """Those of `streamed`, of one_tile(masked, step, tiles, state)."""
        loops = (self.whole, functools.partial(one_tile, False)), (self.steps, functools.partial(one_tile, True))
        return loops if self.masks else loops[:1]


def tile_order(needed, whole, group=1):
    """The `TileOrder` through tiles of the range `needed`, of which those of the range `whole` need no mask."""
    (first, stop), (whole_first, whole_stop) = needed, whole
    # Where LLVM sees that a loop has one step or two, it counts them by a predicate, and ptxas before CUDA 13.2 then
    # takes that of a step for that of another (see `helpers.dev.ptxas`). It does not see through a barrier.
    count, rest = lax.optimization_barrier((whole_stop - whole_first, stop - first - (whole_stop - whole_first)))

    def place(step):
        member, turn = jnp.int32(0), step
        if group > 1:
            is_whole, later = step < group * count, step - group * count
            of_whole, of_rest = (jnp.maximum(number, 1) for number in (count, rest))
            member = jnp.where(is_whole, lax.div(step, of_whole), lax.div(later, of_rest))
            turn = jnp.where(is_whole, lax.rem(step, of_whole), count + lax.rem(later, of_rest))
        if whole_first is first:
            return member, first + turn
        is_before = turn - count < whole_first - first
        return member, jnp.where(turn < count, whole_first + turn, first + turn - jnp.where(is_before, count, 0))

    return TileOrder(place, group * count, group * (count + rest), whole is not needed)


def of_program(B, heads, tiles, band):
    """(b, head, tile) of a program, of all that a grid in one row has.

    The programs of a head come one after another, and find in L2 what they share. Where a mask makes some longer than
    others, many heads come together, each tile of all of them before the next tile of any: the long ones first.
    """
    index, together = lax.axis_index("program"), jnp.int32(1 if band.right is None else HEADS_TOGETHER)
    first = lax.div(index, together * tiles) * together
    together, index = jnp.minimum(together, B * heads - first), index - first * tiles
    head = first + lax.rem(index, together)
    return lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads)), lax.div(index, together)


# Copies


def by_tma():
    """Whether tiles come by TMA, as from Hopper on, or by cp.async; known when a kernel is traced."""
    return utils._infer_arch() >= (9, 0)


def copy(source, target, barrier):
    """Begin to copy a tile from GMEM to SMEM. barrier: of the copies that are awaited with it; None by cp.async."""
    if barrier is None:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=IN_BOUNDS)
    else:
        plgpu.copy_gmem_to_smem(source, target, barrier)


def ring(count, rows, stages, problem):
    """Scratch for `streamed`, as a tuple: for `count` arrays a ring of tiles of so many rows, and barriers for TMA."""
    shape = stages, pieces_of(problem.dtype), rows, padded_head_dim(problem.H)
    tiles = plgpu.SMEM(shape, operand_dtype(problem.dtype), transforms=SWIZZLED)
    loaded = [plgpu.Barrier(num_arrivals=count * shape[1], num_barriers=stages)] if by_tma() else []
    return *count * [tiles], *loaded


def streamed(refs, place, steps, scratch, ready, loops, state):
    """state after so many steps, to each of which its tiles have come while those before were at work.

    refs: laid out arrays in GMEM. place(step): (b, rows, columns) of their tiles. scratch: of `ring`. ready() is called
    once, when the first tiles are on their way. loops: pairs (stop, body): from where the loop before stopped to
    `stop`, state = body(step, what ready returned, tiles, state), where tiles has a list of pieces for each of refs.
    """
    rings, loaded = scratch[: len(refs)], (*scratch[len(refs) :], None)[0]
    stages, pieces = rings[0].shape[:2]

    def fetch(step, at):
        slot = lax.rem(step, stages)
        barrier = None if loaded is None else loaded.at[slot]
        for ref, tiles in zip(refs, rings, strict=True):
            for piece in range(pieces):
                copy(ref.at[piece, *at], tiles.at[slot, piece], barrier)

    def arrive(step):
        if loaded is not None:
            plgpu.barrier_wait(loaded.at[lax.rem(step, stages)])
            return
        # How many copies may still be under way must be known to the compiler.
        later = (stages - 1) * len(refs) * pieces
        pl.when(step + stages <= steps)(lambda: plgpu.wait_gmem_to_smem(later))
        pl.when(step + stages > steps)(lambda: plgpu.wait_gmem_to_smem(0))

    def one_step(body, step, state):
        following = place(jnp.minimum(step + stages, steps - 1))  # it may have to be read
        arrive(step)
        slot = lax.rem(step, stages)
        state = body(step, staying, [[tiles.at[slot, piece] for piece in range(pieces)] for tiles in rings], state)
        pl.when(step + stages < steps)(lambda: fetch(step + stages, following))
        return state

    for step in map(jnp.int32, range(stages)):
        pl.when(step < steps)(lambda step=step: fetch(step, place(step)))
    staying = ready()
    start = jnp.int32(0)
    for stop, body in loops:
        state = lax.fori_loop(start, stop, functools.partial(one_step, body), state)
        start = stop
    return state


def store(ref, value, *, interpret):
    """Write a value in registers (ACC or ROWS) to a ref in GMEM, from where it is: every GPU can do that."""
    if interpret:
        ref[...] = value
        return
    layout = ACC if value.ndim == 2 else ROWS

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def write(_, value, ref):
        value = _in_fours(value) if layout is ACC and value.mlir_dtype.width == 16 else value
        value.store_untiled(ref, optimized=False)

    write(value, ref)


def _in_fours(x):
    """An array of 16-bit numbers in ACC as the same in FOURS: of two pairs, neighbours swap one."""
    i32 = ir.IntegerType.get_signless(32)
    is_odd = arith.trunci(ir.IntegerType.get_signless(1), utils.thread_idx())
    four, two_words = ir.VectorType.get((4,), x.mlir_dtype), ir.VectorType.get((2,), i32)
    columns = x.shape[1] // 8
    pairs = np.reshape([utils.bitcast(one, i32) for one in x.registers.flat], (-1, columns, 2))
    registers = []
    for row_tile, column, half in np.ndindex(len(pairs), columns // 2, 2):
        first, second = pairs[row_tile, 2 * column : 2 * column + 2, half]
        other = utils.shfl_bfly(arith.select(is_odd, first, second), 1)
        words = arith.select(is_odd, other, first), arith.select(is_odd, second, other)
        registers.append(utils.bitcast(vector.from_elements(two_words, words), four))
    return _like(x, registers, FOURS)
