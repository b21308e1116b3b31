"""Tests of `ask`, which makes a reaction wait for others durably: their replies are its result and wake nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from roundelay.agents import replies
from roundelay.agents.agent_tools import remote_agent_tool, remote_handoff
from roundelay.agents.events import Waiting
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Script, call, finish, send
from roundelay.agents.policy import AgentPolicy
from roundelay.app import Network
from roundelay.network.config import Limits
from roundelay.network.errors import ConnectError
from roundelay.network.messages import BaseMessage
from tests.support.agents import Heard, Person, cancel, make_runner, running, until_open, until_recorded
from tests.support.busy import BusyClient


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


def asker(*agent_ids: str, timeout_s: float = 20.0) -> Script:
    """Return a script that asks in the first turn, and reports the result in the second."""

    def script(request: ModelRequest) -> Any:
        if request.turn == 1:
            return call("ask", agent_ids=list(agent_ids), text="how many?", timeout_s=timeout_s)
        return read_prompt(request).tool_results[-1].content

    return script


async def test_several_agents_are_asked_at_once_and_their_answers_are_the_result(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    meet = asyncio.Barrier(2)

    async def answer(request: ModelRequest) -> Any:
        await meet.wait()  # both asked agents work at the same time
        if request.agent_id == "ann":
            return "three"
        return send("bob", "four") if request.turn == 1 else finish()

    async def act(request: ModelRequest) -> Any:
        return finish() if request.turn > 1 else await answer(request)

    bob = make_runner("bob", asker("ann", "cid"), on_event=heard)
    async with running(network, bob, make_runner("ann", answer), make_runner("cid", act)):
        told = await mia.ask("bob", "go")
        [end] = await heard.finished()
        await until_recorded(mia, end.reaction, "finished")
        records = await mia.records(end.reaction)
    assert told.text == '<answer sender="ann">three</answer>\n\n<answer sender="cid">four</answer>'
    assert {it.reaction for it in heard.events} == {end.reaction}, "replies start no reaction"
    assert [it["kind"] for it in records] == [
        "started", "model_reply", "tool_started", "asking", "waiting", "tool_result", "model_reply", "finished",
    ]  # fmt: skip
    [waiting] = [it for it in heard.events if isinstance(it, Waiting)]
    assert waiting.agent_ids == ("ann", "cid")


async def test_who_finishes_without_an_answer_declines_and_that_wakes_nobody(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    bob = make_runner("bob", asker("ann"), on_event=heard)
    async with running(network, bob, make_runner("ann", lambda request: finish("not my business"))):
        assert (await mia.ask("bob", "go")).text == '<declined sender="ann">not my business</declined>'
        [end] = await heard.finished()
    assert {it.reaction for it in heard.events} == {end.reaction}


async def test_who_does_not_answer_in_time_is_told_and_a_late_answer_is_a_message(network: Network) -> None:
    mia, heard, release = await Person.join(network, "mia"), Heard(), asyncio.Event()

    async def slow(request: ModelRequest) -> Any:
        await release.wait()
        return "at last"

    def script(request: ModelRequest) -> Any:
        view = read_prompt(request)
        return finish(view.incoming_text) if view.incoming_sender == "ann" else asker("ann", timeout_s=0.05)(request)

    async with running(network, make_runner("bob", script, on_event=heard), make_runner("ann", slow)):
        told = await mia.ask("bob", "go")
        assert told.text == "ann has not answered within 0.05 s. A later answer comes as a message."
        release.set()
        ends = await heard.finished(2)
    assert ends[1].reason == "at last"


async def test_a_stop_reaches_whom_the_reaction_waits_for_and_a_late_answer_wakes_nobody(network: Network) -> None:
    """ann is a working agent. carl is a program that no stop reaches, and that answers anyway."""
    mia, heard, is_asked = await Person.join(network, "mia"), Heard(), asyncio.Event()
    carl = await network.join("carl", kind="agent")
    requests = []

    async def work(request: ModelRequest) -> Any:
        is_asked.set()
        await asyncio.Event().wait()

    def ask(request: ModelRequest) -> Any:
        requests.append(read_prompt(request).incoming_text)
        return asker("ann", "carl")(request) if requests[-1] == "go" else "hello"

    async with asyncio.timeout(20), running(network, make_runner("ann", work, on_event=heard), make_runner("bob", ask)):
        await mia.client.send_text("bob", "go")
        question = await anext(aiter(carl))
        await is_asked.wait()
        bob = await reaction_of(mia, "bob")
        await until_recorded(mia, bob, "waiting")
        await until_open(mia.client, "ann")
        stopped = await cancel(mia.client, thread_id="direct:bob~mia")
        assert (len(stopped), bob in stopped) == (2, True)
        [end] = await heard.finished()
        assert (end.status, end.reaction in stopped) == ("cancelled", True)
        await until_recorded(mia, bob, "finished")
        assert (await mia.hear()).text == "Stopped by mia."
        await carl.reply(question, "five")
        assert (await mia.ask("bob", "hello?")).text == "hello"
    assert requests == ["go", "hello?"]


async def test_a_late_answer_to_a_stopped_wait_wakes_nobody_of_the_next_run_either(network: Network) -> None:
    mia, carl = await Person.join(network, "mia"), await network.join("carl", kind="agent")
    requests = []

    def ask(request: ModelRequest) -> Any:
        requests.append(incoming := read_prompt(request).incoming_text)
        return asker("carl")(request) if incoming == "go" else f"you said: {incoming}"

    async with asyncio.timeout(20), running(network, make_runner("bob", ask)):
        await mia.client.send_text("bob", "go")
        question = await anext(aiter(carl))
        await until_recorded(mia, bob := await reaction_of(mia, "bob"), "waiting")
        await cancel(mia.client, thread_id="direct:bob~mia")
        await until_recorded(mia, bob, "finished")
        assert (await mia.hear()).text == "Stopped by mia."
    async with asyncio.timeout(20), running(network, make_runner("bob", ask)):
        await carl.reply(question, "five")
        assert (await mia.ask("bob", "hello?")).text == "you said: hello?"
    assert requests == ["go", "hello?"]


async def test_a_persons_late_answer_to_a_question_that_was_stopped_is_a_message_like_any_other(
    network: Network,
) -> None:
    mia, zoe, heard = await Person.join(network, "mia"), await Person.join(network, "zoe"), Heard()

    def ask(request: ModelRequest) -> Any:
        return asker("zoe")(request) if read_prompt(request).incoming_text == "go" else "Thank you nevertheless."

    async with running(network, make_runner("bob", ask, on_event=heard)):
        await mia.client.send_text("bob", "go")
        question = await zoe.hear()
        await until_recorded(mia, await reaction_of(mia, "bob"), "waiting")
        await cancel(mia.client, thread_id="direct:bob~mia")
        await heard.finished()
        await zoe.client.reply(question, "five")  # type: ignore[arg-type]
        assert (await zoe.hear()).text == "Thank you nevertheless."


async def test_somebody_unknown_oneself_and_who_waits_for_this_very_answer_are_not_asked(network: Network) -> None:
    mia = await Person.join(network, "mia")
    ann = make_runner("ann", asker("bob", "cid"))
    cid = make_runner("cid", asker("ann", "bob"))
    async with asyncio.timeout(10), running(network, make_runner("bob", asker("ann", "nobody", "bob")), ann, cid):
        told = (await mia.ask("bob", "go")).text
    assert "nobody was not asked: unknown_recipient" in told
    assert "bob was not asked: that is you." in told
    assert '<answer sender="ann">bob was not asked, because it waits for your answer. Answer it instead.' in told
    assert "ann was not asked, because it waits for your answer" in told


async def test_a_reaction_that_waits_takes_no_place_of_others_and_keeps_its_thread(network: Network) -> None:
    mia, zoe, release = await Person.join(network, "mia"), await Person.join(network, "zoe"), asyncio.Event()

    async def slow(request: ModelRequest) -> Any:
        await release.wait()
        return "three"

    def script(request: ModelRequest) -> Any:
        text = read_prompt(request).incoming_text
        return asker("ann")(request) if text == "go" else f"re: {text}"

    bob = make_runner("bob", script, policy=AgentPolicy(max_parallel_reactions=1))
    async with running(network, bob, make_runner("ann", slow)):
        await mia.client.send_text("bob", "go")
        await mia.client.send_text("bob", "next")
        assert (await zoe.ask("bob", "hi")).text == "re: hi"
        release.set()
        assert [(await mia.hear()).text, (await mia.hear()).text] == ['<answer sender="ann">three</answer>', "re: next"]


@pytest.mark.parametrize("answered", ["while it was away", "after it is back"])
async def test_a_restarted_agent_goes_on_waiting(network: Network, answered: str) -> None:
    mia, ann = await Person.join(network, "mia"), await network.join("ann")
    heard, asked = Heard(), list[int]()

    def script(request: ModelRequest) -> Any:
        asked.append(request.turn)
        return asker("ann")(request)

    first = make_runner("bob", script)
    client = await network.join("bob", role="reactor")
    task = asyncio.create_task(first.run(client))
    await first.ready()
    await mia.client.send_text("bob", "go")
    question = await anext(ann.__aiter__())
    [opened] = [it for it in [await reaction_of(mia, "bob")] if it]
    await until_recorded(mia, opened, "waiting")
    await first.stop()
    await task
    await client.close()
    if answered == "while it was away":
        await ann.reply(question, "three")
    async with running(network, make_runner("bob", script, on_event=heard)):
        if answered != "while it was away":
            await ann.reply(question, "three")
        assert (await mia.hear()).text == '<answer sender="ann">three</answer>'
        [end] = await heard.finished()
    assert asked == [1, 2]
    assert {it.reaction for it in heard.events} == {end.reaction}
    assert [it.text for it in (await ann.history("direct:ann~bob")).messages] == ["how many?", "three"]


async def reaction_of(person: Person, agent_id: str) -> str:
    """Return an agent's reaction to the first message of its thread with a person."""
    thread = f"direct:{agent_id}~{person.client.agent_id}"
    [message, *_] = (await person.client.history(thread)).messages
    while True:
        status = await person.client.call("network.message_status", {"seq": message.seq})
        for it in status["recipients"]:
            if "reaction" in it:
                return str(it["reaction"])


async def test_asking_reads_nothing_of_what_was_said_to_the_asked_agent_before(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    mia, ann = await Person.join(network, "mia"), await network.join("ann")
    assert network.hub is not None
    read: list[str] = []
    thread = network.hub.ledger.thread

    async def noted(stream: str, **options: Any) -> Any:
        read.append(stream)
        return await thread(stream, **options)

    monkeypatch.setattr(network.hub.ledger, "thread", noted)
    async with asyncio.timeout(10), running(network, make_runner("bob", asker("ann"))):
        for number in range(3):
            await mia.client.send_text("bob", f"go {number}")
            question = await anext(ann.__aiter__())
            await ann.reply(question, f"three {number}")
            assert (await mia.hear()).text == f'<answer sender="ann">three {number}</answer>'
    assert "direct:ann~bob" not in read


async def test_a_reply_that_came_before_it_was_expected_ends_the_wait(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a send and the reply to the message may arrive in one read from the socket."""
    mia, ann = await Person.join(network, "mia"), await network.join("ann")
    monkeypatch.setattr(replies, "FIRST_LOOK_S", 3600.0)
    came = asyncio.Event()
    take, expect = replies.Replies.take, replies.Replies.expect

    def take_and_tell(self: replies.Replies, message: BaseMessage) -> bool:
        taken = take(self, message)
        if message.sender_id == "ann":
            came.set()
        return taken

    def expect_late(self: replies.Replies, question: int, *, is_approval: bool = False) -> None:
        if came.is_set():
            expect(self, question, is_approval=is_approval)

    prepared = replies.Waiter.wait

    async def wait_late(self: replies.Waiter, *args: Any, **options: Any) -> Any:
        await ann.reply(await anext(ann.__aiter__()), "three")
        await came.wait()
        return await prepared(self, *args, **options)

    monkeypatch.setattr(replies.Replies, "take", take_and_tell)
    monkeypatch.setattr(replies.Replies, "expect", expect_late)
    monkeypatch.setattr(replies.Waiter, "wait", wait_late)

    def script(request: ModelRequest) -> Any:
        return asker("ann")(request) if read_prompt(request).incoming_text == "go" else finish()

    async with asyncio.timeout(10), running(network, make_runner("bob", script)):
        await mia.client.send_text("bob", "go")
        assert (await mia.hear()).text == '<answer sender="ann">three</answer>'


async def test_a_reply_that_the_hub_holds_back_behind_others_is_found_in_its_thread() -> None:
    async with Network.open(limits=Limits(max_unacked=4)) as network:
        mia, ann = await Person.join(network, "mia"), await network.join("ann")

        def script(request: ModelRequest) -> Any:
            view = read_prompt(request)
            return asker("ann", timeout_s=0.3)(request) if view.incoming_text == "go" else finish()

        async with asyncio.timeout(10), running(network, make_runner("bob", script)):
            await mia.client.send_text("bob", "go")
            question = await anext(ann.__aiter__())
            # These messages wait behind the reaction in the same thread, and fill the hub's window.
            for number in range(6):
                await mia.client.send_text("bob", f"and {number}")
            await ann.reply(question, "three")
            assert (await mia.hear()).text == '<answer sender="ann">three</answer>'


async def test_a_thread_with_a_full_window_holds_up_others_until_it_goes_on() -> None:
    """At most `max_unacked` messages wait in the agent, and the hub holds the rest."""
    async with Network.open(limits=Limits(max_unacked=4)) as network:
        mia, zoe, release = await Person.join(network, "mia"), await Person.join(network, "zoe"), asyncio.Event()
        begun = asyncio.Event()

        async def script(request: ModelRequest) -> str:
            begun.set()
            if read_prompt(request).incoming_sender == "mia":
                await release.wait()
            return f"re: {read_prompt(request).incoming_text}"

        bob = make_runner("bob", script)
        async with asyncio.timeout(10), running(network, bob):
            for number in range(8):
                await mia.client.send_text("bob", f"m{number}")
            await zoe.client.send_text("bob", "hi")
            await begun.wait()
            assert bob._scheduler is not None
            assert len(bob._scheduler.inbox) <= 5  # one message is in work, and its `started` record has acked it
            release.set()
            assert (await zoe.hear()).text == "re: hi"
            assert [(await mia.hear()).text for _ in range(8)] == [f"re: m{number}" for number in range(8)]


# --- handoffs to remote agents


@pytest.mark.parametrize(
    ("returns", "told"), [("to_person", "You get it back."), ("to_caller", "They say: You get it back.")]
)
async def test_a_request_is_handed_over_to_an_agent_elsewhere_and_the_answer_comes_back_by_rule(
    network: Network, returns: Any, told: str
) -> None:
    mia, asked = await Person.join(network, "mia"), list[str]()

    def billing(request: ModelRequest) -> str:
        asked.append(read_prompt(request).incoming_text)
        return "You get it back."

    def desk(request: ModelRequest) -> Any:
        if request.turn == 1:
            return call("hand_over_to_billing", note="she paid twice")
        return f"They say: {read_prompt(request).tool_results[-1].content}"

    runner = make_runner("desk", desk, tools=[remote_handoff("billing", returns=returns)])
    async with running(network, runner, make_runner("billing", billing)):
        answer = await mia.ask("desk", "I paid order 7 twice")
    assert answer.text == told
    assert asked == ["she paid twice\n\nmia wrote: I paid order 7 twice"]


async def test_an_agent_elsewhere_is_a_tool(network: Network) -> None:
    mia, asked = await Person.join(network, "mia"), list[str]()

    def count(request: ModelRequest) -> str:
        asked.append(read_prompt(request).incoming_text)
        return "three"

    def desk(request: ModelRequest) -> Any:
        results = read_prompt(request).tool_results
        return f"It is {results[-1].content}." if results else call("counter", task="count the pears")

    runner = make_runner("desk", desk, tools=[remote_agent_tool("counter")])
    async with running(network, runner, make_runner("counter", count)):
        assert (await mia.ask("desk", "how many?")).text == "It is three."
    assert asked == ["count the pears"]


async def test_a_thread_stays_with_an_agent_elsewhere_until_that_declines(network: Network) -> None:
    mia, asked = await Person.join(network, "mia"), list[str]()

    def billing(request: ModelRequest) -> Any:
        asked.append(read_prompt(request).incoming_text)
        return finish("not mine any more") if "weather" in asked[-1] else f"answer {len(asked)}"

    def desk(request: ModelRequest) -> Any:
        view = read_prompt(request)
        if view.tool_results:
            return view.tool_results[-1].content
        return call("hand_over_to_billing", note="she paid twice") if "paid" in view.incoming_text else "desk here"

    runner = make_runner("desk", desk, tools=[remote_handoff("billing", returns="never")])
    async with running(network, runner, make_runner("billing", billing)):
        said = [(await mia.ask("desk", text)).text for text in ("I paid twice", "and now?", "the weather?", "hello")]
    assert said == [
        "answer 1",
        "answer 2",
        'tool: <declined sender="billing">not mine any more</declined>',
        "desk here",
    ]
    assert asked == ["she paid twice\n\nmia wrote: I paid twice", "mia wrote: and now?", "mia wrote: the weather?"]


async def test_a_handoff_that_is_declined_leaves_the_request_with_the_agent(network: Network) -> None:
    mia = await Person.join(network, "mia")

    def desk(request: ModelRequest) -> Any:
        if request.turn == 1:
            return call("hand_over_to_billing", note="")
        return read_prompt(request).tool_results[-1].content

    runner = make_runner("desk", desk, tools=[remote_handoff("billing")])
    async with running(network, runner, make_runner("billing", lambda request: finish("closed today"))):
        assert (await mia.ask("desk", "hi")).text == 'tool: <declined sender="billing">closed today</declined>'


async def test_an_answer_to_a_question_whose_tool_is_gone_after_a_restart_is_a_message_like_any_other(
    network: Network,
) -> None:
    mia, ann = await Person.join(network, "mia"), await network.join("ann")

    def bob(request: ModelRequest) -> Any:
        view = read_prompt(request)
        if view.incoming_text != "go":
            return f"ann said {view.incoming_text}"
        return "I do not know." if view.tool_results else call("ann", task="how many?")

    first = make_runner("bob", bob, tools=[remote_agent_tool("ann")])
    client = BusyClient(await network.join("bob", role="reactor"), "waiting", cut_at=1)
    task = asyncio.create_task(first.run(client))  # type: ignore[arg-type]
    await first.ready()
    await mia.client.send_text("bob", "go")
    with pytest.raises(ConnectError, match="cut"):
        await task
    heard = Heard()
    async with running(network, make_runner("bob", bob, policy=AgentPolicy(on_text="reply"), on_event=heard)):
        assert (await mia.hear()).text == "I do not know."
        messages = aiter(ann)
        await ann.reply(await anext(messages), "three")
        assert (await anext(messages)).text == "ann said three"


# --- kills during a question


@pytest.mark.parametrize("cut_at", ["tool_started", "asking", "waiting", "tool_result", "model_reply", "finished"])
async def test_killed_anywhere_it_asks_each_agent_once_and_answers_once(network: Network, cut_at: str) -> None:
    mia, ann = await Person.join(network, "mia"), await network.join("ann")
    script = asker("ann")
    first = make_runner("bob", script)
    nth = 2 if cut_at == "model_reply" else 1
    client = BusyClient(await network.join("bob", role="reactor"), cut_at, cut_at=nth)
    task = asyncio.create_task(first.run(client))  # type: ignore[arg-type]
    await first.ready()
    await mia.client.send_text("bob", "go")
    if cut_at not in ("tool_started", "asking", "waiting"):
        await ann.reply(await anext(ann.__aiter__()), "three")
    with pytest.raises(ConnectError, match="cut"):
        await task
    heard = Heard()
    async with running(network, make_runner("bob", script, on_event=heard)):
        if cut_at in ("tool_started", "asking", "waiting"):
            await ann.reply(await anext(ann.__aiter__()), "three")
        [end] = await heard.finished()
        await until_recorded(mia, end.reaction, "finished")
    assert [it.text for it in (await ann.history("direct:ann~bob")).messages] == ["how many?", "three"]
    assert await mia.history("direct:bob~mia") == [("mia", "go"), ("bob", '<answer sender="ann">three</answer>')]
