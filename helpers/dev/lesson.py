"""Lay out a new lesson with one exercise: a notebook, a module of exercises, and a row of notebooks/lessons.toml.

    python -m helpers.dev.lesson linear_attention        (make lesson NAME=linear_attention)

It comes after the last one. Then `make notebooks` executes it and writes the tables, and `make figures` the maps.
"""

import argparse
import keyword
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
SOLUTION = '''def {name}(x):
    """Twice x, an array of any shape."""
    return 2 * x
'''
MODULE = '''"""The exercises of notebook {number}."""

import numpy as np

from helpers.exercises.exercise import Exercise


{solution}

FIRST = Exercise({name}, "{title}", outputs=("twice x",)).with_cases(
    "x", (1.0,), (2.5,), ("three numbers", np.array([1.0, -2.0, 0.5])),
).with_mistakes(
    ("x is squared", "2 * x", "x * x", "Multiply by two: see section 1."),
)  # fmt: skip

EXERCISES = (FIRST,)
'''
CELLS = (
    "# {number} · {title}\n\nOne sentence of promise.\n\n**You need** notebook {before}. "
    "**Time** about 1 minutes to read, and 5 for the exercise.\n\n"
    "![The steps of the series. You are at step {number}, {title}.]"
    "(../figures/roadmap-{number}.png)\n\n[{before} · the lesson before]({before_file}.ipynb)",
    "Run this cell first. It imports what the notebook uses, and prints versions and the device that computes.",
    "import numpy as np\n\nfrom helpers.environment import show_environment\nfrom helpers.exercises import check\n\n"
    "show_environment()",
    "## 1 · A question\n\nSay what the cell will show.",
    "x = np.array([1.0, -2.0, 0.5])\nprint(2 * x)",
    "Say what it showed.",
    "### Exercise {lesson}.1 · {title}\n\n★ · 5 minutes · about 1 line\n\nReturn twice `x`, an "
    "array of any shape.\n\n**By hand.** $x = 1$ gives 2.",
    'def {name}(x):\n    """Twice x, an array of any shape."""\n    raise NotImplementedError',
    "check({name})",
    "<details>\n<summary>Hint 1</summary>\n\nOne operation.\n\n</details>\n\n<details>\n<summary>Hint 2</summary>\n\n"
    "It works on whole arrays.\n\n</details>\n\n<details>\n<summary>Solution</summary>\n\n```python\n{solution}```\n\n"
    "Why this is right.\n\n</details>",
    "## What you can do now\n\nYou can double a number.\n\nThe idea to keep:\n\n- **An idea.** Its sentence.\n\n"
    "Back: [{before} · the lesson before]({before_file}.ipynb).",
)
CODE = {2: "nbval-ignore-output", 4: None, 7: "exercise", 8: "check"}  # {cell: tag}
ROW = """[[lessons]]
file = "{number}_{name}"
title = "{title}"
on_map = "{title}"
track = "further"
reading = 1
exercises = 5
build = "what it builds"

"""


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
    words = {"number": f"{lesson:02d}", "lesson": lesson, "before": before[:2], "before_file": before, "name": name}
    words |= {"title": name.replace("_", " ").capitalize(), "solution": SOLUTION.format(name=name)}
    notebook = nbformat.v4.new_notebook()
    for place, source in enumerate(CELLS):
        new = nbformat.v4.new_code_cell if place in CODE else nbformat.v4.new_markdown_cell
        tags = [CODE[place]] if CODE.get(place) else []
        notebook.cells.append(new(source.format(**words), metadata={"tags": tags} if tags else {}))
    path = root / "notebooks" / f"{lesson:02d}_{name}.ipynb"
    module = root / "helpers" / "exercises" / f"notebook_{lesson:02d}.py"
    if module.exists():
        raise ValueError(f"there is a module {module.name} of exercises already")
    nbformat.write(notebook, path)
    module.write_text(MODULE.format(**words), encoding="utf-8")
    last = rows.index("# A path is read")
    toml.write_text(rows[:last] + ROW.format(**words) + rows[last:], encoding="utf-8")
    return path


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m helpers.dev.lesson", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the lesson and of its exercise's function, such as linear_attention")
    options = parser.parse_args(arguments)
    try:
        print(f"{lay_out(options.name).name} is laid out. Next: make notebooks, and make figures.")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
