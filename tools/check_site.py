"""What `make check-docs` asks of the built site, in a browser: axe's rules, links, pictures, ids, and an empty console.

Every page is opened in the light and in the dark scheme, and as wide as a telephone. A finding of axe that it calls
serious or critical is an error, and so are: a link or a picture that leads nowhere inside the site, an anchor that its
page lacks, a picture without words in its place, an id that occurs twice, a page that scrolls sideways, an empty
heading, and what the browser writes to its console as a warning or an error.
"""

import argparse
import shutil
import sys
import threading
from collections import defaultdict
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

VIEWS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}
# What a page has, as the browser sees it.
CONTENTS = """() => ({
  links: [...document.querySelectorAll("[href], [src]")].map(e => e.getAttribute("href") ?? e.getAttribute("src")),
  ids: [...document.querySelectorAll("[id]")].map(e => e.id),
  names: [...document.querySelectorAll("a[name]")].map(e => e.name),
  wordless: [...document.querySelectorAll("img")]
    .filter(e => !e.alt.trim() || e.alt.startsWith("No description"))  // nbconvert's words for none
    .map(e => e.src.slice(0, 80)),
  headless: [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter(e => !e.innerText.trim()).map(e => e.id),
})"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


def axe_findings(page: Page, axe: Axe) -> list[str]:
    found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"axe: {finding['id']} ({finding['impact']}): {node['target'][0]}: {' '.join(node['failureSummary'].split())}"
        for finding in found
        if finding["impact"] in ("serious", "critical")
        for node in finding["nodes"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=Path("build/site"))
    parser.add_argument("pages", nargs="*", help="of the site, such as index.html; default: all")
    given = parser.parse_args()
    chosen = given.pages or sorted(str(path.relative_to(given.site)) for path in given.site.rglob("*.html"))
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if not chosen:
        parser.error(f"{given.site} has no pages: make docs")
    if not browser_path:
        parser.error("no chromium was found: make check-docs installs it")

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=given.site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}/"
    errors: dict[str, list[str]] = defaultdict(list)
    contents = {}
    console: list[str] = []
    axe = Axe()
    with sync_playwright() as playwright:
        # A container has no sandbox to give; the pages are our own.
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for view, settings in VIEWS.items():
            page = browser.new_context(**settings, reduced_motion="reduce").new_page()
            page.on("console", lambda said: said.type in ("warning", "error") and console.append(said.text))
            page.on("pageerror", lambda error: console.append(str(error)))
            for name in chosen:
                console.clear()
                page.goto(root + name, wait_until="load")
                errors[name] += [f"{view}: {text}" for text in axe_findings(page, axe)]
                sideways = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                errors[name] += [f"{view}: scrolls sideways by {sideways} pixels"] * (sideways > 0)
                errors[name] += [f"{view}: console: {text}" for text in console]
                if name not in contents:
                    contents[name] = page.evaluate(CONTENTS)
        browser.close()
    server.shutdown()

    for name, page in contents.items():
        errors[name] += [f"a picture without alt: {src}" for src in page["wordless"]]
        errors[name] += [f"an empty heading: {anchor}" for anchor in page["headless"]]
        errors[name] += [f"an id occurs twice: {one}" for one in sorted(page["ids"]) if page["ids"].count(one) > 1]
        for link in sorted(set(page["links"])):
            target, anchor = urldefrag(urljoin(root + name, link))
            if not target.startswith(root):
                continue
            path = unquote(target.removeprefix(root)) or "index.html"
            if not (given.site / path).is_file():
                errors[name].append(f"a link leads nowhere: {link}")
            elif anchor and path in contents and unquote(anchor) not in contents[path]["ids"] + contents[path]["names"]:
                errors[name].append(f"an anchor leads nowhere: {link}")
            elif anchor and not path.endswith(".html"):
                errors[name].append(f"an anchor into what is no page: {link}")

    for name, texts in errors.items():
        for text in dict.fromkeys(texts):
            print(f"{name}: {text}")
    count = sum(len(set(texts)) for texts in errors.values())
    print(f"{len(chosen)} pages in {len(VIEWS)} views: {count} errors")
    return count > 0


if __name__ == "__main__":
    sys.exit(main())
