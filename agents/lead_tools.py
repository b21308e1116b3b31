"""Tools for agents that lead other agents: `gather` asks several agents the same question, and `wait_until_quiet` waits
until their work is finished.

Agents do not have these tools by default, because each tool costs tokens in every request. To use them, list them in an
agent's file: ``tools: ['roundelay.agents.lead_tools:gather', 'roundelay.agents.lead_tools:wait_until_quiet']``.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue

from roundelay.network.client.gather import Gathered, SchemaForm, check_request
from roundelay.network.elements import render_element
from roundelay.network.errors import InvalidArguments, RetryLater
from roundelay.network.messages import BaseMessage

from .inbox import is_declined
from .network_tools import put_question
from .tools import Output, ToolContext, tool
from .values import ToolError

MAX_WAIT_MS = 25_000
"""Maximum time that one `network.open_items` call waits at the hub, in milliseconds."""
MAX_LISTED = 10

Seconds = Annotated[float, Field(gt=0, le=604_800, description="How long to wait, in seconds")]


@tool(name="gather", idempotent=True, timeout_s=math.inf)
async def gather(
    context: ToolContext,
    agent_ids: Annotated[list[str], Field(min_length=1, max_length=64, description="Ids of the agents to ask")],
    text: Annotated[str, Field(description="The question, with all that they have to know")],
    schema: Annotated[dict[str, Any], Field(description="JSON schema of one answer, an object")],
    quorum: Annotated[int, Field(ge=0, description="Number of answers that is enough. 0: all")] = 0,
    timeout_s: Seconds = 300.0,
) -> Output:
    """Ask agents for answers of one form, and wait for them. The result says which answers are missing."""
    try:
        form = SchemaForm(schema)
        asked, enough = check_request(
            [agent_id.strip().removeprefix("agent:").removeprefix("@") for agent_id in agent_ids], quorum or None
        )
    except InvalidArguments as error:
        raise ToolError(str(error)) from error

    def read(replies: Mapping[str, BaseMessage]) -> Gathered:
        read = {it: form.read(reply.text, reply.metadata) for it, reply in replies.items() if not is_declined(reply)}
        answers = {it: read[it][0] for it in asked if it in read and not read[it][1]}
        return Gathered(tuple(asked), answers, {it: problem for it, (_, problem) in read.items() if problem})

    replies, problems = await put_question(
        context, asked, form.compose(text), timeout_s, is_enough=lambda known: len(read(known).answers) >= enough
    )
    found = read(replies)
    reason = "not needed any more" if len(found.answers) >= enough else f"no answer within {timeout_s:g} s"
    declined = {it: "declined to answer" for it, reply in replies.items() if is_declined(reply)}
    reasons = {**dict.fromkeys(asked, reason), **problems, **declined, **found.missing}
    gathered = Gathered(found.asked, found.answers, {it: reasons[it] for it in asked if it not in found.answers})
    texts = [
        render_element("answer", json.dumps(value, ensure_ascii=False), sender=agent_id)
        for agent_id, value in gathered.answers.items()
    ]
    data: dict[str, JsonValue] = {"gather": {"answers": gathered.answers, "missing": dict(gathered.missing)}}
    return Output("\n\n".join([f"{gathered.summary}.", *texts]), data)


@tool(name="wait_until_quiet", idempotent=True, timeout_s=math.inf)
async def wait_until_quiet(context: ToolContext, timeout_s: Seconds = 300.0) -> str:
    """Wait until all other agents have finished their work for this conversation: no message to them is unhandled, no
    question is unanswered, and no task is open."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while True:
        left_ms = max(0, min(MAX_WAIT_MS, int((until - loop.time()) * 1000)))
        # The client adds the conversation of the trigger. Each call only reads, so repeating it is harmless.
        args = {"others": True, "wait_ms": left_ms, "limit": MAX_LISTED}
        try:
            found = await context.client.call("network.open_items", args)
        except RetryLater as error:
            await asyncio.sleep(error.retry_after_ms / 1000)
            continue
        if found["is_quiet"]:
            return "All done: nothing of this conversation is open at anybody else."
        if loop.time() >= until:
            break
    lines = [f"Not everything is done after {timeout_s:g} s. Still open:", *map(_describe, found["items"])]
    return "\n".join([*lines, *([f"{found['hidden']} more"] if found["hidden"] else [])])


def _describe(item: Mapping[str, Any]) -> str:
    agent_id, note = item.get("agent_id", "nobody yet"), item.get("note", "")
    words = {"delivery": "a message that was not handled yet", "reaction": "work", "approval": "a decision of a person"}
    text = f"{agent_id}: {words.get(item['kind'], item['kind'])} (#{item['seq']})"
    return f"{text} {render_element('note', note)}" if note else text
