"""Test of two networks, each started with `roundelay up`: an agent file makes an agent of one network a participant
of the other.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.interop.test_gateway_of_up import read_until, run, start

THERE = {
    "port": 0,
    "db": "node.db",
    "interop": {"port": 0, "serve": ["a2a"]},
    "agents": [{"id": "bob", "description": "Digs", "instruction": "Dig", "model": {"rules": [{"do": [{"say": "There is gold."}]}]}}],
}  # fmt: skip


async def stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await asyncio.wait_for(process.wait(), 30)


@pytest.mark.full  # starts six processes, which takes eight seconds
async def test_an_agent_of_another_network_takes_part_by_its_file(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "node.yaml").write_text(json.dumps(THERE))
    one = await start(there)
    other: asyncio.subprocess.Process | None = None
    try:
        url = (await read_until(one, r"gateway to \S+ is ready on (\S+) \(a2a\)"))[1]
        token = (await run(there, "token", "create", "ui", "--kind", "service")).split()[0]
        (here / "far.token").write_text(f"ui:{token}\n")
        (here / "far.yaml").write_text(f"id: far\na2a:\n  url: {url}a2a/bob\n  token_file: far.token\n")
        (here / "gone.yaml").write_text("id: gone\ndescription: Away\na2a: http://127.0.0.1:1\n")
        (here / "node.yaml").write_text(json.dumps({"port": 0, "db": "node.db", "agents": ["far.yaml", "gone.yaml"]}))
        assert "A remote agent at http" in await run(here, "doctor", "node.yaml")
        other = await start(here)
        await read_until(other, "Roundelay is ready")
        agents = json.loads(await run(here, "agents", "--json"))["agents"]
        cards = {it["agent_id"]: it["card"]["description"] for it in agents if it["kind"] == "agent"}
        assert cards == {"far": "Digs", "gone": "Away"}
        assert "There is gold." in await run(here, "chat", "--to", "far", told="dig\n")
        found = json.loads(await run(there, "search", "dig", "--json"))["messages"]
        assert [(it["sender_id"], it["to"], it["content"]) for it in found] == [("ui", "agent:bob", "dig")]
    finally:
        await stop(one)
        if other is not None:
            await stop(other)
