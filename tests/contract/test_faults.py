"""Tests of agents that cannot work: docs/protocol/inbox.md and docs/protocol/operations-messages.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.app import serve
from roundelay.network.config import NodeConfig
from tests.support.node import Node, node_process, running_node
from tests.support.wire import WireSession


async def faults(session: WireSession) -> list[dict[str, Any]]:
    items = (await session.call("network.inbox"))["items"]
    return [it for it in items if it["kind"] == "fault"]


async def shown(session: WireSession, agent_id: str = "bot") -> dict[str, Any] | None:
    agents = (await session.call("network.list_agents"))["agents"]
    fault: dict[str, Any] | None = next(it for it in agents if it["agent_id"] == agent_id).get("fault")
    return fault


async def begin(bot: WireSession, by: WireSession, reaction: str) -> int:
    seq: int = (await by.send("agent:bot", reaction))["seq"]
    await bot.message(reaction)
    await bot.record(reaction, "started", {"trigger": seq}, record_id=f"{reaction}-0")
    return seq


async def fail(bot: WireSession, by: WireSession, reaction: str, failure: str, reason: str = "no") -> int:
    """Run a reaction whose model does not reply."""
    seq = await begin(bot, by, reaction)
    await bot.record(reaction, "model_failed", {"turn": 1, "failure": failure, "reason": reason}, record_id=reaction)
    end = {"status": "failed", "reason": reason, "turns": 1, "failure": failure}
    await bot.record(reaction, "finished", end, record_id=f"{reaction}-9")
    return seq


async def work(bot: WireSession, by: WireSession, reaction: str, turns: int = 1) -> None:
    await begin(bot, by, reaction)
    end = {"status": "finished", "reason": "", "turns": turns}
    await bot.record(reaction, "finished", end, record_id=f"{reaction}-9")


async def test_operators_are_told_of_a_broken_key_once_until_the_agent_works_again(node: Node) -> None:
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    tom = await node.invite(host, "tom")
    assert await faults(host) == []
    first = await fail(bot, tom, "r1", "unauthorized", "401: key sk-1 refused")
    assert (await host.expect("notice", kind="inbox"))["body"] == {}
    second = await fail(bot, tom, "r2", "unauthorized", "401: key sk-1 refused")
    [item] = await faults(host)
    assert (item["agent_id"], item["cause"], item["failure"], item["count"]) == ("bot", "model", "unauthorized", 2)
    assert (item["seq"], item["thread_id"], item["reason"]) == (second, "direct:bot~tom", "401: key sk-1 refused")
    assert first < second
    assert "Restart the node" in item["to_do"]
    assert item["text"].startswith("bot cannot answer: its model refuses the key (2 times)")

    assert await faults(tom) == []
    told = await shown(tom)
    assert told is not None
    assert (told["text"], told["count"]) == ("cannot answer: its model refuses the key (2 times)", 2)
    assert {"reason", "to_do"}.isdisjoint(told), "the words of a provider are for operators"

    await begin(bot, tom, "read")
    end = {"status": "finished", "reason": "read in reaction r2", "turns": 0}
    await bot.record("read", "finished", end, record_id="read-9")
    assert len(await faults(host)) == 1, "no model was asked"
    await work(bot, tom, "r3")
    assert (await faults(host), await shown(tom)) == ([], None)


@pytest.mark.parametrize(
    "failure", ["quota", "rate_limited", "not_found", "misconfigured", "rejected", "unreachable", "timeout", "server", "broken_reply"]
)  # fmt: skip
async def test_every_failure_of_a_model_says_what_to_do(node: Node, failure: str) -> None:
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    await fail(bot, host, "r1", failure)
    [item] = await faults(host)
    assert item["failure"] == failure
    assert item["to_do"]


async def test_a_failure_that_nobody_knows_fills_no_list_and_is_counted_with_the_others(node: Node) -> None:
    """An agent may write anything into its records, and everybody reads the list of agents."""
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    for number, failure in enumerate(["x" * 100_000, "\x1b[2J{agent_id}", "another"]):
        await fail(bot, host, f"r{number}", failure, "y" * 10_000)
    told = await shown(host)
    assert told is not None
    assert (told["cause"], told["count"], "failure" in told) == ("model", 3, False)
    assert told["text"] == "cannot answer: its model fails (3 times)"
    assert len(json.dumps(told)) < 1500
    [item] = await faults(host)
    assert item["text"].startswith("bot cannot answer: its model fails (3 times)")


@pytest.mark.parametrize("failure", ["budget", "content_filter", "context_too_long", "answer_refused"])
async def test_what_only_one_conversation_meets_is_no_fault(node: Node, failure: str) -> None:
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    await fail(bot, host, "r1", failure)
    assert await faults(host) == []
    await begin(bot, host, "r2")
    await bot.record("r2", "finished", {"status": "cancelled", "reason": "stopped by host"}, record_id="r2-9")
    assert await faults(host) == []


async def test_an_error_of_the_agents_own_code_is_a_fault(node: Node) -> None:
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    await begin(bot, host, "r1")
    await bot.record("r1", "finished", {"status": "failed", "reason": "KeyError: 'x'"}, record_id="r1-9")
    [item] = await faults(host)
    assert (item["cause"], item["reason"]) == ("error", "KeyError: 'x'")


async def test_a_dismissed_fault_comes_back_only_after_the_agent_worked(node: Node) -> None:
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    await fail(bot, host, "r1", "quota")
    await host.call("network.dismiss", {"kind": "fault", "agent_id": "bot"})
    assert await faults(host) == []
    await fail(bot, host, "r2", "quota")
    assert await faults(host) == []
    await work(bot, host, "r3")
    await fail(bot, host, "r4", "quota")
    assert len(await faults(host)) == 1
    wrong: list[dict[str, Any]] = [{"kind": "fault"}, {"kind": "fault", "seq": 1}, {"kind": "budget"}]
    for args in (*wrong, {"kind": "question", "agent_id": "bot"}):
        await host.call_refused("invalid_arguments", "network.dismiss", args)


async def test_given_up_messages_show_on_the_agent_and_wait_as_dead_letters(node: Node) -> None:
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    await host.send("agent:bot", "poison")
    for _ in range(5):
        seq = (await bot.delivery())["message"]["seq"]
        await bot.nack(seq, reason="it broke", retry_after_ms=1)
    await host.expect("notice", kind="dead_letter")
    fault = await shown(host)
    assert fault is not None
    assert (fault["cause"], fault["reason"]) == ("dead_letter", "it broke")
    assert [it["kind"] for it in (await host.call("network.inbox"))["items"]] == ["dead_letter"]


async def test_an_agent_lost_in_the_middle_of_a_reaction_waits_for_operators_until_it_is_back(node: Node) -> None:
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    await begin(bot, host, "r1")
    await bot.drop()
    await host.expect("notice", kind="inbox")
    [item] = await faults(host)
    assert (item["agent_id"], item["cause"]) == ("bot", "ended")
    await node.agent("bot", role="reactor")
    assert await faults(host) == []


async def test_an_ended_process_is_a_fault_of_an_agent_that_never_joined(tmp_path: Path) -> None:
    async with serve(NodeConfig(port=0, db=tmp_path / "it.db")) as served:
        node = Node(served.url, served.owner_token)
        host = await node.person("host")
        served.hub.record_process_end("desk", "exit code 1: no such module")
        await host.expect("notice", kind="inbox")
        [item] = await faults(host)
        assert (item["agent_id"], item["cause"], item["reason"]) == ("desk", "ended", "exit code 1: no such module")
        assert "roundelay agent reload desk" in item["to_do"]
        served.hub.record_process_end("desk", None)
        await host.expect("notice", kind="inbox")
        assert (await faults(host), await shown(host, "desk")) == ([], None)
        served.hub.record_process_end("host", "a person has no process")
        await host.send("agent:host", "stored after it")
        assert await faults(host) == []
        await node.close_sessions()


async def test_who_is_removed_has_no_fault_that_waits(node: Node) -> None:
    host, bot = await node.person("host"), await node.agent("bot", role="reactor")
    await fail(bot, host, "r1", "quota")
    await host.call("network.remove", {"agent_id": "bot"})
    assert await faults(host) == []


async def test_agents_are_told_whether_operators_hear_of_them() -> None:
    async with running_node() as node:
        bot = await node.agent("bot")
        assert (await bot.call("network.info"))["has_operators"] is True


async def test_a_fault_outlives_the_hub(tmp_path: Path) -> None:
    async with node_process(tmp_path / "it.db") as node:
        host, bot = await node.person("host"), await node.agent("bot", role="reactor")
        await fail(bot, host, "r1", "quota")
        await node.restart()
        host = await node.person("host")
        [item] = await faults(host)
        assert (item["agent_id"], item["failure"]) == ("bot", "quota")
