"""Builds the documentation site in site/, and fails on warnings, broken links and missing anchors; for `make docs`.

`zensical build --strict` fails on broken links in Markdown only. This script also fails on warnings of mkdocstrings
about docstrings, on broken links in HTML and to images, and where the search does not find what it must.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from typing_extensions import override

ROOT = Path(__file__).parents[1]


class _Page(HTMLParser):
    """Collects the anchors and links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.links.append(value)


def broken_links(site: Path) -> list[str]:
    """Return `PAGE: LINK` for each link from a page of the site to a file or anchor that does not exist.

    Links to other hosts are not followed. 404.html is skipped: a server shows it at any address.
    """
    pages = {path: _Page(path) for path in sorted(site.resolve().rglob("*.html")) if path.name != "404.html"}
    broken: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            missing_anchor = anchor and target in pages and anchor not in pages[target].anchors
            if not target.is_file() or missing_anchor:
                broken.append(f"{path.name}: {link}")
    return broken


SEARCHES = (
    *("custom tokenizer", "wandb", "custom sampler", "own training loop", "own callback", "own data set"),
    *("features for a classifier", "compare runs", "sweep", "GPU run costs", "JSON lines", "resume", "learning_rate"),
)
"""What a reader must find."""


def not_found(site: Path, searches: tuple[str, ...] = SEARCHES) -> list[str]:
    """Return the searches for which no section of the site has all words."""
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    texts = [f"{item['title']} {item['text']}".lower() for item in items]
    return [
        search for search in searches if not any(all(word in text for word in search.lower().split()) for text in texts)
    ]


def build() -> int:
    """Build the site from scratch and return the exit status."""
    scripts = Path(sys.executable).parent  # contains ruff, with which mkdocstrings formats signatures
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "docs"),
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "REPOSITORY": project["urls"].get("Repository", ""),  # the one place with the address, once there is one
    }
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    print(result.stdout, end="")
    if result.returncode:
        return result.returncode
    docstring_warnings = [line for line in result.stdout.splitlines() if line.startswith(("griffe:", "mkdocstrings"))]
    broken = [f"broken link in {line}" for line in broken_links(ROOT / "site")]
    broken += [f"the search finds nothing for {search!r}" for search in not_found(ROOT / "site")]
    print(*broken, sep="\n", end="\n" if broken else "")
    return 1 if docstring_warnings or broken else 0


if __name__ == "__main__":
    sys.exit(build())
