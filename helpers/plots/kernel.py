"""Pictures of notebook 05: which tiles programs of the forward kernel read, and how exact out is."""

import numpy as np
from matplotlib.colors import ListedColormap

from helpers.plots import draw, style


def tiles_visited(panels, block_q, block_k):
    """Which key tiles each program read.

    panels: {title: (reads, seen)}; reads (programs, S) says how often a program read each key, and
    seen (T, S) which pairs the mask shows.
    """
    figure, axes = style.subplots(1, len(panels), width=4.9 * len(panels), height=4.6, squeeze=False)
    looks = {
        "read, every pair visible": (style.KEY, None),
        "read, some pairs masked": ("#F6D9A6", "//"),
        "never read": (style.SKIPPED, None),
    }
    whole, partial, never = looks.values()
    for panel, (title, (reads, seen)) in zip(axes[0], panels.items(), strict=True):
        programs, S = reads.shape
        visited = reads[:, ::block_k] > 0
        for i, j in np.ndindex(programs, S // block_k):
            tile = seen[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            colour, hatch = never if not visited[i, j] else whole if tile.all() else partial
            draw.box(panel, j, i, 1, 1, colour, ec=style.PAPER, hatch=hatch, lw=1.5)
        # The edges of what the mask shows, row by row, in units of tiles.
        rows = np.arange(seen.shape[0])
        first, last = seen.argmax(axis=1), seen.shape[1] - seen[:, ::-1].argmax(axis=1)
        y = np.repeat(np.append(rows, len(rows)), 2)[1:-1] / block_q
        for edge in (first, last):
            panel.plot(np.repeat(edge, 2) / block_k, y, color=style.INK, lw=1.6)
        panel.set(xlim=(0, S // block_k), ylim=(programs, 0))
        panel.set_xticks(np.arange(S // block_k) + 0.5, range(S // block_k))
        panel.set_yticks(np.arange(programs) + 0.5, range(programs))
        panel.tick_params(length=0)
        panel.set(xlabel=f"key tile j ({block_k} keys each)", ylabel=f"program i ({block_q} queries each)")
        panel.set_title(f"{title}: {int(visited.sum())} of {visited.size} tiles read")
    draw.below(figure, handles=draw.keys(looks))
    return figure


def lanes(masks, colours=(style.QUERY, style.KEY)):
    """Which elements of padded tiles are really loaded. masks: {title: boolean array (rows, H')}."""
    figure, axes = style.subplots(1, len(masks), width=4.9 * len(masks), height=3.4)
    for panel, (title, mask), colour in zip(axes, masks.items(), colours, strict=True):
        rows, columns = mask.shape
        panel.pcolormesh(mask, cmap=ListedColormap([style.SKIPPED, colour]), vmin=0, vmax=1, ec=style.PAPER, lw=0.5)
        height, width = mask.any(axis=1).sum(), mask.any(axis=0).sum()
        draw.label(panel, width / 2, height / 2, "loaded", size=9, bbox=draw.paper())
        if height < rows:
            draw.label(panel, width / 2, (height + rows) / 2, "past the end", size=9)
        if width < columns:
            draw.label(panel, (width + columns) / 2, rows / 2, "past the end", rotation=90, size=9)
        panel.set(xlim=(0, columns), ylim=(rows, 0), xlabel="position in the head", ylabel="row of the tile")
        panel.set_title(title)
    return figure


def shared_heads(block_of, query_heads, key_heads):
    """Lines from each query head to the key/value head that it reads.

    block_of: {query head: key/value head}, as the programs of a kernel were seen to use them.
    """
    figure, axes = style.drawing(8, 2.9, x=(-1.9, query_heads), y=(0.2, 2.75), title="Which keys each query head reads")
    spread = query_heads / key_heads
    centre = lambda head: (head + 0.5) * spread
    for n, head in sorted(block_of.items()):
        axes.plot([n + 0.5, centre(head)], [2.0, 1.0], color=style.FAINT, lw=1.6, zorder=0)
    for n in range(query_heads):
        draw.named(axes, n + 0.12, 2.0, 0.76, 0.62, style.QUERY, f"n = {n}", size=9)
    for head in range(key_heads):
        draw.named(axes, centre(head) - 0.6, 0.38, 1.2, 0.62, style.KEY, f"head {head}", size=9, hatch="//")
    axes.text(-0.15, 2.31, "query heads", ha="right", va="center")
    axes.text(-0.15, 0.69, "key/value heads", ha="right", va="center")
    return figure


def error_by_dtype(errors):
    """Bars on a logarithmic axis. errors: {dtype name: {implementation name: relative error}}."""
    figure, axes = style.subplots(width=8, height=3.6)
    implementations = {name: [row[name] for row in errors.values()] for name in next(iter(errors.values()))}
    looks = (style.OUTPUT, ""), (style.SKIPPED, "//"), (style.STATE, "..")
    draw.grouped_bars(axes, errors, implementations, looks, 0.8 / len(implementations), 0.92)
    axes.set(yscale="log", ylim=(1e-8, 1e-1), ylabel="relative error of out", title="Error against the float64 oracle")
    axes.legend(loc="upper left", ncols=len(implementations))
    return figure
