"""Pictures of notebook 13: what is computed again, how keys are split, who holds which page, and recorded speeds."""

import numpy as np

from helpers.plots import draw, style

OWNERS = (style.QUERY, style.KEY, style.VALUE, style.LOGITS, style.STATE, style.OUTPUT)
HATCHES = ("", "//", "..", "xx", "\\\\", "--")
PEERS = ("o", "s", "D", "^", "v", "<", ">", "P", "X", "*")


def again(steps):
    """Keys computed in each step of writing. steps: {name: [keys of step 0, of step 1, ...]}."""
    figure, axes = style.subplots(width=8, height=3)
    for (name, counts), colour, dash in zip(steps.items(), (style.LOGITS, style.QUERY), ("-", "--"), strict=False):
        axes.step(range(len(counts)), counts, where="mid", color=colour, linestyle=dash, label=name)
    axes.set(xlabel="token written", ylabel="keys computed\nin a block", title="What each new token computes")
    axes.legend(loc="upper left")
    axes.set_ylim(0)
    return figure


def split_keys():
    """One query against the keys of a sequence: one program reads them all, or several read a part each."""
    figure, axes = style.drawing(10, 3.6, x=(0, 20), y=(0, 7.2))
    look = {"size": 12, "lw": 1.2}
    axes.text(0.2, 6.7, "one program for a head", weight="bold", va="center")
    _part(axes, 0.2, 5.3, 10.6, "keys 0 to S − 1", "program 0")
    draw.arrow(axes, (10.9, 5.65), (13, 5.65), **look)
    _box(axes, 13.1, 5.25, 2.2, "out, lse", style.OUTPUT)
    axes.text(15.6, 5.65, "the other SMs wait", va="center", size=9.5, color=style.OUTPUT)

    axes.text(0.2, 4.2, "four programs for a head", weight="bold", va="center")
    for part in range(4):
        x = 0.2 + 2.7 * part
        _part(axes, x, 2.8, 2.5, f"part {part}", f"program {part}")
        draw.arrow(axes, (x + 1.25, 2.35), (x + 1.25, 1.65), **look)
        _box(axes, x + 0.1, 0.85, 2.3, f"out{part}, lse{part}", style.STATE)
    draw.arrow(axes, (10.9, 1.2), (13, 1.2), **look)
    axes.text(11.95, 1.5, "merge", ha="center", size=9.5)
    _box(axes, 13.1, 0.85, 2.2, "out, lse", style.OUTPUT)
    axes.text(0.2, 0.25, "float32, one out and one lse for each part", size=9, va="center")
    return figure


def _part(axes, x, y, width, text, above):
    draw.box(axes, x, y, width, 0.7, style.KEY, ec=style.PAPER)
    draw.label(axes, x + width / 2, y + 0.35, text, size=9.5)
    draw.label(axes, x + width / 2, y + 0.95, above, size=9)


def _box(axes, x, y, width, text, colour):
    draw.box(axes, x, y, width, 0.75, style.PAPER, ec=colour, lw=1.6)
    draw.label(axes, x + width / 2, y + 0.36, text, size=9.5)


def reserved(lengths, longest, page):
    """What sequences use of their room: reserved for the longest there may be, and in pages."""
    figure, panels = style.subplots(1, 2, width=9.5, height=0.24 * len(lengths) + 1.5, sharex=True, sharey=True)
    rows, at_most = range(len(lengths)), [longest] * len(lengths)
    in_pages = [-(-length // page) * page for length in lengths]
    titles = f"Room for {longest} tokens each", f"Pages of {page} tokens"
    for axes, rooms, title in zip(panels, (at_most, in_pages), titles, strict=True):
        axes.barh(rows, rooms, fc=style.SKIPPED, hatch="//", ec=style.PAPER, label="empty")
        axes.barh(rows, lengths, fc=style.KEY, ec=style.PAPER, label="used")
        axes.set(xlabel="tokens", title=f"{title}: {sum(lengths) / sum(rooms):.0%} used")
    panels[0].set(ylabel="sequence", yticks=[])
    panels[0].invert_yaxis()
    draw.below(figure, panels[0])
    figure.alt = (
        f"{len(lengths)} sequences as bars. Where each has room for {longest} tokens, most of it is empty: "
        f"{sum(lengths) / sum(at_most):.0%} is used. In pages of {page} tokens nearly all is used."
    )
    return figure


def pages(pool):
    """The tables of a `PagePool`, and the memory that they point into: each page in the colours of its holders."""
    names, page, count = list(pool.tables), pool.page, len(pool.counts)
    width = max(len(table) for table in pool.tables.values())
    ratios, height = [width + 2, 1.05 * count], 0.42 * max(len(names), 4) + 1.5
    figure, (left, right) = style.subplots(1, 2, width=10, height=height, width_ratios=ratios)
    holders = {number: [] for number in range(count)}
    for row, name in enumerate(names):
        colour = OWNERS[row % len(OWNERS)]
        look = {"hatch": HATCHES[row % len(HATCHES)], "ec": style.PAPER}
        left.text(-0.3, row + 0.5, f"{name}, {pool.lengths[name]} tokens", ha="right", va="center")
        for column, number in enumerate(pool.tables[name]):
            draw.box(left, column, row, 0.94, 0.9, colour, **look)
            ground = {"boxstyle": "round,pad=0.15", "fc": style.PAPER, "ec": "none"}
            draw.label(left, column + 0.47, row + 0.45, number, size=9, bbox=ground)
            holders[number].append((colour, look, min(page, pool.lengths[name] - column * page)))
    for number, held in holders.items():
        draw.box(right, number, 0, 0.9, page, "none", ec=style.FAINT)
        for place, (colour, look, filled) in enumerate(held):
            part = 0.9 / len(held)
            draw.box(right, number + place * part, 0, part, filled, colour, **look)
        draw.label(right, number + 0.45, -0.25 * page / 4, number, va="bottom", size=9)
        draw.label(right, number + 0.45, page * 1.06, pool.counts[number], va="top", size=9)
    for axes, title in ((left, "Page tables"), (right, "Memory: numbers above, holders below")):
        style.bare(axes)
        axes.set_title(title, pad=14)
    left.set(xlim=(-3.4, width), ylim=(max(len(names), 3), -0.2))
    right.set(xlim=(-0.2, count), ylim=(page * 1.2, -0.3 * page / 4 - 0.2))
    told = "; ".join(f"{name}, {pool.lengths[name]} tokens, in pages {pool.tables[name]}" for name in names)
    shared = [number for number in range(count) if pool.counts[number] > 1]
    figure.alt = f"Page tables: {told}. Shared pages: {shared or 'none'}. Free pages: {pool.counts.count(0)}."
    return figure


def bandwidth(rows, copy):
    """GB/s of decoding kernels beside the speed of a copy. rows: dicts of implementation, B, S and gbps; page or 0."""
    rates, shapes = {}, {}
    for row in rows:
        shape = shapes.setdefault((row["B"], row["S"]), len(shapes))
        name = row["implementation"] + (f", {row['page']} a page" if row.get("page") else "")
        rates.setdefault(name, []).append((shape, row["gbps"]))
    figure, axes = style.subplots(width=9.5, height=4.6)
    for place, (name, points) in enumerate(rates.items()):
        x, gbps = np.transpose(points)
        colour = OWNERS[place % len(OWNERS)]
        face = colour if place < len(OWNERS) else style.PAPER
        apart = 0.08 * (place - (len(rates) - 1) / 2)
        axes.plot(x + apart, gbps, PEERS[place % len(PEERS)], ms=8, color=colour, mfc=face, label=name)
    axes.axhline(copy, color=style.INK, lw=1.2, ls="--")
    axes.text(-0.48, copy * 1.02, "copy", size=9)
    axes.set_xticks(range(len(shapes)), [f"B = {B}\nS = {S:,}" for B, S in shapes])
    axes.set(xlim=(-0.5, len(shapes) - 0.5), ylim=(0, None), ylabel="GB/s of keys and values")
    axes.set_title("One query for each sequence, bfloat16, N = 32, K = 8, H = 128")
    draw.below(figure, axes, ncols=3, fontsize=9)
    told = (f"{name} {', '.join(f'{gbps:.0f}' for _, gbps in points)}" for name, points in rates.items())
    shaped = ", ".join(f"B={B} S={S}" for B, S in shapes)
    figure.alt = f"GB/s of keys and values for {shaped}: {'; '.join(told)}. A copy: {copy:.0f}."
    return figure


def translation():
    """From the position of a token to a place in memory, by way of the page table."""
    figure, axes = style.drawing(10, 3.4, x=(0, 20), y=(0, 6.8))
    table, page, tokens, followed = [7, 2, 5], 4, 10, 6
    for x, y, title in (
        (0.2, 6.4, "the sequence, as the model counts it"),
        (8.6, 6.4, "its page table"),
        (0.2, 3.1, "the memory, which all sequences share"),
    ):
        axes.text(x, y, title, va="center", weight="bold", size=9.5)
    for token in range(tokens):
        colour = style.OUTPUT if token == followed else style.KEY
        draw.box(axes, 0.2 + 0.62 * token, 5, 0.58, 0.8, colour, ec=style.PAPER)
        draw.label(axes, 0.49 + 0.62 * token, 5.4, token, size=9)
    for entry, number in enumerate(table):
        edge = style.OUTPUT if entry == followed // page else style.FAINT
        draw.box(axes, 8.6 + 1.1 * entry, 5, 1, 0.8, style.PAPER, ec=edge, lw=1.6)
        draw.label(axes, 9.1 + 1.1 * entry, 5.4, number, size=10)
    axes.text(12.6, 5.4, "6 // 4 = 1: entry 1 says page 2\n6 % 4 = 2: slot 2 of that page", va="center", size=9.5)
    for number, slot in np.ndindex(9, page):
        x = 0.2 + 2.17 * number
        token = table.index(number) * page + slot if number in table else tokens
        colour = style.SKIPPED if token >= tokens else style.OUTPUT if token == followed else style.KEY
        draw.box(axes, x + 0.5 * slot, 1.4, 0.46, 0.8, colour, ec=style.PAPER)
        if token < tokens:
            draw.label(axes, x + 0.23 + 0.5 * slot, 1.8, token, size=9)
        if slot == 0:
            draw.label(axes, x + 0.98, 0.9, f"page {number}", size=9)
    start, look = (0.49 + 0.62 * followed, 4.95), {"size": 12, "lw": 1.2}
    draw.arrow(axes, start, (9.9, 4.95), style.OUTPUT, connectionstyle="arc3,rad=0.25", **look)
    draw.arrow(axes, (10.2, 4.9), (0.2 + 2.17 * 2 + 1.23, 2.3), style.OUTPUT, **look)
    handles = draw.keys({"empty, or of other sequences": (style.SKIPPED, None)})
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, -0.08), fontsize=9)
    return figure


FIGURES = {"13-split-keys.png": split_keys, "13-page-table.png": translation}
