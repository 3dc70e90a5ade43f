"""Compile the Triton kernels for an NVIDIA GPU with Triton's own compiler, without having one.

    python -m helpers.dialects.triton_compile        (make triton)

Triton carries the assembler of CUDA, so that it compiles all the way to machine code on a CPU. Prints for each
kernel the registers and the stack of a thread, the shared memory, and which of Hopper's own instructions it uses:
wgmma for products, TMA for copies of tiles. Nothing is run.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.attention.portable.tiles import padded_head_dim
from helpers.dialects import triton_launch
from helpers.dialects.triton_launch import Launch, Shapes

POINTERS = {
    "forward_kernel": ("query key value out", "lse"),
    "forward_by_descriptors": ("query key value out", "lse"),
    "delta_kernel": ("out do", "dlse delta"),
    "dkv_kernel": ("query key value do dk_out dv_out", "lse delta"),
    "dq_kernel": ("query key value do dq_out", "lse delta"),
}
INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "TMA": "cp.async.bulk.tensor"}  # as PTX calls them
NAMES_IN_TRITON = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def compiled(name, shapes, dtype, launch):
    """Triton's compiled form of a kernel for Hopper, compute capability 9.0, arrays aligned to 16 bytes."""
    kernel = getattr(triton_launch.kernels(interpret=False), name)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    typed, rows = (names.split() for names in POINTERS[name])
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= dict.fromkeys(typed, f"*{NAMES_IN_TRITON[dtype]}") | dict.fromkeys(rows, "*fp32")
    constants = {**shapes._asdict(), **launch._asdict(), "head_padded": padded_head_dim(shapes.H)}
    constants |= {"precision": "tf32", "interpret": False}
    if name != "delta_kernel":
        signature["scale"] = "fp32"
    constants = {argument: constants[argument] for argument, kind in signature.items() if kind == "constexpr"}
    places = (place for place, argument in enumerate(kernel.arg_names) if argument in typed + rows)
    aligned = {(place,): [["tt.divisibility", 16]] for place in places}
    source = ASTSource(kernel, signature, constants, aligned)
    return compile(source, GPUTarget("cuda", 90, 32), {"num_warps": launch.num_warps, "num_stages": launch.num_stages})


def numbers(found):
    """(registers of a thread, bytes of its stack, which takes what spills, bytes of shared memory)."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(found.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))
    return registers, stack, found.metadata.shared


def main():
    if not triton_launch.is_installed():
        return triton_launch.MISSING
    os.environ["TRITON_INTERPRET"] = "0"
    print("bfloat16                 H mask       tile warps registers stack KiB shared")
    for H, is_causal in itertools.product((64, 128), (False, True)):
        shapes = Shapes(4, 4096, 4096, 2048 // H, 2048 // H, H, H**-0.5, is_causal)
        mask = "causal" if is_causal else "full"
        for name in POINTERS:
            launch = Launch(128 if name.startswith("forward") else 64, 64, 4 if H == 64 else 8, 3)
            found = compiled(name, shapes, "bfloat16", launch)
            registers, stack, shared = numbers(found)
            used = ", ".join(name for name, word in INSTRUCTIONS.items() if word in found.asm["ptx"])
            tile = f"{launch.block_q} × {launch.block_k}"
            said = f"{name:22} {H:3} {mask:6} {tile:>8} {launch.num_warps:5}"
            said += f" {registers:9} {stack:5} {shared / 1024:10.0f}"
            print(f"{said}  {used}".rstrip(), flush=True)
    print("All compile. Nothing ran on a GPU.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
