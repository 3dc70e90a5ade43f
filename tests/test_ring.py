"""Ring attention on simulated devices against the oracle, its plan against the mask, and its costs by formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_attention, check_padding, in_tiers, relative_error
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from helpers import flash_attention
from helpers.attention.public.ring import LAYOUTS, plan, positions, ring_attention, ring_attention_on_mesh
from helpers.attention.reference import oracle_gradients


def mesh_of(devices):
    """The first devices of this machine in a ring: simulated ones of a CPU, or real ones."""
    if jax.device_count() < devices:
        pytest.skip(f"this machine has fewer than {devices} devices")
    return jax.make_mesh((devices,), ("sequence",), axis_types=(AxisType.Auto,))


def attention_on(devices, **options):
    options |= {"mesh": mesh_of(devices), "axis_name": "sequence", "return_residual": True}
    return functools.partial(ring_attention_on_mesh, **options)


# Who has what, and who does what


def times_seen(steps, layout, devices, share):
    """(T, T): how often the pieces of a plan bring each query and each key together."""
    seen = np.zeros((devices * share, devices * share), int)
    for step, pieces in enumerate(steps):
        for me, piece in enumerate(pieces):
            if piece is not None:
                rows = positions(layout, devices, share, me)[piece.first_query :]
                cols = positions(layout, devices, share, (me - step) % devices)[: piece.keys]
                block = np.ones((len(rows), len(cols)), int)
                seen[np.ix_(rows, cols)] += np.tril(block) if piece.is_causal else block
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_plan_brings_each_visible_pair_together_once(layout, is_causal):
    for devices in range(1, 9):
        for share in (2, 6):
            T = devices * share
            for key_length in {None, T, T - 1, T // 2 + 1, 1}:
                steps = plan(layout, devices, share, share, is_causal=is_causal, key_length=key_length)
                wanted = np.tril(np.ones((T, T), int)) if is_causal else np.ones((T, T), int)
                wanted[:, T if key_length is None else key_length :] = 0
                assert np.array_equal(times_seen(steps, layout, devices, share), wanted)


# Against the oracle

CAUSAL = {"is_causal": True}


def documents(T, S, seed=0):
    """Segment ids of two rows, of which the second has queries of a document without keys."""
    random = np.random.default_rng(seed)
    ids = {
        f"{name}_segment_ids": np.sort(random.integers(0, 4, (2, length)), axis=1).astype(np.int32)
        for name, length in (("query", T), ("key_value", S))
    }
    ids["query_segment_ids"][1, -3:] = 9
    return ids


def test_padding_may_hold_anything():
    """Nor does what arrives at a query that sees no key matter."""
    lengths = {"query_lengths": (4, 2), "key_lengths": (3, 1)}
    check_padding(attention_on(2, implementation="reference"), AttentionCase(T=4, S=4, H=8, N=1, B=2, **lengths))


def of_documents(T, S, **arguments):
    """Numbers of documents travel with the keys, are padded and laid out as they are."""
    return AttentionCase(T=T, S=S, H=8, N=4, K=2, B=2, arguments=arguments | documents(T, S))


QUICK = [
    (3, AttentionCase(T=21, S=21, H=8, N=4, K=2, arguments=CAUSAL), {}),  # lengths do not divide
    (2, AttentionCase(T=10, S=7, H=8, B=2, query_lengths=(10, 4), key_lengths=(0, 5)), {}),
    (3, of_documents(24, 24, is_causal=True), {"layout": "striped"}),
    (3, of_documents(19, 30, key_value_seq_lengths=np.array([30, 11], np.int32)), {}),
]
ODD = AttentionCase(T=37, S=37, H=24, N=6, K=2, B=2, arguments=CAUSAL)
LENGTHS = {"query_lengths": (33, 0, 9), "key_lengths": (1, 20, 0)}
RUNS = [
    (4, ODD, {}),
    (8, ODD, {"layout": "striped"}),
    (8, AttentionCase(T=41, S=13, H=8, arguments=CAUSAL), {}),
    (4, AttentionCase(T=13, S=41, H=8, arguments=CAUSAL), {}),
    (4, AttentionCase(T=40, S=40, H=8, logits="rising", arguments=CAUSAL), {}),
    (2, AttentionCase(T=33, S=33, H=8, B=3, arguments=CAUSAL, **LENGTHS), {}),
    (3, AttentionCase(T=37, S=50, H=8, N=4, K=1), {}),
    (4, AttentionCase(T=50, S=50, H=16, N=4, K=2, dtype="bfloat16", arguments=CAUSAL), {}),
    (2, AttentionCase(T=70, S=70, H=16, dtype="bfloat16"), {"implementation": "portable"}),
]


@pytest.mark.parametrize(("devices", "case", "options"), [*QUICK, *in_tiers(RUNS, lambda *_: False)], ids=str)
def test_agrees_with_the_oracle(devices, case, options):
    check_attention(attention_on(devices, **options), case)


def test_what_merging_and_blind_queries_leave():
    """Shares of parts add up to one, or dq would feel what keys have in common; and NaN of a query stays where it is."""
    query, key, value, dout = np.random.default_rng(0).standard_normal((4, 1, 32, 2, 8)).astype(np.float32)
    key, value = key + 100, value + 100
    zeros = np.zeros((1, 32), np.int32)
    ids = {"query_segment_ids": zeros + (np.arange(32) > 29), "key_value_segment_ids": zeros}
    right = oracle_gradients(query, key, value, dout, **ids)
    query[:, 30:] = np.nan
    attend = lambda *arrays: attention_on(4, implementation="portable")(*arrays, **ids)[0]
    for mine, other in zip(jax.vjp(attend, query, key, value)[1](dout), right, strict=True):
        assert relative_error(mine, other) < 5e-3


def check_gradients_of_a_loss(attend, mine, arrays, arguments):
    loss = lambda attend, *arrays: jnp.sin(attend(*arrays)).sum()
    gradients = lambda attend: jax.jit(jax.grad(functools.partial(loss, attend), (0, 1, 2)))
    right = gradients(functools.partial(flash_attention, **arguments))(*arrays)
    for a, b in zip(gradients(attend)(*mine), right, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.full
def test_in_a_shard_map_with_the_batch_on_another_axis():
    """Keys without the batch's axis in their types, too: their gradient is the sum over it."""
    if jax.device_count() < 8:
        pytest.skip("this machine has fewer than 8 devices")
    mesh = jax.make_mesh((2, 4), ("batch", "sequence"), axis_types=(AxisType.Auto,) * 2)
    case = AttentionCase(T=32, S=32, H=8, B=2, arguments=CAUSAL)
    arrays, arguments = case.inputs()
    specs = (P("batch", "sequence"),) * 3
    share = functools.partial(ring_attention, axis_name="sequence", layout="contiguous", is_causal=True)
    attend = jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=specs[0])
    check_gradients_of_a_loss(jax.checkpoint(attend), arrays, arrays, arguments)


@pytest.mark.full
@pytest.mark.parametrize(
    ("T", "is_split", "own"), [(16, True, "Explicit"), (13, False, "Explicit"), (13, False, "Auto")]
)
def test_explicit_axes(T, is_split, own):
    """Axes that `jax.make_mesh` makes by itself. Where the sequence goes evenly, results say that it is split."""
    mesh_of(4)
    mesh = jax.make_mesh((1, 4), ("batch", "sequence"), axis_types=(AxisType.Explicit, AxisType[own]))
    whole, arguments = AttentionCase(T=T, S=T, H=8, arguments=CAUSAL).inputs()
    place = jax.sharding.NamedSharding(mesh, P(None, "sequence"))
    arrays = [jax.device_put(array, place) if is_split else array for array in whole]
    attend = functools.partial(ring_attention_on_mesh, mesh=mesh, axis_name="sequence", **arguments)
    check_gradients_of_a_loss(attend, arrays, whole, arguments)
    assert jax.typeof(attend(*arrays)).sharding.spec[1] == (None if T % 4 else "sequence")


@pytest.mark.full
def test_on_a_hopper_gpu_every_piece_goes_to_its_kernels():
    """As far as a CPU can tell: they are lowered for a GPU, padding or not, and nothing is gathered."""
    arrays = [jax.ShapeDtypeStruct((1, 4100, 2, 128), jnp.bfloat16)] * 3
    attend = attention_on(2, implementation="hopper", is_causal=True)
    loss = lambda *arrays: attend(*arrays)[0].astype(jnp.float32).sum()
    text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "gpu.triton" not in text
    assert "collective_permute" in text and "all_gather" not in text


def test_a_transfer_may_occupy_sms():
    """On Hopper each tile of queries is a program of its own: a persistent program would begin its whole share late."""
    shares = functools.partial(ring_attention, axis_name="sequence", implementation="hopper")
    split = P(None, "sequence")
    attention = jax.shard_map(shares, mesh=mesh_of(2), in_specs=split, out_specs=split)
    array = jax.ShapeDtypeStruct((1, 256, 140, 64), jnp.bfloat16)
    assert "grid=(140,)" in str(jax.make_jaxpr(attention)(*3 * [array]))  # a GPU has 132 SMs


# Complaints


def shares(share=4, **options):
    """Trace ring_attention on two devices that have `share` queries and keys each."""
    array = jax.ShapeDtypeStruct((1, 2 * share, 2, 8), jnp.float32)
    keys = jax.ShapeDtypeStruct((1, 2 * options.pop("keys", share), 2, 8), jnp.float32)
    run = functools.partial(ring_attention, **{"axis_name": "sequence", **options})
    split = P(None, "sequence")
    return jax.eval_shape(jax.shard_map(run, mesh=mesh_of(2), in_specs=split, out_specs=split), array, keys, keys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "spiral"}, "layout must be one of contiguous, striped, zigzag, got 'spiral'"),
        ({"is_causal": True, "keys": 6}, "as many keys as queries, got 6 and 4"),
        ({"is_causal": True, "share": 3}, "query must have an even length on each device for layout zigzag, got 3"),
        ({"key_length": 9}, "key_length must be an integer from 1 to 8, got 9"),
        ({"key_length": True}, "key_length must be an integer from 1 to 8, got True"),
        ({"share": 2**29}, r"at most 2\*\*30 - 1 positions on all devices together, got 2 times 536870912 and"),
        ({"query_seq_lengths": np.array([9], np.int32)}, "query_seq_lengths must lie between 0 and 8"),
        ({"implementation": "hopper"}, r'hopper cannot serve this call.*use implementation="portable"'),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        shares(**options)


def test_the_mesh_refuses_what_is_no_flag():
    array = jnp.ones((1, 4, 1, 8))
    with pytest.raises(TypeError, match="return_residual must be True or False, got 1"):
        ring_attention_on_mesh(array, array, array, mesh=mesh_of(2), axis_name="sequence", return_residual=1)
