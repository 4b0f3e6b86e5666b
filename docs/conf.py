"""Settings of Sphinx for the documentation site, which scripts/docs.sh builds.

The source folder is the repository, so that a link between pages holds on a code host and on the site. The navigation
follows docs/index.md: the pages that the tables below a heading link to are a group with the heading as its caption.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parent.parent
INDEX = "docs/index"
LOADED = re.compile(r"(?:\bsrc=|<link\b[^>]*\bhref=|@import\s+|\burl\()[\"']?(?:https?:)?//")
"""A file that a page loads from another host: a script, style, font or image."""

project = html_title = "titanlite"
root_doc = INDEX
include_patterns = ["*.md", "docs/*.md"]
exclude_patterns = [".*", "build", "outputs", "site"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
nitpicky = True
highlight_language = "none"  # a block without a language is output

html_theme = "furo"
html_additional_pages = {"index": "redirect.html"}  # the pages are in docs/
templates_path = ["templates"]
html_use_index = False
html_copy_source = False
html_show_copyright = False


def groups_of(index: str) -> dict[str, list[str]]:
    """Heading -> the pages that the tables below it link to, without .md and relative to the repository.

    A page that several rows name is in the group of the first one.
    """
    groups: dict[str, list[str]] = {}
    named: set[str] = set()
    heading = ""
    for line in index.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("|"):
            for target in re.findall(r"\]\(([\w./-]+)\.md[#)]", line):
                page = (REPOSITORY / INDEX).parent.joinpath(target).resolve().relative_to(REPOSITORY).as_posix()
                if page not in named:
                    named.add(page)
                    groups.setdefault(heading, []).append(page)
    return groups


def add_navigation(_: Sphinx, page: str, source: list[str]) -> None:
    """Append a table of contents for each group to the text of the index."""
    if page == INDEX:
        for heading, pages in groups_of(source[0]).items():
            entries = "".join(f"/{page}\n" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{entries}```\n"


def check_loaded_files(app: Sphinx, exception: Exception | None) -> None:
    """Warn of pages and styles that load a file from another host: the site must work offline."""
    for path in sorted(Path(app.outdir).rglob("*")):
        if not exception and path.suffix in (".html", ".css") and LOADED.search(path.read_text("utf-8")):
            logger.warning(
                "%s loads a file from another host: keep a copy of it in docs/", path.relative_to(app.outdir)
            )


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("build-finished", check_loaded_files)
