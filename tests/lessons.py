"""Reads the notebooks for the tests: their cells, stubs, checks and solutions."""

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))

HEADING = re.compile(r"^### Exercise (\d+\.\d+) · (.+)$", re.MULTILINE)
SOLUTION = re.compile(r"<summary>Solution</summary>\n\n.*?```python\n(.*?)```.*?</details>", re.DOTALL)
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


ALL = [lesson for path in PATHS for lesson in lessons(path)]
