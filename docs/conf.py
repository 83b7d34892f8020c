"""How Sphinx builds the documentation: Markdown pages, every warning an error (``tox -e docs``)."""

from __future__ import annotations

import housekeeping

project = "housekeeping"
author = "The housekeeping authors"
version = release = housekeeping.__version__
extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
# Diagrams are drawn by whoever shows the Markdown (a forge does); here they stay text.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "alabaster"
