"""`Publisher`: step 8 of a batch. It merges the batch's draft into the committed state and sends the outcomes to
sessions.

The publisher turns outcomes into deliveries, answers, notices, welcomes and goodbyes, in the order of the batch. It
makes no decisions about the network. It runs without an await, so a session never sees half of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import Any, assert_never

from msgspec import UNSET, Raw, Struct, UnsetType

from roundelay.network.addresses import name_of, parse_address
from roundelay.network.core.entries import (
    AcceptSession,
    DisconnectParticipant,
    Entry,
    Group,
    MarkHandled,
    ModEntry,
    NotifyMembership,
    OtherEffect,
    Outcome,
    RefuseSession,
    RequestCancel,
    ScheduleRetry,
    Send,
    SendNotice,
    SessionReply,
)
from roundelay.network.core.mod import AfterContext, Mod
from roundelay.network.core.revisions import REVISIONS, revise_all
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.sending import Rules
from roundelay.network.core.state import State
from roundelay.network.core.tables import CallWait, OpenReaction, Participant
from roundelay.network.core.takeovers import is_blocked_by_takeover
from roundelay.network.core.uncaused_answers import record_message, record_person
from roundelay.network.core.visibility import broadcast_readers, is_recipient, parties, thread_readers
from roundelay.network.errors import Forbidden, LedgerError
from roundelay.network.frames import (
    FIRST_DELIVERY,
    PROTOCOL_VERSION,
    SEQ_LIMIT,
    Follows,
    NetworkInfo,
    OpenReactionInfo,
    SignalOutFrame,
    WelcomeFrame,
    encode,
)
from roundelay.network.ledger import Ledger

from .intake import Intake
from .pending import PendingEntries
from .session import SessionState
from .sessions import SessionRegistry

log = logging.getLogger(__name__)


class Publisher:
    """Sends the outcomes of committed batches to sessions."""

    def __init__(
        self,
        registry: SessionRegistry,
        rules: Rules,
        ledger: Ledger,
        intake: Intake,
        pending: PendingEntries,
        *,
        server: str,
    ) -> None:
        self._registry = registry
        self._rules = rules
        self._ledger = ledger
        self._intake = intake
        self._pending = pending
        self._server = server
        self._after_hooks = tuple(mod for mod in rules.mods.values() if mod.overrides("after"))
        self._mod_infos = [mod.describe() for mod in rules.mods.values()]
        self._limits = rules.limits.model_dump(exclude_none=True)

    def publish(self, draft: State, outcomes: Sequence[tuple[Entry, Outcome]]) -> None:
        """Merge a batch into the committed state. Then send the messages and effects of each entry, in order."""
        registry, sessions, messages = self._registry, self._registry.sessions, list[Row]()
        # Find the changes before the merge, because `find_inbox_changes` compares the draft with the committed state.
        inbox_changes = find_inbox_changes(registry.state, draft)
        conversations = registry.subscriptions.conversations
        changed = conversations.list_open(registry.state, draft)
        # Merge before any delivery: `is_recipient` must see the members and participants of this batch.
        registry.participants.merge(draft)
        if inbox_changes is not None:
            registry.notify_inbox(inbox_changes.list_people(registry.state), operators=inbox_changes.operators)
            if inbox_changes.seqs:
                registry.spawn(self._notify_readers(inbox_changes.seqs))
        changes = [row for _, outcome in outcomes for row in outcome.rows if row.type in REVISIONS]
        for entry, outcome in outcomes:
            for row in outcome.rows:
                if row.head is not None:
                    # If this batch has deleted a message, do not deliver the message with its text.
                    if changes:
                        row = revise_all([row], changes).get(row.seq, row)
                    messages.append(row)
                    # The sender's session gets `stored` instead of a delivery. If an operation or a hook sent the
                    # message, there is no `stored`, so the caller's session receives the message too.
                    sender_session = entry.origin.session_id if isinstance(entry, Send | Group) and row.key else ""
                    self._deliver(row, sender_session)
                    for mod in self._after_hooks:
                        self._run_after(mod, row)
            for effect in outcome.effects:
                if isinstance(effect, SessionReply):  # check this before the match, whose class patterns are slow
                    session = sessions.get(effect.session_id)
                    if session is not None:
                        registry.write(session, effect.data)
                else:
                    self._perform(effect)
        if changed and (quiet := conversations.wake(registry.state, changed)):
            registry.spawn(self._notify_quiet(quiet))
        # There was no await since the merge, so no session can have gone live and missed these messages.
        if changes:
            registry.recent.revise(changes)
            registry.spawn(self._update_search_index())
        registry.recent.add(messages)
        registry.counts["messages"] += len(messages)
        if log.isEnabledFor(logging.DEBUG):
            for row in (row for _, outcome in outcomes for row in outcome.rows):
                place = {"seq": row.seq, "type": row.type, "agent_id": row.actor, "to": row.target, "in": row.stream}
                log.debug("stored", extra=place)

    def _deliver(self, row: Row, sender_session: str) -> None:
        """Queue a committed message for every live session of its recipients."""
        head = row.head
        assert head is not None
        registry, participants = self._registry, self._registry.participants
        seq, sender, kind = row.seq, head.sender_id, head.kind
        state, live = participants.state, participants.live
        frame = FIRST_DELIVERY % row.data
        # Nearly every message goes to one participant and to the sender's other sessions.
        if kind == "direct":
            _, name = parse_address(row.target)
            # This entry exists only in memory (see `uncaused_answers`). After a restart, counting begins again.
            state.recent_messages.delivered[name] = seq
            if head.sender_kind == "human":
                record_person(self._rules.limits, state, head)
            if name != sender and name in live:
                registry.push(live[name].sessions, (seq, frame, True), sender_session)
            if sender in live:
                registry.push(live[sender].sessions, (seq, frame, False), sender_session)
            return
        record_message(self._rules.limits, state, head)
        if kind == "broadcast":
            before, excluded = broadcast_readers(head)
            targets = [
                recipient
                for recipient in participants.online()
                if (recipient.registered_seq < before and recipient.agent_id not in excluded)
                or recipient.agent_id == sender
            ]
        elif kind == "channel":
            online = participants.online_in(name_of(head.to))
            targets = [recipient for recipient in online if is_recipient(state, recipient.agent_id, head)]
        else:
            targets = [live[name] for name in dict.fromkeys(parties(head)) if name in live]
        others = [session for recipient in targets if recipient.agent_id != row.actor for session in recipient.sessions]
        registry.push(others, (seq, frame, True), sender_session)
        # The sender's other sessions get the message too, but need not acknowledge it. A sender does not have to handle
        # its own message.
        own = [session for recipient in targets if recipient.agent_id == row.actor for session in recipient.sessions]
        registry.push(own, (seq, frame, False), sender_session)

    async def _update_search_index(self) -> None:
        """Remove the words of deleted messages from the search index."""
        try:
            await self._ledger.forget_dropped()
        except LedgerError as error:
            self._registry.read_errors.record(error, "the search index")

    async def _notify_readers(self, seqs: set[int]) -> None:
        """Notify the readers of these messages that their inbox changed. The heads of the messages are read from the
        ledger."""
        registry = self._registry
        try:
            heads = await self._ledger.heads(seqs)
        except LedgerError as error:
            registry.read_errors.record(error, "a notice of the inbox")
            return
        registry.notify_inbox(
            {agent_id for head in heads.values() for agent_id in thread_readers(registry.state, head)}
        )

    async def _notify_quiet(self, roots: Sequence[int]) -> None:
        """Notify the participants who began these conversations that the conversations are quiet. ``roots`` holds the
        seqs of the first messages, whose heads are read from the ledger."""
        registry = self._registry
        try:
            heads = await self._ledger.heads(set(roots))
        except LedgerError as error:
            registry.read_errors.record(error, "a notice of a quiet conversation")
            return
        registry.subscriptions.conversations.announce(heads.values())

    def _run_after(self, mod: Mod, row: Row) -> None:
        def submit(payload: object) -> None:
            self._pending.add(ModEntry(mod.id, payload, cause=row.seq))

        try:
            work = mod.after(AfterContext(self._registry.state, submit), row)
        except Exception:  # a bug of one mod must not end the hub
            log.exception("a mod's after hook failed", extra={"mod": mod.id})
            return
        if work is not None:
            self._registry.spawn(_await_after(work))

    def _perform(self, effect: OtherEffect) -> None:
        registry = self._registry
        match effect:
            case AcceptSession():
                self._welcome(effect)
            case RefuseSession():
                session = registry.sessions.get(effect.session_id)
                if session is not None:
                    registry.refuse(session, effect.code, effect.error)
            case SendNotice():
                self._notify(effect)
            case NotifyMembership():
                registry.subscriptions.announce_members(effect.channel, effect.agent_id)
            case MarkHandled():
                self._mark_handled(effect)
            case ScheduleRetry():
                registry.redelivery.schedule(effect.agent_id, effect.seq, effect.attempt, effect.due_at)
            case DisconnectParticipant():
                for session in registry.participants.sessions_of(effect.agent_id):
                    if not effect.token or (session.origin is not None and session.origin.token == effect.token):
                        registry.refuse(session, 4403, Forbidden(effect.reason))
            case RequestCancel():
                self._request_cancel(effect)
            case _:
                assert_never(effect)

    def _notify(self, effect: SendNotice) -> None:
        """Send a notice to the sessions of its readers. The participant who caused the notice receives it without the
        reason."""
        registry = self._registry
        sessions = {
            session.session_id: session
            for agent_id in sorted(effect.agent_ids)  # sorted, so that the order is the same in every process
            for session in registry.participants.sessions_of(agent_id)
        }
        if effect.to_operators:
            registry.counts["loops_stopped"] += effect.kind == "loop_stopped"
            sessions |= {session.session_id: session for session in registry.operators()}
        sessions.pop(effect.except_session, None)
        registry.notice(sessions.values(), effect.kind, effect.thread_id, effect.body)
        if effect.sender_id is not None:
            others = [
                session
                for session in registry.participants.sessions_of(effect.sender_id)
                if session.session_id not in sessions
            ]
            body = {name: value for name, value in effect.body.items() if name != "reason"}
            registry.notice(others, effect.kind, effect.thread_id, body)

    def _mark_handled(self, effect: MarkHandled) -> None:
        """Mark a message as handled for a participant and for each of its sessions."""
        mailbox = self._registry.participants.find_mailbox(effect.agent_id)
        if mailbox is None:
            return
        mailbox.mark_handled(effect.seq)
        for session in self._registry.participants.sessions_of(effect.agent_id):
            session.outbox.release(effect.seq)
            if session.starts_at_ack_cursor:
                mailbox.compact(session.outbox)
            self._registry.schedule_flush(session)

    def _request_cancel(self, effect: RequestCancel) -> None:
        body = Raw(encode({"reaction": effect.reaction}))
        frame = SignalOutFrame(sender_id=effect.sender_id, thread_id=effect.thread_id, kind="cancel", body=body)
        for session in self._registry.participants.sessions_of(effect.agent_id):
            if session.is_reactor:
                self._registry.write(session, encode(frame))

    # --- welcome

    def _welcome(self, effect: AcceptSession) -> None:
        hello, participant, origin = effect.hello, effect.participant, effect.origin
        registry, state, meta = self._registry, self._registry.state, self._registry.meta
        # Supersede the older session even if the new session has already ended. The older session's fencing token is
        # refused from now on, so the runner of this session must be informed.
        if origin.fencing_token is not None:
            self._supersede(participant.agent_id)
        # The connection may have ended while its hello was in the batch. In this case the registration remains, but no
        # session starts.
        session = registry.sessions.get(origin.session_id)
        if session is None or session.state is not SessionState.JOINING:
            return
        cursor, resume, missing_before = self._find_start(effect)
        reactions = [
            OpenReactionInfo(reaction.reaction, reaction.trigger, reaction.seq, is_blocked_by_takeover(state, reaction))
            for reaction in state.reactions_of(participant.agent_id).values()
        ]
        frame = WelcomeFrame(
            protocol=PROTOCOL_VERSION,
            server=self._server,
            network=NetworkInfo(meta.name, meta.epoch),
            agent_id=participant.agent_id,
            kind=participant.kind,
            is_operator=origin.is_operator,
            is_read_only=self._rules.is_read_only,
            follows=self._describe_leader(),
            role=hello.role,
            session_id=session.session_id,
            fence=UNSET if origin.fencing_token is None else origin.fencing_token,
            cursor=cursor,
            head=state.head,
            resume=resume,
            missing_before=UNSET if missing_before is None else missing_before,
            open_reactions=UNSET if origin.fencing_token is None else sorted(reactions, key=lambda info: info.seq),
            mods=self._mod_infos,
            limits=self._list_limits(participant.agent_id),
            is_watched=registry.subscriptions.is_watched,
        )
        # The welcome must be the session's first frame. After `join`, notices and deliveries may follow.
        registry.write(session, encode(frame))
        at_ack_cursor = hello.resume is UNSET
        registry.join(session, origin, participant, cursor, at_ack_cursor=at_ack_cursor, is_silent=not hello.deliver)
        # Send the cancel requests that arrived while no runner was connected. The welcome has just told the new runner
        # about its open reactions.
        for request in effect.cancel_requests:
            self._request_cancel(request)
        # Release last: frames that arrived early must be handled after the welcome and the cancel requests.
        self._intake.release(session)

    def _describe_leader(self) -> Follows | UnsetType:
        """Return the description of the leader for ``welcome``. Unset on the leader itself."""
        return UNSET

    def _list_limits(self, agent_id: str) -> dict[str, int]:
        """Return the limits of one participant. Limits that do not apply to the participant are left out."""
        quotas = self._rules.quotas
        if agent_id not in quotas.own:
            return self._limits
        limits = {**self._limits, **quotas.describe(agent_id)}
        return {name: value for name, value in limits.items() if value is not None}

    def _find_start(self, effect: AcceptSession) -> tuple[int, Any, int | None]:
        """Return the session's start cursor, the kind of resume and, if the history was cut, the first remaining seq.

        A session without ``resume`` starts at its participant's ack cursor. If the cursor in ``resume`` belongs to
        another history or is outside this history, the session starts at the beginning and is welcomed as ``limited``.
        """
        resume, meta = effect.hello.resume, self._registry.meta
        if resume is UNSET:
            start = self._registry.participants.find_delivery_start(effect.participant, meta.first_seq)
            # Retention deleted messages that this participant had not handled. Report this once, and start at the
            # oldest remaining message.
            if start < meta.first_seq - 1:
                return meta.first_seq - 1, "limited", meta.first_seq
            return start, "new" if effect.is_new else "full", None
        # A cursor is valid only within its own history. In another history the same number means another message.
        if resume.epoch == meta.epoch and meta.first_seq - 1 <= resume.cursor <= self._registry.state.head:
            return resume.cursor, "full", None
        return meta.first_seq - 1, "limited", meta.first_seq

    def _supersede(self, agent_id: str) -> None:
        for session in self._registry.participants.sessions_of(agent_id):
            if session.is_reactor:
                # Send the notice before the close frame. The old runner must stop working instead of reconnecting and
                # superseding the new runner.
                self._registry.notice([session], "superseded", None, {"agent_id": agent_id})
                self._registry.end(session, 4409, "A newer reactor has taken over.")


async def _await_after(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:  # a bug in one mod's IO must not end the hub
        log.exception("a mod's after hook failed")


class InboxChanges(Struct):
    """The participants whose inboxes changed: ``agent_ids``, the readers of the messages ``heads`` and ``seqs``, and
    the operators."""

    agent_ids: set[str] = set()
    heads: list[MessageHead] = []
    seqs: set[int] = set()
    """Seqs of messages whose heads are not in the batch and must be read from the ledger."""
    operators: bool = False

    def list_people(self, state: State) -> set[str]:
        """Return the participants that can be found without reading the ledger: ``agent_ids`` and the readers of
        ``heads``."""
        return self.agent_ids.union(*(thread_readers(state, head) for head in self.heads))


def find_inbox_changes(state: State, draft: State) -> InboxChanges | None:
    """Compare a draft with the committed state that it extends. Return None if no inbox changes."""
    tables, changes = draft.tables, InboxChanges()
    for table in ("question", "dismissed", "dead", "undelivered"):
        if changed := tables.get(table):  # a table that was only read is in the draft too, but empty
            changes.agent_ids |= {key.partition("/")[0] for key in changed}
            changes.operators |= table == "dead"
    for table in ("stopped", "spent_out"):
        if changed := tables.get(table):
            # `descending_key` stores the seq as its distance from `SEQ_LIMIT`, so listings begin with the newest.
            changes.seqs |= {SEQ_LIMIT - int(key.partition("/")[0]) for key in changed}
            changes.operators = True
    for key, now in tables.get("reaction", {}).items():
        before: OpenReaction | None = state.get("reaction", key)
        reaction = now if now is not None else before
        # Compare only the requests for decisions: the reaction itself changes with every record.
        if reaction is not None and _requests(before) != _requests(now):
            changes.heads.append(reaction.trigger_head)
            changes.agent_ids |= _deciders(before) | _deciders(now)
            changes.operators = True
    # A takeover blocks decisions without changing any reaction. Takeovers are rare, so check all reactions.
    if tables.get("hold"):
        for _, reaction in state.items("reaction"):
            was_blocked, is_blocked = (is_blocked_by_takeover(level, reaction) for level in (state, draft))
            if _requests(reaction) and was_blocked != is_blocked:
                changes.heads.append(reaction.trigger_head)
                changes.agent_ids |= _deciders(reaction)
                changes.operators = True
    for agent_id, now in tables.get("participant", {}).items():
        participant = state.participant(agent_id) or Participant(agent_id, now.kind, now.registered_seq)
        changes.operators |= (participant.fault, participant.is_lost) != (now.fault, now.is_lost)
    for agent_id, now in tables.get("stored", {}).items():
        stored = state.get("stored", agent_id)
        if (stored is not None and stored.is_near) is not (now is not None and now.is_near):
            changes.agent_ids.add(agent_id)
            changes.operators = True
    has_changes = changes.agent_ids or changes.heads or changes.seqs or changes.operators
    return changes if has_changes else None


def _requests(reaction: OpenReaction | None) -> set[CallWait]:
    """Return the decisions for which a reaction waits."""
    if reaction is None or reaction.is_cancelled or not reaction.awaits:
        return set()
    return {wait for wait in reaction.awaits.values() if wait.request is not None}


def _deciders(reaction: OpenReaction | None) -> set[str]:
    """Return the people who are named as deciders of a reaction. Some of these people may not be allowed to read its
    trigger."""
    return {agent_id for wait in _requests(reaction) for agent_id in wait.deciders or ()}
