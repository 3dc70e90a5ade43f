"""The exercises of notebook 07."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from helpers.exercises import oracles, tile_bounds
from helpers.exercises.comparing import got
from helpers.exercises.exercise import Case, Complaint, Exercise, shaped
from helpers.exercises.notebook_03 import tiled_attention
from helpers.exercises.notebook_06 import flash_backward
from helpers.exercises.watched import by_formulas
from helpers.exercises.whole_backward import FLASH_ATTENTION, KEY_GRADIENTS, OF_A_PAIR, QUERY_GRADIENTS


def one_query_tile(q, k, v, do, lse, delta, scale, dk, dv):
    """The sums after one tile of queries. Returns (dk, dv).

    q, do: (block_q, H); k, v, dk, dv: (block_k, H); lse, delta: (block_q,).
    """
    s = scale * (q @ k.T)
    p = jnp.exp(s - lse[:, None])
    dp = do @ v.T
    ds = p * (dp - delta[:, None])
    return dk + scale * (ds.T @ q), dv + p.T @ do


def _body_cases(seed):
    by_hand = ([[1.0]], np.log([[1.0], [3.0]]), [[2.0], [6.0]], [[2.0]])
    yield Case("the case worked by hand, a key in each tile", (*map(np.float32, by_hand), 1.0, 1, 1))
    random = np.random.default_rng(seed)
    for T, S, H, block_q, block_k, scale, size, push in [
        (8, 12, 3, 4, 4, 0.5, 1, 0), (12, 8, 3, 4, 4, 2, 1, 120), (8, 12, 3, 4, 4, 1.5, 2, -120),
        (12, 10, 3, 4, 5, -0.75, 2, 0),
    ]:  # fmt: skip
        q, k, v, do = (random.standard_normal((length, H)) for length in (T, S, S, T))
        q, k, do = oracles.even(size * q), oracles.even(k), do + 0.5  # so that float32 holds the logits
        # The first component of q is constant, so that of k moves all logits, the first keys most. It is shared out
        # between the two, since a large one in k would make dq a small difference of large numbers.
        q[:, 0] = 16 if push else 1
        if push:
            k[:, 0] = np.round(push / scale + 2 * np.sign(push) * np.linspace(1, 0, S)) / 16
        about = f"all logits near {push}" if push else "logits around 0"
        label = f"T={T}, S={S}, H={H}, block_q={block_q}, block_k={block_k}, scale={scale}, {about}"
        yield Case(label, (*map(np.float32, (q, k, v, do)), scale, block_q, block_k))


def _run_body(names, answer, q, k, v, do, scale, block_q, block_k):
    """Gradients of these names, ("dk", "dv") or ("dq",): for each tile of keys, or queries, a sum over the others."""
    out, lse = oracles.attention(q, k, v, scale=scale)
    arrays = [jnp.asarray(array, jnp.float32) for array in (q, k, v, do, lse, (out * do).sum(axis=1))]
    of_keys, tiles = "dk" in names, (len(q) // block_q, len(k) // block_k)

    def summed(q, k, v, do, lse, delta, own):
        sums = (jnp.zeros((block_k if of_keys else block_q, q.shape[1])),) * len(names)
        for other in range(tiles[not of_keys]):
            i, j = (other, own) if of_keys else (own, other)
            rows, cols = slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k)
            tile = q[rows], k[cols], v[cols], do[rows], lse[rows], delta[rows]
            found = by_formulas(answer, *tile, scale, *sums)
            found = shaped(found, dict.fromkeys(names, sums[0].shape))
            sums = tuple(jnp.asarray(each).astype(jnp.float32) for each in found)
        return sums

    with jax.default_matmul_precision("highest"):
        jax.eval_shape(functools.partial(summed, own=0), *arrays)  # traced, as it is within a kernel
        results = [summed(*arrays, own) for own in range(tiles[of_keys])]
    results = tuple(map(np.concatenate, zip(*results, strict=True)))
    return results if of_keys else results[0]


DKV = Exercise(
    one_query_tile, "The body of the dk and dv kernel", outputs=("dk", "dv"),
    cases=functools.partial(_body_cases, 71), run=functools.partial(_run_body, ("dk", "dv")),
    tolerance=2e-4,  # float32, and base two, round logits of 120
).with_mistakes(
    KEY_GRADIENTS.mistakes[0],
    ("neither p nor ds is transposed", ".T @ ", " @ ",
     "dk and dv have a row for each key. Only square tiles let this run: see section 1."),
    *OF_A_PAIR,
)  # fmt: skip


def one_key_tile(q, k, v, do, lse, delta, scale, dq):
    """The sum after one tile of keys. Returns dq.

    q, do, dq: (block_q, H); k, v: (block_k, H); lse, delta: (block_q,).
    """
    s = scale * (q @ k.T)
    p = jnp.exp(s - lse[:, None])
    dp = do @ v.T
    ds = p * (dp - delta[:, None])
    return dq + scale * (ds @ k)


DQ = Exercise(
    one_key_tile, "The body of the dq kernel", outputs=("dq",),
    cases=functools.partial(_body_cases, 72), run=functools.partial(_run_body, ("dq",)),
    tolerance=2e-4,  # float32, and base two, round logits of 120
).with_mistakes(
    ("ds is transposed", "ds @", "ds.T @",
     "dq sums over the keys and has a row for each query. Only square tiles let this run: see section 1."),
    *OF_A_PAIR,
)  # fmt: skip


def differentiable(forward, backward):
    """A differentiable attend(q, k, v) that returns out, made of two launches."""

    @jax.custom_vjp
    def attend(q, k, v):
        out, _ = forward(q, k, v)
        return out

    def forward_rule(q, k, v):
        out, lse = forward(q, k, v)
        return out, (q, k, v, out, lse)

    def backward_rule(residuals, dout):
        return backward(*residuals, dout)

    attend.defvjp(forward_rule, backward_rule)
    return attend


def _wiring_cases():
    # T = S throughout: were q and k of different shapes, JAX would refuse gradients in the wrong
    # order before this checker could name them.
    yield Case("the case worked by hand", tuple(np.float32([[number]]) for number in (1, 2, 3, 5)))
    random = np.random.default_rng(73)
    for T, H, size, push in [(6, 4, 1, 0), (9, 5, 4, 0), (7, 3, 2, -40)]:
        q, k, v, weight = random.standard_normal((4, T, H))
        q[:, 0] = 1
        k[:, 0] += push
        arguments = tuple(map(np.float32, (size * q, k, v, weight + 1)))
        yield Case(f"T=S={T}, H={H}, " + ("all logits far below 0" if push else f"queries × {size}"), arguments)


def _forward_kernels(q, k, v):
    """(out, lse), in NumPy: while JAX waits for it, JAX must not be asked."""
    return tiled_attention(q, k, v, 1 / math.sqrt(q.shape[1]), len(q), len(k))


def _backward_kernels(q, k, v, out, lse, dout):
    """(dq, dk, dv), in NumPy."""
    return flash_backward(q, k, v, out, lse, dout, 1 / math.sqrt(q.shape[1]), len(q), len(k))


def _run_wiring(answer, q, k, v, weight):
    launches = []  # counted when they run: tracing a function is not running it

    def launch(kernels, shapes, *arguments):
        def run(*arrays):
            launches.append(kernels)
            results = kernels(*(np.asarray(array).astype(np.float32) for array in arrays))
            return tuple(result.astype(np.float32) for result in results)

        # The derivative of a launch is zero: a gradient must come from elsewhere.
        arguments = map(lax.stop_gradient, arguments)
        results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return jax.pure_callback(run, results, *arguments, vmap_method="sequential")

    def forward(q, k, v):
        return launch(_forward_kernels, [q.shape, q.shape[:1]], q, k, v)

    def backward(q, k, v, out, lse, dout):
        given = {name: weight.shape[: 1 if name == "lse" else 2] for name in ("q", "k", "v", "out", "lse", "dout")}
        shapes = {f"the {name} given to backward": shape for name, shape in given.items()}
        return launch(_backward_kernels, [weight.shape] * 3, *shaped((q, k, v, out, lse, dout), shapes))

    attend = answer(forward, backward)
    if not callable(attend):
        raise Complaint(f"expected a function of q, k and v, got {got(attend)}")

    def loss(q, k, v):
        out = attend(q, k, v)
        if not hasattr(out, "shape") or out.shape != q.shape:
            alone = f"the function that you return must give out alone, of shape {q.shape}"
            raise Complaint(f"{alone}, and its forward rule (out, residuals)")
        return (weight * out).sum(), out

    arrays = tuple(map(jnp.asarray, (q, k, v)))
    _, alone = loss(*arrays)
    launches.clear()
    gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    results = [np.asarray(array) for array in (alone, out, *gradients)]
    counts = launches.count(_forward_kernels), launches.count(_backward_kernels)
    _, pull_back = jax.vjp(loss, *arrays)
    jax.vjp(loss, *(2 * array for array in arrays))
    again = pull_back((jnp.float32(1), jnp.zeros_like(out)))
    if not all(map(functools.partial(np.allclose, atol=1e-3, equal_nan=True), again, gradients)):
        raise Complaint("after a call on other arrays, the gradients of this one change: is all they need a residual?")
    return *results, *counts


WIRING = Exercise(
    differentiable, "Wiring the gradient",
    outputs=("out", "out under jax.grad", "dq", "dk", "dv",
             "runs of forward for one gradient", "runs of backward for one gradient"),
    cases=_wiring_cases, run=_run_wiring, tolerance=5e-5, slow=True,
).with_mistakes(
    ("all gradients are zero: JAX knows nothing of backward, or its results are not returned",
     ("    @jax.custom_vjp\n", "    attend.defvjp(forward_rule, backward_rule)\n"), ("", ""),
     "Register both rules with defvjp, and let the backward rule return what backward gives: see section 5."),
    ("the gradients are right, but forward runs twice", (", out, lse)", "s, dout)\n"),
     (")", "s, *forward(*residuals), dout)\n"),
     "The forward rule runs it once, and keeps out and lse as residuals: see section 5."),
    ("dk and dv are returned in the wrong order",
     "return backward(*residuals, dout)", "dq, dk, dv = backward(*residuals, dout)\n        return dq, dv, dk",
     "The backward rule returns gradients in the order of the arguments, q, k, v: see section 5."),
    ("the gradient that arrives from above is ignored and ones are used instead", "s, dout)\n",
     "s, jnp.ones_like(dout))\n", "The second argument of the backward rule is dout: see section 5."),
    ("dv is right and dq and dk are wrong, because dout is passed where out belongs",
     "return backward(*residuals", "q, k, v, _, lse = residuals\n        return backward(q, k, v, dout, lse",
     "delta = rowsum(out do) needs the out of the forward pass, a residual: see section 5."),
)  # fmt: skip


def product_flops(T, S, H, block_q, block_k, fused, is_causal):
    """FLOPs of all matrix products in the backward pass of one head."""
    pairs = 0
    for i in range(T // block_q):
        for j in range(S // block_k):
            pairs += not is_causal or j * block_k <= (i + 1) * block_q - 1
    return (5 if fused else 7) * 2 * block_q * block_k * H * pairs


FLOPS = Exercise(product_flops, "Count the products", outputs=("FLOPs",)).with_cases(
    "T S H block_q block_k fused is_causal", (4, 4, 2, 2, 2, True, False), (4, 4, 2, 2, 2, False, False),
    (4, 4, 2, 2, 2, False, True), (12, 12, 5, 3, 2, False, True), (12, 12, 5, 2, 3, True, True),
    (20, 6, 4, 5, 3, False, True), (6, 28, 3, 2, 7, True, True), (64, 128, 16, 16, 32, False, True),
    (256, 128, 32, 64, 16, True, False), (128, 128, 64, 32, 16, False, True),
).with_mistakes(
    ("two kernels are charged for the products of the fused one twice", "else 7", "else 10",
     "The dq kernel computes s, dp and dq, and no dk or dv: see the table of section 6."),
    ("no pair of tiles is skipped under the causal mask", "not is_causal or j * block_k <= (i + 1) * block_q - 1",
     "1", "A pair in which no query sees a key is not visited: see the text of the exercise."),
    ("the causal mask halves the count", ("not is_causal or j * block_k <= (i + 1) * block_q - 1", "* pairs"),
     ("1", "* pairs // (2 if is_causal else 1)"),
     "Pairs on the diagonal are computed whole, and T and S may differ: see the text of the exercise."),
    ("the last key of a tile decides whether its pair is visited, or the tiles of a row are rounded down",
     "j * block_k <= (i + 1) * block_q - 1", "(j + 1) * block_k <= (i + 1) * block_q",
     "Of the keys in a tile the first one is seen by most queries, and one is enough: see hint 2."),
    ("the numbers of two tiles are compared", "j * block_k <= (i + 1) * block_q - 1", "j <= i",
     "Compare positions: tiles of queries and of keys may differ in size, see the text of the exercise."),
)  # fmt: skip


def query_tile_range(j, T, S, block_q, block_k, left=None):
    """(first, stop) of the query tiles that key tile j needs."""
    k_start, k_stop = j * block_k, min((j + 1) * block_k, S)
    if k_start >= T:
        return 0, 0
    stop_query = T if left is None else min(k_stop + left, T)
    return k_start // block_q, -(-stop_query // block_q)


BOUNDS = Exercise(
    query_tile_range, "The queries that a tile of keys needs", outputs=("(first, stop)",), run=tile_bounds.run,
    judge=tile_bounds.OVER_QUERIES.judge,
).with_cases(
    "key_tile T S block_q block_k left",
    (0, 64, 64, 16, 32, None), (1, 64, 64, 16, 32, None), (1, 64, 64, 32, 16, None), (2, 96, 96, 64, 16, None),
    (3, 50, 128, 16, 16, None), (4, 50, 128, 16, 16, None), (1, 100, 48, 16, 32, None), (1, 64, 64, 16, 32, 8),
    (0, 64, 64, 16, 16, 20), (1, 128, 128, 16, 32, 16), (1, 128, 128, 16, 32, 17), (1, 128, 128, 16, 32, 0),
    (1, 64, 40, 16, 32, 4), (2, 100, 100, 16, 32, 30), (5, 70, 200, 32, 16, 12), (4, 64, 128, 16, 16, 5),
    (4, 64, 128, 16, 16, None), (4, 65, 128, 16, 16, None), (4, 64, 128, 24, 16, None),  # T around k_start
    (2, 13, 20, 3, 5, 2), (1, 13, 20, 5, 3, 0), (0, 6, 6, 1, 2, 3), (2, 6, 6, 1, 2, None), (3, 50, 50, 7, 5, 11),
).with_mistakes(
    KEY_GRADIENTS.mistakes[1],
    ("these are the bounds of the dq kernel: the loop ends at the diagonal where it should begin",
     ("stop_query = T if left is None else min(k_stop + left, T)", "return k_start // block_q"),
     ("stop_query = min(k_stop, T)", "return 0 if left is None else max(k_start - left, 0) // block_q"),
     "A key is seen by the queries at and after its own position: see the picture of section 8."),
    ("stop is measured from the first key of the tile instead of the last (too few tiles)", "k_stop + left",
     "k_start + 1 + left", "The last key of the tile is seen from furthest away: see the text of the exercise."),
)  # fmt: skip


def out_and_low(p, v):
    """The output in the dtype of v, and what rounding took off it."""
    weights = np.float32(p.astype(v.dtype))
    exact = weights @ np.float32(v) / weights.sum(axis=1, keepdims=True)
    out = exact.astype(v.dtype)
    low = exact - np.float32(out)
    return out, low.astype(v.dtype)


def _rounding_cases():
    by_hand = [[1, 1, 1 + 2**-8]], [[1], [1], [2]]
    yield Case("the case worked by hand", (np.float32(by_hand[0]), np.asarray(by_hand[1], jnp.bfloat16)))
    random = np.random.default_rng(77)  # far from ties, which libraries could break differently
    sizes = [(4, 8, 4, 0, 1), (8, 48, 16, 10, 1), (16, 64, 8, 30, 1e4), (16, 96, 8, 4, 0.01)]  # 1e4: beyond float16
    for T, S, H, part, unit in sizes:
        s = random.standard_normal((T, S)) * 1.5
        v = unit * (random.standard_normal((S, H)) + part * random.standard_normal(H))
        shared = f"values with a part of {part} standard deviations in common" if part else "values around 0"
        p = np.exp(s - s.max(axis=1, keepdims=True))
        yield Case(f"T={T}, S={S}, H={H}, {shared}", (np.float32(p), np.asarray(v, jnp.bfloat16)))


def _rounding_expected(p, v):
    """What is asked of the numbers, and the float64 mean of the values, weighted with p as the product takes it."""
    weights = p.astype(v.dtype).astype(np.float64)
    exact = weights @ v.astype(np.float64) / weights.sum(axis=1, keepdims=True)
    return "bfloat16 and bfloat16", exact.astype(v.dtype).astype(np.float64), exact


def _run_rounding(answer, p, v):
    """Whether out and low are bfloat16 numbers, out, and out + low. A tie of out may be broken either way."""
    _, nearest, exact = _rounding_expected(p, v)
    arrays = shaped(answer(p, v), dict.fromkeys(("out", "low"), exact.shape))
    out, low = (np.asarray(array).astype(np.float64) for array in arrays)
    fits = lambda array: np.array_equal(array, np.asarray(array, v.dtype), equal_nan=True)  # Python's numbers in a list
    of_16_bits = lambda array: array.dtype == v.dtype if hasattr(array, "dtype") else fits(array)
    numbers = " and ".join("bfloat16" if of_16_bits(array) else "of another dtype" for array in arrays)
    step = 2.0 ** (np.floor(np.log2(np.abs(exact))) - jnp.finfo(v.dtype).nmant)
    return numbers, np.where(np.abs(out - exact) <= 0.51 * step, nearest, out), out + low


ROUNDING = Exercise(
    out_and_low, "Out, and what rounding takes off it",
    outputs=("numbers of out and low", "out", "out + low"),
    cases=_rounding_cases, run=_run_rounding, expected=_rounding_expected,
    tolerance=5e-6,  # at worst 2^-9 of low, which is 2^-8 of out; less over an array; float32 sums
).with_mistakes(
    ("low is zero everywhere: the difference was taken after both of its terms had been rounded",
     "exact - np.float32(out)", "exact.astype(v.dtype) - out",
     "Keep the exact result in float32 until low has been taken off it: see the text of the exercise."),
    ("out is that of the kernels before: divided by the sum of the unrounded weights, and low is zero",
     ("weights.sum", "exact - np.float32(out)"), ("p.sum", "exact.astype(v.dtype) - out"),
     "Take low off before anything is rounded, and divide by the weights that the product took: see section 13."),
    ("the weights were rounded for the product with v, but not for their sum", "weights.sum", "p.sum",
     "A mean divides by the sum of the very weights that it used. Which are these? See section 13."),
    ("the product with v comes out in 16 bits", "weights @ np.float32(v)", "np.float32(jnp.dot(p.astype(v.dtype), v))",
     "A product of 16-bit arrays keeps their dtype unless you say otherwise: ask for float32, see section 10."),
)  # fmt: skip

EXERCISES = (DKV, DQ, WIRING, FLOPS, BOUNDS, ROUNDING, KEY_GRADIENTS, QUERY_GRADIENTS, FLASH_ATTENTION)
ORDER = (1, 2, 3, 4, 5, 7, 8, 9, 6)  # in which the notebook shows them
