"""Seven forward kernels for Hopper, each one step from one before.

    1 one warpgroup       ordinary copies from GMEM to SMEM, wgmma products
    2 TMA and a ring      the copy engine fetches keys and values some tiles ahead
    3 a memory warpgroup  a second warpgroup does nothing but ask for copies
    4 two compute warpgroups share the keys and values, each with its own queries
    5 ping-pong           the two take turns at the tensor core
    6 overlap             rung 4, but p v runs one tile late, beside the softmax of the next tile
    7 the kernel of `forward_kernel.py`: that overlap from one tile of queries to the next, too, masks on the
      diagonal only; persistent, a program for each SM, with a tile scheduler that balances their work

All compute out and lse, with the names of `forward_kernel.py`. Rungs 1 to 6 guess nothing and are for learning:
full or causal, head_dim 64 or 128, 16-bit, T a multiple of 64 times the compute warpgroups, S a multiple of BLOCK_K.
One program serves BLOCK_Q queries for each compute warpgroup, of one head:

    q_smem  (warpgroups, BLOCK_Q, H)    k_smem, v_smem  (STAGES, BLOCK_K, H)    rung 1: no first axis
    s, p    (BLOCK_Q, BLOCK_K)  m, l  (BLOCK_Q,)  acc  (BLOCK_Q, H)   in registers, float32
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper import forward as full
from helpers.attention.hopper.ptx import SWIZZLED
from helpers.attention.hopper.warpgroup import MATRIX, REGISTERS, ROWS, accumulate, overlapped, product
from helpers.attention.online_softmax import LOG2_E, step_of_scores

BLOCK_Q = 64
BLOCK_K = 128
STAGES = 2

NAMES = {
    1: "one warpgroup, ordinary copies",
    2: "TMA and a ring of buffers",
    3: "a memory warpgroup",
    4: "two compute warpgroups",
    5: "ping-pong",
    6: "overlap within a warpgroup",
    7: "the finished kernel",
}


# What rungs 1 to 6 share: the mathematics.


def start(H):
    """The state before any key: m, l, acc."""
    filled = lambda value, shape, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    return filled(-jnp.inf, (BLOCK_Q,), ROWS), filled(0, (BLOCK_Q,), ROWS), filled(0, (BLOCK_Q, H), MATRIX)


def columns(row_values, shape):
    return lax.broadcast_in_dim(row_values, shape, [0])


def softmax(s, m, l, *, problem, q_start, j):
    """(m, l, alpha, p) from s = q k^T of key tile j, not yet scaled: with alpha, acc is rescaled."""
    if problem.band.right == 0:
        rows = q_start + plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=MATRIX)
        cols = j * BLOCK_K + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
        s = jnp.where(cols <= rows, s, -jnp.inf)
    return step_of_scores(m, l, s, problem.scale * LOG2_E)


def add(acc, alpha, p, v_smem, *, interpret):
    """alpha acc + p v."""
    acc = columns(alpha, acc.shape) * acc
    return accumulate(acc, p.astype(v_smem.dtype), v_smem, interpret=interpret)


def key_stop(problem, q_stop):
    """How many key tiles the queries before q_stop see."""
    if problem.band.right == 0:
        return jnp.minimum(lax.div(q_stop + BLOCK_K - 1, BLOCK_K), problem.S // BLOCK_K)
    return problem.S // BLOCK_K


def finish(state, out_ref, lse_ref, o_smem):
    """Divide, and store through SMEM. out_ref (BLOCK_Q, H) and lse_ref (BLOCK_Q,) are in GMEM."""
    m, l, acc = state
    o_smem[...] = (acc / columns(l, acc.shape)).astype(o_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, out_ref)
    lse_ref[...] = (m + jnp.log2(l)) / LOG2_E
    plgpu.wait_smem_to_gmem(0)


def here():
    """(b, n, i) of this program: batch entry, query head, tile of queries."""
    return lax.axis_index("b"), lax.axis_index("n"), lax.axis_index("i")


# Rung 1


def one_warpgroup(q_ref, k_ref, v_ref, out_ref, lse_ref, q_smem, k_smem, v_smem, *, problem, interpret):
    b, n, i = here()
    kv_head = lax.div(n, problem.group)
    q_start = i * BLOCK_Q
    my_rows = pl.ds(q_start, BLOCK_Q)

    # -- a copy through registers
    def copy(ref, smem):
        # Through registers: every thread loads its share, and stores it.
        smem[...] = plgpu.load(ref, layout=MATRIX, optimized=False)
        plgpu.commit_smem()  # the tensor core reads SMEM by another path

    # --
    copy(q_ref.at[b, my_rows, n], q_smem)

    def one_key_tile(j, state):
        m, l, acc = state
        tile = pl.ds(j * BLOCK_K, BLOCK_K)
        copy(k_ref.at[b, tile, kv_head], k_smem)
        copy(v_ref.at[b, tile, kv_head], v_smem)
        s = product(q_smem, k_smem.T, interpret=interpret)
        m, l, alpha, p = softmax(s, m, l, problem=problem, q_start=q_start, j=j)
        return m, l, add(acc, alpha, p, v_smem, interpret=interpret)

    state = lax.fori_loop(0, key_stop(problem, q_start + BLOCK_Q), one_key_tile, start(problem.H))
    finish(state, out_ref.at[b, my_rows, n], lse_ref.at[b, n, my_rows], q_smem)


# Rung 2


def ring(
    q_ref, k_ref, v_ref, out_ref, lse_ref, q_smem, k_smem, v_smem, q_loaded, k_loaded, v_loaded, *, problem, interpret
):
    b, n, i = here()
    kv_head = lax.div(n, problem.group)
    q_start = i * BLOCK_Q
    my_rows = pl.ds(q_start, BLOCK_Q)
    stop = key_stop(problem, q_start + BLOCK_Q)

    def fetch(j):  # returns at once; k_loaded and v_loaded say when the tiles are there
        tile = b, pl.ds(j * BLOCK_K, BLOCK_K), kv_head
        slot = lax.rem(j, STAGES)
        plgpu.copy_gmem_to_smem(k_ref.at[tile], k_smem.at[slot], k_loaded.at[slot])
        plgpu.copy_gmem_to_smem(v_ref.at[tile], v_smem.at[slot], v_loaded.at[slot])

    plgpu.copy_gmem_to_smem(q_ref.at[b, my_rows, n], q_smem.at[0], q_loaded.at[0])
    pl.loop(0, jnp.minimum(STAGES, stop))(fetch)
    plgpu.barrier_wait(q_loaded.at[0])

    # -- rung 2
    def one_key_tile(j, state):
        m, l, acc = state
        slot = lax.rem(j, STAGES)
        plgpu.barrier_wait(k_loaded.at[slot])
        s = product(q_smem.at[0], k_smem.at[slot].T, interpret=interpret)
        m, l, alpha, p = softmax(s, m, l, problem=problem, q_start=q_start, j=j)
        plgpu.barrier_wait(v_loaded.at[slot])
        acc = add(acc, alpha, p, v_smem.at[slot], interpret=interpret)
        pl.when(j + STAGES < stop)(lambda: fetch(j + STAGES))  # into the slot now free
        return m, l, acc

    # --
    state = lax.fori_loop(0, stop, one_key_tile, start(problem.H))
    finish(state, out_ref.at[b, my_rows, n], lse_ref.at[b, n, my_rows], q_smem.at[0])


# Rungs 3 to 6: the same roles, with one or two compute warpgroups, with turns, with overlap


def specialised(
    q_ref, k_ref, v_ref, out_ref, lse_ref,
    q_smem, k_smem, v_smem, q_loaded, k_loaded, v_loaded, k_free, v_free, turn,
    *, problem, interpret, warpgroups, ping_pong, overlap,
):  # fmt: skip
    b, n, i = here()
    kv_head = lax.div(n, problem.group)
    me = lax.axis_index("warpgroup")
    stop = key_stop(problem, (i + 1) * warpgroups * BLOCK_Q)

    def compute():
        if warpgroups == 2:  # one of each has as many as it wants from the start
            plgpu.set_max_registers(REGISTERS[2][0], action="increase")
        q_start = (i * warpgroups + me) * BLOCK_Q
        my_rows = pl.ds(q_start, BLOCK_Q)
        q_mine = q_smem.at[me]
        plgpu.copy_gmem_to_smem(q_ref.at[b, my_rows, n], q_mine, q_loaded.at[me])
        plgpu.barrier_wait(q_loaded.at[me])
        if ping_pong:
            pl.when(me == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))  # warpgroup 0 begins

        # -- rung 5
        def one_key_tile(j, state):
            m, l, acc = state
            slot = lax.rem(j, STAGES)
            plgpu.barrier_wait(k_loaded.at[slot])
            if ping_pong:
                plgpu.barrier_wait(turn.at[me])
            s = product(q_mine, k_smem.at[slot].T, interpret=interpret)
            if ping_pong:
                plgpu.barrier_arrive(turn.at[1 - me])
            plgpu.barrier_arrive(k_free.at[slot])
            m, l, alpha, p = softmax(s, m, l, problem=problem, q_start=q_start, j=j)
            plgpu.barrier_wait(v_loaded.at[slot])
            acc = add(acc, alpha, p, v_smem.at[slot], interpret=interpret)
            plgpu.barrier_arrive(v_free.at[slot])
            return m, l, acc

        # --
        if overlap:
            rings = (k_smem, k_loaded, k_free), (v_smem, v_loaded, v_free)
            of_tile = functools.partial(softmax, problem=problem, q_start=q_start)
            state = one_tile_late(q_mine, *rings, of_tile, stop, interpret=interpret)
        else:
            state = lax.fori_loop(0, stop, one_key_tile, start(problem.H))
        if ping_pong:
            pl.when(me == 0)(lambda: plgpu.barrier_wait(turn.at[0]))  # the turn that nobody takes
        finish(state, out_ref.at[b, my_rows, n], lse_ref.at[b, n, my_rows], q_mine)

    def load():
        if warpgroups == 2:
            plgpu.set_max_registers(REGISTERS[2][1], action="decrease")

        # -- the memory warpgroup
        def fetch(j, reuse):
            tile = b, pl.ds(j * BLOCK_K, BLOCK_K), kv_head
            slot = lax.rem(j, STAGES)
            keys = k_ref, k_smem, k_loaded, k_free
            values = v_ref, v_smem, v_loaded, v_free
            for ref, smem, loaded, free in (keys, values):
                if reuse:
                    plgpu.barrier_wait(free.at[slot])
                plgpu.copy_gmem_to_smem(ref.at[tile], smem.at[slot], loaded.at[slot])

        filled = jnp.minimum(STAGES, stop)
        pl.loop(0, filled)(lambda j: fetch(j, reuse=False))
        pl.loop(filled, stop)(lambda j: fetch(j, reuse=True))

        # --
        @pl.loop(0, filled)
        def _(slot):  # leave no barrier with an arrival that nobody saw
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])

    pl.when(me < warpgroups)(compute)
    pl.when(me == warpgroups)(load)


def one_tile_late(q, keys, values, softmax, stop, *, interpret):
    """The state after all tiles of rung 6. keys, values: a ring in SMEM and its barriers `loaded` and `free`."""
    (k_smem, k_loaded, k_free), (v_smem, v_loaded, v_free) = keys, values

    def wait_for_keys(j):
        pl.when(j < stop)(lambda: plgpu.barrier_wait(k_loaded.at[lax.rem(j, STAGES)]))

    wait_for_keys(0)
    s = product(q, k_smem.at[0].T, interpret=interpret)
    plgpu.barrier_arrive(k_free.at[0])
    m, l, acc = start(q.shape[1])
    m, l, _, p = softmax(s, m, l, j=0)
    wait_for_keys(1)

    # -- rung 6
    def one_key_tile(j, state):
        m, l, acc, p = state
        new, old = lax.rem(j, STAGES), lax.rem(j - 1, STAGES)

        def while_pv_runs(s, state):
            plgpu.barrier_arrive(k_free.at[new])
            m, l, _ = state
            *state, p = lax.optimization_barrier(softmax(s, m, l, j=j))
            wait_for_keys(j + 1)
            return p, tuple(state)

        plgpu.barrier_wait(v_loaded.at[old])
        qk, pv = (q, k_smem.at[new]), (acc, p, v_smem.at[old])
        state = m, l, m  # the last keeps a place for alpha
        acc, p, (m, l, alpha) = overlapped(qk, pv, while_pv_runs, state, interpret=interpret)
        plgpu.barrier_arrive(v_free.at[old])
        return m, l, columns(alpha, acc.shape) * acc, p.astype(q.dtype)

    # --
    m, l, acc, p = lax.fori_loop(1, stop, one_key_tile, (m, l, acc, p.astype(q.dtype)))
    last = lax.rem(stop - 1, STAGES)
    plgpu.barrier_wait(v_loaded.at[last])
    acc = accumulate(acc, p, v_smem.at[last], interpret=interpret)
    plgpu.barrier_arrive(v_free.at[last])
    return m, l, acc


def forward(call, *, rung, interpret=False):
    """out (B, T, N, H) and lse (B, N, T) of a checked `Call` by one rung of the ladder, 1 to 7.

    interpret: False, or a `plgpu.InterpretGPUParams` to run on a CPU.
    """
    if rung == 7:
        return full.forward(call, interpret=interpret)
    problem = call.problem
    B, T, S, N, H = problem.B, problem.T, problem.S, problem.N, problem.H
    warpgroups = 2 if rung >= 4 else 1
    if H not in (64, 128) or T % (warpgroups * BLOCK_Q) or S % BLOCK_K or problem.dtype.itemsize != 2:
        raise ValueError(
            f"rung {rung} takes 16-bit inputs, H of 64 or 128, T in multiples of {warpgroups * BLOCK_Q} and S of "
            f"{BLOCK_K}, not {problem}"
        )
    smem = [
        plgpu.SMEM((block, H) if rung == 1 else (count, block, H), problem.dtype, transforms=SWIZZLED)
        for count, block in ((warpgroups, BLOCK_Q), (STAGES, BLOCK_K), (STAGES, BLOCK_K))
    ]
    loaded = [plgpu.Barrier(num_barriers=count) for count in (warpgroups, STAGES, STAGES)]
    free = [plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES)] * 2
    turn = plgpu.Barrier(num_barriers=2)
    options = {"problem": problem, "interpret": bool(interpret)}
    if rung == 1:
        body, scratch = one_warpgroup, smem
    elif rung == 2:
        body, scratch = ring, [*smem, *loaded]
    else:
        body, scratch = specialised, [*smem, *loaded, *free, turn]
        options |= {"warpgroups": warpgroups, "ping_pong": rung == 5, "overlap": rung == 6}
    threads = {} if rung < 3 else {"num_threads": warpgroups + 1, "thread_name": "warpgroup"}
    return plgpu.kernel(
        lambda *refs: body(*refs, **options),
        out_type=[jax.ShapeDtypeStruct((B, T, N, H), problem.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        scratch_types=scratch,
        grid=(N, T // (warpgroups * BLOCK_Q), B),
        grid_names=("n", "i", "b"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
        **threads,
    )(call.query, call.key, call.value)
