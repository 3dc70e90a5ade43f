"""Time programs on a device without being fooled: warm, queued, interleaved, many times, with a spread.

A GPU works through a queue. A call returns when its work is queued, so a clock must wait for the
result; and one short call measures mostly the waiting. So a *sample* here is the time of several
queued calls divided by their number. Samples of the programs to be compared are taken in turns, so
that a GPU that gets warmer slows all of them alike, and each turn begins with another program.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

L2_BYTES = 64 * 2**20  # at least the cache of the GPUs here; rotated inputs are several times as large


@dataclass(frozen=True)
class Timing:
    """What was measured of one program.

    wall_ms: median time of a call by the host's clock, calls queued one after another.
    spread: distance of the quartiles of the wall times, divided by their median.
    device_ms: median of the time that the kernels of one call took by the device's own clock, without
      the gaps between them; None where no profiler could look.
    device_samples: what device_ms is the median of, one for each turn: the mean of the calls in it. Of programs that
      were measured together, samples with the same number are of the same turn: they are pairs.
    """

    wall_ms: float
    spread: float
    device_ms: float | None
    device_samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Timed:
    """Something to time: run(*inputs) queues work and returns arrays; inputs are taken in rotation."""

    run: Callable[..., Any]
    inputs: list[tuple]
    wait: Callable[[Any], Any] = jax.block_until_ready


def summary(wall_s, device_ms):
    """The `Timing` of lists of samples: seconds by the wall, milliseconds of the device (may be empty)."""
    low, middle, high = np.quantile(wall_s, [0.25, 0.5, 0.75])
    return Timing(
        wall_ms=1e3 * float(middle),
        spread=float((high - low) / middle),
        device_ms=float(np.median(device_ms)) if len(device_ms) else None,
        device_samples=tuple(map(float, device_ms)),
    )


def time_together(programs, *, rounds=9, sample_ms=10.0, clock=time.perf_counter, device_samples=None):
    """Measure programs in turns. programs: {name: Timed}. Returns {name: Timing}.

    rounds: samples of each program. sample_ms: about how long one sample lasts.
    clock: seconds. device_samples: function of a Timed that returns the milliseconds of some calls; by
    default the profiler of `kernel_times`.
    """
    device_samples = kernel_times if device_samples is None else device_samples
    calls, rotations = {}, {}
    for name, program in programs.items():
        program.wait(program.run(*program.inputs[0]))  # compiles, and loads the kernels
        rotations[name] = itertools.cycle(program.inputs)
        once = _sample(program, rotations[name], 3, clock)
        calls[name] = max(1, int(np.ceil(sample_ms / 1e3 / max(once, 1e-7))))
    walls = {name: [] for name in programs}
    for name in _turns(programs, rounds):
        walls[name].append(_sample(programs[name], rotations[name], calls[name], clock))
    devices = {name: [] for name in programs}
    for name in _turns(programs, rounds):
        found = device_samples(programs[name])
        devices[name] += [float(np.mean(found))] if found else []  # calls of one turn are too alike to count apart
    return {name: summary(walls[name], devices[name]) for name in programs}


def _turns(programs, rounds):
    """The names, once a round; each round begins with another."""
    order = list(programs)
    for turn in range(rounds):
        first = turn % len(order)
        yield from order[first:] + order[:first]


def _sample(program, rotation, calls, clock):
    """Seconds of one of `calls` queued calls, with the next inputs of the rotation."""
    began = clock()
    for arrays in itertools.islice(rotation, calls):
        result = program.run(*arrays)
    program.wait(result)
    return (clock() - began) / calls


def kernel_times(program, calls=3):
    """Milliseconds that the kernels of each of some calls took, by CUPTI; empty where that cannot look.

    All inputs are used, so that no call finds its own in the cache.
    """
    inputs = itertools.cycle(program.inputs)
    try:
        from jax.experimental.mosaic.gpu import profiler

        def once():
            result = program.run(*next(inputs))
            if program.wait is jax.block_until_ready:
                return result
            program.wait(result)  # for what is not JAX's the profiler does not wait
            return ()

        _, times = profiler.measure(_AsItIs(once), iterations=max(calls, len(program.inputs)))()
    except Exception:  # no GPU, no CUPTI, or another profiler attached
        return []
    times = times if isinstance(times, list) else [times]  # it returns the time of one call as a number
    return [] if None in times else times


class _AsItIs:
    """A function in the guise of `jax.stages.Wrapped`, which the profiler calls as it is.

    Any other it would compile first: into one program, with the first inputs as constants in it.
    """

    def __init__(self, function):
        self.function = function

    def __call__(self):
        return self.function()

    trace = lower = eval_shape = __call__


def rotation(inputs_bytes):
    """How many sets of inputs, of so many bytes each, to rotate through so that no call finds its own in the cache."""
    return max(1, int(np.ceil(3 * L2_BYTES / inputs_bytes)))
