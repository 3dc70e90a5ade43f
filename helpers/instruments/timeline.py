"""Warpgroups, barriers and units as a small model: who works, who waits, and which order of things is safe.

A warpgroup is a generator that yields operations, one after another:

    Wait(barrier, slot)                     go on once the next phase of a barrier has completed
    Arrive(barrier, slot)                   count one arrival
    Fetch(buffer, slot, tile, barrier)      issue a copy of a tile into a slot, which arrives when it has ended
    Read(buffer, slot)                      read a slot at once
    Work(unit, cycles, label)               keep a unit busy, and wait for it
    Issue(unit, cycles, label, reads)       give a unit work that reads slots, and do not wait for it
    Drain(count)                            wait until at most `count` of my issued works are unfinished

`simulate` runs warpgroups to their end and returns the spans of time in which each worked or waited.
A unit (the tensor core, say) does one thing at a time, first come, first served. The model finds what
a GPU would not report. It raises `OrderError` where warpgroups wait for each other for ever, where a slot
is written while someone may still read it or read before it is loaded, and where a phase of a
barrier is missed. "May": not the simulated times decide, but whether barriers put the two in order.
"""

import itertools
from collections import defaultdict, namedtuple
from typing import NamedTuple

Wait = namedtuple("Wait", "barrier slot", defaults=(0,))
Arrive = namedtuple("Arrive", "barrier slot", defaults=(0,))
Fetch = namedtuple("Fetch", "buffer slot tile barrier cycles", defaults=(256,))
Read = namedtuple("Read", "buffer slot", defaults=(0,))
Work = namedtuple("Work", "unit cycles label")
Issue = namedtuple("Issue", "unit cycles label reads", defaults=((),))
Drain = namedtuple("Drain", "count", defaults=(0,))


class Span(NamedTuple):
    """Time from start to stop, in cycles, of a warpgroup ("wait", or a label) or of a unit."""

    who: str
    what: str
    start: float
    stop: float


class OrderError(Exception):
    """The warpgroups wait for ever, or do things in an order that nothing guarantees."""


class _Barrier:
    def __init__(self, arrivals):
        self.arrivals = arrivals
        self.pending, self.known = 0, set()
        self.phases = []  # (time, what was known to those who arrived)
        self.seen = {}  # by warpgroup: phases waited for


class _Slot:
    def __init__(self):
        self.tile, self.fetch, self.reads = None, None, {}  # reads: {event: who}


class _Warpgroup:
    def __init__(self, name, program):
        self.name, self.program = name, iter(program)
        self.time, self.blocked, self.done = 0.0, None, False
        self.known = set()  # events that happened before, by the order that barriers guarantee
        self.in_flight = []  # (end, read events)
        self.tiles = []  # what its reads found


class Run(NamedTuple):
    """What `simulate` found.

    spans: who was busy or waited, and when. tiles: what each warpgroup read, in order. phases: for each
    (barrier, slot) the times at which its phases completed. end: when the last one was done.
    """

    spans: list
    tiles: dict
    phases: dict
    end: float


def simulate(warpgroups, barriers, latency=0, most=20000):
    """Run warpgroups {name: generator} to their end. Returns a `Run`, or raises `OrderError`.

    barriers: {name: arrivals that complete a phase}, for each slot. latency: cycles that a copy takes
    beyond its turn at the copy engine. most: operations after which a program counts as endless.
    """
    return _Simulation(warpgroups, barriers, latency, most).run()


class _Simulation:
    def __init__(self, warpgroups, barriers, latency, most):
        self.arrivals, self.latency, self.most = barriers, latency, most
        self.barriers, self.slots = {}, defaultdict(_Slot)
        self.warpgroups = [_Warpgroup(*item) for item in warpgroups.items()]
        self.free_at, self.events, self.spans = defaultdict(float), itertools.count(), []
        self.copies = []  # (end, barrier, known): arrivals still to come

    def run(self):
        for _ in range(self.most):
            ready = [group for group in self.warpgroups if not group.done and group.blocked is None]
            if not ready and not self.copies:
                waiting = [group for group in self.warpgroups if not group.done]
                if not waiting:
                    self._check_phases()
                    tiles = {group.name: group.tiles for group in self.warpgroups}
                    phases = {place: [time for time, _ in it.phases] for place, it in self.barriers.items()}
                    return Run(self.spans, tiles, phases, max(group.time for group in self.warpgroups))
                names = ", ".join(f"{group.name} at {_place(group.blocked)}" for group in waiting)
                raise OrderError(f"nobody can go on: waiting for ever are {names}")
            group = min(ready, key=lambda group: group.time, default=None)
            copy = min(self.copies, key=lambda copy: copy[0], default=None)
            if group is None or (copy is not None and copy[0] <= group.time):
                self.copies.remove(copy)
                self._arrive(*copy)
            else:
                self._step(group)
        raise OrderError(f"still not at the end after {self.most} operations")

    def _step(self, group):
        operation = next(group.program, None)
        if operation is None:
            group.done = True
        elif isinstance(operation, Wait):
            barrier = self._barrier(operation)
            barrier.seen.setdefault(group.name, 0)
            group.blocked = operation
            self._try_wait(group, group.time)
        elif isinstance(operation, Arrive):
            self._arrive(group.time, operation, set(group.known))
        elif isinstance(operation, Fetch):
            slot, event = self.slots[operation.buffer, operation.slot], next(self.events)
            written = f"tile {operation.tile} is written into {_place((operation.buffer, operation.slot))}"
            late = [who for read, who in slot.reads.items() if read not in group.known]
            if late:
                raise OrderError(f"{written} while {late[0]} may still read it")
            if slot.fetch is not None and slot.fetch not in group.known:
                raise OrderError(f"{written}, where tile {slot.tile} may still arrive")
            slot.tile, slot.fetch, slot.reads = operation.tile, event, {}
            label = f"{operation.buffer}{operation.tile}"
            _, stop = self._occupy("copy", group.time, operation.cycles, group.name, label)
            arrival = Arrive(operation.barrier, operation.slot)
            self._barrier(arrival)  # it must exist
            self.copies.append((stop + self.latency, arrival, group.known | {event}))
        elif isinstance(operation, Read):
            event = self._read(group, operation)
            group.known.add(event)
        elif isinstance(operation, Work):
            asked = group.time
            start, stop = self._occupy(operation.unit, asked, operation.cycles, group.name, operation.label)
            self._span(group, "wait", asked, start)
            self._span(group, operation.label, start, stop)
            group.time = stop
        elif isinstance(operation, Issue):
            reads = {self._read(group, place) for place in operation.reads}
            _, stop = self._occupy(operation.unit, group.time, operation.cycles, group.name, operation.label)
            group.in_flight.append((stop, reads))
        elif isinstance(operation, Drain):
            while len(group.in_flight) > operation.count:
                stop, reads = group.in_flight.pop(0)
                group.known |= reads
                self._span(group, "wait", group.time, stop)
                group.time = max(group.time, stop)
        else:
            raise OrderError(f"{group.name} yielded something that is no operation")

    def _barrier(self, place):
        name, slot = place
        if name not in self.arrivals:
            raise OrderError(f"there is no barrier {name!r}")
        return self.barriers.setdefault((name, slot), _Barrier(self.arrivals[name]))

    def _arrive(self, time, place, known):
        barrier = self._barrier(place)
        barrier.pending += 1
        barrier.known |= known
        if barrier.pending < barrier.arrivals:
            return
        barrier.phases.append((time, barrier.known))
        barrier.pending, barrier.known = 0, set()
        for group in self.warpgroups:
            if group.blocked is not None and self._barrier(group.blocked) is barrier:
                self._try_wait(group, time)

    def _try_wait(self, group, now):
        barrier = self._barrier(group.blocked)
        seen = barrier.seen[group.name]
        if seen < len(barrier.phases):
            time, known = barrier.phases[seen]
            barrier.seen[group.name] += 1
            group.known |= known | {(barrier, seen, group.name)}
            self._span(group, "wait", group.time, max(time, group.time))
            group.time, group.blocked = max(group.time, time), None

    def _check_phases(self):
        """Hardware keeps the parity of the phases only, so whoever waits must surely see each before the next."""
        for place, barrier in self.barriers.items():
            for name, seen in barrier.seen.items():
                for phase, (_, known) in enumerate(barrier.phases[1 : seen + 1]):
                    if (barrier, phase, name) not in known:
                        raise OrderError(f"{_place(place)} may complete a phase before {name} has seen the one before")

    def _read(self, group, place):
        slot, event = self.slots[tuple(place)], next(self.events)
        if slot.fetch is None:
            raise OrderError(f"{group.name} reads {_place(place)}, into which nothing has been fetched")
        if slot.fetch not in group.known:
            raise OrderError(f"{group.name} reads {_place(place)} before tile {slot.tile} has surely arrived")
        slot.reads[event] = group.name
        group.tiles.append(slot.tile)
        return event

    def _occupy(self, unit, asked, cycles, who, label):
        start = max(asked, self.free_at[unit])
        self.free_at[unit] = start + cycles
        self.spans.append(Span(unit, f"{who}: {label}", start, start + cycles))
        return start, start + cycles

    def _span(self, group, what, start, stop):
        if stop > start:
            self.spans.append(Span(group.name, what, start, stop))


def _place(place):
    return f"{place[0]}[{place[1]}]"


# The rungs of `hopper.ladder` as programs of the model: only what takes time or orders things.


class Costs(NamedTuple):
    """Cycles of one compute warpgroup and one tile of keys (64 x 128, H = 64), and of copies.

    product: q k^T, and as long again p v, on the tensor core. softmax: its exponentials. These two
    follow from the rates of the GPU. copy: a tile through the copy engine, at 64 bytes a cycle;
    latency: from the request to the arrival, beyond that. These two are assumptions.
    """

    product: int = 256
    softmax: int = 528
    copy: int = 256
    latency: int = 600


def relay(steps, stages):
    """The two warpgroups of a ring, {"memory": generator, "compute": generator}: each tile read once, in order."""

    def memory():
        for j in range(steps):
            if j >= stages:
                yield Wait("free", j % stages)
            yield Fetch("tile", j % stages, j, "loaded")

    def compute():
        for j in range(steps):
            yield Wait("loaded", j % stages)
            yield Read("tile", j % stages)
            yield Work("arithmetic", 700, f"p{j}")
            yield Arrive("free", j % stages)

    return {"memory": memory(), "compute": compute()}


def rung(number, steps=6, warpgroups=None, stages=2):
    """The `Run` of one program of a rung over `steps` tiles of keys, without its beginning and end."""
    costs = Costs()
    warpgroups = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2}[number] if warpgroups is None else warpgroups
    names = [f"compute {index}" for index in range(warpgroups)]
    barriers = {"k_loaded": 1, "v_loaded": 1, "k_free": warpgroups, "v_free": warpgroups}
    barriers |= {f"turn {index}": 1 for index in range(warpgroups)}
    make = {1: _copying, 2: _fetching}.get(number, _computing if number < 6 else _overlapping)
    groups = {name: make(index, steps, stages, costs, ping_pong=number == 5) for index, name in enumerate(names)}
    if number >= 3:
        groups["memory"] = _memory(steps, stages, costs, late=number == 6)
    return simulate(groups, barriers, latency=costs.latency)


def _copying(me, steps, stages, costs, ping_pong):
    for j in range(steps):
        for name in "kv":
            yield Work("threads", costs.copy + costs.latency, f"copy {name}{j}")  # no copy engine here
        yield from _product(f"s{j}", (), costs)
        yield Work("exponentials", costs.softmax, f"p{j}")
        yield from _product(f"pv{j}", (), costs)


def _fetch(j, stages, costs):
    yield Fetch("k", j % stages, j, "k_loaded", costs.copy)
    yield Fetch("v", j % stages, j, "v_loaded", costs.copy)


def _fetching(me, steps, stages, costs, ping_pong):
    for j in range(min(stages, steps)):
        yield from _fetch(j, stages, costs)
    for j in range(steps):
        yield Wait("k_loaded", j % stages)
        yield from _product(f"s{j}", [Read("k", j % stages)], costs)
        yield Work("exponentials", costs.softmax, f"p{j}")
        yield Wait("v_loaded", j % stages)
        yield from _product(f"pv{j}", [Read("v", j % stages)], costs)
        if j + stages < steps:
            yield from _fetch(j + stages, stages, costs)


def _memory(steps, stages, costs, late):
    """Keys and values tile by tile, and with `late` values after the keys of the next tile: so they are asked for."""
    for step in range(steps + late):
        for name, j in (("k", step), ("v", step - late)):
            if j not in range(steps):
                continue
            if j >= stages:
                yield Wait(f"{name}_free", j % stages)
            yield Fetch(name, j % stages, j, f"{name}_loaded", costs.copy)


def _computing(me, steps, stages, costs, ping_pong):
    if ping_pong and me == 1:
        yield Arrive("turn 0")
    for j in range(steps):
        yield Wait("k_loaded", j % stages)
        if ping_pong:
            yield Wait(f"turn {me}")
        yield from _product(f"s{j}", [Read("k", j % stages)], costs)
        if ping_pong:
            yield Arrive(f"turn {1 - me}")
        yield Arrive("k_free", j % stages)
        yield Work("exponentials", costs.softmax, f"p{j}")
        yield Wait("v_loaded", j % stages)
        yield from _product(f"pv{j}", [Read("v", j % stages)], costs)
        yield Arrive("v_free", j % stages)


def _overlapping(me, steps, stages, costs, ping_pong):
    yield Wait("k_loaded", 0)
    yield from _product("s0", [Read("k", 0)], costs)
    yield Arrive("k_free", 0)
    yield Work("exponentials", costs.softmax, "p0")
    for j in range(1, steps):
        new, old = j % stages, (j - 1) % stages
        yield Wait("k_loaded", new)
        yield Wait("v_loaded", old)
        yield Issue("tensor", costs.product, f"s{j}", [Read("k", new)])
        yield Issue("tensor", costs.product, f"pv{j - 1}", [Read("v", old)])
        yield Drain(1)
        yield Arrive("k_free", new)
        yield Work("exponentials", costs.softmax, f"p{j}")
        yield Drain(0)
        yield Arrive("v_free", old)
    yield Wait("v_loaded", (steps - 1) % stages)
    yield from _product(f"pv{steps - 1}", [Read("v", (steps - 1) % stages)], costs)
    yield Arrive("v_free", (steps - 1) % stages)


def _product(label, reads, costs):
    yield Issue("tensor", costs.product, label, tuple(reads))
    yield Drain(0)
