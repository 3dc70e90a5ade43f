"""Collect the pictures of all modules of `helpers.plots` and write them to files."""

import importlib
import io
import pkgutil

import helpers.plots
from helpers.plots.style import compact_png


def figures():
    """{file name: drawing function} over all modules of `helpers.plots`."""
    found = {}
    for module_info in pkgutil.iter_modules(helpers.plots.__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"helpers.plots.{module_info.name}")
        for name, draw in getattr(module, "FIGURES", {}).items():
            if name in found:
                raise ValueError(f"two modules draw {name}")
            found[name] = draw
    return found


def draw_all(folder):
    """Write every picture into folder as PNG, with two dots for one, for dense screens."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in figures().items():
        png = io.BytesIO()
        figure = draw()
        figure.savefig(png, dpi=2 * figure.dpi)
        (folder / name).write_bytes(compact_png(png.getvalue()))
        print(folder / name)
