"""The fuzzer calls what is legal and nothing else, finds faults in few entries, and raises no false alarm."""

import functools
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention import reference
from helpers.attention.hopper import serve as hopper
from helpers.attention.masking import visible
from helpers.attention.problem import check_call
from helpers.measure import fuzz, rounding, workers
from helpers.measure.fuzz import Report, Trial

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
        assert not trial.page or (trial.T <= 16 and trial.window is None and not trial.is_causal)
        if implementation == "hopper":
            assert hopper.why_not(trial.call) is None


KINDS = {
    "far more keys than queries": lambda t: t.S > 50 * t.T,
    "far more queries than keys": lambda t: t.T > 50 * t.S,
    "one query": lambda t: t.T == 1,
    "few queries, very many keys": lambda t: t.T <= 16 and t.S > 5000,
    "more than a thousand of both": lambda t: min(t.T, t.S) > 1000,
    "whole tiles of 128": lambda t: t.T % 128 == 0,
    "one more than tiles of 64": lambda t: t.S % 64 == 1,
    "one less than tiles of 256": lambda t: t.T % 256 == 255,
    "a narrow head": lambda t: t.H < 64,
    "an odd head": lambda t: t.H % 2,
    "the widest head": lambda t: t.H == 256,
    "a head of a width in between": lambda t: t.H == 160,
    "heads for themselves": lambda t: t.N == t.K > 1,
    "several groups of heads": lambda t: t.N > t.K > 1,
    "a group for all": lambda t: t.N > t.K == 1,
    "more work than a card has processors": lambda t: t.B * t.N > 132,
    "causal": lambda t: t.is_causal,
    "full": lambda t: not t.is_causal,
    "bfloat16": lambda t: t.dtype == "bfloat16",
    "float16": lambda t: t.dtype == "float16",
    "a scale": lambda t: t.scale is not None,
    "a negative scale": lambda t: (t.scale or 0) < 0,
    "a gradient into lse": lambda t: t.lse_gradient,
    "vmap": lambda t: t.way == "vmap",
    "no program around it": lambda t: t.way == "eager",
    "large values": lambda t: t.value_size > 1,
    **{f"{logits} logits": lambda t, logits=logits: t.logits == logits for logits in fuzz.LOGITS},
    "where the masks of two tiles of queries were once left out": (
        lambda t: t.is_causal and 65 <= t.T <= 128 and t.S >= 257 and t.H > 64
    ),
}
MORE_KINDS = {  # which Hopper kernels do not serve
    "float32": lambda t: t.dtype == "float32" and t.precision == "highest",
    "TF32": lambda t: t.dtype == "float32" and t.precision == "default",
    "a window": lambda t: t.window and not t.is_causal,
    "a causal window": lambda t: t.window and t.is_causal,
    "lengths": lambda t: t.query_lengths and t.key_lengths,
    "lengths under vmap": lambda t: t.key_lengths and t.way == "vmap",
    "pages": lambda t: t.page,
    "pages of sequences of several lengths": lambda t: t.page and t.key_lengths and t.B > 1,
}


@pytest.mark.parametrize("implementation", DRAWN)
def test_every_kind_of_call_is_drawn(implementation):
    kinds = KINDS if implementation == "hopper" else KINDS | MORE_KINDS
    trials = [trial for trials in DRAWN[implementation] for trial in trials]
    missing = [name for name, kind in kinds.items() if sum(map(bool, map(kind, trials))) < 3]
    assert not missing
    assert any(len(trials) == 2 for trials in DRAWN[implementation]), "two calls in one program"


def test_a_call_is_made_from_the_seed_and_its_number_and_printed_whole():
    assert fuzz.draw(3, 7) == fuzz.draw(3, 7) != fuzz.draw(4, 7) != fuzz.draw(4, 8)
    for trial in (trial for trials in DRAWN[None][:50] for trial in trials):
        assert Trial(**eval(str(trial))) == trial


def test_the_sweep_has_every_call():
    sweep = [trial for (trial,) in fuzz.causal_sweep("hopper")]
    assert len(set(sweep)) == 141 * 4 * 4 * 2
    assert all(trial.is_causal and trial.implementation == "hopper" for trial in sweep)
    assert {trial.T for trial in sweep} == set(range(60, 201))


SMALL = Trial(9, 14, 8, N=4, K=2, B=2, implementation="reference")
SOUND = [
    (Trial(3, 100, 16, N=4, K=2, B=2, dtype="float32", key_lengths=(50, 0), page=17, implementation="reference"),),
    (Trial(3, 100, 16, N=4, K=2, dtype="float16", page=16, implementation="portable"),),
    (SMALL, Trial(5, 3, 16, dtype="bfloat16", logits="sharp", is_causal=True, implementation="reference")),
    (Trial(20, 17, 16, dtype="float16", scale=-0.6, lse_gradient=True, implementation="reference"),),
    (
        Trial(
            *(12, 9, 8),
            B=3,
            dtype="float32",
            query_lengths=(12, 0, 5),
            key_lengths=(2, 9, 0),
            window=(3, 2),
            way="vmap",
            implementation="reference",
        ),
    ),
]


@pytest.mark.parametrize("trials", SOUND, ids=str)
def test_a_right_result_is_right(trials):
    assert fuzz.attempt(trials).kind == "right"


def stand_in(trials, attention=None, tile_without_mask=0, change=None):
    """What `fuzz.run` returns: the oracle's results, rounded.

    tile_without_mask: of queries and keys tile..2 tile all see each other. change: takes {name: result} and
    changes one.
    """

    def leaky(rows, cols, *rest):
        tile = tile_without_mask
        return visible(rows, cols, *rest) | ((rows >= tile) & (rows < 2 * tile) & (cols >= tile) & (cols < 2 * tile))

    found = []
    for trial in trials:
        arrays, (dout, dlse) = trial.inputs()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "visible", leaky)
            out, lse = reference.oracle(*arrays, **trial.arguments, **trial.lengths)
            gradients = reference.oracle_gradients(*arrays, dout, dlse, **trial.arguments, **trial.lengths)
        out, *gradients = (array.astype(jnp.dtype(trial.dtype)) for array in (out, *gradients))
        results = dict(zip(rounding.NAMES, (out, lse.astype(np.float32), *gradients), strict=True))
        if change is not None:
            change(results)
        found.append(tuple(results.values()))
    return found


def change_entry(name, factor, results):
    """One entry of many, one of middling size."""
    array = results[name]
    order = np.argsort(np.abs(array.astype(np.float32)), axis=None)
    at = np.unravel_index(order[array.size // 2], array.shape)
    array[at] *= np.asarray(factor, array.dtype)


def change_row(name, factor, results):
    results[name][0, 5] *= np.asarray(factor, results[name].dtype)


def shift_lse(results):
    results["lse"] += np.float32(1e-4)


def cut_to_8_bits(name, results):
    results[name] = results[name].astype(jnp.bfloat16).astype(results[name].dtype)


LARGE = Trial(150, 140, 80, N=2, dtype="float16", is_causal=True)
FAULTS = {
    "no mask in one tile": ({"tile_without_mask": 64}, ["out", "lse", "dq", "dk", "dv"]),
    "a row of dk is 2 % too large": ({"change": functools.partial(change_row, "dk", 1.02)}, ["dk"]),
    "an entry of dq is 2 % too small": ({"change": functools.partial(change_entry, "dq", 0.98)}, ["dq"]),
    "an entry of dv has the wrong sign": ({"change": functools.partial(change_entry, "dv", -1.0)}, ["dv"]),
    "an entry of out is not a number": ({"change": functools.partial(change_entry, "out", np.nan)}, ["out"]),
    "lse is a ten-thousandth too large": ({"change": shift_lse}, ["lse"]),
    "out was rounded to bfloat16": ({"change": functools.partial(cut_to_8_bits, "out")}, ["out"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_few_entries_is_found(fault, monkeypatch):
    options, wrong = FAULTS[fault]
    monkeypatch.setattr(fuzz, "run", functools.partial(stand_in, **options))
    report = fuzz.attempt((LARGE,))
    assert [name for name, one in report.distances[0].items() if not fuzz.good(one)] == wrong
    assert report.kind == "wrong"


def test_nothing_may_come_from_what_is_not_seen(monkeypatch):
    """Causal, with more keys than queries: no query sees the last keys, and their gradients are zeros, exactly."""

    def touch(results):
        results["dk"][0, -1, 0, 0] = 1e-6

    trial = Trial(20, 30, 8, is_causal=True)
    for change, kind in ((None, "right"), (touch, "wrong")):
        monkeypatch.setattr(fuzz, "run", functools.partial(stand_in, change=change))
        assert fuzz.attempt((trial,)).kind == kind


def tf32_product(a, b):
    """a @ b, of whose operands a tensor core reads the first 10 bits after the point."""
    cut = lambda x: (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return cut(a) @ cut(b)


def tf32_run(trials, attention=None, delta_missing=False):
    """`fuzz.run` of a float32 kernel whose products are TF32: one head, causal or full."""
    (trial,) = trials
    ((q, k, v), (do, dlse)) = trial.inputs()
    q, k, v, do = (np.asarray(array[0, :, 0], np.float32) for array in (q, k, v, do))
    scale = np.float32(trial.H**-0.5)
    s = scale * tf32_product(q, k.T)
    if trial.is_causal:
        s[np.arange(trial.T)[:, None] < np.arange(trial.S)] = -np.inf
    lse = np.log(np.exp(s - s.max(1, keepdims=True)).sum(1)) + s.max(1)
    p = np.exp(s - lse[:, None])
    out = tf32_product(p, v)
    delta = (out * do).sum(1) * (not delta_missing)
    ds = p * (tf32_product(do, v.T) - delta[:, None] + dlse[0])
    dq, dk, dv = scale * tf32_product(ds, k), scale * tf32_product(ds.T, q), tf32_product(p.T, do)
    return [
        (*(array[None, :, None] for array in (out,)), lse[None, :, None], *(a[None, :, None] for a in (dq, dk, dv)))
    ]


@pytest.mark.parametrize("change", [{}, {"S": 1}, {"value_size": 10.0}, {"is_causal": True}], ids=str)
def test_what_tf32_cuts_is_allowed_where_it_is_asked_for(change, monkeypatch):
    """Also in rows of one visible key, whose dq is 0 and comes out as what rounding leaves of dp - delta."""
    trial = Trial(**{"T": 60, "S": 90, "H": 64, "dtype": "float32", "precision": "default"} | change)
    monkeypatch.setattr(fuzz, "run", tf32_run)
    assert fuzz.attempt((trial,)).kind == "right"
    assert fuzz.attempt((fuzz.replace(trial, precision="highest"),)).kind == "wrong"
    monkeypatch.setattr(fuzz, "run", functools.partial(tf32_run, delta_missing=True))
    assert fuzz.attempt((trial,)).kind == "wrong"


def is_broken(trials):
    """A stand-in for calling: one fault, in calls like those that were once wrong."""
    return any(t.is_causal and t.T > 64 and t.S > 256 and t.H > 64 and t.dtype != "float32" for t in trials)


def judge(is_broken, programs):
    return [Report(trials, "wrong" if is_broken(trials) else "right") for trials in programs]


@pytest.mark.parametrize("others", [(), (Trial(7, 7),)], ids=["alone", "beside another"])
def test_a_failure_is_made_simpler(others):
    lengths = {"query_lengths": (800, 3), "key_lengths": (1500, 900), "window": (70, 3)}
    trial = Trial(
        *(801, 1700, 200, 6, 2, 2), is_causal=True, scale=0.3, logits="sharp", way="vmap", lse_gradient=True, **lengths
    )
    report = Report((*others, trial), "wrong")
    assert fuzz.shrink(report, functools.partial(judge, is_broken)).trials == (Trial(65, 257, 65, is_causal=True),)


def test_a_failure_that_takes_two_calls_stays_a_failure():
    report = Report((Trial(70, 300), Trial(9, 9)), "wrong")
    assert fuzz.shrink(report, functools.partial(judge, lambda trials: len(trials) == 2)) == report


def test_making_simpler_ends_when_its_time_is_up():
    """With a fault that only goes by single steps, and a clock by which each takes 20 seconds."""
    one_less = functools.partial(judge, lambda trials: trials[0].T > 1900 and trials[0].T % 64 != 1)
    found = fuzz.shrink(Report((Trial(2000, 1),), "wrong"), one_less, 50, iter(range(0, 1000, 20)).__next__)
    assert found.trials == (Trial(1998, 1, 1),)


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


class InThisProcess:
    """Like `workers.Workers`."""

    def __init__(self, function, count):
        self.function = function

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def outcomes(self, tasks, patience):
        for task in tasks:
            yield workers.Outcome(task, "returned", self.function(task), 0.0)


def main(monkeypatch, tmp_path, *arguments, **options):
    monkeypatch.setattr(workers, "Workers", InThisProcess)
    monkeypatch.setattr(fuzz, "run", functools.partial(stand_in, **options))
    log = tmp_path / "log.jsonl"
    status = fuzz.main(["--longest", "40", "--calls", "12", "--log", str(log), *arguments])
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(len(record["trials"]) for record in records) in (12, 13)
    return status, records


def test_a_sound_run_ends_with_status_0(monkeypatch, tmp_path, capsys):
    status, records = main(monkeypatch, tmp_path)
    assert status == 0 and all(record["kind"] == "right" for record in records)
    assert re.search(r"1[23] calls in .* minutes, \d+ a minute: 0 wrong", capsys.readouterr().out)


def test_a_run_with_a_fault_prints_a_line_that_reproduces_it(monkeypatch, tmp_path, capsys):
    status, records = main(monkeypatch, tmp_path, "--seed", "1", tile_without_mask=8)
    printed = capsys.readouterr().out
    assert status == 1 and any(record["kind"] == "wrong" for record in records)
    line = re.search(r'Made simpler, wrong: .*\n  python -c "(.*)"', printed)[1]
    exec(line)
    assert "WRONG" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "run", stand_in)
    exec(line)
    assert "WRONG" not in capsys.readouterr().out


def test_errors_are_counted_and_shown():
    def run_all(programs):
        for trials in programs:
            yield Report(trials, "raised", "JaxRuntimeError: RESOURCE_EXHAUSTED: Shared memory size limit exceeded")

    shown = io.StringIO()
    tally = fuzz.fuzz([(SMALL,), (SMALL, SMALL)], run_all, progress=shown)
    assert (tally.calls, len(tally.wrong), len(tally.kinds())) == (3, 2, 1)
    assert "RESOURCE_EXHAUSTED" in shown.getvalue() and tally.wrong[0].reproduction in shown.getvalue()
