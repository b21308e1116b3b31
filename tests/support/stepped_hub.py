"""A hub that a test advances step by step. The hub's event loop has a simulated clock and stops when nothing is left
to do, and its connections have no sockets.

When `SteppedLoop.step` returns, the hub has finished all work of the step. A test is therefore deterministic.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import selectors
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from roundelay.mods.channels import Channels
from roundelay.network.config import Limits
from roundelay.network.core.entries import Peer
from roundelay.network.core.mod import Mod
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.hub import Hub
from roundelay.network.hub.session import Session
from roundelay.network.ledger import Ledger
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.ledger.sqlite import SQLiteLedger

THREAD_TIMEOUT_S = 10.0


class _Selector(selectors.DefaultSelector):
    """Selector that never waits for a timer. The selector advances the loop's clock to the timer, up to the end of
    the step, and then stops the loop.
    """

    loop: SteppedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        loop = self.loop
        if ready or timeout == 0:
            return ready
        if loop.in_threads:
            ready = super().select(THREAD_TIMEOUT_S)
            assert ready, "a thread of the ledger's did not answer"
            return ready
        if timeout is not None and loop.now + timeout <= loop.until:
            loop.now += timeout
        else:
            loop.now = loop.until
            loop.stop()
        return []


class SteppedLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time` advances only in `step`. ``in_threads`` counts calls that run in threads. The loop
    waits while the count is not zero.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = self.until = now
        self.in_threads = 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def step(self, seconds: float = 0.0) -> None:
        """Run until nothing is left to do within the next ``seconds`` of simulated time."""
        self.until = self.now + seconds
        self.run_forever()


class StubConnection:
    """A connection whose other end is the test. `frames` holds the frames that the hub wrote, and `closed` the close
    code.
    """

    def __init__(self) -> None:
        self.peer = Peer(is_trusted=True)
        self.is_paused = False
        self.is_read = True
        self.frames: list[dict[str, Any]] = []
        self.closed: int | None = None

    def write(self, payloads: Sequence[bytes]) -> None:
        assert self.closed is None, "the hub writes after the end"
        self.frames += map(json.loads, payloads)

    def end(self, code: int, reason: str) -> None:
        if self.closed is None:
            self.closed = code

    def admit(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def take_frames(self) -> list[dict[str, Any]]:
        frames, self.frames = self.frames, []
        return frames


class _Seen:
    """Ledger that counts its calls in threads on the loop, and that fails the next `append` on request."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.failing: Literal["before", "after"] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ledger, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SteppedLoop)
            loop.in_threads += isinstance(self._ledger, SQLiteLedger)
            try:
                return await method(*args, **options)
            finally:
                loop.in_threads -= isinstance(self._ledger, SQLiteLedger)

        return call

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        failing, self.failing = self.failing, None
        if failing == "before":
            raise LedgerError("The disk failed, before anything was written.")
        await self.__getattr__("append")(rows, puts)
        if failing == "after":
            raise LedgerError("The disk failed, after everything was written.")


class SteppedHub:
    """A hub that can be restarted on the same ledger. The ledger is a file if ``path`` is given, else in memory."""

    def __init__(self, limits: Mapping[str, int], path: Path | None = None, mods: Sequence[Mod] = ()) -> None:
        self._limits = Limits(**limits)
        self._mods = mods
        self._ids = itertools.count(1)
        ledger: Ledger = MemoryLedger(epoch="e1") if path is None else SQLiteLedger(path, new_epoch=self._new_id)
        self.ledger: Any = _Seen(ledger)
        self._start(0.0)

    def _new_id(self) -> str:
        return f"id{next(self._ids)}"

    def _start(self, now: float) -> None:
        self.loop = SteppedLoop(now)

        async def start() -> Hub:
            hub = Hub(
                self.ledger,
                limits=self._limits,
                mods=[Channels(), *self._mods],
                clock=lambda: int(self.loop.now * 1000),
                new_id=self._new_id,
            )
            await hub.start()
            return hub

        self.hub = self.run(start())

    @property
    def now_ms(self) -> int:
        return int(self.loop.now * 1000)

    def run(self, awaitable: Any) -> Any:
        """Return the result of an awaitable that needs no simulated time."""
        self.loop.until = self.loop.now
        return self.loop.run_until_complete(awaitable)

    def connect(self) -> tuple[StubConnection, Session]:
        connection = StubConnection()
        return connection, self.hub.connect(connection)

    def receive(self, session: Session, frame: Mapping[str, Any]) -> None:
        self.hub.receive(session, json.dumps(frame).encode())

    def fail_commit(self, when: Literal["before", "after"]) -> None:
        """Let the next `append` fail before or after its write. The hub cannot know which."""
        self.ledger.failing = when

    def crash(self) -> None:
        """End the hub as `kill -9` does, after the pending writes to the ledger. Start another hub on the same
        ledger.
        """
        self._end_loop()
        closing = SteppedLoop(self.loop.now)
        closing.run_until_complete(self.ledger.close())
        closing.close()
        self._start(self.loop.now)

    def restart(self) -> None:
        """Stop the hub cleanly, and start another on the same ledger."""
        self.close()
        self._start(self.loop.now)

    def close(self) -> None:
        self.run(self.hub.close())
        self._end_loop()

    def _end_loop(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.step()
        self.loop.close()
