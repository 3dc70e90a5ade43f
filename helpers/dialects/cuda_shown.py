"""What notebook 17 shows of CUDA C++: run here if there is a C++ compiler, and read from a record if not.

    python -m helpers.dialects.cuda_shown        writes helpers/instruments/records/cuda_shown.json (make cuda)

The measurements of a GPU stand in <GPU>_cuda.json; `cuda_card` takes them.
"""

import contextlib
import io
import json
import re
import sys

import jax.numpy as jnp
import numpy as np

from helpers.attention.reference import oracle, oracle_gradients
from helpers.dialects import cuda_compile, cuda_launch
from helpers.dialects.cuda_launch import RUNGS, SOURCE, SharedMemoryError
from helpers.instruments import results
from helpers.source import Source, cut

RECORD = results.RESULTS / "cuda_shown.json"
CARD = results.RESULTS / "nvidia_h200_cuda.json"


class CudaSource(Source):
    """C++ code, which a notebook shows as such."""

    def _repr_markdown_(self):
        return f"```cpp\n{self}\n```"


def show_source(*parts):
    """Lines of attention.cu, as `source.show` shows those of a function."""
    return CudaSource(cut(SOURCE.read_text(), *parts))


def inputs(dtype):
    """(query, key, value), dout and dlse: 70 queries of 4 heads, 90 keys of 2, head_dim 24."""
    random = np.random.default_rng(17)
    shapes = (2, 70, 4, 24), (2, 90, 2, 24), (2, 90, 2, 24), (2, 70, 4, 24)
    *arrays, dout = (random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)
    return arrays, dout, random.standard_normal((2, 4, 70)).astype(np.float32)


def _error(mine, right):
    mine, right = np.asarray(mine, np.float64), np.asarray(right, np.float64)
    return np.linalg.norm(mine - right) / np.linalg.norm(right)


def _changed(*changes):
    """The source with each (right, wrong) exchanged."""
    source = SOURCE.read_text()
    for right, wrong in changes:
        if source.count(right) != 1:
            raise ValueError(f"not once in the source: {right}")
        source = source.replace(right, wrong)
    return source


def without_barrier(number):
    """The source without one of its barriers, counted from 0."""
    start, stop = [found.span() for found in re.finditer(r"__syncthreads\(\);", SOURCE.read_text())][number]
    return SOURCE.read_text()[:start] + SOURCE.read_text()[stop:]


def forward():
    """Print whether out and lse of every rung agree with the oracle."""
    for dtype, bound in (("float32", 2e-6), ("bfloat16", 2**-8)):
        arrays, _, _ = inputs(dtype)
        right_out, right_lse = oracle(*arrays, is_causal=True)
        for rung in RUNGS[:3] if dtype == "float32" else RUNGS:
            out, lse = cuda_launch.forward(*arrays, rung=rung, is_causal=True)
            right = _error(out, right_out) < bound, _error(lse.swapaxes(1, 2), right_lse) < 2e-6
            print(f"{dtype:8} {rung:20} out right: {right[0]}, lse right: {right[1]}")


def backward():
    """Print whether dq, dk and dv agree with the oracle, each by itself."""
    for dtype, bound in (("float32", 5e-6), ("bfloat16", 2**-7)):
        arrays, dout, dlse = inputs(dtype)
        out, lse = cuda_launch.forward(*arrays, is_causal=True)
        found = cuda_launch.backward(*arrays, out, lse, dout, dlse, is_causal=True)
        right = oracle_gradients(*arrays, dout, dlse.swapaxes(1, 2), is_causal=True)
        verdicts = (
            f"{name} right: {_error(mine, correct) < bound}"
            for name, mine, correct in zip(("dq", "dk", "dv"), found, right, strict=True)
        )
        print(f"{dtype:8} {', '.join(verdicts)}")


MISTAKES = {
    "no thread in the product": ("forward_elements", ("s = logit(p, q, k)", "s = logit(p, query_row(p, head, 0), k)")),
    "the new sum, twice": (
        "forward_elements",
        (
            "l = l * shrink + weight;\n        out = out * shrink",
            "float old = l;\n        l = l * shrink + weight;\n        out = out * shrink * (old > 0 ? l / old : 1)",
        ),
    ),
    "sums without the old one": ("forward_keys_outer", ("l = l * shrink + sum;", "l = sum;")),
}


def mistakes():
    """Print how far out is from the oracle with each mistake, and without it."""
    arrays, _, _ = inputs("float32")
    right, _ = oracle(*arrays)
    for name, (rung, change) in MISTAKES.items():
        as_it_was, _ = cuda_launch.forward(*arrays, rung=rung, source=_changed(change))
        corrected, _ = cuda_launch.forward(*arrays, rung=rung)
        verdict = f"as it was {_error(as_it_was, right):.1f}, corrected below 2e-6: {_error(corrected, right) < 2e-6}"
        print(f"{name:25} {verdict}")


def race():
    """Print what the race check says of a kernel without one of its barriers, and of the whole kernel."""
    arrays, _, _ = inputs("float32")
    for what, source in (
        ("all barriers", SOURCE.read_text()),
        ("none after the loads", without_barrier(2)),
        ("none before the next tile", without_barrier(3)),
    ):
        try:
            cuda_launch.forward(*arrays, rung="forward_rows", source=source)
            print(f"{what}: no race")
        except SharedMemoryError as error:
            fault = str(error).removeprefix("forward_rows: ").split(" (")[0]
            print(f"{what}:\n    {fault}")


SHOWN = {"forward": forward, "backward": backward, "mistakes": mistakes, "race": race}


def show(name):
    """Print what `name` prints, or "compiled": what NVIDIA's compiler said, always recorded."""
    record = json.loads(RECORD.read_text())
    if name in SHOWN and cuda_launch.is_installed():
        SHOWN[name]()
    else:
        print(record["outputs"][name], end="")


def say_how():
    """One line: whether the kernels run here."""
    if cuda_launch.is_installed():
        print("The CUDA kernels run here, by your C++ compiler.")
    else:
        print(f"What follows was recorded. {cuda_launch.MISSING}")


def compiled():
    """Print registers, spilled bytes and shared memory of the kernels that section 7 speaks of."""
    print(f"{'':6} {'type':8} {'H':>4}  {'kernel':20} {'registers':>9} {'spilled':>8} {'shared':>7}")
    for architecture in cuda_compile.ARCHITECTURES:
        for head in (64, 128):
            _, log = cuda_compile.compile_for_card("bfloat16", head, architecture)
            for kernel, row in sorted(cuda_compile.resources(log).items()):
                numbers = f"{row['registers']:9} {row['spilled']:8} {row['shared']:7}"
                print(f"{architecture:6} bfloat16 {head:4}  {kernel:20} {numbers}")


def _card():
    """The record of the GPU, or None, after a line that says so."""
    if CARD.exists():
        return json.loads(CARD.read_text())
    print("Not recorded yet: python -m helpers.dialects.cuda_card measures it on a GPU.")
    return None


def show_correct():
    """Print what GPU it was, and how many comparisons agreed with the oracle."""
    if not (record := _card()):
        return
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    print(f"{record['card']}, {record['date']}, commit {record['commit'][:7]}: {versions}")
    rows = record["correct"]
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} comparisons agree with the float64 oracle")


def show_times():
    """Print TFLOP/s of what was timed, where only the operations that attention needs are counted."""
    if not (record := _card()):
        return
    by_case = {}
    for row in record["times"]:
        by_case.setdefault((row["dtype"], row["H"], row["is_causal"]), {})[row["kernel"]] = row["tflops"]
    for (dtype, H, is_causal), found in by_case.items():
        print(f"{dtype}, H{H}, {'causal' if is_causal else 'full'}")
        slowest = found.get("forward_elements")
        for kernel, speed in found.items():
            times = f"  × {speed / slowest:.0f}" if slowest and kernel != "backward" else ""
            print(f"  {kernel:30}{speed:8.2f} TFLOP/s{times}")


def main():
    if not cuda_launch.is_installed():
        print(cuda_launch.MISSING)
        return 1
    if cuda_compile.nvrtc() is None:
        print(cuda_compile.MISSING)
        return 1
    outputs = {}
    for name, run in (*SHOWN.items(), ("compiled", compiled)):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            run()
        outputs[name] = said.getvalue()
    print("".join(outputs.values()), end="")
    record = {"card": "CUDA", "versions": {"nvrtc": cuda_compile.version()}, "outputs": outputs}
    return results.write_or_say(record, RECORD, results.SHOWN_FILE)


if __name__ == "__main__":
    sys.exit(main())
