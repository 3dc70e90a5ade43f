"""What a learner tried and solved, in a text file beside the notebooks of the workbook.

    2026-11-22 14:03  2.1  update  solved

One line when an exercise is first tried, and one when it is first solved; its number is for people, since the name of
the function stays when numbers move. The file never leaves the machine; delete it to begin again. Lines that say
something else are skipped, and without a workbook nothing is recorded.
"""

import contextlib
import re
import time
from pathlib import Path

from helpers.exercises.exercise import exercise, numbers_of_names
from helpers.workbook import RECORD as MARK_OF_A_WORKBOOK

FILE = "progress.txt"
TRIED, SOLVED = "tried", "solved"
WHAT = r"(\d{1,2}\.\d{1,2}|[a-z]+)(?:  ([a-z]\w*))?"  # an exercise and its function, or a part of `mine`
LINE = re.compile(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d  {WHAT}  ({TRIED}|{SOLVED})$", re.MULTILINE)
# Where exercises stand today that are in older records, without names. None: they are gone.
MOVED = {"2.4": None, "2.5": "2.4", "3.5": None, "3.6": "3.5", "5.1": None, "5.2": "5.3", "5.3": "5.1", "5.4": "5.2"}
MOVED |= {"5.5": "5.4", "1.4": None, "4.4": None, "10.6": "11.1", "12.6": None}
LONGEST = 1_000_000  # characters that are read of a file


def note(number, state):
    """Record that exercise `number`, or a part of `mine`, was tried or solved, if that is news. Never raises."""
    with contextlib.suppress(Exception):
        path = Path.cwd() / FILE
        if in_a_workbook() and (path.is_file() or not path.exists()) and done().get(number) not in (state, SOLVED):
            text = _text(path)
            begin = "\n" if text and not text.endswith("\n") else ""
            name = f"  {exercise(number).solution.__name__}" if "." in number else ""
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{begin}{time.strftime('%Y-%m-%d %H:%M')}  {number}{name}  {state}\n")


def done():
    """{number or part: TRIED or SOLVED}, what was worked on last at the end. Empty where there is no record."""
    found = {}
    with contextlib.suppress(Exception):
        for number, name, state in LINE.findall(_text(Path.cwd() / FILE)) if in_a_workbook() else ():
            number = numbers_of_names().get(name) if name else MOVED.get(number, number)
            found[number] = SOLVED if SOLVED in (state, found.pop(number, None)) else TRIED
        found.pop(None, None)
    return found


def in_a_workbook():
    """Whether this process, such as the kernel of a notebook, runs in a folder that `make lab` laid out."""
    return (Path.cwd() / MARK_OF_A_WORKBOOK).is_file()


def _text(path):
    if not path.is_file():  # a pipe would be waited for
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(LONGEST)
