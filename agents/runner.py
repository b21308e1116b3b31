"""Keeps one agent alive on the network: takes deliveries in, starts reactions, resumes those begun earlier, stops those
that a person stops.

Stands between the client and `react`, which a subclass gives (`simple` for one that asks a model). It decides nothing
about the conversation and holds nothing that must survive: what was begun stands in the ledger, and a runner that ends
without having finished a reaction, by `stop` or by `kill -9`, leaves it open for the next one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TypedDict, get_args

from roundelay.network.client import AnyMessage, Delivery, NetworkClient, Notice, Reconnected, Signal
from roundelay.network.errors import BudgetExhausted, ConfigError, Forbidden, InvalidArguments, Superseded, ThreadHeld
from roundelay.network.frames import plain_text
from roundelay.network.messages import BaseMessage, MessageThread

from .agent import check_list
from .approvals import answer_late_decision
from .events import OnEvent
from .inbox import (
    Arrival,
    Inbox,
    ReactTo,
    Visibility,
    find_request,
    is_watched,
    read_decision,
    requires_response_from,
)
from .isolation import await_result, check_plain, first_error, is_cancelled_by_caller, retry_later
from .journal import Recorded, open_journal, reaction_id
from .live_activity import ActivityReporter, ActivitySender
from .policy import AgentPolicy
from .prompt import build_context
from .replies import Replies
from .run_context import Playback
from .running_reaction import (
    InboxMessages,
    ReactionResult,
    RunningReaction,
    expect_replies,
    is_answer_of_earlier_run,
    read_open_reaction,
    record_as_read,
)
from .takeovers import Takeovers, list_answer_threads

_logger = logging.getLogger(__name__)


class RunnerOptions(TypedDict, total=False):
    """What every runner takes, beside its id."""

    description: str
    tags: Sequence[str]
    channels: Sequence[str]
    react_to: ReactTo
    ignored_sender_ids: Sequence[str]
    policy: AgentPolicy | None
    visibility: Visibility
    url: str | None
    token: str | None
    on_event: OnEvent | None


class AgentRunner(ABC):
    """One agent. `run` it until it is stopped; subclasses say in `react` what a message that wakes it does.

    Messages of ``ignored_sender_ids`` (ids, or patterns such as ``build-*``) wake nobody: they are context alone.
    """

    def __init__(
        self,
        agent_id: str,
        *,
        description: str = "",
        tags: Sequence[str] = (),
        channels: Sequence[str] = (),
        react_to: ReactTo = "mentions",
        ignored_sender_ids: Sequence[str] = (),
        policy: AgentPolicy | None = None,
        visibility: Visibility = "people",
        url: str | None = None,
        token: str | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        for name, value in (("tags", tags), ("channels", channels), ("ignored_sender_ids", ignored_sender_ids)):
            check_list(agent_id, name, value)
        for name, chosen, choices in (("react_to", react_to, ReactTo), ("visibility", visibility, Visibility)):
            if chosen not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise ValueError(f"Agent {agent_id}: {name} is {chosen!r} and must be one of {allowed}.")
        check_plain(f"Agent {agent_id}: on_event", on_event)
        self.agent_id = plain_text(agent_id)
        self.description = description
        self.tags = tuple(tags)
        self.channels = tuple(channels)
        self._kept_out: set[str] = set()
        self.react_to: ReactTo = react_to
        self.ignored_sender_ids = tuple(ignored_sender_ids)
        self.policy = policy or AgentPolicy()
        self.visibility: Visibility = visibility
        self._url = url
        self._token = token
        self.playback: Playback | None = None
        """Answers in place of models, tools and reviewers while a recorded run is replayed; set before `run`."""
        self._client: NetworkClient | None = None
        self._inbox = Inbox(agent_id)
        self._replies: Replies | None = None  # while it runs
        self._taken_over: Takeovers | None = None  # likewise
        self._deliveries: dict[int, Delivery] = {}  # of messages that wait in the inbox, by seq
        self._resumed: dict[int, tuple[str, Recorded, list[int]]] = {}  # likewise, of reactions begun earlier
        self._under_way: dict[int, RunningReaction] = {}  # by the trigger's seq
        self._stopped_early: dict[str, str] = {}  # who stopped a reaction, by its id, before this runner came to it
        self._head = 0  # of the ledger when it began: what was asked after that, it asked itself
        self._display = ActivitySender(agent_id, on_event)
        self._carried: Delivery | None = None  # the first of a new ledger, taken in where that is served
        self._readiness = _Readiness()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    @abstractmethod
    async def react(
        self, message_threads: dict[str, MessageThread], incoming_thread_id: str, incoming_message: BaseMessage
    ) -> ReactionResult:
        """React to a message, given the conversation that the agent may see for it."""

    @property
    def client(self) -> NetworkClient:
        """The connection, while the agent runs."""
        if self._client is None:
            raise RuntimeError(f"agent {self.agent_id} is not running: await run() first")
        return self._client

    @property
    def is_at_work(self) -> bool:
        """Whether a reaction runs that does not only wait for others."""
        return self._inbox.at_work > 0

    def describe_card(self) -> dict[str, object]:
        """Give the card by which others find the agent."""
        return {"description": self.description, "tags": list(self.tags), "visibility": self.visibility}

    async def prepare(self) -> None:  # noqa: B027  # most need nothing
        """Find out what the agent's card says, where that is not known before it runs."""

    async def setup(self) -> None:  # noqa: B027  # most need nothing
        """Get ready, once the agent is connected (`client`) and before it takes anything in. What it raises ends `run`.
        May be a plain function."""

    async def teardown(self) -> None:  # noqa: B027
        """Let go of what `setup` made; at the end of each `run` that came to it, while the agent is still connected
        unless the connection is lost. May be a plain function."""

    async def run(self, client: NetworkClient | None = None) -> None:
        """Connect as the agent's reactor and react until cancelled or stopped. A client that is given is used as it is
        and left open.

        Raises `ConfigError` for a client that is not this agent's reactor: without a fence two runners would both
        answer. Raises `Superseded` when another runner of the same agent took over, `ConnectError` when the hub is gone
        for good. A `stop` that came before makes it end at once.
        """
        if not self._ended.is_set():
            raise RuntimeError(f"agent {self.agent_id} runs already")
        # Each run may have an event loop of its own, and these belong to the loop in which they are waited for.
        asked, self._stopping, self._ended = self._stopping.is_set(), asyncio.Event(), asyncio.Event()
        if asked:
            self._stopping.set()
        failure: BaseException | None = None
        try:
            if client is not None:
                self._check(client)
                await self._serve(client)
                return
            await self.prepare()
            connection = NetworkClient(
                self.agent_id, self._url, kind="agent", token=self._token, role="reactor", card=self.describe_card()
            )
            async with connection:
                await self._serve(connection)
        except BaseException as error:
            failure = error
            raise
        finally:
            try:
                await self.close()
            finally:
                early = RuntimeError(f"agent {self.agent_id} ended before it was ready")
                self._readiness.end(failure if isinstance(failure, Exception) else early)
                self._stopping.clear()
                self._ended.set()

    async def ready(self) -> None:
        """Wait until `run` has connected the agent and joined its channels: whoever writes to it now wakes it.

        Raises what ended `run` before that.
        """
        await self._readiness.wait()

    async def stop(self) -> None:
        """End `run` and wait for that. Reactions under way are broken off and stay open: the next runner goes on with
        them."""
        self._stopping.set()
        await self._ended.wait()

    async def close(self) -> None:
        """Let go of what the agent holds; called at the end of every `run`."""
        self._client = None
        self._display.close()

    def check_network(self, client: NetworkClient) -> None:  # noqa: B027  # there is nothing that every runner needs
        """Raise `ConfigError` if the network has not what the agent needs: before it takes anything in."""

    async def join_channels(self, client: NetworkClient) -> None:
        """Be in the agent's channels. One that keeps it out, by its owner's or the page's will, is told once in the
        log."""
        for name in self.channels:
            try:
                await retry_later(partial(client.join_channel, name))
            except (Forbidden, InvalidArguments) as error:
                if name not in self._kept_out:
                    told = {"agent_id": self.agent_id, "channel": name, "reason": str(error)}
                    _logger.warning(
                        "kept out of a channel; the agent works without it until it starts again", extra=told
                    )
                self._kept_out.add(name)

    # --- serving

    def _check(self, client: NetworkClient) -> None:
        if client.agent_id != self.agent_id or client.welcome.role != "reactor":
            raise ConfigError(
                f"The client of {client.agent_id} ({client.welcome.role}) cannot run agent {self.agent_id}: "
                f'join as "{self.agent_id}" with role="reactor".'
            )

    async def _serve(self, client: NetworkClient) -> None:
        self._client, self._carried = client, None
        try:
            await await_result(self.setup())
            await self._serve_epochs(client)
        finally:
            await await_result(self.teardown())

    async def _serve_epochs(self, client: NetworkClient) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    await self._serve_epoch(client, group)
                return
            except BaseExceptionGroup as failures:
                errors = failures.split(_StopRunner)[1]
                if errors is None:
                    return
                error = first_error(errors)
                if isinstance(error, Superseded):
                    told = f"Another runner of agent {self.agent_id} has taken over; this one has stopped. ({error})"
                    raise Superseded(told) from failures
                if not isinstance(error, _NewEpoch):
                    raise error from failures
                _logger.warning("the ledger was replaced; starting over", extra={"agent_id": self.agent_id})

    async def _serve_epoch(self, client: NetworkClient, group: asyncio.TaskGroup) -> None:
        """Serve as long as the ledger is the same one. In another one the seqs and reactions known here mean
        nothing."""
        epoch, self._head = client.welcome.network.epoch, client.welcome.head
        self._inbox = Inbox(
            self.agent_id,
            react_to=self.react_to,
            ignored_sender_ids=self.ignored_sender_ids,
            max_parallel=self.policy.max_parallel_reactions,
        )
        replies = self._replies = Replies(
            client, pause=partial(self._pause, group), resume=self._inbox.resume, clock=client.clock
        )
        self._deliveries, self._resumed, self._under_way, self._stopped_early = {}, {}, {}, {}
        taken_over = self._taken_over = Takeovers(client, self._inbox, self._acknowledge)
        self.check_network(client)
        group.create_task(self._end_when_asked())
        group.create_task(self._display.send(client))
        await self.join_channels(client)
        await self._take_open_reactions(client, replies, taken_over)
        # Before any reaction begins: one may have been stopped meanwhile.
        group.create_task(self._watch(client, epoch, group))
        self._start_reactions(group)
        self._readiness.reach()
        if self._carried is not None:
            delivery, self._carried = self._carried, None
            await self._take(delivery)
            self._start_reactions(group)
        async for delivery in client.deliveries():
            if delivery.is_stale:
                continue  # it waited in the client while the ledger was replaced: its seq means another message now
            if client.welcome.network.epoch != epoch:
                self._carried = delivery
                raise _NewEpoch
            await self._take(delivery)
            self._start_reactions(group)
        self._stopping.set()  # the client was closed

    async def _end_when_asked(self) -> None:
        await self._stopping.wait()
        raise _StopRunner

    def _pause(self, group: asyncio.TaskGroup, reaction: str) -> None:
        at_it = (it.message.thread_id for it in self._under_way.values() if it.id == reaction)
        self._inbox.pause(reaction, next(at_it, ""))
        self._start_reactions(group)

    async def _take(self, delivery: Delivery) -> None:
        message = delivery.message
        answered = find_request(message)
        if answered is not None and await self._take_reply(message):
            await delivery.ack()  # it can be read again in its thread
            return
        if answered is not None and read_decision(message) is not None:
            await answer_late_decision(self.client, message)
        match self._inbox.offer(message):
            case Arrival.QUEUED:
                self._deliveries[message.seq] = delivery
                if self._taken_over is not None and self._inbox.passed_over:
                    await self._taken_over.pass_over()
            case Arrival.CONTEXT | Arrival.HANDLED:
                await delivery.ack()
            case Arrival.PENDING:
                if self._is_resumed(message.seq):  # else its reaction acks it
                    # Handled since its `started`, which a hub that crashed knows and may not have counted.
                    await delivery.ack()

    async def _take_reply(self, message: BaseMessage) -> bool:
        """Take a message that a call waits for, or waited for in an earlier run."""
        if self._replies is not None and self._replies.take(message):
            return True
        return await is_answer_of_earlier_run(self.client, message, self._head)

    def _is_resumed(self, seq: int) -> bool:
        begun = self._under_way.get(seq)
        return seq in self._resumed or (begun is not None and begun.delivery is None)

    async def _take_open_reactions(self, client: NetworkClient, replies: Replies, taken_over: Takeovers) -> None:
        """Queue what was begun and not finished, before anything new."""
        begun = {it.reaction for it in client.welcome.open_reactions}
        for opened in sorted(client.welcome.open_reactions, key=lambda it: it.seq):
            found = await read_open_reaction(client, opened)
            if found is None or found[1].finished is not None:  # which came of an earlier one in this loop
                continue
            message, recorded = found
            if opened.overtaken:
                if await taken_over.note_open(message, opened.reaction, begun, recorded.read_meanwhile()):
                    self._inbox.admit(message)
                continue
            questions = await expect_replies(recorded, replies)
            for seq in recorded.read_meanwhile():
                try:
                    await self._settle(client, seq, message.thread_id, opened.reaction)
                except (BudgetExhausted, ThreadHeld) as error:  # the agent is to start; the reaction says so at its end
                    self._inbox.note_handled(seq)
                    _logger.warning(
                        "a message that was read is not recorded as read", extra={"seq": seq, "code": error.code}
                    )
            self._resumed[message.seq] = (opened.reaction, recorded, questions)
            self._inbox.admit(message)

    def _start_reactions(self, group: asyncio.TaskGroup) -> None:
        while (message := self._inbox.next_message()) is not None:
            group.create_task(self._handle(message, group))

    async def _handle(self, message: BaseMessage, group: asyncio.TaskGroup) -> None:
        """One message's reaction, whatever becomes of it, and then what waits behind it."""
        begun = self._begin(message)
        try:
            is_handled = await self._attempt(begun)
        finally:
            del self._under_way[message.seq]
            if self._replies is not None and begun.questions:
                self._replies.forget(begun.questions)
        if begun.taken:  # it ended in the middle of taking them in
            self._inbox.put_back(begun.taken.values())
        if is_handled is None:
            if begun.delivery is not None:
                self._deliveries[message.seq] = begun.delivery
            assert self._taken_over is not None, "only a hub refuses for it"
            await self._taken_over.set_aside(begun)
        elif is_handled:
            self._inbox.finish(message)
            if self._taken_over is not None and message.seq in self._taken_over.overtaken:
                await self._taken_over.end(message.seq)
        else:
            self._inbox.release(message)
        self._start_reactions(group)

    def _begin(self, message: BaseMessage) -> RunningReaction:
        reaction, recorded, questions = self._resumed.pop(message.seq, (None, None, ()))
        if self._taken_over is not None and message.seq in self._taken_over.overtaken:
            reaction = reaction or self._taken_over.next_reaction(message.seq)
        begun = self._make_under_way(message, reaction)
        begun.journal.is_started = recorded is not None
        if self._taken_over is not None and message.seq in self._taken_over.held_back:
            self._taken_over.follow_up(begun)
        begun.recorded, begun.questions = recorded, questions
        begun.delivery = self._deliveries.pop(message.seq, None)
        begun.stopped_by = self._stopped_early.pop(begun.id, None)
        self._under_way[message.seq] = begun
        return begun

    def _make_under_way(self, message: BaseMessage, reaction: str | None = None) -> RunningReaction:
        if not isinstance(message, AnyMessage):  # a hub sends no others
            raise TypeError(f"{type(message).__name__} is no message of a network")
        reaction = reaction or reaction_id(self.agent_id, message.seq, self.client.welcome.network.epoch)
        # What an agent asks for a person goes to that one, who is no reader of the question's thread: the prompt must
        # hold nothing but what the people of the conversation may read.
        is_seen = message.sender_kind == "human" or (self.visibility != "all" and is_watched(message))
        shown = ActivityReporter(self._display, reaction, message.thread_id, message.seq, is_watched=is_seen)
        begun = RunningReaction(reaction, self.client, message, open_journal(self.client, reaction), shown)
        begun.is_awaited = self.should_answer(message)
        if self.policy.on_new_message == "inject":
            begun.new_messages = InboxMessages(
                begun,
                self._inbox,
                visibility=self.visibility,
                should_answer=self.should_answer,
                settle=partial(self._settle, begun.client),
            )
        return begun

    async def _attempt(self, begun: RunningReaction) -> bool | None:
        """React to one message. False when it went back to the hub, to be delivered again; None when a person has
        taken its thread over."""
        message = begun.message
        place = {"agent_id": self.agent_id, "thread_id": message.thread_id, "seq": message.seq, "reaction": begun.id}
        _logger.debug("a reaction begins", extra=place)
        begun.shown.begin()
        try:
            if begun.recorded is not None and begun.recorded.started is not None:
                # It repeats how that began, which stores nothing, but tells the hub that this process goes on with it.
                await begun.journal.record_started(begun.recorded.started)
            threads, begun.omitted_threads = await build_context(self.client, message, self.policy, self.visibility)
            await self.react(threads, message.thread_id, message)
            if begun.delivery is not None:
                await begun.delivery.ack()  # handled, if `react` kept no journal; else nothing new
        except BaseException as error:
            if is_cancelled_by_caller(error) or self.client.failure is not None:
                raise  # the runner ends, or nothing can be recorded any more: the reaction stays open
            if isinstance(error, ThreadHeld):
                return None
            # The boundary of one reaction: a fault in it must not end the agent, and must not pass unseen.
            if isinstance(error, BudgetExhausted):
                _logger.warning("reaction stopped: %s", error, extra=place)
            else:
                _logger.exception("reaction failed", extra=place)
            begun.journal.reopen()
            is_told = self.policy.on_text != "record" and begun.is_awaited
            try:
                return await begun.give_up(error, is_told=is_told)
            except ThreadHeld:
                return None
        finally:
            _logger.debug("a reaction is over", extra=place)
            begun.shown.end(is_silent=begun.is_silent)
        return True

    # --- for `react` of subclasses

    def find_under_way(self, message: BaseMessage) -> RunningReaction:
        """Give the reaction to this message that the runner has begun, or a new one when `react` was called from
        elsewhere."""
        return self._under_way.get(message.seq) or self._make_under_way(message)

    def find_reaction(self, reaction: str) -> RunningReaction:
        """Give the one of this id that the runner is at. Raises `LookupError`."""
        for begun in self._under_way.values():
            if begun.id == reaction:
                return begun
        raise LookupError(f"agent {self.agent_id} is not at the reaction {reaction}")

    def should_answer(self, message: BaseMessage) -> bool:
        """Tell whether somebody waits for an answer of this agent: a person wrote the message, or it requires the
        agent's response."""
        return message.sender_kind == "human" or requires_response_from(message, self.agent_id)

    async def _settle(self, client: NetworkClient, seq: int, thread_id: str, reader: str) -> None:
        """A message was read in the reaction ``reader`` to another one, and gets none of its own."""
        await record_as_read(client, seq, thread_id, reader)
        self._inbox.note_handled(seq)
        delivery = self._deliveries.pop(seq, None)
        if delivery is not None:
            await delivery.ack()

    # --- beside the reactions

    async def _watch(self, client: NetworkClient, epoch: str, group: asyncio.TaskGroup) -> None:
        """Obey a person's stop, notice another ledger, hear what those are at that calls wait for. Only the hub sends
        signals of kind ``cancel``."""
        async for event in client.events():
            match event:
                case Signal(kind="cancel", body={"reaction": str(reaction)}):
                    self._cancel(reaction, event.sender_id)
                case Signal(kind="delta" | "tool") if self._replies is not None:
                    self._replies.relays.hear(event)
                case Notice(kind="dead_letter", body={"seq": int(seq)}) if self._replies is not None:
                    self._replies.look_after(seq)
                case Reconnected(welcome=welcome) if welcome.network.epoch != epoch:
                    raise _NewEpoch
                case Notice(kind="taken" | "given", thread_id=str(thread_id)):
                    await self._hear_hold(event.kind, thread_id, group)
                case Reconnected() if self._replies is not None:
                    group.create_task(self._replies.relays.watch_again())
                    await self._hear_hold("given", None, group)  # it may have been, while nothing was heard
                case _:
                    continue

    async def _hear_hold(self, kind: str, thread_id: str | None, group: asyncio.TaskGroup) -> None:
        """A person has taken a thread over, or it is given back (None: any may be)."""
        assert self._taken_over is not None, "it is made before anything is heard"
        if kind == "given" or thread_id is None:
            self._taken_over.give(thread_id)
            self._start_reactions(group)
            return
        for begun in self._under_way.values():
            if thread_id in list_answer_threads(begun.message):
                begun.is_overtaken = True
                if begun.work is not None:
                    begun.work.cancel()
        await self._taken_over.take(thread_id)

    async def _acknowledge(self, seq: int) -> None:
        """Acknowledge a message that waited and needs no reaction."""
        delivery = self._deliveries.pop(seq, None)
        if delivery is not None:
            await delivery.ack()

    def _cancel(self, reaction: str, sender_id: str) -> None:
        # After a restart the hub repeats what was asked before, in the agent's own name.
        by = sender_id if sender_id != self.agent_id else "a person"
        for begun in self._under_way.values():
            if begun.id == reaction:
                begun.stopped_by = by
                if begun.work is not None:
                    begun.work.cancel()  # nothing happens to one that has ended already
                return
        if any(reaction == waiting for waiting, *_ in self._resumed.values()):
            self._stopped_early[reaction] = by


class _Readiness:
    """Whether the agent is ready, in the run that is under way or comes next: connected, in its channels, woken by
    whoever writes to it."""

    def __init__(self) -> None:
        self._reached: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait for it. Raises what ended the run before."""
        await asyncio.shield(self._open())

    def reach(self) -> None:
        """The agent is ready. Idempotent."""
        if not self._open().done():
            self._open().set_result(None)

    def end(self, failure: Exception) -> None:
        """The run has ended: whoever still waits waits in vain."""
        reached, self._reached = self._reached, None
        if reached is not None and not reached.done() and not reached.get_loop().is_closed():
            reached.set_exception(failure)
            reached.exception()  # retrieved: perhaps nobody waits

    def _open(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self._reached is None or self._reached.get_loop() is not loop:
            self._reached = loop.create_future()
        return self._reached


class _StopRunner(Exception):
    """Ends the runner's tasks; never leaves it."""


class _NewEpoch(Exception):
    """Ends the tasks too: the hub came back with another ledger. Never leaves the runner."""
