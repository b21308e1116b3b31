"""Test that the gateway behaves as its OpenAPI document says. Schemathesis generates valid and invalid requests,
alone and in sequences.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from roundelay.interop.gateway import serve_gateway
from tests.suites.environment import HERE, python_of
from tests.support.node import running_node


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_requests_made_of_the_document_are_answered_as_it_says(tmp_path: Path) -> None:
    st = (await asyncio.to_thread(python_of, "schemathesis")).with_name("st")
    async with running_node(mods=["channels", "files", "tasks"]) as node:
        form = await node.invite(await node.service("op"), "form", kind="service")
        bob = await node.agent("bob")
        for number in range(5):
            await form.send("agent:bob", f"question {number}")
            await bob.send("agent:form", f"answer {number}")
        serving = serve_gateway(node.url, webhooks_file=tmp_path / "hooks", webhook_hosts=["127.0.0.1"])
        async with serving as url:
            process = await asyncio.create_subprocess_exec(
                str(st), "--no-color", "--config-file", str(HERE / "schemathesis.toml"), "run", f"{url}/openapi.json", "--header",
                f"Authorization: Bearer form:{node.tokens['form']}", "--checks", "all", "--seed", "1", "--continue-on-failure", "--warnings", "off",
                cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            output, _ = await process.communicate()
    told = output.decode()
    assert process.returncode == 0, told
    [cases] = re.findall(r"^ +(\d+) generated.*", told, re.MULTILINE)
    print(re.search(r"^Test cases:.*", told, re.MULTILINE | re.DOTALL)[0])  # type: ignore[index]  # it was found above
    [links] = re.findall(r"API Links: +(\d+) covered", told)
    print(f"{links} links followed from a message that was sent")
    assert int(cases) > 1000
    assert int(links) >= 1
