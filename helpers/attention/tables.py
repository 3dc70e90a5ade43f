"""The table of a GPU: which tiles of the Hopper kernels were the fastest of those that were tried on it."""

import functools
import json
import re
from pathlib import Path

from helpers.attention.device import default_device

TUNED = Path(__file__).parent / "tuned"  # <GPU>.json, described in `instruments.results`
# An H100 of this form has the SMs of an H200, and another memory.
SAME_SMS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}


def this_gpu():
    """The name of the GPU that computes, or of one with the same SMs and a table; None where there is none."""
    device = default_device()
    return SAME_SMS.get(device.device_kind, device.device_kind) if device.platform == "gpu" else None


def path_of(gpu):
    """Where the table of a GPU is, or would be."""
    return TUNED / f"{slug(gpu)}.json"


def slug(gpu):
    """The name of a GPU as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


@functools.cache
def rows_by(gpu, part, *fields):
    """{values of these fields: row} for a part of a GPU's table, empty where it has none."""
    path = path_of(gpu or "none")
    rows = json.loads(path.read_text()).get(part, ()) if path.exists() else ()
    return {tuple(row[field] for field in fields): row for row in rows}
