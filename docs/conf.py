"""Settings of Sphinx for the site; `nox -s docs` builds it.

`reference.py` writes the pages under reference/, `readmes.py` the pages under readmes/.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import sphinx.application
from readmes import linked, write_readmes
from reference import write_reference

project = "stack"
author = "the authors of stack"
extensions = ["myst_nb"]  # MyST, and the outputs of the pages under notebooks/
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_build", "_static", "figures"]
html_theme = "furo"
html_title = "stack"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["keyboard.js"]
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
nitpicky = True
nb_execution_mode = "cache"  # runs a notebook again if its cells changed; `nox -s notebooks` always runs all
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 900
nb_merge_streams = True

DOCS = Path(__file__).resolve().parent
write_reference(DOCS / "reference")
write_readmes(DOCS / "readmes")


def _link_pages(app: object, page: str, source: list[str]) -> None:
    """Replaces links to files outside of docs/ by links to their pages, or by their paths."""
    source[0] = linked(source[0], DOCS / f"{page}.md", DOCS / f"{page}.md")


def _copy_notebooks(app: "sphinx.application.Sphinx", error: Exception | None) -> None:
    """Copies notebooks with outputs to their pages; the role `nb-download` needs them before they have run."""
    for notebook in (app.outdir.parent / "jupyter_execute" / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, app.outdir / "notebooks" / notebook.name)


def setup(app: "sphinx.application.Sphinx") -> None:
    """Connects the hooks."""
    app.connect("source-read", _link_pages)
    app.connect("build-finished", _copy_notebooks)
