"""The site: built whole or not at all, true to the code, and readable in a browser of any width."""

import collections
import concurrent.futures
import contextlib
import functools
import http.server
import itertools
import re
import runpy
import threading
import types
from urllib.parse import unquote, urlsplit

import nbformat
import numpy as np
import pytest
from chromium import CHROMIUM, started_chromium
from lessons import PATHS, ROOT

from helpers import flash_attention, series
from helpers.attention import masking
from helpers.instruments import results
from helpers.site import build as site_build
from helpers.site import landing
from helpers.site import pages as site_pages
from helpers.site.build import BuildError, build

REPOSITORY = "https://github.com/owner/name"
ADDRESS = "https://owner.github.io/name/"
WIDTHS = {"phone": 360, "tablet": 768, "laptop": 1280, "desktop": 1440}
SCHEMES = {"phone": "light", "desktop": "dark"}  # where pages are opened and axe looks, and at which colours
BROWSERS = 2  # at once, each with half of the pages
PAGE_BYTES, READABLE_MS = 3_000_000, 2_000
CHEAT_SHEET = (ROOT / "site_source" / "cheat_sheet.md").read_text(encoding="utf-8")


# What needs no Sphinx


def notebook_of(**cell):
    cells = [nbformat.v4.new_markdown_cell("# A title"), nbformat.v4.new_code_cell("1 / x", **cell)]
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells))


ERROR = nbformat.v4.new_output("error", ename="ZeroDivisionError", traceback=[])
FAULTS = {
    "an error": (notebook_of(execution_count=1, outputs=[ERROR]), r", cell \w+, ended in ZeroDivisionError"),
    "never executed": (notebook_of(execution_count=None), r", cell \w+, has not been executed"),
    "damaged": ('{"cells": [', r" cannot be read as a notebook: \w+"),
}


@pytest.fixture(autouse=True)
def no_extra(request, monkeypatch):
    """What needs no Sphinx is tried without."""
    if not request.node.get_closest_marker("site"):
        monkeypatch.setattr(site_build, "EXTRA", ())


@pytest.fixture
def old_site(tmp_path):
    """A site that stands, and must go on standing."""
    target = tmp_path / "out" / "site"
    target.mkdir(parents=True)
    (target / "index.html").write_text("what was there before")
    (target / "searchindex.js").touch()
    yield target
    assert (target / "index.html").read_text() == "what was there before"
    assert [path.name for path in target.parent.iterdir()] == ["site"], "something is left over"


@pytest.mark.parametrize(("text", "said"), FAULTS.values(), ids=FAULTS)
def test_a_notebook_that_cannot_be_shown_is_named(text, said, tmp_path, old_site):
    (tmp_path / "00_test.ipynb").write_text(text)
    with pytest.raises(BuildError, match=f"^00_test.ipynb{said}") as raised:
        build(old_site, notebooks=tmp_path)
    assert "\n" not in str(raised.value)


def test_every_link_of_the_readme_leads_to_a_page():
    readme = site_build.CODE.sub("](function.md)", (ROOT / "README.md").read_text(encoding="utf-8"))
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme)
    assert len(targets) > 15
    for target in targets:
        assert target.startswith(("notebooks/", "figures/")) or (site_build.SOURCE / target).is_file(), target


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.part"])
def test_a_missing_sphinx_is_one_line(name, old_site, monkeypatch):
    monkeypatch.setattr(site_build, "EXTRA", ("nbformat", name))
    with pytest.raises(BuildError, match=f"^{name} is not installed here; `make site` sets up what the site needs$"):
        build(old_site)


def test_half_a_build_does_not_replace_a_good_one(old_site, monkeypatch):
    def half(stage, pages, **_):
        pages.mkdir()
        (pages / "index.html").write_text("half")
        raise BuildError("Sphinx stopped")

    monkeypatch.setattr(site_build, "lay_out", lambda *_: None)
    monkeypatch.setattr(site_build, "_run_sphinx", half)
    with pytest.raises(BuildError, match="Sphinx stopped"):
        build(old_site)


def test_a_folder_that_is_no_site_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(BuildError, match="exists and is no site"):
        build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_old_site_comes_back_where_the_new_cannot_take_its_place(old_site):
    with pytest.raises(FileNotFoundError):
        site_build._replace(old_site, old_site.parent / "no pages", old_site.parent / "before")


def test_buttons_lead_to_the_repository_where_it_is_known(monkeypatch):
    monkeypatch.delenv("REPOSITORY", raising=False)
    conf = runpy.run_path(str(ROOT / "site_source" / "conf.py"))
    options = conf["html_theme_options"]
    assert conf["nb_execution_mode"] == "off"
    assert not options.keys() & {"repository_url", "launch_buttons", "use_repository_button", "use_source_button"}
    monkeypatch.setenv("REPOSITORY", REPOSITORY + "/")
    monkeypatch.setenv("REVISION", "v1")
    options = runpy.run_path(str(ROOT / "site_source" / "conf.py"))["html_theme_options"]
    assert (options["repository_url"], options["repository_branch"]) == (REPOSITORY, "v1")


def test_a_picture_says_what_its_output_says():
    def image(**metadata):
        output = nbformat.v4.new_output("display_data", {"image/png": ""}, metadata=metadata)
        cell = nbformat.v4.new_code_cell(outputs=[output])
        return site_build.with_alt_texts(nbformat.v4.new_notebook(cells=[cell])).cells[0].metadata.mystnb.image

    said = {"image/png": {"alt": "A line\nthat falls.", "width": 300, "height": 200}}
    assert image(**said) == {"alt": "A line that falls.", "width": "300px"}
    assert image() == {"alt": site_build.NOT_SAID}


@pytest.mark.parametrize("name, request_", site_pages.REQUESTS)
def test_the_table_of_implementations_holds(name, request_):
    """What it says of the reference is tried; of the others, that they are asked as `flash_attention` asks them."""
    options = {key: value for key, value in request_.items() if key not in ("dtype", "S", "K", "H", "lengths")}
    random = np.random.default_rng(0)
    shape = {"K": 2, "S": 16, "H": 64} | request_
    query = random.standard_normal((1, 16, 2, shape["H"]), dtype=np.float32)
    key = random.standard_normal((1, shape["S"], shape["K"], shape["H"]), dtype=np.float32)
    if "lengths" in request_:
        options |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), np.full(1, 16, np.int32))
    assert site_pages.why_not("reference", **request_) is None
    flash_attention(query, key, key, implementation="reference", **options)
    row = next(line for line in site_pages.serves_table().splitlines() if line.startswith(f"| {name} |"))
    assert row.split(" | ")[1:3] == ["✓", "✓"], "reference and portable serve every call"
    served = site_pages.why_not("hopper", **request_) is None
    assert served == (request_.get("dtype") != "float32" and not {"lengths", "local_window_size"} & request_.keys())


def test_the_results_begin_with_what_the_record_says():
    recorded = results.read()
    rates = {"hopper": 600.0, "cudnn": 400.0, "flash_attention_3": 800.0, "portable": 300.0}
    changed = [record | {"tflops": rates.get(record["implementation"], 1.0)} for record in recorded["records"]]
    said = site_pages.conclusion(recorded | {"records": changed})
    assert "faster than cuDNN in 24 of 24 cases: they are 1.50 to 1.50 times as fast forward" in said
    assert "faster than FlashAttention-3 in 0 of 24 cases: they are 0.75 to 0.75" in said
    assert "reach 50 to 50 per cent" in said
    assert 2 <= site_pages.conclusion(recorded).count(". ") + 1 <= 3


def test_what_was_not_measured_is_told_once_and_without_an_error_message():
    lines = site_pages.not_measured(results.read()["notes"]).splitlines()
    assert any("(forward at T = " in line for line in lines)
    for line in lines:
        assert "Error" not in line and "stopped" not in line and len(line) < 150
    notes = ["float16 B4 T16 causal: one: backward: ValueError: [3] is bad: no", "a B8: two: X", "b B8: two: X"]
    assert site_pages.not_measured(notes) == "- `one` and `two` stopped with an error."


def test_the_first_page_leads_to_other_sites_only_from_a_repository():
    assert re.findall(r"\[(.*?)\]", landing.buttons("", "main")) == ["Start reading", "Install"]
    assert "git clone" not in landing.commands("")
    linked = landing.buttons(REPOSITORY, "v1")
    assert "https://mybinder.org/v2/gh/owner/name/v1?" in linked
    assert "https://colab.research.google.com/github/owner/name/blob/colab/notebooks/00_start_here.ipynb" in linked
    assert f"git clone {REPOSITORY}\ncd name\n" in landing.commands(REPOSITORY)


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


def test_the_cheat_sheet_has_the_costs_of_notebook_03():
    derived = PATHS[3].read_text(encoding="utf-8").replace("\\\\", "\\")
    moved = re.findall(r"^\| bytes moved, [\w-]+ \| \$(.*)\$ \|$", CHEAT_SHEET, re.MULTILINE)
    assert len(moved) == 2 and [formula for formula in moved if formula not in derived] == []


# The site itself


MISSING = [name for name in site_build.EXTRA if not site_build._is_installed(name)]


def needs_site(test):
    """A build of the whole site, to find what the tests above and of the notebooks rarely miss."""
    skipped = pytest.mark.skipif(bool(MISSING), reason="the extra `site` is not installed: make site-test")
    return pytest.mark.full(pytest.mark.site(skipped(test)))


def in_browser(test):
    return needs_site(
        pytest.mark.browser(pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")(test))
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, with an address so that all buttons are there."""
    target = tmp_path_factory.mktemp("built") / "site"
    build(target, repository=REPOSITORY, revision="main", address=ADDRESS)
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


@needs_site
def test_every_link_anchor_and_picture_is_there(site):
    missing = []
    for page in content_pages(site):
        for tag, attribute in itertools.chain(
            ((tag, "href") for tag in soup(page).find_all(href=True) if "canonical" not in tag.get("rel", ())),
            ((tag, "src") for tag in soup(page).find_all(src=True)),
        ):
            address = urlsplit(tag[attribute])
            if address.scheme or address.netloc:
                assert tag.name == "a", f"{page.name} loads {tag[attribute]}"
                continue
            found = (page.parent / unquote(address.path)).resolve() if address.path else page
            anchor = unquote(address.fragment)
            if not found.is_file():
                missing.append((page.name, tag[attribute]))
            elif anchor and found.suffix == ".html" and anchor not in anchors(found):
                missing.append((page.name, tag[attribute]))
    assert missing == []


@needs_site
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
        for start in (
            "https://colab.research.google.com/github/owner/name/blob/colab/",
            "https://mybinder.org/v2/gh/owner/name/main",
        ):
            assert any(link.startswith(start) and f"{name}.ipynb" in link for link in buttons), f"{name}: no {start}"
        folded = page.find_all("details", class_=False)
        written = sum(cell.source.count("<details>") for cell in nbformat.read(PATHS[place], as_version=4).cells)
        assert len(folded) >= written and all(part.find("summary") for part in folded)
        for solution in (part for part in folded if part.find("summary").text == "Solution"):
            assert solution.select_one("div.highlight-python pre span"), f"{name}: a solution without colours"


@needs_site
def test_every_picture_says_what_it_shows(site):
    for page in content_pages(site):
        for image in soup(page).select("article img"):
            alt = image.get("alt", "")
            assert len(alt) > 15 and "_images/" not in alt, f"{page.name}: {image['src']}"


@needs_site
def test_a_link_to_a_page_shows_what_it_is(site):
    for page in content_pages(site):
        said = {
            tag.get("property") or tag.get("name"): tag["content"] for tag in soup(page).find_all("meta", content=True)
        }
        assert len(said["og:title"]) > 4 and len(said["description"]) > 30, page.name
        assert said["og:description"] == said["description"]
        assert said["og:url"] == f"{ADDRESS}{page.relative_to(site)}"
        assert (site / said["og:image"].removeprefix(ADDRESS)).is_file()


@needs_site
def test_a_link_shows_no_picture_where_the_address_is_unknown():
    from helpers.site import extension

    app = types.SimpleNamespace(
        env=types.SimpleNamespace(titles={}),
        config=types.SimpleNamespace(project="A project", description="What it <is>.", html_baseurl=""),
    )
    context = {}
    extension.describe_links(app, "search", "search.html", context, None)
    assert 'name="description" content="What it &lt;is&gt;."' in context["metatags"]
    assert "og:image" not in context["metatags"] and "og:url" not in context["metatags"]


@needs_site
def test_every_equation_is_drawn(site):
    """None is left as source, and none drew an error."""
    for page in content_pages(site):
        text = soup(page).get_text()
        assert not soup(page).select("merror, .math.notranslate"), page.name
        for equation in soup(page).find_all("math"):
            assert "\\" not in equation.get_text(), f"{page.name}: {equation}"
        assert "$$" not in text, page.name


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
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "requestfailed",
        # What the page itself broke off, when it was left, is no fault.
        lambda request: request.failure == "net::ERR_ABORTED" or complaints.append(f"{request.failure}: {request.url}"),
    )
    page.on("response", lambda response: sent.update({response.url: response.status}))
    try:
        yield page, complaints, sent
    finally:
        page.close()


# axe takes nearly all of its time for contrast, which it computes word by word: thousands on a page of code, in a few
# looks. So contrast is asked of one text of each look, and the other rules of a page without the words that are alike.
AXE = """async tags => {
    const ground = part => {
        const {backgroundColor, backgroundImage, opacity} = getComputedStyle(part)
        const own = [backgroundColor, backgroundImage, opacity].join()
        const isSeenThrough = own === "rgba(0, 0, 0, 0),none,1" && part.parentElement
        return isSeenThrough ? ground(part.parentElement) : own
    }
    const looks = new Map()
    const alike = []
    for (const part of document.body.querySelectorAll("*")) {
        const hasText = [...part.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim())
        if (!hasText || !part.checkVisibility()) continue
        const {color, fontSize, fontWeight, position} = getComputedStyle(part)
        const look = [color, fontSize, fontWeight, position, ground(part)].join()
        if (!looks.has(look)) looks.set(look, part)
        else if (part.matches("pre span")) alike.push(part)
    }
    alike.forEach(word => word.replaceWith(...word.childNodes))
    const contrast = {"runOnly": {"type": "rule", "values": ["color-contrast"]}, "resultTypes": ["violations"]}
    const others = {"runOnly": tags, "rules": {"color-contrast": {"enabled": false}}, "resultTypes": ["violations"]}
    const found = [await axe.run(document, others), await axe.run({"include": [...looks.values()]}, contrast)]
    return found.flatMap(({violations}) => violations).map(({id, nodes}) => [id, nodes.length, nodes[0].html])
}"""


def faults_of_opening(page, path, site, server, complaints, sent):
    for _ in range(3):  # the machine may be busy with something else
        page.goto(f"{server}/{path.relative_to(site)}", wait_until="load")
        readable = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
        if readable < READABLE_MS:
            break
    images = "[...document.images].filter(i => { i.loading = 'eager'; return i.complete && !i.naturalWidth })"
    broken = page.evaluate(f"{images}.map(image => image.src)")
    entries = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    weight = page.evaluate(f"{entries}.reduce((sum, entry) => sum + entry.decodedBodySize, 0)")
    yield from complaints
    yield from broken
    yield from (address for address in sent if not address.startswith((server, "data:")))
    yield from (f"{status}: {address}" for address, status in sent.items() if status >= 400)
    yield from faults_of_width(page)
    if readable >= READABLE_MS:
        yield f"readable after {readable:.0f} ms"
    if weight > PAGE_BYTES:
        yield f"{weight} bytes"


def faults_of_width(page):
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if wide > 0:
        yield f"scrolls sideways by {wide} px"


def faults_of_code(page):
    """Code and printed outputs, unfolded, that would have to be moved to be read."""
    wide = page.evaluate("""() => [...document.querySelectorAll("article pre")]
        .filter(part => part.scrollWidth > part.clientWidth).map(part => part.textContent.slice(0, 60))""")
    if wide:
        yield f"{len(wide)} pieces of code scroll sideways: {wide[0]!r}"


def faults_of_access(page):
    """Level AA of the WCAG, contrast included, with everything unfolded."""
    from axe_playwright_python.base import AXE_SCRIPT

    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    page.wait_for_timeout(500)  # the theme lets a keyboard scroll what is too wide, a little later
    page.evaluate(AXE_SCRIPT)
    for rule, times, example in page.evaluate(AXE, ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]):
        yield f"{rule}, {times} times: {example[:160]}"


@pytest.fixture(scope="module")
def faults(site, server):
    """What is wrong with the pages: {(what was looked at, width): lines}.

    A tablet's page is the phone's, made wider, and a laptop's the desktop's, made narrower.
    """

    def visit(paths):
        with started_chromium() as chromium:
            for path, (width, scheme) in itertools.product(paths, SCHEMES.items()):
                with opened(chromium, WIDTHS[width], scheme) as (page, complaints, sent):
                    for fault in faults_of_opening(page, path, site, server, complaints, sent):
                        yield ("opening", width), f"{path.name}: {fault}"
                    for fault in faults_of_access(page):
                        yield ("access", width), f"{path.name}: {fault}"
                    if width == "phone":
                        page.set_viewport_size({"width": WIDTHS["tablet"], "height": 1024})
                        for fault in faults_of_width(page):
                            yield ("opening", "tablet"), f"{path.name}: {fault}"
                    if width == "desktop":
                        page.set_viewport_size({"width": WIDTHS["laptop"], "height": 800})
                        for fault in itertools.chain(faults_of_width(page), faults_of_code(page)):
                            yield ("opening", "laptop"), f"{path.name}: {fault}"

    found = collections.defaultdict(list)
    by_size = sorted(content_pages(site), key=lambda path: path.stat().st_size)
    shares = [by_size[first::BROWSERS] for first in range(BROWSERS)]
    with concurrent.futures.ThreadPoolExecutor(BROWSERS) as pool:
        for what, fault in itertools.chain(*pool.map(lambda share: list(visit(share)), shares)):
            found[what].append(fault)
    return found


@in_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_well(width, faults):
    assert faults["opening", width] == []


@in_browser
@pytest.mark.parametrize("width", SCHEMES)
def test_no_page_breaks_a_rule_of_accessibility(width, faults):
    assert faults["access", width] == []


@in_browser
def test_a_text_that_is_hard_to_read_is_noticed(server, chromium):
    with opened(chromium, WIDTHS["desktop"]) as (page, *_):
        page.goto(f"{server}/notebooks/00_start_here.html")
        page.add_style_tag(content=".highlight .k { color: #bbb !important }")
        assert any(fault.startswith("color-contrast") for fault in faults_of_access(page))


@in_browser
def test_a_reader_searches_unfolds_and_copies(server, chromium):
    for words, taught in {"softmax": ("02",), "logsumexp": ("02",), "causal+softmax": ("03", "05")}.items():
        with opened(chromium, WIDTHS["desktop"]) as (page, *_):
            page.goto(f"{server}/search.html?q={words}")
            for number in taught:
                page.locator("#search-results li a", has_text=f"{number} ·").first.wait_for(timeout=20_000)
            icon, field = (page.locator(f"main form.bd-search {part}").bounding_box() for part in ("i", "input"))
            assert icon["x"] + icon["width"] <= field["x"], "the icon covers what is typed"
    with opened(chromium, WIDTHS["desktop"]) as (page, complaints, _):
        page.goto(f"{server}/notebooks/00_start_here.html")
        solution = page.locator("details", has=page.locator("summary", has_text="Solution")).first
        assert not solution.locator("pre").is_visible()
        solution.locator("summary").click()
        assert solution.locator("pre").is_visible() and solution.locator("button.copybtn").count() == 1
        assert page.locator("div.cell_output button.copybtn").count() == 0, "an output is nothing to copy"
        assert complaints == []


@in_browser
def test_the_first_page_shows_the_result_and_the_ways_in_on_one_screen(server, chromium):
    with opened(chromium, WIDTHS["laptop"]) as (page, *_):
        page.set_viewport_size({"width": WIDTHS["laptop"], "height": 800})
        page.goto(f"{server}/index.html")
        for part in ("h1", ".said", ".buttons a >> nth=-1", ".shown img", ".shown p >> nth=-1"):
            box = page.locator(f"article {part}").bounding_box()
            assert box["y"] + box["height"] <= 800, part
        assert page.locator(".buttons a").all_inner_texts() == [
            "Start reading",
            "Run in Colab",
            "Run in Binder",
            "Install",
        ]
        assert page.locator(".path").count() == len(series.PATHS) == 3
        assert page.locator(".lessons a[href*='notebooks/0'], .lessons a[href*='notebooks/1']").count() == len(PATHS)
        page.locator(".search-button").click()
        assert page.locator("#pst-search-dialog input").is_visible()


@in_browser
def test_a_picture_fits_a_phone_and_opens_large(server, chromium):
    with opened(chromium, WIDTHS["phone"]) as (page, complaints, _):
        page.goto(f"{server}/notebooks/03_tiled_attention.html")
        picture = page.locator("a.picture").first
        box = picture.locator("img").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= WIDTHS["phone"]
        page.evaluate("[...document.images].forEach(image => image.loading = 'eager')")
        page.wait_for_function("[...document.images].every(image => image.complete)")
        stretched = "image => image.width * image.naturalHeight / (image.height * image.naturalWidth)"
        of_all = f"[...document.querySelectorAll('a.picture img')].map({stretched})"
        assert page.evaluate(of_all) == pytest.approx([1] * page.locator("a.picture").count(), abs=0.03)
        assert "enlarge" in picture.evaluate("link => getComputedStyle(link, '::after').content")
        large = page.locator("dialog.enlarged")
        picture.click()
        assert large.locator("img").bounding_box()["width"] == 1000, "as wide as it was drawn"
        assert large.locator("div").evaluate("view => view.scrollLeft") > 0, "it shows what was tapped"
        assert len(large.locator("img").get_attribute("alt")) > 15
        large.locator("button").click()
        assert not large.is_visible() and complaints == []


@in_browser
def test_the_cheat_sheet_is_one_printed_page(server, chromium, tmp_path):
    with opened(chromium, WIDTHS["desktop"]) as (page, *_):
        page.goto(f"{server}/cheat_sheet.html")
        document = page.pdf(path=tmp_path / "sheet.pdf", prefer_css_page_size=True)
        assert re.findall(rb"/Count (\d+)", document) == [b"1"]
        page.emulate_media(media="print")
        page.set_viewport_size({"width": 726, "height": 1050})  # A4 within its margins
        clipped = "[...document.querySelectorAll('#cheat-sheet :is(pre, .equation, table)')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert page.evaluate(clipped) == 0, "something is cut off on paper"
