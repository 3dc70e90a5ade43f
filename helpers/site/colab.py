"""The notebooks as Colab opens them: their first code installs the series, links and pictures lead to where they are.

Colab opens one file of a public repository on GitHub and sees nothing beside it. So the workflow that publishes the
site keeps copies in a branch of their own, `colab`, and there the site's Colab buttons lead.

    python -m helpers.site.colab --repository ADDRESS --revision COMMIT
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

import nbformat

from helpers.workbook import NOTEBOOKS, ROOT

FOLDER = ROOT / "colab"
BRANCH = "colab"
GITHUB = "https://github.com/"
OPENS = "https://colab.research.google.com/github/"
# Colab has its own of these, older ones, and its notebooks run on them.
OF_THE_HOST = ("ipython", "ipywidgets", "jupyterlab", "nbclient", "nbformat", "pyzmq")
TARGET = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(?=[)#])")
BUTTON = re.compile(re.escape(OPENS) + r"([\w.-]+/[\w.-]+)/blob/[^\"]*?(?=notebooks/)")
# JAX rejects the CUDA plugin of an older JAX, in twenty lines of red. Of its GPUs, Colab lends most often one for which
# JAX compiles no kernels, so the copies keep to the CPU. A restart is what helps where a package was loaded before it
# was replaced: NumPy is, at the start of a session.
PLUGINS = "jax-cuda12-plugin jax-cuda12-pjrt jax-cuda13-plugin jax-cuda13-pjrt"
CELL = """\
# Only in Colab: install the series, at the version of this page.
import sys

if "google.colab" in sys.modules:
    import os
    from importlib.metadata import version

    %pip install --quiet {packages}
    %pip install --quiet --no-deps "git+{repository}@{revision}"
    %pip uninstall --yes --quiet --quiet {plugins}
    os.environ["JAX_PLATFORMS"] = "cpu"
    print("Kernels run in interpret mode, on the CPU, whatever GPU this session has.")
    loaded = {{name: getattr(sys.modules.get(name), "__version__", None) for name in {names}}}
    old = [name for name in loaded if loaded[name] not in (None, version(name))]
    if old:
        print(f"Older versions were loaded ({{', '.join(old)}}): the session restarts. Then run this cell again.")
        get_ipython().kernel.do_shutdown(restart=True)
"""


def write_copies(repository, revision, folder=FOLDER, notebooks=NOTEBOOKS):
    """Write a copy of each notebook to folder. repository: an address on GitHub, else ValueError. Returns the paths."""
    (folder / "notebooks").mkdir(parents=True, exist_ok=True)
    for path in sorted(notebooks.glob("*.ipynb")):
        notebook = for_colab(nbformat.read(path, as_version=4), repository, revision)
        nbformat.write(notebook, folder / "notebooks" / path.name)
    return sorted((folder / "notebooks").glob("*.ipynb"))


def for_colab(notebook, repository, revision):
    """A notebook with the cell that installs the series, and with addresses that need nothing beside it."""
    if not repository.startswith(GITHUB):
        raise ValueError(f"Colab opens repositories on {GITHUB} only, not {repository or 'one without an address'}")
    repository = repository.rstrip("/")
    name = repository.removeprefix(GITHUB)

    def address(match):
        path = (NOTEBOOKS / match[1]).resolve().relative_to(ROOT).as_posix()
        if path.endswith(".ipynb"):
            return f"{OPENS}{name}/blob/{BRANCH}/{path}"
        if path.endswith(".png"):
            return f"https://raw.githubusercontent.com/{name}/{revision}/{path}"
        return f"{repository}/blob/{revision}/{path}"

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = TARGET.sub(address, cell.source)
    installed = " ".join(f'"{package}"' for package in packages())
    names = [re.match(r"[\w-]+", package)[0] for package in packages()]
    options = {"plugins": PLUGINS, "repository": repository, "revision": revision}
    source = CELL.format(packages=installed, names=names, **options).rstrip()
    first = next(place for place, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells.insert(first, nbformat.v4.new_code_cell(source, id="colab"))
    return notebook


def packages():
    """What the series needs and Colab may lack or have too old, as pyproject.toml asks for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [each for each in project["dependencies"] if re.match(r"[\w-]+", each)[0] not in OF_THE_HOST]


def buttons_to_copies(html):
    """A page of the site, with Colab's button leading to the copy."""
    return BUTTON.sub(rf"{OPENS}\1/blob/{BRANCH}/", html)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", required=True, help=f"public address of the series, {GITHUB}owner/name")
    parser.add_argument("--revision", default="main", help="the commit, tag or branch that the copies install")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    try:
        copies = write_copies(options.repository, options.revision, options.folder)
    except ValueError as reason:
        sys.exit(f"{reason}.")
    print(f"{options.folder.name}/notebooks holds {len(copies)} notebooks for Colab; put them into branch {BRANCH}.")


if __name__ == "__main__":
    main()
