"""The exercises of notebook 05.

Kernels are replayed here on every device: the small cases need tiles that a GPU rejects, a wrong
index must do no harm, and a verdict must not depend on the hardware.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention.reference import oracle
from helpers.exercises import tile_bounds
from helpers.exercises.checking import Case, Complaint, Exercise, Mistake
from helpers.measure.traffic import replay

LOG2_E = math.log2(math.e)


def _float32(array):
    return np.asarray(array, np.float32)


def _head_oracle(q, k, v):
    """(out, lse) of one head whose logits are q @ k.T."""
    out, lse = oracle(*(_float32(array)[:, None, :] for array in (q, k, v)), scale=1.0)
    return out[:, 0], lse[:, 0]


# 5.1 The loop body


def _body_cases():
    by_hand = (np.ones((1, 1)), np.log([[1.0], [3.0], [2.0], [8.0]]), np.array([[1.0], [2.0], [3.0], [4.0]]), 2)
    cases = [Case("the case worked by hand", (*map(_float32, by_hand[:3]), 2))]
    random = np.random.default_rng(51)
    for label, T, S, H, block_k, push in [
        ("T=6, S=12, H=3, block_k=4, the largest logits in the last tile", 6, 12, 3, 4, (0, 20, 60)),
        ("T=8, S=15, H=4, block_k=5, the largest logits in the first tile", 8, 15, 4, 5, (200, 0, -20)),
        (
            "T=6, S=12, H=3, block_k=4, large logits for some queries, far below 0 for others",
            6,
            12,
            3,
            4,
            (90, 150, 120),
        ),
        (
            "T=6, S=12, H=3, block_k=4, the largest in the middle, all far below 0",
            6,
            12,
            3,
            4,
            (-400, -170, -350),
        ),
        ("T=6, S=12, H=3, block_k=4, logits 200 apart in each tile", 6, 12, 3, 4, (0, -200, 0, -100) * 3),
    ]:
        q, k, v = (random.standard_normal((length, H)) for length in (T, S, S))
        # The first component of q is 1, so that of k moves the logits of a whole tile.
        q[:, 0] = 1
        if "others" in label:
            q[1::2, 0] = -1
        k[:, 0] += np.repeat(push, S // len(push))
        cases.append(Case(label, (*map(_float32, (q, k, v)), block_k)))
    return cases


def _run_body(answer, q, k, v, block_k):
    (T, H), S = q.shape, len(k)

    def kernel(q_ref, k_ref, v_ref, out_ref, lse_ref, m_ref):
        def one_key_tile(j, state):
            tile = pl.ds(j * block_k, block_k)
            new = answer(q_ref[...], k_ref[tile, :], v_ref[tile, :], *state)
            return _like(new, ("m", "l", "acc"), state)

        state = jnp.full(T, -jnp.inf, jnp.float32), jnp.zeros(T, jnp.float32), jnp.zeros((T, H), jnp.float32)
        m, l, acc = lax.fori_loop(0, S // block_k, one_key_tile, state)
        out_ref[...] = acc / l[:, None]
        lse_ref[...] = m + jnp.log(l)
        m_ref[...] = m

    return _replayed(kernel, ((T, H), (T,), (T,)), q, k, v)


def _expected_body(q, k, v, block_k):
    logits = q.astype(np.float64) @ k.T.astype(np.float64)
    return *_head_oracle(q, k, v), logits.max(axis=1)


def _like(values, names, templates):
    """The values as float32, or a complaint that says which of them is missing or has a wrong shape."""
    wanted = f"({', '.join(names)})"
    if values is None:
        raise Complaint(f"expected {wanted}, got None: is a `return` missing?")
    if not isinstance(values, tuple | list) or len(values) != len(names):
        got = f"{len(values)} values" if isinstance(values, tuple | list) else "one value"
        raise Complaint(f"expected {len(names)} values {wanted}, got {got}")
    for name, value, template in zip(names, values, templates, strict=True):
        if not hasattr(value, "shape") or not hasattr(value, "astype"):
            raise Complaint(f"{name}: expected an array of shape {template.shape}")
        if value.shape != template.shape:
            raise Complaint(f"{name}: expected shape {template.shape}, got {value.shape}")
    return tuple(jnp.asarray(value).astype(jnp.float32) for value in values)


def _replayed(kernel, shapes, *arguments):
    call = pl.pallas_call(kernel, out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    with jax.default_matmul_precision("highest"):
        _, results = replay(call, *arguments)
    return [np.asarray(result, np.float64) for result in results]  # no advice to use it: a kernel has float32 alone


def _rescaled(alpha, old, new):
    return alpha * old + new


def _added(alpha, old, new):
    return old + new


def _replaced(alpha, old, new):
    return new


def _the_new_rescaled(alpha, old, new):
    return old + alpha * new


def _both_rescaled(alpha, old, new):
    return alpha * (old + new)


def _body(
    l_of=_rescaled,
    acc_of=_rescaled,
    invert=False,
    old_reference=False,
    tile_reference=False,
    no_reference=False,
    divide=False,
    keep_m=False,
    shared_maximum=False,
    scale_again=False,
    own_unit=False,
    exchange=False,
    exp=jnp.exp,
    exp_of_p=None,
):
    def one_key_tile(q, k, v, m, l, acc):
        k, v = (v, k) if exchange else (k, v)
        s = q @ k.T / (math.sqrt(q.shape[1]) if scale_again else 1)
        largest = s.max() if shared_maximum else s.max(axis=1)
        m_new = largest if tile_reference else jnp.maximum(m, largest)
        alpha = exp(m_new - m) if invert else exp(m - m_new)
        unit = m if old_reference else s.max(axis=1) if own_unit else 0 * m_new if no_reference else m_new
        p = (exp_of_p or exp)(s - unit[:, None])
        l_new, acc = l_of(alpha, l, p.sum(axis=1)), acc_of(alpha[:, None], acc, p @ v)
        return m if keep_m else m_new, l_new, acc / l_new[:, None] if divide else acc

    return one_key_tile


_LOOP_BODY = Exercise(
    number="5.1",
    title="The loop body",
    outputs=("out (from your acc and l)", "lse (from your m and l)", "m"),
    cases=_body_cases,
    expected=_expected_body,
    run=_run_body,
    tried="2 or 3 tiles of 2 to 5 keys, the largest logits first, last and in the middle, from -400 to 200",
    mistakes=(
        Mistake(
            "acc is not rescaled by alpha",
            _body(acc_of=_added),
            "What acc holds was measured from the old maximum, just like l: reread the equations of section 2.",
        ),
        Mistake(
            "l is not rescaled by alpha",
            _body(l_of=_added),
            "What l holds was measured from the old maximum, just like acc: reread the equations of section 2.",
        ),
        Mistake(
            "neither l nor acc is rescaled by alpha",
            _body(l_of=_added, acc_of=_added),
            "When the maximum moves, everything summed so far shrinks by alpha: reread the equations of section 2.",
        ),
        Mistake(
            "alpha is upside down or no exponential, or the new m is not the larger of the two",
            _body(invert=True),
            "m' is max(m, ...) and alpha is exp(m - m'), never above one: reread the equations of section 2.",
        ),
        Mistake(
            "p is taken with the old maximum",
            _body(old_reference=True),
            "Compute the new maximum first and subtract that one: reread the equations of section 2.",
        ),
        Mistake(
            "m is the maximum of the tile instead of the maximum so far",
            _body(tile_reference=True),
            "It works until a tile lies far below an earlier one, then alpha overflows: section 2 takes max(m, ...).",
        ),
        Mistake(
            "one maximum is taken over the whole tile instead of one for each query",
            _body(shared_maximum=True),
            "A query far below the others loses all its exponentials: rowmax in section 2 has an entry for each query.",
        ),
        Mistake(
            "p is measured from the tile's own maximum, in another unit than the sums that it is added to",
            _body(own_unit=True),
            "Subtract the new maximum, which may be the old one: reread the equations of section 2.",
        ),
        Mistake(
            "all exponentials are taken to base two",
            _body(exp=jnp.exp2),
            "Base two comes later, with logits to match; here it is jnp.exp: reread the equations of section 2.",
        ),
        Mistake(
            "p is taken to base two, and alpha to base e",
            _body(exp_of_p=jnp.exp2),
            "Both are exponentials in one base, jnp.exp: reread the equations of section 2.",
        ),
        Mistake(
            "the logits are scaled a second time",
            _body(scale_again=True),
            "q is already multiplied by the scale: see the text of the exercise.",
        ),
        Mistake(
            "the old m is returned instead of the new one",
            _body(keep_m=True),
            "The next tile must know the maximum so far: return m' of section 2.",
        ),
        Mistake(
            "acc is divided by l inside the loop",
            _body(divide=True),
            "The division comes once, after the loop: reread the equations of section 2.",
        ),
        Mistake(
            "each tile starts afresh and the state so far is lost",
            _body(l_of=_replaced, acc_of=_replaced),
            "The new l and acc must contain the old ones, times alpha: reread the equations of section 2.",
        ),
        Mistake(
            "the sum l so far is lost",
            _body(l_of=_replaced),
            "The new l contains the old one, times alpha, just as acc does: reread the equations of section 2.",
        ),
        Mistake(
            "acc so far is lost",
            _body(acc_of=_replaced),
            "The new acc contains the old one, times alpha, just as l does: reread the equations of section 2.",
        ),
        Mistake(
            "alpha multiplies what the tile adds instead of what was there",
            _body(l_of=_the_new_rescaled, acc_of=_the_new_rescaled),
            "The tile is measured from the new maximum already, the old sums are not: reread section 2.",
        ),
        Mistake(
            "alpha multiplies the old sums and what the tile adds",
            _body(l_of=_both_rescaled, acc_of=_both_rescaled),
            "The tile is measured from the new maximum already: only the old l and acc are multiplied, see section 2.",
        ),
        Mistake(
            "p is exp(s), with no maximum subtracted",
            _body(no_reference=True),
            "l and acc are measured from the new maximum, so p must be as well: reread the equations of section 2.",
        ),
        Mistake(
            "alpha is taken to base two, and p to base e",
            _body(exp=jnp.exp2, exp_of_p=jnp.exp),
            "Both are exponentials in one base, jnp.exp: reread the equations of section 2.",
        ),
        Mistake(
            "a first m of -inf is replaced by 0, and no logit of the query is that large",
            lambda q, k, v, m, l, acc: _body()(q, k, v, jnp.where(m == -jnp.inf, 0, m), l, acc),
            "Nothing has to be replaced: at the first tile alpha is e^(-inf), which is 0. Reread section 2.",
        ),
        Mistake(
            "keys and values change places",
            _body(exchange=True),
            "Queries meet the keys k, and p multiplies the values v: reread the equations of section 2.",
        ),
        Mistake(
            "l and m are returned in each other's place",
            lambda *arguments: (lambda m, l, acc: (l, m, acc))(*_body()(*arguments)),
            "The order asked for is (m, l, acc): see the text of the exercise.",
        ),
    ),
)


# 5.2 The end of the kernel


def _finish_cases():
    random = np.random.default_rng(52)
    by_hand = Case("the case worked by hand", (_float32([1, -np.inf]), _float32([1.5, 0]), _float32([[3, 6], [0, 0]])))
    cases = [by_hand]
    for rows, H, shift, empty in [(4, 2, 0, [1]), (9, 5, 300, []), (16, 16, -300, [0, 7, 15])]:
        m = shift + 4 * random.standard_normal(rows)
        l = 1 + 9 * random.random(rows)
        acc = random.standard_normal((rows, H)) * l[:, None]
        m[empty], l[empty], acc[empty] = -np.inf, 0, 0
        label = f"{rows} rows, H={H}, m near {shift}, {len(empty)} of them without a key"
        cases.append(Case(label, tuple(map(_float32, (m, l, acc)))))
    return cases


def _finish_expected(m, l, acc):
    m, l, acc = (array.astype(np.float64) for array in (m, l, acc))
    out, lse = np.zeros_like(acc), np.full_like(m, -np.inf)
    for row in np.flatnonzero(l):
        out[row] = acc[row] / l[row]
        lse[row] = math.log(2) * m[row] + math.log(l[row])
    return out, lse


def _run_finish(answer, m, l, acc):
    def kernel(m_ref, l_ref, acc_ref, out_ref, lse_ref):
        state = m_ref[...], l_ref[...], acc_ref[...]
        out_ref[...], lse_ref[...] = _like(answer(*state), ("out", "lse"), (state[2], state[0]))

    return _replayed(kernel, (acc.shape, m.shape), m, l, acc)


def _finish(lse=None, guard=True, finite_m=False, out=lambda acc, m, l: acc / l):
    def finish(m, l, acc):
        l_safe = jnp.where(l == 0, 1, l) if guard else l
        m_used = jnp.where(m == -jnp.inf, 0, m) if finite_m else m
        right = (m_used + jnp.log2(l_safe)) / LOG2_E
        return out(acc, m[:, None], l_safe[:, None]), right if lse is None else lse(m_used, l_safe)

    return finish


_FINISH = Exercise(
    number="5.2",
    title="The end of the kernel",
    outputs=("out", "lse"),
    cases=_finish_cases,
    expected=_finish_expected,
    run=_run_finish,
    tried="2 to 16 rows, m from far below 0 to far above, rows without a key among them",
    mistakes=(
        Mistake(
            "lse is left in base 2",
            _finish(lambda m, l: m + jnp.log2(l)),
            "Multiply by ln 2, which is dividing by log2 e: see the last equation of section 8.",
        ),
        Mistake(
            "lse is multiplied by log2 e instead of divided",
            _finish(lambda m, l: (m + jnp.log2(l)) * LOG2_E),
            "ln x is log2 x times ln 2, which is dividing by log2 e: see the last equation of section 8.",
        ),
        Mistake(
            "m in base 2 is added to a natural logarithm of l",
            _finish(lambda m, l: m + jnp.log(l)),
            "Both terms must have one base: see the last equation of section 8.",
        ),
        Mistake(
            "only m is converted and the logarithm of l stays in base 2",
            _finish(lambda m, l: m / LOG2_E + jnp.log2(l)),
            "Both terms must have one base: see the last equation of section 8.",
        ),
        Mistake(
            "l is added without its logarithm",
            _finish(lambda m, l: m / LOG2_E + l),
            "lse is the logarithm of the sum: see the last equation of section 1.",
        ),
        Mistake(
            "a row without a key is divided by zero",
            _finish(guard=False),
            "Put 1 in place of an l that is 0 before you divide: see the text of the exercise.",
        ),
        Mistake(
            "a row without a key gets the lse 0 instead of minus infinity",
            _finish(finite_m=True),
            "exp(lse) is the sum over the keys seen, which is 0 for no key: see the text of the exercise.",
        ),
        Mistake(
            "out is not divided by l",
            _finish(out=lambda acc, m, l: acc),
            "acc is a sum of p v; the weights add up to one only after the division: see section 1.",
        ),
        Mistake(
            "lse is m alone, converted, without log l",
            _finish(lambda m, l: m / LOG2_E),
            "lse is the logarithm of 2^m times l: see the text of the exercise.",
        ),
        Mistake(
            "a natural logarithm of l is divided by log2 e as well",
            _finish(lambda m, l: (m + jnp.log(l)) / LOG2_E),
            "Only what is in base two is converted: jnp.log2(l), or convert m alone. See the equation of section 8.",
        ),
        Mistake(
            "lse is log l alone, without m",
            _finish(lambda m, l: jnp.log(l)),
            "l is measured from m, so lse is the logarithm of 2^m times l: see the text of the exercise.",
        ),
        Mistake(
            "lse is m alone, in base two, without log l",
            _finish(lambda m, l: m),
            "lse is the natural logarithm of 2^m times l: see the text of the exercise.",
        ),
        Mistake(
            "m is multiplied by log2 e instead of divided",
            _finish(lambda m, l: m * LOG2_E + jnp.log(l)),
            "ln x is log2 x times ln 2, which is dividing by log2 e: see the last equation of section 8.",
        ),
        Mistake(
            "the logarithm of l is subtracted instead of added",
            _finish(lambda m, l: (m - jnp.log2(l)) / LOG2_E),
            "The logarithm of the product 2^m l is a sum: see the text of the exercise.",
        ),
        Mistake(
            "2^m is formed before the logarithm is taken, and overflows or vanishes",
            _finish(lambda m, l: jnp.log(jnp.exp2(m) * l)),
            "A float32 ends at 2^128: add the logarithms instead, as in the equation of section 1.",
        ),
        Mistake(
            "m is taken for a maximum in base e, and e^m is formed besides, which overflows or vanishes",
            _finish(lambda m, l: jnp.log(jnp.exp(m) * l)),
            "m is in base two, and logarithms can be added without any power: see the last equation of section 8.",
        ),
        Mistake(
            "a row without a key gets the lse plus infinity",
            lambda m, l, acc: (_finish()(m, l, acc)[0], jnp.where(l == 0, jnp.inf, _finish()(m, l, acc)[1])),
            "The sum over no key is 0, and its logarithm is minus infinity: see the text of the exercise.",
        ),
        Mistake(
            "a row without a key gets minus infinity in out as well",
            lambda m, l, acc: (jnp.where(l[:, None] == 0, -jnp.inf, acc / l[:, None]), _finish()(m, l, acc)[1]),
            "Only its lse is minus infinity; its out is 0: see the text of the exercise.",
        ),
        Mistake(
            "out is multiplied by l instead of divided",
            _finish(out=lambda acc, m, l: acc * l),
            "acc is a sum of p v; the weights add up to one only after the division: see section 1.",
        ),
        Mistake(
            "out is divided by 2^m times l",
            _finish(out=lambda acc, m, l: acc / (l * jnp.exp2(m))),
            "acc and l are measured from the same m, which cancels in acc / l: see section 1.",
        ),
    ),
)


# 5.3 The bounds of the loop


_BOUNDS_SHAPES = [
    # i, T, S, block_q, block_k, left
    (0, 64, 64, 32, 16, None),
    (1, 64, 64, 32, 16, None),
    (1, 64, 64, 16, 32, None),
    (2, 48, 48, 16, 32, None),
    (2, 40, 128, 16, 8, None),
    (1, 33, 48, 32, 16, None),
    (3, 128, 40, 32, 16, None),
    (3, 128, 33, 32, 16, None),
    (1, 64, 64, 32, 16, 8),
    (0, 64, 64, 16, 16, 20),
    (3, 128, 128, 32, 16, 20),
    (3, 128, 128, 32, 16, 16),
    (3, 128, 128, 32, 16, 17),
    (2, 96, 96, 32, 64, 0),
    (4, 100, 70, 16, 16, 30),
    (6, 128, 40, 16, 16, 8),
    (3, 128, 40, 16, 16, 8),  # the window has just left the keys behind
    (8, 256, 100, 16, 16, 24),
    (4, 256, 100, 32, 16, 28),
    (2, 100, 7, 4, 8, 0),
    (2, 7, 7, 3, 2, 1),
    (1, 6, 6, 2, 1, None),
    (0, 6, 6, 2, 1, 3),
    (1, 50, 50, 12, 8, 3),
]


def _round_up(a, b):
    return -(-a // b)


def _bounds(
    stop_key=lambda q_start, q_stop, T, S: min(q_stop, S),
    first_key=lambda q_start, q_stop, left: max(q_start - left, 0),
    first_tile=lambda key, block_k: key // block_k,
    stop_tile=_round_up,
    full_queries=False,
    guard=True,
    without_window=None,
):
    def tile_range(i, T, S, block_q, block_k, left=None):
        q_start, q_stop = i * block_q, (i + 1) * block_q if full_queries else min((i + 1) * block_q, T)
        left = without_window if left is None else left
        first = 0 if left is None else first_key(q_start, q_stop, left)
        stop = stop_key(q_start, q_stop, T, S)
        if guard and first >= stop:
            return 0, 0
        return first_tile(first, block_k), stop_tile(stop, block_k)

    return tile_range


_BOUNDS = Exercise(
    number="5.3",
    title="The bounds of the loop",
    outputs=("(first, stop)",),
    cases=lambda: tile_bounds.OVER_KEYS.cases(_BOUNDS_SHAPES),
    run=tile_bounds.run,
    judge=tile_bounds.OVER_KEYS.judge,
    tried="T below, equal to and above S, block_q below and above block_k, ragged ends, with and without a window",
    mistakes=(
        Mistake(
            "stop is rounded down instead of up (too few tiles)",
            _bounds(stop_tile=lambda key, block_k: key // block_k),
            "A tile that holds even one visible key must be read: reread the rule of section 5.",
        ),
        Mistake(
            "stop is measured from the first query of the tile instead of the last (too few tiles)",
            _bounds(stop_key=lambda q_start, q_stop, T, S: min(q_start + 1, S)),
            "The last query of the tile sees furthest: reread section 5.",
        ),
        Mistake(
            "stop is the last tile instead of the one after it (too few tiles)",
            _bounds(stop_tile=lambda key, block_k: (key - 1) // block_k),
            "stop is not included, as in a range: see the text of the exercise.",
        ),
        Mistake(
            "left = 0 is taken for no window (too many tiles)",
            lambda i, T, S, block_q, block_k, left=None: _bounds()(i, T, S, block_q, block_k, left or None),
            "With left = 0 a query sees its own key alone; only None means no limit: see the text of the exercise.",
        ),
        Mistake(
            "stop is off by one at the diagonal (too many tiles)",
            _bounds(stop_key=lambda q_start, q_stop, T, S: min(q_stop + 1, S)),
            "The last query, q_stop - 1, sees keys up to itself, so the first hidden key is q_stop: see section 5.",
        ),
        Mistake(
            "the key of the last query itself is left out (too few tiles)",
            _bounds(stop_key=lambda q_start, q_stop, T, S: min(q_stop - 1, S)),
            "A causal query sees its own key, so the first hidden key is q_stop: see section 5.",
        ),
        Mistake(
            "stop is i + 1, which holds only when block_q equals block_k",
            lambda i, T, S, block_q, block_k, left=None: (
                0 if left is None else max(i * block_q - left, 0) // block_k,
                i + 1,
            ),
            "Count in keys first, then divide by block_k: reread section 5.",
        ),
        Mistake(
            "no tile is skipped on the right (too many tiles)",
            _bounds(stop_key=lambda q_start, q_stop, T, S: S),
            "Causal queries see nothing to the right of the diagonal: reread section 5.",
        ),
        Mistake(
            "stop runs past the last key (too many tiles)",
            _bounds(stop_key=lambda q_start, q_stop, T, S: q_stop),
            "With T above S the diagonal leaves the table: cut it at S, see the text of the exercise.",
        ),
        Mistake(
            "the last tile of queries is taken to be full (too many tiles)",
            _bounds(full_queries=True),
            "Queries from T on do not exist and see nothing: cut q_stop at T, see the text of the exercise.",
        ),
        Mistake(
            "a window that has left all keys behind is not thought of (too many tiles)",
            _bounds(guard=False),
            "Where the first key seen is S or later there is no key: rounding must not bring back the last tile.",
        ),
        Mistake(
            "the left window is ignored (too many tiles)",
            _bounds(first_key=lambda q_start, q_stop, left: 0),
            "The first query of the tile sees back to key q_start - left: see the text of the exercise.",
        ),
        Mistake(
            "first is rounded up instead of down (too few tiles)",
            _bounds(first_tile=_round_up),
            "A tile that holds even one visible key must be read: reread the rule of section 5.",
        ),
        Mistake(
            "first is measured from the last query of the tile instead of the first (too few tiles)",
            _bounds(first_key=lambda q_start, q_stop, left: max(q_stop - 1 - left, 0)),
            "The first query of the tile sees furthest to the left: see the text of the exercise.",
        ),
        Mistake(
            "the window is one key too short (too few tiles)",
            _bounds(first_key=lambda q_start, q_stop, left: max(q_start - left + 1, 0)),
            "Query n sees key n - left too: see the text of the exercise.",
        ),
        Mistake(
            "the window is one key too long (too many tiles)",
            _bounds(first_key=lambda q_start, q_stop, left: max(q_start - left - 1, 0)),
            "The first key that query n sees is n - left: see the text of the exercise.",
        ),
        Mistake(
            "first is not cut at 0, so the loop starts before the first key",
            _bounds(first_key=lambda q_start, q_stop, left: q_start - left),
            "There is no key below 0: see the text of the exercise.",
        ),
        Mistake(
            "neither T nor S cuts the range (too many tiles)",
            _bounds(full_queries=True, stop_key=lambda q_start, q_stop, T, S: q_stop),
            "There are no queries from T on and no keys from S on: see the text of the exercise.",
        ),
        Mistake(
            "stop is one tile too far where the last key ends its tile (too many tiles)",
            _bounds(stop_tile=lambda key, block_k: key // block_k + 1),
            "Rounding up leaves an exact multiple as it is; stop // block_k + 1 does not: see the hints.",
        ),
        Mistake(
            "stop is measured from the key before the first query (too few tiles)",
            _bounds(stop_key=lambda q_start, q_stop, T, S: min(q_start, S)),
            "The last query of the tile sees furthest, and it sees its own key: reread section 5.",
        ),
        Mistake(
            "the two tile sizes change places",
            lambda i, T, S, block_q, block_k, left=None: _bounds()(i, T, S, block_k, block_q, left),
            "Query tile i begins at query i * block_q, and keys are counted in tiles of block_k: see section 5.",
        ),
        Mistake(
            "keys are counted in tiles of block_q",
            lambda i, T, S, block_q, block_k, left=None: _bounds()(i, T, S, block_q, block_q, left),
            "Key tile j begins at key j * block_k: see the case worked by hand.",
        ),
        Mistake(
            "no window is taken for a window of 0",
            _bounds(without_window=0),
            "left is None means without limit, so the loop begins at tile 0: see the text of the exercise.",
        ),
        Mistake(
            "the range is given in keys instead of tiles",
            _bounds(first_tile=lambda key, block_k: key, stop_tile=lambda key, block_k: key),
            "Divide both ends by block_k, the first rounded down and the second up: see the hints.",
        ),
        Mistake(
            "left is counted in tiles instead of keys",
            lambda i, T, S, block_q, block_k, left=None: (
                0 if left is None else max(i - left, 0) * block_q // block_k,
                _bounds()(i, T, S, block_q, block_k)[1],
            ),
            "left is a number of keys: take it off the position of the first query, see the text of the exercise.",
        ),
        Mistake(
            "the second number is how many tiles there are instead of where they stop",
            lambda *arguments: (lambda first, stop: (first, stop - first))(*_bounds()(*arguments)),
            "Return (first, stop) as a range has them, with stop not included: see the text of the exercise.",
        ),
        Mistake(
            "the last query is aligned with the last key",
            lambda i, T, S, block_q, block_k, left=None: _bounds(
                stop_key=lambda q_start, q_stop, T, S: min(q_stop + S - T, S),
                first_key=lambda q_start, q_stop, left: max(q_start + S - T - left, 0),
            )(i, T, S, block_q, block_k, left),
            "Query n sees key n, whatever T and S are: see the text of the exercise.",
        ),
    ),
)


# 5.4 The index map of grouped queries


def _gqa_cases():
    shapes = [(1, 2, 3, 6, 2, 2), (2, 4, 3, 4, 2, 3), (2, 2, 5, 3, 1, 2), (2, 4, 2, 3, 3, 2)]
    return [
        Case(f"N={N} query heads, K={K} key/value heads, B={B}, query tiles: {T // 2}", shape)
        for shape in shapes
        for B, T, _, N, K, _ in [shape]
    ]


def _run_gqa(answer, B, T, S, N, K, H):
    """(i, n, b) of each program, in tiles of two queries, and the four indices of the block that it asked for."""
    q, k = np.ones((B, T, N, H), np.float32), np.ones((B, S, K, H), np.float32)

    def kernel(q_ref, k_ref, out_ref):
        out_ref[...] = q_ref[...] @ k_ref[...].T

    def index_map(i, n, b):
        block = answer(i, n, b, N, K)
        if block is None:
            raise Complaint("expected four block indices, got None: is a `return` missing?")
        if not isinstance(block, tuple | list) or len(block) != 4:
            raise Complaint("return four block indices, one for each axis of k (B, S, K, H)")
        for index in block:
            if not hasattr(index, "dtype") and not isinstance(index, int | float):
                raise Complaint("every block index must be an integer")
            if np.shape(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
                raise Complaint("every block index must be an integer: divide with //, not with /")
        return tuple(block)

    call = pl.pallas_call(
        kernel,
        grid=(T // 2, N, B),
        in_specs=[
            pl.BlockSpec((None, 2, None, H), lambda i, n, b: (b, i, n, 0)),
            pl.BlockSpec((None, S, None, H), index_map),
        ],
        out_specs=pl.BlockSpec((None, 2, None, S), lambda i, n, b: (b, i, n, 0)),
        out_shape=jax.ShapeDtypeStruct((B, T, N, S), jnp.float32),
    )
    (kernel_call,), _ = replay(call, q, k)
    return np.hstack([kernel_call.programs, kernel_call.operands["k"].block_of])


def _judge_gqa(result, case):
    _, _, _, N, K, _ = case.arguments
    for i, n, b, *block in result.tolist():
        right = [b, 0, n // (N // K), 0]
        if block != right:
            return f"program (i={i}, n={n}, b={b}) reads block {tuple(block)} of k, expected {tuple(right)}"
    return None


_GQA = Exercise(
    number="5.4",
    title="The index map of grouped queries",
    outputs=("blocks",),
    cases=_gqa_cases,
    run=_run_gqa,
    judge=_judge_gqa,
    tried="6 heads on 2, 4 on 2, 3 on 1 and 3 on 3, one and two batch entries, one and two query tiles",
    mistakes=(
        Mistake(
            "the key/value head is n % K",
            lambda i, n, b, N, K: (b, 0, n % K, 0),
            "That deals the query heads out in turn; neighbours share a head: see the picture of section 7.",
        ),
        Mistake(
            "the key/value head is n itself, which runs past the last head",
            lambda i, n, b, N, K: (b, 0, n, 0),
            "There are only K heads of keys: see the picture of section 7.",
        ),
        Mistake(
            "n is divided by K instead of by the size of a group",
            lambda i, n, b, N, K: (b, 0, n // K, 0),
            "A group has N // K query heads, and the head is n divided by that: see the start of section 7.",
        ),
        Mistake(
            "every query head reads key/value head 0",
            lambda i, n, b, N, K: (b, 0, 0, 0),
            "Only with K = 1 do all heads share one: see the picture of section 7.",
        ),
        Mistake(
            "every batch entry reads the keys of the first",
            lambda i, n, b, N, K: (0, 0, n // (N // K), 0),
            "The first axis of k is the batch, and its block index is b: see the text of the exercise.",
        ),
        Mistake(
            "the keys move along with the query tile",
            lambda i, n, b, N, K: (b, i, n // (N // K), 0),
            "The block holds all S keys, so its index on that axis is always 0: see the text of the exercise.",
        ),
        Mistake(
            "the index is the first query head of the group instead of the key/value head",
            lambda i, n, b, N, K: (b, 0, n // (N // K) * (N // K), 0),
            "There are K heads of keys, and the index counts those: see the picture of section 7.",
        ),
        Mistake(
            "the key/value head is the place within the group, n % (N // K)",
            lambda i, n, b, N, K: (b, 0, n % (N // K), 0),
            "All query heads of a group read one head; divide with // instead of %: see the picture of section 7.",
        ),
        Mistake(
            "the head stands on the axis of the keys",
            lambda i, n, b, N, K: (b, n // (N // K), 0, 0),
            "The axes of k are (B, S, K, H), so the head is the third index: see the text of the exercise.",
        ),
        Mistake(
            "the head stands on the last axis",
            lambda i, n, b, N, K: (b, 0, 0, n // (N // K)),
            "The axes of k are (B, S, K, H), so the head is the third index: see the text of the exercise.",
        ),
        Mistake(
            "the head and the batch entry change places",
            lambda i, n, b, N, K: (n // (N // K), 0, b, 0),
            "The axes of k are (B, S, K, H), so b is the first index: see the text of the exercise.",
        ),
        Mistake(
            "the indices come in the order of the grid, (i, n, b)",
            lambda i, n, b, N, K: (i, n, b, 0),
            "They follow the axes of k, which are (B, S, K, H): see the text of the exercise.",
        ),
        Mistake(
            "the query tile stands where the batch entry belongs",
            lambda i, n, b, N, K: (i, 0, n // (N // K), 0),
            "The first axis of k is the batch, and its block index is b: see the text of the exercise.",
        ),
        Mistake(
            "heads are counted from one",
            lambda i, n, b, N, K: (b, 0, n // (N // K) + 1, 0),
            "Block indices begin at 0, like all indices: see the case worked by hand.",
        ),
    ),
)


# 5.5 The bytes of a causal kernel


def _bytes_cases():
    shapes = [
        (4, 2, 4, 2, 2),
        (12, 4, 2, 3, 2),
        (12, 3, 4, 2, 3),
        (30, 8, 2, 6, 5),
        (64, 32, 2, 16, 32),
        (128, 64, 2, 64, 16),
        (256, 128, 4, 32, 32),
        (192, 16, 2, 32, 64),
    ]
    return [
        Case(f"T=S={T}, H={H}, {itemsize} bytes an element, block_q={block_q}, block_k={block_k}", shape)
        for shape in shapes
        for T, H, itemsize, block_q, block_k in [shape]
    ]


def _bytes_expected(T, H, itemsize, block_q, block_k):
    rows_read = sum(
        block_k * len(tile_bounds.OVER_KEYS.needed(i, T, T, block_q, block_k, None)) for i in range(T // block_q)
    )  # of k, and as many of v
    return 2 * T * H * itemsize + 4 * T + 2 * rows_read * H * itemsize


def _bytes(rows="tiles", q_rows=None, lse_bytes=4, kv=2, qo=2):
    def causal_bytes(T, H, itemsize, block_q, block_k):
        programs = T // block_q
        stops = [-(-(i + 1) * block_q // block_k) for i in range(programs)]
        rows_read = {
            "tiles": block_k * sum(stops),
            "all": T * programs,
            "half": T * programs // 2,
            "pairs": T * (T + 1) // 2,
            "once": T,
            "diagonal": block_q * programs * (programs + 1) // 2,
            "floor": block_k * sum((i + 1) * block_q // block_k for i in range(programs)),
            "square": block_k * programs * (programs + 1) // 2,
            "count": sum(stops),
            "from the first": block_k * sum(i * block_q // block_k + 1 for i in range(programs)),
            "one more": block_k * sum((i + 1) * block_q // block_k + 1 for i in range(programs)),
            "one more, cut": block_k
            * sum(min((i + 1) * block_q // block_k + 1, T // block_k) for i in range(programs)),
            "rows of q": block_q * sum(stops),
        }[rows]
        extra = H * itemsize * block_q * (sum(stops) - programs) if q_rows == "again" else 0
        return (
            qo * T * H * itemsize
            + T * (itemsize if lse_bytes is None else lse_bytes)
            + kv * rows_read * H * itemsize
            + extra
        )

    return causal_bytes


_BYTES = Exercise(
    number="5.5",
    title="The bytes of a causal kernel",
    outputs=("bytes",),
    cases=_bytes_cases,
    expected=_bytes_expected,
    tried="4 to 256 queries, 2 and 4 bytes an element, block_q below, equal to and above block_k",
    mistakes=(
        Mistake(
            "no tile of keys is skipped",
            _bytes(rows="all"),
            "Query tile i stops at the diagonal: see the picture of section 5.",
        ),
        Mistake(
            "the key traffic without a mask is halved",
            _bytes(rows="half"),
            "Tiles on the diagonal are read whole, so it is more than half: see the picture of section 5.",
        ),
        Mistake(
            "a visible pair is charged instead of a tile that is read",
            _bytes(rows="pairs"),
            "A program reads a tile once for all of its queries: see section 4.",
        ),
        Mistake(
            "keys and values are read only once",
            _bytes(rows="once"),
            "Every query tile reads them again, up to the diagonal: see section 4.",
        ),
        Mistake(
            "the read stops at the diagonal instead of at the end of its tile",
            _bytes(rows="diagonal"),
            "A program reads whole tiles; the mask hides the rest afterwards: see the picture of section 5.",
        ),
        Mistake(
            "the number of tiles is rounded down",
            _bytes(rows="floor"),
            "A tile that holds even one visible key must be read: see the rule of section 5.",
        ),
        Mistake(
            "program i is charged i + 1 tiles, which holds only when block_q equals block_k",
            _bytes(rows="square"),
            "Find the last key that the program sees, then divide by block_k: see section 5.",
        ),
        Mistake(
            "tiles are counted as if each held one row",
            _bytes(rows="count"),
            "A tile of keys has block_k rows of H elements: see the text of the exercise.",
        ),
        Mistake(
            "the values are forgotten",
            _bytes(kv=1),
            "Each visit reads a tile of k and a tile of v: see the picture of section 1.",
        ),
        Mistake(
            "lse is forgotten",
            _bytes(lse_bytes=0),
            "The kernel writes one float32 for each query: see section 4.",
        ),
        Mistake(
            "lse is counted in the dtype of the inputs",
            _bytes(lse_bytes=None),
            "lse is float32 whatever the inputs are: see section 10.",
        ),
        Mistake(
            "q is read again for each key tile",
            _bytes(q_rows="again"),
            "A program loads its queries once, before the loop: see the picture of section 1.",
        ),
        Mistake(
            "out is forgotten",
            _bytes(qo=1),
            "out has as many elements as q and is written once: see the picture of section 1.",
        ),
        Mistake(
            "the first query of a program decides where it stops, instead of the last",
            _bytes(rows="from the first"),
            "The last query, (i + 1) * block_q - 1, sees furthest: see section 5.",
        ),
        Mistake(
            "a program whose last key ends a tile is charged one tile more",
            _bytes(rows="one more"),
            "Rounding up leaves an exact multiple as it is; x // block_k + 1 does not: see the hints.",
        ),
        Mistake(
            "a program whose last key ends a tile is charged one tile more, where there is one",
            _bytes(rows="one more, cut"),
            "Rounding up leaves an exact multiple as it is; x // block_k + 1 does not: see the hints.",
        ),
        Mistake(
            "the two tile sizes change places, or a tile of keys is charged block_q rows",
            _bytes(rows="rows of q"),
            "There are T // block_q programs, and a tile of keys has block_k rows: see the text of the exercise.",
        ),
        Mistake(
            "all that moves without a mask is halved, q and out included",
            lambda T, H, itemsize, block_q, block_k: _bytes(rows="all")(T, H, itemsize, block_q, block_k) // 2,
            "q, out and lse move as ever, and tiles on the diagonal are read whole: see the picture of section 5.",
        ),
        Mistake(
            "lse is charged H numbers for each query",
            lambda T, H, itemsize, block_q, block_k: _bytes(lse_bytes=4 * H)(T, H, itemsize, block_q, block_k),
            "lse is one number for each query: see section 3.",
        ),
        Mistake(
            "elements of k and v are counted instead of their bytes",
            lambda T, H, itemsize, block_q, block_k: (
                _bytes(kv=0)(T, H, itemsize, block_q, block_k) + _bytes(qo=0, lse_bytes=0)(T, H, 1, block_q, block_k)
            ),
            "Each element takes itemsize bytes, in k and v as in q: see the case worked by hand.",
        ),
    ),
)

EXERCISES = (_LOOP_BODY, _FINISH, _BOUNDS, _GQA, _BYTES)
