"""What the Hopper backward kernels hold on the chip and multiply, watched while JAX traces them.

Nothing is computed: `watch` traces a backward pass for a GPU and notes the shared memory that each
kernel asks for and the operands of every product that one step of its loop issues. So the numbers
are those of the kernels themselves, whatever the documentation says.

A step is one pair of tiles, block_q queries and block_k keys. Everything is for one program, which
is one thread block on one SM of the GPU.
"""

import math
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention.hopper import backward as hopper
from helpers.attention.hopper import backward_fused, backward_parts, backward_split, forward, ladder
from helpers.attention.hopper.backward_schedule import Tiles
from helpers.attention.hopper.ring import Ring
from helpers.attention.problem import check_call
from helpers.instruments.hopper_figures import problem_of

SMEM_LIMIT = 227 * 1024  # bytes of shared memory that one thread block of a Hopper GPU may have
SM_SMEM = 228 * 1024  # bytes that all thread blocks of an SM share
SM_REGISTERS = 65536  # of 32 bits
BESIDE_THE_TILES = 2144  # bytes: scratch, barriers, gaps; at most, by lowering the rungs of the forward ladder
WARPGROUP = 128  # threads
SMEM_RATE = 128  # bytes that shared memory delivers in a cycle
TENSOR_RATE = 4096  # floating-point operations of 16-bit products in a cycle of one SM
BESIDE = {"q": "lse", "do": "delta"}  # what a slot of a ring holds beside a tile
_NAMES = {
    ("k_smem", "q_smem"): "s",
    ("v_smem", "do_smem"): "dp",
    ("registers", "do_smem"): "dv",
    ("registers", "q_smem"): "dk",
    ("ds_smem", "q_smem"): "dk",
    ("ds_smem", "k_smem"): "dq",
    ("q_smem", "k_smem"): "s",
    ("do_smem", "v_smem"): "dp",
    ("registers", "k_smem"): "dq",
}


@dataclass(frozen=True)
class Product:
    """One product that a warpgroup issues: (m, k) times (k, n), added to an accumulator (m, n).

    left: where the left operand lies, "registers" or the name of a buffer; right: the buffer of the
    right operand.
    """

    name: str
    left: str
    right: str
    m: int
    k: int
    n: int

    @property
    def flops(self):
        return 2 * self.m * self.k * self.n

    @property
    def bytes_from_smem(self):
        """Bytes that the tensor core reads from shared memory, at 2 bytes an element."""
        return 2 * self.k * (self.n + (0 if self.left == "registers" else self.m))


@dataclass(frozen=True)
class Kernel:
    """A kernel as it was traced.

    buffers: {array in shared memory: its bytes}. products: those of one warpgroup in one step.
    """

    name: str
    tiles: Tiles
    buffers: dict
    products: tuple

    @property
    def smem(self):
        """Bytes of shared memory, without the barriers, which are 8 bytes each."""
        return sum(self.buffers.values())


def memory(scratch):
    """{name: ref or type} of what a kernel's scratch has, each array in shared memory by itself."""
    found = {}
    for name, value in scratch._asdict().items():
        several = dict(zip((name, BESIDE.get(name)), value.buffers, strict=False)) if isinstance(value, Ring) else {}
        found |= several or {name: value}
    return {f"{name}_smem": value for name, value in found.items() if value is not None}


def watch(H, tiles, is_causal=False):
    """{name: `Kernel`} of a backward pass with head dim H of at most 128: "fused", or "dkv" and "dq".

    tiles: one of `backward_schedule.forms(H)`, or others of the same kind.
    """
    found, state = {}, {"refs": {}, "inside": False, "products": []}
    launch, loop = hopper._launch, backward_parts.for_each_query_tile
    multiply_add, issue = backward_fused.multiply_add, backward_fused.issue

    def under(ref):
        """The array in shared memory of which a ref may show a part or a transpose."""
        while hasattr(ref, "transforms"):
            ref = ref.ref
        return ref

    def name_of(operand):
        if isinstance(operand, jax.Array):
            return "registers"
        return state["refs"][id(under(operand))]

    def watched_launch(kernel, name, arrays, outputs, scratch, grid, problem, tiles, interpret, **more):
        state["products"], state["inside"] = [], name == "dq"

        def watched(gmem, refs, *others):
            state["refs"] = {id(under(ref)): name for name, ref in memory(refs).items()}
            return kernel(gmem, refs, *others)

        results = launch(watched, name, arrays, outputs, scratch, grid, problem, tiles, interpret, **more)
        held = {name: wanted for name, wanted in memory(scratch).items() if not isinstance(wanted, plgpu.Barrier)}
        buffers = {name: math.prod(one.shape) * jnp.dtype(one.dtype).itemsize for name, one in held.items()}
        # A loop body may be traced more than once.
        traces = sum(product.name == "s" for product in state["products"])
        products = state["products"][: len(state["products"]) // traces]
        kernel_name = name.removesuffix("_backward")
        found[kernel_name] = Kernel(kernel_name, tiles, buffers, tuple(products))
        return results

    def note(a, b, m, k, n):
        left, right = name_of(a), name_of(b)
        if state["inside"]:
            state["products"].append(Product(_NAMES[left, right], left, right, m, k, n))

    def watched_multiply_add(acc, a, b, spare, interpret):
        note(a, b, *a.shape, b.shape[1])
        return multiply_add(acc, a, b, spare, interpret)

    def watched_issue(products, axis, interpret):
        for a, b in products:
            note(a, b, a.shape[1 - axis], a.shape[axis], b.shape[1 - axis])
        return issue(products, axis, interpret)

    def watched_loop(*arguments):
        state["inside"] = True
        try:
            return loop(*arguments)
        finally:
            state["inside"] = False

    def gradients(query, key, value, out, lse, dout, dlse):
        call = check_call(query, key, value, is_causal=is_causal)
        return hopper.backward(call, out, lse, dout, dlse, tiles=tiles)

    T = 1024
    array, rows = jax.ShapeDtypeStruct((1, T, 1, H), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1, T), jnp.float32)
    products = {"multiply_add": watched_multiply_add, "issue": watched_issue}
    with (
        mock.patch.object(hopper, "_launch", watched_launch),
        mock.patch.multiple(backward_fused, **products),
        mock.patch.multiple(backward_split, **products),
        mock.patch.object(backward_parts, "for_each_query_tile", watched_loop),
    ):
        hopper._fused.clear_cache()  # what was traced before would not be traced again
        jax.eval_shape(gradients, array, array, array, array, rows, array, rows)
        hopper._fused.clear_cache()
    return found


def forward_smem(tiles, H):
    """{array: bytes} of the shared memory that the forward kernel asks for, H being 64, 128 or 256.

    Beside it there are gaps, for arrays begin at multiples of 1024 bytes, and what a dynamic scheduler has.
    """
    q = 2 * tiles.warpgroups * tiles.block_q * H
    ring = 2 * tiles.stages * tiles.block_k * H
    small = 4 * (tiles.warpgroups + 1) * tiles.block_q + 8 * (tiles.warpgroups + 4 * tiles.stages + 1)
    q_and_out = {"q": 2 * q, "out": q} if tiles.ahead else {"q": q, "out": 0}
    return q_and_out | {"k ring": ring, "v ring": ring, "lse, barriers": small}


def programs_on_an_sm(rung, problem, registers):
    """(programs of a rung of the forward ladder that fit on one Hopper SM, compute warpgroups of each).

    registers: of a thread, as the compiler says. Of shared memory, BESIDE_THE_TILES and 1 KiB come to the tiles.
    """
    if rung == 7:
        tiles = forward.default_tiles(problem)
        warpgroups, has_memory, smem = tiles.warpgroups, True, sum(forward_smem(tiles, problem.H).values())
    else:
        warpgroups, has_memory = 2 if rung >= 4 else 1, rung >= 3
        slots = 1 if rung == 1 else ladder.STAGES
        smem = (warpgroups * ladder.BLOCK_Q + 2 * slots * ladder.BLOCK_K) * problem.H * 2
    threads = WARPGROUP * (warpgroups + has_memory)
    by_registers = SM_REGISTERS // (threads * math.ceil(registers / 8) * 8)
    by_smem = SM_SMEM // (smem + BESIDE_THE_TILES + 1024)
    return min(by_registers, by_smem), warpgroups


def rungs_on_an_sm(compiled, T=4096):
    """{case: {rung: `programs_on_an_sm`}} of the grid's shapes. compiled: what was recorded of the compiler."""
    found = {}
    for entry in compiled:
        rung, H, is_causal = entry["rung"], entry["H"], entry["is_causal"]
        rungs = found.setdefault(f"H={H} {'causal' if is_causal else 'full'}", {})
        rungs[rung] = programs_on_an_sm(rung, problem_of(H, T, is_causal), entry["registers"])
    return found


def traffic(kernel, H):
    """Bytes that cross shared memory in one step of all warpgroups, {what: bytes}.

    The operands that the tensor core reads, the tiles that TMA brings, and in the fused form ds, which
    is written once, and the part of dq, which is written by threads and read by TMA.
    """
    bytes_of = dict.fromkeys(("s", "dp", "dv", "dk", "dq"), 0)
    for product in kernel.products:
        bytes_of[product.name] += kernel.tiles.warpgroups * product.bytes_from_smem
    found = {f"{name}: operands": amount for name, amount in bytes_of.items() if amount}
    streamed = kernel.tiles.block_k if kernel.name == "dq" else kernel.tiles.block_q
    found["TMA: tiles in"] = 2 * 2 * streamed * H
    if kernel.name == "fused":
        found["ds written"] = 2 * kernel.tiles.block_q * kernel.tiles.block_k
        found["dq written"] = found["dq read by TMA"] = 4 * kernel.tiles.block_q * H
    return found


def flops(kernel):
    """Floating-point operations of the products of one step of all warpgroups."""
    return kernel.tiles.warpgroups * sum(product.flops for product in kernel.products)


def for_64_queries(kernel, H=128):
    """(FLOPs, {what: bytes through shared memory}) of 64 queries and 128 keys."""
    steps = 64 * 128 / (kernel.tiles.block_q * kernel.tiles.block_k)
    return steps * flops(kernel), {what: steps * amount for what, amount in traffic(kernel, H).items()}
