"""Tests that a reaction's reads from the ledger do not grow with the past of its person, its agent or an asked agent."""

from __future__ import annotations

from collections import Counter

from roundelay.agents.models.model import ModelReply, ModelRequest, ToolCall
from roundelay.agents.models.scripted import say
from roundelay.app import Network
from roundelay.network.config import Limits
from tests.support.agents import Person, make_runner, running
from tests.support.counting_ledger import CountingLedger
from tests.support.counts import Note

LIMITS = Limits(root_messages_per_s=1_000_000, sends_per_s=1_000_000)


def reply(request: ModelRequest) -> ModelReply:
    if request.agent_id == "desk" and request.turn == 1 and "ask bob" in request.prompt:
        return ModelReply(None, (ToolCall("c1", "ask", '{"agent_ids": ["bob"], "text": "What is new?"}'),))
    return say("Nothing.")


async def make_past(network: Network, sender: str, recipient: str, count: int, *, apart: bool) -> None:
    """Store messages that the recipient has handled, each in its own conversation or all in one thread."""
    kind = "human" if sender == "zoe" else "agent"
    async with await network.join(sender, kind=kind) as said, await network.join(recipient) as heard:
        deliveries = heard.deliveries()
        for number in range(count):
            await said.send_text(recipient, "Hello", conversation=f"past{number}" if apart else None)
        for _ in range(count):
            await (await anext(deliveries)).ack()


async def count_reads(past: int) -> dict[str, Counter[str]]:
    """Return the reads of reactions after this many conversations: in a new one, in the main thread, and with a
    question.
    """
    read: dict[str, Counter[str]] = {}
    async with Network.open(limits=LIMITS) as network:
        await make_past(network, "zoe", "desk", past, apart=True)
        await make_past(network, "desk", "bob", past, apart=False)
        async with running(network, make_runner("desk", reply), make_runner("bob", reply)):
            zoe = await Person.join(network, "zoe")
            for name, text, conversation in (
                ("new", "Anything?", "new"),
                ("main", "Anything?", None),
                ("asking", "ask bob", "asking"),
            ):
                for number in range(2):  # the data that the first one has read is in memory
                    counting = CountingLedger(network.hub.view.ledger)
                    network.hub.view.ledger = counting  # type: ignore[assignment]
                    await zoe.client.send_text("desk", text, conversation=conversation and f"{conversation}{number}")
                    await zoe.hear()
                    network.hub.view.ledger = counting._ledger
                read[name] = counting.counts
    return read


async def test_what_a_reaction_reads_is_the_same_after_thousands_of_conversations(note: Note) -> None:
    one, hundred, thousand = [await count_reads(past) for past in (1, 100, 1000)]
    assert thousand == hundred
    assert one["new"] == thousand["new"]
    assert one["asking"]["calls"] == thousand["asking"]["calls"]
    assert one["asking"]["rows"] == thousand["asking"]["rows"], "a worker reads no earlier tasks"
    # The main thread lists other threads, at most eight of them.
    assert thousand["main"]["calls"] - one["main"]["calls"] <= 2
    assert thousand["main"]["rows"] - one["main"]["rows"] <= 2 * 8
    note(**{f"{name} {kind}": count for name, counts in thousand.items() for kind, count in counts.items()})
