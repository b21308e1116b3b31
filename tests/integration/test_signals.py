"""Test of signals to `roundelay agent run`: it ends at the first one, or at the second one if a tool prevents the
end.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from roundelay.app import serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from tests.support.forks import start_roundelay

TOOL = """
import asyncio

from roundelay import tool


@tool
async def cling() -> str:
    "Go on whatever happens."
    print("begun", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
"""
AGENT = """
id: bob
instruction: x
model:
  rules:
    - do: [{tool: cling}]
tools: ['clinging:cling']
"""


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_agents_whose_tool_does_not_let_go(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "clinging.py").write_text(TOOL, encoding="utf-8")
    (tmp_path / "bob.yaml").write_text(AGENT, encoding="utf-8")
    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="memory")
    async with (
        asyncio.timeout(60),
        serve(config) as node,
        NetworkClient("mia", node.url, kind="human", token=node.owner_token) as mia,
    ):
        process = await start_roundelay(
            "agent", "run", "bob.yaml", "--url", node.url,
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            await process.stdout.readline()  # the process is ready
            await mia.send_text("bob", "go")
            while b"begun" not in await process.stdout.readline():
                pass
            process.send_signal(number)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(process.wait(), 0.3)
            process.send_signal(number)
            assert await asyncio.wait_for(process.wait(), 10) == -number
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
