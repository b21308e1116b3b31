"""Tests of every model class on every common server: ten turns with tools, with and without streaming, resumed or
not.

The servers (`tests.support.model_servers`) are strict stand-ins. Each server names the public source of its rules.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from roundelay.agents import Agent, Handoff, tool
from roundelay.agents.driver import Driver
from roundelay.agents.events import Event, ModelOutput, ModelRetry
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.tracing import Tracing
from roundelay.agents.history import sanitize_call
from roundelay.agents.journal import Journal
from roundelay.agents.models.fallback import FallbackModel
from roundelay.agents.models.model import (
    AssistantMessage,
    Model,
    ModelRequest,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.reaction import Reaction
from roundelay.agents.reaction_state import ReactionSetup
from roundelay.agents.values import NewMessages
from tests.support.loops import Killed, Loop, Records, make_context
from tests.support.model_servers import (
    ANSWER,
    SERVERS,
    STORY,
    THOUGHT,
    AzureServer,
    BedrockServer,
    DeepSeekServer,
    GeminiServer,
    KimiServer,
    MistralServer,
    ModelServer,
    ThinkingServer,
    VllmServer,
)
from tests.support.openai_rules import Refusal

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streaming"])
streamed = pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=pytest.mark.full), True], ids=["plain", "streaming"]
)
on_each_server = pytest.mark.parametrize("kind", SERVERS, ids=lambda it: it.kind)

MEANWHILE = "mia wrote meanwhile: hurry up"


@dataclass
class Arrivals:
    """One message that arrives before turn 8, and that `on_new_message: inject` gives to the model."""

    reaction: Reaction
    pending: list[NewMessages]

    async def take(self) -> NewMessages | None:
        return self.pending[0] if self.pending and self.reaction.turn == 8 else None

    async def settle(self, new: NewMessages) -> None:
        self.pending.remove(new)


@dataclass
class TenTurns(Loop):
    pending: list[NewMessages] = field(default_factory=lambda: [NewMessages(MEANWHILE, (8,), answers=True)])

    def make_driver(self, journal: Journal) -> Driver:
        reaction = Reaction(
            self.agent, prompt="<conversation/>", answers=True, setup=ReactionSetup(threads=("direct:bob~mia",))
        )
        arrivals = Arrivals(reaction, self.pending)
        return Driver(
            reaction, journal=journal, make_context=make_context, new_messages=arrivals, on_event=self.events.append
        )


def make_agent(model: Model, **options: Any) -> Agent:
    @tool(idempotent=True)
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @tool(idempotent=True)
    def look(at: str) -> str:
        """Look at something."""
        return f"saw {at}"

    @tool(idempotent=True)
    def wait() -> str:
        """Wait."""
        return ""

    return Agent("bob", "You work.", model, [add, look, wait], **options)


def open_model(server: ModelServer, *, stream: bool = False, name: str = "", **options: Any) -> OpenAIModel:
    return OpenAIModel(name or server.model, base_url=server.base_url, stream=stream, **options)


WANTED = [
    {"add": str(given.get("a", 0) + given.get("b", 0)), "look": f"saw {given.get('at')}", "wait": ""}[name]
    for said in STORY
    for name, given in said.calls
]


def results_of(loop: Loop) -> list[str]:
    return [it["content"] for it in sorted(loop.records.bodies("tool_result"), key=lambda it: (it["turn"], it["call"]))]


def shown_by(events: list[Event]) -> list[str]:
    """Return the texts that people saw, one for each turn."""
    turns: dict[int, str] = {}
    for event in events:
        match event:
            case ModelOutput():
                turns[event.turn] = turns.get(event.turn, "") + event.text
            case ModelRetry():
                turns.pop(event.turn, None)
    return [it for _, it in sorted(turns.items()) if it]


def count_learned(kind: type[ModelServer], stream: bool) -> int:
    """Return the number of rules that a model learns from a server on loopback, in addition to those known from its
    name. The Mistral template on llama.cpp has one, and Mistral's API refuses `stream_options`.
    """
    return {"llama.cpp": 1, "mistral": int(stream)}.get(kind.kind, 0)


@both_ways
@on_each_server
async def test_ten_turns_with_tools_work_on_every_server(kind: type[ModelServer], stream: bool) -> None:
    async with kind() as server, open_model(server, stream=stream) as model:
        loop = TenTurns(make_agent(model))
        end = await loop.drive()
    learned = count_learned(kind, stream)
    assert (end.status, end.answer, end.turns) == ("finished", ANSWER, 11), server.refused
    assert results_of(loop) == WANTED
    assert len(server.refused) == learned, server.refused
    assert len(server.requests) == 11 + learned
    assert MEANWHILE in json.dumps(server.requests[-1]["messages"])
    assert THOUGHT not in str(end.answer)
    assert not any(isinstance(it, ModelRetry) for it in loop.events)
    if stream:
        shown = [it.strip() for it in shown_by(loop.events)]
        assert shown == [it.text for it in STORY if it.text], "people saw each text once"


@both_ways
@on_each_server
async def test_calls_that_a_model_wrote_wrong_do_not_end_the_conversation(
    kind: type[ModelServer], stream: bool
) -> None:
    written = ["{broken", "", " ", "[1]", '"text"', "NaN", '{"a": NaN}', '{"a": 1}']
    made = tuple(sanitize_call(ToolCall(f"callnum{at:02}", "add", it)) for at, it in enumerate(written))
    results = tuple(ToolMessage(it.id, "wrong or right") for it in made)
    add = ToolSpec("add", "Add.", {"type": "object", "properties": {}})
    request = ModelRequest((UserMessage("Add."), AssistantMessage(None, made), *results), (add,))
    async with kind() as server, open_model(server, stream=stream) as model:
        await model.complete(request)
    assert [it for it in server.refused if "stream_options" not in it] == []
    sent = [it["function"]["arguments"] for it in server.requests[-1]["messages"][1]["tool_calls"]]
    assert sent == [
        '{"invalid": "{broken"}', "{}", "{}", '{"invalid": "[1]"}', '{"invalid": "\\"text\\""}',
        '{"invalid": "NaN"}', '{"invalid": "{\\"a\\": NaN}"}', '{"a": 1}',
    ]  # fmt: skip


@both_ways
async def test_the_tokens_of_kimi_are_counted(stream: bool) -> None:
    async with KimiServer() as server, open_model(server, stream=stream) as model:
        reply = await model.complete(ModelRequest((UserMessage("Hello?"),)))
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, 10)


@on_each_server
async def test_each_request_begins_as_the_one_before(kind: type[ModelServer]) -> None:
    """Prompt caches of servers work only with an unchanged prefix, so the text of a turn comes last."""
    async with kind() as server, open_model(server) as model:
        await TenTurns(make_agent(model)).drive()
    told = [it["messages"] for it in server.requests]
    if count_learned(kind, stream=False):
        told = told[2:]  # since the rule was learned
    for before, after in pairwise(told[1:]):
        assert after[: len(before) - 1] == before[:-1]
        if before[-1]["role"] == "tool":
            result = before[-1]["content"].partition("\n\n<system_note>")[0]
            assert after[len(before) - 1]["content"].startswith(result)


@streamed
@on_each_server
async def test_a_model_without_tool_calls_works_on_every_server(kind: type[ModelServer], stream: bool) -> None:
    async with kind() as server, open_model(server, stream=stream, tool_mode="json_schema") as model:
        loop = TenTurns(make_agent(model))
        end = await loop.drive()
    assert (end.status, end.answer) == ("finished", ANSWER), server.refused
    assert len(server.refused) <= count_learned(kind, stream)


@streamed
@on_each_server
async def test_a_fallback_goes_on_with_what_another_model_began(kind: type[ModelServer], stream: bool) -> None:
    """The first model thinks and is down from turn 6 on. The thinking and signatures of the first model are not sent
    to the second one.
    """
    async with DeepSeekServer(down_from=6) as first, kind() as second:
        model = FallbackModel(open_model(first, stream=stream), open_model(second, stream=stream))
        loop = TenTurns(make_agent(model))
        end = await loop.drive()
        await model.close()
    assert (end.status, end.answer) == ("finished", ANSWER), second.refused
    assert results_of(loop) == WANTED
    assert first.refused == []
    assert len(second.refused) == count_learned(kind, stream), second.refused
    for said in STORY[:5]:
        assert f"{THOUGHT} {said.turn}" + '"' not in json.dumps(second.requests), "thinking of another model"


THREE: list[tuple[type[ModelServer], type[ModelServer], type[ModelServer]]] = [
    (MistralServer, ModelServer, DeepSeekServer),
    (GeminiServer, KimiServer, BedrockServer),
    (KimiServer, VllmServer, AzureServer),
]


@pytest.mark.full
@both_ways
@pytest.mark.parametrize("kinds", THREE, ids=lambda kinds: "-".join(it.kind for it in kinds))
async def test_a_reaction_goes_back_and_forth_between_three_servers(
    kinds: tuple[type[ModelServer], ...], stream: bool
) -> None:
    """The first two servers are up only in some turns. Each server gets back the thinking of its own replies, even
    after a restart.
    """

    def open_models() -> FallbackModel:
        return FallbackModel(*(open_model(it, stream=stream) for it in servers))

    up: tuple[set[int], ...] = ({1, 2, 6, 7, 8, 11}, {3, 4, 9}, set(range(12)))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(it()) for it in kinds]
        for server, turns in zip(servers, up, strict=True):
            server.up = turns
        whole = TenTurns(make_agent(model := open_models()))
        end = await whole.drive()
        await model.close()
        told = [list(it.requests) for it in servers]
        assert (end.status, end.answer) == ("finished", ANSWER), [it.refused for it in servers]
        assert results_of(whole) == WANTED
        for server, kind, requests in zip(servers, kinds, told, strict=True):
            # The model's name does not reveal Azure on loopback, so the model learns that the IDs of vLLM's calls are
            # too long.
            assert len(server.refused) == count_learned(kind, stream) + (kind is AzureServer), server.refused
            for said in STORY:
                is_own = said.turn in server._gave
                assert is_own or f'{THOUGHT} {said.turn}"' not in json.dumps(requests), "another's thinking"
        for last in (8, 17, 25):
            loop = TenTurns(make_agent(model := open_models()), Records(kill_after=last))
            with pytest.raises(Killed):
                await loop.drive()
            await model.close()
            loop.records.kill_after, loop.records.killed = 0, asyncio.Event()
            before = [len(it.requests) for it in servers]
            resumed = TenTurns(make_agent(model := open_models()), loop.records, pending=loop.pending)
            assert await resumed.drive() == end
            await model.close()
            for server, first, count in zip(servers, told, before, strict=True):
                again = server.requests[count:]
                assert again == first[len(first) - len(again) :], f"killed after record {last}"


@streamed
@on_each_server
async def test_a_resumed_reaction_sends_the_same_requests(kind: type[ModelServer], stream: bool) -> None:
    async with kind() as server, open_model(server, stream=stream) as model:
        whole = TenTurns(make_agent(model))
        end = await whole.drive()
        told = list(server.requests)
        refused = len(server.refused)
        kills = (5, 26) if stream else (5, 12, 19, 26)
        for last in kills:
            async with open_model(server, stream=stream) as killed:
                loop = TenTurns(make_agent(killed), Records(kill_after=last))
                with pytest.raises(Killed):
                    await loop.drive()
            loop.records.kill_after, loop.records.killed = 0, asyncio.Event()
            before = len(server.requests)
            async with open_model(server, stream=stream) as another:  # another process
                resumed = TenTurns(make_agent(another), loop.records, pending=loop.pending)
                assert await resumed.drive() == end
            again = server.requests[before:]
            assert again == told[len(told) - len(again) :], f"killed after record {last}"
            assert loop.records.kept == whole.records.kept
    assert len(server.refused) == (len(kills) + 1) * refused, "a resumed reaction begins with what was learned"


@streamed
@on_each_server
async def test_the_last_turn_without_tools_is_taken(kind: type[ModelServer], stream: bool) -> None:
    async with kind() as server, open_model(server, stream=stream) as model:
        end = await Loop(make_agent(model, policy=AgentPolicy(max_turns=3))).drive()
    assert (end.status, end.turns) == ("stopped", 3)
    assert len(server.refused) == count_learned(kind, stream), server.refused


@pytest.mark.parametrize("kind", [ModelServer, BedrockServer], ids=lambda it: it.kind)
async def test_ids_that_a_server_does_not_take_are_learned(kind: type[ModelServer]) -> None:
    """A gateway has its own name for the model, and the request continues a conversation with vLLM or Kimi."""
    made = (ToolCall("chatcmpl-tool-" + "0" * 32, "add", "{}"), ToolCall("functions.add:1", "add", "{}"))
    results = tuple(ToolMessage(it.id, "3") for it in made)
    add = ToolSpec("add", "Add.", {"type": "object", "properties": {}})
    request = ModelRequest((UserMessage("Add."), AssistantMessage(None, made), *results), (add,))
    async with kind() as server, open_model(server, name="our-model") as model:
        await model.complete(request)
        await model.complete(request)
    assert len(server.refused) == 1
    assert model.rules.call_ids == "safe"


UNKNOWN = [(MistralServer, 2), (DeepSeekServer, 1), (KimiServer, 1), (GeminiServer, 0), (BedrockServer, 0)]
"""Servers, and the number of their rules that a reaction of ten turns violates."""


@both_ways
@pytest.mark.parametrize(("kind", "count"), UNKNOWN, ids=lambda it: getattr(it, "kind", ""))
async def test_the_rules_of_a_server_that_nothing_names_are_learned_once(
    kind: type[ModelServer], count: int, stream: bool
) -> None:
    """A gateway has its own name for the model. Each rule causes one refusal, and none after a restart."""
    if kind is MistralServer:
        count = 1 + stream
    async with kind() as server, open_model(server, stream=stream, name="our-model") as model:
        loop = TenTurns(make_agent(model))
        end = await loop.drive()
        assert end.answer == ANSWER, server.refused
        assert len(server.refused) == count, server.refused
        assert len(server.requests) == 11 + count
        # Another process continues after turn 9. No record holds the thinking of turn 1, because its requirement was
        # not known yet.
        if isinstance(server, ThinkingServer):
            server.is_exact = False
        kept = dict(list(loop.records.kept.items())[:-4])
        async with open_model(server, stream=stream, name="our-model") as another:
            resumed = TenTurns(make_agent(another), Records(kept), pending=[])
            assert (await resumed.drive()).answer == ANSWER
        assert len(server.refused) == count


async def test_a_server_teaches_that_tools_are_named_in_the_last_turn_too() -> None:
    async with BedrockServer() as server, open_model(server, name="our-model") as model:
        agent = make_agent(model, policy=AgentPolicy(max_turns=3))
        ends = [await Loop(agent).drive() for _ in range(2)]
    assert [it.status for it in ends] == ["stopped", "stopped"]
    assert len(server.refused) == 1
    assert "tools" in server.requests[-1]
    assert "tool_choice" not in server.requests[-1], "Bedrock knows no choice `none`"


async def test_a_refusal_that_no_rule_explains_is_not_repeated() -> None:
    """Two contradictory rules do not lead to endless repeats."""

    class Contrary(ModelServer):
        def check(self, body: dict[str, Any]) -> None:
            is_there = any("reasoning_content" in it for it in body["messages"])
            wanted = "Missing `reasoning_content` field in the assistant message"
            raise Refusal("property 'reasoning_content' is unsupported" if is_there else wanted)

    async with Contrary() as server, open_model(server) as model:
        end = await Loop(make_agent(model)).drive()
    assert end.status == "failed"
    assert len(server.requests) <= 4


@both_ways
async def test_a_handoff_to_another_model_leaves_the_thinking_behind(stream: bool) -> None:
    async with DeepSeekServer() as first, KimiServer() as second:
        desk, billing = open_model(first, stream=stream), open_model(second, stream=stream)
        other = replace(make_agent(billing), id="billing")
        handing = replace(STORY[4], calls=(("hand_over_to_billing", {"note": "over to you"}),))
        first._story = [*STORY[:4], handing]
        agent = make_agent(desk, handoffs=[Handoff(other, history="all")])
        end = await Loop(agent).drive()
        await desk.close()
        await billing.close()
    assert end.answer == ANSWER
    assert (first.refused, second.refused) == ([], [])
    for said in STORY[:4]:
        assert f'{THOUGHT} {said.turn}"' not in json.dumps(second.requests)


POLICIES: list[tuple[dict[str, Any], bool]] = [
    ({}, True), ({"calls": False}, True), ({"text": False}, False), ({"thinking": False}, False), ({"redact": ["secret"]}, False),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "is_kept"), POLICIES, ids=str)
async def test_a_data_policy_decides_whether_the_thinking_that_a_server_wants_back_is_kept(
    policy: dict[str, Any], is_kept: bool
) -> None:
    """If the thinking is not stored, a resumed reaction sends a blank, which the real servers accept."""
    async with DeepSeekServer() as server, open_model(server) as model:
        kept = [DataPolicy(**policy)] if policy else []
        loop = TenTurns(make_agent(model, middleware=kept))
        assert (await loop.drive()).answer == ANSWER
        assert (THOUGHT in str(loop.records.kept)) is is_kept
        server.is_exact = is_kept
        half = dict(list(loop.records.kept.items())[:20])
        async with open_model(server) as another:
            resumed = TenTurns(make_agent(another, middleware=kept), Records(half))
            assert (await resumed.drive()).answer == ANSWER
    assert server.refused == []


@pytest.mark.parametrize("kind", [BedrockServer, GeminiServer], ids=lambda it: it.kind)
async def test_signatures_are_recorded_whatever_is_kept_of_thinking(kind: type[ModelServer]) -> None:
    async with kind() as server, open_model(server) as model:
        loop = TenTurns(make_agent(model))
        await loop.drive()
    first = loop.records.bodies("model_reply")[0]["reply"]["origin"]
    assert "sig" in json.dumps(first)
    assert loop.records.bodies("model_reply")[-1]["reply"].get("origin") is None, (
        "nobody asks for the thinking of an answer"
    )


async def test_what_a_server_wants_back_goes_first_where_a_reply_is_too_large() -> None:
    async with DeepSeekServer() as server, open_model(server) as model:
        loop = Loop(make_agent(model))
        server.thought_of = lambda said: f"{THOUGHT} {said.turn} " + "x" * 300_000  # type: ignore[method-assign]
        server.is_exact = False
        end = await loop.drive()
    assert end.answer == ANSWER
    assert all("origin" not in it["reply"] for it in loop.records.bodies("model_reply"))


async def test_no_trace_holds_the_thinking_that_goes_back() -> None:
    exported = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    async with DeepSeekServer() as server, open_model(server) as model:
        loop = TenTurns(make_agent(model, middleware=[Tracing(provider=provider, content=True)]))
        assert (await loop.drive()).answer == ANSWER
    told = "".join(it.to_json() for it in exported.get_finished_spans())
    assert "Let me look." in told
    assert THOUGHT not in told
