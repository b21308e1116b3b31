"""Tests that the output of a command, as text or JSON, cannot control a terminal or mislead readers, and that the
JSON has the same parsed value.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from roundelay.cli import cli
from roundelay.display.text import sanitize, sanitize_json
from roundelay.interop.gateway import serve_gateway
from roundelay.network.home import announce_node
from tests.support.nats import nats_server
from tests.support.node import Node, running_node
from tests.support.wire import WireSession

FORMATS = "\u061c\u200b\u200e\u200f\u2060\u2066\u2067\u2068\u2069\u202a\u202b\u202c\u202d\u202e\ufeff\u2028\u2029"
EVIL = (
    "gr\u00fcn "
    + "".join(map(chr, range(1, 32)))
    + "".join(map(chr, range(0x7F, 0xA0)))
    + FORMATS
    + "\U000e0041 \U0001f469\u200d\U0001f52c end"
)
SHORT = f"\x9b{FORMATS}"
"""Payload for files, because YAML allows no surrogates."""
AGENT = {"id": "desk", "instruction": "x", "model": {"rules": [{"do": [{"say": SHORT}]}]}}
SCENARIO = {
    "scenario": "evil", "agents": {"desk": {"file": "desk.yaml"}}, "people": ["mia"],
    "steps": [{"as": "mia", "to": "desk", "send": SHORT}, {"wait": {"until": "idle", "at_most": "60s"}}],
    "expect": [{"message": {"from": "desk", "to": "mia", "contains": f"other {SHORT}"}}],
}  # fmt: skip

COMMANDS: dict[str, str] = {
    "agent try": "{folder}/desk.yaml hello",
    "agents": "",
    "approvals show": "--as mia {first_request}",
    "approvals approve": "--as mia {first_request}",
    "approvals deny": "--as mia {second_request}",
    "approvals edit": "--as mia {third_request} {{}}",
    "backup": "--db {folder}/team.db {folder}/copy.db",
    "cluster migrate": "--from {folder}/copy.db --to {log}",
    "cluster rebuild": "--log {log} --db {folder}/index.db",
    "cluster status": "--log {log}",
    "cluster verify": "--log {log} --db {folder}/index.db",
    "bridge install": "claude --project {folder} --dry-run",
    "bridge remove": "claude --project {folder} --dry-run",
    "bridge status": "--project {folder}",
    "config show": "{folder}/roundelay.yaml",
    "approvals list": "",
    "agent list": "",
    "call": "network.history thread_id=direct:evil~mia",
    "cost": "",
    "dead-letters list": "",
    "doctor": "{folder}/roundelay.yaml",
    "history": "direct:evil~mia",
    "impact": "{said}",
    "reactions list": "",
    "reactions show": "r1",
    "rights check": "--file {folder}/roundelay.yaml --as ann --op send --to bob",
    "rights show": "--file {folder}/roundelay.yaml --as ann",
    "replay": "{folder}/team.db {folder}/desk.yaml",
    "scenario run": "{folder}/evil.scenario.yaml",
    "search": "end",
    "send": "--as mia mia again",
    "status": "--over 0.1",
    "inbox": "--as mia",
    "tail": "--last 9 --count 9",
    "threads": "",
    "webhook add": "http://127.0.0.1:1/ --as hooked",
    "webhook list": "",
    "why": "{said}",
    "reactions cancel": "r1",
    "dead-letters retry": "{second} --of slow",
    "dead-letters drop": "{first} --of slow",
    "token create": "zoe",
    "token list": "",
    "token revoke": "zoe",
    "web": "--as kim",
}
"""Every command with --json, in an order in which each finds its data. The first test below fails if a command is
missing here.
"""
SILENT = frozenset({
    "agent list",
    "approvals approve", "approvals deny", "approvals edit", "backup", "bridge install", "bridge remove", "bridge status", "cluster migrate", "cluster rebuild", "cluster status", "cluster verify", "cost", "dead-letters drop", "dead-letters retry", "doctor", "reactions cancel", "reactions list", "replay", "rights check", "rights show", "send",
    "threads", "token create", "token list", "token revoke", "web", "webhook add", "webhook list",
})  # fmt: skip
"""Commands that print no participant's text, or print it on one line like `threads`."""

WITH_AGENTS = frozenset({"agent reload", "agent restart", "agent start", "agent stop"})
"""Commands that need a node with agents. See test_node_agents.py."""

OF_MODS = ("files ", "notes ", "polls ", "tasks ", "timers ", "open")
"""Prefixes of commands that need a mod or an open conversation. Separate tests cover these commands."""

IN_WORDS = {
    **dict.fromkeys(("approvals", "approvals --json"), ""),
    "export": "--format markdown",
    "export ": "--format mermaid",
}
CHANGING = frozenset({
    "approvals approve", "approvals deny", "approvals edit", "backup", "cluster migrate", "cluster rebuild", "cluster status", "cluster verify", "reactions cancel", "dead-letters retry", "dead-letters drop", "token create", "token revoke", "webhook add",
})  # fmt: skip


def json_commands(command: click.Command, path: str = "") -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from json_commands(found, f"{path} {name}".strip())
    elif any("--json" in parameter.opts for parameter in command.params):
        yield path


def is_unsafe(char: str) -> bool:
    return (unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs") and char not in "\n\r\u200d") or char == "\x1b"


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in (*value, *value.values()):
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, str):
        yield value


def parse(out: str) -> list[Any]:
    """Parse one JSON document, or one document per line."""
    try:
        return [json.loads(out)]
    except ValueError:
        return [json.loads(line) for line in out.splitlines()]


async def invoke(*arguments: str) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.stdout


async def fail_five_times(node: Node, *seqs: int) -> None:
    slow = await node.agent("slow")
    for _ in range(5):
        for _ in seqs:
            delivery = await slow.delivery()
            await slow.nack(delivery["message"]["seq"], reason=EVIL)
    for _ in seqs:
        await slow.expect("notice", kind="dead_letter")


async def ask_to_decide(evil: WireSession, number: int) -> int:
    """Request a decision from mia about a call. Return the seq of the request."""
    told = {"reaction": "r1", "tool": EVIL, "arguments": EVIL, "reason": EVIL, "timeout_s": 600}
    seq: int = (await evil.send("agent:mia", EVIL, metadata={"approval": told}))["seq"]
    wait = {"turn": 1, "call": number, "questions": {"a person": seq}, "until": 2**53, "is_approval": True}
    await evil.record("r1", "waiting", wait)
    return seq


def test_every_command_with_json_is_in_the_table() -> None:
    named = [it for it in json_commands(cli) if not it.startswith(OF_MODS)]
    assert sorted(named) == sorted({*COMMANDS, *WITH_AGENTS})


def test_what_is_escaped_in_a_line_of_text_is_escaped_in_json_and_nothing_is_lost() -> None:
    for char in map(chr, (*range(1, 0xD800), *range(0xE000, 0x11000), *range(0xE0000, 0xE1000))):
        if sanitize(char) == char:
            continue
        shown = sanitize_json(json.dumps(char, ensure_ascii=False))
        assert shown.isascii(), hex(ord(char))
        assert "\x7f" not in shown
        assert json.loads(shown) == char
    assert json.loads(sanitize_json(json.dumps(EVIL, ensure_ascii=False))) == EVIL


@pytest.fixture
def files(tmp_path: Path) -> None:
    node = {"name": SHORT, "port": 0, "db": "other.db", "rights": {"team": {"ids": ["ann"], "send": ["*"]}}}
    for name, value in {"desk.yaml": AGENT, "evil.scenario.yaml": SCENARIO, "roundelay.yaml": node}.items():
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")  # YAML parsers accept JSON


@pytest.mark.usefixtures("files")
async def test_no_command_prints_what_drives_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with running_node(db=tmp_path / "team.db", durability="full") as node, AsyncExitStack() as stack:
        serving = serve_gateway(node.url, webhooks_file=tmp_path / "hooks", webhook_hosts=["127.0.0.1"])
        gateway = await stack.enter_async_context(serving)
        note = announce_node(node.url, tmp_path / "team.db.owner", gateway=gateway)
        evil = await node.agent("evil", role="reactor", card={"description": EVIL, "tags": [EVIL]})
        mia = await node.person("mia")
        await node.agent("slow")
        trigger = (await mia.send("agent:evil", EVIL))["seq"]
        await evil.record("r1", "started", {"trigger": trigger, "manifest": [trigger]})
        await evil.record("r1", "model_reply", {"turn": 1, "agent": EVIL, "text": EVIL, "model": EVIL})
        said = (await evil.send("agent:mia", EVIL, cause=trigger, text_representation=EVIL))["seq"]
        dead = [(await evil.send("agent:slow", EVIL))["seq"] for _ in range(2)]
        await fail_five_times(node, *dead)
        await mia.send("agent:evil", EVIL)
        requests = {
            f"{it}_request": await ask_to_decide(evil, number) for number, it in enumerate(("first", "second", "third"))
        }
        servers = await stack.enter_async_context(nats_server(tmp_path / "nats"))
        places = {
            "folder": str(tmp_path),
            "log": servers.url("lab"),
            "said": said,
            "first": dead[0],
            "second": dead[1],
            **requests,
        }
        for name, rest in {**COMMANDS, **IN_WORDS}.items():
            if name not in CHANGING:
                out = await invoke(*name.split(), *(it.format(**places) for it in rest.split()))
                assert not [hex(ord(char)) for char in out if is_unsafe(char)], name
        for name, rest in COMMANDS.items():
            out = await invoke(*name.split(), *(it.format(**places) for it in rest.split()), "--json")
            assert not [hex(ord(char)) for char in out if is_unsafe(char)], name
            told = [text for value in parse(out) for text in texts_in(value) if FORMATS in text]
            assert bool(told) is (name not in SILENT), (name, out)
        shown = await at_terminal("history", "direct:evil~mia", "--json")
        assert not [hex(ord(char)) for char in shown if is_unsafe(char)]
        assert EVIL in texts_in(json.loads(shown))
        shown = await at_terminal("export")
        assert not [hex(ord(char)) for char in shown if is_unsafe(char)]
        assert EVIL in texts_in([json.loads(line) for line in shown.splitlines()])
        note.unlink()


async def at_terminal(*arguments: str) -> str:
    """Run a command on a real terminal, and return its output."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "roundelay", *arguments, stdin=theirs, stdout=theirs, stderr=asyncio.subprocess.DEVNULL
    )
    os.close(theirs)
    shown = await asyncio.to_thread(read_all, ours)
    assert await process.wait() == 0
    return shown.decode()


def read_all(descriptor: int) -> bytes:
    data = b""
    while True:
        try:
            more = os.read(descriptor, 65536)
        except OSError:  # the other end of the terminal is closed
            more = b""
        if not more:
            os.close(descriptor)
            return data
        data += more
