"""The tables of the tuner: which tiles were the fastest on the card that a kernel will run on."""

import functools

from helpers.attention.device import default_device
from helpers.measure import results

# An H100 of this form has the SMs of an H200, and another memory.
SAME_SMS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}


def this_card():
    """The name of the GPU that computes, or of a tuned one with the same SMs; None where there is none."""
    device = default_device()
    return SAME_SMS.get(device.device_kind, device.device_kind) if device.platform == "gpu" else None


@functools.cache
def rows_by(card, part, *fields):
    """{values of these fields: row} for a part of a card's table (see `results`), empty where it was not tuned."""
    try:
        rows = results.read_tiles(card).get(part, ()) if card else ()
    except FileNotFoundError:
        rows = ()
    return {tuple(row[field] for field in fields): row for row in rows}
