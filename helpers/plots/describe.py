"""What a figure shows, in words, read off its titles, axes and data: the alternative text of a plot."""

import itertools
import re

import numpy as np
from matplotlib.image import AxesImage

MOST = 8  # a listener can be asked to hear a few times as many lines, bars and pieces of text


def description(figure):
    """A few sentences on a figure: each panel's title, what its axes are, and where its data begins and ends."""
    bars_of_colour = {id(axes) for axes in figure.axes if axes.get_label() == "<colorbar>"}
    panels = [_panel(axes) for axes in figure.axes if id(axes) not in bars_of_colour]
    return " ".join(filter(None, [_sentence(figure.get_suptitle()), *panels]))


def _panel(axes):
    title = _sentence(axes.get_title("left") or axes.get_title("center"))
    x, y = _flat(axes.get_xlabel()), _flat(axes.get_ylabel())
    against = _sentence(f"{y} against {x}" if x and y else x or y)
    shown = [*_lines(axes), *_bars(axes), *_images(axes)]
    legend = [] if shown or not axes.get_legend() else axes.get_legend().get_texts()
    colours = [_flat(text.get_text()) for text in legend]
    sizes = {form(size) for _, bars in _series(axes) for _, size in bars for form in (_number, "{:.0f}".format)}
    words = dict.fromkeys(_flat(text.get_text()) for text in axes.texts)
    words = [word for word in words if word and word not in sizes]  # the size beside a bar has been told with it
    words = [] if any(map(str.isalpha, "".join(shown))) and len(words) > MOST else words[: 3 * MOST]
    parts = ["; ".join(filter(None, shown)), f"Marked: {', '.join(colours)}" if colours else "", ", ".join(words)]
    return " ".join(filter(None, [title, against, *map(_sentence, parts)]))


def _lines(axes):
    """Named lines, each with its first and last point; lines without a name only guide the eye."""
    for line in axes.lines[: 4 * MOST]:
        name = _flat(str(line.get_label()))
        x, y = (np.asarray(values, object) for values in line.get_data())
        if name.startswith("_") or not len(y):
            continue
        if line.get_transform() == axes.get_yaxis_transform(which="grid"):  # of axhline, whose x are no data
            yield f"{name}: {_number(y[0])}"
        elif len(y) == 1:
            yield f"{name}: {_number(y[0])} at {_number(x[0])}"
        else:
            yield f"{name}: from {_number(y[0])} at {_number(x[0])} to {_number(y[-1])} at {_number(x[-1])}"


def _bars(axes):
    """Every bar in the order of drawing, with the tick that names it; neighbours at one tick under one name."""
    for name, bars in _series(axes):
        told = []
        for tick, group in itertools.groupby(bars[: 6 * MOST], key=lambda bar: bar[0]):
            sizes = [_number(size) for _, size in group]
            told.append(f"{tick} {' + '.join(sizes)}" if tick else ", ".join(sizes))
        told += [f"and {len(bars) - 6 * MOST} more"] if len(bars) > 6 * MOST else []
        # A name may have commas of its own.
        yield f"{name}: " * bool(name) + ("; " if any("," in tick for tick, _ in bars) else ", ").join(told)


def _series(axes):
    """[(name, [(tick, size)])] of the bars. Those without a name that follow each other are one series."""
    series, seen = [], set()
    for container in axes.containers:
        lies = getattr(container, "orientation", None) == "horizontal"
        ticks = axes.yaxis if lies else axes.xaxis
        places = ticks.get_majorticklocs()  # whose labels an inner panel has too, though it does not show them
        names = dict(zip(np.round(places, 6), ticks.get_major_formatter().format_ticks(places), strict=True))
        bars = []
        for bar in (bar for bar in container if hasattr(bar, "get_width")):
            x, y, width, height = bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()
            if (x, y, width, height) not in seen:  # a hatched one may be drawn over a coloured one
                tick = names.get(np.round(y + height / 2 if lies else x + width / 2, 6), "")
                bars.append((_flat(tick), width if lies else height))
            seen.add((x, y, width, height))
        name = _flat(str(container.get_label()))
        name = "" if name.startswith("_") else name
        if bars and series and not name and not series[-1][0]:
            series[-1][1].extend(bars)
        elif bars:
            series.append((name, bars))
    return series


def _images(axes):
    for image in (child for child in axes.get_children() if isinstance(child, AxesImage)):
        values = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        if values.ndim == 2 and np.isfinite(values).any():
            label = _flat(image.colorbar.ax.get_ylabel()) if image.colorbar else ""
            low, high = _number(np.nanmin(values)), _number(np.nanmax(values))
            yield f"a table of {values.shape[0]} × {values.shape[1]} colours, {label} from {low} to {high}"


def _number(value):
    """Three digits are enough to hear; lengths and the like are said whole."""
    try:
        value = float(value)
    except (TypeError, ValueError):
        return str(value)
    return f"{value:,.0f}" if (value.is_integer() and abs(value) < 10**7) or abs(value) >= 1000 else f"{value:.3g}"


def _flat(text):
    """On one line, and without the marks of a formula, but for the brackets that an exponent needs."""
    text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", str(text))
    return " ".join(re.sub("[${}]", "", text).split())


def _sentence(text):
    text = _flat(text)
    return text if not text or text[-1] in ".?!" else text + "."
