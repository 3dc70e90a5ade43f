"""The marks that pictures share: words, boxes, arrows, bars with their sizes, axes, legends."""

import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from helpers.plots import style


def paper(pad=1.5, alpha=None):
    """The light ground of words that stand on a hatch or a line, for `bbox`."""
    return {"fc": style.PAPER, "ec": "none", "pad": pad, "alpha": alpha}


WORDS = {"size": 8, "linespacing": 1.0, "bbox": paper(0.8, 0.8)}  # on a bar


def label(axes, x, y, text, **options):
    """Words with their middle at (x, y)."""
    return axes.text(x, y, text, **({"ha": "center", "va": "center"} | options))


def box(axes, x, y, width, height, colour, **look):
    """A rectangle with its first corner at (x, y)."""
    axes.add_patch(Rectangle((x, y), width, height, fc=colour, **look))


def rounded(axes, x, y, width, height, colour, corner=0.12, **look):
    axes.add_patch(FancyBboxPatch((x, y), width, height, f"round,pad=0,rounding_size={corner}", fc=colour, **look))


def tinted(axes, x, y, width, height, colour, alpha=0.3, lw=1.6, **edge):
    """A box in a tint of a colour, with an edge and a hatch in the colour itself."""
    box(axes, x, y, width, height, colour, alpha=alpha, ec="none")
    box(axes, x, y, width, height, "none", ec=colour, lw=lw, **edge)


def named(axes, x, y, width, height, colour, name, hatch=None, size=10):
    """A tinted box with its name, and a faint hatch."""
    tinted(axes, x, y, width, height, colour)
    if hatch:
        box(axes, x, y, width, height, "none", ec=colour, hatch=hatch, lw=0, alpha=0.25)
    label(axes, x + width / 2, y + height * 0.5, name, weight="bold", size=size)


def arrow(axes, start, stop, colour=style.INK, size=14, **look):
    """An arrow from start to stop, both (x, y); size of its head in points."""
    look = {"arrowstyle": "-|>", "lw": 1.5} | look
    axes.add_patch(FancyArrowPatch(start, stop, mutation_scale=size, color=colour, **look))


def stack(axes, y, parts, height, words=None, alpha=0.35, lw=1.2):
    """Tinted bars end to end. parts: (amount, colour, hatch, what is written on it or None) each. Returns the end."""
    left = 0
    for amount, colour, hatch, text in parts:
        axes.barh(y, amount, height, left=left, color=colour, alpha=alpha, ec="none")
        axes.barh(y, amount, height, left=left, fc="none", ec=colour, hatch=hatch, lw=lw)
        if text:
            label(axes, left + amount / 2, y, text, **words or WORDS)
        left += amount
    return left


def lines(axes, x, curves, looks, **options):
    """A line for each of {name: values}, with its look: (colour, marker, dash)."""
    for (name, values), (colour, marker, dash) in zip(curves.items(), looks, strict=False):
        axes.plot(x, values, dash, marker=marker, color=colour, label=name, **options)


def lengths(axes, ticks, names=None):
    """A logarithmic axis of lengths, with a tick at each of some."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, names or [short(tick) for tick in ticks])


def grouped_bars(axes, groups, rows, looks, width, part, **options):
    """Upright bars side by side. groups: names below; rows: {name: a height for each}; looks: (colour, hatch) each.

    width: from one bar of a group to the next. part: how much of that a bar takes.
    """
    for number, ((name, heights), (colour, hatch)) in enumerate(zip(rows.items(), looks, strict=False)):
        x = np.arange(len(groups)) + width * (number - (len(rows) - 1) / 2)
        axes.bar(x, heights, part * width, color=colour, hatch=hatch, ec=style.INK, lw=0.8, label=name, **options)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)


def rows(axes, names, marks=False):
    """A name beside each row, from the top down; with marks, where the row is."""
    axes.set_yticks(range(len(names)), names)
    if not marks:
        axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def plain(axis, form="{:g}"):
    """Numbers along an axis as they are read, not as powers."""
    axis.set_major_formatter(lambda value, _: form.format(value))


def short(length):
    """4096 as 4k, so that ticks do not collide."""
    return f"{length >> 20}M" if length >= 2**20 else f"{length >> 10}k" if length >= 1024 else str(length)


def below(figure, axes=None, **options):
    """A legend below the panels: of what one of them names, or of handles=."""
    if axes is not None:
        options["handles"], options["labels"] = axes.get_legend_handles_labels()
    options = {"ncols": len(options["handles"])} | options
    figure.legend(loc="outside lower center", **options)


def beside(axes, **options):
    """A legend to the right of the axes."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1), **options)


def keys(looks, **options):
    """Handles for a legend. looks: {name: (colour, hatch)}."""
    edge = lambda hatch: {"ec": style.PAPER} if hatch else {}
    return [Patch(label=name, fc=fc, hatch=hatch, **edge(hatch) | options) for name, (fc, hatch) in looks.items()]
