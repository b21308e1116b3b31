"""Prompts as templates: facts, notes about tools, and your own text for every turn.

Run it: python examples/prompts/templates.py

It prints:

    system: Project Atlas. Answer in French. Library search: Search before you answer.
    end of turn 1: Turn 1 of 4.
    ann: Bonjour
"""

import asyncio

from roundelay import AgentPolicy, Network, SimpleAgentRunner, tool
from roundelay.agents.features.prompts import PromptFacts, Prompts, ToolNotes
from roundelay.agents.models import ModelRequest, ScriptedModel
from roundelay.agents.models.scripted import Action, say

SYSTEM = """Project {{ project_name }}. {{ custom_instructions }}
{%- for it in tools if it.system_prompt %} {{ it.display_name }}: {{ it.system_prompt }}{% endfor %}"""


@tool(idempotent=True)
def search(topic: str) -> str:
    """Search the library."""
    return f"one book on {topic}"


def write(request: ModelRequest) -> Action:
    first, *_, last = request.messages
    print("system:", first.content.splitlines()[-1])
    print("end of turn 1:", last.content.splitlines()[-1])
    return say("Bonjour")


ann = SimpleAgentRunner(
    "ann",
    instruction="You know maps.",
    model=ScriptedModel(write),
    tools=[search],
    policy=AgentPolicy(max_turns=4),
    middleware=[
        Prompts(
            system=SYSTEM,
            turn="Turn {{ turn }} of {{ max_turns }}.",
            notes={"search": ToolNotes(display_name="Library search", system_prompt="Search before you answer.")},
            facts=PromptFacts(project_name="Atlas", custom_instructions="Answer in French."),
        )
    ],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "Hello!")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
