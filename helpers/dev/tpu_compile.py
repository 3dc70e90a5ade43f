"""Compile every configuration of the TPU kernels with Google's compiler, on Linux without one, and read what it says.

    python -m helpers.dev.tpu_compile        (make tpu-compile)

The compiler, libtpu, needs a description of a chip and no chip. It packs instructions into bundles, of which a core
issues one a cycle unless it waits for memory, and writes its schedule to files. Two numbers of a kernel are read
there. They are the compiler's, and nothing here ran on a TPU:

    vmem      bytes of VMEM that the kernel takes, with two buffers for each block that streams by
    bundles   from the first product of matrices to the last: a step, nearly. Kernels with equal tiles have equal
              products, so the fewer the better; where a kernel has several forms of a step, all of them are in it
"""

import itertools
import os
import re
import sys
import tempfile
from contextlib import contextmanager
from importlib import util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from helpers.attention import tpu
from helpers.attention.masking import Band
from helpers.attention.problem import Call, Problem
from helpers.dev.measuring import reason_of, shapes_of

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
B, N, T = 32, 16, 2048  # so large that of all arrays the compiler can put only rows of statistics into VMEM whole
# Calls with everything that a configuration does not have, and lengths; to see that they compile.
UNUSUAL = {
    "window, 4 queries a key": Problem(2, 600, 1000, 8, 2, 80, jnp.dtype(jnp.bfloat16), 0.1, Band(128, 64)),
    "one query, one key, H1": Problem(2, 1, 1, 2, 1, 1, jnp.dtype(jnp.float32), 0.1, Band()),
    "float16, few keys, offset": Problem(1, 4096, 100, 4, 4, 256, jnp.dtype(jnp.float16), -0.1, Band(None, -20)),
    "soft cap, functions": Problem(
        *(2, 600, 1000, 4, 2, 64, jnp.dtype(jnp.bfloat16), 0.1, Band(None, 0), 30.0),
        *(lambda b, n, i, j: jnp.where(n > 0, i // 300 != n, i == i), lambda s, b, n, i, j: s + b - abs(i - j) / 64),
    ),
}


def program(problem, which, with_lengths=False):
    """(function, its arrays) of a pass."""
    lengths = [jax.ShapeDtypeStruct((problem.B,), jnp.int32)] * 2 * with_lengths

    def run(query, key, value, *rest):
        call = Call(problem, query, key, value, *(rest[: len(lengths)] or (None, None)))
        return tpu.forward(call) if which == "forward" else tpu.backward(call, *rest[len(lengths) :])

    arrays = shapes_of(problem, which)
    return run, [*arrays[:3], *lengths, *arrays[3:]]


def compile_for(chip, run, arrays, precision=None):
    """Compile a function for one chip."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[:1]
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(device), ("x",)), jax.sharding.PartitionSpec())
    arrays = [array.update(sharding=sharding) for array in arrays]
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh), jax.default_matmul_precision(precision):
        jax.jit(run).lower(*arrays).compile()


def bytes_of_vmem(text):
    """What the allocations of a kernel, as the compiler lists them, take of VMEM."""
    return sum(int(size, 16) for size in re.findall(r"#allocation\d+ \[.*space=vmem, size = (0x[0-9a-f]+)", text))


def schedule(text):
    """How many bundles from the first product to the last, by the compiler's table of units in use, a bundle a row."""
    head, _, rows = text.partition("== UTILIZATION:\n")
    names = [name.strip() for name in head.splitlines()[1].split(",")]
    at = np.flatnonzero([int(row.split()[names.index("MATMUL")]) for row in rows.splitlines()])
    return int(at[-1] - at[0] + 1)


def kernels_of(folder):
    """{name: numbers} of the kernels that were compiled into a folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        kernel = re.match(r"\d+-(\S*(?:attention|mha)\S*?)(?:\.\d+)*-\d+-(original|final_hlo-static.*)\.txt", path.name)
        if kernel:
            numbers = found.setdefault(kernel[1], {})
            if kernel[2] == "original":
                numbers["vmem"] = bytes_of_vmem(path.read_text())
            else:
                numbers["bundles"] = schedule(path.read_text())
    return found


def compile_all(folder):
    """Compile and print each configuration. Returns how many failed."""
    failed = []

    @contextmanager
    def noticed(said):
        try:
            yield
        except Exception as error:
            failed.append(said)
            print(f"{said} WRONG: {reason_of(error)}", flush=True)
        for path in folder.iterdir():
            path.unlink()

    configurations = itertools.product(("forward", "backward"), (64, 128, 256), ("bfloat16", "float32"), (False, True))
    for chip, (which, H, dtype, is_causal) in itertools.product(CHIPS, configurations):
        problem = Problem(B, T, T, N, N, H, jnp.dtype(dtype), 0.1, Band.of(is_causal))
        said = f"{chip} {which:8} H{H:<3} {dtype:8} {'causal' if is_causal else 'full':6}"
        with noticed(said):
            compile_for(chip, *program(problem, which))
            kernels = kernels_of(folder)
            if not kernels:
                raise RuntimeError("the compiler wrote no schedule")
            for name, numbers in kernels.items():
                more = f"{numbers['vmem'] / 2**20:5.2f} MiB of VMEM, {numbers['bundles']:5} bundles"
                print(f"{said} {name:32.32} {more}", flush=True)
    choices = itertools.product(CHIPS, UNUSUAL.items(), ("forward", "backward"), ("default", "highest"))
    for chip, (name, problem), which, precision in choices:
        said = f"{chip} {which:8} {name}, {precision} precision:"
        with noticed(said):
            compile_for(chip, *program(problem, which, with_lengths=True), precision)
            print(f"{said} compiles", flush=True)
    return len(failed)


def main():
    if not (library := util.find_spec("libtpu")):
        return "The compiler for TPUs is not installed here; make tpu-compile installs it, for Linux on x86-64."
    os.environ.setdefault("TPU_LIBRARY_PATH", str(Path(library.origin).with_name("libtpu.so")))
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # which asks a network what this machine is
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        failed = compile_all(Path(folder))
    print(f"{failed} do not compile." if failed else "All compile. Nothing ran on a TPU.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
