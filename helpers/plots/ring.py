"""Pictures of notebook 14: who has which positions, which keys are where, who works when, and what it is worth."""

import numpy as np

from helpers.plots import draw, style

# One colour a device or a share, in the order of the ring; in a cell stands its number, for those who cannot tell them.
COLOURS = (*(style.QUERY, style.KEY, style.VALUE, style.LOGITS, style.OUTPUT, style.STATE), "#B8A800", style.FAINT)
DARK = (style.QUERY, style.VALUE, style.OUTPUT)


def _cell(axes, x, y, number, size=9):
    colour = COLOURS[number % len(COLOURS)]
    draw.box(axes, x, y, 1, 1, colour, ec=style.PAPER, lw=1.2)
    draw.label(axes, x + 0.5, y + 0.5, number, size=size, color=style.PAPER if colour in DARK else style.INK)


def layouts(owners):
    """A row of positions for each layout, with the device that has it. owners: {layout: array of devices}."""
    longest = max(map(len, owners.values()))
    figure, axes = style.drawing(10, 0.62 * len(owners) + 0.75, x=(-4.2, longest), y=(1.3 * len(owners), -0.2))
    for row, (layout, devices) in enumerate(owners.items()):
        axes.text(-0.4, 1.3 * row + 0.5, layout, ha="right", va="center", size=11)
        for position, device in enumerate(devices):
            _cell(axes, position, 1.3 * row, int(device))
    axes.set_title("Which device has each position, from the first to the last")
    rows = (f"{layout}: {', '.join(map(str, devices))}" for layout, devices in owners.items())
    figure.alt = f"Which device has each position. {'; '.join(rows)}."
    return figure


def rotation(held):
    """A row for each step, a column for each device: whose keys it has. held: (steps, devices) integers."""
    held = np.asarray(held)
    steps, devices = held.shape
    width, height = 1.3 + 0.95 * devices, 0.55 * steps + 0.9
    figure, axes = style.drawing(width, height, x=(-1.2, 1.15 * devices), y=(1.15 * steps, -0.9))
    for (step, device), share in np.ndenumerate(held):
        _cell(axes, 1.15 * device, 1.15 * step, int(share), size=11)
    for device in range(devices):
        draw.label(axes, 1.15 * device + 0.5, -0.2, f"device {device}", va="bottom", size=9)
    for step in range(steps):
        axes.text(-0.2, 1.15 * step + 0.5, f"step {step}", ha="right", va="center", size=9)
    axes.set_title("Whose keys a device has", pad=10)
    rows = (f"step {step}: {', '.join(map(str, row))}" for step, row in enumerate(held))
    figure.alt = f"Whose keys each device has. {'; '.join(rows)}."
    return figure


def who_works(panels, unit="the time of one share against one share"):
    """When each device works and when keys are on their way. panels: {title: spans of `instruments.ring.schedule`}."""
    devices = 1 + max(span.device for spans in panels.values() for span in spans)
    end = max(np.nanmax([span.stop for span in spans]) for spans in panels.values())
    height = (0.34 * devices + 0.75) * len(panels) + 0.5
    figure, all_axes = style.subplots(len(panels), width=10, height=height, sharex=True, squeeze=False)
    said = []
    for axes, (title, spans) in zip(all_axes[:, 0], panels.items(), strict=True):
        for span in spans:
            if (lasts := span.stop - span.start) > 0:
                colour = COLOURS[(span.device - span.step) % devices % len(COLOURS)]
                axes.barh(span.device - 0.1, lasts, 0.56, left=span.start, color=colour, ec=style.PAPER)
            if span.arrived > span.sent:
                axes.plot([span.sent, span.arrived], [span.device + 0.32] * 2, color=style.INK, lw=1.6)
        done = max(span.stop for span in spans)
        busy = sum(span.stop - span.start for span in spans) / devices / done
        axes.axvline(done, color=style.FAINT, ls="--", lw=1.2)
        axes.text(done, -0.72, f" {done:.3g}, busy {busy:.0%}", size=9, va="center")
        axes.set_yticks(range(devices), [f"device {device}" for device in range(devices)], size=8)
        axes.set(xlim=(0, 1.14 * end), ylim=(devices - 0.4, -1.0), title=title)
        said.append(f"{title}: done after {done:.3g}, devices are busy {busy:.0%} of that")
    all_axes[-1, 0].set_xlabel(f"time, in units of {unit}")
    shares = {f"keys of {share}": (colour, None) for share, colour in enumerate(COLOURS[:devices])}
    draw.below(figure, handles=draw.keys(shares))
    layouts = f"A timeline of {devices} devices for each layout; thin lines are keys on their way."
    figure.alt = f"{layouts} {'. '.join(said)}."
    return figure


def efficiency(curves, recorded=None):
    """Predicted efficiency against length as lines, and recorded as dots. Both: {name: {length: efficiency}}."""
    recorded = recorded or {}
    figure, axes = style.subplots(width=8, height=3.6)
    colours = style.QUERY, style.OUTPUT, style.VALUE, style.KEY
    for (name, points), colour in zip(curves.items(), colours, strict=False):
        axes.plot(list(points), list(points.values()), color=colour, label=name)
    for (name, points), mark in zip(recorded.items(), "osD^", strict=False):
        axes.plot(list(points), list(points.values()), mark, color=style.INK, label=f"recorded: {name}")
    draw.lengths(axes, sorted({length for points in curves.values() for length in points}))
    largest = max(value for points in (*curves.values(), *recorded.values()) for value in points.values())
    axes.set(ylim=(0, 1.05 * max(1, largest)), xlabel="length of the whole sequence", ylabel="efficiency")
    axes.legend()
    axes.set_title("Time of a share of the work alone, divided by the time of the ring")
    return figure


def losses(one, many, limit):
    """Two loss curves, and their difference. limit: what it should stay below."""
    figure, (left, right) = style.subplots(1, 2, width=10, height=3.2)
    left.plot(one, color=style.SKIPPED, lw=6, label="one device")
    left.plot(many, color=style.QUERY, lw=1.6, label="four devices")
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    left.set_title("Loss")
    difference = np.maximum(np.abs(np.asarray(one) - np.asarray(many)), 1e-8)
    right.semilogy(difference, ".", color=style.OUTPUT, label="difference")
    right.axhline(limit, color=style.FAINT, ls="--", lw=1.2)
    right.set(xlabel="step", title="Difference (zeros at 1e-8)")
    return figure
