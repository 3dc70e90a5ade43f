"""The exercises of notebook 09."""

import math

import numpy as np

from helpers.exercises.exercise import Case, Complaint, Exercise
from helpers.instruments.simulated import SimulatedGPU


def median_time(run, wait, clock, inputs, samples, calls):
    """Seconds of one call of run: the median of `samples` samples of `calls` calls."""
    wait(run(*inputs[0]))
    times = []
    for _ in range(samples):
        began = clock()
        for call in range(calls):
            result = run(*inputs[call % len(inputs)])
        wait(result)
        times.append((clock() - began) / calls)
    return np.median(times)


THREE = [("a",), ("b",), ("c",)]  # more than the cache of the simulated GPU holds

OTHERS = {5: range(24, 48), 0.7: range(60, 72)}
# By samples of 60 calls, the first, the middle and the last among them; a few calls more before must not matter.
SAMPLES = {0.9: (0,), 1.2: (1, 2), 0.85: (3,), 1.3: (4, 5), 0.8: (7, 8)}
OFTEN = {
    factor: [call for sample in samples for call in range(1 + 60 * sample, 61 + 60 * sample)]
    for factor, samples in SAMPLES.items()
}
BUSY = dict(call_s=2e-3, compile_s=1.5, launch_s=2e-5, wait_s=1e-3, cached=0.4, disturbed=OTHERS)


def _measure(answer, gpu, inputs, samples, calls):
    gpu = SimulatedGPU(**gpu)

    def run(*arrays):
        if arrays not in inputs:
            raise Complaint("run was not given the arrays of one of the tuples: call run(*inputs[i]), with the star")
        return gpu.run(*arrays)

    seconds = answer(run, gpu.wait, gpu.clock, list(inputs), samples, calls)
    if not 0 < gpu.calls - samples * calls <= calls + 20:
        raise Complaint(f"run was called {gpu.calls} times, for {samples} samples of {calls} calls and one before them")
    return seconds


def _judge_clock(result, case):
    if np.ndim(result):
        return "expected one number, the median of the samples"
    seconds, truth = float(result), case.arguments[0]["call_s"]
    if abs(seconds / truth - 1) <= 0.03:
        return None
    mine = f"{1e3 * seconds:.3g}" if math.isfinite(seconds) else str(seconds)
    return f"time: yours {mine} ms, this GPU takes {1e3 * truth:.3g} ms a call"


CLOCK = Exercise(
    median_time, "A benchmark with four faults", outputs=("time",), tolerance=1e-3, run=_measure, judge=_judge_clock,
).with_cases(
    "gpu inputs samples calls", ("the case worked by hand", dict(call_s=2e-3, launch_s=5e-5), THREE, 1, 3),
    ("a GPU that compiles for 1 s, one sample", dict(call_s=2e-3, compile_s=1.0), THREE, 1, 12),
    ("a GPU whose calls take the host 1.5 ms to queue", dict(call_s=2e-3, launch_s=1.5e-3), THREE, 5, 60),
    ("a GPU on which waiting costs 1 ms", dict(call_s=2e-3, wait_s=1e-3), THREE, 5, 60),
    ("a GPU that keeps the inputs of the last call in its cache", dict(call_s=3e-3, cached=0.3), THREE, 5, 12),
    ("a GPU that others use now and then", dict(call_s=2e-3, disturbed=OTHERS), THREE, 9, 12),
    ("a GPU whose cache holds three calls", dict(call_s=3e-3, cached=0.3, holds=3), [*THREE, ("d",)], 5, 12),
    ("a GPU too slow in four of nine samples, fast in four", dict(call_s=2e-3, disturbed=OFTEN), THREE, 9, 60),
    ("a GPU with all of this", BUSY, THREE, 9, 60),
).with_mistakes(
    ("all calls get the same inputs, and find them in the cache", "inputs[call % len(inputs)]", "inputs[0]",
     "Take the next inputs with each call: reread section 2."),
    ("the fastest sample is taken, and with it the luckiest moment of the GPU", "np.median", "np.min",
     "A GPU can be too fast for a moment as well as too slow: take the median, see section 2."),
    ("every call is waited for, so that the waiting is measured too", "        wait(result)",
     "            wait(result)", "Queue all calls of a sample and wait once: reread section 1."),
)  # fmt: skip


def speed_up(old, new, resamples):
    """Returns (low, high, verdict) of the ratio old / new."""
    medians = np.median((old / new)[resamples], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    verdict = "faster" if low > 1 else "slower" if high < 1 else "cannot tell"
    return low, high, verdict


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
        case("3 % faster, on a GPU that slows down by 20 %", 1.03, 0.005, drift=0.2),
        case("10 % faster, four bad samples of new", 1.10, 0.01, outliers=4),
        case("the same program twice", 1.0, 0.02),
        case("2 % faster, an even number of turns", 1.02, 0.01, n=8),
        Case("one slow sample, drawn now and then", (*by_hand, np.array([[0, 1, 1]] * 79 + [[2, 2, 2]]))),
        Case("samples that agree to the last digit", (equal, equal.copy(), random.integers(0, 8, (2000, 8)))),
    ]


PAIRS = Exercise(
    speed_up, "Is 0.07 % a speed-up?", outputs=("low", "high", "verdict"), tolerance=1e-6, cases=_pair_cases,
).with_mistakes(
    ("the pairs are torn apart: medians of old and new first, and then their ratio",
     "np.median((old / new)[resamples], axis=1)",
     "np.median(old[resamples], axis=1) / np.median(new[resamples], axis=1)",
     "What disturbs a turn disturbs both of its samples, and cancels in their ratio: reread section 4."),
    ("the interval is that of the samples, not of their median", "np.median((old / new)[resamples], axis=1)",
     "old / new", "A median of many samples is known better than one sample: resample first, reread section 4."),
    ("np.percentile is given fractions", "np.quantile", "np.percentile",
     "np.percentile wants 2.5 and 97.5; np.quantile wants 0.025 and 0.975."),
)  # fmt: skip


def roofline_bounds(B, T, S, N, K, H, itemsize, is_causal, ceilings):
    """{"matrix": s, "memory": s, "exponentials": s, "binds": name}, s: seconds."""
    pairs = B * N * T * S / (2 if is_causal else 1)
    moved = itemsize * 2 * B * H * (T * N + S * K)
    times = {
        "matrix": 4 * H * pairs / (1e12 * ceilings["matmul_tflops"]),
        "memory": moved / (1e9 * ceilings["copy_gbps"]),
        "exponentials": pairs / (1e12 * ceilings["exp_tops"]),
    }
    return times | {"binds": max(times, key=times.get)}


CEILINGS = {"matmul_tflops": 750.0, "copy_gbps": 4200.0, "exp_tops": 3.9}
TOY = {"matmul_tflops": 1e-12, "copy_gbps": 1e-9, "exp_tops": 1e-12}
FAST = {"matmul_tflops": 5000.0, "copy_gbps": 900.0, "exp_tops": 8.0}

BOUNDS = Exercise(
    roofline_bounds, "The roof over one problem", outputs=("bounds",),
    tolerance=1e-6,  # ten times as much tells the smallest of these times from 0
).with_cases(
    "B T S N K H itemsize is_causal ceilings", ("the case worked by hand", 1, 2, 3, 1, 1, 4, 2, False, TOY),
    ("B=4, T=S=4096, 16 heads, H=128, 16 bit", 4, 4096, 4096, 16, 16, 128, 2, False, CEILINGS),
    ("the same, causal", 4, 4096, 4096, 16, 16, 128, 2, True, CEILINGS),
    ("half of an odd number of pairs", 1, 3, 3, 1, 1, 16, 2, True, CEILINGS),
    ("H=32, 64 heads", 4, 4096, 4096, 64, 64, 32, 2, False, CEILINGS),
    ("one query for each of 8 sequences (decoding)", 8, 1, 16384, 32, 4, 128, 2, False, CEILINGS),
    ("8 key/value heads for 32 query heads, T=128", 2, 128, 128, 32, 8, 256, 4, True, CEILINGS),
    ("T ≠ S on a GPU with fast matrix units", 3, 100, 700, 6, 2, 64, 2, False, FAST),
    ("T ≠ S, causal", 3, 700, 100, 6, 2, 64, 2, True, FAST),
).with_mistakes(
    ("the bytes are halved by the mask as well", "S * K)", "S * K) / (2 if is_causal else 1)",
     "Here every array is moved once, whatever the mask hides: only work on pairs is halved."),
    ("the logits and the weights are counted as traffic, as in naive attention", "S * K)",
     "S * K) + itemsize * 4 * B * N * T * S",
     "This is the least any kernel must move: inputs once and the output once."),
    ("there is an exponential for each multiplication of a product", ": pairs", ": H * pairs",
     "There is one for each pair of a query and a key, whatever H is: reread section 6."),
)  # fmt: skip


def counted_ceiling(rate, T, block, products, is_causal):
    """Largest counted TFLOP/s, for `products` products in each visited tile."""
    tiles = T // block
    visited = tiles * (tiles + 1) // 2 if is_causal else tiles**2
    done = products * visited * block**2
    counted = 5 * T * T / (2 if is_causal else 1)
    return rate * counted / done


CEILING = Exercise(counted_ceiling, "The ceiling of a split backward", outputs=("ceiling",)).with_cases(
    "rate T block products is_causal", ("the case worked by hand", 700.0, 4, 2, 7, True),
    (700.0, 4096, 128, 7, False), (700.0, 4096, 128, 5, False), (700.0, 9, 3, 7, True), (700.0, 5, 1, 5, True),
    (700.0, 4096, 128, 7, True), (810.0, 1024, 64, 5, True), (312.0, 512, 512, 7, True),
    ("one that keeps a table: it can print more than the rate", 700.0, 512, 64, 4, False),
).with_mistakes(
    ("the work done and the work counted are exchanged", "counted / done", "done / counted",
     "Work that is not counted lowers what can be printed: reread section 9."),
    ("a causal kernel is taken to do exactly half of the work", "tiles * (tiles + 1) // 2", "tiles**2 / 2",
     "Tiles on the diagonal are computed whole, though half of them is hidden: see the hand case."),
    ("visible pairs are counted one by one, where the kernel computes whole tiles", (" // block", " * block**2"),
     ("", ""), "A tile on the diagonal costs as much as any other: count the visited tiles, see the hand case."),
    ("the benchmark is taken to count the diagonal in full as well", "T * T / (2 if is_causal else 1)",
     "(T * (T + 1) / 2 if is_causal else T * T)", "The benchmark counts exactly half of the table: see the exercise."),
)  # fmt: skip


def restated(claimed, which, counted, is_causal, halved):
    """TFLOP/s in our convention of a claim that was counted in another one."""
    ours = {"forward": 4, "backward": 10, "both": 14}[which] / (2 if is_causal else 1)
    theirs = counted / (2 if halved else 1)
    return claimed * ours / theirs


CLAIMS = Exercise(restated, "Other people's numbers", outputs=("TFLOP/s",)).with_cases(
    "claimed which counted is_causal halved", ("the case worked by hand", 800.0, "backward", 14, True, False),
    (600.0, "forward", 4, True, True), (300.0, "forward", 2, False, False), (300.0, "forward", 4, True, False),
    (420.0, "backward", 14, False, False), (420.0, "backward", 8, True, False), (480.0, "both", 14, True, True),
    (480.0, "both", 12, False, True), (150.0, "both", 4, False, False), (77.0, "backward", 7, False, True),
).with_mistakes(
    ("the correction is applied the wrong way round", "ours / theirs", "theirs / ours",
     "Who counts too many FLOPs claims too many TFLOP/s: multiply by ours over theirs."),
    ("the mask is left out of the comparison", (" / (2 if is_causal else 1)", " / (2 if halved else 1)"), ("", ""),
     "Halve our count if the mask is causal, and theirs if they did: see the exercise."),
    ("the two halves are exchanged", "is_causal else 1)\n    theirs = counted / (2 if halved",
     "halved else 1)\n    theirs = counted / (2 if is_causal", "`is_causal` halves our count, `halved` theirs."),
    ("the two passes together are counted like a backward pass", '"both": 14', '"both": 10',
     "Timed together they make 4 T S H and 10 T S H: see the exercise."),
    ("a backward pass is taken for twice a forward pass", (": 10", ": 14"), (": 8", ": 12"),
     "The backward pass makes the logits again, a fifth product: see the exercise."),
)  # fmt: skip

EXERCISES = (CLOCK, PAIRS, BOUNDS, CEILING, CLAIMS)
