"""What the race detector of the Mosaic GPU interpreter says of a kernel, in words that fit a lesson."""

import contextlib
import io
import linecache
import logging
import re
from collections import Counter

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper.warpgroup import MATRIX
from helpers.measure import timeline

_ACCESS = re.compile(r"(read|write) of .*?, (\S+?):(\d+)(?::\d+)? \(")


def races(run):
    """Call run(), which runs a kernel interpreted with detect_races=True. Returns [] or what was found.

    Of a race, the list holds the two accesses that nothing puts in order; otherwise a sentence.
    JAX 0.11 prints races and goes on, later versions raise.
    """
    log = logging.getLogger("jax._src.callback")
    printed, was_disabled, raised = io.StringIO(), log.disabled, False
    log.disabled = True  # the same text, with its trace
    try:
        with contextlib.redirect_stdout(printed):
            jax.block_until_ready(run())
    except Exception as error:
        raised = True
        printed.write(str(error))
    finally:
        log.disabled = was_disabled
    found = interpret_pallas_call.get_races().races_found if not raised else False
    if raised or found:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    text = printed.getvalue()
    if found or "RACE DETECTED" in text:
        accesses = _ACCESS.findall(text)[:2]
        return [f"{kind}: {linecache.getline(path, int(line)).strip()}" for kind, path, line in accesses]
    if raised:
        return [text.strip().splitlines()[-1].split(" on thread")[0]]
    return []


def with_last_waits(memory, readers):
    """The operations of memory, and waits for the phases of "free" that it leaves unseen, as a kernel must not."""
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
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )(jnp.ones(shape, jnp.float32))
    )
    return sorted(found)
