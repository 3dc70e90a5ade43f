"""The exercises of notebook 06."""

import math

import numpy as np

from helpers.attention.reference import oracle, oracle_gradients
from helpers.exercises.checking import Case, Exercise, Mistake
from helpers.exercises.watched import exceeds, kept, staged, watch

LOOK_AT_DS = "dv is right and dq and dk are wrong, so look at ds: "


def _normal(random, *shape):
    """Normal numbers that float32 holds exactly, as float64."""
    return random.standard_normal(shape, np.float32).astype(np.float64)


def _softmax(s):
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _oracle_of_heads(q, k, v, scale):
    """(out, lse) of heads (N, T, H) and (K, S, H), float64."""
    out, lse = oracle(*(array.swapaxes(0, 1).astype(np.float32) for array in (q, k, v)), scale=scale)
    return out.swapaxes(0, 1), lse.T


def _gradients_of_heads(q, k, v, dout, scale):
    inputs = (array.swapaxes(0, 1).astype(np.float32) for array in (q, k, v))
    gradients = oracle_gradients(*inputs, dout.swapaxes(0, 1), scale=scale)
    return tuple(gradient.swapaxes(0, 1) for gradient in gradients)


# 6.1 From dp to ds


def _ds_cases():
    random = np.random.default_rng(61)

    def case(label, T, S, spread, shift=0.0):
        p = _softmax(spread * random.standard_normal((T, S)))
        return Case(f"{label}T={T}, S={S}", (p, random.standard_normal((T, S)) + shift))

    return [
        Case("the case worked by hand", (np.array([[0.25, 0.75]]), np.array([[2.0, 6.0]]))),
        case("", 2, 3, 1),
        case("", 5, 4, 1),
        case("", 4, 7, 3),
        case("nearly all weight on one key, ", 6, 9, 30),
        case("a large constant in dp, ", 3, 5, 1, shift=50.0),
        case("one key, ", 3, 1, 1),
        case("", 4, 4, 1),
    ]


def _expected_ds(p, dp):
    return np.stack([(np.diag(row) - np.outer(row, row)) @ drow for row, drow in zip(p, dp, strict=True)])


def _row_mean(array):
    return array.sum(axis=1, keepdims=True)


_DS = Exercise(
    number="6.1",
    title="From dp to ds",
    outputs=("ds",),
    cases=_ds_cases,
    tolerance=1e-4,  # the large constant leaves float32 five digits
    expected=_expected_ds,
    tried="1 to 9 keys, even and peaked weights, a large constant in dp",
    mistakes=(
        Mistake(
            "delta is missing: p * dp alone",
            lambda p, dp: p * dp,
            "Raising one logit lowers all other weights of the row; delta is that part: see section 2.",
        ),
        Mistake(
            "only the diagonal of the Jacobian is used, p (1 - p)",
            lambda p, dp: p * (1 - p) * dp,
            "A softmax has a whole matrix of derivatives, a sigmoid has only a diagonal: see the slip in section 2.",
        ),
        Mistake(
            "delta is added instead of subtracted",
            lambda p, dp: p * (dp + _row_mean(p * dp)),
            "The off-diagonal entries of the Jacobian are negative: see section 2.",
        ),
        Mistake(
            "delta is the sum of dp, without the weights p",
            lambda p, dp: p * (dp - _row_mean(dp)),
            "delta is a mean weighted by p, the row sum of p * dp: see section 2.",
        ),
        Mistake(
            "delta is the plain mean of dp, without the weights p",
            lambda p, dp: p * (dp - dp.mean(axis=1, keepdims=True)),
            "delta is a mean weighted by p, the row sum of p * dp: see section 2.",
        ),
        Mistake(
            "delta is the mean of p * dp instead of its sum",
            lambda p, dp: p * (dp - (p * dp).mean(axis=1, keepdims=True)),
            "The weights already add up to one, so the sum of p * dp is the mean: see section 2.",
        ),
        Mistake(
            "delta sums over the queries instead of the keys",
            lambda p, dp: p * (dp - (p * dp).sum(axis=0, keepdims=True)),
            "A softmax is a matter of one row, so its sums run along axis 1: see section 2.",
        ),
        Mistake(
            "delta sums over the whole table instead of each row",
            lambda p, dp: p * (dp - (p * dp).sum()),
            "Each row has a delta of its own; keep the axis with keepdims=True: see section 2.",
        ),
        Mistake(
            "delta is subtracted after the multiplication by p",
            lambda p, dp: p * dp - _row_mean(p * dp),
            "Both terms of J dp have the factor p, so p multiplies the bracket dp - delta: see section 2.",
        ),
        Mistake(
            "the gradient is multiplied by p twice",
            lambda p, dp: p * p * (dp - _row_mean(p * dp)),
            "ds = p (dp - delta), with one factor p: see section 2.",
        ),
        Mistake(
            "the sign is turned round",
            lambda p, dp: p * (_row_mean(p * dp) - dp),
            "delta is taken off dp, not dp off delta: see section 2.",
        ),
        Mistake(
            "the weights are taken for logits: a softmax is applied to p first",
            lambda p, dp: _softmax(p) * (dp - _row_mean(_softmax(p) * dp)),
            "p holds the weights already, and each row sums to one: see the text of the exercise.",
        ),
        Mistake(
            "dp - delta is not multiplied by p",
            lambda p, dp: dp - _row_mean(p * dp),
            "A key without weight passes no gradient: see the last line of the equation in section 2.",
        ),
        Mistake(
            "the row sum has lost its axis, and meets the columns",
            lambda p, dp: p * (dp - (p * dp).sum(axis=1)),
            "delta has shape (T,): keepdims=True or [:, None] puts it beside the rows of a (T, S) table.",
        ),
        Mistake(
            "every row of p meets every row of dp, p @ dp.T",
            lambda p, dp: p * (dp - p @ dp.T),
            "Each row of p meets its own row of dp alone: multiply entry by entry, then sum, see section 2.",
        ),
        Mistake(
            "delta is the row sum of p, which is always 1",
            lambda p, dp: p * (dp - _row_mean(p)),
            "delta is a mean of dp weighted by p, the row sum of p * dp: see section 2.",
        ),
        Mistake(
            "p and dp change places",
            lambda p, dp: dp * (p - _row_mean(p * dp)),
            "The weights p multiply the bracket dp - delta: see section 2.",
        ),
        Mistake(
            "the diagonal of the Jacobian counts twice, p (1 - p) and then delta besides",
            lambda p, dp: p * (1 - p) * dp - p * _row_mean(p * dp),
            "diag(p) gives p * dp, and all of p pᵀ is in delta: see the equation with J in section 2.",
        ),
        Mistake(
            "the diagonal of the Jacobian is left out",
            lambda p, dp: -p * _row_mean(p * dp),
            "J = diag(p) - p pᵀ has two parts, and diag(p) gives p * dp: see section 2.",
        ),
        Mistake(
            "delta alone is returned",
            lambda p, dp: (p * dp).sum(axis=1),
            "delta is one number for each row; ds = p (dp - delta) has the shape of dp: see section 2.",
        ),
    ),
)


# 6.2 delta without a table


def _delta_cases():
    random = np.random.default_rng(62)

    def case(label, T, S, H, spread=1.0, dlse=True):
        q, k, v, dout = spread * _normal(random, T, H), *(_normal(random, n, H) for n in (S, S, T))
        return Case(f"{label}T={T}, S={S}, H={H}", (q, k, v, dout, _normal(random, T) if dlse else np.zeros(T)))

    by_hand = np.ones((1, 1)), np.log([[1.0], [3.0]]), np.array([[2.0], [6.0]]), np.ones((1, 1)), np.array([2.0])
    return [
        Case("the case worked by hand", by_hand),
        case("no gradient into lse, ", 3, 5, 2, dlse=False),
        case("", 3, 5, 2),
        case("", 6, 4, 8),
        case("", 4, 4, 4),
        case("peaked weights, ", 5, 9, 3, spread=20.0),
        case("head_dim 1, ", 7, 2, 1),
    ]


def _run_delta(answer, q, k, v, dout, dlse):
    return answer(_softmax(q @ k.T / math.sqrt(q.shape[1])) @ v, dout, dlse)


def _expected_delta(q, k, v, dout, dlse):
    """From the table: the row sums of p * dp, and then minus dlse."""
    p = _softmax(q @ k.T / math.sqrt(q.shape[1]))
    return (p * (dout @ v.T)).sum(axis=1) - dlse


_DELTA = Exercise(
    number="6.2",
    title="delta without a table",
    outputs=("delta",),
    cases=_delta_cases,
    run=_run_delta,
    expected=_expected_delta,
    tried="2 to 9 keys, head_dim 1 to 8, with and without a gradient into lse",
    mistakes=(
        Mistake(
            "the gradient into lse is left out",
            lambda out, dout, dlse: (out * dout).sum(axis=1),
            "ds = p * (dp - delta) must also contain p * dlse: see section 5.",
        ),
        Mistake(
            "dlse is added instead of subtracted",
            lambda out, dout, dlse: (out * dout).sum(axis=1) + dlse,
            "ds gains + p * dlse, and delta enters with a minus: see section 5.",
        ),
        Mistake(
            "the signs are reversed",
            lambda out, dout, dlse: dlse - (out * dout).sum(axis=1),
            "delta is what is subtracted from dp: see section 5.",
        ),
        Mistake(
            "delta is the row sum of dout, without out",
            lambda out, dout, dlse: dout.sum(axis=1) - dlse,
            "Multiply by out, entry by entry, before you sum: see section 4.",
        ),
        Mistake(
            "delta is the row sum of out * out",
            lambda out, dout, dlse: (out * out).sum(axis=1) - dlse,
            "One factor is the output and the other its gradient: see section 4.",
        ),
        Mistake(
            "the sum runs over the queries instead of the components",
            lambda out, dout, dlse: (out * dout).sum(axis=0) - dlse,
            "There is one delta for each query, so sum along axis 1: see section 4.",
        ),
        Mistake(
            "delta is the mean over the components instead of the sum",
            lambda out, dout, dlse: (out * dout).mean(axis=1) - dlse,
            "A dot product is a sum, without division by H: see section 4.",
        ),
        Mistake(
            "out and dout are added instead of multiplied",
            lambda out, dout, dlse: (out + dout).sum(axis=1) - dlse,
            "delta is a dot product, entry by entry and then summed: see section 4.",
        ),
        Mistake(
            "dlse multiplies the row sum",
            lambda out, dout, dlse: (out * dout).sum(axis=1) * dlse,
            "dlse is a term of its own, beside the row sum: see section 5.",
        ),
        Mistake(
            "delta keeps an axis of length one",
            lambda out, dout, dlse: (out * dout).sum(axis=1, keepdims=True) - dlse[:, None],
            "Return shape (T,): leave keepdims out.",
        ),
        Mistake(
            "a (T, 1) and a (T,) array meet and make a (T, T) table",
            lambda out, dout, dlse: (out * dout).sum(axis=1, keepdims=True) - dlse,
            "dlse has shape (T,), so the row sum must have it as well: leave keepdims out.",
        ),
        Mistake(
            "delta is the row sum of out, without dout",
            lambda out, dout, dlse: out.sum(axis=1) - dlse,
            "Multiply by dout, entry by entry, before you sum: see section 4.",
        ),
        Mistake(
            "delta is the row sum of dout * dout",
            lambda out, dout, dlse: (dout * dout).sum(axis=1) - dlse,
            "One factor is the output and the other its gradient: see section 4.",
        ),
        Mistake(
            "the row sums of out and of dout are multiplied",
            lambda out, dout, dlse: out.sum(axis=1) * dout.sum(axis=1) - dlse,
            "A dot product multiplies entry by entry first, and sums then: see section 4.",
        ),
        Mistake(
            "the sum runs over the whole array instead of each row",
            lambda out, dout, dlse: (out * dout).sum() - dlse,
            "There is one delta for each query, so sum along axis 1: see section 4.",
        ),
        Mistake(
            "dlse is subtracted once for each component",
            lambda out, dout, dlse: (out * dout - dlse[:, None]).sum(axis=1),
            "dlse is one number for each query: take it off after the sum, see section 5.",
        ),
        Mistake(
            "dlse is taken off dout before the product",
            lambda out, dout, dlse: (out * (dout - dlse[:, None])).sum(axis=1),
            "dlse arrives at lse, not at out: it is a term of its own, see section 5.",
        ),
        Mistake(
            "the product is not summed",
            lambda out, dout, dlse: out * dout - dlse[:, None],
            "There is one delta for each query: sum along axis 1, see section 4.",
        ),
        Mistake(
            "every query is multiplied with every other, out @ dout.T",
            lambda out, dout, dlse: out @ dout.T - dlse,
            "Each row of out meets its own row of dout alone: multiply entry by entry, then sum, see section 4.",
        ),
    ),
)


# 6.3 dq, dk and dv


def _product_cases():
    random = np.random.default_rng(63)

    def case(T, S, H, N=1, K=1, scale=None):
        arrays = (_normal(random, *shape) for shape in ((N, T, H), (K, S, H), (K, S, H), (N, T, H)))
        label = f"T={T}, S={S}, H={H}, N={N}, K={K}"
        return Case(label, (*arrays, 1 / math.sqrt(H) if scale is None else scale))

    return [case(3, 3, 2), case(3, 3, 2, 4, 2), case(2, 5, 3), case(4, 7, 4, 6, 2), case(5, 2, 8, 3, 1, scale=0.7)]


def _run_products(answer, q, k, v, dout, scale):
    kv = np.arange(len(q)) * len(k) // len(q)
    p = _softmax(scale * q @ k[kv].swapaxes(1, 2))
    dp = dout @ v[kv].swapaxes(1, 2)
    ds = p * (dp - (p * dp).sum(axis=2, keepdims=True))
    return answer(p, ds, q, k, dout, scale)


def _products(
    dk_from=lambda ds, q: ds.swapaxes(1, 2) @ q,
    dv_from=lambda p, ds, dout: p.swapaxes(1, 2) @ dout,
    dq_operand=lambda k, q: k,
    scale_q=1,
    scale_k=1,
    scale_v=0,
    collect=lambda grouped: grouped.sum(axis=1),
    interleaved=False,
    dk_operand="q",
    dv_operand="dout",
    own_scale=False,
    one_head=False,
    sums_interleaved=False,
):
    """The three products with the mistakes that people make; scale_* are powers of the scale."""

    def answer(p, ds, q, k, dout, scale):
        scale = 1 / math.sqrt(q.shape[-1]) if own_scale else scale
        N, K = len(q), len(k)
        group = N // K
        heads = np.arange(N) % K if interleaved else np.arange(N) // group
        order = np.argsort(np.arange(N) % K if sums_interleaved else heads, kind="stable")
        dq = scale**scale_q * ds @ dq_operand(k[0 * heads if one_head else heads], q)
        dk = scale**scale_k * dk_from(ds, dout if dk_operand == "dout" else q)
        dv = scale**scale_v * dv_from(p, ds, q if dv_operand == "q" else dout)
        dk, dv = (collect(array[order].reshape(K, group, *array.shape[1:])) for array in (dk, dv))
        return dq, dk, dv

    return answer


def _aliased_products(p, ds, q, k, dout, scale):
    dq, dk, dv = _products()(p, ds, q, k, dout, scale)
    return dq, dk + dv, dk + dv


_PRODUCTS = Exercise(
    number="6.3",
    title="dq, dk and dv",
    outputs=("dq", "dk", "dv"),
    cases=_product_cases,
    run=_run_products,
    expected=_gradients_of_heads,
    tried="T equal to S and not, 1 to 6 query heads on 1 or 2 key/value heads, several scales",
    mistakes=(
        Mistake(
            "p is not transposed in dv, and only dv is wrong",
            _products(dv_from=lambda p, ds, dout: p @ dout),
            "A value collects from all queries that looked at it, a column of p: see section 3.",
        ),
        Mistake(
            "ds is not transposed in dk, and only dk is wrong",
            _products(dk_from=lambda ds, q: ds @ q),
            "A key collects from all queries, a column of ds: see section 3.",
        ),
        Mistake(
            "neither p nor ds is transposed, and only dq is right",
            _products(dv_from=lambda p, ds, dout: p @ dout, dk_from=lambda ds, q: ds @ q),
            "Keys and values collect from columns of the tables: see section 3.",
        ),
        Mistake(
            "dq multiplies ds by the queries instead of the keys",
            _products(dq_operand=lambda k, q: q),
            "In a product q kᵀ the gradient of one factor holds the other factor: see section 3.",
        ),
        Mistake(
            "dv is made from ds instead of p",
            _products(dv_from=lambda p, ds, dout: ds.swapaxes(1, 2) @ dout),
            "v meets p in the forward pass, and never meets the logits: see section 3.",
        ),
        Mistake(
            "the scale is missing in dq and dk: dv is right, dq and dk are too long",
            _products(scale_q=0, scale_k=0),
            "s = scale q kᵀ, and the factor stays when you differentiate: see section 3.",
        ),
        Mistake(
            "dk and dv are one and the same array, and each holds the sum of both",
            _aliased_products,
            "dk = dv = np.zeros_like(k) gives one array two names: make two, see the hints.",
        ),
        Mistake(
            "dk multiplies ds by the gradient dout instead of the queries",
            _products(dk_from=lambda ds, q: ds.swapaxes(1, 2) @ q, dk_operand="dout"),
            "In a product q kᵀ the gradient of one factor holds the other factor: see section 3.",
        ),
        Mistake(
            "dv multiplies p by the queries instead of dout",
            _products(dv_operand="q"),
            "v meets p in the forward pass, and what arrives there is dout: see section 3.",
        ),
        Mistake(
            "dq and dk are divided by the scale instead of multiplied",
            _products(scale_q=-1, scale_k=-1),
            "s = scale q kᵀ, and the factor stays when you differentiate: see section 3.",
        ),
        Mistake(
            "the scale is missing in dk",
            _products(scale_k=0),
            "The scale belongs to both factors of s = scale q kᵀ: see section 3.",
        ),
        Mistake(
            "the scale is missing in dq",
            _products(scale_q=0),
            "The scale belongs to both factors of s = scale q kᵀ: see section 3.",
        ),
        Mistake(
            "the scale is applied twice in dq and dk: dv is right, dq and dk are too short",
            _products(scale_q=2, scale_k=2),
            "ds is the gradient of the logits after the scale, so multiply once: see section 3.",
        ),
        Mistake(
            "dv is multiplied by the scale as well",
            _products(scale_v=1),
            "The scale stands between q and k; v never meets it: see section 3.",
        ),
        Mistake(
            "the query heads of a group are averaged instead of summed",
            _products(collect=lambda grouped: grouped.mean(axis=1)),
            "The loss changes through each of the heads that read the key, and changes add up: see section 6.",
        ),
        Mistake(
            "only the last query head of each group counts",
            _products(collect=lambda grouped: grouped[:, -1]),
            "Add instead of assigning; dk[kv] += … adds only once where an index repeats: see section 6.",
        ),
        Mistake(
            "only the first query head of each group counts",
            _products(collect=lambda grouped: grouped[:, 0]),
            "Every query head that reads a key/value head adds to its gradient: see section 6.",
        ),
        Mistake(
            "query head n reads key/value head n % K instead of n // group",
            _products(interleaved=True),
            "Query heads of one group stand next to each other: see section 6.",
        ),
        Mistake(
            "dk and dv keep one slice for each query head",
            _products(collect=lambda grouped: grouped.reshape(-1, *grouped.shape[2:])),
            "A gradient has the shape of its array, here (K, S, H): see section 6.",
        ),
        Mistake(
            "the copies are summed as if query head n belonged to key/value head n % K, and only dq is right",
            _products(sums_interleaved=True),
            "Query heads of one group stand next to each other: reshape to (K, group, S, H), see section 6.",
        ),
        Mistake(
            "dq multiplies ds by key/value head 0 for every query head",
            _products(one_head=True),
            "Query head n reads key/value head n // group: see section 6.",
        ),
        Mistake(
            "scale is ignored and 1 / sqrt(H) is used instead",
            _products(own_scale=True),
            "scale is an argument, and need not be one over the square root of H.",
        ),
        Mistake(
            "dk is made from p instead of ds",
            lambda p, ds, *rest: (lambda right, slip: (right[0], slip[1], right[2]))(
                _products()(p, ds, *rest), _products()(p, p, *rest)
            ),
            "q and k meet in the logits, whose gradient is ds: see section 3.",
        ),
        Mistake(
            "dq is made from p instead of ds",
            lambda p, ds, *rest: (_products()(p, p, *rest)[0], *_products()(p, ds, *rest)[1:]),
            "q and k meet in the logits, whose gradient is ds: see section 3.",
        ),
        Mistake(
            "ds is transposed in dq",
            lambda p, ds, q, k, dout, scale: (
                np.concatenate([scale * ds[[n]].swapaxes(1, 2) @ k[[n * len(k) // len(q)]] for n in range(len(q))]),
                *_products()(p, ds, q, k, dout, scale)[1:],
            ),
            "A query collects from all keys that it looked at, a row of ds: see section 3.",
        ),
    ),
)


# 6.4 What to save


def _save_cases():
    sizes = [(2, 3, 1, 1, 4, 2), (5, 7, 4, 2, 8, 4), (4096, 4096, 1, 1, 128, 2), (1000, 3000, 8, 2, 64, 2)]
    sizes += [(65536, 65536, 16, 4, 128, 2)]  # more bytes than 32 bits can count
    labels = [f"T={T}, S={S}, N={N}, K={K}, H={H}, {itemsize} bytes" for T, S, N, K, H, itemsize in sizes]
    return [Case(label, size) for label, size in zip(labels, sizes, strict=True)]


def _expected_saved(T, S, N, K, H, itemsize):
    """Counted on arrays that take no room: one element, broadcast."""
    element = np.dtype({2: np.float16, 4: np.float32}[itemsize])

    def count(*shapes, dtype=element):
        return sum(np.broadcast_to(np.zeros((), dtype), shape).nbytes for shape in shapes)

    q, k, v, out, p = (N, T, H), (K, S, H), (K, S, H), (N, T, H), (N, T, S)
    return count(q, k, v, p), count(q, k, v, out) + count((N, T), dtype=np.dtype(np.float32))


def _saved(
    table_out=0,
    table_lse=0,
    table_copies=1,
    flash_out=1,
    lse_bytes=4,
    statistics=1,
    dout=0,
    kv_heads="K",
    kv_arrays=2,
    table_heads="N",
    table_bytes=None,
    inputs=1,
):
    def answer(T, S, N, K, H, itemsize):
        keys = {"K": K, "N": N, "none": 0}[kv_heads]
        shared = inputs * itemsize * ((1 + dout) * N * T * H + kv_arrays * keys * S * H)
        row = statistics * N * T * (itemsize if lse_bytes is None else lse_bytes)
        table = table_copies * (table_bytes or itemsize) * {"N": N, "K": K, "1": 1}[table_heads] * T * S
        with_table = shared + table + table_out * itemsize * N * T * H + table_lse * row
        return with_table, shared + flash_out * itemsize * N * T * H + row

    return answer


_SAVE = Exercise(
    number="6.4",
    title="What to save",
    outputs=("with the table", "without the table"),
    cases=_save_cases,
    expected=_expected_saved,
    tried="2 to 65536 queries, grouped heads, 2 and 4 bytes for an element",
    mistakes=(
        Mistake(
            "out is not saved in the plan without the table",
            _saved(flash_out=0),
            "Without p, delta has to come from out and dout: see section 4.",
        ),
        Mistake(
            "lse is not saved in the plan without the table",
            _saved(statistics=0),
            "With lse any tile of the weights can be computed again by itself: see section 7.",
        ),
        Mistake(
            "lse is stored in the dtype of q",
            _saved(lse_bytes=None),
            "In 16 bits lse makes the gradients several times worse, so it takes 4 bytes: see section 10.",
        ),
        Mistake(
            "two numbers are saved for each row, m and l or lse and delta",
            _saved(statistics=2),
            "lse = m + log l does for m and l, and delta is made in the backward pass: see sections 4 and 7.",
        ),
        Mistake(
            "out is saved in the plan with the table as well",
            _saved(table_out=1),
            "With p at hand, delta is the row sum of p * dp, and out is not needed: see section 4.",
        ),
        Mistake(
            "out and lse are saved in the plan with the table as well",
            _saved(table_out=1, table_lse=1),
            "With p at hand, neither is needed: see the equations of section 3.",
        ),
        Mistake(
            "lse is saved in the plan with the table as well",
            _saved(table_lse=1),
            "lse serves to make p again, and this plan has p: see section 7.",
        ),
        Mistake(
            "lse has a number for each component of each query",
            lambda T, S, N, K, H, itemsize: _saved(statistics=H)(T, S, N, K, H, itemsize),
            "lse is one number for each row of logits, of shape (N, T): see section 7.",
        ),
        Mistake(
            "the logits are saved beside p",
            _saved(table_copies=2),
            "No equation of section 3 contains the logits once p is known.",
        ),
        Mistake(
            "dout is counted among what the forward pass saves",
            _saved(dout=1),
            "dout arrives in the backward pass; nobody has to keep it: see section 1.",
        ),
        Mistake(
            "k and v are counted once for each query head",
            _saved(kv_heads="N"),
            "There are K key/value heads, and nothing is copied for the group: see section 6.",
        ),
        Mistake(
            "the heads share one table of weights",
            _saved(table_heads="1"),
            "Every query head has weights of its own, N tables in all: see section 7.",
        ),
        Mistake(
            "there is a table of weights for each key/value head only",
            _saved(table_heads="K"),
            "Every query head has weights of its own, N tables in all: see section 7.",
        ),
        Mistake(
            "the table is counted in float32",
            _saved(table_bytes=4),
            "The table has itemsize bytes for each entry, like q: see the text of the exercise.",
        ),
        Mistake(
            "only one of k and v is counted",
            _saved(kv_arrays=1),
            "dq needs k, and dp needs v: see the equations of section 3.",
        ),
        Mistake(
            "the heads are left out of the count",
            lambda T, S, N, K, H, itemsize: _saved()(T, S, 1, 1, H, itemsize),
            "q, out, lse and the table come once for each of N heads, k and v for each of K: see the exercise.",
        ),
        Mistake(
            "entries are counted instead of bytes",
            lambda T, S, N, K, H, itemsize: _saved(lse_bytes=1)(T, S, N, K, H, 1),
            "An entry takes itemsize bytes, and one of lse takes 4: see the case worked by hand.",
        ),
        Mistake(
            "k and v are counted with the length of the queries",
            lambda T, S, N, K, H, itemsize: tuple(
                saved + 2 * itemsize * K * (T - S) * H for saved in _saved()(T, S, N, K, H, itemsize)
            ),
            "k and v have S rows, and S need not be T: see the text of the exercise.",
        ),
        Mistake(
            "q, k and v are left out",
            _saved(inputs=0, flash_out=1),
            "dq, dk and the recomputed p need them: see the equations of section 3.",
        ),
    ),
)


# 6.5 The whole backward pass, tile by tile


def _tiled_cases():
    random = np.random.default_rng(65)

    def case(label, T, S, H, block_q, block_k, scale, spread=1.0, shift=0.0):
        q, k, v, dout = (_normal(random, n, H) for n in (T, S, S, T))
        q, k = np.round(8 * spread * q) / 8, np.round(8 * k) / 8  # their logits are exact in float32
        if shift:  # the first component moves every logit of a row
            q[:, 0], k[:, 0] = shift / scale / 2, 2
        return Case(
            f"{label}T={T}, S={S}, H={H}, scale={scale:g}, block_q={block_q}, block_k={block_k}",
            (q, k, v, dout, scale, block_q, block_k),
        )

    by_hand = np.ones((1, 1)), np.log([[1.0], [3.0]]).astype(np.float32).astype(np.float64)
    by_hand += np.array([[2.0], [6.0]]), np.ones((1, 1))
    return [
        Case("the case worked by hand", (*by_hand, 1.0, 1, 1)),
        case("", 5, 8, 3, 2, 3, 0.5),
        case("", 5, 8, 3, 2, 3, 1.0),
        case("more queries than keys, ", 10, 4, 2, 4, 3, 0.25),
        case("a single tile, ", 3, 5, 2, 8, 8, 0.5),
        case("peaked weights, ", 5, 8, 3, 2, 3, 0.25, spread=20.0),
        case("logits near 1000, ", 5, 8, 3, 2, 3, 0.5, shift=1000.0),
        case("logits near -1000, ", 5, 8, 3, 2, 3, 0.25, shift=-1000.0),
        case("long, ", LONG, LONG, 2, 16, 24, 0.5),
    ]


LONG = 150  # enough for whole tables to show in the memory that an answer takes, and soon done by loops over pairs


def _run_tiled(answer, q, k, v, dout, scale, block_q, block_k):
    """The results, and how they were built as far as NumPy's arrays tell."""
    T = len(q)
    out, lse = (array[0] for array in _oracle_of_heads(q[None], k[None], v[None], scale))
    lse, shapes = watch(lse)
    k, of_keys = watch(k, second=True)
    run = lambda: answer(q, k, v, out, lse, dout, scale, block_q, block_k)
    if T == LONG:
        ((result, whole), seen), by_jax = staged(lambda: kept(lambda: exceeds(10 * T * T, run), _is_table))
        seen = seen or any(map(_is_table, by_jax))
    else:
        result, whole, seen = run(), False, False
    whole = whole or seen or (LONG,) in of_keys  # the logits of one query and all keys, or of one key and all queries
    try:
        dq, dk, dv = result
    except (TypeError, ValueError):
        return result  # not three results: `expected` says so
    return dq, dk, dv, _built(shapes, block_q, block_k, whole) if T == LONG else "tiles"


def _is_table(shape):
    """Whether an array of the long case, made by any library, is a table of all queries and keys."""
    return math.prod(shape) >= LONG * LONG


def _built(shapes, block_q, block_k, whole):
    """What the shapes of the arrays made from lse tell of the tiles; where there are none, they tell nothing."""
    rows = {max(shape) for shape in shapes if shape and math.prod(shape) == max(shape) < LONG}
    tables = {tuple(sorted(shape)) for shape in shapes if len(shape) == 2 and min(shape) > 3}  # 3: head_dim
    tables -= {table for table in tables if math.prod(table) == LONG}  # lse itself, cut into tiles
    sizes_tell = tables and max(map(max, tables)) < LONG and tuple(sorted((block_q, block_k))) not in tables
    if sizes_tell or (rows and not rows & {block_q, block_k}):
        return "other tiles"
    if whole:
        return "more than a tile at once"
    return "tiles of block_k queries and block_q keys" if block_k in rows and block_q not in rows else "tiles"


def _expected_tiled(q, k, v, dout, scale, block_q, block_k):
    gradients = _gradients_of_heads(q[None], k[None], v[None], dout[None], scale)
    return *(gradient[0] for gradient in gradients), "tiles"


def _tiled(
    delta_of=lambda out, do, v: (out * do).sum(axis=1),
    tile_delta=None,
    p_of=lambda s, lse: np.exp(s - lse[:, None]),
    scale_s=1,
    scale_q=1,
    scale_k=1,
    scale_v=0,
    dp_of=lambda do, k, v: do @ v.T,
    keep="all",
    keys_like_queries=False,
    whole_tiles_of="",
    dv_from_ds=False,
    p_forgotten=False,
    whole=False,
):
    """The tiled backward pass with the mistakes that people make in it."""

    def answer(q, k, v, out, lse, dout, scale, block_q, block_k):
        if whole:
            block_q, block_k = len(q), len(k)
        delta = delta_of(out, dout, v)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        stop_q = len(q) // block_q * block_q if "q" in whole_tiles_of else len(q)
        stop_k = len(k) // block_k * block_k if "k" in whole_tiles_of else len(q) if keys_like_queries else len(k)
        for j in range(0, stop_k, block_k):
            cols = slice(j, j + block_k)
            for i in range(0, stop_q, block_q):
                rows = slice(i, i + block_q)
                p = p_of(scale**scale_s * q[rows] @ k[cols].T, lse[rows])
                dp = dp_of(dout[rows], k[cols], v[cols])
                ds = dp - (delta[rows, None] if tile_delta is None else tile_delta(p, dp))
                ds = ds if p_forgotten else p * ds
                if keep in ("last query tile", "last pair"):
                    dk[cols] = dv[cols] = 0
                if keep in ("last key tile", "last pair"):
                    dq[rows] = 0
                dv[cols] += scale**scale_v * (ds if dv_from_ds else p).T @ dout[rows]
                dk[cols] += scale**scale_k * ds.T @ q[rows]
                dq[rows] += scale**scale_q * ds @ k[cols]
        return dq, dk, dv

    return answer


def _tile_softmax(s, lse):
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def _aliased(*arguments):
    dq, dk, dv = _tiled()(*arguments)
    return dq, dk + dv, dk + dv


_TILED = Exercise(
    number="6.5",
    title="The whole backward pass, tile by tile",
    outputs=("dq", "dk", "dv", "what was built"),
    cases=_tiled_cases,
    tolerance=1e-4,  # float32 rounds an lse near 1000 to four digits behind the point
    run=_run_tiled,
    expected=_expected_tiled,
    tried="ragged tiles, uneven block sizes, T above and below S, peaked weights, logits near 1000 and -1000",
    mistakes=(
        Mistake(
            "delta is missing",
            _tiled(delta_of=lambda out, do, v: np.zeros(len(out))),
            LOOK_AT_DS + "it is p * (dp - delta), see section 2.",
        ),
        Mistake(
            "delta is added instead of subtracted",
            _tiled(delta_of=lambda out, do, v: -(out * do).sum(axis=1)),
            LOOK_AT_DS + "delta enters with a minus, see section 2.",
        ),
        Mistake(
            "delta is the row sum of dout, without out",
            _tiled(delta_of=lambda out, do, v: do.sum(axis=1)),
            LOOK_AT_DS + "delta is the row sum of out * dout, see section 4.",
        ),
        Mistake(
            "delta is the row sum of dp, without the weights p",
            _tiled(delta_of=lambda out, do, v: do @ v.T.sum(axis=1)),
            LOOK_AT_DS + "delta is the row sum of out * dout, see section 4.",
        ),
        Mistake(
            "delta is the sum of p * dp over one tile only",
            _tiled(tile_delta=lambda p, dp: (p * dp).sum(axis=1, keepdims=True)),
            LOOK_AT_DS + "delta is a sum over all keys, and out and dout have it ready, see section 4.",
        ),
        Mistake(
            "only the diagonal of the Jacobian is used, p (1 - p)",
            _tiled(tile_delta=lambda p, dp: p * dp),
            LOOK_AT_DS + "a softmax has a whole matrix of derivatives, see the slip in section 2.",
        ),
        Mistake(
            "the scale is missing in dq and dk",
            _tiled(scale_q=0, scale_k=0),
            "dv is right, and dq and dk are wrong by one constant factor: s = scale q kᵀ, see section 3.",
        ),
        Mistake(
            "the scale is applied twice in dq and dk",
            _tiled(scale_q=2, scale_k=2),
            "dv is right, and dq and dk are wrong by one constant factor: multiply once, see section 3.",
        ),
        Mistake(
            "the scale is missing in the recomputed logits",
            _tiled(scale_s=0),
            "All three are wrong, so look at p: its logits must be those of the forward pass, see section 7.",
        ),
        Mistake(
            "lse is forgotten in p, which is then exp(s)",
            _tiled(p_of=lambda s, lse: np.exp(s)),
            "All three are wrong, so look at p: it is exp(s - lse), see section 7.",
        ),
        Mistake(
            "p is measured from the maximum of the tile and not divided by its sum",
            _tiled(p_of=lambda s, lse: np.exp(s - s.max(axis=1, keepdims=True))),
            "All three are wrong, so look at p: lse holds maximum and sum of the whole row, see section 7.",
        ),
        Mistake(
            "p is the softmax of one tile",
            _tiled(p_of=_tile_softmax),
            "All three are wrong, so look at p: a tile does not know the sum of its row, but lse does, see section 7.",
        ),
        Mistake(
            "the two block sizes are exchanged",
            lambda q, k, v, out, lse, dout, scale, block_q, block_k: _tiled()(
                q, k, v, out, lse, dout, scale, block_k, block_q
            ),
            "The numbers are right, but block_q belongs to the queries and block_k to the keys: see section 8.",
        ),
        Mistake(
            "scale is ignored and 1 / sqrt(H) is used instead",
            lambda q, k, v, out, lse, dout, scale, *blocks: _tiled()(
                q, k, v, out, lse, dout, 1 / math.sqrt(q.shape[1]), *blocks
            ),
            "scale is an argument, and need not be one over the square root of H.",
        ),
        Mistake(
            "scale is divided by sqrt(H) once more",
            lambda q, k, v, out, lse, dout, scale, *blocks: _tiled()(
                q, k, v, out, lse, dout, scale / math.sqrt(q.shape[1]), *blocks
            ),
            "scale is all that multiplies q kᵀ: see the equations of section 3.",
        ),
        Mistake(
            "p is taken to base two",
            _tiled(p_of=lambda s, lse: np.exp2(s - lse[:, None])),
            "All three are wrong, so look at p: it is exp(s - lse), with np.exp, see section 7.",
        ),
        Mistake(
            "dk and dv are one and the same array, and each holds the sum of both",
            _aliased,
            "dk = dv = np.zeros_like(k) gives one array two names: make two.",
        ),
        Mistake(
            "dv is made from ds instead of p",
            _tiled(dv_from_ds=True),
            "Only dv is wrong: v meets p in the forward pass, see section 3.",
        ),
        Mistake(
            "dq is overwritten by each tile of keys instead of added to",
            _tiled(keep="last key tile"),
            "Only dq is wrong: it is a sum over all keys, so add to it, see section 8.",
        ),
        Mistake(
            "dk and dv are overwritten by each tile of queries instead of added to",
            _tiled(keep="last query tile"),
            "Only dq is right: dk and dv are sums over all queries, so add to them, see section 8.",
        ),
        Mistake(
            "all three gradients are overwritten by each pair of tiles instead of added to",
            _tiled(keep="last pair"),
            "Each pair of tiles adds its part to dq, dk and dv: use += for all three, see section 8.",
        ),
        Mistake(
            "the scale is missing in dq",
            _tiled(scale_q=0),
            "Only dq is wrong, by one constant factor: s = scale q kᵀ, see section 3.",
        ),
        Mistake(
            "the scale is missing in dk",
            _tiled(scale_k=0),
            "Only dk is wrong, by one constant factor: s = scale q kᵀ, see section 3.",
        ),
        Mistake(
            "the scale is missing everywhere",
            _tiled(scale_s=0, scale_q=0, scale_k=0),
            "The logits are scale * q @ k.T, and the factor comes back in dq and dk: see section 3.",
        ),
        Mistake(
            "dv is multiplied by the scale as well",
            _tiled(scale_v=1),
            "Only dv is wrong: the scale stands between q and k, and v never meets it, see section 3.",
        ),
        Mistake(
            "s and lse are exponentiated apart, as in exp(s) / exp(lse), where both may overflow or vanish",
            _tiled(p_of=lambda s, lse: np.exp(s) / np.exp(lse)[:, None]),
            "Subtract in the exponent, before you take it: p = exp(s - lse), see section 7.",
        ),
        Mistake(
            "lse is added to the logits instead of subtracted",
            _tiled(p_of=lambda s, lse: np.exp(s + lse[:, None])),
            "All three are wrong, so look at p: it is exp(s - lse), see section 7.",
        ),
        Mistake(
            "exp(s) is divided by lse, which is the logarithm of the sum",
            _tiled(p_of=lambda s, lse: np.exp(s) / lse[:, None]),
            "All three are wrong, so look at p: it is exp(s - lse), see section 7.",
        ),
        Mistake(
            "dp is made from the keys instead of the values",
            _tiled(dp_of=lambda do, k, v: do @ k.T),
            LOOK_AT_DS + "out = p v, so dp = dout vᵀ, see section 3.",
        ),
        Mistake(
            "ds is not multiplied by p",
            _tiled(p_forgotten=True),
            LOOK_AT_DS + "it is p * (dp - delta), see section 2.",
        ),
        Mistake(
            "delta is the mean of out * dout over a row instead of its sum",
            _tiled(delta_of=lambda out, do, v: (out * do).mean(axis=1)),
            LOOK_AT_DS + "delta is the row sum of out * dout, see section 4.",
        ),
        Mistake(
            "the loop over the keys ends with the queries",
            _tiled(keys_like_queries=True),
            "There are S keys, and S need not be T: see the text of the exercise.",
        ),
        Mistake(
            "the ragged last tiles are left out",
            _tiled(whole_tiles_of="qk"),
            "The lengths need not be multiples of the tiles; a slice past the end is simply shorter: see section 8.",
            variants=(_tiled(whole_tiles_of="q"), _tiled(whole_tiles_of="k")),
        ),
        Mistake(
            "tiles of other sizes are used than block_q queries by block_k keys",
            lambda q, k, v, out, lse, dout, scale, block_q, block_k: _tiled()(q, k, v, out, lse, dout, scale, 32, 32),
            "The numbers are right, but the sizes of the tiles are arguments: see the text of the exercise.",
        ),
        Mistake(
            "more than a tile is held at once: whole rows, whole columns, or all of the (T, S) table",
            _tiled(whole=True),
            "The numbers are right, but the memory grows with the lengths: loop over tiles of both, see section 8.",
        ),
    ),
)


EXERCISES = (_DS, _DELTA, _PRODUCTS, _SAVE, _TILED)
