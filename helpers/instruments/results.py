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

The table of tiles stands beside the kernels, in attention/tuned/<card>.json:

    hopper         the fastest for each pass of the Hopper kernels, see HOPPER; only for Hopper GPUs

Other records are of one experiment each, and what they hold says what it is: ring attention on several GPUs
(<card>_ring.json), gradients where keys and values have a part in common (<card>_common_part.json), forward kernels
that run on every GPU from Ampere on (<card>_mma.json), what was tried on the way to a kernel and not kept
(<card>_variants.json), the kernels of notebooks 16 and 17 on a GPU (<card>_triton.json, <card>_cuda.json) and what
they print without one (triton_shown.json, cuda_shown.json), and what the compiler for TPUs says of kernels
(tpu_compile.json).
"""

import json
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
RUNG = _fields(text="kernel name", whole="H T", flag="is_causal", number="device_ms spread tflops")
MEMORY = _fields(text="implementation pass", whole="T N H bytes")
# page: keys of a page, 0 where they lie in one piece. gbps: of keys and values read once; of_copy: that as a fraction.
DECODE = _fields(text="implementation dtype", whole="B T S N K H page", number="device_ms wall_ms spread gbps of_copy")
# pass: "forward", "backward" or "deterministic backward". up_to: the longest sequence (keys of a forward,
# queries of a backward) that the row is for, or None. tiles: for each kernel of the pass, see HOPPER_TILES.
HOPPER = _fields(text="pass", whole="head_padded", flag="is_causal", whole_or_none="up_to", parts="tiles")
_tiles = _fields(whole="block_q block_k stages warpgroups")
_backward_tiles = _tiles | _fields(flag="delayed keeps_addresses")
HOPPER_TILES = {"forward": _tiles | _fields(whole_or_none="programs", flag="ahead")}
HOPPER_TILES |= dict.fromkeys(("fused", "dkv", "dq"), _backward_tiles)
PASSES = {
    "forward": [{"forward"}],
    "backward": [{"fused"}, {"dkv", "dq"}],
    "deterministic backward": [{"dkv", "dq"}],
}
_header = _fields(text="card date commit", parts="versions")
FILE = Schema(
    _header | _fields(parts="ceilings", rows="records ladder memory notes"),
    {"records": RECORD, "ladder": RUNG, "memory": MEMORY},
)
DECODE_PART = Schema(
    _fields(text="commit date", parts="versions", number="copy_gbps", rows="records"), {"records": DECODE}
)
TILES_FILE = Schema(_header | _fields(rows="hopper"), {"hopper": HOPPER})


def check(results, schema=FILE):
    """Raise ValueError naming the first field of recorded results that is missing or of a wrong type."""
    _check_parts("results", "", results, schema)
    if schema is FILE:
        if "decode" in results:
            _check_parts("decode", "decode: ", results["decode"], DECODE_PART)
        _check_fields("ceilings", results["ceilings"], _fields(number="matmul_tflops copy_gbps"))
    for number, row in enumerate(results.get("hopper", ())):
        where = f"hopper[{number}]"
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


def write(results, path, schema=None):
    """Write the results to path; with a schema, check them first."""
    if schema:
        check(results, schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path.name}")


def read(card="NVIDIA H200"):
    """The recorded results of a GPU; FileNotFoundError where there are none."""
    results = _read(RESULTS / f"{slug(card)}.json")
    check(results)
    return results


def _read(path):
    return json.loads(path.read_text())


def read_tiles(card="NVIDIA H200"):
    """The table of tiles of a GPU; FileNotFoundError where there is none."""
    table = _read(tables.path_of(card))
    check(table, TILES_FILE)
    return table


def read_ring():
    """Ring attention on several GPUs."""
    return _read(RESULTS / "nvidia_h200_ring.json")


def read_common_part():
    """Errors of gradients where keys and values have a part in common."""
    return _read(RESULTS / "nvidia_h100_80gb_hbm3_common_part.json")


def read_mma():
    """Forward kernels that run on every GPU from Ampere on, with B T = 16384 positions and N H = 2048 columns."""
    return _read(RESULTS / "nvidia_h100_80gb_hbm3_mma.json")


def read_compiled_for_tpu():
    """What the compiler for TPUs said of kernels."""
    return _read(RESULTS / "tpu_compile.json")


def read_variants():
    """What was tried and not kept."""
    return _read(RESULTS / "nvidia_h200_variants.json")
