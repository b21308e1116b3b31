"""Agents of AgentScope as participants: ``await AgentScopeAgent("helper", make_agent).run()``.

An AgentScope agent has one memory for all conversations, but readers of one thread must not see texts of another
thread. Each message therefore creates a new agent, which gets the thread. Tools that ask a person for permission do not
work. Configure permission rules, or use tools that decide without a person.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Unpack

from roundelay.agents.models.model import AssistantMessage, ModelError, Usage
from roundelay.agents.runner import RunnerOptions
from roundelay.network.extras import needs

from .participant import NEEDS_PERSON, AdaptedAgent, IncomingTurn

with needs("agentscope"):
    from agentscope.agent import Agent
    from agentscope.event import (
        AgentEvent,
        ModelCallEndEvent,
        ModelCallStartEvent,
        ReplyEndEvent,
        RequireExternalExecutionEvent,
        RequireUserConfirmEvent,
        TextBlockDeltaEvent,
        ThinkingBlockDeltaEvent,
        ToolResultEndEvent,
        ToolResultStartEvent,
    )
    from agentscope.message import AssistantMsg, Msg, ToolResultState, UserMsg


class AgentScopeAgent(AdaptedAgent):
    """Lets agents of AgentScope take part in a network as one participant. ``make`` creates an agent for each
    message.
    """

    framework = "agentscope"

    def __init__(self, agent_id: str, make: Callable[[], Agent], **options: Unpack[RunnerOptions]) -> None:
        super().__init__(agent_id, **options)
        self.make = make

    async def answer(self, turn: IncomingTurn) -> str:
        agent, calls, text = self.make(), dict[str, int](), ""
        messages = [
            AssistantMsg(agent.name, message.content)
            if isinstance(message, AssistantMessage)
            else UserMsg("user", message.content)
            for message in turn.chat()
        ]
        async with aclosing(agent.reply_stream(messages, yield_final_msg=True)) as stream:
            async for event in stream:
                if isinstance(event, Msg):
                    text = event.get_text_content() or ""
                else:
                    _show_event(turn, event, calls)
        return text


def _show_event(turn: IncomingTurn, event: AgentEvent, calls: dict[str, int]) -> None:
    """Show an event of the framework as progress. ``calls`` maps the framework's call ids to call numbers. Raises
    `ModelError` if the work ends without an answer.
    """
    match event:
        case ModelCallStartEvent():
            turn.model = event.model_name
        case ModelCallEndEvent():
            turn.count(Usage(event.input_tokens, event.output_tokens, event.cache_input_tokens))
        case TextBlockDeltaEvent():
            turn.stream(event.delta)
        case ThinkingBlockDeltaEvent():
            turn.think(event.delta)
        case ToolResultStartEvent():
            calls[event.tool_call_id] = turn.begin_call(event.tool_call_name)
        case ToolResultEndEvent() if event.tool_call_id in calls:
            turn.end_call(calls[event.tool_call_id], ok=event.state == ToolResultState.SUCCESS)
        case RequireUserConfirmEvent() | RequireExternalExecutionEvent():
            raise ModelError(NEEDS_PERSON, reason="misconfigured")
        case ReplyEndEvent() if event.error is not None:
            raise ModelError(f"The agent failed ({event.error.type}): {event.error.message}", reason="server")
        case _:
            pass
