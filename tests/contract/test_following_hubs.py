"""Tests of the hub of a read replica: what its readers receive, and what ends it. docs/protocol/nodes.md."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roundelay.app import serve
from roundelay.network.clock import random_id, system_clock
from roundelay.network.cluster.shared_log import LogStatus, LogUnavailable
from roundelay.network.config import Limits, NodeConfig
from roundelay.network.core.tables import TableWrite
from roundelay.network.errors import Closed
from roundelay.network.frames import Follows
from roundelay.network.hub import Hub
from roundelay.network.hub.local import LocalConnection
from roundelay.network.hub.replica import ReplicaHub, ReplicaReaders
from roundelay.network.hub.server import WebSocketServer
from roundelay.network.ledger import Ledger
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.readiness import Readiness, SharedLogReadiness
from roundelay.nodes.hub_http import fetch_readiness, get_from_hub, is_hub_ready
from tests.contract.test_ledger import message
from tests.support.nats import nats_server
from tests.support.wire import WireSession

TIMEOUT_S = 10


def make_hub(ledger: Ledger) -> ReplicaHub:
    return ReplicaHub(
        ledger, limits=Limits(), clock=system_clock, new_id=random_id, follows=lambda: Follows("a:8700", 1)
    )


async def known(ledger: MemoryLedger, *agent_ids: str) -> None:
    """Register these participants through a hub that is the leader."""
    hub = Hub(ledger, limits=Limits(), clock=system_clock, new_id=random_id)
    await hub.start()
    for agent_id in agent_ids:
        connection = LocalConnection(hub)
        connection.send(b'{"type":"hello","protocol":1,"agent_id":"%b","kind":"agent"}' % agent_id.encode())
        async with asyncio.timeout(TIMEOUT_S):
            assert b'"welcome"' in await anext(connection.frames())
    await hub.close()


async def reads(hub: Hub, agent_id: str) -> Any:
    """Join a replica's hub, and return the frames after the welcome. The session is live on return."""
    connection = LocalConnection(hub)
    connection.send(b'{"type":"hello","protocol":1,"agent_id":"%b","kind":"agent"}' % agent_id.encode())
    frames = connection.frames()
    async with asyncio.timeout(TIMEOUT_S):
        assert b'"welcome"' in await anext(frames)
        while any(it.outbox.is_paging for it in hub.registry.sessions.values()):  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0)
    return frames


async def rest_of(frames: Any) -> tuple[list[bytes], int]:
    found = []
    async with asyncio.timeout(TIMEOUT_S):
        try:
            async for frame in frames:
                found.append(frame)
        except Closed as end:
            return found, end.code
    raise AssertionError("it was not closed")


async def test_who_was_revoked_is_shown_nothing_that_was_stored_after_it_in_the_same_commit() -> None:
    ledger = MemoryLedger(epoch="e1")
    await known(ledger, "ann", "bob")
    hub = make_hub(ledger)
    await hub.start()
    frames = await reads(hub, "bob")
    head, bob = hub.state.head, hub.state.participant("bob")
    assert bob is not None
    rows = [message(head + 2, "ann", "agent:bob", thread="direct:ann~bob")]
    await hub.apply_followed(rows, [TableWrite("participant", "bob", msgspec.structs.replace(bob, cut_seq=head + 1))])
    found, code = await rest_of(frames)
    assert code == 4403
    assert not any(b'"deliver"' in frame for frame in found), found
    await hub.close()


async def test_what_cannot_be_shown_ends_those_who_read_and_not_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger(epoch="e1")
    await known(ledger, "bob")
    readers = ReplicaReaders(make_hub)
    await readers.start(ledger)
    assert readers.hub is not None
    frames = await reads(readers.hub, "bob")

    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(ReplicaHub, "apply_followed", fail)
        await readers.apply([message(9, "ann", "agent:bob")], [])
    assert (await rest_of(frames))[1] == 4503
    assert not readers.is_serving
    await readers.apply([message(10, "ann", "agent:bob")], [])
    await readers.start(ledger)
    assert readers.hub is not None
    await reads(readers.hub, "bob")
    await readers.stop()


async def test_who_shakes_hands_as_that_hub_ends_comes_again(tmp_path: Path) -> None:
    config = NodeConfig(host="127.0.0.1", port=0, db=tmp_path / "a.db", durability="memory", web=False)
    async with serve(config) as node:
        node.hub.status.draining.set()
        session = await WireSession.open(node.url)
        assert await session.closed() == 4503
        node.hub.status.draining.clear()


async def test_a_node_whose_log_goes_away_as_it_begins_to_lead_prepares_again(tmp_path: Path) -> None:
    told: list[str] = []

    async def prepare(hub: Hub, url: str) -> None:
        assert hub.status.is_open
        told.append(url)
        if len(told) == 1:
            raise LogUnavailable("It went away.")

    async with nats_server(tmp_path / "nats") as server:
        config = NodeConfig(host="127.0.0.1", port=0, db=tmp_path / "a.db", log=server.url("lab"), web=False)
        async with asyncio.timeout(30), serve(config, prepare=prepare) as node:
            assert told == [node.url] * 2
            assert node.hub.is_ready


class StubLog:
    """A shared log whose server's answers the test defines."""

    status = LogStatus(False, "", None, None, "lab", "full")
    leader_node = "10.0.0.2:8700"


async def test_readyz_answers_json_to_programs_and_the_same_as_text_to_others() -> None:
    hub = Hub(MemoryLedger(epoch="e1"), limits=Limits(), clock=system_clock, new_id=random_id)
    await hub.start()
    log = StubLog()
    server = WebSocketServer(hub, Limits(), shared_log=log)
    url = f"ws://127.0.0.1:{await server.bind('127.0.0.1', 0)}/"
    server.listen()

    async def ask() -> tuple[Readiness, str, bool | None]:
        readiness = await asyncio.to_thread(fetch_readiness, url)
        assert readiness is not None
        answer = await asyncio.to_thread(get_from_hub, url, "/readyz")
        assert (answer.status == 200) is readiness.ready
        assert answer.body == f"{readiness.detail}\n"
        return readiness, readiness.state, await asyncio.to_thread(is_hub_ready, url)

    log.status = LogStatus(True, "", 0, 0.1, "lab", "full")
    readiness, state, is_ready = await ask()
    assert (state, is_ready) == ("ready", True)
    assert readiness.shared_log == SharedLogReadiness(True, "", 0, "lab", "full", "")
    server.is_accepting_sessions = False
    assert (await ask())[1:] == ("stalled", False)
    hub.status.is_open = False
    assert (await ask())[1:] == ("recovering", False)
    log.status = LogStatus(False, "", None, None, "lab", "full")
    assert (await ask())[1:] == ("starting", False)
    log.status = LogStatus(False, "10.0.0.2:8700", 7, 0.1, "lab", "full")
    readiness, state, is_ready = await ask()
    assert (state, is_ready) == ("following", False)
    assert readiness.shared_log == SharedLogReadiness(False, "10.0.0.2:8700", 7, "lab", "full", "")
    log.status = LogStatus(False, "", 7, 0.1, "lab", "full", "for an election")
    readiness, state, is_ready = await ask()
    assert (state, is_ready, readiness.detail) == ("waiting", False, "waiting, for an election, log lab")
    hub.status.is_open = True
    await hub.close()
    await server.close()
