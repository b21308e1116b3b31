"""A hub whose storage fails for a while, and the required effects of every such fault. Tests of single faults use it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from websockets.exceptions import InvalidStatus

from tests.crash.power import Event
from tests.crash.sqlite_files import OK
from tests.support.node import Node
from tests.support.wire import get_http

PATIENCE_S = 20.0
DB = "team.db"

Step = Callable[[], Awaitable[object]]


async def nothing() -> None:
    """A `Step` that does nothing."""


@dataclass
class Fault:
    """A `Decide` for `Journal` that fails some kinds of operations with an error code between `begin` and `end`."""

    kinds: tuple[type[Event], ...]
    code: int
    refused: int = 0
    _is_on: bool = False
    _awaited: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    def __call__(self, event: Event) -> int:
        if not self._is_on or not isinstance(event, self.kinds):
            return OK
        self.refused += 1
        for count, loop, reached in self._awaited:
            if self.refused >= count:
                loop.call_soon_threadsafe(reached.set)
        return self.code

    async def begin(self) -> None:
        self._is_on = True

    async def end(self) -> None:
        self._is_on = False

    async def refuse(self, count: int) -> None:
        """Wait until ``count`` more operations were refused."""
        reached = asyncio.Event()
        self._awaited.append((self.refused + count, asyncio.get_running_loop(), reached))
        async with asyncio.timeout(PATIENCE_S):
            await reached.wait()


async def until_ready(url: str) -> None:
    """Poll ``/readyz`` until the node is ready, as an operator's probe does."""
    for _ in range(1000):
        if (await get_http(url, "/readyz"))[0] == 200:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the hub did not recover")


async def came_back(url: str) -> bool:
    """Wait for a recovery, which may need several attempts. Return whether the hub is ready again. Until then, it
    must report that it is recovering.
    """
    for _ in range(100):
        status, text = await get_http(url, "/readyz")
        if status == 200:
            return True
        assert (status, text) == (503, "recovering\n")
        await asyncio.sleep(0.02)
    return False


async def assert_recovering(node: Node) -> None:
    """Check that the hub is alive, not ready, and accepts no connections."""
    assert (await get_http(node.url, "/healthz"))[0] == 200
    assert await get_http(node.url, "/readyz") == (503, "recovering\n")
    with pytest.raises(InvalidStatus) as refused:
        await node.connect()
    assert refused.value.response.status_code == 503
    assert b"try again" in refused.value.response.body


async def fail_and_recover(node: Node, begin: Step, stay: Step, end: Step) -> dict[str, int]:
    """Cause a fault in the middle of a conversation, and continue after it. Return the seq of every acknowledged
    message.
    """
    alice, bob = await node.agent("alice"), await node.agent("bob")
    epoch, cursor = bob.welcome["network"]["epoch"], bob.welcome["cursor"]
    stored = {f"m{n}": (await alice.send("agent:bob", n, message_id=f"m{n}"))["seq"] for n in range(10)}
    assert [(await bob.delivery())["message"]["content"] for _ in range(10)] == list(range(10))
    await begin()
    await alice.send_frame({"type": "send", "message_id": "during", "to": "agent:bob", "content": "during"})
    for session in (alice, bob):
        assert [frame for frame in await session.rest() if frame["type"] in ("stored", "error", "deliver")] == []
        assert await session.closed() == 4503
    await assert_recovering(node)
    await stay()
    await assert_recovering(node)
    await end()
    await until_ready(node.url)

    alice = await node.agent("alice")
    bob = await node.agent("bob", resume={"epoch": epoch, "cursor": cursor})
    assert (alice.welcome["network"]["epoch"], bob.welcome["resume"]) == (epoch, "full")
    stored["during"] = (await alice.send("agent:bob", "during", message_id="during"))["seq"]
    for n in range(10):
        again = await alice.send("agent:bob", n, message_id=f"m{n}")
        assert (again["seq"], again["duplicate"]) == (stored[f"m{n}"], True)
    stored["after"] = (await alice.send("agent:bob", "after", message_id="after"))["seq"]
    assert await bob.contents_until("after") == [*range(10), "during"]
    return stored
