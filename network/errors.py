"""Every error that Roundelay raises, grouped by what the caller can do about it.

::

    RoundelayError
    ├── RequestError        fix the call: the same call will be refused again
    │   ├── InvalidFrame, InvalidArguments, TooLarge, UnsupportedProtocol
    │   ├── NotAuthenticated, Forbidden
    │   ├── UnknownRecipient, UnknownMessage, UnknownOperation
    │   └── IdConflict
    ├── RetryLater          the same call again, after ``retry_after_ms``
    │   └── RateLimited, Overloaded
    ├── GiveUp              no retry helps; a person or an operator decides
    │   └── LoopStopped, BudgetExhausted, ThreadHeld, Superseded, InternalError
    ├── ConnectError        the hub cannot be reached, or was lost for good
    ├── ConfigError         a user's file is wrong; names file and line
    ├── LedgerError         the database is unusable; nothing was acknowledged
    └── ModError            a mod cannot be loaded

Each class has the error code that the wire protocol uses (docs/protocol/errors.md). `error_from_wire` converts an
``error`` frame to an exception. This module does no IO."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class RoundelayError(Exception):
    """Base class of all errors of Roundelay. ``str(error)`` states the problem and the next step."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class RequestError(RoundelayError):
    """The hub refused the call because the call is wrong. Repeating the same call fails again."""


class InvalidFrame(RequestError):
    """The frame, or one of its fields, does not have the format that docs/protocol.md describes."""

    code = "invalid_frame"


class NotAuthenticated(RequestError):
    """The hub refused the token: it is missing, belongs to another id, or may not register an id from this address."""

    code = "not_authenticated"


class Forbidden(RequestError):
    """The participant may not do this. Reasons are its kind, its removal, and the rights of a channel or the node."""

    code = "forbidden"


class UnsupportedProtocol(RequestError):
    """The hub does not support the client's version of the protocol."""

    code = "unsupported_protocol"


class UnknownRecipient(RequestError):
    """The participant, channel or mod does not exist, or does not accept messages from the sender. Nothing was sent."""

    code = "unknown_recipient"


class UnknownMessage(RequestError):
    """The message or thread does not exist, or this participant may not read it."""

    code = "unknown_message"


class UnknownOperation(RequestError):
    """The hub and its mods have no such operation."""

    code = "unknown_operation"


class InvalidArguments(RequestError):
    """An argument is missing, unknown, of a wrong type or out of range. The error text names the argument."""

    code = "invalid_arguments"


class IdConflict(RequestError):
    """The same participant has already used this id for something else."""

    code = "id_conflict"


class TooLarge(RequestError):
    """A field has more bytes or characters than the hub accepts. The error text names the size and the limit."""

    code = "too_large"


class RetryLater(RoundelayError):
    """The hub refused the call for now. Repeat the same call after at least ``retry_after_ms`` milliseconds."""

    def __init__(self, message: str, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class RateLimited(RetryLater):
    """The participant sends faster than the hub allows."""

    code = "rate_limited"


class Overloaded(RetryLater):
    """The hub is busy and accepts no more work for now."""

    code = "overloaded"


class GiveUp(RoundelayError):
    """The hub refused the call, and a retry does not help. A person has to decide how to continue."""


class LoopStopped(GiveUp):
    """The conversation has reached its maximum number of messages or hops, or the agent has reached its maximum number
    of answers without a cause. A person or an operator can resume the conversation."""

    code = "loop_stopped"


class BudgetExhausted(GiveUp):
    """A quota or budget is used up. For a daily quota, ``retry_after_ms`` is the time until the quota is renewed."""

    code = "budget_exhausted"

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class ThreadHeld(GiveUp):
    """A person has taken over the thread, possibly after the agent's reaction started. Agents may not answer in this
    thread until the hub sends the notice ``given``. Only reactions that start after this notice may answer again."""

    code = "held"


class Superseded(GiveUp):
    """A newer reactor session of the same agent has replaced this session, which must not react again. ``was_away`` is
    true if this session was disconnected when it was replaced."""

    code = "superseded"
    was_away = False


class InternalError(GiveUp):
    """The hub failed, or answered with an error code that this version does not know. If the hub failed, the error text
    contains an id to quote in a report."""

    code = "internal"


class ConnectError(RoundelayError):
    """The hub cannot be reached, or the connection was lost for good."""

    code = "connect"


class ConfigError(RoundelayError):
    """A configuration or agent file is wrong. The error text begins with ``path:line``."""

    code = "config"

    def __init__(
        self, message: str, *, path: Path | str | None = None, line: int | None = None, to_paste: str = ""
    ) -> None:
        super().__init__(message)
        self.path = path
        self.line = line
        self.to_paste = to_paste
        """Lines that the user can paste into a file. Commands print these lines unchanged below the error text."""

    def __str__(self) -> str:
        if self.path is None:
            return self.message
        where = f"{self.path}:{self.line}" if self.line is not None else f"{self.path}"
        return f"{where}: {self.message}"


class LedgerError(RoundelayError):
    """The ledger cannot be opened, read or written. The hub has not acknowledged the failed write."""

    code = "ledger"


class ModError(RoundelayError):
    """A mod cannot be loaded. The error text names the mod and the reason. ``mod`` is the mod's name in the
    configuration."""

    code = "mod"
    mod = ""


_BY_CODE: dict[str, type[RoundelayError]] = {
    cls.code: cls
    for group in (RequestError, RetryLater, GiveUp)
    for cls in group.__subclasses__()
    if cls is not Superseded
}
"""Errors that a hub sends. `Superseded` has no code, because the close code 4409 reports it."""


REFUSAL_CODES: frozenset[str] = frozenset(
    code for code, cls in _BY_CODE.items() if issubclass(cls, RequestError | GiveUp) and code != "internal"
)
"""Error codes of permanent refusals: sending the same call again fails again."""


def error_from_wire(code: str, message: str, retry_after_ms: int | None = None) -> RoundelayError:
    """Return the exception for an ``error`` frame. An unknown code, from a newer hub, becomes `InternalError`."""
    cls = _BY_CODE.get(code, InternalError)
    if issubclass(cls, RetryLater):
        return cls(message, retry_after_ms if retry_after_ms is not None else 1000)
    if issubclass(cls, BudgetExhausted):
        return cls(message, retry_after_ms)
    return cls(message)


PING_UNANSWERED = "the last ping was not answered"
"""Reason with which a hub closes an unreachable connection (code 1011). Clients compare it: see docs/protocol."""


class Closed(Exception):
    """The WebSocket connection is closed. ``code`` is the close code, and 1006 means that no close frame arrived."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"closed with {code}: {reason}")
        self.code = code
        self.reason = reason
