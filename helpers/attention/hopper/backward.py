"""The Hopper backward kernels: the gradients of attention by TMA, wgmma and warp specialisation.

The equations are those of the portable backward (FlashAttention-2, arXiv 2307.08691, algorithm 2).
With L = log2(e), p is computed by exp2, and delta comes from outside:

    delta  = rowsum(out * do) - dlse
    p      = exp2(scale L q k^T - L lse)
    dp     = do v^T
    ds     = p * (dp - delta)
    dv     = p^T do,   dk = scale ds^T q,   dq = scale ds k

dkv_kernel (FlashAttention-3, arXiv 2407.08608) owns block_k keys of one key/value head, 64 for each
compute warpgroup, and runs over the tiles of queries that see them. It computes the *transposed*
tiles, s^T = k q^T and dp^T = v do^T: then p^T and ds^T lie in the registers just as the products
p^T do and ds^T q want their left operand. What it does about dq is a choice:

    fused  ds^T also goes to shared memory, the warpgroups share out ds k between them, and TMA adds
           the product to a float32 dq in memory: 5 products for each pair of tiles, and a dq whose
           rounding depends on the order in which the additions arrive.
    split  nothing; dq_kernel owns tiles of queries and computes s and dp once more: 7 products, and
           the same bits every time.

One more warpgroup, the memory warpgroup, computes nothing: it keeps a ring of `stages` tiles filled.

Refs in GMEM (G is the group, N // K query heads of one key/value head; T' is T rounded up):

    q_ref, do_ref       (B, T, N, H)      k_ref, v_ref, dk_ref, dv_ref  (B, S, K, H)
    lse_ref, delta_ref  (B, N, T')        L lse and delta, float32
    dq_ref              (B, T, N, H)      float32 zeros in the fused form
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.warpgroup import MATRIX, ROWS, SWIZZLED
from helpers.attention.masking import key_tiles, query_tiles, visible
from helpers.attention.portable.tiles import LOG2_E

HEAD_DIMS = (64, 128, 256)
ROWS_OF_WGMMA = 64  # rows of a product that one warpgroup owns
COLUMNS = MATRIX.reduce(0)  # how a warpgroup holds one number for each column of a matrix
SWIZZLED_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # SWIZZLED for float32


def multiply_add(acc, a, b, spare, interpret):
    """Issue acc += a @ b on the tensor core. a: a ref, or an array in registers; acc: an ACC ref.

    The interpreter knows no register operand, so there it goes through `spare`, a ref of its shape;
    and it checks reads of refs for races, but not those of its wgmma, so the operands are read here.
    """
    if interpret:
        if isinstance(a, jax.Array):
            spare[...] = a
            a = spare
        a[...], b[...]
    plgpu.wgmma(acc, a, b)


def dkv_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    q_smem,
    do_smem,
    lse_smem,
    delta_smem,
    k_smem,
    v_smem,
    ds_smem,
    dq_smem,
    spare,
    kv_loaded,
    q_loaded,
    do_loaded,
    q_free,
    do_free,
    ds_ready,
    *,
    dq_ref,
    problem,
    tiles,
    interpret,
):
    """Writes dk and dv of block_k keys; with a dq_ref, adds their part of dq as well.

    q_smem, do_smem        (stages, block_q, H), the ring that the memory warpgroup fills
    lse_smem, delta_smem   (stages, block_q)
    k_smem, v_smem         (warpgroups, 64, H): 64 keys for each compute warpgroup
    ds_smem                (2, warpgroups, 64, block_q): ds^T, two steps of it
    dq_smem                (warpgroups, 64, H or H / 2): the part of dq that a warpgroup computes
    spare                  see multiply_add
    """
    block_q, stages, warpgroups = tiles.block_q, tiles.stages, tiles.warpgroups
    block_k = warpgroups * ROWS_OF_WGMMA
    T, S, H, group, band = problem.T, problem.S, problem.H, problem.group, problem.band
    b, kv, me = lax.axis_index("batch"), lax.axis_index("kv_head"), lax.axis_index("warpgroup")
    k_start = lax.axis_index("tile") * block_k
    multiply_add_ = functools.partial(multiply_add, interpret=interpret)

    # Which tiles of queries see these keys, and from which on they see all of them.
    first, stop = query_tiles(k_start, k_start + block_k, block_q, band, T, S, xp=jnp)
    all_from = first
    if band.right is not None:
        all_from = jnp.clip(pl.cdiv(k_start + block_k - 1 - band.right, block_q), first, stop)
    if dq_ref is not None and S % block_k:  # keys past the end: zeros in dk and dv, but not in p
        all_from = jnp.where(k_start + block_k > S, stop, all_from)

    def for_each_step(one_step, masked_step=None):
        """Run one_step(head, i, step) for each head of the group and tile of queries in turn."""

        def one_head(g, step):
            head = kv * group + g
            one = lambda body: lambda i, step: (body(head, i, step), step + 1)[1]
            middle = first if masked_step is None else all_from
            if masked_step is not None:
                step = lax.fori_loop(first, middle, one(masked_step), step)
            return lax.fori_loop(middle, stop, one(one_step), step)

        return one_head(0, jnp.int32(0)) if group == 1 else lax.fori_loop(0, group, one_head, jnp.int32(0))

    def compute():
        plgpu.set_max_registers(240 if warpgroups <= 2 else 160, action="increase")
        k_mine, v_mine = k_smem.at[me], v_smem.at[me]
        for slot in range(stages):
            plgpu.barrier_arrive(q_free.at[slot])
            plgpu.barrier_arrive(do_free.at[slot])
        # This warpgroup's part of a tile of dq: 64 of its rows, or all of them and some columns.
        rows_mine = pl.ds(me * ROWS_OF_WGMMA if block_q > ROWS_OF_WGMMA else 0, ROWS_OF_WGMMA)
        width = H if block_q > ROWS_OF_WGMMA else H // warpgroups
        columns_mine = pl.ds(me * width if width < H else 0, width)
        plgpu.barrier_wait(kv_loaded)

        def accumulate(dk_acc, dv_acc):
            def one_step(masked, head, i, step):
                slot = lax.rem(step, stages)
                q_tile, do_tile = q_smem.at[slot], do_smem.at[slot]
                spare_mine = None if spare is None else spare.at[me]
                ds_tile = None if ds_smem is None else ds_smem.at[lax.rem(step, 2)]

                def p_and_ds(s_acc, dp_acc):
                    plgpu.barrier_wait(q_loaded.at[slot])
                    multiply_add_(s_acc, k_mine, q_tile.T, None)
                    plgpu.barrier_wait(do_loaded.at[slot])
                    multiply_add_(dp_acc, v_mine, do_tile.T, None)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    lse = plgpu.load(lse_smem.at[slot], layout=COLUMNS)
                    p = jnp.exp2((problem.scale * LOG2_E) * s - lax.broadcast_in_dim(lse, s.shape, [1]))
                    if masked:
                        keys = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=MATRIX)
                        queries = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
                        keys += k_start + me * ROWS_OF_WGMMA
                        p = jnp.where(visible(i * block_q + queries, keys, band, T, S), p, 0.0)
                    multiply_add_(dv_acc, p.astype(problem.dtype), do_tile, spare_mine)
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    delta = plgpu.load(delta_smem.at[slot], layout=COLUMNS)
                    return (p * (dp - lax.broadcast_in_dim(delta, s.shape, [1]))).astype(problem.dtype)

                acc = plgpu.ACC((ROWS_OF_WGMMA, block_q), jnp.float32)
                ds = pl.run_scoped(p_and_ds, acc, acc)
                if dq_ref is None:
                    multiply_add_(dk_acc, ds, q_tile, spare_mine)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(do_free.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_free.at[slot])
                    return

                ds_tile.at[me][...] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_ready)
                plgpu.barrier_wait(ds_ready)

                def dq_part(dq_acc):
                    for keys in range(warpgroups):
                        multiply_add_(
                            dq_acc, ds_tile.at[keys, :, rows_mine].T, k_smem.at[keys, :, columns_mine], None
                        )
                    multiply_add_(dk_acc, ds, q_tile, spare_mine)
                    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
                    plgpu.barrier_arrive(do_free.at[slot])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    dq_smem.at[me][...] = dq

                pl.run_scoped(dq_part, plgpu.ACC((ROWS_OF_WGMMA, width), jnp.float32))
                plgpu.commit_smem()
                add_to_dq(head, i)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(q_free.at[slot])

            masked_step = None
            if band.right is not None or (dq_ref is not None and S % block_k):
                masked_step = functools.partial(one_step, True)
            for_each_step(functools.partial(one_step, False), masked_step)
            return dk_acc[...], dv_acc[...]

        def add_to_dq(head, i):
            rows = pl.ds(i * block_q + rows_mine.start, ROWS_OF_WGMMA)
            if interpret:  # no reduction there: each tile of keys has a plane of its own
                mine = dq_ref.at[lax.axis_index("tile"), b, rows, head, columns_mine]
                plgpu.copy_smem_to_gmem(dq_smem.at[me], mine)
            else:
                plgpu.copy_smem_to_gmem(dq_smem.at[me], dq_ref.at[b, rows, head, columns_mine], reduction_op="add")

        acc = plgpu.ACC((ROWS_OF_WGMMA, H), jnp.float32)
        dk, dv = pl.run_scoped(accumulate, acc, acc)
        if dq_ref is not None:  # the other warpgroups still read k_mine
            plgpu.barrier_arrive(ds_ready)
            plgpu.barrier_wait(ds_ready)
        k_mine[...] = (problem.scale * dk).astype(problem.dtype)
        v_mine[...] = dv.astype(problem.dtype)
        plgpu.commit_smem()
        my_keys = b, pl.ds(k_start + me * ROWS_OF_WGMMA, ROWS_OF_WGMMA), kv
        plgpu.copy_smem_to_gmem(k_mine, dk_ref.at[my_keys])
        plgpu.copy_smem_to_gmem(v_mine, dv_ref.at[my_keys])
        plgpu.wait_smem_to_gmem(0)

    def load():
        plgpu.set_max_registers(24, action="decrease")
        for part in range(warpgroups):
            keys = b, pl.ds(k_start + part * ROWS_OF_WGMMA, ROWS_OF_WGMMA), kv
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[part], kv_loaded)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[part], kv_loaded)

        def one_step(head, i, step):
            slot = lax.rem(step, stages)
            rows = pl.ds(i * block_q, block_q)
            plgpu.barrier_wait(q_free.at[slot])
            plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[slot], q_loaded.at[slot])
            plgpu.copy_gmem_to_smem(lse_ref.at[b, head, rows], lse_smem.at[slot], q_loaded.at[slot])
            plgpu.barrier_wait(do_free.at[slot])
            plgpu.copy_gmem_to_smem(do_ref.at[b, rows, head], do_smem.at[slot], do_loaded.at[slot])
            plgpu.copy_gmem_to_smem(delta_ref.at[b, head, rows], delta_smem.at[slot], do_loaded.at[slot])

        for_each_step(one_step)
        for slot in range(stages):
            plgpu.barrier_wait(q_free.at[slot])
            plgpu.barrier_wait(do_free.at[slot])

    pl.when(me < warpgroups)(compute)
    pl.when(me == warpgroups)(load)


def dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    q_smem,
    do_smem,
    lse_smem,
    delta_smem,
    k_smem,
    v_smem,
    spare,
    q_loaded,
    k_loaded,
    v_loaded,
    k_free,
    v_free,
    *,
    problem,
    tiles,
    interpret,
):
    """Writes dq of block_q queries.

    q_smem, do_smem        (warpgroups, 64, H): 64 queries for each compute warpgroup
    lse_smem, delta_smem   (warpgroups, 64)
    k_smem, v_smem         (stages, block_k, H), the ring that the memory warpgroup fills
    """
    block_k, stages, warpgroups = tiles.block_k, tiles.stages, tiles.warpgroups
    block_q = warpgroups * ROWS_OF_WGMMA
    T, S, band = problem.T, problem.S, problem.band
    b, head, me = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
    # Under a causal mask the last queries see the most keys: they go first.
    q_start = (pl.cdiv(T, block_q) - 1 - lax.axis_index("tile")) * block_q
    first, stop = key_tiles(q_start, q_start + block_q, block_k, band, T, S, xp=jnp)
    all_until = S // block_k
    if band.right is not None:
        all_until = jnp.minimum(all_until, lax.div(q_start + 1 + band.right, block_k))
    multiply_add_ = functools.partial(multiply_add, interpret=interpret)

    def compute():
        plgpu.set_max_registers(240 if warpgroups <= 2 else 160, action="increase")
        q_mine, do_mine = q_smem.at[me], do_smem.at[me]
        for slot in range(stages):
            plgpu.barrier_arrive(k_free.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
        plgpu.barrier_wait(q_loaded)
        lse = plgpu.load(lse_smem.at[me], layout=ROWS)
        delta = plgpu.load(delta_smem.at[me], layout=ROWS)

        def accumulate(dq_acc):
            def one_step(masked, j, _):
                slot = lax.rem(j - first, stages)
                k_tile, v_tile = k_smem.at[slot], v_smem.at[slot]

                def ds_of(s_acc, dp_acc):
                    plgpu.barrier_wait(k_loaded.at[slot])
                    multiply_add_(s_acc, q_mine, k_tile.T, None)
                    plgpu.barrier_wait(v_loaded.at[slot])
                    multiply_add_(dp_acc, do_mine, v_tile.T, None)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    p = jnp.exp2((problem.scale * LOG2_E) * s - lax.broadcast_in_dim(lse, s.shape, [0]))
                    if masked:
                        queries = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=MATRIX)
                        keys = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
                        queries += q_start + me * ROWS_OF_WGMMA
                        p = jnp.where(visible(queries, j * block_k + keys, band, T, S), p, 0.0)
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                    plgpu.barrier_arrive(v_free.at[slot])
                    return (p * (dp - lax.broadcast_in_dim(delta, s.shape, [0]))).astype(problem.dtype)

                acc = plgpu.ACC((ROWS_OF_WGMMA, block_k), jnp.float32)
                ds = pl.run_scoped(ds_of, acc, acc)
                multiply_add_(dq_acc, ds, k_tile, None if spare is None else spare.at[me])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(k_free.at[slot])

            loop = lambda start, end, masked: lax.fori_loop(start, end, functools.partial(one_step, masked), None)
            middle = jnp.clip(all_until, first, stop)
            loop(first, middle, False)
            if band.right is not None or S % block_k:
                loop(middle, stop, True)
            return dq_acc[...]

        dq = pl.run_scoped(accumulate, plgpu.ACC((ROWS_OF_WGMMA, problem.H), jnp.float32))
        q_mine[...] = (problem.scale * dq).astype(problem.dtype)
        plgpu.commit_smem()
        rows = pl.ds(q_start + me * ROWS_OF_WGMMA, ROWS_OF_WGMMA)
        plgpu.copy_smem_to_gmem(q_mine, dq_ref.at[b, rows, head])
        plgpu.wait_smem_to_gmem(0)

    def load():
        plgpu.set_max_registers(24, action="decrease")
        for part in range(warpgroups):
            rows = pl.ds(q_start + part * ROWS_OF_WGMMA, ROWS_OF_WGMMA)
            plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[part], q_loaded)
            plgpu.copy_gmem_to_smem(do_ref.at[b, rows, head], do_smem.at[part], q_loaded)
            plgpu.copy_gmem_to_smem(lse_ref.at[b, head, rows], lse_smem.at[part], q_loaded)
            plgpu.copy_gmem_to_smem(delta_ref.at[b, head, rows], delta_smem.at[part], q_loaded)
        kv = lax.div(head, problem.group)

        def one_step(j, _):
            slot = lax.rem(j - first, stages)
            keys = b, pl.ds(j * block_k, block_k), kv
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[slot], k_loaded.at[slot])
            plgpu.barrier_wait(v_free.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[slot], v_loaded.at[slot])

        lax.fori_loop(first, stop, one_step, None)
        for slot in range(stages):
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])

    pl.when(me < warpgroups)(compute)
    pl.when(me == warpgroups)(load)


class Tiles(NamedTuple):
    """How one kernel is launched. A compute warpgroup owns 64 rows of the kernel's own side: block_k
    is 64 * warpgroups in dkv_kernel, block_q is in dq_kernel."""

    block_q: int
    block_k: int
    stages: int

    @property
    def warpgroups(self):
        raise NotImplementedError


class DkvTiles(Tiles):
    @property
    def warpgroups(self):
        return self.block_k // ROWS_OF_WGMMA


class DqTiles(Tiles):
    @property
    def warpgroups(self):
        return self.block_q // ROWS_OF_WGMMA


def default_tiles(problem, deterministic=False):
    """(tiles of dkv_kernel, tiles of dq_kernel or None for the fused form)."""
    if problem.H <= 64:
        dkv, dq = DkvTiles(128, 128, 2), DqTiles(128, 128, 2)
    else:
        dkv, dq = DkvTiles(64, 128, 2), DqTiles(128, 64, 2)
    return dkv, dq if deterministic else None


def backward(call, out, lse, dout, dlse, *, tiles=None, deterministic=False, interpret=False):
    """Gradients of a checked `Call`: (dq, dk, dv) with the shapes and the dtype of its arrays.

    out (B, T, N, H) and lse (B, N, T) float32 are what `forward` returned; dout and dlse are their
    gradients.
    """
    problem = call.problem
    dkv_tiles, dq_tiles = default_tiles(problem, deterministic) if tiles is None else tiles
    delta = jnp.einsum("btnh,btnh->bnt", out, dout, preferred_element_type=jnp.float32) - dlse
    rows = ((0, 0), (0, 0), (0, -problem.T % 128))
    lse, delta = jnp.pad(LOG2_E * lse, rows), jnp.pad(delta, rows)
    arrays = (call.query, call.key, call.value, dout, lse, delta)
    if dq_tiles is not None:
        dk, dv = _dkv(problem, arrays, dkv_tiles, interpret)
        return _dq(problem, arrays, dq_tiles, interpret), dk, dv
    planes = (pl.cdiv(problem.S, dkv_tiles.block_k),) if interpret else ()
    dq_ref = jax.new_ref(jnp.zeros((*planes, *call.query.shape), jnp.float32))
    dk, dv = _dkv(problem, arrays, dkv_tiles, interpret, dq_ref)
    dq = jax.freeze(dq_ref)
    if interpret:
        dq = dq.sum(axis=0)
    return (problem.scale * dq).astype(problem.dtype), dk, dv


def _launch(kernel, name, out_type, scratch, grid, tiles, interpret, **options):
    return plgpu.kernel(
        lambda *refs: kernel(*refs, tiles=tiles, interpret=bool(interpret), **options),
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"flash_attention_{name}",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret or None,
    )


def _dkv(problem, arrays, tiles, interpret, dq_ref=None):
    B, S, K, H, dtype = problem.B, problem.S, problem.K, problem.H, problem.dtype
    block_q, stages, warpgroups = tiles.block_q, tiles.stages, tiles.warpgroups
    fused = dq_ref is not None
    width = H if block_q > ROWS_OF_WGMMA else H // warpgroups
    ring, own = plgpu.SMEM((stages, block_q, H), dtype, transforms=SWIZZLED), (warpgroups, ROWS_OF_WGMMA)
    numbers = plgpu.SMEM((stages, block_q), jnp.float32)
    kv = plgpu.SMEM((*own, H), dtype, transforms=SWIZZLED)
    scratch = [
        ring,
        ring,
        numbers,
        numbers,
        kv,
        kv,
        plgpu.SMEM((2, *own, block_q), dtype, transforms=SWIZZLED) if fused else None,
        plgpu.SMEM((*own, width), jnp.float32, transforms=SWIZZLED_32) if fused else None,
        plgpu.SMEM((*own, block_q), dtype) if interpret else None,
        plgpu.Barrier(num_arrivals=2 * warpgroups),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups) if fused else None,
    ]
    grid = {"batch": B, "kv_head": K, "tile": pl.cdiv(S, tiles.block_k)}
    out_type = [jax.ShapeDtypeStruct((B, S, K, H), dtype)] * 2
    launch = _launch(
        dkv_kernel, "dkv", out_type, scratch, grid, tiles, interpret, problem=problem, dq_ref=dq_ref
    )
    return launch(*arrays)


def _dq(problem, arrays, tiles, interpret):
    B, T, N, H, dtype = problem.B, problem.T, problem.N, problem.H, problem.dtype
    block_k, stages, warpgroups = tiles.block_k, tiles.stages, tiles.warpgroups
    own = (warpgroups, ROWS_OF_WGMMA)
    mine = plgpu.SMEM((*own, H), dtype, transforms=SWIZZLED)
    numbers = plgpu.SMEM(own, jnp.float32)
    ring = plgpu.SMEM((stages, block_k, H), dtype, transforms=SWIZZLED)
    scratch = [
        mine,
        mine,
        numbers,
        numbers,
        ring,
        ring,
        plgpu.SMEM((*own, block_k), dtype) if interpret else None,
        plgpu.Barrier(num_arrivals=4 * warpgroups),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    ]
    grid = {"batch": B, "head": N, "tile": pl.cdiv(T, tiles.block_q)}
    out_type = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    return _launch(dq_kernel, "dq", out_type, scratch, grid, tiles, interpret, problem=problem)(*arrays)
