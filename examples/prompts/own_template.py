"""Your own conversation template instead of the XML of the default prompt.

Run it: python examples/prompts/own_template.py

It prints:

    direct:ann~mia
    mia: Good morning
    ann: Good morning, mia!
    Now mia says: And good night
    ann: Good night, mia!
"""

import asyncio
import tempfile
from pathlib import Path

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.models import ModelRequest, ScriptedModel
from roundelay.agents.models.scripted import Action, say

TEMPLATE = """
{%- for thread_id, thread in message_threads.items() -%}
{{ thread_id }}
{% for message in thread.messages %}{{ message.sender_id }}: {{ message.text }}
{% endfor %}{% endfor -%}
Now {{ incoming_message.sender_id }} says: {{ incoming_message.text }}"""


def answer(request: ModelRequest) -> Action:
    prompt = request.messages[1].content
    if "night" in prompt:
        print(prompt)
    return say("Good night, mia!" if "night" in prompt else "Good morning, mia!")


async def main(template: Path) -> None:
    ann = SimpleAgentRunner("ann", instruction="You greet.", model=ScriptedModel(answer), template=template)
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        for text in ("Good morning", "And good night"):
            await mia.send_text("ann", text)
            async with mia.receive() as message:
                last = message
        print(f"{last.sender_id}: {last.text}")


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "conversation.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    asyncio.run(main(path))
