"""Which kernels there are, where they run, and what they serve: one table, by the names of implementations.

A call asks for features, such as float32 or lengths (`Call.features`). A backend lists those that it serves, and
refuses what it does not list.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas.fuser  # the interpreter would import it with the first kernel, and that compile again
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from helpers.attention import cudnn, sharding, tpu
from helpers.attention.device import BOUNDS_BLOCKS, by_platform, compute_capability, device_of, settings
from helpers.attention.differentiate import differentiable, reverse_mode_only, without_derivative
from helpers.attention.extra_gradients import gradients_of_extras
from helpers.attention.hopper import backward as hopper_backward
from helpers.attention.hopper import forward as hopper_forward
from helpers.attention.hopper import serve as hopper
from helpers.attention.low_bits import rounded_with_low_bits, with_low_bits
from helpers.attention.mosaic import backward as mosaic_backward
from helpers.attention.mosaic import decode as mosaic_decode
from helpers.attention.mosaic import forward as mosaic_forward
from helpers.attention.mosaic import words as mosaic
from helpers.attention.portable import backward as plain_backward
from helpers.attention.portable import forward as plain_forward
from helpers.attention.problem import FEATURES, FEW_QUERIES, Call
from helpers.attention.reference import naive_attention, naive_gradients, naive_gradients_of_part


class Kernels(NamedTuple):
    """forward(call) -> (out, lse) and backward(call, out, lse, dout, dlse, low) -> (dq, dk, dv), on one device.

    forward_with_low_bits(call) -> (out, lse, low) is for a call in 16 bits that will be differentiated, see `low_bits`.
    The others are for a call that has some of the keys only, while others travel: they leave room for a transfer that
    occupies a part of a GPU. exact_forward_of_part has out in float32 with all of its bits, and for backward_of_part
    out, lse and low are those of all keys.
    """

    forward: Callable
    backward: Callable
    forward_with_low_bits: Callable
    forward_of_part: Callable
    exact_forward_of_part: Callable
    backward_of_part: Callable


@dataclass(frozen=True)
class KernelsOf:
    """Attention by the kernels for the platform that a program is compiled for, as a function of a call.

    Decided so late, one trace serves them all. platforms: pairs of a platform, or "default", and its Kernels, or the
    words with which it is refused.
    splits: whether XLA may split a call over devices.
    """

    platforms: tuple
    splits: bool = True

    def on(self, device):
        """The `Kernels` for a device, or the words with which it is refused; None where there are none."""
        platforms = dict(self.platforms)
        return platforms.get({"gpu": "cuda"}.get(device.platform, device.platform), platforms.get("default"))

    def __call__(self, call):
        call, problem = call.prepared(), call.problem
        call = dataclasses.replace(call, extras=jax.tree.map(reverse_mode_only, call.extras))
        forward = functools.partial(self.run, "forward", problem)
        keeping = functools.partial(self.run, "forward_with_low_bits", problem)
        if call.page_table is not None:
            words = 'paged_attention has no derivative in its kernel; use implementation="reference"'
            return without_derivative(forward, words)(*call.arrays)

        @settings()  # JAX traces it when it pulls back
        def backward(arrays, residuals, gradients):
            call, (out, lse, *low) = Call(problem, *arrays), residuals
            found = self.run("backward", problem, *arrays, out, lse, *gradients, *(low or [None]))
            if not jax.tree.leaves(call.extras):
                return found
            (query,) = call.of_seeing_rows(lse, call.query)
            seeing = dataclasses.replace(call, query=query)
            return *found, None, None, None, gradients_of_extras(seeing, out, lse, *gradients, *low)

        keeps = problem.keeps_low_bits and problem.dtype.itemsize == 2
        attend = differentiable(forward, backward, keeping if keeps else None)
        return attend(*call.arrays)

    def run(self, which, problem, *arrays):
        """The pass which, a field of `Kernels`, of the arrays of a `Call` and of its residuals."""
        precision = jax.config.jax_default_matmul_precision

        def one_device(problem, *arrays):
            def on(kernels):
                if isinstance(kernels, str):
                    return kernels
                one_pass = getattr(kernels, which)
                return lambda *arrays: tuple(one_pass(Call(problem, *arrays[:7]), *arrays[7:]))

            # Perhaps traced again when XLA splits a call, long after the caller's settings are gone.
            with settings(), jax.default_matmul_precision(precision):
                return by_platform(*arrays, **{name: on(kernels) for name, kernels in self.platforms})

        letters = sharding.letters(which, arrays)
        return sharding.one_device_at_a_time(one_device, *letters, self.splits)(problem, *arrays)


# The kernels of each implementation. interpret: what makes them run on a CPU, or False.


def _exact(forward):
    """A forward pass with out in float32, from one that keeps its low bits."""

    def exact_forward(call):
        out, lse, low = forward(call)
        return with_low_bits(out, low), lse

    return exact_forward


def _of_seeing_rows(backward):
    """A backward pass in which a query that sees no key passes nothing, from one that would pass its NaN."""

    def of_seeing_rows(call, out, lse, dout, dlse, low=None):
        query, dout, dlse = call.of_seeing_rows(lse, call.query, dout, dlse)
        return backward(dataclasses.replace(call, query=query), out, lse, dout, dlse, low)

    return of_seeing_rows


def _in_float32(call):
    problem = dataclasses.replace(call.problem, dtype=jnp.dtype(jnp.float32))
    query, key, value = (array.astype(jnp.float32) for array in call.arrays[:3])
    return dataclasses.replace(call, problem=problem, query=query, key=key, value=value)


def _of_one_query(call, out, lse, dout, dlse, low):
    """The gradients of naive attention in float32."""
    with jax.default_matmul_precision("highest"):
        gradients = naive_gradients(_in_float32(call), out, lse, dout.astype(jnp.float32), dlse, low)
    return tuple(gradient.astype(call.problem.dtype) for gradient in gradients)


def _backward(many_queries):
    """A backward pass by many_queries, and that of one query by XLA, which would round no ds of it on a GPU.

    Not where no low bits are wanted.
    """

    def backward(call, *residuals):
        is_one_query = call.problem.T == 1 and residuals[-1] is not None
        return (_of_seeing_rows(_of_one_query) if is_one_query else many_queries)(call, *residuals)

    return backward


def _plain(interpret):
    def forward(call, dtype=None):
        return plain_forward.forward(call.gathered(), dtype=dtype, interpret=interpret)

    exact_forward = functools.partial(forward, dtype=jnp.float32)

    def keeping(call):
        exact, lse = exact_forward(call)
        out, low = rounded_with_low_bits(exact, call.problem.dtype)
        return out, lse, low

    backward = functools.partial(plain_backward.backward, interpret=interpret)
    return Kernels(forward, _backward(_of_seeing_rows(backward)), keeping, forward, exact_forward, backward)


def _forward(many_queries, interpret):
    """The forward pass by many_queries(call, interpret=…), and that of few queries by kernels of its own."""

    def forward(call):
        if call.problem.T <= FEW_QUERIES and call.is_plain:
            return mosaic_decode.decode(call, interpret=interpret)
        return many_queries(call.gathered(), interpret=interpret)

    return forward


def _mosaic(interpret):
    many_queries = functools.partial(mosaic_forward.forward, interpret=interpret)
    forward = _forward(mosaic_forward.forward, interpret)
    keeping = functools.partial(many_queries, keeps_low_bits=True)
    backward = functools.partial(mosaic_backward.backward, interpret=interpret)

    def of_all(call, *residuals):
        clears = mosaic_backward.clears_blind(call)
        return (backward if clears else _of_seeing_rows(backward))(call, *residuals)

    def exact_forward_of_part(call):
        return (many_queries if call.problem.dtype == jnp.float32 else _exact(keeping))(call)

    of_part = functools.partial(backward, mends_delta=False)
    return Kernels(forward, _backward(of_all), keeping, forward, exact_forward_of_part, of_part)


def _hopper(interpret):
    forward = _forward(hopper_forward.forward, interpret)
    of_part = _forward(functools.partial(hopper_forward.forward, is_persistent=False), interpret)
    keeping = functools.partial(hopper_forward.forward, keeps_low_bits=True, interpret=interpret)
    exact_of_part = _exact(functools.partial(keeping, is_persistent=False))
    backward = functools.partial(hopper_backward.backward, interpret=interpret)
    backward_of_part = functools.partial(backward, has_all_keys=False)
    return Kernels(forward, _backward(backward), keeping, of_part, exact_of_part, backward_of_part)


def _tpu(interpret):
    forward = functools.partial(tpu.forward, interpret=interpret)
    keeping = functools.partial(forward, keeps_low_bits=True)
    backward = functools.partial(tpu.backward, interpret=interpret)
    return Kernels(forward, _backward(_of_seeing_rows(backward)), keeping, forward, _exact(keeping), backward)


def _naive(interpret):
    def keeping(call):
        return *naive_attention(call), jnp.zeros(call.query.shape, jnp.int16)  # backward computes out again

    def exact_forward_of_part(call):
        return naive_attention(_in_float32(call))

    forwards = keeping, naive_attention, exact_forward_of_part
    return Kernels(naive_attention, _of_seeing_rows(naive_gradients), *forwards, naive_gradients_of_part)


def _why_no_portable(call, return_residual):
    """Why the kernels for the device of a call cannot have its functions inside, or None."""
    return (mosaic.why_not_by_tiles if device_of(call.query).platform == "cpu" else mosaic.why_not)(call)


def _why_no_triton(call, return_residual):
    """Why this JAX cannot compile the plain kernels for a call by Triton, or None."""
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "JAX compiles nothing by Triton any more"
    if jax.__version_info__ < BOUNDS_BLOCKS:
        return f"what JAX {jax.__version__} compiles by Triton writes past the end of an array; it needs JAX 0.12"
    return mosaic.why_not_by_tiles(call)


@dataclass(frozen=True)
class Backend:
    """An implementation.

    serves: the features that it has beyond 16-bit calls in which all queries see all keys, or causally. needs, runs_on:
    the devices that it runs on, in words and as a function of a device. limits(call, return_residual): why it cannot
    serve a call for another reason, or None. kernels(interpret): its `Kernels`, None for cudnn.
    platform: where these are compiled. interpreter: what interprets them on a CPU. alone: whether that interpreter
    knows one device only, and has side effects that JAX does not let into `checkpoint`, even where they are not used.
    """

    serves: tuple
    needs: str
    runs_on: Callable
    limits: Callable = lambda call, return_residual: None
    kernels: Callable | None = None
    platform: str = "cuda"
    interpreter: object = False
    alone: bool = False


FEATURES_IN_NUMBERS = tuple(feature for feature in FEATURES if feature != "symbolic shapes")
TABLE = {
    "reference": Backend(FEATURES, "any device", lambda device: True, kernels=_naive, platform="default"),
    "portable": Backend(
        serves=FEATURES_IN_NUMBERS,
        needs="a CPU or an NVIDIA GPU of compute capability 8.0 (Ampere) or newer",
        runs_on=lambda device: device.platform == "cpu" or compute_capability(device) >= (8, 0),
        limits=_why_no_portable,
        kernels=lambda interpret: _plain(interpret) if interpret else _mosaic(interpret),
        interpreter=True,
    ),
    "mosaic": Backend(
        serves=FEATURES_IN_NUMBERS,
        needs="a CPU or an NVIDIA GPU of compute capability 8.0 (Ampere) or newer",
        runs_on=lambda device: device.platform == "cpu" or compute_capability(device) >= (8, 0),
        limits=lambda call, return_residual: mosaic.why_not(call),
        kernels=_mosaic,
        interpreter=plgpu.InterpretGPUParams(),
        alone=True,
    ),
    "hopper": Backend(
        serves=("sequence lengths", "local window", "causal_offset", "segment ids", "soft cap", "sinks"),
        needs="an NVIDIA GPU of compute capability 9.0 (Hopper) or a CPU",
        runs_on=lambda device: device.platform == "cpu" or compute_capability(device) == (9, 0),
        kernels=_hopper,
        interpreter=plgpu.InterpretGPUParams(),
        alone=True,
    ),
    "tpu": Backend(
        serves=tuple(feature for feature in FEATURES_IN_NUMBERS if feature != "pages"),
        needs="a TPU or a CPU",
        runs_on=lambda device: device.platform in ("tpu", "cpu"),
        limits=lambda call, return_residual: mosaic.why_not_by_tiles(call),
        kernels=_tpu,
        platform="tpu",
        interpreter=pltpu.InterpretParams(),
        alone=True,
    ),
    "triton": Backend(
        serves=tuple(feature for feature in FEATURES_IN_NUMBERS if feature != "pages"),
        needs="an NVIDIA GPU of compute capability 8.0 (Ampere) or newer",
        runs_on=lambda device: compute_capability(device) >= (8, 0),
        limits=_why_no_triton,
        kernels=_plain,
        interpreter=True,
    ),
    "cudnn": Backend(
        serves=("sequence lengths", "local window"),
        needs="an NVIDIA GPU of compute capability 8.0 or newer",
        runs_on=lambda device: compute_capability(device) >= (8, 0),
        limits=cudnn.why_not,
    ),
}
IMPLEMENTATIONS = tuple(TABLE)
BY_DEFAULT = ("hopper", "portable", "tpu", "reference")  # the first that is compiled for the device and serves the call


def why_not(name, call, return_residual=False, device=None):
    """Why an implementation cannot serve a call, or None where it can. device: by default that of the call's arrays."""
    device, backend = device or device_of(call.query), TABLE[name]
    lacking = next((feature for feature in call.features if feature not in backend.serves), None)
    if lacking:
        return f"it takes no {lacking}"
    if not backend.runs_on(device):
        return f"it needs {backend.needs}, this is {device.device_kind}"
    return backend.limits(call, return_residual)


@functools.cache
def kernels(name, interpreted=False):
    """The `Kernels` of an implementation, the same each time."""
    return TABLE[name].kernels(interpreted and TABLE[name].interpreter)


def kernels_by_platform(name, interpreted=True, splits=True):
    """An implementation's `KernelsOf`: for its platform, and interpreted on a CPU or, elsewhere, naive attention."""
    compiled = TABLE[name].platform, kernels(name)
    other = ("cpu", kernels(name, True)) if interpreted else ("default", kernels("reference"))
    return KernelsOf((compiled,) if name == "reference" else (other, compiled), splits)


def choose(implementation, call, return_residual=True):
    """The function that serves a call, of which it makes out and lse (B, N, T)."""
    if implementation not in (None, *TABLE):
        raise ValueError(f"implementation must be None or one of {', '.join(TABLE)}, got {implementation!r}")
    device = device_of(call.query)
    if implementation is None:
        compiled = BY_DEFAULT if device.platform != "cpu" else ("reference",)
        name = next(name for name in compiled if why_not(name, call) is None)
        return naive_attention if name == "reference" else kernels_by_platform(name, interpreted=False)
    if reason := why_not(implementation, call, return_residual):
        raise refusal(implementation, call, reason)
    backend = TABLE[implementation]
    if backend.kernels is None:
        return cudnn.attention
    if implementation == "reference":
        return naive_attention
    if not backend.alone:
        return kernels_by_platform(implementation)
    if device.platform != "cpu" or not jax.typeof(call.query).sharding.mesh.empty:
        return kernels_by_platform(implementation, interpreted=False)
    too_few_threads = implementation == "hopper" and hopper.why_not_here()
    if not too_few_threads:
        return kernels_by_platform(implementation, splits=False)
    error = refusal(implementation, call, too_few_threads)
    if not isinstance(call.query, jax.core.Tracer):
        raise error
    # A traced call may be on its way to a GPU: that is known when its program is lowered.
    return KernelsOf((("cpu", str(error)), ("cuda", kernels("hopper"))), splits=False)


def refusal(name, call, reason):
    """The error that says why an implementation cannot serve a call, and which can."""
    instead = next(other for other in ("portable", "reference") if other != name and why_not(other, call) is None)
    return NotImplementedError(f'{name} cannot serve this call: {reason}; use implementation="{instead}"')
