"""The whole backward pass, exercises 7.7 to 7.9 of notebook 07, which reads them from here."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention.portable.tiles import dot, real, whole
from helpers.attention.reference import oracle, oracle_gradients
from helpers.environment import backend
from helpers.exercises.again import OF_HEADS, OF_ROWS
from helpers.exercises.comparing import describe
from helpers.exercises.exercise import Case, Complaint, Exercise
from helpers.exercises.notebook_05 import forward
from helpers.exercises.whole import AS_ASKED, bytes_read, results, watched

HAND = [np.float32(array).reshape(1, -1, 1, 1) for array in (1, np.log([1, 3]), [2, 6], 2)]
# What the two bodies share, p and ds of a pair of tiles, and the slips in it
OF_A_PAIR = (
    ("delta is missing from ds", " - delta[:, None]", "", "ds = p (dp - delta): see the equations of section 1."),
    ("delta is summed over this tile of keys alone", "delta[:, None]", "(p * dp).sum(axis=1, keepdims=True)",
     "delta is a sum over all keys, and arrives ready made: see section 2."),
    ("p is a power of two of natural logits", "jnp.exp", "jnp.exp2",
     "With exp2, both s and lse are multiplied by log2 e: see the box of section 2."),
    ("p is a softmax over this tile instead of over all keys", "jnp.exp(s - lse[:, None])", "jax.nn.softmax(s)",
     "lse is already the log-sum-exp over all keys, so p = exp(s - lse): see the equations of section 1."),
    ("the scale is missing from the logits", "s = scale * ", "s = ",
     "p = exp(scale q kᵀ - lse), as in the forward pass: see the equations of section 1."),
    ("s and lse are exponentiated apart, as in exp(s) / exp(lse), where both may overflow or vanish",
     "jnp.exp(s - lse[:, None])", "jnp.exp(s) / jnp.exp(lse)[:, None]",
     "Subtract before you exponentiate, p = exp(s - lse): see the equations of section 1."),
    ("the scale enters the logits twice", "s = scale * ", "s = scale * scale * ", "Scale q or the product, not both."),
    ("p is missing from ds", "ds = p * ", "ds = ", "ds = p (dp - delta): see the equations of section 1."),
    ("lse and delta are taken by key instead of by query", "[:, None]", "[None, :]",
     "Both have an entry for each query, so they need a second axis, lse[:, None]: see section 2."),
)  # fmt: skip


def key_gradients(q, k, v, do, lse, delta, is_causal=False, block_q=64, block_k=64):
    """dk, dv (B, S, K, H) of do (B, T, N, H), by lse and delta (B, N, T), float32."""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    group, head_padded = N // K, max(16, pl.next_power_of_2(H))
    scale = 1 / math.sqrt(H)

    def kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref):
        k_start = pl.program_id(0) * block_k
        cols = k_start + jnp.arange(block_k)
        k, v = (real(ref[...], cols < S, H) for ref in (k_ref, v_ref))
        first = k_start // block_q if is_causal else 0

        def one_query_tile(step, gradients):
            dk, dv = gradients
            i, n = lax.div(step, group), lax.rem(step, group)
            tile = pl.ds(i * block_q, block_q)
            rows = i * block_q + jnp.arange(block_q)
            q, do = (real(ref[tile, n, :], rows < T, H) for ref in (q_ref, do_ref))
            lse = jnp.where(rows < T, lse_ref[n, tile], 0)
            delta = jnp.where(rows < T, delta_ref[n, tile], 0)
            s = scale * dot(q, k.T)
            p = jnp.exp(s - lse[:, None])
            p = jnp.where(cols <= rows[:, None], p, 0) if is_causal else p
            dp = dot(do, v.T)
            ds = p * (dp - delta[:, None])
            dk = dk + scale * dot(ds.astype(q.dtype).T, q)
            dv = dv + dot(p.astype(do.dtype).T, do)
            return dk, dv

        zeros, steps = jnp.zeros(k.shape), group * pl.cdiv(T, block_q)
        dk, dv = lax.fori_loop(group * first, steps, one_query_tile, (zeros, zeros))
        dk_ref[...] = dk.astype(dk_ref.dtype)
        dv_ref[...] = dv.astype(dv_ref.dtype)

    block = lambda sides, place: pl.BlockSpec((None, *sides, head_padded), place)
    key_tile = block((block_k, None), lambda j, h, b: (b, j, h, 0))
    all_queries = block((whole(T, block_q), group), lambda j, h, b: (b, 0, h, 0))
    all_rows = pl.BlockSpec((None, group, whole(T, block_q)), lambda j, h, b: (b, h, 0))
    tiles = [all_queries, key_tile, key_tile, all_queries, all_rows, all_rows]
    specs = dict(in_specs=tiles, out_specs=[key_tile, key_tile])
    grid = pl.cdiv(S, block_k), K, B
    run = pl.pallas_call(kernel, [k, v], grid=grid, **specs, **backend())
    return run(q, k, v, do, lse, delta)  # dk is like k, dv like v


def _kernel_cases():
    """Arguments (q, k, v, do, lse, delta, is_causal, block_q, block_k); some without block sizes."""
    yield _kernel_case("the case worked by hand", HAND, False, (1, 2))
    random = np.random.default_rng(57)
    for (B, T, S, N, K, H), is_causal, blocks, dtype, push in [
        ((1, 16, 27, 2, 1, 4), False, (8, 16), np.float32, -120),
        ((2, 12, 21, 4, 2, 5), True, (8, 16), np.float32, 120),
        ((1, 37, 20, 3, 3, 16), True, (8, 16), np.float32, -120),
        ((1, 20, 37, 6, 2, 8), True, (16, 8), np.float32, (0, 0, 0, 0, 0, 0, 0, 120)),  # masked ones far above the rest
        ((2, 20, 40, 4, 2, 8), False, (8, 16), jnp.bfloat16, 0), ((2, 100, 90, 4, 2, 20), True, (), np.float32, 0),
    ]:  # fmt: skip
        shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
        q, k, v, do = (random.standard_normal(shape) for shape in shapes)
        q[..., 0] = 16 * math.sqrt(H)  # so that the first component of k moves all logits, and itself is small
        k[..., 0] = np.resize(push, S)[:, None] / 16
        sizes = dict(T=T, S=S, N=N, K=K, H=H, B=B) | dict(zip(("block_q", "block_k"), blocks, strict=False))
        near = " and ".join(map(str, np.unique(push)))
        said = ["causal" if is_causal else "no mask", jnp.dtype(dtype).name, f"logits near {near}"]
        said += [] if blocks else ["your own blocks, not replayed but run"]
        label = ", ".join([f"{name}={value}" for name, value in sizes.items()] + said)
        yield _kernel_case(label, [array.astype(dtype) for array in (q, k, v, do + 0.5)], is_causal, blocks)


def _kernel_case(label, arrays, is_causal, blocks):
    q, k, v, do = arrays
    out, lse = oracle(q, k, v, is_causal=is_causal)
    delta = (out * do.astype(np.float64)).sum(axis=-1)
    of_rows = [np.float32(array.swapaxes(1, 2)) for array in (lse, delta)]
    return Case(label, (q, k, v, do, *of_rows, is_causal, *blocks))


def _run_kernel(names, ours, answer, *arguments):
    """The gradients of these names, and how they were made."""
    dtypes = dict.fromkeys(names, arguments[0].dtype)
    right = _expected_of_kernel(names, *arguments)[:-1]
    return results(answer, ours, arguments, dtypes, right, arguments[7:])


def _expected_of_kernel(names, q, k, v, do, lse, delta, is_causal, *blocks):
    gradients = dict(zip(("dq", "dk", "dv"), oracle_gradients(q, k, v, do, is_causal=is_causal), strict=True))
    return *(gradients[name] for name in names), AS_ASKED


KEY_GRADIENTS = Exercise(
    key_gradients, "The dk and dv kernel, whole", outputs=("dk", "dv", "how they were made"), cases=_kernel_cases,
    run=functools.partial(_run_kernel, ("dk", "dv"), key_gradients),
    expected=functools.partial(_expected_of_kernel, ("dk", "dv")), tolerance=2e-4,
    building_block="gradients of the keys", slow=True,
).with_mistakes(
    ("both sums are overwritten, so that only the last tile of queries counts", ("dk + ", "dv + "), ("", ""),
     "Add to the dk and dv that arrive: a tile of keys belongs to all queries, see the picture of section 1."),
    ("no tile is skipped above the diagonal (too many tiles)", "k_start // block_q", "0",
     "Queries before k_start see none of these keys: see the picture of section 8."),
    ("dv is right and dk is wrong, because dk is not multiplied by the scale", "scale * dot(ds", "dot(ds",
     "s = scale q kᵀ, so the scale appears once more in dk: see the equations of section 1."),
    *OF_A_PAIR[:-1],
    ("dv is a sum over ds instead of p", "dot(p.astype(do.dtype).T, do)", "dot(ds.astype(do.dtype).T, do)",
     "out = p v, so dv = pᵀ do, and ds is for dq and dk: see the equations of section 1."),
    ("lse and delta are those of the first head of the group", "_ref[n, tile]", "_ref[0, tile]",
     "Each query head has its own: step by step they change with q and do, see section 9."),
    *OF_ROWS[:2],
    ("a masked weight is left as it is", " if is_causal else p\n", " if False else p\n",
     "lse knows nothing of masked keys, so exp(s - lse) may be large there: set p to 0, see section 8."),
    ("rows past the end of q, do or lse get into the sums",
     "ref[tile, n, :], rows < T", "ref[tile, n, :], rows >= 0",
     "What lies there may be NaN, and 0 · NaN is NaN: replace it by 0, see section 6 of notebook 05."),
    ("the block of the queries ends with the array, and the last slice is moved back into it",
     "whole(T, block_q)", "T",
     "Make it a whole number of tiles long, so that it reaches past the end: see section 6 of notebook 05."),
    ("columns past H, or rows past the end, get into the products", "real(ref[tile, n, :], rows < T, H)",
     "ref[tile, n, :]", "What lies there may be NaN: replace it by 0 with `real`, see section 6 of notebook 05."),
)  # fmt: skip


def query_gradients(q, k, v, do, lse, delta, is_causal=False, block_q=64, block_k=64):
    """dq (B, T, N, H) of do (B, T, N, H), by lse and delta (B, N, T), float32."""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    group, head_padded = N // K, max(16, pl.next_power_of_2(H))
    scale = 1 / math.sqrt(H)

    def kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref):
        q_start = pl.program_id(0) * block_q
        rows = q_start + jnp.arange(block_q)
        q, do = (real(ref[...], rows < T, H) for ref in (q_ref, do_ref))
        lse, delta = lse_ref[...], delta_ref[...]
        stop = jnp.minimum(q_start + block_q, min(T, S)) if is_causal else S

        def one_key_tile(j, dq):
            tile = pl.ds(j * block_k, block_k)
            cols = j * block_k + jnp.arange(block_k)
            k, v = (real(ref[tile, :], cols < S, H) for ref in (k_ref, v_ref))
            s = scale * dot(q, k.T)
            seen = (cols < S) & (cols <= rows[:, None]) if is_causal else cols < S
            p = jnp.where(seen, jnp.exp(s - lse[:, None]), 0)
            dp = dot(do, v.T)
            ds = p * (dp - delta[:, None])
            return dq + scale * dot(ds.astype(k.dtype), k)

        dq = lax.fori_loop(0, pl.cdiv(stop, block_k), one_key_tile, jnp.zeros(q.shape))
        dq_ref[...] = dq.astype(dq_ref.dtype)

    block = lambda rows, place: pl.BlockSpec((None, rows, None, head_padded), place)
    query_tile = block(block_q, lambda i, n, b: (b, i, n, 0))
    keys = block(whole(S, block_k), lambda i, n, b: (b, 0, n // group, 0))
    row_tile = pl.BlockSpec((None, None, block_q), lambda i, n, b: (b, n, i))
    tiles = [query_tile, keys, keys, query_tile, row_tile, row_tile]
    specs = dict(grid=(pl.cdiv(T, block_q), N, B), in_specs=tiles, out_specs=query_tile)
    run = pl.pallas_call(kernel, q, **specs, **backend())
    return run(q, k, v, do, lse, delta)  # dq is like q


QUERY_GRADIENTS = Exercise(
    query_gradients, "The dq kernel, whole", outputs=("dq", "how it was made"), cases=_kernel_cases,
    run=functools.partial(_run_kernel, ("dq",), query_gradients),
    expected=functools.partial(_expected_of_kernel, ("dq",)), tolerance=2e-4, building_block="gradients of the queries",
    slow=True,
).with_mistakes(
    ("dq is overwritten, so that only the last tile of keys counts", "dq + ", "",
     "Add to the dq that arrives: a tile of queries sees all keys, see the picture of section 1."),
    ("dq is not multiplied by the scale", "scale * dot(ds", "dot(ds",
     "s = scale q kᵀ, so the scale appears once more in dq: see the equations of section 1."),
    *OF_A_PAIR[:-1],
    ("a masked weight is left as it is", " & (cols <= rows[:, None])", "",
     "lse knows nothing of masked keys, so exp(s - lse) may be large there: set p to 0, see section 8."),
    *OF_HEADS, *OF_ROWS,
    ("columns past H, or keys past the end, get into the products", "real(ref[tile, :], cols < S, H)",
     "ref[tile, :]", "What lies there may be NaN: replace it by 0 with `real`, see section 6 of notebook 05."),
)  # fmt: skip


def flash_attention(q, k, v, is_causal=False):
    """out (B, T, N, H), differentiable in q (B, T, N, H), k and v (B, S, K, H)."""
    tile = 64 if q.shape[-1] <= 128 else 32  # what shared memory holds
    options = is_causal, tile, tile

    def forward_rule(q, k, v):
        out, lse = forward(q, k, v, *options)
        return out, (q, k, v, out, lse)

    def backward_rule(residuals, do):
        q, k, v, out, lse = residuals
        delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(axis=3)
        needed = q, k, v, do, lse, delta.swapaxes(1, 2)
        dk, dv = key_gradients(*needed, *options)
        return query_gradients(*needed, *options), dk, dv

    attend = jax.custom_vjp(lambda q, k, v: forward_rule(q, k, v)[0])
    attend.defvjp(forward_rule, backward_rule)
    return attend(q, k, v)


def _flash_cases():
    yield Case("the case worked by hand", (*HAND, False))
    random = np.random.default_rng(58)
    for (B, T, S, N, K, H), is_causal, dtype in [
        ((1, 16, 16, 2, 2, 4), False, np.float32),
        ((2, 12, 9, 4, 2, 5), True, np.float32),
        ((2, 16, 13, 4, 2, 128), True, jnp.bfloat16),  # so wide that a delta of 16 bits is seen
    ]:
        shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
        arrays = [(random.standard_normal(shape) + 0.5).astype(dtype) for shape in shapes]
        label = f"T={T}, S={S}, N={N}, K={K}, H={H}, B={B}, {'causal' if is_causal else 'no mask'}"
        yield Case(f"{label}, {jnp.dtype(dtype).name}", (*arrays, is_causal))


def _run_flash(answer, q, k, v, do, is_causal):
    """out, its gradients, and how they were made. So short that any tile holds all, and each array is read but once.

    A kernel for delta may read out and do besides, in float32.
    """
    right = _expected_flash(q, k, v, do, is_causal)[:-1]

    def with_gradients(attend, q, k, v, do):
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, is_causal), q, k, v)
        if getattr(out, "shape", None) != do.shape:
            raise Complaint(f"expected out alone, an array of shape {do.shape}, got {describe(out)}")
        return out, *pull_back(do.astype(out.dtype))

    ours = lambda: bytes_read(functools.partial(with_gradients, flash_attention), (q, k, v, do)) + 8 * do.size
    yours = functools.partial(with_gradients, answer)
    dtypes = dict.fromkeys(("out", "dq", "dk", "dv"), q.dtype)
    return watched(yours, (q, k, v, do), dtypes, right, (256, 256), ours)


def _expected_flash(q, k, v, do, is_causal):
    out, _ = oracle(q, k, v, is_causal=is_causal)
    return out, *oracle_gradients(q, k, v, do, is_causal=is_causal), AS_ASKED


FLASH_ATTENTION = Exercise(
    flash_attention, "Flash attention, yours", outputs=("out", "dq", "dk", "dv", "how they were made"),
    cases=_flash_cases, run=_run_flash, expected=_expected_flash, tolerance=2e-4, building_block="gradients", slow=True,
).with_mistakes(
    ("the gradients are right, but forward runs twice",
     ("return out, (q, k, v, out, lse)", "q, k, v, out, lse = residuals"),
     ("return out, (q, k, v)", "q, k, v = residuals\n        out, lse = forward(q, k, v, *options)"),
     "The forward rule runs it once, and keeps out and lse as residuals: see section 5."),
    ("dk and dv are returned in the wrong order", "*options), dk, dv", "*options), dv, dk",
     "The backward rule returns gradients in the order of the arguments, q, k, v: see section 5."),
    ("the gradient that arrives from above is ignored and ones are used instead", "delta =",
     "do = jnp.ones_like(do)\n        delta =",
     "The second argument of the backward rule is the gradient of out: see section 5."),
    ("delta is missing", "delta.swapaxes(1, 2)", "0 * delta.swapaxes(1, 2)",
     "delta = rowsum(out do) is what the softmax takes off dp: see section 2."),
    ("delta is summed in 16 bits", ".astype(jnp.float32) * do.astype(jnp.float32)", " * do",
     "A product of 16-bit arrays has 16 bits: convert out and do to float32 first, see the text of the exercise."),
    *((f"the {name} kernel is not told that attention is causal", f"{kernel}(*needed, *options)",
       f"{kernel}(*needed, False, tile, tile)", "Hand is_causal on to both kernels: see section 8.")
      for name, kernel in (("dk and dv", "key_gradients"), ("dq", "query_gradients"))),
    ("delta is handed on as (B, T, N)", "delta.swapaxes(1, 2)", "delta", "The kernels take it as (B, N, T), like lse."),
    ("delta is made of do alone", "(out.astype", "(do.astype", "delta = rowsum(out do): see section 2."),
    ("lse and delta are handed on in the wrong order", "lse, delta.swapaxes(1, 2)", "delta.swapaxes(1, 2), lse",
     "The arguments of your two kernels end in lse, delta: see the text of exercise 7.7."),
)  # fmt: skip
