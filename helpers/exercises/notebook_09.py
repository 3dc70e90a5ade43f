"""The exercises of notebook 09."""

import functools
import math

import numpy as np

from helpers.exercises.checking import Case, Complaint, Exercise, Mistake
from helpers.measure.simulated import SimulatedCard

# 9.1 A benchmark with four faults

THREE = [("a",), ("b",), ("c",)]  # more than the cache of the simulated card holds
PER_CENT = 3


def _clock_cases():
    """Arguments: what the card is like, inputs, samples, calls."""
    others = {5: range(24, 48), 0.7: range(60, 72)}
    # By samples of 60 calls, the first, the middle and the last among them; a few calls more before must not matter.
    samples_of = {0.9: (0,), 1.2: (1, 2), 0.85: (3,), 1.3: (4,), 0.8: (8,)}
    often = {
        factor: [call for sample in samples for call in range(1 + 60 * sample, 61 + 60 * sample)]
        for factor, samples in samples_of.items()
    }
    busy = dict(call_s=2e-3, compile_s=1.5, launch_s=2e-5, wait_s=1e-3, cached=0.4, disturbed=others)
    cases = [
        ("the case worked by hand", dict(call_s=2e-3, launch_s=5e-5), THREE, 1, 3),
        ("a card that compiles for 1 s, one sample", dict(call_s=2e-3, compile_s=1.0), THREE, 1, 12),
        ("a card whose calls take the host 1.5 ms to queue", dict(call_s=2e-3, launch_s=1.5e-3), THREE, 5, 60),
        ("a card on which waiting costs 1 ms", dict(call_s=2e-3, wait_s=1e-3), THREE, 5, 60),
        ("a card that keeps the inputs of the last call in its cache", dict(call_s=3e-3, cached=0.3), THREE, 5, 12),
        ("a card that others use now and then", dict(call_s=2e-3, disturbed=others), THREE, 9, 12),
        (
            "a card whose cache holds the inputs of two calls",
            dict(call_s=3e-3, cached=0.3, holds=2),
            [*THREE, ("d",)],
            5,
            12,
        ),
        (
            "a card too slow in three of nine samples and too fast in three",
            dict(call_s=2e-3, disturbed=often),
            THREE,
            9,
            60,
        ),
        ("a card with all of this", busy, THREE, 9, 60),
    ]
    return [Case(label, tuple(arguments)) for label, *arguments in cases]


def _measure(answer, card, inputs, samples, calls):
    card = SimulatedCard(**card)

    def run(*arrays):
        if arrays not in inputs:
            raise Complaint("run was not given the arrays of one of the tuples: call run(*inputs[i]), with the star")
        return card.run(*arrays)

    return answer(run, card.wait, card.clock, list(inputs), samples, calls)


def _judge_clock(result, case):
    seconds, truth = float(result), case.arguments[0]["call_s"]
    if abs(seconds / truth - 1) <= PER_CENT / 100:
        return None
    mine = f"{1e3 * seconds:.3g}" if math.isfinite(seconds) else str(seconds)
    return f"time: yours {mine} ms, this card takes {1e3 * truth:.3g} ms a call"


def _timer(
    *,
    warm="waited",
    wait="after the calls",
    inputs="rotated",
    statistic=np.median,
    divide=lambda samples, calls: calls,
    once=False,
):
    """The answer to 9.1, or a wrong one that differs from it in the parts that are passed."""

    def answer(run, await_, clock, given, samples, calls):
        began = first = None
        if warm != "in each sample" and warm:
            result = run(*given[0])
            if warm == "waited":
                await_(result)
        times = []
        for sample in range(samples):
            began = began if once and times else clock()
            if warm == "in each sample":
                await_(run(*given[0]))
            for call in range(calls):
                which = {"rotated": call, "one": 0, "by sample": sample, "two": call % 2}[inputs]
                began = clock() if wait == "with the last call on the clock" else began
                result = run(*given[which % len(given)])
                first = first if call else result
                if wait == "after each call":
                    await_(result)
            if wait in ("after the calls", "with the last call on the clock"):
                await_(result)
            if wait == "for the first":
                await_(first)
            times.append((clock() - began) / divide(samples, calls))
        return statistic(times)

    return answer


CLOCK = Exercise(
    number="9.1",
    title="A benchmark with four faults",
    outputs=("time",),
    cases=_clock_cases,
    judge=_judge_clock,
    run=_measure,
    tolerance=1e-3,
    tried="cards that compile, cache, are slow to wait for, and are used by others",
    mistakes=(
        Mistake(
            "nothing is called before the clock starts, nothing is waited for, and the mean is taken",
            _timer(warm=None, wait=None, inputs="one", statistic=np.mean),  # without a wait, inputs make no difference
            "Three faults are left at least: compare the listing with sections 1 and 2.",
        ),
        Mistake(
            "the clock is read before the work is done",
            _timer(wait=None),
            "Wait for the last result before you read the clock: reread section 1.",
        ),
        Mistake(
            "the first call is timed, and compiling with it",
            _timer(warm=None),
            "Make one call before any clock is read: reread section 2.",
        ),
        Mistake(
            "the first call is still in the queue when the clock starts",
            _timer(warm="queued"),
            "Wait for the warm-up call too: it stands in the same queue, see the picture of section 1.",
        ),
        Mistake(
            "a warm-up call is made in each sample, with the clock running",
            _timer(warm="in each sample"),
            "One call before all samples is enough, and it must end before a clock is read: reread section 2.",
        ),
        Mistake(
            "the clock is read once, before all samples",
            _timer(once=True),
            "Each sample begins with a look at the clock: see the listing.",
        ),
        Mistake(
            "the clock begins anew with each call, so that only the last one is on it from its start",
            _timer(wait="with the last call on the clock"),
            "Read the clock before the first call of a sample: see the listing.",
        ),
        Mistake(
            "the first call of a sample is waited for, and not the last",
            _timer(wait="for the first"),
            "Calls end in the order in which they were queued: wait for the last, see section 1.",
        ),
        Mistake(
            "only the first sample counts",
            _timer(statistic=lambda times: times[0]),
            "One sample is an accident: take the median of all, reread section 2.",
        ),
        Mistake(
            "only the last sample counts",
            _timer(statistic=lambda times: times[-1]),
            "One sample is an accident: take the median of all, reread section 2.",
        ),
        Mistake(
            "the sample in the middle is taken, but the samples are not sorted",
            _timer(statistic=lambda times: times[len(times) // 2]),
            "The median is the middle one of the sorted samples: np.median does both.",
        ),
        Mistake(
            "all calls get the same inputs, and find them in the cache",
            _timer(inputs="one"),
            "Take the next inputs with each call: reread section 2.",
        ),
        Mistake(
            "only two of the inputs are used, in turns",
            _timer(inputs="two"),
            "A cache may hold two of them; all inputs together are larger than the cache: reread section 2.",
        ),
        Mistake(
            "a quantile below the median is taken, and with it moments in which the card was too fast",
            _timer(statistic=lambda times: np.quantile(times, 0.25)),
            "Take the median, np.median: reread section 2.",
        ),
        Mistake(
            "a quantile above the median is taken, and with it samples that others have disturbed",
            _timer(statistic=lambda times: np.quantile(times, 0.75)),
            "Take the median, np.median: reread section 2.",
        ),
        Mistake(
            "the slowest sample is taken",
            _timer(statistic=np.max),
            "One disturbed sample must not decide: take the median, see section 2.",
        ),
        Mistake(
            "the times of all samples are added",
            _timer(statistic=np.sum),
            "The result is the time of one call: take the median of the samples.",
        ),
        Mistake(
            "the inputs change from sample to sample, but not from call to call",
            _timer(inputs="by sample"),
            "The calls of one sample follow one another, so each of them needs other inputs: reread section 2.",
        ),
        Mistake(
            "the mean is taken, and one disturbed sample spoils it",
            _timer(statistic=np.mean),
            "The median does not care how bad the worst samples are: reread section 2.",
        ),
        Mistake(
            "the fastest sample is taken, and with it the luckiest moment of the card",
            _timer(statistic=np.min),
            "A card can be too fast for a moment as well as too slow: take the median, see section 2.",
        ),
        Mistake(
            "nothing is called before the clock starts, and nothing is waited for",
            _timer(warm=None, wait=None),
            "Make one call first, and wait before you read the clock; reread sections 1 and 2.",
        ),
        Mistake(
            "the first call is timed, and all calls get the same inputs",
            _timer(warm=None, inputs="one"),
            "Two faults are left: make one call first, and take other inputs with each call; reread section 2.",
        ),
        Mistake(
            "the first call is timed, and the mean is taken",
            _timer(warm=None, statistic=np.mean),
            "Two faults are left: make one call first, and take the median; reread section 2.",
        ),
        Mistake(
            "all calls get the same inputs, and the mean is taken",
            _timer(inputs="one", statistic=np.mean),
            "Two faults are left: take other inputs with each call, and take the median; reread section 2.",
        ),
        Mistake(
            "every call is waited for, so that the waiting is measured too",
            _timer(wait="after each call"),
            "Queue all calls of a sample and wait once: reread section 1.",
        ),
        Mistake(
            "the time of a sample is not divided by its calls",
            _timer(divide=lambda samples, calls: 1),
            "A sample holds several calls; the result is the time of one.",
        ),
        Mistake(
            "the time of a sample is divided by the samples instead of the calls",
            _timer(divide=lambda samples, calls: samples),
            "A sample holds `calls` calls; how many samples there are does not change its time.",
        ),
        Mistake(
            "the time of a sample is divided by the calls of all samples",
            _timer(divide=lambda samples, calls: samples * calls),
            "A sample holds `calls` calls; how many samples there are does not change its time.",
        ),
        Mistake(
            "the time is given in milliseconds",
            _timer(divide=lambda samples, calls: calls / 1e3),
            "The clock counts seconds, and so should the result.",
        ),
    ),
)

# 9.2 Is 0.07 % a speed-up?


def _pair_cases():
    random = np.random.default_rng(92)

    def case(label, ratio, spread, n=25, drift=0.0, outliers=0, resamples=2000):
        """old takes `ratio` times as long as new; spread and drift are fractions."""
        together = 1e-3 * (1 + drift * np.linspace(0, 1, n))
        old, new = (together * (1 + spread * random.standard_normal(n)) for _ in range(2))
        old *= ratio
        new[:outliers] *= 4
        return Case(label, (old, new, random.integers(0, n, (resamples, n))))

    by_hand = (np.array([2.0, 2.2, 2.0]), np.array([1.0, 2.0, 4.0]))
    equal = 1e-3 * (1 + np.arange(8.0))
    resamples = np.array([[0, 1, 2], [0, 0, 1], [2, 2, 1], [1, 1, 1]])
    return [
        Case("the case worked by hand", (*by_hand, resamples)),
        case("0.07 % faster, samples that differ by 1 %", 1.0007, 0.01),
        case("0.07 % faster, samples that differ by 0.01 %", 1.0007, 0.0001),
        case("5 % slower, samples that differ by 1 %", 0.95, 0.01),
        case("3 % faster, on a card that slows down by 20 %", 1.03, 0.005, drift=0.2),
        case("10 % faster, four bad samples of new", 1.10, 0.01, outliers=4),
        case("the same program twice", 1.0, 0.02),
        case("2 % faster, an even number of turns", 1.02, 0.01, n=8),
        Case("samples that agree to the last digit", (equal, equal.copy(), random.integers(0, 8, (2000, 8)))),
    ]


def _verdict(low, high):
    return "faster" if low > 1 else "slower" if high < 1 else "cannot tell"


def _interval(
    ratios=lambda old, new: old / new,
    statistic=np.median,
    levels=(0.025, 0.975),
    verdict=_verdict,
    torn=False,
    quantile=np.quantile,
):
    """The answer to 9.2, or a wrong one that differs from it in the parts that are passed."""

    def answer(old, new, resamples):
        if torn:  # two medians, then their ratio
            found = statistic(old[resamples], axis=1) / statistic(new[resamples], axis=1)
        else:
            found = statistic(ratios(old, new)[resamples], axis=1)
        low, high = quantile(found, levels)
        return low, high, verdict(low, high)

    return answer


def _expected_interval(old, new, resamples):
    medians = sorted(
        np.sort([old[i] / new[i] for i in row])[[(len(row) - 1) // 2, len(row) // 2]].mean() for row in resamples
    )

    def quantile(level):
        position = level * (len(medians) - 1)
        below = math.floor(position)
        above = min(below + 1, len(medians) - 1)
        return medians[below] + (position - below) * (medians[above] - medians[below])

    low, high = quantile(0.025), quantile(0.975)
    return low, high, _verdict(low, high)


def _by_medians(old, new, resamples):
    low, high, _ = _interval()(old, new, resamples)
    middle = np.median(old / new)
    return low, high, "faster" if middle > 1 else "slower"


def _spread_of_samples(old, new, resamples):
    low, high = np.quantile(old / new, [0.025, 0.975])
    return low, high, _verdict(low, high)


def _standard_error(old, new, resamples):
    ratios = old / new
    error = ratios.std(ddof=1) / math.sqrt(len(ratios))
    low, high = ratios.mean() - 1.96 * error, ratios.mean() + 1.96 * error
    return low, high, _verdict(low, high)


PAIRS = Exercise(
    number="9.2",
    title="Is 0.07 % a speed-up?",
    outputs=("low", "high", "verdict"),
    cases=_pair_cases,
    expected=_expected_interval,
    tolerance=1e-6,
    tried="real and imagined speed-ups, a slow-down, a card that warms up, bad samples",
    mistakes=(
        Mistake(
            "the ratio is new over old, which is below one for a speed-up",
            _interval(ratios=lambda old, new: new / old),
            "A speed-up of 2 means that the old program took twice as long: see the exercise.",
        ),
        Mistake(
            "the ratio is new over old, and the verdict is turned round to fit",
            _interval(
                ratios=lambda old, new: new / old,
                verdict=lambda low, high: "slower" if low > 1 else "faster" if high < 1 else "cannot tell",
            ),
            "The verdict is right; the interval asked for is that of old over new.",
        ),
        Mistake(
            "the difference of old and new is taken instead of their ratio",
            _interval(ratios=lambda old, new: old - new),
            "Divide: a ratio says by how much, whatever the unit.",
        ),
        Mistake(
            "1 is subtracted from the ratios",
            _interval(ratios=lambda old, new: old / new - 1),
            "The interval asked for is that of old over new, with 1 for no difference.",
        ),
        Mistake(
            "the median goes along the wrong axis",
            _interval(statistic=lambda rows, axis: np.median(rows, axis=0)),
            "A row is a resample, so there is one median for each row: axis=1.",
        ),
        Mistake(
            "one median is taken of all resamples together",
            _interval(statistic=lambda rows, axis: np.median(rows)),
            "There is one median for each row: axis=1.",
        ),
        Mistake(
            "the spread of all resampled ratios is taken, without a median of each row",
            _interval(statistic=lambda rows, axis: rows.ravel()),
            "First a median for each row, then the quantiles of these medians: reread section 4.",
        ),
        Mistake(
            "np.percentile is given fractions",
            _interval(quantile=np.percentile),
            "np.percentile wants 2.5 and 97.5; np.quantile wants 0.025 and 0.975.",
        ),
        Mistake(
            "the quantiles are not interpolated",
            _interval(quantile=functools.partial(np.quantile, method="nearest")),
            "np.quantile interpolates between two medians, if you let it: see the hand case.",
        ),
        Mistake(
            "the interval holds 99 % of the medians instead of 95 %",
            _interval(levels=(0.005, 0.995)),
            "Leave 2.5 % on either side.",
        ),
        Mistake(
            "the interval holds 98 % of the medians instead of 95 %",
            _interval(levels=(0.01, 0.99)),
            "Leave 2.5 % on either side.",
        ),
        Mistake(
            "the interval leaves 5 % below and 2.5 % above",
            _interval(levels=(0.05, 0.975)),
            "Leave 2.5 % on either side.",
        ),
        Mistake(
            "an interval that ends at 1 exactly counts as a difference",
            _interval(verdict=lambda low, high: "faster" if low >= 1 else "slower" if high <= 1 else "cannot tell"),
            "1 must lie outside: compare with > and <.",
        ),
        Mistake(
            "the interval is compared with 0",
            _interval(verdict=lambda low, high: "faster" if low > 0 else "slower" if high < 0 else "cannot tell"),
            "Where nothing differs, a ratio is 1.",
        ),
        Mistake(
            "whatever is not faster is called slower",
            _interval(verdict=lambda low, high: "faster" if low > 1 else "slower"),
            "If 1 lies inside, the two programs cannot be told apart.",
        ),
        Mistake(
            "the ends of the interval are compared the wrong way round",
            _interval(verdict=lambda low, high: "faster" if high > 1 else "slower" if low < 1 else "cannot tell"),
            "The whole interval is above 1 if its lower end is, and below 1 if its upper end is.",
        ),
        Mistake(
            "the pairs are torn apart: medians of old and new first, and then their ratio",
            _interval(torn=True),
            "What disturbs a turn disturbs both of its samples, and cancels in their ratio: reread section 4.",
        ),
        Mistake(
            "means are taken instead of medians",
            _interval(statistic=np.mean),
            "A few bad samples must not decide: take the median of each resample.",
        ),
        Mistake(
            "the interval holds 90 % of the medians instead of 95 %",
            _interval(levels=(0.05, 0.95)),
            "Leave 2.5 % on either side.",
        ),
        Mistake(
            "the interval holds half of the medians, from quartile to quartile",
            _interval(levels=(0.25, 0.75)),
            "Leave 2.5 % on either side; the quartiles leave 25 %.",
        ),
        Mistake(
            "the middle element of the sorted row is taken for the median, also where the number is even",
            _interval(statistic=lambda rows, axis: np.sort(rows, axis=axis)[:, rows.shape[1] // 2]),
            "With an even number the median is the mean of the two in the middle: np.median does that.",
        ),
        Mistake(
            "the interval holds 97.5 % on one side, with the smallest median as its other end",
            _interval(levels=(0.0, 0.975)),
            "Leave 2.5 % on either side.",
        ),
        Mistake(
            "the interval is that of all medians, from the smallest to the largest",
            _interval(levels=(0.0, 1.0)),
            "Leave 2.5 % on either side.",
        ),
        Mistake(
            "the interval is that of the samples, not of their median",
            _spread_of_samples,
            "A median of many samples is known better than one sample: resample first, reread section 4.",
        ),
        Mistake(
            "the formula for means of well-behaved samples is used",
            _standard_error,
            "The mean and its standard error trust every sample; use the resamples: reread section 4.",
        ),
        Mistake(
            "the verdict comes from the middle alone, whatever the ends of the interval say",
            _by_medians,
            "Only an interval that leaves 1 outside tells one program from the other.",
        ),
        Mistake(
            "faster and slower are exchanged",
            _interval(verdict=lambda low, high: "slower" if low > 1 else "faster" if high < 1 else "cannot tell"),
            "The ratio is old over new: above 1, the new program took less time.",
        ),
        Mistake(
            "it is enough that one end of the interval is on the right side of 1",
            _interval(verdict=lambda low, high: "faster" if high > 1 else "slower"),
            "If 1 lies inside, the two programs cannot be told apart.",
        ),
    ),
)

# 9.3 The roof over one problem


CEILINGS = {"matmul_tflops": 750.0, "copy_gbps": 4200.0, "exp_tops": 3.9}


def _bound_cases():
    toy = {"matmul_tflops": 1e-12, "copy_gbps": 1e-9, "exp_tops": 1e-12}
    shapes = [
        ("the case worked by hand", (1, 2, 3, 1, 1, 4, 2, False), toy),
        ("B=4, T=S=4096, 16 heads, H=128, 16 bit", (4, 4096, 4096, 16, 16, 128, 2, False), CEILINGS),
        ("the same, causal", (4, 4096, 4096, 16, 16, 128, 2, True), CEILINGS),
        ("half of an odd number of pairs", (1, 3, 3, 1, 1, 16, 2, True), CEILINGS),
        ("H=32, 64 heads", (4, 4096, 4096, 64, 64, 32, 2, False), CEILINGS),
        ("one query for each of 8 sequences (decoding)", (8, 1, 16384, 32, 4, 128, 2, False), CEILINGS),
        ("8 key/value heads for 32 query heads, T=128", (2, 128, 128, 32, 8, 256, 4, True), CEILINGS),
        (
            "T ≠ S on a card with fast matrix units",
            (3, 100, 700, 6, 2, 64, 2, False),
            {"matmul_tflops": 5000.0, "copy_gbps": 900.0, "exp_tops": 8.0},
        ),
    ]
    return [Case(label, (*shape, ceilings)) for label, shape, ceilings in shapes]


def _bounds(
    flops=lambda B, T, S, N, K, H: 4 * B * N * T * S * H,
    moved=lambda B, T, S, N, K, H, e: 2 * e * B * H * (T * N + S * K),
    exps=lambda B, T, S, N, K, H: B * N * T * S,
    half=lambda part: part in ("matrix", "exponentials"),
    units=(1e12, 1e9, 1e12),
    binds=max,
    factor=2,
    seconds=lambda amount, rate: amount / rate,
):
    """The answer to 9.3, or a wrong one that differs from it in the parts that are passed."""

    def answer(B, T, S, N, K, H, itemsize, is_causal, ceilings):
        shape = (B, T, S, N, K, H)
        work = {
            "matrix": (flops(*shape), units[0] * ceilings["matmul_tflops"]),
            "memory": (moved(*shape, itemsize), units[1] * ceilings["copy_gbps"]),
            "exponentials": (exps(*shape), units[2] * ceilings["exp_tops"]),
        }
        times = {
            part: seconds(amount / (factor if is_causal and half(part) else 1), rate)
            for part, (amount, rate) in work.items()
        }
        return times | {"binds": binds(times, key=times.get)}

    return answer


def _expected_bounds(B, T, S, N, K, H, itemsize, is_causal, ceilings):
    pairs = B * N * T * S * (0.5 if is_causal else 1)
    elements = 2 * (B * T * N * H) + 2 * (B * S * K * H)  # query, out, key, value
    matrix = pairs * 2 * 2 * H / ceilings["matmul_tflops"] / 1e12
    memory = elements * itemsize / ceilings["copy_gbps"] / 1e9
    exponentials = pairs / ceilings["exp_tops"] / 1e12
    longest = max(matrix, memory, exponentials)
    binds = "matrix" if matrix == longest else "memory" if memory == longest else "exponentials"
    return {"matrix": matrix, "memory": memory, "exponentials": exponentials, "binds": binds}


BOUNDS = Exercise(
    number="9.3",
    title="The roof over one problem",
    outputs=("bounds",),
    cases=_bound_cases,
    expected=_expected_bounds,
    tolerance=1e-6,  # ten times as much tells the smallest of these times from 0
    tried="each of the three sides binding, causal and not, T ≠ S, shared key/value heads, a single query",
    mistakes=(
        Mistake(
            "only one of the two products is counted, or a multiplication with its addition as one FLOP",
            _bounds(flops=lambda B, T, S, N, K, H: 2 * B * N * T * S * H),
            "q k^T and p v are both products, 2 T S H each: reread section 6.",
        ),
        Mistake(
            "one product is counted, and a multiplication with its addition as one FLOP",
            _bounds(flops=lambda B, T, S, N, K, H: B * N * T * S * H),
            "q k^T and p v are both products, 2 T S H each: reread section 6.",
        ),
        Mistake(
            "the five products of a backward pass are counted",
            _bounds(flops=lambda B, T, S, N, K, H: 10 * B * N * T * S * H),
            "A forward pass has two products, 2 T S H each: reread section 6.",
        ),
        Mistake(
            "the mask is forgotten",
            _bounds(half=lambda part: False),
            "A causal mask leaves half of the pairs of queries and keys: see the exercise.",
        ),
        Mistake(
            "the bytes are halved by the mask as well",
            _bounds(half=lambda part: True),
            "Here every array is moved once, whatever the mask hides: only work on pairs is halved.",
        ),
        Mistake(
            "the exponentials are not halved by the mask",
            _bounds(half=lambda part: part == "matrix"),
            "A hidden pair needs no exponential either.",
        ),
        Mistake(
            "the products are not halved by the mask",
            _bounds(half=lambda part: part == "exponentials"),
            "A hidden pair needs no products either.",
        ),
        Mistake(
            "the visible pairs of the mask are counted one by one",
            lambda B, T, S, N, K, H, itemsize, is_causal, ceilings: _bounds(
                flops=lambda B, T, S, N, K, H: 4 * B * N * H * (T * (T + 1) / 2 if is_causal else T * S),
                exps=lambda B, T, S, N, K, H: B * N * (T * (T + 1) / 2 if is_causal else T * S),
            )(B, T, S, N, K, H, itemsize, False, ceilings),
            "That is the truth, but the convention counts half of all pairs: see the exercise.",
        ),
        Mistake(
            "the mask doubles what it should halve",
            _bounds(half=lambda part: part in ("matrix", "exponentials"), factor=0.5),
            "A causal mask leaves half of the pairs: divide by two.",
        ),
        Mistake(
            "pairs are counted for K heads instead of N",
            _bounds(
                flops=lambda B, T, S, N, K, H: 4 * B * K * T * S * H,
                exps=lambda B, T, S, N, K, H: B * K * T * S,
            ),
            "Every query head makes a table of its own, even if it shares its keys.",
        ),
        Mistake(
            "keys and values are counted once for each query head, as if they were not shared",
            _bounds(moved=lambda B, T, S, N, K, H, e: 2 * e * B * N * H * (T + S)),
            "Key and value have K heads: reread the list of shapes in the exercise.",
        ),
        Mistake(
            "the products are counted for K heads instead of N",
            _bounds(flops=lambda B, T, S, N, K, H: 4 * B * K * T * S * H),
            "Every query head makes a table of its own, even if it shares its keys.",
        ),
        Mistake(
            "key and value are given T rows instead of S",
            _bounds(moved=lambda B, T, S, N, K, H, e: 2 * e * B * H * (T * N + T * K)),
            "Query and out have T rows, key and value have S.",
        ),
        Mistake(
            "the logits and the weights are counted as traffic, as in naive attention",
            _bounds(moved=lambda B, T, S, N, K, H, e: e * (2 * B * H * (T * N + S * K) + 4 * B * N * T * S)),
            "This is the least any kernel must move: inputs once and the output once.",
        ),
        Mistake(
            "query is forgotten, or out",
            _bounds(moved=lambda B, T, S, N, K, H, e: e * B * H * (T * N + 2 * S * K)),
            "Four arrays travel: query, key and value are read, and out is written.",
        ),
        Mistake(
            "value is forgotten, or key",
            _bounds(moved=lambda B, T, S, N, K, H, e: e * B * H * (2 * T * N + S * K)),
            "Four arrays travel: query, key and value are read, and out is written.",
        ),
        Mistake(
            "the lse is counted as traffic",
            _bounds(moved=lambda B, T, S, N, K, H, e: 2 * e * B * H * (T * N + S * K) + 4 * B * T * N),
            "It is left out here: see the exercise.",
        ),
        Mistake(
            "elements are counted instead of bytes",
            _bounds(moved=lambda B, T, S, N, K, H, e: 2 * B * H * (T * N + S * K)),
            "An element has `itemsize` bytes.",
        ),
        Mistake(
            "bits are counted instead of bytes",
            _bounds(moved=lambda B, T, S, N, K, H, e: 16 * e * B * H * (T * N + S * K)),
            "`itemsize` and GB/s are both in bytes.",
        ),
        Mistake(
            "there is an exponential for each multiplication of a product",
            _bounds(exps=lambda B, T, S, N, K, H: B * N * T * S * H),
            "There is one for each pair of a query and a key, whatever H is: reread section 6.",
        ),
        Mistake(
            "there is one exponential for each element of out, or of q",
            _bounds(exps=lambda B, T, S, N, K, H: B * N * T * H),
            "There is one for each pair of a query and a key: reread section 6.",
        ),
        Mistake(
            "tera and giga are forgotten",
            _bounds(units=(1, 1, 1)),
            "TFLOP/s are 10^12 FLOP/s, and GB/s are 10^9 bytes/s.",
        ),
        Mistake(
            "tera is forgotten",
            _bounds(units=(1, 1e9, 1)),
            "TFLOP/s are 10^12 FLOP/s, and the exponentials are in 10^12 too.",
        ),
        Mistake(
            "giga is forgotten",
            _bounds(units=(1e12, 1, 1e12)),
            "GB/s are 10^9 bytes/s.",
        ),
        Mistake(
            "all three rates are taken for 10^9",
            _bounds(units=(1e9, 1e9, 1e9)),
            "Tera is 10^12: the products and the exponentials are recorded in that unit.",
        ),
        Mistake(
            "the times are in milliseconds",
            _bounds(seconds=lambda amount, rate: 1e3 * amount / rate),
            "Seconds are asked for.",
        ),
        Mistake(
            "quotients are rounded down to whole seconds",
            _bounds(seconds=lambda amount, rate: amount // rate),
            "Divide with /, not with //: these times are parts of a second.",
        ),
        Mistake(
            "the name that comes last in the alphabet is said to bind",
            _bounds(binds=lambda seconds, key: max(seconds)),
            "max of a dict compares its keys; pass key=times.get.",
        ),
        Mistake(
            'the longest time itself stands under "binds", not its name',
            _bounds(binds=lambda seconds, key: max(seconds.values())),
            "The name is asked for, a string: max(times, key=times.get).",
        ),
        Mistake(
            "the exponentials cannot bind",
            _bounds(binds=lambda seconds, key: max(("matrix", "memory"), key=key)),
            "There are three sides, and the third can be the slowest: reread section 6.",
        ),
        Mistake(
            "bytes/s are taken for 10^12 like the other two rates",
            _bounds(units=(1e12, 1e12, 1e12)),
            "The copy is recorded in GB/s, 10^9 bytes.",
        ),
        Mistake(
            "the side that is done first is said to bind",
            _bounds(binds=min),
            "All three must finish, so the one that takes longest binds.",
        ),
    ),
)

# 9.4 The ceiling of a split backward


def _ceiling_cases():
    shapes = [(700.0, 4, 2, 7, True), (700.0, 4096, 128, 7, False), (700.0, 4096, 128, 5, False)]
    shapes += [
        (700.0, 9, 3, 7, True),
        (700.0, 5, 1, 5, True),
        (700.0, 4096, 128, 7, True),
        (810.0, 1024, 64, 5, True),
        (312.0, 512, 512, 7, True),
        (700.0, 512, 64, 4, False),  # one that keeps a table: it can print more than the rate
    ]
    by_hand, *others = (
        Case(f"rate={r:g}, T={T}, block={b}, {n} products, {'causal' if c else 'no mask'}", (r, T, b, n, c))
        for r, T, b, n, c in shapes
    )
    return [Case("the case worked by hand, T=4, block=2, causal", by_hand.arguments), *others]


def _ceiling(products=lambda n: 5 / n, edge=lambda n: n / (n + 1)):
    """The answer to 9.4, or a wrong one that differs from it in the parts that are passed."""

    def answer(rate, T, block, n, is_causal):
        return rate * products(n) * (edge(T // block) if is_causal else 1.0)

    return answer


def _expected_ceiling(rate, T, block, products, is_causal):
    tiles = sum(1 for i in range(T // block) for j in range(T // block) if not is_causal or j <= i)
    done = products * 2 * block * block * tiles
    counted = 5 * 2 * T * T / (2 if is_causal else 1)
    return rate * counted / done


CEILING = Exercise(
    number="9.4",
    title="The ceiling of a split backward",
    outputs=("ceiling",),
    cases=_ceiling_cases,
    expected=_expected_ceiling,
    tried="four, five and seven products, causal and not, from one tile to 32",
    mistakes=(
        Mistake(
            "as many products are counted as the kernel makes",
            _ceiling(products=lambda n: 1.0),
            "The convention counts five, whatever the kernel does: reread section 9.",
        ),
        Mistake(
            "the work done and the work counted are exchanged",
            _ceiling(products=lambda n: n / 5, edge=lambda n: (n + 1) / n),
            "Work that is not counted lowers what can be printed: reread section 9.",
        ),
        Mistake(
            "the products done and counted are exchanged",
            _ceiling(products=lambda n: n / 5),
            "Work that is not counted lowers what can be printed: reread section 9.",
        ),
        Mistake(
            "the products done and counted are exchanged, and a causal kernel is taken to do exactly half of the work",
            _ceiling(products=lambda n: n / 5, edge=lambda n: 1.0),
            "Work that is not counted lowers what can be printed: reread section 9.",
        ),
        Mistake(
            "five sevenths of the rate is returned whatever the kernel does",
            lambda rate, T, block, products, is_causal: rate * 5 / 7,
            "That is the answer for seven products without a mask: use `products`, and count the visited tiles.",
        ),
        Mistake(
            "a causal kernel is taken to do exactly half of the work",
            _ceiling(edge=lambda n: 1.0),
            "Tiles on the diagonal are computed whole, though half of them is hidden: see the hand case.",
        ),
        Mistake(
            "the mask halves what is counted, but not what is done",
            _ceiling(edge=lambda n: 0.5),
            "The kernel visits only tiles on and below the diagonal, so its work is nearly halved too.",
        ),
        Mistake(
            "the mask halves what is done, but not what is counted",
            _ceiling(edge=lambda n: 2 * n / (n + 1)),
            "The benchmark counts half of the table if causal: see the exercise.",
        ),
        Mistake(
            "visible pairs are counted one by one, where the kernel computes whole tiles",
            lambda rate, T, block, n, is_causal: _ceiling(edge=lambda _: T / (T + 1))(rate, T, block, n, is_causal),
            "A tile on the diagonal costs as much as any other: count the visited tiles, see the hand case.",
        ),
        Mistake(
            "the benchmark is taken to count the diagonal in full as well",
            lambda rate, T, block, n, is_causal: _ceiling(edge=lambda _: (T + 1) / (T + block))(
                rate, T, block, n, is_causal
            ),
            "The benchmark counts exactly half of the table: see the exercise.",
        ),
        Mistake(
            "the ceiling is rounded down to a whole number",
            lambda *arguments: float(_ceiling()(*arguments) // 1),
            "Divide with /, not with //, and leave int() out.",
        ),
        Mistake(
            "5 / products is rounded down",
            _ceiling(products=lambda n: 5 // n),
            "Divide with /, not with //.",
            variants=(lambda rate, T, block, n, is_causal: rate * (5 // n),),
        ),
        Mistake(
            "pairs are counted on one side, and tiles on the other",
            lambda rate, T, block, n, is_causal: block**2 * _ceiling()(rate, T, block, n, is_causal),
            "A tile holds block · block pairs: put both sides in the same unit.",
            variants=(lambda rate, T, block, n, is_causal: _ceiling()(rate, T, block, n, is_causal) / block**2,),
        ),
        Mistake(
            "no ceiling is let above the rate",
            lambda rate, *arguments: min(rate, _ceiling()(rate, *arguments)),
            "A kernel that does fewer products than are counted can print more than the rate.",
        ),
        Mistake(
            "the tiles on the diagonal are left out of the work",
            _ceiling(edge=lambda n: n / (n - 1)),
            "Half of a diagonal tile is visible, so the kernel must compute it.",
        ),
        Mistake(
            "the fraction of the rate is returned instead of TFLOP/s",
            lambda rate, *arguments: _ceiling()(1.0, *arguments),
            "Multiply by the rate of the matrix product.",
        ),
        Mistake(
            "the two products of a forward pass are counted",
            _ceiling(products=lambda n: 2 / n),
            "The five counted products are those of a fused backward pass: reread section 9.",
        ),
    ),
)

# 9.5 Other people's numbers


def _claim_cases():
    shapes = [
        (600.0, "forward", 4, True, True),
        (300.0, "forward", 2, False, False),
        (300.0, "forward", 4, True, False),
        (420.0, "backward", 14, False, False),
        (420.0, "backward", 8, True, False),
        (480.0, "both", 14, True, True),
        (480.0, "both", 12, False, True),
        (150.0, "both", 4, False, False),
        (77.0, "backward", 10, False, True),
    ]
    by_hand = Case("the case worked by hand", (800.0, "backward", 14, True, False))
    return [by_hand] + [
        Case(f"{c:g} TFLOP/s, {w}, {n} TSH counted, {'causal' if m else 'no mask'}, halved={h}", (c, w, n, m, h))
        for c, w, n, m, h in shapes
    ]


OURS = {"forward": 4, "backward": 10, "both": 14}


def _restated(ours=OURS, halved=lambda is_causal, halved: 0.5 if is_causal else 1.0, theirs=None, inverted=False):
    """The answer to 9.5, or a wrong one that differs from it in the parts that are passed."""
    theirs = theirs or (lambda is_causal, halved: 0.5 if halved else 1.0)

    def answer(claimed, which, counted, is_causal, was_halved):
        factor = ours[which] * halved(is_causal, was_halved) / (counted * theirs(is_causal, was_halved))
        return claimed / factor if inverted else claimed * factor

    return answer


def _expected_claim(claimed, which, counted, is_causal, halved):
    T = S = H = 64
    seconds = counted * T * S * H / (2 if halved else 1) / (claimed * 1e12)
    flops = {"forward": 4, "backward": 10, "both": 4 + 10}[which] * T * S * H / (2 if is_causal else 1)
    return flops / seconds / 1e12


CLAIMS = Exercise(
    number="9.5",
    title="Other people's numbers",
    outputs=("TFLOP/s",),
    cases=_claim_cases,
    expected=_expected_claim,
    tried="both passes alone and together, products left out or counted twice, the mask halved rightly and wrongly",
    mistakes=(
        Mistake(
            "the correction is applied the wrong way round",
            _restated(inverted=True),
            "Who counts too many FLOPs claims too many TFLOP/s: multiply by ours over theirs.",
        ),
        Mistake(
            "the mask is left out of the comparison",
            _restated(halved=lambda is_causal, halved: 1.0, theirs=lambda is_causal, halved: 1.0),
            "Halve our count if the mask is causal, and theirs if they did: see the exercise.",
        ),
        Mistake(
            "the two halves have changed places, or are doubled instead of halved",
            _restated(
                halved=lambda is_causal, halved: 0.5 if halved else 1.0,
                theirs=lambda is_causal, halved: 0.5 if is_causal else 1.0,
            ),
            "`halved` halves their count and `is_causal` ours: see the exercise.",
        ),
        Mistake(
            "their FLOPs are halved where the mask is causal, and ours nowhere",
            _restated(theirs=lambda is_causal, halved: 0.5 if is_causal else 1.0, halved=lambda is_causal, halved: 1.0),
            "`halved` halves their count and `is_causal` ours: see the exercise.",
        ),
        Mistake(
            "our FLOPs are halved where they halved theirs, and theirs nowhere",
            _restated(halved=lambda is_causal, halved: 0.5 if halved else 1.0, theirs=lambda is_causal, halved: 1.0),
            "`halved` halves their count and `is_causal` ours: see the exercise.",
        ),
        Mistake(
            "the half that they took is forgotten",
            _restated(theirs=lambda is_causal, halved: 1.0),
            "If `halved` is true, they counted only half of `counted` T S H.",
        ),
        Mistake(
            "the mask is left out of our count",
            _restated(halved=lambda is_causal, halved: 1.0),
            "Our count is halved if the mask is causal: see the exercise.",
        ),
        Mistake(
            "our count is doubled for a causal mask instead of halved",
            _restated(halved=lambda is_causal, halved: 2.0 if is_causal else 1.0),
            "A causal mask leaves half of the work, so it halves the count.",
        ),
        Mistake(
            "their count is doubled instead of halved",
            _restated(theirs=lambda is_causal, halved: 2.0 if halved else 1.0),
            "If `halved` is true, they counted half of `counted` T S H.",
        ),
        Mistake(
            "one half is taken wherever the two differ, whichever of them it is",
            _restated(
                halved=lambda is_causal, halved: 0.5 if is_causal != halved else 1.0,
                theirs=lambda is_causal, halved: 1.0,
            ),
            "Halving their count makes the result larger, and halving ours makes it smaller.",
        ),
        Mistake(
            "the two passes together are counted like a backward pass",
            _restated(ours={"forward": 4, "backward": 10, "both": 10}),
            "Timed together they make 4 T S H and 10 T S H: see the exercise.",
        ),
        Mistake(
            "the two passes together are counted like a forward pass",
            _restated(ours={"forward": 4, "backward": 10, "both": 4}),
            "Timed together they make 4 T S H and 10 T S H: see the exercise.",
        ),
        Mistake(
            "the two passes together are counted by their mean",
            _restated(ours={"forward": 4, "backward": 10, "both": 7}),
            "Their FLOPs add up, as their milliseconds do.",
        ),
        Mistake(
            "the two passes together are counted as 12 T S H",
            _restated(ours={"forward": 4, "backward": 10, "both": 12}),
            "Forward is 4 T S H and backward 10: see the exercise.",
        ),
        Mistake(
            "products are counted for the backward pass, and FLOPs for the forward pass",
            _restated(ours={"forward": 4, "backward": 5, "both": 9}),
            "Each of the five products has 2 T S H FLOPs.",
        ),
        Mistake(
            "the result is rounded down to a whole number",
            lambda *arguments: float(_restated()(*arguments) // 1),
            "Divide with /, not with //, and leave int() out.",
        ),
        Mistake(
            "the passes have changed places",
            _restated(ours={"forward": 10, "backward": 4, "both": 14}),
            "A forward pass counts 4 T S H and a backward pass 10.",
        ),
        Mistake(
            "a backward pass is counted like a forward pass",
            _restated(ours={"forward": 4, "backward": 4, "both": 8}),
            "The backward pass has five products, the forward pass two: see the exercise.",
            variants=tuple(_restated(ours={"forward": 4, "backward": 4, "both": both}) for both in (4, 14)),
        ),
        Mistake(
            "a backward pass is taken for twice a forward pass",
            _restated(ours={"forward": 4, "backward": 8, "both": 12}),
            "The backward pass makes the logits again, a fifth product: see the exercise.",
            variants=(_restated(ours={"forward": 4, "backward": 8, "both": 14}),),
        ),
        Mistake(
            "seven products are counted for the backward pass",
            _restated(ours={"forward": 4, "backward": 14, "both": 18}),
            "The convention counts the five products of a fused kernel: see the exercise.",
        ),
    ),
)

EXERCISES = (CLOCK, PAIRS, BOUNDS, CEILING, CLAIMS)
