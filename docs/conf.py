"""Sphinx: `make docs` builds the site into build/docs/html."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from typing import Any

import flashkit

project, author = "flashkit", "the flashkit authors"
project_copyright = "the flashkit authors, Apache-2.0"
version = release = flashkit.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
templates_path = ["_templates"]
exclude_patterns = ["examples", "gallery/**/*.py", "gallery/**/*.md5"]
nitpicky = False

# --- Markdown ---------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# --- the API from its docstrings --------------------------------------------------------------------------------------

autosummary_generate = True
autodoc_member_order = "bysource"
# Of modules for other libraries; their functions are not run here. Not of JAX: flashkit registers a primitive with it.
autodoc_mock_imports = ["dask", "torch", "transformers", "mpi4py"]
autodoc_typehints = "none"  # add_types gives them to numpydoc's sections; in a signature they would take a screen
numpydoc_show_class_members = False
numpydoc_show_inherited_class_members = False

# --- the gallery ------------------------------------------------------------------------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": "plot_",
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
    "copyfile_regex": "",
}

# --- HTML -------------------------------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = f"flashkit {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "flashkit"},
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
html_sidebars = {"index": [], "getting-started": [], "howto": [], "coming-from": []}


def escape_bars(_app: object, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Docstrings write absolute values as |q - k|, which reStructuredText takes for a substitution."""
    lines[:] = [re.sub(r"\|([^|`]+ [^|`]+)\|", r"\\|\1\\|", line) for line in lines]


def add_types(_app: object, what: str, _name: str, obj: Any, _options: object, lines: list[str]) -> None:
    """Give the entries of a section "Parameters" the types of the signature, "array" for those described by shapes, and
    what is returned a section where the docstring has none.
    """
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return
    annotated, result = signature.parameters, signature.return_annotation
    if what != "class" and "Parameters" in lines and "Returns" not in lines and result is not signature.empty:
        lines += ["Returns", "-------", inspect.formatannotation(result).strip("'"), ""]
    inside = False
    for i, (line, following) in enumerate(pairwise([*lines, ""])):
        if re.fullmatch(r"-+", following):
            inside = line == "Parameters"
        if inside and line and not line.startswith((" ", "-")) and " : " not in line:
            hints = {annotated[x].annotation for x in re.split(r", *", line) if x in annotated} - {inspect._empty}
            texts = [inspect.formatannotation(hint).strip("'") for hint in hints]
            shown = {re.sub(r"\b(typing|collections\.abc|np)\.", "", text) for text in texts}
            if shown == {"Any"}:
                shown = {"array"} if re.match(r" +(\(|[Aa]rrays? |As )", following) else set()
            if len(shown) == 1:
                lines[i] = f"{line} : {shown.pop()}"


def name_modules(
    _app: object, _what: str, _name: str, _obj: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A default that is a module by its name, without its path on the machine that builds the site."""
    return signature and re.sub(r"<module '([\w.]+)' from [^>]*>", r"\1", signature), returns


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", name_modules)
    app.connect("autodoc-process-docstring", add_types, priority=450)
    app.connect("autodoc-process-docstring", escape_bars, priority=400)  # before numpydoc
