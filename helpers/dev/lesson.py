"""Lay out a new lesson with one exercise: a notebook, a module of exercises, and a row of notebooks/lessons.toml.

    python -m helpers.dev.lesson linear_attention        (make lesson NAME=linear_attention)

It comes after the last one. Then `make notebooks` executes it and writes the tables, and `make figures` the maps.
"""

import keyword
import re
import sys
import tomllib
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]


def lay_out(name, root=ROOT):
    """Write the three files, and return the path of the notebook. ValueError where the name does not do."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"a lesson's name is small letters, digits and _, such as linear_attention, got {name!r}")
    toml = root / "notebooks" / "lessons.toml"
    rows = toml.read_text(encoding="utf-8")
    before = max(re.findall(r'^file = "(\d\d_\w+)"$', rows, re.MULTILINE))
    lesson = int(before[:2]) + 1
    if re.search(rf'^file = "\d\d_{name}"$', rows, re.MULTILINE):
        raise ValueError(f"there is a lesson {name} already")
    new = tomllib.loads(Path(__file__).with_name("new_lesson.toml").read_text(encoding="utf-8"))
    words = {"number": f"{lesson:02d}", "lesson": lesson, "before": before[:2], "before_file": before, "name": name}
    words |= {"title": name.replace("_", " ").capitalize(), "solution": new["solution"].format(name=name)}
    notebook = nbformat.v4.new_notebook()
    for cell in new["cells"]:
        cell_of = nbformat.v4.new_code_cell if "is_code" in cell else nbformat.v4.new_markdown_cell
        metadata = {"tags": cell["tags"]} if "tags" in cell else {}
        notebook.cells.append(cell_of(cell["source"].strip().format(**words), metadata=metadata))
    path = root / "notebooks" / f"{lesson:02d}_{name}.ipynb"
    module = root / "helpers" / "exercises" / f"notebook_{lesson:02d}.py"
    if module.exists():
        raise ValueError(f"there is a module {module.name} of exercises already")
    nbformat.write(notebook, path)
    module.write_text(new["module"].format(**words), encoding="utf-8")
    last = rows.index("# A path is read")
    toml.write_text(rows[:last] + new["row"].format(**words) + rows[last:], encoding="utf-8")
    return path


if __name__ == "__main__":
    try:
        print(f"{lay_out(sys.argv[1]).name} is laid out. Next: make notebooks, and make figures.")
    except ValueError as error:
        sys.exit(f"No new lesson: {error}")
