"""The fuzzer calls what is legal and nothing else, finds faults of every kind, and raises no false alarm."""

import contextlib
import functools
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

from helpers import flash_attention
from helpers.attention.problem import check_call
from helpers.attention.public.registry import TABLE
from helpers.dev import fuzz, kinds, workers
from helpers.dev.fuzz import Trial

by_implementation = pytest.mark.parametrize("implementation", [None, "portable", "hopper"])


@functools.cache
def drawn(implementation):
    return [fuzz.draw(0, i, implementation) for i in range(400)]


def checked(trial):
    """The problem that `check_call` sees; no array is made."""
    queries = jax.ShapeDtypeStruct((trial.B, trial.T, trial.N, trial.H), trial.dtype)
    keys = jax.ShapeDtypeStruct((trial.B, trial.S, trial.K, trial.H), trial.dtype)
    problems = []

    def check(*arrays):
        problems.append(check_call(*arrays, **trial.arguments, **trial.lengths).problem)

    jax.eval_shape(check, queries, keys, keys)
    return problems[0]


@by_implementation
def test_every_drawn_call_is_legal(implementation):
    for trial in itertools.chain(*drawn(implementation)[:150]):
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
    **{f"a kind {kind}": lambda t, kind=kind: kind in t.kinds for kind in kinds.LOGITS},
}
MORE_KINDS = {  # which Hopper kernels do not serve
    "TF32": lambda t: t.dtype == "float32" and t.precision == "default",
    "rows that see nothing, with NaN in dout": lambda t: t.query_lengths and t.unseen == "nan",
    "pages with queries at the end of a sequence": lambda t: t.page and 0 < t.offset == t.S - t.T,
    "documents": lambda t: t.documents > 1 and t.T > 100,
    **{f"{name} besides": lambda t, name=name: name in t.extras for name in fuzz.EXTRAS},
}


@by_implementation
def test_every_kind_of_call_is_drawn(implementation):
    wanted = KINDS if implementation == "hopper" else KINDS | MORE_KINDS
    trials = [*itertools.chain(*drawn(implementation))]
    assert not [name for name, kind in wanted.items() if sum(map(bool, map(kind, trials))) < 3]
    assert any(len(trials) == 2 for trials in drawn(implementation)), "two calls in one program"


LENGTHS = {"query_lengths": (12, 0, 5), "key_lengths": (2, 9, 0)}
ERRS_ALIKE = (("key", "all", 14.0), ("dout", "all", 65.0), ("query", "equal", 1.0), ("logits", "spread", 8.0))
SOUND = [
    (Trial(512, 64, 16, kinds=ERRS_ALIKE, implementation="mosaic", seed=4),),
    (Trial(3, 100, 16, N=4, K=2, B=2, dtype="float32", key_lengths=(50, 0), page=17, implementation="reference"),),
    (Trial(12, 9, 8, B=3, dtype="float32", **LENGTHS, window=(3, 2), way="vmap", implementation="reference"),),
]


@pytest.mark.parametrize("trials", SOUND, ids=str)
def test_a_right_result_is_right(trials):
    assert fuzz.attempt(trials).kind == "right"


def one_of(array):
    """Where the entry in the middle of an array is."""
    return jnp.zeros(array.shape, bool).at[tuple(size // 2 for size in array.shape)].set(True)


def no_mask_in_a_tile(query, key, value, **named):
    """The second 64 queries and keys all see each other."""
    rows, cols = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])
    seen = (cols <= rows) | ((rows // 64 == 1) & (cols // 64 == 1))
    return flash_attention(query, key, value, mask=seen, **named | {"is_causal": False})


def another_sign(query, *others, **named):
    return flash_attention(jnp.where(one_of(query), 2 * stop_gradient(query) - query, query), *others, **named)


def no_number(*arrays, **named):
    out, lse = flash_attention(*arrays, **named)
    return out + stop_gradient(jnp.where(one_of(out), jnp.nan, 0).astype(out.dtype)), lse


def larger_lse(*arrays, **named):
    out, lse = flash_attention(*arrays, **named)
    return out, lse + stop_gradient(jnp.where(one_of(lse), 1e-3 * lse, 0))


LARGE = Trial(150, 140, 80, N=2, dtype="float16", is_causal=True)
COMMON = (("key", "runs", 30.0), ("value", "drift", 10.0))
SPECIAL = (), (*COMMON, ("logits", "spread", 8.0))
FAULTS = {
    "no mask in one tile": (no_mask_in_a_tile, ["out", "lse", "dq", "dk", "dv"]),
    "an entry of dq has the wrong sign": (another_sign, ["dq"]),
    "an entry of out is not a number": (no_number, ["out"]),
    "an entry of lse is too large by 1 in 1000": (larger_lse, ["lse"]),
}


@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_a_fault_is_found_in_inputs_of_several_kinds(special, monkeypatch):
    trial = fuzz.replace(LARGE, kinds=special)
    naive = fuzz.run_naive(trial)
    monkeypatch.setattr(fuzz, "run_naive", lambda trial, dtype=None: naive)
    for fault, (attention, wrong) in ({"none": (flash_attention, [])} | FAULTS).items():
        report = fuzz.attempt((trial,), attention)
        assert [name for name, one in report.distances[0].items() if not fuzz.good(one)] == wrong, fault
        assert report.kind == ("wrong" if wrong else "right") and not report.unjudged


ROUNDS_OUT = functools.partial(flash_attention, keeps_low_bits=False)


@pytest.mark.parametrize("form", kinds.COMMON)
def test_a_delta_of_a_rounded_out_is_wrong_where_keys_and_values_share_a_part(form):
    of_both = tuple((name, form, 100.0) for name in ("key", "value"))
    trial = Trial(70, 90, 32, kinds=of_both, implementation="portable")
    for attention, kind in ((flash_attention, "right"), (ROUNDS_OUT, "wrong")):
        assert fuzz.attempt((trial,), attention).kind == kind, attention


@pytest.mark.full
def test_a_run_with_a_fault_prints_a_line_that_reproduces_it(monkeypatch, capsys):
    @contextlib.contextmanager
    def in_this_process(function, count):
        """Like `workers.Workers`."""
        outcome = lambda task: workers.Outcome(task, "returned", function(task))
        yield SimpleNamespace(outcomes=lambda tasks, patience: map(outcome, tasks))

    run = fuzz.run

    def wrong(trials, *_, dtype=None):
        """Twice what is right, but of naive attention, with which it is compared."""
        times = 1 if trials[0].implementation == "reference" else 2
        return jax.tree.map(lambda array: times * array, run(trials, dtype=dtype))

    monkeypatch.setattr(workers, "Workers", in_this_process)
    monkeypatch.setattr(fuzz, "run", wrong)
    status = fuzz.main(["--longest", "40", "--calls", "12", "--seed", "6"])
    printed = capsys.readouterr().out
    assert status == 1
    line = re.search(r'wrong: .*\n  python -c "(.*)"', printed)[1]
    exec(line)
    assert "WRONG" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "run", run)
    exec(line)
    assert "WRONG" not in capsys.readouterr().out
