"""The agent that the A2A compatibility kit talks to. The message ID (`tck-...`) selects what the agent does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from roundelay.agents.reaction_ids import reaction_id
from roundelay.network.client import AnyMessage, NetworkClient

FILE = {"name": "output.txt", "media_type": "text/plain"}
CONTENTS: dict[str, Any] = {
    "tck-complete-task": "Hello from TCK",
    "tck-artifact-text": "Generated text content",
    "tck-artifact-file-url": {"files": [{**FILE, "url": "https://example.com/output.txt"}]},
    "tck-artifact-file": {"files": [{**FILE, "data": "b3V0cHV0"}]},
    "tck-artifact-data": {"key": "value", "count": 42},
    "tck-message-response": "Direct message response",
    "tck-stream-artifact-chunked": "chunk-1 chunk-2",
}
"""Content of an answer, by prefix of the message ID. The first matching prefix is used."""
LONG_S = 4.0
"""Duration of a task that the kit subscribes to again, in seconds."""


async def answer(client: NetworkClient, message: AnyMessage) -> None:
    """Answer one message, and write the records of a reaction."""
    reaction = reaction_id(client.agent_id, message.seq, client.welcome.network.epoch)
    await client.record(reaction, "started", {"trigger": message.seq}, record_id=f"{reaction}-started")
    name = message.message_id
    content = next((it for prefix, it in CONTENTS.items() if name.startswith(prefix)), f"Done: {name}")
    options: dict[str, Any] = {"reply_to": message.seq, "cause": message.seq}
    if name.startswith("tck-input-required"):
        content, options["requires_response"] = "What more?", [message.sender_id]
    elif name.startswith("tck-message-response"):
        options["metadata"] = {"a2a": "message"}
    elif name.startswith("tck-test-resubscribe-message-id"):
        await asyncio.sleep(LONG_S)
    if isinstance(content, str) and " " in content:
        at = 0
        for word in content.split(" ")[:-1]:
            piece = {"index": at, "turn": 1, "kind": "text", "at": at, "text": f"{word} "}
            await client.signal(
                "delta", {"reaction": reaction, "pieces": [piece]}, thread_id=message.thread_id, trigger=message.seq
            )
            at += len(word) + 1
    await client.send(f"agent:{message.sender_id}", content, message_id=f"{reaction}-answer", **options)
    body = {"status": "finished", "reason": "answered", "turns": 1}
    await client.record(reaction, "finished", body, record_id=f"{reaction}-finished")
    done = {"reaction": reaction, "active": False}
    await client.signal("thinking", done, thread_id=message.thread_id, trigger=message.seq)


@asynccontextmanager
async def kit_agent(url: str, agent_id: str = "kit") -> AsyncIterator[None]:
    """Run the agent on a node until the context ends."""

    async def work(client: NetworkClient) -> None:
        async with asyncio.TaskGroup() as group:
            async for message in client:
                group.create_task(answer(client, message))

    card = {"description": "Answers the compatibility kit", "tools": ["answer"]}
    async with NetworkClient(agent_id, url, role="reactor", card=card) as client:
        working = asyncio.create_task(work(client))
        try:
            yield
        finally:
            working.cancel()
            await asyncio.wait([working])
            assert working.cancelled(), working.exception()
