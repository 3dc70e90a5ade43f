"""Recorded measurements: one JSON file a GPU, read by the notebooks, written by the benchmark.

    card       name of the GPU, as its driver gives it
    versions   of driver, CUDA, JAX, cuDNN, Python
    commit, date
    ceilings   matmul_tflops, copy_gbps: a large bf16 product and a large copy in the same run
    records    one for each implementation, pass and case, see RECORD; of_matmul and of_copy are its
               TFLOP/s and the bandwidth of its inputs and outputs as fractions of the ceilings
    ladder     one for each step on the way to a faster kernel, see RUNG; `kernel` says of which
    memory     bytes that a program needs, see MEMORY
    decode     the same for few queries and many keys, with a header of its own: commit, date, versions,
               copy_gbps and `records`, see DECODE; it may be missing
    notes      what could not be measured, and why

The tuner's table stands beside the kernels, in attention/tuned/<card>.json:

    tiles          the fastest for each portable kernel, see TILES
    sweep          everything that was tried, with its time in `ms` by the host's clock; it may be empty
    decode         the fastest for few queries, by the size of a tile of rows, see LAUNCH
    decode_sweep   the same for them, by the device's clock, with B and S
    hopper         the fastest for each pass of the Hopper kernels, see HOPPER; only for Hopper GPUs
    hopper_sweep   the same for them; in the file of the H200 the times of the finalists are by the device's
                   clock
    kept           {part: header} of what stands there from an earlier run, when only a part was tuned

Ring attention on several GPUs of one host stands in <card>_ring.json: `rows`, see RING.

The errors of gradients where keys and values have a part in common stand in <card>_common_part.json: `heads`, `rows`
of long sequences and `short` ones, see COMMON_PART.

What `dialects.triton_gpu` measured of the Triton kernels stands in <card>_triton.json, and what Triton prints without
a GPU in triton_shown.json, under the name "Triton" for a GPU: `outputs`, texts by name. The same of CUDA C++ stands
in <card>_cuda.json and cuda_shown.json.

What the compiler for TPUs says of kernels stands in tpu_compile.json: `rows`, see COMPILED_FOR_TPU, and `block`, the
size of their tiles.

What was tried on the way to a kernel stands in <card>_variants.json as far as notebooks show it, see VARIANT (NOTES.md
says the rest), and beside it

    factors        the speeds of changes, as multiples, see FACTOR
    compiled       registers of a thread of the Hopper ladder, see COMPILED
    instructions   how many instructions a step of a loop has
    loops          the main loops of fused backward kernels in machine code, see LOOP
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from helpers.attention import tables
from helpers.attention.tables import slug

RESULTS = Path(__file__).parent / "records"

KINDS = {"text": str, "whole": int, "number": (int, float), "flag": bool, "rows": list, "parts": dict}


def _fields(**kinds):
    """{name of a field: types of its value}. kinds: names by a kind of KINDS, or by one with "_or_none" behind it."""
    found = {}
    for kind, names in kinds.items():
        types = KINDS[kind.removesuffix("_or_none")]
        types = types if isinstance(types, tuple) else (types,)
        found |= dict.fromkeys(names.split(), types + (type(None),) * kind.endswith("_or_none"))
    return found


class Schema(NamedTuple):
    """What a file must have. fields: of the file itself; parts: {name of a list: the fields of each of its rows}."""

    fields: dict
    parts: dict


# samples_ms: the times by the device's clock of which device_ms is the median. Those of other implementations with the
# same number, of the same pass and case, were taken in the same turn.
RECORD = _fields(text="implementation pass dtype", whole="B T S N K H", flag="is_causal", rows="samples_ms")
RECORD |= _fields(number="wall_ms spread tflops of_matmul of_copy", number_or_none="device_ms", parts_or_none="tiles")
TRIAL = _fields(text="kernel name", whole="H T", flag="is_causal")
RUNG = TRIAL | _fields(number="device_ms spread tflops")
MEMORY = _fields(text="implementation pass", whole="T N H bytes")
MS = _fields(number="ms")
TILES = _fields(text="kernel", whole="itemsize head_padded block_q block_k num_warps num_stages", flag="is_causal")
LAUNCH = _fields(whole="itemsize head_padded block_r block_k num_warps num_stages per_processor", flag="in_pages")
# page: keys of a page, 0 where they lie in one piece. gbps: of keys and values read once; of_copy: that as a fraction.
DECODE = _fields(text="implementation dtype", whole="B T S N K H page", number="device_ms wall_ms spread gbps of_copy")
# pass: "forward", "backward" or "deterministic backward". up_to: the longest sequence (keys of a forward,
# queries of a backward) that the row is for, or None. tiles: for each kernel of the pass, see HOPPER_TILES.
HOPPER = _fields(text="pass", whole="head_padded", flag="is_causal", whole_or_none="up_to", parts="tiles")
_tiles = _fields(whole="block_q block_k stages warpgroups")
_backward_tiles = _tiles | _fields(flag="delayed keeps_addresses zeros_ahead")
HOPPER_TILES = {"forward": _tiles | _fields(whole_or_none="programs", flag="ahead")}
HOPPER_TILES |= dict.fromkeys(("fused", "dkv", "dq"), _backward_tiles)
PASSES = {
    "forward": [{"forward"}],
    "backward": [{"fused"}, {"dkv", "dq"}],
    "deterministic backward": [{"dkv", "dq"}],
}
COMPILED = _fields(whole="rung H registers", flag="is_causal")
# loads, stores: of spilled registers
LOOP = _fields(text="name addresses", whole="H instructions loads stores to_uniform", flag="is_causal")
VARIANT = TRIAL | _fields(number="tflops")
# factor: the speed as a multiple of that of the kernel to which the change was made
FACTOR = TRIAL | _fields(number="factor")
# variant: how the exchange was compiled. alone_ms: the same work on one GPU without any; efficiency: that by ms.
RING = _fields(text="case variant", whole="T devices", number="alone_ms ms efficiency")
# kind, mean: as in `common_part`. errors: {implementation: ERRORS}, relative; None where the right answer is 0.
COMMON_PART = _fields(whole="T S H", text="dtype kind", flag="is_causal", number="mean", parts="errors")
ERRORS = _fields(number_or_none="dq dk dv", number="of_terms")
# implementation: "ours", or JAX's "flash" or "splash". vmem in bytes; bundles and spills as in `tpu_compile`.
COMPILED_FOR_TPU = _fields(
    text="chip implementation which dtype kernel", whole="H vmem bundles spills", flag="is_causal"
)

_made = _fields(text="card date", parts="versions")
_header = _made | _fields(text="commit")
FILE = Schema(
    _header | _fields(parts="ceilings", rows="records ladder memory notes"),
    {"records": RECORD, "ladder": RUNG, "memory": MEMORY},
)
DECODE_PART = Schema(
    _fields(text="commit date", parts="versions", number="copy_gbps", rows="records"), {"records": DECODE}
)
TILES_FILE = Schema(
    _header | _fields(rows="tiles sweep"),
    {
        "tiles": TILES,
        "sweep": TILES | MS,
        "decode": LAUNCH,
        "decode_sweep": LAUNCH | MS | _fields(whole="B S"),
        "hopper": HOPPER,
        "hopper_sweep": HOPPER | MS,
    },
)
_rows = _header | _fields(rows="rows")
RING_FILE = Schema(_rows, {"rows": RING})
COMMON_PART_FILE = Schema(
    _rows | _fields(whole="heads", rows="short notes"), {"rows": COMMON_PART, "short": COMMON_PART}
)
COMPILED_FOR_TPU_FILE = Schema(_rows | _fields(whole="block"), {"rows": COMPILED_FOR_TPU})
TRITON_FILE = Schema(_header | _fields(parts="samples", rows="correct second times tried strides notes"), {})
CUDA_FILE = Schema(_header | _fields(rows="correct times resources notes"), {})
SHOWN_FILE = Schema(_fields(text="card", parts="versions outputs"), {})
VARIANTS_FILE = Schema(
    _made | _fields(rows="notes variants factors compiled loops", parts="instructions"),
    {
        "variants": VARIANT,
        "factors": FACTOR,
        "compiled": COMPILED,
        "loops": LOOP,
    },
)


def check(results, schema=FILE):
    """Raise ValueError naming the first field of recorded results that is missing or of a wrong type."""
    _check_parts("results", "", results, schema)
    if schema is FILE:
        if "decode" in results:
            _check_parts("decode", "decode: ", results["decode"], DECODE_PART)
        _check_fields("ceilings", results["ceilings"], _fields(number="matmul_tflops copy_gbps"))
    if schema is COMMON_PART_FILE:
        for row in (*results["rows"], *results["short"]):
            for name, errors in row["errors"].items():
                _check_fields(f"errors of {name}", errors, ERRORS)
    for part in ("hopper", "hopper_sweep"):
        for number, row in enumerate(results.get(part, ())):
            where = f"{part}[{number}]"
            if set(row["tiles"]) not in PASSES.get(row["pass"], ()):
                raise ValueError(f"{where}: {row['pass']} has no kernels {sorted(row['tiles'])}")
            for kernel, fields in row["tiles"].items():
                _check_fields(f"{where}: tiles: {kernel}", fields, HOPPER_TILES[kernel])
    for number, record in enumerate(results["records"] if schema is FILE else ()):
        if record["pass"] not in ("forward", "backward"):
            raise ValueError(f"records[{number}]: pass must be forward or backward, got {record['pass']!r}")
        if not (record["wall_ms"] > 0 and record["tflops"] > 0):
            raise ValueError(f"records[{number}]: wall_ms and tflops must be positive")


def _check_parts(name, within, results, schema):
    _check_fields(name, results, schema.fields)
    for part, fields in schema.parts.items():
        for number, entry in enumerate(results.get(part, ())):
            _check_fields(f"{within}{part}[{number}]", entry, fields)


def _check_fields(where, entry, fields):
    for name, types in fields.items():
        if name not in entry:
            raise ValueError(f"{where}: {name} is missing")
        wrong_bool = isinstance(entry[name], bool) and bool not in types
        if wrong_bool or not isinstance(entry[name], types):
            raise ValueError(f"{where}: {name} is {entry[name]!r}, expected {' or '.join(t.__name__ for t in types)}")


def write(results, path, schema=FILE):
    """Check the results and write them to path, whole or not at all."""
    check(results, schema)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_or_say(results, path, schema=FILE):
    """Write the results of a command, or print why that failed. Returns its exit status."""
    try:
        write(results, path, schema)
    except OSError as error:
        print(f"The figures above could not be recorded in {path.name}: {error}")
        return 1
    print(f"wrote {path.name}")
    return 0


def read(card="NVIDIA H200", suffix="", schema=FILE):
    """The recorded results of a GPU; FileNotFoundError where there are none."""
    return _read(RESULTS / f"{slug(card)}{suffix}.json", schema)


def _read(path, schema):
    with open(path) as file:
        results = json.load(file)
    check(results, schema)
    return results


def read_tiles(card="NVIDIA H200"):
    """The tuner's table of a GPU; FileNotFoundError where there is none."""
    return _read(tables.path_of(card), TILES_FILE)


def read_ring(card="NVIDIA H200"):
    """Ring attention on several GPUs; FileNotFoundError where nothing was recorded."""
    return read(card, "_ring", RING_FILE)


def read_common_part(card="NVIDIA H100 80GB HBM3"):
    """Errors of gradients where keys and values have a part in common; FileNotFoundError where none are recorded."""
    return read(card, "_common_part", COMMON_PART_FILE)


def read_compiled_for_tpu():
    """What the compiler for TPUs said of kernels."""
    return read("TPU", "_compile", COMPILED_FOR_TPU_FILE)


def read_variants(card="NVIDIA H200"):
    """What was tried and not kept; FileNotFoundError where nothing was recorded."""
    return read(card, "_variants", VARIANTS_FILE)
