"""Tests of takeovers of a thread from an agent of this package: the input of the model, and the messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import call
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.reaction_scheduler import ReactionScheduler
from roundelay.agents.takeovers import Takeovers
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.config import Limits
from roundelay.network.messages import BaseMessage
from roundelay.runs.replay import ReplayOptions, replay
from tests.support.agents import Heard, Person, make_runner, running, until_state
from tests.support.recorded import record

DIRECT = "direct:bob~mia"


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


class Bob:
    """An agent whose first turn calls a tool that waits for the test's permission. The agent records the last input
    of its model.
    """

    def __init__(self, *, is_stubborn: bool = False, **options: Any) -> None:
        self.begun, self.release, self.heard = asyncio.Event(), asyncio.Event(), Heard()
        self.read: list[str] = []

        @tool(idempotent=True)
        async def work() -> str:
            """Work."""
            self.begun.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                if is_stubborn:
                    await self.release.wait()
                raise
            return "done"

        self.runner = make_runner("bob", self._script, tools=[work], on_event=self.heard, **options)

    def _script(self, request: ModelRequest) -> Any:
        self.read.append("\n".join(str(message.content) for message in request.messages))
        return call("work") if request.turn == 1 and not self.release.is_set() else f"answer {len(self.read)}"


async def said_by_bob(mia: Person, thread_id: str = DIRECT) -> list[str]:
    return [text for sender, text in await mia.history(thread_id) if sender == "bob"]


async def until_nothing_is_open(mia: Person) -> None:
    while (await mia.client.call("network.open_reactions"))["reactions"]:
        pass


async def ask_again(mia: Person) -> None:
    """Ask bob, and skip all other messages until the answer."""
    asked = await mia.client.send_text("bob", "and now?")
    while (await mia.hear()).reply_to != asked.seq:
        pass


async def turn(mia: Person, op: str, thread_id: str = DIRECT) -> None:
    await mia.client.call(f"network.{op}", {"thread_id": thread_id})


@pytest.mark.parametrize("is_stubborn", [False, True])
@pytest.mark.parametrize("notes", [[], ["note 1"], ["note 1", "note 2", "note 3"]])
async def test_what_an_agent_was_at_is_broken_off_and_it_reacts_once_when_the_thread_is_given_back(
    network: Network, notes: list[str], is_stubborn: bool
) -> None:
    mia, bob = await Person.join(network, "mia"), Bob(is_stubborn=is_stubborn)
    async with running(network, bob.runner):
        await mia.client.send_text("bob", "the question")
        await bob.begun.wait()
        await turn(mia, "take")
        for note in notes:
            await mia.client.send_text("bob", note)
        if not is_stubborn:
            bob.release.set()
        await turn(mia, "give")
        bob.release.set()
        answer = await mia.hear()
        await until_nothing_is_open(mia)
        assert answer.text == "answer 2", "one of the work that was broken off, one for all that was said"
        await ask_again(mia)
    assert await said_by_bob(mia) == ["answer 2", "answer 3"]
    assert all(text in bob.read[1] for text in ["the question", *notes])
    ends = {it.status for it in await bob.heard.finished(2)}
    assert ends == {"finished"}


async def test_what_others_said_meanwhile_that_wakes_nobody_is_read_too(network: Network) -> None:
    mia, bob = await Person.join(network, "mia"), Bob(channels=["dev"])
    bob.release.set()
    shop = await network.join("shop", kind="service")
    async with running(network, bob.runner):
        await mia.client.join_channel("dev")
        await shop.join_channel("dev")
        await turn(mia, "take", "channel:dev")
        await mia.client.post("dev", "what does it cost?")
        await shop.post("dev", "it costs <5>")
        await turn(mia, "give", "channel:dev")
        while (answer := await mia.hear()).sender_id != "bob":
            pass
    assert answer.text == "answer 1"
    assert bob.read[0].index("what does it cost?") < bob.read[0].index("it costs &lt;5&gt;")


@pytest.mark.parametrize("given", ["before", "after"])
@pytest.mark.parametrize("stopped", ["before", "after"])
@pytest.mark.parametrize("note", [None, "note"])
async def test_an_agent_that_starts_again_answers_once_too(
    network: Network, stopped: str, given: str, note: str | None
) -> None:
    """The agent stops before or after the start of the takeover, and starts again before or after its end."""
    mia, bob = await Person.join(network, "mia"), Bob()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(network, bob.runner))
        await mia.client.send_text("bob", "the question")
        await bob.begun.wait()
        if stopped == "before":
            await stack.aclose()
        await turn(mia, "take")
        if note is not None:
            stored = await mia.client.send_text("bob", note)
            if stopped == "after":
                await until_state(mia.client, stored.seq, "bob", "delivered")
    again = Bob()
    again.release.set()
    async with AsyncExitStack() as stack:
        if given == "before":
            await stack.enter_async_context(running(network, again.runner))
        await turn(mia, "give")
        if given == "after":
            await stack.enter_async_context(running(network, again.runner))
        async with asyncio.timeout(10):
            await mia.hear()
        await until_nothing_is_open(mia)
        await ask_again(mia)
    assert len(await said_by_bob(mia)) == 2
    assert all(text in again.read[0] for text in ["the question", *([note] if note is not None else [])])


async def test_what_was_read_while_it_worked_takes_nobodys_place_at_the_next_start(network: Network) -> None:
    mia, begun, go_on = await Person.join(network, "mia"), asyncio.Event(), asyncio.Event()
    policy = AgentPolicy(on_new_message="inject")

    @tool(idempotent=True)
    async def work() -> str:
        """Work."""
        begun.set()
        await go_on.wait()
        go_on.clear()
        return "done"

    bob = make_runner("bob", lambda _: call("work"), tools=[work], policy=policy)
    async with running(network, bob):
        await mia.client.send_text("bob", "the question")
        await begun.wait()
        begun.clear()
        more = await mia.client.send_text("bob", "and more")
        await until_state(mia.client, more.seq, "bob", "delivered")
        go_on.set()
        await begun.wait()  # the agent has read the message
    await turn(mia, "take")
    await turn(mia, "give")
    async with running(network, make_runner("bob", lambda _: "answered", policy=policy)):
        async with asyncio.timeout(10):
            assert (await mia.hear()).text == "answered"
        await until_nothing_is_open(mia)
    assert await said_by_bob(mia) == ["answered"]


async def test_a_held_thread_holds_up_no_other_however_much_is_said_in_it() -> None:
    async with Network.open(limits=Limits(max_unacked=4)) as network:
        mia, zoe, bob = await Person.join(network, "mia"), await Person.join(network, "zoe"), Bob()
        bob.release.set()
        async with running(network, bob.runner):
            await mia.ask("bob", "hello")
            await turn(mia, "take")
            for number in range(12):
                await mia.client.send_text("bob", f"note {number}")
            assert (await zoe.ask("bob", "are you there?")).text == "answer 2"
            await turn(mia, "give")
            assert (await mia.hear()).text == "answer 3"


async def test_an_answer_that_was_on_its_way_is_refused_and_made_anew(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing interrupts the reaction here: the agent notices the takeover only by the refusal."""
    mia, bob = await Person.join(network, "mia"), Bob()
    monkeypatch.setattr(ReactionScheduler, "_interrupt", ignore)
    monkeypatch.setattr(ReactionScheduler, "_end_takeovers", lambda scheduler, thread_id: None)
    async with running(network, bob.runner):
        await mia.client.send_text("bob", "the question")
        await bob.begun.wait()
        await turn(mia, "take")
        await turn(mia, "give")
        bob.release.set()
        assert (await mia.hear()).text == "answer 3"
        await until_nothing_is_open(mia)
    assert await said_by_bob(mia) == ["answer 3"]


async def ignore(*_: object) -> None:
    pass


async def test_a_reply_thread_that_nobody_has_begun_is_held_too(network: Network) -> None:
    mia, bob = await Person.join(network, "mia"), Bob()
    async with running(network, bob.runner):
        asked = await mia.client.broadcast("a question")
        await bob.begun.wait()
        await turn(mia, "take", f"thread:{asked.seq}")
        bob.release.set()
        assert bob.runner._scheduler is not None
        # Otherwise, the question is next again as soon as the takeover ends.
        while not any(bob.runner._scheduler.inbox._taken_over.values()):
            await mia.client.call("network.info")
        await mia.client.send("broadcast", "my answer", reply_to=asked.seq)
        await turn(mia, "give", f"thread:{asked.seq}")
        answer = await mia.hear()
        await until_nothing_is_open(mia)
    assert answer.thread_id == f"thread:{asked.seq}"
    assert "my answer" in bob.read[-1]


async def test_who_is_at_a_later_message_of_the_thread_answers_once(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The takeover ends, and the later message is in work, before the interrupted reaction has checked for a
    takeover.
    """
    mia, bob = await Person.join(network, "mia"), Bob()
    find = Takeovers._find_taken_over

    async def find_late(self: Takeovers, message: BaseMessage) -> str | None:
        await bob.begun.wait()
        return await find(self, message)

    monkeypatch.setattr(Takeovers, "_find_taken_over", find_late)
    async with running(network, bob.runner):
        asked = await mia.client.broadcast("a question")
        await bob.begun.wait()
        bob.begun.clear()
        thread_id = f"thread:{asked.seq}"
        await turn(mia, "take", thread_id)
        await mia.client.send("broadcast", "my answer", reply_to=asked.seq)
        await turn(mia, "give", thread_id)
        await bob.begun.wait()
        bob.release.set()
        await mia.hear()
        await until_nothing_is_open(mia)
    assert len(await said_by_bob(mia, thread_id)) == 1


async def test_a_run_in_which_a_person_took_over_is_played_again_as_it_was(tmp_path: Path) -> None:
    def answer(request: ModelRequest) -> str:
        return "answered"

    async def talk(network: Network, people: dict[str, Person]) -> None:
        mia = people["mia"]
        await mia.ask("bob", "hello")
        await turn(mia, "take")
        await mia.client.send_text("bob", "note")
        await turn(mia, "give")
        await mia.hear()
        await until_nothing_is_open(mia)

    recording = await record(tmp_path / "held.db", [make_runner("bob", answer)], talk)
    report = await asyncio.to_thread(replay, recording, [make_runner("bob", answer)], ReplayOptions())
    assert [str(it) for it in report.differences] == []
    assert [row.type for row in recording.rows].count("hold") == 2
