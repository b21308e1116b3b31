"""Tests of docs/api.md: it matches the docstrings, and describes every name that the documents import."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.api_page import write_page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")


APART = {f"roundelay.adapters.{name}" for name in ("agentscope", "autogen", "openai_agents")}
"""Modules whose frameworks are not installed where the page is generated. docs/adapters.md describes them."""


def test_the_page_is_what_the_docstrings_say() -> None:
    assert write_page() == PAGE, "run: python -m tests.support.api_page > docs/api.md"


def find_imports() -> set[str]:
    """Return the names that the documents and the examples import from Roundelay."""
    sources = [it.read_text(encoding="utf-8") for it in (ROOT / "examples").rglob("*.py")]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        if page.name != "api.md":
            sources += re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    return {
        f"{node.module} {it.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("roundelay") and node.module not in APART
        for it in node.names
    }


@pytest.mark.parametrize("wanted", sorted(find_imports()))
def test_what_the_documents_import_is_described(wanted: str) -> None:
    module, name = wanted.split()
    section = PAGE.partition(f"\n## {module}\n")[2].partition("\n## ")[0]
    assert re.search(rf"^### {name}$|And .*`{name}` of \[", section, re.MULTILINE), f"`from {module} import {name}`"


def test_every_class_and_function_says_what_it_is() -> None:
    entries = re.findall(r"^### (\w+)\n\n(.*?)(?=\n##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert len(entries) > 150
    silent = [
        name for name, text in entries if not re.search(r"^[^-`\s]|`[A-Z]\w* = |^`\w+` (?!=)", text, re.MULTILINE)
    ]
    assert silent == []
