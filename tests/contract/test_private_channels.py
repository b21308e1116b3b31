"""Tests of channels with restricted access: who may join, what a removed member can read, and that a closed channel
looks to others as if it did not exist.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from roundelay.app import OWN_MODS
from roundelay.network.config import Quota
from roundelay.network.ledger.schema import checksum
from roundelay.network.mod import Operation
from roundelay.network.operations import list_operations
from tests.support.node import Node, running_node
from tests.support.wire import WireSession, contents

OPERATIONS = list_operations(mod() for mod in OWN_MODS.values())


@pytest.fixture
async def ann(node: Node) -> WireSession:
    """Ann's session. Ann owns `den`, which is closed, and `club`, which invited participants may join."""
    session = await node.agent("ann")
    await session.call("channels.create", {"name": "den", "access": "closed"})
    await session.call("channels.create", {"name": "club", "access": "invite"})
    return session


async def listed(session: WireSession) -> dict[str, dict[str, Any]]:
    return {it["name"]: it for it in (await session.call("channels.list"))["channels"]}


@pytest.mark.parametrize("name", ["den", "club"])
async def test_only_who_is_invited_comes_in(node: Node, ann: WireSession, name: str) -> None:
    bob, eve = await node.agent("bob"), await node.agent("eve")
    await ann.call("channels.invite", {"name": name, "agent_id": "bob"})
    assert (await listed(bob))[name]["is_invited"] is True
    await bob.call_refused("forbidden", "channels.members", {"name": name})  # an invitation gives no access yet
    await bob.refused("forbidden", f"channel:{name}")
    await bob.call("channels.join", {"name": name})
    await ann.send(f"channel:{name}", "welcome")
    await bob.message("welcome")
    assert (await bob.call("channels.members", {"name": name}))["members"] == ["ann", "bob"]
    assert "is_invited" not in (await listed(bob))[name]
    await eve.call_refused("unknown_recipient" if name == "den" else "forbidden", "channels.join", {"name": name})


async def test_a_channel_that_takes_whom_it_invites_is_listed_and_says_whom_to_ask(
    node: Node, ann: WireSession
) -> None:
    eve = await node.agent("eve")
    club = (await listed(eve))["club"]
    assert (club["access"], club["owner"], club["members"], club["is_member"]) == ("invite", "ann", 1, False)
    refused = await eve.call_refused("forbidden", "channels.join", {"name": "club"})
    assert "ask ann for an invitation (channels.invite)" in refused["message"]


async def test_members_who_do_not_own_a_channel_run_nothing_of_it(node: Node, ann: WireSession) -> None:
    bob = await node.agent("bob")
    await node.agent("eve")
    await ann.call("channels.invite", {"name": "den", "agent_id": "bob"})
    await bob.call("channels.join", {"name": "den"})
    for op, args in (
        ("invite", {"agent_id": "eve"}), ("remove", {"agent_id": "ann"}), ("set_owner", {"agent_id": "bob"}),
        ("set_access", {"access": "open"}), ("set_history", {"history": "members"}),
    ):  # fmt: skip
        refused = await bob.call_refused("forbidden", f"channels.{op}", {"name": "den", **args})
        assert "Only ann, who owns the channel 'den', or an operator" in refused["message"]


@pytest.mark.parametrize("access", ["open", "invite", "closed"])
async def test_who_was_removed_hears_nothing_more_and_needs_another_invitation(
    node: Node, ann: WireSession, access: str
) -> None:
    bob = await node.agent("bob")
    await ann.call("channels.create", {"name": "room", "access": access, "history": "members"})
    await ann.call("channels.invite", {"name": "room", "agent_id": "bob"})
    await bob.call("channels.join", {"name": "room"})
    first = await ann.send("channel:room", "while bob is in")
    await bob.message("while bob is in")
    await ann.call("channels.remove", {"name": "room", "agent_id": "bob"})
    later = await ann.send("channel:room", "behind bob's back", reply_to=first["seq"])
    await ann.send("channel:room", "and more")
    gone = "unknown_recipient" if access == "closed" else "forbidden"
    await bob.call_refused(gone, "channels.join", {"name": "room"})
    await bob.refused(gone, "channel:room", "let me in")
    await bob.call_refused("unknown_message", "network.why", {"seq": later["seq"]})
    for thread_id in ("channel:room", later["thread_id"]):
        answer = await bob.submit_call("network.history", {"thread_id": thread_id})
        assert "behind" not in answer.raw
        assert "and more" not in answer.raw
    await ann.send("agent:bob", "marker")
    assert await bob.contents_until("marker") == []
    again = await node.agent("bob")  # a resumed session follows the same rule
    assert await again.contents_until("marker") == ["while bob is in"]
    await ann.call("channels.invite", {"name": "room", "agent_id": "bob"})
    await bob.call("channels.join", {"name": "room"})
    history = await bob.call("network.history", {"thread_id": "channel:room"})
    assert contents(history["messages"]) == ["while bob is in", "and more"]  # only members may read the past


async def test_an_invitation_is_taken_back_by_the_same_word(node: Node, ann: WireSession) -> None:
    bob = await node.agent("bob")
    await ann.call("channels.invite", {"name": "den", "agent_id": "bob"})
    await ann.call("channels.remove", {"name": "den", "agent_id": "bob"})
    assert "den" not in await listed(bob)
    await bob.call_refused("unknown_recipient", "channels.join", {"name": "den"})
    await ann.call_refused("invalid_arguments", "channels.remove", {"name": "den", "agent_id": "bob"})
    await ann.call_refused("unknown_recipient", "channels.invite", {"name": "den", "agent_id": "nobody"})
    await ann.call_refused("invalid_arguments", "channels.remove", {"name": "den", "agent_id": "ann"})


async def test_who_leaves_needs_another_invitation_unless_it_owns_the_channel(node: Node, ann: WireSession) -> None:
    bob = await node.agent("bob")
    await ann.call("channels.invite", {"name": "club", "agent_id": "bob"})
    await bob.call("channels.join", {"name": "club"})
    for session in (bob, ann):
        await session.call("channels.leave", {"name": "club"})
    await bob.call_refused("forbidden", "channels.join", {"name": "club"})
    await ann.call("channels.invite", {"name": "club", "agent_id": "bob"})  # an owner can invite from outside too
    await ann.call("channels.join", {"name": "club"})


async def test_the_owner_gives_a_channel_away_and_an_operator_acts_where_there_is_none(
    node: Node, ann: WireSession
) -> None:
    bob, eve, mia = await node.agent("bob"), await node.agent("eve"), await node.person("mia")
    await ann.call_refused("invalid_arguments", "channels.set_owner", {"name": "den", "agent_id": "bob"})
    await ann.call("channels.invite", {"name": "den", "agent_id": "bob"})
    await bob.call("channels.join", {"name": "den"})
    await ann.call("channels.set_owner", {"name": "den", "agent_id": "bob"})
    await ann.call_refused("forbidden", "channels.invite", {"name": "den", "agent_id": "eve"})
    assert (await listed(ann))["den"]["owner"] == "bob"
    await mia.call("network.remove", {"agent_id": "bob"})
    assert "owner" not in (await listed(ann))["den"]
    refused = await ann.call_refused("forbidden", "channels.invite", {"name": "den", "agent_id": "eve"})
    assert "has no owner, so only an operator invites" in refused["message"]
    await mia.call("channels.invite", {"name": "den", "agent_id": "eve"})
    await eve.call("channels.join", {"name": "den"})
    await mia.call("channels.set_owner", {"name": "den", "agent_id": "eve"})
    await eve.call("channels.remove", {"name": "den", "agent_id": "ann"})
    # Removes the owner, and the channel has none then.
    await mia.call("channels.remove", {"name": "den", "agent_id": "eve"})
    await eve.call_refused("unknown_recipient", "channels.join", {"name": "den"})
    await mia.call("channels.join", {"name": "den"})
    assert (await mia.call("channels.members", {"name": "den"}))["members"] == ["mia"]


async def test_who_created_a_channel_that_has_lost_its_owner_runs_nothing_of_it(node: Node, ann: WireSession) -> None:
    bob, mia = await node.agent("bob"), await node.person("mia")
    await ann.call("channels.invite", {"name": "club", "agent_id": "bob"})
    await bob.call("channels.join", {"name": "club"})
    await ann.call("channels.set_owner", {"name": "club", "agent_id": "bob"})
    await bob.call("channels.remove", {"name": "club", "agent_id": "ann"})
    await mia.call("channels.remove", {"name": "club", "agent_id": "bob"})
    for session in (ann, bob):  # nor is the owner's name shown
        await session.call_refused("forbidden", "channels.set_history", {"name": "club", "history": "members"})
    assert ((await listed(mia))["club"]["history"], "owner" in (await listed(mia))["club"]) == ("since_join", False)


async def test_who_is_out_of_a_closed_channel_is_not_told_who_came_after(node: Node, ann: WireSession) -> None:
    bob, eve = await node.agent("bob"), await node.agent("eve")
    await ann.call("channels.set_history", {"name": "den", "history": "members"})
    for session, agent_id in ((bob, "bob"), (eve, "eve")):
        await ann.call("channels.invite", {"name": "den", "agent_id": agent_id})
        if session is bob:
            await bob.call("channels.join", {"name": "den"})
            await ann.send("channel:den", "to bob")
            await bob.send("channel:den", "from bob")
    assert (await bob.call("network.list_threads"))["threads"][0]["readers"] == ["ann", "bob"]
    await ann.call("channels.remove", {"name": "den", "agent_id": "bob"})
    await eve.call("channels.join", {"name": "den"})
    assert (await ann.call("network.list_threads"))["threads"][0]["readers"] == ["ann", "bob", "eve"]
    assert (await bob.call("network.list_threads"))["threads"][0]["readers"] == ["ann", "bob"]


async def test_an_open_channel_is_closed_and_keeps_its_members(node: Node, ann: WireSession) -> None:
    bob, eve = await node.agent("bob"), await node.agent("eve")
    await ann.call("channels.create", {"name": "dev"})
    await bob.call("channels.join", {"name": "dev"})
    await ann.call("channels.set_access", {"name": "dev", "access": "closed"})
    await eve.call_refused("unknown_recipient", "channels.join", {"name": "dev"})
    assert "dev" not in await listed(eve)
    await bob.send("channel:dev", "among us")
    await ann.message("among us")


# --- a closed channel looks as if it did not exist


def takes_channel(operation: Operation) -> bool:
    """Whether an argument names a channel, directly or by its thread."""
    fields = {field.name for field in msgspec.structs.fields(operation.args_type)}
    return bool(fields & {"thread_id", "channel"}) or (operation.op.startswith("channels.") and "name" in fields)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "channels.set_topic": {"topic": "x"},
    "channels.set_title": {"title": "x"},
    "channels.set_history": {"history": "members"},
    "channels.set_access": {"access": "open"},
    "channels.invite": {"agent_id": "never"},
    "channels.remove": {"agent_id": "ann"},
    "channels.set_owner": {"agent_id": "ann"},
    "channels.post": {"text": "x"},
    "channels.join": {},
    "channels.leave": {},
    "channels.members": {},
    "network.history": {},
    "network.search": {"query": "inside"},
    "network.cancel": {},
    "network.mark": {},
    "network.take": {},
    "network.give": {},
    "network.cost_report": {},
    "notes.create": {"name": "plan", "text": "x"},
    "notes.list": {},
    "notes.search": {"query": "inside"},
    "polls.create": {"question": "inside", "choices": ["a", "b"]},
    "polls.list": {},
    "messages.pins": {},
    "files.list": {},
    "tasks.create": {"title": "x"},
}
"""Further arguments of operations that name a channel. A separate test covers `channels.create`, because a name can
be used only once.
"""
WHO = ("never", "left", "removed", "uninvited")
Outsiders = dict[str, WireSession]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outsiders() -> AsyncIterator[Outsiders]:
    async with running_node(mods=[*OWN_MODS]) as node:
        ann = await node.agent("ann")
        await ann.call("channels.create", {"name": "cellar", "access": "closed"})
        sessions = {who: await node.agent(who) for who in WHO}
        for who in WHO[1:]:
            await ann.call("channels.invite", {"name": "cellar", "agent_id": who})
        for who in ("left", "removed"):
            await sessions[who].call("channels.join", {"name": "cellar"})
        await sessions["left"].call("channels.leave", {"name": "cellar"})
        for who in ("removed", "uninvited"):
            await ann.call("channels.remove", {"name": "cellar", "agent_id": who})
        file = await ann.call("files.save", {"name": "inside.txt", "content": "inside"})
        told = await ann.send("channel:cellar", {"text": "inside", "files": [{"file": file["file"]}]})
        await ann.call("messages.pin", {"seq": told["seq"]})
        place = {"thread_id": "channel:cellar"}
        await ann.call("notes.create", {**place, "name": "plan", "text": "inside"})
        await ann.call("polls.create", {**place, "question": "inside", "choices": ["a", "b"]})
        await ann.call("tasks.create", {"title": "inside", "channel": "cellar"})
        yield sessions


async def test_every_operation_that_names_a_channel_is_looked_at() -> None:
    assert set(ARGUMENTS) | {"channels.create"} == {op for op, it in OPERATIONS.items() if takes_channel(it)}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("who", WHO)
async def test_a_closed_channel_answers_like_one_that_does_not_exist(outsiders: Outsiders, who: str) -> None:
    session = outsiders[who]
    has_been_in = who in ("left", "removed")
    for op, more in ARGUMENTS.items():
        answers = []
        for name in ("cellar", "nil"):
            is_thread = not op.startswith("channels.")
            if has_been_in and op in ("network.history", "network.mark", "network.search"):
                continue  # the outsider may read messages from its own time in the channel
            place = {"thread_id": f"channel:{name}"} if is_thread else {"name": name}
            if op == "tasks.create":
                place = {"channel": name}
            answer = await session.submit_call(op, {**place, **more}, call_id=f"{op}-{name}")
            answers.append(answer.raw.replace(name, "IT"))
        assert len(set(answers)) <= 1, (op, answers)
    assert "inside" not in (await session.submit_call("tasks.list", {"state": ""})).raw
    assert "no task 1 " in (await session.submit_call("tasks.get", {"task": 1})).raw
    sent = [
        (await session.submit(f"channel:{name}", "x", message_id="m1")).raw.replace(name, "IT")
        for name in ("cellar", "nil")
    ]
    assert sent[0] == sent[1]
    assert "unknown_recipient" in sent[0]
    signals = []
    for name in ("cellar", "nil"):
        await session.send_frame({"type": "signal", "kind": "typing", "body": 1, "to": f"channel:{name}"})
        signals.append((await session.expect("error")).raw.replace(name, "IT"))
    assert signals[0] == signals[1]
    assert "cellar" not in (await session.submit_call("channels.list", {})).raw


@pytest.mark.asyncio(loop_scope="module")
async def test_to_try_names_by_creating_them_ends_with_the_quota(outsiders: Outsiders) -> None:
    async with running_node(limits={"max_created_channels": 1}) as node:
        ann, eve = await node.agent("ann"), await node.agent("eve")
        await ann.call("channels.create", {"name": "cellar", "access": "closed"})
        taken = await eve.call_refused("invalid_arguments", "channels.create", {"name": "cellar"})
        assert "is taken" in taken["message"]
        await eve.call("channels.create", {"name": "mine"})
        refused = [
            (await eve.call_refused("forbidden", "channels.create", {"name": name}, call_id="c1")).raw.replace(
                name, "IT"
            )
            for name in ("cellar", "nil")
        ]
        assert refused[0] == refused[1]


@pytest.mark.parametrize("guest", ["spent", "may_not_join"])
async def test_who_cannot_create_a_channel_is_not_told_which_closed_ones_there_are(guest: str) -> None:
    role = {"ids": ["*"], "create": ["*"], "call": ["*"]}
    rights = {"guests": role, "team": {"ids": ["ann"], "join": ["*"]}} if guest == "may_not_join" else None
    quotas = {"eve": Quota(bytes_per_day=100)} if guest == "spent" else None
    async with running_node(quotas=quotas, rights=rights) as node:
        ann, eve = await node.agent("ann"), await node.agent("eve")
        await ann.call("channels.create", {"name": "cellar", "access": "closed"})
        refused = []
        for name in ("cellar", "closet"):
            answer = await eve.submit_call("channels.create", {"name": name}, call_id="c1")
            refused.append((answer["code"], answer["message"].replace(name, "IT")))
        assert refused[0] == refused[1]
        assert refused[0][0] == ("budget_exhausted" if guest == "spent" else "forbidden")


# --- old ledgers


async def test_a_channel_from_before_is_open_and_has_no_owner(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with running_node(db=db, durability="normal") as node:
        ann = await node.agent("ann")
        await ann.call("channels.create", {"name": "dev"})
        tokens = node.tokens
    await forget_owner(db)
    async with running_node(db=db, durability="normal") as node:
        node.tokens = tokens
        ann, bob, mia = await node.agent("ann"), await node.agent("bob"), await node.person("mia")
        dev = (await listed(bob))["dev"]
        assert (dev["access"], "owner" in dev) == ("open", False)
        await bob.call("channels.join", {"name": "dev"})
        await ann.call_refused("forbidden", "channels.remove", {"name": "dev", "agent_id": "bob"})
        # Allowed as before to the creator.
        await ann.call("channels.set_history", {"name": "dev", "history": "members"})
        await mia.call("channels.set_owner", {"name": "dev", "agent_id": "ann"})
        await ann.call("channels.remove", {"name": "dev", "agent_id": "bob"})


async def forget_owner(db: Path) -> None:
    """Rewrite the channel's row in the format before `access` existed."""
    with closing(sqlite3.connect(db)) as connection:
        old = '{"name":"dev","created_seq":2,"created_by":"ann","topic":"","history":"since_join"}'
        crc = checksum(("channel", "dev", old))
        changed = connection.execute(
            "UPDATE state SET value = ?, crc = ? WHERE tbl = 'channel' AND key = 'dev'", (old, crc)
        )
        assert changed.rowcount == 1
        connection.commit()
