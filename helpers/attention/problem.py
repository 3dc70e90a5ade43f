"""What one call of attention asks for: shapes, dtype, scale and mask, checked once.

What no implementation accepts is refused here, before any kernel runs; what one of them cannot serve, in `registry`.
"""

import functools
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from helpers.attention import masking
from helpers.attention.extras import (
    NO_EXTRAS,
    Extras,
    check_array,
    check_block_mask,
    check_function,
    check_score_arrays,
    check_table,
)
from helpers.attention.masking import Band, visible
from helpers.attention.scores import changes_logits

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
MAX_HEAD_DIM = 256
FEW_QUERIES = 16  # at most, of calls that the kernels for decoding serve
LARGEST_SCALE = float(np.finfo(np.float32).max) / math.log2(math.e)
# What a call may ask for, and a backend must list.
FEATURES = ("symbolic shapes", "pages", "float32", "sequence lengths", "local window", "causal_offset", "segment ids")
FEATURES += ("soft cap", "sinks", "bias", "mask", "mask_mod", "score_mod")
MAX_LENGTH = 2**30 - 1  # so that sums of two positions stay within int32


@dataclass(frozen=True)
class Problem:
    """The static part of an attention call: hashable, so that `jax.jit` can specialise on it.

    B batch, T queries, S keys, N query heads, K key/value heads, H head_dim (the letters of
    `jax.nn.dot_product_attention`); dtype of query, key and value; scale of the logits; band of
    visible keys (see `masking`); soft_cap, mask_mod and score_mod, each of which may be None (see
    `scores`); is_at_end, whether the queries are the last positions of their sequence, which has a
    length then, or its first; is_packed, whether queries and keys have one array of segment ids;
    keeps_low_bits, whether gradients in 16 bits are made of an out of more bits (see `low_bits`).
    In `jax.export`, B, T and S may be symbols.
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
    soft_cap: float | None = None
    mask_mod: Callable | None = None
    score_mod: Callable | None = None
    is_at_end: bool = False
    is_packed: bool = False
    keeps_low_bits: bool = True

    @property
    def group(self):
        """Query heads that share one key/value head."""
        return self.N // self.K

    def first_position(self, key_length):
        """Where the first of T queries stands, for the band, in a sequence of so many keys."""
        return key_length - self.T if self.is_at_end else 0

    @property
    def is_symbolic(self):
        """Whether some size is no number, but a symbol of `jax.export.symbolic_shape`."""
        return not all(isinstance(size, int) for size in (self.B, self.T, self.S))


@dataclass(frozen=True)
class Call:
    """A checked call: the static problem and its arrays, always with a batch axis.

    query (B, T, N, H); key, value (B, S, K, H); query_lengths, key_lengths int32 (B,) or None. With a page_table, int32
    (B, pages of a sequence), key and value are (pages, page, K, H), and S is what a row of the table has room for.
    extras: what few calls have.
    """

    problem: Problem
    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_lengths: jax.Array | None
    key_lengths: jax.Array | None
    page_table: jax.Array | None = None
    extras: Extras = NO_EXTRAS

    @property
    def arrays(self):
        """The seven, in the order of the fields; the last is a tree of arrays."""
        arrays = self.query, self.key, self.value, self.query_lengths, self.key_lengths
        return *arrays, self.page_table, self.extras

    @property
    def features(self):
        """What the call asks for, of `FEATURES`."""
        problem, band, extras = self.problem, self.problem.band, self.extras
        is_shifted = (band.left or 0) < 0 or (band.right or 0) < 0 or (band.left is None and bool(band.right))
        asked = (
            problem.is_symbolic,
            self.page_table is not None,
            problem.dtype == jnp.float32,
            not (self.query_lengths is None and self.key_lengths is None),
            band.left is not None,
            is_shifted,
            extras.query_segment_ids is not None,
            problem.soft_cap is not None,
            *(getattr(extras, name) is not None for name in ("sinks", "bias", "mask")),
            *(getattr(problem, name) is not None for name in ("mask_mod", "score_mod")),
        )
        return [feature for feature, is_asked in zip(FEATURES, asked, strict=True) if is_asked]

    def numbered(self):
        """The call with the numbers of its batch entries and heads, if a function wants them; before it is split."""
        problem, extras = self.problem, self.extras
        if extras.batch is not None or (problem.mask_mod is None and problem.score_mod is None):
            return self
        batch, heads = (jnp.arange(size, dtype=jnp.int32) for size in (problem.B, problem.N))
        return replace(self, extras=extras._replace(batch=batch, heads=heads[None]))

    def prepared(self):
        """The call with these numbers and with the block mask of mask and mask_mod, if there is one of them."""
        call = self.numbered()
        problem, extras = call.problem, call.extras
        if extras.block_mask is not None or (problem.mask_mod is None and extras.mask is None):
            return call
        of_numbers = {"batch": extras.batch, "heads": extras.heads}
        mask = masking.block_mask(problem.T, problem.S, mask=extras.mask, mask_mod=problem.mask_mod, **of_numbers)
        return replace(call, extras=extras._replace(block_mask=mask))

    @property
    def is_plain(self):
        """Whether the kernels for decoding serve it where there are few queries.

        Its logits are products, capped or not, which the band and the lengths alone hide.
        """
        return self.extras.bias is None and self.problem.score_mod is None and not self.hides_keys

    @property
    def changes_logits(self):
        """Whether a logit is more than the scaled product of a query and a key."""
        return changes_logits(self.problem, self.extras)

    @property
    def hides_keys(self):
        """Whether something hides keys that the band and the lengths do not."""
        return self.problem.mask_mod is not None or self.extras.hides_keys

    def gathered(self):
        """The call with its keys in one piece, if they lie in pages. A page that does not exist is some other one.

        Where the queries are at the end of sequences of several lengths, the band becomes a mask.
        """
        if self.page_table is None:
            return self
        problem, table = self.problem, jnp.clip(self.page_table, 0, self.key.shape[0] - 1)
        shape = problem.B, problem.S, problem.K, problem.H
        key, value = (pages[table].reshape(shape) for pages in (self.key, self.value))
        call = replace(self, key=key, value=value, page_table=None)
        if not problem.is_at_end:
            return call
        first = problem.first_position(jnp.minimum(self.key_lengths, problem.S))
        rows = first[:, None, None, None] + jnp.arange(problem.T)[:, None]
        mask = visible(rows, jnp.arange(problem.S), problem.band, MAX_LENGTH, problem.S)
        problem = replace(problem, band=Band(), is_at_end=False)
        return replace(call, problem=problem, extras=self.extras._replace(mask=mask))

    @property
    def is_padding(self):
        """Which queries lie past query_lengths, which there are: (B, 1, T)."""
        return jnp.arange(self.problem.T) >= self.query_lengths[:, None, None]

    def real_lengths(self):
        """How many queries and keys of each batch entry are real, int32 (B,) each, cut to the arrays."""
        given = (self.query_lengths, self.problem.T), (self.key_lengths, self.problem.S)
        whole = functools.partial(jnp.full, self.problem.B, dtype=jnp.int32)
        return [whole(longest) if own is None else jnp.clip(own, 0, longest) for own, longest in given]

    @property
    def may_have_blind_rows(self):
        """Whether a query may see no key. Known when traced, so that calls without such rows pay nothing for them."""
        problem, left, right = self.problem, self.problem.band.left, self.problem.band.right
        lacks_left = left is not None and (problem.is_symbolic or problem.T - left > problem.S)
        lacks_right = right is not None and right < 0
        has_lengths = not (self.query_lengths is None and self.key_lengths is None)
        # Where segments alone hide keys, and of other documents only, a query sees at least its own key.
        is_masked = problem.mask_mod is not None or self.extras.mask is not None
        hides_own = self.hides_keys and (is_masked or not (problem.is_packed and problem.T == problem.S))
        return lacks_left or lacks_right or has_lengths or hides_own or self.changes_logits

    @property
    def seeing_queries(self):
        """int32 (B,), how many queries see a key, where lengths decide that and these are the first ones; or None."""
        left, right = self.problem.band.left, self.problem.band.right
        has_lengths = not (self.query_lengths is None and self.key_lengths is None)
        if not has_lengths or self.hides_keys or self.extras.sinks is not None or (right is not None and right < 0):
            return None
        queries, keys = self.real_lengths()
        queries = queries if left is None else jnp.clip(keys + left, 0, queries)
        return jnp.where(keys > 0, queries, 0)

    def of_seeing_rows(self, lse, *arrays):
        """The arrays, (B, T, N, H) or (B, N, T), with zeros for queries that see no key, as lse (B, N, T) tells.

        In the backward pass: such a query passes nothing, but a NaN would survive the weight of zero that it has. With
        sinks, lse is that of the sink where no key is seen, and also where all keys weigh next to nothing beside it:
        there only what is no number becomes zero.
        """
        if not self.may_have_blind_rows:
            return arrays
        sinks = self.extras.sinks
        is_blind = lse == (-jnp.inf if sinks is None else sinks[:, :, None])
        blind = {3: is_blind, 4: jnp.swapaxes(is_blind, 1, 2)[..., None]}
        lost = lambda array: blind[array.ndim] & (True if sinks is None else ~jnp.isfinite(array))
        return tuple(jnp.where(lost(array), 0, array) for array in arrays)


def check_flag(name, value):
    """TypeError, unless the value of an argument is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_call(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, query_segment_ids=None, key_value_segment_ids=None,
    logits_soft_cap=None, sinks=None, causal_offset=0, mask_mod=None, score_mod=None, score_arrays=(),
    block_mask=None, keeps_low_bits=True
):  # fmt: skip
    """Check the arguments of `flash_attention` and return them as a `Call`."""
    check_flag("keeps_low_bits", keeps_low_bits)
    _check_alike({"query": query, "key": key, "value": value})
    if key.shape[:-3] != query.shape[:-3]:
        raise ValueError(f"key must have the batch size of query, {query.shape[0]}, got shape {key.shape}")
    has_batch = query.ndim == 4
    arrays = [jnp.asarray(array) if has_batch else jnp.asarray(array)[None] for array in (query, key, value)]
    (B, T, N, H), (_, S, K, _) = arrays[0].shape, arrays[1].shape
    if any(_is_more(length, MAX_LENGTH) for length in (T, S)):
        raise ValueError(f"query and key must have at most 2**30 - 1 positions, got {T} and {S}")
    scale = _check_scale(scale, H)
    problem = Problem(
        *(B, T, S, N, K, H, jnp.dtype(query.dtype)),
        scale=scale,
        band=check_band(is_causal, local_window_size, causal_offset),
        soft_cap=check_soft_cap(logits_soft_cap, scale),
        mask_mod=mask_mod,
        score_mod=score_mod,
        is_packed=query_segment_ids is not None and query_segment_ids is key_value_segment_ids,
        keeps_low_bits=keeps_low_bits,
    )
    segment_ids = check_segment_ids(problem, has_batch, query_segment_ids, key_value_segment_ids)
    sizes = {"b": B, "n": N, "i": T, "j": S}
    score_arrays = check_score_arrays(score_arrays, sizes, score_mod)
    check_function("mask_mod", mask_mod)
    check_function("score_mod", score_mod, score_arrays)
    extras = Extras(
        check_table("bias", bias, sizes, has_batch, DTYPES),
        check_table("mask", mask, sizes, has_batch, (jnp.bool_,)),
        *segment_ids,
        check_sinks(sinks, N),
        score_arrays,
        block_mask=check_block_mask(block_mask, sizes, mask is not None or mask_mod is not None),
    )
    return Call(
        problem,
        *arrays,
        check_lengths("query_seq_lengths", query_seq_lengths, B, T),
        check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S),
        extras=extras,
    )


def _check_alike(arrays):
    """Raise unless {name: array} of a query, keys and values fit one another, but for batch and lengths."""
    (query_name, query), (key_name, key), (value_name, value) = arrays.items()
    names = f"{query_name}, {key_name} and {value_name}"
    for name, array in arrays.items():
        check_array(name, array, DTYPES)
        if array.ndim not in (3, 4):
            wanted = "(batch, length, heads, head_dim) or (length, heads, head_dim)"
            raise ValueError(f"{name} must have shape {wanted}, got {array.shape}")
        if 0 in array.shape:
            raise ValueError(f"{name} must have at least one element on every axis, got shape {array.shape}")
        if not all(isinstance(size, int) for size in array.shape[-2:]):
            raise TypeError(f"{name} must have numbers of heads and head_dim, not symbols, got shape {array.shape}")
    if not (query.dtype == key.dtype == value.dtype):
        got = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        raise TypeError(f"{names} must share one dtype, got {got}")
    if not (query.ndim == key.ndim == value.ndim):
        got = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"{names} must all have a batch axis or all have none, got shapes {got}")
    if value.shape != key.shape:
        raise ValueError(f"{value_name} must have the shape of {key_name}, {key.shape}, got {value.shape}")
    (N, H), K = query.shape[-2:], key.shape[-2]
    if key.shape[-1] != H:
        raise ValueError(f"{key_name} must have the head_dim of {query_name}, {H}, got shape {key.shape}")
    if N % K:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {N} and {K}")
    if H > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {H}")


def check_paged_call(
    query, key_pages, value_pages, page_table, lengths, *, scale=None, is_causal=False, local_window_size=None,
    causal_offset=None, logits_soft_cap=None, sinks=None
):  # fmt: skip
    """Check the arguments of `paged_attention` and return them as a `Call`, as `check_call` does."""
    arrays = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    for name, array in arrays.items():
        if getattr(array, "ndim", 4) != 4:
            raise ValueError(f"{name} must have four axes, got shape {array.shape}")
    _check_alike(arrays)
    (B, T, N, H), (pages, page, K, _) = query.shape, key_pages.shape
    if T > FEW_QUERIES:
        raise ValueError(f"query must have at most {FEW_QUERIES} positions, got {T}")
    check_array("page_table", page_table, (jnp.int32,), "an int32 array of shape (batch, pages of a sequence)")
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
    band = check_band(is_causal, local_window_size, 0 if causal_offset is None else causal_offset)
    scale = _check_scale(scale, H)
    problem = Problem(
        *(B, T, S, N, K, H, jnp.dtype(query.dtype)),
        scale=scale,
        band=band,
        soft_cap=check_soft_cap(logits_soft_cap, scale),
        is_at_end=causal_offset is None and band != Band(),
    )
    *arrays, table = map(jnp.asarray, (query, key_pages, value_pages, page_table))
    return Call(problem, *arrays, None, key_lengths, table, Extras(sinks=check_sinks(sinks, N)))


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
    scale = float(scale)
    # The kernels multiply with scale * log2 e in float32, so that product must be finite there.
    if not abs(scale) <= LARGEST_SCALE:
        raise ValueError(f"scale must be at most {LARGEST_SCALE:.3g} in size, got {scale!r}")
    return scale if abs(scale) >= np.finfo(np.float32).tiny else 0.0  # to a GPU a subnormal number is 0


def _refuse_tracer(name, value):
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be known when the function is traced; pass a Python value")


def check_band(is_causal, local_window_size, causal_offset):
    """The `Band` of the three arguments."""
    _refuse_tracer("is_causal", is_causal)
    _refuse_tracer("causal_offset", causal_offset)
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    try:
        offset = operator.index(None if isinstance(causal_offset, bool) else causal_offset)
    except TypeError:
        raise TypeError(f"causal_offset must be an integer, got {causal_offset!r}") from None
    if offset and not is_causal and local_window_size is None:
        raise ValueError(f"causal_offset shifts is_causal and local_window_size, and {offset} is given without either")
    band = Band.of(bool(is_causal), _check_window(local_window_size), offset)
    # Beyond any length an edge means the same; the bound keeps int32 positions from overflowing.
    bounded = lambda edge: None if edge is None else max(-MAX_LENGTH, min(edge, MAX_LENGTH))
    return Band(bounded(band.left), bounded(band.right))


def check_soft_cap(cap, scale):
    """A float, or None: one by which float32 logits can be divided, small enough for a tanh of 21 bits.

    At 200 a logit is off by 1e-4 at most. scale: that of the call, which a kernel divides by the cap.
    """
    _refuse_tracer("logits_soft_cap", cap)
    if cap is None:
        return None
    if isinstance(cap, bool | np.bool_) or not isinstance(cap, numbers.Real):
        raise TypeError(f"logits_soft_cap must be a real number or None, got {cap!r}")
    if not 1e-30 <= float(cap) <= 200:
        raise ValueError(f"logits_soft_cap must be between 1e-30 and 200, got {cap!r}")
    if scale != 0 and not 1e-30 <= abs(scale) / float(cap) <= 1e30:
        raise ValueError(f"scale / logits_soft_cap must be between 1e-30 and 1e30 in size, got {scale!r} / {cap!r}")
    return float(cap)


def check_sinks(sinks, N):
    """float32 (1, N), or None."""
    if sinks is None:
        return None
    check_array("sinks", sinks, (jnp.float32,), f"a float32 array of shape ({N},)")
    if sinks.shape != (N,):
        raise ValueError(f"sinks must have shape ({N},), one for each query head, got {sinks.shape}")
    return jnp.asarray(sinks)[None]


def check_segment_ids(problem, has_batch, query_ids, key_ids):
    """The two int32 arrays, (B, T) and (B, S), or None twice."""
    named = {"query_segment_ids": (query_ids, problem.T), "key_value_segment_ids": (key_ids, problem.S)}
    missing = [name for name, (ids, _) in named.items() if ids is None]
    if len(missing) == 2:
        return None, None
    if missing:
        raise ValueError(f"query_segment_ids and key_value_segment_ids go together, and {missing[0]} is None")
    found = []
    for name, (ids, length) in named.items():
        shape = (problem.B, length) if has_batch else (length,)
        check_array(name, ids, (jnp.int32,), f"an int32 array of shape {shape}")
        if ids.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {ids.shape}")
        found.append(jnp.asarray(ids).reshape(problem.B, length))
    return tuple(found)


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
    return left, right


def check_lengths(name, lengths, batch, longest):
    if lengths is None:
        return None
    check_array(name, lengths, (jnp.int32,), f"an int32 array of shape ({batch},)")
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must have shape ({batch},), got {lengths.shape}")
    # Under jit the values are not known yet; there, lengths past the end act like the full length.
    if not isinstance(lengths, jax.core.Tracer):
        values = jax.device_get(lengths)
        if values.min() < 0 or _is_more(int(values.max()), longest):
            raise ValueError(f"{name} must lie between 0 and {longest}, got {values.tolist()}")
    return jnp.asarray(lengths)
