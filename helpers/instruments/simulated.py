"""A GPU made of arithmetic, with a clock of its own: here the right answer of a measurement is known.

It has what a benchmark must cope with: a queue, a compiler, a cache, other people, and a temperature.
Reading its clock costs nothing. The same calls give the same times, on any machine.
"""

import math
from collections import deque
from dataclasses import KW_ONLY, dataclass, field


@dataclass
class SimulatedGPU:
    """A GPU whose calls take call_s seconds, if nothing else happens.

    compile_s: what the first call costs the host. launch_s: what it costs the host to queue a call.
    wait_s: what it costs to find out that a call is done.
    cached: a call whose inputs are among those of the last `holds` calls takes call_s times this.
    disturbed: {factor: numbers of the calls that take call_s times it}, counted from 0.
    warming: by how much a call is slower when the GPU is warm, as a fraction. warming_s: the busy time in
      which it comes 63 % of the way there.
    """

    call_s: float
    _: KW_ONLY
    compile_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    cached: float = 1.0
    holds: int = 1
    disturbed: dict = field(default_factory=dict)
    warming: float = 0.0
    warming_s: float = 1.0

    def __post_init__(self):
        self.in_cache, self.compiled = deque(maxlen=self.holds), set()
        self.now = self.idle_at = self.busy_s = 0.0
        self.calls = 0

    def clock(self):
        """Seconds since the GPU was made."""
        return self.now

    def run(self, *inputs, program="program", slower=1.0):
        """Queue a call, and return a ticket for `wait` at once.

        slower: how many times as long this program takes.
        """
        if program not in self.compiled:
            self.compiled.add(program)
            self.now += self.compile_s
        self.now += self.launch_s
        duration = self.call_s * slower
        duration *= 1 + self.warming * (1 - math.exp(-self.busy_s / self.warming_s))
        if inputs and inputs in self.in_cache:
            duration *= self.cached
        for factor, numbers in self.disturbed.items():
            if self.calls in numbers:
                duration *= factor
        self.idle_at = max(self.idle_at, self.now) + duration
        self.calls += 1
        self.in_cache.append(inputs)
        self.busy_s += duration
        return self.idle_at

    def wait(self, done_at):
        """Return when the call with this ticket is done."""
        self.now = max(self.now, done_at) + self.wait_s
