"""Executing a notebook again changes what changed, and nothing else."""

import base64
import io
import subprocess

import nbformat
import pytest
from PIL import Image

from helpers import notebooks
from helpers.notebooks import IGNORED, execute, keep_outputs

PICTURE = """
import io, random
from IPython.display import Image
from PIL import Image as Picture
png = io.BytesIO()
Picture.new("RGB", (8, 8), (random.randrange(256), random.randrange(256), random.randrange(256))).save(png, "PNG")
Image(png.getvalue())
"""


def notebook(*cells):
    """A notebook of (source, tags)."""
    made = [
        nbformat.v4.new_code_cell(source, id=f"a{place}", metadata={"tags": tags} if tags else {})
        for place, (source, tags) in enumerate(cells)
    ]
    return nbformat.v4.new_notebook(cells=made)


def write(path, *cells):
    nbformat.write(notebook(*cells), path)


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
    clock = ("import time\nprint(f'took {time.perf_counter():.9f} s')", [IGNORED])
    write(path, clock, ("print(6 * 7)", []), (PICTURE, []), ("print('last')", []))
    assert execute(path) == ""
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "x")

    before, old = path.read_bytes(), outputs(path)
    assert execute(path) == "kept the outputs of 03-002, though the new ones differ; --anew takes them"
    assert path.read_bytes() == before

    change(path, 1, "print(6 * 8)")
    assert execute(path) == ""
    new = outputs(path)
    assert new[0] == old[0] and new[1][0].text == "48\n" and new[3] == old[3]
    assert new[2] != old[2], "what stands behind a change may come from it"


def stream(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def png(colour):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(file.getvalue()).decode()})


def is_kept(old, new, tags=(), by_chance=True):
    before, after = (notebook(("x", list(tags))) for _ in range(2))
    before.cells[0].outputs, after.cells[0].outputs = [old], [new]
    keep_outputs(before, after, by_chance)
    return after.cells[0].outputs == [old]


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("took 3.5 s", "took 4.25 s", True),
        ("error 6.0e-07", "error 8.3e-07", True),
        ("  9.5 ms  95 %", " 10.5 ms 105 %", True),
        ("1,200 tokens", "900 tokens", True),
        ("took 3.5 s", "it took 3.5 s", False),
        ("JAX 0.12.0.1 · NumPy 2.5.5", "JAX 0.12.1 · NumPy 2.5.5", False),
        ("float32", "float16", False),
    ],
)
def test_numbers_may_differ_where_a_cell_is_excused(old, new, kept):
    assert is_kept(stream(old), stream(new), [IGNORED], by_chance=False) is kept
    assert is_kept(stream(old), stream(new), [IGNORED]), "in an unchanged tree words differ by chance as well"
    assert not is_kept(stream(old), stream(new))
    assert is_kept(stream(old), stream(old), by_chance=False)


@pytest.mark.parametrize("tags", [(), (IGNORED,)])
def test_a_picture_is_kept_until_helpers_are_edited(tags):
    assert is_kept(png("red"), png("blue"), tags) and is_kept(png("red"), png("red"), tags, by_chance=False)
    assert not is_kept(png("red"), png("blue"), tags, by_chance=False)
    assert not is_kept(png("red"), stream("blue"))
    described = png("red") | {"metadata": {"image/png": {"alt": "a red square"}}}
    assert not is_kept(png("red"), nbformat.from_dict(described), tags, by_chance=False)


def test_git_is_asked_whether_anything_was_edited(repository, monkeypatch):
    edited = lambda: notebooks._git(repository, "status", "--porcelain", *notebooks.MADE_FROM) != ""
    (repository / "notebook.ipynb").touch()
    assert not edited()
    for name in ("helpers/new.py", "constraints.txt"):
        (repository / name).touch()
        assert edited()
        (repository / name).unlink()
    monkeypatch.setenv("PATH", "")
    assert not edited(), "there is no git"
