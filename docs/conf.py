"""Sphinx settings: `make docs` writes the pages into docs/_build/html; a warning is an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from moco import __version__

project = "moco"
author = "the moco authors"
copyright = "the moco authors, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated", "docstrings"]
exclude_patterns = ["_build", "extensions", "pictures"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"moco {__version__}"
html_copy_source = False
# No page fetches anything from elsewhere but formulas, which MathJax draws.
html_static_path: list[str] = []
linkcheck_ignore = ["https?://.*"]  # what is elsewhere is not looked at
