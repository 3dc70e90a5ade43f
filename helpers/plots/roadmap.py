"""Where you are in the series."""

from matplotlib.patches import FancyBboxPatch

from helpers.plots import style

# Each track is a row of steps, and begins once the step that it follows is done.
TRACKS = (
    (
        "the course",
        None,
        (
            ("00", "start\nhere"),
            ("01", "naive\nattention"),
            ("02", "online\nsoftmax"),
            ("03", "tiles in\nNumPy"),
            ("04", "Pallas\nbasics"),
            ("05", "forward\nkernel"),
            ("06", "backward\nmaths"),
            ("07", "backward\nkernels"),
            ("08", "train\nwith it"),
        ),
    ),
    (
        "measuring\nand Hopper",
        "08",
        (
            ("09", "measure\nit"),
            ("10", "Hopper\nforward"),
            ("11", "Hopper\ntuned"),
            ("12", "Hopper\nbackward"),
        ),
    ),
)
STEPS = tuple(step for _, _, steps in TRACKS for step in steps)
WIDTH, LINE = 0.84, 1.3  # of a box, where the distance between two is 1; from one row to the next


def roadmap(here=None):
    """The tracks of the series, a row each, with the step `here`, such as "03", filled."""
    figure, axes = style.subplots(width=10, height=0.4 + 0.95 * len(TRACKS))
    style.bare(axes)
    place = {}
    for row, (track, begins_after, steps) in enumerate(TRACKS):
        y = -row * LINE
        axes.text(-0.6, y + 0.5, track, ha="right", va="center", size=11, linespacing=1.15)
        # A track that follows a step ends below it, so that the line between them is short.
        first = 0 if begins_after is None else place[begins_after][0] - len(steps) + 1
        for x, (number, name) in enumerate(steps, start=first):
            _step(axes, x, y, number, name, current=number == here)
            place[number] = x, y
            if x > first:
                axes.plot([x - 1 + WIDTH / 2, x - WIDTH / 2], [y + 0.5] * 2, color=style.INK, linewidth=1.4)
        if begins_after is not None:
            last_x, last_y = place[begins_after]
            turn = (last_y + y + 1) / 2
            axes.plot([last_x, last_x, first], [last_y, turn, turn], color=style.INK, linewidth=1.4)
            axes.annotate(
                "",
                (first, y + 1),
                (first, turn),
                arrowprops={"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0},
            )
    axes.set_xlim(-1.75, max(x for x, _ in place.values()) + 0.5)
    axes.set_ylim(-(len(TRACKS) - 1) * LINE - 0.06, 1.06)
    return figure


def _step(axes, x, y, number, name, current):
    edge = style.OUTPUT if current else style.QUERY
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDTH / 2, y),
            WIDTH,
            1,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=edge if current else style.PAPER,
            edgecolor=edge,
            linewidth=1.6,
        )
    )
    ink = style.PAPER if current else style.INK
    axes.text(x, y + 0.76, number, ha="center", va="center", color=ink, weight="bold", size=12)
    axes.text(x, y + 0.34, name, ha="center", va="center", color=ink, size=10.5, linespacing=1.1)


FIGURES = {f"roadmap-{number}.png": lambda number=number: roadmap(number) for number, _ in STEPS}
