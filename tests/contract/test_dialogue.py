"""Test of docs/protocol/dialogue.md: plain WebSocket clients send its frames, and a node must give its answers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.command import command, run
from tests.support.wire import WireSession

DIALOGUE = (Path(__file__).parents[2] / "docs/protocol/dialogue.md").read_text(encoding="utf-8")
LEFT_OUT = "…"
VARIES = {"token", "epoch", "session_id", "sent_at"}
"""Fields whose values differ in each run. The values must still be consistent: a value of `welcome` is used again in
a resume.
"""


class Line(NamedTuple):
    """Line of the dialogue. ``who > frame`` is sent, ``who < frame`` is received, and ``who x`` loses the connection."""

    who: str
    does: str
    frame: str


def read_lines() -> Iterator[Line]:
    for block in re.findall(r"^```text\n(.*?)^```$", DIALOGUE, re.DOTALL | re.MULTILINE):
        for written in block.splitlines():
            found = re.fullmatch(r"(\w+) ([<>x])(?: (.*))?", written)
            assert found, written
            yield Line(found[1], found[2], found[3] or "")


class Play:
    """Player of the dialogue. The player maps the values on the page to the values of this run."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: dict[Any, Any] = {}
        self._sessions: dict[str, WireSession] = {}

    def learn(self, shown: Any, real: Any) -> None:
        self._known[shown] = real

    async def act(self, line: Line) -> None:
        if line.does == "x":
            await self._sessions.pop(line.who).drop()
        elif line.does == ">":
            if line.who not in self._sessions:
                self._sessions[line.who] = await WireSession.open(self._url)
            await self._sessions[line.who].send_frame(self._translate(json.loads(line.frame)))
        elif line.frame.startswith("closed "):
            assert await self._sessions[line.who].closed() == int(line.frame.removeprefix("closed "))
            assert self._sessions.pop(line.who).unread == []
        else:
            came = await self._sessions[line.who].next_frame()
            assert self._is_same(json.loads(line.frame), came), f"\nshown: {line.frame}\ncame:  {came.raw}"

    async def end(self) -> None:
        for session in self._sessions.values():
            assert session.unread == []
            await session.close()

    def _translate(self, shown: Any) -> Any:
        if isinstance(shown, dict):
            return {key: self._known.get(it, it) if key in VARIES else self._translate(it) for key, it in shown.items()}
        return [self._translate(it) for it in shown] if isinstance(shown, list) else shown

    def _is_same(self, shown: Any, came: Any, key: str = "") -> bool:
        if shown == LEFT_OUT:
            return True
        if key in VARIES:
            return type(shown) is type(came) and self._known.setdefault(shown, came) == came
        if isinstance(shown, dict) and isinstance(came, dict):
            return shown.keys() == came.keys() and all(self._is_same(shown[it], came[it], it) for it in shown)
        if isinstance(shown, list) and isinstance(came, list):
            return len(shown) == len(came) and all(self._is_same(*both) for both in zip(shown, came, strict=True))
        return type(shown) is type(came) and shown == came


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with command("up", "--name", "tea", "--port", "0", "--no-agents", cwd=tmp_path) as node:
        yield (await node.line(r"ready at (ws://\S+)"))[1]


async def test_the_dialogue_of_the_page_is_what_a_node_says(url: str) -> None:
    lines = list(read_lines())
    assert {json.loads(it.frame)["type"] for it in lines if it.does == ">"} >= {
        "hello",
        "send",
        "ack",
        "call",
        "record",
    }
    play = Play(url)
    [shown] = re.findall(r"\$ roundelay token create mia --kind human\n(\S+)\n", DIALOGUE)
    play.learn(shown, (await run("token", "create", "mia", "--kind", "human", "--url", url)).out.strip())
    for line in lines:
        await play.act(line)
    await play.end()
