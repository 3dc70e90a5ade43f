"""The Hopper forward kernel.  (docstring to come)"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.warpgroup import MATRIX, ROWS, SWIZZLED, accumulate, overlapped, product
from helpers.attention.masking import Band
from helpers.attention.portable.tiles import LOG2_E

HEAD_DIMS = (64, 128, 256)
SMEM_BYTES = 227 * 1024


class Tiles(NamedTuple):
    block_q: int = 64
    block_k: int = 128
    stages: int = 2
    warpgroups: int = 2
    overlap: bool = True
    ping_pong: bool = True
    programs: int | None = 132


def forward_kernel(
    q_ref, k_ref, v_ref, out_ref, lse_ref,
    q_smem, k_smem, v_smem, o_smem, lse_smem,
    q_loaded, k_loaded, v_loaded, k_free, v_free, turn,
    *, problem, tiles, programs, interpret,
):
    block_q, block_k, stages, warpgroups = tiles.block_q, tiles.block_k, tiles.stages, tiles.warpgroups
    program, me = lax.axis_index("program"), lax.axis_index("warpgroup")
    causal = problem.band.right == 0
    rows_here = warpgroups * block_q
    q_tiles = pl.cdiv(problem.T, rows_here)
    heads = problem.B * problem.N
    key_tiles = pl.cdiv(problem.S, block_k)
    scale_2 = problem.scale * LOG2_E

    rounds = pl.cdiv(q_tiles * heads - program, programs)

    def place(round_):
        index = program + round_ * programs
        if causal:
            i, head = q_tiles - 1 - lax.div(index, heads), lax.rem(index, heads)
        else:
            i, head = lax.rem(index, q_tiles), lax.div(index, q_tiles)
        b, n = lax.div(head, problem.N), lax.rem(head, problem.N)
        q_start = i * rows_here
        if causal:
            unmasked = jnp.minimum(lax.div(q_start + 1, block_k), problem.S // block_k)
            stop = jnp.minimum(lax.div(q_start + rows_here + block_k - 1, block_k), key_tiles)
        else:
            unmasked, stop = problem.S // block_k, key_tiles
        return q_start, n, b, unmasked, stop

    def compute():
        plgpu.set_max_registers(240 if warpgroups == 2 else 160, action="increase")
        q_mine, o_mine, lse_mine = q_smem.at[me], o_smem.at[me], lse_smem.at[me]

        def my_rows(ref, q_start, n, b):
            return ref.at[b, pl.ds(q_start + me * block_q, block_q), n]

        def load_q(round_):
            q_start, n, b, _, _ = place(round_)
            plgpu.copy_gmem_to_smem(my_rows(q_ref, q_start, n, b), q_mine, q_loaded.at[me])

        for slot in range(stages):
            plgpu.barrier_arrive(k_free.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
        next_one = jnp.where(me == warpgroups - 1, 0, me + 1)
        if tiles.ping_pong:
            pl.when(me == warpgroups - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

        def wait_turn():
            if tiles.ping_pong:
                plgpu.barrier_wait(turn.at[me])

        def pass_turn():
            if tiles.ping_pong:
                plgpu.barrier_arrive(turn.at[next_one])

        load_q(0)

        def one_tile(round_, step):
            q_start, n, b, unmasked, stop = place(round_)

            def mask(s, j):
                cols = j * block_k + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
                seen = cols < problem.S
                if causal:
                    rows = q_start + me * block_q + plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=MATRIX)
                    seen &= cols <= rows
                return jnp.where(seen, s, -jnp.inf)

            def softmax(s, state):
                m, l, _, _ = state
                m_new = jnp.maximum(m, scale_2 * s.max(axis=1))
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(scale_2 * s - lax.broadcast_in_dim(m_new, s.shape, [0]))
                l = alpha * l + p.sum(axis=1)
                return m_new, l, alpha, p.astype(problem.dtype)

            def rescale(acc, alpha):
                return acc * lax.broadcast_in_dim(alpha, acc.shape, [0])

            # First tile of keys
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(q_loaded.at[me])
            plgpu.barrier_wait(k_loaded.at[slot])
            wait_turn()
            s = product(q_mine, k_smem.at[slot].T, issued=pass_turn, interpret=interpret)
            plgpu.barrier_arrive(k_free.at[slot])
            if causal or problem.S % block_k:
                s = mask(s, 0)
            state = (
                plgpu.layout_cast(jnp.full((block_q,), -jnp.inf, jnp.float32), ROWS),
                plgpu.layout_cast(jnp.zeros((block_q,), jnp.float32), ROWS),
                None, None,
            )
            m, l, _, p = softmax(s, state)
            acc = plgpu.layout_cast(jnp.zeros((block_q, problem.H), jnp.float32), MATRIX)

            def one_step(masked):
                def step_(j, carry):
                    acc, m, l, p = carry
                    old, slot = lax.rem(step + j - 1, stages), lax.rem(step + j, stages)
                    plgpu.barrier_wait(k_loaded.at[slot])

                    def meanwhile(s, state):
                        plgpu.barrier_arrive(k_free.at[slot])
                        return softmax(mask(s, j) if masked else s, state)

                    alpha = l
                    if tiles.overlap:
                        wait_turn()
                        plgpu.barrier_wait(v_loaded.at[old])
                        acc, (m, l, alpha, p) = overlapped(
                            (q_mine, k_smem.at[slot].T), (acc, p, v_smem.at[old]), meanwhile, (m, l, alpha, p),
                            issued=pass_turn, interpret=interpret,
                        )
                        plgpu.barrier_arrive(v_free.at[old])
                    else:
                        plgpu.barrier_wait(v_loaded.at[old])
                        acc = accumulate(acc, p, v_smem.at[old], interpret=interpret)
                        plgpu.barrier_arrive(v_free.at[old])
                        wait_turn()
                        s = product(q_mine, k_smem.at[slot].T, issued=pass_turn, interpret=interpret)
                        m, l, alpha, p = meanwhile(s, (m, l, alpha, p))
                    return rescale(acc, alpha), m, l, p

                return step_

            carry = acc, m, l, p
            carry = lax.fori_loop(1, jnp.maximum(unmasked, 1), one_step(False), carry)
            if causal or problem.S % block_k:
                carry = lax.fori_loop(jnp.maximum(unmasked, 1), stop, one_step(True), carry)
            acc, m, l, p = carry
            # Q is not needed any more: fetch the next
            pl.when(round_ + 1 < rounds)(lambda: load_q(round_ + 1))
            last = lax.rem(step + stop - 1, stages)
            plgpu.barrier_wait(v_loaded.at[last])
            acc = accumulate(acc, p, v_smem.at[last], interpret=interpret)
            plgpu.barrier_arrive(v_free.at[last])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_mine[...] = (acc * lax.broadcast_in_dim(1 / l, acc.shape, [0])).astype(problem.dtype)
            lse_mine[...] = (m + jnp.log2(l)) / LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_mine, my_rows(out_ref, q_start, n, b))
            plgpu.copy_smem_to_gmem(lse_mine, lse_ref.at[b, n, pl.ds(q_start + me * block_q, block_q)])
            return step + stop

        lax.fori_loop(0, rounds, one_tile, jnp.int32(0))
        if tiles.ping_pong:
            pl.when(me == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
        plgpu.wait_smem_to_gmem(0)

    def load():
        plgpu.set_max_registers(24, action="decrease")

        def fetch(ref, smem, loaded, free, n, b, j, step):
            slot = lax.rem(step + j, stages)
            plgpu.barrier_wait(free.at[slot])
            plgpu.copy_gmem_to_smem(
                ref.at[b, pl.ds(j * block_k, block_k), lax.div(n, problem.group)], smem.at[slot], loaded.at[slot]
            )

        def one_tile(round_, step):
            _, n, b, _, stop = place(round_)
            fetch_k = lambda j: fetch(k_ref, k_smem, k_loaded, k_free, n, b, j, step)
            fetch_v = lambda j: fetch(v_ref, v_smem, v_loaded, v_free, n, b, j, step)
            fetch_k(0)

            @pl.loop(1, stop)
            def _(j):
                fetch_k(j)
                fetch_v(j - 1)

            fetch_v(stop - 1)
            return step + stop

        lax.fori_loop(0, rounds, one_tile, jnp.int32(0))
        for slot in range(stages):
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])

    pl.when(me < warpgroups)(compute)
    pl.when(me == warpgroups)(load)


def default_tiles(problem):
    if problem.H <= 64:
        return Tiles(warpgroups=3, stages=3)
    if problem.H <= 128:
        return Tiles()
    return Tiles(block_k=64)


def why_not(problem):
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16 only, not {problem.dtype}"
    if problem.band not in (Band(), Band(right=0)):
        return "it takes no local window"
    return None


def forward(call, *, tiles=None, interpret=False):
    problem = call.problem
    tiles = default_tiles(problem) if tiles is None else tiles
    B, T, N, H = problem.B, problem.T, problem.N, problem.H
    block_q, block_k, stages, warpgroups = tiles.block_q, tiles.block_k, tiles.stages, tiles.warpgroups
    count = pl.cdiv(T, block_q * warpgroups) * B * N
    programs = count if tiles.programs is None else min(tiles.programs, count)
    lse_T = pl.cdiv(T, 4) * 4

    def tile(*shape, dtype=problem.dtype, transforms=SWIZZLED):
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    kernel = plgpu.kernel(
        lambda *refs: forward_kernel(
            *refs, problem=problem, tiles=tiles, programs=programs, interpret=bool(interpret)
        ),
        out_type=[
            jax.ShapeDtypeStruct((B, T, N, H), problem.dtype),
            jax.ShapeDtypeStruct((B, N, lse_T), jnp.float32),
        ],
        scratch_types=[
            tile(warpgroups, block_q, H),
            tile(stages, block_k, H),
            tile(stages, block_k, H),
            tile(warpgroups, block_q, H),
            tile(warpgroups, block_q, dtype=jnp.float32, transforms=()),
            plgpu.Barrier(num_barriers=warpgroups),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_barriers=warpgroups),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret or None,
    )
    out, lse = kernel(call.query, call.key, call.value)
    return out, lse[:, :, :T]
