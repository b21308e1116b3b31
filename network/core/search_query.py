"""Parser for search queries. A query contains words, and filters for the sender and the time.

A word in a query matches all words that begin with its stem: ``teapot`` finds ``teapots``, and ``teapots`` finds
``teapot``. Numbers, words of one or two letters, and quoted words match exactly. The filters ``from:ID``,
``after:DATE`` and ``before:DATE`` select messages by sender and by time (UTC). web/page/core/query.js implements the
same rules in JavaScript. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

MIN_STEM_CHARS = 4
"""Minimum number of characters that must remain when an ending is removed from a word. For the ending ``s``, one
character less is enough."""
_PART = re.compile(r'"([^"]*)"|(\S+)')
_FILTER = re.compile(r"(from|before|after):(\S+)", re.IGNORECASE)
_ENDINGS = ("ings", "ing", "ies", "ed", "es", "s")


class Query(NamedTuple):
    """Parsed search query. ``terms`` are words. A term that ends in ``*`` matches every word that begins with the text
    before the ``*``. Times are in ms. ``wrong`` is a filter with an invalid date, or None."""

    terms: list[str]
    sender_id: str | None = None
    said_after: int | None = None
    said_before: int | None = None
    wrong: str | None = None


def read_query(text: str, list_words: Callable[[str], list[str]]) -> Query:
    """Parse a user's search query. ``list_words`` splits a text into words exactly as the search index does."""
    terms: dict[str, None] = {}
    query = Query([])
    for quoted, part in _PART.findall(text):
        chosen = _FILTER.fullmatch(part)
        if chosen is not None:
            query = _choose(query, chosen[1].lower(), chosen[2])
        elif quoted or not part:
            terms |= dict.fromkeys(list_words(quoted))
        else:
            words = list_words(part)
            stems = [stem(word) for word in words]
            if words and part.endswith("*"):
                stems[-1] = f"{words[-1]}*"
            terms |= dict.fromkeys(stems)
    return query._replace(terms=list(terms))


def stem(word: str) -> str:
    """Return a search term that finds a word and its other forms, such as the plural."""
    if len(word) < 3 or not word.isalpha() or any("\u3040" <= char <= "\u9fff" for char in word):
        return word
    ending = next((suffix for suffix in _ENDINGS if word.endswith(suffix)), "") if word.isascii() else ""
    kept = word.removesuffix(ending)
    if ending in ("ing", "ings", "ed") and kept[-2:-1] == kept[-1:] and kept[-1:] not in "lsz":
        kept = kept[:-1]  # running, run
    is_kept = ending and len(kept) >= MIN_STEM_CHARS - (ending == "s") and not kept.endswith(("s", "e", "u", "i"))
    return f"{kept}*" if is_kept else f"{word}*"


def _choose(query: Query, name: str, value: str) -> Query:
    if name == "from":
        return query._replace(sender_id=value.lower().removeprefix("@").removeprefix("agent:"))
    at = read_date(value)
    if at is None:
        return query._replace(wrong=f"{name}:{value}")
    return query._replace(said_after=at) if name == "after" else query._replace(said_before=at)


def read_date(text: str) -> int | None:
    """Return the time in ms of a date, or of a date with a time, in UTC. Return None if the text is neither."""
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2})?)?", text) is None:
        return None
    try:
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)
    except ValueError:
        return None


def is_chosen(query: Query, sender_id: str, at: int) -> bool:
    """Return whether a message matches the query's filters for sender and time."""
    return (
        query.sender_id in (None, sender_id)
        and (query.said_after is None or at >= query.said_after)
        and (query.said_before is None or at < query.said_before)
    )
