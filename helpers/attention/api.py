"""The public function: check the call, choose an implementation, return what was asked for."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from helpers.attention.device import compute_capability, default_device, device_of, on_device
from helpers.attention.hopper import serve as hopper
from helpers.attention.portable import backward as portable_backward
from helpers.attention.portable import forward as portable_forward
from helpers.attention.problem import Call, check_call
from helpers.attention.reference import naive_attention

IMPLEMENTATIONS = ("reference", "portable", "hopper", "cudnn")


def flash_attention(
    query,
    key,
    value,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    return_residual=False,
):
    """Exact attention, softmax(scale Q K^T) V; a drop-in for `jax.nn.dot_product_attention`.

    Args:
      query: (B, T, N, H) or (T, N, H); float32, bfloat16 or float16. H is at most 256.
      key, value: (B, S, K, H) or (S, K, H), same dtype. N is a multiple of K: each key/value head
        serves N // K query heads (MHA, GQA, MQA).
      scale: a Python number; None means 1 / sqrt(H).
      is_causal: query i sees keys j <= i, counted from the start of both.
      query_seq_lengths, key_value_seq_lengths: int32 (B,); positions from there on are padding and
        may hold anything. Under jit their values cannot be checked; there, more than the length means
        all of it.
      local_window_size: (left, right), or one integer for both: query i sees keys
        i - left <= j <= i + right.
      implementation: "reference" (naive, the whole matrix in memory), "portable" (the Pallas
        kernels: compiled on an NVIDIA GPU from Ampere on, interpreted on a CPU), "hopper" (kernels
        for NVIDIA's Hopper cards, 16-bit inputs without lengths or windows; a CPU interprets them
        where PJRT_NPROC is 16), "cudnn" (handed to `jax.nn`, where it can serve the call), or None:
        hopper on such a card for what it serves, otherwise portable on an NVIDIA GPU from Ampere on,
        reference elsewhere. Some things are better in portable than in hopper. Where a softmax is very
        sharp, its 16-bit gradients are several times more exact. Its dq is the same in each run, to the
        last bit. Its forward pass takes as long for all inputs, hopper's takes longer where scores are
        far above those of the first keys. And bfloat16 values below 1e-20 keep all of their digits.
      return_residual: also return the log-sum-exp of the scaled logits.

    Returns:
      out, with the shape and dtype of query; with return_residual, (out, lse), where lse is a
      natural logarithm, float32, of shape (B, T, N) or (T, N). Sums are float32 whatever the
      dtype, so logits and S * max|value| must stay within the range of float32. A query that sees
      no key gets out = 0 and lse = -inf.

    Raises:
      TypeError, ValueError: an argument is not as described; the message names it.
      NotImplementedError: the chosen implementation cannot serve this call; the message says
        why and which can.

    Gradients flow into query, key and value from out and from lse, and a query that sees no key
    passes none. The kernels have reverse-mode first derivatives; the reference has all.
    The algorithm is FlashAttention-2, arXiv 2307.08691.
    """
    call = check_call(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    if not isinstance(return_residual, bool):
        raise TypeError(f"return_residual must be True or False, got {return_residual!r}")
    out, lse = _choose(implementation, call, return_residual)(call)
    if query.ndim == 3:
        out = out[0]
    if not return_residual:
        return out
    lse = jnp.swapaxes(lse, 1, 2)
    return out, lse if query.ndim == 4 else lse[0]


def _choose(implementation, call, return_residual):
    """The function that serves this call: it takes the call and returns out and lse (B, N, T)."""
    if implementation is None:
        capability = compute_capability(device_of(call.query))
        implementation = "portable" if capability >= (8, 0) else "reference"
        if capability == (9, 0) and hopper.why_not(call) is None:
            implementation = "hopper"
    match implementation:
        case "reference":
            return naive_attention
        case "portable":
            return _portable
        case "hopper":
            return _hopper
        case "cudnn":
            _check_cudnn(call, return_residual)
            return _cudnn
    raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")


def _portable(call):
    device = default_device()
    if device.platform != "cpu" and compute_capability() < (8, 0):
        raise NotImplementedError(
            "the portable kernel needs a CPU or an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, this is "
            f'{device.device_kind}; use implementation="reference"'
        )
    return _run_kernels(PORTABLE, call)


def _hopper(call):
    device = default_device()
    reason = hopper.why_not(call)
    if device.platform == "cpu":
        reason = reason or hopper.why_not_here()
    elif compute_capability() != (9, 0):
        reason = f"it needs an NVIDIA GPU of compute capability 9.0 (Hopper) or a CPU, this is {device.device_kind}"
    if reason:
        raise NotImplementedError(f'the hopper kernel cannot serve this call: {reason}; use implementation="portable"')
    return _run_kernels(HOPPER, call)


class Kernels(NamedTuple):
    """forward(call) -> (out, lse) and backward(call, out, lse, dout, dlse) -> (dq, dk, dv), on any device."""

    forward: Callable
    backward: Callable


def _portable_forward(call):
    def run(interpret, *arrays):
        return portable_forward.forward(Call(call.problem, *arrays), interpret=interpret)

    return on_device(run, *call.arrays)


def _portable_backward(call, *residuals):
    def run(interpret, arrays, residuals):
        return portable_backward.backward(Call(call.problem, *arrays), *residuals, interpret=interpret)

    return on_device(run, call.arrays, residuals)


PORTABLE = Kernels(_portable_forward, _portable_backward)
HOPPER = Kernels(hopper.forward, hopper.backward)


def _run_kernels(kernels, call):
    return _compiled_attention(kernels, call.problem, *call.arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(kernels, problem, *arrays):
    return kernels.forward(Call(problem, *arrays))


def _attention_forward(kernels, problem, *arrays):
    out, lse = _attention(kernels, problem, *arrays)
    return (out, lse), (*arrays, out, lse)


def _attention_backward(kernels, problem, residuals, gradients):
    # Lengths are integers and have no gradient.
    return *_gradients(kernels, problem, *residuals, *gradients), None, None


_attention.defvjp(_attention_forward, _attention_backward)
_compiled_attention = jax.jit(_attention, static_argnums=(0, 1))  # so that a second call compiles nothing


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(kernels, problem, *arrays):
    return tuple(kernels.backward(Call(problem, *arrays[:5]), *arrays[5:]))


def _no_second_derivative(*_):
    raise NotImplementedError(
        'the kernels have a first derivative only; use implementation="reference" for second derivatives'
    )


_gradients.defvjp(_no_second_derivative, _no_second_derivative)


def _check_cudnn(call, return_residual):
    """Raise NotImplementedError where cuDNN cannot keep the contract of `flash_attention`."""
    problem = call.problem
    right = problem.band.right
    reason = None
    if compute_capability() < (8, 0):
        reason = "it needs an NVIDIA GPU of compute capability 8.0 or newer"
    elif problem.dtype == jnp.float32:
        reason = "it takes bfloat16 and float16 only"
    elif problem.H % 8 or problem.H > 128:
        reason = f"it takes head_dim up to 128 in multiples of 8, and this is {problem.H}"
    elif (right is not None and right != 0) or (problem.band.left is not None and right is None):
        reason = "it takes a local window only with nothing to the right"
    elif problem.band.left is not None and problem.T > problem.S:
        reason = f"with a local window it takes no more queries than keys, not {problem.T} and {problem.S}"
    elif problem.scale <= 0:
        reason = f"it takes a positive scale only, and this is {problem.scale}"
    elif return_residual:
        reason = "jax.nn rounds its lse to the dtype of key and stops its gradient"
    if reason:
        raise NotImplementedError(f'cudnn cannot serve this call: {reason}; use implementation="portable"')


def _cudnn(call):
    band = call.problem.band
    out = jax.nn.dot_product_attention(
        call.query,
        call.key,
        call.value,
        scale=call.problem.scale,
        is_causal=band.right == 0,
        query_seq_lengths=call.query_lengths,
        key_value_seq_lengths=call.key_lengths,
        local_window_size=None if band.left is None else (band.left, 0),
        implementation="cudnn",
    )
    return out, None
