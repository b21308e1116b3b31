"""Tests of the network over HTTP, as a program uses it with only HTTP, JSON and a token."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from roundelay.interop.gateway import serve_gateway
from roundelay.interop.http.api import ENDPOINTS
from roundelay.interop.session_pool import MAX_CALLS
from roundelay.network.client import NetworkClient
from tests.support.node import Node, node_process, running_node
from tests.support.wire import make_token


class Caller:
    """A program that calls as one participant."""

    def __init__(self, http: httpx2.AsyncClient, agent_id: str, token: str) -> None:
        self._http = http
        self.headers = {"Authorization": f"Bearer {agent_id}:{token}"}

    async def ask(self, method: str, path: str, status: int, **options: Any) -> Any:
        headers = {**self.headers, **options.pop("headers", {})}
        answer = await self._http.request(method, path, headers=headers, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str, status: int = 200, **query: Any) -> Any:
        return await self.ask("GET", path, status, params=query)

    async def post(self, path: str, body: Any, status: int = 200, **options: Any) -> Any:
        return await self.ask("POST", path, status, json=body, **options)


@asynccontextmanager
async def gateway_to(node: Node) -> AsyncIterator[httpx2.AsyncClient]:
    async with serve_gateway(node.url) as url, httpx2.AsyncClient(base_url=url, timeout=40) as http:
        yield http


async def join(node: Node, http: httpx2.AsyncClient, agent_id: str, kind: str = "service") -> Caller:
    """Return a caller with a token that an operator created."""
    operator = await node.service("roundelay-test")
    session = await node.invite(operator, agent_id, kind=kind)
    await session.drop()
    await operator.drop()
    return Caller(http, agent_id, node.tokens[agent_id])


async def test_a_program_writes_to_an_agent_waits_for_its_answer_and_is_done_with_it() -> None:
    async with running_node() as node, gateway_to(node) as http:
        form, bob = await join(node, http, "form"), await node.agent("bob")
        sent = await form.post("/v1/messages", {"to": "agent:bob", "content": "17 and 23?", "message_id": "m-1"}, 201)
        assert sent == {"seq": sent["seq"], "thread_id": "direct:bob~form", "message_id": "m-1", "duplicate": False}
        waiting = asyncio.create_task(form.get("/v1/messages", wait_s=20))
        question = await bob.message("17 and 23?")
        assert not waiting.done()
        answer = await bob.send("agent:form", "40.", reply_to=question["seq"], cause=question["seq"])
        page = await waiting
        assert [(it["seq"], it["content"]) for it in page["messages"]] == [(answer["seq"], "40.")]
        assert page["next"] >= answer["seq"]
        assert await form.get("/v1/messages") == page  # the message is not handled yet
        assert await form.post("/v1/messages/acknowledge", {"seqs": [answer["seq"]]}) == {"acknowledged": 1}
        assert (await form.get("/v1/messages"))["messages"] == []
        assert [it["content"] for it in (await form.get("/v1/messages", after=0))["messages"]] == ["40."]
        [fate] = (await form.get(f"/v1/messages/{sent['seq']}/status"))["recipients"]
        assert (fate["agent_id"], fate["state"]) == ("bob", "delivered")
        [thread] = (await form.get("/v1/threads"))["threads"]
        history = await form.get(f"/v1/threads/{thread['thread_id']}/messages")
        assert [it["content"] for it in history["messages"]] == ["17 and 23?", "40."]
        assert len((await form.get(f"/v1/messages/{answer['seq']}/why"))["chain"]) == 2
        assert [it["seq"] for it in (await form.get("/v1/search", query="23"))["messages"]] == [sent["seq"]]
        assert {it["agent_id"] for it in (await form.get("/v1/agents"))["agents"]} >= {"bob", "form"}


async def test_a_repeat_sends_nothing_twice_also_after_the_node_was_killed(tmp_path: Path) -> None:
    rounds = 4
    async with node_process(tmp_path / "node.db") as node, gateway_to(node) as http:
        node.keeps_port = True
        form, _ = await join(node, http, "form"), await node.agent("bob")
        body = {"to": "agent:bob", "content": "once"}
        first = await form.post("/v1/messages", body, 201, headers={"Idempotency-Key": "k-0"})
        assert (await form.post("/v1/messages", body, 200, headers={"Idempotency-Key": "k-0"}))["seq"] == first["seq"]
        conflict = await form.post("/v1/messages", {**body, "content": "x"}, 409, headers={"Idempotency-Key": "k-0"})
        assert conflict["error"]["code"] == "id_conflict"
        for number in range(rounds):
            key = {"Idempotency-Key": f"k-{number + 1}"}
            sending = asyncio.create_task(form.ask("POST", "/v1/messages", 201, json=body, headers=key))
            for _ in range(number):
                await asyncio.sleep(0)
            await node.kill9()
            await node.restart()
            stored = await sending  # the gateway itself repeats the request
            again = await form.post("/v1/messages", body, 200, headers=key)
            assert again["seq"] == stored["seq"]
        history = await form.get("/v1/threads/direct:bob~form/messages")
        assert len(history["messages"]) == rounds + 1
        print(f"{rounds} kills, {rounds + 1} messages")


REFUSED: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "nobody there": ("POST", "/v1/messages", {"json": {"to": "agent:rob", "content": 1}}, 404, "unknown_recipient"),
    "no address": ("POST", "/v1/messages", {"json": {"to": "bob", "content": 1}}, 400, "invalid_frame"),
    "a field that is none": ("POST", "/v1/messages", {"json": {"to": "broadcast", "content": 1, "x": 1}}, 400, "invalid_frame"),
    "no content": ("POST", "/v1/messages", {"json": {"to": "broadcast"}}, 400, "invalid_frame"),
    "two ids": ("POST", "/v1/messages", {"json": {"to": "broadcast", "content": 1, "message_id": "a"}, "headers": {"Idempotency-Key": "b"}}, 400, "invalid_frame"),
    "no id": ("POST", "/v1/messages", {"json": {"to": "broadcast", "content": 1}, "headers": {"Idempotency-Key": "a b"}}, 400, "invalid_frame"),
    "half a character": ("POST", "/v1/messages", {"content": b'{"to": "broadcast", "content": "\\ud800"}'}, 400, "invalid_frame"),
    "a number that is none": ("POST", "/v1/messages", {"content": b'{"to": "broadcast", "content": 1e999}'}, 400, "invalid_frame"),
    "no JSON": ("POST", "/v1/messages", {"content": b"{"}, 400, "invalid_frame"),
    "NaN": ("POST", "/v1/messages", {"content": b'{"to": "broadcast", "content": NaN}'}, 400, "invalid_frame"),
    "nested": ("POST", "/v1/messages", {"content": b'{"to": "broadcast", "content": ' + b"[" * 90_000}, 400, "invalid_frame"),
    "deep metadata": ("POST", "/v1/messages", {"content": b'{"to": "broadcast", "content": 1, "metadata": {"a": ' + b"[" * 990 + b"]" * 990 + b"}}"}, 400, "invalid_frame"),
    "a long number": ("POST", "/v1/messages", {"content": b'{"to": "broadcast", "content": ' + b"9" * 5000 + b"}"}, 400, "invalid_frame"),
    "no UTF-8": ("POST", "/v1/messages", {"content": b'{"to": "\xff"}'}, 400, "invalid_frame"),
    "large": ("POST", "/v1/messages", {"content": b" " * (1 << 21)}, 413, "too_large"),
    "beyond a frame": ("POST", "/v1/messages", {"json": {"to": "broadcast", "content": "x" * 300_000}}, 413, "too_large"),
    "not its message": ("POST", "/v1/messages/acknowledge", {"json": {"seqs": [1]}}, 404, "unknown_message"),
    "no number": ("GET", "/v1/messages", {"params": {"after": "x"}}, 400, "invalid_frame"),
    "twice": ("GET", "/v1/messages?after=1&after=2", {}, 400, "invalid_frame"),
    "too long a wait": ("GET", "/v1/messages", {"params": {"wait_s": 26}}, 400, "invalid_frame"),
    "no seq": ("GET", "/v1/messages/x/status", {}, 400, "invalid_frame"),
    "no message": ("GET", "/v1/messages/999/status", {}, 404, "unknown_message"),
    "no thread": ("GET", "/v1/threads/direct:a~b/messages", {}, 404, "unknown_message"),
    "no path": ("GET", "/v2", {}, 404, "unknown_operation"),
    "no method": ("DELETE", "/v1/messages", {}, 405, "unknown_operation"),
}  # fmt: skip


async def test_what_is_wrong_is_said_with_a_status_and_a_sentence() -> None:
    async with running_node() as node, gateway_to(node) as http:
        form = await join(node, http, "form")
        for name, (method, path, options, status, code) in REFUSED.items():
            error = (await form.ask(method, path, status, **options))["error"]
            assert (error["code"], len(error["message"]) > 15) == (code, True), name
            assert not re.search("sys\\.|recursion|Error|codec", error["message"]), error
        print(f"{len(REFUSED)} refusals")


async def test_nobody_comes_in_without_the_token_of_its_id() -> None:
    async with running_node() as node, gateway_to(node) as http:
        await join(node, http, "form")
        good = node.tokens["form"]
        tried = ["", "Bearer", f"Bearer {good}", f"Bearer form:{make_token()}", f"Bearer ann:{good}", "Bearer form:",
                 f"Bearer new:{make_token()}", f"Bearer form:{good} x", "Basic !!", "Bearer Form:x", f"Digest form:{good}",
                 f"Bearer form:{node.owner_token}x"]  # fmt: skip
        for header in tried:
            answer = await http.get("/v1/agents", headers={"Authorization": header} if header else {})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "not_authenticated"), header
            assert "token" in answer.json()["error"]["message"]
            assert answer.headers["www-authenticate"].startswith("Bearer")
        basic = await http.get("/v1/agents", auth=("form", good))
        assert basic.status_code == 200
        operator = await node.service("roundelay-test")
        # No new participant was created.
        assert {it["agent_id"] for it in basic.json()["agents"]} == {"form", "roundelay-test"}
        await operator.call("network.revoke_token", {"agent_id": "form"})
        assert (await http.get("/v1/agents", auth=("form", good))).status_code == 403


@pytest.mark.parametrize(
    "said", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
async def test_a_page_of_another_site_cannot_use_what_a_browser_remembers_of_somebody(said: dict[str, str]) -> None:
    async with running_node() as node, gateway_to(node) as http:
        await join(node, http, "form")
        body, remembered = b'{"to": "agent:form", "content": "x"}', ("form", node.tokens["form"])
        answer = await http.post("/v1/messages", content=body, auth=remembered, headers=said)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        own = {"Origin": str(http.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
        assert (await http.post("/v1/messages", content=body, auth=remembered, headers=own)).status_code == 201


async def test_who_does_not_finish_asking_is_cut_and_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("roundelay.interop.http.connection_limit.HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr("roundelay.interop.http.api.PATIENCE_S", 0.1)
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ann:wrong\r\nContent-Length: 9\r\n"
    whole = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with running_node() as node, gateway_to(node) as http:
        where = http.base_url.host, http.base_url.port
        for sent, expected in ((b"", b""), (head, b""), (whole + head, b"200"), (head + b"\r\n{", b"503")):
            reader, writer = await asyncio.open_connection(*where)
            writer.write(sent)
            answer = await asyncio.wait_for(read_to_end(reader), 20)
            assert expected in answer, sent
            assert bool(answer) is bool(expected), sent
            writer.close()
        reader, writer = await asyncio.open_connection(*where)
        monkeypatch.setattr("roundelay.interop.http.api.PATIENCE_S", 30)
        writer.write(head + b"\r\n{")
        await writer.drain()
        writer.transport.abort()
        assert (await http.get("/healthz")).status_code == 200
    assert not [it for it in caplog.records if it.exc_info]


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def write_request(caller: Caller, place: str, body: bytes = b"", **more: str) -> bytes:
    head = [
        f"{'POST' if body else 'GET'} {place} HTTP/1.1",
        "host: x",
        f"authorization: {caller.headers['Authorization']}",
    ]
    head += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    head += [f"content-length: {len(body)}"] if body else []
    return "\r\n".join([*head, "", ""]).encode() + body


def write_tool_call(caller: Caller, port: int, version: str, **arguments: Any) -> bytes:
    about = {
        "io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientInfo": {"name": "x", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": "wait", "arguments": arguments} | ({"_meta": about} if version > "2026" else {})
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    written = write_request(
        caller, "/mcp", body, content_type="application/json", accept="application/json, text/event-stream",
        mcp_protocol_version=version, mcp_method="tools/call", mcp_name="wait",
    )  # fmt: skip
    return written.replace(b"host: x", f"host: 127.0.0.1:{port}".encode())


@pytest.mark.parametrize("way", ["HTTP", "MCP 2025-11-25", "MCP 2026-07-28"])
async def test_who_gives_up_waiting_holds_no_place_and_was_delivered_nothing(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, real = 0, NetworkClient.call

    async def call(client: NetworkClient, op: str, args: dict[str, Any] | None = None, **more: Any) -> Any:
        nonlocal looking
        if not (args or {}).get("wait_ms"):
            return await real(client, op, args, **more)
        looking += 1
        try:
            return await real(client, op, args, **more)
        finally:
            looking -= 1

    monkeypatch.setattr(NetworkClient, "call", call)
    async with running_node() as node, gateway_to(node) as http:
        form, mia = await join(node, http, "form"), await node.person("mia")
        after = (await form.get("/v1/messages"))["next"]
        asked = write_request(form, f"/v1/messages?after={after}&wait_s=25")
        if way != "HTTP":
            asked = write_tool_call(form, http.base_url.port or 0, way.removeprefix("MCP "), after=after)
        async with asyncio.timeout(24):
            writers = [(await asyncio.open_connection("127.0.0.1", http.base_url.port))[1] for _ in range(MAX_CALLS)]
            for number, writer in enumerate(writers, 1):
                writer.write(asked)
                while looking < number:
                    await http.get("/healthz")
            await form.get("/v1/agents", 429)
            for writer in writers:
                writer.close()
                await writer.wait_closed()
            while looking:
                await http.get("/healthz")
            await form.get("/v1/agents")
            seq = (await mia.send("agent:form", "who reads this?"))["seq"]
            await form.get("/v1/agents")
        [fate] = (await mia.call("network.message_status", {"seq": seq}))["recipients"]
        assert fate["state"] == "queued"
        assert (await http.head("/v1/messages", headers=form.headers)).status_code == 405
        assert [it["seq"] for it in (await form.get("/v1/messages", wait_s=5))["messages"]] == [seq]
        [fate] = (await mia.call("network.message_status", {"seq": seq}))["recipients"]
        assert fate["state"] == "delivered"


DOUBTED: dict[str, tuple[bytes, str]] = {
    "two lengths": (b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", "length"),
    "two tokens": (b"authorization: Bearer mia:x\r\n\r\n", "authorization"),
    "two keys": (b"idempotency-key: a\r\nidempotency-key: b\r\ncontent-length: 2\r\n\r\n{}", "idempotency-key"),
    "two origins": (b"origin: http://x\r\norigin: http://evil.example\r\n\r\n", "origin"),
}  # fmt: skip


async def test_a_request_that_may_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_read() -> None:
    async with running_node() as node, gateway_to(node) as http:
        form = await join(node, http, "form")
        for name, (rest, told) in DOUBTED.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
            writer.write(
                b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nauthorization: " + form.headers["Authorization"].encode()
            )
            writer.write(b"\r\n" + rest)
            async with asyncio.timeout(10):
                answer = await reader.read()  # reads to the end of the connection
            writer.close()
            assert answer.startswith(b"HTTP/1.1 400"), name
            assert (answer.count(b"HTTP/1.1"), f"states its {told} more than once" in answer.decode()) == (1, True), (
                name,
                answer,
            )


async def test_a_node_that_is_gone_is_503_and_the_gateway_goes_on_when_it_is_back(tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db") as node, gateway_to(node) as http:
        node.keeps_port = True
        form = await join(node, http, "form")
        await form.get("/v1/threads")
        other = Caller(http, "other", make_token())
        await node.kill9()
        error = (await other.get("/v1/threads", 503))["error"]
        assert error["code"] == "connect"
        await node.restart()
        await form.get("/v1/threads")
        assert (await http.get("/healthz")).text == "ok\n"


async def test_the_document_describes_each_endpoint_and_its_shapes_hold_for_the_answers() -> None:
    async with running_node() as node, gateway_to(node) as http:
        document = (await http.get("/openapi.json")).json()
        assert document["openapi"] == "3.1.0"
        described = {(method.upper(), path) for path, it in document["paths"].items() for method in it}
        contents = {("POST", "/v1/files"), ("GET", "/v1/files/{file}"), ("DELETE", "/v1/files/{file}")}
        assert described == {(it.method, it.path) for it in ENDPOINTS} | contents
        jsonschema = pytest.importorskip("jsonschema")
        schemas = document["components"]["schemas"]

        def check(name: str, value: Any) -> None:
            whole = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
            jsonschema.validate(value, whole)

        form, bob = await join(node, http, "form"), await node.agent("bob")
        check("StoredMessage", await form.post("/v1/messages", {"to": "agent:bob", "content": {"a": [1]}}, 201))
        await bob.send("agent:form", "hello", metadata={"x": 1})
        check("Received", await form.get("/v1/messages"))
        check("Refusal", await form.get("/v1/messages/9/status", 404))


async def test_callers_without_a_good_token_take_nobodys_place() -> None:
    async with running_node() as node, gateway_to(node) as http:
        form = await join(node, http, "form")
        await form.get("/v1/agents")
        tried = [http.get("/v1/agents", auth=("form", make_token())) for _ in range(300)]
        answers, _ = await asyncio.gather(asyncio.gather(*tried), form.get("/v1/agents"))
        assert {it.status_code for it in answers} <= {401, 429}
        await form.get("/v1/agents")
        print(f"{sum(it.status_code == 401 for it in answers)} of {len(answers)} were judged")
