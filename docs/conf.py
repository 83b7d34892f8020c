"""Configuration of Sphinx (``tox -e docs``)."""

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
# Readers copy commands from the text, so quotes must stay plain.
smartquotes = False
# Forges draw mermaid diagrams. On this site they stay text.
suppress_warnings = ["misc.highlighting_failure"]
# Furo has a dark mode and search without a server.
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
