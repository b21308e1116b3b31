"""Tests of agents under attack: tools, models, middleware and people do what nobody should. Every run ends, and the
runner survives.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents import AgentPolicy, Middleware, Output
from roundelay.agents import tools as tools_module
from roundelay.agents.events import Finished
from roundelay.agents.models.model import ModelReply, ModelRequest, OnDelta, ToolCall
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import tool
from roundelay.agents.values import ToolError
from roundelay.app import Network
from roundelay.network.client import Batched, NetworkClient
from roundelay.network.errors import ConfigError, ConnectError, Forbidden, Overloaded
from roundelay.network.frames import RecordFrame, SendFrame
from tests.support.agents import Heard, Person, Provider, make_runner, running, until_recorded
from tests.support.busy import BusyClient
from tests.support.fake_openai import Reply, call, calls, text
from tests.support.loops import results_of


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


FAULT = "I could not answer: an error on my side. My log has it."


def act_once(name: str, arguments: Any = None) -> Callable[[Mapping[str, Any]], Reply]:
    """Return a script that calls a tool until it has a result, and then ends."""

    def script(body: Mapping[str, Any]) -> Reply:
        return text("done") if results_of(dict(body)) else calls([(name, arguments or {})])

    return script


async def run_tool(network: Network, acting: Callable[..., object], **options: Any) -> str:
    """Let an agent call a tool in two reactions. Return the result that the model read."""
    mia = await Person.join(network, "mia")
    made = tool(name="act", **options)(acting)
    async with Provider(act_once("act")) as server:
        async with running(network, SimpleAgentRunner("bob", instruction="x", model=server.model(), tools=[made])):
            assert (await mia.ask("bob", "go")).text == "done"
            assert (await mia.ask("bob", "again")).text == "done", "the agent lives on"
        return results_of(server.requests[1])[0]


# --- tools


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (lambda: Output("x", {}, summary=object()), "cannot be converted to JSON"),  # type: ignore[arg-type]
        (lambda: Output("x", {}, summary="\ud800"), "cannot be converted to JSON"),
        (lambda: Output("x", {"n": nest(90)}), "nested deeper than 48"),
        (lambda: Output("x", {"k" * 400_000: 1}), "x"),
        (lambda: Output("x", {f"{i}" + "k" * 40: 1 for i in range(8000)}), "x"),
    ],
    ids=["summary of another kind", "lone surrogate", "deep", "a huge key", "many keys"],
)
async def test_data_that_no_record_holds_is_the_calls_own_failure(
    network: Network, output: Callable[[], Output], told: str
) -> None:
    def act() -> object:
        """Act."""
        return output()

    assert told in await run_tool(network, act)


async def test_a_stream_without_an_end_that_waits_for_nothing_holds_up_nobody(network: Network) -> None:
    async def act() -> AsyncIterator[str]:
        """Act."""
        while True:
            yield "x"

    assert "took longer than 0.05 s" in await run_tool(network, act, timeout_s=0.05)


async def test_a_stream_of_more_than_can_be_kept_is_stopped(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools_module, "MAX_STREAMED_CHARS", 1000)

    async def act() -> AsyncIterator[str]:
        """Act."""
        while True:
            yield "x" * 100

    assert "streamed more than 1000 characters" in await run_tool(network, act)


async def test_a_generator_without_an_end_is_stopped_in_its_thread(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools_module, "MAX_ITEMS", 1000)

    def act() -> object:
        """Act."""
        number = 0
        while True:
            yield (number := number + 1)

    assert "yielded more than 1000 items" in await run_tool(network, act)


async def test_an_error_that_cannot_say_what_it_is_has_its_name_at_least(network: Network) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def act() -> None:
        """Act."""
        raise Mute

    assert await run_tool(network, act) == "Mute"


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_time_that_is_none_is_refused_at_once(timeout_s: float) -> None:
    with pytest.raises(ToolError, match="must be more than 0"):
        tool(timeout_s=timeout_s)
    with pytest.raises(ValueError, match="must be greater than 0"):
        AgentPolicy(tool_timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"on_text": "send"}, "must be 'auto', 'reply', 'nudge' or 'record', not \"send\""),
        ({"on_new_message": "drop"}, "must be 'queue' or 'inject', not \"drop\""),
    ],
)
def test_a_choice_that_a_policy_does_not_have_is_refused_with_those_it_has(
    wrong: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        AgentPolicy(**wrong)


# --- models


def completion(message: dict[str, Any], **rest: Any) -> Reply:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, **message}}
    return Reply(body={"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **rest})


def odd_call(**odd: Any) -> dict[str, Any]:
    function = {"name": "act", "arguments": "{}", **{key: value for key, value in odd.items() if key != "id"}}
    return {"tool_calls": [{"id": odd.get("id", "c1"), "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (completion(odd_call(id="\ud800")), "acted"),
        (completion(odd_call(id=5)), "acted"),
        (completion(odd_call(arguments={})), "acted"),
        (completion(odd_call(arguments=[1])), "one JSON object"),
        (completion(odd_call(name=7)), 'no tool "7"'),
        (completion({"content": [{"type": "text", "text": "hi"}]}), "hi"),
        (completion({"content": 5}), "5"),
        (completion({"content": "hi"}, model="\ud800"), "hi"),
        (completion({"content": "hi"}, usage={"prompt_tokens": "many", "completion_tokens": -1.5}), "hi"),
        (completion({"content": "hi"}, usage=[1]), "hi"),
    ],
)
async def test_a_server_that_writes_other_kinds_of_values_is_understood(
    network: Network, reply: Reply, said: str
) -> None:
    @tool(idempotent=True)
    def act() -> str:
        """Act."""
        return "acted"

    def script(body: Mapping[str, Any]) -> Reply:
        done = results_of(dict(body))
        return text(done[0]) if done else reply

    mia = await Person.join(network, "mia")
    async with Provider(script) as server:
        async with running(network, SimpleAgentRunner("bob", instruction="x", model=server.model(), tools=[act])):
            assert said in (await mia.ask("bob", "go")).text
        assert {it.status for it in server.received} == {200}


class Odd:
    """A custom model that returns a wrong type."""

    name = "odd"

    def __init__(self, gives: Any) -> None:
        self.gives = gives

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        return self.gives  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (None, "it is a NoneType"),
        (ModelReply(5), "text is a int"),  # type: ignore[arg-type]
        (ModelReply(None, (ToolCall("c", "act", {}),)), "tool_calls.0.arguments is a dict"),  # type: ignore[arg-type]
    ],
)
async def test_a_model_of_ones_own_that_gives_something_else_fails_with_what_it_was(
    network: Network, gives: Any, why: str
) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    async with running(network, SimpleAgentRunner("bob", instruction="x", model=Odd(gives), on_event=heard)):
        assert (await mia.ask("bob", "go")).text == "I could not answer: my model sent a broken reply."
        [end] = await heard.finished()
    assert why in end.reason


# --- middleware


async def answer_with(network: Network, layer: Middleware) -> tuple[str, Finished]:
    """Let an agent with this middleware call a tool and answer. Return the person's message and the end of the
    reaction, which must be the same twice.
    """

    @tool(idempotent=True)
    def act() -> str:
        """Act."""
        return "acted"

    mia, heard = await Person.join(network, "mia"), Heard()
    async with Provider(act_once("act")) as server:
        runner = SimpleAgentRunner(
            "bob", instruction="x", model=server.model(), tools=[act], middleware=[layer], on_event=heard
        )
        async with running(network, runner):
            first, second = (await mia.ask("bob", "go")).text, (await mia.ask("bob", "again")).text
            [end, _] = await heard.finished(2)
    assert first == second, "the agent lives on"
    return first, end


@pytest.mark.parametrize("raised", [asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("hook", ["around_reaction", "around_turn", "review"])
async def test_middleware_that_exits_or_is_cancelled_by_itself_ends_its_reaction_and_nobody_is_said_to_have_stopped_it(
    network: Network, hook: str, raised: type[BaseException]
) -> None:
    async def fail(*args: object) -> None:
        raise raised

    answer, end = await answer_with(network, type("Failing", (Middleware,), {hook: fail})())
    assert (answer, end.status) == (FAULT, "failed")
    assert raised.__name__ in end.reason


@pytest.mark.parametrize("wrong", [asyncio.CancelledError(), SystemExit(3), None, 5])
async def test_middleware_around_a_tool_that_does_anything_wrong_is_the_calls_result(
    network: Network, wrong: Any
) -> None:
    class Failing(Middleware):
        async def around_tool(self, *args: Any) -> Any:
            if isinstance(wrong, BaseException):
                raise wrong
            return wrong

    answer, end = await answer_with(network, Failing())
    assert (answer, end.status) == ("done", "finished")


async def test_middleware_that_gives_no_record_ends_its_reaction_and_not_the_agent(network: Network) -> None:
    class Forgetful(Middleware):
        def store(self, kind: str, body: Mapping[str, object]) -> Any:
            return None if kind != "started" else body

    answer, end = await answer_with(network, Forgetful())
    assert (answer, end.status) == (FAULT, "failed")


# --- people and a busy hub


@tool(needs_approval=True)
def pay(to: str) -> str:
    """Pay."""
    return f"paid to {to}"


async def approve(network: Network, decision: str, **policy: Any) -> tuple[str, str]:
    """Decide on a call. Return the model's answer and the result of the call."""
    mia = await Person.join(network, "mia")
    async with Provider(act_once("pay", {"to": "ann"})) as server:
        runner = SimpleAgentRunner(
            "bob", instruction="x", model=server.model(), tools=[pay], policy=AgentPolicy(**policy)
        )
        async with running(network, runner):
            asked = await mia.ask("bob", "go")
            if decision:
                await mia.client.reply(asked, decision)  # type: ignore[arg-type]
            answer = (await mia.hear()).text if decision else asked.text
        return answer, results_of(server.requests[-1])[0]


@pytest.mark.parametrize(
    ("decision", "told"),
    [
        ('/edit\n{"to": "zoe"}', "paid to zoe"),
        ("/deny\nno money", "mia denied it: no money"),
        ("/approve", "paid to ann"),
    ],
)
async def test_a_decision_may_go_on_in_the_next_line(network: Network, decision: str, told: str) -> None:
    answer, result = await approve(network, decision)
    assert answer == "done"
    assert told in result


async def test_an_approval_may_be_waited_for_without_an_end(network: Network) -> None:
    assert (await approve(network, "/approve", approval_timeout_s=float("inf")))[1] == "paid to ann"


async def test_a_busy_hub_is_waited_for_when_a_person_is_asked(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, refused = NetworkClient.reply, list[str]()

    async def reply_later(self: NetworkClient, *args: Any, **options: Any) -> Any:
        if self.agent_id == "bob" and not refused:
            refused.append("once")
            raise Overloaded("busy", 1)
        return await reply(self, *args, **options)

    monkeypatch.setattr(NetworkClient, "reply", reply_later)
    assert (await approve(network, "/approve"))[1] == "paid to ann"


async def test_a_call_for_which_nobody_can_be_asked_is_not_run_and_the_model_reads_why(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NetworkClient.store_batch

    async def refuse(self: NetworkClient, frames: Sequence[SendFrame | RecordFrame]) -> Batched:
        allowed = [it for it in frames if not (isinstance(it, SendFrame) and b"May I call" in bytes(it.content))]
        batched = await store(self, allowed)
        return Batched(batched.stored, Forbidden("You may not write here.")) if len(allowed) < len(frames) else batched

    monkeypatch.setattr(NetworkClient, "store_batch", refuse)
    assert await approve(network, "") == (
        "done",
        "Not run: nobody could be asked to approve it (forbidden: You may not write here.)",
    )


async def test_what_a_person_decided_holds_although_the_tool_needs_no_approval_any_more(network: Network) -> None:
    mia, script = await Person.join(network, "mia"), act_once("pay", {"to": "ann"})

    async with Provider(script) as server:
        client = BusyClient(await network.join("bob", role="reactor"), "tool_started", cut_at=1)
        bob = SimpleAgentRunner("bob", instruction="x", model=server.model(), tools=[pay])
        task = asyncio.create_task(bob.run(client))  # type: ignore[arg-type]
        await bob.ready()
        asked = await mia.ask("bob", "go")
        await mia.client.reply(asked, '/edit {"to": "zoe"}')  # type: ignore[arg-type]
        with pytest.raises(ConnectError, match="cut"):
            await task
        free = replace(pay, needs_approval=False)
        async with running(network, SimpleAgentRunner("bob", instruction="x", model=server.model(), tools=[free])):
            assert (await mia.hear()).text == "done"
        assert results_of(server.requests[-1]) == ["paid to zoe"]


async def test_a_flood_of_messages_is_read_as_far_as_a_record_holds_it(network: Network) -> None:
    mia, heard, gate = await Person.join(network, "mia"), Heard(), asyncio.Event()

    async def script(body: Mapping[str, Any]) -> Reply:
        if results_of(dict(body)):
            return text("done")
        await gate.wait()
        return calls([call("channels_list")])

    async with Provider(script) as server:
        policy = AgentPolicy(on_new_message="inject")
        runner = SimpleAgentRunner("bob", instruction="x", model=server.model(), policy=policy, on_event=heard)
        async with running(network, runner):
            await mia.client.send_text("bob", "go")
            await server.wait_for_requests(1)
            sent = [(await mia.client.send_text("bob", f"<{n}>" + "<" * 9000)).seq for n in range(12)]
            await mia.client.call("network.message_status", {"seq": sent[-1]})
            gate.set()
            assert (await mia.hear()).text == "done"
            [first, second, *_] = await heard.finished(2)
            await until_recorded(mia, first.reaction, "finished")
            records = await mia.records(first.reaction)
    [read] = [it["body"] for it in records if it["kind"] == "new_messages"]
    assert (first.status, second.status) == ("finished", "finished")
    assert read["seqs"] == sent[: len(read["seqs"])], "the first ones, in order"
    assert 0 < len(read["seqs"]) < len(sent)
    assert len(json.dumps(read)) < 262_144


async def test_a_fault_tells_its_end_to_whoever_listens(network: Network) -> None:
    def describe(turn: int, max_turns: int) -> str:
        raise ValueError("no words")

    mia, heard = await Person.join(network, "mia"), Heard()
    bob = make_runner("bob", lambda request: "x", policy=AgentPolicy(describe_turn=describe), on_event=heard)
    async with asyncio.timeout(5), running(network, bob):
        assert (await mia.ask("bob", "go")).text == FAULT
        [end] = await heard.finished()
    assert (end.status, end.reason) == ("failed", "ValueError: no words")


@pytest.mark.parametrize("path", ["nothing.jinja", "\\0", "x" * 1000])
@pytest.mark.parametrize("key", ["template", "replay"])
def test_a_file_that_cannot_be_opened_names_the_line_that_wants_it(tmp_path: Path, key: str, path: str) -> None:
    model = f'{{replay: "{path}"}}' if key == "replay" else "{rules: [{do: [{say: hi}]}]}"
    line = f'template: "{path}"' if key == "template" else "on_text: auto"
    agent = tmp_path / "ann.yaml"
    agent.write_text(f"id: ann\ninstruction: x\n{line}\nmodel: {model}\n")
    with pytest.raises(ConfigError, match=f"ann.yaml:{3 if key == 'template' else 4}: agent ann: "):
        [build_runner(spec) for spec in load_agents(agent)]
