"""The ``network.*`` operations of operators: who may join, what failed, how the hub does. In the shape of a mod, as `operations` is."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from .change import ChangeSet
from .entries import Disconnect, Origin, Retry
from .errors import Forbidden, InvalidArguments, UnknownMessage, UnknownRecipient
from .frames import Kind, Seq, is_id
from .ledger import Row
from .listing import take_page
from .log_lines import encode_row
from .mod import Mod, Reading, operation
from .tables import Attempt, DeadLetter, Token, Tried


class OperatorOperations(Mod):
    """Not a mod of its own: operations of the hub. Those on dead letters are their recipient's too."""

    id = "network"

    # --- participants and tokens

    @operation("change")
    def remove(self, change: ChangeSet, *, agent_id: str) -> dict[str, Any]:
        """Remove a participant for good (operators)."""
        _need_operator(change.origin)
        participant = change.state.present(agent_id)
        if participant is None:
            raise UnknownRecipient(f"Nobody is registered as {agent_id!r}.")
        for channel, member in list(change.state.memberships(agent_id).items()):
            if member.is_in:
                change.leave_channel(channel, agent_id)
        row = change.write_row("removed", data=msgspec.json.encode({"agent_id": agent_id}))
        change.put_row("participant", agent_id, msgspec.structs.replace(participant, removed_seq=row.seq))
        change.effects.append(Disconnect(agent_id, f"{agent_id} was removed from this network."))
        return {}

    @operation("change")
    def create_token(
        self, change: ChangeSet, *, agent_id: str, kind: Kind, token_hash: str, operator: bool = False
    ) -> dict[str, Any]:
        """Let the token with this hash (SHA-256, hex) join as an id (operators). The token itself is never sent."""
        _need_operator(change.origin)
        if not is_id(agent_id):
            raise InvalidArguments(f"{agent_id!r} is no id; use lower case letters, digits, '.', '_', '-'.")
        if len(token_hash) != 64 or any(char not in "0123456789abcdef" for char in token_hash):
            raise InvalidArguments("token_hash must be the SHA-256 of the token in 64 hex digits.")
        participant = change.state.participant(agent_id)
        if participant is not None and participant.kind != kind:
            raise InvalidArguments(f"{agent_id} is registered as {participant.kind}; its kind never changes.")
        if change.state.get("token", token_hash) is not None:
            raise InvalidArguments("This token is in use; make another.")
        change.write_row("token", data=msgspec.json.encode({"agent_id": agent_id, "kind": kind, "event": "created"}))
        change.put_row("token", token_hash, Token(agent_id, kind, change.stamp, operator))
        return {}

    @operation("change")
    def revoke_token(self, change: ChangeSet, *, agent_id: str) -> dict[str, Any]:
        """Revoke every token of an id and close its sessions (operators)."""
        _need_operator(change.origin)
        revoked = 0
        for key, token in list(change.state.tokens(agent_id).items()):
            if not token.revoked:
                change.put_row("token", key, msgspec.structs.replace(token, revoked=True))
                revoked += 1
        if not revoked:
            raise UnknownRecipient(f"{agent_id!r} has no token; network.list_tokens lists them.")
        change.write_row("token", data=msgspec.json.encode({"agent_id": agent_id, "event": "revoked"}))
        change.effects.append(Disconnect(agent_id, f"The token of {agent_id} was revoked."))
        return {"revoked": revoked}

    @operation("read")
    async def list_tokens(
        self, reading: Reading, *, after: str | None = None, limit: Annotated[int, Meta(ge=1, le=1000)] = 1000
    ) -> dict[str, Any]:
        """Who has tokens, without the tokens, by id and age (operators); those behind the one whose `hash` is `after`."""
        _need_operator(reading.origin)
        table: list[tuple[str, Token]] = list(reading.hub.state.items("token"))
        places = [_place_token(key, it) for key, it in table if after is not None and key[:12] == after]
        if after is not None and not places:
            raise InvalidArguments(
                f"There is no token {after[:20]!r}; after is the hash of the last one that was listed."
            )
        behind = (item for item in table if not places or _place_token(*item) > places[0])
        shown = (
            {
                "agent_id": t.agent_id,
                "kind": t.kind,
                "operator": t.operator,
                "revoked": t.revoked,
                "created_at": t.created_at,
                "hash": key[:12],
            }
            for key, t in nsmallest(limit + 1, behind, key=lambda item: _place_token(*item))
        )
        tokens, has_more = take_page(shown, limit, reading.hub.limits.max_result_bytes)
        return {"tokens": tokens, "has_more": has_more}

    # --- dead letters

    @operation("read")
    async def dead_letters(
        self,
        reading: Reading,
        *,
        agent_id: str | None = None,
        after: Annotated[str, Meta(pattern="^[^/]+/[0-9]{1,16}$")] | None = None,
        limit: Annotated[int, Meta(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """Messages that failed too often at their recipient: the caller's own, or, for operators, anybody's or everybody's. By recipient and
        seq; those behind `after`, which is AGENT/SEQ of the last one.
        """
        asked = _whose(reading.origin, agent_id)
        owner, _, seq = after.rpartition("/") if after is not None else ("", "", "")
        last = f"{owner}/{int(seq):016d}" if after is not None else ""
        found = await reading.hub.ledger.cold("dead", f"{asked}/" if asked else "", limit + 1, after=last)
        letters: list[DeadLetter] = [letter for _, letter in found]
        shown = (
            {
                "agent_id": letter.agent_id,
                "seq": letter.seq,
                "reason": letter.reason,
                "attempts": letter.failures,
                "at": letter.at,
            }
            for letter in letters
        )
        page, has_more = take_page(shown, limit, reading.hub.limits.max_result_bytes)
        return {"dead_letters": page, "has_more": has_more}

    @operation("change")
    def retry_dead_letter(self, change: ChangeSet, *, seq: Seq, agent_id: str | None = None) -> dict[str, Any]:
        """Deliver a dead letter again, with five attempts as at first."""
        owner = _take_dead_letter(change, agent_id, seq).agent_id
        change.put_row(
            "attempt", f"{owner}/{seq}", Attempt(0, change.stamp, "taken back from the dead letters", is_revived=True)
        )
        change.effects.append(Retry(owner, seq, 1, change.stamp))
        return {}

    @operation("change")
    def drop_dead_letter(self, change: ChangeSet, *, seq: Seq, agent_id: str | None = None) -> dict[str, Any]:
        """Forget a dead letter; the message itself stays in its thread."""
        letter = _take_dead_letter(change, agent_id, seq)
        change.put_row("tried", f"{letter.agent_id}/{seq:016d}", Tried(letter.failures))
        return {}

    # --- the log

    @operation("read")
    async def log(
        self,
        reading: Reading,
        *,
        after: Seq = 0,
        limit: Annotated[int, Meta(ge=1, le=500)] = 100,
        wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0,
    ) -> dict[str, Any]:
        """Every message with a seq above `after`, ascending (operators); if there is none, the answer waits for up to `wait_ms`.

        `next` is where to go on: rows that are no messages lie between.
        """
        _need_operator(reading.origin)
        hub = reading.hub
        if wait_ms and hub.state.head <= after:
            await reading.wait_beyond(after, wait_ms / 1000)
        rows = await hub.ledger.rows(after, limit, max_bytes=hub.limits.max_result_bytes)
        messages = [Raw(row.data) for row in rows if row.type == "message"]
        value = {"messages": messages, "next": rows[-1].seq if rows else after, "head": hub.state.head}
        return value | _tell_damaged(rows)

    @operation("read")
    async def rows(
        self, reading: Reading, *, after: Seq = 0, limit: Annotated[int, Meta(ge=1, le=500)] = 100
    ) -> dict[str, Any]:
        """The log itself, every row above `after`, ascending, as lines of JSON, byte by byte what is stored (operators)."""
        _need_operator(reading.origin)
        hub = reading.hub
        found = await hub.ledger.rows(after, limit, max_bytes=hub.limits.max_result_bytes)
        return {
            "rows": [encode_row(row).decode() for row in found if not row.is_damaged],
            "next": found[-1].seq if found else after, "head": hub.state.head, "epoch": hub.epoch, "name": hub.name,
            **_tell_damaged(found),
        }  # fmt: skip

    # --- figures

    @operation("read")
    async def status(self, reading: Reading) -> dict[str, Any]:
        """The hub's figures (operators)."""
        _need_operator(reading.origin)
        return dict(reading.hub.figures())


def _place_token(key: str, token: Token) -> tuple[str, int, str]:
    """Where a token stands in their list."""
    return token.agent_id, token.created_at, key


def _tell_damaged(rows: Sequence[Row]) -> dict[str, Any]:
    damaged = [row.seq for row in rows if row.is_damaged]
    return {"damaged": damaged} if damaged else {}


def _need_operator(origin: Origin) -> None:
    if not origin.is_operator:
        raise Forbidden("This operation is for operators; call it with the owner's token.")


def _whose(origin: Origin, agent_id: str | None) -> str | None:
    """Whose dead letters are meant: one's own unless an operator names others, or nobody for all."""
    if not origin.is_operator:
        if agent_id not in (None, origin.agent_id):
            raise Forbidden("The dead letters of others are for operators.")
        return origin.agent_id
    return agent_id


def _take_dead_letter(change: ChangeSet, agent_id: str | None, seq: int) -> DeadLetter:
    owner = _whose(change.origin, agent_id) or change.origin.agent_id
    key = f"{owner}/{seq:016d}"
    letter: DeadLetter | None = change.find_cold("dead", key)
    if letter is None:
        raise UnknownMessage(f"{owner} has no dead letter {seq}; network.dead_letters lists them.")
    change.put_row("dead", key, None)
    event = {"seq": seq, "agent_id": owner, "event": "taken"}
    change.write_row("dead", data=msgspec.json.encode(event))
    return letter
