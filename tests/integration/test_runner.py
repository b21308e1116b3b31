"""Tests of agents on a real hub: the messages that wake them, the places of their answers, and resumes, stops and
returned messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.events import ModelOutput, Resumed
from roundelay.agents.features.evaluations import Evaluations, Rule
from roundelay.agents.journal import open_journal
from roundelay.agents.models.model import ModelDelta, ModelReply, ModelRequest, ModelUse, OnDelta, Usage
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Script, broadcast, call, finish, say, send
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.reaction_ids import derived_id, reaction_id
from roundelay.agents.recorded import Started
from roundelay.agents.runner import AgentRunner
from roundelay.agents.running_reaction import ReactionResult
from roundelay.agents.simple import SimpleAgentRunner, SimpleOpenAIAgentRunner
from roundelay.agents.tools import Tool, ToolContext, tool
from roundelay.agents.values import StopTrace, ToolError
from roundelay.app import Network, serve
from roundelay.network.client import Batched, NetworkClient, Presence, Signal
from roundelay.network.config import Limits, NodeConfig
from roundelay.network.errors import ConnectError, Superseded
from roundelay.network.frames import RecordFrame, SendFrame
from roundelay.network.messages import BaseMessage, MessageThread
from tests.support import fake_openai as fake
from tests.support.agents import Heard, Person, cancel, make_runner, running, until_open, until_recorded, until_state
from tests.support.fake_openai import FakeOpenAI, Reply


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


# --- places of answers


async def test_a_person_is_answered_in_the_direct_thread(network: Network) -> None:
    mia = await Person.join(network, "mia")
    async with running(network, make_runner("bob", lambda request: f"You said: {read_prompt(request).incoming_text}")):
        asked = await mia.client.send_text("bob", "hello <you>")
        answer = await mia.hear()
    assert (answer.sender_id, answer.text, answer.thread_id) == ("bob", "You said: hello <you>", "direct:bob~mia")
    assert (answer.reply_to, answer.cause, answer.root, answer.hops) == (asked.seq, asked.seq, asked.seq, 1)


async def test_a_persons_broadcast_is_answered_in_its_reply_thread(network: Network) -> None:
    mia = await Person.join(network, "mia")
    async with running(
        network, make_runner("bob", lambda request: "here"), make_runner("ann", lambda request: "here too")
    ):
        asked = await mia.client.broadcast("who is there?")
        answers = [await mia.hear(), await mia.hear()]
    assert {(it.sender_id, it.text, it.thread_id) for it in answers} == {
        ("bob", "here", f"thread:{asked.seq}"), ("ann", "here too", f"thread:{asked.seq}"),
    }  # fmt: skip


async def test_an_agent_joins_its_channels_and_answers_a_person_there(network: Network) -> None:
    mia = await Person.join(network, "mia")
    await mia.client.call("channels.create", {"name": "dev"})
    async with running(network, make_runner("bob", lambda request: "on it", channels=["dev", "ops"])):
        asked = await mia.client.post("dev", "the build is red")
        answer = await mia.hear()
        assert (answer.to, answer.thread_id, answer.text) == ("channel:dev", f"thread:{asked.seq}", "on it")
        assert (await mia.client.call("channels.members", {"name": "ops"}))["members"] == ["bob"]


async def test_text_to_an_agent_that_asked_nothing_is_recorded_and_not_sent(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    async with running(network, make_runner("bob", lambda request: "thanks!", on_event=heard)):
        ann = await network.join("ann")
        await ann.send_text("bob", "fyi")
        [end] = await heard.finished()
        await ann.send("agent:bob", "and?", requires_response=["bob"])
        answer = await anext(ann.__aiter__())
    assert end.answer is None
    assert answer.text == "thanks!"
    kinds = {it["kind"]: it["body"] for it in await mia.records(end.reaction)}
    assert kinds["model_reply"]["reply"]["text"] == "thanks!"
    assert kinds["finished"]["status"] == "finished"


# --- messages that wake an agent


async def test_in_a_channel_agents_wake_each_other_by_mention_only_and_the_rest_is_handled_context(
    network: Network,
) -> None:
    mia, prompts = await Person.join(network, "mia"), []

    def script(request: ModelRequest) -> Any:
        prompts.append(read_prompt(request))
        return call("channels_post", name="dev", text="seen") if request.turn == 1 else finish()

    heard = Heard()
    async with running(network, make_runner("bob", script, channels=["dev"], on_event=heard)):
        ann = await network.join("ann")
        await ann.call("channels.join", {"name": "dev"})
        quiet = await ann.post("dev", "just thinking aloud")
        await until_state(mia.client, quiet.seq, "bob", "handled")
        loud = await ann.post("dev", "@bob what do you think?", cause=quiet.seq)
        await heard.finished()
        posted = (await ann.history("channel:dev")).messages[-1]
        assert (posted.sender_id, posted.text, posted.cause, posted.root) == ("bob", "seen", loud.seq, quiet.seq)
        assert [it.incoming_text for it in prompts if it.turn == 1] == ["@bob what do you think?"]
        assert [it.text for it in prompts[0].find_thread("channel:dev").messages] == ["just thinking aloud"]


async def test_agents_work_together_and_every_message_has_its_cause(network: Network) -> None:
    mia = await Person.join(network, "mia")

    def lead(request: ModelRequest) -> Any:
        view = read_prompt(request)
        if request.turn > 1:
            return finish()
        if view.incoming_sender == "mia":
            return [send("clerk", f"add up: {view.incoming_text}"), broadcast("I am on it")]
        return send("mia", view.incoming_text)

    def clerk(request: ModelRequest) -> Any:
        numbers = [int(it) for it in read_prompt(request).incoming_text.split() if it.isdigit()]
        return send("lead", f"it is {sum(numbers)}") if request.turn == 1 else finish()

    async with running(network, make_runner("lead", lead), make_runner("clerk", clerk)):
        asked = await mia.client.send_text("lead", "2 3 5")
        heard = [await mia.hear(), await mia.hear()]
    assert {it.text for it in heard} == {"I am on it", "it is 10"}
    assert {it.root for it in heard} == {asked.seq}
    assert {it.text: it.hops for it in heard} == {"I am on it": 1, "it is 10": 3}


# --- prompts


async def test_the_prompt_holds_what_the_agent_may_see_and_nothing_of_others(network: Network) -> None:
    mia, zoe = await Person.join(network, "mia"), await Person.join(network, "zoe")
    views = []

    def script(request: ModelRequest) -> str:
        view = read_prompt(request)
        views.append(view)
        return f"noted {view.incoming_text}"

    async with running(network, make_runner("bob", script)):
        await mia.ask("bob", "mia's secret")
        await zoe.ask("bob", "zoe's secret")
        await mia.ask("bob", "again")
    assert [it.incoming_text for it in views] == ["mia's secret", "zoe's secret", "again"]
    shown = [[(m.sender, m.text) for thread in it.threads for m in thread.messages] for it in views]
    assert shown == [[], [], [("mia", "mia's secret"), ("bob", "noted mia's secret")]]


async def test_visibility_all_shows_an_agent_everything_it_holds(network: Network) -> None:
    async with Network.open(visibility="all") as open_network:
        mia, zoe = await Person.join(open_network, "mia"), await Person.join(open_network, "zoe")
        views = []

        def script(request: ModelRequest) -> str:
            views.append(read_prompt(request))
            return "ok"

        async with running(open_network, make_runner("bob", script, visibility="all")):
            await mia.ask("bob", "one")
            await zoe.ask("bob", "two")
        assert [thread.thread_id for thread in views[1].threads] == ["direct:bob~mia"]


# --- order and parallelism


async def test_a_thread_is_answered_in_order_while_other_threads_go_on(network: Network) -> None:
    mia, zoe = await Person.join(network, "mia"), await Person.join(network, "zoe")
    release = asyncio.Event()

    async def script(request: ModelRequest) -> str:
        text = read_prompt(request).incoming_text
        if text == "slow":
            await release.wait()
        return f"re: {text}"

    async with running(network, make_runner("bob", script)):
        await mia.client.send_text("bob", "slow")
        await mia.client.send_text("bob", "next")
        assert (await zoe.ask("bob", "quick")).text == "re: quick"
        release.set()
        assert [(await mia.hear()).text, (await mia.hear()).text] == ["re: slow", "re: next"]


async def test_parallel_reactions_are_bounded(network: Network) -> None:
    people = [await Person.join(network, f"p{number}") for number in range(4)]
    at_work, peak, both = 0, 0, asyncio.Barrier(2)

    async def script(request: ModelRequest) -> str:
        nonlocal at_work, peak
        at_work += 1
        peak = max(peak, at_work)
        await both.wait()
        at_work -= 1
        return "ok"

    async with running(network, make_runner("bob", script, policy=AgentPolicy(max_parallel_reactions=2))):
        for person in people:
            await person.client.send_text("bob", "hi")
        for person in people:
            await person.hear()
    assert peak == 2


async def test_who_watches_sees_the_agent_think_and_use_its_tools(network: Network) -> None:
    mia = await Person.join(network, "mia")
    await mia.client.call("network.watch", {"signals": True})
    tools = [tool(name="look")(look)]
    async with running(
        network, make_runner("bob", lambda request: call("look") if request.turn == 1 else "done", tools=tools)
    ):
        await mia.ask("bob", "hi")
        seen = []
        async for event in mia.client.events():
            if isinstance(event, Signal):
                seen.append((event.sender_id, event.thread_id, event.kind, event.body["active"]))
                if len(seen) == 4:
                    break
    assert seen == [("bob", "direct:bob~mia", kind, active) for kind, active in [
        ("thinking", True), ("tool", True), ("tool", False), ("thinking", False),
    ]]  # fmt: skip


def look() -> str:
    """Look around."""
    return "nothing"


# --- errors that the model reads


async def test_an_unknown_recipient_is_told_to_the_model(network: Network) -> None:
    mia = await Person.join(network, "mia")

    def script(request: ModelRequest) -> Any:
        results = read_prompt(request).tool_results
        return results[-1].content if results else send("nobody", "hi")

    async with running(network, make_runner("bob", script)):
        assert (await mia.ask("bob", "say hi to nobody")).text.startswith("unknown_recipient: ")


async def test_polite_agents_stop_at_the_networks_budget() -> None:
    async with Network.open(limits=Limits(max_hops=6)) as network:
        mia, heard = await Person.join(network, "mia"), Heard()

        def polite(request: ModelRequest) -> Any:
            if request.turn > 1:
                return finish(read_prompt(request).tool_results[-1].content)
            return send("ann" if request.agent_id == "bob" else "bob", "no, thank YOU")

        async with running(
            network, make_runner("ann", polite, on_event=heard), make_runner("bob", polite, on_event=heard)
        ):
            await mia.client.send_text("ann", "say thanks to bob")
            ends = await heard.finished(7)
        assert [it.status for it in ends] == ["finished"] * 7
        assert [it.reason.partition(":")[0] for it in ends if it.reason.startswith("loop_stopped")] == ["loop_stopped"]
        assert len(await mia.history("direct:ann~bob")) == 6


async def test_an_answer_beyond_the_budget_ends_as_stopped_and_says_why() -> None:
    async with Network.open(limits=Limits(max_root_messages=1)) as network:
        mia, heard = await Person.join(network, "mia"), Heard()
        async with running(network, make_runner("bob", lambda request: "hello", on_event=heard)):
            await mia.client.send_text("bob", "hi")
            [end] = await heard.finished()
            await until_recorded(mia, end.reaction, "finished")
        [body] = [it["body"] for it in await mia.records(end.reaction) if it["kind"] == "finished"]
        assert body["status"] == "stopped"
        assert "loop_stopped" in body["reason"]
        assert await mia.history("direct:bob~mia") == [("mia", "hi")]


# --- faults


class Faulty:
    """A model that raises an unexpected error once."""

    name = "faulty"

    def __init__(self) -> None:
        self.calls = 0

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        self.calls += 1
        if self.calls == 1:
            raise ZeroDivisionError("oops")
        return ModelReply("better now")


async def test_a_fault_in_a_reaction_ends_it_visibly_and_the_agent_goes_on(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    mia = await Person.join(network, "mia")
    runner = SimpleAgentRunner("bob", instruction="x", model=Faulty())
    async with running(network, runner):
        asked = await mia.client.send_text("bob", "hi")
        assert (await mia.hear()).text == "I could not answer: my model failed."
        assert (await mia.ask("bob", "hi again")).text == "better now"
        chain = (await mia.client.call("network.message_status", {"seq": asked.seq}))["recipients"]
        [records] = [await mia.records(it["reaction"]) for it in chain]
    assert records[-1]["body"]["status"] == "failed"
    assert records[-1]["body"]["reason"] == "ZeroDivisionError: oops"
    assert [it.exc_info is not None for it in caplog.records if it.getMessage() == "model failed"] == [True]


class Moody(AgentRunner):
    """An agent without a model and a journal, which fails on its first attempt."""

    def __init__(self, agent_id: str) -> None:
        super().__init__(agent_id)
        self.tries: list[str] = []

    async def react(
        self, message_threads: dict[str, MessageThread], incoming_thread_id: str, incoming_message: BaseMessage
    ) -> ReactionResult:
        self.tries.append(incoming_message.text)
        if len(self.tries) == 1:
            raise RuntimeError("not in the mood")
        ongoing = self.find_under_way(incoming_message)
        await self.client.reply(ongoing.message, f"re: {incoming_message.text}")
        return ReactionResult(ongoing.journal.reaction, "finished", "", None, 0, None)  # type: ignore[arg-type]


async def test_a_reaction_that_did_not_begin_is_handed_back_and_tried_again(network: Network) -> None:
    mia, moody = await Person.join(network, "mia"), Moody("bob")
    async with running(network, moody):
        asked = await mia.client.send_text("bob", "one")
        answer = await mia.hear()
        assert (answer.text, moody.tries) == ("re: one", ["one", "one"])
        await until_state(mia.client, asked.seq, "bob", "handled")


async def test_a_name_that_two_tools_have_is_refused_at_once() -> None:
    with pytest.raises(ToolError, match="finish"):
        make_runner("bob", lambda request: "x", tools=[tool(name="finish")(look)])


async def test_a_missing_key_is_refused_at_once() -> None:
    with pytest.raises(Exception, match="OPENAI_API_KEY"):
        SimpleOpenAIAgentRunner("bob", instruction="x", model_name="gpt")


# --- stops and supersession


async def test_a_person_stops_a_reaction_and_the_thread_goes_on(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    thinking, ended = asyncio.Event(), asyncio.Event()

    async def script(request: ModelRequest) -> str:
        if read_prompt(request).incoming_text == "go on for ever":
            thinking.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return "hello"

    async with running(network, make_runner("bob", script, on_event=heard)):
        await mia.client.send_text("bob", "go on for ever")
        await thinking.wait()
        stopped = await cancel(mia.client, thread_id="direct:bob~mia")
        [end] = await heard.finished()
        assert (end.status, end.reason, end.answer) == ("cancelled", "stopped by mia", None)
        assert stopped == [end.reaction]
        assert ended.is_set()
        assert (await mia.hear()).text == "Stopped by mia."
        assert (await mia.ask("bob", "hi")).text == "hello"
        assert (await mia.records(end.reaction))[-1]["body"]["status"] == "cancelled"


@pytest.mark.parametrize("has_usage", [False, True], ids=["estimated", "reported"])
async def test_a_stop_keeps_what_was_streamed_says_by_whom_and_counts_it(network: Network, has_usage: bool) -> None:
    mia, heard, ends = await Person.join(network, "mia"), Heard(), asyncio.Event()
    streamed = 'Take these:\n```py\nprint("one")'
    usage = {"prompt_tokens": 700, "completion_tokens": 12, "total_tokens": 712}

    def script(body: Mapping[str, Any]) -> Reply:
        return fake.text(streamed, ends=ends, chunk_usage=usage if has_usage else None)

    async with FakeOpenAI(script) as provider:
        runner = SimpleOpenAIAgentRunner(
            "bob", instruction="x" * 3500, model_name="gpt-4o", base_url=provider.base_url, on_event=heard
        )
        async with running(network, runner):
            await mia.client.call("network.watch", {"signals": True})
            asked = await mia.client.send_text("bob", "write me something")
            await heard.until(lambda: "".join(it.text for it in heard.of(ModelOutput)).endswith('"one")'))
            await cancel(mia.client, thread_id="direct:bob~mia")
            said = await mia.hear()
            [end] = await heard.finished()
            assert (await mia.client.history("direct:bob~mia")).messages[-1].seq == said.seq
    assert said.text == f"{streamed}\n```\n\nStopped by mia."  # the code block is closed
    assert (said.metadata, said.reply_to) == ({"stopped": {"by": "mia"}}, asked.seq)
    assert (end.status, end.reason, end.answer) == ("cancelled", "stopped by mia", None)
    records = {it["kind"]: it["body"] for it in await mia.records(end.reaction)}
    [used] = records["finished"]["used"]
    assert (used["model"], records["stopped"]["text"]) == ("gpt-4o", streamed)
    counted = (used["usage"]["prompt_tokens"], used["usage"]["completion_tokens"])
    assert counted == (700, 12) if has_usage else counted[0] > 1000 and 5 < counted[1] < 20
    spent = await mia.client.call("network.spent", {"seq": asked.seq})
    assert spent["of_root"]["gpt-4o"]["prompt_tokens"] == counted[0]


async def test_a_stop_in_a_tool_leaves_a_trace_too(network: Network) -> None:
    mia, begun = await Person.join(network, "mia"), asyncio.Event()

    @tool
    async def dig() -> str:
        """Dig."""
        begun.set()
        return await asyncio.get_running_loop().create_future()

    async with running(network, make_runner("bob", lambda request: call("dig"), tools=[dig])):
        await mia.client.send_text("bob", "dig")
        await begun.wait()
        await cancel(mia.client, thread_id="direct:bob~mia")
        assert (await mia.hear()).text == "Stopped by mia."


async def test_what_is_not_shown_before_its_review_is_not_shown_by_a_stop(network: Network) -> None:
    mia, written = await Person.join(network, "mia"), asyncio.Event()

    class Slow:
        name = "slow"

        async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
            assert on_delta is not None
            on_delta(ModelDelta("the secret"))
            written.set()
            return await asyncio.get_running_loop().create_future()

    withheld = Evaluations([Rule("polite", "please", "Be polite.")], blocking=["polite"])
    runner = SimpleAgentRunner("bob", instruction="x", model=Slow(), middleware=[withheld])
    async with running(network, runner):
        await mia.client.send_text("bob", "go")
        await written.wait()
        await cancel(mia.client, thread_id="direct:bob~mia")
        assert (await mia.hear()).text == "Stopped by mia."


async def test_a_stop_that_was_recorded_before_a_crash_is_told_once_afterwards(network: Network) -> None:
    """The kill comes between the record and the message, or between the message and the end."""
    mia = await Person.join(network, "mia")
    for said_before in (False, True):
        bob = await network.join("bob", role="reactor")
        asked = await mia.client.send_text("bob", "go on")
        reaction = reaction_id("bob", asked.seq, network.hub.epoch)
        journal = open_journal(bob, reaction)
        await journal.record_started(
            Started(trigger=asked.seq, thread_id=asked.thread_id or "", as_of=asked.seq, manifest=[], config_hash="")
        )
        use = ModelUse("gpt-4o", Usage(10, 2))
        await journal.record_stopped(StopTrace("mia", 1, "Once upon a", (use,)))
        if said_before:
            message = (await bob.history("direct:bob~mia")).messages[-1]
            text = "Once upon a\n\nStopped by mia."
            await bob.reply(message, text, message_id=derived_id(reaction, "", 0, "answer"))
            assert (await mia.hear()).text == text
        await bob.close()
        heard = Heard()
        async with running(network, make_runner("bob", lambda request: "asked again", on_event=heard)):
            [end] = await heard.finished()
            assert (end.status, end.usage) == ("cancelled", Usage(10, 2))
            if not said_before:
                assert (await mia.hear()).text == "Once upon a\n\nStopped by mia."
            await until_recorded(mia, reaction, "finished")
        said = [it.text for it in (await mia.client.history("direct:bob~mia")).messages if it.sender_id == "bob"]
        assert said == ["Once upon a\n\nStopped by mia."] * (1 + said_before)


async def test_a_newer_runner_takes_over_and_the_older_one_says_so(network: Network) -> None:
    mia = await Person.join(network, "mia")
    old, new = make_runner("bob", lambda request: "old"), make_runner("bob", lambda request: "new")
    task = asyncio.create_task(old.run(await network.join("bob", role="reactor")))
    assert (await mia.ask("bob", "hi")).text == "old"
    async with running(network, new):
        with pytest.raises(Superseded, match="Another runner of agent bob has taken over"):
            await task
        assert (await mia.ask("bob", "hi")).text == "new"


async def test_stop_before_run_ends_it_at_once_and_a_runner_runs_again(network: Network) -> None:
    mia, runner = await Person.join(network, "mia"), make_runner("bob", lambda request: "hi")
    await runner.stop()
    await runner.run(await network.join("bob", role="reactor"))
    async with running(network, runner):
        assert (await mia.ask("bob", "hi")).text == "hi"
        with pytest.raises(RuntimeError, match="is already running"):
            await runner.run()


# --- resuming


class World:
    """Effects of an agent's tools, outside of its process."""

    def __init__(self) -> None:
        self.noted: set[str] = set()
        self.paid = 0

    def tools(self) -> list[Tool]:
        @tool(idempotent=True)
        async def note(context: ToolContext, text: str) -> str:
            """Keep a note, once for each call id."""
            self.noted.add(context.call_id)
            return f"noted {text}"

        @tool(once=True)
        async def pay() -> str:
            """Pay."""
            self.paid += 1
            return "paid"

        return [note, pay]


def shopper(asked: list[int]) -> Script:
    def script(request: ModelRequest) -> Any:
        asked.append(request.turn)
        match request.turn:
            case 1:
                return [call("note", text="a"), call("pay"), send("ann", "I pay"), broadcast("paying"), call("nope")]
            case 2:
                return [say("One moment."), call("channels_post", name="dev", text="paid")]
            case _:
                return "done"

    return script


class CutClient:
    """A client that loses the hub for good at its n-th record, before or after the hub has stored it, like a killed
    process.
    """

    def __init__(self, client: NetworkClient, cut_at: int, *, after: bool) -> None:
        self._client = client
        self._cut_at = cut_at
        self._after = after
        self.failure: ConnectError | None = None
        self.records = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def record(self, reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str) -> Any:
        self.records += 1
        if self.records == self._cut_at and self._after:
            await self._client.record(reaction, kind, body, record_id=record_id)
        if self.records >= self._cut_at:
            self.failure = ConnectError("cut")
            raise self.failure
        return await self._client.record(reaction, kind, body, record_id=record_id)

    async def store_batch(self, frames: Sequence[SendFrame | RecordFrame]) -> Batched:
        for index, frame in enumerate(frames):
            self.records += isinstance(frame, RecordFrame)
            if self.records >= self._cut_at:
                kept = frames[: index + 1] if self.records == self._cut_at and self._after else frames[:index]
                if self.failure is None and kept:
                    await self._client.store_batch(kept)
                self.failure = ConnectError("cut")
                raise self.failure
        return await self._client.store_batch(frames)


Cut = tuple[int, bool]
"""Number of the record at which the hub is lost, and whether the hub has stored it."""


class Errand:
    """Bob's errand for mia, with every kind of message, both kinds of tools, and three turns."""

    def __init__(self) -> None:
        self.world = World()
        self.asked: list[int] = []
        self.heard: list[tuple[str, str]] = []
        self.records = 0

    async def begin(self, network: Network) -> None:
        mia, ann = await Person.join(network, "mia"), await network.join("ann")
        await network.join("bob")
        await ann.call("channels.create", {"name": "dev"})
        await mia.client.send_text("bob", "go shopping")

    def make_runner(self) -> SimpleAgentRunner:
        return make_runner("bob", shopper(self.asked), tools=self.world.tools(), channels=["dev"])

    async def be_cut(self, network: Network, cut: Cut) -> None:
        client = CutClient(await network.join("bob", role="reactor"), cut[0], after=cut[1])
        with pytest.raises(ConnectError, match="cut"):
            await self.make_runner().run(client)  # type: ignore[arg-type]

    async def end(self, network: Network) -> None:
        mia, ann = await Person.join(network, "mia"), await network.join("ann")
        client = CutClient(await network.join("bob", role="reactor"), 1_000_000, after=False)
        runner = self.make_runner()
        task = asyncio.create_task(runner.run(client))  # type: ignore[arg-type]
        trigger = (await mia.client.history("direct:bob~mia")).messages[0].seq
        await until_recorded(mia, reaction_id("bob", trigger, client.welcome.network.epoch), "finished")
        await runner.stop()
        await task
        for reader, thread_id in (
            (ann, "direct:ann~bob"),
            (ann, "broadcast"),
            (ann, "channel:dev"),
            (mia.client, "direct:bob~mia"),
        ):
            self.heard += [(it.thread_id, it.text) for it in (await reader.history(thread_id)).messages]
        self.records = client.records


EXPECTED = [
    ("direct:ann~bob", "I pay"), ("broadcast", "paying"), ("channel:dev", "paid"),
    ("direct:bob~mia", "go shopping"), ("direct:bob~mia", "done"),
]  # fmt: skip
RECORDS = 16  # started, 3 replies, 5 starts, 6 results, finished


async def test_an_errand_without_a_cut() -> None:
    async with Network.open() as network:
        errand = Errand()
        await errand.begin(network)
        await errand.end(network)
    assert errand.heard == EXPECTED
    assert (errand.world.paid, len(errand.world.noted), errand.asked, errand.records) == (1, 1, [1, 2, 3], RECORDS)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("cut_at", range(1, RECORDS + 1))
async def test_cut_off_at_any_record_an_agent_ends_with_the_same_messages(cut_at: int, after: bool) -> None:
    async with Network.open() as network:
        errand = Errand()
        await errand.begin(network)
        await errand.be_cut(network, (cut_at, after))
        await errand.end(network)
    assert errand.heard == EXPECTED
    assert errand.world.paid <= 1
    assert len(errand.world.noted) == 1
    assert len(errand.asked) <= 4, "more than the model call in flight was asked again"


@pytest.mark.parametrize("cut_at", [1, 2, 3, 5, 9, 12, RECORDS])
async def test_a_journal_of_single_records_goes_on_with_merged_ones(tmp_path: Path, cut_at: int) -> None:
    """An earlier version wrote the journal with each record in a separate commit."""
    errand, path = Errand(), tmp_path / "errand.db"
    async with Network.open(path, limits=Limits(max_batch=1)) as network:
        await errand.begin(network)
        await errand.be_cut(network, (cut_at, True))
    async with Network.open(path) as network:
        await errand.end(network)
    assert errand.heard == EXPECTED
    assert errand.world.paid <= 1
    assert len(errand.asked) <= 4


async def test_cut_off_again_and_again_while_the_hub_restarts_too_it_still_ends_so(tmp_path: Path) -> None:
    errand, path = Errand(), tmp_path / "errand.db"
    async with Network.open(path) as network:
        await errand.begin(network)
    for cut in [(2, False), (2, True), (3, False), (2, True), (3, True)]:
        async with Network.open(path) as network:
            await errand.be_cut(network, cut)
    async with Network.open(path) as network:
        await errand.end(network)
    assert errand.heard == EXPECTED
    assert errand.world.paid <= 1


async def test_a_stopped_runner_leaves_its_reaction_open_and_the_next_one_goes_on(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    begun, asked = asyncio.Event(), list[int]()

    @tool(once=True)
    async def pay() -> str:
        """Pay."""
        begun.set()
        await asyncio.Event().wait()
        return "paid"

    def script(request: ModelRequest) -> Any:
        asked.append(request.turn)
        return call("pay") if request.turn == 1 else read_prompt(request).tool_results[-1].content

    first = make_runner("bob", script, tools=[pay])
    task = asyncio.create_task(first.run(await network.join("bob", role="reactor")))
    await mia.client.send_text("bob", "pay")
    await begun.wait()
    await first.stop()
    await task
    async with running(network, make_runner("bob", script, tools=[pay], on_event=heard)):
        assert "Whether it took effect is unknown" in (await mia.hear()).text
    assert asked == [1, 2]
    assert isinstance(heard.events[0], Resumed)
    assert not heard.events[0].config_changed


async def test_a_reaction_stopped_by_a_person_while_its_agent_was_away_is_not_taken_up(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    begun, asked = asyncio.Event(), list[int]()

    async def script(request: ModelRequest) -> str:
        asked.append(request.turn)
        begun.set()
        await asyncio.Event().wait()
        return "never"

    first = make_runner("bob", script)
    client = await network.join("bob", role="reactor")
    task = asyncio.create_task(first.run(client))
    await mia.client.send_text("bob", "go on for ever")
    await begun.wait()
    await until_open(mia.client, "bob")
    await first.stop()
    await task
    await client.close()
    await cancel(mia.client, thread_id="direct:bob~mia")
    async with running(network, make_runner("bob", script, on_event=heard)):
        [end] = await heard.finished()
    assert (end.status, end.reason) == ("cancelled", "stopped by a person")
    assert asked == [1]


# --- over sockets


async def test_over_websockets_with_a_token_of_its_own(tmp_path: Path) -> None:
    config = NodeConfig(port=0, db=tmp_path / "node.db")
    async with serve(config) as node:
        runner = make_runner("bob", lambda request: "over the wire", url=node.url)
        task = asyncio.create_task(runner.run())
        async with NetworkClient("mia", node.url, kind="human", token=node.owner_token) as client:
            mia = Person(client)
            await runner.ready()
            assert (await mia.ask("bob", "hi")).text == "over the wire"
            agents = (await client.call("network.list_agents", {"kind": "agent"}))["agents"]
            assert agents[0]["card"]["visibility"] == "people"
        await runner.stop()
        await task


@pytest.mark.parametrize("durability", ["full", "memory"])
async def test_an_agent_outlives_its_hub_with_the_same_ledger_or_another(tmp_path: Path, durability: str) -> None:
    config = NodeConfig.model_validate({"port": 0, "db": tmp_path / "node.db", "durability": durability})
    heard = Heard()
    runner = make_runner(
        "bob", lambda request: f"re: {read_prompt(request).incoming_text}", channels=["dev"], on_event=heard
    )
    async with serve(config) as node:
        config = config.model_copy(update={"port": node.port})
        task = asyncio.create_task(runner.run(client := await connect(node.url)))
        await runner.ready()
        async with NetworkClient("mia", node.url, kind="human", token=node.owner_token) as mia:
            await mia.send_text("bob", "one")
            await heard.finished()
    async with serve(config) as node, NetworkClient("zoe", node.url, kind="human", token=node.owner_token) as zoe:
        await zoe.call("network.watch", {"presence": True})
        if "bob" not in await list_online(zoe):
            await until_online(zoe, "bob")
        assert (await Person(zoe).ask("bob", "two")).text == "re: two"
        assert (await zoe.call("channels.members", {"name": "dev"}))["members"] == ["bob"]
        await runner.stop()
        await task
        await client.close()
    assert len(await heard.finished()) == 2


async def connect(url: str) -> NetworkClient:
    client = NetworkClient("bob", url, role="reactor")
    await client.connect()
    return client


async def list_online(client: NetworkClient) -> set[str]:
    return {it["agent_id"] for it in (await client.call("network.list_agents", {"online": True}))["agents"]}


async def until_online(client: NetworkClient, agent_id: str) -> None:
    async for event in client.events():
        if isinstance(event, Presence) and (event.agent_id, event.state) == (agent_id, "online"):
            return


async def test_a_hub_that_cannot_be_reached_is_said() -> None:
    with pytest.raises(ConnectError):
        await make_runner("bob", lambda request: "x", url="ws://127.0.0.1:1/").run()
