"""Pictures of notebooks 10 and 11: warpgroups, what they hold, when they work and when they wait."""

import itertools

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from helpers.instruments import layouts
from helpers.plots import draw, style

KINDS = {  # of work, by the label's first letters: colour, hatch, name
    "pv": (style.VALUE, "..", "product with v"),
    "s": (style.QUERY, "//", "product with k"),
    "p": (style.LOGITS, None, "exponentials"),
    "copy": (style.FAINT, "--", "copy by threads"),
    "k": (style.KEY, "xx", "copy of keys"),
    "v": (style.STATE, "\\\\", "copy of values"),
    "wait": (style.PAPER, None, "waits"),
}
EDGE = {"ec": style.INK, "lw": 0.6}


def sm():
    """One SM: its memories, its units, and the warpgroups of one program."""
    figure, axes = style.drawing(10, 4.9, x=(0, 20), y=(-0.1, 9.8))
    note = "all of q, k, v,\nout, lse\n\n80 GB\nshared by all\nSMs"
    _box(axes, 0.1, 0.1, 3.1, 9.0, "GMEM", note, style.FAINT)
    draw.box(axes, 3.9, 0.1, 15.9, 9.0, "none", ec=style.INK, lw=1.6, ls="--")
    axes.text(3.9, 9.45, "one of 132 SMs (streaming multiprocessors), running one program", va="center", size=10)
    _box(axes, 4.3, 3.3, 1.5, 2.6, "TMA", "copies", style.STATE)
    note = "tiles of q, k, v,\nout; barriers\n\n227 KiB\nall warpgroups\nof the program\nsee it"
    _box(axes, 6.8, 0.6, 3.1, 8.0, "SMEM", note, style.KEY)
    _arrow(axes, (3.2, 5.2), (4.3, 5.2), "")
    _arrow(axes, (4.3, 4.0), (3.2, 4.0), "")
    _arrow(axes, (5.8, 5.2), (6.8, 5.2), "load")
    _arrow(axes, (6.8, 4.0), (5.8, 4.0), "store")
    left, wide = 12.2, 1.8
    for index, name in enumerate(("compute warpgroup 0", "compute warpgroup 1", "memory warpgroup")):
        y = 7.1 - 1.85 * index
        note, colour = "s, p, acc, m, l in registers", style.QUERY
        if name.startswith("memory"):
            note, colour = "asks TMA for copies", style.SKIPPED
        axes.text(left, y + 1.2, f"{name}: {note}", va="center", size=9)
        for quarter in range(4):
            draw.tinted(axes, left + wide * quarter, y, wide - 0.12, 0.85, colour, alpha=0.25, lw=1.4)
            draw.label(axes, left + wide * (quarter + 0.47), y + 0.42, f"warp {quarter}", size=9)
    for quarter in range(4):
        note = "warp\nscheduler\ntensor core\nexponentials"
        draw.tinted(axes, left + wide * quarter, 0.6, wide - 0.12, 1.75, style.LOGITS, lw=1.4)
        draw.label(axes, left + wide * (quarter + 0.47), 1.45, note, size=8)
    axes.text(left, 2.75, "four quarters, each with units of its own:", va="center", size=9)
    _arrow(axes, (9.9, 1.45), (12.2, 1.45), "operands")
    _arrow(axes, (9.9, 7.5), (12.2, 7.5), "load, store", arrowstyle="<|-|>")
    return figure


def _box(axes, x, y, width, height, name, note, colour):
    draw.tinted(axes, x, y, width, height, colour, alpha=0.25)
    of_name, of_note = (0.85, 0.45) if "\n" in note else (0.68, 0.3)
    draw.label(axes, x + width / 2, y + height * of_name, name, weight="bold")
    draw.label(axes, x + width / 2, y + height * of_note, note, size=8.5)


def _arrow(axes, start, stop, name, **look):
    draw.arrow(axes, start, stop, **look)
    axes.text((start[0] + stop[0]) / 2, start[1] + 0.3, name, ha="center", size=8.5)


def owners(layout, shape=(64, 16)):
    """Which warp, and which of its 32 lanes, holds each element of a matrix in a layout of a warpgroup."""
    warp, lane = owners_of(layout, shape)
    figure, (left, right) = style.subplots(1, 2, width=9.5, height=4.6, width_ratios=(1, 2.4))
    shades = LinearSegmentedColormap.from_list("warps", ["#DCEBF5", style.QUERY])
    left.imshow(warp, cmap=shades, aspect="auto", vmin=-1, vmax=4)
    for index in range(4):
        rows = np.flatnonzero((warp == index).any(axis=1))
        draw.label(left, shape[1] / 2 - 0.5, rows.mean(), f"warp {index}", weight="bold")
    left.set(ylabel="row of the matrix", title="the warp that holds it")
    rows = 16
    mine = np.isin(lane[:rows], (0, 5))
    marked = LinearSegmentedColormap.from_list("marked", ["white", style.KEY])
    right.imshow(np.where(mine, 1, 0), cmap=marked, aspect="auto")
    for (row, column), number in np.ndenumerate(lane[:rows]):
        draw.label(right, column, row, number, size=8, weight="bold" if mine[row, column] else None)
    right.set_title("the lane of warp 0 that holds it; two lanes marked")
    for axes in (left, right):
        axes.set_xlabel("column of the matrix")
    return figure


def owners_of(layout, shape):
    """(warp, lane) of every element of a matrix of a shape, in a Mosaic GPU layout."""
    held = layouts.registers(layout, np.arange(np.prod(shape)).reshape(shape))
    warp, lane = np.empty((2, np.prod(shape)), int)
    warp[held], lane[held] = np.ogrid[:4, :32, :1, :1][:2]
    return warp.reshape(shape), lane.reshape(shape)


TOLD = 5  # bars of a row of a timeline that its words tell


def timelines(runs, until=None, units=()):
    """Who works and who waits. runs: {title: Run of the model}; units: rows for these units as well."""
    until = max(run.end for run in runs.values()) if until is None else until
    rows = {}
    for title, run in runs.items():
        shown = {*run.tiles, *(span.who for span in run.spans)} - {"memory"}
        rows[title] = [name for name in (*run.tiles, *units) if name in shown]
    heights = [len(names) for names in rows.values()]
    height = 0.45 * sum(heights) + 0.75 * len(runs) + 0.5
    options = {"height_ratios": heights, "squeeze": False, "sharex": True}
    figure, panels = style.subplots(len(runs), 1, width=10, height=height, **options)
    used, lengths, said = set(), {}, []
    for axes, (title, run), names in zip(panels[:, 0], runs.items(), rows.values(), strict=True):
        begins = {name: [] for name in names}
        for span in run.spans:
            if span.who not in names or span.start >= until:
                continue
            label = span.what.split(": ")[-1]
            kind = "copy" if label.startswith("copy") else label.rstrip("0123456789")
            used.add(kind)
            colour, hatch, name = KINDS[kind]
            y, width = names.index(span.who), min(span.stop, until) - span.start
            owner = f"{span.what[8]}: " if span.what.startswith("compute") and len(run.tiles) > 2 else ""
            if kind != "wait" and not (kind == "p" and span.who in run.tiles and "exponentials" in names):
                lengths.setdefault(name, span.stop - span.start)
                begins[span.who].append(f"{owner}{label} {span.start:,.0f}")
            look = EDGE | {"hatch": hatch, "alpha": 0.75} | ({"ec": style.SKIPPED} if kind == "wait" else {})
            axes.barh(y, width, left=span.start, height=0.72, color=colour, **look)
            if kind != "wait" and width > until / 30:
                text = owner + label.removeprefix("copy ")
                draw.label(axes, span.start + width / 2, y, text, size=7.5, bbox=draw.paper(0.8, 0.85))
        axes.set_yticks(range(len(names)), names)
        axes.set(ylim=(len(names) - 0.45, -0.55), title=title)
        told = (f"{name}: {', '.join(of[:TOLD])}{', …' * (len(of) > TOLD)}" for name, of in begins.items() if of)
        said.append(f"{title}. {'; '.join(told)}.")
    axes.set(xlim=(0, until), xlabel="cycles of the model")
    handles = draw.keys({name: (fc, hatch) for kind, (fc, hatch, name) in KINDS.items() if kind in used}, **EDGE)
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8.5)
    lasting = ", ".join(f"{name} {length:.0f}" for name, length in lengths.items())
    figure.alt = f"Who works, and from which cycle on. Cycles: {lasting}. {' '.join(said)}"
    return figure


def phases(run, barriers):
    """Barriers over time: the number of completed phases of each, and the parity that the hardware keeps."""
    places = sorted((place for place in run.phases if place[0] in barriers), key=lambda p: (barriers.index(p[0]), p[1]))
    names = [f"{name}[{slot}]" for name, slot in places]
    figure, axes = style.subplots(width=10, height=0.42 * len(places) + 1.2)
    said = []
    for y, (name, place) in enumerate(zip(names, places, strict=True)):
        said.append(f"{name}: {', '.join(f'{time:,.0f}' for time in run.phases[place])}")
        for number, (start, stop) in enumerate(itertools.pairwise([0, *run.phases[place], run.end])):
            colour, hatch = (style.KEY, "//") if number % 2 else (style.PAPER, None)
            axes.barh(y, stop - start, 0.72, left=start, color=colour, hatch=hatch, alpha=0.7, **EDGE)
            if stop - start > run.end / 40:
                draw.label(axes, (start + stop) / 2, y, number, size=8, bbox=draw.paper(0.8, 0.85))
    draw.rows(axes, names, marks=True)
    axes.set(xlim=(0, run.end), xlabel="cycles of the model")
    axes.set_title("phases completed so far, by barrier (hatched: odd)")
    figure.alt = f"The cycles of the model in which each barrier completes a phase. {'; '.join(said)}."
    return figure


def registers(rows, limits):
    """Lying bars of the registers that a thread needs for a tile, each beside what it may have.

    rows: {name: {part: registers}}, parts s, p and acc.
    """
    parts = next(iter(rows.values()))
    looks = dict(zip(parts, ((style.LOGITS, "//"), (style.KEY, "xx"), (style.OUTPUT, "..")), strict=True))
    figure, axes = style.subplots(width=9.5, height=0.5 * len(rows) + 1.7)
    said = []
    for y, ((name, row), limit) in enumerate(zip(rows.items(), limits, strict=True)):
        left = 0.0
        for part, amount in row.items():
            colour, hatch = looks[part]
            axes.barh(y, amount, 0.68, left=left, color=colour, hatch=hatch, alpha=0.7, **EDGE)
            left += amount
        axes.plot([limit] * 2, [y - 0.45, y + 0.45], color=style.INK, lw=2.2)
        told = ", ".join(f"{part} {amount:.3g}" for part, amount in row.items() if amount)
        said.append(f"{name}: {told}; in all {left:.3g} of {limit:.3g}.")
    draw.rows(axes, rows, marks=True)
    title, unit, may = "what the arrays of a tile need", "registers of a compute thread", "what a thread may have"
    axes.set(xlabel=f"{unit} (thick line: {may})", title=title)
    draw.beside(axes, handles=draw.keys(looks, alpha=0.7, **EDGE), fontsize=8.5)
    figure.alt = f"{title}, in {unit}, of {may}. {' '.join(said)}"
    return figure


def program_ends(ends):
    """When each program is done, against the mean. ends: {order: array of a number for each program}."""
    figure, panels = style.subplots(1, len(ends), width=10, height=3.2, sharey=True)
    said = []
    for axes, (name, values) in zip(panels, ends.items(), strict=True):
        late = 100 * (values / np.mean(values) - 1)
        step = int(np.argmax(np.abs(np.diff(late))))
        jump = (step, step + 1) if abs(late[step + 1] - late[step]) > np.ptp(late) / 2 else ()
        told = (f"program {i} {late[i]:+.1f}" for i in (0, *jump, len(late) - 1))
        said.append(f"{name}: {', '.join(told)}; from {late.min():+.1f} to {late.max():+.1f}.")
        for sign, colour in ((1, style.OUTPUT), (-1, style.SKIPPED)):
            axes.bar(range(len(values)), np.where(sign * late > 0, late, 0), width=1.0, color=colour)
        axes.axhline(0, color=style.INK, lw=1.2)
        axes.set(xlabel="program", title=name)
        axes.margins(x=0.01)
    panels[0].set_ylabel("ends later than the mean (%)")
    figure.alt = f"By how many per cent of the mean a program ends later. {' '.join(said)}"
    return figure


def references(offsets, errors):
    """Relative error of out by how far m is from the maximum. errors: {dtype: an error for each offset}."""
    figure, axes = style.subplots(width=9.5, height=3.2)
    finite = {name: np.where(np.isfinite(values), values, np.nan) for name, values in errors.items()}
    draw.lines(axes, offsets, finite, ((style.OUTPUT, "o", "-"), (style.QUERY, "s", "-")), ms=4)
    axes.axvline(0, color=style.INK, lw=1.0, ls="--")
    axes.set(yscale="log", xlabel="m above the maximum (powers of two)", ylabel="relative error of out")
    axes.legend(loc="upper left")
    return figure


FIGURES = {"10-sm.png": sm}
