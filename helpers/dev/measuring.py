"""What the programs for maintainers share: which GPU this is, compiling for it, and timing only what is right."""

import datetime
import functools
import importlib.metadata
import importlib.util
import platform
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable
from tqdm import tqdm

from helpers.attention.device import compute_capability, default_device
from helpers.dev.workers import Workers

COMPILERS = 12  # threads or processes that compile
MANY = 60  # parts, with which compiling takes so long that a bar shows how far it is


def gpu_or_reason():
    """None where the kernels can be compiled for this machine, otherwise the reason why not."""
    device = default_device()
    if device.platform != "gpu":
        return "this machine has no GPU that JAX can use"
    if compute_capability() < (8, 0):
        return f"the kernels need compute capability 8.0 (Ampere) or newer, which {device.device_kind} has not"
    return None


def this_machine(commit=None, **versions):
    """The header of a record, {"gpu", "versions", "commit", "date"}: where and when figures are taken. Printed.

    commit: where git cannot say; versions: of what cannot be asked for its.
    """
    device = default_device()
    found = {"python": platform.python_version(), "jax": jax.__version__}
    found["cuda"] = getattr(device.client, "platform_version", "unknown").splitlines()[0].removeprefix("cuda ")
    found["driver"] = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        from jax._src.lib import cuda_versions

        found["cudnn"] = str(cuda_versions.cudnn_get_version())
    except Exception:
        found["cudnn"] = "unknown"
    for name in ("torch", "triton"):  # of the peers
        if importlib.util.find_spec(name):
            found[name] = importlib.metadata.version(name)
    found |= versions
    print(device.device_kind, *(f"{name} {version}" for name, version in found.items()), sep=" · ", flush=True)
    commit = commit or _output_of("git", "describe", "--always", "--exclude=*", "--dirty=+")  # + where files differ
    today = datetime.date.today().isoformat()
    return {"gpu": device.device_kind, "versions": found, "commit": commit, "date": today}


def _output_of(*command):
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
        return lines[0].strip() if lines else "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


class Notes(list):
    """What could not be measured, and why: each line is printed when it comes, and kept once."""

    def __call__(self, text):
        if text not in self:
            self.append(text)
            print(f"  ! {text}", flush=True)


def reason_of(error):
    """One line for an exception, or for what `workers` say of one."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {str(error).strip()}"
    is_exhausted = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    if is_exhausted and "shared memory" not in text.lower():
        return "too little memory on this GPU"
    return text.splitlines()[0][:180]


def label_of(part):
    """One line for a part of what is measured: a tuple of texts, and of calls, which have a name."""
    return ": ".join(str(getattr(one, "name", one)) for one in part)


def random_arrays(shapes, dtype, seed=0):
    """Standard normal arrays, made on the device."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def shapes_of(problem, which, sharding=None):
    """What a pass reads: query, key and value, and for "backward" also out, lse, and the gradients of both."""
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    query = shaped((problem.B, problem.T, problem.N, problem.H), problem.dtype)
    key = shaped((problem.B, problem.S, problem.K, problem.H), problem.dtype)
    row = shaped((problem.B, problem.N, problem.T), jnp.float32)
    return [query, key, key] if which == "forward" else [query, key, key, query, row, query, row]


def lowered(function, *inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jax.jit(function).lower(*inputs)


def one_stage(function, inputs):
    """A single program, lowered: what most parts of `compile_together` return."""
    return [lowered(function, *inputs)]


def compile_together(parts, note, processes=0, threads=COMPILERS):
    """{part: compiled programs} of {part: function that returns lowered programs}; note(text) for what fails.

    JAX lowers one after another, and XLA compiles beside it. Lowering kernels takes most of the time: with
    `processes`, so many do both, and hand over what they compiled; functions and what they hold must go through
    pickle then. Otherwise `threads` compile.
    """
    progress = functools.partial(tqdm, desc="compiling", mininterval=5, total=len(parts), disable=len(parts) < MANY)
    if processes:
        return _compile_elsewhere(parts, note, processes, progress)
    compiled, waiting = {}, {}
    with ThreadPoolExecutor(threads) as pool:
        for part, lower in progress(parts.items()):
            try:
                waiting[part] = [pool.submit(stage.compile) for stage in lower()]
            except Exception as error:
                note(f"{label_of(part)}: {reason_of(error)}")
    for part, futures in waiting.items():
        try:
            compiled[part] = [future.result() for future in futures]
        except Exception as error:
            note(f"{label_of(part)}: {reason_of(error)}")
    return compiled


def _compile_elsewhere(parts, note, processes, progress):
    found = {}
    with Workers(_serialized, processes) as workers:
        for outcome in progress(workers.outcomes(parts.items(), patience=120)):
            part = outcome.task[0]
            if outcome.kind != "returned":
                note(f"{label_of(part)}: {reason_of(outcome.value)}")
                continue
            try:
                load = functools.partial(serialize_executable.deserialize_and_load, execution_devices=jax.devices()[:1])
                found[part] = [load(*stage) for stage in outcome.value]
            except Exception as error:
                note(f"{label_of(part)}: {reason_of(error)}")
    return {part: found[part] for part in parts if part in found}


def _serialized(task):
    """The compiled programs of a part, in a form that another process can load."""
    _, lower = task
    jax.config.update("jax_enable_compilation_cache", False)  # what came from a cache on disk cannot be handed over
    return [serialize_executable.serialize(stage.compile()) for stage in lower()]


def say_left_out(note, error, name, *about):
    """Note that an implementation cannot serve a call; once for all calls if it is not here."""
    if isinstance(error, ImportError):
        note(f"{name}: could not be imported ({error})")
    else:
        note(f"{label_of((*about, name))}: {reason_of(error)}")


def right_ones(makers, complaint, note, *about):
    """{name: Timed} of those whose result is right; the others are noted, and never timed.

    makers: {name: function that returns a `timing.Timed`}. complaint(name, result): what is wrong, or None.
    """
    ready = {}
    for name, make in makers.items():
        try:
            program = make()
            found = program.run(*program.inputs[0])
            program.wait(found)
            if wrong := complaint(name, found):
                note(f"{label_of((*about, name))}: {wrong}")
            else:
                ready[name] = program
        except Exception as error:
            say_left_out(note, error, name, *about)
    return ready


def milliseconds(timing):
    """By the device's clock, or by the wall where no profiler could look."""
    return timing.wall_ms if timing.device_ms is None else timing.device_ms


def clocks(timing):
    """The fields of a record that say how long a call took."""
    fields = {"device_ms": timing.device_ms, "wall_ms": timing.wall_ms, "spread": timing.spread}
    return fields | {"samples_ms": [round(sample, 5) for sample in timing.device_samples]}
