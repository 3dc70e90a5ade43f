"""A learner's copies of the notebooks: brought up to date, and nothing that was written into them is ever lost."""

import json

import nbformat
import pytest

from helpers import workbook as module
from helpers.workbook import RECORD, fresh, lay_out


def notebook(*texts):
    cells = [nbformat.v4.new_code_cell(text, id=f"a{place}") for place, text in enumerate(texts)]
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells))


def executed(path):
    """As JupyterLab saves a notebook that was run to its end: outputs, counts, ids and an empty cell."""
    found = nbformat.read(path, as_version=4)
    for cell in found.cells:
        cell.update(execution_count=7, id="b", outputs=[nbformat.v4.new_output("stream", text="42\n")])
    found.cells.append(nbformat.v4.new_code_cell(""))
    found.metadata["widgets"] = {}
    path.write_text(json.dumps(found, indent=4))


def is_copy(path, of):
    """The same text, but for what JupyterLab would write into it as it opens it."""
    expected = json.loads(of.read_text())
    expected["metadata"] |= module.of_the_kernel()
    return path.read_text() == json.dumps(expected, indent=1, ensure_ascii=False) + "\n"


@pytest.fixture
def folders(tmp_path):
    notebooks, workbook = tmp_path / "notebooks", tmp_path / "workbook"
    notebooks.mkdir()
    for name in ("00_first.ipynb", "01_second.ipynb"):
        (notebooks / name).write_text(notebook(name))
    assert lay_out(notebooks, workbook) == ["added 00_first.ipynb", "added 01_second.ipynb"]
    assert lay_out(notebooks, workbook) == []
    return notebooks, workbook


def update(folders, name="00_first.ipynb", text="a new edition"):
    """A new edition of a notebook arrives, and the workbook is laid out. What was said."""
    notebooks, workbook = folders
    (notebooks / name).write_text(notebook(text))
    return lay_out(notebooks, workbook)


@pytest.mark.parametrize("use", [lambda path: None, executed], ids=["never opened", "executed and saved"])
def test_a_copy_that_nobody_edited_follows_its_notebook(folders, use):
    notebooks, workbook = folders
    for text in ("a second edition", "a third edition"):
        use(workbook / "00_first.ipynb")
        assert update(folders, text=text) == ["updated 00_first.ipynb, which you had not edited"]
        assert is_copy(workbook / "00_first.ipynb", notebooks / "00_first.ipynb")
        assert lay_out(*folders) == []


def test_an_edited_copy_is_kept_and_named_once_it_is_old(folders):
    _, workbook = folders
    mine = notebook("00_first.ipynb", "my answer")
    (workbook / "00_first.ipynb").write_text(mine)
    assert lay_out(*folders) == []
    (said,) = update(folders)
    assert said.startswith("kept 00_first.ipynb with your edits") and said.endswith("make fresh NOTEBOOK=00")
    assert lay_out(*folders) == [said]
    assert (workbook / "00_first.ipynb").read_text() == mine


def test_a_fresh_copy_stands_beside_the_edited_one(folders):
    notebooks, workbook = folders
    mine = notebook("my answer")
    (workbook / "00_first.ipynb").write_text(mine)
    update(folders)
    said = fresh("00", *folders)
    assert said == "00_first_fresh.ipynb in the workbook is a fresh copy; 00_first.ipynb keeps your edits"
    assert is_copy(workbook / "00_first_fresh.ipynb", notebooks / "00_first.ipynb")
    assert (workbook / "00_first.ipynb").read_text() == mine
    assert lay_out(*folders) == [], "the learner has the new edition and need not be told again"


@pytest.mark.parametrize("broken", ["", "{}", notebook("half a file")[:-20]])
def test_a_notebook_that_cannot_be_read_is_kept_aside(folders, broken):
    _, workbook = folders
    for _ in range(2):  # twice on one day must not overwrite the first
        (workbook / "00_first.ipynb").write_text(broken)
        (said,) = lay_out(*folders)
        assert "could not be read" in said
    kept = sorted(workbook.glob("00_first.broken-*"))
    assert [path.read_text() for path in kept] == [broken, broken]
    assert "00_first.ipynb" in (workbook / "00_first.ipynb").read_text()


@pytest.mark.parametrize("when", range(4))
def test_an_interruption_loses_nothing_and_the_next_start_finishes(folders, when, monkeypatch):
    """The copy is there or not, whole in any case, and an untouched one still counts as untouched."""
    notebooks, workbook = folders
    (workbook / "01_second.ipynb").write_text(notebook("my answer"))
    before = (notebooks / "00_first.ipynb").read_text()
    (notebooks / "00_first.ipynb").write_text(notebook("a new edition"))
    steps = iter(range(100))

    def interrupted(path, write, whole=module.replace):
        step = next(steps)  # half-way through writing a file, or just before it gets its name
        if step == when // 2:
            write(temporary := path.with_name(f".{path.name}.new"))
            if when % 2 == 0:
                temporary.write_text(temporary.read_text()[:30])
            raise KeyboardInterrupt
        whole(path, write)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "replace", interrupted)
        lay_out(*folders)
    assert json.loads((workbook / "00_first.ipynb").read_text())["cells"] == json.loads(before)["cells"]
    assert lay_out(*folders) == ["updated 00_first.ipynb, which you had not edited"]
    assert (workbook / "01_second.ipynb").read_text() == notebook("my answer")
    assert not any(path.suffix == ".new" for path in workbook.iterdir() if "00_first" in path.name)


@pytest.mark.parametrize("foreign", [None, "", '{"00_first.ipynb": 3, "x": [[]]}'])
def test_without_a_record_every_copy_is_kept(folders, foreign):
    _, workbook = folders
    (workbook / RECORD).unlink() if foreign is None else (workbook / RECORD).write_text(foreign)
    (said,) = update(folders)
    assert said.startswith("kept 00_first.ipynb with your edits")
    fresh("00", *folders)
    assert lay_out(*folders) == []


def test_where_the_workbook_cannot_be_written_it_says_what_to_do(folders, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "NOTEBOOKS", folders[0])
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "WORKBOOK", tmp_path / "file" / "workbook")
    with pytest.raises(SystemExit) as stopped:
        module.main([])
    said = str(stopped.value)
    assert "workbook cannot be written (Not a directory)" in said and "copy the series to a folder" in said
    assert "Errno" not in said
