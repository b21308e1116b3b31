"""Tests of calls that a person must approve: the request is in the thread, waits across restarts, and only a person's
reply decides it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent_tools import remote_agent_tool
from roundelay.agents.events import Waiting
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import call, finish, say
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.errors import ConnectError
from roundelay.network.messages import BaseMessage
from tests.support.agents import Heard, Person, cancel, make_runner, running, until_recorded
from tests.support.busy import BusyClient


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


class Bank:
    """Payments, stored outside of the agent's process."""

    def __init__(self) -> None:
        self.paid: list[tuple[str, int]] = []

    def make_runner(self, **options: Any) -> SimpleAgentRunner:
        @tool(once=True, needs_approval=True)
        def pay(to: str, amount: int) -> str:
            """Pay."""
            self.paid.append((to, amount))
            return f"{amount} paid to {to}"

        def script(request: ModelRequest) -> Any:
            if read_prompt(request).incoming_text != "pay ann":
                return finish()
            if request.turn == 1:
                return [say("Ann sent a bill."), call("pay", to="ann", amount=5)]
            return read_prompt(request).tool_results[-1].content

        return make_runner("bob", script, tools=[pay], **options)


async def decide(person: Person, request: BaseMessage, text: str) -> None:
    await person.client.reply(request, text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decision", "told", "paid"),
    [
        ("/approve", "5 paid to ann", [("ann", 5)]),
        ("/deny too much", "Not run: mia denied it: too much", []),
        ('/edit {"to": "ann", "amount": 3}', "3 paid to ann", [("ann", 3)]),
    ],
)
async def test_a_person_approves_denies_or_changes_a_call(
    network: Network, decision: str, told: str, paid: list[tuple[str, int]]
) -> None:
    mia, heard, bank = await Person.join(network, "mia"), Heard(), Bank()
    async with running(network, bank.make_runner(on_event=heard)):
        request = await mia.ask("bob", "pay ann")
        assert request.text.startswith('May I call pay with {"to": "ann", "amount": 5}?')
        assert request.text.splitlines()[1] == "Why: Ann sent a bill."
        assert "I wait for 7 days." in request.text
        assert bank.paid == []
        await decide(mia, request, decision)
        assert (await mia.hear()).text.startswith(told)
        [end] = await heard.finished()
        await until_recorded(mia, end.reaction, "finished")
        records = await mia.records(end.reaction)
    assert bank.paid == paid
    [approval] = [it["body"] for it in records if it["kind"] == "approval"]
    answer = (await mia.client.history("direct:bob~mia")).messages[2]
    assert (approval["by"], approval["seq"], approval["at"]) == ("mia", answer.seq, answer.sent_at)
    assert [it.is_approval for it in heard.events if isinstance(it, Waiting)] == [True]
    kinds = [it["kind"] for it in records]
    if paid:
        assert kinds.index("approval") < kinds.index("tool_started")
    else:
        assert "tool_started" not in kinds


async def test_in_a_channel_only_a_persons_reply_with_a_decision_counts(network: Network) -> None:
    mia, bank = await Person.join(network, "mia"), Bank()
    ann = await network.join("ann")
    await mia.client.call("channels.create", {"name": "dev"})
    await ann.call("channels.join", {"name": "dev"})
    async with running(network, bank.make_runner(channels=["dev"])):
        await mia.client.post("dev", "pay ann")
        request = await mia.hear()
        await ann.send("channel:dev", "/deny I am no person", reply_to=request.seq)
        assert (await mia.hear()).sender_id == "ann"
        await mia.client.post("dev", "/deny this is no reply")
        await decide(mia, request, "hm, why?")
        assert bank.paid == []
        await decide(mia, request, "/approve")
        assert (await mia.hear()).text == "5 paid to ann"
    assert bank.paid == [("ann", 5)]


async def test_what_a_person_says_to_a_request_that_was_stopped_is_a_message_like_any_other(network: Network) -> None:
    mia, heard, bank = await Person.join(network, "mia"), Heard(), Bank()
    async with running(network, bank.make_runner(on_event=heard)):
        request = await mia.ask("bob", "pay ann")
        await heard.first(Waiting)
        await cancel(mia.client, thread_id=request.thread_id)
        await heard.finished()
        await decide(mia, request, "pay nobody, then")
        assert [it.status for it in await heard.finished(2)] == ["cancelled", "finished"]
    assert bank.paid == []


async def test_a_call_that_was_approved_may_itself_wait_for_an_answer(network: Network) -> None:
    mia = await Person.join(network, "mia")

    def desk(request: ModelRequest) -> Any:
        results = read_prompt(request).tool_results
        return results[-1].content if results else call("lawyer", task="Is it lawful?")

    asking = replace(remote_agent_tool("lawyer"), needs_approval=True)
    async with running(
        network, make_runner("lawyer", lambda request: "It is."), make_runner("desk", desk, tools=[asking])
    ):
        await decide(mia, await mia.ask("desk", "go"), "/approve")
        assert (await mia.hear()).text == "It is."


async def test_a_wrong_edit_is_refused_and_the_request_waits_on(network: Network) -> None:
    mia, bank = await Person.join(network, "mia"), Bank()
    async with running(network, bank.make_runner()):
        request = await mia.ask("bob", "pay ann")
        for wrong in ('/edit {"to": "ann"}', "/edit {"):
            await decide(mia, request, wrong)
            refusal = await mia.hear()
            assert f"so #{request.seq} still waits" in refusal.text
        await decide(mia, request, '/edit {"to": "ann", "amount": 3}')
        assert (await mia.hear()).text == "3 paid to ann"
    assert bank.paid == [("ann", 3)]


async def test_a_second_decision_is_told_who_decided_and_wakes_nobody(network: Network) -> None:
    mia, zoe, bank, heard = await Person.join(network, "mia"), await Person.join(network, "zoe"), Bank(), Heard()
    await mia.client.call("channels.create", {"name": "dev"})
    await zoe.client.call("channels.join", {"name": "dev"})
    async with running(network, bank.make_runner(channels=["dev"], on_event=heard)):
        await mia.client.post("dev", "pay ann")
        request = await mia.hear()
        await decide(mia, request, "/approve")
        assert (await mia.hear()).text == "5 paid to ann"
        await decide(zoe, request, "/deny no!")
        assert (await mia.hear()).text == "/deny no!"
        told = await mia.hear()
        assert told.text.startswith(f"#{request.seq} was decided by mia in #")
        await zoe.client.send_text("bob", "hi")
        assert [it.status for it in await heard.finished(2)] == ["finished", "finished"]
    assert bank.paid == [("ann", 5)]


@pytest.mark.parametrize(
    ("decision", "holds_here", "holds_elsewhere", "holds_for_others"),
    [
        ("/approve", False, False, False),
        ("/approve thread", True, False, False),
        ("/approve always", True, True, False),
    ],
)
async def test_an_approval_holds_once_or_in_the_thread_or_wherever_its_person_may_decide(
    tmp_path: Path, decision: str, holds_here: bool, holds_elsewhere: bool, holds_for_others: bool
) -> None:
    """The approval holds after a restart of everybody, and until it is withdrawn."""
    path, bank = tmp_path / "team.db", Bank()

    async def pays(person: Person, to: str) -> bool:
        """Return whether the agent pays without asking. A request is denied."""
        await person.client.send(to, "pay ann")
        answer = await person.hear()
        if answer.text == "5 paid to ann":
            return True
        await decide(person, answer, "/deny")
        assert (await person.hear()).text.startswith("Not run")
        return False

    async with Network.open(path) as network:
        mia = await Person.join(network, "mia")
        async with running(network, bank.make_runner()):
            request = await mia.ask("bob", "pay ann")
            await decide(mia, request, decision)
            assert (await mia.hear()).text == "5 paid to ann"
            await mia.client.ack(2**40)
    async with Network.open(path) as network:
        mia, zoe = await Person.join(network, "mia"), await Person.join(network, "zoe")
        await mia.client.call("channels.create", {"name": "dev"})
        async with running(network, bank.make_runner(channels=["dev"])):
            assert await pays(mia, "agent:bob") == holds_here
            assert await pays(mia, "channel:dev") == holds_elsewhere
            assert await pays(zoe, "agent:bob") == holds_for_others
            if holds_here:
                await decide(mia, request, "/deny not any more")
                assert (await mia.hear()).text == "From now on I ask again before I call pay."
            assert await pays(mia, "agent:bob") is False


async def test_an_approval_for_a_thread_ends_with_its_person_there(network: Network) -> None:
    mia, zoe, bank = await Person.join(network, "mia"), await Person.join(network, "zoe"), Bank()
    await zoe.client.call("channels.create", {"name": "dev"})
    await mia.client.call("channels.join", {"name": "dev"})
    async with running(network, bank.make_runner(channels=["dev"])):
        await zoe.client.post("dev", "pay ann")
        assert (await mia.hear()).text == "pay ann"
        await decide(mia, await mia.hear(), "/approve thread")
        heard = [await zoe.hear() for _ in range(3)]
        assert [it.text.partition(" ")[0] for it in heard] == ["May", "/approve", "5"]
        await decide(zoe, heard[-1], "pay ann")
        assert (await zoe.hear()).text == "5 paid to ann"
        await mia.client.call("channels.leave", {"name": "dev"})
        await decide(zoe, heard[-1], "pay ann")
        assert (await zoe.hear()).text.startswith("May I call pay")
    assert bank.paid == [("ann", 5), ("ann", 5)]


async def test_a_decision_in_a_thread_that_somebody_holds_ends_no_agent(network: Network) -> None:
    """The agent may not write to this thread that nothing waits any more. The agent continues, and withdraws the
    approval.
    """
    mia, bank = await Person.join(network, "mia"), Bank()
    async with running(network, bank.make_runner()):
        request = await mia.ask("bob", "pay ann")
        await decide(mia, request, "/approve thread")
        assert (await mia.hear()).text == "5 paid to ann"
        await mia.client.call("network.take", {"thread_id": request.thread_id})
        await decide(mia, request, "/deny not any more")
        zoe = await Person.join(network, "zoe")
        await zoe.ask("bob", "pay ann")
        await mia.client.call("network.give", {"thread_id": request.thread_id})
        assert (await mia.ask("bob", "pay ann")).text.startswith("May I call pay")


async def test_where_nobody_can_approve_the_call_is_refused_at_once(network: Network) -> None:
    bank = Bank()
    ann = await network.join("ann")
    async with running(network, bank.make_runner()):
        await ann.send_text("bob", "pay ann", requires_response=["bob"])
        async with ann.receive() as answer:
            assert answer.text == (
                "Not run: it needs a person's approval: no person reads this thread, and no operator is there to decide."
            )
    assert bank.paid == []


async def test_nobody_decides_in_time(network: Network) -> None:
    mia, bank = await Person.join(network, "mia"), Bank()
    async with running(network, bank.make_runner(policy=AgentPolicy(approval_timeout_s=0.05))):
        await mia.ask("bob", "pay ann")
        assert (await mia.hear()).text == "Not run: nobody approved it in time."
    assert bank.paid == []


async def test_a_decision_that_is_delivered_again_wakes_nobody(network: Network) -> None:
    """A hub that was killed before it stored the ack delivers the decision again."""
    mia, bank = await Person.join(network, "mia"), Bank()

    async def lose(*_args: object, **_options: object) -> None:
        return

    async with await network.join("bob", role="reactor") as client:
        client.ack = lose  # type: ignore[method-assign]
        runner = bank.make_runner()
        running_task = asyncio.create_task(runner.run(client))
        await decide(mia, await mia.ask("bob", "pay ann"), "/approve")
        assert (await mia.hear()).text == "5 paid to ann"
        await runner.stop()
        await running_task
    async with running(network, bank.make_runner()):
        await decide(mia, await mia.ask("bob", "pay ann"), "/deny no more")
        assert (await mia.hear()).text == "Not run: mia denied it: no more"
    said = [text.partition(" ")[0] for sender, text in await mia.history("direct:bob~mia") if sender == "bob"]
    assert said == ["May", "5", "May", "Not"]
    assert bank.paid == [("ann", 5)]


@pytest.mark.parametrize("decided", ["while it was away", "after it is back"])
async def test_a_request_survives_restarts_of_the_agent_the_hub_and_the_person(tmp_path: Path, decided: str) -> None:
    path, bank = tmp_path / "team.db", Bank()
    async with Network.open(path) as network:
        mia, heard = await Person.join(network, "mia"), Heard()
        async with running(network, bank.make_runner(on_event=heard)):
            request = await mia.ask("bob", "pay ann")
            await heard.first(Waiting)
    async with Network.open(path) as network:
        mia = await Person.join(network, "mia")
        if decided == "while it was away":
            await decide(mia, request, "/approve")
        async with running(
            network, bank.make_runner(policy=AgentPolicy(approval_timeout_s=3600))
        ):  # a restarted agent learns the decision in another way
            if decided == "after it is back":
                await decide(mia, request, "/approve")
            assert (await mia.hear()).seq == request.seq  # mia did not acknowledge the request before the hub went down
            assert (await mia.hear()).text == "5 paid to ann"
        said = [text.partition(" ")[0] for sender, text in await mia.history("direct:bob~mia") if sender == "bob"]
    assert said == ["May", "5"], "it asked once"
    assert bank.paid == [("ann", 5)]


@pytest.mark.parametrize("cut_at", ["waiting", "approval", "tool_started", "tool_result", "finished"])
async def test_killed_anywhere_it_asks_once_and_pays_at_most_once(network: Network, cut_at: str) -> None:
    mia, bank = await Person.join(network, "mia"), Bank()
    client = BusyClient(await network.join("bob", role="reactor"), cut_at, cut_at=1)
    runner = bank.make_runner()
    task = asyncio.create_task(runner.run(client))  # type: ignore[arg-type]
    await runner.ready()
    request = await mia.ask("bob", "pay ann")
    await decide(mia, request, '/edit {"to": "ann", "amount": 3}')
    with pytest.raises(ConnectError, match="cut"):
        await task
    heard = Heard()
    async with running(network, bank.make_runner(on_event=heard)):
        [end] = await heard.finished()
        await until_recorded(mia, end.reaction, "finished")
    said = [text for sender, text in await mia.history("direct:bob~mia") if sender == "bob"]
    assert len(said) == 2
    assert bank.paid == [("ann", 3)]
    if cut_at == "tool_result":
        assert "Whether it took effect is unknown" in said[1]
    else:
        assert said[1] == "3 paid to ann"
