"""Attention over a cache whose keys and values lie in pages: PagedAttention, arXiv 2309.06180."""

import functools

import jax
import jax.numpy as jnp

from helpers.attention import sharding
from helpers.attention.api import settings
from helpers.attention.device import by_platform, compute_capability, device_of
from helpers.attention.portable.decode import decode
from helpers.attention.problem import Call, check_paged_call
from helpers.attention.reference import naive_attention

IMPLEMENTATIONS = ("reference", "portable")
# Of query, both kinds of pages, table and lengths; P pages of G tokens, L of them a sequence. See `sharding`.
LETTERS = ("BTNH", "PGKH", "PGKH", "BL", "B"), sharding.FORWARD[1]


def paged_attention(
    query, key_pages, value_pages, page_table, lengths, *, scale=None, implementation=None, return_residual=False
):
    """Attention of few queries over the keys and values that a page table names.

    It equals `flash_attention` over the gathered cache, with `lengths` as its key_value_seq_lengths:

        key = key_pages[page_table].reshape(B, pages * page, K, H), and value alike.

    Args:
      query: (B, T, N, H) with T of at most 16; float32, bfloat16 or float16.
      key_pages, value_pages: (P, page, K, H), same dtype: P pages of `page` tokens each. N is a multiple of K.
      page_table: int32 (B, pages): row b names the pages of sequence b, in the order of its tokens. Pages may stand
        in any order and in several rows. Entries past the end of a sequence do not matter.
      lengths: int32 (B,), the tokens of each sequence; 0 is a sequence without any.
      scale: a Python number; None means 1 / sqrt(H).
      implementation: "reference" (gathers the cache), "portable" (a Pallas kernel that reads it in place: compiled on
        an NVIDIA GPU from Ampere on, interpreted on a CPU), or None: portable on such a GPU, reference elsewhere.
      return_residual: also return the log-sum-exp of the scaled logits.

    Returns:
      out, with the shape and dtype of query; with return_residual, (out, lse), lse float32 (B, T, N). A query of a
      sequence without tokens gets out = 0 and lse = -inf.

    Raises:
      TypeError, ValueError: an argument is not as described; the message names it. Under jit the values of table and
        lengths are not known; there, a length beyond the table means all of it, and a page that does not exist is
        read as some other one, never as memory outside the pages.
      NotImplementedError: the chosen implementation cannot run here, or a derivative of the kernel is asked for.

    It may stand in `jax.jit`, `jax.vmap`, `jax.shard_map` and `jax.export`, and on meshes, as `flash_attention` may: a
    call is split over batch and heads, pages over heads only. An axis of `vmap` joins the batch, and pages without that
    axis are not copied for it.
    """
    call, table = check_paged_call(query, key_pages, value_pages, page_table, lengths, scale=scale)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    attend = _choose(implementation, call)
    with settings():
        arrays = call.query, call.key, call.value, table, call.key_lengths
        out, lse = _compiled(attend, call.problem, *arrays)
    return (out, jnp.swapaxes(lse, 1, 2)) if return_residual else out


def _choose(implementation, call):
    """The function (problem, query, key_pages, value_pages, table, lengths) -> (out, lse) that serves a call."""
    device = device_of(call.query)
    if implementation == "portable":
        if call.problem.is_symbolic:
            raise NotImplementedError('portable serves no symbolic shapes; use implementation="reference"')
        if device.platform != "cpu" and compute_capability(device) < (8, 0):
            raise NotImplementedError(
                "the portable kernel needs a CPU or an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, this is "
                f'{device.device_kind}; use implementation="reference"'
            )
        return PORTABLE
    has_kernel = implementation is None and compute_capability(device) >= (8, 0) and not call.problem.is_symbolic
    return PORTABLE_OR_REFERENCE if has_kernel else _gathered


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(attend, problem, *arrays):
    return sharding.over_explicit_axes(attend, problem, sharding.vary_alike(arrays), *LETTERS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _in_place(platforms, problem, *arrays):
    """By the kernel for the platform that the program is compiled for. platforms: pairs of its name and a function."""
    precision = jax.config.jax_default_matmul_precision

    def one_device(problem, *arrays):
        with settings(), jax.default_matmul_precision(precision):  # perhaps when XLA splits a call, as in `api`
            return by_platform(*arrays, **{name: functools.partial(run, problem) for name, run in platforms})

    return sharding.one_device_at_a_time(one_device, *LETTERS, join=_join)(problem, *arrays)


@_in_place.defjvp
def _no_derivative(*_):
    raise NotImplementedError('paged_attention has no derivative in its kernel; use implementation="reference"')


def _join(size, is_batched, query, key_pages, value_pages, table, lengths):
    """The arrays with an axis of `vmap` in the batch. A cache that all of its entries share stays one, uncopied."""
    join = functools.partial(sharding.join_axis, size)
    of_query, of_keys, of_values, of_table, of_lengths = is_batched
    if of_keys or of_values:  # each entry has pages of its own, whose numbers go on from those of the entry before
        count = (key_pages.shape[1:] if of_keys else key_pages.shape)[0]
        table = jnp.clip(table, 0, count - 1) + count * jnp.arange(size, dtype=table.dtype)[:, None, None]
        key_pages, value_pages, of_table = join(key_pages, of_keys), join(value_pages, of_values), True
    return join(query, of_query), key_pages, value_pages, join(table, of_table), join(lengths, of_lengths)


def _decode(problem, query, key_pages, value_pages, table, lengths, interpret):
    return tuple(decode(Call(problem, query, key_pages, value_pages, None, lengths), table, interpret=interpret))


def _gathered(problem, query, key_pages, value_pages, table, lengths):
    table = jnp.clip(table, 0, key_pages.shape[0] - 1)
    key, value = (
        pages[table].reshape(problem.B, problem.S, problem.K, problem.H) for pages in (key_pages, value_pages)
    )
    return naive_attention(Call(problem, query, key, value, None, lengths))


INTERPRETED, COMPILED = (functools.partial(_decode, interpret=interpret) for interpret in (True, False))
PORTABLE = functools.partial(_in_place, (("cpu", INTERPRETED), ("cuda", COMPILED)))
PORTABLE_OR_REFERENCE = functools.partial(_in_place, (("cuda", COMPILED), ("default", _gathered)))
