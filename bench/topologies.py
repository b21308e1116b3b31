"""What conversations of real shapes need of the limits that stop loops: hops, messages, turns, threads.

    ./dev bench topologies [--json FILE]

Agents in one process, their models scripted, no limit in their way, and nothing is timed. Chains of up to 40 agents, trees, stars and
fan-outs, each worked through by `ask`, by handing over, and by plain messages there and back, to all at once or one after the other, once and in three rounds. Counted is what
one person's message came to. The table stands in docs/decisions/limits-of-loops.md, beside what follows from it for the defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundelay.agents import AgentPolicy, SimpleAgentRunner
from roundelay.agents.agent_tools import remote_handoff
from roundelay.agents.events import Event, Finished
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import ScriptedModel, call, finish, send
from roundelay.agents.text import handoff_name
from roundelay.app import Network
from roundelay.network.config import Limits

ROUNDS = (1, 3)
ASKED_AT_ONCE = 16
"""The most that one `ask` asks."""
PATIENCE_S = 300.0
NO_LIMITS = Limits(
    max_hops=10**6, max_root_messages=10**6, root_messages_per_s=10**6, sends_per_s=10**6, messages_per_day=10**6
)
POLICY = AgentPolicy(max_turns=1000, max_tool_calls_per_turn=1000, max_threads=100)

Tree = Mapping[str, Sequence[str]]
"""The children of each agent; ``a0`` is the root."""


@dataclass(frozen=True)
class Need:
    """What one message of a person came to."""

    shape: str
    way: str
    rounds: int
    agents: int
    hops: int
    messages: int
    turns: int
    """The most of one reaction."""
    threads: int
    """The most of one agent."""
    calls: int
    """The most of one turn."""


def make_tree(*widths: int) -> Tree:
    """Each agent of a level has so many children."""
    children: dict[str, list[str]] = {"a0": []}
    level = ["a0"]
    for width in widths:
        below: list[str] = []
        for parent in level:
            for _ in range(width):
                name = f"a{len(children)}"
                children[parent].append(name)
                children[name] = []
                below.append(name)
        level = below
    return children


SHAPES: dict[str, Tree] = {
    "chain of 5": make_tree(*[1] * 4),
    "chain of 14": make_tree(*[1] * 13),
    "chain of 40": make_tree(*[1] * 39),
    "tree of 5": make_tree(2, 1),
    "tree of 9": make_tree(2, 3),
    "tree of 22": make_tree(3, 6),
    "star of 22": make_tree(21),
    "fan-out to 50": make_tree(50),
    "fan-out to 100": make_tree(100),
}


class _Way:
    """How the agents pass their work on: the script of each, for so many rounds of the root's."""

    def __init__(self, tree: Tree, rounds: int) -> None:
        self.tree = tree
        self.rounds = rounds

    def tools(self, agent_id: str) -> list[Any]:
        return []

    def answer(self, agent_id: str, request: ModelRequest) -> Any:
        raise NotImplementedError

    def _left(self, agent_id: str, request: ModelRequest) -> bool:
        """Whether there is another round to begin in this reaction."""
        return bool(self.tree[agent_id]) and request.turn <= (self.rounds if agent_id == "a0" else 1)


class _Ask(_Way):
    def answer(self, agent_id: str, request: ModelRequest) -> Any:
        if not self._left(agent_id, request):
            return "done"
        below = list(self.tree[agent_id])
        groups = [below[at : at + ASKED_AT_ONCE] for at in range(0, len(below), ASKED_AT_ONCE)]
        return [call("ask", agent_ids=group, text=f"round {request.turn}") for group in groups]


class _AskInTurn(_Way):
    """One after the other, as careful models do."""

    def answer(self, agent_id: str, request: ModelRequest) -> Any:
        below = self.tree[agent_id]
        if not below or request.turn > len(below) * (self.rounds if agent_id == "a0" else 1):
            return "done"
        return call("ask", agent_ids=[below[(request.turn - 1) % len(below)]], text=f"step {request.turn}")


class _HandOver(_Way):
    def tools(self, agent_id: str) -> list[Any]:
        return [remote_handoff(it, returns="to_caller") for it in self.tree[agent_id]]

    def answer(self, agent_id: str, request: ModelRequest) -> Any:
        if not self._left(agent_id, request):
            return "done"
        return [call(handoff_name(it), note=f"round {request.turn}") for it in self.tree[agent_id]]


class _Send(_Way):
    """Plain messages: down, and back up when all below have answered. Each is a reaction of its own."""

    def __init__(self, tree: Tree, rounds: int) -> None:
        super().__init__(tree, rounds)
        self._parents = {child: parent for parent, below in tree.items() for child in below}
        self._missing: dict[tuple[str, int], set[str]] = {}

    def answer(self, agent_id: str, request: ModelRequest) -> Any:
        if request.turn > 1:
            return finish()
        view = read_prompt(request)
        found = re.fullmatch(r"(down|up) (\d+)", view.incoming_text)
        way, number = (found[1], int(found[2])) if found is not None else ("down", 1)
        if way == "down":
            return self._pass_down(agent_id, number)
        missing = self._missing[agent_id, number]
        missing.discard(view.incoming_sender)
        if missing:
            return finish()
        if agent_id == "a0" and number < self.rounds:
            return self._pass_down(agent_id, number + 1)
        return self._pass_up(agent_id, number)

    def _pass_down(self, agent_id: str, number: int) -> Any:
        below = self.tree[agent_id]
        if not below:
            return self._pass_up(agent_id, number)
        self._missing[agent_id, number] = set(below)
        return [send(it, f"down {number}") for it in below]

    def _pass_up(self, agent_id: str, number: int) -> Any:
        """Say to whoever gave the work that it is done."""
        return send(self._parents.get(agent_id, "mia"), f"up {number}")


class _SendInTurn(_Send):
    """The next one hears of it when the one before is done, so that each message follows from all before it."""

    def answer(self, agent_id: str, request: ModelRequest) -> Any:
        view = read_prompt(request)
        found = re.fullmatch(r"up (\d+)", view.incoming_text)
        if request.turn > 1 or found is None:
            return super().answer(agent_id, request)
        number, below = int(found[1]), list(self.tree[agent_id])
        place = below.index(view.incoming_sender) + 1
        return send(below[place], f"down {number}") if place < len(below) else super().answer(agent_id, request)

    def _pass_down(self, agent_id: str, number: int) -> Any:
        below = self.tree[agent_id]
        if not below:
            return self._pass_up(agent_id, number)
        self._missing[agent_id, number] = {below[-1]}
        return send(below[0], f"down {number}")


WAYS: dict[str, Callable[[Tree, int], _Way]] = {
    "ask": _Ask, "ask in turn": _AskInTurn, "hand over": _HandOver, "send": _Send, "send in turn": _SendInTurn,
}  # fmt: skip


async def measure(shape: str, way_name: str, rounds: int) -> Need:
    """Let a team of this shape work on one message of a person."""
    tree = SHAPES[shape]
    way = WAYS[way_name](tree, rounds)
    most = {"turns": 0, "calls": 0}

    def listen(event: Event) -> None:
        if isinstance(event, Finished):
            most["turns"] = max(most["turns"], event.turns)

    def make_script(agent_id: str) -> Callable[[ModelRequest], Any]:
        def answer(request: ModelRequest) -> Any:
            given = way.answer(agent_id, request)
            most["calls"] = max(most["calls"], len(given) if isinstance(given, list) else 1)
            return given

        return answer

    async with asyncio.timeout(PATIENCE_S), Network.open(limits=NO_LIMITS) as network, asyncio.TaskGroup() as group:
        mia = await network.join("mia", kind="human")
        runners = [
            SimpleAgentRunner(
                it,
                instruction="Work.",
                model=ScriptedModel(make_script(it)),
                tools=way.tools(it),
                policy=POLICY,
                on_event=listen,
            )
            for it in tree
        ]
        for runner in runners:
            client = await network.join(runner.agent_id, role="reactor", card=runner.describe_card())
            group.create_task(runner.run(client))
        await asyncio.gather(*(it.ready() for it in runners))
        root = (await mia.send_text("a0", "work")).seq
        await anext(mia.__aiter__())
        for runner in runners:
            await runner.stop()
        messages = await _read_log(mia, root)
    around: dict[str, set[str]] = {}
    for message in messages:
        for name in message["thread_id"].removeprefix("direct:").split("~"):
            around.setdefault(name, set()).add(message["thread_id"])
    around.pop("mia")
    return Need(
        shape, way_name, rounds, len(tree), max(it["hops"] for it in messages), len(messages), most["turns"],
        max(map(len, around.values())), most["calls"],
    )  # fmt: skip


async def _read_log(client: Any, root: int) -> list[dict[str, Any]]:
    after, messages = 0, []
    while after is not None:
        page = await client.call("network.log", {"after": after, "limit": 500})
        messages += [it for it in page["messages"] if it["root"] == root]
        after = page["next"] if page["next"] < page["head"] else None
    return messages


def list_cases(shapes: Sequence[str]) -> list[tuple[str, str, int]]:
    """What there is to measure. To hand over to many at once is no handing over: chains and trees alone do."""
    return [
        (shape, way, rounds)
        for shape in shapes
        for way in WAYS
        for rounds in ROUNDS
        if not (way == "hand over" and not shape.startswith(("chain", "tree")))
        and not (way in ("ask in turn", "send in turn") and shape.startswith("chain"))
    ]


def tell(needs: Sequence[Need]) -> str:
    """The table, as Markdown."""
    lines = [
        "| shape | way | rounds | hops | messages | turns | threads | calls in a turn |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {it.shape} | {it.way} | {it.rounds} | {it.hops} | {it.messages} | {it.turns} | {it.threads} | {it.calls} |"
        for it in needs
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="this shape alone; may be given again")
    parser.add_argument("--json", type=Path, help="write what was counted into this file")
    options = parser.parse_args()
    needs = [asyncio.run(measure(*case)) for case in list_cases(options.shape or list(SHAPES))]
    print(tell(needs))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(it) for it in needs], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
