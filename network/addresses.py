"""Addresses (destinations of messages) and thread ids. Only this module builds and parses them. It does no IO and has
no state.

    address      agent:ID     broadcast    channel:NAME    mod:ID
    thread id    direct:ID~ID (sorted)    broadcast    channel:NAME    mod:MOD~ID    thread:SEQ
                 direct:ID~ID:CONVERSATION                         mod:MOD~ID:CONVERSATION

A reply to a broadcast or to a channel message starts a thread, whose id contains the ``seq`` of the answered message.
Two participants, or a participant and a mod, may have several named conversations. Each conversation has its own
thread.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from .errors import InvalidFrame
from .frames import SEQ_LIMIT, is_id, plain_text
from .text import truncate

BROADCAST = "broadcast"
_KINDS = ("agent", "channel", "mod")
_SEQ_DIGITS = len(str(SEQ_LIMIT))


def agent_address(agent_id: str) -> str:
    return f"agent:{plain_text(agent_id)}"


def channel_address(name: str) -> str:
    """Return the address of a channel, which is also its thread id."""
    return f"channel:{plain_text(name)}"


def mod_address(mod: str) -> str:
    return f"mod:{plain_text(mod)}"


@lru_cache(maxsize=65536)
def parse_address(to: str) -> tuple[str, str]:
    """Split an address into its kind (``agent``, ``broadcast``, ``channel``, ``mod``) and its name. Raises
    `InvalidFrame`."""
    if to == BROADCAST:
        return BROADCAST, ""
    kind, colon, name = to.partition(":")
    if not colon or kind not in _KINDS or not is_id(name):
        raise InvalidFrame(
            f"{truncate(to, 80)!r} is not an address. Write agent:ID, channel:NAME, mod:ID or broadcast, with ids of "
            f"lower-case letters, digits, '.', '_', '-'."
        )
    return kind, name


def name_of(address: str) -> str:
    """Return the id or name in an address, or an empty text for ``broadcast``."""
    return address.partition(":")[2]


def complete_address(written: str) -> str:
    """Return the address for a user's input, which is an address or the id of a participant."""
    return written if ":" in written or written == BROADCAST else agent_address(written)


def short_address(to: str) -> str:
    """Return an address in the form that people read: participants are shown by id only."""
    return to.removeprefix("agent:")


@lru_cache(maxsize=4096)
def direct_thread(one: str, other: str, conversation: str = "") -> str:
    """Return the id of the direct thread of two participants: their sorted ids, and the name of the conversation, if
    any. If a participant sends a message to itself, both ids are the same."""
    # Sort the ids, so that both directions share one thread.
    pair = f"direct:{one}~{other}" if one <= other else f"direct:{other}~{one}"
    return f"{pair}:{conversation}" if conversation else pair


def mod_thread(mod: str, agent_id: str, conversation: str = "") -> str:
    return f"mod:{mod}~{agent_id}:{conversation}" if conversation else f"mod:{mod}~{agent_id}"


def reply_thread(seq: int) -> str:
    """Return the id of the thread that contains the replies to a channel message or a broadcast."""
    return f"thread:{seq}"


def memory_of(thread_id: str) -> str:
    """Return the id under which agents store their memories of a thread. A memory is a record that has this id instead
    of the id of a reaction. The id is a hash, because the id of the thread may be too long."""
    return f"memory-{hashlib.sha256(thread_id.encode()).hexdigest()[:32]}"


def write_address(to: str) -> str:
    """Return the address for a model's input, which is an address or the id of a participant, with or without ``@``."""
    return to if ":" in to or to == BROADCAST else agent_address(to.removeprefix("@"))


def thread_start(thread_id: str) -> int | None:
    """Return the seq of the message that began a reply thread, or None for other threads."""
    if not thread_id.startswith("thread:"):
        return None
    digits = thread_id[7:]
    # Accept only one spelling of each seq: ``thread:07`` or other Unicode digits would be a second name for a thread.
    is_seq = digits.isascii() and digits.isdecimal() and len(digits) <= _SEQ_DIGITS and digits[0] != "0"
    return int(digits) if is_seq else None


def answer_threads(kind: str, thread_id: str, seq: int) -> tuple[str, ...]:
    """Return the threads in which a message may be answered: first the message's own thread, then its reply thread if
    replies to it start a thread."""
    begins = kind in ("broadcast", "channel") and thread_start(thread_id) is None
    return (thread_id, reply_thread(seq)) if begins else (thread_id,)


def thread_parties(thread_id: str) -> tuple[str, str]:
    """Return the two participants of a direct thread, or the mod and the participant of a mod's thread. Other thread
    ids are not allowed."""
    one, _, other = name_of(thread_id).partition("~")
    if conversation := conversation_of(thread_id):
        other = other.removesuffix(f":{conversation}")
    return one, other


def conversation_of(thread_id: str) -> str:
    """Return the name of the conversation in the id of a direct thread or a mod's thread, or an empty text if the id
    names no conversation."""
    kind, _, rest = thread_id.partition(":")
    conversation = rest.partition(":")[2]
    return conversation if kind in ("direct", "mod") and is_id(conversation) else ""
