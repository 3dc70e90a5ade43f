"""JupyterLab as a learner meets it: a notebook opens, Run All leaves no error, a solution unfolds."""

import json
import re
import shutil
import time

import nbformat
import pytest
from chromium import CHROMIUM, started_chromium, started_lab
from lessons import PATHS, ROOT, lessons
from playwright.sync_api import TimeoutError, expect

from helpers.workbook import lay_out, of_the_kernel

pytestmark = [
    pytest.mark.browser,
    pytest.mark.full,  # the price of a lesson, to find what changes with a new JupyterLab only
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


def _run_all(page, url, path, seconds=120):
    """Open a notebook, run all of its cells, save it, and return its code cells."""
    page.goto(f"{url}/lab/tree/workbook/{path.name}?reset", timeout=60_000)
    idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']")
    idle.first.wait_for(timeout=60_000)
    page.wait_for_timeout(3000)  # for what the kernel says of itself
    assert page.locator(".jp-mod-dirty").count() == 0, "JupyterLab would ask to save what nobody touched"

    started = page.locator(".jp-InputPrompt", has_text=re.compile(r"\[\d+\]")).first
    for _ in range(8):  # the menu answers before the notebook and its kernel are ready to run
        try:
            page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click(timeout=5_000)
            page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click(timeout=5_000)
            started.wait_for(timeout=20_000)
            break
        except TimeoutError:
            page.keyboard.press("Escape")  # closes the menu, or a dialog that asks for patience
    else:
        raise AssertionError("Run All did not start. " + " ".join(page.locator(".jp-Dialog").all_inner_texts()))

    # The page draws only the cells in view; the saved file has them all.
    code, deadline = [], time.monotonic() + seconds
    while not code or any(cell["execution_count"] is None for cell in code):
        assert time.monotonic() < deadline, f"Run All of {path.name} did not come to the end"
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1000)
        try:
            saved = json.loads(path.read_text())
        except ValueError:  # caught in the middle of being written
            continue
        code = [cell for cell in saved["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    errors = [output["ename"] + ": " + output["evalue"] for output in outputs if output["output_type"] == "error"]
    assert outputs and not errors, f"{path.name}: {errors}"
    return code


def _solved(path, workbook):
    """A copy of a notebook, without outputs, in which a learner has put the solutions into the empty cells."""
    notebook = nbformat.read(path, as_version=4)
    for lesson in lessons(path):
        notebook.cells[lesson.stub].source = lesson.solution
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(execution_count=None, outputs=[])
    notebook.metadata.update(of_the_kernel())
    nbformat.write(notebook, workbook / path.name)
    return workbook / path.name


def _printed(code):
    return "".join("".join(output.get("text", "")) for cell in code for output in cell["outputs"])


def test_a_learner_who_solves_05_and_13_owns_kernels(tmp_path):
    """What 13 does with the module is what it does with the kernels of the series."""
    root = tmp_path / "series"
    root.mkdir()
    lay_out(ROOT / "notebooks", root / "workbook")
    shutil.copytree(ROOT / "figures", root / "figures")
    taken = [path for path in PATHS if path.stem[:2] in ("05", "13")]
    with started_lab(root, tmp_path) as said, started_chromium() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(address := re.search(r"http://\S+", said)[0])  # whose token lets the next ones in
        url = address.partition("/lab/")[0]
        run = lambda path: _printed(_run_all(page, url, _solved(path, root / "workbook"), 300))
        printed = {path.stem[:2]: run(path) for path in taken}
        solution = page.locator("details", has=page.locator("summary", has_text="Solution")).first
        for _ in range(60):  # cells are drawn as they come into view
            if solution.count():
                break
            page.locator(".jp-WindowedPanel-outer").first.evaluate("panel => panel.scrollBy(0, 600)")
            page.wait_for_timeout(150)
        expect(solution.locator("pre")).not_to_be_visible()
        solution.locator("summary").click()
        expect(solution.locator("pre")).to_be_visible()
    for text in printed.values():
        assert "✗" not in text
    assert "yours, from mine.py" in printed["13"] and "the series' own" not in printed["13"]
    kept = {name for text in printed.values() for name in re.findall(r"Kept: `(\w+)`", text)}
    assert kept == {"forward", "decode_attention"}
