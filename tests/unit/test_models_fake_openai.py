"""Tests of the fake server: it refuses what the real API refuses, and runs as a separate process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support import fake_openai as fake
from tests.support.fake_openai import FakeOpenAI, Reply
from tests.support.openai_rules import find_refusal

USER = {"role": "user", "content": "hi"}


def assistant(*ids: str, **changes: Any) -> dict[str, Any]:
    calls = [{"id": item, "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes} for item in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "ok"}


def body_of(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER, *messages], **more}


def tools_of(*parameters: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    described = [{"type": "function", "function": {"name": name, "parameters": item, **more}} for item in parameters]
    return body_of(tools=described)


def shape_of(schema: Any, strict: bool = True) -> dict[str, Any]:
    return body_of(
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": strict}}
    )


def parts_of(**part: Any) -> dict[str, Any]:
    [kind] = part
    return body_of({"role": "user", "content": [{"type": kind, **part}]})


OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
LIST = {"type": "array"}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("call without result", body_of(assistant("c1")), "did not have response messages: c1"),
    ("one result missing", body_of(assistant("c1", "c2"), result("c1"), USER), "did not have response messages: c2"),
    ("user before results", body_of(assistant("c1"), USER, result("c1")), "must be followed by tool messages"),
    (
        "file of text",
        parts_of(file={"filename": "a", "file_data": "data:text/plain;base64,QQ=="}),
        "got unsupported MIME type 'text/plain'",
    ),
    ("file as base64", parts_of(file={"filename": "a", "file_data": "QQ=="}), "an invalid base64-encoded value"),
    (
        "file without name",
        parts_of(file={"file_data": "data:application/pdf;base64,QQ=="}),
        "'messages[1].content[0].file.file_id'",
    ),
    ("audio as ogg", parts_of(input_audio={"data": "QQ==", "format": "ogg"}), "Supported values are: 'wav' and 'mp3'"),
    ("unknown part", parts_of(film={}), "Invalid value: 'film'"),
    (
        "image of an agent's",
        body_of({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]}),
        "Supported values are: 'text'",
    ),
    ("stray result", body_of(result("c1")), "must be a response to a preceeding message with 'tool_calls'"),
    ("unknown id", body_of(assistant("c1"), result("c2")), "'tool_call_id' of 'c2' not found"),
    ("answered twice", body_of(assistant("c1"), result("c1"), result("c1")), "not found in 'tool_calls'"),
    (
        "stale id",
        body_of(assistant("c1"), result("c1"), USER, result("c1")),
        "must be a response to a preceeding message",
    ),
    ("two calls of one id", body_of(assistant("c1", "c1"), result("c1")), "Duplicate value for 'tool_call_id'"),
    ("empty calls", body_of({"role": "assistant", "content": "a", "tool_calls": []}), "empty array"),
    ("null beside no calls", body_of({"role": "assistant", "content": None}), "expected a string, got null"),
    ("null from user", body_of({"role": "user", "content": None}), "expected a string, got null"),
    ("unknown role", body_of({"role": "robot", "content": "a"}), "Invalid value: 'robot'"),
    (
        "arguments as object",
        body_of(assistant("c1", function={"name": "f", "arguments": {}}), result("c1")),
        "expected a string",
    ),
    ("call without name", body_of(assistant("c1", function={"arguments": "{}"}), result("c1")), "function.name"),
    ("call without type", body_of(assistant("c1", type=None), result("c1")), "[0].type"),
    ("no messages", {"model": "m", "messages": []}, "Invalid 'messages': empty array"),
    ("no model", {"messages": [USER]}, "model parameter"),
    ("empty tools", body_of(tools=[]), "Invalid 'tools': empty array"),
    ("choice without tools", body_of(tool_choice="none"), "only allowed when 'tools' are specified"),
    ("name with dot", tools_of(OBJECT, name="a.b"), "does not match pattern"),
    ("long name", tools_of(OBJECT, name="a" * 65), "maximum length 64"),
    ("same name twice", tools_of(OBJECT, OBJECT), "used more than once"),
    ("schema without type", tools_of({}), "schema must be a JSON Schema of 'type: \"object\"'"),
    ("array at the root", tools_of(LIST), "got 'type: \"array\"'"),
    ("array without items", tools_of({"type": "object", "properties": {"a": LIST}}), "array schema missing items"),
    ("unknown type", tools_of({"type": "object", "properties": {"a": {"type": "text"}}}), "'text' is not valid"),
    ("strict, optional", tools_of({**OBJECT, "required": []}, strict=True), "Missing 'a'"),
    ("strict, open", shape_of({**OBJECT, "additionalProperties": True}), "'additionalProperties' is required"),
    ("strict, default", shape_of({**OBJECT, "properties": {"a": {"default": 1}}}), "'default' is not permitted"),
    ("strict, no object", shape_of({"anyOf": [OBJECT]}), "schema must be a JSON Schema of"),
    ("stream options", body_of(stream_options={"include_usage": True}), "only allowed when 'stream' is enabled"),
    ("unknown parameter", body_of(agent_id="a"), "Unrecognized request argument supplied: agent_id"),
]


@pytest.mark.parametrize(("body", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_the_real_api_refuses_is_refused(body: dict[str, Any], words: str) -> None:
    refusal = find_refusal(body)
    assert refusal is not None
    assert words in refusal.message


@pytest.mark.parametrize(
    "body",
    [
        body_of(),
        body_of(assistant("c1", "c2"), result("c2"), result("c1"), USER, assistant("c1"), result("c1")),
        tools_of(OBJECT, strict=True),
        tools_of({"type": "object", "properties": {}}),
        shape_of({"anyOf": [OBJECT]}, strict=False),
        body_of(stream=True, stream_options={"include_usage": True}),
    ],
)
def test_what_the_real_api_takes_is_taken(body: dict[str, Any]) -> None:
    assert find_refusal(body) is None


async def test_refused_requests_are_recorded_and_the_script_is_not_asked() -> None:
    async with FakeOpenAI([fake.text("first")], api_key="k", models=["m"]) as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").models.list()
            assert [item.id async for item in await client.models.list()] == ["m"]
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        assert answer.choices[0].message.content == "first"
        assert [(item.path, item.status) for item in server.received] == [
            ("/v1/chat/completions", 404),
            ("/v1/models", 401),
            ("/v1/models", 200),
            ("/v1/chat/completions", 200),
        ]
        assert server.received[0].headers["authorization"] == "Bearer k"


async def test_a_used_up_list_of_replies_is_a_failure() -> None:
    async with (
        FakeOpenAI([]) as server,
        openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="no reply left"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])


async def test_a_reply_can_wait_for_the_test() -> None:
    go = asyncio.Event()
    async with (
        FakeOpenAI([fake.text("now", until=go)]) as server,
        openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client,
    ):
        asking = asyncio.create_task(
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        )
        await server.wait_for_requests(1)
        assert not asking.done()
        go.set()
        assert (await asking).choices[0].message.content == "now"


def shout(body: dict[str, Any]) -> Reply:
    """Script for the process in the test below."""
    return fake.text(str(body["messages"][-1]["content"]).upper())


async def test_it_runs_as_a_process_and_ends_on_sigterm() -> None:
    file = Path(__file__).parents[1] / "support" / "fake_openai.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(file), "--port", "0", "--script", f"{__file__}:shout", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            base_url = (await process.stdout.readline()).decode().strip()
            async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
                stream = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hello there"}], stream=True
                )
                parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(parts) == "HELLO THERE"
            seen = await asyncio.to_thread(_read_json, base_url.replace("/v1", "/requests"))
            assert [item["body"]["model"] for item in seen] == ["m"]
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _read_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)
