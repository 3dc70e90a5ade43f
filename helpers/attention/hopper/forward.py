"""The Hopper forward kernel: specialised warpgroups, in Pallas Mosaic GPU.

FlashAttention-3 (arXiv 2407.08608) without its turns, and with a guess. For block_q queries and one tile
of block_k keys after another, base 2 (scale_2 = scale log2 e), h = HEADROOM:

    s_j    = q k_j^T
    m      = scale_2 rowmax s_0 + h          from the first tile alone: the guess
    p_j    = 2^(scale_2 s_j - m)             l = l + rowsum p_j
    acc    = acc + p_{j-1} v_{j-1} , one tile late; the last p v follows the loop
    out    = acc / l                         lse = ln 2 (m + log2 l)

out and lse are the same for every m, as long as nothing leaves the range of its dtype. (And up to rounding:
with h = 40, p and e^lse have a relative error of 1e-6.) The maximum of all tiles is one choice, which takes a
maximum and two multiplications in every tile. A guess takes none after the first. It is too low only where a later
score of a row is far above all of its first tile. Then l says so: with the true maximum it is at most S. A
warpgroup that finds l above min(S, MOST) in some row is careful from there on, and goes by the rule of the
portable kernel:

    m'     = max(m, scale_2 rowmax s_j)      alpha = 2^(m - m')
    p_j    = 2^(scale_2 s_j - m')            l = alpha l + rowsum p_j
    acc    = alpha (acc + p_{j-1} v_{j-1})

When a program is done with its list of work, it does the tiles of queries again in which a guess failed.
(FlashAttention-4 also leaves an old m where it can, and decides that in every tile.)

For a gradient, out must be as exact as float32 allows, up to what rounding p to 16 bits does at random (see
`backward`). Two things are in the way. The product acc + p v takes p rounded, so its weights add up to something else
than l, the sum of p as it was. And the tensor core drops the bits of each p v that lie below those of a large acc,
so acc is short by 1e-5 after 4096 keys. With `keeps_low_bits` the product has eight columns more, of constants c_i
beside v, which both of these befall as they befall v, and

    out    = acc sum_i c_i / sum_i (what became of c_i)

is free of them. lse stays what it is. What rounding takes off this out leaves as an array of its own, see `low_bits`.

What runs at the same time is all of the art. The kernel is persistent: there is a program for each SM,
unless `programs` says otherwise. A program has `warpgroups` compute warpgroups of block_q queries each
and one memory warpgroup:

    memory     fetches k_j and v_j by TMA into rings of `stages` tiles, as soon as a slot is free
    compute    issues s_j = q k_j^T and then acc += p_{j-1} v_{j-1} to the tensor core, and while that
               computes the second, takes the exponentials of the first
    compute    the other compute warpgroups do the same at other times, which fills the gaps

Every program works through a list of (tile of queries, head) pairs, which the tile scheduler `dealt` gives
it. It fetches the next q while it works at this one, and issues the first scores of the next to the tensor
core together with the last product of this one: between two tiles of queries, too, the tensor core has
something to do.

A slot of a ring goes free -> loaded -> free; every compute warpgroup frees every slot, also those with
keys that only the others need.

Refs. GMEM, as they are in the caller's arrays (T' and S' are T and S rounded up to eight rows and at
least one tile, T'' is T rounded up to block_q):

    q_ref (B, T', N, H)   k_ref, v_ref (B, S', K, H)   out_ref (B, T', N, H)   lse_ref (B, N, T'')

SMEM of a program:

    q_smem           (2, warpgroups, block_q, H)   this tile of queries and the next, a part for each warpgroup
    k_smem, v_smem   (stages, block_k, H)          the rings
    o_smem           (warpgroups, block_q, H)      out on its way to GMEM
    lse_smem         (warpgroups + 1, block_q)     float32; at [warpgroups, 2 i] and [.., 2 i + 1] the first turn
                                                   that warpgroup i wants done again, and the one after the last
    q_loaded                                       a barrier for each compute warpgroup
    k_loaded, v_loaded, k_free, v_free             a barrier for each slot
    judged                                         a barrier: all compute warpgroups are done with a list

(Without `ahead` there is one q_smem, and out leaves through it.)

Registers of a compute warpgroup: s and p (block_q, block_k), acc (block_q, H), m and worst (block_q,), and l
(block_q, 8), of which a thread has what it summed itself: the sum over threads comes last, not in each step.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.device import core_count
from helpers.attention.hopper.table import tuned_tiles
from helpers.attention.hopper.warpgroup import (
    CACHED,
    COLUMNS,
    MATRIX,
    NUM_SMS,
    REGISTERS,
    ROWS,
    SWIZZLED,
    Beside,
    accumulate,
    accumulate_then,
    anew,
    overlapped,
    padded_head_dim,
    product,
)
from helpers.attention.low_bits import low_bits
from helpers.attention.masking import Band
from helpers.attention.portable.tiles import LOG2_E

# How far a guess is above the maximum that it was made from, in powers of two, and what l may not exceed by guess.
# float16 ends at 2^16 and has few small numbers. In bfloat16 p v loses digits for v below 1e-20, say.
HEADROOM, MOST = {"bfloat16": 40, "float16": 1}, 2**15
# The constants beside v: eight of [1, 2), in which all endings of three bits occur, as they do among values.
CONSTANTS = {"bfloat16": [1 + 17 * i / 2**7 for i in range(8)], "float16": [1 + 145 * i / 2**10 for i in range(8)]}


class Tiles(NamedTuple):
    """How the work is cut; SMEM and registers bound the sizes.

    block_q: queries of one compute warpgroup, a multiple of 64.
    block_k: keys of a tile, a multiple of 64.
    stages: slots of the rings of keys and of values.
    warpgroups: compute warpgroups of a program, 2 to 4.
    programs: how many persistent programs share the work; None means one for each tile of queries.
    ahead: fetch the next queries while these are at work, and issue their first scores together with the
      last product of these. Otherwise there is SMEM for one tile of queries, and out leaves through it.
    guess: guess the maximum. It saves time in every step, and takes some for every tile of queries.
    """

    block_q: int = 64
    block_k: int = 128
    stages: int = 2
    warpgroups: int = 2
    programs: int | None = NUM_SMS
    ahead: bool = True
    guess: bool = True


def forward_kernel(
    q_ref, k_ref, v_ref, out_ref, lse_ref,
    q_smem, k_smem, v_smem, o_smem, lse_smem,
    q_loaded, k_loaded, v_loaded, k_free, v_free, judged,
    *, low=None, problem, tiles, programs, interpret,
):  # fmt: skip
    block_q, block_k, stages, warpgroups = tiles.block_q, tiles.block_k, tiles.stages, tiles.warpgroups
    program, me = lax.axis_index("program"), lax.axis_index("warpgroup")
    causal = problem.band.right == 0
    q_block = warpgroups * block_q
    q_tiles, heads = pl.cdiv(problem.T, q_block), problem.N * problem.B
    deal = deal_of(problem, tiles, programs)
    scale_2 = problem.scale * LOG2_E
    rounds = pl.cdiv(q_tiles * heads - program, programs)  # how many tiles of queries are mine
    guesses = tiles.guess and problem.S > block_k  # the maximum of the only tile is that of all
    constants = CONSTANTS[problem.dtype.name]
    is_wide = one_product_serves(tiles, q_smem.shape[-1])
    headroom, most = HEADROOM[problem.dtype.name] if guesses else 0, min(problem.S, MOST)

    def key_stop(q_stop):
        """The end of the key tiles that queries before q_stop see."""
        every = pl.cdiv(problem.S, block_k)
        return jnp.minimum(lax.div(q_stop + block_k - 1, block_k), every) if causal else every

    def place(turn):
        """My tile of queries of this turn: (its first row, head, batch entry, end of its key tiles)."""
        index = dealt(turn, program, programs, q_tiles * heads, deal)
        if causal:
            i, head = causal_order(index, q_tiles, problem)
        else:
            i, head = lax.rem(index, q_tiles), lax.div(index, q_tiles)
        q_start = i * q_block
        return q_start, lax.rem(head, problem.N), lax.div(head, problem.N), key_stop(q_start + q_block)

    def for_each_list(one_list):
        """step = one_list(start, count, step) for all of my turns, and then for those to be done again, if any."""
        if not guesses:
            one_list(0, rounds, jnp.int32(0))
            return

        def body(state):
            which, start, count, step = state
            step = one_list(start, count, step)
            # Now all have judged their guesses. And nobody reads the stale operands
            # of the last scores any more.
            pl.when(me < warpgroups)(lambda: plgpu.barrier_arrive(judged))
            plgpu.barrier_wait(judged)
            # On to the next warpgroup with turns to do again, unless one before it
            # asked for the same.
            each = range(warpgroups)
            starts = [lse_smem[warpgroups, 2 * i].astype(jnp.int32) for i in each]
            stops = [lse_smem[warpgroups, 2 * i + 1].astype(jnp.int32) for i in each]
            following = jnp.int32(warpgroups + 1), jnp.int32(0), jnp.int32(0)
            for i in reversed(each):
                wanted = (which <= i) & (stops[i] > 0)
                for other in range(i):
                    wanted &= starts[i] != starts[other]
                mine = jnp.int32(i + 1), starts[i], stops[i] - starts[i]
                pairs = zip(mine, following, strict=True)
                following = [jnp.where(wanted, *pair) for pair in pairs]
            return *following, step

        lax.while_loop(lambda state: state[0] <= warpgroups, body, (jnp.int32(0), jnp.int32(0), rounds, jnp.int32(0)))

    def compute():
        def do_again(start, stop):
            lse_smem[warpgroups, 2 * me] = jnp.asarray(start, jnp.float32)
            lse_smem[warpgroups, 2 * me + 1] = jnp.asarray(stop, jnp.float32)

        plgpu.set_max_registers(REGISTERS[warpgroups][0], action="increase")
        do_again(rounds, 0)
        o_mine = (o_smem if tiles.ahead else q_smem).at[me]
        if low is not None:
            pl.when(me == 0)(lambda: plgpu.copy_gmem_to_smem(low.constants_ref, low.constants, low.constants_loaded))
            plgpu.barrier_wait(low.constants_loaded)
        for slot in range(stages):  # every slot begins free
            plgpu.barrier_arrive(k_free.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])

        def queries(i):
            return q_smem.at[lax.rem(i, 2), me] if tiles.ahead else q_smem.at[me]

        def mine_of(turn):
            """My rows of a turn: (first row, end of their key tiles, end of those that need no mask)."""
            my_start = place(turn)[0] + me * block_q
            # Only the last key tiles need a mask, and rows past T do as little as they can.
            stop = jnp.where(my_start < problem.T, key_stop(my_start + block_q), 1)
            unmasked = jnp.minimum(lax.div(my_start + 1, block_k) if causal else stop, problem.S // block_k)
            return my_start, stop, jnp.clip(unmasked, 1, stop)

        def mask(s, my_start, j):
            visible = problem.S - j * block_k  # how many of these keys a row sees
            if causal:
                rows = anew(plgpu.broadcasted_iota(jnp.int32, (block_q,), 0, layout=ROWS))
                visible = jnp.minimum(visible, my_start + 1 - j * block_k + rows)
                visible = lax.broadcast_in_dim(visible, s.shape, [0])
            cols = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
            return jnp.where(cols < visible, s, -jnp.inf)

        def softmax_by_guess(s, m, l):
            """p and the new l."""
            p = jnp.exp2(scale_2 * s - lax.broadcast_in_dim(m, s.shape, [0]))
            return p, l + sum_by_thread(p)

        def careful_softmax(s, m, l):
            """p and the new (m, l, alpha)."""
            m_new = jnp.maximum(m, scale_2 * s.max(axis=1))
            alpha = jnp.exp2(m - m_new)
            p, l = softmax_by_guess(s, m_new, lax.broadcast_in_dim(alpha, l.shape, [0]) * l)
            return p, (m_new, l, alpha)

        def sum_by_thread(p):
            """(block_q, 8), columns 8 apart summed up: they are a thread's own.

            A whole row is four threads'.
            """
            parts = [p[:, start : start + 8] for start in range(0, block_k, 8)]
            while len(parts) > 1:
                parts = [functools.reduce(jnp.add, two) for two in itertools.batched(parts, 2)]
            return parts[0]

        def narrow(p):
            # Not before p v of the tile before is done, which reads the registers this goes to.
            return lax.optimization_barrier(lax.optimization_barrier(p).astype(problem.dtype))

        def slot_of(step):
            return lax.rem(step, stages)

        def values(slot):
            """What p is multiplied with: a tile of values, and the constants beside it."""
            if low is None:
                return v_smem.at[slot]
            return Beside(v_smem.at[slot], low.constants if is_wide else low.constants.T)

        def one_list(start, count, step):
            """Attention of my turns start, ..., start + count - 1. The rings have seen `step` key tiles before."""

            def load_q(i):
                @pl.when(i < count)
                def _():
                    q_start, n, b, _ = place(start + i)
                    mine = q_ref.at[b, pl.ds(q_start + me * block_q, block_q), n]
                    plgpu.copy_gmem_to_smem(mine, queries(i), q_loaded.at[me])

            def wait_for_first(i, step):
                """For the operands of the first scores of a turn."""

                @pl.when(i < count)
                def _():
                    plgpu.barrier_wait(q_loaded.at[me])
                    plgpu.barrier_wait(k_loaded.at[slot_of(step)])

            def begin(i, step, s):
                """(m, l, p) after the first key tile of a turn, from its scores."""
                my_start, _, _ = mine_of(start + i)

                @pl.when(i < count)
                def _():
                    plgpu.barrier_arrive(k_free.at[slot_of(step)])

                if problem.S < block_k:
                    s = mask(s, my_start, 0)
                elif causal:  # the first queries do not see all of these keys; a loop takes fewer registers than a cond
                    s = lax.fori_loop(0, jnp.int32(my_start + 1 < block_k), lambda _, s: mask(s, my_start, 0), s)
                m = scale_2 * s.max(axis=1) + headroom  # finite, for key 0 is visible
                l = plgpu.layout_cast(jnp.zeros((block_q, 8), jnp.float32), MATRIX)
                p, l = softmax_by_guess(s, m, l)
                return m, l, narrow(p)

            def begin_alone(i, step):
                wait_for_first(i, step)
                return begin(i, step, product(queries(i), k_smem.at[slot_of(step)].T, interpret=interpret))

            def one_tile(i, state):
                step, worst, *first = state
                turn = start + i
                _, n, b, stop_all = place(turn)
                my_start, stop, unmasked = mine_of(turn)
                q_mine = queries(i)
                if tiles.ahead:
                    if low is not None:  # those of the turn before leave from where these queries go
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_q(i + 1)
                else:
                    first = begin_alone(i, step)

                def wait_for_k(j):
                    pl.when(j < stop)(lambda: plgpu.barrier_wait(k_loaded.at[slot_of(step + j)]))

                def one_key_tile(j, state, by_guess, masked):
                    acc, m, l, p = state
                    k_slot, v_slot = slot_of(step + j), slot_of(step + j - 1)

                    def while_pv_runs(s, state):
                        plgpu.barrier_arrive(k_free.at[k_slot])
                        s = mask(s, my_start, j) if masked else s
                        p_and_state = softmax_by_guess(s, m, state) if by_guess else careful_softmax(s, *state[:2])
                        # The compiler would gladly await p v first, and take the exponentials after. ptxas
                        # 13.0 did not move that wait across a loop, such as this one for the next keys.
                        p_and_state = lax.optimization_barrier(p_and_state)
                        wait_for_k(j + 1)
                        return p_and_state

                    plgpu.barrier_wait(v_loaded.at[v_slot])
                    qk = q_mine, k_smem.at[k_slot]
                    pv = acc, p, values(v_slot)
                    state = l if by_guess else (m, l, m)
                    acc, p, state = overlapped(qk, pv, while_pv_runs, state, interpret=interpret)
                    plgpu.barrier_arrive(v_free.at[v_slot])
                    if by_guess:
                        return acc, m, state, narrow(p)
                    m, l, alpha = state
                    acc = jax.tree.map(lambda acc: acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), acc)
                    return acc, m, l, narrow(p)

                wait_for_k(1)
                head_dim, more = q_mine.shape[1], len(constants)
                zeros = lambda width: plgpu.layout_cast(jnp.zeros((block_q, width), jnp.float32), MATRIX)
                if low is None:
                    acc = zeros(head_dim)
                else:
                    acc = zeros(head_dim + more) if is_wide else (zeros(head_dim), zeros(more))
                state = acc, *first
                # Without the mask, and with it; by guess, and carefully if a guess of mine has failed.
                guess = lse_smem[warpgroups, 2 * me + 1] == 0 if guesses else False
                for by_guess, masked in itertools.product((True, False), (False, True)):
                    if by_guess > guesses or masked > (causal or problem.S % block_k > 0):
                        continue
                    first_j, stop_j = (unmasked, stop) if masked else (1, unmasked)
                    stop_j = jnp.where(guess == by_guess, stop_j, first_j)
                    body = functools.partial(one_key_tile, by_guess=by_guess, masked=masked)
                    state = lax.fori_loop(first_j, stop_j, body, state)
                acc, m, l, p = state
                row_sum = l.sum(axis=1)
                worst = jnp.where(row_sum > worst, row_sum, worst)  # of my turns so far
                last, next_step = slot_of(step + stop - 1), step + stop_all

                def pass_over():
                    """Free the keys that only the warpgroups after me need."""
                    plgpu.barrier_arrive(v_free.at[last])

                    @pl.loop(stop, stop_all)
                    def _(j):
                        plgpu.barrier_wait(k_loaded.at[slot_of(step + j)])
                        plgpu.barrier_arrive(k_free.at[slot_of(step + j)])
                        plgpu.barrier_wait(v_loaded.at[slot_of(step + j)])
                        plgpu.barrier_arrive(v_free.at[slot_of(step + j)])

                def judge():
                    """A thread knows the sums of two rows, and all must agree: through SMEM.

                    That takes time. So it is done after the turns 0, 3, 7, 11, ... and the
                    last, for all since the time before.
                    """
                    lse = plgpu.load(lse_smem.at[me], layout=COLUMNS)
                    # Not the maximum of lse: a NaN beside it must not hide it.
                    failed = jnp.where(lse == jnp.inf, 1.0, 0.0).max() > 0
                    since = jnp.where(i < 4, jnp.minimum(i, 1), i - i % 4)
                    pl.when(failed)(lambda: do_again(start + since, turn + 1))

                def keep_low_bits(out):
                    """In SMEM, where the queries were: nobody needs them any more."""
                    low = low_bits(out, out.astype(problem.dtype))
                    q_mine[...] = lax.bitcast_convert_type(low, problem.dtype)

                def store(acc):
                    weight = 1 / row_sum
                    if low is not None:
                        acc, of_constants = (acc[:, :head_dim], acc[:, head_dim:]) if is_wide else acc
                        weight = sum(constants) / of_constants.sum(axis=1)
                    out = acc * lax.broadcast_in_dim(weight, acc.shape, [0])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the out before this one has left SMEM
                    o_mine[...] = out.astype(problem.dtype)
                    if low is not None and tiles.ahead:
                        keep_low_bits(out)
                    lse = (m - headroom + jnp.log2(row_sum * 2.0**headroom)) / LOG2_E
                    if guesses:
                        lse = jnp.where(worst > jnp.where(guess, jnp.float32(most), jnp.inf), jnp.inf, lse)
                    lse_smem[me, :] = lse
                    plgpu.commit_smem()
                    if guesses:
                        pl.when(guess & ((i == 0) | (i % 4 == 3) | (i + 1 == count)))(judge)

                    @pl.when(my_start < problem.T)
                    def _():  # TMA drops rows of out past T', and lse_ref has room for them
                        mine = pl.ds(my_start, block_q)
                        plgpu.copy_smem_to_gmem(o_mine, out_ref.at[b, mine, n])
                        plgpu.copy_smem_to_gmem(lse_smem.at[me], lse_ref.at[b, n, mine])
                        if low is not None and tiles.ahead:
                            plgpu.copy_smem_to_gmem(q_mine, low.ref.at[b, mine, n])

                    if low is not None and not tiles.ahead:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        keep_low_bits(out)
                        plgpu.commit_smem()

                        @pl.when(my_start < problem.T)
                        def _():
                            plgpu.copy_smem_to_gmem(q_mine, low.ref.at[b, pl.ds(my_start, block_q), n])

                plgpu.barrier_wait(v_loaded.at[last])
                pv = acc, p, values(last)
                if not tiles.ahead:
                    acc = accumulate(*pv, interpret=interpret)
                    pass_over()
                    store(acc)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_q(i + 1)
                    return next_step, worst

                # Others have more keys to see, and wait for the values that I hold.
                alone = stop < stop_all

                def ready():
                    @pl.when(alone)
                    def _():
                        plgpu.wgmma_wait(0)
                        pass_over()

                    wait_for_first(i + 1, next_step)

                def meanwhile(acc):
                    pl.when(~alone)(pass_over)
                    store(acc)

                # In the last turn these operands are stale, and nobody uses what comes of them.
                qk = queries(i + 1), k_smem.at[slot_of(next_step)]
                s = accumulate_then(pv, ready, qk, meanwhile, interpret=interpret)
                return next_step, worst, *begin(i + 1, next_step, s)

            load_q(0)
            worst = plgpu.layout_cast(jnp.zeros((block_q,), jnp.float32), ROWS)
            state = step, worst, *(begin_alone(0, step) if tiles.ahead else ())
            state = lax.fori_loop(0, count, one_tile, state)
            plgpu.wait_smem_to_gmem(0)
            return state[0]

        for_each_list(one_list)

    def memory():
        plgpu.set_max_registers(REGISTERS[warpgroups][1], action="decrease")

        def one_tile(turn, step):
            _, n, b, stop = place(turn)

            def fetch(ref, smem, loaded, free, j):
                j = jnp.asarray(j, jnp.int32)
                slot = lax.rem(step + j, stages)
                plgpu.barrier_wait(free.at[slot])
                # Grouped queries: `group` query heads read one key/value head, in place.
                tile = ref.at[b, pl.ds(j * block_k, block_k), lax.div(n, problem.group)]
                plgpu.copy_gmem_to_smem(tile, smem.at[slot], loaded.at[slot])

            keys = k_ref, k_smem, k_loaded, k_free
            values = v_ref, v_smem, v_loaded, v_free
            fetch(*keys, 0)

            @pl.loop(1, stop)
            def _(j):  # in the order of their use
                fetch(*keys, j)
                fetch(*values, j - 1)

            fetch(*values, stop - 1)
            return step + stop

        for_each_list(
            lambda start, count, step: lax.fori_loop(0, count, lambda i, step: one_tile(start + i, step), step)
        )
        for slot in range(stages):  # leave no barrier with an arrival that nobody saw
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])

    pl.when(me < warpgroups)(compute)
    pl.when(me == warpgroups)(memory)


class LowBits(NamedTuple):
    """The refs that forward_kernel has besides when it keeps the low bits of out.

    ref: as out_ref. constants_ref, constants: in GMEM and SMEM, as a `Beside` wants them. Where `one_product_serves`
    (16, 64), and each row begins with CONSTANTS; else (8, 64), row i 64 times CONSTANTS[i].
    constants_loaded: a barrier.
    """

    ref: jax.Array
    constants_ref: jax.Array
    constants: jax.Array
    constants_loaded: jax.Array


class Deal(NamedTuple):
    """What a tile scheduler does besides taking turns, see `dealt`."""

    backward: int | None
    shift: int


def dealt(turn, program, programs, count, deal, xp=jnp):
    """The tile scheduler: which of `count` tiles of queries is a program's in a turn.

    It returns a place in their list. The programs take turns, but in a full round each
    stands `shift` places further on than in the one before. And every other full
    round goes backwards, those where turn % 2 is `backward`. xp: the NumPy to
    compute with.
    """
    rem = lax.rem if xp is jnp else np.remainder
    place = program
    index = turn * programs + place
    full_round = (turn + 1) * programs <= count
    if deal.shift:
        place = rem(program + deal.shift * turn, programs)
        index = xp.where(full_round, turn * programs + place, index)
    if deal.backward is not None:
        # These two lines exchanged, some causal calls once took 3 % longer on an H200.
        is_backward = full_round & (turn % 2 == deal.backward)
        backwards = turn * programs + (programs - 1 - place)
        index = xp.where(is_backward, backwards, index)
    return index


def deal_of(problem, tiles, programs):
    """The `Deal` for a problem whose work `programs` share.

    Full calls: the last tile of a head may have few rows, and turn by turn another program gets it. Causal: of six
    schedules the one by which the busiest program has least to do.
    """
    if problem.band.right != 0:
        return Deal(None, 1)
    work = work_in_order(problem, tiles)
    choices = [Deal(backward, shift) for shift in (0, 8, programs // 3) for backward in (1, 0)]
    return min(choices, key=lambda deal: work_of_programs(work, programs, deal).max())


def work_in_order(problem, tiles):
    """Tiles of keys that each tile of queries of a causal call sees, and two for what it takes besides, in order."""
    rows, every = tiles.warpgroups * tiles.block_q, pl.cdiv(problem.S, tiles.block_k)
    q_tiles = pl.cdiv(problem.T, rows)
    i, _ = causal_order(np.arange(q_tiles * problem.N * problem.B), q_tiles, problem, np)
    return np.minimum(((i + 1) * rows - 1) // tiles.block_k + 1, every) + 2


def work_of_programs(work, programs, deal):
    """The sum of work that a tile scheduler gives each program."""
    turns = np.arange(pl.cdiv(len(work), programs))[:, None]
    places = dealt(turns, np.arange(programs), programs, len(work), deal, np)
    return np.where(places < len(work), work[np.minimum(places, len(work) - 1)], 0).sum(axis=0)


def heads_together(problem):
    """How many heads a causal call works at before the next: as many as the cache holds keys and values of.

    All of them with a small head_dim, where memory keeps up, and parts would cost some balance for nothing.
    """
    every, head_dim = problem.N * problem.B, padded_head_dim(problem.H)
    keys = min(problem.T, problem.S)  # no query sees a later one
    bytes_of_keys_and_values = 2 * keys * head_dim * problem.dtype.itemsize
    return every if head_dim <= 64 else min(every, problem.group * max(1, CACHED // bytes_of_keys_and_values))


def causal_order(index, q_tiles, problem, xp=jnp):
    """(tile of queries, head) at a place of the list of all pairs of a causal call.

    index: a place, or an array of places. The heads come in parts, `heads_together`.
    In the last part the longest tiles come first, in the one before it they come last,
    and so on in turns, so that the ends of two parts fit each other. xp: the NumPy to
    compute with.
    """
    div, rem = (lax.div, lax.rem) if xp is jnp else (np.floor_divide, np.remainder)
    heads, width = problem.N * problem.B, heads_together(problem)
    parts = pl.cdiv(heads, width)
    part = div(index, width * q_tiles) if parts > 1 else 0
    index = index - part * width * q_tiles
    here = xp.minimum(width, heads - part * width) if heads % width else width
    level, head = div(index, here), part * width + rem(index, here)
    return xp.where((parts - 1 - part) % 2 == 1, level, q_tiles - 1 - level), head


def why_not(problem):
    """Why this kernel cannot serve a problem, or None where it can. It knows no lengths either."""
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16 only, not {problem.dtype}"
    if problem.band not in (Band(), Band(right=0)):
        return "it takes no local window"
    return None


def default_tiles(problem):
    """The fastest `Tiles` for a problem: from the tuner's table of this GPU, or `untuned_tiles`.

    With fewer queries in a turn where a program would have less than four turns: one turn more or less is much
    then. Without a guess where equal logits alone could bring l above MOST.
    """
    tuned = tuned_tiles("forward", problem, problem.S)
    tiles = Tiles(**tuned["forward"]) if tuned else untuned_tiles(problem)
    turns = pl.cdiv(problem.T, tiles.block_q * tiles.warpgroups) * problem.N * problem.B / core_count(NUM_SMS)
    if turns < 4 and tiles.warpgroups > 2 and padded_head_dim(problem.H) == 64:
        tiles = tiles._replace(block_k=128, stages=4, warpgroups=2, guess=True)
    too_long = problem.S > MOST * 2 ** HEADROOM.get(problem.dtype.name, 0)
    return tiles._replace(guess=tiles.guess and not too_long)


def with_room_for_constants(tiles, problem):
    """The tiles, or others that leave registers for the sums of constants: tried by hand on an H100 (JAX 0.11.2)."""
    if problem.H > 128:
        return tiles._replace(programs=None)
    if tiles.warpgroups == 4 and 2048 < problem.S <= 8192:
        return tiles._replace(warpgroups=3)
    return tiles


def one_product_serves(tiles, head_dim):
    """Whether p is multiplied with values and constants at once, see `warpgroup.Beside`: not with short tiles."""
    return head_dim == 64 and tiles.block_k >= 128


def untuned_tiles(problem):
    """The `Tiles` for a GPU without a table: the fastest of those tried by hand on an NVIDIA H200 (JAX 0.11.2)."""
    programs = core_count(NUM_SMS)
    if problem.H <= 64:
        if problem.band.right == 0:
            return Tiles(block_k=64, stages=4, warpgroups=4, programs=programs, guess=problem.S > 2048)
        return Tiles(warpgroups=3, programs=programs)
    if problem.H <= 128:
        return Tiles(programs=programs, guess=problem.S > 2048 or problem.band.right != 0)
    return Tiles(block_k=64, ahead=False, programs=programs, guess=False)


def _padded(array, length, head_dim):
    """array (B, T, N, H) with zeros behind its T and H axes."""
    _, T, _, H = array.shape
    if (T, H) == (length, head_dim):
        return array
    return jnp.pad(array, ((0, 0), (0, length - T), (0, 0), (0, head_dim - H)))


def forward(call, *, tiles=None, is_persistent=True, keeps_low_bits=False, interpret=False):
    """Attention of a checked `Call` by the kernel above.

    Returns out (B, T, N, H) in the dtype of query and lse (B, N, T) in float32; with keeps_low_bits also those of
    out, int16 and of its shape. Where T and S are
    multiples of eight and of at least one tile, H is one of HEAD_DIMS and the scale is positive, the
    arrays are not copied, and lse only where T is no multiple of block_q.
    tiles: a `Tiles`, or None for the fastest known. is_persistent: False gives each tile of queries a
    program of its own. A program that waits for an SM, because a transfer from another GPU
    occupies it, is then one of many; a persistent one would begin its whole share late.
    interpret: False, or a `plgpu.InterpretGPUParams` that says how to run on a CPU.
    """
    problem = call.problem
    if reason := why_not(problem):
        raise NotImplementedError(f"the hopper kernel cannot serve this call: {reason}")
    if tiles is None:
        tiles = default_tiles(problem)
        tiles = with_room_for_constants(tiles, problem) if keeps_low_bits else tiles
    if not is_persistent:
        tiles = tiles._replace(programs=None)
    query, problem = _with_positive_scale(call.query, problem)
    B, T, S, N, H = problem.B, problem.T, problem.S, problem.N, problem.H
    block_q, block_k, stages, warpgroups = tiles.block_q, tiles.block_k, tiles.stages, tiles.warpgroups
    head_dim = padded_head_dim(H)
    count = pl.cdiv(T, block_q * warpgroups) * B * N
    programs = count if tiles.programs is None else min(tiles.programs, count)
    # TMA cuts GMEM into rows of eight, and a tile must fit the array.
    padded_T, padded_S = (max(pl.cdiv(length, 8) * 8, block) for length, block in ((T, block_q), (S, block_k)))

    def smem(*shape):
        return plgpu.SMEM((*shape, head_dim), problem.dtype, transforms=SWIZZLED)

    own_rows = warpgroups, block_q
    out_type = jax.ShapeDtypeStruct((B, padded_T, N, head_dim), problem.dtype)
    lse_type = jax.ShapeDtypeStruct((B, N, pl.cdiv(T, block_q) * block_q), jnp.float32)
    constants = jnp.array([[number] * 64 for number in CONSTANTS[problem.dtype.name]], problem.dtype)
    if one_product_serves(tiles, head_dim):
        constants = jnp.pad(jnp.tile(constants[:, 0], (16, 1)), ((0, 0), (0, 56)))

    def body(*refs):
        refs, low = list(refs), None
        if keeps_low_bits:
            low = LowBits(refs.pop(6), refs.pop(3), refs.pop(-2), refs.pop(-1))
        forward_kernel(*refs, low=low, problem=problem, tiles=tiles, programs=programs, interpret=bool(interpret))

    kernel = plgpu.kernel(
        body,
        out_type=[out_type, lse_type, *[out_type] * keeps_low_bits],
        scratch_types=[
            smem(2, *own_rows) if tiles.ahead else smem(*own_rows),
            smem(stages, block_k),
            smem(stages, block_k),
            smem(*own_rows) if tiles.ahead else None,
            plgpu.SMEM((warpgroups + 1, block_q), jnp.float32),
            plgpu.Barrier(num_barriers=warpgroups),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups),
            *[plgpu.SMEM(constants.shape, problem.dtype, transforms=SWIZZLED), plgpu.Barrier()] * keeps_low_bits,
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        # Every SMEM access is ordered by the barriers above, and reductions of rows need no SMEM.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret or None,
    )
    out, lse, *low = kernel(
        _padded(query, padded_T, head_dim),
        _padded(call.key, padded_S, head_dim),
        _padded(call.value, padded_S, head_dim),
        *[constants] * keeps_low_bits,
    )
    low = (lax.bitcast_convert_type(array[:, :T, :, :H], jnp.int16) for array in low)
    return out[:, :T, :, :H], lse[:, :, :T], *low


def _with_positive_scale(query, problem):
    """The same logits from a positive scale, which lets the kernel scale the largest score."""
    if problem.scale > 0:
        return query, problem
    if problem.scale == 0:
        return jnp.zeros_like(query), dataclasses.replace(problem, scale=1.0)
    return -query, dataclasses.replace(problem, scale=-problem.scale)
