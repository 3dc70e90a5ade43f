"""Lay out a learner's own copies of the notebooks, and bring them up to date without losing a word.

    python -m helpers.workbook             copy the notebooks that are missing, refresh those that nobody edited
    python -m helpers.workbook fresh 05    put a fresh copy of one notebook beside an edited one

Pages such as notation.md lie beside the notebooks and are copied as they are, by the same rules.

An edition of a notebook is what its cells say: their kinds and sources, blank cells and outputs left out. So running
or saving a notebook is no edit. A copy is untouched when it is an edition that was laid out under its name: the
workbook records those in `.editions.json`. An untouched copy is replaced when its notebook changes; any other is
kept, and once its notebook has moved on it is named, until a fresh copy of that edition lies beside it.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
WORKBOOK = ROOT / "workbook"
RECORD = ".editions.json"  # {name of a copy: the editions that it has been}


def lay_out(notebooks=NOTEBOOKS, workbook=WORKBOOK):
    """Add what the workbook lacks and refresh what nobody edited. Returns one line of text for each thing done.

    A file that is no longer a notebook is moved aside under a new name, never lost, and a fresh
    copy takes its place.
    """
    workbook.mkdir(exist_ok=True)
    laid_out = _read(workbook / RECORD)
    said = []
    for source in _sources(notebooks):
        target, name, current = workbook / source.name, source.name, edition(source)
        mine = edition(target) if target.exists() else None
        if not target.exists():
            _place(source, target)
            said.append(f"added {name}")
        elif mine is None:
            aside = _unused_name(target)
            target.rename(aside)
            _place(source, target)
            said.append(f"{name} could not be read as a notebook: kept as {aside.name}, fresh copy made")
        elif mine == current:
            _remember(workbook, name, current)
        elif mine in laid_out.get(name, []):
            _place(source, target)
            said.append(f"updated {name}, which you had not edited")
        elif current not in laid_out.get(name, []):
            said.append(
                f"kept {name} with your edits, though the series has a newer one; "
                f"for a fresh copy beside it: make fresh NOTEBOOK={source.stem.split('_')[0]}"
            )
    for name in sorted(laid_out):
        target = workbook / name
        if target.exists() and not (notebooks / name).exists():
            said.append(
                f"kept {name}, though the series no longer has a notebook of this name: CHANGES.md, beside it, "
                "says where its exercises are, and you may delete it"
            )
    return said


def fresh(name, notebooks=NOTEBOOKS, workbook=WORKBOOK):
    """Put a fresh copy of a notebook, such as "05", into the workbook, beside one that was edited. Returns what to say.

    LookupError if there is no such notebook.
    """
    source = find(name, notebooks)
    workbook.mkdir(exist_ok=True)
    known = [*_read(workbook / RECORD).get(source.name, []), edition(source)]
    names = itertools.chain(
        [source.name, f"{source.stem}_fresh{source.suffix}"],
        (f"{source.stem}_fresh_{n}{source.suffix}" for n in itertools.count(2)),
    )
    target = next(path for path in map(workbook.joinpath, names) if not path.exists() or edition(path) in known)
    _place(source, target)
    kept = f"; {source.name} keeps your edits" if target.name != source.name else ""
    return f"{target.name} in the workbook is a fresh copy{kept}"


def find(name, notebooks=NOTEBOOKS):
    """The path of what has a number, name or path: 5, "05", "notation" or "notebooks/05_forward_kernel.ipynb"."""
    stem = Path(str(name)).stem
    for path in _sources(notebooks):
        if stem and (stem == path.stem or stem.zfill(2) == path.stem.split("_")[0]):
            return path
    numbers = [path.stem.split("_")[0] for path in sorted(notebooks.glob("*.ipynb"))]
    what = f"there is no notebook {str(name)!r}" if stem else "it was not said which notebook"
    raise LookupError(f"{what}: say a number from {numbers[0]} to {numbers[-1]}, as in make fresh NOTEBOOK=05")


def _sources(notebooks):
    """The notebooks, and the pages beside them."""
    return sorted([*notebooks.glob("*.ipynb"), *notebooks.glob("*.md")])


def edition(path):
    """A short text that is the same for two notebooks if their cells say the same; None if it is no notebook."""
    if path.suffix == ".md":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        said = [(cell.get("cell_type"), "".join(cell.get("source", "")).strip()) for cell in cells]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return hashlib.sha256(json.dumps([cell for cell in said if cell[1]]).encode()).hexdigest()[:16]


def _place(source, target):
    """Copy a notebook in one step. What is recorded is recorded before, so an interrupted copy is no edited one."""
    _remember(target.parent, source.name, edition(source))
    replace(target, lambda temporary: temporary.write_text(_for_this_kernel(source), encoding="utf-8"))


def _for_this_kernel(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    notebook = json.loads(text)
    notebook["metadata"] = notebook.get("metadata", {}) | of_the_kernel()
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def of_the_kernel():
    """What JupyterLab writes into a notebook as soon as its kernel runs.

    Where it is there before, nothing is changed by opening a copy, and JupyterLab does not ask to save what nobody
    touched.
    """
    from ipykernel import ipkernel, kernelspec  # which take their time, and most starts copy nothing

    said = kernelspec.get_kernel_dict()
    kernel = {"name": "python3", "display_name": said["display_name"], "language": said["language"]}
    return {"kernelspec": kernel, "language_info": ipkernel.IPythonKernel.language_info}


def _remember(workbook, name, what):
    laid_out = _read(workbook / RECORD)
    if what not in laid_out.get(name, []):
        laid_out.setdefault(name, []).append(what)
        text = json.dumps(laid_out, indent=1, sort_keys=True) + "\n"
        replace(workbook / RECORD, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def replace(path, write):
    """Let write make a file under another name, and only then give it its own: an interruption leaves the old one."""
    temporary = path.with_name(f".{path.name}.new")
    write(temporary)
    temporary.replace(path)


def _read(path):
    """{name: editions} from a file; without those parts that are something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = found if isinstance(found, dict) else {}
    return {name: editions for name, editions in found.items() if isinstance(editions, list)}


def _unused_name(path):
    stem = f"{path.stem}.broken-{time.strftime('%Y-%m-%d')}"
    names = (f"{stem}-{number}{path.suffix}.txt" for number in itertools.count(1))
    return next(aside for aside in map(path.with_name, names) if not aside.exists())


CANNOT_SAVE = (
    "The folder workbook cannot be written: JupyterLab will open your notebooks, and save nothing of what you do in "
    "them. Make it writable, or copy the series to a folder where you may write, and start it there."
)
CANNOT_WRITE = (
    "The workbook could not be brought up to date: {path} cannot be written ({reason}). Make its folder writable, or "
    "copy the series to a folder where you may write, and run the same command there."
)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Bring a learner's own copies of the notebooks up to date.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("fresh", help="put a fresh copy of one notebook beside an edited one").add_argument("notebook")
    options = parser.parse_args(arguments)
    try:
        said = [fresh(options.notebook, NOTEBOOKS, WORKBOOK)] if options.command else lay_out(NOTEBOOKS, WORKBOOK)
    except LookupError as error:
        sys.exit(f"The workbook could not be brought up to date: {error}")
    except OSError as error:
        path = error.filename2 or error.filename or WORKBOOK
        sys.exit(CANNOT_WRITE.format(path=path, reason=error.strerror or error))
    if not os.access(WORKBOOK, os.W_OK):
        said.append(CANNOT_SAVE)
    print("\n".join(said) or "The workbook is up to date.")


if __name__ == "__main__":
    main()
