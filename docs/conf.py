"""How Sphinx builds the documentation: Markdown pages, every warning an error (``tox -e docs``)."""

from __future__ import annotations

import housekeeping

project = "housekeeping"
author = "The housekeeping authors"
version = release = housekeeping.__version__
html_title = f"housekeeping {release}"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
# A command in running text is copied: its quotes must stay what a shell takes.
smartquotes = False
# Diagrams are drawn by whoever shows the Markdown (a forge does); here they stay text.
suppress_warnings = ["misc.highlighting_failure"]
# It follows the reader's light or dark, and searches without a server.
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
