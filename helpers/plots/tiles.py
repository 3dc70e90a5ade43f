"""Pictures of notebook 03: tiles, what is on chip while they are visited, and the bytes they move."""

import itertools

import numpy as np
from matplotlib.patches import Patch, Rectangle

from helpers.attention.masking import NO_BAND, tile_kind, visible
from helpers.instruments import cost
from helpers.plots import draw, style

KIB = 1024
MIB = 1024**2


def _box(axes, x, y, width, height, colour, text="", filled=True, lw=1.4, hatch=None, **words):
    """A box in a colour with a dark edge, or one with an edge in the colour; a text in its middle."""
    fill, edge = (colour, style.INK) if filled else (style.PAPER, colour)
    draw.box(axes, x, y, width, height, fill, ec=edge, lw=lw, hatch=hatch)
    if text:
        draw.label(axes, x + width / 2, y + height / 2, text, **words)


def on_chip():
    """Slow memory with its arrays cut into tiles, and the few tiles that are on chip at one moment."""
    figure, axes = style.drawing(10, 3.9, x=(-0.05, 11.85), y=(-0.1, 5.7))
    for x, width, text in ((0, 5.4, "slow memory: large"), (6.6, 5.2, "on chip: fast and small")):
        _box(axes, x, 0, width, 5.2, style.FAINT, filled=False)
        axes.text(x + 0.15, 5.32, text, weight="bold")
    for column, (name, tiles, current) in enumerate((("q", 4, 1), ("k", 5, 2), ("v", 5, 2), ("out", 4, 1))):
        x, colour = 0.4 + 1.25 * column, style.ROLES[name]
        axes.text(x + 0.4, 4.75, name, ha="center", color=colour, weight="bold", size=12)
        for tile in range(tiles):
            done = name == "out" and tile < current
            filled = done or (name != "out" and tile == current)
            _box(axes, x, 3.85 - 0.8 * tile, 0.8, 0.72, colour, filled=filled, hatch=".." if done else None)
    draw.label(axes, 4.55, 4.21, "done", color=style.INK, size=9, bbox=draw.paper())

    _box(axes, 6.9, 2.55, 0.9, 0.9, style.QUERY, "q tile", color="white")
    _box(axes, 8.1, 3.75, 1.3, 0.8, style.KEY, "k tile")
    _box(axes, 8.1, 2.55, 1.3, 0.9, style.LOGITS, "logits s,\nthen p", linespacing=1.15)
    _box(axes, 8.1, 1.45, 1.3, 0.8, style.VALUE, "v tile", color="white")
    for x, width, name in ((9.9, 0.36, "m"), (10.32, 0.36, "l"), (10.74, 0.86, "acc")):
        _box(axes, x, 2.55, width, 0.9, style.STATE, name, weight="bold")
    axes.text(10.75, 3.62, "the state", ha="center")
    draw.label(axes, 9.2, 0.6, "Keys and values come and go.\nThe q tile and its state stay.", size=10)
    for start, end, colour in (
        ((5.45, 3.0), (6.85, 3.0), style.QUERY),
        ((5.45, 4.15), (8.05, 4.15), style.KEY),
        ((5.45, 1.85), (8.05, 1.85), style.VALUE),
        ((9.45, 3.0), (9.85, 3.0), style.INK),
        ((10.75, 2.5), (10.75, 1.75), style.OUTPUT),
    ):
        draw.arrow(axes, start, end, colour, size=10, lw=1.8, zorder=3)
    draw.label(axes, 10.75, 1.62, "at the end:\nout, lse", va="top", color=style.OUTPUT, size=10)
    return figure


def _tile_table(axes, T, S, block_q, block_k, current=None, done=()):
    """The T x S table cut into tiles: the current one filled, those that are done hatched."""
    for tile in itertools.product(range(0, T, block_q), range(0, S, block_k)):
        q_start, k_start = tile
        width, height = min(block_k, S - k_start), min(block_q, T - q_start)
        colour, edge = (style.LOGITS, style.INK) if tile == current else (style.PAPER, style.FAINT)
        draw.box(axes, k_start, q_start, width, height, colour, ec=edge, hatch="///" if tile in done else None, lw=1)
    axes.set(aspect="auto", xlim=(-0.25 * block_k, S + 0.1), ylim=(T + 0.1, -0.4 * block_q))
    style.bare(axes)


def film_strip(frames, T, S, block_q, block_k):
    """One frame for each visited tile. frames: (q_start, k_start, state after the visit), in order.

    Each frame shows the table with the current tile, and below it the numbers of the state.
    """
    columns = len(range(0, S, block_k))
    rows = len(frames) // columns
    heights = [1, 1.45] * rows
    figure, axes = style.subplots(2 * rows, columns, width=2.2 * columns, height=2.75 * rows, height_ratios=heights)
    largest = max(np.abs(state.acc).max() for *_, state in frames)
    for number, (q_start, k_start, state) in enumerate(frames):
        row, column = divmod(number, columns)
        table, values = axes[2 * row, column], axes[2 * row + 1, column]
        _tile_table(table, T, S, block_q, block_k, (q_start, k_start), {frame[:2] for frame in frames[:number]})
        draw.box(table, -0.22 * block_k, q_start, 0.14 * block_k, block_q, style.QUERY, ec=style.QUERY)
        draw.box(table, k_start, -0.36 * block_q, block_k, 0.22 * block_q, style.KEY, ec=style.KEY)
        rows_shown, keys_shown = f"{q_start}–{q_start + len(state.m) - 1}", f"{k_start}–{min(k_start + block_k, S) - 1}"
        table.set_title(f"{number + 1}: q {rows_shown}, k {keys_shown}", size=10)
        _state(values, state, largest)
    note = "Blue: q tile. Orange: k tile. Hatched: done. Below, the new state: acc is red above zero, blue below."
    figure.suptitle(note, x=0.01, ha="left", size=10)
    return figure


def _state(axes, state, largest):
    """m and l as numbers, acc as coloured cells, one line for each query of the tile."""
    style.bare(axes)
    rows, H = state.acc.shape
    right = 2.2 + 0.62 * H
    for row in range(rows):
        draw.label(axes, 0.45, row, f"{round(state.m[row], 1) + 0:.1f}", size=9)
        draw.label(axes, 1.5, row, f"{state.l[row]:.1f}", size=9)
    extent = 2.2, right, rows - 0.5, -0.5
    axes.imshow(state.acc, cmap="RdBu_r", vmin=-largest, vmax=largest, extent=extent, aspect="auto")
    for x, name in ((0.45, "m"), (1.5, "l"), (2.2 + 0.31 * H, "acc")):
        draw.label(axes, x, -0.68, name, va="bottom", weight="bold", size=9)
    draw.box(axes, -0.1, -0.5, 2.15, rows, style.STATE, alpha=0.3, ec="none", zorder=0)
    axes.set(xlim=(-0.15, right + 0.05), ylim=(rows - 0.4, -1.5))


def traffic_by_array(memories):
    """One bar for each `SlowMemory` in a dict by name: bytes read (plain) and written (hatched), by array."""
    figure, axes = style.subplots(width=8.6, height=max(2.5, 1.2 + 0.5 * len(memories)))
    seen, said = {}, []
    widest = max(memory.bytes_moved for memory in memories.values()) / KIB
    for y, (label, memory) in enumerate(memories.items()):
        left, parts = 0, []
        crossings = (("read", memory.read, None), ("written", memory.written, "///"))
        for name, (what, counted, hatch) in itertools.product(memory.arrays, crossings):
            width = counted[name] / KIB
            if not width:
                continue
            matrix = name in ("q", "k", "v", "out")
            colour = seen["m, l, lse" if not matrix else name] = style.ROLES[name] if matrix else style.STATE
            axes.barh(y, width, left=left, height=0.62, color=colour, hatch=hatch, ec=style.PAPER)
            if width > 0.035 * widest:
                draw.label(axes, left + width / 2, y, name, size=9.5, color=style.INK, bbox=draw.paper(1, 0.85))
            left += width
            parts.append(f"{name} {what} {width:.3g}")
        axes.text(left, y, f" {left:.1f} KiB", va="center")
        said.append(f"{label}: {', '.join(parts)}, in all {left:.1f}")
    draw.rows(axes, memories, marks=True)
    axes.set(xlim=(0, 1.16 * widest), xlabel="bytes moved (KiB); plain: read, hatched: written")
    axes.set_title("Traffic, array by array")
    draw.beside(axes, handles=draw.keys({name: (colour, None) for name, colour in seen.items()}), fontsize=9)
    figure.alt = f"KiB moved, array by array. {'; '.join(said)}."
    return figure


KINDS = {
    "full": {"fc": style.LOGITS},
    "partial": {"fc": style.LOGITS, "hatch": "//", "alpha": 0.55},
    "skipped": {"fc": style.SKIPPED},
}


def tile_map(T, S, block_q, block_k, band=NO_BAND, title=""):
    """Every tile by kind, with a dot on each pair of query and key that is visible.

    Tiles are drawn at full size; what sticks out past T or S is empty.
    """
    rows, columns = -(-T // block_q) * block_q, -(-S // block_k) * block_k
    unit = min(0.21, 4.2 / columns)
    figure, axes = style.subplots(width=unit * columns + 2.4, height=unit * rows + 1.1)
    kinds = set()
    for q_start, k_start in itertools.product(range(0, T, block_q), range(0, S, block_k)):
        kind = tile_kind(range(q_start, q_start + block_q), range(k_start, k_start + block_k), band, T, S)
        kinds.add(kind)
        place = (k_start - 0.5, q_start - 0.5), block_k, block_q
        axes.add_patch(Rectangle(*place, ec=style.PAPER, lw=2.5, **KINDS[kind]))
    i, j = np.nonzero(visible(np.arange(T)[:, None], np.arange(S)[None, :], band, T, S))
    axes.scatter(j, i, s=5, color=style.INK, linewidths=0)
    axes.plot([S - 0.5, S - 0.5, -0.5], [-0.5, T - 0.5, T - 0.5], color=style.OUTPUT, lw=1.8)
    axes.set(aspect="equal", xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6), xticks=range(0, columns, block_k))
    axes.set(yticks=range(0, rows, block_q), xlabel="key", ylabel="query", title=title)
    handles = [Patch(ec=style.PAPER, label=kind, **look) for kind, look in KINDS.items() if kind in kinds]
    handles.append(axes.plot([], [], color=style.OUTPUT, label="T and S")[0])
    handles.append(axes.scatter([], [], s=8, color=style.INK, label="visible pair"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9)
    return figure


def two_orders(rows=3, columns=4):
    """The order in which the tiles are visited, with query tiles outside and with key tiles outside."""
    figure, panels = style.subplots(1, 2, width=10, height=3.3)
    said = (
        ("query tiles outside", "The state waits on\nchip; k and v come again for each row."),
        ("key tiles outside", "k and v wait on\nchip; the state comes and goes at each stop."),
    )
    by_row = list(np.ndindex(rows, columns))
    by_column = [(i, j) for j, i in np.ndindex(columns, rows)]
    for axis, panel, path, (title, note) in zip((0, 1), panels, (by_row, by_column), said, strict=True):
        style.bare(panel)
        for number, tile in enumerate(path, 1):
            first = tile[axis] == 0
            i, j = tile
            _box(panel, j, i, 0.94, 0.94, style.LOGITS if first else style.SKIPPED, filled=first, lw=1)
            words = {"size": 10, "weight": "bold", "zorder": 6}
            box = draw.paper(1) | ({"fc": style.LOGITS} if first else {})
            draw.label(panel, j + 0.2, i + 0.26, number, bbox=box, **words)
        for (i, j), (next_i, next_j) in itertools.pairwise(path):
            colour, dash = (style.INK, "-") if i == next_i or j == next_j else (style.FAINT, ":")
            stop = next_j + 0.5, next_i + 0.56
            draw.arrow(panel, (j + 0.5, i + 0.56), stop, colour, size=10, ls=dash, zorder=3)
        for i in range(rows):
            _box(panel, -0.5, i, 0.36, 0.94, style.QUERY, f"q{i}", color="white", size=9)
        for j in range(columns):
            _box(panel, j, -0.46, 0.94, 0.32, style.KEY, f"k{j}, v{j}", size=9)
        panel.text(-0.5, rows + 0.08, f"pink: one turn of the outer loop. {note}", va="top", size=10)
        panel.set(xlim=(-0.6, columns + 0.1), ylim=(rows + 0.75, -0.55), title=title)
    return figure


def growth(lengths, H, itemsize, block_q, block_k):
    """Bytes moved (left) and bytes that must exist at once (right) of one head, against the length."""
    figure, panels = style.subplots(1, 2, width=9.5, height=3.9, sharey=True)
    of_each = lambda count, *options: np.array([count(T, T, H, itemsize, *options) for T in lengths]) / MIB
    once = "each matrix once"
    moved = {
        f"naive, tables of {8 * itemsize} bit": of_each(cost.naive_bytes),
        f"query-outer, block_q = {block_q}": of_each(cost.query_outer_bytes, block_q, block_k),
        once: of_each(lambda T, *_: 4 * itemsize * T * H),
    }
    held = {
        f"naive, two tables of {8 * cost.TABLE_BYTES} bit": of_each(cost.naive_footprint),
        "query-outer": of_each(cost.flash_footprint),
    }
    looks = [(style.LOGITS, "o", "-"), (style.QUERY, "s", "-"), (style.INK, "", ":")]
    titles = "Bytes moved: both quadratic", "Footprint: only naive is quadratic"
    for axes, curves, title in zip(panels, (moved, held), titles, strict=True):
        axes.set(xscale="log", yscale="log")
        draw.lines(axes, lengths, curves, looks)
        axes.set_xticks(lengths, [draw.short(T) for T in lengths])
        axes.minorticks_off()
        draw.plain(axes.yaxis, "{:,g}")
        axes.set(xlabel="length T = S", title=title)
        axes.legend(loc="upper left")
    panels[0].set_ylabel(f"MiB, one head, H = {H}")
    return figure


def gpu(num_sms=132, shared=227, registers=256):
    """A GPU, its many SMs, and one of them enlarged. Sizes in KiB, by default what a program may use of an H200."""
    figure, axes = style.drawing(10, 4.0, x=(0, 20), y=(-0.5, 8.0))
    columns = 12
    axes.text(0.2, 7.65, f"the chip: {num_sms} SMs (streaming multiprocessors)", weight="bold")
    _box(axes, 0.1, 2.2, 8.4, 5.2, style.INK, filled=False)
    for number in range(num_sms):
        row, column = divmod(number, columns)
        colour = style.QUERY if number == columns - 1 else style.STATE
        _box(axes, 0.35 + 0.66 * column, 7.05 - 0.335 * row, 0.52, 0.22, colour, lw=0.5)
    _box(axes, 0.35, 2.45, 7.9, 0.7, style.SKIPPED, "L2 cache, shared by all", lw=1)
    _box(axes, 0.1, 0.0, 8.4, 1.1, style.VALUE, "the memory: q, k, v, out of every head", filled=False)
    draw.arrow(axes, (4.3, 1.15), (4.3, 2.15), size=10, arrowstyle="<|-|>", lw=1, zorder=3)

    axes.plot([8.13, 10.4], [7.27, 7.4], color=style.QUERY, lw=1, ls=":")
    axes.plot([8.13, 10.4], [7.05, 0.0], color=style.QUERY, lw=1, ls=":")
    axes.text(10.5, 7.65, "one SM, and what a program keeps there", weight="bold")
    _box(axes, 10.4, 0.0, 9.4, 7.4, style.QUERY, filled=False, lw=2)
    axes.text(10.7, 6.95, f"registers: {registers} KiB", va="center")
    _box(axes, 10.7, 5.3, 2.7, 1.3, style.LOGITS, "s, then p\nin 32 bit", linespacing=1.15)
    _box(axes, 13.6, 5.3, 4.2, 1.3, style.STATE, "acc\nin 32 bit", linespacing=1.15)
    _box(axes, 18.0, 5.3, 1.5, 1.3, style.STATE, "m, l")
    _box(axes, 10.7, 3.35, 8.8, 0.8, style.PAPER, "matrix units, units for exponentials, threads")
    axes.text(10.7, 0.4, f"shared memory: {shared} KiB", va="center")
    for x, name in ((10.7, "q"), (13.7, "k"), (16.7, "v")):
        words = {"linespacing": 1.15, "bbox": draw.paper(2)}
        _box(axes, x, 0.8, 2.8, 1.6, style.ROLES[name], f"{name} tile\nin 16 bit", **words)
        draw.arrow(axes, (x + 1.4, 2.45), (x + 1.4, 3.3), size=10, lw=1, zorder=3)
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
            _box(panel, column - 0.5, row - 0.5, 1, 1, colour, texts[row, column], lw=0.5, size=10)
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
