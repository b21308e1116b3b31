"""Tests of streams: generator tools, the text and reasoning of a reply, their order with inner agents, and the live
view for people.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from roundelay.agents import live_activity as live
from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.events import Event, ModelOutput, Progress, ToolCallEnd, ToolCallStart, ToolOutput
from roundelay.agents.features.references import References
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelDelta, ModelReply, ToolCall
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Output, ToolContext, tool
from roundelay.app import Network
from roundelay.display.screen import PLAIN
from roundelay.live_activity import LiveActivity
from roundelay.network.client import NetworkClient, Presence, Signal
from roundelay.network.messages import DirectMessage
from roundelay.terminal.activity_lines import describe_news, draw_growing_texts
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import text
from tests.support.loops import Body, Loop, by_turn, results_of, system_of, use
from tests.support.remote_team import Stepped


@tool(idempotent=True)
async def read(context: ToolContext, at: str = "it") -> AsyncIterator[str]:
    """Read something aloud."""
    context.report(f"opening {at}")
    for piece in ("one ", "two ", "three"):
        yield piece


async def events_of(*tools: Any, script: Any, stream: bool = False) -> tuple[list[Event], Provider]:
    async with Provider(script) as provider:
        loop = Loop(Agent("bob", "", provider.model(stream=stream), tools))
        await loop.drive()
        return loop.events, provider


async def test_a_tool_that_is_a_generator_starts_streams_and_is_done() -> None:
    events, provider = await events_of(read, script=by_turn(use(("read", {})), "Done."))
    told = [it for it in events if isinstance(it, ToolCallStart | ToolOutput | Progress | ToolCallEnd)]
    kinds = [type(it) for it in told if not (isinstance(it, Progress) and it.is_done)]
    assert kinds == [ToolCallStart, Progress, ToolOutput, ToolOutput, ToolOutput, ToolCallEnd]
    assert [it.text for it in told if isinstance(it, ToolOutput)] == ["one ", "two ", "three"]
    assert [it.ok for it in told if isinstance(it, ToolCallEnd)] == [True]
    assert results_of(provider.requests[1]) == ["one two three"]


async def test_a_generator_that_fails_streams_and_ends_with_its_error() -> None:
    @tool(idempotent=True)
    async def read_badly() -> AsyncIterator[str]:
        """Read."""
        yield "one "
        raise ValueError("the page is torn")

    events, provider = await events_of(read_badly, script=by_turn(use(("read_badly", {})), "Done."))
    assert [it.text for it in events if isinstance(it, ToolOutput)] == ["one "]
    assert [(it.ok, it.content) for it in events if isinstance(it, ToolCallEnd)] == [
        (False, "ValueError: the page is torn")
    ]
    assert results_of(provider.requests[1]) == ["ValueError: the page is torn"]


async def test_a_generator_may_end_with_another_result_than_what_it_showed() -> None:
    @tool(idempotent=True)
    async def summarise() -> AsyncIterator[object]:
        """Read and sum up."""
        yield "a long text"
        yield Output("the gist", {"debug": 3})

    events, provider = await events_of(summarise, script=by_turn(use(("summarise", {})), "Done."))
    assert [it.text for it in events if isinstance(it, ToolOutput)] == ["a long text"]
    assert results_of(provider.requests[1]) == ["the gist"]


async def test_a_sync_tool_streams_from_its_thread_and_not_beyond_its_end() -> None:
    contexts: list[ToolContext] = []
    threads: set[int] = set()

    @tool(idempotent=True)
    def read_plainly(context: ToolContext) -> str:
        """Read."""
        contexts.append(context)
        assert threading.get_ident() != here
        context.stream("one ")
        return "one two"

    class Heard(list[Event]):
        def append(self, event: Event) -> None:
            threads.add(threading.get_ident())
            super().append(event)

    here, events = threading.get_ident(), Heard()
    async with Provider(by_turn(use(("read_plainly", {})), "Done.")) as provider:
        await Loop(Agent("bob", "", provider.model(), [read_plainly]), events=events).drive()
    assert threads == {here}
    contexts[0].stream("too late")
    await asyncio.sleep(0)
    kinds = [type(it) for it in events if isinstance(it, ToolCallStart | ToolOutput | ToolCallEnd)]
    assert kinds == [ToolCallStart, ToolOutput, ToolCallEnd]


async def test_text_reasoning_tools_and_agents_inside_stream_in_one_order() -> None:
    def answer(body: Body) -> Any:
        if system_of(body).startswith("Research."):
            return by_turn(use(("read", {})), text("Salt is old.", reasoning="Hm, salt."))(body)
        return by_turn(use(("researcher", {"task": "salt"}), ("read", {}), text="I will look."), "It is old.")(body)

    async with Provider(answer, chunk_chars=4) as provider:
        model = provider.model(stream=True)
        inner = Agent("researcher", "Research.", model, [read])
        loop = Loop(Agent("bob", "", model, [agent_tool(inner), read]))
        await loop.drive()
    pieces = [it for it in loop.events if isinstance(it, ModelOutput | ToolOutput | Progress)]
    assert [it.index for it in pieces] == list(range(1, len(pieces) + 1))
    inside = [it for it in pieces if isinstance(it, ModelOutput) and it.path == "1.0"]
    assert "".join(it.reasoning for it in inside) == "Hm, salt."
    assert "".join(it.text for it in inside) == "Salt is old."
    own = [it for it in pieces if isinstance(it, ModelOutput) and not it.path]
    assert "".join(it.text for it in own) == "I will look.It is old."
    assert len(own) > 4


# --- live view


class Watching:
    """The deltas that a session receives."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client

    @classmethod
    async def begin(cls, client: NetworkClient) -> Watching:
        await client.call("network.watch", {"signals": True})
        return cls(client)

    async def until_quiet(self, agent_id: str = "bob") -> list[dict[str, Any]]:
        """Return every delta until the agent stops thinking."""
        deltas = []
        async for event in self.client.events():
            match event:
                case Signal(kind="delta"):
                    deltas.append(event.body)
                case Signal(kind="thinking", body={"active": False}):
                    break
        return deltas

    async def piece(self) -> dict[str, Any]:
        """Return the next piece."""
        async for event in self.client.events():
            if isinstance(event, Signal) and event.kind == "delta":
                [piece] = event.body["pieces"]
                return dict(piece)
        raise AssertionError


def make_bob(model: Any, *tools: Any, **options: Any) -> SimpleAgentRunner:
    return SimpleAgentRunner("bob", instruction="Help.", model=model, tools=tools, **options)


async def test_a_watching_person_sees_the_answer_grow_and_others_see_nothing() -> None:
    model = Stepped()
    async with asyncio.timeout(20), Network.open() as network, running(network, make_bob(model)):
        mia, zoe = await Person.join(network, "mia"), await Person.join(network, "zoe")
        seen, unseen = await Watching.begin(mia.client), await Watching.begin(zoe.client)
        await mia.client.send_text("bob", "one")
        tell = await model.asked.get()
        tell(ModelDelta(reasoning="Well. "))
        assert await seen.piece() == {"index": 1, "turn": 1, "kind": "reasoning", "at": 0, "text": "Well. "}
        tell(ModelDelta(text="The "))
        tell(ModelDelta(text="sea"))
        assert await seen.piece() == {"index": 2, "turn": 1, "kind": "text", "at": 0, "text": "The sea"}
        tell(ModelDelta(text=" is salt."))
        assert await seen.piece() == {"index": 4, "turn": 1, "kind": "text", "at": 7, "text": " is salt."}
        model.reply.put_nowait(ModelReply("The sea is salt."))
        assert (await mia.hear()).text == "The sea is salt."
        # Zoe's next event is about her own conversation.
        await zoe.client.send_text("bob", "two")
        await model.asked.get()
        model.reply.put_nowait(ModelReply("Hello."))
        assert await unseen.until_quiet() == []


async def test_however_fast_it_streams_there_are_at_most_ten_signals_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_SIGNAL_CHARS", 100)
    model = Stepped()
    async with asyncio.timeout(20), Network.open() as network, running(network, make_bob(model)):
        mia = await Person.join(network, "mia")
        seen = await Watching.begin(mia.client)
        await mia.client.send_text("bob", "one")
        tell = await model.asked.get()
        clock = asyncio.get_running_loop().time
        began = clock()
        while clock() - began < 0.55:
            tell(ModelDelta(text="0123456789"))
            await asyncio.sleep(0.001)
        model.reply.put_nowait(ModelReply("Done."))
        deltas = await seen.until_quiet()
        took = clock() - began
    assert 1 <= len(deltas) <= took / live.INTERVAL_S
    pieces = [piece for it in deltas for piece in it["pieces"]]
    assert all(len(it["text"]) <= 100 for it in pieces)
    assert [it["at"] for it in pieces] == sorted(it["at"] for it in pieces)


async def test_an_answer_that_is_reviewed_is_not_shown_before() -> None:
    class Guard(Middleware):
        async def review(self, around: Around, answer: str) -> str:
            return "(withheld)"

    model = Stepped()
    runner = make_bob(model, read, middleware=[Guard()])
    async with asyncio.timeout(20), Network.open() as network, running(network, runner):
        mia = await Person.join(network, "mia")
        seen = await Watching.begin(mia.client)
        await mia.client.send_text("bob", "one")
        tell = await model.asked.get()
        tell(ModelDelta(text="The secret is 7.", reasoning="7, then."))
        await asyncio.sleep(3 * live.INTERVAL_S)
        model.reply.put_nowait(ModelReply("The secret is 7."))
        assert await seen.until_quiet() == []
        assert (await mia.hear()).text == "(withheld)"


async def test_an_answer_that_is_only_edited_is_shown_while_it_is_written() -> None:
    """Citations are checked at the end, and the text is still shown before."""
    model = Stepped()
    runner = make_bob(model, middleware=[References()])
    async with asyncio.timeout(20), Network.open() as network, running(network, runner):
        mia = await Person.join(network, "mia")
        seen = await Watching.begin(mia.client)
        await mia.client.send_text("bob", "one")
        (await model.asked.get())(ModelDelta(text="Salt is old [7]."))
        assert (await seen.piece())["text"] == "Salt is old [7]."
        model.reply.put_nowait(ModelReply("Salt is old [7]."))
        assert (await mia.hear()).text == "Salt is old."


@pytest.mark.parametrize(("policy", "by"), [(AgentPolicy(on_text="record"), "human"), (AgentPolicy(), "agent")])
async def test_text_that_nobody_is_sent_is_not_shown_either(policy: AgentPolicy, by: str) -> None:
    """A text for an agent, or a text that is only recorded, is never shown to a person."""
    model = Stepped()
    async with asyncio.timeout(20), Network.open() as network, running(network, make_bob(model, policy=policy)):
        client = await network.join("mia", kind="human" if by == "human" else "agent")
        seen = await Watching.begin(client)
        await client.send("agent:bob", "one", requires_response=["bob"])
        tell = await model.asked.get()
        tell(ModelDelta(text="To myself."))
        await asyncio.sleep(3 * live.INTERVAL_S)
        model.reply.put_nowait(ModelReply("To myself."))
        assert await seen.until_quiet() == []


async def test_a_tools_output_and_progress_are_seen_with_their_call() -> None:
    go_on = asyncio.Event()

    @tool(idempotent=True)
    async def dig(context: ToolContext) -> AsyncIterator[str]:
        """Dig."""
        context.report("digging")
        yield "gold"
        await go_on.wait()

    model = Stepped()
    model.reply.put_nowait(ModelReply(None, (ToolCall("c", "dig", "{}"),)))
    model.reply.put_nowait(ModelReply("Gold."))
    async with asyncio.timeout(20), Network.open() as network, running(network, make_bob(model, dig)):
        mia = await Person.join(network, "mia")
        seen = await Watching.begin(mia.client)
        await mia.client.send_text("bob", "one")
        async for event in seen.client.events():
            if isinstance(event, Signal) and event.kind == "delta":
                assert event.body["pieces"] == [
                    {"index": 1, "turn": 1, "kind": "progress", "at": 0, "text": "digging", "call": 0},
                    {"index": 2, "turn": 1, "kind": "tool", "at": 0, "text": "gold", "call": 0, "tool": "dig"},
                ]
                break
        go_on.set()
        assert (await mia.hear()).text == "Gold."


# --- rendered lines


def delta(*pieces: dict[str, Any], by: str = "bob", reaction: str = "r1", thread_id: str = "t") -> Signal:
    return Signal(by, thread_id, "delta", {"reaction": reaction, "pieces": list(pieces)})


def piece(text: str, at: int = 0, kind: str = "text", turn: int = 1, **more: Any) -> dict[str, Any]:
    return {"index": 1, "turn": turn, "kind": kind, "at": at, "text": text, **more}


def said_by(agent_id: str) -> DirectMessage:
    return DirectMessage(
        seq=1, message_id="m", sender_id=agent_id, sender_kind="agent", to="agent:mia", thread_id="t", content="The sea is salt.",
        sent_at=0, root=1, hops=0,
    )  # fmt: skip


def shown(view: LiveActivity, width: int = 60, rows: int = 8, thread_id: str = "t") -> list[str]:
    return draw_growing_texts(view, thread_id, width=width, rows=rows, paint=PLAIN)


def test_an_answer_grows_and_is_gone_when_it_is_a_message() -> None:
    view = LiveActivity()
    view.handle_event(delta(piece("The sea ")))
    assert shown(view) == ["bob … The sea "]
    view.handle_event(delta(piece("is salt.", at=8)))
    assert shown(view) == ["bob … The sea is salt."]
    assert shown(view, thread_id="another") == []
    view.handle_message(said_by("ann"))
    assert shown(view) == ["bob … The sea is salt."]
    view.handle_message(said_by("bob"))
    assert shown(view) == []


def test_what_comes_after_the_end_is_too_late() -> None:
    view = LiveActivity()
    view.handle_event(delta(piece("The sea ")))
    view.handle_event(Signal("bob", "t", "thinking", {"reaction": "r1", "active": False}))
    view.handle_event(delta(piece("is salt.", at=8)))
    assert shown(view) == []


def test_an_agent_that_is_gone_writes_no_more_and_one_that_comes_back_starts_over() -> None:
    view = LiveActivity()
    view.handle_event(delta(piece("The sea ")))
    view.handle_event(Presence("ann", "offline"))
    assert shown(view) == ["bob … The sea "]
    view.handle_event(Presence("bob", "offline"))
    assert shown(view) == []
    view.handle_event(delta(piece("A lake")))
    assert shown(view) == ["bob … A lake"]
    for is_active in (False, True):
        view.handle_event(Signal("bob", "t", "thinking", {"reaction": "r1", "active": is_active}))
    view.handle_event(delta(piece("Once more")))
    assert shown(view) == ["bob … Once more"]


def test_a_lost_piece_is_a_gap_and_a_second_attempt_starts_over() -> None:
    view = LiveActivity()
    view.handle_event(delta(piece("The ")))
    view.handle_event(delta(piece("salt.", at=11)))
    assert shown(view) == ["bob … The  … salt."]
    view.handle_event(delta(piece("A lake", at=0)))
    assert shown(view) == ["bob … A lake"]


def test_no_line_of_it_can_pass_for_a_message() -> None:
    view = LiveActivity()
    view.handle_event(delta(piece("hi\n12:00:00 #9 ann → mia: pay bob\n\x1b[2J\u202e")))
    assert shown(view) == ["bob … hi", "  | 12:00:00 #9 ann → mia: pay bob", "  | \\x1b[2J\\u202e"]
    view.handle_event(delta(piece("x\n12:00:00 #9 ann → mia: pay", kind="tool", call=0, tool="a\nb"), reaction="r2"))
    assert shown(view)[-1] == "bob · a\\x0ab: x 12:00:00 #9 ann → mia: pay"


def test_long_texts_show_their_end_within_the_rows_and_the_width() -> None:
    view = LiveActivity()
    view.handle_event(delta(piece("wordy " * 2000)))
    view.handle_event(delta(piece("thought " * 100, kind="reasoning", turn=2), by="ann", reaction="r2"))
    lines = shown(view, width=40, rows=6)
    assert len(lines) == 4
    assert all(len(line) <= 40 for line in lines)
    assert lines[-1].startswith("ann · thinks: …thought")


def test_a_call_is_shown_while_it_runs_with_the_agent_inside_of_it() -> None:
    view = LiveActivity()

    def call(name: str, index: int, *, is_active: bool, **more: Any) -> Signal:
        body = {"reaction": "r1", "tool": name, "turn": 1, "call": index, "active": is_active, **more}
        return Signal("bob", "t", "tool", body)

    view.handle_event(call("researcher", 0, is_active=True))
    view.handle_event(call("search", 1, is_active=True))
    reports = view.handle_event(
        delta(
            piece("Rivers", path="1.0"), piece("looking", kind="progress", call=1), piece("found", kind="tool", call=1, tool="search")
        )
    )  # fmt: skip
    assert [describe_news(it) for it in reports] == ["bob: looking"]
    assert shown(view) == ["bob › researcher · writes: Rivers", "bob · looking", "bob · search: found"]
    view.handle_event(call("search", 1, is_active=False))
    assert shown(view) == ["bob › researcher · writes: Rivers"]
    view.handle_event(call("researcher", 0, is_active=False))
    view.handle_event(delta(piece(" carry", at=6, path="1.0")))
    assert shown(view) == []


@pytest.mark.parametrize(
    "body",
    [
        None, [], {}, {"reaction": "r1"}, {"reaction": "r1", "pieces": "x"}, {"reaction": "r1", "pieces": [None, {}]},
        {"reaction": "r1", "pieces": [{"turn": "1", "kind": "text", "at": 0, "text": "x"}]},
        {"reaction": "r1", "pieces": [{"turn": 1, "kind": "other", "at": 0, "text": "x"}]},
    ],
)  # fmt: skip
def test_what_is_no_piece_is_passed_over(body: Any) -> None:
    view = LiveActivity()
    assert view.handle_event(Signal("bob", "t", "delta", body)) == []
    assert shown(view) == []


def test_nobody_writes_into_the_reaction_of_another() -> None:
    """The same reaction ID from another agent is a different reaction."""
    view = LiveActivity()
    view.handle_event(delta(piece("So ", kind="reasoning"), by="ann"))
    view.handle_event(delta(piece("The sea ")))
    view.handle_event(delta(piece("is sweet.", at=8), by="ann"))
    assert shown(view) == ["ann …  … is sweet.", "bob … The sea "]
    view.handle_event(Signal("ann", "t", "thinking", {"reaction": "r1", "active": False}))
    view.handle_event(delta(piece("is salt.", at=8)))
    assert shown(view) == ["bob … The sea is salt."]


async def test_whoever_comes_back_to_a_reviewer_is_not_read_before_either() -> None:
    """Bob hands over and gets the conversation back, and his review covers the result."""

    class Guard(Middleware):
        async def review(self, around: Around, answer: str) -> str:
            return "(withheld)"

    model = Stepped()
    ann = Agent("ann", "", model)
    runner = make_bob(model, middleware=[Guard()], handoffs=[Handoff(ann, returns="to_caller")])
    async with asyncio.timeout(20), Network.open() as network, running(network, runner):
        mia = await Person.join(network, "mia")
        seen = await Watching.begin(mia.client)
        await mia.client.send_text("bob", "one")
        await model.asked.get()
        model.reply.put_nowait(ModelReply(None, (ToolCall("c", "hand_over_to_ann", '{"note": ""}'),)))
        (await model.asked.get())(ModelDelta(text="The secret is 7."))
        await asyncio.sleep(3 * live.INTERVAL_S)
        model.reply.put_nowait(ModelReply("The secret is 7."))
        await model.asked.get()
        model.reply.put_nowait(ModelReply("It is 7."))
        assert await seen.until_quiet() == []
        assert (await mia.hear()).text == "(withheld)"
