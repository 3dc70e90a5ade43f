"""Pictures of notebook 01: the table of weights and what it costs."""

import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from helpers.instruments import cost, roofline
from helpers.plots import style

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
            axes.bar(where, np.asarray(weights)[where], color=colour, hatch=hatch, edgecolor=style.PAPER, label=label)
        axes.axvline(query + 0.5, color=style.FAINT, linewidth=1, linestyle="--")
        axes.set_xticks(shown, tokens, rotation=90, size=8)
        axes.set_xlabel("key")
        axes.set_title(f"{title}\nsum {float(np.sum(weights)):.2f}", loc="left")
        axes.set_ylim(0, 1.08)
    panels[0].set_ylabel(f"weight for the query “{tokens[query]}”")
    panels[-1].legend(loc="upper right", frameon=False)
    return figure


def three_bills():
    """The chip, the memory, and where each of the three quantities is counted."""
    figure, axes = style.subplots(width=9.5, height=3.1)
    style.bare(axes)
    axes.set_xlim(0, 19)
    axes.set_ylim(0, 6.2)
    inside = "streaming multiprocessors\nwith matrix units, registers\nand shared memory"
    boxes = (
        (0.2, 4.6, style.QUERY, "the chip", inside),
        (13.4, 5.5, style.VALUE, "the memory", "gigabytes, but far away"),
    )
    for x, width, colour, name, detail in boxes:
        axes.add_patch(
            FancyBboxPatch(
                (x, 2.2),
                width,
                3.6,
                boxstyle="round,pad=0,rounding_size=0.25",
                facecolor=style.PAPER,
                edgecolor=colour,
                linewidth=2,
            )
        )
        axes.text(x + width / 2, 5.3, name, ha="center", va="center", weight="bold", color=colour, size=11)
        axes.text(x + width / 2, 4.4, detail, ha="center", va="center", size=9)
    for y, start, stop, label in ((4.6, 13.2, 5.0, "read"), (3.2, 5.0, 13.2, "write")):
        axes.add_patch(FancyArrowPatch((start, y), (stop, y), arrowstyle="-|>", mutation_scale=20, color=style.INK))
        axes.text(9.1, y + 0.3, label, ha="center", va="bottom", size=10, color=style.INK)
    for x, name, question, unit in (
        (2.5, "FLOPs", "how much arithmetic?", "operations"),
        (9.1, "bytes moved", "how much traffic?", "bytes, each crossing counted"),
        (16.15, "footprint", "how much at once?", "bytes, at the worst moment"),
    ):
        axes.text(x, 1.45, name, ha="center", va="center", weight="bold", size=12, color=style.OUTPUT)
        axes.text(x, 0.85, question, ha="center", va="center", size=10)
        axes.text(x, 0.3, unit, ha="center", va="center", size=9, color=style.INK)
    for x, size, name, colour in (
        (13.55, 0.6, "q", style.QUERY),
        (14.25, 0.6, "k", style.KEY),
        (14.95, 0.6, "v", style.VALUE),
        (15.65, 0.6, "out", style.OUTPUT),
        (16.4, 1.1, "s", style.LOGITS),
        (17.6, 1.1, "weights", style.LOGITS),
    ):
        axes.add_patch(
            FancyBboxPatch((x, 2.5), size, size, boxstyle="square,pad=0", facecolor=colour, edgecolor="none")
        )
        ink = style.INK if colour in (style.KEY, style.LOGITS) else "white"
        axes.text(x + size / 2, 2.5 + size / 2, name, ha="center", va="center", color=ink, weight="bold", size=8)
    axes.text(16.15, 1.97, "(a square for each matrix, not to scale)", ha="center", va="center", size=8.5)
    return figure


def byte_bill(read, written):
    """Bytes moved by naive attention, one bar for each crossing of an array, in the order of the steps, in MiB.

    read and written: bytes by name of the array, as `tiled.SlowMemory` counts them.
    """
    crossings = [("read", "q", read), ("read", "k", read), ("write", "s", written), ("read", "s", read)]
    crossings += [("write", "weights", written), ("read", "weights", read)]
    crossings += [("read", "v", read), ("write", "out", written)]
    figure, axes = style.subplots(width=8.8, height=2.8)
    start = 0
    for number, (what, name, counted) in enumerate(crossings):
        width = counted[name] / MIB
        colour, hatch = (READ, "") if what == "read" else (WRITE, "////")
        axes.barh(-number, width, left=start, color=colour, hatch=hatch, edgecolor=style.PAPER, height=0.8)
        early = number < len(crossings) / 2
        x = start + width + 1 if early else start - 1
        axes.text(x, -number, f"{width:.0f}", va="center", ha="left" if early else "right", size=9)
        start += width
    axes.axvline(start, color=style.FAINT, linewidth=1, linestyle="--")
    axes.text(start + 1, 0, f"{start:.0f} MiB in all", va="center")
    axes.set_yticks(range(0, -len(crossings), -1), [f"{what} {name}" for what, name, _ in crossings])
    axes.set_xlim(0, start * 1.15)
    axes.set_xlabel("bytes moved so far (MiB)")
    axes.set_title("Four crossings of a table, and little else (reads plain, writes hatched)", loc="left")
    return figure


def cards(lengths, measured, heads, H=128, itemsize=2):
    """Footprint of attention with `heads` heads against T = S, and the memory of some GPUs.

    measured: bytes that the compiler reported for naive attention, one for each length.
    """
    T = np.geomspace(lengths[0], 2**20, 200)
    figure, axes = style.subplots(width=8.8, height=4.8)
    axes.plot(T, heads * cost.naive_footprint(T, T, H, itemsize) / GIB, color=NAIVE, label="naive, by formula")
    axes.plot(lengths, np.asarray(measured) / GIB, "o", color=style.INK, label="naive, reported by the compiler")
    flash = heads * cost.flash_footprint(T, T, H, itemsize) / GIB
    axes.plot(T, flash, "--", color=FLASH, label="flash, by formula")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.02, 600)
    axes.set_xlim(lengths[0] * 0.8, 2**20)
    for card in (roofline.T4, roofline.RTX_4090, roofline.A100_40GB, roofline.H100, roofline.H200):
        axes.axhline(card.memory / GIB, color=style.FAINT, linewidth=1)
        name = "A100 or H100, 80 GB" if card is roofline.H100 else card.name
        size = "" if "GB" in name else f", {card.memory // GIB} GB"
        below = card is roofline.T4
        y, side = (card.memory / GIB / 1.06, "top") if below else (card.memory / GIB * 1.04, "bottom")
        axes.text(lengths[0] * 0.85, y, f"{name}{size}", size=8.5, va=side)
    ticks = [2**n for n in range(int(np.log2(lengths[0])), 21)]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("length T = S")
    axes.set_ylabel(f"footprint (GiB), {heads} heads, H = {H}, {8 * itemsize}-bit inputs")
    axes.set_title("Where one layer of naive attention stops fitting", loc="left")
    axes.legend(loc="lower right", frameon=False)
    return figure


def roof(card, points):
    """The roof of a GPU, and computations on it: points maps a label to an intensity in FLOPs per byte."""
    figure, axes = style.subplots(width=9.5, height=4.3)
    low, high = 8, 4096
    x = np.geomspace(low, high, 300)
    axes.plot(x, [roofline.attainable(card, intensity) / 1e12 for intensity in x], color=style.INK)
    axes.fill_between(
        [low, card.ridge], [1, 1], [low * card.bandwidth / 1e12, card.matrix_rate / 1e12], color=style.STATE, alpha=0.18
    )
    axes.fill_between([card.ridge, high], [1, 1], [card.matrix_rate / 1e12] * 2, color=style.KEY, alpha=0.15)
    axes.text(10, 13, "the memory is the limit", va="center", color=style.QUERY)
    axes.text(
        card.ridge * 1.1, card.matrix_rate / 1.5e12, "the matrix units are the limit", va="center", color=style.OUTPUT
    )
    axes.axvline(card.ridge, color=style.FAINT, linewidth=1, linestyle="--")
    axes.text(card.ridge / 1.05, 1400, f"ridge: {card.ridge:.0f}", color=style.INK, va="center", ha="right")
    for label, intensity in points.items():
        marker, colour, size = ("o", NAIVE, 15) if label == "naive" else ("v", style.INK, 9)
        rate = roofline.attainable(card, intensity) / 1e12
        if intensity < card.ridge:
            axes.plot([intensity] * 2, [10, rate], color=colour, linewidth=1, linestyle=":")
        text = f"{label}: {intensity:.0f} → {rate:.0f}"
        axes.plot(intensity, rate, marker, color=colour, markersize=size, label=text, linestyle="none")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(10, 2000)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("intensity: FLOPs for each byte moved")
    axes.set_ylabel("attainable rate (TFLOP/s)")
    axes.set_title(f"The roof of one GPU, the {card.name}, by its datasheet (not measured)", loc="left")
    axes.legend(loc="lower right", title="FLOPs per byte → TFLOP/s", alignment="left", frameon=False)
    return figure


def _short(length):
    """4096 as 4k, so that ticks do not collide."""
    return f"{length // 1024}k" if length % 1024 == 0 and length < 2**20 else "1M" if length == 2**20 else str(length)


def roof_of_attention(card=roofline.H100, T=4096, H=128, itemsize=2):
    """Naive attention under the roof of a GPU, by formula."""
    moved = {"naive": cost.naive_bytes(T, T, H, itemsize), "each matrix once": 4 * itemsize * T * H}
    return roof(card, {name: cost.forward_flops(T, T, H) / count for name, count in moved.items()})


FIGURES = {
    "01-three-bills.png": three_bills,
    "01-roof.png": roof_of_attention,
}
