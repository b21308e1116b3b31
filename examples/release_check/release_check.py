"""A lead asks three reviewers for a typed verdict, hands out work, and reports when nothing is open any more.

Run it: python examples/release_check/release_check.py

It prints:

    2 of 3 answered; missing: cat (its answer is not JSON: 'I would have to look into it.').

    <answer sender="ann">{"ready": true, "days": 0}</answer>

    <answer sender="bob">{"ready": false, "days": 2}</answer>
    All done: nothing of this conversation is open at anybody else.
    All done.
"""

from __future__ import annotations

import asyncio

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.lead_tools import gather, wait_until_quiet
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Answer, call, finish, say, send

VERDICT = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}, "days": {"type": "integer"}},
    "required": ["ready", "days"],
}
ANSWERS = {
    "ann": '{"ready": true, "days": 0}',
    "bob": '{"ready": false, "days": 2}',
    "cat": "I would have to look into it.",
    "writer": "The notes are written.",
}


def lead(request: ModelRequest) -> Answer:
    view = read_prompt(request)
    if view.incoming_sender != "mia":  # the writer's report
        return finish()
    if view.turn == 1:
        question = "Is the release ready?"
        return call("gather", agent_ids=["ann", "bob", "cat"], text=question, schema=VERDICT)
    if view.turn == 2:
        return send("writer", "Write the notes of the release.")
    if view.turn == 3:
        return call("wait_until_quiet", timeout_s=60)
    verdict, _, rest = view.tool_results
    return [say(f"{verdict.content}\n{rest.content}"), finish()]


def make_worker(agent_id: str, answer: str) -> SimpleAgentRunner:
    return SimpleAgentRunner(agent_id, instruction="You help.", model=ScriptedModel(lambda _: [say(answer), finish()]))


async def main() -> None:
    tools = [gather, wait_until_quiet]
    runners = [SimpleAgentRunner("lead", instruction="You lead.", model=ScriptedModel(lead), tools=tools)]
    runners += [make_worker(agent_id, answer) for agent_id, answer in ANSWERS.items()]
    async with Network.open() as network, network.run(*runners):
        mia = await network.join("mia", kind="human")
        question = await mia.send_text("lead", "Can we release?")
        async with mia.receive() as message:
            print(message.text)
        found = await mia.wait_until_quiet(question.seq, timeout_s=60)
        print("All done." if found.is_quiet else f"Still open: {found.items}")


asyncio.run(main())
