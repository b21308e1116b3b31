"""The floor: the same model requests, written by hand with sockets and JSON, without error handling or limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from peer import Ask, Job, run
from workloads import WORKERS, add, conversation, has_adder, instruction, model_name, target

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ADD = {"a": {"type": "integer"}, "b": {"type": "integer"}}
QUESTION = {"text": {"type": "string"}}


def describe(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


class Floor:
    """Agents as loops that share one pool of connections."""

    def __init__(self, job: Job) -> None:
        self._work = job.work
        self._port = int(re.findall(r":(\d+)/", job.base_url)[0])
        self._idle: list[Stream] = []
        self._histories: dict[str, list[dict[str, Any]]] = {}

    async def ask(self, number: int, text: str) -> str:
        return await self._answer(target(self._work, number), text, conversation(self._work, number))

    async def _answer(self, agent: str, text: str, history_id: str) -> str:
        messages = self._histories.setdefault(
            f"{agent} {history_id}", [{"role": "system", "content": instruction(agent)}]
        )
        messages.append({"role": "user", "content": text})
        tools = [describe("add", "Add two whole numbers.", ADD)] if has_adder(self._work, agent) else []
        if self._work == "w2" and agent == "ann":
            tools = [describe(worker, f"Ask {worker}", QUESTION) for worker in WORKERS]
        while True:
            message = await self._request(
                {"model": model_name(self._work, agent), "messages": messages} | ({"tools": tools} if tools else {})
            )
            messages.append(message)
            calls = message.get("tool_calls")
            if not calls:
                return message["content"]
            results = await asyncio.gather(*(self._call(**call["function"], history_id=history_id) for call in calls))
            for call, result in zip(calls, results, strict=True):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def _call(self, name: str, arguments: str, history_id: str) -> str:
        values = json.loads(arguments)
        return str(add(**values)) if name == "add" else await self._answer(name, values["text"], history_id)

    async def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        stream = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = stream
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: model\r\ncontent-length: %d\r\n\r\n" % len(data))
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        reply = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        self._idle.append(stream)
        return json.loads(reply)["choices"][0]["message"]


@contextlib.asynccontextmanager
async def open_system(job: Job) -> AsyncIterator[Ask]:
    yield Floor(job).ask


run(open_system)
