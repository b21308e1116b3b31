"""Tests of tapes and fingerprints: a tape replays recorded replies, and reports where and how a request differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.model import (
    AssistantMessage,
    ChatMessage,
    File,
    ModelError,
    ModelReply,
    ModelRequest,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolSpec,
    Usage,
    UserMessage,
)
from roundelay.agents.models.tape import (
    NamedModel,
    TapedTurn,
    TapeModel,
    find_drift,
    fingerprint_request,
    read_tape,
    write_tape,
)
from roundelay.agents.team import build_runner, load_agents

MODEL = NamedModel("small", {"temperature": 0.5})
LOOK = ToolSpec("look", "Look at it", {"type": "object", "properties": {"what": {"type": "string"}}})
SEND = ToolSpec("send", "Send it", {"type": "object"})


def make_request(*more: ChatMessage, said: str = "one\ntwo\nthree", turn: int = 1, **options: Any) -> ModelRequest:
    messages = (SystemMessage("You are kind."), UserMessage(said), *more)
    fields: dict[str, Any] = {"tools": (LOOK, SEND), "agent_id": "desk", "reaction": "r1", "turn": turn, **options}
    return ModelRequest(messages, **fields)


def turn_of(call_id: str = "c1", result: str = "seen") -> tuple[ChatMessage, ...]:
    return (
        AssistantMessage(None, (ToolCall(call_id, "look", "{}"),)),
        ToolMessage(call_id, result),
        UserMessage("Turn 2"),
    )


# -- prints

EARLIER: tuple[dict[str, Any], ...] = (
    {
        "hash": "5c5aa4b33576f4a22c8abad76ab374d3", "model": "small", "messages": ["sf2248b7e", "uc9e541f0"],
        "tools": {"look": "d1b6bae6", "send": "b494f79c"}, "settings": {"temperature": "6cd9459f"},
        "lines": ["abee", "86f18a66d8f5"],
    },
    {
        "hash": "52aa64813761777219ff615ee75fb713", "model": "small",
        "messages": ["sf2248b7e", "uc9e541f0", "a076e2e5d", "t8740a408", "u74367391"], "tools": "3fab612b",
        "settings": {"temperature": "6cd9459f"},
    },
)  # fmt: skip
"""Fingerprints of `make_request()` and of `make_request(*turn_of())` that an earlier version wrote into ledgers and
tapes.
"""


def test_the_same_request_has_no_drift() -> None:
    request = make_request(*turn_of())
    assert find_drift(fingerprint_request(MODEL, request), MODEL, request) is None


def test_other_ids_of_calls_are_no_drift() -> None:
    printed = fingerprint_request(MODEL, make_request(*turn_of("c1")))
    assert find_drift(printed, MODEL, make_request(*turn_of("other"))) is None


def test_for_whom_a_request_is_does_not_count() -> None:
    printed = fingerprint_request(MODEL, make_request())
    assert find_drift(printed, MODEL, make_request(reaction="r2", turn=7)) is None


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (make_request(said="one\ntoo\nthree"), 'message 1 (user): line 2 has changed; it is now: "too"'),
        (make_request(said="one\nthree"), 'message 1 (user): a line missing after "one"'),
        (make_request(said="two\nthree"), "message 1 (user): a line missing at the beginning"),
        (make_request(said="one\ntwo\nthree\nfour"), 'message 1 (user): a line more at line 4: "four"'),
        (make_request(said="two\none\nthree"), "message 1 (user): the same lines in a different order; "),
        (make_request(UserMessage("more")), 'message 2 (user) is new: "more"'),
        (replace(make_request(), messages=[SystemMessage("You are kind.")]), "message 1 (user) is missing"),
        (
            replace(make_request(), messages=[UserMessage("one\ntwo\nthree"), SystemMessage("You are kind.")]),
            "message 0 (user) has moved",
        ),
        (make_request(tools=(LOOK,)), 'the tool "send" is missing'),
        (make_request(tools=(LOOK, SEND, replace(SEND, name="ask"))), 'the tool "ask" was added'),
        (make_request(tools=(LOOK, replace(SEND, name="ask"))), 'the tool "send" is now called "ask"'),
        (
            make_request(tools=(LOOK, replace(SEND, name="ask", description="Ask"))),
            'the tool "send" is missing, and the tool "ask" was added',
        ),
        (make_request(tools=()), 'the tools "look", "send" are missing'),
        (make_request(tools=(SEND, LOOK)), "the tools are in a different order: send, look"),
        (make_request(tools=(replace(LOOK, description="Look away"), SEND)), 'the description or the parameters of the tool "look" have changed'),
        (make_request(tools=(replace(LOOK, parameters={"type": "object"}), SEND)), 'the description or the parameters of the tool "look" have changed'),
        (make_request(tool_choice="required"), "the tool choice was auto and is now required"),
    ],
)  # fmt: skip
def test_a_drift_is_named(now: ModelRequest, named: str) -> None:
    for recorded in (fingerprint_request(MODEL, make_request()), EARLIER[0]):
        found = find_drift(recorded, MODEL, now)
        assert found is not None
        assert named in found


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (make_request(*turn_of(result="seen more")), 'message 3 (tool) has changed; it is now: "seen more"'),
        (make_request(*turn_of(), tools=(LOOK,)), "the tools have changed; they are now: look"),
        (make_request(*turn_of(), said="else"), 'message 1 (user) has changed; it is now: "else"'),
    ],
)
def test_a_drift_of_a_later_turn_is_named(now: ModelRequest, named: str) -> None:
    for recorded in (fingerprint_request(MODEL, make_request(*turn_of())), EARLIER[1]):
        found = find_drift(recorded, MODEL, now)
        assert found is not None
        assert named in found


def test_prints_of_an_earlier_version_are_read_and_those_of_today_are_smaller() -> None:
    requests = (make_request(), make_request(*turn_of()))
    for recorded, request in zip(EARLIER, requests, strict=True):
        assert find_drift(recorded, MODEL, request) is None
        assert (
            find_drift(recorded, NamedModel("small"), request)
            == 'the setting "temperature" of model "small" is missing'
        )
        assert len(json.dumps(fingerprint_request(MODEL, request))) < 0.75 * len(json.dumps(recorded))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (NamedModel("large", {"temperature": 0.5}), 'the model was "small" and is now "large"'),
        (NamedModel("small", {"temperature": 0.7}), 'the setting "temperature" of model "small" has changed'),
        (NamedModel("small", {"temperature": 0.5, "seed": 1}), 'the setting "seed" of model "small" is new'),
        (NamedModel("small"), 'the setting "temperature" of model "small" is missing'),
    ],
)
def test_another_model_is_named_unless_any_will_do(model: NamedModel, named: str) -> None:
    printed = fingerprint_request(MODEL, make_request())
    assert find_drift(printed, model, make_request()) == named
    assert find_drift(printed, model, make_request(), any_model=True) is None


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (UserMessage("see", ("https://x.example/a.png",), (File("a.pdf", "application/pdf", "QUE="),)), None),
        (UserMessage("see", ("https://x.example/b.png",), (File("a.pdf", "application/pdf", "QUE="),)), "number 1 of the images and files has changed"),
        (UserMessage("see", ("https://x.example/a.png",), (File("a.pdf", "application/pdf", "QUI="),)), "number 2 of the images and files has changed"),
        (UserMessage("see", ("https://x.example/a.png",), (File("b.pdf", "application/pdf", "QUE="),)), "number 2 of the images and files has changed"),
        (UserMessage("see", ("https://x.example/a.png",)), "there were 2 images and files, and now there are 1"),
        (UserMessage("see"), "there were 2 images and files, and now there are 0"),
    ],
)  # fmt: skip
def test_another_image_or_file_is_a_drift(now: UserMessage, named: str | None) -> None:
    then = UserMessage("see", ("https://x.example/a.png",), (File("a.pdf", "application/pdf", "QUE="),))
    printed = json.loads(json.dumps(fingerprint_request(MODEL, make_request(then))))
    found = find_drift(printed, MODEL, make_request(now))
    assert found is named is None or (named is not None and named in str(found))
    assert "QUE=" not in str(printed)


def test_the_print_of_a_request_without_images_and_files_has_nothing_of_them() -> None:
    assert "attached" not in fingerprint_request(MODEL, make_request())


def test_a_print_is_small_and_says_nothing_of_what_was_said() -> None:
    secret = "CANARY-91 " * 1000
    printed = json.dumps(fingerprint_request(MODEL, make_request(said=secret)))
    assert "CANARY" not in printed
    assert len(printed) < 600


# -- tapes


def tape_of(*requests: ModelRequest) -> list[TapedTurn]:
    """Return a tape with one reply for each request. The reply's text is its position."""
    return [
        TapedTurn.of(ModelReply(f"reply {n}"), run=it.reaction, turn=it.turn, request=fingerprint_request(MODEL, it))
        for n, it in enumerate(requests)
    ]


async def ask(model: TapeModel, *requests: ModelRequest) -> list[str | None]:
    return [(await model.complete(request)).text for request in requests]


async def refused(model: TapeModel, request: ModelRequest) -> str:
    with pytest.raises(ModelError) as caught:
        await model.complete(request)
    assert caught.value.reason == "misconfigured"
    assert not caught.value.retryable
    return str(caught.value)


FIRST, SECOND = make_request(), make_request(*turn_of(), turn=2)


async def test_a_tape_plays_its_turns_in_order() -> None:
    model = TapeModel(tape_of(FIRST, SECOND))
    assert await ask(model, FIRST, SECOND) == ["reply 0", "reply 1"]
    assert (model.unplayed, model.problems) == (0, [])


async def test_what_is_asked_again_gets_the_same_reply() -> None:
    model = TapeModel(tape_of(FIRST, SECOND))
    assert await ask(model, FIRST, FIRST, SECOND, SECOND) == ["reply 0", "reply 0", "reply 1", "reply 1"]


async def test_reactions_are_told_apart_by_their_requests_whatever_their_ids_and_order() -> None:
    other = make_request(said="else", reaction="r2")
    model = TapeModel(tape_of(FIRST, SECOND, other))
    asked = [replace(it, reaction=f"now {it.reaction}") for it in (other, FIRST, SECOND)]
    assert await ask(model, *asked) == ["reply 2", "reply 0", "reply 1"]


async def test_another_request_fails_and_says_where_and_what() -> None:
    model = TapeModel(tape_of(FIRST, SECOND))
    await ask(model, FIRST)
    told = await refused(model, make_request(*turn_of(result="other"), turn=2))
    assert "desk, turn 2 on the tape tape: message 3 (tool) has changed" in told
    assert model.problems


async def test_a_lenient_tape_plays_on_over_another_request() -> None:
    model = TapeModel(tape_of(FIRST, SECOND), is_strict=False)
    assert await ask(model, make_request(said="else"), SECOND) == ["reply 0", "reply 1"]
    assert len(model.problems) == 1


async def test_beyond_the_end_it_fails_and_says_so() -> None:
    model = TapeModel(tape_of(FIRST))
    await ask(model, FIRST)
    assert "asks for turn 2, but the tape tape ends this reaction after turn 1" in await refused(model, SECOND)
    assert "has no further reaction" in await refused(model, make_request(reaction="r9"))


async def test_a_line_without_a_request_answers_whatever_is_asked() -> None:
    model = TapeModel([TapedTurn(text="hello")])
    assert await ask(model, make_request(said="anything")) == ["hello"]


async def test_a_recorded_failure_fails_again() -> None:
    model = TapeModel([TapedTurn(text="Out of credit.", failure="quota")])
    with pytest.raises(ModelError, match="Out of credit") as caught:
        await model.complete(FIRST)
    assert caught.value.reason == "quota"


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a":1}', '{"ü": "€"}', "[1]", "{broken", "", '{"a": 1, "a": 2}'])
async def test_a_reply_comes_back_from_a_file_as_it_was(tmp_path: Path, arguments: str) -> None:
    calls = (ToolCall("call_1", "look", arguments),)
    reply = ModelReply("Ich seh’s", calls, Usage(10, 5, 2, 1), "tool_calls", "small-2026")
    turn = TapedTurn.of(reply, run="r1", turn=1, request=fingerprint_request(MODEL, FIRST), for_message="mia: hello")
    write_tape(tmp_path / "deep" / "desk.jsonl", "desk", [turn])
    assert read_tape(tmp_path / "deep" / "desk.jsonl") == [turn]
    assert await TapeModel(tmp_path / "deep" / "desk.jsonl").complete(FIRST) == reply


async def test_a_tape_written_by_hand_plays(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '# what the desk says\n{"calls": [{"tool": "look", "arguments": {"what": "it"}}]}\n\n{"text": "Seen."}\n',
        encoding="utf-8",
    )
    model = TapeModel(path)
    reply = await model.complete(FIRST)
    assert (reply.tool_calls[0].name, json.loads(reply.tool_calls[0].arguments)) == ("look", {"what": "it"})
    assert reply.tool_calls[0].id
    assert reply.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"text": "a"}\n{"texts": "b"}\n', "mine.jsonl:2: texts: Extra inputs are not permitted"),
        ('{"text": "a"\n', "mine.jsonl:1: the line is not JSON"),
        ('{"turn": 0}\n', "mine.jsonl:1: turn: Input should be greater than or equal to 1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match="mine") as caught:
        TapeModel(path)
    assert named in str(caught.value)


def test_a_text_with_any_kind_of_line_end_is_read_as_it_was_written(tmp_path: Path) -> None:
    turn = TapedTurn(text="one\u2028two\u0085three\x0cfour\r\nfive")
    write_tape(tmp_path / "desk.jsonl", "desk", [turn])
    assert read_tape(tmp_path / "desk.jsonl") == [turn]


def test_an_agents_file_may_name_a_tape(tmp_path: Path) -> None:
    (tmp_path / "tapes").mkdir()
    (tmp_path / "tapes" / "desk.jsonl").write_text('{"text": "hello"}\n', encoding="utf-8")
    file = tmp_path / "desk.yaml"
    file.write_text("id: desk\ninstruction: x\nmodel: {replay: tapes/desk.jsonl}\n", encoding="utf-8")
    runner = build_runner(load_agents(file)[0])
    assert isinstance(runner.model, TapeModel)
    assert runner.model.unplayed == 1


def test_a_tape_that_is_not_there_is_the_files_fault(tmp_path: Path) -> None:
    from roundelay.network.errors import ConfigError

    file = tmp_path / "desk.yaml"
    file.write_text("id: desk\ninstruction: x\nmodel: {replay: tapes/none.jsonl}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"desk.yaml:3: agent desk: The tape .*none.jsonl cannot be read"):
        build_runner(load_agents(file)[0])
