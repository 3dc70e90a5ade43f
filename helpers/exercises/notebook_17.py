"""The exercises of notebook 17: operations of a rung, a race, who holds what of a product, banks."""

import numpy as np

from helpers.exercises.exercise import Exercise


def operations(T, S, H):
    """(operations of the first rung, operations that attention needs)."""
    return T * H * S * (2 * H + 2), 4 * T * S * H


OPERATIONS = Exercise(
    operations, "What does the first rung cost?", outputs=("first rung", "needed"),
).with_cases("T S H", (1, 1, 1), (2, 3, 4), (128, 128, 64), (100, 700, 128), (5, 1, 7), (4096, 4096, 64)).with_mistakes(
    ("every thread adds up all dimensions of the values", "(2 * H + 2)", "4 * H",
     "A thread owns one dimension of out: 2 operations a key, not 2 H."),
)  # fmt: skip


def has_race(touches):
    """Whether two of the touches (thread, epoch, index, writes) race."""
    for thread, epoch, index, writes in touches:
        for other, when, where, _ in touches:
            same = (epoch, index) == (when, where)
            if writes and same and thread != other:
                return True
    return False


def _tile(late=()):
    """Eight threads write an element each and read all; those that are late write after the barrier."""
    writes = [(thread, int(thread in late), thread, True) for thread in range(8)]
    return writes + [(thread, 1, index, False) for thread in range(8) for index in range(8)]


RACES = Exercise(
    has_race, "Find the race", outputs=("race",),
).with_cases(  # nothing, two touches, and more: a race before a barrier or after it, in any order
    "touches", ([],), ([(0, 0, 5, True), (0, 0, 5, False)],), ([(0, 0, 5, False), (1, 1, 5, True)],),
    ([(0, 0, 5, True), (1, 0, 5, False)],), ([(0, 0, 5, True), (1, 1, 5, False)],),
    ([(0, 0, 5, True), (1, 0, 6, False)],), ([(0, 2, 5, False), (1, 2, 5, False)],),
    ([(0, 0, 5, False), (1, 0, 5, True)],), ([(3, 1, 7, True), (40, 1, 7, True)],),
    ([(0, 0, 1, True), (1, 1, 1, False), (0, 1, 1, True)],), ([(0, 0, 5, False), (1, 0, 5, False), (1, 0, 5, True)],),
    ([(0, 0, 5, True), (0, 1, 9, False), (1, 0, 5, False)],), ([(0, 0, 5, True), (1, 0, 5, False), (0, 1, 5, True)],),
    ([(0, 0, 5, False), (1, 0, 5, False), (0, 0, 5, True)],), ([(0, 0, 5, False), (1, 0, 5, False), (0, 0, 6, True)],),
    ([(0, 0, 5, True), (0, 0, 5, False), (1, 0, 5, False)],), ([(3, 1, 7, True), (4, 1, 7, True)],),
    ("a tile that is written and, after a barrier, read by all", _tile()),
    ("such a tile of which one element is written after the barrier", _tile(late=(5,))),
).with_mistakes(
    ("elements are not told apart", "(epoch, index) == (when, where)", "epoch == when",
     "Both must touch the same index."),
    ("only two writes race", ("where, _ in", "writes and same"), ("where, too in", "writes and too and same"),
     "A read beside a write races too: it sees the old value or the new one."),
    ("each touch is compared with earlier writes only", ("for thread, epoch, index, writes in touches", "_ in touches"),
     ("for i, (thread, epoch, index, writes) in enumerate(touches)", "_ in touches[i + 1:]"),
     "The order of the list says nothing: threads are not in order. Look at each pair both ways."),
)  # fmt: skip


def held(row, column):
    """(lane, register, half) of an element of the first factor, 16 × 16."""
    lane = 4 * (row % 8) + column % 8 // 2
    return lane, row // 8 + 2 * (column // 8), column % 2


HELD = Exercise(held, "Who holds this element?", outputs=("lane", "register", "half")).with_cases(
    "row column", (0, 0), (0, 1), (1, 0), (0, 2), (8, 0), (0, 8), (8, 8), (15, 15), (3, 13), (10, 6), (7, 7), (12, 9),
).with_mistakes(
    ("the registers are in the other order", "row // 8 + 2 * (column // 8)", "column // 8 + 2 * (row // 8)",
     "Register 1 is eight rows down, register 2 eight columns to the right: see section 6."),
    ("rows are dealt in pairs", ("row % 8", "row // 8"), ("row // 2", "row % 2"), "A lane has rows g and g + 8."),
    ("the columns of a lane are not counted from 0 again at 8", "column % 8 // 2", "column // 2",
     "A lane has columns 2 t, 2 t + 1, and the same two 8 further right: see section 6."),
    ("the rows of a lane are not counted from 0 again at 8", "(row % 8)", "row",
     "There are 32 lanes: row g + 8 belongs to the lanes of row g."),
)  # fmt: skip


def passes(words):
    """Passes that shared memory takes to serve a warp."""
    banks = [int(word) % 32 for word in set(map(int, words))]
    return max(banks.count(bank) for bank in banks)


LANES = np.arange(32)

PASSES = Exercise(passes, "How often must the warp ask?", outputs=("passes",)).with_cases(
    "words", ("lane after lane", LANES), ("all lanes the same word", np.full(32, 5)),
    ("a column of rows of 32 words", 32 * LANES), ("a column of rows of 33 words", 33 * LANES),
    ("fragments, rows of 32 words", 32 * (LANES // 4) + LANES % 4),
    ("fragments, rows of 36 words", 36 * (LANES // 4) + LANES % 4),
    ("two words of one bank, each read by sixteen lanes", 32 * (LANES % 2)),
    ("random words", np.random.default_rng(17).integers(0, 256, 32)),
).with_mistakes(
    ("lanes that read the same word are counted twice", "set(map(int, words))", "words",
     "One word is read once and given to all lanes that want it: count different words."),
    ("all different words are counted", "max(banks.count(bank) for bank in banks)", "len(banks)",
     "Words in different banks come in the same pass."),
    ("the banks that are used are counted", "max(banks.count(bank) for bank in banks)", "len(set(banks))",
     "Many banks are good: what counts is the one bank that is asked for most words."),
)  # fmt: skip

EXERCISES = (OPERATIONS, RACES, HELD, PASSES)
