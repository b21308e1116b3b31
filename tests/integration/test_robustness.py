"""Tests that a reaction ends with an answer, whatever a model, its provider or a tool does. Each row runs with the
real SDK, with and without streaming, and in json_schema mode. The tests check the provider's requests and the ledger.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundelay.agents import model_call
from roundelay.agents.events import ModelOutput, ModelRetry
from roundelay.agents.models.fallback import FallbackModel
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Tool, tool
from roundelay.app import Network
from tests.support.agents import Heard, Person, Provider, running, until_recorded
from tests.support.fake_openai import (
    Reply,
    calls,
    content_filter,
    context_too_long,
    cut,
    empty,
    end_early,
    error,
    rate_limited,
    reset,
    server_error,
    silence,
    text,
)

Mode = Literal["native", "stream", "json_schema"]
Body = Mapping[str, Any]


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_call, "FIRST_DELAY_S", 0.001)


@tool(idempotent=True)
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool
def fail() -> str:
    """Fail."""
    raise KeyError("colour")


@tool(timeout_s=0.05)
async def hang() -> str:
    """Hang."""
    await asyncio.Event().wait()
    return "never"


@tool
def flood() -> str:
    """Give ten megabytes."""
    return "x" * 10_000_000


@tool
def no_json() -> object:
    """Give what cannot be converted to JSON."""
    return object()


TOOLS: list[Tool] = [add, fail, hang, flood, no_json]
POLICY = AgentPolicy(max_turns=6, max_tool_calls_per_turn=3, prompt="full")


@dataclass(frozen=True)
class Row:
    """Replies in turn (the last one repeats), the required text in the provider's requests, and the end."""

    name: str
    replies: tuple[Reply, ...]
    told: str = ""
    answer: str = "done"
    requests: int = 2
    modes: tuple[Mode, ...] = ("native", "stream", "json_schema")
    policy: AgentPolicy = field(default=POLICY)


NATIVE: tuple[Mode, ...] = ("native", "stream")  # json_schema mode has one call per step
DONE = text("done")

ROWS = [
    Row("unknown tool", (calls([("teleport", {})]), DONE), "The tools are: send_text_message"),
    Row("broken json", (calls([("add", '{"a": 1, "b": ')]), DONE), "they are not valid JSON"),
    Row("wrong type", (calls([("add", {"a": "x", "b": 2})]), DONE), "a: Input should be a valid integer"),
    Row("missing argument", (calls([("add", {"a": 1})]), DONE), "b: Field required"),
    Row("a tool that raises", (calls([("fail", {})]), DONE), "KeyError: 'colour'"),
    Row("a tool that hangs", (calls([("hang", {})]), DONE), "longer than 0.05 s"),
    Row("siblings of a tool that hangs", (calls([("hang", {}), ("add", {"a": 20, "b": 22})]), DONE), '"42"', modes=NATIVE),
    Row("ten megabytes", (calls([("flood", {})]), DONE), "the first 16000 of 10000000 characters"),
    Row("a result that is no json", (calls([("no_json", {})]), DONE), "cannot be converted to JSON"),
    Row(
        "the same call again and again", (*[calls([("add", {"a": 1, "b": 2})])] * 4, DONE), "made this very call 3 times",
        requests=5,
    ),
    Row(
        "never stops calling", (calls([("add", {"a": 1, "b": 2})]),), "last one: no tools", modes=NATIVE, requests=6,
        answer="I reached the limit of 6 turns without an answer.",
    ),
    Row("empty reply", (empty(), DONE), "Your reply was empty"),
    Row("several finishes", (calls([("finish", {"reason": "a"}), ("finish", {"reason": "b"})], "done"),), requests=1, modes=NATIVE),
    Row("text beside a call", (calls([("add", {"a": 1, "b": 2})], "Let me see."), DONE), "Let me see.", modes=NATIVE),
    Row("surplus calls", (calls([("add", {"a": i, "b": 1}) for i in range(5)]), DONE), "at most 3 calls are run", modes=NATIVE),
    Row("429", (rate_limited(0.001), DONE)),
    Row("429 without a time", (rate_limited(), DONE)),
    Row("500", (server_error(), server_error(503), DONE), requests=3),
    Row("connection reset", (reset(), DONE)),
    Row("cut in the middle", (cut(), DONE)),
    Row("a stream that ends early", (end_early(), DONE), modes=("stream",)),
    Row("silence", (silence(), DONE), policy=replace(POLICY, model_timeout_s=1.0)),
    Row("content filter", (content_filter(), DONE), "filter withheld your reply"),
    Row(
        "content filter for good", (content_filter(),), answer="I could not answer: my model's provider withheld the reply.",
    ),
    Row("cut off at a limit of length", (text("do", finish_reason="length"), DONE), "cut off at its limit of length"),
    Row("context too long", (context_too_long(), DONE)),
    Row(
        "context too long for good", (context_too_long(),),
        answer="I could not answer: the conversation is too long for my model.",
    ),
    Row("a refused key", (error(401, "no"),), answer="I could not answer: my model does not let me in.", requests=1),
    Row("down for good", (server_error(),), answer="I could not answer: my model failed.", requests=3),
]  # fmt: skip


def in_turn(replies: tuple[Reply, ...], mode: Mode) -> Callable[[Body], Reply]:
    left = list(replies)

    def script(body: Body) -> Reply:
        reply = left.pop(0) if len(left) > 1 else left[0]
        return as_step(reply) if mode == "json_schema" else reply

    return script


def as_step(reply: Reply) -> Reply:
    """Return the reply as a model in json_schema mode writes it."""
    if not reply.tool_calls:
        return reply
    function = reply.tool_calls[0]["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return text('{{"call": {{"tool": "{}", "arguments": {}'.format(function["name"], function["arguments"]))
    return text(json.dumps({"call": {"tool": function["name"], "arguments": arguments}}))


@pytest.mark.parametrize(
    ("row", "mode"), [pytest.param(row, mode, id=f"{row.name}-{mode}") for row in ROWS for mode in row.modes]
)
async def test_every_row_ends_with_an_answer(network: Network, row: Row, mode: Mode) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    async with Provider(in_turn(row.replies, mode)) as server:
        model = server.model(stream=mode == "stream", tool_mode="json_schema" if mode == "json_schema" else "native")
        bob = SimpleAgentRunner("bob", instruction="x", model=model, tools=TOOLS, policy=row.policy, on_event=heard)
        async with running(network, bob):
            answer = await mia.ask("bob", "go")
            [end] = await heard.finished()
            await until_recorded(mia, end.reaction, "finished")
            records = await mia.records(end.reaction)
    assert answer.text == row.answer
    assert len(server.requests) == row.requests
    assert all(it.status in (0, 200, 400, 401, 429, 500, 503) for it in server.received)
    refusals = {it.status for it in server.received if it.status == 400}
    assert not refusals or "context" in row.name, "a history that the provider refuses"
    assert row.told in json.dumps(server.requests[-1])
    begun = {(it["body"]["turn"], it["body"]["call"]) for it in records if it["kind"] == "tool_started"}
    ended = {(it["body"]["turn"], it["body"]["call"]) for it in records if it["kind"] == "tool_result"}
    assert begun <= ended
    assert next(it["kind"] for it in records) == "started"
    assert [it["kind"] for it in records][-1] == "finished"


async def test_a_context_that_is_too_long_is_sent_again_without_the_old_messages(network: Network) -> None:
    mia = await Person.join(network, "mia")
    replies = (*[text(f"noted {number}") for number in range(6)], context_too_long(), DONE)
    async with Provider(in_turn(replies, "native")) as server:
        async with running(network, SimpleAgentRunner("bob", instruction="x", model=server.model())):
            for number in range(6):
                await mia.ask("bob", f"fact {number}")
            assert (await mia.ask("bob", "and now?")).text == "done"
        long, short = (str(it["messages"][1]["content"]) for it in server.requests[-2:])
    assert "fact 1" in long
    assert "fact 1" not in short
    assert "and now?" in short


async def test_a_model_falls_back_to_another_one_and_only_then_is_it_tried_again(network: Network) -> None:
    mia = await Person.join(network, "mia")
    async with (
        Provider([server_error(), server_error(), text("first again")]) as one,
        Provider([text("second"), server_error()]) as two,
    ):
        model = FallbackModel(one.model(), two.model())
        async with running(network, SimpleAgentRunner("bob", instruction="x", model=model)):
            assert (await mia.ask("bob", "go")).text == "second"
            assert (await mia.ask("bob", "go")).text == "first again"
        assert (len(one.requests), len(two.requests)) == (3, 2)


async def test_what_a_model_said_before_it_broke_off_is_not_shown_before_what_the_next_one_says(
    network: Network,
) -> None:
    mia = await Person.join(network, "mia")
    heard = Heard()
    async with Provider([cut("The answer is 4, and")]) as one, Provider([text("It is five.")]) as two:
        model = FallbackModel(one.model(stream=True), two.model(stream=True))
        async with running(network, SimpleAgentRunner("bob", instruction="x", model=model, on_event=heard)):
            assert (await mia.ask("bob", "go")).text == "It is five."
    streamed = [it for it in heard.events if isinstance(it, ModelOutput | ModelRetry)]
    [retry] = [place for place, it in enumerate(streamed) if isinstance(it, ModelRetry)]
    before = "".join(it.text for it in streamed[:retry] if isinstance(it, ModelOutput))
    after = "".join(it.text for it in streamed[retry:] if isinstance(it, ModelOutput))
    assert "The answer is 4, and".startswith(before)
    assert before
    assert after == "It is five."


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "fail", "flood", "finish", "nope", "send_text_message", "channels_list", ""]),
        st.sampled_from([
            "{}", '{"a": 1, "b": 2}', '{"a": "x"}', "[1", "", "null", '{"reason": "r"}', '{"target_agent_id": "mia", "text": "hi"}',
        ]),
    ),
    max_size=5,
)  # fmt: skip
REPLIES = st.lists(
    st.one_of(
        st.builds(lambda made: calls(made) if made else empty(), CALLS),
        st.sampled_from([empty(), text("hm", finish_reason="length"), content_filter(), text("ok"), server_error(), context_too_long()]),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


async def run_replies(replies: list[Reply]) -> None:
    """Run an agent on these replies. The provider refuses a history with unpaired calls or results with 400."""
    async with asyncio.timeout(20), Network.open() as network, Provider(in_turn(tuple(replies), "native")) as server:
        mia, heard = await Person.join(network, "mia"), Heard()
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=server.model(), tools=TOOLS, policy=POLICY, on_event=heard
        )
        async with running(network, bob):
            await mia.client.send_text("bob", "go")
            [end] = await heard.finished()
            await until_recorded(mia, end.reaction, "finished")
        assert end.turns <= POLICY.max_turns
        wrong = [it.body for it in server.received if it.status == 400]
        assert len(wrong) <= sum(reply.status == 400 for reply in replies) + (replies[-1].status == 400) * 6


UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(UNHURRIED, max_examples=40)
@given(replies=REPLIES)
def test_whatever_a_model_replies_the_run_ends_and_every_history_is_valid(replies: list[Reply]) -> None:
    asyncio.run(run_replies(replies))


@pytest.mark.full
@pytest.mark.timeout(600)
@settings(UNHURRIED, max_examples=500)
@given(replies=REPLIES)
def test_whatever_a_model_replies_500_runs_end_and_every_history_is_valid(replies: list[Reply]) -> None:
    asyncio.run(run_replies(replies))
