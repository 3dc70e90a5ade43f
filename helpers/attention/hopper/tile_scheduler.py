"""The tile scheduler of the Hopper forward kernel: which program works at which tile of queries, and when.

The kernel is persistent: there are as many programs as SMs, and each goes through a list of (tile of queries, head)
pairs. A place in the list of all pairs is `assigned` to a program and a turn; `causal_order` is the order of that list
under a causal mask. The host picks the `Assignment` for a call, and a program finds its own pairs by a few integer
operations. That is static; of a `DynamicScheduler`, a program takes the next place when it is about to need one.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.visible_tiles import VisibleTiles
from helpers.attention.hopper.warpgroup import L2_BUDGET, count_up, opaque, padded_head_dim
from helpers.attention.problem import Problem

OPEN = 2**30  # the count of a list of turns that ends where no place is left


class Turns(NamedTuple):
    """A list of turns of a program: `count` of them, from turn `start` on."""

    start: jax.Array
    count: jax.Array


class Place(NamedTuple):
    """What a program works at in a turn: queries from q_start on, in head n of batch entry b.

    stop: the end of the key tiles that they see. visible: which of these they visit, or
    None where that is from the first to the last.
    """

    q_start: jax.Array
    n: jax.Array
    b: jax.Array
    stop: jax.Array
    visible: VisibleTiles | None = None

    def key_tile(self, j):
        """The number of the key tile that comes after j others."""
        return j if self.visible is None else self.visible.at(j)


@dataclass(frozen=True)
class TileScheduler:
    """The turns of one of `programs` programs. tiles: see `forward.Tiles`."""

    problem: Problem
    tiles: NamedTuple
    programs: int
    program: jax.Array

    @property
    def is_causal(self):
        return self.problem.band.right == 0

    @property
    def q_block(self):
        """Queries of a turn, those of all compute warpgroups."""
        return self.tiles.warpgroups * self.tiles.block_q

    @property
    def q_tiles(self):
        return pl.cdiv(self.problem.T, self.q_block)

    @property
    def count(self):
        """How many pairs there are."""
        return self.q_tiles * self.problem.N * self.problem.B

    @property
    def turns(self):
        """How many of them are this program's."""
        return pl.cdiv(self.count - self.program, self.programs)

    @functools.cached_property
    def assignment(self):
        return best_assignment(self.problem, self.tiles, self.programs)

    def key_stop(self, q_stop):
        """The end of the key tiles that queries before q_stop see."""
        block_k = self.tiles.block_k
        every = pl.cdiv(self.problem.S, block_k)
        if not self.is_causal:
            return every
        return jnp.minimum(lax.div(q_stop + block_k - 1, block_k), every)

    def has(self, turns, i):
        """Whether a list has a turn i. Its place must be known."""
        return i < turns.count

    def is_last(self, turns, i):
        """Whether turn i of a list has none after it, whose place must be known."""
        return i + 1 == turns.count

    def for_each(self, turns, body, state):
        """state = body(i, state) for each turn i of a list."""
        return lax.fori_loop(0, turns.count, body, state)

    def taken_before(self, place):
        """Before which key tile of a place the next is taken."""
        return 1

    def take(self, turns, i):
        """Make known the place of turn i of a list. The memory warpgroup does."""

    def await_place(self, turns, i):
        """Until the place of turn i of a list is known. All warpgroups do, once."""

    def index(self, turn):
        """The place in the list of all pairs of this program in a turn."""
        return assigned(turn, self.program, self.programs, self.count, self.assignment)

    def place(self, turn):
        """The `Place` of this program in a turn."""
        index = self.index(turn)
        if self.is_causal:
            i, head = causal_order(index, self.q_tiles, self.problem)
        else:
            i, head = lax.rem(index, self.q_tiles), lax.div(index, self.q_tiles)
        q_start, N = i * self.q_block, self.problem.N
        q_stop = q_start + self.q_block
        return Place(q_start, lax.rem(head, N), lax.div(head, N), self.key_stop(q_stop))

    def ends(self, place, q_start):
        """The ends of the key tiles that a warpgroup's queries see whole, and of all.

        Only the last key tiles need a mask, and rows past T do as little as they can.
        """
        problem, (block_q, block_k) = self.problem, self.tiles[:2]
        key_stop = self.key_stop
        stop = jnp.where(q_start < problem.T, key_stop(q_start + block_q), 1)
        seen = lax.div(q_start + 1, block_k) if self.is_causal else stop
        return jnp.clip(jnp.minimum(seen, problem.S // block_k), 1, stop), stop


@dataclass(frozen=True)
class BlockSparseScheduler(TileScheduler):
    """The same for block-sparse calls: the longest first, in all batch entries.

    visible_tiles: `visible_tiles.visible_tiles` in GMEM, (B q_tiles, 9 or 7).
    """

    visible_tiles: jax.Array

    assignment = property(lambda self: Assignment(1, 0))

    def place(self, turn):
        index = jnp.minimum(self.index(turn), self.count - 1)  # the turn after the last is read, too
        B, S = self.problem.B, self.problem.S
        # In the cache, a head takes the room of its keys in all batch entries. Half of it was faster than all.
        of_all = dataclasses.replace(self.problem, B=1, T=B * S, S=B * S)
        row, n = causal_order(index, B * self.q_tiles, of_all, together=functools.partial(cached_heads, share=2))
        visible = VisibleTiles.read(self.visible_tiles, B * self.q_tiles - 1 - row, self.problem)
        return Place(visible.tile * self.q_block, n, visible.b, visible.length, visible)

    def ends(self, place, q_start):
        visible, (block_q, block_k), right = place.visible, self.tiles[:2], self.problem.band.right
        stop, until_whole = visible.length, jnp.maximum(visible.start - visible.first + visible.whole, 1)
        if right is not None:  # the last tiles come last, and only the last queries see these
            seen = lax.div(q_start + block_q + right + block_k - 1, block_k) - visible.first
            stop = jnp.clip(seen, until_whole, stop)
        stop = jnp.where(q_start < visible.query_length, stop, 1)
        return jnp.minimum(jnp.maximum(visible.whole, 1), stop), stop


@dataclass(frozen=True)
class DynamicScheduler(TileScheduler):
    """The same for causal calls, but who is free takes the next place of the list.

    counter: int32 (1,) in GMEM, how many places have been taken in this way: the first
    is a program's own. lse: of `forward_kernel.Scratch`. Its last row has this program's
    places, in the order of its turns. known: barriers, that of turn i at i % len. The
    memory warpgroup arrives there, and runs ahead of the others by at most as many turns
    as a ring has slots.
    """

    counter: jax.Array
    lse: jax.Array
    known: jax.Array
    interpret: bool

    @property
    def turns(self):
        return opaque(jnp.int32(OPEN))  # an array also to what takes constants apart

    @property
    def places(self):
        return self.lse.at[self.lse.shape[0] - 1]

    def index(self, turn):
        return self.places[turn].astype(jnp.int32)

    def has(self, turns, i):
        return (i < turns.count) & (self.index(turns.start + i) < self.count)

    def is_last(self, turns, i):
        return ~self.has(turns, i + 1)

    def for_each(self, turns, body, state):
        def step(carried):
            i, _, state = carried
            state = body(i, state)
            return i + 1, self.has(turns, i + 1), state

        carried = jnp.int32(0), self.has(turns, 0), state
        return lax.while_loop(lambda carried: carried[1], step, carried)[2]

    def taken_before(self, place):
        """As late as possible: who takes a place early cannot leave it to another.

        Compute warpgroups wait for it before their first masked tile, and such as have
        no rows at once.
        """
        masked = pl.cdiv(self.q_block, self.tiles.block_k)
        is_whole = place.q_start + self.q_block <= self.problem.T
        return jnp.where(is_whole, jnp.maximum(place.stop - masked, 1), 1)

    def take(self, turns, i):
        turn, last = turns.start + i, self.places.shape[0] - 1

        @pl.when(turns.count == OPEN)  # not in turns that are done again
        def _():
            @pl.when((turn > 0) & (turn < last))
            def _():
                # -- take a place
                place = self.places.at[pl.ds(turn, 1)]
                in_turns = turn * self.programs + self.program  # for the interpreter
                count_up(self.counter, place, self.programs, in_turns, self.interpret)

            @pl.when((turn == 0) | (turn == last))  # its own, and none: the row is full
            def _():
                place = jnp.where(turn == 0, self.program, self.count)
                self.places[turn] = place.astype(jnp.float32)

            plgpu.barrier_arrive(self.known.at[lax.rem(turn, self.known.shape[0])])

    def await_place(self, turns, i):
        @pl.when(turns.count == OPEN)
        def _():
            slot = lax.rem(turns.start + i, self.known.shape[0])
            plgpu.barrier_wait(self.known.at[slot])


@dataclass(frozen=True)
class DynamicBlockSparseScheduler(BlockSparseScheduler, DynamicScheduler):
    """The same for block-sparse calls, the longest first."""

    def taken_before(self, place):
        """As late as there: the whole tiles come first."""
        visible = place.visible
        has_rows = place.q_start + self.q_block <= visible.query_length
        return jnp.where(has_rows, jnp.maximum(visible.whole, 1), 1)


class Assignment(NamedTuple):
    """What a tile scheduler does besides taking turns, see `assigned`."""

    backward: int | None
    shift: int


def assigned(turn, program, programs, count, assignment, xp=jnp):
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
    if assignment.shift:
        place = rem(program + assignment.shift * turn, programs)
        index = xp.where(full_round, turn * programs + place, index)
    if assignment.backward is not None:
        # These two lines exchanged, some causal calls once took 3 % longer on an H200.
        is_backward = full_round & (turn % 2 == assignment.backward)
        backwards = turn * programs + (programs - 1 - place)
        index = xp.where(is_backward, backwards, index)
    return index


def best_assignment(problem, tiles, programs):
    """The `Assignment` for a problem whose work `programs` share.

    Full calls: the last tile of a head may have few rows, and turn by turn another program gets it. Causal: of six
    schedules the one by which the busiest program has least to do.
    """
    if problem.band.right != 0:
        return Assignment(None, 1)
    work = work_in_order(problem, tiles)
    choices = [Assignment(backward, shift) for shift in (0, 8, programs // 3) for backward in (1, 0)]
    return min(choices, key=lambda assignment: work_of_programs(work, programs, assignment).max())


def work_in_order(problem, tiles):
    """Tiles of keys that each tile of queries of a causal call sees, and two for what it takes besides, in order."""
    rows, every = tiles.warpgroups * tiles.block_q, pl.cdiv(problem.S, tiles.block_k)
    q_tiles = pl.cdiv(problem.T, rows)
    i, _ = causal_order(np.arange(q_tiles * problem.N * problem.B), q_tiles, problem, np)
    return np.minimum(((i + 1) * rows - 1) // tiles.block_k + 1, every) + 2


def work_of_programs(work, programs, assignment):
    """The sum of work that a tile scheduler gives each program."""
    turns = np.arange(pl.cdiv(len(work), programs))[:, None]
    places = assigned(turns, np.arange(programs), programs, len(work), assignment, np)
    return np.where(places < len(work), work[np.minimum(places, len(work) - 1)], 0).sum(axis=0)


def heads_together(problem):
    """How many heads a causal call works at before the next: as many as the cache holds keys and values of.

    All of them with a small head_dim, where memory keeps up, and parts would cost some balance for nothing.
    """
    return problem.N * problem.B if padded_head_dim(problem.H) <= 64 else cached_heads(problem)


def cached_heads(problem, share=1):
    """How many query heads there are, at most, whose keys and values that share of the cache, 1 / share, holds.

    A divisor of all heads, unless that is less than half of these: a last part of fewer heads takes divisions by a
    number that is not known when the kernel is compiled.
    """
    keys = min(problem.T, problem.S)  # no query sees a later one
    bytes_of_keys_and_values = 2 * keys * padded_head_dim(problem.H) * problem.dtype.itemsize
    heads = problem.K * problem.B
    most = min(heads, max(1, L2_BUDGET // share // bytes_of_keys_and_values))
    return problem.group * next((count for count in range(most, most // 2, -1) if heads % count == 0), most)


def causal_order(index, q_tiles, problem, xp=jnp, together=heads_together):
    """(tile of queries, head) at a place of the list of all pairs of a causal call.

    index: a place, or an array of places. The heads come in parts, `heads_together`.
    In the last part the longest tiles come first, in the one before it they come last,
    and so on in turns, so that the ends of two parts fit each other. xp: the NumPy to
    compute with. together: how many heads a part has, of a problem.
    """
    div, rem = (lax.div, lax.rem) if xp is jnp else (np.floor_divide, np.remainder)
    heads, width = problem.N * problem.B, together(problem)
    parts = pl.cdiv(heads, width)
    part = div(index, width * q_tiles) if parts > 1 else 0
    index = index - part * width * q_tiles
    here = xp.minimum(width, heads - part * width) if heads % width else width
    level, head = div(index, here), part * width + rem(index, here)
    return xp.where((parts - 1 - part) % 2 == 1, level, q_tiles - 1 - level), head
