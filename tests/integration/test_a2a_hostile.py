"""Tests of malicious or broken remote A2A agents: the person learns that there is no answer, and nothing else
happens.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import pytest

from roundelay.adapters import a2a
from roundelay.adapters.a2a import A2AAgent
from roundelay.agents.policy import AgentPolicy
from roundelay.network.backoff import Backoff
from roundelay.network.client import NetworkClient
from tests.support.asked import working
from tests.support.node import running_node

Reply: TypeAlias = Callable[[dict[str, Any]], AsyncIterator[bytes]]
"""Function from a JSON-RPC call to the bytes of its answer, including the HTTP head."""
SENT = "SendStreamingMessage"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


class Elsewhere:
    """A server on plain sockets. The server's agent card is correct except for the changes in ``card``."""

    def __init__(self, reply: Reply, card: bytes = b"", **changed: Any) -> None:
        self._reply = reply
        self._card = card
        self._changed = changed
        self.url = ""
        self.called: list[str] = []
        self.gone = asyncio.Event()
        """Set when a connection was closed before the end of its answer."""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self.url

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0))
            call = json.loads(body or b"{}")
            self.called.append(call.get("method", head.split()[1]))
            reply = self._reply(call) if self.called[-1] == SENT else self._refuse() if call else self._tell_card()
            async for piece in reply:
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            self.gone.set()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _refuse(self) -> AsyncIterator[bytes]:
        yield JSON + b'{"jsonrpc": "2.0", "id": 1, "error": {"code": -32004, "message": "no"}}'

    async def _tell_card(self) -> AsyncIterator[bytes]:
        card = {
            "name": "far",
            "description": "Far away",
            "version": "1",
            "supportedInterfaces": [{"url": f"{self.url}/", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}],
            "capabilities": {"streaming": True},
            "defaultInputModes": ["text/plain"],
            "defaultOutputModes": ["text/plain"],
            "skills": [],
            **self._changed,
        }
        yield JSON + (self._card or json.dumps(card).encode())


def event(result: Any, **more: Any) -> bytes:
    return b"data: " + json.dumps({"jsonrpc": "2.0", "id": 1, "result": result, **more}).encode() + b"\n\n"


def task(state: str, **more: Any) -> bytes:
    return event({"task": {"id": "t-1", "contextId": "c", "status": {"state": f"TASK_STATE_{state}"}, **more}})


def status(state: str, task_id: str = "t-1") -> bytes:
    told = {"taskId": task_id, "contextId": "c", "status": {"state": f"TASK_STATE_{state}"}}
    return event({"statusUpdate": told})


def piece(part: dict[str, Any], *, task_id: str = "t-1", append: bool = True, name: str = "one") -> bytes:
    artifact = {"artifactId": name, "parts": [part]}
    return event({"artifactUpdate": {"taskId": task_id, "contextId": "c", "artifact": artifact, "append": append}})


async def says_so_and_goes_on(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + task("WORKING") + piece({"text": "Done."}, append=False) + status("COMPLETED")
    while True:
        yield status("WORKING") + piece({"text": " Not yet."})
        await asyncio.sleep(0)


async def in_small_pieces(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + task("WORKING")
    for _ in range(100):
        yield piece({"text": "x"}) * 100
    yield status("COMPLETED")


async def with_many_artifacts(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + task("WORKING")
    for number in range(1_000_000):
        yield piece({}, name=f"a-{number}")


async def of_another_task(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + task("WORKING") + piece({"text": "I am"}, task_id="t-2") + status("COMPLETED", "t-2")


async def of_no_task(call: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + status("WORKING", "")


async def nothing(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM


async def and_forgets(call: dict[str, Any]) -> AsyncIterator[bytes]:
    gone = b"event: error\ndata: " + event(None, error={"code": -32001, "message": "no"})[6:]
    yield STREAM + task("WORKING") + gone


async def no_json(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + b"data: {\n\n"


async def deep_json(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + b'data: {"result": ' + b"[" * 100_000 + b"\n\n"


async def another_shape(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + event({"task": {"id": 5, "status": "over", "artifacts": {}}})


async def what_is_no_number(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + task("COMPLETED", artifacts=[{"artifactId": "one", "parts": [{"data": float("nan")}]}])


async def without_an_end(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + b"data: "
    while True:
        yield b"x" * 65536


async def packed(_: dict[str, Any]) -> AsyncIterator[bytes]:
    body = gzip.compress(b" " * (1 << 20))
    yield JSON.replace(b"Connection", b"Content-Encoding: gzip\r\nConnection") + body


async def go_elsewhere(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 307 Go\r\nLocation: http://localhost:9/\r\nContent-Length: 0\r\n\r\n"


async def never(_: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + task("WORKING")
    await asyncio.Event().wait()


async def ask(other: Elsewhere, text: str = "dig", **limits: Any) -> tuple[str, str]:
    """Ask the remote agent. Return the agent's answer, and the agent's failure in the operators' inbox (empty for
    none).
    """
    async with other.listening() as url, running_node() as here:
        far = A2AAgent("far", url, policy=AgentPolicy(**limits))
        async with (
            working(here, far),
            NetworkClient("mia", here.url, kind="human", token=here.owner_token) as mia,
        ):
            stored = await mia.send("agent:far", text)
            async for delivery in mia.deliveries():
                await delivery.ack()
                if delivery.message.reply_to == stored.seq:
                    if "Done" in delivery.message.text:
                        await other.gone.wait()
                    items = (await mia.call("network.inbox"))["items"]
                    failures = [it["failure"] for it in items if (it["kind"], it["agent_id"]) == ("fault", "far")]
                    assert len(failures) <= 1
                    return delivery.message.text, "".join(failures)
    raise AssertionError


NO_ANSWER = "far cannot answer right now; the operator has been notified."
OUTCOMES: dict[str, tuple[Reply, str, str, int]] = {
    "it says that it is done and goes on": (says_so_and_goes_on, "Done.", "", 1),
    "ten thousand pieces": (in_small_pieces, "x" * 10_000, "", 1),
    "artifacts without a number": (with_many_artifacts, NO_ANSWER, "broken_reply", 1),
    "another task's words": (of_another_task, NO_ANSWER, "broken_reply", 1),
    "no task's words": (of_no_task, NO_ANSWER, "broken_reply", 1),
    "nothing at all": (nothing, NO_ANSWER, "broken_reply", 3),
    "a task that is forgotten again and again": (and_forgets, NO_ANSWER, "not_found", 2),
    "no JSON": (no_json, NO_ANSWER, "broken_reply", 1),
    "JSON without a bottom": (deep_json, NO_ANSWER, "broken_reply", 1),
    "JSON of another shape": (another_shape, NO_ANSWER, "broken_reply", 1),
    "a number that is none": (what_is_no_number, NO_ANSWER, "broken_reply", 1),
    "a line without an end": (without_an_end, NO_ANSWER, "broken_reply", 1),
    "a packed answer": (packed, NO_ANSWER, "broken_reply", 1),
    "another place": (go_elsewhere, NO_ANSWER, "rejected", 1),
}


@pytest.mark.parametrize("name", OUTCOMES, ids=lambda it: it.replace(" ", "-"))
async def test_what_an_agent_elsewhere_does_ends_its_answer_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, told, failure, sent = OUTCOMES[name]
    monkeypatch.setattr(a2a, "RETRY_BACKOFF", Backoff(0.01, 0.01))
    monkeypatch.setattr(a2a, "MAX_RETRIES", 2)
    monkeypatch.setattr(a2a, "POLL_S", 0.01)
    monkeypatch.setattr(a2a, "MAX_RESPONSE_BYTES", 4 << 20)
    other = Elsewhere(reply)
    async with asyncio.timeout(20):
        text, shown = await ask(other)
    assert (text, shown) == (told, failure)
    assert ("Not yet" in text, other.called.count(SENT)) == (False, sent)


async def test_a_task_for_which_there_is_no_time_is_cancelled_there() -> None:
    other = Elsewhere(never)
    async with asyncio.timeout(20):
        assert await ask(other, model_timeout_s=0.5) == (NO_ANSWER, "timeout")
    assert other.called[1:] == ["ListTasks", SENT, "CancelTask"]


CARDS: dict[str, dict[str, Any]] = {
    "no JSON": {"card": b"{"},
    "no text": {"card": b"\xff\xfe\xfa"},
    "no card": {"card": b"[1]"},
    "JSON without a bottom": {"card": b"[" * 100_000},
    "another shape": {"card": b'{"name": 5, "skills": {"a": 1}}'},
    "no port": {"supportedInterfaces": [{"url": "http://127.0.0.1:port/", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}]},
    "no host": {"supportedInterfaces": [{"url": "http://[/", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}]},
    "no binding": {"supportedInterfaces": []},
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
async def test_an_agent_whose_card_is_broken_is_known_by_its_file(name: str) -> None:
    other = Elsewhere(never, **CARDS[name])
    async with asyncio.timeout(20), other.listening() as url:
        far = A2AAgent("far", url, description="Mine")
        await far.prepare()
        assert far.describe_card()["description"] == "Mine"
        await far.close()


async def test_a_card_that_trickles_holds_up_nobody_and_a_large_one_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trickling(Elsewhere):
        async def _tell_card(self) -> AsyncIterator[bytes]:
            yield JSON
            while True:
                yield b" "
                await asyncio.sleep(0.01)

    monkeypatch.setattr(a2a, "CARD_TIMEOUT_S", 0.2)
    async with asyncio.timeout(20), Trickling(never).listening() as url:
        far = A2AAgent("far", url)
        await far.prepare()
        await far.close()
    monkeypatch.setattr(a2a, "CARD_TIMEOUT_S", 10)
    skills = [{"id": "s", "name": "n" * 5000, "description": "", "tags": ["t" * 5000]}] * 50
    async with asyncio.timeout(20), Elsewhere(never, skills=skills).listening() as url, running_node() as here:
        far = A2AAgent("far", url)
        await far.prepare()
        async with working(here, far):
            card = far.describe_card()
        await far.close()
    assert len(json.dumps(card)) < 10_000
