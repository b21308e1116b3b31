"""Keeps one agent alive on the network: takes deliveries in, starts reactions, resumes those begun earlier, stops those
that a person stops.

Stands between `roundelay.network.client` and `react`, which a subclass gives (`simple` for one that asks a model). It
decides nothing about the conversation and holds nothing that must survive: what was begun stands in the ledger, and a
runner that ends without having finished a reaction, by `stop` or by `kill -9`, leaves it open for the next one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from roundelay.network.client import AnyMessage, Delivery, NetworkClient, Reconnected, Signal
from roundelay.network.errors import BudgetExhausted, ConfigError, Superseded
from roundelay.network.messages import BaseMessage, MessageThread

from .arrivals import ThreadArrivals, record_as_read
from .channels import join_channel
from .context import build_context
from .earlier import is_answer_of_earlier_run
from .events import Event, OnEvent
from .foreign import first_error, is_told_to_end
from .ids import reaction_id
from .inbox import Arrival, Inbox, ReactTo, Visibility, is_question, requires_response_from
from .journal import Journal
from .ongoing import Ongoing, ReactionResult, give_up
from .policy import AgentPolicy
from .readiness import Readiness
from .records import Recorded
from .reopen import expect_replies, read_open_reaction
from .replies import Replies, is_watched
from .retry import retry_later
from .signals import Display

_logger = logging.getLogger(__name__)


class AgentRunner(ABC):
    """One agent. `run` it until it is stopped; subclasses say in `react` what a message that wakes it does."""

    def __init__(
        self,
        agent_id: str,
        *,
        description: str = "",
        tags: Sequence[str] = (),
        channels: Sequence[str] = (),
        react_to: ReactTo = "mentions",
        policy: AgentPolicy | None = None,
        visibility: Visibility = "people",
        url: str | None = None,
        token: str | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.agent_id = agent_id
        self.description = description
        self.tags = tuple(tags)
        self.channels = tuple(channels)
        self.react_to: ReactTo = react_to
        self.policy = policy or AgentPolicy()
        self.visibility: Visibility = visibility
        self._url = url
        self._token = token
        self._client: NetworkClient | None = None
        self._inbox = Inbox(agent_id)
        self._replies: Replies | None = None  # while it runs
        self._deliveries: dict[int, Delivery] = {}  # of messages that wait in the inbox, by seq
        self._resumed: dict[int, tuple[str, Recorded, list[int]]] = {}  # likewise, of reactions begun earlier
        self._ongoing: dict[int, Ongoing] = {}  # by the trigger's seq
        self._stopped_early: dict[str, str] = {}  # who stopped a reaction, by its id, before this runner came to it
        self._head = 0  # of the ledger when it began: what was asked after that, it asked itself
        self._display = Display(agent_id, on_event)
        self._carried: Delivery | None = None  # the first of a new ledger, taken in where that is served
        self._readiness = Readiness()
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

    async def run(self, client: NetworkClient | None = None) -> None:
        """Connect as the agent's reactor and react until cancelled or stopped. A client that is given is used as it is
        and left open.

        Raises `ConfigError` for a client that is not this agent's reactor: without a fence two runners would both
        answer. Raises `Superseded` when another runner of the same agent took over, `ConnectError` when the hub is gone
        for good. A `stop` that came before makes it end at once.
        """
        if not self._ended.is_set():
            raise RuntimeError(f"agent {self.agent_id} runs already")
        self._ended.clear()
        failure: BaseException | None = None
        try:
            if client is not None:
                self._check(client)
                await self._serve(client)
                return
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

    # --- serving

    def _check(self, client: NetworkClient) -> None:
        if client.agent_id != self.agent_id or client.welcome.role != "reactor":
            raise ConfigError(
                f"The client of {client.agent_id} ({client.welcome.role}) cannot run agent {self.agent_id}: "
                f'join as "{self.agent_id}" with role="reactor".'
            )

    async def _serve(self, client: NetworkClient) -> None:
        self._client, self._carried = client, None
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    await self._serve_epoch(client, group)
                return
            except BaseExceptionGroup as failures:
                errors = failures.split(_Stop)[1]
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
        self._inbox = Inbox(self.agent_id, react_to=self.react_to, max_parallel=self.policy.max_parallel_reactions)
        replies = self._replies = Replies(
            client, pause=partial(self._pause, group), resume=self._inbox.resume, clock=client.clock
        )
        self._deliveries, self._resumed, self._ongoing, self._stopped_early = {}, {}, {}, {}
        group.create_task(self._end_when_asked())
        group.create_task(self._display.send(client))
        for name in self.channels:
            await retry_later(partial(join_channel, client, name))
        await self._take_open_reactions(client, replies)
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
        raise _Stop

    def _pause(self, group: asyncio.TaskGroup, reaction: str) -> None:
        at_it = (it.message.thread_id for it in self._ongoing.values() if it.journal.reaction == reaction)
        self._inbox.pause(reaction, next(at_it, ""))
        self._start_reactions(group)

    async def _take(self, delivery: Delivery) -> None:
        message = delivery.message
        if self._replies is not None and self._replies.take(message):
            await delivery.ack()  # it can be read again in its thread
            return
        if await is_answer_of_earlier_run(self.client, message, self._head, self._load):
            await delivery.ack()
            return
        match self._inbox.offer(message):
            case Arrival.QUEUED:
                self._deliveries[message.seq] = delivery
            case Arrival.CONTEXT | Arrival.HANDLED:
                await delivery.ack()
            case Arrival.PENDING:
                if self._is_resumed(message.seq):  # else its reaction acks it
                    # Handled since its `started`, which a hub that crashed knows and may not have counted.
                    await delivery.ack()

    async def _load(self, reaction: str) -> Recorded:
        return await self._make_journal(self.client, reaction).load()

    def _is_resumed(self, seq: int) -> bool:
        ongoing = self._ongoing.get(seq)
        return seq in self._resumed or (ongoing is not None and ongoing.delivery is None)

    async def _take_open_reactions(self, client: NetworkClient, replies: Replies) -> None:
        """Queue what was begun and not finished, before anything new."""
        for opened in sorted(client.welcome.open_reactions, key=lambda it: it.seq):
            found = await read_open_reaction(client, opened, self._make_journal(client, opened.reaction))
            if found is None or found[1].finished is not None:  # which came of an earlier one in this loop
                continue
            message, recorded = found
            questions = await expect_replies(recorded, replies)
            for seq in recorded.read_meanwhile():
                try:
                    await self._settle(client, seq, message.thread_id, opened.reaction)
                except BudgetExhausted as error:  # the agent is to start all the same; the reaction says so at its end
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
        ongoing = self._begin(message)
        try:
            is_handled = await self._attempt(ongoing)
        finally:
            del self._ongoing[message.seq]
            if self._replies is not None:
                self._replies.forget(ongoing.expected)
        self._inbox.put_back(ongoing.taken.values())  # it ended in the middle of taking them in
        if is_handled:
            self._inbox.finish(message)
        else:
            self._inbox.release(message)
        self._start_reactions(group)

    def _begin(self, message: BaseMessage) -> Ongoing:
        client = self.client
        reaction, recorded, questions = self._resumed.pop(message.seq, (None, None, ()))
        reaction = reaction or reaction_id(self.agent_id, message.seq, client.welcome.network.epoch)
        journal = self._make_journal(client, reaction)
        journal.is_started = recorded is not None
        ongoing = Ongoing(client, _narrow(message), journal, recorded, self._deliveries.pop(message.seq, None))
        ongoing.expected = questions
        ongoing.is_asked = is_question(message, self.agent_id)
        ongoing.stopped_by = self._stopped_early.pop(reaction, None)
        self._ongoing[message.seq] = ongoing
        return ongoing

    def _make_journal(self, client: NetworkClient, reaction: str) -> Journal:
        limits = client.welcome.limits
        limit = min(limits["max_record_bytes"], limits["max_frame_bytes"])  # a record travels in a frame
        return Journal(client, reaction, max_body_bytes=limit)

    async def _attempt(self, ongoing: Ongoing) -> bool:
        """React to one message. False when it went back to the hub, to be delivered again."""
        message = ongoing.message
        self._display.begin(ongoing.journal.reaction, message.thread_id, message.seq)
        try:
            threads = await build_context(self.client, message, self.policy, self.visibility)
            await self.react(threads, message.thread_id, message)
            if ongoing.delivery is not None:
                await ongoing.delivery.ack()  # handled, if `react` kept no journal; else nothing new
        except BaseException as error:
            if is_told_to_end(error) or self.client.failure is not None:
                raise  # the runner ends, or nothing can be recorded any more: the reaction stays open
            # The boundary of one reaction: a fault in it must not end the agent, and must not pass unseen.
            place = {"agent_id": self.agent_id, "thread_id": message.thread_id, "seq": message.seq}
            if isinstance(error, BudgetExhausted):
                _logger.warning("reaction stopped: %s", error, extra=place)
            else:
                _logger.exception("reaction failed", extra=place)
            ongoing.journal.reopen()
            is_told = self.policy.on_text != "record" and self.should_answer(message)
            return await give_up(ongoing, error, is_told=is_told, tell=partial(self.observe, ongoing))
        finally:
            self._display.end(ongoing.journal.reaction, message.thread_id)
        return True

    # --- messages that arrive while their thread is in a reaction

    def find_arrivals(self, ongoing: Ongoing) -> ThreadArrivals | None:
        """Give what arrives behind a reaction, if the model is to read it there."""
        if self.policy.on_new_message == "queue":
            return None
        settle = partial(self._settle, ongoing.client)
        return ThreadArrivals(ongoing, self._inbox, should_answer=self.should_answer, settle=settle)

    async def _settle(self, client: NetworkClient, seq: int, thread_id: str, reader: str) -> None:
        await record_as_read(client, self._make_journal, seq, thread_id, reader)
        self._inbox.note_handled(seq)
        delivery = self._deliveries.pop(seq, None)
        if delivery is not None:
            await delivery.ack()

    # --- for `react` of subclasses

    def find_ongoing(self, message: BaseMessage) -> Ongoing:
        """Give the reaction to this message that the runner has begun, or a new one when `react` was called from
        elsewhere."""
        if message.seq in self._ongoing:
            return self._ongoing[message.seq]
        reaction = reaction_id(self.agent_id, message.seq, self.client.welcome.network.epoch)
        return Ongoing(self.client, _narrow(message), self._make_journal(self.client, reaction))

    def should_answer(self, message: BaseMessage) -> bool:
        """Tell whether somebody waits for an answer of this agent: a person wrote the message, or it requires the
        agent's response."""
        return message.sender_kind == "human" or requires_response_from(message, self.agent_id)

    def observe(self, ongoing: Ongoing, event: Event) -> None:
        """Pass an event on to whoever listens, and watches."""
        shows_text = ongoing.reaction is None or ongoing.reaction.sends_text
        message = ongoing.message
        # What an agent asks for a person goes to that one, who is no reader of the question's thread: the prompt must
        # hold nothing but what the people of the conversation may read.
        is_seen = is_watched(message) and (message.sender_kind == "human" or self.visibility == "people")
        self._display.tell(event, message.thread_id, is_watched=is_seen, shows_text=shows_text)

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
                case Reconnected(welcome=welcome) if welcome.network.epoch != epoch:
                    raise _NewEpoch
                case Reconnected() if self._replies is not None:
                    group.create_task(self._replies.relays.watch_again())
                case _:
                    continue

    def _cancel(self, reaction: str, sender_id: str) -> None:
        # After a restart the hub repeats what was asked before, in the agent's own name.
        by = sender_id if sender_id != self.agent_id else "a person"
        for ongoing in self._ongoing.values():
            if ongoing.journal.reaction == reaction:
                ongoing.stopped_by = by
                if ongoing.work is not None:
                    ongoing.work.cancel()  # nothing happens to one that has ended already
                return
        if any(reaction == waiting for waiting, *_ in self._resumed.values()):
            self._stopped_early[reaction] = by


class _Stop(Exception):
    """Ends the runner's tasks; never leaves it."""


class _NewEpoch(Exception):
    """Ends the tasks too: the hub came back with another ledger. Never leaves the runner."""


def _narrow(message: BaseMessage) -> AnyMessage:
    """Give the message as one of the four kinds; a hub sends no others."""
    if not isinstance(message, AnyMessage):
        raise TypeError(f"{type(message).__name__} is no message of a network")
    return message
