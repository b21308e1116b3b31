"""Graphs of LangGraph, LangChain's agents among them, as participants: ``await LangGraphAgent("helper", graph).run()``.

A graph is one whose state has ``messages``, its last one the answer. Without a checkpointer it is given the thread as
it stands in the ledger. With one it remembers by itself, under the thread's id as ``thread_id``: it is given what came
since its last answer, under ids of the messages, and killed in the middle it goes on at its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack
from uuid import UUID

from roundelay.agents.models.model import AssistantMessage, ModelError, Usage
from roundelay.agents.runner import RunnerOptions
from roundelay.network import messages as ledger
from roundelay.network.extras import needs

from .participant import AdaptedAgent, IncomingTurn, mark

with needs("langgraph"):
    from langchain_core.callbacks import AsyncCallbackHandler
    from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
    from langchain_core.outputs import ChatGeneration, LLMResult
    from langchain_core.runnables import RunnableConfig
    from langgraph.pregel import Pregel


LEFT_OPEN = "This call was broken off. Whether it took effect is unknown."


class LangGraphAgent(AdaptedAgent):
    """A compiled ``graph`` as a participant. ``config`` is what each of its runs has, beside its thread."""

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
        watch = _Watch(turn)
        given = self.config.get("callbacks") or []
        config = RunnableConfig(
            **{
                **self.config,
                "configurable": {**self.config.get("configurable", {}), "thread_id": turn.message.thread_id},
                "callbacks": [*given, watch] if isinstance(given, list) else [watch],
            }
        )
        remembers = bool(self.graph.checkpointer)
        messages = await self._recall(turn, config) if remembers else _read_chat(turn)
        if isinstance(messages, str):
            return messages
        state: dict[str, Any] = {}
        more: dict[str, Any] = {"durability": "sync"} if remembers else {}
        asked = {"messages": messages} if messages is not None else None
        async for mode, value in self.graph.astream(asked, config, stream_mode=["messages", "values"], **more):
            if mode == "values":
                state = value
            elif isinstance(value[0], AIMessage):
                turn.stream(value[0].text)
        if state.get("__interrupt__"):
            reason = "The graph waits for a person (interrupt), whom an adapter does not ask."
            raise ModelError(reason, reason="misconfigured")
        return _read_answer(state.get("messages", []))

    async def _recall(self, turn: IncomingTurn, config: RunnableConfig) -> list[AnyMessage] | str | None:
        """Give what the graph does not know yet; None if it is to go on where it was; its answer if it has given it."""
        snapshot = await self.graph.aget_state(config)
        known: Sequence[BaseMessage] = snapshot.values.get("messages", [])
        if any(message.id == _name(turn.message) for message in known):
            return None if snapshot.next else _read_answer(known)
        answered = {message.tool_call_id for message in known if isinstance(message, ToolMessage)}
        calls = [call["id"] for message in known if isinstance(message, AIMessage) for call in message.tool_calls]
        return [
            *(
                ToolMessage(LEFT_OPEN, tool_call_id=call_id)
                for call_id in calls
                if call_id is not None and call_id not in answered
            ),
            # Under one id each: what is there already is not added again.
            HumanMessage(turn.guide, id="roundelay"),
            *(HumanMessage(mark(message), id=_name(message)) for message in turn.news),
        ]


def _name(message: ledger.BaseMessage) -> str:
    """Under this a graph remembers a message. A message's own id is its sender's to choose: by another's, or by that of
    the guide, one would write over what is remembered there."""
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


class _Watch(AsyncCallbackHandler):
    """Tells of the tools that run in a graph, and counts what its models use."""

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
