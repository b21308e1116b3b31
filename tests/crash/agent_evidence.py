"""A reaction that is killed: the possible places, the messages in it, and the evidence that it leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tests.crash.agent_process import AgentProcess
from tests.support.fake_openai import Reply, calls, text
from tests.support.openai_rules import Body
from tests.support.processes import Asked

When = Literal["before", "unanswered", "after"]
"""Time of a kill. For a frame to the hub, "before" means that it is not forwarded, "unanswered" that its answer is
not forwarded, and "after" that its answer is. For everything else: before and after it.
"""


class Point(NamedTuple):
    """A point in a reaction at which a process ends."""

    what: str
    when: When


def points_of(*steps: str) -> list[Point]:
    """Return every point of these steps."""
    return [Point(step, when) for step in steps for when in _WHENS[step.split()[0] in _UNANSWERABLE]]


_WHENS: dict[bool, tuple[When, ...]] = {True: ("before", "after"), False: ("before", "unanswered", "after")}
_UNANSWERABLE = ("delivery", "reply", "model", "ring", "weigh")


# -- the conversation


def decide(asked: Asked, body: Body) -> Reply:
    """Return the model's reply. In an errand, the model rings, weighs, writes to bob and to the channel, and answers.
    Otherwise, the model asks bob.
    """
    word = asked.incoming
    match word.split()[0], asked.turn:
        case "errand", 1:
            return calls([("ring", {})])
        case "errand", 2:
            wanted = [
                ("weigh", {"what": word}),
                ("send_text_message", {"target_agent_id": "bob", "text": f"{word}, bob"}),
                ("channels_post", {"name": "dev", "text": f"{word}, dev"}),
            ]
            return calls(wanted)
        case "errand", 3:
            return text(f"{word}, done")
        case "ask", 1:
            return calls([("ask", {"agent_ids": ["bob"], "text": f"{word}?", "timeout_s": 60})])
        case "ask", 2:
            return text(f"{word}, done: {tool_result(body)}")
    raise AssertionError(f"nobody should ask this: {asked}")


def tool_result(body: Body) -> str:
    """Return the first tool result in a request."""
    return next(str(it["content"]) for it in body["messages"] if it["role"] == "tool")


# -- the evidence


@dataclass(frozen=True)
class Ledger:
    """The records of a reaction at one moment."""

    records: Sequence[Any]

    def count(self) -> Counter[str]:
        return Counter(it["kind"] for it in self.records)

    def has(self, kind: str, turn: int, call: int | None = None) -> bool:
        return any(
            it["kind"] == kind and it["body"]["turn"] == turn and it["body"].get("call") == call for it in self.records
        )

    def turns(self) -> set[int]:
        """Turns with a recorded reply."""
        return {it["body"]["turn"] for it in self.records if it["kind"] == "model_reply"}


@dataclass
class Evidence:
    """Effects of one message to the agent. ``ledgers`` has an entry for each kill, and a last one for the end.
    ``asked`` has the requests to the model in each process.
    """

    word: str
    seq: int
    reaction: str
    lives: list[AgentProcess] = field(default_factory=list)
    ledgers: list[Ledger] = field(default_factory=list)
    asked: list[list[Body]] = field(default_factory=list)
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The agent's messages because of it, as (recipient, text)."""

    rings: int = 0

    @property
    def kills(self) -> int:
        return len(self.ledgers) - 1

    def turns(self, life: int) -> list[int]:
        """Return the turns of the requests to the model in one process."""
        return [Asked.read(body).turn for body in self.asked[life]]

    def requests(self, turn: int) -> list[Body]:
        """Return the requests of one turn, in all processes."""
        return [body for life in self.asked for body in life if Asked.read(body).turn == turn]
