"""The public function where people put it: arrays on several devices, JAX's settings, other platforms, export.

The devices are four simulated ones of the CPU, see conftest.
"""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, check_results, cotangents, in_tiers, pretend_device
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import flash_attention, paged_attention
from helpers.attention import sharding
from helpers.attention.problem import FEW_QUERIES, check_call
from helpers.attention.public import api, registry
from helpers.instruments.products import equations

B, T, S, H = 2, 6, 8, 4
LENGTHS = np.array([7, 3], np.int32)

on_four_devices = pytest.mark.skipif(jax.device_count() < 4, reason="this machine has fewer than four devices")


def case_of(dtype="float32", K=2, batch=B, **more):
    return AttentionCase(T, S, H, N=4, K=K, B=batch, dtype=jnp.dtype(dtype).name, **more)


def inputs(*of_case, **more):
    """query, key, value, and gradients of out and lse."""
    case = case_of(*of_case, **more)
    return [jnp.asarray(array) for array in (*case.inputs()[0], *cotangents(case))]


def everything(attention, query, key, value, dout, dlse):
    """out, lse, dq, dk and dv of an attention that returns (out, lse)."""
    results, pull_back = jax.vjp(attention, query, key, value)
    return *results, *pull_back((dout, dlse))


def attention_of(implementation, lengths=LENGTHS, **arguments):
    if implementation == "hopper":
        lengths = None
    arguments |= {"is_causal": True, "key_value_seq_lengths": lengths, "return_residual": True}
    return functools.partial(flash_attention, implementation=implementation, **arguments)


def check(results, implementation, K=2):
    lengths = None if implementation == "hopper" else tuple(LENGTHS.tolist())
    case = case_of(results[0].dtype, K, key_lengths=lengths, arguments={"is_causal": True})
    check_results((results[:2], results[2:]), case)


def split(arrays, mesh, shares_keys=False):
    """The arrays on a mesh: batch over its first axis, heads over its second."""
    specs = [P("batch", None, None if shares_keys and i in (1, 2) else "heads") for i in range(len(arrays))]
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]


def gathers_nothing(program):
    return not any(f"{name}(" in program.as_text() for name in ("all-gather", "all-to-all", "collective-permute"))


def mesh_of(kind, shape=(2, 2)):
    return jax.make_mesh(shape, ("batch", "heads"), axis_types=(kind,) * 2)


# Heads over two devices: two of the keys' heads, or one that they share. Over four: two devices share each.
SPLITS = [((2, 2), 2), ((2, 2), 1), ((1, 4), 2)]


@on_four_devices
@pytest.mark.parametrize(("shape", "K"), in_tiers(SPLITS, lambda *split: split in SPLITS[1:3]))
def test_automatic_axes_split_the_call_and_gather_nothing(shape, K):
    mesh = mesh_of(AxisType.Auto, shape)
    arrays = split(inputs(K=K), mesh, shares_keys=K < shape[1])
    lowered = jax.jit(functools.partial(everything, attention_of("portable"))).lower(*arrays)
    with jax.default_matmul_precision("default"):  # the precision is that of the call, not of the compiling
        program = lowered.compile()
    text = program.as_text()
    assert gathers_nothing(program)
    assert text.count("operand_precision={highest,highest}") == text.count(" dot(") > 0
    results = program(*arrays)
    check(results, "portable", K=K)
    for result in results[:3]:
        part = result.sharding.shard_shape(result.shape)
        assert (part[0], part[2]) == (B // shape[0], 4 // shape[1])


@on_four_devices
def test_heads_that_only_the_keys_split_are_split_for_the_queries():
    """Then no key need move."""
    mesh, specs = mesh_of(AxisType.Auto), [P("batch"), *[P(None, None, "heads")] * 2]
    arrays = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(inputs(), specs, strict=False)]
    out = NamedSharding(mesh, P("batch", None, "heads"))
    assert gathers_nothing(jax.jit(attention_of("portable", lengths=None), out_shardings=out).lower(*arrays).compile())


@pytest.mark.parametrize(("batch", "parts"), [(4, 2), (3, 1)])
def test_a_batch_that_does_not_divide_stays_whole(batch, parts):
    problem = check_call(*inputs(batch=batch)[:3]).problem
    split_problem = sharding.Split({"batch": 2}, problem, "batch", None)
    assert split_problem.local.B == batch // parts and (split_problem.batch is None) == (parts == 1)


@on_four_devices
@pytest.mark.parametrize("implementation", in_tiers(["portable", "hopper"], lambda name: name == "portable"))
def test_explicit_axes(implementation):
    """The result says how it is split, in the call as it is and under jit, and nothing is gathered."""
    mesh, dtype = mesh_of(AxisType.Explicit), jnp.bfloat16 if implementation == "hopper" else jnp.float32
    arrays = split(inputs(dtype=dtype), mesh)
    run = functools.partial(everything, attention_of(implementation))
    program = jax.jit(run).lower(*arrays).compile()
    assert gathers_nothing(program)
    check(program(*arrays), implementation)
    out, lse = attention_of(implementation)(*arrays[:3])
    assert jax.typeof(out).sharding.spec == P("batch", None, "heads", None)
    assert jax.typeof(lse).sharding.spec == P("batch", None, "heads")


def test_a_mesh_of_one_device_keeps_its_axes():
    out, _ = attention_of("portable")(*split(inputs(), mesh_of(AxisType.Explicit, (1, 1)))[:3])
    assert jax.typeof(out).sharding.spec == P("batch", None, "heads", None)


@on_four_devices
def test_arrays_that_will_move_are_not_given_the_kernels_of_where_they_are():
    here, attend = jnp.zeros((1, 8, 1, 16)), registry.kernels_by_platform("portable", interpreted=True)
    with jax.default_device(jax.devices()[1]):
        assert api._forward_on_one_device(attend, check_call(here, here, here)) is None
        stays = jax.device_put(here, jax.devices()[0])
        assert api._forward_on_one_device(attend, check_call(stays, stays, stays)) is not None


@on_four_devices
def test_explicit_axes_that_split_the_sequence():
    """The results are split as the query is, and each gradient as its array."""
    mesh = mesh_of(AxisType.Explicit)
    specs = [P("batch", "heads"), P("batch"), P("batch", None, "heads")]
    arrays = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(inputs(), specs, strict=False)]
    (out, lse), pull_back = jax.vjp(attention_of("portable"), *arrays)
    for result in (out, lse):
        assert jax.typeof(result).sharding.spec[:3] == ("batch", "heads", None)
    for gradient, array in zip(pull_back((out, lse)), arrays, strict=True):
        assert jax.typeof(gradient).sharding == jax.typeof(array).sharding
    right = attention_of("reference")(*inputs()[:3])
    for mine, other in zip((out, lse), right, strict=True):
        np.testing.assert_allclose(mine, other, atol=4e-6)


@on_four_devices
@pytest.mark.parametrize(
    ("implementation", "K"),
    in_tiers([("portable", 1), ("portable", 2), ("hopper", 1)], lambda *of: of == ("portable", 1)),
)
def test_shard_map_with_its_checks(implementation, K):
    """Also where devices share a key head: then its gradient is the sum of theirs."""
    mesh, dtype = mesh_of(AxisType.Auto), jnp.bfloat16 if implementation == "hopper" else jnp.float32
    heads, keys = P("batch", None, "heads"), P("batch", None, "heads" if K == 2 else None)
    lengths = None if implementation == "hopper" else LENGTHS

    def part(query, key, value, lengths):
        return attention_of(implementation, lengths)(query, key, value)

    on_mesh = jax.shard_map(part, mesh=mesh, in_specs=(heads, keys, keys, P("batch")), out_specs=(heads, heads))
    attention = lambda *arrays: on_mesh(*arrays, lengths)
    check(jax.jit(functools.partial(everything, attention))(*inputs(K=K, dtype=dtype)), implementation, K=K)


def test_an_axis_of_vmap_joins_the_batch():
    """Entries keep their own keys and lengths, whether an array has the axis or not."""
    query, key, value, dout, dlse = (np.stack([array, 2 * array, array[::-1]]) for array in inputs())
    lengths = np.array([[7, 3], [0, 5], [2, 6]], np.int32)
    key = key[0]

    def one(query, value, lengths, dout, dlse):
        attention = attention_of("portable", None)
        return everything(functools.partial(attention, key_value_seq_lengths=lengths), query, key, value, dout, dlse)

    in_axes = (1, 2, 0, 0, 0)
    together = jax.jit(jax.vmap(one, in_axes))(np.moveaxis(query, 0, 1), np.moveaxis(value, 0, 2), lengths, dout, dlse)
    for i in range(3):
        right = attention_of("reference", lengths[i])
        sees = lengths[i, :, None, None] > 0
        alone = everything(right, query[i], key, value[i], dout[i], np.where(sees, dlse[i], 0))
        for mine, other in zip(together, alone, strict=True):
            np.testing.assert_allclose(mine[i], other, atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["portable", "mosaic", "hopper"])
def test_vmap_over_sinks(implementation):
    """In calls of more queries than those of decoding, with the gradient of each entry's own. They share segments."""
    array, sinks = np.ones((1, FEW_QUERIES + 1, 2, 8), np.float16), np.array([[0, 1], [5, 2]], np.float32)
    ids = (np.arange(FEW_QUERIES + 1)[None] // 9).astype(np.int32)

    def lse(sinks):
        options = {"implementation": implementation, "return_residual": True, "query_segment_ids": ids}
        return flash_attention(array, array, array, sinks=sinks, key_value_segment_ids=ids, **options)[1]

    found, gradients = jax.vmap(jax.value_and_grad(lambda sinks: lse(sinks)[0, 0].sum()))(sinks)
    weights = np.exp(sinks), 9 * np.exp(np.sqrt(8))
    np.testing.assert_allclose(found, np.log(sum(weights)).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(gradients, weights[0] / sum(weights), rtol=1e-3)


@pytest.mark.parametrize("implementation", ["portable", "mosaic", "hopper", "tpu"])
def test_vmap_over_an_axis_of_no_entries_gives_none(implementation):
    """Also with another such axis around it or in it, and where an array has none of them."""
    arrays = [jnp.zeros((0, 2, *array.shape), jnp.bfloat16) for array in inputs()[:3]]
    arrays[1] = arrays[1][:, :1].reshape(0, *arrays[1].shape[2:])
    loss = lambda *arrays: sum(result.sum() for result in attention_of(implementation, None)(*arrays))
    inner = jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, 0))
    shapes = lambda results: [result.shape for result in results]
    run = jax.eval_shape if implementation != "portable" else lambda f, *arrays: jax.jit(f)(*arrays)
    gradients = run(jax.vmap(inner), *arrays)
    assert shapes(gradients) == [(0, 2, *array.shape) for array in inputs()[:3]]
    other_way = jax.vmap(jax.vmap(attention_of(implementation, None), (0, None, 0)), (1, None, 1))
    arrays[1] = jnp.zeros_like(inputs()[1], jnp.bfloat16)
    assert shapes(run(other_way, *arrays)) == [(2, 0, B, T, 4, H), (2, 0, B, T, 4)]


SETTINGS = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "disable_jit": lambda: jax.disable_jit(),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting):
    """The call as it is and its gradients, with a row that sees no key where no lse is asked for.

    Of hopper the kernel that a jit lowers in this setting, and what stands beside kernels.
    """
    arrays, lengths = [jnp.asarray(array) for array in inputs()], jnp.asarray(LENGTHS)
    blind, bias, halves = jnp.array([0, 3], jnp.int32), jnp.zeros((T, S)), jnp.ones((B, 20, 1, 16), jnp.float16)
    hopper = functools.partial(flash_attention, key_value_seq_lengths=lengths, implementation="hopper")
    of_bias = lambda bias: flash_attention(*arrays[:3], bias, implementation="portable").sum()
    with SETTINGS[setting]():
        results = everything(attention_of("portable", lengths), *arrays)
        out = flash_attention(*arrays[:3], key_value_seq_lengths=blind, implementation="portable")
        if "promotion" in setting or setting == "x64":
            assert jax.grad(of_bias)(bias).shape == bias.shape
            np.testing.assert_array_equal(jax.jit(hopper)(halves, halves, halves), halves)
    check(results, "portable")
    assert not np.asarray(out)[0].any() and np.isfinite(out).all()


def test_jit_for_a_cpu_on_a_machine_with_a_hopper_gpu(monkeypatch):
    """The default is decided when a program is compiled for its platform."""
    pretend_device(monkeypatch, "gpu", "9.0")
    arrays = inputs(dtype=jnp.bfloat16)
    traced = jax.jit(functools.partial(everything, attention_of(None, None))).trace(*arrays)
    on_gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in on_gpu and "stablehlo.while" not in on_gpu  # of the interpreter
    check(traced.lower().compile()(*arrays), "hopper")


def forward_kernels(function, *arrays):
    """How many of the plain kernel a function runs forward; on a GPU it runs others."""
    found = equations(jax.make_jaxpr(function)(*arrays).jaxpr)
    return sum(each.params.get("name") == "flash_attention_forward" for each in found)


def test_checkpoint_saves_residuals_by_name():
    """Then the forward kernel runs once, where a checkpoint without names runs it again."""
    arrays = [jnp.concatenate([array] * 3, axis=1) for array in inputs()[:3]]  # more queries than the few
    policy = jax.checkpoint_policies.save_only_these_names(*api.RESIDUALS)

    def loss(*arrays):
        return jnp.sin(flash_attention(jnp.sin(arrays[0]), *arrays[1:], implementation="portable")).sum()

    right = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    for wrap, count in ((jax.checkpoint(loss), 2), (jax.checkpoint(loss, policy=policy), 1)):
        for gradient in (jax.grad(wrap, (0, 1, 2)), jax.jit(jax.grad(jax.jit(wrap), (0, 1, 2)))):
            assert forward_kernels(gradient, *arrays) == count
    for mine, other in zip(gradient(*arrays), right, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_export_for_both_platforms():
    run = jax.jit(functools.partial(everything, attention_of("portable")))
    exported = jax.export.export(run, platforms=("cpu", "cuda"))(*inputs())
    assert "mosaic_gpu_v2" in exported.mlir_module()
    check(exported.call(*inputs()), "portable")


def test_export_with_symbolic_shapes():
    """Of the reference, which is the default then, with gradients and a query that sees nothing."""
    b, t, s = jax.export.symbolic_shape("b, t, s", constraints=["t >= 6"])
    query, key = (jax.ShapeDtypeStruct((b, length, N, H), jnp.float32) for length, N in ((t, 4), (s, 2)))
    lse = jax.ShapeDtypeStruct((b, t, 4), jnp.float32)
    arguments = {"is_causal": True, "local_window_size": (3, 2)}
    run = functools.partial(everything, functools.partial(flash_attention, return_residual=True, **arguments))
    exported = jax.export.export(jax.jit(run))(query, key, key, query, lse)
    arrays = inputs()
    for mine, right in zip(exported.call(*arrays), jax.jit(run)(*arrays), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-6)


@pytest.mark.parametrize("implementation", ["portable", "cudnn"])
def test_symbolic_shapes_are_the_references_alone(implementation):
    query = jax.ShapeDtypeStruct((1, jax.export.symbolic_shape("t")[0], 2, H), jnp.bfloat16)
    attend = functools.partial(flash_attention, implementation=implementation)
    said = f'{implementation} cannot serve this call: it takes no symbolic shapes; use .*="reference"'
    with pytest.raises(NotImplementedError, match=said):
        jax.export.export(jax.jit(attend))(query, query, query)


def test_a_vmap_of_symbolic_size_is_the_references_alone():
    query = jax.ShapeDtypeStruct((jax.export.symbolic_shape("b")[0], 5, 2, H), jnp.bfloat16)
    attend = lambda **options: jax.jit(jax.vmap(lambda x: flash_attention(x, x, x, **options)))
    jax.export.export(attend(implementation="reference"))(query)
    with pytest.raises(NotImplementedError, match="vmap over an axis of symbolic size"):
        jax.export.export(attend(implementation="portable"))(query)


FORWARD_MODE = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("derivative", FORWARD_MODE)
def test_forward_mode_says_what_works(derivative):
    query, key, value, *_ = inputs()
    of_one = lambda value: flash_attention(query, key, value, implementation="portable")
    said = "first derivative only" if derivative == "hessian" else "reverse mode only.*forward mode"
    with pytest.raises(NotImplementedError, match=said + '.*implementation="reference"'):
        FORWARD_MODE[derivative](of_one, value)


# Pages


def paged_inputs():
    """query, key and value pages, table and lengths of `paged_attention`."""
    random = np.random.default_rng(2)
    shapes, table = [(B, 2, 4, H), (6, 16, 2, H), (6, 16, 2, H)], random.permutation(6).reshape(B, 3)
    arrays = (jnp.asarray(random.standard_normal(shape), np.float32) for shape in shapes)
    return *arrays, table.astype(np.int32), np.array([40, 17], np.int32)


def paged(implementation, *arrays):
    band = {"is_causal": True, "local_window_size": (20, 0)}
    return paged_attention(*arrays, implementation=implementation, return_residual=True, **band)


def check_pages(results, *arrays):
    for mine, right in zip(results, paged("reference", *arrays), strict=True):
        np.testing.assert_allclose(mine, right, atol=2e-6)


PAGES = P(None, None, "heads")
SPECS_OF_PAGES = P("batch", None, "heads"), PAGES, PAGES, P("batch"), P("batch")


@on_four_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_pages_are_split_over_heads_and_queries_over_the_batch_too(implementation, kind):
    mesh, run = mesh_of(kind), functools.partial(paged, implementation)
    arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(paged_inputs(), SPECS_OF_PAGES, strict=True)]
    program = jax.jit(run).lower(*arrays).compile()
    results = program(*arrays)
    check_pages(results, *paged_inputs())
    if implementation == "portable":
        assert gathers_nothing(program)
        assert [result.sharding.shard_shape(result.shape) for result in results] == [(1, 2, 2, H), (1, 2, 2)]
    if kind == AxisType.Explicit:
        assert jax.typeof(run(*arrays)[0]).sharding.spec == P("batch", None, "heads", None)


@on_four_devices
def test_pages_in_shard_map():
    """Each device has the heads and the queries of its part, and all of the pages."""
    shared, mesh = (SPECS_OF_PAGES[0], P("batch", None, "heads")), mesh_of(AxisType.Auto)
    part = functools.partial(paged, "portable")
    on_mesh = jax.shard_map(part, mesh=mesh, in_specs=SPECS_OF_PAGES, out_specs=shared)
    check_pages(jax.jit(on_mesh)(*paged_inputs()), *paged_inputs())


@pytest.mark.parametrize("own_pages", [False, True])
def test_vmap_of_pages(own_pages):
    """Pages that all entries share are not copied; where each has its own, so it keeps them, a wrong table included."""
    query, key_pages, value_pages, table, lengths = paged_inputs()
    tables = np.stack([table, table[::-1], table + 3])  # numbers from 6 on mean the last page
    values = jnp.stack([value_pages, -value_pages, 2 * value_pages]) if own_pages else value_pages
    attend = lambda query, values, table: paged("portable", query, key_pages, values, table, lengths)
    run = jax.vmap(attend, (None, 0 if own_pages else None, 0))
    together = jax.jit(run)(query, values, tables)
    for i in range(3):
        value = values[i] if own_pages else values
        check_pages([result[i] for result in together], query, key_pages, value, tables[i].clip(0, 5), lengths)
    text = jax.jit(run).lower(query, values, tables).as_text()
    assert (re.search(r"tensor<(18|3x6)x16x2x4xf32>", text) is not None) == own_pages
    none = jax.vmap(functools.partial(paged, "portable"), (0, None, None, None, None))
    assert none(query[None][:0], key_pages, value_pages, table, lengths)[0].shape == (0, *query.shape)


def test_pages_are_exported_for_cuda_from_a_cpu():
    run = jax.jit(functools.partial(paged, "portable"))
    export = lambda *platforms: jax.export.export(run, platforms=platforms)(*paged_inputs())
    both, cuda = export("cpu", "cuda"), export("cuda")
    assert all("mosaic_gpu_v2" in exported.mlir_module() for exported in (both, cuda))
    assert "stablehlo.while" not in cuda.mlir_module()  # of the interpreter
    check_pages(both.call(*paged_inputs()), *paged_inputs())
