"""A run with all kinds of work: a question to another agent, an agent called as a tool, an approval that edits the
call, a handoff, and an answer that reviewers send back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.evaluations import Evaluations
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import ScriptedModel, call, say
from roundelay.agents.tools import tool
from roundelay.app import Network
from tests.support.agents import Heard, Person, make_runner, running

EDITED = '{"to": "ann", "amount": 4}'
LAST = "Refunded.\x1b[2J"


@tool
def look(what: str) -> str:
    """Look."""
    return f"{what}: 40 EUR"


@tool(needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay."""
    return f"{amount} paid to {to}"


def no_promises(answer: str, *_: object) -> str | None:
    return "Promise nothing." if "guarantee" in answer else None


def by_turn(*turns: Any) -> Any:
    return lambda request: turns[min(request.turn, len(turns)) - 1]


def work(request: ModelRequest) -> Any:
    if read_prompt(request).incoming_text != "Refund order 12":
        return say("hello")
    turns = [
        [
            call("look", what="order 12"),
            call("ask", agent_ids=["finance"], text="May I?"),
            call("auditor", task="Check"),
        ],
        call("pay", to="ann", amount=5),
        call("hand_over_to_billing", note="It is paid."),
    ]
    return turns[request.turn - 1]


@dataclass
class Run:
    """A finished run on a network that is still open, with the seqs of its messages by text."""

    network: Network
    db: Path
    seqs: dict[str, int]

    def seq(self, text: str) -> int:
        return next(seq for said, seq in self.seqs.items() if said.startswith(text))


@asynccontextmanager
async def refund(db: Path) -> AsyncIterator[Run]:
    inner = Agent("auditor", "", ScriptedModel(by_turn(call("look", what="books"), say("Sound."))), [look])
    billing = ScriptedModel(lambda request: say("I guarantee it." if request.turn == 4 else LAST))
    checks = [Evaluations(always=[no_promises])]
    heard = Heard()
    desk = make_runner(
        "desk",
        work,
        tools=[look, pay, agent_tool(inner)],
        on_event=heard,
        handoffs=[Handoff(Agent("billing", "", billing, middleware=checks))],
    )
    finance = make_runner("finance", lambda request: say("Yes, 40 EUR"))
    async with Network.open(db) as network:
        mia = await Person.join(network, "mia")
        async with running(network, desk, finance):
            asked = await mia.ask("desk", "Refund order 12")
            await mia.client.reply(asked, f"/edit {EDITED} ")  # type: ignore[arg-type]  # a person hears messages of every kind
            answer = await mia.hear()
            await heard.finished()
        boss = await network.join("boss", kind="human")
        page = await boss.call("network.log", {"limit": 500})
        seqs = {str(it["content"]): int(it["seq"]) for it in page["messages"]}
        assert seqs[LAST] == answer.seq
        yield Run(network, db, seqs)
