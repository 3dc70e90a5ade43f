"""Pictures of notebook 00, and the attention map that later notebooks draw too."""

import re

import numpy as np

from helpers.plots import draw, style
from helpers.plots.measuring import LOOKS


def attention_map(weights, words, title="Who looks at whom"):
    """A (T, T) table of weights, one row for each query, labelled by words."""
    size = 0.27 * len(words) + 1.6
    figure, axes = style.subplots(width=size + 0.8, height=size)
    image = axes.imshow(weights, cmap=style.PROBABILITY_MAP, vmin=0, vmax=max(1e-9, float(np.max(weights))))
    axes.set_xticks(range(len(words)), words, rotation=90, size=9)
    axes.set_yticks(range(len(words)), words, size=9)
    axes.set(xlabel="key", ylabel="query", title=title)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.7)
    return figure


# What the lines of `costs` are called, with the colour, marker and dash that these implementations have in notebook 09.
COSTS = {
    "naive": "naive attention",
    "portable": "flash attention, portable kernel",
    "cudnn": "flash attention, NVIDIA's cuDNN",
    "hopper": "flash attention, Hopper kernel",
}


def costs(recorded):
    """Time and memory of a causal forward pass against length, as `results.read` has them of a GPU.

    On the left 32 heads and as many sequences as make 16384 tokens, on the right one head. H = 64, bfloat16.
    """
    figure, (left, right) = style.subplots(1, 2, width=9.5, height=3.9)
    case = {"dtype": "bfloat16", "H": 64, "N": 32, "K": 32, "is_causal": True}
    for name, label in COSTS.items():
        colour, marker, dash = LOOKS[name]
        this = {"implementation": name, "pass": "forward"}
        times = {r["T"]: r["device_ms"] for r in recorded["records"] if r | this | case == r}
        needed = {r["T"]: r["bytes"] / 2**20 for r in recorded["memory"] if r | this == r}
        for axes, points in (left, times), (right, needed):
            if points:
                size = 9 if axes is right and name == "portable" else 6  # the other kernel lies on it
                line = sorted(points.items())
                axes.plot(*zip(*line, strict=True), dash, marker=marker, ms=size, color=colour, label=label)
    refused = next(note for note in recorded["notes"] if note.startswith("memory: naive: forward at T = "))
    too_long = int(re.search(r"T = (\d+)", refused)[1])
    right.text(2**16.6, 24_000, f"naive at {too_long // 1024}k:\nno room on this GPU", va="center", size=9)
    for axes, what in (left, "time of 16384 tokens (ms)"), (right, "memory of one head (MiB)"):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda T, _: f"{T / 1024:.0f}k" if T >= 1024 else "")
        axes.set(yscale="log", xlabel="tokens of a sequence (1k = 1024)", ylabel=what)
        draw.plain(axes.yaxis, "{:,g}")
    left.set(xticks=[1024, 4096, 16384], yticks=[0.2, 0.5, 1, 2, 5, 10, 20])
    left.minorticks_off()
    right.set_xticks([1024, 4096, 16384, 65536, 2**18, 2**20])
    left.set_title(f"{recorded['gpu']}: causal forward pass")
    right.set_title("bfloat16, head dimension 64")
    draw.below(figure, left, ncols=2)
    return figure
