"""The pages build as a site, strictly, and what a browser is given is whole: links, anchors, pictures, tables, code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import gradwire
from pages import BLOCKS, ROOT

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


class Page(HTMLParser):
    """What one page has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.pictures: list[tuple[str, str]] = []
        self.tags: dict[str, int] = {}
        self.fetched: list[str] = []
        self.prose = ""
        self._quoted = 0
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._quoted += tag in ("code", "pre", "script", "style")
        if "id" in found:
            self.anchors.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "img":
            self.pictures.append((found["src"], found.get("alt", "")))
        if tag in ("img", "script", "link") and found.get("rel", "") != "canonical":
            self.fetched.append(found.get("src") or found.get("href", ""))

    def handle_endtag(self, tag: str) -> None:
        self._quoted -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._quoted:
            self.prose += data


# Not quietly: with -q warnings are dropped before they are counted.
def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_site_is_whole(tmp_path: Path) -> None:
    """One test, as building takes most of the time."""
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    site = {path.stem: Page(path) for path in tmp_path.glob("*.html") if path.stem != "404"}
    every_page_is_there_and_in_the_navigation(site)
    links_and_anchors_lead_somewhere(site)
    nothing_is_fetched_from_elsewhere_and_pictures_are_there(site)
    tables_lists_and_code_are_rendered(site)
    the_api_has_every_public_name(site)


def every_page_is_there_and_in_the_navigation(site: dict[str, Page]) -> None:
    assert sorted(site) == PAGES
    for name in PAGES:
        assert f"{name}.html" in site["benchmarks"].links or name == "benchmarks", name


def links_and_anchors_lead_somewhere(site: dict[str, Page]) -> None:
    for name, page in site.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme:
                continue
            other = site[Path(target.path).stem] if target.path not in ("", ".") else page
            assert not target.fragment or unquote(target.fragment) in other.anchors, f"{name}: {link}"


def nothing_is_fetched_from_elsewhere_and_pictures_are_there(site: dict[str, Page]) -> None:
    for name, page in site.items():
        for link in filter(None, page.fetched):
            assert not urlsplit(link).netloc, f"{name}: {link}"
            assert (page.path.parent / urlsplit(link).path).is_file(), f"{name}: {link}"
        for picture, text in page.pictures:
            assert text, f"{name}: {picture} has no text"
            assert (page.path.parent / picture).stat().st_size > 1000


def tables_lists_and_code_are_rendered(site: dict[str, Page]) -> None:
    for name, page in site.items():
        source = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
        if include := re.fullmatch(r'--8<-- "(\w+\.md)"\n', source):
            source = (ROOT / include[1]).read_text("utf-8")
        assert page.tags.get("table", 0) >= len(re.findall(r"^\| ?-", source, re.MULTILINE)), name
        written = len([block for block in BLOCKS if block.page.stem == name])
        assert page.tags.get("pre", 0) >= written, name
        # Left over where Markdown was not understood.
        assert not re.search(r"\*\*|```|^\s*- \S.*\n\s*- |\]\(|^\| |--8<--|<!--", page.prose, re.MULTILINE), name


def the_api_has_every_public_name(site: dict[str, Page]) -> None:
    public = {f"gradwire.{name}" for name in gradwire.__all__ if name not in ("__version__", "CODECS", "Codec")}
    missing = public - site["api"].anchors
    assert not missing
    assert "gradwire.compress.codec.Codec.encode" in site["api"].anchors
