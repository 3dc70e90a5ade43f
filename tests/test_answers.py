"""Answers that nobody wrote: solutions with a slip, which a check must reject, and right answers in other styles."""

import jax
import jax.numpy as jnp
import lessons
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from helpers.exercises import running
from helpers.exercises.checking import verdict
from helpers.exercises.edits import edited, source_of, written
from helpers.exercises.exercise import exercise
from helpers.exercises.slips import slips
from helpers.instruments import cost

NUMBERS = [lesson.number for lesson in lessons.ALL]
WHOLE_KERNELS = {number for number in NUMBERS if exercise(number).building_block}  # minutes for all their slips
KERNELS = {"4.1", "4.2", "4.3", "5.2", "5.3", "7.1", "7.2", "7.3", "8.1", "10.1"} | WHOLE_KERNELS  # seconds each
EVERY = 25  # of how many slips the quick tests try one

COMMUTES = "the two parts are treated alike"
TWO_AXES = "a table has two axes, and the last is number 1"
NEVER_READ = "whatever stands there is multiplied by 0, or overwritten"
EMPTY = "the range is empty as before"
WHOLE = "it comes out whole in every case, or is rounded afterwards"
ONE_LENGTH = "both arrays have one length along that axis"
STILL_BREAKS = "another row of logits that breaks what it shall"
NO_TIE = "the task has no ties, or leaves them open"
ALIKE = "the task treats them alike"
BOTH = "the one undoes what the other does"
ROUNDED_AWAY = "rounding to whole units leaves the result as it is"

EQUAL = {
    "1.1": {"-1 → 1": TWO_AXES, "k → v": ONE_LENGTH, "q → k": ONE_LENGTH},
    "1.2": {"`T` and `S` have changed places": ALIKE},
    "1.3": {"0 → -1": "the loop begins one step earlier and ends at the same length"},
    "2.2": {"(a, b) → (b, a)": COMMUTES},
    "2.3": {
        change: STILL_BREAKS
        for change in (
            "np.zeros → np.ones",
            "100.0 → 101.0",
            "100.0 → 99.0",
            "200.0 → 201.0",
            "200.0 → 199.0",
            "100.0 → 200.0",
            "200.0 → 100.0",
            "200.0 → 400.0",
            "everywhere: a number is too large by one",
            "everywhere: a number is too small by one",
            "everywhere: a number is twice what it should be",
        )
    },
    "2.4": {"0.0 → 1.0": NEVER_READ, "0.0 → -1.0": NEVER_READ},
    "3.1": {
        "np.zeros → np.ones": NEVER_READ,
        "everywhere: `ones` stands where `zeros` belongs": NEVER_READ,
        "k → v": ONE_LENGTH,
        "q → k": ONE_LENGTH,
    },
    "3.5": {
        "`block_q` and `block_k` have changed places": ALIKE,
        "S → T": "the least of both is at the same tile",
        "cost.query_outer_bytes(T, S, H, itemsize, *pair) → cost.query_outer_bytes(T, H, S, itemsize, *pair)": (
            "S and H are factors of one product"
        ),
        "cost.query_outer_bytes(T, S, H, itemsize, *pair) → cost.query_outer_bytes(T, S, itemsize, H, *pair)": (
            "H and itemsize are factors of every product"
        ),
    },
    "4.3": {"0 → 1": "the other operand holds 0 there", "0 → -1": "the other operand holds 0 there"},
    "5.3": {"1 → 2": "minus infinity plus one is minus infinity, and 0 divided by 2 is 0"},
    "5.1": {"0 → 1": EMPTY, "0 → -1": EMPTY, "`T` and `S` have changed places": ALIKE},
    "6.3": {"np.zeros_like → np.ones_like": "dq is overwritten, head by head"},
    "6.5": {
        "(np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)) → (np.zeros_like(q), np.zeros_like(v), np.zeros_like(k))": (
            "k and v have one shape"
        ),
        "k → v": "k and v have one shape",
        "v → k": "k and v have one shape",
    },
    "7.5": {"0 → 1": EMPTY, "0 → -1": EMPTY},
    "8.4": {
        "-1 → 1": TWO_AXES,
        "everywhere: a minus or a `not` is left out": TWO_AXES,
        "0 → -1": "an axis of length one has one entry, the last",
    },
    "9.1": {"0 → 1": "any inputs will do for the warm-up", "0 → -1": "any inputs will do for the warm-up"},
    "9.4": {
        "T // block → T / block": WHOLE,
        "tiles * (tiles + 1) // 2 → tiles * (tiles + 1) / 2": WHOLE,
        "everywhere: a quotient is not rounded": WHOLE,
    },
    "10.2": {
        "65536 → 65537": ROUNDED_AWAY,
        "128 → 127": ROUNDED_AWAY,
        "65536 // (128 * (warpgroups + 1)) → 65536 / (128 * (warpgroups + 1))": WHOLE,
        "pool // warpgroups → pool / warpgroups": WHOLE,
    },
    "10.3": {change: ROUNDED_AWAY for change in ("232448 → 232449", "1280 → 1279")},
    "10.5": {
        "start // programs → start / programs": WHOLE,
        "start // programs % 2 == 1 and len(turn) == programs → start // programs % 2 == 1": (
            "a last turn that is not full may be dealt from either end"
        ),
    },
    "11.1": {"block_k // 2 → block_k / 2": WHOLE},
    "12.4": {"fused < split → fused <= split": NO_TIE},
    "12.5": {"block_q // 2 → block_q / 2": WHOLE},
    "13.2": {"-1 → 1": TWO_AXES, "everywhere: a minus or a `not` is left out": TWO_AXES},
    "13.3": {
        "0 → 1": "any reference is right where every weight is 0",
        "0 → -1": "any reference is right where every weight is 0",
        "1 → 2": "0 divided by 2 is 0 too",
        "np.errstate(divide='ignore') → np.errstate()": "it only keeps a warning away",
    },
    "13.5": {"memory // (page * token) → memory / (page * token)": WHOLE},
    "14.1": {"0.0 → 1.0": NEVER_READ, "0.0 → -1.0": NEVER_READ},
    "14.2": {"i - r → i + r": "the ring turned the other way, in which all shares come past as well"},
    "14.3": {"np.zeros → np.ones": NEVER_READ, "everywhere: two indices are exchanged": BOTH},
    "14.4": {"share // 2 → share / 2": WHOLE},
    "14.6": {"everywhere: the two sides of an operation are exchanged": BOTH},
    "15.1": {"jnp.zeros → jnp.ones": NEVER_READ, "everywhere: `ones` stands where `zeros` belongs": NEVER_READ},
    "15.3": {"32 // itemsize → 32 / itemsize": WHOLE},
    "17.1": {"`T` and `S` have changed places": ALIKE},
    "17.3": {"2 * (column // 8) → 2 * (column // 8) * (column // 8)": "it is 0 or 1, and so is its square"},
    "18.4": {
        "np.zeros → np.ones": "a start with weight 0, or overwritten",
        "everywhere: `ones` stands where `zeros` belongs": "a start with weight 0, or overwritten",
        "q → k": ONE_LENGTH,
        "0 → 1": "any reference is right where every weight is 0",
        "0 → -1": "any reference is right where every weight is 0",
    },
    "18.5": {"everywhere: the two sides of an operation are exchanged": BOTH},
}


def survivors(number, every=1):
    """(how many slips were tried, those that the check takes for right)."""
    found = exercise(number)
    tried = list(slips(source_of(found.solution)))[::every]
    alive = [
        change for change, _, source in tried if verdict(found, written(found.solution, source)).status == "correct"
    ]
    return len(tried), alive


@pytest.mark.parametrize("number", [number for number in NUMBERS if number not in KERNELS])
def test_some_slips_are_rejected(number, monkeypatch):
    monkeypatch.setattr(running, "SECONDS", 0.3)  # a loop that never ends need not be waited for
    _, alive = survivors(number, EVERY)
    assert set(alive) <= set(EQUAL.get(number, ()))


@pytest.mark.full
@pytest.mark.parametrize("number", [number for number in NUMBERS if number not in WHOLE_KERNELS])
def test_all_slips_are_rejected_but_those_that_are_equal(number, monkeypatch):
    monkeypatch.setattr(running, "SECONDS", 10 if number in KERNELS else 1)
    tried, alive = survivors(number)
    assert tried >= 5
    assert set(alive) == set(EQUAL.get(number, ()))


# Right answers in other styles


def converted(value, convert):
    """Arguments or results with every array and string replaced."""
    if isinstance(value, np.ndarray | str):
        return convert(value)
    if isinstance(value, tuple | list):
        return type(value)(converted(item, convert) for item in value)
    if isinstance(value, dict):
        return {key: converted(item, convert) for key, item in value.items()}
    return value


def floats(convert):
    return lambda value: convert(value) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


STYLES = {
    "float32": lambda f: lambda *a: f(*converted(a, floats(np.float32))),
    "Python lists": lambda f: lambda *a: converted(f(*a), lambda x: x if isinstance(x, str) else x.tolist()),
    "a list instead of a tuple": lambda f: lambda *a: list(r) if isinstance(r := f(*a), tuple) else r,
}


@pytest.mark.parametrize("number", [number for number in NUMBERS if number not in KERNELS])
def test_right_answers_in_any_style(number):
    solution = exercise(number).solution
    for style, restyled in STYLES.items():
        judged = verdict(exercise(number), restyled(solution))
        assert judged.status == "correct", f"{style}: {judged.text}"


def flash_backward(weights):
    """An answer to 6.5 whose weights of a tile are weights(logits, lse of its queries), without a table made anew."""

    def answer(q, k, v, out, lse, dout, scale, block_q, block_k):
        delta = (out * dout).sum(axis=1)
        gradients = dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for i in range(0, len(q), block_q):
            for j in range(0, len(k), block_k):
                rows, cols = slice(i, i + block_q), slice(j, j + block_k)
                p = weights(scale * q[rows] @ k[cols].T, lse[rows])
                ds = scale * p * (dout[rows] @ v[cols].T - delta[rows, None])
                dv[cols] += p.T @ dout[rows]
                dk[cols] += ds.T @ q[rows]
                dq[rows] += ds @ k[cols]
        return gradients

    return answer


WEIGHTS = {
    "a new table": lambda s, lse: np.exp(s - lse[:, None]),
    "transposed": lambda s, lse: np.exp(s.T - lse).T,
    "in place": lambda s, lse: np.exp(np.subtract(s, lse[:, None], out=s), out=s),
    "row by row": lambda s, lse: np.array([np.exp(row - one) for row, one in zip(s, lse, strict=True)]),
}


@pytest.mark.parametrize("style", WEIGHTS)
def test_tiles_are_known_in_any_style(style):
    answer = flash_backward(WEIGHTS[style])
    assert verdict(exercise("6.5"), answer).status == "correct"
    for sizes in ((32, 32), (64, 64), (4, 96)):
        if style == "a new table" or sizes[0] != 64:  # what is written in place leaves no trace of the keys
            judged = verdict(exercise("6.5"), lambda *a, sizes=sizes: answer(*a[:-2], *sizes))
            assert judged.mistake and "other sizes" in judged.mistake, (sizes, judged.text)


def backward_in_parts(keys_at_once):
    """An answer to 6.5, a query at a time, with so many keys: keys_at_once(S, block_k)."""

    def answer(q, k, v, out, lse, dout, scale, block_q, block_k):
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        size = keys_at_once(len(k), block_k)
        for i in range(len(q)):
            delta = out[i] @ dout[i]
            for cols in (slice(start, start + size) for start in range(0, len(k), size)):
                p = np.exp(scale * k[cols] @ q[i] - lse[i])
                ds = scale * p * (v[cols] @ dout[i] - delta)
                dq[i] += ds @ k[cols]
                dk[cols] += np.outer(ds, q[i])
                dv[cols] += np.outer(p, dout[i])
        return dq, dk, dv

    return answer


def test_one_query_and_all_keys_are_no_tile():
    judged = verdict(exercise("6.5"), backward_in_parts(lambda S, block_k: S))
    assert judged.mistake and "whole rows" in judged.mistake, judged.text


def backward_in_pairs(q, k, v, out, lse, dout, scale, block_q, block_k):
    """The slowest right way: a query and a key at a time."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(len(q)):
        delta = out[i] @ dout[i]
        for j in range(len(k)):
            p = np.exp(scale * q[i] @ k[j] - lse[i])
            ds = scale * p * (dout[i] @ v[j] - delta)
            dq[i] += ds * k[j]
            dk[j] += ds * q[i]
            dv[j] += p * dout[i]
    return dq, dk, dv


@pytest.mark.parametrize("answer", [backward_in_pairs, backward_in_parts(lambda S, block_k: block_k)])
def test_loops_over_single_rows_are_in_time(answer, monkeypatch):
    monkeypatch.setattr(running, "SECONDS", 8)  # of 10 that learners have
    assert verdict(exercise("6.5"), answer).status == "correct"


def test_a_slow_answer_is_called_slow(monkeypatch):
    monkeypatch.setattr(running, "SECONDS", 0.1)
    judged = verdict(exercise("6.5"), backward_in_pairs)
    assert "many small steps are slow" in judged.text


@pytest.mark.parametrize("sizes", [(128, 64), (4, 4), (3, 4)])
def test_tiles_of_sizes_of_their_own_are_refused(sizes):
    solution = exercise("3.1").solution
    judged = verdict(exercise("3.1"), lambda *a: solution(*a[:4], *sizes))
    assert judged.status == "wrong" and "what was built" in judged.text


def by_lse_in_base_two(s):
    s = s * np.float32(np.log2(np.e))
    m = s.max(axis=1, keepdims=True)
    return jnp.exp2(s - (m + jnp.log2(jnp.exp2(s - m).sum(axis=1, keepdims=True))))


def test_a_softmax_may_round_its_logits():
    """As the kernels of the series do. The task states the tolerance."""

    def kernel(s_ref, out_ref, *, T, S):
        out_ref[...] = by_lse_in_base_two(jnp.where(jnp.arange(s_ref.shape[1]) < S, s_ref[...], -jnp.inf))

    assert verdict(exercise("4.2"), kernel).status == "correct"


def test_a_loop_over_python_numbers_is_right_too():
    def kernel(p_ref, v_ref, out_ref, *, S, block_k):
        acc = jnp.zeros(out_ref.shape, jnp.float32)
        for start in range(0, S, block_k):
            tile, inside = pl.ds(start, block_k), start + jnp.arange(block_k) < S
            p, v = jnp.where(inside, p_ref[:, tile], 0), jnp.where(inside[:, None], v_ref[tile, :], 0)
            acc += lax.dot(p, v, preferred_element_type=jnp.float32)
        out_ref[...] = acc

    assert verdict(exercise("4.3"), kernel).status == "correct"


LOOKS_FOR_NAN = {
    "4.2": [("jnp.where(inside, s_ref[...], -jnp.inf)", "jnp.nan_to_num(s_ref[...], nan=-jnp.inf)")],
    "4.3": [
        ("jnp.where(inside[None, :], p_ref[:, tile], 0)", "jnp.nan_to_num(p_ref[:, tile])"),
        ("jnp.where(inside[:, None], v_ref[tile, :], 0)", "jnp.nan_to_num(v_ref[tile, :])"),
    ],
    "5.5": [
        ("jnp.where(in_head, q_ref[...], 0)", "jnp.nan_to_num(q_ref[...])"),
        ("jnp.where(inside, k_ref[tile, :], 0)", "jnp.nan_to_num(k_ref[tile, :])"),
    ],
}


@pytest.mark.parametrize("number", LOOKS_FOR_NAN)
def test_what_lies_past_the_end_is_not_known_by_being_nan(number):
    judged = verdict(exercise(number), edited(exercise(number).solution, *LOOKS_FOR_NAN[number]))
    assert judged.status == "wrong" and "mask by position" in judged.text, judged.text


# Right results by a forbidden way


def test_what_is_asked_for_is_not_taken_from_the_helpers():
    def answer(T, S, H, itemsize):
        return {"flops": 4 * T * S * H, "bytes": cost.naive_bytes(T, S, H, itemsize)}

    judged = verdict(exercise("1.2"), answer)
    assert judged.status == "wrong" and "`naive_bytes` of helpers.instruments.cost was called" in judged.text


def test_attention_that_is_called_and_not_used_is_noticed():
    def layer(x, w_qkv, w_merge, N, attention):
        heads = [part.reshape(*x.shape[:2], N, -1) for part in jnp.split(x @ w_qkv, 3, axis=-1)]
        attention(*heads, is_causal=True)
        return jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ w_merge

    judged = verdict(exercise("8.1"), layer)
    assert judged.mistake and "its result is not used" in judged.mistake


# What a verdict says
