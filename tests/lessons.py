"""Reads the notebooks for the tests: their cells, stubs, checks and solutions, and how long they take.

    python tests/lessons.py

prints the minutes of every notebook, as the tables of the README and of notebook 00 must give them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))

HEADING = re.compile(r"^### Exercise (\d+\.\d+) · (.+)$", re.MULTILINE)
SOLUTION = re.compile(r"<summary>Solution</summary>\n\n.*?```python\n(.*?)```.*?</details>", re.DOTALL)
MINUTES = re.compile(r"· (\d+) minutes")
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
CHECK = re.compile(r'^check\("(\d+\.\d+)", (\w+)\)$')


@dataclass(frozen=True)
class Lesson:
    """One exercise as it stands in a notebook; stub and check are indices of cells."""

    path: Path
    number: str
    title: str
    stub: int
    check: int
    answer_name: str
    solution: str


def read(path):
    return nbformat.read(path, as_version=4)


def lessons(path):
    """The exercises of a notebook, each with its four cells in order: heading, stub, check, solution."""
    cells = read(path).cells
    found = []
    for index, cell in enumerate(cells):
        heading = HEADING.search(cell.source) if cell.cell_type == "markdown" else None
        if not heading:
            continue
        stub, check, folded = cells[index + 1 : index + 4]
        where = f"{path.name}, exercise {heading[1]}"
        assert stub.metadata.get("tags") == ["exercise"], f"{where}: the cell after the heading is the stub"
        assert check.metadata.get("tags") == ["check"], f"{where}: the cell after the stub is the check"
        call = CHECK.match(check.source)
        assert call and call[1] == heading[1], f"{where}: the check cell must be check({heading[1]!r}, answer)"
        solutions = SOLUTION.findall(folded.source)
        assert len(solutions) == 1, f"{where}: one folded solution with one Python block"
        found.append(Lesson(path, heading[1], heading[2], index + 1, index + 2, call[2], solutions[0]))
    return found


def reading_minutes(path):
    """Minutes to read a notebook at 200 words and 15 lines of code a minute, its exercises left out.

    Counted are the words of Markdown cells, formulas included but not the descriptions of pictures,
    and the lines of code cells that are not blank; not the outputs, nor the time to run the cells.
    """
    apart = {index for lesson in lessons(path) for index in range(lesson.stub - 1, lesson.check + 2)}
    words = lines = 0
    for index, cell in enumerate(read(path).cells):
        if index in apart:
            continue
        if cell.cell_type == "markdown":
            words += len(PICTURE.sub("", cell.source).split())
        else:
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    return words / 200 + lines / 15


def exercise_minutes(path):
    """Minutes that the exercises of a notebook say they take."""
    headings = [cell.source for cell in read(path).cells if cell.source.startswith("### Exercise")]
    return sum(int(MINUTES.search(heading)[1]) for heading in headings)


ALL = [lesson for path in PATHS for lesson in lessons(path)]

if __name__ == "__main__":
    for path in PATHS:
        print(f"{path.stem}: {reading_minutes(path):.0f} + {exercise_minutes(path)}")
