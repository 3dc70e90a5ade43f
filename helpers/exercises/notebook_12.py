"""The exercises of notebook 12: pencil and paper for the Hopper backward kernels."""

from helpers.exercises.exercise import Exercise


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
OPERANDS = Exercise(
    operands, "Registers or shared memory",
    outputs=("place of the left operand", "place of the right operand", "whether a tile must be stored first"),
).with_cases(
    "left right held",
    ("ds k, transposed tiles", "ds", "k", BY_KEYS),
    ("p.T do, transposed tiles", "p.T", "do", BY_KEYS),
    ("ds.T q, transposed tiles", "ds.T", "q", BY_KEYS),
    ("k q.T, transposed tiles", "k", "q.T", []),
    ("k.T ds.T, transposed tiles", "k.T", "ds.T", BY_KEYS),
    ("ds k, tiles as they are", "ds", "k", BY_QUERIES),
    ("ds.T q, tiles as they are", "ds.T", "q", BY_QUERIES),
    ("do.T p, tiles as they are", "do.T", "p", BY_QUERIES),
    ("p.T ds, both computed", "p.T", "ds", BY_KEYS),
    ("ds.T q, ds brought by TMA", "ds.T", "q", ["s", "p"]),
    ("p ds.T, both computed, one as it is needed", "p", "ds.T", ["p", "s.T", "ds.T"]),
).with_mistakes(
    ("the right operand may lie in registers as well", ("stored = right", '"shared memory", stored'),
     ("stored = right not in held and right", '"registers" if right in held else "shared memory", stored'),
     "wgmma takes its right operand from shared memory only: see section 1."),
    ("a tile in registers serves as its own transpose", "left in held", 'left.removesuffix(".T") in computed',
     "Registers cannot be read the other way round, only shared memory can: see section 1."),
    ("no tile is ever stored first", '"shared memory", stored', '"shared memory", False',
     "A computed tile is in shared memory only after the warpgroup put it there: see section 1."),
)  # fmt: skip


def fused_smem(H, block_q, stages, warpgroups, delayed):
    """Bytes of shared memory of the fused kernel, without barriers."""
    block_k = 64 * warpgroups
    slots = (stages + delayed) + stages  # of q with lse, and of do with delta
    streamed = slots * (2 * block_q * H + 4 * block_q)
    keys_and_values = 2 * 2 * block_k * H
    ds = 2 * 2 * block_k * block_q
    dq = 4 * block_q * H
    return streamed + keys_and_values + ds + dq


SMEM = Exercise(fused_smem, "A budget of shared memory", outputs=("bytes",)).with_cases(
    "H block_q stages warpgroups delayed", (64, 64, 1, 1, False), (64, 128, 2, 2, False), (128, 64, 2, 2, False),
    (128, 64, 2, 2, True), (64, 64, 3, 2, True), (128, 64, 1, 2, True), (64, 32, 2, 3, False), (128, 96, 2, 1, True),
).with_mistakes(
    ("ds has as many places as the rings", "ds = 2 * 2", "ds = stages * 2",
     "It is kept for two steps, however many slots the rings have: see section 2."),
    ("the ds of one warpgroup only is counted", "block_k * block_q", "64 * block_q",
     "`ds` is a tile of all keys of the program, 64 for each warpgroup: see the exercise."),
)  # fmt: skip


def reduce_add(B, T, S, N, H, block_q, block_k, is_causal, bandwidth):
    """(bytes added to dq, least seconds)."""
    pairs = 0
    for i in range(T // block_q):
        for j in range(-(-S // block_k)):
            pairs += not is_causal or j * block_k <= (i + 1) * block_q - 1
    moved = B * N * pairs * block_q * H * 4
    return moved, moved / bandwidth


ADDED = Exercise(reduce_add, "What the additions move", outputs=("bytes", "seconds"), tolerance=1e-6).with_cases(
    "B T S N H block_q block_k is_causal bandwidth", (1, 4, 4, 1, 2, 2, 2, False, 32.0),
    (1, 4, 4, 1, 2, 2, 2, True, 32.0), (1, 512, 384, 2, 64, 128, 128, False, 1e12),
    (2, 256, 600, 1, 64, 64, 128, False, 2e12), (2, 1024, 1024, 3, 128, 64, 128, True, 4e12),
    (1, 768, 512, 2, 64, 128, 128, True, 4e12), (2, 512, 500, 1, 64, 128, 64, True, 4e12),
    (1, 512, 300, 1, 64, 64, 128, True, 1e12), (1, 128, 512, 1, 32, 64, 128, True, 1e12),
    (1, 12, 12, 3, 5, 3, 2, True, 10.0),
).with_mistakes(
    ("the causal mask is left out", "not is_causal or j * block_k <= (i + 1) * block_q - 1", "1",
     "Pairs of tiles in which no query sees a key do not count: see the exercise."),
    ("a causal mask halves the pairs exactly", ("not is_causal or j * block_k <= (i + 1) * block_q - 1", "N * pairs"),
     ("1", "N * pairs / (2 if is_causal else 1)"),
     "Pairs on the diagonal are visited whole, and S need not be T: count the pairs, see hint 1."),
    ("a pair is visited only if its last key is seen", "j * block_k <= (i + 1) * block_q - 1",
     "(j + 1) * block_k <= (i + 1) * block_q",
     "One visible key is enough, and the first key of a tile is seen by most: see the hints."),
)  # fmt: skip


def fused_or_split(flops, smem_bytes, exposed):
    """("fused" or "split", cycles of fused, cycles of split) for one pair of tiles."""

    def cycles(kernel):
        return max(flops[kernel] / 4096, smem_bytes[kernel] / 128)

    fused = cycles("fused") + exposed
    split = cycles("dkv") + cycles("dq")
    return "fused" if fused < split else "split", fused, split


def _each(fused, dkv, dq, unit=1):
    return {"fused": unit * fused, "dkv": unit * dkv, "dq": unit * dq}


HAND, PRODUCTS, KIB = (_each(40960, 32768, 24576), _each(1536, 640, 512)), _each(5, 4, 3, 2 * 64 * 128 * 128), 1024

CHOICE = Exercise(
    fused_or_split, "Fused or split", outputs=("choice", "cycles of fused", "cycles of split"), tolerance=1e-6,
).with_cases(
    "flops smem_bytes exposed", ("the case worked by hand", *HAND, 0),
    ("the case worked by hand, 3 cycles exposed", *HAND, 3),
    ("the case worked by hand, 20 cycles exposed", *HAND, 20),
    ("five and seven products, 300 cycles exposed", PRODUCTS, _each(368, 224, 160, KIB), 300),
    ("the same, 900 cycles exposed", PRODUCTS, _each(368, 224, 160, KIB), 900),
    ("FLOPs and bytes that are no whole number of cycles", _each(50000, 30000, 20001), _each(1000, 1200, 601), 1),
    ("a fused kernel bound by shared memory", PRODUCTS, _each(640, 224, 160, KIB), 0),
    ("a dq kernel bound by shared memory", PRODUCTS, _each(300, 100, 320, KIB), 0),
).with_mistakes(
    ("the two units take turns", "max(flops[kernel] / 4096, smem_bytes[kernel] / 128)",
     "flops[kernel] / 4096 + smem_bytes[kernel] / 128",
     "Tensor core and shared memory work at the same time, so the slower one decides: see section 4."),
    ("the choice is made before the exposed cycles are added", (" + exposed", "fused, split"),
     ("", "fused + exposed, split"), "They are part of what the fused form takes: compare after adding them."),
    ("the kernels of the split form run at the same time", 'cycles("dkv") + cycles("dq")',
     'max(cycles("dkv"), cycles("dq"))', "dkv and dq run one after the other, so their cycles add up: see section 4."),
)  # fmt: skip


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


HALVING = Exercise(halving_block_q, "Half as many queries in a tile", outputs=("factors",), tolerance=1e-6).with_cases(
    "T block_q", (256, 128), (4096, 128), (320, 128), (1090, 128), (50, 128), (64, 128), (130, 64),
).with_mistakes(
    ("k and v are read from shared memory as often as before", '"k and v read": steps', '"k and v read": 1',
     "The tensor core reads all of them in each step, and there are more steps: see section 4."),
    ("the bytes of q and do halve, as in one step", '"q and do read": steps / 2', '"q and do read": 1 / 2',
     "A step reads half as much, and there are more steps: see hint 1."),
    ("the operations stay the same, though the empty rows of the last tile change", '"flops": steps / 2',
     '"flops": 1', "Empty rows are multiplied as well: see the case worked by hand, T=320."),
)  # fmt: skip

EXERCISES = (OPERANDS, SMEM, ADDED, CHOICE, HALVING)
