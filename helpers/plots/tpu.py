"""Pictures of notebook 15: a core and its memories, the walk over a grid, registers, VMEM, and what a compiler says."""

import numpy as np
from matplotlib.patches import Patch

from helpers.plots import draw, style

LOOKS = {"ours": (style.OUTPUT, ""), "JAX's flash": (style.SKIPPED, "//"), "JAX's splash": (style.STATE, "..")}
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
    figure, axes = style.subplots(width=10, height=4.4)
    style.bare(axes)
    axes.set(xlim=(0, 20), ylim=(0, 8.8))
    _frame(axes, 0.2, 0.4, 4.2, 7.4, "HBM", "large")
    for place, (name, colour) in enumerate((("q", style.QUERY), ("k", style.KEY), ("v", style.VALUE))):
        _stack(axes, 0.6, 5.3 - 1.6 * place, name, colour)
    _stack(axes, 0.6, 0.65, "out", style.OUTPUT)

    _frame(axes, 6.4, 0.4, 6.6, 7.4, "VMEM", "what a step can see")
    for place, (name, colour) in enumerate((("q", style.QUERY), ("k", style.KEY), ("v", style.VALUE))):
        y = 5.3 - 1.6 * place
        _box(axes, 6.8, y, 1.35, 1.0, colour, f"{name}\nnow")
        _box(axes, 8.25, y, 1.35, 1.0, colour, f"{name}\nnext", faint=True)
        _arrow(axes, (4.5, y + 0.5), (6.7, y + 0.5))
    _box(axes, 6.8, 0.65, 1.35, 1.0, style.OUTPUT, "out\nnow")
    _box(axes, 8.25, 0.65, 1.35, 1.0, style.OUTPUT, "out\nbefore", faint=True)
    _arrow(axes, (6.7, 1.15), (4.5, 1.15))
    draw.label(axes, 5.4, 7.0, "copies,\nbeside\nthe work", size=9)
    _box(axes, 10.2, 2.1, 2.4, 4.2, style.STATE, "scratch\n\nm, l, acc\n\nstays from\nstep to step")

    _frame(axes, 15.0, 0.4, 4.8, 7.4, "the core", "one step at a time")
    _box(axes, 15.4, 4.75, 4.0, 1.55, style.FAINT, "registers\n8 sublanes × 128 lanes")
    _box(axes, 15.4, 2.85, 4.0, 1.2, style.FAINT, "matrix units (MXU)")
    _box(axes, 15.4, 0.95, 4.0, 1.2, style.FAINT, "vector unit: maxima, sums")
    draw.arrow(axes, (13.1, 4.1), (14.9, 4.1), arrowstyle="<|-|>", lw=1.4)
    return figure


def order(numbers):
    """When each program of a grid ran. numbers: (rows, columns), 0 for the first."""
    rows, columns = numbers.shape
    figure, axes = style.subplots(width=1.6 + 1.1 * columns, height=0.9 + 0.75 * rows)
    style.bare(axes)
    places = sorted(np.ndindex(rows, columns), key=lambda place: numbers[place])
    for i, j in places:
        draw.box(axes, j, i, 0.94, 0.9, style.STATE, alpha=0.45, ec=style.INK, lw=1)
        draw.label(axes, j + 0.47, i + 0.45, str(numbers[i, j]), size=12)
    for i in range(rows):
        axes.text(-0.12, i + 0.45, f"i = {i}", ha="right", va="center", size=9)
    for j in range(columns):
        axes.text(j + 0.47, -0.12, f"j = {j}", ha="center", va="bottom", size=9)
    axes.set(xlim=(-0.8, columns), ylim=(rows, -0.5), title="When each program runs")
    said = ", ".join(f"({i}, {j})" for i, j in places)
    figure.alt = f"A grid of {rows} × {columns} programs with the numbers in which they run: {said}."
    return figure


def fetched(panels):
    """The key block of each program. panels: {title: (indices, needed)}, both (tiles of queries, steps)."""
    figure, all_axes = style.subplots(1, len(panels), width=3.4 * len(panels) + 0.6, height=3.6, squeeze=False)
    said = []
    for axes, (title, (indices, needed)) in zip(all_axes[0], panels.items(), strict=True):
        rows, columns = indices.shape
        style.bare(axes)
        before, counts = None, {True: 0, False: 0}
        for i, j in np.ndindex(rows, columns):
            moves = indices[i, j] != before
            before = indices[i, j]
            counts[bool(needed[i, j])] += bool(moves)
            colour = style.KEY if needed[i, j] else style.OUTPUT if moves else style.SKIPPED
            hatch = "//" if moves and not needed[i, j] else None
            draw.box(axes, j, i, 0.94, 0.9, colour, alpha=0.75 if moves else 0.35, hatch=hatch, ec="w")
            box = draw.paper(1.2) if hatch else None
            weight = "bold" if moves else "normal"
            draw.label(axes, j + 0.47, i + 0.45, str(indices[i, j]), size=11, weight=weight, bbox=box)
        for i in range(rows):
            axes.text(-0.12, i + 0.45, f"tile {i}", ha="right", va="center", size=9)
        for j in range(columns):
            axes.text(j + 0.47, -0.12, f"step {j}", ha="center", va="bottom", size=8.5)
        axes.set(xlim=(-0.9, columns), ylim=(rows, -0.5))
        axes.set_title(f"{title}: {sum(counts.values())} fetched", pad=10)
        said.append(f"{title}: {counts[True]} blocks fetched that are needed and {counts[False]} that are not")
    handles = [
        Patch(fc=style.KEY, alpha=0.75, label="needed, fetched"),
        Patch(fc=style.KEY, alpha=0.35, label="needed, there already"),
        Patch(fc=style.OUTPUT, alpha=0.75, hatch="//", ec="w", label="fetched for nothing"),
        Patch(fc=style.SKIPPED, alpha=0.35, label="not needed, nothing moves"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.alt = f"The key block in VMEM at each step. {'. '.join(said)}."
    return figure


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
    figure.legend(handles=[Patch(fc=style.SKIPPED, label="filled up")], loc="outside lower center")
    figure.alt = f"Arrays cut into registers, drawn each to its own scale. {'; '.join(said)}."
    return figure


def vmem(chips):
    """What lies in VMEM during a step. chips: {name: {part: KiB}}; parts as in PARTS, in their order."""
    figure, axes = style.subplots(width=10, height=0.75 * len(chips) + 1.9)
    for row, parts in enumerate(chips.values()):
        left = 0.0
        for part, (colour, hatch) in PARTS.items():
            axes.barh(row, parts[part], 0.6, left=left, color=colour, hatch=hatch, ec=style.PAPER)
            if parts[part] > 100:
                box = draw.paper(1.2)
                draw.label(axes, left + parts[part] / 2, row, f"{parts[part]:.0f}", size=9, bbox=box)
            left += parts[part]
    axes.set_yticks(range(len(chips)), chips)
    axes.invert_yaxis()
    axes.set(xlabel="KiB", title="What lies in VMEM during a step of the forward kernel")
    handles = [Patch(fc=colour, hatch=hatch, ec=style.PAPER, label=name) for name, (colour, hatch) in PARTS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    said = (
        f"{chip}: {', '.join(f'{part} {size:.0f}' for part, size in parts.items())}, in all {sum(parts.values()):.0f}"
        for chip, parts in chips.items()
    )
    figure.alt = f"What lies in VMEM during a step of the forward kernel, in KiB. {'. '.join(said)}."
    return figure


def bundles(chips):
    """Bundles of a step by kernel. chips: {chip: {kernel: {implementation: bundles}}}, implementations as in LOOKS."""
    figure, all_axes = style.subplots(1, len(chips), width=10, height=3.6, sharey=True)
    for axes, (chip, kernels) in zip(all_axes, chips.items(), strict=True):
        for place, (name, (colour, hatch)) in enumerate(LOOKS.items()):
            x = np.arange(len(kernels)) + 0.27 * (place - 1)
            heights = [found[name] for found in kernels.values()]
            axes.bar(x, heights, 0.25, color=colour, hatch=hatch, ec=style.INK, lw=0.8, label=name)
            for one, height in zip(x, heights, strict=True):
                axes.text(one, height, f"{height}", ha="center", va="bottom", size=7.5)
        axes.set_xticks(range(len(kernels)), kernels)
        axes.tick_params(axis="x", length=0)
        axes.set_title(f"Compiled for {chip}: bundles of a step")
    all_axes[0].set_ylabel("bundles")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LOOKS))
    said = (
        f"{chip}, {kernel}: {', '.join(f'{name} {count}' for name, count in found.items())}"
        for chip, kernels in chips.items()
        for kernel, found in kernels.items()
    )
    figure.alt = f"Bundles of a step. {'; '.join(said)}."
    return figure


def _frame(axes, x, y, width, height, name, note):
    draw.box(axes, x, y, width, height, "none", ec=style.INK, lw=1.6)
    axes.text(x + 0.05, y + height + 0.35, name, weight="bold", va="center", size=11)
    axes.text(x + width, y + height + 0.35, note, va="center", ha="right", size=9)


def _stack(axes, x, y, name, colour):
    for place in range(4):
        draw.box(axes, x + 0.75 * place, y, 0.72, 1.0, colour, alpha=0.75, ec="w", lw=1.5)
    axes.text(x + 3.1, y + 0.5, name, va="center", weight="bold")


def _box(axes, x, y, width, height, colour, text, faint=False):
    draw.box(axes, x, y, width, height, colour, alpha=0.12 if faint else 0.35, ec="none")
    draw.box(axes, x, y, width, height, "none", ec=colour, lw=1.6, ls="--" if faint else "-")
    draw.label(axes, x + width / 2, y + height / 2, text, size=9)


def _arrow(axes, start, stop):
    draw.arrow(axes, start, stop, lw=1.4)


FIGURES = {"15-core.png": core}
