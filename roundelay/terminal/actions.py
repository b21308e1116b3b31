"""Actions of a person on any screen, except sending text: open an address, decide, take over, stop and resume.

Each function calls the hub, updates the screen's `LiveActivity`, and returns the sentence to show. Functions here draw
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from roundelay.connection import READER_ID
from roundelay.display.screen import format_time
from roundelay.display.text import sanitize
from roundelay.live_activity import LiveActivity, PendingRequest
from roundelay.network.client import AnyMessage, Event, NetworkClient, Notice, Presence, Stored
from roundelay.network.errors import InvalidArguments, RequestError
from roundelay.network.frames import is_id
from roundelay.runs.approvals import decide
from roundelay.runs.lists import list_channels
from roundelay.terminal.places import Place, check_recipient, find_place

_YES_OR_NO = {"yes": "approve", "ok": "approve", "okay": "approve", "no": "deny"}


async def watch(client: NetworkClient) -> None:
    """Subscribe this session to presence changes and signals."""
    await client.call("network.watch", {"presence": True, "signals": True})


def is_shown(event: Event, me: str) -> bool:
    """Return whether a screen shows an event.

    A screen hides events that its own person caused, events of the commands' reader, and events that a message also
    shows.
    """
    match event:
        case Notice(kind="taken" | "given", body={"agent_id": by}):
            return bool(by != me)
        case Notice(kind="loop_stopped", body={"began_by": by}):
            return bool(by != me)  # a message shows this event, also to people who were offline
        case Notice(kind="inbox" | "marked" | "members" | "mod"):
            return False  # such an event only means that data must be fetched again
        case Presence(agent_id=agent_id):
            return agent_id not in (me, READER_ID)
        case _:
            return True


async def check_place(client: NetworkClient, to: str, listed: Iterable[Mapping[str, Any]]) -> None:
    """Raise `UnknownRecipient` for an address that looks misspelled. ``listed`` contains the participants."""
    channels: list[str] = []
    with suppress(RequestError):  # the hub may have no channels
        channels = [str(it["name"]) for it in await list_channels(client)]
    # A misspelled name would create a channel, or address a participant that does not exist.
    check_recipient(to, [str(it["agent_id"]) for it in listed], channels)


async def enter_place(client: NetworkClient, to: str) -> tuple[Place, str]:
    """Return the destination (`Place`) for an address or a thread, and a sentence that reports a newly created channel.

    If the destination is a channel, the person joins it. Raises `RoundelayError`.
    """
    told = ""
    if to.startswith("channel:") and to != "channel:":
        name = to.removeprefix("channel:")
        if not is_id(name):
            raise InvalidArguments(
                f"{sanitize(name)!r} is not a channel name. Use lower-case letters, digits, '.', '_' and '-'."
            )
        if await client.join_channel(name):
            told = f"Created the channel {name}."
    return await find_place(client, to), told


def choose_request(word: str, waiting: Sequence[PendingRequest]) -> int:
    """Return the sequence number of the only request that waits for a decision. Raises `InvalidArguments` if there is
    not exactly one."""
    if len(waiting) == 1:
        return waiting[0].seq
    if not waiting:
        raise InvalidArguments(f"No call waits for your decision here. For an older one, write /{word} SEQ.")
    listed = ", ".join(f"#{it.seq} of {sanitize(it.agent_id)}" for it in waiting)
    raise InvalidArguments(f"Several calls wait for your decision: {listed}. Write /{word} SEQ with the number of one.")


def read_yes_or_no(under_way: LiveActivity, thread_id: str, text: str) -> tuple[str, int] | None:
    """Interpret a plain yes, ok or no as a decision. Return the decision and the sequence number of the request in this
    thread.

    Return None for any other text. Raises `InvalidArguments` if several requests wait.
    """
    # Accept only a line that contains nothing else: "no, wait" is a message.
    word = _YES_OR_NO.get(text.strip().rstrip(".!").lower())
    waiting = under_way.list_own_requests(thread_id)
    return (word, choose_request(word, waiting)) if word is not None and waiting else None


async def decide_request(
    client: NetworkClient,
    under_way: LiveActivity,
    seq: int,
    decision: str,
    on_sent: Callable[[AnyMessage, Stored], None] = lambda request, stored: None,
) -> tuple[AnyMessage, Stored]:
    """Decide on an agent's call. ``decision`` is ``/approve ...``, ``/deny ...`` or ``/edit ...``.

    Return the request and the stored decision. Raises `InvalidArguments` if the text is not a valid decision.
    """

    def sent(request: AnyMessage, stored: Stored) -> None:
        on_sent(request, stored)
        under_way.resolve_request(seq, stored.seq)

    return await decide(client, seq, decision, sent)


async def start_takeover(client: NetworkClient, under_way: LiveActivity, thread_id: str) -> str:
    taken = await client.call("network.take", {"thread_id": thread_id})
    # Apply the takeover now: until the hub's notice arrives, the prompt would show the agents as active.
    under_way.takeovers[thread_id] = client.agent_id
    under_way.notify()
    end = f", at the latest until {format_time(taken['until'])}" if "until" in taken else ""
    return f"You have taken over {sanitize(thread_id)}: agents are silent there until you /give it back{end}."


async def end_takeover(client: NetworkClient, under_way: LiveActivity, thread_id: str) -> str:
    await client.call("network.give", {"thread_id": thread_id})
    under_way.takeovers.pop(thread_id, None)
    under_way.notify()
    return f"You gave {sanitize(thread_id)} back: agents answer there again."


async def stop_work(client: NetworkClient, under_way: LiveActivity, thread_id: str) -> str:
    """Ask agents to stop their work in a thread. Return a sentence about the result."""
    stopped = (await client.call("network.cancel", {"thread_id": thread_id}))["reactions"]
    if stopped:
        count = "1 reaction" if len(stopped) == 1 else f"{len(stopped)} reactions"
        return f"Asked {count} in {sanitize(thread_id)} to stop."
    # Name the other threads, because people who see a working agent may not know its thread.
    elsewhere = sorted(under_way.list_busy_threads() - {thread_id})
    hint = f" Agents are at work in {', '.join(map(sanitize, elsewhere))}: /stop THREAD." if elsewhere else ""
    return f"Nobody is at work in {sanitize(thread_id)}.{hint}"


async def resume(client: NetworkClient, what: str) -> str:
    """Resume a stopped conversation by its root, or a stopped agent. Return a sentence about the result."""
    if what.isdecimal():
        told, more = f"The conversation that began with #{what}", "; it now gets the same budget again"
        resumed = await client.call("network.resume_root", {"root": int(what)})
    else:
        told, more = sanitize(what), ""
        resumed = await client.call("network.resume_agent", {"agent_id": what})
    was_stopped = resumed.get("was_stopped", True)  # an older hub does not return this field
    return f"{told} may go on." if was_stopped else f"{told} had not been stopped{more}."
