"""The products that are read off a kernel are those of its source, wherever they stand."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from helpers.instruments.products import Product, products


def kernel(x_ref, y_ref, out_ref):
    x, y = x_ref[...], y_ref[...]
    once = lax.dot_general(x, y, (((1,), (1,)), ((), ())))  # (4, 6): 2 * 4 * 6 * 8
    in_a_loop = lax.fori_loop(0, 5, lambda _, total: total + once.T @ x, jnp.zeros((6, 8)))  # 2 * 6 * 8 * 4
    out_ref[...] = in_a_loop + y.sum()


def launch(x, y):
    shape = jax.ShapeDtypeStruct((6, 8), jnp.float32)
    return pl.pallas_call(kernel, name="two_products", out_shape=shape, interpret=True)(x, y) @ x.T


def test_products_are_found_in_loops_and_behind_jit_and_not_outside_kernels():
    x, y = jnp.ones((4, 8)), jnp.ones((6, 8))
    right = {"two_products": [Product((4, 6), 384), Product((6, 8), 384)]}
    assert products(launch, x, y) == right
    assert products(jax.jit(launch), x, y) == right
    assert products(jnp.matmul, x, y.T) == {}
