"""Tests of `roundelay chat` for a person, with a pipe and on a terminal. The agents here send plain frames."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.announced import announced_node
from tests.support.command import Command, command, invoke, run
from tests.support.node import Node, node_process
from tests.support.terminals import at_terminal
from tests.support.wire import WireSession

THINKING = {"type": "signal", "kind": "thinking"}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with announced_node(tmp_path) as running:
        yield running


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


@pytest.fixture
def chat_history() -> Path:
    return Path(os.environ["ROUNDELAY_HOME"], "chat_history")


def is_private(file: Path) -> bool:
    return file.stat().st_mode & 0o777 == 0o600


@asynccontextmanager
async def chatting(*flags: str, **environment: str) -> AsyncIterator[Command]:
    """Run mia's chat with its input open."""
    async with command("chat", "--as", "mia", *flags, **environment) as chat:
        await chat.line("You are mia in the network")
        yield chat


def shown(chat: Command) -> list[str]:
    """Return the messages on the screen, without times and numbers."""
    lines = [re.sub(r" \(re #\d+\)", "", line) for line in chat.lines]
    return [found[1] for line in lines if (found := re.match(r"\d\d:\d\d:\d\d #\d+ (.*)", line))]


# -- with a pipe


async def test_lines_are_sent_and_answers_shown_until_it_is_quiet(node: Node, bob: WireSession) -> None:
    async with chatting() as chat:
        await chat.line(r"^\* Online: bob\.$")
        await chat.type("hello all", "/dm bob just you")
        chat.close_input()
        first = await bob.message("hello all")
        await bob.message("just you")
        assert (first["sender_id"], first["sender_kind"], first["kind"]) == ("mia", "human", "broadcast")
        await bob.send("agent:mia", "hello mia")
        await bob.send("broadcast", "hello back", reply_to=first["seq"])
        await chat.end()
    assert shown(chat) == [
        "mia → broadcast: hello all",
        "mia → bob: just you",
        "bob → mia: hello mia",
        f"bob → broadcast in thread:{first['seq']}: hello back",
    ]


@pytest.mark.full
async def test_it_waits_as_long_as_an_agent_thinks(node: Node, bob: WireSession) -> None:
    async with chatting("--to", "bob") as chat:
        await chat.type("think about it")
        chat.close_input()
        thread = (await bob.message("think about it"))["thread_id"]
        await bob.send_frame({**THINKING, "thread_id": thread, "body": {"reaction": "r1", "active": True}})
        await chat.line("bob is thinking")
        with pytest.raises(TimeoutError):
            # This time is longer than the quiet time after which the chat would leave.
            async with asyncio.timeout(3):
                await chat.process.wait()
        await bob.send("agent:mia", "done")
        await bob.send_frame({**THINKING, "thread_id": thread, "body": {"reaction": "r1", "active": False}})
        await chat.line("bob → mia: done")
        await chat.end()


async def test_it_waits_as_long_as_a_reaction_is_open(node: Node) -> None:
    bob = await node.agent("bob", role="reactor")
    old = await node.agent("old", role="reactor")
    zoe = await node.person("zoe")
    await zoe.send("agent:old", "never finished")
    # This reaction belongs to an agent that is offline.
    await start_reaction(old, await old.message("never finished"), "r0")
    await old.drop()
    async with chatting("--to", "bob") as chat:
        await chat.type("work on it, silently")
        chat.close_input()
        await start_reaction(bob, await bob.message("work on it, silently"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.5):  # longer than the quiet time after which the chat would leave
                await chat.process.wait()
        await bob.send("agent:mia", "done")
        await bob.record("r1", "finished", {})
        await chat.line("bob → mia: done")
        await chat.end()


async def test_an_agent_that_went_offline_is_not_waited_for(node: Node, bob: WireSession) -> None:
    async with chatting("--to", "bob") as chat:
        await chat.type("think about it")
        chat.close_input()
        thread = (await bob.message("think about it"))["thread_id"]
        await bob.send_frame({**THINKING, "thread_id": thread, "body": {"reaction": "r1", "active": True}})
        await chat.line("bob is thinking")
        await bob.drop()
        await chat.line("bob is offline")
        await chat.end()


async def _ask_for_approval(bob: WireSession, message: dict[str, Any], reaction: str = "r1") -> int:
    """Start a reaction to a message, and request an approval in it. Return the seq of the request."""
    await start_reaction(bob, message, reaction)
    stored = await bob.send(
        "agent:mia",
        "May I call pay?",
        reply_to=message["seq"],
        metadata={"approval": {"reaction": reaction, "tool": "pay"}},
    )
    return int(stored["seq"])


async def test_a_pipe_ends_where_only_its_person_could_go_on(node: Node) -> None:
    bob = await node.agent("bob", role="reactor")
    async with chatting("--to", "bob") as chat:
        await chat.type("pay ann")
        chat.close_input()
        message = await bob.message("pay ann")
        await bob.send_frame(
            {**THINKING, "thread_id": message["thread_id"], "body": {"reaction": "r1", "active": True}}
        )
        seq = await _ask_for_approval(bob, message)
        await chat.line(
            rf"bob waits for the decision of #{seq}: /approve {seq} or /deny {seq} in: roundelay chat --as mia"
        )
        await chat.end()


async def test_a_request_takes_one_decision_and_none_when_nobody_waits(node: Node) -> None:
    bob = await node.agent("bob", role="reactor")
    async with chatting("--to", "bob") as chat:
        await chat.type("pay ann", "pay zoe")
        pay_ann, pay_zoe = await bob.message("pay ann"), await bob.message("pay zoe")
        first = await _ask_for_approval(bob, pay_ann)
        await chat.line(rf"#{first} ")
        await chat.type("/approve abc")
        await chat.error("Unknown scope 'abc'. Write /approve SEQ, then thread, always or nothing.")
        await chat.type(f"/approve {first}")
        decision = await bob.message("/approve")
        await chat.type(f"/deny {first} no")
        await chat.error(rf"#{first} was decided by mia in #{decision['seq']}: /approve, so nothing was sent")
        second = await _ask_for_approval(bob, pay_zoe, "r2")
        await bob.record("r2", "finished", {"status": "cancelled"})
        await chat.type(f"/approve {second}")
        await chat.error(rf"#{second} no longer waits: the reaction of bob is cancelled, so nothing was sent")
        await bob.record("r1", "finished", {})
        chat.close_input()
        await chat.end(code=1)
    assert [it for it in shown(chat) if it.startswith("mia") and "/" in it] == []
    assert any("mia approved " in it for it in shown(chat))


async def test_a_request_of_work_in_place_of_other_work_waits_no_more_once_that_has_ended(node: Node) -> None:
    bob, mia = await node.agent("bob", role="reactor"), await node.person("mia")
    async with chatting("--to", "bob") as chat:
        await chat.type("pay ann")
        message = await bob.message("pay ann")
        await start_reaction(bob, message)
        for op in ("network.take", "network.give"):
            await mia.call(op, {"thread_id": message["thread_id"]})
        request = await _ask_for_approval(bob, message, "r2")
        await chat.line(rf"#{request} ")
        await bob.record("r2", "finished", {"status": "failed"})
        await chat.type(f"/approve {request}")
        await chat.error(rf"#{request} no longer waits: the reaction of bob is failed, so nothing was sent")
        chat.close_input()
        await chat.end(code=1)


async def test_wait_says_how_long_to_stay(node: Node, bob: WireSession) -> None:
    done = await run("chat", "--as", "mia", "--wait", "0", stdin="hello\n")
    assert "mia → broadcast: hello" in done.out
    await bob.message("hello")


async def test_lines_go_to_the_current_place(node: Node, bob: WireSession) -> None:
    lines = [
        "/join dev",
        "one",
        "/dm bob two",
        "three",
        "/broadcast",
        "four",
        "/thread channel:dev",
        "five",
        "/leave",
        "six",
    ]
    async with chatting("--wait", "0") as chat:
        await chat.type(*lines)
        chat.close_input()
        await chat.end()
    assert shown(chat) == [
        "mia → channel:dev: one",
        "mia → bob: two",
        "mia → bob: three",
        "mia → broadcast: four",
        "mia → channel:dev: five",
        "mia → broadcast: six",
    ]
    assert (await bob.call("channels.list"))["channels"][0]["members"] == 0


async def test_a_private_channel_is_made_and_others_let_in_and_taken_out(node: Node, bob: WireSession) -> None:
    async with chatting() as chat:
        await chat.type("/create den closed", "just us", "/invite bob")
        await chat.line(r"^\* bob may join the channel den now")
        assert (await bob.call("channels.list"))["channels"][0]["is_invited"] is True
        await bob.call("channels.join", {"name": "den"})
        await chat.type("/dm bob", "/remove bob den")
        await chat.line(r"^\* bob is out of the channel den")
        await bob.call_refused("unknown_recipient", "channels.join", {"name": "den"})
        await chat.type("/invite bob")
        await chat.error(r"^! Write /invite ID CHANNEL")
        await chat.type("/create den secret")
        await chat.error(r"^! Write /create CHANNEL ACCESS. ACCESS is open .* invite or closed")
    assert shown(chat) == ["mia → channel:den: just us"]


async def test_lines_in_a_thread_answer_its_newest_message(node: Node, bob: WireSession) -> None:
    async with chatting() as chat:
        await chat.type("question")
        first = await bob.message("question")
        second = await bob.send("broadcast", "answer", reply_to=first["seq"])
        await chat.line("bob → broadcast in thread")
        await chat.type(f"/thread thread:{first['seq']}", "and then?")
        third = await bob.message("and then?")
        fourth = await bob.send("broadcast", "the end", reply_to=third["seq"])
        await chat.line("the end")
        await chat.type("thanks")
        fifth = await bob.message("thanks")
    assert third["thread_id"] == fifth["thread_id"] == f"thread:{first['seq']}"
    assert (third["reply_to"], fifth["reply_to"]) == (second["seq"], fourth["seq"])
    assert (third["hops"], fifth["hops"]) == (0, 0), "a person's line begins anew, however long the thread is"


async def test_a_line_that_cannot_be_obeyed_is_told_and_the_rest_goes_on(node: Node, bob: WireSession) -> None:
    lines = [
        "/dm nobody hi",
        "still to all",
        "/frob",
        "/thread nowhere:x",
        "/leave",
        "/resume",
        "/dm",
        "/join",
        "/reply 999 hm",
        "/reply #999 hm",
        "/join De v",
        "/history nope",
        "/stop nope",
        "//help is a command",
    ]
    done = await run("chat", "--as", "mia", "--wait", "0", stdin="\n".join(lines), code=1)
    errors = done.err.splitlines()
    expected = (
        "'nobody'. /agents lists the registered participants.", "/frob", "nowhere:x", "/leave CHANNEL", "/resume SEQ", "Write /dm ID", "Write /join CHANNEL",
        "There is no message 999 that mia may read. /history shows their numbers.",
        "There is no message 999 that mia may read. /history shows their numbers.",
        "'De v' is not a channel name. Use lower-case letters, digits, '.', '_' and '-'.",
        "There is no thread 'nope' that mia may read. /threads lists the threads.",
        "There is no thread 'nope' that mia may read. /threads lists the threads.",
    )  # fmt: skip
    for line, said in zip(errors, expected, strict=True):
        assert line.startswith("! ")
        assert said in line
    await bob.message("still to all")
    await bob.message("/help is a command")


async def test_quit_leaves_at_once(node: Node, bob: WireSession) -> None:
    async with chatting() as chat:
        await chat.type("hello", "/quit", "not sent")
        await chat.end()
    assert shown(chat) == ["mia → broadcast: hello"]


async def test_an_input_without_an_end_of_line_is_sent_too(node: Node, bob: WireSession) -> None:
    await run("chat", "--wait", "0", stdin=b"caf\xc3\xa9\r\nno end \xff")
    await bob.message("café")
    await bob.message("no end \ufffd")


# -- output


async def test_messages_wait_for_a_person_and_are_shown_once(node: Node, bob: WireSession) -> None:
    await run("chat", "--as", "mia", "--wait", "0")
    await bob.send("agent:mia", "while you were away")
    async with chatting() as chat:
        await chat.line("bob → mia: while you were away")
        chat.close_input()
        await chat.end()
    assert "while you were away" not in (await run("chat", "--as", "mia", "--wait", "0.5")).out


async def test_a_message_can_neither_drive_the_terminal_nor_forge_a_line(node: Node, bob: WireSession) -> None:
    async with chatting() as chat:
        await bob.send("agent:mia", "\x1b]0;title\x07\x1b[2Jhi\n12:00:00 #1 mia → bob: forged\r\u202e")
        await chat.line("forged")
        await chat.type("/history direct:bob~mia")
        await chat.line("forged")
    assert not any(re.search("[\x00-\x1f\x7f-\x9f\u202e]", line) for line in chat.lines)
    assert not any(re.match(r"\d\d:\d\d:\d\d #1 mia", line) for line in chat.lines)
    assert r"  | 12:00:00 #1 mia → bob: forged\x0d\u202e" in chat.lines


@pytest.mark.usefixtures("real_processes")
async def test_presence_and_activity_are_shown(node: Node) -> None:
    async with chatting() as chat:
        ann = await node.agent("ann")
        await chat.line(r"^\* ann is online")
        thread = (await ann.send("agent:mia", "hi"))["thread_id"]
        tool = {"type": "signal", "kind": "tool", "thread_id": thread}
        await ann.send_frame({**tool, "body": {"reaction": "r", "tool": "add", "active": True}})
        await chat.line(r"^\* ann uses add")
        await ann.bye()
        await chat.line(r"^\* ann is offline")


async def test_two_chats_of_one_person_show_the_same(node: Node, bob: WireSession) -> None:
    async with chatting() as here, chatting() as there:
        await here.type("from here")
        await there.line("mia → broadcast: from here")
        await bob.send("agent:mia", "to both")
        await here.line("to both")
        await there.line("to both")


async def test_everybody_is_shown_however_many_there_are(tmp_path: Path) -> None:
    async with announced_node(tmp_path, limits={"max_result_bytes": 1024}) as node:
        ids = [f"agent{number}" for number in range(30)]
        for agent_id in ids:
            await node.agent(agent_id)
        async with chatting() as chat:
            online = (await chat.line(r"^\* Online: .*")).string
            assert [agent_id for agent_id in ids if agent_id not in online] == []
            await chat.type("/agents")
            await chat.line("^agent9 ")


async def test_commands_show_who_is_there_and_what_was_said(node: Node) -> None:
    await node.agent("ann", card={"description": "adds numbers"})
    async with chatting() as chat:
        await chat.type("/agents", "hello", "/history", "/help")
        assert await chat.line(r"^ann +agent +idle +adds numbers")
        await chat.line("mia → broadcast: hello")
        await chat.line(r"^\* broadcast:")
        await chat.line("mia → broadcast: hello")
        for name in (
            "agents",
            "dm",
            "broadcast",
            "join",
            "leave",
            "thread",
            "history",
            "stop",
            "resume",
            "cost",
            "help",
            "quit",
        ):
            await chat.line(rf"^  /{name}")


# -- working agents


async def start_reaction(bob: WireSession, message: dict[str, object], reaction: str = "r1") -> None:
    body = {
        "trigger": message["seq"], "thread_id": message["thread_id"], "as_of": message["seq"], "manifest": [message["seq"]],
        "config_hash": "x",
    }  # fmt: skip
    await bob.record(reaction, "started", body)


async def test_stop_asks_what_runs_in_the_thread_to_stop(node: Node) -> None:
    bob = await node.agent("bob", role="reactor")
    async with chatting("--to", "bob") as chat:
        await chat.type("/stop", "work")
        await chat.line(r"Nobody is at work in direct:bob~mia\.$")
        message = await bob.message("work")
        await start_reaction(bob, message)
        await bob.send_frame(
            {**THINKING, "thread_id": message["thread_id"], "body": {"reaction": "r1", "active": True}}
        )
        await chat.line("bob is thinking")
        await chat.type("/broadcast", "/stop")
        await chat.line("Nobody is at work in broadcast. Agents are at work in direct:bob~mia: /stop THREAD")
        await chat.type("/stop direct:bob~mia")
        await chat.line("Asked 1 reaction in direct:bob~mia to stop")
        signal = await bob.expect("signal", kind="cancel")
        assert signal["body"] == {"reaction": "r1"}


async def test_cost_adds_up_the_recorded_replies_whoever_else_claims_them(node: Node) -> None:
    bob, eve = await node.agent("bob", role="reactor"), await node.agent("eve")
    async with chatting("--to", "bob") as chat:
        await chat.type("/cost")
        await chat.line("No agent has reacted since")
        await chat.type("work")
        await start_reaction(bob, await bob.message("work"))
        for turn in (1, 2):
            usage = {"prompt_tokens": 100, "completion_tokens": 5, "cached_tokens": 50, "reasoning_tokens": 0}
            reply = {"text": "x", "tool_calls": [], "usage": usage, "finish_reason": "stop", "model": "m"}
            await bob.record("r1", "model_reply", {"turn": turn, "reply": reply})
        claim = {"type": "signal", "kind": "thinking", "to": "agent:mia", "body": {"reaction": "r1", "active": True}}
        await eve.send_frame(claim)
        await chat.line("eve is thinking")
        await chat.type("/cost")
        await chat.line(r"^AGENT +REACTIONS +TURNS +PROMPT +CACHED +COMPLETION")
        await chat.line(r"^bob +1 +2 +200 +100 +10$")
        await chat.line(r"^all +1 +2 +200 +100 +10$")
        assert not any(line.startswith("eve ") for line in chat.lines)


async def test_cost_counts_who_was_asked_on_ones_behalf(node: Node) -> None:
    """Without operator rights, mia may not read their records, but she may know their usage."""
    bob, ann = await node.agent("bob", role="reactor"), await node.agent("ann", role="reactor")
    token = (await invoke("token", "create", "mia", "--kind", "human")).out.strip()
    async with chatting("--to", "bob", ROUNDELAY_TOKEN=token) as chat:
        await chat.type("work")
        message = await bob.message("work")
        await bob.send("agent:ann", "help me", cause=message["seq"])
        await start_reaction(ann, await ann.message("help me"), "r2")
        usage = {"prompt_tokens": 70, "completion_tokens": 3, "cached_tokens": 20, "reasoning_tokens": 0}
        reply = {"text": "x", "tool_calls": [], "usage": usage, "finish_reason": "stop", "model": "m"}
        await ann.record("r2", "model_reply", {"turn": 1, "reply": reply})
        await chat.type("/cost")
        await chat.line(r"^others +1 +70 +20 +3$")
        await chat.line(r"^all +0 +1 +70 +20 +3$")
        await chat.line("^Others: agents that were asked")


async def test_cost_says_when_the_records_may_not_be_read(node: Node) -> None:
    bob = await node.agent("bob", role="reactor")
    token = (await invoke("token", "create", "mia", "--kind", "human")).out.strip()
    async with chatting("--to", "bob", ROUNDELAY_TOKEN=token) as chat:
        await chat.type("work")
        await start_reaction(bob, await bob.message("work"))
        await chat.type("/cost")
        await chat.line("1 reaction is hidden. Records are visible to their agent and to operators")


async def test_cost_counts_records_of_another_shape_as_hidden(node: Node) -> None:
    bob = await node.agent("bob", role="reactor")
    async with chatting("--to", "bob") as chat:
        await chat.type("work")
        await start_reaction(bob, await bob.message("work"))
        await bob.record("r1", "model_reply", {"text": "mine"})
        await chat.type("/cost", "still here")
        await chat.line("1 reaction is hidden")
        await chat.line("mia → bob: still here")


async def test_resume_lets_a_stopped_conversation_go_on(tmp_path: Path) -> None:
    async with announced_node(tmp_path, limits={"max_root_messages": 2}) as node, AsyncExitStack() as stack:
        bob = await node.agent("bob")
        chat = await stack.enter_async_context(chatting("--to", "bob"))
        await chat.type("go")
        root = await bob.message("go")
        await bob.send("agent:mia", "one", cause=root["seq"])
        await bob.refused("loop_stopped", "agent:mia", "two", cause=root["seq"])
        told = await chat.line(
            r"has stopped: it has used its 2 messages, 1 of them by (?:bob|mia)\. Type /resume (\d+) in chat"
        )
        await chat.type(f"/resume {told[1]}")
        await chat.line("may go on")
        await chat.type("/resume bob")
        await chat.line(r"bob had not been stopped\.")
        await bob.send("agent:mia", "two", cause=root["seq"])
        await chat.line("bob → mia.*: two")


# -- connections


async def test_the_chat_outlives_its_hub(tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db") as node:
        port = node.url.rpartition(":")[2].strip("/")
        bob = await node.agent("bob")
        async with chatting("--url", node.url) as chat:
            await chat.type("before")
            await bob.message("before")
            await node.kill9()
            await chat.error("The connection is lost")
            await chat.type("meanwhile")
            async with command("up", "--port", port, "--db", node.db) as again:
                await again.line("is ready")
                await chat.error("Connected again")
                await chat.line("mia → broadcast: meanwhile")
                bob = await node.agent("bob")
                assert [(await bob.delivery())["message"]["content"] for _ in range(2)] == ["before", "meanwhile"]
                await chat.line("bob is online")
                await again.stop()


async def test_a_chat_whose_token_is_revoked_ends_with_a_sentence(node: Node) -> None:
    token = (await invoke("token", "create", "mia", "--kind", "human")).out.strip()
    async with chatting(ROUNDELAY_TOKEN=token) as chat:
        await invoke("token", "revoke", "mia")
        await chat.end(code=1)
    assert len(chat.errors) == 1
    assert "revoked" in chat.errors[0]


async def test_the_login_user_is_who_one_is(node: Node) -> None:
    done = await run("chat", "--wait", "0", LOGNAME="Mia O'Hara", USER="x")
    assert "You are mia-o-hara in the network contract" in done.out


# -- on a terminal


async def test_what_is_typed_stays_below_what_arrives(node: Node, bob: WireSession) -> None:
    async with at_terminal("--to", "bob") as terminal:
        terminal.type("half a li")
        await terminal.shows(r"\nbob> half a li$")
        await bob.send("agent:mia", "in between")
        await terminal.shows(r"#\d+ bob → mia: in between\nbob> half a li$")
        terminal.type("ne\r")
        assert (await bob.message("half a line"))["sender_id"] == "mia"
        await terminal.shows(r"in between\n.*#\d+ mia → bob: half a line\nbob>$")
        terminal.type("\x04")
        assert await terminal.process.wait() == 0
        assert terminal.is_as_before()


async def test_the_prompt_tells_who_is_at_work(node: Node, bob: WireSession) -> None:
    async with at_terminal("--to", "bob") as terminal:
        terminal.type("hi\r")
        thread = (await bob.message("hi"))["thread_id"]
        await bob.send_frame({**THINKING, "thread_id": thread, "body": {"reaction": "r", "active": True}})
        await terminal.shows(r"\n\(bob: Thinking…\) bob>$")
        await bob.send_frame({**THINKING, "thread_id": thread, "body": {"reaction": "r", "active": False}})
        await terminal.shows(r"\nbob>$")


async def test_the_prompt_leaves_room_to_type_in(node: Node, bob: WireSession) -> None:
    async with at_terminal("--to", f"channel:{'c' * 50}") as terminal:
        await bob.call("network.watch", {"signals": True})
        thread = (await bob.send("agent:mia", "hi"))["thread_id"]
        await bob.send_frame({**THINKING, "thread_id": thread, "body": {"reaction": "r", "active": True}})
        body = {"reaction": "r", "turn": 1, "call": 0, "tool": "t" * 64, "active": True}
        await bob.send_frame({"type": "signal", "kind": "tool", "thread_id": thread, "body": body})
        terminal.type("0123456789")
        await terminal.shows(r"\(bob uses t+…\) channel:c+…> 0123456789$")
        assert terminal.cursor[0].endswith("> 0123456789"), "the cursor stands in the same row of 60 columns"


async def test_the_prompt_is_not_drawn_for_each_of_many_signals(node: Node, bob: WireSession) -> None:
    """Any participant may send many signals. The person at the keyboard must not wait until all of them are drawn."""
    async with at_terminal("--to", "bob") as terminal:
        await terminal.shows("bob>")
        thinking = {"type": "signal", "kind": "thinking", "to": "agent:mia", "body": {"reaction": "r", "active": True}}
        await bob.send_frame(thinking)
        for number in range(500):
            body = {"reaction": "r", "turn": number, "call": 0, "tool": f"t{number}", "active": number == 499}
            await bob.send_frame({"type": "signal", "kind": "tool", "to": "agent:mia", "body": body})
        await terminal.shows("bob uses t499")
        assert terminal.raw.count("\x1b[?25l") < 100, "the cursor is hidden for each drawing"


async def test_others_see_that_one_types(node: Node, bob: WireSession) -> None:
    await bob.call("network.watch", {"signals": True})
    async with at_terminal() as terminal:
        terminal.type("hel")
        signal = await bob.expect("signal", kind="typing")
        assert (signal["sender_id"], signal["thread_id"]) == ("mia", "broadcast")


async def test_a_pasted_text_is_one_message(node: Node, bob: WireSession) -> None:
    async with at_terminal() as terminal:
        terminal.type("\x1b[200~two\rlines\x1b[201~")
        await terminal.shows(r"\nbroadcast> two\n⏎ lines$")
        terminal.type("\r")
        await bob.message("two\nlines")
        many = "line\r" * 40
        terminal.type(f"\x1b[200~{many}end\x1b[201~")
        assert "Ctrl-D leaves" in await terminal.shows(r"\n⏎ line\n⏎ end$"), "the conversation stays in view"


async def test_what_is_pasted_can_neither_press_keys_nor_drive_the_terminal(node: Node, bob: WireSession) -> None:
    pasted = "a\x03b\x04c\x1b[31md\u202ee\tf"
    async with at_terminal() as terminal:
        terminal.type(f"\x1b[200~{pasted}\x1b[201~!")
        await terminal.shows(r"broadcast> a\\x03b\\x04c\\x1b\[31md\\u202ee    f!$")
        assert "\u202e" not in terminal.raw
        terminal.type("\r")
        await bob.message(f"{pasted}!")


async def test_keys_edit_the_line_and_go_by_what_a_reader_takes_for_one_character(node: Node, bob: WireSession) -> None:
    typed = {
        "ac\x1b[Db": "abc",
        "bc\x01a\x05d": "abcd",
        "one two  \x17three": "one three",
        "one two three\x1b[1;5D\x1b[1;5D\x1b[1;5Cx": "one twox three",  # ctrl-left and ctrl-right
        "one two\x1bb\x1bd2": "one 2",  # alt-b and alt-d
        "a\x1b[1;5Pb": "ab",  # an unknown key is not text
        "lost\x03kept": "kept",
        "日本語\x1b[D\x7f": "日語",
        "e\u0301👩\u200d🚀❤\ufe0f🇩🇪\x1b[D\x7f\x7f": "e\u0301🇩🇪",
        "x👩\u200d🚀y\x01\x1b[C\x1b[3~\x04z": "xz",
    }
    async with at_terminal("--to", "bob") as terminal:
        for keys, sent in typed.items():
            terminal.type(f"{keys}\r")
            assert (await bob.delivery())["message"]["content"] == sent
        terminal.type("日本\x1b[D")
        await terminal.shows("bob> 日本$")
        terminal.type("x")
        await terminal.shows("bob> 日x本$")
        assert terminal.cursor == ("bob> 日x本", 8)


async def test_tab_completes_commands_participants_channels_and_threads(node: Node, bob: WireSession) -> None:
    await node.agent("bert")
    await bob.call("channels.create", {"name": "den"})
    seq = (await bob.send("broadcast", "one"))["seq"]
    await bob.send("broadcast", "two", reply_to=seq)
    async with at_terminal() as terminal:
        terminal.type("/d\t")
        await terminal.shows(r"broadcast> /d\n +/dm +write to one participant.*\n +/deny +deny it")
        terminal.type("\x1b")
        await terminal.shows(r"broadcast> /d$")
        terminal.type("m bo\t")
        await terminal.shows(r"broadcast> /dm bob$")
        terminal.type(" hi be\t")
        await terminal.shows(r"broadcast> /dm bob hi bert$")
        terminal.type("\r")
        await bob.message("hi bert")
        for typed, shown in {
            "/join \t": "/join den",
            "/create a cl\t": "/create a closed",
            "/remove bob d\t": "/remove bob den",
            "/thread t\t": f"/thread thread:{seq}",
            "/frob b\t": "/frob b",
            "//d\t": "//d",
        }.items():
            terminal.type(f"\x15{typed}")
            await terminal.shows(rf"bob> {re.escape(shown)}(\n|$)")


async def test_lines_of_an_earlier_chat_come_back_and_are_its_persons_alone(
    node: Node, bob: WireSession, chat_history: Path
) -> None:
    async with at_terminal("--to", "bob") as terminal:
        terminal.type("first\rsecond\r")
        await bob.message("first")
        await bob.message("second")
        terminal.type("\x04")
        assert await terminal.process.wait() == 0
    assert is_private(chat_history)
    async with at_terminal("--to", "bob") as terminal:
        terminal.type("draft")
        await terminal.shows("bob> draft$")
        terminal.type("\x1b[A")
        await terminal.shows("bob> second$")
        terminal.type("\x1b[A\x1b[A")
        await terminal.shows("bob> first$")
        terminal.type("\x1b[B\x1b[B")
        await terminal.shows("bob> draft$")


def size_of(file: Path) -> int:
    return file.stat().st_size


@pytest.fixture
def long_history(chat_history: Path) -> Path:
    chat_history.parent.mkdir(exist_ok=True)
    chat_history.write_bytes(b"\n# a time\n+old\n" * 100_000)
    chat_history.chmod(0o644)
    return chat_history


async def test_what_was_typed_earlier_takes_bounded_room(node: Node, bob: WireSession, long_history: Path) -> None:
    async with at_terminal("--to", "bob") as terminal:
        assert is_private(long_history)
        assert size_of(long_history) < 1_000_000
        await terminal.shows("bob>$")
        terminal.type("\x1b[A")
        await terminal.shows("bob> old$")


@pytest.fixture
def no_history(chat_history: Path) -> None:
    chat_history.mkdir(parents=True)


@pytest.mark.usefixtures("no_history")
async def test_a_chat_goes_on_where_no_history_can_be_kept(node: Node, bob: WireSession) -> None:
    async with at_terminal("--to", "bob") as terminal:
        terminal.type("hello\r")
        await bob.message("hello")
        await terminal.shows("mia → bob: hello\nbob>$")
        terminal.type("\x1b[A")
        await terminal.shows("bob> hello$")


async def test_the_prompt_follows_the_size_of_its_terminal(node: Node, bob: WireSession) -> None:
    async with at_terminal("--to", "bob") as terminal:
        terminal.type("0123456789 0123456789 0123456789")
        await terminal.shows(r"\nbob> 0123456789 0123456789 0123456789$")
        terminal.resize(30)
        await terminal.shows(r"\nbob> 0123456789 0123456789 012\n3456789$")
        await bob.send("agent:mia", "word " * 10)
        await terminal.shows(r"bob → mia: word( word)*(\n  \|( word)+)+\nbob> 0123456789 0123456789 012\n3456789$")


async def test_neither_a_pipe_nor_help_loads_what_a_terminal_needs(node: Node, bob: WireSession) -> None:
    for command_line, stdin in ((("chat", "--wait", "0"), "hello\n/agents\n"), (("--help",), "")):
        done = await run(*command_line, stdin=stdin, PYTHONPROFILEIMPORTTIME="1")
        loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.err.splitlines()}
        assert "roundelay" in loaded
        assert loaded & {"prompt_toolkit", "wcwidth"} == set()


@pytest.mark.parametrize("end", ["\x03", "\x04", "/quit\r", "text\x03\x03"])
async def test_leaving_gives_the_terminal_back(node: Node, end: str) -> None:
    async with at_terminal() as terminal:
        assert not terminal.is_as_before()
        terminal.type(end)
        assert await terminal.process.wait() == 0
        assert terminal.is_as_before()
        assert "broadcast>" not in terminal.screen


async def test_a_killed_chat_gives_the_terminal_back(node: Node) -> None:
    async with at_terminal() as terminal:
        terminal.process.terminate()
        assert await terminal.process.wait() == 143
        assert terminal.is_as_before()


async def test_an_answer_grows_above_the_prompt_until_it_is_a_message(node: Node, bob: WireSession) -> None:
    async with at_terminal("--to", "bob") as terminal:
        terminal.type("hi\r")
        thread = (await bob.message("hi"))["thread_id"]

        async def write(text: str, at: int) -> None:
            piece = {"index": 1, "turn": 1, "kind": "text", "at": at, "text": text}
            body = {"reaction": "r", "pieces": [piece]}
            await bob.send_frame({"type": "signal", "kind": "delta", "thread_id": thread, "body": body})

        await write("The sea", 0)
        await terminal.shows(r"mia → bob: hi\nbob … The sea\nbob>$")
        terminal.type("hm")
        await write(" is salt.", 7)
        await terminal.shows(r"mia → bob: hi\nbob … The sea is salt\.\nbob> hm$")
        await bob.send("agent:mia", "The sea is salt.")
        await terminal.shows(r"mia → bob: hi\n.*#\d+ bob → mia: The sea is salt\.\nbob> hm$")


async def test_a_pipe_is_told_what_an_agent_is_at_and_no_half_sentences(node: Node, bob: WireSession) -> None:
    async with chatting("--to", "bob") as chat:
        await chat.type("hi")
        thread = (await bob.message("hi"))["thread_id"]
        pieces = [
            {"index": at, "turn": 1, "kind": kind, "at": 0, "text": f"{kind} here"}
            for at, kind in enumerate(["text", "progress"])
        ]
        body = {"reaction": "r", "pieces": pieces}
        await bob.send_frame({"type": "signal", "kind": "delta", "thread_id": thread, "body": body})
        await chat.line(r"^\* bob: progress here \(direct:bob~mia\)$")
        assert not any("text here" in line for line in chat.lines)
        call = {"reaction": "r", "turn": 1, "call": 0, "tool": "ask", "active": True}
        inside = call | {"path": "1.0", "tool": "dig"}
        for told in (call, call | {"asked": ["ann"]}, inside, inside | {"active": False}):
            await bob.send_frame({"type": "signal", "kind": "tool", "thread_id": thread, "body": told})
        await chat.line(r"^\* bob uses ask \(direct:bob~mia\)$")
        await chat.line(r"^\* bob waits for ann \(direct:bob~mia\)$")
        await chat.line(r"^\* bob › ann uses dig \(direct:bob~mia\)$")
