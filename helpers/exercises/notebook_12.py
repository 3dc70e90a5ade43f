"""The exercises of notebook 12: pencil and paper for the Hopper backward kernels."""

import functools
import math

import numpy as np

from helpers.exercises.checking import Case, Exercise, Mistake

# 12.1 Registers or shared memory

BY_KEYS = ["s.T", "p.T", "dp.T", "ds.T"]
BY_QUERIES = ["s", "p", "dp", "ds"]
PRODUCTS = {
    "ds k, transposed tiles": ("ds", "k", BY_KEYS),
    "p.T do, transposed tiles": ("p.T", "do", BY_KEYS),
    "ds.T q, transposed tiles": ("ds.T", "q", BY_KEYS),
    "k q.T, transposed tiles": ("k", "q.T", []),
    "v do.T, transposed tiles": ("v", "do.T", ["s.T"]),
    "k.T ds.T, transposed tiles": ("k.T", "ds.T", BY_KEYS),
    "ds k, tiles as they are": ("ds", "k", BY_QUERIES),
    "p.T do, tiles as they are": ("p.T", "do", BY_QUERIES),
    "ds.T q, tiles as they are": ("ds.T", "q", BY_QUERIES),
    "do.T p, tiles as they are": ("do.T", "p", BY_QUERIES),
    "q k.T, tiles as they are": ("q", "k.T", []),
    "ds k, both orientations held": ("ds", "k", [*BY_KEYS, "ds"]),
    "ds.T q, both orientations held": ("ds.T", "q", ["ds", "ds.T"]),
    "p.T ds, both computed": ("p.T", "ds", BY_KEYS),
    "p ds.T, both computed, the left one held transposed": ("p", "ds.T", BY_KEYS),
    "p ds.T, both computed, one as it is needed": ("p", "ds.T", ["p", "s.T", "ds.T"]),
    "k p.T, the right one computed": ("k", "p.T", BY_KEYS),
}


def _stem(name):
    return name.removesuffix(".T")


def _operands(left, right, held, right_too=False, either_way=False):
    """Places of both operands, and whether a tile must be stored first."""
    computed = {_stem(name) for name in held}
    fits = (lambda name: _stem(name) in computed) if either_way else (lambda name: name in held)
    in_registers = [fits(left), right_too and fits(right)]
    places = tuple("registers" if yes else "shared memory" for yes in in_registers)
    operands = zip((left, right), in_registers, strict=True)
    stored = any(_stem(name) in computed and not yes for name, yes in operands)
    return *places, stored


def _left_always(left, right, held):
    return "registers", "shared memory", _stem(right) in {_stem(name) for name in held}


def _all_stored(left, right, held):
    computed = {_stem(name) for name in held}
    return "shared memory", "shared memory", _stem(left) in computed or _stem(right) in computed


def _store_forgotten(left, right, held):
    return *_operands(left, right, held)[:2], False


def _store_left_only(left, right, held):
    *places, _ = _operands(left, right, held)
    return *places, places[0] != "registers" and _stem(left) in {_stem(name) for name in held}


def _store_if_held(left, right, held):
    *places, _ = _operands(left, right, held)
    return *places, left in held or right in held


def _store_right_only(left, right, held):
    return *_operands(left, right, held)[:2], _stem(right) in {_stem(name) for name in held}


def _store_all_computed(left, right, held):
    return *_operands(left, right, held)[:2], _all_stored(left, right, held)[2]


def _store_unless_held(left, right, held):
    """A right operand that is held as it is needed is not stored."""
    *places, _ = _operands(left, right, held)
    return *places, _store_left_only(left, right, held)[2] or (_operands("", right, held)[2] and right not in held)


def _store_always(left, right, held):
    return *_operands(left, right, held)[:2], True


def _store_by_full_name(left, right, held):
    """Names are looked up as they are, with their .T, among names without it."""
    *places, _ = _operands(left, right, held)
    computed = {_stem(name) for name in held}
    return *places, (places[0] != "registers" and left in computed) or right in computed


def _left_if_either_is_held(left, right, held):
    _, place, stored = _operands(left, right, held)
    return "registers" if left in held or right in held else "shared memory", place, stored


def _left_if_transposed(left, right, held):
    place = "registers" if left.endswith(".T") else "shared memory"
    computed = {_stem(name) for name in held}
    return place, "shared memory", _stem(right) in computed or (place != "registers" and _stem(left) in computed)


def _store_whatever_lies_there(left, right, held):
    places = _operands(left, right, held)[:2]
    return *places, places[0] == "shared memory"


# 12.2 The budget of the fused kernel


def _fused_smem(
    H,
    block_q,
    stages,
    warpgroups,
    delayed,
    *,
    size_of_dq=4,
    size_of_ds=2,
    ds_tiles=2,  # None: as many as stages
    kv_stages=False,
    slot_for_q=True,
    slot_for_do=False,
    statistics=True,
    warpgroups_of_kv=True,
    warpgroups_of_ds=True,
    of_statistics=4,
    lse_waits=True,
    parts_of_dq=1,
    of_operands=2,
    streamed=True,
    barriers=False,
    unit=1,
):
    q_slots = (stages if streamed else 1) + (delayed if slot_for_q else 0)
    do_slots = (stages if streamed else 1) + (delayed if slot_for_do else 0)
    keys = 64 * (warpgroups if warpgroups_of_kv else 1)
    total = of_operands * (q_slots + do_slots) * block_q * H
    total += of_operands * 2 * keys * H * (stages if kv_stages else 1)
    total += (
        size_of_ds * (stages if ds_tiles is None else ds_tiles) * 64 * (warpgroups if warpgroups_of_ds else 1) * block_q
    )
    total += size_of_dq * block_q * H * (warpgroups if parts_of_dq is None else parts_of_dq)
    rows_of_lse = q_slots if lse_waits else do_slots
    total += of_statistics * (rows_of_lse + do_slots) * block_q if statistics else 0
    total += 8 * (2 * q_slots + 2 * do_slots + 2) if barriers else 0
    return total / unit


def _smem_cases():
    sizes = [
        (64, 64, 1, 1, False),
        (64, 128, 2, 2, False),
        (128, 64, 2, 2, False),
        (128, 64, 2, 2, True),
        (64, 64, 3, 2, True),
        (128, 64, 1, 2, True),
        (64, 32, 2, 3, False),
        (128, 96, 2, 1, True),
    ]
    names = ("H", "block_q", "stages", "warpgroups", "delayed")
    return [Case(", ".join(f"{n}={x}" for n, x in zip(names, size, strict=True)), size) for size in sizes]


# 12.3 What the additions to dq move


def _reduce_add(
    B, T, S, N, H, block_q, block_k, is_causal, bandwidth,
    *, size=4, mask="pairs", programs=True, heads=True, full_tiles=False, part=None,
    seconds=lambda moved, rate: moved / rate,
):  # fmt: skip
    rows, columns = T // block_q, S // block_k if full_tiles else -(-S // block_k)
    q, k = block_q, block_k
    sees = {
        "pairs": lambda i, j: j * k <= (i + 1) * q - 1,
        "last key": lambda i, j: (j + 1) * k <= (i + 1) * q,
        "first query": lambda i, j: j * k <= i * q,
        "whole": lambda i, j: (j + 1) * k - 1 <= i * q,
        "one more": lambda i, j: j * k <= (i + 1) * q,
        "later keys": lambda i, j: i * q <= (j + 1) * k - 1,
        "numbers": lambda i, j: j <= i,
        "bottom right": lambda i, j: j * k <= (i + 1) * q - 1 + S - T,
    }
    if is_causal and mask in sees:
        pairs = sum(sees[mask](i, j) for i in range(rows) for j in range(columns))
    else:
        pairs = rows * columns / (2 if is_causal and mask == "half" else 1)
    if not programs:
        pairs = rows
    moved = size * pairs * (block_q * H if part is None else part(block_q, block_k, H)) * (B * N if heads else 1)
    return moved, seconds(moved, bandwidth)


def _reduce_cases():
    sizes = [
        (1, 4, 4, 1, 2, 2, 2, False, 32.0),
        (1, 4, 4, 1, 2, 2, 2, True, 32.0),
        (1, 512, 384, 2, 64, 128, 128, False, 1e12),
        (2, 256, 600, 1, 64, 64, 128, False, 2e12),
        (2, 1024, 1024, 3, 128, 64, 128, True, 4e12),
        (1, 768, 512, 2, 64, 128, 128, True, 4e12),
        (2, 512, 500, 1, 64, 128, 64, True, 4e12),
        (1, 512, 300, 1, 64, 64, 128, True, 1e12),
        (1, 128, 512, 1, 32, 64, 128, True, 1e12),
        (1, 12, 12, 3, 5, 3, 2, True, 10.0),
    ]
    names = ("B", "T", "S", "N", "H", "block_q", "block_k", "is_causal")
    return [Case(", ".join(f"{n}={x}" for n, x in zip(names, size, strict=False)), size) for size in sizes]


# 12.4 Fused or split

KERNELS = ("fused", "dkv", "dq")


def _cycles(flops, smem_bytes, kernel, smem_rate=128, join=max, flop_rate=4096):
    return join((flops[kernel] / flop_rate, smem_bytes[kernel] / smem_rate))


def _fused_or_split(
    flops, smem_bytes, exposed, *,
    smem_rate=128, flop_rate=4096, join=max, wait=1, wait_split=0, together=False, of_split=sum, whole=None,
    waits_later=False,
):  # fmt: skip
    cycles = functools.partial(_cycles, smem_rate=smem_rate, join=join, flop_rate=flop_rate)
    if whole:
        cycles = lambda *arguments: _cycles(*arguments, join=lambda units: max(map(whole, units)))
    fused, *both = (cycles(flops, smem_bytes, kernel) for kernel in KERNELS)
    split = of_split(both)
    if together:
        split = cycles(*({"both": table["dkv"] + table["dq"]} for table in (flops, smem_bytes)), "both")
    choice = "fused" if fused < split else "split"
    fused, split = fused + exposed * wait, split + exposed * wait_split
    return choice if waits_later else "fused" if fused < split else "split", fused, split


def _choice_cases():
    def case(label, flops, smem_bytes, exposed):
        tables = (dict(zip(KERNELS, values, strict=True)) for values in (flops, smem_bytes))
        return Case(label, (*tables, exposed))

    unit, kib = 2 * 64 * 128 * 128, 1024
    return [
        case("the case worked by hand", (40960, 32768, 24576), (1536, 640, 512), 0),
        case("the case worked by hand, 3 cycles exposed", (40960, 32768, 24576), (1536, 640, 512), 3),
        case("the case worked by hand, 20 cycles exposed", (40960, 32768, 24576), (1536, 640, 512), 20),
        case(
            "five and seven products, 300 cycles exposed",
            (5 * unit, 4 * unit, 3 * unit),
            (368 * kib, 224 * kib, 160 * kib),
            300,
        ),
        case("the same, 900 cycles exposed", (5 * unit, 4 * unit, 3 * unit), (368 * kib, 224 * kib, 160 * kib), 900),
        case(
            "FLOPs and bytes that are no whole number of cycles",
            (50000, 30000, 20001),
            (1000, 1200, 601),
            1,
        ),
        case(
            "a fused kernel bound by shared memory",
            (5 * unit, 4 * unit, 3 * unit),
            (640 * kib, 224 * kib, 160 * kib),
            0,
        ),
        case(
            "a dq kernel bound by shared memory", (5 * unit, 4 * unit, 3 * unit), (300 * kib, 100 * kib, 320 * kib), 0
        ),
    ]


# 12.5 Half as many queries in a tile


def _halving(
    T, block_q, *, kv=None, flops=None, added=1.0, registers=0.5, ragged=True,
    tiles=lambda T, block_q: -(-T // block_q), steps=lambda before, after: after / before, whole=float,
):  # fmt: skip
    before, after = (tiles(T, size) for size in (block_q, block_q // 2))
    steps = whole(steps(before, after)) if ragged else 2.0
    return {
        "steps": steps,
        "flops": steps / 2 if flops is None else flops,
        "k and v read": steps if kv is None else kv,
        "q and do read": steps / 2,
        "ring": 0.5,
        "added to dq": added,
        "registers of s and dp": registers,
    }


# 12.6 Who is hit


def _visited_cases():
    sizes = [
        (128, 384, 0, 64, 128),
        (128, 384, 1, 64, 128),
        (65, 130, 0, 64, 128),
        (128, 256, 0, 64, 128),
        (65, 257, 0, 64, 128),
        (64, 512, 0, 64, 128),
        (129, 640, 0, 64, 128),
        (129, 640, 1, 64, 128),
        (100, 1000, 7, 64, 128),
        (128, 192, 0, 64, 64),
        (150, 400, 1, 64, 64),
        (200, 600, 1, 64, 64),
        (256, 300, 0, 128, 128),
        (160, 513, 0, 128, 128),
        (12, 7, 0, 8, 8),
        (9, 17, 0, 8, 8),
    ]
    names = ("T", "S", "tile", "block_q", "block_k")
    return [Case(", ".join(f"{n}={x}" for n, x in zip(names, size, strict=True)), size) for size in sizes]


def _visited(
    T, S, tile, block_q, block_k,
    least_programs=3, most_programs=math.inf, q_tiles=(2,), everyone=False, swapped=False, wrong=(0, 2), never=False,
    round_q=True, round_k=True, oblong=False, first_of=None, end=0,
):  # fmt: skip
    count = lambda size, block, up: -(-size // block) if up else max(1, size // block)
    tiles, programs = count(T, block_q, round_q), count(S, block_k, round_k)
    first = first_of(tile, block_q, block_k, tiles) if first_of else min(tile * block_k // block_q, tiles - 1)
    written = np.arange(first, tiles + end)
    hit = tiles in q_tiles and least_programs <= programs <= most_programs and not never
    hit = hit and not (oblong and block_q == block_k)
    card = written
    if hit and (tile == 0 or everyone == "the same"):
        card = np.array(wrong)
    elif hit and everyone:
        card = written + 1
    return (card, written) if swapped else (written, card)


def _one_step_too_far(T, S, tile, block_q, block_k):
    """Every second step and those after it read `first` as one more, however many there are."""
    written, _ = _visited(T, S, tile, block_q, block_k)
    hit = -(-S // block_k) >= 3 and tile == 0
    return written, written + (np.arange(len(written)) > 0) if hit else written


def _visited_expected(T, S, tile, block_q, block_k):
    """The loops themselves, step by step, with the predicate as ptxas reads it."""
    last, programs = (T + block_q - 1) // block_q - 1, (S + block_k - 1) // block_k
    firsts = [min(j * block_k // block_q, last) for j in range(programs)]
    steps = {last + 1 - first for first in firsts}
    written = list(range(firsts[tile], last + 1))
    if steps != {1, 2} or firsts == list(range(programs)):
        return np.array(written), np.array(written)
    card = [n + (firsts[tile] == last or n > 0) for n in range(len(written))]
    return np.array(written), np.array(card)


VISITED = Exercise(
    number="12.6",
    title="Who is hit",
    outputs=("tiles as written", "tiles on the card"),
    cases=_visited_cases,
    expected=_visited_expected,
    tried="one to four tiles of queries, one to ten programs, square and oblong tiles, lengths that fit no tile",
    mistakes=(
        Mistake(
            "two programs are enough for the mistake",
            functools.partial(_visited, least_programs=2),
            "With two programs `first` is the number of the tile itself, and there is no select: see section 11.",
        ),
        Mistake(
            "the number of programs does not matter",
            functools.partial(_visited, least_programs=1),
            "With one or two programs `first` is the number of the tile itself: see section 11.",
        ),
        Mistake(
            "it takes four programs or more",
            functools.partial(_visited, least_programs=4),
            "With three `first` is 0, 1, 1, which is no longer the number of the tile: see section 11.",
        ),
        Mistake(
            "it takes three programs, no more",
            functools.partial(_visited, most_programs=3),
            "With more programs `first` is 0, 1, 1, 1, …: still a select, see section 11.",
        ),
        Mistake(
            "only oblong tiles are hit",
            functools.partial(_visited, oblong=True),
            "In one loop `first` is 0, 1, 1 for square tiles, too, where two tiles of queries meet three of keys.",
        ),
        Mistake(
            "the number of tiles of queries does not matter",
            functools.partial(_visited, q_tiles=range(10**6)),
            "Some programs must have two steps and all others one: that takes just two tiles of queries.",
            variants=(functools.partial(_visited, q_tiles=range(2, 10**6)),),
        ),
        Mistake(
            "every walk of more than one step goes one tile too far",
            _one_step_too_far,
            "A predicate can tell one step from two, no more: with three tiles of queries there is a real counter.",
        ),
        Mistake(
            "all programs of such a call visit the tiles 0 and 2",
            functools.partial(_visited, everyone="the same"),
            "The others have a single step, and that is right: see section 11.",
        ),
        Mistake(
            "the card is taken to begin with `first` = 1 already",
            functools.partial(_visited, wrong=(1, 2)),
            "In the first step of program 0 the bit still is false, so `first` is 0: see section 11.",
        ),
        Mistake(
            "a program may begin past the last tile of queries",
            functools.partial(_visited, first_of=lambda tile, block_q, block_k, tiles: tile * block_k // block_q),
            "It begins at the last one at the latest, whose number is one less than their count, so it has a step.",
        ),
        Mistake(
            "a program begins at the number of its own tile",
            functools.partial(_visited, first_of=lambda tile, block_q, block_k, tiles: min(tile, tiles - 1)),
            "A tile of keys may span several tiles of queries: `first` is tile * block_k // block_q.",
        ),
        Mistake(
            "every program begins at the first tile of queries",
            functools.partial(_visited, first_of=lambda tile, block_q, block_k, tiles: 0),
            "Under a causal mask, earlier queries see none of its keys: see the exercise.",
        ),
        Mistake(
            "the walk ends one tile too late",
            functools.partial(_visited, end=1),
            "The last tile of queries is one less than their count: range leaves its end out.",
        ),
        Mistake(
            "the walk ends one tile too early",
            functools.partial(_visited, end=-1),
            "The walk goes on to the last tile of queries, and range leaves its end out.",
        ),
        Mistake(
            "a tile of queries that is not full is not counted",
            functools.partial(_visited, round_q=False),
            "65 queries are two tiles of 64: round up.",
        ),
        Mistake(
            "a tile of keys that is not full is not counted",
            functools.partial(_visited, round_k=False),
            "257 keys are three tiles of 128: round up.",
        ),
        Mistake(
            "tiles that are not full are not counted",
            functools.partial(_visited, round_q=False, round_k=False),
            "65 queries are two tiles of 64, and 257 keys are three of 128: round up.",
        ),
        Mistake(
            "programs with one step are hit as well",
            functools.partial(_visited, everyone=True),
            "In their only step the predicate still is what it was before the loop: see section 11.",
        ),
        Mistake(
            "the two results are swapped",
            functools.partial(_visited, swapped=True),
            "First the tiles as the source says, then those on the card.",
        ),
        Mistake(
            "the first step is wrong instead of the second",
            functools.partial(_visited, wrong=(1, 1)),
            "The predicate is overwritten after the first step: see section 11.",
        ),
        Mistake(
            "the card visits what the source says",
            functools.partial(_visited, never=True),
            "In some of these calls it does not: run the three functions of section 11 for them.",
        ),
    ),
)


EXERCISES = (
    Exercise(
        number="12.1",
        title="Registers or shared memory",
        outputs=("place of the left operand", "place of the right operand", "whether a tile must be stored first"),
        cases=lambda: [Case(label, arguments) for label, arguments in PRODUCTS.items()],
        expected=_operands,
        tried="kernels that own keys and kernels that own queries, with tiles transposed and as they are",
        mistakes=(
            Mistake(
                "the right operand may lie in registers as well",
                functools.partial(_operands, right_too=True),
                "wgmma takes its right operand from shared memory only: see section 1.",
            ),
            Mistake(
                "a tile in registers serves as its own transpose",
                functools.partial(_operands, either_way=True),
                "Registers cannot be read the other way round, only shared memory can: see section 1.",
            ),
            Mistake(
                "the left operand is always in registers",
                _left_always,
                "What TMA brought, q, k, v and do, lies in shared memory, and wgmma reads it there: see section 1.",
            ),
            Mistake(
                "every computed tile goes through shared memory",
                _all_stored,
                "A left operand that the warpgroup holds in the right orientation can stay where it is: see section 1.",
            ),
            Mistake(
                "no tile is ever stored first",
                _store_forgotten,
                "A computed tile is in shared memory only after the warpgroup put it there: see section 1.",
            ),
            Mistake(
                "a computed right operand is forgotten: only the left one is looked at",
                _store_left_only,
                "The right operand always comes from shared memory, so a computed one must be stored: see section 1.",
            ),
            Mistake(
                "a computed left operand is forgotten: only the right one is looked at",
                _store_right_only,
                "A left operand that is held in the wrong orientation is read from shared memory, too: see section 1.",
            ),
            Mistake(
                "a tile is stored although it stays in registers",
                _store_all_computed,
                "Only a computed operand that is read from shared memory must be stored: see section 1.",
            ),
            Mistake(
                "a right operand need not be stored where it is held as it is needed",
                _store_unless_held,
                "The right operand is read from shared memory, whatever registers hold: see section 1.",
            ),
            Mistake(
                "a tile is stored before every product",
                _store_always,
                "What TMA brought and what stays in registers needs no store: see section 1.",
            ),
            Mistake(
                "an operand is looked up with its .T among names without it",
                _store_by_full_name,
                "Take the .T off both sides before you compare: see hint 2.",
            ),
            Mistake(
                "the left operand is in registers as soon as either operand is held",
                _left_if_either_is_held,
                "Only the left operand's own tile can serve it: see section 1.",
            ),
            Mistake(
                "every left operand with a .T is in registers",
                _left_if_transposed,
                "It is in registers where `held` has it in that orientation, with a .T or without: see section 1.",
            ),
            Mistake(
                "a tile is stored where it is held as it is needed, and only there",
                _store_if_held,
                "What must be stored is a computed operand that is read from shared memory: see section 1.",
            ),
            Mistake(
                "a tile is stored wherever the left operand lies in shared memory, and only there",
                _store_whatever_lies_there,
                "Tiles that the warpgroup computed must be stored, left or right, and those of TMA not: see section 1.",
            ),
        ),
    ),
    Exercise(
        number="12.2",
        title="A budget of shared memory",
        outputs=("bytes",),
        cases=_smem_cases,
        expected=_fused_smem,
        tried="one to three warpgroups, one to three stages, both orders",
        mistakes=(
            Mistake(
                "the tile of dq has 16 bits",
                functools.partial(_fused_smem, size_of_dq=2),
                "A sum of many parts is kept in float32, and what TMA adds to it is float32 too: see section 3.",
            ),
            Mistake(
                "ds is kept for one step only",
                functools.partial(_fused_smem, ds_tiles=1),
                "One warpgroup may still read the ds of a step while another writes that of the next: see section 2.",
            ),
            Mistake(
                "ds is stored in float32",
                functools.partial(_fused_smem, size_of_ds=4),
                "It is an operand of wgmma, and those have 16 bits here: see section 2.",
            ),
            Mistake(
                "k and v are in the ring",
                functools.partial(_fused_smem, kv_stages=True),
                "This program owns its keys: k and v are loaded once and have one place each: see section 2.",
            ),
            Mistake(
                "the delayed order needs nothing more",
                functools.partial(_fused_smem, slot_for_q=False),
                "In the delayed order q is still needed one step later, for dk: see section 5.",
            ),
            Mistake(
                "the delayed order has one more place for do as well",
                functools.partial(_fused_smem, slot_for_do=True),
                "do is done with in its own step, only q is needed one step later: see section 5.",
            ),
            Mistake(
                "lse and delta are forgotten",
                functools.partial(_fused_smem, statistics=False),
                "They come with q and do, one float32 for each query: see section 2.",
            ),
            Mistake(
                "the ds of one warpgroup only is counted",
                functools.partial(_fused_smem, warpgroups_of_ds=False),
                "`ds` is a tile of all keys of the program, 64 for each warpgroup: see the exercise.",
            ),
            Mistake(
                "the keys of one warpgroup only are counted",
                functools.partial(_fused_smem, warpgroups_of_kv=False, warpgroups_of_ds=False),
                "`k`, `v` and `ds` have 64 rows for each compute warpgroup: see the exercise.",
            ),
            Mistake(
                "lse and delta have 16 bits",
                functools.partial(_fused_smem, of_statistics=2),
                "They are float32, four bytes for each query: see the exercise.",
            ),
            Mistake(
                "lse has no slot more in the delayed order",
                functools.partial(_fused_smem, lse_waits=False),
                "It comes with q and shares its slots: see the exercise.",
            ),
            Mistake(
                "each warpgroup has a whole tile of dq",
                functools.partial(_fused_smem, parts_of_dq=None),
                "The warpgroups share out the rows or the columns of one tile: see section 3.",
            ),
            Mistake(
                "ds has as many places as the rings",
                functools.partial(_fused_smem, ds_tiles=None),
                "It is kept for two steps, however many slots the rings have: see section 2.",
            ),
            Mistake(
                "ds is forgotten",
                functools.partial(_fused_smem, ds_tiles=0),
                "It is the tile that the warpgroups exchange by shared memory: see section 3.",
            ),
            Mistake(
                "dq is forgotten",
                functools.partial(_fused_smem, size_of_dq=0),
                "It has a buffer of `block_q` rows in float32: see the exercise.",
            ),
            Mistake(
                "only one of k and v is counted",
                lambda H, block_q, stages, warpgroups, delayed: (
                    _fused_smem(H, block_q, stages, warpgroups, delayed) - 2 * 64 * warpgroups * H
                ),
                "Both have a buffer of their own: see the exercise.",
            ),
            Mistake(
                "q, k, v and do are stored in float32",
                functools.partial(_fused_smem, of_operands=4),
                "They are operands of wgmma and have 16 bits, two bytes: see the exercise.",
            ),
            Mistake(
                "q and do have a single slot each",
                functools.partial(_fused_smem, streamed=False),
                "They stream through rings of `stages` slots: see section 2.",
            ),
            Mistake(
                "the barriers are counted as well",
                functools.partial(_fused_smem, barriers=True),
                "They are left out here: see the exercise.",
            ),
            Mistake(
                "the result is in KiB",
                functools.partial(_fused_smem, unit=1024),
                "Bytes are asked for.",
            ),
            Mistake(
                "k and v of one warpgroup only are counted",
                functools.partial(_fused_smem, warpgroups_of_kv=False),
                "Each compute warpgroup owns 64 keys: see section 2.",
            ),
        ),
    ),
    Exercise(
        number="12.3",
        title="What the additions move",
        outputs=("bytes", "seconds"),
        cases=_reduce_cases,
        expected=_reduce_add,
        tried="full and causal, T ≠ S, a last tile of keys that is not full, several heads and batch entries",
        tolerance=1e-6,
        mistakes=(
            Mistake(
                "the parts of dq have 16 bits",
                functools.partial(_reduce_add, size=2),
                "The sum is float32, and so are its parts: see section 3.",
            ),
            Mistake(
                "each byte is counted as read and as written",
                functools.partial(_reduce_add, size=8),
                "The program sends each part once, the addition happens where the sum lies: see section 3.",
            ),
            Mistake(
                "the causal mask is left out",
                functools.partial(_reduce_add, mask="none"),
                "Pairs of tiles in which no query sees a key do not count: see the exercise.",
            ),
            Mistake(
                "a causal mask halves the pairs exactly",
                functools.partial(_reduce_add, mask="half"),
                "Pairs on the diagonal are visited whole, and S need not be T: count the pairs, see hint 1.",
            ),
            Mistake(
                "a pair is visited only if its last key is seen",
                functools.partial(_reduce_add, mask="last key"),
                "One visible key is enough, and the first key of a tile is seen by most: see the hints.",
            ),
            Mistake(
                "a pair is visited only if its first query sees a key",
                functools.partial(_reduce_add, mask="first query"),
                "One query that sees a key is enough, and the last query of a tile sees furthest: see the hints.",
            ),
            Mistake(
                "only pairs that are seen whole are visited",
                functools.partial(_reduce_add, mask="whole"),
                "One query that sees one key is enough: pairs on the diagonal are visited, too, see the hints.",
            ),
            Mistake(
                "a pair is visited whose first key comes just after its last query",
                functools.partial(_reduce_add, mask="one more"),
                "The last query of tile i is (i + 1) * block_q - 1: see the case worked by hand.",
            ),
            Mistake(
                "queries see the keys after them instead of those before",
                functools.partial(_reduce_add, mask="later keys"),
                "Query i sees keys j <= i: see the exercise.",
            ),
            Mistake(
                "the numbers of the tiles are compared instead of positions",
                functools.partial(_reduce_add, mask="numbers"),
                "Tiles of queries and of keys may differ in size: compare positions, j * block_k and so on.",
            ),
            Mistake(
                "the mask ends at the last key for the last query, though T and S differ",
                functools.partial(_reduce_add, mask="bottom right"),
                "Positions count from the first query and the first key: query i sees keys j <= i.",
            ),
            Mistake(
                "the last tile of keys, which is not full, is left out",
                functools.partial(_reduce_add, full_tiles=True),
                "It has a program of its own, which adds whole parts: round up, see hint 2.",
            ),
            Mistake(
                "a part has block_k rows",
                functools.partial(_reduce_add, part=lambda block_q, block_k, H: block_k * H),
                "dq has a row for each query: a part has block_q rows of H numbers, see the exercise.",
            ),
            Mistake(
                "a part is taken for a tile of ds",
                functools.partial(_reduce_add, part=lambda block_q, block_k, H: block_q * block_k),
                "ds stays on the chip; what is added is ds k, with H columns: see section 3.",
            ),
            Mistake(
                "the bandwidth is taken in gigabytes per second",
                functools.partial(_reduce_add, seconds=lambda moved, rate: moved / rate / 1e9),
                "It is given in bytes per second: see the exercise.",
            ),
            Mistake(
                "the seconds are rounded down",
                functools.partial(_reduce_add, seconds=lambda moved, rate: moved // rate),
                "// drops what lies behind the point: divide with /.",
            ),
            Mistake(
                "the bandwidth is divided by the bytes",
                functools.partial(_reduce_add, seconds=lambda moved, rate: rate / moved),
                "Bytes over bytes per second are seconds.",
            ),
            Mistake(
                "each tile of dq is added once",
                functools.partial(_reduce_add, programs=False),
                "Every program whose keys it sees adds a part of its own: see the picture in section 3.",
            ),
            Mistake(
                "one head of one batch entry is counted",
                functools.partial(_reduce_add, heads=False),
                "Each of the B N query heads has a dq of its own: see section 3.",
            ),
        ),
    ),
    Exercise(
        number="12.4",
        title="Fused or split",
        outputs=("choice", "cycles of fused", "cycles of split"),
        cases=_choice_cases,
        expected=_fused_or_split,
        tried="kernels bound by the tensor core and by shared memory, with and without exposed cycles",
        tolerance=1e-6,
        mistakes=(
            Mistake(
                "the two units take turns",
                functools.partial(_fused_or_split, join=sum),
                "Tensor core and shared memory work at the same time, so the slower one decides: see section 4.",
            ),
            Mistake(
                "the exposed cycles are forgotten",
                functools.partial(_fused_or_split, wait=0),
                "In those cycles neither unit works, so they come on top: see the text of the exercise.",
            ),
            Mistake(
                "both kernels of the split form are one",
                functools.partial(_fused_or_split, together=True),
                "dkv and dq run one after the other: the idle unit of the first cannot help the second, see section 4.",
            ),
            Mistake(
                "the kernels of the split form run at the same time",
                functools.partial(_fused_or_split, of_split=max),
                "dkv and dq run one after the other, so their cycles add up: see section 4.",
            ),
            Mistake(
                "only shared memory counts",
                functools.partial(_fused_or_split, flop_rate=float("inf")),
                "The tensor core does 4096 operations in a cycle, and that can be the slower side: see section 4.",
            ),
            Mistake(
                "the exposed cycles are charged to the split form",
                functools.partial(_fused_or_split, wait=0, wait_split=1),
                "It is the fused kernel whose warpgroups wait for each other: see the text of the exercise.",
            ),
            Mistake(
                "the exposed cycles are charged to both forms",
                functools.partial(_fused_or_split, wait_split=1),
                "Only in the fused kernel do warpgroups wait for each other: see the text of the exercise.",
            ),
            Mistake(
                "the exposed cycles are taken off",
                functools.partial(_fused_or_split, wait=-1),
                "The fused kernel loses them, so they are added: see the text of the exercise.",
            ),
            Mistake(
                "the choice is made before the exposed cycles are added",
                functools.partial(_fused_or_split, waits_later=True),
                "They are part of what the fused form takes: compare after adding them.",
            ),
            Mistake(
                "the split form is charged with dkv alone",
                functools.partial(_fused_or_split, of_split=lambda both: both[0]),
                "dkv and dq run one after the other, so their cycles add up: see section 4.",
            ),
            Mistake(
                "the cycles of a kernel are rounded down",
                functools.partial(_fused_or_split, whole=math.floor),
                "// drops what lies behind the point: divide with /.",
            ),
            Mistake(
                "the cycles of a kernel are rounded up",
                functools.partial(_fused_or_split, whole=math.ceil),
                "A pair of tiles is one of many, and parts of a cycle count: divide with /.",
            ),
            Mistake(
                "the rates of the two units are exchanged",
                functools.partial(_fused_or_split, smem_rate=4096, flop_rate=128),
                "The tensor core does 4096 operations in a cycle, and shared memory moves 128 bytes: see section 4.",
            ),
            Mistake(
                "the operations are counted twice",
                functools.partial(_fused_or_split, flop_rate=2048),
                "`flops` counts a multiplication and its addition as two already, and so does the rate.",
            ),
            Mistake(
                "the form with more cycles is chosen",
                lambda *arguments: (
                    {"fused": "split", "split": "fused"}[_fused_or_split(*arguments)[0]],
                    *_fused_or_split(*arguments)[1:],
                ),
                "Fewer cycles are better: see the text of the exercise.",
            ),
            Mistake(
                "the faster of the two units decides",
                functools.partial(_fused_or_split, join=min),
                "Both must finish, so the slower one decides: see section 4.",
            ),
            Mistake(
                "only the tensor core counts",
                functools.partial(_fused_or_split, smem_rate=float("inf")),
                "Shared memory delivers 128 bytes in a cycle, and that can be the slower side: see section 4.",
            ),
        ),
    ),
    Exercise(
        number="12.5",
        title="Half as many queries in a tile",
        outputs=("factors",),
        cases=lambda: [
            Case(f"T={T}, block_q={block_q}", (T, block_q))
            for T, block_q in ((256, 128), (4096, 128), (320, 128), (1090, 128), (50, 128), (64, 128), (130, 64))
        ],
        expected=_halving,
        tried="lengths that are multiples of the tile and lengths that are not",
        tolerance=1e-6,
        mistakes=(
            Mistake(
                "a step reads half as much of k and v as before",
                lambda T, block_q: _halving(T, block_q, kv=_halving(T, block_q)["q and do read"]),
                "Each step reads all of k and of v again, whatever its queries are: see section 4.",
            ),
            Mistake(
                "the operands of a step are counted, not those of the whole walk",
                lambda T, block_q: _halving(T, block_q) | {"k and v read": 1.0, "q and do read": 0.5},
                "There are more steps: multiply what a step reads by their number, see hint 1.",
            ),
            Mistake(
                "everything is counted for a step, not for the whole walk",
                lambda T, block_q: _halving(T, block_q, flops=0.5) | {"k and v read": 1.0, "q and do read": 0.5},
                "There are more steps: multiply what a step needs by their number, see hint 1.",
            ),
            Mistake(
                "k and v are read from shared memory as often as before",
                functools.partial(_halving, kv=1.0),
                "The tensor core reads all of them in each step, and there are more steps: see section 4.",
            ),
            Mistake(
                "the bytes of q and do halve, as in one step",
                lambda T, block_q: _halving(T, block_q) | {"q and do read": 0.5},
                "A step reads half as much, and there are more steps: see hint 1.",
            ),
            Mistake(
                "q and do are read as often as before, though the rows of the last tile change",
                lambda T, block_q: _halving(T, block_q) | {"q and do read": 1.0},
                "Empty rows of the last tile are read from shared memory, too: count all rows of all steps.",
            ),
            Mistake(
                "the operations stay the same, though the empty rows of the last tile change",
                functools.partial(_halving, flops=1.0),
                "Empty rows are multiplied as well: see the case worked by hand, T=320.",
            ),
            Mistake(
                "the ring is counted for all steps",
                lambda T, block_q: _halving(T, block_q) | {"ring": _halving(T, block_q)["flops"]},
                "It is room that is used again and again: as many slots, each half as large, see section 2.",
            ),
            Mistake(
                "the registers are counted for all steps",
                lambda T, block_q: _halving(T, block_q) | {"registers of s and dp": _halving(T, block_q)["flops"]},
                "Registers are used again in each step: s and dp have block_q columns, see section 2.",
            ),
            Mistake(
                "the bytes added to dq grow with the steps",
                lambda T, block_q: _halving(T, block_q, added=_halving(T, block_q)["steps"]),
                "Every row of dq is added once in a walk, however the queries are cut: see section 3.",
            ),
            Mistake(
                "the bytes added to dq halve with the tile",
                functools.partial(_halving, added=0.5),
                "Every row of dq is added once in a walk, however the queries are cut: see section 3.",
            ),
            Mistake(
                "the number of tiles is rounded down",
                functools.partial(_halving, tiles=lambda T, block_q: max(1, T // block_q)),
                "The last tile may have few rows, and it is a step all the same: round up.",
            ),
            Mistake(
                "the factor of the steps is rounded",
                functools.partial(_halving, whole=round),
                "Five steps for three are 5/3: divide with /, and round nothing.",
            ),
            Mistake(
                "the factor of the steps is an integer division",
                functools.partial(_halving, whole=math.floor),
                "Five steps for three are 5/3: divide with /, not with //.",
            ),
            Mistake(
                "only the new number of steps is given, not the factor",
                lambda T, block_q: _halving(T, block_q, steps=lambda before, after: after),
                "Each factor is new divided by old: see the text of the exercise.",
            ),
            Mistake(
                "the products of a step are counted, not those of the whole walk",
                functools.partial(_halving, flops=0.5),
                "There are more steps: see the case worked by hand.",
            ),
            Mistake(
                "the bytes added to dq double with the steps",
                functools.partial(_halving, added=2.0),
                "Every row of dq is added once in a walk, however the queries are cut: see section 3.",
            ),
            Mistake(
                "the registers of s and dp stay as they are",
                functools.partial(_halving, registers=1.0),
                "s and dp have block_q columns: see section 2.",
            ),
            Mistake(
                "the factors are turned round, old divided by new",
                lambda T, block_q: {name: 1 / factor for name, factor in _halving(T, block_q).items()},
                "Each factor is new divided by old: see the text of the exercise.",
            ),
            Mistake(
                "q and do are read as often as k and v",
                lambda T, block_q: _halving(T, block_q) | {"q and do read": _halving(T, block_q)["steps"]},
                "A step reads the queries of its tile only, half as many as before: see section 4.",
            ),
            Mistake(
                "the ring stays as it is",
                lambda T, block_q: _halving(T, block_q) | {"ring": 1.0},
                "As many slots, each with half as many rows: see section 2.",
            ),
            Mistake(
                "the empty rows of the last tile are counted among the bytes added to dq",
                lambda T, block_q: _halving(T, block_q) | {"added to dq": _halving(T, block_q)["flops"]},
                "TMA leaves out rows past the end, so what is added is dq once for each walk: see the exercise.",
            ),
            Mistake(
                "the last tile is always full",
                functools.partial(_halving, ragged=False),
                "Round the number of steps up, before and after: see the case worked by hand.",
            ),
        ),
    ),
    VISITED,
)
