"""The Hopper forward kernel: specialised warpgroups, in Pallas Mosaic GPU.

FlashAttention-3 (arXiv 2407.08608) without its turns. For block_q queries and one tile
of block_k keys after another, in base 2 (scale_2 = scale log2 e):

    s_j    = q k_j^T
    m'     = max(m, scale_2 rowmax s_j)      alpha = 2^(m - m')
    p_j    = 2^(scale_2 s_j - m')            l     = alpha l + rowsum p_j
    acc    = alpha (acc + p_{j-1} v_{j-1})   one tile late
    out    = (acc + p v of the last tile) / l
    lse    = ln 2 (m + log2 l)

What runs at the same time is all of the art. A program has `warpgroups` compute
warpgroups of block_q queries each and one memory warpgroup:

    memory     fetches k_j and v_j by TMA into rings of `stages` slots, as soon as a
               slot is free
    compute    issues s_j = q k_j^T and then acc += p_{j-1} v_{j-1} to the tensor core,
               and while that computes the second, takes the exponentials of the first
    compute    the other compute warpgroups do the same at other times, which fills the
               gaps

The program goes through the turns that its tile scheduler gives it. It fetches the next
q while it works at this one, and issues the first scores of the next to the tensor core
together with the last product of this one: between two tiles of queries, too, the
tensor core has something to do. (Without `ahead` there is shared memory for one tile of
queries, and out leaves through it; with `exact_out`, too, from H = 128 on.)

Three parts can be exchanged. `softmax` chooses m: `RunningMaximum`, as above, or
`guess.Guess`. `out` makes out of acc: `RoundedOut`, as above, or `exact_out.ExactOut`.
`logits` hides keys and caps scores, see `forward_logits`.

Registers of a compute warpgroup: s and p (block_q, block_k), acc (block_q, H), m
(block_q,), and l (block_q, 8), of which a thread has what it summed itself: the sum
over threads comes last, not in each step.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.ring import Ring
from helpers.attention.hopper.tile_scheduler import TileScheduler, Turns
from helpers.attention.hopper.visible_tiles import VisibleTiles
from helpers.attention.hopper.warpgroup import MATRIX, accumulate, accumulate_then, overlapped, product, take_registers
from helpers.attention.online_softmax import LOG2_E
from helpers.attention.problem import Problem


class Refs(NamedTuple):
    """The arrays in GMEM, as they are in the caller's hands.

    T' and S' are T and S rounded up to eight rows and at least one tile, T'' is T
    rounded up to block_q. constants and low: of `exact_out.ExactOut`. The others: of
    `forward_logits`.
    """

    q: jax.Array  # (B, T', N, H)
    k: jax.Array  # (B, S', K, H)
    v: jax.Array
    out: jax.Array  # (B, T', N, H)
    lse: jax.Array  # (B, N, T''), float32
    constants: jax.Array | None = None
    low: jax.Array | None = None
    visible_tiles: jax.Array | None = None
    query_ids: jax.Array | None = None
    key_ids: jax.Array | None = None
    last_values: jax.Array | None = None
    sinks: jax.Array | None = None
    counter: jax.Array | None = None  # of `DynamicScheduler`


class Scratch(NamedTuple):
    """What a program has in SMEM. Below, lse has one row more for a `DynamicScheduler`."""

    q: jax.Array  # (2, warpgroups, block_q, H): these queries and the next
    keys: Ring  # of (block_k, H)
    values: Ring
    out: jax.Array | None  # (warpgroups, block_q, H), on its way to GMEM
    lse: jax.Array  # (warpgroups + 1, block_q), float32; the last row: of `guess.Guess`
    q_loaded: jax.Array  # a barrier for each compute warpgroup
    guess_checked: jax.Array  # a barrier: of `guess.Guess`
    low: jax.Array | None = None  # as out: its low bits, by `exact_out.ExactOut`
    constants_loaded: jax.Array | None = None  # a barrier: of `exact_out.ExactOut`
    places_known: jax.Array | None = None  # barriers: of `DynamicScheduler`


class Turn(NamedTuple):
    """Turn i of a list, as a compute warpgroup sees it."""

    i: jax.Array
    step: jax.Array  # how many key tiles the rings have seen before
    q: jax.Array  # my queries in SMEM, (block_q, H)
    q_start: jax.Array  # the first of them, in head n of batch entry b
    n: jax.Array
    b: jax.Array
    unmasked: jax.Array  # the end of my key tiles that need no mask
    stop: jax.Array  # and of all of mine
    stop_all: jax.Array  # and of those that some warpgroup of the program needs
    visible: VisibleTiles | None  # where they are not the first ones

    @property
    def next_step(self):
        """`step` of the next turn."""
        return self.step + self.stop_all


@dataclass(frozen=True)
class Part:
    """What a part of the kernel works with, in warpgroup number `me` of a program.

    tiles: see `forward.Tiles`.
    """

    problem: Problem
    tiles: NamedTuple
    refs: Refs
    smem: Scratch
    me: jax.Array
    interpret: bool


@dataclass(frozen=True)
class Program(Part):
    """A program, as one of its warpgroups sees it."""

    scheduler: TileScheduler
    turns: jax.Array  # how many it has
    softmax: "RunningMaximum"
    out: "RoundedOut"
    logits: "Part"  # of `forward_logits`

    def queries(self, i):
        """Where my queries of turn i of a list are in SMEM."""
        q = self.smem.q
        return q.at[lax.rem(i, 2), self.me] if self.tiles.ahead else q.at[self.me]

    def turn(self, turns, i, step):
        """The `Turn` i of a list."""
        place = self.scheduler.place(turns.start + i)
        q_start = place.q_start + self.me * self.tiles.block_q
        ends = self.scheduler.ends(place, q_start)
        mine = q_start, place.n, place.b, *ends
        return Turn(i, step, self.queries(i), *mine, place.stop, place.visible)


def forward_kernel(refs, smem, *, problem, tiles, programs, softmax, out, logits, interpret):
    """Writes out and lse. Every warpgroup of every program calls it.

    softmax: `RunningMaximum` or a class like it. out: `RoundedOut` or a class like it.
    logits: `forward_logits.Logits` or a class like it.
    """
    index, me = lax.axis_index("program"), lax.axis_index("warpgroup")
    scheduler = logits.scheduler(refs, smem, interpret, problem, tiles, programs, index)
    own = problem, tiles, refs, smem, me, interpret
    own_parts = softmax(*own), out(*own), logits(*own)
    program = Program(*own, scheduler, scheduler.turns, *own_parts)
    pl.when(me < tiles.warpgroups)(lambda: compute(program))
    pl.when(me == tiles.warpgroups)(lambda: memory(program))


def memory(program):
    """The memory warpgroup: fetches keys and values in the order of their use."""
    refs, smem, block_k = program.refs, program.smem, program.tiles.block_k
    take_registers(program.tiles, memory=1)
    scheduler = program.scheduler

    def one_turn(turns, i, step):
        place = scheduler.place(turns.start + i)
        _, n, b, stop, _ = place

        def fetch(ring, ref, j):
            # An array: JAX refuses a slice past the end if it is known beforehand.
            tile = place.key_tile(jnp.asarray(j, jnp.int32))
            # Grouped queries: `group` query heads read one key/value head, in place.
            kv_head = lax.div(n, program.problem.group)
            keys = ref.at[b, pl.ds(tile * block_k, block_k), kv_head]
            if ref is not refs.v or refs.last_values is None:
                ring.fetch(step + j, keys)
                return
            is_last = (tile + 1) * block_k > place.visible.key_length
            last = refs.last_values.at[b, :, kv_head]
            pl.when(is_last)(lambda: ring.fetch(step + j, last))
            pl.when(~is_last)(lambda: ring.fetch(step + j, keys))

        fetch(smem.keys, refs.k, 0)

        def keys_and_values_before(j):
            fetch(smem.keys, refs.k, j)
            fetch(smem.values, refs.v, j - 1)

        taken = scheduler.taken_before(place)
        pl.loop(1, taken)(keys_and_values_before)
        scheduler.take(turns, i + 1)
        pl.loop(taken, stop)(keys_and_values_before)
        fetch(smem.values, refs.v, stop - 1)
        scheduler.await_place(turns, i + 1)
        return step + stop

    def one_list(start, count, step):
        turns = Turns(start, count)
        scheduler.take(turns, 0)
        scheduler.await_place(turns, 0)
        return scheduler.for_each(turns, functools.partial(one_turn, turns), step)

    program.softmax.for_each_list(program.turns, one_list)
    smem.keys.drain()
    smem.values.drain()


def compute(program):
    """A compute warpgroup: attention of its block_q queries of every turn."""
    take_registers(program.tiles, memory=0)
    program.softmax.begin(program.turns)
    program.out.begin()
    program.smem.keys.open()
    program.smem.values.open()

    def one_list(start, count, step):
        turns = Turns(start, count)
        load_queries(program, turns, 0)
        state = step, program.softmax.kept_at_first()
        if program.tiles.ahead:
            state += prologue(program, turns, 0, step)
        body = functools.partial(one_turn, program, turns)
        state = program.scheduler.for_each(turns, body, state)
        plgpu.wait_smem_to_gmem(0)
        return state[0]

    program.softmax.for_each_list(program.turns, one_list)


def one_turn(program, turns, i, state):
    """Attention of a tile of queries. state: (step, what softmax keeps, *m, l and p).

    With `ahead` the first key tile is done, and that of the next turn is in the end.
    """
    step, kept, *first = state
    turn = program.turn(turns, i, step)
    if program.tiles.ahead:
        if not program.tiles.dynamic:
            load_next_queries(program, turns, i)
    else:
        first = prologue(program, turns, i, step)
    wait_for_keys(program, turn, 1)
    acc = program.out.zeros()
    is_last = functools.partial(program.scheduler.is_last, turns, i)
    softmax = program.softmax.in_turn(turns, turn, kept, is_last)
    acc, m, l, p = over_key_tiles(program, turns, turn, softmax, (acc, *first))
    l = l.sum(axis=1)
    softmax = softmax.after(l)

    last, next_step = step + turn.stop - 1, turn.next_step
    program.smem.values.wait(last)
    pv = acc, p, *program.smem.values.at(last)
    store = functools.partial(epilogue, program, turn, softmax, m, l)
    finish = last_product_and_next_scores if program.tiles.ahead else last_product
    next_first = finish(program, turns, turn, pv, store)
    return next_step, softmax.kept, *next_first


# The beginning of a turn


def load_queries(program, turns, i):
    """Begin to fetch my queries of turn i, if there is one."""
    me, block_q = program.me, program.tiles.block_q
    program.scheduler.await_place(turns, i)

    @pl.when(program.scheduler.has(turns, i))
    def _():
        place = program.scheduler.place(turns.start + i)
        rows = pl.ds(place.q_start + me * block_q, block_q)
        mine = program.refs.q.at[place.b, rows, place.n]
        loaded = program.smem.q_loaded.at[me]
        plgpu.copy_gmem_to_smem(mine, program.queries(i), loaded)


def load_next_queries(program, turns, i):
    """The same for the turn after i, while that goes on."""
    if program.smem.out is None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # where they go was an out, or low bits
    load_queries(program, turns, i + 1)


def wait_for_first(program, turns, i, step):
    """Until the operands of the first scores of turn i are there, if there is one."""

    @pl.when(program.scheduler.has(turns, i))
    def _():
        plgpu.barrier_wait(program.smem.q_loaded.at[program.me])
        program.smem.keys.wait(step)


def prologue(program, turns, i, step):
    """(m, l, p) after the first key tile of turn i."""
    wait_for_first(program, turns, i, step)
    (k,) = program.smem.keys.at(step)
    s = product(program.queries(i), k.T, interpret=program.interpret)
    return first_softmax(program, turns, i, step, s)


def first_softmax(program, turns, i, step, s):
    """(m, l, p) after the first key tile of turn i, from its scores."""
    problem, block_q = program.problem, program.tiles.block_q
    turn = program.turn(turns, i, step)
    pl.when(program.scheduler.has(turns, i))(lambda: program.smem.keys.release(step))
    s = program.logits.of_first_tile(turn, s)
    m = program.softmax.first_maximum(s)  # finite
    l = plgpu.layout_cast(jnp.zeros((block_q, 8), jnp.float32), MATRIX)
    p, l = exponentials(problem, s, m, l)
    return m, l, narrow(p, problem.dtype)


# The key tiles after the first


def wait_for_keys(program, turn, j):
    """Until the keys of tile j are there, if it is one of mine."""
    pl.when(j < turn.stop)(lambda: program.smem.keys.wait(turn.step + j))


def over_key_tiles(program, turns, turn, softmax, state):
    """(acc, m, l, p) after all of my key tiles, from those after the first.

    They go without a mask as far as possible, and each by the rule that softmax has for
    this turn. Of several rules one holds; the loops of the others have no steps.
    """
    masks = (False, True) if program.logits.has_masks else (False,)
    loops = [(*rule, is_masked) for rule in softmax.rules() for is_masked in masks]
    if program.tiles.dynamic:  # all without a mask, and then the place of the next turn
        loops.sort(key=lambda loop: loop[-1])
    for number, (rule, holds, is_masked) in enumerate(loops):
        if program.tiles.dynamic and program.tiles.ahead and 2 * number == len(loops):
            load_next_queries(program, turns, turn.i)
        ends = (turn.unmasked, turn.stop) if is_masked else (1, turn.unmasked)
        start, stop = ends[0], jnp.where(holds, ends[1], ends[0])
        body = functools.partial(one_key_tile, program, turn, rule, is_masked)
        state = lax.fori_loop(start, stop, body, state)
    return state


def one_key_tile(program, turn, rule, is_masked, j, state):
    """A step: the softmax of key tile j, while the product of the tile before runs."""
    acc, m, l, p = state
    keys, values, step = program.smem.keys, program.smem.values, turn.step + j

    def while_pv_runs(s, carried):
        keys.release(step)
        s = program.logits.of_tile(turn, s, j, is_masked)
        # The compiler would gladly await p v first, and take the exponentials after.
        # ptxas 13.0 did not move that wait across a loop, such as this one for the
        # next keys.
        p_and_carried = lax.optimization_barrier(rule.softmax(s, m, carried))
        wait_for_keys(program, turn, j + 1)
        return p_and_carried

    qk = turn.q, *keys.at(step)
    values.wait(step - 1)
    pv = acc, p, *values.at(step - 1)
    carried, interpret = rule.carried(m, l), program.interpret
    acc, p, carried = overlapped(qk, pv, while_pv_runs, carried, interpret=interpret)
    values.release(step - 1)
    acc, m, l = rule.rescaled(acc, m, carried)
    return acc, m, l, narrow(p, program.problem.dtype)


def exponentials(problem, s, m, l):
    """p of scores, and the new l."""
    scale_2 = problem.scale * LOG2_E
    p = jnp.exp2(scale_2 * s - lax.broadcast_in_dim(m, s.shape, [0]))
    return p, l + sum_by_thread(p)


def sum_by_thread(p):
    """(block_q, 8), columns 8 apart summed up: they are a thread's own.

    A whole row is four threads'.
    """
    parts = [p[:, start : start + 8] for start in range(0, p.shape[1], 8)]
    while len(parts) > 1:
        parts = [functools.reduce(jnp.add, two) for two in itertools.batched(parts, 2)]
    return parts[0]


def narrow(p, dtype):
    """p in 16 bits.

    Not before p v of the tile before is done, which reads the registers this goes to.
    """
    return lax.optimization_barrier(lax.optimization_barrier(p).astype(dtype))


# The end of a turn


def pass_over(program, turn):
    """Free my last values, and the tiles that only the warpgroups after me need."""
    keys, values = program.smem.keys, program.smem.values
    values.release(turn.step + turn.stop - 1)

    @pl.loop(turn.stop, turn.stop_all)
    def _(j):
        for ring in (keys, values):
            ring.wait(turn.step + j)
            ring.release(turn.step + j)


def last_product(program, turns, turn, pv, store):
    """The last product of a turn, stored; then its queries make room for the next."""
    acc = accumulate(*pv, interpret=program.interpret)
    pass_over(program, turn)
    store(acc)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    load_queries(program, turns, turn.i + 1)
    return ()


def last_product_and_next_scores(program, turns, turn, pv, store):
    """The last product of a turn, stored while the first scores of the next are made.

    Returns (m, l, p) after the first key tile of the next.
    """
    following, next_step = turn.i + 1, turn.next_step
    # Others have more keys to see, and wait for the values that I hold.
    alone = turn.stop < turn.stop_all

    def ready():
        @pl.when(alone)
        def _():
            plgpu.wgmma_wait(0)
            pass_over(program, turn)

        wait_for_first(program, turns, following, next_step)

    def meanwhile(acc):
        pl.when(~alone)(lambda: pass_over(program, turn))
        store(acc)

    # In the last turn these operands are stale, and nobody uses what comes of them.
    qk = program.queries(following), *program.smem.keys.at(next_step)
    s = accumulate_then(pv, ready, qk, meanwhile, interpret=program.interpret)
    return first_softmax(program, turns, following, next_step, s)


def epilogue(program, turn, softmax, m, l, acc):
    """Divide, and send my rows of out and lse on their way."""
    refs, smem, me = program.refs, program.smem, program.me
    my_lse, my_out = smem.lse.at[me], turn.q if smem.out is None else smem.out.at[me]
    lse = functools.partial(softmax.lse, m, l, program.logits.constant)
    out, lse = program.logits.at_the_end(turn, program.out.divided(acc, l), lse)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the out before has left SMEM
    my_out[...] = out.astype(program.problem.dtype)
    my_lse[...] = lse()
    program.out.put_beside(out)
    plgpu.commit_smem()
    softmax.check_guess()

    @pl.when(turn.q_start < program.problem.T)
    def _():  # TMA drops rows of out past T', and refs.lse has room for them
        rows = pl.ds(turn.q_start, program.tiles.block_q)
        plgpu.copy_smem_to_gmem(my_out, refs.out.at[turn.b, rows, turn.n])
        plgpu.copy_smem_to_gmem(my_lse, refs.lse.at[turn.b, turn.n, rows])

    program.out.put_more(turn, out)


# Two of the parts that can be exchanged


@dataclass(frozen=True)
class RunningMaximum(Part):
    """m is the maximum of the scores that the row has seen, as in FlashAttention.

    This class is the rule for all steps, too: (p, carried) = softmax(s, m, carried).
    """

    kept = None  # what it carries from turn to turn

    def begin(self, turns):
        """A compute warpgroup calls this first."""

    def for_each_list(self, turns, one_list):
        """Call step = one_list(start, count, step) until all turns are done."""
        one_list(0, turns, jnp.int32(0))

    def kept_at_first(self):
        return self.kept

    def in_turn(self, turns, turn, kept, is_last):
        """Itself, as it is in a turn of a list."""
        return self

    def after(self, l):
        """Itself, after a turn with these sums of rows."""
        return self

    def maximum(self, s):
        return self.problem.scale * LOG2_E * s.max(axis=1)

    first_maximum = maximum

    def rules(self):
        """[(rule of a step, whether it holds in this turn)]"""
        return [(self, True)]

    def carried(self, m, l):
        return m, l, m  # the last keeps a place for alpha

    def softmax(self, s, m, carried):
        m, l, _ = carried
        m_new = jnp.maximum(m, self.maximum(s))
        alpha = jnp.exp2(m - m_new)
        l = lax.broadcast_in_dim(alpha, l.shape, [0]) * l
        p, l = exponentials(self.problem, s, m_new, l)
        return p, (m_new, l, alpha)

    def rescaled(self, acc, m, carried):
        m, l, alpha = carried
        return acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), m, l

    def lse(self, m, l, constant):
        """lse of my rows. constant: comes off m first, where it costs no digits."""
        return (m - constant + jnp.log2(l)) / LOG2_E

    def check_guess(self):
        """Called when the lse of my rows are in SMEM."""


@dataclass(frozen=True)
class RoundedOut(Part):
    """out = acc / l, rounded to 16 bits."""

    def begin(self):
        """A compute warpgroup calls this first."""

    def zeros(self, more=0):
        """acc before any product, with some columns more than out has."""
        shape = self.tiles.block_q, self.smem.q.shape[-1] + more
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)

    def divided(self, acc, l):
        """out in float32."""
        return acc * lax.broadcast_in_dim(1 / l, acc.shape, [0])

    def put_beside(self, out):
        """Called when the rounded out is in SMEM."""

    def put_more(self, turn, out):
        """Called when the rounded out is on its way to GMEM."""
