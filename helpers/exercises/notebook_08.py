"""The exercises of notebook 08."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from helpers.exercises.comparing import got, plain
from helpers.exercises.exercise import Case, Complaint, Exercise


def attention_layer(x, w_qkv, w_merge, N, attention):
    """Causal attention with N heads. Returns (B, T, C).

    x: (B, T, C); w_qkv: (C, 3 C); w_merge: (C, C); attention: a function.
    """
    B, T, C = x.shape
    parts = jnp.split(x @ w_qkv, 3, axis=-1)
    query, key, value = (part.reshape(B, T, N, C // N) for part in parts)
    out = attention(query, key, value, is_causal=True)
    return out.reshape(B, T, C) @ w_merge


def _layer_cases():
    random = np.random.default_rng(81)

    def case(label, x, w_qkv, w_merge, N):
        arrays = (np.asarray(array, np.float32) for array in (x, w_qkv, w_merge, random.standard_normal(x.shape)))
        return Case(label, (*arrays, N))

    eye = np.eye(2)
    by_hand = np.array([[[0.0, 1.0], [1.0, 0.0]]]), np.hstack([eye, math.log(3) * eye, eye]), eye
    arrays = (random.standard_normal(shape) for shape in [(2, 9, 6), (6, 18), (6, 6)])
    return [case("the case worked by hand", *by_hand, 2), case("B=2, T=9, N=3, H=2", *arrays, 3)]


def _run_layer(answer, x, w_qkv, w_merge, dout, N):
    calls = []

    def layer(probe, *arrays):
        def attention(query, key, value, *, is_causal=False):  # a fourth in order would be flash_attention's bias
            calls.append(query.shape)
            if query.ndim != 4:
                raise Complaint(f"attention got a query of shape {query.shape}; it is called once, with (B, T, N, H)")
            for name, array in (("query", query), ("key", key), ("value", value)):
                if 0 in array.shape:  # rotated, with head_dim 1: half of it is nothing
                    raise Complaint(f"attention got a {name} of shape {array.shape}, which is empty; is it rotated?")
            return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal) + probe

        out = answer(*arrays, N, attention)
        if getattr(out, "shape", None) != x.shape:
            raise Complaint(f"out: expected an array of shape {x.shape}, got {getattr(out, 'shape', got(out))}")
        return out

    with jax.default_matmul_precision("highest"):
        # The probe is 0, and has a gradient where the result of attention is used.
        out, pull_back = jax.vjp(layer, jnp.float32(0), *map(jnp.asarray, (x, w_qkv, w_merge)))
        of_probe, *gradients = pull_back(jnp.asarray(dout))
    return out, *gradients, len(calls) * int(of_probe != 0)


LAYER = Exercise(
    attention_layer, "Swap attention in",
    outputs=("out", "gradient of x", "gradient of w_qkv", "gradient of w_merge", "results of attention used"),
    cases=_layer_cases, run=_run_layer, slow=True,
).with_mistakes(
    ("attention is not causal", ", is_causal=True", "",
     "Pass is_causal=True: each position may look back only, see section 1."),
    ("the heads and the positions are mixed up by a reshape to (B, N, T, H)", "(B, T, N, C // N)",
     "(B, N, T, C // N).swapaxes(1, 2)", "Reshape to (B, T, N, H), which moves nothing: see the text of the exercise."),
    ("the heads come before the positions", ("C // N) ", "out.reshape("),
     ("C // N).swapaxes(1, 2) ", "out.swapaxes(1, 2).reshape("),
     "attention takes (B, T, N, H), and moves the axes itself if it wants: see the text of the exercise."),
    ("the attention that is passed in is never called, or its result is not used", " attention(",
     " jax.nn.dot_product_attention(",
     "Call attention(query, key, value, is_causal=True), so that flash can take its place: see section 1."),
    ("the columns of w_qkv are read head by head instead of all of q, all of k, all of v", "x @ w_qkv",
     "(x @ w_qkv).reshape(B, T, N, -1)",
     "The first C columns of w_qkv make the queries of all heads: see the text of the exercise."),
    ("all heads are computed as one head of width C", "N, C // N", "1, C",
     "Each of the N heads has its own softmax: split the last axis into (N, H), see section 1."),
    ("w_merge is left out", " @ w_merge", "", "The heads are joined by a last product with w_merge: see section 1."),
    ("x is added to the result", "return out", "return x + out",
     "Return only what is to be added to x; the block adds it: see section 1."),
)  # fmt: skip


def bytes_kept(B, T, N, H, itemsize, layers):
    """Bytes kept for the backward pass. Returns {"naive": bytes, "flash": bytes}."""
    like_q = itemsize * B * T * N * H
    table = itemsize * B * N * T * T
    lse = 4 * B * N * T
    return {
        "naive": layers * (3 * like_q + table),
        "flash": layers * (4 * like_q + lse),
    }


KEPT = Exercise(bytes_kept, "Read the memory difference", outputs=("bytes",), tolerance=1e-9).with_cases(
    "B T N H itemsize layers", ("the case worked by hand", 1, 2, 1, 2, 2, 1), (2, 3, 5, 4, 4, 7),
    (6, 5, 7, 3, 8, 2), (8, 96, 2, 32, 4, 2), (4, 2048, 16, 128, 2, 24), (1, 8192, 8, 64, 2, 3),
).with_mistakes(
    ("out is forgotten in flash", "4 * like_q", "3 * like_q",
     "delta is made of out and its gradient, so out is kept: see section 2."),
    ("flash is charged for a table as well", "+ lse", "+ lse + table",
     "Flash computes the weights again, tile by tile, and keeps none: see section 2."),
    ("the table is halved because attention is causal", "T * T", "T * T // 2",
     "The hidden half of the table is zeros, and zeros take memory too: see section 2."),
)  # fmt: skip


def inputs_and_targets(tokens, starts, T):
    """A batch for learning the next token. Returns inputs and targets, both (B, T)."""
    windows = tokens[starts[:, None] + np.arange(T + 1)]
    return windows[:, :-1], windows[:, 1:]


def _shift_cases():
    random = np.random.default_rng(83)
    yield Case("the case worked by hand", (np.array([5, 8, 2, 7, 1]), np.array([0, 2]), 2))
    for length, starts, T in [(9, [3], 4), (40, [7, 0, 31], 8), (300, [12, 291, 100, 4], 8)]:
        label = f"{length} tokens, B={len(starts)}, T={T}"
        yield Case(label, (random.permutation(length), np.array(starts), T))


def _run_shift(answer, tokens, starts, T):
    """The result, with what is said where tokens have become numbers that are no integers."""
    result = plain(answer(tokens, starts, T))
    parts = result if isinstance(result, tuple) else (result,)
    if any(getattr(part, "dtype", np.dtype(int)).kind in "bfc" for part in parts):
        raise Complaint("tokens are integers, and yours have become others: they index a table of embeddings later")
    return result


SHIFT = Exercise(
    inputs_and_targets, "The causal shift", outputs=("inputs", "targets"), cases=_shift_cases, run=_run_shift,
).with_mistakes(
    ("there is no shift: each position has to predict the token that it is given", "1:]", ":-1]",
     "The target is the token after the input: see the picture of section 3."),
    ("the shift goes the wrong way: each position has to predict the token before", "windows[:, 1:]",
     "tokens[starts[:, None] + np.arange(T) - 1]",
     "The target lies to the right of the input, at one place more: see the picture of section 3."),
    ("the last target is the first input of its window, wrapped round", "windows[:, 1:]",
     "np.roll(windows[:, :-1], -1, axis=1)",
     "The last target is one token beyond the inputs, so read T + 1 tokens: see the picture of section 3."),
)  # fmt: skip


def next_token_loss(logits, targets):
    """Mean of -log softmax at the targets. logits: (T, vocabulary), targets: (T,)."""
    m = logits.max(axis=-1, keepdims=True)
    lse = m[:, 0] + np.log(np.exp(logits - m).sum(axis=-1))
    right = logits[np.arange(len(targets)), targets]
    return (lse - right).mean()


def _loss_cases():
    random = np.random.default_rng(84)
    yield Case("the case worked by hand", (np.log([[1.0, 3.0]]), np.array([1])))
    for T, V, spread, shift, label in [
        (3, 4, 1, 0, "small logits"),
        (6, 5, 1, -2000, "logits around -2000"),
        (5, 9, 400, 900, "logits hundreds apart"),
        (7, 7, 3, np.array([0, 3000, -3000, 0, 1500, -800, 60])[:, None], "a different level in each row"),
    ]:
        logits = np.round(8 * (spread * random.standard_normal((T, V)) + shift)) / 8  # exact in float32
        yield Case(f"T={T}, vocabulary {V}, {label}", (logits, random.integers(0, V, T)))
    spike = np.zeros((3, 6))
    spike[0, 4], spike[1, 2] = 1000, -2000
    yield Case("T=3, vocabulary 6, one logit 1000 above the others of its row", (spike, np.array([1, 0, 5])))
    for label, target in (("the target 720 below the largest", 0), ("the target 720 above the others", 1)):
        yield Case(f"T=1, vocabulary 3, {label}", (np.array([[0.0, 720, 10]]), np.array([target])))


LOSS = Exercise(
    next_token_loss, "The loss, without overflow", outputs=("loss",), cases=_loss_cases,
    tolerance=1e-3,  # float32 rounds logits of a few thousand to three digits behind the point
).with_mistakes(
    ("the maximum is not taken off, and large exponentials overflow or all of them vanish",
     ("m[:, 0] + ", "logits - m"), ("", "logits"),
     "Take each row's maximum off before the exponential and add it back after the logarithm: see section 4."),
    ("the logarithm is taken of a probability that has rounded to zero",
     ("lse = m[:, 0] + np.log(np.exp(logits - m).sum(axis=-1))", "= logits[", "(lse - right).mean()"),
     ("p = np.exp(logits - m) / np.exp(logits - m).sum(axis=-1, keepdims=True)", "= p[", "-np.log(right).mean()"),
     "Subtract logarithms, lse - logit, instead of taking the logarithm of a quotient: see section 4."),
    ("the exponential of a large logit is infinite, and one infinity by another NaN",
     ("lse = m[:, 0] + np.log(np.exp(logits - m).sum(axis=-1))", "= logits[", "(lse - right).mean()"),
     ("p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)", "= p[", "-np.log(right).mean()"),
     "Take each row's maximum off, and subtract logarithms instead of dividing: see section 4."),
    ("the losses of all tokens are averaged, not that of the target alone", "logits[np.arange(len(targets)), targets]",
     "logits.mean(axis=-1)", "Take the logit at `targets` from each row: see hint 2."),
    ("only the last position counts", ".mean()", "[-1]",
     "Every position predicts its next token: take the mean over all of them, see section 3."),
)  # fmt: skip

EXERCISES = (LAYER, KEPT, SHIFT, LOSS)
