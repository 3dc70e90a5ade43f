"""One visual language for the whole series.

Every picture is drawn by a function in `helpers.plots` that returns a Matplotlib figure. Colours
have a role, and as a rule it keeps its colour from the first notebook to the last. The palette is
that of Okabe and Ito, which readers with any of the common colour blindnesses can tell apart.
Figures stand on an opaque light ground, so that they read the same in a dark theme.
Importing this module sets Matplotlib's defaults accordingly.
"""

import base64
import io

import matplotlib.pyplot as plt
from IPython import get_ipython
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image

from helpers.plots.describe import description

QUERY = "#0072B2"  # blue
KEY = "#E69F00"  # orange
VALUE = "#009E73"  # green
LOGITS = "#CC79A7"  # pink: logits, probabilities
OUTPUT = "#D55E00"  # vermilion
STATE = "#56B4E9"  # light blue: m, l, acc, lse
SKIPPED = "#C9CDD3"  # what is never touched
INK = "#24292F"
FAINT = "#8C959F"
PAPER = "#FBFBFA"
ROLES = {  # of arrays
    **dict.fromkeys(("q", "dq"), QUERY),
    **dict.fromkeys(("k", "dk"), KEY),
    **dict.fromkeys(("v", "dv"), VALUE),
    **dict.fromkeys(("s", "p", "dp", "ds"), LOGITS),
    **dict.fromkeys(("out", "do", "dout"), OUTPUT),
    **dict.fromkeys(("m", "l", "acc", "lse", "delta"), STATE),
}

PROBABILITY_MAP = LinearSegmentedColormap.from_list("probability", [PAPER, LOGITS, "#5B1A45"])

plt.rc("figure", dpi=100, facecolor=PAPER)
plt.rc("savefig", facecolor=PAPER)
plt.rc("axes", facecolor=PAPER, edgecolor=FAINT, labelcolor=INK, titlesize=11, titlelocation="left", grid=False)
plt.rc("axes.spines", top=False, right=False)
plt.rc("font", size=10)
plt.rc("text", color=INK)
plt.rc(("xtick", "ytick"), color=INK)
plt.rc("legend", frameon=False)
plt.rc("lines", linewidth=2)


class Picture(Figure):
    """A figure that a cell shows sharply, and with words for those who cannot see it.

    alt: what the picture shows. A function that sets none leaves it to `describe.description`.
    """

    alt = None

    def _repr_mimebundle_(self, include=None, exclude=None):
        """Twice as many dots as it is wide, for dense screens, in the form that Jupyter's renderers read."""
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=2 * self.dpi, bbox_inches="tight")
        width, height = Image.open(png).size
        alt = self.alt or description(self)
        data = {
            "image/png": base64.b64encode(png.getvalue()).decode(),
            "text/plain": f"Picture: {_title(self) or 'a drawing'}",
        }
        return data, {"image/png": {"alt": alt, "width": width // 2, "height": height // 2}}


if shell := get_ipython():  # or Matplotlib's own picture of a figure would take the place of this one
    shell.display_formatter.formatters["image/png"].for_type(Picture, lambda picture: None)


def _title(figure):
    """The titles of a figure and of its axes on one line."""
    titles = [figure.get_suptitle(), *(axes.get_title(loc) for axes in figure.axes for loc in ("left", "center"))]
    return "; ".join(" ".join(title.split()) for title in titles if title)


def subplots(rows=1, columns=1, width=8.0, height=3.5, **options):
    """(figure, axes) in the style of the series; width and height in inches, at 100 dots each.

    The figure is detached from pyplot: return it from a cell to show it once.
    """
    options |= {"figsize": (width, height), "layout": "constrained", "FigureClass": Picture}
    figure, axes = plt.subplots(rows, columns, **options)
    plt.close(figure)
    return figure, axes


def drawing(width, height, *, x, y, title=""):
    """(figure, axes) without frame and ticks, for a drawing in x and y, both (first, last), rather than for data."""
    figure, axes = subplots(width=width, height=height)
    bare(axes)
    axes.set(xlim=x, ylim=y, title=title)
    return figure, axes


def bare(axes):
    """Take the frame, ticks and grid off axes that hold a drawing rather than data."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def compact_png(png):
    """The same picture as PNG bytes with a palette of 256 colours: a third of the size, no visible loss."""
    image = Image.open(io.BytesIO(png))
    if image.mode == "P":
        return png
    compact = io.BytesIO()
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(compact, "PNG", optimize=True)
    return min(png, compact.getvalue(), key=len)
