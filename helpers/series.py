"""The lessons of the series and the paths through them, as notebooks/lessons.toml has them, and texts made from it."""

import re
import tomllib
from pathlib import Path

_TOML = tomllib.loads(Path(__file__).with_name("lessons.toml").read_text(encoding="utf-8"))
TRACKS = _TOML["tracks"]
LESSONS = {row["file"][:2]: row for row in _TOML["lessons"]}  # {"00": what its row says, …}, in order
PATHS = _TOML["paths"]


def exercises_on(path, numbers):
    """Those of the exercises `numbers`, such as "2.1", that lie on a path."""
    if "parts" in path:
        return [number for part in path["parts"] for number in part["exercises"] if number in numbers]
    return [number for number in numbers if int(number.split(".")[0]) <= int(path["last"])]


def fill(text, folder="", number=None):
    """A text with its tables written anew, and those facts of the first cell of a notebook that the file knows.

    folder: what leads from the text to the notebooks, such as "notebooks/". number: of the notebook whose first cell
    the text is, if it is one.
    """
    for name, make in {"lessons": lessons_table, "paths": paths_table}.items():
        between = re.compile(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end of {name} -->)", re.DOTALL)
        text = between.sub(lambda found, make=make: found[1] + make(folder) + found[2], text)
    if number in LESSONS:
        text = re.sub(r"(?m)^\[(?:← )?\d\d · .*\.ipynb\)$", neighbours(number), text)
        text = re.sub(r"about \d+ minutes to read", f"about {LESSONS[number]['reading']} minutes to read", text)
    return text


def link(number, folder="", before="", after=""):
    row = LESSONS[number]
    return f"[{before}{number} · {row['title']}{after}]({folder}{row['file']}.ipynb)"


def neighbours(number):
    """The links from a lesson to the one before and the one after."""
    numbers = list(LESSONS)
    place = numbers.index(number)
    links = [link(each, before="← ") for each in numbers[max(0, place - 1) : place]]
    return " | ".join(links + [link(each, after=" →") for each in numbers[place + 1 : place + 2]])


def lessons_table(folder=""):
    rows = ["| notebook | what it builds | minutes |", "|---|---|---|"]
    for number, row in LESSONS.items():
        rows.append(f"| {link(number, folder)} | {row['build']} | {row['reading'] + row['exercises']} |")
    return "\n".join(rows)


def paths_table(folder=""):
    rows = ["| path | what you do | it ends with | hours |", "|---|---|---|---|"]
    for path in PATHS:
        rows.append(f"| **{path['name']}** | {steps(path)} | {path['ends']} | {hours(path['minutes'])} |")
    return "\n".join(rows)


def hours(minutes):
    """Minutes as hours, to the nearest half below ten hours and to the nearest hour above: 2, 2½, 17."""
    halves = round(minutes / 30)
    return f"{halves // 2}{'½' * (halves % 2)}" if halves < 20 else f"{round(minutes / 60)}"


def steps(path, folder=""):
    """What to do on a path, in words, with links where there is a folder."""
    named = lambda number: f"[{number}]({folder}{LESSONS[number]['file']}.ipynb)" if folder else number
    if "parts" not in path:
        return f"{named('00')} to {named(path['last'])}, with all exercises"
    said = []
    for part in path["parts"]:
        lesson = named(part["lesson"])
        which = f"sections 1 to {part['sections']} of {lesson}" if "sections" in part else lesson
        said.append(f"{which} with exercise {' and '.join(part['exercises'])}")
    return ", then ".join(said)
