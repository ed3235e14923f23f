"""The site: `make site` builds it, without a network, from what the repository has."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import course

project = "Tensor parallelism in PyTorch, by running it"
html_title = "Tensor parallelism, by running it"
extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton", "course"]
exclude_patterns = ["slides"]
nb_execution_mode = "off"  # notebooks are committed with their outputs
# No dollarmath: $ is a shell's here.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # cells with !torchrun in them
smartquotes = False  # it would make a dash of the two hyphens of a flag

html_theme = "sphinx_book_theme"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_context = {"default_mode": "auto"}  # dark where the reader's system is
html_show_sourcelink = False
html_copy_source = False
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_use_index = False  # it would be an empty page; the glossary is the index
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # one search field is enough
    "show_toc_level": 2,
    "footer_content_items": ["extra-footer.html"],  # no author, no copyright
}
if course.REPOSITORY:
    html_theme_options |= {
        "repository_url": course.REPOSITORY,
        "use_repository_button": True,
    }
copybutton_exclude = ".linenos, .gp, .go"
