"""Build the documentation site: ``./dev docs``.

The pages in docs/ link to files of the repository, such as examples. A site can contain only pages. This program
therefore copies docs/ to build/docs and adds each linked file as a page. A Markdown file is copied, and any other file
becomes one code block. Zensical then builds build/site in strict mode, so that a broken link or anchor fails the build.
Before the build, the program checks that the navigation lists every page of docs/. After the build, the program checks
that no page loads anything from another host.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prose import read_markdown, split_sentences

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REPOSITORY = "repository"
"""Folder of the site that contains the linked files of the repository."""
GENERATED = ("api.md",)
"""Pages that a program generates. The size limits do not apply to generated pages."""
MAX_LINE = 160
"""Maximum length of a line outside of code blocks and tables, in characters."""
MAX_START_SENTENCE = 32
"""Maximum number of words in a sentence in docs/start, which new users read."""
MAX_MEDIAN_KB = 6.0
MAX_WORDS = 80_000
"""Maximum number of words on all pages. Code blocks, generated pages and decisions do not count. Lower the limit when
you shorten the documentation.
"""
REPOSITORY_LINK = """<a href="{{ config.repo_url }}" class="md-source">
  <div class="md-source__repository">{{ config.repo_name }}</div>
</a>
"""

_LINK = re.compile(r"(?P<start>\]\(|^\[[^\]]+\]: )(?P<target>[^)\s]+)", re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".ts": "typescript", ".json": "json"}
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(https?:)?//|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=["']?(https?:)?//"""
)


def list_nav(nav: list[Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yield the section and the name of each page in the navigation, in order."""
    for item in nav:
        if isinstance(item, str):
            yield section, item
            continue
        [(title, value)] = item.items()
        if isinstance(value, str):
            yield section or title, value
        else:
            yield from list_nav(value, section or title)


def read_config() -> dict[str, Any]:
    return tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]


class Stage:
    """Copies pages to a folder. Linked files of the repository become pages under ``repository/``."""

    def __init__(self, pages: Path) -> None:
        self.pages = pages
        self._waiting: list[Path] = []
        self._staged: set[Path] = set()

    def copy_all(self) -> None:
        shutil.rmtree(self.pages, ignore_errors=True)
        for source in sorted(DOCS.rglob("*")):
            target = self.pages / source.relative_to(DOCS)
            if source.suffix == ".md":
                self._write(target, self._rewrite(source, target))
            elif source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        self._write(self.pages / "decisions/index.md", list_decisions())
        self._write(self.pages / "pictures/index.md", list_pictures())
        while self._waiting:
            self._add_repository_page(self._waiting.pop())

    def _add_repository_page(self, source: Path) -> None:
        target = self.pages / locate_page(source)
        name = source.relative_to(ROOT).as_posix()
        if source.is_dir():
            files = sorted(it for it in source.iterdir() if it.is_file() and not it.name.startswith((".", "__")))
            for file in files:
                self._want(file)
            lines = [
                f"- [{it.name}]({posixpath.relpath(locate_page(it), locate_page(source).rpartition('/')[0])})"
                for it in files
            ]
            self._write(target, f"# {name}\n\n" + "\n".join(lines) + "\n")
        elif source.suffix == ".md":
            self._write(target, self._rewrite(source, target))
        else:
            text = source.read_text(encoding="utf-8").rstrip("\n")
            self._write(target, f"# {name}\n\n````{_LANGUAGES.get(source.suffix, 'text')}\n{text}\n````\n")

    def _want(self, source: Path) -> None:
        # The README of a folder is the folder's page (`locate_page`), so no list of files may replace it.
        if source.is_dir() and (source / "README.md").exists():
            source /= "README.md"
        if source not in self._staged:
            self._staged.add(source)
            self._waiting.append(source)

    def _rewrite(self, source: Path, target: Path) -> str:
        """Return the text of a page, with its links changed to paths on the site. Raises `SystemExit` for a broken
        link.
        """

        def replace(match: re.Match[str]) -> str:
            link, hash_mark, anchor = match["target"].partition("#")
            if not link or ":" in link:
                return match[0]
            linked = (source.parent / link).resolve()
            if not linked.exists():
                raise SystemExit(f"docs: {source.relative_to(ROOT)} links to {match['target']}, which does not exist.")
            if linked.is_relative_to(DOCS) and not linked.is_dir():
                page = linked.relative_to(DOCS).as_posix()
            elif linked.is_relative_to(DOCS):
                page = f"{linked.relative_to(DOCS).as_posix()}/index.md"
            else:
                self._want(linked)
                page = locate_page(linked)
            return (
                match["start"]
                + posixpath.relpath(page, target.relative_to(self.pages).parent.as_posix())
                + hash_mark
                + anchor
            )

        # Leave code blocks unchanged, because links in them are text.
        parts = re.split(r"(^```.*?^```$)", source.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)

    def _write(self, target: Path, text: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def locate_page(source: Path) -> str:
    """Return the path of the page for a repository file, relative to the folder of pages."""
    name = source.relative_to(ROOT).as_posix()
    if source.is_dir():
        readme = source / "README.md"
        return locate_page(readme) if readme.exists() else f"{REPOSITORY}/{name}/index.md"
    if source.suffix == ".md":
        # Zensical would build README.md as the index.html of its folder, like the list of a folder's files.
        return f"{REPOSITORY}/{name}".replace("README.md", "index.md")
    return f"{REPOSITORY}/{name}.md"


def list_decisions() -> str:
    rows = [f"- [{read_title(it)}]({it.name})" for it in sorted(DOCS.glob("decisions/*.md"))]
    return "# Decisions\n\nWhy Roundelay is built this way.\n\n" + "\n".join(rows) + "\n"


def list_pictures() -> str:
    shown = [f"## {it.stem}\n\n![{it.stem}]({it.name})" for it in sorted(DOCS.glob("pictures/*.png"))]
    return "# Pictures\n\n" + "\n\n".join(shown) + "\n"


def read_title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next((line[2:].strip() for line in lines if line.startswith("# ")), page.stem)


def write_llms(config: dict[str, Any], folder: Path) -> None:
    """Write llms.txt (https://llmstxt.org), and a file with the text of all pages for readers that want everything at
    once.
    """
    pages = list(list_nav(config["nav"]))
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}."]
    section = ""
    for name, page in pages:
        if name != section:
            lines += ["", f"## {name}", ""]
            section = name
        lines.append(f"- [{read_title(folder / page)}]({page})")
    (folder / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = [(folder / page).read_text(encoding="utf-8").rstrip() for _, page in pages if page not in GENERATED]
    (folder / "llms-full.txt").write_text("\n\n---\n\n".join(texts) + "\n", encoding="utf-8")


def find_orphans(config: dict[str, Any]) -> list[str]:
    """Return the pages of docs/ that the navigation does not list. Decisions are excluded, because they have their own
    list.
    """
    named = {page for _, page in list_nav(config["nav"])}
    pages = {it.relative_to(DOCS).as_posix() for it in DOCS.rglob("*.md")}
    return sorted(page for page in pages - named if not page.startswith("decisions/"))


def find_foreign_requests(site: Path) -> list[str]:
    """Return the built pages that would load something from another host."""
    return [
        f"{page.relative_to(site)}: {match[0]}"
        for page in sorted(site.rglob("*.html"))
        if page.is_file()
        if (match := _LOADED.search(page.read_text(encoding="utf-8")))
    ]


def build(out: Path, *, site_url: str = "", repository: str = "", has_versions: bool = False) -> Path:
    """Build ``out/site`` and return its path. Raises `SystemExit` if a link or a page is broken."""
    config = read_config()
    if orphans := find_orphans(config):
        raise SystemExit(f"docs: no page leads to {', '.join(orphans)}. Add each to `nav` in zensical.toml.")
    Stage(out / "docs").copy_all()
    write_llms(config, out / "docs")
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    extra = f'site_url = "{site_url}"\n' if site_url else ""
    if repository:
        extra += f'repo_url = "{repository}"\nedit_uri = "edit/main/docs"\n'
        text = text.replace("[project.theme]\n", '[project.theme]\ncustom_dir = "overrides"\n')
        # Replace the theme's own repository link, which makes every page ask api.github.com for stars and releases.
        (out / "overrides/partials").mkdir(parents=True, exist_ok=True)
        (out / "overrides/partials/source.html").write_text(REPOSITORY_LINK, encoding="utf-8")
        text = text.replace('"content.code.copy"', '"content.action.edit",\n  "content.code.copy"')
    if has_versions:
        text += '\n[project.extra.version]\nprovider = "mike"\n'
    # Write the configuration into the output folder. Zensical reads and writes only below the folder of this file.
    config_file = out / "zensical.toml"
    config_file.write_text(text.replace("[project]\n", f"[project]\n{extra}", 1), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config_file)]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("docs: Zensical found the problems above. Correct them in docs/ and run ./dev docs again.")
    if foreign := find_foreign_requests(out / "site"):
        raise SystemExit("docs: these pages load something from another host:\n" + "\n".join(foreign))
    return out / "site"


def publish(site: Path, folder: Path, version: str) -> None:
    """Copy the built site into ``folder/version``, and list the version first in versions.json. A web server serves
    ``folder``.

    The version selector of the pages reads versions.json. The index.html of the folder redirects to the newest version.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "versions.json"
    versions = json.loads(listed.read_text(encoding="utf-8")) if listed.exists() else []
    others = [item for item in versions if item["version"] != version]
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version)
    listed.write_text(
        json.dumps([{"version": version, "title": version, "aliases": []}, *others], indent=2), encoding="utf-8"
    )
    redirect = (
        f'<!doctype html><meta http-equiv="refresh" content="0; url={version}/"><a href="{version}/">{version}</a>\n'
    )
    (folder / "index.html").write_text(redirect, encoding="utf-8")


def list_sizes() -> list[tuple[float, int, str]]:
    """Return the size in KB, the number of words outside of code blocks and the name of each page, largest first."""
    sizes = []
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(DOCS).as_posix()
        if name not in GENERATED and not name.startswith("decisions/"):
            prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
            words = sum(re.search(r"\w", word) is not None for word in prose.split())
            sizes.append((len(text.encode()) / 1024, words, name))
    return sorted(sizes, reverse=True)


def sum_sizes(sizes: list[tuple[float, int, str]]) -> tuple[float, int]:
    """Return the median size in KB, and the total number of words."""
    return sorted(size for size, _, _ in sizes)[len(sizes) // 2], sum(words for _, words, _ in sizes)


def find_long_text() -> list[str]:
    """Return a message for each exceeded limit of this module: line length, length of sentences for new users, size of
    the median page, and words on all pages.
    """
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        name = page.relative_to(DOCS).as_posix()
        if name in GENERATED:
            continue
        text = page.read_text(encoding="utf-8")
        is_code = False
        for number, line in enumerate(text.splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code and len(line) > MAX_LINE and not line.lstrip().startswith("|"):
                found.append(f"{name}:{number} has {len(line)} characters (at most {MAX_LINE})")
        if name.startswith("start/"):
            for number, paragraph in read_markdown(text):
                for sentence in split_sentences(paragraph):
                    if (words := len(sentence.split())) > MAX_START_SENTENCE:
                        found.append(f"{name}:{number} has a sentence of {words} words (at most {MAX_START_SENTENCE})")
    median, words = sum_sizes(list_sizes())
    if median > MAX_MEDIAN_KB:
        found.append(f"the median page has {median:.1f} KB (at most {MAX_MEDIAN_KB})")
    if words > MAX_WORDS:
        found.append(f"all pages have {words:,} words (at most {MAX_WORDS:,})")
    return found


def print_sizes() -> None:
    """Print the size in KB and the words of each page, largest first, and then the median size and the total words."""
    sizes = list_sizes()
    for size, words, name in sizes:
        print(f"{size:7.1f} KB {words:7,} words  {name}")
    median, total = sum_sizes(sizes)
    print(f"median {median:.1f} KB, {total:,} words, {len(sizes)} pages")


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev docs", description="Build the documentation site in build/site.")
    parser.add_argument("--sizes", action="store_true", help="print the size of each page, and build nothing")
    parser.add_argument(
        "--into", type=Path, metavar="DIR", help="also publish the site in DIR, next to earlier versions"
    )
    parser.add_argument("--version", default="", help="name of this version in DIR (the project's version)")
    parser.add_argument("--serve", action="store_true", help="serve the built site at http://127.0.0.1:8765")
    parser.add_argument("--out", type=Path, default=ROOT / "build", metavar="DIR", help="folder to build in (build)")
    parser.add_argument("--site-url", default="", help="address of the published site")
    parser.add_argument("--repository", default="", help="address of the repository, for links that edit a page")
    chosen = parser.parse_args()
    if chosen.sizes:
        print_sizes()
    if long_text := find_long_text():
        raise SystemExit("docs: these are too long:\n" + "\n".join(long_text))
    if chosen.sizes:
        return
    version = (
        chosen.version or tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", version):
        parser.error(f"--version {version!r} must be letters, digits, dots and hyphens, because it names a folder.")
    site = build(
        chosen.out, site_url=chosen.site_url, repository=chosen.repository, has_versions=chosen.into is not None
    )
    print(f"{site}: {sum(it.is_file() for it in site.rglob('*.html'))} pages")
    if chosen.into is not None:
        publish(site, chosen.into, version)
    if chosen.serve:
        print("http://127.0.0.1:8765", flush=True)
        command = [sys.executable, "-m", "http.server", "8765", "--bind", "127.0.0.1", "--directory", str(site)]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
