"""Tests of the page's modules without a page: their own tests in node, and behavior that they share with Python."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roundelay.live_activity import LiveActivity
from roundelay.network.client import Presence, Signal
from roundelay.network.client.acks import Acks
from roundelay.network.messages import message_from_wire, write_content
from roundelay.network.operations.read_state import format_line
from tests.support.page_modules import NODE, run_module

MODULES = sorted((Path(__file__).parent / "modules").glob("*.test.js"))
THREADS = ("direct:ann~mia", "channel:tea")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_modules_own_tests_pass(path: Path) -> None:
    done = subprocess.run([NODE, "--test", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-6000:]


ODD = [
    "",
    "f-e5de420e1bf-11303aaa",
    "a",
    " ",
    "a\nb",
    "é",
    "🐝" * 3,
    "data:" + "x" * 300,
    "x" * 250,
    "two  \u2028 words\x1c\x85",
    "\t",
]


def _make_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(9 if depth < 8 else 5)
    if kind < 5:
        return chance.choice([*ODD, None, True, False, 0, -3, 12345678901])
    if kind < 7:
        return [_make_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    keys = ("text", "files", "images", "name", "type", "size", "url", "n", "title", "bytes", "file")
    return {chance.choice(keys): _make_value(chance, depth + 1) for _ in range(chance.randrange(5))}


async def test_content_is_the_same_text_as_elsewhere() -> None:
    chance = random.Random(1)
    given = [_make_value(chance) for _ in range(3000)]
    written = await run_module(
        'import { writeContent, writeLine } from "#core/text.js";',
        "(given) => given.map((it) => [writeContent(it), writeLine(writeContent(it))])",
        given,
    )
    for value, (content, line) in zip(given, written, strict=True):
        assert content == write_content(value)
        assert line == format_line(write_content(value))


def _make_event(chance: random.Random, seq: int) -> dict[str, Any]:
    """Return a random signal, message or departure of an agent, as a frame. Some frames are malformed."""
    agent, thread, reaction = chance.choice(("ann", "bob")), chance.choice(THREADS), chance.choice("rst")
    odd = chance.choice([None, True, -1, 1.5, 2**40, "x", "1.0/x", "9" * 90])
    path = chance.choice(["", "", "1.0", "1.0/2.1", "1.0.1", "1.0/2.1/1.0", odd if chance.random() < 0.3 else ""])
    place = {"path": path, "turn": chance.choice([0, 1, 1, 2, odd if chance.random() < 0.2 else 1])}
    signal = {"type": "signal", "sender_id": agent, "thread_id": thread}
    match chance.randrange(10):
        case 0 | 1:
            body: Any = {"reaction": reaction, "active": chance.random() < 0.7}
            return {**signal, "kind": "thinking", "body": body if chance.random() < 0.95 else odd}
        case 2 | 3:
            body = {
                **place,
                "call": chance.choice([None, 0, 1, 2]),
                "tool": chance.choice(["find", "bob", "x" * 90, odd]),
            }
            asked = {"asked": chance.choice([["bob"], ["bob", "cy"], odd])} if chance.random() < 0.3 else {}
            return {
                **signal,
                "kind": "tool",
                "body": {"reaction": reaction, "active": chance.random() < 0.6, **body, **asked},
            }
        case 4 | 5 | 6 | 7:
            pieces = [
                {
                    **place,
                    "kind": chance.choice(["text", "reasoning", "tool", "progress", "odd"]),
                    "at": chance.choice([0, 0, 3, 6, 9, odd if chance.random() < 0.2 else 12]),
                    "text": chance.choice(["abc", "🐝b", "x" * 3000, ""]),
                    "call": chance.choice([None, 0, 1]),
                    "is_done": chance.random() < 0.2,
                }
                for _ in range(chance.randrange(1, 3))
            ]
            return {**signal, "kind": "delta", "body": {"reaction": reaction, "pieces": pieces}}
        case 8:
            metadata = chance.choice(
                [{}, {"approval": {"reaction": reaction}}, {"approval": odd}, {"still_waits": seq}]
            )
            said = {
                "content": chance.choice(["Yes", "/approve", "/deny no", "/edit", "/edit {}", {"text": "/approve"}])
            }
            sender = chance.choice([("ann", "agent"), ("bob", "agent"), ("mia", "human")])
            reply = {"reply_to": chance.randrange(1, seq + 1)} if chance.random() < 0.6 else {}
            made = {"seq": seq, "message_id": f"{seq}", "kind": "channel", "to": "channel:tea", "thread_id": thread}
            who = {"sender_id": sender[0], "sender_kind": sender[1], "root": seq, "hops": 0, "sent_at": 1}
            return {"type": "deliver", "message": {**made, **who, **said, **reply, "metadata": metadata}}
        case _:
            return {"type": "presence", "agent_id": agent, "state": chance.choice(["offline", "online", "online"])}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(it, marks=pytest.mark.full) for it in range(2, 12))])
async def test_what_is_under_way_is_the_same_as_elsewhere(seed: int) -> None:
    chance = random.Random(seed)
    events = [_make_event(chance, seq) for seq in range(1, 400)]
    shown = await run_module(
        'import { createState, apply } from "#core/state.js"; import * as live from "#core/live_activity.js";',
        """(events) => {
          let state = createState();
          return events.map((event) => {
            state = apply(state, { ...event, at: 1 });
            const underWay = state.live_activity;
            const writing = Object.keys(Object.fromEntries(Object.values(underWay.works).map((it) => [it.thread_id]))).flatMap(
              (id) => live.listWriting(underWay, id).map((work) => [work.agent_id, id,
                work.streams.map((it) => [live.listActors(work, it.path), it.kind, it.tool, it.text])]));
            const calls = Object.values(underWay.works).flatMap((work) => live.listInnermost(work).map(
              ([path, call]) => [work.agent_id, path, call.tool, call.asked]));
            return { thinking: live.listThinking(underWay), undecided: Object.keys(underWay.undecided), writing, calls };
          });
        }""",
        events,
    )
    under_way = LiveActivity()
    for event, told in zip(events, shown, strict=True):
        match event["type"]:
            case "signal":
                under_way.handle_event(Signal(event["sender_id"], event["thread_id"], event["kind"], event["body"]))
            case "deliver":
                under_way.handle_message(message_from_wire(event["message"]))
            case _:
                under_way.handle_event(Presence(event["agent_id"], event["state"]))
        works = under_way._works.values()
        known = {
            "thinking": sorted(under_way.list_busy()),
            "undecided": sorted(str(it) for it in under_way.requests),
            "writing": sorted(
                [
                    work.agent_id,
                    thread,
                    [[[*work.name_path(it.path)], it.kind, it.tool, it.text] for it in work.texts.values()],
                ]
                for thread in THREADS
                for work in under_way.list_writing(thread)
            ),
            "calls": sorted(
                [work.agent_id, path, call.tool, [*call.asked]]
                for work in works
                for path, call in work.calls.items()
                if any(call is it for it in work.list_innermost())
            ),
        }
        assert {name: sorted(it) for name, it in told.items()} == known, event


class _Said:
    """A connection that records the frames sent on it."""

    is_full = False

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []

    def send(self, data: bytes) -> None:
        self.frames.append(json.loads(data))


async def test_what_is_acknowledged_is_what_pythons_client_acknowledges() -> None:
    """The test compares random sessions, with deliveries (some of them repeated) that are handled, refused and
    dropped in any order.
    """
    runs = [_make_session(random.Random(seed)) for seed in range(400)]
    given = await run_module(
        'import { Acks } from "#core/acks.js";',
        """(runs) => runs.map((steps) => {
          const acks = new Acks();
          return steps.map(([name, seq]) => {
            if (name !== "due") return [acks[name](seq) ?? null, acks.prefix];
            const { prefix, single } = acks.takeDue();
            return [[prefix, single.sort((a, b) => a - b)], acks.prefix];
          });
        })""",
        runs,
    )
    for steps, told in zip(runs, given, strict=True):
        acks, wire = Acks(), _Said()
        for (name, seq), (gave, prefix) in zip(steps, told, strict=True):
            match name:
                case "beginSession":
                    acks.begin_session(wire, seq)  # type: ignore[arg-type]  # it has what is used of a wire
                case "take":
                    assert acks.receive(seq) == gave, steps
                case "handle":
                    acks.handle(seq, only=True)
                case "drop":
                    acks.drop(seq)
                case _:
                    wire.frames.clear()
                    acks.send_due()
                    upto = [it["seq"] for it in wire.frames if not it["only"]]
                    alone = sorted({it["seq"] for it in wire.frames if it["only"]})
                    assert [upto[0] if upto else None, alone] == gave, steps
            assert acks.prefix == prefix, steps
        await asyncio.sleep(0)


def _make_session(chance: random.Random) -> list[tuple[str, int]]:
    steps, top = [("beginSession", 0)], 0
    for _ in range(40):
        match chance.randrange(12):
            case 0:
                steps.append(("beginSession", chance.randrange(top + 1)))
            case 1 | 2 | 3 | 4:
                top += chance.randrange(1, 3)
                steps.append(("take", top))
            case 5:
                steps.append(("take", chance.randrange(top + 1)))
            case 6 | 7 | 8:
                steps.append(("handle", chance.randrange(max(0, top - 5), top + 1)))
            case 9:
                steps.append(("drop", chance.randrange(max(0, top - 5), top + 1)))
            case _:
                steps.append(("due", 0))
    return steps


async def test_the_page_and_the_agents_agree_on_whom_a_text_mentions() -> None:
    cases = json.loads((Path(__file__).parents[1] / "support/mentions.json").read_text("utf-8"))
    texts = [*cases["wakes"], *cases["does_not_wake"]]
    asked = await run_module(
        'import { listMentioned } from "#core/mentions.js";',
        '(given) => given.map((it) => listMentioned(it, ["bob"]).length === 1)',
        texts,
    )
    assert [text for text, is_asked in zip(texts, asked, strict=True) if is_asked != (text in cases["wakes"])] == []
