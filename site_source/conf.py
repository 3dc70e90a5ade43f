"""What Sphinx has to know. `make site` lays this file out beside copies of the notebooks and runs Sphinx on them."""

import os

project = "Flash attention in Pallas"
author = "the authors of the series"
html_title = project
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "helpers.site.extension"]
exclude_patterns = ["generated/*"]

nb_execution_mode = "off"
nb_number_source_lines = False
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# Docstrings are written for people who read code: names stand in single backticks.
default_role = "code"
autodoc_typehints = "none"
add_module_names = False

html_theme = "sphinx_book_theme"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's machine is set
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("pictures.js", {"defer": "defer"})]
html_sidebars = {"index": []}
html_favicon = "static/favicon.svg"
html_show_sourcelink = False
html_scaled_image_link = False  # every picture is a link already
copybutton_selector = "div.highlight:not(.output *) pre"

# The address of the public repository, for example https://github.com/owner/name. Without it no page has a button
# that would lead there.
repository = os.environ.get("REPOSITORY", "").rstrip("/")
html_theme_options = {
    "use_download_button": True,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "navbar_persistent": [],
}
if repository:
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": os.environ.get("REVISION") or "main",
        "use_repository_button": True,
        "use_source_button": True,
        "launch_buttons": {
            "notebook_interface": "jupyterlab",
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
        },
    }
