"""The copies of the notebooks for Colab, with a stand-in for it: they install the series there, and only there."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import nbformat
import pytest
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
    code = lambda notebook: [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert code(copy) == code(original)
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


# A session of Colab: some modules are loaded, pip and the kernel are stand-ins that say what they are asked.
SESSION = """
import json, os, sys, types
from IPython.core.interactiveshell import InteractiveShell
loaded, source = json.loads(sys.argv[1]), sys.argv[2]
for name, version in loaded.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__version__ = version
shell, asked = InteractiveShell.instance(), []
shell.register_magic_function(asked.append, magic_name="pip")
shell.kernel = types.SimpleNamespace(do_shutdown=lambda restart: asked.append("restart"))
shell.run_cell(source).raise_error()
print(json.dumps([asked, os.environ.get("JAX_PLATFORMS")]))
"""


def in_session(loaded):
    """What the first cell of a copy asks of pip and of the kernel, JAX_PLATFORMS, and what the cell prints."""
    copy = colab.for_colab(nbformat.read(PATHS[0], as_version=4), REPOSITORY, REVISION)
    source = next(cell.source for cell in copy.cells if cell.cell_type == "code")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", SESSION, json.dumps(loaded), source]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *said, result = run.stdout.splitlines()
    return *json.loads(result), "\n".join(said)


OLD = {"numpy": "2.0.2", "jax": "0.7.2"}
NEW = {name: version(name) for name in ("numpy", "jax", "jaxlib")}


@pytest.mark.parametrize("loaded, old", [(NEW, []), (NEW | OLD, ["jax", "numpy"])])
def test_in_colab_the_cell_installs_and_restarts_where_an_old_package_is_loaded(loaded, old):
    (packages, series, plugins, *more), platforms, said = in_session({"google.colab": ""} | loaded)
    assert packages.startswith("install ") and '"jax>=' in packages
    assert "ipython" not in packages and "jupyterlab" not in packages
    assert series == f'install --quiet --no-deps "git+{REPOSITORY}@{REVISION}"'
    assert plugins.startswith("uninstall --yes ") and "jax-cuda12-plugin" in plugins and platforms == "cpu"
    assert "interpret mode, on the CPU, whatever GPU" in said
    assert more == ["restart"] * bool(old)
    assert (f"({', '.join(old)}): the session restarts. Then run this cell again" in said) is bool(old)
