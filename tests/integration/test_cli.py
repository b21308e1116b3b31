"""Tests of the command line as a user has it: its output and its exit codes, in a separate process where that
matters.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.typing import Subprotocol

from roundelay.network.home import find_owner_token
from tests.support.announced import announced_node
from tests.support.command import Done, command, invoke, run
from tests.support.fake_openai import FakeOpenAI, calls, empty, error, text
from tests.support.node import Node, node_process
from tests.support.wire import SUBPROTOCOL, WireSession

COMMANDS = (
    "demo", "init", "up", "agent", "chat", "send", "tail", "agents", "threads", "history", "search", "status", "reactions", "dead-letters",
    "backup", "token", "rights", "doctor", "config", "completion",
)  # fmt: skip
READING = (
    ["agents"], ["threads"], ["history", "broadcast"], ["search", "unread"], ["status"], ["token", "list"], ["dead-letters", "list"],
    ["reactions", "list"], ["tail", "--last", "1", "--count", "1"],
)  # fmt: skip


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with announced_node(tmp_path) as running:
        yield running


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob", card={"description": "Knows \x1b[31mthings", "tags": ["facts"]})


def sentence(done: Done) -> str:
    """Return the only error line of a failed command."""
    assert "Traceback" not in done.err
    lines = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, done.err
    return lines[0].removeprefix("Error: ")


def read_tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def run_json(*arguments: str | Path) -> Any:
    return json.loads((await invoke(*arguments, "--json")).out)


# -- the command in general


async def test_help_lists_every_command() -> None:
    listed = (await invoke("--help")).out
    for name in COMMANDS:
        assert f"\n  {name} " in listed


def test_no_line_of_a_list_of_commands_is_cut() -> None:
    """The test covers all groups at every depth."""
    import click
    from click.testing import CliRunner

    from roundelay.cli import cli

    def list_groups(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name in group.list_commands(click.Context(group)):
            command = group.get_command(click.Context(group), name)
            if isinstance(command, click.Group):
                yield from list_groups(command, (*path, name))

    groups = list(list_groups(cli, ()))
    assert {(), ("agent",), ("cluster",), ("token",)} <= set(groups)
    cut = []
    for path in groups:
        listed = CliRunner().invoke(cli, [*path, "--help"]).output.partition("Options:")[2]
        assert listed.strip(), path
        cut += [f"{' '.join(path)}: {line.strip()}" for line in listed.splitlines() if "..." in line]
    assert cut == []


@pytest.mark.parametrize(
    "name",
    [
        *COMMANDS,
        "agent run",
        "agent try",
        "token create",
        "token list",
        "token revoke",
        "dead-letters list",
        "config show",
        "reactions list",
        "reactions show",
        "reactions cancel",
    ],
)
def test_every_command_explains_itself(name: str) -> None:
    from click.testing import CliRunner

    from roundelay.cli import cli

    shown = CliRunner().invoke(cli, [*name.split(), "-h"])
    assert shown.exit_code == 0, shown.output
    assert f"Usage: cli {name} " in shown.output


def test_the_start_loads_nothing_heavy() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import roundelay.cli, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    heavy = {"asyncio", "websockets", "pydantic", "msgspec", "jinja2", "aiohttp", "aiosqlite", "uvloop", "yaml"}
    assert heavy & set(loaded) == set()


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_completion_is_a_script_for_the_shell(shell: str) -> None:
    script = (await run("completion", shell)).out
    assert f"_ROUNDELAY_COMPLETE={shell}_complete" in script
    asked = {"_ROUNDELAY_COMPLETE": f"{shell}_complete", "COMP_WORDS": "roundelay thr", "COMP_CWORD": "1"}
    assert "threads" in (await run(**asked)).out if shell != "fish" else True


# -- the first files


async def test_init_writes_what_works_and_never_overwrites(tmp_path: Path) -> None:
    assert "prints a link: it opens the page" in (await invoke("init", cwd=tmp_path)).out
    first = read_tree(tmp_path)
    assert set(first) == {"roundelay.yaml", "agents/echo.yaml"}
    assert "exists already" in sentence(await invoke("init", cwd=tmp_path, code=1))
    (tmp_path / "roundelay.yaml").unlink()
    await invoke("init", cwd=tmp_path, code=1)
    assert read_tree(tmp_path) == {"agents/echo.yaml": first["agents/echo.yaml"]}


async def test_config_show_tells_where_a_value_comes_from(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("name: tests\nport: 8701\n")
    shown = json.loads(
        (await invoke("config", "show", "node.yaml", "--origin", "--json", cwd=tmp_path, ROUNDELAY_PORT="9")).out
    )
    assert shown["name"] == {"value": "tests", "origin": "file node.yaml:1"}
    assert shown["port"] == {"value": 9, "origin": "environment ROUNDELAY_PORT"}
    assert shown["host"] == {"value": "127.0.0.1", "origin": "default"}


# -- looking


async def test_config_show_names_the_agents_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "team.yaml"
    file.write_text("agents:\n  - agents/echo.yaml\n  - {id: bob, instruction: Help., model: {model_name: m}}\n")
    shown = await run_json("config", "show", file)
    assert shown["agents"] == ["agents/echo.yaml", "bob"]
    assert (await run_json("config", "show", file, "--origin"))["agents"]["origin"].endswith("team.yaml:1")


async def test_agents_lists_who_is_registered(node: Node, bob: WireSession) -> None:
    offline = await node.agent("ann")
    await offline.bye()
    listed = await run_json("agents")
    assert [(it["agent_id"], it["state"]) for it in listed["agents"]] == [("ann", "offline"), ("bob", "online")]
    table = (await invoke("agents", "--online")).lines
    assert [line.split()[0] for line in table] == ["ID", "bob"]
    assert r"\x1b[31mthings" in table[1]
    await bob.bye()
    assert (await invoke("agents", "--online")).out == "Nobody is online.\n"


async def test_the_owner_reads_every_thread(node: Node, bob: WireSession) -> None:
    ann = await node.agent("ann")
    stored = await ann.send("agent:bob", "first")
    await bob.send("agent:ann", "second")
    listed = await run_json("threads")
    assert [(it["thread_id"], it["messages"], it["readers"]) for it in listed["threads"]] == [
        ("direct:ann~bob", 2, ["ann", "bob"])
    ]
    history = await run_json("history", "direct:ann~bob")
    assert [message["content"] for message in history["messages"]] == ["first", "second"]
    shown = (await invoke("history", "direct:ann~bob", "--limit", "1")).lines
    assert shown[-1].endswith("bob → ann: second")
    earlier = (await invoke("history", "direct:ann~bob", "--before", str(stored["seq"] + 1))).lines
    first = [f"#{stored['seq']} ann → bob: first"]
    assert [line.partition(" ")[2] for line in earlier] == first
    found = (await invoke("search", "fir*", "--thread", "direct:ann~bob")).lines
    assert [line.partition(" ")[2] for line in found] == first
    assert (await invoke("search", "third")).lines == ["* Nothing was found."]
    watcher = await node.service("watcher")
    await watcher.call("network.take", {"thread_id": "direct:ann~bob"})
    assert [line.split() for line in (await invoke("threads")).lines] == [
        ["THREAD", "TITLE", "MESSAGES", "LAST", "UNREAD", "READERS", "TAKEN", "OVER", "BY"],
        ["direct:ann~bob", "ann", "and", "bob", "·", "first", "2", f"#{stored['seq'] + 1}", "ann,", "bob", "watcher"],
    ]


async def test_looking_leaves_no_mark(node: Node, bob: WireSession) -> None:
    mia = await node.person("mia")
    await mia.bye()
    stored = await bob.send("agent:mia", "unread")
    await asyncio.gather(*(invoke(*arguments) for arguments in READING))
    watcher = await node.service("watcher")
    status = await watcher.call("network.message_status", {"seq": stored["seq"]})
    assert [it["state"] for it in status["recipients"]] == ["queued"]


async def test_status_shows_the_hubs_figures(node: Node, bob: WireSession) -> None:
    await bob.send("broadcast", "hello")
    shown = await run_json("status")
    assert (shown["url"], shown["name"], shown["figures"]["messages_total"]) == (node.url, "contract", 1)
    assert [(it["agent_id"], it["messages"]) for it in shown["quotas"]] == [("bob", 1)]
    assert (await invoke("status", "--over", "0.1")).out.count("\n") >= 12


async def test_operators_see_in_tail_and_status_what_has_stopped(tmp_path: Path) -> None:
    async with announced_node(tmp_path, limits={"max_root_messages": 2, "max_uncaused_answers": 1}) as node:
        ann, bob = await node.agent("ann"), await node.agent("bob")
        async with command("tail", "--count", "7") as tail:
            await tail.error("Following")
            root = (await ann.send("agent:bob", "one"))["seq"]
            await bob.send("agent:ann", "two", cause=root)
            await bob.refused("loop_stopped", "agent:ann", cause=root)
            await tail.line(
                f"mod:network → ann: The conversation that began with #{root} has stopped: it has used its 2 messages"
            )
            for number in range(3):
                await ann.submit("agent:bob", number)
                await bob.submit("agent:ann", number)
            await tail.line("mod:network → (ann|bob): .* is stopped: it answered others 1 times without naming a cause")
        shown = (await invoke("status", "--over", "0.1")).out
        assert f"#{root} of ann (limits.max_root_messages; ann sent most, 1): /resume {root}" in shown
        assert "(limits.max_uncaused_answers): /resume" in shown
        stopped = (await run_json("status", "--over", "0.1"))["stopped"]
        assert [it["root"] for it in stopped["conversations"]] == [root]
        assert [it["used"] for it in stopped["agents"]][:1] == [1]


async def test_a_participant_sees_the_figures_that_everyone_may_see(node: Node) -> None:
    token = (await run_json("token", "create", "eve", "--kind", "human"))["token"]
    shown = json.loads((await invoke("status", "--json", "--as", "eve", ROUNDELAY_TOKEN=token)).out)
    assert shown["figures"]["ready"] == 1


async def test_every_reading_command_speaks_json_and_writes_no_colours_into_a_pipe(
    node: Node, bob: WireSession
) -> None:
    await bob.send("broadcast", "\x1b[31mred\x07")
    for shown in await asyncio.gather(*(run(*arguments) for arguments in READING)):
        assert "\x1b" not in shown.out + shown.err
        assert "\x07" not in shown.out
    assert all(await asyncio.gather(*(run_json(*arguments) for arguments in READING)))


@pytest.mark.usefixtures("real_processes")
async def test_tail_follows_every_thread_in_order(node: Node, bob: WireSession) -> None:
    ann = await node.agent("ann")
    await ann.send("broadcast", "before")
    await ann.call("channels.create", {"name": "dev"})
    async with command("tail", "--last", "1", "--count", "5") as tail:
        await tail.line("ann → broadcast: before")
        first = await ann.send("agent:bob", "one")
        await bob.send("agent:ann", "two", reply_to=first["seq"])
        await ann.send("channel:dev", "three")
        await bob.send("broadcast", "four")
        await tail.end()
    texts = [line.rpartition(": ")[2] for line in tail.lines]
    assert texts == ["before", "one", "two", "three", "four"]


async def test_tail_as_somebody_shows_what_that_one_may_read(node: Node, bob: WireSession) -> None:
    token = (await run_json("token", "create", "mia", "--kind", "human"))["token"]
    ann = await node.agent("ann")
    async with command("tail", "--as", "mia", "--count", "2", "--json", ROUNDELAY_TOKEN=token) as tail:
        await tail.error("Following")
        await ann.send("agent:bob", "secret")
        await bob.send("agent:mia", "for mia")
        await ann.send("broadcast", "for all")
        await tail.end()
    assert [json.loads(line)["content"] for line in tail.lines] == ["for mia", "for all"]


async def test_a_reader_who_leaves_early_is_no_error(node: Node, bob: WireSession) -> None:
    for number in range(20):
        await bob.send("broadcast", f"{number} " + "x" * 50_000)
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "roundelay", "history", "broadcast", stdout=writing, stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    await asyncio.to_thread(os.read, reading, 10)
    os.close(reading)
    assert await process.communicate() == (None, b"")


# -- sending


@pytest.mark.usefixtures("real_processes")
async def test_send_answers_when_the_message_is_stored(node: Node, bob: WireSession) -> None:
    sent = await run_json("send", "bob", "hello", "--as", "mia")
    message = await bob.message("hello")
    assert (message["seq"], message["sender_id"], message["sender_kind"]) == (sent["seq"], "mia", "human")
    reply = await run("send", "bob", "-", "--as", "mia", "--reply-to", str(sent["seq"]), stdin="two\nlines\n")
    assert "in direct:bob~mia." in reply.out
    assert (await bob.message("two\nlines"))["reply_to"] == sent["seq"]


async def test_text_that_is_no_utf_8_is_refused_in_words(node: Node) -> None:
    python = [sys.executable, "-m", "roundelay", "send", "broadcast", "--as", "mia"]
    for last, given in ((b"caf\xe9", b""), (b"-", b"caf\xe9")):
        done = await asyncio.to_thread(subprocess.run, [*python, last], input=given, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"not UTF-8" in done.stderr
    assert (await run_json("history", "broadcast"))["messages"] == []


async def test_send_with_the_same_id_sends_once(node: Node, bob: WireSession) -> None:
    first = await run_json("send", "broadcast", "hello", "--id", "mine")
    again = await run_json("send", "broadcast", "hello", "--id", "mine")
    assert (first["duplicate"], again["duplicate"], again["seq"]) == (False, True, first["seq"])
    await bob.message("hello")
    await bob.settle()
    assert bob.unread == []


async def test_a_send_whose_answer_is_lost_says_how_a_repeat_is_safe(node: Node) -> None:
    async def drop(connection: ServerConnection) -> None:
        async with connect(node.url, subprotocols=[SUBPROTOCOL]) as hub:
            await hub.send(await connection.recv())
            await connection.send(await hub.recv())
            await hub.send(await connection.recv())
            await hub.recv()  # the message is stored, but nobody is notified

    async with serve_websockets(drop, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as between:
        url = f"ws://127.0.0.1:{between.sockets[0].getsockname()[1]}/"
        given = {"ROUNDELAY_OWNER_TOKEN": node.owner_token}
        done = await invoke("send", "broadcast", "hello", "--as", "mia", "--url", url, code=3, **given)
        advice = "run this again. With --message-id "
        assert advice in done.err
        message_id = done.err.partition(advice)[2].split()[0]
        told = await invoke(
            "send", "broadcast", "hello", "--as", "mia", "--message-id", "m", "--url", url, code=3, **given
        )
        assert "run this again." in told.err
        assert "--message-id" not in told.err
    again = await run_json("send", "broadcast", "hello", "--as", "mia", "--message-id", message_id)
    assert again["duplicate"]


async def test_a_message_to_nobody_fails(node: Node) -> None:
    cases = {"nobody": "registered", "channel:none": "channel", "mod:none": "mod"}
    for said, done in zip(
        cases.values(), await asyncio.gather(*(invoke("send", to, "hello", code=1) for to in cases)), strict=True
    ):
        assert said in sentence(done)


# -- tokens


async def test_a_token_joins_until_it_is_revoked(node: Node) -> None:
    made = await invoke("token", "create", "eve", "--kind", "human")
    token = made.out.strip()
    assert token not in made.err
    session = await node.join("eve", kind="human", token=token)
    listed = (await run_json("token", "list"))["tokens"]
    assert [(it["agent_id"], it["kind"], it["operator"], it["revoked"]) for it in listed] == [
        ("eve", "human", False, False)
    ]
    assert token not in json.dumps(listed)
    assert (await invoke("token", "revoke", "eve")).out == "Revoked 1 token of eve.\n"
    assert await session.closed() == 4403
    assert "revoked" in sentence(await invoke("threads", "--as", "eve", "--token", token, code=1))


async def test_a_token_that_is_given_says_what_its_participant_is(node: Node) -> None:
    for kind in ("service", "agent", "human"):
        token = (await run_json("token", "create", f"a-{kind}", "--kind", kind))["token"]
        given = {"ROUNDELAY_AS": f"a-{kind}", "ROUNDELAY_TOKEN": token}
        stored = json.loads((await invoke("send", "broadcast", "from cron", "--json", **given)).out)
        assert stored["seq"]
    kinds = {it["agent_id"]: it["kind"] for it in (await run_json("agents"))["agents"]}
    assert [kinds[f"a-{kind}"] for kind in ("service", "agent", "human")] == ["service", "agent", "human"]
    refused = await invoke(
        "send", "broadcast", "x", "--as-kind", "human", "--as", "a-agent", code=1, ROUNDELAY_TOKEN=token
    )
    assert "does not belong to a-agent" in sentence(refused)
    owner = find_owner_token(node.url)
    assert owner is not None
    assert (await invoke("send", "broadcast", "new", "--as", "zed", ROUNDELAY_TOKEN=owner)).out
    kinds = {it["agent_id"]: it["kind"] for it in (await run_json("agents"))["agents"]}
    assert kinds["zed"] == "human"  # the owner's token does not contain the kind


async def test_an_operators_token_may_make_tokens(node: Node) -> None:
    token = (await run_json("token", "create", "eve", "--kind", "human", "--operator"))["token"]
    environment = {"ROUNDELAY_TOKEN": token, "ROUNDELAY_AS": "eve"}
    assert (await invoke("token", "create", "ann", **environment)).out
    other = (await run_json("token", "create", "zoe", "--kind", "human"))["token"]
    refused = await invoke("token", "create", "joe", code=1, ROUNDELAY_TOKEN=other, ROUNDELAY_AS="zoe")
    assert "operators" in sentence(refused)


async def test_tokens_of_a_database_without_a_node(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with command("up", "--port", "0", "--db", db) as up:
        await up.line("is ready")
        assert "in use" in sentence(await invoke("token", "list", "--db", db, code=1))
        await up.stop()
    token = (await run_json("token", "create", "eve", "--kind", "human", "--db", db))["token"]
    assert token.encode() not in b"".join(read_tree(tmp_path).values())
    async with command("up", "--port", "0", "--db", db) as up:
        await up.line("is ready")
        assert (await invoke("threads", "--as", "eve", "--token", token)).out
        await up.stop()
    assert await run_json("token", "revoke", "eve", "--db", db) == {"agent_id": "eve", "revoked": 1}
    assert [it["revoked"] for it in (await run_json("token", "list", "--db", db))["tokens"]] == [True]


def test_the_owners_token_is_shown_to_no_other_machine(tmp_path: Path) -> None:
    from roundelay.network.home import announce_node

    (tmp_path / "x.owner").write_text("secret\n")
    announce_node("ws://127.0.0.1:8700/", tmp_path / "x.owner")
    assert find_owner_token("ws://localhost:8700/") == "secret"
    assert find_owner_token("ws://example.org:8700/") is None
    assert find_owner_token("ws://127.0.0.1:8701/") is None


# -- failing


WRONG_USAGE = (
    ["frob"], ["agents", "--frob"], ["history"], ["send", "bob"], ["send", "bob", "  "], ["agents", "--as", "Not An Id"],
    ["agents", "--url", "http://127.0.0.1/"], ["agents", "--url", "ws://127.0.0.1:x/"], ["history", "x", "--limit", "0"],
    ["token", "create", "x", "--kind", "robot"], ["agent", "run", "nothing.yaml"], ["completion", "tcsh"],
    ["token", "list", "--db", "nothing.db"], ["send", "Bob", "hi"], ["send", "channel:", "hi"], ["send", "agent:Bob", "hi"],
    ["chat", "--to", "Bob"], ["token", "create", "Bob"], ["token", "revoke", "Bob"], ["dead-letters", "list", "--of", "Bob"],
)  # fmt: skip


async def test_wrong_usage_is_2(tmp_path: Path) -> None:
    for done in await asyncio.gather(*(invoke(*arguments, code=2, cwd=tmp_path) for arguments in WRONG_USAGE)):
        assert sentence(done)


async def test_a_dead_hub_is_3() -> None:
    commands = (["agents"], ["send", "bob", "hi"], ["chat"], ["tail"], ["token", "list"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{free.getsockname()[1]}/"
        for done in await asyncio.gather(*(run(*arguments, "--url", url, code=3) for arguments in commands)):
            assert url in sentence(done)
            assert "roundelay up" in sentence(done)


async def leave_after_the_welcome(socket: ServerConnection) -> None:
    """A hub that drops the connection at the first request."""
    hello = json.loads(await socket.recv())
    welcome = {
        "type": "welcome", "server": "s", "network": {"name": "n", "epoch": "e"}, "agent_id": hello["agent_id"],
        "kind": hello["kind"], "role": "observer", "session_id": "s", "cursor": 0, "head": 0, "resume": "full",
    }  # fmt: skip
    await socket.send(json.dumps(welcome))
    await socket.recv()
    socket.transport.abort()


async def test_a_hub_that_is_lost_on_the_way_is_3() -> None:
    commands = (
        ["agents"], ["send", "bob", "hi"], ["threads"], ["history", "broadcast"], ["status"], ["token", "list"],
        ["token", "create", "bob"], ["dead-letters", "list"],
    )  # fmt: skip
    async with serve_websockets(
        leave_after_the_welcome, "127.0.0.1", 0, subprotocols=[Subprotocol(SUBPROTOCOL)]
    ) as hub:
        url = f"ws://127.0.0.1:{next(iter(hub.sockets)).getsockname()[1]}/"
        for done in await asyncio.gather(*(invoke(*arguments, "--url", url, code=3) for arguments in commands)):
            assert url in sentence(done)


async def test_tail_tells_of_a_lost_connection_and_goes_on(tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db") as node:
        port = node.url.rpartition(":")[2].strip("/")
        async with command("tail", "--url", node.url) as tail:
            await tail.error("Following")
            await node.kill9()
            await tail.error("The connection is lost")
            async with command("up", "--port", port, "--db", node.db) as again:
                await again.line("is ready")
                await tail.error("Connected again")
                await invoke("send", "broadcast", "hello again", "--url", node.url)
                await tail.line("hello again")
                await again.stop()


async def test_tail_begins_with_the_last_messages_of_the_thread_that_is_named(node: Node, bob: WireSession) -> None:
    ann = await node.agent("ann")
    for number in range(3):
        await ann.send("agent:bob", f"to bob {number}")
    for number in range(5):
        await bob.send("broadcast", f"noise {number}")
    done = await invoke("tail", "--last", "2", "--count", "2", "--thread", "direct:ann~bob", "--json")
    assert [json.loads(line)["content"] for line in done.out.splitlines()] == ["to bob 1", "to bob 2"]


@pytest.mark.parametrize("last", [(), ("--last", "3")])
async def test_tail_of_a_thread_that_does_not_exist_says_so_and_waits(node: Node, last: tuple[str, ...]) -> None:
    await node.agent("ann")
    bob = await node.agent("bob")
    async with command("tail", "--thread", "direct:ann~bob", "--count", "1", *last) as tail:
        await tail.error("You may read no thread direct:ann~bob yet; the command waits")
        await bob.send("agent:ann", "the first one")
        await tail.line("the first one")
        await tail.end()


async def test_tail_of_a_thread_that_exists_does_not_say_that_it_waits(node: Node, bob: WireSession) -> None:
    await bob.send("broadcast", "before")
    async with command("tail", "--thread", "broadcast", "--count", "1") as tail:
        await tail.error("Following")
        await bob.send("broadcast", "after")
        await tail.line("after")
        await tail.end()
    assert "no thread" not in "\n".join(tail.errors)


async def test_a_reader_of_tail_who_leaves_is_no_error(node: Node, bob: WireSession) -> None:
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "roundelay", "tail", "--json", stdout=writing, stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    assert process.stderr is not None
    assert b"Following" in await process.stderr.readline()
    os.close(reading)
    await bob.send("broadcast", "nobody reads this")
    assert await process.communicate() == (None, b"")
    assert process.returncode == 1


async def test_something_else_at_the_address_is_3() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail ready\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        assert "is not a Roundelay hub" in sentence(await invoke("agents", "--url", url, code=3))


async def test_a_refusal_names_what_a_person_types_and_no_operation(node: Node) -> None:
    cases = {
        ("why", "999"): "There is no message 999 that you may read. `roundelay tail --last 20` shows their numbers.",
        (
            "history",
            "dev",
        ): "There is no thread 'dev' that you may read. `roundelay threads` lists the threads.",
        ("why", "#999"): "There is no message 999 that you may read. `roundelay tail --last 20` shows their numbers.",
        (
            "send",
            "nobody",
            "hi",
        ): "Nobody is registered as 'nobody'. `roundelay agents` lists the registered participants.",
        ("send", "mod:none", "hi"): "This hub has no mod 'none'. `roundelay status` lists its mods.",
        ("token", "revoke", "nobody"): "'nobody' has no token. `roundelay token list` lists them.",
    }
    for done, said in zip(await asyncio.gather(*(invoke(*it, code=1) for it in cases)), cases.values(), strict=True):
        assert sentence(done).endswith(said)


async def test_looking_as_somebody_unknown_is_refused_and_registers_nobody(node: Node) -> None:
    await node.person("mia")
    looks = ("history", "broadcast"), ("threads",), ("agents",), ("tail", "--last", "1", "--count", "1"), ("approvals",)
    for done in await asyncio.gather(*(invoke(*it, "--as", "mai", code=1) for it in looks)):
        assert (
            "Nobody is registered as 'mai'. Did you mean mia? `roundelay agents` lists the registered participants."
            in sentence(done)
        )
    listed = json.loads((await invoke("agents", "--as", "mia", "--json")).out)["agents"]
    assert [it["agent_id"] for it in listed] == ["mia"]


async def test_a_refusal_says_what_to_do(node: Node) -> None:
    assert "--as" in sentence(await invoke("agents", "--token", "wrong", code=1))
    assert "registered as agent" in sentence(await _as_agent(node))


async def _as_agent(node: Node) -> Done:
    await node.agent("bob")
    return await invoke("send", "broadcast", "hi", "--as", "bob", code=1)


async def test_debug_shows_the_traceback() -> None:
    dead = ["agents", "--url", "ws://127.0.0.1:1/"]
    for done in await asyncio.gather(
        run(*dead, "--debug", code=3), run("--debug", *dead, code=3), run(*dead, code=3, ROUNDELAY_DEBUG="1")
    ):
        assert "Traceback" in done.err
        assert "ConnectError" in done.err


# -- doctor


async def examine(*arguments: str | Path, code: int = 0, cwd: Path, **environment: str) -> dict[str, dict[str, str]]:
    done = await invoke("doctor", *arguments, "--json", code=code, cwd=cwd, **environment)
    found = json.loads(done.out)
    assert found["ok"] is (code == 0)
    return {check["name"]: check for check in found["checks"]}


async def test_of_several_nodes_that_of_this_folder_is_meant_else_the_newest_and_it_is_said(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "elsewhere")]
    for folder in folders:
        folder.mkdir()
    async with announced_node(folders[0]) as one, announced_node(folders[1]) as two:
        for folder, node, other in zip(folders, (one, two, two), (two, one, one), strict=True):
            shown = await invoke("status", "--json", "--over", "0.1", cwd=folder)
            assert json.loads(shown.out)["url"] == node.url
            assert (
                shown.err
                == f"* Several nodes run here. The command uses {node.url}. Choose another one with --url {other.url}\n"
            )


async def test_json_drives_no_terminal(node: Node) -> None:
    """JSON does not escape control characters above ASCII, and a terminal reads U+009B as the start of an escape
    sequence.
    """
    evil = await node.agent("evil")
    await node.agent("ann")
    said = "grün \x9b2J \x7f \x85"
    seq = (await evil.send("agent:ann", said))["seq"]
    for command_line in (["history", "direct:ann~evil"], ["tail", "--last", "1", "--count", "1"], ["why", str(seq)]):
        shown = (await invoke(*command_line, "--json")).out
        assert not set(shown) & {"\x9b", "\x7f", "\x85"}
        assert json.dumps(said)[1:-1] in json.dumps(json.loads(shown))


async def test_doctor_finds_a_fresh_folder_well(tmp_path: Path) -> None:
    await invoke("init", cwd=tmp_path)
    checks = await examine(cwd=tmp_path, ROUNDELAY_PORT="0")
    database = checks["database"]
    assert database["status"] == "ok" or "slow to sync" in database["advice"]  # the disk may be busy
    assert {check["status"] for name, check in checks.items() if name != "database"} == {"ok"}
    assert {
        "python",
        "packages",
        "config",
        "mods",
        "database",
        "files",
        "tls",
        "page",
        "secrets",
        "port",
        "clock",
        "agent echo",
    } == set(checks)
    assert set(read_tree(tmp_path)) == {"agents/echo.yaml", "roundelay.yaml"}


async def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "junk.db").write_text("this is no database at all, only text\n" * 100)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = f"port: {taken.getsockname()[1]}\ndb: junk.db\nagents: [{{id: a, instruction: x, model: {{openai: {{name: m}}}}}}]\n"
        (tmp_path / "roundelay.yaml").write_text(config)
        checks = await examine(code=1, cwd=tmp_path)
    failed = {name: check["detail"] + check["advice"] for name, check in checks.items() if check["status"] == "failed"}
    assert set(failed) == {"database", "port", "agent a"}  # no integrity check of a file that is not a database
    assert "junk.db" in failed["database"]
    assert "choose another port" in failed["port"]
    assert "export OPENAI_API_KEY" in failed["agent a"]


async def test_doctor_says_that_a_file_does_not_exist(tmp_path: Path) -> None:
    done = await invoke("doctor", "nofile.yaml", code=2, cwd=tmp_path)
    assert done.out == ""
    assert "nofile.yaml" in done.err
    assert "no such file" in done.err
    assert done.err.count("\n") == 1


async def test_doctor_finds_a_mod_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "roundelay.yaml").write_text("name: x\nmods:\n- channels\n- nonsense\n")
    mods = (await examine(cwd=tmp_path, code=1, ROUNDELAY_PORT="0"))["mods"]
    assert mods["status"] == "failed"
    assert "roundelay.yaml:4: No mod is called 'nonsense'" in mods["detail"]


async def test_doctor_finds_the_node_that_runs(node: Node, tmp_path: Path) -> None:
    port = node.url.rpartition(":")[2].strip("/")
    checks = await examine(cwd=tmp_path, ROUNDELAY_PORT=port, ROUNDELAY_DB=str(tmp_path / "node.db"))
    assert "which is ready" in checks["port"]["detail"]
    assert f"the node at {node.url} (process {os.getpid()}, database" in checks["port"]["detail"]
    assert f"open in the node at {node.url}" in checks["database"]["detail"]
    assert "as at the hub" in checks["clock"]["detail"]


CONFIRM = calls([("confirm", {"word": "roundelay"})])


@pytest.mark.parametrize(
    ("reply", "status", "said"),
    [
        ([CONFIRM, text("It is 4711.")], "ok", "answered with its result"),
        ([text("I would rather talk.")], "failed", "called no tool"),
        ([calls([("confirm", {"word": "other"})]), text("It is 4711.")], "note", "wrong arguments"),
        ([error(404, "The model does not exist", code="model_not_found")], "failed", "does not exist"),
        (
            [CONFIRM, error(400, "This conversation is not one")],
            "failed",
            "fails at the second turn, with the result: Model m answered 400: This conversation is not one",
        ),
        ([CONFIRM, empty()], "failed", "returned an empty reply to the result"),
        ([CONFIRM, CONFIRM], "note", "called confirm again instead of answering"),
        ([CONFIRM, text("It", finish_reason="length")], "note", "cut off at its limit of length"),
    ],
)
async def test_doctor_asks_the_model_for_a_call_and_for_an_answer_to_its_result(
    tmp_path: Path, reply: Any, status: str, said: str
) -> None:
    async with FakeOpenAI([*reply, *reply]) as server:
        model = f"{{openai: {{name: m, base_url: '{server.base_url}'}}}}"
        agents = ", ".join(f"{{id: {name}, instruction: x, model: {model}}}" for name in ("ann", "bob"))
        (tmp_path / "roundelay.yaml").write_text(f"port: 0\nagents: [{agents}]\n")
        checks = await examine("--model", "m", "--base-url", server.base_url, code=status == "failed", cwd=tmp_path)
        assert len(server.requests) == 2 * len(reply), "agents with the same model share the question"
        if len(reply) == 2:
            roles = [it["role"] for it in server.requests[1]["messages"]]
            assert roles == ["system", "user", "assistant", "tool", "user"], "as an agent sends it"
    for name in ("agent ann", "agent bob", "model"):
        assert checks[name]["status"] == status
        assert said in checks[name]["detail"]
