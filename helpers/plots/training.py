"""Pictures of notebook 08: a small transformer, what its training keeps, and what it learns."""

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from helpers.plots import draw, style

MIB = 2**20
NAIVE, FLASH = style.LOGITS, style.QUERY
MONO = "DejaVu Sans Mono"


def _seen(character):
    """A character, or a sign for one that leaves no mark."""
    return {"\n": "↵", "\t": "⇥", " ": "␣"}.get(character, character)


def model():
    """The whole model from left to right, with the one box that this notebook exchanges."""
    figure, axes = style.drawing(10, 3.3, x=(0, 20), y=(0, 6.6))
    draw.rounded(axes, 3.5, 1.5, 12.3, 4.5, "#EEF1F4", corner=0.25, ec=style.FAINT, lw=1.2, zorder=-1)
    axes.text(3.8, 5.6, "one block; the model has several of them, one after another", va="center", size=9.5)

    arrow = {"colour": style.FAINT, "size": 12, "lw": 1.4, "zorder": 0}
    draw.arrow(axes, (0.9, 2.2), (18.2, 2.2), **arrow)
    _box(axes, 0.2, 1.7, 1.3, 1.0, style.PAPER, "tokens", style.FAINT)
    _box(axes, 1.85, 1.7, 1.5, 1.0, style.KEY, "embed")
    for x, width, colour, name in (
        (3.9, 1.2, style.SKIPPED, "norm"),
        (5.3, 1.1, style.QUERY, "q, k, v"),
        (6.6, 1.9, style.OUTPUT, "attention"),
        (8.7, 1.2, style.QUERY, "merge"),
        (11.2, 1.2, style.SKIPPED, "norm"),
        (12.6, 0.9, style.VALUE, "up"),
        (13.7, 1.1, style.VALUE, "down"),
    ):
        _box(axes, x, 3.9, width, 1.1, colour, name)
    for start, stop, plus in ((4.5, 9.3, 10.5), (11.8, 14.25, 15.2)):
        draw.arrow(axes, (start, 2.2), (start, 3.85), **arrow)
        axes.plot([start, stop], [4.45, 4.45], color=style.FAINT, lw=1.4, zorder=0)
        axes.plot([stop, plus], [4.45, 4.45], color=style.FAINT, lw=1.4, zorder=0)
        draw.arrow(axes, (plus, 4.45), (plus, 2.55), **arrow)
        circle = {"boxstyle": "circle,pad=0.12", "fc": style.PAPER, "ec": style.INK}
        draw.label(axes, plus, 2.2, "+", size=13, weight="bold", bbox=circle)
    _box(axes, 16.1, 1.7, 1.2, 1.0, style.SKIPPED, "norm")
    _box(axes, 17.6, 1.7, 2.2, 1.0, style.KEY, "embedᵀ → logits")
    words = {"ha": "center", "va": "center", "size": 9.5, "weight": "bold", "color": style.OUTPUT}
    up = {"arrowstyle": "-|>", "color": style.OUTPUT, "lw": 1.4}
    axes.annotate("naive or flash:\nnothing else changes", (7.55, 3.85), (7.55, 0.62), arrowprops=up, **words)
    axes.text(12.1, 3.1, "each position by itself", ha="left", va="center", size=9)
    axes.text(5.0, 3.1, "positions meet", ha="left", va="center", size=9)
    for x, shape in ((0.85, "(B, T)"), (2.6, "(B, T, C)"), (18.7, "(B, T, vocabulary)")):
        draw.label(axes, x, 1.3, shape, size=8.5)
    draw.label(axes, 10.5, 1.8, "(B, T, C)", size=8.5, zorder=2)
    return figure


def _box(axes, x, y, width, height, colour, text, edge=None):
    draw.rounded(axes, x, y, width, height, colour, ec=edge or colour, lw=1.2)
    ink = style.INK if colour in (style.PAPER, style.SKIPPED, style.KEY) else "white"
    draw.label(axes, x + width / 2, y + height / 2, text, size=9, color=ink)


def influence(panels):
    """How much the logits at one position change when the token at another is replaced.

    panels: {title: (T, T) array}, entry [i, j] for logits at i and a replaced token j.
    """
    figure, axes = style.subplots(1, len(panels), width=9, height=4.1, sharey=True)
    top = max(change.max() for change in panels.values())
    for panel, (title, change) in zip(axes, panels.items(), strict=True):
        shown = np.ma.masked_less(change, 1e-5)
        panel.set_facecolor(style.SKIPPED)
        image = panel.imshow(shown, cmap=style.PROBABILITY_MAP, norm=LogNorm(top / 1e3, top))
        panel.set(xlabel="position whose token is replaced", title=title)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("position of the logits")
    figure.colorbar(image, ax=axes, label="largest change of a logit", shrink=0.85, extend="min")
    draw.below(figure, handles=draw.keys({"no change, up to rounding": (style.SKIPPED, None)}))
    return figure


def kept(arrays, T, H):
    """What forward leaves in memory for backward, one bar for each version of attention.

    arrays: {version: [(shape, bytes)]}.
    """
    figure, axes = style.subplots(width=9, height=2.7)
    kinds = {"a (T, T) table for each head": (style.LOGITS, "//"), "an array of the shape of q": (style.QUERY, "")}
    kinds |= {"one number for each row": (style.OUTPUT, "xx")}
    table, matrix, column = kinds.values()
    ends = []
    for row, found in enumerate(arrays.values()):
        end = 0
        for shape, size in sorted(found, key=lambda entry: -entry[1]):
            colour, hatch = table if shape[-2:] == (T, T) else matrix if shape[-1:] == (H,) else column
            axes.barh(-row, size / MIB, left=end, fc=colour, hatch=hatch, ec=style.PAPER, height=0.62)
            end += size / MIB
        axes.text(end, -row, f"  {end:.1f} MiB", va="center")
        ends.append(end)
    axes.set_yticks(range(0, -len(arrays), -1), list(arrays))
    axes.set(xlim=(0, 1.14 * max(ends)), xlabel="kept from the forward pass for the backward pass (MiB)")
    axes.set_title(f"One layer of attention at T = {T}")
    axes.legend(handles=draw.keys(kinds, ec=style.PAPER), loc="lower right")
    return figure


def shift(inputs, targets):
    """A stretch of text as inputs, and the same text one place to the left as targets."""
    figure, axes = style.drawing(9.5, 2.3, x=(-2.2, len(inputs) + 0.1), y=(-0.1, 3.5))
    for characters, colour, y in ((inputs, style.QUERY, 2.1), (targets, style.OUTPUT, 0.0)):
        for place, character in enumerate(characters):
            draw.rounded(axes, place + 0.06, y, 0.88, 0.9, "none", corner=0.08, ec=colour, lw=1.5)
            draw.label(axes, place + 0.5, y + 0.43, _seen(character), family=MONO, size=11)
    for place in range(len(inputs)):
        draw.arrow(axes, (place + 0.5, 2.02), (place + 0.5, 0.98), style.FAINT, size=10, lw=1, zorder=3)
        draw.label(axes, place + 0.5, 3.25, place, size=8.5)
    axes.text(-0.2, 2.55, "input", ha="right", va="center", weight="bold", color=style.QUERY)
    axes.text(-0.2, 0.45, "target", ha="right", va="center", weight="bold", color=style.OUTPUT)
    axes.text(-0.2, 3.25, "position", ha="right", va="center", size=8.5)
    return figure


def next_character(chances, shown=12):
    """Bars of the likeliest next characters: chances maps a title to {character: probability}."""
    figure, panels = style.subplots(1, len(chances), width=9.5, height=2.9, sharey=True)
    for axes, (title, chance) in zip(panels, chances.items(), strict=True):
        likeliest = sorted(chance, key=lambda character: -chance[character])[:shown]
        axes.bar(range(shown), [chance[character] for character in likeliest], fc=style.LOGITS, ec=style.PAPER)
        axes.set_xticks(range(shown), map(_seen, likeliest), family=MONO)
        axes.set_title(title)
    panels[0].set(ylim=(0, 1), ylabel="probability")
    figure.supxlabel("next character (␣ space, ↵ new line, ⇥ indentation)", size=10)
    return figure


def schedule(rates):
    figure, axes = style.subplots(width=7, height=2.4)
    axes.plot(rates, color=style.INK)
    top = int(np.argmax(rates))
    axes.axvline(top, color=style.FAINT, lw=1, ls="--")
    axes.text(top + 4, 0.08 * max(rates), "end of the warm-up", size=9, va="center")
    axes.set(xlim=(0, len(rates)), ylim=(0, None), xlabel="step", ylabel="learning rate")
    axes.set_title("A warm-up, then a slow descent")
    return figure


def curves(naive, others, limit):
    """Loss curves on one another, and below them how far each is from naive's, with the limit it must stay under.

    naive: (steps,) losses; others: {name: losses} of one or two more runs.
    """
    figure, (above, below) = style.subplots(2, 1, width=9, height=5.2, sharex=True, height_ratios=(3, 2))
    above.plot(naive, color=NAIVE, lw=5, alpha=0.55, label="naive")
    looks = (FLASH, "--", "o"), (style.OUTPUT, ":", "^")
    for (name, losses), (colour, line, marker) in zip(others.items(), looks, strict=False):
        above.plot(losses, color=colour, lw=1.4, ls=line, label=name)
        difference = np.abs(naive - losses)
        seen = np.flatnonzero(difference)
        below.plot(seen, difference[seen], marker, color=colour, ms=2.5, label=f"{name} - naive, where it is not zero")
    above.set(ylabel="loss (nats for each character)", title=f"{len(others) + 1} runs, one curve")
    above.legend(loc="upper right")
    below.axhline(limit, color=style.INK, lw=1.5, ls=":", label=f"the limit, {limit:g}")
    below.set(yscale="log", ylim=(1e-8, 1e-2), xlabel="step", ylabel="|difference|")
    below.set_title("On this scale you can see it")
    below.legend(loc="upper right", ncols=3)
    return figure


def faults(right, wrong, without_fault, limit):
    """Loss curves of faulty attention beside the right one, and how far each is from it.

    right: (steps,) losses; wrong: {name: losses}, as long or shorter; without_fault: losses of
    other code for the right attention.
    """
    figure, (left, below) = style.subplots(1, 2, width=10, height=4.3)
    steps = max(map(len, wrong.values()))
    left.plot(right[:steps], color=style.INK, lw=5, alpha=0.3, label="right")
    looks = zip(wrong.items(), (style.OUTPUT, style.KEY, style.VALUE, style.LOGITS), "osv^", strict=False)
    for (name, losses), colour, marker in looks:
        options = dict(color=colour, marker=marker, markevery=max(1, steps // 8), ms=5, lw=1.4, label=name)
        left.plot(losses, **options)
        below.plot(np.abs(losses - right[: len(losses)]).clip(1e-7), **options)
    difference = np.abs(without_fault - right[: len(without_fault)]).clip(1e-7)
    left.plot([], [], color=style.FAINT, marker=".", ms=5, lw=1, label="without a fault (right panel)")
    below.plot(difference, color=style.FAINT, marker=".", ms=5, lw=1)
    left.set(ylim=(0, None), ylabel="loss (nats for each character)", title="Each of them learns something")
    below.axhline(limit, color=style.INK, lw=1.5, ls=":")
    below.text(steps, limit * 0.2, f"limit, {limit:g}", ha="right", va="top", size=9, bbox=draw.paper(1.0))
    below.set(yscale="log", ylim=(5e-8, 20), ylabel="|difference| from the right run")
    below.set_title("Only the run without a fault stays under the limit")
    for axes in (left, below):
        axes.set_xlabel("step")
    draw.below(figure, left)
    return figure


def heads(weights, characters):
    """Maps of attention, one panel for each block and head: weights maps a title to a (T, T) array."""
    figure, grid = style.subplots(2, -(-len(weights) // 2), width=8.6, height=7.8, sharex=True, sharey=True)
    ticks, words = range(len(characters)), {"size": 8, "family": MONO}
    for axes, (title, table) in zip(grid.flat, weights.items(), strict=True):
        image = axes.imshow(table, cmap=style.PROBABILITY_MAP, vmin=0, vmax=1)
        axes.set_xticks(ticks, map(_seen, characters), **words)
        axes.set_yticks(ticks, map(_seen, characters), **words)
        axes.tick_params(length=0)
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set_xlabel("key")
    for axes in grid[:, 0]:
        axes.set_ylabel("query")
    figure.colorbar(image, ax=grid, label="weight", shrink=0.6)
    return figure


def memory(lengths, measured, title):
    """Bytes against T, both axes logarithmic: measured maps "naive" and "flash" to one number for each length."""
    figure, axes = style.subplots(width=8, height=4)
    for name, colour, marker, dash in (("naive", NAIVE, "o", "-"), ("flash", FLASH, "s", "--")):
        sizes = np.asarray(measured[name]) / MIB
        label = f"{name}: × {sizes[-1] / sizes[-2]:.1f} for the last doubling"
        axes.plot(lengths, sizes, dash, color=colour, marker=marker, label=label)
    draw.lengths(axes, lengths, list(map(str, lengths)))
    axes.set(yscale="log", xlabel="length T", ylabel="temporary memory (MiB)", title=title)
    draw.plain(axes.yaxis, "{:,g}")
    axes.legend(loc="upper left")
    return figure


FIGURES = {"08-model.png": model}
