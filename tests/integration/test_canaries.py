"""Tests of privacy between conversations with compromised models: twenty agents follow every order in a message and
copy everything that they find.

A person or program gives an agent a canary in one conversation, and the agent carries it on (`VERBS`): in an answer,
to other agents, in tools, results, signals, records and errors. Then all others try to get it. Probes make an agent
call all its tools on hidden things and report everything to the asker. Every operation of the hub is called, and
everybody listens. The oracle `canary_story`, which does not use `network.visibility`, judges each frame that the hub
writes to a participant, and each prompt of a model.

**A leak past the policy** is one of these two, whatever the model did:

1. A frame of the hub to a participant who may not know the canary: a delivery, a result, an error, a signal, a notice
or a presence. Participants who could read the message with the canary at its time may know the canary
(docs/protocol/messages.md), and so may agents that read a message of an agent which had the canary.

2. A prompt with the canary if somebody in the conversation of its message may not know it. The conversation of a
message consists of the people who can read the message that the agent reacts to or, if only agents can, the nearest
cause with human readers (docs/prompts.md, "Visibility"). Without people, the conversation consists of the
participants in the first thread.

A model may send text that its prompt holds legitimately to others in its own words. This is not a leak, because
visibility does not limit an agent's recipients. Therefore, these models send only to the thread of the question and
to other agents. A canary that reaches a person this way against the rules must have been in a wrong prompt.

Under ``people``, ``strict`` and ``current``, nothing may leak. Under ``all``, the same setup must find leaks.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from roundelay.agents.team import MiddlewareChoice
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from roundelay.network.core.entries import Peer
from roundelay.network.core.joining import hash_token
from roundelay.network.errors import RoundelayError
from roundelay.network.frames import HUB_FRAMES
from roundelay.network.visibility import Visibility
from roundelay.simulation import Delay, Setting, Simulation, simulate
from roundelay.simulation.network import SimulatedTransport
from tests.contract.test_outsiders import GUESSES, LISTS, Outsider, Secret
from tests.support import canary_team as team
from tests.support.canary_story import Leak, Story, judge_frames, judge_prompt
from tests.support.counts import Note

VISIBILITIES: tuple[Visibility, ...] = ("people", "strict", "current")
QUIET = {"nothing", "probe", "probe_quietly", "rest", "rest_and_answer", "have_rest"}
"""Verbs that are not carriers: probes, and parts of other verbs."""
CARRIERS = tuple(verb for verb in team.VERBS if verb not in QUIET)
FEW = CARRIERS[::8]
"""A part of the carriers, for tests of the visibility rules."""
PLACES = ("direct", "den", "hall", "reply", "broadcast", "answer", "programs", "parts")
"""Places of a canary: between two participants; in a channel; in a channel with open history; in a reply thread of a
channel or a broadcast; in a broadcast that excludes somebody; in a program's message; in other parts of a message
(metadata, files, IDs).
"""

RELATIONS = {
    "bob": "never in", "leo": "left", "lana": "joined late", "hana": "away, came back", "eve": "excluded", "nora": "came to the network late",
    "rex": "removed from the network", "rolf": "removed from the channel", "zoe": "another person's thread with the same agent", "planner2": "another program", "spy": "a hostile agent",
}  # fmt: skip
"""The outsiders, and their relation to the conversations with canaries."""
OUTSIDERS = tuple(who for who in RELATIONS if who != "rex")
"""Outsiders that are still registered when the questions start."""


@dataclass
class Told:
    """One canary: its carrier, its place, and the names that an outsider would need to reach it."""

    canary: str
    carrier: str
    place: str
    seq: int
    thread_id: str
    agent_id: str


@dataclass
class Rig:
    """One watched network."""

    simulation: Simulation
    visibility: Visibility
    story: Story = field(default_factory=lambda: Story(frozenset(team.NAMES)))
    clients: dict[str, NetworkClient] = field(default_factory=dict)
    frames: dict[str, list[bytes]] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    kinds: set[str] = field(default_factory=set)
    listening: list[asyncio.Task[None]] = field(default_factory=list)
    _asked: int = 0

    # --- participants

    def watch_links(self) -> None:
        """Record every frame that the hub writes to anybody. Only the host is trusted."""
        make = self.simulation.make_link

        def make_link(agent_id: str) -> tuple[SimulatedTransport, Callable[[], float]]:
            transport, chance = make(agent_id)
            connect, seen = transport.connect, self.frames.setdefault(agent_id, [])

            async def connect_seen() -> Any:
                connection = await connect()
                write = connection.write
                if agent_id != "host" and agent_id not in team.NAMES:
                    connection.peer = Peer(is_local=True)

                def write_seen(payloads: list[bytes]) -> None:
                    seen.extend(payloads)
                    write(payloads)

                setattr(connection, "write", write_seen)  # noqa: B010 (a method of one connection)
                return connection

            setattr(transport, "connect", connect_seen)  # noqa: B010 (likewise)
            return transport, chance

        setattr(self.simulation, "make_link", make_link)  # noqa: B010 (likewise)

    async def join(self, agent_id: str, kind: Any = "human") -> NetworkClient:
        """Join with a separate token, without operator rights, and listen to everything."""
        token = hashlib.sha256(agent_id.encode()).hexdigest()
        if agent_id != "host":
            args = {"agent_id": agent_id, "kind": kind, "token_hash": hash_token(token)}
            await self.clients["host"].call("network.create_token", args)
        transport, jitter = self.simulation.make_link(agent_id)
        ids = itertools.count()
        client = NetworkClient(
            agent_id, kind=kind, token=token, transport=transport, jitter=jitter, clock=self.simulation.clock,
            new_id=lambda: f"{agent_id}-{next(ids)}",
        )  # fmt: skip
        await client.connect()
        self.clients[agent_id] = client
        self.listening.append(asyncio.create_task(listen(client)))
        await client.call("network.watch", {"presence": agent_id == "bob", "signals": agent_id in ("mia", *RELATIONS)})
        return client

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        await asyncio.gather(*self.listening, return_exceptions=True)

    # --- events

    async def say(
        self,
        who: str,
        to: str,
        text: Any,
        *,
        leaves_out: tuple[str, ...] = (),
        is_waited_for: bool = True,
        **options: Any,
    ) -> int:
        """Send a message, and wait for all its effects."""
        message_id = options.pop(
            "message_id", f"{who}-said-{self.simulation.hub.state.head if self.simulation.hub else 0}"
        )
        self.story.left_out[message_id] = frozenset(leaves_out)
        if leaves_out:
            options["exclude_agent_ids"] = list(leaves_out)
        stored = await self.clients[who].send(to, text, message_id=message_id, **options)
        if is_waited_for:
            await self.settle()
        return stored.seq

    async def settle(self) -> None:
        """Wait until the network is idle, and judge the recorded frames."""
        await self.simulation.idle(600)
        self.judge()

    def judge(self) -> None:
        self.story.read(self.simulation.rows)
        asked, self._asked = self.simulation.asked[self._asked :], len(self.simulation.asked)
        for it in asked:
            self.counts["prompts"] += 1
            self.leaks += judge_prompt(self.story, it.agent_id, it.request.reaction, it.text)
        for who, frames in self.frames.items():
            taken, frames[:] = frames[:], []
            self.counts["frames"] += len(taken)
            for frame in taken:
                kind = frame[9 : frame.index(b'"', 9)].decode()
                self.kinds.add(f"notice {json.loads(frame)['kind']}" if kind == "notice" else kind)
            if who != "host":
                self.leaks += judge_frames(self.story, who, (frame for frame in taken if b"canary-" in frame))

    async def ask(self, who: str, op: str, args: dict[str, Any]) -> None:
        self.counts["calls"] += 1
        try:
            await self.clients[who].call(op, args)
        except RoundelayError:
            pass  # the frame of this error is judged like any other


async def listen(client: NetworkClient) -> None:
    try:
        async for _ in client:
            pass
    except RoundelayError:
        pass


# --- the script of events


def choose_canaries(carriers: Sequence[str], per_carrier: int) -> Iterator[tuple[str, str]]:
    """Yield carriers and places: each carrier in ``per_carrier`` places."""
    for number, carrier in enumerate(carriers):
        for more in range(per_carrier):
            yield carrier, PLACES[(number + more * 3) % len(PLACES)]


async def play(rig: Rig, carriers: Sequence[str], *, is_full: bool) -> None:
    rig.watch_links()
    simulation = rig.simulation
    await rig.join("host")
    for agent_id in team.NAMES:
        await simulation.start_agent(lambda agent_id=agent_id: team.make_agent(agent_id, rig.visibility))  # type: ignore[misc]
    for who in ("mia", "ivy", "zoe", "bob", "leo", "lana", "hana", "eve", "rex", "rolf"):
        await rig.join(who)
    for who in ("planner", "planner2", "spy"):
        await rig.join(who, "agent")
    mia = rig.clients["mia"]
    named, about = (
        f"canary-{hashlib.sha256(b'name').hexdigest()[:8]}",
        f"canary-{hashlib.sha256(b'topic').hexdigest()[:8]}",
    )
    for name, access, history, members in (
        ("den", "closed", "since_join", ("ivy", "leo", "hana", "rolf", *team.NAMES[:4])),
        ("hall", "open", "members", ("host", "ivy", "leo", "hana", *team.NAMES[:4])),
        ("pit", "open", "since_join", ("bob", *team.INJECTED)),
        ("lab", "invite", "since_join", team.NAMES),
        (named, "closed", "since_join", ("ivy", "rolf", *team.NAMES[:4])),
    ):
        await mia.call("channels.create", {"name": name, "access": access, "history": history})
        for member in members:
            await join_channel(rig, member, name)
    await mia.call("channels.leave", {"name": "lab"})
    for who in ("leo", "hana"):
        for name in ("den", "hall"):
            await rig.clients[who].call("channels.leave", {"name": name})
    for name in ("den", named):
        await mia.call("channels.remove", {"name": name, "agent_id": "rolf"})
    await mia.call("channels.set_topic", {"name": named, "topic": about})
    for canary, carrier in ((named, "the name of a channel"), (about, "the topic of a channel")):
        seq = await rig.say("mia", f"channel:{named}", team.write_order("a01", "tell_agent", "a06"))
        rig.told.append(Told(canary, carrier, "closed", seq, f"channel:{named}", "a01"))
    roots = {
        "reply": await rig.say("ivy", "channel:den", "a beginning"),
        "answer": await rig.say("host", "broadcast", "a beginning", leaves_out=("eve", "spy")),
    }
    for number, (carrier, place) in enumerate(choose_canaries(carriers, 2 if is_full else 1)):
        await tell(rig, number, carrier, place, roots)
    await tell_of_the_removed(rig)
    await tell_meanwhile(rig)

    for who in ("lana", "hana"):
        for name in ("den", "hall"):
            await join_channel(rig, who, name)
    await rig.join("nora")
    threads = sorted(
        {it.thread_id for it in rig.told if it.place != "closed"}
        | {"channel:den", "channel:hall", "channel:lab", "broadcast"}
    )
    seqs = [it.seq for it in rig.told]
    share = 2 if is_full else 4
    agents, parts = itertools.cycle(team.NAMES if is_full else team.NAMES[:4]), itertools.count()

    def order(first: str) -> str:
        part, via = next(parts), team.NAMES[(team.NAMES.index(first) + 7) % team.SIZE]
        return team.write_order(
            first, "probe", via, threads[part % share :: share], seqs[part % len(seqs) :: 6 * share]
        )

    for who in OUTSIDERS:
        needs = {"requires_response": True} if who in ("planner2", "spy") else {}
        for first in itertools.islice(agents, 3 if is_full else 1):
            await rig.say(who, f"agent:{first}", order(first), **needs)
        if is_full or who in ("eve", "nora"):
            await rig.say(who, "broadcast", order("a02"))
    for name in ("den", "hall"):
        for who in ("lana", "hana"):
            await rig.say(who, f"channel:{name}", order("a03"))
    await ask_everything(rig, len(rig.told) // (20 if is_full else 3))
    for who, thread_id in (("host", "broadcast"), ("mia", "channel:den"), ("mia", f"channel:{named}")):
        await rig.clients[who].call("network.take", {"thread_id": thread_id})
        await rig.clients[who].call("network.give", {"thread_id": thread_id})
    await rig.settle()
    await simulation.kill_hub()
    await simulation.restart_hub()
    await rig.settle()


async def join_channel(rig: Rig, who: str, name: str) -> None:
    member = rig.simulation.members.get(who)
    client = rig.clients[who] if member is None else member.client
    await rig.clients["mia"].call("channels.invite", {"name": name, "agent_id": who})
    await client.call("channels.join", {"name": name})


async def tell(rig: Rig, number: int, carrier: str, place: str, roots: dict[str, int]) -> None:
    """Send one canary to an agent that carries it on."""
    canary = f"canary-{hashlib.sha256(f'{number}/{carrier}'.encode()).hexdigest()[:8]}"
    first = team.NAMES[number % 4]
    if place in ("direct", "parts", "programs"):
        first = {"summary": team.SHORT, "overspend": team.POOR}.get(carrier, team.NAMES[number % 13])
    via = team.NAMES[(team.NAMES.index(first) + 5) % 13]
    text: Any = f"{team.write_order(first, carrier, via)} {canary}"
    who, to, options = "mia", f"agent:{first}", dict[str, Any]()
    match place:
        case "den" | "hall":
            to = f"channel:{place}"
        case "reply":
            to, options = "channel:den", {"reply_to": roots["reply"]}
        case "broadcast":
            to, options = "broadcast", {"leaves_out": ("eve", "spy")}
        case "answer":
            to, options = "broadcast", {"reply_to": roots["answer"]}
        case "programs":
            who, options = "planner", {"requires_response": True}
        case "parts":
            picture = {"name": f"{canary}.png", "media_type": "image/png", "data": "iVBORw0KGgo=", "text": canary}
            text = {"text": text, "files": [picture], "images": [f"https://example.org/{canary}.png"]}
            options = {
                "metadata": {"note": canary},
                "message_id": canary,
                "text_representation": f"{text['text']} {canary}",
            }
    is_broken_off = carrier in ("resumed", "stopped")
    seq = await rig.say(who, to, text, **options, is_waited_for=not is_broken_off)
    thread_id = next(row.stream for row in rig.simulation.rows if row.seq == seq)
    rig.told.append(Told(canary, carrier, place, seq, thread_id, first))
    if carrier == "approval":
        asked = [row for row in rig.simulation.rows if row.type == "message" and row.actor == first][-1]
        decision = f"/deny not {canary}"
        if place == "programs":  # no person reads this thread, so an operator decides
            await rig.clients["host"].call("network.decide", {"seq": asked.seq, "decision": decision})
            await rig.settle()
        else:
            target = f"agent:{first}" if asked.target.startswith("agent:") else asked.target
            await rig.say(who, target, decision, reply_to=asked.seq)
    if is_broken_off:
        await asyncio.sleep(2)  # simulated time, in which all started work ends
        if carrier == "resumed":
            await rig.simulation.restart(first)
        else:
            await rig.ask(who, "network.cancel", {"thread_id": thread_id})
        await rig.settle()


async def tell_of_the_removed(rig: Rig) -> None:
    """Let rex ask for work that continues after rex was removed."""
    order = team.write_order("a06", "have_rest", "a11")
    await rig.clients["rex"].send("agent:a06", order)
    await rig.simulation.wait_for(lambda it: it.sender_id == "a06" and "rest_and_answer" in it.text, 60)
    await rig.clients["host"].call("network.remove", {"agent_id": "rex"})
    await rig.settle()


async def tell_meanwhile(rig: Rig) -> None:
    """Send messages to a thread while an agent works for a person without access to the thread."""
    bob = rig.clients["bob"]
    for agent_id, place in (("a16", "pit"), ("a17", "broadcast"), ("a18", "broadcast")):
        canary = f"canary-{hashlib.sha256(agent_id.encode()).hexdigest()[:8]}"
        to = f"channel:{place}" if place == "pit" else place
        await bob.send(to, team.write_order(agent_id, "rest"))
        await asyncio.sleep(2)  # simulated time, in which all started work ends
        if place == "pit":
            await bob.call("channels.leave", {"name": "pit"})
        leaves_out = ("bob", "eve", "spy") if place == "broadcast" else ()
        seq = await rig.say("mia", to, f"{team.write_order(agent_id, 'tell_loot')} {canary}", leaves_out=leaves_out)
        rig.told.append(Told(canary, "arrival", place, seq, to, agent_id))


async def ask_everything(rig: Rig, step: int) -> None:
    """Call every operation as every outsider about some of the canaries."""
    public = await rig.say("host", "broadcast", "for everybody")
    chosen = [it for it in rig.told if it.place != "closed"][
        ::step
    ]  # the name of a closed channel is the canary, and the error would repeat it
    for who in OUTSIDERS:
        outsider = Outsider(None, [], f"own-{who}", 0)  # type: ignore[arg-type]
        for at, it in enumerate(chosen):
            reaction = next((name for name, seq in rig.story.reactions.items() if seq == it.seq), "none")
            secret = Secret(it.canary, it.seq, it.thread_id, it.agent_id, reaction)
            for op, questions in GUESSES.items():
                for make in questions:
                    await rig.ask(who, op, make(secret, outsider, public))
            for op, questions in LISTS.items() if at == 0 else ():
                for make in questions:
                    if op not in ("channels.create", "channels.leave"):
                        await rig.ask(who, op, make(secret, outsider, public))
        rig.judge()


def run(visibility: Visibility, carriers: Sequence[str] = CARRIERS, *, is_full: bool = False) -> Rig:
    limits = Limits(max_hops=8, sends_per_s=1_000_000, root_messages_per_s=1_000_000, signals_per_s=1_000_000)
    setting = Setting(visibility=visibility, limits=limits, link_delay=Delay(), model_delay=Delay(), operators=["host"])

    async def main(simulation: Simulation) -> Rig:
        rig = Rig(simulation, visibility)
        try:
            await play(rig, carriers, is_full=is_full)
        finally:
            await rig.close()
        return rig

    return simulate(main, setting)


def list_routes(rig: Rig) -> set[tuple[str, str]]:
    """Return each canary with each outsider that may not know it."""
    return {(it.canary, who) for it in rig.told for who in RELATIONS if who not in rig.story.may_know[it.canary]}


def check(rig: Rig, note: Note) -> None:
    """Check that nothing has leaked, and that everything was tried."""
    routes = list_routes(rig)
    note(canaries=len(rig.told), routes=len(routes), **rig.counts, leaks=len(rig.leaks))
    assert not rig.leaks, "\n".join(map(str, rig.leaks[:10]))
    assert len(rig.told) >= 40
    assert len(routes) >= 240
    notices = {
        f"notice {it}"
        for it in ("dead_letter", "loop_stopped", "budget_exhausted", "taken", "given", "inbox", "members", "watched")
    }
    assert (
        rig.kinds - {"notice draining"} == {str(it.__struct_config__.tag) for it in HUB_FRAMES} - {"notice"} | notices
    )
    assert team.offered == set(team.PROBES), (
        "every tool that an agent has is tried, the operations of the mods among them"
    )


def test_no_canary_leaves_its_conversation(note: Note) -> None:
    check(run("people"), note)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_no_canary_leaves_its_conversation_whatever_is_asked(visibility: Visibility, note: Note) -> None:
    check(run(visibility, is_full=True), note)


@pytest.mark.full
def test_the_same_rig_sees_what_leaks_without_a_rule(note: Note) -> None:
    rig = run("all", FEW)
    ways = Counter(it.way for it in rig.leaks)
    note(canaries=len(rig.told), leaks=len(rig.leaks), **ways)
    assert all(ways[way] for way in ("prompt", "deliver", "signal", "result")), ways
    told = [it for it in rig.told if it.place != "closed"]
    assert {it.canary for it in told} <= {it.canary for it in rig.leaks}, "each canary gets out somewhere"


def test_every_middleware_has_its_route() -> None:
    assert set(team.ROUTES_OF_MIDDLEWARE) == set(MiddlewareChoice.model_fields)
    routes = {it for it in team.ROUTES_OF_MIDDLEWARE.values() if not it.startswith(("none: ", "every "))}
    assert routes <= {*team.VERBS, *PLACES}
