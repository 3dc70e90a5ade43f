"""What one call of attention asks for: shapes, dtype, scale and mask, checked once.

What no implementation accepts is refused here, before any kernel runs; what one of them cannot serve, in `api`.
"""

import math
import numbers
import operator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from helpers.attention.masking import Band

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
MAX_HEAD_DIM = 256
FEW_QUERIES = 16  # at most, of calls that the kernels for decoding serve
LARGEST_SCALE = float(np.finfo(np.float32).max) / math.log2(math.e)
SYMBOLS, LENGTHS, WINDOW, PAGES = "symbolic shapes", "sequence lengths", "local window", "pages"
FEATURES = (SYMBOLS, PAGES, "float32", LENGTHS, WINDOW)  # what a call may ask for, and a backend must list
MAX_LENGTH = 2**30 - 1  # so that sums of two positions stay within int32


@dataclass(frozen=True)
class Problem:
    """The static part of an attention call: hashable, so that `jax.jit` can specialise on it.

    B batch, T queries, S keys, N query heads, K key/value heads, H head_dim (the letters of
    `jax.nn.dot_product_attention`); dtype of query, key and value; scale of the logits; band of
    visible keys (see `masking`). In `jax.export`, B, T and S may be symbols.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: np.dtype
    scale: float
    band: Band

    @property
    def group(self):
        """Query heads that share one key/value head."""
        return self.N // self.K

    @property
    def is_symbolic(self):
        """Whether some size is no number, but a symbol of `jax.export.symbolic_shape`."""
        return not all(isinstance(size, int) for size in (self.B, self.T, self.S))

    @property
    def band_blinds_rows(self):
        """Whether the band leaves the last query without a key, or may do so, be there lengths or not."""
        return self.band.left is not None and (self.is_symbolic or self.T - self.band.left > self.S)


@dataclass(frozen=True)
class Call:
    """A checked call: the static problem and its arrays, always with a batch axis.

    query (B, T, N, H); key, value (B, S, K, H); query_lengths, key_lengths int32 (B,) or None. With a page_table, int32
    (B, pages of a sequence), key and value are (pages, page, K, H), and S is what a row of the table has room for.
    """

    problem: Problem
    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_lengths: jax.Array | None
    key_lengths: jax.Array | None
    page_table: jax.Array | None = None

    @property
    def arrays(self):
        """The six, in the order of the fields."""
        return self.query, self.key, self.value, self.query_lengths, self.key_lengths, self.page_table

    @property
    def features(self):
        """What the call asks for, of `FEATURES`."""
        asked = (
            self.problem.is_symbolic,
            self.page_table is not None,
            self.problem.dtype == jnp.float32,
            not (self.query_lengths is None and self.key_lengths is None),
            self.problem.band not in (Band(), Band(right=0)),
        )
        return [feature for feature, is_asked in zip(FEATURES, asked, strict=True) if is_asked]

    def gathered(self):
        """The call with its keys in one piece, if they lie in pages. A page that does not exist is some other one."""
        if self.page_table is None:
            return self
        problem, table = self.problem, jnp.clip(self.page_table, 0, self.key.shape[0] - 1)
        shape = problem.B, problem.S, problem.K, problem.H
        key, value = (pages[table].reshape(shape) for pages in (self.key, self.value))
        return replace(self, key=key, value=value, page_table=None)

    @property
    def may_have_blind_rows(self):
        """Whether a query may see no key. Known when traced, so that calls without such rows pay nothing for them."""
        return self.problem.band_blinds_rows or not (self.query_lengths is None and self.key_lengths is None)

    def of_seeing_rows(self, lse, *arrays):
        """The arrays, (B, T, N, H) or (B, N, T), with zeros for queries that see no key, as lse (B, N, T) tells.

        In the backward pass: such a query passes nothing, but a NaN would survive the weight of zero that it has.
        """
        if not self.may_have_blind_rows:
            return arrays
        blind = {3: lse == -jnp.inf, 4: jnp.swapaxes(lse == -jnp.inf, 1, 2)[..., None]}
        return tuple(jnp.where(blind[array.ndim], 0, array) for array in arrays)


def check_call(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
):
    """Check the arguments of `flash_attention` and return them as a `Call`.

    Raises TypeError for a wrong type or dtype and ValueError for a wrong shape or value. The
    message names the argument, what it was, and what was expected.
    """
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None:
            raise TypeError(
                f"{name} must be None, got {type(array).__name__}: masks are given by is_causal, "
                "query_seq_lengths, key_value_seq_lengths and local_window_size; "
                f"jax.nn.dot_product_attention takes a {name}"
            )
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        _check_array(name, array)
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise TypeError(
            "query, key and value must share one dtype, got "
            + ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        )
    if not (query.ndim == key.ndim == value.ndim):
        raise ValueError(
            "query, key and value must all have a batch axis or all have none, got shapes "
            + ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        )
    if value.shape != key.shape:
        raise ValueError(f"value must have the shape of key, {key.shape}, got {value.shape}")
    *query_batch, T, N, H = query.shape
    *key_batch, S, K, key_dim = key.shape
    if key_batch != query_batch:
        raise ValueError(f"key must have the batch size of query, {query_batch[0]}, got shape {key.shape}")
    if key_dim != H:
        raise ValueError(f"key must have the head_dim of query, {H}, got shape {key.shape}")
    if query.ndim == 3:
        query, key, value = (jnp.asarray(array)[None] for array in arrays.values())
    B = query.shape[0]
    if N % K:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {N} and {K}")
    if any(_is_more(length, MAX_LENGTH) for length in (T, S)):
        raise ValueError(f"query and key must have at most 2**30 - 1 positions, got {T} and {S}")
    if H > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {H}")
    _refuse_tracer("is_causal", is_causal)
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")

    problem = Problem(
        B=B,
        T=T,
        S=S,
        N=N,
        K=K,
        H=H,
        dtype=jnp.dtype(query.dtype),
        scale=_check_scale(scale, H),
        band=Band.of(bool(is_causal), _check_window(local_window_size)),
    )
    return Call(
        problem,
        jnp.asarray(query),
        jnp.asarray(key),
        jnp.asarray(value),
        check_lengths("query_seq_lengths", query_seq_lengths, B, T),
        check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S),
    )


def check_paged_call(query, key_pages, value_pages, page_table, lengths, *, scale=None):
    """Check the arguments of `paged_attention` and return them as a `Call`, as `check_call` does."""
    arrays = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    for name, array in arrays.items():
        _check_array(name, array)
        if array.ndim != 4:
            raise ValueError(f"{name} must have four axes, got shape {array.shape}")
    if key_pages.dtype != query.dtype or value_pages.dtype != query.dtype:
        raise TypeError(
            "query, key_pages and value_pages must share one dtype, got "
            + ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        )
    if value_pages.shape != key_pages.shape:
        raise ValueError(f"value_pages must have the shape of key_pages, {key_pages.shape}, got {value_pages.shape}")
    (B, T, N, H), (pages, page, K, key_dim) = query.shape, key_pages.shape
    if key_dim != H:
        raise ValueError(f"key_pages must have the head_dim of query, {H}, got shape {key_pages.shape}")
    if N % K:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {N} and {K}")
    if H > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {H}")
    if T > FEW_QUERIES:
        raise ValueError(f"query must have at most {FEW_QUERIES} positions, got {T}")
    _check_integers("page_table", page_table, "int32 array of shape (batch, pages of a sequence)")
    if page_table.ndim != 2 or page_table.shape[0] != B or not page_table.shape[1]:
        raise ValueError(f"page_table must have shape ({B}, pages of a sequence), got {page_table.shape}")
    S = page_table.shape[1] * page
    if _is_more(S, MAX_LENGTH):
        raise ValueError(f"page_table must have room for at most 2**30 - 1 tokens, got {S}")
    if lengths is None:
        raise TypeError(f"lengths must be an int32 array of shape ({B},), got None")
    key_lengths = check_lengths("lengths", lengths, B, S)
    if not isinstance(page_table, jax.core.Tracer) and not isinstance(lengths, jax.core.Tracer):
        table, used = jax.device_get(page_table), -(-jax.device_get(lengths) // page)
        for row, count in enumerate(used):
            wrong = [int(number) for number in table[row, :count] if not 0 <= number < pages]
            if wrong:
                raise ValueError(f"page_table[{row}] must name pages from 0 to {pages - 1}, got {wrong[0]}")
    problem = Problem(B, T, S, N, K, H, jnp.dtype(query.dtype), _check_scale(scale, H), Band())
    pages = jnp.asarray(key_pages), jnp.asarray(value_pages)
    return Call(problem, jnp.asarray(query), *pages, None, key_lengths, jnp.asarray(page_table))


def _check_array(name, array):
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be a JAX or NumPy array, got {type(array).__name__}")
    if array.dtype not in DTYPES:
        allowed = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
        raise TypeError(f"{name} must have one of the dtypes {allowed}, got {array.dtype}")
    if array.ndim not in (3, 4):
        raise ValueError(
            f"{name} must have shape (batch, length, heads, head_dim) or (length, heads, head_dim), got {array.shape}"
        )
    if 0 in array.shape:
        raise ValueError(f"{name} must have at least one element on every axis, got shape {array.shape}")
    if not all(isinstance(size, int) for size in array.shape[-2:]):
        raise TypeError(f"{name} must have numbers of heads and head_dim, not symbols, got shape {array.shape}")


def _is_more(length, limit):
    """Whether a length is above a limit, as far as that is known: one of them may be a symbol."""
    return isinstance(length, int) and isinstance(limit, int) and length > limit


def _check_scale(scale, head_dim):
    if scale is None:
        return 1 / math.sqrt(head_dim)
    _refuse_tracer("scale", scale)
    if isinstance(scale, jax.Array | np.ndarray) and scale.ndim == 0 and jnp.issubdtype(scale.dtype, jnp.number):
        scale = scale.item()
    if isinstance(scale, bool | np.bool_) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a real number or None, got {scale!r}")
    # The kernels multiply with scale * log2 e in float32, so that product must be finite there.
    if not abs(scale) <= LARGEST_SCALE:
        raise ValueError(f"scale must be at most {LARGEST_SCALE:.3g} in size, got {scale!r}")
    return float(scale)


def _refuse_tracer(name, value):
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be known when the function is traced; pass a Python value")


def _check_window(window):
    if window is None:
        return None
    pair = window if isinstance(window, tuple | list) else (window, window)
    for edge in pair:
        _refuse_tracer("local_window_size", edge)
    expected = "local_window_size must be None, an integer, or a (left, right) pair of integers"
    if len(pair) != 2 or any(isinstance(edge, bool | np.bool_) for edge in pair):
        raise TypeError(f"{expected}, got {window!r}")
    try:
        left, right = (operator.index(edge) for edge in pair)
    except TypeError:
        raise TypeError(f"{expected}, got {window!r}") from None
    if left < 0 or right < 0:
        raise ValueError(f"local_window_size must not be negative, got {window!r}")
    # Beyond any length the window masks nothing; the bound keeps int32 positions from overflowing.
    return min(left, MAX_LENGTH), min(right, MAX_LENGTH)


def check_lengths(name, lengths, batch, longest):
    if lengths is None:
        return None
    _check_integers(name, lengths, f"int32 array of shape ({batch},)")
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must have shape ({batch},), got {lengths.shape}")
    # Under jit the values are not known yet; there, lengths past the end act like the full length.
    if not isinstance(lengths, jax.core.Tracer):
        values = jax.device_get(lengths)
        if values.min() < 0 or _is_more(int(values.max()), longest):
            raise ValueError(f"{name} must lie between 0 and {longest}, got {values.tolist()}")
    return jnp.asarray(lengths)


def _check_integers(name, array, expected):
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be an {expected}, got {type(array).__name__}")
    if array.dtype != jnp.int32:
        raise TypeError(f"{name} must have dtype int32, got {array.dtype}")
