"""Tests of faults in reactions and their limited effects: misbehaving tools and models, a busy hub, and a resume with
other settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from roundelay.agents import isolation as foreign
from roundelay.agents.events import Finished
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelError, ModelReply, ModelRequest, OnDelta
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Script, ScriptedModel, call, finish, say, send
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Tool, ToolContext, tool
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.client.link import Link
from roundelay.network.errors import ConfigError, ConnectError, Overloaded
from roundelay.network.mod import Mod, Reading, operation
from tests.support.agents import Heard, Person, make_runner, running, until_recorded
from tests.support.busy import BusyClient
from tests.support.fake_openai import FakeOpenAI, error


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


async def bodies(mia: Person, reaction: str, kind: str) -> list[dict[str, Any]]:
    return [it["body"] for it in await mia.records(reaction) if it["kind"] == kind]


def first_call(name: str, **arguments: object) -> Script:
    """Return a script that calls a tool in the first turn, and reports its result in the second."""
    return lambda request: (
        call(name, **arguments) if request.turn == 1 else read_prompt(request).tool_results[-1].content
    )


class Panic(BaseException):
    """Base exception that extensions in other languages raise when they fail."""


@tool(idempotent=True)
async def phone_elsewhere() -> str:
    """Ask a hub that is not there."""
    async with NetworkClient("x", "ws://127.0.0.1:1/", token="t" * 43):
        return "connected"


@tool
def panic() -> str:
    """Fail as an extension does."""
    raise Panic("rust")


def look_up(value: int) -> int:
    return {1: 2}[value]


@tool
def pick(number: Annotated[int, AfterValidator(look_up)]) -> int:
    """Pick."""
    return number


# --- tools


@pytest.mark.parametrize(("acting", "told"), [(phone_elsewhere, "connect: "), (panic, "Panic: rust")])
async def test_a_tool_that_fails_in_whatever_way_does_not_end_its_runner(
    network: Network, acting: Tool, told: str
) -> None:
    mia = await Person.join(network, "mia")
    async with running(network, make_runner("bob", first_call(acting.name), tools=[acting])):
        assert (await mia.ask("bob", "go")).text.startswith(told)
        assert (await mia.ask("bob", "again")).text.startswith(told)


async def test_a_tool_that_swallows_its_cancellation_is_left_behind(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign, "GRACE_S", 0.01)
    release = asyncio.Event()

    @tool(timeout_s=0.01)
    async def cling() -> str:
        """Go on whatever happens."""
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    mia = await Person.join(network, "mia")
    script: Script = lambda request: (  # noqa: E731
        call("cling") if request.turn == 1 else read_prompt(request).tool_results[-1].content
    )
    async with asyncio.timeout(5), running(network, make_runner("bob", script, tools=[cling])):
        answer = await mia.ask("bob", "go")
    release.set()
    assert answer.text == "cling took longer than 0.01 s and was stopped. Whether it took effect is unknown."
    assert "work continues after its cancellation" in caplog.messages


async def test_stop_does_not_wait_for_middleware_that_swallows_its_cancellation(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign, "GRACE_S", 0.01)
    release, begun = asyncio.Event(), asyncio.Event()

    class Clinging(Middleware):
        async def around_turn(self, around: Around, proceed: Any) -> Any:
            begun.set()
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return await proceed()

    mia = await Person.join(network, "mia")
    bob = make_runner("bob", lambda _: "Hello.", middleware=[Clinging()])
    async with asyncio.timeout(5), running(network, bob):
        await mia.client.send_text("bob", "go")
        await begun.wait()
    release.set()
    assert "work continues after its cancellation" in caplog.messages
    async with asyncio.timeout(5), running(network, make_runner("bob", lambda _: "Here again.")):
        assert (await mia.hear()).text == "Here again."


async def test_stop_does_not_wait_for_a_tool_that_swallows_its_cancellation(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "GRACE_S", 0.01)
    release, begun = asyncio.Event(), asyncio.Event()

    @tool
    async def cling() -> str:
        """Go on whatever happens."""
        begun.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    mia = await Person.join(network, "mia")
    async with asyncio.timeout(5), running(network, make_runner("bob", first_call("cling"), tools=[cling])):
        await mia.client.send_text("bob", "go")
        await begun.wait()
    release.set()


async def test_a_check_of_an_argument_that_fails_itself_is_told_to_the_model(network: Network) -> None:
    mia = await Person.join(network, "mia")
    async with running(network, make_runner("bob", first_call("pick", number=5), tools=[pick])):
        assert "their check failed (KeyError: 5)" in (await mia.ask("bob", "go")).text


async def test_a_send_whose_answer_is_late_is_waited_for_and_not_called_a_failure(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, stored, release = Link.ask, asyncio.Event(), asyncio.Event()

    async def answer_late(self: Link, key: str, frame: bytes, *args: Any, **options: Any) -> Any:
        result = await answer(self, key, frame, *args, **options)
        if b'"to":"agent:ann"' in frame:
            stored.set()
            await release.wait()
        return result

    monkeypatch.setattr(Link, "ask", answer_late)

    def script(request: ModelRequest) -> Any:
        if request.turn == 1:
            return send("ann", "The invoice is paid.")
        return read_prompt(request).tool_results[-1].content

    mia, ann = await Person.join(network, "mia"), await network.join("ann")
    async with running(network, make_runner("bob", script, policy=AgentPolicy(tool_timeout_s=0.01))):
        await mia.client.send_text("bob", "go")
        await stored.wait()
        await asyncio.sleep(0.05)  # this time is longer than the timeout of other tools
        release.set()
        assert (await mia.hear()).text == "The message is on its way to ann."
    assert [it.text for it in (await ann.history("direct:ann~bob")).messages] == ["The invoice is paid."]


async def test_what_a_tool_of_ones_own_sends_follows_from_the_message_and_is_sent_once(network: Network) -> None:
    mia, ann = await Person.join(network, "mia"), await network.join("ann")
    reactions: list[str] = []

    @tool(idempotent=True)
    async def tell_ann(context: ToolContext) -> str:
        """Tell ann twice."""
        reactions.append(context.reaction)
        await context.client.send_text("ann", "one")
        await context.client.send_text("ann", "two")
        if len(reactions) == 1:
            raise Overloaded("busy", 1)  # this error makes the agent repeat the call
        return "told"

    async with running(network, make_runner("bob", first_call("tell_ann"), tools=[tell_ann])):
        asked = await mia.client.send_text("bob", "go")
        await mia.hear()
    heard = (await ann.history("direct:ann~bob")).messages
    assert [(it.text, it.cause) for it in heard] == [("one", asked.seq), ("two", asked.seq)]
    assert len(reactions) == 2


async def test_an_answer_to_a_person_is_not_lost_after_a_message_to_somebody_else(network: Network) -> None:
    def script(request: ModelRequest) -> Any:
        return send("ann", "fyi") if request.turn == 1 else [say("Here is your answer."), finish()]

    mia = await Person.join(network, "mia")
    await network.join("ann")
    async with running(network, make_runner("bob", script)):
        assert (await mia.ask("bob", "go")).text == "Here is your answer."


# --- models


class Model:
    """A custom model that runs a function of the test."""

    name = "own"

    def __init__(self, *does: Any) -> None:
        self.does = list(does)

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        what = self.does[min(request.turn, len(self.does)) - 1]
        if isinstance(what, BaseException):
            raise what
        return what if isinstance(what, ModelReply) else await ScriptedModel(lambda _: what).complete(request)


@pytest.mark.parametrize("raised", [ConnectError("lost"), asyncio.CancelledError(), SystemExit(3), Panic("rust")])
async def test_a_model_that_raises_anything_ends_its_reaction_only(network: Network, raised: BaseException) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    bob = SimpleAgentRunner("bob", instruction="x", model=Model(call("nope"), raised), on_event=heard)
    async with running(network, bob):
        assert (await mia.ask("bob", "go")).text == "I could not answer: my model failed."
        assert (await mia.ask("bob", "again")).text == "I could not answer: my model failed."
        [end, _] = await heard.finished(2)
        await until_recorded(mia, end.reaction, "finished")
        [body] = await bodies(mia, end.reaction, "finished")
    assert (end.status, end.turns, body["turns"]) == ("failed", 2, 2)
    assert end.usage.prompt_tokens > 0
    assert body["usage"]["prompt_tokens"] == end.usage.prompt_tokens


async def test_a_fault_of_ours_is_recorded_with_what_was_used_before_it(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()

    def describe(turn: int, max_turns: int) -> str:
        return f"{1 // (2 - turn)}"

    bob = make_runner("bob", lambda request: call("nope"), policy=AgentPolicy(describe_turn=describe), on_event=heard)
    async with running(network, bob):
        asked = await mia.client.send_text("bob", "go")
        assert (await mia.hear()).text == "I could not answer: an error on my side. My log has it."
        [state] = (await mia.client.call("network.message_status", {"seq": asked.seq}))["recipients"]
        await until_recorded(mia, state["reaction"], "finished")
        [body] = await bodies(mia, state["reaction"], "finished")
    assert body["reason"].startswith("ZeroDivisionError")
    assert body["turns"] == 2
    assert body["usage"]["prompt_tokens"] > 0


async def test_a_providers_own_words_are_recorded_and_not_published(network: Network) -> None:
    secret = "Incorrect API key provided: sk-proj-abcd1234. Organization org-SECRET."
    mia, heard = await Person.join(network, "mia"), Heard()
    async with FakeOpenAI([error(401, secret, code="invalid_api_key")]) as server:
        model = OpenAIModel("m", base_url=server.base_url)
        async with running(network, SimpleAgentRunner("bob", instruction="x", model=model, on_event=heard)):
            asked = await mia.client.broadcast("go")
            answer = await mia.hear()
            [end] = await heard.finished()
            [failed] = await bodies(mia, end.reaction, "model_failed")
        await model.close()
    assert (answer.text, answer.reply_to) == ("I could not answer: my model does not let me in.", asked.seq)
    assert "sk-proj-abcd1234" in failed["reason"]


# --- busy hubs


@pytest.mark.parametrize("kind", ["started", "model_reply", "tool_started", "tool_result", "finished"])
async def test_a_busy_hub_fails_no_reaction_and_no_answer_is_followed_by_an_apology(
    network: Network, kind: str
) -> None:
    mia = await Person.join(network, "mia")
    client = BusyClient(await network.join("bob", role="reactor"), kind, refusals=12)
    bob = make_runner("bob", lambda request: call("channels_list") if request.turn == 1 else "The answer")
    task = asyncio.create_task(bob.run(client))  # type: ignore[arg-type]
    await bob.ready()
    asked = await mia.client.send_text("bob", "go")
    [state] = (await mia.client.call("network.message_status", {"seq": asked.seq}))["recipients"]
    assert (await mia.hear()).text == "The answer"
    [state] = (await mia.client.call("network.message_status", {"seq": asked.seq}))["recipients"]
    await until_recorded(mia, state["reaction"], "finished")
    assert (await bodies(mia, state["reaction"], "finished"))[0]["status"] == "finished"
    assert await mia.history("direct:bob~mia") == [("mia", "go"), ("bob", "The answer")]
    await bob.stop()
    await task


# --- resumes with other settings


async def begin_and_cut(network: Network, mia: Person, runner: SimpleAgentRunner, kind: str, text: str = "go") -> int:
    """Let an agent react until it is about to write a record of this kind, and disconnect its hub there. Return the
    trigger's seq.
    """
    client = BusyClient(await network.join("bob", role="reactor", card=runner.describe_card()), kind, cut_at=1)
    task = asyncio.create_task(runner.run(client))  # type: ignore[arg-type]
    await runner.ready()
    asked = await mia.client.send_text("bob", text)
    with pytest.raises(ConnectError, match="cut"):
        await task
    return asked.seq


async def test_a_failed_model_and_then_a_kill_give_one_answer(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    down = SimpleAgentRunner("bob", instruction="x", model=Model(ModelError("down", reason="unauthorized")))
    await begin_and_cut(network, mia, down, "finished")
    asked: list[int] = []
    async with running(network, make_runner("bob", lambda request: asked.append(1) or "an answer", on_event=heard)):  # type: ignore[func-returns-value]
        [end] = await heard.finished()
        await until_recorded(mia, end.reaction, "finished")
    assert (end.status, end.reason, asked) == ("failed", "down", [])
    assert [sender for sender, _ in await mia.history("direct:bob~mia")] == ["mia", "bob"]


async def test_a_resumed_reaction_reads_nothing_that_its_prompt_did_not_hold(network: Network) -> None:
    mia, zoe, prompts = await Person.join(network, "mia"), await Person.join(network, "zoe"), list[str]()

    def script(request: ModelRequest) -> str:
        prompts.append(str(request.messages[1].content))
        return "ok"

    narrow = make_runner("bob", script, visibility="current")
    async with running(network, narrow):
        await zoe.ask("bob", "zoe's secret")
    heard = Heard()
    await begin_and_cut(network, mia, narrow, "model_reply")
    async with running(network, make_runner("bob", script, visibility="all", on_event=heard)):
        await heard.finished()
    assert "<content>go</content>" in prompts[-1]
    assert not [prompt for prompt in prompts if "secret" in prompt and "<content>go</content>" in prompt]
    assert prompts[-1] == prompts[-2]
    resumed = heard.events[0]
    assert resumed.config_changed  # type: ignore[union-attr]
    assert not resumed.prompt_changed  # type: ignore[union-attr]


@tool
def pay(to: str) -> str:
    """Pay."""
    PAID.append(to)
    return "paid"


PAID: list[str] = []


@pytest.mark.parametrize(
    "options",
    [{"tools": [pay], "policy": AgentPolicy(max_turns=1)}, {"tools": []}],
    ids=["fewer turns", "tool gone"],
)
@pytest.mark.parametrize(
    ("cut_at", "told"), [("model_reply2", "paid"), ("tool_result", "Whether it took effect is unknown")]
)
async def test_a_resumed_reaction_trusts_its_records_rather_than_its_new_settings(
    network: Network, options: dict[str, Any], cut_at: str, told: str
) -> None:
    PAID.clear()
    mia, histories = await Person.join(network, "mia"), list[str]()
    first = make_runner("bob", lambda request: call("pay", to="x") if request.turn == 1 else "never", tools=[pay])
    if cut_at == "tool_result":
        await begin_and_cut(network, mia, first, "tool_result")
    else:
        thinking = asyncio.Event()

        async def think(request: ModelRequest) -> Any:
            if request.turn == 1:
                return call("pay", to="x")
            thinking.set()
            await asyncio.Event().wait()
            return ""

        first = make_runner("bob", think, tools=[pay])
        async with running(network, first):
            await mia.client.send_text("bob", "go")
            await thinking.wait()

    def script(request: ModelRequest) -> str:
        histories.append(read_prompt(request).tool_results[-1].content)
        return "done"

    async with running(network, make_runner("bob", script, **options)):
        assert (await mia.hear()).text == "done"
    assert PAID == ["x"]
    assert told in histories[0]


# --- starting


async def test_ready_says_what_kept_the_agent_from_starting() -> None:
    bob = make_runner("bob", lambda request: "x", url="ws://127.0.0.1:1/", token="t" * 43)
    task = asyncio.create_task(bob.run())
    async with asyncio.timeout(5):
        with pytest.raises(ConnectError):
            await bob.ready()
    with pytest.raises(ConnectError):
        await task


async def test_a_client_that_is_no_reactor_of_the_agent_is_refused(network: Network) -> None:
    bob = make_runner("bob", lambda request: "x")
    for client in (await network.join("bob"), await network.join("ann", role="reactor")):
        with pytest.raises(ConfigError, match='role="reactor"'):
            await bob.run(client)


async def test_visibility_holds_with_a_client_that_has_no_card(network: Network) -> None:
    mia, prompts = await Person.join(network, "mia"), list[str]()

    def script(request: ModelRequest) -> str:
        prompts.append(str(request.messages[1].content))
        return "ok"

    bob = make_runner("bob", script, visibility="current")
    task = asyncio.create_task(bob.run(await network.join("bob", role="reactor")))
    await bob.ready()
    await mia.ask("bob", "a secret")
    await mia.client.broadcast("hello all")
    await mia.hear()
    await bob.stop()
    await task
    assert "hello all" in prompts[-1]
    assert "secret" not in prompts[-1]


@pytest.mark.parametrize(
    ("max_threads", "told"), [(4, None), (3, "1 further thread omitted"), (2, "2 further threads omitted")]
)
async def test_the_prompt_says_how_many_threads_it_leaves_out_and_counts_only_what_it_might_show(
    network: Network, max_threads: int, told: str | None
) -> None:
    mia, leo = await Person.join(network, "mia"), await Person.join(network, "leo")
    prompts = list[str]()

    def script(request: ModelRequest) -> Any:
        prompts.append(str(request.messages[1].content))
        return (
            "noted"
            if request.turn > 1 or "tell" not in read_prompt(request).incoming_text
            else [send(it, "well?") for it in ("amy", "ben", "cid")]
        )

    policy = AgentPolicy(max_threads=max_threads, prompt="full")
    async with running(
        network,
        make_runner("bob", script, policy=policy),
        *(make_runner(it, lambda request: finish()) for it in ("amy", "ben", "cid")),
    ):
        # This message does not belong to mia's prompts, so their count omits it.
        await leo.ask("bob", "leo's own affair")
        await mia.ask("bob", "tell them")
        await mia.ask("bob", "and now?")
    prompt = prompts[-1]
    assert "leo's own affair" not in prompt
    assert prompt.count("<thread id=") == max_threads
    assert "omitted" not in prompts[0]
    assert prompt.count("omitted</omitted>") == (told is not None)
    if told is not None:
        assert f"<omitted>{told}</omitted>\n    </threads>" in prompt


async def test_the_prompt_says_how_many_earlier_messages_it_leaves_out(network: Network) -> None:
    mia, prompts = await Person.join(network, "mia"), list[str]()

    def script(request: ModelRequest) -> str:
        prompts.append(str(request.messages[1].content))
        return f"re: {read_prompt(request).incoming_text}"

    async with running(network, make_runner("bob", script, policy=AgentPolicy(per_thread=2))):
        for number in range(4):
            await mia.ask("bob", f"m{number}")
    assert "omitted" not in prompts[1]
    assert "<omitted>4 earlier messages omitted</omitted>" in prompts[3]
    assert "m2" in prompts[3]
    assert "m1" not in prompts[3]


async def test_events_show_a_call_under_the_id_that_the_history_has(network: Network) -> None:
    from roundelay.agents.events import ToolRequests
    from roundelay.agents.models.model import AssistantMessage, ToolCall

    mia, heard, requests = await Person.join(network, "mia"), Heard(), list[ModelRequest]()

    def script(request: ModelRequest) -> Any:
        requests.append(request)
        return ModelReply(None, (ToolCall("same", "channels_list", "{}"),)) if request.turn < 3 else "done"

    async with running(network, make_runner("bob", script, on_event=heard)):
        await mia.ask("bob", "go")
    shown = [it.calls[0].id for it in heard.events if isinstance(it, ToolRequests)]
    held = [it.tool_calls[0].id for it in requests[-1].messages if isinstance(it, AssistantMessage)]
    assert shown == held
    assert len(set(shown)) == 2
    assert any(isinstance(it, Finished) for it in heard.events)


class Finder(Mod):
    """Mod that finds the message for which a tool is called. The mod stores nothing."""

    id = "finder"

    @operation("read")
    async def find(self, reading: Reading, *, cause: int) -> dict[str, Any]:
        """Find the message."""
        return {"seq": cause, "thread_id": "direct:bob~mia"}


async def test_an_agent_that_only_read_of_the_incoming_thread_has_not_answered_there() -> None:
    async with asyncio.timeout(20), Network.open(mods=[Finder()]) as network:
        mia = await Person.join(network, "mia")
        bob = make_runner("bob", lambda it: call("finder_find") if it.turn == 1 else [say("It is here."), finish()])
        async with running(network, bob):
            answer = await mia.ask("bob", "Is it there?")
    assert answer.text == "It is here."
