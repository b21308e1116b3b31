"""An agent that continues after a kill in the middle of its work. Run it: python examples/killed_agent/killed.py

The agent runs in its own process beside a node. It charges a card (a tool that must not run twice), and is killed while
its model thinks about the answer. A second process of the agent continues: it asks the model again, but does not charge
again.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from roundelay import NetworkClient, SimpleAgentRunner, tool
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say
from roundelay.app import serve
from roundelay.network.config import NodeConfig


@tool(once=True)
def charge(amount: int) -> str:
    """Charge the card."""
    print(f"charged {amount}", flush=True)
    return f"{amount} EUR were charged"


async def run_agent(url: str, *, is_slow: bool) -> None:
    async def think(request: ModelRequest) -> Action:
        results = read_prompt(request).tool_results
        if not results:
            return call("charge", amount=40)
        if is_slow:
            print("thinks", flush=True)
            await asyncio.sleep(3600)
        return say(f"Done: {results[-1].content}.")

    till = SimpleAgentRunner(
        "till", instruction="You take payments.", model=ScriptedModel(think), tools=[charge], url=url
    )
    running = asyncio.create_task(till.run())
    await till.ready()
    print("is there", flush=True)
    await running


async def start(url: str, speed: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, __file__, url, speed, stdout=asyncio.subprocess.PIPE)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serve(NodeConfig(port=0, db=Path(folder) / "node.db")) as node:
            first = await start(node.url, "slow")
            print("first process:", (await first.stdout.readline()).decode().strip())
            async with NetworkClient("zoe", node.url, kind="human", token=node.owner_token) as zoe:
                await zoe.send_text("till", "I want to pay")
                for _ in ("charged", "thinks"):
                    print("first process:", (await first.stdout.readline()).decode().strip())
                first.kill()
                print("first process: killed")
                second = await start(node.url, "quick")
                async with zoe.receive() as answer:
                    second.terminate()
                for line in (await second.stdout.read()).decode().splitlines():
                    print("second process:", line)
                print(f"{answer.sender_id}: {answer.text}")


if __name__ == "__main__":
    asyncio.run(run_agent(sys.argv[1], is_slow=sys.argv[2] == "slow") if len(sys.argv) > 1 else main())
