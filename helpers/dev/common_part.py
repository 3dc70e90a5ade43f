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
from tqdm import tqdm

from helpers.attention.device import compute_capability
from helpers.dev.benchmark import (
    COMPILERS,
    Case,
    Machine,
    both_passes,
    compile_together,
    gpu_or_reason,
    inputs_of,
    lowered,
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


def right_answer(xp, is_causal, query, key, value, dout):
    """dq, dk and dv (B, length, N, H), and what dq would be with delta = 0; float64. xp: NumPy, or JAX with 64 bits."""
    q, k, v, do = (xp.swapaxes(array.astype(xp.float64), 1, 2) for array in (query, key, value, dout))
    scale = q.shape[-1] ** -0.5
    transposed = lambda array: xp.swapaxes(array, -1, -2)
    s = scale * (q @ transposed(k))
    if is_causal:
        s = xp.where(xp.tril(xp.ones(s.shape[-2:], bool)), s, -np.inf)
    p = xp.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    dp = do @ transposed(v)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    found = scale * (ds @ k), scale * (transposed(ds) @ q), transposed(p) @ do, scale * ((p * dp) @ k)
    return tuple(xp.swapaxes(array, 1, 2) for array in found)


# Compiled once for each shape and mask, in the form of `benchmark.right_answer`.
_right_by_jax = jax.jit(
    functools.partial(right_answer, jnp), static_argnums=0, compiler_options={"xla_gpu_autotune_level": 0}
)


def right_of(case, arrays):
    """`right_answer`, by the GPU where the tables are large."""
    if case.T * case.S < 2**18:
        return right_answer(np, case.is_causal, *(np.asarray(array, np.float32) for array in arrays))
    with jax.enable_x64(True):
        return _right_by_jax(case.is_causal, *(array.astype(jnp.float32) for array in arrays))


@jax.jit
def _sizes(found, right):
    """The norms of dq, dk and dv, and those of their errors."""
    norm = lambda array: jnp.sqrt((array.astype(jnp.float64) ** 2).sum())
    return [norm(one) for one in right], [norm(a.astype(jnp.float64) - b) for a, b in zip(found, right, strict=True)]


def errors_of(found, right):
    """{"dq", "dk", "dv": relative error, or None where the right answer is 0; "of_terms": see the top}."""
    *right, terms = right
    with jax.enable_x64(True):
        sizes, errors = jax.device_get(_sizes(list(found), [jnp.asarray(one) for one in right]))
        terms = float(jnp.linalg.norm(jnp.asarray(terms).reshape(-1)))
    least = 1e-12 * terms
    rounded = lambda error, size: float(f"{float(error) / float(size):.4g}")
    entry = {
        name: rounded(error, size) if size > least else None
        for name, size, error in zip(GRADIENTS, sizes, errors, strict=True)
    }
    return entry | {"of_terms": rounded(errors[0], terms)}


def lower_gradients(name, case):
    """All three gradients by an implementation of `implementations`, lowered."""
    return [lowered(both_passes(OF_JAX[name](case)), *jax.eval_shape(lambda: inputs_of(case)))]


def programs_of(pairs, note, processes=0):
    """{(case, name): compiled program} of pairs of a case and a name; what can't be compiled is noted."""
    parts = {(case, name): functools.partial(lower_gradients, name, case) for case, name in pairs}
    complain = lambda part, error: note(f"{part[0].name} S{part[0].S}: {part[1]}: {reason_of(error)}")
    bar = functools.partial(tqdm, desc="compiling", mininterval=5)
    return {part: found[0] for part, found in compile_together(parts, complain, processes, bar).items()}


def rows_of(case, programs, kinds, means, note):
    """One row, see `results.COMMON_PART`, for each kind and mean. programs: {implementation: compiled program}."""
    rows = []
    for kind, mean in itertools.product(kinds, means):
        if mean == 0 and kind != kinds[0]:
            continue  # the same numbers
        arrays = arrays_of(case, kind, mean)
        right, errors = right_of(case, arrays), {}
        for name, program in programs.items():
            try:
                errors[name] = errors_of(program(*arrays), right)
            except Exception as error:
                note(f"{case.name} S{case.S}: {name}: {reason_of(error)}")
        about = {name: value for name, value in asdict(case).items() if name in ("T", "S", "H", "dtype", "is_causal")}
        rows.append(about | {"kind": kind, "mean": mean, "errors": errors})
    return rows


def worst(rows, name, which="dq"):
    """The largest error of an implementation in rows, and the largest as a multiple of the naive one's."""
    pairs = [(row["errors"][name][which], row["errors"]["naive"][which]) for row in rows if name in row["errors"]]
    pairs = [pair for pair in pairs if None not in pair]
    if not pairs:
        return float("nan"), float("nan")
    mine, naive = np.array(pairs).T
    return mine.max(), (mine / np.maximum(naive, 1e-30)).max()  # NaN where one is


def verdicts(rows, short, names):
    """(lines of a report, whether all targets of the first of names are met)."""
    lines, all_met = [], True
    cases = sorted({(row["dtype"], row["mean"]) for row in rows})
    for which in GRADIENTS:
        lines.append(f"worst error of {which} (as a multiple of the naive one's in the same case)")
        for dtype, mean in cases:
            some = [row for row in rows if (row["dtype"], row["mean"]) == (dtype, mean)]
            cells = [
                f"{name} {error:8.2g} ({over:5.2f})" for name in names for error, over in [worst(some, name, which)]
            ]
            line = f"{dtype:9} m {mean:3}: " + ", ".join(cells)
            if which == "dq":
                error, over = worst(some, names[0])
                met = bool(error <= MOST.get(mean, 0.1) and over <= OVER_NAIVE)
                all_met &= met
                line += "  met" if met else f"  MISSED: at most {MOST.get(mean, 0.1)} and {OVER_NAIVE} x naive"
            lines.append(line)
    if short:
        lines.append("short sequences: the worst error of dq, as a multiple of naive's, and as a part of its terms")
    for case in dict.fromkeys((row["T"], row["S"], row["is_causal"], row["dtype"]) for row in short):
        some = [row for row in short if (row["T"], row["S"], row["is_causal"], row["dtype"]) == case]
        found = [(row["errors"].get(names[0]), row["errors"].get("naive")) for row in some]
        met = all(
            mine
            and naive
            and (mine["of_terms"] <= OF_TERMS or (mine["dq"] is not None and mine["dq"] <= OVER_NAIVE * naive["dq"]))
            for mine, naive in found
        )
        all_met &= met
        error, over = worst(some, names[0])
        of_terms = [
            max((row["errors"][n]["of_terms"] for row in some if n in row["errors"]), default=float("nan"))
            for n in (names[0], "naive")
        ]
        T, S, is_causal, dtype = case
        lines.append(
            f"({T}, {S}) {'causal' if is_causal else 'full'} {dtype}: {names[0]} {error:.2g} ({over:.2f} x naive), "
            f"of terms {of_terms[0]:.1e}, naive {of_terms[1]:.1e}  {'met' if met else 'MISSED'}"
        )
    return lines, all_met


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.dev.common_part", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="naive and portable at T = 64, not recorded")
    parser.add_argument("--commit", help="what to record as the commit, where git cannot say")
    options = parser.parse_args(arguments)
    began, notes = time.perf_counter(), []

    def note(text):
        if text not in notes:
            notes.append(text)
            print(f"  ! {text}", flush=True)

    if options.small:
        grid, short, names = [case_of(64, 64, 64, "bfloat16", True)], SHORT[:4], ("portable", "naive")
    else:
        reason = gpu_or_reason() or (compute_capability() != (9, 0) and "the Hopper kernels need a Hopper GPU")
        if reason:
            print(f"Nothing to measure: {reason}.")
            return 1
        grid, short, names = GRID, SHORT, NAMES
    machine = Machine.here(options.commit)
    print(machine.card, *(f"{name} {version}" for name, version in machine.versions.items()), sep=" · ", flush=True)
    processes = 0 if options.small else COMPILERS
    pairs = [(case, name) for case in grid for name in names]
    pairs += [(case, name) for case in short for name in (names[0], "naive")]
    programs = programs_of(pairs, note, processes)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    of_case = lambda case: {name: program for (one, name), program in programs.items() if one == case}
    rows = [row for case in grid for row in rows_of(case, of_case(case), KINDS, MEANS, note)]
    print(f"long ones after {time.perf_counter() - began:.0f} s", flush=True)
    short_rows = [row for case in short for row in rows_of(case, of_case(case), ("one mean",), (4, 10, 30), note)]
    lines, all_met = verdicts(rows, short_rows, names)
    print(*lines, f"{'all targets met' if all_met else 'NOT all targets met'}", sep="\n")
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    if options.small:
        return 0
    path = results.RESULTS / f"{results.slug(machine.card)}_common_part.json"
    found = asdict(machine) | {"heads": HEADS, "rows": rows, "short": short_rows, "notes": notes}
    return results.write_or_say(found, path, results.COMMON_PART_FILE)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes that compile share the memory
    sys.exit(main())
