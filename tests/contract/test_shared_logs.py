"""Tests that every engine of the shared log must pass (`SharedLog`). docs/cluster.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import nats
import pytest

from roundelay.app import make_shared_log
from roundelay.network.cluster import jetstream, postgres
from roundelay.network.cluster.shared_log import LogRecord, LogTruncated, SharedLog
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import LeadershipLost, LogFull
from tests.support.nats import NatsServer, nats_server
from tests.support.postgres import postgres_server


class Logs:
    """One log that a test can open several times."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self._stack = stack

    async def open(self) -> SharedLog:
        log = make_shared_log(self.url)
        await log.open()
        self._stack.push_async_callback(log.close)
        return log


@pytest.fixture(params=["jetstream", pytest.param("postgres", marks=pytest.mark.full)])
async def logs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Logs]:
    async with AsyncExitStack() as stack:
        if request.param == "jetstream":
            server = await stack.enter_async_context(nats_server(tmp_path / "nats"))
            yield Logs(server.url("lab"), stack)
        else:
            yield Logs((await stack.enter_async_context(postgres_server())).url("lab"), stack)


async def read_records(log: SharedLog, until: int, after: int = 0) -> list[LogRecord]:
    found = list[LogRecord]()
    async with asyncio.timeout(20), aclosing(log.follow(after)) as records:  # type: ignore[type-var]  # a generator
        async for record in records:
            found.append(record)
            if record.position == until:
                return found
    raise AssertionError("it ended")


async def read(log: SharedLog, until: int, after: int = 0) -> list[tuple[int, bytes]]:
    return [(it.position, it.data) for it in await read_records(log, until, after)]


async def test_a_new_log_is_empty_and_counts_its_records_from_one(logs: Logs) -> None:
    log = make_shared_log(logs.url)
    with pytest.raises(LedgerError, match="There is no log"):
        await log.open(create=False)
    log = await logs.open()
    assert await log.end() == 0
    assert [await log.append(b"a", 0), await log.append(b"", 1), await log.append(b"c" * 300_000, 2)] == [1, 2, 3]
    assert await log.end() == 3
    await log.close()
    again = await logs.open()
    assert await read(again, 3) == [(1, b"a"), (2, b""), (3, b"c" * 300_000)]
    assert await read(again, 3, after=2) == [(3, b"c" * 300_000)]


async def test_a_record_stands_only_behind_the_one_that_its_writer_names(logs: Logs) -> None:
    log, other = await logs.open(), await logs.open()
    await log.append(b"1", 0)
    for guard in (0, 2, 7):
        with pytest.raises(LeadershipLost):
            await other.append(b"mine", guard)
    await other.append(b"2", 1)
    with pytest.raises(LeadershipLost):
        await log.append(b"too late", 1)
    assert await read(log, 2) == [(1, b"1"), (2, b"2")]


async def test_what_is_repeated_stands_there_once(logs: Logs) -> None:
    log, other = await logs.open(), await logs.open()
    assert [await it.append(b"the same", 0) for it in (log, other, log)] == [1, 1, 1]
    assert await log.append(b"the same", 1) == 2
    assert await log.append(b"the same", 0) == 1, "also when more has come behind it"
    assert await log.end() == 2


async def test_who_opens_a_new_log_at_the_same_time_finds_the_same_one(logs: Logs) -> None:
    opened = await asyncio.gather(*(logs.open() for _ in range(8)))
    await opened[0].append(b"1", 0)
    assert [await read(it, 1) for it in opened] == [[(1, b"1")]] * 8


async def test_of_many_who_write_at_once_one_is_taken(logs: Logs) -> None:
    writers = [await logs.open() for _ in range(6)]

    async def write(number: int, guard: int) -> int | None:
        try:
            await writers[number].append(f"{number} at {guard}".encode(), guard)
        except LeadershipLost:
            return None
        return number

    taken = list[int]()
    for guard in range(25):
        came = await asyncio.gather(*(write(number, guard) for number in range(len(writers))))
        [one] = [number for number in came if number is not None]
        taken.append(one)
    expected = [(guard + 1, f"{number} at {guard}".encode()) for guard, number in enumerate(taken)]
    assert await read(writers[0], 25) == expected


async def test_who_follows_gets_every_record_once_and_in_order_while_it_is_written(logs: Logs) -> None:
    log, other = await logs.open(), await logs.open()
    await log.append(b"0", 0)
    reading = [asyncio.create_task(read(it, 300)) for it in (log, other)]
    for number in range(1, 300):
        await log.append(str(number).encode(), number)
    expected = [(number + 1, str(number).encode()) for number in range(300)]
    assert await asyncio.gather(*reading) == [expected, expected]


async def test_of_each_record_is_said_whether_others_are_on_their_way(logs: Logs) -> None:
    log = await logs.open()
    for number in range(5):
        await log.append(b"x", number)
    assert [it.has_more for it in await read_records(log, 5)] == [True, True, True, True, False]


async def test_what_is_said_is_heard_by_all(logs: Logs) -> None:
    log, other = await logs.open(), await logs.open()
    async with asyncio.timeout(30):
        for text in ("one", "zwei 'é'"):
            await log.broadcast(text)
            assert [await it.next_broadcast() for it in (log, other)] == [text, text]


async def test_an_engine_tells_how_much_is_in_it_and_may_be(logs: Logs) -> None:
    logs.url += ("&" if "?" in logs.url else "?") + f"max_bytes={1 << 20}"
    log = await logs.open()
    before = await log.describe()
    await log.append(b"x" * 1000, 0)
    told = await log.describe()
    assert (told["records"], told["max_bytes"], told["replicas"]) == (1, 1 << 20, 1)
    assert 1000 <= told["bytes"] - before["bytes"] < 2000
    assert await log.room() == ((1 << 20) - told["bytes"], 1 << 20)
    for number in range(1, 6):
        await log.append(b"x" * 200_000, number)
    with pytest.raises(LogFull, match="max_bytes"):
        await log.append(b"x" * 200_000, 6)


async def test_a_log_that_is_closed_says_so(logs: Logs) -> None:
    log = await logs.open()
    await log.close()
    await log.close()
    for asked in (log.end(), log.append(b"x", 0), log.broadcast("x"), log.describe()):
        with pytest.raises(LedgerError, match="is closed"):
            await asked


async def test_who_follows_an_idle_log_goes_on_where_it_was_after_its_server_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "HEARTBEAT_S", 0.2)
    # This wait is long, so that the NATS client itself creates its consumer again.
    monkeypatch.setattr(jetstream, "FOLLOW_S", 60.0)
    async with nats_server(tmp_path / "nats") as server:
        log = make_shared_log(server.url("lab"))
        await log.open()
        for number in range(3):
            await log.append(str(number).encode(), number)
        records = log.follow(3)
        coming = asyncio.ensure_future(anext(records))
        await asyncio.sleep(0.1)  # the request was sent, but no event reports it
        await server.kill9()
        await server.start()
        other = make_shared_log(server.url("lab"))
        await other.open()
        async with asyncio.timeout(30):
            while not await is_followed(server):  # noqa: ASYNC110 (the server tells nobody)
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)  # a consumer from the beginning would have delivered within this time
            assert await other.append(b"next", 3) == 4
            assert await coming == (4, b"next", False)
        await asyncio.gather(log.close(), other.close())


async def is_followed(server: NatsServer) -> bool:
    async with await nats.connect(f"nats://{server.hosts}") as client:
        return bool(await client.jetstream().consumers_info("lab"))


async def test_the_oldest_records_are_dropped_and_count_no_longer(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "DROPPED", 2)
    logs.url += ("&" if "?" in logs.url else "?") + f"max_bytes={1 << 20}"
    log, other = await logs.open(), await logs.open()
    assert await log.first() == 1
    for number in range(5):
        await log.append(b"x" * 200_000, number)
    with pytest.raises(LogFull):
        await log.append(b"x" * 200_000, 5)
    while not await log.drop(5):
        pass
    assert [await it.first() for it in (log, other)] == [5, 5]
    assert await log.drop(5)
    assert await log.end() == 5
    assert await log.append(b"x" * 200_000, 5) == 6
    assert await other.append(b"y", 6) == 7
    with pytest.raises(LeadershipLost):
        await log.append(b"late", 6)
    assert [len(data) for _, data in await read(other, 7, after=4)] == [200_000, 200_000, 1]
    with pytest.raises(LogTruncated, match="now begins at record 5"):
        await read(log, 7, after=0)
    told = await log.describe()
    assert told["records"] == 3
    assert 400_000 < told["bytes"] < 402_000
    assert (await log.room())[0] > 600_000


@pytest.mark.full
async def test_a_late_drop_takes_nothing_of_a_table_that_was_made_anew() -> None:
    async with postgres_server() as server:
        old = make_shared_log(server.url("lab"))
        await old.open()
        for number in range(5):
            await old.append(b"x", number)
        await server.execute("DROP TABLE roundelay_lab")
        new = make_shared_log(server.url("lab"))
        await new.open()
        for number in range(5):
            await new.append(b"y", number)
        await old.drop(4)
        assert await new.first() == 1
        await asyncio.gather(old.close(), new.close())
