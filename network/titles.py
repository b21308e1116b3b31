"""Titles of threads for the web page, the terminal UI and lists. The hub computes titles for `network.list_threads`.

A title contains the thread's participants or channel, and its first words: ``desk · Can you refund order 17?``. A
person's own name for the thread replaces the first words, but never the agent's name. web/page/core/text.js implements
the same rule in JavaScript. This module does no IO.
"""

from __future__ import annotations

from .addresses import BROADCAST, conversation_of, thread_parties

MAX_WORDS_CHARS = 60
"""Maximum length of the first words in a title, in characters."""


def name_place(thread_id: str, me: str) -> str:
    """Return the first part of a thread's title for a reader: the other participants, ``#dev``, or ``Everybody``."""
    kind, _, name = thread_id.partition(":")
    match kind:
        case "direct":
            return " and ".join(name for name in dict.fromkeys(thread_parties(thread_id)) if name and name != me) or me
        case "channel":
            return f"#{name}"
        case "mod":
            mod_id = thread_parties(thread_id)[0]
            return "From the network" if mod_id == "network" else f"From the mod {mod_id}"
        case "thread":
            return f"Replies to #{name}"
    return "Everybody" if thread_id == BROADCAST else thread_id


def write_title(place_name: str, words: str, own: str = "") -> str:
    """Return the title of a thread: ``place_name``, followed by the person's ``own`` name for the thread or else by the
    first ``words`` of the thread."""
    about = own or shorten(words)
    if not about:
        return place_name
    if own and place_name.lower() in own.lower():
        return own
    return f"{place_name} · {about}"


def shorten(text: str) -> str:
    """Return the first words of a text on one line."""
    # Cut the text first: a message may be megabytes long, and a title needs only its beginning.
    line = " ".join(text[: 4 * MAX_WORDS_CHARS].split())
    if len(line) <= MAX_WORDS_CHARS:
        return line
    cut = line[:MAX_WORDS_CHARS].rsplit(" ", 1)[0] if " " in line[:MAX_WORDS_CHARS] else line[: MAX_WORDS_CHARS - 1]
    return f"{cut.rstrip(' ,;:.')}…"


def is_about_something(thread_id: str, *, has_agent: bool) -> bool:
    """Return whether the title of a thread includes the thread's first words. True for replies, named conversations and
    direct threads with an agent. Channels and direct threads between two people cover many subjects."""
    return thread_id.startswith("thread:") or (
        thread_id.startswith("direct:") and (has_agent or bool(conversation_of(thread_id)))
    )
