"""The exercises of notebook 15: a step of the walk, blocks that stay, whole registers, VMEM, axes in any order."""

import functools
import itertools
import math

import numpy as np

from helpers.exercises.checking import Case, Complaint, Exercise, Mistake

# 15.1 A step of the walk


class Ref:
    """A block in VMEM: `ref[...]` is what stands there, `ref[...] = x` puts x there. It begins with NaN."""

    def __init__(self, name, shape, array=None):
        self.name, self.shape, self.dtype = name, shape, np.dtype(np.float32)
        self._array = np.full(shape, np.nan, np.float32) if array is None else array.astype(np.float32)

    def __getitem__(self, index):
        return self._array[index].copy()

    def __setitem__(self, index, value):
        value, there = np.asarray(value, np.float32), self._array[index].shape
        if value.shape not in ((), there):
            raise Complaint(f"`{self.name}` takes an array of shape {there} there, yours has {value.shape}")
        self._array[index] = value

    def __array__(self, dtype=None, copy=None):
        raise TypeError(f"{self.name} is a ref: read it with {self.name}[...]")


def _walk(answer, q, k, v, block_q, block_k):
    """(out, lse) of a step function: all steps of a tile of queries, then those of the next."""
    H, last = q.shape[1], len(k) // block_k - 1
    scratch = Ref("m_ref", (block_q, 1)), Ref("l_ref", (block_q, 1)), Ref("acc_ref", (block_q, H))
    outs, lses = [], []
    for start in range(0, len(q), block_q):
        out_ref, lse_ref = Ref("out_ref", (block_q, H)), Ref("lse_ref", (block_q, 1))
        q_ref = Ref("q_ref", (block_q, H), q[start : start + block_q])
        for step in range(last + 1):
            keys = slice(step * block_k, (step + 1) * block_k)
            k_ref, v_ref = Ref("k_ref", (block_k, H), k[keys]), Ref("v_ref", (block_k, H), v[keys])
            answer(step, last, q_ref, k_ref, v_ref, out_ref, lse_ref, *scratch)
        outs.append(out_ref[...])
        lses.append(lse_ref[...])
    return np.concatenate(outs), np.concatenate(lses)


def _attention(q, k, v, block_q, block_k):
    """(out, lse), computed in float64 and rounded to what a `Ref` holds."""
    s = q @ k.T
    lse = np.logaddexp.reduce(s, axis=1, keepdims=True)
    return (np.exp(s - lse) @ v).astype(np.float32), lse.astype(np.float32)


def _walk_cases():
    hand = np.array([[1.0]]), np.log([[1.0], [3.0], [2.0], [8.0]]), np.array([[1.0], [2.0], [3.0], [4.0]])
    cases = [Case("the case worked by hand", (*hand, 1, 2))]
    for label, tiles, steps, heights in (
        ("2 tiles of queries, 3 steps", 2, 3, (0, 0, 0)),
        ("2 tiles of queries, 3 steps, the largest logits first", 2, 3, (9, 0, 0)),
        ("2 tiles of queries, 3 steps, the largest logits last", 2, 3, (0, 0, 9)),
        ("2 tiles of queries, 3 steps, logits near 200, then near 0", 2, 3, (200, 0, -20)),
        ("2 tiles of queries, 3 steps, logits near 500", 2, 3, (500, 501, 499)),
        ("2 tiles of queries, 3 steps, logits near -500", 2, 3, (-501, -499, -500)),
        ("3 tiles of queries, 1 step", 3, 1, (0,)),
    ):
        random = np.random.default_rng([15, 1, len(cases)])
        q = random.standard_normal((4 * tiles, 8))
        k, v = random.standard_normal((2, 5 * steps, 8))
        q[:, 0], k[:, 0] = 1, np.repeat(heights, 5)
        cases.append(Case(label, (q, k, v, 4, 5)))
    random = np.random.default_rng([15, 1, len(cases)])
    q, (k, v) = random.standard_normal((4, 8)), random.standard_normal((2, 10, 8))
    q[:, 0], k[:, 0] = (1, -1, 1, -1), np.tile((0, 150, 60, 90, 30), 2)
    cases.append(Case("1 tile of queries, 2 steps, queries and keys of very different logits", (q, k, v, 4, 5)))
    # Whole numbers, which float32 holds: m may begin with no finite number.
    q, k = np.eye(1, 8).repeat(4, axis=0), np.eye(1, 8) * (-1e5 + np.arange(10.0)[:, None] % 4)
    cases.append(Case("1 tile of queries, 2 steps, logits near -100000", (q, k, v, 4, 5)))
    return cases


def _step(
    step,
    last,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    lse_ref,
    m_ref,
    l_ref,
    acc_ref,
    *,
    begins=lambda step, last: step == 0,
    ends=lambda step, last: step == last,
    maximum=np.maximum,
    of_l=lambda alpha: alpha,
    of_acc=lambda alpha: alpha,
    early=False,
    halfway=False,
    lse=lambda m, l: m + np.log(l),
    out=lambda acc, l: acc / l,
):
    def write():
        out_ref[...], lse_ref[...] = out(acc_ref[...], l_ref[...]), lse(m_ref[...], l_ref[...])

    if begins(step, last):
        m_ref[...], l_ref[...], acc_ref[...] = -np.inf, 0, 0
    if early and ends(step, last):
        write()
    s = q_ref[...] @ k_ref[...].T
    m = maximum(m_ref[...], s.max(axis=1, keepdims=True))
    alpha, p = np.exp(m_ref[...] - m), np.exp(s - m)
    before = l_ref[...]
    m_ref[...] = m
    l_ref[...] = of_l(alpha) * before + p.sum(axis=1, keepdims=True)
    if halfway:
        acc_ref[...] = (alpha * before * acc_ref[...] + p @ v_ref[...]) / l_ref[...]
    else:
        acc_ref[...] = of_acc(alpha) * acc_ref[...] + p @ v_ref[...]
    if not early and ends(step, last):
        write()


def _step_with(**options):
    return functools.partial(_step, **options)


def _one(alpha):
    return 1


WALK = Exercise(
    number="15.1",
    title="A step of the walk",
    outputs=("out", "lse"),
    cases=_walk_cases,
    run=_walk,
    expected=_attention,
    tolerance=1e-4,
    tried="one to three steps, tiles of queries one after another, logits from 500 to -100000, largest first and last",
    mistakes=(
        Mistake(
            "scratch is never set",
            _step_with(begins=lambda step, last: False),
            "At step 0 there stands whatever was left there: set m, l and acc first, see section 2.",
        ),
        Mistake(
            "scratch is set at every step",
            _step_with(begins=lambda step, last: True),
            "Then only the last tile of keys counts: set it at step 0 alone, see section 2.",
        ),
        Mistake(
            "the result is written at step 0 only",
            _step_with(ends=lambda step, last: step == 0),
            "It is whole after the last step: see section 3.",
        ),
        Mistake(
            "the result is written before the last tile is in it",
            _step_with(early=True),
            "Update m, l and acc first, then write: see section 3.",
        ),
        Mistake(
            "m is overwritten before alpha is made of it",
            _step_with(of_l=_one, of_acc=_one),
            "A ref forgets: read the old m before you write the new one, or alpha is 1, see section 4.",
        ),
        Mistake(
            "acc is not rescaled",
            _step_with(of_acc=_one),
            "acc counts from the old maximum: multiply it by alpha, as l, see section 4.",
        ),
        Mistake(
            "l is not rescaled",
            _step_with(of_l=_one),
            "l counts from the old maximum: multiply it by alpha, as acc, see section 4.",
        ),
        Mistake(
            "m is the maximum of the tile alone",
            _step_with(maximum=lambda old, new: new),
            "The running maximum never falls: take the larger of the two, see section 4.",
        ),
        Mistake(
            "nothing is divided by l",
            _step_with(out=lambda acc, l: acc),
            "out = acc / l, once, at the end: see section 4.",
        ),
        Mistake(
            "acc is divided at every step, and once more at the end",
            _step_with(halfway=True),
            "acc stays a sum until the last step: see section 4.",
        ),
        Mistake(
            "lse is without the logarithm",
            _step_with(lse=lambda m, l: m + l),
            "lse = m + log l: see section 4.",
        ),
        Mistake(
            "lse is without m",
            _step_with(lse=lambda m, l: np.log(l)),
            "lse = m + log l: see section 4.",
        ),
        Mistake(
            "lse is m",
            _step_with(lse=lambda m, l: m),
            "lse = m + log l: see section 4.",
        ),
    ),
)


# 15.2 A block that stays


def _needed(i, step, block_q, block_k):
    return step * block_k < (i + 1) * block_q


def _asked(answer, T, S, block_q, block_k):
    """The index of the key block for each program, in the order of the walk: (tiles of queries, steps)."""
    table = []
    for i, step in np.ndindex(T // block_q, S // block_k):
        index = answer(i, step, block_q, block_k)
        try:
            whole = int(index)
        except (TypeError, ValueError, OverflowError):
            whole = None
        if whole is None or whole != index:
            raise Complaint(f"program ({i}, {step}) asks for what is no whole number")
        table.append(whole)
    return np.array(table).reshape(T // block_q, S // block_k)


def _transfers(indices):
    """How often a block moves: whenever it is not that of the step before."""
    return 1 + sum(a != b for a, b in itertools.pairwise(indices))


def _judge_blocks(table, case):
    T, S, block_q, block_k = case.arguments
    programs = list(np.ndindex(T // block_q, S // block_k))
    indices = [int(index) for index in np.ravel(table)]
    for (i, step), index in zip(programs, indices, strict=True):
        if not 0 <= index < S // block_k:
            return f"program ({i}, {step}) asks for block {index}, and there are blocks 0 to {S // block_k - 1}"
        if _needed(i, step, block_q, block_k) and index != step:
            return f"program ({i}, {step}) needs key block {step} and has {index}"
    wanted = [step for i, step in programs if _needed(i, step, block_q, block_k)]
    moved, least = _transfers(indices), _transfers(wanted)
    return None if moved == least else f"{moved} blocks are fetched on the walk, and {least} would do"


def _block_cases():
    sizes = (
        (4, 4, 2, 2),
        (8, 8, 2, 2),
        (8, 8, 4, 2),
        (8, 8, 2, 4),
        (12, 12, 6, 4),
        (12, 12, 4, 6),
        (24, 24, 3, 8),
        (4, 8, 2, 2),
        (8, 4, 2, 2),
        (512, 512, 128, 128),
    )
    return [
        Case(f"{T} queries, {S} keys, block_q={block_q}, block_k={block_k}", (T, S, block_q, block_k))
        for T, S, block_q, block_k in sizes
    ]


def _last(i, block_q, block_k):
    return ((i + 1) * block_q - 1) // block_k


BLOCKS = Exercise(
    number="15.2",
    title="A block that stays",
    outputs=("blocks",),
    cases=_block_cases,
    run=_asked,
    judge=_judge_blocks,
    tried="tiles of equal and of unequal sizes, more keys than queries and fewer",
    mistakes=(
        Mistake(
            "every block is fetched",
            lambda i, step, block_q, block_k: step,
            "Past the last block that tile i needs, let the index stay: see section 5.",
        ),
        Mistake(
            "the index stays one block too early",
            lambda i, step, block_q, block_k: min(step, max(0, _last(i, block_q, block_k) - 1)),
            "The block that holds the key of the last query is needed too: see section 5.",
        ),
        Mistake(
            "the index stays one block too late",
            lambda i, step, block_q, block_k: min(step, (i + 1) * block_q // block_k),
            "The last query of tile i is (i + 1) * block_q - 1: see section 5.",
            variants=(lambda i, step, block_q, block_k: min(step, _last(i, block_q, block_k) + 1),),
        ),
        Mistake(
            "the last block is that of the first query of the tile",
            lambda i, step, block_q, block_k: min(step, i * block_q // block_k),
            "The last query of the tile sees furthest: see section 5.",
        ),
        Mistake(
            "both kinds of tiles are taken to be of one size",
            lambda i, step, block_q, block_k: min(step, i),
            "i counts tiles of queries, step counts tiles of keys: go by positions, see section 5.",
        ),
        Mistake(
            "block_q and block_k are swapped",
            lambda i, step, block_q, block_k: min(step, _last(i, block_k, block_q)),
            "Query tile i ends at (i + 1) * block_q, and a key block has block_k keys.",
        ),
        Mistake(
            "the index of a block that is not needed is -1",
            lambda i, step, block_q, block_k: step if _needed(i, step, block_q, block_k) else -1,
            "An index map always names a block: name one that is there already, see section 5.",
        ),
        Mistake(
            "the index goes back to 0 where nothing is needed",
            lambda i, step, block_q, block_k: step if _needed(i, step, block_q, block_k) else 0,
            "The next tile begins with block 0, but after the last tile of the walk nobody wants it: let it stay.",
        ),
        Mistake(
            "min and max are mixed up",
            lambda i, step, block_q, block_k: max(step, _last(i, block_q, block_k)),
            "The index may not go beyond the last block that is needed: take the smaller, see section 5.",
        ),
        Mistake(
            "the same block stays for all steps",
            lambda i, step, block_q, block_k: _last(i, block_q, block_k),
            "Up to the last block that is needed, each step has its own: see section 5.",
        ),
    ),
)


# 15.3 Whole registers


def _registers(
    rows, columns, itemsize, *, sublanes=lambda itemsize: 32 // itemsize, lanes=128, whole=math.ceil, turned=False
):
    if turned:
        rows, columns = columns, rows
    return whole(rows / sublanes(itemsize)) * whole(columns / lanes)


def _registers_with(**options):
    return functools.partial(_registers, **options)


REGISTERS = Exercise(
    number="15.3",
    title="Whole registers",
    outputs=("registers",),
    cases=lambda: [
        Case(f"({rows}, {columns}), {itemsize} byte{'s' * (itemsize > 1)}", (rows, columns, itemsize))
        for rows, columns, itemsize in (
            (20, 100, 4),
            (8, 128, 4),
            (16, 128, 2),
            (512, 64, 2),
            (512, 128, 2),
            (512, 1, 4),
            (1, 512, 4),
            (512, 512, 4),
            (9, 129, 4),
            (17, 257, 2),
            (33, 136, 1),
            (256, 80, 2),
        )
    ],
    expected=_registers,
    tried="rows, columns and tiles, 8, 16 and 32 bits",
    mistakes=(
        Mistake(
            "the numbers are counted, and packed without gaps",
            lambda rows, columns, itemsize: math.ceil(rows * columns * itemsize / 4096),
            "A register holds a piece of 128 columns: rows and columns are filled up each by itself, see section 6.",
        ),
        Mistake(
            "a register has 8 rows of any numbers",
            _registers_with(sublanes=lambda itemsize: 8),
            "Of 16-bit numbers two rows share a sublane, so 16 rows fit: see section 6.",
        ),
        Mistake(
            "a register has 16 rows of any numbers",
            _registers_with(sublanes=lambda itemsize: 16),
            "Of 32-bit numbers a register has 8 rows: see section 6.",
        ),
        Mistake(
            "smaller numbers are packed along the lanes",
            lambda rows, columns, itemsize: math.ceil(rows / 8) * math.ceil(columns / (512 // itemsize)),
            "There are 128 lanes whatever the numbers: they are packed along the rows, see section 6.",
        ),
        Mistake(
            "rows and columns are swapped",
            _registers_with(turned=True),
            "The last axis lies along the 128 lanes: see section 6.",
        ),
        Mistake(
            "parts of registers are left out",
            _registers_with(whole=math.floor),
            "A part of a register takes a whole one: round up, see section 6.",
        ),
        Mistake(
            "nothing is rounded",
            _registers_with(whole=float),
            "A part of a register takes a whole one: round up, see section 6.",
        ),
        Mistake(
            "larger numbers have more rows",
            _registers_with(sublanes=lambda itemsize: 2 * itemsize),
            "Four bytes have 8 rows, two bytes 16: see section 6.",
        ),
    ),
)


# 15.4 What lies in VMEM


def _vmem(
    block_q,
    block_k,
    H,
    itemsize,
    *,
    lanes=128,
    buffers=2,
    scratch=1,
    of_out=1,
    of_lse=1,
    of_m=1,
    of_l=1,
    values=1,
    of_acc=4,
    logits=0,
    acc_rows="q",
):
    H = -(-H // lanes) * lanes
    streamed = itemsize * H * ((1 + of_out) * block_q + (1 + values) * block_k) + 4 * of_lse * block_q
    kept = 4 * (of_m + of_l) * block_q + of_acc * H * (block_q if acc_rows == "q" else block_k)
    return buffers * streamed + scratch * kept + 4 * logits * block_q * block_k


def _vmem_with(**options):
    return functools.partial(_vmem, **options)


VMEM = Exercise(
    number="15.4",
    title="What lies in VMEM",
    outputs=("bytes",),
    cases=lambda: [
        Case(f"block_q={q}, block_k={k}, H={H}, itemsize={e}", (q, k, H, e))
        for q, k, H, e in (
            (128, 128, 128, 2),
            (128, 128, 64, 2),
            (512, 512, 128, 2),
            (256, 512, 128, 2),
            (512, 128, 128, 4),
            (384, 256, 129, 2),
            (128, 640, 256, 4),
            (256, 128, 300, 2),
        )
    ],
    expected=_vmem,
    tried="equal and unequal blocks, head dims that fill the lanes and some that do not, 16 and 32 bits",
    mistakes=(
        Mistake(
            "each block has one buffer",
            _vmem_with(buffers=1),
            "While one block is used the next is on its way: two buffers each, see section 7.",
        ),
        Mistake(
            "scratch has two buffers as well",
            _vmem_with(scratch=2),
            "Scratch does not stream, so there is one of it: see section 7.",
        ),
        Mistake(
            "head_dim is not filled up to whole lanes",
            _vmem_with(lanes=1),
            "In VMEM a head of 64 is as wide as one of 128: see section 6.",
        ),
        Mistake(
            "the blocks of out have one buffer",
            _vmem_with(of_out=0.5),
            "A block that is done is sent while the next one is filled: see section 7.",
        ),
        Mistake(
            "out is forgotten",
            _vmem_with(of_out=0),
            "Results stream as well, outwards: see section 7.",
        ),
        Mistake(
            "the values are forgotten",
            _vmem_with(values=0),
            "Keys and values stream by, a block of each: see section 7.",
        ),
        Mistake(
            "two rows of block_q numbers are missing",
            _vmem_with(of_lse=0),
            "There is lse, in two buffers, and there are m and l, one of each: see section 7.",
        ),
        Mistake(
            "a row of block_q numbers is missing",
            _vmem_with(of_l=0),
            "There is lse, in two buffers, and there are m and l, one of each: see section 7.",
        ),
        Mistake(
            "acc has the dtype of the inputs",
            lambda q, k, H, e: _vmem(q, k, H, e, of_acc=e),
            "Sums are kept in float32, 4 bytes each: see section 7.",
        ),
        Mistake(
            "acc has as many rows as there are keys",
            _vmem_with(acc_rows="k"),
            "It belongs to the queries: H' numbers for each of them, see section 7.",
        ),
        Mistake(
            "acc is forgotten",
            _vmem_with(of_acc=0),
            "The sum of weighted values is scratch as well: see section 7.",
        ),
        Mistake(
            "the logits are counted",
            _vmem_with(logits=1),
            "They are no block and no scratch: a step makes them and uses them up, see section 7.",
            variants=(
                _vmem_with(logits=2),
                lambda q, k, H, e: _vmem(q, k, H, e, logits=e / 4),
                lambda q, k, H, e: _vmem(q, k, H, e, logits=1 + e / 4),
            ),
        ),
    ),
)


# 15.5 Axes in any order


def _shares(grid, block_of, axis):
    """Whether two programs that differ in an axis have the same block of the result."""
    owners = {}
    for program in itertools.product(*map(range, grid)):
        owners.setdefault(tuple(block_of(*program)), set()).add(program[axis])
    return any(len(places) > 1 for places in owners.values())


def _semantics(grid, block_of):
    return tuple("arbitrary" if _shares(grid, block_of, axis) else "parallel" for axis in range(len(grid)))


def _in_words(answer, grid, block_of):
    result = answer(grid, block_of)
    if result is None or isinstance(result, str) or not hasattr(result, "__iter__"):
        raise Complaint(f"a tuple of {len(grid)} words was asked for, one for each axis")
    return " ".join(map(str, result))


def _along(grid, block_of, axis, places):
    """Whether the block is the same at places of one axis, where all others are 0."""
    programs = [tuple(place if a == axis else 0 for a in range(len(grid))) for place in places]
    return len({tuple(block_of(*program)) for program in programs}) < len(programs)


def _said(is_arbitrary):
    return lambda grid, block_of: tuple(
        "arbitrary" if is_arbitrary(grid, block_of, axis) else "parallel" for axis in range(len(grid))
    )


AXES = Exercise(
    number="15.5",
    title="Axes in any order",
    outputs=("words",),
    cases=lambda: [
        Case("the case worked by hand", ((2, 3), lambda i, j: (i, 0))),
        Case("the forward kernel", ((2, 2, 3, 4), lambda b, n, i, step: (b, n, i, 0))),
        Case("the dk and dv kernel", ((2, 2, 3, 2, 4), lambda b, kv, j, head, step: (b, kv, j, 0))),
        Case("query heads on an axis, key heads in the result", ((2, 4, 3), lambda b, n, j: (b, n // 2, j))),
        Case("each program a block of its own", ((3, 2), lambda i, j: (i, j))),
        Case("one block for all", ((3, 2), lambda i, j: (0,))),
        Case("blocks along a diagonal", ((3, 4), lambda i, j: (i + j,))),
        Case("both ends of an axis share a block", ((4, 2), lambda i, j: (i % 3, j))),
        Case("a row and a column share a block", ((2, 2), lambda i, j: (i * j,))),
    ],
    run=_in_words,
    expected=lambda grid, block_of: " ".join(_semantics(grid, block_of)),
    tried="the kernels of this notebook, heads that share a block, blocks along a diagonal",
    mistakes=(
        Mistake(
            "every axis is called parallel",
            _said(lambda *_: False),
            "Programs that add to one block need its sum from the step before: see section 8.",
        ),
        Mistake(
            "every axis is called arbitrary",
            _said(lambda *_: True),
            "Programs that share neither block nor scratch may go in any order: see section 8.",
        ),
        Mistake(
            "only the last axis is called arbitrary",
            _said(lambda grid, block_of, axis: axis == len(grid) - 1),
            "An axis is arbitrary if programs along it share a block, wherever it stands: see section 8.",
        ),
        Mistake(
            "the two words are swapped",
            _said(lambda grid, block_of, axis: not _shares(grid, block_of, axis)),
            "Parallel are those axes along which nobody shares a block: see section 8.",
        ),
        Mistake(
            "only the first two programs of an axis are compared",
            _said(lambda grid, block_of, axis: _along(grid, block_of, axis, (0, 1))),
            "Programs further on may share a block as well: compare all, see section 8.",
        ),
        Mistake(
            "only the two ends of an axis are compared",
            _said(lambda grid, block_of, axis: _along(grid, block_of, axis, (0, grid[axis] - 1))),
            "Neighbours may share a block though the ends do not, such as heads of a group: see section 8.",
        ),
        Mistake(
            "programs are compared along one axis only",
            _said(lambda grid, block_of, axis: _along(grid, block_of, axis, range(grid[axis]))),
            "Two programs that differ in two axes may share a block as well: see section 8.",
        ),
    ),
)

EXERCISES = (WALK, BLOCKS, REGISTERS, VMEM, AXES)
