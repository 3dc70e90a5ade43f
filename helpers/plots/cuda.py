"""Pictures of notebook 17: which thread owns what on each rung, and which lane holds what of a product."""

import numpy as np

from helpers.plots import draw, style


def fragment(lanes, registers):
    """A tile whose cells name the lane that holds them, and its register. lanes, registers: (rows, columns)."""
    rows, columns = lanes.shape
    figure, axes = style.subplots(width=0.5 * columns + 1.2, height=0.3 * rows + 0.8)
    axes.imshow(registers, cmap="Pastel1", aspect="auto", vmin=0, vmax=8)
    for row, column in np.ndindex(rows, columns):
        draw.label(axes, column, row, lanes[row, column], size=8)
    axes.set(xlabel="column", ylabel="row", title="The lane that holds each element; a colour is a register")
    figure.alt = (
        f"A tile of {rows} rows and {columns} columns. In its first row stand the lanes "
        f"{', '.join(map(str, lanes[0]))}; in its second row {', '.join(map(str, lanes[1]))}."
    )
    return figure


def owners(rungs):
    """out, a row a query, in twenty colours of the thread that computes it. rungs: {title: (queries, dimensions)}."""
    figure, axes = style.subplots(columns=len(rungs), width=10, height=3.2)
    for one, (title, threads) in zip(np.ravel(axes), rungs.items(), strict=True):
        one.imshow(threads % 20, cmap="tab20", aspect="auto", vmin=0, vmax=19)
        one.set(xlabel="dimension", ylabel="query", title=title)
    counts = (f"{title}: {len(np.unique(threads))} threads" for title, threads in rungs.items())
    figure.alt = f"Which thread computes each element of a tile of out. {'; '.join(counts)}."
    return figure
