"""Texts and records of approvals: the request, the people who can decide, and standing approvals.

`call_approval` sends the request and waits for decisions; `inbox` reads a decision from a message. A standing approval
also covers later calls of the same tool, in one thread or in every thread where the approving person may decide. A
standing approval is stored as a record of the agent (``standing``). The approval survives restarts until the person
withdraws it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.client.paging import read_pages
from roundelay.network.errors import (
    ConnectError,
    IdConflict,
    InternalError,
    LoopStopped,
    RequestError,
    RoundelayError,
    Superseded,
)
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.text import cut
from roundelay.network.units import format_duration

from .approval_rule import EffectiveRule
from .inbox import Decision, find_decider, find_request, is_reported_by_network, read_decision
from .isolation import retry_later
from .journal import open_journal
from .reaction_ids import digest
from .recorded import Approval, fetch_fates, fetch_records
from .tool_client import ToolClient
from .values import Scope, Vote

_logger = logging.getLogger(__name__)

MAX_SHOWN_CHARS, MAX_WHY_CHARS = 32_000, 1000
"""Maximum characters of a call's arguments that people are asked to approve, and of the model's explanation. A call
with longer arguments does not run, because nobody can approve arguments that are not shown.
"""

MAX_CALL_CHARS = 200
"""Maximum characters of a call's arguments in a sentence that mentions the call."""


class Standing(BaseModel):
    """Standing approval of a tool, for one thread or for every thread where the approving person may decide."""

    tool: str
    scope: Scope
    thread_id: str
    by: str
    seq: int
    """Seq of the message with the decision."""

    at: int
    is_withdrawn: bool = False

    with_others: list[str] = []
    """Other people who approved, if the rule required more than one approval. ``by`` is the last of all."""

    @property
    def people(self) -> set[str]:
        """The people who approved."""
        return {self.by, *self.with_others}


STILL_WAITS = "still_waits"
"""Metadata key of the reply to a decision that does not count. The value is the seq of the approval request that is
still open.
"""


class NobodyDecides(Exception):
    """Approval request that nobody can decide on: no person reads its thread, and there is no operator."""


class RequestedCall(NamedTuple):
    """Call that people are asked to approve, together with the approval rule for this call."""

    tool: str
    arguments: str
    reason: str
    """Text that the model wrote together with the call."""

    rule: EffectiveRule
    deciders: tuple[str, ...] | None = None
    """People who may decide. With None, all readers of the request and all operators may decide."""


def describe_request(
    call: RequestedCall, trigger: BaseMessage, *, is_copy: bool = False, is_for_operators: bool = False
) -> tuple[str, dict[str, Any]]:
    """Return the text that asks people to approve a call, and the metadata for programs.

    Set ``is_copy`` if the request goes to an approver who does not read the thread of ``trigger``; the text then quotes
    the trigger. Set ``is_for_operators`` if no person can reply to the request.
    """
    shown, reason, rule = call.arguments, cut(call.reason.strip(), MAX_WHY_CHARS), call.rule
    # Quote the model's text. An unquoted line could look like a line of the request itself.
    why = (
        [f"Why: {reason}"]
        if len(reason.splitlines()) == 1
        else ["Why:", *(f"> {line}" for line in reason.splitlines())]
    )
    lines = [f"May I call {call.tool} with {shown}?", *(why if reason else [])]
    total_s = rule.timeout_s * (2 if rule.escalate_to else 1)
    metadata: dict[str, Any] = {"tool": call.tool, "arguments": shown, "reason": reason, "timeout_s": total_s}
    if is_copy or is_for_operators:
        words = cut(trigger.text, MAX_WHY_CHARS)
        lines.append(f"It follows from #{trigger.seq} in {trigger.thread_id}, where {trigger.sender_id} wrote:")
        lines += [f"> {line}" for line in words.splitlines()]
        place = {"seq": trigger.seq, "thread_id": trigger.thread_id, "sender_id": trigger.sender_id}
        metadata["led_by"] = {**place, "text": words}
    wait = f"I wait for {format_duration(rule.timeout_s)}."
    if rule.escalate_to:
        wait = f"{wait[:-1]}, then I ask {join_names(rule.escalate_to)} too, and wait as long again."
    if rule.needed > 1:
        wait = f"{rule.needed} different people have to approve it. {wait}"
        metadata["needed"] = rule.needed
    how = (
        f"Reply to this message with /approve, this once; with /approve thread "
        f"or /approve always, from now on: {call.tool} in this thread, or wherever you may decide; with /deny REASON; "
        "or with /edit ARGUMENTS."
    )
    if is_for_operators:
        how = "No person reads that thread, so an operator decides: in the inbox, or with roundelay approvals."
    if rule.approvers:
        metadata |= {"approvers": list(rule.approvers), "deciders": list(call.deciders or ())}
        if not is_copy:
            how = f"Only {join_names(call.deciders or ())} may decide. To them: {how[0].lower()}{how[1:]}"
    lines.append(f"{wait} {how}")
    return "\n".join(lines), metadata


def describe_call(tool: str, arguments: str) -> str:
    """Return a call in readable form: ``refund(order=17)``."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        return f"{tool}({cut(arguments, MAX_CALL_CHARS)})"
    shown = (f"{name}={_write_value(it)}" for name, it in read.items())
    return f"{tool}({cut(', '.join(shown), MAX_CALL_CHARS)})"


_PLAIN_VALUE = re.compile(r"[\w .@:/+#-]+")


def _write_value(value: object) -> str:
    """Return an argument as text. Quote a text that contains characters that could end the call and start another
    sentence.
    """
    if isinstance(value, str) and _PLAIN_VALUE.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def describe_decision(approval: Approval, tool: str, arguments: str) -> str:
    """Return a sentence that says who decided on the call, and how: ``mia approved refund(order=17).``"""
    if approval.is_approved:
        decision = Decision(is_approved=True, arguments=approval.arguments, scope=approval.scope)
    else:
        decision = Decision(is_approved=False, reason=approval.reason)
    text = write_decision(decision, approval.people, tool, arguments)
    return text if decision.reason else f"{text}."


def write_decision(decision: Decision, people: Iterable[str], tool: str, arguments: str) -> str:
    """Return a description, without the final period, of who decided on the call, and how: ``mia approved
    refund(order=17)``.
    """
    call = describe_call(tool, arguments if decision.arguments is None else decision.arguments)
    how = ", with other arguments" if decision.arguments is not None else ""
    what = "approved" if decision.is_approved else "denied"
    scope = {"thread": ", and every further call of it in that thread", "always": ", and every further call of it"}
    reason = f": {decision.reason}" if decision.reason else ""
    return f"{join_names(people)} {what} {call}{how}{scope.get(decision.scope, '')}{reason}"


def join_names(names: Iterable[str]) -> str:
    """Join names into an English list: ``mia, zoe and ann``."""
    *before, last = list(names) or ["nobody"]
    return f"{', '.join(before)} and {last}" if before else last


async def has_operators(client: NetworkClient) -> bool:
    """Return whether at least one operator is a person, because operators may decide on every call. Return False if the
    hub is too old to answer this question.
    """
    try:
        return (await _ask(client, "network.info", {})).get("has_human_operators") is True
    except RequestError:  # the node's rights forbid this operation
        return False


async def find_people(client: NetworkClient, trigger: AnyMessage) -> set[str] | None:
    """Return the people who read the message's thread and may therefore decide. Return None if the hub does not support
    this question.
    """
    readers = {trigger.sender_id}
    people: set[str] = set()
    try:
        readers |= {str(it["agent_id"]) for it in await fetch_fates(partial(_ask, client), trigger.seq)}
        async for page in read_pages(partial(_ask, client), "network.list_agents", {"kind": "human"}):
            people |= {str(agent["agent_id"]) for agent in page["agents"]}
    except RequestError:
        return None
    return readers & people


async def _ask(client: NetworkClient, op: str, args: Mapping[str, object]) -> Any:
    return await retry_later(lambda: client.call(op, args))


# --- approvals for more than one call


async def find_standing(
    client: NetworkClient, tool: str, thread_id: str, people: Collection[str], needed: int = 1
) -> Approval | None:
    """Return an earlier approval that covers this call: for this thread or for all threads, and given by at least
    ``needed`` people who may decide now.
    """
    for it in await _load_standing(client):
        is_here = len(it.people.intersection(people)) >= needed and (it.scope == "always" or it.thread_id == thread_id)
        if it.tool == tool and is_here and not it.is_withdrawn:
            votes = [Vote(by=name, seq=it.seq, at=it.at, said="") for name in [*it.with_others, it.by]]
            approval = Approval(is_approved=True, by=it.by, seq=it.seq, at=it.at, scope=it.scope)
            return approval.model_copy(update={"votes": votes}) if it.with_others else approval
    return None


async def keep_standing(client: NetworkClient, standing: Standing) -> None:
    """Record a standing approval or its withdrawal. A second call with the same values stores nothing."""
    # Record the withdrawal under its own id. The hub would reject it under the id of the approval.
    key = digest("standing", standing.seq, standing.is_withdrawn)
    record = partial(client.record, _place(client), "standing", standing.model_dump(), record_id=key)
    await retry_later(record)


async def _load_standing(client: NetworkClient) -> list[Standing]:
    """Return all standing approvals, including withdrawn approvals, sorted by the time of the decision."""
    by_seq: dict[int, Standing] = {}
    for record in await fetch_records(partial(_ask, client), _place(client), client.agent_id):
        try:
            standing = Standing.model_validate(record["body"])
        except ValidationError:
            continue  # another program wrote this record
        # A later record of the same decision replaces the earlier record. A withdrawal takes effect in this way.
        by_seq[standing.seq] = standing
    return list(by_seq.values())


def _place(client: NetworkClient) -> str:
    """Return the id under which an agent's standing approvals are recorded. No reaction uses this id."""
    return digest("standing approvals", client.agent_id)


# --- decisions that have no effect


async def answer_late_decision(client: NetworkClient, decision: AnyMessage) -> None:
    """Answer a person whose decision has no effect. The answer says who decided instead, or that the request is closed.
    If the decision is a denial, withdraw the sender's standing approval.

    Send nothing for a decision that counts, or for a message that does not answer a request of this agent. The hub may
    refuse the answer because a person has taken over the thread or a quota is used up. Log this refusal instead of
    raising it: the reaction must continue.
    """
    try:
        await _answer_late(client, decision)
    except (ConnectError, Superseded):
        raise
    except RoundelayError as error:
        place = {"agent_id": client.agent_id, "seq": decision.seq, "code": error.code}
        _logger.warning("a late decision is not answered", extra=place)


async def _answer_late(client: NetworkClient, decision: AnyMessage) -> None:
    said, request = read_decision(decision), await _find_request(client, decision)
    if said is None or request is None:
        return
    approval, has_ended = request
    # This is the decision that counted, delivered for a second time. It needs no answer.
    if approval is not None and decision.seq in {approval.seq, *(vote.seq for vote in approval.votes)}:
        return
    seq = find_request(decision)
    if approval is None:
        text = f"Nothing waits for the decision of #{seq} any more." if has_ended else None
    else:
        text = f"#{seq} was decided by {join_names(approval.people)} in #{approval.seq}; this changes nothing."
        for it in await _load_standing(client) if not said.is_approved else ():
            if it.seq == approval.seq and find_decider(decision) in it.people and not it.is_withdrawn:
                await keep_standing(client, it.model_copy(update={"is_withdrawn": True}))
                text = f"From now on I ask again before I call {it.tool}."
    if text is not None:
        await reply_to_decider(client, decision, text)


async def reply_to_decider(
    client: NetworkClient | ToolClient, decision: AnyMessage, text: str, metadata: Mapping[str, Any] | None = None
) -> None:
    """Answer a decision once, even if it is delivered again, in a thread that the person reads."""
    with suppress(IdConflict, LoopStopped):  # the answer was sent before a restart, or the conversation is stopped
        key = digest("told", client.agent_id, decision.seq)
        if is_reported_by_network(decision):  # the person who decided cannot read the message that the network sent
            send = partial(client.send_text, find_decider(decision), text, cause=decision.seq)
        else:
            send = partial(client.reply, decision, text)
        await retry_later(partial(send, message_id=key, metadata=metadata))


async def _find_request(client: NetworkClient, decision: AnyMessage) -> tuple[Approval | None, bool] | None:
    """Return the approval of the request that a decision answers, and whether the reaction of that request has ended.
    Return None if the decision does not answer a request of this agent.
    """
    seq = find_request(decision)
    try:
        if is_reported_by_network(decision):
            chain = (await retry_later(partial(client.call, "network.why", {"seq": seq})))["chain"]
            before = [message_from_wire(chain[0])]
        else:
            thread = partial(client.history, decision.thread_id, before=(seq or 0) + 1, limit=1)
            before = (await retry_later(thread)).messages
        request = next((it for it in before if it.seq == seq and it.sender_id == client.agent_id), None)
        reaction = read_request(request) if request is not None else None
        recorded = await open_journal(client, reaction).load() if reaction is not None else None
    except (RequestError, InternalError, ValueError, TypeError, LookupError):
        return None  # retention deleted the record, or another program wrote it
    if recorded is None:
        return None
    for run in (recorded, *recorded.children.values()):
        for place, wait in run.waiting.approval_waits.items():
            if seq in wait.questions.values():
                return run.waiting.approvals.get(place), recorded.finished is not None or place in run.results
    return None


def read_deciders(request: BaseMessage) -> list[str] | None:
    """Return the only people who may decide on a request, or None if the request names nobody."""
    approval = (request.metadata or {}).get("approval")
    deciders = approval.get("deciders") if isinstance(approval, dict) else None
    return [decider for decider in deciders if isinstance(decider, str)] if isinstance(deciders, list) else None


def read_decided(message: BaseMessage) -> Mapping[str, Any] | None:
    """Return the report (``decided``) in a message by which an agent reports a decision that was made in another
    thread. Return None for any other message.
    """
    decision = (message.metadata or {}).get("decided")
    if message.sender_kind != "agent" or not isinstance(decision, dict):
        return None
    match decision:
        case {"request": int(), "is_approved": bool(), "by": [str(), *_], "seq": int(), "at": int()}:
            return decision
        case _:
            return None


def read_request(message: BaseMessage) -> str | None:
    """Return the id of the reaction that waits for a decision on this message. Return None if the message does not
    request approval.
    """
    approval = (message.metadata or {}).get("approval")
    reaction = approval.get("reaction") if isinstance(approval, dict) else None
    return reaction if isinstance(reaction, str) else None
