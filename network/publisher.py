"""Step 8, after the merge: outcomes become deliveries, answers, notices, welcomes and goodbyes. Decides nothing about the network."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, assert_never

from msgspec import UNSET, Raw

from .config import Limits
from .entries import (
    Answer,
    AskToStop,
    Disconnect,
    Entry,
    ModEntry,
    Notify,
    OtherEffect,
    Outcome,
    Refuse,
    Retry,
    Send,
    Settle,
    Welcome,
)
from .errors import Forbidden
from .frames import PROTOCOL_VERSION, NetworkInfo, OpenReactionInfo, SignalOutFrame, WelcomeFrame, encode
from .ledger import Row
from .mod import AfterContext, Mod
from .quotas import Quotas
from .session import Session, SessionState
from .switchboard import Switchboard

log = logging.getLogger(__name__)


class Publisher:
    """Performs what a committed batch came to. ``release`` lets in what a session sent before its welcome, ``enter`` takes entries."""

    def __init__(
        self,
        board: Switchboard,
        *,
        limits: Limits,
        quotas: Quotas,
        mods: Sequence[Mod],
        server: str,
        counts: Counter[str],
        release: Callable[[Session], None],
        enter: Callable[[Entry], None],
    ) -> None:
        self._board = board
        self._server = server
        self._counts = counts
        self._release = release
        self._enter = enter
        self._after = tuple(mod for mod in mods if mod.overrides("after"))
        self._mod_infos = [mod.describe() for mod in mods]
        self._limits = limits.model_dump()
        self._quotas = quotas

    def publish(self, outcomes: Sequence[tuple[Entry, Outcome]]) -> None:
        """Hand on a batch in its order: each entry's messages, then its effects."""
        board, sessions = self._board, self._board.sessions
        messages = [row for _, outcome in outcomes for row in outcome.rows if row.type == "message"]
        board.pages.keep(messages)
        self._counts["messages"] += len(messages)
        for entry, outcome in outcomes:
            for row in outcome.rows:
                if row.type == "message":
                    # what an operation or a hook sent is delivered to the caller's session too: it gets no `stored` for it
                    sender_session = entry.origin.session_id if isinstance(entry, Send) and row.key else ""
                    board.publish(row, sender_session)
                    for mod in self._after:
                        self._run_after(mod, row)
            for effect in outcome.effects:
                if isinstance(effect, Answer):  # before the match, whose class patterns cost
                    session = sessions.get(effect.session_id)
                    if session is not None:
                        board.write(session, effect.data)
                else:
                    self._perform(effect)

    def _run_after(self, mod: Mod, row: Row) -> None:
        def submit(payload: object) -> None:
            self._enter(ModEntry(mod.id, payload, cause=row.seq))

        try:
            work = mod.after(AfterContext(self._board.state, submit), row)
        except Exception:  # one mod's defect must not end the hub
            log.exception("a mod's after hook failed", extra={"mod": mod.id})
            return
        if work is not None:
            self._board.spawn(_finish(work))

    def _perform(self, effect: OtherEffect) -> None:
        board = self._board
        match effect:
            case Welcome():
                self._welcome(effect)
            case Refuse():
                session = board.sessions.get(effect.session_id)
                if session is not None:
                    self._board.refuse(session, effect.code, effect.error)
            case Notify():
                sessions = {
                    session.session_id: session
                    for agent_id in sorted(effect.agent_ids)  # the same order in every process
                    for session in board.mailboxes.sessions_of(agent_id)
                }
                if effect.operators:
                    sessions |= {session.session_id: session for session in board.operators()}
                board.notice(sessions.values(), effect.kind, effect.thread_id, effect.body)
            case Settle():
                self._settle(effect)
            case Retry():
                board.redelivery.retry(effect.agent_id, effect.seq, effect.attempt, effect.due_at)
            case Disconnect():
                for session in board.mailboxes.sessions_of(effect.agent_id):
                    self._board.refuse(session, 4403, Forbidden(effect.reason))
            case AskToStop():
                self._ask_to_stop(effect)
            case _:
                assert_never(effect)

    def _settle(self, effect: Settle) -> None:
        mailbox = self._board.mailboxes.mailbox(effect.agent_id)
        if mailbox is None:
            return
        mailbox.settle(effect.seq)
        for session in self._board.mailboxes.sessions_of(effect.agent_id):
            session.outbox.settle(effect.seq)
            if session.starts_at_floor:
                mailbox.compact(session.outbox)
            self._board.touch(session)

    def _ask_to_stop(self, effect: AskToStop) -> None:
        body = Raw(encode({"reaction": effect.reaction}))
        frame = SignalOutFrame(sender_id=effect.sender_id, thread_id=effect.thread_id, kind="cancel", body=body)
        for session in self._board.mailboxes.sessions_of(effect.agent_id):
            if session.origin is not None and session.origin.fence is not None:
                self._board.write(session, encode(frame))

    # --- welcome

    def _welcome(self, effect: Welcome) -> None:
        hello, participant, origin, meta = effect.hello, effect.participant, effect.origin, self._board.meta
        if origin.fence is not None:  # even if the new one is gone by now: the older fence is refused from here on
            self._supersede(participant.agent_id)
        session = self._board.sessions.get(origin.session_id)
        if session is None or session.state is not SessionState.JOINING:
            return
        cursor, resume, missing_before = self._where_to_start(effect)
        reactions = [
            OpenReactionInfo(reaction.reaction, reaction.trigger, reaction.seq)
            for reaction in self._board.state.reactions_of(participant.agent_id).values()
        ]
        frame = WelcomeFrame(
            protocol=PROTOCOL_VERSION,
            server=self._server,
            network=NetworkInfo(meta.name, meta.epoch),
            agent_id=participant.agent_id,
            kind=participant.kind,
            role=hello.role,
            session_id=session.session_id,
            fence=UNSET if origin.fence is None else origin.fence,
            cursor=cursor,
            head=self._board.state.head,
            resume=resume,
            missing_before=UNSET if missing_before is None else missing_before,
            open_reactions=UNSET if origin.fence is None else sorted(reactions, key=lambda info: info.seq),
            mods=self._mod_infos,
            limits=self._show_limits(participant.agent_id),
        )
        self._board.write(session, encode(frame))
        at_floor = hello.resume is UNSET
        self._board.join(session, origin, participant, cursor, at_floor=at_floor)
        for asked in effect.cancelled:
            self._ask_to_stop(asked)
        self._release(session)

    def _show_limits(self, agent_id: str) -> dict[str, int]:
        """The limits as they hold for one participant; one that does not hold for it is left out."""
        if agent_id not in self._quotas.own:
            return self._limits
        shown = {**self._limits, **self._quotas.describe(agent_id)}
        return {name: number for name, number in shown.items() if number is not None}

    def _where_to_start(self, effect: Welcome) -> tuple[int, Any, int | None]:
        """The cursor, how the session resumes, and, if the history was cut, where it begins."""
        resume, meta = effect.hello.resume, self._board.meta
        if resume is UNSET:
            floor = self._board.mailboxes.floor_of(effect.participant, meta.first_seq)
            if floor < meta.first_seq - 1:
                return meta.first_seq - 1, "limited", meta.first_seq
            return floor, "new" if effect.is_new else "full", None
        if resume.epoch == meta.epoch and meta.first_seq - 1 <= resume.cursor <= self._board.state.head:
            return resume.cursor, "full", None
        return meta.first_seq - 1, "limited", meta.first_seq

    def _supersede(self, agent_id: str) -> None:
        for other in self._board.mailboxes.sessions_of(agent_id):
            if other.origin is not None and other.origin.fence is not None:
                self._board.notice([other], "superseded", None, {"agent_id": agent_id})
                self._board.end(other, 4409, "A newer reactor has taken over.")


async def _finish(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:  # one mod's IO must not end the hub
        log.exception("a mod's after hook failed")
