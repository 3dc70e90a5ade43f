"""Pictures of notebook 09: clocks, samples, and the recorded figures of a GPU."""

import numpy as np

from helpers.plots import draw, style

LOOKS = {  # colour, marker, dash
    "naive": (style.LOGITS, "o", ":"),
    "portable": (style.QUERY, "s", "-"),
    "triton": (style.QUERY, "s", "-"),
    "hopper": (style.OUTPUT, "D", "-"),
    "cudnn": (style.INK, "^", "-"),
    "jax_triton": (style.KEY, "v", "--"),
    "jax_mosaic": (style.VALUE, "<", "--"),
    "torch_sdpa": ("#5B1A45", "X", "--"),
    "flash_attention_3": ("#7A5C00", "h", "-."),
    "flash_attention_4": ("#3D6E00", "P", "-."),
}
HATCHES = {"naive": "...", "portable": "", "hopper": "////", "cudnn": "xxxx"}


def mask_of(is_causal):
    return "causal" if is_causal else "full"


def _listed(figures, digits=".0f"):
    """Names with their figures, for the words of a picture."""
    return ", ".join(f"{name} {figure:{digits}}" for name, figure in figures.items())


# Clocks and samples


def queue():
    """Host and GPU side by side: calls return at once, the work is done later."""
    figure, axes = style.drawing(9.5, 2.9, x=(-2.2, 21.5), y=(-0.9, 4.6))
    axes.text(-0.4, 3, "host", ha="right", va="center", weight="bold")
    axes.text(-0.4, 1, "GPU", ha="right", va="center", weight="bold")
    for number in range(3):
        draw.box(axes, 0.2 + number, 2.6, 0.8, 0.8, style.KEY, ec=style.PAPER)
        draw.label(axes, 0.6 + number, 3, f"{number + 1}", size=9)
        start = 0.9 + 5.6 * number
        draw.box(axes, start, 0.6, 5.5, 0.8, style.QUERY, ec=style.PAPER)
        draw.label(axes, start + 2.75, 1, f"call {number + 1} is computed", color="white", size=9)
    draw.box(axes, 3.2, 2.6, 14.5, 0.8, style.PAPER, ec=style.FAINT, hatch="///", lw=1)
    draw.label(axes, 10.4, 3, " wait ", backgroundcolor=style.PAPER, size=9)
    for x, text, colour in (
        (0.1, "clock()", style.INK),
        (3.1, "clock() here measures\nthe queuing", style.OUTPUT),
        (17.8, "clock() here measures\nthe work", style.VALUE),
    ):
        axes.plot([x, x], [0.3, 3.6], color=colour, lw=1.5, ls="--", zorder=0)
        axes.text(x, 3.75, text, ha="center" if x > 1 else "left", va="bottom", color=colour, size=9)
    draw.arrow(axes, (0, -0.2), (20.5, -0.2), style.FAINT, size=10, lw=1, zorder=3)
    axes.text(20.5, -0.45, "time", ha="right", va="top")
    return figure


def samples(milliseconds, title):
    """Times in the order in which they were taken, and sorted, with median and quartiles."""
    times = np.asarray(milliseconds)
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    figure, (left, right) = style.subplots(1, 2, width=9.5, height=3.3, sharey=True)
    left.plot(times, ".", color=style.QUERY)
    left.set(xlabel="sample, in the order taken", ylabel="time of a call (ms)", title=title)
    right.plot(np.linspace(0, 100, len(times)), np.sort(times), color=style.QUERY)
    right.axhspan(low, high, color=style.STATE, alpha=0.35, label="between the quartiles")
    right.axhline(middle, color=style.INK, lw=1.2, label="median")
    right.axhline(times.mean(), color=style.OUTPUT, lw=1.5, ls="--", label="mean")
    right.set(xlabel="sorted: per cent of the samples", title="The same, sorted")
    right.legend(loc="upper left")
    return figure


def drift(one_after_another, in_turns):
    """Samples of the programs A and B on a GPU that warms up: {name: [(moment, milliseconds), ...]} twice."""
    figure, panels = style.subplots(1, 2, width=9.5, height=3.4, sharey=True)
    titles = "One after the other", "In turns"
    for axes, found, title in zip(panels, (one_after_another, in_turns), titles, strict=True):
        for (name, points), colour, marker in zip(found.items(), (style.QUERY, style.OUTPUT), "os", strict=True):
            moments, times = np.transpose(points)
            axes.plot(1e3 * moments, times, marker, color=colour, ms=4, label=name)
            axes.axhline(np.median(times), color=colour, lw=1.2, ls="-" if marker == "o" else "--")
        axes.set(xlabel="moment (ms)", title=title)
        axes.legend(loc="lower right", title="lines: medians")
    panels[0].set_ylabel("time of a call (ms)")
    return figure


def fooled(reports, truth_ms):
    """What several benchmarks say of one GPU: {name: milliseconds}, and the truth."""
    figure, axes = style.subplots(width=9, height=0.42 * len(reports) + 1.0)
    for row, time in enumerate(reports.values()):
        right = abs(time / truth_ms - 1) < 0.03
        axes.barh(-row, time, color=style.VALUE if right else style.OUTPUT, hatch="" if right else "////", height=0.7)
        axes.text(time * 1.1, -row, f"{time:.3g} ms", va="center", size=9, backgroundcolor=style.PAPER)
    axes.axvline(truth_ms, color=style.INK, lw=1.2, ls="--")
    axes.set_yticks(range(0, -len(reports), -1), reports)
    axes.set(xscale="log", xlim=(None, max(reports.values()) * 2.5))
    axes.set_xlabel("reported time of a call (ms), logarithmic; dashed: the truth")
    return figure


def ratios(pairs):
    """By how much new was faster in each turn. pairs: {name: (old / new, (low, high))}."""
    figure, panels = style.subplots(1, len(pairs), width=9.5, height=3.4)
    percent = lambda ratio: 100 * (np.asarray(ratio) - 1)
    for axes, (name, (values, (low, high))) in zip(panels, pairs.items(), strict=True):
        axes.axhspan(*percent([low, high]), color=style.STATE, alpha=0.45, label="95 % interval of the median")
        axes.plot(percent(values), "o", color=style.QUERY, ms=4, label="one turn")
        axes.axhline(0, color=style.OUTPUT, ls="--", lw=1.5, label="no difference")
        axes.set(xlabel="turn", title=name)
        draw.plain(axes.yaxis, "{:g} %")
    panels[0].set_ylabel("old ÷ new, minus one")
    draw.below(figure, panels[0], fontsize=9)
    return figure


# The recorded figures


def roof(points, ceilings, title):
    """Kernels under the measured roof. points: {name: (FLOPs per byte, TFLOP/s)}, the name starting with LOOKS' one."""
    rate, bandwidth = ceilings["matmul_tflops"], ceilings["copy_gbps"] / 1e3
    intensity = np.geomspace(16, 8192, 200)
    figure, (axes, close) = style.subplots(1, 2, width=10.5, height=4.2, width_ratios=[1.5, 1])
    axes.plot(intensity, np.minimum(rate, intensity * bandwidth), color=style.INK)
    axes.text(8192, rate * 1.08, f"matrix product: {rate:.0f} TFLOP/s", ha="right", size=9)
    axes.text(80, 80 * bandwidth * 0.55, f"copy: {1e3 * bandwidth:.0f} GB/s", size=9)
    for row, (name, (x, y)) in enumerate(points.items()):
        kind = name.split(",")[0]
        colour, marker, _ = LOOKS[kind]
        face = colour if "128" in name else style.PAPER
        label = kind if face == style.PAPER else None
        axes.plot(x, y, marker, color=colour, ms=8, mfc=face, mew=2, label=label)
        close.barh(-row, y, 0.7, fc=face, ec=colour, lw=2)
        beside = {"fc": style.PAPER, "ec": "none", "pad": 1}  # the line may pass there
        close.text(y + 12, -row, f"{y:.0f}", va="center", size=9, bbox=beside)
    close.axvline(rate, color=style.INK)
    close.set_yticks(range(0, -len(points), -1), points)
    close.set(xlim=(0, rate * 1.05), xlabel="TFLOP/s (line: matrix product)", title="The same, close up")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", ylim=(10, rate * 1.6))
    draw.plain(axes.xaxis)
    draw.plain(axes.yaxis)
    axes.plot([], [], "o", color=style.FAINT, mfc=style.PAPER, mew=2, label="open: H = 64")
    axes.plot([], [], "o", color=style.FAINT, mew=2, label="filled: H = 128")
    axes.legend(loc="lower right", fontsize=9, ncols=2)
    axes.set(xlabel="FLOPs for each byte that is moved", ylabel="TFLOP/s", title=title)
    return figure


def bounds(rows, title):
    """Least times of several problems by side: {problem: {side: seconds}}, each relative to the longest."""
    looks = {"matrix": (style.QUERY, ""), "exponentials": (style.LOGITS, "////"), "memory": (style.VALUE, "...")}
    figure, axes = style.subplots(width=9, height=0.62 * len(rows) + 1.2)
    for row, times in enumerate(rows.values()):
        longest = max(times.values())
        for place, (side, (colour, hatch)) in enumerate(looks.items()):
            share = 100 * times[side] / longest
            y = -row - 0.26 * (place - 1)
            axes.barh(y, share, 0.24, color=colour, hatch=hatch, ec=style.PAPER, label=None if row else side)
            axes.text(share + 1, y, f"{1e3 * times[side]:.3g} ms", va="center", size=8)
    axes.set_yticks(range(0, -len(rows), -1), rows)
    axes.set(xlim=(0, 135), xticks=[0, 25, 50, 75, 100])
    axes.set(xlabel="least time of each side, in per cent of the longest", title=title)
    axes.legend(loc="center right")
    in_ms = {name: {side: 1e3 * seconds for side, seconds in times.items()} for name, times in rows.items()}
    figure.alt = f"{title}, in ms. " + " ".join(f"{name}: {_listed(times, '.3g')}." for name, times in in_ms.items())
    return figure


def ladder(steps, others, H, ceiling):
    """Rungs from the first to the last, then other implementations, full and causal.

    steps, others: {False: {name: TFLOP/s}, True: {...}} by is_causal.
    """
    figure, panels = style.subplots(1, 2, width=10.5, height=4.3, sharey=True)
    for axes, is_causal in zip(panels, (False, True), strict=True):
        before, rungs, rows = 0.0, steps[is_causal], steps[is_causal] | others[is_causal]
        for row, (name, rate) in enumerate(rows.items()):
            if name in rungs:
                axes.barh(-row, min(before, rate), color=style.STATE)
                colour, hatch = (style.QUERY, "") if rate > before else (style.OUTPUT, "////")
                axes.barh(-row, abs(rate - before), left=min(before, rate), color=colour, hatch=hatch)
            else:
                axes.barh(-row, rate, color=LOOKS[name][0], hatch=HATCHES[name], ec=style.PAPER)
            end = max(rate, before) if name in rungs else rate
            axes.text(end + 6, -row, f"{rate:.0f}", va="center", size=9)
            before = rate
        axes.axhline(-len(rungs) + 0.5, color=style.FAINT, lw=1, ls="--")
        axes.axvline(ceiling, color=style.INK, lw=1.2, ls=":")
        axes.set_yticks(range(0, -len(rows), -1), rows)
        axes.set(xlim=(0, ceiling * 1.08), xlabel="TFLOP/s (dotted: matrix product)")
        axes.set_title(f"H = {H}, {mask_of(is_causal)}")
    figure.alt = "TFLOP/s. " + " ".join(
        f"H = {H}, {mask_of(is_causal)}: {_listed(steps[is_causal] | others[is_causal])}." for is_causal in steps
    )
    return figure


def against(rates, lengths, ceiling, title):
    """TFLOP/s against T. rates: {(H, is_causal): {implementation: {T: TFLOP/s}}}."""
    figure, panels = style.subplots(1, len(rates), width=11, height=3.9, sharey=True)
    figure.suptitle(title, x=0.01, ha="left", size=11)
    for axes, ((H, is_causal), found) in zip(panels, rates.items(), strict=True):
        for name, (colour, marker, dash) in LOOKS.items():
            points = found.get(name, {})
            known = [(T, points[T]) for T in lengths if T in points]
            if known:
                axes.plot(*zip(*known, strict=True), dash, color=colour, marker=marker, ms=6, label=name)
        axes.axhline(ceiling, color=style.INK, lw=1.2, ls=":")
        draw.lengths(axes, lengths)
        axes.minorticks_off()
        axes.set(xlim=(lengths[0] / 1.4, lengths[-1] * 1.4), ylim=(0, ceiling * 1.06), xlabel="T")
        axes.set_title(f"H = {H}, {mask_of(is_causal)}")
    panels[0].set_ylabel("TFLOP/s (dotted: matrix product)")
    fraction = panels[-1].secondary_yaxis("right", functions=(lambda y: 100 * y / ceiling, lambda y: y * ceiling / 100))
    fraction.set_ylabel("per cent of the matrix product")
    handles = {name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    draw.below(figure, handles=handles.values(), ncols=min(5, len(handles)), fontsize=9)
    return figure


def relative(values, title):
    """Speed relative to cuDNN: {case: {implementation: ratio}}; cases are rows."""
    figure, axes = style.subplots(width=9.5, height=0.36 * len(values) + 1.3)
    for row, found in enumerate(values.values()):
        axes.plot([0.3, 1.5], [-row, -row], color=style.SKIPPED, lw=0.8, zorder=0)
        for name, ratio in found.items():
            colour, marker, _ = LOOKS[name]
            axes.plot(ratio, -row, marker, color=colour, ms=8, label=None if row else name)
    axes.axvline(1, color=style.INK, lw=1.2, ls="--")
    axes.set_yticks(range(0, -len(values), -1), values)
    axes.set(xlabel="speed relative to cuDNN in the same run (dashed: as fast)", title=title)
    draw.below(figure, axes, ncols=4)
    every = [ratio for found in values.values() for ratio in found.values()]
    axes.set_xlim(min(0.45, *every) - 0.03, max(1.25, *every) + 0.03)
    rows = " ".join(f"{case}: {_listed(found, '.2f')}." for case, found in values.items())
    figure.alt = f"{title}, speed relative to cuDNN. {rows}"
    return figure


def memory(found, refused, gpu_bytes):
    """Bytes of a program against T. found: {pass: {implementation: {T: bytes}}}.

    refused: {(pass, implementation): T} of those that the GPU had no room for.
    """
    figure, panels = style.subplots(1, 2, width=10, height=3.9, sharey=True)
    for axes, (which, programs) in zip(panels, found.items(), strict=True):
        for name, points in programs.items():
            colour, marker, dash = LOOKS[name]
            dash, size = ((0, (4, 3)), 5) if name == "hopper" else (dash, 8)  # it may lie on the line of portable
            megabytes = np.array(list(points.values())) / 2**20
            axes.plot(list(points), megabytes, ls=dash, color=colour, marker=marker, ms=size, label=name)
            if (which, name) in refused:
                T, last = refused[which, name], megabytes[-1]
                guess = last**2 / megabytes[-2]
                axes.plot([list(points)[-1], T], [last, guess], ls=dash, color=colour, alpha=0.5)
                axes.plot(T, guess, "x", color=style.OUTPUT, ms=10, mew=2.5, zorder=4)
        axes.axhline(gpu_bytes / 2**20, color=style.INK, lw=1.2, ls=":", label="memory of the GPU")
        draw.lengths(axes, [2**n for n in range(10, 21, 2)])
        axes.set(yscale="log", xlabel="T", title=which)
        draw.plain(axes.yaxis, "{:,g}")
    panels[0].set_ylabel("MiB, one head, H = 64, 16-bit")
    panels[0].plot([], [], "x", color=style.OUTPUT, ms=10, mew=2.5, label="refused by the GPU")
    draw.below(figure, panels[0])
    return figure


def claims(rates, title):
    """One measurement, several TFLOP/s: {how it was counted: TFLOP/s}, ours first; and the rate of the product."""
    *rates, (limit_name, limit) = rates.items()
    figure, axes = style.subplots(width=9.5, height=0.45 * len(rates) + 1.1)
    for row, (_, rate) in enumerate(rates):
        colour, hatch = (style.OUTPUT, "////") if row else (style.VALUE, "")
        axes.barh(-row, rate, 0.7, color=colour, hatch=hatch, ec=style.PAPER)
        axes.text(rate + 8, -row, f"{rate:.0f}", va="center", size=9)
    axes.axvline(limit, color=style.INK, lw=1.2, ls=":")
    axes.set_yticks(range(0, -len(rates), -1), [name for name, _ in rates])
    axes.set(xlim=(0, 1.12 * max(limit, *(rate for _, rate in rates))))
    axes.set(xlabel=f"TFLOP/s printed (dotted: {limit_name})", title=title)
    return figure


FIGURES = {"09-queue.png": queue}
