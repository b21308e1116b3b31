"""Read the pages of the documentation."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def read_pages(name: str) -> str:
    """Return the page ``docs/NAME.md`` and the pages of the folder ``docs/NAME``, as one text."""
    return "\n".join(
        page.read_text(encoding="utf-8") for page in (DOCS / f"{name}.md", *sorted(DOCS.glob(f"{name}/*.md")))
    )
