"""The exercises of notebook 11."""

import functools

import numpy as np

from helpers.exercises.checking import Case, Exercise, Mistake

# 11.1 What binds the loop


def _bind_cases():
    return [
        Case(f"H={H}, block_k={k}, {n} instructions, {m} exponentials moved at {c} each", (H, k, n, m, c))
        for H, k, n, m, c in (
            (64, 128, 418, 0, 6),  # worked by hand, and the two after it
            (64, 128, 418, 16, 6),
            (64, 128, 418, 32, 6),
            (64, 128, 482, 16, 6),
            (64, 128, 482, 8, 3),
            (128, 128, 514, 0, 6),
            (128, 128, 514, 32, 6),
            (128, 64, 280, 8, 4),
            (64, 64, 260, 0, 5),
            (32, 128, 300, 8, 3),
            (32, 64, 100, 4, 6),
            (16, 256, 500, 30, 5),
            (16, 256, 200, 0, 5),
            (64, 128, 560, 0, 6),
            (64, 128, 600, 10, 4),
            (64, 128, 600, 10, 6),
            (256, 128, 640, 0, 6),
        )
    ]


UNITS = ("tensor", "exponentials", "issue")


def _bind(
    H, block_k, instructions, moved, cost,
    products=2, alpha=2, keep=False, free=False, once=False, stays=False, rate=16, warps=1, total=False,
    moved_in_all=False, share=2, choose=max, by_name=False,
):  # fmt: skip
    tensor = 2 * products * 64 * block_k * H / 4096
    moved_away = 0 if stays else moved * (1 if moved_in_all else 128)
    exponentials = ((block_k // share + alpha) * 128 - moved_away) / rate
    added = 0 if free else (1 if once else moved) * (cost if keep else cost - 1)
    issue = warps * (instructions + added)
    cycles = tensor, exponentials, issue
    if by_name:
        return "tensor", tensor
    return UNITS[cycles.index(choose(cycles))], float(sum(cycles) if total else choose(cycles))


BIND = Exercise(
    number="11.1",
    title="What binds the loop",
    outputs=("unit", "cycles"),
    cases=_bind_cases,
    expected=lambda H, block_k, instructions, moved, cost: max(
        [
            ("tensor", 2 * (2 * 64 * block_k * H) / 4096),
            ("exponentials", (64 * block_k + 2 * 128 - 128 * moved) / 16),
            ("issue", float(instructions + moved * cost - moved)),
        ],
        key=lambda pair: pair[1],
    ),
    tried="head dims from 16 to 256, tiles of 64 to 256 keys, with and without exponentials moved",
    mistakes=(
        Mistake(
            "half of the tensor core's work is missing",
            functools.partial(_bind, products=1),
            "Each tile of keys needs two products, and a multiplication with its addition is two FLOPs.",
        ),
        Mistake(
            "the exponentials of alpha are forgotten",
            functools.partial(_bind, alpha=0),
            "Each thread holds parts of two rows, and each row has an alpha: see the exercise.",
        ),
        Mistake(
            "a thread has one exponential of alpha instead of two",
            functools.partial(_bind, alpha=1),
            "Each thread holds parts of two rows, and each row has an alpha: see the exercise.",
        ),
        Mistake(
            "the moved exponentials are not taken off their unit",
            functools.partial(_bind, stays=True),
            "What is computed otherwise, that unit has not to do: take `moved` off for each thread.",
        ),
        Mistake(
            "moved exponentials cost no instructions",
            functools.partial(_bind, free=True),
            "What leaves one unit arrives at another: each is now `cost` instructions.",
        ),
        Mistake(
            "the instruction that a moved exponential saves is not taken off",
            functools.partial(_bind, keep=True),
            "It was one instruction before and is `cost` now: the difference counts.",
        ),
        Mistake(
            "the instructions of a single moved exponential are added",
            functools.partial(_bind, once=True),
            "There are `moved` of them for each thread, and each costs `cost - 1` more instructions.",
        ),
        Mistake(
            "the four warps are fed one after another",
            functools.partial(_bind, warps=4),
            "Each warp has a scheduler of its own, so the loop takes `instructions` cycles, not four times as many.",
        ),
        Mistake(
            "16 exponentials a cycle are taken for the rate of each quarter",
            functools.partial(_bind, rate=64),
            "128 threads share a unit that takes 16 a cycle in all: see the exercise.",
        ),
        Mistake(
            "the exponentials of a single thread are counted",
            functools.partial(_bind, rate=16 * 128),
            "128 threads share the unit: multiply by their number.",
        ),
        Mistake(
            "the names are compared, not the cycles",
            functools.partial(_bind, by_name=True),
            "max of a dict, or of pairs that begin with a name, goes by the alphabet: give it a key, see hint 2.",
        ),
        Mistake(
            "`moved` exponentials are taken off all 128 threads together instead of each",
            functools.partial(_bind, moved_in_all=True),
            "Each thread moves `moved` of its exponentials: see the exercise.",
        ),
        Mistake(
            "a thread is given block_k exponentials instead of half as many",
            functools.partial(_bind, share=1),
            "64 queries and block_k keys over 128 threads are block_k // 2 for each: see the exercise.",
        ),
        Mistake(
            "the fastest unit is returned instead of the slowest",
            functools.partial(_bind, choose=min),
            "All three must finish, so the slowest sets the pace: see the exercise.",
        ),
        Mistake(
            "the units are taken to work one after another",
            functools.partial(_bind, total=True),
            "They work at the same time, so at best the slowest sets the pace: see the exercise.",
        ),
    ),
)

# 11.2 Guess, and notice


def _guess_cases():
    random = np.random.default_rng(112)
    ln = np.log
    cases = [
        ("the case worked by hand", ln([1.0, 3.0, 40.0, 4.0]), 2, 1, 32768),
        ("the case worked by hand, headroom 3", ln([1.0, 3.0, 40.0, 4.0]), 2, 3, 32768),
        ("its logits less 900, headroom 0", ln([1.0, 3.0, 40.0, 4.0]) - 900, 2, 0, 32768),
        ("its logits plus 900, headroom 3", ln([1.0, 3.0, 40.0, 4.0]) + 900, 2, 3, 32768),
        ("logits ln 1, ln 3, ln 22, ln 4", ln([1.0, 3.0, 22.0, 4.0]), 2, 1, 32768),
        ("logits ln 1, ln 3, ln 4, ln 40", ln([1.0, 3.0, 4.0, 40.0]), 2, 1, 32768),
        ("6 keys, one 6 above the others, headroom 40", np.array([0.0, 0.0, 6.0, 0.0, 0.0, 0.0]), 2, 40, 32768),
        ("6 keys, four 3 above the others, headroom 40", np.array([0.0, 0.0, 3.0, 3.0, 3.0, 3.0]), 2, 40, 32768),
        ("6 keys, four 57 above the others, headroom 40", np.array([0.0, 0.0, 57.0, 57.0, 57.0, 57.0]), 2, 40, 32768),
        ("6 keys, one 8 above the others, `most` 3", np.array([-3.0, -3.0, 5.0, -3.0, -3.0, -3.0]), 2, 0, 3),
        ("8 equal logits, whose sum is just what is allowed", np.zeros(8), 4, 0, 32768),
        ("10 keys, `most` 5, headroom 0", np.zeros(10), 4, 0, 5),
        ("8 keys in one tile, `most` 3, headroom 1", np.zeros(8), 8, 1, 3),
        ("6 keys, the first tile 8 below the others", np.array([-8.0, -8.0, 0.0, 0.0, 0.0, 0.0]), 2, 11, 32768),
        ("40 random logits, headroom 1", 3 * random.standard_normal(40), 8, 1, 32768),
        ("40 random logits, headroom 40", 9 * random.standard_normal(40), 8, 40, 32768),
        ("fewer keys than a tile", random.standard_normal(5), 16, 1, 32768),
        ("12 keys and their largest first", np.array([7.0, *random.standard_normal(11)]), 4, 0, 32768),
    ]
    return [Case(label, arguments) for label, *arguments in cases]


def _guess(
    s, block_k, headroom, most, *,
    base=2.0, seen=lambda s, block_k: s[:block_k], summed=lambda s, block_k: s, power=np.exp, shifted=True,
    bound="both", strict=True, turned=False, on_failure=None, lse=lambda m, l, h: m + np.log(l),
):  # fmt: skip
    h = headroom * np.log(base)
    m = seen(s, block_k).max() + h
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        p = power(summed(s, block_k) - (m if shifted else 0))
        l = p.sum()
        least = min(len(s), most)
        top = {"both": least, "either": max(len(s), most), "keys": len(s), "most": most, "one": 1, "each p": least}
        measured = p.max() if bound in ("one", "each p") else l
        failed = (measured > top[bound] if strict else measured >= top[bound]) != turned
        return bool(failed), float(lse(m, l, h) if on_failure is None or not failed else on_failure)


def _guess_expected(s, block_k, headroom, most):
    """lse from the true maximum; the bound from the logits themselves."""
    lse = s.max() + np.log(np.exp(s - s.max()).sum())
    guessed = max(s[: min(block_k, len(s))]) + headroom * np.log(2.0)
    return bool(lse - guessed > np.log(min(len(s), most)) + 1e-12), float(lse)


GUESS = Exercise(
    number="11.2",
    title="Guess, and notice",
    outputs=("failed", "lse"),
    cases=_guess_cases,
    expected=_guess_expected,
    tried="rows that fail by either bound and rows that do not, logits near 900 and -900, one tile only",
    mistakes=(
        Mistake(
            "the maximum of the whole row is taken",
            functools.partial(_guess, seen=lambda s, block_k: s),
            "That is what the guess is to save: only the first tile is looked at, see section 4.",
        ),
        Mistake(
            "the maximum of the last tile is taken",
            functools.partial(_guess, seen=lambda s, block_k: s[-block_k:]),
            "The kernel meets the first tile first, and guesses from that one: see section 4.",
        ),
        Mistake(
            "the first tile has one key too many",
            functools.partial(_guess, seen=lambda s, block_k: s[: block_k + 1]),
            "s[:block_k] are the first `block_k` logits: the end of a slice is not part of it.",
        ),
        Mistake(
            "the first logit alone is taken for the maximum of its tile",
            functools.partial(_guess, seen=lambda s, block_k: s[:1]),
            "The first tile has `block_k` keys, and their maximum is meant: see the exercise.",
        ),
        Mistake(
            "only the first tile is summed",
            functools.partial(_guess, summed=lambda s, block_k: s[:block_k]),
            "The guess comes from the first tile, the sum is of the whole row: see the exercise.",
        ),
        Mistake(
            "m is not taken off before the exponential",
            functools.partial(_guess, shifted=False),
            "Each p is e to the power of s - m: see section 4.",
            variants=(functools.partial(_guess, shifted=False, lse=lambda m, l, h: np.log(l)),),
        ),
        Mistake(
            "p is a power of two",
            functools.partial(_guess, power=np.exp2),
            "Only the headroom is given in powers of two; everything else here is in base e.",
            variants=(functools.partial(_guess, power=np.exp2, lse=lambda m, l, h: m + np.log2(l)),),
        ),
        Mistake(
            "the headroom is left out",
            functools.partial(_guess, base=1.0),
            "The guess is the maximum of the first tile plus `headroom` powers of two: see section 4.",
        ),
        Mistake(
            "the headroom counts for too much: by log2(e) instead of ln 2, or twice",
            functools.partial(_guess, base=2.0 ** (1 / np.log(2) ** 2)),
            "A power of two is e to the power of ln 2, and m alone is raised by them: see hint 1.",
        ),
        Mistake(
            "the headroom is taken as a power of e",
            functools.partial(_guess, base=np.e),
            "It is given in powers of two: see the text of the exercise.",
        ),
        Mistake(
            "two to the power of the headroom is added to the maximum",
            lambda s, block_k, headroom, most: _guess(s, block_k, 2.0**headroom / np.log(2), most),
            "p is to be smaller by that factor, so its logarithm is added, `headroom` times ln 2: see hint 1.",
        ),
        Mistake(
            "the headroom is subtracted",
            functools.partial(_guess, base=0.5),
            "A higher m makes smaller p, which leaves room for later scores: see section 4.",
        ),
        Mistake(
            "only the number of keys bounds the sum",
            functools.partial(_guess, bound="keys"),
            "No p may leave the range of float16, however many keys there are: `most` bounds l as well, see section 4.",
        ),
        Mistake(
            "only `most` bounds the sum",
            functools.partial(_guess, bound="most"),
            "With the true maximum the sum is at most the number of keys: more than that is a failure, see section 4.",
        ),
        Mistake(
            "a sum must be above both bounds to fail",
            functools.partial(_guess, bound="either"),
            "One is enough: l may be above neither the number of keys nor `most`, see section 4.",
        ),
        Mistake(
            "a sum just as large as its bound counts as a failure",
            functools.partial(_guess, strict=False),
            "It fails where the sum is above the bound: equal logits under the true maximum reach it, see section 4.",
        ),
        Mistake(
            "a guess that holds is called a failure, and the other way round",
            functools.partial(_guess, turned=True),
            "The first result is True where the guess has failed.",
            variants=(functools.partial(_guess, turned=True, strict=False),),
        ),
        Mistake(
            "each p is compared with the bound instead of their sum",
            functools.partial(_guess, bound="each p"),
            "Many p that are not too large can have a sum that is: the kernel looks at l, see section 4.",
        ),
        Mistake(
            "a p above 1 counts as a failure",
            functools.partial(_guess, bound="one"),
            "The headroom is there so that later scores may be larger; the kernel looks at the sum: see section 4.",
        ),
        Mistake(
            "m is returned for lse",
            functools.partial(_guess, lse=lambda m, l, h: m),
            "The logarithm of the sum belongs to it: lse = m + ln l, whatever m is.",
        ),
        Mistake(
            "ln l is returned for lse",
            functools.partial(_guess, lse=lambda m, l, h: np.log(l)),
            "m was taken off every logit and has to come back: lse = m + ln l.",
        ),
        Mistake(
            "the headroom is taken off again in lse",
            functools.partial(_guess, lse=lambda m, l, h: m - h + np.log(l)),
            "l was summed with the headroom in m, so lse = m + ln l with the same m.",
        ),
        Mistake(
            "lse is infinite where the guess fails",
            functools.partial(_guess, on_failure=np.inf),
            "That is how the kernel marks a failed row; here lse is wanted whether it failed or not.",
        ),
        Mistake(
            "the logarithm has base two",
            functools.partial(_guess, lse=lambda m, l, h: m + np.log2(l)),
            "Everything here is in base e: lse = m + ln l.",
        ),
    ),
)


EXERCISES = (
    BIND,
    GUESS,
)
