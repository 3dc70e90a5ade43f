"""The kernels of cuda/attention.cu on NumPy arrays: compiled by the system's C++ compiler, run by cuda/emulate.hpp.

    out, lse = forward(query, key, value, rung="forward_rows", is_causal=True)
    dq, dk, dv = backward(query, key, value, out, lse, dout, dlse, is_causal=True)

query, out and dout (B, T, N, H), key and value (B, S, K, H), lse and dlse (B, N, T). A race is a `SharedMemoryError`.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "cuda"
SOURCE = FOLDER / "attention.cu"
RUNGS = ("forward_elements", "forward_keys_outer", "forward_rows", "forward_tensor_cores")
ELEMENTS = ("float32", "bfloat16", "float16")  # by number, as attention.cu counts them
HEADS = (32, 64, 128, 256)
THREADS = 128
ARRAYS = "query key value out lse dout dlse delta dq dk dv work".split()
SIZES = "B T S N K H".split()
MISSING = (
    "The CUDA kernels run here by a C++ compiler, g++ or clang++, on Linux or macOS: install one, for example by "
    "`apt install g++` or `xcode-select --install`."
)


class SharedMemoryError(RuntimeError):
    """A data race, a read of what was never written, an index outside the array, or a wait that nothing ends."""


class Problem(ctypes.Structure):
    """`struct Problem` of attention.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ARRAYS] + [(name, ctypes.c_int) for name in SIZES]
    _fields_ += [("scale", ctypes.c_float), ("is_causal", ctypes.c_int)]


def compiler():
    """The path of the system's C++ compiler, or None where the kernels cannot be run."""
    # A Mac without the developer tools has a c++ too, which compiles nothing.
    if platform.system() == "Darwin" and subprocess.run(["xcode-select", "-p"], capture_output=True).returncode:
        return None
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def is_installed():
    return compiler() is not None


def head_of(H):
    """The smallest head_dim that the kernels are compiled for and that holds H."""
    return next((head for head in HEADS if H <= head), None)


def compile_source(source, dtype, head):
    """Path of a library for one type of element and one head_dim; compiled unless the cache has it."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(MISSING)
    options = ["-std=c++17", "-O2", "-fPIC", "-shared", f"-I{FOLDER}", "-w"]
    options += [f"-DELEMENT={ELEMENTS.index(dtype)}", f"-DHEAD={head}"]
    if platform.system() == "Darwin":  # its ucontext.h refuses to be included without the first
        options += ["-D_XOPEN_SOURCE=700", "-D_DARWIN_C_SOURCE"]
    parts = [source, (FOLDER / "emulate.hpp").read_text(), cxx, *options, platform.platform()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24] + ".so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flash_attention_cuda")
    if (folder / name).exists():
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:  # moved when whole: other processes may want the same
        Path(work, "attention.cu").write_text(source)
        command = [cxx, *options, "-x", "c++", f"{work}/attention.cu", "-o", f"{work}/{name}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{cxx} does not compile attention.cu: {done.stderr.strip()[:1000]}")
        os.replace(f"{work}/{name}", folder / name)
    return folder / name


@functools.cache
def library(source, dtype, head):
    found = ctypes.CDLL(str(compile_source(source, dtype, head)))
    found.first_fault.restype = ctypes.c_char_p
    return found


def grid_of(kernel, problem, head):
    """Thread blocks of 128 threads that a kernel needs, (x, y, z)."""
    B, T, S, N, K, H = (getattr(problem, name) for name in SIZES)
    blocks = {
        "forward_elements": -(-T * H // THREADS),
        "forward_keys_outer": 1,
        "forward_rows": -(-T // THREADS),
        "forward_tensor_cores": -(-T // 64),
        "delta": -(-T // THREADS),
        "backward": -(-S // min(2048 // head, 32)),  # keys of a tile
    }
    return blocks[kernel], 1, B * (K if kernel == "backward" else N)


def problem_of(query, key, scale, is_causal, arrays):
    """A `Problem` with pointers to arrays; shapes and dtypes are checked by the callers."""
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    scale = 1 / np.sqrt(H) if scale is None else scale
    return Problem(**pointers, B=B, T=T, S=S, N=N, K=K, H=H, scale=scale, is_causal=is_causal)


def launch(kernel, problem, dtype, source=None):
    """Run a kernel, one thread block after another; raise `SharedMemoryError` if its threads race."""
    head = head_of(problem.H)
    found = library(SOURCE.read_text() if source is None else source, dtype, head)
    grid = (ctypes.c_int * 3)(*grid_of(kernel, problem, head))
    run = getattr(found, f"launch_{kernel}")
    run.restype = ctypes.c_long
    faults = run(ctypes.byref(problem), grid, ctypes.c_int(THREADS))
    if faults:
        raise SharedMemoryError(f"{kernel}: {found.first_fault().decode()} ({faults} such faults)")


def checked(*arrays):
    """Contiguous arrays of one dtype that the kernels have, and the name of it."""
    dtypes = [str(array.dtype) for array in arrays]
    if dtypes[0] not in ELEMENTS or len(set(dtypes)) > 1:
        raise ValueError(f"arrays must all be one of {', '.join(ELEMENTS)}, got {dtypes}")
    query, key, value = arrays[:3]
    (B, _, N, H), shape = query.shape, key.shape
    if value.shape != shape or (shape[0], shape[3]) != (B, H) or N % shape[2] or head_of(H) is None:
        raise ValueError(f"shapes {query.shape}, {shape}, {value.shape}: (B, T, N, H), (B, S, K, H), H up to 256")
    return [np.ascontiguousarray(array) for array in arrays], dtypes[0]


def _unwritten(shape, dtype=np.float32):
    """NaN, so that what is not written is seen."""
    return np.full(shape, np.nan, dtype)


def forward(query, key, value, *, rung="forward_rows", scale=None, is_causal=False, source=None):
    """(out, lse) by one of `RUNGS`."""
    (query, key, value), dtype = checked(query, key, value)
    if rung == "forward_tensor_cores" and dtype == "float32":
        raise ValueError("forward_tensor_cores multiplies bfloat16 or float16 elements, got float32")
    B, T, N, H = query.shape
    out, lse = _unwritten(query.shape, query.dtype), _unwritten((B, N, T))
    work = _unwritten((B, N, T, H + 2) if rung == "forward_keys_outer" else (1,))
    arrays = {"query": query, "key": key, "value": value, "out": out, "lse": lse, "work": work}
    launch(rung, problem_of(query, key, scale, is_causal, arrays), dtype, source)
    return out, lse


def backward(query, key, value, out, lse, dout, dlse, *, scale=None, is_causal=False, source=None):
    """(dq, dk, dv) by the kernels `delta` and `backward`."""
    (query, key, value, out, dout), dtype = checked(query, key, value, out, dout)
    lse, dlse = (np.ascontiguousarray(array, np.float32) for array in (lse, dlse))
    delta, dq = _unwritten(lse.shape), np.zeros(query.shape, np.float32)
    dk, dv = _unwritten(key.shape, key.dtype), _unwritten(value.shape, value.dtype)
    arrays = dict(query=query, key=key, value=value, out=out, lse=lse, dout=dout, dlse=dlse)
    arrays.update(delta=delta, dq=dq, dk=dk, dv=dv)
    problem = problem_of(query, key, scale, is_causal, arrays)
    launch("delta", problem, dtype, source)
    launch("backward", problem, dtype, source)
    return dq.astype(query.dtype), dk, dv
