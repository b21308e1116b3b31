"""Tests of middleware around a reaction: its order, the values that it may change, kills at any record, stops in the
middle, and its errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.events import Finished
from roundelay.agents.journal import Journal
from roundelay.agents.middleware import Around, Correction, Middleware
from roundelay.agents.models.model import Model, ModelReply, ModelRequest, ToolCall, Usage, UserMessage
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.reaction import Reaction
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import PlannedCall, tool
from roundelay.agents.values import NOT_RUN, Begin, Finish, Replayed, ToolResult, ToolsDone
from roundelay.app import Network
from tests.support.agents import Heard, Person, Provider, cancel, make_runner, running
from tests.support.loops import Loop, by_turn, facts, results_of, survives_kills, use

HOOKS = ["around_reaction", "around_turn", "around_model", "around_tool", "review"]


@tool(idempotent=True)
def look(at: str = "it") -> str:
    """Look at something."""
    return f"saw {at}"


@tool(idempotent=True)
def note(text: str) -> str:
    """Keep a note."""
    return f"noted {text}"


SCRIPT = by_turn(use(("look", {"at": "a"}), ("note", {"text": "b"})), "Done.")


class Everywhere(Middleware):
    """Middleware that runs ``act`` in one hook, ``place``, before it continues, and records its hooks."""

    def __init__(self, place: str, act: Callable[[], Awaitable[None]], seen: list[str]) -> None:
        self.place, self.act, self.seen = place, act, seen

    async def _be_at(self, place: str) -> None:
        self.seen.append(place)
        if place == self.place:
            await self.act()

    async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        await self._be_at("around_reaction")
        return await proceed()

    async def around_turn(self, around: Around, proceed: Callable[[], Awaitable[None]]) -> None:
        await self._be_at("around_turn")
        await proceed()

    async def around_model(
        self, around: Around, request: ModelRequest, proceed: Callable[[ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        await self._be_at("around_model")
        return await proceed(request)

    async def around_tool(
        self, around: Around, call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        await self._be_at("around_tool")
        return await proceed(call)

    async def review(self, around: Around, answer: str) -> str | Correction:
        await self._be_at("review")
        return answer


async def nothing() -> None:
    pass


async def test_each_hook_is_around_what_it_names_and_the_first_in_the_list_is_outermost() -> None:
    seen: list[str] = []

    class Named(Everywhere):
        def __init__(self, name: str) -> None:
            super().__init__("", nothing, seen)
            self.name = name

        async def _be_at(self, place: str) -> None:
            seen.append(f"{self.name} {place.removeprefix('around_')}")

    async with Provider(SCRIPT) as provider:
        agent = Agent("bob", "", provider.model(), [look, note], middleware=[Named("one"), Named("two")])
        await Loop(agent).drive()
    places = ["reaction", "turn", "model", "tool", "tool", "turn", "model", "review"]
    order = [f"{name} {place}" for place in places for name in ("one", "two")]
    assert sorted(seen) == sorted(order)
    assert seen[:6] == order[:6]
    assert seen[-6:] == order[-6:]


async def test_what_middleware_makes_of_requests_results_and_answers_survives_a_kill() -> None:
    class Rewriting(Middleware):
        async def around_model(self, around: Around, request: ModelRequest, proceed: Any) -> ModelReply:
            *others, last = request.messages
            reply: ModelReply = await proceed(
                replace(request, messages=[*others, UserMessage(f"{last.content} Be kind.")])
            )
            return replace(reply, text=f"{reply.text}!") if reply.text else reply

        async def around_tool(self, around: Around, call: PlannedCall, proceed: Any) -> ToolResult:
            result: ToolResult = await proceed(replace(call, arguments={**call.arguments, "at": "more"}))
            return replace(result, content=f"<{result.content}>")

        async def review(self, around: Around, answer: str) -> str | Correction:
            return f"{answer} Yours, bob"

    def make(model: Model) -> Agent:
        return Agent("bob", "Help.", model, [look], middleware=[Rewriting()])

    async with Provider(by_turn(use(("look", {"at": "a"})), "Done.")) as provider:
        whole = await survives_kills(provider, make)
    assert str(whole.requests[0]["messages"][-1]["content"]).endswith(f"{facts()} Be kind.")
    assert results_of(whole.requests[1]) == ["<saw more>"]
    assert whole.end.answer == "Done.! Yours, bob"
    assert [it["reply"]["text"] for it in whole.records.bodies("model_reply")] == [None, "Done.!"]


async def test_a_correction_makes_the_model_write_again_and_survives_a_kill() -> None:
    class Polite(Middleware):
        async def review(self, around: Around, answer: str) -> str | Correction:
            return answer if "please" in answer else Correction("Say please.", "polite")

    def make(model: Model) -> Agent:
        return Agent("bob", "Help.", model, [look], middleware=[Polite()])

    async with Provider(by_turn("Go.", "Go now.", "Go, please.")) as provider:
        whole = await survives_kills(provider, make)
    assert whole.end.answer == "Go, please."
    assert "Say please." in str(whole.requests[1]["messages"][-1]["content"])


async def test_corrections_are_bounded() -> None:
    class Never(Middleware):
        async def review(self, around: Around, answer: str) -> str | Correction:
            return Correction("No.")

    def make(model: Model) -> Agent:
        return Agent("bob", "Help.", model, (), AgentPolicy(max_corrections=1), middleware=[Never()])

    async with Provider(by_turn("one", "two", "three")) as provider:
        whole = await survives_kills(provider, make)
    assert (len(whole.requests), whole.end.answer) == (2, "two")


async def test_what_middleware_asks_of_a_model_counts_in_the_reaction() -> None:
    class Twice(Middleware):
        async def around_model(self, around: Around, request: ModelRequest, proceed: Any) -> ModelReply:
            await around.complete(around.agent.model, request)
            reply: ModelReply = await proceed(request)
            return reply

    async def spend(*middleware: Middleware) -> Usage:
        async with Provider(by_turn("Done.")) as provider:
            return (await Loop(Agent("bob", "", provider.model(), middleware=middleware)).drive()).usage

    once = await spend()
    assert await spend(Twice()) == once + once


async def test_a_resumed_reaction_passes_middleware_only_for_what_is_not_recorded() -> None:
    seen: list[str] = []
    async with Provider(SCRIPT) as provider:
        model = provider.model()
        first = Loop(Agent("bob", "", model, [look, note], middleware=[Everywhere("", nothing, [])]))
        await first.drive()
        kinds = [(it, record["kind"]) for it, record in first.records.kept.items()]
        for name, kind in kinds:
            if kind == "review":
                del first.records.kept[name]
        await Loop(
            Agent("bob", "", model, [look, note], middleware=[Everywhere("", nothing, seen)]), first.records
        ).drive()
    assert seen == ["around_reaction", "review"]


# --- errors of middleware


async def fail() -> None:
    raise ZeroDivisionError("middleware is wrong")


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("around_reaction", "I could not answer: an error on my side. My log has it."),
        ("around_turn", "I could not answer: an error on my side. My log has it."),
        ("around_model", "I could not answer: my model failed."),
        ("around_tool", "Done."),
        ("review", "I could not answer: an error on my side. My log has it."),
    ],
)
async def test_middleware_that_raises_is_seen_and_the_agent_lives(place: str, told: str) -> None:
    middleware = Everywhere(place, fail, [])
    async with asyncio.timeout(20), Network.open() as network, Provider(SCRIPT) as provider:
        runner = SimpleAgentRunner(
            "bob", instruction="Help.", model=provider.model(), tools=[look, note], middleware=[middleware]
        )
        async with running(network, runner):
            mia = await Person.join(network, "mia")
            assert (await mia.ask("bob", "one")).text == told
            middleware.act = nothing
            assert (await mia.ask("bob", "two")).text == "Done."


async def test_middleware_that_fails_around_a_tool_is_that_calls_result_alone() -> None:
    class Picky(Middleware):
        async def around_tool(self, around: Around, call: PlannedCall, proceed: Any) -> ToolResult:
            if call.tool.name == "look":
                await fail()
            result: ToolResult = await proceed(call)
            return result

    def make(model: Model) -> Agent:
        return Agent("bob", "Help.", model, [look, note], middleware=[Picky()])

    async with Provider(SCRIPT) as provider:
        whole = await survives_kills(provider, make)
    assert results_of(whole.requests[1]) == [
        "Something around look failed (ZeroDivisionError: middleware is wrong). Whether it took effect is unknown.",
        "noted b",
    ]


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_turn_that_middleware_does_not_let_go_on_fails_and_does_not_hang(swallows: bool) -> None:
    class Stuck(Middleware):
        async def around_turn(self, around: Around, proceed: Callable[[], Awaitable[None]]) -> None:
            if swallows:
                with suppress(ZeroDivisionError):
                    await proceed()

    def broken(*given: object) -> Any:
        raise ZeroDivisionError

    policy = AgentPolicy(calculate_usage=broken)
    runner = make_runner("bob", lambda request: "x", middleware=[Stuck()], policy=policy)
    async with asyncio.timeout(20), Network.open() as network, running(network, runner):
        mia = await Person.join(network, "mia")
        assert "an error on my side" in (await mia.ask("bob", "one")).text


# --- stops in the middle


@pytest.mark.parametrize("place", HOOKS)
async def test_a_persons_stop_ends_a_reaction_inside_of_any_middleware(place: str) -> None:
    entered, heard = asyncio.Event(), Heard()

    async def hang() -> None:
        entered.set()
        await asyncio.Event().wait()

    middleware = Everywhere(place, hang, [])
    async with asyncio.timeout(20), Network.open() as network, Provider(SCRIPT) as provider:
        runner = SimpleAgentRunner(
            "bob", instruction="Help.", model=provider.model(), tools=[look, note], middleware=[middleware],
            on_event=heard,
        )  # fmt: skip
        async with running(network, runner):
            mia = await Person.join(network, "mia")
            await mia.client.send_text("bob", "one")
            await entered.wait()
            await cancel(mia.client, thread_id="direct:bob~mia")
            [ended] = await heard.finished()
            assert (ended.status, ended.reason) == ("cancelled", "stopped by mia")
            assert (await mia.hear()).text == "Stopped by mia."
            middleware.act = nothing
            assert (await mia.ask("bob", "two")).text == "Done."


async def test_a_stop_after_the_last_step_is_one_too() -> None:
    """The middleware still works when the loop has ended."""
    entered = asyncio.Event()

    class Late(Middleware):
        async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
            await proceed()
            entered.set()
            await asyncio.Event().wait()
            raise AssertionError

    async with Provider(by_turn("Done.")) as provider:
        loop = Loop(Agent("bob", "", provider.model(), middleware=[Late()]))
        driver = loop.make_driver(Journal(loop.records, "r1"))
        task = asyncio.create_task(driver.run())
        await entered.wait()
        task.cancel()
        await asyncio.wait({task})
    end = driver.cancel("stopped by mia")
    assert (end.status, end.reason, end.answer, end.turns) == ("cancelled", "stopped by mia", None, 1)
    assert len([it for it in loop.events if isinstance(it, Finished)]) == 1


def test_a_call_that_a_person_denied_counts_neither_now_nor_when_it_is_replayed() -> None:
    reply = ModelReply(None, (ToolCall("c1", "look", "{}"),))
    denied = ToolResult("Not run: mia denied it.", ok=False, data={NOT_RUN: True})
    counted = []
    for outcome in (reply, Replayed(reply, {0: denied})):
        agent = Agent("bob", "", make_runner("bob", lambda request: "x").model, [look])
        reaction = Reaction(agent, prompt="", answers=True)
        reaction.advance(Begin())
        reaction.advance(outcome)
        reaction.advance(ToolsDone({0: denied} if outcome is reply else {}))
        counted.append((dict(reaction.describe().calls), reaction.tool_calls))
    assert counted == [({}, 0), ({}, 0)]


async def test_middleware_that_cannot_be_closed_keeps_nothing_else_open() -> None:
    class Held(Middleware):
        def __init__(self, name: str, failure: Exception | None = None) -> None:
            self.name, self.failure = name, failure

        async def close(self) -> None:
            closed.append(self.name)
            if self.failure is not None:
                raise self.failure

    closed: list[str] = []
    shared = Held("shared")
    other = Agent("amy", "", make_runner("amy", lambda request: "hello").model, middleware=[shared])
    layers = [Held("broken", OSError("it is stuck")), shared]
    runner = make_runner("ann", lambda request: "hello", middleware=layers, handoffs=[other])
    async with Network.open() as network:
        with pytest.raises(OSError, match="it is stuck"):
            async with running(network, runner):
                pass
    assert sorted(closed) == ["broken", "shared"]
