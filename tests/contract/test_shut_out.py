"""Tests of revoked tokens and removed participants: after the answer, nothing of their sessions is stored, including
frames that waited.

The rule is in docs/protocol/identity.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.support.node import Node, running_node
from tests.support.stepped_hub import SteppedHub, StubConnection
from tests.support.wire import WireSession

OPERATIONS = ["network.revoke_token", "network.remove"]
LIMITS = {"root_messages_per_s": 1_000_000, "sends_per_s": 1_000_000, "max_pending_bytes": 64 << 20}


async def all_rows(operator: WireSession) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    after = 0
    while page := await operator.call("network.rows", {"after": after, "limit": 500}):
        rows += [json.loads(row) for row in page["rows"]]
        if page["next"] >= page["head"]:
            return rows
        after = page["next"]
    return rows


async def flood(session: WireSession, taken: asyncio.Event) -> None:
    """Send as fast as the connection allows, until the hub has closed it."""
    with suppress(ConnectionClosed):
        for number in range(200_000):
            frames = [
                {"type": "send", "message_id": f"m{number}", "to": "agent:bob", "content": number},
                {"type": "record", "record_id": f"r{number}", "reaction": "r", "kind": "note", "body": {}},
                {"type": "call", "call_id": f"c{number}", "op": "channels.set", "args": {"name": "den", "topic": str(number)}},
            ]  # fmt: skip
            for frame in frames:
                await session.send_frame(frame)
            if number == 300:
                taken.set()


@pytest.mark.parametrize("op", OPERATIONS)
async def test_of_a_client_that_goes_on_sending_nothing_is_stored_after_the_answer(op: str) -> None:
    async with running_node(limits=LIMITS) as node:
        operator, eve = await node.person("operator"), await node.agent("eve")
        await node.agent("bob")
        await eve.call("channels.create", {"name": "den"})
        taken = asyncio.Event()
        flooding = asyncio.create_task(flood(eve, taken))
        hearing = asyncio.create_task(eve.closed())
        await taken.wait()
        await operator.call(op, {"agent_id": "eve"})
        last = (await operator.send("agent:bob", "after the answer"))["seq"]
        assert await hearing == 4403
        flooding.cancel()
        await operator.settle()
        rows = await all_rows(operator)
        event = {"network.revoke_token": "token", "network.remove": "removed"}[op]
        [shut_out] = [row["seq"] for row in rows if row["type"] == event and "eve" in json.dumps(row["data"])]
        of_eve = [row["seq"] for row in rows if row["actor"] == "eve"]
        assert of_eve
        assert max(of_eve) < shut_out < last


@pytest.fixture
def hub() -> Iterator[SteppedHub]:
    stepped = SteppedHub({"root_messages_per_s": 100_000})
    yield stepped
    stepped.close()


class Visitor:
    """A session of the stepped hub. The hub stores its frames only when it steps."""

    def __init__(self, hub: SteppedHub, agent_id: str, kind: str = "agent", **hello: object) -> None:
        self.hub = hub
        self.connection, self.session = hub.connect()
        self.say(type="hello", protocol=1, agent_id=agent_id, kind=kind, **hello)

    def say(self, **frame: object) -> None:
        self.hub.receive(self.session, frame)

    def call(self, op: str, call_id: str, **args: object) -> None:
        self.say(type="call", call_id=call_id, op=op, args=args)

    def heard(self, type_: str) -> list[dict[str, Any]]:
        return [frame for frame in take(self.connection) if frame["type"] == type_]


def take(connection: StubConnection) -> list[dict[str, Any]]:
    return connection.take_frames()


def sent(visitor: Visitor, text: str) -> int:
    visitor.say(type="send", message_id=text, to="agent:eve", content=text)
    visitor.hub.loop.step()
    return int(visitor.heard("stored")[-1]["seq"])


def shut_out(hub: SteppedHub, operator: Visitor, op: str) -> None:
    """Send the request without a step, so that later frames wait in the same batch."""
    if op == "network.revoke_token":
        digest = hashlib.sha256(b"eves").hexdigest()
        operator.call("network.create_token", "made", agent_id="eve", kind="agent", token_hash=digest)
        hub.loop.step()
    operator.call(op, "out", agent_id="eve")


def rows_of(hub: SteppedHub, agent_id: str, since: int) -> list[str]:
    rows = hub.run(hub.ledger.rows(since, 500, max_bytes=1 << 20))
    return [row.type for row in rows if row.actor == agent_id]


@pytest.mark.parametrize("op", OPERATIONS)
def test_what_waits_in_the_batch_behind_it_is_not_stored(hub: SteppedHub, op: str) -> None:
    operator, eve = Visitor(hub, "operator", "human"), Visitor(hub, "eve", role="reactor")
    hub.loop.step()
    hard = sent(operator, "hard")
    shut_out(hub, operator, op)
    head = hub.hub.state.head
    eve.say(type="send", message_id="late", to="agent:operator", content="late")
    eve.say(type="record", record_id="late", reaction="r", kind="started", body={"trigger": hard})
    eve.call("channels.create", "late", name="late")
    eve.say(type="nack", seq=hard, reason="late")
    hub.loop.step(30)
    assert eve.connection.closed == 4403
    assert rows_of(hub, "eve", head) == []
    operator.heard("")
    operator.call("network.open_reactions", "open")
    operator.call("channels.list", "channels")
    hub.loop.step()
    values = {frame["call_id"]: frame["value"] for frame in operator.heard("result")}
    assert (values["open"]["reactions"], values["channels"]["channels"]) == ([], [])


def test_what_followed_a_hello_on_its_way_is_not_stored(hub: SteppedHub) -> None:
    operator, eve = Visitor(hub, "operator", "human"), Visitor(hub, "eve")
    hub.loop.step()
    late = Visitor(hub, "eve")
    late.say(type="send", message_id="late", to="agent:operator", content="late")
    head = hub.hub.state.head
    shut_out(hub, operator, "network.remove")
    hub.loop.step(1)
    assert (eve.connection.closed, late.connection.closed) == (4403, 4403)
    assert rows_of(hub, "eve", head) == []


def test_a_refusal_that_does_not_count_leaves_the_message_to_the_next_token(hub: SteppedHub) -> None:
    operator, eve = Visitor(hub, "operator", "human"), Visitor(hub, "eve")
    hub.loop.step()
    hard = sent(operator, "hard")
    shut_out(hub, operator, "network.revoke_token")
    eve.say(type="nack", seq=hard, reason="late", retry_after_ms=1)
    hub.loop.step(30)
    assert operator.heard("notice") == []
    back = Visitor(hub, "eve")
    hub.loop.step(1)
    [delivery] = back.heard("deliver")
    assert (delivery["message"]["seq"], delivery["attempt"]) == (hard, 1)
    back.say(type="send", message_id="back", to="agent:operator", content="back")
    hub.loop.step(1)
    assert [frame["message_id"] for frame in back.heard("stored")] == ["back"]


async def test_a_session_with_the_next_token_is_stored_as_ever(node: Node) -> None:
    operator, eve = await node.person("operator"), await node.agent("eve")
    await operator.call("network.revoke_token", {"agent_id": "eve"})
    assert await eve.closed() == 4403
    back = await node.invite(operator, "eve", kind="agent")
    await back.send("agent:operator", "back")
