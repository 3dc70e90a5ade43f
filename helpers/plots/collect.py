"""Draw every picture that the Markdown cells and the README show: ``python -m helpers.plots.collect [folder]``."""

import importlib
import io
import pkgutil
import sys
from pathlib import Path

import helpers.plots
from helpers.plots.style import compact_png


def figures():
    """{file name: drawing function} over all modules of `helpers.plots`."""
    names = (f"helpers.plots.{module.name}" for module in pkgutil.iter_modules(helpers.plots.__path__))
    drawn = (getattr(importlib.import_module(name), "FIGURES", {}) for name in names)
    return {name: draw for each in drawn for name, draw in each.items()}


def draw_all(folder):
    """Write every picture into folder as PNG, with two dots for one, for dense screens."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in figures().items():
        png = io.BytesIO()
        figure = draw()
        figure.savefig(png, dpi=2 * figure.dpi)
        (folder / name).write_bytes(compact_png(png.getvalue()))
        print(folder / name)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "figures"))
