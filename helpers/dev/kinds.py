"""Kinds of inputs for `fuzz`: what a call's arrays have that a normal distribution does not.

A kind is (array, form, size). Of "query", "key", "value" and "dout":

    all, runs, drift    a common part of size standard deviations is added: one direction for all positions, one for
                        each run of them (packed documents), or one that turns into another along the sequence
    equal               all positions hold the same
    channel, row        one channel, or one position, is size times as large
    rising              positions grow from 0 to size times
    times               all is size times as large
    specks              a part of size of the entries is 0, -0.0, subnormal, or the smallest normal number

Of "logits": near, where queries and keys share a part that brings every logit near size, and spread, where the
queries are made as large as gives plain logits a standard deviation of size (sharp and flat softmax).
"""

import math
import zlib

import jax.numpy as jnp
import numpy as np

COMMON = ("all", "runs", "drift")
LARGEST_COMMON = 100.0  # standard deviations
LARGEST_LOGIT = 3000.0  # beyond it, float32 says too little about a softmax
LARGEST_16 = 60000.0  # of float16, which ends at 65504
OTHER = (
    *((name, "channel", size) for name, size in (("query", 10.0), ("key", 10.0), ("value", 100.0), ("dout", 30.0))),
    *((name, "row", 30.0) for name in ("key", "value", "dout")),
    *((name, "equal", 1.0) for name in ("query", "key", "value")),
    *((name, "specks", 0.2) for name in ("query", "key", "value", "dout")),
    *(("value", "times", size) for size in (0.01, 10.0)),
    ("key", "rising", 10.0),
)
LOGITS = (
    *(("logits", "near", size) for size in (100.0, -100.0, 1000.0, -1000.0)),
    *(("logits", "spread", size) for size in (8.0, 100.0, 1000.0, 0.01)),
)
ENDS = (  # of float16
    (("query", "times", 2.0**12), ("key", "times", 2.0**-12)),
    (("query", "times", 2.0**-12), ("key", "times", 2.0**12)),
    (("value", "times", 2.0**13), ("dout", "times", 2.0**-13)),
    (("value", "times", 2.0**-16),),
)


def draw(random, dtype):
    """The kinds of a call, none to five; in two calls of five a common part in keys and in values."""

    def common(name):
        size = math.exp(random.uniform(math.log(0.5), math.log(LARGEST_COMMON)))
        return name, str(random.choice(COMMON)), float(f"{size:.2g}")

    def one_of(kinds):
        return kinds[random.integers(len(kinds))]

    shares = {"key": 0.08, "value": 0.08, "query": 0.1, "dout": 0.1}
    if random.random() < 0.4:
        shares |= {"key": 1, "value": 1}
    found = [common(name) for name, share in shares.items() if random.random() < share]
    found += [one_of(kinds) for kinds, share in ((OTHER, 0.3), (LOGITS, 0.3)) if random.random() < share]
    if dtype == "float16" and random.random() < 0.15:
        found += one_of(ENDS)
    return tuple(found)


def apply(kinds, arrays, scale, dtype, seed):
    """{name: float64 array} of standard normal numbers, with kinds, and so that the dtype holds them and the results.

    arrays: query and dout (B, T, N, H), key and value (B, S, K, H).
    """
    arrays = dict(arrays)
    for name, form, size in kinds:
        random = np.random.default_rng([seed, zlib.crc32(f"{name} {form}".encode())])  # whatever other kinds there are
        if name == "logits":
            query, key = arrays["query"], arrays["key"]
            H = query.shape[-1]
            if form == "near":
                part = math.sqrt(abs(size) / (abs(scale) * H)) * random.choice([-1, 1], H)
                arrays |= {"query": query + part, "key": key + np.sign(size * scale) * part}
            else:
                arrays["query"] = query * (size / (abs(scale) * math.sqrt(H)))
        else:
            arrays[name] = _changed(arrays[name], form, size, random, dtype)
    return _within_range(arrays, scale, dtype)


def _changed(array, form, size, random, dtype):
    B, L, heads, H = array.shape
    match form:
        case "all":
            return array + size * random.standard_normal((B, 1, heads, H))
        case "runs":
            runs = np.sort(random.integers(0, random.integers(2, 9), L))
            return array + size * random.standard_normal((B, 8, heads, H))[:, runs]
        case "drift":
            start, end = random.standard_normal((2, B, 1, heads, H))
            way = np.linspace(0, 1, L)[:, None, None]
            return array + size * ((1 - way) * start + way * end)
        case "equal":
            return np.broadcast_to(array[:, :1], array.shape).copy()
        case "times":
            return array * size
        case "rising":
            return array * np.linspace(0, size, L)[:, None, None]
    array = array.copy()
    if form == "channel":
        array[..., random.integers(H)] *= size
    elif form == "row":
        array[:, random.integers(L)] *= size
    elif form == "specks":
        limits = jnp.finfo(dtype)
        specks = [0.0, -0.0, *(sign * float(x) for x in (limits.smallest_subnormal, limits.tiny) for sign in (1, -1))]
        array = np.where(random.random(array.shape) < size, random.choice(specks, array.shape), array)
    else:
        raise ValueError(f"no kind of inputs is called {form!r}")
    return array


def _within_range(arrays, scale, dtype):
    """Smaller queries where logits would be beyond LARGEST_LOGIT; in float16 whatever would leave its range smaller."""
    query, key = arrays["query"], arrays["key"]
    some = np.linspace(0, query.shape[1] - 1, min(64, query.shape[1])).astype(int)
    group = query.shape[2] // key.shape[2]
    logits = scale * np.einsum("btnh,bsnh->bnts", query[:, some, ::group], key, optimize=True)
    arrays["query"] = query * min(1.0, LARGEST_LOGIT / max(np.abs(logits).max(), 1e-30))
    if dtype != "float16":
        return arrays
    arrays = {name: array * min(1.0, LARGEST_16 / max(np.abs(array).max(), 1e-30)) for name, array in arrays.items()}
    q, k, v, do = (np.sqrt((arrays[name] ** 2).mean()) for name in ("query", "key", "value", "dout"))
    rows = query.shape[1] * group  # that may all see one key
    of_dp = 4 * math.sqrt(query.shape[-1]) * do * v
    largest = max(of_dp, abs(scale) * of_dp * max(k, q * math.sqrt(rows)), rows * np.abs(arrays["dout"]).max())
    arrays["dout"] = arrays["dout"] * min(1.0, LARGEST_16 / largest)
    return arrays
