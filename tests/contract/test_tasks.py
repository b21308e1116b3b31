"""Tests of the mod `tasks`: atomic claims with leases, dependencies, reviews, and visibility."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import Action, ScriptedModel, call, say
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network
from roundelay.mods import task_rules
from roundelay.mods import tasks as tasks_module
from roundelay.network.client import NetworkClient
from roundelay.network.errors import Forbidden, InvalidArguments, UnknownMessage, UnknownRecipient
from roundelay.simulation.links import Delay
from roundelay.simulation.network import Simulation, simulate

MODS = ["channels", "discovery", "tasks"]
POSITIONS: WeakKeyDictionary[NetworkClient, int] = WeakKeyDictionary()


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open(mods=MODS) as opened:
        yield opened


async def read_notices(client: NetworkClient) -> list[str]:
    """Return the texts that the mod has sent to a participant since the last call."""
    page = await client.call("network.receive", {"after": POSITIONS.get(client, 0)})
    POSITIONS[client] = page["next"]
    return [it["content"] for it in page["messages"] if it["sender_id"] == "tasks"]


async def create(client: NetworkClient, title: str = "Write the report", **args: Any) -> int:
    task: int = (await client.call("tasks.create", {"title": title, **args}))["task"]
    return task


async def state_of(client: NetworkClient, task: int) -> str:
    state: str = (await client.call("tasks.get", {"task": task}))["state"]
    return state


async def test_second_claim_fails_and_a_repeated_claim_succeeds(network: Network) -> None:
    lead, ann, bob = [await network.join(name) for name in ("lead", "ann", "bob")]
    task = await create(lead, pool=["ann", "bob"])
    first = await ann.call("tasks.claim", {"task": task})
    second = await bob.call("tasks.claim", {"task": task})
    repeated = await ann.call("tasks.claim", {"task": task})
    assert [it["is_claimed"] for it in (first, second, repeated)] == [True, False, True]
    assert second["holder"] == "ann"
    with pytest.raises(InvalidArguments, match="claimed by ann"):
        await bob.call("tasks.complete", {"task": task})


async def test_assignee_is_woken_and_creator_is_notified_once(network: Network) -> None:
    lead, ann = await network.join("lead"), await network.join("ann")
    task = await create(lead, body="Three pages.", assignee="ann")
    [wake] = await read_notices(ann)
    assert "from lead: Write the report\nThree pages." in wake
    for _ in range(2):
        await ann.call("tasks.complete", {"task": task, "result": "See the note report."})
    assert await read_notices(lead) == [f"Task {task} (Write the report) is done by ann. See the note report."]
    found = await lead.call("tasks.get", {"task": task})
    assert (found["state"], found["done_by"], found["result"]) == ("done", "ann", "See the note report.")
    assert [it["text"] for it in found["events"]] == ["created", "claimed", "completed"]


async def test_task_waits_until_its_dependencies_are_done(network: Network) -> None:
    lead, ann = await network.join("lead"), await network.join("ann")
    first = await create(lead, "First", assignee="ann")
    second = await create(lead, "Second", assignee="ann", depends_on=[first])
    assert [text.split("\n")[0] for text in await read_notices(ann)] == [f"Task {first} from lead: First"]
    assert not (await ann.call("tasks.claim", {"task": second}))["is_claimed"]
    await ann.call("tasks.complete", {"task": first})
    assert [text.split("\n")[0] for text in await read_notices(ann)] == [f"Task {second} from lead: Second"]
    assert (await ann.call("tasks.claim", {"task": second}))["is_claimed"]


async def test_cycle_of_dependencies_is_refused_and_named(network: Network) -> None:
    lead = await network.join("lead")
    first = await create(lead)
    second = await create(lead, depends_on=[first])
    third = await create(lead, depends_on=[second])
    with pytest.raises(InvalidArguments, match=f"{first} -> {third} -> {second} -> {first}"):
        await lead.call("tasks.update", {"task": first, "depends_on": [third]})
    with pytest.raises(InvalidArguments, match=f"{first} -> {first}"):
        await lead.call("tasks.update", {"task": first, "depends_on": [first]})
    await lead.call("tasks.update", {"task": second, "depends_on": []})
    assert await state_of(lead, second) == "open"
    await lead.call("tasks.update", {"task": first, "depends_on": [third]})
    assert await state_of(lead, first) == "waiting"


async def test_failed_dependency_keeps_tasks_waiting_and_names_them(network: Network) -> None:
    lead, ann = await network.join("lead"), await network.join("ann")
    first = await create(lead, assignee="ann")
    second = await create(lead, depends_on=[first])
    await ann.call("tasks.fail", {"task": first, "reason": "No data."})
    [notice] = await read_notices(lead)
    assert notice == f"Task {first} (Write the report) is failed by ann. No data.\nTasks that wait for it: {second}."
    assert await state_of(lead, second) == "waiting"


async def test_result_is_done_after_the_reviewer_accepts_it(network: Network) -> None:
    lead, ann, eve = [await network.join(name) for name in ("lead", "ann", "eve")]
    task = await create(lead, assignee="ann", reviewer="eve")
    await ann.call("tasks.complete", {"task": task, "result": "Draft."})
    assert (await state_of(lead, task), await read_notices(lead)) == ("review", [])
    await ann.call("tasks.complete", {"task": task, "result": "Draft."})
    assert await state_of(lead, task) == "review"
    await eve.call("tasks.reopen", {"task": task, "reason": "Too short."})
    assert "Too short." in (await read_notices(ann))[-1]
    await ann.call("tasks.complete", {"task": task, "result": "Longer."})
    await eve.call("tasks.complete", {"task": task})
    assert await read_notices(lead) == [f"Task {task} (Write the report) is done by ann. Longer."]
    assert len([text for text in await read_notices(eve) if "needs your review" in text]) == 2


async def test_only_the_holder_ends_a_task_and_only_the_creator_changes_it(network: Network) -> None:
    lead, ann, bob = [await network.join(name) for name in ("lead", "ann", "bob")]
    task = await create(lead, pool=["ann", "bob"])
    await ann.call("tasks.claim", {"task": task})
    for op, args in (("update", {"due": ""}), ("cancel", {}), ("release", {}), ("reopen", {})):
        with pytest.raises(Forbidden):
            await bob.call(f"tasks.{op}", {"task": task, **args})
    assert not (await bob.call("tasks.claim", {"task": task, "take_over": True}))["is_claimed"]
    await lead.call("tasks.cancel", {"task": task, "reason": "Not needed."})
    assert (await read_notices(ann))[-1] == f"Task {task} (Write the report) was cancelled. Not needed."
    await lead.call("tasks.reopen", {"task": task})
    assert await state_of(lead, task) == "open"


async def test_creator_takes_over_a_claim_and_its_holder_learns_it(network: Network) -> None:
    lead, ann = await network.join("lead"), await network.join("ann")
    task = await create(lead, assignee="ann")
    await ann.call("tasks.claim", {"task": task})
    assert (await lead.call("tasks.claim", {"task": task, "take_over": True}))["is_claimed"]
    assert (await read_notices(ann))[-1] == f"lead has taken over Task {task} (Write the report)."
    with pytest.raises(InvalidArguments, match="claimed by lead"):
        await ann.call("tasks.complete", {"task": task})


async def test_task_of_a_conversation_is_visible_to_its_readers_only(network: Network) -> None:
    mia, lead, ann, eve = [await network.join(name) for name in ("mia", "lead", "ann", "eve")]
    asked = await mia.send_text("lead", "Please write a report.")
    task = await create(lead, assignee="ann", cause=asked.seq)
    for reader in (mia, lead, ann):
        assert [it["task"] for it in (await reader.call("tasks.list", {}))["tasks"]] == [task]
        assert (await reader.call("tasks.list", {"conversation": asked.seq}))["tasks"]
    assert (await eve.call("tasks.list", {}))["tasks"] == []
    for op in ("get", "claim", "complete", "release", "cancel", "reopen"):
        with pytest.raises(InvalidArguments, match=f"no task {task} that you may see"):
            await eve.call(f"tasks.{op}", {"task": task})
    with pytest.raises(InvalidArguments, match=f"no task {task} that you may see"):
        await create(eve, depends_on=[task])
    with pytest.raises(UnknownMessage):
        await create(eve, cause=asked.seq)


async def test_task_of_a_channel_is_visible_to_its_present_members(network: Network) -> None:
    lead, ann, eve = [await network.join(name) for name in ("lead", "ann", "eve")]
    await lead.call("channels.create", {"name": "dev", "access": "closed"})
    task = await create(lead, channel="dev")
    with pytest.raises(UnknownRecipient):
        await create(ann, channel="dev")
    await lead.call("channels.invite", {"name": "dev", "agent_id": "ann"})
    with pytest.raises(InvalidArguments):
        await ann.call("tasks.claim", {"task": task})
    await ann.call("channels.join", {"name": "dev"})
    assert (await ann.call("tasks.claim", {"task": task}))["is_claimed"]
    assert (await eve.call("tasks.list", {}))["tasks"] == []


async def test_capability_offers_the_task_to_one_match_after_another(network: Network) -> None:
    lead = await network.join("lead")
    ann = await network.join("ann", card={"tags": ["sql", "reports"]})
    bob = await network.join("bob", card={"tags": ["sql"]})
    with pytest.raises(UnknownRecipient):
        await create(lead, capability="juggling")
    task = await create(lead, capability="sql reports")
    assert len(await read_notices(ann)) == 1
    await ann.call("tasks.release", {"task": task, "reason": "No time."})
    assert len(await read_notices(bob)) == 1
    assert "ann has declined it: No time." in (await read_notices(lead))[-1]
    await bob.call("tasks.complete", {"task": task})
    assert await state_of(lead, task) == "done"


async def test_lists_have_pages_and_filters(network: Network) -> None:
    lead, ann = await network.join("lead"), await network.join("ann")
    tasks = [await create(lead, f"T{number}", assignee="ann" if number % 2 else "") for number in range(7)]
    found: list[int] = []
    after, has_more = 0, True
    while has_more:
        page = await lead.call("tasks.list", {"limit": 3, "after": after})
        found += [it["task"] for it in page["tasks"]]
        after, has_more = page["after"], page["has_more"]
    assert found == tasks
    assert [it["title"] for it in (await ann.call("tasks.list", {"assignee": "ann"}))["tasks"]] == ["T1", "T3", "T5"]
    await ann.call("tasks.complete", {"task": tasks[1]})
    assert [it["title"] for it in (await ann.call("tasks.list", {"state": "done"}))["tasks"]] == ["T1"]


async def test_tasks_are_limited_per_creator_and_holder(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.mods.tasks.MAX_UNFINISHED_BY_ONE", 2)
    monkeypatch.setattr(task_rules, "MAX_HELD_BY_ONE", 1)
    lead, ann = await network.join("lead"), await network.join("ann")
    first, second = await create(lead, assignee="ann"), await create(lead, assignee="ann")
    with pytest.raises(InvalidArguments, match="Too many tasks"):
        await create(lead)
    await ann.call("tasks.claim", {"task": first})
    with pytest.raises(InvalidArguments, match="which is the maximum"):
        await ann.call("tasks.claim", {"task": second})
    await ann.call("tasks.complete", {"task": first})
    await ann.call("tasks.claim", {"task": second})
    await create(lead)


# --- leases, in simulated time


def test_claim_ends_when_its_holder_was_offline_longer_than_the_lease() -> None:
    async def main(simulation: Simulation) -> None:
        lead, ann = [(await simulation.join_person(name)).client for name in ("lead", "ann")]
        task = await create(lead, assignee="ann")
        await ann.call("tasks.claim", {"task": task, "minutes": 10})
        await asyncio.sleep(1500)  # the lease is renewed while ann is online
        await simulation.disconnect("ann")
        await asyncio.sleep(700)  # the connection is restored in time
        assert await state_of(lead, task) == "claimed"
        await simulation.leave("ann")
        await asyncio.sleep(500)
        assert await state_of(lead, task) == "claimed"
        await asyncio.sleep(200)
        assert await state_of(lead, task) == "open"
        notices = [it.content for it in simulation.messages if it.to == "agent:lead"]
        assert notices == [f"Task {task} (Write the report) is open again: ann was offline for too long."]

    simulate(main, mods=MODS)


def test_jump_of_the_clock_ends_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_ms, read = [0], Simulation.clock
    monkeypatch.setattr(Simulation, "clock", lambda self: read(self) + ahead_ms[0])

    async def main(simulation: Simulation) -> None:
        lead, ann = [(await simulation.join_person(name)).client for name in ("lead", "ann")]
        task = await create(lead, assignee="ann")
        await ann.call("tasks.claim", {"task": task})
        await simulation.leave("ann")
        for jump in (3_600_000, -3_600_000):
            ahead_ms[0] += jump
            await asyncio.sleep(60)
            assert await state_of(lead, task) == "claimed"
        await asyncio.sleep(1800)  # the lease, while the clock runs at half speed
        assert await state_of(lead, task) == "open"

    simulate(main, mods=MODS)


def worker(script: Any) -> Any:
    return lambda: SimpleAgentRunner("bob", model=ScriptedModel(script), instruction="Work.")


def test_claim_ends_with_the_reaction_in_which_it_was_made() -> None:
    def script(request: ModelRequest) -> Action:
        return call("tasks_claim", task=1) if request.turn == 1 else say("I give up.")

    async def main(simulation: Simulation) -> None:
        lead = (await simulation.join_person("lead")).client
        await simulation.start_agent(worker(script))
        task = await create(lead, assignee="bob")
        notice = await simulation.wait_for(lambda it: it.to == "agent:lead")
        assert notice.content == (
            f"Task {task} (Write the report) is open again: bob's work ended without completing it."
        )
        found = await lead.call("tasks.get", {"task": task})
        assert (found["state"], found["assignee"]) == ("open", "bob")
        assert simulation.hub is not None
        assert simulation.hub.state.count("open_item") == 1
        await lead.call("tasks.cancel", {"task": task})
        assert simulation.hub.state.count("open_item") == 0

    simulate(main, mods=MODS)


def test_woken_agent_is_offered_the_tools_that_end_its_task() -> None:
    offered: list[set[str]] = []

    def script(request: ModelRequest) -> Action:
        offered.append({tool.name for tool in request.tools})
        return call("tasks_complete", task=1, result="42") if request.turn == 1 else say("")

    async def main(simulation: Simulation) -> None:
        lead = (await simulation.join_person("lead")).client
        await simulation.start_agent(worker(script))
        await create(lead, assignee="bob")
        await simulation.wait_for(lambda it: it.to == "agent:lead")
        assert {"tasks_complete", "tasks_fail", "tasks_release", "tasks_claim"} <= offered[0]
        assert "tasks_create" not in offered[0]

    simulate(main, mods=MODS)


def test_creator_learns_that_a_woken_agent_did_not_claim() -> None:
    async def main(simulation: Simulation) -> None:
        lead = (await simulation.join_person("lead")).client
        await simulation.start_agent(worker(lambda request: say("No.")))
        task = await create(lead, assignee="bob")
        notice = await simulation.wait_for(lambda it: it.to == "agent:lead")
        assert notice.content == f"Task {task} (Write the report) is open again: bob did not claim it."

    simulate(main, mods=MODS)


@pytest.mark.parametrize("claims", [True, False])
def test_task_opens_again_when_its_agent_fails_too_often(claims: bool) -> None:
    """An agent whose process ends five times gets a dead letter. Then the next member of the pool is woken."""

    def script(request: ModelRequest) -> Action:
        return call("tasks_claim", task=1) if claims and request.turn == 1 else say("I think about it.")

    async def main(simulation: Simulation) -> None:
        lead, ann = [(await simulation.join_person(name)).client for name in ("lead", "ann")]
        await simulation.start_agent(worker(script))
        await lead.call("tasks.create", {"title": "T", "pool": ["bob", "ann"]})
        await asyncio.sleep(1.5 if claims else 0.05)
        for _ in range(5):
            await simulation.restart("bob")
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        found = await lead.call("tasks.get", {"task": 1})
        assert (found["state"], found["assignee"]) == ("open", "ann")
        notices = [it.content for it in simulation.messages if it.to == "agent:lead"]
        assert notices == ["Task 1 (T) is open again: bob failed at it too often."]
        assert (await ann.call("tasks.complete", {"task": 1}))["state"] == "done"

    simulate(main, mods=MODS, model_delay=Delay(1000, 1000))


def test_task_opens_again_when_its_message_was_refused_five_times() -> None:
    async def main(simulation: Simulation) -> None:
        lead, bob = (await simulation.join_person("lead")).client, await simulation.network.join("bob")
        asked = await lead.send_text("bob", "Please help.")
        await lead.call("tasks.create", {"title": "T", "assignee": "bob", "cause": asked.seq})
        for _ in range(6):  # the request once, and the task's message five times
            with suppress(RuntimeError):
                async with bob.receive() as message:
                    if message.sender_id == "tasks":
                        raise RuntimeError("No.")
        notice = await simulation.wait_for(lambda it: it.to == "agent:lead")
        assert notice.content == "Task 1 (T) is open again: bob failed at it too often."
        assert notice.root == asked.seq

    simulate(main, mods=MODS)


def test_killed_agent_resumes_and_completes_its_task_once() -> None:
    def script(request: ModelRequest) -> Action:
        actions = (call("tasks_claim", task=1), call("tasks_complete", task=1, result="42"))
        return actions[request.turn - 1] if request.turn <= 2 else say("")

    async def main(simulation: Simulation) -> None:
        lead = (await simulation.join_person("lead")).client
        await simulation.start_agent(worker(script))
        await create(lead, assignee="bob")
        for _ in range(6):
            await asyncio.sleep(0.2)
            await simulation.kill_hub()
            await simulation.restart_hub()
            await simulation.restart("bob")
        await asyncio.sleep(60)
        notices = [it.content for it in simulation.messages if it.to == "agent:lead"]
        assert notices == ["Task 1 (Write the report) is done by bob. 42"]

    simulate(main, mods=MODS)


def test_overdue_task_is_reported_once_and_ended_tasks_are_deleted() -> None:
    async def main(simulation: Simulation) -> None:
        lead, ann = [(await simulation.join_person(name)).client for name in ("lead", "ann")]
        task = await create(lead, assignee="ann", due="2026-01-01T00:10")
        await asyncio.sleep(900)
        assert [it.to for it in simulation.messages if "overdue" in str(it.content)] == ["agent:lead", "agent:ann"]
        await ann.call("tasks.complete", {"task": task})
        with pytest.raises(InvalidArguments, match="is not a time"):
            await create(lead, due="tomorrow")
        assert simulation.hub is not None
        state = simulation.hub.state
        state.stamp += task_rules.KEEP_MS
        [key] = state.due_keys("tasks", state.stamp)
        assert key == f"drop/{task}"

    simulate(main, mods=MODS)


@pytest.mark.parametrize("due", ["0001-01-01T00:00+23:59", "1969-12-31", "9999-12-31T23:59-23:59", "2200-01-01"])
async def test_due_time_that_clients_cannot_show_is_refused(network: Network, due: str) -> None:
    lead = await network.join("lead")
    with pytest.raises(InvalidArguments, match="too far away"):
        await create(lead, due=due)


# --- removed participants


def test_reopened_task_is_reported_at_its_due_time() -> None:
    async def main(simulation: Simulation) -> None:
        lead, ann = [(await simulation.join_person(name)).client for name in ("lead", "ann")]
        task = await create(lead, assignee="ann", due="2026-01-01T00:10")
        await ann.call("tasks.complete", {"task": task})
        await lead.call("tasks.reopen", {"task": task})
        await asyncio.sleep(900)
        assert [it.to for it in simulation.messages if "overdue" in str(it.content)] == ["agent:lead", "agent:ann"]

    simulate(main, mods=MODS)


@pytest.fixture
async def team() -> AsyncIterator[dict[str, NetworkClient]]:
    async with Network.open(mods=MODS) as opened:
        root = await opened.join("root", kind="human")
        yield {"root": root, **{name: await opened.join(name) for name in ("lead", "ann", "bob")}}


@pytest.mark.parametrize("is_reviewing", [True, False])
async def test_creator_reviews_for_a_removed_reviewer(team: dict[str, NetworkClient], is_reviewing: bool) -> None:
    root, lead, ann, _ = team.values()
    task = await create(lead, assignee="ann", reviewer="bob")
    if not is_reviewing:
        await root.call("network.remove", {"agent_id": "bob"})
    await ann.call("tasks.complete", {"task": task, "result": "42"})
    if is_reviewing:
        await root.call("network.remove", {"agent_id": "bob"})
    assert await state_of(lead, task) == "review"
    assert "needs your review" in (await read_notices(lead))[-1]
    await lead.call("tasks.complete", {"task": task})
    assert await state_of(ann, task) == "done"


async def test_reviewed_task_of_removed_participants_is_done(team: dict[str, NetworkClient]) -> None:
    root, lead, ann, _ = team.values()
    task = await create(lead, assignee="ann", reviewer="bob")
    after = await create(lead, "Next", assignee="ann", depends_on=[task])
    await ann.call("tasks.complete", {"task": task})
    await root.call("network.remove", {"agent_id": "lead"})
    await root.call("network.remove", {"agent_id": "bob"})
    assert await state_of(ann, task) == "done"
    assert await state_of(ann, after) == "open"


async def test_own_result_of_a_creator_is_done_without_its_reviewer(team: dict[str, NetworkClient]) -> None:
    root, lead, _, _ = team.values()
    task = await create(lead, reviewer="bob")
    await lead.call("tasks.complete", {"task": task})
    await root.call("network.remove", {"agent_id": "bob"})
    assert await state_of(lead, task) == "done"


@pytest.mark.parametrize("by", ["ann", "lead"])
async def test_creator_accepts_what_a_reviewer_removed_long_ago_did_not(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.delattr(tasks_module.Tasks, "removed")  # the mod of an earlier version
    async with Network.open(mods=MODS) as network:
        root = await network.join("root", kind="human")
        clients = {name: await network.join(name) for name in ("lead", "ann", "bob")}
        task = await create(clients["lead"], assignee=by, reviewer="bob")
        await clients[by].call("tasks.complete", {"task": task})
        await root.call("network.remove", {"agent_id": "bob"})
        assert await state_of(clients["lead"], task) == "review"
        await clients["lead"].call("tasks.complete", {"task": task})
        assert await state_of(clients["lead"], task) == "done"


@pytest.mark.parametrize("is_claimed", [True, False])
async def test_task_of_a_removed_assignee_is_offered_again(team: dict[str, NetworkClient], is_claimed: bool) -> None:
    root, lead, ann, bob = team.values()
    task = await create(lead, pool=["ann", "bob"])
    own = await create(lead, "Own", assignee="ann")
    if is_claimed:
        await ann.call("tasks.claim", {"task": task})
        await ann.call("tasks.claim", {"task": own})
    await root.call("network.remove", {"agent_id": "ann"})
    assert [text.split("\n")[0] for text in await read_notices(bob)] == [f"Task {task} from lead: Write the report"]
    assert sorted(await read_notices(lead)) == [
        f"Task {task} (Write the report) is open again: ann was removed from this network.",
        f"Task {own} (Own) is open again: ann was removed from this network.",
    ]
    await lead.call("tasks.update", {"task": own, "assignee": "bob"})
    await bob.call("tasks.complete", {"task": own})
    assert await state_of(lead, own) == "done"


@pytest.mark.parametrize("order", [["lead", "ann"], ["ann", "lead"]])
async def test_task_is_cancelled_when_all_its_participants_are_removed(
    team: dict[str, NetworkClient], order: list[str]
) -> None:
    root, lead, _, bob = team.values()
    first = await bob.send_text("lead", "Write it.")
    abandoned = await create(lead, assignee="ann", cause=first.seq)
    shared = await create(lead, pool=["ann", "bob"], cause=first.seq)
    for name in order:
        await root.call("network.remove", {"agent_id": name})
    assert await state_of(root, abandoned) == "cancelled"
    assert await state_of(root, shared) == "open"
    await bob.call("tasks.complete", {"task": shared})
    left = await bob.call("network.open_items", {"root": first.seq})
    assert [it["kind"] for it in left["items"]] == []


async def test_task_done_by_a_removed_participant_is_reopened(team: dict[str, NetworkClient]) -> None:
    root, lead, ann, bob = team.values()
    task = await create(lead, pool=["ann"])
    await ann.call("tasks.complete", {"task": task})
    await root.call("network.remove", {"agent_id": "ann"})
    await lead.call("tasks.reopen", {"task": task})
    await lead.call("tasks.update", {"task": task, "assignee": "bob"})
    await bob.call("tasks.complete", {"task": task})
    assert await state_of(lead, task) == "done"


# --- numbers of tasks of others


async def test_page_of_tasks_ends_at_a_visible_task(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "MAX_EXAMINED", 2)
    lead, ann = await network.join("lead"), await network.join("ann")
    order = [ann, lead, lead, lead, ann, lead, ann, lead, lead, lead]
    own = [number for by in order if (number := await create(by)) and by is ann]
    pages = []
    after = 0
    while True:
        page = await ann.call("tasks.list", {"after": after, "limit": 2})
        pages.append(([it["task"] for it in page["tasks"]], page["after"], page["has_more"]))
        after = page["after"]
        if not page["has_more"]:
            break
    assert pages == [(own[:2], own[1], True), (own[2:], own[2], False)]
    assert await ann.call("tasks.list", {"after": after}) == {"tasks": [], "after": after, "has_more": False}


async def test_cycle_names_no_tasks_of_others(network: Network) -> None:
    lead, ann = await network.join("lead"), await network.join("ann")
    shown = await create(lead, pool=["ann", "lead"])
    hidden = await create(lead, "Hidden", depends_on=[shown])
    await create(lead, "Hidden too")
    own = await create(ann, pool=["lead"], assignee="ann")
    await lead.call("tasks.update", {"task": shown, "depends_on": []})
    await lead.call("tasks.update", {"task": hidden, "depends_on": [own]})
    between = await create(lead, "Shown", depends_on=[hidden], pool=["ann"])
    with pytest.raises(InvalidArguments) as refused:
        await ann.call("tasks.update", {"task": own, "depends_on": [between]})
    assert f"{own} -> {between} -> a task of others -> {own}" in str(refused.value)


async def test_task_names_no_dependencies_of_others(network: Network) -> None:
    lead, ann, eve = [await network.join(name) for name in ("lead", "ann", "eve")]
    hidden = await create(lead, "Secret", assignee="ann")
    shared = await create(lead, "Shared", pool=["ann", "eve"])
    task = await create(lead, "Public", pool=["ann", "eve"], depends_on=[hidden, shared])
    for reader, expected in ((lead, [hidden, shared]), (ann, [hidden, shared]), (eve, [shared])):
        [listed] = [it for it in (await reader.call("tasks.list", {}))["tasks"] if it["task"] == task]
        for found in (
            listed,
            await reader.call("tasks.get", {"task": task}),
            await reader.call("tasks.claim", {"task": task}),
        ):
            assert found["depends_on"] == expected


async def test_ended_task_names_no_waiting_tasks_of_others(network: Network) -> None:
    lead, ann = await network.join("lead"), await network.join("ann")
    task = await create(lead, pool=["ann"])
    await create(ann, "Hidden", depends_on=[task])
    await ann.call("tasks.fail", {"task": task, "reason": "no"})
    assert not any("wait for it" in text for text in await read_notices(lead))


def test_deleted_task_leaves_room_for_another_dependent() -> None:
    async def main(simulation: Simulation) -> None:
        lead = (await simulation.join_person("lead")).client
        base = await create(lead)
        first = await create(lead, depends_on=[base])
        await lead.call("tasks.cancel", {"task": first})
        with pytest.raises(InvalidArguments, match="has 1 dependents"):
            await create(lead, depends_on=[base])
        await asyncio.sleep(70)
        await create(lead, depends_on=[base])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_rules, "MAX_LINKS", 1)
        patch.setattr(task_rules, "KEEP_MS", 60_000)
        simulate(main, mods=MODS)
