"""The part of a measured process that all systems share: opening the system, asking the questions, and checking every
answer.

A system file defines ``open_system(job)``, an async context manager that yields ``ask(number, text)``. The file ends
with ``run(open_system)``. For each step, the process writes one JSON line, and then waits until the driver writes a
line to its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from workloads import EDGE, GROWING, WORKLOADS, Workload, expected, question

Ask = Callable[[int, str], Awaitable[str]]
ANSWER_TIMEOUT_S = 60.0
FIRST_WARM_UP = 9000


@dataclass(frozen=True)
class Job:
    """One measurement. ``mode`` is the mode of the system in systems.toml."""

    work: str
    questions: int
    base_url: str
    folder: Path
    mode: str

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.work]


def read_job() -> Job:
    job = Job(**json.loads(sys.argv[1]))
    return Job(job.work, job.questions, job.base_url, Path(job.folder), job.mode)


class Asker:
    """Asks the questions of a job, and collects the wrong answers and the times."""

    def __init__(self, job: Job, ask: Ask, report: int) -> None:
        self._job = job
        self._ask = ask
        self._report_to = report
        self.times_s: list[float] = []
        self.wrong: list[str] = []

    async def ask(self, number: int) -> None:
        started_s = time.perf_counter()
        try:
            answer = await asyncio.wait_for(self._ask(number, question(self._job.work, number)), ANSWER_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - the report shows it as a wrong answer
            answer = f"{type(error).__name__}: {error}"
        self.times_s.append(time.perf_counter() - started_s)
        if expected(self._job.work, number) not in (answer or ""):
            self.wrong.append(f"{number}: {answer}"[:300])

    async def step(self, **values: object) -> None:
        """Send a report to the driver, and wait until the driver has read the clocks."""
        os.write(self._report_to, (json.dumps(values) + "\n").encode())
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

    async def run(self) -> None:
        for number in range(self._job.workload.warm_ups):
            await self.ask(FIRST_WARM_UP + number)
        warm_up_errors = self.wrong[:2]
        self.times_s.clear()
        await self.step(wrong=warm_up_errors)
        started_s = time.perf_counter()
        numbers = iter(range(self._job.questions))
        await asyncio.gather(*(self._walk(numbers) for _ in range(self._job.workload.parallel)))
        wall_s = time.perf_counter() - started_s
        await self.step(wall_s=wall_s, p50_s=statistics.median(self.times_s), wrong=self.wrong[:3])

    async def _walk(self, numbers: Iterator[int]) -> None:
        marks = (EDGE, self._job.questions - EDGE) if self._job.work in GROWING else ()
        for number in numbers:
            if number in marks:
                await self.step(mark=number)
            await self.ask(number)


def run(open_system: Callable[[Job], AbstractAsyncContextManager[Ask]]) -> None:
    report = os.dup(1)
    os.dup2(2, 1)  # systems print to stdout, but only reports may reach the driver
    job = read_job()
    os.environ.update(OPENAI_API_KEY="none", OPENAI_BASE_URL=job.base_url, NO_PROXY="127.0.0.1")

    async def main() -> None:
        async with open_system(job) as ask:
            await Asker(job, ask, report).run()

    asyncio.run(main())
    os._exit(0)  # exit without waiting for threads that some systems leave behind
