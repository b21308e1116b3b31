"""Fake OpenAI chat completions server on loopback, as strict as the real one.

In a test: ``async with FakeOpenAI(script) as server: OpenAIModel("m", base_url=server.base_url)``. As a process, for
agents in other processes: ``python tests/support/fake_openai.py --port 0 --script package.module:function`` (or
``file.py:function``). The process prints its base URL on the first line and ends on SIGTERM. ``GET /requests``
returns the requests that it received.

The script is a function from the request body to a `Reply` (sync or async), or a list of replies in order. Before the
server runs the script, it refuses what the real API refuses, with the same error messages (`openai_rules`): unpaired
tool calls and results, invalid names and schemas, unknown parameters. ``requests`` holds all requests, including
refused ones.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import inspect
import itertools
import json
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

if __name__ == "__main__":
    # When this file runs as a program, `tests` must be importable from the repository's root. A script that imports
    # this module by name must get the same `Reply` class.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.modules["tests.support.fake_openai"] = sys.modules["__main__"]

from tests.support.openai_rules import Body, find_refusal


@dataclass(frozen=True)
class Reply:
    """Reply to one request, created by the functions below. ``fault`` names a failure, such as a reset connection."""

    content: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None
    reasoning: str | None = None
    refusal: str | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    fault: Literal["reset", "cut", "end", "silence"] | None = None
    delay_s: float = 0.0
    until: asyncio.Event | None = None
    """The server sends the reply after this event, so that a test can keep a request in flight."""
    chunk_usage: Mapping[str, int] | None = None
    """Usage that each chunk of a stream reports, as some compatible servers do."""
    ends: asyncio.Event | None = None
    """The server sends all of the stream's content, and waits for this event before it ends the stream."""


def text(content: str, **options: Any) -> Reply:
    """Answer with text."""
    return Reply(content, **options)


def calls(wanted: Iterable[tuple[str, Any] | Mapping[str, Any]], content: str | None = None, **options: Any) -> Reply:
    """Answer with tool calls. Each call is a pair of name and arguments (a mapping or raw text), or a whole object of
    the API.
    """
    return Reply(content, tuple(item if isinstance(item, Mapping) else call(*item) for item in wanted), **options)


def call(name: str, arguments: Any = None, call_id: str | None = None) -> Mapping[str, Any]:
    """Return one tool call. The server assigns an ID if ``call_id`` is None."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}


def error(status: int, message: str, *, code: str | None = None, param: str | None = None, **options: Any) -> Reply:
    """Answer with an error in the API's format."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return Reply(status=status, body=body, **options)


def rate_limited(retry_after_s: float | None = None) -> Reply:
    """Answer 429, with ``retry-after`` if a delay is given."""
    headers = {} if retry_after_s is None else {"retry-after": f"{retry_after_s:g}"}
    return error(429, "Rate limit reached for requests", code="rate_limit_exceeded", headers=headers)


def server_error(status: int = 500) -> Reply:
    """Answer with an internal error of the provider."""
    return error(status, "The server had an error while processing your request. Sorry about that!")


def context_too_long() -> Reply:
    """Answer 400 for a conversation that exceeds the model's context length."""
    sentence = (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. "
        "Please reduce the length of the messages."
    )
    return error(400, sentence, code="context_length_exceeded", param="messages")


def content_filter() -> Reply:
    """Answer with empty text that the provider's content filter withheld."""
    return Reply("", finish_reason="content_filter")


def empty() -> Reply:
    """Answer without content."""
    return Reply(None, finish_reason="stop")


def reset() -> Reply:
    """Reset the connection before the first byte of the answer."""
    return Reply(fault="reset")


def cut(content: str = "This will not be said to its e") -> Reply:
    """Break off the answer: a stream after its first chunks, a plain body after half of its bytes."""
    return Reply(content, fault="cut")


def end_early(content: str = "This will not be said to its e") -> Reply:
    """End a stream cleanly, but without a finish reason."""
    return Reply(content, fault="end")


def silence() -> Reply:
    """Send nothing, and keep the connection open until the client closes it."""
    return Reply(fault="silence")


Script = Callable[[Body], Reply | Awaitable[Reply]]


@dataclass(frozen=True)
class Received:
    """One received request. ``body`` is empty if it was not JSON."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Body
    status: int
    """HTTP status of the answer. 0 means no answer."""


class FakeOpenAI:
    """The fake server. ``api_key`` is required from clients if given. ``models`` are the only known models if given.
    ``chunk_chars`` is the number of characters in a chunk of a stream.
    """

    def __init__(
        self,
        script: Script | Sequence[Reply],
        *,
        api_key: str | None = None,
        models: Sequence[str] = (),
        chunk_chars: int = 7,
        port: int = 0,
    ) -> None:
        self._script = script if callable(script) else _take_in_turn(script)
        self._api_key = api_key
        self._models = models
        self._chunk_chars = chunk_chars
        self._port = port
        self._numbers = itertools.count(1)
        self._arrived = asyncio.Condition()
        self._answering: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.received: list[Received] = []

    @property
    def requests(self) -> list[Body]:
        """Return the bodies of all chat requests, in order."""
        return [it.body for it in self.received if it.path.partition("?")[0].endswith("/chat/completions")]

    @property
    def base_url(self) -> str:
        assert self._server is not None, "the server is not running"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self._server.wait_closed()

    async def wait_for_requests(self, count: int) -> None:
        """Return when ``count`` chat requests have arrived, answered or not."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            while await self._answer_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client disconnected, or the test ended
        finally:
            self._answering.discard(task)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request. Return False if the connection must be closed."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        if path == "/requests":
            _write_json(writer, 200, [item.__dict__ for item in self.received])
            return True
        try:
            body = json.loads(data or b"{}")
        except ValueError:
            body = {}
        reply = self._refuse(method, path, headers, body)
        async with self._arrived:
            place = len(self.received)
            self.received.append(Received(method, path, headers, body, reply.status if reply else 0))
            self._arrived.notify_all()
        if reply is None and path.endswith("/models"):
            names = self._models or ("fake",)
            listed = [{"id": name, "object": "model", "created": 0, "owned_by": "fake"} for name in names]
            reply = Reply(body={"object": "list", "data": listed})
        if reply is None:
            answer = self._script(body)
            reply = await answer if inspect.isawaitable(answer) else answer
            if reply.until is not None:
                await reply.until.wait()
            await asyncio.sleep(reply.delay_s)
        self.received[place] = Received(method, path, headers, body, 0 if reply.fault else reply.status)
        return await self._send(reader, writer, reply, body)

    def _refuse(self, method: str, path: str, headers: Mapping[str, str], body: Body) -> Reply | None:
        key = headers.get("authorization", "").removeprefix("Bearer ")
        if self._api_key is not None and key != self._api_key:
            if not key:
                return error(
                    401, "You didn't provide an API key. You need to provide your API key in an Authorization header."
                )
            return error(401, f"Incorrect API key provided: {key[:3]}***.", code="invalid_api_key")
        if (method, path.partition("?")[0]) not in {("POST", "/v1/chat/completions"), ("GET", "/v1/models")}:
            return error(404, f"Invalid URL ({method} {path})")
        if method == "GET":
            return None
        if self._models and body.get("model") not in self._models:
            sentence = f"The model `{body.get('model')}` does not exist or you do not have access to it."
            return error(404, sentence, code="model_not_found")
        refusal = find_refusal(body)
        return error(400, refusal.message, code=refusal.code, param=refusal.param) if refusal else None

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply, body: Body) -> bool:
        if reply.fault == "reset":
            # With a linger time of 0 s, the close sends an RST: see socket(7).
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if reply.fault == "silence":
            await reader.read(1)  # returns when the client closes the connection
            return False
        if reply.status != 200 or reply.body is not None:
            _write_json(writer, reply.status, reply.body, reply.headers)
        elif body.get("stream"):
            await self._send_stream(writer, reply, body)
        else:
            data = json.dumps(self._build_completion(reply, body)).encode()
            _write_head(
                writer, 200, {"content-type": "application/json", "content-length": str(len(data)), **reply.headers}
            )
            writer.write(data[: len(data) // 2] if reply.fault == "cut" else data)
        await writer.drain()
        return reply.fault is None

    async def _send_stream(self, writer: asyncio.StreamWriter, reply: Reply, body: Body) -> None:
        _write_head(writer, 200, {"content-type": "text/event-stream", "transfer-encoding": "chunked", **reply.headers})
        chunks = list(self._build_chunks(reply, body))
        for chunk in chunks[: len(chunks) // 2] if reply.fault else chunks:
            if reply.ends is not None and any(choice["finish_reason"] for choice in chunk["choices"]):
                await reply.ends.wait()
            _write_chunk(writer, f"data: {json.dumps(chunk)}\n\n".encode())
            await writer.drain()
        if reply.fault is None:
            _write_chunk(writer, b"data: [DONE]\n\n")
        if reply.fault != "cut":
            writer.write(b"0\r\n\r\n")

    def _build_completion(self, reply: Reply, body: Body) -> Body:
        message: Body = {"role": "assistant", "content": reply.content, "refusal": reply.refusal}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [self._number(item) for item in reply.tool_calls]
        choice = {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
        return {**self._envelope(body, "chat.completion"), "choices": [choice], "usage": _usage(reply, body)}

    def _build_chunks(self, reply: Reply, body: Body) -> Iterator[Body]:
        envelope = self._envelope(body, "chat.completion.chunk")

        def chunk(delta: Body, finish_reason: str | None = None) -> Body:
            told = {} if reply.chunk_usage is None else {"usage": dict(reply.chunk_usage)}
            return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **told}

        yield chunk({"role": "assistant", "content": ""})
        for piece in self._split(reply.reasoning):
            yield chunk({"reasoning_content": piece})
        for piece in self._split(reply.content):
            yield chunk({"content": piece})
        for piece in self._split(reply.refusal):
            yield chunk({"refusal": piece})
        for index, item in enumerate(reply.tool_calls):
            numbered = self._number(item)
            function = numbered["function"]
            yield chunk({"tool_calls": [{**numbered, "index": index, "function": {**function, "arguments": ""}}]})
            for piece in self._split(function["arguments"]):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, _finish_reason(reply))
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**envelope, "choices": [], "usage": _usage(reply, body)}

    def _envelope(self, body: Body, kind: str) -> Body:
        return {"id": f"chatcmpl-{next(self._numbers)}", "object": kind, "created": 0, "model": body.get("model", "")}

    def _number(self, item: Mapping[str, Any]) -> Body:
        if item.get("id", "given") is None:
            return {**item, "id": f"call_{next(self._numbers):08d}"}
        return dict(item)  # some real servers send their own ID or none

    def _split(self, content: Any) -> Iterable[Any]:
        if content and not isinstance(content, str):
            return [content]  # some real servers send the arguments as an object
        size = self._chunk_chars
        return [content[start : start + size] for start in range(0, len(content), size)] if content else ()


def _take_in_turn(replies: Sequence[Reply]) -> Script:
    rest = iter(replies)
    return lambda body: next(rest, error(500, "The test has no reply left for this request."))


def _finish_reason(reply: Reply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")


def _usage(reply: Reply, body: Body) -> Body:
    prompt, completion = reply.usage or (
        len(json.dumps(body["messages"])) // 4,
        (len(reply.content or "") + len(json.dumps(reply.tool_calls, default=dict))) // 4,
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _write_head(writer: asyncio.StreamWriter, status: int, headers: Mapping[str, str]) -> None:
    lines = [f"HTTP/1.1 {status} Fake", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))


def _write_json(writer: asyncio.StreamWriter, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    """Write a JSON response. A body of type `str` is written unchanged, for replies that are not JSON."""
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    _write_head(
        writer, status, {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    )
    writer.write(data)


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _load_script(spec: str) -> Script:
    where, _, attribute = spec.rpartition(":")
    if where.endswith(".py"):
        found = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    script: Script = getattr(module, attribute)
    return script


async def _run(arguments: argparse.Namespace) -> None:
    async with FakeOpenAI(
        _load_script(arguments.script), api_key=arguments.api_key, models=arguments.model, port=arguments.port
    ) as server:
        print(server.base_url, flush=True)
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A fake OpenAI-compatible server on loopback.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script", required=True, help="package.module:function or file.py:function")
    parser.add_argument("--api-key")
    parser.add_argument("--model", action="append", default=[])
    asyncio.run(_run(parser.parse_args()))
