"""What few calls have beside query, key and value: arrays and functions that hide keys or change logits.

Which of them do what, and in which order, is in `scores`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helpers.attention.device import settings
from helpers.attention.masking import BLOCK

# Of arrays that are no tables, (B, N, T, S): the letters of their axes; I and J are tiles of queries, and of keys.
AXES = {"query_segment_ids": "BT", "key_segment_ids": "BS", "sinks": "BN", "batch": "B", "heads": "BN"}
AXES["block_mask"] = "BNIJ"
SCORE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32)


class Extras(NamedTuple):
    """Arrays, each of which may be None. An axis of a table may be 1 in place of its size, and then serves all.

    bias: a table (B, N, T, S) of a float dtype; mask: a table of booleans. query_segment_ids int32 (B, T),
    key_segment_ids int32 (B, S). sinks: float32 (1 or B, N). score_arrays: a tuple of tables, float or int32.
    Kernels want more, see `Call.prepared`: batch int32 (B,) and heads int32 (1, N), the numbers by which mask_mod and
    score_mod know a part of a call; and the `masking.block_mask` of mask and mask_mod.
    """

    bias: jax.Array | None = None
    mask: jax.Array | None = None
    query_segment_ids: jax.Array | None = None
    key_segment_ids: jax.Array | None = None
    sinks: jax.Array | None = None
    score_arrays: tuple | None = None
    batch: jax.Array | None = None
    heads: jax.Array | None = None
    block_mask: jax.Array | None = None

    @staticmethod
    def sink_of(sinks, b, n):
        """That of a head in a batch entry, as a kernel reads it."""
        return sinks[0 if sinks.shape[0] == 1 else b, n]

    @property
    def hides_keys(self):
        """Whether some array hides keys."""
        return self.mask is not None or self.query_segment_ids is not None

    def letters(self):
        """The letters of the axes of each array, as `sharding` wants them; "1" is an axis that serves all."""

        def of(array, letters):
            return "".join("1" if size == 1 else letter for size, letter in zip(array.shape, letters, strict=True))

        of_field = lambda name, field: jax.tree.map(lambda array: of(array, AXES.get(name, "BNTS")), field)
        return Extras(*(of_field(name, field) for name, field in self._asdict().items()))


NO_EXTRAS = Extras()


def own_index(number, array, axis):
    """Where along an axis an array has what belongs to a batch entry or head: 0 where it has the same for all."""
    return number if array.shape[axis] > 1 else jnp.int32(0)


# Checks; those of single numbers are in `problem`


def check_array(name, array, dtypes, what="a JAX or NumPy array"):
    """Raise TypeError unless it is an array of one of the dtypes. what: it must be, in words."""
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be {what}, got {type(array).__name__}")
    if array.dtype not in dtypes:
        allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must have dtype {allowed}, got {array.dtype}")


def check_table(name, array, sizes, has_batch, dtypes):
    """An array that broadcasts to (batch, heads, queries, keys), with four axes; or None.

    sizes: {"b": B, "n": N, "i": T, "j": S}.
    """
    if array is None:
        return None
    check_array(name, array, dtypes)
    shape = (1,) * (4 - array.ndim) + array.shape
    whole = tuple(sizes.values())
    fits = len(shape) == 4 and all(size == 1 or size == full for size, full in zip(shape, whole, strict=True))
    if not fits or (array.ndim == 4 and not has_batch):
        wanted = f"(batch, heads, queries, keys), {whole}" if has_batch else f"(heads, queries, keys), {whole[1:]}"
        raise ValueError(f"{name} must broadcast to {wanted}, got shape {array.shape}")
    return jnp.asarray(array).reshape(shape)


def check_block_mask(block_mask, sizes, has_mask):
    """What `masking.block_mask` made of the mask and the mask_mod of a call, or None."""
    if block_mask is None:
        return None
    if not has_mask:
        raise ValueError("block_mask tells of mask and mask_mod, and both are None")
    check_array("block_mask", block_mask, (jnp.int8,))
    tiles = tuple(-(-sizes[axis] // BLOCK) for axis in "ij")
    allowed = [(b, n, *tiles) for b in (1, sizes["b"]) for n in (1, sizes["n"])]
    if block_mask.shape not in allowed:
        raise ValueError(f"block_mask must have shape (batch or 1, heads or 1, *{tiles}), got {block_mask.shape}")
    return jnp.asarray(block_mask)


def check_score_arrays(pairs, sizes, score_mod):
    """A tuple of tables from pairs of an array and its axes, or None where there are none."""
    expected = 'score_arrays must hold pairs of an array and its axes, such as (slopes, "n")'
    if not isinstance(pairs, tuple | list):
        raise TypeError(f"{expected}, got {type(pairs).__name__}")
    if pairs and score_mod is None:
        raise ValueError("score_arrays are for score_mod, which is None")
    tables = []
    for number, pair in enumerate(pairs):
        name = f"score_arrays[{number}]"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{expected}, got {type(pair).__name__} as {name}")
        array, axes = pair
        check_array(name, array, SCORE_DTYPES)
        if not isinstance(axes, str) or len(set(axes)) != len(axes) or not set(axes) <= set(sizes):
            raise ValueError(f'{name} must have axes among "b", "n", "i" and "j", each once, got {axes!r}')
        shape = tuple(sizes[axis] for axis in axes)
        if array.shape != shape:
            raise ValueError(f'{name} must have shape {shape} for the axes "{axes}", got {array.shape}')
        inner = "".join(axis for axis in sizes if axis in axes)
        table = jnp.transpose(array, [axes.index(axis) for axis in inner])
        tables.append(table.reshape([size if axis in axes else 1 for axis, size in sizes.items()]))
    return tuple(tables) or None


def check_function(name, function, tables=None):
    """Raise unless mask_mod or score_mod is a function that a kernel can have inside. tables: those of score_mod."""
    if function is None:
        return
    try:
        hash(function)
    except TypeError:
        raise TypeError(
            f"{name} must be a function, by which compiled programs are told apart: it has no hash"
        ) from None
    _check_traced(name, function, tuple((table.shape, table.dtype) for table in tables or ()))


@functools.lru_cache(maxsize=256)
def _check_traced(name, function, tables):
    """With two queries and three keys: of one head, as in a kernel, and of two heads of two batch entries.

    tables: (shape, dtype) of each.
    """
    of = jax.ShapeDtypeStruct
    number, i, j = of((), jnp.int32), of((2, 1), jnp.int32), of((1, 3), jnp.int32)
    tiles = [of(tile_shape(shape, 2, 3), dtype) for shape, dtype in tables]
    _check_one_trace(name, function, (number, number, i, j), (2, 3), tiles)
    b, n, j = of((2, 1, 1, 1), jnp.int32), of((1, 2, 1, 1), jnp.int32), of((3,), jnp.int32)
    whole = [of(tuple(np.minimum(shape, (2, 2, 2, 3)).tolist()), dtype) for shape, dtype in tables]
    _check_one_trace(name, function, (b, n, i, j), (2, 2, 2, 3), whole)


def _check_one_trace(name, function, places, full, tables):
    """places: b, n, i and j. full: the shape of the logits."""
    of = jax.ShapeDtypeStruct
    logits = [of(full, jnp.float32)] if name == "score_mod" else []
    try:
        with settings():
            jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*logits, *places, *tables)
    except Exception as error:
        raise TypeError(
            f"{name} must be a function of {'s, ' if logits else ''}b, n, i, j{' and score_arrays' if tables else ''} "
            f"that JAX can trace; it raises {type(error).__name__}: {error}"
        ) from error
    if jaxpr.consts:
        arrays = "score_arrays" if logits else "mask or segment ids"
        raise TypeError(f"{name} must not hold arrays, which a kernel could not reach: give them as {arrays}")
    dtype, shape = (jnp.float32, "the shape of s") if logits else (jnp.bool_, "a shape that broadcasts to i against j")
    fits = isinstance(result, of) and result.dtype == dtype and len(result.shape) <= len(full)
    if fits:
        fits = all(size in (1, most) for size, most in zip(result.shape[::-1], full[::-1], strict=False))
    if not fits or (logits and result.shape != full):
        got = f"{result.dtype} {result.shape}" if isinstance(result, of) else f"{type(result).__name__}"
        given = f"{places[2].shape} and {places[3].shape}"
        raise TypeError(f"{name} must return {jnp.dtype(dtype).name} of {shape}; for {given} it gave {got}")


def tile_shape(shape, rows, cols):
    """The shape of the tile of a table (B, N, T, S) that rows and cols meet: () where the table has neither."""
    if shape[2:] == (1, 1):
        return ()
    return 1 if shape[2] == 1 else rows, 1 if shape[3] == 1 else cols
