"""What nobody's runner does in a replay: people, programs and agents without a file do again what the log says they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from roundelay.network.frames import CallFrame, Kind, RecordFrame, SendFrame, WireMessage, encode
from roundelay.network.hub import Hub
from roundelay.network.ledger import Row
from roundelay.reading.recording import Recording
from roundelay.replay.links import Hand


class Hands:
    """Everybody's hand, by id, from the registration on."""

    def __init__(self, hub: Hub, recording: Recording, new_id: Callable[[], str]) -> None:
        self._hub = hub
        self._recording = recording
        self._new_id = new_id
        self._hands: dict[str, Hand] = {}
        self._kinds: dict[str, Kind] = {
            row.actor: recording.bodies[row.seq]["kind"] for row in recording.rows if row.type == "registered"
        }

    def perform(self, row: Row) -> bool:
        """Bring a row about; False for one that is not to be brought about."""
        body = self._recording.bodies[row.seq]
        match row.type:
            case "registered":
                self._find(row.actor)
            case "message":
                self._find(row.actor).send(encode(_read_send(row)))
            case "record":
                frame = RecordFrame(record_id=row.key[2:], reaction=row.stream, kind=row.label, body=Raw(row.data))
                self._find(row.actor).send(encode(frame))
            case "removed":
                self._call(row, "network.remove", {"agent_id": body["agent_id"]})
            case "left" if body["agent_id"] != row.actor:
                self._call(row, "network.remove", {"agent_id": body["agent_id"]})
            case "left":
                self._call(row, "channels.leave", {"name": body["channel"]})
            case "joined":
                self._call(row, "channels.join", {"name": body["channel"]})
            case "channel":
                self._change_channel(row, body)
            case "budget":
                self._call(row, "network.resume_root", {"root": body["root"]})
            case _:
                return False
        return True

    def cancel(self, by: str, reaction: str) -> None:
        """Let somebody stop a reaction."""
        person = by if by in self._kinds else next((it for it, kind in self._kinds.items() if kind != "agent"), by)
        self._send_call(person, self._new_id(), "network.cancel", {"reaction": reaction})

    def take_error(self) -> str | None:
        """Give what the hub last refused to a hand, once."""
        for hand in self._hands.values():
            if hand.errors:
                return hand.errors.pop()
        return None

    def _change_channel(self, row: Row, body: dict[str, Any]) -> None:
        name = body["channel"]
        if body["event"] == "created":
            self._call(row, "channels.create", {"name": name, "topic": body["topic"], "history": body["history"]})
            return
        channel = self._hub.state.channel(name)
        if channel is not None and channel.topic != body["topic"]:
            self._call(row, "channels.set_topic", {"name": name, "topic": body["topic"]})
        else:
            self._call(row, "channels.set_history", {"name": name, "history": body["history"]})

    def _call(self, row: Row, op: str, args: dict[str, Any]) -> None:
        call_id = row.key[2:] if row.key.startswith("c:") else self._new_id()
        self._send_call(row.actor, call_id, op, args)

    def _send_call(self, agent_id: str, call_id: str, op: str, args: dict[str, Any]) -> None:
        self._find(agent_id).send(encode(CallFrame(call_id=call_id, op=op, args=Raw(encode(args)))))

    def _find(self, agent_id: str) -> Hand:
        if agent_id not in self._hands:
            self._hands[agent_id] = Hand(self._hub, agent_id, self._kinds.get(agent_id, "agent"))
        return self._hands[agent_id]


def _read_send(row: Row) -> SendFrame:
    """The ``send`` that a message came from."""
    message = _stored_message.decode(row.data)
    return SendFrame(
        message_id=message.message_id,
        to=message.to,
        content=message.content,
        text_representation=message.text_representation,
        reply_to=message.reply_to,
        cause=message.cause,
        exclude_agent_ids=list(row.excluded) if row.excluded and message.to == "broadcast" else UNSET,
        requires_response=message.requires_response,
        metadata=message.metadata,
    )


_stored_message = msgspec.json.Decoder(WireMessage)
