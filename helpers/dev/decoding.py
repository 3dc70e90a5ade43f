"""What the benchmark measures of decoding: one query a sequence against many keys, in one piece and in pages.

Such a call is bound by bytes: keys and values have to be read once. So its figure is GB/s of keys and values,
and its yardstick is a copy on the same GPU.
"""

import functools
import importlib
import itertools
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

from helpers import flash_attention, paged_attention
from helpers.attention.reference import oracle
from helpers.dev.measuring import clocks, milliseconds, one_stage, random_arrays, right_ones
from helpers.instruments.implementations import operators_of_flash_attention_3
from helpers.instruments.timing import Timed, rotation, time_together

WIDEST_ERROR = 1.0  # of a 16-bit result, in units of eps of its dtype; naive 16-bit attention has about a third


@dataclass(frozen=True)
class Decode:
    """One call: B, T, S, N, K, H and dtype as in `problem.Problem`; page: keys of a page, 0 for none."""

    B: int
    S: int
    page: int = 0
    T: int = 1
    N: int = 32
    K: int = 8
    H: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self):
        return f"decode {self.dtype} B{self.B} T{self.T} S{self.S} N{self.N} K{self.K} H{self.H} page {self.page}"

    @property
    def bytes(self):
        """Of keys and values, each read once."""
        return 2 * self.B * self.S * self.K * self.H * jnp.dtype(self.dtype).itemsize


SIZES = (1, 8192), (8, 8192), (32, 8192), (1, 131072), (8, 32768)
GRID = [Decode(B, S, page) for page, (B, S) in itertools.product((0, 16, 64), SIZES)]


def ours(case):
    return paged_attention if case.page else flash_attention


def jax_nn(implementation, case):
    return functools.partial(jax.nn.dot_product_attention, implementation=implementation)


def jax_gqa_16(case):
    """The decode kernel that JAX carries, for Triton, with 16 parts of the keys."""
    gqa = importlib.import_module("jax.experimental.pallas.ops.gpu.decode_attention").gqa
    return lambda query, key, value: gqa(query[:, 0], key, value, k_splits=16, block_k=128)[:, None]


def jax_paged(case):
    """The paged kernel that JAX carries, for Triton; it wants heads before pages."""
    paged = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention

    def attention(query, key_pages, value_pages, table, lengths):
        return paged(query[:, 0] * case.H**-0.5, key_pages, value_pages, table, lengths)[:, None]

    return attention


def flash_attention_3(case, sets):
    """FlashAttention-3's own kernel, in one piece or in pages, as a `Timed` of sets of JAX's inputs."""
    operators = operators_of_flash_attention_3()
    torch = importlib.import_module("torch")
    options = {"softmax_scale": case.H**-0.5, "is_causal": True, "num_splits": 0}  # it chooses how many
    lengths = torch.full((case.B,), case.S, dtype=torch.int32, device="cuda")

    def attention(query, key, value, table=None, _=None):
        return operators.fwd(query, key, value, seqused_k=lengths, page_table=table, **options)[0]

    inputs = [tuple(map(torch.from_dlpack, arrays)) for arrays in sets]
    return Timed(attention, inputs, lambda _: torch.cuda.synchronize())


CONTIGUOUS = {
    "flash_attention": ours,
    "cudnn": functools.partial(jax_nn, "cudnn"),
    "xla": functools.partial(jax_nn, "xla"),
    "jax_gqa_16": jax_gqa_16,
}
PAGED = {"paged_attention": ours, "jax_paged": jax_paged}


def inputs_of(case, seed):
    """(query, key, value), or (query, key_pages, value_pages, table, lengths) with all pages in any order."""
    pages = case.B * case.S // case.page if case.page else 0
    shape = (pages, case.page, case.K, case.H) if case.page else (case.B, case.S, case.K, case.H)
    query, key, value = random_arrays([(case.B, case.T, case.N, case.H), shape, shape], case.dtype, seed)
    if not case.page:
        return query, key, value
    table = np.random.default_rng(seed).permutation(pages).reshape(case.B, -1).astype(np.int32)
    return query, key, value, jnp.asarray(table), jnp.full(case.B, case.S, jnp.int32)


def heads_first(arrays):
    """Inputs as `jax_paged` wants them."""
    query, *pages, table, lengths = arrays
    return query, *(jnp.asarray(array.transpose(2, 0, 1, 3)) for array in pages), table, lengths


def complaint(case, out, arrays):
    """What is wrong with a result, by its last batch entry and first key head, or None."""
    query, key, value, *rest = arrays
    if case.page:
        key, value = (pages[rest[0][-1]].reshape(1, case.S, case.K, case.H) for pages in (key, value))
    group = case.N // case.K
    right, _ = oracle(query[-1:, :, :group], key[-1:, :, :1], value[-1:, :, :1])
    error = np.linalg.norm(np.asarray(out[-1:, :, :group], np.float64) - right) / np.linalg.norm(right)
    return None if error <= WIDEST_ERROR * float(jnp.finfo(case.dtype).eps) else f"wrong by {error:.1e}"


def lower(make, case, name):
    """An implementation, lowered for `compile_together` of `measuring`."""
    shapes = jax.eval_shape(lambda: inputs_of(case, 0))
    return one_stage(make(case), jax.eval_shape(heads_first, shapes) if name == "jax_paged" else shapes)


def parts(cases):
    """What `compile_together` takes: {(case, name): function}."""
    return {
        (case, name): functools.partial(lower, make, case, name)
        for case in cases
        for name, make in (PAGED if case.page else CONTIGUOUS).items()
    }


def measure(case, note, compiled):
    """Records of one case, without their fractions of a copy's speed. compiled: {(case, name): [program]}, of JAX."""
    sets = [inputs_of(case, seed) for seed in range(rotation(case.bytes))]
    makers = {}
    for (one, name), stages in compiled.items():
        if one == case:
            inputs = [heads_first(arrays) for arrays in sets] if name == "jax_paged" else sets
            makers[name] = functools.partial(Timed, *stages, inputs)
    makers["flash_attention_3"] = functools.partial(flash_attention_3, case, sets)
    wrong = lambda _, out: complaint(case, jnp.from_dlpack(out), sets[0])  # PyTorch's as well as JAX's
    records = []
    for name, timing in time_together(right_ones(makers, wrong, note, case)).items():
        ms = milliseconds(timing)
        times = clocks(timing) | {"device_ms": ms, "gbps": case.bytes / ms / 1e6}
        records.append({"implementation": name, **asdict(case), **times})
    return records


def line(case, records):
    return f"{case.name:55} " + ", ".join(f"{r['implementation']} {r['gbps']:.0f}" for r in records)
