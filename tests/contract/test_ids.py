"""Tests of IDs that nobody can get by first use: IDs that look like a role, an address, the network, a mod, or
another participant.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.core import indexes
from roundelay.network.core import state as state_module
from roundelay.network.core.reserved_ids import NOBODY, PLACES, POWERS, ROLES, skeleton
from roundelay.network.core.state import State
from roundelay.network.core.tables import Participant, TableWrite
from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, expect_error, hello_frame, make_token


async def refusal(node: Node, agent_id: str) -> Frame:
    """Return the error for a local newcomer with this ID. The hub closes the connection with 4403."""
    session = await node.connect()
    await session.send_frame(hello_frame(agent_id, token=make_token()))
    error = expect_error(await session.next_frame(), "forbidden")
    assert await session.closed() == 4403
    return error


async def make_operator_token(operator: WireSession, agent_id: str) -> tuple[str, Any]:
    token = make_token()
    digest = hashlib.sha256(token.encode()).hexdigest()
    args = {"agent_id": agent_id, "kind": "agent", "token_hash": digest}
    return token, await operator.call("network.create_token", args)


RESERVED = sorted(ROLES | PLACES | POWERS | NOBODY)


async def test_no_reserved_word_is_given_out_by_first_use(node: Node) -> None:
    for word in RESERVED:
        error = await refusal(node, word)
        assert f"{word} means a role" in error["message"]
        assert f"roundelay token create {word}" in error["message"]


@pytest.mark.parametrize(
    ("agent_id", "word"),
    [
        ("systern", "system"), ("adm1n", "admin"), ("0wner", "owner"), ("user-", "user"), ("n0body", "nobody"), ("r00t_", "root"),
        ("r0undelay-cli", "roundelay-"), ("roundelay.cli", "roundelay-"), ("roundelay--cli", "roundelay-"),
        ("channels", "the mod channels"), ("discovery", "the mod discovery"), ("d1scovery", "the mod discovery"),
    ],
)  # fmt: skip
async def test_what_looks_like_a_reserved_word_is_none_of_first_use_either(
    node: Node, agent_id: str, word: str
) -> None:
    assert word in (await refusal(node, agent_id))["message"]


@pytest.mark.parametrize(
    "agent_id",
    ["system-tests", "users", "user1", "walls", "hubert", "tasks", "roundelayer", "a11", "agent", "moderator", "me"],
)
async def test_other_ids_that_hold_such_words_are_given_out(node: Node, agent_id: str) -> None:
    assert (await node.agent(agent_id)).welcome["resume"] == "new"


LOOK_ALIKES = [
    ("billing", "bi11ing"), ("billing", "bllllng"), ("desk0", "desko"), ("modern", "rnodern"), ("modern", "modem"), ("writer", "vvriter"),
    ("desk", "desk-"), ("desk", "desk."), ("desk", "desk__"), ("front-desk", "front--desk"), ("front-desk", "front_desk"),
]  # fmt: skip


@pytest.mark.parametrize(("known", "other"), [*LOOK_ALIKES, *((b, a) for a, b in LOOK_ALIKES)])
async def test_nobody_gets_an_id_that_looks_like_a_known_one(node: Node, known: str, other: str) -> None:
    await node.agent(known)
    error = await refusal(node, other)
    assert f"{other} looks like {known}" in error["message"]
    assert f"roundelay token create {other}" in error["message"]
    assert (await node.agent(known)).welcome["resume"] == "full"


async def test_people_those_removed_and_those_who_never_came_have_no_look_alikes_either(node: Node) -> None:
    mia = await node.person("mia")
    await node.agent("gone")
    await mia.call("network.remove", {"agent_id": "gone"})
    await make_operator_token(mia, "later")
    await make_operator_token(mia, "revoked")
    await mia.call("network.revoke_token", {"agent_id": "revoked"})
    for agent_id in ("rnia", "g0ne", "1ater", "rev0ked"):
        assert "looks like" in (await refusal(node, agent_id))["message"]


async def test_two_look_alikes_at_the_same_moment_are_one_too_many(node: Node) -> None:
    sessions = [await node.connect() for _ in range(2)]
    for session, agent_id in zip(sessions, ("twin", "tw1n"), strict=True):
        await session.send_frame(hello_frame(agent_id, token=make_token()))
    assert sorted([(await session.next_frame())["type"] for session in sessions]) == ["error", "welcome"]


async def test_an_operator_gives_out_any_id_and_is_warned(node: Node) -> None:
    mia = await node.person("mia")
    await node.agent("desk")
    for agent_id, why in (("assistant", "a role"), ("desk-", "looks like desk"), ("channels", "the mod channels")):
        token, value = await make_operator_token(mia, agent_id)
        assert why in value["warning"]
        assert (await node.join(agent_id, kind="agent", token=token)).welcome["resume"] == "new"
        _, value = await make_operator_token(mia, agent_id)
        assert value == {}  # the ID is bound now
    _, value = await make_operator_token(mia, "desk")
    assert value == {}


async def test_nobody_gets_the_id_under_which_the_hub_writes(node: Node) -> None:
    mia = await node.person("mia")
    args = {"agent_id": "network", "kind": "service", "token_hash": "0" * 64}
    refused = await mia.call_refused("invalid_arguments", "network.create_token", args)
    assert "network is the sender of the hub's own messages" in refused["message"]
    session = await node.connect()
    await session.send_frame(hello_frame("network", kind="human", token=node.owner_token))
    assert (
        "network is the sender of the hub's own messages"
        in expect_error(await session.next_frame(), "forbidden")["message"]
    )
    assert await session.closed() == 4403


async def test_who_is_in_a_ledger_with_such_an_id_goes_on(tmp_path: Path) -> None:
    db = tmp_path / "node.db"
    tokens = {}
    async with running_node(db=db, durability="full") as node:
        mia = await node.person("mia")
        for agent_id in ("system", "desk", "desk-"):
            tokens[agent_id], _ = await make_operator_token(mia, agent_id)
            await node.join(agent_id, kind="agent", token=tokens[agent_id])
    async with running_node(db=db, durability="full") as node:
        for agent_id, token in tokens.items():
            assert (await node.join(agent_id, kind="agent", token=token)).welcome["resume"] == "full"
        await refusal(node, "desk--")


def test_a_skeleton_is_what_the_eye_keeps() -> None:
    for one, other in LOOK_ALIKES:
        assert skeleton(one) == skeleton(other)
    different = ["agent1", "agent2", "agent11", "a.b", "ab", "desk", "desks", "c3", "s5", "5s", "nn", "uu", "cl", "d"]
    assert len({skeleton(it) for it in different}) == len(different)


def test_one_more_among_many_is_compared_with_its_look_alikes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    state.apply_writes(
        TableWrite("participant", f"a{it}z", Participant(f"a{it}z", "agent", it + 1)) for it in range(2000)
    )
    seen: list[str] = []
    for module in (state_module, indexes):
        monkeypatch.setattr(module, "skeleton", lambda agent_id: seen.append(agent_id) or skeleton(agent_id))
    draft = state.draft()
    assert set(draft.look_alikes("alo_z")) == set()
    assert set(draft.look_alikes("a1oz")) == {"a10z"}
    draft.apply_writes([TableWrite("participant", "a1oz", Participant("a1oz", "agent", 3000))])
    state.merge(draft)
    assert set(state.look_alikes("aloz")) == {"a10z", "a1oz"}
    assert len(seen) == 5
