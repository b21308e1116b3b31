"""Tests of `roundelay files`: store, list and fetch files, for people and as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.command import invoke, run
from tests.support.node import running_node


async def test_file_is_put_listed_and_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    data = os.urandom(300_000)
    (tmp_path / "data.bin").write_bytes(data)
    async with running_node(mods=["channels", "files"]) as node:
        bob = await node.agent("bob")
        options = ["--url", node.url, "--token", node.owner_token]
        assert "There are no files." in (await invoke("files", "list", *options)).out
        sent = ["--to", "agent:bob", "--text", "look"]
        stored = json.loads((await invoke("files", "put", "data.bin", *sent, "--json", *options)).out)
        message = await bob.expect("deliver")
        assert message["message"]["content"]["files"][0]["file"] == stored["file"]
        (tmp_path / "data.bin").write_bytes(b"second")
        changed = await invoke("files", "put", "data.bin", "--file", stored["file"], *options)
        assert f"Stored data.bin as {stored['file']}." in changed.out
        [listed] = json.loads((await invoke("files", "list", "--json", *options)).out)["files"]
        assert (listed["file"], listed["versions"]) == (stored["file"], [1, 2])
        refused = await invoke("files", "get", stored["file"], *options, code=2)  # a file of this name exists already
        assert "data.bin exists" in refused.err
        await invoke("files", "get", stored["file"], "first.bin", "--version", "1", *options)
        await invoke("files", "get", stored["file"], "second.bin", *options)
        assert ((tmp_path / "first.bin").read_bytes(), (tmp_path / "second.bin").read_bytes()) == (data, b"second")


async def test_chat_saves_and_sends_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.md").write_text("mine")
    async with running_node(mods=["channels", "files"]) as node:
        bob = await node.agent("bob")
        content = {"name": "../plan.md", "content": "of bob"}
        file = await bob.call("files.save", content)
        options = ["--url", node.url, "--token", node.owner_token, "--as", "mia"]
        await (await node.person("mia")).drop()
        stored = await bob.send("agent:mia", {"text": "look", "files": [{"file": file["file"]}]})
        lines = f"/to bob\n/save {stored['seq']}\n/attach plan.md Read this\n/attach missing.md\n"
        done = await run("chat", *options, stdin=lines, code=1)
        assert "missing.md cannot be read" in done.out + done.err
        assert ((tmp_path / "plan.md").read_text(), (tmp_path / "plan (2).md").read_text()) == ("mine", "of bob")
        received = (await bob.expect("deliver"))["message"]["content"]
        assert (received["text"], received["files"][0]["name"]) == ("Read this", "plan.md")
