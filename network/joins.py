"""Step 6 for a `hello`: who this is, and with which fence. Pure; `auth` says whether the token proves it, `publisher` welcomes."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw

from .auth import Refusal, identify, presents_fence
from .change import ChangeSet, Rules
from .entries import AskToStop, Join, Origin, Outcome, Refuse, Welcome
from .errors import Forbidden, RateLimited
from .frames import encode
from .guard import next_arrival
from .state import State
from .tables import Bucket, Facts, Participant, Token

FIRST_USES = ""
"""The bucket of all ids that are bound by first use: no id is empty."""
MINUTE_MS = 60_000.0


def apply_join(rules: Rules, state: State, facts: Facts, entry: Join) -> Outcome:
    hello = entry.hello
    try:
        identity = identify(state, entry)
    except Refusal as refusal:
        return Outcome(effects=(Refuse(entry.session_id, refusal.code, refusal.error),))
    participant = state.participant(hello.agent_id)
    newest = participant.fence if participant is not None else 0
    fence = presents_fence(entry) if hello.role == "reactor" else None
    if fence is not None and fence < newest and not _lost_its_welcome(participant, fence, entry):
        return Outcome(effects=(Refuse(entry.session_id, 4409, None),))
    if fence is not None and fence > newest:
        error = Forbidden(f"The fence {fence} was never given out; the newest is {newest}. Join without one.")
        return Outcome(effects=(Refuse(entry.session_id, 4403, error),))
    new_fence = newest + 1 if hello.role == "reactor" else None
    origin = Origin(entry.session_id, hello.agent_id, hello.kind, identity.is_operator, new_fence)
    change = ChangeSet(rules, state, facts, origin)
    if identity.binds:
        try:
            _count_registration(change)
        except RateLimited as limited:
            return Outcome(effects=(Refuse(entry.session_id, 4503, limited),))
    card = Raw(bytes(hello.card)) if hello.card is not UNSET else UNSET
    is_new = participant is None
    if participant is None:
        row = change.write_row("registered", data=encode({"agent_id": hello.agent_id, "kind": hello.kind}))
        participant = Participant(hello.agent_id, hello.kind, row.seq)
    kept_card = card if card is not UNSET else participant.card
    updated = msgspec.structs.replace(
        participant,
        card=kept_card,
        fence=participant.fence if new_fence is None else new_fence,
        fence_shown=participant.fence_shown if new_fence is None else fence,
    )
    if is_new or updated != participant:
        change.put_row("participant", hello.agent_id, updated)
    if identity.binds and entry.token_hash is not None:
        change.put_row("token", entry.token_hash, Token(hello.agent_id, hello.kind, state.stamp))
    cancelled = tuple(
        AskToStop(hello.agent_id, reaction.reaction, reaction.trigger_head.thread_id, hello.agent_id)
        for reaction in state.reactions_of(hello.agent_id).values()
        if reaction.is_cancelled
    )
    return change.outcome(Welcome(origin, hello, updated, is_new, cancelled if new_fence is not None else ()))


def _count_registration(change: ChangeSet) -> None:
    """Count an id that is bound by first use against what this hub takes of them. Raises `RateLimited`."""
    bucket: Bucket = change.state.get("bucket", FIRST_USES) or Bucket()
    most = change.rules.limits.registrations_per_minute
    what = "registrations by first use (registrations_per_minute)"
    arrival = next_arrival(bucket.sends, change.stamp, most, what, MINUTE_MS)
    change.put_row("bucket", FIRST_USES, Bucket(arrival))


def _lost_its_welcome(participant: Participant | None, fence: int, entry: Join) -> bool:
    """Whether the newest fence was given for this one, and nobody holds it: it came to no one, or its session is over."""
    return participant is not None and fence == participant.fence_shown and not entry.is_held
