"""The exercises of notebook 08."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from helpers.attention import tiled
from helpers.attention.masking import Band
from helpers.attention.reference import oracle, oracle_gradients
from helpers.exercises.checking import Case, Complaint, Exercise, Mistake, plain

# 8.1 Swap attention in


def _layer_cases():
    random = np.random.default_rng(81)

    def case(label, x, w_qkv, w_merge, N, method="naive"):
        dout = random.standard_normal(x.shape)
        arrays = (np.asarray(array, np.float32) for array in (x, w_qkv, w_merge, dout))
        return Case(label, (*arrays, N, method))

    eye = np.eye(2)
    cases = [
        case(
            "the case worked by hand, naive attention",
            np.array([[[0.0, 1.0], [1.0, 0.0]]]),
            np.hstack([eye, math.log(3) * eye, eye]),
            eye,
            2,
        )
    ]
    for B, T, N, H, method in [(2, 9, 3, 2, "flash")]:
        C = N * H
        x, w_qkv, w_merge = (random.standard_normal(shape) for shape in [(B, T, C), (C, 3 * C), (C, C)])
        cases.append(case(f"B={B}, T={T}, N={N}, H={H}, {method} attention", x, w_qkv, w_merge, N, method))
    return cases


def _naive(q, k, v, is_causal):
    """(out, lse) and the function of (q, k, v, out, lse, dout) that gives (dq, dk, dv), from the definition."""
    return oracle(q, k, v, is_causal=is_causal), lambda q, k, v, out, lse, dout: oracle_gradients(
        q, k, v, dout, is_causal=is_causal
    )


def _flash(q, k, v, is_causal):
    """The same in tiles, by the NumPy twins of the kernels, which need not be compiled."""
    B, _, N, H = q.shape
    settings = dict(scale=1 / math.sqrt(H), block_q=4, block_k=2, band=Band.of(is_causal))
    heads = [(b, slice(None), n) for b in range(B) for n in range(N)]
    out, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    for at in heads:
        out[at], lse[at] = tiled.query_outer(tiled.SlowMemory(q=q[at], k=k[at], v=v[at]), **settings)

    def backward(q, k, v, out, lse, dout):
        gradients = np.empty_like([q, k, v])
        for at in heads:
            arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "do": dout, "dlse": np.zeros_like(lse)}
            memory = tiled.SlowMemory(**{name: array[at] for name, array in arrays.items()})
            for gradient, found in zip(gradients, tiled.backward(memory, **settings), strict=True):
                gradient[at] = found
        return tuple(gradients)

    return (out, lse), backward


def _differentiable(method, is_causal):
    """attend(q, k, v) for jax.grad, computed in NumPy."""

    def launch(run, shapes, *arrays):
        def on_host(*arrays):
            results = run(*(np.asarray(array, np.float32) for array in arrays))
            return tuple(np.asarray(result, np.float32) for result in results)

        shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential")

    def forward(q, k, v):
        return launch(lambda *arrays: method(*arrays, is_causal)[0], (q.shape, q.shape[:-1]), q, k, v)

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])

    def backward_rule(kept, dout):
        run = lambda *arrays: method(*arrays[:3], is_causal)[1](*arrays)
        return launch(run, [array.shape for array in kept[:3]], *kept, dout)

    attend.defvjp(lambda q, k, v: (lambda out, lse: (out, (q, k, v, out, lse)))(*forward(q, k, v)), backward_rule)
    return attend


def _run_layer(answer, x, w_qkv, w_merge, dout, N, method):
    def layer(probe, *arrays):
        def attention(query, key, value, *, is_causal=False):  # a fourth in order would be flash_attention's bias
            for name, array in (("query", query), ("key", key), ("value", value)):
                if 0 in array.shape:  # rotated, with head_dim 1: half of it is nothing
                    raise Complaint(f"attention got a {name} of shape {array.shape}, which is empty; is it rotated?")
            # Under jax.vmap the axis of the batch does not show.
            batched = (array[None] if array.ndim == 3 else array for array in (query, key, value))
            out = _differentiable({"naive": _naive, "flash": _flash}[method], is_causal)(*batched)
            return out.reshape(query.shape) + probe

        out = answer(*arrays, N, attention)
        if out is None:
            raise Complaint("out: expected an array, got None: is a `return` missing?")
        if not hasattr(out, "shape"):
            raise Complaint(f"out: expected an array of shape {x.shape}, got a {type(out).__name__}")
        if out.shape != x.shape:
            raise Complaint(f"out: expected shape {x.shape}, got {out.shape}")
        return out

    def value_and_gradients(dout, *arrays):
        out, pull_back = jax.vjp(layer, *arrays)
        return out, *pull_back(dout)

    with jax.default_matmul_precision("highest"):
        arrays = map(jnp.asarray, (x, w_qkv, w_merge))
        # The probe is 0, and has a gradient where the result of attention is used.
        out, of_probe, *gradients = value_and_gradients(jnp.asarray(dout), jnp.float32(0), *arrays)
    return out, *gradients, bool(of_probe != 0)


def _layer_expected(x, w_qkv, w_merge, dout, N, method):
    B, T, C = x.shape
    x, w_qkv, w_merge, dout = (array.astype(np.float64) for array in (x, w_qkv, w_merge, dout))
    q, k, v = (part.reshape(B, T, N, C // N).astype(np.float32) for part in np.split(x @ w_qkv, 3, axis=-1))
    heads, _ = oracle(q, k, v, is_causal=True)
    heads = heads.reshape(B, T, C)
    dheads = (dout @ w_merge.T).reshape(B, T, N, C // N)
    gradients = oracle_gradients(q, k, v, dheads.astype(np.float32), is_causal=True)
    dqkv = np.concatenate([gradient.reshape(B, T, C) for gradient in gradients], axis=-1)
    gradients = dqkv @ w_qkv.T, np.einsum("bti,btj->ij", x, dqkv), np.einsum("bti,btj->ij", heads, dout)
    return *(array.astype(np.float32) for array in (heads @ w_merge, *gradients)), True


def _split(array, N):
    B, T, C = array.shape
    return array.reshape(B, T, N, C // N)


def _split_by_columns(array, N):
    B, T, C = array.shape
    return array.reshape(B, T, C // N, N).swapaxes(2, 3)


def _split_without_moving(array, N):
    B, T, C = array.shape
    return array.reshape(B, N, T, C // N).swapaxes(1, 2)


def _layer(split=_split, parts=lambda q, k, v, H: (q, k, v), causal=True, join=None, merge=True, heads=None, add=False):
    """The answer to 8.1, or a wrong one that differs from it in the parts that are passed."""

    def layer(x, w_qkv, w_merge, N, attention):
        B, T, C = x.shape
        N = heads or N
        q, k, v = (split(part, N) for part in parts(*jnp.split(x @ w_qkv, 3, axis=-1), C // N))
        out = attention(q, k, v, is_causal=causal)
        out = (join(out) if join else out).reshape(B, T, C)
        out = out @ w_merge if merge else out
        return x + out if add else out

    return layer


def _heads_first(x, w_qkv, w_merge, N, attention):
    B, T, C = x.shape
    q, k, v = (_split(part, N).swapaxes(1, 2) for part in jnp.split(x @ w_qkv, 3, axis=-1))
    return attention(q, k, v, is_causal=True).swapaxes(1, 2).reshape(B, T, C) @ w_merge


def _grouped_by_head(x, w_qkv, w_merge, N, attention):
    B, T, C = x.shape
    q, k, v = jnp.split((x @ w_qkv).reshape(B, T, N, 3 * C // N), 3, axis=-1)
    return attention(q, k, v, is_causal=True).reshape(B, T, C) @ w_merge


def _own_attention(x, w_qkv, w_merge, N, attention):
    def naive(query, key, value, is_causal):
        s = jnp.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(query.shape[-1])
        s = jnp.where(jnp.tri(query.shape[1], dtype=bool), s, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), value)

    return _layer()(x, w_qkv, w_merge, N, naive)


_LAYER = Exercise(
    number="8.1",
    title="Swap attention in",
    outputs=("out", "gradient of x", "gradient of w_qkv", "gradient of w_merge", "attention is used"),
    cases=_layer_cases,
    expected=_layer_expected,
    run=_run_layer,
    tried="result and gradients, with naive and with flash attention, 2 and 3 heads, one and two batch entries",
    mistakes=(
        Mistake(
            "attention is not causal",
            _layer(causal=False),
            "Pass is_causal=True: each position may look back only, see section 1.",
        ),
        Mistake(
            "the heads and the positions are mixed up by a reshape to (B, N, T, H)",
            _layer(split=_split_without_moving),
            "Reshape to (B, T, N, H), which moves nothing: see the text of the exercise.",
            variants=(_layer(split=_split_without_moving, join=lambda out: out.swapaxes(1, 2)),),
        ),
        Mistake(
            "attention runs over the heads instead of the positions",
            _heads_first,
            "attention takes (B, T, N, H), positions before heads: see section 1.",
        ),
        Mistake(
            "a reshape to (B, N, T, H) gives every head the numbers of others, and attention the heads as positions",
            _layer(split=lambda array, N: _split_without_moving(array, N).swapaxes(1, 2)),
            "attention takes (B, T, N, H): reshape to that, which moves nothing, see the text of the exercise.",
            variants=(
                _layer(
                    split=lambda array, N: _split_without_moving(array, N).swapaxes(1, 2),
                    join=lambda out: out.swapaxes(1, 2),
                ),
            ),
        ),
        Mistake(
            "attention runs over the heads instead of the positions, and the result is not turned back",
            _layer(split=lambda array, N: _split(array, N).swapaxes(1, 2)),
            "attention takes (B, T, N, H), positions before heads: see section 1.",
        ),
        Mistake(
            "heads and positions are exchanged before they are merged",
            _layer(join=lambda out: out.swapaxes(1, 2)),
            "attention returns (B, T, N, H), which a reshape turns into (B, T, C): see the text of the exercise.",
        ),
        Mistake(
            "N and H have changed places",
            lambda x, w_qkv, w_merge, N, attention: _layer()(x, w_qkv, w_merge, x.shape[-1] // N, attention),
            "There are N heads of H = C // N numbers: the last two axes are (N, H).",
        ),
        Mistake(
            "queries, keys and values take every third column of w_qkv",
            lambda x, w_qkv, w_merge, N, attention: _layer()(
                x, jnp.concatenate([w_qkv[:, part::3] for part in range(3)], axis=1), w_merge, N, attention
            ),
            "The first C columns make the queries, the next C the keys: see the text of the exercise.",
        ),
        Mistake(
            "the result of attention is scaled once more",
            lambda x, w_qkv, w_merge, N, attention: (
                _layer()(x, w_qkv, w_merge, N, attention) / math.sqrt(x.shape[-1] // N)
            ),
            "attention scales the logits itself, and its result needs no scale: see the text of the exercise.",
        ),
        Mistake(
            "x is normalised once more",
            lambda x, w_qkv, w_merge, N, attention: _layer()(
                x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6), w_qkv, w_merge, N, attention
            ),
            "x comes normalised already: see the text of the exercise.",
        ),
        Mistake(
            "no gradient passes attention",
            _layer(join=jax.lax.stop_gradient),
            "Return the result as JAX computed it, without stop_gradient: the checker takes gradients through it.",
        ),
        Mistake(
            "head n takes every N-th column instead of H columns side by side",
            _layer(split=_split_by_columns, join=lambda out: out.swapaxes(2, 3)),
            "Head n owns the columns n H to (n + 1) H: see the text of the exercise.",
        ),
        Mistake(
            "the columns of w_qkv are read head by head instead of all of q, all of k, all of v",
            _grouped_by_head,
            "The first C columns of w_qkv make the queries of all heads: see the text of the exercise.",
        ),
        Mistake(
            "all heads are computed as one head of width C",
            _layer(heads=1),
            "Each of the N heads has its own softmax: split the last axis into (N, H), see section 1.",
        ),
        Mistake(
            "queries and keys are exchanged",
            _layer(parts=lambda q, k, v, H: (k, q, v)),
            "The order in w_qkv is q, k, v, and attention takes them in this order: see the text of the exercise.",
        ),
        Mistake(
            "w_merge is transposed",
            lambda x, w_qkv, w_merge, N, attention: _layer()(x, w_qkv, w_merge.T, N, attention),
            "Multiply by w_merge as it is, on the right: see the text of the exercise.",
        ),
        Mistake(
            "the heads are averaged before they are merged",
            _layer(join=lambda out: jnp.broadcast_to(out.mean(axis=2, keepdims=True), out.shape)),
            "Each head has its own columns of the result: join them side by side, see section 1.",
        ),
        Mistake(
            "queries or keys are multiplied by √H before attention",
            _layer(parts=lambda q, k, v, H: (q * math.sqrt(H), k, v)),
            "attention multiplies the logits by 1 / √H itself: leave q and k as they are, see section 1.",
        ),
        Mistake(
            "the parts are taken in the order v, k, q",
            _layer(parts=lambda q, k, v, H: (v, k, q)),
            "The order in w_qkv is q, k, v, and attention takes them in this order: see the text of the exercise.",
        ),
        Mistake(
            "keys and values are exchanged",
            _layer(parts=lambda q, k, v, H: (q, v, k)),
            "The order in w_qkv is q, k, v, and attention takes them in this order: see the text of the exercise.",
        ),
        Mistake(
            "queries or keys are scaled before attention, which scales the logits again",
            _layer(parts=lambda q, k, v, H: (q / math.sqrt(H), k, v)),
            "attention multiplies the logits by 1 / √H itself: leave q and k as they are, see section 1.",
        ),
        Mistake(
            "the outputs of the heads are interleaved instead of joined side by side",
            _layer(join=lambda out: out.swapaxes(2, 3)),
            "Join (N, H) back to C in the order in which you split it: see the text of the exercise.",
        ),
        Mistake(
            "w_merge is left out",
            _layer(merge=False),
            "The heads are joined by a last product with w_merge: see section 1.",
        ),
        Mistake(
            "x is added to the result",
            _layer(add=True),
            "Return only what is to be added to x; the block adds it: see section 1.",
        ),
        Mistake(
            "the attention that is passed in is never called, or its result is not used",
            _own_attention,
            "Call attention(query, key, value, is_causal=True), so that flash can take its place: see section 1.",
        ),
    ),
)

# 8.2 Read the memory difference


def _kept_cases():
    shapes = [
        (1, 2, 1, 2, 2, 1),
        (2, 3, 5, 4, 4, 7),
        (6, 5, 7, 3, 8, 2),
        (8, 96, 2, 32, 4, 2),
        (4, 2048, 16, 128, 2, 24),
        (1, 8192, 8, 64, 2, 3),
    ]
    return [
        Case(
            f"{'the case worked by hand, ' if number == 0 else ''}"
            f"B={B}, T={T}, N={N}, H={H}, itemsize={itemsize}, layers={layers}",
            shape,
        )
        for number, shape in enumerate(shapes)
        for B, T, N, H, itemsize, layers in [shape]
    ]


def _kept(naive=lambda B, T, N, H, e: e * (3 * B * T * N * H + B * N * T * T), flash=None, layers=True, swap=False):
    """The answer to 8.2, or a wrong one that differs from it in the parts that are passed."""
    flash = flash or (lambda B, T, N, H, e: 4 * e * B * T * N * H + 4 * B * N * T)

    def answer(B, T, N, H, itemsize, layers_of_model):
        count = layers_of_model if layers else 1
        sizes = count * naive(B, T, N, H, itemsize), count * flash(B, T, N, H, itemsize)
        names = ("flash", "naive") if swap else ("naive", "flash")
        return dict(zip(names, sizes, strict=True))

    return answer


_KEPT = Exercise(
    number="8.2",
    title="Read the memory difference",
    outputs=("bytes",),
    cases=_kept_cases,
    expected=_kept(),
    tolerance=1e-9,
    tried="1 to 24 layers, 2, 4 and 8 bytes an element, T from 2 to 8192",
    mistakes=(
        Mistake(
            "out is forgotten in flash",
            _kept(flash=lambda B, T, N, H, e: 3 * e * B * T * N * H + 4 * B * N * T),
            "delta is made of out and its gradient, so out is kept: see section 2.",
        ),
        Mistake(
            "lse is forgotten",
            _kept(flash=lambda B, T, N, H, e: 4 * e * B * T * N * H),
            "With lse any tile of the weights can be computed again by itself: see section 2.",
        ),
        Mistake(
            "lse is counted in the dtype of the inputs",
            _kept(flash=lambda B, T, N, H, e: 4 * e * B * T * N * H + e * B * N * T),
            "lse is float32 whatever the inputs are, 4 bytes: see section 2.",
        ),
        Mistake(
            "lse is given H numbers for each row instead of one",
            _kept(flash=lambda B, T, N, H, e: 4 * e * B * T * N * H + 4 * B * N * T * H),
            "lse is one number for each query of each head: see section 2.",
        ),
        Mistake(
            "flash is charged for a table as well",
            _kept(flash=lambda B, T, N, H, e: 4 * e * B * T * N * H + 4 * B * N * T + e * B * N * T * T),
            "Flash computes the weights again, tile by tile, and keeps none: see section 2.",
        ),
        Mistake(
            "all heads share one table",
            _kept(naive=lambda B, T, N, H, e: e * (3 * B * T * N * H + B * T * T)),
            "Each head has its own weights: see section 2.",
        ),
        Mistake(
            "one table is counted for the whole batch",
            _kept(naive=lambda B, T, N, H, e: e * (3 * B * T * N * H + N * T * T)),
            "Each sequence of the batch has its own weights: see section 2.",
        ),
        Mistake(
            "only the table is counted for naive",
            _kept(naive=lambda B, T, N, H, e: e * B * N * T * T),
            "The gradients of q, k and v need q, k and v too: see section 2.",
        ),
        Mistake(
            "out is charged to naive as well",
            _kept(naive=lambda B, T, N, H, e: e * (4 * B * T * N * H + B * N * T * T)),
            "With the weights at hand delta is rowsum(p ∘ dp), and out is not needed: see section 2.",
        ),
        Mistake(
            "the table is halved because attention is causal",
            _kept(naive=lambda B, T, N, H, e: e * (3 * B * T * N * H + B * N * T * T // 2)),
            "The hidden half of the table is zeros, and zeros take memory too: see section 2.",
        ),
        Mistake(
            "only the visible triangle of the table is counted, because attention is causal",
            _kept(naive=lambda B, T, N, H, e: e * (3 * B * T * N * H + B * N * T * (T + 1) // 2)),
            "The hidden half of the table is zeros, and zeros take memory too: see section 2.",
        ),
        Mistake(
            "the table is counted in elements instead of bytes",
            _kept(naive=lambda B, T, N, H, e: e * 3 * B * T * N * H + B * N * T * T),
            "Multiply the table by itemsize too: see the text of the exercise.",
        ),
        Mistake(
            "all heads and sequences share one table",
            _kept(naive=lambda B, T, N, H, e: e * (3 * B * T * N * H + T * T)),
            "Each head of each sequence has its own weights: see section 2.",
        ),
        Mistake(
            "all heads share one lse",
            _kept(flash=lambda B, T, N, H, e: 4 * e * B * T * N * H + 4 * B * T),
            "lse is one number for each query of each head: see section 2.",
        ),
        Mistake(
            "the whole batch shares one lse",
            _kept(flash=lambda B, T, N, H, e: 4 * e * B * T * N * H + 4 * N * T),
            "lse is one number for each query of each head, in each sequence: see section 2.",
        ),
        Mistake(
            "dout is counted for flash as well",
            _kept(flash=lambda B, T, N, H, e: 5 * e * B * T * N * H + 4 * B * N * T),
            "dout arrives in the backward pass and is not kept for it: see section 2.",
        ),
        Mistake(
            "q, k and v are forgotten in flash",
            _kept(flash=lambda B, T, N, H, e: e * B * T * N * H + 4 * B * N * T),
            "Flash computes the weights again from q and k, and needs v too: see section 2.",
        ),
        Mistake(
            "two tables are counted for naive",
            _kept(naive=lambda B, T, N, H, e: e * (3 * B * T * N * H + 2 * B * N * T * T)),
            "The weights are enough: ds is made of them and of what the backward pass computes, see section 2.",
        ),
        Mistake(
            "the table is counted in float32 whatever the itemsize is",
            _kept(naive=lambda B, T, N, H, e: e * 3 * B * T * N * H + 4 * B * N * T * T),
            "Here the table has elements of itemsize bytes: see the text of the exercise.",
        ),
        Mistake(
            "one layer is counted instead of all",
            _kept(layers=False),
            "The backward pass begins after the last layer, so what every layer keeps is alive at once: see section 2.",
        ),
        Mistake(
            "elements are counted instead of bytes",
            _kept(
                naive=lambda B, T, N, H, e: 3 * B * T * N * H + B * N * T * T,
                flash=lambda B, T, N, H, e: 4 * B * T * N * H + B * N * T,
            ),
            "Multiply by itemsize, and by 4 for lse: see the text of the exercise.",
        ),
        Mistake(
            "naive and flash are exchanged",
            _kept(swap=True),
            "Naive is the one with a table: see section 2.",
        ),
    ),
)

# 8.3 The causal shift


def _shift_cases():
    random = np.random.default_rng(83)
    cases = [Case("the case worked by hand", (np.array([5, 8, 2, 7, 1]), np.array([0, 2]), 2))]
    for length, starts, T in [(9, [3], 4), (40, [7, 0, 31], 8), (300, [12, 291, 100, 4], 8)]:
        label = f"{length} tokens, B={len(starts)}, T={T}"
        cases.append(Case(label, (random.permutation(length), np.array(starts), T)))
    return cases


def _shift_expected(tokens, starts, T):
    rows = [[int(token) for token in tokens[start : start + T + 1]] for start in starts]
    return np.array([row[:-1] for row in rows]), np.array([row[1:] for row in rows])


def _run_shift(answer, tokens, starts, T):
    """The result, with what is said where tokens have become numbers that are no integers."""
    result = plain(answer(tokens, starts, T))
    parts = result if isinstance(result, tuple) else (result,)
    if any(getattr(part, "dtype", np.dtype(int)).kind in "bfc" for part in parts):
        raise Complaint("tokens are integers, and yours have become others: they index a table of embeddings later")
    return result


def _shift(targets):
    """An answer to 8.3: inputs are right, targets(tokens, places) gives the other part; places is (B, T)."""

    def answer(tokens, starts, T):
        places = starts[:, None] + np.arange(T)
        return tokens[places], targets(tokens, places)

    return answer


def _last_lost(tokens, starts, T):
    windows = tokens[starts[:, None] + np.arange(T)]
    return windows[:, :-1], windows[:, 1:]


def _side_by_side(tokens, starts, T):
    places = starts[:, None] + np.arange(T)
    return tokens[places], tokens[np.minimum(places + T, len(tokens) - 1)]


def _columns(tokens, starts, T):
    inputs, targets = _shift_expected(tokens, starts, T)
    return inputs.T, targets.T


_SHIFT = Exercise(
    number="8.3",
    title="The causal shift",
    outputs=("inputs", "targets"),
    cases=_shift_cases,
    run=_run_shift,
    expected=_shift_expected,
    tried="1 to 4 windows, at both ends of the text and in the middle",
    mistakes=(
        Mistake(
            "there is no shift: each position has to predict the token that it is given",
            _shift(lambda tokens, places: tokens[places]),
            "The target is the token after the input: see the picture of section 3.",
        ),
        Mistake(
            "the shift goes the wrong way: each position has to predict the token before",
            _shift(lambda tokens, places: tokens[places - 1]),
            "The target lies to the right of the input, at one place more: see the picture of section 3.",
        ),
        Mistake(
            "the inputs are rolled to the right, so each position has to predict the token before",
            _shift(lambda tokens, places: np.roll(tokens[places], 1, axis=1)),
            "The target lies to the right of the input, at one place more: see the picture of section 3.",
        ),
        Mistake(
            "the last target is the first input of its window, wrapped round",
            _shift(lambda tokens, places: np.roll(tokens[places], -1, axis=1)),
            "The last target is one token beyond the inputs, so read T + 1 tokens: see the picture of section 3.",
        ),
        Mistake(
            "the last target of a window is taken from the next window",
            _shift(lambda tokens, places: np.roll(tokens[places], -1)),
            "Windows of a batch have nothing to do with each other: shift along the axis of T only, see section 3.",
        ),
        Mistake(
            "the shift is two tokens",
            _shift(lambda tokens, places: tokens[np.minimum(places + 2, len(tokens) - 1)]),
            "The target is the very next token: see the picture of section 3.",
        ),
        Mistake(
            "the target is the window that follows",
            _side_by_side,
            "Every position has its own target, one token on: see the picture of section 3.",
        ),
        Mistake(
            "the windows have T tokens in all, so inputs and targets are one short",
            _last_lost,
            "T inputs and T targets need T + 1 tokens: see section 3.",
        ),
        Mistake(
            "the targets lack the last one",
            _shift(lambda tokens, places: tokens[places[:, 1:]]),
            "T inputs and T targets need T + 1 tokens: see section 3.",
        ),
        Mistake(
            "the last target is filled up with 0",
            _shift(lambda tokens, places: np.pad(tokens[places[:, 1:]], ((0, 0), (0, 1)))),
            "The last target is one token beyond the inputs, so read T + 1 tokens: see the picture of section 3.",
        ),
        Mistake(
            "the last target is the last input once more",
            _shift(lambda tokens, places: np.pad(tokens[places[:, 1:]], ((0, 0), (0, 1)), mode="edge")),
            "The last target is one token beyond the inputs, so read T + 1 tokens: see the picture of section 3.",
        ),
        Mistake(
            "one is added to the tokens instead of to their places",
            _shift(lambda tokens, places: tokens[places] + 1),
            "Shift the place in the text, then look up what stands there: see hint 2.",
        ),
        Mistake(
            "only the token behind each window is a target",
            _shift(lambda tokens, places: tokens[places[:, -1] + 1]),
            "Every position has its own target, one token on: see the picture of section 3.",
        ),
        Mistake(
            "the targets of a window are the inputs of the next one in the batch",
            _shift(lambda tokens, places: np.roll(tokens[places], -1, axis=0)),
            "Windows of a batch have nothing to do with each other: shift along the axis of T, see section 3.",
        ),
        Mistake(
            "the places in the text are returned instead of the tokens there",
            lambda tokens, starts, T: (starts[:, None] + np.arange(T), starts[:, None] + np.arange(T) + 1),
            "Index the tokens by the table of places: see hint 1.",
        ),
        Mistake(
            "everything begins one token late",
            lambda tokens, starts, T: _shift_expected(np.append(tokens, tokens[-1]), starts + 1, T),
            "The inputs begin at `starts` itself: see the text of the exercise.",
        ),
        Mistake(
            "everything begins one token early",
            lambda tokens, starts, T: _shift_expected(np.roll(tokens, 1), starts, T),
            "Places are counted from 0: the inputs begin at `starts` itself.",
        ),
        Mistake(
            "the starts are sorted first, so the rows come in another order",
            lambda tokens, starts, T: _shift_expected(tokens, np.sort(starts), T),
            "Row b belongs to starts[b]: see the text of the exercise.",
        ),
        Mistake(
            "the windows follow each other from the beginning of the text, and `starts` is not used",
            lambda tokens, starts, T: _shift_expected(tokens, T * np.arange(len(starts)), T),
            "Row b begins at starts[b]: see the text of the exercise.",
        ),
        Mistake(
            "inputs and targets are exchanged",
            lambda tokens, starts, T: _shift_expected(tokens, starts, T)[::-1],
            "The inputs begin at `starts`: see the text of the exercise.",
        ),
        Mistake(
            "every window begins at the first start",
            lambda tokens, starts, T: _shift_expected(tokens, np.full_like(starts, starts[0]), T),
            "Each row of the batch has its own start: see the text of the exercise.",
        ),
        Mistake(
            "the axes are exchanged, positions before windows",
            _columns,
            "The shape is (B, T): one row for each window, see the text of the exercise.",
        ),
    ),
)

# 8.4 The loss, without overflow


def _loss_cases():
    random = np.random.default_rng(84)
    cases = [Case("the case worked by hand", (np.log([[1.0, 3.0]]), np.array([1])))]
    for T, V, spread, shift, label in [
        (3, 4, 1, 0, "small logits"),
        (6, 5, 1, -2000, "logits around -2000"),
        (5, 9, 400, 900, "logits hundreds apart"),
        (7, 7, 3, np.array([0, 3000, -3000, 0, 1500, -800, 60])[:, None], "a different level in each row"),
    ]:
        logits = np.round(8 * (spread * random.standard_normal((T, V)) + shift)) / 8  # exact in float32
        cases.append(Case(f"T={T}, vocabulary {V}, {label}", (logits, random.integers(0, V, T))))
    spike = np.zeros((3, 6))
    spike[0, 4], spike[1, 2] = 1000, -2000
    cases.append(Case("T=3, vocabulary 6, one logit 1000 above the others of its row", (spike, np.array([1, 0, 5]))))
    for label, target in (("the target 720 below the largest", 0), ("the target 720 above the others", 1)):
        cases.append(Case(f"T=1, vocabulary 3, {label}", (np.array([[0.0, 720, 10]]), np.array([target]))))
    return cases


def _loss_expected(logits, targets):
    """The mean of log sum exp(logit - the target's logit), with each largest term taken out first."""
    losses = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        gaps = [logit - row[target] for logit in row]
        losses.append(max(gaps) + math.log(math.fsum(math.exp(gap - max(gaps)) for gap in gaps)))
    return sum(losses) / len(losses)


def _loss(lse=None, reduce=np.mean, sign=1, factor=1.0):
    """The answer to 8.4, or a wrong one that differs from it in the parts that are passed."""

    def answer(logits, targets):
        right = logits[np.arange(len(targets)), targets]
        return factor * sign * reduce((lse or _safe)(logits) - right)

    return answer


def _safe(logits):
    return _from(logits, logits.max(axis=-1))


def _from(logits, reference):
    return reference + np.log(np.exp(logits - reference[:, None]).sum(axis=-1))


def _one_maximum(logits):
    m = logits.max()
    return m + np.log(np.exp(logits - m).sum(axis=-1))


def _sum_of_exp(logits):
    return np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1)


def _maximum_forgotten(logits):
    return np.log(_sum_of_exp(logits))


def _softmax(logits):
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _chance_of(logits, targets):
    return _softmax(logits)[np.arange(len(targets)), targets]


def _guarded(small):
    return lambda logits, targets: -np.mean(np.log(_chance_of(logits, targets) + small))


_LOSS = Exercise(
    number="8.4",
    title="The loss, without overflow",
    outputs=("loss",),
    cases=_loss_cases,
    expected=_loss_expected,
    tolerance=1e-3,  # float32 rounds logits of a few thousand to three digits behind the point
    tried="small logits, logits around -2000, logits hundreds apart, and rows of very different levels",
    mistakes=(
        Mistake(
            "the maximum is not taken off, and large exponentials overflow or all of them vanish",
            _loss(lse=lambda logits: np.log(np.exp(logits).sum(axis=-1))),
            "Take each row's maximum off before the exponential and add it back after the logarithm: see section 4.",
        ),
        Mistake(
            "one maximum serves the whole table, and rows far below it vanish",
            _loss(lse=_one_maximum),
            "Every row needs its own maximum: see section 4.",
        ),
        Mistake(
            "the mean of each row is taken off instead of its maximum, and a logit far above the mean overflows",
            _loss(lse=lambda logits: _from(logits, logits.mean(axis=-1))),
            "Only what is at least as large as every logit keeps every exponential at 1 or below: see section 4.",
        ),
        Mistake(
            "the target's own logit is taken off instead of the maximum, and a logit far above it overflows",
            lambda logits, targets: _loss(lse=lambda logits: _from(logits, logits[np.arange(len(targets)), targets]))(
                logits, targets
            ),
            "Only what is at least as large as every logit keeps every exponential at 1 or below: see section 4.",
        ),
        Mistake(
            "the smallest logit is taken off instead of the largest",
            _loss(lse=lambda logits: _from(logits, logits.min(axis=-1))),
            "The largest one must go, so that no exponential exceeds 1: see section 4.",
        ),
        Mistake(
            "the loss is the logit of the target alone, with its sign turned round",
            _loss(lse=lambda logits: np.zeros(len(logits))),
            "The other tokens count through lse: the loss is lse - logit, see section 4.",
        ),
        Mistake(
            "the loss is lse alone",
            lambda logits, targets: float(np.mean(_from(logits, logits.max(axis=-1)))),
            "The logit of the target is taken off: lse - logit, see section 4.",
        ),
        Mistake(
            "the mean probability of the targets is taken, and then its logarithm",
            lambda logits, targets: float(-np.log(np.mean(_chance_of(logits, targets)))),
            "The mean comes last, over the losses of the positions: see the text of the exercise.",
        ),
        Mistake(
            "the squared error of the probabilities is taken",
            lambda logits, targets: float(np.mean((1 - _chance_of(logits, targets)) ** 2)),
            "The loss is minus the logarithm of the target's probability: see section 4.",
        ),
        Mistake(
            "the loss is the distance of the target's logit from the largest one",
            _loss(lse=lambda logits: logits.max(axis=-1)),
            "All tokens count, by the logarithm of the sum of their exponentials: see section 4.",
        ),
        Mistake(
            "the logarithm of the sum is forgotten",
            _loss(lse=lambda logits: logits.max(axis=-1) + _sum_of_exp(logits)),
            "lse = m + log l: see section 4.",
        ),
        Mistake(
            "the logarithm inside is one to the base 2",
            _loss(lse=lambda logits: logits.max(axis=-1) + np.log2(_sum_of_exp(logits))),
            "Use the natural logarithm, np.log: see the text of the exercise.",
        ),
        Mistake(
            "the logarithm inside is one to the base 10",
            _loss(lse=lambda logits: logits.max(axis=-1) + np.log10(_sum_of_exp(logits))),
            "Use the natural logarithm, np.log: see the text of the exercise.",
        ),
        Mistake(
            "the exponentials are averaged instead of summed",
            _loss(lse=lambda logits: _maximum_forgotten(logits) - np.log(logits.shape[-1]) + logits.max(axis=-1)),
            "lse is the logarithm of a sum: see section 4.",
        ),
        Mistake(
            "1 is added before the logarithm",
            _loss(lse=lambda logits: logits.max(axis=-1) + np.log1p(_sum_of_exp(logits))),
            "The sum holds all tokens already: see section 4.",
        ),
        Mistake(
            "the maximum is taken off once more instead of being added back",
            _loss(lse=lambda logits: _maximum_forgotten(logits) - logits.max(axis=-1)),
            "What was taken off inside is added outside, lse = m + log l: see section 4.",
        ),
        Mistake(
            "lse has its maximum back, and the target's logit still lacks it",
            lambda logits, targets: float(_loss()(logits, targets) + np.mean(logits.max(axis=-1))),
            "Take the logit of the target from the table as it came: see section 4.",
        ),
        Mistake(
            "the logit of the target is added instead of taken off",
            lambda logits, targets: float(np.mean(2 * _safe(logits)) - _loss()(logits, targets)),
            "The loss is lse - logit: see section 4.",
        ),
        Mistake(
            "the first logit of each row is taken instead of that of the target",
            lambda logits, targets: _loss()(logits, 0 * targets),
            "Row by row, pick the logit at `targets`: see hint 2.",
        ),
        Mistake(
            "every row is paired with the targets of all rows",
            lambda logits, targets: float(np.mean(_safe(logits)[:, None] - logits[:, targets])),
            "logits[:, targets] is a table: take one logit from each row, see hint 2.",
        ),
        Mistake(
            "the softmax is taken over the whole table instead of each row",
            lambda logits, targets: (
                -np.mean(
                    np.log(_softmax(logits.reshape(1, -1)).reshape(logits.shape)[np.arange(len(targets)), targets])
                )
            ),
            "Every position has its own softmax, over the vocabulary: see section 4.",
        ),
        Mistake(
            "the loss is 1 minus the probability of the target",
            lambda logits, targets: float(np.mean(1 - _chance_of(logits, targets))),
            "The loss is minus the logarithm of the target's probability: see section 4.",
        ),
        Mistake(
            "the losses of all tokens are averaged, not that of the target alone",
            lambda logits, targets: -np.mean(np.log(_softmax(logits))),
            "Take the logit at `targets` from each row: see hint 2.",
        ),
        Mistake(
            "the loss is the entropy of the prediction, and the targets are not used",
            lambda logits, targets: -np.mean((_softmax(logits) * np.log(_softmax(logits))).sum(axis=-1)),
            "The token that really came decides: take its logit, see section 4.",
        ),
        Mistake(
            "the maximum is taken off and not added back",
            _loss(lse=_maximum_forgotten),
            "lse = m + log l: the unit must come back, see section 4.",
        ),
        Mistake(
            "the logarithm is taken of a probability that has rounded to zero",
            lambda logits, targets: -np.mean(np.log(_chance_of(logits, targets))),
            "Subtract logarithms, lse - logit, instead of taking the logarithm of a quotient: see section 4.",
        ),
        Mistake(
            "the probability is kept above a small number, so that a great error costs little",
            _guarded(1e-9),
            "No guard is needed for lse - logit: see section 4.",
            variants=tuple(map(_guarded, (1e-15, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6))),
        ),
        Mistake(
            "the sign is turned round",
            _loss(sign=-1),
            "The loss is lse - logit, never negative: see section 4.",
        ),
        Mistake(
            "the losses of the positions are summed instead of averaged",
            _loss(reduce=np.sum),
            "Take the mean over the positions: see the text of the exercise.",
        ),
        Mistake(
            "only the last position counts",
            _loss(reduce=lambda losses: losses[-1]),
            "Every position predicts its next token: take the mean over all of them, see section 3.",
        ),
        Mistake(
            "the loss is in bits instead of nats",
            _loss(factor=1 / math.log(2)),
            "Use the natural logarithm: see the text of the exercise.",
        ),
        Mistake(
            "lse is taken over the positions instead of the vocabulary",
            lambda logits, targets: float(
                np.mean(
                    (logits.max(axis=0) + np.log(np.exp(logits - logits.max(axis=0)).sum(axis=0)))[targets]
                    - logits[np.arange(len(targets)), targets]
                )
            ),
            "The tokens of the vocabulary compete, along the last axis: see section 4.",
        ),
        Mistake(
            "the logit of the likeliest token is taken instead of that of the target",
            lambda logits, targets: float(np.mean(_loss(reduce=lambda x: x)(logits, logits.argmax(axis=-1)))),
            "Take the logit at `targets`, likely or not: see section 4.",
        ),
    ),
)

EXERCISES = (_LAYER, _KEPT, _SHIFT, _LOSS)
