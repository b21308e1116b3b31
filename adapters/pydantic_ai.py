"""Agents of Pydantic AI as participants: ``await PydanticAIAgent("helper", agent).run()``.

The thread becomes the message history, and the latest message becomes the prompt. The agent's `system_prompt` is
inserted before the history, and its `instructions` are always included. An output that is not text is sent as JSON.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from functools import partial
from typing import Any, Unpack

from pydantic import TypeAdapter

from roundelay.agents.models.model import AssistantMessage, ModelError, Usage
from roundelay.agents.runner import RunnerOptions
from roundelay.network.extras import needs

from .participant import NEEDS_PERSON, AdaptedAgent, IncomingTurn

with needs("pydantic-ai"):
    from pydantic_ai.agent import AbstractAgent
    from pydantic_ai.capabilities import ReinjectSystemPrompt
    from pydantic_ai.messages import (
        AgentStreamEvent,
        FunctionToolCallEvent,
        FunctionToolResultEvent,
        ModelMessage,
        ModelRequest,
        ModelResponse,
        PartDeltaEvent,
        PartStartEvent,
        TextPart,
        TextPartDelta,
        ThinkingPart,
        ThinkingPartDelta,
        UserPromptPart,
    )
    from pydantic_ai.tools import DeferredToolRequests, RunContext


class PydanticAIAgent(AdaptedAgent):
    """Lets an ``agent`` of Pydantic AI take part in a network. Each run gets ``deps``."""

    framework = "pydantic-ai"

    def __init__(
        self, agent_id: str, agent: AbstractAgent[Any, Any], *, deps: Any = None, **options: Unpack[RunnerOptions]
    ) -> None:
        super().__init__(agent_id, **options)
        self.adapted = agent
        self.deps = deps

    async def answer(self, turn: IncomingTurn) -> str:
        *before, last = turn.chat()
        history: list[ModelMessage] = [
            ModelResponse([TextPart(message.content or "")])
            if isinstance(message, AssistantMessage)
            else ModelRequest([UserPromptPart(str(message.content))])
            for message in before
        ]
        result = await self.adapted.run(
            str(last.content),
            message_history=history,
            deps=self.deps,
            capabilities=[ReinjectSystemPrompt()],
            event_stream_handler=partial(_show_events, turn),
        )
        used = result.usage
        turn.count(
            Usage(used.input_tokens, used.output_tokens, used.cache_read_tokens), result.response.model_name or ""
        )
        output: object = result.output
        if isinstance(output, DeferredToolRequests):
            raise ModelError(NEEDS_PERSON, reason="misconfigured")
        return output if isinstance(output, str) else TypeAdapter(type(output)).dump_json(output).decode()


async def _show_events(turn: IncomingTurn, _: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
    """Show the events of one step of the agent: a streamed reply, or tool calls."""
    calls: dict[str, int] = {}
    async for event in events:
        match event:
            case PartStartEvent(part=TextPart(content=text)) | PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
                turn.stream(text)
            case PartStartEvent(part=ThinkingPart(content=text)):
                turn.think(text)
            case PartDeltaEvent(delta=ThinkingPartDelta(content_delta=str(text))):
                turn.think(text)
            case FunctionToolCallEvent(part=part):
                calls[part.tool_call_id] = turn.begin_call(part.tool_name, part.args)
            case FunctionToolResultEvent(part=part) if part.tool_call_id in calls:
                is_ok = part.outcome == "success"
                turn.end_call(calls[part.tool_call_id], part.model_response_str(), ok=is_ok)
            case _:
                continue
