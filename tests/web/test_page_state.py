"""Tests that the page's state after every frame equals a refetch. The page's own modules run in node, for a person
and for an operator, on random runs with restarts of the hub and lost connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import ProcessNode, node_process, running_node
from tests.support.wire import Frame, WireSession, make_token, new_id
from tests.web.page_client import PageClient, running_page
from tests.web.team import BANK, DEMO, ECHO, team_up

AGENTS = ("bob", "ann", "cy")
PEOPLE = ("sam", "mia")
CHANNELS = ("tea", "plan", "shut")
STEPS_PER_COMPARISON = 12


class Network:
    """A real node with several participants, and the pages of two of them. ``chance`` selects the events."""

    def __init__(self, node: ProcessNode, pages: list[PageClient], chance: random.Random) -> None:
        self.node = node
        self.pages = pages
        self.chance = chance
        self.did: Counter[str] = Counter()
        self.sessions: dict[str, WireSession] = {}
        self.seqs: list[tuple[int, str, str, str]] = []  # seq, thread, to, sender
        self.guests = 0

    async def session(self, agent_id: str) -> WireSession:
        """Return a participant's own session, which is separate from its page."""
        if agent_id not in self.sessions:
            if agent_id == "opal":
                self.sessions[agent_id] = await self.node.person("opal")
            else:
                kind = "human" if agent_id in PEOPLE else "agent"
                self.sessions[agent_id] = await self.node.join(
                    agent_id, kind=kind, token=self.node.token_of(agent_id), card={"description": f"{agent_id} helps"}
                )
        return self.sessions[agent_id]

    async def anybody(self) -> WireSession:
        return await self.session(self.chance.choice((*AGENTS, *PEOPLE)))

    def page(self) -> PageClient:
        return self.chance.choice(self.pages)

    async def happen(self) -> None:
        """Perform one random event. A refusal by the hub is a valid result."""
        names = [name for name in dir(self) if name.startswith("do_")]
        name = self.chance.choices(names, [getattr(self, it).__doc__.count("*") + 1 for it in names])[0]
        self.did[name[3:]] += 1
        await getattr(self, name)()

    async def say(self, session: WireSession, to: str, content: object, **fields: Any) -> Frame:
        answer = await session.submit(to, content, **fields)
        if answer["type"] == "stored":
            sender = next(name for name, it in self.sessions.items() if it is session)
            self.seqs.append((answer["seq"], answer["thread_id"], to, sender))
        return answer

    # --- events; each star in a docstring makes its event more likely

    async def do_direct(self) -> None:
        """A participant sends a direct message. *****"""
        session, to = await self.anybody(), self.chance.choice((*AGENTS, "mia", "mia", "opal", "sam"))
        wanted = {"requires_response": True} if self.chance.random() < 0.3 else {}
        words = self.chance.choice(("Hello", "two\n lines\u2028 three", "x" * 300, "ümlaut 🐝 " * 40))
        content = self.chance.choice((words, {"text": words, "files": ["a.txt"]}, {"n": [1, {"a": None}]}))
        await self.say(session, f"agent:{to}", content, **wanted)

    async def do_flood(self) -> None:
        """A participant sends many messages at once."""
        session, ids = await self.anybody(), [new_id() for _ in range(90)]
        for message_id in ids:
            await session.send_frame({"type": "send", "message_id": message_id, "to": "agent:mia", "content": "!"})
        for message_id in ids:
            await session.answer(message_id)

    async def do_broadcast(self) -> None:
        """A participant sends a broadcast, sometimes with one participant excluded. *"""
        excluded = {"exclude_agent_ids": [self.chance.choice(("mia", "bob"))]} if self.chance.random() < 0.4 else {}
        await self.say(await self.anybody(), "broadcast", "All!", **excluded)

    async def do_post(self) -> None:
        """A participant posts to a channel. ***"""
        await self.say(await self.anybody(), f"channel:{self.chance.choice(CHANNELS)}", "Tea?")

    async def do_reply(self) -> None:
        """A participant answers a message in its thread. ****"""
        if self.seqs:
            seq, _, to, sender = self.chance.choice(self.seqs[-12:])
            address = f"agent:{sender}" if to.startswith("agent:") else to
            await self.say(await self.anybody(), address, "Yes", reply_to=seq, cause=seq)

    async def do_revise(self) -> None:
        """A sender edits or deletes a message. **"""
        if self.seqs:
            seq, _, _, sender = self.chance.choice(self.seqs[-12:])
            op, args = self.chance.choice((("edit", {"text": "Corrected"}), ("delete", {})))
            await (await self.session(sender)).submit_call(f"messages.{op}", {"seq": seq, **args})

    async def do_page_sends(self) -> None:
        """A person writes on the page, and its connection may be lost at once. ***"""
        page = self.page()
        to = self.chance.choice((*(f"agent:{it}" for it in AGENTS), "channel:tea", "broadcast", "agent:nobody"))
        other = to.removeprefix("agent:")
        thread = f"direct:{'~'.join(sorted((page.agent_id, other)))}" if to != other else to
        await page.do("send", message={"to": to, "content": "From the page", "thread_id": thread})
        if self.chance.random() < 0.3:
            await page.do("drop")
        await page.do("sent")

    async def do_member(self) -> None:
        """A participant joins or leaves a channel, or the channel changes. ***"""
        name, by = self.chance.choice(CHANNELS), await self.anybody()
        op = self.chance.choice(("join", "join", "leave", "create", "remove", "invite", "set_history", "set_access"))
        args: dict[str, Any] = {"name": name}
        if op in ("remove", "invite"):
            by, args["agent_id"] = await self.session("opal"), self.chance.choice(("mia", "bob", "ann"))
        if op == "create":
            args |= {"history": self.chance.choice(("members", "since_join"))}
        if op in ("set_history", "set_access"):
            by = await self.session("opal")
            options = ("members", "since_join") if op == "set_history" else ("open", "invite", "closed")
            args[op.removeprefix("set_")] = self.chance.choice(options)
        await by.submit_call(f"channels.{op}", args)

    async def do_page_joins(self) -> None:
        """The page's person joins or leaves a channel."""
        op = self.chance.choice(("channels.join", "channels.leave"))
        await self.page().do("call", op=op, args={"name": self.chance.choice(CHANNELS)})

    async def do_take(self) -> None:
        """A takeover of a thread starts or ends. *"""
        if self.seqs:
            by = await self.session(self.chance.choice(("sam", "mia", "opal")))
            thread = self.chance.choice(self.seqs[-20:])[1]
            await by.submit_call(self.chance.choice(("network.take", "network.give")), {"thread_id": thread})

    async def do_mark(self) -> None:
        """The read state of a thread changes, on the page or elsewhere. ***"""
        if not self.seqs:
            return
        seq, thread, _, _ = self.chance.choice(self.seqs[-20:])
        choices: tuple[dict[str, Any], ...] = (
            {"read_upto": seq}, {"read_upto": seq}, {"is_pinned": True}, {"is_pinned": False}, {"title": "Ours"}, {"title": ""},
        )  # fmt: skip
        args = {"thread_id": thread, **self.chance.choice(choices)}
        if self.chance.random() < 0.5:
            await self.page().do("call", op="network.mark", args=args)
        else:
            await (await self.session(self.chance.choice(("mia", "opal")))).submit_call("network.mark", args)

    async def do_dismiss(self) -> None:
        """A question is dismissed."""
        if self.seqs:
            args = {
                "kind": self.chance.choice(("question", "dead_letter")),
                "seq": self.chance.choice(self.seqs[-20:])[0],
            }
            await self.page().do("call", op="network.dismiss", args=args)

    async def do_ask_approval(self) -> None:
        """An agent asks for a person's approval, and may get it. *"""
        trigger = await self.say(await self.session("mia"), "agent:ann", "Do it")
        ann = await self.session("ann")
        if trigger["type"] != "stored":
            return
        reaction, call = f"r{trigger['seq']}", {"turn": 1, "call": 0}
        await ann.submit_record(reaction, "started", {"trigger": trigger["seq"]})
        metadata = {"approval": {"reaction": reaction, "tool": "rm", "arguments": "{}"}}
        asked = await self.say(ann, "agent:mia", "May I?", cause=trigger["seq"], metadata=metadata)
        if asked["type"] != "stored":
            return
        waits = {**call, "questions": {"a person": asked["seq"]}, "until": 2**50, "is_approval": True}
        await ann.submit_record(reaction, "approval", call)
        await ann.submit_record(reaction, "waiting", waits)
        if self.chance.random() < 0.7:
            await self.say(await self.session("mia"), "agent:ann", "/approve", reply_to=asked["seq"])
        if self.chance.random() < 0.7:
            await ann.submit_record(reaction, "finished", {"status": "finished", "turns": 1})

    async def do_fail(self) -> None:
        """A message becomes a dead letter, and is delivered again or dismissed. *"""
        stored = await self.say(await self.session("mia"), "agent:cy", "Fail at this")
        cy = await self.session("cy")
        if stored["type"] != "stored":
            return
        for attempt in range(1, 6):
            while (frame := await cy.expect("deliver"))["message"]["seq"] != stored["seq"] or frame[
                "attempt"
            ] != attempt:
                pass
            await cy.nack(stored["seq"], retry_after_ms=1)
        await cy.expect("notice", kind="dead_letter")
        if self.chance.random() < 0.5:
            await cy.submit_call(
                self.chance.choice(("network.retry_dead_letter", "network.drop_dead_letter")), {"seq": stored["seq"]}
            )

    async def do_signal(self) -> None:
        """An agent sends live activity. *"""
        if self.seqs:
            body = {"reaction": "r", "active": self.chance.random() < 0.5}
            thread = self.chance.choice(self.seqs[-9:])[1]
            frame = {"type": "signal", "kind": "thinking", "body": body, "thread_id": thread}
            await (await self.session(self.chance.choice(AGENTS))).send_frame(frame)

    async def do_guest(self) -> None:
        """A guest joins, and may be removed."""
        self.guests += 1
        name = f"guest-{self.guests}"
        guest = await self.session(name)
        await self.say(guest, "agent:mia", "I am new")
        if self.chance.random() < 0.5:
            del self.sessions[name]
            await (await self.session("opal")).call("network.remove", {"agent_id": name})

    async def do_leave(self) -> None:
        """A participant's session ends. *"""
        if self.sessions:
            await self.sessions.pop(self.chance.choice([*self.sessions])).bye()

    async def do_open(self) -> None:
        """A page opens a thread, and may load earlier messages. ***"""
        if self.seqs:
            page, thread = self.page(), self.chance.choice(self.seqs[-20:])[1]
            await page.do("open", thread_id=thread)
            if self.chance.random() < 0.3:
                await page.do("earlier", thread_id=thread, limit=7)

    async def do_close(self) -> None:
        """A page closes a thread. *"""
        if self.seqs:
            await self.page().do("close", thread_id=self.chance.choice(self.seqs[-20:])[1])

    async def do_drop(self) -> None:
        """A page's connection is lost. **"""
        await self.page().do("drop")

    async def kill(self) -> None:
        """Kill the hub and start it again."""
        self.did["kill"] += 1
        self.sessions.clear()
        await self.node.kill9()
        await self.node.restart()
        await asyncio.gather(*(page.do("move", url=self.node.url) for page in self.pages))

    # --- checks

    async def compare(self) -> None:
        sam = await self.session("sam")  # a person's message is delivered even if the thread is taken over
        last = {page: (await self.say(sam, f"agent:{page.agent_id}", "So far"))["seq"] for page in self.pages}
        await asyncio.gather(*(page.do("reached", seq=seq) for page, seq in last.items()))
        await asyncio.gather(*(page.do("compare") for page in self.pages))


@pytest.fixture
async def network(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    async with AsyncExitStack() as stack:
        limits = {"sends_per_s": 100_000, "root_messages_per_s": 100_000, "registrations_per_minute": 100_000}
        mods = {"ROUNDELAY_MODS": "channels,discovery,messages"}
        started = node_process(tmp_path / "n.db", durability="normal", limits=limits, env=mods)
        node = await stack.enter_async_context(started)
        opal = await node.person("opal")
        for name in PEOPLE:
            digest = hashlib.sha256(node.tokens.setdefault(name, make_token()).encode()).hexdigest()
            await opal.call("network.create_token", {"agent_id": name, "kind": "human", "token_hash": digest})
        for name in AGENTS:
            await (await node.agent(name)).bye()
        mia = await stack.enter_async_context(running_page(node.url, "mia", node.tokens["mia"]))
        page = await stack.enter_async_context(running_page(node.url, "opal", node.owner_token))
        made = Network(node, [mia, page], random.Random(request.param))
        made.sessions["opal"] = opal
        yield made


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 13))]


@pytest.mark.parametrize("network", SEEDS, indirect=True)
async def test_after_every_frame_the_state_is_what_a_refetch_gives(network: Network) -> None:
    for number in range(1, 97):
        await network.happen()
        if number % STEPS_PER_COMPARISON == 0:
            await network.compare()
        if number == 50:
            await network.kill()
    await network.compare()
    for page in network.pages:
        await page.do("replay")
    told = [(await page.do("counts"))["counts"] for page in network.pages]
    print(f"happened: {dict(network.did)}\n" + "\n".join(map(str, told)))
    assert all(it["compared"] >= 9 and it["welcomes"] >= 2 for it in told)


async def test_a_run_of_scripted_agents_is_what_a_refetch_gives(tmp_path: Path) -> None:
    """The run contains thinking, tool calls, agents that ask each other, an approval, and a takeover."""
    async with team_up(tmp_path, [*DEMO, BANK, ECHO]) as team:
        tokens = {"mia": await team.token("mia"), "opal": await team.token("opal", operator=True)}
        async with AsyncExitStack() as stack:
            mia, opal = [await stack.enter_async_context(running_page(team.url, it, tokens[it])) for it in tokens]
            for page in (mia, opal):
                for agent in ("desk", "bank", "echo"):
                    await page.do("open", thread_id=f"direct:{agent}~mia" if agent < "mia" else f"direct:mia~{agent}")
            for to, text in (
                ("desk", "What is 17 * 23, and how many words has this?"),
                ("echo", "Hello"),
                ("bank", "pay ann 5"),
            ):
                await mia.do("send", message={"to": f"agent:{to}", "content": text})
            await mia.do("seen", threads=["direct:desk~mia", "direct:echo~mia", "direct:bank~mia"])
            await mia.do("drop")
            await mia.do("approve")
            await mia.do("call", op="network.take", args={"thread_id": "direct:echo~mia"})
            await mia.do("send", message={"to": "agent:echo", "content": "Are you there?"})
            await mia.do("call", op="network.give", args={"thread_id": "direct:echo~mia"})
            await mia.do("said", thread_id="direct:echo~mia", text="You wrote: Are you there?")
            await mia.do("said", thread_id="direct:bank~mia", text="5 paid to ann")
            for page in (mia, opal):
                await page.do("said", thread_id="direct:bank~mia", text="5 paid to ann")
                await page.do("compare")
                replayed = await page.do("replay")
                print(page.agent_id, replayed, (await page.do("counts"))["counts"])
                await page.do("idle")


async def test_what_changes_without_a_message_is_seen() -> None:
    async with running_node() as node, AsyncExitStack() as stack:
        opal, bob, ann = await node.person("opal"), await node.agent("bob"), await node.agent("ann")
        sam, other = await node.invite(opal, "sam"), await node.invite(opal, "mia")
        mia = await stack.enter_async_context(running_page(node.url, "mia", node.tokens["mia"]))
        page = await stack.enter_async_context(running_page(node.url, "opal", node.owner_token))
        tea, direct = "channel:tea", "direct:bob~sam"
        await bob.call("channels.create", {"name": "tea", "history": "members"})
        for text in ("first", "second"):
            seq = (await bob.send(tea, text))["seq"]
        await bob.send("agent:sam", "Hello")
        changes: tuple[tuple[WireSession, str, dict[str, object]], ...] = (
            (other, "channels.join", {"name": "tea"}),
            (ann, "channels.join", {"name": "tea"}),
            (sam, "channels.join", {"name": "tea"}),
            (bob, "channels.set_title", {"name": "tea", "title": "Tea Time"}),
            (bob, "channels.set_owner", {"name": "tea", "agent_id": "sam"}),
            (sam, "network.take", {"thread_id": tea}),
            (sam, "channels.set_owner", {"name": "tea", "agent_id": "bob"}),
            (sam, "network.take", {"thread_id": direct}),
            (other, "network.mark", {"thread_id": tea, "read_upto": seq, "title": "Leaves"}),
            (sam, "network.give", {"thread_id": direct}),
            (opal, "channels.remove", {"name": "tea", "agent_id": "ann"}),
            (bob, "channels.set_history", {"name": "tea", "history": "since_join"}),
            (bob, "channels.set_history", {"name": "tea", "history": "members"}),
            (other, "channels.leave", {"name": "tea"}),
            (opal, "network.remove", {"agent_id": "ann"}),
        )
        for by, op, args in changes:
            await by.call(op, args)
            for it in (mia, page):
                await it.do("open", thread_id=tea)
                await it.do("compare")


@pytest.mark.full
async def test_another_history_is_fetched_whole(tmp_path: Path) -> None:
    """The node's files are restored from an earlier copy, so seqs refer to different messages."""
    async with node_process(tmp_path / "n.db") as node, running_page_of(node) as page:
        bob = await node.agent("bob")
        await bob.send("agent:opal", "before")
        await page.do("open", thread_id="direct:bob~opal")
        await page.do("compare")
        await node.stop()
        copy = node.db.read_bytes()
        await node.restart()
        await page.do("move", url=node.url)
        await (await node.agent("bob")).send("agent:opal", "lost")
        await page.do("said", thread_id="direct:bob~opal", text="lost")
        before = (await page.do("look", path=["network", "epoch"]))["value"]
        await node.stop()
        node.db.write_bytes(copy)
        await node.restart()
        await page.do("move", url=node.url)
        await (await node.agent("bob")).send("agent:opal", "another")
        await page.do("said", thread_id="direct:bob~opal", text="another")
        await page.do("compare")
        assert (await page.do("look", path=["network", "epoch"]))["value"] != before
        [before_it, seq] = (await page.do("look", path=["threads", "direct:bob~opal", "loaded", "seqs"]))["value"]
        shown = [(await page.do("look", path=["messages", str(it), "content"]))["value"] for it in (before_it, seq)]
        assert shown == ["before", "another"]


def running_page_of(node: ProcessNode) -> Any:
    return running_page(node.url, "opal", node.owner_token)
