"""The exercises of notebook 10.

Answers that put operations in order run in the model of `helpers.instruments.timeline` first: it always comes
to an end, also where real warpgroups would wait for ever.
"""

import itertools

from helpers.exercises.comparing import got
from helpers.exercises.exercise import Complaint, Exercise
from helpers.exercises.whole_mosaic import MMA, WGMMA
from helpers.instruments.races import ring_kernel_races, with_last_waits
from helpers.instruments.timeline import Arrive, Drain, Fetch, Issue, OrderError, Read, Wait, Work, simulate

MOST = 5000  # operations of an answer


def _operations(program):
    """The operations that an answer yields, as a list."""
    if not hasattr(program, "__iter__"):
        raise Complaint("your function gives no operations: is a `yield` missing?")
    operations = list(itertools.islice(program, MOST + 1))
    if len(operations) > MOST:
        raise Complaint(f"your function is still not at the end after {MOST} operations")
    return operations


def _are(number, noun):
    return f"is 1 {noun}" if number == 1 else f"are {number} {noun}s"


# For exercises whose run returns "" for a right answer and a sentence for a wrong one.
_complaint_or_none = lambda result, case: result or None


def ring(role, steps, stages):
    """Yield the operations of "memory" or "compute": `steps` tiles, `stages` slots."""
    for j in range(steps):
        slot = j % stages
        if role == "memory":
            if j >= stages:
                yield Wait("free", slot)
            yield Fetch("tile", slot, j, "loaded")
        else:
            yield Wait("loaded", slot)
            yield Read("tile", slot)
            yield Arrive("free", slot)


def _run_ring(answer, steps, stages, readers):
    """In the model, which always ends, and one case then as a kernel under the race detector."""
    memory, *computing = (_operations(answer(role, steps, stages)) for role in ["memory"] + readers * ["compute"])
    names = [f"compute {index}" for index in range(readers)]
    for name, operations in zip(["memory", *names], [memory, *computing], strict=True):
        for operation in operations:
            if not isinstance(operation, Wait | (Fetch if name == "memory" else Arrive | Read)):
                return f"{name} yields {type(operation).__name__}, which is not its part: is the role looked at?"
            if not 0 <= operation.slot < stages:
                return f"{name} uses slot {operation.slot}, but there {_are(stages, 'slot')}, counted from 0."
    fetched = sorted(operation.tile for operation in memory if isinstance(operation, Fetch))
    if fetched != list(range(steps)):
        return f"memory fetched the tiles {fetched}, expected each of {list(range(steps))} once."
    for name, operations in zip(names, computing, strict=True):
        for slot in range(stages):
            waits = sum(isinstance(op, Wait) and op == ("loaded", slot) for op in operations)
            tiles = len(range(slot, steps, stages))
            if waits > tiles:
                return f"{name} waits {waits} times at loaded[{slot}], but a ring puts {tiles} of the tiles there."
    try:
        run = _simulated(memory, computing)
    except OrderError as error:
        return f"{error}."
    for name in names:
        if run.tiles[name] != list(range(steps)):
            return f"{name} read the tiles {run.tiles[name]}, expected {list(range(steps))}."
    enough = _simulated(ring("memory", steps, stages), [list(ring("compute", steps, stages))] * readers).end
    if run.end > enough:
        return f"right, but it takes {run.end:.0f} cycles where {enough:.0f} are enough: copies could run ahead."
    found = ring_kernel_races(memory, computing, stages) if (steps, stages, readers) == (7, 3, 2) else None
    return f"as a kernel, it makes the race detector say: {', '.join(found)}." if found else ""


def _simulated(memory, computing):
    groups = {f"compute {index}": iter(operations) for index, operations in enumerate(computing)}
    groups = {"memory": iter(with_last_waits(memory, computing))} | groups
    return simulate(groups, {"loaded": 1, "free": len(computing)}, latency=600)


RING = Exercise(
    ring, "Place the barriers", outputs=("the order of operations",), run=_run_ring, judge=_complaint_or_none,
).with_cases("tiles slots readers", (1, 1, 1), (2, 1, 1), (4, 2, 1), (7, 3, 2), (2, 4, 1)).with_mistakes(
    ("the memory warpgroup fills a slot again without waiting until it is free",
     '            if j >= stages:\n                yield Wait("free", slot)\n', "",
     "The second time a slot is used, its readers must be done: see section 5."),
    ("the memory warpgroup waits for each tile to arrive, or to be read, before it orders the next",
     ('if j >= stages:\n                yield Wait("free", slot)\n            ', '"loaded")\n'),
     ("", '"loaded")\n            yield Wait("free", slot)\n'),
     "Wait before the fetch that needs the slot, not after the one that filled it: see section 5."),
    ("a slot is given back before it is read", 'Read("tile", slot)\n            yield Arrive("free", slot)',
     'Arrive("free", slot)\n            yield Read("tile", slot)', "Arrive when you have read: see section 5."),
    ("the memory warpgroup waits until all slots are free before it fills them again",
     ("j >= stages", 'yield Wait("free", slot)'),
     ("j and slot == 0", 'yield from (Wait("free", each) for each in range(stages))'),
     "Each slot can be filled as soon as it is free itself, whatever the others do: see section 5."),
)  # fmt: skip


def split_registers(warpgroups, memory):
    """(registers of a thread at the start, the most of a compute thread)."""
    at_start = 65536 // (128 * (warpgroups + 1)) // 8 * 8
    pool = (warpgroups + 1) * at_start - memory
    return at_start, pool // warpgroups // 8 * 8


REGISTERS = Exercise(
    split_registers, "Share out the registers", outputs=("registers at the start", "registers of a compute thread"),
).with_cases("warpgroups memory", (2, 24), (3, 24), (4, 24), (4, 40), (5, 32), (6, 24), (7, 40)).with_mistakes(
    ("the registers that rounding left unused at the start are shared out as well",
     "(warpgroups + 1) * at_start", "65536 // 128",
     "What can be shared out is what the program started with; this request would wait for ever: see section 7."),
    ("`memory` is multiplied by 128, and the rest is not", "- memory", "- 128 * memory",
     "Count in units of one warpgroup's threads, all of it, or in registers, all of it: see the hand case."),
)  # fmt: skip


def smem_budget(H, block_q, block_k, stages, warpgroups):
    """(bytes of SMEM of the forward kernel, the most stages that fit)."""
    fixed = 3 * warpgroups * block_q * H * 2
    fixed += 4 * (warpgroups + 1) * block_q + 8 * (warpgroups + 1)
    stage = 2 * block_k * H * 2 + 4 * 8
    return fixed + stages * stage, max(0, (232448 - 1280 - fixed) // stage)


SMEM = Exercise(
    smem_budget, "The budget of shared memory", outputs=("bytes", "most stages"),
).with_cases(  # what does not grow is too much already; the gaps decide; the last stage fits to the byte
    "H block_q block_k stages warpgroups", (64, 64, 64, 1, 1), (64, 64, 128, 2, 3), (128, 64, 128, 2, 2),
    (128, 64, 64, 3, 2), (256, 64, 64, 1, 2), (64, 64, 64, 4, 4), (64, 128, 64, 2, 2), (256, 128, 64, 1, 2),
    (64, 128, 64, 4, 3), (64, 40, 240, 2, 3), (128, 64, 128, 4, 2),
).with_mistakes(
    ("out is forgotten, or the next tile of queries", "3 * warpgroups", "2 * warpgroups",
     "There are three tiles of that size: q, the next q, and out on its way to GMEM: see section 8."),
    ("the last row of lse is forgotten", "4 * (warpgroups + 1)", "4 * warpgroups", "See the table of section 8."),
    ("the gaps are forgotten", " - 1280", "", "They take 1280 bytes, of those that a program has: see the exercise."),
    ("the barriers are forgotten", (" + 8 * (warpgroups + 1)", " + 4 * 8"), ("", ""),
     "A barrier is 8 bytes of SMEM: one for each warpgroup's q, four for each slot, one more: see section 8."),
    ("each warpgroup has rings of its own", "2 * block_k", "2 * warpgroups * block_k",
     "The compute warpgroups read the same keys and values: see the shapes in section 8."),
)  # fmt: skip

PRODUCT, EXPONENTIALS = 256, 528


def product_with_k(j):
    return Issue("tensor", PRODUCT, f"s{j}")


def product_with_v(j):
    return Issue("tensor", PRODUCT, f"pv{j}")


def softmax(j):
    return Work("exponentials", EXPONENTIALS, f"p{j}")


def pipeline(steps):
    """Yield the operations of a compute warpgroup over `steps` tiles of keys."""
    yield product_with_k(0)
    yield Drain(0)
    yield softmax(0)
    for j in range(1, steps):
        yield product_with_k(j)
        yield product_with_v(j - 1)
        yield Drain(1)
        yield softmax(j)
        yield Drain(0)
    yield product_with_v(steps - 1)
    yield Drain(0)


def _fault_of_order(operations, steps):
    """A sentence on the first operation that uses what may not be there yet, or None."""
    in_flight, ready, softmaxed, ordered = [], set(), set(), []
    for operation in operations:
        if isinstance(operation, Drain):
            while len(in_flight) > max(operation.count, 0):
                ready.add(in_flight.pop(0))
            continue
        if not isinstance(operation, Issue | Work):
            return "something was yielded that is not one of the four operations."
        name, digits = operation.label, operation.label.lstrip("spv")
        if not digits.isdigit() or int(digits) >= steps:
            return f"{name} is ordered, but there {_are(steps, 'tile')}, counted from 0."
        j = int(digits)
        if isinstance(operation, Work):
            if f"s{j}" not in ready:
                return (
                    f"softmax {j} reads the scores of tile {j} before their product has surely ended; "
                    f"the products so far, in order: {', '.join(ordered)}."
                )
            if j in softmaxed:
                return f"softmax {j} is computed a second time."
            softmaxed.add(j)
            continue
        if name == f"s{j}":
            if name in ordered:
                return f"{name} is ordered a second time: the scores of a tile are computed once."
            if j and j - 1 not in softmaxed:
                return f"{name} is ordered while the scores of tile {j - 1} are needed; registers have room for one."
        elif j not in softmaxed:
            return f"pv{j} is ordered before softmax {j} has made p."
        elif f"pv{j - 1}" in in_flight:
            return f"p of tile {j} is written while pv{j - 1} may still read p of the tile before."
        ordered.append(name)
        in_flight.append(name)
    if in_flight:
        return f"the loop ends while {in_flight[0]} is still running."
    done = [int(name.removeprefix("pv")) for name in ordered if name.startswith("pv")]
    if done != list(range(steps)):
        return f"the products with v were {done}, expected each of {list(range(steps))} once, in this order."
    return None


def _run_pipeline(answer, steps):
    operations = _operations(answer(steps))
    fault = _fault_of_order(operations, steps)
    if fault:
        return fault
    cycles = simulate({"compute": iter(operations)}, {}).end
    enough = steps * (PRODUCT + EXPONENTIALS) + PRODUCT
    if cycles > enough:
        return f"right, but it takes {cycles:.0f} cycles where {enough} are enough: something waits that need not."
    return ""


PIPELINE = Exercise(
    pipeline, "Order the pipeline", outputs=("the order of operations",), run=_run_pipeline, judge=_complaint_or_none,
).with_cases("steps", (1,), (2,), (3,), (6,)).with_mistakes(
    ("no product runs while you take exponentials", "Drain(1)", "Drain(0)",
     "Order the scores, then the p v of the tile before, and await the older of the two only: see section 12."),
    ("the scores are the only product under way, and Drain(1) lets them run",
     ("        yield product_with_v(j - 1)\n", "yield softmax(j)"),
     ("", "yield softmax(j)\n        yield product_with_v(j - 1)"),
     "Order the product with v of the tile before as well, and then await the older of the two: see section 12."),
)  # fmt: skip


def tiles_of(program, programs, lengths):
    """Indices of the tiles that a program computes, so that no program has too many."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    mine = []
    for start in range(0, len(order), programs):
        turn = order[start : start + programs]
        if start // programs % 2 == 1 and len(turn) == programs:
            turn = turn[::-1]
        mine += turn[program : program + 1]
    return mine


def _run_balance(answer, lengths, programs):
    parts = []
    for program in range(programs):
        part = answer(program, programs, lengths)
        try:
            tiles = [float(i) for i in part]
        except (TypeError, ValueError):
            tiles = [0.5]
        if not all(tile.is_integer() for tile in tiles):
            raise Complaint(f"expected a list of tiles, each an integer, got {got(part)}")
        parts.append(tuple(map(int, tiles)))
    if (given := sorted(itertools.chain(*parts))) != list(range(len(lengths))):
        return {"tiles": tuple(given)}
    # Which of two equal tiles it is, and which program has them, makes no difference.
    return {"work": tuple(sorted(tuple(sorted(lengths[i] for i in part)) for part in parts))}


def _judge_balance(result, case):
    lengths, programs = case.arguments
    if "tiles" in result:
        given = ", ".join(map(str, result["tiles"]))
        return f"together the programs compute tiles {given}; expected are 0 to {len(lengths) - 1}, each once."
    worst = max(map(sum, result["work"]))
    ways = [[answer(program, programs, lengths) for program in range(programs)] for answer in (tiles_of, _by_least)]
    most = max(sum(lengths[i] for i in part) for parts in ways for part in parts)
    if worst > most:
        return f"every tile once, but the busiest program has {worst} units of work; {most} can be had."
    return None


def _by_least(program, programs, lengths):
    """Tiles go to whoever has least so far: with the longest first, another right answer."""
    loads, mine = [0] * programs, []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = loads.index(min(loads))
        loads[place] += lengths[i]
        mine += [i] if place == program else []
    return mine


BALANCE = Exercise(
    tiles_of, "Balance a causal mask", outputs=("the tiles of each program",), run=_run_balance, judge=_judge_balance,
).with_cases(
    "lengths programs", ([1, 2, 3, 4], 2), ([*range(1, 9)], 4), ("3 heads, 5 programs", 3 * [*range(1, 9)], 5),
    ([14, 2, 9, 17, 1, 6, 19, 11, 4, 13, 8], 3), ([2, 5, 1], 4), ([1, 1, 1, 1, 1, 2, 2, 2, 2, 2], 3),
    ([3, 1, 2], 1), ([7, 1, 5, 3, 4], 4),
).with_mistakes(
    ("tiles are given out in the order of the list", ("sorted", ", key=lambda i: lengths[i], reverse=True", "[::-1]"),
     ("list", "", ""),
     "The last ones may be the longest, and nothing is left to even them out: sort them first, see section 13."),
    ("every turn begins at the same end, or gives one tile to whoever has fewest", "[::-1]", "",
     "One program has the longest tile of every turn: go back and forth, or longest first to whoever has least."),
    ("the tiles are not sorted, or places in the sorted order are returned instead of tiles",
     ("sorted", ", key=lambda i: lengths[i], reverse=True"), ("list", ""),
     "Sort the indices by their lengths, not the lengths themselves: see the hints."),
)  # fmt: skip

EXERCISES = (RING, REGISTERS, SMEM, PIPELINE, BALANCE, MMA, WGMMA)
ORDER = (6, 1, 2, 3, 4, 5, 7)  # in which the notebook shows them
