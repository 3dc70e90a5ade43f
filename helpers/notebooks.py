"""The one tool that writes the outputs of notebooks: execute them and normalise them.

    python -m helpers.notebooks execute [--anew] [03 …]

Executing an unchanged notebook again changes no byte of it. A cell that is the same as before, after cells that are
the same, keeps its output if the new one says the same. For a cell that `nbval-ignore-output` excuses from comparison,
that is the same but for the numbers. `--anew` keeps nothing: for another JAX, or another style of the pictures.
"""

import argparse
import base64
import io
import os
import re
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
from nbclient import NotebookClient
from PIL import Image

from helpers.plots.style import compact_png
from helpers.workbook import NOTEBOOKS, find, replace

KEPT_METADATA = ("tags", "jupyter")
CELL_TIMEOUT_S = 120
WIDGET = "application/vnd.jupyter.widget-view+json"
IGNORED = "nbval-ignore-output"
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(,\d{3})*(\.\d+)?(e[+-]?\d+)?(?![\d.]*\d)")  # and no version, such as 2.5.5


def execute(path, anew=False):
    """Run a notebook from top to bottom on the CPU and write it back, normalised, with its old outputs where it can."""
    notebook, before = (nbformat.read(path, as_version=4) for _ in range(2))
    os.environ["JAX_PLATFORMS"] = "cpu"
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    number = path.stem.split("_")[0]
    normalise(notebook, number)
    if not anew:
        normalise(before, number)
        keep_outputs(before, notebook)
    text = nbformat.writes(notebook) + "\n"
    replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def normalise(notebook, number):
    """Leave only what the lesson needs: tags, counts 1..n, ids by position, a fixed kernel name, small pictures."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    notebook.nbformat_minor = 5
    count = 0
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{number}-{index:03d}"
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in KEPT_METADATA if key in cell.metadata})
        cell.pop("attachments", None)
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            # A widget lives only while its kernel does, and its id differs from run to run.
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
            for output in cell.outputs:
                output.pop("transient", None)
                if "metadata" in output:
                    output.metadata = nbformat.from_dict({})
                if output.output_type == "execute_result":
                    output.execution_count = count
                if "image/png" in output.get("data", {}):
                    png = compact_png(base64.b64decode(output.data["image/png"]))
                    output.data["image/png"] = base64.b64encode(png).decode()


def keep_outputs(before, notebook):
    """Give an executed notebook its outputs from before, where sources are the same and results differ by chance."""
    old_cells, new_cells = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (before, notebook))
    for old, new in zip(old_cells, new_cells, strict=False):
        if old.source != new.source:
            return
        excused = IGNORED in new.metadata.get("tags", ())
        if len(old.outputs) == len(new.outputs) and all(
            _alike(*pair, excused) for pair in zip(old.outputs, new.outputs, strict=True)
        ):
            new.outputs = old.outputs


def _alike(old, new, excused):
    """Whether two outputs differ only by chance."""
    if (old.output_type, old.get("name")) != (new.output_type, new.get("name")):
        return False
    old, new = (output.get("data") or {"text/plain": output.get("text", "")} for output in (old, new))
    same_text = (lambda a, b: _without_numbers(a) == _without_numbers(b)) if excused else str.__eq__
    return old.keys() == new.keys() and all(
        (_same_picture if kind == "image/png" else same_text)(old[kind], new[kind]) for kind in old
    )


def _without_numbers(text):
    return re.sub(" +", " ", NUMBER.sub("0", text))


def _same_picture(old, new):
    """Whether two pictures, PNG files in base 64, have the same pixels."""
    old, new = (Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB") for png in (old, new))
    return old.size == new.size and np.array_equal(old, new)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    executing = commands.add_parser("execute", help="run notebooks and write them back, normalised")
    executing.add_argument("notebooks", nargs="*", help="numbers, names or paths; default: all")
    executing.add_argument("--anew", action="store_true", help="keep no old output")
    options = parser.parse_args(arguments)
    try:
        paths = [Path(name) if Path(name).is_file() else find(name, NOTEBOOKS) for name in options.notebooks]
    except LookupError as error:
        sys.exit(str(error))
    for path in paths or sorted(NOTEBOOKS.glob("*.ipynb")):
        began = time.perf_counter()
        execute(path, options.anew)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
