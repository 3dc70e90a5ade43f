"""What the race detector of the Mosaic GPU interpreter says of a kernel, in words that fit a lesson.

As it is, the detector misses a race now and then, because it takes too much for ordered: see `DETECTING`
and `ordered_by_phases`. With both, what it finds does not depend on which warpgroup happens to run first.
And of products it sees nothing: see `operands_by_way_of_tma` and `in_use_until_awaited`.
"""

import contextlib
import functools
import itertools
import linecache
import re
import threading
import types
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, shared_memory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper import backward, warpgroup
from helpers.attention.hopper.warpgroup import MATRIX, opaque, read
from helpers.instruments import timeline
from helpers.instruments.overheard import overheard

# A vector clock counts the steps of every warpgroup and of every TMA transfer, by the transfer's number modulo
# this: with the default of 5, two transfers share a count, and one that is done makes the other look done.
DETECTING = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=1024)

# Of an access: its kind, path, line. Buffers and threads are written with commas, paths may hold spaces.
_ACCESS = re.compile(r"(read|write) of .*?, ((?:[A-Za-z]:\\|[/<]).*?):(\d+)(?::\d+)? \(")


class _ClockOfPhase:
    """Stands in for the clock of a barrier: a wait sees the arrivals of complete phases, and no others."""

    def __init__(self, barrier):
        self.barrier = barrier
        self.generic_clock, self.async_smem_clock = barrier.complete.generic_clock, barrier.complete.async_smem_clock

    def update(self, clock):
        """Called by each arrival, after the barrier has counted it."""
        self.barrier.arrived.update(clock)
        if self.barrier.arrivals_count == 0:
            self.barrier.complete = self.barrier.arrived.copy()


def _start_clocks(barrier, _):
    barrier.arrived = barrier.VectorClock(barrier.shared_memory.vector_clock_size)
    barrier.complete = barrier.arrived.copy()


def ordered_by_phases():
    """A context in which who awaits a phase of a barrier comes after the arrivals of that phase alone.

    Otherwise who awaits it late comes after the arrivals that the next phase has had meanwhile, too.
    """
    clock = property(_ClockOfPhase, _start_clocks)
    return mock.patch.object(shared_memory.Barrier, "clock", clock, create=True)


def patient_for(seconds):
    """A context in which a wait at a barrier that takes longer than so many seconds is an error."""

    class Condition(threading.Condition):
        def wait(self, timeout=None):
            if not super().wait(timeout or seconds):
                raise TimeoutError("a warpgroup waits for ever at a barrier")
            return True

    patient = types.SimpleNamespace(**vars(threading) | {"Condition": Condition})
    return mock.patch.object(shared_memory, "threading", patient)


@contextlib.contextmanager
def in_use_until_awaited():
    """A context in which kernels are traced so that they read the operands of a `wgmma` when it is awaited, too.

    The interpreter computes a product at once; on a GPU it runs on, and a slot that is given back before it is
    awaited may be filled too early. Then the second read races. An accumulator that is read before its products
    are awaited raises a RuntimeError, whatever the kernel is traced for.
    """
    issue, wait, load = plgpu.wgmma, plgpu.wgmma_wait, plgpu.wgmma_accumulator_load
    in_flight = []

    def watched_issue(acc, a, b):
        issue(acc, a, b)
        in_flight.append((acc, a, b))

    def watched_sum(of, products, axis):
        before = len(in_flight)
        total = of(products, axis)
        in_flight[before:] = [(total, *itertools.chain.from_iterable(products))]  # to a wait, it is one
        return total

    def finish_all_but(n):
        while len(in_flight) > n:
            _, *operands = in_flight.pop(0)
            read(*operands)

    def complain_of(total):
        if any(total is other for other, *_ in in_flight):
            raise RuntimeError("an accumulator is read before its products are awaited")

    def watched_wait(n):
        finish_all_but(n)
        wait(n)

    def watched_load(acc, *, wait_n=0):
        if wait_n is not None:
            finish_all_but(wait_n)
            complain_of(acc)
        return load(acc, wait_n=wait_n)

    def watched_opaque(numbers):
        complain_of(numbers)
        return opaque(numbers)

    backward._fused.clear_cache()  # what was traced before would not be traced again
    watched = {"wgmma": watched_issue, "wgmma_wait": watched_wait, "wgmma_accumulator_load": watched_load}
    sums = "interpreted_sum", "overwriting_sum"
    watched_sums = {name: functools.partial(watched_sum, getattr(warpgroup, name)) for name in sums}
    with (
        mock.patch.multiple(plgpu, **watched),
        mock.patch.object(primitives, "wgmma_accumulator_load", watched_load),  # `acc[...]` calls this one
        mock.patch.multiple(warpgroup, opaque=watched_opaque, **watched_sums),
    ):
        try:
            yield
        finally:
            backward._fused.clear_cache()


@contextlib.contextmanager
def operands_by_way_of_tma():
    """A context in which the detector sees what a `wgmma` reads: on TMA's path, which needs a fence after a store."""
    memory_class, compute = shared_memory.GPUSharedMemory, gpu_callbacks.wgmma
    commit = memory_class.commit_smem

    def commit_smem(memory, thread):
        commit(memory, thread)
        memory.incr_clock(thread)  # the step that the products between this fence and the next store take

    @gpu_callbacks.fail_on_exception
    def wgmma(*, thread, source_info=None, **arguments):
        memory = gpu_callbacks._get_shared_memory()
        if memory.detect_races:
            clock = memory.get_clock(thread).async_smem_clock
            clock.inc(memory.thread_to_vc_position(thread))
            for operand in ("a", "b"):
                key = shared_memory.HostAllocationKey.from_array(arguments[f"{operand}_allocation_key_as_array"])
                transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{operand}_transforms"])
                what = memory.access(key, jax.tree.map(int, transforms))
                gpu_callbacks.get_races().check_read(thread, clock, key, what, source_info=source_info)
        return compute(thread=thread, source_info=source_info, **arguments)

    with mock.patch.object(gpu_callbacks, "wgmma", wgmma), mock.patch.object(memory_class, "commit_smem", commit_smem):
        yield


def races(run):
    """Call run(), which traces a kernel and runs it interpreted with `DETECTING`. Returns [] or what was found.

    Of a race, the list holds the two accesses that nothing puts in order; otherwise a sentence. RuntimeError if a race
    was found whose text has another form than is known here: to a caller, an empty list would say that there is none.
    """
    with ordered_by_phases(), in_use_until_awaited(), operands_by_way_of_tma():
        text, error = overheard(run)
    found = error is None and interpret_pallas_call.get_races().races_found
    if error or found:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    text += str(error or "")
    if found or "RACE DETECTED" in text:
        accesses = _ACCESS.findall(text)[:2]
        if not accesses:
            raise RuntimeError(f"a race was found, but not the two accesses in what the detector says of it:\n{text}")
        return [f"{kind}: {linecache.getline(path, int(line)).strip()}" for kind, path, line in accesses]
    if error:
        return [text.strip().splitlines()[-1].split(" on thread")[0]]
    return []


def with_last_waits(memory, readers):
    """The operations of memory, and waits for the phases of "free" that it leaves unseen, as JAX 0.11 forbids."""
    memory = list(memory)
    arrived = Counter(op for reader in readers for op in reader if isinstance(op, timeline.Arrive))
    for (barrier, slot), count in arrived.items():
        if barrier == "free":
            wait = timeline.Wait("free", slot)
            memory += [wait] * (count // len(readers) - memory.count(wait))
    return memory


def ring_kernel_races(memory, readers, stages):
    """What the race detector says of operations of `timeline`, written out as a kernel and run.

    memory: yields Wait("free", slot) and Fetch("tile", slot, tile, "loaded"). readers: for each compute
    warpgroup its Wait("loaded", slot), Read("tile", slot) and Arrive("free", slot). A phase of
    "free" needs the arrival of every reader. Never call this with operations that wait for ever.
    """
    readers = [list(reader) for reader in readers]
    programs = [with_last_waits(memory, readers), *readers]
    shape = max(op.tile for op in programs[0] if isinstance(op, timeline.Fetch)) + 1, 64, 64

    def kernel(x_ref, out_ref, smem, loaded, free):
        barriers = {"loaded": loaded, "free": free}

        def run(operations):
            total = plgpu.layout_cast(jnp.zeros(shape[1:], jnp.float32), MATRIX)
            for op in operations:
                match op:
                    case timeline.Wait(barrier, slot):
                        plgpu.barrier_wait(barriers[barrier].at[slot])
                    case timeline.Arrive(barrier, slot):
                        plgpu.barrier_arrive(barriers[barrier].at[slot])
                    case timeline.Fetch(_, slot, tile, barrier):
                        plgpu.copy_gmem_to_smem(x_ref.at[tile], smem.at[slot], barriers[barrier].at[slot])
                    case timeline.Read(_, slot):
                        total += plgpu.load(smem.at[slot], layout=MATRIX)
                        plgpu.commit_smem()
            return total

        for index, operations in enumerate(programs):

            @pl.when(lax.axis_index("warpgroup") == index)
            def _(index=index, operations=operations):
                total = run(operations)
                if index > 0:
                    out_ref[index - 1] = total

    found = races(
        lambda: plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((len(readers), *shape[1:]), jnp.float32),
            scratch_types=[
                plgpu.SMEM((stages, *shape[1:]), jnp.float32),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_arrivals=len(readers), num_barriers=stages),
            ],
            num_threads=len(programs),
            thread_name="warpgroup",
            interpret=DETECTING,
        )(jnp.ones(shape, jnp.float32))
    )
    return sorted(found)
