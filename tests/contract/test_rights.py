"""Tests of a rights file on the wire: every operation and frame with every role and every relation to a channel. The
tests also check deliveries and reads.

The conversation takes place on a node without a rights file. Then a node with one opens the same ledger. So each role
has each relation, even a relation that it could not reach under its rights.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import pytest_asyncio

from roundelay.app import OWN_MODS
from roundelay.network import frames
from roundelay.network.config import Role
from roundelay.network.core.rights import VERBS
from roundelay.network.ledger.schema import checksum
from roundelay.network.operations import list_operations
from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, new_id

EVERYTHING: dict[str, Any] = {
    "send": ["*", "mod:*"], "broadcast": True, "create": ["*"], "join": ["*"], "read": ["*"], "write": ["*"], "take": ["*"],
    "call": ["*"],
}  # fmt: skip
ROLES: dict[str, set[str]] = {
    "full": set(EVERYTHING),
    "deaf": set(EVERYTHING) - {"read"},
    "mute": {"read", "join", "call"},
    "idle": set(EVERYTHING) - {"call"},
    "none": set(),
}
"""Rights of each role. `none` means participants without a role."""
PAGE: dict[str, Any] = {
    name: {"ids": [f"{name}-*"], **{verb: EVERYTHING[verb] for verb in verbs}} for name, verbs in ROLES.items() if verbs
} | {"boss": {"ids": ["boss", "fake-boss"], "administer": True}}
RELATIONS = ("in", "left", "late", "removed", "excluded", "never")
"""Relations to the closed channel `room`. The relation `excluded` refers to a broadcast."""
INSIDE = ("in", "late")
WHO = [(role, relation) for role in ROLES for relation in RELATIONS]


class Scene(NamedTuple):
    node: Node
    ann: WireSession
    sessions: dict[tuple[str, str], WireSession]
    given: dict[tuple[str, str], list[str]]
    """Contents that each session received after the restart."""
    during: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    db: Path = tmp_path_factory.mktemp("rights") / "team.db"
    async with running_node(db=db, durability="normal", mods=[*OWN_MODS]) as node:
        ann = await node.agent("ann")
        sessions = {who: await node.agent("-".join(who)) for who in WHO}
        await ann.call("channels.create", {"name": "room", "access": "closed"})
        for (role, relation), session in sessions.items():
            if relation in ("in", "left", "late", "removed"):
                await ann.call("channels.invite", {"name": "room", "agent_id": f"{role}-{relation}"})
                if relation != "late":
                    await session.call("channels.join", {"name": "room"})
        await ann.send("channel:room", "canary-before")
        for (role, relation), session in sessions.items():
            match relation:
                case "left":
                    await session.call("channels.leave", {"name": "room"})
                case "removed":
                    await ann.call("channels.remove", {"name": "room", "agent_id": f"{role}-{relation}"})
                case "late":
                    await session.call("channels.join", {"name": "room"})
        during = (await ann.send("channel:room", "canary-during"))["seq"]
        await ann.call("notes.create", {"thread_id": "channel:room", "name": "plan", "text": "canary-note"})
        await ann.call("tasks.create", {"title": "canary-task", "channel": "room"})
        await ann.call("tasks.claim", {"task": 1, "minutes": 1440})
        await ann.call("timers.create", {"text": "canary-timer", "in_minutes": 600, "cause": during})
        left_out = [f"{role}-excluded" for role in ROLES]
        await ann.send("broadcast", "canary-broadcast", exclude_agent_ids=left_out)
        await ann.send("broadcast", "the end")
        tokens = node.tokens
    page = PAGE | {"host": {"ids": ["ann"], **EVERYTHING}}
    limits = {"root_messages_per_s": 100_000}
    async with running_node(db=db, durability="normal", mods=[*OWN_MODS], rights=page, limits=limits) as node:
        node.tokens = tokens
        ann = await node.agent("ann")
        sessions = {who: await node.agent("-".join(who)) for who in WHO}
        given = {who: await session.contents_until("the end") for who, session in sessions.items()}
        yield Scene(node, ann, sessions, given, during)


def may_read(role: str, relation: str) -> list[str]:
    """Return the channel's contents that a participant receives and may read, by docs/protocol.md and the rights
    file.
    """
    before = relation in ("in", "left", "removed")
    return [
        *(["canary-before"] if before and "read" in ROLES[role] else []),
        *(["canary-during"] if relation in INSIDE and "read" in ROLES[role] else []),
    ]


# --- the table of expected answers

Expected = Callable[[str, str], str]
"""Function from role and relation to the expected result: ``ok`` or an error code. The test checks the right to call
the operation first.
"""


def always(answer: str) -> Expected:
    return lambda role, relation: answer


def for_members(inside: str = "ok", verb: str = "") -> Expected:
    """Operations for members only. To others, the channel does not exist."""

    def expect(role: str, relation: str) -> str:
        if verb and verb not in ROLES[role]:
            return "forbidden"
        return inside if relation in INSIDE else "unknown_recipient"

    return expect


def for_readers(reader: str = "ok", verb: str = "") -> Expected:
    def expect(role: str, relation: str) -> str:
        if "canary-during" not in may_read(role, relation):
            return "unknown_message"
        return "forbidden" if verb and verb not in ROLES[role] else reader

    return expect


def for_who_is_in(reader: str, verb: str = "") -> Expected:
    """Operations in a thread for those who would receive its next message."""

    def expect(role: str, relation: str) -> str:
        if relation not in INSIDE or "read" not in ROLES[role]:
            return "unknown_message"
        return "forbidden" if verb and verb not in ROLES[role] else reader

    return expect


def for_who_reads(reader: str) -> Expected:
    """Operations on a message for those who may write in its thread."""
    return for_readers(reader, "write")


def by_verb(verb: str) -> Expected:
    return lambda role, relation: "ok" if verb in ROLES[role] else "forbidden"


def for_who_was_in(role: str, relation: str) -> str:
    return "ok" if relation in ("in", "late", "left", "removed") else "unknown_message"


def for_who_sees_the_task(reader: str) -> Expected:
    """Operations on a task of the channel that its creator holds. To others, the task does not exist."""

    def expect(role: str, relation: str) -> str:
        return reader if relation in INSIDE and "read" in ROLES[role] else "invalid_arguments"

    return expect


def for_reminders(role: str, relation: str) -> str:
    """A timer for another participant in a conversation."""
    return for_readers()(role, relation) if "send" in ROLES[role] else "forbidden"


NO_FILE = "f-00000000000-00000000"
OPERATORS = always("forbidden")
HASH = "0" * 64
NOTE = {"note": "channel:room/plan"}
POLL = {"question": "x", "choices": ["a", "b"]}
OPERATIONS: dict[str, tuple[Expected, Callable[[int], dict[str, Any]]]] = {
    "network.info": (always("ok"), lambda seq: {}),
    "network.list_agents": (always("ok"), lambda seq: {}),
    "network.list_threads": (always("ok"), lambda seq: {}),
    "network.history": (for_who_was_in, lambda seq: {"thread_id": "channel:room"}),
    "network.memory": (for_readers(), lambda seq: {"threads": ["channel:room"], "trigger": seq}),
    "network.search": (always("ok"), lambda seq: {"query": "canary"}),
    "network.window": (for_readers(), lambda seq: {"trigger": seq, "visibility": "all"}),
    "network.message_status": (for_readers(), lambda seq: {"seq": seq}),
    "network.why": (for_readers(), lambda seq: {"seq": seq}),
    "network.impact": (for_readers(), lambda seq: {"seq": seq}),
    "network.records": (always("ok"), lambda seq: {"reaction": "r"}),
    "network.spent": (for_readers(), lambda seq: {"seq": seq}),
    "network.usage": (always("ok"), lambda seq: {}),
    "network.explain": (for_readers(), lambda seq: {"seq": seq}),
    "network.effects": (for_readers(), lambda seq: {"seq": seq}),
    "network.work": (always("ok"), lambda seq: {"reaction": "r", "agent_id": "ann"}),
    "network.cost_report": (always("ok"), lambda seq: {}),
    "network.costs": (always("ok"), lambda seq: {"uses": [{"model": "m", "prompt_tokens": 1}]}),
    "network.receive": (always("ok"), lambda seq: {}),
    "network.acknowledge": (for_readers(), lambda seq: {"seqs": [seq]}),
    "network.nack": (for_readers(), lambda seq: {"seq": seq, "reason": "x"}),
    "network.quotas": (always("ok"), lambda seq: {}),
    "network.watch": (always("ok"), lambda seq: {}),
    "network.open_items": (for_readers(), lambda seq: {"root": seq}),
    "network.open_reactions": (always("ok"), lambda seq: {}),
    "network.approvals": (always("ok"), lambda seq: {}),
    "network.approvers": (for_readers(), lambda seq: {"names": ["ann"], "seqs": [seq]}),
    "network.decide": (for_readers("forbidden"), lambda seq: {"seq": seq, "decision": "/approve"}),
    "network.cancel": (always("ok"), lambda seq: {"thread_id": "channel:room"}),
    "network.inbox": (always("ok"), lambda seq: {}),
    "network.dismiss": (always("ok"), lambda seq: {"kind": "question", "seq": seq}),
    "network.mark": (for_who_was_in, lambda seq: {"thread_id": "channel:room", "is_pinned": True}),
    "network.take": (for_who_is_in("forbidden"), lambda seq: {"thread_id": "channel:room"}),
    "network.give": (for_who_is_in("forbidden"), lambda seq: {"thread_id": "channel:room"}),
    "network.resume_root": (for_readers("forbidden"), lambda seq: {"root": seq}),
    "network.stopped": (OPERATORS, lambda seq: {}),
    "network.resume_agent": (OPERATORS, lambda seq: {"agent_id": "ann"}),
    "network.remove": (OPERATORS, lambda seq: {"agent_id": "ann"}),
    "network.create_login": (OPERATORS, lambda seq: {"agent_id": "x", "login_hash": HASH}),
    "network.create_token": (OPERATORS, lambda seq: {"agent_id": "x", "kind": "agent", "token_hash": HASH}),
    "network.list_tokens": (OPERATORS, lambda seq: {}),
    "network.revoke_token": (OPERATORS, lambda seq: {"agent_id": "ann"}),
    "network.dead_letters": (always("ok"), lambda seq: {}),
    "network.retry_dead_letter": (always("unknown_message"), lambda seq: {"seq": seq}),
    "network.drop_dead_letter": (always("unknown_message"), lambda seq: {"seq": seq}),
    "network.log": (OPERATORS, lambda seq: {}),
    "network.rows": (OPERATORS, lambda seq: {}),
    "network.status": (OPERATORS, lambda seq: {}),
    "network.screens": (always("ok"), lambda seq: {}),
    "network.node_agents": (OPERATORS, lambda seq: {}),
    "network.control_agent": (OPERATORS, lambda seq: {"agent_id": "ann", "action": "stop"}),
    "channels.create": (by_verb("create"), lambda seq: {"name": f"new-{new_id('n').lower()}"}),
    "channels.join": (for_members(verb="join"), lambda seq: {"name": "room"}),
    "channels.invite": (for_members("forbidden"), lambda seq: {"name": "room", "agent_id": "ann"}),
    "channels.remove": (for_members("forbidden"), lambda seq: {"name": "room", "agent_id": "ann"}),
    "channels.set_owner": (for_members("forbidden"), lambda seq: {"name": "room", "agent_id": "ann"}),
    "channels.set_access": (for_members("forbidden"), lambda seq: {"name": "room", "access": "open"}),
    "channels.set_history": (for_members("forbidden"), lambda seq: {"name": "room", "history": "members"}),
    "channels.set_title": (for_members("forbidden"), lambda seq: {"name": "room", "title": "x"}),
    "channels.set_topic": (for_members(), lambda seq: {"name": "room", "topic": "x"}),
    "channels.post": (for_members(verb="write"), lambda seq: {"name": "room", "text": "x"}),
    "channels.reply": (for_readers(verb="write"), lambda seq: {"reply_to": seq, "text": "x"}),
    "channels.list": (always("ok"), lambda seq: {}),
    "channels.members": (for_members(verb="read"), lambda seq: {"name": "room"}),
    "discovery.find": (always("ok"), lambda seq: {"query": "canary"}),
    "messages.react": (for_who_reads("ok"), lambda seq: {"seq": seq, "emoji": "+1"}),
    "messages.pin": (for_who_reads("ok"), lambda seq: {"seq": seq}),
    "messages.unpin": (for_who_reads("ok"), lambda seq: {"seq": seq}),
    "messages.edit": (for_readers("forbidden"), lambda seq: {"seq": seq, "text": "x"}),
    "messages.delete": (for_readers("forbidden"), lambda seq: {"seq": seq}),
    "messages.edits": (for_readers(), lambda seq: {"seq": seq}),
    "messages.reactions": (always("ok"), lambda seq: {"seqs": [seq]}),
    "messages.pins": (always("ok"), lambda seq: {"thread_id": "channel:room"}),
    "notes.create": (
        for_who_is_in("ok", "write"),
        lambda seq: {"thread_id": "channel:room", "name": new_id("n"), "text": "x"},
    ),
    "notes.write": (for_who_is_in("ok", "write"), lambda seq: {**NOTE, "text": "x", "expected_version": 999}),
    "notes.append": (for_who_is_in("ok", "write"), lambda seq: {**NOTE, "text": "x"}),
    "notes.patch": (
        for_who_is_in("ok", "write"),
        lambda seq: {**NOTE, "find": "canary-note", "replace": "canary-note"},
    ),
    "notes.revert": (for_who_is_in("ok", "write"), lambda seq: {**NOTE, "version": 1, "expected_version": 1}),
    "notes.propose": (for_who_is_in("ok", "write"), lambda seq: {**NOTE, "text": "x", "expected_version": 1}),
    "notes.decide": (for_who_is_in("invalid_arguments"), lambda seq: {**NOTE, "proposal": 999, "accept": True}),
    "notes.set_access": (for_who_is_in("forbidden"), lambda seq: {**NOTE, "access": "open"}),
    "notes.delete": (for_who_is_in("forbidden"), lambda seq: NOTE),
    "notes.read": (for_who_is_in("ok"), lambda seq: NOTE),
    "notes.history": (for_who_is_in("ok"), lambda seq: NOTE),
    "notes.diff": (for_who_is_in("ok"), lambda seq: {**NOTE, "version": 1}),
    "notes.proposals": (for_who_is_in("ok"), lambda seq: NOTE),
    "notes.list": (always("ok"), lambda seq: {}),
    "notes.search": (always("ok"), lambda seq: {"query": "canary"}),
    "polls.create": (for_who_is_in("ok", "write"), lambda seq: {**POLL, "thread_id": "channel:room"}),
    "polls.vote": (always("unknown_message"), lambda seq: {"poll": 1, "choice": "a"}),
    "polls.close": (always("unknown_message"), lambda seq: {"poll": 1}),
    "polls.results": (always("unknown_message"), lambda seq: {"poll": 1}),
    "polls.list": (always("ok"), lambda seq: {}),
    "reservations.reserve": (always("ok"), lambda seq: {"paths": ["a.py"]}),
    "reservations.reserve_all": (always("ok"), lambda seq: {"paths": ["a.py"]}),
    "tasks.create": (for_members(), lambda seq: {"title": "x", "channel": "room"}),
    "tasks.update": (for_who_sees_the_task("forbidden"), lambda seq: {"task": 1, "due": ""}),
    "tasks.claim": (for_who_sees_the_task("ok"), lambda seq: {"task": 1}),
    "tasks.progress": (always("invalid_arguments"), lambda seq: {"task": 1, "note": "x"}),
    "tasks.complete": (always("invalid_arguments"), lambda seq: {"task": 1}),
    "tasks.fail": (always("invalid_arguments"), lambda seq: {"task": 1, "reason": "x"}),
    "tasks.release": (for_who_sees_the_task("forbidden"), lambda seq: {"task": 1}),
    "tasks.cancel": (for_who_sees_the_task("forbidden"), lambda seq: {"task": 1}),
    "tasks.reopen": (for_who_sees_the_task("forbidden"), lambda seq: {"task": 1}),
    "tasks.get": (for_who_sees_the_task("ok"), lambda seq: {"task": 1}),
    "tasks.list": (always("ok"), lambda seq: {}),
    "timers.create": (for_reminders, lambda seq: {"text": "x", "to": "ann", "in_minutes": 600, "cause": seq}),
    "timers.cancel": (always("invalid_arguments"), lambda seq: {"timer": 1}),
    "timers.list": (always("ok"), lambda seq: {}),
    "reservations.list": (always("ok"), lambda seq: {}),
    "reservations.release": (always("ok"), lambda seq: {}),
    "notify_when.answered": (for_readers(), lambda seq: {"seq": seq}),
    "notify_when.finished": (for_readers(), lambda seq: {"seq": seq, "agent_id": "ann"}),
    "notify_when.cancel": (always("ok"), lambda seq: {"seq": seq}),
    "files.upload": (always("ok"), lambda seq: {"upload_id": "u", "offset": 0, "data": "YQ=="}),
    "files.create": (always("invalid_arguments"), lambda seq: {"upload_id": "none", "sha256": "0" * 64, "name": "a"}),
    "files.save": (always("ok"), lambda seq: {"name": "a.md", "content": "a"}),
    "files.attach": (always("invalid_arguments"), lambda seq: {"to": "agent:ann", "files": [NO_FILE]}),
    "files.delete": (always("invalid_arguments"), lambda seq: {"file": NO_FILE}),
    "files.read": (always("invalid_arguments"), lambda seq: {"file": NO_FILE}),
    "files.download": (always("invalid_arguments"), lambda seq: {"file": NO_FILE}),
    "files.list": (always("ok"), lambda seq: {}),
    # This call must be last, because it changes the membership.
    "channels.leave": (for_members(), lambda seq: {"name": "room"}),
}  # fmt: skip
Ask = Callable[[int], dict[str, Any]]
FRAMES: dict[str, list[tuple[Expected, Ask]]] = {
    "send": [
        (by_verb("send"), lambda seq: {"to": "agent:ann"}),
        (by_verb("send"), lambda seq: {"to": "mod:channels"}),
        (by_verb("broadcast"), lambda seq: {"to": "broadcast"}),
        (for_members(verb="write"), lambda seq: {"to": "channel:room"}),
    ],
    "signal": [
        (by_verb("send"), lambda seq: {"to": "agent:ann"}),
        (by_verb("send"), lambda seq: {"to": "mod:channels"}),
        (by_verb("broadcast"), lambda seq: {"to": "broadcast"}),
        (for_members(verb="write"), lambda seq: {"to": "channel:room"}),
    ],
    "record": [(for_readers(), lambda seq: {"trigger": seq})],
    "nack": [(always("invalid_arguments"), lambda seq: {"seq": 2**40, "reason": "x"})],
    "ack": [(always("ok"), lambda seq: {"seq": 1})],
    "call": [],  # OPERATIONS
    "batch": [],  # the frames of a batch have their own rows
    "hello": [],  # the rights file does not limit who may join
    "bye": [],
}
"""Expected results by frame. Separate tests below cover signals to a thread."""


async def test_every_operation_frame_and_verb_has_its_row() -> None:
    assert set(OPERATIONS) == set(list_operations(mod() for mod in OWN_MODS.values()))
    assert set(FRAMES) == {frame.__struct_config__.tag for frame in get_args(frames.ClientFrame)}
    assert set(EVERYTHING) | {"administer"} == set(VERBS) == set(Role.model_fields) - {"ids", "kinds"}


def is_by_the_page(op: str, role: str, expected: str, answer: Frame) -> bool:
    """Whether a refusal by the rights file names the participant and the rule to change."""
    has_role = bool(ROLES[role])
    wanted = f"rights.{role}." if has_role else "it has no role in the node's `rights`"
    return f"{role}-" in answer["message"] and wanted in answer["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("role", ROLES)
async def test_what_somebody_may_is_what_its_row_says(scene: Scene, role: str, relation: str) -> None:
    session = scene.sessions[role, relation]
    assert scene.given[role, relation] == may_read(role, relation) + (
        [] if relation == "excluded" else ["canary-broadcast"]
    ), "delivered"
    for kind, rows in FRAMES.items():
        for expect, ask in rows:
            expected = expect(role, relation)
            fields = ask(scene.during)
            answer = await say(session, kind, fields)
            assert (answer["code"] if answer["type"] == "error" else "ok") == expected, (kind, fields, answer)
            if expected == "forbidden":
                assert is_by_the_page(kind, role, expected, answer), answer
    for op, (expect, make) in OPERATIONS.items():
        may_call = "call" in ROLES[role]
        expected = expect(role, relation) if may_call else "forbidden"
        answer = await session.submit_call(op, make(scene.during))
        assert (answer["code"] if answer["type"] == "error" else "ok") == expected, (op, answer)
        if not may_call:
            assert is_by_the_page(op, role, expected, answer), answer
            assert op in answer["message"]
        for canary in ("canary-before", "canary-during"):
            shown = canary in answer.raw
            assert not shown or canary in may_read(role, relation), (op, answer)
        assert "canary-timer" not in answer.raw, op
        if "canary-note" in answer.raw or "canary-task" in answer.raw:
            assert relation in INSIDE
            assert "read" in ROLES[role]
        if op in ("network.history", "network.search") and expected == "ok":
            found = [it for it in ("canary-before", "canary-during") if it in answer.raw]
            assert found == may_read(role, relation)
        if op == "channels.list" and expected == "ok":
            assert ("room" in answer.raw) == (relation in INSIDE and "read" in ROLES[role])


async def say(session: WireSession, kind: str, fields: dict[str, Any]) -> Frame:
    """Send a frame. Return the frame's answer, or that of a following invalid frame if the frame has none."""
    if kind == "send":
        return await session.submit(fields["to"], "x")
    if kind == "record":
        return await session.submit_record(new_id("r"), "started", fields)
    more = {"kind": "typing", "body": 1} if kind == "signal" else {}
    await session.send_frame({"type": kind, **more, **fields})
    if kind == "nack":
        return await session.expect("error")
    await session.send_frame({"type": "ack", "seq": 2**40})
    answer = await session.expect("error")
    if "highest seq that was delivered" in answer["message"]:
        return Frame({"type": "none"})
    assert "highest seq that was delivered" in (await session.expect("error"))["message"]
    return answer


# --- separate cases


async def test_who_is_written_to_goes_by_its_id_its_kind_or_its_role() -> None:
    page = {
        "guests": {"ids": ["guest-*"], "send": ["desk", "role:staff"]},
        "staff": {"kinds": ["human"], "send": ["*"], "call": ["network.*"]},
    }
    async with running_node(rights=page) as node:
        mia = await node.person("mia")
        desk, guest, other = await node.agent("desk"), await node.agent("guest-1"), await node.agent("guest-2")
        await guest.send("agent:desk", "hi desk")
        await guest.send("agent:mia", "hi mia")
        await guest.send("agent:guest-1", "to myself")
        refused = await guest.refused("forbidden", "agent:guest-2")
        assert refused["message"] == (
            "guest-1 may not send to agent:guest-2: its role guests does not allow it; the rule would be "
            "rights.guests.send: [guest-2] in the node's file."
        )
        await guest.refused("unknown_recipient", "agent:nobody")
        refused = await desk.refused("forbidden", "agent:guest-1")
        assert "it has no role in the node's `rights`" in refused["message"]
        assert await desk.contents_until("hi desk") == []
        await mia.send("agent:guest-2", "anybody")
        await other.message("anybody")


async def test_people_whose_role_administers_are_operators_and_agents_are_not(tmp_path: Path) -> None:
    page = PAGE | {"admins": {"ids": ["boss"], "kinds": ["human"], "administer": True}}
    async with running_node(db=tmp_path / "a.db", durability="normal") as node:
        await node.invite(await node.person("host"), "boss")
        tokens = node.tokens
    async with running_node(db=tmp_path / "a.db", durability="normal", rights=page) as node:
        boss = await node.join("boss", kind="human", token=tokens["boss"])
        await boss.call("network.status")
        await boss.call("channels.create", {"name": "dev"})
        fake = await node.agent("fake-boss")
        await fake.call_refused("forbidden", "network.status")


async def test_what_was_stored_before_a_right_was_taken_is_answered_and_delivered(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    async with running_node(db=db, durability="normal", mods=[*OWN_MODS]) as node:
        ann, bob = await node.agent("ann"), await node.agent("bob")
        first = await ann.send("agent:bob", "as long as I may", message_id="m1")
        made = await ann.call("channels.create", {"name": "dev"}, call_id="c1")
        tokens = node.tokens
    async with running_node(db=db, durability="normal", rights={"r": {"ids": ["zoe"]}}) as node:
        node.tokens = tokens
        ann, bob = await node.agent("ann"), await node.agent("bob")
        await bob.message("as long as I may")
        assert await ann.send("agent:bob", "as long as I may", message_id="m1") == first | {"duplicate": True}
        assert await ann.call("channels.create", {"name": "dev"}, call_id="c1") == made
        await ann.refused("forbidden", "agent:bob", message_id="m2")


async def test_signals_reach_nobody_to_whom_a_message_could_not_go() -> None:
    everybody = {"ids": ["ann", "bob", "eve"], "join": ["*"], "create": ["*"], "call": ["*"], "write": ["*"]}
    page = {
        "all": everybody,
        "readers": {"ids": ["ann", "bob"], "read": ["*"]},
        "ann": {"ids": ["ann"], "send": ["bob"]},
    }
    async with running_node(rights=page) as node:
        ann, bob, eve = await node.agent("ann"), await node.agent("bob"), await node.agent("eve")
        for session in (ann, bob, eve):
            await session.call("network.watch", {"signals": True})
        await ann.call("channels.create", {"name": "dev"})
        for session in (bob, eve):
            await session.call("channels.join", {"name": "dev"})
        sent = await ann.send("agent:bob", "private")
        said = await ann.send("channel:dev", "in dev")
        typing = {"type": "signal", "kind": "typing"}
        # bob may not write to ann
        await bob.send_frame({**typing, "body": 1, "thread_id": sent["thread_id"], "trigger": sent["seq"]})
        await bob.send_frame({**typing, "body": 2, "to": "agent:ann"})
        assert "bob may not send to agent:ann" in (await bob.expect("error"))["message"]
        await bob.send_frame({**typing, "body": 3, "thread_id": "channel:dev", "trigger": said["seq"]})
        assert (await ann.expect("signal"))["body"] == 3
        await ann.send_frame({**typing, "body": 4, "to": "channel:dev"})
        assert (await bob.expect("signal"))["body"] == 4
        await ann.send("channel:dev", "the end")
        await bob.contents_until("the end")
        # eve is a member, but may not read
        await eve.call("network.info")
        assert [frame["type"] for frame in eve.unread] == []


async def test_what_streams_of_an_answer_reaches_nobody_who_may_not_read_the_answer() -> None:
    rights = {"all": {"ids": ["*"], **EVERYTHING, "read": []}, "team": {"ids": ["ann", "bob"], "read": ["*"]}}
    async with running_node(rights=rights) as node:
        ann, bob, eve = await node.agent("ann"), await node.agent("bob"), await node.agent("eve")
        await ann.call("channels.create", {"name": "dev"})
        for session in (bob, eve):
            await session.call("channels.join", {"name": "dev"})
            await session.call("network.watch", {"signals": True})
        question = (await eve.send("channel:dev", "what is it?"))["seq"]
        delta = {"type": "signal", "kind": "delta", "thread_id": "channel:dev", "trigger": question}
        await ann.send_frame({**delta, "body": "it is a canary"})
        await bob.expect("signal", body="it is a canary")
        await eve.settle()
        assert [frame for frame in eve.unread if frame["type"] == "signal"] == []


async def test_a_person_who_may_not_read_a_channel_is_in_no_audience_of_it() -> None:
    page = {
        "all": {
            "ids": ["ann", "bob", "mia"],
            "join": ["*"],
            "create": ["*"],
            "call": ["*"],
            "write": ["*"],
            "send": ["*"],
        },
        "readers": {"ids": ["ann", "bob"], "read": ["*"]},
    }
    async with running_node(rights=page) as node:
        mia, ann, bob = await node.person("mia"), await node.agent("ann"), await node.agent("bob")
        await ann.call("channels.create", {"name": "dev"})
        for session in (mia, bob):
            await session.call("channels.join", {"name": "dev"})
        said = await ann.send("channel:dev", "not for mia")
        status = await ann.call("network.message_status", {"seq": said["seq"]})
        assert [it["agent_id"] for it in status["recipients"]] == ["bob"]
        [thread] = (await bob.call("network.list_threads"))["threads"]
        assert thread["readers"] == ["ann", "bob"]
        asked = await mia.send("agent:bob", "what do they say?")
        await bob.message("not for mia")
        await bob.message("what do they say?")
        shown = await bob.call("network.window", {"trigger": asked["seq"]})
        assert [it["thread_id"] for it in shown["threads"]] == [asked["thread_id"]]


async def test_another_attempt_of_what_one_may_no_longer_read_does_not_come(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    async with running_node(db=db, durability="normal", mods=[*OWN_MODS]) as node:
        ann, bob = await node.agent("ann"), await node.agent("bob")
        await ann.call("channels.create", {"name": "dev"})
        await bob.call("channels.join", {"name": "dev"})
        said = [await ann.send("channel:dev", "canary"), await ann.send("agent:bob", "to bob")]
        for text, sent in zip(("canary", "to bob"), said, strict=True):
            await bob.message(text)
            await bob.send_frame({"type": "nack", "seq": sent["seq"], "reason": "x", "retry_after_ms": 60_000})
        await bob.send("agent:ann", "what comes after a nack is committed with it")
        tokens = node.tokens
    shorten(db)
    async with running_node(db=db, durability="normal", rights={"bob": {"ids": ["bob"], "send": ["ann"]}}) as node:
        node.tokens = tokens
        bob = await node.agent("bob")
        again = await bob.delivery()
        assert (again["message"]["content"], again["attempt"]) == ("to bob", 2)
        await bob.send("agent:ann", "everything before is answered")
        assert "canary" not in str(bob.unread)


def shorten(db: Path) -> None:
    """Make every failed message of a ledger due at once."""
    with closing(sqlite3.connect(db)) as connection:
        rows = connection.execute("SELECT key, value FROM state WHERE tbl = 'attempt'").fetchall()
        assert len(rows) == 2
        for key, value in rows:
            changed = json.dumps({**json.loads(value), "due_at": 0})
            crc = checksum(("attempt", key, changed))
            connection.execute(
                "UPDATE state SET value = ?, crc = ? WHERE tbl = 'attempt' AND key = ?", (changed, crc, key)
            )
        connection.commit()


async def test_a_service_that_a_reaction_is_for_has_the_roles_of_its_kind() -> None:
    everything = {"send": ["*"], "join": ["*"], "create": ["*"], "read": ["dev"], "call": ["*"]}
    async with running_node(
        rights={"agents": {"ids": ["helper"], **everything}, "ci": {"kinds": ["service"], **everything}}
    ) as node:
        helper, robot = await node.agent("helper"), await node.service("robot")
        await helper.call("channels.create", {"name": "dev"})
        await robot.call("channels.join", {"name": "dev"})
        asked = {"name": "dev", "trigger": (await robot.send("agent:helper", "who is in dev?"))["seq"]}
        assert (await helper.call("channels.members", asked))["members"] == ["helper", "robot"]


async def test_an_explanation_holds_nothing_that_the_page_denies_by_another_operation() -> None:
    calls = ["network.explain", "network.effects", "network.cost_report", "network.why"]
    rights = {"r": {"ids": ["ann", "bob"], "send": ["*"], "call": calls}}
    async with running_node(rights=rights) as node:
        ann, bob = await node.agent("ann"), await node.agent("bob")
        seq = (await ann.send("agent:bob", "hello"))["seq"]
        [step] = (await bob.call("network.explain", {"seq": seq}))["steps"]
        assert step["message"]["seq"] == seq
        for op, args, denied in (
            ("network.effects", {"seq": seq}, "network.impact"),
            ("network.cost_report", {}, "network.usage"),
        ):
            error = await bob.call_refused("forbidden", op, args)
            assert denied in error["message"]
