"""`Registrations`: base of webhooks and push notifications. Each registration has at most one running task, which posts to
the registered URL.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from roundelay.network.backoff import Backoff
from roundelay.network.clock import system_clock
from roundelay.network.errors import ConnectError, RetryLater, RoundelayError

from .json_store import NotStored
from .webhooks.posts import Posted

_logger = logging.getLogger(__name__)

NODE_RETRY_S = 5.0
DELIVERY_BACKOFF = Backoff(5.0, 3600.0, factor=6.0)


class Registered(Protocol):
    """Fields of a registration that this module uses."""

    why: str
    failing_since: int | None

    @property
    def state(self) -> str: ...


KeyT = TypeVar("KeyT", bound=Hashable)
EntryT = TypeVar("EntryT", bound=Registered)


@dataclass(frozen=True)
class WebhookPace:
    """Delays between attempts to reach a receiver."""

    backoff: Backoff = DELIVERY_BACKOFF
    give_up_s: float = 3 * 86_400.0
    """Time after which a registration is paused if its receiver has accepted nothing, in seconds."""

    def find_delay_s(self, failures: int, wanted_s: float) -> float:
        """Return the delay after ``failures`` consecutive failures, in seconds. A receiver may request a longer delay
        (``wanted_s``), up to the maximum of the backoff.
        """
        return max(self.backoff.delay_s(failures), min(wanted_s, self.backoff.max_s))


class Registrations(ABC, Generic[KeyT, EntryT]):
    """The registrations of one gateway, by key. ``noun`` names a registration in the log of the process."""

    noun: str

    def __init__(self, pace: WebhookPace | None) -> None:
        self._pace = pace or WebhookPace()
        self._entries: dict[KeyT, EntryT] = {}
        self._tasks: dict[KeyT, asyncio.Task[None]] = {}

    @abstractmethod
    def _get_key(self, entry: EntryT) -> KeyT: ...

    @abstractmethod
    def _describe(self, entry: EntryT) -> dict[str, str]:
        """Return the fields that identify a registration in the log of the process."""

    @abstractmethod
    async def _serve(self, entry: EntryT) -> None:
        """Post until the registration ends. Raises `RoundelayError`."""

    @abstractmethod
    def _save(self) -> None:
        """Write all registrations to the file. Raises `NotStored`."""

    def _load(self, entries: Iterable[EntryT]) -> None:
        self._entries = {self._get_key(entry): entry for entry in entries}
        for entry in self._entries.values():
            if entry.state == "on":
                self._start(entry)

    # --- tasks

    def _start(self, entry: EntryT) -> None:
        """Cancel the current task of this registration's key, and serve the registration after that task has ended.
        This method does not await, so concurrent callers cannot start two tasks.
        """
        key = self._get_key(entry)
        previous = self._tasks.get(key)
        if previous is not None:
            previous.cancel()
        self._tasks[key] = asyncio.create_task(self._run_after(key, previous, entry), name=f"{self.noun}-{key}")

    async def _cancel(self, key: KeyT) -> None:
        """Cancel the task of this key, and wait until the task has ended."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _stop(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_after(self, key: KeyT, previous: asyncio.Task[None] | None, entry: EntryT) -> None:
        try:
            if previous is not None:
                # Wait until the old task has ended. If both tasks of a key ran at once, both would send the same posts.
                await asyncio.wait([previous])
            await self._serve_forever(entry)
        finally:
            if self._tasks.get(key) is asyncio.current_task():
                del self._tasks[key]

    async def _serve_forever(self, entry: EntryT) -> None:
        """Serve one registration until it ends or is paused. Failures of the node are retried."""
        while True:
            try:
                return await self._serve(entry)
            except (ConnectError, RetryLater) as error:  # the node failed, not the receiver
                _logger.warning("a %s waits for the node: %s", self.noun, error, extra=self._describe(entry))
            except RoundelayError as error:
                return self._update(entry, state="paused", why=str(error))
            except Exception:  # a defect of the gateway: log it, and do not lose the registration
                _logger.exception("a %s failed and will be retried", self.noun, extra=self._describe(entry))
            await asyncio.sleep(NODE_RETRY_S)

    # --- changes

    def _note_failure(self, entry: EntryT, posted: Posted, failures: int) -> float:
        """Note that the receiver has not accepted a post, and return the delay until the next attempt in seconds. A
        registration that has failed for too long is paused.
        """
        now = system_clock()
        since = entry.failing_since if entry.failing_since is not None else now
        self._update(entry, why=posted.reason, failing_since=since)
        if now - since > self._pace.give_up_s * 1000:
            self._update(entry, state="paused")
        return self._pace.find_delay_s(failures + 1, posted.retry_after_s)

    def _update(self, entry: EntryT, **changes: Any) -> None:
        """Change fields of a registration in memory and in the file. A registration that was replaced stays
        unchanged.
        """
        # A replaced registration may still have a post in flight. The result of that post must not change the new
        # registration.
        if self._entries.get(self._get_key(entry)) is not entry:
            return
        if all(getattr(entry, name) == value for name, value in changes.items()):
            return
        state = entry.state
        for name, value in changes.items():
            setattr(entry, name, value)
        try:
            self._save()
        except NotStored as error:  # after a restart, receivers recognize a repeated post by its id
            _logger.warning("the state of a %s could not be stored: %s", self.noun, error, extra=self._describe(entry))
        if entry.state not in (state, "done"):
            level = logging.INFO if entry.state == "on" else logging.WARNING
            details = {**self._describe(entry), "state": entry.state}
            _logger.log(level, "a %s is %s: %s", self.noun, entry.state, entry.why, extra=details)

    def _save_all(self, entries: dict[KeyT, EntryT]) -> None:
        """Replace the registrations in memory and in the file. Raises `NotStored`, and changes nothing."""
        before, self._entries = self._entries, entries
        try:
            self._save()
        except NotStored:
            self._entries = before
            raise
