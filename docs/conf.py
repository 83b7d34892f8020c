"""How Sphinx builds the documentation: Markdown pages, every warning an error (``tox -e docs``)."""

from __future__ import annotations

import housekeeping

project = "housekeeping"
author = "The housekeeping authors"
version = release = housekeeping.__version__
extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "alabaster"
