"""Tests of live activity of remote agents while an agent waits for them: the person who started sees it over all
hops, and nobody else does.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from roundelay.agents import live_activity as live
from roundelay.agents.agent_tools import remote_handoff
from roundelay.agents.events import RemoteCall, RemoteOutput, event_to_json
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelDelta, ModelReply, ToolCall
from roundelay.agents.models.scripted import call
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network, serve
from roundelay.display.screen import PLAIN
from roundelay.live_activity import LiveActivity
from roundelay.network.client import NetworkClient, Reconnected, Signal
from roundelay.network.config import NodeConfig
from roundelay.terminal.activity_lines import draw_growing_texts
from tests.support.agents import Person, make_runner, running
from tests.support.remote_team import Stepped, Team, asks, team


async def test_what_agents_elsewhere_think_and_write_reaches_the_person_over_two_hops() -> None:
    async with team() as it:
        await it.mia.client.send_text("guide", "Where is gold?")
        tell = await it.model.asked.get()
        tell(ModelDelta(reasoning="In the hills."))
        [thought] = await it.pieces(1)
        assert thought == {
            "index": 1,
            "turn": 1,
            "kind": "reasoning",
            "at": 0,
            "text": "In the hills.",
            "path": "1.0/1.0",
        }
        assert it.lines() == ["guide › supervisor › researcher · thinks: In the hills."]
        it.model.reply.put_nowait(ModelReply(None, (ToolCall("c", "dig", "{}"),)))
        tell = await it.model.asked.get()
        assert (await it.signal("tool", path="1.0/1.0"))["tool"] == "dig"
        tell(ModelDelta(text="There "))
        tell(ModelDelta(text="is gold."))
        while (last := (await it.pieces(1))[-1])["kind"] != "text":
            pass  # the progress of the tool, if it was visible long enough
        assert last | {"index": 0} == {
            "index": 0,
            "turn": 2,
            "kind": "text",
            "at": 0,
            "text": "There is gold.",
            "path": "1.0/1.0",
        }
        assert last["index"] > thought["index"]
        assert it.lines() == ["guide › supervisor › researcher · writes: There is gold."]
        it.model.reply.put_nowait(ModelReply("There is gold."))
        assert (await it.mia.hear()).text == "There is gold."
        await it.signal("tool", active=False, tool="hand_over_to_supervisor")
        assert it.lines() == []
    told = [event for event in it.events if isinstance(event, RemoteOutput | RemoteCall)]
    assert {event.agent_id for event in told} == {"supervisor"}, "guide hears of all by the one that it asked"
    assert {event_to_json(event)["type"] for event in told} == {"remote_delta", "remote_tool"}


async def test_the_signals_say_for_whom_a_call_waits() -> None:
    async with team() as it:
        await it.mia.client.send_text("guide", "Where is gold?")
        first = await it.signal("tool", asked=["supervisor"])
        assert (first["tool"], first["turn"], first["call"], "path" in first) == (
            "hand_over_to_supervisor",
            1,
            0,
            False,
        )
        second = await it.signal("tool", asked=["researcher"])
        assert (second["path"], second["turn"], second["call"]) == ("1.0", 1, 0)
        await it.model.asked.get()
        it.model.reply.put_nowait(ModelReply("No."))
        await it.mia.hear()


async def test_several_that_are_asked_in_one_call_are_told_apart() -> None:
    one, two = Stepped(), Stepped()
    guide = make_runner("guide", lambda request: call("ask", agent_ids=["ann", "bob"], text="Well?", timeout_s=60))
    others = [SimpleAgentRunner(name, instruction="", model=model) for name, model in (("ann", one), ("bob", two))]
    async with asyncio.timeout(20), Network.open() as network, running(network, guide, *others):
        it = Team(network, one, await Person.join(network, "mia"))
        await it.mia.client.call("network.watch", {"signals": True})
        await it.mia.client.send_text("guide", "Ask them.")
        for model, thought in ((one, "Yes?"), (two, "No?")):
            (await model.asked.get())(ModelDelta(reasoning=thought))
        assert {piece["path"]: piece["text"] for piece in await it.pieces(2)} == {"1.0": "Yes?", "1.0.1": "No?"}
        assert sorted(it.lines()) == ["guide › ann · thinks: Yes?", "guide › bob · thinks: No?"]


async def test_without_a_person_nothing_is_streamed_or_passed_on() -> None:
    """The conversation has no person. Neither the asking agent nor a third agent with access to the thread receives
    live activity.
    """
    async with team() as it:
        robot = await it.network.join("robot", kind="agent")
        await robot.call("network.watch", {"signals": True})
        await robot.send("agent:guide", "Where is gold?", requires_response=["guide"])
        tell = await it.model.asked.get()
        tell(ModelDelta(reasoning="In the hills."))
        await asyncio.sleep(3 * live.INTERVAL_S)
        it.model.reply.put_nowait(ModelReply("There."))
        kinds = []
        async for event in robot.events():
            if isinstance(event, Signal):
                kinds.append(event.kind)
                if event.kind == "thinking" and event.body["active"] is False:
                    break
        assert set(kinds) == {"thinking", "tool"}
    assert not [event for event in it.events if isinstance(event, RemoteOutput | RemoteCall)]


async def test_another_person_sees_nothing_of_it() -> None:
    async with team() as it:
        bob = await Person.join(it.network, "bob")
        await bob.client.call("network.watch", {"signals": True})
        await it.mia.client.send_text("guide", "Where is gold?")
        tell = await it.model.asked.get()
        tell(ModelDelta(reasoning="In the hills."))
        await it.pieces(1)
        await bob.client.signal("typing", {}, to="agent:guide")
        await it.mia.client.send_text("bob", "Hello")
        await it.mia.client.signal("typing", {}, to="agent:bob")
        async for event in bob.client.events():
            assert not (isinstance(event, Signal) and event.sender_id != "mia"), event
            if isinstance(event, Signal):
                break
        it.model.reply.put_nowait(ModelReply("There."))
        await it.mia.hear()


async def test_an_answer_that_is_reviewed_is_not_shown_before_by_whoever_wrote_it() -> None:
    class Guard(Middleware):
        async def review(self, around: Around, answer: str) -> str:
            return "(withheld)"

    async with team(middleware=[Guard()]) as it:
        await it.mia.client.send_text("guide", "Where is gold?")
        tell = await it.model.asked.get()
        tell(ModelDelta(reasoning="It is under the oak.", text="Under the oak."))
        it.model.reply.put_nowait(ModelReply(None, (ToolCall("c", "dig", "{}"),)))
        await it.model.asked.get()
        await it.signal("tool", path="1.0/1.0", active=False)
        await asyncio.sleep(3 * live.INTERVAL_S)
        it.model.reply.put_nowait(ModelReply("Under the oak."))
        assert (await it.mia.hear()).text == "(withheld)"
        seen: list[Signal] = []
        async for event in it.mia.client.events():
            if isinstance(event, Signal):
                seen.append(event)
                if event.kind == "thinking" and event.body["active"] is False:
                    break
        assert not [
            piece
            for signal in seen
            if signal.kind == "delta"
            for piece in signal.body["pieces"]
            if piece["kind"] != "progress"
        ]
    held = [event for event in it.events if isinstance(event, RemoteOutput) and event.kind in ("text", "reasoning")]
    assert held
    assert all(event.is_held for event in held)


MALFORMED: list[Any] = [
    None,
    {},
    {"pieces": 3},
    {"pieces": [None, 3, {}, {"turn": "1", "kind": "text", "at": 0, "text": "x"}]},
    {"pieces": [{"turn": 1, "kind": "shout", "at": 0, "text": "x"}]},
    {"pieces": [{"turn": 1, "kind": "text", "at": 0, "text": 7}]},
    {"pieces": [{"turn": 1, "kind": "text", "at": 0, "text": "x", "path": "../1"}]},
    {"pieces": [{"turn": 1, "kind": "text", "at": 0, "text": "x", "path": ["1.0"]}]},
    {"pieces": [{"turn": 1, "kind": "text", "at": 0, "text": "x", "path": "/".join(["1.0"] * 40)}]},
    {"pieces": [{"turn": 1, "kind": "text", "at": 0, "text": "x", "call": "0"}]},
    {"pieces": [{"turn": 1, "kind": "text", "at": 10**40, "text": "x"}]},
    {"pieces": [{"turn": -1, "kind": "text", "at": 0, "text": "x"}]},
    {"pieces": [{"turn": 10**40, "kind": "text", "at": 0, "text": "x"}]},
    {"pieces": [{"turn": 1, "kind": "text", "at": True, "text": "x"}]},
]


async def test_only_the_very_reaction_that_is_waited_for_is_heard_and_what_is_broken_passed_over() -> None:
    """Supervisor is a hostile process here. Supervisor's stream appears only as its own activity, even if it claims
    another source.
    """
    guide = make_runner("guide", asks("hand_over_to_supervisor", note=""), tools=[remote_handoff("supervisor")])
    async with asyncio.timeout(20), Network.open() as network:
        supervisor = await network.join("supervisor", kind="agent")
        async with running(network, guide):
            it = Team(network, Stepped(), await Person.join(network, "mia"))
            await it.mia.client.call("network.watch", {"signals": True})
            await it.mia.client.send_text("guide", "Where is gold?")
            question = await anext(aiter(supervisor))
            await it.signal("tool", asked=["supervisor"])
            mine = reaction_id("supervisor", question.seq or 0, supervisor.welcome.network.epoch)
            thread = question.thread_id

            async def stream(body: Any, kind: Any = "delta") -> None:
                await supervisor.signal(kind, body, thread_id=thread)

            good = {"turn": 1, "kind": "text", "at": 0, "text": "x"}
            await stream({"reaction": "another", "pieces": [good]})
            for body in MALFORMED:
                await stream({"reaction": mine, **body} if isinstance(body, dict) else body)
            for tool_body in (
                {"turn": 1},
                {"turn": 1, "call": 0, "tool": 5, "active": True},
                {"turn": 1, "call": 0, "tool": "x", "active": "yes"},
            ):
                await stream({"reaction": mine, **tool_body}, "tool")
            await stream(
                {
                    "reaction": mine,
                    "turn": 1,
                    "call": 0,
                    "tool": "t" * 999,
                    "active": True,
                    "asked": ["a" * 999, 4] * 50,
                },
                "tool",
            )
            told = await it.signal("tool", path="1.0")
            assert (len(told["tool"]), len(told["asked"]), {len(name) for name in told["asked"]}) == (64, 16, {64})
            await stream(
                {"reaction": mine, "pieces": [good | {"text": "y" * 50_000, "tool": "t" * 999}] * 4 + [good] * 200}
            )
            pieces = await it.pieces(1)
            assert {piece["path"] for piece in pieces} == {"1.0"}
            assert sum(len(piece["text"]) for piece in pieces) <= live.MAX_SIGNAL_CHARS
            await supervisor.reply(question, "Under the oak.")
            assert (await it.mia.hear()).text == "Under the oak."


async def test_streams_go_on_when_the_waiting_agent_is_started_anew() -> None:
    """Guide is stopped while it waits. Guide's next runner continues to wait, and passes on new activity."""
    async with asyncio.timeout(20), Network.open() as network:
        model = Stepped()
        researcher = SimpleAgentRunner("supervisor", instruction="", model=model)
        it = Team(network, model, await Person.join(network, "mia"))
        await it.mia.client.call("network.watch", {"signals": True})
        script = asks("hand_over_to_supervisor", note="")
        async with running(network, researcher):
            async with running(network, make_runner("guide", script, tools=[remote_handoff("supervisor")])):
                await it.mia.client.send_text("guide", "Where is gold?")
                tell = await model.asked.get()
                tell(ModelDelta(text="Under "))
                assert [piece["text"] for piece in await it.pieces(1)] == ["Under "]
            async with running(network, make_runner("guide", script, tools=[remote_handoff("supervisor")])):
                await it.signal("tool", asked=["supervisor"])
                tell(ModelDelta(text="the oak."))
                [piece] = await it.pieces(1)
                assert (piece["at"], piece["text"]) == (6, "the oak.")
                model.reply.put_nowait(ModelReply("Under the oak."))
                assert (await it.mia.hear()).text == "Under the oak."


async def test_streams_go_on_when_the_hub_was_away(tmp_path: Path) -> None:
    """All clients reconnect on their own, and the waiting agent asks the hub for signals again."""
    model = Stepped()
    script = asks("hand_over_to_supervisor", note="")
    async with asyncio.timeout(40), AsyncExitStack() as stack:
        hub = AsyncExitStack()
        stack.push_async_callback(hub.aclose)
        config = NodeConfig(port=0, db=tmp_path / "node.db")
        node = await hub.enter_async_context(serve(config))
        runners = [
            SimpleAgentRunner("supervisor", instruction="", model=model, url=node.url),
            make_runner("guide", script, tools=[remote_handoff("supervisor")], url=node.url),
        ]
        for runner in runners:
            task = asyncio.create_task(runner.run())
            stack.push_async_callback(asyncio.wait, [task])
            stack.push_async_callback(runner.stop)
            await runner.ready()
        client = NetworkClient("mia", node.url, kind="human", token=node.owner_token)
        mia = Person(await stack.enter_async_context(client))
        await client.call("network.watch", {"signals": True})
        await client.send_text("guide", "Where is gold?")
        tell = await model.asked.get()
        tell(ModelDelta(text="Under "))
        assert [piece["text"] for piece in (await _next_delta(client))["pieces"]] == ["Under "]
        await hub.aclose()
        port = urlsplit(node.url).port
        await hub.enter_async_context(serve(config.model_copy(update={"port": port})))
        async for event in client.events():
            if isinstance(event, Reconnected):
                break
        await client.call("network.watch", {"signals": True})
        seen = asyncio.create_task(_next_delta(client))
        while not seen.done():
            tell(ModelDelta(text="more "))
            await asyncio.wait([seen], timeout=live.INTERVAL_S)
        assert {piece["path"] for piece in seen.result()["pieces"]} == {"1.0"}
        model.reply.put_nowait(ModelReply("Under the oak."))
        assert (await mia.hear()).text == "Under the oak."


async def _next_delta(client: NetworkClient) -> dict[str, Any]:
    async for event in client.events():
        if isinstance(event, Signal) and event.kind == "delta":
            return event.body
    raise AssertionError


@pytest.mark.parametrize("gap", [False, True])
def test_a_lost_piece_shows_as_a_gap(gap: bool) -> None:
    view = LiveActivity()
    call_of = {"reaction": "r", "tool": "t", "turn": 1, "call": 0, "active": True, "asked": ["ann"]}
    view.handle_event(Signal("guide", "t", "tool", call_of))
    for at, text in ((0, "one "), (9 if gap else 4, "three")):
        piece = {"index": 1, "turn": 1, "kind": "text", "at": at, "text": text, "path": "1.0"}
        view.handle_event(Signal("guide", "t", "delta", {"reaction": "r", "pieces": [piece]}))
    [line] = draw_growing_texts(view, "t", width=60, rows=4, paint=PLAIN)
    assert line == ("guide › ann · writes: one … three" if gap else "guide › ann · writes: one three")
    view.handle_event(Signal("guide", "t", "tool", call_of | {"active": False}))
    assert draw_growing_texts(view, "t", width=60, rows=4, paint=PLAIN) == []


async def test_what_streams_of_nested_agents_is_for_those_who_may_know_of_the_question() -> None:
    agents = ["guide", "supervisor", "researcher"]
    async with team() as it:
        zoe, carl = await Person.join(it.network, "zoe"), await Person.join(it.network, "carl")
        await zoe.client.call("network.watch", {"signals": True})
        await it.mia.client.broadcast("Where is gold?", exclude_agent_ids=["zoe", *agents[1:]])
        tell = await it.model.asked.get()
        await carl.client.broadcast(
            "not for mia", exclude_agent_ids=["mia", *agents]
        )  # the newest message does not determine who may know
        tell(ModelDelta(reasoning="The SECRET is in the hills."))
        assert (await it.pieces(1))[0]["text"] == "The SECRET is in the hills."
        it.model.reply.put_nowait(ModelReply("There is gold."))
        assert (await it.mia.hear()).text == "There is gold."
        await carl.client.signal("typing", "marker", to="broadcast")
        heard = []
        async for event in zoe.client.events():
            if isinstance(event, Signal):
                if event.body == "marker":
                    break
                heard.append(event)
        assert heard == []
