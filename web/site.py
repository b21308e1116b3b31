"""Prepares the files of the page for the node: hashed names, an import map, and the permissions of the browser.

`read_site` reads the folder ``page`` once. Each request path is looked up among these files, so no request opens a
file. The hub's server has already checked the headers Host and Origin (`roundelay.network.hub`). This module does not
depend on the content of the page.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from html import escape
from pathlib import Path

from roundelay.network.hub.origin_policy import WebFile

FOLDER = Path(__file__).parent / "page"
PREFIX = "/web/"
ENTRY = "ui/main.js"
PLACE = "<!-- files -->"
"""Line of index.html that is replaced by the stylesheets, the import map and the modules."""
STYLE = "style.css"
"""Name of the first stylesheet. The other stylesheets in the page's folder follow, sorted by name."""
VENDORED = "vendor/vendored.json"
HASH_DIGITS = 12
GZIP_FROM_BYTES = 500
TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
"""Media types of the files that are served, by suffix. All other files in the folder are only for developers."""
_PACKED = ("text/", "image/svg")

HARMLESS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PERMISSIONS = ("camera", "display-capture", "geolocation", "microphone", "payment", "publickey-credentials-get", "usb")
OF_PAGE = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": ", ".join(f"{it}=()" for it in PERMISSIONS),
    "X-Frame-Options": "DENY",
}
POLICY = (
    "default-src 'self'; script-src 'self' 'sha256-{hash}'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content-Security-Policy of the page. ``hash`` is the hash of the import map, which is the only inline script. The
last two directives make sure that even the page's own code cannot turn text into HTML or into a script. These
directives work only in browsers that support trusted types.
"""


class PageFile:
    """A file of the page, in plain and compressed form."""

    def __init__(self, body: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        self._body = body
        self._is_packed = len(body) >= GZIP_FROM_BYTES and content_type.startswith(_PACKED)
        self._headers = [("Content-Type", content_type), *headers.items()]
        if self._is_packed:
            self._headers.append(("Vary", "Accept-Encoding"))

    @cached_property
    def _packed(self) -> bytes:
        return gzip.compress(self._body, mtime=0)

    def give(self, *, takes_gzip: bool) -> WebFile:
        if takes_gzip and self._is_packed:
            return WebFile((*self._headers, ("Content-Encoding", "gzip")), self._packed)
        return WebFile(tuple(self._headers), self._body)


class PageSite:
    """Implements `Site` with the files of the page. With ``is_reloaded``, which is meant for developers, the files are
    read again whenever the page is requested.
    """

    def __init__(self, folder: Path = FOLDER, *, is_reloaded: bool = False) -> None:
        self._folder = folder
        self._is_reloaded = is_reloaded
        self._files = _read_installed() if folder == FOLDER else read_site(folder)

    def find(self, path: str, *, takes_gzip: bool) -> WebFile | None:
        if path == "/" and self._is_reloaded:
            self._files = read_site(self._folder)
        file = self._files.get(path)
        return None if file is None else file.give(takes_gzip=takes_gzip)


def read_site(folder: Path) -> dict[str, PageFile]:
    """Return the files of the page by request path. Raises `OSError` if a file cannot be read, and `ValueError` if
    index.html has no insertion point.
    """
    contents = read_contents(folder)
    paths = {name: _hashed_path(name, body) for name, body in contents.items()}
    for_ever = {"Cache-Control": "public, max-age=31536000, immutable", **HARMLESS}
    files = {paths[name]: PageFile(body, TYPES[Path(name).suffix], for_ever) for name, body in contents.items()}
    files["/"] = _make_index(folder, contents, paths)
    return files


@cache  # Reading 60 files and their imports takes 5 ms, as long as everything else in the start of a hub.
def _read_installed() -> dict[str, PageFile]:
    return read_site(FOLDER)


def read_contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file of the page except index.html, by the file's name in the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in TYPES and path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _hashed_path(name: str, body: bytes) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{PREFIX}{stem}.{hashlib.sha256(body).hexdigest()[:HASH_DIGITS]}.{suffix}"


def _make_index(folder: Path, contents: Mapping[str, bytes], paths: Mapping[str, str]) -> PageFile:
    """Return index.html with links to its stylesheets, import map, preloaded modules and entry module."""
    imports = list_imports(folder, paths)
    import_map = json.dumps({"imports": imports}, separators=(",", ":")).replace("<", "\\u003c")
    lines = [f'<link rel="stylesheet" href="{escape(paths[it])}">' for it in list_styles(paths)]
    lines.append(f'<script type="importmap">{import_map}</script>')
    modules = [imports[it] for it in list_modules(contents, imports)]
    lines += [f'<link rel="modulepreload" href="{escape(it)}">' for it in modules]
    lines.append(f'<script type="module" src="{escape(paths[ENTRY])}"></script>')
    text = fill_template(folder, lines)
    policy = POLICY.format(hash=b64encode(hashlib.sha256(import_map.encode()).digest()).decode())
    return PageFile(
        text.encode(), "text/html; charset=utf-8", {**OF_PAGE, **HARMLESS, "Content-Security-Policy": policy}
    )


def fill_template(folder: Path, lines: Iterable[str]) -> str:
    """Return index.html with these lines in its head. Raises `ValueError` if index.html has no insertion point."""
    template = (folder / "index.html").read_text(encoding="utf-8")
    if template.count(PLACE) != 1:
        raise ValueError(f"index.html has no line {PLACE}, or more than one")
    return template.replace(PLACE, "\n".join(lines))


def list_styles(names: Iterable[str]) -> list[str]:
    """Return the names of the page's stylesheets, in the order in which the page loads them."""
    return sorted(
        (name for name in names if name.endswith(".css") and "/" not in name), key=lambda name: (name != STYLE, name)
    )


def list_imports(folder: Path, paths: Mapping[str, str]) -> dict[str, str]:
    """Return the import map, which maps module names to paths.

    The map contains the modules of the page (``#core/state.js``), and the names that vendored modules import
    (``preact``, from vendored.json).
    """
    imports = {f"#{name}": path for name, path in paths.items() if name.endswith(".js")}
    vendored = folder / VENDORED
    if vendored.exists():
        named = json.loads(vendored.read_text(encoding="utf-8"))["imports"]
        imports |= {name: imports[place] for name, place in named.items()}
    return imports


_QUOTED = re.compile(rb"""["'](#?[\w@][\w./@-]*)["']""")


def list_modules(contents: Mapping[str, bytes], imports: Mapping[str, str]) -> list[str]:
    """Return all modules that the entry module imports, directly or indirectly.

    With this list, the browser fetches all modules at once. Otherwise the browser would fetch one level of imports
    after the other.
    """
    by_path = {imports[f"#{name}"]: body for name, body in contents.items() if f"#{name}" in imports}
    found: dict[str, str] = {}
    waiting = [f"#{ENTRY}"]
    while waiting:
        path = imports[waiting.pop(0)]
        for quoted in _QUOTED.findall(by_path[path]):
            name = quoted.decode()
            if name in imports and imports[name] not in found:
                found[imports[name]] = name
                waiting.append(name)
    return [name for path, name in found.items() if path != imports[f"#{ENTRY}"]]
