"""Draw every picture that the Markdown cells and the README show: ``python -m helpers.plots [folder]``."""

import sys
from pathlib import Path

from helpers.plots.collect import draw_all

FOLDER = Path(__file__).parents[2] / "figures"

if __name__ == "__main__":
    draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
