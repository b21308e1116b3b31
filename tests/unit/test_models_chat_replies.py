"""Tests of replies and streams in all formats that servers send. The source of a format is next to its row."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from roundelay.agents.models.chat_replies import Draft, ErrorInside, finish_calls, read_completion
from roundelay.agents.models.event_stream import DONE, EventReader
from roundelay.agents.models.model import AssistantMessage, ModelReply, ModelRequest, ToolCall, Usage, UserMessage

TOOLS = ("get_time", "get_date", "send", "send_all")
Call = tuple[str, Any]
Delta = dict[str, Any]


def call(name: str | None = None, arguments: Any = None, **fields: Any) -> Delta:
    """Return a call in a chunk, without the fields that are None."""
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {key: it for key, it in function.items() if it is not None}}


def read(*deltas: Any, tools: tuple[str, ...] = TOOLS) -> Draft:
    draft = Draft(tools)
    for delta in deltas:
        parts = delta if isinstance(delta, list) else [delta]
        draft.add_chunk({"choices": [{"index": 0, "delta": {"tool_calls": parts}}]})
    return draft


def calls_of(draft: Draft) -> list[Call]:
    return [(it.name, it.arguments.getvalue()) for it in draft.calls]


ONE: list[Call] = [("send", '{"to": 1}')]
TWO: list[Call] = [("send", '{"to": 1}'), ("get_time", '{"in": "UTC"}')]
TWICE: list[Call] = [("send", '{"to": 1}'), ("send", '{"to": 2}')]
BARE: list[Call] = [("get_time", ""), ("get_date", "")]

STREAMS: list[tuple[str, list[Any], list[Call]]] = [
    ("OpenAI's own", [call("send", "", index=0, id="a"), call(None, '{"to"', index=0), call(None, ": 1}", index=0)], ONE),
    ("index in the first piece only", [call("send", "", index=0, id="a"), call(None, '{"to": '), call(None, "1}")], ONE),
    ("id and index in the first piece only, two calls", [
        call("send", "", index=0, id="a"), call(None, '{"to": 1}'), call("get_time", "", index=1, id="b"),
        call(None, '{"in": "UTC"}'),
    ], TWO),
    ("neither index nor id", [call("send", '{"to"'), call(None, ": 1}"), call("get_time", '{"in": "UTC"}')], TWO),
    ("neither, in one piece", [[call("send", '{"to": 1}'), call("get_time", '{"in": "UTC"}')]], TWO),
    ("neither, one tool twice", [call("send", '{"to": 1}'), call("send", '{"to": 2}')], TWICE),
    ("neither, in one piece, in parts", [
        [call("send", ""), call("get_time", "")], [call(None, '{"to": 1}'), call(None, '{"in": "UTC"}')],
    ], TWO),
    ("neither, no arguments", [call("get_time", ""), call("get_date", "")], BARE),
    ("neither, no arguments, in one piece", [[call("get_time"), call("get_date")]], BARE),
    # https://github.com/su-kaka/gcli2api/pull/406
    ("one index for all, ids", [call("send", '{"to": 1}', index=0, id="a"), call("get_time", '{"in": "UTC"}', index=0, id="b")], TWO),
    ("one index for all, ids, in parts", [
        call("send", '{"to"', index=0, id="a"), call(None, ": 1}", index=0), call("get_time", '{"in": ', index=0, id="b"),
        call(None, '"UTC"}', index=0),
    ], TWO),
    ("one index for all, no ids", [call("send", '{"to": 1}', index=0), call("send", '{"to": 2}', index=0)], TWICE),
    ("one id for all, indexes", [call("send", '{"to": 1}', index=0, id="a"), call("send", '{"to": 2}', index=1, id="a")], TWICE),
    ("one id for all, no index", [call("send", '{"to": 1}', id="a"), call("send", '{"to": 2}', id="a")], TWICE),
    ("the id again in each piece", [call("send", '{"to"', id="a"), call(None, ": 1}", id="a")], ONE),
    ("id, index and name again in each piece", [call("send", '{"to"', index=0, id="a"), call("send", ": 1}", index=0, id="a")], ONE),
    ("the name again in each piece", [call("send", ""), call("send", '{"to"'), call("send", ": 1}")], ONE),
    ("an empty id in later pieces", [call("send", '{"to"', index=0, id="a"), call("", ": 1}", index=0, id="")], ONE),
    ("the id comes last", [call("send", '{"to"', index=0), call(None, ": 1}", index=0, id="a")], ONE),
    ("the name in pieces", [call("se", index=0, id="a"), call("nd", index=0), call(None, '{"to": 1}', index=0)], ONE),
    ("the name in pieces, neither index nor id", [call("get"), call("_time"), call(None, '{"in": "UTC"}')], TWO[1:]),
    ("one tool's name begins another's", [call("send", index=0), call("_all", index=0), call(None, "{}", index=0)], [("send_all", "{}")]),
    ("interleaved", [
        call("send", '{"to"', index=0, id="a"), call("get_time", '{"in": ', index=1, id="b"), call(None, ": 1}", index=0),
        call(None, '"UTC"}', index=1),
    ], TWO),
    ("indexes from 1, with a gap", [call("send", '{"to": 1}', index=1), call("get_time", '{"in": "UTC"}', index=5)], TWO),
    ("arguments as an object", [call("send", {"to": 1}, index=0)], ONE),
    ("arguments after the name, null before", [call("send", None, index=0, id="a"), call(None, '{"to": 1}', index=0)], ONE),
    ("the whole call once more at the end", [
        call("send", '{"to"', index=0, id="a"), call(None, ": 1}", index=0), call("send", '{"to": 1}', index=0, id="a"),
    ], ONE),
    ("a piece with nothing but a signature", [
        call("send", '{"to": 1}', index=0, id="a"), {"index": 0, "extra_content": {"google": {"thought_signature": "x"}}},
    ], ONE),
    ("function null", [call("send", '{"to": 1}', index=0, id="a"), {"index": 0, "function": None}], ONE),
    ("a call null", [None, call("send", '{"to": 1}', index=0, id="a")], ONE),
    ("no function around name and arguments", [{"index": 0, "id": "a", "name": "send", "arguments": {"to": 1}}], ONE),
    ("a signature alone, without an index", [
        call("send", '{"to": 1}', id="a"), {"extra_content": {"google": {"thought_signature": "x"}}},
    ], ONE),
]  # fmt: skip


@pytest.mark.parametrize(("deltas", "wanted"), [row[1:] for row in STREAMS], ids=[row[0] for row in STREAMS])
def test_the_pieces_of_calls_are_put_together(deltas: list[Any], wanted: list[Call]) -> None:
    assert calls_of(read(*deltas)) == wanted


@pytest.mark.parametrize("seed", range(50))
def test_calls_cut_anywhere_are_the_same_calls(seed: int) -> None:
    """Calls stay separate if the server distinguishes them by index or by ID, whichever fields it repeats."""
    chance = random.Random(seed)
    made = [(chance.choice(TOOLS), json.dumps({"n": chance.randrange(9**9)})) for _ in range(chance.randrange(1, 5))]
    has_index, has_id = chance.choice([(True, True), (True, False), (False, True)])
    repeats = chance.random() < 0.5
    deltas = []
    for place, (name, arguments) in enumerate(made):
        pieces = [arguments[at : at + 4] for at in range(0, len(arguments), 4)]
        for number, piece in enumerate(pieces):
            is_head = number == 0 or repeats
            fields: Delta = {"index": place} if has_index else {}
            if has_id and is_head:
                fields["id"] = f"id{place}"
            deltas.append(call(name if is_head else None, piece, **fields))
    assert calls_of(read(*deltas)) == made


def test_signatures_and_thinking_that_come_in_pieces_are_whole() -> None:
    draft = Draft()
    blocks = [{"type": "thinking", "thinking": "I ", "signature": None}, {"type": "thinking", "thinking": "see."}]
    blocks += [{"type": "thinking", "thinking": "", "signature": "s1"}, {"type": "thinking", "thinking": "And."}]
    for block in blocks:
        draft.add_chunk({"choices": [{"delta": {"thinking_blocks": [block]}}]})
    for text in ("I ", "see."):
        detail = {"type": "reasoning.text", "text": text, "index": 0, "format": "x"}
        draft.add_chunk({"choices": [{"delta": {"reasoning": text, "reasoning_details": [detail]}}]})
    draft.add_chunk(
        {"choices": [{"delta": {"reasoning_details": [{"type": "reasoning.encrypted", "data": "e", "index": 1}]}}]}
    )
    assert draft.fields["thinking_blocks"] == [
        {"type": "thinking", "thinking": "I see.", "signature": "s1"}, {"type": "thinking", "thinking": "And."},
    ]  # fmt: skip
    assert draft.fields["reasoning_details"] == [
        {"type": "reasoning.text", "text": "I see.", "index": 0, "format": "x"},
        {"type": "reasoning.encrypted", "data": "e", "index": 1},
    ]
    assert draft.fields["reasoning"] == draft.reasoning.getvalue() == "I see."


PARTS: list[tuple[Any, str, str, str]] = [
    ("plain", "plain", "", ""),
    (None, "", "", ""),
    ([], "", "", ""),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab", "", ""),
    # https://github.com/langchain4j/langchain4j/pull/4474
    ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}], "a", "hm", ""),
    ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}], "a", "hm", ""),
    ([{"type": "reasoning", "text": "hm"}, "a"], "a", "hm", ""),
    ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, {"type": "output_text", "text": "a"}], "a", "hm", ""),
    ([{"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "a"}], "a", "", ""),
    ([{"type": "text", "text": "a"}, {"type": "reference", "reference_ids": [1, 2]}], "a", "", ""),
    ([{"type": "image_url", "image_url": {"url": "https://a/b"}}, {"type": "text", "text": "a"}], "a", "", ""),
    ([{"type": "refusal", "refusal": "No."}], "", "", "No."),
    ([{"type": "text", "text": {"value": "a", "annotations": []}}], "a", "", ""),
    ([{"text": "a"}, {"content": "b"}], "ab", "", ""),
    ([{"type": "something_new", "blob": {"x": 1}}, {"type": "text", "text": "a"}], "a", "", ""),
    ([{"type": "thinking", "thinking": "hm"}], "", "hm", ""),
    ([None, 3, {"type": "text", "text": None}, {"type": "text", "text": "a"}], "a", "", ""),
    ({"type": "text", "text": "a"}, "a", "", ""),
    ({"answer": 42}, '{"answer": 42}', "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("content", "text", "thought", "refused"), PARTS, ids=[json.dumps(it[0])[:60] for it in PARTS])
def test_content_may_be_a_list_of_parts_in_replies_and_pieces(
    content: Any, text: str, thought: str, refused: str
) -> None:
    whole = read_completion({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})
    piece = Draft()
    shown = piece.add_chunk({"choices": [{"delta": {"content": content}}]})
    for draft in (whole, piece):
        assert (draft.text.getvalue(), draft.reasoning.getvalue(), draft.refusal.getvalue()) == (text, thought, refused)
    assert "".join(it.text for it in shown) == text


def chunks_end(*choices: Any) -> Draft:
    draft = Draft()
    for choice in choices:
        draft.add_chunk({"choices": [choice] if choice is not None else []})
    return draft


def test_a_whole_message_at_the_end_of_a_stream_repeats_nothing() -> None:
    pieces = [{"delta": {"content": "He"}}, {"delta": {"content": "llo"}}]
    last = {"message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    assert chunks_end(*pieces, last).text.getvalue() == "Hello"
    assert chunks_end(last).text.getvalue() == "Hello", "a stream of one piece"


def test_other_choices_are_passed_over_in_a_stream() -> None:
    draft = chunks_end({"index": 0, "delta": {"content": "a"}}, {"index": 1, "delta": {"content": "X"}}, None)
    assert draft.text.getvalue() == "a"


@pytest.mark.parametrize("reason", [None, "", "stop"])
def test_an_empty_reason_is_no_end(reason: str | None) -> None:
    assert chunks_end({"delta": {"content": "a"}, "finish_reason": reason}).is_finished is (reason == "stop")


@pytest.mark.parametrize(
    ("reasons", "wanted"),
    [
        (["stop", "stop"], "stop"), (["length", "stop"], "length"), (["stop", "length"], "length"),
        (["tool_calls", "stop", ""], "tool_calls"), (["stop", "error"], "error"), (["content_filter", "stop"], "content_filter"),
    ],
)  # fmt: skip
def test_a_plain_stop_does_not_hide_another_reason(reasons: list[str], wanted: str) -> None:
    draft = chunks_end({"delta": {"content": "a"}}, *({"delta": {}, "finish_reason": it} for it in reasons))
    assert draft.finish_reason == wanted


def test_usage_is_read_wherever_a_stream_has_it_and_never_shrinks() -> None:
    """Kimi sends usage inside the choice: https://github.com/earendil-works/pi/issues/2017"""
    counted, nothing = {"prompt_tokens": 5, "completion_tokens": 2}, {"prompt_tokens": 0, "completion_tokens": 0}
    in_choice = chunks_end({"delta": {"content": "a"}}, {"delta": {}, "finish_reason": "stop", "usage": counted})
    early = Draft()
    for chunk in ({"choices": [], "usage": counted}, {"choices": [{"delta": {}}], "usage": nothing}, {"usage": None}):
        early.add_chunk(chunk)
    assert in_choice.usage == early.usage == Usage(5, 2)


def test_a_call_of_a_whole_reply_may_lack_its_function_or_be_null() -> None:
    given = [None, {"id": "a", "name": "send", "arguments": '{"to": 1}'}]
    assert calls_of(read_completion({"choices": [{"message": {"tool_calls": given}}]})) == ONE


CUT = [
    "length",
    "max_tokens",
    "MAX_TOKENS",
    "model_length",
    "max_output_tokens",
    "model_context_window_exceeded",
    "MAX_LENGTH",
]
WITHHELD = [
    "content_filter",
    "SAFETY",
    "safety",
    "RECITATION",
    "PROHIBITED_CONTENT",
    "BLOCKLIST",
    "guardrail_intervened",
    "sensitive",
]


@pytest.mark.parametrize("reason", CUT)
def test_a_reply_that_was_cut_is_known_by_any_name(reason: str) -> None:
    assert ModelReply("a", finish_reason=reason).is_cut
    assert not ModelReply("a", finish_reason=reason).is_withheld


@pytest.mark.parametrize("reason", WITHHELD)
def test_a_reply_that_was_withheld_is_known_by_any_name(reason: str) -> None:
    assert ModelReply("a", finish_reason=reason).is_withheld
    assert not ModelReply("a", finish_reason=reason).is_cut


@pytest.mark.parametrize("reason", ["stop", "STOP", "end_turn", "tool_calls", "eos", "refusal", "too_large"])
def test_any_other_reason_is_a_whole_reply(reason: str) -> None:
    reply = ModelReply("a", finish_reason=reason)
    assert (reply.is_cut, reply.is_withheld) == (False, False)


ERRORS: list[Any] = [
    {"error": {"message": "No capacity.", "code": 502}},
    {"error": "No capacity."},
    [{"error": {"code": 400, "message": "No."}}],
    {"choices": [], "error": {"message": "No."}},
    {"choices": [{"error": {"code": 502, "message": "No."}, "finish_reason": "error"}]},
    {"detail": "Not here."},
    {"object": "error", "message": "No.", "type": "invalid_request_error"},
    {"base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}},
    {"errors": [{"message": "No.", "code": 5006}]},
]


@pytest.mark.parametrize("body", ERRORS, ids=json.dumps)
def test_an_error_in_place_of_a_reply_is_found(body: Any) -> None:
    with pytest.raises(ErrorInside):
        read_completion(body)
    with pytest.raises(ErrorInside):
        Draft().add_chunk(body)


@pytest.mark.parametrize(
    "chunk", [{"type": "ping"}, {"status": "processing", "message": "queued"}, {"x": 1}, {}], ids=json.dumps
)
def test_a_sign_of_life_in_a_stream_is_no_error(chunk: Any) -> None:
    draft = Draft()
    assert draft.add_chunk(chunk) == []
    draft.add_chunk({"choices": [{"delta": {"content": "a"}}]})
    assert draft.text.getvalue() == "a"


def test_a_null_error_is_none() -> None:
    body = {"error": None, "choices": [{"message": {"content": "a"}, "error": None}]}
    assert read_completion(body).text.getvalue() == "a"


@pytest.mark.parametrize("given", [None, "", "used"])
def test_an_id_that_is_missing_or_used_becomes_nine_letters_or_digits_and_the_same_again(given: str | None) -> None:
    request = ModelRequest(
        (UserMessage("x"), AssistantMessage(None, (ToolCall("used", "send", "{}"),))), reaction="r", turn=2
    )
    draft = read_completion(
        {"choices": [{"message": {"tool_calls": [call("send", "{}", id=given), call("send", "{}", id=given)]}}]}
    )
    ids = [it.id for it in finish_calls(request, draft.calls)]
    assert all(len(it) == 9 and it.isascii() and it.isalnum() for it in ids)
    assert len(set(ids)) == 2
    assert ids == [it.id for it in finish_calls(request, draft.calls)]


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (json.dumps(json.dumps({"to": 1})), '{"to": 1}'), (json.dumps("to 1"), '"to 1"'), ('{"to": "{}"}', '{"to": "{}"}'),
        (json.dumps(json.dumps([1])), '"[1]"'), ('"{broken"', '"{broken"'),
    ],
)  # fmt: skip
def test_arguments_that_are_json_twice_are_read_once_more(written: str, wanted: str) -> None:
    """https://github.com/vllm-project/vllm/pull/54964"""
    draft = read_completion({"choices": [{"message": {"tool_calls": [call("send", written)]}}]})
    assert [it.arguments for it in finish_calls(ModelRequest(()), draft.calls)] == [wanted]


TAGGED: list[tuple[str, str, str]] = [
    ("<think>hm</think>a", "a", "hm"),
    ("\n<think>\nhm\n</think>\n\na b", "a b", "\nhm\n"),
    ("<thinking>hm</thinking>a", "a", "hm"),
    ("<thought>hm</thought>a", "a", "hm"),
    ("<think></think>a", "a", ""),
    ("<think>cut off here", "", "cut off here"),
    ("a <think>b</think> c", "a <think>b</think> c", ""),
    ("<thin", "<thin", ""),
    ("<thing>a</thing>", "<thing>a</thing>", ""),
    ("<p>a</p>", "<p>a</p>", ""),
    ("  a", "  a", ""),
    ("<think>a</thinking></think>b", "b", "a</thinking>"),
    ("<think>a</think><think>b</think>", "<think>b</think>", "a"),
]


@pytest.mark.parametrize(("content", "text", "thought"), TAGGED, ids=[it[0] for it in TAGGED])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_thinking_between_tags_at_the_beginning_is_no_text(content: str, text: str, thought: str, size: int) -> None:
    draft = Draft()
    shown = [
        it
        for at in range(0, len(content), size)
        for it in draft.add_chunk({"choices": [{"delta": {"content": content[at : at + size]}}]})
    ]
    shown += draft.close()
    whole = read_completion({"choices": [{"message": {"content": content}}]})
    for read_as in (draft, whole):
        got = read_as.text.getvalue()
        assert (got.strip() if thought else got) == text
        assert read_as.reasoning.getvalue() == thought
    assert "".join(it.text for it in shown) == draft.text.getvalue()


UNOPENED: list[tuple[str, str, str]] = [
    ("I greet.\n</think>\n\nHello!", "Hello!", "I greet.\n"),
    ("I greet.</think>\nHello!", "Hello!", "I greet."),
    ("</think>\n\nHello!", "Hello!", ""),
    ("hm\n</think>\na </think> b", "a </think> b", "hm\n"),
    ("Close it with </think> at the end.", "Close it with </think> at the end.", ""),
    ("Write `<think>` and\n</think>\nbehind it.", "Write `<think>` and\n</think>\nbehind it.", ""),
    ("```\n</think>\n```", "```\n</think>\n```", ""),
]


@pytest.mark.parametrize(("content", "text", "thought"), UNOPENED, ids=[it[0] for it in UNOPENED])
def test_thinking_whose_opening_tag_is_in_the_template_is_no_text(content: str, text: str, thought: str) -> None:
    """https://github.com/deepseek-ai/DeepSeek-R1/issues/456, https://github.com/infiniflow/ragflow/issues/5698"""
    stream = Draft()
    for char in content:
        stream.add_chunk({"choices": [{"delta": {"content": char}}]})
    stream.close()
    for draft in (stream, read_completion({"choices": [{"message": {"content": content}}]})):
        assert (draft.text.getvalue(), draft.reasoning.getvalue()) == (text, thought)


EVENTS_IN: list[tuple[str, list[Any]]] = [
    ('data: {"a": 1}\n\ndata: [DONE]\n\n', [{"a": 1}, DONE]),
    ('data: {"a": 1}\n\ndata: [DONE]', [{"a": 1}, DONE]),
    ('data:{"a": 1}\r\n\r\ndata:[DONE]\r\n\r\n', [{"a": 1}, DONE]),
    ('data: {"a": 1}\ndata: {"a": 2}\ndata: [DONE]\n', [{"a": 1}, {"a": 2}, DONE]),
    (': ping\n\nevent: message\nid: 3\ndata: {"a": 1}\n\n', [{"a": 1}]),
    ('data: {"a":\ndata: 1}\n\n', [{"a": 1}]),
    ('{"error": {"message": "No."}}\n', [{"error": {"message": "No."}}]),
    ('data: {"a": "\u2028\x85é"}\n\n', [{"a": "\u2028\x85é"}]),
    ("data: \n\ndata: [DONE]\n\n", [DONE]),
    ("", []),
    ("event: error\ndata: {\"error\": 1}\n\n", [{"error": 1}]),
    ("event: error\ndata: the engine died\n\ndata: [DONE]\n\n", [{"error": "the engine died"}, DONE]),
    ('\ufeffdata: {"a": 1}\n\ndata: [DONE]\n\n', [{"a": 1}, DONE]),
    ('{\n "a": {\n  "b": [1,\n 2]\n }\n}\n', [{"a": {"b": [1, 2]}}]),
    ("data: [" + "1,\ndata: " * 40 + "1]\n\n", [[1] * 41]),
    (json.dumps([1] * 40, indent=1) + "\n", [[1] * 40]),
    ('data: {"a": 1}\r\rdata: [DONE]\r\r', [{"a": 1}, DONE]),
]  # fmt: skip


@pytest.mark.parametrize(("stream", "wanted"), EVENTS_IN, ids=[it[0][:40] for it in EVENTS_IN])
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_the_events_of_a_stream_are_read_wherever_it_is_cut(stream: str, wanted: list[Any], size: int) -> None:
    reader, data = EventReader(), stream.encode()
    events = [it for at in range(0, len(data), size) for it in reader.feed(data[at : at + size])]
    assert [*events, *reader.close()] == wanted


def test_an_event_that_is_no_json_is_refused() -> None:
    reader = EventReader()
    with pytest.raises(ValueError, match="Expecting"):
        reader.feed(b"data: {broken\n\n")
