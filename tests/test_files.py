"""The files beside the code: environments agree, notebooks are as committed notebooks must be, pictures are drawn."""

import ast
import collections
import graphlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import lessons
import pytest
import yaml
from lessons import PATHS, ROOT

from helpers import series
from helpers.dev.lesson import lay_out
from helpers.dev.notebooks import normalise
from helpers.plots.collect import draw_all, figures

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = {
    line.split("==")[0].lower(): line.split("==")[1]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
NOTEBOOK_BYTES = 1_200_000


def requirement_name(requirement):
    return re.match(r"[A-Za-z0-9-]+", requirement)[0].lower()


def test_every_dependency_is_pinned():
    extras = PROJECT["project"]["optional-dependencies"]
    requirements = PROJECT["project"]["dependencies"] + extras["test"] + extras["site"]
    assert {requirement_name(requirement) for requirement in requirements} <= CONSTRAINTS.keys()


def test_conda_and_pip_install_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, from_pip = environment["dependencies"]
    assert python == "python=3.12" and PROJECT["project"]["requires-python"] == ">=3.12"
    assert pip == "pip" and from_pip == {"pip": ["-c constraints.txt", "-e .[test]"]}


def test_the_oldest_jax_is_the_one_that_is_tested():
    (jax,) = (r for r in PROJECT["project"]["dependencies"] if requirement_name(r) == "jax")
    assert f"OLDEST_JAX = {re.search(r'>=([0-9.]+)', jax)[1]}" in (ROOT / "Makefile").read_text()


def tracked_files():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def test_no_file_holds_an_index_or_a_machine_path():
    parts = "index- url, extra- index, pypi .org, python hosted, /ro ot/, /ho me/, /wo rk/"
    words = [words.replace(" ", "") for words in parts.split(", ")]
    for path in tracked_files():
        if path.suffix not in (".png",):
            text = path.read_text(encoding="utf-8")
            assert [word for word in words if word in text] == [], path


def test_every_file_says_what_it_is_for():
    for path in (path for path in tracked_files() if path.suffix in (".py", ".cu", ".hpp", ".sh")):
        assert path.read_text(encoding="utf-8").startswith(('"""', "//", "#")), path


def test_imports_between_folders_run_one_way():
    """Of helpers, its parts included: `TopologicalSorter` raises where they run in a circle."""
    imports = collections.defaultdict(set)
    for path in (ROOT / "helpers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("helpers"):
                names = [f"{node.module}.{name.name}" for name in node.names] + [node.module]
                places = [ROOT / name.replace(".", "/") for name in names]
                files = [place.with_suffix(".py") for place in places] + [place / "__init__.py" for place in places]
                imports[path.parent] |= {file.parent for file in files if file.exists()} - {path.parent}
    assert len(imports) > 10
    graphlib.TopologicalSorter(imports).prepare()


def test_an_installed_series_has_every_file_that_is_read():
    """Beside code, a wheel holds what package-data names; the set-up script and `make lesson` are for a clone only.

    lessons.toml lies with the notebooks, and a link to it in the package, so that a wheel holds it too.
    """
    folder = ROOT / "helpers"
    data = {path for path in tracked_files() if folder in path.parents and path.suffix != ".py"}
    packaging = PROJECT["tool"]["setuptools"]
    named = {path for pattern in packaging["package-data"]["helpers"] for path in folder.glob(pattern)}
    assert data - named == {folder / "setup_environment.sh", folder / "dev" / "new_lesson.toml"}
    assert packaging["packages"]["find"] == {"include": ["helpers*"]}  # folders without an __init__.py, too


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_a_notebook_is_executed_and_normalised(path):
    """nbval silently skips a notebook without execution counts, so their absence must be loud."""
    notebook = lessons.read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    before = json.dumps(notebook, sort_keys=True)
    normalise(notebook, path.stem[:2])
    assert json.dumps(notebook, sort_keys=True) == before, "run `make notebooks`"
    assert path.stat().st_size < NOTEBOOK_BYTES


def test_outputs_can_be_compared(path):
    """No errors, no warnings, nothing that changes from run to run, unless the cell is excused."""
    for cell in lessons.read(path).cells:
        if cell.cell_type != "code":
            continue
        assert not cell.source.rstrip().endswith(";"), "a semicolon does not silence a cell under nbval"
        excused = "nbval-ignore-output" in cell.metadata.get("tags", [])
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr"
            kinds = set(output.get("data", {}))
            assert excused or kinds <= {"text/plain", "image/png", "text/markdown"}
            text = json.dumps(output.get("text", "")) + json.dumps(output.get("data", {}).get("text/plain", ""))
            assert excused or not re.search(r"0x[0-9a-f]{6}|/tmp/", text)


def test_a_notebook_has_the_form_of_a_lesson(path):
    cells = lessons.read(path).cells
    number = path.stem[:2]
    first = cells[0].source
    assert first.startswith(f"# {number} · ") and "**You need**" in first and "**Time**" in first
    map_in = first if number != "00" else "".join(cell.source for cell in cells)  # where the paths are shown
    assert f"../figures/roadmap-{number}.png" in map_in
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code[0].source.endswith("show_environment()")
    stays = number in ("10", "11", "12", "14", "15")  # on the CPU, as 00 says; 16 and 17 run nothing of JAX
    assert ('"JAX_PLATFORMS"' in code[0].source) == stays
    assert cells[-1].source.startswith("## What you can do now")
    place = PATHS.index(path)
    for neighbour in {*PATHS[max(0, place - 1) : place], *PATHS[place + 1 : place + 2]}:
        assert f"({neighbour.name})" in cells[-1].source
    lengths = sorted(len(cell.source.splitlines()) for cell in code)
    assert lengths[len(lengths) // 2] <= 10 and lengths[-1] <= 45
    for before, after in itertools.pairwise(cells):
        tags = after.metadata.get("tags", [])
        if after.cell_type == "code" and "check" not in tags:
            assert before.cell_type == "markdown" or "exercise" in tags, "say what a cell will show"


def test_links_and_pictures_exist(path):
    text = "\n".join(cell.source for cell in lessons.read(path).cells if cell.cell_type == "markdown")
    for alt, target in re.findall(r"(!?\[[^\]]*\])\(([^)]+)\)", text):
        if not target.startswith("http"):
            assert (path.parent / target.split("#")[0]).exists(), target
        if alt.startswith("!"):
            assert len(alt) > 20, f"{target} needs a description for readers who cannot see it"


@pytest.mark.full
def test_every_picture_is_drawn_and_shown(tmp_path, capsys):
    draw_all(tmp_path)
    committed = {path.name for path in (ROOT / "figures").iterdir()}
    assert committed == set(figures()), "run `make figures`"
    shown = (ROOT / "README.md").read_text() + "".join(path.read_text() for path in PATHS)
    for name in committed:
        assert f"figures/{name}" in shown, f"{name} is shown nowhere"
        assert (tmp_path / name).read_bytes() == (ROOT / "figures" / name).read_bytes(), f"{name} is out of date"


def test_the_lessons_are_as_lessons_toml_says(path):
    """Its title and minutes are those of the notebook; `series.fill` has them from there, and `normalise` calls it."""
    row = series.LESSONS[path.stem[:2]]
    reading, exercises = lessons.reading_minutes(path), lessons.exercise_minutes(path)
    assert row["file"] == path.stem and abs(row["reading"] - reading) <= 5, (path.name, round(reading))
    assert row["exercises"] == exercises and reading <= 110, "split it"
    first = lessons.read(path).cells[0].source
    assert first.startswith(f"# {path.stem[:2]} · {row['title']}\n") and series.neighbours(path.stem[:2]) in first


def test_the_readme_is_short_and_true():
    """Its tables are those of lessons.toml, and its commands there are. Words as `wc -w` counts them, of 00 too."""
    text = (ROOT / "README.md").read_text()
    first = [cell.source for cell in lessons.read(PATHS[0]).cells if cell.cell_type == "markdown"]
    assert len(text.split()) <= 895 and sum(len(source.split()) for source in first) <= 1795
    assert series.fill(text, "notebooks/") == text, "run `make notebooks`"
    assert series.lessons_table("notebooks/") in text and series.paths_table("notebooks/") in text
    for number in re.findall(r"make ([a-z-]+)", text):
        assert re.search(rf"^{number}:", (ROOT / "Makefile").read_text(), re.MULTILINE), number


@pytest.mark.parametrize("shown, number", [("triton_shown", "16"), ("cuda_shown", "17")])
def test_what_is_recorded_is_what_the_notebook_shows(shown, number):
    """A reader without the compiler sees the record, and the sentences beside it speak of the committed outputs."""
    record = json.loads((ROOT / "helpers/instruments/records" / f"{shown}.json").read_text())["outputs"]
    notebook = lessons.read(next(path for path in PATHS if path.name.startswith(number)))
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and (called := re.search(rf'{shown}\.show\("(\w+)"\)', cell.source)):
            found[called[1]] = "".join(output.get("text", "") for output in cell.outputs)
    assert found.keys() == record.keys()
    for name, text in record.items():
        assert found[name].endswith(text), name


LEFT = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "workbook", "site", "*.egg-info")


@pytest.mark.full
def test_a_new_lesson_is_one_of_the_series(tmp_path):
    root = tmp_path / "series"
    shutil.copytree(ROOT, root, ignore=LEFT, symlinks=True)
    notebook = lay_out("linear_attention", root)
    with pytest.raises(ValueError, match="there is a lesson linear_attention already"):
        lay_out("linear_attention", root)

    def run(*command):
        here = {"cwd": root, "env": os.environ | {"PYTHONPATH": str(root)}}  # the path is for the kernels
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, **here)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

    number = notebook.stem[:2]
    run("-m", "helpers.dev.notebooks", number)
    shutil.copy(root / "figures/roadmap-17.png", root / f"figures/roadmap-{number}.png")  # make figures draws it
    chosen = f"linear_attention or {int(number)}.1 or (Cell and not browser)"
    run("-m", "pytest", "-q", str(notebook), "tests/test_exercises.py", "tests/test_files.py", "-k", chosen)
