"""Where a program will run."""

import contextlib
import functools

import jax
from jax._src import config, core
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

NO_KERNELS = (
    "this program is compiled for {platforms}, for which this implementation of flash_attention has no kernels; use "
    'implementation="reference"'
)
BOUNDS_BLOCKS = (0, 12)  # the first version of JAX whose Triton lowering keeps blocks from what lies behind an array
LEAST_SHARED_MEMORY = 99 * 1024  # bytes of a program, at capability 8.6, 8.9 and 12.x; more from 8.0 on elsewhere


@contextlib.contextmanager
def settings():
    """JAX's settings in which kernels are traced and run, whatever the caller's."""
    with (
        jax.enable_x64(False),
        jax.disable_jit(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


def default_device():
    """The device that computes unless arrays say otherwise."""
    device = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


def device_of(array):
    """Where an array is, or where a traced one will be unless its program is told otherwise."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    return default_device()


def compute_capability(device=None):
    """(major, minor) of a device, by default the default one, if that is an NVIDIA GPU, otherwise (0, 0)."""
    device = device or default_device()
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or "." not in capability:
        return (0, 0)
    major, minor = capability.split(".")[:2]
    return int(major), int(minor)


def core_count(otherwise):
    """How many SMs the default device says that it has; `otherwise` where it says nothing."""
    return getattr(default_device(), "core_count", None) or otherwise


def shared_memory():
    """Bytes of shared memory of a program on the default device; the least from Ampere on where it does not say."""
    return getattr(default_device(), "shared_memory_per_block_optin", None) or LEAST_SHARED_MEMORY


def by_platform(*arrays, **runs):
    """run(*arrays), a tuple, for the platform that the program is compiled for. runs: {platform or "default": run}.

    Decided so late, one trace serves all platforms. No run has a derivative or knows `vmap`. In place of some of them,
    not of all, there may be the words of an error, which is raised when a program is compiled for that platform.
    """
    leaves, tree = jax.tree.flatten(arrays)
    types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    branches, refusals = {}, {"default": NO_KERNELS}
    for platform, run in runs.items():
        if isinstance(run, str):
            refusals[platform] = run
            continue
        # The setting is that of `jax.shard_map(check_vma=False)`, which has no public name for a part of its body.
        with config._check_vma(False):
            jaxpr = jax.make_jaxpr(lambda *leaves, run=run: tuple(run(*tree.unflatten(leaves))))(*types)
        branches[platform] = functools.partial(_apart, platform, None, jaxpr)
    for platform, words in refusals.items():  # with results of the right types
        branches.setdefault(platform, functools.partial(_apart, platform, words, jaxpr))
    return jax.lax.platform_dependent(*leaves, **branches)


def _apart(platform, refusal, jaxpr, *arrays):
    return tuple(apart_p.bind(*arrays, call_jaxpr=jaxpr, platform=platform, refusal=refusal))


# A part of a program for one platform. JAX would lower it for every platform of an exported program, and in
# `jax.shard_map` it would check types in it, which Pallas's interpreter does not pass.
apart_p = Primitive("flash_attention_apart")
apart_p.multiple_results = True


@apart_p.def_effectful_abstract_eval
def _(query, *_, call_jaxpr, platform, refusal):
    def result(aval):
        sharding = query.sharding.update(spec=P(*(None for _ in aval.shape)))
        return jax.core.ShapedArray(aval.shape, aval.dtype, sharding=sharding, manual_axis_type=query.manual_axis_type)

    if refusal is not None:
        return [result(aval) for aval in call_jaxpr.out_avals], set()
    effects = call_jaxpr.effects - {core.internal_mutable_array_effect}  # refs that live and die inside are no effect
    return [result(aval) for aval in call_jaxpr.out_avals], effects


def _lower_apart(context, *arrays, call_jaxpr, platform, refusal):
    module = context.module_context
    if refusal is not None:
        raise NotImplementedError(refusal.format(platforms=", ".join(module.platforms)))
    if platform != "default":
        module = module.replace(platforms=(platform,))
    inner = context.replace(module_context=module, avals_in=call_jaxpr.in_avals)
    with settings():  # in which Pallas's interpreter traces what it makes of a kernel
        results = mlir.lower_fun(jaxpr_as_fun(call_jaxpr), multiple_results=True)(inner, *arrays)
    if inner.tokens_out is not None:  # of the Mosaic interpreter's side effects
        context.set_tokens_out(inner.tokens_out)
    return results


mlir.register_lowering(apart_p, _lower_apart)
