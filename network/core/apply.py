"""Step 6: decide what one entry changes.

`apply` is pure: it uses no IO and no clock. Its inputs are the state (the batch's draft), the facts from the ledger,
and one entry. Its outputs are rows, table writes and effects. The current time is the batch's timestamp. The rules for
each kind of entry are in a module of their own: `sending` for messages, `calls` for operations, `groups` for batches,
`joining` for ``hello`` frames, `reactions` for records, and `failures` for failed deliveries. Rules raise refusals as
exceptions, and `apply` converts them to answers.
"""

from __future__ import annotations

from collections import ChainMap
from typing import assert_never

from msgspec import UNSET

from roundelay.network.addresses import thread_start
from roundelay.network.errors import Forbidden, RoundelayError
from roundelay.network.frames import Follows, encode

from .calls import apply_mod_entry, apply_operate, call_keys
from .change import ChangeSet, refuse_entry, refuse_over_budget
from .conversation_budgets import BudgetExceeded
from .due_times import apply_due_time
from .entries import (
    AnsweredEntry,
    BindCredentials,
    Effect,
    EndTakeover,
    Entry,
    Group,
    Join,
    Leave,
    ModEntry,
    Nack,
    Operate,
    Outcome,
    ProcessEnded,
    ReachDueTime,
    Record,
    RefusedFrame,
    RefuseSession,
    SaveAckCursors,
    Send,
    SessionLost,
    SessionReply,
)
from .failures import apply_lost, apply_nack, save_ack_cursors
from .faults import apply_ended
from .joining import CLOSE_CODES, apply_join, bind_credentials
from .mod import list_named_seqs
from .reactions import apply_record
from .rows import Row
from .sending import Rules, apply_send
from .state import State
from .tables import Facts, LookupRequest, TableWrite
from .takeover_control import apply_end_takeover


def build_lookup(entries: list[Entry]) -> LookupRequest:
    """Do step 5: list the data that `apply` will need from the ledger for these entries."""
    lookup = LookupRequest(set(), set(), set())
    for entry in entries:
        # Test for Send before the match: class patterns are slow, and nearly every entry is a Send.
        if isinstance(entry, Send):
            frame = entry.frame
            lookup.keys.add(entry.key)
            if frame.reply_to is not UNSET:
                lookup.seqs.add(frame.reply_to)
            if frame.cause is not UNSET:
                lookup.seqs.add(frame.cause)
            continue
        match entry:
            case Record():
                lookup.keys.add((entry.origin.agent_id, "r:" + entry.frame.record_id))
                if entry.trigger is not None:
                    lookup.seqs.add(entry.trigger)
                if entry.frame.kind == "started":
                    lookup.cold.add(("triggered", f"{entry.origin.agent_id}/{entry.trigger}"))
                if entry.may_withdraw:
                    lookup.cold.add(("given_up", f"{entry.origin.agent_id}/{entry.frame.reaction}"))
            case Operate():
                lookup.cold.add(("call", f"{entry.origin.agent_id}/{entry.call_id}"))
                lookup.keys.update(call_keys(entry))
                if entry.op in ("network.retry_dead_letter", "network.drop_dead_letter"):
                    owner = entry.args.agent_id or entry.origin.agent_id
                    lookup.cold.add(("dead", f"{owner}/{entry.args.seq:016d}"))
                lookup.seqs.update(list_named_seqs(entry.args))
                for need in entry.needs:
                    if isinstance(need, int):
                        lookup.seqs.add(need)
                    else:
                        lookup.cold.add(("mod_cold", f"{entry.op.partition('.')[0]}/{need}"))
                if entry.op in ("network.take", "network.give", "network.mark") and (
                    start := thread_start(entry.args.thread_id)
                ):
                    lookup.seqs.add(start)
            case ReachDueTime():
                if entry.cause is not None:
                    lookup.seqs.add(entry.cause)
            case ModEntry():
                # The result of the mod's work is charged to the sender of the message that started the work, so look up
                # this message.
                lookup.seqs.add(entry.cause)
            case Group():
                wanted = build_lookup(list(entry.entries))
                lookup.keys.update(wanted.keys)
                lookup.seqs.update(wanted.seqs)
                lookup.cold.update(wanted.cold)
            case Nack():
                lookup.seqs.add(entry.seq)  # needed to report a dead letter to the sender of the message
            case _:
                pass
    return lookup


def apply(rules: Rules, state: State, facts: Facts, entry: Entry) -> Outcome:
    """Return the outcome of the next entry. The arguments are not changed."""
    # On a read replica, decide first, and then refuse every outcome that would store something. Clients then get the
    # same refusals as from the leader.
    outcome = _apply(rules, state, facts, entry)
    if rules.follows is None or not outcome.stores:
        return outcome
    error = Forbidden(describe_follower(rules.follows()))
    if isinstance(entry, Join):
        return Outcome(effects=(RefuseSession(entry.session_id, CLOSE_CODES[Forbidden], error),))
    return refuse_entry(rules, state, entry, error) if isinstance(entry, Record | Group | Operate | Send) else Outcome()


def describe_follower(follows: Follows) -> str:
    """Return an error text that says why a read replica refuses a request, and which node accepts it."""
    leader = f", {follows.leader}" if follows.leader else ""
    return f"This node follows and stores nothing. Send it to the node that leads{leader}."


def _apply(rules: Rules, state: State, facts: Facts, entry: Entry) -> Outcome:
    try:
        # Raise inside the ``try``, so that this refusal is answered and counted like any other refusal.
        if rules.is_read_only and isinstance(entry, Send | Record | Operate):
            if rules.follows is not None:
                raise Forbidden(describe_follower(rules.follows()))
            raise Forbidden("This hub is read-only: it accepts no messages, no records and no changes.")
        if isinstance(entry, Send):
            sent = apply_send(rules, state, facts, entry)
            return _run_hooks(rules, state, facts, entry, sent) if rules.apply_hooks and sent.rows else sent
        match entry:
            case Record():
                return apply_record(rules, state, facts, entry)
            case Group():
                return _apply_group(rules, state, facts, entry)
            case Operate():
                return apply_operate(rules, state, facts, entry)
            case RefusedFrame():
                return refuse_entry(rules, state, entry, entry.error)
            case ModEntry():
                return apply_mod_entry(rules, state, facts, entry)
            case Join():
                return apply_join(rules, state, facts, entry)
            case Nack():
                return apply_nack(rules, state, facts, entry)
            case SessionLost():
                return apply_lost(rules, state, entry)
            case ProcessEnded():
                return apply_ended(rules, state, entry)
            case Leave():
                return Outcome(effects=(RefuseSession(entry.origin.session_id, 1000, None),))
            case SaveAckCursors():
                return save_ack_cursors(state, entry)
            case ReachDueTime():
                return apply_due_time(rules, state, facts, entry)
            case EndTakeover():
                return apply_end_takeover(rules, state, facts, entry)
            case BindCredentials():
                return Outcome(writes=bind_credentials(state, entry))
            case _:
                assert_never(entry)
    except BudgetExceeded as error:
        if not isinstance(entry, AnsweredEntry):
            raise
        return refuse_over_budget(rules, state, facts, entry, error)
    except RoundelayError as error:
        if isinstance(entry, ModEntry) or not isinstance(entry, AnsweredEntry):
            raise  # a bug in the mod or the hub: no client can fix it with another frame
        return refuse_entry(rules, state, entry, error)


def _run_hooks(rules: Rules, state: State, facts: Facts, entry: Send, sent: Outcome) -> Outcome:
    """Run the mods' ``apply`` hooks in the same commit as a message."""
    change = ChangeSet(rules, state, facts, entry.origin)
    [row] = sent.rows
    change.add_row(row, sent.writes)
    # Run the hooks on the draft that contains the message. An error in a hook then refuses the message too.
    change.run_apply_hooks([row])
    # Count after the hooks, because the sender pays for everything that the mods stored because of the message.
    change.count_stored()
    return change.outcome(*sent.effects)


_STORED = b'{"type":"stored"'


def _apply_group(rules: Rules, state: State, facts: Facts, group: Group) -> Outcome:
    """Return the outcome of a ``batch``: several messages and records of one session, in one commit.

    The entries are decided in order, and each entry sees the outcomes of the entries before it. The first refusal ends
    the batch. So no entry depends on an entry that was not stored. The client gets one answer.
    """
    draft = state.draft()
    # Overlay the maps: a repeated id or a reply within the batch must find the rows of earlier entries.
    keys, heads = ChainMap({}, facts.stored), ChainMap({}, facts.heads)
    seen = Facts(keys, heads, facts.cold, facts.damaged)
    rows: list[Row] = []
    writes: list[TableWrite] = []
    effects: list[Effect] = []
    stored: list[bytes] = []
    refusal = b""
    for entry in group.entries:
        outcome = _apply(rules, draft, seen, entry)
        draft.apply_outcome(outcome)
        for row in outcome.rows:
            if row.key:
                keys[row.actor, row.key] = row
            if row.head is not None:
                heads[row.seq] = row.head
        rows += outcome.rows
        writes += outcome.writes
        for effect in outcome.effects:
            if not isinstance(effect, SessionReply):
                effects.append(effect)
            elif effect.data.startswith(_STORED):
                stored.append(effect.data)
            else:
                refusal = b',"error":' + effect.data
        if refusal:
            break
    answer = b'{"type":"batched","batch_id":%b,"stored":[%b]%b}' % (encode(group.batch_id), b",".join(stored), refusal)
    return Outcome(rows, writes, (SessionReply(group.origin.session_id, answer), *effects))
