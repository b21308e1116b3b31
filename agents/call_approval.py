"""Approval of one call: asks people, counts their decisions and reports the outcome.

Approval is the first layer around a tool (`tool_call`). `approvals` contains the texts, and `replies` waits for the
decisions. The code records everything that affects a decision before using it: the people asked (a note), the requests
and votes (the wait) and the outcome (``approval``). A resumed reaction continues from these records, and a replay reads
them.

If the author names approvers, only those people decide. A person whose message led to the call can never approve it. An
approver who does not read the thread gets a copy of the request in a direct thread with the agent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, JsonValue, ValidationError

from roundelay.network.client import AnyMessage, Stored
from roundelay.network.errors import (
    BudgetExhausted,
    Forbidden,
    LoopStopped,
    RequestError,
    ThreadHeld,
    UnknownRecipient,
)
from roundelay.network.messages import BaseMessage

from .approval_rule import EffectiveRule
from .approvals import (
    MAX_SHOWN_CHARS,
    STILL_WAITS,
    NobodyDecides,
    RequestedCall,
    Standing,
    describe_call,
    describe_decision,
    describe_request,
    find_people,
    find_standing,
    has_operators,
    join_names,
    keep_standing,
    reply_to_decider,
)
from .inbox import Decision, find_decider, find_request, is_reported_by_network, read_decision, read_decision_text
from .isolation import retry_later
from .journal import Journal
from .recorded import Approval, Recorded
from .replies import Waiter
from .tools import PlannedCall, ToolContext
from .values import ToolArgumentsError, Vote, Wait

if TYPE_CHECKING:
    from .tool_client import ToolClient

_logger = logging.getLogger(__name__)

PERSON = "a person"
"""Key of the request that a wait sends to the thread of the trigger."""
OPERATOR = "an operator"
"""Key of the request that a wait sends to the agent's thread with itself, which only operators read."""


class Approvers(BaseModel):
    """People whom an approval rule names. The hub has resolved the names."""

    people: list[str] = []
    """People who may decide."""

    told_apart: list[str] = []
    """People who may decide but do not read the thread of the trigger. Each of them gets a copy of the request."""

    requesters: list[str] = []
    """Named people who may not decide, because their messages led to the call."""

    unknown: list[str] = []
    """Names in the rule that match no person and no role."""


class NotApproved(Exception):
    """A call that must not run. The model reads the error text."""


@dataclass(slots=True)
class CallApproval:
    """Approval of one planned call. ``obtain`` returns the call with the arguments that people approved."""

    turn: int
    planned: PlannedCall
    rule: EffectiveRule
    reply_text: str
    """Text that the model wrote together with the call. Empty if a reviewer must read the text before people do."""

    journal: Journal
    recorded: Recorded
    context: ToolContext
    """Tool context, which derives message ids from the id of the call."""

    causes: tuple[int, ...]
    """Seqs of the messages that led to the call, the trigger first."""

    waiter: Waiter | None
    find_replayed: Callable[[str], JsonValue]
    """Function that returns a note of the recorded run during a replay."""

    async def obtain(self) -> PlannedCall:
        """Return the approved call, whose arguments people may have changed. Raises `NotApproved`."""
        try:
            approval = await self._find_approval()
        except NobodyDecides:
            raise NotApproved(
                "it needs a person's approval: no person reads this thread, and no operator is there to decide."
            ) from None
        except (RequestError, LoopStopped, BudgetExhausted, ThreadHeld) as error:
            raise NotApproved(f"nobody could be asked to approve it ({error.code}: {error})") from error
        if approval is None:
            raise NotApproved("nobody approved it in time." if self.rule.needed == 1 else await self._explain_missing())
        await self._report_outcome(approval)
        if not approval.is_approved:
            reason = f": {approval.reason}" if approval.reason else "."
            raise NotApproved(f"{approval.by} denied it{reason}")
        if approval.arguments is None:
            return self.planned
        try:
            arguments = self.planned.tool.parse(approval.arguments)
        except ToolArgumentsError as error:  # the tool's parameters have changed since the decision
            raise NotApproved(f"{approval.by} changed the arguments, and they do not fit. {error}") from error
        # Write the arguments in the form that a model uses. The history and the records then show the call that
        # actually ran.
        written = json.dumps(json.loads(approval.arguments), ensure_ascii=False)
        return replace(self.planned, arguments=arguments, call=replace(self.planned.call, arguments=written))

    @property
    def _place(self) -> tuple[int, int]:
        return self.turn, self.planned.index

    @property
    def _trigger(self) -> AnyMessage:
        trigger = self.context.trigger
        assert isinstance(trigger, AnyMessage)
        return trigger

    @property
    def _tool(self) -> str:
        return self.planned.tool.name

    @property
    def _arguments(self) -> str:
        return self.planned.call.arguments or "{}"

    async def _explain_missing(self) -> str:
        votes = self.waiter.known.votes if self.waiter is not None and self.waiter.known is not None else []
        outcome = f"{join_names(vote.by for vote in votes)} approved it" if votes else "nobody approved it"
        return f"{self.rule.needed} people have to approve it, and in time {outcome}."

    # --- recorded and standing approvals

    async def _find_approval(self) -> Approval | None:
        approval = self.recorded.waiting.approvals.get(self._place)
        if approval is not None or self.waiter is None:
            return approval
        wait = self.recorded.waiting.approval_waits.get(self._place)
        if wait is None:
            if len(self._arguments) > MAX_SHOWN_CHARS:
                raise NotApproved(
                    f"its arguments have {len(self._arguments)} characters, and people are shown {MAX_SHOWN_CHARS} at most: "
                    "nobody can approve arguments that are not shown. Call it with shorter arguments."
                )
            approvers = await self._find_approvers(0)
            readers = await find_people(self.journal.client, self._trigger)
            standing = await self._find_standing(approvers, readers)
            if standing is not None:
                # Record the standing approval like a new decision. Otherwise a resumed call would ask again if a person
                # withdrew the standing approval in the meantime.
                await self.journal.record_approval(*self._place, standing)
                return standing
            wait = await self._ask(approvers, readers)
        elif wait.deciders is None and self.rule.approvers:  # the approvers were configured after the request was sent
            stricter = wait.model_copy(update={"needed": max(wait.needed, self.rule.needed)})
            approvers = await self._find_approvers(0)
            self._check_enough(approvers)
            wait = await self._ask_more(stricter, approvers, stage=wait.stage)
        try:
            return await self._await_approval(wait)
        finally:
            # Stop waiting after a cancellation too. Otherwise a later decision would go to a call that no longer waits.
            self.waiter.forget(wait.questions.values())

    async def _find_standing(self, approvers: Approvers | None, readers: set[str] | None) -> Approval | None:
        people = readers if approvers is None else approvers.people
        if not people:
            return None
        return await find_standing(self.journal.client, self._tool, self._trigger.thread_id, people, self.rule.needed)

    # --- asking people

    async def _find_approvers(self, stage: int) -> Approvers | None:
        """Return the people whom the rule names for a stage of the request. Return None if the rule names nobody for
        this stage.
        """
        names = self.rule.escalate_to if stage else self.rule.approvers
        if not names:
            return None
        note = f"approvers-{self.planned.index}-{stage}"
        try:
            return Approvers.model_validate(self.recorded.notes.get(self.turn, {}).get(note))
        except ValidationError:
            pass  # nobody has been asked so far
        try:
            approvers = Approvers.model_validate(self.find_replayed(note))
        except ValidationError:
            approvers = await self._resolve(names)
        # Record these people before asking anybody. A resumed reaction must accept decisions from the same people, even
        # if roles have changed.
        await self.journal.record_note(self.turn, note, approvers.model_dump())
        return approvers

    async def _resolve(self, names: tuple[str, ...]) -> Approvers:
        """Ask the hub which people the names refer to now."""
        # Send the seqs of the causes, so that the hub can find the people who requested the call. People must not
        # approve their own requests.
        args = {"names": list(names), "seqs": list(self.causes)}
        answer = await retry_later(partial(self.journal.client.call, "network.approvers", args))
        people = [it for it in answer["people"] if self.rule.requester_may_approve or not it["is_requester"]]
        return Approvers(
            people=[person["agent_id"] for person in people],
            told_apart=[person["agent_id"] for person in people if not person["reads"]],
            requesters=[person["agent_id"] for person in answer["people"] if person not in people],
            unknown=answer["unknown"],
        )

    def _check_enough(self, approvers: Approvers | None) -> None:
        """Raise `NotApproved` if too few people could ever approve the call, even after an escalation."""
        if approvers is not None and len(approvers.people) < self.rule.needed and not self.rule.escalate_to:
            raise NotApproved(self._explain_nobody(approvers))

    def _explain_nobody(self, approvers: Approvers) -> str:
        """Explain why nobody, or not enough people, can be asked."""
        reasons = [f"{join_names(approvers.people)} alone may approve it"] if approvers.people else []
        if approvers.requesters:
            reasons.append(f"{join_names(approvers.requesters)} led to the call and so may not approve it")
        if approvers.unknown:
            reasons.append(f"{join_names(approvers.unknown)} names nobody in this network")
        needs = f"{self.rule.needed} approvers" if self.rule.needed > 1 else "an approver"
        named = join_names(self.rule.approvers)
        return f"it needs {needs} of {named}, and there are not enough: {'; '.join(reasons) or 'nobody is there'}."

    async def _ask(self, approvers: Approvers | None, readers: set[str] | None) -> Wait:
        """Send the requests and return the wait for decisions. ``readers`` are the people who read the trigger's
        thread; None means that the hub does not support the question.
        """
        assert self.waiter is not None
        told_apart = approvers.told_apart if approvers is not None else []
        deciders = None if approvers is None else approvers.people
        questions: dict[str, Stored] = {}
        self._check_enough(approvers)
        call = self._describe(deciders)
        # A hub that is too old to report ``readers`` gets the behavior of older agents: ask in the thread of the
        # trigger.
        if readers or (approvers is None and readers is None):
            text, metadata = describe_request(call, self._trigger)
            questions[PERSON] = await self._send(None, text, metadata, self.context.call_id)
        elif approvers is None and await has_operators(self.journal.client):
            text, metadata = describe_request(call, self._trigger, is_for_operators=True)
            questions[OPERATOR] = await self._send(self.context.agent_id, text, metadata, self._derive("operator"))
        elif approvers is None:
            deciders = []  # nobody can decide before the escalation
        questions |= await self._send_copies(call, told_apart, 0)
        wait = Wait(
            questions={to: it.seq for to, it in questions.items()},
            threads={to: it.thread_id for to, it in questions.items()},
            until=self.waiter.find_until(self.rule.timeout_s),
            is_approval=True,
            deciders=self._keep_reached(deciders, told_apart, questions),
            needed=self.rule.needed,
        )
        if wait.deciders is not None and len(wait.deciders) < self.rule.needed:
            wait = await self._ask_more(wait, await self._find_approvers(1), stage=1)
            if len(wait.deciders or ()) < self.rule.needed:
                if approvers is None:
                    raise NobodyDecides
                raise NotApproved(self._explain_nobody(approvers))
        # Register each request before the wait is recorded, because a person may decide in the meantime.
        for question in wait.questions.values():
            self.waiter.expect(question, is_approval=True)
        return wait

    async def _ask_more(self, wait: Wait, approvers: Approvers | None, *, stage: int) -> Wait:
        """Send requests to additional people, who may decide from now on."""
        assert self.waiter is not None
        if approvers is None:
            return wait
        deciders_before = wait.deciders or []
        added = [person for person in approvers.people if person not in deciders_before]
        told_apart = [it for it in approvers.told_apart if it in added]
        deciders = [*deciders_before, *added]
        questions = await self._send_copies(self._describe(deciders), told_apart, stage)
        reached = self._keep_reached(added, told_apart, questions) or []
        return wait.model_copy(
            update={
                "questions": wait.questions | {to: it.seq for to, it in questions.items()},
                "threads": wait.threads | {to: it.thread_id for to, it in questions.items()},
                "until": self.waiter.find_until(self.rule.timeout_s),
                "deciders": [*deciders_before, *reached],
                "stage": stage,
            }
        )

    def _describe(self, deciders: list[str] | None) -> RequestedCall:
        return RequestedCall(
            self._tool, self._arguments, self.reply_text, self.rule, None if deciders is None else tuple(deciders)
        )

    @staticmethod
    def _keep_reached(
        people: list[str] | None, told_apart: list[str], questions: dict[str, Stored]
    ) -> list[str] | None:
        """Remove people who could not be asked because they do not read the thread and received no copy of the request."""
        return (
            people
            if people is None
            else [person for person in people if person not in told_apart or person in questions]
        )

    async def _send_copies(self, call: RequestedCall, people: list[str], stage: int) -> dict[str, Stored]:
        text, metadata = describe_request(call, self._trigger, is_copy=True)
        sent: dict[str, Stored] = {}
        for agent_id in people:
            try:
                sent[agent_id] = await self._send(agent_id, text, metadata, self._derive(f"{stage}-{agent_id}"))
            except (Forbidden, UnknownRecipient) as error:
                place = {"agent_id": self.context.agent_id, "approver": agent_id, "code": error.code}
                # Continue with the other approvers. A removed person must not block a call that other people may
                # approve.
                _logger.warning("an approver is not asked", extra=place)
        return sent

    def _derive(self, name: str) -> str:
        """Return the id of a message about this approval."""
        # Derive the id from the call and the recipient. After a restart, the agent then sends each request again under
        # the same id.
        return f"{self.context.call_id.removesuffix('-approval')}-{name}-approval"

    async def _send(self, agent_id: str | None, text: str, request: dict[str, Any], message_id: str) -> Stored:
        """Send a request to the trigger's thread, or a copy of the request to one approver."""
        client: ToolClient = self.context.client
        metadata = {"approval": {"reaction": self.context.reaction, **request}}
        options: dict[str, Any] = {"message_id": message_id, "metadata": metadata}
        if agent_id is None:
            return await retry_later(partial(client.reply, self._trigger, text, **options))
        return await retry_later(partial(client.send_text, agent_id, text, **options))

    # --- decisions

    async def _await_approval(self, wait: Wait) -> Approval | None:
        """Wait until people have decided, and record the outcome. Return None at the timeout."""
        assert self.waiter is not None
        while True:
            decisions = await self.waiter.wait_for_decisions(wait, self.rule.timeout_s)
            for place, message in enumerate(decisions, 1):
                outcome = await self._count(wait, message)
                if isinstance(outcome, Approval):
                    # Store the standing approval first. If the process is killed before the next line, the decision is
                    # handled again and stores the same standing approval. In the opposite order, a kill would lose the
                    # standing approval.
                    await self._keep_standing(wait, outcome)
                    await self.journal.record_approval(*self._place, outcome)
                    for late in decisions[place:]:
                        decided = f"This was decided by {join_names(outcome.people)} in #{outcome.seq}"
                        await self._answer(late, f"{decided}; what you said changes nothing.", {})
                    return outcome
                wait = outcome
            if not decisions:
                escalated = await self._escalate(wait)
                if escalated is None:
                    return None
                wait = escalated

    async def _escalate(self, wait: Wait) -> Wait | None:
        """Ask the people in ``escalate_to`` after the first timeout. Return None if there is nobody left to ask."""
        # Escalate only once. A second timeout means that the call is not approved.
        if wait.stage or not self.rule.escalate_to:
            return None
        readers = await find_people(self.journal.client, self._trigger) if wait.deciders is None else None
        named = {"deciders": sorted(readers or ()), "with_operators": True} if wait.deciders is None else {}
        return await self._ask_more(wait.model_copy(update=named), await self._find_approvers(1), stage=1)

    async def _count(self, wait: Wait, message: BaseMessage) -> Wait | Approval:
        """Count a decision. Return the completed approval, or the wait if more approvals are needed. Answer the
        sender if the decision does not count.
        """
        decision, by = read_decision(message), find_decider(message)
        # When the thread is read after a restart, it still contains votes that were already counted. Count each message
        # once.
        if decision is None or any(it.seq == message.seq for it in wait.votes):
            return wait
        problem = self._find_problem(wait, decision, by, is_checked=is_reported_by_network(message))
        if problem:
            await self._answer(message, problem, {STILL_WAITS: find_request(message)})
            return wait
        request = 0 if is_reported_by_network(message) else message.reply_to or 0
        if decision.is_approved and wait.votes:
            # Check now whether approvers were removed from the network, because days may pass between the first vote
            # and this vote.
            wait = await self._drop_votes_of_removed(wait)
        at, said = message.sent_at, read_decision_text(message)
        vote = Vote(by=by, seq=message.seq, at=at, said=said, scope=decision.scope, request=request)
        votes = [*wait.votes, vote]
        # Count people instead of votes. Otherwise one person could vote twice and approve alone.
        if decision.is_approved and len({it.by for it in votes}) < wait.needed:
            counted = wait.model_copy(update={"votes": votes})
            assert self.waiter is not None
            # Record the vote before reporting it. A reported vote must survive if the process is killed.
            await self.waiter.keep(counted)
            call = describe_call(self._tool, self._arguments)
            text = f"{by} approved {call}: {len(votes)} of {wait.needed} approvals. It waits for somebody else's."
            await self._answer(message, text, {STILL_WAITS: find_request(message)})
            return counted
        return Approval(
            is_approved=decision.is_approved,
            by=by,
            seq=message.seq,
            at=message.sent_at,
            arguments=decision.arguments,
            reason=decision.reason,
            scope=_find_narrowest(votes) if decision.is_approved else "once",
            said=vote.said,
            votes=votes if wait.needed > 1 or not request or len(wait.questions) > 1 else [],
        )

    async def _drop_votes_of_removed(self, wait: Wait) -> Wait:
        """Drop approvals by people who were removed from the network, because they are no longer trusted."""
        args = {"names": sorted({it.by for it in wait.votes}), "seqs": [self._trigger.seq]}
        try:
            answer = await retry_later(partial(self.journal.client.call, "network.approvers", args))
        except RequestError:
            return wait  # the hub is too old, or the trigger was deleted
        votes = [vote for vote in wait.votes if vote.by not in answer["unknown"]]
        return wait if len(votes) == len(wait.votes) else wait.model_copy(update={"votes": votes})

    def _find_problem(self, wait: Wait, decision: Decision, by: str, *, is_checked: bool) -> str:
        """Return why a decision does not count, or an empty string if the decision counts. ``is_checked`` tells whether
        the hub has checked that the person may decide.
        """
        # Rely on the hub's check only for operators. The hub does not know the approvers that were named later.
        is_operator = is_checked and wait.with_operators
        if wait.deciders is not None and by not in wait.deciders and not is_operator:
            names = join_names(wait.deciders)
            return f"{by} may not decide on this call: its approvers are {names}, and it still waits for them."
        if is_checked and decision.scope != "once":
            return "A person who does not read this thread can approve only one call at a time; the call still waits."
        if decision.is_approved and any(vote.by == by for vote in wait.votes):
            return f"{by} has approved this already; it still waits for somebody else's approval."
        if decision.arguments is None:
            return ""
        if wait.needed > 1:
            return (
                f"{wait.needed} people have to approve the same arguments, so they cannot be changed; the call still "
                "waits. Deny it, and say what is to be changed."
            )
        try:
            # Check the arguments now, while the person can still correct them. A check at the start of the call could
            # only refuse the call.
            self.planned.tool.parse(decision.arguments)
        except ToolArgumentsError as error:
            request = next(iter(wait.questions.values()))
            return f"That changes the arguments to what does not fit, so #{request} still waits. {error}"
        return ""

    async def _keep_standing(self, wait: Wait, approval: Approval) -> None:
        if approval.scope == "once" or not approval.is_approved:
            return
        thread_id = wait.threads.get(PERSON, self._trigger.thread_id)
        others = [vote.by for vote in approval.votes if vote.by != approval.by]
        standing = Standing(
            tool=self._tool,
            scope=approval.scope,
            thread_id=thread_id,
            by=approval.by,
            seq=approval.seq,
            at=approval.at,
            with_others=others,
        )
        await keep_standing(self.journal.client, standing)

    # --- reports

    async def _answer(self, message: BaseMessage, text: str, metadata: dict[str, Any]) -> None:
        """Reply to the person who sent a decision."""
        assert isinstance(message, AnyMessage)
        await reply_to_decider(self.context.client, message, text, metadata)

    async def _report_outcome(self, approval: Approval) -> None:
        """Report the decision in every thread with a request, except in the thread where the decision itself already
        replies to the request. A repeated report stores nothing.
        """
        wait = self.waiter.known if self.waiter is not None else None
        wait = wait or self.recorded.waiting.approval_waits.get(self._place)
        if wait is None or self._place in self.recorded.begun_calls or self._place in self.recorded.results:
            return  # the call has started, so the decision was reported before the restart
        if not approval.votes:
            return  # the only request already has this decision as its reply
        text = describe_decision(approval, self._tool, self._arguments)
        decision = {
            "is_approved": approval.is_approved,
            "by": approval.people,
            "scope": approval.scope,
            "seq": approval.seq,
            "at": approval.at,
            "said": [vote.said for vote in approval.votes],
            "tool": self._tool,
            "arguments": self._arguments if approval.arguments is None else approval.arguments,
        }
        for to, question in wait.questions.items():
            if all(vote.request == question for vote in approval.votes):
                continue
            metadata = {"decided": {"request": question, **decision}}
            options = {"message_id": self._derive(f"decided-{question}"), "reply_to": question, "metadata": metadata}
            if to == PERSON:
                await self._send_notice(partial(self.context.client.reply, self._trigger, text, **options))
            else:
                recipient = self.context.agent_id if to == OPERATOR else to
                await self._send_notice(partial(self.context.client.send_text, recipient, text, **options))

    async def _send_notice(self, send: Callable[[], Any]) -> None:
        """Send a message that only informs people. If the hub refuses the message, log the refusal instead of raising
        it.
        """
        try:
            await retry_later(send)
        except (RequestError, LoopStopped, BudgetExhausted, ThreadHeld) as error:
            place = {"agent_id": self.context.agent_id, "reaction": self.context.reaction, "code": error.code}
            _logger.warning("a decision is not reported", extra=place)


def _find_narrowest(votes: list[Vote]) -> Any:
    """Return the narrowest scope among the votes."""
    scopes = {vote.scope for vote in votes}
    return "once" if "once" in scopes else "thread" if "thread" in scopes else "always"
