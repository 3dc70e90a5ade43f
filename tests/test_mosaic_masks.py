"""Any mask, any score in the kernels by `plgpu.mma`: interpreted, against the oracle; lowered for Ampere and Hopper."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import by_kernels, in_tiers, relative_error
from jax import lax
from jax.experimental.mosaic.gpu import utils
from test_masks import ALL, compare, drawn, everything, right
from test_mosaic import INTERPRETED, kernels

from helpers import flash_attention
from helpers.attention.mosaic import backward, forward, words
from helpers.attention.problem import check_call

SMALL = {"B": 1, "N": 2, "K": 1}
CASES = [
    (ALL, "float32", {"B": 1}),
    (("mask", "sinks", "offset"), "bfloat16", {"B": 2, "N": 2, "K": 2}),
    (("segments", "soft cap", "window"), "float16", SMALL),
    (("mask_mod", "lengths"), "bfloat16", {"B": 2, "N": 4, "K": 2}),
    (("score_mod", "bias", "sinks"), "float32", SMALL),
    (("mask", "mask_mod", "segments"), "float32", {"B": 2, "N": 4, "K": 2}),
    (("sinks", "lengths"), "float16", {"B": 2}),
]


@pytest.mark.parametrize(("only", "dtype", "sizes"), in_tiers(CASES, lambda only, *_: only == ALL))
def test_combinations(only, dtype, sizes):
    """Alone and together, with heads that differ and heads that do not."""
    arrays, arguments = drawn(CASES.index((only, dtype, sizes)), 70, 100, dtype=jnp.dtype(dtype), only=only, **sizes)
    mine = jax.tree.leaves(kernels(arguments, INTERPRETED)(arrays[:3], arrays[3:]))
    compare(mine, right(arrays, arguments)[:5], 2e-5 if dtype == "float32" else 4 * float(jnp.finfo(dtype).eps))


@pytest.mark.full
def test_a_function_of_padding_is_nobodys():
    """One that divides by zero one position past either end, where tiles go on and a table has zeros."""
    arrays, _ = drawn(8, 70, 90, only=(), **SMALL)
    table = np.linspace(1, 2, 90).astype(np.float32)
    score_mod = lambda s, b, n, i, j, table: s / table + jnp.sqrt(s * s / (70.0 - i))
    arguments = {"score_mod": score_mod, "score_arrays": ((table, "j"),)}
    mine = jax.tree.leaves(kernels(arguments, INTERPRETED)(arrays[:3], arrays[3:]))
    naive = everything(arrays, arguments, implementation="reference")
    for one, other in zip(mine, naive, strict=False):
        assert relative_error(one, other) < 1e-4


# Functions in words of Mosaic GPU

X = np.concatenate([np.linspace(-30, 30, 4001), np.linspace(-1, 1, 2001), [0, 1e-8, -1e-20]]).astype(np.float32)
POSITIVE = np.abs(X) - np.float32(0.9)
SAID = {
    "tanh": (jnp.tanh, np.tanh, X),
    "log1p": (jnp.log1p, np.log1p, POSITIVE),
    "expm1": (jnp.expm1, np.expm1, X),
    "square root of a power": (lambda x: jnp.abs(x) ** 1.5, lambda x: np.abs(x) ** 1.5, X),
    "odd power": (lambda x: jnp.power(x, jnp.float32(3)), lambda x: x**3, X),
    "softplus": (jax.nn.softplus, lambda x: np.logaddexp(x, 0), X),
}


@pytest.mark.parametrize("name", SAID)
def test_rules(name):
    function, exact, x = SAID[name]
    mine, answer = jax.jit(words.in_words(function, is_exact=True))(x), exact(np.float64(x))
    np.testing.assert_allclose(mine, answer, rtol=5e-6, atol=1e-30)


def test_rules_of_absolute_error():
    """A cap of 50 to 2e-5; angles; and no infinity or NaN at the ends."""
    ends = np.float32([-np.inf, -200, 200, np.inf])
    for is_exact in (False, True):
        capped = jax.jit(words.in_words(jnp.tanh, is_exact))
        np.testing.assert_allclose(capped(X), np.tanh(np.float64(X)), atol=2e-7 if is_exact else 4.3e-7)
        np.testing.assert_array_equal(capped(ends), np.sign(ends))
        flat = X[np.abs(X) > 3]  # what is left to 1 is the slope
        np.testing.assert_allclose(capped(flat), np.tanh(np.float64(flat)), atol=1.3e-7)
    for function in (jnp.sin, jnp.cos):
        np.testing.assert_allclose(words.in_words(function)(100 * X), function(np.float64(100 * X)), atol=3e-5)
    i = np.arange(-9, 9)
    said = words.in_words(
        lambda i: (~(i % 3 == 0), (i % 4).astype(bool), (i > 2).astype(jnp.float32), jnp.isfinite(1 / i))
    )
    jax.tree.map(np.testing.assert_array_equal, tuple(said(i)), (i % 3 != 0, i % 4 != 0, i > 2, i != 0))


def many_masks(b, n, i, j):
    integers = ((i // 3 + j % 5) % 2 == n // 2) | (jnp.minimum(i, j) + jnp.maximum(i, 3) > jnp.abs(i - j))
    booleans = ~((i > j) & (j % 7 == 0)) ^ (b == 1) | jnp.logical_not(j == 2) & ((i >> 4) >= (j >> 4))
    casts = (i % 4).astype(bool) & ((i.astype(jnp.float32) * 0.5).astype(jnp.int32) > j) & jnp.ones_like(i, bool)
    return integers & booleans | casts & jnp.where(i > 9, j < 30, j >= n) | (jnp.floor(i / 7) == jnp.ceil(j / 7))


def many_scores(s, b, n, i, j, slopes, ints, halves):
    smooth = jnp.exp(-jnp.abs(s)) + jax.nn.softplus(s) + jax.nn.sigmoid(s) * jnp.log1p(jnp.abs(s)) - jnp.expm1(-s * s)
    kinks = jax.nn.relu(s) ** 3 + jnp.clip(s, -5, 5) * jnp.sign(s) + jnp.round(s) + (s * s + 1) ** -2
    waves = jnp.sin(s) + jnp.cos(s) + jnp.tanh(s / 30) + jnp.sqrt(jnp.abs(s) + 1) + jnp.where(i == j, 1.0, 0.0)
    arrays = slopes * jnp.abs(i - j) + 2.0 ** (-8.0 * (n + 1) / 4) * ints + halves * (jnp.isfinite(s) & (i > 2))
    return smooth + kinks + waves - arrays + jax.lax.stop_gradient(s)


@pytest.mark.full
def test_lowering_for_cuda():
    """Functions of many words, with arrays of every kind of tile, by cp.async; `test_mosaic` has TMA."""
    arrays, arguments = drawn(10, 70, 100, only=ALL, dtype=jnp.bfloat16)
    tables = (
        (np.ones((2, 70), np.float32), "bi"),
        (np.ones((4, 100), np.int32), "nj"),
        (np.ones((70, 100), jnp.bfloat16), "ij"),
    )
    arguments |= {"mask_mod": many_masks, "score_mod": many_scores, "score_arrays": tables}
    assert words.why_not(check_call(*arrays[:3], **arguments)) is None

    attend = by_kernels(arguments, functools.partial(forward.forward, keeps_low_bits=True), backward.backward)
    with mock.patch.object(utils, "_infer_arch", lambda: (8, 0)):
        text = attend.trace(arrays[:3], arrays[3:]).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 3


@pytest.mark.parametrize(
    "functions",
    [
        {"score_mod": lambda s, b, n, i, j: 20 * jnp.tanh(s / 20)},
        {"score_mod": lambda s, b, n, i, j: (i * j, s + 0.1 * i)[1]},
        {"mask_mod": lambda b, n, i, j: i % 3 > 0},
        {
            "mask_mod": lambda b, n, i, j: jnp.where(n > 1, 0 * i <= j, j > 5),
            "score_mod": lambda s, b, n, i, j: s * jnp.where(n > 1, 2.0, 3.0),
        },
    ],
    ids=["no position", "queries alone", "a mask of queries", "queries times 0, by head"],
)
def test_functions_that_do_not_need_all_positions_lower(functions):
    """A position that nobody reads has no layout, and Mosaic GPU looks for one for minutes. It selects tiles by tiles."""
    arrays, _ = drawn(10, 70, 100, only=(), dtype=jnp.bfloat16)
    attend = by_kernels(functions, forward.forward, backward.backward)
    assert attend.trace(arrays[:3], arrays[3:]).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("cumsum, which mask_mod", {"mask_mod": lambda b, n, i, j: jnp.cumsum(i, axis=1) > j}),
        ("erf.*, which score_mod", {"score_mod": lambda s, b, n, i, j: s * jax.scipy.special.erf(s)}),
        ("scan, which mask_mod", {"mask_mod": lambda b, n, i, j: lax.fori_loop(0, 3, lambda _, i: i + 1, i) > j}),
        (
            "reduce_or and while, which score_mod",
            {"score_mod": lambda s, *_: lax.while_loop(lambda s: (s > 9).any(), jnp.sin, s)},
        ),
    ],
)
def test_words_that_are_lacking_are_named(words, arguments):
    arrays, _ = drawn(0, 20, 24, only=())
    with pytest.raises(NotImplementedError, match=f"no word for {words} uses; use implementation="):
        flash_attention(*arrays[:3], implementation="mosaic", **arguments)
