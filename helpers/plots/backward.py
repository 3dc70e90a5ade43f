"""Pictures of notebook 07: who owns which gradient, what the backward kernels read, how exact they are."""

import matplotlib.ticker
import numpy as np
from matplotlib.patches import Patch

from helpers.plots import draw, style
from helpers.plots.measuring import LOOKS

KIB = 1024
HATCHES = {"dq": "", "dk": "//", "dv": "\\\\"}


def owners():
    """The grid of tile pairs, once with a program for each column and once with one for each row."""
    figure, panels = style.subplots(1, 2, width=10, height=4.7)
    rows, columns = 4, 5
    for axes, by_column in zip(panels, (True, False), strict=True):
        style.bare(axes)
        axes.set(aspect="equal", xlim=(-1.5, columns + 2.1), ylim=(rows + 2.1, -1.35))
        for i, j in np.ndindex(rows, columns):
            mine = j == 2 if by_column else i == 1
            draw.box(axes, j, i, 0.94, 0.94, style.LOGITS, alpha=0.75 if mine else 0.18, ec="none")
        for i in range(rows):
            _cell(axes, -1.1, i, f"q{i}", style.QUERY)
            _cell(axes, columns + 0.5, i, "dq", style.QUERY, strong=not by_column and i == 1)
        for j in range(columns):
            _cell(axes, j, -1.1, f"k{j}, v{j}", style.KEY)
            _cell(axes, j, rows + 0.5, "dk, dv", style.KEY, strong=by_column and j == 2)
        stop = (2.47, rows + 0.45) if by_column else (columns + 0.45, 1.47)
        draw.arrow(axes, (2.47, 0.15) if by_column else (0.15, 1.47), stop, size=15)
        axes.set_title("dk and dv: one program for each column" if by_column else "dq: one program for each row")
        walk = "down its tile of keys, and writes dk and dv", "along its tile of queries, and writes dq"
        draw.label(axes, columns / 2, rows + 1.85, f"It walks {walk[not by_column]} once.")
    return figure


def lost_updates(orders, parts):
    """Two programs that add to one number, in every order of their steps.

    orders: [(steps, result)], steps a tuple of four names such as "A reads"; parts: what each adds.
    """
    figure, axes = style.drawing(9, 3.9, x=(-0.5, len(orders)), y=(4.95, -0.1))
    for column, (steps, result) in enumerate(orders):
        for row, step in enumerate(steps):
            x, colour, hatch = (0.06, style.QUERY, "") if step.startswith("A") else (0.34, style.KEY, "//")
            draw.box(axes, column + x, row, 0.56, 0.84, colour, alpha=0.35, ec=colour, hatch=hatch)
            draw.label(axes, column + x + 0.28, row + 0.42, step.replace(" ", "\n"), **draw.WORDS | {"size": 9})
        mark, colour = ("✓", style.INK) if result == sum(parts.values()) else ("✗", style.OUTPUT)
        place = column + 0.48, len(steps) + 0.45
        draw.label(axes, *place, f"{result:g} {mark}", weight="bold", size=13, color=colour)
    draw.arrow(axes, (-0.12, 0), (-0.12, 4), size=10, lw=1, zorder=3)
    axes.text(-0.2, 2, "time", rotation=90, ha="right", va="center")
    axes.text(-0.2, 4.45, "dq", ha="right", va="center", weight="bold")
    axes.set_title(" and ".join(f"{name} adds {part:g}" for name, part in parts.items()))
    return figure


def reads_of_two_kernels(calls):
    """How often each row of every input was read. calls: {title: replayed `KernelCall` with 2-D operands}."""
    names = "q", "k", "v", "do", "lse", "delta"
    figure, panels = style.subplots(len(calls), len(names), width=10, height=2.1 * len(calls) + 0.3, sharey=True)
    for row, (title, call) in zip(panels, calls.items(), strict=True):
        for axes, name in zip(row, names, strict=True):
            reads = call.operands[name].reads
            reads = reads if reads.ndim == 1 else reads[:, 0]
            edges, colour = np.arange(len(reads) + 1), style.ROLES[name]
            axes.stairs(reads, edges, fill=True, fc=colour, alpha=0.45)
            axes.stairs(reads, edges, fc="none", ec=colour, lw=1.2)
            draw.label(axes, len(reads) / 2, reads.max() / 2, f"{reads.max()}×", bbox=draw.paper(1.2))
            axes.set(title=name, xticks=[0, len(reads)])
        row[0].set_ylabel(f"{title}\ntimes read")
        row[0].yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    for axes in panels[-1]:
        axes.set_xlabel("row")
    return figure


def residuals():
    """A wiring diagram: what the forward kernel leaves, and which backward kernel reads it."""
    figure, axes = style.drawing(10, 4.7, x=(0, 20), y=(-1.75, 7.9))
    kernel = {"corner": 0.25, "ec": style.INK, "lw": 1.5}
    for y, name in zip((6.1, 5.1, 4.1), "qkv", strict=True):
        draw.named(axes, 0.2, y, 1.2, 0.85, style.ROLES[name], name)
    draw.rounded(axes, 2.4, 2.0, 2.2, 5.0, "#EEF1F4", **kernel)
    draw.label(axes, 3.5, 4.5, "forward\nkernel", weight="bold", linespacing=1.2)
    draw.arrow(axes, (1.5, 5.5), (2.3, 5.5), size=15)
    draw.arrow(axes, (4.7, 4.5), (5.5, 4.5), size=15)
    axes.text(7.0, 7.4, "kept between the passes", ha="right", va="center", weight="bold")
    axes.text(5.5, 0.97, "arrives later, from the loss", ha="right", va="center", size=9)

    of_delta, of_keys, of_queries = kernels = 9.0, 12.6, 16.2
    for x, name in zip(kernels, ("delta\nkernel", "dk and dv\nkernel", "dq\nkernel"), strict=True):
        draw.rounded(axes, x, -0.6, 2.4, 8.3, "#EEF1F4", **kernel)
        draw.label(axes, x + 1.2, 7.35, name, weight="bold", linespacing=1.1)
    readers = {name: (y, of_keys, of_queries) for name, y in (("q", 6.1), ("k", 5.1), ("v", 4.1), ("lse", 3.1))}
    readers |= {"out": (2.1, of_delta), "dout": (0.55, *kernels)}
    for name, (y, *by) in readers.items():
        colour = style.ROLES[name]
        draw.named(axes, 5.6, y, 1.4, 0.85, colour, name, hatch="//" if name == "dout" else None)
        _wire(axes, 7.0, y + 0.42, by, colour)
    _wire(axes, 11.4, -0.15, (of_keys, of_queries), style.STATE)
    axes.text(11.5, 0.0, "delta", ha="left", va="bottom", size=9)
    for x, name in ((12.65, "dk"), (13.85, "dv"), (16.85, "dq")):
        draw.named(axes, x, -1.7, 1.1, 0.7, style.ROLES[name], name, hatch=HATCHES[name] or None)
        draw.arrow(axes, (x + 0.55, -0.6), (x + 0.55, -1.0), size=10)
    return figure


def _wire(axes, start, y, kernels, colour):
    """A line from an array to every kernel that reads it, with a dot at each."""
    ends = [kernel + 1.2 for kernel in kernels]
    axes.plot([start, max(ends)], [y, y], color=colour, lw=1.8, solid_capstyle="butt", zorder=3)
    axes.plot(ends, [y] * len(ends), "o", color=colour, ms=8, markeredgecolor=style.INK, zorder=4)


def products(counted):
    """Stacked bars. counted: {form: {kernel: FLOPs of its products, in units of T S H}}."""
    figure, axes = style.subplots(width=9, height=0.62 * len(counted) + 1.2)
    looks = {"forward": (style.OUTPUT, ""), "dkv": (style.KEY, "//"), "dq": (style.QUERY, "")}
    looks |= {"fused": (style.VALUE, "\\\\")}
    for y, kernels in enumerate(counted.values()):
        parts = [(flops, *looks[kernel], f"{kernel}: {flops:g}") for kernel, flops in kernels.items() if flops]
        end = draw.stack(axes, y, parts, 0.62, {"bbox": draw.paper()}, alpha=0.45)
        axes.text(end + 0.2, y, f"{end:g}", va="center", weight="bold")
    draw.rows(axes, counted)
    axes.set(xlim=(0, 15.5), xlabel="FLOPs of the matrix products, in units of T S H")
    axes.set_title("Counted from the kernels' own operations")
    return figure


def orders_of_addition(values, exact):
    """Which float32 results a sum gives in different orders.

    values: the result in each order tried; exact: the sum in 64-bit arithmetic.
    """
    figure, axes = style.subplots(width=8, height=3.1)
    found, counts = np.unique(np.asarray(values, np.float32), return_counts=True)
    steps = (found.astype(np.float64) - exact) / float(np.spacing(np.float32(abs(exact))))
    axes.bar(steps, counts, 0.6, color=style.QUERY, alpha=0.45, ec=style.QUERY, lw=1.2)
    for x, count in zip(steps, counts, strict=True):
        above = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "bbox": draw.paper(0)}
        axes.annotate(f"{count}", (x, count), va="bottom", size=9, **above)
    axes.axvline(0, color=style.INK, lw=1.2, ls="--")
    axes.text(0.04, 0.97, "exact", transform=axes.get_xaxis_transform(), ha="left", va="top", size=9)
    axes.set(ylim=(0, counts.max() * 1.2))
    axes.set(xlabel="distance from the exact sum, in steps between neighbouring float32 numbers", ylabel="orders tried")
    axes.set_title(f"One entry of dq, added up in {len(values)} orders")
    return figure


def causal_visits(kinds, query_reads, key_reads, block_q, block_k):
    """The tile pairs that both kernels visit, with the reads that a replay counted beside them.

    kinds: (query tiles, key tiles) of "skipped", "partial" or "full". query_reads: how often the
    dk and dv kernel read each tile of queries; key_reads: how often the dq kernel read each tile of keys.
    """
    rows, columns = kinds.shape
    looks = {"full": (style.LOGITS, None), "partial": ("#EBCBDD", "//"), "skipped": (style.SKIPPED, None)}
    figure, panels = style.subplots(1, 2, width=10, height=4.9)
    for axes in panels:
        style.bare(axes)
        axes.set(xlim=(-1.6, columns + 2.3), ylim=(rows + 2.5, -0.25))
        for i, j in np.ndindex(rows, columns):
            colour, hatch = looks[kinds[i, j]]
            draw.box(axes, j, i, 1, 1, colour, ec=style.PAPER, hatch=hatch, lw=1.2)
        for i in range(rows):
            axes.text(-0.15, i + 0.5, f"q{i}", ha="right", va="center", size=9)
        for j in range(columns):
            draw.label(axes, j + 0.5, rows + 0.15, f"k{j}", va="top", size=9)
    by_column, by_row = panels
    for j in range(columns):
        visited = np.flatnonzero(kinds[:, j] != "skipped")
        draw.arrow(by_column, (j + 0.5, visited[0] + 0.1), (j + 0.5, visited[-1] + 0.95), size=11)
    for i, reads in enumerate(query_reads):
        width = 1.5 * reads / max(query_reads)
        draw.box(by_column, columns + 0.2, i + 0.15, width, 0.7, style.QUERY, alpha=0.45, ec="none")
        by_column.text(columns + 0.3, i + 0.5, f"{reads}×", va="center", size=9)
    by_column.set_title("dk and dv kernel: a column starts at the diagonal")
    draw.label(by_column, columns + 1.1, rows + 0.55, "reads of\nthis tile of q", size=9)
    for i in range(rows):
        visited = np.flatnonzero(kinds[i] != "skipped")
        draw.arrow(by_row, (visited[0] + 0.1, i + 0.5), (visited[-1] + 0.95, i + 0.5), size=11)
    for j, reads in enumerate(key_reads):
        height = 1.1 * reads / max(key_reads)
        draw.box(by_row, j + 0.15, rows + 0.7, 0.7, height, style.KEY, alpha=0.55, ec="none")
        draw.label(by_row, j + 0.5, rows + 0.8 + height, f"{reads}×", va="top", size=9)
    by_row.set_title("dq kernel: a row ends at the diagonal")
    draw.label(by_row, columns + 1.15, rows + 1.2, "reads of this\ntile of k", size=9)
    names = "visited, every pair visible", "visited and masked", "never visited"
    draw.below(figure, handles=draw.keys(dict(zip(names, looks.values(), strict=True))))
    figure.suptitle(f"Causal, {block_q} queries and {block_k} keys to a tile", x=0.01, ha="left", size=11)
    return figure


def group_traffic(panels):
    """Bytes by array for two ways to share a head. panels: {title: {array: (bytes read, bytes written)}}."""
    figure, axes = style.subplots(1, len(panels), width=10, height=3.1, sharex=True)
    most = max(sum(pair) for arrays in panels.values() for pair in arrays.values()) / KIB
    looks = {"read": {"fc": style.KEY, "alpha": 0.55}, "written": {"fc": style.OUTPUT, "hatch": "//"}}
    for panel, (title, arrays) in zip(axes, panels.items(), strict=True):
        for y, (read, written) in enumerate(arrays.values()):
            panel.barh(y, read / KIB, 0.66, ec=style.INK, lw=0.8, **looks["read"])
            panel.barh(y, written / KIB, 0.66, left=read / KIB, ec=style.INK, lw=0.8, **looks["written"])
            panel.text((read + written) / KIB + most * 0.02, y, f"{(read + written) / KIB:.0f}", va="center", size=9)
        draw.rows(panel, arrays)
        total = sum(sum(pair) for pair in arrays.values()) / KIB
        panel.set(xlim=(0, most * 1.15), xlabel="KiB moved", title=f"{title}: {total:.0f} KiB")
    draw.below(figure, handles=[Patch(ec=style.INK, label=name, **look) for name, look in looks.items()])
    return figure


def word_gradients(gradients, tokens, word):
    """Length of the gradient at each word. gradients: {"dq" …: (T, H)}; word: the position that the loss looks at."""
    figure, panels = style.subplots(len(gradients), 1, width=10, height=1.55 * len(gradients) + 0.9, sharex=True)
    for axes, (name, gradient) in zip(panels, gradients.items(), strict=True):
        lengths = np.linalg.norm(gradient, axis=1)
        axes.bar(range(len(tokens)), lengths, 0.75, color=style.ROLES[name], alpha=0.5, ec="none")
        axes.bar(range(len(tokens)), lengths, 0.75, fc="none", ec=style.ROLES[name], hatch=HATCHES[name], lw=1)
        axes.axvline(word, color=style.INK, lw=1, ls=":", zorder=0)
        axes.set(ylim=(0, lengths.max() * 1.15), ylabel=f"length of\n{name}")
    panels[-1].set_xticks(range(len(tokens)), tokens, rotation=60, ha="right")
    panels[-1].tick_params(axis="x", length=0)
    panels[0].set_title(f"What the output of “{tokens[word]}”, word {word}, depends on")
    return figure


def gradient_errors(errors):
    """Bars on a logarithmic axis. errors: {title: {implementation: relative errors of dq, dk and dv}}."""
    figure, panels = style.subplots(1, len(errors), width=10, height=3.5, sharey=True, squeeze=False)
    looks = {"the kernels": (style.OUTPUT, ""), "naive, same dtype": (style.SKIPPED, "//")}
    for axes, (title, rows) in zip(panels[0], errors.items(), strict=True):
        draw.grouped_bars(axes, ("dq", "dk", "dv"), rows, map(looks.get, rows), 0.84 / len(rows), 0.9)
        axes.set(yscale="log", title=title)
    tallest = max(max(heights) for rows in errors.values() for heights in rows.values())
    panels[0, 0].set(ylim=(1e-8, 3 * tallest), ylabel="relative error")
    draw.below(figure, panels[0, 0])
    return figure


def errors_by_mean(means, curves, title):
    """Errors of dq against the mean of keys and values, on two log scales. curves: {name: error at each mean}."""
    figure, axes = style.subplots(width=8.6, height=4.4)
    looks = {"out rounded": (style.LOGITS, "o", ":"), "out exact, weights rounded": (style.KEY, "s", "--")}
    looks |= {"nothing rounded but ds": (style.INK, "^", "-"), "cured": (style.OUTPUT, "D", "-")}
    draw.lines(axes, means, curves, map(looks.get, curves), ms=6)
    _scales_of_means(axes, means)
    axes.set(ylabel="relative error of dq", title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def common_part(rows, title):
    """The same as recorded, a panel for each dtype. rows: of that record, of one call and one kind."""
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    figure, panels = style.subplots(1, len(dtypes), width=10, height=4.2, sharey=True, squeeze=False)
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        some = sorted((row for row in rows if row["dtype"] == dtype and row["mean"]), key=lambda row: row["mean"])
        for name in ("cudnn", "hopper", "triton", "naive"):
            found = [(row["mean"], row["errors"][name]["dq"]) for row in some if name in row["errors"]]
            if found:
                colour, marker, dash = LOOKS[name]
                label = {"cudnn": "cuDNN"}.get(name, name)
                axes.plot(*zip(*found, strict=True), dash, marker=marker, ms=6, color=colour, label=label)
        _scales_of_means(axes, [row["mean"] for row in some])
        axes.set_title(dtype)
    panels[0, 0].set_ylabel("relative error of dq")
    draw.below(figure, panels[0, 0])
    figure.suptitle(title, x=0.01, ha="left", size=11)
    return figure


def _scales_of_means(axes, means):
    """Two log scales, and a line where an error is as large as what it is the error of."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(means, [f"{mean:g}" for mean in means])
    axes.minorticks_off()
    draw.plain(axes.yaxis)
    axes.set_xlabel("mean of keys and values, in standard deviations")
    axes.axhline(1, color=style.FAINT, lw=1)
    axes.text(means[0], 1.15, "as large as dq itself", size=9, va="bottom", ha="left")


def _cell(axes, x, y, text, colour, strong=False):
    draw.box(axes, x, y, 0.94, 0.94, colour, alpha=0.85 if strong else 0.25, ec="none")
    if strong:
        draw.box(axes, x, y, 0.94, 0.94, "none", ec=style.INK, lw=1.5)
    draw.label(axes, x + 0.47, y + 0.47, text, size=9, weight="bold" if strong else "normal")


FIGURES = {"07-owners.png": owners, "07-residuals.png": residuals}
