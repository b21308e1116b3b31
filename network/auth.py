"""Who a connection is: tokens, kinds, first use. Pure rules (docs/protocol.md, "Identity"); only hashes are ever kept."""

from __future__ import annotations

import hashlib
import secrets

from msgspec import UNSET, Struct

from .entries import Join
from .errors import Forbidden, InvalidFrame, NotAuthenticated, RequestError, UnsupportedProtocol
from .frames import PROTOCOL_VERSION, is_id
from .state import State
from .tables import Token

OWN_IDS = "roundelay-"
"""What the ids of the network's own tools begin with, the command line's among them: nobody binds one by first use."""


class Identity(Struct, frozen=True):
    """What a ``hello`` proved. ``binds``: this first use of an agent's id ties its token's hash to it."""

    is_operator: bool
    binds: bool


class Refusal(Exception):
    """A ``hello`` is refused; ``code`` closes the connection after the error."""

    def __init__(self, code: int, error: RequestError) -> None:
        super().__init__(str(error))
        self.code = code
        self.error = error


def make_token() -> str:
    """32 random bytes in base64url: what a client saves before its first ``hello``."""
    return secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """SHA-256, in hex. Tokens are random and long, so a slow hash would add nothing."""
    return hashlib.sha256(token.encode()).hexdigest()


def identify(state: State, join: Join) -> Identity:
    """Decide whether a ``hello`` may join as what it says. Raises `Refusal`."""
    hello = join.hello
    if hello.protocol != PROTOCOL_VERSION:
        raise Refusal(4400, UnsupportedProtocol(f"This hub speaks protocol {PROTOCOL_VERSION}, not {hello.protocol}."))
    if not is_id(hello.agent_id):
        raise Refusal(
            4400,
            InvalidFrame("agent_id must match [a-z0-9][a-z0-9._-]{0,63}: lower case letters, digits, '.', '_', '-'."),
        )
    identity = _prove(state, join)
    participant = state.participant(hello.agent_id)
    if participant is not None and participant.removed_seq is not None:
        raise Refusal(4403, Forbidden(f"{hello.agent_id} was removed from this network; join under another id."))
    if participant is not None and participant.kind != hello.kind:
        raise Refusal(
            4403,
            Forbidden(
                f"{hello.agent_id} is registered as {participant.kind}, not {hello.kind}, and a kind never changes; "
                "join under another id (on the command line: --as ID)."
            ),
        )
    return identity


def _prove(state: State, join: Join) -> Identity:
    hello = join.hello
    if join.is_owner:
        if hello.kind == "agent":
            raise Refusal(
                4401,
                NotAuthenticated(
                    "The owner's token joins people and services, not agents; let the agent make its own."
                ),
            )
        return Identity(is_operator=True, binds=False)
    if join.peer.is_trusted:
        return Identity(is_operator=hello.kind != "agent", binds=False)
    if join.token_hash is None:
        raise Refusal(
            4401, NotAuthenticated(f"{hello.agent_id} needs its token in hello; see docs/protocol.md, Identity.")
        )
    token: Token | None = state.get("token", join.token_hash)
    if token is not None:
        return _use_token(hello.agent_id, hello.kind, token)
    if state.participant(hello.agent_id) is not None or state.has_token(hello.agent_id):
        kind = "" if hello.kind == "agent" else f" --kind {hello.kind}"
        raise Refusal(
            4401,
            NotAuthenticated(
                f"This is not the token of {hello.agent_id}; use the one it first joined with. If that is lost, an operator makes another: "
                f"roundelay token create {hello.agent_id}{kind}, to be given as ROUNDELAY_TOKEN (before that, roundelay token revoke "
                f"{hello.agent_id} shuts out whoever found the lost one)."
            ),
        )
    if hello.kind == "service":
        raise Refusal(
            4403, Forbidden("A service needs a token made by an operator: roundelay token create ID --kind service.")
        )
    if hello.kind == "human":
        raise Refusal(
            4401,
            NotAuthenticated(
                "A person joins with the owner's token, or one made by roundelay token create ID --kind human."
            ),
        )
    if hello.agent_id.startswith(OWN_IDS):
        raise Refusal(
            4403,
            Forbidden(
                f"Ids that begin with {OWN_IDS} are for the network's own tools; choose another than {hello.agent_id}."
            ),
        )
    if not join.peer.is_loopback or join.peer.has_browser_headers:
        raise Refusal(
            4401,
            NotAuthenticated(
                f"{hello.agent_id} is new here; only a local process may bind an id by first use. Make a token: "
                f"roundelay token create {hello.agent_id}."
            ),
        )
    return Identity(is_operator=False, binds=True)


def _use_token(agent_id: str, kind: str, token: Token) -> Identity:
    if token.agent_id != agent_id:
        raise Refusal(4401, NotAuthenticated(f"This token is not that of {agent_id}."))
    if token.revoked:
        raise Refusal(4403, Forbidden("This token was revoked; ask an operator for another."))
    if token.kind != kind:
        raise Refusal(4403, Forbidden(f"This token joins {agent_id} as {token.kind}, not {kind}."))
    return Identity(is_operator=token.operator, binds=False)


def presents_fence(join: Join) -> int | None:
    """The fence that a reconnecting reactor shows."""
    return join.hello.fence if join.hello.fence is not UNSET else None
