"""`notify_when`: one message when somebody has answered or finished, for who cannot wait for it.

The message comes in the same commit as the answer or the end: once, whatever is killed. What others do besides (whether an agent is
idle) is not told: an agent could pass it on.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from roundelay.network.core.tables import OpenReaction, Row
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, operation

MAX_ASKERS = 50
"""Of one message."""


class _Said(Struct):
    reply_to: int | UnsetType | None = UNSET


class NotifyWhen(Mod):
    """Tell once of an answer."""

    id = "notify_when"

    @operation("change")
    def answered(
        self,
        change: Change,
        *,
        seq: Seq,
        agent_id: Annotated[str, Meta(description="Whose answer; without it anybody's but yours.")] = "",
    ) -> dict[str, Any]:
        """Be told once, by a message, when a message that you may read is answered (`reply_to`). Only of answers that
        come from now on: look at the thread too."""
        change.head(seq)
        _ask(change, str(seq), [change.origin.agent_id, agent_id])
        return {"seq": seq, "agent_id": agent_id or None}

    @operation("change")
    def finished(
        self, change: Change, *, seq: Seq, agent_id: Annotated[str, Meta(description="Which agent's work on it.")]
    ) -> dict[str, Any]:
        """Be told once, by a message, when an agent's work on a message that you may read has ended, with an answer or
        without. Only of what ends from now on: network.message_status tells how it stands."""
        change.head(seq)
        _ask(change, f"end/{agent_id}/{seq}", [change.origin.agent_id])
        return {"seq": seq, "agent_id": agent_id}

    @operation("change")
    def cancel(self, change: Change, *, seq: Seq) -> dict[str, Any]:
        """Be told no more of answers to a message (of an end one is told once at most)."""
        asked = change.get(str(seq)) or []
        rest = [it for it in asked if it[0] != change.origin.agent_id]
        if rest != asked:
            _keep(change, seq, rest)
        return {"is_cancelled": rest != asked}

    def ended(self, change: Change, reaction: OpenReaction) -> None:
        key, trigger = f"end/{reaction.agent_id}/{reaction.trigger}", reaction.trigger_head
        if not (asked := change.get(key)):
            return
        for [asker] in asked:
            if change.state.present(asker) is not None and may_read(change.state, asker, trigger):
                change.answer(asker, f"{reaction.agent_id} has finished its work on #{reaction.trigger}.")
        change.put(key, None)

    def apply(self, change: Change, message: Row) -> None:
        said = msgspec.json.decode(message.data, type=_Said)
        if not isinstance(said.reply_to, int) or not (asked := change.get(str(said.reply_to))):
            return
        told = [
            it
            for it in asked
            if it[0] != message.actor
            and it[1] in ("", message.actor)
            and message.head is not None
            and change.state.present(it[0]) is not None
            and may_read(change.state, it[0], message.head)
        ]
        for asker in dict.fromkeys(it[0] for it in told):
            change.answer(asker, f"{message.actor} has answered #{said.reply_to}: #{message.seq}.")
        if told:
            _keep(change, said.reply_to, [it for it in asked if it not in told])


def _ask(change: Change, key: str, entry: list[str]) -> None:
    asked = change.get(key) or []
    if len(asked) >= MAX_ASKERS:
        raise InvalidArguments(f"{MAX_ASKERS} ask already to be told of this message.")
    if entry not in asked:
        change.put(key, [*asked, entry])


def _keep(change: Change, seq: int, asked: list[list[str]]) -> None:
    change.put(str(seq), asked or None)
