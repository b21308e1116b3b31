"""Tests of processes that the project starts: their output is read, a failed start is reported, and none outlives its
parent.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from roundelay.nodes.processes import NotReady, Process

COUNTING = """
import time
from roundelay.nodes.reports import Reporter
reporter = Reporter()
print("one")
print("two", flush=True)
reporter.report_ready("up", "7")
time.sleep(600)
"""
HOLDER = """
import asyncio, sys
from pathlib import Path
from roundelay.testing.processes import ProcessStage

async def main():
    async with ProcessStage(Path(sys.argv[1])):
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_process_is_ready_when_it_says_so_and_can_be_killed_and_started_again() -> None:
    lines: list[str] = []
    process = Process("counter", ["-c", COUNTING], on_line=lines.append)
    assert await process.start() == "7"
    assert (process.is_up, process.is_ready) == (True, True)
    first = process.pid
    process.kill()
    await process.stop()
    assert (process.is_up, process.is_ready) == (False, False)
    assert await process.start() == "7"
    assert process.pid != first
    await process.stop()
    await process.stop()
    assert not process.is_up
    assert lines == ["one", "two"] * 2


async def test_what_keeps_a_process_from_getting_ready_is_said_in_its_own_words() -> None:
    process = Process("broken", ["-c", "import sys; sys.exit('no room here')"])
    with pytest.raises(NotReady, match="process of broken did not get ready: no room here"):
        await process.start()
    assert not process.is_up


async def test_nothing_is_left_of_a_start_that_is_cancelled_once_the_process_is_stopped() -> None:
    said = asyncio.Event()
    process = Process("slow", ["-c", "import time; print('one'); time.sleep(600)"], on_line=lambda line: said.set())
    starting = asyncio.create_task(process.start())
    await said.wait()
    starting.cancel()
    await asyncio.wait([starting])
    await process.stop()
    assert not process.is_up
    assert asyncio.all_tasks() == {asyncio.current_task()}


def find_child(pid: int) -> int:
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def test_a_node_started_for_a_test_ends_when_the_test_is_killed(tmp_path: Path) -> None:
    command = (sys.executable, "-c", HOLDER, str(tmp_path))
    holder = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"up\n"
    node = os.pidfd_open(find_child(holder.pid))
    holder.kill()
    await holder.wait()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(node, ended.set)
    async with asyncio.timeout(60):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(node)
    os.close(node)
