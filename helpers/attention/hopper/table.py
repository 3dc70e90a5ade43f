"""Which tiles of the Hopper kernels were the fastest of those tried on this GPU, and for which calls."""

from helpers.attention import tables
from helpers.attention.hopper.warpgroup import padded_head_dim

# {longest sequence of a row of the table, None for any: length at which tiles were tried}
LENGTHS = {2048: 1024, 8192: 4096, None: 16384}


def up_to(length):
    """The `up_to` of the row for a sequence."""
    return next((longest for longest in LENGTHS if longest is not None and length <= longest), None)


def tuned_tiles(which, problem, length):
    """{kernel: fields of its tiles} for a pass ("forward", "backward" or "deterministic backward"), or None.

    From the table of this GPU, for a problem whose programs run over a sequence of this length.
    """
    table = tables.rows_by(tables.this_gpu(), "hopper", "pass", "head_padded", "is_causal", "up_to")
    row = table.get((which, padded_head_dim(problem.H), problem.band.right == 0, up_to(length)))
    return row and row["tiles"]
