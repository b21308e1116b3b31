"""The page's modules as a client of a real node, without a page. `PageClient` runs `follow.js` in node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.page_modules import MAX_LINE, NODE

FOLLOW = Path(__file__).with_name("follow.js")
ANSWER_TIMEOUT_S = 60.0


class PageClient:
    """The page of one participant. Each command is a line to its process, which answers it."""

    def __init__(self, process: asyncio.subprocess.Process, agent_id: str) -> None:
        self.agent_id = agent_id
        self._process = process

    async def do(self, name: str, **given: Any) -> Any:
        """Run a command and return its result. An error fails the test."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": name, **given}).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_TIMEOUT_S)
        assert line, f"the page's process has ended in {name}"
        answer = json.loads(line)
        assert "failed" not in answer, f"{self.agent_id} {name} {given}: {answer['failed']}"
        return answer


@asynccontextmanager
async def running_page(url: str, agent_id: str, token: str, *, kind: str = "human") -> AsyncIterator[PageClient]:
    """Run the page of a participant. On entry, the page has joined and loaded its threads."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(NODE, str(FOLLOW), stdin=pipe, stdout=pipe, limit=MAX_LINE)
    client = PageClient(process, agent_id)
    try:
        await client.do("begin", url=url, agent_id=agent_id, kind=kind, token=token)
        yield client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
