"""The whole forward kernels by mma and by wgmma, exercises 10.6 and 10.7: run under the race detector, and lowered."""

import contextlib
import functools
import math
from collections import defaultdict
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers.attention import online_softmax
from helpers.attention.hopper import ladder, warpgroup
from helpers.attention.mosaic import warp
from helpers.attention.reference import oracle
from helpers.exercises import whole
from helpers.exercises.again import OF_A_STATE, OF_HEADS, OF_ROWS
from helpers.exercises.exercise import Case, Exercise
from helpers.exercises.running import name_of
from helpers.instruments.races import DETECTING, patient_for, races

AS_ASKED = "without a race, and lowered"
AMPERE, HOPPER = ("Ampere", (8, 0)), ("Hopper", (9, 0))
PATIENCE_S = 8  # for a warpgroup at a barrier
LARGEST_TILE = 128
MARK = 1e4  # in keys from LARGEST_TILE or T on, and below zero in queries, where it meets zeros and changes no logit


def mma_forward(q, k, v, is_causal=False, interpret=False):
    """out (B, T, N, H), lse (B, N, T) of q (B, T, N, H), k, v (B, S, K, H), by mma."""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    group, head_padded = N // K, pl.cdiv(H, 64) * 64
    scale = 1 / (math.sqrt(H) * math.log(2))  # exp(s / sqrt(H)) = exp2(scale * s)
    block_q, block_k = 64, 64 if H <= 128 else 32
    load = functools.partial(warp.load, interpret=interpret)
    product = functools.partial(warp.product, interpret=interpret)

    def kernel(q_ref, k_ref, v_ref, out_ref, lse_ref, q_smem, *loaded):
        n, i, b = (lax.axis_index(name) for name in "nib")
        q_start = q_ref.shape[1] - (i + 1) * block_q  # the longest tiles first
        stop = jnp.minimum(q_start + block_q, min(T, S)) if is_causal else S
        mine, head = pl.ds(q_start, block_q), pl.ds(n * head_padded, head_padded)
        warp.copy(q_ref.at[b, mine, head], q_smem, *(loaded or [None]))
        plgpu.barrier_wait(*loaded) if loaded else plgpu.wait_gmem_to_smem(0)

        def one_key_tile(indices, k_smem, v_smem, state):
            m, l, acc = state
            s = product(load([q_smem], warp.LHS), load([k_smem.T], warp.RHS))
            if is_causal or S % block_k:
                iota = functools.partial(plgpu.broadcasted_iota, jnp.int32)
                rows = q_start + iota((block_q,), 0, layout=warp.ROWS)
                seen = jnp.minimum(rows + (1 if is_causal else S), S)
                stops = seen - indices[0] * block_k
                cols = iota(s.shape, 1, layout=warp.ACC)
                s = jnp.where(cols < warp.along(stops, s.shape, 0), s, -jnp.inf)
            m, l, alpha, p = online_softmax.step_of_scores(m, l, s, scale)
            acc = warp.along(alpha, acc.shape, 0) * acc
            p = warp.as_operand(p, 1, q_ref.dtype, interpret=interpret)
            return m, l, product(p, load([v_smem], warp.RHS), acc)

        place = lambda j: (b, j, n // group)
        options = dict(transforms=warp.SWIZZLED, oob_fill_mode=warp.IN_BOUNDS)
        tile = plgpu.BlockSpec((None, block_k, head_padded), place, **options)
        m, l = (warp.full((block_q,), start, warp.ROWS) for start in (-jnp.inf, 0))
        m, l, acc = plgpu.emit_pipeline(
            one_key_tile,
            grid=(pl.cdiv(stop, block_k),),
            in_specs=[tile, tile],
            max_concurrent_steps=2,
            init_carry=(m, l, warp.full((block_q, head_padded), 0)),
        )(k_ref, v_ref)
        out = (acc / warp.along(l, acc.shape, 0)).astype(out_ref.dtype)
        warp.store(out_ref.at[b, mine, head], out, interpret=interpret)
        lse = (m + jnp.log2(l)) * math.log(2)
        warp.store(lse_ref.at[b, n, mine], lse, interpret=interpret)

    q, k, v = (warp.laid_out(array, block_q)[0] for array in (q, k, v))
    tile_of_q = plgpu.SMEM((block_q, head_padded), q.dtype, transforms=warp.SWIZZLED)
    out, lse = plgpu.kernel(
        kernel,
        out_type=[jax.typeof(q), jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32)],
        grid=(N, q.shape[1] // block_q, B),  # tiles of B heads run side by side
        grid_names=("n", "i", "b"),
        scratch_types=[tile_of_q, *([plgpu.Barrier()] if warp.by_tma() else [])],
        compiler_params=warp.COMPILER_PARAMS,
        interpret=interpret,
    )(q, k, v)
    return warp.taken_up(out, T, N, H), lse[..., :T]


def _cases(seed, *rows):
    """Arguments (q, k, v, is_causal, whether it is lowered too), the case by hand first."""
    column = lambda *numbers: np.array(numbers, jnp.bfloat16).reshape(1, -1, 1, 1)
    yield Case("the case worked by hand", (column(1, 1), column(0, 0), column(1, 3), True, True))
    random = np.random.default_rng(seed)
    for (B, T, S, N, K, H), is_causal, dtype, push, label in rows:
        q, k, v = (random.standard_normal((B, length, heads, H)) for length, heads in ((T, N), (S, K), (S, K)))
        q[..., 0] = math.sqrt(H)  # so that the first component of k moves the logits
        k[..., 0] += np.repeat(push, -(-S // len(push)))[None, :S, None]
        q[..., -2:], k[..., -2:] = 0, 0
        q[:, LARGEST_TILE:, :, -1], k[:, min(T, LARGEST_TILE) :, :, -2] = -MARK, MARK
        said = [f"{name}={value}" for name, value in dict(T=T, S=S, N=N, K=K, H=H, B=B).items()]
        said += ["causal" if is_causal else "no mask", jnp.dtype(dtype).name, *filter(None, [label])]
        is_lowered = H >= 128 or dtype == jnp.float16
        yield Case(", ".join(said), (*(array.astype(dtype) for array in (q, k, v)), is_causal, is_lowered))


def _run(gpus, product, warpgroups, answer, q, k, v, is_causal, is_lowered):
    """(how it runs, out, lse) of a forward kernel.

    gpus: (name, capability) of those that it is lowered for, where that is asked. product: the instruction that
    multiplies there. warpgroups: how many of a program at least work where there are queries for all.
    """
    found, raised, read = [], [], defaultdict(set)

    def run():
        try:
            found.append(jax.block_until_ready(answer(*map(jnp.asarray, (q, k, v)), is_causal, interpret=DETECTING)))
        except jax.errors.JaxRuntimeError:  # of the interpreter
            raise
        except Exception as error:
            raised.append(error)
            raise RuntimeError("for the learner, below") from None

    fill = math.nan if AMPERE in gpus else 0  # past the end of arrays: TMA writes zeros, cp.async what lies there
    past_the_end = mock.patch.object(gpu_callbacks.AsyncCopyGmemToSmemTask, "out_of_bounds_source_fill", fill)
    with patient_for(PATIENCE_S), _marks_noted(read), past_the_end:
        said = races(run)
    if raised:
        raise raised[0]
    way, *right = _expected(q, k, v, is_causal)
    if said:
        return "with a race: " + ", ".join(said), *(np.full(array.shape, np.nan) for array in right)
    dtypes = {"out": q.dtype, "lse": jnp.float32}
    whole.check_results(found[0], dtypes, right)
    way = _lowered(answer, gpus, q, k, v, is_causal, product=product) if is_lowered else way
    if is_causal and any("k" in noted and "q" not in noted for noted in read.values()):
        way = "with tiles fetched that no query of their program sees"
    if q.shape[1] > LARGEST_TILE and max((len(noted - {"k", "q"}) for noted in read.values()), default=0) < warpgroups:
        way = f"with fewer than {warpgroups} warpgroups of a program at work"
    return way, *whole.as_float64(found[0], right, dtypes)


@contextlib.contextmanager
def _marks_noted(read):
    """A context in which interpreted programs note in read, {program: set}, marks of q and tiles that begin with k's.

    And which of their warpgroups read, by number.
    """
    content = shared_memory.GPUSharedMemory.get_buffer_content

    def noted(memory, *args, logging_info=None, **options):
        values, *rest = content(memory, *args, logging_info=logging_info, **options)
        program = logging_info and logging_info.mesh_location  # None where outputs are taken from it
        if program and values is not None and values.dtype.itemsize == 2:
            marks = read[program.cluster_coords]
            marks.add(program.thread_id)
            first_row = values[(0,) * (values.ndim - 1)]
            marks.update({"k"} if (first_row > MARK / 2).any() else (), {"q"} if (values < -MARK / 2).any() else ())
        return values, *rest

    with mock.patch.object(shared_memory.GPUSharedMemory, "get_buffer_content", noted):
        yield


def _lowered(answer, gpus, *arguments, product=""):
    """`AS_ASKED`, or a GPU for which a kernel cannot be lowered, and what is raised, or without which product."""
    *arrays, is_causal = arguments
    for name, capability in gpus:
        with mock.patch.object(utils, "_infer_arch", return_value=capability):
            try:
                traced = jax.jit(lambda *arrays: answer(*arrays, is_causal)).trace(*arrays)
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
            except Exception as error:
                return f"not for {name}: {name_of(error)}"
        if product not in text:
            return f"without {product} on {name}"
    return AS_ASKED


def _expected(q, k, v, is_causal, *_):
    out, lse = oracle(q, k, v, is_causal=is_causal)
    return AS_ASKED, out, lse.swapaxes(1, 2)


IN_BOTH = (
    *OF_HEADS,
    ("the zeros behind the last key count as keys", "jnp.minimum(rows + (1 if is_causal else S), S)",
     "rows + (1 if is_causal else S)",
     "Padding is 0, and exp(0 - m) is a weight: mask what lies at S or behind."),
    ("the causal mask is missing", "(1 if is_causal else S)", "S",
     "A key after the query gets -inf: compare positions, as `mma_kernel` does."),
    ("no tile is skipped", "min(T, S)) if is_causal else S", "min(T, S)) if False else S",
     "With a causal mask the tiles end with the one that the last query of the program sees."),
    (OF_A_STATE[3][0], "math.sqrt(H) * math.log(2)", "math.sqrt(H)", OF_A_STATE[3][-1]),
    ("logits are scaled by the padded head dim", "math.sqrt(H)", "math.sqrt(head_padded)",
     "The scale belongs to the H that came in: zeros behind it change no product."),
)  # fmt: skip

MMA = Exercise(
    mma_forward, "The forward kernel by mma, whole", outputs=("how it runs", "out", "lse"),
    cases=functools.partial(
        _cases, 106,
        ((1, 70, 150, 4, 2, 40), False, jnp.float16, (0, 0, 9), "the largest logits last"),
        ((2, 200, 150, 3, 1, 64), True, jnp.bfloat16, (0,), ""),
        ((1, 126, 230, 2, 2, 80), True, jnp.bfloat16, (30, 0, 0), "the largest logits first"),
        ((1, 65, 70, 2, 1, 200), False, jnp.bfloat16, (-400, -350), "logits far below 0"),
        ((1, 30, 70, 1, 1, 200), True, jnp.bfloat16, (0,), ""),
    ),
    run=functools.partial(_run, (AMPERE, HOPPER), "mma.sync", 1), expected=_expected, tolerance=1e-4,
    building_block="forward on a GPU", in_place=("on_gpu", "forward"), slow=True,
).with_mistakes(
    *IN_BOTH, *OF_ROWS[4:], OF_A_STATE[7],
    ("acc is not rescaled by alpha", "warp.along(alpha, acc.shape, 0) * acc", "acc", OF_A_STATE[0][-1]),
    ("positions of keys are counted within the tile", "seen - indices[0] * block_k", "seen",
     "Step j of the pipeline begins with key j * block_k: `indices` has the step."),
    ("q is read before its copy has arrived",
     "        plgpu.barrier_wait(*loaded) if loaded else plgpu.wait_gmem_to_smem(0)\n", "",
     "A copy has only been asked for when `copy` returns: wait as `mma_kernel` does."),
    ("the barrier of q is there on every GPU", "*([plgpu.Barrier()] if warp.by_tma() else [])", "plgpu.Barrier()",
     "Before Hopper there is no TMA that would arrive at it: give one only where `warp.by_tma()` says so."),
    ("a tile of keys goes past the end of its array", "64, 64 if H <= 128 else 32", "64, 128",
     "Copies before Hopper bring whatever lies there: give laid_out the keys of a tile for k and v."),
)  # fmt: skip


def hopper_forward(q, k, v, is_causal=False, interpret=False):
    """out (B, T, N, H), lse (B, N, T) of q (B, T, N, H), k, v (B, S, K, H): wgmma."""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    group, head_padded = N // K, 64 if H <= 64 else 128
    scale = 1 / (math.sqrt(H) * math.log(2))  # exp(s / sqrt(H)) = exp2(scale * s)
    block_q, block_k, stages, computing = 64, 128, 2, 2  # computing * block_q = block_k

    def kernel(q_ref, k_ref, v_ref, out_ref, lse_ref, *scratch):
        q_smem, k_smem, v_smem, ready, loaded, free = scratch
        n, i, b, me = (lax.axis_index(name) for name in (*"nib", "warpgroup"))
        last = q_ref.shape[1] - i * computing * block_q  # the longest tiles first
        stop = pl.cdiv(jnp.minimum(last, min(T, S)) if is_causal else S, block_k)

        @pl.when(me < computing)
        def compute():
            plgpu.set_max_registers(240, action="increase")
            q_start = last - (computing - me) * block_q
            mine, q_mine = pl.ds(q_start, block_q), q_smem.at[me]
            plgpu.copy_gmem_to_smem(q_ref.at[b, mine, n], q_mine, ready.at[me])
            plgpu.barrier_wait(ready.at[me])

            def one_key_tile(j, state):
                m, l, acc = state
                slot = lax.rem(j, stages)
                plgpu.barrier_wait(loaded.at[slot])
                s = warpgroup.product(q_mine, k_smem.at[slot].T, interpret=interpret)
                if is_causal or S % block_k:
                    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32)
                    rows = q_start + iota((block_q,), 0, layout=warpgroup.ROWS)
                    stops = jnp.minimum(rows + (1 if is_causal else S), S) - j * block_k
                    cols = iota(s.shape, 1, layout=warpgroup.MATRIX)
                    s = jnp.where(cols < warp.along(stops, s.shape, 0), s, -jnp.inf)
                m, l, alpha, p = online_softmax.step_of_scores(m, l, s, scale)
                acc = ladder.add(acc, alpha, p, v_smem.at[slot], interpret=interpret)
                plgpu.barrier_arrive(free.at[slot])
                return m, l, acc

            state = lax.fori_loop(0, stop, one_key_tile, ladder.start(head_padded))
            ladder.finish(state, out_ref.at[b, mine, n], lse_ref.at[b, n, mine], q_mine)

        @pl.when(me == computing)
        def load():
            plgpu.set_max_registers(24, action="decrease")
            wait = lambda slot: plgpu.barrier_wait(free.at[slot])

            @pl.loop(0, stop)
            def fetch(j):
                slot = lax.rem(j, stages)
                pl.when(j >= stages)(lambda: wait(slot))
                tile = b, pl.ds(j * block_k, block_k), n // group
                for ref, smem in ((k_ref, k_smem), (v_ref, v_smem)):
                    plgpu.copy_gmem_to_smem(ref.at[tile], smem.at[slot], loaded.at[slot])

            pl.loop(0, jnp.minimum(stages, stop))(wait)

    tails = lambda x: ((0, 0), (0, -x.shape[1] % block_k), (0, 0), (0, head_padded - H))
    q, k, v = (jnp.pad(array, tails(array)) for array in (q, k, v))
    smem = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=warp.SWIZZLED)
    out, lse = plgpu.kernel(
        kernel,
        out_type=[jax.typeof(q), jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32)],
        grid=(N, q.shape[1] // block_k, B),  # tiles of B heads run side by side
        grid_names=("n", "i", "b"),
        num_threads=computing + 1,
        thread_name="warpgroup",
        scratch_types=[
            smem((computing, block_q, head_padded)),
            *2 * [smem((stages, block_k, head_padded))],
            plgpu.Barrier(num_barriers=computing),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=computing, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )(q, k, v)
    return out[:, :T, :, :H], lse[..., :T]


WGMMA = Exercise(
    hopper_forward, "A Hopper kernel of your own", outputs=("how it runs", "out", "lse"),
    cases=functools.partial(
        _cases, 107,
        ((1, 70, 500, 4, 2, 40), False, jnp.float16, (0, 0, 9), "the largest logits last"),
        ((1, 200, 150, 3, 1, 64), True, jnp.bfloat16, (0,), ""),
        ((1, 126, 400, 2, 2, 80), True, jnp.bfloat16, (30, 0, 0), "the largest logits first"),
        ((2, 65, 140, 1, 1, 128), False, jnp.bfloat16, (-400, -350), "logits far below 0"),
    ),
    run=functools.partial(_run, (HOPPER,), "wgmma", 3), expected=_expected, tolerance=1e-4,
    building_block="forward on a Hopper GPU", in_place=("on_hopper", "forward"), slow=True,
).with_mistakes(
    *IN_BOTH,
    ("acc is not rescaled by alpha", "add(acc, alpha", "add(acc, 0 * alpha + 1", OF_A_STATE[0][-1]),
    ("positions of keys are counted within the tile", "S) - j * block_k", "S)", "Tile j begins with key j * block_k."),
    ("a tile is read before its copy has arrived", "                plgpu.barrier_wait(loaded.at[slot])\n", "",
     "A copy has only been ordered when `copy_gmem_to_smem` returns: see section 4."),
    ("a slot is filled again while somebody reads it",
     "pl.when(j >= stages)(lambda: wait(slot))", "None",
     "Whoever fills a slot a second time waits until its readers have said that it is free: see section 5."),
    ("nobody says that a slot is free", "                plgpu.barrier_arrive(free.at[slot])\n", "",
     "The memory warpgroup waits for ever: every wait needs an arrival, see section 5."),
)  # fmt: skip
