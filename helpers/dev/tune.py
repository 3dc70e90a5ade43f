"""Find the fastest tiles of the kernels on this machine's GPU, and record them for it.

    python -m helpers.dev.tune        (make gpu-tune)

The portable kernels are tuned at T = 4096, those for few queries at `DECODED`, and on a Hopper GPU the Hopper
kernels at each of `hopper.table.LENGTHS`. Every candidate that shared memory holds is compiled, compared with
the result of the default tiles, and timed; the fastest are timed once more, for longer (those for few queries
once, by the device's clock). A candidate that the compiler refuses or that computes something else is passed
over. Writes helpers/attention/tuned/<gpu>.json, which the kernels read through `attention.tables`.
"""

import argparse
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from helpers.attention import tables
from helpers.attention.hopper import backward as hopper_backward
from helpers.attention.hopper import backward_schedule
from helpers.attention.hopper import forward as hopper_forward
from helpers.attention.hopper import serve as hopper
from helpers.attention.hopper.table import LENGTHS
from helpers.attention.hopper.warpgroup import NUM_SMS
from helpers.attention.portable import backward, forward
from helpers.attention.portable.decode import DEFAULTS as DECODE_DEFAULTS
from helpers.attention.portable.decode import Launch, decode, splits_of
from helpers.attention.portable.tiles import DEFAULTS, Tiles, fitting, this_gpu
from helpers.attention.problem import check_call, check_paged_call
from helpers.dev import decoding
from helpers.dev.measuring import Machine, compile_together, gpu_or_reason, is_hopper, one_stage, random_arrays
from helpers.instruments import results
from helpers.instruments.timing import Program, kernel_times, rotation, time_together

T, TOKENS, WIDTH = 4096, 16384, 2048
NOISE = 1.01  # the default stays where nothing is faster than by this
HEAD_DIMS, DTYPES = (64, 128, 256), (jnp.bfloat16, jnp.float32)
PARTS = {  # of the file, see `results`
    "portable": ("tiles", "sweep"),
    "decode": ("decode", "decode_sweep"),
    "hopper": ("hopper", "hopper_sweep"),
}
DECODED = ((1, 8192), (8, 8192), (1, 131072))  # batch entries and keys, for 8 key heads
PAGE = 16  # keys of a page
QUERIES = {16: 1, 32: 8, 64: 16}  # by rows of a tile, for 4 query heads to each key head


def arrays_of(T, H, dtype):
    """Query, key, value and dout of TOKENS tokens in sequences of T."""
    return random_arrays([(TOKENS // T, T, WIDTH // H, H)] * 4, dtype)


def candidates(kernel, itemsize, head_padded):
    """The `Tiles` worth trying: what fits registers only the compiler knows."""
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


def hopper_forward_candidates(H):
    """The `forward.Tiles` worth trying for a padded head_dim, of those that fit shared memory and registers."""
    block_k_stages_warpgroups = {
        64: [(128, 2, 3), (128, 4, 3), (128, 4, 2), (64, 4, 3), (64, 4, 4)],
        128: [(128, 2, 2), (64, 2, 3)],
        256: [(64, 2, 2)],
    }
    ahead = H <= 128  # SMEM for two tiles of queries
    programs_guess = [(NUM_SMS, True), (NUM_SMS, False), (None, True)]
    choices = itertools.product(block_k_stages_warpgroups[H], programs_guess)
    return [hopper_forward.Tiles(64, *shape, programs, ahead, guess) for shape, (programs, guess) in choices]


def hopper_backward_candidates(H):
    """Pairs of tiles as `backward_schedule.forms` has them: those, fused with each choice it has, and some others."""
    own = backward_schedule.Tiles
    dkv = {64: [own(128, 128, 2), own(64, 192, 3, 3)], 128: [own(64, 128, 2), own(64, 128, 3)]}
    dq = {
        64: [own(128, 128, 2), own(128, 128, 3), own(192, 64, 3, 3)],
        128: [own(128, 128, 2), own(128, 64, 4), own(192, 64, 2, 3)],
    }
    more = itertools.product(dkv.get(H, ()), dq.get(H, ()))
    forms = backward_schedule.forms(H).values()
    fused = [
        (first._replace(keeps_addresses=keeps), second)
        for (first, second), keeps in itertools.product(forms, (False, True))
        if second is None
    ]
    return list(dict.fromkeys([*forms, *fused, *more]))


def compile_all(function, choices, arrays):
    """{choice: compiled function}, without those that the compiler refuses."""
    parts = {choice: functools.partial(one_stage, functools.partial(function, choice), arrays) for choice in choices}
    return {choice: program for choice, (program,) in compile_together(parts, lambda text: None).items()}


def agree(mine, right):
    """Whether two results are the same up to the rounding of another order of summation."""
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True)
    error = lambda a, b: jnp.linalg.norm(jnp.float32(a) - jnp.float32(b)) / jnp.linalg.norm(jnp.float32(b))
    return all(float(error(a, b)) < 1e-2 for a, b in pairs)


def times_of(programs, always=(), finalists=5, time_programs=time_together):
    """(all, final): {tiles: milliseconds} of a short look at all, and of a longer one at the fastest and `always`.

    The short look is by the clock of the host, all of it, so that its times can be compared. The longer one
    is by the device's own, where it has one.
    """
    short = time_programs(programs, rounds=3, sample_ms=4.0, device_samples=lambda program: [])
    fastest = sorted(programs, key=lambda tiles: short[tiles].wall_ms)[:finalists]
    chosen = {tiles: programs[tiles] for tiles in programs if tiles in fastest or tiles in always}
    long = time_programs(chosen)
    by_device = all(time.device_ms is not None for time in long.values())
    final = {tiles: time.device_ms if by_device else time.wall_ms for tiles, time in long.items()}
    return {tiles: time.wall_ms for tiles, time in short.items()}, final


def times_of_choices(function, choices, inputs, always):
    """`times_of` those that compile and compute the same as the first that does."""
    compiled = compile_all(function, choices, inputs)
    if not compiled:
        raise RuntimeError(f"none of {len(choices)} choices of tiles compiles on this GPU")
    right = next(iter(compiled.values()))(*inputs)
    programs = {
        choice: Program(program, [inputs]) for choice, program in compiled.items() if agree(program(*inputs), right)
    }
    return times_of(programs, always)


def tune_portable(head_dims=HEAD_DIMS):
    """(tiles, sweep): rows of the table, and rows of everything tried, as `results` describes them."""
    table, sweep, gpu = [], [], this_gpu()
    for dtype, H, is_causal in tqdm([*itertools.product(DTYPES, head_dims, (False, True))], "portable"):
        *arrays, dout = arrays_of(T, H, dtype)
        call = check_call(*arrays, is_causal=is_causal)
        out, lse = jax.jit(lambda *a, c=is_causal: forward.forward(check_call(*a, is_causal=c)))(*arrays)
        for kernel, (function, inputs) in kernels(call, out, lse, dout, jnp.zeros_like(lse)).items():
            itemsize = jnp.dtype(dtype).itemsize
            default = DEFAULTS[kernel, itemsize][H]
            choices = dict.fromkeys([default, *candidates(kernel, itemsize, H)])
            choices = [tiles for tiles in choices if tiles == fitting(kernel, tiles, call.problem, gpu)]
            times, final = times_of_choices(function, choices, inputs, [default])
            where = {"kernel": kernel, "itemsize": itemsize, "head_padded": H, "is_causal": is_causal}
            sweep += [where | tiles._asdict() | {"ms": round(ms, 4)} for tiles, ms in times.items()]
            best = min(final, key=final.get)
            table.append(where | best._asdict())
    return table, sweep


def decode_candidates(in_pages, itemsize, head_padded, block_r):
    """The `Launch`es worth trying: many for one query, which is what servers run."""
    if block_r > 16 or itemsize == 4:
        return [Launch(*choice, 2) for choice in itertools.product([32, 64], [2, 4, 8], [2, 3])]
    if in_pages:
        return [Launch(*choice) for choice in itertools.product([64, 128], [2, 4], [2, 3], [2, 3, 4])]
    sides = [32, 64, 128] if head_padded == 64 else [32, 64]
    return [Launch(*choice) for choice in itertools.product(sides, [1, 2, 4], [2, 3, 4], [1, 2, 3])]


def device_times(programs, turns=3):
    """{choice: milliseconds by the device's clock}, in turns: most of a short call's wall time is not the GPU's."""
    samples = {choice: [] for choice in programs}
    for _, (choice, program) in itertools.product(range(turns), programs.items()):
        samples[choice] += kernel_times(program)
    return {choice: float(np.median(found)) for choice, found in samples.items() if found}


def tune_decode(head_dims=HEAD_DIMS, dtypes=DTYPES):
    """(decode, decode_sweep): rows of the table, and rows of everything tried, as `results` describes them.

    The fastest has the least geometric mean of its times over `DECODED`. Pages are tuned for one query only.
    """
    table, sweep, kinds = [], [], [*((False, block_r) for block_r in QUERIES), (True, 16)]
    for dtype, H, (in_pages, block_r) in tqdm([*itertools.product(dtypes, head_dims, kinds)], "decode"):
        itemsize, T = jnp.dtype(dtype).itemsize, QUERIES[block_r]
        where = {"in_pages": in_pages, "itemsize": itemsize, "head_padded": H, "block_r": block_r}
        default = DECODE_DEFAULTS[itemsize, in_pages]
        choices = dict.fromkeys([default, *decode_candidates(in_pages, itemsize, H, block_r)])
        logs = dict.fromkeys(choices, 0.0)
        for B, S in DECODED:
            case = decoding.Decode(B, S, PAGE * in_pages, T, H=H, dtype=jnp.dtype(dtype).name)
            inputs = [decoding.inputs_of(case, seed) for seed in range(rotation(case.bytes))]

            def run(launch, *arrays, in_pages=in_pages):
                call = (check_paged_call if in_pages else check_call)(*arrays)
                return decode(call, **splits_of(call.problem, this_gpu(), launch)._asdict())

            compiled = compile_all(run, list(choices), inputs[0])
            right = compiled[default](*inputs[0])
            times = device_times(
                {c: Program(program, inputs) for c, program in compiled.items() if agree(program(*inputs[0]), right)}
            )
            shape = where | {"B": B, "S": S}
            sweep += [shape | launch._asdict() | {"ms": round(ms, 5)} for launch, ms in times.items()]
            logs = {launch: logs[launch] + np.log(ms) for launch, ms in times.items() if launch in logs}
        table.append(where | min(logs, key=logs.get)._asdict())
    return table, sweep


def hopper_row(which, where, tiles):
    """A row of the table for a pass."""
    return {"pass": which, **where, "tiles": hopper.fields_of(tiles)}


def fastest(times, default):
    """The fastest choice of {choice: milliseconds}, but the default if that is as fast, give or take the noise."""
    best = min(times, key=times.get)
    return default if default in times and times[default] <= NOISE * times[best] else best


def tune_hopper(head_dims=HEAD_DIMS):
    """(hopper, hopper_sweep): rows of the table, and rows of everything tried, as `results` describes them."""
    table, sweep = [], []
    for H, is_causal, longest in tqdm([*itertools.product(head_dims, (False, True), LENGTHS)], "hopper"):
        where = {"head_padded": H, "is_causal": is_causal, "up_to": longest}
        *arrays, dout = arrays_of(LENGTHS[longest], H, jnp.bfloat16)
        call_of = functools.partial(check_call, is_causal=is_causal)
        problem = call_of(*arrays).problem

        def run_forward(tiles, *arrays, call_of=call_of):
            return hopper_forward.forward(call_of(*arrays), tiles=tiles)

        def run_backward(tiles, query, key, value, *residuals, call_of=call_of):
            return hopper_backward.backward(call_of(query, key, value), *residuals, tiles=tiles)

        def final_of_pass(which, run, always, candidates, inputs, where=where):
            times, final = times_of_choices(run, list(dict.fromkeys([*always, *candidates])), inputs, always)
            sweep.extend(hopper_row(which, where, tiles) | {"ms": round(ms, 4)} for tiles, ms in times.items())
            table.append(hopper_row(which, where, fastest(final, always[0])))
            return final

        default = hopper_forward.untuned_tiles(problem)
        final_of_pass("forward", run_forward, [default], hopper_forward_candidates(H), arrays)
        out, lse = jax.jit(functools.partial(run_forward, default))(*arrays)
        residuals = (*arrays, out, lse, dout, jnp.zeros_like(lse))
        defaults = [backward_schedule.untuned_tiles(problem, deterministic) for deterministic in (False, True)]
        final = final_of_pass("backward", run_backward, defaults, hopper_backward_candidates(H), residuals)
        split = {tiles: ms for tiles, ms in final.items() if tiles[1] is not None}
        table.append(hopper_row("deterministic backward", where, fastest(split, defaults[1])))
    return table, sweep


def merged(header, found, earlier):
    """A table of tiles: what was found, and what an earlier table has for kernels and sizes not tuned this time."""
    kept, whole = {}, {}
    for kernels, (rows, sweep) in PARTS.items():
        tuned = {_subject(row) for row in found.get(rows, ())}
        for part in (rows, sweep):
            others = [row for row in earlier.get(part, ()) if _subject(row) not in tuned]
            whole[part] = [*found.get(part, ()), *others]
            if others:
                kept[kernels] = earlier.get("kept", {}).get(kernels) or {name: earlier[name] for name in header}
    return header | whole | ({"kept": kept} if kept else {})


def _subject(row):
    """What a row of a table or of a sweep is about."""
    fields = ("kernel", "itemsize", "pass", "head_padded", "in_pages", "block_r", "is_causal", "up_to")
    return tuple(row.get(field) for field in fields)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.dev.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", choices=PARTS, nargs="+", help="by default those that this GPU runs")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--commit", help="what to record as the commit, where git cannot say")
    options = parser.parse_args(arguments)
    if reason := gpu_or_reason():
        print(f"Nothing to tune: {reason}.")
        return 1
    kernels = options.kernels or [part for part in PARTS if part != "hopper" or is_hopper()]
    if "hopper" in kernels and not is_hopper():
        print("The Hopper kernels need a GPU of compute capability 9.0.")
        return 1
    machine, found = Machine.here(options.commit), {}
    try:
        earlier = results.read_tiles(machine.gpu)
    except (FileNotFoundError, ValueError) as error:
        print(f"Beginning without an earlier table: {error}")
        earlier = {}
    for part in kernels:
        tune = {"portable": tune_portable, "decode": tune_decode, "hopper": tune_hopper}[part]
        found |= dict(zip(PARTS[part], tune(options.head_dims), strict=True))
        for row in found[PARTS[part][0]]:
            print(" ".join(f"{value!s:>9}" for value in row.values()))
    table = merged(machine.header(), found, earlier)
    results.write(table, tables.path_of(machine.gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
