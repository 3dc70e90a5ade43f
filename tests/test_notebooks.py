"""Executing a notebook again changes what changed, and nothing else."""

import subprocess

import nbformat
import pytest

from helpers.dev import notebooks
from helpers.dev.notebooks import IGNORED, execute

PICTURE = """
import io, random
from IPython.display import Image
from PIL import Image as Picture
png = io.BytesIO()
Picture.new("RGB", (8, 8), (random.randrange(256), random.randrange(256), random.randrange(256))).save(png, "PNG")
Image(png.getvalue())
"""


def change(path, place, source):
    found = nbformat.read(path, as_version=4)
    found.cells[place].source = source
    nbformat.write(found, path)


def outputs(path):
    return [cell.outputs for cell in nbformat.read(path, as_version=4).cells]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """An empty repository, whose helpers are those that pictures depend on."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    (tmp_path / "helpers").mkdir()
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(folder, *arguments):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True)


def test_an_unchanged_notebook_keeps_every_byte(repository):
    path = repository / "03_small.ipynb"
    clock = "import time\nprint(f'took {time.perf_counter():.9f} s')"
    cells = [nbformat.v4.new_code_cell(text) for text in (clock, "print(6 * 7)", PICTURE, "print('last')")]
    cells[0].metadata["tags"] = [IGNORED]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    execute(path)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "x")

    before, old = path.read_bytes(), outputs(path)
    execute(path)
    assert path.read_bytes() == before

    change(path, 1, "print(6 * 8)")
    execute(path)
    new = outputs(path)
    assert new[0] == old[0] and new[1][0].text == "48\n" and new[3] == old[3]
    assert new[2] != old[2], "what stands behind a change may come from it"

    (repository / "helpers" / "new.py").touch()
    execute(path)
    assert outputs(path)[0] != old[0], "what changed in helpers may be why"
