"""Pictures of notebook 15: a core and its memories, the walk over a grid, registers, and VMEM."""

import numpy as np
from matplotlib.patches import Patch, Rectangle

from helpers.plots import draw, style

PARTS = {
    "q": (style.QUERY, ""),
    "k": (style.KEY, ""),
    "v": (style.VALUE, ""),
    "out": (style.OUTPUT, ""),
    "acc": (style.STATE, "//"),
    "lse, m, l, w": (style.STATE, ".."),
    "the compiler's own": (style.SKIPPED, "xx"),
}


def core():
    """A core with its memories: blocks stream through pairs of buffers, scratch stays, one step after another."""
    figure, axes = style.drawing(10, 4.4, x=(0, 20), y=(0, 8.8))
    _frame(axes, 0.2, 4.2, "HBM", "large")
    _frame(axes, 6.4, 6.6, "VMEM", "what a step can see")
    for name, y in (("q", 5.3), ("k", 3.7), ("v", 2.1), ("out", 0.65)):
        for place in range(4):
            draw.box(axes, 0.6 + 0.75 * place, y, 0.72, 1.0, style.ROLES[name], alpha=0.75, ec="w", lw=1.5)
        axes.text(3.7, y + 0.5, name, va="center", weight="bold")
        (start, stop), other = ((6.7, 4.5), "before") if name == "out" else ((4.5, 6.7), "next")
        _box(axes, 6.8, y, 1.35, 1.0, style.ROLES[name], f"{name}\nnow")
        _box(axes, 8.25, y, 1.35, 1.0, style.ROLES[name], f"{name}\n{other}", alpha=0.12, ls="--")
        draw.arrow(axes, (start, y + 0.5), (stop, y + 0.5), lw=1.4)
    draw.label(axes, 5.4, 7.0, "copies,\nbeside\nthe work", size=9)
    _box(axes, 10.2, 2.1, 2.4, 4.2, style.STATE, "scratch\n\nm, l, acc\n\nstays from\nstep to step")

    _frame(axes, 15.0, 4.8, "the core", "one step at a time")
    _box(axes, 15.4, 4.75, 4.0, 1.55, style.FAINT, "registers\n8 sublanes × 128 lanes")
    _box(axes, 15.4, 2.85, 4.0, 1.2, style.FAINT, "matrix units (MXU)")
    _box(axes, 15.4, 0.95, 4.0, 1.2, style.FAINT, "vector unit: maxima, sums")
    draw.arrow(axes, (13.1, 4.1), (14.9, 4.1), arrowstyle="<|-|>", lw=1.4)
    return figure


def order(numbers):
    """When each program of a grid ran. numbers: (rows, columns), 0 for the first."""
    rows, columns = numbers.shape
    figure, axes = style.drawing(1.6 + 1.1 * columns, 0.9 + 0.75 * rows, x=(-0.8, columns), y=(rows, -0.5))
    places = sorted(np.ndindex(rows, columns), key=lambda place: numbers[place])
    for i, j in places:
        draw.box(axes, j, i, 0.94, 0.9, style.STATE, alpha=0.45, ec=style.INK, lw=1)
        draw.label(axes, j + 0.47, i + 0.45, numbers[i, j], size=12)
    _around(axes, rows, columns, "i = ", "j = ", 9)
    axes.set_title("When each program runs")
    said = ", ".join(f"({i}, {j})" for i, j in places)
    figure.alt = f"A grid of {rows} × {columns} programs with the numbers in which they run: {said}."
    return figure


def fetched(panels):
    """The key block of each program. panels: {title: (indices, needed)}, both (tiles of queries, steps)."""
    figure, all_axes = style.subplots(1, len(panels), width=3.4 * len(panels) + 0.6, height=3.6, squeeze=False)
    looks = {  # by whether a block is needed, and whether it is fetched
        (True, True): {"label": "needed, fetched", "fc": style.KEY, "alpha": 0.75},
        (True, False): {"label": "needed, there already", "fc": style.KEY, "alpha": 0.35},
        (False, True): {"label": "fetched for nothing", "fc": style.OUTPUT, "alpha": 0.75, "hatch": "//", "ec": "w"},
        (False, False): {"label": "not needed, nothing moves", "fc": style.SKIPPED, "alpha": 0.35},
    }
    said = []
    for axes, (title, (indices, needed)) in zip(all_axes[0], panels.items(), strict=True):
        rows, columns = indices.shape
        style.bare(axes)
        moves = np.append(True, np.diff(indices.ravel()) != 0).reshape(rows, columns)
        for i, j in np.ndindex(rows, columns):
            look = looks[bool(needed[i, j]), bool(moves[i, j])]
            axes.add_patch(Rectangle((j, i), 0.94, 0.9, **look | {"ec": "w"}))
            words = {
                "weight": "bold" if moves[i, j] else "normal",
                "bbox": draw.paper(1.2) if "hatch" in look else None,
            }
            draw.label(axes, j + 0.47, i + 0.45, indices[i, j], size=11, **words)
        _around(axes, rows, columns, "tile ", "step ", 8.5)
        axes.set(xlim=(-0.9, columns), ylim=(rows, -0.5))
        axes.set_title(f"{title}: {moves.sum()} fetched", pad=10)
        wanted = (moves & needed).sum()
        said.append(f"{title}: {wanted} blocks fetched that are needed and {moves.sum() - wanted} that are not")
    draw.below(figure, handles=[Patch(**look) for look in looks.values()], ncols=2)
    figure.alt = f"The key block in VMEM at each step. {'. '.join(said)}."
    return figure


def _around(axes, rows, columns, row, column, size):
    """The number of each row at its left, of each column above it."""
    for i in range(rows):
        axes.text(-0.12, i + 0.45, f"{row}{i}", ha="right", va="center", size=9)
    for j in range(columns):
        draw.label(axes, j + 0.47, -0.12, f"{column}{j}", va="bottom", size=size)


def registers(panels, colours):
    """Arrays cut into registers. panels: {title: (rows, columns, rows of a register)}; colours: one for each."""
    figure, all_axes = style.subplots(1, len(panels), width=10, height=3.3)
    said = []
    for axes, (title, (rows, columns, height)), colour in zip(all_axes, panels.items(), colours, strict=True):
        style.bare(axes)
        down, across = -(-rows // height), -(-columns // 128)
        draw.box(axes, 0, 0, across * 128, down * height, style.SKIPPED)
        draw.box(axes, 0, 0, columns, rows, colour)
        for i, j in np.ndindex(down, across):
            draw.box(axes, 128 * j, height * i, 128, height, "none", ec=style.PAPER, lw=0.8)
        used = rows * columns / (down * height * across * 128)
        axes.set(xlim=(-8, across * 128 + 8), ylim=(down * height * 1.02, -0.02 * down * height))
        count = f"{down * across} register{'s' * (down * across > 1)}"
        axes.set_title(f"{title}\n{count}, {used:.1%} used", size=9.5)
        said.append(f"{title}: {count}, of which {used:.1%} holds numbers")
    draw.below(figure, handles=draw.keys({"filled up": (style.SKIPPED, None)}))
    figure.alt = f"Arrays cut into registers, drawn each to its own scale. {'; '.join(said)}."
    return figure


def vmem(chips):
    """What lies in VMEM during a step. chips: {name: {part: KiB}}; parts as in PARTS, in their order."""
    figure, axes = style.subplots(width=10, height=0.75 * len(chips) + 1.9)
    said = []
    for row, (chip, parts) in enumerate(chips.items()):
        left = 0.0
        for part, (colour, hatch) in PARTS.items():
            axes.barh(row, parts[part], 0.6, left=left, color=colour, hatch=hatch, ec=style.PAPER)
            if parts[part] > 100:
                draw.label(axes, left + parts[part] / 2, row, f"{parts[part]:.0f}", size=9, bbox=draw.paper(1.2))
            left += parts[part]
        said.append(f"{chip}: {', '.join(f'{part} {size:.0f}' for part, size in parts.items())}, in all {left:.0f}")
    draw.rows(axes, chips, marks=True)
    title = "What lies in VMEM during a step of the forward kernel"
    axes.set(xlabel="KiB", title=title)
    draw.below(figure, handles=draw.keys(PARTS, ec=style.PAPER))
    figure.alt = f"{title}, in KiB. {'. '.join(said)}."
    return figure


def _frame(axes, x, width, name, note):
    draw.box(axes, x, 0.4, width, 7.4, "none", ec=style.INK, lw=1.6)
    axes.text(x + 0.05, 8.15, name, weight="bold", va="center", size=11)
    axes.text(x + width, 8.15, note, va="center", ha="right", size=9)


def _box(axes, x, y, width, height, colour, text, alpha=0.35, **look):
    draw.tinted(axes, x, y, width, height, colour, alpha, **look)
    draw.label(axes, x + width / 2, y + height / 2, text, size=9)


FIGURES = {"15-core.png": core}
