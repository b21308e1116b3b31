"""The tests that docs/security.md names exist. tests/examples/test_documents.py checks its links."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.pages import read_pages

ROOT = Path(__file__).parents[2]
PAGE = read_pages("security")


def test_every_test_that_it_names_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
