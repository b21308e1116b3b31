"""Tests of a program that receives messages: handled messages are not delivered again, failed and interrupted ones
are, and leaving a loop is reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError


async def end_the_block(bob: NetworkClient) -> None:
    async with bob.receive():
        return


async def raise_in_the_block(bob: NetworkClient) -> None:
    with suppress(ZeroDivisionError):  # the program continues, and ends normally
        async with bob.receive():
            print(1 // 0)


async def be_cancelled_in_the_block(bob: NetworkClient) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as time, bob.receive():
            time.reschedule(0)
            await asyncio.Event().wait()


async def leave_the_loop(bob: NetworkClient) -> None:
    async for _ in bob:
        break


async def raise_in_the_loop(bob: NetworkClient) -> None:
    with suppress(ZeroDivisionError):
        async for _ in bob:
            print(1 // 0)


@pytest.mark.parametrize(
    ("take", "then", "is_told"),
    [
        (end_the_block, {"two"}, False),
        (raise_in_the_block, {"one", "two"}, False),
        (be_cancelled_in_the_block, {"one", "two"}, False),
        (leave_the_loop, {"one", "two"}, True),
        (raise_in_the_loop, {"one", "two"}, True),
    ],
)
async def test_what_was_not_handled_comes_again_in_the_next_run(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    take: Callable[[NetworkClient], Awaitable[None]],
    then: set[str],
    is_told: bool,
) -> None:
    async def run(text: str, take: Callable[[NetworkClient], Awaitable[None]]) -> None:
        async with Network.open(tmp_path / "team.db") as network:
            ann, bob = await network.join("ann"), await network.join("bob")
            await ann.send_text("bob", text)
            await take(bob)

    async def hear(bob: NetworkClient) -> None:
        for _ in then:
            async with bob.receive() as message:
                heard.add(message.text)

    heard: set[str] = set()
    with caplog.at_level(logging.WARNING, "roundelay.network.client"):
        await run("one", take)
    assert ["async with client.receive()" in it.getMessage() for it in caplog.records] == [True] * is_told
    await run("two", hear)
    assert heard == then


async def test_a_closed_client_receives_no_more() -> None:
    async with Network.open() as network:
        bob = await network.join("bob")
    with pytest.raises(ConnectError, match="closed"):
        async with bob.receive():
            pass


async def test_following_gives_messages_of_one_thread_and_acknowledges_none() -> None:
    async with Network.open() as network:
        ann, bob = await network.join("ann", kind="human"), await network.join("bob")
        first = await ann.send_text("bob", "one")
        await ann.broadcast("elsewhere")
        await ann.send_text("bob", "two")
        texts = [it.text async for it in bob.follow(first.thread_id, after=0, timeout_s=0)]
        everything = [it.text async for it in bob.follow(after=first.seq, timeout_s=0)]
        assert (texts, everything) == (["one", "two"], ["elsewhere", "two"])
        status = await ann.call("network.message_status", {"seq": first.seq})
        assert status["recipients"][0]["state"] != "handled"


async def test_following_waits_for_what_comes_and_ends_with_its_time() -> None:
    async with Network.open() as network:
        ann, bob = await network.join("ann", kind="human"), await network.join("bob")
        messages = aiter(bob.follow(after=bob.welcome.head, timeout_s=30))
        waiting = asyncio.ensure_future(anext(messages))
        await ann.send_text("bob", "late")
        assert (await waiting).text == "late"
        assert [it async for it in bob.follow(after=bob.welcome.head + 1, timeout_s=0.01)] == []
