"""Agents and teams of AutoGen as participants: ``await AutoGenAgent("helper", make_agent).run()``.

An AutoGen agent has one memory for all conversations, but readers of one thread must not see texts of another thread.
Each message therefore creates a new agent, which gets the conversation as one text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Unpack

from roundelay.agents.models.model import Usage
from roundelay.agents.runner import RunnerOptions
from roundelay.network.extras import needs

from .participant import AdaptedAgent, IncomingTurn

with needs("autogen"):
    from autogen_agentchat.base import TaskResult, TaskRunner
    from autogen_agentchat.messages import (
        BaseAgentEvent,
        BaseChatMessage,
        ModelClientStreamingChunkEvent,
        TextMessage,
        ThoughtEvent,
        ToolCallExecutionEvent,
        ToolCallRequestEvent,
    )
    from autogen_core import CancellationToken


class AutoGenAgent(AdaptedAgent):
    """Lets agents or teams of AutoGen take part in a network as one participant. ``make`` creates an agent or team for
    each message. ``model`` is the model name under which usage is recorded, because AutoGen does not report the name.
    """

    framework = "autogen"

    def __init__(
        self, agent_id: str, make: Callable[[], TaskRunner], *, model: str = "", **options: Unpack[RunnerOptions]
    ) -> None:
        super().__init__(agent_id, **options)
        self.make = make
        self.model_name = model

    async def answer(self, turn: IncomingTurn) -> str:
        token, calls, text = CancellationToken(), dict[str, int](), ""
        task = TextMessage(content=f"{turn.guide}\n\n{turn.prompt}", source="user")
        stream = self.make().run_stream(task=task, cancellation_token=token, output_task_messages=False)
        try:
            async with aclosing(stream):
                async for event in stream:
                    if isinstance(event, TaskResult):
                        messages = [message for message in event.messages if isinstance(message, BaseChatMessage)]
                        text = messages[-1].to_text() if messages else ""
                    else:
                        self._show_event(turn, event, calls)
        except asyncio.CancelledError:
            token.cancel()  # stop AutoGen's own tasks, which would continue otherwise
            raise
        return text

    def _show_event(self, turn: IncomingTurn, event: BaseAgentEvent | BaseChatMessage, calls: dict[str, int]) -> None:
        """Show an event of the framework as progress. ``calls`` maps the framework's call ids to call numbers."""
        if event.models_usage is not None:
            used = Usage(event.models_usage.prompt_tokens, event.models_usage.completion_tokens)
            turn.count(used, self.model_name)
        match event:
            case ModelClientStreamingChunkEvent(content=text):
                turn.stream(text)
            case ThoughtEvent(content=text):
                turn.think(text)
            case ToolCallRequestEvent(content=requested):
                calls.update({call.id: turn.begin_call(call.name, call.arguments) for call in requested})
            case ToolCallExecutionEvent(content=results):
                for result in results:
                    if result.call_id in calls:
                        turn.end_call(calls[result.call_id], result.content, ok=not result.is_error)
            case _:
                pass
