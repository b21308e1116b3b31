"""How far a reader walks: the files that one message passes through, and how often the execution changes from one file to another.

    python bench/walks.py [--json]

Two walks: one ``send`` in the hub (`network/`, from the frame's bytes to the delivery's and the answer's), and one message with one tool call
in an agent (`agents/`, from the delivery to the end of its reaction). Each is taken after a first one of its kind, so that nothing is
imported or made for the first time. A call and a return each count where they go to another file of the same folder; what lies between in
other folders or libraries is passed over. Nothing is timed: the numbers are the same on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import roundelay.agents
import roundelay.network
from roundelay.agents.events import Event, Finished
from roundelay.agents.models.scripted import ScriptedModel, call, say
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.clock import ordered_id, random_id, system_clock
from roundelay.network.config import Limits
from roundelay.network.core.entries import Peer
from roundelay.network.hub import Hub
from roundelay.network.ledger.memory import MemoryLedger


@dataclass
class Walk:
    """What was passed through in one folder, in order, each file as often as it was come to."""

    folder: Path
    steps: list[str] = field(default_factory=list)

    def step(self, frame: FrameType | None) -> None:
        """The execution is in this frame."""
        if frame is None:
            return
        path = frame.f_code.co_filename
        if path.startswith(str(self.folder)) and (not self.steps or self.steps[-1] != path):
            self.steps.append(path)

    def as_json(self) -> dict[str, Any]:
        names = [str(Path(it).relative_to(self.folder)) for it in self.steps]
        return {"files": len(set(names)), "changes": max(0, len(names) - 1), "walk": names}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take note of every call and return of this thread."""

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                self.step(frame)
            elif event == "return":
                self.step(frame)
                self.step(frame.f_back)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)


class _Connection:
    """A client's end that takes everything at once."""

    peer = Peer(is_trusted=True)
    is_paused = False

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def write(self, payloads: list[bytes]) -> None:
        self.taken += payloads

    def end(self, code: int, reason: str) -> None: ...

    def admit(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def walk_send() -> Walk:
    """One ``send`` of 200 bytes to one who is there, in the hub."""
    hub = Hub(MemoryLedger(epoch="e"), limits=Limits(), clock=system_clock, new_id=random_id)
    await hub.start()
    ann, bob = _Connection(), _Connection()
    sessions = [hub.connect(ann), hub.connect(bob)]

    async def until(connection: _Connection, what: bytes) -> None:
        while not any(what in it for it in connection.taken):  # noqa: ASYNC110 (each turn of the loop is part of the walk)
            await asyncio.sleep(0)

    for session, connection, agent_id in zip(sessions, (ann, bob), ("ann", "bob"), strict=True):
        hub.receive(
            session, json.dumps({"type": "hello", "protocol": 1, "agent_id": agent_id, "kind": "agent"}).encode()
        )
        await until(connection, b'"welcome"')
    walk = Walk(_folder(roundelay.network))
    for is_taken in (False, True):
        message_id = ordered_id()
        frame = {"type": "send", "message_id": message_id, "to": "agent:bob", "content": "x" * 200}
        data = json.dumps(frame).encode()
        if is_taken:
            with walk.taken():
                hub.receive(sessions[0], data)
                await until(ann, message_id.encode())
                await until(bob, message_id.encode())
        else:
            hub.receive(sessions[0], data)
            await until(bob, message_id.encode())
    await hub.close()
    return walk


@tool(idempotent=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def walk_reaction() -> Walk:
    """One person's message to an agent that calls one tool and answers."""
    walk = Walk(_folder(roundelay.agents))
    ended: list[Event] = []

    def hear(event: Event) -> None:
        if isinstance(event, Finished):
            ended.append(event)

    model = ScriptedModel(lambda it: call("add", a=2, b=3) if it.turn == 1 else say("It is 5."))
    async with Network.open() as network:
        bob, mia = await network.join("bob", role="reactor"), await network.join("mia", kind="human")
        runner = SimpleAgentRunner("bob", instruction="Add.", model=model, tools=[add], on_event=hear)
        running = asyncio.create_task(runner.run(bob))
        await runner.ready()
        answers = mia.__aiter__()
        await mia.send_text("bob", "2 and 3?")
        await anext(answers)
        while not ended or runner.is_at_work:  # noqa: ASYNC110 (what is left of the first is no part of the walk)
            await asyncio.sleep(0)
        with walk.taken():
            await mia.send_text("bob", "2 and 3?")
            await anext(answers)
            while len(ended) < 2 or runner.is_at_work:  # noqa: ASYNC110 (each turn of the loop is part of the walk)
                await asyncio.sleep(0)
        await runner.stop()
        await running
    return walk


def _folder(package: Any) -> Path:
    return Path(package.__file__).resolve().parent


def main() -> None:
    """Take both walks and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="as JSON, with every file in its order")
    chosen = parser.parse_args()
    walks = {
        "a send, in network/": asyncio.run(walk_send()),
        "a message with one tool call, in agents/": asyncio.run(walk_reaction()),
    }
    found = {name: walk.as_json() for name, walk in walks.items()}
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    for name, counted in found.items():
        sys.stdout.write(f"{name}: {counted['files']} files, {counted['changes']} changes of file\n")


if __name__ == "__main__":
    main()
