"""Tests of the information that nodes on a shared log give about it, and of its use on the command line.
docs/cluster.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets import ConnectionClosed
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from roundelay.app import Network
from roundelay.network.hub.hub import STOPPING
from roundelay.nodes.hub_http import get_from_hub
from tests.crash.test_takeovers import OWNER, ClusterNode, find_leader, follows, join, running, says
from tests.support.command import invoke
from tests.support.nats import NatsServer, nats_server
from tests.support.node import Node


@asynccontextmanager
async def leader_and_follower(tmp_path: Path) -> AsyncIterator[tuple[NatsServer, ClusterNode, ClusterNode]]:
    async with nats_server(tmp_path / "nats") as server:
        made = [ClusterNode(tmp_path / "nodes", name, server.shown_url("lab")) for name in ("leads", "follows")]
        async with running(made[:1]) as [leader]:
            await find_leader([leader])
            async with running(made[1:]) as [follower]:
                await follows(follower)
                yield server, leader, follower


async def get(node: ClusterNode, path: str) -> str:
    return (await asyncio.to_thread(get_from_hub, node.url, path)).body


def read_figures(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^roundelay_(log_\w+) (\S+)$", text, re.MULTILINE)}


async def told_by(node: ClusterNode, what: str) -> str:
    """Wait until `/readyz` contains a text, and return its answer."""
    async with asyncio.timeout(20):
        while what not in (said := (await get(node, "/readyz")).strip()):  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.05)
    return said


async def status(node: ClusterNode, *options: str, code: int = 0) -> Any:
    environment = {"ROUNDELAY_OWNER_TOKEN": OWNER, "ROUNDELAY_HOME": str(node.db.parent / "home")}
    return await invoke("status", "--over", "0.1", "--url", node.url, *options, code=code, **environment)


NOBODY = "ws://127.0.0.1:1/"


async def test_nodes_tell_who_leads_how_far_behind_they_are_and_whether_the_log_is_full(tmp_path: Path) -> None:
    async with leader_and_follower(tmp_path) as (server, leader, follower):
        assert await told_by(leader, "ready") == "ready, leading, log lab, durability full"
        at = f"127.0.0.1:{leader.port}"
        assert await told_by(follower, at) == f"following {at}, 0 records behind, log lab, durability full"
        leads, behind = read_figures(await get(leader, "/metrics")), read_figures(await get(follower, "/metrics"))
        assert leads.pop("log_age_seconds") < 10
        assert behind.pop("log_age_seconds") < 10
        assert leads == {"log_leading": 1, "log_full": 1, "log_records_behind": 0}
        assert behind == {"log_leading": 0, "log_full": 1, "log_records_behind": 0}
        for text in [await get(leader, "/metrics"), *[await get(it, "/readyz") for it in (leader, follower)]]:
            assert server.hosts not in text, "where the log is, is nobody's business"

        async with join([leader], "roundelay-cli", kind="service"):
            pass
        shown = json.loads((await status(leader, "--json")).out)
        assert shown["shared_log"].pop("answered_s") < 10
        expected = {"leads": True, "leader": "", "behind": 0, "log": "lab", "durability": "full", "waits": ""}
        assert shown["shared_log"] == expected
        assert shown["figures"]["log_leading"] == 1
        assert re.search(
            "^shared log +lab, durability full; this node leads$", (await status(leader)).out, re.MULTILINE
        )
        told = (await status(follower)).out
        assert f"lab, durability full; this node follows {at}, 0 records behind; the lines below come from" in told
        assert "commits" in told
        first_gone = json.loads((await status(leader, "--url", f"{NOBODY},{leader.url}", "--json")).out)
        assert (first_gone["url"], first_gone["shared_log"]["leads"]) == (leader.url, True)

        await server.kill9()
        await leader.end()  # nobody else can become the leader
        alone = await status(follower, code=3)
        assert re.search("this node (follows|waits: the log does not answer)", alone.out)
        assert "commits" not in alone.out
        assert f"No hub answers at {leader.url}" in alone.err
        shown = json.loads((await status(follower, "--url", f"{leader.url},{follower.url}", "--json", code=3)).out)
        assert shown["url"] == follower.url
        assert (shown["shared_log"]["leads"], shown["figures"]["ready"]) == (False, 0)
        async with asyncio.timeout(20):
            while read_figures(await get(follower, "/metrics"))["log_age_seconds"] < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await told_by(follower, "waiting") == "waiting, the log does not answer, log lab"
        assert "lab; this node waits: the log does not answer" in (await status(follower, code=3)).out


async def test_a_leader_that_is_stopped_names_the_one_that_goes_on(tmp_path: Path) -> None:
    async with leader_and_follower(tmp_path) as (_, leader, follower):
        async with join([leader], "mia") as mia:  # this client knows no other node
            first = await mia.send("broadcast", "Before")
            assert await leader.end(signal.SIGTERM) == 0
            assert (await mia.send("broadcast", "After")).seq > first.seq
            assert mia.url == follower.url
        hello = {"type": "hello", "protocol": 1, "agent_id": "mia", "kind": "human", "token": OWNER}
        async with connect(follower.url, subprotocols=[Subprotocol("roundelay.v1")]) as session:
            await session.send(json.dumps(hello))
            assert json.loads(await session.recv())["type"] == "welcome"
            await follower.end(signal.SIGTERM)  # nobody follows any more
            with suppress(ConnectionClosed):
                while await session.recv():
                    pass
            assert (session.close_code, session.close_reason) == (4503, STOPPING)


async def test_of_several_nodes_here_a_command_names_the_one_that_leads_as_its_own(tmp_path: Path) -> None:
    home = {"ROUNDELAY_HOME": str(tmp_path / "home")}
    async with nats_server(tmp_path / "nats") as server:
        leader, follower = (ClusterNode(tmp_path / "nodes", name, server.url("lab")) for name in ("leads", "follows"))
        leader.environment = follower.environment = home
        async with running([leader]):
            await find_leader([leader])
            async with running([follower]):  # the newest node, which commands try first
                await follows(follower)
                done = await invoke("agents", cwd=tmp_path, **home)
    assert (
        done.err
        == f"* Several nodes run here. The command uses {leader.url}. Choose another one with --url {follower.url}\n"
    )


async def test_doctor_tells_of_which_log_a_file_is_an_index_and_what_its_damage_means(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        made = ClusterNode(tmp_path / "nodes", "a", server.url("lab"))
        async with running([made]):
            await find_leader([made])
            async with join([made], "mia") as mia:
                await mia.send_text("mia", "hello")
        await doctor_tells(tmp_path, server, made)


async def doctor_tells(tmp_path: Path, server: NatsServer, made: ClusterNode) -> None:
    nodes = {"ROUNDELAY_DB": str(made.db), "ROUNDELAY_PORT": "0"}
    log = f"nats://me:hush@{server.hosts}/lab"

    async def look(code: int = 0, *flags: str, **environment: str) -> dict[str, dict[str, str]]:
        done = await invoke("doctor", "--json", *flags, code=code, cwd=tmp_path, **nodes, **environment)
        assert "hush" not in done.out
        return {it["name"]: it for it in json.loads(done.out)["checks"]}

    checks = await look(ROUNDELAY_LOG=log)
    assert re.search(r"answers: \d+ records, 0\.0 of 10,240 MiB, durability replicated", checks["log"]["detail"])
    named = nodes.pop("ROUNDELAY_DB")
    flagged = await look(0, "--db", str(made.db), "--log", log)  # docs/cluster.md starts its nodes this way
    nodes["ROUNDELAY_DB"] = named
    assert [flagged[name] for name in ("log", "shared log")] == [checks[name] for name in ("log", "shared log")]
    missing = (await look(ROUNDELAY_LOG=log.replace("/lab", "/lap")))["log"]
    assert (missing["status"], "does not exist yet" in missing["detail"]) == ("note", True)
    found = checks["shared log"]
    told = (
        r"a\.db is an index of the shared log of the network lab \(epoch \S+\), up to record \d+; log names nats://127"
    )
    assert (found["status"], bool(re.search(told, found["detail"]))) == ("ok", True), found
    assert f"roundelay cluster verify --log 'nats://{server.hosts}/lab' --db {made.db}" in found["advice"]
    unnamed = (await look(1))["shared log"]
    assert (unnamed["status"], unnamed["advice"]) == (
        "failed",
        "Name the address of the log: --log URL, log: URL, or ROUNDELAY_LOG.",
    )
    with sqlite3.connect(made.db) as db:
        db.execute("UPDATE log SET data = replace(data, 'hello', 'jello')")
    db.close()
    damaged = (await look(1, ROUNDELAY_LOG=log))["integrity"]
    assert damaged["status"] == "failed"
    assert "delete the file and start the node: it rebuilds the file from the log" in damaged["advice"]

    nodes["ROUNDELAY_DB"] = str(tmp_path / "own.db")
    assert "shared log" not in await look()
    async with Network.open(tmp_path / "own.db") as network:
        await network.join("ann")
    assert "shared log" not in await look()
    refused = (await look(1, ROUNDELAY_LOG=log))["shared log"]
    assert "has a history of its own" in refused["detail"]
    await server.kill9()
    away = (await look(1, ROUNDELAY_LOG=log))["log"]
    assert (away["status"], "can be reached" in away["detail"]) == ("failed", True)


# --- nodes as if on separate machines


def output(node: ClusterNode) -> str:
    return node.db.with_suffix(".out").read_text()


async def test_the_next_node_runs_the_agents_that_both_declare_with_nothing_copied_but_the_owners_token(
    tmp_path: Path,
) -> None:
    async with nats_server(tmp_path / "nats") as server:
        made = [ClusterNode(tmp_path / name, name, server.url("lab")) for name in "ab"]
        for node in made:
            node.environment = {"ROUNDELAY_HOME": str(node.db.parent / "home")}
            for agent_id in ("desk", *(["taken"] if node is made[1] else [])):
                (node.db.parent / f"{agent_id}.yaml").write_text(
                    f"id: {agent_id}\ninstruction: x\nmodel: {{rules: [{{do: [{{say: hello}}]}}]}}\n"
                )
            names = "desk.yaml" if node is made[0] else "desk.yaml, taken.yaml"
            (node.db.parent / "node.yaml").write_text(f"agents: [{names}]\n")
        first, second = made
        try:
            await first.start("node.yaml", "--no-web")
            await find_leader([first])
            await says(first, "agents desk)")
            assert "was empty: a new network begins in it" in output(first)
            await second.start("node.yaml", "--no-web")
            await follows(second)
            assert "a new network begins" not in output(second)
            stranger = await Node(first.url, OWNER).agent("taken")
            async with join(made, "mia") as mia, asyncio.timeout(60):
                answers = mia.deliveries()

                async def ask() -> str | None:
                    await mia.send_text("desk", "hello?")
                    async for delivery in answers:
                        if delivery.message.sender_id == "desk":
                            return delivery.message.text
                    return None

                assert await ask() == "hello"
                await first.end()
                await find_leader([second])
                await says(second, "agents desk)")
                assert await ask() == "hello"
            assert "This node leads without taken." in output(second)
            assert re.search("taken.* is not among yours", output(second)), output(second)
            await stranger.close()
            where = {"ROUNDELAY_HOME": str(second.db.parent / "home")}
            assert "desk" in (await invoke("threads", "--url", f"{first.url},{second.url}", **where)).out
        finally:
            for node in made:
                await node.end()


LATER = """import time
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + 30 * 24 * 3600
time.time_ns = lambda: now_ns() + 30 * 24 * 3600 * 10**9
"""


@pytest.mark.full
async def test_a_node_whose_clock_is_a_month_ahead_takes_over_and_drops_nothing(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        made = [ClusterNode(tmp_path / name, name, server.url("lab")) for name in "ab"]
        for node in made:
            (node.db.parent / "node.yaml").write_text("retain: {days: 7, record_days: 7}\n")
        first, second = made
        (second.db.parent / "sitecustomize.py").write_text(LATER)
        second.environment = {"PYTHONPATH": str(second.db.parent)}
        try:
            await first.start("node.yaml", "--no-web")
            await find_leader([first])
            await second.start("node.yaml", "--no-web")
            await says(second, "This node's clock is 2,592,0")
            told = (await invoke("cluster", "status", "--log", first.log)).out
            assert re.search(rf"node 127.0.0.1:{first.port}: leads\n", told)
            assert re.search(
                rf"node 127.0.0.1:{second.port}: follows, 0 records behind, its clock 2,59\S+ s ahead", told
            )
            async with join(made, "mia") as mia:
                seqs = [(await mia.send("broadcast", f"{number}")).seq for number in range(20)]
                assert await first.end(signal.SIGTERM) == 0
                await find_leader([second])
                await says(second, "30.0 days ahead of the newest stored row")  # a retention run was due
                later = await mia.send("broadcast", "later")
                kept = await mia.history("broadcast", limit=100)
            assert [it.seq for it in kept.messages] == [*seqs, later.seq]
            await first.start("node.yaml", "--no-web")
            await says(first, "This node's clock is 2,59")
            assert "2,592,000 s behind" in output(first) or "2,591,999 s behind" in output(first)
        finally:
            for node in made:
                if node.process is not None and node.process.returncode is None:
                    await node.end()


async def test_commands_on_the_machine_of_a_follower_need_no_token_and_a_wrong_owner_is_told(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        leader, follower = (ClusterNode(tmp_path / name, name, server.url("lab")) for name in "ab")
        for node in (leader, follower):
            node.environment = {"ROUNDELAY_HOME": str(node.db.parent / "home")}
        follower.db.with_name("b.db.owner").unlink()
        async with running([leader]):
            await find_leader([leader])
            async with join([leader], "mia") as mia:
                await mia.send_text("mia", "hello")
            async with running([follower]):
                await follows(follower)
                await says(follower, "The owner's token of this node is not that of the node that leads")
                await follower.end()
                follower.db.with_name("b.db.owner").write_text(f"{OWNER}\n")
                await follower.start()
                await says(follower, "this one follows", times=2)
                await told_by(follower, f"following 127.0.0.1:{leader.port}")
                home = {"ROUNDELAY_HOME": str(follower.db.parent / "home")}
                done = await invoke("threads", "--url", f"{follower.url}?read_only=1", "--as", "mia", **home)
                assert "mia" in done.out
                assert "Read at a node that follows" in done.err
                refused = await invoke("threads", "--url", f"{follower.url}?read_only=1", code=1, **home)
                assert "name a participant to read as with --as" in refused.err
                asked = await invoke("web", "--url", follower.url, "--as", "mia", code=1, **home)
                assert f"The node at {leader.url} shows no page" in asked.err, "a link is made for where it is good"
        assert output(follower).count("The owner's token of this node is not that of") == 1
