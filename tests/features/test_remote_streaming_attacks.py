"""Tests of hostile and careless live activity of remote agents: attacks, floods, and wrong order."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roundelay.agents import live_activity
from roundelay.agents.agent_tools import remote_agent_tool, remote_handoff
from roundelay.agents.events import Event, RemoteCall, RemoteOutput
from roundelay.agents.inbox import Visibility
from roundelay.agents.journal import Journal
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelDelta, ModelReply, ModelRequest, OnDelta
from roundelay.agents.models.scripted import call
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.client import NetworkClient, Signal
from roundelay.network.messages import BaseMessage
from tests.support.agents import Person, cancel, make_runner, running
from tests.support.remote_team import Stepped, Team, asks, team

HAND_OVER = remote_handoff("supervisor")


class Withholding(Middleware):
    async def review(self, around: Around, answer: str) -> str:
        return "(withheld)"


@tool(idempotent=True, answers=True)
async def write() -> AsyncIterator[str]:
    """Write the answer."""
    yield "Under the oak."
    await asyncio.sleep(3 * live_activity.INTERVAL_S)


async def watch(network: Network, agent_id: str) -> Person:
    person = await Person.join(network, agent_id)
    await person.client.call("network.watch", {"signals": True})
    return person


async def until_idle(client: NetworkClient, agent_id: str = "guide") -> list[Signal]:
    """Return every signal of an agent until its end signal."""
    seen = []
    async for event in client.events():
        if isinstance(event, Signal) and event.sender_id == agent_id:
            seen.append(event)
            if event.kind == "thinking" and event.body["active"] is False:
                return seen
    raise AssertionError


def kinds_of(signals: list[Signal]) -> set[str]:
    return {piece["kind"] for it in signals if it.kind == "delta" for piece in it.body["pieces"]}


# --- activity that others may not see


class Remembering(Stepped):
    """A model that records its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        self.prompts.append(str(request.messages))
        return await super().complete(request, on_delta)


@pytest.mark.parametrize("visibility", ["people", "strict", "all", "current"])
async def test_an_agent_that_is_asked_streams_only_what_the_person_may_read(visibility: Visibility) -> None:
    """Under `all`, the prompt for mia's question contains bob's question to guide, so the thinking must not be shown
    to mia.
    """
    model = Remembering()
    guide = make_runner("guide", asks("hand_over_to_supervisor", note=""), tools=[HAND_OVER])
    supervisor = SimpleAgentRunner("supervisor", instruction="", model=model, visibility=visibility)
    async with asyncio.timeout(20), Network.open() as network, running(network, supervisor, guide):
        bob, mia = await Person.join(network, "bob"), await watch(network, "mia")
        model.reply.put_nowait(ModelReply("Noted."))
        assert (await bob.ask("guide", "My code is 7.")).text == "Noted."
        await mia.client.send_text("guide", "Hello?")
        await model.asked.get()
        tell = await model.asked.get()
        tell(ModelDelta(reasoning="Bob's code is 7.", text="Well."))
        await asyncio.sleep(3 * live_activity.INTERVAL_S)
        model.reply.put_nowait(ModelReply("Hello."))
        assert (await mia.hear()).text == "Hello."
        seen = await until_idle(mia.client)
    assert ("My code is 7." in model.prompts[1]) == (visibility == "all")
    assert kinds_of(seen) == ({"text", "reasoning"} if visibility != "all" else set())


async def test_what_is_only_recorded_is_not_streamed_by_those_that_were_asked_for_it() -> None:
    async with team(policy=AgentPolicy(on_text="record")) as it:
        await it.mia.client.send_text("guide", "Where is gold?")
        (await it.model.asked.get())(ModelDelta(reasoning="In the hills.", text="There."))
        await asyncio.sleep(3 * live_activity.INTERVAL_S)
        it.model.reply.put_nowait(ModelReply("There."))
        assert kinds_of(await until_idle(it.mia.client)) == set()


@pytest.mark.parametrize("is_remote", [True, False])
async def test_an_answer_that_a_tool_writes_is_not_shown_before_its_review_either(is_remote: bool) -> None:
    asked, writer = (HAND_OVER, "supervisor") if is_remote else (write, "other")
    script = asks("hand_over_to_supervisor", note="") if is_remote else lambda request: call("write")
    guide = make_runner("guide", script, tools=[asked], middleware=[Withholding()])
    other = make_runner(writer, lambda request: call("write"), tools=[write])
    async with asyncio.timeout(20), Network.open() as network, running(network, other, guide):
        mia = await watch(network, "mia")
        assert (await mia.ask("guide", "Where is gold?")).text == "(withheld)"
        assert kinds_of(await until_idle(mia.client)) == set()


CHAIN = ("guide", "supervisor", "researcher")


def make_chain(model: Stepped, **options: Any) -> dict[str, SimpleAgentRunner]:
    """Return a chain in which guide asks supervisor, and supervisor asks researcher. ``options`` are by agent."""

    def more(agent_id: str) -> Any:
        return options.get(agent_id, {})

    inner = remote_agent_tool("researcher")
    return {
        "researcher": SimpleAgentRunner("researcher", instruction="", model=model, **more("researcher")),
        "supervisor": make_runner("supervisor", asks("researcher", task="gold"), tools=[inner], **more("supervisor")),
        "guide": make_runner("guide", asks("hand_over_to_supervisor", note=""), tools=[HAND_OVER], **more("guide")),
    }


@pytest.mark.parametrize("reviewer", CHAIN)
async def test_whoever_reviews_along_the_way_nothing_is_shown_before(reviewer: str) -> None:
    model = Stepped()
    runners = make_chain(model, **{reviewer: {"middleware": [Withholding()]}})
    async with asyncio.timeout(20), Network.open() as network, running(network, *runners.values()):
        mia = await watch(network, "mia")
        await mia.client.send_text("guide", "Where is gold?")
        (await model.asked.get())(ModelDelta(reasoning="In the hills.", text="Under the oak."))
        await asyncio.sleep(3 * live_activity.INTERVAL_S)
        model.reply.put_nowait(ModelReply("Under the oak."))
        assert (await mia.hear()).text == "(withheld)"
        assert kinds_of(await until_idle(mia.client)) == set()


async def test_in_a_channel_its_readers_see_it_and_nobody_else() -> None:
    model = Stepped()
    guide = make_runner("guide", asks("hand_over_to_supervisor", note=""), tools=[HAND_OVER], channels=["dev"])
    supervisor = SimpleAgentRunner("supervisor", instruction="", model=model)
    async with asyncio.timeout(20), Network.open() as network, running(network, supervisor, guide):
        mia, bob, eve = [await watch(network, name) for name in ("mia", "bob", "eve")]
        for person in (mia, bob):
            await person.client.call("channels.join", {"name": "dev"})
        await mia.client.send("channel:dev", "Where is gold?")
        (await model.asked.get())(ModelDelta(reasoning="In the hills."))
        await asyncio.sleep(3 * live_activity.INTERVAL_S)
        model.reply.put_nowait(ModelReply("There."))
        for person in (mia, bob):
            assert kinds_of(await until_idle(person.client)) == {"reasoning"}
        await mia.client.signal("typing", {}, to="agent:eve")
        async for event in eve.client.events():
            assert not (isinstance(event, Signal) and event.sender_id != "mia"), event
            if isinstance(event, Signal):
                break


# --- floods and wrong order


async def ask_hostile(network: Network) -> tuple[Team, NetworkClient, BaseMessage, str]:
    """Send mia's request, for which guide asks supervisor, a process that the test controls. Return these and the ID
    of its reaction.
    """
    supervisor = await network.join("supervisor", kind="agent")
    it = Team(network, Stepped(), await watch(network, "mia"))
    await it.mia.client.send_text("guide", "Where is gold?")
    question = await anext(aiter(supervisor))
    await it.signal("tool", asked=["supervisor"])
    mine = reaction_id("supervisor", question.seq, supervisor.welcome.network.epoch)
    return it, supervisor, question, mine


async def test_a_flood_of_one_that_was_asked_is_not_passed_on_and_drowns_nobody() -> None:
    guide = make_runner("guide", asks("hand_over_to_supervisor", note=""), tools=[HAND_OVER])
    async with asyncio.timeout(30), Network.open() as network, running(network, guide):
        it, supervisor, question, mine = await ask_hostile(network)
        for number in range(3000):
            body = {"reaction": mine, "turn": number, "call": 0, "tool": "x", "active": True}
            await supervisor.signal("tool", body, thread_id=question.thread_id)
            if number % 20 == 0:
                await asyncio.sleep(0)
        await supervisor.reply(question, "Under the oak.")
        assert (await it.mia.hear()).text == "Under the oak."
        seen = await until_idle(it.mia.client)
        passed = [event for event in seen if event.kind == "tool" and event.body.get("path") == "1.0"]
        assert 1 <= len(passed) <= 10 * live_activity.MAX_SIGNALS_A_SECOND


@pytest.mark.parametrize("restarted", CHAIN)
async def test_streams_go_on_whoever_of_them_is_started_anew(restarted: str) -> None:
    model = Stepped()
    async with asyncio.timeout(20), Network.open() as network, AsyncExitStack() as stack:
        runners = make_chain(model)
        for agent_id in CHAIN[::-1]:
            if agent_id != restarted:
                await stack.enter_async_context(running(network, runners[agent_id]))
        it = Team(network, model, await watch(network, "mia"))
        async with running(network, make_chain(model)[restarted]):
            await it.mia.client.send_text("guide", "Where is gold?")
            tell = await model.asked.get()
            tell(ModelDelta(text="Under "))
            assert [piece["text"] for piece in await it.pieces(1)] == ["Under "]
        async with running(network, runners[restarted]):
            if restarted == "researcher":
                tell = await model.asked.get()  # researcher's model is called again
                tell(ModelDelta(text="Under "))
            elif restarted == "guide":
                await it.signal("tool", asked=["supervisor"])
            else:
                await it.signal("tool", asked=["researcher"])
            seen = asyncio.create_task(it.pieces(1))
            while not seen.done():
                tell(ModelDelta(text="more "))
                await asyncio.wait([seen], timeout=live_activity.INTERVAL_S)
            assert {piece["path"] for piece in seen.result()} == {"1.0/1.0"}
            model.reply.put_nowait(ModelReply("Under the oak."))
            assert (await it.mia.hear()).text == "Under the oak."


async def test_what_is_streamed_as_soon_as_the_question_is_there_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The asked agent may start before the asking agent has recorded its wait."""
    may_wait = asyncio.Event()
    record_waiting = Journal.record_waiting

    async def record_late(self: Journal, turn: int, call: int, wait: Any) -> None:
        await may_wait.wait()
        await record_waiting(self, turn, call, wait)

    monkeypatch.setattr(Journal, "record_waiting", record_late)
    guide = make_runner("guide", asks("hand_over_to_supervisor", note=""), tools=[HAND_OVER])
    async with asyncio.timeout(20), Network.open() as network, running(network, guide):
        supervisor = await network.join("supervisor", kind="agent")
        it = Team(network, Stepped(), await watch(network, "mia"))
        await it.mia.client.send_text("guide", "Where is gold?")
        question = await anext(aiter(supervisor))
        mine = reaction_id("supervisor", question.seq, supervisor.welcome.network.epoch)
        body = {"reaction": mine, "turn": 1, "call": 0, "tool": "dig", "active": True}
        heard = asyncio.create_task(it.signal("tool", path="1.0"))
        while not heard.done():  # guide may not know yet that its question is stored
            await supervisor.signal("tool", body, thread_id=question.thread_id)
            await asyncio.wait([heard], timeout=live_activity.INTERVAL_S)
        assert heard.result()["tool"] == "dig"
        may_wait.set()
        await supervisor.reply(question, "Under the oak.")
        assert (await it.mia.hear()).text == "Under the oak."


def test_signals_of_one_agent_are_bounded_by_the_second() -> None:
    async def run() -> int:
        passed: list[object] = []
        client: Any = SimpleNamespace(
            agent_id="guide", welcome=SimpleNamespace(network=SimpleNamespace(epoch="e"), session_id="s")
        )
        listening = live_activity.RemoteActivity(client)
        waiting = live_activity.WaitingCall("r", "", 1, 0, "ask", lambda: False, iter(range(10**6)), passed.append)
        with listening.listen({"ann": 5, "bob": 6}, waiting):
            for number in range(5000):
                body = {"reaction": reaction_id("ann", 5, "e"), "turn": number, "call": 0, "tool": "x", "active": True}
                listening.hear(Signal("ann", "t", "tool", body))
            before = len(passed)
            body = {"reaction": reaction_id("bob", 6, "e"), "turn": 1, "call": 0, "tool": "x", "active": True}
            listening.hear(Signal("bob", "t", "tool", body))
            assert len(passed) == before + 1, "another one that was asked is heard as ever"
        listening.hear(Signal("bob", "t", "tool", body))
        assert len(passed) == before + 1, "nobody listens any more"
        return before

    assert 1 <= asyncio.run(run()) <= 2 * live_activity.MAX_SIGNALS_A_SECOND


async def test_what_waits_to_be_shown_is_bounded_however_much_comes() -> None:
    class Client:
        async def signal(self, kind: str, body: dict[str, object], *, thread_id: str, trigger: int) -> None:
            sent.append(body)

    sent: list[dict[str, object]] = []
    display = live_activity.ActivitySender("guide", None)
    shown = live_activity.ActivityReporter(display, "r", "t", 1, is_watched=True)
    sending = asyncio.create_task(display.send(cast("Any", Client())))
    tracemalloc.start()
    for number in range(5000):
        event = RemoteOutput("r", number, "ann", "text", 0, f"{number:04d}" * 1000, path="1.0", index=number)
        shown.report(event)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    await asyncio.sleep(3 * live_activity.INTERVAL_S)
    sending.cancel()
    [body] = sent
    assert body["pieces"][-1]["text"] == "4999" * 1000  # type: ignore[index]


async def test_a_late_answer_and_what_was_streamed_after_the_time_is_passed_on_no_more() -> None:
    """Guide waits for a tenth of a second."""
    hurried = remote_handoff("supervisor", timeout_s=0.1)
    events: list[Event] = []
    guide = make_runner("guide", asks("hand_over_to_supervisor", note=""), tools=[hurried], on_event=events.append)
    async with asyncio.timeout(20), Network.open() as network, running(network, guide):
        it, supervisor, question, mine = await ask_hostile(network)
        assert "has not answered within 0.1 s" in (await it.mia.hear()).text
        await until_idle(it.mia.client)
        good = {"turn": 1, "kind": "text", "at": 0, "text": "x"}
        for kind, body in (
            ("delta", {"pieces": [good]}),
            ("tool", {"turn": 1, "call": 0, "tool": "x", "active": True}),
        ):
            await supervisor.signal(kind, {"reaction": mine, **body}, thread_id=question.thread_id)  # type: ignore[arg-type]
        await supervisor.reply(question, "Under the oak.")
        await it.mia.client.send_text("guide", "And now?")
        assert {event.kind for event in await until_idle(it.mia.client)} <= {"thinking", "tool"}
        assert not [event for event in events if isinstance(event, RemoteOutput | RemoteCall)]


async def test_signals_are_asked_for_again_while_the_question_is_on_its_way() -> None:
    """The connection was lost after the request for signals, and before anybody listened."""
    calls: list[str] = []
    client: Any = SimpleNamespace(welcome=SimpleNamespace(session_id="s1"))

    async def note(operation: str, args: object) -> None:
        calls.append(client.welcome.session_id)

    client.call = note
    listening = live_activity.RemoteActivity(client)
    await listening.watch_again()
    await listening.watch()
    await listening.watch()
    client.welcome.session_id = "s2"
    await listening.watch_again()
    assert calls == ["s1", "s2"]


async def test_a_persons_stop_reaches_an_agent_in_a_flood_of_signals() -> None:
    """A client that watches signals must not lose other events, although it keeps only a thousand events."""
    async with asyncio.timeout(20), Network.open() as network:
        robot = await network.join("robot", kind="agent", role="reactor")
        loud, mia = await network.join("loud", kind="agent"), await Person.join(network, "mia")
        await robot.call("network.watch", {"signals": True})
        await loud.send("agent:robot", "hi")
        stored = await mia.client.send_text("robot", "hello")
        started = {"trigger": stored.seq, "thread_id": stored.thread_id, "as_of": stored.seq, "manifest": []}
        await robot.record("r1", "started", started, record_id="r1-started")
        await cancel(mia.client, thread_id=stored.thread_id)
        for _ in range(1500):
            await loud.signal("typing", {}, to="agent:robot")
        await loud.call("network.list_agents")
        async for event in robot.events():
            if isinstance(event, Signal) and event.kind == "cancel":
                return
