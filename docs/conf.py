"""How Sphinx builds the documentation: `make docs`."""

project = "Penstock"
author = "the Penstock maintainers"
copyright = "2026, the Penstock maintainers"

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
root_doc = "index"

myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4
nitpicky = True
highlight_language = "none"

html_theme = "furo"
html_title = "Penstock"
html_static_path = ["_static"]
html_css_files = ["penstock.css"]
html_show_sourcelink = False
html_copy_source = False
html_use_index = False
html_theme_options = {"sidebar_hide_name": False}
