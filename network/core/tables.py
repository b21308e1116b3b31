"""Values of the state tables, and the data that a batch looks up in the ledger.

Each value is frozen and replaced as a whole. A change is a `TableWrite`, stored in the transaction of the rows that
caused it. Older databases contain the table names and field names, so these never change, even where the code uses
another word. Table ``floor`` holds ack cursors, ``hold`` holds takeovers, and ``mark`` holds read states. No IO, no
clock.
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
"""Tables that are loaded at start and kept in memory."""
ColdTable: TypeAlias = Literal[
    "root", "call", "dead", "tried", "triggered", "given_up", "stopped", "undelivered", "spent_out", "followed",
    "mod_cold",
]  # fmt: skip
"""Tables that stay in the ledger. A batch looks up their values (`LookupRequest`)."""
Table: TypeAlias = LoadedTable | ColdTable | Literal["bucket"]
"""Any table. ``bucket`` exists in memory only."""

LOADED_TABLES: tuple[Table, ...] = get_args(LoadedTable)
COLD_TABLES: frozenset[str] = frozenset(get_args(ColdTable))
VOLATILE_TABLES: frozenset[str] = frozenset({"bucket"})


FaultCause: TypeAlias = Literal["model", "error", "dead_letter", "ended"]
"""Why an agent cannot work: its model does not reply, its code raises, its deliveries fail too often, or its process
has ended."""


class AgentFault(Struct, frozen=True, omit_defaults=True):
    """A problem that keeps an agent from its work (`faults`). It is deleted when the agent works again.

    ``since`` and ``at`` are the times in ms of the first and the newest occurrence, and ``count`` is the number of
    occurrences. ``seq`` and ``reaction`` describe the newest occurrence. Each agent has at most one fault, so repeats
    take no more space.
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
    """A registered id.

    ``fence`` is the newest fencing token of a reactor session. ``fence_shown`` is the token that this session presented
    when it joined. Sessions that joined before ``cut_seq`` have ended, because the tokens were revoked at that seq.
    ``instance`` is the name that the reactor's process gave itself, or empty. ``life`` is the first fencing token of
    that process. ``is_lost``: its session ended without a ``bye`` while reactions were open, and no reactor has joined
    since.
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
    """The permission that a token gives. The key is the hash of the token. A revoked token stays, so that it is never
    bound again."""

    agent_id: str
    kind: Kind
    created_at: int
    operator: bool = False
    revoked: bool = False


class Login(Struct, frozen=True):
    """A one-time code that binds a token to an id until ``expires_at`` (ms). The key is the hash of the code.
    ``used_by`` is the hash of the bound token, or empty."""

    agent_id: str
    kind: Kind
    expires_at: int
    operator: bool = False
    used_by: str = ""


Access: TypeAlias = Literal["open", "invite", "closed"]
"""Rule for joining a channel: everybody (open) or only invited participants (invite). A closed channel is also hidden
from everybody else."""
History: TypeAlias = Literal["since_join", "members"]


class Channel(Struct, frozen=True):
    """A channel. ``history`` defines what late joiners may read.

    ``owner`` is None for channels of versions without owners. It is empty if the owner was removed from the channel.
    """

    name: str
    created_seq: int
    created_by: str
    topic: str = ""
    history: History = "since_join"
    access: Access = "open"
    owner: str | None = None
    title: str = ""
    """Display name. If it is empty, the channel's name is displayed."""


MAX_NOTIFIED_THREADS = 256
"""Maximum number of threads of one conversation whose readers are notified that the budget is exceeded."""
MAX_SPANS = 4096
"""Maximum number of times a participant may rejoin a channel after missing messages. Each membership is stored, because
it decides what the participant may read."""


class Member(Struct, frozen=True):
    """One participant's membership in one channel: spans of seqs (from, until), both exclusive. ``until`` is None while
    the participant is a member.

    ``standing`` applies to participants who are not members: invited, removed by the owner, or neither. Joining uses up
    an invitation.
    """

    spans: tuple[tuple[int, int | None], ...] = ()
    standing: Literal["", "invited", "removed"] = ""

    @property
    def is_in(self) -> bool:
        return bool(self.spans) and self.spans[-1][1] is None

    def joined(self, seq: int) -> Member:
        """Return the membership after a join at ``seq``. If nothing was stored since the participant left, the last
        span continues."""
        if self.spans and self.spans[-1][1] == seq - 1:
            return Member((*self.spans[:-1], (self.spans[-1][0], None)))
        return Member((*self.spans, (seq, None)))

    def left(self, seq: int) -> Member:
        """Return the membership after a leave at ``seq``. A span without any stored row is dropped, unless it is the
        only span."""
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
    """Failures of one message at one recipient. ``due_at`` (ms) is the earliest time of the next delivery.

    ``is_revived``: the message is a restored dead letter, so the ack cursor already counts it as handled.
    """

    failures: int
    due_at: int
    reason: str
    is_revived: bool = False


class TokenUsage(Struct, frozen=True, omit_defaults=True):
    """Sum of the tokens of model calls. ``prompt_tokens`` include ``cached_tokens``, and ``completion_tokens`` include
    ``reasoning_tokens``."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class DayUsage(Struct, frozen=True):
    """Tokens of one agent (the key) by model, on the newest day with any usage (UTC, in days since the epoch)."""

    day: int
    spent: dict[str, TokenUsage]


class DayStored(Struct, frozen=True):
    """Amount that one participant (the key) stored on a day (UTC, in days since the epoch). `limits` restores it after
    a restart."""

    day: int
    bytes: int
    messages: int
    is_near: bool = False
    """Whether the participant has nearly used up its quota."""


class CallWait(Struct, frozen=True, omit_defaults=True):
    """What a tool call waits for until ``until`` (ms): answers from the participants in ``to``, or the decision on
    ``request`` (a seq)."""

    to: tuple[str, ...] = ()
    request: int | None = None
    until: int = 0
    copies: tuple[tuple[str, int], ...] = ()
    """Copies of the request: the seq of the message to each approver, by the approver's id."""

    deciders: tuple[str, ...] | None = None
    """Ids of the people who may decide. None means every reader of the request, and operators."""

    with_operators: bool = False

    voters: tuple[str, ...] = ()

    def find_request(self, agent_id: str) -> int | None:
        """Return the seq of the message that asks this person: the person's own copy, or the request."""
        return next((seq for name, seq in self.copies if name == agent_id), self.request)

    def may_decide(self, agent_id: str, *, is_reader: bool, is_operator: bool) -> bool:
        """Return whether a person may decide now. ``is_reader``: the person may read the request."""
        if agent_id in self.voters:
            return False
        if self.deciders is None:
            return is_reader or is_operator
        return agent_id in self.deciders or (self.with_operators and is_operator)


class OpenReaction(Struct, frozen=True):
    """A reaction that has started and not finished (key ``AGENT/REACTION``). ``seq`` is the seq of its ``started``
    record."""

    reaction: str
    agent_id: str
    trigger: int
    seq: int
    trigger_head: MessageHead
    oldest: int
    """Oldest seq of the reaction's prompt. Retention keeps all messages from this seq on."""
    is_cancelled: bool = False
    spent: dict[str, TokenUsage] = {}
    """Tokens that the reaction's records have reported so far, by model."""

    life: int = 0
    """`Participant.life` of the process that wrote the reaction's newest record."""

    calls: dict[str, bool] = {}
    """Calls that have started and have no result, and whether each call waits for somebody (`call_progress`)."""

    awaits: dict[str, CallWait] = {}

    at: int = 0
    """Start time in ms. 0 in databases of older releases."""


class Takeover(Struct, frozen=True):
    """A person's control of a thread (the key). ``by`` is empty after the takeover has ended.

    ``taken`` and ``given`` are the seqs of the newest start and end. ``at`` is the time of the start in ms. ``head`` is
    the head of a message that would go to the thread now.
    """

    by: str
    taken: int
    at: int
    head: MessageHead
    given: int = 0
    until: int = 0
    """Time (ms) at which the takeover expires. 0 means never."""


class ReadState(Struct, frozen=True, omit_defaults=True):
    """A participant's read state and preferences for one thread, under the key ``ID/THREAD`` (`read_state`). Everything
    up to ``read_upto`` is read.

    The value under ``ID/`` applies to all threads without an entry, because old entries are evicted.
    """

    read_upto: int = 0
    is_pinned: bool = False
    is_muted: bool = False
    is_archived: bool = False
    title: str = ""


class Question(Struct, frozen=True):
    """A message that requires a response from a person and has none yet, under the key ``ID/SEQ`` (`questions`)."""

    sender_id: str
    thread_id: str
    root: int = 0
    """Root of the message. 0 in databases of older releases."""
    at: int = 0


class DismissedItems(Struct, frozen=True):
    """Inbox items that a participant (the key) dismissed: kind, seq and time (ms) of each item, newest last."""

    items: tuple[tuple[str, int, int], ...] = ()


class UndeliveredMessage(Struct, frozen=True):
    """A dead letter as its sender sees it, under the key ``SENDER/NEWEST_FIRST/RECIPIENT``."""

    agent_id: str
    seq: int
    attempts: int
    at: int


class BudgetStop(Struct, frozen=True):
    """A reaction that ended at its agent's own token or money budget, under the key ``NEWEST_FIRST/AGENT``. ``seq`` is
    the seq of its trigger.

    The stop no longer counts after the conversation is resumed, or after the agent starts another reaction to the same
    trigger.
    """

    agent_id: str
    reaction: str
    seq: int
    root: int
    resumed: int
    at: int
    reason: str


class IndexPosition(Struct, frozen=True):
    """Position in the shared log up to which this database is complete. It names the record at ``position`` and the
    ``digest`` of this record.

    ``leader`` and ``epoch`` are also from that record. ``is_filling``: the database contains only part of the rows up
    to that record. ``base`` is the record from which the log could begin (0: none). It takes effect after the log has
    dropped the rows up to ``base_head``. ``begun`` and ``begun_head`` describe a snapshot that is being written.
    ``begun`` is None in databases of older releases.
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
    """Usage of a conversation's budget, in total and by participant (`conversation_budgets`). The key is the root's
    seq."""

    messages: int
    last_seq: int
    extra_messages: int = 0
    extra_hops: int = 0
    stopped_in: tuple[str, ...] = ()
    """Threads whose readers were notified that the budget is exceeded."""

    spent: dict[str, TokenUsage] = {}

    resumed: int = 0

    began_by: str = ""
    """Sender of the root. Empty if unknown, because an earlier budget was damaged."""

    first: tuple[str, ...] = ()
    """First parties: the root's sender, and the participants that the root names."""

    parties: dict[str, int] = {}
    """Number of messages of each party."""

    others: dict[str, int] = {}
    """Number of messages of each participant who is not a party."""

    claims: dict[str, dict[str, TokenUsage]] = {}
    """Tokens that each agent's records report, by model."""

    told: tuple[str, ...] = ()
    """Limits that have stopped the conversation since it was last resumed. The sender of the root was notified once for
    each limit."""


class StoppedConversation(Struct, frozen=True):
    """A conversation that exceeded a limit and was not resumed. It names the newest message and its time, the limit,
    the participant who used most of it, and that participant's number of messages."""

    root: int
    seq: int
    at: int
    limit: str
    used_by: str
    used: int
    began_by: str
    reason: str


class CallResult(Struct, frozen=True):
    """First result of a changing call. A repeat with the same ``call_id`` within 24 hours gets this result."""

    digest: str
    at: int
    value: Raw


class DeadLetter(Struct, frozen=True):
    """A message that its recipient failed to handle too often."""

    agent_id: str
    seq: int
    reason: str
    failures: int
    at: int
    reactions: tuple[str, ...] = ()
    """Reactions to the message that were open when it became a dead letter. They are closed."""

    sender_id: str = ""
    """Sender who sees the message as undelivered. Empty if unknown."""


class AbandonedReaction(Struct, frozen=True):
    """Link from a reaction (second half of the key) to the dead letter that it was started for. Kept until the
    dead letter is deleted."""

    trigger: int
    sender_id: str
    attempts: int


class AttemptCount(Struct, frozen=True):
    """Number of attempts of a message that failed at least once and is now either handled or given up."""

    attempts: int


class ReactionStart(Struct, frozen=True):
    """A reaction and the seq of its ``started`` record."""

    reaction: str
    seq: int


MAX_KNOWN_STARTS = 64
"""Maximum number of stored reactions to one message: the first reaction, and the newest ones."""


class TriggeredReactions(Struct, frozen=True):
    """Reactions that one agent (first half of the key) started for one message (second half): the newest reaction, and
    ``earlier`` ones."""

    reaction: str
    seq: int
    earlier: tuple[ReactionStart, ...] = ()

    @property
    def first(self) -> ReactionStart:
        return self.all[0]

    @property
    def all(self) -> tuple[ReactionStart, ...]:
        """All these reactions, oldest first."""
        return (*self.earlier, ReactionStart(self.reaction, self.seq))

    def with_started(self, reaction: str, seq: int) -> TriggeredReactions:
        """Return these reactions and one that starts now. The first reaction and the newest ones are kept."""
        first, *others = self.all
        return TriggeredReactions(reaction, seq, (first, *others[2 - MAX_KNOWN_STARTS :]))


def descending_key(seq: int) -> str:
    """Return a seq as a key that sorts before the keys of lower seqs."""
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
    """One pending write of a state table. The ``value`` None deletes the key."""

    table: Table
    key: str
    value: Any


class Facts(Struct):
    """Answer of the ledger to a `LookupRequest`.

    A key that is absent from ``stored`` or ``cold`` does not exist, except for the keys in ``damaged``. These are the
    (table, key) pairs of values that failed their checksum.
    """

    stored: MutableMapping[tuple[str, str], StoredKey] = {}
    heads: MutableMapping[int, MessageHead] = {}
    cold: dict[tuple[str, str], Any] = {}
    damaged: set[tuple[str, str]] = set()


def encode_value(value: Any) -> bytes:
    """Encode a table value for the ledger."""
    return encode(value)


def decode_value(table: Table, data: bytes | str) -> Any:
    """Decode a value that `encode_value` has written. Raises `msgspec.DecodeError` if the value does not match."""
    return msgspec.json.decode(data, type=VALUE_TYPES[table])


class LookupRequest(Struct):
    """Keys, seqs and values that a batch needs before it is applied. `Ledger.lookup` answers with `Facts`."""

    keys: set[tuple[str, str]]
    seqs: set[int]
    cold: set[tuple[Table, str]]

    def __bool__(self) -> bool:
        return bool(self.keys or self.seqs or self.cold)
