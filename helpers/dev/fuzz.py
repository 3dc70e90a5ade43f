"""Random legal calls of `flash_attention`, each compared with float64 and with naive attention.

    python -m helpers.dev.fuzz --minutes 5 --seed 0 --implementation hopper        (make gpu-fuzz)
    python -m helpers.dev.fuzz --sum first.jsonl second.jsonl                      adds up the --log of several runs

A call may have few queries and many keys, which may lie in pages (`paged_attention`, without gradients). Its inputs
are of several `kinds`. out, lse, dq, dk and dv are each judged by themselves: as arrays and entry by entry, each may
err three times as much as naive attention in the same dtype, or as rounding must (see `rounding`). Where naive
attention overflows in 16 bits, it is asked in float32; where no bound can be stated, the call is unjudged. Errors,
hangs and dead processes count as wrong. Program number i, of one call or two, is made from (seed, i) and the options
alone, so it is the same however many processes there are. What is wrong is made smaller while it stays wrong, and
printed as a line that reproduces it. The exit status is 1 if anything was wrong, or more than 5 % unjudged.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace

import jax
import numpy as np
from tqdm import tqdm

from helpers import flash_attention, paged_attention
from helpers.attention.problem import FEW_QUERIES
from helpers.attention.registry import TABLE
from helpers.dev import kinds, rounding, workers
from helpers.dev.measuring import commit_here
from helpers.dev.trial import Trial

PATIENCE = 180.0  # seconds after which a call hangs
UNJUDGED = 0.05  # the largest part of calls of which nothing may be said
LONGEST = 2000  # positions of a sequence
SIDES = (16, 32, 64, 128, 256)  # of tiles
HEAD_DIMS = (64, 80, 96, 128, 160, 256)
PAGES = (16, 17, 32, 64, 128, 200)  # positions of a page
PAGED = (None, "portable", "mosaic", "reference")  # implementations that serve them
ONLY = {"few": lambda t: t.T <= FEW_QUERIES and not t.page, "pages": lambda t: t.page > 0}  # calls that may be all
EXTRAS = ("bias", "mask", "sinks", "mask_mod", "score_mod")
EXTRAS_OF_PAGES = ("sinks",)
FILL = ("nan", "inf", "-inf")  # in places that must not matter
MOST_A_GPU = 13  # processes that have enough of its memory
SHRUNK, SHRINK_SECONDS = 3, 90.0  # failures that are made smaller, and the time for each


def legal(trial):
    """Whether its implementation serves a trial."""
    return trial.implementation is None or set(trial.call.features) <= set(TABLE[trial.implementation].serves)


def draw(seed, index, implementation=None, longest=LONGEST, only=None):
    """The trials of program number index: one, or two that are called in one program. only: a name in `ONLY`."""
    random = np.random.default_rng([seed, index])
    trials = (draw_trial(random, implementation, longest) for _ in itertools.count())
    trials = (trial for trial in trials if legal(trial) and (only is None or ONLY[only](trial)))
    first = next(trials)
    if first.page or random.random() > 0.1:
        return (first,)
    trials = (trial for trial in trials if not trial.page and (first.way != "vmap" or trial.may_be_mapped))
    return replace(first, precision="highest"), replace(next(trials), way=first.way, precision="highest")


def draw_trial(random, implementation, longest):
    """A random trial, which need not be `legal`. B N T S is at most longest^2: the oracle holds it in memory."""

    def sometimes(probability, value):
        return value if random.random() < probability else None

    def log_uniform(least, most):
        return int(math.exp(random.uniform(math.log(least), math.log(most + 1))))

    def length():
        if random.random() < 0.3:
            return log_uniform(1, longest)
        side = int(random.choice([side for side in SIDES if side <= longest] or [1]))
        return max(1, min(longest, side * log_uniform(1, max(1, longest // side)) + int(random.integers(-1, 2))))

    T, S = length(), length()
    page = 0
    if random.random() < 0.1:  # far more of the one than of the other
        T, S = random.permutation([log_uniform(1, 16), int(random.integers(1, longest + 1))]).tolist()
    elif random.random() < 0.15:  # as when text is generated
        T, S = log_uniform(1, 16), log_uniform(1, 8 * longest)
        page = int(random.choice(PAGES)) if implementation in PAGED and random.random() < 0.5 else 0
    H = int(random.choice(HEAD_DIMS)) if random.random() < 0.6 else int(random.integers(1, 257))
    most = max(1, longest**2 // (T * S))
    B = min(log_uniform(1, 8), most)
    K = min(log_uniform(1, 8), max(1, most // B))
    N = K * min(log_uniform(1, 8), max(1, most // (B * K)))
    dtype = str(random.choice(["bfloat16", "float16", "float32"], p=[0.4, 0.35, 0.25]))
    scale = sometimes(0.25, round(float(random.choice([-1, 1, 1, 1]) * math.exp(random.uniform(-4, 0))), 3))
    drawn = kinds.draw(random, dtype)
    # Where logits are large, TF32 changes them by so much that nothing can be said of the result.
    coarse = dtype == "float32" and not {"query", "key", "logits"} & {name for name, *_ in drawn}
    trial = Trial(
        *(T, S, H, N, K, B, dtype),
        is_causal=bool(random.random() < (0.2 if S > longest else 0.6)),  # few queries would see few keys
        window=sometimes(0.2, (log_uniform(1, S) - 1, log_uniform(1, S) - 1)),
        query_lengths=sometimes(0.15, tuple(random.integers(0, T + 1, B).tolist())),
        key_lengths=sometimes(0.15, tuple(random.integers(0, S + 1, B).tolist())),
        scale=scale,
        padding=str(random.choice(FILL)),
        unseen=sometimes(0.5, str(random.choice(FILL))),
        kinds=drawn,
        lse_gradient=bool(random.random() < 0.4),
        way=str(random.choice(["jit", "vmap", "eager"], p=[0.8, 0.15, 0.05])),
        precision="default" if coarse and random.random() < 0.5 else "highest",
        implementation=implementation,
        seed=int(random.integers(2**31)),
    )
    if page:
        lengths = sometimes(0.7, tuple(random.integers(0, S + 1, B).tolist()))
        plain = {"query_lengths": None, "lse_gradient": False, "way": "jit"}
        trial = replace(trial, page=page, key_lengths=lengths, **plain)
    return replace(trial, **draw_extras(trial)) if random.random() < (0.7 if page else 0.3) else trial


def draw_extras(trial):
    """Fields of a trial that few calls have, or that calls in pages may have."""
    random = np.random.default_rng([trial.seed, 1])
    is_few = trial.T <= FEW_QUERIES
    is_shifted = (trial.is_causal or trial.window) and random.random() < (0.8 if is_few else 0.3)
    at_end = trial.S - trial.T if is_few and random.random() < 0.5 else None
    offset = int(random.integers(-trial.T, trial.S + 1)) if at_end is None else at_end
    return {
        "offset": offset if is_shifted else 0,
        "documents": int(random.integers(1, 9)) if random.random() < 0.5 and not trial.page else 0,
        "soft_cap": float(random.choice([1.0, 5.0, 50.0])) if random.random() < 0.3 else None,
        "extras": tuple(name for name in (EXTRAS_OF_PAGES if trial.page else EXTRAS) if random.random() < 0.3),
        "way": "jit" if trial.way == "vmap" else trial.way,
    }


def causal_sweep(implementation=None):
    """Every number of queries from one tile of 64 to three and a bit, against a few numbers of keys.

    In an order of which every part is a sample of the whole.
    """
    sizes = itertools.product(range(60, 201), (129, 257, 300, 513), (64, 80, 128, 256), ("bfloat16", "float16"))
    common = {"is_causal": True, "implementation": implementation}
    programs = [(Trial(T, S, H, dtype=dtype, **common),) for T, S, H, dtype in sizes]
    return [programs[i] for i in np.random.default_rng(0).permutation(len(programs))]


SWEEPS = {"causal": causal_sweep}


@dataclass(frozen=True)
class Report:
    """What came of a program. kind: "right", "wrong", "raised", "hung" or "died".

    distances: for each trial {name of a result: `rounding.Distance`, or None where it is unjudged}; text: in words.
    """

    trials: tuple
    kind: str
    text: str = ""
    distances: tuple = ()
    seconds: float = 0.0

    @property
    def signature(self):
        """What two reports of the same fault are likely to share."""
        wrong = sorted({name for found in self.distances for name, one in found.items() if not good(one)})
        return self.kind, *wrong, *(self.text.split(":")[:2] if self.kind == "raised" else ())

    @property
    def reproduction(self):
        """A line for a shell."""
        calls = ", ".join(map(str, self.trials))
        return f'python -c "from helpers.dev.fuzz import try_calls; try_calls({calls})"'

    def record(self):
        """As a dictionary that JSON can hold."""
        numbers = [{name: one and one._asdict() for name, one in found.items()} for found in self.distances]
        own = {"kind": self.kind, "text": self.text, "unjudged": self.unjudged, "seconds": self.seconds}
        return own | {"trials": [asdict(trial) for trial in self.trials], "distances": numbers}

    @property
    def unjudged(self):
        """The number of calls with a result of which nothing is said."""
        return sum(None in found.values() for found in self.distances)


def good(distance):
    """Whether a result is as close to the right answer as it should be, or unjudged."""
    return distance is None or max(distance.whole, distance.worst) <= rounding.TIMES


def run(trials, attention=flash_attention, dtype=None):
    """[(out, lse, dq, dk, dv), ...] of trials that are called in one program, from their inputs.

    With pages there are no gradients. attention: called as `flash_attention` is. dtype: what the inputs are cast to.
    """
    if trials[0].page:
        return [run_in_pages(trial, dtype) for trial in trials]

    def attend(trial, query, key, value, lengths):
        keywords = trial.arguments | {"implementation": trial.implementation, "return_residual": True}
        if trial.way != "vmap":
            return attention(query, key, value, **keywords, **lengths)
        lengths = {name: array[:, None] for name, array in lengths.items()}  # each call has a batch of one
        one = lambda query, key, value, lengths: attention(query[None], key[None], value[None], **keywords, **lengths)
        if not lengths:
            one = lambda query, key, value, _: attention(query, key, value, **keywords)
        results = jax.vmap(one)(query, key, value, lengths)
        return tuple(result[:, 0] for result in results) if lengths else results

    def program(arrays, cotangents, lengths):
        def attend_all(arrays):
            return [attend(trial, *own, more) for trial, own, more in zip(trials, arrays, lengths, strict=True)]

        results, pull_back = jax.vjp(attend_all, arrays)
        (gradients,) = pull_back(cotangents)
        return [(*own, *gradient) for own, gradient in zip(results, gradients, strict=True)]

    arrays, cotangents = zip(*(cast(trial.inputs(), dtype) for trial in trials), strict=True)
    lengths = [trial.lengths for trial in trials]
    with jax.default_matmul_precision(trials[0].precision):
        results = (program if trials[0].way == "eager" else once(program))(list(arrays), list(cotangents), lengths)
    return jax.tree.map(np.asarray, results)


def once(program):
    """As `jax.jit`, for a program that runs once: what XLA would try for its products is not worth the time."""
    return jax.jit(program, compiler_options={"xla_gpu_autotune_level": 0})


def cast(arrays, dtype):
    """A tree of arrays in another dtype, if one is named."""
    return jax.tree.map(lambda array: array.astype(dtype), arrays) if dtype else arrays


def run_in_pages(trial, dtype=None):
    """(out, lse) of a trial whose keys lie in pages."""
    (query, key, value), _ = cast(trial.inputs(), dtype)
    lengths = np.array(trial.key_lengths or trial.B * (trial.S,), np.int32)
    arguments = trial.arguments | {"implementation": trial.implementation, "sinks": trial.lengths.get("sinks")}
    if trial.offset == trial.S - trial.T and not trial.key_lengths:
        arguments["causal_offset"] = None  # which says the same

    @once  # so that the table is not checked
    def program(*arrays):
        return paged_attention(*arrays, return_residual=True, **arguments)

    with jax.default_matmul_precision(trial.precision):
        return jax.tree.map(np.asarray, program(query, *trial.pages(key, value), lengths))


def run_naive(trial, dtype=None):
    """The same results by naive attention, which gets numbers in rows that see nothing."""
    return run((replace(trial, implementation="reference", unseen=None, way="jit"),), dtype=dtype)[0]


def judge(trial, results):
    """{name of a result: its `rounding.Distance`}."""
    arrays, (dout, dlse) = trial.inputs()
    tf32 = trial.precision == "default"
    answers = rounding.answers(*arrays, dout, dlse, tf32=tf32, **trial.arguments, **trial.lengths)
    found, naive = {}, run_naive(trial)
    exact = naive if trial.dtype == "float32" else None
    for name, result, own in zip(rounding.NAMES, results, naive, strict=False):  # no gradients with pages
        found[name] = rounding.distance(result, answers[name], own)
        if found[name] is None and answers[name].noise is not None:
            exact = run_naive(trial, "float32") if exact is None else exact
            found[name] = rounding.distance(result, answers[name], exact[rounding.NAMES.index(name)])
    return found


def attempt(trials, attention=flash_attention):
    """The `Report` of a program: "right" or "wrong". What goes wrong on the way is raised."""
    distances = tuple(judge(*pair) for pair in zip(trials, run(trials, attention), strict=True))
    text = [
        f"{name} is off by {one.relative:.2g}, {one.whole:.1f} times what it may be, its worst entry {one.worst:.1f}"
        for found in distances
        for name, one in found.items()
        if not good(one)
    ]
    jax.clear_caches()  # every program is compiled once and run once
    return Report(trials, "wrong" if text else "right", "; ".join(text), distances)


def try_calls(*calls):
    """Try calls, dictionaries with the fields of `Trial`, in one program, and say what comes of it."""
    trials = tuple(Trial(**call) for call in calls)
    for trial, found in zip(trials, attempt(trials).distances, strict=True):
        print(trial)
        for name, one in found.items():
            verdict = "unjudged" if one is None else "right" if good(one) else "WRONG"
            print(f"  {name:4} {verdict}", one or "")


def reports(pool, patience, programs):
    """Yield the `Report` of every program, as they come from `workers.Workers` of `attempt`."""
    for outcome in pool.outcomes(programs, patience):
        if outcome.kind == "returned":
            yield replace(outcome.value, seconds=outcome.seconds)
        else:
            yield Report(outcome.task, outcome.kind, outcome.value, seconds=outcome.seconds)


def simplifications(trial):
    """Changes, as dictionaries of fields, that make a trial simpler; the boldest first."""
    plain = Trial(1, 1)
    names = "extras documents soft_cap offset "
    names += "page way B N lse_gradient scale kinds unseen padding precision window query_lengths key_lengths is_causal"
    changes = [
        {name: getattr(plain, name)}
        for name in (*names.split(), "seed")
        if getattr(trial, name) != getattr(plain, name)
    ]
    if len(trial.kinds) > 1:
        changes += [{"kinds": trial.kinds[:i] + trial.kinds[i + 1 :]} for i in range(len(trial.kinds))]
    if trial.K > 1:
        changes.append({"K": 1, "N": trial.N // trial.K})
    for name, ends in (("T", (1,)), ("S", (1,)), ("H", (16, 64, 128))):
        size = getattr(trial, name)
        smaller = {*ends, size // 2, size - size // 4, (size - 1) // 64 * 64 + 1, size - 1}
        changes += [{name: value} for value in sorted(smaller) if 0 < value < size]
    return [consistent(trial, change) for change in changes]


def consistent(trial, change):
    """A change with what it asks of other fields: heads in whole groups, one length for each batch entry."""
    if change.get("N") == 1:
        change = change | {"K": 1}
    after = replace(trial, **change)
    if after.offset and not after.is_causal and not after.window:
        change = change | {"offset": 0}
    after = replace(trial, **change)
    for name, longest in (("query_lengths", after.T), ("key_lengths", after.S)):
        lengths = getattr(after, name)
        if lengths is not None:
            change = change | {name: tuple(min(length, longest) for length in lengths[: after.B])}
    return change


def shrink(report, run_all, seconds=SHRINK_SECONDS, clock=time.monotonic):
    """The report of the simplest program found that fails in the same way.

    run_all: takes a list of programs and yields their reports.
    """
    began = clock()

    def failing(programs):
        found = {one.trials: one for one in run_all(programs) if one.kind == report.kind}
        return [found[trials] for trials in programs if trials in found]

    if len(report.trials) > 1:
        report = next(iter(failing([(trial,) for trial in report.trials])), report)
    while len(report.trials) == 1 and clock() - began < seconds:
        (trial,) = report.trials
        changes = {(replace(trial, **change),): change for change in simplifications(trial)}
        simpler = failing([trials for trials in changes if legal(trials[0])])
        if not simpler:
            break
        together = functools.reduce(lambda all, one: changes[one.trials] | all, simpler, {})
        both = (replace(trial, **consistent(trial, together)),)
        report = next(iter(failing([both])), simpler[0]) if len(simpler) > 1 else simpler[0]
    return report


@dataclass
class Tally:
    """What a run has found so far."""

    calls: int = 0
    unjudged: int = 0
    wrong: list = field(default_factory=list)
    worst: dict = field(default_factory=dict)

    def add(self, report):
        self.calls += len(report.trials)
        self.unjudged += report.unjudged
        if report.kind != "right":
            self.wrong.append(report)
        for name, one in itertools.chain.from_iterable(found.items() for found in report.distances):
            if one is not None:
                self.worst[name] = tuple(map(max, self.worst.get(name, (0.0, 0.0)), (one.whole, one.worst)))

    def faults(self):
        """The first report of each signature."""
        return list({report.signature: report for report in reversed(self.wrong)}.values())[::-1]


def fuzz(programs, run_all, log=None, total=None, progress=sys.stderr, named=None):
    """Run programs and return a `Tally`. run_all: an iterable of programs -> an iterator of their reports.

    log: a file for a line of JSON for every program, of its record and what named, a dictionary, has.
    """
    tally = Tally()
    with tqdm(total=total, unit=" calls", file=progress, mininterval=5.0, smoothing=0.0) as bar:
        for report in run_all(programs):
            tally.add(report)
            bar.update(len(report.trials))
            bar.set_postfix(wrong=len(tally.wrong), refresh=False)
            if report.kind != "right":
                bar.write(f"{report.kind}: {report.text[:500]}\n  {report.reproduction}", file=progress)
            if log is not None:
                print(json.dumps((named or {}) | report.record()), file=log, flush=True)
    return tally


def at_most(programs, calls, deadline, clock=time.monotonic):
    """Programs until there are so many calls, or it is so late; None means without limit."""
    for program in programs:
        if (calls is not None and calls <= 0) or (deadline is not None and clock() >= deadline):
            return
        yield program
        calls = None if calls is None else calls - len(program)


def add_up(logs):
    """Print what several runs found, by commit and implementation. A call that two of them made counts once."""
    found = {}
    for record in itertools.chain.from_iterable(map(json.loads, open(log)) for log in logs):
        group = found.setdefault((record["commit"], record["trials"][0]["implementation"] or "default"), {})
        group[json.dumps(record["trials"])] = record
    for names, group in found.items():
        records = group.values()
        trials = [Trial(**trial) for record in records for trial in record["trials"]]
        few, paged = (sum(map(is_one, trials)) for is_one in ONLY.values())
        wrong, unjudged = sum(one["kind"] != "right" for one in records), sum(one["unjudged"] for one in records)
        seeds = ", ".join(sorted({str(one["seed"]) for one in records}))
        print(*names, f"seeds {seeds}: {len(trials)} calls ({few} of few queries, {paged} in pages),", end=" ")
        print(f"{wrong} wrong, {unjudged} unjudged.")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.dev.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--implementation", choices=[name for name in TABLE if name != "cudnn"], help="by default the default"
    )
    parser.add_argument("--only", choices=ONLY, help="calls of few queries, or of keys in pages")
    parser.add_argument("--minutes", type=float, help="when to stop; by default 5, or never if --calls or --sweep does")
    parser.add_argument("--calls", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first program of this seed or sweep")
    parser.add_argument("--sweep", choices=SWEEPS, help="this list of calls instead of random ones")
    parser.add_argument("--longest", type=int, default=LONGEST, help="most positions of a sequence")
    parser.add_argument("--log", type=argparse.FileType("w"), help="a file for a line of JSON for every program")
    parser.add_argument("--commit", help="what the log calls the code; by default as git does")
    parser.add_argument("--sum", nargs="+", metavar="LOG", help="run nothing, and add up what these logs have")
    options = parser.parse_args(arguments)
    if options.sum:
        return add_up(options.sum)
    if options.only == "pages" and options.implementation not in PAGED:
        parser.error(f"{options.implementation} has no kernels for pages")
    if not workers.visible_gpus():
        print("No NVIDIA GPU here: kernels are interpreted on the CPU, where long sequences take long.")

    total = options.calls
    chosen = options.implementation, options.longest, options.only
    programs = (draw(options.seed, i, *chosen) for i in itertools.count())
    if options.sweep:
        programs = SWEEPS[options.sweep](options.implementation)
        total = total or len(programs) - options.first
    minutes = options.minutes or (None if options.sweep or options.calls else 5.0)
    began = time.monotonic()
    deadline = None if minutes is None else began + 60 * minutes
    programs = at_most(itertools.islice(programs, options.first, None), options.calls, deadline)

    named = {"commit": options.commit or commit_here(), "seed": options.sweep or options.seed}
    processes = min(os.cpu_count(), MOST_A_GPU * len(workers.visible_gpus()) or os.cpu_count())
    with workers.Workers(attempt, processes) as pool:
        tally = fuzz(programs, functools.partial(reports, pool, PATIENCE), options.log, total, named=named)
        seconds = time.monotonic() - began
        for report in tally.faults()[:SHRUNK]:
            again = functools.partial(reports, pool, SHRINK_SECONDS)
            simplest = shrink(report, again, SHRINK_SECONDS)
            print(f"\nMade simpler, {simplest.kind}: {simplest.text[:500]}\n  {simplest.reproduction}")
    largest = ", ".join(f"{name} {whole:.2f} / {worst:.2f}" for name, (whole, worst) in tally.worst.items())
    print(f"\nLargest errors over what they should be, of an array / of an entry: {largest or 'none'}")
    print(f"(at most {rounding.TIMES} is right)")
    rate = 60 * tally.calls / seconds
    print(f"{tally.calls} calls in {seconds / 60:.1f} minutes, {rate:.0f} a minute: {len(tally.wrong)} wrong, ", end="")
    print(f"{tally.unjudged} unjudged (at most {UNJUDGED:.0%}).")
    return int(bool(tally.wrong) or tally.unjudged > UNJUDGED * tally.calls or not tally.calls)


if __name__ == "__main__":
    # As the processes that it starts know it, by its own name.
    with contextlib.suppress(KeyboardInterrupt):
        from helpers.dev import fuzz as this_module

        sys.exit(this_module.main())
