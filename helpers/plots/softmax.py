"""Pictures of notebook 02: the range of a dtype, the running state, the tree of merges."""

import itertools

import numpy as np

from helpers.plots import draw, style


def exponent_range(limits):
    """For which logits e^s is a number that a dtype can hold.

    limits: {name of the dtype: (lowest, highest)}; below lowest e^s is 0, above highest it is inf.
    """
    figure, axes = style.subplots(width=8.5, height=0.62 * len(limits) + 1.5)
    edge = 1.18 * max(abs(limit) for pair in limits.values() for limit in pair)
    for y, (low, high) in enumerate(limits.values()):
        axes.barh(y, low + edge, left=-edge, color=style.SKIPPED, height=0.6)
        axes.barh(y, high - low, left=low, color=style.STATE, height=0.6)
        axes.barh(y, edge - high, left=high, color=style.OUTPUT, height=0.6, hatch="///", ec=style.PAPER)
        for limit, x, side in ((low, low + 2, "left"), (high, high - 2, "right")):
            text = f"{limit:.1f}".replace("-", "−")
            axes.text(x, y, text, ha=side, va="center", size=8.5, bbox=draw.paper())
    top = len(limits) - 0.45
    for x, side, becomes in (
        (-edge, "left", "becomes 0"),
        (0, "center", "can be stored"),
        (edge, "right", "becomes inf"),
    ):
        axes.text(x, top, f"$e^s$ {becomes}", ha=side, size=9)
    axes.set_yticks(range(len(limits)), list(limits))
    axes.plot([0, 0], [-0.5, top - 0.1], color=style.INK, lw=0.8)
    axes.set(xlim=(-edge, edge), ylim=(-0.5, len(limits) - 0.1), xlabel="logit s")
    axes.set_title("Which logits survive the exponential")
    said = (f"{name}: from {low:.1f} to {high:.1f}" for name, (low, high) in limits.items())
    figure.alt = f"For which logits s the exponential of s can be stored. {'; '.join(said)}."
    return figure


def passes(traces, labels):
    """Which logit is read at each step.

    traces: {name of the algorithm: positions in the order in which they were read}.
    labels: {name of the algorithm: what each pass over the row computes, in order}.
    """
    longest = max(map(len, traces.values()))
    figure, axes = style.subplots(1, len(traces), width=9, height=2.7, sharey=True)
    for panel, (name, positions) in zip(axes, traces.items(), strict=True):
        size = max(positions) + 1
        panel.plot(positions, "o", color=style.KEY, ms=3.5)
        for number, label in enumerate(labels[name]):
            panel.axvline(number * size - 0.5, color=style.FAINT, lw=0.8, ls=":")
            panel.text((number + 0.5) * size, size + 1, label, ha="center", va="bottom", size=9, color=style.INK)
        panel.set_title(f"{name}: {len(positions)} reads", pad=8)
        panel.set(xlim=(-2, longest + 1), ylim=(-1, size + 4.5), yticks=[0, size - 1], xlabel="reads so far")
    axes[0].set_ylabel("position in the row")
    return figure


def running_state(tokens, history, query):
    """The running m and l as the logits of one row arrive.

    history: one (s, m, alpha, l) for each token. query: the word whose row this is.
    """
    s, m, alpha, l = (np.array(column, float) for column in zip(*history, strict=True))
    steps = np.arange(len(tokens))
    raised = np.flatnonzero(alpha < 1)
    figure, (above, below) = style.subplots(2, 1, width=9, height=5, sharex=True)

    above.plot(steps, s, "o", color=style.LOGITS, ms=6, label="logit s", zorder=3)
    above.step(np.append(steps, len(steps)) - 0.5, np.append(m, m[-1]), where="post", color=style.STATE, label="m")
    above.set(ylim=(s.min() - 0.8, m.max() + 1.0), ylabel="logit")
    above.set_title(f"Row of “{query}”: the largest logit so far, m")
    above.legend(loc="upper left", ncols=2, bbox_to_anchor=(0.13, 1.02))

    # Each key first multiplies the old sum by alpha, then adds its own exponential.
    scaled = alpha * np.append(0, l[:-1])
    x = np.column_stack([steps - 0.5, steps - 0.15]).reshape(-1)
    path = np.column_stack([scaled, l]).reshape(-1)
    below.step(np.append(x, len(steps) - 0.5), np.append(path, l[-1]), where="post", color=style.STATE)
    below.set(ylim=(0, l.max() * 1.6), ylabel="sum ℓ")
    below.set_title("The sum so far, ℓ, in units of $e^m$: first × α, then + $e^{s - m}$")
    below.set_xticks(steps, tokens, rotation=90, size=9)
    below.set_xlabel("key, in order of arrival")
    for j in raised:
        for panel in (above, below):
            panel.axvline(j - 0.5, color=style.OUTPUT, lw=1.1, ls="--", zorder=0)
        # Upright, so that the factors of neighbouring keys do not meet.
        factor = f"× {alpha[j]:.2g}"
        below.text(j - 0.42, 1.57 * l.max(), factor, rotation=90, ha="left", va="top", color=style.OUTPUT, size=9)
    return figure


def hand_case():
    """The state of the hand case after each of its two tiles."""
    figure, axes = style.drawing(9.5, 3.1, x=(-0.1, 10.1), y=(-0.25, 2.3))
    for x, width, name, lines in (
        (0.0, 1.55, "state before", ("m = −∞", "ℓ = 0", "acc = 0")),
        (3.1, 2.65, "after tile 1", ("m = ln 3", "ℓ = 1/3 + 1 = 4/3", "acc = 1/3·1 + 1·2 = 7/3")),
        (7.0, 3.0, "after tile 2", ("m = ln 8", "ℓ = 3/8·4/3 + 5/4 = 7/4", "acc = 3/8·7/3 + 19/4 = 45/8")),
    ):
        draw.rounded(axes, x, 0.75, width, 1.15, style.PAPER, corner=0.1, ec=style.STATE, lw=1.8)
        draw.label(axes, x + width / 2, 2.03, name, va="bottom", weight="bold", size=10)
        for row, line in enumerate(lines):
            axes.text(x + 0.12, 1.65 - 0.32 * row, line, va="center", size=10)
    look = {"size": 10, "zorder": 3}
    for x, to, label, tile in (
        (1.6, 3.05, "α = 0", "tile 1\ns = ln 1, ln 3\nv = 1, 2"),
        (5.8, 6.95, "α = 3/8", "tile 2\ns = ln 2, ln 8\nv = 3, 4"),
    ):
        middle = (x + to) / 2
        draw.arrow(axes, (x, 1.32), (to, 1.32), lw=1.4, **look)
        draw.label(axes, middle, 1.42, label, va="bottom", size=10.5, color=style.OUTPUT, weight="bold")
        draw.label(axes, middle, 0.18, tile, size=9.5, linespacing=1.35)
        draw.arrow(axes, (middle, 0.6), (middle, 1.28), style.KEY, lw=1.8, **look)
    draw.label(axes, 8.5, 0.18, "out = acc / ℓ = 45/14\nlse = m + log ℓ = ln 14", size=10.5)
    draw.arrow(axes, (8.5, 0.72), (8.5, 0.44), style.OUTPUT, lw=1.8, **look)
    return figure


def merge_tree(tokens, levels):
    """A balanced tree of merges.

    levels: lists of states (m, l), from the leaves, one for each token, to the root; each list is
    half as long as the one before.
    """
    leaves = len(levels[0])
    figure, axes = style.drawing(8.8, 0.85 * len(levels) + 1.0, x=(-0.05, leaves + 0.05), y=(-0.75, len(levels) - 0.55))
    centre = lambda height, index: (index + 0.5) * leaves / len(levels[height])
    for height, level in enumerate(levels):
        for index, (m, l) in enumerate(level):
            x = centre(height, index)
            for child in (2 * index, 2 * index + 1) if height else ():
                m_child, below = levels[height - 1][child][0], centre(height - 1, child)
                colour, dash = (style.FAINT, "-") if m_child == m else (style.OUTPUT, "--")
                axes.plot([below, x], [height - 0.7, height - 0.3], color=colour, lw=1.4, ls=dash, zorder=0)
                if m_child != m:
                    words = {"size": 8.5, "color": style.OUTPUT, "bbox": draw.paper(1)}
                    draw.label(axes, (below + x) / 2, height - 0.5, f"×{np.exp(m_child - m):.2g}", **words)
            colour = style.OUTPUT if len(level) == 1 else style.STATE
            draw.rounded(axes, x - 0.44, height - 0.29, 0.88, 0.58, style.PAPER, corner=0.1, ec=colour, lw=1.8)
            draw.label(axes, x, height + 0.12, f"m {m:.2f}".replace("-", "−"), size=9)
            draw.label(axes, x, height - 0.13, f"ℓ {l:.2f}", size=9)
    for index, token in enumerate(tokens):
        draw.label(axes, centre(0, index), -0.42, token, va="top", size=10, weight="bold")
    axes.set_title("One box is one state; a dashed part is multiplied by the factor on its line")
    return figure


def survival(shifts, panels):
    """Where each way to choose the reference gives the right lse.

    shifts: the values on the horizontal axis. panels: {axis label: {name: booleans, one for each
    shift, True where right}}.
    """
    figure, axes = style.subplots(1, len(panels), width=9, height=3, sharey=True)
    step = shifts[1] - shifts[0]
    axes[0].set_title("Where the lse of the row is right")
    for panel, (label, rows) in zip(axes, panels.items(), strict=True):
        for y, right in enumerate(reversed(rows.values())):
            for shift, fine in zip(shifts, right, strict=True):
                edge, hatch = (style.STATE, None) if fine else (style.PAPER, "//")
                colour = style.STATE if fine else style.OUTPUT
                draw.box(panel, shift - step / 2, y - 0.32, step, 0.64, colour, ec=edge, hatch=hatch, lw=0)
            for start, stop, fine in _runs(right):
                middle, text = (shifts[start] + shifts[stop - 1]) / 2, "right" if fine else "wrong"
                draw.label(panel, middle, y, text, size=9, bbox=draw.paper())
        panel.set_yticks(range(len(rows)), list(reversed(rows)))
        panel.set(xlim=(shifts[0] - step / 2, shifts[-1] + step / 2), ylim=(-0.55, len(rows) - 0.45), xlabel=label)
        panel.axvline(0, color=style.INK, lw=0.8)
    return figure


def _runs(flags):
    """(start, stop, flag) of each run of equal flags."""
    edges = [0, *(np.flatnonzero(np.diff(np.asarray(flags, int))) + 1), len(flags)]
    return [(start, stop, bool(flags[start])) for start, stop in itertools.pairwise(edges)]


FIGURES = {"02-hand-case.png": hand_case}
