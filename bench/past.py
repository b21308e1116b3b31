"""What one reaction's window costs the hub, by how much its agent has been told before.

    python bench/past.py [--messages 100 10000 100000] [--conversations 1 10000] [--calls 200] [--json]

A hub in this process, over a database in a temporary directory. The agent has read ``messages`` in ``conversations`` with one person.
Each call is a message of that person and the `network.window` for it, as an agent asks. What counts is the ratio to the smallest past,
of processor time of the whole process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from roundelay.network.clock import ordered_id, random_id, system_clock
from roundelay.network.config import Limits
from roundelay.network.core.entries import Origin
from roundelay.network.hub import Hub
from roundelay.network.hub.local import LocalConnection
from roundelay.network.ledger.sqlite import SQLiteLedger
from roundelay.network.operations.reading import Reading
from roundelay.network.operations.views import window

LIMITS = Limits(sends_per_s=10_000_000, root_messages_per_s=10_000_000, messages_per_day=100_000_000)


class Speaker:
    """The person: sends, and waits for the answers of the hub."""

    def __init__(self, hub: Hub, agent_id: str, kind: str) -> None:
        self._connection = LocalConnection(hub)
        self._frames = self._connection.frames()
        self._hello = {"type": "hello", "protocol": 1, "agent_id": agent_id, "kind": kind, "role": "observer"}

    async def join(self) -> None:
        await self._ask(self._hello, "welcome")

    async def say(self, conversations: list[str]) -> int:
        """Send a message into each of these conversations; gives the seq of the last."""
        seq = 0
        for start in range(0, len(conversations), 500):
            part = conversations[start : start + 500]
            for name in part:
                text = {"to": "agent:desk", "conversation": name, "content": "How long does it take until it is there?"}
                self._connection.send(json.dumps({"type": "send", "message_id": ordered_id(), **text}).encode())
            for _ in part:
                seq = (await self._until("stored"))["seq"]
        return seq

    async def _ask(self, frame: dict[str, Any], answer: str) -> dict[str, Any]:
        self._connection.send(json.dumps(frame).encode())
        return await self._until(answer)

    async def _until(self, answer: str) -> dict[str, Any]:
        async for data in self._frames:
            frame: dict[str, Any] = json.loads(data)
            if frame["type"] == answer:
                return frame
            assert frame["type"] not in ("error", "refused"), frame
        raise AssertionError("the hub closed the connection")


async def measure(folder: Path, messages: int, conversations: int, calls: int) -> float:
    """Processor time of one message and its window, in milliseconds: the median."""
    ledger = SQLiteLedger(folder / f"{messages}-{conversations}.db", new_epoch=random_id, durability="normal")
    hub = Hub(ledger, limits=LIMITS, clock=system_clock, new_id=random_id)
    await hub.start()
    desk, tom = Speaker(hub, "desk", "agent"), Speaker(hub, "tom", "human")
    await desk.join()
    await tom.join()
    names = [f"c{number % conversations}" for number in range(messages)]
    await tom.say(names)
    reading = Reading(Origin("", "desk", "agent"), hub.view)
    await window(reading, trigger=await tom.say(names[:1]))
    spent = []
    for number in range(calls):
        started = time.process_time()
        await window(reading, trigger=await tom.say([names[number % len(names)]]))
        spent.append((time.process_time() - started) * 1000)
    await hub.close()
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--conversations", type=int, nargs="+", default=[1, 10_000])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for conversations in chosen.conversations:
            first = 0.0
            for messages in chosen.messages:
                cost = asyncio.run(measure(Path(folder), messages, conversations, chosen.calls))
                first = first or cost
                found.append({"messages": messages, "conversations": conversations, "ms": cost, "ratio": cost / first})
    if chosen.json:
        print(json.dumps(found))
        return
    for it in found:
        print("{messages:>8} messages, {conversations:>6} conversations: {ms:6.2f} ms, {ratio:4.2f}".format(**it))


if __name__ == "__main__":
    main()
