"""The two measured loops: one written by hand with the `openai` SDK, and the reaction of an agent.

Both loops send the same question to the same server. The loops look up five articles with one tool call each, and then
answer with text. ``run`` runs a loop once and checks the result. `turn_cost` decides when and how often the loops run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from chat_server import ANSWER, CALLING_TURNS, TURNS
from openai import AsyncOpenAI
from wire import LoadError, make_token

from roundelay import NetworkClient
from roundelay.agents.agent import Agent
from roundelay.agents.driver import Driver
from roundelay.agents.journal import Journal
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.prompt import ConversationPrompt, render_system_prompt
from roundelay.agents.reaction import Reaction
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.reaction_state import ReactionSetup
from roundelay.agents.recorded import Started
from roundelay.agents.tool_client import ToolClient
from roundelay.agents.tools import Tool, ToolContext, tool
from roundelay.agents.values import Finish
from roundelay.network.messages import DirectMessage, MessageThread

INSTRUCTION = (
    "You keep the stock of a shop. Look articles up before you answer, one after the other, and answer in one sentence."
)
AGENT_ID = "keeper"
TRIGGER = DirectMessage(
    seq=7, message_id="m7", sender_id="mia", sender_kind="human", to=f"agent:{AGENT_ID}", thread_id=f"direct:{AGENT_ID}~mia",
    root=7, hops=0, sent_at=0, content="Are A-0001 to A-0005 in stock?",
)  # fmt: skip
SYSTEM = render_system_prompt(INSTRUCTION, AGENT_ID)
PROMPT = ConversationPrompt().render(
    {TRIGGER.thread_id: MessageThread(thread_id=TRIGGER.thread_id, messages=[])}, TRIGGER.thread_id, TRIGGER
)


async def look_up(article: str, warehouse: str) -> str:
    """Return the stock and the unit price of an article."""
    return f"{article}: 12 pieces in {warehouse}, 9.90 each"


def look_up_blocking(article: str, warehouse: str) -> str:
    """Return the stock and the unit price of an article."""
    return f"{article}: 12 pieces in {warehouse}, 9.90 each"


class Loop(Protocol):
    """One implementation of a measured loop, from the question to the answer."""

    async def run(self) -> None:
        """Run all turns once. Raises `LoadError` if the result is wrong."""

    async def close(self) -> None: ...


class HandWritten:
    """The simplest correct loop: send a request, run the tool calls and append their results, until there are
    no calls.
    """

    def __init__(self, base_url: str, *, stream: bool, function: Callable[..., Any] = look_up) -> None:
        self._client = AsyncOpenAI(base_url=base_url, api_key="none")
        self._stream = stream
        self._is_blocking = function is look_up_blocking
        self._functions = {"look_up": function}
        properties = {"article": {"type": "string"}, "warehouse": {"type": "string"}}
        self._tools: list[Any] = [
            {
                "type": "function",
                "function": {
                    "name": "look_up",
                    "description": look_up.__doc__,
                    "parameters": {
                        "type": "object",
                        "properties": properties,
                        "required": ["article", "warehouse"],
                        "additionalProperties": False,
                    },
                },
            }
        ]

    async def run(self) -> None:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
        while True:
            message = await (self._ask_streaming(messages) if self._stream else self._ask(messages))
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                function = self._functions[call["function"]["name"]]
                result = function(**json.loads(call["function"]["arguments"]))
                content = result if self._is_blocking else await result
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        _check(messages[-1]["content"], sum(message["role"] == "assistant" for message in messages))

    async def _ask(self, messages: list[Any]) -> dict[str, Any]:
        completion = await self._client.chat.completions.create(model="bench", messages=messages, tools=self._tools)
        message = completion.choices[0].message
        if not message.tool_calls:
            return {"role": "assistant", "content": message.content}
        calls: list[Any] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
            if call.type == "function"
        ]
        return {"role": "assistant", "content": message.content, "tool_calls": calls}

    async def _ask_streaming(self, messages: list[Any]) -> dict[str, Any]:
        stream = await self._client.chat.completions.create(
            model="bench",
            messages=messages,
            tools=self._tools,
            stream=True,
            stream_options={"include_usage": True},
        )
        content = ""
        calls: dict[int, dict[str, Any]] = {}
        async for chunk in stream:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    function = part.function
                    if part.index not in calls:
                        calls[part.index] = {
                            "id": part.id,
                            "type": "function",
                            "function": {"name": function.name if function else "", "arguments": ""},
                        }
                    calls[part.index]["function"]["arguments"] += (function.arguments if function else "") or ""
        if not calls:
            return {"role": "assistant", "content": content}
        return {"role": "assistant", "content": content or None, "tool_calls": list(calls.values())}

    async def close(self) -> None:
        await self._client.close()


@dataclass(frozen=True, slots=True)
class _Kept:
    duplicate: bool = False


class Nowhere:
    """A destination for the records of a journal that stores nothing, so that only the loop is measured."""

    agent_id = "nobody"

    async def record(self, reaction: str, kind: str, body: Mapping[str, object], *, record_id: str) -> _Kept:
        return _KEPT

    async def call(self, op: str, args: Mapping[str, object] | None = None, *, call_id: str | None = None) -> Any:
        raise LoadError(f"a measured reaction asked the hub for {op}")


_KEPT = _Kept()


class OurReaction:
    """A reaction in the form in which a runner runs it, with `Reaction`, `Driver` and a journal.

    The records go to ``client``, or nowhere if there is none. ``options`` are options of the agent. Without a
    ``function``, the agent's middleware adds the tool. ``content`` is the content of the trigger message. The runs use
    ``triggers`` in turn: a hub refuses more than a few open reactions to one message.
    """

    def __init__(
        self,
        base_url: str,
        *,
        stream: bool,
        function: Callable[..., Any] | Tool | None = look_up,
        client: NetworkClient | None = None,
        triggers: Sequence[int] = (TRIGGER.seq,),
        options: Mapping[str, Any] | None = None,
        answer: str = ANSWER,
        content: Any = TRIGGER.content,
    ) -> None:
        self._model = OpenAIModel("bench", base_url=base_url, stream=stream)
        made: list[Tool] = []
        if function is not None:
            made.append(function if isinstance(function, Tool) else tool(name="look_up")(function))
        self._agent = Agent(AGENT_ID, INSTRUCTION, self._model, made, **(options or {}))
        self._answer = answer
        self._client = client
        self._triggers = itertools.cycle(triggers)
        self._content = content
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        # Make the reaction ids unique. Reaction ids usually differ by the trigger, but several runs here have the same
        # trigger, so vary the epoch.
        trigger = TRIGGER.model_copy(update={"seq": next(self._triggers), "content": self._content})
        reaction_name = reaction_id(AGENT_ID, trigger.seq, f"{id(self)}-{next(self._numbers)}")
        journal = Journal(self._client or Nowhere(), reaction_name)
        await journal.record_started(
            Started(
                trigger=trigger.seq,
                thread_id=TRIGGER.thread_id,
                as_of=trigger.seq,
                manifest=[trigger.seq],
                config_hash="bench",
            )
        )
        reaction = Reaction(
            self._agent,
            prompt=PROMPT,
            answers=True,
            setup=ReactionSetup(threads=(TRIGGER.thread_id,), frame=partial(render_system_prompt, agent_id=AGENT_ID)),
        )
        driver = Driver(reaction, journal=journal, make_context=partial(self._make_context, reaction_name, trigger))
        finish: Finish = await driver.run(config_hash="bench")
        await journal.record_finished(finish)
        _check(finish.answer, finish.turns, self._answer)
        if finish.tool_calls < CALLING_TURNS:
            raise LoadError(f"a reaction ran {finish.tool_calls} tools, not {CALLING_TURNS}")

    def _make_context(self, reaction: str, trigger: DirectMessage, call_id: str, turn: int) -> ToolContext:
        client: Any = self._client or Nowhere()
        client = ToolClient(client, call_id=call_id, cause=trigger.seq, visibility="people")
        return ToolContext(AGENT_ID, reaction, turn, call_id, trigger, client)

    async def close(self) -> None:
        for layer in self._agent.middleware:
            await layer.close()
        await self._model.close()


def _check(answer: str | None, turns: int, expected: str = ANSWER) -> None:
    if answer != expected or turns != TURNS:
        raise LoadError(f"a run ended after {turns} turns with {answer!r}, not after {TURNS} with {expected!r}")


async def join(url: str, messages: int) -> tuple[NetworkClient, list[int]]:
    """Connect the agent as its only reactor and broadcast this number of messages. Return the connection, and the seqs
    of the messages, to use as triggers.
    """
    client = NetworkClient(AGENT_ID, url, token=make_token(AGENT_ID), role="reactor")
    await client.connect()
    stored = [await client.broadcast("Are A-0001 to A-0005 in stock?") for _ in range(messages)]
    return client, [message.seq for message in stored]
