"""The copies of the notebooks for Colab, with a stand-in for it: they install the series there, and only there."""

import re
import sys
import types

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from lessons import PATHS, ROOT

from helpers.site import colab

REPOSITORY, REVISION = "https://github.com/owner/name", "c0ffee"


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def pair(request):
    """A notebook, and its copy."""
    original, copy = (nbformat.read(request.param, as_version=4) for _ in range(2))
    return original, colab.for_colab(copy, REPOSITORY, REVISION)


def test_a_copy_is_the_notebook_with_a_cell_before_its_code(pair):
    original, copy = pair
    nbformat.validate(copy)
    first = next(place for place, cell in enumerate(copy.cells) if cell.cell_type == "code")
    installing = copy.cells.pop(first)
    assert installing.source.startswith("# Only in Colab")
    assert [cell.source for cell in copy.cells if cell.cell_type == "code"] == [
        cell.source for cell in original.cells if cell.cell_type == "code"
    ]
    assert [cell.id for cell in copy.cells] == [cell.id for cell in original.cells]


def test_a_copy_needs_nothing_beside_it(pair):
    """Its links and pictures have whole addresses, of files that there are."""
    text = "\n".join(cell.source for cell in pair[1].cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    places = [
        re.escape("https://raw.githubusercontent.com/owner/name/c0ffee/") + r"(figures/\S+\.png)",
        re.escape("https://colab.research.google.com/github/owner/name/blob/colab/") + r"(notebooks/\S+\.ipynb)",
        re.escape("https://github.com/owner/name/blob/c0ffee/") + r"(\S+)",
    ]
    own = [target.partition("#")[0] for target in targets if "owner/name" in target]
    assert own and all(target.startswith(("https://", "http://", "#")) for target in targets)
    for target in own:
        path = next(found[1] for place in places if (found := re.fullmatch(place, target)))
        assert (ROOT / path).is_file(), target


@pytest.mark.parametrize("in_colab", [True, False])
def test_the_cell_installs_in_colab_only(in_colab, monkeypatch):
    copy = colab.for_colab(nbformat.read(PATHS[0], as_version=4), REPOSITORY, REVISION)
    source = next(cell.source for cell in copy.cells if cell.cell_type == "code")
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    if in_colab:
        monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    shell, asked = InteractiveShell(), []
    shell.register_magic_function(asked.append, magic_name="pip")
    shell.run_cell(source).raise_error()
    if not in_colab:
        assert asked == []
        return
    packages, series = asked
    assert '"jax>=' in packages and "ipython" not in packages and "jupyterlab" not in packages
    assert series == f'install --quiet --no-deps "git+{REPOSITORY}@{REVISION}"'


@pytest.mark.parametrize("repository", ["", "https://example.org/owner/name"])
def test_without_an_address_on_github_there_are_no_copies(repository, tmp_path):
    with pytest.raises(SystemExit, match=r"^Colab opens repositories on https://github.com/ only, not .*\.$"):
        colab.main(["--repository", repository, "--folder", str(tmp_path)])


def test_buttons_of_the_site_lead_to_the_copies():
    there = 'href="https://colab.research.google.com/github/owner/name/blob/{}/notebooks/00_start_here.ipynb"'
    assert colab.buttons_to_copies(there.format("some/branch")) == there.format("colab")
