"""The exercises of notebook 16: a launch grid, pointers and masks of a tile, tiles without a mask, for both walks."""

import functools

import numpy as np

from helpers.exercises.checking import Case, Exercise, Mistake

# 16.1 Two grids


def _grids(
    B, T, S, N, K, block_q, block_k, *, up=True, of=("T", "block_q", "S", "block_k"), heads=("N", "K"), batch=True
):
    given = {"T": T, "S": S, "N": N, "K": K, "block_q": block_q, "block_k": block_k}
    tiles = lambda length, block: -(-given[length] // given[block]) if up else given[length] // given[block]
    B = B if batch else 1
    return tiles(*of[:2]) * given[heads[0]] * B, tiles(*of[2:]) * given[heads[1]] * B


def _grids_cases():
    sizes = [
        (1, 4, 8, 1, 1, 4, 4),
        (2, 100, 130, 8, 2, 64, 32),
        (3, 128, 64, 6, 3, 32, 64),
        (4, 1, 4096, 16, 1, 16, 128),
        (1, 65, 63, 2, 2, 16, 64),
    ]
    names = ("B", "T", "S", "N", "K", "block_q", "block_k")
    return [Case(", ".join(f"{name}={size}" for name, size in zip(names, one, strict=True)), one) for one in sizes]


GRIDS = Exercise(
    number="16.1",
    title="Two grids",
    outputs=("forward", "dkv"),
    cases=_grids_cases,
    expected=_grids,
    tried="ragged lengths, grouped heads, tiles of two sizes",
    mistakes=(
        Mistake(
            "the last tile is left out where it is not whole",
            functools.partial(_grids, up=False),
            "Round up: a ragged end needs a program too, see section 2.",
        ),
        Mistake(
            "dkv has a program for each query head",
            functools.partial(_grids, heads=("N", "N")),
            "dk and dv belong to a key head, and one program must add up its whole group: see section 5.",
        ),
        Mistake(
            "both kernels go by tiles of queries",
            functools.partial(_grids, of=("T", "block_q", "T", "block_q")),
            "dkv owns a tile of keys: see section 5.",
        ),
        Mistake(
            "the block sizes are swapped",
            functools.partial(_grids, of=("T", "block_k", "S", "block_q")),
            "Queries are cut by block_q, keys by block_k: see section 2.",
        ),
        Mistake(
            "the batch is forgotten",
            functools.partial(_grids, batch=False),
            "The grid has a third axis, the batch: see section 2.",
        ),
    ),
)

# 16.2 Pointers of a tile


def _pointers(
    rows, b, n, T, N, H, head_padded, *, step=None, head=None, batch=True, row=np.less, columns=True, either=False
):
    in_row = np.arange(head_padded)
    start = (b * T * N * H if batch else 0) + n * (H if head is None else head(T, H))
    offsets = start + rows[:, None] * (N * H if step is None else step(N, H)) + in_row
    rows_inside = row(rows, T)[:, None]
    columns_inside = (in_row < H)[None] if columns else np.ones((1, head_padded), bool)
    mask = rows_inside | columns_inside if either else rows_inside & columns_inside
    return offsets, mask


def _pointers_cases():
    sizes = [
        (0, 2, 0, 1, 5, 3, 2, 4),
        (4, 4, 1, 2, 7, 3, 5, 8),
        (8, 8, 2, 0, 13, 2, 24, 32),
        (16, 16, 1, 3, 32, 4, 16, 16),
    ]
    return [
        Case(
            f"rows {start} to {start + rows - 1}, b={b}, n={n}, T={T}, N={N}, H={H}, head_padded={padded}",
            (np.arange(start, start + rows), b, n, T, N, H, padded),
        )
        for start, rows, b, n, T, N, H, padded in sizes
    ]


POINTERS = Exercise(
    number="16.2",
    title="Pointers of a tile",
    outputs=("offsets", "mask"),
    cases=_pointers_cases,
    expected=_pointers,
    tried="whole and ragged tiles, heads of a power of two and others, several heads and batch entries",
    mistakes=(
        Mistake(
            "the next row is H elements away",
            functools.partial(_pointers, step=lambda N, H: H),
            "Between two positions of one head lie all N heads: N * H elements, see section 3.",
        ),
        Mistake(
            "the heads lie one behind the other, each with all its positions",
            functools.partial(_pointers, step=lambda N, H: H, head=lambda T, H: T * H),
            "The axes are (B, T, N, H), so heads of one position are neighbours: see section 3.",
        ),
        Mistake(
            "the batch entry is left out",
            functools.partial(_pointers, batch=False),
            "Entry b begins after b * T * N * H elements: see section 3.",
        ),
        Mistake(
            "rows are not those of the padded head",
            functools.partial(_pointers, columns=False),
            "Columns from H on belong to the next head: they are masked, see section 3.",
        ),
        Mistake(
            "position T is taken for one of the array",
            functools.partial(_pointers, row=np.less_equal),
            "Positions are 0 to T - 1: see section 3.",
        ),
        Mistake(
            "an element counts as inside if its row or its column is",
            functools.partial(_pointers, either=True),
            "Both must be inside: see section 3.",
        ),
    ),
)

# 16.3 Tiles without a mask


def _key_ranges(
    q_start,
    block_q,
    block_k,
    S,
    is_causal,
    *,
    reach=lambda q_start, block_q: q_start + 1,
    last=None,
    tail=False,
    cut=True,
):
    round_up = lambda length: -(-length // block_k)
    full, stop = (round_up(S) if tail else S // block_k), round_up(S)
    if is_causal:
        full = min(full, reach(q_start, block_q) // block_k)
        seen = round_up(q_start + block_q if last is None else last(q_start, block_q))
        stop = min(stop, seen) if cut else seen
    return full, stop


def _key_ranges_cases():
    sizes = [
        (4, 4, 2, 12, True),
        (0, 16, 16, 64, False),
        (0, 16, 16, 60, False),
        (32, 16, 16, 100, True),
        (63, 64, 32, 200, True),
        (96, 32, 64, 90, True),
        (15, 1, 16, 100, True),
        (16, 1, 16, 100, True),
        (64, 64, 16, 100, True),
        (128, 128, 64, 1000, False),
    ]
    names = ("q_start", "block_q", "block_k", "S", "is_causal")
    return [Case(", ".join(f"{name}={size}" for name, size in zip(names, one, strict=True)), one) for one in sizes]


KEY_RANGES = Exercise(
    number="16.3",
    title="Tiles without a mask",
    outputs=("full", "stop"),
    cases=_key_ranges_cases,
    expected=_key_ranges,
    tried="full and causal masks, ragged lengths, tiles on and off the diagonal",
    mistakes=(
        Mistake(
            "a tile counts as full if its last query sees all of it",
            functools.partial(_key_ranges, reach=lambda q_start, block_q: q_start + block_q),
            "The first query sees least: it decides, see section 4.",
        ),
        Mistake(
            "the first query is not taken to see its own key",
            functools.partial(_key_ranges, reach=lambda q_start, block_q: q_start),
            "Query i sees keys 0 to i, which are i + 1: see section 4.",
        ),
        Mistake(
            "tiles after the first query are skipped",
            functools.partial(_key_ranges, last=lambda q_start, block_q: q_start + 1),
            "The last query of the tile sees most, and decides where to stop: see section 4.",
        ),
        Mistake(
            "the last query of the tile is left out",
            functools.partial(_key_ranges, last=lambda q_start, block_q: q_start + block_q - 1),
            "The last query is q_start + block_q - 1, and it sees its own key: see section 4.",
        ),
        Mistake(
            "the ragged tile at the end counts as full",
            functools.partial(_key_ranges, tail=True),
            "Over the end of the array lie no keys: that tile is masked, see section 4.",
        ),
        Mistake(
            "the end of the keys is forgotten under a causal mask",
            functools.partial(_key_ranges, cut=False),
            "There are only S keys, whatever the last query could see: see section 4.",
        ),
    ),
)

# 16.4 The other walk


def _query_counts(
    k_start,
    block_q,
    block_k,
    T,
    is_causal,
    *,
    last=lambda k_start, block_k: k_start + block_k - 1,
    tail=False,
    skip=True,
    swap=False,
):
    stop = -(-T // block_q)
    masked = free = 0
    for i in range(stop):
        rows = range(i * block_q, (i + 1) * block_q)
        if is_causal and skip and rows[-1] < k_start:
            continue
        inside = tail or rows[-1] < T
        if inside and (not is_causal or rows[0] >= last(k_start, block_k)):
            free += 1
        else:
            masked += 1
    return (free, masked) if swap else (masked, free)


def _query_counts_cases():
    sizes = [
        (2, 2, 2, 8, True),
        (0, 16, 16, 64, False),
        (0, 16, 16, 70, False),
        (32, 16, 32, 150, True),
        (64, 64, 16, 200, True),
        (64, 16, 64, 256, True),
        (48, 32, 16, 33, True),
        (96, 32, 32, 90, True),
        (32, 16, 1, 100, True),
        (31, 16, 1, 100, True),
        (0, 16, 16, 63, False),
        (64, 16, 16, 128, False),
    ]
    names = ("k_start", "block_q", "block_k", "T", "is_causal")
    return [Case(", ".join(f"{name}={size}" for name, size in zip(names, one, strict=True)), one) for one in sizes]


QUERY_COUNTS = Exercise(
    number="16.4",
    title="The other walk",
    outputs=("masked", "free"),
    cases=_query_counts_cases,
    expected=_query_counts,
    tried="full and causal masks, ragged lengths, keys behind the last query",
    mistakes=(
        Mistake(
            "a tile counts as free if its first query sees the first key",
            functools.partial(_query_counts, last=lambda k_start, block_k: k_start),
            "The last key of the tile is seen by the fewest queries: it decides, see section 5.",
        ),
        Mistake(
            "the last key is not taken to be seen by its own query",
            functools.partial(_query_counts, last=lambda k_start, block_k: k_start + block_k),
            "The last key is k_start + block_k - 1, and the query there sees it: see section 5.",
        ),
        Mistake(
            "the ragged tile at the end counts as free",
            functools.partial(_query_counts, tail=True),
            "Over the end of the array lie no queries: its loads are masked, see section 5.",
        ),
        Mistake(
            "no tile is skipped",
            functools.partial(_query_counts, skip=False),
            "Queries before k_start see none of these keys: see section 5.",
        ),
        Mistake(
            "the two counts are swapped",
            functools.partial(_query_counts, swap=True),
            "Return those with a mask first.",
        ),
    ),
)

EXERCISES = (GRIDS, POINTERS, KEY_RANGES, QUERY_COUNTS)
