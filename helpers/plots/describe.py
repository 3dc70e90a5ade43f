"""What a figure shows, in words, read off its titles, axes and data: the alternative text of a plot."""

import numpy as np
from matplotlib.image import AxesImage

MOST = 8  # groups of bars that a listener can be asked to hear; of lines, bars and pieces of text a few times as many


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
    colours = (
        [] if shown or not axes.get_legend() else [_flat(text.get_text()) for text in axes.get_legend().get_texts()]
    )
    words = list(dict.fromkeys(filter(None, (_flat(text.get_text()) for text in axes.texts))))
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
    """Each bar with the tick that names it."""
    for container in axes.containers[:MOST]:
        bars = [bar for bar in container if hasattr(bar, "get_width")]
        if not bars:
            continue
        lies = container.orientation == "horizontal"
        ticks = axes.yaxis if lies else axes.xaxis
        labels = [_flat(label.get_text()) for label in ticks.get_ticklabels()]
        names = dict(zip(np.round(ticks.get_ticklocs(), 6), labels, strict=False))
        sizes = []
        for bar in bars[: 2 * MOST]:
            middle = bar.get_y() + bar.get_height() / 2 if lies else bar.get_x() + bar.get_width() / 2
            size = _number(bar.get_width() if lies else bar.get_height())
            name = names.get(np.round(middle, 6))
            sizes.append(f"{name} {size}" if name else size)
        name = _flat(str(container.get_label()))
        yield ("" if name.startswith("_") else f"{name}: ") + ", ".join(sizes)


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
    """On one line, and without the marks of a formula."""
    return " ".join(str(text).replace("$", "").replace("{", "").replace("}", "").split())


def _sentence(text):
    text = _flat(text)
    return text if not text or text[-1] in ".?!" else text + "."
