"""Attention over a cache whose keys and values lie in pages: PagedAttention, arXiv 2309.06180."""

import functools

import jax
import jax.numpy as jnp

from helpers.attention.device import compute_capability, device_of
from helpers.attention.portable.decode import decode
from helpers.attention.problem import Call, check_paged_call
from helpers.attention.reference import naive_attention

IMPLEMENTATIONS = ("reference", "portable")


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
    """
    call, table = check_paged_call(query, key_pages, value_pages, page_table, lengths, scale=scale)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    device = device_of(call.query)
    has_kernel = device.platform == "cpu" or compute_capability(device) >= (8, 0)
    if implementation == "portable" and not has_kernel:
        raise NotImplementedError(
            "the portable kernel needs a CPU or an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, this is "
            f'{device.device_kind}; use implementation="reference"'
        )
    in_place = implementation == "portable" or (implementation is None and compute_capability(device) >= (8, 0))
    with jax.enable_x64(False), jax.disable_jit(False):
        attend = _in_place if in_place else _gathered
        arrays = call.query, call.key, call.value, table, call.key_lengths
        out, lse = attend(call.problem, device.platform == "cpu", *arrays)
    return (out, jnp.swapaxes(lse, 1, 2)) if return_residual else out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _in_place(problem, interpret, *arrays):
    return _forward_only(problem, interpret, *arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward_only(problem, interpret, query, key_pages, value_pages, table, lengths):
    return decode(Call(problem, query, key_pages, value_pages, None, lengths), table, interpret=interpret)


@_forward_only.defjvp
def _no_derivative(*_):
    raise NotImplementedError('paged_attention has no derivative in its kernel; use implementation="reference"')


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gathered(problem, _, query, key_pages, value_pages, table, lengths):
    table = jnp.clip(table, 0, key_pages.shape[0] - 1)
    key, value = (
        pages[table].reshape(problem.B, problem.S, problem.K, problem.H) for pages in (key_pages, value_pages)
    )
    return naive_attention(Call(problem, query, key, value, None, lengths))
