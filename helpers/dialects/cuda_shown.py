"""What notebook 17 shows of CUDA C++: run here if there is a C++ compiler, and read from a record if not.

    python -m helpers.dialects.cuda_shown        writes helpers/instruments/records/cuda_shown.json (make cuda)

The measurements of a GPU stand in <GPU>_cuda.json.
"""

import re
import sys

from helpers.attention.reference import oracle
from helpers.dialects import cuda_compile, cuda_launch, shown
from helpers.dialects.cuda_launch import RUNGS, SOURCE, SharedMemoryError
from helpers.dialects.shown import Shown, error, printed
from helpers.exercises.edits import changed
from helpers.source import Source, cut


class CudaSource(Source):
    """C++ code, which a notebook shows as such."""

    def _repr_markdown_(self):
        return f"```cpp\n{self}\n```"


def show_source(*names):
    """Functions of attention.cu, or regions of it, as `source.show` shows those of a function."""
    text = SOURCE.read_text()
    functions = [re.search(rf"^\w[^\n]*\b{name}\([^;]*?{{.*?^}}$", text, re.MULTILINE | re.DOTALL) for name in names]
    parts = [found[0] if found else cut(text, name) for found, name in zip(functions, names, strict=True)]
    return CudaSource(cut("\n".join(parts)))


def inputs(dtype):
    return shown.inputs(dtype, 70, 90, seed=17)


def without_barrier(number):
    """The source without one of its barriers, counted from 0."""
    start, stop = [found.span() for found in re.finditer(r"__syncthreads\(\);", SOURCE.read_text())][number]
    return SOURCE.read_text()[:start] + SOURCE.read_text()[stop:]


def forward():
    """Print whether out and lse of every rung agree with the oracle."""
    for dtype, bound in (("float32", 2e-6), ("bfloat16", 2**-8)):
        arrays, _, _ = inputs(dtype)
        for rung in RUNGS[:3] if dtype == "float32" else RUNGS:
            found = cuda_launch.forward(*arrays, rung=rung, is_causal=True)
            shown.say_forward(f"{dtype:8} {rung:20}", arrays, found, bound, is_causal=True)


def backward():
    """Print whether dq, dk and dv agree with the oracle, each by itself."""
    for dtype, bound in (("float32", 5e-6), ("bfloat16", 2**-7)):
        shown.say_backward(cuda_launch, dtype, inputs(dtype), bound)


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
        as_it_was, _ = cuda_launch.forward(*arrays, rung=rung, source=changed(SOURCE.read_text(), change, once=True))
        corrected, _ = cuda_launch.forward(*arrays, rung=rung)
        verdict = f"as it was {error(as_it_was, right):.1f}, corrected below 2e-6: {error(corrected, right) < 2e-6}"
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
        except SharedMemoryError as fault:
            said = str(fault).removeprefix("forward_rows: ").split(" (")[0]
            print(f"{what}:\n    {said}")


SHOWN = Shown("CUDA", cuda_launch, {"forward": forward, "backward": backward, "mistakes": mistakes, "race": race})
show = SHOWN.show


def say_how():
    """One line: whether the kernels run here."""
    if cuda_launch.is_installed():
        print("The CUDA kernels run here, by your C++ compiler.")
    else:
        print(f"What follows was recorded. {cuda_launch.MISSING}")


def show_correct():
    """Print what GPU it was, and how many comparisons agreed with the oracle."""
    SHOWN.show_provenance()
    rows = SHOWN.gpu()["correct"]
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} comparisons agree with the float64 oracle")


def show_times():
    """Print TFLOP/s of what was timed, where only the operations that attention needs are counted."""
    by_case = {}
    for row in SHOWN.gpu()["times"]:
        by_case.setdefault((row["dtype"], row["H"], row["is_causal"]), {})[row["kernel"]] = row["tflops"]
    for (dtype, H, is_causal), found in by_case.items():
        print(f"{dtype}, H{H}, {'causal' if is_causal else 'full'}")
        slowest = found.get("forward_elements")
        for kernel, speed in found.items():
            times = f"  × {speed / slowest:.0f}" if slowest and kernel != "backward" else ""
            print(f"  {kernel:30}{speed:8.2f} TFLOP/s{times}")


def main():
    if not cuda_launch.is_installed():
        return cuda_launch.MISSING
    if cuda_compile.nvrtc() is None:
        return cuda_compile.MISSING
    SHOWN.record({"nvrtc": cuda_compile.version()}, printed(lambda: cuda_compile.say(["bfloat16"], [64, 128])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
