"""Compile the kernels for GPUs from Ampere to Blackwell, on Linux without one, and read what ptxas says.

    python -m helpers.dev.ptxas        (make gpu-compile)

The Mosaic kernels are compiled for a GPU of each compute capability; a table says what they spill, and what they take
of shared memory. Then come the configurations of the Hopper kernels for an H200.
XLA needs a description of a GPU and no GPU; Mosaic hands the kernels to ptxas, which says how many
bytes of registers each one spills to memory and whether it had to serialise wgmmas, which were meant
to run beside other work. The former has a limit, the latter is not allowed. Nor is code that ptxas
before CUDA 13.2 compiles wrongly (see `mistaken_selects`), for which short sequences are compiled too.
"""

import argparse
import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core, utils

from helpers.attention.hopper import backward, backward_schedule, forward
from helpers.attention.hopper.serve import fields_of
from helpers.attention.hopper.warpgroup import HEAD_DIMS
from helpers.attention.masking import Band
from helpers.attention.problem import Call, Problem
from helpers.attention.public import registry
from helpers.dev.measuring import reason_of, shapes_of

# Bytes that a kernel may spill, by pass and padded head_dim: somewhat more than today's kernels do. The
# kernels for a head_dim of 256 merely fit.
ALLOWED_SPILLS = {
    "forward": {64: 200, 128: 120, 256: 150},
    "forward with low bits": {64: 250, 128: 120, 256: 350},
    "backward": {64: 60, 128: 40, 256: 600},
    "backward of groups": {64: 130, 128: 40, 256: 600},
}
HEADS = 16  # of keys; enough that a persistent kernel has more tiles of queries than programs: else it is another
KIB = 1024
GPUS = {  # by compute capability: a name, and bytes of shared memory of a program
    "8.0": ("NVIDIA A100", 163 * KIB),
    "8.6": ("NVIDIA A10", 99 * KIB),
    "8.9": ("NVIDIA L4", 99 * KIB),
    "9.0": ("NVIDIA H100", 227 * KIB),
    "10.0": ("NVIDIA B200", 227 * KIB),
    "12.0": ("NVIDIA RTX PRO 6000", 99 * KIB),
}
DESCRIPTION = """
gpu_device_info {
  cuda_compute_capability { major: MAJOR minor: MINOR feature_extension: EXTENSION }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: OPTIN
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
}
platform_name: "CUDA"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NAME"
"""


@dataclass(frozen=True)
class Configuration:
    """A pass of the Hopper kernels: "forward" with a `forward.Tiles`, or "backward" with a pair of `Tiles`."""

    which: str
    H: int
    is_causal: bool
    tiles: tuple
    group: int = 1  # query heads of a key/value head
    keeps_low_bits: bool = False  # in a forward pass

    def __str__(self):
        mask = ("causal" if self.is_causal else "full") + (f" {self.group}:1" if self.group > 1 else "")
        mask += " low" * self.keeps_low_bits
        fields = fields_of(self.tiles).items()
        tiles = (f"{kernel} {' '.join(map(str, values.values()))}" for kernel, values in fields)
        return f"{self.which:8} H{self.H:<3} {mask:10} {', '.join(tiles)}"

    def lowered(self, T=4096, S=4096, scale=0.1, sharding=None):
        """The pass for CUDA, for bf16 sequences of T queries and S keys."""
        band = Band.of(self.is_causal)
        N = HEADS * self.group
        problem = Problem(1, T, S, N, HEADS, self.H, jnp.dtype(jnp.bfloat16), scale, band)

        def run(query, key, value, *residuals):
            call = Call(problem, query, key, value, None, None)
            if self.which == "forward":
                return forward.forward(call, tiles=self.tiles, keeps_low_bits=self.keeps_low_bits)
            return backward.backward(call, *residuals, tiles=self.tiles)

        arrays = shapes_of(problem, self.which, sharding)
        return jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",))


def forwards(H, is_causal, S, tiles):
    """The `Configuration` of a forward pass with these tiles, and that which keeps low bits, of S keys."""
    problem = Problem(1, S, S, 1, 1, H, jnp.dtype(jnp.bfloat16), 1.0, Band.of(is_causal))
    exact = forward.with_room_for_constants(tiles, problem)
    return [
        Configuration("forward", H, is_causal, tiles),
        Configuration("forward", H, is_causal, exact, keeps_low_bits=True),
    ]


def configurations():
    """Every `Configuration` that the Hopper kernels may have, each of them once."""
    found = []
    for H, is_causal, T in itertools.product(HEAD_DIMS, (False, True), (1024, 4096, 16384)):
        problem = Problem(1, T, T, 1, 1, H, jnp.dtype(jnp.bfloat16), 1.0, Band.of(is_causal))
        for tiles in (forward.tiles_of_many_turns(problem), forward.default_tiles(problem)):
            found += forwards(H, is_causal, T, tiles)
        for deterministic in (False, True):
            tiles = backward_schedule.default_tiles(problem, deterministic)
            found.append(Configuration("backward", H, is_causal, tiles))
    fused = [one for one in found if one.which == "backward" and one.tiles[1] is None]
    found += [replace(one, tiles=(one.tiles[0]._replace(ordered=True), None)) for one in fused]
    # A walk through the heads of a group is another loop. Of seven, for eight are divided by a shift.
    found += [replace(one, group=7) for one in found if one.which == "backward"]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel: bytes that it stores to memory for lack of registers, and if wgmmas wait in turn."""

    name: str
    spilled: int
    serialised: bool


def kernels_of(text):
    """The `Kernel`s in the output of `ptxas -v`."""
    # C7510 to C7514 all begin with "Potential Performance Loss: wgmma.mma_async instructions are serialized".
    serialised = set(re.findall(r"\(C751[0-4]\).*'(\w+)'", text))
    sizes = re.findall(r"Function properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores", text)
    return [Kernel(name, int(spilled), name in serialised) for name, spilled in sizes]


def lowered_by_mosaic(which, H, dtype, scale, sharding=None):
    """A pass of the Mosaic kernels, "forward", "backward", "decode" or "pages", for CUDA.

    It has 4096 keys, and four query heads to a key head.
    """
    few, S, page = which in ("decode", "pages"), 4096, 16
    T = 8 if few else S
    problem = Problem(1, T, S, HEADS, HEADS // 4, H, jnp.dtype(dtype), scale, Band.of(not few))
    query, key, _, *residuals = shapes_of(problem, which if which == "backward" else "forward", sharding)
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    lengths = shaped((1,), jnp.int32) if few else None
    if which == "pages":
        key = shaped((S // page, page, *key.shape[2:]), dtype)
    table = shaped((1, S // page), jnp.int32) if which == "pages" else None
    kernels = registry.kernels("mosaic")

    def run(query, key, value, lengths, table, *residuals):
        call = Call(problem, query, key, value, None, lengths, table)
        if residuals:
            return kernels.backward(call, *residuals, None)
        keeps = not few and problem.dtype.itemsize == 2
        return (kernels.forward_with_low_bits if keeps else kernels.forward)(call)

    return jax.jit(run).trace(query, key, key, lengths, table, *residuals).lower(lowering_platforms=("cuda",))


@contextmanager
def compiling_for(capability, memory):
    """A list of the bytes of shared memory of the kernels that are lowered in this context, for such a GPU."""
    sizes, size_of = [], core._smem_tree_size

    def noted(buffers):
        sizes.append(size_of(buffers))
        return sizes[-1]

    modules = "helpers.attention.mosaic.warp", "helpers.attention.mosaic.decode"
    with (
        mock.patch.object(utils, "_infer_arch", lambda: capability),
        mock.patch.object(core, "_smem_tree_size", noted),
        mock.patch(f"{modules[0]}.shared_memory", lambda: memory),
        mock.patch(f"{modules[1]}.shared_memory", lambda: memory),
    ):
        yield sizes


def mosaic_table(gpu):
    """Print what ptxas says of the Mosaic kernels for one of `GPUS`; return how many it does not compile."""
    (name, memory), capability = GPUS[gpu], tuple(map(int, gpu.split(".")))
    sharding, failed = sharding_on(name, capability, memory), 0
    passes = itertools.product(("forward", "backward", "decode", "pages"), HEAD_DIMS, ("bfloat16", "float32"))
    for number, (which, H, dtype) in enumerate(passes, 1):
        try:
            with compiling_for(capability, memory) as sizes, standard_output() as written:
                # Not twice the same scale, for Mosaic does not compile the same kernel again.
                lowered_by_mosaic(which, H, dtype, 0.1 / number, sharding).compile()
                spilled = " + ".join(str(kernel.spilled) for kernel in kernels_of(written()))
            shared = f"{max(sizes) / KIB:5.1f} of {memory // KIB} KiB of shared memory"
            said = f"{spilled:>12} bytes spilled, at most {shared}"
        except Exception as error:
            failed += 1
            said = f"does not compile: {reason_of(error)}"
        print(f"{name:20} {which:8} H{H:<3} {dtype:8} {said}", flush=True)
    return failed


def mistaken_selects(ptx):
    """The selects of a PTX text by a predicate that is set in several places, as a list of texts.

    A predicate that counts the steps of a loop (another step, if there was one only) is set before the loop and
    in it. ptxas before CUDA 13.2 may move a select by it from before the loop into the loop, where it is
    another by then: tests/one_turn_or_two.ptx. Where all places set it by the same comparison of registers that are
    written once, it is the same everywhere.
    """
    ptx = re.sub(r"//.*", "", ptx)
    written = Counter(
        register
        for first in re.findall(r"^\s*(?:@!?%\w+\s+)?[\w.:]+\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)", ptx, re.MULTILINE)
        for register in re.findall(r"%\w+", first)
    )
    settings = defaultdict(list)
    for how, predicate, operands in re.findall(
        r"^\s*(setp[.\w]*|(?:mov|not|and|or|xor)\.pred)\s+(%\w+)([^;]*);", ptx, re.MULTILINE
    ):
        settings[predicate].append((how, operands))

    def may_differ(predicate):
        places = settings[predicate]
        same = len(set(places)) == 1 and all(written[one] == 1 for one in re.findall(r"%\w+", places[0][1]))
        return len(places) > 1 and not same

    selects = re.findall(r"^\s*(selp\.[^;]*,\s*(%\w+));", ptx, re.MULTILINE)
    return [" ".join(text.split()) for text, predicate in selects if may_differ(predicate)]


def complaints(configuration, kernels):
    """What is not as it should be, as a list of texts."""
    which = configuration.which + " of groups" * (configuration.group > 1)
    which += " with low bits" * configuration.keeps_low_bits
    allowed = ALLOWED_SPILLS[which][configuration.H]
    found = [f"spills {kernel.spilled} bytes, of {allowed} allowed" for kernel in kernels if kernel.spilled > allowed]
    found += ["serialises wgmmas" for kernel in kernels if kernel.serialised]
    return found if kernels else ["ptxas said nothing"]


@contextmanager
def standard_output():
    """A function that returns what was written to standard output in this context, also by C++."""
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: (file.seek(0), file.read())[1]
        finally:
            os.dup2(before, 1)
            os.close(before)


def find_toolkit():
    """Let XLA and Mosaic find the compiler of CUDA. Before JAX starts."""
    toolkit = Path(importlib.util.find_spec("nvidia.cu13").submodule_search_locations[0])
    os.environ["PATH"] = f"{toolkit / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={toolkit}"
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"


def sharding_on(name, capability, shared_memory):
    """Where the arrays of a program would be for a GPU that is an H200 but for these three; after `find_toolkit`."""
    fields = {"NAME": name, "MAJOR": capability[0], "MINOR": capability[1], "OPTIN": shared_memory}
    fields["EXTENSION"] = "ACCELERATED_FEATURES" if capability >= (9, 0) else "NONE"  # Mosaic takes sm_90a, not sm_90
    description = functools.reduce(lambda text, field: text.replace(field, str(fields[field])), fields, DESCRIPTION)
    devices = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1").devices
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), jax.sharding.PartitionSpec())


def lengths_of(configuration):
    """[(T, S)] with which a configuration is compiled: long sequences, and in causal calls few tiles beside many."""
    long, few, many = (4096, 4096), (2, 3), 640
    return [long] + [(n * 64, many) for n in few] + [(many, n * 64) for n in few] if configuration.is_causal else [long]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.dev.ptxas", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=GPUS, help="only the Mosaic kernels, for this compute capability")
    only = parser.parse_args(arguments).only
    find_toolkit()
    if only:
        return int(mosaic_table(only) > 0)
    # A process compiles for one GPU: Mosaic keeps to the first.
    itself = [sys.executable, "-m", "helpers.dev.ptxas", "--only"]
    failed = sum(subprocess.run([*itself, gpu]).returncode for gpu in GPUS)
    sharding = sharding_on("NVIDIA H200", (9, 0), 227 * KIB)
    cases = [(configuration, lengths) for configuration in configurations() for lengths in lengths_of(configuration)]
    for number, (configuration, (T, S)) in enumerate(cases, 1):
        kernels = []
        scale = 0.1 / number  # not twice the same, for Mosaic does not compile the same kernel again
        try:
            with standard_output() as written:
                configuration.lowered(T, S, scale, sharding).compile()
                text = written()
            kernels = kernels_of(text)
            wrong = complaints(configuration, kernels) if T == S else [] if kernels else ["ptxas said nothing"]
            for ptx in text.split(".visible .entry"):
                wrong += [f"ptxas before CUDA 13.2 may mistake {select}" for select in mistaken_selects(ptx)]
        except Exception as error:
            wrong = [f"does not compile: {reason_of(error)}"]
        failed += bool(wrong)
        spilled = " + ".join(str(kernel.spilled) for kernel in kernels)
        said = f"{spilled or '?':>9} bytes spilled{', WRONG: ' * bool(wrong)}{'; '.join(wrong)}"
        print(f"{configuration!s:75} {f'{T}, {S}':>10} {said}")
    print(f"{failed} are not as they should be." if failed else "All is as it should be.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
