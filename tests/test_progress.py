"""What a learner did is recorded in a workbook only, and no record, however broken, stops a check."""

import os
import re

import lessons
import numpy as np
import pytest

from helpers import series
from helpers.exercises import check, record
from helpers.exercises.exercise import exercise
from helpers.progress import progress
from helpers.workbook import lay_out


def right(q, k, v):
    w = np.exp(k @ q / np.sqrt(len(q)))
    return w @ v / w.sum()


def wrong(q, k, v):
    return q


def stub(q, k, v):
    raise NotImplementedError


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    """An empty workbook, and this process in it, as a kernel is."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_first.ipynb").write_text('{"cells": []}')
    lay_out(tmp_path / "notebooks", tmp_path / "workbook")
    monkeypatch.chdir(tmp_path / "workbook")
    return tmp_path / "workbook"


def lines():
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d  ", "", line) for line in open(record.FILE).read().splitlines()]


def test_what_was_tried_and_solved_is_recorded_once(workbook, capsys):
    check("0.1", stub)
    assert not (workbook / record.FILE).exists()
    for answer in (wrong, wrong, right, right, wrong):
        check("0.1", answer)
    name = exercise("0.1").solution.__name__
    assert lines() == [f"0.1  {name}  tried", f"0.1  {name}  solved"]
    assert record.done() == {"0.1": "solved"}


def test_a_record_outlives_a_change_of_numbers(workbook, capsys):
    old = "5.1  solved", "5.2  solved", "2.5  tried", "7.1  key_tile  solved", "9.9  update  solved", "2.1  tried"
    (workbook / record.FILE).write_text("".join(f"2026-11-22 14:03  {line}\n" for line in old))
    assert record.done() == {"5.3": "solved", "2.4": "tried", "2.1": "solved"}
    check("5.3", exercise("5.1").solution)
    assert "Exercise 5.1:" in capsys.readouterr().out


def test_outside_a_workbook_nothing_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check("0.1", right)
    assert list(tmp_path.iterdir()) == [] and record.done() == {}
    assert not (lessons.ROOT / "notebooks" / record.FILE).exists()


BROKEN = {
    "foreign": b'{"a": [1]}\n2.1 solved\n2026-11-22 14:03  99.99  solved\n2026-11-22 14:03  0.1  eaten\n',
    "long": b"x" * 3_000_000,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_record_stops_no_check_and_is_added_to(workbook, content, capsys):
    (workbook / record.FILE).write_bytes(content)
    check("0.1", right)
    assert "✓ Exercise 0.1: " in capsys.readouterr().out  # after a bar, where the machine is busy
    assert (workbook / record.FILE).read_bytes().startswith(content)
    if len(content) < record.LONGEST:
        assert record.done()["0.1"] == "solved"
    progress()


@pytest.mark.parametrize("make", [os.mkdir, lambda path: path.symlink_to("/dev/full")])
def test_a_record_that_cannot_be_written_stops_no_check(workbook, make, capsys):
    make(workbook / record.FILE)
    check("0.1", right)
    check("0.1", wrong)
    progress()
    printed = capsys.readouterr()
    assert printed.out.startswith("✓ Exercise 0.1: ") and "✗ Exercise 0.1: " in printed.out and not printed.err


def said(capsys, **done):
    """What progress says after these exercises, e2_1="tried" for example, in this order."""
    with open(record.FILE, "w") as file:
        for name, state in done.items():
            number = name[1:].replace("_", ".")
            file.write(f"2026-11-22 14:03  {number}  {exercise(number).solution.__name__}  {state}\n")
    progress()
    return capsys.readouterr().out


def next_on(path, said):
    """The exercise that comes next on a path, by what progress said."""
    return re.search(rf"^{path}: .*solved, (?:next (\S+) · |all of them)", said, re.MULTILINE)[1]


def test_progress_says_what_comes_next_on_each_path(workbook, capsys):
    total = len(lessons.ALL)
    assert said(capsys).splitlines()[0] == "two hours:    0 of  3 exercises solved, next 0.1 · Attention for one query"
    solved = said(capsys, e0_1="solved")
    assert [next_on(path["name"], solved) for path in series.PATHS] == ["2.1", "1.1", "1.1"]
    elsewhere = said(capsys, e0_1="solved", e2_1="tried", e5_2="tried")
    assert next_on("the course", elsewhere) == "5.2", "where you are, not where you skipped"
    assert next_on("two hours", elsewhere) == "2.1"
    assert next_on("everything", said(capsys, e10_6="solved")) == "10.1", "as the notebook has them"
    last = lessons.ALL[-1].number.replace(".", "_")
    skipped = said(capsys, e0_1="solved", **{f"e{last}": "solved"})
    assert next_on("everything", skipped) == "1.1", "what was skipped comes at the end"
    everything = {f"e{lesson.number.replace('.', '_')}": "solved" for lesson in lessons.ALL}
    assert f"everything:  {total} of {total} exercises solved, all of them\n" in said(capsys, **everything)
