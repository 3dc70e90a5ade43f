"""Attention over a cache whose keys and values lie in pages: PagedAttention, arXiv 2309.06180."""

from helpers.attention.problem import check_flag, check_paged_call
from helpers.attention.public.api import run
from helpers.attention.public.registry import choose


def paged_attention(
    query, key_pages, value_pages, page_table, lengths, *, scale=None, is_causal=False, local_window_size=None,
    causal_offset=None, logits_soft_cap=None, sinks=None, implementation=None, return_residual=False
):  # fmt: skip
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
      is_causal, local_window_size, logits_soft_cap, sinks: as in `flash_attention`.
      causal_offset: an integer: query i stands at position i + causal_offset of its sequence. None means that the
        queries are the last of each sequence, so that the last one sees all of it.
      implementation: "reference" (gathers the cache), "portable" (on an NVIDIA GPU from Ampere on a Mosaic kernel that
        reads it in place; on a CPU it is gathered for the plain kernel), "mosaic" (that kernel, interpreted on a CPU),
        or None: portable on such a GPU, reference elsewhere. With a window that kernel reads whole
        tiles of 64 keys in which some query sees one. What a window hides must be finite, too.
      return_residual: also return the log-sum-exp of the scaled logits.

    Returns:
      out, with the shape and dtype of query; with return_residual, (out, lse), lse float32 (B, T, N). A query of a
      sequence without tokens gets out = 0 and lse = -inf, or its sink.

    Raises:
      TypeError, ValueError: an argument is not as described; the message names it. Under jit the values of table and
        lengths are not known; there, a length beyond the table means all of it, and a page that does not exist is
        read as some other one, never as memory outside the pages.
      NotImplementedError: the chosen implementation cannot run here, or a derivative of the kernel is asked for.

    It may stand in `jax.jit`, `jax.vmap`, `jax.shard_map` and `jax.export`, and on meshes, as `flash_attention` may: a
    call is split over batch and heads, pages over heads only. An axis of `vmap` joins the batch, and pages without that
    axis are not copied for it.
    """
    of_call = locals().copy()
    del of_call["implementation"], of_call["return_residual"]
    call = check_paged_call(**of_call)
    check_flag("return_residual", return_residual)
    out, lse = run(choose(implementation, call), call, return_residual)
    return (out, lse) if return_residual else out
