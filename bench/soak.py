"""Whether memory stays level: a team that talks without a pause, and pages that look on.

    python bench/soak.py --minutes 30

`roundelay up` runs agents as processes of their own; people write to them one by one and in a channel, and they answer, so many messages a
second in all. Each page is a browser's context of its own, logged in as one of these people: some show the channel, some a
thread with an agent, one the inbox, one the threads. Every minute it is read, after a garbage collection, what each page's scripts hold, how many DOM nodes and
listeners it has, and what the hub holds resident. Level means: the last third is not above the middle third by more than a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.async_api import Browser, CDPSession, async_playwright
from servers import read_memory_kb

from roundelay import NetworkClient

AGENTS = 4
CHANNEL = "tea"
START_TIMEOUT_S = 60.0
MAX_RISE = 1.1
_READY = re.compile(r"ready at (ws://\S+)")
_RULES = {"rules": [{"do": [{"say": "You wrote: {{ text }}"}]}]}


@dataclass(frozen=True)
class PageMemory:
    """What one page holds."""

    place: str
    heap_mb: float
    nodes: int
    listeners: int
    task_s: float
    """For how long its main thread has been at work since it was opened."""


@dataclass(frozen=True)
class Reading:
    """All at one time. ``ledger`` is the newest seq, of messages and records."""

    at_s: float
    ledger: int
    hub_mb: float
    pages: tuple[PageMemory, ...]

    @property
    def heap_mb(self) -> float:
        return statistics.median(it.heap_mb for it in self.pages)


@dataclass
class Team:
    """A node and its agents, in a folder of their own."""

    url: str
    pid: int
    owner_token: str

    async def make_login(self, operator: NetworkClient, agent_id: str) -> str:
        code = secrets.token_urlsafe(32)
        digest = hashlib.sha256(code.encode()).hexdigest()
        await operator.call("network.create_login", {"agent_id": agent_id, "kind": "human", "login_hash": digest})
        return f"{self.url.replace('ws://', 'http://').rstrip('/')}/#login={agent_id}~{code}"

    async def make_token(self, operator: NetworkClient, agent_id: str) -> str:
        token = secrets.token_urlsafe(32)
        digest = hashlib.sha256(token.encode()).hexdigest()
        await operator.call("network.create_token", {"agent_id": agent_id, "kind": "human", "token_hash": digest})
        return token


@contextlib.asynccontextmanager
async def running_team(folder: Path) -> AsyncIterator[Team]:
    agents = [
        {"id": f"echo-{number}", "instruction": "Repeat.", "model": _RULES, "channels": [CHANNEL]}
        for number in range(AGENTS)
    ]
    (folder / "roundelay.yaml").write_text(json.dumps({"port": 0, "db": "soak.db", "agents": agents}), encoding="utf-8")
    home = folder / "home"
    home.mkdir(mode=0o700)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "roundelay", "up",
        cwd=folder, env=os.environ | {"ROUNDELAY_HOME": str(home)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while (found := _READY.search((await process.stdout.readline()).decode())) is None:
                assert process.returncode is None
        yield Team(found[1], process.pid, (folder / "soak.db.owner").read_text(encoding="utf-8").strip())
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def choose_place(number: int, pages: int) -> str:
    """What a page shows: of ten, five the channel, three a thread with an agent, one the inbox, one the threads."""
    if number == pages - 1:
        return "#/threads"
    if number == pages - 2:
        return "#/inbox"
    if number < pages // 2:
        return f"#/thread/{quote(f'channel:{CHANNEL}', safe='')}"
    first, second = sorted((f"echo-{number % AGENTS}", f"person-{number}"))
    return f"#/thread/{quote(f'direct:{first}~{second}', safe='')}"


async def talk(client: NetworkClient, number: int, every_s: float, ends: asyncio.Event) -> None:
    """One person's questions, each of which an agent answers: to its agent and in the channel by turns."""
    agent = f"echo-{number % AGENTS}"
    told = 0
    due_s = time.monotonic() + every_s * secrets.randbelow(1000) / 1000
    while not ends.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ends.wait(), max(0.0, due_s - time.monotonic()))
        due_s += every_s
        told += 1
        text = f"Question {told} of **person-{number}**: what of `it {told}`?"
        if told % 2:
            await client.send_text(agent, text)
        else:
            await client.post(CHANNEL, f"@{agent} {text}")


async def drain(client: NetworkClient) -> None:
    async for _ in client:
        pass


async def read_page(session: CDPSession, place: str) -> PageMemory:
    await session.send("HeapProfiler.collectGarbage")
    metrics = {it["name"]: it["value"] for it in (await session.send("Performance.getMetrics"))["metrics"]}
    counts = int(metrics["Nodes"]), int(metrics["JSEventListeners"])
    return PageMemory(place, metrics["JSHeapUsedSize"] / 1e6, *counts, metrics["TaskDuration"])


async def open_page(browser: Browser, link: str, place: str) -> CDPSession:
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(link)
    await page.wait_for_function("!location.hash.includes('login')")
    await page.evaluate("place => { location.hash = place }", place)
    session = await context.new_cdp_session(page)
    await session.send("Performance.enable")
    return session


async def soak(minutes: float, pages: int, rate: float, every_s: float) -> list[Reading]:
    """The readings, in order; the first is taken when all pages are open and nothing has been said."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        sys.exit("There is no Chromium on PATH, and the pages are opened in one: apt install chromium")
    readings: list[Reading] = []
    with tempfile.TemporaryDirectory() as folder:
        async with (
            running_team(Path(folder)) as team,
            contextlib.AsyncExitStack() as stack,
            async_playwright() as driver,
        ):
            operator = NetworkClient("warden", team.url, kind="service", token=team.owner_token)
            await stack.enter_async_context(operator)
            people = []
            for number in range(pages):
                name = f"person-{number}"
                token = await team.make_token(operator, name)
                people.append(await stack.enter_async_context(NetworkClient(name, team.url, kind="human", token=token)))
                await people[-1].call("channels.join", {"name": CHANNEL})
            flags = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
            browser = await driver.chromium.launch(executable_path=found, args=flags)
            places = [choose_place(number, pages) for number in range(pages)]
            sessions = [
                await open_page(browser, await team.make_login(operator, f"person-{number}"), place)
                for number, place in enumerate(places)
            ]
            ends = asyncio.Event()
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                drains = [group.create_task(drain(it)) for it in [*people, operator]]
                # Each question is answered, so that half of the rate is asked.
                talks = [
                    group.create_task(talk(it, number, pages / (rate / 2), ends)) for number, it in enumerate(people)
                ]
                while True:
                    readings.append(
                        Reading(
                            time.monotonic() - began_s,
                            (await operator.call("network.log", {"after": 2**52, "limit": 1}))["head"],
                            read_memory_kb(team.pid) / 1024,
                            tuple([await read_page(it, place) for it, place in zip(sessions, places, strict=True)]),
                        )
                    )
                    print(format_reading(readings), flush=True)
                    passed_s = time.monotonic() - began_s
                    if passed_s >= minutes * 60:
                        break
                    await asyncio.sleep(every_s - passed_s % every_s)
                ends.set()
                await asyncio.gather(*talks)
                for task in drains:
                    task.cancel()
            await browser.close()
    return readings


HEAD = (
    f"{'minute':>7}{'ledger at':>11}{'hub MB':>9}{'heap MB, median':>17}{'most':>8}{'DOM nodes, most':>17}"
    f"{'listeners, most':>17}{'busy, most':>12}"
)


def format_reading(readings: Sequence[Reading]) -> str:
    """The newest one, and how busy the busiest page was since the one before."""
    reading = readings[-1]
    before = readings[-2] if len(readings) > 1 else None
    most = max(it.heap_mb for it in reading.pages)
    nodes, listeners = max(it.nodes for it in reading.pages), max(it.listeners for it in reading.pages)
    busy = 0.0
    if before is not None:
        worked_s = max(now.task_s - then.task_s for now, then in zip(reading.pages, before.pages, strict=True))
        busy = worked_s / (reading.at_s - before.at_s)
    return (
        f"{reading.at_s / 60:>7.1f}{reading.ledger:>11,}{reading.hub_mb:>9.1f}{reading.heap_mb:>17.1f}{most:>8.1f}"
        f"{nodes:>17,}{listeners:>17,}{busy:>12.0%}"
    )


def judge(readings: Sequence[Reading]) -> list[str]:
    """A sentence for each of what is measured: by how much the last third is above the middle one."""
    third = len(readings) // 3
    if not third:
        return ["Too short to say whether anything grows."]
    middle, last = readings[third : 2 * third], readings[2 * third :]
    told = []
    for name, values in (("the hub", "hub_mb"), ("a page", "heap_mb")):
        rise = statistics.median(getattr(it, values) for it in last) / statistics.median(
            getattr(it, values) for it in middle
        )
        told.append(f"{name}: {rise - 1:+.1%} from the middle third to the last{'' if rise <= MAX_RISE else '  GROWS'}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--rate", type=float, default=20, help="messages a second, questions and answers")
    parser.add_argument("--every", type=float, default=60, help="seconds between two readings")
    parser.add_argument("--json", metavar="FILE", help="write the readings there as well")
    options = parser.parse_args()
    print(HEAD)
    readings = asyncio.run(soak(options.minutes, options.pages, options.rate, options.every))
    verdicts = judge(readings)
    print(*verdicts, sep="\n")
    if options.json:
        written: dict[str, Any] = {"readings": [asdict(it) for it in readings], "verdicts": verdicts}
        Path(options.json).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if any("GROWS" in it for it in verdicts) else 0)


if __name__ == "__main__":
    main()
