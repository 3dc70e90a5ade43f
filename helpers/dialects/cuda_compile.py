"""Compile cuda/attention.cu with NVIDIA's own compiler, NVRTC, which needs no GPU, and print what it says.

    python -m helpers.dialects.cuda_compile        (make cuda)

For each kernel: registers of a thread, bytes that did not fit and were spilled, and bytes of shared memory of a
thread block. NVRTC comes in a wheel of its own (nvidia-cuda-nvrtc), and with the CUDA wheels of JAX and of PyTorch.
"""

import ctypes
import functools
import itertools
import re
import sys
from pathlib import Path

from helpers.dialects.cuda_launch import ELEMENTS, HEADS, SOURCE

ARCHITECTURES = ("sm_80", "sm_90")
MISSING = "NVIDIA's compiler NVRTC is not installed: `make cuda` does that, on Linux."


@functools.cache
def nvrtc():
    """The library of NVRTC, or None. What the wheels of this environment hold comes first, then a toolkit's."""
    places = [*(Path(entry) / "nvidia" for entry in sys.path if entry), Path("/usr/local/cuda")]
    for place in places:
        if not place.is_dir():
            continue
        for path in sorted(place.rglob("libnvrtc.so.*"), key=lambda path: len(path.name)):
            try:
                return ctypes.CDLL(str(path.resolve()))
            except OSError:
                continue
    return None


def version():
    """Of NVRTC, as "12.9"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_for_gpu(dtype, head, architecture):
    """(cubin, log of ptxas) of attention.cu for one type of element and one head_dim."""
    library = nvrtc()
    if library is None:
        raise RuntimeError(MISSING)

    def check(status):
        if status:
            raise RuntimeError(f"NVRTC: error {status}: {log()}")

    def log():
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, text)
        return text.value.decode()

    program = ctypes.c_void_p()
    text = SOURCE.read_bytes()
    options = [f"--gpu-architecture={architecture}", f"-DELEMENT={ELEMENTS.index(dtype)}", f"-DHEAD={head}"]
    options = [option.encode() for option in (*options, "-std=c++17", "--ptxas-options=-v")]
    check(library.nvrtcCreateProgram(ctypes.byref(program), text, b"attention.cu", 0, None, None))
    try:
        check(library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        size = ctypes.c_size_t()
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw, log()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def resources(log):
    """{kernel: {"registers", "spilled", "shared"}} from what ptxas says."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        count = lambda pattern, part=part: int((re.search(pattern, part) or [0, 0])[1])
        found[part[: part.index("'")]] = {
            "registers": count(r"Used (\d+) registers"),
            "spilled": count(r"(\d+) bytes spill stores"),
            "shared": count(r"(\d+) bytes smem"),
        }
    return found


def say(dtypes=ELEMENTS, heads=HEADS):
    """Print registers, spilled bytes and shared memory of every kernel, by architecture, type and head_dim."""
    print(f"{'':6} {'type':8} {'H':>4}  {'kernel':20} {'registers':>9} {'spilled':>8} {'shared':>7}")
    for architecture, dtype, head in itertools.product(ARCHITECTURES, dtypes, heads):
        _, log = compile_for_gpu(dtype, head, architecture)
        for kernel, row in sorted(resources(log).items()):
            numbers = f"{row['registers']:9} {row['spilled']:8} {row['shared']:7}"
            print(f"{architecture:6} {dtype:8} {head:4}  {kernel:20} {numbers}", flush=True)


if __name__ == "__main__":
    sys.exit(MISSING if nvrtc() is None else say())
