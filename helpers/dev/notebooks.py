"""The one tool that writes the outputs of notebooks: execute them and normalise them.

    python -m helpers.dev.notebooks [--anew] [03 …]

Executing an unchanged notebook again changes no byte of it, as long as nothing in `helpers` and no version was edited
since the last commit: a cell that is the same as there, after cells that are the same, keeps its outputs if it prints
the same, and if `nbval-ignore-output` excuses it in any case. Timings and rounding errors differ by chance, and the
pixels of a picture do not tell. `--anew` keeps nothing, and nothing is kept of a notebook that git does not know.
"""

import argparse
import base64
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from helpers import clock, series
from helpers.plots.style import compact_png
from helpers.workbook import NOTEBOOKS, ROOT, find, replace

README = ROOT / "README.md"
KEPT_METADATA = ("tags", "jupyter")
CELL_TIMEOUT_S = 120
WIDGET = "application/vnd.jupyter.widget-view+json"
MADE_FROM = ("helpers", "constraints.txt", "pyproject.toml")  # what a notebook depends on, besides its own cells
IGNORED = "nbval-ignore-output"


def execute(path, anew=False):
    """Run a notebook on the CPU and write it back, normalised, with old outputs where it can."""
    notebook = nbformat.read(path, as_version=4)
    committed = _git(path.parent, "show", f"HEAD:./{path.name}")
    os.environ |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", clock.OFF: "1"}
    options = {"timeout": CELL_TIMEOUT_S, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}, **options).execute()
    number = path.stem.split("_")[0]
    normalise(notebook, number)
    if committed and not anew and not _git(ROOT, "status", "--porcelain", *MADE_FROM):
        before = nbformat.reads(committed, as_version=4)
        normalise(before, number)
        keep_outputs(before, notebook)
    text = nbformat.writes(notebook) + "\n"
    replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def normalise(notebook, number):
    """Leave only what the lesson needs: tags, counts 1..n, ids by position, a fixed kernel name, small pictures.

    What lessons.toml knows is written into its cells.
    """
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    notebook.nbformat_minor = 5
    count = 0
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{number}-{index:03d}"
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in KEPT_METADATA if key in cell.metadata})
        cell.pop("attachments", None)
        if cell.cell_type == "markdown":
            cell.source = series.fill(cell.source, number=None if index else number)
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            # A widget lives only while its kernel does, and its id differs from run to run.
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
            for output in cell.outputs:
                output.pop("transient", None)
                if "metadata" in output:  # of a picture: its size, and what it shows in words
                    kept = {kind: value for kind, value in output.metadata.items() if kind == "image/png"}
                    output.metadata = nbformat.from_dict(kept)
                if output.output_type == "execute_result":
                    output.execution_count = count
                if "image/png" in output.get("data", {}):
                    png = compact_png(base64.b64decode(output.data["image/png"]))
                    output.data["image/png"] = base64.b64encode(png).decode()


def keep_outputs(before, notebook):
    """Give an executed notebook its outputs from before, where sources and, unless excused, what they print agree."""
    old_cells, new_cells = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (before, notebook))
    for old, new in zip(old_cells, new_cells, strict=False):
        if old.source != new.source:
            break
        if IGNORED in new.metadata.get("tags", ()) or _texts(old.outputs) == _texts(new.outputs):
            new.outputs = old.outputs


def _texts(outputs):
    """What outputs are and say, in pictures by their alternative texts."""
    said = (output.get("data", {"text/plain": output.get("text")}) for output in outputs)
    texts = [{kind: text for kind, text in each.items() if kind != "image/png"} for each in said]
    shown = (output.get("metadata", {}).get("image/png", {}).get("alt", "") for output in outputs)
    return list(zip(texts, shown, strict=True))


def _git(folder, *arguments):
    """What git says, and nothing where there is no git, no repository or no such file."""
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="numbers, names or paths; default: all")
    parser.add_argument("--anew", action="store_true", help="keep no old output")
    options = parser.parse_args(arguments)
    try:
        paths = [Path(name) if Path(name).is_file() else find(name, NOTEBOOKS) for name in options.notebooks]
    except LookupError as error:
        sys.exit(str(error))
    replace(README, lambda new: new.write_text(series.fill(README.read_text("utf-8"), "notebooks/"), encoding="utf-8"))
    for path in paths or sorted(NOTEBOOKS.glob("*.ipynb")):
        began = time.perf_counter()
        execute(path, options.anew)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
