"""The exercises of notebook 10.

Answers that put operations in order run in the model of `helpers.measure.timeline` first: it always comes
to an end, also where real warpgroups would wait for ever.
"""

import functools
import itertools

import numpy as np

from helpers.exercises.checking import Case, Complaint, Exercise, Mistake
from helpers.measure.races import ring_kernel_races, with_last_waits
from helpers.measure.timeline import Arrive, Drain, Fetch, Issue, OrderError, Read, Wait, Work, simulate

_MOST = 5000  # operations of an answer


def _complaint_or_none(result, case):
    """For exercises whose run returns "" for a right answer and a sentence for a wrong one."""
    return result or None


# 10.1 Place the barriers


def _ring_cases():
    def count(number, noun):
        return f"{number} {noun}{'s' * (number > 1)}"

    return [
        Case(
            ", ".join(map(count, (steps, stages, readers), ("tile", "slot", "compute warpgroup"))),
            (steps, stages, readers),
        )
        for steps, stages, readers in ((1, 1, 1), (2, 1, 1), (4, 2, 1), (7, 3, 2), (2, 4, 1))
    ]


AS_KERNELS = ((7, 3, 2),)  # the race detector takes its time


def _run_ring(answer, steps, stages, readers):
    """In the model, which always ends, and some cases then as a kernel under the race detector."""
    names = [f"compute {index}" for index in range(readers)]
    programs = {"memory": _operations(answer("memory", steps, stages))}
    programs |= {name: _operations(answer("compute", steps, stages)) for name in names}
    for name, operations in programs.items():
        if len(operations) > _MOST:
            return f"{name} is still not at the end after {_MOST} operations."
        for operation in operations:
            if not isinstance(operation, Wait | Arrive | Fetch | Read):
                return f"{name} yields an object of type {type(operation).__name__}, which is no operation."
            if isinstance(operation, Fetch if name != "memory" else Read | Arrive):
                return f"{name} yields {type(operation).__name__}, which is not its part: is the role looked at?"
            if not 0 <= operation.slot < stages:
                return f"{name} uses slot {operation.slot}, but there {_are(stages, 'slot')}, counted from 0."
    fetched = sorted(operation.tile for operation in programs["memory"] if isinstance(operation, Fetch))
    if fetched != list(range(steps)):
        return f"memory fetched the tiles {fetched}, expected each of {list(range(steps))} once."
    for name in names:
        for slot in range(stages):
            waits = sum(isinstance(op, Wait) and op == ("loaded", slot) for op in programs[name])
            tiles = len(range(slot, steps, stages))
            if waits > tiles:
                return f"{name} waits {waits} times at loaded[{slot}], but a ring puts {tiles} of the tiles there."
    computing = [programs[name] for name in names]
    try:
        run = _simulated(programs["memory"], computing)
    except OrderError as error:
        return f"{error}."
    for name in names:
        if run.tiles[name] != list(range(steps)):
            return f"{name} read the tiles {run.tiles[name]}, expected {list(range(steps))}."
    enough = _simulated(_ring("memory", steps, stages), [list(_ring("compute", steps, stages))] * readers).end
    if run.end > enough:
        return (
            f"right, but it takes {run.end:.0f} cycles where {enough:.0f} are enough: copies could run further ahead."
        )
    if (steps, stages, readers) not in AS_KERNELS:
        return ""
    found = ring_kernel_races(programs["memory"], computing, stages)
    return f"as a kernel, it makes the race detector say: {', '.join(found)}." if found else ""


def _simulated(memory, computing):
    groups = {f"compute {index}": iter(operations) for index, operations in enumerate(computing)}
    groups = {"memory": iter(with_last_waits(memory, computing))} | groups
    return simulate(groups, {"loaded": 1, "free": len(computing)}, latency=600)


def _operations(program):
    if program is None:
        raise Complaint("your function gives no operations: is a `yield` missing?")
    try:
        program = iter(program)
    except TypeError:
        raise Complaint("your function returns something that is no sequence of operations: `yield` them") from None
    return list(itertools.islice(program, _MOST + 1))


def _are(number, noun):
    return f"is 1 {noun}" if number == 1 else f"are {number} {noun}s"


def _ring(
    role,
    steps,
    stages,
    wait_free=True,
    wait_loaded=True,
    arrive=True,
    hasty=False,
    from_first=False,
    shift=0,
    one_slot=False,
    rotate=True,
    behind=False,
):
    for j in range(steps):
        slot = j % stages if rotate else j
        at = 0 if one_slot else slot
        if role == "memory":
            if wait_free and not behind and (j >= stages or from_first):
                yield Wait("free", (at + shift) % stages)
            yield Fetch("tile", slot, j, "loaded")
            if behind:
                yield Wait("free", slot)
        else:
            if wait_loaded:
                yield Wait("loaded", slot)
            if hasty and arrive:
                yield Arrive("free", at)
            yield Read("tile", slot)
            if arrive and not hasty:
                yield Arrive("free", at)


def _exchanged(role, steps, stages):
    return _ring({"memory": "compute", "compute": "memory"}[role], steps, stages)


def _one_less(role, steps, stages):
    return _ring(role, steps - 1, stages)


def _last_unread(role, steps, stages):
    return _ring(role, steps - (role == "compute"), stages)


def _edited(side, kind, edit):
    """The answer to 10.1 with every operation of a kind, on one side, replaced by those that edit returns.

    edit: function of (operation, its number among those of the kind, stages).
    """

    def answer(role, steps, stages):
        numbers = itertools.count()
        for operation in _ring(role, steps, stages):
            if role == side and isinstance(operation, kind):
                yield from edit(operation, next(numbers), stages)
            else:
                yield operation

    return answer


def _early(role, steps, stages):
    for operation in _ring(role, steps, stages, wait_free=role != "memory"):
        if isinstance(operation, Fetch) and operation.tile >= stages - 1:
            yield Wait("free", operation.slot)
        yield operation


def _in_batches(role, steps, stages):
    if role == "compute":
        yield from _ring(role, steps, stages)
        return
    for j in range(steps):
        if j and j % stages == 0:
            yield from (Wait("free", slot) for slot in range(stages))
        yield Fetch("tile", j % stages, j, "loaded")


RING = Exercise(
    number="10.1",
    title="Place the barriers",
    outputs=("the order of operations",),
    cases=_ring_cases,
    run=_run_ring,
    judge=_complaint_or_none,
    tried="fewer tiles than slots and more, one slot, two readers; in the model, one of them as a kernel too",
    mistakes=(
        Mistake(
            "the memory warpgroup fills a slot again without waiting until it is free",
            functools.partial(_ring, wait_free=False),
            "The second time a slot is used, its readers must be done: see section 4.",
        ),
        Mistake(
            "the compute warpgroup does not wait until the tile is loaded",
            functools.partial(_ring, wait_loaded=False),
            "A copy has only been ordered when Fetch returns: see section 3.",
        ),
        Mistake(
            "nobody says that a slot is free",
            functools.partial(_ring, arrive=False),
            "Every Wait needs an Arrive in somebody else's program: see section 4.",
        ),
        Mistake(
            "a slot is declared free before it has been read",
            functools.partial(_ring, hasty=True),
            "Arrive says that you are done with it: it comes after the Read, see section 4.",
        ),
        Mistake(
            "the memory warpgroup waits for slots that nobody has used yet",
            functools.partial(_ring, from_first=True),
            "The first tiles find their slots empty: do not wait for those, or let the readers arrive once before.",
        ),
        Mistake(
            "the memory warpgroup waits for each tile to arrive, or to be read, before it orders the next",
            functools.partial(_ring, behind=True),
            "Wait before the fetch that needs the slot, not after the one that filled it: see section 4.",
        ),
        Mistake(
            "the memory warpgroup begins to wait one tile too early",
            _early,
            "The first `stages` tiles find an empty slot, so tile j waits if j >= stages: see section 4.",
        ),
        Mistake(
            "the memory warpgroup waits until all slots are free before it fills them again",
            _in_batches,
            "Each slot can be filled as soon as it is free itself, whatever the others do: see section 4.",
        ),
        Mistake(
            'the memory warpgroup waits at "loaded" where it needs a free slot',
            _edited("memory", Wait, lambda wait, number, stages: [Wait("loaded", wait.slot)]),
            '"loaded" says that a tile has arrived; that it has been read, "free" says: see section 4.',
        ),
        Mistake(
            'copies arrive at "free" instead of "loaded"',
            _edited("memory", Fetch, lambda fetch, number, stages: [fetch._replace(barrier="free")]),
            'Whoever reads waits at "loaded", and that is where a copy must arrive: see section 4.',
        ),
        Mistake(
            "the number of the slot is fetched instead of the tile",
            _edited("memory", Fetch, lambda fetch, number, stages: [fetch._replace(tile=fetch.slot)]),
            "The slots are used again, the tiles are not: Fetch takes the slot j % stages and the tile j.",
        ),
        Mistake(
            "the memory warpgroup fetches nothing for the first tile",
            _edited("memory", Fetch, lambda fetch, number, stages: [fetch] if number else []),
            "There are tiles 0 to steps - 1.",
        ),
        Mistake(
            "the compute warpgroup arrives at the slot after the one that it has read",
            _edited("compute", Arrive, lambda arrive, number, stages: [Arrive("free", (arrive.slot + 1) % stages)]),
            "What has been read from slot j % stages makes that slot free: see section 4.",
        ),
        Mistake(
            "the compute warpgroup arrives at the slot before the one that it has read",
            _edited("compute", Arrive, lambda arrive, number, stages: [Arrive("free", (arrive.slot - 1) % stages)]),
            "What has been read from slot j % stages makes that slot free: see section 4.",
        ),
        Mistake(
            'the compute warpgroup arrives at "loaded"',
            _edited("compute", Arrive, lambda arrive, number, stages: [Arrive("loaded", arrive.slot)]),
            'It is the copy that arrives at "loaded"; a reader says "free": see section 4.',
        ),
        Mistake(
            'the compute warpgroup waits at "free"',
            _edited("compute", Wait, lambda wait, number, stages: [Wait("free", wait.slot)]),
            '"free" is for whoever fills a slot; a reader waits at "loaded": see section 4.',
        ),
        Mistake(
            "each read arrives twice",
            _edited("compute", Arrive, lambda arrive, number, stages: [arrive, arrive]),
            "One arrival of each reader completes a phase: see section 4.",
        ),
        Mistake(
            "a tile is waited for twice",
            _edited("compute", Wait, lambda wait, number, stages: [wait, wait]),
            "Each tile completes one phase of its slot's barrier, and each wait sees one: see section 4.",
        ),
        Mistake(
            "the tiles are awaited and freed, but not read",
            _edited("compute", Read, lambda read, number, stages: []),
            "Between the Wait and the Arrive stands the Read.",
        ),
        Mistake(
            "the two roles have changed places",
            _exchanged,
            'role says whose operations are wanted: "memory" fetches and "compute" reads, see section 4.',
        ),
        Mistake(
            "the last tile is left out",
            _one_less,
            "There are tiles 0 to steps - 1.",
        ),
        Mistake(
            "the last tile is fetched but not read",
            _last_unread,
            "There are tiles 0 to steps - 1, and all are read.",
        ),
        Mistake(
            "all slots share the barrier of slot 0",
            functools.partial(_ring, one_slot=True),
            "Each slot has a barrier of its own, or a free slot says nothing about which one: see section 4.",
        ),
        Mistake(
            "every tile has a slot of its own",
            functools.partial(_ring, rotate=False),
            "A ring uses its slots again: tile j goes into slot j % stages, see section 4.",
        ),
        Mistake(
            "the memory warpgroup waits for the next slot instead of the one it is about to fill",
            functools.partial(_ring, shift=1),
            "Tile j goes into slot j % stages, and that is the one that must be free.",
        ),
    ),
)

# 10.2 Share out the registers


def _register_cases():
    return [
        Case(f"{w} compute warpgroups, memory {m}", (w, m))
        for w, m in ((2, 24), (3, 24), (4, 24), (4, 40), (5, 32), (6, 24), (7, 40))
    ]


def _registers(
    warpgroups,
    memory,
    file=65536,
    at_start=True,
    round_start=True,
    round_end=True,
    count_memory=True,
    threads=128,
    share=None,
    start_of=lambda warpgroups: warpgroups + 1,
    down=lambda number: number // 8 * 8,
):
    groups = start_of(warpgroups)
    start = file / (threads * groups)
    start = down(start) if round_start else start // 1
    pool = start * groups if at_start else file / threads
    sharers = {"even": groups, "all": groups, "one": 1}.get(share, warpgroups)
    compute = (pool - (0 if share == "even" else memory * count_memory)) / sharers
    compute = down(compute) if round_end else compute // 1
    return int(start), int(compute)


def _register_expected(warpgroups, memory):
    """By search: the largest multiple of 8 with which nobody asks for more than there was at the start."""
    groups = warpgroups + 1
    start = max(r for r in range(0, 256, 8) if r * 128 * groups <= 65536)
    compute = max(r for r in range(0, 256, 8) if r * warpgroups + memory <= start * groups)
    return start, compute


REGISTERS = Exercise(
    number="10.2",
    title="Share out the registers",
    outputs=("registers at the start", "registers of a compute thread"),
    cases=_register_cases,
    expected=_register_expected,
    tried="two to seven compute warpgroups, 24 to 40 registers for the memory warpgroup",
    mistakes=(
        Mistake(
            "the registers that rounding left unused at the start are shared out as well",
            functools.partial(_registers, at_start=False),
            "What can be shared out is what the program started with; this request would wait for ever: see section 6.",
        ),
        Mistake(
            "the number at the start is not rounded down to a multiple of 8",
            functools.partial(_registers, round_start=False),
            "Registers come in steps of 8 for each thread: see section 6.",
        ),
        Mistake(
            "the number of a compute thread is not rounded down to a multiple of 8",
            functools.partial(_registers, round_end=False),
            "setmaxnreg takes multiples of 8 only: see section 6.",
        ),
        Mistake(
            "the memory warpgroup's registers are forgotten",
            functools.partial(_registers, count_memory=False),
            "It keeps some for itself, and they come out of the same total: see section 6.",
        ),
        Mistake(
            "all warpgroups get the same",
            functools.partial(_registers, share="even"),
            "The memory warpgroup gives up all but `memory`, and the others divide what it gave.",
        ),
        Mistake(
            "neither number is rounded down to a multiple of 8",
            functools.partial(_registers, round_start=False, round_end=False),
            "Registers come in steps of 8 for each thread: see section 6.",
        ),
        Mistake(
            "both numbers are rounded up to a multiple of 8",
            functools.partial(_registers, down=lambda number: -(-number // 8) * 8),
            "There are not as many: round down.",
        ),
        Mistake(
            "both numbers are rounded to the nearest multiple of 8",
            functools.partial(_registers, down=lambda number: round(number / 8) * 8),
            "There may not be as many: round down.",
        ),
        Mistake(
            "the memory warpgroup's threads are forgotten",
            functools.partial(_registers, start_of=lambda warpgroups: warpgroups),
            "At the start it has as many registers as any other: there is one warpgroup more to divide by.",
        ),
        Mistake(
            "`memory` is multiplied by 128, and the rest is not",
            functools.partial(_registers, count_memory=128),
            "Count in units of one warpgroup's threads, all of it, or in registers, all of it: see the hand case.",
        ),
        Mistake(
            "what the memory warpgroup keeps is added to the total",
            functools.partial(_registers, count_memory=-1),
            "What it keeps the others cannot have: subtract it.",
        ),
        Mistake(
            "what is left is divided by all warpgroups, the memory warpgroup included",
            functools.partial(_registers, share="all"),
            "It has its share already: only the compute warpgroups divide the rest.",
        ),
        Mistake(
            "what is left is not divided among the compute warpgroups",
            functools.partial(_registers, share="one"),
            "Each of them gets its part: divide by `warpgroups`.",
        ),
        Mistake(
            "a warpgroup is taken to have 32 threads",
            functools.partial(_registers, threads=32),
            "32 threads are a warp; a warpgroup is four of them: see section 1.",
        ),
    ),
)

# 10.3 The budget of shared memory


_OWN = 1280
_LIMIT = 232448


def _smem_cases():
    shapes = [
        (64, 64, 64, 1, 1),
        (64, 64, 128, 2, 3),
        (128, 64, 128, 2, 2),
        (128, 64, 64, 3, 2),
        (256, 64, 64, 1, 2),
        (64, 64, 64, 4, 4),
        (64, 128, 64, 2, 2),
        (256, 128, 64, 1, 2),  # what does not grow is too much already
        (64, 128, 64, 4, 3),  # where the bytes for scratch and gaps decide
        (64, 40, 240, 2, 3),  # where the last stage fits to the byte
    ]
    return [
        Case(
            f"H={H}, block_q={q}, block_k={k}, {s} stage{'s' * (s > 1)}, {w} warpgroup{'s' * (w > 1)}", (H, q, k, s, w)
        )
        for H, q, k, s, w in shapes
    ]


def _smem(
    H, block_q, block_k, stages, warpgroups,
    itemsize=2, rings=2, q_tiles=3, shared=0, own_rings=False, ring_block=None, all_staged=False,
    lse=lambda w: 4 * (w + 1), barriers=lambda w, s: 8 * (w + 1 + 4 * s),
    limit=_LIMIT - _OWN, least=0, most_of=lambda room, stage, stages: room // stage,
):  # fmt: skip
    """The answer to 10.3, or a wrong one. shared: how many of the q_tiles there are once, not for each warpgroup."""

    def size(stages):
        tile = block_q * H * itemsize * (stages if all_staged else 1)
        rows = {"q": block_q}.get(ring_block, block_k) * (warpgroups if own_rings else 1)
        own = ((q_tiles - shared) * warpgroups + shared) * tile
        return own + rings * stages * rows * H * itemsize + lse(warpgroups) * block_q + barriers(warpgroups, stages)

    return size(stages), max(least, most_of(limit - size(0), size(1) - size(0), stages))


def _smem_expected(H, block_q, block_k, stages, warpgroups):
    """From the shapes of the scratch arrays, one after another."""

    def size(slots):
        arrays = [((2, warpgroups, block_q, H), 2), ((slots, block_k, H), 2), ((slots, block_k, H), 2)]
        arrays += [((warpgroups, block_q, H), 2), ((warpgroups + 1, block_q), 4)]
        arrays += [((warpgroups,), 8), ((1,), 8)] + 4 * [((slots,), 8)]
        return sum(int(np.prod(shape)) * item for shape, item in arrays)

    slots = 0
    while size(slots + 1) + _OWN <= _LIMIT:
        slots += 1
    return size(stages), slots


SMEM = Exercise(
    number="10.3",
    title="The budget of shared memory",
    outputs=("bytes", "most stages"),
    cases=_smem_cases,
    expected=_smem_expected,
    tried="three head dims, one to four stages, one to four warpgroups",
    mistakes=(
        Mistake(
            "only one of the two rings is counted",
            functools.partial(_smem, rings=1),
            "Keys and values have a ring each: see the table of section 7.",
        ),
        Mistake(
            "o_smem is forgotten, or the next tile of queries",
            functools.partial(_smem, q_tiles=2),
            "There are three tiles of that size: q, the next q, and out on its way to GMEM: see section 7.",
        ),
        Mistake(
            "neither o_smem nor the next tile of queries is counted",
            functools.partial(_smem, q_tiles=1),
            "Beside q, the next q and out have places of their own, each as large as q's: see section 7.",
        ),
        Mistake(
            "all warpgroups share one tile of queries",
            functools.partial(_smem, shared=3),
            "Keys and values are shared; queries are not: see section 7.",
        ),
        Mistake(
            "elements are counted as float32",
            functools.partial(_smem, itemsize=4),
            "Tiles in SMEM have the dtype of the inputs, two bytes an element: see section 7.",
        ),
        Mistake(
            "q and out get a slot for each stage as well",
            functools.partial(_smem, all_staged=True),
            "Only what streams by needs a ring; a tile of queries stays: see section 7.",
        ),
        Mistake(
            "lse_smem is forgotten",
            functools.partial(_smem, lse=lambda w: 0),
            "One float32 for each query leaves through SMEM too: see section 7.",
        ),
        Mistake(
            "the barriers are forgotten",
            functools.partial(_smem, barriers=lambda w, s: 0),
            "A barrier is 8 bytes of SMEM: one for each warpgroup's q, four for each slot, one more: see section 7.",
        ),
        Mistake(
            "all warpgroups share q_smem, but not o_smem",
            functools.partial(_smem, shared=2),
            "Each warpgroup has queries of its own: see the shapes in section 7.",
        ),
        Mistake(
            "all warpgroups share o_smem",
            functools.partial(_smem, shared=1),
            "Each warpgroup has a tile of out of its own: see the shapes in section 7.",
        ),
        Mistake(
            "each warpgroup has rings of its own",
            functools.partial(_smem, own_rings=True),
            "The compute warpgroups read the same keys and values: see the shapes in section 7.",
        ),
        Mistake(
            "the tiles of the rings are given block_q rows",
            functools.partial(_smem, ring_block="q"),
            "k_smem and v_smem hold tiles of block_k keys: see the shapes in section 7.",
        ),
        Mistake(
            "lse_smem lacks its last row",
            functools.partial(_smem, lse=lambda w: 4 * w),
            "It has warpgroups + 1 rows: see the table of section 7.",
        ),
        Mistake(
            "lse_smem is counted in 16 bits",
            functools.partial(_smem, lse=lambda w: 2 * (w + 1)),
            "It is float32, 4 bytes an element: see the table of section 7.",
        ),
        Mistake(
            "there is one row of lse_smem for all warpgroups",
            functools.partial(_smem, lse=lambda w: 4),
            "It has warpgroups + 1 rows: see the table of section 7.",
        ),
        Mistake(
            "a barrier is counted as 4 bytes",
            functools.partial(_smem, barriers=lambda w, s: 4 * (w + 1 + 4 * s)),
            "A barrier has 8 bytes: see the table of section 7.",
        ),
        Mistake(
            "barriers are counted, but not their bytes",
            functools.partial(_smem, barriers=lambda w, s: w + 1 + 4 * s),
            "A barrier has 8 bytes: see the table of section 7.",
        ),
        Mistake(
            "each stage has one barrier",
            functools.partial(_smem, barriers=lambda w, s: 8 * (w + 1 + s)),
            "A stage has four: loaded and free, for keys and for values.",
        ),
        Mistake(
            "each stage has two barriers",
            functools.partial(_smem, barriers=lambda w, s: 8 * (w + 1 + 2 * s)),
            "A stage has four: loaded and free, for keys and for values.",
        ),
        Mistake(
            "the stages that can be added are returned, not all that fit",
            functools.partial(_smem, most_of=lambda room, stage, stages: room // stage - stages),
            "Count the stages that are there already, too.",
        ),
        Mistake(
            "the number of stages is rounded up",
            functools.partial(_smem, most_of=lambda room, stage, stages: -(-room // stage)),
            "The last one would not fit whole: round down.",
        ),
        Mistake(
            "the number of stages is rounded to the nearest",
            functools.partial(_smem, most_of=lambda room, stage, stages: round(room / stage)),
            "The last one may not fit whole: round down.",
        ),
        Mistake(
            "one stage more is counted than fits",
            functools.partial(_smem, most_of=lambda room, stage, stages: room // stage + 1),
            "Stop at the last number of stages that fits, not at the first that does not.",
        ),
        Mistake(
            "one stage less is counted than fits",
            functools.partial(_smem, most_of=lambda room, stage, stages: room // stage - 1),
            "Count the first stage, too.",
        ),
        Mistake(
            "the number of stages is negative where nothing fits",
            functools.partial(_smem, least=-_LIMIT),
            "It is 0 where not even one stage fits.",
        ),
        Mistake(
            "at least one stage is returned, whether it fits or not",
            functools.partial(_smem, least=1),
            "It is 0 where not even one stage fits.",
        ),
        Mistake(
            "a stage that fits to the byte is left out",
            functools.partial(_smem, limit=_LIMIT - _OWN - 1),
            "Compare with <=.",
        ),
        Mistake(
            "the 1280 bytes for scratch and gaps are forgotten",
            functools.partial(_smem, limit=_LIMIT),
            "It has to fit beside your arrays when you count the stages: see the end of section 7.",
        ),
    ),
)

# 10.4 Order the pipeline

PRODUCT, EXPONENTIALS = 256, 528


def _pipeline_cases():
    return [Case(f"{steps} tile{'s' * (steps > 1)}", (steps,)) for steps in (1, 2, 3, 6)]


def _fault_of_order(operations, steps):
    """A sentence on the first operation that uses what may not be there yet, or None."""
    in_flight, ready, softmaxed, done, ordered = [], set(), set(), [], []
    for operation in operations:
        if isinstance(operation, Drain):
            while len(in_flight) > max(operation.count, 0):
                name = in_flight.pop(0)
                ready.add(name)
        elif isinstance(operation, Issue | Work):
            kind, digits = operation.label.rstrip("0123456789"), operation.label.lstrip("spv")
            if not digits.isdigit():
                return f"{operation.label} is ordered: tiles are numbered from 0."
            j = int(digits)
            if not 0 <= j < steps:
                return f"{operation.label} is ordered, but there {_are(steps, 'tile')}."
            if isinstance(operation, Work):
                if f"s{j}" not in ready:
                    return (
                        f"softmax {j} reads the scores of tile {j} before their product has surely ended; "
                        f"the products so far, in order: {', '.join(ordered)}."
                    )
                softmaxed.add(j)
                continue
            if kind == "s" and f"s{j}" in ordered:
                return f"s{j} is ordered a second time: the scores of a tile are computed once."
            ordered.append(f"{kind}{j}")
            if kind == "s":
                if j and j - 1 not in softmaxed:
                    return f"s{j} is ordered while the scores of tile {j - 1} are needed; registers have room for one."
                in_flight.append(f"s{j}")
            else:
                if j not in softmaxed:
                    return f"pv{j} is ordered before softmax {j} has made p."
                if f"pv{j - 1}" in in_flight:
                    return f"p of tile {j} is written while pv{j - 1} may still read p of the tile before."
                done.append(j)
                in_flight.append(f"pv{j}")
        else:
            return "something was yielded that is not one of the four operations."
    if in_flight:
        return f"the loop ends while {in_flight[0]} is still running."
    if done != list(range(steps)):
        return f"the products with v were {done}, expected each of {list(range(steps))} once, in this order."
    return None


def _run_pipeline(answer, steps):
    operations = _operations(answer(steps))
    if len(operations) > _MOST:
        return f"still not at the end after {_MOST} operations."
    fault = _fault_of_order(operations, steps)
    if fault:
        return fault
    cycles = simulate({"compute": iter(operations)}, {}).end
    enough = steps * (PRODUCT + EXPONENTIALS) + PRODUCT
    if cycles > enough:
        return f"right, but it takes {cycles:.0f} cycles where {enough} are enough: something waits that need not."
    return ""


def _s(j):
    return Issue("tensor", PRODUCT, f"s{j}")


def _pv(j):
    return Issue("tensor", PRODUCT, f"pv{j}")


def _softmax(j):
    return Work("exponentials", EXPONENTIALS, f"p{j}")


def _written(first, later, last):
    """The answer to 10.4 in letters, or a wrong one: for tile 0, for each later tile, and after the loop.

    k: product with k, s: softmax, v: product with v, u: that of the tile before, a digit: Drain.
    """
    made = {"k": _s, "s": _softmax, "v": _pv, "u": lambda j: _pv(j - 1)}

    def answer(steps):
        for j, letters in enumerate([first] + [later] * (steps - 1)):
            yield from (Drain(int(letter)) if letter.isdigit() else made[letter](j) for letter in letters)
        yield from (Drain(int(letter)) if letter.isdigit() else made[letter](steps - 1) for letter in last)

    return answer


def _ahead(steps):
    """Two tiles of scores at once."""
    yield _s(0)
    for j in range(steps):
        yield Drain(1 if j else 0)
        if j + 1 < steps:
            yield _s(j + 1)
        yield _softmax(j)
        yield Drain(0)
        yield _pv(j)
    yield Drain(0)


def _from_one(steps):
    """Tiles numbered from 1."""
    for operation in _written("k0s", "ku1s0", "v0")(steps):
        if isinstance(operation, Drain):
            yield operation
        else:
            kind = operation.label.rstrip("0123456789")
            yield operation._replace(label=f"{kind}{int(operation.label[len(kind) :]) + 1}")


PIPELINE = Exercise(
    number="10.4",
    title="Order the pipeline",
    outputs=("the order of operations",),
    cases=_pipeline_cases,
    run=_run_pipeline,
    judge=_complaint_or_none,
    tried="one to six tiles; nothing used before it is there, and no cycle wasted",
    mistakes=(
        Mistake(
            "no product runs while you take exponentials",
            _written("k0sv0", "k0sv0", ""),
            "Order the scores, then the p v of the tile before, and await the older of the two only: see section 11.",
        ),
        Mistake(
            "the product with v is ordered before that of the new scores",
            _written("k0s", "uk1s0", "v0"),
            "Drain(1) then awaits the product with v, not the scores: what you need first must be ordered first.",
        ),
        Mistake(
            "the scores are not awaited before their softmax",
            _written("k0s", "kus0", "v0"),
            "Two products are under way then, and Drain(1) awaits the older one: see section 11.",
        ),
        Mistake(
            "the first scores are not awaited",
            _written("ks", "ku1s0", "v0"),
            "One product is under way there, so Drain(0) awaits it: see the hand case.",
        ),
        Mistake(
            "the scores are the only product under way, and Drain(1) lets them run",
            _written("k0s", "k1su0", "v0"),
            "Order the product with v of the tile before as well, and then await the older of the two: see section 11.",
        ),
        Mistake(
            "the last product with v is forgotten",
            _written("k0s", "ku1s0", "0"),
            "Products with v run one tile late, so one is left when the loop ends: see section 11.",
        ),
        Mistake(
            "the last product with v is not awaited",
            _written("k0s", "ku1s0", "v"),
            "At the end nothing may be unfinished: Drain(0).",
        ),
        Mistake(
            "the product with v does not lag behind by one tile",
            _written("k0s", "kv1s0", "v0"),
            "In step j there is no p of tile j yet; there is that of tile j − 1: see section 11.",
        ),
        Mistake(
            "the first tile's product with v is ordered before the loop, and once more in it",
            _written("k0sv0", "ku1s0", "v0"),
            "It runs one tile late: in the loop, beneath the softmax of tile 1.",
        ),
        Mistake(
            "the product with v is not awaited at the end of a step",
            _written("k0s", "ku1s", "v0"),
            "The next p goes into the registers that it still reads: end each step with Drain(0), see section 11.",
        ),
        Mistake(
            "tiles are numbered from 1",
            _from_one,
            "There are tiles 0 to steps - 1.",
        ),
        Mistake(
            "two tiles of scores are alive at once",
            _ahead,
            "It could be faster still, but at H = 64 the registers do not hold it: see the picture of section 6.",
        ),
    ),
)

# 10.5 Balance a causal mask


def _balance_cases():
    random = np.random.default_rng(105)
    causal = [(i + 1) for i in range(8)]
    cases = [
        ("tiles of 1 to 4, 2 programs", [1, 2, 3, 4], 2),
        ("tiles of 1 to 8, 4 programs", causal, 4),
        ("3 heads of tiles of 1 to 8, 5 programs", causal * 3, 5),
        ("11 tiles of random lengths, 3 programs", random.integers(1, 20, 11).tolist(), 3),
        ("fewer tiles than programs", [2, 5, 1], 4),
        ("five tiles of 1 and five of 2, 3 programs", [1] * 5 + [2] * 5, 3),
        ("one program", [3, 1, 2], 1),
        ("as many tiles as programs, and one more", [7, 1, 5, 3, 4], 4),
    ]
    return [Case(label, (lengths, programs)) for label, lengths, programs in cases]


def _run_balance(answer, lengths, programs):
    parts = []
    for program in range(programs):
        part = answer(program, programs, lengths)
        if part is None:
            raise Complaint("expected a list of tiles, got None: is a `return` missing?")
        try:
            tiles = [float(i) for i in part]
        except (TypeError, ValueError):
            tiles = [0.5]
        if not all(tile.is_integer() for tile in tiles):
            raise Complaint("expected a list of tiles, each an integer")
        parts.append(tuple(map(int, tiles)))
    if sorted(itertools.chain(*parts)) != list(range(len(lengths))):
        return {"tiles": tuple(parts)}
    # Which of two equal tiles it is, and which program has them, makes no difference.
    return {"work": tuple(sorted(tuple(sorted(lengths[i] for i in part)) for part in parts))}


def _loads(parts, lengths):
    return [sum(lengths[i] for i in part) for part in parts]


def _ordered(lengths, order):
    tiles = range(len(lengths))
    return list(tiles) if order == "given" else sorted(tiles, key=lambda i: lengths[i], reverse=order == "longest")


def _dealt(program, programs, lengths, order="longest", snake=True, last=True):
    tiles, mine = _ordered(lengths, order), []
    for turn in range(-(-len(tiles) // programs)):
        start = turn * programs
        full = start + programs <= len(tiles)
        backwards = snake and turn % 2 and (full or not last)
        place = start + (programs - 1 - program if backwards else program)
        if place < len(tiles):
            mine.append(tiles[place])
    return mine


def _in_blocks(program, programs, lengths):
    share = -(-len(lengths) // programs)
    return list(range(len(lengths)))[program * share : (program + 1) * share]


def _strided(program, programs, lengths):
    return list(range(program, len(lengths), programs))


def _truncated(program, programs, lengths):
    mine = _dealt(program, programs, lengths)
    return mine[: len(lengths) // programs]


def _by_least(program, programs, lengths, order="longest"):
    """To whoever has least so far."""
    loads, mine = [0] * programs, []
    for i in _ordered(lengths, order):
        place = loads.index(min(loads))
        loads[place] += lengths[i]
        mine += [i] if place == program else []
    return mine


def _past_the_end(program, programs, lengths):
    tiles, turns = _ordered(lengths, "longest"), range(-(-len(lengths) // programs))
    return [tiles[turn * programs + (programs - 1 - program if turn % 2 else program)] for turn in turns]


def _from_both_ends(program, programs, lengths):
    tiles = _ordered(lengths, "longest")
    pairs = [list(dict.fromkeys((i, len(tiles) - 1 - i))) for i in range(-(-len(tiles) // 2))]
    return [tiles[i] for pair in pairs[program::programs] for i in pair]


def _judge_balance(result, case):
    lengths, programs = case.arguments
    if "tiles" in result:
        given = sorted(int(i) for part in result["tiles"] for i in part)
        missing = sorted(set(range(len(lengths))) - set(given))
        if missing:
            return f"tile {missing[0]} has no program."
        strange = next((i for i in given if not 0 <= i < len(lengths)), None)
        if strange is not None:
            return f"there is no tile {strange}."
        return f"tile {next(i for i in given if given.count(i) > 1)} is computed twice."
    worst = max(sum(map(int, part)) for part in result["work"])
    snake = max(_loads([_dealt(p, programs, lengths) for p in range(programs)], lengths))
    most = max(snake, max(_loads([_by_least(p, programs, lengths) for p in range(programs)], lengths)))
    if worst > most:
        return f"every tile once, but the busiest program has {worst} units of work; {most} can be had."
    return None


BALANCE = Exercise(
    number="10.5",
    title="Balance a causal mask",
    outputs=("the tiles of each program",),
    cases=_balance_cases,
    run=_run_balance,
    judge=_judge_balance,
    tried="causal tiles of one head and of three, random lengths, fewer tiles than programs",
    mistakes=(
        Mistake(
            "tiles are dealt in the order given",
            _strided,
            "The last ones may be the longest, and nothing is left to even them out: sort them first, see section 12.",
        ),
        Mistake(
            "tiles are cut into blocks of neighbours",
            _in_blocks,
            "Neighbouring tiles have similar lengths, so one program gets all the long ones: see section 12.",
        ),
        Mistake(
            "the shortest tiles come first",
            functools.partial(_dealt, order="shortest"),
            "Short tiles are good for filling up at the end, so keep them for last: see section 12.",
        ),
        Mistake(
            "every turn is dealt from the same end, or gives one tile to whoever has fewest",
            functools.partial(_dealt, snake=False),
            "One program has the longest tile of every turn: go back and forth, or longest first to whoever has least.",
        ),
        Mistake(
            "the tiles of the last, incomplete turn are dropped",
            _truncated,
            "Round the number of turns up: the last one may have fewer tiles than programs.",
        ),
        Mistake(
            "the last, incomplete turn is dealt backwards too, so that long tiles come together",
            functools.partial(_dealt, last=False),
            "A turn that is not full is never turned, or the busiest program can get busier: see section 12.",
        ),
        Mistake(
            "the lengths are returned instead of the indices of the tiles",
            lambda program, programs, lengths: [lengths[i] for i in _dealt(program, programs, lengths)],
            "Return the numbers of the tiles, as in the case worked by hand.",
            variants=(lambda program, programs, lengths: [lengths[i] for i in _by_least(program, programs, lengths)],),
        ),
        Mistake(
            "tiles go to whoever has least, but in the order given",
            functools.partial(_by_least, order="given"),
            "The longest tiles must come first, while short ones are left to even things out: sort the indices.",
        ),
        Mistake(
            "the longest and the shortest are paired, and the pairs dealt in turns",
            _from_both_ends,
            "Such pairs need not have the same sum: follow the rule of the task.",
        ),
        Mistake(
            "the last turn is taken to be complete",
            _past_the_end,
            "It may have fewer tiles than programs: does it have one at this program's place?",
        ),
        Mistake(
            "the first program gets everything",
            lambda program, programs, lengths: [] if program else list(range(len(lengths))),
            "The work is to be shared out: every program takes its own list.",
        ),
        Mistake(
            "tiles are counted from 1",
            lambda program, programs, lengths: [i + 1 for i in _dealt(program, programs, lengths)],
            "lengths[i] is the work of tile i, and the first i is 0.",
            variants=(lambda program, programs, lengths: [i + 1 for i in _by_least(program, programs, lengths)],),
        ),
        Mistake(
            "every program computes all tiles",
            lambda program, programs, lengths: list(range(len(lengths))),
            "Over all programs every tile is computed once: take only the share of `program`.",
        ),
        Mistake(
            "a snake runs over tiles that are not sorted, or places in the sorted order are returned instead of tiles",
            lambda program, programs, lengths: _dealt(program, programs, sorted(lengths, reverse=True)),
            "Sort the indices by their lengths, not the lengths themselves: see the hints.",
        ),
    ),
)

EXERCISES = (RING, REGISTERS, SMEM, PIPELINE, BALANCE)
