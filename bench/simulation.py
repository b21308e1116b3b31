"""What simulating costs: a crowd of 10,000 scripted agents in one process, agents with turns and records, and a scenario's fixed cost.

    ./dev bench simulation [--quick] [--rounds 5] [--json FILE]
    ./dev bench simulation --markdown FILE

Each measure runs in a process of its own, so that its memory is its own; rounds take turns. The second form prints the table of a run that was
kept. docs/performance.md tells what each line means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import MachineFacts, describe_machine
from report import Results, make_parser, pick_size, tell, tell_results
from table import Line

MIN_PLAIN, MIN_PROMPTS = 15_000, 3_000
"""Messages per second of wall clock."""
MAX_MEMORY_MB, MAX_SCENARIO_MS = 1024, 50


@dataclass(frozen=True)
class Size:
    rounds: int
    agents: int
    plain: int
    prompts: int
    """Messages that the crowd exchanges, without prompts and with them."""
    reacting: int
    turns: int
    """Agents with turns and records, and the messages that they exchange."""
    scenarios: int


SIZES = {
    "full": Size(5, 10_000, 200_000, 40_000, 200, 1_000, 30),
    "quick": Size(1, 10_000, 60_000, 20_000, 100, 300, 10),
    "tiny": Size(1, 40, 200, 100, 4, 20, 3),
}


def measure_crowd(agents: int, messages: int, renders_prompts: bool) -> dict[str, float]:
    """Pairs of a crowd answer each other until so many messages were sent."""
    from simulated_crowd import Crowd, Incoming, Message

    from roundelay.network.config import Limits
    from roundelay.simulation import Delay, Simulation, simulate

    left = messages

    def answer(incoming: Incoming) -> Iterable[Message]:
        nonlocal left
        left -= 1
        return [Message(incoming.sender_id, "And what do you say to that?")] if left > 0 else ()

    async def main(simulation: Simulation) -> dict[str, float]:
        crowd = Crowd(simulation, answer, renders_prompts=renders_prompts)
        await crowd.join([f"agent-{number}" for number in range(agents)])
        before, wall_s, cpu_s = len(simulation.rows), time.perf_counter(), time.process_time()
        for number in range(0, agents, 2):
            crowd.send(f"agent-{number}", f"agent-{number + 1}", "Hello!")
        await simulation.idle(3600)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        sent = len(simulation.rows) - before
        if crowd.errors or sent < messages or (renders_prompts and crowd.prompts_rendered < messages):
            raise RuntimeError(f"{sent} messages, {crowd.prompts_rendered} prompts, errors: {crowd.errors[:1]}")
        return {"per_wall_s": sent / wall_s, "per_cpu_s": sent / cpu_s, "memory_mb": read_memory_mb()}

    limits = Limits(max_hops=10**6, max_root_messages=10**6, root_messages_per_s=10**6)
    return simulate(main, link_delay=Delay(), model_delay=Delay(), limits=limits)


def measure_turns(agents: int, messages: int) -> dict[str, float]:
    """Pairs of agents with a model, turns and records answer each other."""
    from roundelay.agents.models.model import ModelRequest
    from roundelay.agents.models.scripted import Answer, ScriptedModel, finish, send
    from roundelay.agents.simple import SimpleAgentRunner
    from roundelay.network.config import Limits
    from roundelay.simulation import Delay, MakeAgent, Simulation, simulate

    left = messages

    def answer(request: ModelRequest) -> Answer:
        nonlocal left
        left -= 1
        number = int(request.agent_id.removeprefix("agent-"))
        return [send(f"agent-{number ^ 1}", "And you?"), finish()] if left > 0 else finish()

    def maker(number: int) -> MakeAgent:
        return lambda: SimpleAgentRunner(f"agent-{number}", instruction="Answer.", model=ScriptedModel(answer))

    async def main(simulation: Simulation) -> dict[str, float]:
        for number in range(agents):
            await simulation.start_agent(maker(number))
        mia = await simulation.join_person("mia")
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for number in range(0, agents, 2):
            await mia.client.send_text(f"agent-{number}", "Go")
        await simulation.idle(3600)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        sent = sum(row.type == "message" for row in simulation.rows)
        return {"per_wall_s": sent / wall_s, "per_cpu_s": sent / cpu_s, "memory_mb": read_memory_mb()}

    limits = Limits(max_hops=10**6, max_root_messages=10**6, root_messages_per_s=10**6)
    return simulate(main, link_delay=Delay(), model_delay=Delay(), limits=limits)


def measure_scenario(runs: int) -> dict[str, float]:
    """The smallest scenario again and again: what each costs beside what it does."""
    from roundelay.testing import make_scenario, run_scenario

    plain = {
        "scenario": "Somebody says something",
        "agents": {"desk": {"script": [{"do": [{"say": "Yes?"}]}]}},
        "people": ["mia"],
        "steps": [{"as": "mia", "to": "desk", "send": "Hello"}, {"wait": "idle"}],
        "expect": [{"message": {"from": "desk", "to": "mia"}}],
    }
    times_ms = []
    for _ in range(runs + 1):
        wall_s = time.perf_counter()
        if not run_scenario(make_scenario(plain)).passed:
            raise RuntimeError("the scenario did not pass")
        times_ms.append((time.perf_counter() - wall_s) * 1000)
    return {"first_ms": times_ms[0], "median_ms": statistics.median(times_ms[1:])}


def read_memory_mb() -> float:
    """The most that this process held resident."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def list_measures(size: Size) -> dict[str, Callable[[], dict[str, float]]]:
    return {
        "plain": lambda: measure_crowd(size.agents, size.plain, False),
        "prompts": lambda: measure_crowd(size.agents, size.prompts, True),
        "turns": lambda: measure_turns(size.reacting, size.turns),
        "scenario": lambda: measure_scenario(size.scenarios),
    }


def run(name: str, size: Size, *, rounds: int) -> Results:
    """Take every measure, ``rounds`` times; gives the results as plain data. Raises `RuntimeError`."""
    started_s = time.monotonic()
    taken: dict[str, list[dict[str, float]]] = {measure: [] for measure in list_measures(size)}
    for number in range(rounds):
        for measure, values in taken.items():
            command = [sys.executable, __file__, "--size", name, "--measure", measure]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{measure}: {done.stderr}")
            values.append(json.loads(done.stdout))
            told = ", ".join(f"{what} {value:,.1f}" for what, value in values[-1].items())
            tell(f"round {number + 1}/{rounds}  {measure}: {told}")
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as scratch:
        machine = describe_machine(Path(scratch))

    def pick(measure: str, what: str) -> list[float]:
        return [value[what] for value in taken[measure]]

    def by_cpu(measure: str) -> str:
        return f"{statistics.median(pick(measure, 'per_cpu_s')):,.0f} per second of CPU"

    is_full = size.agents >= 10_000
    crowd = f"{size.agents:,} agents"
    lines = [
        Line("plain", f"{crowd}, messages a second", pick("plain", "per_wall_s"), MIN_PLAIN if is_full else None, beside=by_cpu("plain")),
        Line("prompts", f"{crowd}, messages a second, prompts rendered", pick("prompts", "per_wall_s"), MIN_PROMPTS if is_full else None, beside=by_cpu("prompts")),
        Line("plain_memory", f"{crowd}, memory", pick("plain", "memory_mb"), MAX_MEMORY_MB, fewer_is_better=True, unit="MB", beside=f"{size.plain:,} messages kept"),
        Line("prompts_memory", f"{crowd}, memory, prompts rendered", pick("prompts", "memory_mb"), MAX_MEMORY_MB, fewer_is_better=True, unit="MB", beside=f"{size.prompts:,} messages kept"),
        Line("turns", f"{size.reacting} agents with turns and records, messages a second", pick("turns", "per_wall_s"), beside=by_cpu("turns")),
        Line("scenario", "a small scenario", pick("scenario", "median_ms"), MAX_SCENARIO_MS, fewer_is_better=True, unit="ms", beside=f"the first in a process {statistics.median(pick('scenario', 'first_ms')):.0f} ms"),
    ]  # fmt: skip
    return {
        "machine": asdict(machine),
        "rounds": rounds,
        "size": asdict(size),
        "took_s": round(time.monotonic() - started_s),
        "table": [line.to_plain() for line in lines],
    }


def describe_run(results: Results) -> str:
    facts = MachineFacts(**results["machine"])
    return (
        f"{facts.cpu_model}, {facts.cores} cores, {facts.kernel}, {facts.python}\n"
        f"{results['rounds']} rounds, {results['took_s']} s"
    )


def main() -> None:
    quick, rounds = "a look, not a measurement", "how often each measure is taken"
    parser = make_parser(__doc__, SIZES, quick=quick, rounds=rounds)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = pick_size(options, SIZES)
    if options.measure:
        print(json.dumps(list_measures(size)[options.measure]()))
        return
    name = "quick" if options.quick else options.size
    tell_results(options, lambda: run(name, size, rounds=options.rounds or size.rounds), describe_run)


if __name__ == "__main__":
    main()
