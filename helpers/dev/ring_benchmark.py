"""Time ring attention on all GPUs of this machine next to one GPU's share of the work, and record it.

Efficiency is the time of a share of the work on one GPU, without any communication, divided by the time of the
ring. Wall times, for the transfers count; the programs of a case take turns on all GPUs. The share alone is:

    full forward         the kernel, a GPU's queries against all keys
    causal zigzag both   both passes over a sequence with 1/n of the pairs, scaled by the pairs
    weak scaling         one GPU's own queries against its own keys, n times
"""

import argparse
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from helpers import flash_attention
from helpers.attention import ring
from helpers.attention.registry import KernelsOf
from helpers.dev.measuring import Machine, Notes, both_passes, gpu_or_reason, reason_of
from helpers.instruments import results
from helpers.instruments.timing import Program, time_together

AXIS = "sequence"
SPLIT = P(None, AXIS)
N, H, DTYPE = 16, 128, "bfloat16"
RIGHT_AT, WIDEST_ERROR = 4096, 0.02  # positions, and relative error of each result against one GPU's


@dataclass(frozen=True)
class Variant:
    """How a ring runs.

    options: XLA's. travels: keys and values do. is_persistent: each step's forward kernel has one program for each
    processor, as for a call of its own, and not one for each tile.
    """

    options: dict = field(default_factory=dict)
    travels: bool = True
    is_persistent: bool = False


BY_THE_DRIVER = {"xla_gpu_use_memcpy_local_p2p": True}  # copies in place of NCCL's kernels
VARIANTS = {
    "nothing travels": Variant(travels=False),
    "XLA's own order": Variant(),
    "overlapping": Variant(ring.OVERLAPPING),
    "overlapping, by the driver": Variant(ring.OVERLAPPING | BY_THE_DRIVER),
    "persistent, nothing travels": Variant(travels=False, is_persistent=True),
    "persistent, overlapping": Variant(ring.OVERLAPPING, is_persistent=True),
}


@dataclass(frozen=True)
class RingCall:
    """One call: how long the whole sequence is, of how many heads, and which passes of it."""

    name: str
    T: int
    is_causal: bool = False
    N: int = N
    H: int = H

    @property
    def passes(self):
        return "both" if self.is_causal else "forward"


def cases(devices):
    short, middle, long = (RingCall("full forward", 1024 * length) for length in (32, 128, 256))
    both, weak = RingCall("causal zigzag both", 131072, True), RingCall("weak scaling", 65536 * devices)
    return [short, middle, both, weak, long]


def mesh_of_all():
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def arrays(case, length, sharding, count=None):
    """Query, key, value, and dout where both passes run: standard normal, made where they belong."""
    draw = jax.jit(
        lambda key: jax.random.normal(key, (1, length, case.N, case.H), jnp.dtype(DTYPE)), out_shardings=sharding
    )
    return [draw(jax.random.key(seed)) for seed in range(count or (4 if case.passes == "both" else 3))]


def passes_of(case, attend):
    """The function of the arrays of a case: out, or the gradients, for which both passes run."""
    return attend if case.passes == "forward" else both_passes(attend)


def stay(_, arrays):
    """In place of `Ring.shift`: each step finds the device's own keys again."""
    return lax.optimization_barrier(arrays)


def of_whole(kernels, which, *arguments, run=KernelsOf.run):
    """In place of `KernelsOf.run`: the forward kernel with a program for each processor, as for a call of its own."""
    return run(kernels, "forward" if which == "forward_of_part" else which, *arguments)


def lowered_ring(case, mesh, variant, inputs):
    attention = functools.partial(ring.ring_attention, axis_name=AXIS, is_causal=case.is_causal)
    attend = jax.shard_map(attention, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    shift = ring.Ring.shift if variant.travels else stay
    run = of_whole if variant.is_persistent else KernelsOf.run
    with mock.patch.object(ring.Ring, "shift", shift), mock.patch.object(KernelsOf, "run", run):
        return jax.jit(passes_of(case, attend)).lower(*inputs)


def share_alone(case, devices):
    """(lowered program, its inputs, factor): the factor times its time is that of one GPU's share."""
    here = SingleDeviceSharding(jax.devices()[0])
    attend = functools.partial(flash_attention, is_causal=case.is_causal)
    if case.name == "weak scaling":
        inputs, factor = arrays(case, case.T // devices, here), devices
    elif case.is_causal:
        own = max(1, round(case.T / devices**0.5 / 128)) * 128
        inputs, factor = arrays(case, own, here), case.T**2 / devices / own**2
    else:
        inputs, factor = arrays(case, case.T // devices, here, 1) + arrays(case, case.T, here)[1:], 1
    return jax.jit(passes_of(case, attend)).lower(*inputs), inputs, factor


@functools.cache  # cases of one kind differ in their lengths
def complaint(case, mesh):
    """What is wrong with the ring of a short case, or None; against `flash_attention` on one GPU."""
    attend = functools.partial(ring.ring_attention_on_mesh, mesh=mesh, axis_name=AXIS, is_causal=case.is_causal)
    on_one = functools.partial(flash_attention, is_causal=case.is_causal)
    inputs = [np.asarray(array) for array in arrays(case, case.T, SingleDeviceSharding(jax.devices()[0]))]
    mine, right = (jax.tree.leaves(jax.jit(passes_of(case, function))(*inputs)) for function in (attend, on_one))
    names = ("out",) if case.passes == "forward" else ("dq", "dk", "dv")
    for name, found, wanted in zip(names, mine, right, strict=True):
        found, wanted = (np.asarray(array, np.float64) for array in (found, wanted))
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        if not error <= WIDEST_ERROR:
            return f"wrong: {name} has a relative error of {error:.1e}"
    return None


def measure(case, mesh, note, time_programs=time_together, right_at=RIGHT_AT):
    """Rows of a case, see `results.RING`; none where it is wrong. note(text): for what went wrong."""
    if wrong := complaint(replace(case, name="short", T=right_at), mesh):
        note(f"{case.name}: {wrong}")
        return []
    devices = mesh.size
    inputs = arrays(case, case.T, NamedSharding(mesh, SPLIT))
    alone, own, factor = share_alone(case, devices)
    with ThreadPoolExecutor() as pool:
        waiting = {"alone": (pool.submit(alone.compile), own)}
        for name, variant in VARIANTS.items():
            lowered = lowered_ring(case, mesh, variant, inputs)
            waiting[name] = pool.submit(lowered.compile, variant.options), inputs
        programs = {name: Program(run.result(), [tuple(arrays)]) for name, (run, arrays) in waiting.items()}
    timings = time_programs(programs, rounds=5, sample_ms=100.0, device_samples=lambda _: [])
    alone = factor * timings.pop("alone").wall_ms
    about = {"case": case.name, "T": case.T, "devices": devices}
    figures = lambda ms: {"alone_ms": round(alone, 3), "ms": round(ms, 3), "efficiency": round(alone / ms, 3)}
    return [about | {"variant": name} | figures(timing.wall_ms) for name, timing in timings.items()]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="make gpu-ring", description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="what to record as the commit, where git cannot say")
    options = parser.parse_args(arguments)
    reason = gpu_or_reason()
    if reason or jax.device_count() < 2:
        print(f"Nothing to measure: {reason or 'a ring needs two GPUs, and this machine has one'}.")
        return 1
    mesh, note, rows = mesh_of_all(), Notes(), []
    machine = Machine.here(options.commit)
    for case in cases(mesh.size):
        try:
            found = measure(case, mesh, note)
        except Exception as error:
            note(f"{case.name} at T = {case.T}: {reason_of(error)}")
            continue
        for row in found:
            label = f"{row['case']} {row['T'] // 1024}k, {row['variant']}"
            print(f"{label:45} {row['ms']:9.2f} ms, alone {row['alone_ms']:9.2f}: {row['efficiency']:.3f}", flush=True)
        rows += found
    path = results.RESULTS / f"{results.slug(machine.card)}_ring.json"
    return results.write_or_say(machine.header() | {"rows": rows, "notes": note}, path, results.RING_FILE)


if __name__ == "__main__":
    sys.exit(main())
