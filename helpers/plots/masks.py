"""Pictures of notebook 18: a row of logits step by step, kinds of tiles, the soft cap."""

import numpy as np

from helpers.plots import draw, style

LOOKS = {"hidden": (style.SKIPPED, ".."), "partial": (style.LOGITS, "//"), "full": (style.STATE, None)}  # by kind


def row_by_steps(steps):
    """One row of logits after each step, and its weights last. steps: {name: numbers, one a key, -inf where hidden}."""
    figure, panels = style.subplots(1, len(steps), width=10, height=2.7)
    for number, (axes, (name, values)) in enumerate(zip(panels, steps.items(), strict=True)):
        values = np.asarray(values, float)
        places, is_last = np.arange(len(values)), number == len(steps) - 1
        finite = np.isfinite(values)
        colour = style.OUTPUT if is_last else style.LOGITS
        axes.bar(places[finite], values[finite], fc=colour, ec=style.INK, width=0.7)
        for place, value in zip(places, values, strict=True):
            text = f"{value:.2f}".rstrip("0").rstrip(".") if np.isfinite(value) else "−∞"
            draw.label(axes, place, max(value, 0) if np.isfinite(value) else 0, text, va="bottom", size=9)
        axes.axhline(0, color=style.FAINT, lw=0.8)
        span = (-0.6, len(values) - 0.4)
        axes.set(title=name, xlabel="key", xlim=span, ylim=(0, 1) if is_last else (-0.4, 5))
        axes.set_xticks(places, [*range(4), "sink"][: len(values)])
        if number == 0 or is_last:
            axes.set_ylabel("weight" if is_last else "logit")
    told = "; ".join(f"{name}: {', '.join(f'{value:.2f}' for value in values)}" for name, values in steps.items())
    figure.alt = f"Bars of one row of logits after each step, and of the weights at the end. {told}."
    return figure


def kinds_of_tiles(tables, block):
    """Tables of kinds, {title: (kinds, ends of documents or ())}, tiles of block queries and keys."""
    figure, panels = style.subplots(1, len(tables), width=4.6 * len(tables), height=4.4, squeeze=False)
    told = []
    for axes, (title, (kinds, ends)) in zip(panels[0], tables.items(), strict=True):
        rows, columns = kinds.shape
        for row, column in np.ndindex(rows, columns):
            colour, hatch = list(LOOKS.values())[kinds[row, column]]
            draw.box(axes, column, row, 1, 1, colour, hatch=hatch, ec=style.PAPER, lw=1)
        for end in ends:
            axes.axhline(end / block, color=style.INK, lw=1.2, ls="--")
            axes.axvline(end / block, color=style.INK, lw=1.2, ls="--")
        ticks = np.arange(0, rows + 1, 2)
        axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", title=title, xlabel="keys", ylabel="queries")
        axes.set_xticks(ticks, ticks * block)
        axes.set_yticks(ticks, ticks * block)
        counts = ", ".join(f"{(kinds == kind).sum()} {name}" for kind, name in enumerate(LOOKS))
        told.append(f"{title}: of {kinds.size} tiles, {counts}.")
    draw.below(figure, handles=draw.keys(LOOKS, ec=style.PAPER))
    figure.alt = f"Tables of tiles, queries down and keys across, coloured by kind. {' '.join(told)}"
    return figure


def soft_cap(cap):
    """The capped logit against the logit, and the derivative."""
    figure, (left, right) = style.subplots(1, 2, width=9.5, height=3.1, sharex=True)
    s = np.linspace(-3 * cap, 3 * cap, 301)
    left.plot(s, np.clip(s, -cap, cap), color=style.FAINT, ls="--", label="cut off at the cap")
    left.plot(s, cap * np.tanh(s / cap), color=style.LOGITS, label="soft cap")
    right.plot(s, 1 - np.tanh(s / cap) ** 2, color=style.LOGITS, label="derivative of the soft cap")
    left.set(title=f"Logits with a cap of {cap}", xlabel="logit", ylabel="capped logit")
    right.set(title="What of a gradient gets through", xlabel="logit", ylabel="derivative")
    left.legend()
    figure.alt = (
        f"Two curves. Capped logits follow the logits near 0 and level off at plus and minus {cap}. "
        f"The derivative is 1 at 0 and falls towards 0 beyond the cap on both sides."
    )
    return figure
