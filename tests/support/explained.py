"""Generate ``explanations.json``: a node's explanations of a small run that is the same each time.

Tests of the web page render these answers, so that node and page agree on their structure. Regenerate the file after
a change of the structure with ``python -m tests.support.explained``.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from roundelay.agents.features.evaluations import Evaluations
from roundelay.agents.models.model import ModelReply, ModelRequest, ToolCall, Usage
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.models.tokens import Price, Prices
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.runs.node_answers import NodeRunReader
from roundelay.simulation import Setting, Simulation, simulate

PATH = Path(__file__).parent / "explanations.json"
PRICES = Prices({"scripted": Price(input=Decimal(2), output=Decimal(4))})


@tool(needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay."""
    return f"{amount} paid to {to}"


def no_promises(answer: str, *_: object) -> str | None:
    return "Promise nothing." if "guarantee" in answer else None


def reply(text: str | None, *calls: ToolCall) -> ModelReply:
    """Return a reply with a constant token usage, independent of the prompt's length."""
    return ModelReply(text, calls, Usage(100, 10), model="scripted")


def serve_desk(request: ModelRequest) -> ModelReply:
    turns = [
        reply(None, ToolCall("c1", "ask", '{"agent_ids": ["finance"], "text": "May I?"}')),
        reply(None, ToolCall("c2", "pay", '{"to": "ann", "amount": 5}')),
        reply("I guarantee it."),
        reply("Paid."),
    ]
    return turns[min(request.turn, len(turns)) - 1]


def make_desk() -> SimpleAgentRunner:
    return SimpleAgentRunner(
        "desk",
        instruction="Refund.",
        model=ScriptedModel(serve_desk),
        tools=[pay],
        middleware=[Evaluations(always=[no_promises])],
    )


def make_finance() -> SimpleAgentRunner:
    return SimpleAgentRunner("finance", instruction="Check.", model=ScriptedModel(lambda request: reply("Yes, 40 EUR")))


async def play(simulation: Simulation) -> dict[str, Any]:
    """Play the run, and query all explanations as an operator."""
    await simulation.start_agent(make_desk)
    await simulation.start_agent(make_finance)
    mia = await simulation.join_person("mia")
    boss = await simulation.join_person("boss")
    simulation.hub.view.run_reader = NodeRunReader(PRICES)
    await mia.client.send_text("desk", "Refund order 12")
    await simulation.idle()
    await mia.client.reply(mia.heard[-1], '/edit {"to": "ann", "amount": 4}')
    await simulation.idle()
    answer = mia.heard[-1]
    assert answer.text == "Paid."
    ask = boss.client.call
    explained = await ask("network.explain", {"seq": answer.seq})
    effects = await ask("network.effects", {"seq": explained["steps"][-1]["message"]["seq"]})
    [reaction] = effects["reactions"]
    name = {"reaction": reaction["reaction"], "agent_id": reaction["agent_id"]}
    return {
        "network.explain": explained,
        "network.effects": effects,
        "network.work": await ask("network.work", name),
        "network.cost_report": await ask("network.cost_report", {"by": "agent"}),
    }


def make_answers() -> dict[str, Any]:
    answers = simulate(play, Setting(seed=7, operators=("boss",)))
    decoded: dict[str, Any] = json.loads(json.dumps(answers))
    return decoded


if __name__ == "__main__":
    PATH.write_text(json.dumps(make_answers(), indent=1) + "\n", encoding="utf-8")
