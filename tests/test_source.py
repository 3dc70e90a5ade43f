"""Sources as the notebooks show them: whole, or by named regions, all of which are shown."""

import ast
import re
from pathlib import Path

from lessons import PATHS, ROOT, read

from helpers.source import MARK

# They show code of their own only.
WITHOUT_SOURCE = {"00", "04"}


def shown(path):
    """(names that a notebook gives to functions that show source, whether it has such functions)."""
    names, shows = set(), False
    for cell in read(path).cells:
        if cell.cell_type == "code" and not cell.source.startswith("%"):
            for call in (node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)):
                function = ast.unparse(call.func)
                if function in ("show", "show_kernel", "show_source", "beside", "inspect.getsource"):
                    shows = True
                    arguments = call.args[function == "show_kernel" :]
                    nodes = (node for part in arguments for node in ast.walk(part))
                    names |= {node.value for node in nodes if isinstance(node, ast.Constant)}
    return names, shows


def test_lessons_show_every_region_and_each_lesson_shows_source():
    files = [*Path(ROOT, "helpers").rglob("*.py"), *Path(ROOT, "helpers").rglob("*.cu")]
    marks = [mark for file in files for mark in map(MARK.fullmatch, file.read_text().splitlines()) if mark]
    regions = [mark[1] for mark in marks if mark[1]]
    assert len(set(regions)) == len(regions), "two regions have one name"
    by_lesson = {path.name[:2]: shown(path) for path in PATHS}
    assert set(regions) - set().union(*(names for names, _ in by_lesson.values())) == set()
    assert {number for number, (_, shows) in by_lesson.items() if not shows} == WITHOUT_SOURCE


def test_code_fits_a_page_of_1280_pixels():
    """So many columns do in a browser, where `make site-test` looks."""
    for path in PATHS:
        for cell in read(path).cells:
            code = [cell.source] if cell.cell_type == "code" else re.findall(r"```python.*?```", cell.source, re.S)
            assert [line for block in code for line in block.splitlines() if len(line) > 96] == [], path.name
