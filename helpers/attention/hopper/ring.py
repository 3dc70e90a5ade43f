"""A ring of slots in shared memory: the memory warpgroup fetches tiles into it, the compute warpgroups read them."""

from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
    """Slots for one tile after another: tile number `step` is in slot step % slots.

    buffers: refs in SMEM, (slots, ...) each, of what a slot holds: keys, or queries and their lse. A matrix may lie
    there 64 columns after another, (slots, columns / 64 and more, rows, 64).
    filled: a barrier for each slot, which the copies arrive at: an arrival for each buffer, or for each 64 columns.
    consumed: a barrier for each slot, which the warpgroups arrive at that have read it: an arrival for each.

    A slot goes free, filled, free. Each compute warpgroup calls `open` once, and then for every tile `wait`,
    `at` and `release`, also for tiles that only the others need. The memory warpgroup calls `fetch` for every tile
    and `drain` at its end.
    """

    buffers: tuple[jax.Array, ...]
    filled: jax.Array
    consumed: jax.Array

    @property
    def slots(self):
        return self.buffers[0].shape[0]

    def slot(self, step):
        return lax.rem(step, self.slots)

    def at(self, step):
        """The refs of a tile, one of each buffer."""
        slot = self.slot(step)
        return tuple(buffer.at[slot] for buffer in self.buffers)

    def fetch(self, step, *sources):
        """Begin to copy a tile from refs in GMEM, one for each buffer, as soon as its slot is free."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.consumed.at[slot])
        for source, buffer in zip(sources, self.buffers, strict=True):
            parts = [(source, buffer.at[slot])]
            if buffer.ndim == 4:
                starts = range(0, source.shape[1], 64)
                parts = [(source.at[:, pl.ds(start, 64)], buffer.at[slot, start // 64]) for start in starts]
            for columns, part in parts:
                plgpu.copy_gmem_to_smem(columns, part, self.filled.at[slot])

    def wait(self, step):
        """Until a tile is there."""
        plgpu.barrier_wait(self.filled.at[self.slot(step)])

    def release(self, step):
        """This warpgroup has read a tile."""
        plgpu.barrier_arrive(self.consumed.at[self.slot(step)])

    def open(self):
        """At first every slot is free."""
        for slot in range(self.slots):
            plgpu.barrier_arrive(self.consumed.at[slot])

    def drain(self):
        """Leave no barrier with an arrival that nobody saw."""
        for slot in range(self.slots):
            plgpu.barrier_wait(self.consumed.at[slot])
