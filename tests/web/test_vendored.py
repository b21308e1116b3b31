"""Tests of the vendored libraries: they equal the published files, include their licenses, and import only each
other.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.support.vendoring import LIBRARIES, Library

FOLDER = Path(__file__).parents[2] / "web" / "page" / "vendor"
TABLE = json.loads((FOLDER / "vendored.json").read_text(encoding="utf-8"))
PERMISSIVE = {"MIT": "Permission is hereby granted, free of charge", "Apache-2.0": "Apache License\n"}
_IMPORT = re.compile(r"""\b(?:from|import)\s*\(?\s*["']([^"']+)["']""")


def digest(file: str) -> str:
    return hashlib.sha256((FOLDER / file).read_bytes()).hexdigest()


def test_the_folder_holds_what_the_table_names_and_nothing_else() -> None:
    named = {"vendored.json", *TABLE["files"], *(it["license_file"] for it in TABLE["files"].values())}
    assert {it.relative_to(FOLDER).as_posix() for it in FOLDER.rglob("*") if it.is_file()} == named
    assert set(TABLE["files"]) == {it.file for it in LIBRARIES}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda it: it.file)
def test_a_library_is_unchanged_and_has_its_licence(library: Library) -> None:
    row = TABLE["files"][library.file]
    assert (digest(library.file), digest(row["license_file"])) == (row["sha256"], row["license_sha256"])
    assert PERMISSIVE[row["license"]] in (FOLDER / row["license_file"]).read_text(encoding="utf-8")


def test_the_libraries_are_small() -> None:
    assert sum((FOLDER / file).stat().st_size for file in TABLE["files"]) < 120_000


@pytest.mark.parametrize("file", sorted(TABLE["files"]))
def test_a_library_imports_what_the_import_map_has(file: str) -> None:
    imported = set(_IMPORT.findall((FOLDER / file).read_text(encoding="utf-8")))
    assert imported <= set(TABLE["imports"])
    assert {it.removeprefix("#vendor/") for it in TABLE["imports"].values()} <= set(TABLE["files"])
