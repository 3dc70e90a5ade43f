"""Reads the notebooks for the tests: their cells, stubs, checks and solutions, and how long they take.

    python tests/lessons.py

prints the minutes of every notebook, as notebooks/lessons.toml must give them.
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
CHECK = re.compile(r"^check\((\w+)\)$")


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
        assert call, f"{where}: the check cell must be check(answer)"
        solutions = SOLUTION.findall(folded.source)
        assert len(solutions) == 1, f"{where}: one folded solution with one Python block"
        found.append(Lesson(path, heading[1], heading[2], index + 1, index + 2, call[1], solutions[0]))
    return found


# Seconds that reading takes. A count of words alone, at 200 a minute, was found to be half of what readers needed.
WORD, FORMULA_ON_ITS_OWN, FORMULA_IN_A_LINE = 60 / 180, 60, 3
LINE, PICTURE_SEEN = 5, 20  # of code, or of what a cell prints


def reading_minutes(path):
    """Minutes to read a notebook, and what its cells print and draw; the exercises left out.

    An estimate by the constants above. The time to run the cells comes on top.
    """
    apart = {index for lesson in lessons(path) for index in range(lesson.stub - 1, lesson.check + 2)}
    seconds = 0
    for index, cell in enumerate(read(path).cells):
        if index in apart:
            continue
        if cell.cell_type == "markdown":
            text, pictures = PICTURE.subn("", cell.source)
            text, displayed = re.subn(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
            text, inline = re.subn(r"\$[^$\n]+\$", "", text)
            seconds += words(text) * WORD + displayed * FORMULA_ON_ITS_OWN + inline * FORMULA_IN_A_LINE
        else:
            shown = [output.get("data", {}).get("text/markdown", "") for output in cell.outputs]
            printed = "".join([output.get("text", "") for output in cell.outputs] + shown)
            lines = [*cell.source.splitlines(), *printed.replace("```python", "").replace("```", "").splitlines()]
            seconds += sum(bool(line.strip()) for line in lines) * LINE
            pictures = sum("image/png" in output.get("data", {}) for output in cell.outputs)
        seconds += pictures * PICTURE_SEEN
    return seconds / 60


def words(text):
    """How many words a text has; marks such as | and ** that stand alone are none."""
    return len(re.findall(r"\S*\w\S*", text))


def exercise_minutes(path):
    headings = [cell.source for cell in read(path).cells if cell.source.startswith("### Exercise")]
    return sum(int(MINUTES.search(heading)[1]) for heading in headings)


ALL = [lesson for path in PATHS for lesson in lessons(path)]

if __name__ == "__main__":
    for path in PATHS:
        print(f"{path.stem}: {reading_minutes(path):.0f} + {exercise_minutes(path)}")
