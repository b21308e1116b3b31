"""Tests of commands that people expect, and of complete exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundelay.cli import EXPECTED, cli
from tests.support.announced import announced_node
from tests.support.command import invoke


@pytest.mark.parametrize("name", EXPECTED)
async def test_a_command_that_is_not_there_names_the_one_to_use(name: str) -> None:
    assert name not in cli.commands
    done = await invoke(name, code=2)
    assert f"There is no command {name}." in done.err
    assert "`" in done.err


async def test_approvals_and_agents_have_a_command_that_lists(tmp_path: Path) -> None:
    async with announced_node(tmp_path) as node:
        await node.person("mia")
        for words in (["approvals", "list"], ["approvals"], ["agent", "list"]):
            assert (await invoke(*words, "--as", "mia")).code == 0


async def test_an_export_of_a_channel_has_the_answers_in_their_own_threads(tmp_path: Path) -> None:
    async with announced_node(tmp_path) as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        for name in ("help", "other"):
            await mia.call("channels.create", {"name": name})
            await bob.call("channels.join", {"name": name})
        asked = (await mia.send("channel:help", "How do I start?"))["seq"]
        elsewhere = (await mia.send("channel:other", "Something else"))["seq"]
        await bob.send("channel:help", "By up.", reply_to=asked)
        await bob.send("channel:other", "Not this.", reply_to=elsewhere)
        await mia.send("channel:help", "Thanks", reply_to=asked)
        place = ["--thread", "channel:help"]
        texts = (await invoke("export", "--format", "markdown", *place, "--as", "mia")).out
        later = (await invoke("export", "--format", "markdown", *place, "--from", str(asked + 1), "--as", "mia")).out
        assert ("How do I start" in later, "> By up" in later) == (False, True)
        rows = [json.loads(line) for line in (await invoke("export", *place)).lines]
    assert [it in texts for it in ("How do I start", "> By up", "> Thanks", "Something else", "Not this")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    said = [
        json.loads(it["data"])["content"] if isinstance(it["data"], str) else it["data"]["content"]
        for it in rows
        if it.get("type") == "message"
    ]
    assert said == ["How do I start?", "By up.", "Thanks"]
