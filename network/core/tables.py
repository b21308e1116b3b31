"""Types of the values in the state tables, and of the data that a batch looks up in the ledger.

Values are immutable: a `TableWrite` replaces the whole value. The ledger stores a write in the same transaction as the
rows that caused it. Databases contain the names of tables and fields, so these names never change, even if the code
uses another word: the table ``floor`` contains ack cursors, ``hold`` contains takeovers, and ``mark`` contains read
states. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import MutableMapping
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from roundelay.network.frames import SEQ_LIMIT, Kind, encode

from .ack_cursor import AckCursor
from .due_time import DueTime
from .open_items import OpenDelivery, OpenItem
from .rows import MessageHead, StoredKey

LoadedTable: TypeAlias = Literal[
    "participant",
    "token",
    "channel",
    "member",
    "floor",
    "attempt",
    "reaction",
    "mod",
    "day",
    "stored",
    "hold",
    "mark",
    "login",
    "question",
    "dismissed",
    "open_item",
    "due",
    "delivery",
]
"""Name of a table whose values are loaded at the start and stay in memory."""
ColdTable: TypeAlias = Literal[
    "root", "call", "dead", "tried", "triggered", "given_up", "stopped", "undelivered", "spent_out", "followed",
    "mod_cold",
]  # fmt: skip
"""Name of a table whose values are only in the ledger. A batch looks up such values with a `LookupRequest`."""
Table: TypeAlias = LoadedTable | ColdTable | Literal["bucket"]
"""Name of any table. The table ``bucket`` exists only in memory."""

LOADED_TABLES: tuple[Table, ...] = get_args(LoadedTable)
COLD_TABLES: frozenset[str] = frozenset(get_args(ColdTable))
VOLATILE_TABLES: frozenset[str] = frozenset({"bucket"})


FaultCause: TypeAlias = Literal["model", "error", "dead_letter", "ended"]
"""Reason why an agent cannot work. ``model``: its model does not reply. ``error``: its code raises an exception.
``dead_letter``: its deliveries fail too often. ``ended``: its process has ended."""


class AgentFault(Struct, frozen=True, omit_defaults=True):
    """Problem that prevents an agent from working (`faults`). It is deleted when the agent works again.

    ``since`` and ``at`` are the times in ms of the first and the newest occurrence, and ``count`` is the number of
    occurrences. ``seq`` and ``reaction`` describe the newest occurrence. Each agent has at most one fault, so repeated
    problems need no additional space.
    """

    cause: FaultCause
    since: int
    at: int
    count: int = 1
    failure: str = ""
    """Kind of a model failure (`unauthorized`, `quota`, ...). Empty for other causes."""
    reason: str = ""
    seq: int = 0
    reaction: str = ""


class Participant(Struct, frozen=True):
    """Participant of the network, registered under an id that is never reused.

    ``fence`` is the newest fencing token of a reactor session. ``fence_shown`` is the token that this session presented
    when it joined. Sessions that joined before ``cut_seq`` have been ended, because the tokens were revoked at this
    seq. ``instance`` is the name that the reactor's process has chosen, or an empty string. ``life`` is the first
    fencing token of this process. ``is_lost`` is true if the process was lost: its session ended without a ``bye``
    while reactions were open, and no reactor has joined since.
    """

    agent_id: str
    kind: Kind
    registered_seq: int
    card: Raw | UnsetType = UNSET  # msgspec decodes `Raw | None` to None for any value
    fence: int = 0
    removed_seq: int | None = None
    fence_shown: int | None = None
    cut_seq: int = 0
    instance: str = ""
    life: int = 0
    is_lost: bool = False
    fault: AgentFault | UnsetType = UNSET


class Token(Struct, frozen=True):
    """Permission to join with a token. The key is the token's hash. A revoked token is kept, so that it can never be
    bound to an id again."""

    agent_id: str
    kind: Kind
    created_at: int
    operator: bool = False
    revoked: bool = False


class Login(Struct, frozen=True):
    """A one-time code that binds a token to an id until ``expires_at`` (ms). The key is the hash of the code.
    ``used_by`` is the hash of the bound token, or empty if the code is unused."""

    agent_id: str
    kind: Kind
    expires_at: int
    operator: bool = False
    used_by: str = ""


Access: TypeAlias = Literal["open", "invite", "closed"]
"""Rule for joining a channel. Everyone may join an ``open`` channel. Only invited participants may join an ``invite``
or ``closed`` channel. A ``closed`` channel is also hidden from everyone else."""
History: TypeAlias = Literal["since_join", "members"]


class Channel(Struct, frozen=True):
    """Properties of a channel. ``history`` defines which messages members may read: only messages since their join, or
    all messages.

    ``owner`` is None if a release without channel owners created the channel, and an empty string if the owner was
    removed from the channel.
    """

    name: str
    created_seq: int
    created_by: str
    topic: str = ""
    history: History = "since_join"
    access: Access = "open"
    owner: str | None = None
    title: str = ""
    """Display name. If it is empty, clients display the channel's name."""


MAX_NOTIFIED_THREADS = 256
"""Maximum number of threads of one conversation whose readers are notified that the budget is exceeded."""
MAX_SPANS = 4096
"""Maximum number of times that a participant may rejoin a channel after missing messages. The span of each membership
is stored, because it decides which messages the participant may read."""


class Member(Struct, frozen=True):
    """Membership of one participant in one channel. A span ``(from, until)`` contains the seqs strictly between its
    ends. ``until`` is None in the last span while the participant is a member.

    ``standing`` applies only to participants who are not members: they are invited, removed by the owner, or neither.
    An invitation ends when the participant joins.
    """

    spans: tuple[tuple[int, int | None], ...] = ()
    standing: Literal["", "invited", "removed"] = ""

    @property
    def is_in(self) -> bool:
        return bool(self.spans) and self.spans[-1][1] is None

    def joined(self, seq: int) -> Member:
        """Return the membership after a join at ``seq``. If no row was stored since the participant left, the last span
        continues."""
        if self.spans and self.spans[-1][1] == seq - 1:
            return Member((*self.spans[:-1], (self.spans[-1][0], None)))
        return Member((*self.spans, (seq, None)))

    def left(self, seq: int) -> Member:
        """Return the membership after the participant leaves at ``seq``. A span that contains no stored row is dropped,
        unless it is the only span."""
        start = self.spans[-1][0]
        if start == seq - 1 and len(self.spans) > 1:
            return Member(self.spans[:-1])
        return Member((*self.spans[:-1], (start, seq)))

    def was_in(self, seq: int) -> bool:
        at = bisect_left(self.spans, seq, key=_start) - 1  # the last span that began before seq
        if at < 0:
            return False
        until = self.spans[at][1]
        return until is None or seq < until


def _start(span: tuple[int, int | None]) -> int:
    return span[0]


class Attempt(Struct, frozen=True):
    """Failed deliveries of one message to one recipient. ``due_at`` (ms) is the earliest time of the next delivery.

    ``is_revived`` is true if the message is a restored dead letter. The ack cursor still marks such a message as
    handled.
    """

    failures: int
    due_at: int
    reason: str
    is_revived: bool = False


class TokenUsage(Struct, frozen=True, omit_defaults=True):
    """Sums of the tokens that model calls used. ``prompt_tokens`` includes ``cached_tokens``, and ``completion_tokens``
    includes ``reasoning_tokens``."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class DayUsage(Struct, frozen=True):
    """Tokens that one agent used, by model, on the newest day on which it used any. The key is the agent's id. ``day``
    is a UTC day, counted from the epoch."""

    day: int
    spent: dict[str, TokenUsage]


class DayStored(Struct, frozen=True):
    """Amount of data that one participant stored on one day. The key is the participant's id. ``day`` is a UTC day,
    counted from the epoch. After a restart, `State.bucket` continues from this amount."""

    day: int
    bytes: int
    messages: int
    is_near: bool = False
    """Whether the participant has nearly used up its quota."""


class CallWait(Struct, frozen=True, omit_defaults=True):
    """What a tool call waits for, at most until ``until`` (ms). It waits either for answers from the participants in
    ``to``, or for the decision on ``request`` (a seq)."""

    to: tuple[str, ...] = ()
    request: int | None = None
    until: int = 0
    copies: tuple[tuple[str, int], ...] = ()
    """Seqs of the copies of the request, each with the id of the approver who received it."""

    deciders: tuple[str, ...] | None = None
    """Ids of the people who may decide. If it is None, operators and all readers of the request may decide."""

    with_operators: bool = False

    voters: tuple[str, ...] = ()

    def find_request(self, agent_id: str) -> int | None:
        """Return the seq of the copy of the request that a person received, or else the seq of the request."""
        return next((seq for name, seq in self.copies if name == agent_id), self.request)

    def may_decide(self, agent_id: str, *, is_reader: bool, is_operator: bool) -> bool:
        """Return whether a person may decide now. ``is_reader`` says whether the person may read the request."""
        if agent_id in self.voters:
            return False
        if self.deciders is None:
            return is_reader or is_operator
        return agent_id in self.deciders or (self.with_operators and is_operator)


class OpenReaction(Struct, frozen=True):
    """Reaction that has started and has not finished. The key is ``AGENT/REACTION``. ``seq`` is the seq of the
    reaction's ``started`` record."""

    reaction: str
    agent_id: str
    trigger: int
    seq: int
    trigger_head: MessageHead
    oldest: int
    """Seq of the oldest message in the reaction's prompt. Retention keeps this message and all newer messages."""
    is_cancelled: bool = False
    spent: dict[str, TokenUsage] = {}
    """Tokens that the reaction's records have reported so far, by model."""

    life: int = 0
    """`Participant.life` of the process that wrote the reaction's newest record."""

    calls: dict[str, bool] = {}
    """Tool calls that have started and have no result. The value is true if the call waits for a participant
    (`call_progress`)."""

    awaits: dict[str, CallWait] = {}

    at: int = 0
    """Start time in ms, or 0 if an older release stored the reaction."""


class Takeover(Struct, frozen=True):
    """Takeover of a thread by a person. The key is the thread's id. ``by`` is the person, or empty after the takeover
    has ended.

    ``taken`` and ``given`` are the seqs of the newest start and the newest end. ``at`` is the time of the start in ms.
    ``head`` is the head that a message to the thread would have now (`takeovers.find_place`).
    """

    by: str
    taken: int
    at: int
    head: MessageHead
    given: int = 0
    until: int = 0
    """Time (ms) at which the takeover expires. 0 means never."""


class ReadState(Struct, frozen=True, omit_defaults=True):
    """Read state and preferences of a participant for one thread. The key is ``ID/THREAD`` (`read_state`). All messages
    up to the seq ``read_upto`` are read.

    Old read states are evicted. The value under the key ``ID/`` applies to all threads without their own value.
    """

    read_upto: int = 0
    is_pinned: bool = False
    is_muted: bool = False
    is_archived: bool = False
    title: str = ""


class Question(Struct, frozen=True):
    """Message that requires a response from a person and has no response yet. The key is ``ID/SEQ`` (`questions`)."""

    sender_id: str
    thread_id: str
    root: int = 0
    """Root of the message, or 0 if an older release stored the question."""
    at: int = 0


class DismissedItems(Struct, frozen=True):
    """Inbox items that a participant has dismissed, newest last. Each item has a kind, a seq and a time in ms. The key
    is the participant's id."""

    items: tuple[tuple[str, int, int], ...] = ()


class UndeliveredMessage(Struct, frozen=True):
    """A dead letter as its sender sees it. The key is ``SENDER/NEWEST_FIRST/RECIPIENT`` (`descending_key`)."""

    agent_id: str
    seq: int
    attempts: int
    at: int


class BudgetStop(Struct, frozen=True):
    """Reaction that was stopped because its agent's own budget for tokens or money was used up. The key is
    ``NEWEST_FIRST/AGENT`` (`descending_key`). ``seq`` is the seq of the reaction's trigger.

    The stop is no longer shown after the conversation was resumed, or after the agent has started another reaction to
    the same trigger.
    """

    agent_id: str
    reaction: str
    seq: int
    root: int
    resumed: int
    at: int
    reason: str


class IndexPosition(Struct, frozen=True):
    """Position in the shared log up to which this database is complete. ``position`` is the position of a record.
    ``digest``, ``leader`` and ``epoch`` are values of this record.

    ``is_filling`` is true if the database contains only a part of the rows up to the record. ``base`` is the position
    of a record at which the log may begin, or 0. It takes effect after the log has dropped the rows up to
    ``base_head``. ``begun`` and ``begun_head`` describe a snapshot that is being written. ``begun`` is None if an older
    release stored the value.
    """

    position: int
    digest: str
    leader: str
    epoch: str
    name: str
    is_filling: bool = False
    base: int = 0
    base_head: int = 0
    begun: int | None = None
    begun_head: int = 0


class ConversationBudget(Struct, frozen=True, omit_defaults=True):
    """Used part of a conversation's budget, in total and by participant (`conversation_budgets`). The key is the seq of
    the root."""

    messages: int
    last_seq: int
    extra_messages: int = 0
    extra_hops: int = 0
    stopped_in: tuple[str, ...] = ()
    """Threads whose readers were notified that the budget is exceeded."""

    spent: dict[str, TokenUsage] = {}

    resumed: int = 0

    began_by: str = ""
    """Sender of the root. Empty if the stored budget was damaged, so that the sender is unknown."""

    first: tuple[str, ...] = ()
    """First parties of the conversation: the sender of the root, and the participants whom the root names."""

    parties: dict[str, int] = {}
    """Number of messages of each party."""

    others: dict[str, int] = {}
    """Number of messages of each participant who is not a party."""

    claims: dict[str, dict[str, TokenUsage]] = {}
    """Tokens that each agent's records report, by model."""

    told: tuple[str, ...] = ()
    """Limits that have stopped the conversation since it was last resumed. The sender of the root was notified once for
    each of them."""


class StoppedConversation(Struct, frozen=True):
    """Conversation that exceeded a limit and was not resumed. ``seq`` and ``at`` are the seq and the time of the newest
    message. ``used_by`` is the participant with the most messages, and ``used`` is the number of these messages."""

    root: int
    seq: int
    at: int
    limit: str
    used_by: str
    used: int
    began_by: str
    reason: str


class CallResult(Struct, frozen=True):
    """Result of a changing call. A repeated call with the same ``call_id`` gets this result for 24 hours."""

    digest: str
    at: int
    value: Raw


class DeadLetter(Struct, frozen=True):
    """Message that its recipient failed to handle too often."""

    agent_id: str
    seq: int
    reason: str
    failures: int
    at: int
    reactions: tuple[str, ...] = ()
    """Reactions that were closed when their trigger became a dead letter."""

    sender_id: str = ""
    """Sender, who sees the message as undelivered. Empty if the sender is unknown."""


class AbandonedReaction(Struct, frozen=True):
    """Link from a reaction to the dead letter that triggered it. The second half of the key is the id of the reaction.
    The link is deleted together with the dead letter."""

    trigger: int
    sender_id: str
    attempts: int


class AttemptCount(Struct, frozen=True):
    """Number of delivery attempts for a message that failed at least once and was handled or became a dead letter."""

    attempts: int


class ReactionStart(Struct, frozen=True):
    """Id of a reaction, and seq of the reaction's ``started`` record."""

    reaction: str
    seq: int


MAX_KNOWN_STARTS = 64
"""Maximum number of stored reactions of one agent to one message: the first and the newest ones."""


class TriggeredReactions(Struct, frozen=True):
    """Reactions that one agent has started for one message. The key contains the agent's id and the seq of the message.
    ``reaction`` is the newest reaction, and ``earlier`` contains older reactions."""

    reaction: str
    seq: int
    earlier: tuple[ReactionStart, ...] = ()

    @property
    def first(self) -> ReactionStart:
        return self.all[0]

    @property
    def all(self) -> tuple[ReactionStart, ...]:
        """All stored reactions of the agent to the message, oldest first."""
        return (*self.earlier, ReactionStart(self.reaction, self.seq))

    def with_started(self, reaction: str, seq: int) -> TriggeredReactions:
        """Return the value after another reaction has started. The first reaction and the newest reactions are kept."""
        first, *others = self.all
        return TriggeredReactions(reaction, seq, (first, *others[2 - MAX_KNOWN_STARTS :]))


def descending_key(seq: int) -> str:
    """Return a key for a seq. Keys of higher seqs sort before keys of lower seqs."""
    return f"{SEQ_LIMIT - seq:016d}"


VALUE_TYPES: dict[Table, Any] = {
    "participant": Participant,
    "token": Token,
    "channel": Channel,
    "member": Member,
    "floor": AckCursor,
    "attempt": Attempt,
    "reaction": OpenReaction,
    "mod": Raw,
    "mod_cold": Raw,
    "root": ConversationBudget,
    "call": CallResult,
    "dead": DeadLetter,
    "tried": AttemptCount,
    "given_up": AbandonedReaction,
    "triggered": TriggeredReactions,
    "day": DayUsage,
    "stored": DayStored,
    "stopped": StoppedConversation,
    "hold": Takeover,
    "mark": ReadState,
    "login": Login,
    "question": Question,
    "dismissed": DismissedItems,
    "due": DueTime,
    "undelivered": UndeliveredMessage,
    "spent_out": BudgetStop,
    "followed": IndexPosition,
    "open_item": OpenItem,
    "delivery": OpenDelivery,
}


class TableWrite(Struct, frozen=True, gc=False):
    """A pending write to a state table. If ``value`` is None, the key is deleted."""

    table: Table
    key: str
    value: Any


class Facts(Struct):
    """The ledger's answer to a `LookupRequest`.

    ``damaged`` contains the (table, key) pairs of values that failed their checksum. If a requested key is neither in
    ``stored`` or ``cold`` nor in ``damaged``, the value does not exist.
    """

    stored: MutableMapping[tuple[str, str], StoredKey] = {}
    heads: MutableMapping[int, MessageHead] = {}
    cold: dict[tuple[str, str], Any] = {}
    damaged: set[tuple[str, str]] = set()


def encode_value(value: Any) -> bytes:
    """Encode a table value for the ledger."""
    return encode(value)


def decode_value(table: Table, data: bytes | str) -> Any:
    """Decode a value of a table. Raise `msgspec.DecodeError` if the data does not match the table's type."""
    return msgspec.json.decode(data, type=VALUE_TYPES[table])


class LookupRequest(Struct):
    """Idempotency keys, message seqs and cold values that a batch needs. `Ledger.lookup` returns the matching
    `Facts`."""

    keys: set[tuple[str, str]]
    seqs: set[int]
    cold: set[tuple[Table, str]]

    def __bool__(self) -> bool:
        return bool(self.keys or self.seqs or self.cold)
