"""How far rounding may carry each entry of a result from the right answer.

A bound for a whole array hides a fault in a few of its entries. Here every entry has its own: the standard
deviation of its rounding error, if each rounding of the algorithm below errs at random by up to half a unit
in the last place. It is propagated in float64 beside the values, by the rules for independent errors:
var(a + b) = var a + var b, var(a b) = a^2 var b + b^2 var a.

    s = scale q k^T    p = exp(s - lse)    out = p v          products are summed in float32
    dp = do v^T        delta = rowsum(out * do)               out, p, dp and ds are rounded to the dtype
    ds = p (dp - delta + dlse)    dv = p^T do    dq = scale ds k    dk = scale ds^T q

The errors of lse and delta are the same all along a row, and so add up in out and dq. A float32 product
on the tensor cores (TF32) reads 11 significant bits of each operand and cuts the rest, so its errors have a sign too.
Where the right answer is 0 because nothing is seen, no error is allowed. A row of one visible key has dq = 0
as well, as a difference dp - delta of equal numbers: there it is allowed what rounding leaves of them.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from helpers.attention.reference import oracle, oracle_gradients, oracle_softmax

NAMES = ("out", "lse", "dq", "dk", "dv")
FLOAT32 = 2.0**-23  # of a sum in float32 whose last bit is cut, not rounded
TF32 = 2.0**-10
STEP = 16  # terms that a tensor core adds at once; where all of them have one sign, so have the errors of their sums
HEADROOM = 64  # powers of two by which a 16-bit kernel may move the logits of a row; lse shows the rounding


class Answer(NamedTuple):
    """A right result, float64, and the standard deviation of the rounding error of each entry."""

    right: np.ndarray
    noise: np.ndarray


class Distance(NamedTuple):
    """How far a result is from an `Answer`.

    worst and typical: the largest and the root mean square error, in units of the noise of the entry.
    relative: Frobenius norm of the error over that of the right answer.
    """

    worst: float
    typical: float
    relative: float


def answers(query, key, value, dout, dlse=None, *, tf32=False, **arguments):
    """{name: Answer} for the arguments of `oracle_gradients` with a batch axis.

    tf32: whether float32 products may read TF32. Inputs of 16 bits are always read whole.
    """
    right = (*oracle(query, key, value, **arguments), *oracle_gradients(query, key, value, dout, dlse, **arguments))
    q, k, v, p, lse, problem = oracle_softmax(query, key, value, arguments)
    B, T, S, H = problem.B, problem.T, problem.S, problem.H
    lse = np.where(np.isneginf(lse), 0, lse)[..., None]
    do = np.asarray(dout, np.float64).transpose(0, 2, 1, 3)
    added = 0 if dlse is None else np.asarray(dlse, np.float64).transpose(0, 2, 1)[..., None]

    is_float32 = problem.dtype == jnp.float32
    operand = TF32**2 if is_float32 and tf32 else 0.0  # relative variances of an operand as it is read,
    rounded = max(operand, (float(jnp.finfo(problem.dtype).eps) / 2) ** 2)  # of p and ds for the next product,
    float32 = FLOAT32**2  # and of each addition
    smallest = 2.0**-24 if problem.dtype == jnp.float16 else 2.0**-126  # what may be rounded to 0
    least = np.where(p > 0, smallest**2, 0)

    def product(a, variance_a, b, terms):
        """The variance of a @ b, of which b is an input."""
        return (variance_a + (operand + terms * float32) * a**2) @ b**2

    s = problem.scale * q @ k.swapaxes(-1, -2)
    of_s = problem.scale**2 * product(q, operand * q**2, k.swapaxes(-1, -2), H)
    of_s += operand * s**2 + 16 * float32 * (s**2 + lse**2 + 1)  # by powers of two
    of_lse = (p * of_s).sum(axis=-1, keepdims=True) + S * float32
    of_p = p**2 * (of_s + of_lse) + least
    of_weights = of_p + rounded * p**2
    out = p @ v
    of_out = product(p, of_weights, v, S) + (of_lse + 4 * operand) * out**2

    dp = do @ v.swapaxes(-1, -2)
    of_dp = product(do, operand * do**2, v.swapaxes(-1, -2), H) + rounded * dp**2
    delta = (out * do).sum(axis=-1, keepdims=True)
    of_delta = ((of_out + rounded * out**2 + H * float32 * out**2) * do**2).sum(axis=-1, keepdims=True)
    of_delta += 4 * operand * delta**2 + float32 * added**2
    ds = p * (dp - delta + added)
    of_ds = p**2 * of_dp + of_p * (dp - delta + added) ** 2 + rounded * ds**2 + least

    of_dq = problem.scale**2 * (product(ds, of_ds, k, S) + of_delta * (p @ k) ** 2 + of_lse * (ds @ k) ** 2)
    of_dk = problem.scale**2 * product(ds.swapaxes(-1, -2), (of_ds + p**2 * of_delta).swapaxes(-1, -2), q, T)
    of_dv = product(p.swapaxes(-1, -2), of_weights.swapaxes(-1, -2), do, T)
    of_dk, of_dv = (of.reshape(B, problem.K, problem.group, S, H).sum(axis=2) for of in (of_dk, of_dv))

    of_lse += float32 * (H / STEP * lse) ** 2
    of_lse = of_lse[..., 0] + (0 if is_float32 else HEADROOM**2 * float32)
    variances = [of.swapaxes(1, 2) for of in (of_out, of_lse, of_dq, of_dk, of_dv)]
    found = {}
    for name, value, variance in zip(NAMES, right, variances, strict=True):
        if name != "lse":  # which stays float32
            variance = variance + (variance > 0) * ((rounded + 4 * operand) * value**2 + smallest**2)
        found[name] = Answer(value, np.sqrt(variance))
    return found


def distance(result, answer):
    """The `Distance` of a result from an `Answer`; infinite where it has NaN, or anything but a right 0 or -inf."""
    result = np.asarray(result, np.float64)
    if result.shape != answer.right.shape:
        raise ValueError(f"shape {result.shape}, expected {answer.right.shape}")
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(result == answer.right, 0, np.abs(result - answer.right))
        ratio = np.where(error == 0, 0, error / answer.noise)
        size = np.linalg.norm(answer.right[np.isfinite(answer.right)])
        relative = np.linalg.norm(error) / size if size else np.linalg.norm(error)
    ratio, relative = np.nan_to_num(ratio, nan=np.inf, posinf=np.inf), np.nan_to_num(relative, nan=np.inf)
    return Distance(float(ratio.max()), float(np.sqrt((ratio**2).mean())), float(relative))
