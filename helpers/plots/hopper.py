"""Pictures of notebooks 10 and 11: warpgroups, what they hold, when they work and when they wait."""

import itertools

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch, Rectangle

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
ROLES = {  # of what is held, by how its name begins
    "q": style.QUERY,
    "k": style.KEY,
    "v": style.VALUE,
    "s": style.LOGITS,
    "p": style.KEY,
    "acc": style.OUTPUT,
    "out": style.OUTPUT,
    "m,": style.STATE,
}


def processor():
    """One SM: its memories, its units, and the warpgroups of one program."""
    figure, axes = style.subplots(width=10, height=4.9)
    style.bare(axes)
    axes.set(xlim=(0, 20), ylim=(-0.1, 9.8))
    note = "all of q, k, v,\nout, lse\n\n141 GB\nshared by all\nSMs"
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
        note = "s, p, acc, m, l in registers" if index < 2 else "asks TMA for copies"
        axes.text(left, y + 1.2, f"{name}: {note}", va="center", size=9)
        for quarter in range(4):
            colour = style.QUERY if index < 2 else style.SKIPPED
            box = (left + wide * quarter, y), wide - 0.12, 0.85
            axes.add_patch(Rectangle(*box, fc=colour, alpha=0.25, ec="none"))
            axes.add_patch(Rectangle(*box, fc="none", ec=colour, lw=1.4))
            draw.label(axes, left + wide * (quarter + 0.47), y + 0.42, f"warp {quarter}", size=9)
    for quarter in range(4):
        note = "warp\nscheduler\ntensor core\nexponentials"
        box = (left + wide * quarter, 0.6), wide - 0.12, 1.75
        axes.add_patch(Rectangle(*box, fc=style.LOGITS, alpha=0.3, ec="none"))
        axes.add_patch(Rectangle(*box, fc="none", ec=style.LOGITS, lw=1.4))
        draw.label(axes, left + wide * (quarter + 0.47), 1.45, note, size=8)
    axes.text(left, 2.75, "four quarters, each with units of its own:", va="center", size=9)
    _arrow(axes, (9.9, 1.45), (12.2, 1.45), "operands")
    _arrow(axes, (9.9, 7.5), (12.2, 7.5), "load, store", both=True)
    return figure


def _box(axes, x, y, width, height, name, note, colour):
    draw.box(axes, x, y, width, height, colour, alpha=0.25, ec="none")
    draw.box(axes, x, y, width, height, "none", ec=colour, lw=1.6)
    lines = note.count("\n")
    draw.label(axes, x + width / 2, y + height * (0.68 if lines < 2 else 0.85), name, weight="bold")
    draw.label(axes, x + width / 2, y + height * (0.3 if lines < 2 else 0.45), note, size=8.5)


def _arrow(axes, start, stop, name, both=False):
    heads = "<|-|>" if both else "-|>"
    draw.arrow(axes, start, stop, arrowstyle=heads)
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
    """(warp, lane) of every element of a matrix of a shape, from the tiles of a Mosaic GPU layout."""
    tiled = layout.to_mgpu()
    indices = np.arange(np.prod(shape)).reshape(shape)
    for tile in tiled.tiling.tiles:  # each tile splits the last axes into (outer..., inner...)
        lead, last = indices.shape[: indices.ndim - len(tile)], indices.shape[indices.ndim - len(tile) :]
        split = [part for size, inner in zip(last, tile, strict=True) for part in (size // inner, inner)]
        indices = indices.reshape(*lead, *split)
        first = len(lead)
        order = [*range(first), *range(first, indices.ndim, 2), *range(first + 1, indices.ndim, 2)]
        indices = indices.transpose(order)
    owner = {}
    for kind, dimensions in (("warp", tiled.warp_dims), ("lane", tiled.lane_dims)):
        found = np.zeros(indices.shape, int)
        for dimension in dimensions:
            axis = indices.ndim + dimension
            along = np.arange(indices.shape[axis]).reshape([-1 if a == axis else 1 for a in range(indices.ndim)])
            found = found * indices.shape[axis] + along
        flat = np.empty(indices.size, int)
        flat[indices.ravel()] = found.ravel()
        owner[kind] = flat.reshape(shape)
    return owner["warp"], owner["lane"]


TOLD = 5  # bars of a row of a timeline that its words tell


def timelines(runs, until=None, units=()):
    """Who works and who waits. runs: {title: Run of the model}; units: rows for these units as well."""
    until = max(run.end for run in runs.values()) if until is None else until
    rows = {title: _rows(run, units) for title, run in runs.items()}
    heights = [len(names) for names in rows.values()]
    figure, panels = style.subplots(
        len(runs), 1, width=10, height=0.45 * sum(heights) + 0.75 * len(runs) + 0.5,
        height_ratios=heights, squeeze=False, sharex=True,
    )  # fmt: skip
    used, lengths, said = set(), {}, []
    for axes, (title, run) in zip(panels[:, 0], runs.items(), strict=True):
        names = rows[title]
        begins = {name: [] for name in names}
        for span in run.spans:
            if span.who not in names or span.start >= until or (span.what == "wait" and span.who == "memory"):
                continue
            label = span.what.split(": ")[-1]
            kind = "copy" if label.startswith("copy") else label.rstrip("0123456789")
            used.add(kind)
            colour, hatch, _ = KINDS[kind]
            y, width = names.index(span.who), min(span.stop, until) - span.start
            owner = f"{span.what[8]}: " if span.what.startswith("compute") and len(run.tiles) > 2 else ""
            if kind != "wait" and not (kind == "p" and span.who in run.tiles and "exponentials" in names):
                lengths.setdefault(KINDS[kind][2], span.stop - span.start)
                begins[span.who].append(f"{owner}{label} {span.start:,.0f}")
            edge = style.SKIPPED if kind == "wait" else style.INK
            axes.barh(y, width, left=span.start, height=0.72, color=colour, ec=edge, hatch=hatch, lw=0.6, alpha=0.75)
            if kind != "wait" and width > until / 30:
                place = {"ha": "center", "va": "center", "size": 7.5}
                box = draw.paper(0.8, 0.85)
                axes.text(span.start + width / 2, y, owner + label.removeprefix("copy "), bbox=box, **place)
        axes.set_yticks(range(len(names)), names)
        axes.set(ylim=(len(names) - 0.45, -0.55), title=title)
        told = (f"{name}: {', '.join(of[:TOLD])}{', …' * (len(of) > TOLD)}" for name, of in begins.items() if of)
        said.append(f"{title}. {'; '.join(told)}.")
    axes.set(xlim=(0, until), xlabel="cycles of the model")
    shown = [kind for kind in KINDS if kind in used]
    edge = {"ec": style.INK, "lw": 0.6}
    handles = [Patch(fc=fc, hatch=hatch, label=label, **edge) for fc, hatch, label in map(KINDS.get, shown)]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8.5)
    lasting = ", ".join(f"{name} {length:.0f}" for name, length in lengths.items())
    figure.alt = f"Who works, and from which cycle on. Cycles: {lasting}. {' '.join(said)}"
    return figure


def _rows(run, units):
    names = [name for name in run.tiles if name != "memory"]
    return [*names, *(unit for unit in units if any(span.who == unit for span in run.spans))]


def phases(run, barriers):
    """Barriers over time: the number of completed phases of each, and the parity that the hardware keeps."""
    places = sorted((place for place in run.phases if place[0] in barriers), key=lambda p: (barriers.index(p[0]), p[1]))
    figure, axes = style.subplots(width=10, height=0.42 * len(places) + 1.2)
    said = []
    for y, place in enumerate(places):
        said.append(f"{place[0]}[{place[1]}]: {', '.join(f'{time:,.0f}' for time in run.phases[place])}")
        edges = [0, *run.phases[place], run.end]
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            odd = number % 2
            axes.barh(y, stop - start, left=start, height=0.72, color=style.KEY if odd else style.PAPER,
                      alpha=0.7, ec=style.INK, lw=0.6, hatch="//" if odd else None)  # fmt: skip
            if stop - start > run.end / 40:
                box = draw.paper(0.8, 0.85)
                draw.label(axes, (start + stop) / 2, y, number, size=8, bbox=box)
    axes.set_yticks(range(len(places)), [f"{name}[{slot}]" for name, slot in places])
    axes.invert_yaxis()
    axes.set(xlim=(0, run.end), xlabel="cycles of the model")
    axes.set_title("phases completed so far, by barrier (hatched: odd)")
    figure.alt = f"The cycles of the model in which each barrier completes a phase. {'; '.join(said)}."
    return figure


def stacked(rows, limit, unit, title, limit_name, scale=1.0):
    """Horizontal stacked bars against a limit. rows: {name: {part: amount}}."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    spare = iter((style.SKIPPED, style.FAINT, style.STATE, style.KEY))
    colours = [next((colour for start, colour in ROLES.items() if part.startswith(start)), None) for part in parts]
    colours = [next(spare) if colour is None else colour for colour in colours]
    hatches = ["//", "xx", "..", "\\\\", None, "--", "++", None]
    figure, axes = style.subplots(width=9.5, height=0.5 * len(rows) + 1.7)
    for y, row in enumerate(rows.values()):
        left = 0.0
        for part, amount in row.items():
            index = parts.index(part)
            axes.barh(y, amount * scale, left=left, height=0.68, color=colours[index], alpha=0.7,
                      hatch=hatches[index], ec=style.INK, lw=0.6)  # fmt: skip
            left += amount * scale
    limits = limit if isinstance(limit, (list, tuple)) else [limit] * len(rows)
    said = []
    for (name, row), at in zip(rows.items(), limits, strict=True):
        told = ", ".join(f"{part} {amount * scale:.3g}" for part, amount in row.items() if amount)
        said.append(f"{name}: {told}; in all {sum(row.values()) * scale:.3g} of {at * scale:.3g}.")
    figure.alt = f"{title}, in {unit}, of {limit_name}. {' '.join(said)}"
    for y, at in enumerate(limits):
        axes.plot([at * scale] * 2, [y - 0.45, y + 0.45], color=style.INK, lw=2.2)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(xlabel=f"{unit} (thick line: {limit_name})", title=title)
    handles = [
        Patch(fc=colour, hatch=hatch, ec=style.INK, lw=0.6, alpha=0.7, label=part)
        for colour, hatch, part in zip(colours, hatches, parts, strict=False)
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
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


def rungs(figures, names):
    """Recorded TFLOP/s of the rungs. figures: {case: {rung name: TFLOP/s}}; names: in order."""
    figure, axes = style.subplots(width=10, height=0.55 * len(names) + 1.4)
    height = 0.8 / len(figures)
    colours = [style.QUERY, style.KEY, style.VALUE, style.LOGITS]
    hatches = [None, "//", "..", "xx"]
    for index, (case, values) in enumerate(figures.items()):
        found = [(y, values[name]) for y, name in enumerate(names) if name in values]
        y = [place - 0.4 + height * (index + 0.5) for place, _ in found]
        bars = axes.barh(y, [value for _, value in found], height=height, color=colours[index], alpha=0.75,
                         hatch=hatches[index], ec=style.INK, lw=0.5, label=case)  # fmt: skip
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=7.5)
    axes.set_yticks(range(len(names)), [f"{number}  {name}" for number, name in enumerate(names, 1)])
    axes.invert_yaxis()
    axes.set_xlabel("recorded TFLOP/s")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
    return figure


def company(counts, figures):
    """TFLOP/s of rungs over the compute warpgroups on an SM. counts, figures: {case: {rung: number}}."""
    figure, panels = style.subplots(1, len(counts), width=10, height=3.3, sharey=True)
    said = []
    for axes, (case, many) in zip(panels, counts.items(), strict=True):
        told = (f"rung {number}: {count}, {figures[case][number]:.0f}" for number, count in sorted(many.items()))
        said.append(f"{case}. {'; '.join(told)}.")
        taken = []
        for number, count in sorted(many.items(), key=lambda item: figures[case][item[0]]):
            y = figures[case][number]
            # Beside each other where points of the same count lie close.
            side = sum(count == x and abs(y - other) < 40 for x, other in taken) % 2
            taken.append((count, y))
            looks = {"fc": style.PAPER} if number == 1 else {"fc": style.OUTPUT}
            axes.scatter(count, y, s=55, ec=style.INK, lw=1.0, zorder=2, marker="s" if number == 1 else "o", **looks)
            axes.annotate(str(number), (count, y), xytext=(-9 if side else 9, 0), textcoords="offset points",
                          ha="right" if side else "left", va="center", size=10)  # fmt: skip
        axes.set_title(case)
        axes.set_xticks(range(1, max(max(of.values()) for of in counts.values()) + 1))
        axes.set_xlim(0.4, axes.get_xticks()[-1] + 0.6)
    panels[0].set(ylim=(0, 1.1 * max(max(of.values()) for of in figures.values())), ylabel="recorded TFLOP/s")
    figure.supxlabel("compute warpgroups on one SM (square: ordinary copies)", size=10)
    figure.alt = f"Compute warpgroups on one SM, and recorded TFLOP/s. {' '.join(said)}"
    return figure


def against(cases, mine, theirs, names=("this kernel", "cuDNN")):
    """Two implementations side by side, by case. cases: labels; mine, theirs: TFLOP/s."""
    figure, axes = style.subplots(width=10, height=3.8)
    x = np.arange(len(cases))
    for values, shift, colour, hatch, name in (
        (mine, -0.2, style.OUTPUT, None, names[0]),
        (theirs, 0.2, style.SKIPPED, "//", names[1]),
    ):
        looks = {"color": colour, "hatch": hatch, "ec": style.INK, "lw": 0.5, "alpha": 0.8}
        bars = axes.bar(x + shift, values, width=0.4, label=name, **looks)
        axes.bar_label(bars, fmt="%.0f", fontsize=7.5, padding=2)
    axes.set_xticks(x, cases, fontsize=8.5)
    axes.set_ylabel("recorded TFLOP/s")
    axes.legend(loc="upper left", ncols=2)
    axes.margins(y=0.15)
    return figure


def references(offsets, errors):
    """Relative error of out by how far m is from the maximum. errors: {dtype: an error for each offset}."""
    figure, axes = style.subplots(width=9.5, height=3.2)
    for (name, values), colour, marker in zip(errors.items(), (style.OUTPUT, style.QUERY), "os", strict=True):
        axes.semilogy(
            offsets, np.where(np.isfinite(values), values, np.nan), color=colour, marker=marker, ms=4, label=name
        )
    axes.axvline(0, color=style.INK, lw=1.0, ls="--")
    axes.set(xlabel="m above the maximum (powers of two)", ylabel="relative error of out")
    axes.legend(loc="upper left")
    return figure


FIGURES = {"10-processor.png": processor}
