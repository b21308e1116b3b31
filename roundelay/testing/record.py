"""Data of a run that expectations check: messages, reactions with tool calls and usage, and prompts. This module
performs no IO.

A record is built from a simulation's ledger, or from data that an operator reads from a live hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from roundelay.display.text import sanitize
from roundelay.network.addresses import short_address
from roundelay.network.client import AnyMessage
from roundelay.network.text import truncate
from roundelay.runs.reading import RecordedReaction
from roundelay.simulation.models import Asked

MAX_SHOWN_CHARS = 100


@dataclass
class RunRecord:
    """Record of one run. ``asked`` is empty if the models ran in another process. Times are in milliseconds."""

    messages: Sequence[AnyMessage]
    reactions: Sequence[RecordedReaction]
    asked: Sequence[Asked] = ()
    dead_letters: Sequence[Mapping[str, Any]] = ()
    readers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Readers of each thread at the end of the run."""

    values: Sequence[Any] = ()
    """Results of the operations in `mod` expectations, in order."""

    open_items: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Lines that describe the open items of each conversation, by root. Read only for the expectation `quiet`."""

    state_before: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """Shared state of the tools, at the start (``state_before``) and at the end of the run."""

    began_at: int = 0
    ended_at: int = 0

    @property
    def lasted_s(self) -> float:
        """Duration of the run in seconds, measured with the run's own clock."""
        return (self.ended_at - self.began_at) / 1000

    def find(self, seq: int) -> AnyMessage | None:
        return next((message for message in self.messages if message.seq == seq), None)

    def path_to_root(self, message: AnyMessage) -> list[AnyMessage]:
        """Return the message and its chain of causes up to the root."""
        path = [message]
        while path[-1].cause is not None and (cause := self.find(path[-1].cause)) is not None:
            path.append(cause)
        return path

    def prompts_with(self, text: str, agent_id: str | None) -> list[tuple[str, str]]:
        """Return the (agent, reaction) pairs whose prompts contain a text. If no prompts are known, search the
        manifests.

        The escaped forms of the text are searched too, because prompts contain escaped messages.
        """
        forms = {text, escape(text, quote=False), escape(text)}
        found = [
            (asked.agent_id, asked.request.reaction)
            for asked in self.asked
            if agent_id in (None, asked.agent_id) and any(form in asked.text for form in forms)
        ]
        # Models in other processes provide no prompts, but the manifest records which messages a prompt contained.
        if not self.asked:
            holding = {message.seq for message in self.messages if text in message.text}
            found = [
                (reaction.agent_id, reaction.reaction)
                for reaction in self.reactions
                if agent_id in (None, reaction.agent_id) and holding.intersection(reaction.manifest)
            ]
        return list(dict.fromkeys(found))


def describe_message(message: AnyMessage) -> str:
    """Format a message on one line: ``#12 mia -> desk: Refund order 12``."""
    shown = truncate(sanitize(" ".join(message.text.split())), MAX_SHOWN_CHARS)
    return f"#{message.seq} {message.sender_id} -> {short_address(message.to)}: {shown}"
