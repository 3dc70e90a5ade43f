"""The kernel lowers for an NVIDIA GPU, on a machine that has none, and allocates nothing but its outputs."""

import functools
import itertools
import math
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from attention_cases import DTYPES, HEAD_DIMS, SHAPES, in_tiers, pretend_device
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from helpers import flash_attention
from helpers.instruments.products import equations

AMPERE = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu")


def lower_for_cuda(function, *arguments, **named):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AMPERE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton backend is deprecated")
        return jax.jit(function).trace(*arguments, **named).lower(lowering_platforms=("cuda",)).as_text()


HEADS = list(zip(HEAD_DIMS, itertools.cycle(DTYPES)))


def test_nothing_but_the_kernel():
    """Without the residual, the program is one kernel: there is no table of weights, and no larger copy of anything."""
    query, key = (jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16) for heads in (8, 1))
    attention = functools.partial(flash_attention, implementation="portable", is_causal=True, local_window_size=9)
    text = lower_for_cuda(attention, query, key, key)
    assert text.count("stablehlo.custom_call") == 1 and "stablehlo.dot_general" not in text
    shapes = re.findall(r"tensor<((?:\d+x)+)\w+>", text)
    assert max(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes) == query.size


def test_what_the_kernels_of_gradients_return():
    """Out, its low bits, lse, and three gradients: memory grows with T, not with T squared."""
    N, T, H = 2, 4096, 64
    array = jax.ShapeDtypeStruct((1, T, N, H), jnp.bfloat16)
    attention = functools.partial(flash_attention, implementation="portable", is_causal=True)
    text = lower_for_cuda(lambda *arrays: jax.vjp(attention, *arrays[:3])[1](arrays[3]), *[array] * 4)
    kernels = [line for line in text.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]
    results = [found for line in kernels for found in re.findall(r"tensor<((?:\d+x)+)(\w+)>", line.rsplit("->", 1)[1])]
    sizes = {"bf16": 2, "f32": 4, "i16": 2}
    total = sum(sizes[kind] * math.prod(map(int, shape.split("x")[:-1])) for shape, kind in results)
    assert total == N * T * (2 * 2 * H + 4 + 3 * 2 * H)


@pytest.mark.parametrize(("H", "dtype"), in_tiers(HEADS, lambda H, dtype: (H, dtype) == (24, "bfloat16")))
def test_every_head_dim_and_dtype(H, dtype):
    T, S = SHAPES[3 + HEAD_DIMS.index(H)]
    N, K = (8, 1) if T > 100 else (1, 1)
    query, key = jax.ShapeDtypeStruct((2, T, N, H), dtype), jax.ShapeDtypeStruct((2, S, K, H), dtype)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def loss(query, key, value, lengths):
        arguments = {"key_value_seq_lengths": lengths, "is_causal": True, "return_residual": True}
        out, lse = flash_attention(query, key, value, implementation="portable", **arguments)
        return out.astype(jnp.float32).sum() + lse.sum()

    text = lower_for_cuda(jax.grad(loss, (0, 1, 2)), query, key, key, lengths)
    assert text.count("@mosaic_gpu_v2") >= 3  # forward, dkv, dq; in float32 delta is mended


def products(jaxpr):
    """Every dot_general of a jaxpr and of those inside it."""
    return [each for each in equations(jaxpr, in_kernels=True) if each.primitive.name == "dot_general"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_operands_stay_16_bit_in_the_products(dtype):
    query = jax.ShapeDtypeStruct((1, 64, 1, 64), dtype)
    attention = functools.partial(flash_attention, implementation="portable")
    found = products(jax.make_jaxpr(attention)(query, query, query).jaxpr)
    assert found
    for equation in found:
        assert [variable.aval.dtype for variable in equation.invars] == [dtype, dtype]
        assert equation.outvars[0].aval.dtype == jnp.float32


WAYS = [
    ("Ampere", jnp.float32, 200),
    ("Ampere", jnp.bfloat16, 3),
    ("Hopper", jnp.bfloat16, 200),
    ("mosaic", jnp.float16, 200),
    ("hopper", jnp.bfloat16, 200),
]


@pytest.mark.parametrize(
    ("name", "dtype", "T"), in_tiers(WAYS, lambda name, _, T: name in ("Ampere", "Hopper") and T == 200)
)
def test_nothing_is_compiled_by_triton_unless_it_is_asked_for(name, dtype, T, monkeypatch):
    """By default on two GPUs, and by every name but triton."""
    if capability := {"Ampere": "8.0", "Hopper": "9.0"}.get(name):
        pretend_device(monkeypatch, "gpu", capability)
    query, key = jax.ShapeDtypeStruct((2, T, 4, 64), dtype), jax.ShapeDtypeStruct((2, 300, 2, 64), dtype)
    attention = functools.partial(flash_attention, implementation=None if capability else name, is_causal=True)
    loss = lambda *arrays: attention(*arrays).astype(jnp.float32).sum()
    text = lower_for_cuda(jax.value_and_grad(loss, (0, 1, 2)), query, key, key)
    assert "triton" not in text.lower() and "mosaic_gpu" in text


def test_triton_is_asked_for_by_name_and_on_a_gpu(monkeypatch):
    array = jax.ShapeDtypeStruct((2, 20, 4, 64), jnp.bfloat16)
    attention = functools.partial(flash_attention, implementation="triton", logits_soft_cap=5.0)
    with pytest.raises(NotImplementedError, match="triton cannot serve this call: it needs an NVIDIA GPU"):
        jax.eval_shape(attention, array, array, array)
    pretend_device(monkeypatch, "gpu", "8.0")
    with monkeypatch.context() as patch, pytest.raises(NotImplementedError, match=r"it needs JAX 0\.12"):
        patch.setattr(jax, "__version_info__", (0, 11, 2))
        jax.eval_shape(attention, array, array, array)
    if jax.__version_info__ >= (0, 12):
        assert "__gpu$xla.gpu.triton" in lower_for_cuda(attention, array, array, array)


# JAX as it will be without its lowering of Pallas by Triton: all modules load, and all calls but triton's run.
WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["jax.experimental.pallas.triton"] = None
from jax.experimental import pallas
vars(pallas).pop("triton", None)

import helpers
for module in pkgutil.walk_packages(helpers.__path__, "helpers."):
    if module.name.split(".")[1] in ("attention", "exercises", "instruments", "dev"):
        importlib.import_module(module.name)

import jax, numpy as np
from helpers import flash_attention

x = np.ones((1, 20, 1, 16), "bfloat16")
for name in (None, "reference", "portable"):
    attend = jax.jit(jax.grad(lambda x: flash_attention(x, x, x, implementation=name).astype("float32").sum()))
    assert np.isfinite(np.float32(attend(x))).all()
    traced = attend.trace(x)
    assert "triton" not in traced.lower(lowering_platforms=("cuda",)).as_text()
from helpers.attention.public import registry
assert "by Triton" in registry.TABLE["triton"].limits(None, False)
"""


@pytest.mark.full
def test_without_the_triton_lowering():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)
