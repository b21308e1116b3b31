"""Tests of thread titles: the hub's rule, which the page implements too, shows nobody words that they may not read."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.titles import name_place, write_title
from tests.support.page_modules import run_module


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


async def titles(client: NetworkClient) -> dict[str, str]:
    listed = (await client.call("network.list_threads", {}))["threads"]
    return {it["thread_id"]: it["title"] for it in listed}


async def test_a_thread_is_called_by_its_place_and_its_first_words(network: Network) -> None:
    mia, ann = [await network.join(it, kind="human") for it in ("mia", "ann")]
    desk = await network.join("desk")
    await mia.send_text("desk", "Can you refund\n  order 17?")
    await desk.send_text("mia", "I can")
    await mia.send("agent:desk", {"text": "word " * 40, "files": []}, conversation="c-1")
    await mia.send("agent:ann", "Tea?", conversation="plan")
    await mia.send_text("ann", "Hello")
    await mia.call("channels.create", {"name": "wood"})
    await ann.call("channels.join", {"name": "wood"})
    axe = await mia.post("wood", "Who has an axe?")
    await ann.send("channel:wood", "I have", reply_to=axe.seq)
    assert await titles(mia) == {
        "direct:desk~mia": "desk · Can you refund order 17?",
        "direct:desk~mia:c-1": f"desk · {' '.join(['word'] * 12)}…",
        "direct:ann~mia": "ann",
        "direct:ann~mia:plan": "ann · Tea?",
        "channel:wood": "#wood",
        f"thread:{axe.seq}": "#wood · Who has an axe?",
    }
    assert (await titles(desk))["direct:desk~mia"] == "mia · Can you refund order 17?"
    await mia.call("network.mark", {"thread_id": "direct:desk~mia", "title": "My refund"})
    await mia.call("network.mark", {"thread_id": "direct:desk~mia:c-1", "title": "Words of Desk"})
    named = await titles(mia)
    assert (named["direct:desk~mia"], named["direct:desk~mia:c-1"]) == ("desk · My refund", "Words of Desk")
    assert (await titles(desk))["direct:desk~mia"] == "mia · Can you refund order 17?"
    await mia.call("network.mark", {"thread_id": "direct:desk~mia", "title": ""})
    assert (await titles(mia))["direct:desk~mia"] == "desk · Can you refund order 17?"


async def test_a_request_for_approval_is_named_by_its_tool(network: Network) -> None:
    mia, desk = await network.join("mia", kind="human"), await network.join("desk")
    text = 'May I call refund with {"number": "12"}?'
    await desk.send_text("mia", text, metadata={"approval": {"tool": "refund", "arguments": '{"number": "12"}'}})
    listed = (await mia.call("network.list_threads", {}))["threads"]
    assert [(it["title"], it["last"]["text"]) for it in listed] == [
        ("desk · Approval request: refund", "Approval request: refund")
    ]
    for approval in ("refund", {"tool": 7}, {"tool": ""}, None):
        await desk.send_text("mia", text, metadata={"approval": approval})
        assert (await mia.call("network.list_threads", {}))["threads"][0]["last"]["text"] == text
    await mia.send_text("desk", "I am no agent", metadata={"approval": {"tool": "refund"}})
    assert (await mia.call("network.list_threads", {}))["threads"][0]["last"]["text"] == "I am no agent"


async def test_words_that_one_may_not_read_are_in_no_title(network: Network) -> None:
    mia, late = await network.join("mia"), await network.join("late")  # agents, and therefore no operators
    await mia.call("channels.create", {"name": "wood"})
    root = await mia.post("wood", "The secret")
    await late.call("channels.join", {"name": "wood"})
    await mia.send("channel:wood", "More of it", reply_to=root.seq)
    await late.send("channel:wood", "Hello")
    assert await titles(late) == {"channel:wood": "#wood"}
    await mia.call("channels.set_history", {"name": "wood", "history": "members"})
    assert (await titles(late))[f"thread:{root.seq}"] == "#wood · The secret"


CASES = [
    ("direct:desk~mia", "mia", "Can you refund order 17?", ""),
    ("direct:desk~mia:c-1", "mia", "x" * 80, ""),
    ("direct:mia~mia", "mia", "  to\tmyself, " * 9, ""),
    ("direct:ann~desk", "mia", "", "Ours"),
    ("channel:dev", "mia", "", "About DEV: #dev"),
    ("broadcast", "mia", "", ""),
    ("mod:network~mia", "mia", "", ""),
    ("mod:tasks~mia", "mia", "\u00e4\U0001f600 " * 40, ""),
    ("thread:17", "mia", "a\u2028b\x1fc", ""),
]


async def test_the_page_follows_the_same_rule() -> None:
    here = [write_title(name_place(thread_id, me), words, own) for thread_id, me, words, own in CASES]
    code = """(cases) => cases.map(([id, me, words, own]) => writeTitle(namePlace(id, me), words, own))"""
    there = await run_module('import { namePlace, writeTitle } from "#core/text.js";', code, [list(it) for it in CASES])
    assert there == here
