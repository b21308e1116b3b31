"""The librarian's tool: a typed function. A model reads its docstring and annotations."""

import re
from typing import Annotated

from pydantic import Field

from roundelay import tool

SHELF = {
    "Mrs Dalloway": "Virginia Woolf",
    "To the Lighthouse": "Virginia Woolf",
    "The Left Hand of Darkness": "Ursula K. Le Guin",
    "Invisible Cities": "Italo Calvino",
}


@tool(idempotent=True)  # a restarted agent may repeat the call
def find_books(words: Annotated[str, Field(description="Words of the title or of the author's name")]) -> str:
    """Find books on the shelf."""
    wanted = {word for word in re.findall(r"\w+", words.lower()) if len(word) > 3}
    found = [
        f"{title} by {author}" for title, author in SHELF.items() if wanted & set(f"{title} {author}".lower().split())
    ]
    return "; ".join(found) or "nothing on the shelf fits"
