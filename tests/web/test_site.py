"""Tests of the documentation site: it builds in strict mode, contains every page, and loads nothing from other hosts."""

from __future__ import annotations

import importlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from playwright.async_api import async_playwright

from tests.web.browsers import find_browser, launch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("build_docs")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None: ...


async def test_site_is_complete_and_loads_nothing_from_elsewhere(builder: ModuleType, tmp_path: Path) -> None:
    site = builder.build(tmp_path / "build", repository="https://github.com/roundelay/roundelay", has_versions=True)
    builder.publish(site, tmp_path / "published", "0.1.0")
    builder.publish(site, tmp_path / "published", "0.2.0")
    shown = tmp_path / "published/0.2.0"

    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        assert (shown / ("index.html" if name.name == "index" else f"{name}/index.html")).is_file(), name
    assert (
        "<title>Examples" in (shown / "repository/examples/index.html").read_text()
    )  # not a list of the folder's files
    assert "(tools.md)" in (shown / "llms.txt").read_text()
    assert "# What an agent can do" in (shown / "llms-full.txt").read_text()
    assert "https://github.com/roundelay/roundelay/edit/main/docs/tools.md" in (shown / "tools/index.html").read_text()
    versions = (tmp_path / "published/versions.json").read_text()
    assert versions.index("0.2.0") < versions.index("0.1.0")

    if find_browser("chromium") is None:
        pytest.skip("the rest needs Chromium")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path / "published")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    try:
        async with async_playwright() as playwright:
            browser = await launch(playwright, "chromium", tmp_path)
            page = await browser.new_page()
            requested: list[str] = []
            page.on("request", lambda request: requested.append(request.url))
            await page.goto(f"{origin}/0.2.0/")
            await page.wait_for_load_state("networkidle")
            await page.keyboard.press("Control+k")
            await page.locator("input[type=text], input[type=search], input:not([type])").first.wait_for()
            await page.keyboard.type("approval")
            await page.locator('a[href*="/approvals/?h=approval"]').first.wait_for()
            await browser.close()
    finally:
        server.shutdown()
        server.server_close()
    assert [url for url in requested if not url.startswith((origin, "data:", "blob:"))] == []


@pytest.mark.parametrize(
    ("page", "text", "problem"),
    [
        ("tools.md", "# Tools\n\n[lost](../gone.md)\n", "tools.md links to ../gone.md, which does not exist"),
        ("tools.md", "# Tools\n\n[lost](agents.md#no-such-heading)\n", "Zensical found the problems"),
        ("lonely.md", "# Lonely\n", "no page leads to lonely.md"),
    ],
)
def test_broken_page_fails_the_build(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, text: str, problem: str
) -> None:
    pages = tmp_path / "copy/docs"
    pages.mkdir(parents=True)
    for name in ("tools.md", "agents.md"):
        (pages / name).write_text(f"# {name}\n", encoding="utf-8")
    (pages / page).write_text(text, encoding="utf-8")
    (tmp_path / "copy/zensical.toml").write_text(
        '[project]\nsite_name = "x"\nsite_description = "x"\ndocs_dir = "docs"\nsite_dir = "site"\nnav = ["tools.md", "agents.md"]\n',
        encoding="utf-8",
    )
    monkeypatch.setattr(builder, "ROOT", tmp_path / "copy")
    monkeypatch.setattr(builder, "DOCS", pages)
    with pytest.raises(SystemExit, match=problem.replace(".", r"\.")):
        builder.build(tmp_path / "build")


def test_page_that_loads_from_another_host_fails(builder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://example.org">x</a><script src="/a.js"></script>')
    (tmp_path / "bad.html").write_text('<link rel="stylesheet" href="https://example.org/a.css">')
    assert [line.partition(":")[0] for line in builder.find_foreign_requests(tmp_path)] == ["bad.html"]


def test_lines_and_sentences_of_the_pages_are_short(builder: ModuleType) -> None:
    assert builder.find_long_text() == []


def test_long_lines_and_sentences_are_found(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, sentence = "word " * 40, "word " * 16
    (tmp_path / "start").mkdir()
    (tmp_path / "start/a.md").write_text(f"# A\n\n{sentence}\n{sentence}word.\n\n```text\n{line}\n```\n\n| {line} |\n")
    (tmp_path / "b.md").write_text(f"# B\n\n{line}\n")
    monkeypatch.setattr(builder, "DOCS", tmp_path)
    monkeypatch.setattr(builder, "MAX_WORDS", 100)
    assert builder.find_long_text() == [
        "b.md:3 has 200 characters (at most 160)",
        "start/a.md:3 has a sentence of 33 words (at most 32)",
        "start/a.md:10 has a sentence of 40 words (at most 32)",
        "all pages have 115 words (at most 100)",
    ]
