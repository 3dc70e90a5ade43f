"""The exercises of notebook 07.

Kernels are replayed here on every device: the small cases need tiles that a GPU rejects, and a
verdict must not depend on the hardware.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention.masking import Band, visible
from helpers.attention.reference import oracle, oracle_gradients
from helpers.exercises import tile_bounds
from helpers.exercises.checking import Case, Complaint, Exercise, Mistake
from helpers.measure.traffic import replay

LOG2_E = math.log2(math.e)


def _float32(array):
    return np.asarray(array, np.float32)


def _forward_oracle(q, k, v, scale):
    """(out, lse) of one head."""
    out, lse = oracle(*(array[:, None] for array in (q, k, v)), scale=scale)
    return out[:, 0], lse[:, 0]


def _gradient_oracle(q, k, v, do, scale):
    """(dq, dk, dv) of one head, float32."""
    return tuple(_float32(g[:, 0]) for g in oracle_gradients(*(array[:, None] for array in (q, k, v, do)), scale=scale))


def _like(values, names, templates):
    """The values as float32, or a complaint that says which of them is missing or has a wrong shape."""
    wanted = ", ".join(names)
    if values is None:
        raise Complaint(f"expected {wanted}, got None: is a `return` missing?")
    if not isinstance(values, tuple | list):
        values = (values,)
    if len(values) != len(names):
        raise Complaint(f"expected {wanted}, got {len(values)} value{'s' * (len(values) != 1)}")
    for name, value, template in zip(names, values, templates, strict=True):
        if not hasattr(value, "shape") or not hasattr(value, "astype"):
            raise Complaint(f"{name}: expected an array of shape {template.shape}")
        if value.shape != template.shape:
            raise Complaint(f"{name}: expected shape {template.shape}, got {value.shape}")
    return tuple(jnp.asarray(value).astype(jnp.float32) for value in values)


def _launch(kernel, grid, in_specs, out_specs, shapes, arguments):
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        interpret=True,
    )
    # Replayed, because interpret mode compiles each new kernel anew, which takes too long for many mistakes.
    with jax.default_matmul_precision("highest"):
        return replay(call, *arguments)[1]


# 7.1 and 7.2 The bodies for a pair of tiles


def _body_cases(seed):
    by_hand = ([[1.0]], np.log([[1.0], [3.0]]), [[2.0], [6.0]], [[2.0]])
    cases = [Case("the case worked by hand, a key in each tile", (*map(_float32, by_hand), 1.0, 1, 1))]
    random = np.random.default_rng(seed)
    for T, S, H, block_q, block_k, scale, size, push in [
        (8, 12, 3, 4, 4, 0.5, 1, 0),
        (12, 8, 3, 4, 4, 2, 1, 120),
        (8, 12, 3, 4, 4, 1.5, 2, -120),
        (12, 10, 3, 4, 5, -0.75, 2, 0),
    ]:
        q, k, v, do = (random.standard_normal((length, H)) for length in (T, S, S, T))
        q, k, do = np.round(8 * size * q) / 8, np.round(8 * k) / 8, do + 0.5  # so that float32 holds the logits
        # The first component of q is constant, so that of k moves all logits, the first keys most. It is shared out
        # between the two, since a large one in k would make dq a small difference of large numbers.
        q[:, 0] = 16 if push else 1
        if push:
            k[:, 0] = np.round(push / scale + 2 * np.sign(push) * np.linspace(1, 0, S)) / 16
        about = f"all logits near {push}" if push else "logits around 0"
        label = f"T={T}, S={S}, H={H}, block_q={block_q}, block_k={block_k}, scale={scale}, {about}"
        cases.append(Case(label, (*map(_float32, (q, k, v, do)), scale, block_q, block_k)))
    return cases


def _residuals(q, k, v, do, scale):
    out, lse = _forward_oracle(q, k, v, scale)
    return _float32(lse), _float32((out * do).sum(axis=1))


def _run_dkv(answer, q, k, v, do, scale, block_q, block_k):
    (T, H), S = q.shape, len(k)
    lse, delta = _residuals(q, k, v, do, scale)

    def kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref):
        def one_query_tile(i, gradients):
            tile = pl.ds(i * block_q, block_q)
            queries = q_ref[tile, :], k_ref[...], v_ref[...], do_ref[tile, :], lse_ref[tile], delta_ref[tile]
            return _like(answer(*queries, scale, *gradients), ("dk", "dv"), gradients)

        zeros = jnp.zeros((block_k, H), jnp.float32)
        dk_ref[...], dv_ref[...] = lax.fori_loop(0, T // block_q, one_query_tile, (zeros, zeros))

    queries, rows = pl.BlockSpec((T, H), lambda j: (0, 0)), pl.BlockSpec((T,), lambda j: (0,))
    key_tile = pl.BlockSpec((block_k, H), lambda j: (j, 0))
    in_specs = [queries, key_tile, key_tile, queries, rows, rows]
    arguments = (q, k, v, do, lse, delta)
    return _launch(kernel, (S // block_k,), in_specs, [key_tile] * 2, [(S, H)] * 2, arguments)


def _run_dq(answer, q, k, v, do, scale, block_q, block_k):
    (T, H), S = q.shape, len(k)
    lse, delta = _residuals(q, k, v, do, scale)

    def kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref):
        def one_key_tile(j, dq):
            tile = pl.ds(j * block_k, block_k)
            pair = q_ref[...], k_ref[tile, :], v_ref[tile, :], do_ref[...], lse_ref[...], delta_ref[...]
            return _like(answer(*pair, scale, dq), ("dq",), (dq,))[0]

        dq_ref[...] = lax.fori_loop(0, S // block_k, one_key_tile, jnp.zeros((block_q, H), jnp.float32))

    keys = pl.BlockSpec((S, H), lambda i: (0, 0))
    query_tile, row_tile = pl.BlockSpec((block_q, H), lambda i: (i, 0)), pl.BlockSpec((block_q,), lambda i: (i,))
    in_specs = [query_tile, keys, keys, query_tile, row_tile, row_tile]
    arguments = (q, k, v, do, lse, delta)
    return _launch(kernel, (T // block_q,), in_specs, [query_tile], [(T, H)], arguments)[0]


def _softmax_of_the_tile(q, k, lse, scale):
    return jax.nn.softmax(scale * (q @ k.T), axis=1)


_WEIGHTS = {
    "right": lambda q, k, lse, scale: jnp.exp(scale * (q @ k.T) - lse[:, None]),
    "base two, nothing converted": lambda q, k, lse, scale: jnp.exp2(scale * (q @ k.T) - lse[:, None]),
    "base two, lse not converted": lambda q, k, lse, scale: jnp.exp2(scale * LOG2_E * (q @ k.T) - lse[:, None]),
    "no scale": lambda q, k, lse, scale: jnp.exp(q @ k.T - lse[:, None]),
    "softmax of the tile": _softmax_of_the_tile,
    "divided by exp(lse)": lambda q, k, lse, scale: jnp.exp(scale * (q @ k.T)) / jnp.exp(lse)[:, None],
    "base two in exp": lambda q, k, lse, scale: jnp.exp(LOG2_E * (scale * (q @ k.T) - lse[:, None])),
    "lse scaled": lambda q, k, lse, scale: jnp.exp(scale * (q @ k.T - lse[:, None])),
    "divided by lse": lambda q, k, lse, scale: jnp.exp(scale * (q @ k.T)) / lse[:, None],
    "upside down": lambda q, k, lse, scale: jnp.exp(lse[:, None] - scale * (q @ k.T)),
    "plus lse": lambda q, k, lse, scale: jnp.exp(scale * (q @ k.T) + lse[:, None]),
    "from its maximum": lambda q, k, lse, scale: jnp.exp(
        scale * (q @ k.T) - (scale * (q @ k.T)).max(axis=1, keepdims=True)
    ),
    "no lse": lambda q, k, lse, scale: jnp.exp(scale * (q @ k.T)),
    "lse of keys": lambda q, k, lse, scale: jnp.exp(scale * (q @ k.T) - lse[None, :]),
}
_LOGIT_GRADIENTS = {
    "right": lambda p, dp, delta: p * (dp - delta[:, None]),
    "no delta": lambda p, dp, delta: p * dp,
    "plus delta": lambda p, dp, delta: p * (dp + delta[:, None]),
    "delta of keys": lambda p, dp, delta: p * (dp - delta[None, :]),
    "delta of the tile": lambda p, dp, delta: p * (dp - (p * dp).sum(axis=1)[:, None]),
    "delta outside": lambda p, dp, delta: p * dp - delta[:, None],
    "no p": lambda p, dp, delta: dp - delta[:, None],
    "diagonal": lambda p, dp, delta: p * (1 - p) * dp,
}
_VALUE_PRODUCTS = {
    "right": lambda q, k, v, do: do @ v.T,
    "keys": lambda q, k, v, do: do @ k.T,
    "queries": lambda q, k, v, do: q @ v.T,
    "transposed": lambda q, k, v, do: v @ do.T,
}


def _pair(weights="right", logit_gradient="right", value_product="right"):
    """p and ds of a pair of tiles, right or wrong in one place."""

    def p_and_ds(q, k, v, do, lse, delta, scale):
        p = _WEIGHTS[weights](q, k, lse, scale)
        return p, _LOGIT_GRADIENTS[logit_gradient](p, _VALUE_PRODUCTS[value_product](q, k, v, do), delta)

    return p_and_ds


def _dkv(
    dk_of="ds",
    dk_with="q",
    dv_of="p",
    dv_with="do",
    transpose_dk=True,
    transpose_dv=True,
    scale_of_dk=lambda scale: scale,
    scale_of_dv=lambda scale: 1,
    update=lambda dk, dv, dk_tile, dv_tile: (dk + dk_tile, dv + dv_tile),
    **pair,
):
    def one_query_tile(q, k, v, do, lse, delta, scale, dk, dv):
        p, ds = _pair(**pair)(q, k, v, do, lse, delta, scale)
        named = {"q": q, "k": k, "v": v, "do": do, "p": p, "ds": ds}
        dk_table, dv_table = (
            named[name].T if transposed else named[name]
            for name, transposed in ((dk_of, transpose_dk), (dv_of, transpose_dv))
        )
        dk_tile = scale_of_dk(scale) * (dk_table @ named[dk_with])
        return update(dk, dv, dk_tile, scale_of_dv(scale) * (dv_table @ named[dv_with]))

    return one_query_tile


_DKV = Exercise(
    number="7.1",
    title="The body of the dk and dv kernel",
    outputs=("dk", "dv"),
    cases=functools.partial(_body_cases, 71),
    expected=lambda q, k, v, do, scale, block_q, block_k: _gradient_oracle(q, k, v, do, scale)[1:],
    run=_run_dkv,
    tolerance=2e-4,  # float32, and base two, round logits of 120
    tried="1 to 3 tiles of queries, 2 or 3 of keys, T above and below S, logits near 0, 120 and -120, a scale below 0",
    mistakes=(
        Mistake(
            "dv is right and dk is wrong, because delta is missing from ds",
            _dkv(logit_gradient="no delta"),
            "ds = p (dp - delta): see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because ds adds delta instead of subtracting it",
            _dkv(logit_gradient="plus delta"),
            "ds = p (dp - delta): see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because ds takes delta by key instead of by query",
            _dkv(logit_gradient="delta of keys"),
            "delta has an entry for each query, so it needs a second axis, delta[:, None]: see section 2.",
        ),
        Mistake(
            "dv is right and dk is wrong, because delta is summed over this tile of keys alone",
            _dkv(logit_gradient="delta of the tile"),
            "delta is a sum over all keys, and arrives ready made: see section 2.",
        ),
        Mistake(
            "lse and delta are taken by key instead of by query",
            _dkv(weights="lse of keys", logit_gradient="delta of keys"),
            "Both have an entry for each query, so they need a second axis, lse[:, None]: see section 2.",
        ),
        Mistake(
            "dv is right and dk is wrong, because delta stands outside the bracket in ds",
            _dkv(logit_gradient="delta outside"),
            "p multiplies the difference dp - delta: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because p is missing from ds",
            _dkv(logit_gradient="no p"),
            "ds = p (dp - delta): see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because dp is a product with k instead of v",
            _dkv(value_product="keys"),
            "out = p v, so the gradient of p needs the values: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because dp is a product of q instead of do",
            _dkv(value_product="queries"),
            "dp = do vᵀ carries what arrived from above: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because dk is not multiplied by the scale",
            _dkv(scale_of_dk=lambda scale: 1),
            "s = scale q kᵀ, so the scale appears once more in dk: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because dk is multiplied by the scale twice",
            _dkv(scale_of_dk=lambda scale: scale**2),
            "ds is the gradient of the scaled logits and has no scale of its own: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because ds is not transposed",
            _dkv(transpose_dk=False),
            "dk sums over the queries and has a row for each key. Only square tiles let this run: see section 1.",
        ),
        Mistake(
            "dk is right and dv is wrong, because p is not transposed",
            _dkv(transpose_dv=False),
            "dv sums over the queries and has a row for each key. Only square tiles let this run: see section 1.",
        ),
        Mistake(
            "dk is right and dv is wrong, because dv is made of ds instead of p",
            _dkv(dv_of="ds"),
            "out = p v, so dv = pᵀ do: see the equations of section 1.",
        ),
        Mistake(
            "dk and dv are one and the same sum of both",
            _dkv(update=lambda dk, dv, dk_tile, dv_tile: (dk + dk_tile + dv + dv_tile,) * 2),
            "dk and dv are two arrays, with two updates: see the equations of section 1.",
        ),
        Mistake(
            "the scale multiplies the sum so far again with each tile",
            lambda q, k, v, do, lse, delta, scale, dk, dv: (
                lambda new_dk, new_dv: (scale * dk + (new_dk - dk), new_dv)
            )(*_dkv()(q, k, v, do, lse, delta, scale, dk, dv)),
            "Scale the new term alone, dk + scale * (...): the dk that arrives has its scale already.",
        ),
        Mistake(
            "the new terms are subtracted instead of added",
            _dkv(update=lambda dk, dv, dk_tile, dv_tile: (dk - dk_tile, dv - dv_tile)),
            "Add to the dk and dv that arrive: see the equations of section 1.",
        ),
        Mistake(
            "s and lse are exponentiated apart, as in exp(s) / exp(lse), where both may overflow or vanish",
            _dkv(weights="divided by exp(lse)"),
            "Subtract before you exponentiate, p = exp(s - lse): see the equations of section 1.",
        ),
        Mistake(
            "lse is added instead of subtracted",
            _dkv(weights="plus lse"),
            "p = exp(s - lse): see the equations of section 1.",
        ),
        Mistake(
            "p is measured from the maximum of the tile instead of from lse",
            _dkv(weights="from its maximum"),
            "lse holds maximum and sum of the whole row, so p = exp(s - lse) is final: see the equations of section 1.",
        ),
        Mistake(
            "both sums are overwritten, so that only the last tile of queries counts",
            _dkv(update=lambda dk, dv, dk_tile, dv_tile: (dk_tile, dv_tile)),
            "Add to the dk and dv that arrive: a tile of keys belongs to all queries, see the picture of section 1.",
        ),
        Mistake(
            "dk is overwritten, so that only the last tile of queries counts in it",
            _dkv(update=lambda dk, dv, dk_tile, dv_tile: (dk_tile, dv + dv_tile)),
            "Add to the dk that arrives, as you do with dv: see the picture of section 1.",
        ),
        Mistake(
            "dv is overwritten, so that only the last tile of queries counts in it",
            _dkv(update=lambda dk, dv, dk_tile, dv_tile: (dk + dk_tile, dv_tile)),
            "Add to the dv that arrives, as you do with dk: see the picture of section 1.",
        ),
        Mistake(
            "the two gradients are returned in the wrong order",
            _dkv(update=lambda dk, dv, dk_tile, dv_tile: (dv + dv_tile, dk + dk_tile)),
            "Return (dk, dv): the shapes agree, so nothing complains. See the text of the exercise.",
        ),
        Mistake(
            "p is a power of two of natural logits",
            _dkv(weights="base two, nothing converted"),
            "With exp2, both s and lse are multiplied by log2 e: see the box of section 2.",
        ),
        Mistake(
            "the logits are in base two and lse is not",
            _dkv(weights="base two, lse not converted"),
            "With exp2, lse is multiplied by log2 e as well: see the box of section 2.",
        ),
        Mistake(
            "the scale is missing from the logits",
            _dkv(weights="no scale"),
            "p = exp(scale q kᵀ - lse), as in the forward pass: see the equations of section 1.",
        ),
        Mistake(
            "p is a softmax over this tile instead of over all keys",
            _dkv(weights="softmax of the tile"),
            "lse is already the log-sum-exp over all keys, so p = exp(s - lse): see the equations of section 1.",
        ),
        Mistake(
            "lse is taken by key instead of by query",
            _dkv(weights="lse of keys"),
            "lse has an entry for each query, so it needs a second axis, lse[:, None]: see section 2.",
        ),
        Mistake(
            "dv is right and dk is wrong, because dp is transposed",
            _dkv(value_product="transposed"),
            "dp has a row for each query, do vᵀ. Only square tiles let this run: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because dk is made of p instead of ds",
            _dkv(dk_of="p"),
            "dk = scale dsᵀ q, the gradient of the logits times the queries: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because ds is multiplied by k instead of q",
            _dkv(dk_with="k"),
            "s = scale q kᵀ, so the gradient of k needs the queries: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because the product for dq stands in place of that for dk",
            _dkv(dk_with="k", transpose_dk=False),
            "dk = scale dsᵀ q; ds k belongs to dq, which has a kernel of its own: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because ds is multiplied by do instead of q",
            _dkv(dk_with="do"),
            "s = scale q kᵀ, so the gradient of k needs the queries: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because dk is divided by the scale",
            _dkv(scale_of_dk=lambda scale: 1 / scale),
            "s = scale q kᵀ, so the scale is a factor of dk: see the equations of section 1.",
        ),
        Mistake(
            "the scale is used nowhere",
            _dkv(weights="no scale", scale_of_dk=lambda scale: 1),
            "It is a factor of the logits, and of dk: see the equations of section 1.",
        ),
        Mistake(
            "scale is ignored and 1 / sqrt(H) is used instead",
            lambda q, k, v, do, lse, delta, scale, *sums: _dkv()(
                q, k, v, do, lse, delta, 1 / math.sqrt(q.shape[1]), *sums
            ),
            "scale is an argument, and need not be one over the square root of H.",
        ),
        Mistake(
            "keys and values change places",
            lambda q, k, v, *rest: _dkv()(q, v, k, *rest),
            "Queries meet the keys k, and do meets the values v: see the equations of section 1.",
        ),
        Mistake(
            "dv is right and dk is wrong, because ds has only the diagonal of the Jacobian, p (1 - p)",
            _dkv(logit_gradient="diagonal"),
            "ds = p (dp - delta): see the equations of section 1.",
        ),
        Mistake(
            "dk is right and dv is wrong, because dv is multiplied by the scale",
            _dkv(scale_of_dv=lambda scale: scale),
            "The scale is a factor of s, and dv = pᵀ do has none: see the equations of section 1.",
        ),
        Mistake(
            "dk is right and dv is wrong, because p is multiplied by v instead of do",
            _dkv(dv_with="v"),
            "dv = pᵀ do, the gradient that arrived, mixed by the weights: see the equations of section 1.",
        ),
        Mistake(
            "dk is right and dv is wrong, because p is multiplied by q instead of do",
            _dkv(dv_with="q"),
            "dv = pᵀ do, the gradient that arrived, mixed by the weights: see the equations of section 1.",
        ),
        Mistake(
            "dv comes back as it went in",
            _dkv(update=lambda dk, dv, dk_tile, dv_tile: (dk + dk_tile, dv)),
            "Each tile adds its part to dv too: see the picture of section 1.",
        ),
        Mistake(
            "dk comes back as it went in",
            _dkv(update=lambda dk, dv, dk_tile, dv_tile: (dk, dv + dv_tile)),
            "Each tile adds its part to dk too: see the picture of section 1.",
        ),
        Mistake(
            "neither p nor ds is transposed",
            _dkv(transpose_dk=False, transpose_dv=False),
            "dk and dv have a row for each key. Only square tiles let this run: see section 1.",
        ),
        Mistake(
            "exp is taken of numbers in base two",
            _dkv(weights="base two in exp"),
            "What was multiplied by log2 e belongs into exp2: see section 2.",
        ),
        Mistake(
            "the scale multiplies lse as well",
            _dkv(weights="lse scaled"),
            "lse is made of scaled logits, so it has its scale already: see the equations of section 1.",
        ),
        Mistake(
            "exp(s) is divided by lse",
            _dkv(weights="divided by lse"),
            "lse is a logarithm: subtract it before you exponentiate, see the equations of section 1.",
        ),
        Mistake(
            "the exponent has the wrong sign",
            _dkv(weights="upside down"),
            "p = exp(s - lse), at most 1: see the equations of section 1.",
        ),
        Mistake(
            "lse is not subtracted, so that p is not normalised",
            _dkv(weights="no lse"),
            "p = exp(s - lse): see the equations of section 1.",
        ),
    ),
)


def _dq(dq_of="ds", dq_with="k", transpose=False, scale_of_dq=lambda scale: scale, keep=True, **pair):
    def one_key_tile(q, k, v, do, lse, delta, scale, dq):
        p, ds = _pair(**pair)(q, k, v, do, lse, delta, scale)
        named = {"q": q, "k": k, "v": v, "do": do, "p": p, "ds": ds}
        table = named[dq_of].T if transpose else named[dq_of]
        tile = scale_of_dq(scale) * (table @ named[dq_with])
        return dq + tile if keep else tile

    return one_key_tile


_DQ = Exercise(
    number="7.2",
    title="The body of the dq kernel",
    outputs=("dq",),
    cases=functools.partial(_body_cases, 72),
    expected=lambda q, k, v, do, scale, block_q, block_k: _gradient_oracle(q, k, v, do, scale)[0],
    run=_run_dq,
    tolerance=2e-4,  # float32, and base two, round logits of 120
    tried="1 to 3 tiles of queries, 2 or 3 of keys, T above and below S, logits near 0, 120 and -120, a scale below 0",
    mistakes=(
        Mistake(
            "delta is missing from ds",
            _dq(logit_gradient="no delta"),
            "ds = p (dp - delta): see the equations of section 1.",
        ),
        Mistake(
            "ds adds delta instead of subtracting it",
            _dq(logit_gradient="plus delta"),
            "ds = p (dp - delta): see the equations of section 1.",
        ),
        Mistake(
            "ds takes delta by key instead of by query",
            _dq(logit_gradient="delta of keys"),
            "delta has an entry for each query, so it needs a second axis, delta[:, None]: see section 2.",
        ),
        Mistake(
            "delta is summed over this tile of keys alone",
            _dq(logit_gradient="delta of the tile"),
            "delta is a sum over all keys, and arrives ready made: see section 2.",
        ),
        Mistake(
            "lse and delta are taken by key instead of by query",
            _dq(weights="lse of keys", logit_gradient="delta of keys"),
            "Both have an entry for each query, so they need a second axis, lse[:, None]: see section 2.",
        ),
        Mistake(
            "delta stands outside the bracket in ds",
            _dq(logit_gradient="delta outside"),
            "p multiplies the difference dp - delta: see the equations of section 1.",
        ),
        Mistake(
            "p is missing from ds",
            _dq(logit_gradient="no p"),
            "ds = p (dp - delta): see the equations of section 1.",
        ),
        Mistake(
            "p stands where ds belongs",
            _dq(dq_of="p"),
            "dq = scale ds k, the gradient of the logits times the keys: see the equations of section 1.",
        ),
        Mistake(
            "ds is multiplied by v instead of k",
            _dq(dq_with="v"),
            "s = scale q kᵀ, so the gradient of q needs the keys: see the equations of section 1.",
        ),
        Mistake(
            "dp is a product with k instead of v",
            _dq(value_product="keys"),
            "out = p v, so the gradient of p needs the values: see the equations of section 1.",
        ),
        Mistake(
            "dp is a product of q instead of do",
            _dq(value_product="queries"),
            "dp = do vᵀ carries what arrived from above: see the equations of section 1.",
        ),
        Mistake(
            "the scale multiplies the sum so far again with each tile",
            lambda q, k, v, do, lse, delta, scale, dq: scale * dq + _dq()(q, k, v, do, lse, delta, scale, dq) - dq,
            "Scale the new term alone, dq + scale * (...): the dq that arrives has its scale already.",
        ),
        Mistake(
            "the new term has the wrong sign: it is subtracted, or made of delta - dp",
            lambda q, k, v, do, lse, delta, scale, dq: 2 * dq - _dq()(q, k, v, do, lse, delta, scale, dq),
            "Add scale ds k with ds = p (dp - delta) to the dq that arrives: see the equations of section 1.",
        ),
        Mistake(
            "dq is not multiplied by the scale",
            _dq(scale_of_dq=lambda scale: 1),
            "s = scale q kᵀ, so the scale appears once more in dq: see the equations of section 1.",
        ),
        Mistake(
            "dq is multiplied by the scale twice",
            _dq(scale_of_dq=lambda scale: scale**2),
            "ds is the gradient of the scaled logits and has no scale of its own: see the equations of section 1.",
        ),
        Mistake(
            "ds is transposed",
            _dq(transpose=True),
            "dq sums over the keys and has a row for each query. Only square tiles let this run: see section 1.",
        ),
        Mistake(
            "s and lse are exponentiated apart, as in exp(s) / exp(lse), where both may overflow or vanish",
            _dq(weights="divided by exp(lse)"),
            "Subtract before you exponentiate, p = exp(s - lse): see the equations of section 1.",
        ),
        Mistake(
            "lse is added instead of subtracted",
            _dq(weights="plus lse"),
            "p = exp(s - lse): see the equations of section 1.",
        ),
        Mistake(
            "p is measured from the maximum of the tile instead of from lse",
            _dq(weights="from its maximum"),
            "lse holds maximum and sum of the whole row, so p = exp(s - lse) is final: see the equations of section 1.",
        ),
        Mistake(
            "dq is overwritten, so that only the last tile of keys counts",
            _dq(keep=False),
            "Add to the dq that arrives: a tile of queries sees all keys, see the picture of section 1.",
        ),
        Mistake(
            "p is a power of two of natural logits",
            _dq(weights="base two, nothing converted"),
            "With exp2, both s and lse are multiplied by log2 e: see the box of section 2.",
        ),
        Mistake(
            "the logits are in base two and lse is not",
            _dq(weights="base two, lse not converted"),
            "With exp2, lse is multiplied by log2 e as well: see the box of section 2.",
        ),
        Mistake(
            "the scale is missing from the logits",
            _dq(weights="no scale"),
            "p = exp(scale q kᵀ - lse), as in the forward pass: see the equations of section 1.",
        ),
        Mistake(
            "p is a softmax over this tile instead of over all keys",
            _dq(weights="softmax of the tile"),
            "lse is already the log-sum-exp over all keys, so p = exp(s - lse): see the equations of section 1.",
        ),
        Mistake(
            "lse is taken by key instead of by query",
            _dq(weights="lse of keys"),
            "lse has an entry for each query, so it needs a second axis, lse[:, None]: see section 2.",
        ),
        Mistake(
            "ds is multiplied by q instead of k",
            _dq(dq_with="q"),
            "s = scale q kᵀ, so the gradient of q needs the keys: see the equations of section 1.",
        ),
        Mistake(
            "the product for dk stands in place of that for dq",
            _dq(dq_with="q", transpose=True),
            "dq = scale ds k, with a row for each query: see the equations of section 1.",
        ),
        Mistake(
            "ds is multiplied by do instead of k",
            _dq(dq_with="do"),
            "s = scale q kᵀ, so the gradient of q needs the keys: see the equations of section 1.",
        ),
        Mistake(
            "dq is divided by the scale",
            _dq(scale_of_dq=lambda scale: 1 / scale),
            "s = scale q kᵀ, so the scale is a factor of dq: see the equations of section 1.",
        ),
        Mistake(
            "the scale is used nowhere",
            _dq(weights="no scale", scale_of_dq=lambda scale: 1),
            "It is a factor of the logits, and of dq: see the equations of section 1.",
        ),
        Mistake(
            "scale is ignored and 1 / sqrt(H) is used instead",
            lambda q, k, v, do, lse, delta, scale, dq: _dq()(q, k, v, do, lse, delta, 1 / math.sqrt(q.shape[1]), dq),
            "scale is an argument, and need not be one over the square root of H.",
        ),
        Mistake(
            "keys and values change places",
            lambda q, k, v, *rest: _dq()(q, v, k, *rest),
            "Queries meet the keys k, and do meets the values v: see the equations of section 1.",
        ),
        Mistake(
            "ds has only the diagonal of the Jacobian, p (1 - p)",
            _dq(logit_gradient="diagonal"),
            "ds = p (dp - delta): see the equations of section 1.",
        ),
        Mistake(
            "exp is taken of numbers in base two",
            _dq(weights="base two in exp"),
            "What was multiplied by log2 e belongs into exp2: see section 2.",
        ),
        Mistake(
            "the scale multiplies lse as well",
            _dq(weights="lse scaled"),
            "lse is made of scaled logits, so it has its scale already: see the equations of section 1.",
        ),
        Mistake(
            "exp(s) is divided by lse",
            _dq(weights="divided by lse"),
            "lse is a logarithm: subtract it before you exponentiate, see the equations of section 1.",
        ),
        Mistake(
            "the exponent has the wrong sign",
            _dq(weights="upside down"),
            "p = exp(s - lse), at most 1: see the equations of section 1.",
        ),
        Mistake(
            "lse is not subtracted, so that p is not normalised",
            _dq(weights="no lse"),
            "p = exp(s - lse): see the equations of section 1.",
        ),
    ),
)


# 7.3 Wiring the gradient


def _wiring_cases():
    # T = S throughout: were q and k of different shapes, JAX would refuse gradients in the wrong
    # order before this checker could name them.
    cases = [Case("the case worked by hand", tuple(_float32([[number]]) for number in (1, 2, 3, 5)))]
    random = np.random.default_rng(73)
    for T, H, size, push in [(6, 4, 1, 0), (9, 5, 4, 0), (7, 3, 2, -40)]:
        q, k, v, weight = random.standard_normal((4, T, H))
        q[:, 0] = 1
        k[:, 0] += push
        arguments = tuple(map(_float32, (size * q, k, v, weight + 1)))
        cases.append(Case(f"T=S={T}, H={H}, " + ("all logits far below 0" if push else f"queries × {size}"), arguments))
    return cases


def _forward_kernels(q, k, v):
    """(out, lse), float32, in NumPy."""
    s = q @ k.T / math.sqrt(q.shape[1])
    m = s.max(axis=1)
    p = np.exp(s - m[:, None])
    l = p.sum(axis=1)
    return (p @ v) / l[:, None], m + np.log(l)


def _backward_kernels(q, k, v, out, lse, dout):
    """(dq, dk, dv), float32, in NumPy."""
    scale = 1 / math.sqrt(q.shape[1])
    p = np.exp(scale * (q @ k.T) - lse[:, None])
    ds = p * (dout @ v.T - (out * dout).sum(axis=1)[:, None])
    return scale * ds @ k, scale * ds.T @ q, p.T @ dout


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

    def backward(*arguments, **named):
        names = ("q", "k", "v", "out", "lse", "dout")
        named = dict(zip(names, arguments, strict=False)) | named
        if len(arguments) > len(names) or set(named) != set(names):
            raise Complaint(f"backward takes {', '.join(names)}, got {max(len(arguments), len(named))} arguments")
        arguments = [named[name] for name in names]
        for name, argument in zip(names, arguments, strict=True):
            wanted = q.shape[:1] if name == "lse" else q.shape
            if getattr(argument, "shape", None) != wanted:
                got = getattr(argument, "shape", type(argument).__name__)
                raise Complaint(f"backward needs {name} of shape {wanted}, got {got}")
        return launch(_backward_kernels, [q.shape, k.shape, v.shape], *arguments)

    attend = answer(forward, backward)
    if attend is None:
        raise Complaint("expected a function of q, k and v, got None: is a `return` missing?")
    if not callable(attend):
        raise Complaint(f"expected a function of q, k and v, got {type(attend).__name__}")

    def checked(q, k, v):
        out = attend(q, k, v)
        if not hasattr(out, "shape") or out.shape != q.shape:
            raise Complaint(f"the function that you return must give out alone, of shape {q.shape}")
        return out

    def loss(q, k, v):
        out = checked(q, k, v)
        return (weight * out).sum(), out

    arrays = tuple(map(jnp.asarray, (q, k, v)))
    alone = np.asarray(checked(*arrays))
    launches.clear()
    gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    results = [np.asarray(array) for array in (alone, out, *gradients)]
    return *results, launches.count(_forward_kernels), launches.count(_backward_kernels)


def _wiring_expected(q, k, v, weight):
    scale = 1 / math.sqrt(q.shape[1])
    out, _ = _forward_oracle(q, k, v, scale)
    return _float32(out), _float32(out), *_gradient_oracle(q, k, v, weight, scale), 1, 1


def _wiring(
    residuals=lambda q, k, v, out, lse: (q, k, v, out, lse),
    call=None,
    order=lambda dq, dk, dv: (dq, dk, dv),
    alone=lambda forward, q, k, v: forward(q, k, v)[0],
    value=lambda out, q, k, v: out,
):
    """A differentiable function with something wrong in what it keeps, in its call or in what it returns."""

    def differentiable(forward, backward):
        @jax.custom_vjp
        def attend(q, k, v):
            return alone(forward, q, k, v)

        def fwd(q, k, v):
            out, lse = forward(q, k, v)
            return value(out, q, k, v), residuals(q, k, v, out, lse)

        def bwd(kept, dout):
            run = backward if call is None else functools.partial(call, forward, backward)
            return order(*run(*kept, dout))

        attend.defvjp(fwd, bwd)
        return attend

    return differentiable


# What stands where out belongs, of its shape
_NOT_OUT = (
    lambda out, q, k, v: v,
    lambda out, q, k, v: q,
    lambda out, q, k, v: k,
    lambda out, q, k, v: jnp.zeros_like(q),
    lambda out, q, k, v: out.astype(jnp.float16),
    lambda out, q, k, v: out.astype(jnp.bfloat16),
)


def _alone(other):
    return lambda forward, q, k, v: other(forward(q, k, v)[0], q, k, v)


def _written_out(q, k, v):
    return jax.nn.softmax(q @ k.T / math.sqrt(q.shape[1])) @ v


_WIRING = Exercise(
    number="7.3",
    title="Wiring the gradient",
    outputs=(
        *("out", "out under jax.grad", "dq", "dk", "dv"),
        *("runs of forward for one gradient", "runs of backward for one gradient"),
    ),
    cases=_wiring_cases,
    expected=_wiring_expected,
    run=_run_wiring,
    tolerance=5e-5,
    tried="jax.grad through your function, dq, dk and dv compared each, logits around 0, large, and far below 0",
    mistakes=(
        Mistake(
            "all gradients are zero: JAX knows nothing of backward, or its results are not returned",
            lambda forward, backward: lambda q, k, v: forward(q, k, v)[0],
            "Register both rules with defvjp, and let the backward rule return what backward gives: see section 5.",
        ),
        Mistake(
            "the gradients are right, but without one the function returns something else than out",
            _wiring(alone=_alone(_NOT_OUT[0])),
            "The body of attend runs when nobody differentiates: it must return out as well, see section 5.",
            variants=tuple(_wiring(alone=_alone(other)) for other in _NOT_OUT[1:]),
        ),
        Mistake(
            "the gradients are right, but the forward rule returns something else than out",
            _wiring(value=_NOT_OUT[0]),
            "Under jax.grad the forward rule runs in place of attend: its first result must be out, see section 5.",
            variants=tuple(_wiring(value=other) for other in _NOT_OUT[1:4]),
        ),
        Mistake(
            "the gradients are right, but both attend and its forward rule return something else than out",
            _wiring(alone=_alone(_NOT_OUT[0]), value=_NOT_OUT[0]),
            "Both return out, the first result of forward: see section 5.",
            variants=tuple(_wiring(alone=_alone(other), value=other) for other in _NOT_OUT[1:]),
        ),
        Mistake(
            "the gradients are right, but they do not come from backward",
            lambda forward, backward: _written_out,
            "Attention written out once more would need the whole table: call backward, see the text of the exercise.",
            variants=(
                _wiring(
                    residuals=lambda q, k, v, out, lse: (q, k, v),
                    call=lambda forward, run, q, k, v, dout: jax.vjp(_written_out, q, k, v)[1](dout),
                ),
            ),
        ),
        Mistake(
            "k and v are passed to forward in the wrong order when no gradient is asked for",
            _wiring(alone=lambda forward, q, k, v: forward(q, v, k)[0]),
            "forward takes q, k, v: see the text of the exercise.",
        ),
        Mistake(
            "q and k are passed to forward in the wrong order when no gradient is asked for",
            _wiring(alone=lambda forward, q, k, v: forward(k, q, v)[0]),
            "forward takes q, k, v: see the text of the exercise.",
        ),
        Mistake(
            "no gradient is returned for k and v",
            _wiring(order=lambda dq, dk, dv: (dq, None, None)),
            "The backward rule returns one gradient for each argument; None stands for zero: see section 5.",
        ),
        Mistake(
            "the gradients are returned in reverse",
            _wiring(order=lambda dq, dk, dv: (dv, dk, dq)),
            "The backward rule returns gradients in the order of the arguments, q, k, v: see section 5.",
        ),
        Mistake(
            "dk and dv are returned in the wrong order",
            _wiring(order=lambda dq, dk, dv: (dq, dv, dk)),
            "The backward rule returns gradients in the order of the arguments, q, k, v: see section 5.",
        ),
        Mistake(
            "dq and dk are returned in the wrong order",
            _wiring(order=lambda dq, dk, dv: (dk, dq, dv)),
            "The backward rule returns gradients in the order of the arguments, q, k, v: see section 5.",
        ),
        Mistake(
            "all three gradients are returned one place too far",
            _wiring(order=lambda dq, dk, dv: (dk, dv, dq)),
            "The backward rule returns gradients in the order of the arguments, q, k, v: see section 5.",
        ),
        Mistake(
            "the gradient that arrives from above is ignored and ones are used instead",
            _wiring(call=lambda _, run, q, k, v, out, lse, dout: run(q, k, v, out, lse, jnp.ones_like(dout))),
            "The second argument of the backward rule is dout: see section 5.",
        ),
        Mistake(
            "ones are passed to backward, and its results are multiplied by dout",
            _wiring(
                call=lambda _, run, q, k, v, out, lse, dout: [
                    dout * g for g in run(q, k, v, out, lse, jnp.ones_like(dout))
                ],
            ),
            "A gradient mixes the rows and columns of dout: pass dout to backward, see section 5.",
        ),
        Mistake(
            "dout is multiplied in once more after the kernels",
            _wiring(
                call=lambda _, run, q, k, v, out, lse, dout: [dout * g for g in run(q, k, v, out, lse, dout)],
            ),
            "The kernels have used dout already; their results are the gradients: see section 5.",
        ),
        Mistake(
            "dv is right and dq and dk are wrong, because dout is passed where out belongs",
            _wiring(call=lambda _, run, q, k, v, out, lse, dout: run(q, k, v, dout, lse, dout)),
            "delta = rowsum(out do) needs the out of the forward pass, a residual: see section 5.",
        ),
        Mistake(
            "out is passed where dout belongs",
            _wiring(call=lambda _, run, q, k, v, out, lse, dout: run(q, k, v, out, lse, out)),
            "The second argument of the backward rule is dout, and it goes last: see section 5.",
        ),
        Mistake(
            "out and dout have changed places",
            _wiring(call=lambda _, run, q, k, v, out, lse, dout: run(q, k, v, dout, lse, out)),
            "backward takes out from the residuals, and dout, which arrives later, last: see section 5.",
        ),
        Mistake(
            "lse is kept in bfloat16",
            _wiring(residuals=lambda q, k, v, out, lse: (q, k, v, out, lse.astype(jnp.bfloat16))),
            "p = exp(s - lse) turns the rounding of lse into an error of every weight: see the box of section 5.",
        ),
        Mistake(
            "lse is kept in float16",
            _wiring(residuals=lambda q, k, v, out, lse: (q, k, v, out, lse.astype(jnp.float16))),
            "p = exp(s - lse) turns the rounding of lse into an error of every weight: see the box of section 5.",
        ),
        Mistake(
            "out is kept in bfloat16",
            _wiring(residuals=lambda q, k, v, out, lse: (q, k, v, out.astype(jnp.bfloat16), lse)),
            "delta is made of out, and its rounding reaches dq and dk: keep out as it is, see section 12.",
        ),
        Mistake(
            "q and k have changed places among the residuals",
            _wiring(residuals=lambda q, k, v, out, lse: (k, q, v, out, lse)),
            "backward takes q, k, v, out, lse, dout in this order: see the text of the exercise.",
        ),
        Mistake(
            "k and v have changed places among the residuals",
            _wiring(residuals=lambda q, k, v, out, lse: (q, v, k, out, lse)),
            "backward takes q, k, v, out, lse, dout in this order: see the text of the exercise.",
        ),
        Mistake(
            "the gradients are right, but forward runs twice",
            _wiring(
                residuals=lambda q, k, v, out, lse: (q, k, v),
                call=lambda forward, run, q, k, v, dout: run(q, k, v, *forward(q, k, v), dout),
            ),
            "The forward rule runs it once, and keeps out and lse as residuals: see section 5.",
        ),
    ),
)


# 7.4 Count the products


def _flops_cases():
    shapes = [
        # T, S, H, block_q, block_k, fused, is_causal
        (4, 4, 2, 2, 2, True, False),
        (4, 4, 2, 2, 2, False, False),
        (4, 4, 2, 2, 2, False, True),
        (128, 256, 64, 32, 64, False, False),
        (256, 128, 32, 64, 16, True, False),
        (128, 128, 64, 32, 16, False, True),
        (128, 128, 64, 16, 64, True, True),
        (64, 128, 16, 16, 32, False, True),
        (256, 64, 32, 32, 16, True, True),
        (12, 12, 5, 3, 2, False, True),
        (12, 12, 5, 2, 3, True, True),
        (20, 6, 4, 5, 3, False, True),
        (6, 28, 3, 2, 7, True, True),
    ]
    return [
        Case(
            f"T={T}, S={S}, H={H}, block_q={block_q}, block_k={block_k}, "
            f"{'fused' if fused else 'two kernels'}, {'causal' if is_causal else 'no mask'}",
            (T, S, H, block_q, block_k, fused, is_causal),
        )
        for T, S, H, block_q, block_k, fused, is_causal in shapes
    ]


def _flops_expected(T, S, H, block_q, block_k, fused, is_causal):
    """By looking at every pair of tiles, and at every entry of every product in it."""
    seen = visible(np.arange(T)[:, None], np.arange(S)[None, :], Band(right=0 if is_causal else None), T, S)
    visited = seen.reshape(T // block_q, block_q, S // block_k, block_k).any(axis=(1, 3)).sum()
    tables = block_q * block_k * 2 * H  # an entry of s or dp is H products and H sums
    queries, keys = block_q * H * 2 * block_k, block_k * H * 2 * block_q  # an entry of dq; of dk or dv
    fused_pair = 2 * tables + queries + 2 * keys
    return int(visited) * (fused_pair if fused else fused_pair + 2 * tables)


def _visited(i, j, T, S, block_q, block_k):
    return j * block_k < (i + 1) * block_q


def _flops(products=(5, 7), flops=2, visited=_visited, pairs=None, head=True, tile=True):
    """An answer to 7.4. Under a causal mask: visited(i, j, T, S, block_q, block_k) for a pair of tiles, or
    pairs(T, S, block_q, block_k) for their number."""

    def product_flops(T, S, H, block_q, block_k, fused, is_causal):
        rows, columns = range(T // block_q), range(S // block_k)
        if not is_causal:
            counted = len(rows) * len(columns)
        elif pairs:
            counted = pairs(T, S, block_q, block_k)
        else:
            counted = sum(visited(i, j, T, S, block_q, block_k) for i in rows for j in columns)
        one_product = flops * (block_q * block_k if tile else 1) * (H if head else 1)
        return products[0 if fused else 1] * one_product * counted

    return product_flops


_FLOPS = Exercise(
    number="7.4",
    title="Count the products",
    outputs=("FLOPs",),
    cases=_flops_cases,
    expected=_flops_expected,
    tried="both forms, with and without a causal mask, T below, equal to and above S, tiles of both proportions",
    mistakes=(
        Mistake(
            "the two forms have changed places",
            _flops(products=(7, 5)),
            "The fused kernel computes s and dp once, the two kernels once each: see the table of section 6.",
        ),
        Mistake(
            "both forms are charged five products",
            _flops(products=(5, 5)),
            "The dq kernel computes s and dp again: see the table of section 6.",
        ),
        Mistake(
            "of s and dp, which the dq kernel computes again, one is forgotten",
            _flops(products=(5, 6)),
            "The dq kernel needs ds, for which it makes p and dp again: see the table of section 6.",
        ),
        Mistake(
            "s is not computed again in the backward pass",
            _flops(products=(4, 5)),
            "p was never stored, so each form begins with q kᵀ: see the table of section 6.",
        ),
        Mistake(
            "the products of the forward pass are counted too",
            _flops(products=(7, 9)),
            "Count the backward pass alone: see the table of section 6.",
        ),
        Mistake(
            "a multiplication with its addition is counted as one operation",
            _flops(flops=1),
            "A FLOP is one multiplication or one addition, so each term counts twice: see section 6.",
        ),
        Mistake(
            "the head dimension is forgotten",
            _flops(head=False),
            "Every product has three sides, and one of them is H: see section 6.",
        ),
        Mistake(
            "two kernels are charged for the products of the fused one twice",
            _flops(products=(5, 10)),
            "The dq kernel computes s, dp and dq, and no dk or dv: see the table of section 6.",
        ),
        Mistake(
            "only the dk and dv kernel is counted where there are two",
            _flops(products=(5, 4)),
            "The dq kernel has products of its own: see the table of section 6.",
        ),
        Mistake(
            "no pair of tiles is skipped under the causal mask",
            _flops(visited=lambda *_: True),
            "A pair in which no query sees a key is not visited: see the text of the exercise.",
        ),
        Mistake(
            "the causal mask halves the count",
            _flops(pairs=lambda T, S, block_q, block_k: (T // block_q) * (S // block_k) // 2),
            "Pairs on the diagonal are computed whole, and T and S may differ: see the text of the exercise.",
        ),
        Mistake(
            "only the entries that the mask leaves are counted, instead of whole pairs of tiles",
            _flops(pairs=lambda T, S, block_q, block_k: sum(min(i + 1, S) for i in range(T)) / (block_q * block_k)),
            "Kernels compute whole pairs of tiles, hidden entries included: see the text of the exercise.",
        ),
        Mistake(
            "pairs on the diagonal are left out",
            _flops(visited=lambda i, j, T, S, block_q, block_k: (j + 1) * block_k <= i * block_q + 1),
            "A pair is visited if even one query sees one key: see the text of the exercise.",
        ),
        Mistake(
            "the first query of a tile decides whether its pair is visited",
            _flops(visited=lambda i, j, T, S, block_q, block_k: j * block_k <= i * block_q),
            "Of the queries in a tile the last one sees furthest: see hint 2.",
        ),
        Mistake(
            "the last key of a tile decides whether its pair is visited, or the tiles of a row are rounded down",
            _flops(visited=lambda i, j, T, S, block_q, block_k: (j + 1) * block_k <= (i + 1) * block_q),
            "Of the keys in a tile the first one is seen by most queries, and one is enough: see hint 2.",
        ),
        Mistake(
            "the last query is not given the key at its own position",
            _flops(visited=lambda i, j, T, S, block_q, block_k: j * block_k < (i + 1) * block_q - 1),
            "Query i sees keys j ≤ i, its own included: see the text of the exercise.",
        ),
        Mistake(
            "a tile of keys that begins right after the last query is counted too",
            _flops(visited=lambda i, j, T, S, block_q, block_k: j * block_k <= (i + 1) * block_q),
            "The last query of tile i is (i + 1) block_q - 1: see hint 2.",
        ),
        Mistake(
            "block_q and block_k have changed places in the test",
            _flops(visited=lambda i, j, T, S, block_q, block_k: j * block_q < (i + 1) * block_k),
            "Tile i begins at query i block_q, tile j at key j block_k: see hint 2.",
        ),
        Mistake(
            "query tile i is charged i + 1 tiles of keys, which holds only when block_q equals block_k",
            _flops(visited=lambda i, j, T, S, block_q, block_k: j <= i),
            "Find the last key that the tile sees, then divide by block_k: see the text of the exercise.",
        ),
        Mistake(
            "the last query sees the last key, which holds only when T equals S",
            _flops(visited=lambda i, j, T, S, block_q, block_k: j * block_k < (i + 1) * block_q + S - T),
            "Query i sees keys j ≤ i, counted from the beginning of both: see the text of the exercise.",
        ),
        Mistake(
            "tiles of keys are counted that do not exist",
            _flops(pairs=lambda T, S, block_q, block_k: sum(-(-i // block_k) for i in range(block_q, T + 1, block_q))),
            "There are S // block_k tiles of keys, however far a query could see: see the text of the exercise.",
        ),
        Mistake(
            "pairs of tiles are counted as if they were pairs of a query and a key",
            _flops(tile=False),
            "A pair of tiles has block_q × block_k entries: see the case worked by hand.",
        ),
    ),
)


# 7.5 The queries that a tile of keys needs


_BOUNDS_SHAPES = [
    # j, T, S, block_q, block_k, left
    (0, 64, 64, 16, 32, None),
    (1, 64, 64, 16, 32, None),
    (1, 64, 64, 32, 16, None),
    (2, 96, 96, 64, 16, None),
    (3, 50, 128, 16, 16, None),
    (4, 50, 128, 16, 16, None),
    (1, 100, 48, 16, 32, None),
    (1, 64, 64, 16, 32, 8),
    (0, 64, 64, 16, 16, 20),
    (1, 128, 128, 16, 32, 16),
    (1, 128, 128, 16, 32, 17),
    (1, 128, 128, 16, 32, 0),
    (1, 64, 40, 16, 32, 4),
    (2, 100, 100, 16, 32, 30),
    (5, 70, 200, 32, 16, 12),
    (4, 64, 128, 16, 16, None),  # T is k_start
    (4, 65, 128, 16, 16, None),  # and one more
    (4, 64, 128, 16, 16, 5),
    (4, 64, 128, 24, 16, None),
    (2, 13, 20, 3, 5, 2),
    (1, 13, 20, 5, 3, 0),
    (0, 6, 6, 1, 2, 3),
    (2, 6, 6, 1, 2, None),
    (3, 50, 50, 7, 5, 11),
]


def _bounds(
    first_query=lambda k_start, k_stop: k_start,
    stop_query=lambda k_start, k_stop, left, T: T if left is None else min(k_stop + left, T),
    cut_keys=True,
    first_ceil=False,
    stop_floor=False,
    stop_plus_one=False,
    guard=True,
):
    def query_tile_range(j, T, S, block_q, block_k, left=None):
        k_start, k_stop = j * block_k, (j + 1) * block_k
        if guard and k_start >= T:
            return 0, 0
        if cut_keys:
            k_stop = min(k_stop, S)
        first, stop = first_query(k_start, k_stop), stop_query(k_start, k_stop, left, T)
        return (
            -(-first // block_q) if first_ceil else first // block_q,
            stop // block_q + stop_plus_one if stop_floor or stop_plus_one else -(-stop // block_q),
        )

    return query_tile_range


def _in_tiles(change):
    """change(first, stop) of the right range."""
    return lambda *arguments: change(*_bounds()(*arguments))


_BOUNDS = Exercise(
    number="7.5",
    title="The queries that a tile of keys needs",
    outputs=("(first, stop)",),
    cases=lambda: tile_bounds.OVER_QUERIES.cases(_BOUNDS_SHAPES),
    run=tile_bounds.run,
    judge=tile_bounds.OVER_QUERIES.judge,
    tried="T below, equal to and above S, block_q below and above block_k, ragged ends, with and without a window",
    mistakes=(
        Mistake(
            "no tile is skipped above the diagonal (too many tiles)",
            _bounds(first_query=lambda k_start, k_stop: 0),
            "Queries before k_start see none of these keys: see the picture of section 8.",
        ),
        Mistake(
            "first is measured from the last key of the tile instead of the first (too few tiles)",
            _bounds(first_query=lambda k_start, k_stop: k_stop - 1),
            "The first key is seen by query k_start already: see the picture of section 8.",
        ),
        Mistake(
            "first is rounded up instead of down (too few tiles)",
            _bounds(first_ceil=True),
            "A tile that holds one such query must be visited: see the text of the exercise.",
        ),
        Mistake(
            "first is j, which holds only when block_q equals block_k",
            lambda j, T, S, block_q, block_k, left=None: (
                j,
                _bounds()(j, T, S, block_q, block_k, left)[1],
            ),
            "Count in queries first, then divide by block_q: see the text of the exercise.",
        ),
        Mistake(
            "these are the bounds of the dq kernel: the loop ends at the diagonal where it should begin",
            lambda j, T, S, block_q, block_k, left=None: (
                0 if left is None else max(j * block_k - left, 0) // block_q,
                -(-min((j + 1) * block_k, T, S) // block_q),
            ),
            "A key is seen by the queries at and after its own position: see the picture of section 8.",
        ),
        Mistake(
            "the window is ignored (too many tiles)",
            _bounds(stop_query=lambda k_start, k_stop, left, T: T),
            "No query beyond k_stop - 1 + left sees back to these keys: see the text of the exercise.",
        ),
        Mistake(
            "stop is measured from the first key of the tile instead of the last (too few tiles)",
            _bounds(stop_query=lambda k_start, k_stop, left, T: T if left is None else min(k_start + 1 + left, T)),
            "The last key of the tile is seen from furthest away: see the text of the exercise.",
        ),
        Mistake(
            "the window is one query too short (too few tiles)",
            _bounds(stop_query=lambda k_start, k_stop, left, T: T if left is None else min(k_stop - 1 + left, T)),
            "Query i sees key i - left too, so the last one is k_stop - 1 + left: see the text of the exercise.",
        ),
        Mistake(
            "the window is one query too long (too many tiles)",
            _bounds(stop_query=lambda k_start, k_stop, left, T: T if left is None else min(k_stop + 1 + left, T)),
            "The last query that sees these keys is k_stop - 1 + left: see the text of the exercise.",
        ),
        Mistake(
            "stop is rounded down instead of up (too few tiles)",
            _bounds(stop_floor=True),
            "A tile that holds one such query must be visited: see the text of the exercise.",
        ),
        Mistake(
            "the loop runs past the last query (too many tiles)",
            _bounds(
                stop_query=lambda k_start, k_stop, left, T: T if left is None else k_stop + left,
            ),
            "There are no queries from T on, so stop lies at T or before: see hint 2.",
        ),
        Mistake(
            "a window of 0 is taken for no window (too many tiles)",
            _bounds(stop_query=lambda k_start, k_stop, left, T: min(k_stop + left, T) if left else T),
            "0 is false in Python: ask whether left is None.",
        ),
        Mistake(
            "stop is the last tile itself instead of the one behind it (too few tiles)",
            _in_tiles(lambda first, stop: (first, stop - 1)),
            "stop is not included: see the text of the exercise.",
        ),
        Mistake(
            "one more tile is added to stop even where a tile ends just there (too many tiles)",
            _bounds(stop_plus_one=True),
            "Round up, -(-stop // block_q), which adds nothing to a whole number: see the text of the exercise.",
        ),
        Mistake(
            "the second number is a count of tiles instead of stop",
            _in_tiles(lambda first, stop: (first, stop - first)),
            "Return where the range stops, not how long it is: see the text of the exercise.",
        ),
        Mistake(
            "first and stop are returned in the wrong order",
            _in_tiles(lambda first, stop: (stop, first)),
            "Return (first, stop): see the text of the exercise.",
        ),
        Mistake(
            "the range is given in queries instead of tiles",
            lambda j, T, S, block_q, block_k, left=None: _bounds()(j, T, S, 1, block_k, left),
            "Divide by block_q at the very end: see hint 1.",
        ),
        Mistake(
            "block_q and block_k have changed places",
            lambda j, T, S, block_q, block_k, left=None: _bounds()(j, T, S, block_k, block_q, left),
            "Tile j holds block_k keys, and the range counts tiles of block_q queries: see the text of the exercise.",
        ),
        Mistake(
            "T and S have changed places",
            lambda j, T, S, block_q, block_k, left=None: _bounds()(j, S, T, block_q, block_k, left),
            "T counts the queries and S the keys: see the text of the exercise.",
        ),
        Mistake(
            "first is measured from the key behind the tile (too few tiles)",
            _bounds(first_query=lambda k_start, k_stop: k_stop),
            "The first key is seen by query k_start already: see the picture of section 8.",
        ),
        Mistake(
            "stop is as far behind the first key as the window is long (too few tiles)",
            _bounds(stop_query=lambda k_start, k_stop, left, T: T if left is None else min(k_start + left, T)),
            "The last key of the tile is seen from furthest away, by query k_stop - 1 + left: see hint 2.",
        ),
        Mistake(
            "the window is taken off the start instead of added to the end",
            lambda j, T, S, block_q, block_k, left=None: (
                max(j * block_k - (left or 0), 0) // block_q,
                -(-T // block_q) if j * block_k < T else 0,
            ),
            "Queries look back, so a key is seen by the left queries after it: see the text of the exercise.",
        ),
        Mistake(
            "the last tile of queries is left out if it is not full (too few tiles)",
            lambda j, T, S, block_q, block_k, left=None: (
                j * block_k // block_q,
                min(_bounds()(j, T, S, block_q, block_k, left)[1], T // block_q),
            ),
            "The lengths need not be multiples of the tiles, so round up: see the text of the exercise.",
        ),
        Mistake(
            "the key tile that begins right behind the last query is visited (too many tiles)",
            lambda j, T, S, block_q, block_k, left=None: _bounds(guard=j * block_k > T)(
                j, T, S, block_q, block_k, left
            ),
            "Queries end at T - 1, so nobody sees a key at T: see hint 2.",
        ),
        Mistake(
            "keys behind the last query are not thought of (too many tiles)",
            _bounds(guard=False),
            "If k_start is T or more, no query sees these keys, even if the last tile of queries would reach them.",
        ),
        Mistake(
            "the last tile of keys is taken to be full (too many tiles)",
            _bounds(cut_keys=False),
            "Keys from S on do not exist and nobody sees them: cut k_stop at S.",
        ),
    ),
)

# 7.6 Out, and what rounding takes off it


def _rounding_cases():
    by_hand = [[1, 1, 1 + 2**-8]], [[1], [1], [2]]
    cases = [Case("the case worked by hand", (_float32(by_hand[0]), np.asarray(by_hand[1], jnp.bfloat16)))]
    random = np.random.default_rng(77)  # far from ties, which libraries could break differently
    for T, S, H, part, unit in [
        (4, 8, 4, 0, 1),
        (8, 48, 16, 10, 1),
        (16, 64, 8, 30, 10_000),  # beyond the range of float16
        (16, 96, 8, 4, 0.01),
    ]:
        s = random.standard_normal((T, S)) * 1.5
        v = unit * (random.standard_normal((S, H)) + part * random.standard_normal(H))
        shared = f"values with a part of {part} standard deviations in common" if part else "values around 0"
        p = np.exp(s - s.max(axis=1, keepdims=True))
        cases.append(Case(f"T={T}, S={S}, H={H}, {shared}", (_float32(p), np.asarray(v, jnp.bfloat16))))
    return cases


def _weighted_mean(p, v):
    """The float64 mean of the values, weighted with p as the product takes it."""
    weights = p.astype(v.dtype).astype(np.float64)
    return weights @ v.astype(np.float64) / weights.sum(axis=1, keepdims=True)


def _run_rounding(answer, p, v):
    """Whether out and low are bfloat16 numbers, out, and out + low. A tie of out may be broken either way."""
    found = answer(p, v)
    if found is None:
        raise Complaint("expected out and low, got None: is a `return` missing?")
    found = tuple(found) if isinstance(found, tuple | list | Iterator) else (found,)
    if len(found) != 2:
        raise Complaint(f"expected two arrays, out and low, got {len(found)} result{'s' * (len(found) != 1)}")
    exact, arrays = _weighted_mean(p, v), []
    for name, array in zip(("out", "low"), found, strict=True):
        try:
            arrays.append(np.asarray(array).astype(np.float64))
        except (TypeError, ValueError) as error:
            raise Complaint(f"{name}: expected an array of shape {exact.shape}") from error
        if arrays[-1].shape != exact.shape:
            raise Complaint(f"{name}: expected shape {exact.shape}, got {arrays[-1].shape}")
    out, low = arrays
    of_16_bits = lambda array: np.array_equal(array, array.astype(v.dtype).astype(np.float64), equal_nan=True)
    numbers = " and ".join("bfloat16" if of_16_bits(array) else "of more bits" for array in arrays)
    step = 2.0 ** (np.floor(np.log2(np.abs(exact))) - jnp.finfo(v.dtype).nmant)
    nearest = exact.astype(v.dtype).astype(np.float64)
    return numbers, np.where(np.abs(out - exact) <= 0.51 * step, nearest, out), out + low


def _rounding_expected(p, v):
    exact = _weighted_mean(p, v)
    return "bfloat16 and bfloat16", exact.astype(v.dtype).astype(np.float64), exact


def _product(weights, v):
    return np.float32(weights) @ np.float32(v)


def _sum_of(weights):
    return np.float32(weights).sum(axis=1, keepdims=True)


def _rounding(
    exact=lambda p, w, v: _product(w, v) / _sum_of(w),
    out=lambda exact, dtype: exact.astype(dtype),
    low=lambda exact, out: exact - np.float32(out),
    low_dtype=lambda dtype: dtype,
):
    """An answer with something wrong in one place. w: p as the product takes it."""

    def out_and_low(p, v):
        mean = exact(p, p.astype(v.dtype), v)
        rounded = out(mean, v.dtype)
        return rounded, np.asarray(low(mean, rounded)).astype(low_dtype(v.dtype))

    return out_and_low


def _p_divided_first(p, w, v):
    return _product((p / _sum_of(p)).astype(v.dtype), v)


def _truncated(exact, dtype):
    nearest = exact.astype(dtype)
    towards_zero = np.nextafter(nearest, np.zeros_like(nearest))
    return np.where(np.abs(np.float32(nearest)) > np.abs(exact), towards_zero, nearest)


_ROUNDING = Exercise(
    number="7.6",
    title="Out, and what rounding takes off it",
    outputs=("numbers of out and low", "out", "out + low"),
    cases=_rounding_cases,
    expected=_rounding_expected,
    run=_run_rounding,
    tolerance=5e-6,  # at worst 2^-9 of low, which is 2^-8 of out, and less over a whole array; float32 sums
    tried="values with parts of 0 to 30 standard deviations in common, small and large ones, out and out + low",
    mistakes=(
        Mistake(
            "low is zero everywhere: the difference was taken after both of its terms had been rounded",
            _rounding(low=lambda exact, out: np.zeros_like(exact)),
            "Keep the exact result in float32 until low has been taken off it: see the text of the exercise.",
        ),
        Mistake(
            "the sign of low is wrong, out less exact",
            _rounding(low=lambda exact, out: np.float32(out) - exact),
            "out + low must be exact again, so low = exact - out: see the text of the exercise.",
        ),
        Mistake(
            "out is that of the kernels before: divided by the sum of the unrounded weights, and low is zero",
            _rounding(exact=lambda p, w, v: _product(w, v) / _sum_of(p), low=lambda exact, out: np.zeros_like(exact)),
            "Take low off before anything is rounded, and divide by the weights that the product took: see section 12.",
        ),
        Mistake(
            "the weights were rounded for the product with v, but not for their sum",
            _rounding(exact=lambda p, w, v: _product(w, v) / _sum_of(p)),
            "A mean divides by the sum of the very weights that it used. Which are these? See section 12.",
        ),
        Mistake(
            "the sum takes the rounded weights, but the product takes p as it is",
            _rounding(exact=lambda p, w, v: _product(p, v) / _sum_of(w)),
            "It is the product that wants 16 bits: a tensor core takes p in the dtype of v, see section 10.",
        ),
        Mistake(
            "nothing rounds the weights",
            _rounding(exact=lambda p, w, v: _product(p, v) / _sum_of(p)),
            "A tensor core takes both operands in 16 bits, so the product takes p in the dtype of v: see section 10.",
        ),
        Mistake(
            "the sum of the weights comes out in 16 bits",
            _rounding(exact=lambda p, w, v: _product(w, v) / np.float32(_sum_of(w).astype(v.dtype))),
            "The sum of 16-bit numbers keeps their dtype unless you say otherwise: convert them to float32 first.",
            variants=(
                _rounding(exact=lambda p, w, v: _product(w, v) / np.float32(w.sum(axis=1, keepdims=True))),
                _rounding(exact=lambda p, w, v: _product(w, v) / np.float32(_sum_of(p).astype(v.dtype))),
            ),
        ),
        Mistake(
            "the product with v comes out in 16 bits",
            _rounding(exact=lambda p, w, v: np.float32(_product(w, v).astype(v.dtype)) / _sum_of(w)),
            "A product of 16-bit arrays keeps their dtype unless you say otherwise: ask for float32, see section 10.",
            variants=(_rounding(exact=lambda p, w, v: np.float32(jnp.dot(w, v)) / _sum_of(w)),),
        ),
        Mistake(
            "product and sum both come out in 16 bits",
            _rounding(
                exact=lambda p, w, v: (
                    np.float32(_product(w, v).astype(v.dtype)) / np.float32(_sum_of(w).astype(v.dtype))
                )
            ),
            "Results of 16-bit arrays keep their dtype unless you say otherwise: compute both in float32.",
            variants=(
                _rounding(exact=lambda p, w, v: np.asarray(jnp.dot(w, v) / jnp.sum(w, axis=1, keepdims=True))),
                _rounding(
                    exact=lambda p, w, v: np.asarray(jnp.dot(w, v) / jnp.sum(w, axis=1, keepdims=True)),
                    low=lambda exact, out: exact - out,
                ),
            ),
        ),
        Mistake(
            "out is not rounded, so that nothing is left for low",
            _rounding(out=lambda exact, dtype: exact),
            "out goes to its reader in the dtype of v: round it, and low is what that takes off.",
            variants=(_rounding(out=lambda exact, dtype: exact, low_dtype=lambda dtype: np.float32),),
        ),
        Mistake(
            "low is left in float32",
            _rounding(low_dtype=lambda dtype: np.float32),
            "low is to cost as few bytes as out: round it to the dtype of v as well.",
        ),
        Mistake(
            "low is the whole result once more",
            _rounding(low=lambda exact, out: exact),
            "low is what rounding took off: exact less out, see the text of the exercise.",
        ),
        Mistake(
            "low is divided by out",
            _rounding(low=lambda exact, out: (exact - np.float32(out)) / np.float32(out)),
            "low is a difference: it is added to out, not multiplied with it.",
        ),
        Mistake(
            "low and out have changed places",
            lambda p, v: _rounding()(p, v)[::-1],
            "The order asked for is out, low.",
        ),
        Mistake(
            "out is not divided by the sum of the weights",
            _rounding(exact=lambda p, w, v: _product(w, v)),
            "p is e^(s - m): a row of it does not add up to 1, so divide by its sum once, as notebook 05 does.",
        ),
        Mistake(
            "the weights were divided by their sum before they were rounded",
            _rounding(exact=_p_divided_first),
            "Round p as it arrives, and divide at the end: what is rounded last does not add up to 1.",
            variants=(
                _rounding(exact=lambda p, w, v: _p_divided_first(p, w, v) / _sum_of((p / _sum_of(p)).astype(v.dtype))),
            ),
        ),
        Mistake(
            "out is cut off instead of rounded to the nearest",
            _rounding(out=_truncated),
            "`astype` rounds to the nearest number: use it for out.",
        ),
    ),
)


EXERCISES = (_DKV, _DQ, _WIRING, _FLOPS, _BOUNDS, _ROUNDING)
