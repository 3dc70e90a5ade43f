"""Steps that can make a plain forward kernel faster on a GPU, one change each, as runnable kernels.

A `Rung` switches single ideas on and off, so that each can be timed by itself, as Triton compiles it. The kernel here
knows whole tiles, equal head counts and full or causal masks, and returns no lse: it is for measuring. What a lesson
should read is `portable.forward`.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from helpers.attention.online_softmax import LOG2_E
from helpers.attention.portable.tiles import Tiles, how_it_runs
from helpers.instruments.products import equations
from helpers.instruments.traffic import replay


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder.

    skip_tiles: leave out the tiles that a causal mask covers whole.
    narrow: hand 16-bit operands to the products, instead of float32 copies of them.
    base_2: exp2 with log2 e in the scale, instead of exp.
    one_instruction: exp2 as the GPU's own instruction, instead of the library's function round it.
    mask_edges_only: compare positions on the diagonal only, not in every tile.
    tiles: sizes, warps and stages; None for the fastest, see `FASTEST`.
    """

    name: str
    skip_tiles: bool = True
    narrow: bool = True
    base_2: bool = True
    one_instruction: bool = True
    mask_edges_only: bool = True
    tiles: Tiles | None = None


FIRST = Tiles(64, 64, 4, 1)
# Of those tried on an NVIDIA H200, by head_dim and whether the mask is causal.
FASTEST = {
    (64, False): Tiles(64, 128, 4, 2),
    (64, True): Tiles(64, 64, 4, 3),
    (128, False): Tiles(128, 64, 4, 2),
    (128, True): Tiles(64, 64, 4, 3),
}
RUNGS = (
    Rung("float32 operands", False, False, False, False, False, FIRST),
    Rung("16-bit operands", False, True, False, False, False, FIRST),
    Rung("hidden tiles skipped", True, True, False, False, False, FIRST),
    Rung("exponent in base 2", True, True, True, False, False, FIRST),
    Rung("one instruction for it", True, True, True, True, False, FIRST),
    Rung("masks on the diagonal only", True, True, True, True, True, FIRST),
    Rung("two tiles in flight", True, True, True, True, True, Tiles(64, 64, 4, 2)),
    Rung("fastest tiles", True, True, True, True, True, None),
)


def kernel(q_ref, k_ref, v_ref, out_ref, *, rung, scale, is_causal, tiles, interpret):
    block_q, block_k = tiles.block_q, tiles.block_k
    q_start = pl.program_id(0) * block_q
    rows = q_start + jnp.arange(block_q)
    widen = (lambda x: x) if rung.narrow else (lambda x: x.astype(jnp.float32))
    exp = jnp.exp2 if rung.base_2 else jnp.exp
    if rung.one_instruction:
        exp = functools.partial(exp2, interpret=interpret)
    unit = scale * (LOG2_E if rung.base_2 else 1)  # to base e or 2
    dot = functools.partial(lax.dot, preferred_element_type=jnp.float32)
    q = widen(q_ref[...])

    def one_key_tile(j, state, masked):
        m, l, acc = state
        tile = pl.ds(j * block_k, block_k)
        k, v = widen(k_ref[tile, :]), widen(v_ref[tile, :])
        s = unit * dot(q, k.T)
        if masked:
            cols = j * block_k + jnp.arange(block_k)
            s = jnp.where(rows[:, None] >= cols[None, :], s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1))
        alpha, p = exp(m - m_new), exp(s - m_new[:, None])
        acc = alpha[:, None] * acc + dot(p.astype(v.dtype), v)
        return m_new, alpha * l + p.sum(axis=1), acc

    m, l = jnp.full(block_q, -jnp.inf), jnp.zeros(block_q)
    state = m, l, jnp.zeros(q_ref.shape, jnp.float32)
    stop = k_ref.shape[0] // block_k
    if is_causal and rung.skip_tiles:
        stop = (q_start + block_q + block_k - 1) // block_k
    full = 0 if is_causal else stop
    if is_causal and rung.mask_edges_only:
        full = q_start // block_k
    unmasked = functools.partial(one_key_tile, masked=False)
    state = lax.fori_loop(0, full, unmasked, state)
    if is_causal:
        masked = functools.partial(one_key_tile, masked=True)
        state = lax.fori_loop(full, stop, masked, state)
    _, l, acc = state
    out_ref[...] = (acc / l[:, None]).astype(out_ref.dtype)


def exp2(x, interpret):
    """2**x of a float32 array, on a GPU by its instruction for that, `ex2.approx.ftz`.

    It has a relative error of 2**-22 and gives 0 where the result is below 2**-126. jnp.exp2 would add
    three instructions to each, to be exact there too, and a weight that small adds nothing to a row.
    """
    if interpret:
        return jnp.exp2(x)
    from jax.experimental.pallas import triton as plt  # JAX will lose it

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (result,) = plt.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )
    return result


def attention(query, key, value, *, rung, is_causal, interpret=False):
    """out (B, T, N, H) of a rung. T and S must be whole tiles, H a power of two: 64 or 128 for the fastest tiles."""
    B, T, N, H = query.shape
    tiles = rung.tiles or FASTEST[H, is_causal]
    if T % tiles.block_q or key.shape[1] % tiles.block_k:
        raise ValueError(f"T and S must be multiples of the tiles {tiles.block_q} and {tiles.block_k}")
    q_spec = pl.BlockSpec((None, tiles.block_q, None, H), lambda i, n, b: (b, i, n, 0))
    kv_spec = pl.BlockSpec((None, key.shape[1], None, H), lambda i, n, b: (b, 0, n, 0))
    return pl.pallas_call(
        functools.partial(
            kernel, rung=rung, scale=1 / math.sqrt(H), is_causal=is_causal, tiles=tiles, interpret=interpret
        ),
        grid=(T // tiles.block_q, N, B),
        in_specs=[q_spec, kv_spec, kv_spec],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        name="ladder",
        **how_it_runs(interpret, tiles.num_warps, tiles.num_stages),
    )(query, key, value)


def place_of(forward, T=256, H=64):
    """(rung, FLOPs, bytes): the highest rung whose ideas a forward kernel has, and what it multiplies and moves.

    forward(query, key, value, is_causal) gets arrays (1, T, 1, H) in bfloat16. FLOPs and bytes are counted by a
    `replay` without a mask; bytes are all that programs read and write. What only a GPU's code shows is not seen, so
    that no rung above "exponent in base 2" is found.
    """
    arrays = (np.ones((1, T, 1, H), jnp.bfloat16),) * 3
    run = lambda is_causal: lambda *arrays: forward(*arrays, is_causal)
    full, causal = (replay(run(is_causal), *arrays)[0] for is_causal in (False, True))
    moved, moved_causal = (sum(call.bytes_moved for call in calls) for calls in (full, causal))
    outside = equations(jax.make_jaxpr(run(False))(*arrays).jaxpr)
    inside = [each for call in outside if "grid_mapping" in call.params for each in equations(call.params["jaxpr"])]
    operands = [v.aval.dtype for each in inside if each.primitive.name == "dot_general" for v in each.invars]
    has = (
        all(dtype.itemsize == 2 for dtype in operands),
        moved_causal < moved,
        not any(each.primitive.name == "exp" for each in inside),
    )
    return RUNGS[(*has, False).index(False)], sum(call.flops for call in full), moved
