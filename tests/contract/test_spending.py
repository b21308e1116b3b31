"""Tests of model usage, which the hub sums from records: by root, reaction, agent and day, and with access rights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.model import Usage
from roundelay.agents.models.tokens import Prices
from tests.support.node import node_process, running_node
from tests.support.wire import WireSession, expect_error


def used(calls: int, prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> dict[str, int]:
    return {
        "calls": calls, "prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached,
        "reasoning_tokens": reasoning,
    }  # fmt: skip


def tokens(prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> dict[str, int]:
    return {name: count for name, count in used(0, prompt, completion, cached, reasoning).items() if name != "calls"}


async def begin(agent: WireSession, reaction: str, trigger: int) -> None:
    await agent.record(reaction, "started", {"trigger": trigger, "manifest": [trigger]})


async def reply(agent: WireSession, reaction: str, turn: int, usage: dict[str, int], **fields: Any) -> None:
    names = fields.pop("tools", [])
    calls = [{"id": str(place), "name": name, "arguments": "{}"} for place, name in enumerate(names)]
    written = {"text": None, "tool_calls": calls, "usage": usage, "finish_reason": "stop", "model": "m1", **fields}
    await agent.record(
        reaction, "model_reply", {"turn": turn, "agent": "ann", "reply": written}, record_id=f"{reaction}-{turn}"
    )


async def test_replies_are_added_up_for_the_reaction_the_root_and_the_day() -> None:
    async with running_node() as node:
        mia, ann, bob = await node.person("mia"), await node.agent("ann", role="reactor"), await node.agent("bob")
        root = (await mia.send("agent:ann", "hello"))["seq"]
        await begin(ann, "r1", root)
        await reply(ann, "r1", 1, tokens(100, 10, 40, 5))
        await reply(ann, "r1", 1, tokens(100, 10, 40, 5))  # a repeat
        await reply(ann, "r1", 2, tokens(50, 5), model="m2")
        asked = (await ann.send("agent:bob", "and you?", cause=root))["seq"]
        await begin(bob, "r2", asked)
        await reply(bob, "r2", 1, tokens(7, 3))
        of_ann = await ann.call("network.spent", {"seq": root, "reaction": "r1"})
        assert (of_ann["root"], of_ann["resumed"]) == (root, 0)
        assert of_ann["of_root"] == {"m1": used(2, 107, 13, 40, 5), "m2": used(1, 50, 5)}
        assert of_ann["of_reaction"] == of_ann["of_day"] == {"m1": used(1, 100, 10, 40, 5), "m2": used(1, 50, 5)}
        of_bob = await bob.call("network.spent", {"seq": asked, "reaction": "r1"})  # reaction r1 is not bob's
        assert of_bob["of_root"] == of_ann["of_root"]
        assert (of_bob["of_reaction"], of_bob["of_day"]) == ({}, {"m1": used(1, 7, 3)})
        await bob.call_refused("unknown_message", "network.spent", {"seq": root})


async def test_the_end_of_a_reaction_adds_what_no_reply_told() -> None:
    async with running_node() as node:
        mia, ann = await node.person("mia"), await node.agent("ann", role="reactor")
        root = (await mia.send("agent:ann", "hello"))["seq"]
        await begin(ann, "r1", root)
        await reply(ann, "r1", 1, tokens(100, 10))
        await ann.record("r1", "review", {"turn": 1, "answer": "x", "usage": tokens(20, 2)})
        await ann.record("r1", "finished", {"status": "finished", "usage": tokens(150, 12)})
        spent = await mia.call("network.spent", {"seq": root})
        assert spent["of_root"] == {"m1": used(1, 100, 10), "": used(0, 50, 2)}
        await reply(ann, "r1", 2, tokens(9, 9))  # the reaction has ended
        assert (await mia.call("network.spent", {"seq": root}))["of_root"] == spent["of_root"]


async def test_the_sums_outlive_the_hub(tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db") as node:
        mia, ann = await node.person("mia"), await node.agent("ann", role="reactor")
        root = (await mia.send("agent:ann", "hello"))["seq"]
        await begin(ann, "r1", root)
        await reply(ann, "r1", 1, tokens(100, 10))
        before = await ann.call("network.spent", {"seq": root, "reaction": "r1"})
        await node.kill9()
        await node.restart()
        again = await node.agent("ann", role="reactor")
        assert await again.call("network.spent", {"seq": root, "reaction": "r1"}) == before
        assert before["of_day"] == {"m1": used(1, 100, 10)}


async def test_a_body_of_another_shape_counts_nothing_and_is_kept() -> None:
    async with running_node() as node:
        mia, ann = await node.person("mia"), await node.agent("ann", role="reactor")
        root = (await mia.send("agent:ann", "hello"))["seq"]
        await begin(ann, "r1", root)
        for place, body in enumerate(({"reply": 3}, {"reply": {"usage": {"prompt_tokens": -5}}}, {}, {"reply": {}})):
            await ann.record("r1", "model_reply", body, record_id=f"odd{place}")
        # The last record is a call.
        assert (await ann.call("network.spent", {"seq": root}))["of_root"] == {"": used(1, 0, 0)}
        kinds = [it["kind"] for it in (await ann.call("network.records", {"reaction": "r1"}))["records"]]
        assert kinds == ["started", *["model_reply"] * 4]


async def test_a_sum_names_so_many_models_and_no_more() -> None:
    async with running_node() as node:
        mia, ann = await node.person("mia"), await node.agent("ann", role="reactor")
        root = (await mia.send("agent:ann", "hello"))["seq"]
        await begin(ann, "r1", root)
        for turn in range(1, 21):
            await reply(ann, "r1", turn, tokens(1, 0), model=f"m{turn}")
        of_root = (await ann.call("network.spent", {"seq": root}))["of_root"]
        assert len(of_root) == 17
        assert of_root[""] == used(4, 4, 0)


async def test_usage_lists_the_calls_of_an_agent_page_by_page_without_texts() -> None:
    async with running_node() as node:
        mia, ann, bob = await node.person("mia"), await node.agent("ann", role="reactor"), await node.agent("bob")
        root = (await mia.send("agent:ann", "hello"))["seq"]
        await begin(ann, "r1", root)
        for turn in range(1, 6):
            await reply(ann, "r1", turn, tokens(turn, 1), text="a secret", tools=["look", "finish"])
        await ann.record("r1", "finished", {"status": "finished", "usage": tokens(15, 5)})
        found: list[dict[str, Any]] = []
        while True:
            page = await ann.call("network.usage", {"after": found[-1]["seq"] if found else 0, "limit": 2})
            found += page["calls"]
            if not page["has_more"]:
                break
        assert [(it["kind"], it["turn"], it["usage"]["prompt_tokens"]) for it in found] == [
            *(("model_reply", turn, turn) for turn in range(1, 6)), ("finished", None, 15),
        ]  # fmt: skip
        assert (found[0]["model"], found[0]["agent"], found[0]["tools"]) == ("m1", "ann", ["look", "finish"])
        assert page["reactions"] == {"r1": {"trigger": root, "thread_id": "direct:ann~mia", "root": root}}
        assert "secret" not in str(found)
        await bob.call_refused("forbidden", "network.usage", {"agent_id": "ann"})
        assert (await bob.call("network.usage"))["calls"] == []
        first = await mia.call("network.usage")  # an operator sees all calls, page by page
        assert (first["agent_id"], len(first["calls"]), first["next_agent"]) == ("ann", 6, "bob")
        then = await mia.call("network.usage", {"agent_id": first["next_agent"]})
        assert (then["calls"], then["next_agent"]) == ([], None)


async def test_a_spent_budget_is_told_to_the_threads_readers() -> None:
    async with running_node() as node:
        mia, ann, bob = await node.person("mia"), await node.agent("ann", role="reactor"), await node.agent("bob")
        root = (await mia.send("agent:ann", "hello"))["seq"]
        await begin(ann, "r1", root)
        await ann.record("r1", "model_failed", {"turn": 1, "failure": "server", "reason": "down"}, record_id="f1")
        await ann.record("r1", "model_failed", {"turn": 2, "failure": "budget", "reason": "all spent"}, record_id="f2")
        notice = await mia.expect("notice", kind="budget_exhausted")
        assert notice["thread_id"] == "direct:ann~mia"
        assert notice["body"] == {
            "root": root, "seq": root, "agent_id": "ann", "reaction": "r1", "reason": "all spent",
        }  # fmt: skip
        await bob.settle()
        assert [it for it in bob.unread if it["type"] == "notice"] == []


async def test_resuming_a_root_is_counted_for_its_token_budget() -> None:
    async with running_node() as node:
        mia, ann = await node.person("mia"), await node.agent("ann")
        root = (await mia.send("agent:ann", "hello"))["seq"]
        await mia.call("network.resume_root", {"root": root})
        assert (await ann.call("network.spent", {"seq": root}))["resumed"] == 1
        expect_error(await ann.submit_call("network.resume_root", {"root": root}), "forbidden")


async def test_costs_are_answered_by_the_prices_that_the_node_knows() -> None:
    """Prices equal those of `roundelay cost`. The call needs no right, because it shows no usage of others."""
    pytest.importorskip("genai_prices")
    async with running_node() as node:
        bob = await node.agent("bob")
        uses = [
            {"model": "gpt-4o-mini", "prompt_tokens": 1000, "completion_tokens": 100},
            {"model": "gpt-4o-mini", "prompt_tokens": 1000, "completion_tokens": 100, "cached_tokens": 1000},
            {"model": "no-such-model-at-all", "prompt_tokens": 1000},
            {"model": "scripted", "prompt_tokens": 5},
        ]
        answer = await bob.call("network.costs", {"uses": uses})
        assert answer["has_prices"] is True
        expected = [Prices().cost("gpt-4o-mini", Usage(1000, 100, cached)) for cached in (0, 1000)]
        assert answer["usd"] == [*(float(it or 0) for it in expected), None, 0]
        assert 0 < answer["usd"][1] < answer["usd"][0]
        assert (await bob.call("network.costs", {"uses": []}))["usd"] == []
        for wrong in (
            [{"model": "", "prompt_tokens": 1}],
            [{"model": "m" * 257}],
            [{"model": "m", "prompt_tokens": -1}],
            [{"model": "m", "cached_tokens": 2**53}],
            [{"prompt_tokens": 1}],
            [{"model": "m", "tokens": 1}],
            [{"model": "m"}] * 501,
        ):
            await bob.call_refused("invalid_arguments", "network.costs", {"uses": wrong})


async def test_a_node_without_a_price_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)  # the import fails as if the package were not installed
    async with running_node() as node:
        bob = await node.agent("bob")
        uses = [{"model": "gpt-4o-mini", "prompt_tokens": 1000}, {"model": "rules", "prompt_tokens": 5}]
        assert await bob.call("network.costs", {"uses": uses}) == {"usd": [None, 0], "has_prices": False}
