"""The exercises of notebook 16: a launch grid, pointers and masks of a tile, tiles without a mask, for both walks."""

import functools

import numpy as np

from helpers.exercises.checking import Case, Exercise, Mistake


def _down(length, block):
    return length // block


def _up(length, block):
    return -(-length // block)


def _one_more(length, block):
    return length // block + 1


def _cases(names, sizes):
    """A case for each row of numbers, labelled by their names."""
    return [Case(", ".join(f"{name}={size}" for name, size in zip(names, row, strict=True)), row) for row in sizes]


# 16.1 Two grids


def _grids(
    B, T, S, N, K, block_q, block_k, *, cut=_up, of=("T", "block_q", "S", "block_k"), heads=("N", "K"), batch=True
):
    given = {"T": T, "S": S, "N": N, "K": K, "block_q": block_q, "block_k": block_k}
    tiles = lambda length, block: cut(given[length], given[block])
    B = B if batch else 1
    return tiles(*of[:2]) * given[heads[0]] * B, tiles(*of[2:]) * given[heads[1]] * B


def _cut_by(*several):
    return tuple(functools.partial(_grids, cut=cut) for cut in several)


def _tiles_of(*several):
    return tuple(functools.partial(_grids, of=of) for of in several)


def _pairs_of_tiles(B, T, S, N, K, block_q, block_k):
    pairs = _up(T, block_q) * _up(S, block_k)
    return pairs * N * B, pairs * K * B


def _grids_cases():
    names = ("B", "T", "S", "N", "K", "block_q", "block_k")
    sizes = [
        (1, 4, 8, 1, 1, 4, 4),
        (2, 100, 130, 8, 2, 64, 32),
        (3, 128, 64, 6, 3, 32, 64),
        (4, 1, 4096, 16, 1, 16, 128),
        (1, 65, 63, 2, 2, 16, 64),
    ]
    return _cases(names, sizes)


GRIDS = Exercise(
    number="16.1",
    title="Two grids",
    outputs=("forward", "dkv"),
    cases=_grids_cases,
    expected=_grids,
    tried="ragged lengths, grouped heads, tiles of two sizes",
    mistakes=(
        Mistake(
            "a ragged tile does not count as a whole one",
            *_cut_by(_down),
            "Round up: a ragged end needs a program too, see section 2.",
            variants=_cut_by(
                lambda length, block: length / block,
                lambda length, block: round(length / block),
                lambda length, block: max(length // block, 1),
            ),
        ),
        Mistake(
            "a tile is added even where the last one is whole",
            *_cut_by(_one_more),
            "Add one only where something is left over: -(-T // block_q) does.",
        ),
        Mistake(
            "dkv has a program for each query head",
            functools.partial(_grids, heads=("N", "N")),
            "dk and dv belong to a key head, and one program adds up its whole group: see section 5.",
        ),
        Mistake(
            "the forward kernel has a program for each key head",
            functools.partial(_grids, heads=("K", "K")),
            "Each query head has programs of its own, and those of a group read the same keys: see section 2.",
            variants=(functools.partial(_grids, heads=("K", "N")),),
        ),
        Mistake(
            "both kernels go by tiles of queries",
            *_tiles_of(("T", "block_q", "T", "block_q")),
            "dkv owns a tile of keys: see section 5.",
        ),
        Mistake(
            "a length is cut by the block size of the other",
            *_tiles_of(("T", "block_k", "S", "block_q")),
            "Queries are cut by block_q, keys by block_k: see section 2.",
            variants=_tiles_of(("T", "block_q", "S", "block_q"), ("T", "block_k", "S", "block_k")),
        ),
        Mistake(
            "the lengths are mixed up",
            *_tiles_of(("S", "block_q", "T", "block_k")),
            "The forward kernel cuts the T queries, dkv the S keys: see the task.",
            variants=_tiles_of(("T", "block_q", "T", "block_k"), ("S", "block_q", "S", "block_k")),
        ),
        Mistake(
            "there is a program for each pair of tiles",
            _pairs_of_tiles,
            "A program walks over the tiles of the other length in a loop: see sections 4 and 5.",
        ),
        Mistake(
            "the batch is forgotten",
            functools.partial(_grids, batch=False),
            "The grid has a third axis, the batch: see section 2.",
        ),
    ),
)

# 16.2 Pointers of a tile


def _steps(T, N, H, padded):
    """Elements from one batch entry, position, head and column to the next."""
    return T * N * H, N * H, H, 1


def _both_inside(row, column, T, H):
    return (row < T) & (column < H)


def _pointers(rows, b, n, T, N, H, head_padded, *, steps=_steps, inside=_both_inside, masked=None):
    """masked: what stands in place of the offsets of masked elements."""
    row, column = rows[:, None], np.arange(head_padded)
    entry, position, head, neighbour = steps(T, N, H, head_padded)
    offsets = b * entry + row * position + n * head + column * neighbour
    mask = np.broadcast_to(inside(row, column, T, H), offsets.shape)
    return offsets if masked is None else np.where(mask, offsets, masked), mask


def _with_steps(*several):
    return tuple(functools.partial(_pointers, steps=steps) for steps in several)


def _with_inside(*several):
    return tuple(functools.partial(_pointers, inside=inside) for inside in several)


def _pointers_cases():
    sizes = [
        (0, 2, 0, 1, 5, 3, 2, 4),
        (4, 4, 1, 2, 7, 3, 5, 8),
        (8, 8, 2, 0, 13, 2, 24, 32),
        (16, 16, 1, 3, 32, 4, 16, 16),
    ]
    cases = [
        Case(
            f"rows {start} to {start + rows - 1}, b={b}, n={n}, T={T}, N={N}, H={H}, head_padded={padded}",
            (np.arange(start, start + rows), b, n, T, N, H, padded),
        )
        for start, rows, b, n, T, N, H, padded in sizes
    ]
    label = "rows 3, 9, 0 and 6, b=1, n=2, T=7, N=3, H=3, head_padded=4"
    return [*cases, Case(label, (np.array([3, 9, 0, 6]), 1, 2, 7, 3, 3, 4))]


def _numbered_on(offsets_too=True, mask_too=True):
    """As if rows were the first one and those that follow it, in the offsets, in the mask or in both."""

    def answer(rows, *sizes):
        in_order = rows[0] + np.arange(len(rows))
        offsets, mask = _pointers(rows, *sizes), _pointers(in_order, *sizes)
        return (mask if offsets_too else offsets)[0], (mask if mask_too else offsets)[1]

    return answer


POINTERS = Exercise(
    number="16.2",
    title="Pointers of a tile",
    outputs=("offsets", "mask"),
    cases=_pointers_cases,
    expected=_pointers,
    tried="whole and ragged tiles, rows in any order, heads of a power of two and others, several heads and entries",
    mistakes=(
        Mistake(
            "the next row is H elements away",
            *_with_steps(lambda T, N, H, padded: (T * N * H, H, H, 1)),
            "Between two positions of one head lie all N heads: N * H elements, see section 3.",
            variants=_with_steps(lambda T, N, H, padded: (T * N * H, N, H, 1)),
        ),
        Mistake(
            "the heads lie one behind the other, each with all its positions",
            *_with_steps(lambda T, N, H, padded: (T * N * H, H, T * H, 1)),
            "The axes are (B, T, N, H), so heads of one position are neighbours: see section 3.",
        ),
        Mistake(
            "the batch entry is left out",
            *_with_steps(lambda T, N, H, padded: (0, N * H, H, 1)),
            "Entry b begins after b * T * N * H elements: see section 3.",
        ),
        Mistake(
            "a batch entry is taken to be shorter than it is",
            *_with_steps(lambda T, N, H, padded: (N * H, N * H, H, 1)),
            "Entry b begins after b * T * N * H elements: see section 3.",
            variants=_with_steps(
                lambda T, N, H, padded: (T * H, N * H, H, 1),
                lambda T, N, H, padded: (T, N * H, H, 1),
            ),
        ),
        Mistake(
            "head n does not begin n * H elements after head 0",
            *_with_steps(lambda T, N, H, padded: (T * N * H, N * H, 0, 1)),
            "A head has H elements, and the heads of a position are neighbours: see section 3.",
            variants=_with_steps(
                lambda T, N, H, padded: (0, N * H, 0, 1),
                lambda T, N, H, padded: (T * N * H, N * H, 1, 1),
                lambda T, N, H, padded: (T * N * H, N * H, N, 1),
            ),
        ),
        Mistake(
            "rows are numbered on from the first, whatever the others are",
            _numbered_on(),
            "rows may hold any positions in any order: take each of them, rows[:, None], see the task.",
            variants=(_numbered_on(mask_too=False), _numbered_on(offsets_too=False)),
        ),
        Mistake(
            "the heads of the array are taken to be padded",
            *_with_steps(lambda T, N, H, padded: (T * N * padded, N * padded, padded, 1)),
            "It is the tile that is padded: in the array a head has H elements, see section 3.",
            variants=_with_steps(lambda T, N, H, padded: (T * N * H, N * padded, H, 1)),
        ),
        Mistake(
            "the elements of a head are taken to lie N apart",
            *_with_steps(lambda T, N, H, padded: (T * N * H, N * H, 1, N)),
            "H is the last axis, so the elements of a head are neighbours: see section 3.",
        ),
        Mistake(
            "masked elements get other offsets",
            functools.partial(_pointers, masked=0),
            "Compute theirs like the others: the mask alone keeps them from being read.",
            variants=(functools.partial(_pointers, masked=-1),),
        ),
        Mistake(
            "the padding of a head counts as inside",
            *_with_inside(lambda row, column, T, H: row < T),
            "Columns from H on belong to the next head: they are masked, see section 3.",
        ),
        Mistake(
            "rows over the end count as inside",
            *_with_inside(lambda row, column, T, H: column < H),
            "Positions are 0 to T - 1, and what comes after them is masked: see section 3.",
        ),
        Mistake(
            "position T or column H counts as inside",
            *_with_inside(lambda row, column, T, H: (row <= T) & (column < H)),
            "Positions are 0 to T - 1, columns 0 to H - 1: see section 3.",
            variants=_with_inside(
                lambda row, column, T, H: (row < T) & (column <= H),
                lambda row, column, T, H: (row <= T) & (column <= H),
            ),
        ),
        Mistake(
            "an element counts as inside if its row or its column is",
            *_with_inside(lambda row, column, T, H: (row < T) | (column < H)),
            "Both must be inside: see section 3.",
        ),
        Mistake(
            "the mask is True for what is masked",
            *_with_inside(lambda row, column, T, H: (row >= T) | (column >= H)),
            "True says that the element is read: see section 3.",
        ),
    ),
)

# 16.3 Tiles without a mask


def _seen_by_all(q_start, block_q):
    return q_start + 1


def _seen_by_some(q_start, block_q):
    return q_start + block_q


def _key_ranges(
    q_start, block_q, block_k, S, is_causal,
    *, by_all=_seen_by_all, by_some=_seen_by_some, touched=_up, whole=(_down, _down), cut=(True, True),
):  # fmt: skip
    """whole: how the keys, and those that all queries see, make full tiles. cut: whether S limits full, and stop."""
    full, stop = whole[0](S, block_k), _up(S, block_k)
    if is_causal:
        seen = whole[1](by_all(q_start, block_q), block_k), touched(by_some(q_start, block_q), block_k)
        full, stop = (min(pair) if cut else pair[1] for *pair, cut in zip((full, stop), seen, cut, strict=True))
    return full, stop


def _nothing_skipped(q_start, block_q, block_k, S, is_causal):
    return _key_ranges(q_start, block_q, block_k, S, is_causal)[0], _up(S, block_k)


def _full_and_masked(*sizes):
    full, stop = _key_ranges(*sizes)
    return full, stop - full


def _key_ranges_cases():
    names = ("q_start", "block_q", "block_k", "S", "is_causal")
    sizes = [
        (4, 4, 2, 12, True),
        (0, 16, 16, 64, False),
        (0, 16, 16, 60, False),
        (32, 16, 16, 100, True),
        (63, 64, 32, 200, True),
        (32, 32, 64, 200, True),
        (96, 32, 64, 90, True),
        (15, 1, 16, 100, True),
        (16, 1, 16, 100, True),
        (64, 64, 16, 100, True),
        (128, 64, 16, 100, True),
        (128, 128, 64, 1000, False),
    ]
    return _cases(names, sizes)


KEY_RANGES = Exercise(
    number="16.3",
    title="Tiles without a mask",
    outputs=("full", "stop"),
    cases=_key_ranges_cases,
    expected=_key_ranges,
    tried="full and causal masks, ragged lengths, tiles on and off the diagonal, queries after the last key",
    mistakes=(
        Mistake(
            "a tile counts as full if its last query sees all of it",
            functools.partial(_key_ranges, by_all=_seen_by_some),
            "The first query sees least: it decides, see section 4.",
            variants=(functools.partial(_key_ranges, by_all=lambda q_start, block_q: q_start + block_q - 1),),
        ),
        Mistake(
            "the first query is not taken to see its own key",
            functools.partial(_key_ranges, by_all=lambda q_start, block_q: q_start),
            "Query i sees keys 0 to i, which are i + 1: see section 4.",
        ),
        Mistake(
            "tiles after the first query are skipped",
            functools.partial(_key_ranges, by_some=_seen_by_all),
            "The last query of the tile sees most, and decides where to stop: see section 4.",
        ),
        Mistake(
            "the last query of the tile is left out",
            functools.partial(_key_ranges, by_some=lambda q_start, block_q: q_start + block_q - 1),
            "The last query is q_start + block_q - 1, and it sees its own key: see section 4.",
        ),
        Mistake(
            "the ragged tile at the end counts as full",
            functools.partial(_key_ranges, whole=(_up, _down)),
            "Over the end of the array lie no keys: that tile is masked, see section 4.",
            variants=(
                lambda *sizes: _key_ranges(*sizes, whole=(_down if sizes[-1] else _up, _down)),
                lambda *sizes: _key_ranges(*sizes, whole=(_up if sizes[-1] else _down, _down)),
            ),
        ),
        Mistake(
            "the end of the keys is forgotten under a causal mask",
            functools.partial(_key_ranges, cut=(True, False)),
            "There are only S keys, whatever a query could see: they limit both numbers, see section 4.",
            variants=(
                functools.partial(_key_ranges, cut=(False, True)),
                functools.partial(_key_ranges, cut=(False, False)),
            ),
        ),
        Mistake(
            "a tile that no query sees is not skipped",
            functools.partial(_key_ranges, touched=_one_more),
            "The last query sees q_start + block_q keys: round up to the tiles that they touch, and add none.",
            variants=(functools.partial(_key_ranges, by_some=lambda q_start, block_q: q_start + block_q + 1),),
        ),
        Mistake(
            "a tile of which some keys are seen is skipped",
            functools.partial(_key_ranges, touched=_down),
            "Round up where tiles are touched: one that is seen in part is masked, see section 4.",
            variants=(
                functools.partial(_key_ranges, touched=lambda length, block: (length - 1) // block),
                lambda *sizes: tuple(np.minimum(_key_ranges(*sizes, touched=_down), sizes[3] // sizes[2])),
                lambda *sizes: (_key_ranges(*sizes)[0], min(_key_ranges(*sizes)[1], sizes[3] // sizes[2])),
            ),
        ),
        Mistake(
            "a tile on the diagonal counts as full",
            functools.partial(_key_ranges, whole=(_down, _up)),
            "Round down where tiles must be whole: see section 4.",
            variants=(functools.partial(_key_ranges, by_all=lambda q_start, block_q: q_start, whole=(_down, _up)),),
        ),
        Mistake(
            "no tile is skipped",
            _nothing_skipped,
            "Under a causal mask the last query limits `stop`: see section 4.",
        ),
        Mistake(
            "the causal mask is left out",
            lambda *sizes: _key_ranges(*sizes[:-1], False),
            "With is_causal, query i sees keys 0 to i: see section 4.",
        ),
        Mistake(
            "is_causal is taken to be True throughout",
            lambda *sizes: _key_ranges(*sizes[:-1], True),
            "Without it every query sees all S keys: see the task.",
        ),
        Mistake(
            "the second number says how many tiles are masked",
            _full_and_masked,
            "`stop` is where the masked tiles end, counted from the first tile of all: see section 4.",
        ),
    ),
)

# 16.4 The other walk


def _query_counts(
    k_start, block_q, block_k, T, is_causal,
    *, skipped=lambda rows, k_start, block_k, T: rows[-1] < k_start,
    sees_all=lambda rows, k_start, block_k: rows[0] >= k_start + block_k - 1,
    inside=lambda rows, T: rows[-1] < T, cut=_up, causal_only=(True, True),
):  # fmt: skip
    """causal_only: whether a full mask skips nothing, and frees what lies inside."""
    masked = free = 0
    for i in range(cut(T, block_q)):
        rows = range(i * block_q, (i + 1) * block_q)
        if (is_causal or not causal_only[0]) and skipped(rows, k_start, block_k, T):
            continue
        if inside(rows, T) and ((causal_only[1] and not is_causal) or sees_all(rows, k_start, block_k)):
            free += 1
        else:
            masked += 1
    return masked, free


def _skipped_if(*several):
    return tuple(functools.partial(_query_counts, skipped=skipped) for skipped in several)


def _free_if(*several):
    return tuple(functools.partial(_query_counts, sees_all=sees_all) for sees_all in several)


def _keys_cut(k_start, block_q, block_k, T, is_causal):
    """As if there were T keys, and those of the program over their end needed no query."""
    return _query_counts(k_start, block_q, min(block_k, max(T - k_start, 1)), T, is_causal)


def _skipped_are_free(k_start, block_q, block_k, T, is_causal):
    masked, _ = _query_counts(k_start, block_q, block_k, T, is_causal)
    return masked, _up(T, block_q) - masked


def _all_and_free(*sizes):
    masked, free = _query_counts(*sizes)
    return masked + free, free


def _by_divisions(k_start, block_q, block_k, T, is_causal):
    """The ranges of the kernel subtracted from each other, though its loops run over empty ones zero times."""
    first, after_diagonal, full, stop = 0, 0, T // block_q, _up(T, block_q)
    if is_causal:
        first, after_diagonal = k_start // block_q, min(_up(k_start + block_k - 1, block_q), stop)
    return after_diagonal - first + stop - max(after_diagonal, full), full - after_diagonal


def _query_counts_cases():
    names = ("k_start", "block_q", "block_k", "T", "is_causal")
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
        (0, 1, 4, 3, True),
    ]
    return _cases(names, sizes)


QUERY_COUNTS = Exercise(
    number="16.4",
    title="The other walk",
    outputs=("masked", "free"),
    cases=_query_counts_cases,
    expected=_query_counts,
    tried="full and causal masks, ragged lengths, keys after the last query",
    mistakes=(
        Mistake(
            "a tile counts as free if its first query sees the first key",
            *_free_if(lambda rows, k_start, block_k: rows[0] >= k_start),
            "The last key of the tile is seen by the fewest queries: it decides, see section 5.",
        ),
        Mistake(
            "the last query of a tile decides whether it is free",
            *_free_if(lambda rows, k_start, block_k: rows[-1] >= k_start + block_k - 1),
            "The first query sees least: it decides, see section 5.",
            variants=_free_if(lambda rows, k_start, block_k: rows[-1] >= k_start),
        ),
        Mistake(
            "the last key is not taken to be seen by its own query",
            *_free_if(lambda rows, k_start, block_k: rows[0] >= k_start + block_k),
            "The last key is k_start + block_k - 1, and the query there sees it: see section 5.",
        ),
        Mistake(
            "keys from T on are left out",
            _keys_cut,
            "A free tile sees every key of the program, those over the end included: see the task.",
        ),
        Mistake(
            "the ragged tile at the end counts as free",
            functools.partial(_query_counts, inside=lambda rows, T: True),
            "Over the end of the array lie no queries: its loads are masked, see section 5.",
            variants=(functools.partial(_query_counts, inside=lambda rows, T: rows[-1] <= T),),
        ),
        Mistake(
            "the last tile counts as ragged where it is whole",
            functools.partial(_query_counts, inside=lambda rows, T: rows[-1] < T - 1),
            "The last query is T - 1: a tile that ends there lies whole within the array.",
        ),
        Mistake(
            "the ragged tile at the end is left out",
            functools.partial(_query_counts, cut=_down),
            "Some of its queries are there: it is computed with a mask, see section 5.",
        ),
        Mistake(
            "no tile is skipped",
            *_skipped_if(lambda rows, k_start, block_k, T: False),
            "Queries before k_start see none of these keys: see section 5.",
            variants=(_skipped_are_free,),
        ),
        Mistake(
            "a tile is skipped of which some query sees a key",
            *_skipped_if(lambda rows, k_start, block_k, T: rows[0] < k_start),
            "Its last position sees most: only where that is before k_start is a tile skipped, see section 5.",
            variants=_skipped_if(
                lambda rows, k_start, block_k, T: rows[-1] <= k_start,
                lambda rows, k_start, block_k, T: rows[-1] < k_start + block_k - 1,
            ),
        ),
        Mistake(
            "positions over the end are taken to see nothing",
            *_skipped_if(lambda rows, k_start, block_k, T: min(rows[-1], T - 1) < k_start),
            "Positions count as they stand, inside the array or not: see the task.",
            variants=_skipped_if(lambda rows, k_start, block_k, T: rows[-1] < k_start or k_start >= T),
        ),
        Mistake(
            "the causal mask is left out",
            lambda *sizes: _query_counts(*sizes[:-1], False),
            "With is_causal, query i sees keys 0 to i: see section 5.",
        ),
        Mistake(
            "is_causal is taken to be True throughout",
            functools.partial(_query_counts, causal_only=(False, False)),
            "Without it nothing is skipped, and only a ragged tile needs a mask: see the task.",
            variants=(
                functools.partial(_query_counts, causal_only=(False, True)),
                functools.partial(_query_counts, causal_only=(True, False)),
            ),
        ),
        Mistake(
            "the first number counts every tile that is computed",
            _all_and_free,
            "Return those with a mask and those without, each by itself.",
        ),
        Mistake(
            "an empty range counts as a negative number of tiles",
            _by_divisions,
            "A range whose end is before its beginning holds no tile: take the larger one of 0 and the difference.",
        ),
    ),
)

EXERCISES = (GRIDS, POINTERS, KEY_RANGES, QUERY_COUNTS)
