"""The turn flow of one agent: an instruction that is computed for each turn, fragments that tools gather and that the
next turn shows, an agent as a tool, and a handoff after which only the other agent's instruction counts.

Run it: python examples/handoff_flow/flow.py

It prints:

    mia: Where is my refund?
      turn_start
        system: You are xyne. Answers from the company's documents. Use your tools first, and cite. Tools used: 0.
        fragments: none
      tool_requests
      tool_call_start search_global
      tool_call_end search_global
      turn_end
      turn_start
        system: You are xyne. Answers from the company's documents. Use your tools first, and cite. Tools used: 1.
        fragments: Refunds
      tool_requests
      tool_call_start translator
      tool_call_end translator
      turn_end
      turn_start
        system: You are xyne. Answers from the company's documents. Use your tools first, and cite. Tools used: 2.
        fragments: Refunds
      tool_requests
      turn_end
      handoff
      turn_start
        system: You are billing.
      turn_end
    xyne: Your refund comes this week.
    mia: Thank you. When exactly?
      turn_start
        system: You are billing.
      turn_end
    xyne: On Friday.
"""

import asyncio
from collections.abc import Sequence

from roundelay import AgentPolicy, Network, SimpleAgentRunner, tool
from roundelay.agents import Agent, Event, Handoff, Output, TurnState, agent_tool
from roundelay.agents.events import HandedOver, ToolCallEnd, ToolCallStart, ToolRequests, TurnEnd, TurnStart
from roundelay.agents.features.fragments import Fragment, Fragments
from roundelay.agents.features.references import References
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say

PROFILE = {"description": "Answers from the company's documents.", "scopes": ["wiki"]}


def instruct(state: TurnState) -> str:
    """Return the system message of this turn: a function of the run's state, called for each turn."""
    return f"You are xyne. {PROFILE['description']} Use your tools first, and cite. Tools used: {sum(state.calls.values())}."


def keep_relevant(fragments: Sequence[Fragment], state: TurnState) -> Sequence[Fragment]:
    """Filter and rank what the tools found."""
    return sorted((it for it in fragments if it.score > 0.2), key=lambda it: -it.score)


@tool(idempotent=True)
def search_global(query: str) -> Output:
    """Search the company's documents."""
    found = [
        {"id": "w7", "title": "Refunds", "text": "Refunds take 5 days.", "score": 0.9},
        {"id": "w9", "title": "Lunch", "text": "Soup on Mondays.", "score": 0.1},
    ]
    return Output(f"2 documents on {query}.", {"fragments": found})


def plan(request: ModelRequest) -> Action:
    view = read_prompt(request)
    system = request.messages[0].content
    print(f"    system: {system.splitlines()[0]}")
    shown = [title for title in ("Refunds", "Lunch") if title in str(request.messages)]
    print(f"    fragments: {', '.join(shown) or 'none'}")
    match view.turn:
        case 1:
            return call("search_global", query="refunds")
        case 2:
            return call("translator", task="Refunds take 5 days.")
    return call("hand_over_to_billing", note="She waits for a refund.")


def bill(request: ModelRequest) -> Action:
    print(f"    system: {request.messages[0].content.splitlines()[0]}")
    return say("On Friday." if "exactly" in read_prompt(request).incoming_text else "Your refund comes this week.")


translator = Agent("translator", "You translate.", ScriptedModel(lambda request: "Rembours en 5 jours."))
billing = Agent("billing", "You are billing.", ScriptedModel(bill), description="Knows the bills.")


def show(event: Event) -> None:
    if not event.path and isinstance(
        event, TurnStart | ToolRequests | ToolCallStart | ToolCallEnd | TurnEnd | HandedOver
    ):
        print(f"  {event.type} {getattr(event, 'tool', '')}".rstrip())


xyne = SimpleAgentRunner(
    "xyne",
    instruction=instruct,
    model=ScriptedModel(plan),
    tools=[search_global, agent_tool(translator)],
    handoffs=[Handoff(billing, history="all", returns="never")],
    middleware=[References(), Fragments(limit=5, rank=keep_relevant)],
    policy=AgentPolicy(max_turns=10),
    on_event=show,
)


async def main() -> None:
    async with Network.open() as network, network.run(xyne):
        mia = await network.join("mia", kind="human")
        for text in ("Where is my refund?", "Thank you. When exactly?"):
            print(f"mia: {text}")
            await mia.send_text("xyne", text)
            async with mia.receive() as message:
                print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
