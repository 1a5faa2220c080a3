"""What the site adds to mkdocs: files outside of docs/ that its pages link to become part of the site.

A page that says [train_doge.py](../examples/train_doge.py) works where the repository is read and on the site.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    linked = {name for page in files.documentation_pages() for name in _OUTSIDE.findall(page.content_string or "")}
    for name in sorted(linked):
        if (root / name).is_file():  # mkdocs warns of the others, as of any link that leads nowhere
            files.append(File.generated(config, f"repository/{name}", abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    depth = "../" * page.file.src_uri.count("/")
    if depth:
        return markdown
    return _OUTSIDE.sub(lambda link: f"](repository/{link[1]})", markdown)
