"""Step 6 for ``hello``: the participant's identity, the proof of this identity, and the session's fencing token.

docs/protocol/identity.md defines the rules. This module receives and stores only hashes of tokens. `publisher` sends
the welcome. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import msgspec
from msgspec import UNSET, Raw, Struct

from roundelay.network.config import Registration
from roundelay.network.errors import (
    Forbidden,
    InvalidFrame,
    NotAuthenticated,
    RateLimited,
    RequestError,
    RoundelayError,
    UnsupportedProtocol,
)
from roundelay.network.frames import PROTOCOL_VERSION, HelloFrame, encode, is_id
from roundelay.network.units import MINUTE_MS

from .buckets import Bucket
from .change import ChangeSet
from .entries import AcceptSession, BindCredentials, Join, Origin, Outcome, Peer, RefuseSession, RequestCancel
from .failures import count_lost_reactions
from .limits import next_arrival
from .reserved_ids import IS_THE_HUB, NETWORK, describe_reserved
from .sending import Rules
from .state import State
from .tables import Facts, Login, Participant, TableWrite, Token

CLOSE_CODES: dict[type[RoundelayError], int] = {
    UnsupportedProtocol: 4400,
    InvalidFrame: 4400,
    NotAuthenticated: 4401,
    Forbidden: 4403,
    RateLimited: 4503,
}
"""Close code for a refused ``hello``, by error class (docs/protocol.md)."""
FIRST_USES = ""
"""Key of the bucket that counts all ids registered by first use. An id is never empty, so no participant has this
key."""


class Identity(Struct, frozen=True):
    """Identity that a ``hello`` has proved. If ``binds`` is true, the id is used for the first time, so the hash of the
    token is bound to it. ``login`` is the one-time login that the session uses up, if any."""

    is_operator: bool
    binds: bool
    login: Login | None = None


def hash_token(token: str) -> str:
    """Return the SHA-256 hash of a token in hexadecimal. Tokens are long and random, so a slow hash would not make them
    safer."""
    return hashlib.sha256(token.encode()).hexdigest()


# A reactor's hello and its fencing token (`check_session` refuses frames with older tokens):
#
#   situation             token sent      newest token    result
#   new reactor           none            1               2 is issued: the session with token 1 is superseded
#   reconnect             2               2               3 is issued
#   absent for too long   1               3               close code 4409: another session has taken over meanwhile
#   welcome was lost      2               3               4 is issued, if token 3 was issued in exchange for token 2 and
#                                                         no live session holds token 3
#   ledger was replaced   5               3               Forbidden: this ledger never issued token 5


def apply_join(rules: Rules, state: State, facts: Facts, entry: Join) -> Outcome:
    """Return the outcome of a ``hello``: either an `AcceptSession` or a `RefuseSession` effect."""
    try:
        return _join(rules, state, facts, entry)
    except (RequestError, RateLimited) as error:
        return Outcome(effects=(RefuseSession(entry.session_id, CLOSE_CODES[type(error)], error),))


def _join(rules: Rules, state: State, facts: Facts, entry: Join) -> Outcome:
    if entry.hello.kind is UNSET:
        entry = msgspec.structs.replace(entry, hello=_find_kind(state, entry))
    hello = entry.hello
    # Prove the identity before revealing anything about the participant, including the newest fencing token.
    identity = identify(state, entry, rules.mods, rules.registration)
    participant = state.participant(hello.agent_id)
    newest = participant.fence if participant is not None else 0
    is_reactor = hello.role == "reactor"
    shown = hello.fence if is_reactor and hello.fence is not UNSET else None
    if shown is not None and shown < newest and not _lost_its_welcome(participant, shown, entry):
        return Outcome(effects=(RefuseSession(entry.session_id, 4409, None),))
    # A token above the newest one was issued by a ledger that has since been lost or replaced.
    if shown is not None and shown > newest:
        raise Forbidden(f"The fence {shown} was never given out. The newest is {newest}. Join without a fence.")
    # Issue fencing tokens here, in the order of the log. So two nodes or batches can never issue the same token.
    fence = newest + 1 if is_reactor else None
    rights = state.rights
    administers = rights is not None and rights.decide("administer", hello.agent_id, hello.joins_as).allowed
    is_operator = identity.is_operator or administers
    # Store the token's hash in the session, so that revoking the token ends the session.
    token = "" if entry.is_owner or entry.peer.is_trusted else entry.new_hash or entry.token_hash or ""
    origin = Origin(entry.session_id, hello.agent_id, hello.joins_as, is_operator, fence, state.head, token)
    change = ChangeSet(rules, state, facts, origin)
    if identity.binds:
        _count_registration(change)
    is_new = participant is None
    if participant is None:
        row = change.write_row("registered", data=encode({"agent_id": hello.agent_id, "kind": hello.joins_as}))
        participant = Participant(hello.agent_id, hello.joins_as, row.seq)
    updated = participant
    if hello.card is not UNSET:
        updated = msgspec.structs.replace(updated, card=Raw(bytes(hello.card)))
    if fence is not None:
        instance = hello.instance if hello.instance is not UNSET else ""
        is_same = bool(instance) and instance == participant.instance  # the same process as before the reconnect
        # Another process has replaced the lost one, so the lost process will certainly not continue.
        if participant.is_lost and not is_same:
            count_lost_reactions(change, participant)
            counted = change.state.participant(hello.agent_id)  # a new dead letter changes the agent's fault
            updated = msgspec.structs.replace(updated, fault=participant.fault if counted is None else counted.fault)
        # The life of a process is its first fencing token. So a reconnect does not look like a new process.
        life = participant.life if is_same else fence
        updated = msgspec.structs.replace(
            updated, fence=fence, fence_shown=shown, instance=instance, life=life, is_lost=False
        )
    if is_new or updated != participant:
        change.set_value("participant", hello.agent_id, updated)
    if identity.binds and entry.token_hash is not None:
        change.set_value("token", entry.token_hash, Token(hello.agent_id, hello.joins_as, state.stamp))
    if identity.login is not None and entry.token_hash is not None and entry.new_hash is not None:
        _use_up_login(change, entry.token_hash, identity.login, entry.new_hash)
    cancelled = tuple(
        RequestCancel(hello.agent_id, reaction.reaction, reaction.trigger_head.thread_id, hello.agent_id)
        for reaction in change.state.reactions_of(hello.agent_id).values()
        if reaction.is_cancelled and is_reactor
    )
    return change.outcome(AcceptSession(origin, hello, updated, is_new, cancelled))


def _find_kind(state: State, entry: Join) -> HelloFrame:
    """Return the ``hello`` with its missing kind, which is taken from the token or from the registered id. Raise
    `NotAuthenticated` if neither is known."""
    hello = entry.hello
    participant = state.participant(hello.agent_id)
    proof: Token | Login | None = None
    if entry.token_hash is not None:
        proof = state.get("login", entry.token_hash) if entry.new_hash is not None else None
        proof = proof or state.get("token", entry.token_hash) or state.get("token", entry.new_hash or "")
    if hello.token is UNSET and not entry.peer.is_trusted:
        raise InvalidFrame("hello needs a kind (agent, human or service), or a token of a known kind.")
    if proof is None and not (participant is not None and (entry.is_owner or entry.peer.is_trusted)):
        raise NotAuthenticated(
            f"The kind of {hello.agent_id} is unknown here. Name a kind in hello (agent, human or service), or use a "
            "token of this network."
        )
    kind = proof.kind if proof is not None else participant.kind if participant is not None else "agent"
    return msgspec.structs.replace(hello, kind=kind)


def bind_credentials(state: State, entry: BindCredentials) -> tuple[TableWrite, ...]:
    """Return the writes for credentials that the node itself binds. If there are new logins, expired logins are
    deleted."""
    tokens = (TableWrite("token", key, Token(agent_id, "agent", state.stamp)) for agent_id, key in entry.tokens.items())
    # No timer removes expired logins, so remove them when new logins are created.
    expired = (TableWrite("login", key, None) for key in find_expired_logins(state)) if entry.logins else ()
    return (*tokens, *expired, *(TableWrite("login", key, login) for key, login in entry.logins.items()))


def find_expired_logins(state: State) -> dict[str, Login]:
    """Return the expired logins, by the hash of their code."""
    return {key: login for key, login in state.items("login") if login.expires_at <= state.stamp}


def _lost_its_welcome(participant: Participant | None, fence: int, entry: Join) -> bool:
    """Return whether the newest fencing token was issued in exchange for ``fence`` and no live session holds it. If so,
    the welcome was lost, or the session has ended."""
    return participant is not None and fence == participant.fence_shown and not entry.has_live_reactor


def _count_registration(change: ChangeSet) -> None:
    """Count an id that is registered by first use against the hub's rate for registrations. Raise `RateLimited` if the
    rate is exceeded."""
    bucket: Bucket = change.state.get("bucket", FIRST_USES) or Bucket()
    most, what = change.rules.limits.registrations_per_minute, "registrations by first use (registrations_per_minute)"
    change.set_value("bucket", FIRST_USES, Bucket(next_arrival(bucket.sends, change.stamp, most, what, MINUTE_MS)))


def _use_up_login(change: ChangeSet, key: str, login: Login, token_hash: str) -> None:
    """Bind the token to the id of a one-time login. The used login is kept until it expires, so that the refusal of a
    second page can state the right reason."""
    event = {"agent_id": login.agent_id, "kind": login.kind, "event": "logged_in"}
    change.write_row("token", data=encode(event))
    change.set_value("token", token_hash, Token(login.agent_id, login.kind, change.stamp, login.operator))
    change.set_value("login", key, msgspec.structs.replace(login, used_by=token_hash))


# --- identity


def identify(state: State, join: Join, mods: Collection[str], registration: Registration) -> Identity:
    """Return the identity that a ``hello`` proves. ``mods`` are the ids of the hub's mods. If the proof fails, raise an
    error whose class is in `CLOSE_CODES`."""
    hello = join.hello
    if hello.protocol != PROTOCOL_VERSION:
        raise UnsupportedProtocol(
            f"This hub speaks protocol {PROTOCOL_VERSION}, not {hello.protocol}. Use a client of the same version."
        )
    if not is_id(hello.agent_id):
        raise InvalidFrame("agent_id must match [a-z0-9][a-z0-9._-]{0,63}: lower case letters, digits, '.', '_', '-'.")
    identity = _prove(state, join, mods, registration)
    participant = state.participant(hello.agent_id)
    if participant is None and hello.agent_id == NETWORK:
        raise Forbidden(f"{NETWORK} {IS_THE_HUB}. Join under another id (on the command line: --as ID).")
    if participant is not None and participant.removed_seq is not None:
        raise Forbidden(f"{hello.agent_id} was removed from this network. Join under another id.")
    if participant is not None and participant.kind != hello.joins_as:
        raise Forbidden(
            f"{hello.agent_id} is registered as {participant.kind}, not {hello.joins_as}. A kind never changes: "
            "join under another id (on the command line: --as ID)."
        )
    return identity


def _prove(state: State, join: Join, mods: Collection[str], registration: Registration) -> Identity:
    hello = join.hello
    if join.new_hash is not None:
        return _use_login(state, join, join.new_hash)
    if join.is_owner:
        if hello.joins_as == "agent":
            raise NotAuthenticated(
                "People and services can join with the owner's token, but agents cannot. Let the agent create its "
                "own token."
            )
        return Identity(is_operator=True, binds=False)
    if join.peer.is_trusted:
        return Identity(is_operator=join.peer.administers and hello.joins_as != "agent", binds=False)
    if join.token_hash is None:
        raise NotAuthenticated(f"{hello.agent_id} needs its token in hello; see docs/protocol/identity.md.")
    token: Token | None = state.get("token", join.token_hash)
    if token is not None:
        return _use_token(hello.agent_id, hello.joins_as, token)
    if state.get("login", join.token_hash) is not None:
        raise NotAuthenticated("This is a login code and not a token. Send a new_token with it.")
    if state.participant(hello.agent_id) is not None or state.has_token(hello.agent_id):
        kind = "" if hello.joins_as == "agent" else f" --kind {hello.joins_as}"
        raise NotAuthenticated(
            f"This is not the token of {hello.agent_id}; use the token that it first joined with. If that token is "
            f"lost, an operator creates another one with: roundelay token create {hello.agent_id}{kind}. Pass the "
            "new token as ROUNDELAY_TOKEN. If someone may have found the lost token, first run: roundelay token "
            f"revoke {hello.agent_id}."
        )
    if hello.joins_as == "service":
        raise Forbidden("A service needs a token made by an operator: roundelay token create ID --kind service.")
    if hello.joins_as == "human":
        raise NotAuthenticated(
            "A person joins with the owner's token, or one made by roundelay token create ID --kind human."
        )
    reserved = describe_reserved(hello.agent_id, mods)
    if reserved is not None:
        raise _not_given_out(hello.agent_id, reserved)
    unfit = _why_unfit(join.peer, registration)
    if unfit is not None:
        way_out = f"Make a token: roundelay token create {hello.agent_id}."
        raise NotAuthenticated(f"{hello.agent_id} is new here; {unfit}. {way_out}")
    look_alike = describe_look_alike(state, hello.agent_id)
    if look_alike is not None:  # check last: a client that may not register must not learn which ids exist
        raise _not_given_out(hello.agent_id, look_alike)
    return Identity(is_operator=False, binds=True)


def _use_token(agent_id: str, kind: str, token: Token) -> Identity:
    if token.agent_id != agent_id:
        raise NotAuthenticated(f"This token does not belong to {agent_id}.")
    if token.revoked:
        raise Forbidden("This token was revoked; ask an operator for another.")
    if token.kind != kind:
        raise Forbidden(f"With this token, {agent_id} joins as {token.kind}, not as {kind}.")
    return Identity(is_operator=token.operator, binds=False)


# A hello with ``new_token``:
#
#   the login is          new_token is    result
#   unused                unknown         accepted: the login is used up, and the token is bound to the id
#   used, expired, none   the id's own    accepted like any token: the welcome was lost, or the page was reloaded
#   unused                known           refused: each token needs its own login
#   used, expired, none   unknown         refused: another page used the login first, or the login is expired or unknown


def _use_login(state: State, join: Join, new_hash: str) -> Identity:
    hello = join.hello
    if join.token_hash is None or join.token_hash == new_hash:
        raise InvalidFrame(
            "With new_token, the field token must be the code of a login, and new_token a different, new token."
        )
    login: Login | None = state.get("login", join.token_hash)
    is_open = login is not None and not login.used_by and state.stamp < login.expires_at
    token: Token | None = state.get("token", new_hash)
    # The token was bound to its id before. Most likely this login bound it, and then the welcome was lost or the page
    # was reloaded.
    if token is not None and not is_open:
        return _use_token(hello.agent_id, hello.joins_as, token)
    if token is not None:
        raise NotAuthenticated("This new_token is already in use. Generate another.")
    if login is None or not is_open:
        gone = "was used by another page" if login is not None and login.used_by else "is unknown, or its time is over"
        raise NotAuthenticated(
            f"This login {gone}. A link works once, and only for a few minutes. To create another link, run on the "
            "node's machine: roundelay web --as ID. An operator can also run this command on another machine."
        )
    if login.agent_id != hello.agent_id:
        raise NotAuthenticated(f"This login is not for {hello.agent_id}.")
    if login.kind != hello.joins_as:
        raise Forbidden(f"With this login, {hello.agent_id} joins as {login.kind}, not as {hello.joins_as}.")
    return Identity(is_operator=login.operator, binds=False, login=login)


def _why_unfit(peer: Peer, registration: Registration) -> str | None:
    """Return why a new client may not register an id by first use. Return None if it may."""
    if registration == "closed":
        return "nobody binds an id by first use on this network (registration: closed)"
    if peer.is_page:  # any website could open a connection without its visitor's knowledge
        return "a page in a browser binds no id by first use"
    if registration == "local" and not peer.is_local:
        return (
            "only a local process may bind an id by first use (registration: local), and none is local that comes "
            "through a proxy, or to a node that is behind_proxy"
        )
    return None


def describe_look_alike(state: State, agent_id: str) -> str | None:
    """Return a clause that names the known id that ``agent_id`` resembles, or None. Removed ids and ids with revoked
    tokens also count as known."""
    # Sort the ids, so that every replay and every node produces the same sentence.
    other = next((other_id for other_id in sorted(state.look_alikes(agent_id)) if other_id != agent_id), None)
    return f"looks like {other}, which is known here" if other is not None else None


def _not_given_out(agent_id: str, why: str) -> Forbidden:
    return Forbidden(
        f"{agent_id} {why}, so nobody gets it by first use. Choose another id; if it has to be this one, an operator "
        f"makes its token: roundelay token create {agent_id}."
    )
