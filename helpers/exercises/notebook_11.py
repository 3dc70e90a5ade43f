"""The exercises of notebook 11."""

import numpy as np

from helpers.exercises.exercise import Exercise


def slowest_unit(H, block_k, instructions, moved, cost):
    """(name, cycles) of the unit that binds a tile of 64 queries and block_k keys."""
    cycles = {
        "tensor": 2 * 2 * 64 * block_k * H / 4096,
        "exponentials": 128 * (block_k // 2 + 2 - moved) / 16,
        "issue": instructions + moved * (cost - 1),
    }
    unit = max(cycles, key=cycles.get)
    return unit, cycles[unit]


BIND = Exercise(
    slowest_unit, "What binds the loop", outputs=("unit", "cycles"),
).with_cases(  # the first three are worked by hand
    "H block_k instructions moved cost", (64, 128, 418, 0, 6), (64, 128, 418, 16, 6), (64, 128, 418, 32, 6),
    (64, 128, 482, 16, 6), (64, 128, 482, 8, 3), (128, 128, 514, 0, 6), (128, 128, 514, 32, 6), (128, 64, 280, 8, 4),
    (64, 64, 260, 0, 5), (32, 128, 300, 8, 3), (32, 64, 100, 4, 6), (16, 256, 500, 30, 5), (16, 256, 200, 0, 5),
    (64, 128, 560, 0, 6), (64, 128, 600, 10, 4), (64, 128, 600, 10, 6), (256, 128, 640, 0, 6),
).with_mistakes(
    ("16 exponentials a cycle are taken for the rate of each quarter", "/ 16", "/ 64",
     "128 threads share a unit that takes 16 a cycle in all: see the exercise."),
    ("`moved` exponentials are taken off all 128 threads together instead of each", ("128", "2 - moved"),
     ("(128", "2) - moved"), "Each thread moves `moved` of its exponentials: see the exercise."),
    ("the units are taken to work one after another", "cycles[unit]", "sum(cycles.values())",
     "They work at the same time, so at best the slowest sets the pace: see the exercise."),
)  # fmt: skip


def guess(s, block_k, headroom, most):
    """(whether the guess fails, lse) of a row of logits s (S,)."""
    m = s[:block_k].max() + headroom * np.log(2)
    l = np.exp(s - m).sum()
    return bool(l > min(len(s), most)), m + np.log(l)


LN, RANDOM = np.log, np.random.default_rng(112)

GUESS = Exercise(guess, "Guess, and notice", outputs=("failed", "lse")).with_cases(
    "s block_k headroom most",
    ("the case worked by hand", LN([1.0, 3.0, 40.0, 4.0]), 2, 1, 32768),
    ("the case worked by hand, headroom 3", LN([1.0, 3.0, 40.0, 4.0]), 2, 3, 32768),
    ("its logits less 900, headroom 0", LN([1.0, 3.0, 40.0, 4.0]) - 900, 2, 0, 32768),
    ("its logits plus 900, headroom 3", LN([1.0, 3.0, 40.0, 4.0]) + 900, 2, 3, 32768),
    ("logits ln 1, ln 3, ln 4, ln 22", LN([1.0, 3.0, 4.0, 22.0]), 2, 1, 32768),
    ("6 keys, one 6 above the others, headroom 40", np.array([0.0, 0.0, 6.0, 0.0, 0.0, 0.0]), 2, 40, 32768),
    ("6 keys, four 57 above the others, headroom 40", np.array([0.0, 0.0, 57.0, 57.0, 57.0, 57.0]), 2, 40, 32768),
    ("6 keys, one 8 above the others, `most` 3", np.array([-3.0, -3.0, 5.0, -3.0, -3.0, -3.0]), 2, 0, 3),
    ("8 equal logits, whose sum is just what is allowed", np.zeros(8), 4, 0, 32768),
    ("8 keys in one tile, `most` 3, headroom 1", np.zeros(8), 8, 1, 3),
    ("6 keys, the first tile 8 below the others", np.array([-8.0, -8.0, 0.0, 0.0, 0.0, 0.0]), 2, 11, 32768),
    ("40 random logits, headroom 40", 9 * RANDOM.standard_normal(40), 8, 40, 32768),
    ("logits ln 1, ln 3, ln 4, ln 40", LN([1.0, 3.0, 4.0, 40.0]), 2, 1, 32768),
    ("5 keys in tiles of two, headroom 0", LN([1.0, 1.0, 1.0, 1.0, 1.5]), 2, 0, 32768),
    ("fewer keys than a tile", RANDOM.standard_normal(5), 16, 1, 32768),
).with_mistakes(
    ("the maximum of the whole row is taken", "s[:block_k]", "s",
     "That is what the guess is to save: only the first tile is looked at, see section 4."),
    ("only the first tile is summed", "np.exp(s - m)", "np.exp(s[:block_k] - m)",
     "The guess comes from the first tile, the sum is of the whole row: see the exercise."),
    ("only the number of keys bounds the sum", "min(len(s), most)", "len(s)",
     "No p may leave the range of float16, however many keys there are: `most` bounds l as well, see section 4."),
)  # fmt: skip

EXERCISES = (BIND, GUESS)
