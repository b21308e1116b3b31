"""`notify_when`: one notification when a message is answered, or when an agent's work on the message ends. The mod
serves callers that cannot wait for the answer.

The notification is part of the same commit as the answer or the end. It is therefore sent exactly once, even if
processes are killed. The mod offers no notifications about other facts, such as whether an agent is idle,
because the notified agent could reveal these facts to participants who may not know them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.tables import OpenReaction
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import InvalidArguments, UnknownRecipient
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, Undelivered, operation

MAX_ASKED_BY_ONE, MAX_ASKED = 50, 500
"""Maximum number of open requests of one participant, and of all participants."""
ASKED_MS = 7 * 86_400_000
"""Lifetime of a request, in milliseconds. Requests must expire, because many reactions never end and few callers
cancel their requests.
"""

AgentId = Annotated[str, Meta(max_length=64)]


class _Reply(Struct):
    reply_to: int | UnsetType | None = UNSET


class NotifyWhen(Mod):
    """Notify once about an answer or about the end of work."""

    id = "notify_when"

    @operation("change")
    def answered(
        self,
        change: Change,
        *,
        seq: Seq,
        agent_id: Annotated[
            AgentId, Meta(description="Only answers of this participant; by default of anybody but you.")
        ] = "",
    ) -> dict[str, Any]:
        """Get one notification when a message that you may read is answered (`reply_to`). This covers answers from now
        on, for seven days. Check the thread for earlier ones."""
        change.head(seq)
        if agent_id:
            _check_known(change, agent_id)
        _add_request(change, str(seq), [change.origin.agent_id, agent_id])
        return {"seq": seq, "agent_id": agent_id or None}

    @operation("change")
    def finished(
        self, change: Change, *, seq: Seq, agent_id: Annotated[AgentId, Meta(description="The agent that works on it.")]
    ) -> dict[str, Any]:
        """Get one notification when an agent's work on a message that you may read has ended, with or without an
        answer. This covers the next seven days. network.message_status shows the current state."""
        change.head(seq)
        _check_known(change, agent_id)
        _add_request(change, f"end/{agent_id}/{seq}", [change.origin.agent_id])
        return {"seq": seq, "agent_id": agent_id}

    @operation("change")
    def cancel(self, change: Change, *, seq: Seq) -> dict[str, Any]:
        """Cancel all your notifications about a message."""
        caller, requests = change.origin.agent_id, _read_requests(change)
        cancelled = [request for request in requests if request.by == caller and request.seq == seq]
        _remove_requests(change, requests, cancelled)
        return {"is_cancelled": bool(cancelled)}

    def ended(self, change: Change, reaction: OpenReaction) -> None:
        _notify_of_end(change, reaction.agent_id, reaction.trigger_head, "has finished its work on")

    def undelivered(self, change: Change, failed: Undelivered) -> None:
        if failed.message is not None:
            _notify_of_end(change, failed.agent_id, failed.message, "failed too often at")

    def removed(self, change: Change, agent_id: str) -> None:
        """Remove the requests of a removed participant, and the requests that only this participant could have fulfilled."""
        requests = _read_requests(change)
        waiting = [it for it in requests if it.entry[1:] == [agent_id] or it.key.startswith(f"end/{agent_id}/")]
        for request in waiting:
            change.notify(request.by, f"{agent_id} was removed, so wait no longer for its work on #{request.seq}.")
        _remove_requests(change, requests, [*waiting, *(it for it in requests if it.by == agent_id)])

    def apply(self, change: Change, message: Row) -> None:
        reply = msgspec.json.decode(message.data, type=_Reply)
        if not isinstance(reply.reply_to, int) or not (entries := change.get(key := str(reply.reply_to))):
            return
        # Notify only about answers of others, and only participants who may read the answer: a notice must not reveal a
        # message.
        notified = [
            entry
            for entry in entries
            if entry[0] != message.actor
            and entry[1] in ("", message.actor)
            and message.head is not None
            and change.state.present(entry[0]) is not None
            and may_read(change.state, entry[0], message.head)
        ]
        for asker in dict.fromkeys(entry[0] for entry in notified):
            change.answer(asker, f"{message.actor} has answered #{reply.reply_to}: #{message.seq}.")
        if notified:
            requests = _read_requests(change)
            _remove_requests(
                change, requests, [request for request in requests if request.key == key and request.entry in notified]
            )


def _notify_of_end(change: Change, agent_id: str, trigger: MessageHead, how: str) -> None:
    """Notify everyone who waits for the end of an agent's work on a message."""
    key = f"end/{agent_id}/{trigger.seq}"
    if not (entries := change.get(key)):
        return
    for [asker] in entries:
        if change.state.present(asker) is not None and may_read(change.state, asker, trigger):
            change.answer(asker, f"{agent_id} {how} #{trigger.seq}.")
    requests = _read_requests(change)
    _remove_requests(change, requests, [request for request in requests if request.key == key])


class _Request(Struct, array_like=True, frozen=True):
    """Open request for a notification. Its ``entry`` is also stored under ``key``, where the hub looks for requests
    when a message arrives or a reaction ends.
    """

    key: str
    entry: list[str]
    until: int

    @property
    def by(self) -> str:
        return self.entry[0]

    @property
    def seq(self) -> int:
        return int(self.key.rpartition("/")[2])


def _read_requests(change: Change) -> list[_Request]:
    """Return all open requests, oldest first."""
    return msgspec.convert(change.get("asked") or [], list[_Request])


def _check_known(change: Change, agent_id: str) -> None:
    if change.state.present(agent_id) is None:
        raise UnknownRecipient(f"{agent_id!r} is not registered in this network.")


def _add_request(change: Change, key: str, entry: list[str]) -> None:
    """Store a request, unless it exists. Raises `InvalidArguments` if there are too many."""
    requests = _read_requests(change)
    expired = [
        request for request in requests if request.until <= change.stamp or (request.key, request.entry) == (key, entry)
    ]
    # Remove expired requests when the next request is added. A scheduled due time for each request would cost more.
    requests = _remove_requests(change, requests, expired)
    if sum(request.by == entry[0] for request in requests) >= MAX_ASKED_BY_ONE or len(requests) >= MAX_ASKED:
        raise InvalidArguments(
            f"Too many open requests: at most {MAX_ASKED_BY_ONE} per participant and {MAX_ASKED} in the network. Cancel "
            "some with notify_when.cancel."
        )
    change.put(key, [*(change.get(key) or []), entry])
    change.put("asked", [*requests, _Request(key, entry, change.stamp + ASKED_MS)])


def _remove_requests(change: Change, requests: list[_Request], removed: list[_Request]) -> list[_Request]:
    """Remove requests that were notified or cancelled, or that have expired. Return the remaining requests."""
    if not removed:
        return requests
    for key in dict.fromkeys(request.key for request in removed):
        entries = [request.entry for request in removed if request.key == key]
        # None deletes the entry. Otherwise an empty list would stay forever for each message.
        change.put(key, [item for item in change.get(key) or [] if item not in entries] or None)
    remaining = [request for request in requests if request not in removed]
    change.put("asked", remaining or None)
    return remaining
