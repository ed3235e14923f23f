"""The slides, by sphinx-revealjs: `make site` builds them into the site's slides/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "Tensor parallelism in PyTorch, by running it"
extensions = ["myst_parser", "sphinx_revealjs", "course"]
myst_enable_extensions = ["colon_fence"]
root_doc = "ninety"
smartquotes = False
revealjs_static_path = ["../_static"]
html_favicon = "../_static/icon.svg"
revealjs_style_theme = "white"
revealjs_css_files = ["slides.css"]
revealjs_script_conf = {
    "width": 1280,
    "height": 720,
    "controls": False,  # they would cover the players; keys turn the slides
    "hash": True,
    "slideNumber": "c/t",
    "transition": "none",
    "fragmentInURL": False,
}
revealjs_script_plugins = [
    {"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"},
    {"name": "RevealHighlight", "src": "revealjs/plugin/highlight/highlight.js"},
]
