"""`notify_when`: one message when somebody has answered or finished, for who cannot wait for it.

The message comes in the same commit as the answer or the end: once, whatever is killed. What others do besides (whether
an agent is idle) is not told: an agent could pass it on.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from roundelay.network.core.rows import Row
from roundelay.network.core.tables import OpenReaction
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import InvalidArguments, UnknownRecipient
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, operation

MAX_ASKED_BY_ONE, MAX_ASKED = 50, 500
"""What is asked and not told yet, of one and in a network."""
ASKED_MS = 7 * 86_400_000
"""So long it is waited for: much never ends, and few take back what they asked."""

AgentId = Annotated[str, Meta(max_length=64)]


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
        agent_id: Annotated[AgentId, Meta(description="Whose answer; without it anybody's but yours.")] = "",
    ) -> dict[str, Any]:
        """Be told once, by a message, when a message that you may read is answered (`reply_to`). Only of answers that
        come from now on, for seven days: look at the thread too."""
        change.head(seq)
        if agent_id:
            _check_known(change, agent_id)
        _ask(change, str(seq), [change.origin.agent_id, agent_id])
        return {"seq": seq, "agent_id": agent_id or None}

    @operation("change")
    def finished(
        self, change: Change, *, seq: Seq, agent_id: Annotated[AgentId, Meta(description="Which agent's work on it.")]
    ) -> dict[str, Any]:
        """Be told once, by a message, when an agent's work on a message that you may read has ended, with an answer or
        without. Only of what ends from now on, for seven days: network.message_status tells how it stands."""
        change.head(seq)
        _check_known(change, agent_id)
        _ask(change, f"end/{agent_id}/{seq}", [change.origin.agent_id])
        return {"seq": seq, "agent_id": agent_id}

    @operation("change")
    def cancel(self, change: Change, *, seq: Seq) -> dict[str, Any]:
        """Be told no more of answers to a message, nor of the end of anybody's work on it."""
        caller, asked = change.origin.agent_id, _read(change)
        mine = [request for request in asked if request.by == caller and request.seq == seq]
        _drop(change, asked, mine)
        return {"is_cancelled": bool(mine)}

    def ended(self, change: Change, reaction: OpenReaction) -> None:
        key, trigger = f"end/{reaction.agent_id}/{reaction.trigger}", reaction.trigger_head
        if not (entries := change.get(key)):
            return
        for [asker] in entries:
            if change.state.present(asker) is not None and may_read(change.state, asker, trigger):
                change.answer(asker, f"{reaction.agent_id} has finished its work on #{reaction.trigger}.")
        asked = _read(change)
        _drop(change, asked, [request for request in asked if request.key == key])

    def apply(self, change: Change, message: Row) -> None:
        said = msgspec.json.decode(message.data, type=_Said)
        if not isinstance(said.reply_to, int) or not (entries := change.get(key := str(said.reply_to))):
            return
        told = [
            entry
            for entry in entries
            if entry[0] != message.actor
            and entry[1] in ("", message.actor)
            and message.head is not None
            and change.state.present(entry[0]) is not None
            and may_read(change.state, entry[0], message.head)
        ]
        for asker in dict.fromkeys(entry[0] for entry in told):
            change.answer(asker, f"{message.actor} has answered #{said.reply_to}: #{message.seq}.")
        if told:
            asked = _read(change)
            _drop(change, asked, [request for request in asked if request.key == key and request.entry in told])


class _Asked(Struct, array_like=True, frozen=True):
    """One thing that was asked and not told: under ``key`` stands the ``entry`` too, where a message or an end finds
    it."""

    key: str
    entry: list[str]
    until: int

    @property
    def by(self) -> str:
        return self.entry[0]

    @property
    def seq(self) -> int:
        return int(self.key.rpartition("/")[2])


def _read(change: Change) -> list[_Asked]:
    """All that was asked, the oldest first."""
    return msgspec.convert(change.get("asked") or [], list[_Asked])


def _check_known(change: Change, agent_id: str) -> None:
    if change.state.present(agent_id) is None:
        raise UnknownRecipient(f"Nobody is registered as {agent_id!r}.")


def _ask(change: Change, key: str, entry: list[str]) -> None:
    """Keep what is asked, once. Raises `InvalidArguments` where too much is."""
    asked = _read(change)
    over = [
        request for request in asked if request.until <= change.stamp or (request.key, request.entry) == (key, entry)
    ]
    asked = _drop(change, asked, over)
    if sum(request.by == entry[0] for request in asked) >= MAX_ASKED_BY_ONE or len(asked) >= MAX_ASKED:
        raise InvalidArguments(
            f"At most {MAX_ASKED_BY_ONE} things are asked by one, and {MAX_ASKED} in all, until they are told; "
            "notify_when.cancel takes them back."
        )
    change.put(key, [*(change.get(key) or []), entry])
    change.put("asked", [*asked, _Asked(key, entry, change.stamp + ASKED_MS)])


def _drop(change: Change, asked: list[_Asked], over: list[_Asked]) -> list[_Asked]:
    """Forget what was told, taken back or waited for long enough; gives the rest."""
    if not over:
        return asked
    for key in dict.fromkeys(request.key for request in over):
        gone = [request.entry for request in over if request.key == key]
        change.put(key, [item for item in change.get(key) or [] if item not in gone] or None)
    rest = [request for request in asked if request not in over]
    change.put("asked", rest or None)
    return rest
