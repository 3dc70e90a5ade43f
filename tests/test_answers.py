"""Answers that nobody wrote: solutions with a slip, which a check must reject, and right answers in other styles."""

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import lessons
import numpy as np
import pytest
from attention_cases import in_tiers

from helpers import paging
from helpers.attention import online_softmax, tiled
from helpers.attention.masking import Band, key_tiles, tile_kind
from helpers.attention.public import ring
from helpers.exercises import running, whole
from helpers.exercises.again import BY_HAND
from helpers.exercises.checking import verdict
from helpers.exercises.edits import edited, source_of, written
from helpers.exercises.exercise import exercise
from helpers.exercises.slips import slips
from helpers.instruments import cost

NUMBERS = [lesson.number for lesson in lessons.ALL]
WHOLE_KERNELS = {number for number in NUMBERS if exercise(number).building_block}  # minutes for all their slips
KERNELS = {"4.1", "4.2", "4.3", "5.2", "5.3", "7.1", "7.2", "7.3", "8.1", "10.1"} | WHOLE_KERNELS  # seconds each
EVERY, EVERY_OF_KERNELS = 40, 5  # of how many slips the quick tests try one, and of kernels all tests

# Slips that change nothing, and why.
EQUAL = tomllib.loads(Path(__file__).with_name("equal_slips.toml").read_text())


def survivors(number, every=1):
    """(how many slips were tried, those that the check takes for right)."""
    found = exercise(number)
    tried = list(slips(source_of(found.solution)))[::every]
    passes = lambda source: verdict(found, written(found.solution, source)).status == "correct"
    return len(tried), [change for change, _, source in tried if passes(source)]


SLIPS = [(number, EVERY) for number in NUMBERS if number not in KERNELS]
SLIPS += [(number, EVERY_OF_KERNELS if number in KERNELS else 1) for number in NUMBERS if number not in WHOLE_KERNELS]


@pytest.mark.parametrize(("number", "every"), in_tiers(SLIPS, lambda _, every: every == EVERY))
def test_slips_are_rejected_but_those_that_are_equal(number, every, monkeypatch):
    # A loop that never ends need not be waited for.
    monkeypatch.setattr(running, "SECONDS", {EVERY: 0.3, EVERY_OF_KERNELS: 10, 1: 0.5}[every])
    tried, alive = survivors(number, every)
    equal = set(EQUAL.get(number, ()))
    assert tried and (set(alive) == equal if every == 1 else set(alive) <= equal)


# Right answers in other styles


def converted(value, convert):
    """Arguments or results with every array and string replaced."""
    return jax.tree.map(lambda leaf: convert(leaf) if isinstance(leaf, np.ndarray | str) else leaf, value)


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


P = "np.exp(scale * q[rows] @ k[cols].T - lse[rows, None])"  # as the solution of 6.5 has it
WEIGHTS = {
    "a new table": P,
    "transposed": "np.exp((scale * q[rows] @ k[cols].T).T - lse[rows]).T",
    "in place": "np.exp(np.subtract(s := scale * q[rows] @ k[cols].T, lse[rows, None], out=s), out=s)",
}


@pytest.mark.parametrize("style", WEIGHTS)
def test_tiles_are_known_in_any_style(style):
    answer = edited(exercise("6.5").solution, (P, WEIGHTS[style]))
    assert verdict(exercise("6.5"), answer).status == "correct"
    for sizes in ((32, 32), (64, 64), (4, 96)):
        if style == "a new table" or sizes[0] != 64:  # what is written in place leaves no trace of the keys
            judged = verdict(exercise("6.5"), lambda *a, sizes=sizes: answer(*a[:-2], *sizes))
            assert judged.mistake and "other sizes" in judged.mistake, (sizes, judged.text)


def test_one_query_and_all_keys_are_no_tile():
    def answer(q, k, v, out, lse, dout, scale, block_q, block_k):
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for i in range(len(q)):
            p = np.exp(scale * k @ q[i] - lse[i])
            ds = scale * p * (v @ dout[i] - out[i] @ dout[i])
            dq[i] = ds @ k
            dk += np.outer(ds, q[i])
            dv += np.outer(p, dout[i])
        return dq, dk, dv

    judged = verdict(exercise("6.5"), answer)
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


def test_loops_over_single_rows_are_in_time():
    assert verdict(exercise("6.5"), backward_in_pairs).status == "correct"


def test_a_slow_answer_is_called_slow(monkeypatch):
    monkeypatch.setattr(running, "SECONDS", 0.1)
    judged = verdict(exercise("6.5"), backward_in_pairs)
    assert "many small steps are slow" in judged.text


def test_a_softmax_may_round_its_logits():
    """By its lse in base two, as the kernels of the series do. The task states the tolerance."""

    def kernel(s_ref, out_ref, *, T, S):
        s = jnp.where(jnp.arange(s_ref.shape[1]) < S, s_ref[...], -jnp.inf) * np.float32(np.log2(np.e))
        m = s.max(axis=1, keepdims=True)
        out_ref[...] = jnp.exp2(s - (m + jnp.log2(jnp.exp2(s - m).sum(axis=1, keepdims=True))))

    assert verdict(exercise("4.2"), kernel).status == "correct"


@pytest.mark.full
@pytest.mark.parametrize("number", ["13.7", "18.8"])
def test_the_softmax_of_a_kernel_may_be_written_by_hand(number):
    assert verdict(exercise(number), edited(exercise(number).solution, *BY_HAND)).status == "correct"


# Right results by a forbidden way


@pytest.mark.parametrize("number", in_tiers(["5.5", "7.7", "7.8", "13.7"], lambda number: number == "7.8"))
def test_a_copy_around_a_kernel_is_noticed(number):
    solution = exercise(number).solution

    def through_heads_first(*arguments):
        copy = lambda array: array.swapaxes(1, 2).copy().swapaxes(1, 2) if getattr(array, "ndim", 0) == 4 else array
        return solution(*map(copy, arguments))

    assert "a copy of an array around the kernel" in verdict(exercise(number), through_heads_first).text


TILES_OF = "np.take({0}, range({1}_start, min({1}_start + block_{1}, len({0}))), axis=0)".format
EDITED = [
    ("3.1", "what was built", [("    out, lse =", "    block_q, block_k = 128, 64\n    out, lse =")]),
    ("3.1", "what was built", [("    out, lse =", "    block_q, block_k = 3, 4\n    out, lse =")]),
    ("3.1", "float32 numbers", [("np.empty(q.shape)", "np.empty(q.shape, np.float32)")]),
    ("3.1", "one key at a time", [("len(k), block_k", "len(k)"), ("k_start + block_k", "k_start + 1")]),
    ("3.1", "for one tile of keys after the other", [("for q_start in range(0, len(q), block_q):\n", "states = {}\n    for j, i in np.ndindex(-(-len(k) // block_k), -(-len(q) // block_q)):\n        k_start, q_start = j * block_k, i * block_q\n"), ("for k_start in range(0, len(k), block_k):", "for _ in range(1):"), ("m = m_new\n", "m = m_new; states[i] = m, l, acc\n"), ("np.full(size, -np.inf), np.zeros(size), np.zeros((size, q.shape[1]))", "states.get(i) or (np.full(size, -np.inf), np.zeros(size), np.zeros((size, q.shape[1])))")]),
    ("3.1", "correct on", [("q[rows] @", TILES_OF("q", "q") + " @"), ("k[cols]", TILES_OF("k", "k")), ("v[cols]", TILES_OF("v", "k"))]),  # right in other styles: copies of rows, key by key, cut before the loops
    ("3.1", "correct on", [("(q[rows] @ k[cols].T)", "np.array([q[rows] @ k[j] for j in range(len(k))[cols]]).T"), ("p @ v[cols]", "sum(np.outer(p[:, j], v[k_start + j]) for j in range(p.shape[1]))")]),
    ("3.1", "correct on", [("    out, lse =", "    q_, k_, v_ = (np.split(a, range(n, len(a), n)) for a, n in ((q, block_q), (k, block_k), (v, block_k)))\n    out, lse ="), ("q[rows]", "q_[q_start // block_q]"), ("k[cols]", "k_[k_start // block_k]"), ("v[cols]", "v_[k_start // block_k]")]),
    ("3.2", "a mask of the tile was built", [("last_query = min(q_stop, T) - 1\n", "rows, cols = np.arange(q_start, q_stop)[:, None], np.arange(k_start, k_stop)\n    seen = (cols <= rows) & (rows < T) & (cols < S)\n    return 'full' if seen.all() else 'partial' if seen.any() else 'skipped'\n")]),
    ("8.1", "its result is not used", [("out = attention(", "attention(query, key, value)\n    out = jax.nn.dot_product_attention(")]),
    ("4.2", "mask by position", [("jnp.where(inside, s_ref[...], -jnp.inf)", "jnp.nan_to_num(s_ref[...], nan=-jnp.inf)")]),
    ("4.3", "mask by position", [
        ("jnp.where(inside[None, :], p_ref[:, tile], 0)", "jnp.nan_to_num(p_ref[:, tile])"),
        ("jnp.where(inside[:, None], v_ref[tile, :], 0)", "jnp.nan_to_num(v_ref[tile, :])"),
    ]),
    ("6.2", "a table of 400", [("(out * dout).sum(axis=1)", "np.einsum('ih,jh->ij', out, dout).diagonal()")]),
    ("6.5", "more than a tile", [("    delta =", "    q, k, v, lse = map(np.asarray, (q, k, v, lse))\n    block_k = len(k)\n    delta =")]),
    ("13.6", "the caller's own", [("table, counts, copied = list(table), list(counts), -1", "copied = -1\n    if length % page and counts[table[-1]] == 1:\n        return {'table': table, 'counts': counts, 'copied': -1}\n    table, counts = list(table), list(counts)")]),
    ("7.3", "all they need a residual", [("    @jax.custom_vjp", "    kept = {}\n\n    @jax.custom_vjp"), ("        return out, (q, k, v, out, lse)", "        kept[0] = lse\n        return out, (q, k, v, out)"), ("(*residuals, dout)", "(*residuals, kept[0], dout)")]),
    ("8.1", "it is called once", [("attention(query, key, value, is_causal=True)", "jax.vmap(lambda *qkv: attention(*qkv, is_causal=True))(query, key, value)")]),
    ("13.7", "too narrow for a GPU", [("max(16, pl.next_power_of_2(H))", "pl.next_power_of_2(H)")]),
    ("14.2", "wrong for", [("    results = []", "    for q, k, v in zip(queries, keys, values): attend(q, k, v)\n    return [_attend(q, np.concatenate(keys), np.concatenate(values))[0] for q in queries]\n    results = []")]),
    ("14.2", "hardly called", [("    results = []", "    return [_attend(q, np.concatenate(keys), np.concatenate(values))[0] for q in queries]\n    results = []")]),
    # Masked too late, where an exponential is out of range.
    ("5.5", "NaN", [("m_new = jnp.maximum(m, s.max(axis=1))", "m_new = jnp.maximum(m, (dot(q, k.T) / math.sqrt(H)).max(axis=1))")]),
    ("7.7", "NaN", [("jnp.where(cols <= rows[:, None], p, 0)", "p * (cols <= rows[:, None])")]),
    ("7.8", "NaN", [("else cols < S\n", "else cols >= 0\n")]),
    ("5.5", "sums of 16 bits", [("dot(p.astype(v.dtype), v)", "p.astype(v.dtype) @ v")]),
    ("5.5", "operands of two dtypes", [("dot(p.astype(v.dtype), v)", "dot(p, v)")]),
    ("5.5", "operands that are wider", [("dot(p.astype(v.dtype), v)", "dot(p, v.astype(jnp.float32))")]),
    ("7.8", "too narrow for a GPU", [("max(16, pl.next_power_of_2(H))", "pl.next_power_of_2(H)")]),
    ("18.6", "far from 0", [("np.logaddexp(lse, sinks)", "sinks + np.log1p(np.exp(lse - sinks))")]),
    ("18.7", "cannot have it inside", [("16 * 2**n", "jnp.array([16, 32, 64, 128])[n]")]),
    ("18.8", "more bytes read", [("(seen, 1, 0)", "(mask_mod(b, n, rows[:, None], cols[None, :]), 1, 0)")]),
    ("7.7", "sums of 16 bits", [("scale * dot(q, k.T)", "scale * (q @ k.T)")]),
    ("13.7", "sums of 16 bits", [("dot(p.astype(v.dtype), v)", "p.astype(v.dtype) @ v")]),
    ("13.7", "no run of tiles", [
        ("first = pl.program_id(1) * part", "first, tiles = pl.program_id(1), pl.cdiv(length, block_k)"),
        ("jnp.minimum(first + part, pl.cdiv(length, block_k))", "first + pl.cdiv(tiles - first, parts)"),
        ("m, l, acc = state\n", "m, l, acc = state; j = first + parts * (j - first)\n"),
    ]),
    ("13.7", "more of a part than its out and its lse", [
        ("out_ref, lse_ref):", "out_ref, lse_ref, l_ref):"),
        ("out_ref[...], lse_ref[...] = online", "l_ref[...] = state[1]; out_ref[...], lse_ref[...] = online"),
        ("[out_tile, lse_tile]", "[out_tile, lse_tile, lse_tile]"),
        ("kernel, [outs, lses]", "kernel, [outs, lses, lses]"),
        ("outs, lses = run", "outs, lses, _ = run"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "said", "edits"),
    in_tiers(EDITED, lambda number, *_: number in ("3.1", "3.2", "4.2", "4.3", "6.2", "8.1", "14.2")),
)
def test_what_is_not_as_asked_for_is_named(number, said, edits):
    judged = verdict(exercise(number), edited(exercise(number).solution, *edits))
    assert said in judged.text, judged.text


def test_right_numbers_of_another_dtype_are_no_slip():
    judged = verdict(
        exercise("14.3"), edited(exercise("14.3").solution, ("return table", "return table.astype(float)"))
    )
    assert judged.status == "wrong" and judged.mistake is None, judged.text


def test_the_lse_of_a_query_without_keys_is_compared():
    (lse,) = whole.as_float64([np.zeros(2)], [np.array([-np.inf, 0])], {"lse": np.float32})
    assert np.array_equal(lse, [0, 0])


CAUSAL = Band(right=0)
TAKEN = {
    "2.2": ("merge", lambda a, b: online_softmax.merge(*(online_softmax.State(*state) for state in (a, b)))),
    "5.1": ("key_tiles", lambda i, T, S, q, k, left: key_tiles(i * q, (i + 1) * q, k, Band(left, 0), T, S)),
    "5.4": ("query_outer_bytes", lambda T, H, *rest: cost.query_outer_bytes(T, T, H, *rest, CAUSAL)),
    "7.1": ("jax.grad", lambda q, k, v, do, *_: jax.grad(lambda k, v: (do * (q @ k.T @ v)).sum(), (0, 1))(k, v)),
    "6.5": ("jax.grad", lambda q, k, v, out, lse, do, *_: jax.vjp(lambda *a: a[0] @ a[1].T @ a[2], q, k, v)[1](do)),
    "13.6": ("__init__", lambda *_: paging.PagePool(8, 4)),
    "14.4": ("positions", lambda *of_device: ring.positions("zigzag", *of_device)),
    "1.2": ("naive_bytes", lambda T, S, H, size: {"flops": 4 * T * S * H, "bytes": cost.naive_bytes(T, S, H, size)}),
    "3.1": (
        "init",
        lambda q, k, v, scale, *blocks: tiled.query_outer(
            tiled.SlowMemory(q=q, k=k, v=v), scale=scale, block_q=blocks[0], block_k=blocks[1]
        ),
    ),
    "3.2": (
        "tile_kind",
        lambda i, i_stop, j, j_stop, *T_S: tile_kind(range(i, i_stop), range(j, j_stop), CAUSAL, *T_S),
    ),
}


@pytest.mark.parametrize("number", TAKEN)
def test_what_is_asked_for_is_not_taken_from_the_helpers(number):
    name, answer = TAKEN[number]
    judged = verdict(exercise(number), answer)
    assert judged.status == "wrong" and f"`{name}`" in judged.text
