"""Cost of each feature of an agent: the CPU time of a turn with the feature, divided by the CPU time of a turn of the
plain reaction in the same run.

The plain reaction and the reactions with a feature take turns, with one model server. The side effects of a feature
count too, such as longer requests or additional model calls. Budgets ask the hub before each turn. Budgets are
therefore compared with a reaction whose records go to the hub. `loops` defines a turn, and this module defines how each
feature is used.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chat_server import ANSWER, STRUCTURED_ANSWER, TURNS
from loops import TRIGGER, OurReaction, join, look_up
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from pydantic import BaseModel
from servers import Bench
from table import Line, median_of
from turn_cost import HUB, start_chat_server

from roundelay.agents.features.attachments import Attachments
from roundelay.agents.features.budget import Budget, TokenLimits
from roundelay.agents.features.context_engine import ContextEngine
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.evaluations import Evaluations, Rule
from roundelay.agents.features.few_shot import Example, ExampleCall, FewShot
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.features.fragments import Fragments
from roundelay.agents.features.long_results import LongResults
from roundelay.agents.features.many_results import ManyResults
from roundelay.agents.features.mcp_servers import McpServers, ServerOptions
from roundelay.agents.features.postprocessors import Postprocessors
from roundelay.agents.features.prompts import PromptFacts, Prompts, ToolNotes
from roundelay.agents.features.references import References
from roundelay.agents.features.registry import ToolRegistry, ToolSet
from roundelay.agents.features.shown_results import ShownResults
from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.features.tracing import Tracing
from roundelay.agents.middleware import Answer, Around, Middleware
from roundelay.agents.models.model import ModelReply, ToolCall
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.tools import Output, Tool, ToolContext, tool
from roundelay.agents.values import TurnState

PLAIN, RECORDED = "plain", "recorded"
_ROWS = (
    "Kept dry in aisle 4, from the supplier in Graz; the last count was on Monday, and the next delivery is due on Friday. "
) * 2


# --- tools and objects that the features use


async def look_up_citable(article: str, warehouse: str) -> Output:
    """Return the stock and the unit price of an article."""
    return Output(await look_up(article, warehouse), {"references": _find(article)})


async def look_up_fragments(article: str, warehouse: str) -> Output:
    """Return the stock and the unit price of an article."""
    return Output(await look_up(article, warehouse), {"fragments": [{**it, "score": 0.5} for it in _find(article)]})


async def look_up_shown(article: str, warehouse: str) -> Output:
    """Return the stock and the unit price of an article."""
    return Output(await look_up(article, warehouse), {"shown": True})


async def look_up_long(article: str, warehouse: str) -> Output:
    """Return the stock and the unit price of an article."""
    text = await look_up(article, warehouse)
    return Output(text + "\n" + _ROWS * 40, summary=text)


async def look_up_streaming(article: str, warehouse: str) -> AsyncIterator[str]:
    """Return the stock and the unit price of an article."""
    for word in (await look_up(article, warehouse)).split():
        yield f"{word} "


async def look_up_reporting(article: str, warehouse: str, context: ToolContext) -> str:
    """Return the stock and the unit price of an article."""
    context.report("opens the list")
    context.report("counts")
    return await look_up(article, warehouse)


def _find(article: str) -> list[Any]:
    places = ("stock", "prices", "deliveries")
    return [
        {"id": f"{article}/{it}", "title": it, "url": f"https://shop.test/{it}/{article}", "text": _ROWS}
        for it in places
    ]


class Shelf(BaseModel):
    """Schema of a structured answer."""

    text: str
    articles: list[str]
    is_complete: bool


class NoExporter(SpanExporter):
    """Receives spans and drops them, so that only the tracing itself is measured."""

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def _trace(*, content: bool = False) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(NoExporter()))
    return Tracing(provider=provider, content=content)


class Stock(McpServers):
    """Offers the tool of the server in `mcp_stock` under the name that the model calls."""

    _given: Sequence[Tool] = ()
    _renamed: Sequence[Tool] = ()

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        given = super().list_tools(state)
        if [*given] != [*self._given]:
            self._given = given
            self._renamed = [replace(it, name="look_up") for it in given if it.name.endswith("look_up")]
        return self._renamed


def _make_stock() -> Stock:
    script = str(Path(__file__).with_name("mcp_stock.py"))
    return Stock({"stock": ServerOptions(command=sys.executable, args=(script,))})


class EveryHook(Middleware):
    """Overrides every hook without any effect, to measure the cost of calling the hooks."""

    def initial_state(self) -> Mapping[str, object]:
        return {"hooks": 0}

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        return ()

    def should_continue(self, state: TurnState) -> bool:
        return True

    def prepare(self, state: TurnState, step: Any) -> Any:
        return step

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Any:
        return reply.usage

    def process_tool_calls(self, state: TurnState, calls: Sequence[ToolCall]) -> None:
        return None

    def preprocess_arguments(self, state: TurnState, call: ToolCall) -> str:
        return call.arguments

    def after_tool(self, state: TurnState, call: ToolCall, result: Any) -> None:
        return None

    def on_no_tool_calls(self, state: TurnState, reason: Any) -> None:
        return None

    async def around_reaction(self, around: Around, proceed: Any) -> Any:
        return await proceed()

    async def around_turn(self, around: Around, proceed: Any) -> None:
        await proceed()

    async def around_model(self, around: Around, request: Any, proceed: Any) -> Any:
        return await proceed(request)

    async def around_tool(self, around: Around, call: Any, proceed: Any) -> Any:
        return await proceed(call)

    async def review(self, around: Around, answer: str) -> str:
        return answer

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str:
        return answer

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        return body


def _add_note(answer: str, around: Around) -> Answer:
    return Answer(answer, {"note": "counted on Monday"})


RULE = Rule("says where", "stock", "Say whether it is in stock.")
EXAMPLES = [
    Example(
        f"Is B-000{number} there?", f"B-000{number} is in stock.",
        [ExampleCall("look_up", {"article": f"B-000{number}", "warehouse": "north"}, "3 pieces")],
    )
    for number in (1, 2)
]  # fmt: skip
FACTS = PromptFacts("Be brief.", "The shop", ("Never promise a date.", "Say what you looked up."), {"shop": "north"})
NOTES = {"look_up": ToolNotes("the stock", "Ask for one article at a time.", "Mind the warehouse.", "As a list.")}
PICTURE = {
    "text": TRIGGER.text,
    "images": [
        {"url": "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n".ljust(100_000, b"x")).decode()}
    ],
}
REGISTERED = tool(name="look_up_registered", selection_rule="for what has no number yet")(look_up)
MASKS = (r"\b\d{4} \d{4} \d{4} \d{4}\b", r"[\w.]+@[\w.]+\.\w+")


@dataclass(frozen=True)
class Case:
    """One measured feature of an agent. ``base`` names the reaction with which the feature is compared."""

    title: str
    options: Callable[[], Mapping[str, Any]]
    function: Callable[..., Any] | Tool | None = look_up
    """Tool of the agent, or None if the middleware adds the tool."""
    base: str = PLAIN
    answer: str = ANSWER
    content: Any = TRIGGER.content
    """Content of the message to which the agent reacts."""
    beside: str = ""


def _with(*middleware: Callable[[], Middleware]) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"middleware": tuple(make() for make in middleware)}


CASES: dict[str, Case] = {
    "every_hook": Case("every hook, doing nothing", _with(EveryHook)),
    "policy": Case(
        "a policy's callables",
        lambda: {"policy": AgentPolicy(should_continue=lambda state: True, should_send_tools=lambda state: True)},
    ),
    "references": Case(
        "references", _with(References), look_up_citable, beside="3 of 230 characters with each result, in every later request"
    ),
    "fragments": Case(
        "fragments", _with(Fragments, References), look_up_fragments, beside="3 of 230 characters with each result, the best 10 shown"
    ),
    "evaluations": Case("evaluations, one rule", _with(lambda: Evaluations([RULE]))),
    "postprocessors": Case("a postprocessor", _with(lambda: Postprocessors(_add_note))),
    "forced_tools": Case("a forced tool", _with(lambda: ForcedTools("look_up"))),
    "prompts": Case("prompts as templates", _with(lambda: Prompts(facts=FACTS, notes=NOTES)), beside="system and user"),
    "registry": Case("a registry of tools", _with(lambda: ToolRegistry(sets={"default": ToolSet((REGISTERED,))}))),
    "few_shot": Case("two examples", _with(lambda: FewShot(EXAMPLES))),
    "context_fits": Case("context engine, all fits", _with(lambda: ContextEngine(100_000))),
    "context_reduces": Case(
        "context engine, results reduced",
        _with(lambda: ContextEngine(5_000, layouts=("tool_summary",))),
        look_up_long,
        beside="of 9,000 characters each",
    ),
    "context_sums_up": Case(
        "context engine, turns summed up",
        _with(lambda: ContextEngine(9_000, layouts=("full", "summary"))),
        look_up_long,
        beside="of 9,000 characters each; further model calls",
    ),
    "long_results": Case("long results", _with(lambda: LongResults(2_000)), look_up_long, beside="2,000 of 9,000 shown"),
    "many_results": Case("many results", _with(lambda: ManyResults(0))),
    "shown_results": Case("shown results", _with(ShownResults), look_up_shown),
    "data_policy": Case("data policy, two redactions", _with(lambda: DataPolicy(redact=MASKS))),
    "structured": Case(
        "a structured answer", _with(lambda: StructuredAnswer(Shelf)), answer=json.dumps(STRUCTURED_ANSWER, separators=(",", ":"))
    ),
    "tracing": Case("tracing, no exporter's work", _with(_trace)),
    "tracing_content": Case("tracing with content", _with(lambda: _trace(content=True))),
    "attachments": Case(
        "an image with the message", _with(lambda: Attachments(["image"])), content=PICTURE, beside="of 100 KB, in each request"
    ),
    "mcp": Case("the tool of an MCP server", _with(_make_stock), None, beside="over stdio; without what the server uses"),
    "streaming_tool": Case("a tool that streams", dict, look_up_streaming, beside="7 pieces each"),
    "progress": Case("a tool that reports", dict, look_up_reporting, beside="2 steps each"),
    "should_use": Case("a tool that may be disabled", dict, tool(name="look_up", should_use=lambda context: True)(look_up)),
    "together": Case(
        "nine of them together",
        _with(
            _trace,
            lambda: DataPolicy(redact=MASKS),
            References,
            Fragments,
            lambda: Evaluations([RULE]),
            lambda: ToolRegistry(sets={"default": ToolSet((REGISTERED,))}),
            lambda: Prompts(facts=FACTS, notes=NOTES),
            lambda: FewShot(EXAMPLES),
            lambda: ContextEngine(100_000),
        ),
        look_up_fragments,
        beside="tracing, data policy, references, fragments, a rule, registry, prompts, examples, context engine",
    ),
    "budget": Case(
        "a budget", _with(lambda: Budget(TokenLimits(turn=10**6, reaction=10**6, root=10**9, day=10**9))),
        base=RECORDED, beside="asks the hub before each turn",
    ),
}  # fmt: skip


class FeatureCost:
    """Measures the CPU time of a turn with each feature, relative to the plain reaction. Each round has ``runs`` runs
    per feature, of six turns each.
    """

    name = "features"

    def __init__(self, bench: Bench, *, runs: int) -> None:
        self._bench = bench
        self._runs = runs
        self._us: dict[str, list[float]] = {name: [] for name in (PLAIN, RECORDED, *CASES)}

    def run_round(self, number: int) -> str:
        with start_chat_server(self._bench) as base_url, self._bench.start(HUB) as (hub_url, _pid):
            asyncio.run(self._measure(base_url, hub_url, number))
        ratios = {name: self._us[name][-1] / self._us[case.base][-1] for name, case in CASES.items()}
        dearest = max(ratios, key=lambda it: ratios[it])
        return f"{len(CASES)} features, the most expensive {dearest} {ratios[dearest]:.2f}"

    async def _measure(self, base_url: str, hub_url: str, number: int) -> None:
        async with AsyncExitStack() as stack:
            client, triggers = await join(hub_url, 1)
            stack.push_async_callback(client.close)
            hub: dict[str, Any] = {"client": client, "triggers": triggers}
            loops = {
                PLAIN: OurReaction(base_url, stream=False),
                RECORDED: OurReaction(base_url, stream=False, **hub),
            }
            for name, case in CASES.items():
                kept = hub if case.base == RECORDED else {}
                loops[name] = OurReaction(
                    base_url, stream=False, function=case.function, options=case.options(), answer=case.answer,
                    content=case.content, **kept,
                )  # fmt: skip
            for loop in loops.values():
                stack.push_async_callback(loop.close)
            await self._compare(loops, number)

    async def _compare(self, loops: Mapping[str, OurReaction], number: int) -> None:
        names = list(loops)
        used_s = dict.fromkeys(names, 0.0)
        order = random.Random(number)
        gc.collect()
        for batch in range(-1, self._runs):  # the first batch is a warm-up for connections and caches of the SDK
            order.shuffle(names)  # leftovers of a loop (garbage, late frames) must not always burden the same loop
            for name in names:
                started_s = time.process_time()
                await loops[name].run()
                used_s[name] += time.process_time() - started_s if batch >= 0 else 0.0
        for name in names:
            self._us[name].append(used_s[name] / (self._runs * TURNS) * 1e6)

    def lines(self) -> list[Line]:
        lines = []
        for name, case in CASES.items():
            base = self._us[case.base]
            ratios = [own / other for own, other in zip(self._us[name], base, strict=True)]
            beside = f"{median_of(self._us[name]):.0f} us / {median_of(base):.0f} us a turn"
            held = "ours, recorded" if case.base == RECORDED else "ours"
            told = f"{beside}; {case.beside}" if case.beside else beside
            lines.append(Line(f"feature_{name}", f"{case.title} / {held}", ratios, fewer_is_better=True, beside=told))
        return lines

    def details(self) -> dict[str, Any]:
        return {"runs": self._runs, "turns": TURNS, "us_per_turn": self._us}
