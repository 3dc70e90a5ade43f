"""Launch the Triton kernels: on NumPy arrays by Triton's interpreter, on a GPU's arrays by its compiler.

Triton is imported when a kernel is launched, not before: the series does without it. `make triton` makes an
environment that has it. An array on a GPU is a torch.Tensor, since that is what Triton takes.
"""

import ast
import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from helpers.attention.portable.tiles import MIN_BLOCK, check_blocks, cut_blocks, padded_head_dim
from helpers.source import cut

MISSING = "Triton is not installed here; make triton installs it, on Linux."
LARGEST_ENTRY = 2**31  # elements of a batch entry that a 32-bit offset reaches
DESCRIBED = 16  # bytes, of which a tensor descriptor wants every row to begin at a multiple


class Launch(NamedTuple):
    """Tiles of a kernel, and on a GPU the warps of a program and the loads ahead."""

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2


class Shapes(NamedTuple):
    """The static part of a call, in the letters of `attention.problem.Problem`."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    scale: float
    is_causal: bool


def is_installed():
    return importlib.util.find_spec("triton") is not None


def show_kernel(name, *regions):
    """The source of a function of `triton_kernels`, as `source.show` shows it, with or without Triton."""
    text = Path(__file__).with_name("triton_kernels.py").read_text()
    (node,) = (node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    return cut("@triton.jit\n" + ast.get_source_segment(text, node).replace("  # fmt: skip", ""), *regions)


@functools.cache
def kernels(interpret):
    """The module of the kernels. Triton reads once, when they are defined, whether it interprets them."""
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a product and a sum in one; Triton 3.9 asks which
    return importlib.import_module("helpers.dialects.triton_kernels")


class InMemory:
    """A NumPy array in the guise of a PyTorch tensor, as far as Triton's interpreter looks.

    It asks for the storage, would copy it to the host, makes a view of the copy, and copies it back at the end.
    All of this is the array itself.
    """

    def __init__(self, array):
        self.array = array
        self.dtype = array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return InMemory(self.array)

    def set_(self, storage, *_):
        self.array = storage.array

    def copy_(self, other):
        """Nothing: both are the same memory."""


def shapes_of(query, key, scale=None, is_causal=False):
    """`Shapes` of query (B, T, N, H) and key (B, S, K, H). ValueError where a 32-bit offset would not reach."""
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    if max(T * N, S * K) * H >= LARGEST_ENTRY:
        raise ValueError(f"a batch entry must have fewer than {LARGEST_ENTRY} elements")
    return Shapes(B, T, S, N, K, H, H**-0.5 if scale is None else float(scale), bool(is_causal))


def _launch_for(shapes, query, launch):
    """The given `Launch`, or one of tiles that fit any GPU; none larger than the sequences need."""
    side = 64
    if not isinstance(query, np.ndarray) and padded_head_dim(shapes.H) * query.itemsize > 256:
        side = 32 if query.itemsize == 2 else MIN_BLOCK
    launch = launch or Launch(side, side)
    check_blocks(*launch[:2])
    return Launch(*cut_blocks(launch[:2], (shapes.T, shapes.S)), *launch[2:])


def _new(like, shape, dtype=None):
    """An array beside `like`, of its dtype or of float32, for a kernel to fill; NumPy's says so where none did."""
    if isinstance(like, np.ndarray):
        return np.full(shape, np.nan, like.dtype if dtype is None else np.float32)
    torch = importlib.import_module("torch")
    return torch.empty(shape, dtype=like.dtype if dtype is None else torch.float32, device=like.device)


def _run(name, arrays, blocks, launch, *constants):
    """Launch a kernel by its name. blocks: (length, side of a tile of it, heads, batch entries) of its programs."""
    interpret = isinstance(arrays[0], np.ndarray)
    length, side, *rest = blocks
    run = getattr(kernels(interpret), name)[-(-length // side), *rest]
    if interpret:
        if not all(array.flags.c_contiguous for array in arrays):
            raise ValueError("arrays must lie in memory without gaps")
        with np.errstate(all="ignore"):  # what is masked may overflow
            run(*map(InMemory, arrays), *constants)
    else:
        run(*arrays, *constants, num_warps=launch.num_warps, num_stages=launch.num_stages)


def _run_with_products(name, arrays, blocks, shapes, launch, precision):
    """Launch one of the kernels that multiply matrices."""
    _, T, S, N, K, H, scale, is_causal = shapes
    constants = scale, T, S, N, K, H, padded_head_dim(H), is_causal, launch.block_q, launch.block_k
    _run(name, arrays, blocks, launch, *constants, precision, isinstance(arrays[0], np.ndarray))


def _let_descriptors_lie_on(device):
    """A GPU wants its descriptors in its own memory, for which Triton asks the caller."""
    torch, triton = importlib.import_module("torch"), importlib.import_module("triton")
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))


def forward(query, key, value, *, scale=None, is_causal=False, launch=None, precision="tf32", kernel="forward_kernel"):
    """out (B, T, N, H) and lse (B, N, T) of query (B, T, N, H), key and value (B, S, K, H).

    All NumPy arrays, or all tensors on a GPU, without gaps. precision: of float32 products on a GPU, "tf32" or
    "ieee"; the interpreter's are exact to float32. kernel: or "forward_by_descriptors", with which a head of one
    position must fill a multiple of 16 bytes: ValueError if it does not.
    """
    shapes = shapes_of(query, key, scale, is_causal)
    if kernel == "forward_by_descriptors":
        if (size := shapes.H * query.itemsize) % DESCRIBED:
            raise ValueError(f"a descriptor needs heads of a multiple of {DESCRIBED} bytes, got {size}")
        if not isinstance(query, np.ndarray):
            _let_descriptors_lie_on(query.device)
    B, T, N = shapes.B, shapes.T, shapes.N
    launch = _launch_for(shapes, query, launch)
    out, lse = _new(query, (B, T, N, shapes.H)), _new(query, (B, N, T), "float32")
    _run_with_products(kernel, (query, key, value, out, lse), (T, launch.block_q, N, B), shapes, launch, precision)
    return out, lse


def backward(
        query, key, value, out, lse, do, dlse, *, scale=None, is_causal=False, precision="tf32",
        dkv_launch=None, dq_launch=None):  # fmt: skip
    """(dq, dk, dv), from what `forward` returned and the gradients of it, do (B, T, N, H) and dlse (B, N, T).

    scale, is_causal and precision: as of `forward`.
    """
    shapes = shapes_of(query, key, scale, is_causal)
    B, T, S, N, K, H, *_ = shapes
    of_dkv, of_dq = (_launch_for(shapes, query, launch) for launch in (dkv_launch, dq_launch))
    of_queries, of_keys = (T, of_dq.block_q, N, B), (S, of_dkv.block_k, K, B)

    delta = _new(out, (B, N, T), "float32")  # rowsum(out * do) - dlse
    _run("delta_kernel", (out, do, dlse, delta), of_queries, of_dq, T, N, H, padded_head_dim(H), of_dq.block_q)
    dq, dk, dv = (_new(query, tuple(array.shape)) for array in (query, key, value))
    saved = query, key, value, do, lse, delta
    _run_with_products("dq_kernel", (*saved, dq), of_queries, shapes, of_dq, precision)
    _run_with_products("dkv_kernel", (*saved, dk, dv), of_keys, shapes, of_dkv, precision)
    return dq, dk, dv
