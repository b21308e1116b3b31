"""Tests of a coding agent's bridge in error cases: broken files, an unreachable node, and misleading texts."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from roundelay.cli import main
from roundelay.interop.bridge import hooks
from roundelay.interop.bridge.hooks import KEPT_DAYS, MAX_OUTPUT_CHARS, compose_text, drop_old
from roundelay.interop.bridge.hosts import HOSTS
from roundelay.interop.bridge.installer import find_state, install, plan_install, plan_remove, remove
from roundelay.interop.bridge.participants import HostProcess, claim_name, find_project
from roundelay.interop.rendering import measure
from roundelay.network.errors import ConfigError
from roundelay.network.messages import message_from_wire
from tests.support.forks import run_python, start_roundelay
from tests.support.node import node_process, running_node
from tests.support.payloads import PAYLOADS, find_marks, judge_told

ME = HostProcess(os.getpid(), Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "60")  # processes start slowly under load
    return tmp_path / "home"


Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def bridge(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Function that runs `roundelay bridge ...`, and returns its exit status and output."""

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["bridge", *words])
        return int(ended.value.code or 0), "".join(capfd.readouterr())

    return run


def message(seq: int, content: str) -> Any:
    return message_from_wire(
        {"seq": seq, "message_id": str(seq), "thread_id": "direct:mallory~b", "sender_id": "mallory", "to": "agent:b",
         "sender_kind": "agent", "kind": "direct", "content": content, "sent_at": 0, "root": seq, "hops": 0}
    )  # fmt: skip


@pytest.mark.parametrize("broken", [b"", b'{"claude-shop": {"host": "cla', b"[]", None])
def test_names_that_cannot_be_read_are_given_to_nobody_else(
    broken: bytes | None, tmp_path: Path, own_home: Path, bridge: Cli
) -> None:
    host, shop, names = HOSTS["claude"], tmp_path / "a" / "shop", own_home / "bridge" / "names.json"
    assert claim_name(host, shop, ME) == "claude-shop"
    names.unlink()
    names.mkdir() if broken is None else names.write_bytes(broken)
    with pytest.raises(ConfigError, match=r"names\.json"):
        claim_name(host, tmp_path / "b" / "shop", ME)
    assert broken is None or names.read_bytes() == broken
    code, told = bridge("status", "--project", str(tmp_path))
    assert (code > 0, "names.json" in told, "Traceback" in told) == (True, True, False)
    if broken is not None:
        assert "backup" in told
        assert run_hook("claude", tmp_path, "UserPromptSubmit") == (0, b"")
        assert names.read_bytes() == broken


def run_hook(host: str, folder: Path, event: str, **more: Any) -> tuple[int, bytes]:
    """Run one hook as a host does. Return the hook's exit status and output."""
    told = {"session_id": "s", "hook_event_name": event, "cwd": str(folder), **more}
    ran = run_python("-m", "roundelay", "bridge", "deliver", host, cwd=folder, told=json.dumps(told).encode())
    assert ran.stderr == ""
    return ran.returncode, ran.stdout.encode()


@pytest.mark.parametrize("told", [b"", b"[]", b"\xff{", b'{"hook_event_name": "Stop", "session_id": 7, "cwd": 3}'])
def test_no_hook_vetoes_what_its_host_does_whatever_is_wrong(
    told: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDELAY_URL", "nowhere" if not told else "ws://127.0.0.1:9/")
    ran = run_python("-m", "roundelay", "bridge", "deliver", "claude", cwd=tmp_path, told=told)
    assert ran.returncode == 0
    assert "hookSpecificOutput" not in ran.stdout


def test_a_project_is_the_nearest_folder_of_the_host_below_the_home_and_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HOSTS["claude"]
    user, elsewhere = tmp_path / "users" / "ann", tmp_path / "srv"
    for folder in (tmp_path, user, user / "shop", elsewhere):
        (folder / ".claude").mkdir(parents=True)
    (user / "shop" / "src" / "deep").mkdir(parents=True)
    (user / "notes").mkdir()
    (elsewhere / "x").mkdir()
    monkeypatch.setenv("HOME", str(user))
    assert find_project(host, user / "shop" / "src" / "deep") == user / "shop"
    assert find_project(host, user / "notes") == user / "notes"  # neither the home folder nor a folder above it
    assert find_project(host, user) == user
    assert find_project(host, elsewhere / "x") == elsewhere
    assert claim_name(host, user / "shop", ME) == "claude-shop"
    (user / "shop").rename(user / "moved")
    assert claim_name(host, user / "moved", ME) == "claude-moved"  # another path is another project


def test_a_project_whose_path_is_not_utf8_is_one_as_any_other(tmp_path: Path, bridge: Cli) -> None:
    project = Path(os.fsdecode(os.fsencode(tmp_path) + b"/sh\xffp"))
    project.mkdir()
    host = HOSTS["claude"]
    install(host, project, plan_install(host, project))
    assert find_state(host, project) == "installed"
    assert claim_name(host, project, ME) == "claude-sh-p"
    assert claim_name(host, tmp_path / "sh\\xfep", ME) == "claude-sh-xfep"
    for words in (["status"], ["status", "--json"], ["install", "codex", "--json"], ["remove", "codex"]):
        code, told = bridge(*words, "--project", str(project))
        assert code == 0, told
    assert "claude-sh-p (runs)" in bridge("status", "claude", "--project", str(project))[1]
    run_hook("claude", project, "SessionStart", cwd=str(project).encode(errors="replace").decode())
    names = json.loads((tmp_path / "home" / "bridge" / "names.json").read_bytes())
    assert [it["project"].rpartition("/")[2] for it in names.values()] == ["sh\\xffp", "sh\\xfep"]
    remove(host, project, plan_remove(host, project))
    assert not list(project.iterdir())


def test_notes_of_old_sessions_go_and_those_of_one_that_is_at_work_stay(tmp_path: Path) -> None:
    old = time.time() - (KEPT_DAYS + 1) * 86_400
    for name in ("gone", "works", "used", "only-lock"):
        for suffix in ("lock", "json"):
            (path := tmp_path / f"{name}.{suffix}").touch()
            os.utime(path, (old, old))
    (tmp_path / "only-lock.json").unlink()
    os.utime(tmp_path / "used.json")
    with open(tmp_path / "works.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        drop_old(tmp_path)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["used.json", "used.lock", "works.json", "works.lock"]


@pytest.mark.parametrize("text", ["&" * 5_000, "<" * 4_000, "\U0001f600" * 5_000, "a&\U0001f600" * 3_000, "x" * 900])
def test_no_telling_is_longer_than_a_host_takes_however_it_is_escaped(text: str) -> None:
    waiting = [message(seq, text) for seq in range(1, 15)]
    told: list[int] = []
    while waiting:
        said, seqs = compose_text("b", "n" * 200, waiting)
        assert measure(said + hooks._MARK.format("0" * 16)) <= MAX_OUTPUT_CHARS
        assert judge_told(said, "mallory") == len(seqs)
        assert ("more characters; history" in said) == (len(text) > 1_000)
        waiting = waiting[len(seqs) :]
        assert ("More messages wait" in said) == bool(waiting)
        told += seqs
    assert told == list(range(1, 15))


@pytest.mark.parametrize("name", HOSTS)
def test_no_text_passes_for_the_system_a_consent_or_another_sender_in_what_a_hook_says(name: str) -> None:
    host = HOSTS[name]
    place = {"start": set[str](), "prompt": set[str](), "tool": set[str](), "stop": set[str]()}
    for number, payload in enumerate(PAYLOADS, 1):
        for event, moment in host.moments.items():
            said, seqs = compose_text(
                "b", "team", [message(number, payload), message(number + 1, payload)], is_start=True
            )
            answer = json.loads(json.dumps(host.answer(event, moment, said)))
            [place_of_it] = find_marks(answer)
            place[moment].add(place_of_it)
            read = answer
            for key in place_of_it.split("."):
                read = read[key]
            assert judge_told(read, "mallory") == len(seqs) == 2
            # A text cannot mark another message as shown either.
            shown = {
                "hook_event_name": event,
                "session_id": "s",
                "tool_name": "mcp__roundelay__check",
                "tool_response": read,
            }
            call = host.read(shown)
            assert call is not None
            assert call.shown == {number, number + 1}
    context = "hookSpecificOutput.additionalContext"
    everywhere = {"claude": context, "opencode": "text", "cursor": "additional_context"}.get(name, context)
    at_stop = {"codex": "reason", "gemini": "reason", "cursor": "followup_message"}.get(name, everywhere)
    for moment, found in place.items():
        assert found <= {at_stop if moment == "stop" else everywhere}


async def hook(host: str, folder: Path, event: str, **more: Any) -> str:
    """Run a hook and return its output."""
    code, said = await asyncio.to_thread(run_hook, host, folder, event, **more)
    assert code == 0
    return said.decode()


async def state(sender: Any, seq: int) -> str:
    [recipient] = (await sender.call("network.message_status", {"seq": seq}))["recipients"]
    return str(recipient["state"])


@pytest.mark.parametrize(
    "name", ["gemini", *(pytest.param(it, marks=pytest.mark.full) for it in ("opencode", "cursor"))]
)
async def test_a_host_without_a_transcript_is_told_once_and_counts_as_having_taken_it_at_its_next_hook(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, tool, stop = [list(HOSTS[name].moments)[it] for it in (0, -2, -1)]
    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        mia, agent_id = await node.person("mia"), claim_name(HOSTS[name], tmp_path, ME)
        await hook(name, tmp_path, first)
        one = (await mia.send(f"agent:{agent_id}", "One."))["seq"]
        assert "One.</message>" in await hook(name, tmp_path, tool)
        assert await state(mia, one) == "queued"
        two = (await mia.send(f"agent:{agent_id}", "Two."))["seq"]
        told = await hook(name, tmp_path, stop)
        assert ("One." in told, "Two.</message>" in told) == (False, True)
        assert (await state(mia, one), await state(mia, two)) == ("handled", "queued")
        # Another session of the same process has its own context, and its hook shows all unacknowledged messages.
        assert "Two.</message>" in await hook(name, tmp_path, tool, session_id="other")


async def test_what_keeps_a_host_out_is_said_once_with_the_next_step_until_it_is_another_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        mia, agent_id = await node.person("mia"), claim_name(HOSTS["gemini"], tmp_path, ME)
        await hook("gemini", tmp_path, "SessionStart")
        [token] = (own_home / "tokens").glob(f"*/{agent_id}")
        kept = token.read_text()
        token.write_text("x" * 43)
        told = json.loads(await hook("gemini", tmp_path, "BeforeAgent"))["systemMessage"]
        assert f"{agent_id} may not join" in told
        assert f"roundelay token create {agent_id}" in told
        assert str(token) in told
        assert await hook("gemini", tmp_path, "AfterTool") == "{}"
        token.write_text(kept)
        await mia.send(f"agent:{agent_id}", "Hello.")
        assert "Hello.</message>" in await hook("gemini", tmp_path, "AfterTool")
        await mia.call("network.remove", {"agent_id": agent_id})
        told = json.loads(await hook("gemini", tmp_path, "AfterTool"))["systemMessage"]
        assert ("was removed" in told, "bridge remove" in told) == (True, True)
    assert "cannot be reached" in json.loads(await hook("gemini", tmp_path, "AfterTool"))["systemMessage"]
    assert await hook("gemini", tmp_path, "AfterTool") == "{}"


async def test_new_messages_come_beyond_any_number_that_was_shown_and_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "MAX_FETCHED", 3)
    monkeypatch.setattr(hooks, "ENOUGH", 2)
    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        mia, agent_id = await node.person("mia"), claim_name(HOSTS["codex"], tmp_path, ME)
        agent = await node.agent(agent_id)
        seqs = [(await mia.send(f"agent:{agent_id}", f"m{it}"))["seq"] for it in range(14)]
        notes = hooks.SessionNotes(*ME, epoch=agent.welcome["network"]["epoch"], shown=seqs[:7], taken=[seqs[7]])
        await agent.call("network.acknowledge", {"seqs": [seqs[9]]})
        monkeypatch.setenv("ROUNDELAY_TOKEN", node.tokens[agent_id])
        found, _ = await hooks._ask_node(HOSTS["codex"], tmp_path, agent_id, node.url, notes, 60)
        assert [it.seq for it in found] == [seqs[8], *seqs[10:]][: len(found)]
        assert len(found) >= 2
        assert await state(mia, seqs[7]) == "handled"


@asynccontextmanager
async def mcp_server(folder: Path, host: str = "codex") -> Any:
    """Start the MCP server as a host does. Yield a function that calls a tool, and returns whether it failed and its
    text.
    """
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "roundelay", "bridge", "mcp", host], env=dict(os.environ), cwd=folder
    )
    async with Client(stdio_client(server)) as client:

        async def use(tool: str, **arguments: Any) -> tuple[bool, str]:
            async with asyncio.timeout(60):
                result = await client.call_tool(tool, arguments)
            return bool(result.is_error), "".join(it.text for it in result.content if it.type == "text")

        assert {"check", "send", "reply"} <= {it.name for it in (await client.list_tools()).tools}
        yield use


async def test_an_mcp_server_without_its_node_has_its_tools_and_says_what_is_wrong_until_the_node_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    async with node_process(tmp_path / "team.db") as node:
        node.keeps_port = True
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        await node.kill9()
        async with mcp_server(tmp_path) as use:
            failed, told = await use("whoami")
            assert failed
            assert "cannot be reached" in told
            assert "roundelay up" in told
            (own_home / "bridge" / "names.json").write_text("{")
            failed, told = await use("whoami")
            assert (failed, "names.json" in told) == (True, True)
            (own_home / "bridge" / "names.json").unlink()
            await node.restart()
            failed, told = await use("whoami")
            assert not failed, told
            mia, agent_id = await node.person("mia"), claim_name(HOSTS["codex"], tmp_path, ME)
            assert f"You are {agent_id}" in told
            # A message that a hook has shown, and that the host may not have accepted yet, is not shown again. Only a
            # new message ends the wait.
            one = (await mia.send(f"agent:{agent_id}", "One."))["seq"]
            assert "One." in await hook("codex", tmp_path, "UserPromptSubmit")
            assert await state(mia, one) == "queued"
            assert "0 messages wait" in (await use("whoami"))[1]
            waiting = asyncio.create_task(use("wait", wait_s=25, limit=1))
            two = (await mia.send(f"agent:{agent_id}", "Two."))["seq"]
            failed, told = await waiting
            assert ("One." in told, "Two.</message>" in told) == (False, True)
            failed, told = await use("check", limit=1)
            assert ("One." in told, "Two.</message>" in told) == (False, True)
            # The sender sees the receipt as for any participant.
            assert await state(mia, two) == "delivered"
            thread_id = (await mia.call("network.why", {"seq": two}))["chain"][0]["thread_id"]
            await mia.call("network.take", {"thread_id": thread_id})
            failed, told = await use("reply", seq=two, text="Yes.")
            assert (failed, "taken" in told) == (True, True), told
            await mia.call("network.give", {"thread_id": thread_id})
            three = (await mia.send(f"agent:{agent_id}", "Three."))["seq"]
            failed, told = await use("reply", seq=three, text="Yes.")
            assert not failed, told
            answer = (await mia.call("network.history", {"thread_id": thread_id}))["messages"][-1]
            assert (answer["reply_to"], answer["content"]) == (three, "Yes.")
            await use("ack", seqs=[two])
            assert await state(mia, two) == "handled"
            failed, told = await use("send", to="agent:nobody", text="Hello.")
            assert (failed, "nobody" in told) == (True, True)
            await node.kill9()
            for _ in range(2):
                failed, told = await use("send", to="agent:mia", text="Hello.")
                assert (failed, "cannot be reached" in told) == (True, True)
            await node.restart()
            mia = await node.person("mia")
            failed, told = await use("send", to="agent:mia", text="Hello.")
            assert not failed, told


async def test_what_is_away_is_the_node_that_was_reached_last_and_not_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    monkeypatch.delenv("ROUNDELAY_URL", raising=False)
    (tmp_path / "node.yaml").write_text(json.dumps({"port": 0, "db": "node.db"}))
    up = await start_roundelay("up", "node.yaml", cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
    try:
        assert up.stdout is not None
        async with asyncio.timeout(60):
            ready = (await up.stdout.readline()).decode()
        [url] = re.findall(r"wss?://\S+?/", ready)
        assert ":8700/" not in url
        assert "systemMessage" not in await hook("gemini", tmp_path, "SessionStart")
    finally:
        up.terminate()
        await up.communicate()
    said = json.loads(await hook("gemini", tmp_path, "BeforeAgent"))["systemMessage"]
    assert f"the node at {url} cannot be reached" in said
    # A session that starts while the node is down shows its name too.
    said = json.loads(await hook("gemini", tmp_path, "SessionStart", session_id="another"))["systemMessage"]
    assert f"the node at {url} cannot be reached" in said
    async with mcp_server(tmp_path, "gemini") as use:
        failed, told = await use("whoami")
        assert (failed, url in told) == (True, True)
    # A node that was selected explicitly is shown by its address.
    monkeypatch.setenv("ROUNDELAY_URL", "ws://127.0.0.1:9/")
    said = json.loads(await hook("gemini", tmp_path, "BeforeAgent", session_id="another"))["systemMessage"]
    assert "the node at ws://127.0.0.1:9/ cannot be reached" in said


@pytest.mark.parametrize(
    ("host", "path", "text"),
    [
        ("opencode", "opencode.json", '{\n  // mine\n  "model": "m"\n}'),
        ("claude", ".mcp.json", '{"mcpServers": {"a": {}, "a": {}}}'),
        ("gemini", ".gemini/settings.json", "{'theme': 1}"),
        ("cursor", ".cursor/hooks.json", '{"version": 1,}'),
        ("codex", ".codex/config.toml", 'mcp_servers = { other = { command = "x" } }\n'),
        ("codex", ".codex/config.toml", '[mcp_servers.roundelay]\ncommand = "mine"\n'),
    ],
)
def test_what_one_is_to_paste_is_printed_as_it_is_to_stand_there(
    host: str, path: str, text: str, tmp_path: Path, bridge: Cli
) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(text)
    code, told = bridge("install", host, "--project", str(tmp_path))
    assert code == 2
    assert "\\x0a" not in told
    sentence, _, pasted = told.partition("\n")
    assert sentence.startswith("Error: ")
    assert path in sentence
    read = tomllib.loads(pasted) if path.endswith(".toml") else json.loads(pasted)
    assert "roundelay" in json.dumps(read)
    assert (tmp_path / path).read_text() == text


def test_a_file_with_tabs_is_shown_as_a_diff_without_codes(tmp_path: Path, bridge: Cli) -> None:
    (tmp_path / ".mcp.json").write_text('{\n\t"mcpServers": {\n\t\t"other": {"command": "x"}\n\t}\n}\n')
    code, told = bridge("install", "claude", "--project", str(tmp_path), "--dry-run")
    assert (code, "\\x" in told, '"other"' in told) == (0, False, True)
    code, told = bridge("install", "claude", "--project", str(tmp_path))
    assert code == 0
    (tmp_path / ".mcp.json").write_text('{\n\t// mine\n\t"mcpServers": {"roundelay": {"command": "roundelay", "args": ["bridge", "mcp", "claude"]}}\n}\n')  # fmt: skip
    code, told = bridge("remove", "claude", "--project", str(tmp_path))
    assert (code, "\\x" in told) == (1, False)
    assert '\n  "mcpServers": {\n' in told
