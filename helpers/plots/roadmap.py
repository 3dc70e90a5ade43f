"""Where you are in the series."""

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from helpers import series
from helpers.plots import draw, style

# A track that begins after a lesson stands in columns of its own from here on, so that the line to it passes the rows
# between.
COLUMNS = {"measuring and Hopper": 5, "further": 3}
WIDTH, LINE = 0.84, 1.3  # of a box, where the distance between two is 1; from one row to the next
# How the dot of an exercise looks: the shape says it, for readers who do not see the colours.
DOTS = {
    "solved": {"color": style.VALUE, "fillstyle": "full"},
    "tried": {"color": style.VALUE, "fillstyle": "left", "markerfacecoloralt": style.PAPER},
    "open": {"color": style.INK, "fillstyle": "none"},
}
DOT = {"marker": "o", "markersize": 6.5, "markeredgewidth": 0.9, "linestyle": "none"}


def roadmap(here=None):
    """The tracks of the series, a row each, with the step `here`, such as "03", filled."""
    return _map(lambda axes, x, y, number, name: _step(axes, x, y, number, name, filled=number == here))


def progress(states, following=None):
    """The same map with a dot for each exercise, and the step `following`, which has the next one, in a heavy frame.

    states: {number of a step: the states of its exercises, each "solved", "tried" or "open"}.
    """

    def step(axes, x, y, number, name):
        _step(axes, x, y, number, name, framed=number == following, raised=0.1)
        count = len(states[number])
        apart = min(0.125, 0.9 * WIDTH / count)
        size = {"markersize": DOT["markersize"] * apart / 0.125}
        for place, state in enumerate(states[number]):
            axes.plot(x + apart * (place - (count - 1) / 2), y + 0.15, **DOT | size, **DOTS[state])

    figure = _map(step)
    handles = [Line2D([], [], label=state, **DOT, **look) for state, look in DOTS.items()]
    frame = Patch(fc=style.PAPER, ec=style.OUTPUT, lw=3, label="has the next exercise")
    figure.set_figheight(figure.get_figheight() + 0.35)
    draw.below(figure, handles=[*handles, frame])
    solved = {number: of_step.count("solved") for number, of_step in states.items()}
    counts = ", ".join(f"{number} {solved[number]} of {len(states[number])}" for number in states)
    then = f"The next is in {following}." if following else "That is all of them."
    figure.alt = f"The steps of the series with the exercises solved in each: {counts}. {then}"
    return figure


def _map(draw_step):
    """A figure of the tracks; draw_step is called with axes, x, y, the number and the name of each step."""
    figure, axes = style.subplots(width=10, height=0.4 + 0.95 * len(series.TRACKS))
    style.bare(axes)
    place = {}
    for row, track in enumerate(series.TRACKS):
        y, first = -row * LINE, COLUMNS.get(track["name"], 0)
        name = track["name"].replace(" and ", "\nand ")
        axes.text(-0.6, y + 0.5, name, ha="right", va="center", size=11, linespacing=1.15)
        lessons = [number for number, row in series.LESSONS.items() if row["track"] == track["name"]]
        for x, number in enumerate(lessons, start=first):
            draw_step(axes, x, y, number, series.LESSONS[number]["on_map"])
            place[number] = x, y
            if x > first:
                axes.plot([x - 1 + WIDTH / 2, x - WIDTH / 2], [y + 0.5] * 2, color=style.INK, lw=1.4)
        if "after" in track:
            last_x, last_y = place[track["after"]]
            turn = last_y - (LINE - 1) / 2
            axes.plot([last_x, last_x, first], [last_y, turn, turn], color=style.INK, lw=1.4)
            draw.arrow(axes, (first, turn), (first, y + 1), size=10, lw=1.4, shrinkA=0, shrinkB=0, zorder=3)
    axes.set(xlim=(-1.75, max(x for x, _ in place.values()) + 0.5))
    axes.set(ylim=(-(len(series.TRACKS) - 1) * LINE - 0.06, 1.06))
    return figure


def _step(axes, x, y, number, name, filled=False, framed=False, raised=0.0):
    edge = style.OUTPUT if filled or framed else style.QUERY
    draw.rounded(axes, x - WIDTH / 2, y, WIDTH, 1, edge if filled else style.PAPER, ec=edge, lw=3 if framed else 1.6)
    ink = style.PAPER if filled else style.INK
    draw.label(axes, x, y + raised + 0.76, number, color=ink, weight="bold", size=12)
    draw.label(axes, x, y + raised + 0.34, name, color=ink, size=10.5, linespacing=1.1)


FIGURES = {f"roadmap-{number}.png": lambda number=number: roadmap(number) for number in series.LESSONS}
