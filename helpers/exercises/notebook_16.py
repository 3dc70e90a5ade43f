"""The exercises of notebook 16: a launch grid, pointers and masks of a tile, tiles without a mask, for both walks."""

import numpy as np

from helpers.exercises.exercise import Exercise


def programs(B, T, S, N, K, block_q, block_k):
    """(programs of the forward kernel, programs of dkv)."""
    forward = -(-T // block_q) * N * B
    dkv = -(-S // block_k) * K * B
    return forward, dkv


GRIDS = Exercise(programs, "Two grids", outputs=("forward", "dkv")).with_cases(
    "B T S N K block_q block_k", (1, 4, 8, 1, 1, 4, 4), (2, 100, 130, 8, 2, 64, 32), (3, 128, 64, 6, 3, 32, 64),
    (4, 1, 4096, 16, 1, 16, 128), (1, 65, 63, 2, 2, 16, 64),
).with_mistakes(
    ("dkv has a program for each query head", "K * B", "N * B",
     "dk and dv belong to a key head, and one program adds up its whole group: see section 5."),
)  # fmt: skip


def pointers(rows, b, n, T, N, H, head_padded):
    """(offsets, mask), both (len(rows), head_padded)."""
    columns = np.arange(head_padded)
    start = b * T * N * H + n * H
    offsets = start + rows[:, None] * (N * H) + columns
    mask = (rows < T)[:, None] & (columns < H)
    return offsets, mask


POINTERS = Exercise(pointers, "Pointers of a tile", outputs=("offsets", "mask")).with_cases(
    "rows b n T N H head_padded", (np.arange(2), 0, 1, 5, 3, 2, 4), (np.arange(4, 8), 1, 2, 7, 3, 5, 8),
    (np.arange(8, 16), 2, 0, 13, 2, 24, 32), (np.arange(16, 32), 1, 3, 32, 4, 16, 16),
    (np.array([3, 9, 0, 6]), 1, 2, 7, 3, 3, 4),
).with_mistakes(
    ("the heads lie one behind the other, each with all its positions",
     ("n * H", "rows[:, None] * (N * H)"), ("n * T * H", "rows[:, None] * H"),
     "The axes are (B, T, N, H), so heads of one position are neighbours: see section 3."),
    ("the heads of the array are taken to be padded", "* H", "* head_padded",
     "It is the tile that is padded: in the array a head has H elements, see section 3."),
    ("the padding of a head counts as inside", " & (columns < H)", " & (columns < head_padded)",
     "Columns from H on belong to the next head: they are masked, see section 3."),
)  # fmt: skip


def key_ranges(q_start, block_q, block_k, S, is_causal):
    """(full, stop): where the masked tiles begin, and where the skipped ones do."""
    full, stop = S // block_k, -(-S // block_k)
    if is_causal:
        full = min(full, (q_start + 1) // block_k)
        stop = min(stop, -(-(q_start + block_q) // block_k))
    return full, stop


KEY_RANGES = Exercise(key_ranges, "Tiles without a mask", outputs=("full", "stop")).with_cases(
    "q_start block_q block_k S is_causal", (4, 4, 2, 12, True), (0, 16, 16, 64, False), (0, 16, 16, 60, False),
    (32, 16, 16, 100, True), (63, 64, 32, 200, True), (32, 32, 64, 200, True), (96, 32, 64, 90, True),
    (15, 1, 16, 100, True), (16, 1, 16, 100, True), (64, 64, 16, 100, True), (128, 64, 16, 97, True),
    (128, 128, 64, 1000, False),
).with_mistakes(
    ("a tile counts as full if its last query sees all of it", "(q_start + 1) //", "(q_start + block_q) //",
     "The first query sees least: it decides, see section 4."),
    ("the end of the keys is forgotten under a causal mask", ("min(stop, -", "k))\n"), ("-", "k)\n"),
     "There are only S keys, whatever a query could see: they limit both numbers, see section 4."),
)  # fmt: skip


def query_tiles(k_start, block_q, block_k, T, is_causal):
    """(masked, free): tiles of queries with a mask, and without."""
    masked = free = 0
    for first in range(0, T, block_q):
        last = first + block_q - 1
        if is_causal and last < k_start:
            continue
        sees_all = not is_causal or first >= k_start + block_k - 1
        if sees_all and last < T:
            free += 1
        else:
            masked += 1
    return masked, free


QUERY_COUNTS = Exercise(query_tiles, "The other walk", outputs=("masked", "free")).with_cases(
    "k_start block_q block_k T is_causal", (2, 2, 2, 8, True), (0, 16, 16, 64, False), (0, 16, 16, 70, False),
    (32, 16, 32, 150, True), (64, 64, 16, 200, True), (64, 16, 64, 256, True), (48, 32, 16, 33, True),
    (96, 32, 32, 90, True), (32, 16, 1, 100, True), (31, 16, 1, 100, True), (0, 16, 16, 63, False),
    (64, 16, 16, 128, False), (0, 1, 4, 3, True), (80, 16, 16, 64, False), (128, 16, 16, 40, True),
).with_mistakes(
    ("a tile counts as free if its first query sees the first key", " + block_k - 1", "",
     "The last key of the tile is seen by the fewest queries: it decides, see section 5."),
    ("the last query of a tile decides whether it is free", "first >=", "last >=",
     "The first query sees least: it decides, see section 5."),
    ("positions over the end are taken to see nothing", "last < k_start", "min(last, T - 1) < k_start",
     "Positions count as they stand, inside the array or not: see the task."),
)  # fmt: skip

EXERCISES = (GRIDS, POINTERS, KEY_RANGES, QUERY_COUNTS)
