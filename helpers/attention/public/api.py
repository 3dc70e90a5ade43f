"""The public function: check the call, choose an implementation, return what was asked for.

The arguments combine in this order (see `scores`): s = scale q k + bias, then score_mod, then the soft cap, then
-inf wherever one of the masks hides a key, and exp(sink) in the sum of the softmax. lse counts the sink, and where
a query sees no key, it is the sink. mask_mod and score_mod are traced with int32 numbers that broadcast, and
float32 logits; define them once, since each new function is compiled anew. Gradients flow into bias, sinks and
float score_arrays too; those of bias and score_arrays are made beside the kernels, from all logits once more, some
rows at a time, and summed in the same order each time.

Up to 16 queries, as when text is generated, portable and hopper share one forward pass on a GPU, unless a call has a
bias, a mask, segment ids or functions, or a gradient keeps its low bits: the keys are split over programs, which write
4 (H + 1) bytes, H in whole 128 bytes, for each part of the keys, query and head, to be merged (`mosaic.decode`).

Some things are better in portable than in hopper. The dq of portable is the same in each run, to the last bit. Up to
H = 64 its forward pass does the same for all inputs; for wider heads, and in hopper, it does more where logits are far
above those of the first keys.

Where keys and values have a large part in common, dq of cudnn in 16 bits can be off by more than itself. Here, as
recorded on an H100, its error is at most 1.2 times naive attention's in an older triton and 1.6 times in hopper, and
at most 0.006 of dq. To come this close, the forward pass of all kernels, where it is differentiated, keeps 2 B T N H
bytes more, the low bits of out, unless told not to. And hopper takes off the keys what they have in common in channels
in which all have one sign, as `ring_attention` does with any kernels: see `hopper.common_part`. It does not with sinks,
with a soft cap, or where logits are beyond 256 or so. One query's gradients are those of naive attention in float32,
but with keeps_low_bits=False.

Precision: on a GPU the factors of float32 products are taken as sums of two numbers in bfloat16, which leaves a
relative error of 2^-16 (TF32, as JAX has it elsewhere and triton here, leaves 2^-11), or of three, as exact as float32,
where `jax.default_matmul_precision("highest")` is set around the call or the jit that traces it. Where it is not, dq
and dk of a row that sees one key only are not quite the zero that they should be in triton and in `ring_attention`:
what is left is the rounding of dout value^T. The kernels multiply logits by log2 e before the largest is subtracted,
which rounds float32 logits once more, by up to 6e-8 of each: near 2000 that was 5e-5 of out, and where keys have much
in common, dq can be off by more than itself then.

In `jax.checkpoint` the residuals can be saved by name, so that the forward pass runs once (but not in the reference;
and JAX lets no kernel of mosaic, hopper or tpu into `jax.checkpoint` where a CPU interprets it):
`policy=jax.checkpoint_policies.save_only_these_names(*helpers.attention.public.api.RESIDUALS)`.

Many devices: under jit a call is split over the batch and the heads as its arrays are, and no array is gathered
for that; where there are fewer key heads than devices to split them, every device needs all of its batch's.
Sequences are gathered; `ring_attention` leaves them split. On a mesh with explicit axes the result is split as
query is, and in `jax.shard_map` each device attends to its own part. (The reference's split is XLA's choice.)

Platforms: which kernels run is settled when a program is compiled, so one trace serves a CPU and a GPU, in `jax.export`
too. From a machine without a GPU, name the implementation there: None is the reference; what portable exports runs on
GPUs from Hopper on. Calls of hopper and of mosaic outside a mesh can be exported for "cuda" alone there; and kernels
that jit splits over automatic axes cannot be exported. Symbols for B, T or S: the reference alone, also by None.
"""

import functools

import jax
import jax.numpy as jnp

from helpers.attention import sharding
from helpers.attention.device import default_device, settings
from helpers.attention.differentiate import RESIDUALS
from helpers.attention.problem import Call, check_call, check_flag
from helpers.attention.public.registry import IMPLEMENTATIONS, Kernels, KernelsOf, choose

__all__ = ["IMPLEMENTATIONS", "RESIDUALS", "flash_attention"]


def flash_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, query_segment_ids=None, key_value_segment_ids=None,
    logits_soft_cap=None, sinks=None, causal_offset=0, mask_mod=None, score_mod=None, score_arrays=(),
    block_mask=None, keeps_low_bits=True, implementation=None, return_residual=False
):  # fmt: skip
    """Exact attention, softmax(scale query key^T) value; called like `jax.nn.dot_product_attention`.

    Args:
      query: (B, T, N, H) or (T, N, H); float32, bfloat16 or float16. H is at most 256.
      key, value: (B, S, K, H) or (S, K, H), same dtype. N is a multiple of K: each key/value head
        serves N // K query heads (MHA, GQA, MQA).
      bias: added to the scaled logits; float32, bfloat16 or float16, broadcasts to (B, N, T, S). Hide keys by
        mask instead: where a bias of -1e6 or less hides all keys of a query, float32 has no digits for its gradients.
      mask: booleans that broadcast to (B, N, T, S): query i sees key j only where it is True.
      scale: a Python number; None means 1 / sqrt(H).
      is_causal: query i sees keys j <= i, counted from the start of both.
      query_seq_lengths, key_value_seq_lengths: int32 (B,); positions from there on are padding and may hold anything,
        score_arrays what gives score_mod numbers and finite derivatives. Under jit their values cannot be checked;
        there, more than the length means all of it.
      local_window_size: (left, right), or one integer for both: query i sees keys i - left <= j <= i + right.
      query_segment_ids, key_value_segment_ids: int32 (B, T) and (B, S): a query sees keys of its own number only, as
        where several documents share a row. One array for both saves time: then each query has a key of its own number.
      logits_soft_cap: a number c between 1e-30 and 200: logits become c tanh(logits / c).
      sinks: float32 (N,), for each query head a logit that takes weight and gives no value, as in OpenAI's gpt-oss.
        lse counts it, and lse + log1p(-exp(sinks - lse)) does not.
      causal_offset: an integer; with is_causal, query i sees keys j <= i + causal_offset, and local_window_size counts
        from i + causal_offset. S - T lets the last query see the last key.
      mask_mod: a function (b, n, i, j) -> booleans that says whether in batch entry b query i of head n sees key j.
      score_mod: a function of s, b, n, i, j and score_arrays that gives new logits for scaled logits s.
      score_arrays: pairs of an array and its axes, such as (slopes, "n") and (positions, "bi"), float or int32: what
        score_mod gets as arrays. On a GPU the kernels know most operations on single elements, and no others.
      block_mask: of `masking.block_mask`, for calls that share mask and mask_mod; it is believed. None makes it anew.
      keeps_low_bits: False saves a forward pass that is differentiated 2 B T N H bytes, and time. Then 16-bit gradients
        feel what keys and values have in common, as those of cuDNN and FlashAttention do.
      implementation: "reference" (naive, the whole matrix in memory), "portable" (plain Pallas kernels, which a CPU
        interprets; on an NVIDIA GPU from Ampere on those of mosaic), "mosaic" (kernels in Pallas Mosaic GPU for such
        GPUs; a CPU interprets these very kernels, for one device), "hopper" (kernels for NVIDIA's Hopper GPUs, 16-bit
        inputs without bias, mask or functions; a CPU with 16 cores or PJRT_NPROC=16 interprets them, for one device),
        "tpu" (kernels for Google's TPUs, compiled for v5e and v6e and run in the interpreter alone, for one device),
        "triton" (the plain kernels, compiled by Triton for an NVIDIA GPU from Ampere on: for comparison, as long as JAX
        can do that), "cudnn" (handed to `jax.nn`, where it can serve the call; its gradients feel what keys have in
        common), or None: the first of hopper, portable, tpu and reference that is compiled for the device and serves
        the call.
      return_residual: also return the log-sum-exp of the scaled logits.

    Returns:
      out, with the shape and dtype of query; with return_residual, (out, lse), where lse is a natural logarithm,
      float32, of shape (B, T, N) or (T, N). Sums are float32 whatever the dtype, so `2**15 * S * max|value|`,
      query key^T, and logits and sinks times log2 e must stay within the range of float32; for gradients in float16,
      gradients of lse, and of out times a value, within that of float16. A query that sees no key gets out = 0 and
      lse = -inf, or its sink (at -inf `jax.debug_infs` may stop).

    Raises:
      TypeError, ValueError: an argument is not as described; the message names it.
      NotImplementedError: the chosen implementation cannot serve this call, or has no such derivative; it says why.

    Gradients flow into query, key and value from out and from lse, and a query that sees no key passes none to them.
    The kernels have reverse-mode first derivatives; the reference has all. The algorithm is FlashAttention-2, arXiv
    2307.08691. More on precision, devices and the order of arguments stands in the docstring of the module.
    """
    of_call = locals().copy()
    del of_call["implementation"], of_call["return_residual"]
    call = check_call(**of_call)
    check_flag("return_residual", return_residual)
    out, lse = run(choose(implementation, call, return_residual), call, return_residual)
    if query.ndim == 3:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_residual else out


def run(attend, call, return_residual):
    """out, and lse (B, T, N) or None, of a call by what `choose` found."""
    with settings():
        forward = _forward_on_one_device(attend, call)
        if forward is not None:
            return _compiled_for_one_device(forward, call.problem, return_residual, *call.arrays)
        return _compiled(attend, call.problem, return_residual, *call.arrays)


def _forward_on_one_device(attend, call):
    """The forward kernel alone, where nothing is traced and all arrays are on one device; otherwise None."""
    arrays = jax.tree.leaves(call.arrays)
    if not isinstance(attend, KernelsOf) or any(isinstance(array, jax.core.Tracer) for array in arrays):
        return None
    devices = {device for array in arrays for device in array.devices()}
    is_alone = all(isinstance(array.sharding, jax.sharding.SingleDeviceSharding) for array in arrays)
    if not is_alone or not jax.sharding.get_abstract_mesh().empty or len(devices) > 1:
        return None
    (device,) = devices
    if not any(array.committed for array in arrays) and device != default_device():
        return None  # they move before they are used
    kernels = attend.on(device)
    return kernels.forward if isinstance(kernels, Kernels) else None


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that a second call compiles nothing
def _compiled_for_one_device(forward, problem, return_residual, *arrays):
    out, lse = forward(Call(problem, *arrays))
    return out, jnp.swapaxes(lse, 1, 2) if return_residual else None


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled(attend, problem, return_residual, *arrays):
    arrays = Call(problem, *arrays).numbered().arrays
    letters = sharding.letters("forward", arrays)
    attend_to = lambda problem, *arrays: attend(Call(problem, *arrays))
    out, lse = sharding.over_explicit_axes(attend_to, problem, sharding.vary_alike(arrays), *letters)
    return out, jnp.swapaxes(lse, 1, 2) if return_residual else None
