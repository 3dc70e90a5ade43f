"""What a learner tried and solved, in a text file beside the notebooks of the workbook.

    2026-11-22 14:03  2.1  solved

One line when an exercise is first tried, and one when it is first solved. The file never leaves the machine; delete it
to begin again. Lines that say something else are skipped, and without a workbook nothing is recorded.
"""

import contextlib
import re
import time
from pathlib import Path

from helpers.workbook import RECORD as MARK_OF_A_WORKBOOK

FILE = "progress.txt"
TRIED, SOLVED = "tried", "solved"
LINE = re.compile(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d  (\d{{1,2}}\.\d{{1,2}}|[a-z]+)  ({TRIED}|{SOLVED})$", re.MULTILINE)
LONGEST = 1_000_000  # characters that are read of a file


def note(number, state):
    """Record that exercise `number`, or a part of `mine`, was tried or solved, if that is news. Never raises."""
    with contextlib.suppress(Exception):
        path = Path.cwd() / FILE
        if in_a_workbook() and (path.is_file() or not path.exists()) and done().get(number) not in (state, SOLVED):
            text = _text(path)
            begin = "\n" if text and not text.endswith("\n") else ""
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{begin}{time.strftime('%Y-%m-%d %H:%M')}  {number}  {state}\n")


def done():
    """{number or part: TRIED or SOLVED}, what was worked on last at the end. Empty where there is no record."""
    found = {}
    with contextlib.suppress(Exception):
        for number, state in LINE.findall(_text(Path.cwd() / FILE)) if in_a_workbook() else ():
            found[number] = SOLVED if SOLVED in (state, found.pop(number, None)) else TRIED
    return found


def in_a_workbook():
    """Whether this process, such as the kernel of a notebook, runs in a folder that `make lab` laid out."""
    return (Path.cwd() / MARK_OF_A_WORKBOOK).is_file()


def _text(path):
    if not path.is_file():  # a pipe would be waited for
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(LONGEST)
