"""Tests that the forker, which forks a node's agents, and the node's supervision of child processes survive failing
system calls.
"""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from roundelay.nodes import agent_host, shared_process
from roundelay.nodes.agent_host import AgentOrder, AgentOutput, _Host
from roundelay.nodes.logs import ProcessLog
from roundelay.nodes.processes import Process
from roundelay.nodes.reports import Report
from roundelay.nodes.shared_process import SharedProcess
from roundelay.nodes.supervised import SupervisedProcess
from roundelay.nodes.work_board import WorkBoard

BEGIN = """\
import asyncio, errno, os, signal, time
from roundelay.nodes import forker

forker.PRELOADED = ()
forker._run_command = lambda arguments, name: time.sleep(60) or 0
"""
REFUSED = """\
fork, calls = forker.fork_process, 0

def refuse_second_fork():
    global calls
    calls += 1
    if calls == 2:
        raise BlockingIOError(errno.EAGAIN, "no more processes")
    return fork()

forker.fork_process = refuse_second_fork
node = forker.Forker.start()

async def main():
    node.watch()
    try:
        await node.spawn([], "first")
    except OSError as error:
        print(error.errno == errno.EAGAIN, node.is_lost)
    second = await node.spawn([], "second")
    second.kill()
    print(await second.wait(), node.is_lost)

asyncio.run(main())
node.join()
"""
BUSY = """\
node = forker.Forker.start()

async def main():
    node.watch()
    process = await node.spawn([], "first")
    os.kill(node.pid, signal.SIGSTOP)
    for _ in range(5000):
        process.send_signal(0)
    process.kill()
    os.kill(node.pid, signal.SIGCONT)
    print(await process.wait(), node.is_lost)

asyncio.run(main())
node.join()
"""


def run_script(text: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_refused_fork_harms_no_other_process() -> None:
    assert run_script(REFUSED) == ["True False", "-9 False"]


def test_signals_to_a_busy_forker_arrive_later() -> None:
    assert run_script(BUSY) == ["-9 False"]


async def test_json_that_resembles_a_report_is_output() -> None:
    printed = ['{"report": "sales"}', '{"report": "ready", "message": 1, "url": ""}', '{"report": ["ready"]}']
    lines: list[str] = []
    code = "import sys\nfor line in sys.argv[1:]: print(line)"
    await Process("ann", ["-c", code, *printed], on_line=lines.append).run()
    assert lines == printed


async def test_a_process_that_cannot_be_created_starts_again() -> None:
    class Refused(SupervisedProcess):
        async def run_once(self) -> int | None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    process = Refused("ann", "Agent ann", [], path="ann.yaml", log=ProcessLog("text"))
    task = asyncio.create_task(process.supervise())
    await asyncio.wait([task, asyncio.create_task(process.settled.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not task.done()
    assert process.error == "The process could not be created: Resource temporarily unavailable."
    task.cancel()


async def test_an_agent_stopped_while_it_ends_reports_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.Event()

    def count(agent_id: str) -> int:
        waiting.set()
        return 1

    monkeypatch.setattr(agent_host, "count_leftovers", count)
    stream = io.StringIO()
    board = WorkBoard.create(tmp_path / "board", 1)
    host = _Host("ws://127.0.0.1:1", None, board, ProcessLog("text"), AgentOutput(stream))
    host._start(AgentOrder(order="start", agent_id="ann", slot=0, file=str(tmp_path / "no.yaml"), as_loaded=""))
    await waiting.wait()
    await host.stop_all()
    report = json.loads(stream.getvalue())
    assert (report["report"], report["agent"], report["leftovers"]) == ("ended", "ann", 1)


class HostedAgent:
    def __init__(self, name: str) -> None:
        self.name = name
        self.isolation = ""

    def handle_report(self, report: Report) -> None: ...

    def isolate(self, reason: str) -> None:
        self.isolation = reason


async def test_agents_end_with_a_process_that_overwrote_its_board(tmp_path: Path) -> None:
    log = ProcessLog("text")
    shared = SharedProcess("agents", ["ann", "bob"], "", log_level="info", log=log, folder=tmp_path, forker=None)
    crash = "import sys; sys.stdin.readline(); sys.stdin.readline()\nopen(sys.argv[-1], 'r+b').write(b'\\xff' * 18)"
    shared._command[1:] = ["-c", crash, "--board", ""]
    agents = [HostedAgent("ann"), HostedAgent("bob")]
    for _ in range(2):
        async with asyncio.timeout(20):
            codes = await asyncio.gather(*(shared.run_agent(it, tmp_path / "no.yaml", None) for it in agents))
        assert codes == [1, 1]
    assert all("2 times in all" in it.isolation for it in agents)


async def test_an_import_that_never_ends_isolates_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_process, "HANG_CHECK_S", 0.05)
    monkeypatch.setattr(shared_process, "HANG_ANSWER_S", 0.05)
    monkeypatch.setattr(shared_process, "MAX_LOAD_CHECKS", 4)
    log = ProcessLog("text")
    shared = SharedProcess("agents", ["ann", "bob"], "", log_level="info", log=log, folder=tmp_path, forker=None)
    hang = (
        "import sys; from pathlib import Path; from roundelay.nodes.work_board import Work, WorkBoard\n"
        "sys.stdin.readline(); sys.stdin.readline()\n"
        "board = WorkBoard(Path(sys.argv[-1])); board.beat(); board.set_work(0, Work.LOADS)\n"
        "while True: pass"
    )
    shared._command[1:] = ["-c", hang, "--board", ""]
    agents = [HostedAgent("ann"), HostedAgent("bob")]
    for _ in range(2):
        async with asyncio.timeout(30):
            ann, bob = await asyncio.gather(*(shared.run_agent(it, tmp_path / "no.yaml", None) for it in agents))
        assert (ann is None, bob) == (False, None)
    assert ("2 times in all" in agents[0].isolation, agents[1].isolation) == (True, "")
