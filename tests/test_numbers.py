"""Numbers in the prose of the measuring notebooks: printed by a cell of the same notebook, or quoted with a source.

A number counts if it carries a unit or is a ratio: 12 ms, 71 %, × 1.4, 3 times, a bare 1.03. What an exercise gives or works
out by hand is its own, and its check computes it; numbers in code are what the code says.
"""

import re
import tomllib
from pathlib import Path

import lessons
import nbformat
import pytest

FIRST, LAST = 9, 18
PATHS = [path for path in lessons.PATHS if FIRST <= int(path.stem[:2]) <= LAST]
QUOTED = tomllib.loads((Path(__file__).parent / "quoted_facts.toml").read_text())

UNITS = {
    "%": r"%|per cent\b",
    "time": r"(?:ns|µs|ms|s|seconds?)\b(?!\s*=)",
    "rate": r"(?:TFLOP/s|GB/s|TB/s|bytes/s|FLOP/s)",
    "FLOPs": r"FLOPs\b",
    "bytes": r"(?:bytes?|[kKMGT]i?B)\b(?!/s)",
    "clock": r"(?:GHz|MHz|cycles?)\b",
    "power": r"W\b",
    "code": r"(?:instructions?|registers?)\b",
    "ratio": r"×|times\b",
}
NUMBER = r"(?<![\w.^{/-])(\d+(?:\.\d+)?|\.\d+)(?![\d.]*\w)"
POWER = r"(?:\s*·\s*10\^\{?(\d+)\}?)?"
CLAIM = re.compile(rf"(×\s*)?{NUMBER}{POWER}\s*(?:of them per )?({'|'.join(UNITS.values())})?")
NOT_NUMBERS = re.compile(
    r"```.*?```|`[^`]*`|\*\*By hand\.\*\*[^\n]*|\([^)\s]*\.(?:png|ipynb)\)|arXiv[: ]*[\d.]+|\d{4}\.\d{5}"
    r"|[Ee]xercises? \d+\.\d+",
    re.DOTALL,
)


def claims(prose):
    """[(text as it stands there, number, kind of unit)] of a Markdown source."""
    prose = NOT_NUMBERS.sub(" ", prose)
    prose = prose.replace(r"\cdot", "·").replace(r"\times", "×").replace(r"\%", "%")
    prose = re.sub(r"\$|\\,|\\ |~", " ", prose)
    prose = re.sub(r"(?<=\d)[ \u202f,](?=\d{3}\b)", "", prose)  # 65 536
    found = []
    for match in CLAIM.finditer(prose):
        times, digits, power, unit = match.groups()
        if unit:
            kind = next(kind for kind, pattern in UNITS.items() if re.fullmatch(pattern, unit))
        elif times or "." in digits:
            kind = "ratio"
        else:
            continue
        text = " ".join(match[0].split())
        found.append((text, float(digits) * 10 ** int(power or 0), kind))
    return found


def printed(cell):
    """The text that a code cell printed."""
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(texts)


def is_printed(value, kind, texts):
    """Whether some text holds the number, and somewhere its unit; a ratio with a decimal point needs none."""
    unit = r"" if kind == "ratio" and value % 1 else rf"(?<![A-Za-z/])(?:{UNITS[kind]})"
    for text in texts:
        numbers = {float(match[0]) for match in re.finditer(r"\d+(?:\.\d+)?", text)}
        if re.search(unit, text) and any(abs(number - value) <= 1e-9 * max(1, value) for number in numbers):
            return True
    return False


def unsupported(notebook, quoted=()):
    """The claims of a notebook that no cell prints and that are not quoted, as they stand in the prose."""
    texts = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    prose = [c.source for c in notebook.cells if c.cell_type == "markdown" and not c.source.startswith("### Exercise")]
    found = [claim for source in prose for claim in claims(source)]
    return [text for text, value, kind in found if text not in quoted and not is_printed(value, kind, texts)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_numbers_in_prose_are_printed_or_quoted(path):
    quoted = QUOTED.get(path.stem[:2], {})
    notebook = lessons.read(path)
    assert unsupported(notebook, quoted) == [], "print them in a cell, or name their source in quoted_facts.toml"
    said = {text for cell in notebook.cells if cell.cell_type == "markdown" for text, _, _ in claims(cell.source)}
    assert quoted.keys() <= said, "quoted, but not said"


def test_every_quoted_fact_names_its_source():
    assert QUOTED and all(len(source) > 10 for facts in QUOTED.values() for source in facts.values())


def test_a_number_that_nothing_supports_is_found():
    """So that the test above can fail: wrong value, wrong unit, no cell at all."""

    def complaints(prose, output="the kernel takes 12.5 ms, 71% of the bound, × 1.40 of cuDNN\n", quoted=()):
        code = nbformat.v4.new_code_cell("run()", outputs=[nbformat.v4.new_output("stream", text=output)])
        return unsupported(nbformat.v4.new_notebook(cells=[code, nbformat.v4.new_markdown_cell(prose)]), quoted)

    assert complaints("It takes 12.5 ms, that is 71 % of it, × 1.4 of cuDNN; the first of 3 tries.") == []
    assert complaints("It takes 13 ms.") == ["13 ms"]
    assert complaints("It takes 12.5 ms.", output="12.5 GB/s\n") == ["12.5 ms"]
    assert complaints("It reaches 1 % more, and $3.9 \\cdot 10^{12}$ FLOPs.") == ["1 %", "3.9 · 10^{12} FLOPs"]
    assert complaints("It reaches 1 % more.", quoted={"1 %": "a paper"}) == []
    assert complaints("1 400 TFLOP/s and 1.5 times as much, or 1.6") == ["1400 TFLOP/s", "1.5 times", "1.6"]
    assert complaints("`99 ms` is code. **By hand.** 99 ms.") == []
