"""Tests of tools: the schema that a model gets for a function, the validation of arguments, and the result of a call."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import date
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import AfterValidator, BaseModel, Field

from roundelay.agents.models.model import ToolSpec
from roundelay.agents.network_tools import communication_tools, mod_tools
from roundelay.agents.tools import Tool, ToolContext, as_tool, index_tools, load_tool, tool
from roundelay.agents.values import ToolArgumentsError, ToolError
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import ModInfo, OperationInfo
from roundelay.network.messages import DirectMessage
from tests.support.openai_rules import find_refusal

TRIGGER = DirectMessage(
    seq=1, message_id="m", sender_id="mia", sender_kind="human", to="agent:bob", thread_id="direct:bob~mia", root=1,
    hops=0, sent_at=0, content="hi",
)  # fmt: skip


class Point(BaseModel):
    x: int
    y: int = 0


class Pair(NamedTuple):
    left: int
    right: int


def context_of(client: NetworkClient | None = None, trigger: Any = TRIGGER, call_id: str = "call-1") -> ToolContext:
    return ToolContext("bob", "r1", 1, call_id, trigger, client)  # type: ignore[arg-type]


async def run(made: Tool, arguments: str, context: ToolContext | None = None) -> str:
    return await made.call(context or context_of(), made.parse(arguments))


# Schemas for the model


@tool(idempotent=True, timeout_s=3.5)
async def book(
    context: ToolContext,
    day: date,
    seats: Annotated[int, Field(ge=1, le=9, description="How many")],
    where: Literal["window", "aisle"] = "aisle",
    points: list[Point] | None = None,
    schema: str = "a",
    model_id: str = "b",
    _private: bool = False,
) -> str:
    """Book seats.

    For a day.
    """
    return f"{context.agent_id} {day:%d.%m.%Y} {seats} {where} {points} {schema} {model_id} {_private}"


def test_a_function_becomes_a_schema_without_its_context() -> None:
    assert (book.name, book.description, book.effect, book.timeout_s) == (
        "book",
        "Book seats.\n\nFor a day.",
        "idempotent",
        3.5,
    )
    schema: Any = book.parameters
    assert list(schema["properties"]) == ["day", "seats", "where", "points", "schema", "model_id", "_private"]
    assert schema["properties"]["seats"] == {"description": "How many", "maximum": 9, "minimum": 1, "type": "integer"}
    assert schema["properties"]["where"]["enum"] == ["window", "aisle"]
    assert schema["required"] == ["day", "seats"]
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    assert '"title"' not in json.dumps(schema)
    assert book.spec == ToolSpec("book", book.description, book.parameters)


def test_a_tool_is_once_unless_it_says_idempotent() -> None:
    assert as_tool(lambda_like).effect == "once"
    assert tool(once=True)(lambda_like).effect == "once"
    assert tool(idempotent=True)(lambda_like).effect == "idempotent"
    assert tool(read_only=True)(lambda_like).effect == "read_only"
    with pytest.raises(ToolError, match="either once, idempotent or read_only"):
        tool(once=True, idempotent=True)


def lambda_like(n: int) -> int:
    """Double it."""
    return 2 * n


def test_the_decorated_function_can_still_be_called() -> None:
    assert tool(lambda_like).function is lambda_like


def nothing() -> None:
    """Do nothing."""


def everything(a: dict[str, Any], b: tuple[int, str], c: Any, d: list[Any], e: Pair, f: float | None = None) -> None:
    """Take all sorts."""


def titled(title: str, default: int = 3, properties: list[str] | None = None) -> None:
    """Take parameters that are named like keywords."""


@pytest.mark.parametrize("function", [lambda_like, nothing, everything, titled, book])
def test_a_strict_server_takes_every_schema(function: Callable[..., object]) -> None:
    spec = as_tool(function).spec
    described = {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": described}],
    }
    assert find_refusal(body) is None


def test_parameters_named_like_keywords_stay() -> None:
    schema: Any = as_tool(titled).parameters
    assert set(schema["properties"]) == {"title", "default", "properties"}
    assert schema["properties"]["default"] == {"default": 3, "type": "integer"}


def untyped(a):  # type: ignore[no-untyped-def]
    """Say no type."""


def starred(*names: str) -> None:
    """Take any number."""


def doubly_starred(**names: str) -> None:
    """Take any names."""


def positional(a: int, /) -> None:
    """Take no names."""


def unresolved(a: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Name an unknown type."""


def callback(a: threading.Lock) -> None:
    """Take what JSON cannot hold."""


@pytest.mark.parametrize("function", [untyped, starred, doubly_starred, positional, unresolved, callback])
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function: Callable[..., object]) -> None:
    with pytest.raises(ToolError, match=function.__name__):
        tool(function)


@pytest.mark.parametrize("name", ["has space", "ünï", "a" * 65, "channels.join", "<lambda>"])
def test_a_name_that_no_server_takes_is_refused(name: str) -> None:
    with pytest.raises(ToolError, match="is not a valid name of a tool"):
        tool(name=name)(lambda_like)


def test_two_tools_of_one_name_are_refused() -> None:
    assert list(index_tools([lambda_like, book])) == ["lambda_like", "book"]
    with pytest.raises(ToolError, match="Two tools are named book"):
        index_tools([book, tool(name="book")(lambda_like)])


# Arguments


async def test_arguments_are_validated_and_converted() -> None:
    text = '{"day": "2026-03-01", "seats": 2, "points": [{"x": "1"}], "schema": "s", "model_id": "m", "_private": true}'
    assert await run(book, text) == "bob 01.03.2026 2 aisle [Point(x=1, y=0)] s m True"


@pytest.mark.parametrize("text", ["", "{}", "  \n"])
async def test_no_arguments_may_be_written_in_any_way(text: str) -> None:
    assert await run(tool(nothing), text) == "null"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"day": "2026-03-01", "seats": 2', "not valid JSON: EOF while parsing an object at line 1 column 32"),
        ("seats=2", "not valid JSON: expected value at line 1 column 1"),
        ("[1]", "must be one JSON object"),
        ('"text"', "must be one JSON object"),
        ('{"day": "2026-03-01"}', "seats: Field required"),
        ('{"day": "2026-03-01", "seats": "many"}', "seats: Input should be a valid integer"),
        ('{"day": "2026-03-01", "seats": 0}', "greater than or equal to 1 (not 0)"),
        ('{"day": "soon", "seats": 1}', 'day: Input should be a valid date'),
        ('{"day": "2026-03-01", "seats": 1, "where": "roof"}', "where: Input should be 'window' or 'aisle' (not \"roof\")"),
        ('{"day": "2026-03-01", "seats": 1, "points": [{"y": 1}]}', "points.0.x: Field required"),
        ('{"day": "2026-03-01", "seats": 1, "colour": "red"}', "colour: Extra inputs are not permitted"),
        ('{"day": "2026-03-01", "seats": 1, "context": {}}', "context: Extra inputs are not permitted"),
        ('{"day": "2026-03-01", "seats": 1, "schema": "\\ud800"}', "not valid JSON"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_explained_with_what_is_expected(text: str, words: str) -> None:
    with pytest.raises(ToolArgumentsError) as caught:
        book.parse(text)
    sentence = str(caught.value)
    assert words in sentence
    assert sentence.startswith("Wrong arguments for book: ")
    assert 'Its parameters: day (string, required), seats (integer, required), where ("window" or "aisle"),' in sentence
    assert "pydantic" not in sentence


def test_every_wrong_argument_is_named_at_once_and_shortened() -> None:
    with pytest.raises(ToolArgumentsError) as caught:
        book.parse(json.dumps({"day": "x" * 5000, "seats": "y", "_private": []}))
    sentence = str(caught.value)
    assert all(f"{name}: " in sentence for name in ("day", "seats", "_private"))
    assert len(sentence) < 1000


# Results


@dataclasses.dataclass
class Record:
    name: str
    when: date


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is ü\n", "as it is ü\n"),
        ("", ""),
        (None, "null"),
        ({"b": [1, True, "ü"], "a": None}, '{"b":[1,true,"ü"],"a":null}'),
        (Point(x=1), '{"x":1,"y":0}'),
        (Record("a", date(2026, 3, 1)), '{"name":"a","when":"2026-03-01"}'),
        (float("nan"), '"NaN"'),
        ("lone \ud800 surrogate", "lone ? surrogate"),
    ],
)
async def test_a_result_is_text_or_compact_json(value: object, text: str) -> None:
    def give() -> object:
        return value

    assert await run(tool(give), "") == text


@pytest.mark.parametrize("value", [object(), b"\xff", {"a": threading.Lock()}], ids=["object", "bytes", "inside"])
async def test_a_result_that_is_no_json_is_a_clear_error(value: object) -> None:
    def give() -> object:
        return value

    with pytest.raises(
        ToolError, match=f"The tool give returned a {type(value).__name__}, which cannot be converted to JSON"
    ):
        await run(tool(give), "")


async def test_a_circular_result_is_a_clear_error() -> None:
    def give() -> object:
        loop: list[object] = []
        loop.append(loop)
        return loop

    with pytest.raises(ToolError, match="cannot be converted to JSON"):
        await run(tool(give), "")


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_what_a_function_raises_comes_out(kind: str) -> None:
    def sync() -> None:
        raise LookupError("no such seat")

    async def coroutine() -> None:
        raise LookupError("no such seat")

    with pytest.raises(LookupError, match="no such seat"):
        await run(tool(name="raise")(sync if kind == "sync" else coroutine), "")


async def test_a_sync_function_does_not_block_the_loop() -> None:
    released = threading.Event()

    def wait() -> str:
        return "released" if released.wait(10) else "nobody came"

    task = asyncio.create_task(run(tool(wait), ""))
    await asyncio.sleep(0)
    released.set()  # the test reaches this line only if the event loop continues
    assert await task == "released"


async def test_hung_sync_functions_neither_hold_up_others_nor_the_exit() -> None:
    released = threading.Event()
    hung = [asyncio.create_task(run(tool(name="hang")(lambda: released.wait(60)), "")) for _ in range(40)]
    async with asyncio.timeout(5):
        assert await run(tool(lambda_like), '{"n": 4}') == "8"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool-hang")
    for task in hung:
        task.cancel()
    assert all(isinstance(item, asyncio.CancelledError) for item in await asyncio.gather(*hung, return_exceptions=True))
    released.set()
    while any(thread.name == "tool-hang" for thread in threading.enumerate()):
        await asyncio.to_thread(time.sleep, 0.001)


class Mute(Exception):
    """Exception whose text is empty or cannot be formatted."""

    def __str__(self) -> str:
        raise RuntimeError


def fail(value: int) -> int:
    raise Mute


@tool
def pick(number: Annotated[int, AfterValidator(fail)]) -> int:
    """Pick."""
    return number


def test_a_check_that_fails_and_cannot_say_of_what_is_told_by_its_kind() -> None:
    with pytest.raises(ToolArgumentsError, match=r"their check failed \(Mute\)"):
        pick.parse('{"number": 5}')


# Loading


def test_a_tool_is_loaded_by_its_import_path() -> None:
    assert load_tool(f"{__name__}:book") is book
    assert load_tool(f"{__name__}:lambda_like").name == "lambda_like"


@pytest.mark.parametrize(
    "spec", ["book", "no.such.module:f", f"{__name__}:missing", f"{__name__}:TRIGGER", ":f", "json:", "json:loads"]
)
def test_a_tool_that_cannot_be_loaded_is_named(spec: str) -> None:
    with pytest.raises(ToolError) as caught:
        load_tool(spec)
    assert spec in str(caught.value) or "loads" in str(caught.value)


# Communication and the hub's operations


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open(mods=("channels", "discovery")) as opened:
        yield opened


def communication(name: str) -> Tool:
    return index_tools(communication_tools())[name]


def test_every_agent_can_send_broadcast_ask_and_finish() -> None:
    assert [(item.name, list(item.parameters["required"]), item.effect) for item in communication_tools()] == [  # type: ignore[call-overload]
        ("send_text_message", ["target_agent_id", "text"], "idempotent"),
        ("broadcast_text_message", ["text"], "idempotent"),
        ("ask", ["agent_ids", "text", "timeout_s"], "idempotent"),
        ("finish", ["reason"], "idempotent"),
    ]
    ask = communication_tools()[2]
    assert ask.parse('{"agent_ids": ["ann"], "text": "hi"}')["timeout_s"] == 300, "required of strict servers only"


@pytest.mark.parametrize("written", ["mia", "agent:mia", "@mia", " mia "])
async def test_a_direct_message_is_sent_once_and_answers_its_trigger(network: Network, written: str) -> None:
    mia, bob = await network.join("mia", kind="human"), await network.join("bob")
    await mia.send_text("bob", "hello?")
    trigger = await anext(aiter(bob))
    context = context_of(bob, trigger)
    arguments = json.dumps({"target_agent_id": written, "text": "hello!"})
    results = [await run(communication("send_text_message"), arguments, context) for _ in range(2)]
    answers = (await mia.history("direct:bob~mia")).messages[1:]
    assert [(message.text, message.reply_to, message.cause, message.message_id) for message in answers] == [
        ("hello!", trigger.seq, trigger.seq, "call-1")
    ]
    assert results[0] == results[1]


async def test_a_message_to_a_third_party_is_no_reply_but_has_its_cause(network: Network) -> None:
    mia, bob, carl = await network.join("mia", kind="human"), await network.join("bob"), await network.join("carl")
    await mia.send_text("bob", "ask carl")
    trigger = await anext(aiter(bob))
    await run(communication("send_text_message"), '{"target_agent_id": "carl", "text": "?"}', context_of(bob, trigger))
    received = await anext(aiter(carl))
    assert (received.text, received.reply_to, received.cause) == ("?", None, trigger.seq)


async def test_a_broadcast_reaches_everyone_with_its_cause(network: Network) -> None:
    mia, bob = await network.join("mia", kind="human"), await network.join("bob")
    await mia.send_text("bob", "tell all")
    trigger = await anext(aiter(bob))
    for _ in range(2):
        await run(communication("broadcast_text_message"), '{"text": "all!"}', context_of(bob, trigger))
    messages = (await mia.history("broadcast")).messages
    assert [(message.text, message.cause, message.sender_id) for message in messages] == [("all!", trigger.seq, "bob")]


async def test_operations_of_mods_are_tools(network: Network) -> None:
    mia, bob = await network.join("mia", kind="human"), await network.join("bob")
    tools = index_tools([*communication_tools(), *mod_tools(bob.welcome.mods)])
    assert {"channels_create", "channels_post", "channels_reply", "discovery_find"} <= set(tools)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in tools)
    await mia.send_text("bob", "open a channel")
    trigger = await anext(aiter(bob))
    await run(tools["channels_create"], '{"name": "dev"}', context_of(bob, trigger, "call-1"))
    for _ in range(2):
        await run(tools["channels_post"], '{"name": "dev", "text": "first"}', context_of(bob, trigger, "call-2"))
    messages = (await bob.history("channel:dev")).messages
    assert [(message.text, message.cause) for message in messages] == [("first", trigger.seq)]


async def test_agents_of_one_process_share_what_a_hub_offers(network: Network) -> None:
    """A private copy would take 25 KB for each of hundreds of agents."""
    alice, bob = await network.join("alice"), await network.join("bob")
    assert alice.welcome.mods is bob.welcome.mods
    pairs = zip(mod_tools(alice.welcome.mods), mod_tools(bob.welcome.mods), strict=True)
    assert all(one is other for one, other in pairs)


async def test_a_reply_in_a_channel_needs_no_seq(network: Network) -> None:
    mia, bob = await network.join("mia", kind="human"), await network.join("bob")
    await mia.call("channels.create", {"name": "dev"})
    await bob.call("channels.join", {"name": "dev"})
    await mia.post("dev", "question?")
    trigger = await anext(aiter(bob))
    reply = index_tools(mod_tools(bob.welcome.mods))["channels_reply"]
    assert reply.parameters["required"] == ["text"]
    assert "cause" not in reply.parameters["properties"]  # type: ignore[operator]
    await run(reply, '{"text": "answer!"}', context_of(bob, trigger))
    messages = (await mia.history(f"thread:{trigger.seq}")).messages
    assert ("answer!", trigger.seq, trigger.seq) in [(item.text, item.reply_to, item.cause) for item in messages]


async def test_the_hub_answers_wrong_types_and_the_tool_the_rest(network: Network) -> None:
    bob = await network.join("bob")
    join = index_tools(mod_tools(bob.welcome.mods))["channels_join"]
    with pytest.raises(ToolArgumentsError, match=r"name: Field required.*Its parameters: name \(string, required\)"):
        join.parse("{}")
    with pytest.raises(ToolArgumentsError, match="colour: Extra inputs are not permitted"):
        join.parse('{"name": "dev", "colour": 1}')
    with pytest.raises(ToolArgumentsError, match=r"not valid JSON.*line 1 column"):
        join.parse('{"name": ')
    with pytest.raises(ToolArgumentsError, match="one JSON object"):
        join.parse("[]")
    with pytest.raises(InvalidArguments):
        await run(join, '{"name": 3}', context_of(bob))


def test_operations_whose_names_fall_together_stay_apart() -> None:
    schema = {"type": "object", "properties": {}}
    mods = [
        ModInfo("a", [OperationInfo("a.b_c", "One", schema), OperationInfo("a_b.c", "Two", schema)]),
        ModInfo("f", [OperationInfo("finish", "Not the one", {}), OperationInfo("x." + "y" * 90, "Long", schema)]),
    ]
    tools = index_tools([*communication_tools(), *mod_tools(mods)])
    assert list(tools)[4:] == ["a_b_c", "a_b_c_2", "finish_2", "x_" + "y" * 62]
    assert tools["a_b_c_2"].description == "Two"
    assert tools["finish_2"].parameters["type"] == "object"
