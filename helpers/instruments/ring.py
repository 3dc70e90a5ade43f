"""What ring attention costs each device, by formula: pairs, operations, bytes sent, memory; and who waits for whom.

The letters are those of `Problem`, of the whole sequence; D devices have T / D queries and S / D keys each. What a
device does in a step is read off `ring.plan`, the plan that the program itself follows.
"""

from typing import NamedTuple

import numpy as np

from helpers.attention.public.ring import plan

STATISTIC_BYTES = SUM_BYTES = 4  # of lse and delta, and of sums of results and gradients: float32


def pairs(layout, devices, T, *, is_causal):
    """(steps, devices) integers: how many pairs of a query and a key each device computes in each step.

    T: a multiple of what the layout wants; there are as many keys.
    """
    share = T // devices
    steps = plan(layout, devices, share, share, is_causal=is_causal)
    return np.array([[_pairs(piece, share) for piece in step] for step in steps])


def _pairs(piece, queries):
    if piece is None:
        return 0
    rows = queries - piece.first_query
    if not piece.is_causal:
        return rows * piece.keys
    diagonal = min(rows, piece.keys)
    return diagonal * (diagonal + 1) // 2 + (rows - diagonal) * piece.keys


def flops(pairs, problem):
    """Operations of so many pairs of every head, forward: 2 H for each of two products. Softmax is left out."""
    return 4 * problem.H * problem.N * problem.B * pairs


def shard_bytes(problem, devices, itemsize=None):
    """Bytes of one device's share of key and value, or of arrays of that shape with another itemsize."""
    itemsize = problem.dtype.itemsize if itemsize is None else itemsize
    return 2 * itemsize * problem.B * (problem.S // devices) * problem.K * problem.H


def sent_bytes(problem, devices, which="forward"):
    """Bytes that each device sends in a whole pass: keys and values, and in the backward pass dk and dv in float32."""
    hop = shard_bytes(problem, devices)
    if which == "backward":
        hop += shard_bytes(problem, devices, SUM_BYTES)
    return (devices - 1) * hop


def footprint(problem, devices):
    """{what: bytes} that a device has in memory at once, at most; the same for any D with shares as long.

    Of a program that has the forward and the backward pass, returns out and the three gradients, and is at work in the
    second.
    """
    share, e = lambda length: problem.B * length // devices * problem.H, problem.dtype.itemsize
    query, keys = problem.N * share(problem.T), 2 * problem.K * share(problem.S)
    rows = STATISTIC_BYTES * problem.B * problem.N * (problem.T // devices)
    return {
        "query, key, value, dout": e * (2 * query + keys),
        "out, dq, dk, dv": e * (2 * query + keys),
        "keys and values that are here and those that come": 2 * e * keys,
        "dk and dv that are sent and those that come": 2 * SUM_BYTES * keys,
        "dk and dv of a part": e * keys,
        "sum of dq": SUM_BYTES * query,
        "dq of a part, in float32 and rounded": (SUM_BYTES + e) * query,
        "lse, and lse and delta for the kernels": 3 * rows,
    } | ({"the low bits of out": e * query, "keys without their common part": e * keys // 2} if e == 2 else {})


class Span(NamedTuple):
    """When a device works on its part of a step, and when the keys of the next step are on their way to it."""

    device: int
    step: int
    start: float
    stop: float
    sent: float  # from here
    arrived: float  # to here; both are NaN in the last step


def schedule(seconds, hop):
    """The `Span` of each device and step of a forward pass.

    seconds: (steps, devices) for the work. hop: seconds for keys and values to the next device. A transfer begins
    when both of its devices have begun the step, and a step when the device is done with the last and has its keys.
    """
    steps, devices = seconds.shape
    start, spans = np.zeros(devices), []
    for step in range(steps):
        stop = start + seconds[step]
        sent = np.maximum(start, np.roll(start, 1)) if step + 1 < steps else np.full(devices, np.nan)
        arrived = sent + hop
        spans += [Span(i, step, start[i], stop[i], sent[i], arrived[i]) for i in range(devices)]
        start = np.fmax(stop, arrived)
    return spans


def predicted_efficiency(seconds, hop):
    """An even share of all the work, in seconds, divided by when the last device is done."""
    return seconds.sum() / seconds.shape[1] / max(span.stop for span in schedule(seconds, hop))
