"""Find the fastest tiles of the portable kernels on this machine's GPU, and record them for it.

    python -m helpers.measure.tune

Every candidate is compiled, compared with the result of the default tiles, and timed at T = 4096; the
fastest are timed once more, for longer. A candidate that the compiler refuses (too much shared memory,
say) or that computes something else is passed over. Writes helpers/measure/results/<card>_tiles.json,
which `portable.tiles` reads.
"""

import argparse
import functools
import itertools
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from helpers.attention.portable import backward, forward
from helpers.attention.portable.tiles import DEFAULTS, Tiles
from helpers.attention.problem import check_call
from helpers.measure import results
from helpers.measure.benchmark import Machine, gpu_or_reason, random_arrays
from helpers.measure.timing import Program, time_together

T, TOKENS, WIDTH = 4096, 16384, 2048
COMPILERS = 12  # programs compiled at the same time


def candidates(kernel, itemsize, head_padded):
    """The `Tiles` worth trying: what fits registers and shared memory only the compiler knows."""
    if itemsize == 2 and head_padded <= 128:
        sides, warps, stages = [32, 64, 128], [4, 8], [2, 3]
    elif itemsize == 2:
        sides, warps, stages = [32, 64], [4, 8], [2, 3]
    else:
        sides, warps, stages = [32, 64, 128] if head_padded == 64 else [32, 64], [4], [1, 2]
    return [Tiles(*choice) for choice in itertools.product(sides, sides, warps, stages)]


def kernels(call, out, lse, dout, dlse):
    """{kernel: (function of (tiles, *arrays), arrays)} for a checked call and its residuals."""
    problem = call.problem
    delta = backward._delta(problem, out, lse, dout, dlse, DEFAULTS["dq", problem.dtype.itemsize][64], False)
    arrays = (call.query, call.key, call.value)
    residuals = (*arrays, dout, lse, delta)

    def run_forward(tiles, *arrays):
        return forward.forward(check_call(*arrays, is_causal=problem.band.right == 0), **tiles._asdict())

    def run_dkv(tiles, *residuals):
        return backward._dkv(problem, (*residuals, None, None), tiles, False)

    def run_dq(tiles, *residuals):
        *residuals, dlse = residuals
        return backward._dq(problem, (*residuals, None, None), dlse, tiles, False)

    return {"forward": (run_forward, arrays), "dkv": (run_dkv, residuals), "dq": (run_dq, (*residuals, dlse))}


def compile_all(function, choices, arrays):
    """{choice: compiled function, or None where the compiler refuses}."""

    def one(choice):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return jax.jit(functools.partial(function, choice)).lower(*arrays).compile()
        except Exception:
            return None

    with ThreadPoolExecutor(COMPILERS) as pool:
        return dict(zip(choices, pool.map(one, choices), strict=True))


def agree(mine, right):
    """Whether two results are the same up to the rounding of another order of summation."""
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True)
    error = lambda a, b: jnp.linalg.norm(jnp.float32(a) - jnp.float32(b)) / jnp.linalg.norm(jnp.float32(b))
    return all(float(error(a, b)) < 1e-2 for a, b in pairs)


def times_of(programs, finalists=5, time_programs=time_together):
    """{tiles: milliseconds}: a short look at all, and a longer one at the fastest."""
    by_wall = {"device_samples": lambda program: []}
    times = time_programs(programs, rounds=3, sample_ms=4.0, **by_wall)
    fastest = sorted(programs, key=lambda tiles: times[tiles].wall_ms)[:finalists]
    times |= time_programs({tiles: programs[tiles] for tiles in fastest}, **by_wall)
    return {tiles: time.wall_ms for tiles, time in times.items()}


def tune(head_dims=(64, 128, 256), dtypes=(jnp.bfloat16, jnp.float32), progress=sys.stderr):
    """(tiles, sweep): rows of the table, and rows of everything tried, as `results` describes them."""
    table, sweep = [], []
    cases = list(itertools.product(dtypes, head_dims, (False, True)))
    for dtype, H, is_causal in tqdm(cases, "tuning", file=progress):
        shape = (TOKENS // T, T, WIDTH // H, H)
        *arrays, dout = random_arrays([shape] * 4, dtype)
        call = check_call(*arrays, is_causal=is_causal)
        out, lse = jax.jit(lambda *a, c=is_causal: forward.forward(check_call(*a, is_causal=c)))(*arrays)
        for kernel, (function, inputs) in kernels(call, out, lse, dout, jnp.zeros_like(lse)).items():
            itemsize = jnp.dtype(dtype).itemsize
            default = DEFAULTS[kernel, itemsize][H]
            choices = list(dict.fromkeys([default, *candidates(kernel, itemsize, H)]))
            compiled = compile_all(function, choices, inputs)
            right = compiled[default](*inputs)
            programs = {
                tiles: Program(program, [inputs])
                for tiles, program in compiled.items()
                if program is not None and agree(program(*inputs), right)
            }
            times = times_of(programs)
            where = {"kernel": kernel, "itemsize": itemsize, "head_padded": H, "is_causal": is_causal}
            sweep += [where | tiles._asdict() | {"ms": round(ms, 4)} for tiles, ms in times.items()]
            best = min(times, key=times.get)
            table.append(where | best._asdict())
    return table, sweep


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.measure.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--sixteen-bit", action="store_true", help="leave float32 out")
    parser.add_argument("--commit", help="what to record as the commit, where git cannot say")
    options = parser.parse_args(arguments)
    reason = gpu_or_reason()
    if reason:
        print(f"Nothing to tune: {reason}.")
        return 1
    np.random.seed(0)
    dtypes = (jnp.bfloat16,) if options.sixteen_bit else (jnp.bfloat16, jnp.float32)
    table, sweep = tune(tuple(options.head_dims), dtypes)
    machine = Machine.here(options.commit)
    path = results.RESULTS / f"{results.slug(machine.card)}_tiles.json"
    results.write(machine.header() | {"tiles": table, "sweep": sweep}, path, results.TILES_FILE)
    for row in table:
        print(" ".join(f"{value!s:>9}" for value in row.values()))
    print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
