"""Titles of threads: one rule for the page, the terminals and lists. The hub computes them for `network.list_threads`.

A title says where a thread is, and what it is about: ``desk · Can you refund order 17?``. A person's own name for the
thread takes the place of the words, never of the agent's name. Pure; the page has a twin in web/page/core/text.js.
"""

from __future__ import annotations

from .addresses import BROADCAST, conversation_of, thread_parties

MAX_WORDS_CHARS = 60
"""Maximum length of the first words in a title."""


def name_place(thread_id: str, me: str) -> str:
    """Name the place of a thread for its reader: the other participants, ``#dev``, ``Everybody``."""
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
    """Put a title together: the place, and a person's ``own`` name for it or else the first ``words``."""
    about = own or shorten(words)
    if not about:
        return place_name
    if own and place_name.lower() in own.lower():
        return own
    return f"{place_name} · {about}"


def shorten(text: str) -> str:
    """Give the first words of a text as one line."""
    line = " ".join(text[: 4 * MAX_WORDS_CHARS].split())
    if len(line) <= MAX_WORDS_CHARS:
        return line
    cut = line[:MAX_WORDS_CHARS].rsplit(" ", 1)[0] if " " in line[:MAX_WORDS_CHARS] else line[: MAX_WORDS_CHARS - 1]
    return f"{cut.rstrip(' ,;:.')}…"


def is_about_something(thread_id: str, *, has_agent: bool) -> bool:
    """Return whether the first words of a thread belong into its title: for replies, named conversations, and direct
    threads with an agent. Channels, and direct threads of two people, have many subjects."""
    return thread_id.startswith("thread:") or (
        thread_id.startswith("direct:") and (has_agent or bool(conversation_of(thread_id)))
    )
