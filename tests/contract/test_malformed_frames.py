"""Tests of invalid frames after `welcome`: each gets one `error` or a close code, changes nothing, and nobody else is
affected.

The rules are in docs/protocol/errors.md. All rows share one node, so that damage by one row is visible to the next.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.support.node import Node, running_node
from tests.support.wire import WireSession, expect_error, hello_frame, new_id

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_FRAME_BYTES = 256 * 1024
OVER_2_53 = 2**53
ABSENT = object()
SENDABLE = {"type": "send", "message_id": "bad-empty-key", "to": "agent:bob", "content": "x"}


@dataclass
class Room:
    """The sender of invalid frames, and two participants that must not be affected."""

    node: Node
    sender: WireSession
    witness: WireSession
    person: WireSession

    async def head(self) -> int:
        head: int = (await self.witness.call("network.info"))["head"]
        return head


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def room() -> AsyncIterator[Room]:
    async with running_node(limits={"root_messages_per_s": 100_000}) as node:
        yield Room(node, await node.agent("alice"), await node.agent("bob"), await node.person("mia"))


@dataclass(frozen=True)
class Row:
    """A frame as text, the code of its `error`, and the ID in the error (None means no particular ID)."""

    name: str
    raw: str
    code: str = "invalid_frame"
    request_id: str | None = None


def changed(name: str, base: dict[str, Any], code: str, fields: dict[str, Any]) -> Row:
    """Return `base` with some fields replaced, added, or removed (ABSENT). The error must name the ID unless the ID
    was changed.
    """
    frame = {key: value for key, value in (base | fields).items() if value is not ABSENT}
    id_field = next(field for field in (*_ID_FIELDS, "") if field in base or not field)
    request_id = base[id_field] if id_field and id_field not in fields else None
    return Row(f"{base['type']}_{name}", json.dumps(frame), code, request_id)


_ID_FIELDS = ("message_id", "call_id", "record_id")


def send(name: str, code: str = "invalid_frame", **fields: Any) -> Row:
    base = {"type": "send", "message_id": new_id("bad"), "to": "agent:bob", "content": "x"}
    return changed(name, base, code, fields)


def ack(name: str, code: str = "invalid_frame", **fields: Any) -> Row:
    return changed(name, {"type": "ack", "seq": 1}, code, fields)


def nack(name: str, code: str = "invalid_frame", **fields: Any) -> Row:
    return changed(name, {"type": "nack", "seq": 1, "reason": "no"}, code, fields)


def call(name: str, code: str = "invalid_frame", **fields: Any) -> Row:
    return changed(name, {"type": "call", "call_id": new_id("bad"), "op": "network.info", "args": {}}, code, fields)


def record(name: str, code: str = "invalid_frame", **fields: Any) -> Row:
    base = {"type": "record", "record_id": new_id("bad"), "reaction": "r1", "kind": "started", "body": {}}
    return changed(name, base, code, fields)


def signal(name: str, code: str = "invalid_frame", **fields: Any) -> Row:
    return changed(name, {"type": "signal", "to": "agent:bob", "kind": "typing", "body": {}}, code, fields)


def content(name: str, raw_content: str) -> Row:
    """Return a `send` with raw content, which may be invalid JSON. The fields before are readable, so the error names
    the frame's ID.
    """
    message_id = new_id("bad")
    raw = f'{{"type":"send","message_id":"{message_id}","to":"agent:bob","content":{raw_content}}}'
    return Row(f"content_{name}", raw, request_id=message_id)


def body_first(name: str, kind: str, id_field: str, body_field: str, raw_body: str) -> Row:
    """Return a frame whose ID comes after the invalid part."""
    request_id = new_id("bad")
    return Row(
        f"{name}_before_the_{id_field}",
        f'{{"{body_field}": {raw_body}, "{id_field}": "{request_id}", "type": "{kind}"}}',
        request_id=request_id,
    )


FRAMES = [
    Row("nothing", ""),
    Row("blanks", "  \n"),
    Row("null", "null"),
    Row("number", "5"),
    Row("true", "true"),
    Row("string", '"send"'),
    Row("array", "[]"),
    Row("array_of_a_frame", '[{"type":"bye"}]'),
    Row("empty_object", "{}"),
    Row("type_missing", '{"message_id":"m","to":"agent:bob","content":1}'),
    Row("type_number", '{"type":5}'),
    Row("type_null", '{"type":null}'),
    Row("type_list", '{"type":["bye"]}'),
    Row("type_upper_case", '{"type":"Bye"}'),
    Row("type_with_blank", '{"type":"bye "}'),
    Row("type_unknown", '{"type":"subscribe"}'),
    Row("truncated", '{"type":"send","message_id":"m"', request_id="m"),
    Row("text_after_the_object", '{"type":"bye"} x'),
    Row("two_objects", '{"type":"bye"}{"type":"bye"}'),
    Row("byte_order_mark", '\ufeff{"type":"bye"}'),
    Row("single_quotes", "{'type':'bye'}"),
    Row("comment", '{"type":"bye"/*now*/}'),
    Row("trailing_comma", '{"type":"bye",}'),
    Row("unquoted_key", '{type:"bye"}'),
    Row("key_not_a_string", '{"type":"bye",1:2}'),
    *(
        Row(f"hub_frame_{name}", json.dumps({"type": name}))
        for name in ("welcome", "stored", "deliver", "result", "error", "presence", "notice")
    ),
    Row("second_hello", json.dumps(hello_frame("alice", token="t" * 43))),
    Row("bye_with_a_field", '{"type":"bye","reason":"tired"}'),
]

CONTENTS = [
    content("NaN", "NaN"),
    content("Infinity", "Infinity"),
    content("minus_Infinity", "-Infinity"),
    content("NaN_deep_inside", '{"a":[1,{"b":NaN}]}'),
    content("raw_newline_in_string", '"a\nb"'),
    content("raw_nul_in_string", '"a\0b"'),
    content("raw_tab_in_key", '{"a\tb":1}'),
    content("unknown_escape", '"\\q"'),
    content("half_unicode_escape", '"\\u12"'),
    content("unclosed_string", '"abc'),
    content("leading_zero", "01"),
    content("leading_plus", "+1"),
    content("bare_fraction", ".5"),
    content("unfinished_fraction", "1."),
    content("unfinished_exponent", "1e"),
    content("lone_minus", "-"),
    content("hexadecimal", "0x10"),
    content("half_a_word", "tru"),
    content("capital_word", "True"),
    content("undefined", "undefined"),
    content("comma_at_the_end_of_a_list", "[1,]"),
    content("list_without_commas", "[1 2]"),
    content("value_missing", '{"a":}'),
    content("key_without_quotes", "{a:1}"),
    content("brackets_crossed", "[{]}"),
    content("empty", ""),
    content("lone_high_surrogate", '"\\ud800"'),
    content("lone_low_surrogate", '"\\udc00"'),
    content("surrogates_reversed", '"\\udc00\\ud800"'),
    content("surrogate_then_letter", '"\\uD800A"'),
    content("two_high_surrogates", '"\\ud83d\\ud83d\\ude00"'),
    content("surrogate_after_a_backslash", '"\\\\\\ud800"'),
    content("surrogate_in_a_key", '{"\\udfff":1}'),
    content("surrogate_deep_inside", '[[{"a":["x","\\udabc"]}]]'),
    content("too_deep_lists", "[" * 65 + "]" * 65),
    content("too_deep_objects", '{"a":' * 65 + "1" + "}" * 65),
    content("one_level_too_deep", "[" * 64 + "]" * 64),  # the frame itself is the first of 64 levels
    content("absurdly_deep", "[" * 100_000 + "]" * 100_000),
    content("absurdly_deep_and_never_closed", "[" * 100_000),
    content("raw_tab_in_string", '"a\tb"'),
    content("quotes_that_never_end", '"' + '\\"' * 1000),
    body_first("tab_in_content", "send", "message_id", "content", '"a\tb"'),
    body_first("deep_content", "send", "message_id", "content", "[" * 65 + "]" * 65),
    body_first("an_id_inside_content", "send", "message_id", "content", '{"message_id":"inner","x":[NaN]}'),
    body_first("deep_args", "call", "call_id", "args", '{"a":' * 65 + "1" + "}" * 65),
    body_first("tab_in_a_body", "record", "record_id", "body", '{"text":"a\tb"}'),
]

SENDS = [
    send("message_id_missing", message_id=ABSENT),
    send("message_id_null", message_id=None),
    send("message_id_number", message_id=5),
    send("message_id_true", message_id=True),
    send("message_id_object", message_id={}),
    send("message_id_empty", message_id=""),
    send("message_id_129_chars", message_id="m" * 129),
    send("message_id_space", message_id="a b"),
    send("message_id_tab", message_id="a\tb"),
    send("message_id_newline_at_the_end", message_id="ab\n"),
    send("message_id_nul", message_id="a\0b"),
    send("message_id_delete", message_id="a\x7fb"),
    send("message_id_non_ascii", message_id="é"),
    send("message_id_surrogate", message_id="\ud800"),
    send("to_missing", to=ABSENT),
    send("to_null", to=None),
    send("to_number", to=5),
    send("to_list", to=["agent:bob"]),
    send("to_empty", to=""),
    send("to_bare_id", to="bob"),
    send("to_no_id", to="agent:"),
    send("to_no_kind", to=":bob"),
    send("to_upper_case_id", to="agent:Bob"),
    send("to_upper_case_kind", to="Agent:bob"),
    send("to_id_of_65_chars", to="agent:" + "b" * 65),
    send("to_leading_dash", to="agent:-bob"),
    send("to_trailing_blank", to="agent:bob "),
    send("to_trailing_newline", to="agent:bob\n"),
    send("to_nul", to="agent:bob\0"),
    send("to_two_colons", to="agent:bob:x"),
    send("to_unknown_place", to="human:bob"),
    send("to_thread", to="thread:5"),
    send("to_direct_thread", to="direct:alice~bob"),
    send("to_broadcast_with_id", to="broadcast:all"),
    send("to_channel_without_name", to="channel:"),
    send("to_channel_upper_case", to="channel:Dev"),
    send("to_channel_hash", to="channel:#dev"),
    send("to_mod_without_id", to="mod:"),
    send("to_surrogate", to="agent:\ud800"),
    send("content_missing", content=ABSENT),
    send("text_representation_number", text_representation=5),
    send("text_representation_list", text_representation=["x"]),
    send("text_representation_surrogate", text_representation="\udead"),
    send("reply_to_string", reply_to="1"),
    send("reply_to_true", reply_to=True),
    send("reply_to_fraction", reply_to=1.5),
    send("reply_to_list", reply_to=[1]),
    send("reply_to_negative", reply_to=-1),
    send("reply_to_2_53", reply_to=OVER_2_53),
    send("reply_to_2_64", reply_to=2**64),
    send("reply_to_10_400", reply_to=10**400),
    send("cause_string", cause="1"),
    send("cause_false", cause=False),
    send("cause_fraction", cause=0.5),
    send("cause_object", cause={"seq": 1}),
    send("cause_negative", cause=-5),
    send("cause_2_53", cause=OVER_2_53),
    send("exclude_with_an_agent", exclude_agent_ids=["carol"]),
    send("exclude_with_a_channel", to="channel:dev", exclude_agent_ids=["carol"]),
    send("exclude_string", to="broadcast", exclude_agent_ids="carol"),
    send("exclude_object", to="broadcast", exclude_agent_ids={"carol": True}),
    send("exclude_numbers", to="broadcast", exclude_agent_ids=[1]),
    send("exclude_null_inside", to="broadcast", exclude_agent_ids=[None]),
    send("exclude_bad_id", to="broadcast", exclude_agent_ids=["Carol"]),
    send("exclude_address", to="broadcast", exclude_agent_ids=["agent:bob"]),
    send("requires_response_string", requires_response="yes"),
    send("requires_response_number", requires_response=1),
    send("requires_response_object", requires_response={}),
    send("requires_response_numbers", requires_response=[1]),
    send("requires_response_bad_id", requires_response=["bob!"]),
    send("metadata_string", metadata="x"),
    send("metadata_list", metadata=[]),
    send("metadata_number", metadata=5),
    send("metadata_surrogate", metadata={"a": "\ud800"}),
    send("metadata_too_deep", metadata=json.loads('{"a":' * 64 + "1" + "}" * 64)),
    send("hub_owned_seq", seq=1),
    send("hub_owned_kind", kind="direct"),
    send("hub_owned_sender_id", sender_id="bob"),
    send("hub_owned_sender_kind", sender_kind="human"),
    send("hub_owned_thread_id", thread_id="broadcast"),
    send("hub_owned_root", root=1),
    send("hub_owned_hops", hops=0),
    send("hub_owned_sent_at", sent_at=1),
    send("hub_owned_attempt", attempt=1),
    send("hub_owned_duplicate", duplicate=True),
    send("hub_owned_session_id", session_id="s"),
    send("hub_owned_fence", fence=1),
    send("unlisted_field", colour="red"),
    changed("unlisted_empty_key", SENDABLE, "invalid_frame", {"": 1}),
    send("field_of_another_frame", args={}),
    send("upper_case_field", To="agent:bob"),
]

ACKS = [
    ack("seq_missing", seq=ABSENT),
    ack("seq_null", seq=None),
    ack("seq_string", seq="1"),
    ack("seq_true", seq=True),
    ack("seq_fraction", seq=0.5),
    ack("seq_list", seq=[1]),
    ack("seq_negative", seq=-1),
    ack("seq_2_53", seq=OVER_2_53),
    ack("seq_2_64", seq=2**64),
    ack("only_string", only="yes"),
    ack("only_number", only=1),
    ack("unlisted_field", reason="done"),
    ack("above_the_highest_delivered", "invalid_arguments", seq=OVER_2_53 - 1),
    ack("only_above_the_highest_delivered", "invalid_arguments", seq=OVER_2_53 - 1, only=True),
    nack("seq_missing", seq=ABSENT),
    nack("seq_string", seq="1"),
    nack("seq_true", seq=True),
    nack("seq_negative", seq=-1),
    nack("seq_2_53", seq=OVER_2_53),
    nack("reason_missing", reason=ABSENT),
    nack("reason_number", reason=5),
    nack("reason_null", reason=None),
    nack("retry_after_string", retry_after_ms="soon"),
    nack("retry_after_true", retry_after_ms=True),
    nack("retry_after_fraction", retry_after_ms=1.5),
    nack("retry_after_negative", retry_after_ms=-5),
    nack("unlisted_field", only=True),
    nack("of_something_never_delivered", "invalid_arguments", seq=OVER_2_53 - 1),
]

CALLS = [
    call("call_id_missing", call_id=ABSENT),
    call("call_id_number", call_id=5),
    call("call_id_empty", call_id=""),
    call("call_id_129_chars", call_id="c" * 129),
    call("call_id_space", call_id="a b"),
    call("call_id_non_ascii", call_id="ß"),
    call("op_missing", op=ABSENT),
    call("op_number", op=5),
    call("op_null", op=None),
    call("args_missing", args=ABSENT),
    call("args_null", args=None),
    call("args_list", args=[]),
    call("args_string", args="{}"),
    call("args_surrogate", args={"x": "\ud800"}),
    call("unlisted_field", to="agent:bob"),
    call("sender_forged", sender_id="bob"),
    call("op_unknown", "unknown_operation", op="network.explode"),
    call("op_of_an_unknown_mod", "unknown_operation", op="nothing.list"),
    call("op_private", "unknown_operation", op="network.__init__"),
    call("args_unlisted", "invalid_arguments", args={"colour": "red"}),
    call("args_of_another_type", "invalid_arguments", op="network.history", args={"thread_id": 5}),
    call("args_incomplete", "invalid_arguments", op="network.history"),
    call("args_out_of_range", "invalid_arguments", op="network.history", args={"thread_id": "broadcast", "limit": 501}),
    call("args_negative", "invalid_arguments", op="network.history", args={"thread_id": "broadcast", "limit": -1}),
    call("args_watch_string", "invalid_arguments", op="network.watch", args={"presence": "yes"}),
]

RECORDS = [
    record("record_id_missing", record_id=ABSENT),
    record("record_id_number", record_id=5),
    record("record_id_empty", record_id=""),
    record("record_id_129_chars", record_id="r" * 129),
    record("record_id_space", record_id="a b"),
    record("reaction_missing", reaction=ABSENT),
    record("reaction_number", reaction=5),
    record("kind_missing", kind=ABSENT),
    record("kind_number", kind=5),
    record("body_missing", body=ABSENT),
    record("body_surrogate", body={"x": "\udfff"}),
    record("unlisted_field", to="agent:bob"),
    record("hub_owned_seq", seq=5),
    record("agent_forged", agent_id="bob"),
]

SIGNALS = [
    signal("nowhere", to=ABSENT),
    signal("to_number", to=5),
    signal("to_malformed", to="bob"),
    signal("thread_id_number", to=ABSENT, thread_id=5),
    signal("kind_missing", kind=ABSENT),
    signal("kind_number", kind=5),
    signal("kind_unknown", kind="shouting"),
    signal("body_missing", body=ABSENT),
    signal("body_surrogate", body="\ud800"),
    signal("unlisted_field", seq=1),
    signal("sender_forged", sender_id="bob"),
    signal("unknown_thread", "unknown_message", to=ABSENT, thread_id="thread:12345"),
    signal("thread_of_others", "unknown_message", to=ABSENT, thread_id="direct:bob~mia"),
]

ROWS = [*FRAMES, *CONTENTS, *SENDS, *ACKS, *CALLS, *RECORDS, *SIGNALS]


async def test_the_table_is_long_enough_and_its_names_differ() -> None:
    assert len(ROWS) >= 60
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_a_wrong_frame_gets_one_error_and_changes_nothing(room: Room, row: Row) -> None:
    head = await room.head()
    await room.sender.send_raw(row.raw)
    error = expect_error(await room.sender.next_frame(), row.code)
    if row.request_id is not None:
        assert row.request_id in (error.get("message_id"), error.get("call_id"), error.get("record_id"))
    await room.sender.settle()  # the session is still open
    assert room.sender.unread == []  # the sender got only one error
    assert await room.head() == head  # another session is open too, and nothing was stored
    assert room.witness.unread == []


async def test_a_binary_frame_is_an_invalid_frame(room: Room) -> None:
    head = await room.head()
    frame = {"type": "send", "message_id": new_id(), "to": "agent:bob", "content": "x"}
    await room.sender.send_raw(json.dumps(frame).encode(), text=False)
    expect_error(await room.sender.next_frame(), "invalid_frame")
    await room.sender.settle()
    assert await room.head() == head


async def test_a_refused_message_id_is_free_again_after_each_kind_of_refusal(room: Room) -> None:
    message_id = new_id("free")
    for wrong in ({"colour": "red"}, {"to": "agent:nobody-here"}, {"cause": 2**50}, {"reply_to": "x"}):
        answer = await room.sender.submit(**{"to": "agent:bob", "content": "x", "message_id": message_id} | wrong)
        assert answer["type"] == "error"
        assert answer["message_id"] == message_id
    stored = await room.sender.send("agent:bob", "at last", message_id=message_id)
    assert stored["duplicate"] is False
    await room.witness.message("at last")


# -- frames that end the connection

OVERSIZED = {
    "in_one_frame": [b'{"type":"bye"}' + b" " * MAX_FRAME_BYTES],
    "in_fragments": [b'{"type":"bye"}', *[b" " * 1024] * 256],
    "one_byte_over": [b" " * (MAX_FRAME_BYTES + 1)],
    "ten_times_over": [b"x" * MAX_FRAME_BYTES * 10],
}


@pytest.mark.parametrize("parts", OVERSIZED.values(), ids=OVERSIZED.keys())
async def test_a_frame_too_large_is_closed_with_4413_and_no_error(room: Room, parts: list[bytes]) -> None:
    head = await room.head()
    session = await room.node.agent("alice")
    await session.send_raw(parts if len(parts) > 1 else parts[0])
    assert await session.rest() == []
    assert await session.closed() == 4413
    await room.sender.settle()  # the participant's other session is still open
    assert await room.head() == head


BAD_UTF8 = {
    "in_content": b'{"type":"send","message_id":"u1","to":"agent:bob","content":"\xff"}',
    "deep_in_content": b'{"type":"send","message_id":"u2","to":"agent:bob","content":[{"a":"ok \xc3("}]}',
    "encoded_surrogate": b'{"type":"send","message_id":"u3","to":"agent:bob","content":"\xed\xa0\x80"}',
    "overlong_slash": b'{"type":"send","message_id":"u4","to":"agent:bob","content":"\xc0\xaf"}',
    "cut_off_at_the_end": b'{"type":"send","message_id":"u5","to":"agent:bob","content":"\xe2\x82"}',
    "in_metadata": b'{"type":"send","message_id":"u6","to":"agent:bob","content":1,"metadata":{"a":"\xfe"}}',
    "in_a_key": b'{"type":"send","message_id":"u7","to":"agent:bob","content":{"\x80":1}}',
    "in_the_head": b'{"type":"send","message_id":"\xff","to":"agent:bob","content":1}',
    "latin_1": '{"type":"send","message_id":"u8","to":"agent:bob","content":"é"}'.encode("latin-1"),
}


@pytest.mark.parametrize("raw", BAD_UTF8.values(), ids=BAD_UTF8.keys())
async def test_invalid_utf8_is_closed_with_1007(room: Room, raw: bytes) -> None:
    head = await room.head()
    session = await room.node.agent("alice")
    await session.send_raw(raw)
    assert await session.closed() == 1007
    await room.sender.settle()
    assert await room.head() == head


# -- unusual but valid frames


async def echo(room: Room, raw: str | bytes | list[bytes], message_id: str) -> str:
    """Send one raw frame to bob, check that it is stored, and return the raw `deliver` frame."""
    await room.sender.send_raw(raw)
    answer = await room.sender.answer(message_id)
    assert answer["type"] == "stored", answer
    delivery = await room.witness.delivery()
    assert delivery["message"]["seq"] == answer["seq"]
    return delivery.raw


ODD_CONTENTS = {
    "null": "null",
    "false": "false",
    "zero": "0",
    "empty_string": '""',
    "empty_list": "[]",
    "empty_object": "{}",
    "inner_blanks": '{ "a" : [ 1 , 2 ] }',
    "number_spelled_out": "1.50e+2",
    "huge_integer": "9" * 400,
    "longest_number": "9" * 1000,
    "longest_numbers": f"[{'9' * 1000},{'-' + '1' * 999},{'0.' + '3' * 998}]",
    "digits_in_a_string": f'"{"9" * 5000}"',
    "digits_behind_an_escaped_quote": f'["\\\\\\"{"9" * 5000}"]',
    "digits_in_a_name": f'{{"{"9" * 5000}":1}}',
    "duplicate_keys": '{"a":1,"a":2}',
    "escaped_letters": '"\\u0041\\/"',
    "surrogate_pair": '"\\ud83d\\ude00"',
    "escaped_backslash_before_u": '"\\\\ud800"',
    "escaped_nul": '"a\\u0000b"',
    "emoji": '"\U0001f600"',
    "line_separator": '"\u2028"',
    "the_deepest_allowed": "[" * 63 + "]" * 63,
    "like_a_frame": '{"type":"bye","seq":1,"sender_id":"mia"}',
    "like_an_end": '"}}]"',
}


@pytest.mark.parametrize("raw_content", ODD_CONTENTS.values(), ids=ODD_CONTENTS.keys())
async def test_content_is_carried_as_it_came(room: Room, raw_content: str) -> None:
    message_id = new_id("odd")
    raw = f'{{"type":"send","message_id":"{message_id}","to":"agent:bob","content":{raw_content}}}'
    assert raw_content in await echo(room, raw, message_id)


LONG_NUMBERS = {
    "just_too_long": "9" * 1001,
    "integer": "1" * 5000,
    "negative": "-" + "1" * 1000,
    "fraction": "0." + "3" * 5000,
    "exponent": "1e" + "1" * 5000,
    "inside": f'{{"a":["text",{{"b":[1,{"7" * 1001}]}}]}}',
    "behind_escapes": f'["\\\\","\\"",{"7" * 1001}]',
    "long_frame": f'["{"x" * 20000}",{"7" * 1001},"{"x" * 20000}"]',
}


@pytest.mark.parametrize("number", LONG_NUMBERS.values(), ids=LONG_NUMBERS.keys())
async def test_a_number_that_readers_refuse_is_refused_wherever_it_stands(room: Room, number: str) -> None:
    """docs/protocol.md allows at most 1,000 characters for a number, because others read the numbers in a message, a
    record or a call.
    """
    head = await room.head()
    frames = [
        '{"type":"send","message_id":"%s","to":"agent:bob","content":NUMBER}',
        '{"type":"send","message_id":"%s","to":"agent:bob","content":1,"metadata":{"n":NUMBER}}',
        '{"type":"send","message_id":"%s","to":"agent:bob","content":1,"reply_to":NUMBER}',
        '{"type":"record","record_id":"%s","reaction":"r","kind":"note","body":NUMBER}',
        '{"type":"call","call_id":"%s","op":"network.info","args":{"n":NUMBER}}',
    ]
    for frame in frames:
        request_id = new_id("long")
        await room.sender.send_raw((frame % request_id).replace("NUMBER", number))
        error = expect_error(await room.sender.answer(request_id), "invalid_frame")
        assert "1000 characters" in error["message"]
    await room.sender.send_raw(
        '{"type":"signal","to":"agent:bob","kind":"typing","body":NUMBER}'.replace("NUMBER", number)
    )
    error = await room.sender.expect("error", code="invalid_frame")
    assert "1000 characters" in error["message"]
    assert await room.head() == head


async def test_metadata_is_carried_as_it_came(room: Room) -> None:
    message_id, metadata = new_id("odd"), '{ "seq":1, "seq":2.0, "sender_id":"mia" }'
    raw = f'{{"type":"send","message_id":"{message_id}","to":"agent:bob","content":1,"metadata":{metadata}}}'
    assert metadata in await echo(room, raw, message_id)


async def test_the_last_of_a_duplicated_key_counts(room: Room) -> None:
    message_id = new_id("odd")
    raw = (
        f'{{"type":"bye","message_id":"{new_id()}","to":"agent:mia","content":"first","type":"send",'
        f'"message_id":"{message_id}","to":"agent:bob","content":"last"}}'
    )
    assert json.loads(await echo(room, raw, message_id))["message"]["content"] == "last"


async def test_a_duplicated_key_may_be_wrong_the_first_time(room: Room) -> None:
    message_id = new_id("odd")
    raw = f'{{"type":"send","to":5,"content":1,"message_id":"{message_id}","to":"agent:bob"}}'
    await echo(room, raw, message_id)


async def test_escaped_names_are_the_names_they_spell(room: Room) -> None:
    message_id = new_id("odd")
    raw = f'{{"\\u0074ype":"s\\u0065nd","message_id":"{message_id}","to":"agent:\\u0062ob","content":1}}'
    await echo(room, raw, message_id)


async def test_blanks_around_a_frame_are_legal(room: Room) -> None:
    message_id = new_id("odd")
    await echo(
        room, f' \n{{ "type" : "send", "message_id":"{message_id}",\t"to":"agent:bob","content":1}}\r\n ', message_id
    )


async def test_a_fragmented_text_message_is_legal(room: Room) -> None:
    message_id = new_id("odd")
    raw = f'{{"type":"send","message_id":"{message_id}","to":"agent:bob","content":"häppchen €"}}'.encode()
    # This split also cuts multi-byte characters.
    await echo(room, [raw[i : i + 1] for i in range(len(raw))], message_id)


async def test_a_frame_of_exactly_the_largest_size_is_legal(room: Room) -> None:
    message_id = new_id("odd")
    head, tail = f'{{"type":"send","message_id":"{message_id}","to":"agent:bob","content":"', '"}'
    filling = "x" * (MAX_FRAME_BYTES - len(head) - len(tail))
    assert filling in await echo(room, head + filling + tail, message_id)


@pytest.mark.parametrize("message_id", ["!", "~", "m" * 128, "a/b:c#d", '"\\quoted\\"'])
async def test_a_message_id_is_any_visible_ascii(room: Room, message_id: str) -> None:
    stored = await room.sender.send("agent:bob", "x", message_id=message_id)
    assert stored["message_id"] == message_id
    assert (await room.witness.message("x"))["message_id"] == message_id


async def test_everybody_is_still_there_after_all_of_it(room: Room) -> None:
    await room.sender.send("broadcast", "the end")
    await room.witness.message("the end")
    assert "the end" not in await room.person.contents_until("the end")
