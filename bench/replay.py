"""What replaying a recorded run costs: CPU for each turn that is played again, and for reading the ledger that it comes from.

    ./dev bench replay [--quick] [--rounds 5] [--json FILE]
    ./dev bench replay --markdown FILE

Five agents work for people in a network in this process: each request makes three reactions of two turns, one of them with a tool that is no
part of the network. That run is recorded once, and replayed in each round. docs/performance.md tells what each line means.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import MachineFacts, describe_machine, pin_process, split_cores
from report import Results, make_parser, pick_size, tell, tell_results
from table import Line

from roundelay.agents.models.model import ModelRequest, ToolMessage
from roundelay.agents.models.scripted import Answer, ScriptedModel, call, finish, say, send
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.ledger.log_file import read_log
from roundelay.runs.recording import Recording
from roundelay.runs.replay import replay

MAX_CPU_MS = 10.0


@dataclass(frozen=True)
class Size:
    """How much is recorded and replayed."""

    rounds: int
    requests: int
    people: int


SIZES = {"full": Size(5, 200, 20), "quick": Size(2, 40, 8), "tiny": Size(1, 4, 2)}


@tool(idempotent=True)
def look_up(order: int) -> str:
    """Look an order up."""
    return f"Order {order}: 40 EUR, paid, sent, not yet there"


def make_runners() -> list[SimpleAgentRunner]:
    """Two desks, two who decide for them, and one who keeps the books."""
    return [
        *(_make(name, _Desk(chief), [look_up]) for name, chief in (("desk-a", "chief-a"), ("desk-b", "chief-b"))),
        *(_make(name, _Chief("books"), []) for name in ("chief-a", "chief-b")),
        _make("books", _Books(), []),
    ]


def _make(agent_id: str, script: Any, tools: list[Any]) -> SimpleAgentRunner:
    instruction = "You work in a shop. Be brief, be kind, and never promise what you cannot keep."
    return SimpleAgentRunner(agent_id, instruction=instruction, model=ScriptedModel(script), tools=tools)


def _results(request: ModelRequest) -> int:
    return sum(isinstance(message, ToolMessage) for message in request.messages)


@dataclass(frozen=True)
class _Desk:
    chief: str

    def __call__(self, request: ModelRequest) -> Answer:
        if _results(request):
            return say("It is being looked into.")
        return [call("look_up", order=12), send(self.chief, "May I refund order 12?")]


@dataclass(frozen=True)
class _Chief:
    books: str

    def __call__(self, request: ModelRequest) -> Answer:
        return finish() if _results(request) else send(self.books, "Note: order 12 is refunded")


class _Books:
    def __call__(self, request: ModelRequest) -> Answer:
        return finish() if _results(request) else call("discovery_find", query="chief")


async def record(path: Path, size: Size) -> None:
    """Let people ask, each one thing after the other, until every reaction is over."""
    async with Network.open(path, durability="normal") as network, _at_work(network):
        names = [f"person-{number}" for number in range(size.people)]
        people = [await network.join(name, kind="human") for name in names]
        await asyncio.gather(
            *(_ask(person, number, size.requests // size.people) for number, person in enumerate(people))
        )
        await _until_finished(network, size.requests * 3)


async def _until_finished(network: Network, reactions: int) -> None:
    seen = 0
    while reactions:
        for row in await network.hub.ledger.rows(seen, 500):
            seen = row.seq
            reactions -= row.label == "finished"
        if reactions:
            await network.hub.wait_beyond(seen, 30)


async def _ask(person: NetworkClient, number: int, requests: int) -> None:
    heard = person.__aiter__()
    for request in range(requests):
        await person.send_text(f"desk-{'ab'[number % 2]}", f"Where is my order? I ask for the time no. {request}")
        await anext(heard)


@asynccontextmanager
async def _at_work(network: Network) -> AsyncIterator[None]:
    runners = make_runners()
    clients = [await network.join(it.agent_id, role="reactor", card=it.describe_card()) for it in runners]
    tasks = [asyncio.create_task(it.run(client)) for it, client in zip(runners, clients, strict=True)]
    await asyncio.gather(*(it.ready() for it in runners))
    yield
    for runner in runners:
        await runner.stop()
    await asyncio.gather(*tasks)


def run(size: Size, *, rounds: int) -> Results:
    """Record once, replay ``rounds`` times; gives the results as plain data. Raises `RuntimeError` if it is not as it was."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as scratch:
        pin_process(0, split_cores()[1])
        path = Path(scratch) / "run.db"
        asyncio.run(record(path, size))
        machine = describe_machine(Path(scratch))
        replayed_ms, read_ms, rate = [], [], []
        turns = messages = rows = 0
        for number in range(rounds):
            began_s = time.process_time()
            recording = Recording(*read_log(path))
            read_s = time.process_time() - began_s
            began_s, wall_s = time.process_time(), time.perf_counter()
            report = replay(recording, make_runners())
            cpu_s, wall_s = time.process_time() - began_s, time.perf_counter() - wall_s
            if not report.is_same:
                raise RuntimeError(f"the replay is not as it was: {report.differences[0]}")
            turns, messages, rows = report.turns, report.messages, report.rows
            replayed_ms.append(cpu_s * 1000 / turns)
            read_ms.append(read_s * 1000 / turns)
            rate.append(rows / wall_s)
            tell(f"round {number + 1}/{rounds}  replay: {replayed_ms[-1]:.2f} ms of CPU a turn")
    beside = f"{turns} turns, {messages} messages, {rows} rows"
    lines = [
        Line("replay_cpu", "a replayed turn, CPU", replayed_ms, bound=MAX_CPU_MS, fewer_is_better=True, unit="ms", beside=beside),
        Line("replay_read", "reading its ledger, CPU for each turn", read_ms, fewer_is_better=True, unit="ms"),
        Line("replay_rows", "rows replayed", rate, unit="1/s"),
    ]  # fmt: skip
    return {
        "machine": asdict(machine),
        "rounds": rounds,
        "size": asdict(size),
        "took_s": round(time.monotonic() - started_s),
        "table": [line.to_plain() for line in lines],
    }


def describe_run(results: Results) -> str:
    """The machine and the run."""
    facts, size = MachineFacts(**results["machine"]), results["size"]
    return (
        f"{facts.cpu_model}, {facts.cores} cores, {facts.kernel}, {facts.python}\n"
        f"{results['rounds']} rounds, {size['requests']} requests of {size['people']} people, {results['took_s']} s"
    )


def main() -> None:
    parser = make_parser(__doc__, SIZES, quick="a look, not a measurement", rounds="how often it is replayed")
    options = parser.parse_args()
    size = pick_size(options, SIZES)
    tell_results(options, lambda: run(size, rounds=options.rounds or size.rounds), describe_run)


if __name__ == "__main__":
    main()
