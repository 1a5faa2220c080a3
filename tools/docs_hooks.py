"""What the site adds to mkdocs: pages of the repository that stand outside of docs/ and files that pages link to become
part of it, pictures open in their full size, and the home page, which needs no list of pages beside it, is wide.

A page that says [train_doge.py](../examples/train_doge.py) works where the repository is read and on the site.
"""

import json
import re
from html import escape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_PICTURE = re.compile(r'<img [^>]*src="([^":]+)"[^>]*>')
_OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    for name in PAGES:
        files.append(File.generated(config, name, content=(root / name).read_text().replace("](docs/", "](")))
    linked = {name for page in files.documentation_pages() for name in _OUTSIDE.findall(page.content_string or "")}
    for name in sorted(linked - set(PAGES)):
        if (root / name).is_file():  # mkdocs warns of the others, as of any link that leads nowhere
            files.append(File.generated(config, f"repository/{name}", abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    def titled(link: re.Match) -> str:
        target = files.get_file_from_path(link[1])
        heading = re.match(r"# (.*)", target.content_string) if target else None
        return f"[{heading[1]}]({link[1]}" if heading else link[0]

    # Where the repository is read a page is known by its name, on the site by its title.
    markdown = re.sub(r"\[(\w+\.md)\]\(\1", titled, markdown)
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    if "/" in page.file.src_uri:
        return markdown
    return _OUTSIDE.sub(lambda link: f"]({link[1]})" if link[1] in PAGES else f"](repository/{link[1]})", markdown)


def on_page_content(html: str, page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.endswith(".ipynb"):
        # A cell's metadata say what its picture shows; nbconvert's template does not ask for it.
        for cell in json.loads(Path(page.file.abs_src_path).read_text())["cells"]:
            if words := cell["metadata"].get("alt"):
                html = html.replace("No description has been provided for this image", escape(words), 1)
    return _PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', html)
