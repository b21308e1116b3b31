"""Regression tests of agents: tools that raise exits, acks of redelivered messages, small frames, and a busy hub."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.events import event_to_json
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelDelta, ModelReply, ModelRequest, OnDelta, Usage
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Script, ScriptedModel, call, finish, say
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.reaction_ids import digest, reaction_id
from roundelay.agents.runner import AgentRunner
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network, serve
from roundelay.network.client import AnyMessage, Delivery, NetworkClient, Signal
from roundelay.network.client.acks import Acks
from roundelay.network.config import Limits, NodeConfig
from roundelay.network.errors import IdConflict, InternalError, Overloaded
from tests.support.agents import Heard, Person, cancel, running


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


def make_runner(agent_id: str, script: Script, **options: Any) -> SimpleAgentRunner:
    return SimpleAgentRunner(agent_id, instruction="You are under test.", model=ScriptedModel(script), **options)


async def ask(runner: AgentRunner, client: NetworkClient, mia: NetworkClient, text: str) -> str:
    """Run an agent until it has answered one question, and return the answer."""
    task = asyncio.create_task(runner.run(client))
    await runner.ready()
    await mia.send_text(runner.agent_id, text)
    answer = await anext(mia.__aiter__())
    await runner.stop()
    await task
    return answer.text


def test_a_runner_runs_again_in_another_event_loop() -> None:
    runner = make_runner("bob", lambda it: call("look") if it.turn == 1 else "Here.", tools=[look])

    async def ask_once() -> str:
        async with asyncio.timeout(20), Network.open() as network:
            client, mia = await network.join("bob", role="reactor"), await network.join("mia", kind="human")
            return await ask(runner, client, mia, "Are you there?")

    assert [asyncio.run(ask_once()), asyncio.run(ask_once())] == ["Here.", "Here."]


@tool(idempotent=True)
async def look() -> str:
    """Look around."""
    return "nothing"


async def test_an_agent_that_a_channel_keeps_out_works_without_it(network: Network) -> None:
    mia = await network.join("mia", kind="human")
    await mia.call("channels.create", {"name": "dev", "access": "closed"})
    await mia.call("channels.create", {"name": "club", "access": "invite"})
    bob = make_runner("bob", lambda it: "Here.", channels=["dev", "club", "ops"])
    assert await ask(bob, await network.join("bob", role="reactor"), mia, "Are you there?") == "Here."
    assert (await mia.call("channels.members", {"name": "ops"}))["members"] == ["bob"]


# --- tools that raise exits


@tool(idempotent=True)
def leave() -> str:
    """Leave, as a command's main function does."""
    sys.exit("bad usage")


@tool(idempotent=True)
async def leave_too() -> str:
    """Raise `SystemExit` in the thread of the event loop."""
    sys.exit("bad usage")


@tool(idempotent=True)
def interrupt() -> str:
    """Raise `KeyboardInterrupt`, as if a person had pressed Ctrl-C."""
    raise KeyboardInterrupt("enough")


@tool(idempotent=True)
async def await_cancelled() -> str:
    """Await a future that is already cancelled."""
    given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    given_up.cancel()
    return await given_up


@pytest.mark.parametrize(
    ("acting", "told"),
    [
        (leave, "SystemExit: bad usage"),
        (leave_too, "SystemExit: bad usage"),
        (interrupt, "KeyboardInterrupt: enough"),
        (await_cancelled, "CancelledError"),
    ],
)
async def test_a_tool_that_exits_or_is_cancelled_by_itself_tells_the_model(
    network: Network, acting: Any, told: str
) -> None:
    def script(request: ModelRequest) -> Any:
        return call(acting.name) if request.turn == 1 else read_prompt(request).tool_results[-1].content

    mia = await network.join("mia", kind="human")
    bob = make_runner("bob", script, tools=[acting])
    assert await ask(bob, await network.join("bob", role="reactor"), mia, "go") == told


# --- acknowledgements


async def begin(bob: NetworkClient, seq: int) -> None:
    """Start or continue the reaction to a message from mia."""
    body = {"trigger": seq, "thread_id": "direct:bob~mia", "as_of": seq, "manifest": [seq], "config_hash": ""}
    reaction = reaction_id("bob", seq, bob.welcome.network.epoch)
    await bob.record(reaction, "started", body, record_id=digest("started", reaction, "", 0, 0))


async def begin_and_vanish(network: Network, *, ack: bool) -> int:
    """Let bob receive a message from mia, start its reaction with a runner's ID, and disconnect. Return the message's
    seq.
    """
    mia = await network.join("mia", kind="human")
    bob = await network.join("bob", role="reactor")
    asked = await mia.send_text("bob", "hello")
    delivery = await anext(bob.deliveries())
    await begin(bob, asked.seq)
    if ack:
        await delivery.ack()
    await bob.close()
    await mia.close()
    return asked.seq


async def test_a_resumed_trigger_that_a_hub_delivers_again_is_acknowledged(network: Network) -> None:
    seq = await begin_and_vanish(network, ack=False)
    network.hub.registry.reset()  # a hub that was killed before it stored its ack cursors knows only the stored ones
    mia = await network.join("mia", kind="human")
    bob = make_runner("bob", lambda request: "hi")
    task = asyncio.create_task(bob.run(await network.join("bob", role="reactor")))
    assert (await anext(mia.__aiter__())).text == "hi"
    await bob.stop()
    await task
    assert network.hub.view.is_handled("bob", seq)


async def test_a_dead_letter_taken_back_is_not_lost_when_its_second_reaction_is_cut_off(network: Network) -> None:
    seq = await begin_and_vanish(network, ack=True)
    for _ in range(5):
        bob = await network.join("bob", role="reactor")
        await begin(bob, seq)
        await bob._link._wire.drop()  # type: ignore[union-attr]  # its process dies; the reaction is open
        bob._link._task.cancel()  # type: ignore[union-attr]
    # A newer session lets the hub detect that the old one is lost.
    await (await network.join("bob", role="reactor")).close()
    mia = await network.join("mia", kind="human")
    await mia.call("network.retry_dead_letter", {"seq": seq, "agent_id": "bob"})
    asking = asyncio.Event()

    async def hang(request: ModelRequest) -> str:
        asking.set()
        await asyncio.Event().wait()
        return ""

    first = make_runner("bob", hang)
    task = asyncio.create_task(first.run(await network.join("bob", role="reactor")))
    await asyncio.wait_for(asking.wait(), 5)
    await first.stop()
    await task
    second = make_runner("bob", lambda request: "hi")
    task = asyncio.create_task(second.run(await network.join("bob", role="reactor")))
    assert (await asyncio.wait_for(anext(mia.__aiter__()), 5)).text == "hi"
    await second.stop()
    await task


async def test_recorded_replies_of_a_retried_dead_letter_are_not_requested_again(network: Network) -> None:
    mia, turns, asking = await network.join("mia", kind="human"), [], asyncio.Event()

    def answer(request: ModelRequest) -> Any:
        turns.append(request.turn)
        return call("look") if request.turn == 1 else "hi"

    async def hang(request: ModelRequest) -> Any:
        if request.turn == 2:
            asking.set()
            await asyncio.Event().wait()
        return call("look")

    client = await network.join("bob", role="reactor")
    first = asyncio.create_task(make_runner("bob", hang, tools=[look]).run(client))
    asked = await mia.send_text("bob", "hello")
    await asyncio.wait_for(asking.wait(), 5)
    await client._link._wire.drop()  # type: ignore[union-attr]
    first.cancel()
    await asyncio.wait([first])
    for _ in range(5):
        bob = await network.join("bob", role="reactor")
        with suppress(IdConflict):
            await begin(bob, asked.seq)
        await bob._link._wire.drop()  # type: ignore[union-attr]
        bob._link._task.cancel()  # type: ignore[union-attr]
    await (await network.join("bob", role="reactor")).close()
    await mia.call("network.retry_dead_letter", {"seq": asked.seq, "agent_id": "bob"})
    second = make_runner("bob", answer, tools=[look])
    task = asyncio.create_task(second.run(await network.join("bob", role="reactor")))
    assert (await asyncio.wait_for(anext(mia.__aiter__()), 5)).text == "hi"
    assert turns == [2]
    await second.stop()
    await task


# --- hubs with small frames, and busy hubs


async def test_a_reply_that_fits_no_frame_of_the_hubs_is_too_large(tmp_path: Path) -> None:
    def script(request: ModelRequest) -> Any:
        return say("x" * 6000) if request.turn == 1 else "short"

    config = NodeConfig(port=0, db=tmp_path / "r.db", durability="memory", limits=Limits(max_frame_bytes=4096))
    async with serve(config) as node, NetworkClient("mia", node.url, kind="human", token=node.owner_token) as mia:
        bob = NetworkClient("bob", node.url, role="reactor", token="t" * 43)
        async with bob:
            assert await asyncio.wait_for(ask(make_runner("bob", script), bob, mia, "go"), 10) == "short"


async def test_a_busy_hub_does_not_end_a_runner_that_starts(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    seq = await begin_and_vanish(network, ack=True)
    calls: dict[str, int] = {}
    answer: Callable[..., Any] = NetworkClient.call

    async def call_busy(self: NetworkClient, op: str, *args: Any, **options: Any) -> Any:
        calls[op] = calls.get(op, 0) + 1
        if self.agent_id == "bob" and calls[op] == 1:
            raise Overloaded("busy", 1)
        return await answer(self, op, *args, **options)

    monkeypatch.setattr(NetworkClient, "call", call_busy)
    mia = await network.join("mia", kind="human")
    bob = make_runner("bob", lambda request: "hi", channels=["dev"])
    task = asyncio.create_task(bob.run(await network.join("bob", role="reactor")))
    answered = asyncio.ensure_future(anext(mia.__aiter__()))
    done, _ = await asyncio.wait({task, answered}, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert answered in done, task.exception()
    assert answered.result().cause == seq
    assert min(calls[op] for op in ("channels.join", "network.records", "network.history", "network.window")) >= 2
    await bob.stop()
    await task


async def test_a_policys_callable_may_belong_to_what_cannot_be_copied(network: Network) -> None:
    class Describer:
        def __init__(self) -> None:
            self.held = asyncio.get_running_loop().create_future()

        def describe(self, turn: int, max_turns: int) -> str:
            return f"{turn}/{max_turns}"

    mia = await network.join("mia", kind="human")
    policy = AgentPolicy(describe_turn=Describer().describe)
    bob = make_runner("bob", lambda request: [say("hi"), finish()], policy=policy)
    assert await ask(bob, await network.join("bob", role="reactor"), mia, "go") == "hi"


# --- work that another program started


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"thread_id": "thread:999", "as_of": 1, "manifest": [], "config_hash": ""},
        {"thread_id": "direct:ann~zoe", "as_of": 1, "manifest": [], "config_hash": ""},
        {"thread_id": "", "as_of": 1, "manifest": [], "config_hash": ""},
        {"path": ["a", "b"]},
        {"path": {}},
    ],
)
async def test_an_open_reaction_that_cannot_be_read_does_not_keep_its_agent_from_starting(
    network: Network, body: dict[str, Any]
) -> None:
    mia = await network.join("mia", kind="human")
    other = await network.join("bob", role="reactor")
    asked = await mia.send_text("bob", "hello")
    await other.record("theirs", "started", {"trigger": asked.seq, **body}, record_id="theirs")
    await other.close()
    bob = make_runner("bob", lambda request: "hi")
    assert await ask(bob, await network.join("bob", role="reactor"), mia, "go") == "hi"
    assert (await network.join("bob", role="reactor")).welcome.open_reactions == []


# --- streams


class Splitting(Middleware):
    """Middleware that streams an emoji in two halves, as a provider that escapes JSON does, and reports one half."""

    async def around_model(self, around: Around, request: ModelRequest, proceed: Any) -> ModelReply:
        with around.report("half \ud83d"):
            return await super().around_model(around, request, proceed)


class Halves:
    """A custom model that waits until its streamed text is visible."""

    name = "halves"

    def __init__(self) -> None:
        self.is_seen = asyncio.Event()

    async def complete(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        on_delta(ModelDelta("hi \ud83d", "\ud83d"))
        on_delta(ModelDelta("\ude00"))
        await self.is_seen.wait()
        return ModelReply("hi \ud83d" + "\ude00")


async def test_half_a_character_that_streams_ends_no_agent(network: Network) -> None:
    mia, heard, model = await Person.join(network, "mia"), Heard(), Halves()
    await mia.client.call("network.watch", {"signals": True})
    bob = SimpleAgentRunner("bob", instruction="", model=model, middleware=[Splitting()], on_event=heard)
    async with running(network, bob):
        await mia.client.send_text("bob", "go")
        async for signal in mia.client.events():
            if isinstance(signal, Signal) and signal.kind == "delta":
                assert [it["text"] for it in signal.body["pieces"]] == ["half ?", "?", "hi ??"]
                break
        model.is_seen.set()
        assert (await mia.hear()).text == "hi 😀"
    for event in heard.events:
        json.dumps(event_to_json(event), ensure_ascii=False).encode()


# --- middleware that replaces its cancellation


class Cleaner(Middleware):
    """Middleware that fails during its cleanup."""

    def __init__(self, hook: str) -> None:
        async def fail(around: Any, *given: Any) -> Any:
            *before, proceed = given
            try:
                return await proceed(*before)
            except asyncio.CancelledError:
                raise OSError("the connection is gone") from None

        setattr(self, hook, fail)


HOOKS = ["around_reaction", "around_turn", "around_model", "around_tool"]


class Cleaning:
    """An agent that waits for ``release`` inside a tool call or inside its model."""

    def __init__(self, hook: str) -> None:
        self.begun, self.release, self.heard = asyncio.Event(), asyncio.Event(), Heard()

        async def stay() -> str:
            self.begun.set()
            await self.release.wait()
            return "done"

        async def script(request: ModelRequest) -> Any:
            if request.turn > 1:
                return read_prompt(request).tool_results[-1].content
            if hook != "around_tool":
                await stay()
            return call("work")

        async def work() -> str:
            """Work."""
            return await stay()

        layer = type("Layer", (Cleaner,), {hook: None})(hook)
        tools = [tool(idempotent=True)(work)]
        self.runner = make_runner("bob", script, tools=tools, middleware=[layer], on_event=self.heard)


@pytest.mark.parametrize("hook", HOOKS)
async def test_a_reaction_stays_open_although_middleware_fails_when_its_runner_stops(
    network: Network, hook: str
) -> None:
    mia = await network.join("mia", kind="human")
    first, second = Cleaning(hook), Cleaning(hook)
    task = asyncio.create_task(first.runner.run(await network.join("bob", role="reactor")))
    await first.runner.ready()
    await mia.send_text("bob", "go")
    await first.begun.wait()
    await first.runner.stop()
    await task
    second.release.set()
    task = asyncio.create_task(second.runner.run(await network.join("bob", role="reactor")))
    assert (await anext(mia.__aiter__())).text == "done"
    await second.runner.stop()
    await task


@pytest.mark.parametrize("hook", HOOKS[:2])
async def test_a_persons_stop_is_one_although_middleware_fails_of_it(network: Network, hook: str) -> None:
    mia = await network.join("mia", kind="human")
    bob = Cleaning(hook)
    task = asyncio.create_task(bob.runner.run(await network.join("bob", role="reactor")))
    await bob.runner.ready()
    asked = await mia.send_text("bob", "go")
    await bob.begun.wait()
    await cancel(mia, thread_id=asked.thread_id)
    [end] = await bob.heard.finished()
    assert (end.status, end.reason) == ("cancelled", "stopped by mia")
    await bob.runner.stop()
    await task


async def test_a_message_that_was_read_in_an_open_reaction_and_had_its_own_keeps_no_agent_from_starting(
    network: Network,
) -> None:
    """The first reaction read the second message and was then stopped, and its end could not be recorded."""
    mia = await network.join("mia", kind="human")
    other = await network.join("bob", role="reactor")
    first, late = [await mia.send_text("bob", text) for text in ("one", "two")]
    outer, own = (reaction_id("bob", it.seq, other.welcome.network.epoch) for it in (first, late))
    began = {"thread_id": "direct:bob~mia", "as_of": first.seq, "manifest": [first.seq], "config_hash": ""}
    for reaction, kind, turn, body in (
        (outer, "started", 0, {"trigger": first.seq, **began}),
        (outer, "new_messages", 1, {"turn": 1, "seqs": [late.seq], "text": "two", "answers": True}),
        (own, "started", 0, {"trigger": late.seq, **began}),
        (own, "finished", 0, {"status": "finished", "reason": "", "turns": 1, "usage": asdict(Usage())}),
    ):
        await other.record(reaction, kind, body, record_id=digest(kind, reaction, "", turn, 0))
    await other.close()
    bob = make_runner("bob", lambda request: "hi")
    task = asyncio.create_task(bob.run(await network.join("bob", role="reactor")))
    answer = asyncio.ensure_future(anext(mia.__aiter__()))
    done, _ = await asyncio.wait({task, answer}, return_when=asyncio.FIRST_COMPLETED)
    assert answer in done, task.exception()
    assert answer.result().cause == first.seq
    await bob.stop()
    await task


class LateClient:
    """A client that holds its first delivery back until the ledger has been replaced."""

    def __init__(self, client: NetworkClient, stale: AnyMessage) -> None:
        self._client = client
        earlier = Acks()
        earlier.is_stale = True
        self._stale = Delivery(earlier, stale, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def deliveries(self) -> AsyncIterator[Delivery]:
        yield self._stale
        async for delivery in self._client.deliveries():
            yield delivery


async def test_a_message_of_a_ledger_that_is_gone_is_not_taken_for_another_of_its_seq(network: Network) -> None:
    mia, client = await network.join("mia", kind="human"), await network.join("bob", role="reactor")
    await mia.send_text("bob", "go")
    go = (await mia.history("direct:bob~mia")).messages[-1]
    asked: list[str] = []

    def script(request: ModelRequest) -> Any:
        asked.append(read_prompt(request).incoming_text)
        return say("It says hi.")

    bob = make_runner("bob", script)
    late = LateClient(client, go.model_copy(update={"content": "of another ledger"}))
    task = asyncio.create_task(bob.run(late))  # type: ignore[arg-type]
    assert (await anext(mia.__aiter__())).text == "It says hi."
    await bob.stop()
    await task
    assert asked == ["go"]


# --- custom `react` methods, and failing hubs


class Hurried(SimpleAgentRunner):
    """Runner that limits each reaction to a short time."""

    async def react(self, *incoming: Any) -> Any:
        async with asyncio.timeout(0.2):
            return await super().react(*incoming)


async def test_a_reaction_that_its_own_runner_breaks_off_holds_up_no_thread(network: Network) -> None:
    async def script(request: ModelRequest) -> Any:
        if read_prompt(request).incoming_text == "one":
            await asyncio.Event().wait()
        return say("hello")

    mia, bob = await Person.join(network, "mia"), Hurried("bob", instruction="x", model=ScriptedModel(script))
    async with asyncio.timeout(20), running(network, bob):
        assert (await mia.ask("bob", "one")).text.startswith("I could not answer")
        assert (await mia.ask("bob", "two")).text == "hello"
        [status] = (await mia.client.call("network.message_status", {"seq": 3}))["recipients"]
        assert status["reaction_status"] == "failed"


class FailingClient:
    """A client whose hub fails on calls of `explain`."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def call(self, op: str, *args: Any, **options: Any) -> Any:
        if op == "network.why":
            self.asked += 1
            raise InternalError("The hub failed on this call.")
        return await self._client.call(op, *args, **options)


async def test_a_hub_that_cannot_say_why_ends_no_agent(network: Network) -> None:
    mia, carl = await Person.join(network, "mia"), await network.join("carl", kind="agent")
    async with await network.join("bob", role="reactor") as bob:
        asked = await bob.send_text("carl", "how many?", metadata={"ask": {"waiting": ["bob"]}})
    await carl.send_text("bob", "five", reply_to=asked.seq)
    failing = FailingClient(await network.join("bob", role="reactor"))
    runner = make_runner("bob", lambda request: say("hello"))
    task = asyncio.create_task(runner.run(failing))  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        assert (await mia.ask("bob", "go")).text == "hello"
    assert failing.asked == 1
    await runner.stop()
    await task


# --- messages that count as answers


async def test_a_tool_whose_name_ends_in_post_does_not_speak_for_the_agent(network: Network) -> None:
    @tool(idempotent=True)
    def look_up_post() -> str:
        """Look a post up."""
        return "found"

    def script(request: ModelRequest) -> Any:
        return call("look_up_post") if request.turn == 1 else [say("It says hi."), finish()]

    mia = await network.join("mia", kind="human")
    bob = make_runner("bob", script, tools=[look_up_post])
    assert await ask(bob, await network.join("bob", role="reactor"), mia, "go") == "It says hi."
