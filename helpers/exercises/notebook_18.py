"""The exercises of notebook 18: segments, logits of a tile, kinds of tiles, a packed loop, a cap, a sink, masks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention import online_softmax
from helpers.attention.extras import check_function
from helpers.attention.portable.tiles import dot, real, whole
from helpers.environment import backend
from helpers.exercises.again import OF_HEADS, by_hand
from helpers.exercises.exercise import Case, Complaint, Exercise
from helpers.exercises.notebook_04 import ACCUMULATE
from helpers.exercises.notebook_05 import expected_forward, run_forward


def segment_ids(lengths, T):
    """The document of each token, int (T,); padding has the number after the last."""
    padding = T - sum(lengths)
    return np.repeat(np.arange(len(lengths) + 1), [*lengths, padding])


SEGMENTS = Exercise(segment_ids, "Whose token is it?", outputs=("ids",), tolerance=1e-9).with_cases(
    "lengths T", ("the case worked by hand", [2, 1], 5), ([3], 3), ([1, 1, 4], 6), ([2, 5, 3], 16), ([4], 9),
    ([7, 1, 2, 6], 20),
).with_mistakes(
    ("padding belongs to the last document", (") + 1)", "*lengths, padding"),
     ("))", "*lengths[:-1], lengths[-1] + padding"),
     "Padding gets a number of its own, so that no document sees it: see section 1."),
    ("padding has the number of the first document", "np.arange(len(lengths) + 1)", "[*range(len(lengths)), 0]",
     "Equal numbers see each other, wherever they stand: give padding a new one."),
    ("each token has its position in its document", "np.repeat(np.arange(len(lengths) + 1), [*lengths, padding])",
     "np.concatenate([np.arange(length) for length in [*lengths, padding]])",
     "Positions count within a document. A segment id is the same for all of its tokens."),
)  # fmt: skip


def tile_logits(q, k, scale, bias, cap, seen):
    """Logits, bias, seen: (block_q, block_k). q: (block_q, H), k: (block_k, H)."""
    s = scale * (q @ k.T) + bias
    s = cap * np.tanh(s / cap)
    return np.where(seen, s, -np.inf)


def _tile_cases():
    one = lambda *values: np.array([values], float)
    by_hand = (one(1), one(0, 4, 1).T, 1.0, one(1, 0, 2), 2.0, np.array([[True, True, False]]))
    yield Case("the case worked by hand", by_hand)
    random = np.random.default_rng(182)
    for block_q, block_k, H, scale, cap, size in [(2, 3, 4, 0.5, 1.5, 1), (4, 2, 3, 0.25, 30, 40), (3, 5, 2, 2, 5, 9)]:
        q, k = size * random.standard_normal((block_q, H)), random.standard_normal((block_k, H))
        bias = random.standard_normal((block_q, block_k))
        seen = random.random((block_q, block_k)) < 0.6
        seen[0, :2] = True, False
        yield Case(f"block_q={block_q}, block_k={block_k}, H={H}, cap={cap}", (q, k, scale, bias, cap, seen))


TILE = Exercise(tile_logits, "The logits of a tile", outputs=("s",), cases=_tile_cases).with_mistakes(
    ("the mask comes before the soft cap, which turns -inf into -cap",
     ("s = cap * np.tanh(s / cap)", "return np.where(seen, s, -np.inf)"),
     ("s = np.where(seen, s, -np.inf)", "return cap * np.tanh(s / cap)"),
     "tanh(-inf) is -1, so a hidden key gets a weight again: mask last, see section 2."),
    ("the bias is added after the soft cap", (" + bias", "cap * np.tanh(s / cap)"),
     ("", "cap * np.tanh(s / cap) + bias"), "The cap holds for product and bias together: see section 2."),
    ("the bias is scaled as well", "scale * (q @ k.T) + bias", "scale * (q @ k.T + bias)",
     "The scale belongs to the products alone: see section 2."),
)  # fmt: skip


def segment_kinds(ids, block):
    """Kinds of the tiles of a row, int (tiles, tiles): 0 hidden, 1 partial, 2 full."""
    tiles = ids.reshape(len(ids) // block, block)
    least, most = tiles.min(axis=1), tiles.max(axis=1)
    some = (least[:, None] <= most) & (least <= most[:, None])
    alone = least == most
    every = some & alone[:, None] & alone
    return some.astype(int) + every


KINDS = Exercise(segment_kinds, "Kinds of tiles from two numbers", outputs=("kinds",), tolerance=1e-9).with_cases(
    "ids block", ("the case worked by hand", np.array([0, 0, 0, 1, 1, 1]), 2),
    *((f"documents of {lengths}, block={block}", segment_ids(lengths, sum(lengths)), block) for lengths, block in
      (([4, 4, 8], 4), ([1, 1, 1, 9], 3), ([5, 11], 4), ([20], 5), ([2, 3, 1, 6, 4, 8], 4))),
).with_mistakes(
    ("tiles are compared by their first numbers only", "(least[:, None] <= most) & (least <= most[:, None])",
     "least[:, None] == least",
     "A tile may begin in one document and end in another: two ranges must overlap, see section 3."),
    ("a tile counts as full as soon as its ranges are equal", "some & alone[:, None] & alone",
     "(least[:, None] == least) & (most[:, None] == most)",
     "Two documents in both tiles leave pairs that do not see each other."),
    ("a tile in one document counts as full against any other", "some & alone", "alone",
     "It must be the same document for both tiles."),
)  # fmt: skip


def packed_attention(q, k, v, ids, block):
    """(out (T, H), tiles visited): causal within documents; skips hidden tiles."""
    (T, H), visited, out = q.shape, 0, np.zeros(q.shape)
    for start in range(0, T, block):
        i = np.arange(start, min(start + block, T))
        m, l, acc = np.full(len(i), -np.inf), np.zeros(len(i)), np.zeros((len(i), H))
        for first in range(0, T, block):
            j = np.arange(first, min(first + block, T))
            seen = (j <= i[:, None]) & (ids[j] == ids[i][:, None])
            if not seen.any():
                continue
            visited += 1
            s = np.where(seen, q[i] @ k[j].T / np.sqrt(H), -np.inf)
            m_new = np.maximum(m, s.max(axis=1))
            reference = np.where(m_new == -np.inf, 0, m_new)
            alpha, p = np.exp(m - reference), np.exp(s - reference[:, None])
            l, m = alpha * l + p.sum(axis=1), m_new
            acc = alpha[:, None] * acc + p @ v[j]
        out[i] = acc / l[:, None]
    return out, visited


def _packed_cases():
    one = lambda *values: np.array(values, float)[:, None]
    by_hand = (one(1, 1, 1, 1), np.log(one(1, 3, 1, 3)), one(4, 8, 0, 4), np.array([0, 0, 0, 1]), 2)
    yield Case("the case worked by hand", by_hand)
    random = np.random.default_rng(184)
    for lengths, H, block, size, about in [
        ((3, 5), 2, 2, 1, ""), ((4, 4, 4), 3, 4, 1, ""), ((1, 9, 3), 4, 5, 8, ""),
        ((2, 6, 7), 2, 4, 900, ", large logits"), ((5, 2), 2, 3, -900, ", all logits far below 0"),
    ]:  # fmt: skip
        T = sum(lengths)
        q, k, v = random.standard_normal((3, T, H))
        if size < 0:
            q, k = np.abs(q), 1 + np.abs(k)
        label = f"documents of {list(lengths)}, H={H}, block={block}{about}"
        yield Case(label, (size * q, k, v, segment_ids(lengths, T), block))
    far = np.ones((7, 1)), -1e5 + np.arange(7.0)[:, None] % 4, v[:7, :1], segment_ids((5, 2), 7), 3
    yield Case("documents of [5, 2], H=1, block=3, logits near -100000", far)


PACKED = Exercise(
    packed_attention, "A loop for packed documents", outputs=("out", "visited"), cases=_packed_cases,
).with_mistakes(
    ("a row that sees no key in its first tile becomes NaN", "np.where(m_new == -np.inf, 0, m_new)", "m_new",
     "Its maximum is still -inf, and -inf minus -inf is NaN: take 0 for it then, see hint 2."),
    ("tiles are skipped for the causal mask alone", "not seen.any()", "first > i[-1]",
     "Tiles of other documents can be skipped as well: see section 3."),
    ("a tile is skipped unless all of it is seen", "not seen.any()", "not seen.all()",
     "Partial tiles must be visited, and masked: see section 3."),
)  # fmt: skip


def products_gradient(p, dp, delta, s, cap):
    """Gradient of the scaled products, (block_q, block_k). s: logits after the cap."""
    ds = p * (dp - delta[:, None])
    return ds * (1 - (s / cap) ** 2)


def _cap_cases():
    one = lambda value: np.array([[value]], float)
    yield Case("the case worked by hand", (one(0.5), one(5), np.array([1.0]), one(1), 2.0))
    random = np.random.default_rng(185)
    for block_q, block_k, cap, size in [(2, 3, 1.5, 1), (4, 2, 50.0, 60), (3, 5, 5.0, 9)]:
        s = cap * np.tanh(size * random.standard_normal((block_q, block_k)) / cap)
        dp, delta = random.standard_normal((block_q, block_k)), random.standard_normal(block_q)
        p = random.random((block_q, block_k))
        yield Case(f"block_q={block_q}, block_k={block_k}, cap={cap}", (p, dp, delta, s, cap))


CAP = Exercise(products_gradient, "Back through the cap", outputs=("gradient",), cases=_cap_cases).with_mistakes(
    ("the capped logits are capped once more", "(s / cap)", "np.tanh(s / cap)",
     "s is capped already, so s / cap is the tanh: see section 4."),
)  # fmt: skip


def add_sinks(out, lse, sinks):
    """(out, lse) with a sink for each head. out (T, N, H), lse (T, N), sinks (N,)."""
    new = np.logaddexp(lse, sinks)
    return out * np.exp(lse - new)[..., None], new


def _sink_cases():
    yield Case("the case worked by hand", (np.full((1, 1, 1), 8.0), np.array([[math.log(3)]]), np.array([0.0])))
    random = np.random.default_rng(186)
    for T, N, H, size, about in [
        (3, 2, 4, 1, ""), (4, 3, 2, 2, ", a query without a key"), (2, 4, 3, 900, ", far from 0"),
    ]:  # fmt: skip
        out, lse, sinks = random.standard_normal((T, N, H)), random.standard_normal((T, N)), random.standard_normal(N)
        if "without" in about:
            out[1], lse[1] = 0, -np.inf
        level = size * np.where(np.arange(N) % 2, 1, -1)
        yield Case(f"T={T}, N={N}, H={H}{about}", (out, lse + level, sinks + np.where(np.arange(N) < 2, level, -level)))


SINKS = Exercise(
    add_sinks, "Add a sink afterwards", outputs=("out", "lse"), cases=_sink_cases, tolerance=1e-4,
).with_mistakes(
    ("the sum is formed outside of the logarithm, where it overflows", "np.logaddexp(lse, sinks)",
     "np.log(np.exp(lse) + np.exp(sinks))", "`np.logaddexp` adds without leaving the logarithm."),
    ("the keys get the share of the sink", "lse - new", "sinks - new",
     "The share of the keys is exp(lse) by the new sum: see section 5."),
    ("lse is left as it was", ", new\n", ", lse\n", "The sum has grown by the sink, and lse with it: see section 5."),
)  # fmt: skip


def windows_by_head(b, n, i, j):
    """Whether query i of head n sees key j: the last 16 · 2^n keys, and the first 4."""
    near = i - j < 16 * 2**n
    return (j <= i) & (near | (j < 4))


def _run_window(answer, b, n, i, j):
    seen = np.asarray(answer(b, n, i, j))
    if seen.dtype != bool:
        raise Complaint(f"expected booleans, got {seen.dtype}: combine conditions with & and |")
    try:
        check_function("mask_mod", answer)
    except TypeError:
        raise Complaint("a kernel cannot have it inside: use operators only, also on n") from None
    return np.broadcast_to(seen, (len(i), len(j))).astype(int)


WINDOW = Exercise(
    windows_by_head, "A window for each head", outputs=("seen",), run=_run_window, tolerance=1e-9,
).with_cases(
    "b n i j", ("all pairs of 7 tokens, head 0", 0, 0, np.arange(7)[:, None], np.arange(7)),
    *((f"queries from {i}, keys from {j}, head {n}", 1, n, i + np.arange(24)[:, None], j + np.arange(32))
      for i, j, n in ((40, 0, 0), (40, 16, 1), (64, 32, 0), (100, 32, 2), (0, 64, 1), (200, 60, 3))),
).with_mistakes(
    ("all heads have the window of head 0", "2**n", "1", "The window doubles from head to head."),
    ("the first keys are not seen from afar", "(near | (j < 4))", "near", "The first 4 keys stay visible for all."),
    ("the first keys escape the causal mask", "(j <= i) & (near | (j < 4))", "((j <= i) & near) | (j < 4)",
     "Query 0 must not see key 3: the causal condition holds for both."),
)  # fmt: skip


def masked_forward(q, k, v, mask_mod, block_q=64, block_k=64):
    """out (B, T, N, H), lse (B, N, T); mask_mod(b, n, i, j): does i see j?"""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    group, head_padded = N // K, max(16, pl.next_power_of_2(H))

    def kernel(q_ref, k_ref, v_ref, out_ref, lse_ref):
        i, n, b = (pl.program_id(axis) for axis in range(3))
        rows = i * block_q + jnp.arange(block_q)
        q = real(q_ref[...], rows < T, H)

        def one_key_tile(j, state):
            cols = j * block_k + jnp.arange(block_k)
            inside = (rows < T)[:, None] & (cols < S)
            seen = inside & mask_mod(b, n, rows[:, None], cols[None, :])

            def visit(state):
                m, l, acc = state
                tile = pl.ds(j * block_k, block_k)
                k, v = (real(ref[tile, :], cols < S, H) for ref in (k_ref, v_ref))
                s = jnp.where(seen, dot(q, k.T) / math.sqrt(H), -jnp.inf)
                m, l, alpha, p = online_softmax.step(m, l, s, exp=jnp.exp)
                return m, l, alpha[:, None] * acc + dot(p.astype(v.dtype), v)

            some = jnp.where(seen, 1, 0).max() == 1
            return lax.cond(some, visit, lambda state: state, state)

        state = jnp.full(block_q, -jnp.inf), jnp.zeros(block_q), jnp.zeros(q.shape)
        state = lax.fori_loop(0, pl.cdiv(S, block_k), one_key_tile, state)
        out, lse_ref[...] = online_softmax.finish(*state, log=jnp.log, log_e=1)
        out_ref[...] = out.astype(out_ref.dtype)

    block = lambda rows, place: pl.BlockSpec((None, rows, None, head_padded), place)
    query_tile = block(block_q, lambda i, n, b: (b, i, n, 0))
    keys = block(whole(S, block_k), lambda i, n, b: (b, 0, n // group, 0))
    row_tile = pl.BlockSpec((None, None, block_q), lambda i, n, b: (b, n, i))
    specs = dict(in_specs=[query_tile, keys, keys], out_specs=[query_tile, row_tile])
    grid = pl.cdiv(T, block_q), N, B
    out_shape = [q, jax.ShapeDtypeStruct((B, N, T), jnp.float32)]  # out is like q
    return pl.pallas_call(kernel, out_shape, grid=grid, **specs, **backend())(q, k, v)


MASKS = {
    "j - i in 0 to 9": lambda b, n, i, j: (i <= j) & (j < i + 10),
    "causal documents of 12": lambda b, n, i, j: (j <= i) & (i // 12 == j // 12),
    "windows by head": windows_by_head,
    "odd queries see none, the others all, in entry 1 the first 16": lambda b, n, i, j: (
        (i % 2 == 0) & (j < jnp.where(b == 1, 16, 40))
    ),
    "the first 3 keys, from query 24 and from key 40 on all": lambda b, n, i, j: (j < 3) | (i >= 24) | (j >= 40),
}


def _masked_cases():
    """Arguments (q, k, v, mask_mod, block_q, block_k); without block sizes, those that the answer has by itself."""
    column = lambda *numbers: np.array(numbers, np.float32).reshape(1, -1, 1, 1)
    by_hand = column(1, 1), column(0, 0, 0), column(1, 3, 5), lambda b, n, i, j: (i == 1) & (j < 2), 2, 2
    yield Case("the case worked by hand", by_hand)
    random = np.random.default_rng(188)
    for (B, T, S, N, K, H), name, blocks, dtype, push in [
        ((1, 24, 40, 2, 1, 4), "j - i in 0 to 9", (8, 16), np.float32, 0),
        ((1, 32, 32, 4, 2, 5), "causal documents of 12", (16, 8), np.float32, 60),
        ((1, 40, 40, 2, 1, 8), "windows by head", (16, 8), np.float32, -200),
        ((2, 17, 37, 1, 1, 3), "odd queries see none, the others all, in entry 1 the first 16", (8, 16), np.float32, 0),
        ((1, 20, 40, 2, 1, 8), "the first 3 keys, from query 24 and from key 40 on all", (16, 16), jnp.bfloat16, 0),
        ((1, 70, 90, 2, 1, 8), "the first 3 keys, from query 24 and from key 40 on all", (), np.float32, 0),
    ]:
        q, k, v = (random.standard_normal((B, length, heads, H)) for length, heads in ((T, N), (S, K), (S, K)))
        q[..., 0] = math.sqrt(H)  # so that the first component of k moves the logits
        k[..., 0] += push * np.linspace(0.8, 1, S)[None, :, None]
        sizes = dict(T=T, S=S, N=N, K=K, H=H, B=B) | dict(zip(("block_q", "block_k"), blocks, strict=False))
        said = [jnp.dtype(dtype).name, name] + ["your default blocks, not replayed but run"] * (not blocks)
        label = ", ".join([f"{name}={value}" for name, value in sizes.items()] + said)
        yield Case(label, (*(array.astype(dtype) for array in (q, k, v)), MASKS[name], *blocks))


MASKED = Exercise(
    masked_forward, "A mask in your kernel", outputs=("out", "lse", "how it was made"), cases=_masked_cases,
    run=functools.partial(run_forward, masked_forward, "mask_mod"), tolerance=1e-4, slow=True,
    expected=functools.partial(expected_forward, "mask_mod"), building_block="masks",
).with_mistakes(
    ("no tile is skipped", "lax.cond(some, visit, lambda state: state, state)", "visit(state)",
     "Load keys only where the tile has a visible pair: see section 3."),
    ("a tile is skipped unless all of it is seen", "1, 0).max()", "1, 0).min()",
     "Partial tiles must be visited, and masked: see section 3."),
    ("the mask decides which tiles are visited, and hides nothing within them", "(seen, dot",
     "((cols < S)[None, :], dot", "In a partial tile the hidden pairs need the logit -inf: see section 2."),
    *by_hand((
        "a query that has seen no key yet becomes NaN", "jnp.where(m_new == -jnp.inf, 0, m_new)", "m_new",
        "Its maximum is still -inf, and -inf minus -inf is NaN: take 0 for it then, see exercise 18.4.")),
    *OF_HEADS, ACCUMULATE.mistakes[2],
    ("mask_mod gets queries and keys the other way round", "rows[:, None], cols[None, :]",
     "cols[None, :], rows[:, None]", "i is the query and j the key: see section 6."),
)  # fmt: skip

EXERCISES = (SEGMENTS, TILE, KINDS, PACKED, CAP, SINKS, WINDOW, MASKED)
