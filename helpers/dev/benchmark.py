"""Measure the attention kernels on this machine's GPU, next to cuDNN and public peers, and record the figures.

    python -m helpers.dev.benchmark        (make gpu-bench)

For every case: the first key/value head of each result is first compared with naive float32 attention,
and what is wrong there is reported as wrong and never timed. Then forward and backward are timed, apart
from each other and in turns (`timing`), on random inputs that do not fit the cache. What cannot be measured
here is a line in the report. Writes helpers/instruments/records/<gpu>.json, described in `results`.

TFLOP/s are FLOPs over the device's time, or over the wall time where no profiler could look. FLOPs are
4 T S H for each query head and batch entry, half if causal, 2.5 times as many backward.
"""

import argparse
import functools
import itertools
import os
import sys
import time
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from helpers import flash_attention
from helpers.attention.device import compute_capability
from helpers.attention.hopper import backward as hopper_backward
from helpers.attention.hopper import backward_schedule
from helpers.attention.hopper import ladder as hopper_ladder
from helpers.attention.problem import check_call
from helpers.dev import decoding, measuring
from helpers.dev.measuring import COMPILERS, compile_together, lowered, milliseconds, one_stage, reason_of
from helpers.exercises import mine
from helpers.instruments import cost, ladder, results
from helpers.instruments.implementations import OF_JAX, OF_TORCH, ours
from helpers.instruments.timing import Timed, rotation, time_together
from helpers.workbook import WORKBOOK

TOKENS, WIDTH = 16384, 2048
PASSES = "forward", "backward"
LIMIT = 380.0  # seconds after which no case begins


@dataclass(frozen=True)
class Case:
    """One call of attention: B, T, S, N, K, H, dtype and mask as in `problem.Problem`."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: str
    is_causal: bool

    @classmethod
    def of_grid(cls, T, H, dtype, is_causal):
        return cls(TOKENS // T, T, T, WIDTH // H, WIDTH // H, H, dtype, is_causal)

    @property
    def name(self):
        mask = "causal" if self.is_causal else "full"
        return f"{self.dtype} B{self.B} T{self.T} N{self.N} K{self.K} H{self.H} {mask}"

    def flops(self, which):
        heads = (1 if which == "forward" else 2.5) * self.B * self.N
        return heads * cost.forward_flops(self.T, self.S, self.H, self.is_causal)

    def least_bytes(self, which):
        """Every input read once and every output written once."""
        queries, keys = self.B * self.T * self.N * self.H, self.B * self.S * self.K * self.H
        elements = 2 * queries + 2 * keys if which == "forward" else 4 * queries + 4 * keys
        return elements * jnp.dtype(self.dtype).itemsize


GRID = [
    Case.of_grid(T, H, dtype, is_causal)
    for dtype in ("bfloat16", "float16")
    for H, T, is_causal in itertools.product((64, 128), (1024, 4096, 16384), (False, True))
]
TUTORIAL = Case(4, 1024, 1024, 8, 8, 64, "float16", False)
GROUPED = [Case(4, 4096, 4096, 2048 // H, 2048 // H // 8, H, "bfloat16", c) for H in (64, 128) for c in (False, True)]


def inputs_of(case, seed=0):
    """(query, key, value, dout)."""
    query, key = (case.B, case.T, case.N, case.H), (case.B, case.S, case.K, case.H)
    return measuring.random_arrays([query, key, key, query], case.dtype, seed)


def names_for(case):
    """The implementations to be timed for a case: all for those the lessons quote, the main ones for the rest."""
    names = ["portable", "triton", "hopper", "cudnn", "flash_attention_3"]
    if case.T <= 4096 and (case.dtype == "bfloat16" or case == TUTORIAL) and case.K == case.N:
        names.insert(0, "naive")
    if case in GRID and case.dtype == "bfloat16":
        names += ["torch_sdpa", "flash_attention_4"]
    if case.T == 4096 and case.K == case.N:
        names.append("jax_triton" if case.dtype == "bfloat16" else "jax_mosaic")
    return names


# It is compiled once for each case, and runs once: what XLA would try for its products is not worth the time.
@functools.partial(jax.jit, static_argnames="case", compiler_options={"xla_gpu_autotune_level": 0})
def right_answer(case, arrays):
    """{"forward": [out], "backward": [dq, dk, dv]} of the first key/value head of the first batch entry.

    Naive attention in float32.
    """
    query, key, value, dout = arrays
    group = case.N // case.K

    def naive(query, key, value):
        s = jnp.einsum("tgh,sh->gts", query, key) * case.H**-0.5
        if case.is_causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[1:], bool)), s, -jnp.inf)
        return jnp.einsum("gts,sh->tgh", jax.nn.softmax(s), value)

    parts = query[0, :, :group], key[0, :, 0], value[0, :, 0], dout[0, :, :group]
    *inputs, dout = (jnp.float32(part) for part in parts)
    with jax.default_matmul_precision("highest"):
        out, pull_back = jax.vjp(naive, *inputs)
        return {"forward": [out], "backward": [*pull_back(dout)]}


@functools.partial(jax.jit, static_argnames="group")
def _errors(group, found, right):
    """Relative errors of results in the first key/value head of the first batch entry."""
    pairs = zip(found, right, strict=True)
    parts = [mine[0, :, :group] if correct.ndim == 3 else mine[0, :, 0] for mine, correct in pairs]
    norm = jnp.linalg.norm
    return [norm(jnp.float32(part) - correct) / norm(correct) for part, correct in zip(parts, right, strict=True)]


def complaint(case, which, found, right):
    """What is wrong with the results of a pass, a list of arrays, or None."""
    names = ("out",) if which == "forward" else ("dq", "dk", "dv")
    errors = _errors(case.N // case.K, found, right[which])
    for name, error in zip(names, errors, strict=True):
        if not error <= decoding.WIDEST_ERROR * float(jnp.finfo(case.dtype).eps):
            return f"wrong: {name} has a relative error of {error:.1e}"
    return None


def two_stages(attention, query, key, value, dout):
    """What keeps the residuals of an implementation, and its backward pass, lowered.

    The residuals are a list, which another process can hand over, and not the function that JAX keeps them in.
    """
    tree = None

    def kept(*arrays):
        nonlocal tree
        leaves, tree = jax.tree.flatten(jax.vjp(attention, *arrays)[1])
        return leaves

    first = lowered(kept, query, key, value)
    return [first, lowered(lambda leaves, dout: jax.tree.unflatten(tree, leaves)(dout), first.out_info, dout)]


def lower_pass(make, case, which):
    """A pass of an implementation, lowered: for backward with what keeps its residuals."""
    shapes = jax.eval_shape(lambda: inputs_of(case))
    attention = make(case)
    return one_stage(attention, shapes[:3]) if which == "forward" else two_stages(attention, *shapes)


def lower_answer(case):
    return [right_answer.lower(case, jax.eval_shape(lambda: inputs_of(case)))]


def parts_of_case(case, implementations, note):
    """{(case, name, pass): function}, for `compile_together`. implementations: {name: make}, of JAX."""
    parts = {(case, "right", "answer"): functools.partial(lower_answer, case)}
    for name, make in implementations.items():
        try:
            make(case)
        except Exception as error:
            measuring.say_left_out(note, error, name, case)
        else:
            parts |= {(case, name, which): functools.partial(lower_pass, make, case, which) for which in PASSES}
    return parts


def measure_case(case, implementations, *, note, time_programs=time_together, compiled=None):
    """Records of one case. implementations: {name: make}; note(text) takes what could not be measured.

    compiled: what `compile_together` makes of the `parts_of_case`, if that was done before.
    """
    of_torch = {name: make for name, make in implementations.items() if name in OF_TORCH}
    if compiled is None:
        of_jax = {name: make for name, make in implementations.items() if name not in of_torch}
        compiled = compile_together(parts_of_case(case, of_jax, note), note)
    first = inputs_of(case)
    count = rotation(sum(array.nbytes for array in first[:3]))  # a forward pass reads no dout
    sets = [first, *(inputs_of(case, seed) for seed in range(1, count))]
    (answer,) = compiled[case, "right", "answer"]
    right, makers, to_jax = answer(first), {which: {} for which in PASSES}, {}
    for (_, name, which), stages in compiled.items():
        if which in makers:
            makers[which][name] = functools.partial(_program_of_jax, stages, sets)
    for name, make in of_torch.items():
        try:
            peer = make(case)
            programs = peer.programs(sets)
        except Exception as error:
            measuring.say_left_out(note, error, name, case)
            continue
        to_jax[name] = peer.to_jax
        for which, program in programs.items():
            makers[which][name] = lambda program=program: program
    records = []
    for which, of_pass in makers.items():

        def wrong(name, found, which=which):
            found = jax.tree.map(to_jax.get(name, lambda array: array), [found] if which == "forward" else [*found])
            return complaint(case, which, found, right)

        programs = measuring.right_ones(of_pass, wrong, note, case, which)
        try:
            times = time_programs(programs) if programs else {}
        except Exception as error:
            note(f"{case.name}: {which}: {reason_of(error)}")
            continue
        records += [record(case, name, which, timing) for name, timing in times.items()]
    return records


def _program_of_jax(stages, sets):
    """A pass as compiled: forward of one stage, or backward of what keeps the residuals and what reads them."""
    if len(stages) == 1:
        return Timed(*stages, [tuple(arrays[:3]) for arrays in sets])
    residuals, backward = stages
    return Timed(backward, [(residuals(*arrays[:3]), arrays[3]) for arrays in sets])


def record(case, name, which, timing):
    """One entry of the results file, without its fractions of the ceilings."""
    about = {"implementation": name, "pass": which, **asdict(case), **measuring.clocks(timing)}
    return about | {"tflops": case.flops(which) / milliseconds(timing) / 1e9}


def ceilings():
    """TFLOP/s of a large bf16 matrix product, and GB/s of a large copy, reading and writing counted."""
    a, b = measuring.random_arrays([(8192, 8192)] * 2, jnp.bfloat16)
    (large,) = measuring.random_arrays([(1 << 29,)], jnp.bfloat16)
    programs = {
        "matmul": Timed(jax.jit(jnp.matmul), [(a, b)]),
        "by a kernel": Timed(jax.jit(lambda x: -x), [(large,)]),
        "by the driver": Timed(jax.jit(jnp.copy), [(large,)]),
    }
    times = time_together(programs, sample_ms=30.0)
    ms = {name: milliseconds(timing) for name, timing in times.items()}
    fastest_copy = min(ms["by a kernel"], ms["by the driver"])
    return {"matmul_tflops": 2 * 8192**3 / ms["matmul"] / 1e9, "copy_gbps": 2 * large.nbytes / fastest_copy / 1e6}


def rungs(case):
    """{(kernel, pass, name): function}: the steps on the way to our kernels, as far as this GPU runs them.

    The functions take query, key and value; for a backward pass also out, lse (B, N, T) and dout.
    """
    causal = {"is_causal": case.is_causal}
    steps = {("triton forward", "forward", rung.name): (ladder.attention, {"rung": rung}) for rung in ladder.RUNGS}
    if compute_capability() == (9, 0):
        names, forms = hopper_ladder.NAMES.items(), backward_schedule.forms(case.H).items()
        steps |= {("hopper forward", "forward", name): (_hopper_rung, {"rung": rung}) for rung, name in names}
        steps |= {("hopper backward", "backward", name): (_hopper_form, {"tiles": tiles}) for name, tiles in forms}
    return {step: functools.partial(function, **options, **causal) for step, (function, options) in steps.items()}


def _hopper_rung(*arrays, rung, is_causal):
    return hopper_ladder.forward(check_call(*arrays, is_causal=is_causal), rung=rung)[0]


def _hopper_form(query, key, value, out, lse, dout, *, tiles, is_causal):
    call = check_call(query, key, value, is_causal=is_causal)
    return hopper_backward.backward(call, out, lse, dout, jnp.zeros_like(lse), tiles=tiles)


def ladder_records(cases, note, processes=0):
    """One entry for each of a case's `rungs`; wrong ones are noted and not timed."""
    parts, records = {}, []

    def inputs_of_passes(case):
        *arrays, dout = inputs_of(case)
        out, lse = flash_attention(*arrays, is_causal=case.is_causal, return_residual=True)
        return {"forward": tuple(arrays), "backward": (*arrays, out, lse.swapaxes(1, 2), dout)}

    for case in cases:
        shapes = jax.eval_shape(functools.partial(inputs_of_passes, case))
        for (kernel, which, name), run in rungs(case).items():
            parts["ladder", case, kernel, which, name] = functools.partial(one_stage, run, shapes[which])
    compiled = compile_together(parts, note, processes)
    for about in dict.fromkeys(part[:-1] for part in compiled):
        _, case, kernel, which = about
        inputs = inputs_of_passes(case)[which]
        right = right_answer(case, inputs_of(case))
        found = {part[-1]: stages for part, stages in compiled.items() if part[:-1] == about}
        makers = {name: functools.partial(Timed, *stages, [inputs]) for name, stages in found.items()}
        wrong = lambda _, found: complaint(case, which, jax.tree.leaves(found), right)  # noqa: B023
        programs = measuring.right_ones(makers, wrong, note, *about)
        for name, timing in time_together(programs).items() if programs else ():
            ms = milliseconds(timing)
            rung = {"kernel": kernel, "name": name, "H": case.H, "T": case.T, "is_causal": case.is_causal}
            records.append(rung | {"device_ms": ms, "spread": timing.spread, "tflops": case.flops(which) / ms / 1e9})
    return records


def memory_records(note, longest=2**20):
    """Bytes of forward and of forward with backward against T, for one head with H = 64 in bf16."""
    case_of = lambda T: Case(1, T, T, 1, 1, 64, "bfloat16", True)
    inputs = lambda T, which: inputs_of(case_of(T))[: 3 if which == "forward" else 4]
    parts, records = {}, []
    for name, which in itertools.product(("naive", "portable", "triton", "hopper"), PASSES):
        for T in (2**n for n in range(10, longest.bit_length(), 2)):
            attention = OF_JAX[name](case_of(T))
            gradients = lambda *arrays, of=attention: jax.vjp(of, *arrays[:3])[1](arrays[3])
            program = attention if which == "forward" else gradients
            shapes = jax.eval_shape(functools.partial(inputs, T, which))
            parts[name, which, T] = functools.partial(one_stage, program, shapes)
    # Naive attention one by one: XLA tries its products in the GPU's memory while it compiles.
    kernels = {part: lower for part, lower in parts.items() if part[0] != "naive"}
    compiled = compile_together(kernels, lambda text: None)  # what fails is noted below, once
    too_long = set()
    for (name, which, T), lower in parts.items():
        if (name, which) in too_long:
            continue
        try:
            (ready,) = compiled.get((name, which, T)) or [stage.compile() for stage in lower()]
            jax.block_until_ready(ready(*inputs(T, which)))  # it fits, or this raises
        except Exception as error:
            note(f"memory: {name}: {which} at T = {T}: {reason_of(error)}")
            too_long.add((name, which))
            continue
        report = ready.memory_analysis()
        needed = report.argument_size_in_bytes + report.output_size_in_bytes + report.temp_size_in_bytes
        records.append({"implementation": name, "pass": which, "T": T, "N": 1, "H": 64, "bytes": needed})
    return records


def run(cases, note, began, progress=print, processes=0, limit=LIMIT):
    """Records of cases, all of which are compiled before; began: by `time.perf_counter`, for the limit in seconds."""
    parts, here, records = {}, {}, []
    for case in cases:
        implementations = {name: OF_JAX[name] for name in names_for(case) if name in OF_JAX}
        for part, lower in parts_of_case(case, implementations, note).items():
            # XLA tries the products of naive attention in the GPU's memory, where nobody else may be at it.
            (here if part[1] == "naive" else parts)[part] = lower
    compiled = compile_together(parts, note, processes)
    compiled |= compile_together(here, note, threads=1)
    progress(f"compiled after {time.perf_counter() - began:.0f} s")
    for case in cases:
        if time.perf_counter() - began > limit:
            note(f"{case.name}: left out, the time was up")
            continue
        implementations = {name: OF_TORCH[name] for name in names_for(case) if name in OF_TORCH}
        of_case = {part: stages for part, stages in compiled.items() if part[0] == case}
        try:
            found = measure_case(case, implementations, note=note, compiled=of_case)
        except Exception as error:
            note(f"{case.name}: {reason_of(error)}")
            continue
        records += found
        progress(f"{time.perf_counter() - began:4.0f} s {line(case, found)}")
    return records


def decode_part(machine, top, note):
    records = []
    compiled = compile_together(decoding.parts(decoding.GRID), note, COMPILERS)
    for case in decoding.GRID:
        try:
            found = decoding.measure(case, note, compiled)
        except Exception as error:
            note(f"{case.name}: {reason_of(error)}")
            continue
        records += [entry | {"of_copy": round(entry["gbps"] / top["copy_gbps"], 4)} for entry in found]
        print(decoding.line(case, found), flush=True)
    header = {name: machine[name] for name in ("commit", "date", "versions")}
    return header | {"copy_gbps": top["copy_gbps"], "records": records}


def line(case, records):
    parts = []
    for which in ("forward", "backward"):
        figures = [f"{r['implementation']} {r['tflops']:.0f}" for r in records if r["pass"] == which]
        parts.append(f"{which}: " + ", ".join(figures))
    return f"{case.name:45} {' | '.join(parts)}"


def with_fractions(records, top):
    """The records, each also as a fraction of the two ceilings of the same run."""
    done = []
    for entry in records:
        case = Case(**{name: entry[name] for name in Case.__dataclass_fields__})
        ms = entry["device_ms"] or entry["wall_ms"]
        bandwidth = case.least_bytes(entry["pass"]) / ms / 1e6
        fractions = {"of_matmul": entry["tflops"] / top["matmul_tflops"], "of_copy": bandwidth / top["copy_gbps"]}
        done.append(entry | {name: round(value, 4) for name, value in fractions.items()})
    return done


def report_mine(note):
    """Print how fast flash_attention of workbook/mine.py is, beside ours and cuDNN's. Nothing is recorded."""
    os.chdir(WORKBOOK)
    try:
        attention = mine.load().flash_attention
    except Exception as error:
        print(f"Nothing to measure: workbook/mine.py has no flash_attention ({reason_of(error)}).")
        return 1
    yours = {"mine": lambda case: functools.partial(attention, is_causal=case.is_causal)}
    beside = {name: OF_JAX[name] for name in ("naive", "portable", "hopper", "cudnn")}
    beside |= {"mosaic": functools.partial(ours, "mosaic")}
    for H, is_causal in itertools.product((64, 128), (False, True)):
        case = Case.of_grid(4096, H, "bfloat16", is_causal)
        print(line(case, measure_case(case, yours | beside, note=note)), flush=True)
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.dev.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--mine", action="store_true", help="only the kernel of workbook/mine.py, without recording")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which no case begins")
    parser.add_argument("--commit", help="what to record as the commit, where git cannot say")
    given = "of peers that cannot be asked for theirs"
    parser.add_argument("--versions", nargs="*", default=[], metavar="PEER=VERSION", help=given)
    options = parser.parse_args(arguments)
    if reason := measuring.gpu_or_reason():
        print(f"Nothing to measure: {reason}.")
        return 1
    began, note = time.perf_counter(), measuring.Notes()
    if options.mine:
        return report_mine(note)
    machine = measuring.this_machine(options.commit, **dict(given.split("=", 1) for given in options.versions))
    top = ceilings()
    print(f"ceilings: matmul {top['matmul_tflops']:.0f} TFLOP/s, copy {top['copy_gbps']:.0f} GB/s", flush=True)
    path = results.RESULTS / f"{results.slug(machine['gpu'])}.json"
    # The shapes that lessons quote come first, so that a slow machine still has them.
    cases = sorted([*GRID, TUTORIAL, *GROUPED], key=lambda case: (case.T != 4096 and case != TUTORIAL, case.dtype))
    show = functools.partial(print, flush=True)
    records = with_fractions(run(cases, note, began, show, COMPILERS, options.limit), top)
    long = [case for case in GRID if case.T == 4096 and case.dtype == "bfloat16"]
    found = {"ceilings": top, "records": records, "ladder": ladder_records(long, note, processes=COMPILERS)}
    print(f"{time.perf_counter() - began:.0f} s, and decoding")
    found |= {"decode": decode_part(machine, top, note)}
    found |= {"memory": memory_records(note)}  # last: JAX keeps what it took, and processes that compile want some too
    results.write(machine | found | {"notes": note}, path)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory for PyTorch
    sys.exit(main())
