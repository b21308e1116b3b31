"""What the network's tables hold: the value of each, frozen and replaced whole, a change of one (`TableWrite`), and what the
ledger knows of a batch beside the loaded tables (`Facts`). No IO, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, MutableMapping
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from roundelay.network.frames import SEQ_LIMIT, Kind, encode

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
]
"""Loaded at the start, and held in memory."""
ColdTable: TypeAlias = Literal[
    "root", "call", "dead", "tried", "triggered", "given_up", "stopped", "undelivered", "spent_out", "followed"
]
"""In the ledger alone: looked up as facts of a batch."""
Table: TypeAlias = LoadedTable | ColdTable | Literal["bucket"]
"""``bucket`` is in memory alone."""

LOADED_TABLES: tuple[Table, ...] = get_args(LoadedTable)
COLD_TABLES: frozenset[str] = frozenset(get_args(ColdTable))
VOLATILE_TABLES: frozenset[str] = frozenset({"bucket"})


FaultCause: TypeAlias = Literal["model", "error", "dead_letter", "ended"]
"""Why an agent cannot do its work: its model gives no reply, its own code raises, its deliveries fail until they are
given up, or its process ended."""


class AgentFault(Struct, frozen=True, omit_defaults=True):
    """What keeps an agent from its work, until the agent works again (`faults`). ``since`` is when it first happened,
    ``at`` when it last did, ``count`` how often; ``seq`` and ``reaction`` name the newest occurrence.

    One of each agent is kept, so that repeats take no further room.
    """

    cause: FaultCause
    since: int
    at: int
    count: int = 1
    failure: str = ""
    """Of a model: which kind of failure (`unauthorized`, `quota`, ...)."""
    reason: str = ""
    seq: int = 0
    reaction: str = ""


class Participant(Struct, frozen=True):
    """A registered id. ``fence`` is the newest one given to a reactor session, ``fence_shown`` what that session had
    shown, if any.

    Sessions that joined before ``cut_seq`` are over: its tokens were revoked there. ``instance`` is what its
    reactor's process calls itself (empty: it does not say), ``life`` the first fence that this process was given.
    ``is_lost``: its session has ended without a goodbye, with reactions open, and no reactor has come since.
    """

    agent_id: str
    kind: Kind
    registered_seq: int
    card: Raw | UnsetType = UNSET  # of `Raw | None` msgspec reads back only the null
    fence: int = 0
    removed_seq: int | None = None
    fence_shown: int | None = None
    cut_seq: int = 0
    instance: str = ""
    life: int = 0
    is_lost: bool = False
    fault: AgentFault | UnsetType = UNSET


class Token(Struct, frozen=True):
    """What a token's hash (the key) allows. A revoked one stays, so that it is never bound again."""

    agent_id: str
    kind: Kind
    created_at: int
    operator: bool = False
    revoked: bool = False


class Login(Struct, frozen=True):
    """What the code with a hash (the key) allows once, until it ``expires_at``: to tie a token to an id. ``used_by`` is
    the hash of that token, empty until then."""

    agent_id: str
    kind: Kind
    expires_at: int
    operator: bool = False
    used_by: str = ""


Access: TypeAlias = Literal["open", "invite", "closed"]
"""Who may come into a channel: everybody, or those whom it invites; a closed one is hidden from others (`channels`)."""
History: TypeAlias = Literal["since_join", "members"]


class Channel(Struct, frozen=True):
    """A channel; ``history`` says what late joiners may read. Those from before there was ``access`` are open,
    without an owner (None); where the owner was taken out of the channel, ``owner`` is empty."""

    name: str
    created_seq: int
    created_by: str
    topic: str = ""
    history: History = "since_join"
    access: Access = "open"
    owner: str | None = None
    title: str = ""
    """What people call it; empty: its name."""


MAX_NOTIFIED_THREADS = 256
"""In how many threads of one conversation its readers are told that its budget is spent."""
MAX_SPANS = 4096
"""How often a participant may come to a channel again after messages that it missed: each time is kept, for what it may
read depends on it."""


class Member(Struct, frozen=True):
    """When one participant was in one channel: spans of seqs (from, until), both exclusive; until None while it is in.

    ``standing`` is that of one who is not in: invited, removed by the owner, or neither. Who comes uses its
    invitation up.
    """

    spans: tuple[tuple[int, int | None], ...] = ()
    standing: Literal["", "invited", "removed"] = ""

    @property
    def is_in(self) -> bool:
        return bool(self.spans) and self.spans[-1][1] is None

    def joined(self, seq: int) -> Member:
        """In from here on. Where nothing at all was stored since it left, nothing was missed: it goes on as if it had
        stayed."""
        if self.spans and self.spans[-1][1] == seq - 1:
            return Member((*self.spans[:-1], (self.spans[-1][0], None)))
        return Member((*self.spans, (seq, None)))

    def left(self, seq: int) -> Member:
        """Out from here on. A span within which nothing was stored is not kept, unless it is the only one."""
        start = self.spans[-1][0]
        if start == seq - 1 and len(self.spans) > 1:
            return Member(self.spans[:-1])
        return Member((*self.spans[:-1], (start, seq)))

    def was_in(self, seq: int) -> bool:
        at = bisect_left(self.spans, seq, key=_start) - 1  # of the last that began before
        if at < 0:
            return False
        until = self.spans[at][1]
        return until is None or seq < until


def _start(span: tuple[int, int | None]) -> int:
    return span[0]


class AckCursor(Struct, frozen=True):
    """Everything up to ``seq`` is handled but ``open``, and ``above`` it those acknowledged one by one; both ascending.
    It only ever grows."""

    seq: int
    above: tuple[int, ...] = ()
    open: tuple[int, ...] = ()

    def with_handled(self, seqs: Iterable[int]) -> AckCursor:
        """This floor, and these handled too."""
        more = set(seqs)
        above = {*self.above, *(seq for seq in more if seq > self.seq)}
        return AckCursor(self.seq, tuple(sorted(above)), tuple(seq for seq in self.open if seq not in more))

    def is_handled(self, seq: int) -> bool:
        if seq <= self.seq:
            return not _holds(self.open, seq)
        return _holds(self.above, seq)


def _holds(ascending: tuple[int, ...], seq: int) -> bool:
    at = bisect_left(ascending, seq)
    return at < len(ascending) and ascending[at] == seq


class Attempt(Struct, frozen=True):
    """Failures of one message at one recipient; ``due_at`` is when it may be delivered again.

    ``is_revived``: it was a dead letter, so its floor no longer waits for it.
    """

    failures: int
    due_at: int
    reason: str
    is_revived: bool = False


class TokenUsage(Struct, frozen=True, omit_defaults=True):
    """Tokens of model calls, added up. ``cached_tokens`` are part of ``prompt_tokens``, ``reasoning_tokens`` of
    ``completion_tokens``."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class DayUsage(Struct, frozen=True):
    """What one agent (the key) has spent on the newest day, counted from the Unix epoch in UTC, on which it spent
    anything; by model."""

    day: int
    spent: dict[str, TokenUsage]


class DayStored(Struct, frozen=True):
    """What one participant (the key) has stored on a day, counted from the Unix epoch in UTC: what `limits` keeps over
    a restart."""

    day: int
    bytes: int
    messages: int
    is_near: bool = False
    """Whether little of its quota is left."""


class CallWait(Struct, frozen=True, omit_defaults=True):
    """What a call waits for: the answers of these participants, or a person's decision on its ``request`` (a seq),
    ``until`` then (ms)."""

    to: tuple[str, ...] = ()
    request: int | None = None
    until: int = 0
    copies: tuple[tuple[str, int], ...] = ()
    """The messages that ask one approver each, by id."""

    deciders: tuple[str, ...] | None = None
    """The people who may decide, by id; None: everybody who reads the request, and operators."""

    with_operators: bool = False
    """Whether operators may decide beside those."""

    voters: tuple[str, ...] = ()
    """The people who have approved where one approval is not enough."""

    def find_request(self, agent_id: str) -> int | None:
        """The message that asks somebody: one's own copy, or the request."""
        return next((seq for name, seq in self.copies if name == agent_id), self.request)

    def may_decide(self, agent_id: str, *, is_reader: bool, is_operator: bool) -> bool:
        """Whether a person may decide now. ``is_reader``: the person reads the request."""
        if agent_id in self.voters:
            return False
        if self.deciders is None:
            return is_reader or is_operator
        return agent_id in self.deciders or (self.with_operators and is_operator)


class OpenReaction(Struct, frozen=True):
    """A reaction begun and not finished, under ``AGENT/REACTION``; ``seq`` is that of its ``started`` record."""

    reaction: str
    agent_id: str
    trigger: int
    seq: int
    trigger_head: MessageHead
    oldest: int
    """The oldest seq of its prompt: retention keeps everything from here on."""
    is_cancelled: bool = False
    spent: dict[str, TokenUsage] = {}
    """What its records say so far, by model."""

    life: int = 0
    """Of the process that wrote the newest of its records (`Participant.life`)."""

    calls: dict[str, bool] = {}
    """The calls that were begun and have no result (`reactions.follow`), and whether each waits for somebody else."""

    awaits: dict[str, CallWait] = {}
    """For whom, of those that do."""

    at: int = 0
    """When it was begun; 0 where that was not kept."""


class Takeover(Struct, frozen=True):
    """A thread (the key) that a person took, ``by`` whom (empty: it was given back), the seqs of its last ``taken``
    and ``given`` rows, and when it was taken. ``head`` says where a message of it would go (`holds`)."""

    by: str
    taken: int
    at: int
    head: MessageHead
    given: int = 0
    until: int = 0
    """When it ends by itself (ms); 0: it does not."""


class ReadState(Struct, frozen=True, omit_defaults=True):
    """What a participant keeps for itself of a thread, under ``ID/THREAD`` (`marks`): everything up to ``read_upto`` is
    read.

    Under ``ID/`` alone: of all threads without a mark, since theirs made room for others.
    """

    read_upto: int = 0
    is_pinned: bool = False
    is_muted: bool = False
    is_archived: bool = False
    title: str = ""


class Question(Struct, frozen=True):
    """A message that requires a response of a person, who has not answered it, under ``ID/SEQ`` (`questions`)."""

    sender_id: str
    thread_id: str


class DismissedItems(Struct, frozen=True):
    """What somebody (the key) does not want to be told of any more: kind and seq of each, and when that was; the newest
    last."""

    items: tuple[tuple[str, int, int], ...] = ()


class UndeliveredMessage(Struct, frozen=True):
    """Of a dead letter, for its sender, under ``SENDER/NEWEST_FIRST/RECIPIENT``."""

    agent_id: str
    seq: int
    attempts: int
    at: int


class BudgetStop(Struct, frozen=True):
    """A reaction that its agent's own budget of tokens or money has ended, under ``NEWEST_FIRST/AGENT``: ``seq`` is its
    trigger's. It is over when the conversation was let go on since, or another reaction to the same was begun."""

    agent_id: str
    reaction: str
    seq: int
    root: int
    resumed: int
    at: int
    reason: str


class Followed(Struct, frozen=True):
    """How far the log that several nodes share is in this ledger: up to the record at ``position`` with this
    ``digest``, who led there, and whether what is here is a part of what was there then. ``base`` is the record from
    which the log could begin, 0 for none, once all that it holds of rows up to ``base_head`` is dropped; ``begun`` and
    ``begun_head`` are those of one that is being written; None: an older release did not say."""

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
    """How much of its budget the conversation that a root message began has used, and who has (`shares`)."""

    messages: int
    last_seq: int
    extra_messages: int = 0
    extra_hops: int = 0
    stopped_in: tuple[str, ...] = ()
    """Threads whose readers were told that it is spent."""

    spent: dict[str, TokenUsage] = {}
    """What the records of its reactions say, by model."""

    resumed: int = 0
    """How often it was let go on."""

    began_by: str = ""
    """Who began it; empty where that is not known, since what was counted before is lost."""

    first: tuple[str, ...] = ()
    """Those between whom it began: its root's sender, and whom that names."""

    parties: dict[str, int] = {}
    """How many messages each of them has sent in it, and of those whom parties addressed."""

    others: dict[str, int] = {}
    """How many each of the rest has."""

    claims: dict[str, dict[str, TokenUsage]] = {}
    """What their records say that each agent spent in it, by model."""

    told: tuple[str, ...] = ()
    """By which bounds it has stopped since it was let go on: each was told to who began it."""


class StoppedConversation(Struct, frozen=True):
    """A conversation that has stopped and was not let go on: the last message stored in it, and when, by which
    limit, who used it up, and how many of its messages that one sent."""

    root: int
    seq: int
    at: int
    limit: str
    used_by: str
    used: int
    began_by: str
    reason: str


class CallResult(Struct, frozen=True):
    """The first result of a call that changed something, repeated for its ``call_id`` for 24 hours."""

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
    """Those to it that were open then, and are no more."""

    sender_id: str = ""
    """Who is shown it as undelivered; empty where that is not known, or was not kept."""


class AbandonedReaction(Struct, frozen=True):
    """Of a reaction (the key's second half) to what is a dead letter now: which it is. Kept as long as the letter."""

    trigger: int
    sender_id: str
    attempts: int


class AttemptCount(Struct, frozen=True):
    """How many attempts a message took in all that failed at least once and needs no more: the last one handled it, or
    it was given up."""

    attempts: int


class ReactionStart(Struct, frozen=True):
    """A reaction, as it was begun by the ``started`` record of this seq."""

    reaction: str
    seq: int


MAX_BEGUN = 64
"""How many of the reactions to one message are known: the first, and the newest."""


class TriggeredReactions(Struct, frozen=True):
    """The newest reaction that one agent (the key's first half) began for one message (its second half), and the
    ``earlier`` ones."""

    reaction: str
    seq: int
    earlier: tuple[ReactionStart, ...] = ()

    @property
    def first(self) -> ReactionStart:
        return self.all[0]

    @property
    def all(self) -> tuple[ReactionStart, ...]:
        """All of them, ascending."""
        return (*self.earlier, ReactionStart(self.reaction, self.seq))

    def with_started(self, reaction: str, seq: int) -> TriggeredReactions:
        """These, and one that is begun now."""
        first, *others = self.all
        return TriggeredReactions(reaction, seq, (first, *others[2 - MAX_BEGUN :]))


def descending_key(seq: int) -> str:
    """A seq as a key that comes before those of lower ones."""
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
    "undelivered": UndeliveredMessage,
    "spent_out": BudgetStop,
    "followed": Followed,
}


class TableWrite(Struct, frozen=True, gc=False):
    """One change of one table; ``value`` None deletes the key."""

    table: Table
    key: str
    value: Any


class Facts(Struct):
    """What the ledger says about a batch before it is applied. A key that is absent from a table does not exist, but
    those of ``damaged``: (table, key) of values that are no longer what was stored."""

    stored: dict[tuple[str, str], StoredKey] = {}
    heads: MutableMapping[int, MessageHead] = {}
    cold: dict[tuple[str, str], Any] = {}
    damaged: set[tuple[str, str]] = set()


def encode_value(value: Any) -> bytes:
    """Encode a table's value for the ledger."""
    return encode(value)


def decode_value(table: Table, data: bytes | str) -> Any:
    """Decode what `encode_value` wrote. Raises `msgspec.DecodeError` on another shape."""
    return msgspec.json.decode(data, type=VALUE_TYPES[table])


class LookupRequest(Struct):
    """What a batch needs to know before it is applied: `Ledger.lookup` answers it with `Facts`."""

    keys: set[tuple[str, str]]
    seqs: set[int]
    cold: set[tuple[Table, str]]

    def __bool__(self) -> bool:
        return bool(self.keys or self.seqs or self.cold)
