"""The tables of the tuner: which tiles were the fastest on the card that a kernel will run on."""

import functools

from helpers.attention.device import default_device
from helpers.measure import results


def this_card():
    """The name of the GPU that computes, None where there is none."""
    device = default_device()
    return device.device_kind if device.platform == "gpu" else None


@functools.cache
def rows_by(card, part, *fields):
    """{values of these fields: row} for a part of a card's table (see `results`), empty where it was not tuned."""
    try:
        rows = results.read_tiles(card).get(part, ()) if card else ()
    except FileNotFoundError:
        rows = ()
    return {tuple(row[field] for field in fields): row for row in rows}
