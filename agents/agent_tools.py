"""Agents that other agents call: local agents as tools, remote agents as tools, and instructions from templates.

An agent that is called as a tool sees only the tool's input. Its usage and its records belong to the reaction of the
caller, and the records are stored under the path of the call. Cancelling the caller also cancels the inner agent. To
hand over a conversation, use `Handoff` in `agent`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from jinja2 import StrictUndefined, TemplateError
from pydantic import Field, JsonValue

from roundelay.network.errors import ConfigError
from roundelay.network.messages import BaseMessage

from .agent import KEEPER, Agent, Returns
from .bounded_templates import BoundedEnvironment
from .inbox import is_declined
from .middleware import Around, AskModel, Instruction, Middleware
from .models.model import ModelReply, ModelRequest, ToolCall, derive_call_id
from .network_tools import describe_replies, put_question
from .text import handoff_name, tool_name
from .tools import Output, Tool, ToolContext, tool
from .values import ToolError, TurnState

CHILD_TURNS = 5
"""Default ``max_turns`` of an agent that is called as a tool."""


def agent_tool(
    agent: Agent,
    *,
    name: str | None = None,
    description: str | None = None,
    max_turns: int = CHILD_TURNS,
    max_tool_calls: int | None = None,
) -> Tool:
    """Make a tool of an agent. The tool takes a text and returns the agent's answer.

    Each run of the agent has at most ``max_turns`` turns and ``max_tool_calls`` calls. If ``max_tool_calls`` is None,
    the agent's policy sets that limit.

    The call may be repeated after a restart, because the inner agent then continues from its journal.
    """
    limit = agent.policy.max_tool_calls if max_tool_calls is None else max_tool_calls
    inner = replace(agent, policy=replace(agent.policy, max_turns=max_turns, max_tool_calls=limit))

    async def run(
        context: ToolContext, task: Annotated[str, Field(description="What to do, with all that it has to know")]
    ) -> Output:
        if context.run_agent is None:
            raise ToolError(f"The agent {agent.id} runs only inside a reaction.")
        end = await context.run_agent(inner, task)
        if end.status == "failed":
            raise ToolError(f"{agent.id} failed. {end.answer or ''}".strip())
        return await _read_answer(context, end.answer or end.reason, end.metadata)

    about = description or agent.description or f"Give a task to {agent.id}, who works on it and answers."
    # Mark the tool as idempotent, because the inner run resumes from its records. Set no time limit, because the model
    # calls of the inner agent have their own limits.
    return tool(name=name or tool_name(agent.id), description=about, idempotent=True, timeout_s=math.inf)(run)


def remote_handoff(
    agent_id: str,
    *,
    description: str = "",
    returns: Returns = "to_person",
    timeout_s: float = 86_400.0,
) -> Tool:
    """Make a tool that hands a request over to a remote agent and waits for the answer. The wait survives restarts.

    With ``to_person``, the answer is sent unchanged, and the reaction ends. With ``never``, later messages of the
    thread also go to the remote agent, without a model call (`relay`). With ``to_caller``, the agent that handed over
    reads the answer and continues. If the remote agent declines or does not answer in time, the first agent continues
    and owns the thread again.
    """
    _check_time(agent_id, timeout_s)

    async def run(
        context: ToolContext,
        note: Annotated[str, Field(description="What the other agent must know in addition to the message")],
    ) -> Output:
        message = context.trigger
        text = f"{note}\n\n{message.sender_id} wrote: {message.text}".strip()
        reply = await _ask(context, agent_id, text, timeout_s, is_handoff=True)
        keeper: dict[str, JsonValue] = {KEEPER: agent_id} if returns == "never" else {}
        read = await _read_answer(context, reply.text, reply.metadata or {})
        return replace(read, data={**read.data, **keeper})

    about = f"Hand the conversation over to {agent_id}, who answers. {description}".strip()
    name = handoff_name(agent_id)
    answers = returns != "to_caller"
    return tool(name=name, description=about, idempotent=True, timeout_s=math.inf, answers=answers)(run)


def remote_agent_tool(
    agent_id: str, *, name: str | None = None, description: str = "", timeout_s: float = 3600.0
) -> Tool:
    """Make a tool of a remote agent. The tool takes a text, waits for the agent's answer and returns it. The wait
    survives restarts.

    The work counts against the budget of the remote agent. The calling agent can cite the remote agent's sources if
    both agents use `features.references`.
    """
    _check_time(agent_id, timeout_s)

    async def run(
        context: ToolContext, task: Annotated[str, Field(description="What to do, with all that it has to know")]
    ) -> Output:
        reply = await _ask(context, agent_id, task, timeout_s)
        return await _read_answer(context, reply.text, reply.metadata or {})

    about = description or f"Give a task to {agent_id}, who works on it and answers."
    return tool(name=tool_name(name or agent_id), description=about, idempotent=True, timeout_s=math.inf)(run)


def _check_time(agent_id: str, timeout_s: float) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ToolError(
            f"The time to wait for {agent_id}, timeout_s, is {timeout_s!r} and must be a number of seconds above 0."
        )


async def _ask(
    context: ToolContext, agent_id: str, text: str, timeout_s: float, *, is_handoff: bool = False
) -> BaseMessage:
    """Send a question to one agent and wait for the answer. Raises `ToolError` if no answer arrives."""
    replies, problems = await put_question(context, [agent_id], text, timeout_s, is_handoff=is_handoff)
    reply = replies.get(agent_id)
    if reply is None or is_declined(reply):
        raise ToolError(describe_replies([agent_id], replies, problems, timeout_s))
    return reply


async def _read_answer(context: ToolContext, text: str, metadata: Mapping[str, JsonValue]) -> Output:
    """Return another agent's answer as the result of a call."""
    [read], data = await context.read_answers([(text, metadata)])
    return Output(read, data)


def relay(agent: Agent, keeper: str) -> Agent | None:
    """Return an agent that passes each message of a thread on to ``keeper``, the remote agent that owns the thread. The
    agent's own model answers only if the handover fails. Return None if ``agent`` can no longer hand over to
    ``keeper``.
    """
    name = handoff_name(keeper)
    if agent.find_tool(name) is None:
        return None
    return replace(agent, middleware=(_PassOn(name), *agent.middleware))


class _PassOn(Middleware):
    """Middleware that calls one tool in the first turn without asking a model. This middleware is outermost, so the
    policy and other middleware apply only to calls that the agent's own model requests.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    async def around_model(self, around: Around, request: ModelRequest, proceed: AskModel) -> ModelReply:
        if request.turn > 1:
            return await proceed(request)
        call = ToolCall(derive_call_id(request, 0), self._name, '{"note": ""}')
        return ModelReply(None, (call,), finish_reason="tool_calls", model="relay")


def template_instruction(source: str) -> Instruction:
    """Make an instruction from a jinja template. The template can use the variables ``agent_id``, ``turn``,
    ``max_turns``, ``path``, ``usage``, ``calls`` and ``values`` of the current turn.

    Raises `ConfigError` for an invalid template.
    """
    environment = BoundedEnvironment(undefined=StrictUndefined)
    try:
        template = environment.from_string(source)
        # Render the template once now. Otherwise an unknown variable name would fail only at the first message.
        template.render(_name_facts(TurnState("a", 1, 2)))
    except TemplateError as error:
        raise ConfigError(f"the instruction's template is wrong: {error}") from error

    def instruct(state: TurnState) -> str:
        return template.render(_name_facts(state))

    instruct.__qualname__ = f"template {source}"  # `config_hash` reads this name
    return instruct


def _name_facts(state: TurnState) -> dict[str, object]:
    return {
        name: getattr(state, name) for name in ("agent_id", "turn", "max_turns", "path", "usage", "calls", "values")
    }
