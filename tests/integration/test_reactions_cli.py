"""Tests of `roundelay agent try`, `roundelay reactions`, and approvals in a chat: agents with a scripted model and
the real command line.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from roundelay.network.frames import RecordFrame, encode
from roundelay.runs import reactions as reaction_list
from roundelay.runs.node_source import LiveSource
from roundelay.runs.reactions import list_open_reactions
from roundelay.runs.reactions import list_reactions as list_all
from roundelay.runs.why import follow
from tests.support.announced import announced_node
from tests.support.command import TIMEOUT_S, Command, command, invoke, run
from tests.support.node import Node

AGENT = """
id: desk
instruction: You pay.
channels: [bills]
tools: ['desktools:pay', 'desktools:look']
model:
  rules:
    - when: {contains: pay}
      do:
        - {tool: pay, args: {to: ann, amount: 3}}
    - when: {contains: look}
      do:
        - {tool: look, args: {what: "it\\x1b[2J"}}
    - when: {contains: post}
      do:
        - {tool: channels_post, args: {name: bills, text: paid}}
    - when: {after: pay}
      do:
        - say: 'So: {{ result }}'
    - when: {after: look}
      do:
        - say: 'Seen: {{ result }}'
    - when: {after: channels_post}
      do:
        - finish: posted
"""
TOOLS = '''
from roundelay import tool


@tool(needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    return f"{amount} paid to {to}"


@tool
def look(what: str) -> str:
    """Look."""
    return f"looked at {what}"
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "desktools.py").write_text(TOOLS, encoding="utf-8")
    (tmp_path / "desk.yaml").write_text(AGENT, encoding="utf-8")
    return tmp_path / "desk.yaml"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with announced_node(tmp_path) as running:
        yield running


@asynccontextmanager
async def at_the_desk(file: Path) -> AsyncIterator[Command]:
    """Run the agent, and a chat in which mia writes to it."""
    async with command("agent", "run", file) as agent:
        await agent.line("desk")
        async with command("chat", "--as", "mia", "--to", "desk") as chat:
            await chat.line("You are mia in the network")
            yield chat


async def list_reactions(*flags: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads((await invoke("reactions", "list", "--json", *flags)).out)["reactions"]
    return listed


async def list_until(state: str) -> list[dict[str, Any]]:
    """Return the reactions when the newest one has this state. The record of a state is written after its visible
    effects.
    """
    async with asyncio.timeout(TIMEOUT_S), NetworkClient("watcher", kind="human") as client:
        while (await list_all(LiveSource(client), 100))[-1].state != state:
            continue
    return await list_reactions()


# -- agent try


async def test_try_shows_calls_messages_and_the_end_in_order(file: Path) -> None:
    done = await run("agent", "try", file, "look there", "--as", "mia")
    lines = [re.sub(r"^\d\d:\d\d:\d\d #\d+ ", "", line) for line in done.lines]
    assert lines == [
        "mia → desk: look there",
        "* turn 1 of at most 30",
        '* 1.0 calls look {"what": "it\\u001b[2J"}',
        "* 1.0 look gave: looked at it\\x1b[2J",
        "* turn 2 of at most 30",
        "  | Seen: looked at it\\x1b[2J",
        "desk → mia (re #5): Seen: looked at it\\x1b[2J",
        lines[-1],
    ]
    assert re.match(r"\* finished \(.+\): 2 turns, 1 tool call, \d+ prompt \+ \d+ completion tokens$", lines[-1])
    assert done.err == ""


@pytest.mark.usefixtures("real_processes")
async def test_try_gives_an_event_a_line(file: Path) -> None:
    events = [json.loads(line) for line in (await run("agent", "try", file, "post it", "--json")).lines]
    kinds = [event["type"] for event in events]
    assert kinds == [
        "message", "turn_start", "tool_requests", "tool_call_start", "message", "tool_call_end", "turn_end", "turn_start",
        *kinds[8:-1], "finished",
    ]  # fmt: skip
    assert events[4]["message"]["to"] == "channel:bills"
    assert (events[5]["tool"], events[5]["ok"]) == ("channels_post", True)
    assert (events[-1]["status"], events[-1]["reason"], events[-1]["tool_calls"]) == ("finished", "posted", 1)


@pytest.mark.parametrize(
    ("flags", "told"),
    [([], "So: Not run: mia denied it: nobody is here to approve it"), (["--approve"], "So: 3 paid to ann")],
)
async def test_try_denies_what_needs_approval_unless_it_is_told_otherwise(
    file: Path, flags: list[str], told: str
) -> None:
    done = await run("agent", "try", file, "pay ann", "--as", "mia", *flags)
    assert f"desk → mia (re #5): {told}" in done.out


async def test_try_fails_with_the_reaction(tmp_path: Path) -> None:
    file = tmp_path / "desk.yaml"
    (tmp_path / "deskmodel.py").write_text("def script(request):\n    raise RuntimeError('no model here')\n")
    file.write_text("id: desk\ninstruction: x\nmodel: {script: 'deskmodel:script'}\n")
    done = await run("agent", "try", file, "hello", code=1)
    assert done.lines[-1].startswith("* failed (")
    assert "no model here" in done.out


async def test_try_wants_to_know_which_agent_and_another_person(tmp_path: Path) -> None:
    file = tmp_path / "team.yaml"
    rules = "model: {rules: [{do: [{say: '%s'}]}]}"
    team = "agents:\n" + "".join(f"  - {{id: {it}, instruction: x, {rules % it}}}\n" for it in ("one", "two"))
    file.write_text(team)
    assert (
        "has several agents; choose one with --agent: one, two"
        in (await invoke("agent", "try", file, "hello", code=2)).err
    )
    assert "two → mia (re #" in (await invoke("agent", "try", file, "hello", "--agent", "two", "--as", "mia")).out
    assert (
        "The person cannot be two"
        in (await invoke("agent", "try", file, "hello", "--agent", "two", "--as", "two", code=2)).err
    )


# -- reactions


async def test_reactions_are_listed_shown_and_cancelled(node: Node, file: Path) -> None:
    assert (await invoke("reactions", "list")).out == "There are none.\n"
    async with at_the_desk(file) as chat:
        await chat.type("look there")
        await chat.line("desk → mia .*Seen: looked at it")
        await chat.type("pay ann")
        asked = await chat.line(r"#(\d+) desk → mia .*May I call pay")
        first, second = await list_until("waiting")
        assert (first["agent_id"], first["thread_id"]) == ("desk", "direct:desk~mia")
        assert (first["state"], first["turns"]) == ("finished", 2)
        assert (second["state"], second["turns"]) == ("waiting", 1)
        assert await list_reactions("--open") == [second]
        assert await list_reactions("--agent", "nobody") == []
        table = (await invoke("reactions", "list")).lines
        assert table[0].split() == ["REACTION", "AGENT", "TRIGGER", "THREAD", "STATE", "TURNS"]
        assert table[1].split() == [
            first["reaction"],
            "desk",
            f"#{first['trigger']}",
            "direct:desk~mia",
            "finished",
            "2",
        ]

        shown = (await invoke("reactions", "show", first["reaction"])).out
        for told in (
            f"began for #{first['trigger']} in direct:desk~mia; its prompt contains #",
            "turn 1 of desk, ",
            "  | calls look ",
            "1.0 look gave: looked at it\\x1b[2J",
            "  | says: Seen: ",
            "finished (",
        ):
            assert told in shown
        records = json.loads((await invoke("reactions", "show", second["reaction"], "--json")).out)["records"]
        assert records[0]["kind"] == "started"
        assert records[-1]["body"]["questions"] == {"a person": int(asked[1])}

        await invoke("reactions", "cancel", second["reaction"])
        assert (await list_until("cancelled"))[1]["reaction"] == second["reaction"]
        assert await list_reactions("--open") == []
        assert "no open reaction" in (await invoke("reactions", "cancel", first["reaction"], code=1)).err
    assert "There is no reaction 'r0'" in (await invoke("reactions", "show", "r0", code=1)).err


# -- approvals in a chat


DECISIONS = {
    "/approve {seq}": "So: 3 paid to ann",
    "/deny {seq} too much": "So: Not run: mia denied it: too much",
    '/edit {seq} {{"to": "bob", "amount": 1}}': "So: 1 paid to bob",
    "/reply {seq} /approve": "So: 3 paid to ann",
}


async def test_a_person_decides_in_a_chat(node: Node, file: Path) -> None:
    async with at_the_desk(file) as chat:
        for decision, told in DECISIONS.items():
            await chat.type("pay ann")
            asked = await chat.line(r"#(\d+) desk → mia .*May I call pay")
            await chat.type(decision.format(seq=asked[1]))
            said = "/approve" if decision.startswith("/reply") else r"mia (approved|denied) pay\(to="
            await chat.line(rf"mia → desk \(re #{asked[1]}\): {said}")
            await chat.line(f"desk → mia .*{told}")


async def test_a_decision_needs_the_number_of_its_request(node: Node) -> None:
    async with command("chat", "--as", "mia") as chat:
        for line in ("/approve", "/deny too much", "/edit 3", "/reply 3", "/approve 999999"):
            await chat.type(line)
            await chat.error(r"^! ")
        await chat.type("hello all")
        said = (await chat.line(r"#(\d+) mia → broadcast: hello all"))[1]
        for line in (f"/edit {said} bob, 3", f"/edit {said} [3]"):
            await chat.type(line)
            await chat.error(r"^! Write /edit SEQ ARGUMENTS .* as a JSON object")
        await chat.type(f"/approve {said}")
        await chat.error(rf"^! #{said} is not a request for approval, so nothing was sent")


async def test_what_another_writes_under_a_reactions_id_is_no_part_of_it(node: Node, file: Path) -> None:
    """Other participants can compute the ID of a reaction, and may even use it first."""
    async with at_the_desk(file):
        mia, evil = await node.person("mia"), await node.agent("evil", role="reactor")
        await mia.send("agent:desk", "look")
        looked = await mia.delivery()
        [it] = await list_until("finished")
        name, trigger = it["reaction"], it["trigger"]
        await mia.send("agent:evil", "hello")
        own = (await evil.message("hello"))["seq"]
        started = {"trigger": own, "thread_id": "direct:evil~mia", "as_of": own, "manifest": [], "config_hash": "x"}
        await evil.record(name, "started", started)
        await evil.record(
            name, "approval", {"turn": 1, "call": 0, "is_approved": True, "by": "mia", "seq": own, "at": 1}
        )
        await evil.record(name, "finished", {"status": "failed", "reason": "forged", "turns": 9, "usage": {}})
        listed = await list_reactions()
    assert [(it["agent_id"], it["trigger"], it["state"]) for it in listed if it["reaction"] == name] == [
        ("desk", trigger, "finished"),
        ("evil", own, "failed"),
    ]
    shown = await invoke("reactions", "show", name)
    assert "forged" not in shown.out
    assert "began for" in shown.out
    assert shown.err == "* evil used this id too; show its records with --agent evil\n"
    assert "forged" in (await invoke("reactions", "show", name, "--agent", "evil")).out
    why = await invoke("why", str(looked["message"]["seq"]))
    assert f"Sent in the reaction {name} of desk to #{trigger} (finished)" in why.out


async def test_open_reactions_are_found_however_long_ago_they_began() -> None:
    """The command does not search messages. It makes one call for the reactions, and one for the records of each."""
    async with Network.open(limits=Limits(root_messages_per_s=100_000)) as network:
        ann, bob = await network.join("ann"), await network.join("bob", role="reactor")
        reader = Counting(await network.join("reader", kind="service"))
        triggers = [await ann.send_text("bob", f"task {number}") for number in range(3)]
        for number, trigger in enumerate(triggers):
            await bob.record(f"r{number}", "started", {"trigger": trigger.seq}, record_id=f"s{number}")
        await bob.record("r1", "finished", {"status": "finished"}, record_id="f1")
        for number in range(1000):
            await ann.broadcast(f"noise {number}")
        found = await list_open_reactions(LiveSource(reader))
        assert [(it.reaction, it.agent_id, it.trigger, it.state) for it in found] == [
            ("r0", "bob", triggers[0].seq, "open"),
            ("r2", "bob", triggers[2].seq, "open"),
        ]
        assert reader.calls == ["network.open_reactions", "network.records", "network.records"]
        assert [it.reaction for it in await reaction_list.list_reactions(LiveSource(reader), 5)] == ["r0", "r2"]
        assert "network.list_threads" not in reader.calls


async def test_what_another_program_records_hides_no_reaction() -> None:
    """The records of another program may have any form. The command shows such records as far as it can read them."""
    async with Network.open() as network:
        ann, bob = await network.join("ann"), await network.join("bob", role="reactor")
        reader = await network.join("reader", kind="service")
        for number, first in enumerate(
            ({"trigger": "soon"}, [1], {"trigger": None, "thread_id": 1}, {"trigger": True})
        ):
            asked = await ann.send_text("bob", f"task {number}")
            frame = RecordFrame(record_id=f"n{number}", reaction=f"r{number}", kind="note", body=Raw(encode(first)))
            await bob._link.ask(f"r:n{number}", encode(frame))
            await bob.record(f"r{number}", "started", {"trigger": asked.seq}, record_id=f"s{number}")
            effect = await follow(LiveSource(reader), asked.seq)
            assert [(it.agent_id, it.reaction) for it in effect.reactions] == [("bob", f"r{number}")]
        found = await reaction_list.list_reactions(LiveSource(reader), 10)
        assert sorted(it.reaction for it in found) == ["r0", "r1", "r2", "r3"]
        assert all(it.state == "open" for it in found)


class Counting(NetworkClient):
    """A connected client that counts its calls."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client
        self.calls: list[str] = []

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        self.calls.append(op)
        return await self._client.call(op, args, call_id=call_id)


async def test_the_last_messages_are_found_beyond_many_records() -> None:
    async with Network.open(limits=Limits(root_messages_per_s=100_000)) as network:
        ann, bob = await network.join("ann"), await network.join("bob", role="reactor")
        reader = await network.join("reader", kind="service")
        for number in range(6):
            await ann.broadcast(f"said {number}")
        for number in range(300):
            await bob.record("r", "note", {"n": number}, record_id=f"n{number}")
        await ann.broadcast("said 6")
        for last in (1, 2, 4, 100):
            texts = [message.content for message in await LiveSource(reader).read_last(last)]
            assert texts == [f"said {number}" for number in range(7)][-last:]
