"""What `cuda_shown` and `triton_shown` share: verdicts of the oracle on small calls, and their records."""

import contextlib
import io

import jax.numpy as jnp
import numpy as np

from helpers.attention.reference import oracle, oracle_gradients
from helpers.instruments import results


class Shown:
    """What a dialect prints: by functions that run its kernels, or as recorded where it is not installed.

    name: "Triton" or "CUDA". launch: the module that launches its kernels. printers: {name: function that prints}.
    """

    def __init__(self, name, launch, printers):
        self.name, self.launch, self.printers = name, launch, printers
        self.path = results.RESULTS / f"{name.lower()}_shown.json"

    def show(self, name):
        """Print what one of the printers prints, or "compiled": what the compiler said, always recorded."""
        if name in self.printers and self.launch.is_installed():
            self.printers[name]()
            return
        record = results.read(f"{self.name} shown")
        if version := record["versions"].get("triton"):
            print(f"Recorded with Triton {version}; make triton installs it and runs this anew.")
        print(record["outputs"][name], end="")

    def gpu(self):
        return results.read(f"NVIDIA H200 {self.name}")

    def show_provenance(self):
        record = self.gpu()
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        print(f"{record['gpu']}, {record['date']}, commit {record['commit'][:7]}: {versions}")

    def record(self, versions, compiled):
        """Print and record everything. compiled: what the compiler said."""
        outputs = {name: printed(run) for name, run in self.printers.items()} | {"compiled": compiled}
        print("".join(outputs.values()), end="")
        results.write({"gpu": self.name, "versions": versions, "outputs": outputs}, self.path)


def printed(run):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run()
    return said.getvalue()


def inputs(dtype, T, S, seed):
    """(query, key, value), dout and dlse (B, N, T): T queries of 4 heads, S keys of 2, head_dim 24."""
    random = np.random.default_rng(seed)
    shapes = (2, T, 4, 24), (2, S, 2, 24), (2, S, 2, 24), (2, T, 4, 24)
    *arrays, dout = (random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)
    return arrays, dout, random.standard_normal((2, 4, T)).astype(np.float32)


def error(mine, right):
    """The relative error of an array."""
    mine, right = np.asarray(mine, np.float64), np.asarray(right, np.float64)
    return np.linalg.norm(mine - right) / np.linalg.norm(right)


def say_forward(label, arrays, found, bound, is_causal):
    """Print whether found, (out, lse), agrees with the oracle."""
    (out, lse), (right_out, right_lse) = found, oracle(*arrays, is_causal=is_causal)
    right = error(out, right_out) < bound, error(lse.swapaxes(1, 2), right_lse) < 2e-6
    print(f"{label} out right: {right[0]}, lse right: {right[1]}")


def say_backward(launch, dtype, given, bound):
    """Print whether dq, dk and dv of a launcher agree with the oracle, each by itself. given: what `inputs` returns."""
    arrays, dout, dlse = given
    found = launch.backward(*arrays, *launch.forward(*arrays, is_causal=True), dout, dlse, is_causal=True)
    right = oracle_gradients(*arrays, dout, dlse.swapaxes(1, 2), is_causal=True)
    pairs = zip(("dq", "dk", "dv"), found, right, strict=True)
    print(f"{dtype:8} " + ", ".join(f"{name} right: {error(mine, correct) < bound}" for name, mine, correct in pairs))
