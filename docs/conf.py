"""The site of these pages: `make docs` builds it into build/site, and fails where a link leads nowhere.

Sphinx with MyST and Furo: what PyTorch's own projects are built with, and kept up; Material for MkDocs has ended.
"""

import shutil
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import onebit

project = "onebit"
author = "The onebit developers"
version = release = version_of("onebit")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "README"
html_theme = "furo"
html_title = f"onebit {version}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
myst_html_meta = {
    "description": "PyTorch optimizers for slow networks: 1 bit an element on the wire, error feedback, exact resume"
}
myst_heading_anchors = 3  # links within pages
default_role = "literal"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80

PAGES = {
    "Use": ["first_run", "usage", "options", "troubleshooting", "elastic", "run_time", "planning", "tuning"],
    "Judge": ["performance", "gpu", "comparison", "methods", "convergence", "programs", "reliability", "cluster_model"],
    "Build": ["api", "coming_from_deepspeed", "own_optimizer", "contributing"],
}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """The first page gets the list of all: a directive in README.md would stand there as it is on other sites."""
    if page == root_doc:
        for caption, pages in PAGES.items():
            source[0] += "\n".join(["\n\n```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```\n"])
    source[0] = source[0].replace("](../CONTRIBUTING.md", "](contributing.md")


def show_as_written(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Show an indented paragraph as code."""
    shown = [""]
    for line in lines:
        shown += ["::", ""] if line.startswith(" ") and not shown[-1] else []
        shown.append(line)
    lines[:] = shown


def finish(app: Sphinx, failed: Exception | None) -> None:
    """Every public name has its entry; servers look for a page that is called index."""
    there = {entry[0] for entry in app.env.get_domain("py").get_objects()}
    if failed is None and (lacks := [name for name in onebit.__all__ if f"onebit.{name}" not in there]):
        raise ExtensionError(f"api.md has no entry for {', '.join(lacks)}")
    if failed is None:
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.connect("build-finished", finish)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", show_as_written)
