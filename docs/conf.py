"""How Sphinx builds the site: `make docs`. Pages have the same paths as in the repository."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from tools import pages  # noqa: E402

from dpdist.core.version import __version__  # noqa: E402

project = "dpdist"
author = "the dpdist authors"
version = release = __version__

extensions = ["myst_parser", "tools.extension"]

# The sources begin at the root: README.md's links to docs/ then hold here and on GitHub.
root_doc = "docs/index"
exclude_patterns = [
    each.name
    for each in ROOT.iterdir()
    if each.name not in (*pages.TOP, *pages.BESIDE, "docs", "examples")
]
exclude_patterns += ["examples/runs", "docs/tools"]
# Pages lead to measurements where they matter.
suppress_warnings = ["toc.not_included"]
templates_path = ["tools/templates"]

myst_heading_anchors = 6
highlight_language = "none"  # of blocks that name none: output and shell sessions

smartquotes = False  # they would make a dash of an option's two

html_theme = "furo"
html_title = "dpdist"
html_static_path = ["tools/static"]
html_css_files = ["site.css"]
html_show_copyright = html_copy_source = html_show_sourcelink = False
html_additional_pages = {"index": "start.html"}  # site/index.html leads to docs/index.html
html_theme_options = {"top_of_page_buttons": []}
