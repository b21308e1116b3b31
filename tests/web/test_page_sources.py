"""Tests of the page's own modules: imports go one way, and each export is used."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from roundelay.web import site

PAGE = site.FOLDER
BARE: dict[str, str] = json.loads((PAGE / site.VENDORED).read_text(encoding="utf-8"))["imports"]
SOURCES = {it.relative_to(PAGE).as_posix(): it.read_text(encoding="utf-8") for it in PAGE.glob("*/*.js")}
OWN = {name: text for name, text in SOURCES.items() if name.startswith(("core/", "ui/"))}
TESTS = "".join(
    it.read_text(encoding="utf-8") for it in Path(__file__).parents[1].rglob("*") if it.suffix in {".js", ".py"}
)

_IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*\(?\s*["']([^"']+)["']""")
_EXPORT = re.compile(r"^export (?:async )?(?:const|function\*?|class) (\w+)", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/|(?<![:\\])//[^\n]*", re.DOTALL)
_OF_BROWSERS = re.compile(
    r"(?<![\w.$])(document|window|navigator|location|history|localStorage|sessionStorage)\s*[.\[]"
)


def list_imports(name: str) -> list[str]:
    return _IMPORT.findall(_COMMENT.sub("", OWN[name]))


def test_core_imports_core_alone_and_knows_no_document() -> None:
    for name in (it for it in OWN if it.startswith("core/")):
        assert [it for it in list_imports(name) if not it.startswith("#core/")] == [], name
        assert _OF_BROWSERS.findall(_COMMENT.sub("", OWN[name])) == [], name


def test_no_module_is_imported_by_what_it_imports() -> None:
    waiting = {name: {it[1:] for it in list_imports(name) if it[1:] in OWN} for name in OWN}
    while free := [name for name, needed in waiting.items() if not needed & set(waiting)]:
        for name in free:
            del waiting[name]
    assert not waiting, "these import each other, or what does"


def test_each_export_is_used_by_another_module_or_a_test() -> None:
    # Collect the words of each text once: a search of all tests for each export took fourteen seconds.
    words = {name: set(re.findall(r"[\w$]+", text)) for name, text in OWN.items()}
    in_tests = set(re.findall(r"[\w$]+", TESTS))
    uses = Counter(word for found in words.values() for word in found)
    for name, text in OWN.items():
        unused = [export for export in _EXPORT.findall(text) if export not in in_tests and uses[export] < 2]
        assert unused == [], name


def test_each_library_is_imported_by_what_the_page_begins_with() -> None:
    contents = site.read_contents(site.FOLDER)
    modules = site.list_modules(contents, site.list_imports(site.FOLDER, {name: name for name in contents}))
    assert {f"#{it}" for it in contents if it.startswith("vendor/")} <= {BARE.get(it, it) for it in modules}
