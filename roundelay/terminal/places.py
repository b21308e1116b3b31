"""The places of a conversation: where a person's plain lines go, and which of them an address or a thread names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from roundelay.network.addresses import agent_address, direct_thread, mod_address, mod_thread, thread_parties
from roundelay.network.client import NetworkClient
from roundelay.network.errors import InvalidArguments, UnknownRecipient
from roundelay.network.frames import is_id
from roundelay.terminal.screen import describe_place
from roundelay.terminal.text import clean


@dataclass(frozen=True, slots=True)
class Place:
    """Where plain lines go. In a reply thread they answer its newest message, which must be known."""

    to: str
    thread_id: str
    reply_to: int | None = None

    def describe(self) -> str:
        return describe_place(self.to, self.thread_id)


BROADCAST = Place("broadcast", "broadcast")


def check_recipient(written: str, known: Sequence[str]) -> None:
    """Raises `UnknownRecipient` where an id, or the address of one, is none of these, with one that it may be."""
    target = written.removeprefix("agent:")
    if ":" in target or written == BROADCAST.to or not is_id(target) or target in known:
        return
    close = get_close_matches(target, known, n=1)
    meant = f" Did you mean {clean(close[0])}?" if close else ""
    raise UnknownRecipient(f"Nobody is registered as {target!r}.{meant} `roundelay agents` lists who is.")


async def find_place(client: NetworkClient, written: str) -> Place:
    """The place that an address, the id of a thread or the bare id of a participant names; nothing is joined or sent.

    Raises `RoundelayError`: it names none, or the reply thread is not the person's.
    """
    kind, _, name = written.partition(":")
    me = client.agent_id
    if written == "broadcast":
        return BROADCAST
    if kind == "channel" and name:
        return Place(written, written)
    if kind == "direct" and me in thread_parties(written):
        one, other = thread_parties(written)
        return Place(agent_address(other if one == me else one), written)
    if kind == "mod" and name:
        mod, _ = thread_parties(written)
        return Place(mod_address(mod), mod_thread(mod, me))
    if kind == "thread":
        newest = (await client.history(written, limit=1)).messages[-1]
        return Place(newest.to, written, newest.seq)
    target = name if kind == "agent" else written
    if not is_id(target):
        raise InvalidArguments(
            f"{clean(written)!r} is no place; write an id, channel:NAME, broadcast, mod:ID or thread:SEQ."
        )
    return Place(agent_address(target), direct_thread(me, target))
