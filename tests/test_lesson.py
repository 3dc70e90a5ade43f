"""`make lesson` lays out what a lesson must hold: it is executed, shown and checked like the others."""

import os
import shutil
import subprocess
import sys

import pytest
from lessons import ROOT

from helpers.dev.lesson import lay_out

LEFT = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "workbook", "site", "*.egg-info")


@pytest.mark.full
def test_a_new_lesson_is_one_of_the_series(tmp_path):
    root = tmp_path / "series"
    shutil.copytree(ROOT, root, ignore=LEFT, symlinks=True)
    notebook = lay_out("linear_attention", root)
    with pytest.raises(ValueError, match="there is a lesson linear_attention already"):
        lay_out("linear_attention", root)

    def run(*command):
        here = os.environ | {"PYTHONPATH": str(root)}  # for the kernels
        done = subprocess.run(
            [sys.executable, *command], cwd=root, env=here, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

    number = notebook.stem[:2]
    run("-m", "helpers.notebooks", "execute", number)
    shutil.copy(root / "figures/roadmap-17.png", root / f"figures/roadmap-{number}.png")  # make figures draws it
    chosen = f"linear_attention or {int(number)}.1 or (Cell and not browser)"
    run("-m", "pytest", "-q", str(notebook), "tests/test_exercises.py", "tests/test_files.py", "-k", chosen)
