"""Which program of the Hopper backward kernels does what, and when: tiles, grids, and loops over the queries."""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention.device import core_count
from helpers.attention.hopper.warpgroup import L2_BUDGET, NUM_SMS, opaque
from helpers.attention.masking import NO_BAND, key_tiles, query_tiles

ROWS_OF_WGMMA = 64  # rows of a product that one warpgroup owns
WIDEST = 128  # columns of dk and dv that the registers of a warpgroup hold beside s and dp
# With so few tiles of queries LLVM may see that a loop over them has one step or two, and count the steps by
# a predicate. ptxas before CUDA 13.2 then computes `first` in each step from the predicate of that step (see
# tests/one_turn_or_two.ptx): it got queries 64 to 127 wrong. LLVM does not see through the barrier of `opaque`.
FEW_TILES = 4


class Tiles(NamedTuple):
    """How one kernel is launched: tile sizes, tiles in flight, and for the fused form three choices more.

    delayed          delayed_kernel, not immediate_kernel
    keeps_addresses  the compiler may make the addresses of k and v ahead of the loop, and keep them in
                     registers. Never with groups, where some would be spilled.
    ordered          programs add to a tile of dq one after the other, see `place_in_turn`

    A compute warpgroup owns 64 rows of the kernel's own side. So block_q is 64 * warpgroups in dq_kernel,
    and block_k is in the others.
    """

    block_q: int
    block_k: int
    stages: int
    warpgroups: int = 2
    delayed: bool = False
    keeps_addresses: bool = False
    ordered: bool = False


def forms(H):
    """{name: (tiles of the fused kernel, None) or (tiles of dkv_kernel, tiles of dq_kernel)} for a head_dim.

    Up to H = 128 the tiles of each form are the fastest of those tried by hand on an NVIDIA H200 (JAX
    0.11.2); for H = 256 they merely fit.
    """
    if H > 128:
        return {"split": (Tiles(64, 128, 1), Tiles(128, 64, 1))}
    own = Tiles(128 if H <= 64 else 64, 128, 2)
    return {
        "split": (own, Tiles(128, 128, 2)),
        "fused": (own, None),
        "fused, dq delayed": (own._replace(delayed=True), None),
    }


def default_tiles(problem, deterministic=False):
    """The one of `forms` for a problem; with `deterministic`, the split form.

    When keeping addresses pays was tried at T = 1024, 4096 and 16384 on the same GPU.
    """
    if deterministic or problem.H > 128:
        return forms(problem.H)["split"]
    tiles, _ = forms(problem.H)["fused" if problem.H <= 64 else "fused, dq delayed"]
    if problem.band.right == 0:
        return tiles._replace(keeps_addresses=problem.T <= (8192 if problem.H <= 64 else 2048)), None
    return tiles._replace(keeps_addresses=problem.H > 64 and problem.T > 8192), None


def grid_of(problem, head_axis, tile_count, parts=1, together=None, ordered=False):
    """The programs, the last axis fastest. Full: the tiles of a head together, for they read the same memory.
    Causal: a tile of every head of a section together, longest first, so that short ones fill up the end. A section
    has `together` heads of a batch entry, or all. Ordered: the same, but the last keys first (`Program.here`), so that
    tiles of a head start one by one. Where there are few programs in all, a tile of all batch entries together: no
    long one may start late."""
    name, heads = head_axis
    if problem.band == NO_BAND and not ordered:
        return {"batch": problem.B, name: heads, "part": parts, "tile": tile_count}
    if problem.B * parts * tile_count * heads < 4 * core_count(NUM_SMS):
        return {"part": parts, "tile": tile_count, "batch": problem.B, name: heads}
    sections = {"section": heads // together} if together else {}
    return {"batch": problem.B, "part": parts, **sections, "tile": tile_count, name: together or heads}


def grid_of_keys(problem, tiles, visible_tiles=None):
    """The programs of the kernels that own keys. With visible_tiles, the tiles of all batch entries, longest first."""
    parts = pl.cdiv(problem.H, WIDEST)
    if visible_tiles is not None:
        together = heads_together(dataclasses.replace(problem, T=problem.B * problem.T)) or problem.K
        return {"part": parts, "section": problem.K // together, "tile": visible_tiles.shape[0], "kv_head": together}
    together = heads_together(problem)
    return grid_of(problem, ("kv_head", problem.K), pl.cdiv(problem.S, tiles.block_k), parts, together, tiles.ordered)


def grid_of_queries(problem, tiles, visible_tiles=None):
    """The programs of dq_kernel."""
    if visible_tiles is not None:
        return {"tile": visible_tiles.shape[0], "head": problem.N}
    return grid_of(problem, ("head", problem.N), pl.cdiv(problem.T, tiles.block_q))


def heads_together(problem):
    """How many heads the programs of a causal call work at before the next: a divisor of all, or None for all.

    As many as the cache holds q, do and the float32 dq of. All in calls with groups: there the loops see to the
    cache (`tile_by_tile`).
    """
    if problem.group > 1:
        return None
    cached = max(1, L2_BUDGET // (problem.T * problem.H * (2 * problem.dtype.itemsize + 4)))
    return max(count for count in range(1, problem.K + 1) if problem.K % count == 0 and count <= cached)


def kv_head_at(grid, at):
    """The key/value head of the program at a place of that grid; at: a function of the name of an axis."""
    within = at("kv_head")
    return at("section") * grid["kv_head"] + within if "section" in grid else within


def place_in(grid, number):
    """{axis: index} of program `number` of a grid, the last axis fastest."""
    place = {}
    for name, size in reversed(grid.items()):
        place[name], number = lax.rem(number, jnp.int32(size)), lax.div(number, jnp.int32(size))
    return place


def place_in_line(problem, tiles):
    """How many programs of that grid start before this one; where batch entries come one by one, of this entry."""
    first, *others = grid_of_keys(problem, tiles).items()
    place = 0
    for name, size in others if first[0] == "batch" else (first, *others):
        place = place * size + lax.axis_index(name)
    return place


def place_in_turn(problem, tiles, i, k_start):
    """How many tiles of keys add to tile i of the queries before the one that begins at k_start: those of later keys.

    The last keys go first and all walk up. Under a causal mask each tile of keys begins at a tile of queries that
    those of earlier keys reach in a later step, so that few wait.
    """
    block_q, block_k = tiles.block_q, tiles.block_k
    every = pl.cdiv(problem.S, block_k)
    _, stop = key_tiles(i * block_q, (i + 1) * block_q, block_k, problem.band, problem.T, problem.S, xp=jnp)
    stop = jnp.where(i == pl.cdiv(problem.T, block_q) - 1, every, stop)  # keys that nobody sees have a step, too
    return stop - 1 - lax.div(k_start, block_k)


def for_each_visible_tile(visible, group, kv, body, masked_body, carry):
    """Run carry = body(head, i, step, carry) over the tiles of queries of a `VisibleTiles`, in all heads of a group.

    All heads of a tile come before the next. masked_body serves the tiles that are not `whole`. They come
    first: under a causal mask programs then walk up, each from its own keys.
    """

    def one_step(body, n, state):
        step, carry = state
        return step + 1, body(kv * group + lax.rem(n, group), visible.at(lax.div(n, group)), step, carry)

    ends, state = (0, group * visible.whole, group * visible.length), (jnp.int32(0), carry)
    state = lax.fori_loop(*ends[1:], functools.partial(one_step, masked_body), state)
    return lax.fori_loop(*ends[:2], functools.partial(one_step, body), state)


def for_each_query_tile(problem, tiles, kv, k_start, body, masked_body, carry):
    """Run carry = body(head, i, step, carry) over the tiles of queries that see these keys, in all heads of a group.

    masked_body serves the tiles that see some of the keys only, and the keys that end within them.
    There is at least one step a head, so that a pipeline has something to do: a tile that sees nothing.
    It is one loop (or two). A loop in a loop made ptxas serialise the products of the delayed order, before `issue`.
    """
    block_q, block_k, band, group = tiles.block_q, tiles.block_k, problem.band, problem.group
    first, stop = query_tiles(k_start, k_start + block_k, block_q, band, problem.T, problem.S, xp=jnp)
    first = jnp.minimum(first, pl.cdiv(problem.T, block_q) - 1)
    stop = jnp.maximum(stop, first + 1)
    # -- a guard
    if band != NO_BAND and pl.cdiv(problem.T, block_q) <= FEW_TILES:
        first = opaque(first)
    # --
    partial = band.right is not None or problem.S % block_k != 0
    all_from = first
    if band.right is not None:
        last_key = k_start + block_k - 1
        all_from = jnp.clip(pl.cdiv(last_key - band.right, block_q), first, stop)
    if problem.S % block_k:
        all_from = jnp.where(k_start + block_k > problem.S, stop, all_from)

    def staggered(i):
        """Without a mask, programs start at different tiles of queries.

        So they do not add to one tile of dq at once.
        """
        return lax.rem(i + k_start // block_k, stop) if band == NO_BAND else i

    def tile_by_tile(n, start, end):
        """(query head, tile of queries) of step n, all heads of a tile before the next.

        For causal calls, and in order, where all walk up. Who reads a tile at the same
        time as others finds it in the L2 cache. After the tiles that the mask cuts, the
        programs that start first walk down, side by side. They end one after the other,
        the shortest first, and those that take their places walk up: each begins at its
        own keys, just when those before it come by.
        """
        head, i = kv * group + lax.rem(n, group), lax.div(n, group)
        if tiles.ordered:
            return head, start + i
        up = lax.rem(lax.div(place_in_line(problem, tiles), core_count(NUM_SMS)), 2) == 1
        return head, jnp.where(up, start + i, end - 1 - i)

    def all_heads(body, start, end, state):
        """The tiles from start to end, in all heads of the group; state: (step, carry)."""
        steps = group * (end - start)

        def loop(place):
            one_step = lambda n, state: (state[0] + 1, body(*place(n), *state))
            return lax.fori_loop(0, steps, one_step, state)

        if group == 1 and not tiles.ordered:
            return loop(lambda n: (kv, staggered(start + n)))
        if band != NO_BAND or tiles.ordered:
            return loop(lambda n: tile_by_tile(n, start, end))

        # One head after the other. With head and tile computed from n, in fewer
        # instructions, one of these calls took a tenth longer on an H200 (H = 128,
        # T = 4096, 8:1).
        def one_step(_, state):
            g, i, *state = state
            last = i + 1 == end
            place = jnp.where(last, g + 1, g), jnp.where(last, start, i + 1)
            return *place, state[0] + 1, body(kv * group + g, staggered(i), *state)

        place = jnp.int32(0), jnp.asarray(start, jnp.int32)
        return lax.fori_loop(0, steps, one_step, (*place, *state))[2:]

    state = (jnp.int32(0), carry)
    if partial:
        state = all_heads(masked_body, first, all_from, state)
    return all_heads(body, all_from, stop, state)
