"""Tests that the network code never reads time or chance directly. Time and chance are arguments, because replay and
simulation depend on them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {"random", "secrets", "time", "uuid", "now()", "today()", "utcnow()"}
# Modules that provide time and chance, or whose values are neither stored nor sent.
ALLOWED = {
    "network/clock.py": {"secrets", "time"},
    "network/platforms.py": {"time"},  # the time since the start of the machine or process
    "network/core/joining.py": {"secrets"},  # the hub creates tokens once and stores them
    "network/client/client.py": {"random"},  # the default of `jitter`
    "network/hub/batch_writer.py": {"time"},  # the duration of a commit, for the metrics
    "agents/models/provider_errors.py": {"time"},  # a provider's date in `retry-after`
    "agents/models/local.py": {"secrets"},  # the key of a server on this machine
}
FILES = [path.relative_to(ROOT) for it in ("network", "agents", "mods") for path in sorted((ROOT / it).rglob("*.py"))]


def find_sources(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            yield f"{node.func.attr}()"  # datetime.now() and similar; datetime.fromtimestamp(...) only converts


def test_files_read_no_time_and_no_chance() -> None:
    found = {str(file): SOURCES.intersection(find_sources((ROOT / file).read_text(encoding="utf-8"))) for file in FILES}
    assert {file: it for file, it in found.items() if not it <= ALLOWED.get(file, set())} == {}


def test_a_source_would_be_found() -> None:
    source = "import time as t\nfrom random import random\nfrom .time import x\nday = datetime.now()"
    assert SOURCES.intersection(find_sources(source)) == {"time", "random", "now()"}
