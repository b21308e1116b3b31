"""Tools of every agent: sending, asking, `finish`, and the operations of the hub's mods. `simple` adds these tools to
agents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import JsonValue

from roundelay.network.errors import ConfigError, RequestError
from roundelay.network.messages import BaseMessage

from .inbox import ASK, is_declined, is_watched, read_waiting
from .isolation import run_together
from .replies import IsEnough, never_enough
from .values import ToolError

if TYPE_CHECKING:
    from roundelay.network.client import Stored

    from .tools import ToolContext

import math
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from pydantic import Field

from roundelay.network.elements import render_element

from .models.json_schema import read_properties
from .models.model import JsonSchema
from .text import MAX_NAME_CHARS, tool_name
from .tool_arguments import read_object, read_required, tidy_schema
from .tool_client import takes_trigger
from .tools import FINISH, Output, Tool, ToolContext, tool

if TYPE_CHECKING:
    from roundelay.network.frames import ModInfo


def mod_tools(mods: Sequence[ModInfo]) -> list[Tool]:
    """Return one tool for each operation that the hub's mods announced in the ``welcome`` frame. `channels.join`
    becomes ``channels_join``.

    The tools are idempotent: the hub validates the arguments and answers a repeated ``call_id`` with the first result.
    A model does not see seqs. Therefore the tool sets ``cause`` to the seq of the trigger and hides this parameter.
    ``reply_to`` is optional, and its default is also the trigger.
    """
    return list(make_operation_tools(msgspec.json.encode(mods)))


def communication_tools() -> list[Tool]:
    """Return the tools of every agent. ``finish`` only parses its arguments, because the loop handles it."""
    return list(_make_communication_tools())


@cache
def _make_communication_tools() -> Sequence[Tool]:
    tools = (_send_text_message, _broadcast_text_message, _require_all(_ask), _finish)
    return [replace(it, acts_through_client=True) for it in tools]


def choose_tools(tools: Iterable[Tool], wanted: Collection[str] | None) -> list[Tool]:
    """Return the tools whose name is wanted or matches a wanted pattern (``channels_*``). None selects all tools."""
    return [it for it in tools if wanted is None or any(fnmatchcase(it.name, name) for name in wanted)]


def check_wanted(agent_id: str, wanted: Collection[str], tools: Iterable[Tool]) -> None:
    """Raise `ConfigError` for a wanted name that matches no tool."""
    names = sorted(it.name for it in tools)
    for name in wanted:
        if not any(fnmatchcase(it, name) for it in names):
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}."
            problem = f'network_tools names "{name}", which this network does not have'
            raise ConfigError(f"Agent {agent_id}: {problem}; {hint}")


@lru_cache(maxsize=16)
def make_operation_tools(mods: bytes) -> Sequence[Tool]:
    """Return the tools for the mods that ``mods`` describes as JSON. All agents of a process that use the same hub
    share the cached tools, which take about 10 KB of memory.
    """
    from roundelay.network.frames import ModInfo

    tools: list[Tool] = []
    taken = {FINISH}
    for mod in msgspec.json.decode(mods, type=list[ModInfo]):
        for operation in mod.operations:
            if operation.is_tool is False:
                continue
            name = _name_operation(operation.op, taken)
            taken.add(name)
            schema = tidy_schema(operation.args_schema)
            parameters = _hide_trigger(schema, ("cause", "trigger") if takes_trigger(operation) else ("cause",))
            filled = tuple(field for field in ("cause", "reply_to") if field in read_properties(schema))
            parse, run = partial(read_object, name, parameters), partial(_call_operation, operation.op, filled)
            tools.append(
                Tool(
                    name,
                    operation.description,
                    parameters,
                    "idempotent",
                    math.inf,
                    parse,
                    run,
                    acts_through_client=True,
                )
            )
    return tools


def _name_operation(op: str, taken: set[str]) -> str:
    base = tool_name(op)
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base[: MAX_NAME_CHARS - 4]}_{number}"
    return name


def _require_all(original: Tool) -> Tool:
    """Mark every parameter as required, because servers with strict schemas refuse optional parameters. A parameter
    that the model omits still gets its default.
    """
    properties = {
        name: {key: value for key, value in inner.items() if key != "default"} if isinstance(inner, dict) else inner
        for name, inner in read_properties(original.parameters).items()
    }
    return replace(original, parameters={**original.parameters, "properties": properties, "required": list(properties)})


def _hide_trigger(schema: JsonSchema, hidden: Sequence[str]) -> JsonSchema:
    properties = {field: inner for field, inner in read_properties(schema).items() if field not in hidden}
    required = [field for field in read_required(schema) if field not in ("cause", "reply_to")]
    return {**schema, "properties": properties, "required": required}


async def _call_operation(op: str, filled: Sequence[str], context: ToolContext, kwargs: Mapping[str, object]) -> object:
    args = {**dict.fromkeys(filled, context.trigger.seq), **kwargs}
    return await context.client.call(op, args, call_id=context.call_id)


# The tools of every agent.


@tool(name="send_text_message", idempotent=True, timeout_s=math.inf)
async def _send_text_message(
    context: ToolContext,
    target_agent_id: Annotated[str, Field(description="Id of the agent or person that gets the message")],
    text: Annotated[str, Field(description="What to say")],
) -> str:
    """Send a direct text message to one agent or person. It is private between the two of you."""
    # Models copy ids from the conversation, where an address begins with ``agent:`` and a mention with ``@``.
    agent_id = target_agent_id.strip().removeprefix("agent:").removeprefix("@")
    trigger = context.trigger
    # A message to the sender of a direct trigger answers that trigger. ``reply_to`` ends the sender's wait.
    reply_to = trigger.seq if trigger.kind == "direct" and trigger.sender_id == agent_id else None
    await context.client.send_text(agent_id, text, reply_to=reply_to, cause=trigger.seq, message_id=context.call_id)
    return f"The message is on its way to {agent_id}."


@tool(name="broadcast_text_message", idempotent=True, timeout_s=math.inf)
async def _broadcast_text_message(context: ToolContext, text: Annotated[str, Field(description="What to say")]) -> str:
    """Send a text message to every participant of the network."""
    await context.client.broadcast(text, cause=context.trigger.seq, message_id=context.call_id)
    return "The message is on its way to everyone."


@tool(name="ask", idempotent=True, timeout_s=math.inf)
async def _ask(
    context: ToolContext,
    agent_ids: Annotated[list[str], Field(min_length=1, max_length=16, description="Ids of the agents to ask")],
    text: Annotated[str, Field(description="The question, with all that they have to know")],
    timeout_s: Annotated[float, Field(gt=0, le=604_800, description="How long to wait, in seconds")] = 300.0,
) -> Output:
    """Ask agents something and wait for their answers, which are the result of this call."""
    recipients = list(
        dict.fromkeys(agent_id.strip().removeprefix("agent:").removeprefix("@") for agent_id in agent_ids)
    )
    replies, problems = await put_question(context, recipients, text, timeout_s)
    who = [it for it in recipients if it in replies and not is_declined(replies[it])]
    texts, data = await context.read_answers([(replies[it].text, replies[it].metadata or {}) for it in who])
    for it, text in zip(who, texts, strict=True):
        replies[it] = replies[it].model_copy(update={"content": text, "text_representation": None})
    return Output(describe_replies(recipients, replies, problems, timeout_s), data)


@tool(
    name=FINISH,
    idempotent=True,
    description="End your work on the incoming message. Call it when nothing is left to do, or when the message needs "
    "nothing from you.",
)
async def _finish(reason: Annotated[str, Field(description="Why nothing is left to do, in a few words")]) -> str:
    return reason


async def put_question(
    context: ToolContext,
    asked: Sequence[str],
    text: str,
    timeout_s: float,
    is_enough: IsEnough = never_enough,
    *,
    is_handoff: bool = False,
) -> tuple[dict[str, BaseMessage], dict[str, str]]:
    """Ask all agents and wait for their replies. Return the replies, and the reasons why an agent was not asked or will
    not answer. The replies and the reasons are keyed by agent. ``is_enough`` ends the wait early (`Waiter.wait`).
    ``is_handoff``: the asked agent needs the whole thread, because it continues a conversation.
    """
    if context.waiter is None:
        raise ToolError("Waiting for an answer works only inside a reaction.")
    question: dict[str, JsonValue] = {"waiting": [*read_waiting(context.trigger), context.agent_id]}
    # Runs recorded by earlier versions have full prompts and no ``handoff`` field, so a replay must not add the field.
    if is_handoff and context.form != "full":
        question["handoff"] = True
    is_seen = is_watched(context.trigger)
    if is_seen:
        question["watched"] = True
    waiter = context.waiter
    sent: dict[str, Stored] = {}
    problems: dict[str, str] = {}
    ids = {agent_id: f"{context.call_id}-{number}" for number, agent_id in enumerate(asked)}
    await waiter.prepare(ids, is_watched=is_seen)

    async def put(agent_id: str, message_id: str) -> None:
        if agent_id == context.agent_id:
            problems[agent_id] = "was not asked: that is you."
            return
        # Do not ask an agent that waits for this agent: both would wait for each other until the timeout.
        if agent_id in read_waiting(context.trigger):
            problems[agent_id] = "was not asked, because it waits for your answer. Answer it instead."
            return
        try:
            stored = await context.client.send_text(
                agent_id, text, requires_response=[agent_id], metadata={ASK: question}, message_id=message_id
            )
        except RequestError as error:
            problems[agent_id] = f"was not asked: {error.code}: {error}"
            return
        # Expect the reply at once, because the first agent may answer while other agents are still being asked.
        waiter.expect(stored.seq)
        sent[agent_id] = stored

    try:
        await run_together(put(agent_id, message_id) for agent_id, message_id in ids.items())  # in one commit
        questions = {agent_id: sent[agent_id] for agent_id in ids if agent_id in sent}
        replies = await waiter.wait(questions, timeout_s, is_watched=is_seen, is_enough=is_enough)
        unanswerable = {agent_id: f"will not answer: {why}" for agent_id, why in waiter.unanswerable.items()}
        return replies, problems | unanswerable
    except BaseException:  # the call was stopped, so nobody will read the replies
        waiter.forget(stored.seq for stored in sent.values())
        raise


def describe_replies(
    agent_ids: Iterable[str], replies: Mapping[str, BaseMessage], problems: Mapping[str, str], timeout_s: float
) -> str:
    """Return the outcome of a question for the model: one paragraph per agent, with the agent's text in an element."""
    paragraphs = []
    for agent_id in agent_ids:
        reply = replies.get(agent_id)
        if agent_id in problems:
            paragraphs.append(f"{agent_id} {problems[agent_id]}")
        elif reply is None:
            paragraphs.append(f"{agent_id} has not answered within {timeout_s:g} s. A later answer comes as a message.")
        elif is_declined(reply):
            paragraphs.append(render_element("declined", reply.text, sender=agent_id))
        else:
            paragraphs.append(render_element("answer", reply.text, sender=agent_id))
    return "\n\n".join(paragraphs)
