"""One call on many devices: the batch and the heads are split, sequences stay whole.

Arrays are described by letters, one for each axis, as `Problem` has them: "BTNH" is a query, "BNT" its lse.
JAX can place arrays in three ways, and each comes here by its own way:

    automatic axes, under `jit`   the compiler asks how a call may be split: `one_device_at_a_time`
    explicit axes                 the types of the arrays say how they are split: `over_explicit_axes`
    `jax.shard_map`               a call has its part already, and types say which arrays differ: `vary_alike`
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

RESULTS = ("BTNH", "BNT", "BTNH")  # out, lse, and the low bits of out


def letters(which, arrays):
    """Of the arrays that go into a pass of `registry.Kernels`, and of those that come out.

    Into it go the arrays of a `Call`, and into a backward pass also out, lse, dout, dlse and low bits. P pages of G
    tokens hold keys, and L of them a sequence. An axis of an extra that is 1 and serves all has the letter 1.
    """
    *_, table, extras = arrays[:7]
    keys = "BSKH" if table is None else "PGKH"
    call = ("BTNH", keys, keys, "B", "B", "BL", extras.letters())
    if "backward" in which:
        return (*call, "BTNH", "BNT", "BTNH", "BNT", "BTNH"), ("BTNH", "BSKH", "BSKH")
    return call, RESULTS if which == "forward_with_low_bits" else RESULTS[:2]


def join_axis(size, array, is_batched):
    """An array, with an axis of `vmap` or without, where that axis of a size has become a part of the batch."""
    array = array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(-1, *array.shape[2:])


def join_extra(size, batch, array, is_batched):
    """The same of an array of `Extras`, which may have 1 in place of the batch: unless it has the axis, it keeps it."""
    if not is_batched and array.shape[0] == 1:
        return array
    array = array if is_batched else array[None]
    return jnp.broadcast_to(array, (size, batch, *array.shape[2:])).reshape(-1, *array.shape[2:])


def join_all(size, batch, is_batched, *arrays):
    """All arrays, each with such an axis or without. Pages that all entries share stay as they are, uncopied."""
    query, key, value, lengths, key_lengths, table, extras, *residuals = arrays
    of_query, of_keys, of_values, of_query_lengths, of_lengths, of_table, of_extras, *of_residuals = is_batched
    join = functools.partial(join_axis, size)
    extras = jax.tree.map(functools.partial(join_extra, size, batch), extras, of_extras)
    if table is None:
        call = query, key, value, lengths, key_lengths, None
        call = jax.tree.map(join, call, (of_query, of_keys, of_values, of_query_lengths, of_lengths, None))
        return *call, extras, *jax.tree.map(join, residuals, of_residuals)
    if of_keys or of_values:  # each entry has pages of its own, whose numbers go on from those of the entry before
        count = (key.shape[1:] if of_keys else key.shape)[0]
        table = jnp.clip(table, 0, count - 1) + count * jnp.arange(size, dtype=table.dtype)[:, None, None]
        key, value, of_table = join(key, of_keys), join(value, of_values), True
    return join(query, of_query), key, value, None, join(key_lengths, of_lengths), join(table, of_table), extras


def one_device_at_a_time(run, inputs, outputs, splits=True):
    """run(problem, *arrays) as a function that `vmap` and the compiler's partitioner know how to split.

    run has no derivative and works on one device. inputs, outputs: the letters of its arrays, of which some
    may be None, and of its results, a tuple. splits: whether to split at all. An axis of `vmap` joins the batch.
    """

    def part(problem, *arrays):
        if splits and not jax.sharding.get_abstract_mesh().manual_axes:  # in shard_map arrays are parts already
            return _partitioned(run, problem, inputs, outputs, arrays)
        return run(problem, *arrays)

    def at_once(problem, *arrays):
        @jax.custom_batching.custom_vmap
        def call(*arrays):
            return over_explicit_axes(part, problem, arrays, inputs, outputs)  # the axis of vmap may be split over some

        @call.def_vmap
        def _(size, is_batched, *arrays):
            if not size:  # an entry of zeros has the types of the results; XLA leaves out what nobody reads
                entry = lambda array, batched: array.sum(axis=0, dtype=array.dtype) if batched else array
                results = at_once(problem, *jax.tree.map(entry, arrays, tuple(is_batched)))
                return tuple(result[None][:0] for result in results), (True,) * len(outputs)

            joined = dataclasses.replace(problem, B=size * problem.B)
            if joined.is_symbolic:
                raise NotImplementedError('vmap over an axis of symbolic size needs implementation="reference"')
            arrays = join_all(size, problem.B, is_batched, *arrays)
            own = *inputs[:6], arrays[6].letters(), *inputs[7:]  # an axis of 1 may have become the batch
            results = one_device_at_a_time(run, own, outputs, splits)(joined, *arrays)
            results = tuple(result.reshape(size, problem.B, *result.shape[1:]) for result in results)
            return results, (True,) * len(outputs)

        return call(*arrays)

    return at_once


def _partitioned(run, problem, inputs, outputs, arrays):
    """run(problem, *arrays), with a rule by which XLA splits it over automatic axes."""
    inputs = _present(inputs, arrays)

    def partition(mesh, arguments, results):
        def axes_of(letter):
            """Those of the first array that has split this."""
            pairs = zip(jax.tree.leaves(inputs), jax.tree.leaves(arguments), strict=True)
            found = (own.sharding.spec[letters.index(letter)] for letters, own in pairs if letter in letters)
            return next((axes for axes in found if axes is not None), None)

        # Heads that only the keys have split are split for the queries too: those need not move for that.
        batch, heads = axes_of("B"), axes_of("N") or axes_of("K")
        split = Split(mesh.shape, problem, batch, heads)
        place = lambda letters: NamedSharding(mesh, split.spec(letters))
        return mesh, split.part(run, inputs, outputs), *(jax.tree.map(place, side) for side in (outputs, inputs))

    call = custom_partitioning(lambda *arrays: run(problem, *arrays))
    names = {"K": "n"} if problem.K == problem.N else {}
    count = itertools.count()
    name = lambda letter: f"one{next(count)}" if letter == "1" else names.get(letter, letter.lower())
    rule = [", ".join(" ".join(map(name, letters)) for letters in jax.tree.leaves(side)) for side in (inputs, outputs)]
    call.def_partition(partition, sharding_rule=" -> ".join(rule))
    return call(*arrays)


def over_explicit_axes(run, problem, arrays, inputs, outputs):
    """run(problem, *arrays), on each device for its part, where axes of the mesh are explicit.

    Results are split as the query is. What has a derivative in run has one here.
    """
    shardings = [jax.typeof(array).sharding for array in jax.tree.leaves(arrays)]
    mesh = next((sharding.mesh for sharding in shardings if not sharding.mesh.empty), shardings[0].mesh)
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return run(problem, *arrays)
    inputs = _present(inputs, arrays)
    own = dict(zip("BTNH", shardings[0].spec, strict=True))
    split = Split(mesh.shape, problem, own["B"], own["N"])
    place = lambda array, letters: jax.sharding.reshard(array, NamedSharding(mesh, split.spec(letters)))
    arrays = jax.tree.map(place, arrays, inputs)
    part = split.part(lambda problem, *arrays: run(problem, *vary_alike(arrays)), inputs, outputs)
    in_specs, out_specs = (jax.tree.map(split.spec, side) for side in (inputs, outputs))
    results = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*arrays)
    as_query = lambda letters: NamedSharding(mesh, P(*map(own.get, letters)))
    return tuple(
        jax.sharding.reshard(result, as_query(letters)) if "T" in letters else result
        for result, letters in zip(results, outputs, strict=True)
    )


class Split:
    """How a problem is split over axes of a mesh.

    sizes: {name of an axis: devices}. batch, heads: the name or names of the axes over which an array has
    split its batch and its query heads, or None. What does not go into equal parts is left whole, and so are
    heads that would need an axis of the batch.
    """

    def __init__(self, sizes, problem, batch, heads):
        self.problem = problem
        self.batch, parts = self._even(sizes, batch, lambda parts: problem.B % parts == 0)
        self.heads, head_parts = self._even(
            sizes,
            None if set(self._names(heads)) & set(self.batch or ()) else heads,
            lambda parts: problem.N % parts == 0 and (problem.K % parts == 0 or parts % problem.K == 0),
        )
        # With more parts than key heads each part has queries of one key head, and every device has all keys.
        self.shares_keys = problem.K % head_parts != 0
        self.head_parts = head_parts
        self.local = dataclasses.replace(
            problem, B=problem.B // parts, N=problem.N // head_parts, K=max(1, problem.K // head_parts)
        )

    @staticmethod
    def _names(axes):
        return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)

    def _even(self, sizes, axes, fits):
        names = self._names(axes)
        parts = math.prod(sizes[name] for name in names)
        return (names, parts) if names and fits(parts) else (None, 1)

    def spec(self, letters):
        axes = {"B": self.batch, "N": self.heads, "K": None if self.shares_keys else self.heads}
        return P(*(axes.get(letter) for letter in letters))

    def part(self, run, inputs, outputs):
        """run(problem, *arrays) as a function of the parts that one device has."""

        def run_part(*arrays):
            if not self.shares_keys:
                return run(self.local, *arrays)
            mine = jax.lax.axis_index(self.heads) * self.problem.K // self.head_parts
            take = lambda array: jax.lax.dynamic_slice_in_dim(array, mine, 1, axis=2)
            own = jax.tree.map(lambda array, letters: take(array) if "K" in letters else array, arrays, inputs)
            results = run(self.local, *own)
            return tuple(
                self._sum_of_heads(result, mine) if letters == "BSKH" else result
                for result, letters in zip(results, outputs, strict=True)
            )

        return run_part

    def _sum_of_heads(self, gradient, mine):
        """The gradient of all keys from every device's of its own head."""
        B, S, _, H = gradient.shape
        every = jnp.zeros((B, S, self.problem.K, H), jnp.float32)
        every = jax.lax.dynamic_update_slice_in_dim(every, gradient.astype(jnp.float32), mine, axis=2)
        return jax.lax.psum(every, self.heads).astype(gradient.dtype)


def _present(letters, arrays):
    """The letters of the arrays that are there."""
    return tuple(None if array is None else own for own, array in zip(letters, arrays, strict=True))


def vary_alike(arrays):
    """The arrays, with the types that `jax.shard_map` checks: each may differ wherever one of them may."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(arrays)]
    every = frozenset().union(*varying)

    def vary(array):
        missing = every - jax.typeof(array).manual_axis_type.varying
        return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array

    return jax.tree.map(vary, arrays)
