"""The ways to the hub of a replay: agents' connections that hold what they write until its turn comes, and hands for everybody else.

Used by `replay`. What a gate holds is in the order in which it came; a frame is known by who sent it and under which id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from roundelay.network.frames import HelloFrame, Kind, decode_json, encode
from roundelay.network.hub import Hub
from roundelay.network.local import LocalConnection

Key = tuple[str, str]
"""Who wrote it, and its id as the log has it: ``m:``, ``r:`` or ``c:`` and the client's."""


@dataclass(frozen=True, slots=True)
class Held:
    """A frame that waits."""

    key: Key
    frame: dict[str, Any]
    let_go: Callable[[], None]


class Gate:
    """Everything that agents want to write. ``changes`` are the operations that do."""

    def __init__(self, changes: Iterable[str]) -> None:
        self.changes = frozenset(changes)
        self.held: list[Held] = []
        self.answers_to_hold: Callable[[Key], bool] = lambda key: False
        """Whether the answer to a write waits too: until `release_answer`."""
        self._answers: dict[Key, Callable[[], None]] = {}

    def take(self, key: Key) -> Held | None:
        """Take out the frame of this key, if it is there."""
        found = next((held for held in self.held if held.key == key), None)
        if found is not None:
            self.held.remove(found)
        return found

    def hold_answer(self, key: Key, let_go: Callable[[], None]) -> None:
        self._answers[key] = let_go

    def release_answer(self, key: Key) -> bool:
        """Let the answer to a write go; False if none waits."""
        let_go = self._answers.pop(key, None)
        if let_go is not None:
            let_go()
        return let_go is not None


class GatedTransport:
    """An agent's way to the hub."""

    def __init__(self, hub: Hub, gate: Gate, agent_id: str) -> None:
        self._hub = hub
        self._gate = gate
        self._agent_id = agent_id

    async def connect(self) -> LocalConnection:
        return _GatedConnection(self._hub, self._gate, self._agent_id)


class _GatedConnection(LocalConnection):
    def __init__(self, hub: Hub, gate: Gate, agent_id: str) -> None:
        super().__init__(hub)
        self._gate = gate
        self._agent_id = agent_id

    def send(self, data: bytes) -> None:
        frame = decode_json(data)
        key = _read_key(frame, self._gate.changes)
        if key is None:
            super().send(data)
            return
        self._gate.held.append(Held((self._agent_id, key), frame, lambda: LocalConnection.send(self, data)))

    def write(self, payloads: list[bytes]) -> None:
        passed = []
        for payload in payloads:
            if payload.startswith(b'{"type":"stored"'):
                answer = msgspec.json.decode(payload)
                key = (self._agent_id, f"r:{answer['record_id']}") if "record_id" in answer else None
                if key is not None and self._gate.answers_to_hold(key):
                    self._gate.hold_answer(key, partial(LocalConnection.write, self, [payload]))
                    continue
            passed.append(payload)
        if passed:
            super().write(passed)


def _read_key(frame: dict[str, Any], changes: Collection[str]) -> str | None:
    """The id under which the log would have what a frame writes; None for one that writes nothing."""
    match frame["type"]:
        case "send":
            return f"m:{frame['message_id']}"
        case "record":
            return f"r:{frame['record_id']}"
        case "call" if frame["op"] in changes:
            return f"c:{frame['call_id']}"
        case _:
            return None


class Hand(LocalConnection):
    """Writes for a participant whom nobody plays: what it is told is thrown away, but for errors."""

    def __init__(self, hub: Hub, agent_id: str, kind: Kind) -> None:
        super().__init__(hub)
        self.errors: list[str] = []
        self.send(encode(HelloFrame(protocol=1, agent_id=agent_id, kind=kind)))

    def write(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if payload.startswith(b'{"type":"error"'):
                error = msgspec.json.decode(payload)
                self.errors.append(f"{error['code']}: {error['message']}")
