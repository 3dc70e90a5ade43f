"""What the race detector says, in words: of kernels, and of operations of the model written out as one."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.exercises.notebook_10 import ring
from helpers.instruments import races as module
from helpers.instruments.races import DETECTING, races, ring_kernel_races
from helpers.instruments.timeline import Wait


@pytest.mark.parametrize(("steps", "stages", "readers"), [(1, 1, 1), (5, 2, 1), (7, 3, 2)])
def test_a_right_ring_has_no_races(steps, stages, readers):
    memory, *computing = (list(ring(role, steps, stages)) for role in ["memory"] + readers * ["compute"])
    assert ring_kernel_races(memory, computing, stages) == []


@pytest.mark.parametrize(("role", "steps", "words"), [("memory", 4, "copy_gmem_to_smem"), ("compute", 2, "read: ")])
def test_a_race_is_named(role, steps, words):
    wrong = lambda name: [one for one in ring(name, steps, 2) if name != role or type(one) is not Wait]
    found = ring_kernel_races(wrong("memory"), [wrong("compute")], 2)
    assert len(found) == 2 and words in found[0] and "write: " in found[1]


class Turn:
    """Makes one warpgroup of an interpreted kernel run after another, without the detector's knowledge."""

    def __init__(self):
        self.over = threading.Event()

    def _call(self, function):
        io_callback(lambda: np.int32(function()), jax.ShapeDtypeStruct((), jnp.int32))

    def end(self):
        self._call(lambda: self.over.set() or 0)

    def wait(self):
        self._call(lambda: self.over.wait(60))


def races_of_two(first, second, *scratch):
    """What is found in two functions of refs, each run by a warpgroup of its own."""

    def kernel(in_ref, out_ref, *refs):
        for warpgroup, function in enumerate((first, second)):
            pl.when(lax.axis_index("warpgroup") == warpgroup)(lambda function=function: function(in_ref, *refs))

    out_type = jax.ShapeDtypeStruct((128,), jnp.float32)
    options = {"num_threads": 2, "thread_name": "warpgroup", "interpret": DETECTING}
    run = plgpu.kernel(kernel, out_type=out_type, scratch_types=scratch, **options)
    return sorted(races(lambda: run(jnp.ones(128, jnp.float32))))


def test_a_race_that_cannot_be_read_is_no_empty_list(monkeypatch):
    store = lambda number: lambda _, smem: smem.__setitem__(..., jnp.full(128, number))
    monkeypatch.setattr(module, "_ACCESS", re.compile("a form of another version"))
    with pytest.raises(RuntimeError, match="a race was found"):
        races_of_two(store(1.0), store(0.0), plgpu.SMEM((128,), jnp.float32))


def test_who_awaits_a_phase_late_is_after_that_phase_only():
    """As it is, the detector takes the late warpgroup for ordered after the store of the other."""
    turn = Turn()

    def early(_, smem, barrier):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        smem[...] = jnp.ones(128)
        plgpu.barrier_arrive(barrier)
        turn.end()
        plgpu.barrier_wait(barrier)

    def late(_, smem, barrier):
        plgpu.barrier_arrive(barrier)
        turn.wait()
        plgpu.barrier_wait(barrier)
        smem[...] = jnp.zeros(128)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    found = races_of_two(early, late, plgpu.SMEM((128,), jnp.float32), plgpu.Barrier(num_arrivals=2))
    assert found == ["write: smem[...] = jnp.ones(128)", "write: smem[...] = jnp.zeros(128)"]


def test_a_transfer_that_is_done_says_nothing_of_others():
    """As it is, the detector counts the sixth transfer and the first as one, and takes what it reads for loaded."""
    turn = Turn()

    def loading(in_ref, smem, loaded, _):
        plgpu.copy_gmem_to_smem(in_ref, smem.at[0], loaded)
        turn.end()
        plgpu.barrier_wait(loaded)

    def reading(in_ref, smem, _, others_loaded):
        turn.wait()
        for slot in range(1, 6):
            plgpu.copy_gmem_to_smem(in_ref, smem.at[slot], others_loaded)
        plgpu.barrier_wait(others_loaded)
        smem[1] = smem[0]

    barriers = plgpu.Barrier(), plgpu.Barrier(num_arrivals=5)
    found = races_of_two(loading, reading, plgpu.SMEM((6, 128), jnp.float32), *barriers)
    assert found == ["read: smem[1] = smem[0]", "write: plgpu.copy_gmem_to_smem(in_ref, smem.at[0], loaded)"]
