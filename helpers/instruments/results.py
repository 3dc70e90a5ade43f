"""Recorded measurements: one JSON file a GPU, read by the notebooks, written by the benchmark.

    gpu        its name, as its driver gives it
    versions   of driver, CUDA, JAX, cuDNN, Python
    commit, date
    ceilings   matmul_tflops, copy_gbps: a large bf16 product and a large copy in the same run
    records    one for each implementation, pass and case; of_matmul and of_copy are its TFLOP/s and the bandwidth of
               its inputs and outputs as fractions of the ceilings. device_ms is the median of samples_ms, times by the
               device's clock. Those of other implementations with the same number, of the same pass and case, were
               taken in the same turn.
    ladder     one for each step on the way to a faster kernel; `kernel` says of which
    memory     bytes that a program needs
    decode     the same for few queries and many keys, with a header of its own: commit, date, versions,
               copy_gbps and `records`; it may be missing. page: keys of a page, 0 where they lie in one piece;
               gbps: of keys and values read once, of_copy: that as a fraction
    notes      what could not be measured, and why

Other records are of one experiment each, and what they hold says what it is: ring attention on several GPUs
(<gpu>_ring.json), gradients where keys and values have a part in common (<gpu>_common_part.json), forward kernels
that run on every GPU from Ampere on (<gpu>_mma.json), what was tried on the way to a kernel and not kept
(<gpu>_variants.json), the kernels of notebooks 16 and 17 on a GPU (<gpu>_triton.json, <gpu>_cuda.json) and what
they print without one (triton_shown.json, cuda_shown.json), and what the compiler for TPUs says of kernels
(tpu_compile.json).
"""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "records"


def slug(gpu):
    """The name of a GPU as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


def write(results, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path.name}")


def read(what="NVIDIA H100 80GB HBM3"):
    """The record of a GPU, or of an experiment such as "NVIDIA H200 ring"; FileNotFoundError if there is none."""
    return json.loads((RESULTS / f"{slug(what)}.json").read_text())
