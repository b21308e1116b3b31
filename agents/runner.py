"""Keeps one agent running on the network: connects and prepares the agent, and passes deliveries to its scheduler.

`reaction_scheduler` starts the reactions. A subclass implements `react`. The subclass in `simple` asks a model. A
runner makes no decisions about the conversation, and all of its state may be lost. If a runner ends, by `stop` or by
`kill -9`, open reactions stay open in the ledger, and the next runner resumes them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TypedDict, get_args

from roundelay.network.client import Delivery, NetworkClient
from roundelay.network.errors import ConfigError, Forbidden, InvalidArguments, Superseded
from roundelay.network.frames import plain_text
from roundelay.network.messages import BaseMessage, MessageThread

from .agent import check_list
from .events import OnEvent
from .inbox import ReactTo, Visibility, requires_response_from
from .isolation import await_result, check_plain, first_error, retry_later
from .live_activity import ActivitySender
from .policy import AgentPolicy, PromptForm
from .reaction_scheduler import LedgerReplaced, ReactionScheduler
from .run_context import Playback
from .running_reaction import ReactionResult, RunningReaction

_logger = logging.getLogger(__name__)


class RunnerOptions(TypedDict, total=False):
    """Options of every runner, in addition to its id."""

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
    """Base class of agents. `run` serves the agent until it is stopped. Subclasses implement `react`, which handles
    each message that wakes the agent.

    Messages of ``ignored_sender_ids`` (ids, or patterns such as ``build-*``) never wake the agent. Messages of ignored
    senders are only context for reactions to other messages.
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
        self.react_to: ReactTo = react_to
        self.ignored_sender_ids = tuple(ignored_sender_ids)
        self.policy = policy or AgentPolicy()
        self.visibility: Visibility = visibility
        self.playback: Playback | None = None
        """Recorded outcomes that replace models, tools and reviewers in a replay. Set this attribute before `run`."""

        self._url = url
        self._token = token
        self._refused_channels: set[str] = set()
        self._client: NetworkClient | None = None  # set while it runs
        self._scheduler: ReactionScheduler | None = None  # scheduler for the current or the last ledger
        self._activity = ActivitySender(agent_id, on_event)
        # first delivery of a new ledger, handled when that ledger is served
        self._first_delivery: Delivery | None = None
        self._readiness = _Readiness()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    @abstractmethod
    async def react(
        self, message_threads: dict[str, MessageThread], incoming_thread_id: str, incoming_message: BaseMessage
    ) -> ReactionResult:
        """React to a message. ``message_threads`` is the conversation that the agent may see for this message."""

    @property
    def client(self) -> NetworkClient:
        """The connection, while the agent runs."""
        if self._client is None:
            raise RuntimeError(f"agent {self.agent_id} is not running: await run() first")
        return self._client

    @property
    def is_at_work(self) -> bool:
        """Whether a reaction is running that does not only wait for other participants."""
        return self._scheduler is not None and self._scheduler.inbox.at_work > 0

    def can_open_threads(self) -> bool:
        """Return whether a tool of the agent opens the threads that a lean prompt lists."""
        return False

    def find_form(self, running: RunningReaction) -> PromptForm:
        """Return the form of a reaction's prompt. The default is the full form, which contains every thread."""
        return "full"

    def describe_card(self) -> dict[str, object]:
        """Return the agent's card, which describes the agent to other participants."""
        return {"description": self.description, "tags": list(self.tags), "visibility": self.visibility}

    async def prepare(self) -> None:  # noqa: B027  # most subclasses need nothing
        """Load data for the agent's card that is not known before `run`. The default does nothing."""

    async def setup(self) -> None:  # noqa: B027  # most subclasses need nothing
        """Prepare the agent after it has connected (`client`) and before it handles messages. An error ends `run`. An
        override may be a plain function instead of a coroutine.
        """

    async def teardown(self) -> None:  # noqa: B027
        """Release the resources of `setup`. This method is called at the end of each `run` that called `setup`. The
        agent is still connected then, unless the connection was lost. An override may be a plain function.
        """

    async def run(self, client: NetworkClient | None = None) -> None:
        """Connect as the agent's reactor, and react until cancelled or stopped. A client passed as an argument is used
        unchanged and stays open.

        Raises `ConfigError` for a client that is not this agent's reactor: without a fencing token, two runners would
        both answer. Raises `Superseded` if another runner of the same agent took over, and `ConnectError` if the hub
        stays unreachable. After an earlier `stop`, this method returns at once.
        """
        if not self._ended.is_set():
            raise RuntimeError(f"agent {self.agent_id} is already running")
        # Events belong to the event loop that awaits them, and each run may have another loop.
        is_stopped, self._stopping, self._ended = self._stopping.is_set(), asyncio.Event(), asyncio.Event()
        if is_stopped:
            self._stopping.set()
        failure: BaseException | None = None
        try:
            if client is not None:
                self._check_client(client)
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
                not_ready = RuntimeError(f"agent {self.agent_id} ended before it was ready")
                self._readiness.end(failure if isinstance(failure, Exception) else not_ready)
                self._stopping.clear()
                self._ended.set()

    async def ready(self) -> None:
        """Wait until `run` has connected the agent and joined its channels. As soon as the agent is ready, messages
        wake it.

        Raises the error that ended `run` before the agent was ready.
        """
        await self._readiness.wait()

    async def stop(self) -> None:
        """End `run` and wait until it has returned. Running reactions are interrupted and stay open. The next runner
        resumes these reactions.
        """
        self._stopping.set()
        await self._ended.wait()

    async def close(self) -> None:
        """Release the agent's resources. Called at the end of every `run`."""
        self._client = None
        self._activity.close()

    def check_network(self, client: NetworkClient) -> None:  # noqa: B027  # no check applies to every runner
        """Raise `ConfigError` if the network lacks something that the agent needs. The runner calls this method before
        it handles any message.
        """

    async def join_channels(self, client: NetworkClient) -> None:
        """Join the agent's channels. If the hub refuses a channel, log the refusal once and continue without it."""
        for name in self.channels:
            try:
                await retry_later(partial(client.join_channel, name))
            except (Forbidden, InvalidArguments) as error:
                if name not in self._refused_channels:
                    place = {"agent_id": self.agent_id, "channel": name, "reason": str(error)}
                    _logger.warning(
                        "channel refused; the agent works without the channel until its next start", extra=place
                    )
                self._refused_channels.add(name)

    # --- serving

    def _check_client(self, client: NetworkClient) -> None:
        if client.agent_id != self.agent_id or client.welcome.role != "reactor":
            raise ConfigError(
                f"The client of {client.agent_id} ({client.welcome.role}) cannot run agent {self.agent_id}: "
                f'join as "{self.agent_id}" with role="reactor".'
            )

    async def _serve(self, client: NetworkClient) -> None:
        self._client, self._first_delivery = client, None
        try:
            await await_result(self.setup())
            await self._serve_ledgers(client)
        finally:
            await await_result(self.teardown())

    async def _serve_ledgers(self, client: NetworkClient) -> None:
        """Serve one ledger after another until the runner is stopped."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    await self._serve_ledger(client, group)
                return
            except BaseExceptionGroup as failures:
                # A stop may coincide with a failure. Raise the failure, because it explains why the agent ended.
                errors = failures.split(_RunnerStopped)[1]
                if errors is None:
                    return
                error = first_error(errors)
                if isinstance(error, Superseded):
                    text = f"Another runner of agent {self.agent_id} has taken over; this one has stopped. ({error})"
                    raise Superseded(text) from failures
                if not isinstance(error, LedgerReplaced):
                    raise error from failures
                _logger.warning("the ledger was replaced; starting over", extra={"agent_id": self.agent_id})

    async def _serve_ledger(self, client: NetworkClient, group: asyncio.TaskGroup) -> None:
        """Serve until the ledger is replaced. Reactions and replies from before a restart must be registered before the
        first message is handled, so the order of the steps matters.
        """
        epoch = client.welcome.network.epoch
        scheduler = self._scheduler = ReactionScheduler(self, client, self._activity, group)
        self.check_network(client)
        # Start the task that watches for a stop before any step that may wait, so that a stop also ends an agent that
        # hangs while joining channels.
        group.create_task(self._end_when_stopped())
        group.create_task(self._activity.send(client))
        await self.join_channels(client)
        await scheduler.resume_open_reactions()
        # Watch events before the first reaction starts, because a person may stop a reaction in the meantime.
        group.create_task(scheduler.watch_events())
        scheduler.start_reactions()
        self._readiness.reach()
        if self._first_delivery is not None:
            delivery, self._first_delivery = self._first_delivery, None
            await scheduler.handle_delivery(delivery)
        async for delivery in client.deliveries():
            if delivery.is_stale:
                # The client queued this delivery before the ledger was replaced. The seq of the delivery now belongs to
                # another message.
                continue
            if client.welcome.network.epoch != epoch:
                # This delivery already belongs to the new ledger. Keep the delivery, because the hub does not send it
                # again in this session.
                self._first_delivery = delivery
                raise LedgerReplaced
            await scheduler.handle_delivery(delivery)
        self._stopping.set()  # the client was closed

    async def _end_when_stopped(self) -> None:
        await self._stopping.wait()
        raise _RunnerStopped

    # --- for `react` of subclasses

    def find_under_way(self, message: BaseMessage) -> RunningReaction:
        """Return the running reaction to this message. Create a reaction if the scheduler did not call `react`."""
        if self._client is None or self._scheduler is None:
            raise RuntimeError(f"agent {self.agent_id} is not running: await run() first")
        return self._scheduler.get_running(message)

    def find_reaction(self, reaction: str) -> RunningReaction:
        """Return the running reaction with this id. Raises `LookupError`."""
        running = self._scheduler.find_running(reaction) if self._scheduler is not None else None
        if running is None:
            raise LookupError(f"agent {self.agent_id} has no running reaction {reaction}")
        return running

    def should_answer(self, message: BaseMessage) -> bool:
        """Return whether somebody waits for this agent's answer: a person wrote the message, or it requires the
        agent's response.
        """
        return message.sender_kind == "human" or requires_response_from(message, self.agent_id)


class _Readiness:
    """Whether the agent is ready in the current or next run: connected, in its channels, and woken by messages."""

    def __init__(self) -> None:
        self._reached: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until the agent is ready. If the run ends before that, raise the error that ended it."""
        # Shield the future: the cancellation of one caller must not cancel the future for other callers.
        await asyncio.shield(self._get_future())

    def reach(self) -> None:
        """Mark the agent as ready. Idempotent."""
        if not self._get_future().done():
            self._get_future().set_result(None)

    def end(self, failure: Exception) -> None:
        """End the run. Tasks that still wait receive ``failure``."""
        reached, self._reached = self._reached, None
        if reached is not None and not reached.done() and not reached.get_loop().is_closed():
            reached.set_exception(failure)
            reached.exception()  # mark the error as retrieved, because asyncio reports it if no task waits

    def _get_future(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self._reached is None or self._reached.get_loop() is not loop:
            self._reached = loop.create_future()
        return self._reached


class _RunnerStopped(Exception):
    """The runner was stopped. Ends the runner's tasks. The runner catches this error itself."""
