"""Replay a Pallas kernel program by program, and count every element that it loads and stores.

`replay` traces a function, finds each `pallas_call` in it, and runs the kernel's own operations
one at a time in NumPy-sized steps. Nothing about the kernel is assumed: the grid, the block of
each program, the bounds of the loops inside and the masks of the loads are those that it has.
It works for kernels whose refs are indexed by scalars and slices, and it is slow: use small shapes.
"""

import itertools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import jaxpr_as_fun

from helpers.instruments.products import product

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
CALLS += ("custom_vmap_call", "custom_partitioning", "flash_attention_apart")


@dataclass
class Operand:
    """One array that a kernel reads or writes.

    block_shape: the shape of the block that a program sees, with None for an axis it indexes by a
    single position. block_of: block indices, (programs, axes), programs in the order of `programs`.
    reads, writes: how often each element was loaded and stored, in the shape of the array.
    reads_by_program: the reads of each program alone, if `replay` was asked for them.
    outside: elements loaded from beyond the end of the array, where no mask kept them out.
    outside_writes: elements stored beyond its end, likewise.
    """

    name: str
    is_output: bool
    values: np.ndarray
    block_shape: tuple
    block_of: np.ndarray
    reads: np.ndarray = field(init=False)
    writes: np.ndarray = field(init=False)
    reads_by_program: list[np.ndarray] = field(default_factory=list)
    outside: int = 0
    past_block: int = 0
    outside_writes: int = 0

    def __post_init__(self):
        self.reads = np.zeros(self.values.shape, np.int64)
        self.writes = np.zeros(self.values.shape, np.int64)

    @property
    def bytes_read(self):
        return int(self.reads.sum()) * self.values.dtype.itemsize

    @property
    def bytes_written(self):
        return int(self.writes.sum()) * self.values.dtype.itemsize


@dataclass
class KernelCall:
    """One `pallas_call`: its name, its grid, the programs in order, its operands by name, the FLOPs of its products."""

    name: str
    grid: tuple[int, ...]
    programs: list[tuple[int, ...]]
    operands: dict[str, Operand]
    flops: int

    @property
    def bytes_moved(self):
        """Bytes that all programs together load and store."""
        return sum(operand.bytes_read + operand.bytes_written for operand in self.operands.values())


def replay(function, *arguments, by_program=False, past_the_end=np.nan):
    """Run function(*arguments) and watch its kernels; with by_program, tell the reads of their programs apart.

    past_the_end: the float that stands past the end of arrays, and in memory that nobody has written.

    Returns (calls, result): a list with a `KernelCall` for each `pallas_call`, in the order in
    which they run, and what the function returned, computed by the replayed kernels.

    Raises NotImplementedError for an operation on a ref that it does not know.
    """
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    interpreter = _Interpreter(by_program, past_the_end)
    flat = interpreter.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(arguments))
    return interpreter.calls, jax.tree.unflatten(jax.tree.structure(shape), flat)


@dataclass
class _Ref:
    """A window on an operand (None for scratch memory): positions of its elements, -1 outside."""

    flat: np.ndarray
    positions: np.ndarray
    operand: Operand | None
    past_the_end: float

    def _select(self, transforms):
        positions = self.positions
        for transform in transforms:
            if not hasattr(transform, "indices"):
                raise NotImplementedError(f"cannot replay a ref seen through {type(transform).__name__}")
            squeezed = []
            for axis, index in enumerate(transform.indices):
                if hasattr(index, "size") and hasattr(index, "start"):
                    wanted = int(index.start) + index.stride * np.arange(index.size)
                elif np.ndim(index) == 0:
                    wanted = np.array([int(index)])
                    squeezed.append(axis)
                else:
                    raise NotImplementedError("cannot replay a ref indexed by an array")
                positions = _taken(positions, axis, wanted, -2)
            positions = positions.squeeze(tuple(squeezed))
        return positions

    def _places(self, transforms, mask):
        """Positions, which of them are wanted, and which of those lie inside."""
        positions = self._select(transforms)
        wanted = np.ones(positions.shape, bool) if mask is None else np.broadcast_to(np.asarray(mask), positions.shape)
        return positions, wanted, wanted & (positions >= 0)

    def load(self, transforms=(), mask=None, other=None):
        positions, wanted, valid = self._places(transforms, mask)
        if self.operand:
            self.operand.reads.reshape(-1)[positions[valid]] += 1
            self.operand.outside += int((wanted & ~valid).sum())
            self.operand.past_block += int((wanted & (positions == -2)).sum())
        result = np.empty(positions.shape, self.flat.dtype)
        poison = _poison(self.flat.dtype, self.past_the_end)
        result[...] = poison if other is None else np.asarray(other)
        result[wanted] = poison
        result[valid] = self.flat[positions[valid]]
        return jnp.asarray(result)

    def store(self, value, transforms=(), mask=None):
        positions, wanted, valid = self._places(transforms, mask)
        before = self.flat[np.maximum(positions, 0)]
        self.flat[positions[valid]] = np.broadcast_to(np.asarray(value), positions.shape)[valid]
        if self.operand:
            self.operand.writes.reshape(-1)[positions[valid]] += 1
            self.operand.outside_writes += int((wanted & ~valid).sum())
        return jnp.asarray(before)


class _Interpreter:
    """Evaluates a jaxpr one equation at a time; refs are `_Ref`s."""

    def __init__(self, by_program, past_the_end):
        self.by_program = by_program
        self.past_the_end = past_the_end
        self.flops = 0  # of the kernel that runs
        self.calls = []
        self.program = ()
        self.grid = ()

    def run(self, jaxpr, consts, arguments):
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def value(atom):
            return atom.val if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            values = [value(atom) for atom in equation.invars]
            results = self.evaluate(equation, values)
            if not equation.primitive.multiple_results:
                results = [results]
            known.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def evaluate(self, equation, values):
        name, params = equation.primitive.name, equation.params
        match name:
            case "pallas_call":
                return self.pallas_call(params, values)
            case "program_id":
                return jnp.int32(self.program[params["axis"]])
            case "num_programs":
                return jnp.int32(self.grid[params["axis"]])
            case "platform_index":
                return jnp.int32(next(i for i, names in enumerate(params["platforms"]) if not names or "cpu" in names))
            case "get":
                ref, *rest = values
                return ref.load(jax.tree.unflatten(params["tree"], rest))
            case "swap":
                ref, new, *rest = values
                return ref.store(new, jax.tree.unflatten(params["tree"], rest))
            case "addupdate":
                ref, new, *rest = values
                transforms = jax.tree.unflatten(params["tree"], rest)
                ref.store(ref.load(transforms) + new, transforms)
                return []
            case "masked_load":
                ref, transforms, mask, other = jax.tree.unflatten(params["args_tree"], values)
                return ref.load(transforms, mask, other)
            case "masked_swap":
                ref, transforms, new, mask = jax.tree.unflatten(params["args_tree"], values)
                return ref.store(new, transforms, mask)
            case "cond":
                index, *rest = values
                branches = params["branches"]
                branch = branches[min(max(int(index), 0), len(branches) - 1)]
                return self.run(branch.jaxpr, branch.consts, rest)
            case "while":
                return self.loop(params, values)
            case "scan":
                return self.scan(params, values)
        if name in CALLS:
            inner = next(params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in params)
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
        if any(isinstance(value, _Ref) for value in values):
            raise NotImplementedError(f"cannot replay the operation {name} on a ref")
        if name == "dot_general":
            self.flops += product(equation).flops
        return equation.primitive.bind(*values, **params)

    def loop(self, params, values):
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        cond_consts = values[: params["cond_nconsts"]]
        body_consts = values[params["cond_nconsts"] :][: params["body_nconsts"]]
        carry = values[params["cond_nconsts"] + params["body_nconsts"] :]
        while self.run(cond.jaxpr, cond.consts, [*cond_consts, *carry])[0]:
            carry = self.run(body.jaxpr, body.consts, [*body_consts, *carry])
        return carry

    def scan(self, params, values):
        body = params["jaxpr"]
        num_consts, num_carry, _ = (len(group.vals) for group in params["ft_in"].unpack())
        consts, carry, xs = values[:num_consts], values[num_consts:][:num_carry], values[num_consts + num_carry :]
        collected = []
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            results = self.run(body.jaxpr, body.consts, [*consts, *carry, *(x[i] for x in xs)])
            carry = results[:num_carry]
            collected.append(results[num_carry:])
        if params["reverse"]:
            collected.reverse()
        return [*carry, *(jnp.stack(column) for column in zip(*collected, strict=True))]

    def pallas_call(self, params, values):
        mapping, jaxpr = params["grid_mapping"], params["jaxpr"]
        if mapping.num_index_operands or mapping.num_dynamic_grid_bounds:
            raise NotImplementedError("cannot replay scalar prefetch or a grid of dynamic size")
        grid = tuple(mapping.grid)
        programs = list(itertools.product(*map(range, grid)))
        aliases = dict((out, into) for into, out in params["input_output_aliases"])
        names = [name.removesuffix("_ref") for name in jaxpr.debug_info.arg_names]

        operands = []
        for number, block in enumerate(mapping.block_mappings):
            is_output = number >= mapping.num_inputs
            source = aliases.get(number - mapping.num_inputs) if is_output else number
            aval = block.array_aval
            array = self._unwritten(aval) if source is None else np.array(values[source])
            columns = [jnp.array(column, jnp.int32) for column in zip(*programs, strict=True)]
            indices = jax.vmap(jaxpr_as_fun(block.index_map_jaxpr))(*columns) if columns else [0] * array.ndim
            indices = np.array([np.broadcast_to(index, len(programs)) for index in indices], int)
            block_of = indices.reshape(array.ndim, len(programs)).T
            block_shape = tuple(map(_block_size, block.block_shape))
            operands.append(Operand(names[number], is_output, array, block_shape, block_of))
        scratch = [self._unwritten(variable.aval) for variable in jaxpr.invars[len(operands) :]]
        outer = self.program, self.grid
        local = [axis for axis in range(len(grid)) if axis not in mapping.vmapped_dims]
        self.grid, self.flops = tuple(grid[axis] for axis in local), 0
        for number, program in enumerate(programs):
            self.program = tuple(program[axis] for axis in local)
            refs = [_window(operand, number, self.past_the_end) for operand in operands]
            refs += [_Ref(s.reshape(-1), np.arange(s.size).reshape(s.shape), None, self.past_the_end) for s in scratch]
            before = [operand.reads.copy() for operand in operands] if self.by_program else []
            self.run(jaxpr, (), refs)
            for operand, earlier in zip(operands, before, strict=self.by_program):
                operand.reads_by_program.append(operand.reads - earlier)
        self.program, self.grid = outer
        by_name = {operand.name: operand for operand in operands}
        self.calls.append(KernelCall(params["name"] or "kernel", grid, programs, by_name, self.flops))
        return [jnp.asarray(operand.values) for operand in operands if operand.is_output]

    def _unwritten(self, aval):
        """Memory that nobody has written."""
        return np.full(aval.shape, _poison(aval.dtype, self.past_the_end), aval.dtype)


def _taken(positions, axis, wanted, past=-1):
    """The positions at some places of an axis, and for places outside -1, or -2 if a kernel asked for them."""
    inside = (wanted >= 0) & (wanted < positions.shape[axis])
    taken = positions.take(np.where(inside, wanted, 0), axis)
    return np.where(inside.reshape([-1 if a == axis else 1 for a in range(positions.ndim)]), taken, past)


def _window(operand, program_number, past_the_end):
    """The block of one program as a ref."""
    shape = operand.values.shape
    positions = np.arange(math.prod(shape)).reshape(shape)
    for axis, (size, index) in enumerate(zip(operand.block_shape, operand.block_of[program_number], strict=True)):
        positions = _taken(positions, axis, int(index) * (size or 1) + np.arange(size or 1))
    squeezed = tuple(axis for axis, size in enumerate(operand.block_shape) if size is None)
    return _Ref(operand.values.reshape(-1), positions.squeeze(squeezed), operand, past_the_end)


def _block_size(size):
    """An integer, or None for an axis that the block leaves out."""
    if isinstance(size, int) or size is None:
        return size
    if hasattr(size, "block_size"):
        return size.block_size
    if type(size).__name__ == "Squeezed":
        return None
    raise NotImplementedError(f"cannot replay a block whose shape holds {size!r}")


def _poison(dtype, past_the_end):
    """What stands where nobody has written: that float, or the smallest integer."""
    if jnp.issubdtype(dtype, jnp.floating):
        return past_the_end
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else False
