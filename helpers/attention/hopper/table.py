"""The table of a GPU: which tiles of the Hopper kernels were the fastest of those that were tried on it."""

import functools
import json
import re
from pathlib import Path

from helpers.attention.device import default_device
from helpers.attention.hopper.warpgroup import padded_head_dim

TUNED = Path(__file__).parents[1] / "tuned"  # <GPU>.json, described in `instruments.results`
# An H100 of this form has the SMs of an H200, and another memory.
SAME_SMS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}
# {longest sequence of a row of the table, None for any: length at which tiles were tried}
LENGTHS = {2048: 1024, 8192: 4096, None: 16384}


def this_gpu():
    """The name of the GPU that computes, or of one with the same SMs and a table; None where there is none."""
    device = default_device()
    return SAME_SMS.get(device.device_kind, device.device_kind) if device.platform == "gpu" else None


def slug(gpu):
    """The name of a GPU as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


@functools.cache
def rows_of(gpu):
    """{(pass, head_padded, is_causal, up_to): row} of the table of a GPU, empty where it has none."""
    path = TUNED / f"{slug(gpu or 'none')}.json"
    rows = json.loads(path.read_text()).get("hopper", ()) if path.exists() else ()
    return {(row["pass"], row["head_padded"], row["is_causal"], row["up_to"]): row for row in rows}


def up_to(length):
    """The `up_to` of the row for a sequence."""
    return next((longest for longest in LENGTHS if longest is not None and length <= longest), None)


def tuned_tiles(which, problem, length):
    """{kernel: fields of its tiles} for a pass ("forward", "backward" or "deterministic backward"), or None.

    From the table of this GPU, for a problem whose programs run over a sequence of this length.
    """
    place = which, padded_head_dim(problem.H), problem.band.right == 0, up_to(length)
    row = rows_of(this_gpu()).get(place)
    return row and row["tiles"]
