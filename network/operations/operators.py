"""Operations for operators: participants, tokens and logins, dead letters, quotas, stopped conversations, the log, and
the hub's metrics.

Other participants may see only their own dead letters and quotas.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from roundelay.network.core.buckets import AnswerCount
from roundelay.network.core.change import ChangeSet, stopped_key
from roundelay.network.core.entries import DisconnectParticipant, NotifyMembership, ScheduleRetry
from roundelay.network.core.failures import undelivered_key
from roundelay.network.core.joining import describe_look_alike, find_expired_logins
from roundelay.network.core.limits import Quotas, stored_today
from roundelay.network.core.questions import remove_questions_of
from roundelay.network.core.quiet import close_all_of, reopen_delivery
from roundelay.network.core.reserved_ids import IS_THE_HUB, NETWORK, describe_reserved
from roundelay.network.core.rows import Row
from roundelay.network.core.state import State
from roundelay.network.core.tables import Attempt, AttemptCount, DeadLetter, Login, StoppedConversation, Token
from roundelay.network.core.takeover_control import end_takeover
from roundelay.network.core.uncaused_answers import has_person_written
from roundelay.network.errors import Forbidden, InvalidArguments, UnknownMessage, UnknownRecipient
from roundelay.network.frames import ID_PATTERN, Kind, Seq, is_id
from roundelay.network.ledger.log_file import encode_row
from roundelay.network.units import DAY_MS

from .conversation import PageLimit
from .paging import take_page
from .reading import AgentAction, Reading, resolve_owner
from .views import Limit


def remove(change: ChangeSet, *, agent_id: str) -> dict[str, Any]:
    """Remove a participant for good."""
    participant = change.state.present(agent_id)
    if participant is None:
        raise UnknownRecipient(
            f"Nobody is registered as {agent_id!r}. network.list_agents lists the registered participants."
        )
    for channel, member in list(change.state.memberships(agent_id).items()):
        if member.is_in:
            change.leave_channel(channel, agent_id)
    # End the takeovers of a removed person, because this person can no longer end them.
    for _, takeover in [item for item in change.state.items("hold") if item[1].by == agent_id]:
        end_takeover(change, takeover)
    for thread_id in list(change.state.read_states_of(agent_id)):
        change.set_value("mark", f"{agent_id}/{thread_id}", None)
    change.set_value("dismissed", agent_id, None)
    change.add_writes(remove_questions_of(change.state, agent_id))
    # Close the open items of the removed participant. Otherwise conversations would wait for a participant who can no
    # longer act.
    change.add_writes(close_all_of(change.state, agent_id))
    row = change.write_row("removed", data=msgspec.json.encode({"agent_id": agent_id}))
    change.set_value("participant", agent_id, msgspec.structs.replace(participant, removed_seq=row.seq))
    change.run_hooks("removed", agent_id, as_mod=True)
    _drop_logins(change, change.state.logins(agent_id))
    change.effects.append(DisconnectParticipant(agent_id, f"{agent_id} was removed from this network."))
    # The notice is for no particular channel. Everyone who watches presence has to remove the participant from lists.
    change.effects.append(NotifyMembership(None, agent_id))
    return {}


def create_token(
    change: ChangeSet, *, agent_id: str, kind: Kind, token_hash: str, operator: bool = False
) -> dict[str, Any]:
    """Let the token with this hash (SHA-256, hex) join as an id. The token itself is never sent.

    A `warning` says what a new id could be mistaken for. Such an id cannot be registered by first use.
    """
    warning = _check_new_secret(change, agent_id, kind, "token", token_hash)
    change.write_row("token", data=msgspec.json.encode({"agent_id": agent_id, "kind": kind, "event": "created"}))
    change.set_value("token", token_hash, Token(agent_id, kind, change.stamp, operator))
    return warning


MAX_LOGINS = 1000
"""Maximum number of logins at the same time. A used login counts until it expires."""
LOGIN_TTL_MS = 600_000


def create_login(
    change: ChangeSet,
    *,
    agent_id: str,
    login_hash: str,
    kind: Literal["human", "service"] = "human",
    ttl_ms: Annotated[int, Meta(ge=1000, le=DAY_MS)] = LOGIN_TTL_MS,
    operator: bool = False,
) -> dict[str, Any]:
    """Let the code with this hash (SHA-256, hex) log in as an id once, within `ttl_ms`. A `hello` with the code binds a
    token of the client to the id.

    A `warning` says what a new id could be mistaken for. Such an id cannot be registered by first use.
    """
    # Remove expired logins first, so that they do not count towards `MAX_LOGINS`.
    _drop_logins(change, find_expired_logins(change.state))
    warning = _check_new_secret(change, agent_id, kind, "login", login_hash)
    participant = change.state.participant(agent_id)
    # Refuse a removed id, because it can never join again.
    if participant is not None and participant.removed_seq is not None:
        raise InvalidArguments(f"{agent_id} was removed from this network. Choose another id.")
    # Limit the number of logins, because they are kept in memory.
    if change.state.count("login") >= MAX_LOGINS:
        raise Forbidden(f"There are {MAX_LOGINS} logins already, the maximum. Wait until some of them expire.")
    expires_at = change.stamp + ttl_ms
    change.write_row("token", data=msgspec.json.encode({"agent_id": agent_id, "kind": kind, "event": "login"}))
    change.set_value("login", login_hash, Login(agent_id, kind, expires_at, operator))
    return {"expires_at": expires_at, **warning}


def _check_new_secret(
    change: ChangeSet, agent_id: str, kind: Kind, what: Literal["token", "login"], secret_hash: str
) -> dict[str, Any]:
    """Check that a token or login may be created for an id. Return a dict with the warning for the answer, or an empty
    dict. Raises `InvalidArguments`."""
    if not is_id(agent_id):
        raise InvalidArguments(f"{agent_id!r} is not an id. Use lower-case letters, digits, '.', '_' and '-'.")
    if len(secret_hash) != 64 or any(char not in "0123456789abcdef" for char in secret_hash):
        raise InvalidArguments(f"{what}_hash must be the SHA-256 of the {what} in 64 hex digits.")
    participant = change.state.participant(agent_id)
    if participant is not None and participant.kind != kind:
        raise InvalidArguments(f"{agent_id} is registered as {participant.kind}, and a kind never changes.")
    if change.state.get("token", secret_hash) is not None or change.state.get("login", secret_hash) is not None:
        raise InvalidArguments(f"This {what} is in use. Make another one.")
    is_new = participant is None and not change.state.has_token(agent_id)
    if is_new and agent_id == NETWORK:
        raise InvalidArguments(f"{NETWORK} {IS_THE_HUB}. Choose another id.")
    passes_for = describe_reserved(agent_id, change.rules.mods) or describe_look_alike(change.state, agent_id)
    if not is_new or passes_for is None:
        return {}
    return {"warning": f"{agent_id} {passes_for}: people and models may mistake its messages for another's."}


def _drop_logins(change: ChangeSet, logins: Mapping[str, Login]) -> int:
    """Remove logins. Return how many of them were unused."""
    waiting = sum(not login.used_by and login.expires_at > change.stamp for login in logins.values())
    for key in list(logins):
        change.set_value("login", key, None)
    return waiting


def revoke_token(
    change: ChangeSet, *, agent_id: str, token_hash: Annotated[str, Meta(pattern="^[0-9a-f]{12,64}$")] | None = None
) -> dict[str, Any]:
    """Revoke every token and unused login of an id, and close the id's sessions. With a `token_hash` (or its beginning,
    as in `network.list_tokens`), revoke only that token and close the sessions that joined with it."""
    if token_hash is not None:
        return _revoke_one(change, agent_id, token_hash)
    revoked = _drop_logins(change, change.state.logins(agent_id))
    for key, token in list(change.state.tokens(agent_id).items()):
        if not token.revoked:
            change.set_value("token", key, msgspec.structs.replace(token, revoked=True))
            revoked += 1
    # Raise an error instead of returning an empty answer. An operator who mistypes an id must not believe that a token
    # was revoked.
    if not revoked:
        raise UnknownRecipient(f"{agent_id!r} has no token. network.list_tokens lists them.")
    row = change.write_row("token", data=msgspec.json.encode({"agent_id": agent_id, "event": "revoked"}))
    participant = change.state.participant(agent_id)
    if participant is not None:  # from this row on, the hub stores nothing from this participant's old sessions
        change.set_value("participant", agent_id, msgspec.structs.replace(participant, cut_seq=row.seq))
    change.effects.append(DisconnectParticipant(agent_id, f"The token of {agent_id} was revoked."))
    return {"revoked": revoked}


def _revoke_one(change: ChangeSet, agent_id: str, prefix: str) -> dict[str, Any]:
    tokens = {
        key: token
        for key, token in change.state.tokens(agent_id).items()
        if key.startswith(prefix) and not token.revoked
    }
    if not tokens:
        raise UnknownRecipient(f"{agent_id!r} has no valid token {prefix}. network.list_tokens lists them.")
    for key, token in tokens.items():
        change.set_value("token", key, msgspec.structs.replace(token, revoked=True))
        change.effects.append(DisconnectParticipant(agent_id, f"This token of {agent_id} was revoked.", key))
    event = {"agent_id": agent_id, "hash": prefix[:12], "event": "revoked"}
    change.write_row("token", data=msgspec.json.encode(event))
    return {"revoked": len(tokens)}


async def list_tokens(reading: Reading, *, after: str | None = None, limit: PageLimit = 1000) -> dict[str, Any]:
    """Tokens without their secrets, sorted by id and age, with the number of sessions that joined with each token. To
    continue, pass the `hash` of the last token as `after`."""
    table: list[tuple[str, Token]] = list(reading.hub.state.items("token"))
    places = [_token_order(key, it) for key, it in table if after is not None and key[:12] == after]
    if after is not None and not places:
        raise InvalidArguments(
            f"There is no token {after[:20]!r}. after must be the hash of the last token that was listed."
        )
    # Continue after the sort key of the last entry, not at its index, because tokens may have been added since.
    behind = (item for item in table if not places or _token_order(*item) > places[0])
    shown = (
        {
            "agent_id": t.agent_id,
            "kind": t.kind,
            "operator": t.operator,
            "revoked": t.revoked,
            "created_at": t.created_at,
            "hash": key[:12],
            "sessions": reading.hub.count_sessions(t.agent_id, key),
        }
        for key, t in nsmallest(limit + 1, behind, key=lambda item: _token_order(*item))
    )
    tokens, has_more = take_page(shown, limit, reading.hub.limits.max_result_bytes)
    return {"tokens": tokens, "has_more": has_more}


def _token_order(key: str, token: Token) -> tuple[str, int, str]:
    """Return the key by which the list of tokens is sorted."""
    return token.agent_id, token.created_at, key


# --- dead letters


_OTHERS_LETTERS = "The dead letters of others are for operators."


async def dead_letters(
    reading: Reading,
    *,
    agent_id: str | None = None,
    after: Annotated[str, Meta(pattern="^[^/]+/[0-9]{1,16}$")] | None = None,
    limit: PageLimit = 100,
) -> dict[str, Any]:
    """Messages that failed too often at their recipient, sorted by recipient and seq: those to the caller, or, for
    operators, to anybody. To continue, pass AGENT/SEQ of the last one as `after`."""
    recipient = resolve_owner(reading.origin, agent_id, _OTHERS_LETTERS)
    owner, _, seq = after.rpartition("/") if after is not None else ("", "", "")
    last = f"{owner}/{int(seq):016d}" if after is not None else ""
    stored = await reading.hub.ledger.cold("dead", f"{recipient}/" if recipient else "", limit + 1, after=last)
    letters: list[DeadLetter] = [letter for _, letter in stored]
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


def retry_dead_letter(change: ChangeSet, *, seq: Seq, agent_id: str | None = None) -> dict[str, Any]:
    """Deliver a dead letter again, with five new attempts."""
    owner = _take_dead_letter(change, agent_id, seq).agent_id
    change.set_value(
        "attempt", f"{owner}/{seq}", Attempt(0, change.stamp, "taken back from the dead letters", is_revived=True)
    )
    if (head := change.facts.heads.get(seq)) is not None:
        change.add_writes(reopen_delivery(change.state, owner, head))
    change.effects.append(ScheduleRetry(owner, seq, 1, change.stamp))
    return {}


def drop_dead_letter(change: ChangeSet, *, seq: Seq, agent_id: str | None = None) -> dict[str, Any]:
    """Remove a dead letter. The message itself stays in its thread."""
    letter = _take_dead_letter(change, agent_id, seq)
    change.set_value("tried", f"{letter.agent_id}/{seq:016d}", AttemptCount(letter.failures))
    return {}


def _take_dead_letter(change: ChangeSet, agent_id: str | None, seq: int) -> DeadLetter:
    owner = resolve_owner(change.origin, agent_id, _OTHERS_LETTERS) or change.origin.agent_id
    key = f"{owner}/{seq:016d}"
    letter: DeadLetter | None = change.lookup_cold("dead", key)
    if letter is None:
        raise UnknownMessage(f"{owner} has no dead letter {seq}. network.dead_letters lists them.")
    change.set_value("dead", key, None)
    if letter.sender_id:
        change.set_value("undelivered", undelivered_key(letter.sender_id, seq, owner), None)
    # Forget the reactions of the dead letter. A reaction that ends later must not withdraw a dead letter that no longer
    # exists.
    for reaction in letter.reactions:
        change.set_value("given_up", f"{owner}/{reaction}", None)
    event = {"seq": seq, "agent_id": owner, "event": "taken"}
    change.write_row("dead", data=msgspec.json.encode(event))
    return letter


# --- stopped conversations


async def stopped(reading: Reading, *, before: Seq | None = None, limit: Limit = 100) -> dict[str, Any]:
    """Conversations that stopped at a limit and were not resumed, newest first, with a root below `before`. Also agents
    that are stopped because they answered without causes."""
    hub = reading.hub
    after = stopped_key(before) if before is not None else ""
    stored: list[tuple[str, StoppedConversation]] = await hub.ledger.cold("stopped", "", limit + 1, after=after)
    shown = (msgspec.structs.asdict(conversation) for _, conversation in stored)
    conversations, has_more = take_page(shown, limit, hub.limits.max_result_bytes)
    agents = [
        {"agent_id": agent_id, "limit": "limits.max_uncaused_answers", "used": bucket.answer_count.count}
        for agent_id, bucket in hub.state.items("bucket")
        if bucket.answer_count.is_reported and not has_person_written(hub.state, agent_id, bucket.answer_count.since)
    ]
    return {"conversations": conversations, "has_more": has_more, "agents": agents[:limit]}


def resume_agent(change: ChangeSet, *, agent_id: str) -> dict[str, Any]:
    """Resume an agent that was stopped because it answered without causes. ``was_stopped``: the agent had been
    stopped."""
    if change.state.present(agent_id) is None:
        raise UnknownRecipient(
            f"Nobody is registered as {agent_id!r}. network.list_agents lists the registered participants."
        )
    bucket = change.state.bucket(agent_id)
    answers = bucket.answer_count
    was_stopped = answers.is_reported and not has_person_written(change.state, agent_id, answers.since)
    change.write_row("budget", data=msgspec.json.encode({"agent_id": agent_id, "event": "resumed"}))
    change.set_value("bucket", agent_id, msgspec.structs.replace(bucket, answer_count=AnswerCount()))
    return {"was_stopped": was_stopped}


# --- quotas


async def quotas(reading: Reading, *, agent_id: str | None = None, limit: Limit = 20) -> dict[str, Any]:
    """How much participants have stored today and may store, the fullest quota first. Callers see their own quota.
    Operators name a participant, or nobody to see all."""
    hub = reading.hub
    agent_id = resolve_owner(reading.origin, agent_id, "The quotas of others are for operators.")
    if agent_id is not None and hub.state.participant(agent_id) is None:
        raise UnknownRecipient(
            f"Nobody is registered as {agent_id!r}. network.list_agents lists the registered participants."
        )
    names = [agent_id] if agent_id is not None else _list_storing(hub.state)
    shares = [(_used(hub.state, hub.quotas, name), name) for name in names]
    fullest = nsmallest(limit, ((-used, name) for used, name in shares if used > 0 or agent_id is not None))
    # Describe only the quotas that are shown, because there may be a thousand participants.
    entries = [{**_describe(hub.state, hub.quotas, name), "used": round(-used, 4)} for used, name in fullest]
    return {"quotas": entries, "next_day_at": (hub.state.stamp // DAY_MS + 1) * DAY_MS}


def count_near_quota(state: State) -> int:
    """Return the number of participants who have nearly used up today's quota."""
    day = state.stamp // DAY_MS
    return sum(stored.day == day for stored in state.near_quota().values())


def _used(state: State, quotas: Quotas, agent_id: str) -> float:
    """Return how much of a participant's fullest quota is used, as a number from 0 to 1."""
    allowed = quotas.of(agent_id)
    size, messages = stored_today(state, agent_id)
    counts = (
        (size, allowed.bytes_per_day),
        (messages, allowed.messages_per_day),
        (len(state.channels_by(agent_id)), allowed.max_created_channels),
    )
    return max(count / most if most else float(count > 0) for count, most in counts)


def _describe(state: State, quotas: Quotas, agent_id: str) -> dict[str, Any]:
    size, messages = stored_today(state, agent_id)
    created = len(state.channels_by(agent_id))
    return {"agent_id": agent_id, "bytes": size, "messages": messages, "channels": created, **quotas.describe(agent_id)}


def _list_storing(state: State) -> list[str]:
    """Return the ids of all known participants who have stored anything or created a channel."""
    names = {name for table in ("bucket", "stored") for name, _ in state.items(table)}
    names.update(channel.created_by for _, channel in state.items("channel"))
    return [name for name in names if state.participant(name) is not None]


# --- log and figures


async def log(
    reading: Reading,
    *,
    after: Seq = 0,
    limit: Limit = 100,
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0,
) -> dict[str, Any]:
    """Every message with a seq above `after`, ascending. If there are none, the answer waits for up to `wait_ms`.

    Continue with `next` as `after`, because there are also rows that are not messages.
    """
    hub = reading.hub
    # Wait only if there are no new rows, so that a caller who is behind gets its rows at once.
    if wait_ms and hub.state.head <= after:
        await reading.wait_beyond(after, wait_ms / 1000)
    rows, end = await _read_log(reading, after, limit)
    return {"messages": [Raw(row.data) for row in rows if row.type == "message"], **end}


async def rows(reading: Reading, *, after: Seq = 0, limit: Limit = 100) -> dict[str, Any]:
    """Every row of the log above `after`, ascending. Each row is a line of JSON, byte by byte as stored."""
    stored, end = await _read_log(reading, after, limit)
    lines = [encode_row(row).decode() for row in stored if not row.is_damaged]
    return {"rows": lines, **end, "epoch": reading.hub.epoch, "name": reading.hub.name}


async def status(reading: Reading) -> dict[str, Any]:
    """The hub's figures."""
    return dict(reading.hub.figures())


async def _read_log(reading: Reading, after: int, limit: int) -> tuple[list[Row], dict[str, Any]]:
    """Return rows above ``after``, and the fields `next`, `head` and `damaged` of the answer.

    The ledger commits rows shortly before the hub's state contains them. Rows that are not in the state yet are left
    for the next page. Otherwise `head` could be lower than `next`, and clients would conclude that an older ledger was
    restored.
    """
    hub = reading.hub
    stored = await hub.ledger.rows(after, limit, max_bytes=hub.limits.max_result_bytes)
    head = hub.state.head
    rows = [row for row in stored if row.seq <= head]
    damaged = [row.seq for row in rows if row.is_damaged]
    end: dict[str, Any] = {"next": rows[-1].seq if rows else after, "head": head}
    return rows, end | ({"damaged": damaged} if damaged else {})


async def node_agents(reading: Reading) -> dict[str, Any]:
    """The agents that this node runs: the state of each process, and whether its file has changed."""
    supervisor = reading.hub.supervisor
    return {"agents": [] if supervisor is None else supervisor.list_agents()}


async def control_agent(
    reading: Reading, *, agent_id: Annotated[str, Meta(pattern=ID_PATTERN)], action: AgentAction
) -> dict[str, Any]:
    """Start, stop, restart or reload the process of an agent that this node runs. `reload` applies the agent's changed
    file. A file with errors is refused."""
    supervisor = reading.hub.supervisor
    if supervisor is None:
        raise InvalidArguments("This node runs no agents. Stop or start the agent where it was started.")
    if reading.place is None:
        return await supervisor.control(agent_id, action)
    # Release this read's share of the read budget, because starting a process takes seconds.
    reading.place.release()
    try:
        return await supervisor.control(agent_id, action)
    finally:
        await reading.place.acquire()
