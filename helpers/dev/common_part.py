"""How exact are gradients where keys and values have a part in common? Measured on this machine's GPU, and recorded.

    python -m helpers.dev.common_part        (--small: naive and portable at T = 64, for any machine, not recorded)

With delta = rowsum(out * do), ds = p (dp - delta) and dq = scale ds k, an error of delta returns in dq, times the mean
of the keys that the row sees. So the keys and the values of each case are normal random numbers, with standard
deviation 1, plus a part of this size in units of it:

    one mean     the same vector for all keys (another one for all values)
    documents    a vector for each of four runs of keys
    drift        from one vector to another, in a straight line

Errors are relative, by float64: |mine - right| / |right| of the whole array. Where few keys are seen dq is a small
difference of large terms, or 0. So short sequences are judged by these terms too, of_terms = |mine - right| / |the
same with delta = 0|. Writes helpers/instruments/records/<gpu>_common_part.json, described in `results`.
"""

import argparse
import functools
import itertools
import os
import sys
import time
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np

from helpers.dev.benchmark import Case, inputs_of
from helpers.dev.measuring import (
    COMPILERS,
    Machine,
    Notes,
    both_passes,
    compile_together,
    gpu_or_reason,
    is_hopper,
    one_stage,
    reason_of,
)
from helpers.instruments import results
from helpers.instruments.implementations import OF_JAX

HEADS = 2
KINDS = ("one mean", "documents", "drift")
MEANS = (0, 1, 4, 10, 30)
DTYPES = ("bfloat16", "float16")
NAMES = ("hopper", "portable", "cudnn", "naive")
GRADIENTS = ("dq", "dk", "dv")
MOST = {0: 0.02, 1: 0.02, 4: 0.02, 10: 0.02, 30: 0.1}  # error of dq by mean
OVER_NAIVE = 2.0  # times the error of the naive computation
OF_TERMS = 2.0**-14  # what short sequences may have where dq is as good as 0


def case_of(T, S, H, dtype, is_causal):
    return Case(1, T, S, HEADS, HEADS, H, dtype, is_causal)


GRID = [
    case_of(T, T, H, dtype, is_causal)
    for T, H, is_causal, dtype in itertools.product((512, 4096), (64, 128), (True, False), DTYPES)
]
SHORT = [
    case_of(T, S, 64, dtype, is_causal)
    for T, S in ((1, 1), (2, 1), (1, 2), (7, 5), (64, 64), (100, 333), (4096, 1), (1, 4096))
    for is_causal in ((False, True) if min(T, S) > 1 else (False,))
    for dtype in DTYPES
]


@functools.cache
def _spread(T, S, H):
    """(query, key, value, dout) of a head, without any part in common, float32."""
    random = np.random.default_rng(T + S + H)
    return [random.standard_normal((1, length, HEADS, H), np.float32) for length in (T, S, S, T)]


def arrays_of(case, kind, mean):
    """(query, key, value, dout), with a part of this size that keys, and values, have in common."""
    query, key, value, dout = _spread(case.T, case.S, case.H)
    vectors = np.random.default_rng(case.H).standard_normal((2, 4, HEADS, case.H), np.float32)
    along = np.arange(case.S) / case.S

    def shared(vectors):
        if kind == "one mean":
            return vectors[:1]
        if kind == "documents":
            return vectors[(4 * along).astype(int)]
        along_line = along[:, None, None].astype(np.float32)
        return (1 - along_line) * vectors[0] + along_line * vectors[1]

    arrays = query, key + mean * shared(vectors[0]), value + mean * shared(vectors[1]), dout
    return [jnp.asarray(array.astype(case.dtype)) for array in arrays]


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_gpu_autotune_level": 0})
def right_answer(is_causal, query, key, value, dout):
    """dq, dk and dv (B, length, N, H), and what dq would be with delta = 0; float64, with 64 bits enabled."""
    q, k, v, do = (jnp.swapaxes(array.astype(jnp.float64), 1, 2) for array in (query, key, value, dout))
    scale = q.shape[-1] ** -0.5
    s = scale * (q @ k.mT)
    if is_causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    p = jax.nn.softmax(s)
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    found = scale * (ds @ k), scale * (ds.mT @ q), p.mT @ do, scale * ((p * dp) @ k)
    return tuple(jnp.swapaxes(array, 1, 2) for array in found)


def right_of(case, arrays):
    """`right_answer` of a case."""
    with jax.enable_x64(True):
        return right_answer(case.is_causal, *(jnp.asarray(array, jnp.float32) for array in arrays))


def errors_of(found, right):
    """{"dq", "dk", "dv": relative error, or None where the right answer is 0; "of_terms": see the top}."""
    *right, terms = (np.asarray(array, np.float64) for array in right)
    norm = lambda array: float(np.linalg.norm(array))
    errors = [norm(np.asarray(mine, np.float64) - one) for mine, one in zip(found, right, strict=True)]
    rounded = lambda error, size: float(f"{error / size:.4g}")
    entry = {
        name: rounded(error, norm(one)) if norm(one) > 1e-12 * norm(terms) else None
        for name, one, error in zip(GRADIENTS, right, errors, strict=True)
    }
    return entry | {"of_terms": rounded(errors[0], norm(terms))}


def lower_gradients(case, name):
    """All three gradients by an implementation of `implementations`, lowered."""
    return one_stage(both_passes(OF_JAX[name](case)), jax.eval_shape(lambda: inputs_of(case)))


def rows_of(case, programs, kinds, means, note):
    """One row, see `results.COMMON_PART`, for each kind and mean. programs: {(case, implementation): [program]}."""
    rows = []
    for kind, mean in itertools.product(kinds, means):
        if mean == 0 and kind != kinds[0]:
            continue  # the same numbers
        arrays = arrays_of(case, kind, mean)
        right, errors = right_of(case, arrays), {}
        for (one, name), (program,) in programs.items():
            try:
                errors |= {name: errors_of(program(*arrays), right)} if one == case else {}
            except Exception as error:
                note(f"{case.name} S{case.S}: {name}: {reason_of(error)}")
        about = {name: value for name, value in asdict(case).items() if name in ("T", "S", "H", "dtype", "is_causal")}
        rows.append(about | {"kind": kind, "mean": mean, "errors": errors})
    return rows


def worst(rows, name, which="dq"):
    """The largest error of an implementation in rows, and the largest as a multiple of the naive one's."""
    pairs = [(row["errors"][name][which], row["errors"]["naive"][which]) for row in rows if name in row["errors"]]
    pairs = [pair for pair in pairs if None not in pair] or [(float("nan"), float("nan"))]
    mine, naive = np.array(pairs).T
    return mine.max(), (mine / np.maximum(naive, 1e-30)).max()  # NaN where one is


def is_met(row, name, is_short):
    """Whether dq of an implementation is as exact as it should be."""
    if not (name in row["errors"] and "naive" in row["errors"]):
        return False
    mine, naive = row["errors"][name], row["errors"]["naive"]
    if is_short and mine["of_terms"] <= OF_TERMS:
        return True
    most = np.inf if is_short else MOST.get(row["mean"], 0.1)
    return mine["dq"] is not None and mine["dq"] <= min(most, OVER_NAIVE * naive["dq"])


def verdicts(rows, short, names):
    """(lines of a report, whether all targets of the first of names are met): by dtype and mean, or by lengths."""
    lines, all_met = (
        ["worst errors of dq, dk and dv, and of dq as a multiple of the naive one's in the same case"],
        True,
    )
    for fields, some in ((("dtype", "mean"), rows), (("T", "S", "is_causal", "dtype"), short)):
        for group in dict.fromkeys(tuple(row[field] for field in fields) for row in some):
            own = [row for row in some if tuple(row[field] for field in fields) == group]
            met = all(is_met(row, names[0], some is short) for row in own)
            cells = []
            for name in (name for name in names if any(name in row["errors"] for row in own)):
                errors = " ".join(f"{worst(own, name, which)[0]:.2g}" for which in GRADIENTS)
                cells.append(f"{name} {errors} ({worst(own, name)[1]:.2f})")
            label = " ".join(f"{field} {value}" for field, value in zip(fields, group, strict=True))
            lines.append(f"{label:45} {'met' if met else 'MISSED':6} {', '.join(cells)}")
            all_met &= met
    return lines, all_met


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.dev.common_part", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="naive and portable at T = 64, not recorded")
    parser.add_argument("--commit", help="what to record as the commit, where git cannot say")
    options = parser.parse_args(arguments)
    began, note = time.perf_counter(), Notes()
    grid, short, names, processes = GRID, SHORT, NAMES, COMPILERS
    if options.small:
        grid, short, names, processes = [case_of(64, 64, 64, "bfloat16", True)], SHORT[:4], ("portable", "naive"), 0
    elif reason := gpu_or_reason() or (not is_hopper() and "the Hopper kernels need a Hopper GPU"):
        print(f"Nothing to measure: {reason}.")
        return 1
    machine = Machine.here(options.commit)
    pairs = [*itertools.product(grid, names), *itertools.product(short, (names[0], "naive"))]
    parts = {pair: functools.partial(lower_gradients, *pair) for pair in pairs}
    programs = compile_together(parts, note, processes)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    rows = [row for case in grid for row in rows_of(case, programs, KINDS, MEANS, note)]
    short_rows = [row for case in short for row in rows_of(case, programs, ("one mean",), (4, 10, 30), note)]
    lines, all_met = verdicts(rows, short_rows, names)
    print(*lines, f"{'all targets met' if all_met else 'NOT all targets met'}", sep="\n")
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    if options.small:
        return 0
    path = results.RESULTS / f"{results.slug(machine.card)}_common_part.json"
    found = machine.header() | {"heads": HEADS, "rows": rows, "short": short_rows, "notes": note}
    return results.write_or_say(found, path, results.COMMON_PART_FILE)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes that compile share the memory
    sys.exit(main())
