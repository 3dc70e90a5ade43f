"""A Sphinx extension: equations that need no script, pictures that open large, and honest buttons.

Equations become MathML, which browsers draw themselves; KaTeX converts them while the site is built, and one that it
does not understand is a warning.
"""

import html
from pathlib import Path
from xml.etree import ElementTree

import sphinxcontrib.katex
from docutils import nodes
from py_mini_racer import JSEvalException, mini_racer
from sphinx.util import logging

KATEX = Path(sphinxcontrib.katex.__file__).with_name("katex.min.js")
SCROLLS = "pst-scrollable-table-container"  # the theme lets a keyboard scroll what has this class and is too wide
MATHML = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", MATHML)
logger = logging.getLogger(__name__)


def convert(app, doctree, docname):
    """Give each equation of a page its MathML."""
    equations = [*doctree.findall(nodes.math), *doctree.findall(nodes.math_block)]
    if not equations:
        return
    with mini_racer() as javascript:  # once a page: its thread must not outlive it
        javascript.eval(KATEX.read_text(encoding="utf-8"))
        for equation in equations:
            options = {"displayMode": isinstance(equation, nodes.math_block), "output": "mathml", "strict": "error"}
            try:
                equation["mathml"] = mathml_in(javascript.call("katex.renderToString", equation.astext(), options))
            except JSEvalException as error:
                reason = str(error).strip().splitlines()[0]
                logger.warning("equation %r: %s", equation.astext(), reason, location=equation)
                equation["mathml"] = ""


def mathml_in(html):
    """The MathML in KaTeX's HTML, without the source of the equation."""
    math = ElementTree.fromstring(html)[0]
    math[:] = [math[0][0]]
    return ElementTree.tostring(math, encoding="unicode")


def visit_inline_math(translator, node):
    translator.body.append(node["mathml"])
    raise nodes.SkipNode


def visit_math_block(translator, node):
    translator.body.append(f'<div class="equation {SCROLLS}">{node["mathml"]}</div>\n')
    raise nodes.SkipNode


def visit_image(translator, node):
    """A picture is a link to itself, which the script of the pages opens as large as it was drawn."""
    start = len(translator.body)
    type(translator).visit_image(translator, node)
    translator.body.insert(start, f'<a class="picture" href="{html.escape(node["uri"])}">')
    translator.body.append("</a>")


def depart_image(translator, node):
    type(translator).depart_image(translator, node)


def only_notebooks_have_a_source(app, pagename, templatename, context, doctree):
    """No button to show or fetch the source of a page that was put together while the site was built."""
    if not pagename.startswith("notebooks/"):
        context["page_source_suffix"] = ""


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline_math, None), (visit_math_block, None))
    app.connect("doctree-resolved", convert)
    app.add_node(nodes.image, override=True, html=(visit_image, depart_image))
    app.connect("html-page-context", only_notebooks_have_a_source)
    return {"parallel_read_safe": True}
