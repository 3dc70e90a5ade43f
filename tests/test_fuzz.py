"""The fuzzer calls what is legal and nothing else, finds faults of every kind, and raises no false alarm."""

import contextlib
import functools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention import reference
from helpers.attention.masking import visible
from helpers.attention.problem import check_call
from helpers.attention.registry import TABLE
from helpers.dev import fuzz, kinds, rounding, workers
from helpers.dev.fuzz import Trial

DRAWN = {name: [fuzz.draw(0, i, name) for i in range(400)] for name in (None, "portable", "hopper")}


def checked(trial):
    """The problem that `check_call` sees; no array is made."""
    queries = jax.ShapeDtypeStruct((trial.B, trial.T, trial.N, trial.H), trial.dtype)
    keys = jax.ShapeDtypeStruct((trial.B, trial.S, trial.K, trial.H), trial.dtype)
    problems = []

    def check(*arrays):
        problems.append(check_call(*arrays, **trial.arguments, **trial.lengths).problem)

    jax.eval_shape(check, queries, keys, keys)
    return problems[0]


@pytest.mark.parametrize("implementation", DRAWN)
def test_every_drawn_call_is_legal(implementation):
    for trial in (trial for trials in DRAWN[implementation] for trial in trials):
        assert checked(trial) == trial.call.problem, trial
        assert trial.implementation == implementation
        assert trial.B * trial.N * trial.T * trial.S <= fuzz.LONGEST**2, "more than the oracle should hold"
        assert not trial.page or (trial.T <= 16 and not trial.documents and set(trial.extras) <= {"sinks"})
        assert implementation is None or set(trial.call.features) <= {*TABLE[implementation].serves}


KINDS = {
    "far more keys than queries": lambda t: t.S > 50 * t.T,
    "one more than tiles of 64": lambda t: t.S % 64 == 1,
    "an odd head": lambda t: t.H % 2,
    "a group for all": lambda t: t.N > t.K == 1,
    "vmap": lambda t: t.way == "vmap",
    "normal numbers": lambda t: not t.kinds,
    **{f"a kind {kind}": lambda t, kind=kind: kind in t.kinds for kind in kinds.LOGITS},
}
MORE_KINDS = {  # which Hopper kernels do not serve
    "TF32": lambda t: t.dtype == "float32" and t.precision == "default",
    "rows that see nothing, with NaN in dout": lambda t: t.query_lengths and t.unseen == "nan",
    "pages with queries at the end of a sequence": lambda t: t.page and 0 < t.offset == t.S - t.T,
    "documents": lambda t: t.documents > 1 and t.T > 100,
    **{f"{name} besides": lambda t, name=name: name in t.extras for name in fuzz.EXTRAS},
}


@pytest.mark.parametrize("implementation", DRAWN)
def test_every_kind_of_call_is_drawn(implementation):
    wanted = KINDS if implementation == "hopper" else KINDS | MORE_KINDS
    trials = [trial for trials in DRAWN[implementation] for trial in trials]
    assert not [name for name, kind in wanted.items() if sum(map(bool, map(kind, trials))) < 3]
    assert any(len(trials) == 2 for trials in DRAWN[implementation]), "two calls in one program"


def test_a_call_is_made_from_the_seed_and_its_number_and_printed_whole():
    assert fuzz.draw(3, 7) == fuzz.draw(3, 7) != fuzz.draw(4, 7) != fuzz.draw(4, 8)
    for trial in (trial for trials in DRAWN[None][:50] for trial in trials):
        assert Trial(**eval(str(trial))) == trial


@pytest.mark.parametrize("implementation", DRAWN)
def test_other_inputs_are_of_other_kinds_for_the_same_program(implementation):
    for trials in DRAWN[implementation][:100]:
        first, *others = fuzz.with_other_inputs(trials)
        assert first == trials and len({str(one) for one in (trials, *others)}) == fuzz.INPUTS
        for trial, other in ((trial, other) for more in others for trial, other in zip(trials, more, strict=True)):
            assert other.form == trial.form and checked(other) == checked(trial)
            shapes = [jax.tree.map(np.shape, one.lengths) for one in (trial, other)]
            assert shapes[0] == shapes[1]


def test_one_program_serves_several_inputs(monkeypatch):
    trial = Trial(9, 14, 8, N=4, K=2, B=2, implementation="reference", key_lengths=(3, 9), documents=2)
    trial = fuzz.replace(trial, extras=("bias", "sinks"))
    traced = []
    attention = lambda *arrays, **rest: traced.append(1) or fuzz.flash_attention(*arrays, **rest)
    found = [fuzz.attempt(one, attention) for one in fuzz.with_other_inputs((trial,))]
    assert [report.kind for report in found] == fuzz.INPUTS * ["right"] and len(traced) == 1
    assert len({str(report.distances) for report in found}) == fuzz.INPUTS


SMALL = Trial(9, 14, 8, N=4, K=2, B=2, implementation="reference")
LENGTHS = {"query_lengths": (12, 0, 5), "key_lengths": (2, 9, 0)}
SOUND = [
    (Trial(3, 100, 16, N=4, K=2, B=2, dtype="float32", key_lengths=(50, 0), page=17, implementation="reference"),),
    (SMALL, fuzz.replace(SMALL, dtype="bfloat16", kinds=(("logits", "spread", 8.0),), is_causal=True)),
    (Trial(12, 9, 8, B=3, dtype="float32", **LENGTHS, window=(3, 2), way="vmap", implementation="reference"),),
]


@pytest.mark.parametrize("trials", SOUND, ids=str)
def test_a_right_result_is_right(trials):
    assert fuzz.attempt(trials).kind == "right"


REAL_RUN = fuzz.run


def pretend(monkeypatch, function, **options):
    """Let `fuzz.run` be function(trials), but for naive attention, which is run."""

    def run(trials, attention=None, dtype=None):
        return REAL_RUN(trials, dtype=dtype) if trials[0].implementation == "reference" else function(trials, **options)

    monkeypatch.setattr(fuzz, "run", run)


def stand_in(trials, hides=None, change=None):
    """What `fuzz.run` returns: the oracle's results, rounded.

    hides: the mask instead of `visible`. change: takes {name: result} and changes one.
    """
    found = []
    for trial in trials:
        arrays, (dout, dlse) = fuzz.replace(trial, unseen=None).inputs()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "visible", hides or visible)
            out, lse = reference.oracle(*arrays, **trial.arguments, **trial.lengths)
            gradients = reference.oracle_gradients(*arrays, dout, dlse, **trial.arguments, **trial.lengths)
        out, *gradients = (array.astype(jnp.dtype(trial.dtype)) for array in (out, *gradients[:3]))
        results = dict(zip(rounding.NAMES, (out, lse.astype(np.float32), *gradients), strict=True))
        if change is not None:
            change(results)
        found.append(tuple(results.values()))
    return found


def no_mask_in_a_tile(rows, cols, *rest, tile=64):
    """Queries and keys tile..2 tile all see each other."""
    return visible(rows, cols, *rest) | ((rows >= tile) & (rows < 2 * tile) & (cols >= tile) & (cols < 2 * tile))


def change_entry(name, factor, results):
    """One entry of many, one of middling size."""
    array = results[name]
    order = np.argsort(np.abs(array.astype(np.float32)), axis=None)
    at = np.unravel_index(order[array.size // 2], array.shape)
    array[at] *= np.asarray(factor, array.dtype)


def enlarge_lse(results):
    results["lse"] *= np.float32(1 + 3e-5)


def forget_scale(results):
    for name in ("dq", "dk"):
        results[name] = results[name] * np.asarray(LARGE.H**0.5, results[name].dtype)


LARGE = Trial(150, 140, 80, N=2, dtype="float16", is_causal=True)
COMMON = (("key", "runs", 30.0), ("value", "drift", 10.0))
SPECIAL = ((), COMMON, (("logits", "spread", 8.0),))
FAULTS = {
    "no mask in one tile": ({"hides": no_mask_in_a_tile}, ["out", "lse", "dq", "dk", "dv"]),
    "gradients without the scale": ({"change": forget_scale}, ["dq", "dk"]),
    "an entry of dq has the wrong sign": ({"change": functools.partial(change_entry, "dq", -1.0)}, ["dq"]),
    "an entry of out is not a number": ({"change": functools.partial(change_entry, "out", np.nan)}, ["out"]),
    "lse is too large by 1 in 30000": ({"change": enlarge_lse}, ["lse"]),
}


@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_a_fault_is_found_in_inputs_of_several_kinds(special, monkeypatch):
    trial = fuzz.replace(LARGE, kinds=special)
    naive = fuzz.run_naive(trial)
    monkeypatch.setattr(fuzz, "run_naive", lambda trial, dtype=None: naive)
    for fault, (options, wrong) in ({"none": ({}, [])} | FAULTS).items():
        pretend(monkeypatch, stand_in, **options)
        report = fuzz.attempt((trial,))
        assert [name for name, one in report.distances[0].items() if not fuzz.good(one)] == wrong, fault
        assert report.kind == ("wrong" if wrong else "right") and not report.unjudged


def kernel(trials, delta="kept"):
    """`fuzz.run` of a kernel in NumPy of float32 sums, one head and no mask: delta of an out kept in twice the bits
    of the dtype, or "rounded" as it is returned."""
    (trial,) = trials
    (q, k, v), (do, _) = trial.inputs()
    q, k, v, do = (np.asarray(array[0, :, 0], np.float32) for array in (q, k, v, do))
    rounded = lambda x: x.astype(jnp.dtype(trial.dtype)).astype(np.float32)
    scale = np.float32(trial.call.problem.scale)
    s = scale * q @ k.T
    m = s.max(1, keepdims=True)
    w = rounded(np.exp(s - m))
    lse = np.log(np.exp(s - m).sum(1, keepdims=True)) + m
    out, p = w @ v / w.sum(1, keepdims=True), np.exp(s - lse)
    kept = rounded(out) + rounded(out - rounded(out)) * (delta == "kept")
    ds = rounded(p * (do @ v.T - (kept * do).sum(1, keepdims=True)))
    found = (x[None, :, None].astype(trial.dtype) for x in (out, scale * ds @ k, scale * ds.T @ q, rounded(p).T @ do))
    out, *gradients = found
    return [(out, lse[None], *gradients)]


@pytest.mark.parametrize("form", kinds.COMMON)
def test_a_delta_of_a_rounded_out_is_wrong_where_keys_and_values_share_a_part(form, monkeypatch):
    trial = Trial(70, 90, 32, kinds=tuple((name, form, 100.0) for name in ("key", "value")))
    for delta, kind in (("kept", "right"), ("rounded", "wrong")):
        pretend(monkeypatch, kernel, delta=delta)
        assert fuzz.attempt((trial,)).kind == kind, delta


TASKS = {
    "__import__('os').environ['CUDA_VISIBLE_DEVICES']": ("returned", "7"),
    "1 + 1": ("returned", "2"),
    "__import__('os')._exit(3)": ("died", "the process ended with exit code 3"),
    "__import__('time').sleep(600)": ("hung", "no answer after 1 s"),
    "1 / 0": ("raised", "ZeroDivisionError: division by zero"),
}


@pytest.mark.full
def test_processes_that_hang_or_die_are_named_and_replaced():
    with workers.Workers(eval, 1, devices=["7"]) as pool:
        found = {outcome.task: (outcome.kind, str(outcome.value)) for outcome in pool.outcomes(TASKS, 1.0)}
    assert found == TASKS


@contextlib.contextmanager
def in_this_process(function, count):
    """Like `workers.Workers`."""
    outcome = lambda task: workers.Outcome(task, "returned", function(task))
    yield SimpleNamespace(outcomes=lambda tasks, patience: map(outcome, tasks))


def main(monkeypatch, tmp_path, *arguments, **options):
    monkeypatch.setattr(workers, "Workers", in_this_process)
    pretend(monkeypatch, stand_in, **options)
    log = tmp_path / "log.jsonl"
    status = fuzz.main(["--longest", "40", "--calls", "12", "--log", str(log), *arguments])
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert 12 <= sum(len(record["trials"]) for record in records) < 12 + 2 * fuzz.INPUTS
    return status, records


@pytest.mark.full
def test_a_run_with_a_fault_prints_a_line_that_reproduces_it(monkeypatch, tmp_path, capsys):
    hides = functools.partial(no_mask_in_a_tile, tile=8)
    status, records = main(monkeypatch, tmp_path, "--seed", "6", hides=hides)
    printed = capsys.readouterr().out
    assert status == 1 and any(record["kind"] == "wrong" for record in records)
    line = re.search(r'wrong: .*\n  python -c "(.*)"', printed)[1]
    exec(line)
    assert "WRONG" in capsys.readouterr().out
    pretend(monkeypatch, stand_in)
    exec(line)
    assert "WRONG" not in capsys.readouterr().out
