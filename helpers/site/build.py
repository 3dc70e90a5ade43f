"""From the executed notebooks to a folder of pages that asks nothing of any other server: `make site`."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

from helpers.site import pages as computed
from helpers.site.colab import buttons_to_copies
from helpers.workbook import NOTEBOOKS, ROOT

SITE = ROOT / "site"
SOURCE = ROOT / "site_source"
CODE = re.compile(r"\]\(helpers/attention/public/\w+\.py\)")  # in the README; on the site the functions have a page
NOT_SAID = "The picture that the code above draws."


class BuildError(Exception):
    """Why there is no new site, in one line."""


def build(target=SITE, notebooks=NOTEBOOKS, repository="", revision="main"):
    """Build the site in target. Where Sphinx finds a fault, what stood there before still stands.

    repository: the public address of the series, for the buttons that lead there; without it there are none.
    revision: the branch, tag or commit that these buttons show.
    """
    repository = repository.rstrip("/")
    target = Path(target).resolve()
    if target.exists() and not (target / "searchindex.js").is_file():
        raise BuildError(f"{target} exists and is no site; move it away, or choose another target")
    paths = sorted(Path(notebooks).glob("*.ipynb"))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".site-") as scratch:
        stage, pages = Path(scratch, "stage"), Path(scratch, "pages")
        lay_out(stage, paths, repository, revision)
        _run_sphinx(stage, pages, REPOSITORY=repository, REVISION=revision)
        _mend_pages(pages)
        _add_font(pages)
        if target.exists():
            shutil.rmtree(target)
        pages.rename(target)


def lay_out(stage, paths, repository, revision):
    """Copy what Sphinx reads to one folder, in which links between notebooks and to pictures hold as they stand."""
    shutil.copytree(SOURCE, stage)
    shutil.copytree(ROOT / "figures", stage / "figures")
    (stage / "notebooks").mkdir()
    for path in paths:
        nbformat.write(with_alt_texts(nbformat.read(path, as_version=4)), stage / "notebooks" / path.name)
    for page in NOTEBOOKS.glob("*.md"):
        shutil.copy(page, stage / "notebooks")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (stage / "README.md").write_text(CODE.sub("](function.md)", readme), encoding="utf-8")
    computed.write(stage, repository, revision)


def with_alt_texts(notebook):
    """The notebook, with the size of each picture of an output, and what it shows, where Sphinx looks for them.

    Both stand in the metadata of the output. A size is there for pictures with more dots than they are wide.
    """
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                said = output.metadata.get("image/png", {})
                image = {"alt": " ".join(said.get("alt", NOT_SAID).split())}
                if "width" in said:
                    image["width"] = f"{said['width']}px"
                cell.metadata["mystnb"] = {"image": image}
    return notebook


def _run_sphinx(stage, pages, **known):
    environment = {**os.environ, **known, "JAX_PLATFORMS": "cpu"}
    options = "-q", "-W", "--keep-going", "-b", "html", "-d", stage.parent / "doctrees"
    command = [sys.executable, "-m", "sphinx", *options, stage, pages]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    said = [line.replace(f"{stage}/", "") for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        raise BuildError("Sphinx did not build the site: " + "\n".join(said or [f"exit status {done.returncode}"]))


def _mend_pages(pages):
    """What the theme offers no setting for: where Colab's buttons lead, and icons once.

    Icons are left to the theme's fonts: its script, which replaces each by a drawing, weighs more than a notebook.
    """
    script = re.compile(r'<script[^>]*src="[^"]*/fontawesome\.js[^"]*"[^>]*></script>')
    for page in pages.rglob("*.html"):
        page.write_text(buttons_to_copies(script.sub("", page.read_text(encoding="utf-8"))), encoding="utf-8")
    for unused in [*pages.glob("_static/scripts/fontawesome.js*"), *pages.glob("_static/**/*.map")]:
        unused.unlink(missing_ok=True)


def _add_font(pages):
    """Give browsers a font for equations that every machine has: the characters in use of STIX Two Math."""
    import ziamath
    from fontTools import subset

    used = set()
    for page in pages.rglob("*.html"):
        used.update(*re.findall(r"<math.*?</math>", page.read_text(encoding="utf-8"), re.DOTALL))
    # Browsers add the root themselves, and show a letter that stands alone by its italic twin.
    drawn = {ord("√"), ord("ℎ"), *range(ord("𝐴"), ord("𝑧") + 1), *range(ord("𝛢"), ord("𝜛") + 1)}
    options = subset.Options(flavor="woff", layout_features=["*"])
    font = subset.load_font(Path(ziamath.__file__).with_name("fonts") / "STIXTwoMath-Regular.ttf", options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=drawn | set(map(ord, used)))
    subsetter.subset(font)
    subset.save_font(font, pages / "_static" / "mathematics.woff", options)


def main():
    parser = argparse.ArgumentParser(prog="python -m helpers.site.build", description=__doc__.splitlines()[0])
    parser.add_argument("--repository", default="", help="public address of the series; without it no page leads there")
    parser.add_argument("--revision", default="", help="branch, tag or commit that the buttons show; default: main")
    options = parser.parse_args()
    began = time.perf_counter()
    try:
        build(repository=options.repository, revision=options.revision or "main")
    except BuildError as reason:
        sys.exit(f"No new site: {reason}.")
    print(f"{SITE}/index.html is ready, after {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
