"""An answer of a type. A value that does not fit goes back to the model with what is wrong.

Run it: python examples/answers/structured.py

It prints:

    ann: {"order":12,"total_eur":40.0}
    the program reads 40.0 EUR for order 12
"""

import asyncio

from pydantic import BaseModel, Field

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call


class Bill(BaseModel):
    order: int
    total_eur: float = Field(ge=0)


def write(request: ModelRequest) -> Action:
    total = -40 if read_prompt(request).turn == 1 else 40  # the first value is refused
    return call("give_answer", answer={"order": 12, "total_eur": total})


bill = StructuredAnswer(Bill)
ann = SimpleAgentRunner("ann", instruction="You write bills.", model=ScriptedModel(write), middleware=[bill])


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "The bill for order 12, please.")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")
            value = bill.read(message)
            print(f"the program reads {value.total_eur} EUR for order {value.order}")


asyncio.run(main())
