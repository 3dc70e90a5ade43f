"""Compile the portable kernels for GPUs from Ampere on, on Linux without one, and see that shared memory holds them.

    python -m helpers.dev.shared_memory        (make gpu-compile)

The kernels get the tiles that `portable.tiles` chooses for the GPU, for long and short sequences. XLA is told
that the GPU has no shared memory at all; it then compiles as far as Triton and says how much there should be.
That must be no more than the GPU has, and no more than `tiles.shared_bytes` promised. One kernel of each kind
is compiled to the end.
"""

import functools
import itertools
import os
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from helpers.attention.masking import Band
from helpers.attention.portable import backward, forward
from helpers.attention.portable.decode import decode, select_splits
from helpers.attention.portable.tiles import Gpu, Tiles, padded_head_dim, select_tiles, shared_bytes
from helpers.attention.problem import Call, Problem
from helpers.dev.measuring import reason_of
from helpers.dev.ptxas import find_toolkit, sharding_on

KIB = 1024
GPUS = [  # by names that Pallas knows, one of a compute capability, two of 9.0: the H200 has a table of its own
    Gpu("NVIDIA A100", (8, 0), 163 * KIB),
    Gpu("NVIDIA A10", (8, 6), 99 * KIB),
    Gpu("NVIDIA L4", (8, 9), 99 * KIB),
    Gpu("NVIDIA H100", (9, 0), 227 * KIB),
    Gpu("NVIDIA H200", (9, 0), 227 * KIB),
    Gpu("NVIDIA B200", (10, 0), 227 * KIB),
    Gpu("NVIDIA RTX PRO 6000", (12, 0), 99 * KIB),
]
KERNELS = "forward", "dkv", "dq"
DECODING = "decode", "decode of pages"
PAGE = 16  # keys
# Rows of an odd number of 16-bit numbers are not copied ahead.
HEAD_DIMS = {"bfloat16": [16, 64, 128, 256, 63, 127, 255], "float32": [16, 64, 128, 256]}
PRECISIONS = {"bfloat16": [None], "float32": [None, "highest"]}  # the second: not by tensor cores
# Of several tiles, of one tile of each size, and of one tile on one side only.
SHAPES = [(4096, 4096), (16, 16), (32, 32), (64, 64), (128, 128), (16, 4096), (64, 4096), (4096, 16)]
BANDS = Band(), Band(right=0)
FEW = [(1, 4096), (8, 4096), (16, 4096), (1, 16)]  # queries, with four heads to a key head: every tile of rows


@dataclass(frozen=True)
class Compilation:
    """A kernel for a GPU, with the tiles that it would get there."""

    gpu: Gpu
    kernel: str
    problem: Problem
    precision: str | None

    @property
    def tiles(self):
        if self.kernel in DECODING:
            return Tiles(*select_splits(self.problem, self.kernel != "decode", self.gpu)[:4])
        return select_tiles(self.kernel, self.problem, self.gpu)

    @property
    def bound(self):
        return shared_bytes(self.kernel.split()[0], self.tiles, self.problem, self.gpu.capability)

    def __str__(self):
        problem, tiles = self.problem, " ".join(map(str, self.tiles))
        words = [self.gpu.name, self.kernel, problem.dtype.name, self.precision]
        words += [f"T {problem.T} S {problem.S} H {problem.H}", "causal" if problem.band.right == 0 else None]
        return " ".join(word for word in words if word) + f", tiles {tiles}"

    def compile(self, shared_memory):
        """Compile it for the GPU as if that had so many bytes of shared memory."""
        problem, tiles = self.problem, self.tiles
        sharding = sharding_of(self.gpu.name, self.gpu.capability, shared_memory)
        array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        query = array((problem.B, problem.T, problem.N, problem.H), problem.dtype)
        key = array((problem.B, problem.S, problem.K, problem.H), problem.dtype)
        row = array((problem.B, problem.N, problem.T), jnp.float32)
        table = array((problem.B, problem.S // PAGE), jnp.int32)
        lengths = array((problem.B,), jnp.int32)

        def run(query, key, value, dout, lse, delta, table, lengths):
            arrays = query, key, value, dout, lse, delta, None, None
            match self.kernel:
                case "forward":
                    return forward.forward(Call(problem, query, key, value, None, None), **tiles._asdict())
                case "dkv":
                    return backward._dkv(problem, arrays, tiles, False)
                case "dq":
                    return backward._dq(problem, arrays, lse, tiles, False)
                case "decode":
                    return decode(Call(problem, query, key, value, None, lengths))
            key, value = (x.reshape(-1, PAGE, *x.shape[2:]) for x in (key, value))
            return decode(Call(problem, query, key, value, None, lengths, table))

        device = AbstractDevice(self.gpu.name, num_cores=None, platform="gpu")
        mesh = use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
        with mesh, jax.default_matmul_precision(self.precision), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Triton backend is deprecated")
            arrays = query, key, key, query, row, row, table, lengths
            return jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).compile()

    def reported_bytes(self):
        """The shared memory that the compiler asks for."""
        try:
            self.compile(shared_memory=0)
        except jax.errors.JaxRuntimeError as error:
            asked = re.search(r"Shared memory size limit exceeded: requested (\d+), available: 0", str(error))
            if not asked:
                raise
            return int(asked[1])
        return 0


sharding_of = functools.cache(sharding_on)


def compilations(gpu):
    """Every `Compilation` for a GPU, without those that differ only in the lengths of several tiles."""
    found = {}
    for kernel, dtype in itertools.product((*KERNELS, *DECODING), HEAD_DIMS):
        shapes, N, bands = (FEW, 4, BANDS[:1]) if kernel in DECODING else (SHAPES, 1, BANDS)
        for H, precision, (T, S), band in itertools.product(HEAD_DIMS[dtype], PRECISIONS[dtype], shapes, bands):
            problem = Problem(1, T, S, N, 1, H, jnp.dtype(dtype), 0.1, band)
            one = Compilation(gpu, kernel, problem, precision)
            single = T <= one.tiles.block_q, S <= one.tiles.block_k
            # A band makes another program only where the loop over keys is unrolled.
            found.setdefault((kernel, dtype, H, precision, one.tiles, single, band if any(single) else None), one)
    return list(found.values())


def checked(compilation, to_the_end):
    """(bytes reported or None, what is not as it should be or None)."""
    try:
        reported, has = compilation.reported_bytes(), compilation.gpu.shared_memory
        if to_the_end:
            compilation.compile(has)
    except Exception as error:
        return None, f"does not compile: {reason_of(error)}"
    wrong = f"needs {reported} bytes of shared memory, of {has}; {compilation.bound} were promised"
    return reported, wrong if reported > min(has, compilation.bound) else None


def main():
    find_toolkit()
    failed = 0
    for gpu in GPUS:
        chosen = compilations(gpu)
        kinds = [(one.kernel, one.problem.dtype.name, padded_head_dim(one.problem.H)) for one in chosen]
        first = [kind not in kinds[:number] for number, kind in enumerate(kinds)]
        largest = dict.fromkeys(kinds, 0)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for one, kind, (reported, wrong) in zip(chosen, kinds, pool.map(checked, chosen, first), strict=True):
                largest[kind] = max(largest[kind], reported or 0)
                if wrong:
                    failed += 1
                    print(f"WRONG: {one}: {wrong}", flush=True)
        for (kernel, dtype, head_padded), reported in largest.items():
            at_most = f"at most {reported:6} of {gpu.shared_memory} bytes of shared memory"
            print(f"{gpu.name:20} {kernel:15} {dtype:9} H{head_padded:<4} {at_most}", flush=True)
    print(f"{failed} are not as they should be." if failed else "All is as it should be.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
