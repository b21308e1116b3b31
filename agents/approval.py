"""A person's approval of a call: the request in the thread, and what the decision makes of the call.

Used by `tool_calls` before a tool that needs it is begun. The request is a message in the incoming thread; only a reply
to it, by a person, decides, and readers of the thread are the only ones who can reply. The wait is `replies`'s: it
survives restarts of everybody.
"""

from __future__ import annotations

import json
from dataclasses import replace

from roundelay.network.client import AnyMessage
from roundelay.network.messages import BaseMessage

from .records import Approval
from .replies import Waiter, read_decision
from .retry import retry_later
from .steps import NOT_RUN, PlannedCall
from .text import cut
from .tools import ToolArgumentsError, ToolContext, ToolResult

MAX_SHOWN_CHARS = 4000
PERSON = "a person"


async def request_approval(
    context: ToolContext, planned: PlannedCall, waiter: Waiter, timeout_s: float
) -> BaseMessage | None:
    """Ask in the thread, and wait for a decision; gives the message that holds it, None if there is none in time."""
    trigger, name, written = context.trigger, planned.tool.name, planned.call.arguments or "{}"
    assert isinstance(trigger, AnyMessage)
    text = (
        f"May I call {name} with {cut(written, MAX_SHOWN_CHARS)}?\n"
        "Reply to this message with /approve, with /deny and a reason, or with /edit and other arguments."
    )
    metadata = {"approval": {"reaction": context.reaction, "tool": name}}
    stored = await retry_later(
        lambda: context.client.reply(trigger, text, message_id=context.call_id, metadata=metadata)
    )
    waiter.expect(stored.seq, is_approval=True)
    try:
        replies = await waiter.wait({PERSON: stored}, timeout_s, is_approval=True)
    finally:
        waiter.forget([stored.seq])
    return replies.get(PERSON)


def read_approval(reply: BaseMessage) -> Approval:
    """Give the decision as it is recorded."""
    decision = read_decision(reply)
    assert decision is not None
    return Approval(
        is_approved=decision.is_approved,
        by=reply.sender_id,
        seq=reply.seq,
        at=reply.sent_at,
        arguments=decision.arguments,
        reason=decision.reason,
    )


def apply_approval(planned: PlannedCall, approval: Approval | None) -> PlannedCall | ToolResult:
    """Give the call as it is to be made, or why it is not."""
    if approval is None:
        return ToolResult("Not run: nobody approved it in time.", ok=False, data={NOT_RUN: True})
    if not approval.is_approved:
        why = f": {approval.reason}" if approval.reason else "."
        return ToolResult(f"Not run: {approval.by} denied it{why}", ok=False, data={NOT_RUN: True})
    if approval.arguments is None:
        return planned
    try:
        arguments = planned.tool.parse(approval.arguments)
    except ToolArgumentsError as error:
        return ToolResult(
            f"Not run: {approval.by} changed the arguments, and they do not fit. {error}",
            ok=False,
            data={NOT_RUN: True},
        )
    return replace(planned, arguments=arguments, call=replace(planned.call, arguments=_tidy(approval.arguments)))


def _tidy(arguments: str) -> str:
    return json.dumps(json.loads(arguments), ensure_ascii=False)
