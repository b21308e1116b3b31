"""Agents of the OpenAI Agents SDK as participants: ``await OpenAIAgentsAgent("helper", agent).run()``.

Each turn passes the whole thread as input items and uses no session. The agent therefore knows only the messages that
the ledger allows it to see. The SDK sends traces that contain prompts to OpenAI, unless its tracing is disabled
(`set_tracing_disabled`).
"""

from __future__ import annotations

import asyncio
from typing import Any, Unpack

from pydantic import TypeAdapter

from roundelay.agents.models.model import AssistantMessage, ModelError, Usage
from roundelay.agents.runner import RunnerOptions
from roundelay.network.extras import needs

from .participant import NEEDS_PERSON, AdaptedAgent, IncomingTurn

with needs("openai-agents"):
    from agents import Agent, RunConfig, Runner, StreamEvent


class OpenAIAgentsAgent(AdaptedAgent):
    """Lets an ``agent`` of the OpenAI Agents SDK take part in a network. Each run gets ``context`` and
    ``run_config``.
    """

    framework = "openai-agents"

    def __init__(
        self,
        agent_id: str,
        agent: Agent[Any],
        *,
        context: Any = None,
        run_config: RunConfig | None = None,
        **options: Unpack[RunnerOptions],
    ) -> None:
        super().__init__(agent_id, **options)
        self.adapted = agent
        self.context = context
        self.run_config = run_config

    async def answer(self, turn: IncomingTurn) -> str:
        items: list[Any] = [
            {"role": "assistant" if isinstance(message, AssistantMessage) else "user", "content": message.content}
            for message in turn.chat()
        ]
        result = Runner.run_streamed(self.adapted, items, context=self.context, run_config=self.run_config)
        calls: dict[str, int] = {}
        try:
            async for event in result.stream_events():
                _show_event(turn, event, calls)
        except asyncio.CancelledError:
            result.cancel()  # stop the SDK's own tasks, which would continue otherwise
            raise
        if result.interruptions:
            raise ModelError(NEEDS_PERSON, reason="misconfigured")
        used, last = result.context_wrapper.usage, result.last_agent.model
        cached, thought = used.input_tokens_details.cached_tokens, used.output_tokens_details.reasoning_tokens
        name = last if isinstance(last, str) else getattr(last, "model", "")
        turn.count(Usage(used.input_tokens, used.output_tokens, cached, thought), str(name))
        output: object = result.final_output
        if output is None or isinstance(output, str):
            return output or ""
        return TypeAdapter(type(output)).dump_json(output).decode()


def _show_event(turn: IncomingTurn, event: StreamEvent, calls: dict[str, int]) -> None:
    """Show an event of the framework as progress. ``calls`` maps the framework's call ids to call numbers."""
    if event.type == "raw_response_event":
        if event.data.type == "response.output_text.delta":
            turn.stream(event.data.delta)
        elif event.data.type in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
            turn.think(event.data.delta)
    elif event.type == "run_item_stream_event":
        item = event.item
        if item.type == "tool_call_item" and item.call_id:
            calls[item.call_id] = turn.begin_call(item.tool_name or "tool", getattr(item.raw_item, "arguments", ""))
        elif item.type == "tool_call_output_item" and item.call_id in calls:
            turn.end_call(calls[item.call_id], item.output)
