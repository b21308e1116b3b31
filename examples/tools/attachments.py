"""An image in a message, for a model that takes images.

Run it: python examples/tools/attachments.py

It prints:

    the model gets data:image/png
    ann: A very small picture.
"""

import asyncio
import base64

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.features.attachments import Attachments
from roundelay.agents.models import ModelRequest, ScriptedModel
from roundelay.agents.models.model import UserMessage

PICTURE = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


def look(request: ModelRequest) -> str:
    images = [image for it in request.messages if isinstance(it, UserMessage) for image in it.images]
    print("the model gets", *(image.partition(";")[0] for image in images))
    return "A very small picture."


ann = SimpleAgentRunner(
    "ann", instruction="You describe pictures.", model=ScriptedModel(look), middleware=[Attachments(["image"])]
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send("agent:ann", {"text": "What is this?", "images": [PICTURE]})
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
