"""Tests of middleware hooks that hang: the surrounded operation ends, and time that a hook spends waiting for the run
does not count.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from roundelay.agents import AgentPolicy, Around, Middleware
from roundelay.agents.isolation import HookTimedOut, pause_hook_timer, run_hook
from roundelay.agents.middleware import Answer
from roundelay.agents.models.model import ModelReply, ModelRequest, ToolMessage
from roundelay.agents.models.scripted import call
from roundelay.agents.tools import PlannedCall, tool
from roundelay.agents.values import Finish, ToolResult
from roundelay.app import Network
from roundelay.simulation.virtual_time import SimulationLoop, run
from tests.support.agents import Heard, Person, make_runner, running, until_recorded

LIMIT_S = 0.05
LONG_S = 0.12

HOOKS = ["around_reaction", "around_turn", "around_model", "around_tool", "review", "finish_answer"]


class Hanging(Middleware):
    """Middleware that hangs once, in one hook."""

    def __init__(self, place: str) -> None:
        self.place = place

    async def _be_at(self, place: str) -> None:
        if place == self.place:
            self.place = ""
            await asyncio.Event().wait()

    async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        await self._be_at("around_reaction")
        return await proceed()

    async def around_turn(self, around: Around, proceed: Callable[[], Awaitable[None]]) -> None:
        await self._be_at("around_turn")
        await proceed()

    async def around_model(self, around: Around, request: ModelRequest, proceed: Any) -> ModelReply:
        await self._be_at("around_model")
        reply: ModelReply = await proceed(request)
        return reply

    async def around_tool(self, around: Around, call: PlannedCall, proceed: Any) -> ToolResult:
        await self._be_at("around_tool")
        result: ToolResult = await proceed(call)
        return result

    async def review(self, around: Around, answer: str) -> str:
        await self._be_at("review")
        return answer

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        await self._be_at("finish_answer")
        return answer


@tool(idempotent=True)
async def look() -> str:
    """Look, for longer than a hook may take."""
    await asyncio.sleep(LONG_S)
    return "a cat"


async def script(request: ModelRequest) -> Any:
    return (
        call("look")
        if request.turn == 1
        else str(next(it for it in reversed(request.messages) if isinstance(it, ToolMessage)).content)
    )


async def _ask_twice(hanging: Hanging) -> tuple[str, dict[str, Any], str]:
    """Return the first answer, the end of its reaction, and the second answer."""
    heard = Heard()
    policy = AgentPolicy(hook_timeout_s=LIMIT_S)
    runner = make_runner("bob", script, tools=[look], middleware=[hanging], policy=policy, on_event=heard)
    async with Network.open() as network, running(network, runner):
        mia = await Person.join(network, "mia")
        told = (await mia.ask("bob", "one")).text
        [ended] = await heard.finished()
        await until_recorded(mia, ended.reaction, "finished")
        [finished] = [it["body"] for it in await mia.records(ended.reaction) if it["kind"] == "finished"]
        return told, finished, (await mia.ask("bob", "two")).text


@pytest.mark.parametrize("place", HOOKS)
def test_a_hook_that_hangs_ends_what_it_is_around_and_the_agent_lives_on(place: str) -> None:
    """The test uses simulated time, because a loaded machine would slow down hooks that do not hang."""
    told, finished, second = run(_ask_twice(Hanging(place)), SimulationLoop())
    assert second == "a cat"
    why = f"Hanging.{place} took longer than 0.05 s by itself (hook_timeout_s)."
    if place == "around_tool":
        assert told == f"Something around look failed (HookTimedOut: {why}). Whether it took effect is unknown."
        assert finished["status"] == "finished"
    else:
        assert told.startswith("I could not answer: ")
        assert (finished["status"], finished["reason"]) == ("failed", f"HookTimedOut: {why}")


def test_what_a_hook_awaits_of_the_run_is_not_its_time() -> None:
    """A hook waits for a slow tool, for a slow model that it asks itself, and for a slow hub, in simulated time."""
    limit_s, slow_s = 0.4, 0.6

    class Slow(Hanging):
        async def around_model(self, around: Around, request: ModelRequest, proceed: Any) -> ModelReply:
            other = asyncio.ensure_future(around.complete(around.model, request))  # both requests run at the same time
            reply: ModelReply = await proceed(request)
            await other
            return reply

        async def review(self, around: Around, answer: str) -> str:
            await asyncio.sleep(slow_s) if not runs else None
            await around.context.client.call("network.ping_slowly")
            return answer

    class SlowHub:
        def __init__(self, client: Any) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

        async def call(self, op: str, *given: Any, **options: Any) -> Any:
            if op == "network.ping_slowly":
                await asyncio.sleep(slow_s)
                return {}
            return await self._client.call(op, *given, **options)

    runs = [1]

    async def slow_script(request: ModelRequest) -> Any:
        await asyncio.sleep(slow_s)
        return await script(request)

    runner = make_runner(
        "bob", slow_script, tools=[look], middleware=[Slow("")], policy=AgentPolicy(hook_timeout_s=limit_s)
    )

    async def ask_twice() -> None:
        async with Network.open() as network:
            mia = await Person.join(network, "mia")
            client = SlowHub(await network.join("bob", role="reactor"))
            task = asyncio.create_task(runner.run(client))  # type: ignore[arg-type]
            await runner.ready()
            assert (await mia.ask("bob", "one")).text == "a cat"
            runs.clear()
            assert "an error on my side" in (await mia.ask("bob", "two")).text, "its own time counts"
            await runner.stop()
            await task

    run(ask_twice(), SimulationLoop())


def test_the_time_of_a_hook_goes_on_where_it_stood_still() -> None:
    """In simulated time, because the delays of a loaded machine would count as the hook's own time."""

    async def proceed() -> None:
        await asyncio.sleep(LONG_S)

    async def twice(own_s: float, go_on: Callable[[], Awaitable[None]]) -> str:
        await asyncio.sleep(own_s)
        await asyncio.gather(go_on(), pause_hook_timer(asyncio.sleep(LONG_S / 2)))
        await asyncio.sleep(own_s)
        return "done"

    async def try_limits() -> None:
        assert await run_hook(LIMIT_S, twice, LIMIT_S * 0.2, proceed=proceed) == "done"
        with pytest.raises(HookTimedOut, match=r"twice took longer than 0.05 s by itself \(hook_timeout_s\)"):
            await run_hook(LIMIT_S, twice, LIMIT_S * 0.7, proceed=proceed)
        assert await run_hook(math.inf, twice, LIMIT_S * 0.7, proceed=proceed) == "done"

    run(try_limits(), SimulationLoop())


async def test_a_hooks_own_timeout_and_a_cancellation_stay_what_they_are() -> None:
    async def impatient() -> None:
        raise TimeoutError("mine")

    async def hang() -> None:
        entered.set()
        await asyncio.Event().wait()

    entered = asyncio.Event()
    with pytest.raises(TimeoutError, match=r"^mine$") as caught:
        await run_hook(LIMIT_S, impatient)
    assert not isinstance(caught.value, HookTimedOut)
    task = asyncio.create_task(run_hook(20, hang))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_a_hook_leaves_running_has_no_time_of_its_own() -> None:
    """In simulated time, as above."""
    left: list[asyncio.Task[None]] = []

    async def leave(go_on: Callable[[], Awaitable[None]]) -> None:
        async def later() -> None:
            await go_on()
            await pause_hook_timer(asyncio.sleep(0))

        left.append(asyncio.create_task(later()))
        await asyncio.sleep(0)

    async def end() -> None:
        await run_hook(LIMIT_S, leave, proceed=lambda: asyncio.sleep(LIMIT_S * 1.5))
        await asyncio.gather(*left)

    run(end(), SimulationLoop())
