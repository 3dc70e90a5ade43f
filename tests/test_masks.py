"""Any mask, any score: what hides keys and changes logits, against the oracle, alone and together."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import by_kernels, in_tiers, relative_error
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_in_use import gathers_nothing, mesh_of, on_four_devices

from helpers import flash_attention
from helpers.attention import scores
from helpers.attention.masking import FULL, HIDDEN, block_mask, tile_kinds, visible
from helpers.attention.portable import backward as portable_backward
from helpers.attention.portable import forward as portable_forward
from helpers.attention.problem import check_call
from helpers.attention.reference import oracle, oracle_gradients
from helpers.instruments.traffic import replay

BOUND = 2e-5  # relative, of float32 results; a sum over all rows may cancel


def prefix_or_stripes(b, n, i, j):
    return (j < 5 + 8 * b) | ((i + j) // 16 % (n + 2) == 0)


def steeper(s, b, n, i, j, slopes, positions):
    return s * (1 + 0.1 * jnp.sin(positions)) - jax.nn.softplus(slopes) * jnp.abs(i - j) / 32


def drawn(seed, T, S, N=4, K=2, B=2, H=8, dtype=np.float32, only=None):
    """query, key, value, a gradient of out and one of lse, and some of the arguments, or those in `only`."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    ids = lambda length: np.sort(random.integers(0, 4, (B, length)), axis=1).astype(np.int32)
    length = lambda longest: random.integers(0, longest + 1, B).astype(np.int32)
    broadcast = lambda *sizes: [size if random.random() < 0.6 else 1 for size in sizes]
    groups = {
        "bias": {"bias": normal(*broadcast(B, N, T, S))},
        "mask": {"mask": random.random(broadcast(B, N, T, S)) < 0.7},
        "segments": {"query_segment_ids": ids(T), "key_value_segment_ids": ids(S)},
        "soft cap": {"logits_soft_cap": 1.5},
        "sinks": {"sinks": normal(N)},
        "offset": {"is_causal": True, "causal_offset": int(random.integers(-20, 60))},
        "window": {"local_window_size": (40, 30)},
        "lengths": {"query_seq_lengths": length(T), "key_value_seq_lengths": length(S)},
        "mask_mod": {"mask_mod": prefix_or_stripes},
        "score_mod": {"score_mod": steeper, "score_arrays": ((normal(N), "n"), (normal(T, B), "ib"))},
    }
    chosen = [name for name in groups if random.random() < 0.5] if only is None else only
    arguments = {key: value for name in chosen for key, value in groups[name].items()}
    arrays = [normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H), normal(B, T, N, H), normal(B, T, N)]
    return [*(array.astype(dtype) for array in arrays[:4]), arrays[4]], arguments


def differentiated(arguments):
    """The arrays among the arguments that have gradients, and a function that puts others in their places."""
    found = {name: arguments[name] for name in ("bias", "sinks") if name in arguments}
    if "score_arrays" in arguments:
        found["score_arrays"] = tuple(array for array, _ in arguments["score_arrays"])

    def put(others):
        placed = {**arguments, **others}
        if "score_arrays" in others:
            axes = [axes for _, axes in arguments["score_arrays"]]
            placed["score_arrays"] = tuple(zip(others["score_arrays"], axes, strict=True))
        return placed

    return found, put


def everything(arrays, arguments, attention=flash_attention, **options):
    """out, lse, dq, dk, dv and the gradients of bias, sinks and score arrays, by `jax.vjp` of one program."""
    found, put = differentiated(arguments)

    @jax.jit
    def run(arrays, found):
        def attend(query, key, value, found):
            return attention(query, key, value, return_residual=True, **put(found), **options)

        results, pull_back = jax.vjp(attend, *arrays[:3], found)
        *gradients, of_found = pull_back(tuple(arrays[3:]))
        ordered = [of_found[name] for name in ("bias", "sinks", "score_arrays") if name in of_found]
        return *results, *gradients, *jax.tree.leaves(ordered)

    return run(arrays, found)


def right(arrays, arguments):
    results = oracle(*arrays[:3], **arguments)
    return *results, *jax.tree.leaves(oracle_gradients(*arrays, **arguments))


def compare(mine, expected, bound=BOUND):
    for number, (one, other) in enumerate(zip(mine, expected, strict=True)):
        one, other = np.asarray(one, np.float64), np.asarray(other)
        if number == 1:
            empty = np.isneginf(other)
            np.testing.assert_array_equal(np.isneginf(one), empty)
            one, other = one[~empty], other[~empty]
        error = relative_error(one, other)
        assert error <= bound, f"result {number}: {error:.1e}"


ALL = ("bias", "mask", "segments", "soft cap", "sinks", "offset", "lengths", "mask_mod", "score_mod")
DRAWS = [("portable", 34, None), ("portable", 3, ALL), ("reference", 4, None), ("reference", 5, ALL)]  # 34 has one key
FULL_DRAWS = [(name, seed, None) for name in ("portable", "reference", "tpu") for seed in (1, *range(6, 12))]


@pytest.mark.parametrize(
    ("implementation", "seed", "only"), in_tiers([*DRAWS, *FULL_DRAWS], lambda *draw: draw in DRAWS)
)
def test_combinations(implementation, seed, only):
    random = np.random.default_rng(seed)
    T, S = (int(size) for size in random.integers(1, 150, 2)) if only is None else (100, 140)
    arrays, arguments = drawn(seed, T, S, only=only)
    compare(everything(arrays, arguments, implementation=implementation), right(arrays, arguments))


def test_tiles_of_other_sizes():
    """Smaller than those of the block mask."""
    arrays, arguments = drawn(40, 150, 140, only=("mask", "segments", "mask_mod", "sinks"))
    options = {"block_q": 16, "block_k": 64, "interpret": True}
    passes = (functools.partial(module, **options) for module in (portable_forward.forward, portable_backward.backward))
    mine = jax.tree.leaves(by_kernels(arguments, *passes)(arrays[:3], arrays[3:]))
    compare(mine, right(arrays, arguments)[:5])


def test_gradients_of_tables_come_from_some_rows_at_a_time(monkeypatch):
    """Of 23 rows 7 at a time, so that the last seven begin where others have been."""
    monkeypatch.setattr("helpers.attention.extra_gradients.MOST_LOGITS", 2 * 4 * 26 * 7)
    arrays, arguments = drawn(42, 23, 26, only=("bias", "score_mod"))
    compare(everything(arrays, arguments, implementation="portable"), right(arrays, arguments))


# Cost


def pairs_seen(call):
    """What a `Call` lets see, (B, N, T, S) booleans, by its definition."""
    problem = call.problem
    rows, cols = np.arange(problem.T)[:, None], np.arange(problem.S)
    lengths = (np.asarray(lengths)[:, None, None, None] for lengths in call.real_lengths())
    seen = visible(rows, cols, problem.band, *lengths)
    if call.hides_keys:
        _, of_visible = scores.whole(problem, call.extras)
        seen = seen & np.asarray(scores.visible_by(problem, *of_visible))
    return np.broadcast_to(seen, (problem.B, problem.N, problem.T, problem.S))


def kinds_of(seen, block_q, block_k):
    """The kinds of tiles, from all of their pairs; a tile that hangs over an end is not whole."""
    T, S = seen.shape[2:]
    padded = np.pad(seen, ((0, 0), (0, 0), (0, -T % block_q), (0, -S % block_k)))
    tiles = padded.reshape(*seen.shape[:2], -(-T // block_q), block_q, -(-S // block_k), block_k)
    return tiles.any(axis=(3, 5)).astype(int) + tiles.all(axis=(3, 5))


def check_kinds(call, block_q, block_k):
    """Kinds are safe, and where one mask decides, exact."""
    exact = kinds_of(pairs_seen(call), block_q, block_k)
    mine, exact = np.broadcast_arrays(tile_kinds(call.prepared(), block_q, block_k), exact)
    assert not ((mine == HIDDEN) & (exact != HIDDEN)).any(), "a tile with something to see is skipped"
    assert not ((mine == FULL) & (exact != FULL)).any(), "a tile with something to hide is not masked"
    return (mine == exact).mean()


def test_kinds_of_tiles():
    for seed in range(60, 66):
        arrays, arguments = drawn(seed, 150, 190, only=None)
        call = check_call(*arrays[:3], **arguments)
        if call.hides_keys:
            check_kinds(call, 2 ** (4 + seed % 4), 2 ** (4 + seed % 3))
    seen = np.zeros((1, 1, 192, 192), bool)  # of one tile all, of another a single pair
    seen[..., :64, :64] = seen[..., 100, 100] = True
    for only, block_q, block_k, more in (
        (("mask_mod",), 64, 64, {}),
        (("segments",), 16, 16, {}),
        (("segments", "offset"), 32, 32, {}),
        ((), 64, 64, {"mask": seen}),
        ((), 128, 16, {"mask": seen}),
        (("offset",), 16, 16, {"mask": np.ones((1, 1, 1, 1), bool)}),
    ):
        arrays, arguments = drawn(91, 192, 192, only=only)
        exact = check_kinds(check_call(*arrays[:3], **arguments | more), block_q, block_k)
        assert exact >= {64: 1, 128: 0}.get(block_q, 0.9)


def test_only_what_is_seen_is_read():
    """As the kernel itself does it: of 48 keys in three documents a query's tile reads the 16 of its own."""
    arrays, _ = drawn(93, 64, 64, B=1, N=1, K=1, only=())
    ids = np.repeat(np.arange(4), 16)[None].astype(np.int32)

    def forward(query, key, value):
        lengths = np.array([40], np.int32)
        segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        call = check_call(query, key, value, key_value_seq_lengths=lengths, **segments)
        return portable_forward.forward(call, block_q=16, block_k=16, interpret=True)

    calls, _ = replay(forward, *arrays[:3])
    (kernel,) = [call for call in calls if call.name == "flash_attention_forward"]
    np.testing.assert_array_equal(kernel.operands["k"].reads[0, :, 0, 0], np.arange(64) < 48)
    assert not any(name.startswith("extras") and operand.reads.any() for name, operand in kernel.operands.items())


def test_a_block_mask_that_is_kept(monkeypatch):
    """The same result, from the tiles that it names; made in one step or in two, the second with rows past the end."""
    arrays, arguments = drawn(41, 150, 140, only=("mask", "mask_mod"))
    make = functools.partial(block_mask, 150, 140, batch=2, heads=4, **arguments)
    kept = make()
    monkeypatch.setattr("helpers.attention.masking.MOST_PAIRS", 2 * 4 * 128 * 140)
    np.testing.assert_array_equal(make(), kept)
    monkeypatch.setattr("helpers.attention.masking.MOST_PAIRS", 2**20)
    long = jax.jit(lambda: block_mask(4000, 4000, mask_mod=arguments["mask_mod"])).lower().compile()
    assert long.memory_analysis().temp_size_in_bytes < 5 * 2**20 < 4000**2
    attend = jax.jit(functools.partial(flash_attention, implementation="portable", **arguments))
    np.testing.assert_array_equal(attend(*arrays[:3], block_mask=kept), attend(*arrays[:3]))
    assert not attend(*arrays[:3], block_mask=0 * kept).any()
    with pytest.raises(TypeError, match="mask must have booleans, got float32"):
        block_mask(4, 4, mask=np.zeros((4, 4), np.float32))


# Rows that see nothing


BLIND = [(name, kind) for name in ("portable", "reference", "mosaic") for kind in ("scores", "sinks", "masks")]
QUICK = [case for case in BLIND if ("mosaic" in case) == ("masks" in case)]


@pytest.mark.parametrize(("implementation", "kind"), in_tiers(BLIND, lambda *case: case in QUICK))
def test_rows_that_see_nothing(implementation, kind):
    """They pass nothing, whatever arrives and a bias has there, but what arrives at the lse of a row that is no padding
    goes to its sink."""
    has_sinks, T = kind == "sinks", 150 if kind == "masks" else 20
    arrays, arguments = drawn(95, T, 30, B=1, only=("bias", "soft cap", "sinks") if has_sinks else ())
    query, key, value, dout, dlse = arrays
    mask = np.ones((T, 1), bool)
    mask[[3, 4, T // 2]] = False
    arguments |= {"mask": mask, "query_seq_lengths": np.array([T - 2], np.int32)}
    sees = mask[:, 0] & (np.arange(T) < T - 2)
    if kind == "scores":
        arguments["score_mod"] = lambda s, b, n, i, j: jnp.where(i == 5, -jnp.inf, s)
        sees[5] = False
    elif has_sinks:
        arguments["sinks"][1] = -np.inf
        arguments["bias"] = np.where(sees[:, None], arguments["bias"], np.nan)
    expected = right(arrays, arguments)
    dlse = np.where((np.arange(T) >= T - 2)[:, None] | ((not has_sinks) & ~sees[:, None]), np.nan, dlse)
    query, dout = (np.where(sees[:, None, None], array, np.nan) for array in (query, dout))
    mine = everything([query, key, value, dout, dlse], arguments, implementation=implementation)
    assert not np.asarray(mine[0])[0, ~sees].any()
    lse = np.asarray(mine[1])[0, ~sees]
    np.testing.assert_array_equal(lse, np.broadcast_to(arguments.get("sinks", -np.inf), lse.shape))
    compare(mine, expected)


def test_a_sink_with_nearly_all_the_weight():
    """lse is the sink there, as of a query that sees no key; but keys are seen, and pass a gradient."""
    (*arrays, dlse), arguments = drawn(99, 4, 5, only=("sinks",))
    arrays, arguments = [*arrays, 0 * dlse], {"sinks": arguments["sinks"] + 20}
    compare(everything(arrays, arguments, implementation="portable"), right(arrays, arguments))


def test_a_bias_of_minus_infinity_hides():
    arrays, _ = drawn(96, 20, 30, only=())
    mask = np.random.default_rng(0).random((2, 1, 20, 30)) < 0.3
    mask[0, 0, 4] = False
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    mine = everything(arrays, {"bias": bias}, implementation="portable")
    assert np.isfinite(mine[5]).all()
    compare(mine[:5], right(arrays, {"mask": mask}))


@pytest.mark.parametrize("implementation", ["portable", "mosaic"])
def test_a_bias_that_hides_the_first_keys_or_all(implementation):
    """-1e10 loses what is added to it. A query whose keys it hides all gets no gradient here, and passes none."""
    (query, key, value, dout, dlse), _ = drawn(97, 3, 70, N=1, K=1, B=1, only=())
    bias = np.where(np.arange(70) < 66, -1e10, 0) * np.ones((3, 1), np.float32)
    bias[2] = -1e10
    dout[:, 2], dlse[:, 2] = 0, 0
    arrays = [query, key, value, dout, dlse]
    mine = everything(arrays, {"bias": bias.astype(np.float32)}, implementation=implementation)
    expected = right(arrays, {"mask": (bias == 0) | (np.arange(3)[:, None] == 2)})
    compare([result[:, :2] for result in mine[:2]], [result[:, :2] for result in expected[:2]])
    compare(mine[2:5], expected[2:5])


# Where people put it


NUMBERED = ("mask_mod", "score_mod", "sinks", "bias", "segments")


reference_of = functools.partial(everything, implementation="reference")


@on_four_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_vmap_over_what_is_split(kind):
    """Tables with one entry within vmap have a batch around it, split as that of query is."""
    normal = lambda *shape: np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    arrays = normal(4, 5, 2, 8), normal(4, 2, 5, 5), normal(4, 2)
    attend = lambda x, bias, sinks: flash_attention(x, x, x, bias=bias, sinks=sinks, implementation="portable").sum()
    run = jax.jit(jax.vmap(jax.value_and_grad(attend, (0, 1, 2))))
    placed = [jax.device_put(array, NamedSharding(mesh_of(kind), P("batch"))) for array in arrays]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), run(*placed), run(*arrays))


@on_four_devices
def test_split_over_devices():
    """Functions get the numbers of the whole call, gradients of what is not split are the sums of all parts, and
    nothing is gathered for the call itself."""
    arrays, arguments = drawn(97, 20, 24, only=(*NUMBERED, "soft cap"))
    mesh = mesh_of(AxisType.Auto)
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    placed = [place(array, P("batch", None, "heads")) for array in arrays]
    split = arguments | {name: place(array, P("batch")) for name, array in arguments.items() if "ids" in name}
    compare(everything(placed, split, implementation="portable"), reference_of(arrays, arguments))
    attend = functools.partial(flash_attention, implementation="portable", **split)
    assert gathers_nothing(jax.jit(attend).lower(*placed[:3]).compile())


def test_vmap():
    """Over a bias of each entry, with the other arrays shared or not; the numbers are those within an entry."""
    arrays, arguments = drawn(99, 20, 24, only=NUMBERED)
    query = arrays[0]
    biases = np.stack([times * arguments["bias"] for times in (1, 2, 3)])
    queries = np.stack([query, -query, 2 * query])
    one = lambda query, bias: everything([query, *arrays[1:]], {**arguments, "bias": bias}, implementation="portable")
    together = jax.jit(jax.vmap(one))(queries, biases)
    for entry in range(3):
        expected = reference_of([queries[entry], *arrays[1:]], {**arguments, "bias": biases[entry]})
        compare([result[entry] for result in together], expected)
