"""Tests of questions to agents through other protocols: the caller sees each event of its own question, in order, and
the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from roundelay.agents.models.model import ModelDelta, ModelError, ModelReply, ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import finish
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.interop.conversations import (
    AgentAnswer,
    Conversations,
    FollowedQuestion,
    QuestionEnded,
    QuestionEvent,
    QuestionStored,
    TextPiece,
)
from roundelay.network.client import NetworkClient
from tests.support.agents import make_runner
from tests.support.asked import invite, working
from tests.support.node import Node, running_node
from tests.support.remote_team import Stepped


@asynccontextmanager
async def joined(node: Node, agent_id: str = "form", kind: str = "service") -> AsyncIterator[Conversations]:
    _, _, token = (await invite(node, agent_id, kind)).partition(":")
    async with NetworkClient(agent_id, node.url, kind=None, token=token, deliver=False) as client:
        yield Conversations(client)


async def ends_of(question: FollowedQuestion) -> list[Any]:
    """Return the texts and the status of a question, without the streamed pieces."""
    seen: list[Any] = []
    async for event in question:
        match event:
            case AgentAnswer():
                seen.append(event.message.text)
            case QuestionEnded():
                seen.append(event.status)
            case _:
                pass
    return seen


async def test_two_questions_at_once_stream_their_own_pieces_then_their_answers_then_their_ends() -> None:
    model = Stepped()
    async with (
        asyncio.timeout(20),
        running_node() as node,
        joined(node) as form,
        working(node, SimpleAgentRunner("bob", instruction="", model=model)),
        form.ask("bob", "one", conversation="a") as one,
    ):
        first = aiter(one)
        assert isinstance(await anext(first), QuestionStored)
        tell_one = await model.asked.get()
        async with form.ask("bob", "two", conversation="b") as two:
            second = aiter(two)
            assert isinstance(await anext(second), QuestionStored)
            tell_two = await model.asked.get()
            for text in ("1", "1"):
                tell_one(ModelDelta(text=text))
            tell_two(ModelDelta(reasoning="hm"))
            tell_two(ModelDelta(text="2"))
            assert await pieces(first, 2) == [("text", "11")]
            assert await pieces(second, 3) == [("reasoning", "hm"), ("text", "2")]
            model.reply.put_nowait(ModelReply("11"))
            assert [told(it) async for it in first] == ["11", "answered"]
            model.reply.put_nowait(ModelReply("2 as I said"))
            assert [told(it) async for it in second] == ["2 as I said", "answered"]
            assert one.stored.thread_id != two.stored.thread_id


async def test_a_question_that_waits_behind_another_in_its_conversation_sees_nothing_of_that() -> None:
    model = Stepped()
    async with (
        asyncio.timeout(20),
        running_node() as node,
        joined(node) as form,
        working(node, SimpleAgentRunner("bob", instruction="", model=model)),
        form.ask("bob", "one", conversation="a") as one,
        form.ask("bob", "two", conversation="a") as two,
    ):
        first, second = aiter(one), aiter(two)
        await anext(second)
        waiting = asyncio.create_task(anext(second))
        tell = await model.asked.get()
        tell(ModelDelta(text="1"))
        await anext(first)
        assert await pieces(first, 1) == [("text", "1")]
        model.reply.put_nowait(ModelReply("1"))
        assert [told(it) async for it in first] == ["1", "answered"]
        tell = await model.asked.get()
        tell(ModelDelta(text="2"))
        piece = await waiting
        assert isinstance(piece, TextPiece)
        assert piece.text == "2"
        model.reply.put_nowait(ModelReply("2"))
        assert [told(it) async for it in second] == ["2", "answered"]


async def pieces(events: AsyncIterator[QuestionEvent], chars: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    while sum(len(text) for _, text in found) < chars:
        event = await anext(events)
        assert isinstance(event, TextPiece)
        found.append((event.kind, event.text))
    return found


def told(event: QuestionEvent) -> str:
    assert isinstance(event, AgentAnswer | QuestionEnded), event
    return event.message.text if isinstance(event, AgentAnswer) else event.status


def act(request: ModelRequest) -> Any:
    said = read_prompt(request).incoming_text
    match said:
        case "nothing to say":
            return finish()
        case "break":
            raise ModelError("broken", "server")
        case _:
            return f"I hear {said}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hi", ["I hear hi", "answered"]),
        ("nothing to say", ["silent"]),
        ("break", ["bob cannot answer right now; the operator has been notified.", "failed"]),
    ],
)
async def test_each_end_is_told_and_a_repeat_under_its_id_tells_the_same(text: str, expected: list[str]) -> None:
    async with (
        asyncio.timeout(20),
        running_node() as node,
        working(node, make_runner("bob", act)),
        joined(node) as form,
    ):
        for is_repeat in (False, True):
            async with form.ask("bob", text, conversation="a", message_id="k") as question:
                assert question.stored.is_repeat is is_repeat
                assert await ends_of(question) == expected
        assert len((await form.client.history(question.stored.thread_id)).messages) == len(expected)


async def test_a_question_is_stopped_by_its_caller_alone() -> None:
    model = Stepped()
    async with (
        asyncio.timeout(20),
        running_node() as node,
        joined(node) as form,
        joined(node, "other") as other,
        working(node, SimpleAgentRunner("bob", instruction="", model=model)),
        form.ask("bob", "dig", conversation="a") as question,
    ):
        await model.asked.get()
        assert await other.client.call("network.cancel", {"reaction": question.reaction}) == {"reactions": []}
        assert await question.stop()
        assert await ends_of(question) == ["cancelled"]


async def test_a_conversation_that_a_person_has_taken_over_is_held() -> None:
    model = Stepped()
    async with (
        asyncio.timeout(20),
        running_node() as node,
        joined(node) as form,
        working(node, SimpleAgentRunner("bob", instruction="", model=model)),
        form.ask("bob", "dig", conversation="a") as question,
    ):
        await model.asked.get()
        mia = await node.person("mia")
        await mia.call("network.take", {"thread_id": question.stored.thread_id})
        assert await ends_of(question) == ["held"]


async def test_an_agent_that_keeps_no_records_has_answered_when_it_has() -> None:
    async with asyncio.timeout(20), running_node() as node, joined(node) as form:
        bob = await node.agent("bob")
        async with form.ask("bob", "17 and 23?", conversation="a") as question:
            asked = await bob.message("17 and 23?")
            assert asked["metadata"] == {"ask": {"watched": True}}
            await bob.send("agent:form", "40.", reply_to=asked["seq"], cause=asked["seq"])
            assert await ends_of(question) == ["40.", "answered"]


async def test_what_listens_for_a_caller_ends_with_its_session() -> None:
    async with asyncio.timeout(20), running_node() as node:
        async with joined(node) as form, form.follow("bob", QuestionStored(1, "direct:bob~form:a", True)):
            listeners = [it for it in asyncio.all_tasks() if it.get_name() == "conversations"]
        assert len(listeners) == 2
        await asyncio.gather(*listeners)
