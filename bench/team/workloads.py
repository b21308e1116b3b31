"""The workloads of `./dev bench team`: which agent is asked which question, and the right answers.

This module runs in the environment of every system, so it imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

WORKERS = [f"bob{number}" for number in range(5)]
PADDING = " Please take your time, and answer in plain words, as you would at a desk."


@dataclass(frozen=True)
class Workload:
    """One workload. ``agents`` are the agents that answer. With ``shares_thread``, each agent has one conversation for
    all questions. Otherwise each question begins a new conversation.
    """

    title: str
    questions: int
    agents: tuple[str, ...] = ("ann",)
    parallel: int = 1
    uses_tool: bool = False
    shares_thread: bool = False
    quick_questions: int = 20
    warm_ups: int = 3

    @property
    def is_team(self) -> bool:
        return len(self.agents) > 1 and self.uses_tool


WORKLOADS = {
    "w1": Workload("one tool call", 100, uses_tool=True),
    "w2": Workload("team of six", 15, ("ann", *WORKERS), uses_tool=True, quick_questions=5),
    "w3": Workload("channel of ten", 40, tuple(f"bob{number}" for number in range(10)), shares_thread=True),
    "w4": Workload("long thread", 200, shares_thread=True, quick_questions=120, warm_ups=0),
    "w5": Workload(
        "200 agents",
        200,
        tuple(f"bob{number}" for number in range(200)),
        shares_thread=True,
        warm_ups=0,
    ),
    "w6": Workload("start", 1, uses_tool=True, quick_questions=1, warm_ups=0),
    "w7": Workload("1,000 conversations", 1000, quick_questions=120),
    "w8": Workload("32 at once", 128, parallel=32, uses_tool=True, quick_questions=64),
}
GROWING = ("w4", "w7")
"""Workloads in which the last answers are compared with the first answers."""
EDGE = 50
"""Number of first answers and of last answers that are compared."""


def target(work: str, number: int) -> str:
    """Return the agent to which question ``number`` is sent."""
    agents = WORKLOADS[work].agents
    return "ann" if "ann" in agents else agents[number % len(agents)]


def conversation(work: str, number: int) -> str:
    if work == "w3":
        return "room"
    return target(work, number) if WORKLOADS[work].shares_thread else f"c{number}"


def question(work: str, number: int) -> str:
    text = f"Q{number}: {number % 97}+{number % 13}"
    if work == "w3":
        text = f"@{target(work, number)} {text}"
    return text + (PADDING if work in ("w3", "w4") else "")


def expected(work: str, number: int) -> str:
    total = number % 97 + number % 13
    return f"A{number}: {5 * total} of 5." if WORKLOADS[work].is_team else f"A{number}: {total}."


def model_name(work: str, agent: str) -> str:
    """Return the name of the fake model. The name determines how the model answers."""
    workload = WORKLOADS[work]
    if workload.is_team:
        return f"lead:{agent}" if agent == "ann" else f"worker:{agent}"
    return f"tool:{agent}" if workload.uses_tool else f"chat:{agent}"


def instruction(agent: str) -> str:
    return f"You are {agent}. Do what you are asked, with your tools only."


def has_adder(work: str, agent: str) -> bool:
    """Return whether this agent has the tool `add`."""
    workload = WORKLOADS[work]
    return workload.uses_tool and not (workload.is_team and agent == "ann")


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b
