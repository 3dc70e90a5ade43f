"""Pictures of notebooks 16 and 17: which tiles need a mask, which thread owns what, which lane holds what."""

import numpy as np
from matplotlib.patches import Patch, Rectangle

from helpers.attention.masking import Band, tile_kind
from helpers.plots import draw, style

LOOKS = {"full": {"fc": style.VALUE}, "partial": {"fc": style.KEY, "hatch": "//"}, "skipped": {"fc": style.SKIPPED}}


def tile_kinds(T, S, block_q, block_k):
    """Tiles of a causal table of logits that are full, partial or skipped, over whole tiles of queries."""
    rows, columns = -(-T // block_q), -(-S // block_k)
    figure, axes = style.drawing(7, 4.2, x=(0, columns * block_k), y=(rows * block_q + 22, 0))
    counts = dict.fromkeys(LOOKS, 0)
    for i, j in np.ndindex(rows, columns):
        y, x = i * block_q, j * block_k
        kind = tile_kind(range(y, y + block_q), range(x, x + block_k), Band(None, 0), rows * block_q, S)
        counts[kind] += 1
        axes.add_patch(Rectangle((x, y), block_k, block_q, ec=style.PAPER, lw=1.5, **LOOKS[kind]))
    end = min(rows * block_q, columns * block_k)
    axes.plot([0, end], [0, end], color=style.INK, lw=1.2)
    axes.plot([S, S], [0, rows * block_q], color=style.OUTPUT, lw=1.2, ls="--")
    axes.text(S, rows * block_q + 4, "the last key", color=style.OUTPUT, ha="center", va="top", size=9)
    axes.set_title(f"Causal tiles of {block_q} queries (down) and {block_k} keys (across)")
    handles = [Patch(label=f"{kind}: {counts[kind]}", **look) for kind, look in LOOKS.items()]
    figure.legend(handles=handles, loc="outside right upper")
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    figure.alt = f"A table cut into tiles under a causal mask: {told}."
    return figure


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
