"""The environment of a replay: a hub in memory on the log's clock, and the connections to the hub.

A gate holds each write of an agent until the row of that write is next. An `InputPlayer` repeats the recorded input of
participants that do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from roundelay.agents.runner import AgentRunner
from roundelay.app import OWN_MODS, server_name
from roundelay.network.addresses import conversation_of
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from roundelay.network.core.rows import Row
from roundelay.network.frames import (
    CallFrame,
    HelloFrame,
    Kind,
    RecordFrame,
    SendFrame,
    WireMessage,
    decode_json,
    encode,
)
from roundelay.network.hub import Hub
from roundelay.network.hub.local import LocalConnection
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.mod import Mod, load_mods
from roundelay.network.operations import list_operations
from roundelay.network.visibility import Visibility
from roundelay.runs.recording import Recording

Key = tuple[str, str]
"""Writer and idempotency key of a row. The key is ``m:``, ``r:`` or ``c:``, followed by the client's id."""

_stored_message = msgspec.json.Decoder(WireMessage)


class ReplayStage:
    """Network in which a replay runs. The hub's answers to the records in ``held_answers`` wait for
    `WriteGate.release_answer`.
    """

    def __init__(
        self,
        recording: Recording,
        limits: Limits,
        mods: Sequence[str | Mod],
        visibility: Visibility,
        held_answers: Collection[Key],
    ) -> None:
        self._stamp = recording.rows[0].at if recording.rows else 0
        self._ids = 0
        loaded = load_mods(list(mods), OWN_MODS)
        # Let calls that only read pass at any time: a runner waiting for such a call would keep the replay waiting.
        changes = frozenset(op for op, operation in list_operations(loaded).items() if operation.is_change)
        self.gate = WriteGate(changes, frozenset(held_answers))
        self.ledger = MemoryLedger(epoch=recording.head.epoch, name=recording.head.name)
        self.hub = Hub(
            self.ledger,
            limits=limits,
            mods=loaded,
            visibility=visibility,
            server=server_name(),
            clock=lambda: self._stamp,
            new_id=self._new_id,
        )
        self.hands = InputPlayer(self.hub, recording, self._new_id)

    def move_to(self, row: Row) -> None:
        """Set the clock and the next sequence number to the values of a row. Numbers that the log skips remain
        unused."""
        # Never set the clock back, because a hub's timestamps never decrease.
        self._stamp = max(self._stamp, row.at)
        self.hub.state.head = max(self.hub.state.head, row.seq - 1)

    def make_client(self, runner: AgentRunner) -> NetworkClient:
        """Return a client for an agent. The client's writes wait at the gate."""
        return NetworkClient(
            runner.agent_id,
            kind="agent",
            role="reactor",
            card=runner.describe_card(),
            new_id=self._new_id,
            # A random delay would make every replay different.
            jitter=lambda: 1.0,
            transport=_GatedTransport(self.hub, self.gate, runner.agent_id),
        )

    def _new_id(self) -> str:
        self._ids += 1
        return f"replay-{self._ids}"


@dataclass(frozen=True, slots=True)
class HeldWrite:
    """Frame of an agent that waits at the gate."""

    key: Key
    frame: dict[str, Any]
    send: Callable[[], None]

    @property
    def begins_reaction(self) -> bool:
        return (self.frame["type"], self.frame.get("kind")) == ("record", "started")


class WriteGate:
    """Gate that holds the write frames of agents, in order. ``changes`` names the operations that write."""

    def __init__(self, changes: Collection[str], held_answers: Collection[Key]) -> None:
        self.held: dict[Key, HeldWrite] = {}
        self._changes = changes
        self._held_answers = held_answers
        self._answers: dict[Key, Callable[[], None]] = {}

    def hold(self, agent_id: str, frame: dict[str, Any], send: Callable[[], None]) -> bool:
        """Hold a frame until `release` is called with its key. Return False for a frame that writes nothing."""
        match frame["type"]:
            case "send":
                client_id = f"m:{frame['message_id']}"
            case "record":
                client_id = f"r:{frame['record_id']}"
            case "call" if frame["op"] in self._changes:
                client_id = f"c:{frame['call_id']}"
            case _:
                return False
        key = (agent_id, client_id)
        self.held[key] = HeldWrite(key, frame, send)
        return True

    def release(self, key: Key) -> bool:
        """Send the held frame with this key. Return False if there is none."""
        held = self.held.pop(key, None)
        if held is not None:
            held.send()
        return held is not None

    def hold_answer(self, agent_id: str, payload: bytes, write: Callable[[], None]) -> bool:
        """Hold a frame that answers a record in ``held_answers``. Return False for any other frame."""
        # Check the first bytes, so that other frames need no decoding.
        if not payload.startswith(b'{"type":"stored"'):
            return False
        key = (agent_id, f"r:{msgspec.json.decode(payload).get('record_id')}")
        if key not in self._held_answers:
            return False
        self._answers[key] = write
        return True

    def release_answer(self, key: Key) -> bool:
        """Deliver the held answer to a record. Return False if no answer is held."""
        write = self._answers.pop(key, None)
        if write is not None:
            write()
        return write is not None


class _GatedTransport:
    """Transport of an agent that sends all its frames through the gate."""

    def __init__(self, hub: Hub, gate: WriteGate, agent_id: str) -> None:
        self._hub, self._gate, self._agent_id = hub, gate, agent_id

    async def connect(self) -> LocalConnection:
        return _GatedConnection(self._hub, self._gate, self._agent_id)


class _GatedConnection(LocalConnection):
    def __init__(self, hub: Hub, gate: WriteGate, agent_id: str) -> None:
        super().__init__(hub)
        self._gate = gate
        self._agent_id = agent_id

    def send(self, data: bytes) -> None:
        if not self._gate.hold(self._agent_id, decode_json(data), partial(super().send, data)):
            super().send(data)

    def write(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if not self._gate.hold_answer(self._agent_id, payload, partial(super().write, [payload])):
                super().write([payload])


def is_decision_told(row: Row) -> bool:
    """Return whether a row is the network's report of a decision that was made with ``network.decide``."""
    return row.type == "message" and row.actor == "mod:network" and row.key.startswith("c:")


class _Hand(LocalConnection):
    """Connection of a participant that does not run. The connection drops frames from the hub, except errors."""

    def __init__(self, hub: Hub, agent_id: str, kind: Kind) -> None:
        super().__init__(hub)
        self.errors: list[str] = []
        self.send(encode(HelloFrame(protocol=1, agent_id=agent_id, kind=kind)))

    def write(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if payload.startswith(b'{"type":"error"'):
                error = msgspec.json.decode(payload)
                self.errors.append(f"{error['code']}: {error['message']}")


class InputPlayer:
    """Repeats the recorded input of people, programs, and agents that do not run. Each has its own connection."""

    def __init__(self, hub: Hub, recording: Recording, new_id: Callable[[], str]) -> None:
        self._hub = hub
        self._recording = recording
        self._new_id = new_id
        self._hands: dict[str, _Hand] = {}
        self._kinds: dict[str, Kind] = {
            row.actor: recording.bodies[row.seq]["kind"] for row in recording.rows if row.type == "registered"
        }

    def perform(self, row: Row) -> bool:
        """Repeat the input that once led to a row. Return False if no input leads to such a row."""
        body = self._recording.bodies[row.seq]
        match row.type:
            case "registered":
                self._find(row.actor)
            case "message" if is_decision_told(row):
                by, _, call_id = row.key.removeprefix("c:").partition("/")
                told = body["content"]
                self._send_call(by, call_id, "network.decide", {"seq": told["request"], "decision": told["decision"]})
            case "message":
                self._find(row.actor).send(encode(_read_send(row)))
            case "record":
                frame = RecordFrame(record_id=row.key[2:], reaction=row.stream, kind=row.label, body=Raw(row.data))
                self._find(row.actor).send(encode(frame))
            case "removed":
                self._call(row, "network.remove", {"agent_id": body["agent_id"]})
            case "left" if body.get("event") == "removed":
                self._call(row, "channels.remove", {"name": body["channel"], "agent_id": body["agent_id"]})
            # This participant did not leave the channel but was removed from the network, which includes all channels.
            case "left" if body["agent_id"] != row.actor:
                self._call(row, "network.remove", {"agent_id": body["agent_id"]})
            case "left":
                self._call(row, "channels.leave", {"name": body["channel"]})
            case "joined":
                self._call(row, "channels.join", {"name": body["channel"]})
            case "channel":
                self._change_channel(row, body)
            case "hold":
                self._call(
                    row, f"network.{'take' if body['event'] == 'taken' else 'give'}", {"thread_id": body["thread_id"]}
                )
            case "budget" if "agent_id" in body:
                self._call(row, "network.resume_agent", {"agent_id": body["agent_id"]})
            case "budget":
                self._call(row, "network.resume_root", {"root": body["root"]})
            case "edited" if "content" in body and isinstance(body["content"], str):
                self._call(row, "messages.edit", {"seq": body["seq"], "text": body["content"]})
            case "deleted":
                self._call(row, "messages.delete", {"seq": body["seq"]})
            case "mod" if "args" in body:
                self._call(row, body["op"], body["args"])
            case _:
                return False
        return True

    def cancel(self, by: str, reaction: str) -> None:
        """Stop a reaction on behalf of a participant."""
        # The record may not name a participant, but some participant must send the stop. Use any participant that is
        # not an agent.
        person = by if by in self._kinds else next((it for it, kind in self._kinds.items() if kind != "agent"), by)
        self._send_call(person, self._new_id(), "network.cancel", {"reaction": reaction})

    def take_error(self) -> str | None:
        """Return and remove the hub's last error."""
        for hand in self._hands.values():
            if hand.errors:
                return hand.errors.pop()
        return None

    def _change_channel(self, row: Row, body: dict[str, Any]) -> None:
        name, event = body["channel"], body["event"]
        if event in ("invited", "removed"):
            op = "channels.invite" if event == "invited" else "channels.remove"
            self._call(row, op, {"name": name, "agent_id": body["agent_id"]})
            return
        # Rows of older logs do not contain the access, because all channels were open.
        then = {"access": "open", **body}
        if event == "created":
            self._call(
                row, "channels.create", {"name": name, **{it: then[it] for it in ("topic", "history", "access")}}
            )
            return
        channel = self._hub.state.channel(name)
        changed = (
            it
            for it in ("topic", "access", "owner", "title")
            if then.get(it, getattr(channel, it, None)) != getattr(channel, it, None)
        )
        field = next(changed, "history")
        self._call(row, f"channels.set_{field}", {"name": name, "agent_id" if field == "owner" else field: then[field]})

    def _call(self, row: Row, op: str, args: dict[str, Any]) -> None:
        # Reuse the recorded id, because rows are compared by the key that is derived from it.
        call_id = row.key[2:] if row.key.startswith("c:") else self._new_id()
        self._send_call(row.actor, call_id, op, args)

    def _send_call(self, agent_id: str, call_id: str, op: str, args: dict[str, Any]) -> None:
        self._find(agent_id).send(encode(CallFrame(call_id=call_id, op=op, args=Raw(encode(args)))))

    def _find(self, agent_id: str) -> _Hand:
        if agent_id not in self._hands:
            self._hands[agent_id] = _Hand(self._hub, agent_id, self._kinds.get(agent_id, "agent"))
        return self._hands[agent_id]


def _read_send(row: Row) -> SendFrame:
    """Return the ``send`` frame of a message row."""
    message = _stored_message.decode(row.data)
    shared = (name for name in SendFrame.__struct_fields__ if name in WireMessage.__struct_fields__)
    # The hub accepts this list only for broadcasts.
    excluded = list(row.excluded) if row.excluded and message.to == "broadcast" else UNSET
    conversation = conversation_of(row.stream) or UNSET
    given = {name: getattr(message, name) for name in shared}
    return SendFrame(**given, exclude_agent_ids=excluded, conversation=conversation)
