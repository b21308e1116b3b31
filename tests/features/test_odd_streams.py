"""Tests of unusual tool streams: other types, values after the result, errors after the result, no end, and thousands
of pieces.
"""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.events import Progress, ToolOutput
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.tools import Output, Tool, ToolContext, tool
from tests.support.agents import Provider
from tests.support.loops import Loop, by_turn, results_of, use


async def run(made: Tool, **limits: Any) -> tuple[str, Loop]:
    """Return the result that the model reads, and the loop."""
    async with Provider(by_turn(use((made.name, {})), "done")) as provider:
        loop = Loop(Agent("bob", "", provider.model(), [made], AgentPolicy(**limits)))
        async with asyncio.timeout(10):
            assert (await loop.drive()).answer == "done"
    [result] = results_of(provider.requests[-1])
    return result, loop


async def test_pieces_of_any_type_are_shown_and_read_as_json() -> None:
    @tool(idempotent=True)
    async def odd() -> AsyncIterator[object]:
        """Yield."""
        for piece in (1, None, True, [1], {"a": b"x"}, datetime.date(2020, 1, 1), float("nan"), "\ud800", ""):
            yield piece

    result, loop = await run(odd)
    assert result == '1nulltrue[1]{"a":"x"}"2020-01-01""NaN"?'
    assert "".join(it.text for it in loop.events if isinstance(it, ToolOutput)) == result


@pytest.mark.parametrize("piece", [object(), b"\xff"])
async def test_a_piece_that_goes_into_no_json_is_the_calls_error(piece: object) -> None:
    @tool(idempotent=True)
    async def odd() -> AsyncIterator[object]:
        """Yield."""
        yield "a"
        yield piece

    result, loop = await run(odd)
    assert "serializ" in result
    assert loop.records.bodies("tool_result")[0]["ok"] is False


async def test_what_follows_the_result_is_not_asked_for() -> None:
    went_on = False

    @tool(idempotent=True)
    async def chatty() -> AsyncIterator[object]:
        """Yield."""
        nonlocal went_on
        yield "a"
        yield Output("the result", {"k": 1})
        went_on = True
        yield "more"

    result, loop = await run(chatty)
    assert (result, went_on) == ("the result", False)
    assert [it.text for it in loop.events if isinstance(it, ToolOutput)] == ["a"]
    assert loop.records.bodies("tool_result")[0]["data"] == {"k": 1}


@pytest.mark.parametrize("ends", ["raises", "yields"])
async def test_a_tool_that_fails_when_it_is_closed_has_given_its_result(ends: str) -> None:
    @tool(idempotent=True)
    async def clumsy() -> AsyncIterator[object]:
        """Yield."""
        try:
            yield Output("the result")
        finally:
            if ends == "yields":
                yield "again"
            raise ValueError("while it cleaned up")

    result, loop = await run(clumsy)
    assert result == "the result"
    assert loop.records.bodies("tool_result")[0]["ok"] is True


async def test_a_sync_generator_may_yield_its_result_too() -> None:
    @tool(idempotent=True)
    def found() -> Iterator[object]:
        """Yield."""
        yield "a"
        yield Output("the result", {"k": 1})
        raise ValueError("never come to")

    result, loop = await run(found)
    assert result == "the result"
    assert loop.records.bodies("tool_result")[0]["data"] == {"k": 1}


async def test_a_stream_without_an_end_ends_with_its_time_and_says_so() -> None:
    @tool(idempotent=True)
    async def forever() -> AsyncIterator[str]:
        """Yield."""
        while True:
            yield "x"

    result, _ = await run(forever, tool_timeout_s=0.2)
    assert result == "forever took longer than 0.2 s and was stopped. Whether it took effect is unknown."


async def test_thousands_of_tiny_pieces_are_one_result() -> None:
    @tool(idempotent=True)
    async def drip() -> AsyncIterator[str]:
        """Yield."""
        for _ in range(5000):
            yield "x"

    result, loop = await run(drip)
    assert result == "x" * 5000
    assert sum(isinstance(it, ToolOutput) for it in loop.events) == 5000


async def test_threads_that_report_after_the_end_are_not_heard() -> None:
    is_over, told = threading.Event(), threading.Event()

    @tool(idempotent=True)
    def work(context: ToolContext) -> str:
        """Work."""

        def report(count: int) -> None:
            for at in range(count):
                context.report(f"step {at}")
                context.stream("piece")

        def report_late() -> None:
            is_over.wait()
            report(5)
            told.set()

        threading.Thread(target=report_late, daemon=True).start()
        some = [threading.Thread(target=report, args=(100,)) for _ in range(4)]
        for it in some:
            it.start()
        for it in some:
            it.join()
        return "done"

    _, loop = await run(work)
    heard = [it for it in loop.events if isinstance(it, Progress | ToolOutput)]
    assert len(heard) == 801  # the last report is the end of the stream
    is_over.set()
    await asyncio.to_thread(told.wait)
    await asyncio.sleep(0)
    assert [it for it in loop.events if isinstance(it, Progress | ToolOutput)] == heard


@pytest.mark.parametrize("given", [5, None, {"a": 1}])
async def test_what_is_reported_may_be_anything(given: Any) -> None:
    """Reports may also come from a thread, where an error would go unnoticed."""

    @tool(idempotent=True)
    def work(context: ToolContext) -> str:
        """Work."""
        context.report(given)
        context.stream(given)
        return "done"

    result, loop = await run(work)
    assert result == "done"
    told = [it.text for it in loop.events if isinstance(it, Progress | ToolOutput)]
    assert told == [str(given), str(given), ""]


async def test_data_that_is_no_mapping_is_named() -> None:
    @tool(idempotent=True)
    def work() -> Output:
        """Work."""
        return Output("x", "a text")  # type: ignore[arg-type]

    result, _ = await run(work)
    assert result.endswith("The tool work returned data that is a str: write Output(content, {name: value}).")
