"""Measure the attention kernels on this machine's GPU, next to cuDNN and public peers, and record the figures.

    python -m helpers.dev.benchmark        (make gpu-bench)

For every case: the first key/value head of each result is first compared with naive float32 attention,
and what is wrong there is reported as wrong and never timed. Then forward and backward are timed, apart
from each other and in turns (`timing`), on random inputs that do not fit the cache. What cannot be measured
here is a line in the report. Writes helpers/instruments/records/<card>.json, described in `results`.

TFLOP/s are FLOPs over the device's time, or over the wall time where no profiler could look. FLOPs are
4 T S H for each query head and batch entry, half if causal, 2.5 times as many backward.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from tqdm import tqdm

from helpers import flash_attention
from helpers.attention.device import compute_capability, default_device
from helpers.attention.hopper import backward as hopper_backward
from helpers.attention.hopper import ladder as hopper_ladder
from helpers.attention.hopper import serve as hopper
from helpers.attention.portable.tiles import select_tiles
from helpers.attention.problem import check_call
from helpers.dev import decoding
from helpers.dev.decoding import WIDEST_ERROR
from helpers.dev.workers import Workers
from helpers.exercises import mine
from helpers.instruments import cost, ladder, results
from helpers.instruments.implementations import OF_JAX, OF_TORCH, PEERS, gradient_programs
from helpers.instruments.timing import Program, rotation, time_together
from helpers.workbook import WORKBOOK

TOKENS, WIDTH = 16384, 2048
PASSES = "forward", "backward"
COMPILERS = 12  # threads or processes that compile


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
        return (
            (1 if which == "forward" else 2.5)
            * self.B
            * self.N
            * cost.forward_flops(self.T, self.S, self.H, self.is_causal)
        )

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


def random_arrays(shapes, dtype, seed=0):
    """Standard normal arrays, made on the device."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def inputs_of(case, seed=0):
    """(query, key, value, dout)."""
    query, key = (case.B, case.T, case.N, case.H), (case.B, case.S, case.K, case.H)
    return random_arrays([query, key, key, query], case.dtype, seed)


def names_for(case):
    """The implementations to be timed for a case: all for those the lessons quote, the main ones for the rest."""
    names = ["portable", "hopper", "cudnn", "flash_attention_3"]
    if case.T <= 4096 and (case.dtype == "bfloat16" or case == TUTORIAL) and case.K == case.N:
        names.insert(0, "naive")
    if case.T == 4096 and case.K == case.N:
        names += PEERS if case.dtype == "bfloat16" else ["jax_mosaic"]
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
    """What is wrong with the results of a pass, or None."""
    if which == "forward":
        found = [found]
    names = ("out",) if which == "forward" else ("dq", "dk", "dv")
    errors = _errors(case.N // case.K, list(found), right[which])
    for name, error in zip(names, errors, strict=True):
        if not error <= WIDEST_ERROR * float(jnp.finfo(case.dtype).eps):
            return f"wrong: {name} has a relative error of {error:.1e}"
    return None


def reason_of(error):
    """One line for an exception."""
    if "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower():
        return "too little memory on this GPU"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def left_out(case, name, error):
    """One line for an implementation that cannot serve a case; the same for all cases if it is not here."""
    if isinstance(error, ImportError):
        return f"{name}: could not be imported ({error})"
    return f"{case.name}: {name}: {reason_of(error)}"


def lowered(function, *inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jax.jit(function).lower(*inputs)


def one_stage(function, inputs):
    """The forward pass of an implementation, or any other single program, lowered."""
    return [lowered(function, *inputs)]


def two_stages(attention, query, key, value, dout):
    """What keeps the residuals of an implementation, and its backward pass, lowered.

    The residuals are a list, which another process can hand over, and not the function that JAX keeps them in.
    """
    residuals, backward = gradient_programs(attention)
    tree = None

    def kept(*arrays):
        nonlocal tree
        leaves, tree = jax.tree.flatten(residuals(*arrays))
        return leaves

    first = lowered(kept, query, key, value)
    return [first, lowered(lambda leaves, dout: backward(jax.tree.unflatten(tree, leaves), dout), first.out_info, dout)]


def compile_together(parts, note, processes=0, progress=lambda parts, **_: parts, threads=COMPILERS):
    """{name: compiled programs} of {name: function that returns lowered programs}; note(name, error) for what fails.

    JAX lowers one after another, and XLA compiles beside it. Lowering kernels takes most of the time: with
    `processes`, so many do both, and hand over what they compiled; functions and what they hold must go through
    pickle then. Otherwise `threads` compile. progress: a bar round an iterable, such as tqdm.
    """
    if processes:
        return _compile_elsewhere(parts, note, processes, progress)
    compiled, waiting = {}, {}
    with ThreadPoolExecutor(threads) as pool:
        for name, lower in progress(parts.items()):
            try:
                waiting[name] = [pool.submit(stage.compile) for stage in lower()]
            except Exception as error:
                note(name, error)
    for name, futures in waiting.items():
        try:
            compiled[name] = [future.result() for future in futures]
        except Exception as error:
            note(name, error)
    return compiled


def _compile_elsewhere(parts, note, processes, progress):
    found = {}
    with Workers(_serialized, processes) as workers:
        for outcome in progress(workers.outcomes(parts.items(), patience=120), total=len(parts)):
            name = outcome.task[0]
            if outcome.kind != "returned":
                note(name, outcome.failure())
                continue
            try:
                load = functools.partial(serialize_executable.deserialize_and_load, execution_devices=jax.devices()[:1])
                found[name] = [load(*stage) for stage in outcome.value]
            except Exception as error:
                note(name, error)
    return {name: found[name] for name in parts if name in found}


def _serialized(part):
    """The compiled programs of a part, in a form that another process can load."""
    _, lower = part
    jax.config.update("jax_enable_compilation_cache", False)  # what came from a cache on disk cannot be handed over
    return [serialize_executable.serialize(stage.compile()) for stage in lower()]


def lower_pass(make, case, which):
    """A pass of an implementation, lowered: for backward with what keeps its residuals."""
    shapes = jax.eval_shape(lambda: inputs_of(case))
    attention = make(case)
    return one_stage(attention, shapes[:3]) if which == "forward" else two_stages(attention, *shapes)


def parts_of_case(case, implementations, note):
    """What `compile_together` takes for a case: {(pass, name): function}. implementations: {name: make}, of JAX."""
    parts = {}
    for name, make in implementations.items():
        try:
            make(case)
        except Exception as error:
            note(left_out(case, name, error))
        else:
            parts |= {(which, name): functools.partial(lower_pass, make, case, which) for which in PASSES}
    return parts


def right_of(case):
    """`right_answer` of a case, lowered."""
    return [right_answer.lower(case, jax.eval_shape(lambda: inputs_of(case)))]


def compile_case(case, implementations, note):
    """{(pass, name): compiled programs} of one case."""
    complain = lambda part, error: note(f"{case.name}: {part[1]}: {part[0]}: {reason_of(error)}")
    return compile_together(parts_of_case(case, implementations, note), complain)


def measure_case(case, implementations, *, note, time_programs=time_together, compiled=None, answer=None):
    """Records of one case. implementations: {name: make}; note(text) takes what could not be measured.

    compiled: what `compile_case` returns, and answer: `right_answer` compiled for it, if that was done before.
    """
    of_torch = {name: make for name, make in implementations.items() if name in OF_TORCH}
    if compiled is None:
        of_jax = {name: make for name, make in implementations.items() if name not in of_torch}
        compiled = compile_case(case, of_jax, note)
    first = inputs_of(case)
    count = rotation(sum(array.nbytes for array in first[:3]))  # a forward pass reads no dout
    sets = [first, *(inputs_of(case, seed) for seed in range(1, count))]
    right = answer(sets[0]) if answer else right_answer(case, sets[0])
    ready = {which: {} for which in PASSES}

    def add(name, which, make, to_jax=lambda array: array):
        """Keep the program that make() returns, if it is right."""
        try:
            program = make()
            found = program.run(*program.inputs[0])
            program.wait(found)
            wrong = complaint(case, which, to_jax(found) if which == "forward" else [*map(to_jax, found)], right)
        except Exception as error:
            wrong = reason_of(error)
        if wrong:
            note(f"{case.name}: {name}: {which}: {wrong}")
        else:
            ready[which][name] = program

    for (which, name), stages in compiled.items():
        if which == "forward":
            add(name, which, lambda: Program(*stages, [tuple(arrays[:3]) for arrays in sets]))  # noqa: B023
        else:
            residuals, backward = stages
            kept = lambda: [(residuals(*arrays[:3]), arrays[3]) for arrays in sets]  # noqa: B023
            add(name, which, lambda: Program(backward, kept()))  # noqa: B023
    for name, make in of_torch.items():
        try:
            peer = make(case)
            programs = peer.programs(sets)
        except Exception as error:
            note(left_out(case, name, error))
            continue
        for which, program in programs.items():
            add(name, which, lambda: program, peer.to_jax)  # noqa: B023
    records = []
    for which, programs in ready.items():
        if programs:
            try:
                times = time_programs(programs)
            except Exception as error:
                note(f"{case.name}: {which}: {reason_of(error)}")
                continue
            records += [record(case, name, which, timing) for name, timing in times.items()]
    return records


def record(case, name, which, timing):
    """One entry of the results file, without its fractions of the ceilings."""
    ms = timing.wall_ms if timing.device_ms is None else timing.device_ms
    return {
        "implementation": name,
        "pass": which,
        **asdict(case),
        "device_ms": timing.device_ms,
        "wall_ms": timing.wall_ms,
        "spread": timing.spread,
        "samples_ms": [round(sample, 5) for sample in timing.device_samples],
        "tflops": case.flops(which) / ms / 1e9,
        "tiles": tiles_used(case, name, which),
    }


def tiles_used(case, name, which):
    """Tile sizes of our own kernels, None for what chooses its own."""
    small = np.zeros((1, 1, 1, case.H), case.dtype)
    problem = check_call(small, small, small, is_causal=case.is_causal).problem
    problem = replace(problem, B=case.B, T=case.T, S=case.S, N=case.N, K=case.K)
    if name == "portable":
        kernels = ("forward",) if which == "forward" else ("dkv", "dq")
        return {kernel: select_tiles(kernel, problem)._asdict() for kernel in kernels}
    if name == "hopper":
        return hopper.tiles_used(problem, which)
    return None


def ceilings():
    """TFLOP/s of a large bf16 matrix product, and GB/s of a large copy, reading and writing counted."""
    a, b = random_arrays([(8192, 8192)] * 2, jnp.bfloat16)
    (large,) = random_arrays([(1 << 29,)], jnp.bfloat16)
    programs = {
        "matmul": Program(jax.jit(jnp.matmul), [(a, b)]),
        "by a kernel": Program(jax.jit(lambda x: -x), [(large,)]),
        "by the driver": Program(jax.jit(jnp.copy), [(large,)]),
    }
    times = time_together(programs, sample_ms=30.0)
    ms = {name: timing.device_ms or timing.wall_ms for name, timing in times.items()}
    fastest_copy = min(ms["by a kernel"], ms["by the driver"])
    return {"matmul_tflops": 2 * 8192**3 / ms["matmul"] / 1e9, "copy_gbps": 2 * large.nbytes / fastest_copy / 1e6}


def rungs(case):
    """{kernel: (pass, {name: function})}: the steps on the way to our kernels, as far as this GPU runs them.

    The functions take query, key and value; for a backward pass also out, lse (B, N, T) and dout.
    """
    steps = {
        rung.name: functools.partial(ladder.attention, rung=rung, is_causal=case.is_causal) for rung in ladder.RUNGS
    }
    kernels = {"portable forward": ("forward", steps)}
    if compute_capability() == (9, 0):
        kernels["hopper forward"] = (
            "forward",
            {name: functools.partial(_hopper_rung, case, rung) for rung, name in hopper_ladder.NAMES.items()},
        )
        kernels["hopper backward"] = (
            "backward",
            {
                name: functools.partial(_hopper_form, case, tiles)
                for name, tiles in hopper_backward.forms(case.H).items()
            },
        )
    return kernels


def _hopper_rung(case, rung, *arrays):
    return hopper_ladder.forward(check_call(*arrays, is_causal=case.is_causal), rung=rung)[0]


def _hopper_form(case, tiles, query, key, value, out, lse, dout):
    call = check_call(query, key, value, is_causal=case.is_causal)
    return hopper_backward.backward(call, out, lse, dout, jnp.zeros_like(lse), tiles=tiles)


def ladder_records(cases, note, rungs=rungs, time_programs=time_together, processes=0):
    """One entry for each of a case's `rungs`; wrong ones are noted and not timed."""
    found, parts = {}, {}
    for case in cases:
        try:
            found[case] = rungs(case)
        except Exception as error:
            note(f"ladder: {case.name}: {reason_of(error)}")
            continue
        query, key, value, dout = jax.eval_shape(lambda: inputs_of(case))  # noqa: B023
        lse = jax.ShapeDtypeStruct((case.B, case.N, case.T), jnp.float32)
        for kernel, (which, functions) in found[case].items():
            inputs = (query, key, value, query, lse, dout) if which == "backward" else (query, key, value)
            for name, run in functions.items():
                parts[case, kernel, name] = functools.partial(one_stage, run, inputs)

    def complain(part, error):
        case, kernel, name = part
        note(f"ladder: {case.name}: {kernel}: {name}: {reason_of(error)}")

    compiled = compile_together(parts, complain, processes)
    records = []
    for case, kernels in found.items():
        try:
            records += _rungs_of_case(case, kernels, compiled, note, time_programs)
        except Exception as error:
            note(f"ladder: {case.name}: {reason_of(error)}")
    return records


def _rungs_of_case(case, kernels, compiled, note, time_programs):
    records = []
    *arrays, dout = inputs_of(case)
    right = right_answer(case, (*arrays, dout))
    out, lse = flash_attention(*arrays, is_causal=case.is_causal, return_residual=True)
    for kernel, (which, functions) in kernels.items():
        inputs = (*arrays, out, lse.swapaxes(1, 2), dout) if which == "backward" else tuple(arrays)
        programs = {}
        for name in functions:
            if (case, kernel, name) not in compiled:
                continue
            (program,) = compiled[case, kernel, name]
            try:
                wrong = complaint(case, which, program(*inputs), right)
            except Exception as error:
                wrong = reason_of(error)
            if wrong:
                note(f"ladder: {case.name}: {kernel}: {name}: {wrong}")
            else:
                programs[name] = Program(program, [inputs])
        for name, timing in time_programs(programs).items() if programs else ():
            ms = timing.device_ms or timing.wall_ms
            rung = {"kernel": kernel, "name": name, "H": case.H, "T": case.T, "is_causal": case.is_causal}
            records.append(rung | {"device_ms": ms, "spread": timing.spread, "tflops": case.flops(which) / ms / 1e9})
    return records


def both_passes(attention):
    """A function of (query, key, value, dout) that returns the three gradients."""
    return lambda query, key, value, dout: jax.vjp(attention, query, key, value)[1](dout)


def memory_records(note, longest=2**20):
    """Bytes of forward and of forward with backward against T, for one head with H = 64 in bf16."""
    parts = {}
    for name, which in itertools.product(("naive", "portable", "hopper"), ("forward", "backward")):
        for T in (2**n for n in range(10, longest.bit_length(), 2)):
            case = Case(1, T, T, 1, 1, 64, "bfloat16", True)
            shapes = jax.eval_shape(lambda: inputs_of(case))  # noqa: B023
            attention = OF_JAX[name](case)
            program = attention if which == "forward" else both_passes(attention)
            parts[name, which, T] = functools.partial(one_stage, program, shapes[: 3 if which == "forward" else 4])
    failed, compiled = {}, {}
    for is_naive in (False, True):  # one by one: XLA tries its products in the GPU's memory while it compiles
        some = {part: lower for part, lower in parts.items() if (part[0] == "naive") is is_naive}
        compiled |= compile_together(some, failed.__setitem__, threads=1 if is_naive else COMPILERS)
    records, too_long = [], set()
    for name, which, T in parts:
        if (name, which) in too_long:
            continue
        try:
            if (name, which, T) in failed:
                raise failed[name, which, T]
            (ready,) = compiled[name, which, T]
            arrays = inputs_of(Case(1, T, T, 1, 1, 64, "bfloat16", True))
            jax.block_until_ready(ready(*arrays[: 3 if which == "forward" else 4]))  # it fits, or this raises
        except Exception as error:
            note(f"memory: {name}: {which} at T = {T}: {reason_of(error)}")
            too_long.add((name, which))
            continue
        report = ready.memory_analysis()
        needed = report.argument_size_in_bytes + report.output_size_in_bytes + report.temp_size_in_bytes
        records.append({"implementation": name, "pass": which, "T": T, "N": 1, "H": 64, "bytes": needed})
    return records


@dataclass(frozen=True)
class Machine:
    """Where and when the figures were taken."""

    card: str
    versions: dict
    commit: str
    date: str

    @classmethod
    def here(cls, commit=None):
        device = default_device()
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        versions["cuda"] = getattr(device.client, "platform_version", "unknown").splitlines()[0].removeprefix("cuda ")
        versions["driver"] = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        try:
            from jax._src.lib import cuda_versions

            versions["cudnn"] = str(cuda_versions.cudnn_get_version())
        except Exception:
            versions["cudnn"] = "unknown"
        for name in ("torch", "triton", "tokamax"):  # of the peers
            if importlib.util.find_spec(name):
                versions[name] = importlib.metadata.version(name)
        commit = commit or _output_of("git", "rev-parse", "--short", "HEAD")
        return cls(device.device_kind, versions, commit, datetime.date.today().isoformat())

    def header(self):
        return asdict(self)


def _output_of(*command):
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
        return lines[0].strip() if lines else "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def gpu_or_reason():
    """None where the kernels can be compiled for this machine, otherwise the reason why not."""
    device = default_device()
    if device.platform != "gpu":
        return "this machine has no GPU that JAX can use"
    if compute_capability() < (8, 0):
        return f"the kernels need compute capability 8.0 (Ampere) or newer, which {device.device_kind} has not"
    return None


def run(cases, note, progress=print, began=None, limit_s=380.0, processes=0):
    """Records of cases, until limit_s is over; what is left out then is noted. All are compiled before."""
    began = time.perf_counter() if began is None else began
    parts, here, records = {}, {}, []
    for case in cases:
        implementations = {name: OF_JAX[name] for name in names_for(case) if name in OF_JAX}
        for part, lower in parts_of_case(case, implementations, note).items():
            # XLA tries the products of naive attention in the GPU's memory, where nobody else may be at it. And
            # JAX 0.11.2 can't read a compiled program of tokamax that another process hands over.
            (here if part[1].startswith(("naive", "tokamax")) else parts)[case, *part] = lower
    parts |= {(case, "right", "answer"): functools.partial(right_of, case) for case in cases}

    def complain(part, error):
        case, which, name = part
        note(f"{case.name}: {name}: {which}: {reason_of(error)}")

    bar = functools.partial(tqdm, desc="compiling", mininterval=5)
    compiled = compile_together(parts, complain, processes, bar)
    compiled |= compile_together(here, complain, threads=1)
    progress(f"compiled after {time.perf_counter() - began:.0f} s")
    for case in cases:
        if time.perf_counter() - began > limit_s:
            note(f"{case.name}: left out, the time was up")
            continue
        implementations = {name: OF_TORCH[name] for name in names_for(case) if name in OF_TORCH}
        of_case = {part[1:]: stages for part, stages in compiled.items() if part[0] == case}
        (answer,) = of_case.pop(("right", "answer"), (None,))
        try:
            found = measure_case(case, implementations, note=note, compiled=of_case, answer=answer)
        except Exception as error:
            note(f"{case.name}: {reason_of(error)}")
            continue
        records += found
        progress(f"{time.perf_counter() - began:4.0f} s {line(case, found)}")
    return records


def decode_part(machine, top, note, progress=print, processes=0):
    """The part `decode` of the results."""
    records = []
    compiled = decoding.compiled(decoding.GRID, note, functools.partial(compile_together, processes=processes))
    for case in decoding.GRID:
        try:
            found = decoding.measure(case, note, compiled[case])
        except Exception as error:
            note(f"{case.name}: {reason_of(error)}")
            continue
        records += [entry | {"of_copy": round(entry["gbps"] / top["copy_gbps"], 4)} for entry in found]
        progress(decoding.line(case, found))
    header = {name: machine.header()[name] for name in ("commit", "date", "versions")}
    return header | {"copy_gbps": top["copy_gbps"], "records": records}


def line(case, records):
    """One line of the report."""
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
    for H, is_causal in itertools.product((64, 128), (False, True)):
        case = Case.of_grid(4096, H, "bfloat16", is_causal)
        print(line(case, measure_case(case, yours | beside, note=note)), flush=True)
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="make gpu-bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only T = 4096 in bfloat16, without recording")
    parser.add_argument("--mine", action="store_true", help="only the kernel of workbook/mine.py, without recording")
    parser.add_argument("--decode", action="store_true", help="only decoding; the rest of the record stays")
    parser.add_argument("--limit", type=float, default=380.0, help="seconds after which no other case is begun")
    parser.add_argument("--commit", help="what to record as the commit, where git cannot say")
    parser.add_argument(
        "--versions", nargs="*", default=[], metavar="PEER=VERSION", help="of peers that cannot be asked for theirs"
    )
    options = parser.parse_args(arguments)
    reason = gpu_or_reason()
    if reason:
        print(f"Nothing to measure: {reason}.")
        return 1
    began = time.perf_counter()
    notes = []

    def note(text):
        if text not in notes:
            notes.append(text)
            print(f"  ! {text}", flush=True)

    if options.mine:
        return report_mine(note)
    machine = Machine.here(options.commit)
    machine.versions.update(given.split("=", 1) for given in options.versions)
    print(machine.card, *(f"{name} {version}" for name, version in machine.versions.items()), sep=" · ")
    top = ceilings()
    print(f"ceilings: matmul {top['matmul_tflops']:.0f} TFLOP/s, copy {top['copy_gbps']:.0f} GB/s", flush=True)
    path = results.RESULTS / f"{results.slug(machine.card)}.json"
    if options.decode:
        part = decode_part(machine, top, note, functools.partial(print, flush=True), COMPILERS)
        return results.write_or_say(results.read(machine.card) | {"decode": part}, path)
    # The shapes that lessons quote come first, so that a slow machine still has them.
    cases = sorted([*GRID, TUTORIAL, *GROUPED], key=lambda case: (case.T != 4096 and case != TUTORIAL, case.dtype))
    if options.quick:
        cases = [case for case in cases if case.T == 4096 and case.dtype == "bfloat16"]
    show = functools.partial(print, flush=True)
    records = with_fractions(run(cases, note, show, began, options.limit, COMPILERS), top)
    long = [case for case in GRID if case.T == 4096 and case.dtype == "bfloat16"]
    steps = [] if options.quick else ladder_records(long, note, processes=COMPILERS)
    if options.quick:
        return 0
    print(f"{time.perf_counter() - began:.0f} s, and decoding")
    decode = decode_part(machine, top, note, show, COMPILERS)
    memory = memory_records(note)  # last: JAX keeps what it took, and the processes that compile want some too
    found = machine.header() | {"ceilings": top, "records": records, "ladder": steps, "memory": memory, "notes": notes}
    return results.write_or_say(found | {"decode": decode}, path)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory for PyTorch
    sys.exit(main())
