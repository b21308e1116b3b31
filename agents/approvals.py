"""A person's approval of a call: who can give it, how it is asked for, and what was approved for more than one call.

`driver` asks and waits, `inbox` reads a decision. What was approved for a thread, or for every call that its person may
decide, is a record of the agent's own (``standing``): it holds over restarts, until the person who gave it takes it
back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import (
    ConnectError,
    IdConflict,
    InternalError,
    LoopStopped,
    RequestError,
    RoundelayError,
    Superseded,
)
from roundelay.network.messages import BaseMessage

from .containment import retry_later
from .inbox import read_decision
from .journal import Approval, RecordClient, digest, fetch_fates, fetch_records, open_journal
from .text import cut
from .values import Scope

_logger = logging.getLogger(__name__)

MAX_SHOWN_CHARS, MAX_WHY_CHARS = 4000, 1000
"""Of the arguments that a person is asked to approve, and of what the model says beside its call."""


class Standing(BaseModel):
    """What a person approved for more than one call: of a tool, in a thread, or wherever that person may decide."""

    tool: str
    scope: Scope
    thread_id: str
    by: str
    seq: int
    """Of the decision."""

    at: int
    is_withdrawn: bool = False


STILL_WAITS = "still_waits"
"""In a message's metadata: the decision that it answers did not fit, and this request (a seq) waits on."""


class NobodyDecides(Exception):
    """No person reads the thread in which a call would be asked for."""


class Replier(Protocol):
    """The part of `NetworkClient` that answers."""

    @property
    def agent_id(self) -> str: ...

    async def reply(self, message: AnyMessage, text: str, **options: Any) -> object: ...


def describe_request(tool: str, arguments: str, *, why: str, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """Give the text that asks a person to approve a call, and what its metadata say of it for programs."""
    shown, reason = cut(arguments, MAX_SHOWN_CHARS), cut(why.strip(), MAX_WHY_CHARS)
    lines = [
        f"May I call {tool} with {shown}?",
        *([f"Why: {reason}"] if reason else []),
        f"I wait for {_describe_span(timeout_s)}. Reply to this message with /approve, this once; with /approve thread "
        f"or /approve always, from now on: {tool} in this thread, or wherever you may decide; with /deny REASON; "
        "or with /edit ARGUMENTS.",
    ]
    return "\n".join(lines), {"tool": tool, "arguments": shown, "reason": reason, "timeout_s": timeout_s}


def _describe_span(seconds: float) -> str:
    for name, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {name}{'s' if seconds != size else ''}"
    return f"{seconds:g} s"


async def find_people(client: RecordClient, trigger: AnyMessage) -> set[str] | None:
    """Give the people who read a message's thread: one of them can decide. None if the hub does not tell."""
    readers = {trigger.sender_id}
    people: set[str] = set()
    try:
        readers |= {str(it["agent_id"]) for it in await fetch_fates(partial(_ask, client), trigger.seq)}
        after, has_more = "", True
        while has_more:
            page = await _ask(client, "network.list_agents", {"kind": "human", "after": after})
            people |= {str(it["agent_id"]) for it in page["agents"]}
            has_more, after = page["has_more"], max(people, default="")
    except RequestError:
        return None
    return readers & people


async def _ask(client: RecordClient, op: str, args: Mapping[str, object]) -> Any:
    return await retry_later(lambda: client.call(op, args))


# --- what was approved for more than one call


async def find_standing(client: RecordClient, tool: str, thread_id: str, people: set[str]) -> Approval | None:
    """Give the approval of a call that a person has given before, if one holds for it: in this thread, or always, by
    somebody who could decide on it now."""
    for it in await _load_standing(client):
        is_here = it.by in people and (it.scope == "always" or it.thread_id == thread_id)
        if it.tool == tool and is_here and not it.is_withdrawn:
            return Approval(is_approved=True, by=it.by, seq=it.seq, at=it.at, scope=it.scope)
    return None


async def keep_standing(client: RecordClient, standing: Standing) -> None:
    """Record it, or that it is withdrawn: once each."""
    key = digest("standing", standing.seq, standing.is_withdrawn)
    record = partial(client.record, _place(client), "standing", standing.model_dump(), record_id=key)
    await retry_later(record)


async def _load_standing(client: RecordClient) -> list[Standing]:
    """All that hold or did, the newest word on each, the oldest decision first."""
    found: dict[int, Standing] = {}
    for record in await fetch_records(partial(_ask, client), _place(client), client.agent_id):
        try:
            standing = Standing.model_validate(record["body"])
        except ValidationError:
            continue  # another program's
        found[standing.seq] = standing
    return list(found.values())


def _place(client: RecordClient) -> str:
    """Under which id an agent's records of them stand: no reaction's."""
    return digest("standing approvals", client.agent_id)


# --- decisions that decide nothing


async def answer_late_decision(client: NetworkClient, decision: AnyMessage) -> None:
    """Tell a person whose decision decides nothing who has decided, or that nothing waits any more. A denial takes back
    what its sender approved for longer. Nothing is said of a decision that counts, or of what is no request of ours.
    What the hub refuses of it (the thread is held, the quota spent) is logged: it is nobody's reaction that could fail.
    """
    try:
        await _answer_late(client, decision)
    except (ConnectError, Superseded):
        raise
    except RoundelayError as error:
        place = {"agent_id": client.agent_id, "seq": decision.seq, "code": error.code}
        _logger.warning("a late decision is not answered", extra=place)


async def _answer_late(client: NetworkClient, decision: AnyMessage) -> None:
    said, found = read_decision(decision), await _find_request(client, decision)
    if said is None or found is None:
        return
    approval, has_ended = found
    if approval is not None and approval.seq == decision.seq:
        return
    if approval is None:
        text = f"Nothing waits for the decision of #{decision.reply_to} any more." if has_ended else None
    else:
        text = f"#{decision.reply_to} was decided by {approval.by} in #{approval.seq}; this changes nothing."
        for it in await _load_standing(client) if not said.is_approved else ():
            if (it.seq, it.by, it.is_withdrawn) == (approval.seq, decision.sender_id, False):
                await keep_standing(client, it.model_copy(update={"is_withdrawn": True}))
                text = f"From now on I ask again before I call {it.tool}."
    if text is not None:
        await tell_decider(client, decision, text)


async def tell_decider(
    client: Replier, decision: AnyMessage, text: str, metadata: Mapping[str, Any] | None = None
) -> None:
    """Answer a decision: once, however often it is delivered, and wherever that has got to."""
    with suppress(IdConflict, LoopStopped):  # an earlier run said it otherwise, or nothing more may be said there
        key = digest("told", client.agent_id, decision.seq)
        await retry_later(partial(client.reply, decision, text, message_id=key, metadata=metadata))


async def _find_request(client: NetworkClient, decision: AnyMessage) -> tuple[Approval | None, bool] | None:
    """What was decided on the request that a decision answers, and whether its reaction has ended; None if it answers
    no request of this agent."""
    seq = decision.reply_to
    try:
        before = (
            await retry_later(partial(client.history, decision.thread_id, before=(seq or 0) + 1, limit=1))
        ).messages
        request = next((it for it in before if it.seq == seq and it.sender_id == client.agent_id), None)
        reaction = read_request(request) if request is not None else None
        recorded = await open_journal(client, reaction).load() if reaction is not None else None
    except (RequestError, InternalError, ValueError, TypeError, LookupError):
        return None  # cut by retention, or written by another program
    if recorded is None:
        return None
    for run in (recorded, *recorded.children.values()):
        for place, wait in run.approval_waits.items():
            if seq in wait.questions.values():
                return run.approvals.get(place), recorded.finished is not None or place in run.results
    return None


def read_request(message: BaseMessage) -> str | None:
    """The reaction that waits for a person's decision on this message; None if it asks for none."""
    approval = (message.metadata or {}).get("approval")
    reaction = approval.get("reaction") if isinstance(approval, dict) else None
    return reaction if isinstance(reaction, str) else None
