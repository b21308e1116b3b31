"""What happened in a run, as expectations look at it: messages, reactions with their tool calls and usage, prompts. Plain data, no IO.

Built from the rows of a simulation's ledger, or from what a live hub tells an operator (`live_log`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import msgspec

from roundelay.agents.models.model import Usage
from roundelay.clean_text import clean
from roundelay.network.client import AnyMessage
from roundelay.network.frames import decode_json
from roundelay.network.ledger import Row
from roundelay.simulation.watched import Asked

MAX_SHOWN_CHARS = 100


@dataclass
class CallRecord:
    """One tool call of a reaction. ``result`` is None while it has none."""

    turn: int
    call: int
    tool: str
    arguments: str
    seq: int
    result: str | None = None
    is_ok: bool = False

    def parsed(self) -> Any:
        """The arguments as JSON; the text itself if it is none."""
        try:
            return msgspec.json.decode(self.arguments)
        except msgspec.DecodeError:
            return self.arguments


@dataclass
class ReactionRecord:
    """One reaction. ``status`` is None while it is open."""

    reaction: str
    agent_id: str
    trigger: int = 0
    seq: int = 0
    manifest: list[int] = field(default_factory=list)
    status: str | None = None
    reason: str = ""
    turns: int = 0
    model_calls: int = 0
    usage: Usage = field(default_factory=Usage)
    calls: dict[tuple[str, int, int], CallRecord] = field(default_factory=dict)
    waits: set[tuple[str, int, int]] = field(default_factory=set)
    """The calls that wait for somebody's answer."""

    misconfigured: str = ""
    """What is wrong with its model's setting, a script say: no fault of the moment."""

    @property
    def is_waiting(self) -> bool:
        """Whether it only waits for others."""
        return bool(self.waits)

    def take(self, seq: int, kind: str, body: Any) -> None:
        """Add one of its records. Those of another program may have any shape; what is not told there is left as it was."""
        try:
            self._take(seq, kind, body if isinstance(body, Mapping) else {})
        except (ValueError, TypeError, KeyError, AttributeError):
            return

    def _take(self, seq: int, kind: str, body: Mapping[str, Any]) -> None:
        match kind:
            case "started":
                self.trigger, self.seq = body["trigger"], seq
                self.manifest = list(body.get("manifest", ()))
            case "model_reply":
                self.model_calls += 1
                used = body.get("reply", {}).get("usage")
                if used:
                    self.usage += Usage(**used)
                self.turns = max(self.turns, int(body["turn"])) if not body.get("path") else self.turns
            case "model_failed" if body["failure"] == "misconfigured":
                self.misconfigured = str(body["reason"])
            case "tool_started":
                call = CallRecord(body["turn"], body["call"], body["tool"], body["args"], seq)
                self.calls[body.get("path", ""), call.turn, call.call] = call
            case "waiting":
                self.waits.add((body.get("path", ""), body["turn"], body["call"]))
            case "tool_result":
                self.waits.discard((body.get("path", ""), body["turn"], body["call"]))
                place = (body.get("path", ""), body["turn"], body["call"])
                found = self.calls.get(place)
                if found is None:  # refused before it was made
                    found = self.calls[place] = CallRecord(body["turn"], body["call"], body["tool"], "", seq)
                found.result, found.is_ok = body["content"], body["ok"]
            case "finished":
                self.status, self.reason = str(body.get("status", "finished")), str(body.get("reason", ""))
            case _:
                return


@dataclass
class RunRecord:
    """Everything that a run left behind. ``asked`` is empty where the models were not here; ``ended_at`` is the time of the end, in ms."""

    messages: Sequence[AnyMessage]
    reactions: Sequence[ReactionRecord]
    asked: Sequence[Asked] = ()
    dead_letters: Sequence[Mapping[str, Any]] = ()
    readers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Who is in which thread at the end, by thread id."""

    values: Sequence[Any] = ()
    """What the operations gave that `mod` expectations name, in their order."""

    began_at: int = 0
    ended_at: int = 0

    def find(self, seq: int) -> AnyMessage | None:
        return next((message for message in self.messages if message.seq == seq), None)

    def path_to_root(self, message: AnyMessage) -> list[AnyMessage]:
        """The message, what caused it, what caused that, up to the root."""
        path = [message]
        while path[-1].cause is not None and (cause := self.find(path[-1].cause)) is not None:
            path.append(cause)
        return path

    def prompts_with(self, text: str, agent_id: str | None) -> list[tuple[str, str]]:
        """Who read a text in which reaction. A prompt escapes what stands in it; where prompts are unknown, the manifest tells."""
        forms = {text, escape(text, quote=False), escape(text)}
        found = [
            (asked.agent_id, asked.request.reaction)
            for asked in self.asked
            if agent_id in (None, asked.agent_id) and any(form in asked.text for form in forms)
        ]
        if not self.asked:
            holding = {message.seq for message in self.messages if text in message.text}
            found = [
                (it.agent_id, it.reaction)
                for it in self.reactions
                if agent_id in (None, it.agent_id) and holding.intersection(it.manifest)
            ]
        return list(dict.fromkeys(found))


def read_reactions(rows: Iterable[Row]) -> list[ReactionRecord]:
    """The reactions of a ledger, in the order in which they began."""
    found: dict[tuple[str, str], ReactionRecord] = {}
    for row in rows:
        if row.type == "record":
            record = found.setdefault((row.actor, row.stream), ReactionRecord(row.stream, row.actor))
            record.take(row.seq, row.label, decode_json(row.data))
    return list(found.values())


def describe_message(message: AnyMessage) -> str:
    """One message as one line: ``#12 mia -> desk: Refund order 12``."""
    text = clean(" ".join(message.text.split()))
    shown = text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
    return f"#{message.seq} {message.sender_id} -> {message.to.removeprefix('agent:')}: {shown}"
