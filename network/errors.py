"""Every error that Roundelay raises, grouped by what the caller can do about it.

::

    RoundelayError
    ├── RequestError        fix the call: the same one will be refused again
    │   ├── InvalidFrame, InvalidArguments, TooLarge, UnsupportedProtocol
    │   ├── NotAuthenticated, Forbidden
    │   ├── UnknownRecipient, UnknownMessage, UnknownOperation
    │   └── IdConflict
    ├── RetryLater          the same call again, after ``retry_after_ms``
    │   └── RateLimited, Overloaded
    ├── GiveUp              no retry helps; a person or an operator decides
    │   └── LoopStopped, BudgetExhausted, ThreadHeld, Superseded, InternalError
    ├── ConnectError        the hub cannot be reached, or was lost for good
    ├── ConfigError         a file of the user's is wrong; names file and line
    ├── LedgerError         the database is unusable; nothing was acknowledged
    └── ModError            a mod cannot be loaded

The codes are those of the wire protocol (docs/protocol.md, "Refusals"); `error_from_wire` turns an ``error`` frame into
its exception. This module does no IO."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class RoundelayError(Exception):
    """Root of all errors. ``str()`` is a sentence that says what is wrong and how to go on."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class RequestError(RoundelayError):
    """The call itself is wrong; it has to be changed before it is sent again."""


class InvalidFrame(RequestError):
    """The frame, or a field of it, does not have the form that docs/protocol.md gives it."""

    code = "invalid_frame"


class NotAuthenticated(RequestError):
    """The token is missing, is another id's, or has no id yet that may be bound to it from here."""

    code = "not_authenticated"


class Forbidden(RequestError):
    """This participant may not do that: by its kind, a channel's or the node's rights, or since it was removed."""

    code = "forbidden"


class UnsupportedProtocol(RequestError):
    """The hub speaks another version of the protocol."""

    code = "unsupported_protocol"


class UnknownRecipient(RequestError):
    """There is no such participant, channel or mod, or it is closed to the sender: nothing was sent."""

    code = "unknown_recipient"


class UnknownMessage(RequestError):
    """There is no such message or thread, or this participant may not read it."""

    code = "unknown_message"


class UnknownOperation(RequestError):
    """The hub, with the mods that it has, knows no such operation."""

    code = "unknown_operation"


class InvalidArguments(RequestError):
    """An argument is missing, unknown, of a wrong type or out of range; the sentence names it."""

    code = "invalid_arguments"


class IdConflict(RequestError):
    """This id was used before, by the same participant, for something else."""

    code = "id_conflict"


class TooLarge(RequestError):
    """A field has more bytes or characters than the hub takes; the sentence names both."""

    code = "too_large"


class RetryLater(RoundelayError):
    """The same call will be accepted later, not before ``retry_after_ms`` milliseconds."""

    def __init__(self, message: str, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class RateLimited(RetryLater):
    """This participant sends more a second than the hub grants it."""

    code = "rate_limited"


class Overloaded(RetryLater):
    """The hub has more to do than it takes on at a time."""

    code = "overloaded"


class GiveUp(RoundelayError):
    """No retry helps; somebody has to decide."""


class LoopStopped(GiveUp):
    """The conversation has reached its limit of messages or hops, or the agent its limit of answers without a cause. A
    person or an operator lets it go on."""

    code = "loop_stopped"


class BudgetExhausted(GiveUp):
    """What somebody may use is used up. ``retry_after_ms`` says when more of it comes by itself, if it is counted by
    the day."""

    code = "budget_exhausted"

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class ThreadHeld(GiveUp):
    """A person has taken the thread over, or had when this work on it began: agents do not answer there. The notice
    ``given`` says when they may again, in work that they begin then."""

    code = "held"


class Superseded(GiveUp):
    """A newer reactor session of the same agent has taken over; this one must not react again.
    ``was_away``: it had no connection then."""

    code = "superseded"
    was_away = False


class InternalError(GiveUp):
    """The hub failed at it (the sentence has an id to quote), or gave a code that this version does not know."""

    code = "internal"


class ConnectError(RoundelayError):
    """The hub cannot be reached, or the connection was lost for good."""

    code = "connect"


class ConfigError(RoundelayError):
    """A configuration or agent file is wrong; the sentence begins with ``path:line``."""

    code = "config"

    def __init__(
        self, message: str, *, path: Path | str | None = None, line: int | None = None, to_paste: str = ""
    ) -> None:
        super().__init__(message)
        self.path = path
        self.line = line
        self.to_paste = to_paste
        """Lines for the user to write into a file, shown below the sentence as they are."""

    def __str__(self) -> str:
        if self.path is None:
            return self.message
        where = f"{self.path}:{self.line}" if self.line is not None else f"{self.path}"
        return f"{where}: {self.message}"


class LedgerError(RoundelayError):
    """The ledger cannot be opened, read or written; nothing was acknowledged."""

    code = "ledger"


class ModError(RoundelayError):
    """A mod cannot be loaded; the sentence names it and the reason. ``mod`` is the name under which it was asked
    for."""

    code = "mod"
    mod = ""


_BY_CODE: dict[str, type[RoundelayError]] = {
    cls.code: cls
    for group in (RequestError, RetryLater, GiveUp)
    for cls in group.__subclasses__()
    if cls is not Superseded
}
"""Those that a hub answers with. That another reactor has taken over is said by the close code 4409."""


REFUSAL_CODES: frozenset[str] = frozenset(
    code for code, cls in _BY_CODE.items() if issubclass(cls, RequestError | GiveUp) and code != "internal"
)
"""Codes of what a hub refuses for good."""


def error_from_wire(code: str, message: str, retry_after_ms: int | None = None) -> RoundelayError:
    """Give the exception for an ``error`` frame; a code of a newer hub becomes `InternalError`."""
    cls = _BY_CODE.get(code, InternalError)
    if issubclass(cls, RetryLater):
        return cls(message, retry_after_ms if retry_after_ms is not None else 1000)
    if issubclass(cls, BudgetExhausted):
        return cls(message, retry_after_ms)
    return cls(message)


class Closed(Exception):
    """The connection is closed, by this code (1006: without a goodbye)."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"closed with {code}: {reason}")
        self.code = code
        self.reason = reason
