"""Pictures of notebook 06: where gradients come from, what they cost, and how they go wrong."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from helpers.plots import draw, style

SIGNED_MAP = LinearSegmentedColormap.from_list("signed", [style.OUTPUT, style.PAPER, style.QUERY])
MIB = 2**20


def jacobian(p, matrix, tokens, query):
    """The weights p (S,) of one row and the Jacobian matrix (S, S) of its softmax; query is the row's word."""
    shown = range(len(tokens))
    figure, (left, right) = style.subplots(1, 2, width=10, height=6.8, width_ratios=[1, 4.6])
    left.barh(shown, p, color=style.LOGITS)
    left.set_yticks(shown, tokens, size=9)
    left.set(ylim=(len(tokens) - 0.5, -0.5), xlabel="weight p", title=f"Row of “{query}”")
    limit = np.abs(matrix).max()
    image = right.imshow(matrix, cmap=SIGNED_MAP, vmin=-limit, vmax=limit, aspect="auto")
    for i, j in np.argwhere(np.abs(matrix) > 0.1 * limit):
        strong = abs(matrix[i, j]) > 0.6 * limit
        text = f"{matrix[i, j]:+.2f}".replace("-", "−").replace("0.", ".")
        draw.label(right, j, i, text, size=8, color=style.PAPER if strong else style.INK)
    right.set_xticks(shown, tokens, rotation=90, size=9)
    right.set(yticks=[], xlabel="weight p of this key …", ylabel="… when the logit s of this key rises")
    right.set_title("Jacobian: + the weight grows, − it shrinks")
    figure.colorbar(image, ax=right, label="∂p / ∂s", shrink=0.7)
    return figure


def one_row_backwards(p, dp, ds, tokens, query):
    """From dp to ds in one row: the weights p, then dp against its weighted mean, then ds; all of shape (S,)."""
    x = np.arange(len(tokens))
    delta = float(p @ dp)
    figure, panels = style.subplots(3, 1, width=9.2, height=6.4, sharex=True)
    panels[0].bar(x, p, color=style.LOGITS)
    panels[0].set(ylabel="p", title=f"Row of “{query}”: what it looks at")
    _signed_bars(panels[1], x, dp - delta, bottom=delta)
    panels[1].axhline(delta, color=style.INK, lw=1.2, ls="--")
    panels[1].text(len(tokens) + 0.1, delta, f"delta = {delta:.2f}", ha="left", va="bottom", size=9.5, color=style.INK)
    panels[1].set(ylabel="dp", title="What more of each weight would be worth, measured from the mean delta")
    _signed_bars(panels[2], x, ds)
    panels[2].axhline(0, color=style.INK, lw=0.8)
    panels[2].set(xlim=(-0.9, len(tokens) + 2.6), ylabel="ds")
    panels[2].set_title("ds = p × (height of the bar above): they sum to zero")
    panels[2].set_xticks(x, tokens, rotation=90, size=9)
    panels[2].set_xlabel("key")
    return figure


def _signed_bars(axes, x, heights, bottom=0.0):
    up = np.asarray(heights) >= 0
    axes.bar(x[up], heights[up], bottom=bottom, color=style.QUERY)
    axes.bar(x[~up], heights[~up], bottom=bottom, color=style.OUTPUT, hatch="////", ec=style.PAPER)


def chain():
    """The forward chain and, below it, the backward chain."""
    figure, axes = style.drawing(9.6, 4.6, x=(-0.7, 12.4), y=(-0.8, 6.1))
    for name, x in (("q", 0.4), ("k", 2.2), ("s", 4.8), ("p", 7.7), ("v", 9.3), ("out", 11.5)):
        for y, text, dash in ((4.0, name, "-"), (1.0, f"d{name}", "--")):
            draw.rounded(axes, x - 0.42, y - 0.36, 0.84, 0.72, style.PAPER, ec=style.ROLES[name], lw=2, ls=dash)
            draw.label(axes, x, y, text, size=12, weight="bold")

    def arrow(start, stop, y, label="", offset=0.0, bend=0.0, x=None):
        sign = 1 if stop > start else -1
        apart = 0 if bend else 0.45 * sign  # from the middle of a box; a bent arrow begins above or below it
        lift = -0.4 * np.sign(bend * sign)
        colour, ends = style.INK if y > 2 else style.OUTPUT, ((start + apart, y + lift), (stop - apart, y + lift))
        draw.arrow(axes, *ends, colour, lw=1.6, connectionstyle=f"arc3,rad={bend}")
        draw.label(axes, (start + stop) / 2 if x is None else x, y + offset, label, size=10)

    arrow(2.2, 4.8, 4.0, "scale q kᵀ", 0.32)
    arrow(0.4, 4.8, 4.0, bend=-0.32)
    arrow(4.8, 7.7, 4.0, "softmax", 0.32)
    arrow(9.3, 11.5, 4.0, "p v", 0.32)
    arrow(7.7, 11.5, 4.0, bend=-0.32)
    arrow(11.5, 9.3, 1.0, "pᵀ dout", 0.32)
    arrow(11.5, 7.7, 1.0, "dp = dout vᵀ", 1.32, bend=0.32, x=9.6)
    arrow(7.7, 4.8, 1.0, "p ∘ (dp − delta)", 0.36)
    arrow(4.8, 2.2, 1.0, "scale dsᵀ q", 0.34)
    arrow(4.8, 0.4, 1.0, "scale ds k", -1.5, bend=-0.32, x=2.6)
    axes.text(-0.6, 5.8, "forward: read from left to right", size=10.5, weight="bold", va="center")
    axes.text(-0.6, 2.2, "backward: read from right to left", size=10.5, weight="bold", va="center", color=style.OUTPUT)
    return figure


def delta_two_ways(p_dp, o_do):
    """p∘dp (T, S) and out∘dout (T, H) side by side, and the sums of their rows."""
    T, S = p_dp.shape
    H = o_do.shape[1]
    figure, (table, small, sums) = style.subplots(1, 3, width=9.6, height=4.4, width_ratios=[S, H + 8, 20])
    for axes, values, name, side in ((table, p_dp, "p ∘ dp", "key"), (small, o_do, "out ∘ dout", "component")):
        limit = np.abs(values).max()
        axes.imshow(values, cmap=SIGNED_MAP, vmin=-limit, vmax=limit, aspect="auto")
        axes.set(xlabel=side, title=f"{name}: {values.size} numbers", yticks=range(0, T, 5))
    table.set_ylabel("query")
    rows = np.arange(T)
    sums.plot(p_dp.sum(axis=1), rows, "o", color=style.LOGITS, ms=9, label="sum of a row of p ∘ dp")
    sums.plot(o_do.sum(axis=1), rows, "x", color=style.INK, ms=6, label="sum of a row of out ∘ dout")
    sums.axvline(0, color=style.FAINT, lw=0.8)
    sums.set(ylim=(T - 0.5, -0.5), yticks=range(0, T, 5), xlabel="delta", title="The row sums agree")
    sums.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9)
    return figure


def which_gradient_is_wrong(errors):
    """A table of relative errors: {what was done: (error in dq, in dk, in dv)}."""
    figure, axes = style.drawing(8.6, 0.42 * len(errors) + 0.9, x=(-2.6, 3.0), y=(len(errors) - 0.4, -1.1))
    for row, (label, values) in enumerate(errors.items()):
        axes.text(-0.08, row, label, ha="right", va="center", size=10)
        for column, value in enumerate(values):
            colour, hatch, text = style.STATE, None, "right"
            if value >= 1e-6:
                colour, hatch, text = style.OUTPUT, "///", f"off by {value:.2g}"
            draw.box(axes, column + 0.04, row - 0.42, 0.92, 0.84, colour, hatch=hatch, ec=style.PAPER, lw=0)
            draw.label(axes, column + 0.5, row, text, size=9, bbox=draw.paper())
    for column, name in enumerate(("dq", "dk", "dv")):
        draw.label(axes, column + 0.5, -0.75, name, size=10.5, weight="bold")
    axes.set_title("Relative error of each gradient")
    return figure


def saved(parts, lengths, totals, T):
    """What the forward pass keeps for the backward pass.

    parts: {plan: {array: bytes}} at length T. lengths: sequence lengths; totals: {plan: bytes at each}.
    """
    figure, (bars, growth) = style.subplots(1, 2, width=9.6, height=3.9, width_ratios=[1.15, 1])
    largest = max(sum(arrays.values()) for arrays in parts.values()) / MIB
    for y, arrays in enumerate(reversed(parts.values())):
        left, small = 0.0, []
        for name, size in ((name, size / MIB) for name, size in arrays.items()):
            hatch, lw = "xx" if name == "p" else None, 1 if size / largest > 0.01 else 0
            bars.barh(y, size, 0.5, left=left, color=style.ROLES[name], hatch=hatch, ec=style.PAPER, lw=lw)
            if size / largest > 0.2:
                draw.label(bars, left + size / 2, y, name, size=10.5, bbox=draw.paper())
            else:
                small.append(name)
            left += size
        bars.text(0, y + 0.3, " + ".join(small), ha="left", va="bottom", size=9.5)
        bars.text(left + 0.4, y, f"{left:.3g} MiB", ha="left", va="center", size=9.5)
    bars.set_yticks(range(len(parts)), list(reversed(parts)))
    bars.set(xlim=(0, 1.25 * largest), ylim=(-0.5, len(parts) - 0.3), xlabel="MiB for one head")
    bars.set_title(f"Kept until the backward pass, T = S = {T}")
    totals = {plan: np.asarray(sizes) / MIB for plan, sizes in totals.items()}
    draw.lines(growth, lengths, totals, ((style.LOGITS, "s", "--"), (style.QUERY, "o", "-")), ms=5)
    draw.lengths(growth, lengths[::2])
    growth.set(yscale="log", xlabel="T = S", ylabel="MiB for one head", title="How it grows")
    growth.legend(loc="upper left")
    return figure


def bytes_of_each_array(memory):
    """What a `SlowMemory` counted for each array: bytes read and bytes written, in KiB."""
    names = [name for name in memory.arrays if memory.read[name] + memory.written[name]]
    figure, axes = style.subplots(width=8.8, height=0.34 * len(names) + 1.2)
    for y, name in enumerate(names):
        read, written = memory.read[name] / 1024, memory.written[name] / 1024
        axes.barh(y, read, color=style.STATE, height=0.62, label="read" if y == 0 else None)
        axes.barh(y, written, left=read, color=style.OUTPUT, hatch="////", ec=style.PAPER, height=0.62)
        times = memory.read[name] / memory.arrays[name].nbytes
        notes = ["read once" if times == 1 else f"read {times:.0f} ×"] if times else []
        notes += ["written once"] if written else []
        axes.text(read + written + 4, y, ", ".join(notes), va="center", size=9)
    axes.barh(0, 0, color=style.OUTPUT, hatch="////", ec=style.PAPER, label="written")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 1.3 * max(memory.read[name] + memory.written[name] for name in names) / 1024))
    axes.set(ylim=(len(names) - 0.5, -0.6), xlabel="KiB moved", title="What the backward pass moved")
    axes.legend(loc="lower right")
    return figure


def finite_differences(steps, curves):
    """Error of finite differences against the step: {name: relative error at each step}, on two log scales."""
    figure, axes = style.subplots(width=9.2, height=4.8)
    looks = ((style.QUERY, "o", "-"), (style.VALUE, "^", "-"), (style.KEY, "s", "-"), (style.OUTPUT, "x", "--"))
    draw.lines(axes, steps, curves, looks, ms=5, lw=1.6)
    axes.set(xscale="log", yscale="log", ylim=(1e-13, 1e5), xlabel="step", ylabel="relative error of the gradient")
    axes.set_title("Too small a step rounds, too large a step cuts corners")
    best = next(iter(curves.values()))
    lowest = int(np.argmin(best))
    said, place = f"best step, about {_short(steps[lowest], 0)}", (steps[lowest], best[lowest])
    line = {"arrowstyle": "-", "color": style.FAINT}
    axes.annotate(said, place, (18, -16), textcoords="offset points", size=9.5, arrowprops=line)
    axes.text(steps[-2], 3e-10, "rounding:\nerror ∝ 1 / step", size=9.5, ha="left", va="center")
    axes.text(steps[0], 3e-8, "truncation:\nerror ∝ step²", size=9.5, ha="right", va="center")
    axes.legend(loc="upper right", ncols=2, fontsize=9)
    return figure


def stored_lse(values, errors, bounds):
    """How far a stored lse moves the weights of its row.

    values: the lse of some rows. errors, bounds: {dtype: relative error of the weights at each of
    the values}, as measured and at most.
    """
    figure, axes = style.subplots(width=9.2, height=4.0)
    looks = ((style.QUERY, "o", "-"), (style.OUTPUT, "^", "--"))
    for (name, measured), (colour, marker, dash) in zip(errors.items(), looks, strict=True):
        axes.plot(values, 100 * measured, marker, color=colour, ms=3, alpha=0.55)
        axes.plot(values, 100 * bounds[name], dash, color=colour, lw=1.6)
        axes.plot([], [], dash, marker=marker, color=colour, ms=4, label=f"lse stored in {name}")
    edges = 2.0 ** np.arange(np.floor(np.log2(values[0])), np.ceil(np.log2(values[-1])) + 1)
    draw.lengths(axes, edges, [f"{edge:g}" for edge in edges])
    axes.set(yscale="log", ylim=(1e-3, 100), xlabel="lse of the row", ylabel="error of every weight, in %")
    draw.plain(axes.yaxis)
    axes.set_title("One dot is one row; the line is the most it can be")
    axes.legend(loc="upper left")
    return figure


def lse_rounding(errors, tolerance=1e-2):
    """Relative error of dq: {dtype: {spread of the logits: (with float32 lse, with lse in that dtype)}}."""
    figure, axes = style.subplots(1, len(errors), width=9.2, height=3.9, sharey=True)
    sides = ((-0.19, style.STATE, None, "lse in float32"), (0.19, style.OUTPUT, "////", "lse in the 16-bit dtype"))
    for panel, (dtype, groups) in zip(axes, errors.items(), strict=True):
        x = np.arange(len(groups))
        for (shift, colour, hatch, label), values in zip(sides, zip(*groups.values(), strict=True), strict=True):
            panel.bar(x + shift, values, 0.34, color=colour, hatch=hatch, ec=style.PAPER, label=label)
            for place, value in zip(x + shift, values, strict=True):
                text = {"va": "bottom", "size": 8.5, "bbox": draw.paper()}
                draw.label(panel, place, 1.15 * value, _short(value, 1), **text)
        panel.axhline(tolerance, color=style.INK, ls="--", lw=1)
        panel.set_xticks(x, list(groups))
        panel.set(yscale="log", ylim=(1e-4, 1), xlabel="size of the logits", title=f"q, k, v, out, do in {dtype}")
    axes[0].text(-0.45, 1.1 * tolerance, f"a tolerance of {tolerance:g}", ha="left", va="bottom", size=9)
    axes[0].set_ylabel("relative error of dq")
    axes[0].legend(loc="upper left", fontsize=9)
    return figure


def _short(value, digits):
    """1.2e-3 instead of 1.2e-03."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


FIGURES = {"06-chain.png": chain}
