"""The one tool that writes notebooks: execute them, normalise them, lay out a learner's copies.

    python -m helpers.notebooks execute [notebooks/03_….ipynb …]
    python -m helpers.notebooks workbook

Executing twice gives the same bytes. The workbook is a git-ignored copy of the notebooks for the
learner to write in; a file in it is never overwritten.
"""

import argparse
import base64
import json
import os
import shutil
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from helpers.plots.style import compact_png

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
WORKBOOK = ROOT / "workbook"
KEPT_METADATA = ("tags", "jupyter")
CELL_TIMEOUT_S = 120
WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(path):
    """Run a notebook from top to bottom on the CPU and write it back, normalised."""
    notebook = nbformat.read(path, as_version=4)
    os.environ["JAX_PLATFORMS"] = "cpu"
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    normalise(notebook, path.stem.split("_")[0])
    _write(path, nbformat.writes(notebook) + "\n")


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
                if "metadata" in output:  # of a picture: its size, and what it shows in words
                    kept = {kind: value for kind, value in output.metadata.items() if kind == "image/png"}
                    output.metadata = nbformat.from_dict(kept)
                if output.output_type == "execute_result":
                    output.execution_count = count
                if "image/png" in output.get("data", {}):
                    png = compact_png(base64.b64decode(output.data["image/png"]))
                    output.data["image/png"] = base64.b64encode(png).decode()


def lay_out_workbook(notebooks=NOTEBOOKS, workbook=WORKBOOK):
    """Copy each notebook that the workbook lacks. Returns one line of text for each thing done.

    A file that is no longer a notebook is moved aside under a new name, never lost, and a fresh
    copy takes its place.
    """
    workbook.mkdir(exist_ok=True)
    said = []
    for source in sorted(notebooks.glob("*.ipynb")):
        target = workbook / source.name
        if target.exists() and not _is_notebook(target):
            aside = _unused_name(target)
            target.rename(aside)
            shutil.copyfile(source, target)
            said.append(f"{target.name} could not be read as a notebook: kept as {aside.name}, fresh copy made")
        elif not target.exists():
            shutil.copyfile(source, target)
            said.append(f"added {target.name}")
    return said


def _is_notebook(path):
    """Whether JupyterLab could open it; a notebook that merely breaks some rule of the format can stay."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(cells, list)


def _unused_name(path):
    stamp = time.strftime("%Y-%m-%d")
    number = 1
    while (aside := path.with_name(f"{path.stem}.broken-{stamp}-{number}{path.suffix}.txt")).exists():
        number += 1
    return aside


def _write(path, text):
    """Replace a file in one step, so that an interruption leaves the old one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    executing = commands.add_parser("execute", help="run notebooks and write them back, normalised")
    executing.add_argument("paths", nargs="*", type=Path, help="default: all")
    commands.add_parser("workbook", help="copy notebooks that the workbook lacks")
    options = parser.parse_args(arguments)
    if options.command == "workbook":
        print("\n".join(lay_out_workbook()) or "workbook is up to date")
        return
    for path in options.paths or sorted(NOTEBOOKS.glob("*.ipynb")):
        began = time.perf_counter()
        execute(path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
