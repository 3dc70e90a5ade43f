"""Hopper backward passes in the interpreter, compared with float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from helpers.attention.hopper import backward as hopper
from helpers.attention.problem import check_call
from helpers.attention.reference import naive_attention, oracle_gradients
from helpers.instruments.races import DETECTING


def random_call(random, T, S, N, K, H, **mask):
    """(a checked `Call` in bfloat16, its (out, lse, dout, dlse), its gradients in float64), from normal numbers."""
    shapes = (1, T, N, H), (1, S, K, H), (1, S, K, H), (1, T, N, H)
    query, key, value, dout = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    call = check_call(query, key, value, **mask)
    out, lse = naive_attention(call)
    return call, (out, lse, dout, jnp.zeros_like(lse)), oracle_gradients(query, key, value, dout, **mask)


def errors(problem, tiles, detect_races=False):
    """{"dq": relative error, "dk": ..., "dv": ...} of a `random_call`; detect_races: for `races`."""
    call, residuals, expected = problem
    interpret = dataclasses.replace(DETECTING, detect_races=detect_races)
    found = hopper.backward(call, *residuals, tiles=tiles, interpret=interpret)
    return {
        name: float(np.linalg.norm(np.float64(mine) - right) / np.linalg.norm(right))
        for name, mine, right in zip(("dq", "dk", "dv"), found, expected, strict=True)
    }
