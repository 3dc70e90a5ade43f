"""Attention over a sequence that is spread over devices: ring attention (Liu et al. 2023, arXiv 2310.01889).

Each of D devices has a share of the queries and the same share of the keys and values. In step r of D, device i
attends with its own queries to the keys of device i - r, while those keys, but in the last step, already travel on to
device i + 1. What it finds is a part of a sum over all keys, which is added as in Flash-Decoding:

    lse' = log(exp lse + exp lse_r)      out' = exp(lse - lse') out + exp(lse_r - lse') out_r

The backward pass goes round once more. With the final out and lse, the kernels' own equations give the share of
each pair of devices exactly, since p = exp(s - lse) needs no other keys. dq stays and is added up; dk and dv travel
with their keys, and come home in the step in which device i works on its own keys, the last one. All of these sums
are float32, dk and dv also while they travel: rounded to 16 bits in each step, their error would grow with D.

Which positions a device has is its layout. With a causal mask it decides who has work in which step:

    contiguous  D pieces in order. Device 0 has work in one step, device D - 1 in all, and all wait for that one.
    striped     every D-th position (Brandon et al. 2023, arXiv 2311.09431). All have the same work, up to a diagonal.
    zigzag      of 2D pieces the i-th and the (2D - 1 - i)-th. All have exactly the same work, and no step but the
                first needs a mask.

Documents that are packed into the sequence have numbers, segment ids; those of keys travel with their keys.

A step of a device is a `Piece`: its queries from some position on, the keys up to some position, and whether the
mask is causal in there. Pieces have static shapes, so the kernels of one device serve, but for cuDNN's. Keys that only
fill up the end of the sequence are cut off in the same way. `plan` lists all pieces.

On GPUs, compile with OVERLAPPING: XLA then sends keys and values as one transfer beside the kernel, where by itself it
would send the values before. A persistent forward kernel lost time beside NCCL's transfer, which occupies some of the
SMs; here it runs one program a tile. What that gave on two GPUs is in instruments/records.

Several hosts: call `jax.distributed.initialize()` first, and make the mesh of all devices. Nothing else changes.
A host that stops ends the others with an error: after `heartbeat_timeout_seconds` of that call, if not at once.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.attention.differentiate import differentiable
from helpers.attention.extras import Extras
from helpers.attention.hopper.common_part import given_back, taken_off
from helpers.attention.low_bits import rounded_with_low_bits
from helpers.attention.masking import Band
from helpers.attention.problem import MAX_LENGTH, Call, Problem, check_call, check_flag, check_lengths
from helpers.attention.public.registry import KernelsOf, choose, kernels_by_platform
from helpers.attention.reference import naive_attention
from helpers.attention.sharding import vary_alike

LAYOUTS = ("contiguous", "striped", "zigzag")
MASKS = ("query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids")
# jax.jit(…, compiler_options=OVERLAPPING). Options of XLA, which may rename them.
OVERLAPPING = {
    "xla_gpu_collective_permute_combine_threshold_bytes": 2**40,
    "xla_gpu_enable_latency_hiding_scheduler": True,
}


# Who has which positions, and who has work when


def positions(layout, devices, share, device, xp=np):
    """The `share` positions in the whole sequence that a device has, in the order in which it has them, rising."""
    index = xp.arange(share)
    if layout == "contiguous":
        return device * share + index
    if layout == "striped":
        return index * devices + device
    half = share // 2
    return xp.where(index < half, device * half + index, (2 * devices - 1 - device) * half + index - half)


class Piece(NamedTuple):
    """Queries from first_query on against the first `keys` keys, of shares of two devices."""

    first_query: int
    keys: int
    is_causal: bool


def plan(layout, devices, queries, keys, *, is_causal, key_length=None):
    """What each device does in each step: plan[step][device] is a `Piece`, or None where there is nothing to do.

    queries, keys: how many a device has. key_length: how many keys there are in all; the others are padding.
    """
    real = [keys] * devices
    if key_length is not None:
        real = [int((positions(layout, devices, keys, device) < key_length).sum()) for device in range(devices)]

    def piece(me, other):
        found = _piece(layout, queries, keys, is_causal, me, other)
        count = min(found.keys, real[other])
        return found._replace(keys=count) if count and found.first_query < queries else None

    return [[piece(me, (me - step) % devices) for me in range(devices)] for step in range(devices)]


def _piece(layout, queries, keys, is_causal, me, other):
    if not is_causal:
        return Piece(0, keys, False)
    if me == other:
        return Piece(0, keys, True)
    before = other < me
    if layout == "contiguous":
        return Piece(0, keys if before else 0, False)
    if layout == "striped":  # of a later device each query sees one key less
        return Piece(0, keys, True) if before else Piece(1, keys - 1, True)
    return Piece(0, keys // 2, False) if before else Piece(queries // 2, keys, False)


def ring_attention(
    query, key, value, *, axis_name, scale=None, is_causal=False, layout="zigzag", query_seq_lengths=None,
    key_value_seq_lengths=None, query_segment_ids=None, key_value_segment_ids=None, key_length=None,
    implementation=None, return_residual=False
):  # fmt: skip
    """Attention over a sequence that is spread over an axis of a mesh; to be called in `jax.shard_map`.

    Args:
      query: (B, T / D, N, H), what this one of D devices has of T queries; or without B, as in `flash_attention`.
      key, value: (B, S / D, K, H). With is_causal, as many as queries.
      axis_name: the axis of the mesh.
      scale, is_causal, query_seq_lengths, key_value_seq_lengths: as in `flash_attention`, of the whole sequence.
        Lengths may be any number up to the padded length.
      query_segment_ids, key_value_segment_ids: int32 (B, T / D) and (B, S / D), those of this device's share.
      layout: which positions a device has, one of LAYOUTS, see `positions`. Without a causal mask, lengths
        or key_length every layout gives the same.
      key_length: a Python integer, where the last keys of the sequence are padding: how many are not. Unlike
        key_value_seq_lengths it is static: no kernel is given a length.
      implementation: as in `flash_attention`, but for "cudnn". return_residual: also return lse.

    Returns:
      out, or (out, lse), for this device's queries, as `flash_attention` over the whole sequence has them.
      Gradients flow as there, in reverse mode once.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention`; the message names the argument.

    A device needs memory for its share of all arrays, for two more shares of keys and values, and in the backward
    pass for two of dk and dv in float32, and in 16 bits one of keys, besides the parts it adds up: as much for any D.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    try:
        devices = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(f"axis_name must be an axis of the jax.shard_map around the call, got {axis_name!r}") from None
    check_flag("return_residual", return_residual)
    ids = {"query_segment_ids": query_segment_ids, "key_value_segment_ids": key_value_segment_ids}
    call = check_call(query, key, value, scale=scale, is_causal=is_causal, **ids)
    problem = call.problem
    if problem.is_symbolic:
        raise NotImplementedError("ring_attention serves no symbolic shapes")
    if devices * max(problem.T, problem.S) > MAX_LENGTH:
        raise ValueError(
            f"query and key must have at most 2**30 - 1 positions on all devices together, got {devices} times "
            f"{problem.T} and {problem.S}"
        )
    if is_causal and problem.T != problem.S:
        raise ValueError(
            f"with is_causal a device must have as many keys as queries, got {problem.S} and {problem.T}; "
            "ring_attention_on_mesh pads what is missing"
        )
    for name, size in (("query", problem.T), ("key", problem.S)):
        if layout == "zigzag" and size % 2 and (is_causal or key_length is not None):
            raise ValueError(f"{name} must have an even length on each device for layout zigzag, got {size}")
    if key_length is not None and not (type(key_length) is int and 0 < key_length <= devices * problem.S):
        raise ValueError(f"key_length must be an integer from 1 to {devices * problem.S}, got {key_length!r}")
    lengths = (
        check_lengths("query_seq_lengths", query_seq_lengths, problem.B, devices * problem.T),
        check_lengths("key_value_seq_lengths", key_value_seq_lengths, problem.B, devices * problem.S),
    )
    # Chosen for a call that has lengths if this one has.
    call = dataclasses.replace(call, query_lengths=lengths[0], key_lengths=lengths[1])
    chosen = choose(implementation, call)
    kernels = kernels_by_platform("reference") if chosen is naive_attention else chosen
    problem = dataclasses.replace(problem, is_packed=False)  # most pieces have other documents' keys
    ring = DeviceRing(kernels, problem, axis_name, devices, layout, key_length)
    ids = call.extras
    shard, own = (call.key, call.value, ids.key_segment_ids), (*lengths, ids.query_segment_ids)
    _, *arrays = vary_alike((lax.axis_index(axis_name), call.query, *shard, own))
    out, lse = _differentiable(ring)(*arrays)
    lse = jnp.swapaxes(lse, 1, 2)
    if query.ndim == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def ring_attention_on_mesh(
    query, key, value, *, mesh, axis_name, scale=None, is_causal=False, layout="zigzag", query_seq_lengths=None,
    key_value_seq_lengths=None, query_segment_ids=None, key_value_segment_ids=None, implementation=None,
    return_residual=False
):  # fmt: skip
    """`flash_attention` of whole arrays, spread over an axis of a mesh: any lengths, in their usual order.

    query, key, value: (B, T, N, H) and (B, S, K, H), or without B; best if they are split over the axis already.
    mesh: a `jax.sharding.Mesh`; axis_name: one of its axes. The other arguments are those of `ring_attention`, with
    segment ids of the whole sequence.
    Returns out, or (out, lse), with the sequence split over the axis; where queries are padded, as XLA chooses, and
    whole on explicit axes.

    Positions go from their usual order into the layout, and results back, by one exchange each of what they weigh. A
    model that keeps all its arrays in the layout saves that, see `positions`.
    """
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if axis_name not in mesh.shape:
        raise ValueError(f"axis_name must be an axis of the mesh, {', '.join(mesh.shape)}, got {axis_name!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    check_flag("return_residual", return_residual)
    given = query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids
    masks = dict(zip(MASKS, given, strict=True))
    call = check_call(query, key, value, scale=scale, is_causal=is_causal, **masks)
    layout = layout if is_causal else "contiguous"
    arguments = axis_name, call.problem.scale, is_causal, layout, implementation
    out, lse = _on_mesh(mesh, arguments, *call.arrays[:5], call.extras)
    if query.ndim == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(mesh, arguments, query, key, value, query_lengths, key_lengths, extras):
    names = "axis_name", "scale", "is_causal", "layout", "implementation"
    axis_name, _, is_causal, layout, _ = arguments
    devices = mesh.shape[axis_name]
    T, S = query.shape[1], key.shape[1]
    multiple = {"contiguous": devices, "striped": devices**2, "zigzag": 2 * devices}[layout]
    up = lambda length: -(-length // multiple) * multiple
    padded_T = up(T)
    padded_S = padded_T if is_causal else up(S)
    # With a causal mask no real query sees a key behind the last query, so that keys may be cut off there, or padded.
    key_length = None if S == padded_S or (is_causal and S >= T) else S

    def shares(sequences, lengths):
        query, key, value, *ids = jax.tree.map(lambda array: to_layout(array, layout, axis_name), sequences)
        masks = dict(zip(MASKS, (*lengths, *ids), strict=True))
        options = dict(zip(names, arguments, strict=True)) | masks | {"key_length": key_length, "return_residual": True}
        out, lse = ring_attention(query, key, value, **options)
        return from_layout(out, layout, axis_name), from_layout(lse, layout, axis_name)

    split = P(None, axis_name)
    # On a mesh with explicit axes arrays must come split along these, and be whole to be cut unevenly.
    explicit = mesh.explicit_axes
    place = lambda array, spec: jax.sharding.reshard(array, NamedSharding(mesh, spec)) if explicit else array
    whole = lambda array: None if array is None else place(array, P())

    def fitted(array, length):
        """Cut or padded to a length, and split."""
        if array.shape[1] != length:
            array = _padded(whole(array)[:, :length], 1, 0, max(0, length - array.shape[1]))
        return place(array, split if axis_name in explicit else P())

    sequences = (query, padded_T), (key, padded_S), (value, padded_S)
    sequences += (extras.query_segment_ids, padded_T), (extras.key_segment_ids, padded_S)
    sequences = [None if array is None else fitted(array, length) for array, length in sequences]
    lengths = whole(query_lengths), whole(key_lengths)
    results = jax.shard_map(shares, mesh=mesh, in_specs=(split, P()), out_specs=split)(sequences, lengths)
    return results if padded_T == T else tuple(whole(array)[:, :T] for array in results)


def to_layout(array, layout, axis_name):
    """The share (B, share, ...) of a device in a layout, from its contiguous share; to be called in `jax.shard_map`.

    The share is a multiple of two for zigzag, and of the number of devices for striped.
    """
    devices, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if layout == "contiguous" or devices == 1:
        return array
    if layout == "striped":
        parts = array.reshape(array.shape[0], -1, devices, *array.shape[2:])
        return lax.all_to_all(parts, axis_name, 2, 1, tiled=True).reshape(array.shape)
    # Pieces 2 i and 2 i + 1 go where they belong; each device gets one even and one odd piece.
    halves = jnp.split(array, 2, axis=1)
    even, odd = (lax.ppermute(half, axis_name, _zigzag_routes(devices, parity)) for parity, half in enumerate(halves))
    swap = me % 2 == 1
    return jnp.concatenate([jnp.where(swap, odd, even), jnp.where(swap, even, odd)], axis=1)


def from_layout(array, layout, axis_name):
    """The contiguous share of a device from its share in a layout: the way back of `to_layout`."""
    devices, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if layout == "contiguous" or devices == 1:
        return array
    if layout == "striped":
        return lax.all_to_all(array[:, :, None], axis_name, 1, 2, tiled=True).reshape(array.shape)
    low, high = jnp.split(array, 2, axis=1)
    swap = me % 2 == 1
    pieces = jnp.where(swap, high, low), jnp.where(swap, low, high)
    back = [[(there, here) for here, there in _zigzag_routes(devices, parity)] for parity in (0, 1)]
    halves = [lax.ppermute(piece, axis_name, routes) for piece, routes in zip(pieces, back, strict=True)]
    return jnp.concatenate(halves, axis=1)


def _zigzag_routes(devices, parity):
    """(from, to) of the first or second half of every contiguous share."""
    home = lambda piece: piece if piece < devices else 2 * devices - 1 - piece
    return [(device, home(2 * device + parity)) for device in range(devices)]


@dataclass(frozen=True)
class DeviceRing:
    """The static part of a call: `kernels` for pieces, and the `problem` of one device's queries and keys."""

    kernels: KernelsOf
    problem: Problem
    axis_name: str
    devices: int
    layout: str
    key_length: int | None

    def shift(self, arrays):
        """What the device before sends, while this one sends its own to the next."""
        routes = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda array: lax.ppermute(array, self.axis_name, routes), arrays)

    def step(self, which, step, queries, shard, own):
        """One pass of this device's piece of a step, with results for all of its queries and of these keys.

        which: a pass of `registry.Kernels`. queries: query, and for "backward_of_part" out, lse, dout, dlse and low.
        shard: key, value and key_segment_ids that are here. own: lengths of queries and keys, and query_segment_ids.
        """
        query_lengths, key_lengths, query_ids = own
        T, S, is_causal = self.problem.T, self.problem.S, self.problem.band.right == 0
        pieces = plan(self.layout, self.devices, T, S, is_causal=is_causal, key_length=self.key_length)[step]
        me = lax.axis_index(self.axis_name)
        lengths = self._lengths_of(query_lengths, key_lengths, me, (me - step) % self.devices)
        kinds = list(dict.fromkeys(pieces))
        branches = [functools.partial(self._piece, which, piece) for piece in kinds]
        if len(kinds) == 1:
            return branches[0](queries, query_ids, *shard, *lengths)
        kind = jnp.asarray([kinds.index(piece) for piece in pieces])[me]
        return lax.switch(kind, branches, queries, query_ids, *shard, *lengths)

    def is_key(self, key_lengths):
        """Which of this device's own keys are no padding, (B or 1, S, 1, 1)."""
        at = positions(self.layout, self.devices, self.problem.S, lax.axis_index(self.axis_name), xp=jnp)
        end = self.devices * self.problem.S if self.key_length is None else self.key_length
        ends = jnp.array([end]) if key_lengths is None else jnp.minimum(key_lengths, end)
        return (at < ends[:, None])[:, :, None, None]

    def _lengths_of(self, query_lengths, key_lengths, me, other):
        """How many of the queries of me and of the keys of the other come before the lengths of the sequence."""

        def count(lengths, share, device):
            if lengths is None:
                return None
            own = positions(self.layout, self.devices, share, device, xp=jnp)
            return (own[None] < lengths[:, None]).sum(axis=1, dtype=jnp.int32)

        return count(query_lengths, self.problem.T, me), count(key_lengths, self.problem.S, other)

    def _piece(self, which, piece, queries, query_ids, key, value, key_ids, query_lengths, key_lengths):
        problem = self.problem
        first, keys, is_causal = piece or Piece(problem.T, 0, False)
        cut = lambda array: array[:, first:] if array.ndim == 4 else array[..., first:]
        (query, *residuals), query_ids = jax.tree.map(cut, (queries, query_ids))
        key, value, key_ids = jax.tree.map(lambda array: array[:, :keys], (key, value, key_ids))
        if piece is None:
            of_rows = jnp.swapaxes(query[..., 0], 1, 2).astype(jnp.float32)
            out = query.astype(jnp.float32) if which == "exact_forward_of_part" else query
            results = (query, key, value) if which == "backward_of_part" else (out, of_rows)
        else:
            if query_lengths is not None:
                query_lengths = jnp.maximum(query_lengths - first, 0)
            if key_lengths is not None:
                key_lengths = jnp.minimum(key_lengths, keys)
            part = dataclasses.replace(problem, T=problem.T - first, S=keys, band=Band.of(is_causal))
            call = part, query, key, value, query_lengths, key_lengths, None, Extras(None, None, query_ids, key_ids)
            results = self.kernels.run(which, *call, *residuals)
        after = lambda array: _padded(array, 1, 0, problem.S - keys)
        if which == "backward_of_part":
            dq, dk, dv = results
            return _padded(dq, 1, first, 0), after(dk), after(dv)
        out, lse = results
        return _padded(out, 1, first, 0), _padded(lse, 2, first, 0, -jnp.inf)


def _padded(array, axis, before, after, filler=0):
    if not before and not after:
        return array
    width = [(before, after) if i == axis else (0, 0) for i in range(array.ndim)]
    return jnp.pad(array, width, constant_values=filler)


def _merge(out, lse, out_of_part, lse_of_part):
    """out (B, T, N, H) and lse (B, N, T), float32, of two disjoint sets of keys together."""
    largest = jnp.maximum(lse, lse_of_part)
    largest = jnp.where(largest == -jnp.inf, 0, largest)  # a row may have seen no key yet
    own, other = jnp.exp(lse - largest), jnp.exp(lse_of_part - largest)
    # By their own sum, not by exp(lse) of a rounded lse: what shares lack of one comes back in dq, see `low_bits`.
    share = lambda weight: jnp.swapaxes(weight / jnp.maximum(own + other, 1), 1, 2)[..., None]
    out = share(own) * out.astype(jnp.float32) + share(other) * out_of_part.astype(jnp.float32)
    return out, largest + jnp.log(own + other)


def _around(ring, which, query, *key_side):
    """(out, lse) by the pass `which` of every part; out of several is float32."""
    *shard, own = key_side
    out = lse = None
    for step in range(ring.devices):
        coming = ring.shift(shard) if step + 1 < ring.devices else None
        part = ring.step(which, step, (query,), shard, own)
        out, lse = _merge(out, lse, *part) if step else part
        # Else the next shard but one could come before this one is done with, and
        # parts could wait to be merged together: memory would grow with the number of
        # devices.
        shard, out, lse = lax.optimization_barrier((coming, out, lse))
    return out, lse


def _differentiable(ring):
    """attend(query, key, value, key_ids, own) -> (out, lse), with a backward pass that goes round once more."""

    def forward(query, *key_side):
        out, lse = _around(ring, "forward_of_part", query, *key_side)
        return out.astype(query.dtype), lse

    def forward_with_residuals(query, *key_side):
        exact, lse = _around(ring, "exact_forward_of_part", query, *key_side)
        out, *low = [exact] if query.dtype.itemsize > 2 else rounded_with_low_bits(exact, query.dtype)
        return out, lse, *low

    def backward(arrays, residuals, gradients):
        out, lse, *low = residuals
        *arrays_of_call, key_ids, (*lengths, query_ids) = arrays
        call = Call(ring.problem, *arrays_of_call, *lengths, None, Extras(None, None, query_ids, key_ids))
        query, *gradients = call.of_seeing_rows(lse, call.query, *gradients)
        return _gradients(ring, query, *arrays[1:], out, lse, *gradients, *(low or [None]))

    words = 'ring_attention has a first derivative only; flash_attention with implementation="reference" has all'
    return differentiable(forward, backward, forward_with_residuals, words)


def _gradients(ring, query, key, value, key_ids, own, out, lse, dout, dlse, low):
    if low is not None:  # what all keys have in common goes, see `common_part`
        is_key = ring.is_key(own[1])
        key, lse, c = taken_off(ring.problem, query, key, lse, is_key, ring.axis_name)
    queries = query, out, lse, dout, dlse, low
    at_home = [key, value, key_ids]
    dq = jnp.zeros_like(query, jnp.float32)
    coming = ring.shift(at_home)
    travelling = None  # dk and dv of the shard that is here, summed over devices before
    for step in [*range(1, ring.devices), 0]:
        shard, dq = lax.optimization_barrier((coming if step else at_home, dq))
        if 0 < step < ring.devices - 1:
            coming = ring.shift(shard)
        dq_part, *part = ring.step("backward_of_part", step, queries, shard, own)
        dq += dq_part.astype(jnp.float32)
        part = [array.astype(jnp.float32) for array in part]
        if travelling is not None:
            part = [a + b for a, b in zip(travelling, part, strict=True)]
        travelling = ring.shift(part) if step else part
    if low is not None:
        dq = given_back(dq, dlse, c, ring.problem.scale)
    return tuple(array.astype(query.dtype) for array in (dq, *travelling))
