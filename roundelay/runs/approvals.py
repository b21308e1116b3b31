"""Format approval requests for people, and send people's decisions so that each request is decided only once.

The hub lists the waiting requests (``network.approvals``). A decision is a reply to the request's message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from pydantic_core import from_json

from roundelay.agents.approvals import join_names, read_decided, read_deciders, read_request, write_decision
from roundelay.agents.inbox import parse_decision, read_decision
from roundelay.display.text import sanitize
from roundelay.network.client import AnyMessage, NetworkClient, Stored
from roundelay.network.errors import InvalidArguments, RequestError
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.runs.lists import list_approvals

MAX_REQUESTS = 500
LOOKED_THROUGH = 200
"""Number of newest messages of a thread that are searched for the decision on a request."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """Call that waits for a person's decision. ``until`` is the deadline in milliseconds since the Unix epoch."""

    message: AnyMessage
    reaction: str
    until: int
    may_decide: bool
    may_call: bool = False
    """Whether the caller may decide as an operator without being a reader of the message."""

    deciders: tuple[str, ...] | None = None
    approved_by: tuple[str, ...] = ()

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self:
        deciders = entry.get("deciders")
        return cls(
            message_from_wire(entry["message"]),
            entry["reaction"],
            entry["until"],
            entry["may_decide"],
            may_call=entry.get("may_call", False),
            deciders=None if deciders is None else tuple(deciders),
            approved_by=tuple(entry.get("approved_by", ())),
        )

    @property
    def seq(self) -> int:
        return self.message.seq

    def to_json(self) -> dict[str, object]:
        """Return JSON with times in milliseconds since the Unix epoch.

        ``arguments`` is decoded from JSON. If the model's text is not JSON, ``arguments`` is that text.
        """
        it = self.message
        where = {"agent_id": it.sender_id, "thread_id": it.thread_id, "reaction": self.reaction}
        when = {"asked_at": it.sent_at, "until": self.until}
        told = read_arguments(it)
        call = {**told, "arguments": _read_json(told["arguments"])}
        rights: dict[str, object] = {"may_decide": self.may_decide, "may_call": self.may_call}
        rights |= {"deciders": None if self.deciders is None else list(self.deciders)}
        return {"seq": it.seq, **where, **call, **when, **rights, "approved_by": list(self.approved_by)}

    def describe(self) -> str:
        """Return one line that names the agent, the call and the thread of the request."""
        told = read_arguments(self.message)
        why = f" ({sanitize(told['reason'])})" if told["reason"] else ""
        call = f"call {sanitize(told['tool'])} with {sanitize(told['arguments'])}{why}"
        voted = f"; {join_names(map(sanitize, self.approved_by))} approved it" if self.approved_by else ""
        where = sanitize(self.message.thread_id)
        return f"#{self.seq} {sanitize(self.message.sender_id)} asks to {call}, in {where}{voted}"


def read_arguments(request: BaseMessage) -> dict[str, str]:
    """Return the ``tool``, ``arguments`` and ``reason`` of a request. A missing value is empty."""
    told = (request.metadata or {}).get("approval")
    found = told if isinstance(told, dict) else {}
    return {name: it if isinstance(it := found.get(name), str) else "" for name in ("tool", "arguments", "reason")}


def _read_json(text: str) -> object:
    """Return the decoded JSON. Return the text unchanged if it is not JSON, is nested too deeply, or contains a number
    that is too large.
    """
    try:
        # JSON has no NaN or infinity, so these values could not be written as JSON again.
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def read_until(request: BaseMessage) -> int | None:
    """Return the deadline of a request in milliseconds since the Unix epoch, or None."""
    told = (request.metadata or {}).get("approval")
    timeout_s = told.get("timeout_s") if isinstance(told, dict) else None
    if not isinstance(timeout_s, int | float) or not math.isfinite(timeout_s):
        return None
    # Add the timeout to the hub's time of sending, because the clock of this machine may differ.
    return request.sent_at + int(timeout_s * 1000)


def format_until(until: int) -> str:
    """Return a deadline as local date and time, or "the end of time" if the calendar cannot show it."""
    try:
        return f"{datetime.fromtimestamp(until / 1000, UTC).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "the end of time"


async def list_requests(client: NetworkClient) -> list[WaitingRequest]:
    """Return the requests that the client may read, oldest first. Raises `RoundelayError`."""
    return [WaitingRequest.read(it) for it in await list_approvals(client)]


async def show_request(client: NetworkClient, seq: int) -> dict[str, Any]:
    """Return a request's call, whether the request still waits, and the decisions on it. Raises `RoundelayError`."""
    request = await find_message(client, seq)
    if read_request(request) is None:
        raise InvalidArguments(f"#{seq} is not a request for approval. List the requests: roundelay approvals")
    waiting = next((it for it in await list_requests(client) if it.seq == seq), None)
    told = read_arguments(request)
    place = {"seq": seq, "agent_id": request.sender_id, "thread_id": request.thread_id, "asked_at": request.sent_at}
    # A waiting request has no decision yet. Its approvals so far are in `approved_by`.
    decisions = [] if waiting is not None else await _list_decisions(client, request)
    made = [{"by": list(it.by), "seq": it.seq, "at": it.at, "said": list(it.said)} for it in decisions]
    voters = list(waiting.approved_by) if waiting is not None else []
    call = {**told, "arguments": _read_json(told["arguments"])}
    return {**place, **call, "is_waiting": waiting is not None, "approved_by": voters, "decisions": made}


def describe_request(shown: Mapping[str, Any]) -> list[str]:
    """Return a request as lines for a terminal."""
    arguments = shown["arguments"] if isinstance(shown["arguments"], str) else json.dumps(shown["arguments"])
    asks = f"#{shown['seq']} {sanitize(shown['agent_id'])} asks to call {sanitize(shown['tool'])} with {sanitize(arguments)}"
    lines = [f"{asks}, in {sanitize(shown['thread_id'])}"]
    lines += [f"Reason: {sanitize(shown['reason'])}"] if shown["reason"] else []
    for it in shown["decisions"]:
        words = ", ".join(sanitize(word) for word in it["said"])
        lines.append(
            f"{join_names(map(sanitize, it['by']))} decided in #{it['seq']}, {format_until(it['at'])}: {words}"
        )
    if shown["is_waiting"]:
        voted = f" {join_names(map(sanitize, shown['approved_by']))} approved it." if shown["approved_by"] else ""
        lines.append(f"It waits for a decision.{voted}")
    elif not shown["decisions"]:
        lines.append("It no longer waits, and nobody decided.")
    return lines


def describe_decision(request: BaseMessage, by: str, said: str) -> str | None:
    """Return a decision in words: ``mia approved refund(order=17)``.

    Return None if the text is not a decision, the person may not decide, or the message is not a request.
    """
    deciders, decision = read_deciders(request), parse_decision(said)
    if decision is None or request.sender_kind != "agent" or read_request(request) is None:
        return None
    if deciders is not None and by not in deciders:
        return None
    told = read_arguments(request)
    return write_decision(decision, [by], told["tool"], told["arguments"])


class KnownRequests:
    """Cache of requests for approval, so that a screen can show decisions in words."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client
        self._known: dict[int, BaseMessage] = {}

    def add(self, message: BaseMessage) -> None:
        """Remember a message if it is a request."""
        if read_request(message) is not None:
            self._known[message.seq] = message
            if len(self._known) > MAX_REQUESTS:
                # Remove the oldest request, so that a screen that stays open for days does not grow.
                del self._known[next(iter(self._known))]

    async def describe(self, message: BaseMessage) -> str | None:
        """Describe a person's decision in words, or return None if the message is not a decision. Reads the request
        from the hub if the cache does not contain it.
        """
        self.add(message)
        question = message.reply_to
        if question is None or message.sender_kind != "human" or read_decision(message) is None:
            return None
        if question not in self._known:
            with suppress(RequestError, LookupError):  # retention deleted the request, or the client may not read it
                self.add(await find_message(self._client, question))
        # If the request could not be read, the screen shows the decision as a plain message.
        request = self._known.get(question)
        return None if request is None else describe_decision(request, message.sender_id, message.said)


async def find_message(client: NetworkClient, seq: int) -> AnyMessage:
    return message_from_wire((await client.call("network.why", {"seq": seq}))["chain"][0])


async def decide(
    client: NetworkClient,
    seq: int,
    decision: str,
    on_sent: Callable[[AnyMessage, Stored], None] = lambda request, stored: None,
) -> tuple[AnyMessage, Stored]:
    """Send a decision on a request, and return the request and the stored decision.

    ``on_sent`` receives both as soon as the decision is sent. Raises `InvalidArguments` before sending if the text is
    not a valid decision, and after sending if another person decided first.
    """
    request = await find_message(client, seq)
    if read_request(request) is None:
        raise InvalidArguments(
            f"#{seq} is not a request for approval, so nothing was sent. Use /reply {seq} to answer it."
        )
    waiting = next((it for it in await list_requests(client) if it.seq == seq), None)
    # Refuse a late decision: if it were sent, its sender would think that it counted.
    if why := await _find_settled(client, request, is_waiting=waiting is not None):
        raise InvalidArguments(f"#{seq} {why}, so nothing was sent.")
    if waiting is not None and not waiting.may_decide:
        if not waiting.may_call:
            raise InvalidArguments(f"#{seq} {_explain_rights(client, waiting)}, so nothing was sent.")
        # An operator outside the thread cannot reply there. In that case the hub reports the decision for the operator.
        told = await client.call("network.decide", {"seq": seq, "decision": decision})
        return request, Stored(told["seq"], "", duplicate=False)
    stored = await client.reply(request, decision)
    on_sent(request, stored)
    # Another person may have decided after the check above. The first decision counts.
    first = next((it for it in await _list_decisions(client, request) if not it.is_edit), None)
    if first is not None and first.seq < stored.seq and (waiting is None or not waiting.approved_by):
        raise InvalidArguments(f"#{seq} {first.describe()}, before your decision arrived. That decision counts.")
    return request, stored


def _explain_rights(client: NetworkClient, waiting: WaitingRequest) -> str:
    """Return why the client may not decide, as the second half of a sentence."""
    me = sanitize(client.agent_id)
    if me in waiting.approved_by:
        return f"already has the approval of {me} and waits for another approver"
    if waiting.deciders is not None:
        return f"is decided by {join_names(map(sanitize, waiting.deciders))}"
    return f"is decided by a person who reads {sanitize(waiting.message.thread_id)}, which {me} does not"


def check_arguments(text: str) -> None:
    """Raise `InvalidArguments` for text that cannot be the arguments of a call."""
    try:
        # Check before sending: the agent would not recognize wrong arguments as a decision and would keep waiting.
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        wanted = "the arguments that the call is made with, as a JSON object"
        raise InvalidArguments(f"Write /edit SEQ ARGUMENTS with {wanted}.")


async def _find_settled(client: NetworkClient, request: BaseMessage, *, is_waiting: bool) -> str | None:
    """Return why a request can no longer be decided, as the second half of a sentence, or None if it can be decided."""
    decisions = await _list_decisions(client, request)
    for it in decisions:
        if not it.is_edit:
            return it.describe()
    if decisions and not is_waiting:
        return decisions[-1].describe()  # the request does not wait, so the agent accepted this edit
    if request.reply_to is None:
        return None
    status = await client.call("network.message_status", {"seq": request.reply_to})
    for it in status["recipients"]:
        begun = [it, it["again"]] if "again" in it else [it]  # after a takeover, a second request may replace the first
        for ended in begun:
            is_it = it["agent_id"] == request.sender_id and ended.get("reaction") == read_request(request)
            if is_it and ended["reaction_status"] != "open":
                return f"no longer waits: the reaction of {sanitize(request.sender_id)} is {sanitize(ended['reaction_status'])}"
    return None


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """Decision on a request, with its people, message, time in milliseconds, and texts."""

    by: tuple[str, ...]
    seq: int
    at: int
    said: tuple[str, ...]

    @property
    def is_edit(self) -> bool:
        return all(it.lower().startswith("/edit") for it in self.said)

    def describe(self) -> str:
        words = ", ".join(sanitize(it.split(maxsplit=1)[0]) for it in self.said if it)
        return f"was decided by {join_names(map(sanitize, self.by))} in #{self.seq}: {words}"


async def _list_decisions(client: NetworkClient, request: BaseMessage) -> list[RecordedDecision]:
    """Return the decisions on a request, oldest first.

    Skips replies from people who may not decide. Also skips single approvals if the request needs several.
    """
    history = await client.history(request.thread_id, limit=LOOKED_THROUGH)
    deciders, needed = read_deciders(request), _read_needed(request)
    found = []
    for it in history.messages:
        told = read_decided(it)
        if told is not None and told["request"] == request.seq and it.sender_id == request.sender_id:
            said = tuple(word for word in told.get("said", ()) if isinstance(word, str))
            found.append(RecordedDecision(tuple(map(str, told["by"])), told["seq"], told["at"], said))
        elif it.reply_to == request.seq and (decision := read_decision(it)) is not None:
            # The agent ignores replies from people who may not decide, so skip them here too.
            counts = deciders is None or it.sender_id in deciders
            # One refusal decides the request. If several approvals are needed, the agent's own report decides.
            settles = needed == 1 or not decision.is_approved
            found += (
                [RecordedDecision((it.sender_id,), it.seq, it.sent_at, (it.said.strip(),))]
                if counts and settles
                else []
            )
    return found


def _read_needed(request: BaseMessage) -> int:
    told = (request.metadata or {}).get("approval")
    needed = told.get("needed", 1) if isinstance(told, dict) else 1
    return needed if isinstance(needed, int) else 1
