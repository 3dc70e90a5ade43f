"""What exercises about a single head share: inputs that float32 holds exactly, and the right results for them."""

import numpy as np

from helpers.attention.reference import oracle


def even(array):
    """Rounded to eighths: float32 then holds logits near 1000, and their differences, exactly."""
    return np.round(8 * array) / 8


def attention(q, k, v, **options):
    """(out, lse) of arrays (T, H) and (S, H), float64. options: those of `oracle`."""
    out, lse = oracle(*(np.asarray(array, np.float32)[:, None] for array in (q, k, v)), **options)
    return out[:, 0], lse[:, 0]
