"""Tests of traces as an exporter receives them, from agents in this process and in another one."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from roundelay.agents.agent import Agent
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.features.tracing import Tracing
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, ScriptedModel, call, say
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network, serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from roundelay.network.credentials import read_secret
from tests.support.agents import Heard, Person, cancel, make_runner, running

AGENT = Path(__file__).parents[1] / "support" / "traced_agent.py"


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def trace_to(exporter: InMemorySpanExporter, **options: Any) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider=provider, **options)


@tool(idempotent=True)
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool(idempotent=True)
def fail() -> str:
    """Fail."""
    raise KeyError("colour")


def work(request: ModelRequest) -> list[Action] | Action:
    results = read_prompt(request).tool_results
    return say("done, SECRET") if results else [call("add", a=1, b=2), call("fail")]


async def test_spans_carry_the_names_of_the_convention(network: Network, exported: InMemorySpanExporter) -> None:
    runner = make_runner("ann", work, tools=[add, fail], middleware=[trace_to(exported)])
    mia = await Person.join(network, "mia")
    async with running(network, runner):
        await mia.ask("ann", "SECRET question")
    spans = {span.name: span for span in exported.get_finished_spans()}
    assert set(spans) == {"invoke_agent ann", "chat scripted", "execute_tool add", "execute_tool fail"}
    agent, chat, added, failed = (
        spans[name] for name in ("invoke_agent ann", "chat scripted", "execute_tool add", "execute_tool fail")
    )
    assert agent.attributes is not None
    assert agent.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert agent.attributes["gen_ai.agent.id"] == "ann"
    assert agent.attributes["gen_ai.conversation.id"] == "direct:ann~mia"
    assert chat.attributes is not None
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert chat.kind.name == "CLIENT"
    assert {it.parent.span_id for it in (chat, added, failed) if it.parent} == {agent.context.span_id}
    assert added.status.is_ok
    assert not failed.status.is_ok
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "tool_error"
    assert "SECRET" not in "".join(span.to_json() for span in exported.get_finished_spans())


async def test_a_span_names_the_model_that_was_asked(network: Network, exported: InMemorySpanExporter) -> None:
    other = ScriptedModel(lambda request: say("done"), name="other")
    policy = AgentPolicy(choose_model=lambda state: other)
    runner = make_runner("ann", work, policy=policy, middleware=[trace_to(exported)])
    mia = await Person.join(network, "mia")
    async with running(network, runner):
        await mia.ask("ann", "hello")
    [chat] = [span for span in exported.get_finished_spans() if span.name.startswith("chat")]
    assert chat.name == "chat other"
    assert chat.attributes is not None
    assert chat.attributes["gen_ai.request.model"] == "other"


async def test_content_is_there_when_it_is_asked_for(network: Network, exported: InMemorySpanExporter) -> None:
    runner = make_runner("ann", work, tools=[add, fail], middleware=[trace_to(exported, content=True)])
    mia = await Person.join(network, "mia")
    async with running(network, runner):
        await mia.ask("ann", "SECRET question")
    told = [dict(span.attributes or {}) for span in exported.get_finished_spans()]
    assert [it["gen_ai.tool.call.result"] for it in told if it.get("gen_ai.tool.name") == "add"] == ["3"]
    assert [it["gen_ai.tool.call.arguments"] for it in told if it.get("gen_ai.tool.name") == "add"] == [
        '{"a": 1, "b": 2}'
    ]
    assert "SECRET question" in str([it.get("gen_ai.input.messages") for it in told])


async def test_one_trace_spans_agents_in_different_processes(tmp_path: Path, exported: InMemorySpanExporter) -> None:
    def desk(request: ModelRequest) -> Action:
        results = read_prompt(request).tool_results
        return say(results[-1].content) if results else call("ask", agent_ids=["bob"], text="how many?", timeout_s=30)

    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="memory")
    async with serve(config) as node, NetworkClient("mia", node.url, kind="human", token=node.owner_token) as mia:
        bob = await asyncio.create_subprocess_exec(
            sys.executable, str(AGENT), node.url, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        assert bob.stdout is not None
        assert await bob.stdout.readline() == b"ready\n"
        runner = SimpleAgentRunner(
            "ann", instruction="", model=ScriptedModel(desk), url=node.url, middleware=[trace_to(exported)]
        )
        task = asyncio.create_task(runner.run())
        await runner.ready()
        await mia.send_text("ann", "hello")
        answer = await anext(aiter(mia))
        theirs = [json.loads(await bob.stdout.readline()) for _ in range(2)]
        bob.kill()
        await bob.wait()
        await runner.stop()
        await task
    ours = {span.name: span.context for span in exported.get_finished_spans()}
    trace_id = f"0x{ours['invoke_agent ann'].trace_id:032x}"
    assert {it["context"]["trace_id"] for it in theirs} == {trace_id}
    [reaction] = [it for it in theirs if it["name"] == "invoke_agent bob"]
    assert reaction["parent_id"] == f"0x{ours['execute_tool ask'].span_id:016x}"
    named = (answer.metadata or {})["traceparent"].split("-")
    assert named[1:3] == [trace_id[2:], f"{ours['invoke_agent ann'].span_id:016x}"]


class Counted(SpanProcessor):
    """Processor that records the spans that have started but not ended."""

    def __init__(self) -> None:
        self.open: list[str] = []

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        self.open.append(span.name)

    def on_end(self, span: ReadableSpan) -> None:
        self.open.remove(span.name)


@pytest.mark.parametrize("ending", ["cancel", "kill"])
@pytest.mark.parametrize("at", ["model", "tool", "inside", "review"])
async def test_every_span_ends_however_the_reaction_does(network: Network, at: str, ending: str) -> None:
    counted, exporter = Counted(), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(counted)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traced, hanging = Tracing(provider=provider, content=True), asyncio.Event()

    async def hang() -> str:
        hanging.set()
        await asyncio.Event().wait()
        return ""

    @tool(idempotent=True)
    async def wait() -> str:
        """Wait."""
        return await hang()

    class Reviews(Middleware):
        async def review(self, around: Around, answer: str) -> str:
            return await hang()

    async def script(request: ModelRequest) -> list[Action] | Action:
        if request.agent_id == "helper":
            return call("wait")
        match at:
            case "model":
                return say(await hang())
            case "review":
                return say("done")
            case _:
                return [
                    call("wait" if at == "tool" else "helper", **({} if at == "tool" else {"task": "wait"})),
                    call("fail"),
                ]

    inner = agent_tool(Agent("helper", "", ScriptedModel(script), [wait], middleware=[traced]))
    layers = [traced, ForcedTools("wait" if at == "tool" else "helper"), *([Reviews()] if at == "review" else [])]
    mia = await Person.join(network, "mia")
    heard = Heard()
    runner = make_runner("ann", script, tools=[wait, fail, inner], middleware=layers, on_event=heard)
    task = asyncio.create_task(runner.run(await network.join("ann", role="reactor")))
    await runner.ready()
    await mia.client.send_text("ann", "hello")
    await hanging.wait()
    assert "invoke_agent ann" in counted.open
    if ending == "cancel":
        await cancel(mia.client, thread_id="direct:ann~mia")
        count = 1
        while all(it.path for it in await heard.finished(count)):  # an inner agent ends first
            count += 1
        await runner.stop()
    else:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert counted.open == []
    names = {span.name for span in exporter.get_finished_spans()}
    assert names >= {"invoke_agent ann"} | ({"invoke_agent helper", "execute_tool wait"} if at == "inside" else set())


@pytest.mark.parametrize("content", [True, False])
async def test_no_span_holds_a_key_that_a_model_or_a_library_repeats(
    network: Network, exported: InMemorySpanExporter, content: bool
) -> None:
    key = "sk-canary-in-a-span-0123456789"
    read_secret(key, "a test")

    def work_with_key(request: ModelRequest) -> list[Action] | Action:
        if not read_prompt(request).tool_results:
            return call("fetch")
        raise ValueError(f"Illegal header value b'Bearer {key}\\n'")

    @tool(idempotent=True)
    def fetch() -> str:
        """Fetch."""
        raise OSError(f"401 for {key}")

    runner = make_runner("ann", work_with_key, tools=[fetch], middleware=[trace_to(exported, content=content)])
    mia = await Person.join(network, "mia")
    async with running(network, runner):
        await mia.ask("ann", "hello")
    spans = exported.get_finished_spans()
    assert {"chat scripted", "execute_tool fetch"} <= {it.name for it in spans}
    assert [it for it in spans if not it.status.is_ok]
    assert key not in "".join(it.to_json() for it in spans)
