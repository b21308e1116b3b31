"""Tests of lost connections and lost processes: open reactions lose as few attempts as the hub can prove.
docs/protocol/delivery.md.
"""

from __future__ import annotations

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession

FIVE = 5


class Bot:
    """An agent's successive processes, and the reactions in their records."""

    def __init__(self, node: Node, alice: WireSession) -> None:
        self.node = node
        self.alice = alice
        self.session: WireSession
        self.triggers: dict[str, int] = {}

    async def come(self, instance: str | None) -> list[str]:
        """Join as a process. Return the open reactions that its welcome lists."""
        named = {} if instance is None else {"instance": instance}
        self.session = await self.node.agent("bot", role="reactor", **named)
        return [opened["reaction"] for opened in self.session.welcome["open_reactions"]]

    async def drop(self) -> None:
        await self.session.drop()
        await self.alice.expect("presence", agent_id="bot", state="offline")

    async def begin(self, reaction: str) -> None:
        self.triggers[reaction] = (await self.alice.send("agent:bot", reaction))["seq"]
        await self.session.message(reaction)
        await self.write(reaction, "started")

    async def write(self, reaction: str, kind: str, turn: int = 1, call: int = 0, path: str = "") -> None:
        """Write a record. A second call with the same arguments is a repeat."""
        body: dict[str, object] = {"trigger": self.triggers[reaction]} if kind == "started" else {}
        if kind in ("tool_started", "tool_result", "waiting", "model_reply"):
            body = {"turn": turn, "call": call, **({"path": path} if path else {})}
        await self.session.record(
            reaction, kind, body, record_id=f"{reaction} {kind} {path} {turn}.{call}".replace(" ", "-")
        )

    async def attempts(self, reaction: str) -> tuple[str, int]:
        status = await self.alice.call("network.message_status", {"seq": self.triggers[reaction]})
        (recipient,) = status["recipients"]
        return recipient["state"], recipient["attempts"]

    async def letters(self) -> list[int]:
        return [it["seq"] for it in (await self.session.call("network.dead_letters"))["dead_letters"]]


@pytest.fixture
async def bot(node: Node) -> Bot:
    alice = await node.agent("alice")
    await alice.call("network.watch", {"presence": True})
    return Bot(node, alice)


async def test_lost_connections_of_a_process_that_comes_back_are_no_attempts(bot: Bot) -> None:
    await bot.come("one")
    await bot.begin("long")
    for _ in range(FIVE + 1):
        await bot.drop()
        assert await bot.come("one") == ["long"]
    assert await bot.attempts("long") == ("in_prompt", 1)
    await bot.drop()
    await bot.come("two")  # that process is lost
    assert await bot.attempts("long") == ("in_prompt", 2)


async def test_a_connection_lost_and_back_wipes_no_loss_of_a_process(bot: Bot) -> None:
    """The same process reconnects, and then another one joins. The count continues."""
    await bot.come("one")
    await bot.begin("long")
    for number in range(2, FIVE + 1):
        await bot.drop()
        await bot.come(f"life {number}")
        await bot.write("long", "started")
        await bot.drop()
        await bot.come(f"life {number}")
    assert await bot.attempts("long") == ("in_prompt", FIVE)
    await bot.drop()
    assert await bot.come("the last") == []
    assert await bot.attempts("long") == ("dead", FIVE)


async def test_a_kill_counts_for_what_was_at_work_and_not_for_what_waited(bot: Bot) -> None:
    await bot.come("life 0")
    for reaction in ("poison", "asking", "inside", "queued"):
        await bot.begin(reaction)
    for life in range(FIVE):
        if life:
            for reaction in (
                "poison",
                "asking",
                "inside",
            ):  # the process resumes all reactions; `queued` waits for its turn
                await bot.write(reaction, "started")
        await bot.write("poison", "tool_started")
        await bot.write("poison", "tool_started", call=1)
        await bot.write("poison", "waiting", call=1)  # runs in parallel with the call that kills the process
        await bot.write("asking", "tool_started")
        await bot.write("asking", "waiting")
        await bot.write("inside", "tool_started")  # an inner agent in this call waits in its own call
        await bot.write("inside", "tool_started", turn=2, path="1.0")
        await bot.write("inside", "waiting", turn=2, path="1.0")
        await bot.drop()
        await bot.come(f"life {life + 1}")
    assert await bot.attempts("poison") == ("dead", FIVE)
    assert await bot.attempts("asking") == ("in_prompt", 1)
    assert await bot.attempts("inside") == ("in_prompt", 1)
    # The agent's model was called when the first process was lost.
    assert await bot.attempts("queued") == ("in_prompt", 2)
    assert await bot.letters() == [bot.triggers["poison"]]


async def test_a_wait_that_is_over_protects_from_nothing(bot: Bot) -> None:
    await bot.come("life 0")
    await bot.begin("asking")
    await bot.write("asking", "tool_started")
    await bot.write("asking", "waiting")
    await bot.write("asking", "tool_result")
    for life in range(FIVE):
        await bot.drop()
        await bot.come(f"life {life + 1}")
        if life < FIVE - 1:
            await bot.write("asking", "started")
    assert await bot.attempts("asking") == ("dead", FIVE)


async def test_who_dies_on_the_way_back_to_a_wait_is_at_work(bot: Bot) -> None:
    await bot.come("life 0")
    await bot.begin("asking")
    await bot.write("asking", "tool_started")
    await bot.write("asking", "waiting")
    for life in range(FIVE + 1):  # the first process only waited
        await bot.drop()
        await bot.come(f"life {life + 1}")
        if life < FIVE:
            await bot.write("asking", "started")
    assert await bot.attempts("asking") == ("dead", FIVE)


@pytest.mark.parametrize("kind", ["model_reply", "tool_result"])
async def test_progress_clears_the_count(bot: Bot, kind: str) -> None:
    await bot.come("life 0")
    await bot.begin("long")
    for life in range(2 * FIVE):
        if life == FIVE - 1:
            assert await bot.attempts("long") == ("in_prompt", FIVE)
            await bot.write("long", kind)
            assert await bot.attempts("long") == ("in_prompt", 1)
        if life:
            await bot.write("long", "started")
        if life == 2 * FIVE - 2:
            assert await bot.attempts("long") == ("in_prompt", FIVE)
        await bot.drop()
        await bot.come(f"life {life + 1}")
    assert (await bot.attempts("long"))[0] == "dead"  # the reaction was lost for the fifth time at the same point


async def test_a_letter_is_taken_back_when_its_reaction_ends_after_all_and_each_is_told_once(bot: Bot) -> None:
    operator = await bot.node.person("mia")
    await bot.come(None)  # a process without an instance ID, so nobody knows that it is alive
    await bot.begin("long")
    for _ in range(FIVE):
        await bot.drop()
        await bot.come(None)
    seq = bot.triggers["long"]
    assert await bot.letters() == [seq]
    told = {"seq": seq, "agent_id": "bot", "attempts": FIVE}
    assert (await bot.alice.expect("notice", kind="dead_letter"))["body"] == told
    for session in (operator, bot.session):
        notice = await session.expect("notice", kind="dead_letter")
        assert notice["body"] == told | {"reason": notice["body"]["reason"]}
    await bot.write("long", "finished")
    assert await bot.letters() == []
    for session in (bot.alice, operator, bot.session):
        withdrawn = await session.expect("notice", kind="dead_letter_withdrawn")
        assert withdrawn["body"] == {"seq": seq, "agent_id": "bot", "reaction": "long"}
    assert await bot.attempts("long") == ("in_prompt", FIVE)
    await bot.write("long", "finished")  # the repeat has no further effect
    for session in (bot.alice, operator, bot.session):
        await session.call("network.info")
        assert {frame["kind"] for frame in session.unread if frame["type"] == "notice"} <= {"inbox"}


async def test_a_letter_that_an_operator_took_is_not_taken_back_again(bot: Bot) -> None:
    operator = await bot.node.person("mia")
    await bot.come(None)
    await bot.begin("long")
    for _ in range(FIVE):
        await bot.drop()
        await bot.come(None)
    await operator.call("network.drop_dead_letter", {"seq": bot.triggers["long"], "agent_id": "bot"})
    await bot.write("long", "finished")
    await operator.call("network.info")
    told = [it["kind"] for it in operator.unread if it["type"] == "notice" and it["kind"] != "inbox"]
    assert told == ["dead_letter"]
