"""An orchestrator with all its managers: forced tools, a registry, MCP, an agent as a tool, references, progress,
debug info, evaluations, postprocessors, prompts as templates, and a tool that takes over the answer.

Run it: python examples/orchestrator/orchestrator.py

It prints:

    turn 1 of 6
      ... reading Rivers of Europe
    turn 2 of 6
      shop_price {"article": "map"}
      analyst {"task": "Compare the Rhine with the Elbe."}
    turn 3 of 6
      ... checks its answer
      not accepted: - 900 km
    turn 4 of 6
      ... checks its answer
    ann: The Rhine is 1,233 km long [1]. A map costs 3 EUR.
    sources: [1] Rivers of Europe
    passed: grounding, no_promises
    ask next: And the Elbe?
    quotes: {'MAPS': 41.2}
    debug of search: {'took_ms': 12}
    turn 1 of 6
      deep_research {"topic": "rivers"}
      ... checks its answer
    ann: Report on rivers: they flow.
"""

import asyncio
import json
import sys
from pathlib import Path

from roundelay import AgentPolicy, Network, NetworkClient, SimpleAgentRunner, ToolContext, tool
from roundelay.agents import Agent, Answer, Event, NamedTool, Output, agent_tool
from roundelay.agents.events import AnswerReviewed, Progress, ToolCallStart, TurnStart
from roundelay.agents.features.evaluations import Evaluations, Grounding, Rule
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.features.mcp_servers import McpServers, ServerOptions
from roundelay.agents.features.postprocessors import FollowUps, Postprocessors
from roundelay.agents.features.prompts import PromptFacts, Prompts, ToolNotes
from roundelay.agents.features.references import References
from roundelay.agents.features.registry import ToolRegistry
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say

PRICES = Path(__file__).parents[1] / "tools" / "price_server.py"


@tool(idempotent=True, selection_rule="For facts about rivers.")
def search(context: ToolContext, topic: str) -> Output:
    """Search the library."""
    context.report("reading Rivers of Europe")
    found = {"id": "b12", "title": "Rivers of Europe", "text": "The Rhine is 1,233 km long."}
    return Output(f"One book on {topic}.", {"references": [found], "debug": {"took_ms": 12}})


@tool(idempotent=True, answers=True)
def deep_research(topic: str) -> str:
    """Research a topic. The report is the answer: this tool takes control."""
    return f"Report on {topic}: they flow."


def plan(request: ModelRequest) -> list[Action] | Action:
    """Return what the orchestrator's model would do."""
    view = read_prompt(request)
    if "report" in view.incoming_text:
        return call("deep_research", topic="rivers")
    if isinstance(request.tool_choice, NamedTool):
        return call(request.tool_choice.name, topic="the Rhine")
    if view.turn == 2:
        return [call("shop_price", article="map"), call("analyst", task="Compare the Rhine with the Elbe.")]
    length = "900 km long" if view.turn == 3 else "1,233 km long [1]"
    return say(f"The Rhine is {length}. A map costs 3 EUR.")


def judge(request: ModelRequest) -> Action:
    """Return the verdict of a model that checks whether the answer follows from the results."""
    is_grounded = "1,233" in json.loads(request.messages[1].content)["answer"]
    return call("verdict", is_grounded=is_grounded, problems=[] if is_grounded else ["900 km"])


def add_quotes(answer: str, around: object) -> Answer:
    return Answer(answer, {"quotes": {"MAPS": 41.2}})


analyst = Agent("analyst", "You compare.", ScriptedModel(lambda request: "The Rhine is longer."))
suggest = ScriptedModel(lambda request: call("suggest", questions=["And the Elbe?"]))
no_promises = Rule("no_promises", "guarantee", "Promise nothing.", forbids=True)


reactions: list[str] = []


def show(event: Event) -> None:
    match event:
        case TurnStart(path=""):
            print(f"turn {event.turn} of {event.max_turns}")
            reactions.append(event.reaction)
        case Progress(is_done=False, path=""):
            print(f"  ... {event.text}")
        case ToolCallStart(path="") if event.tool != "search":
            print(f"  {event.tool} {event.arguments}")
        case AnswerReviewed(is_accepted=False):
            print(f"  not accepted: {event.correction.splitlines()[-1]}")


ann = SimpleAgentRunner(
    "ann",
    instruction="You answer from the library.",
    model=ScriptedModel(plan),
    policy=AgentPolicy(max_turns=6),  # max_loop_iterations
    middleware=[  # each manager of the orchestrator is one middleware
        ForcedTools(by_message=("search",)),  # the person chooses them
        ToolRegistry(sets={"default": [search, deep_research, agent_tool(analyst)]}),
        McpServers({"shop": ServerOptions(command=sys.executable, args=(str(PRICES),))}),
        References(),
        Evaluations(always=[no_promises], by_tool={"search": [Grounding(ScriptedModel(judge))]}),
        Postprocessors(add_quotes, FollowUps(suggest, count=1)),
        Prompts(
            facts=PromptFacts(project_name="Atlas", custom_instructions="Be brief."),
            notes={"search": ToolNotes(system_prompt="Search before you answer.")},
        ),
    ],
    on_event=show,
)


async def ask(mia: NetworkClient, text: str, **metadata: object) -> dict:
    await mia.send_text("ann", text, metadata=metadata)
    async with mia.receive() as message:
        print(f"{message.sender_id}: {message.text}")
        return message.metadata or {}


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        extra = await ask(mia, "How long is the Rhine?", forced_tools=["search"])
        print("sources:", *(f"[{source['n']}] {source['title']}" for source in extra["sources"]))
        print("passed:", ", ".join(sorted(extra["passed_checks"])))
        print("ask next:", *extra["follow_ups"])
        print("quotes:", extra["quotes"])
        records = (await mia.call("network.records", {"reaction": reactions[0]}))["records"]
        for body in (record["body"] for record in records if record["kind"] == "tool_result"):
            if debug := body.get("data", {}).get("debug"):
                print(f"debug of {body['tool']}: {debug}")
        await ask(mia, "Write a report on rivers.")


asyncio.run(main())
