"""How far a result is from the right answer, against what naive attention and rounding make of the same call.

    whole   error of the array / larger of naive attention's error and the noise, Frobenius norms
    worst   of all entries the largest error / larger of `USUAL` times the noise and naive attention's error in the row

Either may be `TIMES` and no more. The first says how exact a result is; a fault in a few entries of a large array
hides there, and shows in the second. The noise of an entry is what no algorithm in the dtype can avoid: the standard
deviation of its error if the inputs of the last product are rounded to the dtype, and sums are float32. It is
propagated in float64 beside the values, by the rules for independent errors:
var(a + b) = var a + var b, var(a b) = a^2 var b + b^2 var a.

    s = scale q k^T    p = exp(s - lse)    out = p v          products are summed in float32
    dp = do v^T        delta = rowsum(p * dp)                 out, p and ds are rounded to the dtype
    ds = p (dp - delta + dlse)    dv = p^T do    dq = scale ds k    dk = scale ds^T q

dp and delta are not. Where all values share a part, both are large and close to each other; an out that was rounded
gives a delta whose error is large in ds, has one sign along a row, and meets the part that all keys share. Weights
that were rounded may enter delta if their sum divides it: then dp - delta is what they err by, not dp. And an out
of twice the bits is as good as float32.
A float32 product on the tensor cores (TF32) reads 11 significant bits of each operand and cuts the rest, so its
errors have a sign too. Where the right answer is 0 because nothing is seen, no error is allowed. A row of one visible
key has dq = 0 as well, as a difference dp - delta of equal numbers: there it is allowed what float32 leaves. One noise
is avoidable: 16-bit kernels know the tanh of a soft cap to `TANH`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from helpers.attention.reference import oracle_softmax

NAMES = ("out", "lse", "dq", "dk", "dv")
TIMES = 3.0  # the most that a right result has of each measure
USUAL = 2.0  # largest error among many entries, in units of their noise
FLOAT32 = 2.0**-23  # of a sum in float32 whose last bit is cut, not rounded
TF32 = 2.0**-10
STEP = 16  # terms that a tensor core adds at once; where all of them have one sign, so have the errors of their sums
TANH = 2.0**-21  # to which a 16-bit kernel knows a tanh
HEADROOM = 64  # powers of two by which a 16-bit kernel may move the logits of a row; lse shows the rounding


class Answer(NamedTuple):
    """A right result, float64, and the noise of each entry; None where it, or ds for it, is beyond the dtype."""

    right: np.ndarray
    noise: np.ndarray | None


class Distance(NamedTuple):
    """whole and worst as above; relative: Frobenius norm of the error over that of the right answer."""

    whole: float
    worst: float
    relative: float


def answers(query, key, value, dout, dlse=None, *, tf32=False, **arguments):
    """{name: Answer} for the arguments of `oracle_gradients` with a batch axis.

    tf32: whether float32 products may read TF32. Inputs of 16 bits are always read whole. dout and dlse of rows that
    see nothing may hold anything.
    """
    found = oracle_softmax(query, key, value, arguments)
    q, k, v, p, lse, problem = found.q, found.k, found.v, found.p, found.lse, found.problem
    B, T, S, H = problem.B, problem.T, problem.S, problem.H
    keys = (p > 0).sum(axis=-1, keepdims=True)
    right_lse, lse = lse, np.where(keys, lse[..., None], 0)
    do = np.where(keys, np.asarray(dout, np.float64).transpose(0, 2, 1, 3), 0)
    added = np.zeros((B, T, problem.N)) if dlse is None else np.asarray(dlse, np.float64)
    added = np.where(keys, added.transpose(0, 2, 1)[..., None], 0)

    is_float32 = problem.dtype == jnp.float32
    limits = jnp.finfo(problem.dtype)
    operand = TF32**2 if is_float32 and tf32 else 0.0  # relative variances of an operand as it is read,
    rounded = max(operand, float(limits.eps) ** 2 / 12)  # of what is rounded for the next product,
    float32 = FLOAT32**2  # and of each addition
    smallest = 2.0**-24 if problem.dtype == jnp.float16 else 2.0**-126  # what may be rounded to 0
    lost = max(smallest, 0 if is_float32 else 2.0 ** (HEADROOM - 126))  # a weight of a row whose logits were moved
    least = np.where(p > 0, lost**2, 0)
    turned = lambda array: array.swapaxes(-1, -2)

    def product(a, variance_a, b, terms):
        """The variance of a @ b, of which b is an input."""
        return (variance_a + (operand + terms * float32) * a**2) @ b**2

    def summed(a, b):
        """The variance of the additions of a @ b one by one: of a partial sum, which may be larger than the sum."""
        partial, largest, terms = 0, 0, a.shape[-1]
        for part in np.array_split(np.arange(terms), min(terms, STEP)):
            partial = partial + a[..., part] @ b[..., part, :]
            largest = np.maximum(largest, np.abs(partial))
        return terms / 12 * problem.group * float32 * largest**2

    s = problem.scale * q @ turned(k)
    of_s = problem.scale**2 * product(q, operand * q**2, turned(k), H)
    # A soft cap and score_mod make another slope of it; bias and they add what float32 rounds.
    slope, *_ = found.pull_back(np.ones_like(p))
    logits = np.where(found.logits == -np.inf, 0, found.logits)
    bend = (2 / problem.soft_cap) ** 2 if problem.soft_cap else 0  # at most, of the slope of a soft cap
    of_slope = bend * of_s
    of_s *= slope**2
    of_s += operand * s**2 + 16 * float32 * (s**2 + (logits - s) ** 2 + lse**2 + 1)  # by powers of two
    of_s += 0 if is_float32 else (TANH * (problem.soft_cap or 0)) ** 2 / 12
    of_lse = (p * of_s).sum(axis=-1, keepdims=True) + S * float32
    of_weights = p**2 * (of_s + of_lse + rounded) + least
    out = p @ v
    of_out = product(p, of_weights, v, S) + (of_lse + 4 * operand) * out**2

    dp = do @ turned(v)
    of_dp = product(do, operand * do**2, turned(v), H)
    delta = (p * dp).sum(axis=-1, keepdims=True)
    centred = dp - delta
    ds = p * (centred + added)
    of_delta = (p**2 * (of_s + rounded) * centred**2).sum(axis=-1, keepdims=True) + float32 * added**2
    if problem.soft_cap:  # weights at the cap are equal, and so are the errors of their rounding
        at_cap = np.where(slope < limits.eps, p * np.abs(centred), 0).sum(axis=-1, keepdims=True)
        of_delta += rounded * at_cap**2
    cut_sums = (keys / (2 * STEP)) ** 2 * float32  # what a tensor core leaves of a sum over keys, its relative variance
    of_kept = product(p, operand * p**2, v, S) + (cut_sums + H * float32 + rounded**2) * out**2
    of_kept += np.where(np.abs(out) < float(limits.smallest_normal), smallest**2 / 12, 0)  # few bits are kept of those
    of_delta += (of_kept * do**2).sum(axis=-1, keepdims=True)
    of_delta += (4 * operand + cut_sums) * delta**2
    # What is too small for the dtype may count as 0: the weight of which ds is a multiple, and ds of scaled products.
    of_ds = p**2 * of_dp + (of_s + rounded) * ds**2 + least * (centred + added) ** 2
    of_ds, ds, bent = slope**2 * of_ds + of_slope * ds**2 + least, slope * ds, slope * p
    dq, dk, dv = problem.scale * (ds @ k), problem.scale * (turned(ds) @ q), turned(p) @ do
    of_dq = problem.scale**2 * (product(ds, of_ds, k, S) + of_delta * (bent @ k) ** 2 + of_lse * (ds @ k) ** 2)
    of_dk = problem.scale**2 * product(turned(ds), turned(of_ds + bent**2 * of_delta + of_lse * ds**2), q, T)
    # Equal queries have equal weights, and errors of delta, and of weights that are too small, that add up.
    is_alike = (q == q[..., :1, :]).all(axis=(-2, -1), keepdims=True)
    of_dk += problem.scale**2 * is_alike * (turned(bent * np.sqrt(of_delta)) @ np.abs(q)) ** 2
    # What is cut off dp has its sign, and adds up over queries with a part in common.
    cut = H / (2 * STEP) * FLOAT32 * np.abs(dp)
    of_dk += problem.scale**2 * (turned(bent * cut) @ np.abs(q)) ** 2
    of_dv = product(turned(p), turned(of_weights), do, T) + is_alike * (turned(np.sqrt(least)) @ np.abs(do)) ** 2
    in_groups = lambda array: array.reshape(B, problem.K, problem.group, S, H).sum(axis=2)
    dk, dv, of_dk, of_dv = map(in_groups, (dk, dv, of_dk, of_dv))
    of_lse += float32 * (H / STEP * lse) ** 2 + (0 if is_float32 else HEADROOM**2 * float32)

    found = {}
    if is_float32:
        of_out += summed(p, v)
        of_dq += problem.scale**2 * summed(ds, k)
        of_dk += problem.scale**2 * in_groups(summed(turned(ds), q))
        of_dv += in_groups(summed(turned(p), do))
    arrays = (out, of_out), (right_lse, of_lse[..., 0]), (dq, of_dq), (dk, of_dk), (dv, of_dv)
    for name, (right, variance) in zip(NAMES, arrays, strict=True):
        largest = np.abs(right).max()
        if name != "lse":  # which stays float32
            variance = variance + (variance > 0) * ((rounded + 4 * operand) * right**2 + smallest**2)
            largest = max(largest, np.abs(ds).max() if name in ("dq", "dk") else 0)
        is_within = name == "lse" or largest <= float(limits.max)
        found[name] = Answer(right.swapaxes(1, 2), np.sqrt(variance).swapaxes(1, 2) if is_within else None)
    return found


def distance(result, answer, naive):
    """The `Distance` of a result from an `Answer`; None where no bound can be stated.

    Infinite where a result has NaN, or anything but a right 0 or -inf. naive: the result of naive attention.
    """
    off, own = _error(result, answer.right), _error(naive, answer.right)
    if answer.noise is None or not np.isfinite(own).all():
        return None
    of_row = own.max(axis=-1, keepdims=True) if own.ndim == 4 else own
    usual = np.where(answer.noise > 0, np.maximum(USUAL * answer.noise, of_row), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = float(np.where(off == 0, 0, off / usual).max())
    arrays = np.nan_to_num(answer.right, neginf=0), own, answer.noise
    size, *norms = (float(np.linalg.norm(array)) for array in arrays)
    error = float(np.linalg.norm(off))
    return Distance(error and error / (max(norms) or 1e-300), worst, error / (size or 1))


def _error(result, right):
    """Absolute errors; infinite where a result is NaN."""
    result = np.asarray(result, np.float64)
    if result.shape != right.shape:
        raise ValueError(f"shape {result.shape}, expected {right.shape}")
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.where(result == right, 0, np.abs(result - right)), nan=np.inf, posinf=np.inf)
