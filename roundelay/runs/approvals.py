"""Calls that wait for a person's decision, as people meet them: what waits, in words, and deciding it once.

What waits is the hub's to say (``network.approvals``); a decision is a reply to the message that asks, by somebody who
reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from pydantic_core import from_json

from roundelay.agents.approvals import read_request
from roundelay.agents.inbox import read_decision
from roundelay.network.client import AnyMessage, NetworkClient, Stored
from roundelay.network.errors import InvalidArguments
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.runs.lists import list_approvals
from roundelay.terminal.text import clean

LOOKED_THROUGH = 200
"""Messages, the newest of the request's thread, in which its decision is looked for."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A call that waits for a person's decision, until a time in milliseconds since the Unix epoch."""

    message: AnyMessage
    reaction: str
    until: int
    may_decide: bool

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self:
        return cls(message_from_wire(entry["message"]), entry["reaction"], entry["until"], entry["may_decide"])

    @property
    def seq(self) -> int:
        return self.message.seq

    def to_json(self) -> dict[str, object]:
        """For programs; times in milliseconds since the Unix epoch. ``arguments`` are what the model wrote as JSON, or
        its text where that is none."""
        it = self.message
        where = {"agent_id": it.sender_id, "thread_id": it.thread_id, "reaction": self.reaction}
        when = {"asked_at": it.sent_at, "until": self.until}
        told = read_told(it)
        call = {**told, "arguments": _read_json(told["arguments"])}
        return {"seq": it.seq, **where, **call, **when, "may_decide": self.may_decide}

    def describe(self) -> str:
        """Who asks for what, and where: in a line."""
        told = read_told(self.message)
        why = f" ({clean(told['reason'])})" if told["reason"] else ""
        call = f"call {clean(told['tool'])} with {clean(told['arguments'])}{why}"
        return f"#{self.seq} {clean(self.message.sender_id)} asks to {call}, in {clean(self.message.thread_id)}"


def read_told(request: BaseMessage) -> dict[str, str]:
    """What a request says of its call: ``tool``, ``arguments`` and ``reason``, empty where it says nothing."""
    told = (request.metadata or {}).get("approval")
    found = told if isinstance(told, dict) else {}
    return {name: it if isinstance(it := found.get(name), str) else "" for name in ("tool", "arguments", "reason")}


def _read_json(text: str) -> object:
    """What JSON holds; the text itself where it is none, or is nested or has a number beyond what can be shown."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def read_until(request: BaseMessage) -> int | None:
    """Until when a request says that it waits, in milliseconds since the Unix epoch."""
    told = (request.metadata or {}).get("approval")
    timeout_s = told.get("timeout_s") if isinstance(told, dict) else None
    if not isinstance(timeout_s, int | float) or not math.isfinite(timeout_s):
        return None
    return request.sent_at + int(timeout_s * 1000)


def format_until(until: int) -> str:
    """A time on this machine's clock, with its day; "for ever" for one that no calendar has."""
    try:
        return f"{datetime.fromtimestamp(until / 1000, UTC).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "the end of time"


async def list_requests(client: NetworkClient) -> list[WaitingRequest]:
    """What waits for somebody's decision, as far as the client may read it, the oldest first. Raises
    `RoundelayError`."""
    return [WaitingRequest.read(it) for it in await list_approvals(client)]


async def find_message(client: NetworkClient, seq: int) -> AnyMessage:
    return message_from_wire((await client.call("network.why", {"seq": seq}))["chain"][0])


async def decide(
    client: NetworkClient,
    seq: int,
    decision: str,
    on_sent: Callable[[AnyMessage, Stored], None] = lambda request, stored: None,
) -> tuple[AnyMessage, Stored]:
    """Send a decision on a request; gives the request, and the decision as it is stored: ``on_sent`` has them at once.
    Raises `InvalidArguments`, and
    has sent nothing, where it would decide nothing; and where somebody else was faster."""
    request = await find_message(client, seq)
    if read_request(request) is None:
        raise InvalidArguments(f"#{seq} asks for no approval, so nothing was sent; /reply {seq} answers it.")
    listed = {it.seq: it for it in await list_requests(client)}
    if why := await _find_settled(client, request, is_waiting=seq in listed):
        raise InvalidArguments(f"#{seq} {why}, so nothing was sent.")
    if seq in listed and not listed[seq].may_decide:
        reader = f"a person who reads {clean(request.thread_id)}, which {clean(client.agent_id)} does not"
        raise InvalidArguments(f"#{seq} is decided by {reader}, so nothing was sent.")
    stored = await client.reply(request, decision)
    on_sent(request, stored)
    first = next((it for it in await _list_decisions(client, request) if not _is_edit(it)), None)
    if first is not None and first.seq < stored.seq:
        raise InvalidArguments(f"#{seq} {_describe_decision(first)}, before yours was there: that one holds.")
    return request, stored


def check_arguments(text: str) -> None:
    """Raises `InvalidArguments` for what can be no arguments of a call."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        wanted = "the arguments that the call is made with, as a JSON object"
        raise InvalidArguments(f"Write /edit SEQ ARGUMENTS with {wanted}.")


async def _find_settled(client: NetworkClient, request: BaseMessage, *, is_waiting: bool) -> str | None:
    """Why a request is not to be decided any more, to be put behind its number; None if it may be."""
    decisions = await _list_decisions(client, request)
    for it in decisions:
        if not _is_edit(it):
            return _describe_decision(it)
    if decisions and not is_waiting:
        return _describe_decision(decisions[-1])  # an edit that does not fit decides nothing: it would wait
    if request.reply_to is None:
        return None
    status = await client.call("network.message_status", {"seq": request.reply_to})
    for it in status["recipients"]:
        begun = [it, it["again"]] if "again" in it else [it]  # the second one since a person took the thread over
        for ended in begun:
            is_it = it["agent_id"] == request.sender_id and ended.get("reaction") == read_request(request)
            if is_it and ended["reaction_status"] != "open":
                return f"waits no more: what {clean(request.sender_id)} was at is {clean(ended['reaction_status'])}"
    return None


async def _list_decisions(client: NetworkClient, request: BaseMessage) -> list[AnyMessage]:
    """The decisions on a request, the oldest first."""
    history = await client.history(request.thread_id, limit=LOOKED_THROUGH)
    return [it for it in history.messages if it.reply_to == request.seq and read_decision(it) is not None]


def _is_edit(decision: BaseMessage) -> bool:
    said = read_decision(decision)
    return said is not None and said.arguments is not None


def _describe_decision(decision: BaseMessage) -> str:
    word = decision.said.split(maxsplit=1)[0]
    return f"was decided by {clean(decision.sender_id)} in #{decision.seq}: {clean(word)}"
