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
    found = {}
    for module_info in pkgutil.iter_modules(helpers.plots.__path__):
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


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "figures"))
