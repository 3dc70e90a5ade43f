"""Pictures of notebook 03: tiles, what is on chip while they are visited, and the bytes they move."""

import itertools

import numpy as np
from matplotlib.patches import Rectangle

from helpers.attention.masking import NO_BAND, tile_kind, visible
from helpers.instruments import cost
from helpers.plots import draw, style

KIB = 1024
MIB = 1024**2


def _box(axes, x, y, width, height, colour, *, filled=True, hatch=None, linewidth=1.4, linestyle="-"):
    draw.box(
        axes,
        x,
        y,
        width,
        height,
        colour if filled else style.PAPER,
        ec=style.INK if filled else colour,
        hatch=hatch,
        lw=linewidth,
        ls=linestyle,
    )


def on_chip():
    """Slow memory with its arrays cut into tiles, and the few tiles that are on chip at one moment."""
    figure, axes = style.subplots(width=10, height=3.9)
    style.bare(axes)
    _box(axes, 0, 0, 5.4, 5.2, style.FAINT, filled=False)
    _box(axes, 6.6, 0, 5.2, 5.2, style.FAINT, filled=False)
    axes.text(0.15, 5.32, "slow memory: large", weight="bold")
    axes.text(6.75, 5.32, "on chip: fast and small", weight="bold")

    columns = [("q", style.QUERY, 4, 1), ("k", style.KEY, 5, 2), ("v", style.VALUE, 5, 2), ("out", style.OUTPUT, 4, 1)]
    for column, (name, colour, tiles, current) in enumerate(columns):
        x = 0.4 + 1.25 * column
        axes.text(x + 0.4, 4.75, name, ha="center", color=colour, weight="bold", size=12)
        for tile in range(tiles):
            filled = tile == current or (name == "out" and tile < current)
            hatch = ".." if name == "out" and tile < current else None
            if name == "out" and tile == current:
                filled = False
            _box(axes, x, 3.85 - 0.8 * tile, 0.8, 0.72, colour, filled=filled, hatch=hatch)
    draw.label(axes, 4.55, 4.21, "done", color=style.INK, size=9, bbox=draw.paper())

    _box(axes, 6.9, 2.55, 0.9, 0.9, style.QUERY)
    draw.label(axes, 7.35, 3.0, "q tile", color="white")
    _box(axes, 8.1, 3.75, 1.3, 0.8, style.KEY)
    draw.label(axes, 8.75, 4.15, "k tile")
    _box(axes, 8.1, 2.55, 1.3, 0.9, style.LOGITS)
    draw.label(axes, 8.75, 3.0, "logits s,\nthen p", linespacing=1.15)
    _box(axes, 8.1, 1.45, 1.3, 0.8, style.VALUE)
    draw.label(axes, 8.75, 1.85, "v tile", color="white")
    for x, width, name in ((9.9, 0.36, "m"), (10.32, 0.36, "l"), (10.74, 0.86, "acc")):
        _box(axes, x, 2.55, width, 0.9, style.STATE)
        draw.label(axes, x + width / 2, 3.0, name, weight="bold")
    axes.text(10.75, 3.62, "the state", ha="center")
    draw.label(axes, 9.2, 0.6, "Keys and values come and go.\nThe q tile and its state stay.", size=10)

    def arrow(start, end, colour):
        draw.arrow(axes, start, end, colour, size=10, lw=1.8, zorder=3)

    arrow((5.45, 3.0), (6.85, 3.0), style.QUERY)
    arrow((5.45, 4.15), (8.05, 4.15), style.KEY)
    arrow((5.45, 1.85), (8.05, 1.85), style.VALUE)
    arrow((9.45, 3.0), (9.85, 3.0), style.INK)
    arrow((10.75, 2.5), (10.75, 1.75), style.OUTPUT)
    axes.text(10.75, 1.62, "at the end:\nout, lse", ha="center", va="top", color=style.OUTPUT, size=10)
    axes.set(xlim=(-0.05, 11.85), ylim=(-0.1, 5.7))
    return figure


def _tile_table(axes, T, S, block_q, block_k, current=None, done=()):
    """The T x S table cut into tiles: the current one filled, those that are done hatched."""
    for q_start in range(0, T, block_q):
        for k_start in range(0, S, block_k):
            tile = (q_start, k_start)
            colour = style.LOGITS if tile == current else style.SKIPPED
            width, height = min(block_k, S - k_start), min(block_q, T - q_start)
            draw.box(
                axes,
                k_start,
                q_start,
                width,
                height,
                colour if tile == current else style.PAPER,
                ec=style.INK if tile == current else style.FAINT,
                hatch="///" if tile in done else None,
                lw=1,
            )
    axes.set(aspect="auto", xlim=(-0.25 * block_k, S + 0.1), ylim=(T + 0.1, -0.4 * block_q))
    style.bare(axes)


def film_strip(frames, T, S, block_q, block_k):
    """One frame for each visited tile. frames: (q_start, k_start, state after the visit), in order.

    Each frame shows the table with the current tile, and below it the numbers of the state.
    """
    columns = len(range(0, S, block_k))
    rows = len(frames) // columns
    figure, axes = style.subplots(
        2 * rows, columns, width=2.2 * columns, height=2.75 * rows, height_ratios=[1, 1.45] * rows
    )
    largest = max(np.abs(state.acc).max() for *_, state in frames)
    for number, (q_start, k_start, state) in enumerate(frames):
        row, column = divmod(number, columns)
        table, values = axes[2 * row, column], axes[2 * row + 1, column]
        _tile_table(table, T, S, block_q, block_k, (q_start, k_start), {frame[:2] for frame in frames[:number]})
        table.add_patch(Rectangle((-0.22 * block_k, q_start), 0.14 * block_k, block_q, color=style.QUERY))
        table.add_patch(Rectangle((k_start, -0.36 * block_q), block_k, 0.22 * block_q, color=style.KEY))
        table.set_title(
            f"{number + 1}: q {q_start}–{q_start + len(state.m) - 1}, k {k_start}–{min(k_start + block_k, S) - 1}",
            size=10,
        )
        _state(values, state, largest)
    figure.suptitle(
        "Blue: q tile. Orange: k tile. Hatched: done. Below: the state after it; acc red above zero, blue below.",
        x=0.01,
        ha="left",
        size=10,
    )
    return figure


def _state(axes, state, largest):
    """m and l as numbers, acc as coloured cells, one line for each query of the tile."""
    style.bare(axes)
    rows, H = state.acc.shape
    for row in range(rows):
        draw.label(axes, 0.45, row, f"{round(state.m[row], 1) + 0:.1f}", size=9)
        draw.label(axes, 1.5, row, f"{state.l[row]:.1f}", size=9)
    axes.imshow(
        state.acc,
        cmap="RdBu_r",
        vmin=-largest,
        vmax=largest,
        extent=(2.2, 2.2 + 0.62 * H, rows - 0.5, -0.5),
        aspect="auto",
    )
    for x, name in ((0.45, "m"), (1.5, "l"), (2.2 + 0.31 * H, "acc")):
        axes.text(x, -0.68, name, ha="center", va="bottom", weight="bold", color=style.INK, size=9)
    draw.box(axes, -0.1, -0.5, 2.15, rows, style.STATE, alpha=0.3, ec="none", zorder=0)
    axes.set(xlim=(-0.15, 2.25 + 0.62 * H), ylim=(rows - 0.4, -1.5))


READ_COLOURS = {"q": style.QUERY, "k": style.KEY, "v": style.VALUE, "out": style.OUTPUT}


def traffic_by_array(memories):
    """One bar for each `SlowMemory` in a dict by name: bytes read (plain) and written (hatched), by array."""
    figure, axes = style.subplots(width=8.6, height=max(2.5, 1.2 + 0.5 * len(memories)))
    seen = {}
    widest = max(memory.bytes_moved for memory in memories.values())
    said = []
    for y, (label, memory) in enumerate(memories.items()):
        left, parts = 0, []
        for name in memory.arrays:
            for count, hatch in ((memory.read[name], None), (memory.written[name], "///")):
                if not count:
                    continue
                colour = READ_COLOURS.get(name, style.STATE)
                seen[name if name in READ_COLOURS else "m, l, lse"] = colour
                width = count / KIB
                axes.barh(y, width, left=left, height=0.62, color=colour, hatch=hatch, ec=style.PAPER)
                if count > 0.035 * widest:
                    draw.label(axes, left + width / 2, y, name, size=9.5, color=style.INK, bbox=draw.paper(1, 0.85))
                left += width
                parts.append(f"{name} {'written' if hatch else 'read'} {width:.3g}")
        axes.text(left, y, f" {memory.bytes_moved / KIB:.1f} KiB", va="center")
        said.append(f"{label}: {', '.join(parts)}, in all {left:.1f}")
    axes.set_yticks(range(len(memories)), list(memories))
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.16 * widest / KIB), xlabel="bytes moved (KiB); plain: read, hatched: written")
    axes.set_title("Traffic, array by array")
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour, label=name) for name, colour in seen.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1), fontsize=9)
    figure.alt = f"KiB moved, array by array. {'; '.join(said)}."
    return figure


KINDS = {"full": (style.LOGITS, None), "partial": (style.LOGITS, "//"), "skipped": (style.SKIPPED, None)}


def tile_map(T, S, block_q, block_k, band=NO_BAND, title=""):
    """Every tile by kind, with a dot on each pair of query and key that is visible.

    Tiles are drawn at full size; what sticks out past T or S is empty.
    """
    rows, columns = -(-T // block_q) * block_q, -(-S // block_k) * block_k
    unit = min(0.21, 4.2 / columns)
    figure, axes = style.subplots(width=unit * columns + 2.4, height=unit * rows + 1.1)
    kinds = set()
    for q_start in range(0, T, block_q):
        for k_start in range(0, S, block_k):
            kind = tile_kind(range(q_start, q_start + block_q), range(k_start, k_start + block_k), band, T, S)
            kinds.add(kind)
            colour, hatch = KINDS[kind]
            draw.box(
                axes,
                k_start - 0.5,
                q_start - 0.5,
                block_k,
                block_q,
                colour,
                alpha=1 if kind != "partial" else 0.55,
                hatch=hatch,
                ec=style.PAPER,
                lw=2.5,
            )
    i, j = np.nonzero(visible(np.arange(T)[:, None], np.arange(S)[None, :], band, T, S))
    axes.scatter(j, i, s=5, color=style.INK, linewidths=0)
    axes.plot([S - 0.5, S - 0.5, -0.5], [-0.5, T - 0.5, T - 0.5], color=style.OUTPUT, lw=1.8)
    axes.set(aspect="equal", xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6))
    axes.set_xticks(range(0, columns, block_k))
    axes.set_yticks(range(0, rows, block_q))
    axes.set(xlabel="key", ylabel="query", title=title)
    handles = [
        Rectangle(
            (0, 0), 1, 1, facecolor=colour, hatch=hatch, alpha=0.55 if hatch else 1, edgecolor=style.PAPER, label=kind
        )
        for kind, (colour, hatch) in KINDS.items()
        if kind in kinds
    ]
    handles.append(axes.plot([], [], color=style.OUTPUT, label="T and S")[0])
    handles.append(axes.scatter([], [], s=8, color=style.INK, label="visible pair"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9)
    return figure


def two_orders(rows=3, columns=4):
    """The order in which the tiles are visited, with query tiles outside and with key tiles outside."""
    figure, axes = style.subplots(1, 2, width=10, height=3.3)
    panels = [
        (
            axes[0],
            "query tiles outside",
            False,
            "pink: one turn of the outer loop. The state waits on\nchip; k and v come again for each row.",
        ),
        (
            axes[1],
            "key tiles outside",
            True,
            "pink: one turn of the outer loop. k and v wait on\nchip; the state comes and goes at each stop.",
        ),
    ]
    for panel, title, key_outside, caption in panels:
        style.bare(panel)
        path = [(i, j) for i in range(rows) for j in range(columns)]
        if key_outside:
            path.sort(key=lambda tile: (tile[1], tile[0]))
        for number, (i, j) in enumerate(path):
            first = (i if not key_outside else j) == 0
            _box(panel, j, i, 0.94, 0.94, style.LOGITS if first else style.SKIPPED, filled=first, linewidth=1)
            draw.label(
                panel,
                j + 0.2,
                i + 0.26,
                str(number + 1),
                size=10,
                weight="bold",
                zorder=6,
                bbox={"facecolor": style.LOGITS if first else style.PAPER, "edgecolor": "none", "pad": 1},
            )
        for (i, j), (next_i, next_j) in itertools.pairwise(path):
            same = i == next_i or j == next_j
            draw.arrow(
                panel,
                (j + 0.5, i + 0.56),
                (next_j + 0.5, next_i + 0.56),
                style.INK if same else style.FAINT,
                size=10,
                ls="-" if same else ":",
                zorder=3,
            )
        for i in range(rows):
            _box(panel, -0.5, i, 0.36, 0.94, style.QUERY)
            draw.label(panel, -0.32, i + 0.47, f"q{i}", color="white", size=9)
        for j in range(columns):
            _box(panel, j, -0.46, 0.94, 0.32, style.KEY)
            draw.label(panel, j + 0.47, -0.3, f"k{j}, v{j}", size=9)
        panel.text(-0.5, rows + 0.08, caption, va="top", size=10)
        panel.set(xlim=(-0.6, columns + 0.1), ylim=(rows + 0.75, -0.55), title=title)
    return figure


def growth(lengths, H, itemsize, block_q, block_k):
    """Bytes moved (left) and bytes that must exist at once (right) of one head, against the length."""
    figure, panels = style.subplots(1, 2, width=9.5, height=3.9, sharey=True)
    moved = {
        f"naive, tables of {8 * itemsize} bit": [cost.naive_bytes(T, T, H, itemsize) for T in lengths],
        f"query-outer, block_q = {block_q}": [
            cost.query_outer_bytes(T, T, H, itemsize, block_q, block_k) for T in lengths
        ],
        "each matrix once": [4 * itemsize * T * H for T in lengths],
    }
    held = {
        f"naive, two tables of {8 * cost.TABLE_BYTES} bit": [cost.naive_footprint(T, T, H, itemsize) for T in lengths],
        "query-outer": [cost.flash_footprint(T, T, H, itemsize) for T in lengths],
    }
    looks = [(style.LOGITS, "o", "-"), (style.QUERY, "s", "-"), (style.INK, "", ":")]
    titles = "Bytes moved: both quadratic", "Footprint: only naive is quadratic"
    for axes, lines, title in zip(panels, (moved, held), titles, strict=True):
        for (label, line), (colour, marker, dash) in zip(lines.items(), looks, strict=False):
            axes.loglog(lengths, np.asarray(line) / MIB, dash, color=colour, marker=marker, label=label)
        axes.set_xticks(lengths, [f"{T // KIB}k" if T >= KIB else str(T) for T in lengths])
        axes.minorticks_off()
        draw.plain(axes.yaxis, "{:,g}")
        axes.set(xlabel="length T = S", title=title)
        axes.legend(loc="upper left")
    panels[0].set_ylabel(f"MiB, one head, H = {H}")
    return figure


def gpu(num_sms=132, shared=228, registers=256):
    """A GPU, its many SMs, and one of them enlarged. Sizes in KiB, by default those of an H200."""
    figure, axes = style.subplots(width=10, height=4.0)
    style.bare(axes)
    axes.set(xlim=(0, 20), ylim=(-0.5, 8.0))
    columns = 12
    axes.text(0.2, 7.65, f"the chip: {num_sms} SMs (streaming multiprocessors)", weight="bold")
    _box(axes, 0.1, 2.2, 8.4, 5.2, style.INK, filled=False)
    side, gap = 0.52, 0.14
    for number in range(num_sms):
        row, column = divmod(number, columns)
        x, y = 0.35 + column * (side + gap), 7.05 - row * 0.335
        last = number == columns - 1
        _box(axes, x, y, side, 0.22, style.QUERY if last else style.STATE, linewidth=0.5)
    _box(axes, 0.35, 2.45, 7.9, 0.7, style.SKIPPED, linewidth=1)
    draw.label(axes, 4.3, 2.8, "L2 cache, shared by all")
    _box(axes, 0.1, 0.0, 8.4, 1.1, style.VALUE, filled=False)
    draw.label(axes, 4.3, 0.55, "the memory: q, k, v, out of every head")
    draw.arrow(axes, (4.3, 1.15), (4.3, 2.15), size=10, arrowstyle="<|-|>", lw=1, zorder=3)

    axes.plot([8.13, 10.4], [7.27, 7.4], color=style.QUERY, lw=1, ls=":")
    axes.plot([8.13, 10.4], [7.05, 0.0], color=style.QUERY, lw=1, ls=":")
    axes.text(10.5, 7.65, "one SM, and what a program keeps there", weight="bold")
    _box(axes, 10.4, 0.0, 9.4, 7.4, style.QUERY, filled=False, linewidth=2)
    axes.text(10.7, 6.95, f"registers: {registers} KiB", va="center")
    for x, width, name, colour in ((10.7, 2.7, "s, then p", style.LOGITS), (13.6, 4.2, "acc", style.STATE)):
        _box(axes, x, 5.3, width, 1.3, colour)
        draw.label(axes, x + width / 2, 5.95, name + "\nin 32 bit", linespacing=1.15)
    _box(axes, 18.0, 5.3, 1.5, 1.3, style.STATE)
    draw.label(axes, 18.75, 5.95, "m, l")
    _box(axes, 10.7, 3.35, 8.8, 0.8, style.PAPER)
    draw.label(axes, 15.1, 3.75, "matrix units, units for exponentials, threads")
    axes.text(10.7, 0.4, f"shared memory: {shared} KiB", va="center")
    for x, width, name, colour in (
        (10.7, 2.8, "q tile", style.QUERY),
        (13.7, 2.8, "k tile", style.KEY),
        (16.7, 2.8, "v tile", style.VALUE),
    ):
        _box(axes, x, 0.8, width, 1.6, colour)
        draw.label(axes, x + width / 2, 1.6, name + "\nin 16 bit", linespacing=1.15, bbox=draw.paper(2))
    for x in (12.1, 15.1, 18.1):
        draw.arrow(axes, (x, 2.45), (x, 3.3), size=10, lw=1, zorder=3)
    for x in (12.05, 15.7):
        draw.arrow(axes, (x, 4.2), (x, 5.25), size=10, arrowstyle="<|-|>", lw=1, zorder=3)
    return figure


def budget_map(H, itemsize, budget, T, registers=256 * KIB, sizes=(16, 32, 64, 128, 256), chosen=None):
    """For each pair of block sizes: bytes of shared memory and of registers, and the traffic relative to naive.

    budget and registers: bytes that a program may use. Cells with a cross do not fit. Registers
    must not be filled, since a program needs some for other things. chosen: a (block_q, block_k) to frame.
    """
    figure, panels = style.subplots(1, 3, width=10, height=3.3)
    block_q, block_k = np.array(sizes)[:, None], np.array(sizes)[None, :]
    shared = itemsize * (block_q * H + 2 * block_k * H + block_q * block_k)
    in_registers = 4 * (block_q * block_k + block_q * H)
    traffic = np.array([[cost.query_outer_bytes(T, T, H, itemsize, q, k) for k in sizes] for q in sizes])
    relative = traffic / cost.naive_bytes(T, T, H, itemsize)
    room, held = shared <= budget, in_registers < registers
    said = []
    for panel, values, fits, title in (
        (panels[0], shared / KIB, room, f"shared memory, KiB (≤ {budget / KIB:.0f})"),
        (panels[1], in_registers / KIB, held, f"registers, KiB (< {registers / KIB:.0f})"),
        (panels[2], 100 * relative, room & held, f"traffic, % of naive (T = {T})"),
    ):
        texts = np.where(fits, np.vectorize("{:.0f}".format)(values), "✗")
        rows = (f"block_q = {size}: {', '.join(row)}" for size, row in zip(sizes, texts, strict=True))
        said.append(f"{title}. {'; '.join(rows)}.")
        for row, column in np.ndindex(values.shape):
            pale = panel is panels[2] and relative[row, column] >= 1
            colour = style.SKIPPED if not fits[row, column] else "#F3D9C6" if pale else style.STATE
            _box(panel, column - 0.5, row - 0.5, 1, 1, colour, linewidth=0.5)
            draw.label(panel, column, row, texts[row, column], size=10)
        if chosen:
            corner = sizes.index(chosen[1]) - 0.5, sizes.index(chosen[0]) - 0.5
            panel.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=style.OUTPUT, linewidth=3))
        panel.set_xticks(range(len(sizes)), sizes)
        panel.set_yticks(range(len(sizes)), sizes)
        panel.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(sizes) - 0.5, -0.5), xlabel="block_k (keys)")
        panel.set_title(title, size=10.5)
    panels[0].set_ylabel("block_q (queries)")
    panels[0].text(0, -0.32, f"H = {H}. ✗: does not fit", transform=panels[0].transAxes, size=9)
    panels[2].text(0, -0.32, "pale: fits, and saves nothing", transform=panels[2].transAxes, size=9)
    figure.alt = (
        f"H = {H}. From left to right block_k = {', '.join(map(str, sizes))}; ✗: does not fit. {' '.join(said)}"
        + (f" Framed: block_q = {chosen[0]}, block_k = {chosen[1]}." if chosen else "")
    )
    return figure


def break_even(T, itemsize, head_dims=(64, 128), block_k=64):
    """How many times fewer bytes than naive, against block_q, for several head dimensions."""
    figure, axes = style.subplots(width=6.4, height=2.8)
    sizes = 2 ** np.arange(2, 11)
    for H, colour, marker in zip(head_dims, (style.OUTPUT, style.QUERY), "so", strict=True):
        naive = cost.naive_bytes(T, T, H, itemsize)
        ratio = [naive / cost.query_outer_bytes(T, T, H, itemsize, int(q), block_k) for q in sizes]
        axes.loglog(sizes, ratio, marker + "-", color=colour, label=f"H = {H}")
        axes.axvline(H / 2, color=colour, ls=":", lw=1.5)
        axes.text(H / 2 * 1.05, 0.062, f"H/2 = {H // 2}", color=colour, size=9)
    axes.axhline(1, color=style.INK, lw=1)
    axes.text(sizes[0], 1.1, "above 1: fewer bytes", size=9)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_yticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
    axes.minorticks_off()
    axes.set(ylim=(0.05, 45), xlabel="block_q (queries in a tile)", ylabel="naive bytes ÷ query-outer bytes")
    axes.set_title(f"Where tiling starts to pay, T = S = {T}, tables of {8 * itemsize} bit")
    axes.legend(loc="lower right")
    return figure


FIGURES = {"03-on-chip.png": on_chip, "03-two-orders.png": two_orders, "03-gpu.png": gpu}
