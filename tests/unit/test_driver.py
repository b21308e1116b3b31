"""Tests of the driver with real tools, a scripted model and the real journal: what it runs, what it records, and what
it never repeats.

The hub is a double that keeps records in memory (`Records`). Tests of the runner use a real hub.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.driver import Driver
from roundelay.agents.events import (
    Event,
    Finished,
    ModelOutput,
    ModelRetry,
    Resumed,
    ToolCallEnd,
    ToolCallStart,
    ToolRequests,
    TurnEnd,
    TurnStart,
    event_to_json,
)
from roundelay.agents.journal import Journal
from roundelay.agents.models.model import ModelError, ModelReply, ModelRequest, OnDelta, ToolCall, ToolMessage, Usage
from roundelay.agents.models.scripted import Call, Script, ScriptedModel, call, finish, say
from roundelay.agents.network_tools import communication_tools
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.reaction import Reaction
from roundelay.agents.recorded import Started, read_records
from roundelay.agents.tool_client import ToolClient
from roundelay.agents.tools import Tool, ToolContext, tool
from roundelay.agents.values import Finish
from roundelay.network.errors import (
    ConnectError,
    LoopStopped,
    RateLimited,
    RoundelayError,
    Superseded,
    UnknownRecipient,
)
from roundelay.network.messages import DirectMessage

TRIGGER = DirectMessage(
    seq=7, message_id="m7", sender_id="mia", sender_kind="human", to="agent:bob", thread_id="direct:bob~mia", root=7, hops=0,
    sent_at=0, content="hello",
)  # fmt: skip


class Panic(BaseException):
    """Base exception that extensions in other languages raise when they fail."""


class Killed(BaseException):
    """The process ended at this point."""


@dataclass
class StoredDouble:
    duplicate: bool


@dataclass
class Records:
    """The hub's records of one reaction. ``fail_at`` raises before that write, and ``kill_after`` ends the process
    after that write.
    """

    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    fail_at: int = 0
    error: RoundelayError | None = None
    kill_after: int = 0
    writes: int = 0
    agent_id: str = "bot"

    async def record(self, reaction: str, kind: str, body: Mapping[str, object], *, record_id: str) -> StoredDouble:
        await asyncio.sleep(0)
        self.writes += 1
        if self.error is not None and self.writes == self.fail_at:
            raise self.error
        written = {"kind": kind, "body": json.loads(json.dumps(body))}
        known = self.kept.setdefault(record_id, written)
        assert known == written, "a record was repeated with another body"
        if self.writes == self.kill_after:
            raise Killed
        return StoredDouble(known is not written)

    async def call(self, op: str, args: Mapping[str, object] | None = None, *, call_id: str | None = None) -> Any:
        if op == "network.info":
            return {}
        assert op == "network.records"
        return {"records": list(self.kept.values())}

    def kinds(self) -> list[str]:
        return [record["kind"] for record in self.kept.values()]

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        return [record["body"] for record in self.kept.values() if record["kind"] == kind]


@dataclass
class Run:
    """One run of reaction "r1". A second run with the same records is a restart."""

    script: Script
    tools: Sequence[Tool] = ()
    records: Records = field(default_factory=Records)
    policy: AgentPolicy = field(default_factory=AgentPolicy)
    events: list[Event] = field(default_factory=list)
    requests: list[ModelRequest] = field(default_factory=list)
    complete: Callable[[ModelRequest, OnDelta | None], Awaitable[ModelReply]] | None = None
    max_body_bytes: int = 262_144

    async def drive(self, *, resume: bool = False) -> Finish:
        journal = Journal(self.records, "r1", max_body_bytes=self.max_body_bytes)
        recorded = await journal.load() if resume else None
        if not resume:
            await journal.record_started(
                Started(trigger=7, thread_id="direct:bob~mia", as_of=7, manifest=[7], config_hash="c1")
            )
        driver = self.make_driver(journal)
        return await driver.run(recorded, config_hash="c1")

    def make_driver(self, journal: Journal) -> Driver:
        def see(request: ModelRequest) -> Any:
            self.requests.append(request)
            return self.script(request)

        model = ScriptedModel(see)
        if self.complete is not None:
            model.complete = self.complete  # type: ignore[method-assign,assignment]
        agent = Agent("bob", "Be brief.", model, [*communication_tools(), *self.tools], self.policy)
        reaction = Reaction(agent, prompt="<conversation/>", answers=True)
        return Driver(reaction, journal=journal, make_context=make_context, on_event=self.events.append)

    def told(self) -> list[str]:
        """Return the tool results in the last request to the model."""
        return [message.content for message in self.requests[-1].messages if isinstance(message, ToolMessage)]


def make_context(call_id: str, turn: int) -> ToolContext:
    return ToolContext("bob", "r1", turn, call_id, TRIGGER, ToolClient(cast("Any", None), call_id, TRIGGER.seq))


def turns(*answers: Any) -> Script:
    """Return a script with one answer for each turn."""
    return lambda request: answers[request.turn - 1]


@tool(idempotent=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_tool(
    action: Callable[[], Awaitable[str]], *, once: bool = False, timeout_s: float | None = None, name: str = "act"
) -> Tool:
    async def act() -> str:
        """Act."""
        return await action()

    return tool(name=name, once=once, idempotent=not once, timeout_s=timeout_s)(act)


async def test_the_journal_holds_reply_before_intent_before_result() -> None:
    run = Run(turns([say("Let me see."), call("add", a=1, b=2)], say("It is 3.")), [add])
    end = await run.drive()
    assert (end.status, end.answer, end.turns) == ("finished", "It is 3.", 2)
    assert run.records.kinds() == ["started", "model_reply", "tool_started", "tool_result", "model_reply"]
    assert run.records.bodies("tool_started") == [{"turn": 1, "call": 0, "tool": "add", "args": '{"a": 1, "b": 2}'}]
    assert run.records.bodies("tool_result") == [{"turn": 1, "call": 0, "tool": "add", "content": "3", "ok": True}]
    assert run.told() == ["3"]


async def test_events_tell_what_happens_in_order_and_go_to_json() -> None:
    run = Run(turns([say("Let me see."), call("add", a=1, b=2), call("nope")], finish("ok")), [add])
    await run.drive()
    assert [type(event) for event in run.events if not isinstance(event, ModelOutput)] == [
        TurnStart, ToolRequests, ToolCallEnd, ToolCallStart, ToolCallEnd, TurnEnd, TurnStart, ToolRequests, TurnEnd, Finished,
    ]  # fmt: skip
    shown = json.loads(json.dumps([event_to_json(event) for event in run.events]))
    assert shown[0] == {"type": "turn_start", "reaction": "r1", "turn": 1, "max_turns": 30, "path": ""}
    piece = {"text": "Let me see.", "reasoning": "", "path": "", "index": 1, "is_held": False}
    assert shown[1] == {"type": "model_delta", "reaction": "r1", "turn": 1, **piece}
    assert shown[-1]["type"] == "finished"
    assert shown[-1]["usage"]["completion_tokens"] > 0


async def test_a_request_says_for_whom_and_which_turn() -> None:
    run = Run(turns(call("add", a=1, b=2), finish()), [add])
    await run.drive()
    assert [(it.agent_id, it.reaction, it.turn) for it in run.requests] == [("bob", "r1", 1), ("bob", "r1", 2)]


# --- tools


async def test_a_hanging_tool_is_stopped_and_its_siblings_go_on() -> None:
    ended = asyncio.Event()

    async def hang() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    tools = [
        make_tool(hang, name="hang", timeout_s=0.01),
        make_tool(hang, name="hang_once", timeout_s=0.01, once=True),
        add,
    ]
    run = Run(turns([call("hang"), call("hang_once"), call("add", a=1, b=2)], finish()), tools)
    await run.drive()
    assert ended.is_set()
    assert run.told() == [
        "hang took longer than 0.01 s and was stopped. Whether it took effect is unknown.",
        "hang_once took longer than 0.01 s and was stopped. Whether it took effect is unknown.",
        "3",
    ]


async def test_a_tool_without_a_time_of_its_own_has_the_policys() -> None:
    async def hang() -> str:
        await asyncio.Event().wait()
        return "never"

    run = Run(turns(call("act"), finish()), [make_tool(hang)], policy=AgentPolicy(tool_timeout_s=0.01))
    await run.drive()
    assert "longer than 0.01 s" in run.told()[0]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("colour"), "KeyError: 'colour'"),
        (ValueError(), "ValueError"),
        (TimeoutError("the shop is slow"), "TimeoutError: the shop is slow"),
        (UnknownRecipient("There is nobody called zoe."), "unknown_recipient: There is nobody called zoe."),
        (LoopStopped("The budget of root 3 is spent."), "loop_stopped: The budget of root 3 is spent."),
    ],
)
async def test_a_tool_that_raises_tells_the_model_and_the_reaction_goes_on(error: Exception, told: str) -> None:
    async def fail() -> str:
        raise error

    run = Run(turns([call("act"), call("add", a=1, b=2)], finish()), [make_tool(fail), add])
    end = await run.drive()
    assert end.status == "finished"
    assert run.told() == [told, "3"]
    assert [body["ok"] for body in run.records.bodies("tool_result") if body["tool"] == "act"] == [False]


async def test_rate_limited_is_waited_out_for_a_call_that_may_be_repeated() -> None:
    attempts: dict[str, int] = {"idempotent": 0, "once": 0, "never": 0}

    def make(name: str, fails: int, once: bool = False) -> Tool:
        async def send() -> str:
            attempts[name] += 1
            if attempts[name] <= fails:
                raise RateLimited("Too fast.", retry_after_ms=1)
            return "sent"

        return make_tool(send, name=name, once=once)

    tools = [make("idempotent", 2), make("once", 2, once=True), make("never", 100)]
    run = Run(turns([call(it.name) for it in tools], finish()), tools, policy=AgentPolicy(hub_attempts=3))
    await run.drive()
    assert attempts == {"idempotent": 3, "once": 1, "never": 3}
    assert run.told() == ["sent", "rate_limited: Too fast.", "rate_limited: Too fast."]


async def test_a_large_result_is_cut_and_says_so() -> None:
    async def shout() -> str:
        return "x" * 10_000_000

    run = Run(turns(call("act"), finish()), [make_tool(shout)], policy=AgentPolicy(max_result_chars=100))
    await run.drive()
    assert run.told() == ["x" * 100 + "\n[cut here: the first 100 of 10000000 characters]"]


async def test_a_refused_call_is_recorded_too() -> None:
    run = Run(turns([Call("nope"), Call("add", "{")], finish()), [add])
    await run.drive()
    assert [(body["call"], body["tool"], body["ok"]) for body in run.records.bodies("tool_result")] == [
        (0, "nope", False), (1, "add", False),
    ]  # fmt: skip
    assert run.records.bodies("tool_started") == []


# --- the model


def fail_first(*errors: Exception) -> Callable[[ModelRequest, OnDelta | None], Awaitable[ModelReply]]:
    left = list(errors)

    async def complete(request: ModelRequest, on_delta: OnDelta | None) -> ModelReply:
        if left:
            raise left.pop(0)
        return ModelReply("It is 3.")

    return complete


async def test_a_failure_that_may_pass_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    complete = fail_first(
        ModelError("Busy.", reason="rate_limited", retry_after_ms=1),
        ModelError("Gone.", reason="server", retry_after_ms=2),
    )
    run = Run(turns(), complete=complete)
    end = await run.drive()
    assert end.answer == "It is 3."
    assert end.turns == 1
    assert [event for event in run.events if isinstance(event, ModelRetry)] == [
        ModelRetry("r1", 1, "Busy.", 0.001), ModelRetry("r1", 1, "Gone.", 0.002),
    ]  # fmt: skip
    assert caplog.text.count("model call is retried") == 1, "once for a request, however often"


@pytest.mark.parametrize(
    "errors",
    [
        [ModelError("No key.", reason="unauthorized")],
        [ModelError("No key.", reason="server", retry_after_ms=1)] * 3,
        [ModelError("No key.", reason="rate_limited", retry_after_ms=3_600_000)],
    ],
)
async def test_a_failure_that_stays_ends_the_reaction_and_says_why(errors: list[Exception]) -> None:
    run = Run(turns(), complete=fail_first(*errors))
    end = await run.drive()
    assert (end.status, end.reason) == ("failed", "No key.")
    assert "No key" not in str(end.answer)
    assert run.records.kinds() == ["started", "model_failed"]


@pytest.mark.parametrize("attempts", [2, 5])
async def test_all_attempts_are_made_though_our_own_delay_would_be_longer_than_a_call_may_take(attempts: int) -> None:
    made = 0

    async def fail(request: ModelRequest, on_delta: OnDelta | None) -> ModelReply:
        nonlocal made
        made += 1
        raise ModelError("Down.", reason="server")

    run = Run(turns(), complete=fail, policy=AgentPolicy(model_timeout_s=0.02, model_attempts=attempts))
    end = await run.drive()
    assert (made, end.status, end.reason) == (attempts, "failed", "Down.")
    delays = [it.delay_s for it in run.events if isinstance(it, ModelRetry)]
    assert len(delays) == attempts - 1
    assert all(0 < it <= 0.02 * 1.25 for it in delays)


async def test_a_silent_model_is_given_up() -> None:
    async def silent(request: ModelRequest, on_delta: OnDelta | None) -> ModelReply:
        await asyncio.Event().wait()
        raise AssertionError

    run = Run(turns(), complete=silent, policy=AgentPolicy(model_timeout_s=0.01, model_attempts=1))
    end = await run.drive()
    assert end.status == "failed"
    assert "no reply within 0.01 s" in end.reason


async def test_a_reply_too_large_to_record_is_dropped_and_the_model_told() -> None:
    run = Run(turns(say("x" * 5000), finish("ok")), max_body_bytes=4096)
    end = await run.drive()
    assert end.reason == "ok"
    assert "too large" in str(run.requests[-1].messages[-1])


async def test_lone_surrogates_of_a_model_reach_neither_journal_nor_tools() -> None:
    reply = ModelReply("a\ud800", (ToolCall("c1", "ad\ud800d", '{"x": "\udfff"}'),))
    run = Run(turns(reply, finish("ok")))
    await run.drive()
    json.dumps(run.records.bodies("model_reply"), ensure_ascii=False).encode("utf-8")
    assert run.records.bodies("model_reply")[0]["reply"]["text"] == "a?"


async def test_lone_surrogates_and_floods_in_arguments_are_answered() -> None:
    """JSON escapes produce surrogates from plain ASCII, and the answer to an invalid argument quotes the argument."""
    wrong = ToolCall("c1", "add", '{"a": "\\ud800", "b": "' + "x" * 100_000 + '"}')
    run = Run(
        turns(ModelReply(None, (wrong,)), ModelReply(None, (ToolCall("c2", "finish", '{"reason": "\\udfff"}'),))), [add]
    )
    end = await run.drive()
    assert end.reason == "?"
    [result] = run.records.bodies("tool_result")
    result["content"].encode("utf-8")
    assert len(result["content"]) < 3000


# --- continuing after a restart


@dataclass
class World:
    """Effects of tools outside of the process."""

    effects: list[str] = field(default_factory=list)

    def tools(self) -> list[Tool]:
        @tool(idempotent=True)
        async def note(context: ToolContext, text: str) -> str:
            """Store a note once per call ID."""
            if context.call_id not in self.effects:
                self.effects.append(context.call_id)
            return f"noted {text}"

        @tool(once=True)
        async def pay() -> str:
            """Pay."""
            self.effects.append("paid")
            return "paid"

        return [note, pay]


SCRIPT = turns([call("note", text="a"), call("pay"), call("nope")], call("note", text="b"), finish("ok"))


async def count_writes() -> int:
    run = Run(SCRIPT, World().tools())
    await run.drive()
    return run.records.writes


async def test_killed_after_any_record_a_reaction_ends_the_same_and_does_nothing_twice() -> None:
    writes = await count_writes()
    assert writes == 11  # started, 3 replies, 3 starts, 4 results; the runner writes finished
    for last in range(1, writes + 1):
        world = World()
        first = Run(SCRIPT, world.tools(), Records(kill_after=last))
        with pytest.raises(Killed):
            await first.drive()
        asked = {request.turn for request in first.requests}
        replied = {body["turn"] for body in first.records.bodies("model_reply")}

        first.records.kill_after = 0
        second = Run(SCRIPT, world.tools(), first.records)
        end = await second.drive(resume=True)
        assert (end.status, end.reason, end.turns) == ("finished", "ok", 3)
        assert replied.isdisjoint(request.turn for request in second.requests), "a recorded reply was asked again"
        assert len(asked - replied) <= 1, "more than the call in flight was lost"
        assert world.effects.count("paid") <= 1
        assert len([effect for effect in world.effects if effect != "paid"]) == 2
        results = {(body["turn"], body["call"]): body for body in second.records.bodies("tool_result")}
        assert set(results) == {(1, 0), (1, 1), (1, 2), (2, 0)}
        if second.requests:
            assert second.told() == [results[place]["content"] for place in sorted(results)], "not what is recorded"
        if not results[1, 1]["ok"]:
            assert "unknown, and it was not repeated" in results[1, 1]["content"]
        else:
            assert world.effects.count("paid") == 1


async def test_a_resumed_reaction_says_so_and_whether_its_configuration_changed() -> None:
    for hash_now, changed in (("c1", False), ("c2", True)):
        first = Run(SCRIPT, World().tools(), Records(kill_after=7))
        with pytest.raises(Killed):
            await first.drive()
        first.records.kill_after = 0
        second = Run(SCRIPT, World().tools(), first.records)
        journal = Journal(second.records, "r1")
        await second.make_driver(journal).run(await journal.load(), config_hash=hash_now)
        assert second.events[0] == Resumed("r1", 1, changed)
        assert TurnStart("r1", 1, 10) not in second.events


async def test_an_interrupted_once_tool_is_reported_and_never_run_again() -> None:
    world = World()
    run = Run(turns(call("pay"), finish("ok")), world.tools(), Records(kill_after=3))  # started, reply, tool_started
    with pytest.raises(Killed):
        await run.drive()
    run.records.kill_after = 0
    second = Run(run.script, world.tools(), run.records)
    await second.drive(resume=True)
    assert world.effects == []
    assert "Whether it took effect is unknown, and it was not repeated." in second.told()[0]


async def test_records_are_read_back_as_they_were_written() -> None:
    run = Run(SCRIPT, World().tools())
    await run.drive()
    recorded = read_records([*run.records.kept.values(), {"kind": "of a newer version", "body": {}}])
    assert recorded.started == Started(trigger=7, thread_id="direct:bob~mia", as_of=7, manifest=[7], config_hash="c1")
    assert sorted(recorded.replies) == [1, 2, 3]
    assert recorded.begun_calls == {(1, 0), (1, 1), (2, 0)}
    assert [recorded.results[place].content for place in [(1, 0), (1, 1), (2, 0)]] == ["noted a", "paid", "noted b"]
    assert recorded.finished is None

    await Journal(run.records, "r1").record_finished(Finish("finished", "ok", None, 3, Usage(5, 2)))
    end = read_records(list(run.records.kept.values())).finished
    assert end == Finish("finished", "ok", turns=3, usage=Usage(5, 2))


# --- lost hubs and cancellation


async def test_a_lost_hub_leaves_the_reaction_open() -> None:
    run = Run(SCRIPT, World().tools(), Records(fail_at=3, error=ConnectError("Gone.")))
    with pytest.raises(ConnectError):
        await run.drive()
    assert not any(isinstance(event, Finished) for event in run.events)


async def test_a_tool_that_finds_the_hub_gone_leaves_the_reaction_open() -> None:
    async def send() -> str:
        run.records.fail_at, run.records.error = run.records.writes + 1, ConnectError("Gone.")
        raise ConnectError("Gone.")

    run = Run(turns(call("act"), finish()), [make_tool(send)])
    with pytest.raises(ConnectError):
        await run.drive()
    assert run.records.kinds() == ["started", "model_reply", "tool_started"]


@pytest.mark.parametrize("error", [ConnectError("Gone."), Superseded("Another one."), Panic("rust")])
async def test_a_tool_that_loses_another_hub_or_panics_ends_its_call_only(error: BaseException) -> None:
    async def act() -> str:
        raise error

    run = Run(turns([call("act"), call("add", a=1, b=2)], "done"), [make_tool(act), add])
    end = await run.drive()
    assert (end.status, end.answer, run.told()[1]) == ("finished", "done", "3")
    assert str(error) in run.told()[0]


async def test_a_busy_hub_is_asked_again() -> None:
    run = Run(SCRIPT, World().tools(), Records(fail_at=3, error=RateLimited("Too fast.", retry_after_ms=1)))
    assert (await run.drive()).reason == "ok"


async def test_cancelled_while_tools_run_nothing_runs_on() -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> str:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    run = Run(turns(call("act"), finish()), [make_tool(hang)])
    driver = run.make_driver(Journal(run.records, "r1"))
    task = asyncio.create_task(driver.run())
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    end = driver.cancel("mia said stop")
    assert (end.status, end.reason) == ("cancelled", "mia said stop")
    assert run.events[-1] == Finished("r1", "cancelled", "mia said stop", None, 1, end.usage)
