"""Pictures of notebook 05: what one program of the forward kernel reads, keeps and writes."""

import numpy as np
from matplotlib.colors import ListedColormap

from helpers.plots import draw, style


def one_program():
    """What one program holds on chip, what streams past it, and what it writes at the end."""
    figure, axes = style.subplots(width=10, height=4.6)
    style.bare(axes)
    axes.set(xlim=(0, 20), ylim=(0, 9.2))
    for x, title in ((0.3, "large memory"), (8.5, "on chip, while program i runs"), (17.1, "large memory")):
        axes.text(x, 8.75, title, size=11, weight="bold", va="center")
    _stack(axes, 0.4, 4, 1.5, "q", style.QUERY, highlighted=1, note="read once")
    _stack(axes, 2.8, 5, 1.5, "k", style.KEY, highlighted=2, note="streams by")
    _stack(axes, 5.2, 5, 1.5, "v", style.VALUE, highlighted=2, note="streams by")

    draw.rounded(axes, 8.5, 0.4, 7.4, 8.0, "#EEF1F4", corner=0.25, ec=style.INK, lw=1.5)
    draw.named(axes, 8.9, 6.6, 2.0, 1.3, style.QUERY, "q", "block_q × H")
    draw.named(axes, 11.2, 6.6, 2.0, 1.3, style.KEY, "k tile j", "block_k × H", hatch="//")
    draw.named(axes, 13.5, 6.6, 2.0, 1.3, style.VALUE, "v tile j", "block_k × H", hatch="\\\\")
    draw.named(axes, 8.9, 4.2, 6.6, 1.5, style.LOGITS, "s, then p", "block_q × block_k, replaced for each j")
    draw.named(axes, 8.9, 0.8, 1.15, 2.2, style.STATE, "m", "block_q")
    draw.named(axes, 10.3, 0.8, 1.15, 2.2, style.STATE, "l", "block_q")
    draw.named(axes, 11.7, 0.8, 3.8, 2.2, style.STATE, "acc", "block_q × H")
    draw.label(axes, 12.2, 3.35, "the state: stays for the whole loop", size=9)
    draw.label(axes, 12.2, 6.12, "while tile j is used, tile j + 1 may be on its way", size=9)

    _stack(axes, 17.0, 4, 1.2, "out", style.OUTPUT, highlighted=1, note="written\nonce")
    _stack(axes, 18.8, 4, 0.5, "lse", style.STATE, highlighted=1, note="written\nonce")
    draw.arrow(axes, (6.9, 4.9), (8.4, 4.9), size=16, lw=1.6)
    draw.arrow(axes, (16.0, 4.9), (16.9, 4.9), size=16, lw=1.6)
    return figure


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
    figure, axes = style.subplots(width=8, height=2.9)
    style.bare(axes)
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
    axes.set(xlim=(-1.9, query_heads), ylim=(0.2, 2.75), title="Which keys each query head reads")
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


def _stack(axes, x, count, width, name, colour, highlighted, note):
    """An array in memory as a column of tiles, one of them in full colour."""
    height = 6.2 / count
    for number in range(count):
        alpha = 0.95 if number == highlighted else 0.28
        draw.box(axes, x, 7.3 - (number + 1) * height, width, height, colour, alpha=alpha, ec="white", lw=2)
    draw.label(axes, x + width / 2, 7.7, name, weight="bold")
    draw.label(axes, x + width / 2, 0.95, note, va="top", size=9, linespacing=1.1)


FIGURES = {"05-one-program.png": one_program}
