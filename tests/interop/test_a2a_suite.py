"""Test that runs the official A2A compatibility kit against agents behind the gateway. The kit is in no registry:
``A2A_TCK`` names its checkout (branch 1.0-dev), and ``tests/suites/a2a-tck.md`` has the results.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from roundelay.interop.gateway import serve_gateway
from tests.suites.environment import HERE, python_of
from tests.support.a2a_kit_agent import kit_agent
from tests.support.asked import invite
from tests.support.counts import Note
from tests.support.node import running_node

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
KIT = os.environ.get("A2A_TCK", "")
KIT_HOSTS = ("127.0.0.1", "localhost")  # addresses at which the kit listens for push notifications


@pytest.mark.skipif(not KIT, reason="A2A_TCK names no folder with the kit")
@pytest.mark.parametrize("ids", ["ids as they are", "unique ids"])
async def test_the_kit_finds_nothing_wrong(ids: str, tmp_path: Path, note: Note) -> None:
    python = await asyncio.to_thread(python_of, "a2a-tck")
    async with (
        running_node() as node,
        kit_agent(node.url),
        serve_gateway(node.url, webhooks_file=tmp_path / "hooks", webhook_hosts=KIT_HOSTS) as url,
    ):
        environment = {
            **os.environ,
            "KIT_TOKEN": await invite(node, "ui"),
            "KIT_UNIQUE": "1" if ids == "unique ids" else "",
            "PYTHONPATH": f"{HERE / 'a2a-tck'}:{KIT}",
        }
        command = (python, "run_tck.py", "--sut-host", f"{url}/a2a/kit", "--transport", "jsonrpc,http_json")
        process = await asyncio.create_subprocess_exec(
            *map(str, command), "--level", "must", "--", "-p", "kit_caller", "-rs",
            cwd=KIT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out = (await process.communicate())[0].decode()
    assert process.returncode == 0, out
    [(passed, skipped)] = re.findall(r"(\d+) passed, (\d+) skipped", out)
    note(ids=ids, passed=passed, failed=0, skipped=skipped)
