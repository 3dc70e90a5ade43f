"""The exercises of notebook 12: pencil and paper for the Hopper backward kernels."""

from helpers.exercises.exercise import Case, Exercise


def _cases(names, sizes):
    """A case for each tuple of sizes, labelled "H=64, block_q=64" by those of them that have a name."""
    return [Case(", ".join(f"{n}={x}" for n, x in zip(names.split(), size, strict=False)), size) for size in sizes]


# 12.1


def operands(left, right, held):
    """(place of left, place of right, whether a computed tile must be stored first)."""
    computed = {name.removesuffix(".T") for name in held}
    in_registers = left in held
    stored = right.removesuffix(".T") in computed
    if not in_registers:
        stored = stored or left.removesuffix(".T") in computed
    return "registers" if in_registers else "shared memory", "shared memory", stored


BY_KEYS = ["s.T", "p.T", "dp.T", "ds.T"]
BY_QUERIES = ["s", "p", "dp", "ds"]
PRODUCTS = {
    "ds k, transposed tiles": ("ds", "k", BY_KEYS),
    "p.T do, transposed tiles": ("p.T", "do", BY_KEYS),
    "ds.T q, transposed tiles": ("ds.T", "q", BY_KEYS),
    "k q.T, transposed tiles": ("k", "q.T", []),
    "v do.T, transposed tiles": ("v", "do.T", ["s.T"]),
    "k.T ds.T, transposed tiles": ("k.T", "ds.T", BY_KEYS),
    "ds k, tiles as they are": ("ds", "k", BY_QUERIES),
    "p.T do, tiles as they are": ("p.T", "do", BY_QUERIES),
    "ds.T q, tiles as they are": ("ds.T", "q", BY_QUERIES),
    "do.T p, tiles as they are": ("do.T", "p", BY_QUERIES),
    "q k.T, tiles as they are": ("q", "k.T", []),
    "ds k, both orientations held": ("ds", "k", [*BY_KEYS, "ds"]),
    "ds.T q, both orientations held": ("ds.T", "q", ["ds", "ds.T"]),
    "p.T ds, both computed": ("p.T", "ds", BY_KEYS),
    "p ds.T, both computed, the left one held transposed": ("p", "ds.T", BY_KEYS),
    "p ds.T, both computed, one as it is needed": ("p", "ds.T", ["p", "s.T", "ds.T"]),
    "k p.T, the right one computed": ("k", "p.T", BY_KEYS),
}


# fmt: off
OPERANDS = Exercise(
    solution=operands, title="Registers or shared memory",
    outputs=("place of the left operand", "place of the right operand", "whether a tile must be stored first"),
    cases=lambda: [Case(label, arguments) for label, arguments in PRODUCTS.items()],
    tried="kernels that own keys and kernels that own queries, with tiles transposed and as they are",
    mistakes=(
        ("the right operand may lie in registers as well",
         ("stored = right", '"shared memory", stored'),
         ("stored = right not in held and right", '"registers" if right in held else "shared memory", stored'),
         "wgmma takes its right operand from shared memory only: see section 1."),
        ("a tile in registers serves as its own transpose", "left in held", 'left.removesuffix(".T") in computed',
         "Registers cannot be read the other way round, only shared memory can: see section 1."),
        ("the left operand is always in registers", "left in held", "True",
         "What TMA brought, q, k, v and do, lies in shared memory, and wgmma reads it there: see section 1."),
        ("every computed tile goes through shared memory", "left in held", "False",
         "A left operand that the warpgroup holds in the right orientation can stay where it is: see section 1."),
        ("no tile is ever stored first", '"shared memory", stored', '"shared memory", False',
         "A computed tile is in shared memory only after the warpgroup put it there: see section 1."),
        ("a computed right operand is forgotten: only the left one is looked at",
         'stored = right.removesuffix(".T") in computed', "stored = False",
         "The right operand always comes from shared memory, so a computed one must be stored: see section 1."),
        ("a computed left operand is forgotten: only the right one is looked at",
         ' or left.removesuffix(".T") in computed', "",
         "A left operand that is held in the wrong orientation is read from shared memory, too: see section 1."),
        ("a tile is stored although it stays in registers", "    if not in_registers:\n        stored", "    stored",
         "Only a computed operand that is read from shared memory must be stored: see section 1."),
        ("a right operand need not be stored where it is held as it is needed",
         "stored = right", "stored = right not in held and right",
         "The right operand is read from shared memory, whatever registers hold: see section 1."),
        ("an operand is looked up with its .T among names without it",
         ('right.removesuffix(".T")', 'left.removesuffix(".T")'), ("right", "left"),
         "Take the .T off both sides before you compare: see hint 2."),
    ),
)
# fmt: on


# 12.2


def fused_smem(H, block_q, stages, warpgroups, delayed):
    """Bytes of shared memory of the fused kernel, without barriers."""
    block_k = 64 * warpgroups
    slots = (stages + delayed) + stages  # of q with lse, and of do with delta
    streamed = slots * (2 * block_q * H + 4 * block_q)
    keys_and_values = 2 * 2 * block_k * H
    ds = 2 * 2 * block_k * block_q
    dq = 4 * block_q * H
    return streamed + keys_and_values + ds + dq


# fmt: off
SMEM = Exercise(
    solution=fused_smem, title="A budget of shared memory", outputs=("bytes",),
    cases=lambda: _cases("H block_q stages warpgroups delayed", [
        (64, 64, 1, 1, False), (64, 128, 2, 2, False), (128, 64, 2, 2, False), (128, 64, 2, 2, True),
        (64, 64, 3, 2, True), (128, 64, 1, 2, True), (64, 32, 2, 3, False), (128, 96, 2, 1, True),
    ]),
    tried="one to three warpgroups, one to three stages, both orders",
    mistakes=(
        ("the tile of dq has 16 bits", "dq = 4", "dq = 2",
         "A sum of many parts is kept in float32, and what TMA adds to it is float32 too: see section 3."),
        ("each warpgroup has a whole tile of dq", "dq = 4", "dq = warpgroups * 4",
         "The warpgroups share out the rows or the columns of one tile: see section 3."),
        ("ds is kept for one step only", "ds = 2 * 2", "ds = 2",
         "One warpgroup may still read the ds of a step while another writes that of the next: see section 2."),
        ("ds is stored in float32", "ds = 2 * 2", "ds = 2 * 4",
         "It is an operand of wgmma, and those have 16 bits here: see section 2."),
        ("ds has as many places as the rings", "ds = 2 * 2", "ds = stages * 2",
         "It is kept for two steps, however many slots the rings have: see section 2."),
        ("the ds of one warpgroup only is counted", "block_k * block_q", "64 * block_q",
         "`ds` is a tile of all keys of the program, 64 for each warpgroup: see the exercise."),
        ("the keys of one warpgroup only are counted", "64 * warpgroups", "64",
         "`k`, `v` and `ds` have 64 rows for each compute warpgroup: see the exercise."),
        ("k and v are in the ring", "keys_and_values = 2 * 2", "keys_and_values = stages * 2 * 2",
         "This program owns its keys: k and v are loaded once and have one place each: see section 2."),
        ("only one of k and v is counted", "keys_and_values = 2 * 2", "keys_and_values = 2",
         "Both have a buffer of their own: see the exercise."),
        ("the delayed order needs nothing more", "stages + delayed", "stages",
         "In the delayed order q is still needed one step later, for dk: see section 5."),
        ("the delayed order has one more place for do as well", "+ stages  #", "+ (stages + delayed)  #",
         "do is done with in its own step, only q is needed one step later: see section 5."),
        ("lse and delta are forgotten", " + 4 * block_q)", ")",
         "They come with q and do, one float32 for each query: see section 2."),
    ),
)
# fmt: on


# 12.3


def reduce_add(B, T, S, N, H, block_q, block_k, is_causal, bandwidth):
    """(bytes added to dq, least seconds)."""
    pairs = 0
    for i in range(T // block_q):
        for j in range(-(-S // block_k)):
            pairs += not is_causal or j * block_k <= (i + 1) * block_q - 1
    moved = B * N * pairs * block_q * H * 4
    return moved, moved / bandwidth


SEEN = "j * block_k <= (i + 1) * block_q - 1"

# fmt: off
ADDED = Exercise(
    solution=reduce_add, title="What the additions move", outputs=("bytes", "seconds"), tolerance=1e-6,
    cases=lambda: _cases("B T S N H block_q block_k is_causal", [
        (1, 4, 4, 1, 2, 2, 2, False, 32.0), (1, 4, 4, 1, 2, 2, 2, True, 32.0),
        (1, 512, 384, 2, 64, 128, 128, False, 1e12), (2, 256, 600, 1, 64, 64, 128, False, 2e12),
        (2, 1024, 1024, 3, 128, 64, 128, True, 4e12), (1, 768, 512, 2, 64, 128, 128, True, 4e12),
        (2, 512, 500, 1, 64, 128, 64, True, 4e12), (1, 512, 300, 1, 64, 64, 128, True, 1e12),
        (1, 128, 512, 1, 32, 64, 128, True, 1e12), (1, 12, 12, 3, 5, 3, 2, True, 10.0),
    ]),
    tried="full and causal, T ≠ S, a last tile of keys that is not full, several heads and batch entries",
    mistakes=(
        ("the causal mask is left out", f"not is_causal or {SEEN}", "1",
         "Pairs of tiles in which no query sees a key do not count: see the exercise."),
        ("a causal mask halves the pairs exactly",
         (f"not is_causal or {SEEN}", "N * pairs"), ("1", "N * pairs / (2 if is_causal else 1)"),
         "Pairs on the diagonal are visited whole, and S need not be T: count the pairs, see hint 1."),
        ("a pair is visited only if its last key is seen", SEEN, "(j + 1) * block_k <= (i + 1) * block_q",
         "One visible key is enough, and the first key of a tile is seen by most: see the hints."),
        ("a pair is visited only if its first query sees a key", SEEN, "j * block_k <= i * block_q",
         "One query that sees a key is enough, and the last query of a tile sees furthest: see the hints."),
        ("a pair is visited whose first key comes just after its last query", SEEN, "j * block_k <= (i + 1) * block_q",
         "The last query of tile i is (i + 1) * block_q - 1: see the case worked by hand."),
        ("the numbers of the tiles are compared instead of positions", SEEN, "j <= i",
         "Tiles of queries and of keys may differ in size: compare positions, j * block_k and so on."),
        ("the mask ends at the last key for the last query, though T and S differ", SEEN, f"{SEEN} + S - T",
         "Positions count from the first query and the first key: query i sees keys j <= i."),
        ("the last tile of keys, which is not full, is left out", "-(-S // block_k)", "S // block_k",
         "It has a program of its own, which adds whole parts: round up, see hint 2."),
        ("a part has block_k rows", "pairs * block_q", "pairs * block_k",
         "dq has a row for each query: a part has block_q rows of H numbers, see the exercise."),
        ("each tile of dq is added once", "range(-(-S // block_k))", "range(1)",
         "Every program whose keys it sees adds a part of its own: see the picture in section 3."),
        ("one head of one batch entry is counted", "B * N * ", "",
         "Each of the B N query heads has a dq of its own: see section 3."),
    ),
)
# fmt: on


# 12.4


def fused_or_split(flops, smem_bytes, exposed):
    """("fused" or "split", cycles of fused, cycles of split) for one pair of tiles."""

    def cycles(kernel):
        return max(flops[kernel] / 4096, smem_bytes[kernel] / 128)

    fused = cycles("fused") + exposed
    split = cycles("dkv") + cycles("dq")
    return "fused" if fused < split else "split", fused, split


def _choice_cases():
    def case(label, flops, smem_bytes, exposed):
        tables = (dict(zip(("fused", "dkv", "dq"), values, strict=True)) for values in (flops, smem_bytes))
        return Case(label, (*tables, exposed))

    def by_five_products(label, fused, dkv, dq, exposed):
        """The shared memory in KiB."""
        unit = 2 * 64 * 128 * 128
        return case(label, (5 * unit, 4 * unit, 3 * unit), (1024 * fused, 1024 * dkv, 1024 * dq), exposed)

    by_hand = (40960, 32768, 24576), (1536, 640, 512)
    return [
        case("the case worked by hand", *by_hand, 0),
        case("the case worked by hand, 3 cycles exposed", *by_hand, 3),
        case("the case worked by hand, 20 cycles exposed", *by_hand, 20),
        by_five_products("five and seven products, 300 cycles exposed", 368, 224, 160, 300),
        by_five_products("the same, 900 cycles exposed", 368, 224, 160, 900),
        case("FLOPs and bytes that are no whole number of cycles", (50000, 30000, 20001), (1000, 1200, 601), 1),
        by_five_products("a fused kernel bound by shared memory", 640, 224, 160, 0),
        by_five_products("a dq kernel bound by shared memory", 300, 100, 320, 0),
    ]


SLOWER_UNIT = "max(flops[kernel] / 4096, smem_bytes[kernel] / 128)"

# fmt: off
CHOICE = Exercise(
    solution=fused_or_split, title="Fused or split", outputs=("choice", "cycles of fused", "cycles of split"),
    cases=_choice_cases, tolerance=1e-6,
    tried="kernels bound by the tensor core and by shared memory, with and without exposed cycles",
    mistakes=(
        ("the two units take turns", SLOWER_UNIT, "flops[kernel] / 4096 + smem_bytes[kernel] / 128",
         "Tensor core and shared memory work at the same time, so the slower one decides: see section 4."),
        ("the faster of the two units decides", "max(", "min(",
         "Both must finish, so the slower one decides: see section 4."),
        ("only shared memory counts", SLOWER_UNIT, "smem_bytes[kernel] / 128",
         "The tensor core does 4096 operations in a cycle, and that can be the slower side: see section 4."),
        ("only the tensor core counts", SLOWER_UNIT, "flops[kernel] / 4096",
         "Shared memory delivers 128 bytes in a cycle, and that can be the slower side: see section 4."),
        ("the rates of the two units are exchanged",
         SLOWER_UNIT, "max(flops[kernel] / 128, smem_bytes[kernel] / 4096)",
         "The tensor core does 4096 operations in a cycle, and shared memory moves 128 bytes: see section 4."),
        ("the cycles of a kernel are rounded down", ("/ 4096", "/ 128"), ("// 4096", "// 128"),
         "// drops what lies behind the point: divide with /."),
        ("the exposed cycles are forgotten", " + exposed", "",
         "In those cycles neither unit works, so they come on top: see the text of the exercise."),
        ("the exposed cycles are charged to both forms", 'cycles("dq")', 'cycles("dq") + exposed',
         "Only in the fused kernel do warpgroups wait for each other: see the text of the exercise."),
        ("the choice is made before the exposed cycles are added",
         (" + exposed", "fused, split"), ("", "fused + exposed, split"),
         "They are part of what the fused form takes: compare after adding them."),
        ("both kernels of the split form are one", 'cycles("dkv") + cycles("dq")',
         'max((flops["dkv"] + flops["dq"]) / 4096, (smem_bytes["dkv"] + smem_bytes["dq"]) / 128)',
         "dkv and dq run one after the other: the idle unit of the first cannot help the second, see section 4."),
        ("the kernels of the split form run at the same time",
         'cycles("dkv") + cycles("dq")', 'max(cycles("dkv"), cycles("dq"))',
         "dkv and dq run one after the other, so their cycles add up: see section 4."),
        ("the form with more cycles is chosen", "fused < split", "fused > split",
         "Fewer cycles are better: see the text of the exercise."),
    ),
)
# fmt: on


# 12.5


def halving_block_q(T, block_q):
    """{what: factor} of a walk with block_q / 2 against one with block_q."""
    before, after = -(-T // block_q), -(-T // (block_q // 2))
    steps = after / before
    return {
        "steps": steps,
        "flops": steps / 2,
        "k and v read": steps,
        "q and do read": steps / 2,
        "ring": 1 / 2,
        "added to dq": 1,
        "registers of s and dp": 1 / 2,
    }


# fmt: off
HALVING = Exercise(
    solution=halving_block_q, title="Half as many queries in a tile", outputs=("factors",), tolerance=1e-6,
    cases=lambda: _cases("T block_q", [
        (256, 128), (4096, 128), (320, 128), (1090, 128), (50, 128), (64, 128), (130, 64),
    ]),
    tried="lengths that are multiples of the tile and lengths that are not",
    mistakes=(
        ("a step reads half as much of k and v as before", '"k and v read": steps', '"k and v read": steps / 2',
         "Each step reads all of k and of v again, whatever its queries are: see section 4."),
        ("k and v are read from shared memory as often as before", '"k and v read": steps', '"k and v read": 1',
         "The tensor core reads all of them in each step, and there are more steps: see section 4."),
        ("the bytes of q and do halve, as in one step", '"q and do read": steps / 2', '"q and do read": 1 / 2',
         "A step reads half as much, and there are more steps: see hint 1."),
        ("q and do are read as often as k and v", '"q and do read": steps / 2', '"q and do read": steps',
         "A step reads the queries of its tile only, half as many as before: see section 4."),
        ("the operations stay the same, though the empty rows of the last tile change",
         '"flops": steps / 2', '"flops": 1',
         "Empty rows are multiplied as well: see the case worked by hand, T=320."),
        ("the products of a step are counted, not those of the whole walk", '"flops": steps / 2', '"flops": 1 / 2',
         "There are more steps: see the case worked by hand."),
        ("the ring is counted for all steps", '"ring": 1 / 2', '"ring": steps / 2',
         "It is room that is used again and again: as many slots, each half as large, see section 2."),
        ("the bytes added to dq grow with the steps", '"added to dq": 1', '"added to dq": steps',
         "Every row of dq is added once in a walk, however the queries are cut: see section 3."),
        ("the number of tiles is rounded down", ("-(-T // block_q)", "-(-T // (block_q // 2))"),
         ("max(1, T // block_q)", "max(1, T // (block_q // 2))"),
         "The last tile may have few rows, and it is a step all the same: round up."),
        ("the factor of the steps is an integer division", "after / before", "after // before",
         "Five steps for three are 5/3: divide with /, not with //."),
        ("the factors are turned round, old divided by new", "after / before", "before / after",
         "Each factor is new divided by old: see the text of the exercise."),
        ("the last tile is always full", "after / before", "2",
         "Round the number of steps up, before and after: see the case worked by hand."),
    ),
)
# fmt: on


EXERCISES = (OPERANDS, SMEM, ADDED, CHOICE, HALVING)
