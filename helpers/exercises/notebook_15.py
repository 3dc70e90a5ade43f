"""The exercises of notebook 15: a step of the walk, blocks that stay, whole registers, VMEM, axes in any order."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from helpers.exercises.exercise import Case, Complaint, Exercise


def attend_step(step, last, q_ref, k_ref, v_ref, out_ref, lse_ref, m_ref, l_ref, acc_ref):
    @pl.when(step == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    m = m_ref[...]
    s = q_ref[...] @ k_ref[...].T
    m_new = jnp.maximum(m, s.max(axis=1, keepdims=True))
    alpha = jnp.exp(m - m_new)
    p = jnp.exp(s - m_new)
    m_ref[...] = m_new
    l_ref[...] = alpha * l_ref[...] + p.sum(axis=1, keepdims=True)
    acc_ref[...] = alpha * acc_ref[...] + p @ v_ref[...]

    @pl.when(step == last)
    def _():
        out_ref[...] = acc_ref[...] / l_ref[...]
        lse_ref[...] = m_ref[...] + jnp.log(l_ref[...])


class Ref:
    """A block in VMEM, float32: `ref[...]` is what stands there, `ref[...] = x` puts x there."""

    def __init__(self, name, array):
        self.name, self.shape, self.dtype, self._array = name, array.shape, np.dtype("float32"), np.float32(array)

    def __getitem__(self, index):
        return self._array[index].copy()

    def __setitem__(self, index, value):
        value, there = np.asarray(value, np.float32), self._array[index].shape
        if value.shape not in ((), there):
            raise Complaint(f"`{self.name}` takes an array of shape {there} there, yours has {value.shape}")
        self._array[index] = value

    def __array__(self, *_, **__):
        raise TypeError(f"`{self.name}` is a ref: read it with {self.name}[...]")

    __jax_array__ = __array__


def _walk(answer, q, k, v, block_q, block_k):
    """(out, lse) of a step function: all steps of a tile of queries, then those of the next. Blocks begin with NaN."""
    H, last = q.shape[1], len(k) // block_k - 1
    begun = lambda name, width: Ref(name, np.full((block_q, width), np.nan))
    scratch, results = (begun("m_ref", 1), begun("l_ref", 1), begun("acc_ref", H)), []
    for start in range(0, len(q), block_q):
        q_ref, out_ref, lse_ref = Ref("q_ref", q[start : start + block_q]), begun("out_ref", H), begun("lse_ref", 1)
        for step in range(last + 1):
            keys = slice(step * block_k, (step + 1) * block_k)
            with jax.disable_jit():  # so that pl.when takes an array for its condition
                answer(step, last, q_ref, Ref("k_ref", k[keys]), Ref("v_ref", v[keys]), out_ref, lse_ref, *scratch)
            for ref in (out_ref, lse_ref) if step < last else ():
                if not np.isnan(ref[...]).all():
                    raise Complaint(f"`{ref.name}` was written at step {step}: write it at the last one, {last}")
        results.append((out_ref[...], lse_ref[...]))
    if all(np.isnan(ref[...]).all() for ref in scratch):
        raise Complaint("nothing was put into m_ref, l_ref and acc_ref: what a step leaves for the next stands there")
    return tuple(map(np.concatenate, zip(*results, strict=True)))


def _walk_cases():
    hand = np.array([[1.0]]), np.log([[1.0], [3.0], [2.0], [8.0]]), np.array([[1.0], [2.0], [3.0], [4.0]])
    yield Case("the case worked by hand", (*hand, 1, 2))
    for number, (tiles, *heights) in enumerate([
        (2, 0, 0, 0), (2, 9, 0, 0), (2, 0, 0, 9), (2, 200, 0, -20), (2, 500, 501, 499), (2, -501, -499, -500), (3, 0),
    ], start=1):  # fmt: skip
        random = np.random.default_rng([15, 1, number])
        q, (k, v) = random.standard_normal((4 * tiles, 8)), random.standard_normal((2, 5 * len(heights), 8))
        q[:, 0], k[:, 0] = 1, np.repeat(heights, 5)
        yield Case(f"{tiles} tiles of queries, logits of the steps near {str(heights)[1:-1]}", (q, k, v, 4, 5))
    q, (k, v) = random.standard_normal((4, 8)), random.standard_normal((2, 10, 8))
    q[:, 0], k[:, 0] = (1, -1, 1, -1), np.tile((0, 150, 60, 90, 30), 2)
    yield Case("1 tile of queries, 2 steps, queries and keys of very different logits", (q, k, v, 4, 5))
    # Whole numbers, which float32 holds: m may begin with no finite number.
    q, k = np.eye(1, 8).repeat(4, axis=0), np.eye(1, 8) * (-1e5 + np.arange(10.0)[:, None] % 4)
    yield Case("1 tile of queries, 2 steps, logits near -100000", (q, k, v, 4, 5))


WALK = Exercise(
    attend_step, "A step of the walk", outputs=("out", "lse"), cases=_walk_cases, run=_walk, tolerance=1e-4,
).with_mistakes(
    ("scratch is set at every step, or the new m not written back", "step == 0", "True",
     "Set it at step 0 alone, and write m, l and acc back in each: see section 2."),
    ("the result is written before the last tile is in it",
     ("    m =", "acc_ref[...] / l_ref[...]", "m_ref[...] + jnp.log(l_ref[...])"),
     ("    l, acc = l_ref[...], acc_ref[...]\n    m =", "acc / l", "m + jnp.log(l)"),
     "Update m, l and acc first, then write: see section 4."),
    ("m is overwritten before alpha is made of it", ("alpha =", "(m - m"),
     ("m_ref[...] = m_new\n    alpha =", "(m_ref[...] - m"),
     "A ref forgets: read the old m before you write the new one, or alpha is 1, see section 4."),
)  # fmt: skip


def keys_in_place(i, step, block_q, block_k):
    last = ((i + 1) * block_q - 1) // block_k
    return min(step, last)


def _asked(answer, T, S, block_q, block_k):
    """The index of the key block for each program, in the order of the walk: (tiles of queries, steps)."""
    table = np.array([[answer(i, j, block_q, block_k) for j in range(S // block_k)] for i in range(T // block_q)])
    if table.ndim > 2 or table.dtype.kind not in "iuf" or (table % 1 != 0).any():
        raise Complaint("an index map names one block, by a whole number: return that alone")
    return table.astype(int)


def _judge_blocks(table, case):
    (_, _, block_q, block_k), wanted = case.arguments, []
    for (i, step), index in np.ndenumerate(table):
        if step * block_k < (i + 1) * block_q:
            wanted.append(step)
            if index != step:
                return f"program ({i}, {step}) needs key block {step} and has {index}"
    # A block moves whenever it is not that of the step before.
    moved, least = (1 + sum(a != b for a, b in itertools.pairwise(blocks)) for blocks in (np.ravel(table), wanted))
    return None if moved == least else f"{moved} blocks are fetched on the walk, and {least} would do"


BLOCKS = Exercise(keys_in_place, "A block that stays", outputs=("blocks",), run=_asked, judge=_judge_blocks).with_cases(
    "T S block_q block_k", (4, 4, 2, 2), (8, 8, 2, 2), (8, 8, 4, 2), (8, 8, 2, 4), (12, 12, 6, 4), (12, 12, 4, 6),
    (24, 24, 3, 8), (4, 8, 2, 2), (8, 4, 2, 2), (512, 512, 128, 128),
).with_mistakes(
    ("the index stays one block too early", "last)", "max(0, last - 1))",
     "The block that holds the key of the last query is needed too: see section 5."),
    ("the index goes back to 0 where nothing is needed", "min(step, last)", "step if step <= last else 0",
     "The next tile begins with block 0, but after the last tile of the walk nobody wants it: let it stay."),
)  # fmt: skip


def registers(rows, columns, itemsize):
    height = 32 // itemsize
    return -(-rows // height) * -(-columns // 128)


REGISTERS = Exercise(registers, "Whole registers", outputs=("registers",)).with_cases(
    "rows columns itemsize", (20, 100, 4), (8, 128, 4), (16, 128, 2), (512, 64, 2), (512, 128, 2), (512, 1, 4),
    (1, 512, 4), (512, 512, 4), (9, 129, 4), (17, 257, 2), (33, 136, 1), (256, 80, 2),
).with_mistakes(
    ("the numbers are counted, and packed without gaps", "-(-rows // height) * -(-columns // 128)",
     "-(-rows * columns * itemsize // 4096)",
     "A register holds a piece of 128 columns: rows and columns are filled up each by itself, see section 6."),
    ("a register has 8 rows of any numbers", "32 // itemsize", "8", "Of 16-bit numbers it has 16 rows: see section 6."),
    ("smaller numbers are packed along the lanes", ("32 // itemsize", "// 128"), ("8", "// (512 // itemsize)"),
     "There are 128 lanes whatever the numbers: they are packed along the rows, see section 6."),
)  # fmt: skip


def vmem_bytes(block_q, block_k, H, itemsize):
    lanes = -(-H // 128) * 128
    row = 4 * block_q
    streams = itemsize * lanes * (2 * block_q + 2 * block_k) + row
    scratch = 2 * row + 4 * lanes * block_q
    return 2 * streams + scratch


VMEM = Exercise(vmem_bytes, "What lies in VMEM", outputs=("bytes",)).with_cases(
    "block_q block_k H itemsize", (128, 128, 128, 2), (128, 128, 64, 2), (512, 512, 128, 2), (256, 512, 128, 2),
    (512, 128, 128, 4), (384, 256, 129, 2), (128, 640, 256, 4), (256, 128, 300, 2),
).with_mistakes(
    ("a block has one buffer", "2 * streams", "streams",
     "The next block comes while this one is used, so each has two buffers: see section 5."),
    ("heads are not filled up to whole lanes", "-(-H // 128) * 128", "H", "A row takes whole lanes: see section 7."),
    ("scratch has two buffers as well", "streams + scratch", "(streams + scratch)",
     "Scratch does not stream, so there is one of it: see section 7."),
    ("acc has the dtype of the inputs", "4 * lanes", "itemsize * lanes", "Its sums are float32: see section 7."),
    ("logits and rounded weights are counted", " + scratch", " + scratch + (4 + itemsize) * block_q * block_k",
     "They are no block and no scratch: a step makes them and uses them up, see section 7."),
)  # fmt: skip


def semantics(grid, block_of):
    writers = {}
    for program in np.ndindex(*grid):
        writers.setdefault(tuple(block_of(*program)), []).append(program)
    words = []
    for axis in range(len(grid)):
        places = [{program[axis] for program in group} for group in writers.values()]
        shared = any(len(found) > 1 for found in places)
        words.append("arbitrary" if shared else "parallel")
    return tuple(words)


def _in_words(answer, grid, block_of):
    result = answer(grid, block_of)
    if result is None or isinstance(result, str) or not hasattr(result, "__iter__"):
        raise Complaint(f"a tuple of {len(grid)} words was asked for, one for each axis")
    return " ".join(map(str, result))


AXES = Exercise(semantics, "Axes in any order", outputs=("words",), run=_in_words).with_cases(
    "grid block_of", ("the case worked by hand", (2, 3), lambda i, j: (i, 0)),
    ("the forward kernel", (2, 2, 3, 4), lambda b, n, i, step: (b, n, i, 0)),
    ("the dk and dv kernel", (2, 2, 3, 2, 4), lambda b, kv, j, head, step: (b, kv, j, 0)),
    ("query heads on an axis, key heads in the result", (2, 4, 3), lambda b, n, j: (b, n // 2, j)),
    ("each program a block of its own", (3, 2), lambda i, j: (i, j)),
    ("one block for all", (3, 2), lambda i, j: (0,)),
    ("blocks along a diagonal", (3, 4), lambda i, j: (i + j,)),
    ("both ends of an axis share a block", (4, 2), lambda i, j: (i % 3, j)),
    ("a row and a column share a block", (2, 2), lambda i, j: (i * j,)),
    ("one block along each axis", (3, 2), lambda i, j: (0, 0) if i == 0 else (1, j)),
    ("an axis of one program", (1, 3), lambda b, i: (b, i)),
).with_mistakes(
    ("every axis is called parallel", "any(len(found) > 1 for found in places)", "False",
     "Programs that add to one block need its sum from the step before: see section 8."),
    ("only the last axis is called arbitrary", "any(len(found) > 1 for found in places)", "axis == len(grid) - 1",
     "An axis is arbitrary if programs along it share a block, wherever it stands: see section 8."),
    ("only the first two programs of an axis are compared", "in group}",
     "in group if program[axis] == sum(program) < 2}",
     "Programs further on may share a block as well: compare all, see section 8."),
)  # fmt: skip

EXERCISES = (WALK, BLOCKS, REGISTERS, VMEM, AXES)
