"""Tests that an answer to an outsider contains nothing of a conversation that it may not read: no text, thread, seq
or reaction. The answer equals the one for things that do not exist.

A table combines all operations of the hub and the included mods with all kinds of outsiders. An operation without a
row fails.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from roundelay.app import OWN_MODS
from roundelay.network.operations import list_operations
from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, new_id

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Secret(NamedTuple):
    """A hidden message with a reaction to it, and the seqs of the reaction's records."""

    name: str
    seq: int
    thread_id: str
    agent_id: str
    reaction: str
    kept: tuple[int, ...] = ()
    file: str = "f-00000000000-00000000"
    """A file that the message attaches."""
    poll: int = 2**40 + 1
    """A poll in the message's thread."""
    task: int = 2**40 + 2
    """A task in the message's conversation."""
    timer: int = 2**40 + 3
    """A timer in the message's conversation."""


NOTHING = Secret("nothing", 2**40, "direct:nobody~nowhere", "nobody", "no-such-reaction")
"""A message that does not exist."""


@dataclass
class Outsider:
    session: WireSession
    hidden: list[Secret]
    own: str
    """The outsider's own channel."""
    task: int
    """The outsider's own task."""
    may_know: set[int] = field(default_factory=set)
    """Seqs named in messages that the outsider received."""


@dataclass
class Scene:
    node: Node
    public: int
    """A message that everybody can read, and that was in the prompt of each hidden reaction."""
    bait: int
    """A message to which the guesser reacts with the reaction IDs of others."""
    outsiders: dict[str, Outsider]


async def attach(session: WireSession, name: str) -> dict[str, Any]:
    """Return message content with a file."""
    file = await session.call("files.save", {"name": f"canary-{name}.txt", "content": f"canary-{name}"})
    return {"text": f"canary-{name}", "files": [{"file": file["file"]}]}


async def react(session: WireSession, agent_id: str, secret: Frame, name: str, public: int, file: str = "") -> Secret:
    """Start a reaction to a message, and write records. Return the message as a secret."""
    reaction, seq = f"reaction-{name}", secret["seq"]
    bodies: dict[str, dict[str, Any]] = {
        "started": {"trigger": seq, "manifest": [public, seq]},
        "model_reply": {"turn": 1, "agent": agent_id, "reply": {"text": f"canary-{name}", "model": "m", "usage": {"prompt_tokens": 7}}},
    }  # fmt: skip
    kept = [(await session.record(reaction, kind, body))["seq"] for kind, body in bodies.items()]
    return Secret(name, seq, secret["thread_id"], agent_id, reaction, tuple(kept), file or NOTHING.file)


async def plan_work(session: WireSession, secret: Secret) -> dict[str, int]:
    """Create a task and a timer in the conversation of a message."""
    task = await session.call("tasks.create", {"title": f"canary-{secret.name}", "body": "b", "cause": secret.seq})
    timer = {"text": f"canary-{secret.name}", "in_minutes": 600, "cause": secret.seq}
    return {"task": task["task"], "timer": (await session.call("timers.create", timer))["timer"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    limits = {"root_messages_per_s": 100_000, "sends_per_s": 100_000}
    async with running_node(limits=limits, mods=[*OWN_MODS]) as node:
        yield await play(node)


async def play(node: Node) -> Scene:
    host = await node.person("host")
    mia = await node.invite(host, "mia")
    helper, worker = await node.agent("helper"), await node.agent("worker")
    sessions = {name: await node.agent(name) for name in KINDS if name not in ("person", "service", "newcomer")}
    sessions["person"] = await node.invite(host, "person")
    sessions["service"] = await node.invite(host, "service", kind="service")
    for number in range(40):  # these messages make all seqs larger than any count
        await host.send("broadcast", f"filler {number}")
    public: int = (await host.send("broadcast", "for everybody"))["seq"]

    await mia.call("channels.create", {"name": "den"})
    for session in (helper, sessions["left"], sessions["away"]):
        await session.call("channels.join", {"name": "den"})
    for name in ("left", "away"):
        await sessions[name].call("channels.leave", {"name": "den"})

    content = await attach(mia, "direct")
    told = await mia.send("agent:helper", content)
    direct = await react(helper, "helper", told, "direct", public, content["files"][0]["file"])
    asked = await react(
        worker, "worker", await helper.send("agent:worker", "canary-asked", cause=told["seq"]), "asked", public
    )
    content = await attach(mia, "channel")
    told_den = await mia.send("channel:den", content)
    polls: dict[str, int] = {}
    in_den = await react(helper, "helper", told_den, "channel", public, content["files"][0]["file"])
    in_reply = await mia.send("channel:den", "canary-reply", reply_to=in_den.seq)
    reply = await react(helper, "helper", in_reply, "reply", public)
    left_out = ["excluded", "observer"]
    content = await attach(mia, "broadcast")
    call_out = await mia.send("broadcast", content, exclude_agent_ids=left_out)
    broadcast = await react(worker, "worker", call_out, "broadcast", public, content["files"][0]["file"])
    in_thread = await worker.send("broadcast", "canary-answer", reply_to=broadcast.seq, cause=broadcast.seq)
    answer = await react(helper, "helper", in_thread, "answer", public)
    await mia.call("notes.create", {"thread_id": "channel:den", "name": "plan", "text": "for members"})
    await mia.call("notes.create", {"thread_id": "broadcast", "name": "public", "text": "for all"})
    for writer, secret in ((mia, direct), (worker, asked), (mia, reply), (worker, answer)):
        text = f"canary-{secret.name} [[broadcast/public]]"
        note = {"thread_id": secret.thread_id, "name": "plan", "text": text, "cause": secret.seq}
        await writer.call("notes.create", note)
        await writer.call("notes.propose", {"note": f"{secret.thread_id}/plan", "text": text, "expected_version": 1})
    for reader, secret in ((mia, direct), (helper, asked), (helper, in_den), (mia, reply)):
        await reader.call("messages.pin", {"seq": secret.seq})
        await reader.call("messages.react", {"seq": secret.seq, "emoji": f"canary-{secret.name}"})
    for writer, secret in ((mia, direct), (worker, asked), (mia, reply)):
        ask = {**POLL, "question": f"canary-{secret.name}", "thread_id": secret.thread_id, "cause": secret.seq}
        polls[secret.name] = (await writer.call("polls.create", ask))["poll"]
    direct, asked, reply = [it._replace(poll=polls[it.name]) for it in (direct, asked, reply)]
    worked: dict[str, dict[str, int]] = {}
    authors = {"direct": mia, "asked": worker, "channel": mia, "reply": mia, "broadcast": mia, "answer": worker}
    for secret in (direct, asked, in_den, reply, broadcast, answer):
        worked[secret.name] = await plan_work(authors[secret.name], secret)
    direct, asked, in_den, reply, broadcast, answer = (
        it._replace(**worked[it.name]) for it in (direct, asked, in_den, reply, broadcast, answer)
    )
    # A task of a closed channel, and a timer, in a conversation that everybody can read.
    await mia.call("channels.create", {"name": "vault", "access": "closed"})
    await mia.call("tasks.create", {"title": "canary-channel", "channel": "vault", "cause": public})
    await mia.call("timers.create", {"text": "canary-direct", "in_minutes": 600, "cause": public})
    await helper.call("reservations.reserve_all", {"paths": ["queue.py"]})
    await worker.call("reservations.reserve_all", {"paths": ["queue.py"]})
    mod = Secret("mod", *seq_and_thread(await mia.send("mod:channels", "canary-mod")), "mia", "reaction-mod")

    for name in ("late", "away"):
        await sessions[name].call("channels.join", {"name": "den"})
    sessions["newcomer"] = await node.agent("newcomer")
    everywhere = [direct, asked, in_den, reply, mod]
    hidden = dict.fromkeys(KINDS, everywhere)
    hidden |= {kind: [*everywhere, broadcast, answer] for kind in ("excluded", "observer", "newcomer")}
    outsiders = {name: Outsider(sessions[name], hidden[name], f"own-{name}", 0) for name in KINDS}
    for outsider in outsiders.values():
        await outsider.session.call("channels.create", {"name": outsider.own})
        outsider.task = (await outsider.session.call("tasks.create", {"title": "own"}))["task"]
    told_on = await helper.send("agent:answered", "an answer", cause=direct.seq)
    assert (await sessions["answered"].expect("deliver"))["type"] == "deliver"
    outsiders["answered"].may_know |= {direct.seq, told_on["seq"]}
    await helper.send("agent:observer", "there was an answer", cause=public)
    bait = await host.send("agent:guesser", "to the guesser")
    for secret in everywhere:
        await sessions["guesser"].record(secret.reaction, "started", {"trigger": bait["seq"], "manifest": []})
        body = {"turn": 1, "agent": "guesser", "reply": {"text": None, "model": "m", "usage": {"prompt_tokens": 1}}}
        await sessions["guesser"].record(secret.reaction, "model_reply", body)
    await sessions["guesser"].record("reaction-asked", "finished", {"status": "finished"})
    await helper.record("reaction-direct", "note", {"text": "canary-direct"})  # written after the guesser's records
    await host.send("broadcast", "the end of the scene")
    return Scene(node, public, bait["seq"], outsiders)


def seq_and_thread(stored: Frame) -> tuple[int, str]:
    return stored["seq"], stored["thread_id"]


KINDS = (
    "stranger", "left", "late", "away", "newcomer", "excluded", "observer", "answered", "mia-2", "person", "service", "guesser",
)  # fmt: skip
"""Kinds of outsiders, in order: never a member; left the channel; joined it late; was offline; joined the network
late; excluded from a broadcast; excluded, but saw its answer; received an answer to a hidden cause; another agent of
the sender; a person and a service without operator rights; writes records under the reaction IDs of others.
"""

Make = Callable[[Secret, Outsider, int], dict[str, Any]]
"""Function that returns arguments for a secret, an outsider and the seq of the public message."""

POLL = {"question": "x", "choices": ["a", "b"]}
FRESH = hashlib.sha256(b"nobody's").hexdigest()
GUESSES: dict[str, list[Make]] = {
    "network.info": [],
    "network.list_agents": [],
    "network.list_threads": [],
    "network.history": [
        lambda it, who, public: {"thread_id": it.thread_id},
        lambda it, who, public: {"thread_id": it.thread_id, "before": it.seq + 1},
        lambda it, who, public: {"thread_id": it.thread_id, "trigger": public},
        lambda it, who, public: {"thread_id": "broadcast", "trigger": it.seq},
        lambda it, who, public: {"thread_id": f"thread:{it.seq}"},
    ],
    "network.memory": [
        lambda it, who, public: {"threads": [it.thread_id], "trigger": it.seq},
        lambda it, who, public: {"threads": [it.thread_id], "trigger": public},
    ],
    "network.search": [
        lambda it, who, public: {"query": "canary", "thread_id": it.thread_id},
        lambda it, who, public: {"query": "filler", "trigger": it.seq},
    ],
    "network.window": [
        lambda it, who, public: {"trigger": it.seq},
        lambda it, who, public: {"trigger": public, "threads": [it.thread_id]},
        lambda it, who, public: {"trigger": public, "threads": [f"thread:{it.seq}"], "visibility": "all"},
    ],
    "network.message_status": [lambda it, who, public: {"seq": it.seq}],
    "network.why": [
        lambda it, who, public: {"seq": it.seq},
        lambda it, who, public: {"seq": public, "trigger": it.seq},
        lambda it, who, public: {"seq": it.seq, "trigger": public},
    ],
    "network.impact": [
        lambda it, who, public: {"seq": it.seq},
        lambda it, who, public: {"seq": public, "trigger": it.seq},
        lambda it, who, public: {"seq": it.seq, "trigger": public},
    ],
    "network.records": [
        lambda it, who, public: {"reaction": it.reaction},
        lambda it, who, public: {"reaction": it.reaction, "limit": 1},
        lambda it, who, public: {"reaction": it.reaction, "agent_id": it.agent_id},
    ],
    "network.spent": [
        lambda it, who, public: {"seq": it.seq},
        lambda it, who, public: {"seq": public, "reaction": it.reaction},
    ],
    "network.usage": [lambda it, who, public: {"agent_id": it.agent_id}],
    "network.explain": [lambda it, who, public: {"seq": it.seq}],
    "network.effects": [lambda it, who, public: {"seq": it.seq}],
    "network.work": [lambda it, who, public: {"reaction": it.reaction, "agent_id": it.agent_id}],
    "network.cost_report": [
        lambda it, who, public: {"agent_id": it.agent_id},
        lambda it, who, public: {"thread_id": it.thread_id},
        lambda it, who, public: {"root": it.seq},
    ],
    "network.costs": [],
    "network.receive": [],
    "network.acknowledge": [lambda it, who, public: {"seqs": [public, it.seq]}],
    "network.nack": [lambda it, who, public: {"seq": it.seq, "reason": "x"}],
    "network.quotas": [lambda it, who, public: {"agent_id": it.agent_id}],
    "network.watch": [],
    "network.open_items": [
        lambda it, who, public: {"root": it.seq},
        lambda it, who, public: {"root": it.seq, "others": True},
    ],
    "network.open_reactions": [lambda it, who, public: {"agent_id": it.agent_id}],
    "network.approvals": [lambda it, who, public: {"after": it.seq - 1}],
    "network.approvers": [
        lambda it, who, public: {"names": ["ann"], "seqs": [it.seq]},
        lambda it, who, public: {"names": ["ann"], "seqs": [public, it.seq]},
    ],
    "network.decide": [lambda it, who, public: {"seq": it.seq, "decision": "/approve"}],
    "network.cancel": [
        lambda it, who, public: {"reaction": it.reaction},
        lambda it, who, public: {"thread_id": it.thread_id},
    ],
    "network.inbox": [lambda it, who, public: {"before": f"{it.seq + 1}/question/"}],
    "network.dismiss": [
        lambda it, who, public: {"kind": "question", "seq": it.seq},
        lambda it, who, public: {"kind": "stopped", "seq": it.seq},
    ],
    "network.mark": [
        lambda it, who, public: {"thread_id": it.thread_id, "is_pinned": True},
        lambda it, who, public: {"thread_id": it.thread_id, "read_upto": it.seq},
        lambda it, who, public: {"thread_id": f"thread:{it.seq}"},
    ],
    "network.take": [lambda it, who, public: {"thread_id": it.thread_id}],
    "network.give": [lambda it, who, public: {"thread_id": it.thread_id}],
    "network.resume_root": [lambda it, who, public: {"root": it.seq}],
    "network.stopped": [lambda it, who, public: {"before": it.seq}],
    "network.resume_agent": [lambda it, who, public: {"agent_id": it.agent_id}],
    "network.remove": [lambda it, who, public: {"agent_id": it.agent_id}],
    "network.create_login": [lambda it, who, public: {"agent_id": it.agent_id, "login_hash": FRESH}],
    "network.create_token": [lambda it, who, public: {"agent_id": it.agent_id, "kind": "agent", "token_hash": FRESH}],
    "network.list_tokens": [],
    "network.revoke_token": [lambda it, who, public: {"agent_id": it.agent_id}],
    "network.dead_letters": [
        lambda it, who, public: {"agent_id": it.agent_id},
        lambda it, who, public: {"after": f"{it.agent_id}/{it.seq}"},
    ],
    "network.retry_dead_letter": [
        lambda it, who, public: {"seq": it.seq},
        lambda it, who, public: {"seq": it.seq, "agent_id": it.agent_id},
    ],
    "network.drop_dead_letter": [
        lambda it, who, public: {"seq": it.seq},
        lambda it, who, public: {"seq": it.seq, "agent_id": it.agent_id},
    ],
    "network.log": [],
    "network.rows": [],
    "network.status": [],
    "network.screens": [],
    "network.node_agents": [],
    "network.control_agent": [lambda it, who, public: {"agent_id": it.agent_id, "action": "stop"}],
    "channels.create": [],
    "channels.join": [],
    "channels.leave": [],
    "channels.set_topic": [],
    "channels.set_title": [],
    "channels.set_history": [],
    "channels.set_access": [],
    "channels.set_owner": [],
    "channels.invite": [],
    "channels.remove": [],
    "channels.post": [lambda it, who, public: {"name": who.own, "text": "x", "cause": it.seq}],
    "channels.reply": [
        lambda it, who, public: {"reply_to": it.seq, "text": "x"},
        lambda it, who, public: {"reply_to": public, "text": "x", "cause": it.seq},
    ],
    "channels.list": [],
    "channels.members": [],
    "discovery.find": [],
    "messages.react": [
        lambda it, who, public: {"seq": it.seq, "emoji": "+1"},
        lambda it, who, public: {"cause": it.seq, "emoji": "+1"},
    ],
    "messages.pin": [lambda it, who, public: {"seq": it.seq}],
    "messages.unpin": [lambda it, who, public: {"seq": it.seq}],
    "messages.edit": [lambda it, who, public: {"seq": it.seq, "text": "x"}],
    "messages.delete": [lambda it, who, public: {"seq": it.seq}],
    "messages.edits": [
        lambda it, who, public: {"seq": it.seq},
        lambda it, who, public: {"seq": public, "trigger": it.seq},
    ],
    "messages.reactions": [lambda it, who, public: {"seqs": [it.seq]}],
    "messages.pins": [lambda it, who, public: {"thread_id": it.thread_id}],
    "notes.create": [
        lambda it, who, public: {"name": new_id("n"), "text": "x", "thread_id": it.thread_id},
        lambda it, who, public: {"name": new_id("n"), "text": "x", "thread_id": f"thread:{it.seq}"},
        lambda it, who, public: {"name": new_id("n"), "text": "x", "cause": it.seq},
        lambda it, who, public: {"name": "plan", "text": "x", "thread_id": "broadcast", "cause": it.seq},
    ],
    "notes.write": [lambda it, who, public: {"note": f"{it.thread_id}/plan", "text": "x", "expected_version": 1}],
    "notes.append": [lambda it, who, public: {"note": f"{it.thread_id}/plan", "text": "x"}],
    "notes.patch": [lambda it, who, public: {"note": f"{it.thread_id}/plan", "find": "a", "replace": "a"}],
    "notes.revert": [lambda it, who, public: {"note": f"{it.thread_id}/plan", "version": 1, "expected_version": 1}],
    "notes.propose": [lambda it, who, public: {"note": f"{it.thread_id}/plan", "text": "x", "expected_version": 1}],
    "notes.decide": [lambda it, who, public: {"note": f"{it.thread_id}/plan", "proposal": 1, "accept": True}],
    "notes.set_access": [lambda it, who, public: {"note": f"{it.thread_id}/plan", "access": "open"}],
    "notes.delete": [lambda it, who, public: {"note": f"{it.thread_id}/plan"}],
    "notes.read": [
        lambda it, who, public: {"note": f"{it.thread_id}/plan"},
        lambda it, who, public: {"note": "broadcast/public", "trigger": it.seq},
    ],
    "notes.history": [lambda it, who, public: {"note": f"{it.thread_id}/plan"}],
    "notes.diff": [lambda it, who, public: {"note": f"{it.thread_id}/plan", "version": 1}],
    "notes.proposals": [lambda it, who, public: {"note": f"{it.thread_id}/plan"}],
    "notes.list": [],
    "notes.search": [],
    "polls.create": [
        lambda it, who, public: {**POLL, "thread_id": it.thread_id},
        lambda it, who, public: {**POLL, "cause": it.seq},
        lambda it, who, public: {**POLL, "thread_id": "broadcast", "cause": it.seq},
    ],
    "polls.vote": [lambda it, who, public: {"poll": it.poll, "choice": "a"}],
    "polls.close": [lambda it, who, public: {"poll": it.poll}],
    "polls.results": [lambda it, who, public: {"poll": it.poll}],
    "polls.list": [],
    "tasks.create": [
        lambda it, who, public: {"title": "x", "cause": it.seq},
        lambda it, who, public: {"title": "x", "channel": who.own, "cause": it.seq},
        lambda it, who, public: {"title": "x", "depends_on": [it.task]},
    ],
    "tasks.update": [
        lambda it, who, public: {"task": it.task, "assignee": "helper"},
        lambda it, who, public: {"task": who.task, "depends_on": [it.task]},
    ],
    "tasks.claim": [
        lambda it, who, public: {"task": it.task},
        lambda it, who, public: {"task": it.task, "take_over": True},
        lambda it, who, public: {"task": who.task, "cause": it.seq},
    ],
    "tasks.progress": [lambda it, who, public: {"task": it.task, "note": "x"}],
    "tasks.complete": [
        lambda it, who, public: {"task": it.task, "result": "x"},
        lambda it, who, public: {"task": who.task, "messages": [it.seq]},
    ],
    "tasks.fail": [lambda it, who, public: {"task": it.task, "reason": "x"}],
    "tasks.release": [lambda it, who, public: {"task": it.task}],
    "tasks.cancel": [lambda it, who, public: {"task": it.task}],
    "tasks.reopen": [lambda it, who, public: {"task": it.task}],
    "tasks.get": [
        lambda it, who, public: {"task": it.task},
        lambda it, who, public: {"task": it.task, "trigger": public},
        lambda it, who, public: {"task": who.task, "trigger": it.seq},
    ],
    "tasks.list": [
        lambda it, who, public: {"conversation": it.seq},
        lambda it, who, public: {"trigger": it.seq},
    ],
    "timers.create": [lambda it, who, public: {"text": "x", "in_minutes": 600, "cause": it.seq}],
    "timers.cancel": [lambda it, who, public: {"timer": it.timer}],
    "timers.list": [lambda it, who, public: {"trigger": it.seq}],
    "reservations.reserve": [],
    "reservations.reserve_all": [],
    "reservations.release": [],
    "reservations.list": [],
    "notify_when.answered": [
        lambda it, who, public: {"seq": it.seq},
        lambda it, who, public: {"seq": it.seq, "agent_id": it.agent_id},
    ],
    "notify_when.finished": [lambda it, who, public: {"seq": it.seq, "agent_id": it.agent_id}],
    "notify_when.cancel": [lambda it, who, public: {"seq": it.seq}],
    "files.upload": [],
    "files.create": [
        lambda it, who, public: {
            "upload_id": "none",
            "sha256": hashlib.sha256(f"canary-{it.name}".encode()).hexdigest(),
            "name": "a",
        },
        lambda it, who, public: {"upload_id": "none", "sha256": "0" * 64, "name": "a", "file": it.file},
    ],
    "files.save": [
        lambda it, who, public: {"name": "a", "content": "a", "file": it.file},
        lambda it, who, public: {"name": "a", "content": "a", "cause": it.seq},
    ],
    "files.attach": [
        lambda it, who, public: {"to": "agent:helper", "files": [it.file]},
        lambda it, who, public: {"to": "agent:helper", "files": [it.file], "cause": public},
    ],
    "files.delete": [lambda it, who, public: {"file": it.file}],
    "files.read": [
        lambda it, who, public: {"file": it.file},
        lambda it, who, public: {"file": it.file, "version": 1, "trigger": public},
    ],
    "files.download": [
        lambda it, who, public: {"file": it.file},
        lambda it, who, public: {"file": it.file, "trigger": it.seq},
    ],
    "files.list": [lambda it, who, public: {"thread_id": it.thread_id, "after": it.file[:4]}],
}
"""Arguments that name hidden things, by operation. The answer must equal the one for `NOTHING`."""

Ask = Callable[[Secret, Outsider, int], dict[str, Any]]
LISTS: dict[str, list[Ask]] = {
    "network.info": [lambda it, who, public: {}],
    "network.list_agents": [lambda it, who, public: {}],
    "network.list_threads": [
        lambda it, who, public: {},
        lambda it, who, public: {"before": it.seq + 1},
        lambda it, who, public: {"threads": [it.thread_id, f"thread:{it.seq}", "channel:den", "broadcast"]},
    ],
    "network.mark": [lambda it, who, public: {"thread_id": "broadcast", "is_pinned": True}],
    "network.inbox": [lambda it, who, public: {}],
    "network.open_items": [lambda it, who, public: {"root": public}],
    "network.history": [
        lambda it, who, public: {"thread_id": "broadcast", "limit": 500},
        lambda it, who, public: {"thread_id": "channel:den", "before": it.seq + 1},
    ],
    "network.memory": [lambda it, who, public: {"threads": [it.thread_id, "broadcast"], "trigger": public}],
    "network.search": [
        lambda it, who, public: {"query": f"canar* {it.name}"},
        lambda it, who, public: {"query": "canary", "trigger": public, "visibility": "all"},
    ],
    "network.window": [lambda it, who, public: {"trigger": public, "threads": 100, "visibility": "all"}],
    "network.message_status": [lambda it, who, public: {"seq": public}],
    "network.why": [lambda it, who, public: {"seq": max({public, *who.may_know} - {it.seq})}],
    "network.impact": [lambda it, who, public: {"seq": public}, lambda it, who, public: {"seq": max({public, *who.may_know} - {it.seq})}],
    "network.spent": [lambda it, who, public: {"seq": public}],
    "network.usage": [lambda it, who, public: {}],
    "network.explain": [lambda it, who, public: {"seq": max({public, *who.may_know} - {it.seq})}],
    "network.effects": [lambda it, who, public: {"seq": public}, lambda it, who, public: {"seq": max({public, *who.may_know} - {it.seq})}],
    "network.cost_report": [lambda it, who, public: {}, lambda it, who, public: {"by": "reaction"}],
    "network.costs": [lambda it, who, public: {"uses": [{"model": "m", "prompt_tokens": 1}]}],
    "network.receive": [lambda it, who, public: {"after": 0, "limit": 500}, lambda it, who, public: {"after": it.seq - 1}],
    "network.quotas": [lambda it, who, public: {}],
    "network.watch": [lambda it, who, public: {"presence": True, "signals": True}],
    "network.open_reactions": [lambda it, who, public: {}],
    "network.approvals": [lambda it, who, public: {}],
    "network.approvers": [lambda it, who, public: {"names": ["ann", "role:nothing"], "seqs": [public]}],
    "network.cancel": [lambda it, who, public: {"thread_id": "broadcast"}],
    "network.list_tokens": [lambda it, who, public: {}],
    "network.dead_letters": [lambda it, who, public: {}],
    "network.log": [lambda it, who, public: {"after": it.seq - 1}],
    "network.rows": [lambda it, who, public: {"after": it.seq - 1}],
    "network.status": [lambda it, who, public: {}],
    "network.screens": [lambda it, who, public: {}],
    "network.node_agents": [lambda it, who, public: {}],
    "channels.create": [lambda it, who, public: {"name": "den"}],
    "channels.join": [lambda it, who, public: {"name": who.own}],
    "channels.leave": [lambda it, who, public: {"name": who.own}, lambda it, who, public: {"name": "nowhere"}],
    "channels.set_title": [lambda it, who, public: {"name": "den", "title": "x"}],
    "channels.set_topic": [lambda it, who, public: {"name": "den", "topic": "x"}],
    "channels.set_history": [lambda it, who, public: {"name": "den", "history": "members"}],
    "channels.set_access": [lambda it, who, public: {"name": "den", "access": "closed"}],
    "channels.set_owner": [lambda it, who, public: {"name": "den", "agent_id": "helper"}],
    "channels.invite": [lambda it, who, public: {"name": "den", "agent_id": "helper"}],
    "channels.remove": [lambda it, who, public: {"name": "den", "agent_id": "helper"}],
    "channels.list": [lambda it, who, public: {}],
    "channels.members": [lambda it, who, public: {"name": "den"}],
    "discovery.find": [lambda it, who, public: {"query": f"canary {it.name} {it.thread_id}"}],
    "messages.reactions": [lambda it, who, public: {"seqs": [public, it.seq]}],
    "messages.pins": [lambda it, who, public: {"thread_id": "channel:den"}],
    "notes.list": [
        lambda it, who, public: {},
        lambda it, who, public: {"thread_id": it.thread_id} if it.thread_id not in PLACES else {},
        lambda it, who, public: {"trigger": public},
    ],
    "notes.search": [lambda it, who, public: {"query": f"canary {it.name}"}],
    "polls.list": [lambda it, who, public: {}, lambda it, who, public: {"trigger": public}],
    "notes.read": [lambda it, who, public: {"note": "broadcast/public", "sources": True}],
    "reservations.reserve": [lambda it, who, public: {"paths": [f"{who.own}.py"]}],
    "reservations.reserve_all": [
        lambda it, who, public: {"paths": [f"{who.own}.py"]},
        lambda it, who, public: {"paths": ["queue.py"]},
    ],
    "tasks.list": [lambda it, who, public: {"state": ""}, lambda it, who, public: {"trigger": public}],
    "tasks.get": [lambda it, who, public: {"task": who.task}],
    "timers.list": [lambda it, who, public: {}, lambda it, who, public: {"trigger": public}],
    "reservations.release": [lambda it, who, public: {}],
    "reservations.list": [lambda it, who, public: {}],
    "files.upload": [lambda it, who, public: {"upload_id": "own", "offset": 0, "data": "YQ=="}],
    "files.list": [lambda it, who, public: {}, lambda it, who, public: {"trigger": public}],
}  # fmt: skip
"""Arguments that ask for everything that the outsider may see."""

PLACES = ("broadcast", "channel:den")
"""Threads that everybody knows."""
COUNTS = {
    "participants", "bytes", "messages", "channels", "at", "sent_at", "next_day_at", "bytes_per_day", "messages_per_day", "score",
    "max_created_channels", "members", "hops", "omitted", "omitted_threads", "attempts", "head", "prompt_tokens", "calls", "attempt",
    "unread", "read_upto",
}  # fmt: skip
"""Keys whose integers are not seqs of messages. `head` is the end of the ledger, which everybody learns, and
`read_upto` comes from the caller.
"""


async def test_every_operation_has_its_row() -> None:
    known = set(list_operations(mod() for mod in OWN_MODS.values()))
    assert set(GUESSES) == known
    assert known >= set(LISTS)
    assert all(GUESSES[op] or LISTS[op] for op in known)


def find_leaks(value: Any, outsider: Outsider, key: str = "") -> Iterator[str]:
    """Yield the parts of an answer that reveal hidden conversations."""
    match value:
        case dict():
            for name, inner in value.items():
                yield from find_leaks(name, outsider)
                yield from find_leaks(inner, outsider, name)
        case list():
            for inner in value:
                yield from find_leaks(inner, outsider, key)
        case bool():
            return
        case int() if key in ("task", "timer"):
            if value in {getattr(it, key) for it in outsider.hidden}:
                yield f"{key}: {value}"
        case int() if key not in COUNTS:
            seqs = {seq for it in outsider.hidden for seq in (it.seq, *it.kept)} - outsider.may_know
            if value in seqs:
                yield f"{key}: {value}"
        case str():
            for it in outsider.hidden:
                shown = [f"canary-{it.name}", *([] if it.thread_id in PLACES else [it.thread_id])]
                yield from (f"{key}: {text}" for text in shown if text in value)
                if it.reaction in value and key != "":
                    yield f"{key}: {it.reaction}"


def shape_of(answer: Frame, asked: Secret) -> Any:
    """Return an answer without the names in the question."""
    if answer["type"] == "result":
        return answer["value"]
    named = (asked.thread_id, asked.reaction, asked.agent_id, asked.file, str(asked.seq), str(asked.poll))
    given = "|".join(map(re.escape, named))
    text = re.sub(rf"\b(task|timer) ({asked.task}|{asked.timer})\b", r"\1 IT", answer["message"])
    return answer["code"], re.sub(rf"\b({given})(?![\w-])", "IT", text)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_operation_tells_an_outsider_anything(scene: Scene, kind: str) -> None:
    outsider = scene.outsiders[kind]
    for op, questions in LISTS.items():
        for secret in outsider.hidden:
            for make in questions:
                answer = await outsider.session.submit_call(op, make(secret, outsider, scene.public))
                assert not list(leaks_beyond_own(answer, outsider, kind)), (op, secret.name, answer)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_an_outsider_guesses_is_as_if_it_did_not_exist(scene: Scene, kind: str) -> None:
    outsider = scene.outsiders[kind]
    for op, guesses in GUESSES.items():
        for make in guesses:
            nothing = await outsider.session.submit_call(op, make(NOTHING, outsider, scene.public))
            for secret in outsider.hidden:
                args = make(secret, outsider, scene.public)
                answer = await outsider.session.submit_call(op, args)
                if answer["type"] == "result":
                    assert not list(leaks_beyond_own(answer["value"], outsider, kind)), (op, args, answer)
                if knows(op, args, outsider, kind):
                    continue
                assert shape_of(answer, secret) == shape_of(nothing, NOTHING), (op, args)
    for frame in outsider.session.unread:
        assert not list(leaks_beyond_own(frame, outsider, kind)), frame


def knows(op: str, args: dict[str, Any], outsider: Outsider, kind: str) -> bool:
    """Whether the question names something that the outsider may know: its channel, its own records, or itself."""
    if kind == "guesser" and op in ("network.records", "network.spent", "network.cancel"):
        return True
    # The channel's existence is no secret to former and present members.
    if args.get("thread_id") == "channel:den":
        return kind in ("left", "late", "away")
    if args.get("note") == "channel:den/plan":
        return kind in ("late", "away")
    return args.get("thread_id") == "broadcast"


def leaks_beyond_own(value: Any, outsider: Outsider, kind: str) -> Iterator[str]:
    """Ignore reaction IDs for the guesser, which chose them. All other leaks count."""
    found = find_leaks(value, outsider)
    return (it for it in found if "reaction-" not in it) if kind == "guesser" else found


@pytest.mark.parametrize("kind", KINDS)
async def test_frames_of_an_outsider_are_refused_as_for_what_does_not_exist(scene: Scene, kind: str) -> None:
    outsider = scene.outsiders[kind]
    session = outsider.session
    for secret in outsider.hidden:
        shapes = []
        for it in (secret, NOTHING):
            answers = [
                await session.submit("agent:helper", "x", cause=it.seq),
                await session.submit("broadcast", "x", reply_to=it.seq),
                await session.submit_record(new_id("r"), "started", {"trigger": it.seq}),
            ]
            if secret.thread_id not in PLACES:
                await session.send_frame({"type": "signal", "kind": "typing", "body": 1, "thread_id": it.thread_id})
                answers.append(await session.expect("error", code="unknown_message"))
            shapes.append([shape_of(answer, it) for answer in answers])
        assert shapes[0] == shapes[1], secret.name


async def test_the_sums_of_records_under_a_guessed_id_name_ones_own_trigger(scene: Scene) -> None:
    guesser = scene.outsiders["guesser"]
    usage = await guesser.session.call("network.usage")
    place = {"trigger": scene.bait, "thread_id": "direct:guesser~host", "root": scene.bait}
    assert usage["reactions"] == {it.reaction: place for it in guesser.hidden}
    records = await guesser.session.call("network.records", {"reaction": "reaction-direct", "limit": 2})
    assert [it["agent_id"] for it in records["records"]] == ["guesser", "guesser"]
    assert records["has_more"] is False  # later records of others are not reported


async def test_who_began_reactions_that_others_may_not_read_sees_that_they_are_in_prompts(scene: Scene) -> None:
    status = await scene.outsiders["stranger"].session.call("network.message_status", {"seq": scene.public})
    fates = {it["agent_id"]: it for it in status["recipients"]}
    assert fates["helper"]["state"] == fates["worker"]["state"] == "in_prompt"
    assert "reaction" not in fates["helper"]
    own = await scene.node.agent("helper")
    mine = {
        it["agent_id"]: it for it in (await own.call("network.message_status", {"seq": scene.public}))["recipients"]
    }
    assert (mine["helper"]["reaction"], mine["helper"]["reaction_status"]) == ("reaction-direct", "open")
    assert "reaction" not in mine["mia"]
    assert "reaction-" not in json.dumps(fates)


async def test_whoever_stops_a_reaction_learns_nothing_of_what_it_had_asked_others() -> None:
    async with running_node() as node:
        mia = await node.invite(await node.person("host"), "mia")
        helper, worker = await node.agent("helper", role="reactor"), await node.agent("worker", role="reactor")
        request = await mia.send("agent:helper", "please")
        await helper.record("of-helper", "started", {"trigger": request["seq"]})
        asked = await helper.send("agent:worker", "canary", cause=request["seq"])
        await worker.record("of-worker", "started", {"trigger": asked["seq"]})
        assert await mia.call("network.cancel", {"reaction": "of-helper"}) == {"reactions": ["of-helper"]}
        assert (await helper.expect("signal", kind="cancel"))["sender_id"] == "mia"
        stopped = await worker.expect("signal", kind="cancel")
        assert (stopped["sender_id"], stopped["body"]) == ("helper", {"reaction": "of-worker"})
