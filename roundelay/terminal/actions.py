"""What a person does in a conversation beside sending a text, for each screen at which one may sit: going to a place,
deciding, taking over, stopping, letting go on; and which news such a screen tells.

A function does one thing at the hub, keeps what follows from it in the `LiveActivity` of the screen, and gives the sentence
that tells it. Nothing is drawn here.
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
    """Be told of presence and signals, in this session."""
    await client.call("network.watch", {"presence": True, "signals": True})


def is_shown(event: Event, me: str) -> bool:
    """Whether a screen tells an event: not what its person has done there, nor the commands' own reader, nor what a
    message tells too."""
    match event:
        case Notice(kind="taken" | "given", body={"agent_id": by}):
            return bool(by != me)
        case Notice(kind="loop_stopped", body={"began_by": by}):
            return bool(by != me)  # a message tells of it, here and to who was away
        case Notice(kind="inbox" | "marked" | "members"):
            return False  # they say what to fetch again
        case Presence(agent_id=agent_id):
            return agent_id not in (me, READER_ID)
        case _:
            return True


async def check_place(client: NetworkClient, to: str, listed: Iterable[Mapping[str, Any]]) -> None:
    """Raises `UnknownRecipient` for a place that looks like a misspelled one; ``listed`` are the participants."""
    channels: list[str] = []
    with suppress(RequestError):  # a hub without channels
        channels = [str(it["name"]) for it in await list_channels(client)]
    check_recipient(to, [str(it["agent_id"]) for it in listed], channels)


async def enter_place(client: NetworkClient, to: str) -> tuple[Place, str]:
    """Give the place that an address or a thread names; a channel is joined, or made, which the sentence then says.
    Raises `RoundelayError`."""
    told = ""
    if to.startswith("channel:") and to != "channel:":
        name = to.removeprefix("channel:")
        if not is_id(name):
            raise InvalidArguments(
                f"{sanitize(name)!r} is no channel's name; use lower case letters, digits, '.', '_' and '-'."
            )
        if await client.join_channel(name):
            told = f"Created the channel {name}."
    return await find_place(client, to), told


def choose_request(word: str, waiting: Sequence[PendingRequest]) -> int:
    """The seq of the one request that waits for a decision. Raises `InvalidArguments` where none does, or several."""
    if len(waiting) == 1:
        return waiting[0].seq
    if not waiting:
        raise InvalidArguments(
            f"No call waits for your decision that is known here; write /{word} SEQ for an older one."
        )
    listed = ", ".join(f"#{it.seq} of {sanitize(it.agent_id)}" for it in waiting)
    raise InvalidArguments(f"Several calls wait for your decision: {listed}. Write /{word} SEQ with the number of one.")


def read_yes_or_no(under_way: LiveActivity, thread_id: str, text: str) -> tuple[str, int] | None:
    """What a plain yes, ok or no decides where a call waits for one in this thread, and its seq; None for a text like any
    other. Raises `InvalidArguments` where several wait."""
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
    """Answer an agent that asks whether it may make a call: ``decision`` is ``/approve ...``, ``/deny ...`` or ``/edit
    ...``. Return the request, and where the decision stands. Raises `InvalidArguments` where it decides nothing."""

    def sent(request: AnyMessage, stored: Stored) -> None:
        on_sent(request, stored)
        under_way.resolve_request(seq, stored.seq)

    return await decide(client, seq, decision, sent)


async def start_takeover(client: NetworkClient, under_way: LiveActivity, thread_id: str) -> str:
    taken = await client.call("network.take", {"thread_id": thread_id})
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
    """Ask agents to stop what they do in a thread."""
    stopped = (await client.call("network.cancel", {"thread_id": thread_id}))["reactions"]
    if stopped:
        count = "1 reaction" if len(stopped) == 1 else f"{len(stopped)} reactions"
        return f"Asked {count} in {sanitize(thread_id)} to stop."
    elsewhere = sorted(under_way.list_busy_threads() - {thread_id})
    hint = f" Agents are at work in {', '.join(map(sanitize, elsewhere))}: /stop THREAD." if elsewhere else ""
    return f"Nobody is at work in {sanitize(thread_id)}.{hint}"


async def resume(client: NetworkClient, what: str) -> str:
    """Let the conversation that began with a seq go on, or an agent that was stopped."""
    if what.isdecimal():
        told, more = f"The conversation that began with #{what}", "; it may now be as long once more"
        resumed = await client.call("network.resume_root", {"root": int(what)})
    else:
        told, more = sanitize(what), ""
        resumed = await client.call("network.resume_agent", {"agent_id": what})
    was_stopped = resumed.get("was_stopped", True)  # a hub from before says nothing of it
    return f"{told} may go on." if was_stopped else f"{told} had not been stopped{more}."
