"""Pictures of notebook 01: the table of weights and what it costs."""

import numpy as np

from helpers.instruments import cost, roofline
from helpers.plots import draw, style

MIB, GIB = 2**20, 2**30
READ, WRITE = style.STATE, style.OUTPUT
NAIVE, FLASH = style.LOGITS, style.QUERY


def one_row(rows, tokens, query):
    """The weights of one query under several masks: rows maps a title to its (S,) weights."""
    figure, panels = style.subplots(1, len(rows), width=9, height=3.7, sharey=True)
    shown = range(len(tokens))
    for axes, (title, weights) in zip(panels, rows.items(), strict=True):
        past = [j <= query for j in shown]
        for seen, colour, hatch, label in ((True, style.QUERY, "", "visible"), (False, style.OUTPUT, "////", "future")):
            where = [j for j in shown if past[j] == seen]
            axes.bar(where, np.asarray(weights)[where], color=colour, hatch=hatch, ec=style.PAPER, label=label)
        axes.axvline(query + 0.5, color=style.FAINT, lw=1, ls="--")
        axes.set_xticks(shown, tokens, rotation=90, size=8)
        axes.set(ylim=(0, 1.08), xlabel="key", title=f"{title}\nsum {float(np.sum(weights)):.2f}")
    panels[0].set_ylabel(f"weight for the query “{tokens[query]}”")
    panels[-1].legend(loc="upper right")
    return figure


def three_bills():
    """The chip, the memory, and where each of the three quantities is counted."""
    figure, axes = style.drawing(9.5, 3.1, x=(0, 19), y=(0, 6.2))
    inside = "streaming multiprocessors\nwith matrix units, registers\nand shared memory"
    for x, width, colour, name, detail in (
        (0.2, 4.6, style.QUERY, "the chip", inside),
        (13.4, 5.5, style.VALUE, "the memory", "gigabytes, but far away"),
    ):
        draw.rounded(axes, x, 2.2, width, 3.6, style.PAPER, corner=0.25, ec=colour, lw=2)
        draw.label(axes, x + width / 2, 5.3, name, weight="bold", color=colour, size=11)
        draw.label(axes, x + width / 2, 4.4, detail, size=9)
    for y, start, stop, label in ((4.6, 13.2, 5.0, "read"), (3.2, 5.0, 13.2, "write")):
        draw.arrow(axes, (start, y), (stop, y), size=20, lw=1)
        draw.label(axes, 9.1, y + 0.3, label, va="bottom", size=10)
    for x, name, question, unit in (
        (2.5, "FLOPs", "how much arithmetic?", "operations"),
        (9.1, "bytes moved", "how much traffic?", "bytes, each crossing counted"),
        (16.15, "footprint", "how much at once?", "bytes, at the worst moment"),
    ):
        draw.label(axes, x, 1.45, name, weight="bold", size=12, color=style.OUTPUT)
        draw.label(axes, x, 0.85, question, size=10)
        draw.label(axes, x, 0.3, unit, size=9)
    matrices = ("q", 13.55, 0.6), ("k", 14.25, 0.6), ("v", 14.95, 0.6), ("out", 15.65, 0.6)
    for name, x, size in (*matrices, ("s", 16.4, 1.1), ("weights", 17.6, 1.1)):
        colour = style.ROLES.get(name, style.LOGITS)
        draw.box(axes, x, 2.5, size, size, colour, ec="none")
        ink = style.INK if colour in (style.KEY, style.LOGITS) else "white"
        draw.label(axes, x + size / 2, 2.5 + size / 2, name, color=ink, weight="bold", size=8)
    draw.label(axes, 16.15, 1.97, "(a square for each matrix, not to scale)", size=8.5)
    return figure


def byte_bill(read, written):
    """Bytes moved by naive attention, one bar for each crossing of an array, in the order of the steps, in MiB.

    read and written: bytes by name of the array, as `tiled.SlowMemory` counts them.
    """
    steps = "read q", "read k", "write s", "read s", "write weights", "read weights", "read v", "write out"
    figure, axes = style.subplots(width=8.8, height=2.8)
    start = 0
    for number, step in enumerate(steps):
        what, name = step.split()
        counted, colour, hatch = (read, READ, "") if what == "read" else (written, WRITE, "////")
        width = counted[name] / MIB
        axes.barh(-number, width, left=start, color=colour, hatch=hatch, ec=style.PAPER, height=0.8)
        x, side = (start + width + 1, "left") if number < len(steps) / 2 else (start - 1, "right")
        axes.text(x, -number, f"{width:.0f}", va="center", ha=side, size=9)
        start += width
    axes.axvline(start, color=style.FAINT, lw=1, ls="--")
    axes.text(start + 1, 0, f"{start:.0f} MiB in all", va="center")
    axes.set_yticks(range(0, -len(steps), -1), steps)
    axes.set(xlim=(0, start * 1.15), xlabel="bytes moved so far (MiB)")
    axes.set_title("Four crossings of a table, and little else (reads plain, writes hatched)")
    return figure


def gpu_memory(lengths, measured, heads, H=128, itemsize=2):
    """Footprint of attention with `heads` heads against T = S, and the memory of some GPUs.

    measured: bytes that the compiler reported for naive attention, one for each length.
    """
    T = np.geomspace(lengths[0], 2**20, 200)
    figure, axes = style.subplots(width=8.8, height=4.8)
    axes.plot(T, heads * cost.naive_footprint(T, T, H, itemsize) / GIB, color=NAIVE, label="naive, by formula")
    axes.plot(lengths, np.asarray(measured) / GIB, "o", color=style.INK, label="naive, reported by the compiler")
    flash = heads * cost.flash_footprint(T, T, H, itemsize) / GIB
    axes.plot(T, flash, "--", color=FLASH, label="flash, by formula")
    draw.lengths(axes, [2**n for n in range(int(np.log2(lengths[0])), 21)])
    axes.set(yscale="log", xlim=(lengths[0] * 0.8, 2**20), ylim=(0.02, 600))
    for gpu in (roofline.T4, roofline.RTX_4090, roofline.A100_40GB, roofline.H100, roofline.H200):
        size = gpu.memory / GIB
        axes.axhline(size, color=style.FAINT, lw=1)
        name = "A100 or H100, 80 GB" if gpu is roofline.H100 else gpu.name
        name += "" if "GB" in name else f", {gpu.memory // GIB} GB"
        y, side = (size / 1.06, "top") if gpu is roofline.T4 else (size * 1.04, "bottom")
        axes.text(lengths[0] * 0.85, y, name, size=8.5, va=side)
    draw.plain(axes.yaxis, "{:,g}")
    axes.set(xlabel="length T = S", ylabel=f"footprint (GiB), {heads} heads, H = {H}, {8 * itemsize}-bit inputs")
    axes.set_title("Where one layer of naive attention stops fitting")
    axes.legend(loc="lower right")
    return figure


def roof_of_attention(gpu=roofline.H100, T=4096, H=128, itemsize=2):
    """Naive attention under the roof of a GPU, by formula."""
    bytes_moved = {"naive": cost.naive_bytes(T, T, H, itemsize), "each matrix once": 4 * itemsize * T * H}
    figure, axes = style.subplots(width=9.5, height=4.3)
    low, high, ridge, top = 8, 4096, gpu.ridge, gpu.matrix_rate / 1e12
    x = np.geomspace(low, high, 300)
    axes.plot(x, [roofline.attainable(gpu, intensity) / 1e12 for intensity in x], color=style.INK)
    axes.fill_between([low, ridge], 1, [low * gpu.bandwidth / 1e12, top], color=style.STATE, alpha=0.18)
    axes.fill_between([ridge, high], 1, top, color=style.KEY, alpha=0.15)
    axes.text(10, 13, "the memory is the limit", va="center", color=style.QUERY)
    axes.text(ridge * 1.1, top / 1.5, "the matrix units are the limit", va="center", color=style.OUTPUT)
    axes.axvline(ridge, color=style.FAINT, lw=1, ls="--")
    axes.text(ridge / 1.05, 1400, f"ridge: {ridge:.0f}", va="center", ha="right")
    for label, moved in bytes_moved.items():
        intensity = cost.forward_flops(T, T, H) / moved
        marker, colour, size = ("o", NAIVE, 15) if label == "naive" else ("v", style.INK, 9)
        rate = roofline.attainable(gpu, intensity) / 1e12
        if intensity < ridge:
            axes.plot([intensity] * 2, [10, rate], color=colour, lw=1, ls=":")
        text = f"{label}: {intensity:.0f} → {rate:.0f}"
        axes.plot(intensity, rate, marker, color=colour, ms=size, label=text, ls="none")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlim=(low, high), ylim=(10, 2000))
    draw.plain(axes.xaxis)
    draw.plain(axes.yaxis)
    axes.set(xlabel="intensity: FLOPs for each byte moved", ylabel="attainable rate (TFLOP/s)")
    axes.set_title(f"The roof of one GPU, the {gpu.name}, by its datasheet (not measured)")
    axes.legend(loc="lower right", title="FLOPs per byte → TFLOP/s", alignment="left")
    return figure


FIGURES = {"01-three-bills.png": three_bills, "01-roof.png": roof_of_attention}
