"""Numbers in the prose of the measuring notebooks: printed by a cell of the same notebook, or quoted with a source.

A number counts if it carries a unit or is a ratio: 12 ms, 71 %, × 1.4, 3 times, a bare 1.03. What an exercise gives or
works out by hand is its own, and its check computes it; numbers in code are what the code says.
"""

import re
import tomllib
from pathlib import Path

import lessons
import pytest

FIRST, LAST = 9, 18
PATHS = [path for path in lessons.PATHS if FIRST <= int(path.stem[:2]) <= LAST]
QUOTED = tomllib.loads((Path(__file__).parent / "quoted_facts.toml").read_text())

UNIT = r"%|per cent\b|(?:ns|µs|ms|s|seconds?)\b(?!\s*=)|(?:TFLOP/s|GB/s|TB/s|bytes/s|FLOP/s)|FLOPs\b"
UNIT += r"|(?:bytes?|[kKMGT]i?B)\b(?!/s)|(?:GHz|MHz|cycles?)\b|W\b|(?:instructions?|registers?)\b|×|times\b"
NUMBER = r"(?<![\w.^{/-])(\d+(?:\.\d+)?|\.\d+)(?![\d.]*\w)"
POWER = r"(?:\s*·\s*10\^\{?(\d+)\}?)?"
CLAIM = re.compile(rf"(×\s*)?{NUMBER}{POWER}\s*(?:of them per )?({UNIT})?")
NOT_NUMBERS = re.compile(
    r"```.*?```|`[^`]*`|\*\*By hand\.\*\*[^\n]*|\([^)\s]*\.(?:png|ipynb)\)|arXiv[: ]*[\d.]+|\d{4}\.\d{5}"
    r"|[Ee]xercises? \d+\.\d+",
    re.DOTALL,
)


def claims(prose):
    """[(text as it stands there, number)] of a Markdown source."""
    prose = NOT_NUMBERS.sub(" ", prose)
    prose = prose.replace(r"\cdot", "·").replace(r"\times", "×").replace(r"\%", "%")
    prose = re.sub(r"\$|\\,|\\ |~", " ", prose)
    prose = re.sub(r"(?<=\d)[ \u202f,](?=\d{3}\b)", "", prose)  # 65 536
    found = (match for match in CLAIM.finditer(prose) if match[1] or match[4] or "." in match[2])
    return [(" ".join(match[0].split()), float(match[2]) * 10 ** int(match[3] or 0)) for match in found]


def unsupported(notebook, quoted=()):
    """The claims of a notebook that no cell prints and that are not quoted, as they stand in the prose."""
    printed = set()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        printed |= {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)}
    prose = [c.source for c in notebook.cells if c.cell_type == "markdown" and not c.source.startswith("### Exercise")]
    found = [claim for source in prose for claim in claims(source) if claim[0] not in quoted]
    return [text for text, value in found if not any(abs(x - value) <= 1e-9 * max(1, value) for x in printed)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_numbers_in_prose_are_printed_or_quoted(path):
    quoted = QUOTED.get(path.stem[:2], {})
    notebook = lessons.read(path)
    assert unsupported(notebook, quoted) == [], "print them in a cell, or name their source in quoted_facts.toml"
    said = {text for cell in notebook.cells if cell.cell_type == "markdown" for text, _ in claims(cell.source)}
    assert quoted.keys() <= said, "quoted, but not said"
    assert all(len(source) > 10 for source in quoted.values())
