"""What notebook 16 shows of Triton: run here if Triton is installed, and read from a record if not.

    python -m helpers.dialects.triton_shown        writes helpers/instruments/records/triton_shown.json (make triton)

The measurements of a GPU stand in <GPU>_triton.json.
"""

import subprocess
import sys
from importlib import metadata

import numpy as np

from helpers.dialects import shown, triton_launch
from helpers.dialects.shown import Shown


def inputs(dtype):
    return shown.inputs(dtype, 100, 130, seed=16)


def forward(kernel="forward_kernel"):
    """Print whether out and lse agree with the oracle."""
    for dtype, bound in (("float32", 2e-6), ("float16", 2**-10), ("bfloat16", 2**-7)):
        arrays, _, _ = inputs(dtype)
        for is_causal in (False, True):
            found = triton_launch.forward(*arrays, is_causal=is_causal, kernel=kernel)
            label = f"{dtype:8} {'causal' if is_causal else 'full':6}"
            shown.say_forward(label, arrays, found, bound, is_causal)


def backward():
    """Print whether dq, dk and dv agree with the oracle, each by itself."""
    for dtype, bound in (("float32", 5e-6), ("float16", 2**-9), ("bfloat16", 2**-6)):
        shown.say_backward(triton_launch, dtype, inputs(dtype), bound)


def descriptors():
    """Print the same of the kernel with descriptors, and what it says of a head that it cannot take."""
    forward("forward_by_descriptors")
    head = np.zeros((1, 8, 1, 20), np.float16)
    try:
        triton_launch.forward(head, head, head, kernel="forward_by_descriptors")
    except ValueError as error:
        print(error)


SHOWN = Shown("Triton", triton_launch, {"forward": forward, "backward": backward, "descriptors": descriptors})
show, show_provenance = SHOWN.show, SHOWN.show_provenance


def show_correct():
    """How many cases agreed with the oracle, and the largest errors beside PyTorch."""
    record = SHOWN.gpu()
    rows = record["correct"]
    print(f"{sum(row['right'] for row in rows)} of {record['cases']} cases agree with the float64 oracle")
    # Where every query sees a single key, dq and dk are 0 but for rounding, and a relative error says nothing.
    rows = [row for row in rows if row["S"] > 1 and not (row["T"] == 1 and row["is_causal"])]
    for dtype in ("float32", "float16", "bfloat16"):
        of_dtype = [row["against_torch"] for row in rows if row["dtype"] == dtype]
        worst = {name: max(row[name] for row in of_dtype) for name in ("out", "dq", "dk", "dv")}
        print(f"{dtype:8} farthest from PyTorch: " + ", ".join(f"{name} {error:.1e}" for name, error in worst.items()))


def show_second_oracle():
    """`flash_attention` and PyTorch against the oracle and against each other."""
    for row in SHOWN.gpu()["second"]:
        sizes = " ".join(f"{name}={row[name]}" for name in "TSHNK")
        print(f"{sizes} {row['dtype']}, {'causal' if row['is_causal'] else 'full'}")
        for who, said in (("ours", "ours"), ("torch", "PyTorch"), ("ours_and_torch", "apart")):
            print(f"  {said:8}" + "  ".join(f"{name} {error:.1e}" for name, error in row[who].items()))


def show_times():
    """TFLOP/s of both dialects, by the same clock."""
    by_case = {}
    for row in SHOWN.gpu()["times"]:
        by_case.setdefault((row["pass"], row["H"], row["is_causal"]), {})[row["implementation"]] = row["tflops"]
    print("TFLOP/s; in brackets as multiples of pallas")
    for (which, H, is_causal), found in sorted(by_case.items(), reverse=True):
        ratio = lambda name: f" (× {found[name] / found['pallas']:.2f})" if name.startswith("triton") else ""  # noqa: B023
        numbers = "; ".join(f"{name} {speed:.0f}{ratio(name)}" for name, speed in found.items())
        print(f"{which:8} H{H:<3} {'causal' if is_causal else 'full':6} {numbers}")


def show_strides():
    """Bandwidth by the distance of neighbouring threads' loads."""
    rows = SHOWN.gpu()["strides"]
    for row in rows:
        print(f"stride {row['stride']:2}: {row['gbps']:5.0f} GB/s of use, {row['gbps'] / rows[0]['gbps']:.0%}")


def show_samples():
    """What means of five calls say of a program and its twin, and what medians say."""
    found = SHOWN.gpu()["samples"]
    first, second = found["first_wall_ms"]
    print(f"the first call took {first:.0f} ms by the wall, the second {second:.2f} ms")
    a, b = (np.array(found["series"][name]) for name in "ab")
    for name, series in (("a", a), ("b", b)):
        low, middle, high = np.quantile(series, [0.05, 0.5, 0.95])
        print(f"{name}: median {1e3 * middle:.1f} µs, 5 % to 95 %: {1e3 * low:.1f} to {1e3 * high:.1f} µs")
    few = [series[: len(series) // 5 * 5].reshape(-1, 5) for series in (a, b)]
    for what, of in (("means", np.mean), ("medians", np.median)):
        apart = np.abs(of(few[0], axis=1) / of(few[1], axis=1) - 1)
        spread = f"at most {apart.max():.1%} apart, typically {np.median(apart):.1%}"
        print(f"{what} of five calls of the same kernel: {spread}")


def main():
    if not triton_launch.is_installed():
        return triton_launch.MISSING
    # Triton decides once whether it interprets, so a process of its own compiles.
    command = [sys.executable, "-m", "helpers.dialects.triton_compile"]
    compiled = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    SHOWN.record({"triton": metadata.version("triton")}, compiled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
