"""Where you are in the series."""

from matplotlib.patches import FancyBboxPatch

from helpers.plots import style

STEPS = (
    ("00", "start\nhere"),
    ("01", "naive\nattention"),
    ("02", "online\nsoftmax"),
    ("03", "tiles in\nNumPy"),
    ("04", "Pallas\nbasics"),
    ("05", "forward\nkernel"),
    ("06", "backward\nmaths"),
    ("07", "backward\nkernels"),
    ("08", "train\nwith it"),
    ("09", "measure\nit"),
    ("10", "Hopper\nforward"),
    ("11", "Hopper\nbackward"),
)
WRITTEN = len(STEPS)


def roadmap(here=None):
    """The series as a row of steps, with the step `here`, such as "03", filled."""
    figure, axes = style.subplots(width=10, height=1.15)
    style.bare(axes)
    for x, (number, name) in enumerate(STEPS):
        current = number == here
        edge = style.OUTPUT if current else style.QUERY
        axes.add_patch(
            FancyBboxPatch(
                (x + 0.08, 0),
                0.84,
                1,
                boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=edge if current else style.PAPER,
                edgecolor=edge,
                linewidth=1.6,
            )
        )
        ink = style.PAPER if current else style.INK
        axes.text(x + 0.5, 0.74, number, ha="center", va="center", color=ink, weight="bold", size=10)
        axes.text(x + 0.5, 0.34, name, ha="center", va="center", color=ink, size=8.5, linespacing=1.1)
        if x:
            axes.annotate("", (x + 0.09, 0.5), (x - 0.09, 0.5), arrowprops={"arrowstyle": "-", "color": style.FAINT})
    axes.set_xlim(0, len(STEPS))
    axes.set_ylim(-0.08, 1.08)
    return figure


FIGURES = {f"roadmap-{number}.png": lambda number=number: roadmap(number) for number, _ in STEPS}
