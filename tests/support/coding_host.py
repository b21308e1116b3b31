"""A scripted coding agent (examples/coding_agents/scripted_host.py) as a separate process that a test controls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Self

from tests.support.forks import Process, start_python

PROGRAM = Path(__file__).parents[2] / "examples" / "coding_agents" / "scripted_host.py"


class CodingHost:
    def __init__(self, process: Process) -> None:
        self.process = process

    @classmethod
    async def begin(cls, kind: str, project: Path, session: str) -> Self:
        return cls(
            await start_python(
                *(PROGRAM, kind, project, session), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        )

    def tell(self, do: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")

    async def do(self, do: str, **more: Any) -> str:
        """Run one step, and return the text that the host gave to the model."""
        self.tell(do, **more)
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            return str(json.loads(await self.process.stdout.readline()))

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
