"""Tests of polls: one vote per participant, an end at a set time, and secret votes that no operation shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from roundelay import InvalidArguments, Network
from roundelay.mods.channels import Channels
from roundelay.mods.polls import Polls
from roundelay.network.client import NetworkClient
from roundelay.network.errors import Forbidden, RequestError, UnknownMessage
from roundelay.network.operations import list_operations
from roundelay.simulation.links import Delay
from roundelay.simulation.network import Simulation, simulate

TEA = {"question": "Drink?", "choices": ["tea", "coffee"], "thread_id": "broadcast"}


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open(mods=["channels", "polls"]) as opened:
        yield opened


async def join(network: Network, *names: str) -> list[NetworkClient]:
    return [await network.join(name) for name in names]


def sums(result: dict[str, Any]) -> dict[str, int]:
    return {it["choice"]: it["votes"] for it in result["choices"]}


async def test_open_poll_counts_the_last_vote_of_each(network: Network) -> None:
    ann, bob = await join(network, "ann", "bob")
    poll = await ann.call("polls.create", TEA)
    await ann.call("polls.vote", {**poll, "choice": "tea"})
    await bob.call("polls.vote", {**poll, "choice": "tea"})
    await bob.call("polls.vote", {**poll, "choice": "coffee"})
    shown = await ann.call("polls.results", poll)
    assert [(it["choice"], it["votes"], it["voters"]) for it in shown["choices"]] == [
        ("tea", 1, ["ann"]),
        ("coffee", 1, ["bob"]),
    ]
    with pytest.raises(Forbidden, match="Only ann or an operator closes it"):
        await bob.call("polls.close", poll)
    assert (await ann.call("polls.close", poll))["is_open"] is False
    with pytest.raises(InvalidArguments, match="is closed"):
        await bob.call("polls.vote", {**poll, "choice": "tea"})
    assert sums(await bob.call("polls.results", poll)) == {"tea": 1, "coffee": 1}


async def test_secret_poll_shows_sums_after_its_end_alone(network: Network) -> None:
    ann, bob = await join(network, "ann", "bob")
    poll = await ann.call("polls.create", {**TEA, "secret": True})
    await ann.call("polls.vote", {**poll, "choice": "tea"})
    with pytest.raises(InvalidArguments, match="A secret vote is final"):
        await ann.call("polls.vote", {**poll, "choice": "coffee"})
    await bob.call("polls.vote", {**poll, "choice": "tea"})
    shown = await bob.call("polls.results", poll)
    assert (shown["voters"], shown["has_voted"], shown["choices"]) == (
        2,
        True,
        [{"choice": "tea"}, {"choice": "coffee"}],
    )
    assert sums(await ann.call("polls.close", poll)) == {"tea": 2, "coffee": 0}


async def watch_secret_vote(choice: str) -> list[Any]:
    """Return everything that an operator can see of a secret vote, in every read operation and every frame."""
    seen: list[Any] = []
    numbers = iter(range(10_000))
    async with Network.open(
        mods=["channels", "polls"], clock=lambda: 1_000_000, new_id=lambda: f"id-{next(numbers)}"
    ) as network:
        ann, host = await network.join("ann"), await network.join("host", kind="human")
        await host.call("network.watch", {"presence": True, "signals": True})
        poll = await ann.call("polls.create", {**TEA, "secret": True}, call_id="create")
        await ann.call("polls.vote", {**poll, "choice": choice}, call_id="vote")
        asked = {
            "network.history": {"thread_id": "broadcast"},
            "network.search": {"query": choice},
            "network.records": {"reaction": "r"},
            "polls.results": poll,
            "polls.list": {},
        }
        for op, operation in sorted(list_operations([Channels(), Polls()]).items()):
            if operation.is_change or op in ("network.info", "network.status", "network.wait", "network.receive"):
                continue
            try:
                seen.append((op, await host.call(op, asked.get(op, {}))))
            except RequestError as error:
                seen.append((op, str(error)))
        seen.append(await host.call("network.receive", {"after": 0}))
    return seen


async def test_no_operation_shows_a_secret_vote() -> None:
    tea, coffee = [str(seen).replace("coffee", "DRINK").replace("tea", "DRINK") for seen in
                   (await watch_secret_vote("tea"), await watch_secret_vote("coffee"))]  # fmt: skip
    assert "network.rows" in tea
    assert "'voters': 1" in tea
    assert tea == coffee


async def test_outsiders_find_no_poll_of_a_channel(network: Network) -> None:
    ann, eve = await join(network, "ann", "eve")
    await ann.call("channels.create", {"name": "den"})
    poll = await ann.call("polls.create", {**TEA, "thread_id": "channel:den"})
    for op, args in (("vote", {"choice": "tea"}), ("close", {}), ("results", {})):
        with pytest.raises(UnknownMessage, match="There is no poll"):
            await eve.call(f"polls.{op}", {**poll, **args})
    assert (await eve.call("polls.list", {}))["polls"] == []
    assert [it["poll"] for it in (await ann.call("polls.list", {}))["polls"]] == [poll["poll"]]


async def test_list_pages_by_number_and_state(network: Network) -> None:
    [ann] = await join(network, "ann")
    polls = [(await ann.call("polls.create", {**TEA, "question": f"{number}?"}))["poll"] for number in range(4)]
    await ann.call("polls.close", {"poll": polls[1]})
    page = await ann.call("polls.list", {"limit": 2})
    assert ([it["poll"] for it in page["polls"]], page["has_more"]) == (polls[:2], True)
    page = await ann.call("polls.list", {"after": polls[0], "is_open": True})
    assert ([it["poll"] for it in page["polls"]], page["has_more"]) == (polls[2:], False)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"choices": ["tea", "tea"]}, "Two choices are equal"),
        ({"closes_at": 1}, "closes_at must be later"),
        ({"closes_at": 2**52}, "within a year"),
        ({"thread_id": None}, "needs thread_id"),
        ({"choices": ["tea"]}, "choices"),
    ],
)
async def test_wrong_poll_is_refused_with_its_reason(network: Network, args: dict[str, Any], problem: str) -> None:
    [ann] = await join(network, "ann")
    with pytest.raises(InvalidArguments, match=problem):
        await ann.call("polls.create", {**TEA, **args})


async def test_polls_and_votes_are_bounded(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_OPEN_BY_ONE", 2), ("MAX_POLLS", 3), ("MAX_VOTERS", 1)):
        monkeypatch.setattr(f"roundelay.mods.polls.{name}", value)
    ann, bob = await join(network, "ann", "bob")
    first, second = [await ann.call("polls.create", TEA) for _ in range(2)]
    with pytest.raises(InvalidArguments, match="ann has 2 open polls"):
        await ann.call("polls.create", TEA)
    await ann.call("polls.vote", {**second, "choice": "tea"})
    await ann.call("polls.vote", {**second, "choice": "coffee"})
    with pytest.raises(InvalidArguments, match="has 1 votes"):
        await bob.call("polls.vote", {**second, "choice": "tea"})
    third = await bob.call("polls.create", TEA)
    with pytest.raises(InvalidArguments, match="3 open polls"):
        await bob.call("polls.create", TEA)
    await ann.call("polls.close", first)
    fourth = await bob.call("polls.create", TEA)
    assert [it["poll"] for it in (await ann.call("polls.list", {}))["polls"]] == [
        it["poll"] for it in (second, third, fourth)
    ]


def test_poll_ends_at_its_time_once_despite_a_kill() -> None:
    async def main(simulation: Simulation) -> None:
        ann, bob = await simulation.join_person("ann"), await simulation.join_person("bob")
        made = await ann.client.call("polls.create", {**TEA, "closes_at": 0})
        at = (await ann.client.call("polls.results", made))["at"] + 60_000
        poll = await ann.client.call("polls.create", {**TEA, "secret": True, "closes_at": at})
        await bob.client.call("polls.vote", {**poll, "choice": "tea"})
        await simulation.kill_hub()
        await simulation.restart_hub()
        await asyncio.sleep(120)
        shown = await bob.client.call("polls.results", poll)
        assert (shown["is_open"], sums(shown)) == (False, {"tea": 1, "coffee": 0})
        said = [message.content for message in simulation.messages if message.sender_id == "polls"]
        assert said == [f"Your poll {poll['poll']} has ended. tea: 1, coffee: 0."]

    simulate(main, mods=["polls"])


@pytest.mark.parametrize("secret", [True, False])
def test_votes_that_race_with_the_end_count_once_or_not(secret: bool) -> None:
    """Eight people vote twice at the same time while the poll is closed. The network reorders frames."""

    async def main(simulation: Simulation) -> None:
        people = [(await simulation.join_person(name)).client for name in "abcdefgh"]
        poll = await people[0].call("polls.create", {**TEA, "secret": secret})
        accepted: list[tuple[str, str]] = []

        async def vote(client: NetworkClient, choice: str) -> None:
            with suppress(InvalidArguments):
                await client.call("polls.vote", {**poll, "choice": choice})
                accepted.append((client.agent_id, choice))

        async def close() -> dict[str, Any]:
            await asyncio.sleep(0.001)
            return await people[0].call("polls.close", poll)

        votes = [vote(client, choice) for client in people for choice in TEA["choices"]]
        closed, closed_again, *_ = await asyncio.gather(close(), close(), *votes)
        voters = {name for name, _ in accepted}
        counts.append(len(voters))
        assert closed == closed_again
        shown = [await client.call("polls.results", poll) for client in people]
        assert {sum(sums(it).values()) for it in (closed, *shown)} == {len(voters)}
        assert [it["has_voted"] for it in shown] == [client.agent_id in voters for client in people]
        if secret:
            assert sums(closed) == {choice: sum(it == choice for _, it in accepted) for choice in TEA["choices"]}

    counts: list[int] = []
    for seed in range(5):
        simulate(main, mods=["polls"], seed=seed, link_delay=Delay(0, 5))
    assert 0 < sum(counts) < 40
