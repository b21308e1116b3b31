"""Tests of `roundelay up` and `roundelay agent run`: a node and its agents as processes that start, fail, crash and
stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from roundelay.app import serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from roundelay.network.home import home, running_nodes
from roundelay.network.hub import Hub
from tests.support.announced import announced_node
from tests.support.command import TIMEOUT_S, Command, command, invoke, run
from tests.support.terminals import command_at_terminal
from tests.support.wire import WireSession, hello_frame, make_token

TEAM = "port: 0\nagents: [ann.yaml, {id: bob, instruction: Greet., model: {rules: [{do: [{say: 'bob heard {{ text }}'}]}]}}]\n"
ANN = "id: ann\nprocess: own\ninstruction: Greet.\nmodel: {rules: [{do: [{say: 'ann heard {{ text }}'}]}]}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a node with one agent, ann."""
    (tmp_path / "roundelay.yaml").write_text("port: 0\nagents: [ann.yaml]\n")
    (tmp_path / "ann.yaml").write_text(ANN)
    return tmp_path


@pytest.fixture
def team(folder: Path) -> Path:
    """Folder of a node with two agents, ann and bob."""
    (folder / "roundelay.yaml").write_text(TEAM)
    return folder


@asynccontextmanager
async def node_up(folder: Path, *flags: str | Path, **environment: str) -> AsyncIterator[tuple[Command, str]]:
    """Run a node. Yield the command and its URL."""
    async with command("up", *flags, cwd=folder, **environment) as up:
        ready = await up.line(r"^Roundelay is ready at (ws://\S+) ")
        try:
            yield up, ready[1]
        except Exception as error:
            error.add_note(f"The node printed {up.lines} {up.errors}; its exit code is {up.process.returncode}.")
            raise


async def ask(url: str, agent_id: str, text: str) -> str:
    """Ask an agent as a person, and return the answer."""
    async with asyncio.timeout(30), NetworkClient("mia", url, kind="human") as mia:
        question = await mia.send_text(agent_id, text)
        async for message in mia:
            if message.reply_to == question.seq:
                return message.text
    raise AssertionError("the connection ended")


def children(pid: int) -> dict[str, int]:
    """Return the processes of a node's agents by process name: an agent's ID, or ``agents`` for agents that share
    one.
    """
    found = {}
    for child in _list_children(pid):
        if _read_name(child) == "forker":
            found |= {_read_name(agent): agent for agent in _list_children(child)}
        else:  # a node that a test started without a forker
            arguments = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            found |= {arguments[arguments.index("--only") + 1]: child} if "--only" in arguments else {}
    return found


def _list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _read_name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def list_notes() -> list[Path]:
    """Return the node files of this machine."""
    return list((home() / "nodes").iterdir())


async def gone(pid: int) -> None:
    """Wait for the end of a process that is not a child of this one. Kill it if it does not end, so that it cannot
    slow down later tests.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(20):
            await ended.wait()
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


# -- running


async def test_agents_that_the_page_of_rights_locks_out_are_named_at_the_start(team: Path) -> None:
    page = "rights:\n  ann: {ids: [ann], send: ['*']}\n  bob: {ids: [bob], call: ['network.*']}\n"
    (team / "roundelay.yaml").write_text(TEAM.replace("id: bob,", "id: bob, channels: [dev],") + page)
    async with command("up", cwd=team) as up:
        await up.error(r"^ann may not call network\.window: .* rights\.ann\.call: \[network\.window\] .* a dead letter")
        await up.error("^bob may write to nobody")
        await up.error("bob: .* channel refused.* channel='dev'")
        await up.line("^Roundelay is ready .* agents ann bob")


async def test_a_terminal_is_told_how_to_talk_to_the_first_agent(folder: Path) -> None:
    shown = "In another terminal: roundelay chat --to ann"
    async with command_at_terminal("up", shows=shown, columns=120, cwd=folder) as up:
        up.process.terminate()
        await up.process.wait()


async def test_what_init_writes_works_at_once(tmp_path: Path) -> None:
    await invoke("init", cwd=tmp_path)
    async with node_up(tmp_path, "--port", "0") as (up, url):
        assert up.lines == [
            f"Roundelay is ready at {url} (network roundelay, database roundelay.db, durability full, agents echo)"
        ]
        assert await ask(url, "echo", "hello") == "You wrote: hello"
        assert await ask(url, "echo", "backwards: abc") == "cba"
        await up.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
async def test_a_signal_stops_node_and_agents_and_removes_the_note(team: Path, number: signal.Signals) -> None:
    async with node_up(team) as (up, url):
        assert [node.url for node in running_nodes()] == [url]
        agents = children(up.pid)
        assert set(agents) == {"ann", "bob"}
        assert len(list_notes()) == 1
        await up.stop(number)
        assert list_notes() == []
        for pid in agents.values():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert (len(up.lines), up.errors) == (1, []), "one line on stdout, and nothing to complain about"


async def test_what_was_said_survives_a_restart(folder: Path) -> None:
    async with node_up(folder) as (up, url):
        await ask(url, "ann", "before")
        await up.stop()
    async with node_up(folder) as (up, url):
        shown = await invoke("history", "direct:ann~mia")
        assert [line.rpartition(": ")[2] for line in shown.lines] == ["before", "ann heard before"]
        assert await ask(url, "ann", "after") == "ann heard after", "on another port the agent is let in all the same"
        await up.stop()


async def test_agents_do_not_outlive_a_killed_node(folder: Path) -> None:
    async with node_up(folder) as (up, _):
        agents = children(up.pid)
        await up.kill()
        for pid in agents.values():
            await gone(pid)


async def test_a_crashed_agent_is_started_again_and_answers_what_waited(team: Path) -> None:
    async with node_up(team) as (up, url):
        before = children(up.pid)
        os.kill(before["ann"], signal.SIGKILL)
        await up.error("Agent ann has ended with signal 9; it starts again in 0.5 s")
        assert await ask(url, "ann", "hello") == "ann heard hello"
        after = children(up.pid)
        assert after["ann"] != before["ann"]
        assert after["bob"] == before["bob"]
        await up.stop()


async def test_an_agent_whose_file_its_run_finds_wrong_is_told_once_and_not_started_again(team: Path) -> None:
    (team / "ann.yaml").write_text(f"{ANN}network_tools: [send_txt_message]\n")
    async with node_up(team) as (up, url):
        said = await up.error("Agent ann has ended with exit code 2 and is not started again")
        for part in ("ann.yaml", '"send_txt_message"', "did you mean send_text_message?"):
            assert part in said.string
        assert await ask(url, "bob", "hello") == "bob heard hello"
        assert set(children(up.pid)) == {"bob"}
        await up.stop()
        assert sum("send_txt_message" in line for line in up.errors) == 1


async def test_an_agent_that_another_runner_took_over_comes_back_when_that_one_has_ended(folder: Path) -> None:
    (folder / "other.yaml").write_text(ANN.replace("ann heard", "the other ann heard"))
    async with node_up(folder) as (up, url):
        async with command("agent", "run", "other.yaml", "--url", url, cwd=folder) as other:
            await other.line(f"^Agent ann is ready at {url}")
            await up.error("Agent ann has ended.$")
            assert await ask(url, "ann", "hello") == "the other ann heard hello"
            assert set(children(up.pid)) == set()
            await other.stop()
        assert await ask(url, "ann", "hello") == "ann heard hello"
        await up.stop()


async def test_agents_without_a_node_of_their_own_stop_with_their_terminal(folder: Path) -> None:
    async with (
        node_up(folder, "--no-agents") as (up, url),
        command("agent", "run", "ann.yaml", "--url", url, cwd=folder) as agents,
    ):
        await agents.line("^Agent ann is ready")
        await agents.stop(signal.SIGHUP)
        await up.stop()


async def test_several_agents_of_several_files_run_in_one_process(team: Path) -> None:
    (team / "zoe.yaml").write_text(ANN.replace("ann", "zoe"))
    async with (
        announced_node(team) as node,
        command("agent", "run", "roundelay.yaml", "zoe.yaml", cwd=team) as agents,
    ):
        for _ in range(3):
            await agents.line("is ready")
        for agent_id in ("ann", "bob", "zoe"):
            assert await ask(node.url, agent_id, "hi") == f"{agent_id} heard hi"
        await agents.stop()


async def test_a_token_in_the_environment_is_not_taken_for_every_agents(folder: Path) -> None:
    async with node_up(folder, ROUNDELAY_TOKEN="somebody-elses") as (up, url):
        assert await ask(url, "ann", "hi") == "ann heard hi"
        await up.stop()


async def test_flags_go_before_the_environment_and_that_before_the_file(folder: Path) -> None:
    (folder / "roundelay.yaml").write_text("port: 0\nname: tests\ndurability: normal\ndb: file.db\n")
    environment = {"ROUNDELAY_DURABILITY": "memory", "ROUNDELAY_DB": "environment.db"}
    async with node_up(folder, "--db", "flag.db", **environment) as (up, _):
        assert up.lines[0].endswith("(network tests, database none, durability memory)")
        assert (folder / "flag.db.owner").exists()
        await up.stop()


async def test_an_address_that_others_reach_takes_a_flag(folder: Path) -> None:
    refused = await run("up", "--host", "0.0.0.0", "--port", "0", "--no-agents", cwd=folder, code=2)
    assert "--insecure" in refused.err
    async with node_up(folder, "--host", "0.0.0.0", "--insecure") as (up, url):
        assert url.startswith("ws://0.0.0.0:")
        assert [node.url for node in running_nodes()] == [url.replace("0.0.0.0", "127.0.0.1")]
        assert (await invoke("agents", "--online")).out.count("idle") == 1
        await up.stop()


# -- log lines


async def test_the_log_tells_what_starts_joins_leaves_fails_and_stops_and_nothing_that_is_said(team: Path) -> None:
    flags = ("--log-level", "debug", "--log-format", "json")
    async with node_up(team, *flags) as (up, url):
        os.kill(children(up.pid)["ann"], signal.SIGKILL)
        await up.error("Agent ann has ended with signal 9")
        assert await ask(url, "ann", "the pass phrase") == "ann heard the pass phrase"
        await up.stop()
    told = [json.loads(line) for line in up.errors]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", it["at"]) for it in told)
    assert all(it["logger"].startswith("roundelay") for it in told), "no library's debug"
    main = [(it["message"], it.get("agent_id")) for it in told if "process" not in it and it["level"] != "debug"]
    for it in (("an agent's process starts", "bob"), ("joined", "bob"), ("joined", "mia"), ("left", "mia")):
        assert it in main
    assert [message for message, _ in main].count("joined") == 4, "ann twice"
    assert main[0] == ("the node listens", None)
    assert [message for message, _ in main if message.startswith("the node")][1:] == [
        "the node stops",
        "the node has stopped",
    ]
    [failed] = [it for it in told if "signal 9" in it["message"]]
    assert failed["level"] == "error"
    assert {"stored", "a reaction begins", "a reaction is over"} <= {
        it["message"] for it in told if it["level"] == "debug"
    }
    assert {it["process"] for it in told if "process" in it} >= {"ann"}
    said = "\n".join(up.errors)
    secrets = [
        it.read_text().strip() for it in [team / "roundelay.db.owner", *(home() / "tokens").rglob("*")] if it.is_file()
    ]
    assert len(secrets) > 1
    assert not any(it in said for it in ["pass phrase", "Greet.", *secrets])


async def test_the_log_in_words_has_times_and_is_silent_by_default(folder: Path) -> None:
    async with node_up(folder, "--no-agents", "--log-level", "info") as (up, _):
        await up.error(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO roundelay\.\S+: the node listens url=")
        await up.stop()
    assert any("the node has stopped" in line for line in up.errors)


# -- ownership of the agents' IDs


async def squat(port: int, agent_id: str) -> str:
    """Try to take an ID, like a local process that waits until the node listens. Return the result."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                session = await WireSession.open(f"ws://127.0.0.1:{port}/")
                break
            except OSError:
                await asyncio.sleep(0.001)  # this is the attack's retry loop, not a poll of the test
        await session.send_frame(hello_frame(agent_id, token=make_token()))
        answer = await session.next_frame()
        await session.close()
    return str(answer["code"] if answer["type"] == "error" else answer["type"])


async def test_nobody_takes_a_declared_agents_id_before_the_agent(team: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    squatters = [asyncio.create_task(squat(port, agent_id)) for agent_id in ("ann", "bob")]
    async with node_up(team, "--port", str(port)) as (up, url):
        assert up.lines[-1].endswith("agents ann bob)")
        assert await asyncio.gather(*squatters) == ["not_authenticated"] * 2
        assert await ask(url, "ann", "hi") == "ann heard hi"
        await up.stop()


async def test_an_id_that_somebody_else_has_stops_the_node(folder: Path) -> None:
    async with node_up(folder, "--no-agents") as (up, url):
        assert await squat(int(url.rstrip("/").rpartition(":")[2]), "ann") == "welcome"
        await up.stop()
    refused = await run("up", cwd=folder, code=2)
    assert refused.out == ""
    assert "Agent ann: its id is bound to a token that is not among yours" in refused.err
    way_out = "token revoke ann --db roundelay.db"
    assert f"roundelay {way_out}" in refused.err
    await invoke(*way_out.split(), cwd=folder)
    async with node_up(folder) as (up, url):
        assert await ask(url, "ann", "hi") == "ann heard hi"
        await up.stop()


async def test_agents_have_their_tokens_from_the_node_where_nobody_binds_an_id(folder: Path) -> None:
    (folder / "roundelay.yaml").write_text(
        "port: 0\nagents: [ann.yaml, {id: assistant, instruction: Greet., model: {rules: []}}]\n"
    )
    async with node_up(folder, "--registration", "closed", "--behind-proxy") as (up, url):
        assert up.lines[-1].endswith("agents ann assistant)")
        assert await ask(url, "ann", "hi") == "ann heard hi"
        assert await squat(int(url.rstrip("/").rpartition(":")[2]), "zoe") == "not_authenticated"
        await up.stop()
    assert "the agent assistant means a role" in "\n".join(up.errors)


async def test_nobody_can_connect_before_the_node_is_prepared(tmp_path: Path) -> None:
    prepared = []

    async def prepare(hub: Hub, url: str) -> None:
        with pytest.raises(ConnectionRefusedError):
            await WireSession.open(url)
        prepared.append(url)

    async with serve(NodeConfig(port=0, db=tmp_path / "node.db"), prepare=prepare) as node:
        assert prepared == [node.url]
        await (await WireSession.open(node.url)).close()


# -- failures: one sentence each, with the problem, the place and the next step


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


async def fails(folder: Path, *flags: str | Path, code: int, **environment: str) -> str:
    """Run a node that cannot start, and return its error."""
    done = await run("up", *flags, code=code, cwd=folder, **environment)
    assert done.out == ""
    assert done.err.startswith("Error: ")
    assert done.err.count("\n") == 1, done.err
    assert running_nodes() == []
    return done.err


@pytest.mark.parametrize(
    ("yaml", "parts"),
    [
        ("name: x\nprot: 1\n", ("roundelay.yaml:2", '"prot"', 'did you mean "port"')),
        (
            "agents:\n- id: a\n  instruction: x\n  model: {rules: []}\n  chanels: [dev]\n",
            ("roundelay.yaml:5", '"chanels"', 'did you mean "channels"'),
        ),
        (
            "port: 0\nagents:\n- id: a\n  instruction: x\n  model: {openai: {name: m}}\n",
            ("roundelay.yaml:5", "agent a", "OPENAI_API_KEY", "export"),
        ),
        (
            "port: 0\nagents:\n- id: a\n  instruction: x\n  model: {rules: []}\n  tools: ['nowhere:f']\n",
            ("roundelay.yaml:6", "agent a", "nowhere"),
        ),
        ("name: x\nmods:\n- channels\n- nonsense\n", ("roundelay.yaml:4", "nonsense")),
        ("mods: [discovery,\n  discovery]\n", ("roundelay.yaml:1", "taken")),
    ],
)
async def test_a_wrong_file(tmp_path: Path, yaml: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "roundelay.yaml").write_text(yaml)
    said = await fails(tmp_path, code=2)
    for part in parts:
        assert part in said


async def test_a_wrong_variable(tmp_path: Path) -> None:
    assert "ROUNDELAY_PORT must be a whole number" in await fails(tmp_path, code=2, ROUNDELAY_PORT="x")
    said = await fails(tmp_path, code=2, ROUNDELAY_MODS="channels, nonsense")
    assert said.startswith("Error: ROUNDELAY_MODS: No mod is called 'nonsense'")


@pytest.mark.usefixtures("real_processes")
async def test_a_used_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = await fails(tmp_path, "--port", port, "--db", "new/folder/team.db", code=1)
    assert f"127.0.0.1:{port}" in said
    assert "choose another --port" in said
    assert list_files(tmp_path) == [], "nothing half done remains"


async def test_a_port_where_a_node_listens_names_its_network(tmp_path: Path, folder: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with node_up(folder, "--no-agents", "--name", "harvest") as (up, url):
        port = url.rpartition(":")[2].strip("/")
        done = await run("up", "--port", port, "--db", "new/team.db", cwd=other, code=1)
        assert done.err.count("\n") == 1, done.err
        database = folder / "roundelay.db"
        assert f"your node of the network harvest (database {database}) listens there already" in done.err
        assert f"roundelay chat --url {url}" in done.err
        assert "another port: roundelay up --port PORT" in done.err
        again = await run("up", "--port", port, "--no-agents", cwd=folder, code=1)
        assert "your node of the network harvest" in again.err
        assert "runs already" in again.err
        unknown = await run("up", "--port", port, "--db", "new/team.db", cwd=other, code=1, ROUNDELAY_HOME=str(other))
        assert "somebody else's Roundelay node listens there already" in unknown.err
        assert "chat" not in unknown.err
        assert list_files(other) == []
        await up.stop()


async def test_what_an_agents_process_prints_drives_no_terminal(folder: Path) -> None:
    (folder / "loud.py").write_text(
        "def read_page() -> str:\n    page = 'a\\x1b]0;owned\\x07b'\n    print(page)\n    raise ValueError(page)\n"
    )
    (folder / "ann.yaml").write_text(
        "id: ann\ninstruction: Greet.\ntools: ['loud:read_page']\n"
        "model: {rules: [{when: {turn: 1}, do: [{tool: read_page}]}, {when: {turn: 2}, do: [{say: done}]}]}\n"
    )
    async with node_up(folder) as (up, url):
        assert await ask(url, "ann", "read") == "done"
        await up.error(r"^ann: a\\x1b\]0;owned\\x07b")
        await up.error("^ann: ValueError$")
        await up.stop()
    assert not [line for line in up.errors if "\x1b" in line or "\x07" in line]


async def test_what_an_agent_says_at_its_end_is_heard(folder: Path) -> None:
    (folder / "parting.py").write_text(
        "import atexit\n\natexit.register(lambda: print('one line of many, and none of them is lost\\n' * 8_000 + 'bye'))\n\n\ndef look() -> str:\n    return ''\n"
    )
    (folder / "ann.yaml").write_text(ANN + "tools: ['parting:look']\n")
    async with node_up(folder) as (up, _):
        await up.stop()
    assert "ann: bye" in up.errors


async def test_a_wrong_mod_leaves_no_file(tmp_path: Path) -> None:
    await fails(tmp_path, "--db", "new/folder/team.db", code=2, ROUNDELAY_MODS="nonsense")
    assert list_files(tmp_path) == []


async def test_an_unwritable_database(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert "part of its path is no folder" in await fails(tmp_path, "--db", "file/x.db", code=1)
    assert "is a folder" in await fails(tmp_path, "--db", ".", code=1)
    said = await fails(tmp_path, "--db", "file", "--port", "0", code=1)
    assert "not a database" in said
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    assert "permission denied" in await fails(tmp_path, "--db", "closed/x.db", code=1)


async def test_a_database_in_use(folder: Path) -> None:
    async with node_up(folder, "--no-agents") as (up, _):
        done = await run("up", "--no-agents", cwd=folder, code=1)
        assert "in use by another node" in done.err
        await up.stop()


async def test_an_agent_that_is_not_there(team: Path) -> None:
    done = await invoke("agent", "run", "roundelay.yaml", "--only", "zoe", cwd=team, code=2)
    assert "no agent zoe; known are: ann, bob" in done.err
