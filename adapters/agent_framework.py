"""Agents of Microsoft Agent Framework as participants: ``await AgentFrameworkAgent("helper", agent).run()``.

Each turn passes the whole thread as messages and uses no session. The agent therefore knows only the messages that the
ledger allows it to see.
"""

from __future__ import annotations

from typing import Unpack

from roundelay.agents.models.model import AssistantMessage, ModelError, Usage
from roundelay.agents.runner import RunnerOptions
from roundelay.network.extras import needs

from .participant import NEEDS_PERSON, AdaptedAgent, IncomingTurn

with needs("agent-framework"):
    from agent_framework import AgentResponseUpdate, Message, SupportsAgentRun


class AgentFrameworkAgent(AdaptedAgent):
    """Lets an ``agent`` of Microsoft Agent Framework take part in a network."""

    framework = "agent-framework"

    def __init__(self, agent_id: str, agent: SupportsAgentRun, **options: Unpack[RunnerOptions]) -> None:
        super().__init__(agent_id, **options)
        self.adapted = agent

    async def answer(self, turn: IncomingTurn) -> str:
        messages = [
            Message("assistant" if isinstance(message, AssistantMessage) else "user", [str(message.content)])
            for message in turn.chat()
        ]
        calls: dict[str, int] = {}
        stream = self.adapted.run(messages, stream=True)
        async for update in stream:
            _show_update(turn, update, calls)
        response = await stream.get_final_response()
        if response.user_input_requests:
            raise ModelError(NEEDS_PERSON, reason="misconfigured")
        used = response.usage_details or {}
        turn.count(
            Usage(
                used.get("input_token_count") or 0,
                used.get("output_token_count") or 0,
                used.get("cache_read_input_token_count") or 0,
                used.get("reasoning_output_token_count") or 0,
            )
        )
        return response.messages[-1].text if response.messages else ""


def _show_update(turn: IncomingTurn, update: AgentResponseUpdate, calls: dict[str, int]) -> None:
    """Show an update of the framework as progress. ``calls`` maps the framework's call ids to call numbers."""
    turn.model = getattr(update.raw_representation, "model", None) or turn.model
    for content in update.contents:
        match content.type:
            case "text":
                turn.stream(content.text or "")
            case "text_reasoning":
                turn.think(content.text or "")
            case "function_call" if content.call_id and content.call_id not in calls:
                calls[content.call_id] = turn.begin_call(content.name or "tool", content.arguments)
            case "function_result" if content.call_id in calls:
                turn.end_call(calls[content.call_id], content.result, ok=content.exception is None)
            case _:
                continue
