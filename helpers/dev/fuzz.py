"""Random legal calls of `flash_attention`, each compared with float64 and with naive attention.

    python -m helpers.dev.fuzz --minutes 5 --seed 0 --implementation hopper        (make gpu-fuzz)

A call may have few queries and many keys, which may lie in pages (`paged_attention`, without gradients). Its inputs
are of several `kinds`. out, lse, dq, dk and dv are each judged by themselves: as arrays and entry by entry, each may
err three times as much as naive attention in the same dtype, or as rounding must (see `rounding`). Where naive
attention overflows in 16 bits, it is asked in float32; where no bound can be stated, the call is unjudged. Errors,
hangs and dead processes count as wrong. Program number i, of one call or two, is made from (seed, i) and the options
alone, so it is the same however many processes there are. Compiling takes most of the time, so each program is called
`INPUTS` times, with other numbers, kinds, lengths, documents and fillings. What is wrong is printed as a line that
reproduces it. Another seed makes other calls, so that runs at one commit can be added up. The exit status is 1 if
anything was wrong, or more than 5 % unjudged.
"""

import argparse
import contextlib
import functools
import itertools
import math
import os
import sys
import time
from dataclasses import dataclass, replace

import jax
import numpy as np
from tqdm import tqdm

from helpers import flash_attention, paged_attention
from helpers.attention.problem import FEW_QUERIES
from helpers.attention.public.registry import TABLE
from helpers.dev import kinds, rounding, workers
from helpers.dev.trial import Trial

PATIENCE = 180.0  # seconds after which a call hangs
INPUTS = 6  # of each program
UNJUDGED = 0.05  # the largest part of calls of which nothing may be said
LONGEST = 2000  # positions of a sequence
SIDES = (16, 32, 64, 128, 256)  # of tiles
HEAD_DIMS = (64, 80, 96, 128, 160, 256)
PAGES = (16, 17, 32, 64, 128, 200)  # positions of a page
PAGED = (None, "portable", "mosaic", "reference")  # implementations that serve them
ONLY = {  # calls that may be all
    "few": lambda t: t.T <= FEW_QUERIES and not t.page,
    "pages": lambda t: t.page > 0,
    "masks": lambda t: t.documents or t.extras or t.soft_cap or t.offset,
}
EXTRAS = ("bias", "mask", "sinks", "mask_mod", "score_mod")
EXTRAS_OF_PAGES = ("sinks",)
FILL = ("nan", "inf", "-inf")  # in places that must not matter
MOST_A_GPU = 13  # processes that have enough of its memory


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
    """A random trial, which need not be `legal`. The oracle holds its tables in memory.

    So B N T S is at most longest^2, and B N (T + S) H four times as much.
    """

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
    most = max(1, longest**2 // max(T * S, (T + S) * H // 4))
    B = min(log_uniform(1, 8), most)
    K = min(log_uniform(1, 8), max(1, most // B))
    N = K * min(log_uniform(1, 8), max(1, most // (B * K)))
    dtype = str(random.choice(["bfloat16", "float16", "float32"], p=[0.4, 0.35, 0.25]))
    scale = sometimes(0.25, round(float(random.choice([-1, 1, 1, 1]) * math.exp(random.uniform(-4, 0))), 3))
    drawn = kinds.draw(random, dtype)
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
        precision="default" if dtype == "float32" and may_be_coarse(drawn) and random.random() < 0.5 else "highest",
        implementation=implementation,
        seed=int(random.integers(2**31)),
    )
    if page:
        lengths = sometimes(0.7, tuple(random.integers(0, S + 1, B).tolist()))
        plain = {"query_lengths": None, "lse_gradient": False, "way": "jit"}
        trial = replace(trial, page=page, key_lengths=lengths, **plain)
    return replace(trial, **draw_extras(trial)) if random.random() < (0.7 if page else 0.3) else trial


def may_be_coarse(drawn):
    """Whether TF32 leaves something to be said of a result: it changes large logits by too much."""
    return not {"query", "key", "logits"} & {name for name, *_ in drawn}


def again(trial, number):
    """A trial of the same `form`, with other inputs."""
    random = np.random.default_rng([trial.seed, 3, number])
    drawn = (kinds.draw(random, trial.dtype) for _ in itertools.count())
    new = {"kinds": next(one for one in drawn if trial.precision == "highest" or may_be_coarse(one))}
    for name, longest in (("query_lengths", trial.T), ("key_lengths", trial.S)):
        if getattr(trial, name) is not None:
            new[name] = tuple(random.integers(0, longest + 1, trial.B).tolist())
    unseen = str(random.choice(FILL)) if random.random() < 0.5 else None
    return replace(trial, number=number, padding=str(random.choice(FILL)), unseen=unseen, **new)


def with_other_inputs(trials):
    """`INPUTS` times the trials of a program, the given ones first."""
    return [trials, *(tuple(again(trial, number) for trial in trials) for number in range(1, INPUTS))]


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
        "soft_cap": float(random.choice([1.0, 5.0, 50.0, 200.0])) if random.random() < 0.3 else None,
        "extras": tuple(name for name in (EXTRAS_OF_PAGES if trial.page else EXTRAS) if random.random() < 0.3),
        "way": "jit" if trial.way == "vmap" else trial.way,
    }


@dataclass(frozen=True)
class Report:
    """What came of a program. kind: "right", "wrong", "raised", "hung" or "died".

    distances: for each trial {name of a result: `rounding.Distance`, or None where it is unjudged}; text: in words.
    """

    trials: tuple
    kind: str
    text: str = ""
    distances: tuple = ()

    @property
    def reproduction(self):
        """A line for a shell."""
        calls = ", ".join(map(str, self.trials))
        return f'python -c "from helpers.dev.fuzz import try_calls; try_calls({calls})"'

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
    forms = tuple(trial.form for trial in trials)
    if trials[0].page:
        results = [paged(form)(*inputs_in_pages(trial, dtype)) for trial, form in zip(trials, forms, strict=True)]
    else:
        arrays, cotangents = zip(*(cast(trial.inputs(), dtype) for trial in trials), strict=True)
        lengths = [trial.lengths for trial in trials]
        results = compiled(forms, attention)(list(arrays), list(cotangents), lengths)
    return jax.tree.map(np.asarray, results)


@functools.lru_cache(maxsize=4)
def compiled(trials, attention):
    """(arrays, cotangents, lengths) -> results of trials, of whose inputs only the form is known."""

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

        with jax.default_matmul_precision(trials[0].precision):
            results, pull_back = jax.vjp(attend_all, arrays)
            (gradients,) = pull_back(cotangents)
        return [(*own, *gradient) for own, gradient in zip(results, gradients, strict=True)]

    return program if trials[0].way == "eager" else untuned(program)


def untuned(program):
    """As `jax.jit`, for a program that runs a few times: what XLA would try for its products is not worth the time."""
    return jax.jit(program, compiler_options={"xla_gpu_autotune_level": 0})


def cast(arrays, dtype):
    """A tree of arrays in another dtype, if one is named."""
    return jax.tree.map(lambda array: array.astype(dtype), arrays) if dtype else arrays


def inputs_in_pages(trial, dtype):
    """The arrays of a trial whose keys lie in pages: query, pages of keys and of values, table, lengths, sinks."""
    (query, key, value), _ = cast(trial.inputs(), dtype)
    lengths = np.array(trial.key_lengths or trial.B * (trial.S,), np.int32)
    return query, *trial.pages(key, value), lengths, trial.lengths.get("sinks")


@functools.lru_cache(maxsize=4)
def paged(trial):
    """(arrays of `inputs_in_pages`) -> (out, lse) of a trial of that form."""
    arguments = trial.arguments | {"implementation": trial.implementation}
    if trial.offset == trial.S - trial.T and trial.key_lengths is None:
        arguments["causal_offset"] = None  # which says the same

    def program(*arrays):
        with jax.default_matmul_precision(trial.precision):
            return paged_attention(*arrays[:-1], return_residual=True, sinks=arrays[-1], **arguments)

    return untuned(program)  # so that the table is not checked


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
    """The `Report` of a program with one set of inputs: "right" or "wrong". What goes wrong on the way is raised."""
    distances = tuple(judge(*pair) for pair in zip(trials, run(trials, attention), strict=True))
    text = [
        f"{name} is off by {one.relative:.2g}, {one.whole:.1f} times what it may be, its worst entry {one.worst:.1f}"
        for found in distances
        for name, one in found.items()
        if not good(one)
    ]
    return Report(trials, "wrong" if text else "right", "; ".join(text), distances)


def attempt_all(trials):
    """The reports of a program with several inputs."""
    try:
        return [attempt(one) for one in with_other_inputs(trials)]
    finally:
        compiled.cache_clear(), paged.cache_clear(), jax.clear_caches()  # nobody calls it again


def try_calls(*calls):
    """Try calls, dictionaries with the fields of `Trial`, in one program, and say what comes of it."""
    trials = tuple(Trial(**call) for call in calls)
    for trial, found in zip(trials, attempt(trials).distances, strict=True):
        print(trial)
        for name, one in found.items():
            verdict = "unjudged" if one is None else "right" if good(one) else "WRONG"
            print(f"  {name:4} {verdict}", one or "")


def reports(pool, patience, programs):
    """Yield the reports of every program, as they come from `workers.Workers` of `attempt_all`."""
    for outcome in pool.outcomes(programs, patience):
        if outcome.kind == "returned":
            yield from outcome.value
        else:
            yield from (Report(trials, outcome.kind, outcome.value) for trials in with_other_inputs(outcome.task))


def fuzz(programs, run_all, total=None):
    """Run programs and return their reports. run_all: an iterable of programs -> an iterator of their reports."""
    found, wrong = [], 0
    with tqdm(total=total, unit=" calls", mininterval=5.0, smoothing=0.0) as bar:
        for report in run_all(programs):
            found.append(report)
            wrong += report.kind != "right"
            bar.update(len(report.trials))
            bar.set_postfix(wrong=wrong, refresh=False)
            if report.kind != "right":
                bar.write(f"{report.kind}: {report.text[:500]}\n  {report.reproduction}")
    return found


def in_time(programs, calls, minutes):
    """Programs until there are so many calls, or so many minutes are over; None means without limit."""
    began, made = time.monotonic(), 0
    for program in programs:
        if (calls is not None and made >= calls) or (minutes is not None and time.monotonic() >= began + 60 * minutes):
            return
        yield program
        made += INPUTS * len(program)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.dev.fuzz", description=__doc__.splitlines()[0])
    names = [name for name in TABLE if name != "cudnn"]
    parser.add_argument("--implementation", choices=names, help="by default the default")
    parser.add_argument("--only", choices=ONLY, help="calls of few queries, of keys in pages, or with masks and scores")
    parser.add_argument("--minutes", type=float, help="when to stop; by default 5, or never if --calls does")
    parser.add_argument("--calls", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=LONGEST, help="most positions of a sequence")
    options = parser.parse_args(arguments)
    if options.only == "pages" and options.implementation not in PAGED:
        parser.error(f"{options.implementation} has no kernels for pages")
    if not workers.visible_gpus():
        print("No NVIDIA GPU here: kernels are interpreted on the CPU, where long sequences take long.")

    chosen = options.implementation, options.longest, options.only
    programs = (draw(options.seed, i, *chosen) for i in itertools.count())
    minutes = options.minutes or (None if options.calls else 5.0)
    processes = min(os.cpu_count(), MOST_A_GPU * len(workers.visible_gpus()) or os.cpu_count())
    start = time.monotonic()
    with workers.Workers(attempt_all, processes) as pool:
        run_all = functools.partial(reports, pool, PATIENCE)
        found = fuzz(in_time(programs, options.calls, minutes), run_all, options.calls)
    wrong = sum(report.kind != "right" for report in found)
    calls, unjudged = sum(len(report.trials) for report in found), sum(report.unjudged for report in found)
    rate = 60 * calls / (time.monotonic() - start)
    print(f"{calls} calls of seed {options.seed}: {wrong} wrong, {unjudged} unjudged (at most {UNJUDGED:.0%}).")
    print(f"{rate:.0f} calls a minute.")
    return int(wrong > 0 or unjudged > UNJUDGED * calls or not calls)


if __name__ == "__main__":
    # As the processes that it starts know it, by its own name.
    with contextlib.suppress(KeyboardInterrupt):
        from helpers.dev import fuzz as this_module

        sys.exit(this_module.main())
