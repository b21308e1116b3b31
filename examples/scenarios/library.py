"""The researchers' tool: a library with two books."""

from roundelay import tool

BOOKS = {"bees": "Bees live on nectar and pollen.", "ants": "Ants live on seeds, fungi and honeydew."}


@tool(idempotent=True)
def look_up(subject: str) -> str:
    """Look a subject up in the library."""
    return BOOKS[subject]
