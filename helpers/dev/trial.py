"""One random call of the fuzzer: what it asks for, and its inputs."""

import math
from dataclasses import dataclass, fields, replace

import jax.numpy as jnp
import numpy as np

from helpers.attention.extras import Extras
from helpers.attention.masking import Band
from helpers.attention.problem import Call, Problem
from helpers.attention.reference import what_counts
from helpers.dev import kinds


@dataclass(frozen=True)
class Trial:
    """One call: its shapes, dtype and arguments, how its inputs are drawn, and what is asked of the result.

    T, S, H, N, K, B, dtype, scale and is_causal as in `problem.Problem` and `flash_attention`.
    window: (left, right). query_lengths, key_lengths: tuples of B integers; what lies behind is `padding`.
    padding, unseen: "nan", "inf" or "-inf"; unseen is what dout and dlse hold in rows that see nothing, and None
      where those are numbers like others.
    kinds: of inputs, as in `kinds`; without any they are standard normal.
    lse_gradient: whether lse gets a gradient as well.
    way: "jit" (one program), "eager" (none around it) or "vmap" (over the batch).
    precision: of float32 products, as `jax.default_matmul_precision` takes it.
    page: positions of a page, in which the keys lie in any order; 0 if they do not.
    offset: causal_offset. documents: in each row, 0 where nobody counts them. soft_cap as logits_soft_cap.
    extras: some of `EXTRAS`, drawn from the seed.
    number: of the inputs, of which one compiled program gets several.
    """

    T: int
    S: int
    H: int = 64
    N: int = 1
    K: int = 1
    B: int = 1
    dtype: str = "bfloat16"
    is_causal: bool = False
    window: tuple | None = None
    query_lengths: tuple | None = None
    key_lengths: tuple | None = None
    scale: float | None = None
    padding: str = "nan"
    unseen: str | None = None
    kinds: tuple = ()
    lse_gradient: bool = False
    way: str = "jit"
    precision: str = "highest"
    page: int = 0
    implementation: str | None = None
    seed: int = 0
    offset: int = 0
    documents: int = 0
    soft_cap: float | None = None
    extras: tuple = ()
    number: int = 0

    def __str__(self):
        own = [f for f in fields(self) if f.default is not getattr(self, f.name) and f.default != getattr(self, f.name)]
        return "dict(" + ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in own) + ")"

    @property
    def call(self):
        """The `Call` without its arrays, by which an implementation says what it serves."""
        scale = 1 / math.sqrt(self.H) if self.scale is None else self.scale
        band, functions = Band.of(self.is_causal, self.window, self.offset), self._functions
        shape = self.B, self.T, self.S, self.N, self.K, self.H
        functions = functions.get("mask_mod"), functions.get("score_mod")
        problem = Problem(*shape, jnp.dtype(self.dtype), scale, band, self.soft_cap, *functions)
        names = "bias", "mask", "query_segment_ids", "key_value_segment_ids", "sinks"
        extras = Extras(*map(self.lengths.get, names))
        lengths = map(self.lengths.get, ("query_seq_lengths", "key_value_seq_lengths"))
        return Call(problem, None, None, None, *lengths, extras=extras)

    @property
    def arguments(self):
        """The keyword arguments of the call that are no arrays."""
        named = {"scale": self.scale, "is_causal": self.is_causal, "local_window_size": self.window}
        return named | {"causal_offset": self.offset, "logits_soft_cap": self.soft_cap} | self._functions

    @property
    def form(self):
        """The trial of number 0 without what only its arrays know: two of one form are one compiled program."""
        lengths = {name: getattr(self, name) and () for name in ("query_lengths", "key_lengths")}
        return replace(self, kinds=(), padding="nan", unseen=None, number=0, **lengths)

    @property
    def may_be_mapped(self):
        """Whether it is the same entry by entry of the batch."""
        return not (self.extras or self.documents)

    @property
    def _functions(self):
        alibi = {"score_arrays": ((np.float32(2.0 ** -np.arange(1, self.N + 1)), "n"),)}
        scores = {"score_mod": minus_distance, **alibi}, {"score_mod": steeper}, {"score_mod": later}
        drawn = {"mask_mod": {"mask_mod": (stripes, some_queries)[self.seed % 2]}, "score_mod": scores[self.seed % 3]}
        return {name: value for extra in self.extras for name, value in drawn.get(extra, {}).items()}

    @property
    def lengths(self):
        """Its keyword arguments that are arrays."""
        named = {"query_seq_lengths": self.query_lengths, "key_value_seq_lengths": self.key_lengths}
        named = {name: np.array(lengths, np.int32) for name, lengths in named.items() if lengths is not None}
        random = np.random.default_rng([self.seed, 2, self.number])
        if self.documents:
            ids = lambda length: np.sort(random.integers(0, self.documents, (self.B, length), np.int32), axis=1)
            named |= {"query_segment_ids": ids(self.T), "key_value_segment_ids": ids(self.S)}
        is_whole = np.random.default_rng([self.seed, 4]).random(4) < 0.5
        sizes = np.where(is_whole, (self.B, self.N, self.T, self.S), 1)
        tables = {
            "bias": lambda: random.standard_normal(sizes, np.float32),
            "mask": lambda: random.random(sizes) < 0.6,
            "sinks": lambda: 2 * random.standard_normal(self.N, np.float32),
        }
        return named | {name: table() for name, table in tables.items() if name in self.extras}

    def inputs(self):
        """(query, key, value) and (dout, dlse)."""
        random = np.random.default_rng([self.seed, self.T, self.S, self.H, self.number])
        query, dout = random.standard_normal((2, self.B, self.T, self.N, self.H))
        key, value = random.standard_normal((2, self.B, self.S, self.K, self.H))
        dlse = random.standard_normal((self.B, self.T, self.N)).astype(np.float32) * self.lse_gradient
        arrays = {"query": query, "key": key, "value": value, "dout": dout}
        arrays = kinds.apply(self.kinds, arrays, self.call.problem.scale, self.dtype, self.seed + self.number)
        query, key, value, dout = (arrays[name] for name in ("query", "key", "value", "dout"))
        for row in range(self.B):
            T = self.T if self.query_lengths is None else self.query_lengths[row]
            S = self.S if self.key_lengths is None else self.key_lengths[row]
            query[row, T:] = key[row, S:] = value[row, S:] = float(self.padding)
        if self.unseen:
            sees_some, *_ = what_counts(self.call)
            unseen = ~np.broadcast_to(sees_some, (*dlse.shape, 1))[..., 0]
            dout[unseen] = dlse[unseen] = float(self.unseen)
        query, key, value, dout = (array.astype(jnp.dtype(self.dtype)) for array in (query, key, value, dout))
        return (query, key, value), (dout, dlse)

    def pages(self, key, value):
        """Keys and values in pages, and the table: pages in any order, wrong where no key is."""
        random = np.random.default_rng([self.seed, self.number])
        each = -(-self.S // self.page)
        used, unused = self.B * each, 3
        table = random.permutation(used + unused)[:used].reshape(self.B, each).astype(np.int32)
        scattered = []
        for array in (key, value):
            missing = each * self.page - self.S
            padded = np.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=np.nan)
            pages = np.full((used + unused, self.page, *array.shape[2:]), np.nan, array.dtype)
            pages[table.ravel()] = padded.reshape(used, *pages.shape[1:])
            scattered.append(pages)
        lengths = np.array(self.key_lengths or self.B * (self.S,))
        wrong = random.choice([-7, used + unused, 2**31 - 1], table.shape)
        return *scattered, np.where(np.arange(each) * self.page < lengths[:, None], table, wrong).astype(np.int32)


def stripes(b, n, i, j):
    """Of tiles of 48 keys, for each 64 queries two of three, and in the second batch entry on, the first keys."""
    return ((i // 64 + j // 48 + n) % 3 != 0) | (j < 8 * b)


# The next three do not read every position, or read it in vain.
def some_queries(b, n, i, j):
    return jnp.where(n % 2 == 0, i % 3 != 0, 0 * j <= i)


def steeper(s, b, n, i, j):
    return 1.25 * s


def later(s, b, n, i, j):
    return s + 0.01 * i


def minus_distance(s, b, n, i, j, slopes):
    """ALiBi (arXiv 2108.12409)."""
    return s - slopes * jnp.abs(i - j)
