"""One process of an adapted agent: ``python adapted_process.py PLACE WHEN FOLDER``. The process kills itself before
or after it sends a frame to the hub (a record by its kind, or ``reply``), or during a run of the fake framework
(``run``). Each run of the framework adds a line to FOLDER/runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roundelay.adapters.participant import AdaptedAgent, IncomingTurn
from roundelay.agents.models.model import Usage
from roundelay.network.client import Batched, NetworkClient, Stored
from roundelay.network.frames import RecordFrame, SendFrame

PLACE, WHEN, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def reach(place: str, when: str) -> None:
    if (place, when) == (PLACE, WHEN):
        os.kill(os.getpid(), signal.SIGKILL)


class MortalClient(NetworkClient):
    """Client that kills its process at the configured place."""

    async def record(self, reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str) -> Stored:
        reach(kind, "before")
        stored = await super().record(reaction, kind, body, record_id=record_id)
        reach(kind, "after")
        return stored

    async def store_batch(self, frames: Sequence[SendFrame | RecordFrame]) -> Batched:
        places = [frame.kind if isinstance(frame, RecordFrame) else "reply" for frame in frames]
        for place in places:
            reach(place, "before")
        batched = await super().store_batch(frames)
        for place in places:
            reach(place, "after")
        return batched

    async def reply(self, message: Any, text: str, **options: Any) -> Stored:
        reach("reply", "before")
        stored = await super().reply(message, text, **options)
        reach("reply", "after")
        return stored


class Counted(AdaptedAgent):
    """Agent that records its runs and answers."""

    async def answer(self, turn: IncomingTurn) -> str:
        reach("run", "before")
        with (FOLDER / "runs").open("a") as runs:
            runs.write(f"{turn.message.text} {turn.reaction}\n")
        await turn.keep("asked", turn.message.text)
        reach("run", "after")
        turn.count(Usage(3, 2), "counted")
        return f"{turn.message.text}!"


async def main() -> None:
    agent = Counted("bob")
    async with MortalClient("bob", kind="agent", role="reactor", card=agent.describe_card()) as client:
        await agent.run(client)


asyncio.run(main())
