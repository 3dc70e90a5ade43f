"""The Hopper backward kernels: the gradients of attention by TMA, wgmma and warp specialisation.

The equations are those of `portable.backward` (FlashAttention-2, arXiv 2307.08691, algorithm 2), with L = log2(e) and
p = exp2(scale L q k^T - L lse). delta comes from outside, of an out with all of its float32 bits (see `exact_out`).
And `common_part` takes off the keys what they have in common.

Most kernels here (FlashAttention-3, arXiv 2407.08608) own block_k keys of one key/value head, 64 for each compute
warpgroup, and run over the tiles of queries that see them. They compute the *transposed* tiles, s^T = k q^T and
dp^T = v do^T: then p^T and ds^T lie in the registers just as the products p^T do and ds^T q want their left operand.
dq is the difference:

    split  dkv_kernel leaves it to dq_kernel, which owns tiles of queries and computes s and dp once
           more: 7 products for each pair of tiles, and the same bits every time.
    fused  immediate_kernel and delayed_kernel put ds^T into shared memory, the warpgroups share out ds k
           between them, and TMA adds the product to a float32 dq in memory: 5 products, and a dq whose
           rounding depends on the order in which the additions arrive.
           In order, they add to a tile of dq one program after the other: the same bits every time.

One more warpgroup, the memory warpgroup, computes nothing: it keeps a ring of `stages` tiles filled.

Arrays in GMEM, the fields of `Gmem` (G is the group, N // K query heads of one key/value head; T' is T rounded up):

    q, do, dq       (B, T, N, H); dq is float32 in the fused form
    k, v, dk, dv    (B, S, K, H)
    lse, delta      (B, N, T') float32: L lse and delta

T and S are rounded up to a multiple of 8 and H to 64, 128 or 256. Positions past the end are zeros in every tile: a
query of zeros with do = delta = lse = 0 adds nothing to dk and dv, and a key of zeros is masked, for its p could
overflow.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.extras import Extras
from helpers.attention.hopper.backward_fused import delayed_kernel, immediate_kernel
from helpers.attention.hopper.backward_parts import Gmem, Scratch
from helpers.attention.hopper.backward_schedule import ROWS_OF_WGMMA, default_tiles, grid_of_keys, grid_of_queries
from helpers.attention.hopper.backward_split import DqScratch, dkv_kernel, dq_kernel
from helpers.attention.hopper.common_part import common_part, given_back
from helpers.attention.hopper.ptx import SWIZZLED
from helpers.attention.hopper.ring import Ring
from helpers.attention.hopper.visible_tiles import (
    is_block_sparse,
    last_tiles,
    padded,
    padded_ids,
    visible_tiles,
    without_padding,
)
from helpers.attention.hopper.warpgroup import padded_head_dim
from helpers.attention.low_bits import delta_of
from helpers.attention.masking import NO_BAND
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.problem import Call

GRID_LIMIT = 65535  # programs along the axis into which Mosaic folds all but the last two of a grid
# In shorter causal calls the split form is as fast as the ordered one, or faster, on an NVIDIA H100 (JAX 0.11.2).
LONG = 2048
# At H = 128 the split form was 8 % faster in causal windows of 256 keys there, and 2 % slower in windows of 512.
NARROW = 384
SWIZZLED_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # SWIZZLED for float32


def backward(
    call, out, lse, dout, dlse, low=None, *, tiles=None, deterministic=False, has_all_keys=True, interpret=False
):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    The arguments are those of `portable.backward`, in 16-bit types. With `deterministic` the same input gives the same
    bits each time. tiles: a pair as `backward_schedule.forms` has them; ValueError if they are ordered, or fused with
    `deterministic`, and the call is not full or causal. has_all_keys: False where out and lse are those of more keys
    than the call has, as in `ring`. interpret: False, or InterpretGPUParams. Beyond inputs and outputs it allocates lse
    and delta in float32, with `common_part` 2 B K (H + 8) bytes and in the split form a copy of key, a float32 dq in
    the fused form, in order an int32 for each of its tiles, and padded copies where T, S or H ask for them. With
    lengths, it copies in the split form query and dout, and key and value with key lengths, in the fused form the tile
    of query and of dout in which a batch entry ends. Where else a query may see no key, and with lengths and sinks, it
    copies query and dout. `VisibleTiles`: 28 or 36 bytes for each tile of a kernel's own.
    """
    problem = call.problem
    at_once = max(1, GRID_LIMIT // (2 * problem.N))
    if is_block_sparse(call):  # of tiles of at least 64 positions of all batch entries
        at_once = min(at_once, max(1, GRID_LIMIT // pl.cdiv(max(problem.T, problem.S), 64)))
    if problem.B > at_once:
        own = {"tiles": tiles, "deterministic": deterministic, "has_all_keys": has_all_keys, "interpret": interpret}
        return _in_pieces(call, (out, lse, dout, dlse, low), at_once, own)
    in_order = not is_block_sparse(call) and (problem.band == NO_BAND or problem.T > LONG)
    is_split = _is_narrow(call) or (deterministic and not in_order)
    dkv_tiles, dq_tiles = default_tiles(problem, is_split) if tiles is None else tiles
    if deterministic and dq_tiles is None:
        dkv_tiles = dkv_tiles._replace(ordered=True)
    if dkv_tiles.ordered and is_block_sparse(call):
        raise ValueError("the ordered form is for full and causal calls, give tiles of the split form")
    seeing = call.seeing_queries
    if seeing is None:
        query, dout, dlse = call.of_seeing_rows(lse, call.query, dout, dlse)
        call = dataclasses.replace(call, query=query)
    else:
        call = dataclasses.replace(call, query_lengths=seeing)
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
    delta = delta_of(out, lse if call.may_have_blind_rows else None, dout, dlse, low)
    head_dim = padded_head_dim(problem.H)
    query, key, value = call.arrays[:3]
    if dq_tiles is not None:  # kernels that own keys alone see to all ends themselves
        query, dout = (without_padding(array, seeing) for array in (query, dout))
        key, value = (without_padding(array, call.key_lengths) for array in (key, value))
    up = lambda length, multiple: pl.cdiv(length, multiple) * multiple
    # A swizzled copy by TMA takes whole groups of 8 positions and of 64 elements of a head.
    arrays = [padded(array, {1: up(array.shape[1], 8), 3: head_dim}) for array in (query, key, value, dout)]
    lse, delta = (padded(array, {2: up(problem.T, 128)}) for array in (lse, delta))
    problem_padded, c = dataclasses.replace(problem, H=head_dim), None
    # The interpreter knows no addition to memory: there each tile of keys has a plane of its own.
    planes = (pl.cdiv(problem.S, dkv_tiles.block_k),) if interpret else ()
    zeros = *planes, *arrays[0].shape
    # What a sink takes of the sum of a row of ds is known no better than delta, and a soft cap leaves no sum.
    if low is not None and has_all_keys and call.extras.sinks is None and problem.soft_cap is None:
        q, k, *others = arrays
        shape = zeros if dq_tiles is None else (1, head_dim)
        c, lse, zeros = common_part(problem_padded, q, k, lse, call.key_lengths, shape, interpret)
        if dq_tiles is not None:
            arrays = q, k - c[:, None, :, :head_dim], *others
    else:
        lse, zeros = LOG2_E * lse, jnp.zeros(zeros, jnp.float32)
    arrays = *arrays, lse, delta
    of_keys = Gmem(*arrays, **_visible_tiles(call, dkv_tiles, "keys"))
    if dq_tiles is None:
        if seeing is not None:
            last_q, last_do = (last_tiles(array, seeing, dkv_tiles.block_q) for array in (of_keys.q, of_keys.do))
            of_keys = of_keys._replace(last_q=last_q, last_do=last_do)
        dq, dk, dv = _fused(problem_padded, of_keys._replace(c=c), zeros, dkv_tiles, interpret)
    else:
        dk, dv = _dkv(problem_padded, of_keys, dkv_tiles, interpret)
        of_queries = Gmem(*arrays, **_visible_tiles(call, dq_tiles, "queries"))
        dq = _dq(problem_padded, of_queries, dq_tiles, interpret)
    dk, dv = (array[:, : problem.S, :, : problem.H] for array in (dk, dv))
    dq = dq[:, : problem.T, :, : problem.H]
    if c is not None:
        c = jnp.repeat(c[:, None, :, : problem.H], problem.group, axis=2)
        dq = given_back(dq, dlse, c, problem.scale)
    return dq.astype(problem.dtype), dk, dv


def _is_narrow(call):
    """Whether all that hides keys is a window in which adding to dq takes longer than to compute s and dp again."""
    problem, band = call.problem, call.problem.band
    has_others = call.hides_keys or not (call.query_lengths is None and call.key_lengths is None)
    is_window = band.left is not None and band.right is not None
    return 64 < problem.H <= 128 and is_window and band.left + band.right < NARROW and not has_others


def _in_pieces(call, residuals, at_once, options):
    """`backward` of some batch entries after others, for more than one grid can hold. options: by keyword."""
    own, pieces = call.extras, []
    own = Extras(query_segment_ids=own.query_segment_ids, key_segment_ids=own.key_segment_ids, sinks=own.sinks)
    own = jax.tree.map(lambda array: jnp.broadcast_to(array, (call.problem.B, *array.shape[1:])), own)
    for start in range(0, call.problem.B, at_once):
        part = slice(start, start + at_once)
        arrays, others = jax.tree.map(lambda array, part=part: array[part], ((*call.arrays[:6], own), residuals))
        piece = Call(dataclasses.replace(call.problem, B=len(arrays[0])), *arrays)
        pieces.append(backward(piece, *others, **options))
    return tuple(map(jnp.concatenate, zip(*pieces, strict=True)))


def _visible_tiles(call, tiles, own):
    """visible_tiles, query_ids and key_ids of a `Gmem`, of a kernel that owns queries or keys, or none of them."""
    if not is_block_sparse(call):
        return {}
    blocks = tiles.block_q, tiles.block_k
    return {"visible_tiles": visible_tiles(call, *blocks, own), **padded_ids(call, *blocks)}


# A ref can be indexed in a traced function only.
@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _fused(problem, arrays, zeros, tiles, interpret):
    """(dq in float32, dk, dv). zeros: for dq, in the interpreter as many as there are tiles of keys."""
    dq_ref = jax.new_ref(zeros)
    added = {"dq": dq_ref}
    if tiles.ordered:
        counts = (1,), (problem.B, problem.N, pl.cdiv(problem.T, tiles.block_q))
        added |= zip(("counter", "turns"), (jax.new_ref(jnp.zeros(shape, jnp.int32)) for shape in counts), strict=True)
    dk, dv = _dkv(problem, arrays, tiles, interpret, **added)
    dq = jax.freeze(dq_ref)
    if interpret:
        dq = dq.sum(axis=0)
    return problem.scale * dq, dk, dv


def _launch(kernel, name, arrays, outputs, scratch, grid, problem, tiles, interpret, **more):
    """Run a kernel, its grid, scratch and outputs, {field of `Gmem`: array}, given. more: others of these fields."""
    inputs = {name: array for name, array in arrays._asdict().items() if array is not None}

    def body(*refs):
        *refs, scratch = refs
        fields = dict(zip((*inputs, *outputs), refs, strict=True))
        kernel(Gmem(**fields, **more), scratch, problem, tiles, bool(interpret))

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in outputs.values()],
        scratch_types=[scratch],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"flash_attention_{name}",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret or None,
    )(*inputs.values())


def _ring(slots, warpgroups, *buffers):
    """The types of a `Ring`; buffers: (shape, dtype) of what a slot holds, swizzled where that is a matrix."""
    smem = (
        plgpu.SMEM((slots, *shape), dtype, transforms=SWIZZLED if len(shape) > 1 else ()) for shape, dtype in buffers
    )
    filled = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=slots)
    return Ring(tuple(smem), filled, plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots))


def _dkv(problem, arrays, tiles, interpret, **added):
    """(dk, dv); with refs of dq, and in order counter and turns, by a fused kernel, which adds to that."""
    H, dtype, fused = problem.H, problem.dtype, bool(added)
    block_q, warpgroups = tiles.block_q, tiles.warpgroups
    grid, own = grid_of_keys(problem, tiles, arrays.visible_tiles), (warpgroups, ROWS_OF_WGMMA)
    parts, numbers = grid["part"], ((block_q,), jnp.float32)
    kv = plgpu.SMEM((parts, *own, H // parts), dtype, transforms=SWIZZLED)
    spare = (warpgroups, ROWS_OF_WGMMA, block_q) if fused else (warpgroups, 2, ROWS_OF_WGMMA, block_q)
    scratch = Scratch(
        q=_ring(tiles.stages + tiles.delayed, warpgroups, ((block_q, H), dtype), numbers),
        do=_ring(tiles.stages, warpgroups, ((block_q, H), dtype), numbers),
        k=kv,
        v=kv,
        kv_loaded=plgpu.Barrier(num_arrivals=2 * parts * warpgroups),
        spare=plgpu.SMEM(spare, dtype) if interpret else None,
    )
    outputs = {"dk": arrays.k, "dv": arrays.v}
    if not fused:
        return _launch(dkv_kernel, "dkv", arrays, outputs, scratch, grid, problem, tiles, interpret)
    columns = H if tiles.block_q > ROWS_OF_WGMMA else H // warpgroups  # of a tile of dq that a warpgroup computes
    scratch = scratch._replace(
        ds=plgpu.SMEM((2, *own, block_q), dtype, transforms=SWIZZLED),
        ds_ready=plgpu.Barrier(num_arrivals=warpgroups),
        dq=plgpu.SMEM((*own, columns), jnp.float32, transforms=SWIZZLED_32),
    )
    if arrays.c is not None:
        scratch = scratch._replace(
            kv_loaded=plgpu.Barrier(num_arrivals=warpgroups + 1),
            c=plgpu.SMEM((H + 8,), dtype),
            k_loaded=plgpu.Barrier(num_arrivals=warpgroups + 1),
        )
    if tiles.ordered:
        ready, other = plgpu.Barrier(num_arrivals=warpgroups), plgpu.Barrier(num_arrivals=1)
        number = plgpu.SMEM((1,), jnp.int32)
        scratch = scratch._replace(number=number, drawn=other, dq_ready=ready, dq_free=other)
    kernel = delayed_kernel if tiles.delayed else immediate_kernel
    return _launch(kernel, "fused_backward", arrays, outputs, scratch, grid, problem, tiles, interpret, **added)


def _dq(problem, arrays, tiles, interpret):
    H, dtype = problem.H, problem.dtype
    own, keys = (tiles.warpgroups, ROWS_OF_WGMMA), ((tiles.block_k, H), dtype)
    matrix, numbers = plgpu.SMEM((*own, H), dtype, transforms=SWIZZLED), plgpu.SMEM(own, jnp.float32)
    scratch = DqScratch(
        q=matrix,
        do=matrix,
        lse=numbers,
        delta=numbers,
        q_loaded=plgpu.Barrier(num_arrivals=4 * tiles.warpgroups),
        k=_ring(tiles.stages, tiles.warpgroups, keys),
        v=_ring(tiles.stages, tiles.warpgroups, keys),
        spare=plgpu.SMEM((*own, tiles.block_k), dtype) if interpret else None,
    )
    grid = grid_of_queries(problem, tiles, arrays.visible_tiles)
    (dq,) = _launch(dq_kernel, "dq", arrays, {"dq": arrays.q}, scratch, grid, problem, tiles, interpret)
    return dq
