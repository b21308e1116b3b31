"""Tests of `network.log` and `network.status`, with which operators follow the network."""

from __future__ import annotations

from tests.support.node import Node
from tests.support.wire import get_http


async def test_the_log_shows_operators_every_message_in_order(node: Node) -> None:
    alice, bob, operator = await node.agent("alice"), await node.agent("bob"), await node.person("mia")
    sent = [(await alice.send("agent:bob", f"private {n}"))["seq"] for n in range(3)]
    sent.append((await bob.send("broadcast", "public"))["seq"])
    first = await operator.call("network.log", {"limit": 4})
    rest = await operator.call("network.log", {"after": first["next"]})
    assert [message["seq"] for message in (*first["messages"], *rest["messages"])] == sent
    assert rest["next"] == rest["head"] == sent[-1]
    await alice.call_refused("forbidden", "network.log")


async def test_the_log_waits_for_the_next_message(node: Node) -> None:
    alice, operator = await node.agent("alice"), await node.person("mia")
    head = (await operator.call("network.info"))["head"]
    args = {"after": head, "wait_ms": 20_000}
    await operator.send_frame({"type": "call", "call_id": "waiting", "op": "network.log", "args": args})
    stored = await alice.send("broadcast", "at last")
    answer = await operator.answer("waiting")
    assert [message["seq"] for message in answer["value"]["messages"]] == [stored["seq"]]


async def test_status_and_metrics_tell_the_same_figures(node: Node) -> None:
    alice, operator = await node.agent("alice"), await node.person("mia")
    await alice.send("agent:mia", "hello")
    await operator.message("hello")
    status = await operator.call("network.status")
    _, text = await get_http(node.url, "/metrics")
    shown = {
        line.split()[0].removeprefix("roundelay_"): float(line.split()[1])
        for line in text.splitlines()
        if line[0] != "#"
    }
    assert set(shown) == set(status)
    assert shown["messages_total"] == status["messages_total"] == 1
    assert status["unacked_deliveries"] == 1
    assert status["rows_total"] >= 3  # two registrations and a message
    await alice.call_refused("forbidden", "network.status")
