"""A server for chat completions. It runs outside of the measured client, which spends only network time on it.

    python bench/chat_server.py

The server is a separate process, so that its CPU is not measured, and prints one ready line. The server answers the
first `CALLING_TURNS` requests of a conversation with one call of the tool ``look_up`` each. Later requests get text, or
a call of ``give_answer`` if the request offers this tool. A request without tools gets text. Roundelay's requests
contain the number of their turn, which the server uses. For other requests, the server counts the messages of the
model. All answers are prepared at the start. The server does not check requests, unlike the server of the tests.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast

import uvloop

CALLING_TURNS = 5
TURNS = CALLING_TURNS + 1
ANSWER = "All five are in stock [1], and the last one is reduced until Friday [2]."
STRUCTURED_ANSWER = {
    "text": ANSWER,
    "articles": ["A-0001", "A-0002", "A-0003", "A-0004", "A-0005"],
    "is_complete": True,
}

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_OWN_MESSAGE = re.compile(rb'"role": ?"assistant"')
_SAID_TURN = re.compile(rb"Turn (\d+) of \d+")
_STREAM = re.compile(rb'"stream": ?true')
_USAGE = {"prompt_tokens": 420, "completion_tokens": 18, "total_tokens": 438}
_PIECE_CHARS = 5  # about the length of a token


def build_completion(turn: int, *, is_structured: bool = False) -> bytes:
    """Return the complete HTTP response for a turn."""
    message = _build_structured() if is_structured else _build_message(turn)
    reason = "tool_calls" if "tool_calls" in message else "stop"
    body = json.dumps(
        {
            "id": f"chatcmpl-{turn}",
            "object": "chat.completion",
            "created": 1_760_000_000,
            "model": "bench",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
            "usage": _USAGE,
            "system_fingerprint": "fp_bench",
        }
    ).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def build_stream(turn: int) -> bytes:
    """Return the HTTP response for a turn as server-sent events. Each event contains a few characters of the text or of
    the call's arguments.
    """
    message = _build_message(turn)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if "tool_calls" in message else ""}]
    if "tool_calls" in message:
        (call,) = message["tool_calls"]
        function = call["function"]
        deltas.append({"tool_calls": [{**call, "index": 0, "function": {**function, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in _split(function["arguments"])
        ]
    else:
        deltas += [{"content": piece} for piece in _split(ANSWER)]
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}] for delta in deltas
    ]
    choices.append([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _find_reason(turn)}])
    envelope: dict[str, Any] = {
        "id": f"chatcmpl-{turn}", "object": "chat.completion.chunk", "created": 1_760_000_000, "model": "bench",
        "system_fingerprint": "fp_bench",
    }  # fmt: skip
    chunks = [{**envelope, "choices": choice, "usage": None} for choice in choices]
    chunks.append({**envelope, "choices": [], "usage": _USAGE})
    events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


def _build_message(turn: int) -> dict[str, Any]:
    if turn > CALLING_TURNS:
        return {"role": "assistant", "content": ANSWER, "refusal": None}
    arguments = json.dumps({"article": f"A-{turn:04d}", "warehouse": "north"})
    call = {"id": f"call_{turn:08d}", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}


def _build_structured() -> dict[str, Any]:
    arguments = json.dumps({"answer": STRUCTURED_ANSWER})
    call = {"id": "call_answer", "type": "function", "function": {"name": "give_answer", "arguments": arguments}}
    return {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}


def _find_reason(turn: int) -> str:
    return "stop" if turn > CALLING_TURNS else "tool_calls"


def _split(text: str) -> list[str]:
    return [text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS)]


class ChatConnection(asyncio.Protocol):
    """A client's keep-alive connection, whose requests come one after the other."""

    completions = tuple(build_completion(turn) for turn in range(1, TURNS + 1))
    streams = tuple(build_stream(turn) for turn in range(1, TURNS + 1))
    structured = build_completion(TURNS, is_structured=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._received, 0, end)
            whole = end + 4 + (int(length[1]) if length is not None else 0)
            if len(self._received) < whole:
                return
            body, self._received = self._received[end + 4 : whole], self._received[whole:]
            self._transport.write(self._find_answer(body))

    def _find_answer(self, body: bytes) -> bytes:
        said = _SAID_TURN.findall(body)
        turn = min(int(said[-1]) - 1 if said else len(_OWN_MESSAGE.findall(body)), CALLING_TURNS)
        if b'"tools":' not in body:
            turn = CALLING_TURNS
        elif turn == CALLING_TURNS and b'"give_answer"' in body:
            return self.structured
        return (self.streams if _STREAM.search(body) else self.completions)[turn]


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(ChatConnection, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"answering at http://{host}:{port}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
