"""A lead splits a job into tasks, and two workers share them.

The lead creates three tasks. The third one waits for the others, so it is the last. Each task wakes the worker who holds
the fewest tasks. One worker gives its first task back, and the other one gets it.

Run it: python examples/task_board/board.py

It prints:

    Find the sources: 12 sources
      bob: open again: bob has declined it: I have no library.
    Write the draft: 4 pages
    Send the report: sent
"""

import asyncio
import re

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say

WORKERS = ["bob", "ann"]
RESULTS = {"Find the sources": "12 sources", "Write the draft": "4 pages", "Send the report": "sent"}


def work(name: str) -> ScriptedModel:
    """A model that does each task, except that bob gives back the sources."""

    def think(request: ModelRequest) -> Action:
        prompt = read_prompt(request)
        if prompt.tool_results:
            return say("")
        title = next(title for title in RESULTS if title in prompt.incoming_text)
        number = int(re.findall(r"Task (\d+)", prompt.incoming_text)[-1])
        if name == "bob" and title == "Find the sources":
            return call("tasks_release", task=number, reason="I have no library.")
        return call("tasks_complete", task=number, result=RESULTS[title])

    return ScriptedModel(think)


async def main() -> None:
    workers = [SimpleAgentRunner(name, instruction="Do your tasks.", model=work(name)) for name in WORKERS]
    async with Network.open(mods=["channels", "discovery", "tasks"]) as network, network.run(*workers):
        lead = await network.join("lead")
        tasks: list[int] = []
        for title in RESULTS:
            after = tasks if title == "Send the report" else []
            task = await lead.call("tasks.create", {"title": title, "pool": WORKERS, "depends_on": after})
            tasks.append(task["task"])
        # The lead gets a message for each task that ends or is open again.
        last = ""
        while not last.startswith(f"Task {tasks[-1]} "):
            async with lead.receive() as message:
                last = message.text
        for number in tasks:
            task = await lead.call("tasks.get", {"task": number})
            print(f"{task['title']}: {task['result']}")
            for event in task["events"]:
                if "again" in event["text"]:
                    print(f"  {event['by']}: {event['text']}")


asyncio.run(main())
