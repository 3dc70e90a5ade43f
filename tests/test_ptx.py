"""The products that are spelt out in PTX, read as the PTX ISA says: no CPU can run them."""

import re

import numpy as np
import pytest
from jax._src.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from helpers.attention.hopper.ptx import wgmma_instructions


def written(shapes, axis):
    """(text, descriptors) of wgmma_instructions for operands of these shapes, each a swizzled array of its own."""
    context = make_ir_context()
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body) as place:
        smem = ir.Attribute.parse("#gpu.address_space<workgroup>")
        refs = [
            ir.MemRefType.get((rows // 8, columns // 64, 8, 64), ir.BF16Type.get(), memory_space=smem)
            for rows, columns in shapes
        ]
        shape = tuple(size[1 - axis] for size in shapes[:2])
        func.FuncOp.from_py_func(*refs)(lambda *operands: wgmma_instructions(operands, axis, shape) and None)
        lines = str(place.block.owner).splitlines()
    (line,) = (line for line in lines if "wgmma" in line)
    constants = dict(re.findall(r"(%\S+) = arith.constant (\d+) : i64", "\n".join(lines)))
    made = dict(re.findall(r"(%\S+) = llvm.or %\S+, (%\S+) ", "\n".join(lines)))
    text, operands = re.search(r'"(\{.*\})".*? (%[^:]*) :', line).groups()
    return text, [int(constants[made[name]]) for name in operands.split(", ")]


def address(descriptor, step, transposed, mn, k):
    """Bytes from where the operand begins to its element: PTX ISA, the canonical layouts with 128 byte swizzle."""
    assert descriptor >> 62 == 1
    leading, stride = (16 * (descriptor >> bit & 0x3FFF) for bit in (16, 32))
    if transposed:
        return 16 * step + (k // 8) * stride + (k % 8) * 128 + (mn // 64) * leading + (mn % 64) * 2
    return 16 * step + (mn // 8) * stride + (mn % 8) * 128 + 2 * k


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("H", [64, 128])
def test_the_instructions_compute_the_sum_of_the_products(axis, H):
    rng = np.random.default_rng(0)
    shapes = [(64, H), (128, H)] * 2 if axis == 1 else [(64, 64), (64, H)] * 2
    arrays = [rng.normal(size=shape) for shape in shapes]
    text, descriptors = written(shapes, axis)
    memory = [array.reshape(len(array) // 8, 8, -1, 64).swapaxes(1, 2).ravel() for array in arrays]
    columns = shapes[1][1 - axis]
    total, count = np.full((64, columns), np.nan), columns // 2
    assert text.index("wgmma.fence") < text.index("wgmma.mma") and text.index("wgmma.commit") > text.rindex("wgmma.mma")
    one = (
        r"add.s64 a, \$(\d+), (\d+); add.s64 b, \$(\d+), (\d+); setp.ne.b32 adds, (\d), 0; "
        r"wgmma.mma_async.sync.aligned.m64n(\d+)k16.f32.bf16.bf16 \{([^}]*)\}, a, b, adds, 1, 1, (\d), (\d);"
    )
    instructions = re.findall(one, text)
    assert len(instructions) == text.count("wgmma.mma_async") == sum(shape[axis] for shape in shapes[::2]) // 16
    for a, a_step, b, b_step, adds, n, registers, *transposed in instructions:
        assert int(n) == columns and registers == ",".join(f"${i}" for i in range(count))
        tiles = []
        for operand, step, turned, size in zip((a, b), (a_step, b_step), transposed, (64, columns), strict=True):
            which = int(operand) - count
            mn, k = np.ogrid[:size, :16]
            where = address(descriptors[which], int(step), int(turned), mn, k)
            tiles.append(memory[which][where // 2])
        total = (total if int(adds) else 0) + tiles[0] @ tiles[1].T
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    right = sum(a @ b.T if axis == 1 else a.T @ b for a, b in pairs)
    np.testing.assert_allclose(total, right, rtol=1e-12, atol=1e-12)
