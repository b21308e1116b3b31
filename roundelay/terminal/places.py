"""Destinations of a person's typed lines (`Place`), with their addresses and thread ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from roundelay.display.screen import describe_place
from roundelay.display.text import sanitize
from roundelay.network.addresses import (
    agent_address,
    conversation_of,
    direct_thread,
    mod_address,
    mod_thread,
    thread_parties,
)
from roundelay.network.client import NetworkClient
from roundelay.network.errors import InvalidArguments, UnknownRecipient
from roundelay.network.frames import is_id


@dataclass(frozen=True, slots=True)
class Place:
    """Destination of typed lines. In a reply thread, a line answers the newest message (``reply_to``)."""

    to: str
    thread_id: str
    reply_to: int | None = None

    @property
    def conversation(self) -> str | None:
        """Name of the conversation, if the person has several conversations with a participant."""
        # For a mod's thread, the message does not name the conversation, because the parent of the reply determines it.
        return (conversation_of(self.thread_id) or None) if self.thread_id.startswith("direct:") else None

    def describe(self) -> str:
        return describe_place(self.to, self.thread_id)


BROADCAST = Place("broadcast", "broadcast")


def check_recipient(written: str, known: Sequence[str], channels: Sequence[str] = ()) -> None:
    """Raise `UnknownRecipient` for an unknown id, or for a new channel whose name is similar to an existing channel.

    The error suggests the closest name.
    """
    kind, _, name = written.rpartition(":")
    # Skip a text that is not an id, because `find_place` raises a separate error for it.
    if not is_id(name) or written == BROADCAST.to:
        return
    if kind == "channel" and name not in channels and (close := get_close_matches(name, channels, n=1)):
        meant = f"Did you mean channel:{sanitize(close[0])}?"
        raise UnknownRecipient(f"There is no channel {name!r}. {meant} /create {name} makes a new one.")
    if kind in ("", "agent") and name not in known:
        # A person who writes only the name of a channel most likely means that channel.
        near = [f"channel:{name}"] if name in channels else get_close_matches(name, known, n=1)
        meant = f" Did you mean {sanitize(near[0])}?" if near else ""
        raise UnknownRecipient(
            f"Nobody is registered as {name!r}.{meant} `roundelay agents` lists the registered participants."
        )


async def find_place(client: NetworkClient, written: str) -> Place:
    """Return the destination (`Place`) for an address, a thread id or a participant's id. This sends nothing and joins
    no channel.

    Raises `RoundelayError` if no destination has this name, or for a reply thread that the person may not read.
    """
    kind, _, name = written.partition(":")
    me = client.agent_id
    if written == "broadcast":
        return BROADCAST
    if kind == "channel" and name:
        return Place(written, written)
    if kind == "direct" and me in thread_parties(written):
        one, other = thread_parties(written)
        named = other if one == me else one
        return Place(agent_address(named), direct_thread(me, named, conversation_of(written)))
    if kind == "mod" and name:
        mod, _ = thread_parties(written)
        thread_id = mod_thread(mod, me, conversation_of(written))
        if conversation_of(thread_id):
            newest = (await client.history(thread_id, limit=1)).messages[-1]
            return Place(mod_address(mod), thread_id, newest.seq)
        return Place(mod_address(mod), thread_id)
    if kind == "thread":
        # A reply needs a message to answer, and is sent to the address of the thread.
        newest = (await client.history(written, limit=1)).messages[-1]
        return Place(newest.to, written, newest.seq)
    target = name if kind == "agent" else written
    if not is_id(target):
        raise InvalidArguments(
            f"{sanitize(written)!r} is not a place. Write an id, channel:NAME, broadcast, mod:ID or thread:SEQ."
        )
    return Place(agent_address(target), direct_thread(me, target))
