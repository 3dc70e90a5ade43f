"""The exercises of notebook 05.

Kernels are replayed here on every device, but for the case without block sizes: the small cases need
tiles that a GPU rejects, a wrong index must do no harm, and a verdict must not depend on the hardware.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention.reference import oracle
from helpers.environment import backend
from helpers.exercises import tile_bounds, whole
from helpers.exercises.again import OF_A_STATE, OF_HEADS, OF_ROWS, OF_THE_END
from helpers.exercises.exercise import Case, Exercise, shaped
from helpers.exercises.notebook_04 import blocks_of
from helpers.exercises.watched import without
from helpers.instruments import cost

log2_e = math.log2(math.e)


def tile_range(i, T, S, block_q, block_k, left=None):
    """(first, stop) of the key tiles that query tile i needs. left may be None."""
    q_start, q_stop = i * block_q, min((i + 1) * block_q, T)
    first_key = 0 if left is None else max(q_start - left, 0)
    stop_key = min(q_stop, S)
    if first_key >= stop_key:
        return 0, 0
    return first_key // block_k, -(-stop_key // block_k)


BOUNDS = Exercise(
    tile_range, "The bounds of the loop", outputs=("(first, stop)",), run=tile_bounds.run,
    judge=tile_bounds.OVER_KEYS.judge,
).with_cases(
    "query_tile T S block_q block_k left",
    (0, 64, 64, 32, 16, None), (1, 64, 64, 32, 16, None), (1, 64, 64, 16, 32, None), (2, 48, 48, 16, 32, None),
    (2, 40, 128, 16, 8, None), (1, 33, 48, 32, 16, None), (3, 128, 40, 32, 16, None), (3, 128, 33, 32, 16, None),
    (3, 128, 128, 32, 16, 17), (2, 96, 96, 32, 64, 0), (4, 100, 70, 16, 16, 30), (6, 128, 40, 16, 16, 8),
    (3, 128, 40, 16, 16, 8),  # the window has just left the keys behind
    (8, 256, 100, 16, 16, 24), (4, 256, 100, 32, 16, 28), (2, 100, 7, 4, 8, 0), (2, 7, 7, 3, 2, 1),
    (1, 6, 6, 2, 1, None), (0, 6, 6, 2, 1, 3), (1, 50, 50, 12, 8, 3),
).with_mistakes(
    ("stop is measured from the first query of the tile instead of the last (too few tiles)",
     "min(q_stop, S)", "min(q_start + 1, S)", "The last query of the tile sees furthest: reread section 5."),
    ("left = 0 is taken for no window (too many tiles)", "0 if left is None", "0 if not left",
     "With left = 0 a query sees its own key alone; only None means no limit: see the text of the exercise."),
    ("whether a window has left the keys behind is not asked, or asked in tiles", "first_key >= stop_key",
     "first_key // block_k >= -(-stop_key // block_k)", "Ask it in keys, before you divide."),
    ("first is measured from the last query of the tile instead of the first (too few tiles)", "q_start - left",
     "q_stop - 1 - left", "The first query of the tile sees furthest to the left: see the text of the exercise."),
)  # fmt: skip


def key_block(i, n, b, N, K):
    """The block of k (B, S, K, H) for query tile i of query head n in batch entry b."""
    group = N // K
    return b, 0, n // group, 0


def _run_gqa(answer, B, T, S, N, K, H):
    """(i, n, b) of each program, in tiles of two queries, and the four indices of the block that it asks for."""
    grid = T // 2, N, B
    blocks = blocks_of(lambda i, n, b: answer(i, n, b, N, K), grid, ("batch", "keys", "head", "dimension"))
    return np.hstack([np.array(list(np.ndindex(grid))), blocks])


def _judge_gqa(result, case):
    _, _, _, N, K, _ = case.arguments
    for i, n, b, *block in result.tolist():
        right = [b, 0, n // (N // K), 0]
        if block != right:
            return f"program (i={i}, n={n}, b={b}) reads block {tuple(block)} of k, expected {tuple(right)}"
    return None


GQA = Exercise(
    key_block, "The index map of grouped queries", outputs=("blocks",), run=_run_gqa, judge=_judge_gqa,
).with_cases(
    "B T S N K H", (1, 2, 3, 6, 2, 2), (2, 4, 3, 4, 2, 3), (2, 2, 5, 3, 1, 2), (2, 4, 2, 3, 3, 2),
).with_mistakes(
    *OF_HEADS, ("n is not divided", "n // group", "n", "N // K query heads share a key head: see section 7."),
)  # fmt: skip


def finish(m, l, acc):
    """(out, lse) of a state in base two. m, l: (block_q,), acc: (block_q, H)."""
    l = jnp.where(l == 0, 1, l)
    lse = (m + jnp.log2(l)) / log2_e
    return acc / l[:, None], lse


def _finish_cases():
    random = np.random.default_rng(52)
    yield Case("the case worked by hand", tuple(map(np.float32, ([1, -np.inf], [1.5, 0], [[3, 6], [0, 0]]))))
    for rows, H, shift, empty in [(4, 2, 0, [1]), (9, 5, 300, []), (16, 16, -300, [0, 7, 15])]:
        m = shift + 4 * random.standard_normal(rows)
        l = 1 + 9 * random.random(rows)
        acc = random.standard_normal((rows, H)) * l[:, None]
        m[empty], l[empty], acc[empty] = -np.inf, 0, 0
        label = f"{rows} rows, H={H}, m near {shift}, {len(empty)} of them without a key"
        yield Case(label, tuple(map(np.float32, (m, l, acc))))


def _run_finish(answer, *state):
    state = [jnp.asarray(array) for array in state]
    jax.eval_shape(answer, *state)  # traced, as it is within a kernel
    return shaped(answer(*state), {"out": state[2].shape, "lse": state[0].shape})


FINISH = Exercise(
    finish, "The end of the kernel", outputs=("out", "lse"), cases=_finish_cases, run=_run_finish,
).with_mistakes(
    ("m in base 2 is added to a natural logarithm of l", "(m + jnp.log2(l)) / log2_e", "m + jnp.log(l)",
     "Both terms must have one base: see the last equation of section 8."),
    *OF_THE_END,
)  # fmt: skip


def causal_bytes(T, H, itemsize, block_q, block_k):
    """Bytes that a causal forward kernel moves for one head of T queries and T keys."""
    once = 2 * T * H * itemsize + 4 * T
    tiles = 0
    for i in range(T // block_q):
        tiles += -(-(i + 1) * block_q // block_k)
    return once + 2 * tiles * block_k * H * itemsize


BYTES = Exercise(
    causal_bytes, "The bytes of a causal kernel", outputs=("bytes",), run=functools.partial(without, cost),
).with_cases(
    "T H itemsize block_q block_k", (4, 2, 4, 2, 2), (12, 4, 2, 3, 2), (12, 3, 4, 2, 3), (30, 8, 2, 6, 5),
    (64, 32, 2, 16, 32), (128, 64, 2, 64, 16), (256, 128, 4, 32, 32), (192, 16, 2, 32, 64),
).with_mistakes(
    ("no tile of keys is skipped", "-(-(i + 1) * block_q // block_k)", "T // block_k",
     "Query tile i stops at the diagonal: see the picture of section 5."),
    ("program i is charged i + 1 tiles, which holds only when block_q equals block_k",
     "-(-(i + 1) * block_q // block_k)", "i + 1",
     "Find the last key that the program sees, then divide by block_k: see section 5."),
    ("lse is counted in the dtype of the inputs", "4 * T", "itemsize * T",
     "lse is float32 whatever the inputs are: see section 10."),
    ("the bytes of v are left out, or those of k", "2 * tiles", "tiles", "Each tile of keys has its values beside it."),
    ("out is left out, or q", "2 * T * H", "T * H", "q is read and out is written, each once: see the hand case."),
)  # fmt: skip


def forward(q, k, v, is_causal=False, block_q=64, block_k=64):
    """out (B, T, N, H) and lse (B, N, T) of q (B, T, N, H) and k, v (B, S, K, H)."""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    group, head_padded = N // K, max(16, pl.next_power_of_2(H))
    dot = functools.partial(lax.dot, preferred_element_type=jnp.float32)

    def kernel(q_ref, k_ref, v_ref, out_ref, lse_ref):
        in_head = jnp.arange(head_padded) < H
        q = jnp.where(in_head, q_ref[...], 0)
        q_start = pl.program_id(0) * block_q
        rows = q_start + jnp.arange(block_q)
        stop = jnp.minimum(q_start + block_q, min(T, S)) if is_causal else S

        def one_key_tile(j, state):
            m, l, acc = state
            tile = pl.ds(j * block_k, block_k)
            cols = j * block_k + jnp.arange(block_k)
            inside = (cols < S)[:, None] & in_head
            k, v = (jnp.where(inside, ref[tile, :], 0) for ref in (k_ref, v_ref))
            seen = (cols < S) & (cols <= rows[:, None]) if is_causal else cols < S
            s = jnp.where(seen, dot(q, k.T) / math.sqrt(H), -jnp.inf)
            m_new = jnp.maximum(m, s.max(axis=1))
            alpha = jnp.exp(m - m_new)
            p = jnp.exp(s - m_new[:, None])
            l = alpha * l + p.sum(axis=1)
            acc = alpha[:, None] * acc + dot(p.astype(v.dtype), v)
            return m_new, l, acc

        state = jnp.full(block_q, -jnp.inf), jnp.zeros(block_q), jnp.zeros(q.shape)
        m, l, acc = lax.fori_loop(0, pl.cdiv(stop, block_k), one_key_tile, state)
        out_ref[...] = (acc / l[:, None]).astype(out_ref.dtype)
        lse_ref[...] = m + jnp.log(l)

    keys_padded = pl.cdiv(S, block_k) * block_k
    block = lambda rows, place: pl.BlockSpec((None, rows, None, head_padded), place)
    query_tile = block(block_q, lambda i, n, b: (b, i, n, 0))
    keys = block(keys_padded, lambda i, n, b: (b, 0, n // group, 0))
    row_tile = pl.BlockSpec((None, None, block_q), lambda i, n, b: (b, n, i))
    specs = dict(in_specs=[query_tile, keys, keys], out_specs=[query_tile, row_tile])
    grid = pl.cdiv(T, block_q), N, B
    out_shape = [q, jax.ShapeDtypeStruct((B, N, T), jnp.float32)]  # out is like q
    return pl.pallas_call(kernel, out_shape, grid=grid, **specs, **backend())(q, k, v)


def _forward_cases():
    """Arguments (q, k, v, is_causal, block_q, block_k); without block sizes, those that the answer has by itself."""
    by_hand = map(np.float32, ([[1]], np.log([[1.0], [3.0], [2.0], [8.0]]), [[1], [2], [3], [4]]))
    yield Case("the case worked by hand", (*(array[None, :, None] for array in by_hand), False, 1, 2))
    random = np.random.default_rng(55)
    for (B, T, S, N, K, H), is_causal, blocks, dtype, label, push in [
        ((1, 16, 32, 2, 1, 4), False, (8, 16), np.float32, "the largest logits last", (0, 20)),
        ((2, 12, 21, 4, 2, 5), True, (8, 16), np.float32, "masked logits far above the rest", (0, 120)),
        ((1, 37, 20, 3, 3, 16), True, (16, 8), np.float32, "the largest logits first, 200 above the rest", (200, 0)),
        ((1, 20, 40, 6, 2, 3), False, (16, 8), np.float32, "large logits for some queries, far below 0 for others",
         (90, 150, 120, 100, 140)),
        ((2, 36, 45, 4, 2, 8), True, (16, 8), jnp.bfloat16, "", (0,)),
        ((1, 5, 3, 2, 2, 20), True, (8, 16), np.float32, "shorter than a tile", (3,)),
        ((1, 24, 40, 2, 1, 8), False, (8, 16), jnp.bfloat16, "all far below 0, a part in common", (-400, -350)),
        ((2, 100, 90, 4, 2, 20), True, (), np.float32, "your default blocks, not replayed but run", (3,)),
    ]:  # fmt: skip
        q, k, v = (random.standard_normal((B, length, heads, H)) for length, heads in ((T, N), (S, K), (S, K)))
        # The first component of q is 1 / scale, so that of k moves the logits of a part of the keys.
        q[..., 0] = math.sqrt(H) * ((-1) ** np.arange(T)[None, :, None] if "others" in label else 1)
        k[..., 0] += np.repeat(push, -(-S // len(push)))[None, :S, None]
        v += 3 * ("common" in label)
        sizes = dict(T=T, S=S, N=N, K=K, H=H, B=B) | dict(zip(("block_q", "block_k"), blocks, strict=False))
        said = ["causal" if is_causal else "no mask", jnp.dtype(dtype).name, *filter(None, [label])]
        label = ", ".join([f"{name}={value}" for name, value in sizes.items()] + said)
        yield Case(label, (*(array.astype(dtype) for array in (q, k, v)), is_causal, *blocks))


def run_forward(ours, mask, answer, *arguments):
    """out, lse, and how they were made, of a kernel beside ours. mask: the name of its fourth argument."""
    dtypes, right = {"out": arguments[0].dtype, "lse": jnp.float32}, expected_forward(mask, *arguments)[:2]
    return whole.results(answer, ours, arguments, dtypes, right, arguments[4:])


def expected_forward(mask, q, k, v, seen, *_):
    out, lse = oracle(q, k, v, **{mask: seen})
    return out, lse.swapaxes(1, 2), whole.AS_ASKED


FORWARD = Exercise(
    forward, "The forward kernel, whole", outputs=("out", "lse", "how it was made"), cases=_forward_cases,
    run=functools.partial(run_forward, forward, "is_causal"), expected=functools.partial(expected_forward, "is_causal"),
    tolerance=1e-4, building_block="forward", slow=True,
).with_mistakes(
    *OF_A_STATE, *OF_HEADS, *OF_ROWS,
    ("the causal mask is missing", " & (cols <= rows[:, None])", "",
     "Skipping tiles is not enough: in those on the diagonal the keys after a query get −∞, see section 5."),
    ("values past the end are multiplied by weights of 0", "(inside, ref", "(inside | (ref is v_ref), ref",
     "What lies there may be NaN, and 0 · NaN is NaN: replace it by 0 before the product, see section 6."),
    ("the block of the keys ends with the array, and the last slice is moved back into it",
     "keys_padded = pl.cdiv(S, block_k) * block_k", "keys_padded = S",
     "Make the block a whole number of tiles long, so that it reaches past the end: see section 6."),
)  # fmt: skip

EXERCISES = (BOUNDS, GQA, FINISH, BYTES, FORWARD)
