"""A Sphinx extension: equations become MathML, which browsers draw themselves, without any script.

KaTeX converts them while the site is built. An equation that it does not understand is a warning.
"""

from pathlib import Path

import sphinxcontrib.katex
from docutils import nodes
from py_mini_racer import JSEvalException, mini_racer
from sphinx.util import logging

KATEX = Path(sphinxcontrib.katex.__file__).with_name("katex.min.js")
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
                equation["mathml"] = javascript.call("katex.renderToString", equation.astext(), options)
            except JSEvalException as error:
                reason = str(error).strip().splitlines()[0]
                logger.warning("equation %r: %s", equation.astext(), reason, location=equation)
                equation["mathml"] = ""


def visit_inline(translator, node):
    translator.body.append(node["mathml"])
    raise nodes.SkipNode


def visit_block(translator, node):
    translator.body.append(f'<div class="equation">{node["mathml"]}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.connect("doctree-resolved", convert)
    return {"parallel_read_safe": True}
