"""Pictures of notebook 12: operands, shared memory, registers, the owners of dq, timelines and recorded figures."""

import itertools

import matplotlib.ticker
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D

from helpers.instruments.on_chip import SMEM_LIMIT, SMEM_RATE, TENSOR_RATE, WARPGROUP
from helpers.plots import draw, style

KIB = 1024
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
    for y, product in enumerate(kernel.products):
        left, right, result = names[product.name]
        held = product.left == "registers"
        size = 2 * product.m * product.k
        where = f"registers, {size // WARPGROUP // 4} a thread" if held else f"shared memory, {size // KIB} KiB"
        _tile(axes, 1.9, y, product.m, product.k, left, held, where)
        draw.label(axes, 3.35, y, "×", size=14)
        where = f"shared memory, {2 * product.k * product.n // KIB} KiB"
        _tile(axes, 4.8, y, product.k, product.n, right, False, where)
        draw.label(axes, 6.25, y, "→", size=14)
        where = f"accumulator, {product.m * product.n // WARPGROUP} a thread"
        _tile(axes, 7.7, y, product.m, product.n, result, True, where)
        axes.text(0.1, y, f"{product.m}×{product.k}×{product.n}", va="center", size=9)
    axes.set(xlim=(0, 10), ylim=(len(kernel.products) - 0.3, -0.62))
    axes.set_title(f"{kernel.name}: what one warpgroup multiplies in a step, first to last")
    kinds = {"in shared memory": ("#FFFFFF", None), "in registers": (style.SKIPPED, "///")}
    draw.below(figure, handles=draw.keys(kinds, ec=style.INK))
    return figure


def _tile(axes, x, y, rows, columns, name, held, where):
    height, width = rows / 190, columns / 190
    corner, colour = (x - width / 2, y - height / 2), style.ROLES[name.removesuffix("ᵀ")]
    draw.tinted(axes, *corner, width, height, colour, alpha=0.35, lw=1.4, hatch="///" if held else None)
    draw.label(axes, x, y, name, weight="bold", bbox=draw.paper(1, 0.8))
    axes.text(x, y + height / 2 + 0.03, where, ha="center", va="top", size=8)


def shared_memory(kernels):
    """Stacked bars of what kernels keep in shared memory, with the limit. kernels: {title: `on_chip.Kernel`}."""
    figure, axes = style.subplots(width=10, height=0.72 * len(kernels) + 1.5)
    limit, said = SMEM_LIMIT // KIB, []
    for y, (title, kernel) in enumerate(kernels.items()):
        held = [(buffer.name.removesuffix("_smem"), buffer.bytes / KIB) for buffer in kernel.buffers]
        told = ", ".join(f"{name} {amount:.3g}" for name, amount in held)
        said.append(f"{title}: {told}; in all {kernel.smem / KIB:g}.")
        large = [(name, amount) for name, amount in held if name not in ("lse", "delta")]
        small = sum(amount for name, amount in held if name in ("lse", "delta"))
        parts = [_part(name, amount, f"{name}\n{amount:.0f}") for name, amount in large]
        end = draw.stack(axes, y, [*parts, _part("lse", small)], 0.66)
        axes.text(end + 1.5, y, f"{kernel.smem / KIB:g}", va="center", size=9, weight="bold")
    _limited(axes, kernels, limit)
    axes.set(xlim=(0, limit * 1.12), title="What one program keeps in shared memory")
    axes.set_xlabel("KiB of shared memory (the narrow bar at the end: lse and delta)")
    figure.alt = f"What one program keeps in shared memory, in KiB, of {limit}. {' '.join(said)}"
    return figure


def _part(name, amount, text=None):
    return amount, style.ROLES[name], HATCHES.get(name), text


def _limited(axes, names, limit):
    """Rows of bars with a line at what there is."""
    axes.axvline(limit, color=style.INK, ls="--", lw=1.4)
    axes.text(limit + 1, -0.62, f"limit: {limit}", va="center", size=9)
    draw.rows(axes, names)
    axes.set_ylim(len(names) - 0.5, -0.8)


def registers(panels, limit):
    """Stacked bars of registers of a thread. panels: {title: {name: registers}}; limit: what a thread may have."""
    figure, axes = style.subplots(width=10, height=0.62 * len(panels) + 1.4)
    said, ends = [], []
    for y, (title, held) in enumerate(panels.items()):
        told = ", ".join(f"{name} {amount}" for name, amount in held.items())
        parts = [_part(name.split("1")[0], amount, f"{name}\n{amount}") for name, amount in held.items()]
        ends.append(draw.stack(axes, y, parts, 0.66))
        said.append(f"{title}: {told}; in all {ends[-1]}.")
        text = f"{ends[-1]}" + (" ✗" if ends[-1] > limit else "")
        axes.text(ends[-1] + 2, y, text, va="center", weight="bold", size=9)
    _limited(axes, panels, limit)
    axes.set(xlim=(0, max(limit * 1.15, 1.08 * max(ends))), xlabel="registers of a thread")
    title = "Accumulators and 16-bit operands that live at the same time"
    axes.set_title(title)
    figure.alt = f"{title}, in registers of a thread, of {limit}. {' '.join(said)}"
    return figure


def nobody_owns_dq():
    """Programs that walk down columns; each adds to the same tiles of dq."""
    figure, axes = style.subplots(width=9, height=4.4)
    style.bare(axes)
    rows, columns = 4, 4
    axes.set(xlim=(-1.6, 9.6), ylim=(rows + 1.4, -1.2))
    places = (2, 0, 3, 1)  # where each program is now: they do not march in step
    for j in range(columns):
        draw.label(axes, j + 0.47, -0.25, f"k{j}, v{j}", va="bottom", size=9)
        draw.box(axes, j, rows + 0.35, 0.94, 0.6, style.KEY, alpha=0.4, ec=style.KEY)
        draw.label(axes, j + 0.47, rows + 0.65, f"dk{j}, dv{j}", size=9)
        draw.arrow(axes, (j + 0.47, 0.05), (j + 0.47, rows + 0.3), style.KEY, size=12, lw=1.4)
        for i in range(rows):
            look = {"alpha": 0.75, "ec": style.INK} if places[j] == i else {"alpha": 0.16, "ec": "none"}
            draw.box(axes, j, i, 0.94, 0.94, style.LOGITS, **look)
    for i in range(rows):
        axes.text(-0.12, i + 0.47, f"q{i}, do{i}", ha="right", va="center", size=9)
        draw.box(axes, 6.4, i, 1.2, 0.94, style.QUERY, alpha=0.4, ec=style.QUERY, hatch="xx")
        draw.label(axes, 7.0, i + 0.47, f"dq{i}", size=9, bbox=draw.paper(1))
    for j in range(columns):
        draw.arrow(axes, (j + 0.97, places[j] + 0.47), (6.35, places[j] + 0.47), style.QUERY, size=12, lw=1.4)
    draw.label(axes, 5.3, -0.25, "TMA adds", va="bottom", size=9)
    draw.label(axes, 7.0, -0.25, "float32, in memory", va="bottom", size=9)
    note = "Each tile receives one\npart from each program,\nin the order in which\nthey arrive."
    axes.text(7.75, 2.0, note, va="center", size=9)
    draw.label(axes, 2.0, rows + 1.2, "One owner for each: it sums in registers and writes once.", size=9)
    axes.set_title("A program for each tile of keys: dk and dv have owners, dq has none")
    return figure


def cycles(forms):
    """Least cycles of one step by two units. forms: {title: {kernel: (FLOPs, {what: bytes})}}."""
    figure, axes = style.subplots(width=10, height=0.95 * sum(map(len, forms.values())) + 1.7)
    words = {"size": 7.5, "bbox": draw.paper(0.5, 0.75)}
    y, ticks, ends, said = 0.0, {}, [], []
    for title, kernels in forms.items():
        for name, (flops, traffic) in kernels.items():
            tensor = flops / TENSOR_RATE
            axes.barh(y, tensor, 0.36, color=style.SKIPPED, ec=style.INK, lw=0.8)
            axes.text(tensor + 20, y, f"{tensor:.0f}", va="center", size=9)
            parts = []
            for what, amount in traffic.items():
                label = what.split(":")[0].replace(" written", " in").replace(" read by TMA", " out")
                colour = style.ROLES.get(what.split(":")[0].split()[0], style.STATE)
                parts.append((amount / SMEM_RATE, colour, "" if "operands" in what else "//", label))
            end = draw.stack(axes, y + 0.4, parts, 0.36, words, lw=1)
            axes.text(end + 20, y + 0.4, f"{end:.0f}", va="center", size=9)
            ends += [end, tensor]
            ticks[y + 0.2] = f"{title}\n{name}" if len(kernels) > 1 else title
            told = ", ".join(f"{label} {wide:.0f}" for wide, *_, label in parts)
            whose = ticks[y + 0.2].replace("\n", ", ")
            said.append(f"{whose}: tensor core {tensor:.0f}, shared memory {end:.0f}: {told}.")
            y += 1
        y += 0.25
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, max(ends) * 1.1), xlabel="cycles for 64 queries and 128 keys, at the least")
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
            name, lane, part = span.what.split(": ")[-1], lanes.index(span.who), (stop - start) / np.ptp(shown)
            busy[span.who].append((start, stop))
            hatch = "//" if lanes[1] in (span.who, span.what.split(": ")[0]) else None
            draw.tinted_bar(axes, lane, stop - start, 0.78, style.ROLES[name.split()[-1]], start, 0.4, hatch, lw=1)
            label = "↓" if name.startswith("store ") and part < 0.025 else name.replace("store ", "↓")
            if part > 0.006 + 0.007 * len(label):
                draw.label(axes, (start + stop) / 2, lane, label, size=8, bbox=draw.paper(0.6, 0.8))
        draw.rows(axes, lanes)
        axes.set(xlim=shown, ylim=(2.6, -0.6), title=title)
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
    draw.lines(axes, factors, cycles_of, [(style.KEY, "o", "-"), (style.QUERY, "s", "--"), (style.VALUE, "^", ":")])
    axes.set(ylim=(0, None), xlabel="work of the threads, in units of the estimate", ylabel="cycles of a step")
    axes.set_title("64 queries and 128 keys, H = 128")
    axes.legend(loc="lower right")
    return figure


def against_cudnn(records):
    """TFLOP/s of recorded backward passes against T, a panel for each head dim and mask."""
    figure, panels = style.subplots(1, 4, width=10, height=3.3, sharey=True)
    looks = {"cudnn": ("cuDNN", style.FAINT, "s", "--"), "hopper": ("hopper", style.OUTPUT, "o", "-")}
    for axes, (H, is_causal) in zip(panels, itertools.product((64, 128), (False, True)), strict=True):
        for implementation, (label, colour, marker, line) in looks.items():
            wanted = implementation, H, is_causal
            mine = [r for r in records if (r["implementation"], r["H"], r["is_causal"]) == wanted]
            points = sorted((r["T"], r["tflops"]) for r in mine)
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, ls=line, label=label)
        draw.lengths(axes, [1024, 4096, 16384])
        axes.minorticks_off()
        axes.set(xlabel="T = S", title=f"H = {H}, {'causal' if is_causal else 'full'}")
    panels[0].set(ylim=(0, None), ylabel="TFLOP/s, backward")
    draw.below(figure, panels[0])
    return figure


def bars(entries):
    """TFLOP/s by name, a panel for each head dim and mask. entries: a recorded ladder or variants of one T."""
    names = list(dict.fromkeys(entry["name"] for entry in entries))
    columns = sorted({(entry["H"], entry["is_causal"]) for entry in entries})
    height = 0.34 * len(names) + 1.3
    figure, panels = style.subplots(1, len(columns), width=10, height=height, sharey=True, squeeze=False)
    for axes, (H, is_causal) in zip(panels[0], columns, strict=True):
        rates = {e["name"]: e["tflops"] for e in reversed(entries) if (e["H"], e["is_causal"]) == (H, is_causal)}
        for y, name in enumerate(names):
            if name not in rates:
                axes.text(8, y, "not tried", va="center", size=8, color=style.FAINT)
                continue
            wrong = "nothing added" in name or name.startswith("without")
            colour = style.SKIPPED if name.startswith("cuDNN") else style.PAPER if wrong else style.OUTPUT
            look = {"alpha": 0.55, "hatch": "//" if wrong else None, "ec": style.INK, "lw": 0.8}
            axes.barh(y, rates[name], 0.74, color=colour, **look)
            text = f"{rates[name]:.0f}"
            axes.text(rates[name] - 8, y, text, ha="right", va="center", size=8, bbox=draw.paper(0.6, 0.8))
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
        axes.set(xlabel="TFLOP/s", title=f"H = {H}, {'causal' if is_causal else 'full'}")
    draw.rows(panels[0, 0], names)
    return figure


def factors(changes):
    """Speed with a change by that without it, a row for each change. changes: as `hopper_figures.factors`."""
    cases = [(f"H = {H}, {mask}", colour, mark, mask) for H, colour, mark in BY_HEAD for mask in ("full", "causal")]
    tried = [case for case in range(len(cases)) if any(found[case] for _, found in changes)]
    figure, axes = style.subplots(width=8.4, height=0.3 * len(changes) + 1.5)
    axes.axvline(1, color=style.FAINT, lw=1)
    for place, case in enumerate(tried):
        name, colour, mark, mask = cases[case]
        apart = 0.16 * (place - (len(tried) - 1) / 2)  # so that none hides another
        points = [(found[case], row + apart) for row, (_, found) in enumerate(changes) if found[case]]
        face = colour if mask == "full" else style.PAPER
        axes.plot(*zip(*points, strict=True), mark, color=colour, mfc=face, ms=6, mew=1.5, label=name)
    axes.grid(axis="y", color=style.SKIPPED, lw=0.6)
    axes.set_axisbelow(True)
    draw.rows(axes, [name for name, _ in changes])
    axes.set_xlabel("speed, by that without the change")
    draw.below(figure, axes)
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
    whose = {style.KEY: "the programs that start first", style.QUERY: "those that take their places"}
    draw.below(figure, handles=[Line2D([], [], color=colour, label=label) for colour, label in whose.items()])
    return figure


def mistaken(seen, taken, errors, block_q=64):
    """What one program took for visible, and what became of the rows. seen, taken (T, keys): as the mask says and as
    it was on the GPU; errors: {name: relative error of each row}."""
    figure, (table, rows) = style.subplots(1, 2, width=10, height=4.0, width_ratios=(1, 1.35))
    shades = ListedColormap([style.PAPER, style.STATE, style.OUTPUT])
    table.imshow(seen + 2 * (taken & ~seen), cmap=shades, vmin=0, vmax=2, aspect="auto")
    table.set(xlabel="key", ylabel="query", title="weights of program 0")
    shown = {"visible": (style.STATE, None), "masked, and taken all the same": (style.OUTPUT, None)}
    table.legend(handles=draw.keys(shown), loc="upper right", fontsize=8, frameon=True, facecolor=style.PAPER)
    dashes = {"dq": "-", "dk": "--", "dv": ":"}
    for name, values in errors.items():
        rows.plot(np.arange(len(values)), values, color=style.ROLES[name], ls=dashes[name], label=name)
    for line in (table.axhline, table.axvline, rows.axvline):
        line(block_q - 0.5, color=style.INK, lw=1.2, ls="--")
    rows.set_xlabel("row of the gradient")
    rows.set_yscale("symlog", linthresh=1)
    rows.set(ylim=(0, None), ylabel="relative error of the row", title="what became of the gradients")
    rows.legend(loc="upper left")
    return figure


FIGURES = {"12-nobody-owns-dq.png": nobody_owns_dq}
