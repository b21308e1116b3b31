"""The deep-research team, with one process per agent. Run it: python examples/deep_research/research.py

    research.py ["QUESTION"] [--model NAME [--base-url URL]]

Without --model the agents are scripted. The output shows their progress, then the report with its sources.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from roundelay import NetworkClient
from roundelay.agents.events import Progress, ToolCallStart
from roundelay.agents.team import ModelChoice, OpenAIChoice, build_runner, load_agents
from roundelay.app import serve
from roundelay.network.config import NodeConfig, load_yaml

TEAM = Path(__file__).with_name("team.yaml")
QUESTION = "How do bees find flowers, how do whales sing, why do leaves turn red?"


def load_team():
    return load_agents(load_yaml(TEAM).value["agents"].value)


async def run_agent(agent_id: str, url: str, model: str | None, base_url: str | None) -> None:
    def show(event) -> None:
        match event:
            case ToolCallStart():
                print(f"{agent_id}: {event.tool} {event.arguments}", flush=True)
            case Progress(is_done=False):
                print(f"{agent_id}: ... {event.text}", flush=True)

    [spec] = [it for it in load_team() if it.id == agent_id]
    if model is not None:
        spec = spec.model_copy(
            update={"model": ModelChoice(openai=OpenAIChoice(name=model, base_url=base_url, stream=True))}
        )
    runner = build_runner(spec, url=url, on_event=show)
    running = asyncio.create_task(runner.run())
    await runner.ready()
    print("ready", flush=True)
    await running


async def main(question: str, options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serve(NodeConfig(port=0, db=Path(folder) / "node.db")) as node:
            start = [sys.executable, __file__, "--url", node.url, *options, "--agent"]
            team = [
                await asyncio.create_subprocess_exec(*start, spec.id, stdout=asyncio.subprocess.PIPE)
                for spec in load_team()
            ]
            for process in team:
                await process.stdout.readline()  # the line "ready"
            pumps = [asyncio.create_task(pump(process.stdout)) for process in team]
            async with NetworkClient("zoe", node.url, kind="human", token=node.owner_token) as zoe:
                await zoe.send_text("guide", question)
                async with zoe.receive() as message:
                    answer = message
            for process in team:
                process.terminate()
                await process.wait()
            await asyncio.gather(*pumps)
            print(f"\n{answer.text}\n")
            for source in (answer.metadata or {}).get("sources", []):
                print(f"[{source['n']}] {source['title']}")


async def pump(stream: asyncio.StreamReader) -> None:
    while line := await stream.readline():
        print(line.decode(), end="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A deep-research team of five processes.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", help="a model of an OpenAI-compatible server, instead of the scripts")
    parser.add_argument("--base-url")
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agent:
        asyncio.run(run_agent(arguments.agent, arguments.url, arguments.model, arguments.base_url))
    else:
        chosen = [
            f"--{name}={value}"
            for name, value in (("model", arguments.model), ("base-url", arguments.base_url))
            if value
        ]
        asyncio.run(main(arguments.question, chosen))
