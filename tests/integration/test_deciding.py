"""Tests of a person's decisions about calls, in `roundelay chat` on a terminal and with `roundelay approvals`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from roundelay.agents.approval_rule import ApprovalRule
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, call, say
from roundelay.agents.tools import Tool, tool
from roundelay.network.client import NetworkClient
from tests.support.agents import make_runner
from tests.support.announced import announced_node
from tests.support.command import command, invoke, run
from tests.support.node import Node
from tests.support.terminals import Terminal, at_terminal


@tool(once=True, needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay."""
    return f"{amount} paid to {to}"


def script(request: ModelRequest) -> Action | list[Action]:
    view = read_prompt(request)
    if view.tool_results:
        return say(view.tool_results[-1].content)
    names = view.incoming_text.removeprefix("pay ").split()
    return [say("A bill came."), *(call("pay", to=name, amount=5) for name in names)]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with announced_node(tmp_path) as running:
        yield running


@asynccontextmanager
async def guides(node: Node, *names: str, tools: Sequence[Tool] = (pay,)) -> AsyncIterator[None]:
    runners = [make_runner(name, script, tools=tools) for name in names]
    clients = [
        NetworkClient(it.agent_id, node.url, token=node.token_of(it.agent_id), role="reactor", card=it.describe_card())
        for it in runners
    ]
    for client in clients:
        await client.connect()
    tasks = [asyncio.create_task(it.run(client)) for it, client in zip(runners, clients, strict=True)]
    await asyncio.gather(*(it.ready() for it in runners))
    try:
        yield
    finally:
        for runner in runners:
            await runner.stop()
        await asyncio.gather(*tasks)
        for client in clients:
            await client.close()


WAITS = r"\(guide waits for your decision\) guide>"


async def see_request(terminal: Terminal) -> int:
    """Wait for a request and its prompt. Return the request's number."""
    screen = await terminal.shows(rf"May I call pay(.*\n)*{WAITS}$")
    return int(re.findall(r"#(\d+) guide → mia.*: May I call pay", screen)[-1])


async def test_the_prompt_says_who_waits_and_yes_no_or_a_right_edit_decides(node: Node) -> None:
    async with guides(node, "guide"), at_terminal("--to", "guide", columns=110) as terminal:
        terminal.type("pay ann\r")
        seq = await see_request(terminal)
        screen = terminal.screen
        assert re.search(r'May I call pay with \{"to": "ann", "amount": 5\}\?\n *\| Why: A bill came\.', screen)
        shown = " ".join(screen.replace("  | ", "").split())
        assert re.search(
            rf"\* #{seq} waits until 20[\d: -]+ for yes or no in its thread, or /approve {seq} \[thread\|always\], ",
            shown,
        )
        assert "guide … " not in screen, "it writes nothing more"
        terminal.type("yes\r")
        await terminal.shows(
            rf"mia → guide \(re #{seq}\): mia approved pay\(to=ann, amount=5\)\n(.*\n)*.*guide → mia.*: 5 paid to ann\nguide>$"
        )

        terminal.type("pay zoe\r")
        again = await see_request(terminal)
        assert again > seq
        terminal.type('/edit {"to": "zoe"}\r')
        await terminal.shows(rf"so #{again} still waits(.*\n)*{WAITS}$")
        terminal.type('/edit {"to": "zoe", "amount": 3}\r')
        await terminal.shows(r"guide → mia.*: 3 paid to zoe\nguide>$")

        terminal.type("pay eve\r")
        await see_request(terminal)
        terminal.type("/deny not her\r")
        await terminal.shows(r"Not run: mia denied it: not her\nguide>$")
        terminal.type("/approve\r")
        await terminal.shows(r"! No call waits for your decision")


async def test_of_several_calls_the_one_is_decided_that_is_named_and_no_other(node: Node) -> None:
    async with guides(node, "guide"), at_terminal("--to", "guide", columns=110) as terminal:
        terminal.type("pay ann zoe\r")
        screen = await terminal.shows(rf"May I call pay(.*\n)*.*May I call pay(.*\n)*{WAITS}$")
        first, second = map(int, re.findall(r"#(\d+) guide → mia.*: May I call pay", screen))
        for wrong in ("yes", "/deny"):
            terminal.type(f"{wrong}\r")
            await terminal.shows(rf"! Several calls wait for your decision: #{first} of guide, #{second} of guide")
        terminal.type(f"/deny {first} not her\r")
        await terminal.shows(
            rf"mia → guide \(re #{first}\): mia denied pay\(to=ann, amount=5\): not her(.*\n)*{WAITS}$"
        )
        terminal.type(f"/approve {second}x\r")
        await terminal.shows(rf"! '{second}x' is not the number of a message")
        terminal.type("yes\r")
        await terminal.shows(
            rf"mia → guide \(re #{second}\): mia approved pay\(to=zoe, amount=5\)\n(.*\n)*.*: 5 paid to zoe\nguide>$"
        )


async def test_a_chat_begins_with_what_was_said_and_what_waits(node: Node) -> None:
    async with guides(node, "guide", "till"):
        async with at_terminal("--to", "guide", columns=110) as terminal:
            terminal.type("pay ann\r")
            seq = await see_request(terminal)
            terminal.type("\x04")
            assert await terminal.process.wait() == 0
        async with at_terminal("--to", "guide", columns=110) as terminal:
            screen = await terminal.shows(WAITS)
            assert re.search(rf"mia → guide: pay ann\n(.*\n)*.*#{seq} guide → mia", screen), "what was said last"
            assert f'* #{seq} guide asks to call pay with {{"to": "ann", "amount": 5}} (A bill came.), in ' in " ".join(
                screen.replace("  | ", "").split()
            )
            terminal.type("/dm till pay zoe\r")
            await terminal.shows(r"\(guide, till wait for your decision\) till>")
            terminal.type("/approve\r")
            await terminal.shows(rf"! Several calls wait for your decision: #{seq} of guide, #\d+ of till\.")
            terminal.type("no\r")
            await terminal.shows(r"Not run: mia denied it\.\n(.*\n)*.*\(guide waits for your decision\) till>$")
            terminal.type("/approve thread\r")
            await terminal.shows(r"guide → mia.*: 5 paid to ann\n(.*\n)*till>$")


async def test_a_chat_shows_each_of_the_last_messages_once(node: Node) -> None:
    """The chat also shows its person's own last messages, which no later session receives. Unread messages are new."""
    bob = await node.agent("bob")
    await run("chat", "--as", "mia", "--wait", "0", stdin="one\n")
    await bob.send("broadcast", "two")
    for _ in range(2):
        async with command("chat", "--as", "mia") as chat:
            await chat.line("bob → broadcast: two")
            chat.close_input()
            await chat.end()
        assert [line.split(": ")[-1] for line in chat.lines if "broadcast" in line] == ["one", "two"]


async def test_what_waits_is_listed_over_all_agents_and_decided_by_number(node: Node) -> None:
    mia = await node.person("mia")
    async with guides(node, "guide", "till"):
        for agent_id, what in (("guide", "pay ann"), ("till", "pay zoe")):
            await mia.send(f"agent:{agent_id}", what)
            await mia.delivery()
        while len(listed := json.loads((await invoke("approvals", "--json")).out)["approvals"]) < 2:
            pass  # the request comes before the record of the wait
        first, second = (it["seq"] for it in listed)
        assert [(it["agent_id"], it["tool"], it["arguments"], it["reason"]) for it in listed] == [
            ("guide", "pay", {"to": "ann", "amount": 5}, "A bill came."),
            ("till", "pay", {"to": "zoe", "amount": 5}, "A bill came."),
        ]
        table = (await invoke("approvals")).lines
        assert re.match(rf"#{first} +guide +pay +{{.*}} +direct:guide~mia +20\d\d-.* A bill came\.$", table[1])

        done = await invoke("approvals", "approve", str(first), "--as", "mia")
        assert re.match(r"Told guide in #\d+: /approve\.$", done.out)
        await mia.deliveries_until("5 paid to ann")
        done = await invoke("approvals", "deny", str(first), "--as", "mia", code=1)
        assert re.search(rf"#{first} was decided by mia in #\d+: /approve, so nothing was sent", done.err)
        await node.invite(mia, "eve")
        eve = {"ROUNDELAY_TOKEN": node.tokens["eve"]}
        done = await invoke("approvals", "deny", str(second), "too much", "--as", "eve", code=1, **eve)
        assert f"no message {second} that eve may read" in done.err
        done = await invoke("approvals", "edit", str(second), "[]", "--as", "mia", code=1)
        assert "as a JSON object" in done.err
        done = await invoke("approvals", "deny", str(second), "too much", "--as", "mia", "--json")
        assert json.loads(done.out)["decision"] == "/deny too much"
        await mia.deliveries_until("Not run: mia denied it: too much")
        assert (await invoke("approvals")).out == "Nothing waits for a decision.\n"


async def test_an_operator_decides_on_what_she_does_not_read_and_the_one_who_asked_is_told(node: Node) -> None:
    host = await node.person("host")
    tom = await node.invite(host, "tom")
    async with guides(node, "guide"):
        await tom.send("agent:guide", "pay tom")
        seq = (await tom.delivery())["message"]["seq"]
        while f"#{seq}" not in (listed := (await invoke("inbox", "--as", "host")).out):
            pass  # the request comes before the record of the wait
        assert "May I call pay" in listed
        done = await invoke("approvals", "approve", str(seq), "--for", "always", "--as", "host", code=1)
        assert "host cannot read the thread" in done.err
        done = await invoke("approvals", "approve", str(seq), "--as", "host")
        assert re.match(r"Told guide in #\d+: /approve\.$", done.out)
        await tom.deliveries_until("host approved pay(to=tom, amount=5).")
        await tom.deliveries_until("5 paid to tom")
        shown = (await invoke("approvals", "show", str(seq), "--as", "host")).lines
        assert re.match(r"host decided in #\d+, 20\d\d-.*: /approve$", shown[-1])


async def test_an_approver_decides_by_number_and_who_did_is_shown_everywhere(node: Node) -> None:
    host = await node.person("host")
    tom, mia, zoe = [await node.invite(host, name) for name in ("tom", "mia", "zoe")]
    tokens = {name: {"ROUNDELAY_TOKEN": node.tokens[name]} for name in ("tom", "mia", "zoe")}
    guarded = replace(pay, approval=ApprovalRule(("mia", "zoe"), approvals_needed=2))
    async with guides(node, "guide", tools=[guarded]):
        await tom.send("agent:guide", "pay tom")
        seq = (await tom.delivery())["message"]["seq"]
        mias, zoes = [(await it.delivery())["message"]["seq"] for it in (mia, zoe)]
        while not json.loads((await invoke("approvals", "--json", "--as", "mia", **tokens["mia"])).out)["approvals"]:
            pass
        [item] = json.loads((await invoke("approvals", "--json", "--as", "mia", **tokens["mia"])).out)["approvals"]
        assert (item["seq"], item["deciders"], item["may_decide"]) == (mias, ["mia", "zoe"], True)
        for who, number in (("tom", seq), ("host", seq)):
            env = tokens.get(who, {})
            done = await invoke("approvals", "approve", str(number), "--as", who, code=1, **env)
            assert f"#{number} is decided by mia and zoe, so nothing was sent" in done.err
        await invoke("approvals", "approve", str(mias), "--as", "mia", **tokens["mia"])
        await mia.deliveries_until(
            "mia approved pay(to=tom, amount=5): 1 of 2 approvals. It waits for somebody else's."
        )
        done = await invoke("approvals", "approve", str(mias), "--as", "mia", code=1, **tokens["mia"])
        assert "already has the approval of mia and waits for another approver" in done.err
        shown = (await invoke("approvals", "show", str(zoes), "--as", "zoe", **tokens["zoe"])).out
        assert "It waits for a decision. mia approved it." in shown
        await invoke("approvals", "approve", str(zoes), "--as", "zoe", **tokens["zoe"])
        await tom.deliveries_until("mia and zoe approved pay(to=tom, amount=5).")
        answer = await tom.delivery()
        assert answer["message"]["content"] == "5 paid to tom"
        for who, number in (("tom", seq), ("mia", mias)):
            shown = (await invoke("approvals", "show", str(number), "--as", who, **tokens[who])).lines[-1]
            assert re.match(r"mia and zoe decided in #\d+, 20\d\d-.*: /approve, /approve$", shown), who
        why = " ".join((await invoke("why", str(answer["message"]["seq"]), "--as", "host")).out.split())
        said = r"mia and zoe approved it \(#\d+\); their words: mia \(#\d+: /approve\), zoe \(#\d+: /approve\)"
        assert re.search(said, why)
        [reaction] = json.loads((await invoke("reactions", "list", "--json", "--as", "host")).out)["reactions"]
        records = (await invoke("reactions", "show", reaction["reaction"], "--as", "host")).out
        assert re.search(r"approved by mia and zoe in #\d+ \(mia in #\d+: /approve; zoe in #\d+: /approve\)", records)
