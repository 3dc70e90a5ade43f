"""The exercises of notebook 17: operations of a rung, a race, who holds what of a product, banks."""

import functools
from collections import Counter, defaultdict

import numpy as np

from helpers.exercises.checking import Case, Exercise, Mistake

# 17.1 What does the first rung cost?


def _operations(T, S, H, *, each=lambda H: 2 * H + 2, threads=lambda T, H: T * H):
    return threads(T, H) * S * each(H), 4 * T * S * H


def _operations_cases():
    sizes = [(1, 1, 1), (2, 3, 4), (128, 128, 64), (100, 700, 128), (5, 1, 7), (4096, 4096, 64)]
    return [Case(f"T={T}, S={S}, H={H}", (T, S, H)) for T, S, H in sizes]


def _operations_mistake(**options):
    return functools.partial(_operations, **options)


OPERATIONS = Exercise(
    number="17.1",
    title="What does the first rung cost?",
    outputs=("first rung", "needed"),
    cases=_operations_cases,
    expected=_operations,
    tried="lengths that differ, head dims from 1 to 128",
    mistakes=(
        Mistake(
            "there is a thread for each query only",
            _operations_mistake(threads=lambda T, H: T),
            "There is a thread for each query and each dimension: see section 2.",
        ),
        Mistake(
            "the sum of the values is left out",
            _operations_mistake(each=lambda H: 2 * H),
            "Each thread multiplies a weight with its one element of a value, and adds it: 2 operations more.",
        ),
        Mistake(
            "only multiplications are counted",
            _operations_mistake(each=lambda H: H + 1),
            "A multiplication and an addition are two operations.",
            (lambda T, S, H: (T * H * S * (H + 1), 2 * T * S * H),),
        ),
        Mistake(
            "every thread adds up all dimensions of the values",
            _operations_mistake(each=lambda H: 4 * H),
            "A thread owns one dimension of out: 2 operations a key, not 2 H.",
        ),
        Mistake(
            "only the logits are counted as needed",
            lambda T, S, H: (_operations(T, S, H)[0], 2 * T * S * H),
            "Attention has two products, 2 T S H operations each.",
        ),
        Mistake(
            "the two are swapped",
            lambda T, S, H: _operations(T, S, H)[::-1],
            "Return the first rung's operations first.",
        ),
    ),
)


# 17.2 Find the race


def _races(touches, *, by=("index", "epoch"), needs_write=True, needs_other=True):
    names = ("thread", "epoch", "index", "writes")
    rows = [dict(zip(names, touch, strict=True)) for touch in touches]
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            together = all(a[name] == b[name] for name in by)
            wrote = a["writes"] or b["writes"] if needs_write is True else needs_write(a, b)
            other = a["thread"] != b["thread"] or not needs_other
            if together and wrote and other:
                return True
    return False


def _first_pair(touches):
    """The verdict of the first two touches of one element in one epoch."""
    for i, a in enumerate(touches):
        for b in touches[i + 1 :]:
            if a[1:3] == b[1:3]:
                return _races([a, b])
    return False


def _touched_last(touches):
    """Each touch against the last one of its element in its epoch."""
    before = {}
    for touch in touches:
        if _races([before.get(touch[1:3], touch), touch]):
            return True
        before[touch[1:3]] = touch
    return False


def _one_reader(touches):
    """A writer and the last reader of each element, where one that has read before is forgotten."""
    writer, reader = {}, {}
    for thread, epoch, index, writes in touches:
        place = epoch, index
        others = (writer, reader) if writes else (writer,)
        if any(found.get(place, thread) != thread for found in others):
            return True
        (writer if writes else reader)[place] = thread
    return False


def _races_cases():
    def tile(late=()):
        """Eight threads write an element each and read all; those that are late write after the barrier."""
        writes = [(thread, int(thread in late), thread, True) for thread in range(8)]
        return writes + [(thread, 1, index, False) for thread in range(8) for index in range(8)]

    return [
        Case("nothing happens", ([],)),
        Case("a thread reads what it wrote", ([(0, 0, 5, True), (0, 0, 5, False)],)),
        Case("another writes it after a barrier", ([(0, 0, 5, False), (1, 1, 5, True)],)),
        Case("two write it, with a barrier between them", ([(0, 0, 5, True), (1, 1, 5, True)],)),
        Case("another thread reads it", ([(0, 0, 5, True), (1, 0, 5, False)],)),
        Case("another reads it after a barrier", ([(0, 0, 5, True), (1, 1, 5, False)],)),
        Case("another reads an element beside it", ([(0, 0, 5, True), (1, 0, 6, False)],)),
        Case("two threads read", ([(0, 2, 5, False), (1, 2, 5, False)],)),
        Case("another thread writes what one has read", ([(0, 0, 5, False), (1, 0, 5, True)],)),
        Case("two threads write", ([(3, 1, 7, True), (4, 1, 7, True)],)),
        Case("the next tile comes too early", ([(0, 0, 1, True), (1, 1, 1, False), (0, 1, 1, True)],)),
        Case("a race after a barrier", ([(0, 0, 1, True), (1, 1, 1, False), (2, 2, 1, True), (5, 2, 1, False)],)),
        Case("a race before a barrier, and a write after it", ([(0, 0, 1, True), (1, 0, 1, False), (2, 1, 1, True)],)),
        Case("the write after the barrier comes between", ([(0, 0, 1, True), (2, 1, 1, True), (1, 0, 1, False)],)),
        Case("in another order", ([(1, 0, 5, False), (2, 1, 9, False), (0, 0, 5, True)],)),
        Case("the writer reads before another does", ([(0, 0, 5, True), (0, 0, 5, False), (1, 0, 5, False)],)),
        Case("two have read when one of them writes", ([(0, 0, 5, False), (1, 0, 5, False), (0, 0, 5, True)],)),
        Case("two have read when the second of them writes", ([(0, 0, 5, False), (1, 0, 5, False), (1, 0, 5, True)],)),
        Case("a touch of something else between", ([(0, 0, 5, True), (0, 1, 9, False), (1, 0, 5, False)],)),
        Case("a tile is written and, after a barrier, read by all", (tile(),)),
        Case("one of them writes after the barrier", (tile(late=(5,)),)),
    ]


RACES = Exercise(
    number="17.2",
    title="Find the race",
    outputs=("race",),
    cases=_races_cases,
    expected=_races,
    tried="reads and writes of one thread and of several, with and without a barrier, of one element and of several",
    mistakes=(
        Mistake(
            "a thread races with itself",
            functools.partial(_races, needs_other=False),
            "What one thread does is in order: two different threads are needed.",
        ),
        Mistake(
            "barriers are not counted",
            functools.partial(_races, by=("index",)),
            "A barrier stands between two epochs: only touches of the same epoch race.",
        ),
        Mistake(
            "elements are not told apart",
            functools.partial(_races, by=("epoch",)),
            "Both must touch the same index.",
        ),
        Mistake(
            "two reads race",
            functools.partial(_races, needs_write=lambda a, b: True),
            "Reads do not disturb each other: one of the two must write.",
        ),
        Mistake(
            "only two writes race",
            functools.partial(_races, needs_write=lambda a, b: a["writes"] and b["writes"]),
            "A read beside a write races too: it sees the old value or the new one.",
        ),
        Mistake(
            "each touch is compared with earlier writes only",
            functools.partial(_races, needs_write=lambda a, b: a["writes"]),
            "The order of the list says nothing: threads are not in order. Look at each pair both ways.",
        ),
        Mistake(
            "the first pair decides",
            _first_pair,
            "One pair that does not race proves nothing: go on until one does, or none is left.",
        ),
        Mistake(
            "only the touch before is remembered",
            _touched_last,
            "Any two touches can race, with others of the same element between them.",
        ),
        Mistake(
            "of those that read an element only the last is remembered",
            _one_reader,
            "A write races with each other thread that reads the element, not with the last reader alone.",
        ),
        Mistake(
            "two writes do not race",
            functools.partial(_races, needs_write=lambda a, b: a["writes"] != b["writes"]),
            "Two threads that write race too: either value may stay.",
        ),
    ),
)


# 17.3 Who holds this element?


def _held(row, column, *, group=lambda r: r % 8, pair=lambda c: c % 8 // 2, part=lambda r, c: r // 8 + 2 * (c // 8)):
    return 4 * group(row) + pair(column), part(row, column), column % 2


def _held_cases():
    places = [(0, 0), (0, 1), (1, 0), (0, 2), (8, 0), (0, 8), (8, 8), (15, 15), (3, 13), (10, 6), (7, 7), (12, 9)]
    return [Case(f"row {row}, column {column}", (row, column)) for row, column in places]


HELD = Exercise(
    number="17.3",
    title="Who holds this element?",
    outputs=("lane", "register", "half"),
    cases=_held_cases,
    expected=_held,
    tried="corners, both halves of the rows and of the columns",
    mistakes=(
        Mistake(
            "the registers are in the other order",
            functools.partial(_held, part=lambda r, c: c // 8 + 2 * (r // 8)),
            "Register 1 is eight rows down, register 2 eight columns to the right: see section 6.",
        ),
        Mistake(
            "the columns of a lane are four apart",
            lambda r, c: (4 * (r % 8) + c % 4, r // 8 + 2 * (c // 8), c % 8 // 4),
            "A lane's two elements are neighbours: columns 2 t and 2 t + 1.",
        ),
        Mistake(
            "rows and columns are swapped",
            lambda r, c: _held(c, r),
            "Four lanes share a row: lane 4 g + t has row g.",
        ),
        Mistake(
            "rows are dealt in pairs",
            functools.partial(_held, group=lambda r: r // 2, part=lambda r, c: r % 2 + 2 * (c // 8)),
            "A lane has rows g and g + 8.",
        ),
        Mistake(
            "the rows of a lane are not counted from 0 again at 8",
            functools.partial(_held, group=lambda r: r),
            "There are 32 lanes: row g + 8 belongs to the lanes of row g.",
        ),
        Mistake(
            "the columns of a lane are not counted from 0 again at 8",
            functools.partial(_held, pair=lambda c: c // 2),
            "t is less than 4: columns 8 and 9 belong to the lane of columns 0 and 1.",
        ),
        Mistake(
            "a lane is 8 t + g",
            lambda r, c: (8 * (c % 8 // 2) + r % 8, *_held(r, c)[1:]),
            "A lane is 4 g + t: lanes 0 to 3 share row 0.",
        ),
    ),
)


# 17.4 How often must the warp ask?


def _passes(words, *, banks=32, distinct=True):
    in_bank = defaultdict(list)
    for word in words:
        in_bank[int(word) % banks].append(int(word))
    return max(len(set(found) if distinct else found) for found in in_bank.values())


def _passes_cases():
    lanes = np.arange(32)
    g, t = lanes // 4, lanes % 4
    random = np.random.default_rng(17)
    return [
        Case("lane after lane", (lanes,)),
        Case("all lanes the same word", (np.full(32, 5),)),
        Case("every second word", (2 * lanes,)),
        Case("a column of rows of 32 words", (32 * lanes,)),
        Case("a column of rows of 33 words", (33 * lanes,)),
        Case("fragments, rows of 32 words", (32 * g + t,)),
        Case("fragments, rows of 36 words", (36 * g + t,)),
        Case("two words of one bank, each read by sixteen lanes", (32 * (lanes // 16),)),
        Case("two words of one bank, read by turns", (32 * (lanes % 2),)),
        Case("random words", (random.integers(0, 256, 32),)),
        Case("other random words", (random.integers(0, 1024, 32),)),
    ]


PASSES = Exercise(
    number="17.4",
    title="How often must the warp ask?",
    outputs=("passes",),
    cases=_passes_cases,
    expected=_passes,
    tried="words side by side, columns, the same word for many lanes, fragments, random words",
    mistakes=(
        Mistake(
            "lanes that read the same word are counted twice",
            functools.partial(_passes, distinct=False),
            "One word is read once and given to all lanes that want it: count different words.",
        ),
        Mistake(
            "only neighbouring lanes share a word",
            lambda words: _passes(
                [word for lane, word in enumerate(words) if lane == 0 or word != words[lane - 1]], distinct=False
            ),
            "All lanes that want a word share it, wherever they are: count different words.",
        ),
        Mistake(
            "the first pass is not counted",
            lambda words: _passes(words) - 1,
            "Without a conflict there is one pass, not none: count passes, not conflicts.",
            (lambda words: _passes(words, distinct=False) - 1,),
        ),
        Mistake(
            "all different words are counted",
            lambda words: len(set(map(int, words))),
            "Words in different banks come in the same pass.",
        ),
        Mistake(
            "the banks that are used are counted",
            lambda words: len({int(word) % 32 for word in words}),
            "Many banks are good: what counts is the one bank that is asked for most words.",
        ),
        Mistake(
            "there are sixteen banks",
            functools.partial(_passes, banks=16),
            "There are 32 banks: word w is in bank w modulo 32.",
        ),
        Mistake(
            "a bank has a row of 32 words",
            lambda words: max(
                len({int(w) for w in words if int(w) // 32 == row}) for row in {int(w) // 32 for w in words}
            ),
            "Neighbouring words are in different banks: word w is in bank w modulo 32, not w // 32.",
        ),
        Mistake(
            "words are taken for bytes",
            lambda words: _passes(np.asarray(words) // 4),
            "The numbers are those of words already: word w is in bank w modulo 32.",
            (lambda words: max(Counter(word // 4 % 32 for word in set(map(int, words))).values()),),
        ),
    ),
)

EXERCISES = (OPERATIONS, RACES, HELD, PASSES)
