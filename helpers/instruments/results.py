"""Recorded measurements: one JSON file a card, read by the notebooks, written by the benchmark.

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
    hopper         the fastest for each pass of the Hopper kernels, see HOPPER; only for Hopper cards
    hopper_sweep   the same for them; in the file of the H200 the times of the finalists are by the device's
                   clock
    kept           {part: header} of what stands there from an earlier run, when only a part was tuned

Ring attention on several cards of one host stands in <card>_ring.json: `rows`, see RING.

The errors of gradients where keys and values have a part in common stand in <card>_common_part.json: `heads`, `rows`
of long sequences and `short` ones, see COMMON_PART.

What `dialects.triton_gpu` measured of the Triton kernels stands in <card>_triton.json, and what Triton prints without
a card in triton_shown.json, under the name "Triton" for a card: `outputs`, texts by name. The same of CUDA C++ stands
in <card>_cuda.json and cuda_shown.json.

What the compiler for TPUs says of kernels stands in tpu_compile.json: `rows`, see COMPILED_FOR_TPU, and `block`, the
size of their tiles.

What was tried on the way to a kernel and not kept stands in <card>_variants.json, see VARIANT, and beside it

    factors        the speeds of changes, as multiples, see FACTOR
    kernels        the time of each kernel of a backward pass, see KERNEL
    compiled       registers of a thread of the Hopper ladder, see COMPILED
    instructions   how many instructions a step of a loop has
    loops          the main loops of fused backward kernels in machine code, see LOOP
    profile        at which instructions the warps of a loop were found, in per cent, see PROFILE
"""

import json
import os
from pathlib import Path

from helpers.attention import tables
from helpers.attention.tables import slug

RESULTS = Path(__file__).parent / "records"

_text, _whole, _number = (str,), (int,), (int, float)
# samples_ms: the times by the device's clock of which device_ms is the median. Those of other implementations with the
# same number, of the same pass and case, were taken in the same turn.
RECORD = {
    "implementation": _text,
    "pass": _text,
    "dtype": _text,
    **dict.fromkeys("BTSNKH", _whole),
    "is_causal": (bool,),
    "device_ms": (int, float, type(None)),
    "samples_ms": (list,),
    "wall_ms": _number,
    "spread": _number,
    "tflops": _number,
    "of_matmul": _number,
    "of_copy": _number,
    "tiles": (dict, type(None)),
}
RUNG = {
    "kernel": _text,
    "name": _text,
    "H": _whole,
    "T": _whole,
    "is_causal": (bool,),
    **dict.fromkeys(("device_ms", "spread", "tflops"), _number),
}
MEMORY = {"implementation": _text, "pass": _text, "T": _whole, "N": _whole, "H": _whole, "bytes": _whole}
TILES = {
    "kernel": _text,
    "itemsize": _whole,
    "head_padded": _whole,
    "is_causal": (bool,),
    **dict.fromkeys(("block_q", "block_k", "num_warps", "num_stages"), _whole),
}
LAUNCH = {
    "in_pages": (bool,),
    **dict.fromkeys(
        ("itemsize", "head_padded", "block_r", "block_k", "num_warps", "num_stages", "per_processor"), _whole
    ),
}
# page: keys of a page, 0 where they lie in one piece. gbps: of keys and values read once; of_copy: that as a fraction.
DECODE = {
    **dict.fromkeys(("implementation", "dtype"), _text),
    **dict.fromkeys((*"BTSNKH", "page"), _whole),
    **dict.fromkeys(("device_ms", "wall_ms", "spread", "gbps", "of_copy"), _number),
}
# pass: "forward", "backward" or "deterministic backward". up_to: the longest sequence (keys of a forward,
# queries of a backward) that the row is for, or None. tiles: for each kernel of the pass, see HOPPER_TILES.
HOPPER = {
    "pass": _text,
    "head_padded": _whole,
    "is_causal": (bool,),
    "up_to": (int, type(None)),
    "tiles": (dict,),
}
_backward_tiles = {
    **dict.fromkeys(("block_q", "block_k", "stages", "warpgroups"), _whole),
    **dict.fromkeys(("delayed", "keeps_addresses", "zeros_ahead"), (bool,)),
}
HOPPER_TILES = {
    "forward": {
        **dict.fromkeys(("block_q", "block_k", "stages", "warpgroups"), _whole),
        "programs": (int, type(None)),
        "ahead": (bool,),
    },
    **dict.fromkeys(("fused", "dkv", "dq"), _backward_tiles),
}
PASSES = {
    "forward": [{"forward"}],
    "backward": [{"fused"}, {"dkv", "dq"}],
    "deterministic backward": [{"dkv", "dq"}],
}
KERNEL = {"name": _text, "kernel": _text, "H": _whole, "T": _whole, "is_causal": (bool,), "device_ms": _number}
COMPILED = {"rung": _whole, "H": _whole, "is_causal": (bool,), "registers": _whole}
LOOP = {
    **dict.fromkeys(("name", "addresses"), _text),
    **dict.fromkeys(("H", "instructions", "loads", "stores", "to_uniform"), _whole),
    "is_causal": (bool,),
    "requests": (int, type(None)),  # for spilled registers, of one call at T = 4096, by the profiler
}
PROFILE = {**dict.fromkeys(("name", "what"), _text), "H": _whole, "T": _whole, "is_causal": (bool,), "share": _number}
VARIANT = {"kernel": _text, "name": _text, "H": _whole, "T": _whole, "is_causal": (bool,), "tflops": _number}
# factor: the speed as a multiple of that of the kernel to which the change was made
FACTOR = {"kernel": _text, "name": _text, "H": _whole, "T": _whole, "is_causal": (bool,), "factor": _number}
# variant: how the exchange was compiled. alone_ms: the same work on one card without any; efficiency: that by ms.
RING = {
    **dict.fromkeys(("case", "variant"), _text),
    **dict.fromkeys(("T", "devices"), _whole),
    **dict.fromkeys(("alone_ms", "ms", "efficiency"), _number),
}
# kind, mean: as in `common_part`. errors: {implementation: ERRORS}, relative; None where the right answer is 0.
COMMON_PART = {
    **dict.fromkeys("TSH", _whole),
    **dict.fromkeys(("dtype", "kind"), _text),
    "is_causal": (bool,),
    "mean": _number,
    "errors": (dict,),
}
ERRORS = {**dict.fromkeys(("dq", "dk", "dv"), (*_number, type(None))), "of_terms": _number}
# implementation: "ours", or JAX's "flash" or "splash". vmem in bytes; bundles and spills as in `tpu_compile`.
COMPILED_FOR_TPU = {
    **dict.fromkeys(("chip", "implementation", "which", "dtype", "kernel"), _text),
    **dict.fromkeys(("H", "vmem", "bundles", "spills"), _whole),
    "is_causal": (bool,),
}
FILE = {
    "card": _text,
    "versions": (dict,),
    "commit": _text,
    "date": _text,
    "ceilings": (dict,),
    "records": (list,),
    "ladder": (list,),
    "memory": (list,),
    "notes": (list,),
}
TILES_FILE = {"card": _text, "versions": (dict,), "commit": _text, "date": _text, "tiles": (list,), "sweep": (list,)}
RING_FILE = {"card": _text, "versions": (dict,), "commit": _text, "date": _text, "rows": (list,)}
COMMON_PART_FILE = {**RING_FILE, "heads": _whole, "short": (list,), "notes": (list,)}
TRITON_FILE = {
    **dict.fromkeys(("card", "commit", "date"), _text),
    **dict.fromkeys(("versions", "samples"), (dict,)),
    **dict.fromkeys(("correct", "second", "times", "tried", "strides", "notes"), (list,)),
}
CUDA_FILE = {
    **dict.fromkeys(("card", "commit", "date"), _text),
    "versions": (dict,),
    **dict.fromkeys(("correct", "times", "resources", "notes"), (list,)),
}
SHOWN_FILE = {"card": _text, "versions": (dict,), "outputs": (dict,)}
COMPILED_FOR_TPU_FILE = {**RING_FILE, "block": _whole}
VARIANTS_FILE = {
    "card": _text,
    "versions": (dict,),
    "date": _text,
    "notes": (list,),
    "variants": (list,),
    "factors": (list,),
    "kernels": (list,),
    "compiled": (list,),
    "instructions": (dict,),
    "loops": (list,),
    "profile": (list,),
}


def check(results, schema=FILE):
    """Raise ValueError naming the first field of recorded results that is missing or of a wrong type."""
    _check_fields("results", results, schema)
    parts = {"records": RECORD, "ladder": RUNG, "memory": MEMORY, "tiles": TILES}
    parts |= {"sweep": TILES | {"ms": _number}, "decode_sweep": LAUNCH | {"B": _whole, "S": _whole, "ms": _number}}
    if schema is TILES_FILE:
        parts["decode"] = LAUNCH
    elif "decode" in results:
        header = {"commit": _text, "date": _text, "versions": (dict,), "copy_gbps": _number, "records": (list,)}
        _check_fields("decode", results["decode"], header)
        for number, entry in enumerate(results["decode"]["records"]):
            _check_fields(f"decode: records[{number}]", entry, DECODE)
    parts |= {"rows": RING} if schema is RING_FILE else {}
    if schema is COMMON_PART_FILE:
        parts |= {"rows": COMMON_PART, "short": COMMON_PART}
        for row in (*results["rows"], *results["short"]):
            for name, errors in row["errors"].items() if isinstance(row.get("errors"), dict) else ():
                _check_fields(f"errors of {name}", errors, ERRORS)
    parts |= {"rows": COMPILED_FOR_TPU} if schema is COMPILED_FOR_TPU_FILE else {}
    parts |= {"variants": VARIANT, "factors": FACTOR, "kernels": KERNEL}
    parts |= {"compiled": COMPILED, "loops": LOOP, "profile": PROFILE}
    for part, fields in parts.items():
        for number, entry in enumerate(results.get(part, ())):
            _check_fields(f"{part}[{number}]", entry, fields)
    for part in ("hopper", "hopper_sweep"):
        for number, row in enumerate(results.get(part, ())):
            where = f"{part}[{number}]"
            _check_fields(where, row, HOPPER | ({"ms": _number} if part == "hopper_sweep" else {}))
            if set(row["tiles"]) not in PASSES.get(row["pass"], ()):
                raise ValueError(f"{where}: {row['pass']} has no kernels {sorted(row['tiles'])}")
            for kernel, fields in row["tiles"].items():
                _check_fields(f"{where}: tiles: {kernel}", fields, HOPPER_TILES[kernel])
    if schema is FILE:
        _check_fields("ceilings", results["ceilings"], {"matmul_tflops": _number, "copy_gbps": _number})
        for number, record in enumerate(results["records"]):
            if record["pass"] not in ("forward", "backward"):
                raise ValueError(f"records[{number}]: pass must be forward or backward, got {record['pass']!r}")
            if not (record["wall_ms"] > 0 and record["tflops"] > 0):
                raise ValueError(f"records[{number}]: wall_ms and tflops must be positive")


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
    """The recorded results of a card; FileNotFoundError where there are none."""
    return _read(RESULTS / f"{slug(card)}{suffix}.json", schema)


def _read(path, schema):
    with open(path) as file:
        results = json.load(file)
    check(results, schema)
    return results


def read_tiles(card="NVIDIA H200"):
    """The tuner's table of a card; FileNotFoundError where there is none."""
    return _read(tables.path_of(card), TILES_FILE)


def read_ring(card="NVIDIA H200"):
    """Ring attention on several cards; FileNotFoundError where nothing was recorded."""
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
