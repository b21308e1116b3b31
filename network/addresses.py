"""Addresses, where a message goes, and thread ids, where it stands: made and taken apart here and nowhere else.

    address      agent:ID     broadcast    channel:NAME    mod:ID
    thread id    direct:ID~ID (sorted)    broadcast    channel:NAME    mod:MOD~ID    thread:SEQ
                 direct:ID~ID:CONVERSATION

A reply in a place of many begins a thread of its own, named by the ``seq`` of the message that is replied to. Two who
write to each other may name conversations, each a thread of its own. No IO, no state.
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
    """The address of a channel, which is also the id of its thread."""
    return f"channel:{plain_text(name)}"


def mod_address(mod: str) -> str:
    return f"mod:{plain_text(mod)}"


@lru_cache(maxsize=65536)
def parse_address(to: str) -> tuple[str, str]:
    """Split an address into its kind (``agent``, ``broadcast``, ``channel``, ``mod``) and name. Raises
    `InvalidFrame`."""
    if to == BROADCAST:
        return BROADCAST, ""
    kind, colon, name = to.partition(":")
    if not colon or kind not in _KINDS or not is_id(name):
        raise InvalidFrame(
            f"{truncate(to, 80)!r} is no address; write agent:ID, channel:NAME, mod:ID or broadcast, ids in lower case letters, "
            f"digits, '.', '_', '-'."
        )
    return kind, name


def name_of(address: str) -> str:
    """The id or name in an address; empty for ``broadcast``."""
    return address.partition(":")[2]


def complete_address(written: str) -> str:
    """The address that somebody means who writes an address, or the id of a participant alone."""
    return written if ":" in written or written == BROADCAST else agent_address(written)


def short_address(to: str) -> str:
    """An address as people read it: a participant by its id alone."""
    return to.removeprefix("agent:")


@lru_cache(maxsize=4096)
def direct_thread(one: str, other: str, conversation: str = "") -> str:
    """The thread of two participants: their ids sorted (one id twice, when somebody writes to itself), and the name of
    the conversation, if it has one."""
    pair = f"direct:{one}~{other}" if one <= other else f"direct:{other}~{one}"
    return f"{pair}:{conversation}" if conversation else pair


def mod_thread(mod: str, agent_id: str) -> str:
    return f"mod:{mod}~{agent_id}"


def reply_thread(seq: int) -> str:
    """The thread that the replies to a message in a place of many make."""
    return f"thread:{seq}"


def memory_of(thread_id: str) -> str:
    """The id under which each agent keeps what it remembers of a thread, in place of a reaction's: as a thread's may be
    too long for one."""
    return f"memory-{hashlib.sha256(thread_id.encode()).hexdigest()[:32]}"


def thread_start(thread_id: str) -> int | None:
    """The seq of the message that a reply thread began with; None for other threads, and for what is the id of none."""
    if not thread_id.startswith("thread:"):
        return None
    digits = thread_id[7:]
    is_seq = digits.isascii() and digits.isdecimal() and len(digits) <= _SEQ_DIGITS and digits[0] != "0"
    return int(digits) if is_seq else None


def answer_threads(kind: str, thread_id: str, seq: int) -> tuple[str, ...]:
    """The threads in which a message may be answered: its own, and last the one that replies to it begin, if they
    do."""
    begins = kind in ("broadcast", "channel") and thread_start(thread_id) is None
    return (thread_id, reply_thread(seq)) if begins else (thread_id,)


def thread_parties(thread_id: str) -> tuple[str, str]:
    """The two ids in the id of a direct thread, or the mod and the participant in that of a mod's. Of what is the id of
    none they may be anything."""
    one, _, other = name_of(thread_id).partition("~")
    if conversation := conversation_of(thread_id):
        other = other.removesuffix(f":{conversation}")
    return one, other


def conversation_of(thread_id: str) -> str:
    """The conversation in the id of a direct thread; empty for one without, and for other threads."""
    kind, _, rest = thread_id.partition(":")
    conversation = rest.partition(":")[2]
    return conversation if kind == "direct" and is_id(conversation) else ""
