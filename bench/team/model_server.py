"""A fake server for OpenAI's Chat Completions on loopback. The server prints its port as JSON.

The name of the model is SCRIPT:AGENT. An answer depends only on the request, and only on its last question, such as
`Q17: 3+4`. The scripts are:

tool    calls `add`, then answers `A17: 7.`
worker  like tool, but with the answer `R17 AGENT=7.`
lead    asks bob0 to bob4 with the offered tools, then answers `A17: 35 of 5.`
chat    answers `A17: 7.` and a sentence

`GET /stats` returns the counts since the last `GET /reset`: the requests, the bytes of their prompts (tools and
messages as JSON), and the bytes that do not repeat the beginning of the agent's previous request.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from workloads import WORKERS

Calls = list[tuple[str, dict[str, Any]]]


class Counts:
    """Counts of requests and bytes during one measurement."""

    def __init__(self) -> None:
        self.requests = self.prompt_bytes = self.fresh_bytes = 0
        self._previous: dict[str, bytes] = {}

    def add(self, body: dict[str, Any]) -> None:
        parts = (body.get("tools") or [], body["messages"])
        prompt = b"".join(json.dumps(part, separators=(",", ":")).encode() for part in parts)
        self.requests += 1
        self.prompt_bytes += len(prompt)
        self.fresh_bytes += len(prompt) - count_shared(self._previous.get(body["model"], b""), prompt)
        self._previous[body["model"]] = prompt


def count_shared(first: bytes, second: bytes) -> int:
    """Return the length of the common beginning of two texts, by bisection."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def read_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())


def decide(body: dict[str, Any]) -> tuple[str | None, Calls]:
    """Return the text of the answer, and its tool calls."""
    script, _, agent = body["model"].partition(":")
    messages = body["messages"]
    asked = [
        (index, found[-1])
        for index, message in enumerate(messages)
        if message["role"] != "tool" and (found := re.findall(r"Q(\d+): (\d+)\+(\d+)", read_text(message)))
    ]
    if not asked:
        return "There is no question.", []
    index, (number, a, b) = asked[-1]
    results = [read_text(message) for message in messages[index + 1 :] if message["role"] == "tool"]
    if script == "chat":
        return (
            f"A{number}: {int(a) + int(b)}. Sums are easy when you do them one at a time, and no one is in a hurry.",
            [],
        )
    offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body.get("tools") or ()}
    if script == "lead":
        said = "\n".join(read_text(message) for message in messages[index:])
        answers = dict(re.findall(rf"R{number} (\w+)=(\d+)", said))
        if results or len(answers) >= len(WORKERS):
            return f"A{number}: {sum(map(int, answers.values()))} of {len(answers)}.", []
        return None, plan_calls(offered, f"Q{number}: {a}+{b}")
    if not results:
        adder = next((name for name in offered if name.endswith("add")), "add")
        return None, [(adder, {"a": int(a), "b": int(b)})]
    total = re.search(r"-?\d+", results[-1])
    shown = total[0] if total else "none"
    return (f"R{number} {agent}={shown}." if script == "worker" else f"A{number}: {shown}."), []


def plan_calls(offered: dict[str, Any], question: str) -> Calls:
    """Return the calls that ask all workers: one call of `ask`, calls of `TeamAssign`, or one call of each worker's
    tool.
    """
    if "ask" in offered:
        limit = {"timeout_s": 60} if "timeout_s" in offered["ask"]["properties"] else {}
        return [("ask", {"agent_ids": WORKERS, "text": question, **limit})]
    if "TeamAssign" in offered:
        return [("TeamAssign", {"member": worker, "prompt": question}) for worker in WORKERS]
    return [
        (name, {next(iter(schema["properties"])): question})
        for worker in WORKERS
        for name, schema in offered.items()
        if name.endswith(worker)
    ]


def answer(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the completion that answers a request."""
    text, calls = decide(body)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "index": place,
                "id": f"call_{number}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for place, (name, arguments) in enumerate(calls)
        ]
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1700000000,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }


def stream(completion: dict[str, Any]) -> bytes:
    """Return a completion as server-sent events. Each event contains one word, or all tool calls."""
    [choice] = completion["choices"]
    message = choice["message"]
    deltas = [{"role": "assistant", "content": f"{word} "} for word in (message["content"] or "").split()]
    if "tool_calls" in message:
        deltas.append({"role": "assistant", "tool_calls": message["tool_calls"]})
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices += [[{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}], []]
    pieces: list[dict[str, Any]] = [
        {**completion, "object": "chat.completion.chunk", "choices": it, "usage": None} for it in choices
    ]
    pieces[-1]["usage"] = completion["usage"]
    return b"".join(b"data: %b\n\n" % json.dumps(piece).encode() for piece in pieces) + b"data: [DONE]\n\n"


class Server:
    """Answers the requests of all connections, and counts them."""

    def __init__(self) -> None:
        self._counts = Counts()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                length = re.search(r"(?i)content-length: (\d+)", head)
                data = await reader.readexactly(int(length[1])) if length else b""
                kind, reply = self._handle(head.split(" ", 2)[1], data)
                lines = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(reply)}\r\n\r\n"
                writer.write(lines.encode() + reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _handle(self, path: str, data: bytes) -> tuple[str, bytes]:
        """Return the media type and the body of a reply."""
        if path == "/reset":
            self._counts = Counts()
        if path in ("/reset", "/stats"):
            counts = {name: value for name, value in vars(self._counts).items() if not name.startswith("_")}
            return "application/json", json.dumps(counts).encode()
        body = json.loads(data)
        self._counts.add(body)
        completion = answer(body, self._counts.requests)
        if body.get("stream"):
            return "text/event-stream", stream(completion)
        return "application/json", json.dumps(completion).encode()


async def main() -> None:
    server = await asyncio.start_server(Server().serve, "127.0.0.1", 0, limit=2**24, backlog=1024)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
