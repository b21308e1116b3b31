"""Agents of AgentScope as participants: ``await AgentScopeAgent("helper", make_agent).run()``.

Such an agent remembers what it was told, in one memory for all conversations. So one is made anew for each message, and
is given the thread: what was said in one enters no other that may not know it. Tools that ask a person for permission
cannot: give the agent rules, or tools, that decide without one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Unpack

from roundelay.agents.models.model import AssistantMessage, ModelError, Usage
from roundelay.agents.runner import RunnerOptions
from roundelay.network.extras import needs

from .participant import AdaptedAgent, IncomingTurn

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
    """The agent that ``make`` gives as a participant."""

    framework = "agentscope"

    def __init__(self, agent_id: str, make: Callable[[], Agent], **options: Unpack[RunnerOptions]) -> None:
        super().__init__(agent_id, **options)
        self.make = make

    async def answer(self, turn: IncomingTurn) -> str:
        agent, calls, text = self.make(), dict[str, int](), ""
        said = [
            AssistantMsg(agent.name, message.content)
            if isinstance(message, AssistantMessage)
            else UserMsg("user", message.content)
            for message in turn.chat()
        ]
        async with aclosing(agent.reply_stream(said, yield_final_msg=True)) as stream:
            async for event in stream:
                if isinstance(event, Msg):
                    text = event.get_text_content() or ""
                else:
                    _tell(turn, event, calls)
        return text


def _tell(turn: IncomingTurn, event: AgentEvent, calls: dict[str, int]) -> None:
    """Show what an event brings; ``calls`` are the tool calls so far, by the framework's ids. Raises `ModelError` for
    what ends the work without an answer."""
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
            raise ModelError("The agent waits for a person, whom an adapter does not ask.", reason="misconfigured")
        case ReplyEndEvent() if event.error is not None:
            raise ModelError(f"The agent failed ({event.error.type}): {event.error.message}", reason="server")
        case _:
            pass
