"""Pictures of notebook 12: operands, shared memory, registers, the owners of dq, timelines and recorded figures."""

import itertools

import matplotlib.ticker
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from helpers.instruments.on_chip import SMEM_LIMIT, SMEM_RATE, TENSOR_RATE, WARPGROUP
from helpers.plots import draw, style

KIB = 1024
COLOURS = {
    "q": style.QUERY,
    "k": style.KEY,
    "v": style.VALUE,
    "do": style.OUTPUT,
    "s": style.LOGITS,
    "p": style.LOGITS,
    "dp": style.LOGITS,
    "ds": style.LOGITS,
    "dq": style.QUERY,
    "dk": style.KEY,
    "dv": style.VALUE,
    "lse": style.STATE,
    "delta": style.STATE,
}
HATCHES = {"do": "\\\\", "dp": "\\\\", "ds": "//", "dq": "xx", "dk": "xx", "dv": "xx", "delta": ".."}
# How the product of a name is written, for kernels that own keys and for the one that owns queries.
BY_KEYS = {
    "s": ("k", "qᵀ", "sᵀ"),
    "dp": ("v", "doᵀ", "dpᵀ"),
    "dv": ("pᵀ", "do", "dv"),
    "dk": ("dsᵀ", "q", "dk"),
    "dq": ("ds", "k", "dq"),
}
BY_QUERIES = {"s": ("q", "kᵀ", "s"), "dp": ("do", "vᵀ", "dp"), "dq": ("ds", "k", "dq")}
BY_HEAD = ((64, style.QUERY, "o"), (128, style.OUTPUT, "s"))  # colour and mark of a head dim


def products(kernel):
    """The products of one warpgroup in one step, each a left operand, a right operand and an accumulator."""
    names = BY_QUERIES if kernel.name == "dq" else BY_KEYS
    figure, axes = style.subplots(width=10, height=1.12 * len(kernel.products) + 0.9)
    style.bare(axes)
    unit = 1 / 190
    for row, product in enumerate(kernel.products):
        left, right, result = names[product.name]
        y = 1.0 * row
        held = product.left == "registers"
        size = 2 * product.m * product.k
        where = f"registers, {size // WARPGROUP // 4} a thread" if held else f"shared memory, {size // KIB} KiB"
        _tile(axes, 1.9, y, product.m * unit, product.k * unit, left, held, where)
        draw.label(axes, 3.35, y, "×", size=14)
        where = f"shared memory, {2 * product.k * product.n // KIB} KiB"
        _tile(axes, 4.8, y, product.k * unit, product.n * unit, right, False, where)
        draw.label(axes, 6.25, y, "→", size=14)
        where = f"accumulator, {product.m * product.n // WARPGROUP} a thread"
        _tile(axes, 7.7, y, product.m * unit, product.n * unit, result, True, where)
        axes.text(0.1, y, f"{product.m}×{product.k}×{product.n}", va="center", size=9)
    axes.set(xlim=(0, 10), ylim=(len(kernel.products) - 0.3, -0.62))
    axes.set_title(f"{kernel.name}: what one warpgroup multiplies in a step, first to last")
    figure.legend(
        handles=[
            Patch(fc="#FFFFFF", ec=style.INK, label="in shared memory"),
            Patch(fc=style.SKIPPED, ec=style.INK, hatch="///", label="in registers"),
        ],
        loc="outside lower center",
        ncols=2,
    )
    return figure


def _tile(axes, x, y, height, width, name, held, where):
    colour = COLOURS[name.removesuffix("ᵀ")]
    box = x - width / 2, y - height / 2
    axes.add_patch(Rectangle(box, width, height, fc=colour, alpha=0.35, ec="none"))
    hatch = "///" if held else None
    axes.add_patch(Rectangle(box, width, height, fc="none", ec=colour, lw=1.4, hatch=hatch))
    draw.label(axes, x, y, name, weight="bold", bbox=draw.paper(1, 0.8))
    axes.text(x, y + height / 2 + 0.03, where, ha="center", va="top", size=8)


def shared_memory(kernels):
    """Stacked bars of what kernels keep in shared memory, with the limit. kernels: {title: `on_chip.Kernel`}."""
    figure, axes = style.subplots(width=10, height=0.72 * len(kernels) + 1.5)
    said = []
    for y, (title, kernel) in enumerate(kernels.items()):
        left, small = 0, 0
        told = (f"{buffer.name.removesuffix('_smem')} {buffer.bytes / KIB:.3g}" for buffer in kernel.buffers)
        said.append(f"{title}: {', '.join(told)}; in all {kernel.smem / KIB:g}.")
        for buffer in kernel.buffers:
            name = buffer.name.removesuffix("_smem")
            amount = buffer.bytes / KIB
            if name in ("lse", "delta"):
                small += amount
                continue
            _bar(axes, y, left, amount, name, f"{name}\n{amount:.0f}")
            left += amount
        _bar(axes, y, left, small, "lse", None)
        axes.text(left + small + 1.5, y, f"{kernel.smem / KIB:g}", va="center", size=9, weight="bold")
    axes.axvline(SMEM_LIMIT / KIB, color=style.INK, ls="--", lw=1.4)
    axes.text(SMEM_LIMIT / KIB + 1, -0.62, f"limit: {SMEM_LIMIT // KIB}", va="center", size=9)
    axes.set_yticks(range(len(kernels)), kernels)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, SMEM_LIMIT / KIB * 1.12), ylim=(len(kernels) - 0.5, -0.8))
    axes.set_xlabel("KiB of shared memory (the narrow bar at the end: lse and delta)")
    axes.set_title("What one program keeps in shared memory")
    figure.alt = f"What one program keeps in shared memory, in KiB, of {SMEM_LIMIT // KIB}. {' '.join(said)}"
    return figure


def _bar(axes, y, left, width, name, label, height=0.66):
    colour, hatch = COLOURS[name], HATCHES.get(name)
    axes.barh(y, width, height, left=left, color=colour, alpha=0.35, ec="none")
    axes.barh(y, width, height, left=left, fc="none", ec=colour, hatch=hatch, lw=1.2)
    if label:
        draw.label(axes, left + width / 2, y, label, size=8, linespacing=1.0, bbox=draw.paper(0.8, 0.8))


def registers(panels, limit):
    """Stacked bars of registers of a thread. panels: {title: {name: registers}}; limit: what a thread may have."""
    figure, axes = style.subplots(width=10, height=0.62 * len(panels) + 1.4)
    said = []
    for y, (title, held) in enumerate(panels.items()):
        left = 0
        told = ", ".join(f"{name} {amount}" for name, amount in held.items())
        said.append(f"{title}: {told}; in all {sum(held.values())}.")
        for name, amount in held.items():
            _bar(axes, y, left, amount, name.split("1")[0], f"{name}\n{amount}")
            left += amount
        axes.text(left + 2, y, f"{left}" + (" ✗" if left > limit else ""), va="center", weight="bold", size=9)
    axes.axvline(limit, color=style.INK, ls="--", lw=1.4)
    axes.text(limit + 1, -0.62, f"limit: {limit}", va="center", size=9)
    axes.set_yticks(range(len(panels)), panels)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, max(limit * 1.15, 1.08 * max(sum(held.values()) for held in panels.values()))))
    axes.set(ylim=(len(panels) - 0.5, -0.8), xlabel="registers of a thread")
    axes.set_title("Accumulators and 16-bit operands that live at the same time")
    figure.alt = f"{axes.get_title('left')}, in registers of a thread, of {limit}. {' '.join(said)}"
    return figure


def nobody_owns_dq():
    """Programs that walk down columns; each adds to the same tiles of dq."""
    figure, axes = style.subplots(width=9, height=4.4)
    style.bare(axes)
    rows, columns = 4, 4
    axes.set(xlim=(-1.6, 9.6), ylim=(rows + 1.4, -1.2))
    places = (2, 0, 3, 1)  # where each program is now: they do not march in step
    for j in range(columns):
        axes.text(j + 0.47, -0.25, f"k{j}, v{j}", ha="center", va="bottom", size=9)
        draw.box(axes, j, rows + 0.35, 0.94, 0.6, style.KEY, alpha=0.4, ec=style.KEY)
        draw.label(axes, j + 0.47, rows + 0.65, f"dk{j}, dv{j}", size=9)
        _arrow(axes, (j + 0.47, 0.05), (j + 0.47, rows + 0.3), style.KEY)
        for i in range(rows):
            now = places[j] == i
            draw.box(axes, j, i, 0.94, 0.94, style.LOGITS, alpha=0.75 if now else 0.16, ec=style.INK if now else "none")
    for i in range(rows):
        axes.text(-0.12, i + 0.47, f"q{i}, do{i}", ha="right", va="center", size=9)
        draw.box(axes, 6.4, i, 1.2, 0.94, style.QUERY, alpha=0.4, ec=style.QUERY, hatch="xx")
        draw.label(axes, 7.0, i + 0.47, f"dq{i}", size=9, bbox=draw.paper(1))
    for j in range(columns):
        _arrow(axes, (j + 0.97, places[j] + 0.47), (6.35, places[j] + 0.47), style.QUERY)
    axes.text(5.3, -0.25, "TMA adds", ha="center", va="bottom", size=9)
    axes.text(7.0, -0.25, "float32, in memory", ha="center", va="bottom", size=9)
    axes.text(
        7.75,
        2.0,
        "Each tile receives one\npart from each program,\nin the order in which\nthey arrive.",
        va="center",
        size=9,
    )
    draw.label(axes, 2.0, rows + 1.2, "One owner for each: it sums in registers and writes once.", size=9)
    axes.set_title("A program for each tile of keys: dk and dv have owners, dq has none")
    return figure


def _arrow(axes, start, stop, colour):
    draw.arrow(axes, start, stop, colour, size=12, lw=1.4)


def cycles(forms):
    """Least cycles of one step by two units. forms: {title: {kernel: (FLOPs, {what: bytes})}}."""
    figure, axes = style.subplots(width=10, height=0.95 * sum(map(len, forms.values())) + 1.7)
    y, ticks = 0.0, {}
    most, said = 0, []
    for title, kernels in forms.items():
        for name, (flops, traffic) in kernels.items():
            tensor = flops / TENSOR_RATE
            axes.barh(y, tensor, 0.36, color=style.SKIPPED, ec=style.INK, lw=0.8)
            axes.text(tensor + 20, y, f"{tensor:.0f}", va="center", size=9)
            left, told = 0, []
            for what, amount in traffic.items():
                wide = amount / SMEM_RATE
                label = what.split(":")[0].replace(" written", " in").replace(" read by TMA", " out")
                colour = COLOURS.get(what.split(":")[0].split()[0], style.STATE)
                hatch = "" if "operands" in what else "//"
                axes.barh(y + 0.4, wide, 0.36, left=left, color=colour, alpha=0.35, ec="none")
                axes.barh(y + 0.4, wide, 0.36, left=left, fc="none", ec=colour, hatch=hatch, lw=1)
                draw.label(axes, left + wide / 2, y + 0.4, label, size=7.5, bbox=draw.paper(0.5, 0.75))
                left += wide
                told.append(f"{label} {wide:.0f}")
            axes.text(left + 20, y + 0.4, f"{left:.0f}", va="center", size=9)
            most = max(most, left, tensor)
            ticks[y + 0.2] = f"{title}\n{name}" if len(kernels) > 1 else title
            whose = ticks[y + 0.2].replace("\n", ", ")
            said.append(f"{whose}: tensor core {tensor:.0f}, shared memory {left:.0f}: {', '.join(told)}.")
            y += 1
        y += 0.25
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, most * 1.1), xlabel="cycles for 64 queries and 128 keys, at the least")
    axes.set_title("Grey: tensor core. Coloured: shared memory (hatched: not an operand)")
    figure.alt = f"Cycles for 64 queries and 128 keys, at the least. {' '.join(said)}"
    return figure


def timelines(runs, shown):
    """What two warpgroups and the tensor core do. runs: {title: spans of a `timeline.Run`}; shown: cycles from, to."""
    lanes = ["warpgroup 0", "warpgroup 1", "tensor core"]
    figure, panels = style.subplots(len(runs), 1, width=10, height=2.15 * len(runs) + 0.5, sharex=True, squeeze=False)
    said = []
    for axes, (title, spans) in zip(panels[:, 0], runs.items(), strict=True):
        busy = {lane: [] for lane in lanes}
        for span in _joined(spans):
            start, stop = max(span.start, shown[0]), min(span.stop, shown[1])
            if span.who not in lanes or span.what == "wait" or stop <= start:
                continue
            name, lane = span.what.split(": ")[-1], lanes.index(span.who)
            busy[span.who].append((start, stop))
            hatch = "//" if lanes[1] in (span.who, span.what.split(": ")[0]) else None
            colour = COLOURS[name.split()[-1]]
            axes.barh(lane, stop - start, 0.78, left=start, color=colour, alpha=0.4, ec="none")
            axes.barh(lane, stop - start, 0.78, left=start, fc="none", ec=colour, hatch=hatch, lw=1)
            label = name.replace("store ", "↓")
            if label.startswith("↓") and stop - start < 0.025 * (shown[1] - shown[0]):
                label = "↓"
            if stop - start > (0.006 + 0.007 * len(label)) * (shown[1] - shown[0]):
                box = draw.paper(0.6, 0.8)
                draw.label(axes, (start + stop) / 2, lane, label, size=8, bbox=box)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(2.6, -0.6)
        axes.set_xlim(*shown)
        axes.set_title(title)
        told = (f"{lane} {sum(stop - start for start, stop in of) / np.ptp(shown):.0%}" for lane, of in busy.items())
        edges = [shown[0], *itertools.chain(*busy["tensor core"]), shown[1]]
        pauses = [f"{a:,.0f} to {b:,.0f}" for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
        said.append(f"{title}: {', '.join(told)}; pauses of the tensor core: {', '.join(pauses) or 'none'}.")
    panels[-1, 0].set_xlabel("cycles of the model (hatched: work of warpgroup 1; ↓: written to shared memory)")
    figure.alt = f"Who works how much of cycles {shown[0]:,} to {shown[1]:,} of the model. {' '.join(said)}"
    return figure


def _joined(spans):
    """The spans with those of one warpgroup that follow each other under one name made one."""
    last, found = {}, []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        before = last.get(span.who)
        if before is not None and (found[before].what, found[before].stop) == (span.what, span.start):
            found[before] = found[before]._replace(stop=span.stop)
        else:
            last[span.who] = len(found)
            found.append(span)
    return found


def slower_threads(factors, cycles_of):
    """Cycles of a step against how slow the threads are. cycles_of: {title: [cycles for each factor]}."""
    figure, axes = style.subplots(width=8, height=3.4)
    looks = [(style.KEY, "o", "-"), (style.QUERY, "s", "--"), (style.VALUE, "^", ":")]
    for (title, values), (colour, marker, line) in zip(cycles_of.items(), looks, strict=False):
        axes.plot(factors, values, color=colour, marker=marker, ls=line, label=title)
    axes.set(ylim=(0, None), xlabel="work of the threads, in units of the estimate", ylabel="cycles of a step")
    axes.set_title("64 queries and 128 keys, H = 128")
    axes.legend(loc="lower right")
    return figure


def against_cudnn(records):
    """TFLOP/s of recorded backward passes against T, a panel for each head dim and mask."""
    figure, panels = style.subplots(1, 4, width=10, height=3.3, sharey=True)
    looks = {"cudnn": ("cuDNN", style.FAINT, "s", "--"), "hopper": ("hopper", style.OUTPUT, "o", "-")}
    for axes, (H, is_causal) in zip(panels, ((64, False), (64, True), (128, False), (128, True)), strict=True):
        for implementation, (label, colour, marker, line) in looks.items():
            wanted = implementation, H, is_causal
            mine = [r for r in records if (r["implementation"], r["H"], r["is_causal"]) == wanted]
            mine.sort(key=lambda r: r["T"])
            tflops = [r["tflops"] for r in mine]
            axes.plot([r["T"] for r in mine], tflops, color=colour, marker=marker, ls=line, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks([1024, 4096, 16384], ["1k", "4k", "16k"])
        axes.minorticks_off()
        axes.set(xlabel="T = S", title=f"H = {H}, {'causal' if is_causal else 'full'}")
    panels[0].set(ylim=(0, None), ylabel="TFLOP/s, backward")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def bars(entries):
    """TFLOP/s by name, a panel for each head dim and mask. entries: a recorded ladder or variants of one T."""
    names = list(dict.fromkeys(entry["name"] for entry in entries))
    columns = sorted({(entry["H"], entry["is_causal"]) for entry in entries})
    height = 0.34 * len(names) + 1.3
    figure, panels = style.subplots(1, len(columns), width=10, height=height, sharey=True, squeeze=False)
    for axes, (H, is_causal) in zip(panels[0], columns, strict=True):
        for y, name in enumerate(names):
            found = [e["tflops"] for e in entries if (e["name"], e["H"], e["is_causal"]) == (name, H, is_causal)]
            if not found:
                axes.text(8, y, "not tried", va="center", size=8, color=style.FAINT)
                continue
            wrong = "nothing added" in name or name.startswith("without")
            colour = style.SKIPPED if name.startswith("cuDNN") else style.PAPER if wrong else style.OUTPUT
            axes.barh(y, found[0], 0.74, color=colour, alpha=0.55, hatch="//" if wrong else None, ec=style.INK, lw=0.8)
            axes.text(found[0] - 8, y, f"{found[0]:.0f}", ha="right", va="center", size=8, bbox=draw.paper(0.6, 0.8))
        axes.set_title(f"H = {H}, {'causal' if is_causal else 'full'}")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
        axes.set_xlabel("TFLOP/s")
    panels[0, 0].set_yticks(range(len(names)), names)
    panels[0, 0].tick_params(axis="y", length=0)
    panels[0, 0].invert_yaxis()
    return figure


def factors(changes):
    """Speed with a change by that without it, a row for each change. changes: as `hopper_figures.factors`."""
    cases = [(f"H = {H}, {mask}", colour, mark, mask) for H, colour, mark in BY_HEAD for mask in ("full", "causal")]
    tried = [case for case in range(len(cases)) if any(found[case] for _, found in changes)]
    figure, axes = style.subplots(width=8.4, height=0.3 * len(changes) + 1.5)
    axes.axvline(1, color=style.FAINT, lw=1)
    for place, case in enumerate(tried):
        name, colour, mark, mask = cases[case]
        rows = [row for row, (_, found) in enumerate(changes) if found[case]]
        apart = 0.16 * (place - (len(tried) - 1) / 2)  # so that none hides another
        axes.plot(
            [changes[row][1][case] for row in rows],
            [row + apart for row in rows],
            mark,
            color=colour,
            mfc=colour if mask == "full" else style.PAPER,
            ms=6,
            mew=1.5,
            label=name,
        )
    axes.set_yticks(range(len(changes)), [name for name, _ in changes])
    axes.grid(axis="y", color=style.SKIPPED, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("speed, by that without the change")
    figure.legend(loc="outside lower center", ncols=len(tried))
    shown = lambda found: ", ".join(f"{found[case]:.3f}" if found[case] else "–" for case in tried)
    told = "; ".join(f"{name} {shown(found)}" for name, found in changes)
    figure.alt = f"Speed, by that without the change, for {'; '.join(cases[case][0] for case in tried)}. {told}."
    return figure


def walks(runs, processors):
    """Who reads which tile when. runs: {(title, label of the tiles): [step]}, a step being [(program, place)]."""
    figure, panels = style.subplots(1, len(runs), width=10, height=3.9, sharex=True)
    for axes, ((title, label), steps) in zip(panels, runs.items(), strict=True):
        lines = {}
        for now, step in enumerate(steps):
            for program, place in step:
                line = lines.setdefault(program, [])
                if line and abs(place - line[-1][1]) > 1:  # a jump to the next head is no line
                    line.append((now, np.nan))
                line.append((now, place))
        starts = {}
        for program, line in sorted(lines.items()):
            axes.plot(*zip(*line, strict=True), color=style.KEY if program < processors else style.QUERY, lw=1.6)
            starts.setdefault(line[0], []).append(program)
        for (x, y), programs in starts.items():
            text = f"{programs[0]}" if len(programs) == 1 else f"{programs[0]} to {programs[-1]}"
            axes.text(x - 1, y, text, size=8, ha="right", va="center")
        axes.margins(x=0.12)  # room for the numbers
        axes.set(xlabel="step", ylabel=label, title=title)
    handles = [
        Line2D([], [], color=style.KEY, label="the programs that start first"),
        Line2D([], [], color=style.QUERY, label="those that take their places"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def mistaken(seen, taken, errors, block_q=64):
    """What one program took for visible, and what became of the rows. seen, taken (T, keys): as the mask says and as
    it was on the GPU; errors: {name: relative error of each row}."""
    figure, (table, rows) = style.subplots(1, 2, width=10, height=4.0, width_ratios=(1, 1.35))
    shades = ListedColormap([style.PAPER, style.STATE, style.OUTPUT])
    table.imshow(seen + 2 * (taken & ~seen), cmap=shades, vmin=0, vmax=2, aspect="auto")
    table.axhline(block_q - 0.5, color=style.INK, lw=1.2, ls="--")
    table.axvline(block_q - 0.5, color=style.INK, lw=1.2, ls="--")
    table.set(xlabel="key", ylabel="query", title="weights of program 0")
    handles = [Patch(fc=style.STATE, label="visible"), Patch(fc=style.OUTPUT, label="masked, and taken all the same")]
    table.legend(handles=handles, loc="upper right", fontsize=8, frameon=True, facecolor=style.PAPER)
    looks = {"dq": (style.QUERY, "-"), "dk": (style.KEY, "--"), "dv": (style.VALUE, ":")}
    for name, values in errors.items():
        colour, line = looks[name]
        rows.plot(np.arange(len(values)), values, color=colour, ls=line, label=name)
    rows.axvline(block_q - 0.5, color=style.INK, lw=1.2, ls="--")
    rows.set_xlabel("row of the gradient")
    rows.set_yscale("symlog", linthresh=1)
    rows.set(ylim=(0, None), ylabel="relative error of the row", title="what became of the gradients")
    rows.legend(loc="upper left")
    return figure


FIGURES = {"12-nobody-owns-dq.png": nobody_owns_dq}
