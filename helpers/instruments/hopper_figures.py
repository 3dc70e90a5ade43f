"""What was recorded of the Hopper kernels, as the notebooks ask for it: the grid of shapes, trials, ladders.

The shapes of the grid have B T = 16384 positions and N H = 2048 columns, with as many heads of keys as of
queries. A case is named "H=64 full" or "H=128 causal".
"""

import itertools
import math
import statistics

import jax.numpy as jnp

from helpers.attention.masking import Band
from helpers.attention.problem import Problem

POSITIONS, WIDTH = 16384, 2048
PEERS = {"cuDNN": "cudnn", "FlashAttention-3": "flash_attention_3", "FlashAttention-4": "flash_attention_4"}


def problem_of(H, T, is_causal):
    """A problem of the grid, in bfloat16."""
    B, heads = max(1, POSITIONS // T), WIDTH // H
    return Problem(B, T, T, heads, heads, H, jnp.dtype(jnp.bfloat16), 1 / math.sqrt(H), Band.of(is_causal))


def climb(recorded, kernel="hopper forward", T=4096):
    """{case: {name of a rung: TFLOP/s}} of a ladder."""
    found = {}
    for entry in recorded["ladder"]:
        if (entry["kernel"], entry["T"]) == (kernel, T):
            case = f"H={entry['H']} {'causal' if entry['is_causal'] else 'full'}"
            found.setdefault(case, {})[entry["name"]] = entry["tflops"]
    return found


def variants(trials, kernel):
    """{(H, is_causal, T): {name of a trial: TFLOP/s}} of kernels that were tried in turns."""
    found = {}
    for entry in trials["variants"]:
        if entry["kernel"] == kernel:
            found.setdefault((entry["H"], entry["is_causal"], entry["T"]), {})[entry["name"]] = entry["tflops"]
    return found


def speeds(entries, H, is_causal):
    """{name: TFLOP/s} of recorded entries for a head dim and a mask."""
    return {entry["name"]: entry["tflops"] for entry in entries if (entry["H"], entry["is_causal"]) == (H, is_causal)}


def factors(trials, kernel):
    """[(name of a change, factors of the speed of a kernel)]: H = 64 full, causal, 128 full, causal; None for none."""
    found = {}
    for entry in trials["factors"]:
        if entry["kernel"] == kernel:
            place = 2 * (entry["H"] == 128) + entry["is_causal"]
            found.setdefault(entry["name"], [None] * 4)[place] = entry["factor"]
    return list(found.items())


def on_the_grid(recorded, implementation, which, dtype="bfloat16"):
    """{(H, is_causal, T): TFLOP/s by the clock of the GPU}, "forward" or "backward"."""
    return {
        (entry["H"], entry["is_causal"], entry["T"]): entry["tflops"]
        for entry in recorded["records"]
        if (entry["implementation"], entry["pass"], entry["dtype"]) == (implementation, which, dtype)
        and (entry["B"] * entry["T"], entry["N"] * entry["H"]) == (POSITIONS, WIDTH)
        and entry["N"] == entry["K"]
    }


def comparison(recorded, which):
    """A table: the speed of the Hopper kernel on the grid by that of others, T from left to right, and the mean."""
    mine = on_the_grid(recorded, "hopper", which)
    others = {name: on_the_grid(recorded, implementation, which) for name, implementation in PEERS.items()}
    others["the fastest"] = {shape: max(of[shape] for of in others.values()) for shape in mine}
    ratios = [{shape: mine[shape] / of[shape] for shape in sorted(mine)} for of in others.values()]
    lines = [" " * 14 + "".join(f"{name:>18}" for name in others)]
    for (H, is_causal), shapes in itertools.groupby(ratios[0], lambda shape: shape[:2]):
        shapes = list(shapes)
        cells = (" ".join(f"{of[shape]:.2f}" for shape in shapes) for of in ratios)
        lines.append(f"H={H:3} {'causal' if is_causal else 'full':8}" + "".join(f"{cell:>18}" for cell in cells))
    means = (statistics.geometric_mean(of.values()) for of in ratios)
    return "\n".join([*lines, "geometric mean" + "".join(f"{mean:18.2f}" for mean in means)])
