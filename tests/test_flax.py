"""The adapter for Flax: by what `nnx.MultiHeadAttention` passes, and with Flax itself in an environment of its own."""

import os
import subprocess
import sys
from importlib.metadata import version

import jax.numpy as jnp
import numpy as np
import pytest
from lessons import ROOT

from helpers.attention.public.flax import attention
from helpers.attention.reference import oracle

# As nnx.MultiHeadAttention calls it.
PASSED = {"dropout_rng": None, "dropout_rate": 0.0, "broadcast_dropout": True, "deterministic": True}
PASSED |= {"dtype": None, "precision": None, "module": None, "is_causal": False}


def drawn(*batch, dtype=np.float32):
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape).astype(dtype)
    return normal(*batch, 9, 4, 8), normal(*batch, 9, 2, 8), normal(*batch, 9, 2, 8), normal(9, 9)


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("mask", [np.tril(np.ones((1, 9, 9), np.float32)), np.tri(9, dtype=bool)])
@pytest.mark.parametrize("rows", [0, slice(None)])
def test_masks_and_batch_axes_of_flax(batch, mask, rows):
    query, key, value, bias = drawn(*batch)
    bias = bias[rows]
    out = attention(query, key, value, bias, jnp.array(mask), **PASSED)
    flat = [array.reshape(-1, *array.shape[-3:]) for array in (query, key, value)]
    right, _ = oracle(*flat, bias=bias, is_causal=True)
    np.testing.assert_allclose(out, right.reshape(query.shape), atol=3e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout_rate": 0.1, "deterministic": False}, NotImplementedError, "dropout_rate must be 0, .* got 0.1"),
        ({"module": object()}, NotImplementedError, "sow_weights must be False"),
        ({"precision": "coarse"}, ValueError, "coarse"),
        ({"input_positions": np.arange(9)}, TypeError, "input_positions"),
        ({"query": drawn(3, 2)[0]}, ValueError, "the batch axes of query"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        attention(**dict(zip(("query", "key", "value"), drawn(2), strict=False)) | PASSED | change)


WITH_FLAX = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from helpers.attention.public.flax import attention

x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 24, 16), np.float32))
real = jnp.arange(24) < jnp.array([24, 17, 9, 24])[:, None]
mask = nnx.combine_masks(nnx.make_attention_mask(real, real), nnx.make_causal_mask(real))

def gradients(**options):
    attend = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **options)
    loss = lambda attend, x: (jnp.sin(attend(x, mask=mask)) * real[..., None]).sum()
    return jax.tree.leaves(nnx.grad(loss)(attend, x))

jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=1e-5), gradients(attention_fn=attention), gradients())
"""


@pytest.mark.full
def test_a_layer_of_flax_has_the_gradients_of_its_own_attention(tmp_path):
    """With masks of float32 and padding."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python, needed = tmp_path / "bin" / "python", ("flax", f"jax=={version('jax')}")
    if subprocess.run([python, "-m", "pip", "install", "--quiet", *needed]).returncode:
        pytest.skip("Flax cannot be installed here")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([python, "-c", WITH_FLAX], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
