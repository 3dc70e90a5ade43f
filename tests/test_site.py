"""The site: built whole or not at all, true to the code, and readable in a browser of any width."""

import contextlib
import functools
import http.server
import importlib.util
import re
import threading
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from chromium import CHROMIUM, started_chromium
from lessons import PATHS, ROOT

from helpers.attention import masking
from helpers.site import build as site_build
from helpers.site.build import build

REPOSITORY = "https://github.com/owner/name"
WIDTHS = {"phone": 360, "tablet": 768, "laptop": 1280, "desktop": 1440}
PAGE_BYTES = 3_000_000
CHEAT_SHEET = (ROOT / "site_source" / "cheat_sheet.md").read_text(encoding="utf-8")


# What needs no Sphinx


def test_every_link_of_the_readme_leads_to_a_page():
    readme = site_build.CODE.sub("](function.md)", (ROOT / "README.md").read_text(encoding="utf-8"))
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme)
    assert len(targets) > 15
    for target in targets:
        assert target.startswith(("notebooks/", "figures/")) or (site_build.SOURCE / target).is_file(), target


def test_the_tile_bounds_of_the_cheat_sheet_are_those_of_the_kernels():
    (code,) = re.findall(r"```python\n(.*?)```", CHEAT_SHEET, re.DOTALL)
    random = np.random.default_rng(0)
    for _ in range(400):
        T, S, block_q, block_k = (int(n) for n in random.integers(1, [50, 50, 20, 20]))
        left, right = (int(n) for n in random.integers(0, 40, 2))
        sheet = dict(T=T, S=S, block_q=block_q, block_k=block_k, left=left, right=right)
        exec(code, sheet)
        band = masking.Band(left, right)
        for i in range(-(-T // block_q)):
            expected = masking.key_tiles(i * block_q, (i + 1) * block_q, block_k, band, T, S)
            assert list(range(*sheet["key_tiles"](i))) == list(range(*expected))
        for j in range(-(-S // block_k)):
            expected = masking.query_tiles(j * block_k, (j + 1) * block_k, block_q, band, T, S)
            assert list(range(*sheet["query_tiles"](j))) == list(range(*expected))


# The site itself


INSTALLED = importlib.util.find_spec("myst_nb") is not None
# "full": a build of the whole site, to find what the tests above and of the notebooks rarely miss.
needs_site = [pytest.mark.full, pytest.mark.site, pytest.mark.skipif(not INSTALLED, reason="see make site-test")]
in_browser = [*needs_site, pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]


def marked(marks):
    return lambda test: functools.reduce(lambda test, mark: mark(test), marks, test)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, with the address of a repository so that all buttons are there."""
    target = tmp_path_factory.mktemp("built") / "site"
    build(target, repository=REPOSITORY, revision="main")
    return target


@functools.cache
def soup(path):
    from bs4 import BeautifulSoup

    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@functools.cache
def anchors(path):
    return {tag["id"] for tag in soup(path).find_all(id=True)}


def content_pages(site):
    return sorted(set(site.rglob("*.html")) - set(site.glob("_static/**/*.html")))


@marked(needs_site)
def test_every_link_anchor_and_picture_is_there(site):
    missing = []
    for page in content_pages(site):
        links = soup(page).find_all(href=True)
        for tag in (*links, *soup(page).find_all(src=True)):
            target = tag.get("href") or tag["src"]
            address = urlsplit(target)
            if address.scheme or address.netloc:
                assert tag.name == "a", f"{page.name} loads {target}"
                continue
            found = (page.parent / unquote(address.path)).resolve() if address.path else page
            anchor = unquote(address.fragment) if found.suffix == ".html" else ""
            if not found.is_file() or (anchor and anchor not in anchors(found)):
                missing.append((page.name, target))
    assert missing == []


@marked(needs_site)
def test_every_notebook_has_its_page(site):
    names = [path.stem for path in PATHS]
    for place, name in enumerate(names):
        page = soup(site / "notebooks" / f"{name}.html")
        assert page.select_one(".bd-sidebar-secondary nav, #pst-page-toc-nav"), f"{name}: no contents at the side"
        after = page.select_one("a.right-next")["href"]
        assert after == (f"{names[place + 1]}.html" if place + 1 < len(names) else "../cheat_sheet.html")
        before = page.select_one("a.left-prev")["href"]
        assert before == (f"{names[place - 1]}.html" if place else "../index.html")
        source = f"{REPOSITORY}/blob/main/notebooks/{name}.ipynb"
        buttons = [link["href"] for link in page.select(".article-header-buttons a")]
        assert any(link.startswith(source) for link in buttons), f"{name}: no link to its source"


# In a browser


@pytest.fixture(scope="module")
def server(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        log_message = lambda *_: None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    with started_chromium() as browser:
        yield browser


@contextlib.contextmanager
def opened(chromium, width, scheme="light"):
    """A page of a width, the complaints that it collects, and {address: status} of what it asked for."""
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints, sent = [], {}
    # What the page itself broke off, when it was left, is no fault.
    failed = lambda request: (
        request.failure != "net::ERR_ABORTED" and complaints.append(f"{request.failure}: {request.url}")
    )
    page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", failed)
    page.on("response", lambda response: sent.update({response.url: response.status}))
    try:
        yield page, complaints, sent
    finally:
        page.close()


def faults_of_opening(page, path, site, server, complaints, sent):
    page.goto(f"{server}/{path.relative_to(site)}", wait_until="load")
    images = "[...document.images].filter(i => { i.loading = 'eager'; return i.complete && !i.naturalWidth })"
    entries = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    weight = page.evaluate(f"{entries}.reduce((sum, entry) => sum + entry.decodedBodySize, 0)")
    yield from complaints
    yield from page.evaluate(f"{images}.map(image => image.src)")
    yield from (address for address in sent if not address.startswith((server, "data:")))
    yield from (f"{status}: {address}" for address, status in sent.items() if status >= 400)
    if weight > PAGE_BYTES:
        yield f"{weight} bytes"


def faults_of_width(page, parts):
    """What scrolls sideways: the page, or code and printed outputs, unfolded, that are moved to be read."""
    wide = page.evaluate(f"""[...document.querySelectorAll("{parts}")]
        .filter(part => part.scrollWidth > part.clientWidth).map(part => part.textContent.slice(0, 60))""")
    if wide:
        yield f"{len(wide)} of {parts} scroll sideways: {wide[0]!r}"


@marked(in_browser)
def test_every_page_opens_well_on_any_screen(site, server, chromium):
    found = []
    for path in content_pages(site):
        with opened(chromium, WIDTHS["phone"]) as (page, complaints, sent):
            faults = [*faults_of_opening(page, path, site, server, complaints, sent)]
            for name, width in WIDTHS.items():
                page.set_viewport_size({"width": width, "height": 900})
                faults += faults_of_width(page, "html, article pre" if name in ("laptop", "desktop") else "html")
            found += [f"{path.name}: {fault}" for fault in faults]
    assert found == []


@marked(in_browser)
@pytest.mark.parametrize(("width", "scheme"), [("phone", "light"), ("desktop", "dark")])
def test_no_page_breaks_a_rule_of_accessibility(width, scheme, server, chromium):
    """Of every kind one: level AA of the WCAG, contrast included, with everything unfolded."""
    from axe_playwright_python.sync_playwright import Axe

    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
    for name in ("index", "notebooks/00_start_here", "notebooks/notation", "results", "function", "cheat_sheet"):
        with opened(chromium, WIDTHS[width], scheme) as (page, *_):
            page.goto(f"{server}/{name}.html")
            page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
            page.wait_for_timeout(500)  # the theme lets a keyboard scroll what is too wide, a little later
            found = Axe().run(page, options={"runOnly": tags, "resultTypes": ["violations"]})
            assert found.violations_count == 0, f"{name}: {found.generate_report()}"
