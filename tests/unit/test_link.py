"""Tests of a client's link: it releases every failed connection, and every request that no connection survives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.typing import Subprotocol

from roundelay.app import Network
from roundelay.network.client import NetworkClient, Reconnected, Reconnecting
from roundelay.network.client import transport as transports
from roundelay.network.config import Limits
from roundelay.network.errors import Closed, ConnectError, InternalError, TooLarge
from roundelay.network.hub import Hub
from roundelay.network.hub.local import LocalConnection, LocalTransport
from tests.support.node import running_node
from tests.support.wire import make_token


class CutConnection(LocalConnection):
    """A connection that ends before the hub's welcome arrives, if ``is_cut``."""

    def __init__(self, hub: Hub, *, is_cut: bool) -> None:
        super().__init__(hub)
        self.is_cut = is_cut
        self.is_dropped = False

    async def frames(self) -> AsyncIterator[bytes]:
        if self.is_cut:
            raise Closed(1006, "cut")
        async for frame in super().frames():
            yield frame

    async def drop(self) -> None:
        self.is_dropped = True
        await super().drop()


class CutTransport:
    """Transport whose connections with these numbers (counted from 0) are cut."""

    def __init__(self, hub: Hub, cut: set[int]) -> None:
        self.connections: list[CutConnection] = []
        self._hub = hub
        self._cut = cut

    async def connect(self) -> CutConnection:
        self.connections.append(CutConnection(self._hub, is_cut=len(self.connections) in self._cut))
        return self.connections[-1]


async def test_a_connection_without_a_welcome_is_let_go_at_the_first_try() -> None:
    async with Network.open() as network:
        transport = CutTransport(network.hub, {0})
        with pytest.raises(ConnectError):
            await NetworkClient("bob", transport=transport).connect()
        assert [it.is_dropped for it in transport.connections] == [True]


@pytest.mark.parametrize("role", ["observer", "reactor"])
async def test_every_connection_that_came_to_nothing_is_let_go_on_the_way_back(role: str) -> None:
    async with Network.open() as network:
        transport = CutTransport(network.hub, {1, 2})
        async with NetworkClient("bob", transport=transport, role=role) as client:  # type: ignore[arg-type]
            transport.connections[0].end(1006, "lost")
            async for event in client.events():
                if isinstance(event, Reconnected):
                    break
            assert [it.is_dropped for it in transport.connections] == [True, True, True, False]


class PutOffConnection(LocalConnection):
    """A connection to a hub that temporarily refuses new IDs."""

    async def frames(self) -> AsyncIterator[bytes]:
        yield b'{"type":"error","code":"rate_limited","message":"More than 1 a minute.","retry_after_ms":2}'
        raise Closed(4503, "More than 1 a minute.")


class PutOffTransport(LocalTransport):
    """Transport whose connections with these numbers (counted from 0) are refused temporarily."""

    def __init__(self, hub: Hub, put_off: set[int]) -> None:
        super().__init__(hub)
        self.tries: list[LocalConnection] = []
        self._put_off = put_off

    async def connect(self) -> LocalConnection:
        kind = PutOffConnection if len(self.tries) in self._put_off else LocalConnection
        self.tries.append(kind(self._hub))
        return self.tries[-1]


async def test_a_client_whose_registration_is_put_off_comes_again() -> None:
    async with Network.open() as network:
        transport = PutOffTransport(network.hub, {0, 1, 3})
        async with NetworkClient("bob", transport=transport) as client:
            assert len(transport.tries) == 3
            transport.tries[-1].end(1006, "the ledger was replaced, so everybody is new")
            async for event in client.events():
                if isinstance(event, Reconnected):
                    break
            assert len(transport.tries) == 5


class WeakConnection(LocalConnection):
    """A connection that the hub closes at each frame that contains a given word."""

    def send(self, data: bytes) -> None:
        if b"poison" in data:
            self.end(1011, "it failed on this frame")
        super().send(data)


class FarTransport(LocalTransport):
    """A transport that loses a connection at each message, ``losses`` times, as a bad network does."""

    def __init__(self, hub: Hub, losses: int) -> None:
        super().__init__(hub)
        self.losses = losses

    async def connect(self) -> LocalConnection:
        return FarConnection(self._hub, self)


class FarConnection(LocalConnection):
    def __init__(self, hub: Hub, transport: FarTransport) -> None:
        super().__init__(hub)
        self._transport = transport

    def send(self, data: bytes) -> None:
        if b"message_id" in data and self._transport.losses:
            self._transport.losses -= 1
            self.end(1011, "the last ping was not answered")
        super().send(data)


class WeakTransport(LocalTransport):
    async def connect(self) -> LocalConnection:
        return WeakConnection(self._hub)


async def pauses(client: NetworkClient) -> list[float]:
    """Return the delays before each reconnect, until the client stops trying."""
    return [event.delay_s async for event in client.events() if isinstance(event, Reconnecting)]


async def test_a_message_that_the_hub_would_not_take_is_refused_here_and_holds_nothing_up() -> None:
    token = make_token()
    async with (
        running_node(limits={"max_frame_bytes": 4096}) as node,
        NetworkClient("ann", node.url, token=token) as ann,
    ):
        with pytest.raises(TooLarge, match="allows 4096"):
            await ann.send("agent:ann", "x" * 4096)
        with pytest.raises(TooLarge):
            await ann.call("channels.post", {"name": "dev", "text": "x" * 4096})
        await ann.signal("delta", {"text": "x" * 4096}, to="broadcast")  # the hub may drop signals
        session = ann.welcome.session_id
        assert (await ann.send("agent:ann", "small")).seq > 0
        assert ann.welcome.session_id == session


async def test_a_long_reason_of_a_failure_is_cut_and_not_fatal_to_the_connection() -> None:
    token = make_token()
    async with (
        running_node(limits={"max_frame_bytes": 4096}) as node,
        NetworkClient("ann", node.url, token=token) as ann,
    ):
        bob = await node.agent("bob")
        await bob.send("agent:ann", "hi")
        async for delivery in ann.deliveries():
            await delivery.nack("x" * 100_000, retry_after_ms=1)
            if delivery.attempt == 2:
                break
        assert (await ann.call("network.info"))["head"] > 0


async def test_a_request_that_is_too_large_for_the_hub_that_came_back_is_refused() -> None:
    async with Network.open() as large, Network.open(limits=Limits(max_frame_bytes=1024)) as small:
        transport = LocalTransport(large.hub)
        async with NetworkClient("ann", transport=transport) as ann:
            connection = ann._link._wire
            assert isinstance(connection, LocalConnection)
            transport._hub = small.hub
            connection.end(1006, "lost")
            with pytest.raises(TooLarge):
                await ann.send("agent:ann", "x" * 2000)
            assert (await ann.send("agent:ann", "small")).seq > 0


async def test_a_request_for_which_the_hub_ends_three_connections_is_given_up_and_the_next_one_is_answered() -> None:
    async with Network.open() as network:
        async with NetworkClient("ann", transport=WeakTransport(network.hub), jitter=lambda: 0.0) as ann:
            waits = asyncio.create_task(pauses(ann))
            poison = asyncio.create_task(ann.send("agent:ann", "poison"))
            await asyncio.sleep(0)
            async with asyncio.timeout(10):
                stored = await ann.send("agent:ann", "good")
            with pytest.raises(InternalError, match="ended 3 connections"):
                await poison
            assert stored.seq > 0
        # Each delay doubles: a session that ended at once is no reason to retry faster.
        assert await waits == [0.05, 0.1, 0.2]


async def test_a_send_outlives_any_number_of_unanswered_pings() -> None:
    async with Network.open() as network:
        transport = FarTransport(network.hub, losses=4)
        async with NetworkClient("ann", transport=transport, jitter=lambda: 0.0) as ann, asyncio.timeout(10):
            assert (await ann.send("agent:ann", "far")).seq > 0
        assert transport.losses == 0


async def test_an_answer_larger_than_a_client_takes_fails_the_call_instead_of_being_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    welcome = {
        "type": "welcome", "server": "s", "network": {"name": "n", "epoch": "e"}, "agent_id": "ann", "kind": "agent",
        "role": "observer", "session_id": "s", "cursor": 0, "head": 0, "resume": "new",
    }  # fmt: skip
    asked: list[Any] = []

    async def answer(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(json.dumps(welcome))
        async for raw in socket:
            frame = json.loads(raw)
            if frame["type"] == "call":
                asked.append(frame["args"])
                value = "x" * frame["args"]["size"]
                await socket.send(json.dumps({"type": "result", "call_id": frame["call_id"], "value": value}))

    monkeypatch.setattr(transports, "MAX_FRAME_BYTES", 1000)
    async with serve_websockets(answer, "127.0.0.1", 0, subprotocols=[Subprotocol("roundelay.v1")]) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with NetworkClient("ann", f"ws://127.0.0.1:{port}/", token="a" * 43) as ann:
            with pytest.raises(TooLarge, match="answer"):
                await ann.call("network.history", {"size": 2000})
            assert await ann.call("network.history", {"size": 3}) == "xxx"
    assert asked == [{"size": 2000}, {"size": 3}]


async def test_a_network_that_was_closed_refuses_who_connects_and_ends_who_comes_back() -> None:
    async with Network.open() as network:
        lost = NetworkClient("bob", transport=LocalTransport(network.hub))
        await lost.connect()
        await network.hub.close()
        with pytest.raises(ConnectError, match="closed"):
            async with asyncio.timeout(5):
                await NetworkClient("ann", transport=LocalTransport(network.hub)).connect()
        with pytest.raises(ConnectError, match="closed"):
            async with asyncio.timeout(5):
                await lost.send("agent:bob", "hi")


async def test_what_is_delivered_from_a_history_that_is_gone_acknowledges_nothing_in_the_new_one() -> None:
    async with Network.open() as old, Network.open() as new:
        transport = LocalTransport(old.hub)
        async with NetworkClient("ann", transport=transport, jitter=lambda: 0.0) as ann:
            bob = await old.join("bob")
            stale_seqs = [(await bob.send("agent:ann", text)).seq for text in ("old 1", "old 2")]
            deliveries = ann.deliveries()
            stale = [await anext(deliveries), await anext(deliveries)]
            await new.join("bob")
            connection = ann._link._wire
            assert isinstance(connection, LocalConnection)
            transport._hub = new.hub
            connection.end(1006, "lost")
            async for event in ann.events():
                if isinstance(event, Reconnected):
                    break
            ben = await new.join("ben")
            fresh = [(await ben.send("agent:ann", text)).seq for text in ("new 1", "new 2")]
            assert set(fresh) & set(stale_seqs)
            again = [await anext(deliveries), await anext(deliveries)]
            assert [delivery.is_stale for delivery in stale + again] == [True, True, False, False]
            await stale[0].ack()
            await stale[1].nack("too late")
            status = await ben.call("network.message_status", {"seq": fresh[0]})
            assert status["recipients"][0]["state"] == "delivered"
            assert ann.cursor.seq < fresh[0]
            await again[0].ack()
            assert ann.cursor.seq == fresh[0]


async def test_ids_and_time_that_are_given_make_the_same_log_twice() -> None:
    async def export() -> list[bytes]:
        ids, times = iter(range(10**6)), iter(range(1, 10**6))
        async with Network.open(new_id=lambda: f"id-{next(ids)}", clock=lambda: next(times)) as network:
            ann, bob = await network.join("ann"), await network.join("bob")
            await ann.call("channels.create", {"name": "dev"})
            await ann.post("dev", "hello")
            await bob.send_text("ann", "hi")
            return [row.data for row in await network.hub.ledger.rows(0, 100)]

    assert await export() == await export()


async def test_a_card_too_large_for_any_frame_is_named() -> None:
    async with running_node() as node:
        client = NetworkClient("bob", node.url, token=make_token(), card={"description": "x" * 1_000_000})
        with pytest.raises(TooLarge, match="the card of bob has 1000018 bytes"):
            await client.connect()


async def test_more_reads_than_the_hub_takes_at_once_are_all_answered_and_hold_up_no_send() -> None:
    async with running_node(limits={"max_reads": 4}) as node, NetworkClient("ann", node.url, token=make_token()) as ann:
        ann_sends = asyncio.create_task(ann.send_text("ann", "between"))
        reads = [asyncio.create_task(ann.call("network.list_agents", {"limit": 1})) for _ in range(200)]
        given_up = asyncio.create_task(ann.call("network.info"))
        changes = [asyncio.create_task(ann.call("channels.create", {"name": f"c{number}"})) for number in range(20)]
        late = asyncio.create_task(ann.send_text("ann", "behind them"))
        await asyncio.sleep(0)
        given_up.cancel()
        found = await asyncio.gather(*reads)
        assert [len(value["agents"]) for value in found] == [1] * 200
        assert (await late).seq > (await ann_sends).seq
        await asyncio.gather(*changes)
        assert len((await ann.call("channels.list"))["channels"]) == 20


async def test_who_comes_in_a_crowd_comes_again_until_there_is_a_place() -> None:
    async with running_node(limits={"max_unauthenticated": 4}) as node:
        clients = [NetworkClient(f"guest-{number}", node.url, token=make_token()) for number in range(30)]
        try:
            await asyncio.gather(*(client.connect() for client in clients))
            operator = await node.person("operator")
            figures = await operator.call("network.status")
            assert figures["sessions"] == 31
            assert figures["made_room_total"] > 0
        finally:
            await asyncio.gather(*(client.close() for client in clients))
