"""Graphs of LangGraph, including LangChain's agents, as participants: ``await LangGraphAgent("helper", graph).run()``.

The state of the graph must have a key ``messages``, whose last message is the answer. Without a checkpointer, the graph
gets the whole thread from the ledger. With a checkpointer, the graph stores the messages itself, under the id of the
thread (``thread_id``). The graph then gets only the messages since its last answer, with their ids. After a kill, the
graph continues at its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack
from uuid import UUID

from roundelay.agents.models.model import AssistantMessage, ModelError, Usage
from roundelay.agents.runner import RunnerOptions
from roundelay.network import messages as ledger
from roundelay.network.extras import needs

from .participant import NEEDS_PERSON, AdaptedAgent, IncomingTurn, mark

with needs("langgraph"):
    from langchain_core.callbacks import AsyncCallbackHandler
    from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
    from langchain_core.outputs import ChatGeneration, LLMResult
    from langchain_core.runnables import RunnableConfig
    from langgraph.pregel import Pregel


LEFT_OPEN = "This call was interrupted. It is unknown whether it took effect."


class LangGraphAgent(AdaptedAgent):
    """Lets a compiled ``graph`` take part in a network. Each run gets ``config`` in addition to the thread."""

    framework = "langgraph"

    def __init__(
        self,
        agent_id: str,
        graph: Pregel[Any, Any, Any, Any],
        *,
        config: RunnableConfig | None = None,
        **options: Unpack[RunnerOptions],
    ) -> None:
        super().__init__(agent_id, **options)
        self.graph = graph
        self.config = config or {}

    async def answer(self, turn: IncomingTurn) -> str:
        observer = _Observer(turn)
        callbacks = self.config.get("callbacks") or []
        config = RunnableConfig(
            **{
                **self.config,
                "configurable": {**self.config.get("configurable", {}), "thread_id": turn.message.thread_id},
                "callbacks": [*callbacks, observer] if isinstance(callbacks, list) else [observer],
            }
        )
        remembers = bool(self.graph.checkpointer)
        messages = await self._recall(turn, config) if remembers else _read_chat(turn)
        if isinstance(messages, str):
            return messages
        state: dict[str, Any] = {}
        # Store each checkpoint before the next step. Otherwise a kill could lose the record of a tool's effect, and the
        # tool would run again.
        options: dict[str, Any] = {"durability": "sync"} if remembers else {}
        # Pass None to continue at the checkpoint. Any other input would start the graph from its beginning.
        graph_input = {"messages": messages} if messages is not None else None
        async for mode, value in self.graph.astream(graph_input, config, stream_mode=["messages", "values"], **options):
            if mode == "values":
                state = value
            elif isinstance(value[0], AIMessage):
                turn.stream(value[0].text)
        if state.get("__interrupt__"):
            raise ModelError(NEEDS_PERSON, reason="misconfigured")
        return _read_answer(state.get("messages", []))

    async def _recall(self, turn: IncomingTurn, config: RunnableConfig) -> list[AnyMessage] | str | None:
        """Return the messages that the graph does not know yet. Return None if the graph should continue at its
        checkpoint, and a text if the graph has already produced this answer.
        """
        snapshot = await self.graph.aget_state(config)
        messages: Sequence[BaseMessage] = snapshot.values.get("messages", [])
        if any(message.id == _make_id(turn.message) for message in messages):
            # The graph knows this message, because an earlier process ran it to a checkpoint or to its end.
            return None if snapshot.next else _read_answer(messages)
        # Add a result to each unanswered call, as a killed run may have left. Providers refuse a history with a call
        # that has no result.
        answered = {message.tool_call_id for message in messages if isinstance(message, ToolMessage)}
        calls = [call["id"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
        return [
            *(
                ToolMessage(LEFT_OPEN, tool_call_id=call_id)
                for call_id in calls
                if call_id is not None and call_id not in answered
            ),
            # Use a fixed id for each message, so that the graph does not add a known message again.
            HumanMessage(turn.guide, id="roundelay"),
            *(HumanMessage(mark(message), id=_make_id(message)) for message in turn.news),
        ]


def _make_id(message: ledger.BaseMessage) -> str:
    """Return the id of a message in the graph's memory.

    The id includes the sender, because senders choose message ids freely. Otherwise a sender could overwrite another
    sender's message or the guide.
    """
    return f"{message.sender_id}/{message.message_id}"


def _read_chat(turn: IncomingTurn) -> list[AnyMessage]:
    return [
        AIMessage(message.content or "")
        if isinstance(message, AssistantMessage)
        else HumanMessage(str(message.content))
        for message in turn.chat()
    ]


def _read_answer(messages: Sequence[BaseMessage]) -> str:
    return messages[-1].text if messages and isinstance(messages[-1], AIMessage) else ""


class _Observer(AsyncCallbackHandler):
    """Shows the tool calls of a graph, and counts the token usage of its models."""

    def __init__(self, turn: IncomingTurn) -> None:
        self._turn = turn
        self._calls: dict[UUID, int] = {}

    async def on_tool_start(self, serialized: dict[str, Any], input_str: str, *, run_id: UUID, **_: Any) -> None:
        self._calls[run_id] = self._turn.begin_call(str((serialized or {}).get("name", "tool")), input_str)

    async def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        if run_id in self._calls:
            is_ok = getattr(output, "status", "success") == "success"
            self._turn.end_call(self._calls[run_id], getattr(output, "content", output), ok=is_ok)

    async def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        if run_id in self._calls:
            self._turn.end_call(self._calls[run_id], error, ok=False)

    async def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        for generation in (generation for several in response.generations for generation in several):
            if not isinstance(generation, ChatGeneration) or not isinstance(generation.message, AIMessage):
                continue
            used = generation.message.usage_metadata
            if used is not None:
                cached = used.get("input_token_details", {}).get("cache_read") or 0
                thought = used.get("output_token_details", {}).get("reasoning") or 0
                name = generation.message.response_metadata.get("model_name", "")
                self._turn.count(Usage(used["input_tokens"], used["output_tokens"], cached, thought), name)
