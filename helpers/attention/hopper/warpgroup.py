"""Products of one warpgroup: wgmma on a Hopper GPU, plain matrix products in the interpreter.

The Mosaic GPU interpreter runs barriers, TMA copies and SMEM on a CPU, but not a wgmma whose left
operand lives in registers, nor one whose accumulator begins as a given array. The functions here
stand in for both, so that a kernel is one source for the GPU and for the interpreter: compiled,
they issue asynchronous wgmmas; interpreted, they read the same operands through the same refs (so
that the race detector sees the reads) and multiply at once. `accumulate_then` and `overlapped` read the
operands of their second product once more after the work beside it, for they are in use until then.

Operands: a is a ref in SMEM or an array in registers, b is a ref in SMEM, an accumulator is a
float32 array in registers in the layout WGMMA. All products are 16-bit with a float32 sum.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.ptx import MATRIX, counted_up, overwriting_sum, plain_reciprocal, wide_sum

HEAD_DIMS = (64, 128, 256)  # others are padded to the next
NUM_SMS = 132  # of an H100 SXM and an H200; on other GPUs the programs queue or leave some idle
L2_BUDGET = 24 * 2**20  # bytes that stay in the L2 cache of a Hopper GPU, with all else that passes through it
ROWS = MATRIX.reduce(1)  # how a warpgroup holds one number a row of a matrix
COLUMNS = MATRIX.reduce(0)  # or a column, all of them in each of the four warps
# Registers of a thread, (compute, memory), by the number of compute warpgroups. A program starts with
# as many for every thread as fit; asking for more in all than it started with waits for ever.
REGISTERS = {2: (240, 24), 3: (160, 24), 4: (112, 24)}


def padded_head_dim(H):
    """head_dim rounded up to one of HEAD_DIMS."""
    return next(size for size in HEAD_DIMS if size >= H)


def take_registers(tiles, memory):
    """The registers of a compute warpgroup (memory = 0), which wants more, or of the memory warpgroup (memory = 1)."""
    plgpu.set_max_registers(REGISTERS[tiles.warpgroups][memory], action="decrease" if memory else "increase")


def opaque(numbers):
    """The same number or array behind an optimization barrier.

    The compiler knows nothing of it before this point. What a loop makes of it in every
    step, such as addresses of operands, is then made in every step. The compiler would
    rather make all of it ahead of the loop, and has no registers left in which to
    keep it.
    """
    return lax.optimization_barrier(numbers)


def reciprocal(d, interpret):
    """1 / d, by one instruction where `/` takes five, so that a subnormal number, too, has its inverse."""
    return 1 / d if interpret else plain_reciprocal(d)


def count_up(counter, place, first, in_turns, interpret):
    """place = first + counter, counter += 1: int32 (1,) in GMEM, which all programs count, float32 (1,) in SMEM.

    The interpreter knows no such addition, and there place = in_turns.
    """
    if interpret:
        place[0] = in_turns.astype(jnp.float32)
    else:
        counted_up(counter, place, first)


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
    return opaque(in_flight)  # the compiler sees no instruction change these registers: it might use them earlier


def interpreted_sum(products, axis):
    """What `issue` does in the interpreter."""
    rows, columns = (ref.shape[1 - axis] for ref in products[0])

    def body(acc):
        for a, b in products:
            multiply_add(acc, *((a, b.T) if axis == 1 else (a.T, b)), None, interpret=True)
        return plgpu.wgmma_accumulator_load(acc, wait_n=None)

    return pl.run_scoped(body, plgpu.ACC((rows, columns), jnp.float32))


def product(a, b, *, interpret):
    """a @ b."""
    if interpret:
        return _dot(a, b)

    # -- a product by wgmma
    def body(c_ref):
        plgpu.wgmma(c_ref, a, b)
        return c_ref[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _is_wide(b):
    """Whether a right operand has constants beside values: (parts, keys, 64), see `exact_out`."""
    return len(b.shape) == 3


def _added(c, a, b):
    """c + a @ b in the interpreter."""
    if not _is_wide(b):
        return c + _dot(a, b)
    a, b = read(a, b)
    return c + lax.dot(a, jnp.concatenate(list(b), axis=1)[:, : c.shape[1]], preferred_element_type=jnp.float32)


def accumulate(c, a, b, *, interpret):
    """c + a @ b. A wide b has as many columns as c, or more."""
    if interpret:
        return _added(c, a, b)
    if _is_wide(b):
        return awaited(wide_sum(c, a, b), 0)
    return pl.run_state(lambda c_ref: plgpu.wgmma(c_ref, a, b))(plgpu.ACC.init(c))


def accumulate_then(last, ready, following, meanwhile, *, interpret):
    """Two products in flight at once, and work on the first while the second runs.

    last: (c, a, b) as for `accumulate`; following: (a, b). Issues c + a @ b, calls ready(), issues a @ b.T of the
    second, awaits the first product alone and calls meanwhile(c + a @ b) while the tensor core is busy with the
    second. Returns a @ b.T of the second.
    """
    (c, a, b), (a2, b2) = last, following
    if interpret:
        c = _added(c, a, b)
        ready()
        s = _dot(a2, b2.T)
        meanwhile(c)
        read(a2, b2)
        return s
    if _is_wide(b):
        c = wide_sum(c, a, b)
        ready()
        s = issue([(a2, b2)], 1, interpret)
        meanwhile(awaited(c, 1))
        return awaited(s, 0)

    def body(refs):
        c_ref, s_ref = refs
        plgpu.wgmma(c_ref, a, b)
        ready()
        plgpu.wgmma(s_ref, a2, b2.T)
        meanwhile(plgpu.wgmma_accumulator_load(c_ref, wait_n=1))

    s = plgpu.layout_cast(jnp.zeros((a2.shape[0], b2.shape[0]), jnp.float32), MATRIX)
    return pl.run_state(body)((plgpu.ACC.init(c), plgpu.ACC.init(s)))[1]


def overlapped(first, second, meanwhile, state, *, interpret):
    """Two products in flight at once, and work on the first while the second runs.

    first: (a, b); second: (c, a, b) as for `accumulate`. Issues a @ b.T and then c + a @ b, awaits the first
    product, s, alone, and computes p, state = meanwhile(s, state) while the tensor core is
    busy with the second. p has the shape of s, and state keeps its shapes. ptxas likes to await the
    second before most of that work, unless meanwhile ends with a loop, such as a barrier_wait.
    Returns (c + a @ b of the second, p, the new state).
    """
    (a, b), (c, a2, b2) = first, second
    if interpret:
        s, c = _dot(a, b.T), _added(c, a2, b2)
        p, state = meanwhile(s, state)
        read(a2, b2)
        return c, p, state
    if _is_wide(b2):
        s = issue([(a, b)], 1, interpret)
        c = wide_sum(c, a2, b2)
        p, state = meanwhile(awaited(s, 1), state)
        return awaited(c, 0), p, state
    shape = a.shape[0], b.shape[0]
    leaves, tree = jax.tree.flatten(state)

    def body(refs):
        c_ref, p_ref, *state_refs = refs

        def with_first(s_ref):
            plgpu.wgmma(s_ref, a, b.T)
            plgpu.wgmma(c_ref, a2, b2)
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)  # the older of them
            p, new = meanwhile(s, jax.tree.unflatten(tree, [ref[...] for ref in state_refs]))
            values = p, *jax.tree.leaves(new)
            for ref, value in zip((p_ref, *state_refs), values, strict=True):
                ref[...] = value

        pl.run_scoped(with_first, plgpu.ACC(shape, jnp.float32))

    # run_state awaits the second product, and is how values leave its body; p starts as anything.
    p = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)
    c, p, *leaves = pl.run_state(body)((plgpu.ACC.init(c), p, *leaves))
    return c, p, jax.tree.unflatten(tree, leaves)
