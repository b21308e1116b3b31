"""Two coding agents and a person: Claude Code asks Codex in the middle of its work, and mia reads along.

    python pair.py

Needs no model and no key. The hosts are scripted (scripted_host.py); their files, hooks, MCP servers and the network
are real. To connect your own: `roundelay bridge install claude`, and the same for codex.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from roundelay.app import serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig

HOST = Path(__file__).with_name("scripted_host.py")


class Host:
    """A coding agent in its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def begin(cls, kind: str, project: Path, session: str) -> Host:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                str(HOST),
                kind,
                str(project),
                session,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def do(self, what: str, **more: Any) -> str:
        """Let the agent do one step. Return the texts that its model gets."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        line = await self.process.stdout.readline()
        return str(json.loads(line))

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


async def run(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "roundelay", *words)
    if await process.wait():
        raise SystemExit("roundelay failed")


def messages(text: str) -> list[str]:
    return re.findall(r'<message seq="\d+" from="([^"]+)".*?>(.*?)</message>', text, flags=re.S)


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="coding-agents-"))
    os.environ["ROUNDELAY_HOME"] = str(folder / "home")
    project = folder / "shop"
    project.mkdir()
    async with serve(NodeConfig(port=0, db=folder / "shop.db")) as node:
        for kind in ("claude", "codex"):
            await run("bridge", "install", kind, "--project", str(project), "--url", node.url)
        token = (folder / "shop.db.owner").read_text().strip()
        async with NetworkClient("mia", node.url, kind="human", token=token) as mia:
            claude = await Host.begin("claude", project, "one")
            codex = await Host.begin("codex", project, "two")
            await claude.do("start", source="startup")
            await codex.do("start", source="startup")
            await codex.do("prompt", text="Write the tests.")

            output = await claude.do(
                "use", tool="send", arguments={"to": "agent:codex-shop", "text": "I rename total() to sum()."}
            )
            print(f"claude-shop sends: {output}")
            output = await codex.do("tool")  # after a command, codex gets the message in the middle of its turn
            for sender, text in messages(output):
                print(f"codex-shop reads, mid-turn, from {sender}: {text}")
            seq = int(re.findall(r'seq="(\d+)"', output)[0])
            await codex.do("use", tool="reply", arguments={"seq": seq, "text": "Then I test sum()."})
            await mia.send("agent:claude-shop", "Keep total() as an alias.")
            for sender, text in messages(await claude.do("stop")):  # claude wants to stop, and continues instead
                print(f"claude-shop reads, about to stop, from {sender}: {text}")
            await claude.do("stop")
            await codex.do("stop")
            [status] = (await mia.call("network.message_status", {"seq": seq + 2}))["recipients"]
            print(f"mia sees that claude-shop has her message: {status['state']}")
            await claude.end()
            await codex.end()


asyncio.run(main())
