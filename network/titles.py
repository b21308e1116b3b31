"""Titles of threads: one rule for the web page, the terminals and lists. The hub computes titles for
`network.list_threads`.

A title says where a thread is, and what it is about: ``desk · Can you refund order 17?``. A person's own name for the
thread replaces the first words, but never the agent's name. Pure. web/page/core/text.js implements the same rule in
JavaScript.
"""

from __future__ import annotations

from .addresses import BROADCAST, conversation_of, thread_parties

MAX_WORDS_CHARS = 60
"""Maximum length of the first words in a title, in characters."""


def name_place(thread_id: str, me: str) -> str:
    """Return the name of a thread's place for a reader: the other participants, ``#dev``, or ``Everybody``."""
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
    """Return the title: the place, followed by the person's ``own`` name for the thread or else the first ``words``."""
    about = own or shorten(words)
    if not about:
        return place_name
    if own and place_name.lower() in own.lower():
        return own
    return f"{place_name} · {about}"


def shorten(text: str) -> str:
    """Return the first words of a text on one line."""
    # Cut first: a message may have megabytes, and a title needs its beginning.
    line = " ".join(text[: 4 * MAX_WORDS_CHARS].split())
    if len(line) <= MAX_WORDS_CHARS:
        return line
    cut = line[:MAX_WORDS_CHARS].rsplit(" ", 1)[0] if " " in line[:MAX_WORDS_CHARS] else line[: MAX_WORDS_CHARS - 1]
    return f"{cut.rstrip(' ,;:.')}…"


def is_about_something(thread_id: str, *, has_agent: bool) -> bool:
    """Return whether the title of a thread includes its first words. True for replies, named conversations, and direct
    threads with an agent. Channels and direct threads of two people have many subjects."""
    return thread_id.startswith("thread:") or (
        thread_id.startswith("direct:") and (has_agent or bool(conversation_of(thread_id)))
    )
